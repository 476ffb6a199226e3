//! The part of a sequence that a store looks at: its own pages, and a bounded number of positions around them.
//!
//! A store names a few pages of a sequence that may have a hundred thousand. Those before and behind are looked at so that
//! they stay beside the stored ones: what is there is held or made young. Without a bound, each store would cost time in
//! proportion to the whole sequence.

use std::ops::Range;

use crate::core::ahead::Ahead;
use crate::core::anchor::Domain;
use crate::core::index::{Index, Want};
use crate::core::pool::{Pool, Run};
use crate::types::PageHashes;

/// Positions beside its own pages that a store looks at, at most: a sequence of 131,072 pages in blocks of 32.
pub const LOOKS_AROUND_MAX: u32 = 4096;
/// Positions beside its own pages at which a store finds nothing, at most. Where the prefix of a sequence was evicted, more
/// of them would find nothing either.
pub const MISSES_AROUND_MAX: u32 = 256;

/// Counts the positions that one store looks at.
#[derive(Debug)]
pub(super) struct Looks {
    /// The store's own pages, from the last multiple of the ratio before them on: no block crosses one.
    own: Range<u32>,
    around: u32,
    misses: u32,
    pub(super) all: u32,
}

impl Looks {
    pub(super) fn new(wanted: &Range<u32>, ratio: u32) -> Self {
        Self {
            own: wanted.start / ratio * ratio..wanted.end,
            around: 0,
            misses: 0,
            all: 0,
        }
    }

    /// The next position to look at, from `position` on: that one, or, when enough was looked at before the store's own
    /// pages, the first of those.
    pub(super) fn next(&self, position: u32) -> Option<u32> {
        let enough = self.around >= LOOKS_AROUND_MAX || self.misses >= MISSES_AROUND_MAX;
        match enough {
            true if position < self.own.start => Some(self.own.start),
            true if position >= self.own.end => None,
            _ => Some(position),
        }
    }

    /// Notes a look at a position and whether a block was found there.
    pub(super) fn note(&mut self, position: u32, found: bool) {
        self.all += 1;
        if !self.own.contains(&position) {
            self.around += 1;
            self.misses += u32::from(!found);
        }
    }
}

impl Pool {
    /// Follows a sequence past missing pages, looks at the pages in `wanted` and at a bounded number of positions around
    /// them, and appends the runs that can be read. Returns how many positions were looked at.
    pub fn walk_around(
        &self,
        domain: &Domain,
        hashes: &PageHashes,
        wanted: &Range<u32>,
        runs: &mut Vec<Run>,
    ) -> u32 {
        let mut looks = Looks::new(wanted, self.ratio);
        let mut ahead = Ahead::new(self, domain, hashes);
        let mut position = 0;
        while (position as usize) < hashes.len()
            && let Some(at) = looks.next(position)
        {
            let found = ahead.head(at as usize).and_then(|head| {
                let want = Want::Readable;
                Index::longest(&self.blocks, domain.id(), head, hashes, at as usize, want)
            });
            looks.note(at, found.is_some());
            position = at + found.map_or(1, |found| found.pages);
            if let Some(found) = found.filter(|found| found.ready > 0) {
                runs.push(Run {
                    position: at,
                    block: found.block,
                    pages: found.ready,
                });
            }
        }
        looks.all
    }
}
