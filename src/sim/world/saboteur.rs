//! Lies of a world's hosts: mistakes between a core and its environment, with which a test shows that the checker finds
//! them. A world has at most one lie. Without one, nothing changes and no random number is drawn.

macro_rules! lies {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// A mistake that the hosts of a world make on purpose.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Lie {
            $($(#[$doc])* $name,)*
        }

        impl Lie {
            /// Every lie.
            pub const ALL: &[Self] = &[$(Self::$name,)*];
        }
    };
}

lies! {
    /// The leader's host gives the time of the wall clock, which jumps.
    WallClock,
    /// An engine uses the pages of a store again while workers still read them.
    ReleaseSource,
    /// A worker's host reports a failed copy as complete.
    SwallowError,
    /// A worker's host leaves pages in the inventory that a store is about to overwrite.
    KeepRecord,
    /// A worker's host adds the pages of a store to the inventory before the store copies them.
    RecordEarly,
    /// A disk overwrites a page before it is durable that the page is not listed.
    LateRemoval,
    /// A page of a disk is served without a look at its checksum.
    UncheckedSource,
    /// A reset is answered before its mark is durable on the disk.
    LoseMark,
}
