//! Copies that are ready to run. Each direction has its own queue and its own limit, so that a load never waits for
//! stores.

use std::collections::VecDeque;

use kvferry_types::{Direction, OpId};

/// The copies of one direction.
#[derive(Debug, Default)]
pub(super) struct Lane {
    /// Copies in the order in which they became ready. A stopped copy stays until [`Lanes::clean`].
    pub(super) queue: VecDeque<OpId>,
    pub(super) running: usize,
}

/// The lanes of both directions.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    loads: Lane,
    stores: Lane,
}

impl Lanes {
    pub(super) fn of(&mut self, direction: Direction) -> &mut Lane {
        match direction {
            Direction::Load => &mut self.loads,
            Direction::Store => &mut self.stores,
        }
    }

    /// Number of running copies of a direction.
    pub(super) fn running(&self, direction: Direction) -> usize {
        match direction {
            Direction::Load => self.loads.running,
            Direction::Store => self.stores.running,
        }
    }

    /// Drops entries of copies that are no longer queued, once a queue has more than twice as many entries as there are
    /// copies, plus 64.
    pub(super) fn clean(&mut self, copies: usize, queued: impl Fn(OpId) -> bool) {
        const FEW: usize = 64;
        for lane in [&mut self.loads, &mut self.stores] {
            if lane.queue.len() > 2 * copies + FEW {
                lane.queue.retain(|op| queued(*op));
            }
        }
    }
}
