//! Places of pages that failed on the disk of a shard. Page numbers are the same on every rank, so a place that fails on
//! one of them is taken out of the arena, until the tier is opened anew.

use std::collections::BTreeSet;

use super::Pool;
use crate::Contradiction;
use kvferry_types::{QUARANTINED_PAGES_MAX, TransferId};

/// The places of a tier that failed, at most [`QUARANTINED_PAGES_MAX`].
#[derive(Debug, Default)]
pub(super) struct FaultyPlaces {
    /// Pages that a block still has. They leave the arena when the block frees them.
    held: BTreeSet<u32>,
    /// Pages that are not part of the arena any longer.
    out: BTreeSet<u32>,
}

impl Pool {
    /// Keeps the place of a page of some block from being used again: when the block frees the page, it is not free.
    /// Returns whether the place was noted.
    pub(crate) fn quarantine_place(&mut self, page: u32) -> bool {
        let faults = &mut self.faults;
        let room = faults.held.len() + faults.out.len() < QUARANTINED_PAGES_MAX;
        room && !faults.out.contains(&page) && faults.held.insert(page)
    }

    /// Like [`Self::quarantine_place`], of page `index` of the pages that a transfer fills.
    pub(crate) fn quarantine_filled(&mut self, transfer: TransferId, index: u32) -> bool {
        let Some(reservation) = self.reservations.get(&transfer) else {
            return false;
        };
        // A worker may report any index.
        if index >= reservation.pages {
            return false;
        }
        let block = self.blocks.get(reservation.block);
        let page = block.start + u32::from(block.ready) + index;
        self.quarantine_place(page)
    }

    /// Number of places that failed and are out of use, or will be when their block frees them.
    pub fn quarantined_places(&self) -> u32 {
        u32::try_from(self.faults.held.len() + self.faults.out.len()).unwrap_or(u32::MAX)
    }

    /// Pages that are not part of the arena any longer.
    pub(super) fn pages_out(&self) -> u32 {
        u32::try_from(self.faults.out.len()).unwrap_or(u32::MAX)
    }

    /// Frees pages of a block, without those whose place failed.
    pub(super) fn release(&mut self, start: u32, count: u32) {
        let end = start + count;
        let faulty: Vec<u32> = self.faults.held.range(start..end).copied().collect();
        let mut from = start;
        for page in faulty {
            self.faults.held.remove(&page);
            self.faults.out.insert(page);
            if page > from {
                self.arena.release(from, page - from);
            }
            from = page + 1;
        }
        if end > from {
            self.arena.release(from, end - from);
        }
    }

    /// The places that are out of the arena, as spans of one page.
    pub fn spans_out(&self) -> impl Iterator<Item = (u32, u32)> {
        self.faults.out.iter().map(|page| (*page, 1))
    }

    /// Checks that each place that still has to leave the arena lies in a block. `Err` names the first contradiction.
    pub(crate) fn check_faults(&self) -> Result<(), Contradiction> {
        let held_by = |page: u32| {
            self.blocks
                .by_age()
                .any(|(_, block)| (block.start..block.start + block.total_pages()).contains(&page))
        };
        match self.faults.held.iter().find(|page| !held_by(**page)) {
            None => Ok(()),
            Some(page) => Err(format!("page {page} failed, and no block has it").into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_types::Ratio;

    /// Frees a run that no block has.
    fn freed(pool: &mut Pool, start: u32, count: u32) {
        pool.release(start, count);
        assert_eq!(pool.check(), Ok(()));
    }

    #[test]
    fn places_leave_the_arena_when_they_are_freed_up_to_the_limit() {
        let pages = 2 * QUARANTINED_PAGES_MAX as u32;
        let mut pool = Pool::new(pages, Ratio::new(8).expect("in bounds"));
        assert_eq!(pool.arena.alloc(pages), Some(0));
        for page in [3, 4, 7, 9] {
            assert!(pool.quarantine_place(page));
        }
        assert!(!pool.quarantine_place(3), "it is known");
        let why = pool.check_faults().expect_err("no block has it");
        assert_eq!(why.to_string(), "page 3 failed, and no block has it");
        for (start, count) in [(0, 4), (4, 4), (8, pages - 8)] {
            pool.release(start, count);
        }
        assert_eq!(pool.check(), Ok(()));
        let holes = [(0, 3), (5, 2), (8, 1), (10, pages - 10)];
        assert_eq!(pool.arena.holes(), holes);
        assert_eq!(pool.page_states().out_of_use, 4);
        for page in 10..pages {
            let room = page < 10 + QUARANTINED_PAGES_MAX as u32 - 4;
            assert_eq!(pool.quarantine_place(page), room, "page {page}");
        }
        assert!(!pool.quarantine_place(3), "it is out");
        assert_eq!(pool.arena.alloc(pages - 10), Some(10));
        freed(&mut pool, 10, pages - 10);
        assert_eq!(
            pool.page_states().out_of_use as usize,
            QUARANTINED_PAGES_MAX
        );
        assert_eq!(pool.quarantined_places() as usize, QUARANTINED_PAGES_MAX);
    }
}
