//! Counts the events and results of a run, and prints them as a table.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use serde_json::Value;

use super::processes::number;
use super::{FENCE, Kind, REQUEST_TIMEOUT, SLACK};

/// The counts of a run.
#[derive(Default)]
pub(super) struct Record {
    kinds: BTreeMap<Kind, OfKind>,
    replays: u64,
    killed: u64,
    requests: u64,
    disturbed: u64,
    verified_bytes: u64,
    hit_tokens: u64,
    abandoned: u64,
    answer_max_us: u64,
    abandon_max_us: u64,
}

#[derive(Default)]
struct OfKind {
    recoveries: Vec<Duration>,
    pages: Option<Pages>,
}

/// Pages of host memory around a kill.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Pages {
    /// Pages that were ready before it.
    before: u64,
    /// Pages that were ready when the worker's successor served, or that the next leader found.
    after: u64,
    /// Pages that are gone without an eviction.
    lost: u64,
}

impl Pages {
    /// The pages around the end of a worker. The leader counts on, so that its counters account for every page.
    pub(super) fn of_worker(before: &Value, after: &Value) -> Result<Self, String> {
        let added = |name: &str| {
            let path = format!("/counters/{name}");
            number(after, &path).checked_sub(number(before, &path))
        };
        let (published, evicted) = (added("published_pages"), added("evicted_pages"));
        let (Some(published), Some(evicted)) = (published, evicted) else {
            return Err("a counter of the leader went back while only a worker ended".to_owned());
        };
        let (before, after) = (ready(before), ready(after));
        Ok(Self {
            before,
            after,
            lost: (before + published).saturating_sub(evicted + after),
        })
    }

    /// The pages around the end of a leader. Its successor may find more than were ready: those that were stored since
    /// the last status, and evicted ones whose records are still in the inventory. So only what is missing is known.
    pub(super) fn of_leader(before: &Value, after: &Value) -> Self {
        let (before, after) = (ready(before), number(after, "/counters/recovered_pages"));
        Self {
            before,
            after,
            lost: before.saturating_sub(after),
        }
    }

    fn and(self, other: Self) -> Self {
        Self {
            before: self.before + other.before,
            after: self.after + other.after,
            lost: self.lost + other.lost,
        }
    }
}

fn ready(status: &Value) -> u64 {
    number(status, "/tiers/0/page_states/ready")
}

impl Record {
    /// Number of replays that began before the running one.
    pub(super) fn replays(&self) -> u64 {
        self.replays + self.killed
    }

    pub(super) fn killed_replay(&mut self) {
        self.killed += 1;
    }

    pub(super) fn recovered(&mut self, kind: Kind, time: Duration) {
        self.kinds.entry(kind).or_default().recoveries.push(time);
    }

    pub(super) fn pages(&mut self, kind: Kind, pages: Pages) {
        let sum = &mut self.kinds.entry(kind).or_default().pages;
        *sum = Some(sum.unwrap_or_default().and(pages));
    }

    /// Adds the report of a replay. Fails if the report contains something that must not occur.
    pub(super) fn replay(&mut self, report: &Value) -> Result<(), String> {
        self.replays += 1;
        self.requests += number(report, "/requests");
        self.disturbed += number(report, "/disturbed_requests");
        self.verified_bytes += number(report, "/bytes/verified");
        self.hit_tokens += number(report, "/tokens/hit_g2");
        self.abandoned += number(report, "/waits/abandoned");
        let wrong = number(report, "/bytes/mismatched");
        if wrong > 0 {
            return Err(format!("{wrong} bytes came back wrong"));
        }
        for held in [
            "slots",
            "pins",
            "copies_under_way",
            "unsettled_pages",
            "device_pages",
        ] {
            let left = number(report, &format!("/left/{held}"));
            if left > 0 {
                return Err(format!("{left} {held} are left at the end of a replay"));
            }
        }
        let contradiction = report["left"]["contradiction"].as_str();
        if contradiction != Some("") {
            return Err(format!("second count: {contradiction:?}"));
        }
        let answer = number(report, "/waits/answer_max_us");
        let abandon = number(report, "/waits/abandon_max_us");
        self.answer_max_us = self.answer_max_us.max(answer);
        self.abandon_max_us = self.abandon_max_us.max(abandon);
        for (what, us, limit) in [
            ("an answer", answer, REQUEST_TIMEOUT + SLACK),
            ("to take pages back", abandon, FENCE + SLACK),
        ] {
            if Duration::from_micros(us) > limit {
                return Err(format!("{what} took {us} us, more than {limit:?}"));
            }
        }
        Ok(())
    }

    /// The table for the terminal and for docs/reliability.md.
    pub(super) fn table(&mut self, minutes: u64, seed: u64) -> String {
        let mut text = format!(
            "\n{minutes} minutes, seed {seed}: {} replays with {} prompts, {} of them disturbed; {} replays killed\n\
             {:.1} GiB compared; {} tokens from G2; {} loads and stores given up\n\
             longest until an answer {:.2} s, then until the workers had released the pages {:.2} s\n\n",
            self.replays,
            self.requests,
            self.disturbed,
            self.killed,
            self.verified_bytes as f64 / f64::from(1 << 30),
            self.hit_tokens,
            self.abandoned,
            self.answer_max_us as f64 / 1e6,
            self.abandon_max_us as f64 / 1e6,
        );
        text.push_str(
            "| disturbance | times | recovery p50, p99 | pages before | after | lost |\n",
        );
        text.push_str("| --- | ---: | ---: | ---: | ---: | ---: |\n");
        for (kind, of_kind) in &mut self.kinds {
            of_kind.recoveries.sort_unstable();
            let at = |share: usize| {
                let last = of_kind.recoveries.len().saturating_sub(1);
                let time = of_kind.recoveries.get(last * share / 100);
                time.map_or(0.0, Duration::as_secs_f64)
            };
            let (times, p50, p99) = (of_kind.recoveries.len(), at(50), at(99));
            let pages = of_kind.pages.map_or("| |".to_owned(), |pages| {
                format!("{} | {} | {}", pages.before, pages.after, pages.lost)
            });
            let name = kind.name();
            let line = format!("| {name} | {times} | {p50:.2}, {p99:.2} s | {pages} |");
            if writeln!(text, "{line}").is_err() {
                break;
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn status(ready: u64, published: u64, evicted: u64, recovered: u64) -> Value {
        json!({
            "tiers": [{"page_states": {"ready": ready}}],
            "counters": {
                "published_pages": published,
                "evicted_pages": evicted,
                "recovered_pages": recovered,
            },
        })
    }

    #[test]
    fn pages_stored_after_a_worker_ended_do_not_hide_a_lost_one() {
        let before = status(1000, 5000, 4000, 0);
        let pages = |after| Pages::of_worker(&before, &after).expect("counters that grow");
        assert_eq!(pages(status(1020, 5180, 4160, 0)).lost, 0);
        assert_eq!(pages(status(1020, 5180, 4153, 0)).lost, 7);
        assert!(Pages::of_worker(&before, &status(1000, 10, 0, 0)).is_err());
    }

    #[test]
    fn more_pages_than_before_a_leader_ended_are_not_a_share_of_those() {
        let before = status(1000, 5000, 4000, 0);
        assert_eq!(
            Pages::of_leader(&before, &status(0, 0, 0, 1180)),
            Pages {
                before: 1000,
                after: 1180,
                lost: 0,
            }
        );
        assert_eq!(Pages::of_leader(&before, &status(0, 0, 0, 990)).lost, 10);
    }
}
