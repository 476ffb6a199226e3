//! Numbers of the copies that ended, by edge.

use std::collections::BTreeMap;

use kvferry_types::{Edge, EndedCopy, LatencyHistogram, Time};

use super::copies::OpenCopy;

/// The ended copies of one edge, since the worker's start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EdgeCounts {
    /// Copies that copied everything.
    pub complete: u64,
    /// Copies that ended before that: stopped, late, failed, or ended before they began.
    pub incomplete: u64,
    /// Bytes that were copied.
    pub bytes: u64,
    /// Time that copies waited in their lane before they ran: since they were ordered and their pages were written.
    pub queue: LatencyHistogram,
    /// Time that copies ran.
    pub copy: LatencyHistogram,
}

/// The ended copies of every edge that was used: at most 12, of 0.4 KB each.
#[derive(Debug, Default)]
pub(super) struct Meters(BTreeMap<Edge, EdgeCounts>);

impl Meters {
    /// Counts a copy that ended.
    pub(super) fn note(&mut self, now: Time, task: &OpenCopy, ended: &EndedCopy) {
        let counts = self.0.entry(task.transfer.edge).or_default();
        match ended.complete {
            true => counts.complete += 1,
            false => counts.incomplete += 1,
        }
        counts.bytes = counts.bytes.saturating_add(ended.bytes);
        if let Some(ready_at) = task.ran_since() {
            let open = u64::try_from(ready_at.until(now).as_micros()).unwrap_or(u64::MAX);
            counts.queue.note(open.saturating_sub(ended.copy_us));
            counts.copy.note(ended.copy_us);
        }
    }

    pub(super) fn counts(&self) -> &BTreeMap<Edge, EdgeCounts> {
        &self.0
    }
}
