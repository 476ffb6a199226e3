//! Two tiers: pages that are new in host memory are written to the disk, and a load has pages promoted from there.

use kvferry_core::{AttachedDepot, MoveEdge};
use kvferry_types::{Edge, FlushId, MemoryGeometry, Part, PerTier, ResetId, TierId, Transfer};

use super::*;

pub(super) const DOWN: Edge = Edge {
    from: TierId::Host,
    to: TierId::Disk,
};
pub(super) const UP: Edge = Edge {
    from: TierId::Disk,
    to: TierId::Host,
};
pub(super) const RATIO: u32 = 8;

/// A leader with the ranks of one engine, each with a shard of its own, whose transfers are ended one by one.
pub(super) struct Tiered {
    pub(super) leader: Leader,
    pub(super) geometry: MemoryGeometry,
    pub(super) now: Time,
    last_request: u64,
    open: Vec<Transfer>,
    answers: BTreeMap<RequestId, Reply>,
    /// Orders to remove pages from inventories: the worker, the reset and the tier.
    pub(super) invalidations: Vec<(WorkerId, ResetId, Option<TierId>)>,
    /// Orders to make a tier durable: the worker and the flush.
    pub(super) flushes: Vec<(WorkerId, FlushId)>,
    /// Answers to statements of memories: the worker, the number, and whether the memory is used.
    pub(super) admitted: Vec<(WorkerId, MemoryId, bool)>,
    /// The same for statements of tiers.
    pub(super) tiers_admitted: Vec<(WorkerId, MemoryId, bool)>,
    /// Answers to requests to read inventories, if they are kept, and not given at once.
    pub(super) reads: Option<Vec<LeaderEvent>>,
    /// Orders to workers without an engine: to open their tiers, or to close them.
    pub(super) opened: Vec<(WorkerId, bool)>,
    /// Workers that were fenced.
    pub(super) fenced: Vec<WorkerId>,
}

impl Tiered {
    /// `host` pages of host memory, and 64 pages on the disk. With `moves`, pages are moved over these edges.
    pub(super) fn new(host: u32, moves: &[Edge]) -> Self {
        Self::of(geometry().into(), host, moves, false)
    }

    /// Like `new`, for an engine with memory of this geometry, with or without an index of pages.
    pub(super) fn of(
        geometry: MemoryGeometry,
        host: u32,
        moves: &[Edge],
        page_index: bool,
    ) -> Self {
        let index = |settings: &mut LeaderSettings| settings.page_index = page_index;
        Self::with(geometry, host, moves, index)
    }

    /// Like `new`, with other changes of the settings.
    pub(super) fn with(
        geometry: MemoryGeometry,
        host: u32,
        moves: &[Edge],
        change: impl FnOnce(&mut LeaderSettings),
    ) -> Self {
        let ratio = Ratio::new(RATIO).expect("in bounds");
        let mut settings = LeaderSettings::new(EPOCH, RANKS, ratio, AnchorKey::new([3; 32]));
        settings.tiers = vec![TierId::Host, TierId::Disk];
        settings.moves = moves
            .iter()
            .map(|edge| MoveEdge {
                edge: *edge,
                running_max: 4,
                deadline: Duration::from_secs(60),
            })
            .collect();
        change(&mut settings);
        let mut tiered = Self {
            leader: Leader::new(settings),
            geometry,
            now: Time(0),
            last_request: 0,
            open: Vec::new(),
            answers: BTreeMap::new(),
            invalidations: Vec::new(),
            flushes: Vec::new(),
            admitted: Vec::new(),
            tiers_admitted: Vec::new(),
            reads: None,
            opened: Vec::new(),
            fenced: Vec::new(),
        };
        (0..RANKS).for_each(|rank| tiered.attach(rank, host, 0));
        assert!(
            tiered.leader.pool_of(TierId::Disk).is_some(),
            "both tiers are open"
        );
        tiered
    }

    /// Attaches a rank. `disk` is added to the id of its depot on the disk.
    pub(super) fn attach(&mut self, rank: u16, host: u32, disk: u128) {
        let depot = |id: u128| AttachedDepot {
            depot: DepotId(id + u128::from(rank)),
            epoch: Epoch(0),
        };
        let depots = [(TierId::Host, depot(10)), (TierId::Disk, depot(20 + disk))];
        self.last_request += 1;
        let arrival = LeaderEvent::arrival(
            AttachRequest {
                worker: worker(0, rank),
                ranks: RANKS,
                shards: RANKS,
                attach: AttachId(self.last_request),
                depots: depots.into_iter().collect(),
            },
            self.memory(host),
        );
        for event in arrival {
            self.step(event);
        }
    }

    /// The engine's memory, beside a depot of `host` pages in host memory.
    pub(super) fn memory(&self, host: u32) -> WorkerMemory {
        self.memory_with(host, 64)
    }

    /// The same, beside a disk of this many pages.
    pub(super) fn memory_with(&self, host: u32, disk: u32) -> WorkerMemory {
        let pages = [(TierId::Host, host), (TierId::Disk, disk)];
        WorkerMemory {
            engine: engine_id(1),
            geometry: self.geometry.clone(),
            arena_pages: pages.into_iter().collect::<PerTier<u32>>(),
        }
    }

    /// Handles an event; inventories are empty, and transfers stay open.
    pub(super) fn step(&mut self, event: LeaderEvent) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            let mut effects = Vec::new();
            self.leader.step(self.now, event, &mut effects);
            self.leader.check().expect("the second count agrees");
            for effect in effects {
                match effect {
                    LeaderEffect::Transfer { workers, transfer } => {
                        assert_eq!(
                            workers.len(),
                            usize::from(RANKS),
                            "one worker of each shard"
                        );
                        self.open.push(transfer);
                    }
                    LeaderEffect::Answer { id, answer, .. } => {
                        self.answers.insert(id, answer);
                    }
                    LeaderEffect::AdmitMemory {
                        worker,
                        number,
                        verdict,
                    } => self.admitted.push((worker, number, verdict.is_ok())),
                    LeaderEffect::AdmitTiers {
                        worker,
                        number,
                        verdict,
                    } => self.tiers_admitted.push((worker, number, verdict.is_ok())),
                    LeaderEffect::FenceWorker(worker) => self.fenced.push(worker),
                    LeaderEffect::Invalidate {
                        worker, id, tier, ..
                    } => self.invalidations.push((worker, id, tier)),
                    LeaderEffect::FlushTier { worker, id, .. } => self.flushes.push((worker, id)),
                    LeaderEffect::OpenTiers { worker, layout } => {
                        self.opened.push((worker, layout.is_some()));
                    }
                    LeaderEffect::ReadInventory {
                        worker,
                        depot,
                        read_id,
                        from,
                        ..
                    } => {
                        let answer = LeaderEvent::Inventory {
                            worker,
                            depot,
                            read_id,
                            from,
                            next: None,
                            records: Vec::new(),
                        };
                        match &mut self.reads {
                            Some(kept) => kept.push(answer),
                            None => events.push(answer),
                        }
                    }
                    _ => {}
                }
            }
        }
    }

    pub(super) fn request(&mut self, request: Request) -> Option<Reply> {
        self.request_until(Time(5_000_000_000), request)
    }

    pub(super) fn request_until(&mut self, deadline: Time, request: Request) -> Option<Reply> {
        self.last_request += 1;
        let id = RequestId(self.last_request);
        self.step(LeaderEvent::Request {
            engine: engine_id(1),
            id,
            deadline,
            request,
        });
        self.answers.get(&id).cloned()
    }

    pub(super) fn lookup(&mut self, name: u8) -> u32 {
        let answer = self.request(Request::Lookup {
            slot: SlotId(name.into()),
            namespace: vec![7],
            hashes: sequence(name, RATIO as usize),
            have_pages: 0,
            limit_pages: None,
        });
        match answer {
            Some(Ok(Answer::Lookup(found))) => found.hit_pages,
            other => unreachable!("{other:?}"),
        }
    }

    /// Stores a block of a sequence, and ends its copy.
    pub(super) fn stored(&mut self, name: u8) {
        self.lookup(name);
        let answer = self.request(Request::Store {
            slot: SlotId(name.into()),
            parts: vec![Part::new(GroupId(0), 0, PageList::run(0, RATIO))],
            more: None,
            after: RequestId(0),
        });
        assert_eq!(answer, None);
        let copies = self.take(Edge::STORE);
        copies.iter().for_each(|copy| self.end(copy, RATIO, false));
    }

    /// The answer to a request.
    pub(super) fn answered(&self, id: RequestId) -> Option<Reply> {
        self.answers.get(&id).cloned()
    }

    /// The id of the last request.
    pub(super) fn last_request(&self) -> RequestId {
        RequestId(self.last_request)
    }

    /// The answer to the last request.
    pub(super) fn answer(&self) -> Option<Reply> {
        self.answers.get(&RequestId(self.last_request)).cloned()
    }

    pub(super) fn load(&mut self, name: u8) -> RequestId {
        self.load_until(Time(5_000_000_000), name)
    }

    fn load_until(&mut self, deadline: Time, name: u8) -> RequestId {
        let load = Request::Load {
            slot: SlotId(name.into()),
            parts: vec![Part::new(GroupId(0), 0, PageList::run(0, RATIO))],
            after: RequestId(0),
        };
        let answer = self.request_until(deadline, load);
        assert_eq!(answer, None);
        RequestId(self.last_request)
    }

    /// The open transfers of an edge.
    pub(super) fn take(&mut self, edge: Edge) -> Vec<Transfer> {
        let open = std::mem::take(&mut self.open);
        let (taken, left) = open.into_iter().partition(|transfer| transfer.edge == edge);
        self.open = left;
        taken
    }

    /// Ends a transfer on all ranks: complete, or after `pages` pages on the last one.
    pub(super) fn end(&mut self, transfer: &Transfer, pages: u32, bad_source: bool) {
        let whole: u64 = transfer.pairs.iter().map(|pair| pair.src.pages()).sum();
        for rank in 0..RANKS {
            let last = rank + 1 == RANKS;
            let complete = !last || u64::from(pages) >= whole;
            self.report(rank, transfer, complete, pages, bad_source && last);
        }
    }

    pub(super) fn report(
        &mut self,
        rank: u16,
        transfer: &Transfer,
        complete: bool,
        pages: u32,
        bad: bool,
    ) {
        let ended = EndedCopy {
            complete_pages: pages,
            bytes: 64,
            copy_us: 1,
            bad_source: bad,
            ..EndedCopy::new(transfer.id, complete)
        };
        self.step(LeaderEvent::Ended {
            worker: worker(0, rank),
            epoch: EPOCH,
            copies: vec![ended],
        });
    }

    /// Ends the open transfers of an edge completely. Returns their number.
    pub(super) fn end_all(&mut self, edge: Edge) -> usize {
        let transfers = self.take(edge);
        transfers
            .iter()
            .for_each(|transfer| self.end(transfer, RATIO, false));
        transfers.len()
    }

    /// Stores `name`, writes it to the disk, and evicts it from host memory by storing others.
    pub(super) fn on_disk_only(&mut self, name: u8) {
        self.stored(name);
        assert_eq!(self.end_all(DOWN), 1);
        for other in [20, 22] {
            self.stored(other);
            self.end_all(DOWN);
        }
        let host = self.leader.pool().expect("it serves");
        let first = sequence(name, 1).fingerprint(0);
        assert!(
            host.view().all(|block| block.fingerprints[0] != first),
            "evicted"
        );
    }
}

#[test]
fn new_pages_are_written_to_the_disk_and_readable_there_after_every_shard_has_them() {
    let mut tiered = Tiered::new(16, &[DOWN]);
    tiered.stored(0);
    let moves = tiered.take(DOWN);
    let [down] = &moves[..] else {
        unreachable!("{moves:?}")
    };
    assert_eq!(down.device, None);
    assert!(down.record.is_some(), "the disk lists what it holds");
    let ready = |tiered: &Tiered| {
        let disk = tiered.leader.pool_of(TierId::Disk).expect("it serves");
        disk.page_states().ready
    };
    for rank in 0..RANKS {
        assert_eq!(ready(&tiered), 0, "a shard is missing");
        tiered.report(rank, down, true, RATIO, false);
    }
    assert_eq!(ready(&tiered), RATIO);
    for other in [20, 22] {
        tiered.stored(other);
        tiered.end_all(DOWN);
    }
    tiered.stored(0);
    assert_eq!(tiered.take(DOWN), [], "the disk has these pages");
}

#[test]
fn a_load_has_its_pages_promoted_and_is_answered_when_they_are_copied() {
    let mut tiered = Tiered::new(16, &[DOWN]);
    tiered.on_disk_only(0);
    assert_eq!(tiered.lookup(0), RATIO, "found on the disk");
    assert_eq!(tiered.take(UP), [], "no edge fetches pages before a load");
    let load = tiered.load(0);
    assert_eq!(
        tiered.take(Edge::LOAD),
        [],
        "the pages are not in host memory"
    );
    assert_eq!(tiered.end_all(UP), 1);
    assert_eq!(tiered.answers.get(&load), None);
    assert_eq!(tiered.end_all(Edge::LOAD), 1);
    let pages = LoadAnswer { pages: RATIO };
    assert_eq!(tiered.answers.get(&load), Some(&Ok(Answer::Load(pages))));
}

#[test]
fn a_lookup_fetches_pages_where_an_edge_leads_up_and_the_load_finds_them() {
    let mut tiered = Tiered::new(16, &[DOWN, UP]);
    tiered.on_disk_only(0);
    assert_eq!(tiered.lookup(0), RATIO);
    assert_eq!(tiered.end_all(UP), 1);
    let load = tiered.load(0);
    assert_eq!(tiered.take(UP), [], "promoted before");
    assert_eq!(tiered.end_all(Edge::LOAD), 1);
    assert!(matches!(tiered.answers.get(&load), Some(Ok(_))));
}

#[test]
fn a_block_on_the_disk_is_not_fetched_for_pages_that_host_memory_serves() {
    let mut tiered = Tiered::new(16, &[DOWN, UP]);
    for name in [0, 20] {
        tiered.stored(name);
        assert_eq!(tiered.end_all(DOWN), 1);
    }
    // Evicts the end of the first block from host memory.
    tiered.lookup(22);
    tiered.request(Request::Store {
        slot: SlotId(22),
        parts: vec![Part::new(GroupId(0), 0, PageList::run(0, 2))],
        more: None,
        after: RequestId(0),
    });
    assert_eq!(tiered.end_all(Edge::STORE), 1);
    tiered.end_all(DOWN);
    for (limit, below, moves) in [(4, 0, 0), (RATIO, RATIO - 6, 1)] {
        let answer = tiered.request(Request::Lookup {
            slot: SlotId(0),
            namespace: vec![7],
            hashes: sequence(0, RATIO as usize),
            have_pages: 0,
            limit_pages: Some(limit),
        });
        let Some(Ok(Answer::Lookup(found))) = answer else {
            unreachable!("{answer:?}")
        };
        assert_eq!((found.hit_pages, found.below_pages.disk), (limit, below));
        assert_eq!(tiered.take(UP).len(), moves, "for {limit} pages");
    }
}

/// The transfer that a load waits for may be another's, with a later deadline.
#[test]
fn a_load_does_not_wait_for_promotions_after_its_deadline() {
    let mut tiered = Tiered::new(16, &[DOWN, UP]);
    tiered.on_disk_only(0);
    assert_eq!(tiered.lookup(0), RATIO);
    let fetched = tiered.take(UP);
    let load = tiered.load(0);
    assert_eq!(
        tiered.take(UP),
        [],
        "the load waits for the pages that are fetched"
    );
    tiered.now = Time(4_999_999_999);
    tiered.step(LeaderEvent::Tick);
    assert_eq!(tiered.answers.get(&load), None);
    tiered.now = Time(5_000_000_000);
    assert_eq!(tiered.leader.next_timeout(), Some(tiered.now));
    tiered.step(LeaderEvent::Tick);
    let refused = tiered.answers.get(&load).cloned();
    assert_eq!(refused, Some(Err(Refusal::NotLoaded)));
    fetched.iter().for_each(|one| tiered.end(one, RATIO, false));
    assert_eq!(tiered.take(Edge::LOAD), [], "it was answered");
}

#[test]
fn two_loads_of_the_same_pages_share_one_promotion() {
    let mut tiered = Tiered::new(16, &[DOWN]);
    tiered.on_disk_only(0);
    assert_eq!(tiered.lookup(0), RATIO);
    let first = tiered.load(0);
    assert_eq!(tiered.lookup(0), RATIO);
    let second = tiered.load(0);
    assert_eq!(tiered.end_all(UP), 1);
    assert_eq!(tiered.end_all(Edge::LOAD), 2);
    for load in [first, second] {
        assert!(matches!(tiered.answers.get(&load), Some(Ok(_))), "{load}");
    }
}

/// A promotion has the deadline of the load that ordered it. Another load that waits for it has its pages promoted again.
#[test]
fn a_load_outlives_the_promotion_that_another_load_ordered() {
    let mut tiered = Tiered::new(16, &[DOWN]);
    tiered.on_disk_only(0);
    assert_eq!(tiered.lookup(0), RATIO);
    let first = tiered.load_until(Time(1_000), 0);
    assert_eq!(tiered.lookup(0), RATIO);
    let second = tiered.load(0);
    let promotions = tiered.take(UP);
    assert_eq!(promotions.len(), 1, "one for both");
    tiered.now = Time(1_000);
    tiered.step(LeaderEvent::Tick);
    tiered.end(&promotions[0], 0, false);
    assert!(
        matches!(tiered.answers.get(&first), Some(Err(_))),
        "its deadline has passed"
    );
    assert_eq!(tiered.answers.get(&second), None);
    assert_eq!(tiered.end_all(UP), 1, "promoted for the second load");
    assert_eq!(tiered.end_all(Edge::LOAD), 1);
    let loaded = LoadAnswer { pages: RATIO };
    assert_eq!(tiered.answers.get(&second), Some(&Ok(Answer::Load(loaded))));
    // A page that fails its checksum is not promoted again.
    let mut tiered = Tiered::new(16, &[DOWN]);
    tiered.on_disk_only(0);
    let loads = [0, 0].map(|name| {
        assert_eq!(tiered.lookup(name), RATIO);
        tiered.load(name)
    });
    let promotions = tiered.take(UP);
    tiered.end(&promotions[0], 0, true);
    assert_eq!(tiered.take(UP), []);
    for load in loads {
        assert!(matches!(tiered.answers.get(&load), Some(Err(_))), "{load}");
    }
}

/// Host memory has two holes of half a block. The second half of the block is bad: both loads get the first half, also the
/// one that waited for transfers of the other.
#[test]
fn pages_that_a_failed_promotion_of_another_load_brought_are_loaded() {
    let mut tiered = Tiered::new(16, &[DOWN]);
    tiered.stored(0);
    assert_eq!(tiered.end_all(DOWN), 1);
    let half = RATIO / 2;
    for name in [20, 22, 24, 26] {
        let hashes = sequence(name, half as usize);
        tiered.request(Request::Lookup {
            slot: SlotId(name.into()),
            namespace: vec![7],
            hashes,
            have_pages: 0,
            limit_pages: None,
        });
        tiered.request(Request::Store {
            slot: SlotId(name.into()),
            parts: vec![Part::new(GroupId(0), 0, PageList::run(0, half))],
            more: None,
            after: RequestId(0),
        });
        let copies = tiered.take(Edge::STORE);
        copies.iter().for_each(|copy| tiered.end(copy, half, false));
        let moves = tiered.take(DOWN);
        moves.iter().for_each(|one| tiered.end(one, half, false));
    }
    // The first of the four is held. The two that make room are not beside each other.
    tiered.request(Request::Lookup {
        slot: SlotId(20),
        namespace: vec![7],
        hashes: sequence(20, half as usize),
        have_pages: 0,
        limit_pages: None,
    });
    let loads = [0, 0].map(|name| {
        assert_eq!(tiered.lookup(name), RATIO);
        tiered.load(name)
    });
    let promotions = tiered.take(UP);
    assert_eq!(promotions.len(), 2, "two halves for both loads");
    tiered.end(&promotions[0], half, false);
    tiered.end(&promotions[1], 0, true);
    assert_eq!(tiered.take(UP), [], "the source is bad");
    let copies = tiered.take(Edge::LOAD);
    assert_eq!(copies.len(), 2);
    copies.iter().for_each(|copy| tiered.end(copy, half, false));
    for load in loads {
        let loaded = Ok(Answer::Load(LoadAnswer { pages: half }));
        assert_eq!(tiered.answers.get(&load), Some(&loaded), "{load}");
    }
}

/// The worker of an order that cannot be sent is about to be lost: no further moves are ordered from it meanwhile.
#[test]
fn no_move_begins_in_the_step_of_an_order_that_was_not_sent() {
    let mut tiered = Tiered::new(64, &[DOWN]);
    for name in [0, 2, 4, 6, 8, 10] {
        tiered.stored(name);
    }
    let moves = tiered.take(DOWN);
    assert_eq!(moves.len(), 4, "as many as the edge may run");
    let ended = EndedCopy::failed(moves[0].id);
    for rank in 0..RANKS {
        tiered.step(LeaderEvent::Unsent {
            worker: worker(0, rank),
            copies: vec![ended],
        });
    }
    assert_eq!(tiered.take(DOWN), []);
    tiered.step(LeaderEvent::Tick);
    assert_eq!(tiered.take(DOWN).len(), 1, "its place is free");
}

#[test]
fn a_page_that_fails_its_checksum_is_cut_from_its_tier_and_the_load_gets_no_more_than_is_good() {
    let mut tiered = Tiered::new(16, &[DOWN]);
    tiered.on_disk_only(0);
    assert_eq!(tiered.lookup(0), RATIO);
    let load = tiered.load(0);
    let moves = tiered.take(UP);
    tiered.end(&moves[0], 3, true);
    let refused = tiered.answers.get(&load).cloned();
    assert!(
        matches!(refused, Some(Err(Refusal::BadPages(1)))),
        "{refused:?}"
    );
    assert!(
        tiered.lookup(0) <= 3,
        "the bad page is not found any longer"
    );
    assert_eq!(tiered.leader.counts().bad_sources, 1);
}

/// While one worker has reported the page and the other still reads the block, no other transfer may read that page.
#[test]
fn a_bad_page_is_not_read_again_while_its_move_is_in_flight() {
    let mut tiered = Tiered::new(16, &[DOWN]);
    tiered.on_disk_only(0);
    assert_eq!(tiered.lookup(0), RATIO);
    tiered.load(0);
    let moves = tiered.take(UP);
    tiered.report(0, &moves[0], false, 0, true);
    assert_eq!(tiered.lookup(0), 0);
}

#[test]
fn a_disk_that_is_lost_ends_its_moves_before_it_opens_again_and_host_memory_serves_on() {
    let mut tiered = Tiered::new(16, &[DOWN]);
    tiered.stored(0);
    let moves = tiered.take(DOWN);
    assert_eq!(moves.len(), 1);
    (0..RANKS).for_each(|rank| tiered.attach(rank, 16, 100));
    assert_eq!(tiered.lookup(0), RATIO, "host memory kept its pages");
    assert!(
        tiered.leader.closing_pool(TierId::Disk).is_none(),
        "its moves have ended"
    );
    let disk = tiered
        .leader
        .pool_of(TierId::Disk)
        .expect("it opened again");
    assert_eq!(disk.page_states().ready, 0);
}

#[test]
fn a_load_of_more_pages_than_host_memory_has_room_for_proceeds_stretch_by_stretch() {
    let mut tiered = Tiered::new(16, &[DOWN]);
    let hashes = sequence(0, 16);
    let lookup = |tiered: &mut Tiered| {
        tiered.request(Request::Lookup {
            slot: SlotId(0),
            namespace: vec![7],
            hashes: hashes.clone(),
            have_pages: 0,
            limit_pages: None,
        })
    };
    lookup(&mut tiered);
    let answer = tiered.request(Request::Store {
        slot: SlotId(0),
        parts: vec![Part::new(GroupId(0), 0, PageList::run(0, 16))],
        more: None,
        after: RequestId(0),
    });
    assert_eq!(answer, None);
    let stores = tiered.take(Edge::STORE);
    stores.iter().for_each(|copy| tiered.end(copy, 8, false));
    assert_eq!(tiered.end_all(DOWN), 2);
    for other in [20, 22] {
        tiered.stored(other);
        tiered.end_all(DOWN);
    }
    // One block is held, so that host memory has room for one block of the load at a time.
    assert_eq!(tiered.lookup(20), RATIO);
    let found = lookup(&mut tiered);
    assert!(matches!(found, Some(Ok(Answer::Lookup(found))) if found.hit_pages == 16));
    let answer = tiered.request(Request::Load {
        slot: SlotId(0),
        parts: vec![Part::new(GroupId(0), 0, PageList::run(0, 16))],
        after: RequestId(0),
    });
    assert_eq!(answer, None);
    let load = RequestId(tiered.last_request);
    let mut rounds = 0;
    while !tiered.answers.contains_key(&load) {
        let moved = tiered.end_all(UP) + tiered.end_all(Edge::LOAD);
        assert!(moved > 0, "the load waits for nothing");
        rounds += 1;
    }
    assert!(rounds > 1, "{rounds}");
    let pages = LoadAnswer { pages: 16 };
    assert_eq!(tiered.answers.get(&load), Some(&Ok(Answer::Load(pages))));
}
