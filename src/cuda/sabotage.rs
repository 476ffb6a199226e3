//! Planted bugs, by which the tests prove that they would find such a bug. Active only in tests; elsewhere [`planted`]
//! is a constant `false` and costs nothing.

macro_rules! bugs {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// A mistake that could be made in this module.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum Bug {
            $($(#[$doc])* $name,)*
        }

        impl Bug {
            /// All bugs.
            #[cfg(test)]
            pub(super) const ALL: &[Self] = &[$(Self::$name,)*];
        }
    };
}

bugs! {
    /// The event after a part is not waited for.
    MissingEventWait,
    /// The event is recorded before the copies, not after them.
    RecordTooSoon,
    /// The event is recorded in a stream that contains none of the copies.
    RecordElsewhere,
    /// A copy is reported as ended when its first part has ended.
    PageBackEarly,
    /// At the end of the actor its memory is released at once, also while copies are in flight.
    LetGoEarly,
    /// A copy crosses the end of a registered chunk.
    CrossChunks,
    /// Both directions are exchanged.
    WrongWay,
    /// A part that was refused counts as copied.
    CountRefused,
    /// The last range of a part is left out.
    ForgetLast,
    /// An engine that registers again gets the mapping of its earlier memory.
    StaleMapping,
    /// The descriptors of a batched call are reused for the next call while the driver may still read them.
    DescriptorsBackEarly,
    /// Pages count as written before the engine's device has reported it.
    SemaphoreTooSoon,
}

/// The bug that is planted in this process, as an index into [`Bug::ALL`]; any higher value means none.
#[cfg(test)]
static PLANTED: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(usize::MAX);

/// Plants a bug in this process, in all its threads.
#[cfg(test)]
pub(super) fn plant(bug: Bug) {
    let place = Bug::ALL.iter().position(|each| *each == bug);
    PLANTED.store(
        place.unwrap_or(usize::MAX),
        std::sync::atomic::Ordering::SeqCst,
    );
}

/// Returns true if this bug is planted in this process.
#[cfg(test)]
pub(super) fn planted(bug: Bug) -> bool {
    let place = PLANTED.load(std::sync::atomic::Ordering::SeqCst);
    Bug::ALL.get(place) == Some(&bug)
}

/// No bug is planted outside tests.
#[cfg(not(test))]
#[inline(always)]
pub(super) const fn planted(_: Bug) -> bool {
    false
}
