//! Strikes pages out of the inventory slice by slice: a reset looks at every slot of a depot, and copies start and end
//! between two slices.

use std::collections::VecDeque;

use ractor::ActorRef;

use super::{Handled, State, WorkerMessage};
use crate::protocol::{Message, Struck};
use crate::types::{RequestId, ResetId, Scope, Stored};

/// Slots that one slice looks at: about a millisecond.
const STRIKE_SLICE_SLOTS: u32 = 8192;

/// A reset whose pages are being struck out.
#[derive(Debug)]
struct Strike {
    id: ResetId,
    scope: Scope,
    /// The last store that is meant.
    through: Stored,
    /// The order that is answered at the end.
    order: RequestId,
    /// The slot at which the next slice begins.
    next: u32,
}

/// Resets that wait, in the order in which they came. A leader has a limited number of them, and asks for each once over
/// one connection.
#[derive(Debug, Default)]
pub(super) struct Strikes {
    queue: VecDeque<Strike>,
    /// The message for the next slice is under way.
    called: bool,
}

impl Strikes {
    /// The leader that asked is gone: its resets are not answered any more.
    pub(super) fn clear(&mut self) {
        self.queue.clear();
    }
}

impl State {
    /// Takes an order of the leader. One that is being carried out already is answered once.
    pub(super) fn strike(
        &mut self,
        id: ResetId,
        scope: Scope,
        through: Stored,
        myself: &ActorRef<WorkerMessage>,
    ) -> Handled {
        if !self.strikes.queue.iter().any(|strike| strike.id == id) {
            self.strikes.queue.push_back(Strike {
                id,
                scope,
                through,
                order: self.order,
                next: 0,
            });
        }
        self.call_strike(myself)
    }

    fn call_strike(&mut self, myself: &ActorRef<WorkerMessage>) -> Handled {
        if !self.strikes.queue.is_empty() && !self.strikes.called {
            self.strikes.called = true;
            myself.cast(WorkerMessage::Strike)?;
        }
        Ok(())
    }

    /// Does one slice, and comes back for the next one after the messages that wait by then.
    pub(super) fn strike_on(&mut self, myself: &ActorRef<WorkerMessage>) -> Handled {
        self.strikes.called = false;
        let Some(mut strike) = self.strikes.queue.pop_front() else {
            return Ok(());
        };
        let mut next = None;
        self.inventory(|depot, page_bytes| {
            let (from, count) = (strike.next, STRIKE_SLICE_SLOTS);
            next = depot.strike_scope(page_bytes, &strike.scope, strike.through, from, count)?;
            Ok(())
        })?;
        match next {
            Some(next) => {
                strike.next = next;
                self.strikes.queue.push_front(strike);
            }
            None => {
                let body = Struck { reset: strike.id.0 };
                self.answer(strike.order, Message::Struck(body));
            }
        }
        self.call_strike(myself)
    }
}
