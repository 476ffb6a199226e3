//! The blocks of a tier, with their contents, age and holders.
//!
//! Blocks are stored in a slab. The fingerprints of their pages are stored in one array indexed by arena page, because
//! the pages of a block are consecutive.

use crate::eviction::{EvictionOrder, Place, Places, Share};
use kvferry_types::{Anchor, DomainId, Fingerprint, HashView, NamespaceId, Scope, TransferId};

/// Marks the end of a linked list.
pub const NONE: u32 = u32::MAX;

/// Fingerprints per cache line, for lines of 64 bytes.
const FINGERPRINTS_PER_LINE: usize = 4;

pub use crate::eviction::BlockIndex;

/// A block's position and creation stamp. A later block at the same position has another stamp.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockRef {
    /// Position in the slab.
    pub index: BlockIndex,
    /// Unique over the life of the pool.
    pub stamp: u64,
}

/// The pages that a reservation adds to a block, starting at the watermark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Filling {
    /// The transfer that fills them. A growth has its own.
    pub transfer: TransferId,
    /// Number of pages.
    pub pages: u32,
}

/// A run of pages of one sequence in one arena; 96 bytes, so that a block spans two cache lines.
#[derive(Debug, Clone)]
pub struct Block {
    /// Keyed hash of the block's first page hash: the key of the index.
    pub anchor: Anchor,
    /// The domain that the block belongs to.
    pub domain: DomainId,
    /// First arena page.
    pub start: u32,
    /// Position of the block's first page in its sequence, modulo the ratio. The block may grow up to the next
    /// multiple.
    pub phase: u16,
    /// The watermark: pages below it are ready.
    pub ready: u16,
    /// Pages above the watermark that are reserved or filling; 0 for none.
    filling_pages: u32,
    /// The transfer that fills these pages.
    filling_transfer: TransferId,
    /// Number of pins and leases.
    pub pins: u32,
    /// Pages below this must not be evicted: the highest page that any holder has pinned since the block was last
    /// unpinned.
    pub pinned_pages: u16,
    /// Removed from the index; the block is removed with its last holder.
    pub retired: bool,
    /// Unique over the life of the pool.
    pub stamp: u64,
    pub(crate) sibling: u32,
    place: Place,
}

const _: () = assert!(size_of::<Option<Block>>() == 96);

impl Block {
    /// Pages above the watermark that are reserved or filling.
    pub fn filling(&self) -> Option<Filling> {
        (self.filling_pages > 0).then_some(Filling {
            transfer: self.filling_transfer,
            pages: self.filling_pages,
        })
    }

    /// Notes which pages above the watermark are reserved or filling.
    pub fn set_filling(&mut self, filling: Option<Filling>) {
        let (transfer, pages) = match filling {
            Some(filling) => (filling.transfer, filling.pages),
            None => (TransferId(0), 0),
        };
        (self.filling_transfer, self.filling_pages) = (transfer, pages);
    }

    /// True if no older block has the same anchor.
    pub(crate) fn is_last_sibling(&self) -> bool {
        self.sibling == NONE
    }

    /// The list of the order of eviction that the block belongs to.
    pub(crate) fn list(&self) -> u8 {
        self.place.list()
    }

    /// Pages that the block occupies in the arena, ready and filling.
    pub fn total_pages(&self) -> u32 {
        u32::from(self.ready) + self.filling_pages
    }

    /// Pages that eviction may take from the block's tail now. 0 while the block fills.
    pub fn evictable_pages(&self) -> u32 {
        match self.filling_pages {
            0 => u32::from(self.ready) - u32::from(self.pinned_pages.min(self.ready)),
            _ => 0,
        }
    }
}

/// The slab: blocks by position, and vacant positions.
#[derive(Debug, Default)]
struct Slab(Vec<Option<Block>>);

impl Slab {
    #[expect(
        clippy::expect_used,
        reason = "an index outlives its block only by a bug of the pool"
    )]
    fn block(&self, index: BlockIndex) -> &Block {
        self.0[index as usize].as_ref().expect("a live block")
    }

    #[expect(
        clippy::expect_used,
        reason = "an index outlives its block only by a bug of the pool"
    )]
    fn block_mut(&mut self, index: BlockIndex) -> &mut Block {
        self.0[index as usize].as_mut().expect("a live block")
    }
}

impl Places for Slab {
    fn place(&self, index: BlockIndex) -> &Place {
        &self.block(index).place
    }

    fn place_mut(&mut self, index: BlockIndex) -> &mut Place {
        &mut self.block_mut(index).place
    }

    fn namespace(&self, index: BlockIndex) -> NamespaceId {
        self.block(index).domain.namespace()
    }

    fn pages(&self, index: BlockIndex) -> u32 {
        self.block(index).total_pages()
    }
}

/// Slab, order of eviction and fingerprints of all blocks.
#[derive(Debug, Default)]
pub struct Blocks {
    slab: Slab,
    vacant: Vec<u32>,
    /// The version of each position of the slab: changes with the block there and with its pages, not with its holders
    /// and its place in the order of eviction.
    versions: Vec<u32>,
    fingerprints: Vec<Fingerprint>,
    order: EvictionOrder,
    stamps: u64,
    live: u32,
    /// Number of sweeps begun so far.
    sweeps: u64,
    /// Blocks hidden by unfinished sweeps: at most one entry per reset.
    hidden: Vec<Hidden>,
}

/// Blocks that are hidden from lookups: those in a scope, up to the youngest at that time.
#[derive(Debug, Clone)]
pub(crate) struct Hidden {
    number: u64,
    scope: Scope,
    /// The stamp of the youngest block in scope.
    youngest: u64,
}

impl Hidden {
    pub(crate) fn scope(&self) -> &Scope {
        &self.scope
    }

    /// Whether this block is hidden.
    pub(crate) fn contains(&self, blocks: &Blocks, block: &Block) -> bool {
        let fingerprints = || blocks.fingerprints(block.start, block.total_pages());
        block.stamp <= self.youngest && self.scope.meets(block.domain, fingerprints())
    }
}

impl Blocks {
    /// An empty slab.
    pub fn new() -> Self {
        Self::default()
    }

    /// Hides the blocks that hold a page of `scope`, until [`Blocks::show`].
    pub(crate) fn hide(&mut self, scope: Scope) -> Hidden {
        self.sweeps += 1;
        let hidden = Hidden {
            number: self.sweeps,
            scope,
            youngest: self.stamps,
        };
        self.hidden.push(hidden.clone());
        hidden
    }

    /// Makes blocks visible again.
    pub(crate) fn show(&mut self, hidden: &Hidden) {
        self.hidden.retain(|other| other.number != hidden.number);
    }

    /// True if this block is hidden from lookups.
    pub(crate) fn is_hidden(&self, block: &Block) -> bool {
        let mut hidden = self.hidden.iter();
        hidden.any(|hidden| hidden.contains(self, block))
    }

    /// Number of live blocks.
    pub fn len(&self) -> u32 {
        self.live
    }

    /// Positions of the slab, occupied or vacant.
    pub fn places(&self) -> BlockIndex {
        u32::try_from(self.slab.0.len()).unwrap_or(NONE)
    }

    /// The block at `index`, if one lives there.
    pub fn at(&self, index: BlockIndex) -> Option<&Block> {
        self.slab.0.get(index as usize)?.as_ref()
    }

    /// The block at `index`. Panics if none lives there: indices come from the index and the order of eviction.
    pub fn get(&self, index: BlockIndex) -> &Block {
        self.slab.block(index)
    }

    /// The block at `index`, mutably. Panics if none lives there. Its version changes.
    pub fn get_mut(&mut self, index: BlockIndex) -> &mut Block {
        self.renew(index);
        self.slab.block_mut(index)
    }

    /// The block at `index`, for changes of its holders. Panics if none lives there.
    pub(crate) fn holders_mut(&mut self, index: BlockIndex) -> &mut Block {
        self.slab.block_mut(index)
    }

    /// The version of the block at `index`: while it is equal, the same pages of the block match a sequence.
    pub(crate) fn version(&self, index: BlockIndex) -> u32 {
        self.versions[index as usize]
    }

    /// Changes the version of a block.
    pub(crate) fn renew(&mut self, index: BlockIndex) {
        let version = &mut self.versions[index as usize];
        *version = version.wrapping_add(1);
    }

    /// True while blocks are hidden from lookups.
    pub(crate) fn any_hidden(&self) -> bool {
        !self.hidden.is_empty()
    }

    /// The block that `reference` refers to, if it still lives.
    pub fn find(&self, reference: BlockRef) -> Option<&Block> {
        let block = self.slab.0.get(reference.index as usize)?.as_ref()?;
        (block.stamp == reference.stamp).then_some(block)
    }

    /// A reference that may outlive the block.
    pub fn reference(&self, index: BlockIndex) -> BlockRef {
        BlockRef {
            index,
            stamp: self.get(index).stamp,
        }
    }

    /// Adds a block without ready pages as the newest one.
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
            filling_pages: filling.pages,
            filling_transfer: filling.transfer,
            pins: 0,
            pinned_pages: 0,
            retired: false,
            stamp: self.stamps,
            sibling: NONE,
            place: self.order.place_of_new(),
        };
        let index = match self.vacant.pop() {
            Some(index) => {
                self.slab.0[index as usize] = Some(block);
                self.renew(index);
                index
            }
            None => {
                self.slab.0.push(Some(block));
                self.versions.push(0);
                u32::try_from(self.slab.0.len() - 1).unwrap_or(NONE)
            }
        };
        self.live += 1;
        index
    }

    /// Removes a block from the slab and from the order of eviction.
    pub fn remove(&mut self, index: BlockIndex) {
        self.order.set_evictable(&mut self.slab, index, false);
        self.slab.0[index as usize] = None;
        self.renew(index);
        self.vacant.push(index);
        self.live -= 1;
    }

    /// Makes a block the most recently used one.
    pub fn touch(&mut self, index: BlockIndex) {
        self.order.touch(&mut self.slab, index);
    }

    /// Puts a block into the order of eviction if pages of it can be evicted now. Called after each change of its holders
    /// or its pages. A block that is held meanwhile stays in the order until the search for a victim meets it, so that a
    /// lookup that pins and releases a block does not move it.
    pub(crate) fn update_order(&mut self, index: BlockIndex) {
        if self.get(index).evictable_pages() > 0 {
            self.order.set_evictable(&mut self.slab, index, true);
        }
    }

    /// Puts a block into the order of eviction, or takes it out.
    #[cfg(test)]
    pub(crate) fn set_evictable(&mut self, index: BlockIndex, evictable: bool) {
        self.order.set_evictable(&mut self.slab, index, evictable);
    }

    /// The next block of which pages can be evicted; with a share, the next one of its blocks. Takes held blocks out of the
    /// order, each once until it is released.
    pub(crate) fn oldest_evictable(&mut self, share: Option<Share>) -> Option<BlockIndex> {
        while let Some(index) = self.order.oldest(&self.slab, share) {
            if self.get(index).evictable_pages() > 0 {
                return Some(index);
            }
            self.order.set_evictable(&mut self.slab, index, false);
        }
        None
    }

    /// Replaces the order of eviction, and puts all blocks into it, by age.
    pub(crate) fn set_order(&mut self, order: EvictionOrder) {
        let all: Vec<BlockIndex> = self.by_age().map(|(index, _)| index).collect();
        self.order = order;
        for index in all {
            let place = self.order.place_of_new();
            let block = self.slab.block_mut(index);
            block.place = place;
            let (namespace, pages) = (block.domain.namespace(), block.total_pages());
            self.order.add_pages(place, namespace, pages);
            self.update_order(index);
        }
    }

    /// The order of eviction.
    pub(crate) fn order(&self) -> &EvictionOrder {
        &self.order
    }

    /// The order of eviction, to adapt to evicted and stored pages.
    pub(crate) fn order_mut(&mut self) -> &mut EvictionOrder {
        &mut self.order
    }

    /// Counts pages that a block gets.
    pub(crate) fn add_pages(&mut self, index: BlockIndex, count: u32) {
        let block = self.slab.block(index);
        self.order
            .add_pages(block.place, block.domain.namespace(), count);
    }

    /// Counts pages that a block loses.
    pub(crate) fn remove_pages(&mut self, index: BlockIndex, count: u32) {
        let block = self.slab.block(index);
        self.order
            .remove_pages(block.place, block.domain.namespace(), count);
    }

    /// Counts a further use of a block.
    pub(crate) fn note_use(&mut self, index: BlockIndex) {
        self.order.note_use(&mut self.slab, index);
    }

    /// Sets the priority of a block.
    pub(crate) fn set_priority(&mut self, index: BlockIndex, priority: u8) {
        self.order.set_priority(&mut self.slab, index, priority);
    }

    /// Remembers the last `count` pages of a block as evicted.
    pub(crate) fn note_evicted(&mut self, index: BlockIndex, start: u32, count: u32) {
        let block = self.slab.block(index);
        let pages = &self.fingerprints[start as usize..][..count as usize];
        self.order.evicted(block.place, block.domain, pages);
    }

    /// True if the order of eviction has the block.
    pub(crate) fn is_in_order(&self, index: BlockIndex) -> bool {
        self.get(index).place.is_in_order()
    }

    /// All blocks, oldest first. Sorts them: for resets and checks.
    pub fn by_age(&self) -> impl Iterator<Item = (BlockIndex, &Block)> {
        let mut all: Vec<_> = (0..)
            .zip(&self.slab.0)
            .filter_map(|(index, block)| Some((index, block.as_ref()?)))
            .collect();
        all.sort_unstable_by_key(|(_, block)| block.place.touched());
        all.into_iter()
    }

    /// Writes the fingerprints of `count` pages of `hashes`, from page `first` on, to the arena pages from `start` on.
    pub fn write_fingerprints(
        &mut self,
        start: u32,
        hashes: HashView<'_>,
        first: usize,
        count: u32,
    ) {
        let pages = (0..count as usize).map(|offset| hashes.fingerprint(first + offset));
        self.set_fingerprints(start, pages);
    }

    /// Makes room for further blocks, and sets the fingerprints of all arena pages.
    pub(crate) fn reserve(&mut self, blocks: usize, fingerprints: Vec<Fingerprint>) {
        self.slab.0.reserve_exact(blocks);
        self.versions.reserve_exact(blocks);
        self.fingerprints = fingerprints;
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

    /// The fingerprints of `count` arena pages from `start` on.
    pub fn fingerprints(&self, start: u32, count: u32) -> &[Fingerprint] {
        &self.fingerprints[start as usize..start as usize + count as usize]
    }

    /// Number of the block's pages from `offset` on, filling ones included, that equal the pages of `hashes` from `first`
    /// on.
    pub fn matching_pages(
        &self,
        block: &Block,
        offset: u32,
        hashes: HashView<'_>,
        first: usize,
    ) -> u32 {
        let held = self.fingerprints(block.start + offset, block.total_pages() - offset);
        let pairs = held.iter().zip(hashes.fingerprints(first));
        let equal = pairs.take_while(|(held, requested)| *held == requested);
        u32::try_from(equal.count()).unwrap_or(0)
    }

    /// Prefetches the fingerprints that a comparison with the block's pages will read. Has no other effect.
    pub fn read_ahead(&self, index: BlockIndex) {
        let block = self.get(index);
        let pages = self.fingerprints(block.start, block.total_pages());
        for page in pages.iter().step_by(FINGERPRINTS_PER_LINE) {
            std::hint::black_box(page.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn three() -> (Blocks, [BlockIndex; 3]) {
        let mut blocks = Blocks::new();
        let filling = Filling {
            transfer: TransferId(1),
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

    /// A search meets a held block once, and the block returns to the place of its last touch.
    #[test]
    fn a_held_block_leaves_the_order_at_a_search_and_returns_when_it_is_released() {
        let (mut blocks, all) = three();
        for index in all {
            let block = blocks.get_mut(index);
            block.set_filling(None);
            block.ready = 1;
            blocks.update_order(index);
        }
        let [a, b, _] = all;
        assert_eq!(blocks.oldest_evictable(None), Some(a));
        blocks.get_mut(a).pinned_pages = 1;
        blocks.update_order(a);
        assert!(blocks.is_in_order(a), "no search has met it");
        assert_eq!(blocks.oldest_evictable(None), Some(b));
        assert!(!blocks.is_in_order(a));
        blocks.get_mut(a).pinned_pages = 0;
        blocks.update_order(a);
        assert_eq!(blocks.oldest_evictable(None), Some(a));
        for index in all {
            blocks.get_mut(index).pinned_pages = 1;
        }
        assert_eq!(blocks.oldest_evictable(None), None, "all are held");
    }

    #[test]
    fn a_reference_does_not_match_the_next_block_in_the_same_place() {
        let (mut blocks, [a, b, _]) = three();
        let (first, other) = (blocks.reference(a), blocks.reference(b));
        assert!(blocks.find(first).is_some());
        blocks.remove(a);
        assert!(blocks.find(first).is_none());
        let filling = Filling {
            transfer: TransferId(2),
            pages: 1,
        };
        let again = blocks.insert(Anchor(7), DomainId(1), 0, 0, filling);
        assert_eq!(again, a, "the place is used again");
        assert!(blocks.find(first).is_none());
        assert!(blocks.find(blocks.reference(a)).is_some());
        assert!(blocks.find(other).is_some());
    }
}
