//! Planted bugs, with which tests show that the simulator detects such bugs. Only in tests: in other builds [`planted`]
//! is a constant `false` without cost.

macro_rules! bugs {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// A mistake that can be planted in the code.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Bug {
            $($(#[$doc])* $name,)*
        }

        impl Bug {
            /// All bugs.
            #[cfg(test)]
            pub const ALL: &[Self] = &[$(Self::$name,)*];
        }
    };
}

bugs! {
    /// Reports of ranks are counted instead of removed from a set.
    CountAcks,
    /// A report for a reservation that is over is applied to a live one.
    IgnoreGeneration,
    /// A report for a growth that is over is applied to a live growth.
    IgnoreGrowthGeneration,
    /// Copies of an older epoch are reported to the new leader.
    IgnoreEpoch,
    /// A failed copy publishes its pages.
    PublishOnFailure,
    /// A copy that ends after its deadline publishes its pages.
    PublishLate,
    /// Pages are freed by the first failed report and again by the last report.
    FreeTwice,
    /// Pages of a failed store are never freed.
    LeakOnAbort,
    /// Pages are freed when the deadline passes instead of when the copy has ended.
    FreeBeforeEnd,
    /// A load is reported as failed at its deadline, while a worker may still write.
    FailBeforeFence,
    /// The holds of a disconnected engine are not released.
    KeepLease,
    /// A store that waits for another store's copy is never answered.
    LoseSecondRequester,
    /// Two growths of one block run at the same time.
    GrowTwice,
    /// Deadlines follow the wall clock.
    WallClock,
    /// Requests are accepted without a limit.
    UnboundedQueue,
    /// A worker reports a failed copy as complete.
    SwallowError,
    /// Lookups find pages of any namespace.
    IgnoreNamespace,
    /// A copy overwrites pages that the inventory still lists.
    KeepRecord,
    /// Pages are added to the inventory before their last byte is copied.
    RecordEarly,
    /// A new leader trusts the inventory of one shard.
    TrustOneShard,
    /// A reset ignores the stores in flight.
    ResetSkipsInFlight,
    /// A reset is answered without removing any page from the inventories.
    ResetKeepsRecords,
    /// A worker attaches while copies for an older leader still run.
    AttachEarly,
    /// A repeated order is carried out again.
    RunTwice,
    /// An abandoned copy is reported as ended while it runs.
    AbandonEarly,
    /// An engine reuses pages while a store still reads them.
    ReleaseSource,
    /// A lookup that arrives after the `finish` of its slot opens the slot again.
    ReopenFinished,
    /// A `finish` is refused when too many requests are open.
    LimitFinish,
    /// An engine that does not reconnect is forgotten while copies for it run.
    ForgetTooSoon,
    /// Expired timers are not fired before an event, so that a late event is handled as if it were in time.
    LookLate,
    /// A request that was refused because a limit was reached is handled when it is retried.
    ForgetRefusal,
    /// A load or a store is refused while an older leader's copy for it may run.
    RefuseUnclear,
    /// A load starts while its engine may still write to the destination pages.
    IgnoreWrites,
    /// A new leader reads inventories while an older leader's copies may still run.
    ReadTooSoon,
}

#[cfg(test)]
thread_local! {
    static PLANTED: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

/// Plants a bug in this thread, or removes the planted one.
#[cfg(test)]
pub fn plant(bug: Option<Bug>) {
    PLANTED.set(bug);
}

/// True if this bug is planted in this thread.
#[cfg(test)]
pub fn planted(bug: Bug) -> bool {
    PLANTED.get() == Some(bug)
}

/// Always false outside tests.
#[cfg(not(test))]
#[inline(always)]
pub const fn planted(_: Bug) -> bool {
    false
}
