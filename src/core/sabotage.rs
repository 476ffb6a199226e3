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
    /// Deadlines follow the wall clock.
    WallClock,
    /// A worker reports a failed copy as complete.
    SwallowError,
    /// A copy overwrites pages that the inventory still lists.
    KeepRecord,
    /// Pages are added to the inventory before their last byte is copied.
    RecordEarly,
    /// An engine reuses pages while a store still reads them.
    ReleaseSource,
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
