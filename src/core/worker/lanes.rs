//! Copies that may run and wait for a place: each direction has a queue and places of its own, so that a load never waits
//! for stores.

use std::collections::VecDeque;

use crate::types::{Direction, OpId};

/// One direction.
#[derive(Debug, Default)]
pub(super) struct Lane {
    /// Copies in the order in which they became ready. One that was stopped stays until [`Lanes::clean`].
    pub(super) queue: VecDeque<OpId>,
    pub(super) running: usize,
}

/// Both directions.
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

    /// Drops queued copies that are not queued any more, once they are more than half of all: a queue holds at most twice
    /// as many as there are copies, and a few.
    pub(super) fn clean(&mut self, copies: usize, queued: impl Fn(OpId) -> bool) {
        const FEW: usize = 64;
        for lane in [&mut self.loads, &mut self.stores] {
            if lane.queue.len() > 2 * copies + FEW {
                lane.queue.retain(|op| queued(*op));
            }
        }
    }
}
