use std::ops::Range;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index as Pick;

use super::*;
use crate::SIBLINGS_MAX;
use kvferry_types::Epoch;

fn page(page: u32, block_start: u32, anchor: u128, content: u128) -> PageRecord {
    PageRecord {
        page,
        anchor: Anchor(anchor),
        domain: DomainId(1),
        block_start,
        index: (page - block_start) as u16,
        phase: 0,
        stored: Stored {
            epoch: Epoch(1),
            transfer: TransferId(u64::from(block_start)),
        },
        fingerprint: Fingerprint(content),
    }
}

fn block(start: u32, pages: u32, anchor: u128) -> Vec<PageRecord> {
    let content = |at: u32| anchor * 100 + u128::from(at - start);
    (start..start + pages)
        .map(|at| page(at, start, anchor, content(at)))
        .collect()
}

fn recover(shards: &[Vec<PageRecord>]) -> Pool {
    let ratio = Ratio::new(8).expect("in bounds");
    let mut recovery = Recovery::new(32, ratio, shards.len());
    for (shard, records) in shards.iter().enumerate() {
        recovery.add(shard, records.iter().copied(), None);
    }
    let pool = recovery.into_pool();
    pool.check().expect("the second count agrees");
    assert_same(&pool, &oracle::recover(32, ratio, shards));
    let mut indexed = Recovery::new(32, ratio, shards.len()).with_page_index(&key());
    for (shard, records) in shards.iter().enumerate() {
        indexed.add(shard, records.iter().copied(), None);
    }
    let indexed = indexed.into_pool();
    indexed.check().expect("the second count agrees");
    assert_same(&indexed, &pool);
    pool
}

fn key() -> AnchorKey {
    AnchorKey::new([1; 32])
}

fn ready(pool: &Pool) -> Vec<(u32, u32)> {
    let mut blocks: Vec<(u32, u32)> = pool
        .view()
        .map(|block| (block.start, block.ready))
        .collect();
    blocks.sort_unstable();
    blocks
}

#[test]
fn a_block_is_cut_to_the_pages_that_every_shard_holds() {
    let (long, short) = (block(4, 6, 1), block(4, 4, 1));
    assert_eq!(ready(&recover(&[long.clone(), long.clone()])), [(4, 6)]);
    assert_eq!(ready(&recover(&[long.clone(), short.clone()])), [(4, 4)]);
    assert_eq!(ready(&recover(&[short, long])), [(4, 4)]);
}

#[test]
fn a_hole_in_one_shard_ends_a_block() {
    let complete = block(0, 5, 1);
    let mut torn = complete.clone();
    torn.remove(2);
    assert_eq!(ready(&recover(&[complete.clone(), torn.clone()])), [(0, 2)]);
    torn.remove(0);
    assert_eq!(ready(&recover(&[complete, torn])), []);
}

#[test]
fn other_content_and_another_block_end_a_block() {
    let complete = block(0, 5, 1);
    let mut other = complete.clone();
    other[3].fingerprint = Fingerprint(7);
    assert_eq!(ready(&recover(&[complete.clone(), other])), [(0, 3)]);
    let mut elsewhere = complete.clone();
    elsewhere[3].anchor = Anchor(2);
    assert_eq!(ready(&recover(&[complete, elsewhere])), [(0, 3)]);
    // A newer block overwrote pages in the middle of an older one. The older block's pages after it are
    // unreachable.
    let mut over = block(0, 8, 1);
    over.splice(3..5, block(3, 2, 2));
    assert_eq!(ready(&recover(&[over.clone(), over])), [(0, 3), (3, 2)]);
}

#[test]
fn records_that_make_no_sense_are_left_out() {
    for beyond in [32, 40] {
        let beyond = vec![page(beyond, beyond, 1, 1)];
        assert_eq!(ready(&recover(&[beyond.clone(), beyond])), []);
    }
    let long = block(0, 12, 1);
    assert_eq!(ready(&recover(&[long.clone(), long])), [(0, 8)]);
    let mut late = block(0, 4, 1);
    late.iter_mut().for_each(|page| page.phase = 6);
    assert_eq!(ready(&recover(&[late.clone(), late.clone()])), [(0, 2)]);
    late.iter_mut().for_each(|page| page.phase = 8);
    assert_eq!(ready(&recover(&[late.clone(), late])), []);
    assert_eq!(ready(&recover(&[])), []);
}

#[test]
fn pages_of_a_later_growth_belong_to_their_block() {
    let mut grown = block(0, 5, 1);
    grown[3].stored.transfer = TransferId(7);
    grown[4].stored.epoch = Epoch(2);
    assert_eq!(ready(&recover(&[grown.clone(), grown])), [(0, 5)]);
}

#[test]
fn the_oldest_store_is_evicted_first() {
    let (mut young, mut old) = (block(0, 4, 1), block(8, 4, 2));
    young
        .iter_mut()
        .for_each(|page| page.stored.epoch = Epoch(2));
    old.iter_mut()
        .for_each(|page| page.stored.transfer = TransferId(900));
    let all: Vec<PageRecord> = [young, old].concat();
    let pool = recover(&[all.clone(), all]);
    let by_age: Vec<u32> = pool.view().map(|block| block.start).collect();
    assert_eq!(by_age, [8, 0]);
}

/// A block of which only the beginning was left is listed until its pages are overwritten. Of more blocks with one
/// beginning than an anchor has room for, the longest ones are found again.
#[test]
fn the_longest_of_many_blocks_with_one_beginning_are_kept() {
    let count = SIBLINGS_MAX as u32 + 4;
    for long in [0, 3, count - 1] {
        let start = |at: u32| 2 * at + 2 * u32::from(at > long);
        let blocks = (0..count).map(|at| {
            let pages = if at == long { 4 } else { 1 };
            let mut pages = block(start(at), pages, 1);
            pages
                .iter_mut()
                .for_each(|page| page.stored.epoch = Epoch(u64::from(at) + 1));
            pages
        });
        let all: Vec<PageRecord> = blocks.flatten().collect();
        let pool = recover(&[all.clone(), all]);
        pool.check().expect("the second count agrees");
        let mut found = ready(&pool);
        found.sort_unstable();
        // The oldest short ones make room.
        let shorts = (0..count)
            .filter(|at| *at != long)
            .skip(4)
            .map(|at| (start(at), 1));
        let mut expected: Vec<(u32, u32)> = shorts.chain([(start(long), 4)]).collect();
        expected.sort_unstable();
        assert_eq!(found, expected, "the long one is {long}");
    }
}

/// Requires that two pools decide the same from now on.
fn assert_same(pool: &Pool, expected: &Pool) {
    let blocks = |pool: &Pool| -> Vec<_> {
        let all = pool.blocks.by_age().map(|(index, block)| {
            let pages = pool.blocks.fingerprints(block.start, block.total_pages());
            let place = (index, block.start, block.ready, block.phase, block.sibling);
            (block.anchor, block.domain, place, pages.to_vec())
        });
        all.collect()
    };
    assert_eq!(blocks(pool), blocks(expected));
    let arena = |pool: &Pool| format!("{:?}", pool.arena);
    assert_eq!(arena(pool), arena(expected));
    assert_eq!(pool.counts(), expected.counts());
    for (_, block) in expected.blocks.by_age() {
        let head = |pool: &Pool| pool.index.head(&pool.blocks, block.anchor);
        assert_eq!(head(pool), head(expected));
    }
}

/// A block as the shards store it: whether it lies directly behind the one before it, how many pages it has and in which
/// steps it grew.
#[derive(Debug, Clone)]
struct Drawn {
    gap: u32,
    growths: Vec<u16>,
    anchor: u8,
    phase: u16,
}

/// What one shard has instead of the record of a page.
#[derive(Debug, Clone)]
enum Tear {
    Missing,
    OtherContent,
    OtherBlock,
    OtherStore,
    /// The record of a page is listed again behind another one.
    Again,
}

fn drawn() -> impl Strategy<Value = Drawn> {
    let growths = vec(1..4_u16, 1..4);
    (0..4_u32, growths, 0..3_u8, 0..3_u16).prop_map(|(gap, growths, anchor, phase)| Drawn {
        gap: gap.saturating_sub(1),
        growths,
        anchor,
        phase,
    })
}

fn tear() -> impl Strategy<Value = Tear> {
    prop_oneof![
        Just(Tear::Missing),
        Just(Tear::OtherContent),
        Just(Tear::OtherBlock),
        Just(Tear::OtherStore),
        Just(Tear::Again),
    ]
}

/// The records of all blocks, each growth with a store of its own.
fn records(blocks: &[Drawn]) -> Vec<PageRecord> {
    let (mut all, mut start) = (Vec::new(), 0);
    for (number, block) in blocks.iter().enumerate() {
        start += block.gap;
        let mut at = start;
        for (growth, pages) in block.growths.iter().enumerate() {
            for _ in 0..*pages {
                let mut record = page(at, start, block.anchor.into(), u128::from(at) + 1000);
                record.phase = block.phase;
                record.stored = Stored {
                    epoch: Epoch(growth as u64 % 2),
                    transfer: TransferId((number as u64 * 7) % 5 + growth as u64),
                };
                all.push(record);
                at += 1;
            }
        }
        start = at;
    }
    all
}

fn torn(mut records: Vec<PageRecord>, tears: &[(Pick, Tear)]) -> Vec<PageRecord> {
    for (pick, tear) in tears {
        if records.is_empty() {
            break;
        }
        let at = pick.index(records.len());
        match tear {
            Tear::Missing => {
                records.remove(at);
            }
            Tear::OtherContent => records[at].fingerprint.0 += 1,
            Tear::OtherBlock => records[at] = page(records[at].page, records[at].page, 2, 5),
            Tear::OtherStore => records[at].stored.epoch.0 += 1,
            Tear::Again => {
                let again = records[at];
                records.insert((at + 2).min(records.len()), again);
            }
        }
    }
    records
}

/// The records of the pages of a part, in ascending order.
fn ascending(records: &[PageRecord], part: &Range<u32>) -> Vec<PageRecord> {
    let mut listed: Vec<PageRecord> = Vec::new();
    for record in records.iter().filter(|record| part.contains(&record.page)) {
        if listed.last().is_none_or(|last| last.page < record.page) {
            listed.push(*record);
        }
    }
    listed
}

proptest! {
    #[test]
    fn merging_part_by_part_recovers_what_one_function_of_all_records_does(
        blocks in vec(drawn(), 0..12),
        tears in vec(vec((any::<Pick>(), tear()), 0..6), 1..4),
        parts in vec((any::<Pick>(), 1..9_u32), 0..60),
        capacity in prop_oneof![Just(64_u32), 1..64_u32],
    ) {
        let ratio = Ratio::new(8).expect("in bounds");
        let shards: Vec<Vec<PageRecord>> =
            tears.iter().map(|tears| torn(records(&blocks), tears)).collect();
        let mut listed = vec![Vec::new(); shards.len()];
        let mut recovery = Recovery::new(capacity, ratio, shards.len()).with_page_index(&key());
        // Where each shard is read next; `None` once it is read completely.
        let mut next = vec![Some(0); shards.len()];
        let mut add = |shard: usize, end: Option<u32>, next: &mut Vec<Option<u32>>| {
            let Some(from) = next[shard] else { return };
            let part = from..end.unwrap_or(capacity);
            listed[shard].extend(ascending(&shards[shard], &part));
            // A part also lists pages around its own, which do not count.
            let around = from.saturating_sub(2)..end.map_or(u32::MAX, |end| end + 2);
            let records = shards[shard].iter().filter(|record| around.contains(&record.page));
            recovery.add(shard, records.copied(), end);
            next[shard] = end;
            let slowest = next.iter().map(|next| next.unwrap_or(capacity)).min();
            for (shard, unmerged) in recovery.shards.iter().enumerate() {
                let merged = unmerged.records.iter().all(|record| Some(record.page) >= slowest);
                assert!(merged, "shard {shard} keeps records that all shards have reached");
            }
        };
        for (pick, pages) in &parts {
            let shard = pick.index(shards.len());
            let end = next[shard].map(|from| from + pages).filter(|end| *end < capacity);
            add(shard, end, &mut next);
        }
        for shard in 0..shards.len() {
            add(shard, None, &mut next);
        }
        let pool = recovery.into_pool();
        pool.check().expect("the second count agrees");
        assert_same(&pool, &oracle::recover(capacity, ratio, &listed));
    }
}
