//! Where a walk will look next, looked up early: one after another, each look would wait for memory several times.

use crate::core::anchor::Domain;
use crate::core::blocks::BlockIndex;
use crate::core::pool::Pool;
use crate::types::{Anchor, PageHashes};

/// Most positions that are looked up together.
const AHEAD_MAX: usize = 16;

/// Heads of the blocks at a few positions of a sequence.
///
/// Blocks mostly begin at multiples of the ratio, so these are the positions behind the one that is asked for. Their looks
/// do not wait for each other, so that the machine has several of them under way at a time. As long as blocks are found,
/// more and more positions are taken together; a walk that ends at once looks no further than it must.
pub(super) struct Ahead<'a> {
    pool: &'a Pool,
    domain: &'a Domain,
    hashes: &'a PageHashes,
    found: [(usize, Option<BlockIndex>); AHEAD_MAX],
    used: usize,
    filled: usize,
    next_fill: usize,
}

impl<'a> Ahead<'a> {
    pub(super) fn new(pool: &'a Pool, domain: &'a Domain, hashes: &'a PageHashes) -> Self {
        Self {
            pool,
            domain,
            hashes,
            found: [(0, None); AHEAD_MAX],
            used: 0,
            filled: 0,
            next_fill: 1,
        }
    }

    /// The first block under the anchor of `position`. Positions are asked for in ascending order.
    pub(super) fn head(&mut self, position: usize) -> Option<BlockIndex> {
        let passed = self.found[self.used..self.filled]
            .iter()
            .take_while(|(at, _)| *at < position);
        self.used += passed.count();
        if self.used == self.filled {
            self.fill(position);
        }
        match self.found[self.used] {
            (at, head) if at == position => head,
            _ => self.look(self.domain.anchor(self.hashes, position)),
        }
    }

    fn fill(&mut self, position: usize) {
        let ratio = self.pool.ratio as usize;
        let mut anchors = [Anchor::default(); AHEAD_MAX];
        let mut at = position;
        (self.used, self.filled) = (0, 0);
        while self.filled < self.next_fill && at < self.hashes.len() {
            self.found[self.filled].0 = at;
            anchors[self.filled] = self.domain.anchor(self.hashes, at);
            at = (at / ratio + 1) * ratio;
            self.filled += 1;
        }
        for (index, anchor) in anchors[..self.filled].iter().enumerate() {
            self.found[index].1 = self.look(*anchor);
        }
        for (_, head) in &self.found[..self.filled] {
            if let Some(head) = head {
                self.pool.blocks.read_ahead(*head);
            }
        }
        self.next_fill = (self.next_fill * 2).min(AHEAD_MAX);
    }

    fn look(&self, anchor: Anchor) -> Option<BlockIndex> {
        self.pool.index.head(&self.pool.blocks, anchor)
    }
}
