//! Reading of inventories by a new leader, before it serves anything.

use kvferry_core::AttachedDepot;
use kvferry_types::{
    Anchor, DomainId, Fingerprint, PageRecord, PerTier, ResetId, Scope, Stored, TransferId,
};

use super::*;

const FENCE: Duration = Duration::from_secs(4);
const ARENA_PAGES: u32 = 60;

/// A leader whose inventory requests are checked one by one.
pub(super) struct Reader {
    pub(super) leader: Leader,
    pub(super) now: Time,
    pub(super) attaches: u64,
    /// Number of the last reading that was requested.
    reading: u64,
}

/// A request for an inventory: replica and rank of the worker, and the first page.
type ReadRequest = ((u8, u16), u32);

impl Reader {
    pub(super) fn new() -> Self {
        let mut settings = settings();
        settings.fence = FENCE;
        Self {
            leader: Leader::new(settings),
            now: Time(0),
            attaches: 0,
            reading: 0,
        }
    }

    /// A leader that has read empty depots, and serves.
    pub(super) fn served() -> Self {
        let mut reader = Self::new();
        for engine in 0..2 {
            reader.step(LeaderEvent::EngineOpened(engine_id(engine)));
        }
        reader.attach_all();
        for rank in 0..RANKS {
            reader.part((0, rank), 0, None, &[]);
        }
        assert!(reader.leader.is_ready());
        reader
    }

    pub(super) fn fence(&self) -> Duration {
        FENCE
    }

    pub(super) fn step(&mut self, event: LeaderEvent) -> Vec<LeaderEffect> {
        let mut effects = Vec::new();
        self.leader.step(self.now, event, &mut effects);
        self.leader.check().expect("the second count agrees");
        let requested = effects.iter().filter_map(|effect| match effect {
            LeaderEffect::ReadInventory {
                read_id: reading, ..
            } => Some(*reading),
            _ => None,
        });
        self.reading = requested.max().unwrap_or(self.reading);
        effects
    }

    /// Advances time to `end`, firing each timer in its turn. Returns the effects of the last step.
    pub(super) fn until(&mut self, end: Time) -> Vec<LeaderEffect> {
        while let Some(next) = self.leader.next_timeout().filter(|next| *next < end) {
            self.now = next.max(self.now);
            self.step(LeaderEvent::Tick);
        }
        self.now = end;
        self.step(LeaderEvent::Tick)
    }

    /// The inventory requests that an event causes.
    fn reads_requested(&mut self, event: LeaderEvent) -> Vec<ReadRequest> {
        let effects = self.step(event);
        let requested = effects.into_iter().filter_map(|effect| match effect {
            LeaderEffect::ReadInventory {
                worker,
                depot,
                page_bytes,
                from,
                ..
            } => {
                assert_eq!((depot, page_bytes), (DepotId(worker.rank.0.into()), 64));
                Some(((worker.replica.0 as u8, worker.rank.0), from))
            }
            _ => None,
        });
        requested.collect()
    }

    pub(super) fn attach(&mut self, engine: u8, rank: u16) -> Vec<ReadRequest> {
        self.attach_with(engine, rank, ARENA_PAGES)
    }

    pub(super) fn attach_with(
        &mut self,
        engine: u8,
        rank: u16,
        arena_pages: u32,
    ) -> Vec<ReadRequest> {
        self.attaches += 1;
        let arrival = LeaderEvent::arrival(
            AttachRequest {
                worker: worker(engine, rank),
                ranks: RANKS,
                shards: RANKS,
                attach: AttachId(self.attaches),
                depots: PerTier::host(AttachedDepot {
                    depot: DepotId(rank.into()),
                    epoch: Epoch(0),
                }),
            },
            WorkerMemory {
                engine: engine_id(engine),
                geometry: geometry().into(),
                arena_pages: PerTier::host(arena_pages),
            },
        );
        arrival
            .into_iter()
            .flat_map(|event| self.reads_requested(event))
            .collect()
    }

    /// Attaches all workers. Returns the inventory requests.
    pub(super) fn attach_all(&mut self) -> Vec<ReadRequest> {
        let mut requested = Vec::new();
        for engine in 0..2 {
            for rank in 0..RANKS {
                assert!(requested.is_empty(), "asked before all had attached");
                requested = self.attach(engine, rank);
            }
        }
        requested
    }

    pub(super) fn part(
        &mut self,
        who: (u8, u16),
        from: u32,
        next: Option<u32>,
        pages: &[u32],
    ) -> Vec<ReadRequest> {
        self.reads_requested(LeaderEvent::Inventory {
            worker: worker(who.0, who.1),
            depot: DepotId(who.1.into()),
            read_id: self.reading,
            from,
            next,
            records: pages.iter().map(|page| record(*page)).collect(),
        })
    }

    /// Number of recovered pages, or `None` until the leader serves.
    fn recovered(&self) -> Option<u64> {
        let mut counters = self.leader.counters();
        let found = counters.find(|(name, _)| *name == "recovered_pages");
        found
            .map(|(_, pages)| pages)
            .filter(|_| self.leader.is_ready())
    }

    fn tick_at(&mut self, at: Time) -> Vec<ReadRequest> {
        self.now = at;
        self.reads_requested(LeaderEvent::Tick)
    }
}

/// The record of a block of one page.
pub(super) fn record(page: u32) -> PageRecord {
    PageRecord {
        page,
        anchor: Anchor(page.into()),
        domain: DomainId(1),
        block_start: page,
        index: 0,
        phase: 0,
        stored: Stored {
            epoch: Epoch(1),
            transfer: TransferId(1),
        },
        fingerprint: Fingerprint(page.into()),
    }
}

const FIRST: [ReadRequest; 3] = [((0, 0), 0), ((0, 1), 0), ((0, 2), 0)];

#[test]
fn parts_are_requested_one_after_another_until_no_shard_has_more() {
    let mut reader = Reader::new();
    assert_eq!(reader.attach_all(), FIRST);
    assert_eq!(reader.recovered(), None);
    let pages = [1, 3, 9, 12, 59];
    assert_eq!(reader.part((0, 0), 0, Some(8), &pages[..2]), [((0, 0), 8)]);
    assert_eq!(reader.part((0, 1), 0, None, &pages), []);
    assert_eq!(reader.part((0, 0), 8, Some(10), &[9]), [((0, 0), 10)]);
    assert_eq!(reader.part((0, 2), 0, None, &pages), []);
    assert_eq!(reader.recovered(), None);
    assert_eq!(reader.part((0, 0), 10, None, &pages[3..]), []);
    assert_eq!(reader.recovered(), Some(5));
    assert_eq!(reader.leader.next_timeout(), None, "nothing is waited for");
}

#[test]
fn unrequested_inventories_are_ignored() {
    let mut reader = Reader::new();
    assert_eq!(reader.attach_all(), FIRST);
    let complete: Vec<u32> = (0..ARENA_PAGES).collect();
    // Ignored: an answer of another worker of the shard, for another page, another shard or another depot.
    assert_eq!(reader.part((1, 0), 0, None, &complete), []);
    assert_eq!(reader.part((0, 0), 1, None, &complete), []);
    assert_eq!(reader.part((0, 9), 0, None, &complete), []);
    let other_depot = LeaderEvent::Inventory {
        worker: worker(0, 0),
        depot: DepotId(77),
        read_id: 1,
        from: 0,
        next: None,
        records: Vec::new(),
    };
    assert_eq!(reader.reads_requested(other_depot), []);
    // A part must begin where the one before ended. Records outside of its range are ignored.
    assert_eq!(reader.part((0, 0), 0, Some(8), &[7, 8, 9]), [((0, 0), 8)]);
    assert_eq!(reader.part((0, 0), 0, Some(8), &[7]), [], "said again");
    assert_eq!(reader.part((0, 0), 8, None, &[7, 8, 9, ARENA_PAGES]), []);
    for rank in 1..RANKS {
        assert_eq!(reader.recovered(), None);
        assert_eq!(reader.part((0, rank), 0, None, &complete), []);
    }
    assert_eq!(reader.recovered(), Some(3), "7, 8 and 9");
    assert_eq!(reader.part((0, 0), 0, None, &complete), [], "too late");
    assert_eq!(reader.recovered(), Some(3));
}

#[test]
fn an_inventory_that_goes_back_or_beyond_the_arena_ends() {
    for next in [0, 8, 7, ARENA_PAGES, u32::MAX] {
        let mut reader = Reader::new();
        reader.attach_all();
        assert_eq!(reader.part((0, 0), 0, Some(8), &[]), [((0, 0), 8)]);
        assert_eq!(reader.part((0, 0), 8, Some(next), &[]), [], "{next}");
        for rank in 1..RANKS {
            reader.part((0, rank), 0, None, &[]);
        }
        assert_eq!(reader.recovered(), Some(0), "{next}");
    }
    let mut reader = Reader::new();
    reader.attach_all();
    let last = ARENA_PAGES - 1;
    assert_eq!(reader.part((0, 0), 0, Some(last), &[]), [((0, 0), last)]);
}

#[test]
fn another_worker_of_the_shard_reads_on_when_one_is_dead() {
    let mut reader = Reader::new();
    assert_eq!(reader.attach_all(), FIRST);
    assert_eq!(reader.part((0, 1), 0, Some(8), &[2]), [((0, 1), 8)]);
    let dead = LeaderEvent::WorkerDead(worker(0, 1));
    assert_eq!(reader.reads_requested(dead), [((1, 1), 8)]);
    assert_eq!(reader.part((0, 1), 8, None, &[9]), [], "it was not asked");
    assert_eq!(reader.part((1, 1), 8, None, &[9]), []);
    for rank in [0, 2] {
        reader.part((0, rank), 0, None, &[2, 9]);
    }
    assert_eq!(reader.recovered(), Some(2));
    // Without another worker of the shard, its successor receives the request.
    let mut reader = Reader::new();
    assert_eq!(reader.attach_all(), FIRST);
    assert_eq!(
        reader.reads_requested(LeaderEvent::WorkerDead(worker(1, 1))),
        []
    );
    assert_eq!(
        reader.reads_requested(LeaderEvent::WorkerLost(worker(0, 1))),
        []
    );
    assert_eq!(reader.attach(1, 1), [], "the first may still divide it");
    let dead = LeaderEvent::WorkerDead(worker(0, 1));
    assert_eq!(reader.reads_requested(dead), [((1, 1), 0)]);
}

#[test]
fn no_other_worker_reads_a_depot_that_a_lost_worker_may_still_divide() {
    for attaches in [false, true] {
        let mut reader = Reader::new();
        assert_eq!(reader.attach_all(), FIRST);
        assert_eq!(
            reader.reads_requested(LeaderEvent::WorkerLost(worker(0, 1))),
            []
        );
        assert!(reader.leader.has_unanswered_read(worker(0, 1)));
        // The others are read. The depot whose answer is owed is not read by another worker, and no pool opens.
        for rank in [0, 2] {
            assert_eq!(reader.part((0, rank), 0, None, &[2]), []);
        }
        assert_eq!(reader.tick_at(Time(0) + FENCE / 2), []);
        assert_eq!(reader.recovered(), None);
        // The debt ends when the worker attaches again, which means that nothing runs, or when it is dead. A worker that
        // has not stated its memory yet is not asked.
        let next = (1, 1);
        let requested = match attaches {
            true => reader.attach(0, 1),
            false => reader.reads_requested(LeaderEvent::WorkerDead(worker(0, 1))),
        };
        assert_eq!(requested, [(next, 0)]);
        assert_eq!(reader.part(next, 0, None, &[2]), []);
        assert_eq!(reader.recovered(), Some(1));
        assert_eq!(reader.leader.next_timeout(), None, "nothing is owed");
    }
}

#[test]
fn inventory_requests_of_an_ended_reading_are_still_owed() {
    let mut reader = Reader::new();
    assert_eq!(reader.attach_all(), FIRST);
    assert_eq!(
        reader.reads_requested(LeaderEvent::WorkerLost(worker(0, 1))),
        []
    );
    // A smaller depot of another shard: all inventories must be read again, except where a lost worker may still divide
    // the depot.
    let requested = reader.attach_with(1, 0, ARENA_PAGES / 2);
    assert_eq!(requested, [FIRST[0], FIRST[2]]);
    assert_eq!(
        reader.reads_requested(LeaderEvent::WorkerDead(worker(0, 1))),
        [((1, 1), 0)]
    );
}

/// The workers that these effects fence.
pub(super) fn fenced(effects: &[LeaderEffect]) -> Vec<WorkerId> {
    let fenced = effects.iter().filter_map(|effect| match effect {
        LeaderEffect::FenceWorker(worker) => Some(*worker),
        _ => None,
    });
    fenced.collect()
}

/// Answers that its workers sent meanwhile are still in the leader's mailbox.
#[test]
fn a_paused_leader_fences_no_worker_before_it_has_checked_again() {
    let mut reader = Reader::new();
    assert_eq!(reader.attach_all(), FIRST);
    reader.now = Time(0) + FENCE * 5;
    assert_eq!(fenced(&reader.step(LeaderEvent::Tick)), []);
    let answered = |reader: &mut Reader, rank| {
        let event = LeaderEvent::Inventory {
            worker: worker(0, rank),
            depot: DepotId(u128::from(rank)),
            read_id: reader.reading,
            from: 0,
            next: None,
            records: Vec::new(),
        };
        fenced(&reader.step(event))
    };
    for rank in 0..RANKS {
        assert_eq!(answered(&mut reader, rank), []);
    }
    assert_eq!(reader.recovered(), Some(0));
}

#[test]
fn a_worker_that_does_not_answer_within_the_fence_time_is_fenced() {
    let mut reader = Reader::new();
    assert_eq!(reader.attach_all(), FIRST);
    for rank in [0, 2] {
        reader.part((0, rank), 0, None, &[]);
    }
    reader.reads_requested(LeaderEvent::WorkerLost(worker(0, 1)));
    assert_eq!(fenced(&reader.until(Time((Time(0) + FENCE).0 - 1))), []);
    for fences in 1..3 {
        assert_eq!(
            fenced(&reader.until(Time(0) + FENCE * fences)),
            [worker(0, 1)]
        );
    }
    assert_eq!(
        reader.reads_requested(LeaderEvent::WorkerDead(worker(0, 1))),
        [((1, 1), 0)]
    );
    // An answer to an earlier request shows that the worker is alive: for the later request it gets the whole fence
    // time again.
    let asked_at = reader.now;
    let first = reader.reading;
    let tick = |reader: &mut Reader, after: Duration| fenced(&reader.until(asked_at + after));
    assert_eq!(tick(&mut reader, FENCE * 3 / 4), []);
    assert!(reader.reading > first, "it was asked again");
    reader.step(LeaderEvent::Inventory {
        worker: worker(1, 1),
        depot: DepotId(1),
        read_id: first,
        from: 0,
        next: None,
        records: Vec::new(),
    });
    assert_eq!(reader.recovered(), Some(0));
    assert_eq!(tick(&mut reader, FENCE), []);
    assert_eq!(tick(&mut reader, FENCE * 7 / 4), [worker(1, 1)]);
    reader.part((1, 1), 0, None, &[]);
    assert!(!reader.leader.has_unanswered_read(worker(1, 1)));
    assert_eq!(reader.leader.next_timeout(), None);
}

#[test]
fn a_missing_part_is_requested_again_after_a_quarter_of_the_fence() {
    let mut reader = Reader::new();
    reader.now = Time(5);
    assert_eq!(reader.attach_all(), FIRST);
    let first = Time(5) + FENCE / 4;
    assert_eq!(reader.leader.next_timeout(), Some(first));
    assert_eq!(reader.part((0, 2), 0, None, &[]), []);
    assert_eq!(reader.tick_at(Time(first.0 - 1)), []);
    assert_eq!(reader.tick_at(first), FIRST[..2]);
    let second = first + FENCE / 4;
    assert_eq!(reader.leader.next_timeout(), Some(second));
    assert_eq!(reader.tick_at(second), FIRST[..2]);
    for rank in 0..2 {
        reader.part((0, rank), 0, None, &[]);
    }
    assert_eq!(reader.recovered(), Some(0));
    assert_eq!(reader.leader.next_timeout(), None);
}

#[test]
fn another_depot_is_read_from_its_first_page() {
    let mut reader = Reader::new();
    assert_eq!(reader.attach_all(), FIRST);
    assert_eq!(reader.part((0, 1), 0, Some(8), &[2]), [((0, 1), 8)]);
    for engine in 0..2 {
        reader.step(LeaderEvent::WorkerDead(worker(engine, 1)));
    }
    reader.attaches += 1;
    let attached = LeaderEvent::arrival(
        AttachRequest {
            worker: worker(0, 1),
            ranks: RANKS,
            shards: RANKS,
            attach: AttachId(reader.attaches),
            depots: PerTier::host(AttachedDepot {
                depot: DepotId(500),
                epoch: Epoch(0),
            }),
        },
        WorkerMemory {
            engine: engine_id(0),
            geometry: geometry().into(),
            arena_pages: PerTier::host(ARENA_PAGES),
        },
    );
    let effects: Vec<LeaderEffect> = attached
        .into_iter()
        .flat_map(|event| reader.step(event))
        .collect();
    let requested = effects.iter().filter_map(|effect| match effect {
        LeaderEffect::ReadInventory { depot, from, .. } => Some((depot.0, *from)),
        _ => None,
    });
    let requested: Vec<(u128, u32)> = requested.collect();
    assert_eq!(requested, [(0, 0), (500, 0), (2, 0)], "all shards anew");
}

#[test]
fn pages_read_before_the_end_of_an_invalidation_are_read_again() {
    let mut reader = Reader::new();
    reader.attach_all();
    for rank in 0..RANKS {
        reader.part((0, rank), 0, None, &[2, 9]);
    }
    assert_eq!(reader.recovered(), Some(2));
    reader.step(LeaderEvent::EngineOpened(engine_id(0)));
    let deadline = reader.now + Duration::from_secs(60);
    let invalidations = reader.step(LeaderEvent::Request {
        engine: engine_id(0),
        id: RequestId(1),
        deadline,
        request: Request::Reset {
            tier: None,
            scope: ResetScope::Everything,
        },
    });
    let invalidate = |rank| LeaderEffect::Invalidate {
        tier: None,
        worker: worker(0, rank),
        id: ResetId(1),
        scope: Scope::Everything,
        through: TransferId(1),
        deadline,
    };
    assert_eq!(invalidations, [invalidate(0), invalidate(1), invalidate(2)]);
    let invalidated = |rank| LeaderEvent::Invalidated {
        worker: worker(0, rank),
        epoch: EPOCH,
        id: ResetId(1),
    };
    assert_eq!(reader.step(invalidated(0)), []);
    // The successor has a smaller depot: a new pool opens, but only after the inventories were read.
    assert_eq!(reader.attach_with(1, 0, ARENA_PAGES / 2), FIRST);
    assert_eq!(reader.recovered(), None);
    assert_eq!(reader.part((0, 0), 0, Some(8), &[]), [((0, 0), 8)]);
    assert_eq!(reader.step(invalidated(1)), []);
    let last = reader.step(invalidated(2));
    let answered = LeaderEffect::Answer {
        engine: engine_id(0),
        id: RequestId(1),
        answer: Ok(Answer::Reset(ResetAnswer {
            pages: 2,
            ..ResetAnswer::default()
        })),
    };
    assert_eq!(last[0], answered);
    assert_eq!(
        last.len(),
        1 + usize::from(RANKS),
        "all are read from the first page"
    );
    assert_eq!(reader.part((0, 0), 8, None, &[9]), [], "of before");
    // An old part, read before the pages were removed, arrives late: its pages are not recovered.
    reader.reading -= 1;
    for rank in 0..RANKS {
        assert_eq!(reader.part((0, rank), 0, None, &[2, 9]), [], "of before");
    }
    reader.reading += 1;
    for rank in 0..RANKS {
        assert_eq!(reader.recovered(), None);
        reader.part((0, rank), 0, None, &[]);
    }
    assert_eq!(
        reader.recovered(),
        Some(2),
        "the count of before: nothing more was found"
    );
}
