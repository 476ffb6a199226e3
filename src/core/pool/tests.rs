//! Tests of the pool's second count, and helpers for several tests of the core.

use std::collections::BTreeMap;

use crate::index::anchor::{AnchorKey, Domain};
use crate::index::block_index::MatchGoal;
use crate::index::blocks::Filling;
use crate::index::shard_set::ShardSet;
use crate::pool::counts::PoolCounts;
use crate::pool::store_window::MISSES_AROUND_MAX;
use crate::pool::{BlockRun, Pin, Pool, PrefixMatch, ReservationKind};
use kvferry_types::{
    Epoch, GroupId, PageHashes, PageRun, Ratio, Record, Scope, Shard, Stored, TransferId,
};

/// Most pages of a block.
const RATIO: usize = 4;

/// The hashes of a sequence. Sequences with different salts have no page in common.
pub(crate) fn sequence(pages: u32, salt: u8) -> PageHashes {
    let bytes = (0..pages).flat_map(|page| {
        let mut hash = [salt; 16];
        hash[..4].copy_from_slice(&page.to_le_bytes());
        hash
    });
    PageHashes::packed(16, bytes.collect()).expect("16 bytes a page")
}

pub(crate) fn domain() -> Domain {
    Domain::new(&AnchorKey::new([1; 32]), b"a", &[0; 16], GroupId(0))
}

/// The domain of a namespace.
pub(crate) fn domain_of(namespace: u8) -> Domain {
    Domain::new(&AnchorKey::new([1; 32]), &[namespace], &[0; 16], GroupId(0))
}

/// Reserves the block of a sequence that begins at `position`.
fn reserve(pool: &mut Pool, hashes: &PageHashes, position: usize, transfer: u64) -> TransferId {
    let (mut reserved, mut evicted, mut next) = (Vec::new(), Vec::new(), transfer);
    let end = hashes.len().min(position + RATIO);
    let (at, to) = (position as u32, end as u32);
    let domain = domain();
    let room = pool.reserve(
        &domain,
        hashes.view(),
        at,
        to,
        None,
        &mut next,
        &mut reserved,
        &mut evicted,
    );
    assert_eq!((room, reserved.len(), evicted.len()), (to - at, 1, 0));
    reserved[0].transfer
}

/// A pool of `capacity` pages that holds a whole sequence.
pub(crate) fn stored(hashes: &PageHashes, capacity: u32) -> Pool {
    let mut pool = Pool::new(capacity, Ratio::new(RATIO as u32).expect("in bounds"));
    for position in (0..hashes.len()).step_by(RATIO) {
        let transfer = reserve(&mut pool, hashes, position, position as u64);
        pool.start_filling(transfer, ShardSet::first(1));
        assert_eq!(pool.ended(transfer, Shard(0), true), Some(true));
    }
    pool
}

/// Two ready blocks of 4 and 3 pages, one pinned, and one block each that is reserved, filling and quarantined.
fn one_of_each() -> (Pool, Pin, [TransferId; 3]) {
    let mut pool = stored(&sequence(7, 0), 32);
    let filling =
        [1, 2, 3].map(|salt| reserve(&mut pool, &sequence(4, salt), 0, 100 + u64::from(salt)));
    pool.start_filling(filling[1], ShardSet::first(2));
    pool.start_filling(filling[2], ShardSet::first(2));
    pool.quarantine(filling[2]);
    let pin = pool.pin(0, 2);
    (pool, pin, filling)
}

#[test]
fn pages_are_counted_by_state() {
    let (mut pool, pin, filling) = one_of_each();
    assert_eq!(pool.check(), Ok(()));
    let states = [
        ("free", 13),
        ("reserved", 4),
        ("filling", 4),
        ("ready", 7),
        ("quarantined", 4),
        ("out_of_use", 0),
    ];
    assert_eq!(pool.page_states().by_name(), states);
    assert_eq!(
        (pool.live_blocks(), pool.pins(), Pool::pinned_pages(&pin)),
        (5, 1, 2)
    );
    pool.unpin(pin);
    pool.start_filling(filling[0], ShardSet::first(1));
    assert_eq!(pool.ended(filling[0], Shard(0), true), Some(true));
    assert_eq!(pool.ended(filling[1], Shard(1), true), None);
    assert_eq!(
        pool.ended(filling[1], Shard(0), false),
        Some(false),
        "a copy failed"
    );
    assert_eq!(pool.ended(filling[2], Shard(0), true), None);
    assert_eq!(
        pool.ended(filling[2], Shard(1), true),
        Some(false),
        "too late"
    );
    assert_eq!(pool.check(), Ok(()));
    let states = [
        ("free", 21),
        ("reserved", 0),
        ("filling", 0),
        ("ready", 11),
        ("quarantined", 0),
        ("out_of_use", 0),
    ];
    assert_eq!(pool.page_states().by_name(), states);
}

#[test]
fn the_second_count_sees_what_is_wrong() {
    let wrong = |spoil: fn(&mut Pool), expected: &str| {
        let (mut pool, ..) = one_of_each();
        spoil(&mut pool);
        let why = pool.check().expect_err(expected).to_string();
        assert!(why.contains(expected), "{why}, not {expected}");
    };
    wrong(
        |pool| pool.blocks.get_mut(1).ready = 0,
        "block 1 holds no page",
    );
    wrong(
        |pool| pool.blocks.get_mut(0).phase = 1,
        "block 0 crosses a multiple",
    );
    wrong(
        |pool| pool.blocks.get_mut(1).pinned_pages = 1,
        "block 1 has pinned pages and no holder",
    );
    wrong(
        |pool| pool.blocks.get_mut(0).pinned_pages = 5,
        "block 0 lost pinned pages",
    );
    wrong(
        |pool| pool.blocks.get_mut(1).pins = 1,
        "blocks count 2 pins, the pool 1",
    );
    wrong(|pool| pool.blocks.get_mut(1).ready = 2, "page 6 is lost");
    wrong(
        |pool| pool.blocks.get_mut(1).start = 3,
        "page 4 is lost, or page 3 is held twice",
    );
    wrong(|pool| pool.arena.release(5, 1), "held twice");
    wrong(
        |pool| assert!(pool.arena.alloc_at(19, 13)),
        "pages from 19 to 32 are lost",
    );
    wrong(
        |pool| pool.blocks.get_mut(2).set_filling(None),
        "block 2 holds no page",
    );
    wrong(
        |pool| {
            let filling = Filling {
                transfer: TransferId(77),
                pages: 1,
            };
            pool.blocks.get_mut(1).set_filling(Some(filling));
        },
        "transfer 77 of block 1 has no such owner",
    );
    wrong(
        |pool| {
            let transfer = TransferId(102);
            let block = pool.blocks.get_mut(2);
            assert_eq!(
                block.filling().map(|filling| filling.transfer),
                Some(transfer)
            );
            block.set_filling(Some(Filling { transfer, pages: 3 }));
        },
        "transfer 102 of block 2 has no such owner",
    );
    wrong(
        |pool| {
            let transfer = TransferId(102);
            if let Some(owner) = pool.reservations.get_mut(&transfer) {
                owner.block = 3;
            }
        },
        "transfer 102 of block 2 has no such owner",
    );
    wrong(
        |pool| {
            let block = pool.blocks.get_mut(2);
            block.set_filling(None);
            block.ready = 4;
        },
        "2 blocks fill, 3 reservations live",
    );
    wrong(
        |pool| pool.blocks.set_evictable(1, false),
        "block 1 and the order of eviction disagree",
    );
}

fn walk(pool: &Pool, hashes: &PageHashes, covered: usize) -> (PrefixMatch, Vec<BlockRun>) {
    let mut runs = Vec::new();
    let reach = pool.walk(&domain(), hashes.view(), covered, &mut runs);
    (reach, runs)
}

#[test]
fn a_walk_reports_its_length_and_whether_the_next_page_is_being_stored() {
    let hashes = sequence(20, 0);
    let mut pool = stored(&sequence(12, 0), 40);
    let reach = |pool: &Pool, pages, covered| {
        let (reach, runs) = walk(pool, &sequence(pages, 0), covered);
        (reach.end, reach.pending, runs.len())
    };
    assert_eq!(reach(&pool, 8, 0), (8, false, 2));
    assert_eq!(reach(&pool, 12, 0), (12, false, 3));
    assert_eq!(reach(&pool, 20, 0), (12, false, 3));
    assert_eq!(reach(&pool, 20, 16), (16, false, 3));
    assert_eq!(reach(&pool, 20, 20), (20, false, 3));

    let transfer = reserve(&mut pool, &hashes, 12, 70);
    assert_eq!(reach(&pool, 20, 0), (12, true, 3));
    assert_eq!(reach(&pool, 20, 16), (16, false, 3), "16 is not on its way");
    assert_eq!(reach(&pool, 12, 0), (12, false, 3), "nothing is waited for");
    pool.start_filling(transfer, ShardSet::first(1));
    assert_eq!(pool.ended(transfer, Shard(0), true), Some(true));
    assert_eq!(reach(&pool, 20, 0), (16, false, 4));
}

/// The end of one sweep must not show the blocks that another one still hides.
#[test]
fn sweeps_that_overlap_hide_their_own_blocks() {
    let (first, second) = (sequence(4, 0), sequence(4, 1));
    let mut pool = stored(&first, 40);
    let transfer = reserve(&mut pool, &second, 0, 70);
    pool.start_filling(transfer, ShardSet::first(1));
    assert_eq!(pool.ended(transfer, Shard(0), true), Some(true));
    let namespace = domain().id().namespace();
    let pages = |hashes: &PageHashes| Scope::Pages(namespace, hashes.fingerprints(0).collect());
    let found = |pool: &Pool| (walk(pool, &first, 0).0.end, walk(pool, &second, 0).0.end);
    assert_eq!(found(&pool), (4, 4));

    let sweep_of_first = pool.begin_sweep(pages(&first));
    let sweep_of_second = pool.begin_sweep(pages(&second));
    assert_eq!(found(&pool), (0, 0));
    pool.end_sweep(&sweep_of_first);
    assert_eq!(found(&pool), (4, 0));
    let again = pool.begin_sweep(pages(&first));
    pool.end_sweep(&sweep_of_second);
    assert_eq!(found(&pool), (0, 4));
    pool.end_sweep(&again);
    assert_eq!(found(&pool), (4, 4));
}

/// A slab that was large once is walked in slices, too.
#[test]
fn vacant_places_use_the_budget_of_a_sweep() {
    let mut pool = stored(&sequence(40, 0), 40);
    let mut sweep = pool.begin_sweep(Scope::Everything);
    let mut filling = Vec::new();
    assert_eq!(pool.remove_next(&mut sweep, &mut 1000, &mut filling), 40);
    pool.end_sweep(&sweep);
    let mut sweep = pool.begin_sweep(Scope::Everything);
    for is_over in [false, false, true] {
        let mut budget = 4;
        assert_eq!(
            pool.count_holders(&mut sweep, &mut budget, &BTreeMap::new()),
            0
        );
        assert_eq!((sweep.is_over(), budget), (is_over, u32::from(is_over) * 2));
    }
    pool.end_sweep(&sweep);
}

#[test]
fn the_root_of_a_sequence_outlives_its_tail() {
    let hashes = sequence(12, 0);
    let mut pool = stored(&hashes, 40);
    let (_, runs) = walk(&pool, &hashes, 0);
    let by_age = |pool: &Pool| -> Vec<u32> { pool.view().map(|block| block.start).collect() };
    assert_eq!(by_age(&pool), [0, 4, 8]);
    pool.touch(&runs);
    assert_eq!(by_age(&pool), [8, 4, 0]);
    pool.touch(&runs[1..2]);
    assert_eq!(by_age(&pool), [8, 0, 4]);
}

#[test]
fn a_block_grows_only_after_its_last_page_and_when_none_is_filling() {
    let hashes = sequence(4, 0);
    let mut pool = stored(&sequence(2, 0), 40);
    let domain = domain();
    let mut next = 500;
    let mut store = |pool: &mut Pool, hashes: &PageHashes, at: u32, to: u32| {
        let (mut reserved, mut evicted) = (Vec::new(), Vec::new());
        let tail = pool.longest(&domain, hashes.view(), 0, MatchGoal::Present);
        let room = pool.reserve(
            &domain,
            hashes.view(),
            at,
            to,
            tail,
            &mut next,
            &mut reserved,
            &mut evicted,
        );
        assert_eq!((room, evicted.len()), (to - at, 0));
        let runs = reserved
            .iter()
            .map(|reserved| (reserved.run.start, reserved.run.count));
        (
            tail.map(|tail| (tail.pages, tail.ready)),
            runs.collect::<Vec<_>>(),
        )
    };
    let counts = |pool: &Pool| {
        let counts = pool.counts();
        (counts.stored, counts.grown, counts.branched, counts.split)
    };
    assert_eq!(counts(&pool), (1, 0, 0, 0));
    // After a ready block, and then after one that still fills.
    assert_eq!(
        store(&mut pool, &hashes, 2, 3),
        (Some((2, 2)), vec![(2, 1)])
    );
    assert_eq!(counts(&pool), (1, 1, 0, 0));
    assert_eq!(
        store(&mut pool, &hashes, 3, 4),
        (Some((3, 2)), vec![(3, 1)])
    );
    assert_eq!(counts(&pool), (2, 1, 0, 0), "not a growth, and no branch");
    // A sequence that shares one page of the block diverges there.
    let mut other = hashes.as_bytes()[..16].to_vec();
    other.extend_from_slice(&sequence(3, 9).as_bytes()[16..]);
    let other = PageHashes::packed(16, other).expect("16 bytes a page");
    assert_eq!(store(&mut pool, &other, 1, 3), (Some((1, 1)), vec![(4, 2)]));
    assert_eq!(counts(&pool), (3, 1, 1, 0));
    assert_eq!(pool.check(), Ok(()));
}

#[test]
fn no_more_pages_are_evicted_than_wanted_and_runs_without_a_hole_are_split() {
    // Adjacent blocks of 2 pages; every other one is pinned.
    let mut pool = Pool::new(12, Ratio::new(RATIO as u32).expect("in bounds"));
    for salt in 0..6 {
        let transfer = reserve(&mut pool, &sequence(2, salt), 0, u64::from(salt));
        pool.start_filling(transfer, ShardSet::first(1));
        assert_eq!(pool.ended(transfer, Shard(0), true), Some(true));
    }
    let pins = [1, 3, 5].map(|block| pool.pin(block, 2));
    let hashes = sequence(4, 50);
    let (mut reserved, mut evicted, mut next) = (Vec::new(), Vec::new(), 90);
    let domain = domain();
    let room = pool.reserve(
        &domain,
        hashes.view(),
        0,
        4,
        None,
        &mut next,
        &mut reserved,
        &mut evicted,
    );
    let run = |start| PageRun { start, count: 2 };
    assert_eq!((room, &evicted[..]), (4, &[run(0), run(4)][..]));
    let places: Vec<(u32, PageRun)> = reserved
        .iter()
        .map(|piece| (piece.position, piece.run))
        .collect();
    assert_eq!(places.len(), 2);
    assert!(
        places.contains(&(0, run(0))) || places.contains(&(0, run(4))),
        "{places:?}"
    );
    let counts = pool.counts();
    assert_eq!(
        (
            counts.evicted,
            counts.evicted_pages,
            counts.largest_eviction_pages
        ),
        (2, 4, 4)
    );
    assert_eq!(
        (counts.stored, counts.split, counts.branched, counts.refused),
        (8, 1, 0, 0)
    );
    assert_eq!(pool.check(), Ok(()));

    // Two unpinned pages are left.
    let (mut reserved, mut evicted) = (Vec::new(), Vec::new());
    let hashes = sequence(4, 60);
    let room = pool.reserve(
        &domain,
        hashes.view(),
        0,
        4,
        None,
        &mut next,
        &mut reserved,
        &mut evicted,
    );
    assert_eq!((room, &evicted[..]), (2, &[run(8)][..]));
    let counts = pool.counts();
    assert_eq!((counts.refused, counts.refused_pages), (1, 2));
    pins.into_iter().for_each(|pin| pool.unpin(pin));
    assert_eq!(pool.check(), Ok(()));
}

/// A restarted leader finds the pages of a growth by its own record.
#[test]
fn the_record_of_a_growth_lists_the_pages_after_those_before() {
    let hashes = sequence(4, 0);
    let mut pool = stored(&sequence(2, 0), 40);
    let record = |pool: &Pool, transfer| pool.record(transfer, Epoch(3));
    assert_eq!(record(&pool, TransferId(70)), None, "nothing is stored");
    let (mut reserved, mut evicted, mut next) = (Vec::new(), Vec::new(), 70);
    let domain = domain();
    let tail = pool.longest(&domain, hashes.view(), 0, MatchGoal::Present);
    pool.reserve(
        &domain,
        hashes.view(),
        2,
        4,
        tail,
        &mut next,
        &mut reserved,
        &mut evicted,
    );
    let transfer = reserved[0].transfer;
    let stored = Stored {
        epoch: Epoch(3),
        transfer,
    };
    let expected = Record {
        anchor: domain.anchor(hashes.fingerprint(0)),
        domain: domain.id(),
        block_start: 0,
        first: 2,
        phase: 0,
        stored,
        fingerprints: hashes.fingerprints(2).collect(),
    };
    assert_eq!(record(&pool, transfer), Some(expected));
}

/// The pages after a block lie in another cell for an engine that names them after others.
#[test]
fn a_block_grows_up_to_the_multiple_of_the_ratio_of_the_sequence_that_stored_it() {
    let whole = sequence(9, 0);
    let tail = PageHashes::of_fingerprints(whole.view().fingerprints(3));
    let mut pool = stored(
        &PageHashes::of_fingerprints(tail.view().fingerprints(0).take(3)),
        40,
    );
    let domain = domain();
    let found = pool.longest(&domain, whole.view(), 3, MatchGoal::Present);
    assert_eq!(found.map(|found| found.pages), Some(3));
    let (mut reserved, mut evicted, mut next) = (Vec::new(), Vec::new(), 70);
    let into = (&mut next, &mut reserved, &mut evicted);
    pool.reserve(&domain, whole.view(), 6, 8, found, into.0, into.1, into.2);
    assert_eq!(reserved[0].kind, ReservationKind::New);
    assert_eq!(pool.check(), Ok(()));
}

/// A leader adds the counters of closed pools to those of the open one.
#[test]
fn the_counters_of_two_pools_add_up() {
    let counts = |factor: u64| PoolCounts {
        stored: factor,
        grown: 2 * factor,
        branched: 3 * factor,
        split: 4 * factor,
        evicted: 5 * factor,
        evicted_pages: 6 * factor,
        refused: 7 * factor,
        refused_pages: 8 * factor,
        unadmitted_pages: 10 * factor,
        largest_eviction_pages: 9 * factor as u32,
    };
    let sum = PoolCounts {
        largest_eviction_pages: 9 * 7,
        ..counts(5 + 7)
    };
    assert_eq!(counts(5).with(counts(7)), sum);
    assert_eq!(counts(7).with(counts(5)), sum);
}

/// However many of the engine's own pages are missing, the block that holds the first page after them is found, also
/// where that block begins before it.
#[test]
fn a_walk_past_many_missing_pages_finds_what_follows_them() {
    let missing = MISSES_AROUND_MAX as usize * 8;
    let hashes = sequence(missing as u32 + 8, 0);
    let mut pool = Pool::new(64, Ratio::new(RATIO as u32).expect("in bounds"));
    for position in [missing, missing + RATIO] {
        let transfer = reserve(&mut pool, &hashes, position, position as u64);
        pool.start_filling(transfer, ShardSet::first(1));
        assert_eq!(pool.ended(transfer, Shard(0), true), Some(true));
    }
    for covered in missing..missing + RATIO {
        let mut runs = Vec::new();
        let reach = pool.walk(&domain(), hashes.view(), covered, &mut runs);
        assert_eq!(
            reach.end as usize,
            hashes.len(),
            "{covered} pages of the engine"
        );
        let first = runs.first().map(|run| run.position as usize);
        assert_eq!(first, Some(missing));
    }
}
