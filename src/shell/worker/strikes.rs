//! Removes the pages of a reset from the inventory slice by slice: a reset visits every slot of a depot, and copies
//! must be able to start and end between two slices.

use std::collections::VecDeque;
use std::fmt;

use super::{Fatal, WorkerHost, WorkerShell};
use kvferry_core::{RESET_PAGES_OPEN_MAX, RESETS_OPEN_MAX};
use kvferry_protocol::{ErrorBody, ErrorCode, Message, Struck};
use kvferry_types::{RequestId, ResetId, Scope, Stored, Time};

/// Slots of the inventory that one slice of a reset visits: about 1 ms.
pub const STRIKE_SLICE_SLOTS: u32 = 8192;

/// Limit on waiting resets: as many as a leader has open at a time. A further reset is refused, and so is one whose
/// named pages exceed [`RESET_PAGES_OPEN_MAX`] together with those of the waiting resets.
///
/// Memory: 60 MiB of named pages, and less than 16 KiB besides. Time: a reset takes one slice for every 8,192 pages of
/// the depot. At a million pages that is about 0.13 s for one reset and 8 s for 64 of them, with copies in between. No
/// slice starts after the deadline of its reset, which is at most 120 s after the order.
const STRIKES_MAX: usize = RESETS_OPEN_MAX;

/// A reset whose pages are being removed from the inventory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Strike {
    id: ResetId,
    scope: Scope,
    /// The last store that the reset covers.
    through: Stored,
    /// The order that is answered when the reset is complete.
    order: RequestId,
    /// Time at which the leader gives the reset up.
    deadline: Time,
    /// The slot at which the next slice begins.
    next: u32,
}

/// Waiting resets, in the order of their arrival. A leader orders each reset once over one connection.
#[derive(Debug, Default)]
pub(super) struct Strikes {
    queue: VecDeque<Strike>,
    /// A call of [`WorkerShell::strike_on`] is scheduled.
    called: bool,
}

impl Strike {
    pub(super) fn new(
        id: ResetId,
        scope: Scope,
        through: Stored,
        order: RequestId,
        deadline: Time,
    ) -> Self {
        Self {
            id,
            scope,
            through,
            order,
            deadline,
            next: 0,
        }
    }
}

impl Strikes {
    /// Drops all resets when the leader that ordered them is gone: they are no longer answered.
    pub(super) fn clear(&mut self) {
        self.queue.clear();
    }

    /// Queues a reset, or refuses it when the queue is full. A reset that is already queued is answered once.
    fn push(&mut self, strike: Strike) -> Result<(), ErrorBody> {
        if self.queue.iter().any(|waiting| waiting.id == strike.id) {
            return Ok(());
        }
        let named = |strike: &Strike| strike.scope.named_pages();
        let pages = self.queue.iter().map(named).sum::<usize>() + named(&strike);
        if self.queue.len() >= STRIKES_MAX || pages > RESET_PAGES_OPEN_MAX {
            let text = format!(
                "{STRIKES_MAX} resets, or {RESET_PAGES_OPEN_MAX} pages that they name, wait to be struck out already: ask \
                 again later"
            );
            return Err(ErrorBody::new(ErrorCode::Limit, text));
        }
        self.queue.push_back(strike);
        Ok(())
    }

    /// Removes the resets whose deadline has passed, and returns them.
    fn take_overdue(&mut self, now: Time) -> VecDeque<Strike> {
        let (overdue, left) = std::mem::take(&mut self.queue)
            .into_iter()
            .partition(|strike| strike.deadline <= now);
        self.queue = left;
        overdue
    }
}

impl<P: fmt::Debug, M> WorkerShell<P, M> {
    /// Queues a reset that the leader orders, or refuses it.
    pub(super) fn strike<H: WorkerHost<Process = P, Memory = M>>(
        &mut self,
        host: &mut H,
        strike: Strike,
    ) -> Result<(), Fatal> {
        self.give_up_strikes(host);
        let order = strike.order;
        if let Err(error) = self.strikes.push(strike) {
            self.answer(host, order, Message::Error(error));
        }
        self.call_strike(host)
    }

    /// Refuses resets whose deadline has passed, also those that have begun: the leader has already answered that they
    /// are not confirmed.
    fn give_up_strikes<H: WorkerHost<Process = P, Memory = M>>(&mut self, host: &mut H) {
        for strike in self.strikes.take_overdue(host.now()) {
            let text = "the reset's deadline passed before its pages were struck out";
            let error = ErrorBody::new(ErrorCode::Deadline, text);
            self.answer(host, strike.order, Message::Error(error));
        }
    }

    fn call_strike<H: WorkerHost<Process = P, Memory = M>>(
        &mut self,
        host: &mut H,
    ) -> Result<(), Fatal> {
        if !self.strikes.queue.is_empty() && !self.strikes.called {
            self.strikes.called = true;
            host.strike_later()?;
        }
        Ok(())
    }

    /// Carries out one slice, and schedules the next one after the messages that wait by then.
    pub fn strike_on<H: WorkerHost<Process = P, Memory = M>>(
        &mut self,
        host: &mut H,
    ) -> Result<(), Fatal> {
        self.strikes.called = false;
        self.give_up_strikes(host);
        let Some(mut strike) = self.strikes.queue.pop_front() else {
            return Ok(());
        };
        match host.unlist_scope(&strike.scope, strike.through, strike.next)? {
            Some(next) => {
                strike.next = next;
                self.strikes.queue.push_front(strike);
            }
            None => {
                let body = Struck { reset: strike.id.0 };
                self.answer(host, strike.order, Message::Struck(body));
            }
        }
        self.call_strike(host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_types::{Epoch, Fingerprint, Generation, NamespaceId, PageSet};

    const THROUGH: Stored = Stored {
        epoch: Epoch(1),
        generation: Generation(9),
    };

    fn strike(id: u64, scope: Scope, deadline: u64) -> Strike {
        Strike::new(
            ResetId(id),
            scope,
            THROUGH,
            RequestId(100 + id),
            Time(deadline),
        )
    }

    fn code(refused: Result<(), ErrorBody>) -> Option<ErrorCode> {
        refused.err().map(|error| error.code())
    }

    #[test]
    fn resets_that_wait_are_bounded_in_number_and_in_named_pages() {
        let mut strikes = Strikes::default();
        for id in 0..STRIKES_MAX as u64 {
            assert_eq!(strikes.push(strike(id, Scope::Everything, 10)), Ok(()));
        }
        let more = strike(1000, Scope::Everything, 20);
        assert_eq!(code(strikes.push(more.clone())), Some(ErrorCode::Limit));
        assert_eq!(strikes.push(strike(3, Scope::Everything, 10)), Ok(()));
        assert_eq!(strikes.queue.len(), STRIKES_MAX, "asked for again");
        // Resets whose deadline has passed make room.
        assert_eq!(strikes.take_overdue(Time(10)).len(), STRIKES_MAX);
        assert_eq!(strikes.push(more), Ok(()));

        let mut strikes = Strikes::default();
        let pages: PageSet = (0..131_072).map(Fingerprint).collect();
        let pages = |_| Scope::Pages(NamespaceId(1), pages.clone());
        let most = (RESET_PAGES_OPEN_MAX / 131_072) as u64;
        for id in 0..most {
            assert_eq!(strikes.push(strike(id, pages(id), 10)), Ok(()));
        }
        let more = strikes.push(strike(most, pages(most), 10));
        assert_eq!(code(more), Some(ErrorCode::Limit));
        assert_eq!(strikes.push(strike(most, Scope::Everything, 10)), Ok(()));
    }

    #[test]
    fn resets_that_are_overdue_are_taken_out_and_the_others_keep_their_order() {
        let mut strikes = Strikes::default();
        for (id, deadline) in [(1, 30), (2, 10), (3, 20), (4, 40)] {
            let strike = strike(id, Scope::Everything, deadline);
            assert_eq!(strikes.push(strike), Ok(()));
        }
        let ids = |strikes: &VecDeque<Strike>| -> Vec<u64> {
            strikes.iter().map(|strike| strike.id.0).collect()
        };
        assert!(strikes.take_overdue(Time(9)).is_empty());
        assert_eq!(ids(&strikes.take_overdue(Time(20))), [2, 3]);
        assert_eq!(ids(&strikes.queue), [1, 4]);
    }
}
