use std::ops::Range;

use proptest::prelude::*;

use kvferry_core::{GroupKind, GroupSpec, Groups, Hit, LookupBounds, Presence, Retention, Written};
use kvferry_types::Fingerprint;

use super::*;

/// Hashes of a sequence whose tokens depend on `salt` from hash `branch` on.
fn sequence(hashes: u32, branch: u32, salt: u32) -> Vec<Fingerprint> {
    let hash = |index| {
        let salt = if index < branch { 0 } else { salt };
        Fingerprint((u128::from(salt) << 64) + u128::from(index) + 1)
    };
    (0..hashes).map(hash).collect()
}

fn positions(copies: &[PageCopy], group: u8) -> Vec<u32> {
    let of_group = copies.iter().filter(|copy| copy.group.0 == group);
    of_group.map(|copy| copy.page).collect()
}

fn held(table: &[u32]) -> Vec<u32> {
    let pages = (0..).zip(table).filter(|(_, page)| **page != 0);
    pages.map(|(position, _)| position).collect()
}

fn range(pages: Range<u32>) -> Vec<u32> {
    pages.collect()
}

/// Computes a step. Returns the pages that it stores.
fn advance(
    cache: &mut HybridCache,
    running: &mut RunningSequence,
    tokens: u32,
) -> Option<Vec<PageCopy>> {
    let step = cache.advance(running, tokens)?;
    cache.computed(running);
    Some(step.stores)
}

/// Computes a sequence of `tokens` tokens in steps, and returns what the steps store.
fn serve(cache: &mut HybridCache, hashes: &[Fingerprint], tokens: u32, step: u32) -> Vec<PageCopy> {
    let mut running = cache.begin(hashes.to_vec(), tokens - 1);
    let mut stores = Vec::new();
    while running.computed_tokens() < tokens {
        let step = step.min(tokens - running.computed_tokens());
        stores.extend(advance(cache, &mut running, step).expect("room"));
    }
    cache.finish(running);
    stores
}

#[test]
fn pages_behind_a_window_become_null_pages() {
    let mut cache = HybridCache::new(HybridModel::GemmaLike.groups(), 1000, 1000);
    let mut running = cache.begin(sequence(64, 0, 1), 1023);
    let stores = advance(&mut cache, &mut running, 512).expect("room");
    assert_eq!(positions(&stores, 1), range(0..32));
    let stores = advance(&mut cache, &mut running, 512).expect("room");
    assert_eq!(positions(&stores, 1), range(32..64));
    // Token 512 reads from token 1 on: no page is unread yet.
    assert_eq!(held(running.table(GroupId(1))), range(0..64));
    advance(&mut cache, &mut running, 1).expect("room");
    assert_eq!(held(running.table(GroupId(1))), range(32..65));
    assert_eq!(held(running.table(GroupId(0))), range(0..65));
    assert_eq!(cache.held_pages(), 33 + 65);
    cache.finish(running);
    assert_eq!(cache.held_pages(), 0);
}

#[test]
fn a_hit_holds_what_its_next_token_reads() {
    let mut cache = HybridCache::new(HybridModel::TwoSizes.groups(), 1000, 1000);
    let hashes = sequence(32, 0, 1);
    assert_eq!((cache.hash_tokens(), cache.block_tokens()), (16, 64));
    serve(&mut cache, &hashes, 500, 500);
    let running = cache.begin(hashes, 499);
    assert_eq!(running.computed_tokens(), 448);
    assert_eq!(held(running.table(GroupId(0))), range(0..28));
    assert_eq!(held(running.table(GroupId(1))), range(5..7));
}

#[test]
fn a_state_is_found_where_a_step_ended() {
    let mut cache = HybridCache::new(HybridModel::MambaLike.groups(), 1000, 1000);
    let hashes = sequence(16, 0, 1);
    let stores = serve(&mut cache, &hashes, 1000, 192);
    assert_eq!(positions(&stores, 0), [2, 5, 8, 11, 14]);
    assert_eq!(positions(&stores, 1), range(0..15));
    assert_eq!(cache.lookup(&hashes, 999), 960);
    assert_eq!(cache.lookup(&hashes, 959), 768);
    let mut running = cache.begin(hashes, 700);
    assert_eq!(running.computed_tokens(), 576);
    assert_eq!(held(running.table(GroupId(0))), [8]);
    advance(&mut cache, &mut running, 10).expect("room");
    assert_eq!(held(running.table(GroupId(0))), [8, 9]);
    advance(&mut cache, &mut running, 10).expect("room");
    assert_eq!(held(running.table(GroupId(0))), [9]);
}

#[test]
fn a_state_inside_a_page_is_never_found() {
    let mut cache = HybridCache::new(HybridModel::MambaLike.groups(), 1000, 1000);
    let hashes = sequence(16, 0, 1);
    let stores = serve(&mut cache, &hashes, 1000, 100);
    assert!(
        positions(&stores, 0).is_empty(),
        "no step ended at the end of a page"
    );
    let found = range(0..16)
        .into_iter()
        .filter(|page| cache.has(GroupId(0), &hashes, *page));
    assert_eq!(found.count(), 0);
    assert_eq!(cache.lookup(&hashes, 999), 0);
}

#[test]
fn only_the_last_chunk_is_held() {
    let mut cache = HybridCache::new(HybridModel::Chunked.groups(), 1000, 1000);
    let hashes = sequence(64, 0, 1);
    let stores = serve(&mut cache, &hashes, 560, 560);
    let not_last = range(0..35).into_iter().filter(|page| page % 16 != 15);
    assert_eq!(positions(&stores, 0), not_last.collect::<Vec<_>>());
    let running = cache.begin(hashes.clone(), 559);
    assert_eq!(running.computed_tokens(), 544);
    assert_eq!(held(running.table(GroupId(0))), [32, 33]);
    let at_a_chunk = cache.begin(hashes, 512);
    assert_eq!(at_a_chunk.computed_tokens(), 512);
    assert!(held(at_a_chunk.table(GroupId(0))).is_empty());
}

#[test]
fn a_load_fills_the_pages_that_the_end_of_the_hit_needs() {
    let mut cache = HybridCache::new(HybridModel::GemmaLike.groups(), 200, 200);
    let hashes = sequence(128, 0, 1);
    let mut running = cache.begin(hashes.clone(), 2047);
    assert_eq!(cache.load(&mut running, 1030), None, "no end of a page");
    let copies = cache.load(&mut running, 1024).expect("room");
    assert_eq!(positions(&copies, 0), range(0..64));
    assert_eq!(positions(&copies, 1), range(32..64));
    assert_eq!(cache.lookup(&hashes, 2047), 0, "nothing is loaded yet");
    cache.loaded(&running);
    assert_eq!(cache.lookup(&hashes, 2047), 1024);
    let stores = advance(&mut cache, &mut running, 16).expect("room");
    assert_eq!(
        positions(&stores, 0),
        [64],
        "loaded pages are not stored again"
    );
    assert_eq!(cache.advance(&mut running, 2000), None);
    cache.finish(running);
    assert_eq!(cache.available_pages(), 200);
}

#[test]
fn the_least_recently_used_pages_are_evicted_and_held_ones_are_not() {
    let mut cache = HybridCache::new(HybridModel::TwoSizes.groups(), 30, 30);
    let (first, second) = (sequence(16, 0, 1), sequence(16, 0, 2));
    serve(&mut cache, &first, 256, 256);
    let held = cache.begin(first.clone(), 256);
    assert_eq!(held.computed_tokens(), 256);
    let mut running = cache.begin(second.clone(), 255);
    assert_eq!(cache.advance(&mut running, 256), None);
    cache.finish(held);
    assert!(advance(&mut cache, &mut running, 256).is_some());
    cache.finish(running);
    assert_eq!(cache.lookup(&second, 256), 256);
    // Windows went first, and then the tail of the layers of full attention.
    assert_eq!(cache.lookup(&first, 256), 0);
    assert!(cache.has(GroupId(0), &first, 0));
    assert!(!cache.has(GroupId(0), &first, 15));
}

/// The pages of a sequence in a cache, for the rules of the core.
struct Cached<'a>(&'a HybridCache, &'a [Fingerprint]);

impl Presence for Cached<'_> {
    fn has(&self, group: GroupId, page: u32) -> bool {
        self.0.has(group, self.1, page)
    }
}

fn rules(cache: &HybridCache, groups: &[LayerGroup]) -> Groups {
    let spec = |group: &LayerGroup| GroupSpec {
        kind: match group.kind {
            LayerKind::Full => GroupKind::Prefix,
            LayerKind::Window(tokens) => GroupKind::Window { tokens },
            LayerKind::Chunk(tokens) => GroupKind::Chunk { tokens },
            LayerKind::Recurrent => GroupKind::State,
        },
        page_tokens: group.page_tokens,
        eagle: group.drafted,
    };
    let specs = groups.iter().map(spec).collect();
    Groups::new(cache.hash_tokens(), cache.block_tokens(), specs).expect("groups with rules")
}

/// Choices of a random run; 0 behind their end, so that shorter lists give simpler runs.
struct Choices<F>(F);

impl<F: FnMut() -> u32> Choices<F> {
    fn below(&mut self, count: u32) -> u32 {
        (self.0)() % count
    }
}

fn random_groups<F: FnMut() -> u32>(choices: &mut Choices<F>) -> Vec<LayerGroup> {
    if choices.below(3) == 0 {
        return HybridModel::ALL[choices.below(4) as usize].groups();
    }
    let sizes = [16, 32, 48, 64];
    let mut groups = Vec::new();
    for _ in 0..=choices.below(3) {
        let kind = match choices.below(4) {
            0 => LayerKind::Full,
            1 => LayerKind::Window(2 + choices.below(300)),
            2 => LayerKind::Chunk(16 * (1 + choices.below(12))),
            _ => LayerKind::Recurrent,
        };
        let can_draft = matches!(kind, LayerKind::Full | LayerKind::Window(_));
        groups.push(LayerGroup {
            kind,
            page_tokens: sizes[choices.below(4) as usize],
            layers: 1,
            drafted: can_draft && choices.below(4) == 3,
        });
    }
    groups
}

/// The pages of copies, by group.
fn by_group(copies: &[PageCopy], groups: &[LayerGroup]) -> Vec<Vec<u32>> {
    with_ids(groups)
        .map(|(group, _)| positions(copies, group.0))
        .collect()
}

/// Serves random sequences of common prefixes in a small cache, and compares each lookup, load and store with the rules
/// of the core. Returns the number of hits in the cache.
fn run<F: FnMut() -> u32>(choices: &mut Choices<F>) -> u32 {
    let groups = random_groups(choices);
    let pages = 20 + choices.below(150);
    let mut cache = HybridCache::new(groups.clone(), pages, pages);
    let rules = rules(&cache, &groups);
    let block = cache.block_tokens();
    let mut open: Vec<RunningSequence> = Vec::new();
    let mut hits = 0;
    for _ in 0..24 {
        let tokens = 1 + choices.below(4 * block.min(256) + 200);
        let branch = choices.below(tokens / cache.hash_tokens() + 1);
        let hashes = sequence(tokens / cache.hash_tokens(), branch, 1 + choices.below(3));
        let bounds = |device_tokens| LookupBounds {
            hashes: hashes.len() as u32,
            device_tokens,
            limit_tokens: tokens - 1,
        };
        let hit = rules.reach(bounds(0), &Cached(&cache, &hashes));
        let end = hit.map_or(0, Hit::end_tokens);
        assert_eq!(cache.lookup(&hashes, tokens - 1), end, "{groups:?}");
        let mut running = cache.begin(hashes.clone(), tokens - 1);
        assert_eq!(running.computed_tokens(), end);
        for (group, _) in with_ids(&groups) {
            let expected = hit.map_or_else(Vec::new, |hit| range(rules.needed(group, hit)));
            assert_eq!(held(running.table(group)), expected, "{groups:?}");
        }
        hits += u32::from(end > 0);

        let more = choices.below(3) * block;
        if more > 0 && end + more < tokens {
            let hit = rules.hit(end, end + more).expect("a boundary");
            let ids = with_ids(&groups);
            let expected: Vec<_> = ids
                .map(|(group, _)| range(rules.loaded(group, hit)))
                .collect();
            if let Some(copies) = cache.load(&mut running, more) {
                assert_eq!(by_group(&copies, &groups), expected, "{groups:?} {hit:?}");
                if choices.below(4) == 3 {
                    cache.finish(running);
                    continue;
                }
                cache.loaded(&running);
            }
        }

        while running.computed_tokens() < tokens {
            let from = running.computed_tokens();
            let step = match choices.below(3) {
                0 => tokens - from,
                1 => (1 + choices.below(3)) * block,
                _ => 1 + choices.below(100),
            };
            let step = step.min(tokens - from);
            let Some(stores) = advance(&mut cache, &mut running, step) else {
                break;
            };
            let hashed = hashes.len() as u32 * cache.hash_tokens();
            for (group, layers) in with_ids(&groups) {
                let written = Written {
                    first_page: from.min(hashed) / layers.page_tokens,
                    tokens: (from + step).min(hashed),
                    states: &[from + step],
                };
                let has = |page: u32| running.table(group)[page as usize] != 0;
                let mut runs = Vec::new();
                rules.storable(group, written, Retention::EVERY_BOUNDARY, has, &mut runs);
                let expected: Vec<u32> = runs.into_iter().flatten().collect();
                assert_eq!(
                    positions(&stores, group.0),
                    expected,
                    "{layers:?} {groups:?}"
                );
            }
        }
        open.push(running);
        if open.len() > choices.below(3) as usize {
            let ended = open.remove(choices.below(open.len() as u32) as usize);
            cache.finish(ended);
        }
        let in_tables = with_ids(&groups)
            .flat_map(|(group, _)| open.iter().flat_map(move |running| running.table(group)));
        let distinct: std::collections::BTreeSet<_> =
            in_tables.filter(|page| **page != 0).collect();
        assert_eq!(cache.held_pages(), distinct.len());
    }
    open.into_iter().for_each(|running| cache.finish(running));
    assert_eq!(cache.held_pages(), 0);
    hits
}

proptest! {
    #[test]
    fn lookups_loads_and_stores_agree_with_the_rules_of_the_core(choices in prop::collection::vec(any::<u32>(), 0..400)) {
        let mut choices = choices.into_iter();
        run(&mut Choices(|| choices.next().unwrap_or(0)));
    }

    /// Also for sets of pages that no engine gets into.
    #[test]
    fn lookups_among_any_pages_agree_with_the_rules_of_the_core(
        choices in prop::collection::vec(any::<u32>(), 40),
        mut missing in prop::collection::vec(prop::bool::weighted(0.1), 400),
    ) {
        let mut choices = choices.into_iter();
        let mut choices = Choices(|| choices.next().unwrap_or(0));
        let groups = random_groups(&mut choices);
        let mut cache = HybridCache::new(groups.clone(), 400, 400);
        let tokens = 1 + choices.below(1200);
        let hashes = sequence(tokens / cache.hash_tokens(), 0, 1);
        for (group, layers) in with_ids(&groups) {
            for page in 0..tokens / layers.page_tokens {
                if !missing.pop().unwrap_or(true) {
                    cache.insert(group, &hashes, page);
                }
            }
        }
        let bounds = LookupBounds { hashes: hashes.len() as u32, device_tokens: 0, limit_tokens: tokens - 1 };
        let hit = rules(&cache, &groups).reach(bounds, &Cached(&cache, &hashes));
        prop_assert_eq!(cache.lookup(&hashes, tokens - 1), hit.map_or(0, Hit::end_tokens), "{:?}", groups);
    }
}

#[test]
fn random_runs_have_hits() {
    let mut state = 1_u64;
    let mut choices = Choices(|| {
        // A linear congruential generator (Knuth, MMIX), of which the high half is used.
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    });
    let hits: u32 = (0..2000).map(|_| run(&mut choices)).sum();
    assert!(hits > 10_000, "{hits} hits in 48,000 lookups");
}
