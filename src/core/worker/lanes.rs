//! Copies that are ready to run. Each direction has its own queue and its own limit, so that a load never waits for
//! stores.

use std::collections::VecDeque;

use kvferry_types::{Direction, TransferId};

/// The copies of one direction.
#[derive(Debug, Default)]
struct Lane {
    /// Copies in the order in which they became ready. A stopped copy stays until [`Lanes::clean`].
    queue: VecDeque<TransferId>,
    running: usize,
}

/// The lanes of both directions.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    loads: Lane,
    stores: Lane,
}

impl Lanes {
    fn of(&mut self, direction: Direction) -> &mut Lane {
        match direction {
            Direction::Load => &mut self.loads,
            Direction::Store => &mut self.stores,
        }
    }

    /// Appends a copy that is ready.
    pub(super) fn push(&mut self, direction: Direction, transfer: TransferId) {
        self.of(direction).queue.push_back(transfer);
    }

    /// Removes the oldest entry of a direction's queue, if fewer than `running_max` of its copies run.
    pub(super) fn pop(&mut self, direction: Direction, running_max: usize) -> Option<TransferId> {
        let lane = self.of(direction);
        if lane.running >= running_max {
            return None;
        }
        lane.queue.pop_front()
    }

    /// Counts a copy that starts to run.
    pub(super) fn started(&mut self, direction: Direction) {
        self.of(direction).running += 1;
    }

    /// Counts the end of a running copy.
    pub(super) fn ended(&mut self, direction: Direction) {
        self.of(direction).running -= 1;
    }

    /// Entries of a direction's queue.
    #[cfg(test)]
    pub(super) fn entries(&self, direction: Direction) -> usize {
        match direction {
            Direction::Load => self.loads.queue.len(),
            Direction::Store => self.stores.queue.len(),
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
    pub(super) fn clean(&mut self, copies: usize, queued: impl Fn(TransferId) -> bool) {
        const FEW: usize = 64;
        for lane in [&mut self.loads, &mut self.stores] {
            if lane.queue.len() > 2 * copies + FEW {
                lane.queue.retain(|transfer| queued(*transfer));
            }
        }
    }
}
