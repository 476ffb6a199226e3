//! Looks at the blocks of a pool slice by slice, for a reset: counts who holds them, then forgets them.
//!
//! A sweep ends after as many slices as the pool needs, and other requests are served between two of them. From its
//! beginning on, the blocks that it means are hidden: nothing finds them, so nobody can begin to hold one that was counted
//! as free, and no page is served that the reset will have forgotten. Blocks that are made later are not meant.

use crate::core::blocks::{Block, BlockIndex, Blocks};
use crate::core::pool::Pool;
use crate::core::sabotage::{Bug, planted};
use crate::types::{Generation, Scope};

/// What a sweep hides while it lasts.
#[derive(Debug)]
pub(super) struct Hidden {
    number: u64,
    scope: Scope,
    /// The stamp of the youngest block that is meant.
    youngest: u64,
}

/// A walk over the slab of a pool, which goes on where its last slice ended. Valid for the pool that began it.
#[derive(Debug)]
pub struct Sweep {
    number: u64,
    scope: Scope,
    youngest: u64,
    next: BlockIndex,
    end: BlockIndex,
}

impl Sweep {
    /// True when every block was looked at.
    pub fn is_over(&self) -> bool {
        self.next >= self.end
    }

    /// Looks at every block once more, from the first on.
    pub fn again(&mut self) {
        self.next = 0;
    }

    /// The next block that is meant, with what its look costs taken off `budget`; `None` at the end of the sweep or of
    /// the budget.
    fn next(&mut self, blocks: &Blocks, budget: &mut u32) -> Option<BlockIndex> {
        while *budget > 0 && !self.is_over() {
            let index = self.next;
            self.next += 1;
            let Some(block) = blocks.at(index) else {
                *budget -= 1;
                continue;
            };
            let cost = match &self.scope {
                Scope::Pages(namespace, _) if *namespace == block.domain.namespace() => {
                    block.total_pages()
                }
                _ => 1,
            };
            *budget = budget.saturating_sub(cost.max(1));
            let counts = !block.retired || block.filling.is_some();
            if counts && meant(blocks, block, &self.scope, self.youngest) {
                return Some(index);
            }
        }
        None
    }
}

fn meant(blocks: &Blocks, block: &Block, scope: &Scope, youngest: u64) -> bool {
    block.stamp <= youngest
        && scope.meets(
            block.domain,
            blocks.fingerprints(block.start, block.total_pages()),
        )
}

impl Blocks {
    /// True when a sweep hides this block: it will be forgotten, or is held and will be found again.
    pub(super) fn is_hidden(&self, block: &Block) -> bool {
        let mut hidden = self.hidden.iter();
        hidden.any(|hidden| meant(self, block, &hidden.scope, hidden.youngest))
    }
}

impl Pool {
    /// Hides the blocks that hold a page of `scope` and begins a walk over them.
    pub fn begin_sweep(&mut self, scope: Scope) -> Sweep {
        let (end, youngest) = (self.blocks.places(), self.blocks.youngest());
        self.blocks.sweeps += 1;
        let number = self.blocks.sweeps;
        self.blocks.hidden.push(Hidden {
            number,
            scope: scope.clone(),
            youngest,
        });
        Sweep {
            number,
            scope,
            youngest,
            next: 0,
            end,
        }
    }

    /// Hides nothing for this sweep any more.
    pub fn end_sweep(&mut self, sweep: &Sweep) {
        self.blocks
            .hidden
            .retain(|hidden| hidden.number != sweep.number);
    }

    /// Counts the holders of the next blocks that are meant. Looks at no more than `budget` pages and one block.
    pub fn count_holders(&self, sweep: &mut Sweep, budget: &mut u32) -> u64 {
        let mut holders = 0;
        while let Some(index) = sweep.next(&self.blocks, budget) {
            let block = self.blocks.get(index);
            holders += if block.retired {
                0
            } else {
                u64::from(block.pins)
            };
        }
        holders
    }

    /// Forgets the next blocks that are meant: none is found any more. Looks at no more than `budget` pages and one block.
    /// Returns the number of pages that are forgotten. What is filling is freed when its copies have ended; the generations
    /// of those are appended, also of blocks that an earlier reset has forgotten: their copies may still list pages.
    pub fn forget_next(
        &mut self,
        sweep: &mut Sweep,
        budget: &mut u32,
        filling: &mut Vec<Generation>,
    ) -> u32 {
        let mut pages = 0;
        while let Some(index) = sweep.next(&self.blocks, budget) {
            let block = self.blocks.get(index);
            pages += if block.retired {
                0
            } else {
                block.total_pages()
            };
            filling.extend(block.filling.map(|filling| filling.generation));
            if !(planted(Bug::ResetSkipsInFlight) && block.filling.is_some()) {
                self.retire_block(index);
            }
        }
        pages
    }
}
