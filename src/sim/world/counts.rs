//! What happened in a run, counted.

macro_rules! counts {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        /// What happened in a run.
        #[derive(Debug, Clone, Default, PartialEq, Eq)]
        pub struct Counts {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counts {
            /// Each count with its name.
            pub fn by_name(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name),)*].into_iter()
            }

            /// Adds those of another run.
            pub fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

counts! {
    /// Events.
    steps;
    /// Messages.
    messages;
    /// Prompts that arrived.
    prompts;
    /// Prompts that were served.
    served;
    /// Answers that engines heard.
    answers;
    /// Of those, refusals.
    refusals;
    /// Requests that engines gave up.
    given_up;
    /// Resets that were confirmed.
    resets;
    /// Copies that started.
    copies;
    /// Pages that copies wrote.
    pages_copied;
    /// Pages that engines compared with what they must hold.
    pages_verified;
    /// Pages that engines were spared.
    hit_pages;
    /// Pages that new leaders found in the depots.
    recovered_pages;
    /// Leaders that began.
    leaders;
    /// Workers that had to go.
    expelled;
    /// Virtual time in milliseconds.
    virtual_ms;
}
