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
    pages_held: u64,
    pages_kept: u64,
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

    /// Adds the pages that were ready before a disturbance, and those of them that are still found.
    pub(super) fn kept(&mut self, kind: Kind, held: u64, kept: u64) {
        let of_kind = self.kinds.entry(kind).or_default();
        of_kind.pages_held += held;
        of_kind.pages_kept += kept;
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
        text.push_str("| disturbance | times | recovery p50, p99 | pages held | found again |\n");
        text.push_str("| --- | ---: | ---: | ---: | ---: |\n");
        for (kind, of_kind) in &mut self.kinds {
            of_kind.recoveries.sort_unstable();
            let at = |share: usize| {
                let last = of_kind.recoveries.len().saturating_sub(1);
                let time = of_kind.recoveries.get(last * share / 100);
                time.map_or(0.0, Duration::as_secs_f64)
            };
            let (times, p50, p99) = (of_kind.recoveries.len(), at(50), at(99));
            let (held, kept) = match of_kind.pages_held {
                0 => (String::new(), String::new()),
                held => {
                    let share = 100.0 * of_kind.pages_kept as f64 / held as f64;
                    (held.to_string(), format!("{share:.1} %"))
                }
            };
            let name = kind.name();
            let line = format!("| {name} | {times} | {p50:.2}, {p99:.2} s | {held} | {kept} |");
            if writeln!(text, "{line}").is_err() {
                break;
            }
        }
        text
    }
}
