use super::*;
use crate::index::shard_set::ShardSet;
use crate::pool::recover::Recovery;
use crate::pool::tests::{domain, sequence, stored};
use crate::pool::{BlockRun, Pool};
use kvferry_types::{Epoch, PageHashes, PageRecord, Ratio, Shard, Stored, TransferId};

fn key() -> AnchorKey {
    AnchorKey::new([1; 32])
}

/// A pool with an index of pages that holds a whole sequence, in blocks of 4 pages.
fn indexed(hashes: &PageHashes, capacity: u32) -> Pool {
    let mut pool = stored(hashes, capacity);
    let mut pages = PageIndex::new(key(), capacity);
    for (block, held) in pool.blocks().by_age() {
        pages.insert(pool.blocks(), block, 0..held.total_pages());
    }
    *pool.parts_mut().1 = Some(pages);
    assert_eq!(pool.check(), Ok(()));
    pool
}

fn tail(hashes: &PageHashes, from: usize) -> PageHashes {
    PageHashes::of_fingerprints(hashes.fingerprints(from))
}

#[test]
fn a_run_that_begins_inside_a_block_is_found_at_its_arena_pages() {
    let hashes = sequence(10, 0);
    let pool = indexed(&hashes, 40);
    for from in 0..10 {
        let tail = tail(&hashes, from);
        let mut runs = Vec::new();
        let reach = pool.walk(&domain(), tail.view(), 0, &mut runs);
        assert_eq!(reach.end as usize, 10 - from, "from page {from}");
        let found: Vec<u32> = runs
            .iter()
            .flat_map(|run| (0..run.pages).map(|page| pool.arena_page(run, run.position + page)))
            .collect();
        let expected: Vec<u32> = (from as u32..10).collect();
        assert_eq!(found, expected, "blocks were stored one behind another");
    }
    let plain = stored(&hashes, 40);
    let mut runs = Vec::new();
    let reach = plain.walk(&domain(), tail(&hashes, 1).view(), 0, &mut runs);
    assert_eq!(reach.end, 0, "without the index");
}

#[test]
fn a_pin_of_a_run_inside_a_block_holds_its_last_page() {
    let hashes = sequence(4, 0);
    let mut pool = indexed(&hashes, 4);
    let mut runs: Vec<BlockRun> = Vec::new();
    pool.walk(&domain(), tail(&hashes, 2).view(), 0, &mut runs);
    let pin = pool.pin(runs[0].block, runs[0].through());
    assert_eq!(Pool::pinned_pages(&pin), 4);
    assert_eq!(pool.blocks().get(runs[0].block).evictable_pages(), 0);
    pool.unpin(pin);
}

#[test]
fn a_page_of_more_blocks_than_fit_is_left_out_and_counted() {
    let blocks = BLOCKS_OF_PAGE_MAX as u32 + 2;
    let mut pool = Pool::new(blocks * 2, Ratio::new(4).expect("in bounds"));
    pool = pool.with_page_index(&key());
    let (mut next, mut reserved, mut evicted) = (0, Vec::new(), Vec::new());
    for first in 0..blocks {
        let pages = [u128::from(first) + 100, 7].map(Fingerprint);
        let hashes = PageHashes::of_fingerprints(pages);
        let into = (&mut next, &mut reserved, &mut evicted);
        pool.reserve(&domain(), hashes.view(), 0, 2, None, into.0, into.1, into.2);
    }
    let left_out = |pool: &mut Pool| pool.parts_mut().1.as_ref().map(|pages| pages.left_out);
    assert_eq!(left_out(&mut pool), Some(2));
    assert_eq!(pool.check(), Ok(()));
    for piece in &reserved {
        pool.start_filling(piece.transfer, ShardSet::first(1));
        pool.ended(piece.transfer, Shard(0), false);
        assert_eq!(pool.check(), Ok(()));
    }
    assert_eq!(left_out(&mut pool), Some(0));
}

#[test]
fn the_second_count_compares_the_entries_with_the_blocks() {
    type Change = fn(&mut PageIndex, &Blocks);
    let cases: [(&str, Change); 3] = [
        (
            "1 pages are not in the index, 0 counted",
            |pages, blocks| {
                pages.remove(blocks, 1, 2..3);
            },
        ),
        ("the index has 9 pages, the blocks 8", |pages, blocks| {
            pages.insert(blocks, 1, 2..3);
        }),
        ("0 pages are not in the index, 1 counted", |pages, _| {
            pages.left_out += 1;
        }),
    ];
    for (expected, change) in cases {
        let mut pool = indexed(&sequence(8, 0), 8);
        if let (blocks, Some(pages)) = pool.parts_mut() {
            change(pages, blocks);
        }
        let why = pool.check().expect_err(expected).to_string();
        assert!(why.contains(expected), "{why}, not {expected}");
    }
}

/// A page costs at most this many bytes once the pool is full, whatever its capacity.
#[test]
fn a_full_index_takes_less_than_ten_bytes_a_page() {
    for capacity in [50_000, 65_536, 100_000] {
        let pages = sequence(capacity, 3);
        let pool = indexed(&pages, capacity);
        let bytes = pool.page_index_bytes() as f64 / f64::from(capacity);
        assert!(bytes < 8.5, "{bytes} bytes a page of {capacity}");
    }
}

#[test]
fn blocks_of_a_restarted_leader_are_found_from_the_middle() {
    let hashes = sequence(8, 0);
    let before = indexed(&hashes, 40);
    let records: Vec<PageRecord> = before
        .view()
        .flat_map(|block| {
            let pages = block.fingerprints.iter().zip(0..);
            pages.map(move |(page, index)| PageRecord {
                page: block.start + u32::from(index),
                anchor: domain().anchor(block.fingerprints[0]),
                domain: block.domain,
                block_start: block.start,
                index,
                phase: 0,
                // The second block is the older one.
                stored: Stored {
                    epoch: Epoch(1),
                    transfer: TransferId(100 - u64::from(block.start)),
                },
                fingerprint: *page,
            })
        })
        .collect();
    let ratio = Ratio::new(4).expect("in bounds");
    let mut recovery = Recovery::new(40, ratio, 1).with_page_index(&key());
    recovery.add(0, records, None);
    let pool = recovery.into_pool();
    assert_eq!(pool.check(), Ok(()));
    let mut runs = Vec::new();
    let reach = pool.walk(&domain(), tail(&hashes, 3).view(), 0, &mut runs);
    let places: Vec<_> = runs.iter().map(|run| (run.offset, run.pages)).collect();
    assert_eq!((reach.end, places), (5, vec![(3, 1), (0, 4)]));
}
