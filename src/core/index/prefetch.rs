//! Prefetches the index heads of the positions ahead of a lookup, so that their cache misses overlap.

use std::cell::RefCell;

use crate::index::anchor::Domain;
use crate::index::block_index::Index;
use crate::index::blocks::{BlockIndex, Blocks};
use crate::index::cells::Cells;
use kvferry_types::{Anchor, HashView};

/// Positions that are looked up together at first.
const AHEAD_FIRST: usize = 4;
/// Most positions that are looked up together.
const AHEAD_MAX: usize = 32;

/// Anchors of a sequence that were computed for one tier, for the others: computing one takes longer than the probe of an
/// index that it is for.
#[derive(Debug, Default)]
pub(crate) struct KnownAnchors(RefCell<Vec<(usize, Anchor)>>);

impl KnownAnchors {
    /// The anchor of a position, computed if it is not known. `next` is the caller's place in the list.
    fn get(&self, position: usize, next: &mut usize, compute: impl FnOnce() -> Anchor) -> Anchor {
        let mut known = self.0.borrow_mut();
        while let Some((at, anchor)) = known.get(*next).filter(|(at, _)| *at <= position) {
            *next += 1;
            if *at == position {
                return *anchor;
            }
        }
        let anchor = compute();
        // Those before the end are of pages inside cells, which other tiers are not asked about.
        if *next == known.len() {
            known.push((position, anchor));
            *next += 1;
        }
        anchor
    }
}

/// Index heads of several positions of a sequence.
///
/// Blocks mostly begin with a cell, so the table holds the requested position and the beginnings of the cells after it.
/// Their lookups do not depend on each other, so the CPU runs several at a time. As long as the walk uses up the table,
/// the next one covers twice as many positions; a walk that ends early looks up few positions in vain.
pub(crate) struct HeadPrefetcher<'a> {
    index: &'a Index,
    blocks: &'a Blocks,
    cells: Cells,
    domain: &'a Domain,
    hashes: HashView<'a>,
    /// With the place of the next one in it; absent if only one tier is asked.
    known: Option<(&'a KnownAnchors, usize)>,
    found: [(usize, Option<BlockIndex>); AHEAD_MAX],
    used: usize,
    filled: usize,
    next_fill: usize,
}

impl<'a> HeadPrefetcher<'a> {
    pub(crate) fn new(
        (index, blocks): (&'a Index, &'a Blocks),
        ratio: u32,
        domain: &'a Domain,
        hashes: HashView<'a>,
    ) -> Self {
        Self {
            index,
            blocks,
            cells: Cells::new(ratio),
            domain,
            hashes,
            known: None,
            found: [(0, None); AHEAD_MAX],
            used: 0,
            filled: 0,
            next_fill: AHEAD_FIRST,
        }
    }

    /// Shares the anchors that prefetchers of other tiers compute.
    pub(crate) fn sharing(self, known: &'a KnownAnchors) -> Self {
        Self {
            known: Some((known, 0)),
            ..self
        }
    }

    /// The first block under the anchor of `position`. Positions must be requested in ascending order.
    pub(crate) fn head(&mut self, position: usize) -> Option<BlockIndex> {
        let passed = self.found[self.used..self.filled]
            .iter()
            .take_while(|(at, _)| *at < position);
        self.used += passed.count();
        if self.used == self.filled {
            self.fill(position);
        }
        match self.found[self.used] {
            (at, head) if at == position => head,
            _ => {
                let anchor = self.anchor(position);
                self.look(anchor)
            }
        }
    }

    /// Notes that the page at `position` is page `phase` of its cell. Where blocks begin follows from it.
    pub(crate) fn align(&mut self, position: u32, phase: u32) {
        if self.cells.align(position, phase) {
            (self.used, self.filled) = (0, 0);
        }
    }

    fn fill(&mut self, position: usize) {
        let mut anchors = [Anchor::default(); AHEAD_MAX];
        let mut at = position;
        (self.used, self.filled) = (0, 0);
        while self.filled < self.next_fill && at < self.hashes.len() {
            self.found[self.filled].0 = at;
            anchors[self.filled] = self.anchor(at);
            at = u32::try_from(at).map_or(usize::MAX, |at| self.cells.next(at) as usize);
            self.filled += 1;
        }
        for (index, anchor) in anchors[..self.filled].iter().enumerate() {
            self.found[index].1 = self.look(*anchor);
        }
        for (_, head) in &self.found[..self.filled] {
            if let Some(head) = head {
                self.blocks.read_ahead(*head);
            }
        }
        self.next_fill = (self.next_fill * 2).min(AHEAD_MAX);
    }

    fn anchor(&mut self, position: usize) -> Anchor {
        let compute = || self.domain.anchor(self.hashes.fingerprint(position));
        match &mut self.known {
            None => compute(),
            Some((known, next)) => known.get(position, next, compute),
        }
    }

    fn look(&self, anchor: Anchor) -> Option<BlockIndex> {
        self.index.head(self.blocks, anchor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::tests::{domain, sequence, stored};

    /// Positions of the table, and how many of them were used.
    fn table(ahead: &HeadPrefetcher<'_>) -> (Vec<usize>, usize) {
        let filled = &ahead.found[..ahead.filled];
        (filled.iter().map(|(at, _)| *at).collect(), ahead.used)
    }

    #[test]
    fn prefetches_grow_while_block_starts_are_requested() {
        let hashes = sequence(400, 0);
        let pool = stored(&hashes, 400);
        let domain = domain();
        let mut ahead = pool.prefetcher(&domain, hashes.view());
        let head = |at| pool.prefetcher(&domain, hashes.view()).head(at);
        let blocks = |range: std::ops::Range<usize>| range.map(|block| block * 4).collect();
        for (position, tables) in [
            (0, (blocks(0..4), 0)),
            (4, (blocks(0..4), 1)),
            (12, (blocks(0..4), 3)),
            (16, (blocks(4..12), 0)),
            (28, (blocks(4..12), 3)),
            (48, (blocks(12..28), 0)),
            (112, (blocks(28..60), 0)),
            (240, (blocks(60..92), 0)),
            (368, (blocks(92..100), 0)),
        ] {
            assert!(head(position).is_some(), "{position} is stored");
            assert_eq!(ahead.head(position), head(position), "{position}");
            assert_eq!(table(&ahead), tables, "{position}");
        }
    }

    #[test]
    fn positions_inside_blocks_are_looked_up_alone_and_none_past_the_end() {
        let hashes = sequence(19, 0);
        let pool = stored(&hashes, 19);
        let domain = domain();
        let mut ahead = pool.prefetcher(&domain, hashes.view());
        assert!(ahead.head(0).is_some());
        assert_eq!(table(&ahead), (vec![0, 4, 8, 12], 0));
        assert!(ahead.head(4).is_some());
        assert_eq!(ahead.head(6), None, "no block begins there");
        assert_eq!(table(&ahead), (vec![0, 4, 8, 12], 2), "8 is kept");
        assert!(ahead.head(8).is_some());
        assert_eq!(ahead.head(17), None);
        assert_eq!(table(&ahead), (vec![17], 0), "20 is behind the end");
    }

    #[test]
    fn a_prefetched_head_is_not_looked_up_again() {
        let hashes = sequence(20, 0);
        let pool = stored(&hashes, 20);
        let domain = domain();
        let mut ahead = pool.prefetcher(&domain, hashes.view());
        assert!(ahead.head(0).is_some());
        assert!(ahead.head(4).is_some());
        ahead.found[1] = (8, None);
        assert_eq!(ahead.head(8), None, "the table says so");
    }
}
