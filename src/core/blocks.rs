//! The blocks of a tier: what each holds, how old it is, and who pins it.
//!
//! Blocks lie in a slab; the fingerprints of their pages lie in one array by arena page, because a block's pages are
//! neighbours. Age is a doubly linked list through the slab, oldest first.

use crate::core::sweep::Hidden;
use crate::types::{Anchor, DomainId, Fingerprint, Generation, PageHashes};

/// Marks the end of a list.
pub const NONE: u32 = u32::MAX;

/// Fingerprints in a line of cache, of 64 bytes on most machines.
const FINGERPRINTS_PER_LINE: usize = 4;

/// Where a block lies in the slab. Valid while the block lives; say [`BlockRef`] where it must outlive that.
pub type BlockIndex = u32;

/// A block and the stamp it was born with: a later block in the same place has another stamp.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockRef {
    /// Place in the slab.
    pub index: BlockIndex,
    /// Unique over the life of the pool.
    pub stamp: u64,
}

/// The pages that a reservation adds to a block, from its watermark on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Filling {
    /// The reservation's generation; a growth has one of its own.
    pub generation: Generation,
    /// How many pages.
    pub pages: u32,
}

/// A run of pages of one sequence in one arena.
#[derive(Debug, Clone)]
pub struct Block {
    /// How it is found.
    pub anchor: Anchor,
    /// Whose it is.
    pub domain: DomainId,
    /// First arena page.
    pub start: u32,
    /// Position of its first page in its sequence, modulo the ratio: it may grow to the next multiple.
    pub phase: u16,
    /// The watermark: pages below it are ready.
    pub ready: u16,
    /// Pages above the watermark that are reserved or filling.
    pub filling: Option<Filling>,
    /// Holders of pins and leases.
    pub pins: u32,
    /// Pages below this must stay: the highest page that any holder has pinned since the block was last unpinned.
    pub pinned_pages: u16,
    /// Not in the index any more; goes with its last holder.
    pub retired: bool,
    /// Unique over the life of the pool.
    pub stamp: u64,
    pub(super) sibling: u32,
    older: u32,
    newer: u32,
}

impl Block {
    /// Pages that it occupies in the arena.
    pub fn total_pages(&self) -> u32 {
        u32::from(self.ready) + self.filling.map_or(0, |filling| filling.pages)
    }

    /// Pages that eviction may take from its tail now.
    pub fn evictable_pages(&self) -> u32 {
        match self.filling {
            Some(_) => 0,
            None => u32::from(self.ready) - u32::from(self.pinned_pages.min(self.ready)),
        }
    }
}

/// Slab, age list and fingerprints.
#[derive(Debug, Default)]
pub struct Blocks {
    slab: Vec<Option<Block>>,
    vacant: Vec<u32>,
    fingerprints: Vec<Fingerprint>,
    oldest: u32,
    newest: u32,
    stamps: u64,
    live: u32,
    /// Sweeps that were begun.
    pub(super) sweeps: u64,
    /// What the sweeps that go on hide: as many as there are resets at most.
    pub(super) hidden: Vec<Hidden>,
}

impl Blocks {
    /// Without any block.
    pub fn new() -> Self {
        Self {
            oldest: NONE,
            newest: NONE,
            ..Self::default()
        }
    }

    /// Blocks that live.
    pub fn len(&self) -> u32 {
        self.live
    }

    /// Places of the slab, with or without a block.
    pub fn places(&self) -> BlockIndex {
        u32::try_from(self.slab.len()).unwrap_or(NONE)
    }

    /// The stamp of the block that was born last.
    pub fn youngest(&self) -> u64 {
        self.stamps
    }

    /// The block at `index`, if one lives there.
    pub fn at(&self, index: BlockIndex) -> Option<&Block> {
        self.slab.get(index as usize)?.as_ref()
    }

    /// The block at `index`. Panics when none lives there: indices come from the index and the age list.
    #[expect(
        clippy::expect_used,
        reason = "an index outlives its block only by a bug of the pool"
    )]
    pub fn get(&self, index: BlockIndex) -> &Block {
        self.slab[index as usize].as_ref().expect("a live block")
    }

    /// The block at `index`, to change it. Panics when none lives there.
    #[expect(
        clippy::expect_used,
        reason = "an index outlives its block only by a bug of the pool"
    )]
    pub fn get_mut(&mut self, index: BlockIndex) -> &mut Block {
        self.slab[index as usize].as_mut().expect("a live block")
    }

    /// The block that `reference` means, if it still lives.
    pub fn find(&self, reference: BlockRef) -> Option<&Block> {
        let block = self.slab.get(reference.index as usize)?.as_ref()?;
        (block.stamp == reference.stamp).then_some(block)
    }

    /// A reference that outlives the block.
    pub fn reference(&self, index: BlockIndex) -> BlockRef {
        BlockRef {
            index,
            stamp: self.get(index).stamp,
        }
    }

    /// Adds an empty block as the newest one.
    pub fn insert(
        &mut self,
        anchor: Anchor,
        domain: DomainId,
        start: u32,
        phase: u16,
        filling: Filling,
    ) -> BlockIndex {
        self.stamps += 1;
        let block = Block {
            anchor,
            domain,
            start,
            phase,
            ready: 0,
            filling: Some(filling),
            pins: 0,
            pinned_pages: 0,
            retired: false,
            stamp: self.stamps,
            sibling: NONE,
            older: NONE,
            newer: NONE,
        };
        let index = match self.vacant.pop() {
            Some(index) => {
                self.slab[index as usize] = Some(block);
                index
            }
            None => {
                self.slab.push(Some(block));
                u32::try_from(self.slab.len() - 1).unwrap_or(NONE)
            }
        };
        self.live += 1;
        self.append(index);
        index
    }

    /// Takes a block out.
    pub fn remove(&mut self, index: BlockIndex) {
        self.unlink(index);
        self.slab[index as usize] = None;
        self.vacant.push(index);
        self.live -= 1;
    }

    /// Makes a block the newest one.
    pub fn touch(&mut self, index: BlockIndex) {
        if self.newest != index {
            self.unlink(index);
            self.append(index);
        }
    }

    /// Every block, oldest first.
    pub fn by_age(&self) -> impl Iterator<Item = (BlockIndex, &Block)> {
        let mut next = self.oldest;
        std::iter::from_fn(move || {
            let index = next;
            let block = self.slab.get(index as usize)?.as_ref()?;
            next = block.newer;
            Some((index, block))
        })
    }

    /// Writes the fingerprints of `count` pages of `hashes`, from page `first` on, to the arena pages from `start` on.
    pub fn write_fingerprints(
        &mut self,
        start: u32,
        hashes: &PageHashes,
        first: usize,
        count: u32,
    ) {
        let pages = (0..count as usize).map(|offset| hashes.fingerprint(first + offset));
        self.set_fingerprints(start, pages);
    }

    /// Writes fingerprints to the arena pages from `start` on.
    pub fn set_fingerprints(
        &mut self,
        start: u32,
        pages: impl ExactSizeIterator<Item = Fingerprint>,
    ) {
        let end = start as usize + pages.len();
        if self.fingerprints.len() < end {
            self.fingerprints.resize(end, Fingerprint::default());
        }
        for (slot, page) in self.fingerprints[start as usize..end].iter_mut().zip(pages) {
            *slot = page;
        }
    }

    /// What `count` arena pages from `start` on hold.
    pub fn fingerprints(&self, start: u32, count: u32) -> &[Fingerprint] {
        &self.fingerprints[start as usize..start as usize + count as usize]
    }

    /// How many of the block's pages, the filling ones included, equal those of `hashes` from `first` on.
    pub fn matching_pages(&self, block: &Block, hashes: &PageHashes, first: usize) -> u32 {
        let held = self.fingerprints(block.start, block.total_pages());
        let pairs = held.iter().zip(hashes.fingerprints(first));
        let equal = pairs.take_while(|(held, asked)| *held == asked);
        u32::try_from(equal.count()).unwrap_or(0)
    }

    /// Reads what a comparison with the block's pages will read, so that it lies in a cache by then. Has no effect.
    pub fn read_ahead(&self, index: BlockIndex) {
        let block = self.get(index);
        let pages = self.fingerprints(block.start, block.total_pages());
        for page in pages.iter().step_by(FINGERPRINTS_PER_LINE) {
            std::hint::black_box(page.0);
        }
    }

    fn append(&mut self, index: BlockIndex) {
        let newest = self.newest;
        let block = self.get_mut(index);
        block.older = newest;
        block.newer = NONE;
        if newest == NONE {
            self.oldest = index;
        } else {
            self.get_mut(newest).newer = index;
        }
        self.newest = index;
    }

    fn unlink(&mut self, index: BlockIndex) {
        let (older, newer) = {
            let block = self.get(index);
            (block.older, block.newer)
        };
        if older == NONE {
            self.oldest = newer;
        } else {
            self.get_mut(older).newer = newer;
        }
        if newer == NONE {
            self.newest = older;
        } else {
            self.get_mut(newer).older = older;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn three() -> (Blocks, [BlockIndex; 3]) {
        let mut blocks = Blocks::new();
        let filling = Filling {
            generation: Generation(1),
            pages: 1,
        };
        let all = [0, 1, 2].map(|start| blocks.insert(Anchor(7), DomainId(1), start, 0, filling));
        (blocks, all)
    }

    fn ages(blocks: &Blocks) -> Vec<BlockIndex> {
        blocks.by_age().map(|(index, _)| index).collect()
    }

    #[test]
    fn a_touch_makes_a_block_the_newest() {
        let (mut blocks, [a, b, c]) = three();
        assert_eq!(ages(&blocks), [a, b, c]);
        blocks.touch(a);
        assert_eq!(ages(&blocks), [b, c, a]);
        blocks.touch(c);
        assert_eq!(ages(&blocks), [b, a, c]);
        blocks.touch(c);
        assert_eq!(ages(&blocks), [b, a, c]);
        blocks.remove(a);
        assert_eq!(ages(&blocks), [b, c]);
    }

    #[test]
    fn a_reference_does_not_mean_the_next_block_in_the_same_place() {
        let (mut blocks, [a, b, _]) = three();
        let (first, other) = (blocks.reference(a), blocks.reference(b));
        assert!(blocks.find(first).is_some());
        blocks.remove(a);
        assert!(blocks.find(first).is_none());
        let filling = Filling {
            generation: Generation(2),
            pages: 1,
        };
        let again = blocks.insert(Anchor(7), DomainId(1), 0, 0, filling);
        assert_eq!(again, a, "the place is used again");
        assert!(blocks.find(first).is_none());
        assert!(blocks.find(blocks.reference(a)).is_some());
        assert!(blocks.find(other).is_some());
    }
}
