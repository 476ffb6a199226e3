//! The index of pages: finds the blocks that hold a page, and its place in each of them.
//!
//! The index of blocks knows the first page of each block only. An engine that names the tail of a sequence begins inside
//! a block, whose first page it does not name. With an entry for each page such a tail is found too. A pool has this
//! index only where a setting asks for it.

use std::ops::Range;

use hashbrown::HashTable;

use crate::Contradiction;
use crate::index::anchor::AnchorKey;
use crate::index::block_index::SIBLINGS_MAX;
use crate::index::blocks::{BlockIndex, Blocks, NONE};
use kvferry_types::{Anchor, DomainId, Fingerprint};

/// Most blocks under which a page is entered. Several blocks hold one page after a store during a reset, or after a tail
/// was stored without the index.
const BLOCKS_OF_PAGE_MAX: usize = SIBLINGS_MAX;
/// Pages of one part of the table when the pool is full, on average.
const PART_PAGES: u32 = 3_200;
/// Room of a part in entries: seven eighths of 4,096 places. With a keyed hash, no part is 384 pages above the average.
const PART_ROOM: usize = 3_584;
/// Most parts: those of 210 million pages. In a larger pool the parts grow.
const PARTS_MAX: u32 = 1 << 16;

/// The place of a page: its block, and the number of pages of the block before it. 5 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    block: [u8; 4],
    offset: u8,
}

const _: () = assert!(size_of::<Entry>() == 5 && kvferry_types::RATIO_MAX <= 256);

impl Entry {
    fn new(block: BlockIndex, offset: u32) -> Self {
        Self {
            block: block.to_le_bytes(),
            offset: u8::try_from(offset).unwrap_or(u8::MAX),
        }
    }

    fn block(self) -> BlockIndex {
        BlockIndex::from_le_bytes(self.block)
    }

    fn offset(self) -> u32 {
        self.offset.into()
    }
}

/// The pages of blocks, by block and offset.
pub(crate) trait BlockPages {
    /// The domain of a block.
    fn domain(&self, block: BlockIndex) -> DomainId;
    /// A page of a block.
    fn page(&self, block: BlockIndex, offset: u32) -> Fingerprint;
}

impl BlockPages for Blocks {
    fn domain(&self, block: BlockIndex) -> DomainId {
        self.get(block).domain
    }

    fn page(&self, block: BlockIndex, offset: u32) -> Fingerprint {
        self.fingerprints(self.get(block).start + offset, 1)[0]
    }
}

/// Entries of all pages, ready and filling, of the blocks that lookups can find.
///
/// The table is divided into parts, which get room for their share of a full pool with their first entry: no step has to
/// move the entries of a table that grows, and a page of the pool's capacity takes 7.7 bytes, whatever the capacity.
#[derive(Debug)]
pub(crate) struct PageIndex {
    /// The hash of a page is the anchor that a block would have that begins with it.
    key: AnchorKey,
    parts: Vec<HashTable<Entry>>,
    /// Pages that were not entered, because [`BLOCKS_OF_PAGE_MAX`] blocks held them already.
    left_out: u64,
}

impl PageIndex {
    /// An empty index for a pool of this many pages.
    pub(crate) fn new(key: AnchorKey, capacity_pages: u32) -> Self {
        let parts = capacity_pages.div_ceil(PART_PAGES).clamp(1, PARTS_MAX);
        Self {
            key,
            parts: (0..parts).map(|_| HashTable::new()).collect(),
            left_out: 0,
        }
    }

    /// Enters these pages of a block.
    pub(crate) fn insert(
        &mut self,
        pages: &impl BlockPages,
        block: BlockIndex,
        offsets: Range<u32>,
    ) {
        let id = pages.domain(block);
        let domain = self.key.domain(id);
        for offset in offsets {
            let page = pages.page(block, offset);
            let anchor = domain.anchor(page);
            let part = part_of(anchor, self.parts.len());
            let grows = self.parts.len() == PARTS_MAX as usize;
            let (key, table) = (&self.key, &mut self.parts[part]);
            if table.is_empty() && !grows {
                table.reserve(PART_ROOM, |_| 0);
            }
            let same = table.iter_hash(hash(anchor)).filter(|entry| {
                let (block, offset) = (entry.block(), entry.offset());
                pages.page(block, offset) == page && pages.domain(block) == id
            });
            if same.count() >= BLOCKS_OF_PAGE_MAX {
                self.left_out += 1;
                continue;
            }
            table.insert_unique(hash(anchor), Entry::new(block, offset), |entry| {
                let domain = key.domain(pages.domain(entry.block()));
                hash(domain.anchor(pages.page(entry.block(), entry.offset())))
            });
        }
    }

    /// Removes these pages of a block, while the block still has them.
    pub(crate) fn remove(
        &mut self,
        pages: &impl BlockPages,
        block: BlockIndex,
        offsets: Range<u32>,
    ) {
        let domain = self.key.domain(pages.domain(block));
        for offset in offsets {
            let anchor = domain.anchor(pages.page(block, offset));
            let part = part_of(anchor, self.parts.len());
            let entry = Entry::new(block, offset);
            match self.parts[part].find_entry(hash(anchor), |other| *other == entry) {
                Ok(found) => drop(found.remove()),
                Err(_) => self.left_out -= 1,
            }
        }
    }

    /// Places that may hold the page with this anchor: those that do, and a few others.
    pub(crate) fn places(&self, anchor: Anchor) -> impl Iterator<Item = (BlockIndex, u32)> {
        let table = &self.parts[part_of(anchor, self.parts.len())];
        let found = table.iter_hash(hash(anchor));
        found.map(|entry| (entry.block(), entry.offset()))
    }

    /// Renames all blocks: block `i` becomes `names[i]`, and is removed where that is [`NONE`]. Afterwards the blocks have
    /// this many pages.
    pub(crate) fn rename(&mut self, names: &[BlockIndex], pages: u64) {
        for table in &mut self.parts {
            table.retain(|entry| {
                let name = names[entry.block() as usize];
                *entry = Entry::new(name, entry.offset());
                name != NONE
            });
        }
        self.left_out = pages - self.len();
    }

    /// Number of entries.
    fn len(&self) -> u64 {
        let parts = self.parts.iter().map(HashTable::len);
        parts.sum::<usize>() as u64
    }

    /// Bytes of the table.
    pub(crate) fn bytes(&self) -> u64 {
        let parts = self.parts.iter().map(HashTable::allocation_size);
        let bytes = parts.sum::<usize>() + self.parts.len() * size_of::<HashTable<Entry>>();
        bytes as u64
    }

    /// Compares the entries with the blocks. `Err` names the first contradiction.
    pub(crate) fn check(&self, blocks: &Blocks) -> Result<(), Contradiction> {
        let entries = self.len();
        let (mut found, mut left_out) = (0, 0);
        for (index, block) in blocks.by_age().filter(|(_, block)| !block.retired) {
            let domain = self.key.domain(block.domain);
            for offset in 0..block.total_pages() {
                let mut places = self.places(domain.anchor(blocks.page(index, offset)));
                match places.any(|place| place == (index, offset)) {
                    true => found += 1,
                    false => left_out += 1,
                }
            }
        }
        if left_out != self.left_out {
            let counted = self.left_out;
            return Err(format!("{left_out} pages are not in the index, {counted} counted").into());
        }
        match found == entries {
            true => Ok(()),
            false => Err(format!("the index has {entries} pages, the blocks {found}").into()),
        }
    }
}

/// The part of the table that has the entries of a page.
fn part_of(anchor: Anchor, parts: usize) -> usize {
    let high = anchor.0 >> 64;
    #[expect(
        clippy::cast_possible_truncation,
        reason = "less than the number of parts"
    )]
    let part = ((high * parts as u128) >> 64) as usize;
    part
}

/// The hash within a part: the other half of the anchor.
fn hash(anchor: Anchor) -> u64 {
    #[expect(clippy::cast_possible_truncation, reason = "the low half is wanted")]
    let low = anchor.0 as u64;
    low
}

#[cfg(test)]
mod tests;
