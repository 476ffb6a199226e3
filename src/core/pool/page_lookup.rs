//! Finds runs that begin inside blocks, in a pool with an index of pages, and keeps that index.

use std::ops::Range;

use crate::Contradiction;
use crate::index::anchor::{AnchorKey, Domain};
use crate::index::block_index::{Match, MatchGoal};
use crate::index::blocks::BlockIndex;
use crate::index::page_index::PageIndex;
use crate::pool::Pool;
use kvferry_types::HashView;

impl Pool {
    /// The pool, still without blocks, with an index of its pages. `key` makes its anchors.
    #[must_use]
    pub fn with_page_index(mut self, key: &AnchorKey) -> Self {
        self.pages = Some(PageIndex::new(key.clone(), self.capacity_pages()));
        self.index.begin_anywhere();
        self
    }

    /// True if the pool finds runs that begin inside a block.
    pub(crate) fn has_page_index(&self) -> bool {
        self.pages.is_some()
    }

    /// Bytes of the index of pages.
    pub fn page_index_bytes(&self) -> u64 {
        self.pages.as_ref().map_or(0, PageIndex::bytes)
    }

    /// Enters pages that a block got.
    pub(crate) fn index_pages(&mut self, block: BlockIndex, offsets: Range<u32>) {
        if let Some(pages) = &mut self.pages {
            pages.insert(&self.blocks, block, offsets);
        }
    }

    /// Removes pages that a block is about to lose. A block that lookups do not find any longer has none in the index.
    pub(crate) fn unindex_pages(&mut self, block: BlockIndex, offsets: Range<u32>) {
        if let Some(pages) = &mut self.pages
            && !self.blocks.get(block).retired
        {
            pages.remove(&self.blocks, block, offsets);
        }
    }

    /// The longest run of `hashes` from `position` on that begins anywhere in a block, where those that begin there with
    /// a block are not enough: `beginning` is the longest one of them.
    #[inline]
    pub(crate) fn or_inside(
        &self,
        beginning: Option<Match>,
        domain: &Domain,
        hashes: HashView<'_>,
        position: usize,
        want: MatchGoal,
    ) -> Option<Match> {
        let enough = |found: Match| found.ready > 0 || want == MatchGoal::Present;
        match &self.pages {
            Some(pages) if !beginning.is_some_and(enough) => {
                self.inside_blocks(pages, beginning, domain, hashes, position, want)
            }
            _ => beginning,
        }
    }

    /// The longest run from `position` on of `best` and the runs that begin inside blocks.
    fn inside_blocks(
        &self,
        pages: &PageIndex,
        mut best: Option<Match>,
        domain: &Domain,
        hashes: HashView<'_>,
        position: usize,
        want: MatchGoal,
    ) -> Option<Match> {
        for (index, offset) in pages.places(domain.anchor(hashes.fingerprint(position))) {
            let block = self.blocks.get(index);
            if block.domain != domain.id() || self.blocks.is_hidden(block) {
                continue;
            }
            let found = Match::of(&self.blocks, index, offset, hashes, position);
            if found.pages > 0 && best.is_none_or(|best| found.is_preferred_to(best, want)) {
                best = Some(found);
            }
        }
        best
    }

    /// The place in its cell of the first page of a run: the pages between it and the last multiple of the ratio.
    pub(crate) fn phase_of(&self, found: Match) -> u32 {
        u32::from(self.blocks.get(found.block).phase) + found.offset
    }

    /// Recounts the index of pages. `Err` names the first contradiction.
    pub(crate) fn check_page_index(&self) -> Result<(), Contradiction> {
        match &self.pages {
            Some(pages) => pages.check(&self.blocks),
            None => Ok(()),
        }
    }
}
