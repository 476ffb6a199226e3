//! What a timed replay measured.

use std::time::Duration;

use crate::sim::links::Utilisation;

/// Measured in virtual time. Lists are in the order of the events.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    /// From a prompt's arrival to the end of its prefill, in nanoseconds.
    pub first_token_ns: Vec<u64>,
    /// From a lookup to its answer, at the engine.
    pub lookup_ns: Vec<u64>,
    /// From a load to its answer, at the engine.
    pub load_ns: Vec<u64>,
    /// Time that prompts waited because pages were missing; one entry for each of them.
    pub page_wait_ns: Vec<u64>,
    /// Stores that were refused, or whose copies failed or did not end in time.
    pub late_stores: u64,
    /// Time of all prefills together.
    pub prefill: Duration,
    /// From the first arrival to the end of the last prompt.
    pub span: Duration,
    /// From device to host.
    pub d2h: LinkUse,
    /// From host to device.
    pub h2d: LinkUse,
}

/// The links of one direction, all ranks together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LinkUse {
    /// Bytes that were copied.
    pub bytes: u64,
    /// Time during which a link carried something, added up over the ranks.
    pub busy: Duration,
    /// How much longer each copy took than alone on its link, from the moment when it could have started: the wait for a
    /// place, and what others took of the link.
    pub queue_ns: Vec<u64>,
}

impl LinkUse {
    /// Adds the use of one rank's link.
    pub(super) fn add(&mut self, used: Utilisation) {
        self.bytes += used.bytes;
        self.busy += Duration::from_nanos(used.busy_ns);
    }
}
