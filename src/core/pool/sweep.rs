//! Sweeps over the blocks of a pool in slices, for a reset: counts the holders of the reset's blocks, then forgets the
//! blocks.
//!
//! A sweep takes as many slices as the pool needs, and other requests are served between slices. From the beginning of
//! the sweep, the blocks in its scope are hidden: lookups do not find them, so that no block that was counted as free
//! can be pinned, and no page is served that the reset is going to forget. Blocks created later are not in scope.

use std::collections::BTreeMap;

use crate::index::blocks::{BlockIndex, Blocks, Hidden};
use crate::pool::Pool;
use crate::pool::changes::GoneReason;
use kvferry_types::{Scope, TransferId};

/// A walk over the slab of a pool that resumes where its last slice ended. Valid only for the pool that began it.
#[derive(Debug)]
pub struct Sweep {
    hidden: Hidden,
    next: BlockIndex,
    end: BlockIndex,
}

impl Sweep {
    /// True if every block was examined.
    pub fn is_over(&self) -> bool {
        self.next >= self.end
    }

    /// Restarts the walk at the first block.
    pub fn again(&mut self) {
        self.next = 0;
    }

    /// Returns the next block in scope and subtracts the cost of the walk from `budget`: of each page with `by_page`.
    /// Returns `None` at the end of the sweep or of the budget.
    fn next(&mut self, blocks: &Blocks, by_page: bool, budget: &mut u32) -> Option<BlockIndex> {
        while *budget > 0 && !self.is_over() {
            let index = self.next;
            self.next += 1;
            let Some(block) = blocks.at(index) else {
                *budget -= 1;
                continue;
            };
            let cost = match self.hidden.scope() {
                Scope::Pages(namespace, _) if *namespace == block.domain.namespace() => {
                    block.total_pages()
                }
                _ if by_page => block.total_pages(),
                _ => 1,
            };
            *budget = budget.saturating_sub(cost.max(1));
            let counts = !block.retired || block.filling().is_some();
            if counts && self.hidden.contains(blocks, block) {
                return Some(index);
            }
        }
        None
    }
}

impl Pool {
    /// Hides the blocks that hold a page of `scope`, and begins a walk over them.
    pub fn begin_sweep(&mut self, scope: Scope) -> Sweep {
        let end = self.blocks.places();
        Sweep {
            hidden: self.blocks.hide(scope),
            next: 0,
            end,
        }
    }

    /// Stops hiding the blocks of this sweep.
    pub fn end_sweep(&mut self, sweep: &Sweep) {
        self.blocks.show(&sweep.hidden);
    }

    /// Counts the holders of the next blocks in scope, without those of `moves`, by block. Examines at most `budget` pages
    /// and one block.
    pub fn count_holders(
        &self,
        sweep: &mut Sweep,
        budget: &mut u32,
        moves: &BTreeMap<BlockIndex, u32>,
    ) -> u64 {
        let mut holders = 0;
        while let Some(index) = sweep.next(&self.blocks, false, budget) {
            let block = self.blocks.get(index);
            holders += if block.retired {
                0
            } else {
                let moves = moves.get(&index).copied().unwrap_or(0);
                u64::from(block.pins.saturating_sub(moves))
            };
        }
        holders
    }

    /// Forgets the next blocks in scope, so that no lookup finds one. Examines at most `budget` pages and one block,
    /// and returns the number of pages forgotten. Filling pages are freed when their copies have ended. Their
    /// transfers are appended, including those of blocks that an earlier reset has forgotten, because their copies
    /// may still add pages to the inventory.
    pub fn remove_next(
        &mut self,
        sweep: &mut Sweep,
        budget: &mut u32,
        filling: &mut Vec<TransferId>,
    ) -> u32 {
        let mut pages = 0;
        let by_page = self.has_page_index();
        while let Some(index) = sweep.next(&self.blocks, by_page, budget) {
            let block = self.blocks.get(index);
            pages += if block.retired {
                0
            } else {
                block.total_pages()
            };
            filling.extend(block.filling().map(|filling| filling.transfer));
            self.retire_block(index, GoneReason::Reset);
        }
        pages
    }
}
