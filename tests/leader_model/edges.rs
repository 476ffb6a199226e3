//! Edge cases: limits, deadlines, and the effect of repeated and final messages.

use kvferry_core::AttachedDepot;
use kvferry_types::{Part, PerTier, ResetId, Scope, TransferId};

use super::inventory::{Reader, fenced};
use super::*;

fn lookup(slot: u64, pages: usize, device_pages: u32) -> Request {
    Request::Lookup {
        slot: SlotId(slot),
        namespace: vec![7],
        hashes: sequence(0, pages),
        have_pages: device_pages,
        limit_pages: None,
    }
}

fn answer_of(world: &World) -> Option<Reply> {
    world.requests[&(0, RequestId(world.next_id))].1.clone()
}

fn store(world: &mut World, pages: usize) {
    world.request(0, lookup(0, pages, 0));
    world.take(Step::Store { engine: 0, slot: 0 });
    while let Some(transfer) = world.open.keys().next().copied() {
        (0..RANKS).for_each(|rank| world.report(transfer, rank, true, EPOCH));
    }
}

#[test]
fn a_lookup_pins_only_pages_that_the_engine_lacks() {
    let mut world = World::new();
    store(&mut world, 16);
    for (device_pages, hit_pages, pins) in
        [(0, 16, 2), (7, 9, 2), (8, 8, 1), (15, 1, 1), (16, 0, 0)]
    {
        world.request(0, lookup(1, 16, device_pages));
        let found = Answer::Lookup(LookupAnswer {
            hit_pages,
            ..LookupAnswer::default()
        });
        assert_eq!(answer_of(&world), Some(Ok(found)), "{device_pages}");
        let pool = world.leader.pool().expect("a pool");
        assert_eq!(pool.pins(), pins, "{device_pages}");
    }
    world.request(0, lookup(1, 16, 17));
    let why = answer_of(&world).expect("an answer").expect_err("too many");
    assert!(matches!(
        why,
        Refusal::Invalid {
            field: "have_pages",
            ..
        }
    ));
}

#[test]
fn pages_that_an_engine_does_not_have_are_refused() {
    let mut world = World::new();
    store(&mut world, 8);
    let refused = |world: &mut World, run: (u32, u32)| {
        world.request(0, lookup(1, 8, 0));
        let destination = match run {
            (_, 0) => PageList::default(),
            (start, count) => PageList::run(start, count),
        };
        world.request(
            0,
            Request::Load {
                slot: SlotId(1),
                parts: vec![Part::new(GroupId(0), 0, destination)],
                after: RequestId(0),
            },
        );
        match answer_of(world) {
            None => None,
            Some(Err(Refusal::Invalid { value, .. })) => Some(value),
            Some(other) => unreachable!("{other:?}"),
        }
    };
    for (run, pages) in [
        ((64, 1), "64 to 64"),
        ((60, 5), "60 to 64"),
        ((u32::MAX, 2), "4294967295 to 4294967296"),
    ] {
        let value = format!("{pages}, and the group has pages 0 to 63");
        assert_eq!(refused(&mut world, run), Some(value));
    }
    assert_eq!(refused(&mut world, (0, 0)).as_deref(), Some("empty"));
    assert!(world.open.is_empty());
    assert_eq!(refused(&mut world, (60, 4)), None);
    assert_eq!(world.open.len(), 1);
}

#[test]
fn a_load_that_names_a_device_page_twice_is_refused_before_any_copy() {
    let mut world = World::new();
    store(&mut world, 8);
    world.request(0, lookup(1, 8, 0));
    let mut load = |pages: [u32; 3]| {
        let parts = vec![Part::new(GroupId(0), 0, pages.into_iter().collect())];
        let request = Request::Load {
            slot: SlotId(1),
            parts,
            after: RequestId(0),
        };
        world.request(0, request);
        (answer_of(&world), world.open.len())
    };
    let refused = Err(Refusal::Invalid {
        field: "parts.pages",
        value: "device page 4 of group 0, twice".to_owned(),
        remedy: "name each device page once in a load, because two pages would be written into it",
    });
    assert_eq!(load([4, 9, 4]), (Some(refused), 0));
    // The hold of the lookup is still there.
    assert_eq!(load([4, 9, 5]), (None, 1));
}

#[test]
fn a_failed_load_is_counted_once_and_a_whole_one_is_not() {
    let mut world = World::new();
    store(&mut world, 8);
    for (failing, failed) in [(None, 0), (Some(1), 1), (Some(0), 2)] {
        world.request(0, lookup(1, 8, 0));
        world.take(Step::Load { engine: 0, slot: 1 });
        let transfer = *world.open.keys().next().expect("a copy");
        for rank in 0..RANKS {
            world.report(transfer, rank, failing != Some(rank), EPOCH);
        }
        let counted = world.leader.counters();
        let counted: Vec<u64> = counted
            .filter(|(name, _)| *name == "failed_copies")
            .map(|(_, count)| count)
            .collect();
        assert_eq!(counted, [failed]);
    }
}

#[test]
fn an_engine_that_stays_away_is_unknown_when_its_last_copy_has_ended() {
    let mut world = World::new();
    store(&mut world, 8);
    world.request(0, lookup(1, 8, 0));
    world.take(Step::Load { engine: 0, slot: 1 });
    world.event(LeaderEvent::EngineClosed(engine_id(0)));
    world.take(Step::Wait(3));
    assert!(world.leader.knows(engine_id(0)));
    // The grace time is over, and the copy has missed its deadline.
    world.take(Step::Wait(8));
    assert!(world.leader.knows(engine_id(0)));
    let transfer = *world.open.keys().next().expect("a copy");
    for rank in 0..RANKS {
        assert!(world.leader.knows(engine_id(0)), "{rank}");
        world.report(transfer, rank, true, EPOCH);
    }
    assert!(!world.leader.knows(engine_id(0)));
}

#[test]
fn the_leaders_accessors_match_its_state() {
    let mut world = World::without_workers();
    assert_eq!(world.leader.epoch(), EPOCH);
    assert!(!world.leader.is_ready());
    for engine in 0..2 {
        for rank in 0..RANKS {
            assert!(!world.leader.is_ready(), "{engine} {rank}");
            world.attach(engine, rank);
        }
    }
    assert!(world.leader.is_ready());
    assert_eq!((world.leader.slots(), world.leader.open_requests()), (0, 0));
    for slot in 0..3 {
        world.request(slot as u8 % 2, lookup(slot, 4, 0));
    }
    assert_eq!(world.leader.slots(), 3);
    assert_eq!(world.leader.counts().lookups, 3);
    world.take(Step::Store { engine: 0, slot: 0 });
    assert_eq!(world.leader.open_requests(), 1);
    world.take(Step::Finish { engine: 1, slot: 1 });
    assert_eq!(world.leader.slots(), 2);
    // The leader serves no request when every replica lacks a worker.
    for engine in 0..2 {
        assert!(world.leader.is_ready(), "{engine}");
        world.event(LeaderEvent::WorkerLost(worker(engine, 1)));
    }
    assert!(!world.leader.is_ready());
}

/// Hash of decisions, each given as its four words, as the digest takes them.
fn words(decisions: &[[u64; 4]]) -> blake3::Hash {
    let bytes = decisions
        .iter()
        .flatten()
        .flat_map(|word| word.to_le_bytes());
    blake3::hash(&bytes.collect::<Vec<u8>>())
}

#[test]
fn the_digest_covers_the_decisions_of_each_request() {
    let mut world = World::without_workers();
    let mut settings = settings();
    settings.record_decisions = true;
    world.leader = Leader::new(settings);
    world.begin();
    let nothing = format!("blake3:{}", blake3::hash(b"").to_hex());
    assert_eq!(world.leader.decisions_digest().as_ref(), Some(&nothing));
    store(&mut world, 12);
    assert_eq!(
        world.leader.decisions_digest(),
        Some(nothing),
        "it has not finished"
    );
    world.take(Step::Finish { engine: 0, slot: 0 });
    world.request(0, lookup(1, 12, 2));
    world.take(Step::Load { engine: 0, slot: 1 });
    let transfer = *world.open.keys().next().expect("a copy");
    (0..RANKS).for_each(|rank| world.report(transfer, rank, true, EPOCH));
    world.take(Step::Finish { engine: 0, slot: 1 });
    // A page has 16 tokens. Two blocks of 8 and 4 pages are adjacent in the arena.
    let stored = words(&[[1, 0, 0, 0], [3, 0, 0, 8], [3, 8, 8, 4]]);
    let loaded = words(&[[1, 32, 160, 0], [2, 2, 2, 6], [2, 8, 8, 4]]);
    let run = [stored.as_bytes().as_slice(), loaded.as_bytes()].concat();
    let run = format!("blake3:{}", blake3::hash(&run).to_hex());
    assert_eq!(world.leader.decisions_digest(), Some(run));
}

#[test]
fn growth_eviction_and_refusal_are_decisions_too() {
    let mut world = World::without_workers();
    let mut settings = settings();
    settings.record_decisions = true;
    world.leader = Leader::new(settings);
    world.begin();
    let run = |world: &mut World, slot: u64, namespace: u8, pages: usize, finish: bool| {
        let lookup = Request::Lookup {
            slot: SlotId(slot),
            namespace: vec![namespace],
            hashes: sequence(0, pages),
            have_pages: 0,
            limit_pages: None,
        };
        world.request(0, lookup);
        world.take(Step::Store { engine: 0, slot });
        while let Some(transfer) = world.open.keys().next().copied() {
            (0..RANKS).for_each(|rank| world.report(transfer, rank, true, EPOCH));
        }
        if finish {
            world.take(Step::Finish { engine: 0, slot });
        }
    };
    // The arena has 60 pages. A block of 4 grows by 2; 50 pages fill the rest except for 4.
    run(&mut world, 0, 7, 4, true);
    run(&mut world, 0, 7, 6, true);
    run(&mut world, 1, 8, 39, true);
    run(&mut world, 1, 9, 11, true);
    // The oldest block is evicted from its tail to make room for two more pages.
    run(&mut world, 2, 10, 6, true);
    let mut expected: Vec<blake3::Hash> = vec![
        words(&[[1, 0, 0, 0], [3, 0, 0, 4]]),
        words(&[[1, 0, 64, 0], [4, 4, 4, 2]]),
    ];
    let stores = |hit: u64, at: u64, pages: u64| {
        let mut all = vec![[1, 0, hit, 0]];
        all.extend(
            (0..pages)
                .step_by(8)
                .map(|first| [3, first, at + first, (pages - first).min(8)]),
        );
        words(&all)
    };
    expected.push(stores(0, 6, 39));
    expected.push(stores(0, 45, 11));
    expected.push(words(&[[1, 0, 0, 0], [5, 0, 0, 6], [3, 0, 0, 6]]));
    let digest = |expected: &[blake3::Hash]| {
        let all: Vec<u8> = expected.iter().flat_map(|hash| *hash.as_bytes()).collect();
        format!("blake3:{}", blake3::hash(&all).to_hex())
    };
    assert_eq!(world.leader.decisions_digest(), Some(digest(&expected)));

    // All pages but the 4 free ones are held now: a store that finds no room is refused.
    for (slot, namespace, pages) in [(10, 8, 39), (11, 9, 11), (12, 10, 6)] {
        let lookup = Request::Lookup {
            slot: SlotId(slot),
            namespace: vec![namespace],
            hashes: sequence(0, pages),
            have_pages: 0,
            limit_pages: None,
        };
        world.request(0, lookup);
    }
    run(&mut world, 3, 11, 7, true);
    expected.push(words(&[[1, 0, 0, 0], [3, 0, 56, 4], [6, 4, 3, 0]]));
    assert_eq!(world.leader.decisions_digest(), Some(digest(&expected)));
}

#[test]
fn a_store_waits_for_its_own_pages_only() {
    let mut world = World::new();
    world.request(0, lookup(0, 8, 0));
    world.take(Step::Store { engine: 0, slot: 0 });
    let first = RequestId(world.next_id);
    let transfer = *world.open.keys().next().expect("a copy");
    world.request(0, lookup(1, 12, 0));
    let behind = Request::Store {
        slot: SlotId(1),
        parts: vec![Part::new(GroupId(0), 8, PageList::run(20, 4))],
        more: None,
        after: RequestId(0),
    };
    world.request(0, behind);
    let tail = *world.open.keys().next_back().expect("a copy");
    assert_ne!(transfer, tail);
    (0..RANKS).for_each(|rank| world.report(tail, rank, true, EPOCH));
    let stored = Answer::Store(StoreAnswer {
        stored_pages: 4,
        present_pages: 0,
        refused_pages: 0,
        failed_pages: 0,
    });
    assert_eq!(answer_of(&world), Some(Ok(stored)));
    assert_eq!(world.requests[&(0, first)].1, None, "its copy goes on");
}

#[test]
fn a_refusal_names_the_missing_workers() {
    let mut reader = Reader::new();
    let not_ready = |reader: &mut Reader, engine, id| {
        let requested = reader.step(LeaderEvent::Request {
            engine: engine_id(engine),
            id: RequestId(id),
            deadline: Time(1),
            request: lookup(0, 1, 0),
        });
        match &requested[..] {
            [
                LeaderEffect::Answer {
                    answer: Err(why), ..
                },
            ] => why.clone(),
            other => unreachable!("{other:?}"),
        }
    };
    let waiting = |waiting_for| Refusal::NotReady {
        waiting_for,
        ranks: RANKS,
        replicas: 2,
        detail: String::new(),
    };
    reader.step(LeaderEvent::EngineOpened(engine_id(0)));
    assert_eq!(not_ready(&mut reader, 0, 1), waiting(6));
    // The worker is attached, but without its engine's memory.
    reader.attaches += 1;
    reader.step(LeaderEvent::Attach(AttachRequest {
        worker: worker(1, 2),
        ranks: RANKS,
        shards: RANKS,
        attach: AttachId(reader.attaches),
        depots: PerTier::host(AttachedDepot {
            depot: DepotId(2),
            epoch: Epoch(0),
        }),
    }));
    assert_eq!(reader.leader.attached_workers(), 0);
    assert_eq!(not_ready(&mut reader, 0, 2), waiting(6));
    reader.attach(1, 2);
    assert_eq!(reader.leader.attached_workers(), 1);
    assert_eq!(not_ready(&mut reader, 0, 3), waiting(5));
    reader.step(LeaderEvent::WorkerLost(worker(1, 2)));
    assert_eq!(reader.leader.attached_workers(), 0);
    assert_eq!(not_ready(&mut reader, 0, 4), waiting(6));
    for engine in 0..2 {
        (0..RANKS).for_each(|rank| drop(reader.attach(engine, rank)));
    }
    assert_eq!(not_ready(&mut reader, 0, 5), Refusal::Reading);
    // The seats of all replicas are taken.
    reader.step(LeaderEvent::EngineOpened(engine_id(2)));
    let detail = String::new();
    assert_eq!(
        not_ready(&mut reader, 2, 1),
        Refusal::AnotherEngine { detail }
    );
}

/// The leader's answer to an attach with a depot and without an engine's memory.
fn attach_depot(reader: &mut Reader, replica: u8, rank: u16, depot: u128) -> Result<(), Refusal> {
    reader.attaches += 1;
    let effects = reader.step(LeaderEvent::Attach(AttachRequest {
        worker: worker(replica, rank),
        ranks: RANKS,
        shards: RANKS,
        attach: AttachId(reader.attaches),
        depots: PerTier::host(AttachedDepot {
            depot: DepotId(depot),
            epoch: Epoch(0),
        }),
    }));
    let verdict = effects.into_iter().find_map(|effect| match effect {
        LeaderEffect::Admit { verdict, .. } => Some(verdict),
        _ => None,
    });
    verdict.expect("a verdict").map(|_| ())
}

#[test]
fn workers_of_one_rank_share_a_depot_as_long_as_they_are_there() {
    let mut reader = Reader::new();
    let not_shared = |by: (u8, u16), other: (u8, u16)| {
        let (worker, other) = (worker(by.0, by.1), worker(other.0, other.1));
        Err(Refusal::DepotNotShared { worker, other })
    };
    for (replica, rank, depot, reported) in [
        (0, 0, 10, Ok(())),
        // Another rank has another depot.
        (0, 1, 11, Ok(())),
        (1, 1, 99, not_shared((1, 1), (0, 1))),
        (1, 1, 11, Ok(())),
        (1, 0, 10, Ok(())),
        (0, 0, 98, not_shared((0, 0), (1, 0))),
    ] {
        assert_eq!(attach_depot(&mut reader, replica, rank, depot), reported);
    }
    reader.step(LeaderEvent::WorkerLost(worker(1, 1)));
    let alone = attach_depot(&mut reader, 0, 1, 99);
    assert_eq!(alone, Ok(()), "it is the only one of its rank now");
}

#[test]
fn a_late_copy_is_cancelled_repeatedly_and_its_workers_are_fenced_after_the_fence() {
    let mut reader = Reader::served();
    let fence = reader.fence();
    let deadline = reader.now + Duration::from_secs(5);
    let mut send_request = |id, request| {
        reader.step(LeaderEvent::Request {
            engine: engine_id(0),
            id: RequestId(id),
            deadline,
            request,
        })
    };
    send_request(1, lookup(0, 8, 0));
    let store = Request::Store {
        slot: SlotId(0),
        parts: vec![Part::new(GroupId(0), 0, PageList::run(0, 8))],
        more: None,
        after: RequestId(0),
    };
    let copies = send_request(2, store);
    let [LeaderEffect::Transfer { transfer: copy, .. }] = &copies[..] else {
        unreachable!("{copies:?}")
    };
    let cancel = |rank| LeaderEffect::Cancel {
        worker: worker(0, rank),
        transfers: vec![copy.id],
    };
    let cancels = [cancel(0), cancel(1), cancel(2)];
    reader.now = Time(deadline.0 - 1);
    assert_eq!(reader.step(LeaderEvent::Tick), []);
    for quarter in 0..4 {
        let at = deadline + fence * quarter / 4;
        assert_eq!(reader.leader.next_timeout(), Some(at));
        reader.now = at;
        let effects = reader.step(LeaderEvent::Tick);
        assert_eq!(effects, cancels, "{quarter}");
    }
    reader.now = deadline + fence;
    let fence = |rank| LeaderEffect::FenceWorker(worker(0, rank));
    assert_eq!(
        reader.step(LeaderEvent::Tick),
        [cancels, [fence(0), fence(1), fence(2)]].concat()
    );
}

/// Starts stores of one engine, 8 pages each, each with a deadline in seconds.
fn stores(reader: &mut Reader, of: &[(u8, u64)]) -> Vec<LeaderEffect> {
    let mut effects = Vec::new();
    for ((name, seconds), slot) in of.iter().zip(0..) {
        let deadline = reader.now + Duration::from_secs(*seconds);
        let hashes = sequence(*name, 8);
        let look = Request::Lookup {
            slot: SlotId(slot),
            namespace: vec![0],
            hashes,
            have_pages: 0,
            limit_pages: None,
        };
        let store = Request::Store {
            slot: SlotId(slot),
            parts: vec![Part::new(GroupId(0), 0, PageList::run(0, 8))],
            more: None,
            after: RequestId(0),
        };
        for (id, request) in [(2 * slot + 1, look), (2 * slot + 2, store)] {
            effects.extend(reader.step(LeaderEvent::Request {
                engine: engine_id(0),
                id: RequestId(id),
                deadline,
                request,
            }));
        }
    }
    effects
}

fn copies_of(effects: &[LeaderEffect]) -> Vec<TransferId> {
    let transfer = |effect: &LeaderEffect| match effect {
        LeaderEffect::Transfer { transfer, .. } => Some(transfer.id),
        _ => None,
    };
    effects.iter().filter_map(transfer).collect()
}

fn answer_to(effects: &[LeaderEffect], request: u64) -> Option<Answer> {
    effects.iter().find_map(|effect| match effect {
        LeaderEffect::Answer { id, answer, .. } if id.0 == request => answer.clone().ok(),
        _ => None,
    })
}

fn end_everywhere(reader: &mut Reader, transfer: TransferId, complete: bool) -> Vec<LeaderEffect> {
    let mut effects = Vec::new();
    for rank in 0..RANKS {
        let ended = EndedCopy::new(transfer, complete);
        effects.extend(reader.step(LeaderEvent::Ended {
            worker: worker(0, rank),
            epoch: EPOCH,
            copies: vec![ended],
        }));
    }
    effects
}

fn stored(stored_pages: u32, failed_pages: u32) -> Option<Answer> {
    Some(Answer::Store(StoreAnswer {
        stored_pages,
        present_pages: 0,
        refused_pages: 0,
        failed_pages,
    }))
}

#[test]
fn a_worker_receives_one_cancel_for_all_its_late_copies() {
    let mut reader = Reader::served();
    // Names of different pairs share no pages.
    let transfers = copies_of(&stores(&mut reader, &[(0, 5), (2, 5), (4, 5)]));
    assert_eq!(transfers.len(), 3);
    let (begun, fence) = (reader.now, reader.fence());
    let cancel = |rank| LeaderEffect::Cancel {
        worker: worker(0, rank),
        transfers: transfers.clone(),
    };
    reader.now = begun + Duration::from_secs(5);
    let effects = reader.step(LeaderEvent::Tick);
    assert_eq!(effects, [cancel(0), cancel(1), cancel(2)]);
    let effects = reader.until(begun + Duration::from_secs(5) + fence);
    let fenced = |effect: &&LeaderEffect| matches!(effect, LeaderEffect::FenceWorker(_));
    assert_eq!(effects.iter().filter(fenced).count(), usize::from(RANKS));
    assert_eq!(effects.len(), 2 * usize::from(RANKS));
}

#[test]
fn copies_are_late_for_a_paused_leader_after_it_has_checked_again() {
    let mut reader = Reader::served();
    copies_of(&stores(&mut reader, &[(0, 5)]));
    let fence = reader.fence();
    reader.now = reader.now + Duration::from_secs(5) + fence * 3;
    assert_eq!(fenced(&reader.step(LeaderEvent::Tick)), []);
    let again = reader.now + fence;
    assert_eq!(fenced(&reader.until(again)).len(), usize::from(RANKS));
}

#[test]
fn a_store_that_waits_for_another_ones_copy_is_answered_at_its_own_deadline() {
    let mut reader = Reader::served();
    let transfers = copies_of(&stores(&mut reader, &[(0, 60), (0, 5)]));
    let [transfer] = transfers[..] else {
        unreachable!("{transfers:?}")
    };
    let begun = reader.now;
    assert_eq!(
        reader.leader.next_timeout(),
        Some(begun + Duration::from_secs(5))
    );
    reader.now = begun + Duration::from_secs(5);
    let effects = reader.step(LeaderEvent::Tick);
    assert_eq!(answer_to(&effects, 4), stored(0, 8));
    assert_eq!(effects.len(), 1, "the copy goes on: {effects:?}");
    let effects = end_everywhere(&mut reader, transfer, true);
    assert_eq!(answer_to(&effects, 2), stored(8, 0));
    assert_eq!(answer_to(&effects, 4), None, "answered once");
}

#[test]
fn stores_that_wait_for_a_late_copy_are_answered_at_once() {
    let mut reader = Reader::served();
    let transfers = copies_of(&stores(&mut reader, &[(0, 5), (0, 60)]));
    let [transfer] = transfers[..] else {
        unreachable!("{transfers:?}")
    };
    reader.now = reader.now + Duration::from_secs(5);
    let effects = reader.step(LeaderEvent::Tick);
    assert_eq!(answer_to(&effects, 4), stored(0, 8));
    assert_eq!(answer_to(&effects, 2), None, "its pages may still be read");
    let effects = end_everywhere(&mut reader, transfer, true);
    assert_eq!(answer_to(&effects, 2), stored(0, 8));
    assert_eq!(answer_to(&effects, 4), None, "answered once");
}

#[test]
fn an_invalidation_is_requested_once_per_connection_and_given_up_at_the_deadline() {
    let mut reader = Reader::served();
    let fence = reader.fence();
    let deadline = reader.now + fence * 5 / 8;
    let invalidate = |rank, replica| LeaderEffect::Invalidate {
        tier: None,
        worker: worker(replica, rank),
        id: ResetId(1),
        scope: Scope::Everything,
        through: TransferId(1),
        deadline,
    };
    let requested = reader.step(LeaderEvent::Request {
        engine: engine_id(0),
        id: RequestId(1),
        deadline,
        request: Request::Reset {
            tier: None,
            scope: ResetScope::Everything,
        },
    });
    assert_eq!(
        requested,
        [invalidate(0, 0), invalidate(1, 0), invalidate(2, 0)]
    );
    let invalidated = |rank| LeaderEvent::Invalidated {
        worker: worker(0, rank),
        epoch: EPOCH,
        id: ResetId(1),
    };
    assert_eq!(reader.step(invalidated(1)), []);
    assert_eq!(reader.step(invalidated(1)), [], "said again");
    // When a worker dies, the invalidation is requested from another worker of its shard at the next event.
    let again = reader.step(LeaderEvent::WorkerDead(worker(0, 2)));
    assert_eq!(again, [invalidate(2, 1)]);
    reader.now = reader.now + fence / 4;
    assert_eq!(
        reader.step(LeaderEvent::Tick),
        [],
        "a worker that is busy with it is left alone"
    );
    let lost = reader.step(LeaderEvent::WorkerLost(worker(0, 0)));
    assert_eq!(lost, [invalidate(0, 1)], "another one of its shard");
    assert_eq!(reader.leader.next_timeout(), Some(deadline));
    reader.now = deadline;
    let late = LeaderEffect::Answer {
        engine: engine_id(0),
        id: RequestId(1),
        answer: Err(Refusal::ResetUnconfirmed { shards: 2 }),
    };
    assert_eq!(reader.step(LeaderEvent::Tick), [late]);
    assert_eq!(reader.leader.next_timeout(), None);
    assert_eq!(reader.step(invalidated(0)), [], "too late");
}

/// A repeated invalidation names the stores before the reset, not those that were made meanwhile.
#[test]
fn a_repeated_invalidation_spares_what_was_stored_after_the_reset() {
    let mut reader = Reader::served();
    let deadline = reader.now + Duration::from_secs(60);
    let send_request = |reader: &mut Reader, id, request| {
        reader.step(LeaderEvent::Request {
            engine: engine_id(0),
            id: RequestId(id),
            deadline,
            request,
        })
    };
    let store = |reader: &mut Reader, id, slot| {
        send_request(reader, id, lookup(slot, 8, 0));
        let source = PageList::run(0, 8);
        let (slot, first_page, more) = (SlotId(slot), 0, None);
        let store = Request::Store {
            slot,
            parts: vec![Part::new(GroupId(0), first_page, source)],
            more,
            after: RequestId(0),
        };
        let copies = send_request(reader, id + 1, store);
        let [LeaderEffect::Transfer { transfer: copy, .. }] = &copies[..] else {
            unreachable!("{copies:?}")
        };
        let record = copy.record.as_ref().expect("a store lists its pages");
        (copy.id, record.stored.transfer)
    };
    let invalidations = |effects: Vec<LeaderEffect>| -> Vec<TransferId> {
        let through = |effect| match effect {
            LeaderEffect::Invalidate { through, .. } => Some(through),
            _ => None,
        };
        effects.into_iter().filter_map(through).collect()
    };
    let (transfer, before) = store(&mut reader, 1, 0);
    for rank in 0..RANKS {
        let ended = EndedCopy::complete(transfer);
        reader.step(LeaderEvent::Ended {
            worker: worker(0, rank),
            epoch: EPOCH,
            copies: vec![ended],
        });
    }
    send_request(&mut reader, 3, Request::Finish { slot: SlotId(0) });
    let scope = ResetScope::Everything;
    let first = invalidations(send_request(
        &mut reader,
        4,
        Request::Reset { scope, tier: None },
    ));
    assert_eq!(first.len(), usize::from(RANKS));
    let (_, after) = store(&mut reader, 5, 1);
    let lost = (0..RANKS).map(|rank| LeaderEvent::WorkerLost(worker(0, rank)));
    let again: Vec<TransferId> = lost
        .flat_map(|lost| invalidations(reader.step(lost)))
        .collect();
    assert_eq!(again, first, "asked for again, of other workers");
    for through in again {
        assert!(before <= through && through < after, "{through:?}");
    }
}
