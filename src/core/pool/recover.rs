//! Recovers a pool from the inventories of its depots: a new leader keeps the blocks that every shard still holds.
//!
//! The inventories arrive part by part, each in the order of its arena pages. Records are merged as soon as every shard
//! has been read up to their pages, so that what is kept does not grow with the inventories: 28 bytes for each arena page
//! up to the last block, 80 for each block, and for each shard fewer than [`UNMERGED_MAX`] records and one part.

use std::collections::VecDeque;

use crate::index::anchor::AnchorKey;
use crate::index::arena::Arena;
use crate::index::blocks::{BlockIndex, Filling, NONE};
use crate::index::page_index::{BlockPages, PageIndex};
use crate::pool::Pool;
use crate::pool::changes::GoneReason;
use kvferry_types::{Anchor, DomainId, Fingerprint, PageRecord, Ratio, Stored, TransferId};

/// Records of a shard that may wait for other shards when its next part is requested.
pub const UNMERGED_MAX: usize = 4096;

/// A block of which every shard holds pages.
#[derive(Debug)]
struct RecoveredBlock {
    anchor: Anchor,
    domain: DomainId,
    /// First arena page.
    start: u32,
    /// Position of the block's first page in its sequence, modulo the ratio.
    phase: u16,
    /// Pages from the first one on that every shard lists.
    pages: u16,
    /// Number of blocks before it in the arena.
    number: u32,
    newest: Stored,
}

/// The blocks so far, by number, and the fingerprints of all arena pages.
struct RecoveredPages<'a>(&'a [RecoveredBlock], &'a [Fingerprint]);

impl BlockPages for RecoveredPages<'_> {
    fn domain(&self, block: BlockIndex) -> DomainId {
        self.0[block as usize].domain
    }

    fn page(&self, block: BlockIndex, offset: u32) -> Fingerprint {
        self.1[(self.0[block as usize].start + offset) as usize]
    }
}

/// The part of one shard's inventory that is not merged yet.
#[derive(Debug, Default)]
struct Unmerged {
    records: VecDeque<PageRecord>,
    /// Arena pages below this were read.
    read_to: u32,
}

/// Inventories of all shards, merged as far as all of them were read.
#[derive(Debug)]
pub struct Recovery {
    ratio: Ratio,
    shards: Vec<Unmerged>,
    /// The blocks so far, in the order of their arena pages. The last one may still get pages.
    blocks: Vec<RecoveredBlock>,
    /// The arena with all blocks but the last.
    arena: Arena,
    /// Fingerprints of the arena pages up to the last page of a block.
    fingerprints: Vec<Fingerprint>,
    /// With the setting, the index of the pages, in which a block has its number as its name.
    pages: Option<PageIndex>,
}

impl Recovery {
    /// Begins a recovery from the inventories of this many shards.
    pub fn new(capacity_pages: u32, ratio: Ratio, shards: usize) -> Self {
        Self {
            ratio,
            shards: (0..shards).map(|_| Unmerged::default()).collect(),
            blocks: Vec::new(),
            arena: Arena::new(capacity_pages),
            fingerprints: Vec::new(),
            pages: None,
        }
    }

    /// Enters the pages into an index, too, as they are merged. `key` makes its anchors.
    #[must_use]
    pub fn with_page_index(mut self, key: &AnchorKey) -> Self {
        self.pages = Some(PageIndex::new(key.clone(), self.arena.capacity_pages()));
        self
    }

    /// True while so many records of this shard wait for other shards that its next part must not be requested.
    pub fn is_ahead(&self, shard: usize) -> bool {
        let shard = self.shards.get(shard);
        shard.is_some_and(|shard| shard.records.len() >= UNMERGED_MAX)
    }

    /// Adds the records of a shard's pages below `read_to`, or its last records. Parts of a shard must arrive in the order
    /// of their pages. Within a part pages must ascend, too: a page that is listed twice, or after a higher one, is left
    /// out, so that each page has one record at most. So are pages beyond the capacity.
    pub fn add(
        &mut self,
        shard: usize,
        records: impl IntoIterator<Item = PageRecord>,
        read_to: Option<u32>,
    ) {
        let capacity = self.arena.capacity_pages();
        let Some(unmerged) = self.shards.get_mut(shard) else {
            return;
        };
        let read_to = read_to.unwrap_or(capacity).min(capacity);
        let mut from = unmerged.read_to;
        let records = records.into_iter().filter(|record| {
            let ascends = (from..read_to).contains(&record.page);
            if ascends {
                from = record.page + 1;
            }
            ascends
        });
        unmerged.records.extend(records);
        unmerged.read_to = unmerged.read_to.max(read_to);
        self.merge();
    }

    /// Merges the records of the pages that were read of every shard.
    fn merge(&mut self) {
        let read_to = self.shards.iter().map(|shard| shard.read_to).min();
        let read_to = read_to.unwrap_or(0);
        let mut shards = std::mem::take(&mut self.shards);
        if let Some((first, others)) = shards.split_first_mut() {
            while let Some(record) = first.next_below(read_to) {
                let everywhere = others.iter_mut().all(|shard| shard.agrees_on(&record));
                if everywhere {
                    self.add_page(&record);
                }
            }
        }
        for shard in &mut shards {
            while shard.next_below(read_to).is_some() {}
            if shard.records.is_empty() {
                shard.records = VecDeque::new();
            }
        }
        self.shards = shards;
    }

    /// Adds a page that all shards list alike, if a block begins with it or goes on with it.
    fn add_page(&mut self, record: &PageRecord) {
        let ratio = self.ratio.pages();
        if record.index == 0 && record.page == record.block_start && u32::from(record.phase) < ratio
        {
            self.end_block();
            let number = u32::try_from(self.blocks.len()).unwrap_or(NONE);
            self.blocks.push(RecoveredBlock {
                anchor: record.anchor,
                domain: record.domain,
                start: record.page,
                phase: record.phase,
                pages: 1,
                number,
                newest: record.stored,
            });
        } else if let Some(block) = self.blocks.last_mut()
            && block.continues_with(record, ratio)
        {
            block.pages += 1;
            block.newest = block.newest.max(record.stored);
        } else {
            return;
        }
        let page = record.page as usize;
        self.fingerprints.resize(page + 1, Fingerprint::default());
        self.fingerprints[page] = record.fingerprint;
        if let (Some(pages), Some(block)) = (&mut self.pages, self.blocks.last()) {
            let (number, offset) = (block.number, record.page - block.start);
            let known = RecoveredPages(&self.blocks, &self.fingerprints);
            pages.insert(&known, number, offset..offset + 1);
        }
    }

    /// Allocates the last block in the arena, and leaves a hole before it.
    fn end_block(&mut self) {
        let Some(block) = self.blocks.last() else {
            return;
        };
        let hole = self.arena.frontier();
        let hole_pages = block.start - hole;
        let skipped = self.arena.alloc_at(hole, hole_pages);
        let room = self.arena.alloc_at(block.start, block.pages.into());
        debug_assert!(room, "blocks do not overlap, because a page has one record");
        if skipped {
            self.arena.release(hole, hole_pages);
        }
    }

    /// Builds a pool of the blocks that all shards agree on: of each block, the pages from its first one on that every
    /// shard lists with the same block, position and content. All other pages are free. Blocks are aged by their newest
    /// store, as the first shard lists it.
    pub fn into_pool(mut self) -> Pool {
        self.end_block();
        let Self {
            ratio,
            mut blocks,
            arena,
            fingerprints,
            pages,
            ..
        } = self;
        blocks.sort_unstable_by_key(|block| (block.newest, block.start));
        Pool::recovered(ratio, arena, (fingerprints, pages), &blocks)
    }
}

impl Pool {
    /// A pool of blocks that were read from the inventories, oldest first. `arena` has their pages, `fingerprints` their
    /// contents, by arena page, and `pages` names the blocks by their numbers.
    fn recovered(
        ratio: Ratio,
        arena: Arena,
        (fingerprints, pages): (Vec<Fingerprint>, Option<PageIndex>),
        blocks: &[RecoveredBlock],
    ) -> Self {
        let mut pool = Self::new(arena.capacity_pages(), ratio);
        pool.arena = arena;
        pool.blocks.reserve(blocks.len(), fingerprints);
        pool.index.reserve(&pool.blocks, blocks.len());
        if pages.is_some() {
            pool.index.begin_anywhere();
        }
        let mut inserted = vec![NONE; blocks.len()];
        let mut place_of: Vec<usize> = Vec::with_capacity(blocks.len());
        for (place, found) in blocks.iter().enumerate() {
            let (block, dropped) = pool.insert_recovered(found);
            if let Some(dropped) = dropped {
                inserted[place_of[dropped as usize]] = NONE;
            }
            if let Some(block) = block {
                inserted[place] = block;
                let slots = place_of.len().max(block as usize + 1);
                place_of.resize(slots, 0);
                place_of[block as usize] = place;
            }
        }
        let mut names = vec![NONE; pages.as_ref().map_or(0, |_| blocks.len())];
        for (found, block) in blocks.iter().zip(inserted) {
            if let Some(name) = names.get_mut(found.number as usize) {
                *name = block;
            }
        }
        pool.pages = pages.map(|mut pages| {
            pages.rename(&names, pool.page_states().ready.into());
            pages
        });
        pool
    }

    /// Adds a block that was read from the inventories. Where its anchor has no room, the block with the fewest pages of
    /// those under it is left out, the oldest of several: lookups take the longest one. Returns the block if it was added,
    /// and the block that was dropped for it. The arena has its pages, and the slab their fingerprints.
    fn insert_recovered(
        &mut self,
        found: &RecoveredBlock,
    ) -> (Option<BlockIndex>, Option<BlockIndex>) {
        let count = u32::from(found.pages);
        let mut dropped = None;
        if self.index.is_full(&self.blocks, found.anchor) {
            let others = self.index.under(&self.blocks, found.anchor);
            // The newest ones come first.
            let pages = |block: &BlockIndex| self.blocks.get(*block).ready;
            let fewest = others.reduce(|one, older| match pages(&older) <= pages(&one) {
                true => older,
                false => one,
            });
            match fewest.filter(|fewest| pages(fewest) <= found.pages) {
                None => {
                    self.arena.release(found.start, count);
                    return (None, None);
                }
                Some(fewest) => {
                    self.retire_block(fewest, GoneReason::Evicted);
                    dropped = Some(fewest);
                }
            }
        }
        let filling = Filling {
            transfer: TransferId(0),
            pages: count,
        };
        let block = self.blocks.insert(
            found.anchor,
            found.domain,
            found.start,
            found.phase,
            filling,
        );
        let held = self.blocks.get_mut(block);
        held.set_filling(None);
        held.ready = found.pages;
        let has_room = self.index.insert(&mut self.blocks, block);
        debug_assert!(has_room, "room was made");
        self.blocks.add_pages(block, count);
        self.blocks.update_order(block);
        (Some(block), dropped)
    }
}

impl Unmerged {
    /// Takes the next record, if its page lies below `end`.
    fn next_below(&mut self, end: u32) -> Option<PageRecord> {
        let next = self.records.front()?;
        match next.page < end {
            true => self.records.pop_front(),
            false => None,
        }
    }

    /// True if this shard lists the page with the same block, position and content. Drops its records of pages before.
    fn agrees_on(&mut self, record: &PageRecord) -> bool {
        while self.next_below(record.page).is_some() {}
        self.records.front().is_some_and(|own| {
            let stored = record.stored;
            PageRecord { stored, ..*own } == *record
        })
    }
}

impl RecoveredBlock {
    /// True if the record is that of the block's next page, and that page lies before the next multiple of the ratio.
    fn continues_with(&self, record: &PageRecord, ratio: u32) -> bool {
        let next = self.pages;
        let expected = PageRecord {
            page: self.start + u32::from(next),
            anchor: self.anchor,
            domain: self.domain,
            block_start: self.start,
            index: next,
            phase: self.phase,
            stored: record.stored,
            fingerprint: record.fingerprint,
        };
        *record == expected && u32::from(self.phase) + u32::from(next) < ratio
    }
}

#[cfg(test)]
mod oracle;
#[cfg(test)]
mod tests;
