//! The recovery as one function of all records: what merging them part by part must give.

use std::collections::BTreeMap;

use super::RecoveredBlock;
use crate::index::arena::Arena;
use crate::pool::Pool;
use kvferry_types::{PageRecord, Ratio, Stored};

/// A block whose pages every shard holds.
struct Complete {
    first: PageRecord,
    pages: Vec<PageRecord>,
    newest: Stored,
}

/// Builds a pool of the blocks that all `shards` agree on: of each block, the pages from its first one on that every
/// shard lists with the same block, position and content. All other pages are free. Blocks are aged by their newest
/// store.
pub(super) fn recover(capacity_pages: u32, ratio: Ratio, shards: &[Vec<PageRecord>]) -> Pool {
    let mut pool = Pool::new(capacity_pages, ratio);
    let blocks = agreed(capacity_pages, ratio, shards);
    pool.arena = occupied(capacity_pages, &blocks);
    let mut by_age: Vec<&Complete> = blocks.iter().collect();
    by_age.sort_by_key(|block| (block.newest, block.first.page));
    for (number, block) in (0..).zip(by_age) {
        let pages = block.pages.iter().map(|page| page.fingerprint);
        pool.blocks.set_fingerprints(block.first.page, pages);
        pool.insert_recovered(&RecoveredBlock {
            anchor: block.first.anchor,
            domain: block.first.domain,
            start: block.first.page,
            phase: block.first.phase,
            pages: block.pages.len() as u16,
            number,
            newest: block.newest,
        });
    }
    pool
}

/// Blocks in the order of their arena pages. No two share a page, because a page has one record.
fn agreed(capacity: u32, ratio: Ratio, shards: &[Vec<PageRecord>]) -> Vec<Complete> {
    let by_page = |records: &Vec<PageRecord>| -> BTreeMap<u32, PageRecord> {
        let fits = records.iter().filter(|record| record.page < capacity);
        fits.map(|record| (record.page, *record)).collect()
    };
    let shards: Vec<BTreeMap<u32, PageRecord>> = shards.iter().map(by_page).collect();
    let Some((first_shard, others)) = shards.split_first() else {
        return Vec::new();
    };
    let everywhere = |record: &PageRecord| {
        others.iter().all(|shard| {
            shard.get(&record.page).is_some_and(|other| {
                same_place(record, other) && record.fingerprint == other.fingerprint
            })
        })
    };
    let mut blocks: Vec<Complete> = Vec::new();
    for record in first_shard.values().filter(|record| everywhere(record)) {
        if record.index == 0
            && record.page == record.block_start
            && record.phase < ratio.pages() as u16
        {
            blocks.push(Complete {
                first: *record,
                pages: vec![*record],
                newest: record.stored,
            });
        } else if let Some(block) = blocks.last_mut()
            && continues(block, record, ratio)
        {
            block.pages.push(*record);
            block.newest = block.newest.max(record.stored);
        }
    }
    blocks
}

fn same_place(a: &PageRecord, b: &PageRecord) -> bool {
    (a.anchor, a.domain, a.block_start, a.index, a.phase)
        == (b.anchor, b.domain, b.block_start, b.index, b.phase)
}

/// True if the record is that of the block's next page, and that page lies before the next multiple of the ratio.
fn continues(block: &Complete, record: &PageRecord, ratio: Ratio) -> bool {
    let next = block.pages.len();
    let expected = PageRecord {
        page: block.first.page + next as u32,
        index: next as u16,
        stored: record.stored,
        fingerprint: record.fingerprint,
        ..block.first
    };
    *record == expected && usize::from(block.first.phase) + next < ratio.pages() as usize
}

/// An arena in which exactly these blocks are allocated.
fn occupied(capacity: u32, blocks: &[Complete]) -> Arena {
    let mut arena = Arena::new(capacity);
    let mut gaps = Vec::new();
    for block in blocks {
        let gap = block.first.page - arena.frontier();
        if arena.alloc_at(arena.frontier(), gap) {
            gaps.push((block.first.page - gap, gap));
        }
        let room = arena.alloc_at(block.first.page, block.pages.len() as u32);
        debug_assert!(room, "blocks do not overlap");
    }
    for (start, pages) in gaps {
        arena.release(start, pages);
    }
    arena
}
