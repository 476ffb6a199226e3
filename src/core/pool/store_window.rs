//! The part of a sequence that a store examines: its own pages, and a bounded number of positions around them.
//!
//! A store names a few pages of a sequence that may have a hundred thousand. The pages before and after its own are
//! examined so that they remain in the pool together with the stored ones: blocks found there are held or made recently
//! used. Without a bound, each store would take time in proportion to the whole sequence.

use std::ops::Range;

use crate::index::anchor::Domain;
use crate::index::block_index::{Index, Match, MatchGoal};
use crate::index::blocks::BlockIndex;
use crate::index::sequence_cursor::Trail;
use crate::pool::{BlockRun, Pool};
use kvferry_types::HashView;
use smallvec::SmallVec;

/// Most positions outside its own pages that a store examines: a sequence of 131,072 pages in blocks of 32.
pub const LOOKS_AROUND_MAX: u32 = 4096;
/// Most positions outside its own pages at which a store finds nothing. Where the prefix of a sequence was evicted,
/// further positions would find nothing either.
pub const MISSES_AROUND_MAX: u32 = 256;

/// How many positions outside its own pages one store has examined so far, in all of its parts.
#[derive(Debug, Clone, Copy, Default)]
pub struct LooksAround {
    looks: u32,
    misses: u32,
}

impl LooksAround {
    fn is_over(self) -> bool {
        self.looks >= LOOKS_AROUND_MAX || self.misses >= MISSES_AROUND_MAX
    }
}

/// Counts the positions that one part of a store examines.
#[derive(Debug)]
pub(crate) struct Looks<'a> {
    /// The part's own pages, starting at the last multiple of the ratio at or before them, because no block crosses
    /// one.
    own: Range<u32>,
    around: &'a mut LooksAround,
    pub(crate) all: u32,
}

impl<'a> Looks<'a> {
    pub(crate) fn new(wanted: &Range<u32>, ratio: u32, around: &'a mut LooksAround) -> Self {
        Self {
            own: wanted.start / ratio * ratio..wanted.end,
            around,
            all: 0,
        }
    }

    /// The first of the store's own pages, with the pages before them that may lie in the same block.
    pub(crate) fn own_start(&self) -> u32 {
        self.own.start
    }

    /// Returns the next position to examine, at or after `position`. Once a limit is reached, positions before the
    /// store's own pages are skipped, and positions after them end the walk with `None`.
    pub(crate) fn next(&self, position: u32) -> Option<u32> {
        match self.around.is_over() {
            true if position < self.own.start => Some(self.own.start),
            true if position >= self.own.end => None,
            _ => Some(position),
        }
    }

    /// Counts a position as examined, and whether a block was found there.
    pub(crate) fn note(&mut self, position: u32, found: bool) {
        self.all += 1;
        if !self.own.contains(&position) {
            self.around.looks += 1;
            self.around.misses += u32::from(!found);
        }
    }
}

impl Pool {
    /// Follows a sequence past missing pages, examines the pages in `wanted` and a bounded number of positions around
    /// them, and appends the readable runs. `around` bounds these positions over all parts of a store. Takes the first
    /// blocks from the trail as far as they have not changed, and extends it. Returns the number of positions examined.
    pub fn walk_around(
        &self,
        domain: &Domain,
        hashes: HashView<'_>,
        wanted: &Range<u32>,
        (trail, around): (&mut Trail, &mut LooksAround),
        runs: &mut Vec<BlockRun>,
    ) -> u32 {
        let len = u32::try_from(hashes.len()).unwrap_or(u32::MAX);
        let mut steps = trail.follow(&self.blocks);
        let mut further: SmallVec<[(u32, BlockIndex, Match); 8]> = SmallVec::new();
        let mut looks = Looks::new(wanted, self.ratio, around);
        let mut ahead = self.prefetcher(domain, hashes);
        // Without looks left, the walk skips the blocks that the trail knows.
        let from_first = looks.next(0) == Some(0);
        let mut position = 0;
        while position < len
            && let Some(at) = looks.next(position)
        {
            let want = MatchGoal::Readable;
            let found = steps.next(&self.blocks, at, len).or_else(|| {
                let head = ahead.head(at as usize)?;
                let found =
                    Index::longest(&self.blocks, domain.id(), head, hashes, at as usize, want)?;
                further.push((at, head, found));
                Some(found)
            });
            let found = self.or_inside(found, domain, hashes, at as usize, want);
            if let Some(found) = found.filter(|found| found.offset > 0 || at == 0) {
                ahead.align(at, self.phase_of(found));
            }
            looks.note(at, found.is_some());
            position = at + found.map_or(1, |found| found.pages);
            if let Some(found) = found.filter(|found| found.ready > 0) {
                runs.push(BlockRun::readable(at, found));
            }
        }
        let passed = steps.passed;
        if from_first {
            trail.truncate(passed);
        }
        for (position, head, found) in further {
            trail.add(&self.blocks, position, head, found);
        }
        looks.all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::tests::{domain, sequence, stored};

    #[test]
    fn the_pages_of_a_store_are_examined_whatever_was_found_around_them() {
        let mut around = LooksAround::default();
        let mut looks = Looks::new(&(1002..1010), 4, &mut around);
        for position in 0..MISSES_AROUND_MAX {
            assert_eq!(looks.next(position), Some(position));
            looks.note(position, false);
        }
        assert_eq!(looks.next(MISSES_AROUND_MAX), Some(1000));
        assert_eq!(looks.next(1000), Some(1000));
        assert_eq!(looks.next(1009), Some(1009));
        assert_eq!(looks.next(1010), None);
        assert_eq!(looks.all, MISSES_AROUND_MAX);
        let next = Looks::new(&(2000..2001), 4, &mut around);
        assert_eq!(next.next(0), Some(2000), "the next part has the rest");

        let mut around = LooksAround::default();
        let mut looks = Looks::new(&(0..2), 4, &mut around);
        for position in 0..MISSES_AROUND_MAX + 1 {
            looks.note(position, false);
        }
        assert_eq!(looks.next(1000), Some(1000), "its own pages do not count");
        for position in 0..LOOKS_AROUND_MAX {
            looks.note(position + 2, true);
        }
        assert_eq!(looks.next(1000), None);
    }

    #[test]
    fn a_walk_around_a_store_finds_the_blocks_before_and_after_it() {
        let hashes = sequence(12, 0);
        let pool = stored(&hashes, 40);
        let mut runs = Vec::new();
        assert_eq!(
            pool.walk_around(
                &domain(),
                hashes.view(),
                &(4..8),
                (&mut Trail::default(), &mut LooksAround::default()),
                &mut runs
            ),
            3
        );
        let found: Vec<_> = runs.iter().map(|run| (run.position, run.pages)).collect();
        assert_eq!(found, [(0, 4), (4, 4), (8, 4)]);
    }
}
