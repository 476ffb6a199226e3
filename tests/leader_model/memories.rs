//! Statements of engine memory: what ends with a memory, and what does not.

use kvferry_types::{Edge, TierId};

use super::moves::{DOWN, RATIO, Tiered, UP};
use super::*;

/// Room of host memory, in pages.
const HOST: u32 = 16;

impl Tiered {
    /// States the memory of a rank, or that it has none. Returns whether the leader accepted it; `None` without an answer.
    fn state(&mut self, rank: u16, number: u64, memory: Option<WorkerMemory>) -> Option<bool> {
        self.admitted.clear();
        self.step(LeaderEvent::Memory(MemoryStatement {
            worker: worker(0, rank),
            number: MemoryId(number),
            memory,
        }));
        match self.admitted[..] {
            [] => None,
            [(stated_by, answered, admitted)] => {
                assert_eq!((stated_by, answered), (worker(0, rank), MemoryId(number)));
                Some(admitted)
            }
            _ => unreachable!("answered twice: {:?}", self.admitted),
        }
    }

    /// Every rank states the engine's memory, or that it has none.
    fn state_all(&mut self, number: u64, present: bool) {
        for rank in 0..RANKS {
            let memory = present.then(|| self.memory(HOST));
            assert_eq!(self.state(rank, number, memory), Some(true), "rank {rank}");
        }
    }

    pub(super) fn ready(&self, tier: TierId) -> u32 {
        let pool = self.leader.pool_of(tier);
        pool.map_or(0, |pool| pool.page_states().ready)
    }
}

#[test]
fn moves_outlive_the_memory_of_an_engine_and_begin_without_one() {
    let mut tiered = Tiered::new(HOST, &[DOWN]);
    tiered.stored(0);
    let first = tiered.take(DOWN);
    assert_eq!(first.len(), 1);
    tiered.state_all(100, false);
    assert!(
        tiered.leader.pool_of(TierId::Host).is_some(),
        "an engine may come back"
    );
    first.iter().for_each(|one| tiered.end(one, RATIO, false));
    assert_eq!(
        tiered.ready(TierId::Disk),
        RATIO,
        "the move was not disturbed"
    );
    tiered.state_all(101, true);
    assert_eq!(tiered.lookup(0), RATIO);

    // A store whose copy has ended, and an engine that leaves before its pages are moved.
    let mut tiered = Tiered::new(HOST, &[DOWN]);
    for name in [0, 2] {
        tiered.stored(name);
    }
    tiered.state_all(100, false);
    assert_eq!(tiered.end_all(DOWN), 2);
    assert_eq!(tiered.ready(TierId::Disk), 2 * RATIO);
}

/// Copies of a rank's memory end with the memory, also where the other ranks still copy.
#[test]
fn loads_and_stores_end_before_other_memory_is_used() {
    let mut tiered = Tiered::new(HOST, &[DOWN]);
    tiered.stored(0);
    let moves = tiered.take(DOWN);
    assert_eq!(tiered.lookup(0), RATIO);
    let load = tiered.load(0);
    let copies = tiered.take(Edge::LOAD);
    assert_eq!(copies.len(), 1);
    let memory = tiered.memory(HOST);
    assert_eq!(tiered.state(0, 100, Some(memory)), Some(true));
    for rank in 1..RANKS {
        assert_eq!(tiered.answered(load), None, "rank {rank} may still write");
        tiered.report(rank, &copies[0], true, RATIO, false);
    }
    assert_eq!(tiered.answered(load), Some(Err(Refusal::CopyFailed(1))));
    // A late report of the rank changes nothing.
    tiered.report(0, &copies[0], true, RATIO, false);
    moves.iter().for_each(|one| tiered.end(one, RATIO, false));
    assert_eq!(tiered.ready(TierId::Disk), RATIO);
    assert_eq!(tiered.lookup(0), RATIO, "the pages are still there");
}

#[test]
fn statements_that_are_late_or_repeated_change_nothing() {
    let mut tiered = Tiered::new(HOST, &[DOWN]);
    let memory = || Some(Tiered::new(HOST, &[]).memory(HOST));
    assert_eq!(tiered.state(0, 100, memory()), Some(true));
    tiered.stored(0);
    assert_eq!(tiered.lookup(0), RATIO);
    let load = tiered.load(0);
    assert_eq!(
        tiered.state(0, 100, memory()),
        Some(true),
        "the same answer"
    );
    assert_eq!(tiered.state(0, 99, None), None, "an older one");
    assert_eq!(tiered.end_all(Edge::LOAD), 1);
    assert!(matches!(tiered.answered(load), Some(Ok(Answer::Load(_)))));
    // A worker that is lost states nothing before it has attached again, whatever the number.
    tiered.step(LeaderEvent::WorkerLost(worker(0, 0)));
    assert_eq!(tiered.state(0, 200, memory()), Some(false));
    assert_eq!(tiered.state(0, 100, memory()), Some(false));
    assert!(!tiered.leader.is_attached(worker(0, 0)));
}

#[test]
fn refused_memory_leaves_its_worker_for_moves() {
    let mut tiered = Tiered::new(HOST, &[DOWN]);
    tiered.stored(0);
    let moves = tiered.take(DOWN);
    let other = GroupGeometry {
        page_bytes: 2 * geometry().page_bytes,
        ..geometry()
    };
    let other = WorkerMemory {
        geometry: other.into(),
        ..tiered.memory(HOST)
    };
    assert_eq!(tiered.state(0, 100, Some(other)), Some(false));
    assert!(!tiered.leader.is_attached(worker(0, 0)), "without memory");
    moves.iter().for_each(|one| tiered.end(one, RATIO, false));
    assert_eq!(tiered.ready(TierId::Disk), RATIO);
    // The same number again gets the same answer; the next one may be accepted.
    let memory = tiered.memory(HOST);
    assert_eq!(tiered.state(0, 100, Some(memory.clone())), Some(false));
    assert_eq!(tiered.state(0, 101, Some(memory)), Some(true));
    assert_eq!(tiered.lookup(0), RATIO);
}

/// An engine with pages of another size ends the pools, and the moves in them, before its pages are read.
#[test]
fn memory_of_another_page_size_cancels_moves_and_awaits_them() {
    let mut tiered = Tiered::new(HOST, &[DOWN, UP]);
    tiered.stored(0);
    let moves = tiered.take(DOWN);
    tiered.state_all(100, false);
    tiered.geometry = GroupGeometry {
        page_bytes: geometry().page_bytes / 2,
        layout_fingerprint: [9; 16],
        ..geometry()
    }
    .into();
    tiered.state_all(101, true);
    for tier in [TierId::Host, TierId::Disk] {
        assert!(
            tiered.leader.pool_of(tier).is_none(),
            "{tier} has pages of the old size"
        );
        assert!(!tiered.leader.is_reading(tier), "a move may still write");
    }
    moves.iter().for_each(|one| tiered.end(one, RATIO, false));
    for tier in [TierId::Host, TierId::Disk] {
        assert_eq!(tiered.ready(tier), 0);
        assert!(tiered.leader.pool_of(tier).is_some());
    }
    assert_eq!(tiered.lookup(0), 0);
}

#[test]
fn a_disk_that_a_rank_loses_closes_alone_and_opens_with_the_pages_that_it_has_then() {
    let mut tiered = Tiered::new(HOST, &[DOWN, UP]);
    tiered.stored(0);
    assert!(tiered.end_all(DOWN) > 0);
    let in_host_memory = tiered.ready(TierId::Host);
    assert!(tiered.ready(TierId::Disk) > 0);
    let state = |tiered: &mut Tiered, number, disk| {
        let memory = tiered.memory_with(HOST, disk);
        assert_eq!(tiered.state(0, number, Some(memory)), Some(true));
    };
    state(&mut tiered, 10, 0);
    assert!(
        tiered.leader.pool_of(TierId::Disk).is_none(),
        "no rank's pages are whole"
    );
    assert!(!tiered.leader.is_reading(TierId::Disk));
    assert_eq!(
        tiered.ready(TierId::Host),
        in_host_memory,
        "served as before"
    );
    assert_eq!(tiered.lookup(0), RATIO);
    // A disk with less room than before.
    state(&mut tiered, 11, 40);
    let key = tiered.leader.tier_key(TierId::Disk).map(|key| key.pages);
    assert_eq!(key, Some(40), "the smallest one determines the pages");
    assert_eq!(tiered.ready(TierId::Host), in_host_memory);
}

/// One of two workers of a shard has the disk open. After the end of its process the tier is closed, until the other
/// worker has opened the disk and states its pages.
#[test]
fn a_disk_closes_with_the_process_that_had_it_open_although_another_replica_is_complete() {
    let ratio = Ratio::new(RATIO).expect("in bounds");
    let mut settings = LeaderSettings::new(EPOCH, 1, ratio, AnchorKey::new([3; 32]));
    settings.tiers = vec![TierId::Host, TierId::Disk];
    settings.replicas = 2;
    let mut leader = Leader::new(settings);
    let mut step = |event: LeaderEvent| {
        let (mut events, mut parts) = (vec![event], 0);
        while let Some(event) = events.pop() {
            let mut effects = Vec::new();
            leader.step(Time(0), event, &mut effects);
            leader.check().expect("the second count agrees");
            for effect in effects {
                if let LeaderEffect::ReadInventory {
                    worker,
                    depot,
                    read_id,
                    from,
                    ..
                } = effect
                {
                    parts += u32::from(depot == DepotId(20));
                    events.push(LeaderEvent::Inventory {
                        worker,
                        depot,
                        read_id,
                        from,
                        next: None,
                        records: Vec::new(),
                    });
                }
            }
        }
        let pages = leader.tier_key(TierId::Disk).map(|key| key.pages);
        (
            pages,
            parts,
            leader.tier_key(TierId::Host).map(|key| key.pages),
        )
    };
    let memory = |replica: u8, disk| WorkerMemory {
        engine: engine_id(replica + 1),
        geometry: geometry().into(),
        arena_pages: [(TierId::Host, HOST), (TierId::Disk, disk)]
            .into_iter()
            .collect(),
    };
    for (replica, disk) in [(0, 64), (1, 0)] {
        let depots = [(TierId::Host, 10), (TierId::Disk, 20)].map(|(tier, id)| {
            let named = kvferry_core::AttachedDepot {
                depot: DepotId(id),
                epoch: Epoch(0),
            };
            (tier, named)
        });
        let attach = AttachRequest {
            worker: worker(replica, 0),
            ranks: 1,
            shards: 1,
            attach: AttachId(1),
            depots: depots.into_iter().collect(),
        };
        for event in LeaderEvent::arrival(attach, memory(replica, disk)) {
            step(event);
        }
    }
    assert_eq!(step(LeaderEvent::Tick), (Some(64), 0, Some(HOST)));
    // A connection that breaks is not the end of the process.
    step(LeaderEvent::WorkerLost(worker(0, 0)));
    assert_eq!(step(LeaderEvent::Tick), (Some(64), 0, Some(HOST)));
    step(LeaderEvent::WorkerDead(worker(0, 0)));
    let (pages, _, host) = step(LeaderEvent::Tick);
    assert!(pages.is_none_or(|pages| pages == 0), "{pages:?}");
    assert_eq!(host, Some(HOST), "host memory serves as before");
    let stated = MemoryStatement {
        worker: worker(1, 0),
        number: MemoryId(9),
        memory: Some(memory(1, 64)),
    };
    let (pages, parts, _) = step(LeaderEvent::Memory(stated));
    assert_eq!((pages, parts), (Some(64), 1), "its list is read again");
}
