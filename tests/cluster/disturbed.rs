//! Concurrent replays whose processes are killed or stopped in the middle.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use kvferry_workload::trace::{self, Shape};
use rustix::process::Signal;
use serde_json::{Value, json};

use super::processes::{leader_beside, lives, signal, stop};
use crate::support::{Running, kvferry, number, socket_dir};

/// A replay in the background. The test kills or stops its processes.
pub struct Disturbed {
    running: Running,
    folder: tempfile::TempDir,
    began: Instant,
}

/// Longer than any replay takes in these tests.
pub const LIMIT: Duration = Duration::from_mins(5);
/// Requests of a long replay, five times as many as in the built-in workload. Most of its loads come after a status
/// that is read late, so that a test can tell loads before a kill from those after it.
const LONG_REQUESTS: u32 = 2000;
/// Time that the engines of these replays wait for an answer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);

impl Disturbed {
    fn start(arguments: &[&str]) -> Self {
        Self::start_with(&[], arguments)
    }

    /// Starts a replay of [`LONG_REQUESTS`] requests.
    fn start_long() -> Self {
        let folder = socket_dir();
        let shape = Shape {
            requests: LONG_REQUESTS,
            ..Shape::default()
        };
        let lines = trace::generate(&shape, 1).requests.into_iter().map(|each| {
            let line = json!({
                "timestamp": each.timestamp_us / 1_000,
                "input_length": each.input_tokens,
                "output_length": each.output_tokens,
                "hash_ids": each.blocks,
            });
            format!("{line}\n")
        });
        let path = folder.path().join("long.jsonl");
        std::fs::write(&path, lines.collect::<String>()).expect("a trace is written");
        let block_tokens = shape.block_tokens.to_string();
        let path = path.to_str().expect("UTF-8");
        Self::start_in(folder, &[], &[path, "--trace-block-tokens", &block_tokens])
    }

    /// Starts a replay with these environment variables.
    pub fn start_with(variables: &[(&str, OsString)], arguments: &[&str]) -> Self {
        Self::start_in(socket_dir(), variables, arguments)
    }

    fn start_in(
        folder: tempfile::TempDir,
        variables: &[(&str, OsString)],
        arguments: &[&str],
    ) -> Self {
        let report = folder.path().join("report.json");
        let timeout = REQUEST_TIMEOUT.as_millis().to_string();
        let common = [
            "replay",
            "--quiet",
            "--json",
            report.to_str().expect("UTF-8"),
            "--concurrency",
            "6",
            "--g1-pages",
            "64",
            "--g2-pages",
            "3000",
            "--request-timeout-ms",
            &timeout,
        ];
        Self {
            running: Running::start_with(
                variables,
                &[&common[..], arguments].concat(),
                folder.path(),
            ),
            folder,
            began: Instant::now(),
        }
    }

    /// The socket directory of leader and workers, once it exists.
    fn sockets(&self) -> Option<PathBuf> {
        let entries = std::fs::read_dir(self.folder.path()).expect("a folder");
        let mut paths = entries.map(|entry| entry.expect("an entry").path());
        paths.find(|path| path.is_dir())
    }

    /// Waits until `is_true` holds for the leader's status, and returns the status.
    pub fn status(&self, is_true: impl Fn(&Value) -> bool) -> Value {
        loop {
            assert!(self.began.elapsed() < LIMIT, "it does not get there");
            let Some(sockets) = self.sockets() else {
                std::thread::yield_now();
                continue;
            };
            let sockets = sockets.to_str().expect("UTF-8").to_owned();
            let output = kvferry(&["status", "--json", "--socket-dir", &sockets]);
            if let Ok(status) = serde_json::from_slice(&output.stdout)
                && is_true(&status)
            {
                return status;
            }
        }
    }

    /// The status in the middle of the replay.
    pub fn in_the_middle(&self) -> Value {
        self.status(|status| number(status, "/counters/blocks_loaded") > 40)
    }

    /// The report of a replay that must have loaded every byte correctly and left nothing behind.
    pub fn report(self) -> Value {
        let left = LIMIT.saturating_sub(self.began.elapsed());
        let (code, errors) = self.running.end(left);
        assert_eq!(code, Some(0), "{errors}");
        let text = std::fs::read(self.folder.path().join("report.json")).expect("a report");
        let report = serde_json::from_slice(&text).expect("JSON");
        assert_eq!(number(&report, "/bytes/mismatched"), 0);
        for held in ["slots", "pins", "copies_under_way", "unsettled_pages"] {
            assert_eq!(number(&report, &format!("/left/{held}")), 0, "{held}");
        }
        assert!(number(&report, "/disturbed_requests") > 0, "nobody noticed");
        report
    }
}

#[test]
fn a_worker_that_is_killed_costs_hits_and_no_bytes() {
    let replay = Disturbed::start_long();
    let status = replay.in_the_middle();
    let loaded = number(&status, "/counters/blocks_loaded");
    signal(number(&status, "/ranks/1/pid"), Signal::KILL);
    let report = replay.report();
    assert!(
        number(&report, "/blocks/loaded") > 2 * loaded + 100,
        "its successor got no memory"
    );
}

#[test]
fn a_worker_that_is_paused_past_a_deadline_costs_hits_and_no_bytes() {
    let replay = Disturbed::start(&["--replicas", "2"]);
    let status = replay.in_the_middle();
    let worker = number(&status, "/ranks/1/pid");
    stop(worker);
    // Stops the worker for this long: the sleep waits for no event. Late copies belong to requests that are over.
    std::thread::sleep(3 * REQUEST_TIMEOUT);
    signal(worker, Signal::CONT);
    let report = replay.report();
    assert!(number(&report, "/waits/abandoned") > 0, "nothing was late");
}

#[test]
fn a_worker_that_is_paused_forever_is_killed_and_succeeded() {
    let replay = Disturbed::start_long();
    let status = replay.in_the_middle();
    let worker = number(&status, "/ranks/1/pid");
    stop(worker);
    // Checked while the replay runs: at its end all processes end.
    replay.status(|status| {
        let pid = number(status, "/ranks/1/pid");
        pid != 0 && pid != worker
    });
    assert!(!lives(worker), "there are two");
    let report = replay.report();
    let loaded = number(&status, "/counters/blocks_loaded");
    assert!(
        number(&report, "/blocks/loaded") > loaded + 100,
        "its successor got no memory"
    );
}

#[test]
fn a_paused_leader_costs_hits_and_no_bytes() {
    let replay = Disturbed::start_long();
    let status = replay.in_the_middle();
    let loaded = number(&status, "/counters/blocks_loaded");
    let leader = leader_beside(number(&status, "/ranks/0/pid"));
    stop(leader);
    // Stops the leader for this long: the sleep waits for no event.
    std::thread::sleep(4 * REQUEST_TIMEOUT);
    signal(leader, Signal::CONT);
    let report = replay.report();
    assert!(
        number(&report, "/waits/abandoned") > 0,
        "its engine gave nothing up"
    );
    assert!(
        number(&report, "/blocks/loaded") > 2 * loaded + 100,
        "its engine found nothing any more"
    );
}

#[test]
fn a_leader_and_a_worker_that_are_killed_together_cost_hits_and_no_bytes() {
    let replay = Disturbed::start(&["--layout", "contiguous"]);
    let status = replay.in_the_middle();
    let worker = number(&status, "/ranks/0/pid");
    let leader = leader_beside(worker);
    signal(leader, Signal::KILL);
    signal(worker, Signal::KILL);
    let report = replay.report();
    assert!(
        number(&report, "/blocks/loaded") > 100,
        "nothing is found any more"
    );
}
