//! Limits on the work and memory that a leader gives to one request, engine or worker, while other requests are served.

use super::tests::{ENGINE, geometry, serving, with_arena};
use super::*;
use crate::leader::event::{AttachRequest, AttachedDepot, WorkerMemory};
use crate::leader::refusal::Refusal;
use crate::leader::session::{HASH_BYTES_LEFT_MAX, HASH_BYTES_PER_ENGINE_MAX};
use crate::pool::store_window::{LOOKS_AROUND_MAX, MISSES_AROUND_MAX};
use kvferry_types::{
    Anchor, Answer, AttachId, DepotId, DomainId, EndedCopy, Fingerprint, GroupGeometry, GroupId,
    LookupAnswer, PageHashes, PageList, PageRecord, PagesBelow, Part, PerTier, Rank, Replica,
    Request, ResetAnswer, ResetScope, StoreAnswer, Stored, TierId,
};

const RATIO: u32 = 4;
const WORKER: WorkerId = WorkerId {
    replica: Replica(0),
    rank: Rank(0),
};

fn sequence(pages: u32, salt: u8) -> PageHashes {
    let bytes = (0..pages).flat_map(|page| {
        let mut hash = [salt; 16];
        hash[..4].copy_from_slice(&page.to_be_bytes());
        hash
    });
    PageHashes::packed(16, bytes.collect()).expect("16 bytes a page")
}

fn lookup(slot: u64, namespace: u8, hashes: &PageHashes) -> Request {
    Request::Lookup {
        slot: SlotId(slot),
        namespace: vec![namespace],
        hashes: hashes.clone(),
        have_pages: 0,
        limit_pages: None,
    }
}

fn step(leader: &mut Leader, now: Time, event: LeaderEvent) -> Vec<LeaderEffect> {
    let mut effects = Vec::new();
    leader.step(now, event, &mut effects);
    assert_eq!(leader.check(), Ok(()));
    effects
}

fn request(leader: &mut Leader, now: Time, id: u64, request: Request) -> Vec<LeaderEffect> {
    let event = LeaderEvent::Request {
        engine: ENGINE,
        id: RequestId(id),
        deadline: now + Duration::from_secs(60),
        request,
    };
    step(leader, now, event)
}

fn answers(effects: &[LeaderEffect]) -> Vec<Result<Answer, Refusal>> {
    let answers = effects.iter().filter_map(|effect| match effect {
        LeaderEffect::Answer { answer, .. } => Some(answer.clone()),
        _ => None,
    });
    answers.collect()
}

fn invalidations(effects: &[LeaderEffect]) -> usize {
    let invalidate = |effect: &&LeaderEffect| matches!(effect, LeaderEffect::Invalidate { .. });
    effects.iter().filter(invalidate).count()
}

/// Looks a sequence up in a slot of its own and finishes the slot; returns the number of pages found.
fn found(leader: &mut Leader, now: Time, id: u64, namespace: u8, hashes: &PageHashes) -> u32 {
    let effects = request(leader, now, id, lookup(id, namespace, hashes));
    let slot = SlotId(id);
    request(leader, now, id + 1, Request::Finish { slot });
    match answers(&effects)[..] {
        [Ok(Answer::Lookup(LookupAnswer { hit_pages, .. }))] => hit_pages,
        ref other => unreachable!("{other:?} instead of a lookup's answer"),
    }
}

/// Stores pages `first_page..end` of a slot whose hashes are known and ends its copies completely; returns the answer.
fn store(leader: &mut Leader, now: Time, id: u64, slot: u64, first_page: u32, end: u32) -> Answer {
    let source = PageList::run(0, end - first_page);
    let effects = request(
        leader,
        now,
        id,
        Request::Store {
            slot: SlotId(slot),
            parts: vec![Part::new(GroupId(0), first_page, source)],
            more: None,
            after: RequestId(0),
        },
    );
    let copies = effects.iter().filter_map(|effect| match effect {
        LeaderEffect::Transfer { transfer: copy, .. } => Some(EndedCopy::complete(copy.id)),
        _ => None,
    });
    let ended = LeaderEvent::Ended {
        worker: WORKER,
        epoch: Epoch(1),
        copies: copies.collect(),
    };
    match answers(&step(leader, now, ended))[..] {
        [Ok(answer)] => answer,
        ref other => unreachable!("{other:?} instead of a store's answer"),
    }
}

/// Stores a whole sequence in parts of 32 pages.
fn store_all(leader: &mut Leader, id: u64, namespace: u8, hashes: &PageHashes) {
    request(leader, Time(0), id, lookup(id, namespace, hashes));
    for first in (0..hashes.len() as u32).step_by(32) {
        let end = (first + 32).min(hashes.len() as u32);
        store(leader, Time(0), id + 1 + u64::from(first), id, first, end);
    }
    let finish = Request::Finish { slot: SlotId(id) };
    request(leader, Time(0), id + 1_000_000, finish);
}

/// Ticks until no timer is due within 1 s; returns all answers, the number of invalidations and the number of steps.
fn go_on(leader: &mut Leader, now: &mut Time) -> (Vec<Result<Answer, Refusal>>, usize, usize) {
    let (mut answered, mut invalidated, mut steps) = (Vec::new(), 0, 0);
    while let Some(at) = leader
        .next_timeout()
        .filter(|at| now.until(*at) < Duration::from_secs(1))
    {
        *now = at;
        let effects = step(leader, at, LeaderEvent::Tick);
        answered.extend(answers(&effects));
        invalidated += invalidations(&effects);
        steps += 1;
    }
    (answered, invalidated, steps)
}

fn invalidated(leader: &mut Leader, now: Time) -> Vec<LeaderEffect> {
    let id = leader.resets.last();
    let invalidated = LeaderEvent::Invalidated {
        worker: WORKER,
        epoch: Epoch(1),
        id,
    };
    step(leader, now, invalidated)
}

#[test]
fn a_reset_of_many_pages_is_done_in_bounded_slices_and_others_are_served_between_them() {
    let mut leader = with_arena(4096, |settings| settings.reset_slice_pages = 64);
    let (meant, other) = (sequence(1024, 1), sequence(256, 2));
    store_all(&mut leader, 1, 7, &meant);
    store_all(&mut leader, 2_000_000, 8, &other);
    let mut now = Time(0);
    assert_eq!(found(&mut leader, now, 4_000_000, 7, &meant), 1024);

    let scope = ResetScope::Pages(vec![7], sequence(131_072, 1));
    let effects = request(
        &mut leader,
        now,
        5_000_000,
        Request::Reset { scope, tier: None },
    );
    assert_eq!((answers(&effects), invalidations(&effects)), (vec![], 0));
    // From the first step on no page of the reset is found, and all other pages are.
    assert_eq!(found(&mut leader, now, 6_000_000, 7, &meant), 0);
    assert_eq!(found(&mut leader, now, 6_000_002, 8, &other), 256);
    // Pages that are stored meanwhile are not part of the reset.
    let young = sequence(8, 3);
    request(&mut leader, now, 6_000_004, lookup(9, 7, &young));
    let stored = store(&mut leader, now, 6_000_005, 9, 0, 8);
    assert!(matches!(
        stored,
        Answer::Store(StoreAnswer {
            stored_pages: 8,
            ..
        })
    ));
    request(
        &mut leader,
        now,
        6_000_006,
        Request::Finish { slot: SlotId(9) },
    );

    let (answered, requested, steps) = go_on(&mut leader, &mut now);
    assert_eq!(
        (answered, requested),
        (vec![], 1),
        "the shard is asked once"
    );
    assert!(steps >= 2 * 1024 / 64, "{steps} steps");
    let largest = leader.counts().largest_reset_slice_pages;
    assert!(
        largest <= u64::from(64 + RATIO),
        "{largest} pages in one step"
    );
    assert_eq!(found(&mut leader, now, 7_000_000, 7, &meant), 0);

    // The shard receives no second request over the same connection, however long it takes.
    now = now + Duration::from_secs(30);
    assert_eq!(invalidations(&step(&mut leader, now, LeaderEvent::Tick)), 0);
    let removed = Ok(Answer::Reset(ResetAnswer {
        pages: 1024,
        below_pages: PagesBelow::default(),
    }));
    assert_eq!(answers(&invalidated(&mut leader, now)), [removed]);
    assert_eq!(found(&mut leader, now, 8_000_000, 8, &other), 256);
    assert_eq!(found(&mut leader, now, 8_000_002, 7, &young), 8);
    assert!(
        leader
            .pool()
            .is_some_and(|pool| pool.page_states().ready == 264)
    );
}

#[test]
fn a_reset_that_is_refused_in_its_last_slice_has_removed_nothing() {
    let mut leader = with_arena(4096, |settings| settings.reset_slice_pages = 64);
    // The block that is held was stored last: the slices before its own find no holder.
    let (free, held) = (sequence(512, 1), sequence(RATIO, 2));
    store_all(&mut leader, 1, 7, &free);
    store_all(&mut leader, 2_000_000, 7, &held);
    let mut now = Time(0);
    request(&mut leader, now, 4_000_000, lookup(5, 7, &held));
    let scope = ResetScope::Namespace(vec![7]);
    let effects = request(
        &mut leader,
        now,
        4_000_001,
        Request::Reset { scope, tier: None },
    );
    assert_eq!(answers(&effects), []);
    let (answered, requested, _) = go_on(&mut leader, &mut now);
    assert_eq!(
        (answered, requested),
        (vec![Err(Refusal::Leased { holders: 1 })], 0)
    );
    request(
        &mut leader,
        now,
        4_000_002,
        Request::Finish { slot: SlotId(5) },
    );
    assert_eq!(found(&mut leader, now, 5_000_000, 7, &free), 512);
    assert_eq!(found(&mut leader, now, 5_000_002, 7, &held), RATIO);
}

#[test]
fn a_worker_receives_a_repeated_invalidation_over_another_connection_only() {
    let mut leader = serving();
    let everything = || Request::Reset {
        tier: None,
        scope: ResetScope::Everything,
    };
    assert_eq!(
        invalidations(&request(&mut leader, Time(0), 1, everything())),
        1
    );
    let lost = step(&mut leader, Time(1), LeaderEvent::WorkerLost(WORKER));
    assert_eq!(invalidations(&lost), 0, "nobody is there");
    let again = arrival(AttachId(1), 32, 64);
    let again = again.map(|event| invalidations(&step(&mut leader, Time(2), event)));
    assert_eq!(again, [1, 0]);
    assert_eq!(
        answers(&invalidated(&mut leader, Time(3))),
        [Ok(Answer::Reset(ResetAnswer {
            pages: 0,
            below_pages: PagesBelow::default()
        }))]
    );
}

#[test]
fn open_resets_are_bounded_in_number_and_in_named_pages() {
    let mut leader = serving();
    step(&mut leader, Time(0), LeaderEvent::WorkerLost(WORKER));
    let all = |leader: &mut Leader, id| {
        let scope = ResetScope::Everything;
        answers(&request(
            leader,
            Time(0),
            id,
            Request::Reset { scope, tier: None },
        ))
    };
    for id in 1..=RESETS_OPEN_MAX as u64 {
        assert_eq!(all(&mut leader, id), []);
    }
    let limit = |limit, max: usize| {
        Err(Refusal::Limit {
            limit,
            max: max as u64,
        })
    };
    assert_eq!(
        all(&mut leader, 1000),
        [limit("resets under way", RESETS_OPEN_MAX)]
    );

    let mut leader = serving();
    step(&mut leader, Time(0), LeaderEvent::WorkerLost(WORKER));
    for event in arrival(AttachId(1), 32, 64) {
        step(&mut leader, Time(0), event);
    }
    let named = 131_072;
    for id in 1..=(RESET_PAGES_OPEN_MAX / named) as u64 + 1 {
        let scope = ResetScope::Pages(vec![1], sequence(named as u32, 1));
        let answered = answers(&request(
            &mut leader,
            Time(0),
            id,
            Request::Reset { scope, tier: None },
        ));
        let full = id > (RESET_PAGES_OPEN_MAX / named) as u64;
        let expected = limit("pages named by resets under way", RESET_PAGES_OPEN_MAX);
        assert_eq!(
            answered,
            full.then_some(expected).into_iter().collect::<Vec<_>>()
        );
    }
}

#[test]
fn a_deadline_of_weeks_is_cut() {
    let mut leader = serving();
    step(&mut leader, Time(0), LeaderEvent::WorkerLost(WORKER));
    let event = LeaderEvent::Request {
        engine: ENGINE,
        id: RequestId(1),
        deadline: Time(0) + Duration::from_millis(u64::from(u32::MAX)),
        request: Request::Reset {
            tier: None,
            scope: ResetScope::Everything,
        },
    };
    assert_eq!(answers(&step(&mut leader, Time(0), event)), []);
    let late = Time(0) + leader.settings.deadline_max;
    let unconfirmed = Err(Refusal::ResetUnconfirmed { shards: 1 });
    assert_eq!(
        answers(&step(&mut leader, late, LeaderEvent::Tick)),
        [unconfirmed]
    );
}

/// The arrival of the worker; with another page size than [`serving`] has, its memory would be refused.
fn arrival(attach: AttachId, arena_pages: u32, page_bytes: u64) -> [LeaderEvent; 2] {
    let attached = AttachRequest {
        worker: WORKER,
        ranks: 1,
        shards: 1,
        attach,
        depots: PerTier::host(AttachedDepot {
            depot: DepotId(1),
            epoch: Epoch(0),
        }),
    };
    let geometry = GroupGeometry {
        page_bytes,
        ..geometry()
    };
    let memory = WorkerMemory {
        engine: ENGINE,
        geometry: geometry.into(),
        arena_pages: PerTier::host(arena_pages),
    };
    LeaderEvent::arrival(attached, memory)
}

#[test]
fn more_pages_than_the_leaders_own_g2_has_room_for_are_refused() {
    let ratio = Ratio::new(RATIO).expect("in bounds");
    let mut settings = LeaderSettings::new(Epoch(1), 1, ratio, AnchorKey::new([1; 32]));
    // 1,000 pages of 64 bytes, each with its slot in the inventory.
    settings.depot_bytes = PerTier::host(1000 * (64 + 80));
    let mut leader = Leader::new(settings);
    let verdict = |leader: &mut Leader, attach, arena_pages, page_bytes| {
        let arrival = arrival(AttachId(attach), arena_pages, page_bytes);
        let effects = arrival.map(|event| step(leader, Time(0), event));
        let admit = effects
            .into_iter()
            .flatten()
            .find_map(|effect| match effect {
                LeaderEffect::AdmitMemory { verdict, .. } => Some(verdict),
                _ => None,
            });
        admit.expect("a verdict").map(|_| ())
    };
    let too_large = |arena_pages, page_bytes, most_pages| {
        Err(Refusal::DepotTooLarge {
            worker: WORKER,
            arena_pages,
            page_bytes,
            most_pages,
        })
    };
    assert_eq!(
        verdict(&mut leader, 1, u32::MAX - 1, 64),
        too_large(u32::MAX - 1, 64, 1000)
    );
    assert_eq!(verdict(&mut leader, 2, 1001, 64), too_large(1001, 64, 1000));
    // Pages of 0 bytes would leave room for any number of them.
    assert_eq!(verdict(&mut leader, 3, 1, 0), too_large(1, 0, 1800));
    assert_eq!(verdict(&mut leader, 4, 1000, 64), Ok(()));
}

#[test]
fn a_page_that_is_listed_repeatedly_is_kept_once() {
    let mut leader = serving();
    leader.tiers = Tiers::new([TierId::Host]);
    leader.open_pools(Time(0), &mut Vec::new());
    let record = |page| PageRecord {
        page,
        anchor: Anchor(1),
        domain: DomainId(1),
        block_start: page,
        index: 0,
        phase: 0,
        stored: Stored::default(),
        fingerprint: Fingerprint(1),
    };
    // As many records of page 0 as the arena has pages, and then others: a second page, one before it, and one beyond
    // the arena.
    let mut records = vec![record(0); 32];
    records.extend([record(7), record(3), record(u32::MAX - 1)]);
    let part = LeaderEvent::Inventory {
        worker: WORKER,
        depot: DepotId(1),
        read_id: leader.next_id,
        from: 0,
        next: None,
        records,
    };
    step(&mut leader, Time(0), part);
    assert_eq!(leader.counts().recovered_pages, 2);
}

#[test]
fn a_small_store_far_into_a_sequence_examines_a_bounded_number_of_positions() {
    let mut leader = serving();
    let pages = 131_072;
    let hashes = sequence(pages, 1);
    request(&mut leader, Time(0), 1, lookup(1, 7, &hashes));
    let bound = u64::from(2 * (LOOKS_AROUND_MAX + MISSES_AROUND_MAX + 2 * RATIO));
    let mut before = 0;
    for (id, page) in [(2, pages - 3), (3, pages - 2)] {
        let stored = store(&mut leader, Time(0), id, 1, page, page + 1);
        assert!(matches!(
            stored,
            Answer::Store(StoreAnswer {
                stored_pages: 1,
                ..
            })
        ));
        let looks = leader.counts().store_looks - before;
        before += looks;
        let misses_only = u64::from(2 * (MISSES_AROUND_MAX + 2 * RATIO));
        assert!(looks <= misses_only.min(bound), "{looks} positions");
    }
    // The second page grows the block of the first, although no position before that was looked up.
    assert_eq!(leader.pool().map(|pool| pool.counts().grown), Some(1));
}

#[test]
fn a_stored_sequence_is_held_and_touched_from_its_root_on() {
    let mut leader = with_arena(64, |_| {});
    let hashes = sequence(64, 1);
    store_all(&mut leader, 1, 7, &hashes);
    let looks = leader.counts().store_looks;
    request(&mut leader, Time(0), 2_000_000, lookup(5, 7, &hashes));
    let again = request(
        &mut leader,
        Time(0),
        2_000_001,
        Request::Store {
            slot: SlotId(5),
            parts: vec![Part::new(GroupId(0), 60, PageList::run(0, 4))],
            more: None,
            after: RequestId(0),
        },
    );
    assert!(matches!(
        answers(&again)[..],
        [Ok(Answer::Store(StoreAnswer {
            present_pages: 4,
            ..
        }))]
    ));
    // 16 blocks, looked up by the store and once more at its end.
    assert_eq!(leader.counts().store_looks - looks, 32);
    let oldest = leader
        .pool()
        .and_then(|pool| pool.view().next().map(|block| block.start));
    assert_eq!(oldest, Some(60), "the tail is older than the root");
}

#[test]
fn one_engines_waiting_requests_do_not_use_up_the_room_of_another() {
    let ratio = Ratio::new(RATIO).expect("in bounds");
    let settings = LeaderSettings::new(Epoch(1), 1, ratio, AnchorKey::new([1; 32]));
    let mut leader = Leader::new(settings);
    let send_request = |leader: &mut Leader, engine: u8, id: u64| {
        let event = LeaderEvent::Request {
            engine: EngineId([engine; 16]),
            id: RequestId(id),
            deadline: Time(0) + Duration::from_secs(5),
            request: Request::Load {
                after: RequestId(0),
                parts: vec![Part::new(GroupId(0), 0, PageList::run(0, 1))],
                slot: SlotId(1),
            },
        };
        answers(&step(leader, Time(0), event))
    };
    let max = OPEN_REQUESTS_MAX as u64;
    for id in 1..=max {
        assert_eq!(send_request(&mut leader, 1, id), []);
    }
    assert_eq!(send_request(&mut leader, 1, max), [], "it waits already");
    assert_eq!(
        send_request(&mut leader, 1, max + 1),
        [Err(Refusal::Crowded { max })]
    );
    assert_eq!(send_request(&mut leader, 2, 1), [], "another engine");
    // A parked request of an engine whose connection broke frees its room, and may be sent again.
    let gone = EngineId([1; 16]);
    step(&mut leader, Time(0), LeaderEvent::EngineOpened(gone));
    step(&mut leader, Time(0), LeaderEvent::EngineClosed(gone));
    assert_eq!(
        send_request(&mut leader, 1, max + 1),
        [],
        "the same id, refused before"
    );
    let refused = answers(&step(&mut leader, Time(0), LeaderEvent::WorkerDead(WORKER)));
    let unknown = || Err(Refusal::UnknownSlot(SlotId(1)));
    assert_eq!(refused, [unknown(), unknown()]);
}

#[test]
fn engines_that_leave_one_after_another_keep_no_more_hashes_than_one() {
    // Without the recount of the bytes: a test has no room for so many.
    let step = |leader: &mut Leader, event| leader.step(Time(0), event, &mut Vec::new());
    let mut leader = serving();
    let other = EngineId([9; 16]);
    let opened = |leader: &mut Leader, engine, hash_bytes| {
        step(leader, LeaderEvent::EngineOpened(engine));
        let session = leader.sessions.get_mut(engine).expect("an engine");
        *session.hash_bytes_mut() = hash_bytes;
    };
    opened(&mut leader, ENGINE, HASH_BYTES_LEFT_MAX);
    step(&mut leader, LeaderEvent::EngineClosed(ENGINE));
    assert!(leader.knows(ENGINE), "one engine alone");
    opened(&mut leader, other, 16);
    assert!(leader.knows(ENGINE), "the other is connected");
    step(&mut leader, LeaderEvent::EngineClosed(other));
    assert!(leader.knows(other));
    assert!(!leader.knows(ENGINE), "the first to leave");
    // It connects again before it would have been forgotten, and stays.
    opened(&mut leader, ENGINE, 0);
    leader.step(
        Time(0) + Duration::from_secs(60),
        LeaderEvent::Tick,
        &mut Vec::new(),
    );
    assert!(leader.knows(ENGINE));
    assert!(!leader.knows(other));
}

#[test]
fn engines_that_leave_with_many_hashes_take_none_from_one_with_few() {
    let step = |leader: &mut Leader, event| leader.step(Time(0), event, &mut Vec::new());
    let mut leader = serving();
    let large = [EngineId([8; 16]), EngineId([9; 16])];
    for (engine, hash_bytes) in [
        (ENGINE, 1 << 10),
        (large[0], HASH_BYTES_LEFT_MAX / 3 * 2),
        (large[1], HASH_BYTES_LEFT_MAX / 3 * 2),
    ] {
        step(&mut leader, LeaderEvent::EngineOpened(engine));
        let session = leader.sessions.get_mut(engine).expect("an engine");
        *session.hash_bytes_mut() = hash_bytes;
        step(&mut leader, LeaderEvent::EngineClosed(engine));
    }
    assert!(leader.knows(ENGINE));
    assert_eq!(large.map(|engine| leader.knows(engine)), [false, true]);
}

/// A store keeps its hashes when its slot is finished.
#[test]
fn the_hashes_of_stores_under_way_are_bounded() {
    let hashes = sequence(1 << 19, 0);
    let fits = HASH_BYTES_PER_ENGINE_MAX / hashes.as_bytes().len();
    let mut leader = with_arena(4096, |_| {});
    let begin = |leader: &mut Leader, id: u64| {
        let (slot, first_page, more) = (SlotId(id), 0, None);
        request(leader, Time(0), id, lookup(id, id as u8, &hashes));
        let source = PageList::run(0, 1);
        let store = Request::Store {
            slot,
            parts: vec![Part::new(GroupId(0), first_page, source)],
            more,
            after: RequestId(0),
        };
        let effects = request(leader, Time(0), id + 1, store);
        request(leader, Time(0), id + 2, Request::Finish { slot });
        effects
    };
    let transfers: Vec<_> = (0..fits as u64)
        .flat_map(|store| begin(&mut leader, 1 + 3 * store))
        .filter_map(|effect| match effect {
            LeaderEffect::Transfer { transfer, .. } => Some(transfer.id),
            _ => None,
        })
        .collect();
    assert_eq!(transfers.len(), fits, "each store has a copy");
    let refused = answers(&begin(&mut leader, 1000));
    let limit = "bytes of page hashes in stores under way";
    let max = HASH_BYTES_PER_ENGINE_MAX as u64;
    assert_eq!(refused, [Err(Refusal::Limit { limit, max })]);
    let ended = EndedCopy::complete(transfers[0]);
    let (epoch, copies) = (Epoch(1), vec![ended]);
    let ended = LeaderEvent::Ended {
        worker: WORKER,
        epoch,
        copies,
    };
    step(&mut leader, Time(0), ended);
    assert!(
        answers(&begin(&mut leader, 2000)).is_empty(),
        "there is room"
    );
}

#[test]
fn a_repeated_lookup_holds_its_pages_for_its_own_time() {
    let mut leader = with_arena(64, |_| {});
    let hashes = sequence(8, 0);
    store_all(&mut leader, 1, 7, &hashes);
    let at = |seconds| Time(0) + Duration::from_secs(seconds);
    let pins = |leader: &Leader| leader.pool().map_or(0, |pool| pool.pins());
    request(&mut leader, at(0), 2_000_000, lookup(9, 7, &hashes));
    request(&mut leader, at(20), 2_000_001, lookup(9, 7, &hashes));
    assert!(pins(&leader) > 0);
    step(&mut leader, at(31), LeaderEvent::Tick);
    assert!(pins(&leader) > 0, "the second lookup was 11 s ago");
    step(&mut leader, at(51), LeaderEvent::Tick);
    assert_eq!(pins(&leader), 0);
}
