//! The conversation trace looked up in tails: each request names only the pages behind what the engine's own cache has.

use std::sync::Arc;

use kvferry_core::{ARENA_PAGES_MAX, AnchorKey, Leader, LeaderSettings};
use kvferry_sim::sequential::Sequential;
use kvferry_types::{Epoch, GroupGeometry, GroupId, PageHashes, PerTier, Ratio, SlotId};
use kvferry_workload::cache::PagedCache;
use kvferry_workload::hashes::PageHasher;
use kvferry_workload::scheduler::{Prompt, Scheduler};
use kvferry_workload::trace;

/// Tokens of a page, and of a hash id of the trace.
const PAGE_TOKENS: u32 = 512;
/// Longest prompt of the trace, in pages.
const LONGEST: u32 = 246;

/// Which pages of a prompt the engine names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Named {
    All,
    /// Those behind the pages that its own cache has.
    Tail,
}

/// Hit pages and counters of a run.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Found {
    g1: u64,
    g2: u64,
    stored_pages: u64,
}

fn run(named: Named, page_index: bool, ratio: u32, (g1, g2): (u32, u32)) -> Option<Found> {
    let path = super::trace("conv")?;
    let trace = trace::read(&path, PAGE_TOKENS, None).expect("a trace");
    let hasher = PageHasher::new(PAGE_TOKENS, PAGE_TOKENS).expect("fits");
    let ratio = Ratio::new(ratio).expect("in bounds");
    let mut settings = LeaderSettings::new(Epoch(1), 1, ratio, AnchorKey::new([0; 32]));
    settings.page_index = page_index;
    let device_pages = g1.max(LONGEST);
    let geometry = GroupGeometry {
        group: GroupId(0),
        engine_page_tokens: PAGE_TOKENS,
        layers: 1,
        page_bytes: 1024,
        device_pages,
        ..GroupGeometry::default()
    };
    // The tails that follow are cut by this cache; the scheduler of the engine has none.
    let mut cache = PagedCache::new(device_pages, g1);
    let cached = match named {
        Named::All => g1,
        Named::Tail => 0,
    };
    let scheduler = Scheduler::new(device_pages, cached);
    let leader = Leader::new(settings);
    let mut engine = Sequential::new(leader, scheduler, 1, &geometry.into(), &PerTier::host(g2))
        .expect("an engine");
    let mut found = Found::default();
    for (index, request) in trace.requests.iter().enumerate() {
        let mut hashes = hasher.hash(&request.blocks);
        hashes.truncate((request.input_tokens / u64::from(PAGE_TOKENS)) as usize);
        let held = cache.hold_prefix(hashes.fingerprints(0));
        let first = match named {
            Named::All => 0,
            Named::Tail => held.len(),
        };
        let fresh = cache
            .take((hashes.len() - held.len()) as u32)
            .expect("room");
        let served = engine
            .serve(Prompt {
                slot: SlotId(index as u64),
                namespace: Arc::from([]),
                tokens: request.input_tokens,
                hashes: Arc::new(PageHashes::of_fingerprints(hashes.fingerprints(first))),
            })
            .expect("served");
        found.g1 += held.len() as u64;
        found.g2 += u64::from(served.hit_pages);
        if named == Named::All {
            assert_eq!(served.device_pages as usize, held.len());
        }
        let pages: Vec<u32> = held.into_iter().chain(fresh).collect();
        for (page, content) in pages.iter().zip(hashes.fingerprints(0)) {
            cache.written(*page, content);
        }
        cache.give_back(&pages);
    }
    engine.leader().check().expect("the second count agrees");
    found.stored_pages = engine.leader().counts().published_pages;
    Some(found)
}

/// Pages that all requests have together in either cache, if the tier loses none.
const REUSED: u64 = 105_592;

#[test]
fn tails_find_all_pages_that_whole_sequences_find() {
    for (g1, g2) in [
        (1_000, ARENA_PAGES_MAX),
        (5_000, ARENA_PAGES_MAX),
        (5_000, 50_000),
    ] {
        let Some(all) = run(Named::All, false, 32, (g1, g2)) else {
            return;
        };
        assert_eq!(run(Named::All, true, 32, (g1, g2)), Some(all), "{g1}, {g2}");
        assert_eq!(
            run(Named::Tail, true, 32, (g1, g2)),
            Some(all),
            "{g1}, {g2}"
        );
        if g2 == ARENA_PAGES_MAX {
            assert_eq!(all.g1 + all.g2, REUSED);
        }
    }
}

/// The difference that the setting makes: what begins inside a block is not found, and is stored again.
#[test]
fn without_the_index_of_pages_tails_lose_hits_and_are_stored_twice() {
    let sizes = (5_000, ARENA_PAGES_MAX);
    let Some(with) = run(Named::Tail, true, 32, sizes) else {
        return;
    };
    let without = run(Named::Tail, false, 32, sizes).expect("a run");
    assert_eq!(
        (
            with.g2 - without.g2,
            without.stored_pages - with.stored_pages
        ),
        (408, 107)
    );
    assert_eq!(
        run(Named::Tail, false, 1, sizes),
        Some(with),
        "blocks of one page"
    );
}

/// A lookup of a tail does not make the pages before it recent. Where the tier is small beside the engine's own cache, the
/// order of eviction differs, with blocks of one page as with blocks of 32.
#[test]
fn tails_keep_nearly_all_hits_of_a_small_tier() {
    // (G1 pages, G2 pages, ratio, minimum share of the hits of whole sequences)
    let cases = [
        (1_000, 10_000, 1, 1.0),
        (1_000, 10_000, 32, 1.0),
        (1_000, 30_000, 32, 1.0),
        (5_000, 30_000, 1, 0.996),
        (5_000, 30_000, 32, 0.996),
        (5_000, 10_000, 1, 0.975),
        (5_000, 10_000, 32, 0.976),
    ];
    for (g1, g2, ratio, share) in cases {
        let Some(all) = run(Named::All, false, ratio, (g1, g2)) else {
            return;
        };
        assert_eq!(
            run(Named::All, true, ratio, (g1, g2)),
            Some(all),
            "{g1}, {g2}, {ratio}"
        );
        let tails = run(Named::Tail, true, ratio, (g1, g2)).expect("a run");
        let kept = (tails.g1 + tails.g2) as f64 / (all.g1 + all.g2) as f64;
        assert!(kept >= share, "{g1}, {g2}, {ratio}: kept {kept}");
    }
}
