//! Planted bugs: how the simulator proves that it would find one. Only in tests; anywhere else [`planted`] is a constant
//! `false` and costs nothing.

macro_rules! bugs {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// One mistake that somebody could make here.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Bug {
            $($(#[$doc])* $name,)*
        }

        impl Bug {
            /// Every one.
            #[cfg(test)]
            pub const ALL: &[Self] = &[$(Self::$name,)*];
        }
    };
}

bugs! {
    /// Acknowledgements are counted instead of taken out of a set.
    CountAcks,
    /// An acknowledgement of a reservation that is over is taken for one that lives.
    IgnoreGeneration,
    /// The same, for growths only.
    IgnoreGrowthGeneration,
    /// Copies of an older epoch are reported to the new leader.
    IgnoreEpoch,
    /// A failed acknowledgement publishes.
    PublishOnFailure,
    /// An acknowledgement after the deadline publishes.
    PublishLate,
    /// Pages are freed by the first failed acknowledgement and again by the last.
    FreeTwice,
    /// Pages of a failed store stay reserved for ever.
    LeakOnAbort,
    /// Pages are freed when the deadline passes, not when the copy has ended.
    FreeBeforeEnd,
    /// A load is reported failed at its deadline, while a worker may still write.
    FailBeforeFence,
    /// What a disconnected engine held stays held.
    KeepLease,
    /// A store that waits for another one's copy is forgotten.
    LoseSecondRequester,
    /// A block grows twice at a time.
    GrowTwice,
    /// Deadlines follow the wall clock.
    WallClock,
    /// Requests are taken without a limit.
    UnboundedQueue,
    /// A worker reports a failed copy as whole.
    SwallowError,
    /// Pages are found whatever their namespace.
    IgnoreNamespace,
    /// A copy overwrites pages that the inventory still lists.
    KeepRecord,
    /// Pages are listed in the inventory before their last byte.
    RecordEarly,
    /// A new leader trusts the inventory of one shard.
    TrustOneShard,
    /// A reset forgets the stores in flight.
    ResetSkipsInFlight,
    /// A reset is answered without striking anything out.
    ResetKeepsRecords,
    /// A worker attaches while it still copies for an older leader.
    AttachEarly,
    /// A repeated order is carried out again.
    RunTwice,
    /// An abandoned copy is said to have ended while it runs.
    AbandonEarly,
    /// An engine gives pages back while they are being stored.
    ReleaseSource,
    /// A lookup that arrives behind the finish of its slot opens it again.
    ReopenFinished,
    /// A finish is refused when too many requests are open.
    LimitFinish,
    /// An engine that stays away is forgotten while copies for it are under way.
    ForgetTooSoon,
    /// What became late while nobody looked is taken for timely.
    LookLate,
    /// A request that was refused for want of room is carried out when it comes again.
    ForgetRefusal,
    /// A load or a store is refused while an older leader's copy for it may run.
    RefuseUnclear,
    /// A load starts while its engine may still write into its pages.
    IgnoreWrites,
    /// A new leader reads inventories while an older one's copies may still run.
    ReadTooSoon,
}

#[cfg(test)]
thread_local! {
    static PLANTED: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
}

/// Plants a bug in this thread, or none.
#[cfg(test)]
pub fn plant(bug: Option<Bug>) {
    PLANTED.set(bug);
}

/// True when this bug is planted in this thread.
#[cfg(test)]
pub fn planted(bug: Bug) -> bool {
    PLANTED.get() == Some(bug)
}

/// No bug is planted outside tests.
#[cfg(not(test))]
#[inline(always)]
pub const fn planted(_: Bug) -> bool {
    false
}
