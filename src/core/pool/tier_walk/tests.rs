use proptest::prelude::*;

use super::*;
use crate::index::anchor::AnchorKey;
use crate::index::blocks::BlockIndex;
use crate::index::shard_set::ShardSet;
use crate::pool::tests::domain;
use kvferry_types::{Fingerprint, PageHashes, Ratio, Shard};

/// Pages of each sequence: fewer than [`MISSES_AROUND_MAX`], so that every page is looked up.
const PAGES: u32 = 24;
const TIERS: [TierId; 3] = [TierId::Host, TierId::Disk, TierId::Remote];

/// A change of one tier.
#[derive(Debug, Clone)]
struct Change {
    tier: usize,
    /// Pages of a sequence, of which the missing ones up to the first present one are stored.
    sequence: usize,
    pages: (u32, u32),
    kind: ChangeKind,
}

#[derive(Debug, Clone, Copy)]
enum ChangeKind {
    Store,
    /// The copy has not ended.
    Fill,
    /// The tier loses the page and those after it in its block.
    Lose,
}

fn change() -> impl Strategy<Value = Change> {
    let kind = prop_oneof![
        6 => Just(ChangeKind::Store),
        1 => Just(ChangeKind::Fill),
        2 => Just(ChangeKind::Lose),
    ];
    let pages = (0..PAGES, 1..PAGES);
    (0..TIERS.len(), 0..3_usize, pages, kind).prop_map(|(tier, sequence, pages, kind)| Change {
        tier,
        sequence,
        pages,
        kind,
    })
}

/// Sequences that leave the first one at these pages.
fn sequences(branches: [u32; 2]) -> [PageHashes; 3] {
    let of = |salt: u8, from: u32| {
        let page = move |page: u32| {
            let salt = if page < from { 0 } else { salt };
            Fingerprint(u128::from(page) << 8 | u128::from(salt) | 1 << 100)
        };
        PageHashes::of_fingerprints((0..PAGES).map(page))
    };
    [of(0, 0), of(1, branches[0]), of(2, branches[1])]
}

/// The place of a page in the arena, its block, and whether it is readable: found by its fingerprint in all blocks.
fn place_of(pool: &Pool, page: Fingerprint) -> Option<(u32, BlockIndex, bool)> {
    (0..pool.blocks.places()).find_map(|index| {
        let block = pool.blocks.at(index)?;
        let pages = pool.blocks.fingerprints(block.start, block.total_pages());
        let at = u32::try_from(pages.iter().position(|other| *other == page)?).ok()?;
        Some((block.start + at, index, at < u32::from(block.ready)))
    })
}

/// Stores the pages of a range that the pool lacks, up to the first one that it has.
fn store(
    pool: &mut Pool,
    hashes: &PageHashes,
    (first, pages): (u32, u32),
    next: &mut u64,
    ends: bool,
) {
    let lacks = |page: &u32| place_of(pool, hashes.fingerprint(*page as usize)).is_none();
    let Some(from) = (first..PAGES).find(lacks) else {
        return;
    };
    let cell = (from / pool.ratio() + 1) * pool.ratio();
    let end = (from..PAGES.min(from + pages).min(cell)).find(|page| !lacks(page));
    let end = end.unwrap_or(PAGES.min(from + pages).min(cell));
    let (mut reserved, mut evicted) = (Vec::new(), Vec::new());
    let view = hashes.view();
    pool.reserve(
        &domain(),
        view,
        from,
        end,
        None,
        next,
        &mut reserved,
        &mut evicted,
    );
    for reserved in reserved {
        pool.start_filling(reserved.transfer, ShardSet::first(1));
        if ends {
            assert_eq!(pool.ended(reserved.transfer, Shard(0), true), Some(true));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Each page of a walk is taken from the fastest tier that has it, wherever its block begins there.
    #[test]
    fn every_page_comes_from_the_fastest_tier_that_has_it(
        ratio in 1_u16..=8,
        changes in prop::collection::vec(change(), 0..40),
        branches in [0..PAGES, 0..PAGES],
        covered in prop_oneof![Just(0), 0..=PAGES],
        page_index in any::<bool>(),
        first in prop_oneof![Just(0), 0..PAGES],
    ) {
        let ratio = Ratio::new(u32::from(ratio)).expect("in bounds");
        let sequences = sequences(branches);
        let mut pools: Vec<Pool> = TIERS.iter().map(|_| {
            let pool = Pool::new(256, ratio);
            match page_index {
                true => pool.with_page_index(&AnchorKey::new([1; 32])),
                false => pool,
            }
        }).collect();
        let mut next = 0;
        for Change { tier, sequence, pages, kind } in changes {
            let (pool, hashes) = (&mut pools[tier], &sequences[sequence]);
            match kind {
                ChangeKind::Store => store(pool, hashes, pages, &mut next, true),
                ChangeKind::Fill => store(pool, hashes, pages, &mut next, false),
                ChangeKind::Lose => {
                    let page = hashes.fingerprint(pages.0 as usize);
                    if let Some((place, block, true)) = place_of(pool, page) {
                        let block = pool.block_ref(block);
                        pool.cut(block, place);
                    }
                }
            }
            prop_assert_eq!(pool.check(), Ok(()));
        }
        // Only an index of pages finds a sequence of which the tail alone is named.
        let first = if page_index { first } else { 0 };
        let tiers: Vec<(TierId, &Pool)> = TIERS.into_iter().zip(&pools).collect();
        for hashes in &sequences {
            let named = PageHashes::of_fingerprints(hashes.fingerprints(first as usize));
            let len = named.len() as u32;
            let covered = covered.min(len);
            let fastest: Vec<Option<TierId>> = named.fingerprints(0).map(|page| {
                let has = |(_, pool): &&(TierId, &Pool)| place_of(pool, page).is_some_and(|(_, _, ready)| ready);
                tiers.iter().find(has).map(|(tier, _)| *tier)
            }).collect();
            let end = (covered..len).find(|page| fastest[*page as usize].is_none());
            let mut found = vec![None; end.unwrap_or(len) as usize];
            let mut at = 0;
            let reach = walk_tiers(&tiers, &domain(), named.view(), covered as usize, |tier, run| {
                let until = run.position + run.pages;
                for page in run.position.max(at)..until {
                    found[page as usize] = Some(tier);
                }
                at = until;
            });
            prop_assert_eq!(reach.end, end.unwrap_or(len));
            prop_assert_eq!(&found[..], &fastest[..found.len()]);
        }
    }
}
