//! The key of a pool: engines with other pages, workers with other depots, replicas with other memory.

use kvferry_core::AttachedDepot;
use kvferry_types::{PageRecord, Part, PerTier, ResetId, Scope, TierId};

use super::*;

/// A worker's description of its engine's memory and of its depot.
#[derive(Debug, Clone, Copy)]
struct Here {
    engine: u8,
    page_bytes: u64,
    layout: u8,
    device_pages: u32,
    arena_pages: u32,
    depot: u128,
}

/// An engine with pages of 64 bytes.
const A: Here = Here {
    engine: 1,
    page_bytes: 64,
    layout: 1,
    device_pages: 64,
    arena_pages: 60,
    depot: 0,
};
/// An engine with pages of 32 bytes.
const B: Here = Here {
    engine: 2,
    page_bytes: 32,
    layout: 2,
    device_pages: 128,
    arena_pages: 120,
    depot: 0,
};

/// A leader whose effects are checked one by one.
struct Site {
    leader: Leader,
    attaches: u64,
    last_request: u64,
}

impl Site {
    fn new(ranks: u16, replicas: u16) -> Self {
        let ratio = Ratio::new(8).expect("in bounds");
        let mut settings = LeaderSettings::new(EPOCH, ranks, ratio, AnchorKey::new([3; 32]));
        settings.replicas = replicas;
        Self {
            leader: Leader::new(settings),
            attaches: 0,
            last_request: 0,
        }
    }

    fn step(&mut self, event: LeaderEvent) -> Vec<LeaderEffect> {
        let mut effects = Vec::new();
        self.leader.step(Time(0), event, &mut effects);
        self.leader.check().expect("the second count agrees");
        effects
    }

    /// Attaches a worker. The number of its rank is added to the depot's id.
    fn attach(&mut self, place: (u8, u16), here: Option<Here>) -> Vec<LeaderEffect> {
        self.attach_depot(place, here.map_or(0, |here| here.depot), here)
    }

    fn attach_depot(
        &mut self,
        (replica, rank): (u8, u16),
        depot: u128,
        here: Option<Here>,
    ) -> Vec<LeaderEffect> {
        self.attaches += 1;
        let ranks = self.leader.sharding().ranks();
        let memory = here.map(|here| WorkerMemory {
            engine: engine_id(here.engine),
            geometry: GroupGeometry {
                page_bytes: here.page_bytes,
                device_pages: here.device_pages,
                layout_fingerprint: [here.layout; 16],
                ..geometry()
            }
            .into(),
            arena_pages: PerTier::host(here.arena_pages),
        });
        let attached = LeaderEvent::Attach(AttachRequest {
            worker: worker(replica, rank),
            ranks,
            shards: ranks,
            attach: AttachId(self.attaches),
            depots: PerTier::host(AttachedDepot {
                depot: DepotId(depot + u128::from(rank)),
                epoch: Epoch(0),
            }),
        });
        let mut effects = self.step(attached);
        effects.extend(self.state((replica, rank), memory));
        effects
    }

    /// States the memory of an attached worker, or that it has none.
    fn state(
        &mut self,
        (replica, rank): (u8, u16),
        memory: Option<WorkerMemory>,
    ) -> Vec<LeaderEffect> {
        self.attaches += 1;
        self.step(LeaderEvent::Memory(MemoryStatement {
            worker: worker(replica, rank),
            number: MemoryId(self.attaches),
            memory,
        }))
    }

    /// Answers every inventory request with an empty list. Returns the requested page sizes.
    fn read(&mut self, effects: &[LeaderEffect]) -> Vec<u64> {
        self.read_with(effects, &[])
    }

    fn read_with(&mut self, effects: &[LeaderEffect], records: &[PageRecord]) -> Vec<u64> {
        let mut sizes = Vec::new();
        for effect in effects {
            if let LeaderEffect::ReadInventory {
                worker,
                depot,
                page_bytes,
                read_id: reading,
                from,
            } = effect
            {
                sizes.push(*page_bytes);
                self.step(LeaderEvent::Inventory {
                    worker: *worker,
                    depot: *depot,
                    read_id: *reading,
                    from: *from,
                    next: None,
                    records: records.to_vec(),
                });
            }
        }
        sizes
    }

    fn request(&mut self, engine: u8, request: Request) -> Vec<LeaderEffect> {
        self.last_request += 1;
        self.step(LeaderEvent::Request {
            engine: engine_id(engine),
            id: RequestId(self.last_request),
            deadline: Time(5_000_000_000),
            request,
        })
    }

    fn lookup(&mut self, engine: u8) -> Reply {
        let lookup = Request::Lookup {
            slot: SlotId(1),
            namespace: vec![7],
            hashes: sequence(0, 8),
            have_pages: 0,
            limit_pages: None,
        };
        answer(&self.request(engine, lookup)).expect("answered at once")
    }

    fn store_from(&mut self, engine: u8, first: u32) -> Vec<LeaderEffect> {
        self.lookup(engine).expect("a slot");
        let source = PageList::run(first, 8);
        let (slot, first_page, more) = (SlotId(1), 0, None);
        self.request(
            engine,
            Request::Store {
                slot,
                parts: vec![Part::new(GroupId(0), first_page, source)],
                more,
                after: RequestId(0),
            },
        )
    }

    fn load(&mut self, engine: u8, first: u32) -> Vec<LeaderEffect> {
        let destination = PageList::run(first, 8);
        let (slot, first_page) = (SlotId(1), 0);
        self.request(
            engine,
            Request::Load {
                slot,
                parts: vec![Part::new(GroupId(0), first_page, destination)],
                after: RequestId(0),
            },
        )
    }

    /// Stores eight pages and checks that a lookup finds them.
    fn stored(&mut self, place: (u8, u16), engine: u8) {
        let transfer = copy(&self.store_from(engine, 0)).expect("a copy");
        self.ended(place, transfer);
        assert_eq!(self.lookup(engine), hit(8));
    }

    fn ended(&mut self, (replica, rank): (u8, u16), transfer: TransferId) -> Vec<LeaderEffect> {
        let ended = EndedCopy {
            complete_pages: 8,
            bytes: 64,
            copy_us: 1,
            ..EndedCopy::complete(transfer)
        };
        self.step(LeaderEvent::Ended {
            worker: worker(replica, rank),
            epoch: EPOCH,
            copies: vec![ended],
        })
    }
}

fn answer(effects: &[LeaderEffect]) -> Option<Reply> {
    effects.iter().find_map(|effect| match effect {
        LeaderEffect::Answer { answer, .. } => Some(answer.clone()),
        _ => None,
    })
}

fn copy(effects: &[LeaderEffect]) -> Option<TransferId> {
    effects.iter().find_map(|effect| match effect {
        LeaderEffect::Transfer { transfer, .. } => Some(transfer.id),
        _ => None,
    })
}

fn verdict(effects: &[LeaderEffect]) -> Result<(), Refusal> {
    admission(effects).map(|_| ())
}

fn hit(hit_pages: u32) -> Reply {
    Ok(Answer::Lookup(LookupAnswer {
        hit_pages,
        ..LookupAnswer::default()
    }))
}

#[test]
fn an_engine_with_smaller_pages_ends_the_pool_of_the_one_before_it() {
    let mut site = Site::new(1, 1);
    let requested = site.attach((0, 0), Some(A));
    assert_eq!(site.read(&requested), [64]);
    site.stored((0, 0), A.engine);

    site.attach((0, 0), None);
    assert!(
        site.leader.pool().is_some(),
        "the same engine may come back"
    );
    let requested = site.attach((0, 0), Some(B));
    assert!(site.leader.pool().is_none(), "its pages are those of A");
    assert_eq!(site.lookup(B.engine), Err(Refusal::Reading));
    assert_eq!(site.read(&requested), [32]);
    let capacity = site.leader.pool().map(|pool| pool.capacity_pages());
    assert_eq!(capacity, Some(120), "all of the depot is used");
    site.stored((0, 0), B.engine);

    site.attach((0, 0), None);
    let requested = site.attach((0, 0), Some(A));
    assert_eq!(site.read(&requested), [64]);
    assert_eq!(
        site.lookup(A.engine),
        hit(0),
        "B has written over these pages"
    );
}

#[test]
fn pages_of_one_size_in_another_layout_end_the_pool_too() {
    let mut site = Site::new(1, 1);
    let requested = site.attach((0, 0), Some(A));
    site.read(&requested);
    site.stored((0, 0), A.engine);
    let other = Here { layout: 9, ..A };
    site.attach((0, 0), None);
    let requested = site.attach((0, 0), Some(other));
    assert_eq!(site.read(&requested), [64]);
    // The engine has kept its id, but its lookup for the other layout is no longer valid.
    let refused = answer(&site.load(A.engine, 0));
    assert_eq!(refused, Some(Err(Refusal::UnknownSlot(SlotId(1)))));
    assert_eq!(site.lookup(A.engine), hit(0));
}

#[test]
fn copies_of_a_pool_that_ends_are_cancelled_and_awaited_before_anything_is_read() {
    let mut site = Site::new(1, 2);
    site.attach((1, 0), Some(A));
    let requested = site.attach((0, 0), Some(Here { engine: 3, ..A }));
    site.read(&requested);
    let transfer = copy(&site.store_from(A.engine, 0)).expect("a copy");
    // The worker that copies is unreachable, and the other replica gets an engine with other pages.
    site.step(LeaderEvent::WorkerLost(worker(1, 0)));
    site.attach((0, 0), None);
    let effects = site.attach((0, 0), Some(B));
    assert_eq!(verdict(&effects), Ok(()));
    let cancelled = effects
        .iter()
        .any(|effect| matches!(effect, LeaderEffect::Cancel { transfers, .. } if transfers.contains(&transfer)));
    assert!(cancelled, "{effects:?}");
    assert!(site.read(&effects).is_empty(), "the copy may still write");
    assert_eq!(site.lookup(B.engine), Err(Refusal::Reading));

    let effects = site.ended((1, 0), transfer);
    let failed = Answer::Store(StoreAnswer {
        stored_pages: 0,
        present_pages: 0,
        refused_pages: 0,
        failed_pages: 8,
    });
    assert_eq!(answer(&effects), Some(Ok(failed)));
    assert_eq!(site.read(&effects), [32]);
    assert_eq!(site.lookup(B.engine), hit(0));
}

#[test]
fn no_hold_outlives_the_depot() {
    let mut site = Site::new(1, 1);
    let requested = site.attach((0, 0), Some(A));
    site.read(&requested);
    site.stored((0, 0), A.engine);
    assert_eq!(site.leader.pool().map(|pool| pool.pins()), Some(1));

    site.step(LeaderEvent::WorkerDead(worker(0, 0)));
    let requested = site.attach((0, 0), Some(Here { depot: 70, ..A }));
    assert_eq!(answer(&site.load(A.engine, 0)), Some(Err(Refusal::Reading)));
    assert_eq!(site.read(&requested), [64]);
    let effects = site.load(A.engine, 0);
    assert_eq!(copy(&effects), None, "the new depot holds nothing");
    let not_pinned = Refusal::NotPinned {
        slot: SlotId(1),
        first_page: 0,
        end: 8,
    };
    assert_eq!(answer(&effects), Some(Err(not_pinned)));
}

#[test]
fn a_running_load_keeps_a_closing_pool_until_the_load_ends() {
    let mut site = Site::new(2, 1);
    site.attach((0, 0), Some(A));
    let requested = site.attach((0, 1), Some(A));
    site.read(&requested);
    let transfer = copy(&site.store_from(A.engine, 0)).expect("a copy");
    site.ended((0, 0), transfer);
    site.ended((0, 1), transfer);
    assert_eq!(site.lookup(A.engine), hit(8));
    let transfer = copy(&site.load(A.engine, 16)).expect("a copy");
    site.step(LeaderEvent::WorkerDead(worker(0, 0)));
    let effects = site.attach((0, 0), Some(Here { depot: 70, ..A }));
    assert!(site.read(&effects).is_empty());
    assert!(site.leader.closing_pool(TierId::Host).is_some());
    let effects = site.ended((0, 1), transfer);
    assert_eq!(answer(&effects), Some(Err(Refusal::CopyFailed(1))));
    assert_eq!(site.read(&effects), [64, 64]);
    assert!(site.leader.is_ready());
}

#[test]
fn a_reading_keeps_the_room_of_the_engine_that_it_began_for() {
    let mut site = Site::new(1, 1);
    let requested = site.attach((0, 0), Some(A));
    site.attach((0, 0), None);
    assert_eq!(site.read(&requested), [64]);
    let capacity = |site: &Site| site.leader.pool().map(|pool| pool.capacity_pages());
    assert_ne!(capacity(&site), Some(0), "room is taken from nobody");
    let requested = site.attach((0, 0), Some(A));
    site.read(&requested);
    assert_eq!(capacity(&site), Some(60));
    site.stored((0, 0), A.engine);
}

#[test]
fn a_reading_for_other_pages_than_those_of_the_engine_starts_again() {
    let mut site = Site::new(1, 1);
    let old = site.attach((0, 0), Some(A));
    site.attach((0, 0), None);
    let new = site.attach((0, 0), Some(B));
    site.read(&old);
    assert!(site.leader.pool().is_none(), "what was read is of A");
    assert_eq!(site.read(&new), [32]);
    let capacity = site.leader.pool().map(|pool| pool.capacity_pages());
    assert_eq!(capacity, Some(120));
}

#[test]
fn pages_are_checked_against_the_memory_of_the_requesting_engine() {
    let mut site = Site::new(1, 3);
    let large = Here {
        engine: 3,
        device_pages: 96,
        ..A
    };
    let small = Here {
        engine: 4,
        device_pages: 32,
        ..A
    };
    site.attach((0, 0), Some(A));
    site.attach((1, 0), Some(large));
    let requested = site.attach((2, 0), Some(small));
    site.read(&requested);
    let refused =
        |effects: &[LeaderEffect]| matches!(answer(effects), Some(Err(Refusal::Invalid { .. })));

    let effects = site.store_from(large.engine, 88);
    let transfer = copy(&effects).expect("pages that this engine has");
    site.ended((1, 0), transfer);
    assert!(refused(&site.store_from(large.engine, 89)));
    assert!(refused(&site.store_from(A.engine, 57)));
    for (here, last) in [(A, 56), (large, 88), (small, 24)] {
        assert_eq!(site.lookup(here.engine), hit(8));
        assert!(refused(&site.load(here.engine, last + 1)), "{here:?}");
        assert!(copy(&site.load(here.engine, last)).is_some(), "{here:?}");
    }
}

#[test]
fn a_second_engine_with_other_pages_is_declined_and_the_first_is_undisturbed() {
    let mut site = Site::new(1, 2);
    site.attach((0, 0), None);
    let requested = site.attach((1, 0), Some(A));
    site.read(&requested);
    site.stored((1, 0), A.engine);
    let refused = verdict(&site.attach((0, 0), Some(B)));
    let Err(Refusal::RankDisagrees { field, value, .. }) = refused else {
        unreachable!("{refused:?}");
    };
    assert_eq!((field, value.as_str()), ("page_bytes", "32"));
    assert_eq!(site.lookup(A.engine), hit(8));
    assert!(copy(&site.load(A.engine, 16)).is_some());
}

#[test]
fn two_engines_that_differ_do_not_keep_each_other_out() {
    let mut site = Site::new(2, 2);
    for place in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        site.attach(place, None);
    }
    // Each engine has one of its two ranks when the other engine comes.
    assert_eq!(verdict(&site.attach((0, 0), Some(A))), Ok(()));
    let first = verdict(&site.attach((1, 1), Some(B)));
    let requested = site.attach((0, 1), Some(A));
    let second = verdict(&requested);
    assert!(
        first.is_err() && second.is_ok(),
        "the lower replica comes first: {first:?}, {second:?}"
    );
    assert_eq!(site.read(&requested), [64, 64]);
    assert!(site.leader.is_ready());
    let late = verdict(&site.attach((1, 0), Some(B)));
    assert!(
        matches!(late, Err(Refusal::RankDisagrees { .. })),
        "{late:?}"
    );
    // When the first engine has gone, the second is admitted.
    for place in [(0, 0), (0, 1)] {
        site.attach(place, None);
    }
    site.attach((1, 1), Some(B));
    let requested = site.attach((1, 0), Some(B));
    assert_eq!(verdict(&requested), Ok(()));
    assert_eq!(site.read(&requested), [32, 32]);
}

/// The pool is not opened for it yet, because the other replica's worker may still copy for an older leader.
#[test]
fn a_complete_replica_comes_before_one_that_differs_and_has_a_lower_number() {
    let mut site = Site::new(1, 2);
    assert_eq!(verdict(&site.attach((1, 0), Some(B))), Ok(()));
    let late = verdict(&site.attach((0, 0), Some(A)));
    assert!(
        matches!(late, Err(Refusal::RankDisagrees { .. })),
        "{late:?}"
    );
}

#[test]
fn an_engine_of_another_shape_does_not_displace_one_whose_workers_attach_again() {
    let mut site = Site::new(2, 2);
    for place in [(0, 0), (0, 1), (1, 0)] {
        site.attach(place, None);
    }
    site.attach((1, 0), Some(A));
    let requested = site.attach((1, 1), Some(A));
    site.read(&requested);
    let transfer = copy(&site.store_from(A.engine, 0)).expect("a copy");
    for rank in [0, 1] {
        site.ended((1, rank), transfer);
    }
    assert_eq!(site.lookup(A.engine), hit(8));
    // The connections of the first engine's workers break. A rank of the second engine registers meanwhile.
    for rank in [0, 1] {
        site.step(LeaderEvent::WorkerLost(worker(1, rank)));
    }
    assert_eq!(verdict(&site.attach((0, 0), Some(B))), Ok(()));
    for rank in [0, 1] {
        assert_eq!(
            verdict(&site.attach((1, rank), Some(A))),
            Ok(()),
            "rank {rank}"
        );
    }
    assert_eq!(site.lookup(A.engine), hit(8));
    let late = verdict(&site.attach((0, 1), Some(B)));
    assert!(
        matches!(late, Err(Refusal::RankDisagrees { .. })),
        "{late:?}"
    );
}

/// Engines of two layouts take turns. Pages of the first one stay listed while the second one is served.
#[test]
fn a_reset_of_a_namespace_covers_the_pages_of_every_layout() {
    let hashes = sequence(0, 8);
    let fingerprints: Vec<_> = (0..8).map(|page| hashes.fingerprint(page)).collect();
    let other = || ResetScope::Namespace(vec![8]);
    let single = || ResetScope::Pages(vec![7], sequence(0, 1));
    // A block is forgotten as a whole.
    for (scope, removed, left) in [
        (ResetScope::Everything, 8, 0),
        (ResetScope::Namespace(vec![7]), 8, 0),
        (single(), 8, 7),
        (other(), 0, 8),
    ] {
        let mut site = Site::new(1, 1);
        for engine in [1, 2] {
            site.step(LeaderEvent::EngineOpened(engine_id(engine)));
        }
        let requested = site.attach((0, 0), Some(A));
        site.read(&requested);
        let stored = site.store_from(1, 0);
        let record = stored.iter().find_map(|effect| match effect {
            LeaderEffect::Transfer { transfer: copy, .. } => copy.record.clone(),
            _ => None,
        });
        let mut listed: Vec<PageRecord> =
            record.expect("a store lists its pages").pages().collect();
        site.ended((0, 0), copy(&stored).expect("a copy"));
        assert_eq!(site.lookup(1), hit(8));

        let second = Here {
            engine: 2,
            layout: 2,
            ..A
        };
        let requested = site.attach((0, 0), Some(second));
        site.read_with(&requested, &listed);
        assert_eq!(site.lookup(2), hit(0), "they are of another layout");
        let name = format!("{scope:?}");
        let effects = site.request(2, Request::Reset { scope, tier: None });
        let (id, scope) = invalidate(&effects);
        let through = listed.len();
        listed.retain(|page| !scope.contains(page.domain, page.fingerprint));
        assert_eq!(listed.len(), left, "{name} of {through}");
        let kept = listed.iter().map(|page| page.fingerprint);
        assert!(kept.eq(fingerprints[8 - left..].iter().copied()), "{name}");
        let worker = worker(0, 0);
        let invalidated = LeaderEvent::Invalidated {
            worker,
            epoch: EPOCH,
            id,
        };
        let reported = answer(&site.step(invalidated));
        assert_eq!(
            reported,
            Some(Ok(Answer::Reset(ResetAnswer {
                pages: removed,
                ..ResetAnswer::default()
            }))),
            "{name}"
        );

        // The first engine attaches again.
        let requested = site.attach((0, 0), Some(A));
        site.read_with(&requested, &listed);
        let found = if left == 8 { 8 } else { 0 };
        assert_eq!(site.lookup(1), hit(found), "{name}");
    }
}

fn invalidate(effects: &[LeaderEffect]) -> (ResetId, Scope) {
    let invalidate = effects.iter().find_map(|effect| match effect {
        LeaderEffect::Invalidate { id, scope, .. } => Some((*id, scope.clone())),
        _ => None,
    });
    invalidate.expect("a worker is asked")
}

#[test]
fn a_worker_with_pages_of_another_size_gets_no_request_for_the_earlier_inventory() {
    let mut site = Site::new(2, 2);
    for rank in [0, 1] {
        site.attach((1, rank), None);
    }
    site.attach((0, 0), Some(A));
    let requested = |effects: &[LeaderEffect]| -> Vec<(WorkerId, u64)> {
        let requested = effects.iter().filter_map(|effect| match effect {
            LeaderEffect::ReadInventory {
                worker, page_bytes, ..
            } => Some((*worker, *page_bytes)),
            _ => None,
        });
        requested.collect()
    };
    let first = requested(&site.attach((0, 1), Some(A)));
    assert_eq!(first, [(worker(0, 0), 64), (worker(0, 1), 64)]);
    // The engine leaves while its depots are read, and a rank of an engine with smaller pages takes a seat.
    assert_eq!(requested(&site.attach((0, 1), None)), [(worker(1, 1), 64)]);
    let attached = site.attach((0, 0), Some(B));
    assert_eq!(verdict(&attached), Ok(()));
    assert_eq!(requested(&attached), [(worker(1, 0), 64)]);
}

/// The answer to a statement may arrive after its time limit, when the worker has stated its memory again: it refuses the
/// requests to read its inventory that followed.
#[test]
fn an_inventory_is_requested_again_from_a_worker_that_states_its_memory_again() {
    let mut site = Site::new(1, 1);
    let reads = |effects: &[LeaderEffect]| -> Vec<u64> {
        let reads = effects.iter().filter_map(|effect| match effect {
            LeaderEffect::ReadInventory { read_id, .. } => Some(*read_id),
            _ => None,
        });
        reads.collect()
    };
    let first = site.attach((0, 0), Some(A));
    let [read] = reads(&first)[..] else {
        panic!("{first:?}")
    };
    site.attaches -= 1;
    let memory = WorkerMemory {
        engine: engine_id(A.engine),
        geometry: geometry().into(),
        arena_pages: PerTier::host(A.arena_pages),
    };
    let again = site.state((0, 0), Some(memory));
    let [later] = reads(&again)[..] else {
        panic!("{again:?}")
    };
    assert!(later > read, "{later} after {read}");
    let admitted = |effect: &LeaderEffect| matches!(effect, LeaderEffect::AdmitMemory { .. });
    let admitted = again.iter().position(admitted);
    let read = |effect: &LeaderEffect| matches!(effect, LeaderEffect::ReadInventory { .. });
    assert!(admitted < again.iter().position(read), "behind the answer");
    assert_eq!(site.read(&again), [64]);
    assert!(site.leader.is_ready());
}
