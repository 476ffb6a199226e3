//! Arena, index and pool against naive models, which are simple enough to be evidently correct.

#![expect(clippy::expect_used, reason = "a test says what it expects")]
#![expect(
    clippy::disallowed_types,
    reason = "a model, unlike the code that it is compared with, may use hash maps"
)]

use std::collections::HashMap;

use kvferry_core::{
    AnchorKey, Arena, BlockRun, Domain, EvictionPolicy, Match, MatchGoal, Pin, Pool, Reserved,
    RuleLimits, ShardSet, TierPolicy,
};
use kvferry_types::{GroupId, PageHashes, Ratio, Shard, TransferId};
use proptest::prelude::*;

// --- the arena against a list of booleans -------------------------------------------------------------------------

#[derive(Debug, Clone)]
enum ArenaStep {
    Alloc(u32),
    Grow(usize, u32),
    Release(usize),
    Trim(usize, u32),
}

fn arena_step() -> impl Strategy<Value = ArenaStep> {
    prop_oneof![
        4 => (1_u32..40).prop_map(ArenaStep::Alloc),
        2 => (any::<usize>(), 1_u32..20).prop_map(|(run, pages)| ArenaStep::Grow(run, pages)),
        3 => any::<usize>().prop_map(ArenaStep::Release),
        2 => (any::<usize>(), 1_u32..20).prop_map(|(run, pages)| ArenaStep::Trim(run, pages)),
    ]
}

/// Length of the longest run of free pages.
fn longest_hole(used: &[bool]) -> u32 {
    used.split(|page| *page)
        .map(|hole| hole.len() as u32)
        .max()
        .unwrap_or(0)
}

/// Length of the hole that begins exactly at `start`.
fn hole_at(used: &[bool], start: u32) -> u32 {
    let start = start as usize;
    let begins = start < used.len() && !used[start] && (start == 0 || used[start - 1]);
    if begins {
        used[start..].iter().take_while(|page| !**page).count() as u32
    } else {
        0
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn the_arena_is_a_list_of_pages(
        capacity in 1_u32..200,
        steps in prop::collection::vec(arena_step(), 1..200),
    ) {
        let mut arena = Arena::new(capacity);
        let mut used = vec![false; capacity as usize];
        let mut runs: Vec<(u32, u32)> = Vec::new();
        for step in steps {
            match step {
                ArenaStep::Alloc(pages) => {
                    let room = longest_hole(&used) >= pages;
                    let start = arena.alloc(pages);
                    prop_assert_eq!(start.is_some(), room, "alloc({})", pages);
                    if let Some(start) = start {
                        for page in start..start + pages {
                            prop_assert!(!used[page as usize], "page {} was given twice", page);
                            used[page as usize] = true;
                        }
                        runs.push((start, pages));
                    }
                }
                ArenaStep::Grow(run, pages) if !runs.is_empty() => {
                    let run = run % runs.len();
                    let (start, length) = runs[run];
                    let room = hole_at(&used, start + length) >= pages;
                    prop_assert_eq!(arena.alloc_at(start + length, pages), room);
                    if room {
                        used[(start + length) as usize..(start + length + pages) as usize].fill(true);
                        runs[run].1 += pages;
                    }
                }
                ArenaStep::Release(run) if !runs.is_empty() => {
                    let (start, length) = runs.swap_remove(run % runs.len());
                    arena.release(start, length);
                    used[start as usize..(start + length) as usize].fill(false);
                }
                ArenaStep::Trim(run, pages) if !runs.is_empty() => {
                    let run = run % runs.len();
                    let (start, length) = runs[run];
                    if pages < length {
                        let end = start + length;
                        arena.release(end - pages, pages);
                        used[(end - pages) as usize..end as usize].fill(false);
                        runs[run].1 -= pages;
                    }
                }
                _ => {}
            }
            prop_assert_eq!(arena.check(), Ok(()));
            let free = used.iter().filter(|page| !**page).count() as u32;
            prop_assert_eq!(arena.free_pages(), free);
            prop_assert_eq!(arena.largest_hole(), longest_hole(&used).min(257));
            for page in 0..capacity {
                prop_assert_eq!(arena.hole_at(page), hole_at(&used, page), "hole at {}", page);
            }
        }
    }
}

// --- the pool against a map from arena pages to what was written there ----------------------------------------------

const RANKS: u16 = 3;

/// Hashes of the first `pages` pages of a sequence. Sequences share beginnings and branch.
fn sequence(name: u8, pages: usize) -> PageHashes {
    let mut bytes = Vec::new();
    let mut parent = 0_u64;
    for page in 0..pages {
        // Names 0..4 agree on the first 5 pages, 0..2 on the first 11.
        let branch = if page < 5 {
            0
        } else if page < 11 {
            name / 2
        } else {
            name
        };
        parent = (parent ^ u64::from(branch) ^ 0x9e37)
            .wrapping_mul(0xff51_afd7_ed55_8ccd)
            .rotate_left(23)
            + 1;
        bytes.extend_from_slice(&parent.to_be_bytes());
        bytes.extend_from_slice(&[page as u8; 8]);
    }
    PageHashes::packed(16, bytes).expect("16 bytes a page")
}

fn domain(namespace: u8) -> Domain {
    Domain::new(&AnchorKey::new([1; 32]), &[namespace], &[0; 16], GroupId(0))
}

#[derive(Debug, Clone)]
enum PoolStep {
    Store {
        namespace: u8,
        name: u8,
        pages: usize,
    },
    End {
        which: usize,
        rank: u16,
        complete: bool,
    },
    Lookup {
        namespace: u8,
        name: u8,
        pages: usize,
        hold: bool,
    },
    LetGo(usize),
    Reset,
}

fn pool_step() -> impl Strategy<Value = PoolStep> {
    let sequence = || (0_u8..2, 0_u8..4, 1_usize..40);
    prop_oneof![
        6 => sequence().prop_map(|(namespace, name, pages)| PoolStep::Store { namespace, name, pages }),
        12 => (any::<usize>(), 0..RANKS, prop::bool::weighted(0.9))
            .prop_map(|(which, rank, complete)| PoolStep::End { which, rank, complete }),
        5 => (sequence(), any::<bool>()).prop_map(|((namespace, name, pages), hold)| {
            PoolStep::Lookup { namespace, name, pages, hold }
        }),
        3 => any::<usize>().prop_map(PoolStep::LetGo),
        1 => Just(PoolStep::Reset),
    ]
}

fn policy() -> impl Strategy<Value = TierPolicy> {
    let eviction = (0..3_usize).prop_map(|policy| EvictionPolicy::ALL[policy]);
    let quota = prop::option::of(1_u32..60);
    let all = (0_u32..5, eviction, quota);
    all.prop_map(|(pieces_max, eviction, quota_pages)| TierPolicy {
        pieces_max,
        eviction,
        quota_pages,
        ..TierPolicy::default()
    })
}

/// A copy that has not ended on every rank.
#[derive(Debug)]
struct Copying {
    reserved: Reserved,
    content: Vec<(u8, Vec<u8>)>,
    missing: Vec<u16>,
    failed: bool,
    removed: bool,
}

/// Held pages, with their content at the time of the hold.
#[derive(Debug)]
struct Held {
    pin: Pin,
    pages: Vec<(u32, (u8, Vec<u8>))>,
    /// Whether a reset has happened since.
    removed: bool,
}

struct Model {
    pool: Pool,
    next: u64,
    written: HashMap<u32, (u8, Vec<u8>)>,
    copying: Vec<Copying>,
    held: Vec<Held>,
    ratio: u32,
}

impl Model {
    fn new(capacity: u32, ratio: u32) -> Self {
        Self::with_policy(capacity, ratio, TierPolicy::default())
    }

    fn with_policy(capacity: u32, ratio: u32, policy: TierPolicy) -> Self {
        let pool = Pool::new(capacity, Ratio::new(ratio).expect("in bounds"));
        let pool = pool.with_policy(policy, RuleLimits::new());
        let (written, copying, held) = (HashMap::new(), Vec::new(), Vec::new());
        Self {
            pool,
            next: 0,
            written,
            copying,
            held,
            ratio,
        }
    }

    /// Stores a sequence as a leader does: walks it, skips the pages that are present, reserves the missing ones.
    fn store(&mut self, namespace: u8, hashes: &PageHashes) {
        let domain = domain(namespace);
        let mut tail: Option<Match> = None;
        let mut position = 0;
        while (position as usize) < hashes.len() {
            if let Some(found) = self.pool.longest(
                &domain,
                hashes.view(),
                position as usize,
                MatchGoal::Present,
            ) {
                position += found.pages;
                tail = Some(found);
                continue;
            }
            let limit = (position / self.ratio + 1) * self.ratio;
            let end = limit.min(hashes.len() as u32);
            let (mut reserved, mut evicted) = (Vec::new(), Vec::new());
            let live_tail = tail.filter(|tail| {
                let again = self.pool.longest(
                    &domain,
                    hashes.view(),
                    (position - tail.pages) as usize,
                    MatchGoal::Present,
                );
                again.is_some_and(|again| again.block == tail.block)
            });
            let room = self.pool.reserve(
                &domain,
                hashes.view(),
                position,
                end,
                live_tail,
                &mut self.next,
                &mut reserved,
                &mut evicted,
            );
            let taken: u32 = evicted.iter().map(|run| run.count).sum();
            assert!(
                taken <= 2 * (end - position),
                "{taken} pages evicted for {}",
                end - position
            );
            for run in evicted {
                for page in run.start..run.start + run.count {
                    assert!(
                        self.written.remove(&page).is_some(),
                        "evicted page {page} was not ready"
                    );
                }
            }
            for reserved in reserved {
                let content = (0..reserved.run.count)
                    .map(|page| {
                        (
                            namespace,
                            hashes.get((reserved.position + page) as usize).to_vec(),
                        )
                    })
                    .collect();
                for page in reserved.run.start..reserved.run.start + reserved.run.count {
                    assert!(
                        !self.written.contains_key(&page),
                        "page {page} is still in use"
                    );
                }
                self.pool
                    .start_filling(reserved.transfer, ShardSet::first(RANKS));
                let missing = (0..RANKS).collect();
                self.copying.push(Copying {
                    reserved,
                    content,
                    missing,
                    failed: false,
                    removed: false,
                });
            }
            if room < end - position {
                return;
            }
            position = end;
            tail = None;
        }
    }

    /// Reports the end of a copy on a rank, possibly a second time. Only the complete set of ranks makes pages ready.
    fn end(&mut self, which: usize, rank: u16, complete: bool) {
        if self.copying.is_empty() {
            return;
        }
        let which = which % self.copying.len();
        let transfer = self.copying[which].reserved.transfer;
        let unknown = TransferId(transfer.0 + 1_000_000);
        assert_eq!(self.pool.ended(unknown, Shard(rank), true), None);
        let copy = &mut self.copying[which];
        let first_report = copy.missing.contains(&rank);
        copy.missing.retain(|missing| *missing != rank);
        copy.failed |= first_report && !complete;
        let ended = self.pool.ended(transfer, Shard(rank), complete);
        if !first_report || !copy.missing.is_empty() {
            assert_eq!(
                ended, None,
                "an incomplete set or a repeated report had an effect"
            );
            return;
        }
        // Pages that a reset has forgotten meanwhile do not become ready.
        copy.failed |= copy.removed;
        assert_eq!(ended, Some(!copy.failed));
        let copy = self.copying.swap_remove(which);
        if !copy.failed {
            for (page, content) in (copy.reserved.run.start..).zip(copy.content) {
                self.written.insert(page, content);
            }
        }
        assert_eq!(
            self.pool.ended(transfer, Shard(rank), complete),
            None,
            "ended twice"
        );
    }

    fn lookup(&mut self, namespace: u8, hashes: &PageHashes, hold: bool) {
        let mut runs: Vec<BlockRun> = Vec::new();
        let reach = self
            .pool
            .walk(&domain(namespace), hashes.view(), 0, &mut runs);
        let mut position = 0;
        for run in &runs {
            assert_eq!(run.position, position, "runs follow each other");
            let mut pages = Vec::new();
            for at in run.position..run.position + run.pages {
                let page = self.pool.arena_page(run, at);
                let expected = (namespace, hashes.get(at as usize).to_vec());
                assert_eq!(
                    self.written.get(&page),
                    Some(&expected),
                    "page {at} of the sequence"
                );
                pages.push((page, expected));
            }
            if hold {
                let pin = self.pool.pin(run.block, run.through());
                self.held.push(Held {
                    pin,
                    pages,
                    removed: false,
                });
            }
            position += run.pages;
        }
        assert_eq!(reach.end, position);
        self.pool.touch(&runs);
    }

    fn unpin(&mut self, which: usize) {
        if self.held.is_empty() {
            return;
        }
        let held = self.held.swap_remove(which % self.held.len());
        self.pool.unpin(held.pin);
        if held.removed {
            // The last release of a forgotten block removes it.
            for (page, _) in &held.pages {
                if !self.holds(*page) {
                    self.written.remove(page);
                }
            }
        }
    }

    fn holds(&self, page: u32) -> bool {
        self.held
            .iter()
            .any(|held| held.pages.iter().any(|(other, _)| *other == page))
    }

    fn check(&self) {
        self.pool.check().expect("the second count agrees");
        assert_eq!(self.pool.pins(), self.held.len() as u64);
        for held in &self.held {
            for (page, content) in &held.pages {
                assert_eq!(self.written.get(page), Some(content), "a held page changed");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn the_pool_serves_only_what_every_rank_wrote(
        capacity in 8_u32..120,
        ratio in 1_u32..17,
        policy in policy(),
        steps in prop::collection::vec(pool_step(), 1..150),
    ) {
        let mut model = Model::with_policy(capacity.max(ratio), ratio, policy);
        for step in steps {
            match step {
                PoolStep::Store { namespace, name, pages } => model.store(namespace, &sequence(name, pages)),
                PoolStep::End { which, rank, complete } => model.end(which, rank, complete),
                PoolStep::Lookup { namespace, name, pages, hold } => {
                    model.lookup(namespace, &sequence(name, pages), hold);
                }
                PoolStep::LetGo(which) => model.unpin(which),
                PoolStep::Reset => {
                    model.pool.reset();
                    model.copying.iter_mut().for_each(|copy| copy.removed = true);
                    let mut runs = Vec::new();
                    for namespace in 0..2 {
                        for name in 0..4 {
                            let hashes = sequence(name, 39);
                            let reach = model.pool.walk(&domain(namespace), hashes.view(), 0, &mut runs);
                            prop_assert_eq!(reach.end, 0, "found after a reset");
                        }
                    }
                    // Held and filling pages are removed with their last holder. No lookup finds them again.
                    model.held.iter_mut().for_each(|held| held.removed = true);
                    let pages: Vec<u32> = model.written.keys().copied().collect();
                    for page in pages {
                        if !model.holds(page) {
                            model.written.remove(&page);
                        }
                    }
                    for copy in &mut model.copying {
                        copy.content.clear();
                    }
                }
            }
            model.check();
        }
        // After all holds are released and all copies have ended, every page is free or ready.
        while !model.held.is_empty() {
            model.unpin(0);
        }
        while !model.copying.is_empty() {
            for rank in 0..RANKS {
                model.end(0, rank, true);
            }
        }
        model.pool.check().expect("the second count agrees");
        let states = model.pool.page_states();
        prop_assert_eq!(states.free + states.ready, model.pool.capacity_pages());
    }
}

#[test]
fn a_block_grows_in_place_and_its_watermark_holds() {
    let mut model = Model::new(64, 16);
    let (short, long) = (sequence(0, 4), sequence(0, 12));
    model.store(0, &short);
    for rank in 0..RANKS {
        model.end(0, rank, true);
    }
    model.store(0, &long);
    assert_eq!(model.pool.counts().grown, 1);
    let mut runs = Vec::new();
    let reach = model.pool.walk(&domain(0), long.view(), 0, &mut runs);
    assert_eq!(
        (reach.end, reach.pending),
        (4, true),
        "pages above the watermark are on their way"
    );
    for rank in 0..RANKS {
        model.end(0, rank, true);
    }
    assert_eq!(
        model
            .pool
            .walk(&domain(0), long.view(), 0, &mut Vec::new())
            .end,
        12
    );
    assert_eq!(model.pool.live_blocks(), 1);
}

#[test]
fn two_sequences_never_grow_one_block() {
    let mut model = Model::new(64, 16);
    model.store(0, &sequence(0, 4));
    for rank in 0..RANKS {
        model.end(0, rank, true);
    }
    model.store(0, &sequence(0, 12));
    model.store(0, &sequence(3, 12));
    let counts = model.pool.counts();
    assert_eq!(
        (counts.grown, counts.stored),
        (1, 2),
        "the second starts its own block"
    );
    model.check();
}

/// Hashes of eight pages, which differ from all other sequences of this kind from page `from` on.
fn parting(from: u8) -> PageHashes {
    let page = |page: u8| {
        let mut hash = [1; 16];
        (hash[0], hash[1]) = (page, if page < from { 0 } else { from });
        hash
    };
    PageHashes::packed(16, (0..8).flat_map(page).collect()).expect("16 bytes a page")
}

#[test]
fn the_best_of_several_blocks_with_the_same_start_is_found() {
    let mut model = Model::new(64, 16);
    let domain = domain(0);
    let mut transfers = Vec::new();
    for from in [4, 6, 2] {
        let (mut reserved, mut evicted) = (Vec::new(), Vec::new());
        let room = model.pool.reserve(
            &domain,
            parting(from).view(),
            0,
            8,
            None,
            &mut model.next,
            &mut reserved,
            &mut evicted,
        );
        assert_eq!((room, reserved.len()), (8, 1));
        let transfer = reserved[0].transfer;
        model.pool.start_filling(transfer, ShardSet::first(1));
        transfers.push(transfer);
    }
    assert_eq!(model.pool.live_blocks(), 3);
    let first = model.pool.ended(transfers[0], Shard(0), true);
    assert_eq!(first, Some(true));
    let best = |from, want| {
        let found = model.pool.longest(&domain, parting(from).view(), 0, want);
        found.map(|found| (found.ready, found.pages))
    };
    // Only the first sequence is readable. The others are being stored, each the longest run for its own sequence.
    for (from, readable, present) in [
        (4, (8, 8), (8, 8)),
        (6, (4, 4), (0, 8)),
        (2, (2, 2), (0, 8)),
    ] {
        assert_eq!(best(from, MatchGoal::Readable), Some(readable), "{from}");
        assert_eq!(best(from, MatchGoal::Present), Some(present), "{from}");
    }
}
