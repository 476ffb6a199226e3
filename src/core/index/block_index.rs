//! The index of blocks: maps an anchor to the blocks that start with its page.
//!
//! Blocks have no parent or child links. A lookup walks the request's own hashes and queries the index at each
//! position.

use hashbrown::HashTable;

use crate::Contradiction;
use crate::index::blocks::{BlockIndex, Blocks, NONE};
use crate::index::start_filter::StartFilter;
use kvferry_types::{Anchor, DomainId, Fingerprint, HashView};

/// Most blocks that may share an anchor, which is the hash of their first page and of all pages before it. Sequences that
/// diverge have other anchors; several blocks begin with one page after a store during a reset, which hides the blocks
/// before it, and after a recovery that found leftovers of earlier blocks. A further block is refused.
pub const SIBLINGS_MAX: usize = 8;

/// The longest indexed run at one position of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Match {
    /// The block that holds the run.
    pub block: BlockIndex,
    /// Pages of the block before the run: 0 unless the run was found by the index of pages.
    pub offset: u32,
    /// Number of its pages that match, filling ones included; at least 1.
    pub pages: u32,
    /// Number of matching pages that are readable now.
    pub ready: u32,
}

/// Order in which runs are preferred.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatchGoal {
    /// By readable pages, for a lookup.
    Readable,
    /// By pages that are ready or filling, for the presence check of a store.
    Present,
}

impl Match {
    /// The run of a block's pages from `offset` on that equal the pages of `hashes` from `position` on.
    pub(crate) fn of(
        blocks: &Blocks,
        index: BlockIndex,
        offset: u32,
        hashes: HashView<'_>,
        position: usize,
    ) -> Self {
        let block = blocks.get(index);
        let pages = blocks.matching_pages(block, offset, hashes, position);
        Self {
            block: index,
            offset,
            pages,
            ready: pages.min(u32::from(block.ready).saturating_sub(offset)),
        }
    }

    fn preference(self, goal: MatchGoal) -> (u32, u32) {
        match goal {
            MatchGoal::Readable => (self.ready, self.pages),
            MatchGoal::Present => (self.pages, self.ready),
        }
    }

    pub(crate) fn is_preferred_to(self, other: Self, goal: MatchGoal) -> bool {
        self.preference(goal) > other.preference(goal)
    }

    /// Pages of the block up to the last readable page of the run: what a pin of the run holds.
    pub fn ready_through(self) -> u32 {
        self.offset + self.ready
    }

    /// Pages of the block up to the last page of the run.
    pub(crate) fn through(self) -> u32 {
        self.offset + self.pages
    }
}

/// Heads of the sibling lists, by anchor. About 8 bytes per block in addition to the slab.
#[derive(Debug)]
pub struct Index {
    heads: HashTable<BlockIndex>,
    /// The blocks that begin inside a cell.
    inside: StartFilter,
    /// Cells of different sequences differ, so that each block may begin inside one.
    all_inside: bool,
}

impl Index {
    /// An empty index of the blocks of an arena.
    pub(crate) fn new(arena_pages: u32) -> Self {
        Self {
            heads: HashTable::default(),
            inside: StartFilter::new(arena_pages),
            all_inside: false,
        }
    }

    /// Notes, before there are blocks, that sequences are found from any of their pages on.
    pub(crate) fn begin_anywhere(&mut self) {
        self.all_inside = true;
    }

    /// False if no block begins inside a cell with a page whose fingerprint has this low half.
    #[inline]
    pub(crate) fn may_begin_inside(&self, low_half: u64) -> bool {
        self.inside.may_have(low_half)
    }

    /// True if every block begins with a cell.
    pub(crate) fn begins_with_cells(&self) -> bool {
        self.inside.is_empty()
    }

    /// The first page of a block that begins inside a cell.
    fn inside(&self, blocks: &Blocks, index: BlockIndex) -> Option<Fingerprint> {
        let block = blocks.get(index);
        let first = blocks.fingerprints(block.start, 1).first();
        first
            .copied()
            .filter(|_| self.all_inside || block.phase > 0)
    }

    /// Recounts the blocks that begin inside a cell, for an arena of this size. `Err` names the contradiction.
    pub(crate) fn check(&self, blocks: &Blocks, arena_pages: u32) -> Result<(), Contradiction> {
        let mut counted = StartFilter::new(arena_pages);
        for head in &self.heads {
            let begin = siblings(blocks, *head).filter_map(|index| self.inside(blocks, index));
            begin.for_each(|first| counted.insert(first));
        }
        match self.inside.agrees_with(&counted) {
            true => Ok(()),
            false => Err("the blocks that begin inside cells and their filter disagree".into()),
        }
    }

    /// Makes room for the anchors of further blocks.
    pub(crate) fn reserve(&mut self, blocks: &Blocks, count: usize) {
        self.heads
            .reserve(count, |head| hash(blocks.get(*head).anchor));
    }

    /// Adds a block under its anchor. Returns false if [`SIBLINGS_MAX`] blocks share it already.
    pub fn insert(&mut self, blocks: &mut Blocks, index: BlockIndex) -> bool {
        let anchor = blocks.get(index).anchor;
        match self
            .heads
            .find_mut(hash(anchor), |head| blocks.get(*head).anchor == anchor)
        {
            Some(head) => {
                if siblings(blocks, *head).count() >= SIBLINGS_MAX {
                    return false;
                }
                let first = *head;
                *head = index;
                // It is not alone under its anchor any longer.
                blocks.renew(first);
                blocks.get_mut(index).sibling = first;
            }
            None => {
                self.heads
                    .insert_unique(hash(anchor), index, |other| hash(blocks.get(*other).anchor));
            }
        }
        if let Some(first) = self.inside(blocks, index) {
            self.inside.insert(first);
        }
        true
    }

    /// True if no further block can be added under `anchor`.
    pub fn is_full(&self, blocks: &Blocks, anchor: Anchor) -> bool {
        self.head(blocks, anchor)
            .is_some_and(|head| siblings(blocks, head).count() >= SIBLINGS_MAX)
    }

    /// The blocks under an anchor, the one that was added last first.
    pub(crate) fn under<'a>(
        &'a self,
        blocks: &'a Blocks,
        anchor: Anchor,
    ) -> impl Iterator<Item = BlockIndex> + 'a {
        let head = self.head(blocks, anchor).into_iter();
        head.flat_map(|head| siblings(blocks, head))
    }

    /// Removes a block from the index. Must be called before the block leaves the slab.
    pub fn remove(&mut self, blocks: &mut Blocks, index: BlockIndex) {
        let (anchor, sibling) = {
            let block = blocks.get(index);
            (block.anchor, block.sibling)
        };
        let found = self
            .heads
            .find_entry(hash(anchor), |head| blocks.get(*head).anchor == anchor);
        let Ok(mut entry) = found else { return };
        if *entry.get() == index {
            if sibling == NONE {
                entry.remove();
            } else {
                *entry.get_mut() = sibling;
            }
        } else {
            let head = *entry.get();
            let before = siblings(blocks, head).find(|other| blocks.get(*other).sibling == index);
            let Some(before) = before else { return };
            blocks.get_mut(before).sibling = sibling;
        }
        if let Some(first) = self.inside(blocks, index) {
            self.inside.remove(first);
        }
        blocks.get_mut(index).sibling = NONE;
    }

    /// The longest run at page `position` of `hashes`. Only blocks of `domain` that start with that page and are not
    /// hidden are considered; `head` is the first block of their sibling list.
    pub fn longest(
        blocks: &Blocks,
        domain: DomainId,
        head: BlockIndex,
        hashes: HashView<'_>,
        position: usize,
        want: MatchGoal,
    ) -> Option<Match> {
        let mut best: Option<Match> = None;
        for index in siblings(blocks, head) {
            let block = blocks.get(index);
            if block.domain != domain {
                continue;
            }
            if blocks.is_hidden(block) {
                continue;
            }
            let found = Match::of(blocks, index, 0, hashes, position);
            if found.pages > 0 && best.is_none_or(|best| found.is_preferred_to(best, want)) {
                best = Some(found);
            }
        }
        best
    }

    /// The first block of the sibling list of `anchor`.
    pub fn head(&self, blocks: &Blocks, anchor: Anchor) -> Option<BlockIndex> {
        self.heads
            .find(hash(anchor), |head| blocks.get(*head).anchor == anchor)
            .copied()
    }
}

fn siblings(blocks: &Blocks, head: BlockIndex) -> impl Iterator<Item = BlockIndex> {
    std::iter::successors(Some(head), |index| {
        let next = blocks.get(*index).sibling;
        (next != NONE).then_some(next)
    })
}

/// The hash for the table: the low half of the anchor, which is already a keyed hash.
fn hash(anchor: Anchor) -> u64 {
    #[expect(clippy::cast_possible_truncation, reason = "the low half is wanted")]
    let low = anchor.0 as u64;
    low
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::blocks::Filling;
    use crate::pool::tests::sequence;
    use kvferry_types::TransferId;

    const DOMAIN: DomainId = DomainId(1);
    const ANCHOR: Anchor = Anchor(9);

    /// Blocks under one anchor, in order of insertion, each with the first two pages of a sequence.
    fn under_one_anchor(salts: &[u8]) -> (Index, Blocks, Vec<BlockIndex>) {
        let (mut index, mut blocks) = (Index::new(64), Blocks::new());
        let all = salts.iter().zip(0..).map(|(salt, place)| {
            let filling = Filling {
                transfer: TransferId(place.into()),
                pages: 2,
            };
            blocks.write_fingerprints(2 * place, sequence(2, *salt).view(), 0, 2);
            let block = blocks.insert(ANCHOR, DOMAIN, 2 * place, 0, filling);
            assert!(index.insert(&mut blocks, block));
            block
        });
        let all = all.collect();
        (index, blocks, all)
    }

    fn found(index: &Index, blocks: &Blocks) -> Vec<BlockIndex> {
        let head = index.head(blocks, ANCHOR);
        head.map_or_else(Vec::new, |head| siblings(blocks, head).collect())
    }

    #[test]
    fn removing_a_block_keeps_all_others() {
        for gone in 0..4 {
            let (mut index, mut blocks, all) = under_one_anchor(&[1, 2, 3, 4]);
            index.remove(&mut blocks, all[gone]);
            let mut left = all.clone();
            left.remove(gone);
            left.reverse();
            assert_eq!(found(&index, &blocks), left, "without {gone}");
            assert_eq!(blocks.get(all[gone]).sibling, NONE);
        }
        let (mut index, mut blocks, all) = under_one_anchor(&[1]);
        index.remove(&mut blocks, all[0]);
        assert!(found(&index, &blocks).is_empty());
        assert_eq!(index.head(&blocks, ANCHOR), None);
    }

    #[test]
    fn an_anchor_has_a_limited_number_of_blocks() {
        let (mut index, mut blocks, all) = under_one_anchor(&[0; SIBLINGS_MAX - 1]);
        assert!(!index.is_full(&blocks, ANCHOR));
        assert!(!index.is_full(&blocks, Anchor(10)));
        let filling = Filling {
            transfer: TransferId(99),
            pages: 2,
        };
        let mut one_more = || {
            let block = blocks.insert(ANCHOR, DOMAIN, 0, 0, filling);
            (
                index.insert(&mut blocks, block),
                index.is_full(&blocks, ANCHOR),
            )
        };
        assert_eq!(one_more(), (true, true));
        assert_eq!(one_more(), (false, true));
        assert_eq!(found(&index, &blocks).len(), all.len() + 1);
    }

    #[test]
    fn the_longest_run_wins_and_of_two_the_newer() {
        let (index, mut blocks, all) = under_one_anchor(&[5, 6, 6]);
        let head = index.head(&blocks, ANCHOR).expect("a block");
        let longest = |blocks: &Blocks, salt, want| {
            let hashes = sequence(2, salt);
            Index::longest(blocks, DOMAIN, head, hashes.view(), 0, want)
        };
        let run = |block, pages, ready| {
            Some(Match {
                block,
                offset: 0,
                pages,
                ready,
            })
        };
        assert_eq!(longest(&blocks, 7, MatchGoal::Present), None);
        assert_eq!(longest(&blocks, 5, MatchGoal::Present), run(all[0], 2, 0));
        assert_eq!(longest(&blocks, 6, MatchGoal::Present), run(all[2], 2, 0));
        let old = blocks.get_mut(all[1]);
        old.set_filling(None);
        old.ready = 1;
        assert_eq!(longest(&blocks, 6, MatchGoal::Readable), run(all[1], 1, 1));
        assert_eq!(longest(&blocks, 6, MatchGoal::Present), run(all[2], 2, 0));
        let elsewhere = Index::longest(
            &blocks,
            DomainId(2),
            head,
            sequence(2, 6).view(),
            0,
            MatchGoal::Present,
        );
        assert_eq!(elsewhere, None);
    }

    #[test]
    fn the_goal_determines_the_preferred_match() {
        let found = Match {
            block: 0,
            offset: 0,
            pages: 3,
            ready: 2,
        };
        assert_eq!(found.preference(MatchGoal::Readable), (2, 3));
        assert_eq!(found.preference(MatchGoal::Present), (3, 2));
    }
}
