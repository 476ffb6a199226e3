//! The blocks at the beginning of a sequence, as the last walk found them.
//!
//! A sequence that grows is walked again with each store. Its first blocks are the same each time, so a walk takes them
//! from here and queries the index only for the rest. A block that changed since has another version, and ends the part
//! that can be used.

use crate::index::block_index::Match;
use crate::index::blocks::{BlockIndex, Blocks};

/// A block that holds the next pages of a sequence: all of its pages, all of them readable.
#[derive(Debug, Clone, Copy)]
struct TrailBlock {
    block: BlockIndex,
    /// Version of the block in which it was found.
    version: u32,
    /// Position after its last page.
    end: u32,
}

/// The blocks of a sequence from its first page on, without gaps, in host memory. Must be cleared when the pool is
/// closed. 12 bytes for each block.
#[derive(Debug, Default)]
pub struct Trail(Vec<TrailBlock>);

impl Trail {
    /// Forgets all blocks.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Follows the blocks from the first page on.
    pub(crate) fn follow(&self, blocks: &Blocks) -> Steps<'_> {
        // A hidden block is passed over although it has not changed.
        let usable = !blocks.any_hidden();
        Steps {
            blocks: if usable { &self.0 } else { &[] },
            passed: 0,
            position: 0,
        }
    }

    /// Keeps the first `steps` blocks.
    pub(crate) fn truncate(&mut self, steps: usize) {
        self.0.truncate(steps);
    }

    /// Adds a block that was found at `position`, if it continues the blocks so far. `head` is the first block under its
    /// anchor: only a block that has no siblings can be followed without comparing them.
    pub(crate) fn add(&mut self, blocks: &Blocks, position: u32, head: BlockIndex, found: Match) {
        let end = self.0.last().map_or(0, |last| last.end);
        let block = blocks.get(found.block);
        let whole = found.pages == found.ready && found.pages == block.total_pages();
        let alone = head == found.block && block.is_last_sibling();
        if position == end && whole && alone && !blocks.any_hidden() {
            self.0.push(TrailBlock {
                block: found.block,
                version: blocks.version(found.block),
                end: end + found.pages,
            });
        }
    }
}

/// A walk along a [`Trail`].
#[derive(Debug)]
pub(crate) struct Steps<'a> {
    blocks: &'a [TrailBlock],
    /// Blocks that were passed.
    pub(crate) passed: usize,
    position: u32,
}

impl Steps<'_> {
    /// The block at `position` of a sequence of `len` pages, if the trail has reached that position and the block has not
    /// changed.
    pub(crate) fn next(&mut self, blocks: &Blocks, position: u32, len: u32) -> Option<Match> {
        let next = self.blocks.get(self.passed)?;
        let valid = next.end <= len && blocks.version(next.block) == next.version;
        if position != self.position || !valid {
            self.blocks = &[];
            return None;
        }
        let pages = next.end - position;
        self.passed += 1;
        self.position = next.end;
        Some(Match {
            block: next.block,
            offset: 0,
            pages,
            ready: pages,
        })
    }
}
