//! Planted bugs: how the tests prove that they would find one. Only in tests; anywhere else [`planted`] is a constant
//! `false` and costs nothing.

macro_rules! bugs {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// One mistake that somebody could make here.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum Bug {
            $($(#[$doc])* $name,)*
        }

        impl Bug {
            /// Every one.
            #[cfg(test)]
            pub(super) const ALL: &[Self] = &[$(Self::$name,)*];
        }
    };
}

bugs! {
    /// Nobody waits for the event behind a part.
    MissingEventWait,
    /// The event is recorded before the copies, not behind them.
    RecordTooSoon,
    /// The event is recorded in a stream that has none of the copies.
    RecordElsewhere,
    /// A copy is said to be over when its first part is.
    PageBackEarly,
    /// At the end of the actor its memory goes at once, whatever is under way.
    LetGoEarly,
    /// A copy crosses the end of a registered chunk.
    CrossChunks,
    /// Both directions are given the wrong way round.
    WrongWay,
    /// A part that was refused counts as copied.
    CountRefused,
    /// The last range of a part is forgotten.
    ForgetLast,
    /// An engine that registers again gets the mapping of its memory of before.
    StaleMapping,
    /// The list of copies that a call was given is used for the next call while the driver may still read it.
    DescriptorsBackEarly,
    /// Pages count as written before the engine's device says so.
    SemaphoreTooSoon,
}

/// The bug that is planted in this process, by its place in [`Bug::ALL`]; none beyond.
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

/// True when this bug is planted in this process.
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
