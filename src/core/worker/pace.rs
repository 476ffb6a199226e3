//! The rate of an edge: when its next copy may start.
//!
//! A copy pays for its bytes when it starts, and the next one starts when everything before it is paid for. A copy of
//! any size therefore starts, the pause comes after it, and a copy that is stopped gives nothing back. What an edge does
//! not use is kept for [`PACE_BURST`], so that timers that fire late do not lower its rate.

use std::num::NonZeroU64;
use std::time::Duration;

use kvferry_types::Time;

/// Time whose unused bytes an edge keeps: after a pause, copies of so many bytes more start at once.
pub const PACE_BURST: Duration = Duration::from_millis(10);

/// The pace of one edge. Without a rate it never waits.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// When all copies that have started are paid for.
    paid_at: Time,
}

impl Pace {
    /// When the next copy may start.
    pub(super) fn next_start(&self) -> Time {
        self.paid_at
    }

    /// Charges a copy that starts.
    pub(super) fn charge(&mut self, now: Time, bytes: u64, bytes_per_s: Option<NonZeroU64>) {
        let Some(rate) = bytes_per_s else { return };
        let ns = u128::from(bytes) * 1_000_000_000;
        let ns = ns.div_ceil(u128::from(rate.get()));
        let kept_from = Time(now.0.saturating_sub(PACE_BURST.as_nanos() as u64));
        let takes = Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX));
        self.paid_at = self.paid_at.max(kept_from) + takes;
    }
}
