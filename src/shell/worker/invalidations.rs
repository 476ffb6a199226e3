//! Removes the pages of a reset from the inventory slice by slice: a reset visits every entry of a depot, and copies
//! must be able to start and end between two slices.

use std::collections::VecDeque;
use std::fmt;

use super::{Fatal, Unlisted, WorkerHost, WorkerShell};
use kvferry_core::{RESET_PAGES_OPEN_MAX, RESETS_OPEN_MAX};
use kvferry_protocol::{ErrorBody, ErrorCode, Invalidated, Message};
use kvferry_types::{RequestId, ResetId, Scope, Stored, TierId, Time};

/// Entries of the inventory that one slice of a reset visits: about 1 ms.
pub const INVALIDATE_SLICE_ENTRIES: u32 = 8192;

/// Limit on waiting resets: as many as a leader has open at a time. A further reset is refused, and so is one whose
/// named pages exceed [`RESET_PAGES_OPEN_MAX`] together with those of the waiting resets.
///
/// Memory: 60 MiB of named pages, and less than 16 KiB besides. Time: a reset takes one slice for every 8,192 pages of
/// the depot. At a million pages that is about 0.13 s for one reset and 8 s for 64 of them, with copies in between. No
/// slice starts after the deadline of its reset, which is at most 120 s after the order.
const INVALIDATIONS_MAX: usize = RESETS_OPEN_MAX;

/// A reset whose pages are being removed from the inventory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PendingInvalidation {
    id: ResetId,
    scope: Scope,
    /// The only tier that the reset covers; `None` for all of them.
    only: Option<TierId>,
    /// The last store that the reset covers.
    through: Stored,
    /// The order that is answered when the reset is complete.
    order: RequestId,
    /// Time at which the leader gives the reset up.
    deadline: Time,
    /// The tier and the entry at which the next slice begins.
    next: (TierId, u32),
}

/// Waiting resets, in the order of their arrival. A leader orders each reset once over one connection.
#[derive(Debug, Default)]
pub(super) struct Invalidations {
    queue: VecDeque<PendingInvalidation>,
    /// A call of [`WorkerShell::continue_invalidations`] is scheduled.
    called: bool,
}

impl PendingInvalidation {
    pub(super) fn new(
        id: ResetId,
        (scope, only): (Scope, Option<TierId>),
        through: Stored,
        order: RequestId,
        deadline: Time,
    ) -> Self {
        Self {
            id,
            scope,
            only,
            through,
            order,
            deadline,
            next: (only.unwrap_or(TierId::Host), 0),
        }
    }
}

impl Invalidations {
    /// Drops all resets when the leader that ordered them is gone: they are no longer answered.
    pub(super) fn clear(&mut self) {
        self.queue.clear();
    }

    /// Queues a reset, or refuses it when the queue is full. A reset that is already queued is answered once.
    fn push(&mut self, invalidate: PendingInvalidation) -> Result<(), ErrorBody> {
        if self.queue.iter().any(|waiting| waiting.id == invalidate.id) {
            return Ok(());
        }
        let named = |invalidate: &PendingInvalidation| invalidate.scope.named_pages();
        let pages = self.queue.iter().map(named).sum::<usize>() + named(&invalidate);
        if self.queue.len() >= INVALIDATIONS_MAX || pages > RESET_PAGES_OPEN_MAX {
            let text = format!(
                "{INVALIDATIONS_MAX} resets, or {RESET_PAGES_OPEN_MAX} pages that they name, wait to be removed already: retry \
                 later"
            );
            return Err(ErrorBody::new(ErrorCode::Limit, text));
        }
        self.queue.push_back(invalidate);
        Ok(())
    }

    /// Removes the resets whose deadline has passed, and returns them.
    fn take_overdue(&mut self, now: Time) -> VecDeque<PendingInvalidation> {
        let (overdue, left) = std::mem::take(&mut self.queue)
            .into_iter()
            .partition(|invalidate| invalidate.deadline <= now);
        self.queue = left;
        overdue
    }
}

impl<P: fmt::Debug, M> WorkerShell<P, M> {
    /// Queues a reset that the leader orders, or refuses it.
    pub(super) fn invalidate(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        invalidate: PendingInvalidation,
    ) -> Result<(), Fatal> {
        self.give_up_invalidations(host);
        let order = invalidate.order;
        if let Err(error) = self.invalidations.push(invalidate) {
            self.answer(host, order, Message::Error(error));
        }
        self.call_invalidate(host)
    }

    /// Refuses resets whose deadline has passed, also those that have begun: the leader has already answered that they
    /// are not confirmed.
    fn give_up_invalidations(&mut self, host: &mut dyn WorkerHost<Process = P, Memory = M>) {
        for invalidate in self.invalidations.take_overdue(host.now()) {
            let text = "the reset's deadline passed before its pages were removed";
            let error = ErrorBody::new(ErrorCode::Deadline, text);
            self.answer(host, invalidate.order, Message::Error(error));
        }
    }

    fn call_invalidate(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
    ) -> Result<(), Fatal> {
        if !self.invalidations.queue.is_empty() && !self.invalidations.called {
            self.invalidations.called = true;
            host.invalidate_later()?;
        }
        Ok(())
    }

    /// Carries out one slice, and schedules the next one after the messages that wait by then.
    pub fn continue_invalidations(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
    ) -> Result<(), Fatal> {
        self.invalidations.called = false;
        self.give_up_invalidations(host);
        let Some(mut invalidate) = self.invalidations.queue.pop_front() else {
            return Ok(());
        };
        let (tier, from) = invalidate.next;
        let depots = host.depots();
        let next = match invalidate
            .only
            .is_some_and(|only| depots.get(only).is_none())
        {
            // The worker has no such tier, so that none of its pages is listed.
            true => Unlisted::Done,
            false => host.unlist_scope(tier, &invalidate.scope, invalidate.through, from)?,
        };
        let next = match next {
            Unlisted::Next(next) => Some(next),
            Unlisted::Done => None,
            Unlisted::Later => {
                self.invalidations.queue.push_front(invalidate);
                self.invalidations.called = true;
                return Ok(());
            }
            Unlisted::Failed(why) => {
                let error = ErrorBody::new(ErrorCode::Internal, why);
                self.answer(host, invalidate.order, Message::Error(error));
                return self.call_invalidate(host);
            }
        };
        let mut slower = depots.tiers().filter(|_| invalidate.only.is_none());
        let slower = slower.find(|slower| *slower > tier);
        let next = next.map(|next| (tier, next));
        match next.or(slower.map(|slower| (slower, 0))) {
            Some(next) => {
                invalidate.next = next;
                self.invalidations.queue.push_front(invalidate);
            }
            None => {
                let body = Invalidated {
                    reset: invalidate.id.0,
                };
                self.answer(host, invalidate.order, Message::Invalidated(body));
            }
        }
        self.call_invalidate(host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_types::{Epoch, Fingerprint, NamespaceId, PageSet, TransferId};

    const THROUGH: Stored = Stored {
        epoch: Epoch(1),
        transfer: TransferId(9),
    };

    fn invalidate(id: u64, scope: Scope, deadline: u64) -> PendingInvalidation {
        PendingInvalidation::new(
            ResetId(id),
            (scope, None),
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
        let mut invalidations = Invalidations::default();
        for id in 0..INVALIDATIONS_MAX as u64 {
            assert_eq!(
                invalidations.push(invalidate(id, Scope::Everything, 10)),
                Ok(())
            );
        }
        let more = invalidate(1000, Scope::Everything, 20);
        assert_eq!(
            code(invalidations.push(more.clone())),
            Some(ErrorCode::Limit)
        );
        assert_eq!(
            invalidations.push(invalidate(3, Scope::Everything, 10)),
            Ok(())
        );
        assert_eq!(
            invalidations.queue.len(),
            INVALIDATIONS_MAX,
            "requested again"
        );
        // Resets whose deadline has passed make room.
        assert_eq!(
            invalidations.take_overdue(Time(10)).len(),
            INVALIDATIONS_MAX
        );
        assert_eq!(invalidations.push(more), Ok(()));

        let mut invalidations = Invalidations::default();
        let pages: PageSet = (0..131_072).map(Fingerprint).collect();
        let pages = |_| Scope::Pages(NamespaceId(1), pages.clone());
        let most = (RESET_PAGES_OPEN_MAX / 131_072) as u64;
        for id in 0..most {
            assert_eq!(invalidations.push(invalidate(id, pages(id), 10)), Ok(()));
        }
        let more = invalidations.push(invalidate(most, pages(most), 10));
        assert_eq!(code(more), Some(ErrorCode::Limit));
        assert_eq!(
            invalidations.push(invalidate(most, Scope::Everything, 10)),
            Ok(())
        );
    }

    #[test]
    fn resets_that_are_overdue_are_taken_out_and_the_others_keep_their_order() {
        let mut invalidations = Invalidations::default();
        for (id, deadline) in [(1, 30), (2, 10), (3, 20), (4, 40)] {
            let invalidate = invalidate(id, Scope::Everything, deadline);
            assert_eq!(invalidations.push(invalidate), Ok(()));
        }
        let ids = |invalidations: &VecDeque<PendingInvalidation>| -> Vec<u64> {
            invalidations
                .iter()
                .map(|invalidate| invalidate.id.0)
                .collect()
        };
        assert!(invalidations.take_overdue(Time(9)).is_empty());
        assert_eq!(ids(&invalidations.take_overdue(Time(20))), [2, 3]);
        assert_eq!(ids(&invalidations.queue), [1, 4]);
    }
}
