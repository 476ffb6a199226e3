//! Counters of a run.

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        /// Counters of a run.
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        pub struct Counts {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counts {
            /// Each count with its name.
            pub fn by_name(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }

            /// Adds the counts of another run.
            pub fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

counts! {
    /// Events that were handled.
    steps;
    /// Messages that were sent.
    messages;
    /// Prompts that arrived.
    prompts;
    /// Prompts that were served.
    served;
    /// Answers that ended a request at an engine.
    answers;
    /// Refusals that engines received, also those that did not end the request.
    refusals;
    /// Requests that engines gave up after their deadline.
    given_up;
    /// Resets whose confirmation reached the engine.
    resets;
    /// Flushes whose answer reached the engine.
    flushes;
    /// Copies that started.
    copies;
    /// Pages that were moved to a slower tier.
    pages_down;
    /// Pages that were moved to a faster tier.
    pages_up;
    /// Page writes of copies. Each copied page counts twice: half written, and written.
    pages_copied;
    /// Pages that engines compared with their expected content.
    pages_verified;
    /// Pages that engines loaded instead of computing them.
    hit_pages;
    /// Those of them that are pages of several kinds of groups, in units of the hashes.
    group_hit_pages;
    /// Pages that leaders recovered from the depots, counted when the leader dies or the run ends.
    recovered_pages;
    /// Tokens that leaders did not offer because they are computed sooner than loaded, counted when the leader dies or
    /// the run ends.
    declined_tokens;
    /// Pages that workers found when they opened a disk.
    disk_pages_found;
    /// Pages that a disk listed when it was opened, and whose content was lost.
    disk_pages_lost;
    /// Disks that were full and used all of their room again.
    disks_grown;
    /// Leaders that started.
    leaders;
    /// Requests of leaders to end a worker's process.
    fenced;
    /// Virtual time in milliseconds.
    virtual_ms;
}
