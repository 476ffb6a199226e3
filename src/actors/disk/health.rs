//! What a disk has done, for the status.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvferry_tiers::disk::scrub::ScrubStep;

/// Counters of the disk's thread.
#[derive(Debug, Default)]
pub(super) struct DiskCounters {
    used_bytes: AtomicU64,
    scrubbed_pages: AtomicU64,
    bad_pages: AtomicU64,
    unreadable_pages: AtomicU64,
    bad_reads: AtomicU64,
}

impl DiskCounters {
    pub(super) fn set_used_bytes(&self, bytes: u64) {
        self.used_bytes.store(bytes, Ordering::Relaxed);
    }

    pub(super) fn add_scrubbed(&self, step: &ScrubStep) {
        let counts = [
            (&self.scrubbed_pages, step.pages),
            (&self.bad_pages, step.removed.len() as u64),
            (&self.unreadable_pages, step.unreadable_pages),
        ];
        for (counter, pages) in counts {
            counter.fetch_add(pages, Ordering::Relaxed);
        }
    }

    /// Adds pages that had changed when they were read to be served. Returns their number since the start of the worker.
    pub(super) fn add_bad_reads(&self, pages: u64) -> u64 {
        self.bad_reads.fetch_add(pages, Ordering::Relaxed) + pages
    }

    /// Pages that had changed when they were read to be served.
    pub(super) fn bad_reads(&self) -> u64 {
        self.bad_reads.load(Ordering::Relaxed)
    }

    /// Bytes of all files, as of the last look.
    pub(super) fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// Pages that the scrub has read since the start of the worker.
    pub(super) fn scrubbed_pages(&self) -> u64 {
        self.scrubbed_pages.load(Ordering::Relaxed)
    }

    /// Pages of those that had changed.
    pub(super) fn bad_pages(&self) -> u64 {
        self.bad_pages.load(Ordering::Relaxed)
    }

    /// Pages of those that the disk did not read.
    pub(super) fn unreadable_pages(&self) -> u64 {
        self.unreadable_pages.load(Ordering::Relaxed)
    }
}

const HOUR: Duration = Duration::from_secs(60 * 60);
const HOURS: u64 = 24;

/// Bytes that were written, by hours.
#[derive(Debug)]
pub(super) struct WrittenBytes {
    begun: Instant,
    total: u64,
    /// Hours since the beginning in which something was written, at most 24, with the bytes.
    hours: VecDeque<(u64, u64)>,
}

impl WrittenBytes {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            begun: now,
            total: 0,
            hours: VecDeque::new(),
        }
    }

    fn hour(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.begun).as_secs() / HOUR.as_secs()
    }

    pub(super) fn add(&mut self, now: Instant, bytes: u64) {
        let hour = self.hour(now);
        self.total += bytes;
        match self.hours.back_mut() {
            Some((last, sum)) if *last == hour => *sum += bytes,
            _ => self.hours.push_back((hour, bytes)),
        }
        self.hours.retain(|(of, _)| of + HOURS > hour);
    }

    /// All bytes since the beginning.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// Bytes of the present hour and the 23 before it.
    pub(super) fn last_day(&self, now: Instant) -> u64 {
        let hour = self.hour(now);
        let recent = self.hours.iter().filter(|(of, _)| of + HOURS > hour);
        recent.map(|(_, bytes)| bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_counted_for_a_day() {
        let begun = Instant::now();
        let mut written = WrittenBytes::new(begun);
        let at = |hours: u32| begun + hours * HOUR;
        for hour in [0, 0, 1, 23] {
            written.add(at(hour), 10);
        }
        assert_eq!(written.last_day(at(23)), 40);
        assert_eq!(written.last_day(at(24)), 20);
        assert_eq!(written.last_day(at(47)), 0);
        written.add(at(100), 5);
        assert_eq!((written.hours.len(), written.total()), (1, 45));
    }
}
