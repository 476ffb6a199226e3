//! Measurements of a timed replay.

use std::time::Duration;

use crate::links::Utilisation;

/// Measurements in virtual time. Lists are in the order of the events.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Measurements {
    /// From a prompt's arrival to the end of its prefill, in nanoseconds.
    pub first_token_ns: Vec<u64>,
    /// From a lookup to its answer at the engine, in nanoseconds.
    pub lookup_ns: Vec<u64>,
    /// From a load to its answer at the engine, in nanoseconds.
    pub load_ns: Vec<u64>,
    /// Nanoseconds that prompts waited because pages were missing; one entry for each prompt that waited.
    pub page_wait_ns: Vec<u64>,
    /// Stores that were refused, or whose copies failed or did not end in time.
    pub late_stores: u64,
    /// Total time of all prefills.
    pub prefill: Duration,
    /// From the first arrival to the end of the last prompt.
    pub span: Duration,
    /// From the first arrival to the end of the last copy: stores and moves go on after the last prompt.
    pub ran: Duration,
    /// Links from device to host.
    pub d2h: LinkUse,
    /// Links from host to device.
    pub h2d: LinkUse,
    /// The disk, as far as it is written.
    pub disk_write: LinkUse,
    /// The disk, as far as it is read.
    pub disk_read: LinkUse,
}

/// Use of the links of one direction, all ranks together.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LinkUse {
    /// Bytes that were copied.
    pub bytes: u64,
    /// Time during which a link carried a copy, summed over the ranks.
    pub busy: Duration,
    /// Nanoseconds by which each copy took longer than alone on its link, from the time when it could have started:
    /// waiting for a free place, and sharing the link.
    pub queue_ns: Vec<u64>,
}

impl LinkUse {
    /// Adds the use of one rank's link.
    pub(super) fn add(&mut self, used: Utilisation) {
        self.bytes += used.bytes;
        self.busy += Duration::from_nanos(used.busy_ns);
    }
}
