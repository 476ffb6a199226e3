//! The change log: the pages that each tier gained and lost, in order, for readers that follow them.
//!
//! Records are numbered from 1 over the life of a leader, and the newest ones are kept. Nothing is recorded before the first
//! read, and nothing more when no reader came for [`LOG_IDLE`]. A reader whose next record is not kept has to begin again.

use std::collections::VecDeque;
use std::time::Duration;

use crate::pool::changes::Change;
use kvferry_types::{TierId, Time};

use super::Leader;

/// Records that the log keeps, at most. With [`LOG_PAGES_MAX`] the log takes at most 14 MiB: 80 bytes for a record, 16 for
/// its pages' allocation, and 16 for each page.
pub const LOG_RECORDS_MAX: usize = 65_536;
/// Pages that all records together name, at most.
pub const LOG_PAGES_MAX: usize = 1 << 19;
/// Time after the last read in which changes are recorded.
pub const LOG_IDLE: Duration = Duration::from_secs(60);

const _: () = assert!(size_of::<(TierId, Change)>() <= 80);

/// The newest records. See the module.
#[derive(Debug)]
pub(super) struct ChangeLog {
    /// When the log was last read; `None` while nothing is recorded.
    last_read: Option<Time>,
    /// Number of the first record that is kept, or of the next one.
    first: u64,
    records: VecDeque<(TierId, Change)>,
    /// Pages that the records name.
    pages: usize,
}

impl Default for ChangeLog {
    fn default() -> Self {
        Self {
            last_read: None,
            first: 1,
            records: VecDeque::new(),
            pages: 0,
        }
    }
}

impl ChangeLog {
    /// True while changes are recorded.
    pub(super) fn is_recording(&self) -> bool {
        self.last_read.is_some()
    }

    /// Notes a read. Returns whether the recording begins with it.
    pub(super) fn is_read(&mut self, now: Time) -> bool {
        self.last_read.replace(now).is_none()
    }

    /// Number of the next record.
    pub(super) fn end(&self) -> u64 {
        self.first + self.records.len() as u64
    }

    /// The records from number `from` on; `None` if not all of them are kept.
    pub(super) fn since(&self, from: u64) -> Option<impl Iterator<Item = &(TierId, Change)>> {
        let skipped = from.checked_sub(self.first)?;
        let skipped = usize::try_from(skipped).ok()?;
        (skipped <= self.records.len()).then(|| self.records.range(skipped..))
    }

    pub(super) fn add(&mut self, tier: TierId, change: Change) {
        let pages = named(&change);
        while self.records.len() >= LOG_RECORDS_MAX || self.pages + pages > LOG_PAGES_MAX {
            let Some((_, dropped)) = self.records.pop_front() else {
                break;
            };
            self.first += 1;
            self.pages -= named(&dropped);
        }
        self.pages += pages;
        self.records.push_back((tier, change));
    }

    /// Drops all records and skips a number, so that every reader begins again.
    pub(super) fn lose(&mut self) {
        self.first = self.end() + 1;
        self.records = VecDeque::new();
        self.pages = 0;
    }

    /// Stops recording if nobody has read for [`LOG_IDLE`]. Returns whether it stopped.
    pub(super) fn stop_if_idle(&mut self, now: Time) -> bool {
        let idle = self.last_read.is_some_and(|last| last + LOG_IDLE < now);
        if idle {
            self.last_read = None;
            self.lose();
        }
        idle
    }
}

/// Number of pages that a record names.
fn named(change: &Change) -> usize {
    change.pages().map_or(0, |changed| changed.pages.len())
}

impl Leader {
    /// Number of the next record of the change log. While it stays the same, a reader that has read up to it gets nothing.
    pub fn log_end(&self) -> u64 {
        self.log.end()
    }

    /// Adds the changes of the pools to the log: those of a step tier by tier, the slowest tier first, so that a page that
    /// moves there is listed there before it leaves the faster one.
    pub(super) fn log_changes(&mut self) {
        if !self.log.is_recording() {
            return;
        }
        for (tier, pool) in self.tiers.slowest_first() {
            for change in pool.take_changes() {
                self.log.add(tier, change);
            }
        }
    }

    /// Adds the pages of a pool that has opened to the log. More than the log keeps cannot be followed: every reader begins
    /// again.
    pub(super) fn log_opened(&mut self, tier: TierId) {
        if !self.log.is_recording() {
            return;
        }
        let Some(pool) = self.tiers.serving_mut(tier) else {
            return;
        };
        pool.record_changes();
        let pages = pool.page_states().ready as usize;
        if pages > LOG_PAGES_MAX || pool.live_blocks() as usize > LOG_RECORDS_MAX {
            return self.log.lose();
        }
        let all = 0..pool.block_positions();
        for pages in all.filter_map(|position| pool.readable_at(position)) {
            self.log.add(tier, Change::Stored(pages));
        }
    }

    /// Stops recording when nobody has read for [`LOG_IDLE`].
    pub(super) fn end_idle_log(&mut self, now: Time) {
        if self.log.stop_if_idle(now) {
            for (_, pool) in self.tiers.slowest_first() {
                pool.stop_recording();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::changes::{GoneReason, PlacedPages};
    use kvferry_types::{DomainId, Fingerprint};

    fn stored(start: u32, pages: usize) -> Change {
        Change::Stored(PlacedPages {
            domain: DomainId(1),
            start,
            pages: vec![Fingerprint(7); pages].into(),
        })
    }

    fn starts(log: &ChangeLog, from: u64) -> Option<Vec<u32>> {
        let start = |(_, change): &(TierId, Change)| change.pages().map_or(0, |pages| pages.start);
        log.since(from).map(|records| records.map(start).collect())
    }

    #[test]
    fn a_reader_gets_the_records_from_its_number_on_or_has_to_begin_again() {
        let mut log = ChangeLog::default();
        assert_eq!(log.end(), 1);
        assert_eq!(starts(&log, 0), None, "0 is before every record");
        assert_eq!(starts(&log, 1), Some(vec![]));
        for start in [10, 20, 30] {
            log.add(TierId::Host, stored(start, 2));
        }
        assert_eq!(starts(&log, 1), Some(vec![10, 20, 30]));
        assert_eq!(starts(&log, 3), Some(vec![30]));
        assert_eq!(starts(&log, 4), Some(vec![]));
        assert_eq!(starts(&log, 5), None, "no such number was given");
        assert_eq!(starts(&log, u64::MAX), None);
    }

    #[test]
    fn the_log_keeps_a_limited_number_of_records_and_of_pages() {
        let mut log = ChangeLog::default();
        for start in 0..LOG_RECORDS_MAX as u32 + 2 {
            log.add(TierId::Host, stored(start, 1));
        }
        assert_eq!(log.records.len(), LOG_RECORDS_MAX);
        assert_eq!(
            log.records.capacity(),
            LOG_RECORDS_MAX,
            "no more is allocated"
        );
        assert_eq!(starts(&log, 2), None);
        assert_eq!(starts(&log, 3).map(|all| all[0]), Some(2));
        let pages = 256;
        for _ in 0..LOG_PAGES_MAX / pages + 1 {
            log.add(TierId::Host, stored(9, pages));
        }
        assert_eq!(log.pages, LOG_PAGES_MAX);
        assert_eq!(log.records.len(), LOG_PAGES_MAX / pages);
        let end = LOG_RECORDS_MAX + 2 + LOG_PAGES_MAX / pages + 1;
        assert_eq!(log.end(), end as u64 + 1);
        let named = log.records.iter().map(|(_, change)| named(change));
        assert_eq!(named.sum::<usize>(), log.pages);
    }

    /// Not even a reader that had read everything may go on, because changes are missing.
    #[test]
    fn every_reader_begins_again_after_records_were_lost() {
        let mut log = ChangeLog::default();
        log.add(TierId::Host, Change::Gone(pages(), GoneReason::Reset));
        let end = log.end();
        assert_eq!(starts(&log, end), Some(vec![]));
        log.lose();
        assert_eq!(starts(&log, end), None);
        assert_eq!(starts(&log, log.end()), Some(vec![]));
        assert_eq!(log.pages, 0);
    }

    #[test]
    fn recording_begins_with_a_read_and_ends_when_nobody_reads() {
        let mut log = ChangeLog::default();
        assert!(!log.is_recording() && !log.stop_if_idle(Time::NEVER));
        assert!(log.is_read(Time(5)), "the first read");
        let end = log.end();
        let idle = Time(5) + LOG_IDLE;
        assert!(!log.stop_if_idle(idle) && log.is_recording());
        assert!(!log.is_read(idle), "it is recording");
        assert!(!log.stop_if_idle(idle + LOG_IDLE));
        assert!(log.stop_if_idle(idle + LOG_IDLE + Duration::from_nanos(1)));
        assert!(!log.is_recording());
        assert_eq!(starts(&log, end), None);
        assert!(log.is_read(Time::NEVER), "it begins again");
    }

    fn pages() -> PlacedPages {
        PlacedPages {
            domain: DomainId(1),
            start: 0,
            pages: vec![Fingerprint(7)].into(),
        }
    }
}
