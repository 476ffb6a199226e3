//! Measured rates of the edges, and estimates of times from them.
//!
//! Workers report the bytes and the duration of each transfer. A rate is the bytes of one worker over the time in which it
//! moved some: of transfers that ran at one time, only the part of a duration counts that lies after the end of the one
//! before. The slowest worker determines the time of a transfer. All values are integers, and time is that of the steps.

use std::collections::BTreeMap;
use std::time::Duration;

use kvferry_types::{Edge, Time, WorkerId};

/// Busy time after which the older measurements count half: rates follow a disk that becomes slower.
const HALF_AFTER: Duration = Duration::from_secs(10);
/// A rate is used for this long after its last report. Afterwards it counts as not measured, so that the next transfer
/// measures it again: a load that is never offered is never measured.
const RATE_LASTS: Duration = Duration::from_secs(60);

/// What one worker moved over one edge.
#[derive(Debug, Clone, Copy, Default)]
struct Moved {
    bytes: u64,
    busy_us: u64,
    /// The end of the last transfer.
    last: Option<Time>,
}

/// The measured rates. At most one entry for each edge of each worker.
#[derive(Debug, Default)]
pub(super) struct Rates(BTreeMap<(Edge, WorkerId), Moved>);

impl Rates {
    /// Notes a transfer that has ended on a worker.
    pub(super) fn note(
        &mut self,
        now: Time,
        (edge, worker): (Edge, WorkerId),
        bytes: u64,
        us: u64,
    ) {
        if bytes == 0 || us == 0 {
            return;
        }
        let moved = self.0.entry((edge, worker)).or_default();
        let last = moved.last.replace(now);
        let since_last = last.map_or(us, |last| microseconds(last.until(now)));
        moved.bytes = moved.bytes.saturating_add(bytes);
        moved.busy_us = moved.busy_us.saturating_add(us.min(since_last));
        if moved.busy_us > microseconds(HALF_AFTER) {
            moved.bytes /= 2;
            moved.busy_us /= 2;
        }
    }

    /// Time in which these bytes are moved over an edge by each worker; `None` if no rate was measured lately.
    pub(super) fn time_of(&self, now: Time, edge: Edge, bytes: u64) -> Option<Duration> {
        let of_edge = self.0.iter().filter(|((of, _), _)| *of == edge);
        let fresh =
            of_edge.filter(|(_, moved)| moved.last.is_some_and(|last| last + RATE_LASTS > now));
        let times = fresh
            .filter(|(_, moved)| moved.bytes > 0)
            .map(|(_, moved)| {
                let us = u128::from(bytes) * u128::from(moved.busy_us) / u128::from(moved.bytes);
                Duration::from_micros(u64::try_from(us).unwrap_or(u64::MAX))
            });
        times.max()
    }
}

fn microseconds(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_types::{Rank, Replica};

    const MS: u64 = 1_000_000;

    fn worker(rank: u16) -> WorkerId {
        WorkerId {
            replica: Replica(0),
            rank: Rank(rank),
        }
    }

    fn ms(rates: &Rates, now: u64, bytes: u64) -> Option<u64> {
        let time = rates.time_of(Time(now * MS), Edge::LOAD, bytes);
        time.map(|time| time.as_millis() as u64)
    }

    #[test]
    fn the_slowest_worker_determines_the_time() {
        let mut rates = Rates::default();
        assert_eq!(ms(&rates, 100, 1_000), None);
        let at = Time(100 * MS);
        rates.note(at, (Edge::LOAD, worker(0)), 1_000, 10_000);
        assert_eq!(ms(&rates, 100, 3_000), Some(30));
        rates.note(at, (Edge::LOAD, worker(1)), 1_000, 20_000);
        assert_eq!(ms(&rates, 100, 3_000), Some(60));
        assert_eq!(rates.time_of(at, Edge::STORE, 1), None);
    }

    #[test]
    fn transfers_that_run_at_one_time_share_the_time() {
        let mut rates = Rates::default();
        // Four transfers of 40 ms each, which end within 40 ms: one after the other took 10.
        for end in [1_010, 1_020, 1_030, 1_040] {
            rates.note(Time(end * MS), (Edge::LOAD, worker(0)), 1_000, 40_000);
        }
        assert_eq!(ms(&rates, 1_040, 7_000), Some(7 * 70 / 4));
    }

    #[test]
    fn a_rate_is_forgotten_after_a_minute_and_follows_the_last_seconds() {
        let mut rates = Rates::default();
        rates.note(Time(1_000 * MS), (Edge::LOAD, worker(0)), 1_000, 1_000);
        assert_eq!(ms(&rates, 60_999, 1_000), Some(1));
        assert_eq!(ms(&rates, 61_000, 1_000), None);
        for second in 62..200 {
            let at = Time(second * 1_000 * MS);
            rates.note(at, (Edge::LOAD, worker(0)), 1_000, 1_000_000);
        }
        assert_eq!(ms(&rates, 200_000, 1_000), Some(1_000));
    }
}
