//! Tests of the independent recount and of the limit on the hash bytes of an engine.

use super::*;
use crate::group::model::Model;
use crate::index::anchor::Domain;
use crate::index::sequence_cursor::Trail;
use crate::index::shard_set::ShardSet;
use crate::leader::event::{AttachRequest, AttachedDepot, WorkerMemory};
use crate::leader::refusal::Refusal;
use crate::leader::session::HASH_BYTES_PER_ENGINE_MAX;
use crate::pool::Pool;
use kvferry_types::{
    Answer, AttachId, DepotId, GroupGeometry, GroupId, LoadAnswer, LookupAnswer, PageHashes,
    PageList, Part, PerTier, Rank, Replica, Request, Shard, StoreAnswer, TierId, TransferId,
};

mod gone;
mod parked;

#[test]
fn a_pin_without_a_holder_is_detected() {
    let ratio = Ratio::new(4).expect("in bounds");
    let mut pool = Pool::new(16, ratio);
    let domain = Domain::new(&AnchorKey::new([1; 32]), b"a", &[0; 16], GroupId(0));
    let hashes = PageHashes::packed(16, vec![3; 32]).expect("16 bytes a page");
    let (mut reserved, mut evicted, mut next) = (Vec::new(), Vec::new(), 0);
    let room = pool.reserve(
        &domain,
        hashes.view(),
        0,
        2,
        None,
        &mut next,
        &mut reserved,
        &mut evicted,
    );
    assert_eq!(room, 2);
    let transfer = reserved[0].transfer;
    pool.start_filling(transfer, ShardSet::first(1));
    assert_eq!(pool.ended(transfer, Shard(0), true), Some(true));
    let block = pool.view().next().expect("a block").index;

    let settings = LeaderSettings::new(Epoch(1), 1, ratio, AnchorKey::new([1; 32]));
    let mut leader = Leader::new(settings);
    assert_eq!(leader.check(), Ok(()));
    let pin = pool.pin(block, 2);
    let key = TierKey {
        page_bytes: 64,
        layout_fingerprint: [0; 16],
        pages: 16,
        depots: vec![DepotId(1)],
    };
    if let Some(tier) = leader.tiers.get_mut(TierId::Host) {
        tier.open(key, pool);
    }
    let why = leader.check().expect_err("a pin is held by nobody");
    assert_eq!(
        why.to_string(),
        "0 held, 0 leased and 0 moved, the pools count 1"
    );
    leader.tiers.unpin(TierId::Host, pin);
    assert_eq!(leader.check(), Ok(()));
}

pub(super) const ENGINE: EngineId = EngineId([1; 16]);

/// The geometry of the engine's memory.
pub(super) fn geometry() -> GroupGeometry {
    GroupGeometry {
        group: GroupId(0),
        engine_page_tokens: 16,
        layers: 1,
        page_bytes: 64,
        device_pages: 64,
        content_digest: [0; 16],
        layout_fingerprint: [1; 16],
        ..GroupGeometry::default()
    }
}

/// A leader with one worker that serves one engine.
pub(super) fn serving() -> Leader {
    with_arena(32, |_| {})
}

/// Like [`serving`], with `arena_pages` pages and other settings.
pub(super) fn with_arena(arena_pages: u32, change: impl FnOnce(&mut LeaderSettings)) -> Leader {
    let ratio = Ratio::new(4).expect("in bounds");
    let mut settings = LeaderSettings::new(Epoch(1), 1, ratio, AnchorKey::new([1; 32]));
    change(&mut settings);
    serving_with(settings, arena_pages)
}

/// Like [`serving`], with `arena_pages` pages in the depot and twice as many in the engine's memory.
fn serving_with(settings: LeaderSettings, arena_pages: u32) -> Leader {
    let mut leader = Leader::new(settings);
    let inventory = LeaderEvent::Inventory {
        worker: WORKER,
        depot: DepotId(1),
        read_id: 1,
        from: 0,
        next: None,
        records: Vec::new(),
    };
    let opened = LeaderEvent::EngineOpened(ENGINE);
    let arrival = arrival(1, (0, 1), arena_pages);
    for event in [opened].into_iter().chain(arrival).chain([inventory]) {
        leader.step(Time(0), event, &mut Vec::new());
    }
    assert!(leader.is_ready());
    leader
}

const WORKER: WorkerId = WorkerId {
    replica: Replica(0),
    rank: Rank(0),
};

/// The arrival of one of several ranks, each with a shard of its own and `arena_pages` pages in its depot.
pub(super) fn arrival(
    attach: u64,
    (rank, ranks): (u16, u16),
    arena_pages: u32,
) -> [LeaderEvent; 2] {
    let memory = WorkerMemory {
        engine: ENGINE,
        geometry: GroupGeometry {
            device_pages: 2 * arena_pages,
            ..geometry()
        }
        .into(),
        arena_pages: PerTier::host(arena_pages),
    };
    let attached = AttachRequest {
        worker: WorkerId {
            rank: Rank(rank),
            ..WORKER
        },
        ranks,
        shards: ranks,
        attach: AttachId(attach),
        depots: PerTier::host(AttachedDepot {
            depot: DepotId(u128::from(rank) + 1),
            epoch: Epoch(0),
        }),
    };
    LeaderEvent::arrival(attached, memory)
}

/// Sends a request; returns the answer if the leader gives one in the same step.
pub(super) fn request(
    leader: &mut Leader,
    id: u64,
    request: Request,
) -> Option<Result<Answer, Refusal>> {
    let mut effects = Vec::new();
    let event = LeaderEvent::Request {
        engine: ENGINE,
        id: RequestId(id),
        deadline: Time(0) + Duration::from_secs(5),
        request,
    };
    leader.step(Time(0), event, &mut effects);
    effects.into_iter().find_map(|effect| match effect {
        LeaderEffect::Answer { answer, .. } => Some(answer),
        _ => None,
    })
}

#[test]
fn the_digest_has_the_decisions_of_every_lookup_of_a_slot() {
    let digest = |lookups: &[usize]| {
        let mut leader = with_arena(32, |settings| settings.record_decisions = true);
        for (id, pages) in (1..).zip(lookups) {
            assert!(request(&mut leader, id, lookup(1, *pages)).is_some());
        }
        let finish = Request::Finish { slot: SlotId(1) };
        request(&mut leader, 9, finish);
        leader.decisions_digest().expect("it is recorded")
    };
    assert_eq!(digest(&[1, 2]), digest(&[1, 2]));
    assert_ne!(digest(&[2, 2]), digest(&[2, 2, 2]));
}

#[test]
fn a_leader_that_records_no_decisions_has_no_digest() {
    let mut leader = serving();
    assert!(request(&mut leader, 1, lookup(1, 2)).is_some());
    request(&mut leader, 2, Request::Finish { slot: SlotId(1) });
    assert_eq!(leader.decisions_digest(), None);
}

#[test]
fn a_load_waits_only_for_work_that_was_numbered_before_it() {
    let mut leader = serving();
    let mut load = |id, after| {
        let load = Request::Load {
            slot: SlotId(1),
            parts: vec![Part::new(GroupId(0), 0, PageList::run(0, 1))],
            after: RequestId(after),
        };
        request(&mut leader, id, load).expect("an answer")
    };
    let unknown = Err(Refusal::UnknownSlot(SlotId(1)));
    assert_eq!(load(5, 4), unknown);
    assert_eq!(load(6, 0), unknown);
    for (id, after) in [(7, 7), (8, 9)] {
        let refused = load(id, after);
        assert!(
            matches!(refused, Err(Refusal::Invalid { field: "after", .. })),
            "{refused:?}"
        );
    }
}

#[test]
fn a_store_names_only_work_that_was_numbered_before_it() {
    let mut leader = serving();
    let mut store = |id, after| {
        let store = Request::Store {
            slot: SlotId(1),
            parts: vec![Part::new(GroupId(0), 0, PageList::run(0, 1))],
            more: None,
            after: RequestId(after),
        };
        request(&mut leader, id, store).expect("an answer")
    };
    let unknown = Err(Refusal::UnknownSlot(SlotId(1)));
    assert_eq!(store(5, 4), unknown);
    assert_eq!(store(6, 0), unknown);
    for (id, after) in [(7, 7), (8, 9)] {
        let refused = store(id, after);
        assert!(
            matches!(refused, Err(Refusal::Invalid { field: "after", .. })),
            "{refused:?}"
        );
    }
}

#[test]
fn a_key_is_for_pages_of_its_size_and_layout() {
    let GroupGeometry {
        page_bytes,
        layout_fingerprint,
        ..
    } = geometry();
    let key = |page_bytes, layout_fingerprint| TierKey {
        page_bytes,
        layout_fingerprint,
        pages: 16,
        depots: vec![DepotId(1)],
    };
    let model = Model::new(geometry().into()).expect("one group");
    assert!(key(page_bytes, layout_fingerprint).is_for(&model));
    assert!(!key(page_bytes + 1, layout_fingerprint).is_for(&model));
    assert!(!key(page_bytes, [9; 16]).is_for(&model));
}

#[test]
fn a_reset_without_a_pool_names_the_reason() {
    let ratio = Ratio::new(4).expect("in bounds");
    let mut leader = Leader::new(LeaderSettings::new(
        Epoch(1),
        1,
        ratio,
        AnchorKey::new([1; 32]),
    ));
    leader.step(Time(0), LeaderEvent::EngineOpened(ENGINE), &mut Vec::new());
    let reset = || Request::Reset {
        tier: None,
        scope: kvferry_types::ResetScope::Everything,
    };
    let refused = request(&mut leader, 1, reset());
    assert!(
        matches!(refused, Some(Err(Refusal::NotReady { waiting_for: 1, .. }))),
        "{refused:?}"
    );
    for event in arrival(1, (0, 1), 32) {
        leader.step(Time(0), event, &mut Vec::new());
    }
    assert_eq!(
        request(&mut leader, 2, reset()),
        Some(Err(Refusal::Reading))
    );
}

pub(super) fn hashes(width: usize, pages: usize) -> PageHashes {
    PageHashes::packed(width, vec![3; width * pages]).expect("a width that there is")
}

pub(super) fn lookup(slot: u64, pages: usize) -> Request {
    Request::Lookup {
        slot: SlotId(slot),
        namespace: Vec::new(),
        hashes: hashes(16, pages),
        have_pages: 0,
        limit_pages: None,
    }
}

pub(super) fn store(slot: u64, more: Option<(u32, PageHashes)>) -> Request {
    Request::Store {
        slot: SlotId(slot),
        parts: vec![Part::new(GroupId(0), 0, PageList::run(0, 1))],
        more,
        after: RequestId(0),
    }
}

fn hash_bytes(leader: &mut Leader) -> &mut usize {
    let session = leader.sessions.get_mut(ENGINE).expect("an engine");
    session.hash_bytes_mut()
}

#[test]
fn the_bytes_of_hashes_are_those_of_the_slots() {
    let mut leader = serving();
    assert!(
        request(&mut leader, 1, lookup(1, 4))
            .expect("an answer")
            .is_ok()
    );
    assert!(
        request(&mut leader, 2, lookup(2, 2))
            .expect("an answer")
            .is_ok()
    );
    assert_eq!(*hash_bytes(&mut leader), 96);
    assert!(
        request(&mut leader, 3, lookup(1, 3))
            .expect("an answer")
            .is_ok()
    );
    assert_eq!(*hash_bytes(&mut leader), 80, "the slot began anew");
    assert_eq!(
        request(&mut leader, 4, store(1, Some((3, hashes(16, 2))))),
        None
    );
    assert_eq!(*hash_bytes(&mut leader), 112);
    let other_width = request(&mut leader, 5, store(2, Some((2, hashes(32, 2)))));
    let refused = Err(Refusal::Invalid {
        field: "hash_bytes",
        value: "32".to_owned(),
        remedy: "use one width for all hashes of a slot",
    });
    assert_eq!(other_width, Some(refused));
    assert_eq!(*hash_bytes(&mut leader), 112);
    for (id, slot, left) in [(6, 1, 32), (7, 2, 0)] {
        let slot = SlotId(slot);
        assert!(
            request(&mut leader, id, Request::Finish { slot })
                .expect("an answer")
                .is_ok()
        );
        assert_eq!(*hash_bytes(&mut leader), left);
    }
}

#[test]
fn hashes_of_a_store_continue_those_of_the_slot() {
    let mut leader = serving();
    let known = request(&mut leader, 1, lookup(1, 3));
    assert!(known.expect("an answer").is_ok());
    let others = PageHashes::packed(16, vec![4; 48]).expect("fits");
    let refused = [
        (
            "more_from",
            "4, and the slot knows 3 hashes",
            (4, hashes(16, 1)),
        ),
        (
            "more_hashes",
            "other hashes than the slot knows, from page 2 on",
            (2, others),
        ),
    ];
    for (id, (field, value, more)) in (2..).zip(refused) {
        match request(&mut leader, id, store(1, Some(more))) {
            Some(Err(Refusal::Invalid {
                field: named,
                value: said,
                ..
            })) => assert_eq!((named, said.as_str()), (field, value)),
            other => panic!("{other:?}"),
        }
        assert_eq!(*hash_bytes(&mut leader), 48);
    }
    let overlapping = store(1, Some((1, hashes(16, 4))));
    assert_eq!(request(&mut leader, 4, overlapping), None, "a copy begins");
    assert_eq!(*hash_bytes(&mut leader), 80);
}

#[test]
fn an_engine_has_no_more_bytes_of_hashes_than_the_limit() {
    let mut leader = serving();
    let limit = || {
        Some(Err(Refusal::Limit {
            limit: "bytes of page hashes",
            max: HASH_BYTES_PER_ENGINE_MAX as u64,
        }))
    };
    assert!(
        request(&mut leader, 1, lookup(1, 1))
            .expect("an answer")
            .is_ok()
    );
    *hash_bytes(&mut leader) = HASH_BYTES_PER_ENGINE_MAX - 32;
    assert_eq!(request(&mut leader, 2, lookup(2, 3)), limit());
    assert_eq!(
        request(&mut leader, 3, store(1, Some((1, hashes(16, 3))))),
        limit()
    );
    assert_eq!(*hash_bytes(&mut leader), HASH_BYTES_PER_ENGINE_MAX - 32);
    *hash_bytes(&mut leader) += 16;
    assert_eq!(
        request(&mut leader, 4, store(1, Some((1, hashes(16, 1))))),
        None
    );
    assert_eq!(*hash_bytes(&mut leader), HASH_BYTES_PER_ENGINE_MAX);
    *hash_bytes(&mut leader) -= 16;
    assert!(
        request(&mut leader, 5, lookup(2, 1))
            .expect("an answer")
            .is_ok()
    );
    assert_eq!(*hash_bytes(&mut leader), HASH_BYTES_PER_ENGINE_MAX);
    assert_eq!(request(&mut leader, 6, lookup(3, 1)), limit());
}

/// Uses blocks of one page, so that a sequence has as many runs as pages.
#[test]
fn a_load_of_more_runs_than_an_order_can_name_loads_the_first_of_them() {
    let pages = LOAD_RUNS_MAX as u32 + 1;
    let ratio = kvferry_types::Ratio::new(1).expect("in bounds");
    let settings = LeaderSettings::new(Epoch(1), 1, ratio, AnchorKey::new([7; 32]));
    let mut leader = serving_with(settings, 2 * pages);
    let hashes = (0..pages).flat_map(|page| u128::from(page + 1).to_be_bytes());
    let hashes = PageHashes::packed(16, hashes.collect()).expect("16 bytes a page");
    let lookup = Request::Lookup {
        slot: SlotId(1),
        namespace: Vec::new(),
        hashes,
        have_pages: 0,
        limit_pages: None,
    };
    let list = PageList::run(0, pages);
    let store = Request::Store {
        slot: SlotId(1),
        parts: vec![Part::new(GroupId(0), 0, list.clone())],
        more: None,
        after: RequestId(0),
    };
    let load = Request::Load {
        slot: SlotId(1),
        parts: vec![Part::new(GroupId(0), 0, list)],
        after: RequestId(0),
    };
    let mut requests = (1..).map(RequestId);
    let mut step = |leader: &mut Leader, request| {
        let mut effects = Vec::new();
        let event = LeaderEvent::Request {
            engine: ENGINE,
            id: requests.next().expect("a number"),
            deadline: Time::NEVER,
            request,
        };
        leader.step(Time(0), event, &mut effects);
        let copies = effects.into_iter().filter_map(|effect| match effect {
            LeaderEffect::Transfer { transfer, .. } => Some(transfer),
            _ => None,
        });
        copies.collect::<Vec<_>>()
    };
    step(&mut leader, lookup.clone());
    let copies = step(&mut leader, store);
    assert_eq!(copies.len(), pages as usize);
    end(&mut leader, copies.iter().map(|copy| copy.id));
    step(&mut leader, lookup);
    let copies = step(&mut leader, load);
    let [copy] = &copies[..] else {
        unreachable!("{} copies", copies.len())
    };
    assert_eq!(copy.pairs.len(), LOAD_RUNS_MAX);
    let effects = end(&mut leader, [copy.id].into_iter());
    let loaded = Ok(Answer::Load(LoadAnswer { pages: pages - 1 }));
    let answered = |effect: &LeaderEffect| matches!(effect, LeaderEffect::Answer { answer, .. } if *answer == loaded);
    assert!(effects.iter().any(answered), "{effects:?}");
}

/// Ends copies completely on the only rank.
fn end(leader: &mut Leader, transfers: impl Iterator<Item = TransferId>) -> Vec<LeaderEffect> {
    let copies = transfers.map(kvferry_types::EndedCopy::complete);
    let ended = LeaderEvent::Ended {
        worker: WorkerId {
            replica: kvferry_types::Replica(0),
            rank: kvferry_types::Rank(0),
        },
        epoch: leader.epoch(),
        copies: copies.collect(),
    };
    let mut effects = Vec::new();
    leader.step(Time(0), ended, &mut effects);
    effects
}

#[test]
fn a_slot_forgets_the_blocks_of_its_sequence_when_their_pool_closes() {
    let mut leader = serving();
    assert!(request(&mut leader, 1, lookup(1, 2)).is_some());
    assert_eq!(request(&mut leader, 2, store(1, None)), None);
    let first = TransferId(leader.next_id);
    end(&mut leader, std::iter::once(first));
    let trail = |leader: &mut Leader| {
        let slot = leader.sessions.open(ENGINE).any_slot(SlotId(1));
        slot.expect("a slot")
            .trail(GroupId(0))
            .map_or(0, Trail::len)
    };
    assert_ne!(trail(&mut leader), 0);
    for event in arrival(2, (0, 1), 16) {
        leader.step(Time(0), event, &mut Vec::new());
    }
    assert!(leader.pool().is_none());
    assert_eq!(trail(&mut leader), 0);
}

/// What an engine names has no page before its own: the leader knows from the index of pages where it lies.
#[test]
fn a_tail_is_found_loaded_and_not_stored_again() {
    let mut leader = with_arena(32, |settings| settings.page_index = true);
    let named = |first: u128| {
        let pages = (first..7).flat_map(u128::to_be_bytes);
        PageHashes::packed(16, pages.collect()).expect("16 bytes a page")
    };
    let lookup = |slot, hashes| Request::Lookup {
        slot: SlotId(slot),
        namespace: Vec::new(),
        hashes,
        have_pages: 0,
        limit_pages: None,
    };
    let pages = |pages| vec![Part::new(GroupId(0), 0, PageList::run(8, pages))];
    let store = |slot, count| Request::Store {
        slot: SlotId(slot),
        parts: pages(count),
        more: None,
        after: RequestId(0),
    };
    assert!(request(&mut leader, 1, lookup(1, named(1))).is_some());
    assert_eq!(request(&mut leader, 2, store(1, 6)), None);
    let copies = [leader.next_id - 1, leader.next_id].map(TransferId);
    end(&mut leader, copies.into_iter());

    // Pages 3 to 6 of 1 to 6 are the last two of a block of four, and a block of two.
    let found = request(&mut leader, 3, lookup(2, named(3)));
    let hit = LookupAnswer {
        hit_pages: 4,
        ..LookupAnswer::default()
    };
    assert_eq!(found, Some(Ok(Answer::Lookup(hit))));
    let slot = leader.sessions.open(ENGINE).any_slot(SlotId(2));
    let held = slot.expect("a slot").held().iter();
    let held: Vec<u32> = held.map(|run| Pool::pinned_pages(&run.pin)).collect();
    assert_eq!(held, [4, 2], "the holds reach up to the last pages");
    let mut effects = Vec::new();
    let event = LeaderEvent::Request {
        engine: ENGINE,
        id: RequestId(4),
        deadline: Time(0) + Duration::from_secs(5),
        request: Request::Load {
            slot: SlotId(2),
            parts: pages(4),
            after: RequestId(0),
        },
    };
    leader.step(Time(0), event, &mut effects);
    let [LeaderEffect::Transfer { transfer, .. }] = &effects[..] else {
        unreachable!("{effects:?}")
    };
    let read: Vec<u32> = transfer
        .pairs
        .iter()
        .flat_map(|pair| pair.src.0.iter())
        .flat_map(|run| run.start..run.start + run.count)
        .collect();
    assert_eq!(read, [2, 3, 4, 5]);
    let blocks = leader.pool().expect("a pool").blocks().by_age();
    let pinned: Vec<_> = blocks
        .map(|(_, block)| (block.start, block.pinned_pages))
        .collect();
    assert_eq!(
        pinned,
        [(4, 2), (0, 4)],
        "the lease holds blocks up to its pages"
    );
    end(&mut leader, std::iter::once(transfer.id));

    let before = leader.next_id;
    let stored = request(&mut leader, 5, store(2, 4));
    let present = StoreAnswer {
        stored_pages: 0,
        present_pages: 4,
        refused_pages: 0,
        failed_pages: 0,
    };
    assert_eq!(stored, Some(Ok(Answer::Store(present))));
    assert_eq!((leader.next_id, leader.check()), (before, Ok(())));
}

/// Pages of a sequence, all of them different.
fn distinct(pages: u32) -> PageHashes {
    let hashes = (0..pages).flat_map(|page| u128::from(page + 1).to_be_bytes());
    PageHashes::packed(16, hashes.collect()).expect("16 bytes a page")
}

fn lookup_of(slot: u64, hashes: PageHashes) -> Request {
    Request::Lookup {
        slot: SlotId(slot),
        namespace: Vec::new(),
        hashes,
        have_pages: 0,
        limit_pages: None,
    }
}

/// Sends a request, and returns the transfers that it ordered.
fn transfers_of(leader: &mut Leader, id: u64, request: Request) -> Vec<TransferId> {
    let mut effects = Vec::new();
    let event = LeaderEvent::Request {
        engine: ENGINE,
        id: RequestId(id),
        deadline: Time(0) + Duration::from_secs(60),
        request,
    };
    leader.step(Time(0), event, &mut effects);
    let transfers = effects.iter().filter_map(|effect| match effect {
        LeaderEffect::Transfer { transfer, .. } => Some(transfer.id),
        _ => None,
    });
    transfers.collect()
}

/// A store of many parts looks around its own pages as far as a store of one part.
#[test]
fn the_parts_of_a_store_share_the_limits_of_its_looks() {
    let (pages, parts) = (16_384, 1024);
    let mut leader = with_arena(pages, |settings| {
        settings.ratio = kvferry_types::Ratio::new(1).expect("in bounds");
    });
    transfers_of(&mut leader, 1, lookup_of(1, distinct(pages)));
    let store = |parts: Vec<Part>| Request::Store {
        slot: SlotId(1),
        parts,
        more: None,
        after: RequestId(0),
    };
    let all = vec![Part::new(GroupId(0), 0, PageList::run(0, pages))];
    let copies = transfers_of(&mut leader, 2, store(all));
    end(&mut leader, copies.into_iter());
    let first = pages - 2 * parts;
    let each = (0..parts).map(|at| Part::new(GroupId(0), first + 2 * at, PageList::run(at, 1)));
    let before = leader.counts().store_looks;
    assert_eq!(transfers_of(&mut leader, 3, store(each.collect())), []);
    let looks = leader.counts().store_looks - before;
    let most = 2 * u64::from(crate::LOOKS_AROUND_MAX + parts) + 64;
    assert!(looks <= most, "{looks} positions, {most} at most");
}

/// An engine that names two pages with one hash in a store finds the second one in the copy of the first.
#[test]
fn a_store_that_waits_for_its_own_copy_is_answered_when_that_has_ended() {
    for late in [false, true] {
        let mut leader = serving();
        assert!(request(&mut leader, 1, lookup(1, 8)).is_some());
        let store = Request::Store {
            slot: SlotId(1),
            parts: vec![Part::new(GroupId(0), 0, PageList::run(0, 8))],
            more: None,
            after: RequestId(0),
        };
        let copies = transfers_of(&mut leader, 2, store);
        assert_eq!((copies.len(), leader.check()), (1, Ok(())));
        if late {
            let at = Time(0) + Duration::from_secs(61);
            leader.step(at, LeaderEvent::Tick, &mut Vec::new());
            assert_eq!((leader.open_requests(), leader.check()), (1, Ok(())));
        }
        end(&mut leader, copies.into_iter());
        assert_eq!((leader.open_requests(), leader.check()), (0, Ok(())));
    }
}

/// As many parts as a request may have: each is a transfer, and each end of one makes the load go on.
#[test]
fn a_load_of_many_parts_is_answered_with_the_end_of_the_last_one() {
    let pages = 4096;
    let mut leader = with_arena(2 * pages, |_| {});
    transfers_of(&mut leader, 1, lookup_of(1, distinct(pages)));
    let store = Request::Store {
        slot: SlotId(1),
        parts: vec![Part::new(GroupId(0), 0, PageList::run(0, pages))],
        more: None,
        after: RequestId(0),
    };
    let copies = transfers_of(&mut leader, 2, store);
    end(&mut leader, copies.into_iter());
    for (id, failed) in [(3, None), (5, Some(2000))] {
        transfers_of(&mut leader, id, lookup_of(1, distinct(pages)));
        let each = (0..pages).map(|page| Part::new(GroupId(0), page, PageList::run(page, 1)));
        let load = Request::Load {
            slot: SlotId(1),
            parts: each.collect(),
            after: RequestId(0),
        };
        let copies = transfers_of(&mut leader, id + 1, load);
        assert_eq!(copies.len(), pages as usize);
        let copies = copies.into_iter().enumerate();
        let (failing, mut whole): (Vec<_>, Vec<_>) =
            copies.partition(|(index, _)| Some(*index) == failed);
        let last = whole.pop().map(|(_, transfer)| transfer);
        for (_, transfer) in failing {
            fail(&mut leader, transfer);
        }
        end(&mut leader, whole.into_iter().map(|(_, transfer)| transfer));
        assert_eq!((leader.open_requests(), leader.check()), (1, Ok(())));
        let effects = end(&mut leader, last.into_iter());
        let answer = effects.into_iter().find_map(|effect| match effect {
            LeaderEffect::Answer { answer, .. } => Some(answer),
            _ => None,
        });
        let expected = match failed {
            None => Ok(Answer::Load(LoadAnswer { pages })),
            Some(_) => Err(Refusal::CopyFailed(1)),
        };
        assert_eq!(answer, Some(expected));
    }
}

/// Reports a transfer as failed.
fn fail(leader: &mut Leader, transfer: TransferId) {
    let ended = kvferry_types::EndedCopy::failed(transfer);
    let event = LeaderEvent::Ended {
        worker: WORKER,
        epoch: Epoch(1),
        copies: vec![ended],
    };
    leader.step(Time(0), event, &mut Vec::new());
}
