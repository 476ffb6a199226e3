//! The timers of a leader.

use std::collections::BTreeSet;

use kvferry_types::{EngineId, FlushId, ResetId, SlotId, TierId, Time, TransferId, WorkerId};

/// Number of a `cancel_stores` request.
pub(super) type CancelId = u64;

/// Number of a store request that waits for copies: its own, and those of others that it found in flight.
pub(super) type StoreKey = u64;

/// Number of a load that waits for transfers.
pub(super) type LoadKey = u64;

/// The event that a timer stands for. Ordered, so that timers of equal times fire in one defined order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    /// The holds of a slot expire.
    Hold(EngineId, SlotId),
    /// A transfer is checked: at its deadline, then every quarter of the fence time.
    Transfer(TransferId),
    /// The deadline of a store that waits for copies of other requests.
    Store(StoreKey),
    /// The deadline of a reset.
    Reset(ResetId),
    /// The deadline of a flush.
    Flush(FlushId),
    /// The next slice of the resets.
    Resets,
    /// The deadline of a `cancel_stores`.
    Cancel(CancelId),
    /// Missing parts of the inventories of a tier are requested again.
    Reading(TierId),
    /// A worker that owes the answer to an inventory request is checked.
    UnansweredRead(TierId, WorkerId),
    /// Orders to open tiers without an engine are repeated.
    IdleTiers,
    /// Workers that have not attached are checked.
    AttachOverdue,
    /// An engine without a connection is forgotten.
    Engine(EngineId),
    /// The deadline of a load that waits for promotions.
    Load(LoadKey),
}

/// The timers that are set.
#[derive(Debug, Default)]
pub(super) struct Timers(BTreeSet<(Time, Timer)>);

impl Timers {
    pub(super) fn set(&mut self, at: Time, timer: Timer) {
        self.0.insert((at, timer));
    }

    /// Clears a timer that was set to this time; without effect if it was not.
    pub(super) fn clear(&mut self, at: Time, timer: Timer) {
        self.0.remove(&(at, timer));
    }

    /// When the next timer expires.
    pub(super) fn next(&self) -> Option<Time> {
        self.0.first().map(|(at, _)| *at)
    }

    /// Removes the first timer that has expired.
    pub(super) fn take_expired(&mut self, now: Time) -> Option<Timer> {
        let (at, timer) = self.0.first().copied().filter(|(at, _)| *at <= now)?;
        self.0.remove(&(at, timer));
        Some(timer)
    }
}
