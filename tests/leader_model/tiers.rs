//! Statements of the tiers below host memory: a disk opens, fails and comes back while an engine has requests.

use kvferry_core::{AttachedDepot, Model, TiersStatement};
use kvferry_types::{Edge, Part, PerTier, StoreAnswer, TierId};

use super::moves::{DOWN, RATIO, Tiered};
use super::*;

/// A worker states the pages of its disk.
fn state(tiered: &mut Tiered, rank: u16, number: u64, pages: u32) {
    let model = Model::new(tiered.geometry.clone()).expect("a model");
    let pages: PerTier<u32> = [(TierId::Disk, pages)].into_iter().collect();
    tiered.step(LeaderEvent::Tiers(TiersStatement {
        worker: worker(0, rank),
        number: MemoryId(number),
        layout: model.tier_layout(),
        pages,
    }));
}

/// The disks of all ranks have this many pages from now on.
fn state_all(tiered: &mut Tiered, number: u64, pages: u32) {
    (0..RANKS).for_each(|rank| state(tiered, rank, number, pages));
}

fn store(tiered: &mut Tiered, name: u8) -> RequestId {
    tiered.lookup(name);
    let store = Request::Store {
        slot: SlotId(name.into()),
        parts: vec![Part::new(GroupId(0), 0, PageList::run(0, RATIO))],
        more: None,
        after: RequestId(0),
    };
    assert_eq!(tiered.request(store), None);
    tiered.last_request()
}

#[test]
fn stores_and_loads_go_on_while_a_disk_opens_and_closes() {
    let mut tiered = Tiered::new(64, &[DOWN]);
    tiered.stored(0);
    tiered.end_all(DOWN);
    for (number, pages) in [(100, 0), (101, 64), (102, 32), (103, 64)] {
        let name = 10 * (number - 99) as u8;
        let stored = store(&mut tiered, name);
        assert_eq!(tiered.lookup(0), RATIO);
        let load = tiered.load(0);
        state_all(&mut tiered, number, pages);
        // A move that was under way ends before the disk is opened anew.
        tiered.end_all(DOWN);
        assert_eq!(tiered.leader.pool_of(TierId::Disk).is_some(), pages > 0);
        assert_eq!(tiered.answered(stored), None, "its copies go on");
        assert_eq!(tiered.answered(load), None, "and those of the load");
        assert_eq!(tiered.end_all(Edge::STORE), 1);
        assert_eq!(tiered.end_all(Edge::LOAD), 1);
        let whole = StoreAnswer {
            stored_pages: RATIO,
            present_pages: 0,
            refused_pages: 0,
            failed_pages: 0,
        };
        assert_eq!(tiered.answered(stored), Some(Ok(Answer::Store(whole))));
        let loaded = LoadAnswer { pages: RATIO };
        assert_eq!(tiered.answered(load), Some(Ok(Answer::Load(loaded))));
        while tiered.end_all(DOWN) > 0 {}
    }
}

#[test]
fn a_repeated_statement_is_answered_again_and_an_older_one_has_no_effect() {
    let mut tiered = Tiered::new(64, &[DOWN]);
    let answered = |tiered: &Tiered| tiered.tiers_admitted.len() - usize::from(RANKS);
    state_all(&mut tiered, 100, 32);
    let pages = |tiered: &Tiered| tiered.leader.tier_key(TierId::Disk).map(|key| key.pages);
    assert_eq!((pages(&tiered), answered(&tiered)), (Some(32), 0));
    state(&mut tiered, 0, 100, 16);
    assert_eq!((pages(&tiered), answered(&tiered)), (Some(32), 1));
    state(&mut tiered, 0, 99, 16);
    assert_eq!((pages(&tiered), answered(&tiered)), (Some(32), 1));
    assert!(tiered.tiers_admitted.iter().all(|(.., known)| *known));
    // A memory statement that was overtaken.
    let memory = Some(tiered.memory_with(64, 8));
    tiered.step(LeaderEvent::Memory(MemoryStatement {
        worker: worker(0, 0),
        number: MemoryId(98),
        memory,
    }));
    assert_eq!(pages(&tiered), Some(32));
}

#[test]
fn a_worker_that_is_not_attached_states_no_tiers() {
    let mut tiered = Tiered::new(64, &[DOWN]);
    tiered.step(LeaderEvent::WorkerLost(worker(0, 0)));
    state(&mut tiered, 0, 100, 8);
    assert_eq!(
        tiered.tiers_admitted,
        [(worker(0, 0), MemoryId(100), false)]
    );
    let key = tiered.leader.tier_key(TierId::Disk);
    assert_eq!(key.map(|key| key.pages), Some(64));
}

/// A disk that closes refuses to list its pages. The leader must not wait for that reading until it ends the worker.
#[test]
fn a_reading_of_a_disk_is_over_when_the_disk_closes_and_begins_anew_when_it_is_back() {
    let mut tiered = Tiered::new(64, &[DOWN]);
    state_all(&mut tiered, 100, 0);
    tiered.reads = Some(Vec::new());
    state_all(&mut tiered, 101, 64);
    assert_eq!(
        tiered.reads.as_ref().map(Vec::len),
        Some(usize::from(RANKS))
    );
    assert!(tiered.leader.has_unanswered_read(worker(0, 0)));
    state(&mut tiered, 0, 102, 0);
    assert!(!tiered.leader.has_unanswered_read(worker(0, 0)));
    assert!(!tiered.leader.is_reading(TierId::Disk));
    for _ in 0..10 {
        tiered.now = tiered.now + Duration::from_secs(3);
        // The other worker answers, late.
        for read in tiered.reads.take().into_iter().flatten() {
            tiered.step(read);
        }
        tiered.step(LeaderEvent::Tick);
    }
    assert_eq!(tiered.fenced, []);
    state(&mut tiered, 0, 103, 64);
    assert!(tiered.leader.pool_of(TierId::Disk).is_some());
}

/// The attach request of a rank with its disk, and with this depot in host memory.
fn attach_request(rank: u16, host: u128) -> AttachRequest {
    let depot = |id: u128| AttachedDepot {
        depot: DepotId(id + u128::from(rank)),
        epoch: Epoch(0),
    };
    let depots = [(TierId::Host, depot(host)), (TierId::Disk, depot(20))];
    AttachRequest {
        worker: worker(0, rank),
        ranks: RANKS,
        shards: RANKS,
        attach: AttachId(1),
        depots: depots.into_iter().collect(),
    }
}

/// A rank arrives again with its engine.
fn arrive(tiered: &mut Tiered, rank: u16, host: u128) {
    let memory = tiered.memory(64);
    for event in LeaderEvent::arrival(attach_request(rank, host), memory) {
        tiered.step(event);
    }
}

/// A rank of the engine arrives again, without an engine.
fn arrive_idle(tiered: &mut Tiered, rank: u16) {
    tiered.step(LeaderEvent::Attach(attach_request(rank, 10)));
    tiered.step(LeaderEvent::Memory(MemoryStatement {
        worker: worker(0, rank),
        number: MemoryId(1),
        memory: None,
    }));
}

/// What a leader knows of a disk ends with the process that had it open: its last pages may not be listed.
#[test]
fn a_worker_that_was_started_again_without_its_engine_opens_its_disk_and_a_flush_is_carried_out() {
    let mut tiered = Tiered::new(64, &[DOWN]);
    tiered.stored(0);
    assert_eq!(tiered.end_all(DOWN), 1);
    tiered.stored(10);
    tiered.stored(20);
    tiered.step(LeaderEvent::WorkerDead(worker(0, 1)));
    tiered.end_all(DOWN);
    assert!(tiered.leader.pool_of(TierId::Disk).is_none());
    for rank in 0..RANKS {
        tiered.step(LeaderEvent::Memory(MemoryStatement {
            worker: worker(0, rank),
            number: MemoryId(90),
            memory: None,
        }));
    }
    assert_eq!(tiered.opened, [], "the others have it open");
    arrive_idle(&mut tiered, 1);
    assert_eq!(tiered.opened, [(worker(0, 1), true)]);
    tiered.now = tiered.now + Duration::from_secs(3);
    tiered.step(LeaderEvent::Tick);
    assert_eq!(tiered.opened.len(), 2, "the order may be lost");
    assert_eq!(tiered.request(Request::Flush), Some(Err(Refusal::NotOpen)));
    state(&mut tiered, 1, 2, 64);
    assert!(tiered.leader.pool_of(TierId::Disk).is_some());
    // The list of the disk is empty here: all three blocks are written again.
    let deadline = tiered.now + Duration::from_secs(5);
    assert_eq!(tiered.request_until(deadline, Request::Flush), None);
    let request = tiered.last_request();
    while tiered.end_all(DOWN) > 0 {}
    for (worker, id) in std::mem::take(&mut tiered.flushes) {
        let epoch = EPOCH;
        tiered.step(LeaderEvent::TierFlushed { worker, epoch, id });
    }
    assert!(matches!(
        tiered.answered(request),
        Some(Ok(Answer::Flush(_)))
    ));
    tiered.now = tiered.now + Duration::from_secs(30);
    tiered.step(LeaderEvent::Tick);
    assert_eq!(tiered.opened.len(), 2, "it is open");
}

/// Each block that was stored is written to the disk, waits for that, or is counted as gone.
#[test]
fn blocks_that_leave_host_memory_before_a_slow_disk_takes_them_are_counted() {
    let mut tiered = Tiered::new(64, &[DOWN]);
    let counts = |tiered: &Tiered| {
        let waiting = tiered.leader.moves_under_way().1 as u64;
        (waiting, tiered.leader.counts().moves_gone)
    };
    // Four moves run and end nothing, and host memory has room for eight blocks.
    (0..8).for_each(|name| tiered.stored(10 * name));
    assert_eq!(counts(&tiered), (4, 0));
    (8..12).for_each(|name| tiered.stored(10 * name));
    let mut written = 0;
    loop {
        let ended = tiered.end_all(DOWN) as u64;
        written += ended;
        let (waiting, gone) = counts(&tiered);
        assert!(written + waiting + gone <= 12);
        if ended == 0 {
            break;
        }
    }
    assert_eq!((written, counts(&tiered)), (8, (0, 4)));
    assert_eq!(tiered.ready(TierId::Disk), 8 * RATIO);
    // Host memory is lost with the workers.
    (12..20).for_each(|name| tiered.stored(10 * name));
    assert_eq!(counts(&tiered), (4, 4));
    for rank in 0..RANKS {
        tiered.step(LeaderEvent::WorkerDead(worker(0, rank)));
    }
    // Those that were being written wait again.
    assert_eq!(counts(&tiered), (8, 4));
    for rank in 0..RANKS {
        arrive(&mut tiered, rank, 500);
    }
    assert_eq!(counts(&tiered), (0, 12));
}
