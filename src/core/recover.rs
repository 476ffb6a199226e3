//! Recovers a pool from the inventories of its depots: a new leader keeps the blocks that every shard still holds.

use std::collections::BTreeMap;

use crate::arena::Arena;
use crate::pool::Pool;
use kvferry_types::{PageRecord, Ratio, Stored};

/// A block whose pages every shard holds.
struct Complete {
    first: PageRecord,
    pages: Vec<PageRecord>,
    newest: Stored,
}

impl Pool {
    /// Builds a pool of the blocks that all `shards` agree on: of each block, the pages from its first one on that
    /// every shard lists with the same block, position and content. All other pages are free. Blocks are aged by their
    /// newest store.
    pub fn recover(capacity_pages: u32, ratio: Ratio, shards: &[Vec<PageRecord>]) -> Self {
        let mut pool = Self::new(capacity_pages, ratio);
        let blocks = agreed(capacity_pages, ratio, shards);
        pool.arena = occupied(capacity_pages, &blocks);
        let mut by_age: Vec<&Complete> = blocks.iter().collect();
        by_age.sort_by_key(|block| (block.newest, block.first.page));
        for block in by_age {
            pool.insert_recovered(
                &block.first,
                block.pages.iter().map(|page| page.fingerprint),
            );
        }
        pool
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_types::{Anchor, DomainId, Epoch, Fingerprint, TransferId};

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
        let pool = Pool::recover(32, Ratio::new(8).expect("in bounds"), shards);
        pool.check().expect("the second count agrees");
        pool
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
}
