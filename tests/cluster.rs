//! Real processes, real bytes: leader, workers and an engine, as a user starts them.

#![expect(
    clippy::expect_used,
    clippy::panic,
    reason = "a test says what it expects"
)]

mod support;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use support::{Running, kvferry, number, replay, trace};

/// Runs the same sequential replay live and offline and compares what was decided. Returns the live report.
fn live_equals_offline(name: &str, arguments: &[&str]) -> Option<Value> {
    let path = trace(name)?;
    let mut all = vec![path.to_str().expect("UTF-8"), "--sequential"];
    all.extend_from_slice(arguments);
    let offline = replay(&[&all[..], &["--mode", "offline"]].concat());
    let live = replay(&[&all[..], &["--mode", "live"]].concat());
    for key in [
        "/tokens",
        "/blocks",
        "/arena",
        "/requests",
        "/decisions_digest",
    ] {
        assert_eq!(
            live.pointer(key),
            offline.pointer(key),
            "{key} of {arguments:?}"
        );
    }
    assert_eq!(
        number(&live, "/bytes/gathered"),
        number(&offline, "/bytes/gathered")
    );
    assert_eq!(
        number(&live, "/bytes/scattered"),
        number(&offline, "/bytes/scattered")
    );
    assert_eq!(
        number(&live, "/bytes/verified"),
        number(&live, "/bytes/scattered")
    );
    assert_eq!(number(&live, "/bytes/mismatched"), 0);
    assert_eq!(number(&live, "/disturbed_requests"), 0);
    Some(live)
}

#[test]
fn sequential_live_and_offline_decide_the_same() {
    let conversation = ["--requests", "300", "--engine-page-tokens"];
    let weka = [
        "--requests",
        "60",
        "--trace-block-tokens",
        "64",
        "--engine-page-tokens",
        "16",
    ];
    let runs = [
        (
            "conv",
            [
                &conversation[..],
                &["16", "--g1-pages", "0", "--g2-pages", "8000"],
            ]
            .concat(),
        ),
        (
            "conv",
            [
                &conversation[..],
                &["512", "--g1-pages", "300", "--g2-pages", "600"],
            ]
            .concat(),
        ),
        (
            "weka40",
            [&weka[..], &["--g1-pages", "0", "--g2-pages", "60000"]].concat(),
        ),
    ];
    let mut seen = [("grown", 0), ("branched", 0), ("evicted", 0), ("loaded", 0)];
    for (name, arguments) in runs {
        let Some(live) = live_equals_offline(name, &arguments) else {
            return;
        };
        for (key, total) in &mut seen {
            *total += number(&live, &format!("/blocks/{key}"));
        }
    }
    for (key, total) in seen {
        assert!(
            total > 0,
            "no block was {key}: the runs prove nothing about that"
        );
    }
}

/// Everything at once: several requests, small host memory, both layouts; every loaded byte is compared.
fn concurrent(arguments: &[&str]) -> Value {
    let common = [
        "--concurrency",
        "6",
        "--g1-pages",
        "64",
        "--g2-pages",
        "3000",
    ];
    let report = replay(&[&common[..], arguments].concat());
    assert_eq!(number(&report, "/bytes/mismatched"), 0);
    assert!(number(&report, "/bytes/verified") > 0, "nothing was loaded");
    assert!(
        number(&report, "/blocks/evicted") > 0,
        "nothing was evicted"
    );
    report
}

#[test]
fn a_concurrent_replay_brings_every_byte_back() {
    concurrent(&["--layout", "layer-separate", "--seed", "7"]);
}

#[test]
fn a_concurrent_replay_with_contiguous_pages_brings_every_byte_back() {
    concurrent(&[
        "--layout",
        "contiguous",
        "--ranks",
        "3",
        "--ratio",
        "8",
        "--seed",
        "8",
    ]);
}

#[test]
fn models_with_odd_geometry_come_back_whole() {
    let common = ["--requests", "12", "--concurrency", "3", "--g1-pages", "0"];
    for model in ["llama-3-8b", "deepseek-v3-mla"] {
        let report = replay(&[&common[..], &["--model", model, "--g2", "1GiB"]].concat());
        assert_eq!(number(&report, "/bytes/mismatched"), 0, "{model}");
        assert!(
            number(&report, "/bytes/verified") > 0,
            "{model}: nothing was loaded"
        );
    }
}

#[test]
fn what_all_ranks_hold_is_stored_once_and_loaded_by_each() {
    for (model, ranks, shards) in [("deepseek-v3-mla", 4, 1), ("llama-3-8b", 16, 8)] {
        let report = replay(&[
            "--model",
            model,
            "--ranks",
            &ranks.to_string(),
            "--requests",
            "8",
            "--g1-pages",
            "0",
            "--g2",
            "1GiB",
            "--max-prompt-tokens",
            "1024",
            "--concurrency",
            "2",
        ]);
        assert_eq!(number(&report, "/setup/kv_shards"), shards, "{model}");
        assert_eq!(number(&report, "/bytes/mismatched"), 0, "{model}");
        assert_eq!(number(&report, "/blocks/evicted"), 0, "{model}");
        let page_bytes = number(&report, "/setup/page_bytes");
        let stored = number(&report, "/arena/used_pages") * page_bytes;
        assert_eq!(
            number(&report, "/bytes/gathered"),
            shards * stored,
            "{model}"
        );
        let found = number(&report, "/tokens/hit_g2") / 16 * page_bytes;
        assert!(found > 0, "{model}: nothing was found");
        assert_eq!(
            number(&report, "/bytes/scattered"),
            ranks * found,
            "{model}"
        );
    }
}

#[test]
fn without_any_tier_everything_is_computed() {
    let report = replay(&["--requests", "10", "--g2-pages", "0", "--concurrency", "2"]);
    assert_eq!(number(&report, "/tokens/hit_g2"), 0);
    assert!(
        number(&report, "/blocks/refused") > 0,
        "refusals are visible"
    );
}

#[test]
fn replicas_find_what_others_stored() {
    let alone = concurrent(&["--requests", "200", "--seed", "9"]);
    let report = concurrent(&["--requests", "200", "--seed", "9", "--replicas", "3"]);
    assert_eq!(number(&report, "/setup/replicas"), 3);
    assert_eq!(number(&report, "/requests"), 200);
    assert_eq!(number(&report, "/disturbed_requests"), 0);
    assert_eq!(
        number(&report, "/tokens/prompt"),
        number(&alone, "/tokens/prompt")
    );
    assert!(
        number(&report, "/tokens/hit_g2") > number(&alone, "/tokens/hit_g2") / 2,
        "each finds its own only"
    );
}

#[test]
fn replicas_are_for_live_replays() {
    let output = kvferry(&["replay", "--mode", "offline", "--replicas", "2"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(
        errors.contains("--replicas is for live replays"),
        "{errors}"
    );
}

/// A replay in the background, with processes that a test kills or stops.
struct Disturbed {
    running: Running,
    folder: tempfile::TempDir,
    began: Instant,
}

/// Longer than any replay here takes.
const LIMIT: Duration = Duration::from_secs(120);
/// How long the engines of these replays wait for an answer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);

impl Disturbed {
    fn start(arguments: &[&str]) -> Self {
        let folder = support::socket_dir();
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
            running: Running::start_in(&[&common[..], arguments].concat(), folder.path()),
            folder,
            began: Instant::now(),
        }
    }

    /// Where leader and workers meet, once they do.
    fn sockets(&self) -> Option<PathBuf> {
        let entries = std::fs::read_dir(self.folder.path()).expect("a folder");
        let mut paths = entries.map(|entry| entry.expect("an entry").path());
        paths.find(|path| path.is_dir())
    }

    /// The leader's status, once something is true of it.
    fn status(&self, is_true: impl Fn(&Value) -> bool) -> Value {
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
    fn in_the_middle(&self) -> Value {
        self.status(|status| number(status, "/counters/blocks_loaded") > 40)
    }

    /// The report, of a replay that brought every byte back and left nothing behind.
    fn report(self) -> Value {
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

fn signal(pid: u64, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    kill_process(pid.expect("a process"), signal).expect("it runs");
}

/// The leader beside this worker: the other kind of child of the same process.
fn leader_beside(worker: u64) -> u64 {
    let parent = parent_of(worker).expect("it runs");
    let processes = std::fs::read_dir("/proc").expect("a list of processes");
    let processes = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let is_leader = |pid: &u64| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let command = line.split(|byte| *byte == 0).nth(1);
        command == Some(b"leader") && parent_of(*pid) == Some(parent)
    };
    let mut leaders = processes.filter(is_leader);
    leaders.next().expect("a leader")
}

fn parent_of(pid: u64) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let behind_name = stat.rsplit_once(')')?.1;
    behind_name.split_whitespace().nth(1)?.parse().ok()
}

#[test]
fn a_worker_that_is_killed_costs_hits_and_no_bytes() {
    let replay = Disturbed::start(&[]);
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
fn a_leader_that_stands_still_costs_hits_and_no_bytes() {
    let replay = Disturbed::start(&[]);
    let status = replay.in_the_middle();
    let loaded = number(&status, "/counters/blocks_loaded");
    let leader = leader_beside(number(&status, "/ranks/0/pid"));
    signal(leader, Signal::STOP);
    // Not a wait for anything: this is how long it stands still.
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

/// The status of an `up`, once something is true of it.
fn status_of(sockets: &str, is_true: impl Fn(&Value) -> bool) -> Value {
    let begun = Instant::now();
    loop {
        let output = kvferry(&["status", "--json", "--check", "--socket-dir", sockets]);
        if let Ok(status) = serde_json::from_slice(&output.stdout)
            && is_true(&status)
        {
            return status;
        }
        assert!(begun.elapsed() < LIMIT, "it does not get there");
    }
}

#[test]
fn what_was_stored_outlives_leader_and_workers_and_what_was_reset_stays_away() {
    outlives(&[], &["--requests", "40"]);
}

#[test]
fn what_was_stored_once_for_two_ranks_outlives_them() {
    let model = ["--model", "deepseek-v3-mla", "--max-prompt-tokens", "512"];
    let replayed = [&model[..], &["--requests", "8"]].concat();
    outlives(&["--kv-shards", "1"], &replayed);
}

/// Kills the leader and then both workers of an `up` between equal replays, and resets it.
fn outlives(started: &[&str], replayed: &[&str]) {
    let folder = support::socket_dir();
    let sockets = folder.path().to_str().expect("UTF-8");
    let common = ["--g2", "1GiB", "--socket-dir", sockets];
    let _up = Running::start(&[&["up", "--ranks", "2"], started, &common].concat());
    let serve = || {
        let sequential = ["--sequential", "--g1-pages", "0"];
        let report = replay(&[replayed, &sequential, &common].concat());
        assert_eq!(number(&report, "/bytes/mismatched"), 0);
        number(&report, "/tokens/hit_g2")
    };
    let first = serve();
    let status = status_of(sockets, |_| true);
    let ready = number(&status, "/pages/ready");
    assert!(ready > 0, "nothing was stored");

    let next_leader = |epoch: u64| {
        let status = status_of(sockets, |status| status["ranks"][0]["pid"].is_u64());
        let leader = leader_beside(number(&status, "/ranks/0/pid"));
        signal(leader, Signal::KILL);
        status_of(sockets, |status| number(status, "/epoch") == epoch);
    };
    next_leader(2);
    let all = serve();
    let status = status_of(sockets, |_| true);
    assert_eq!(number(&status, "/counters/recovered_pages"), ready);
    assert!(
        all > first,
        "{all} after {first}: what was found again was not found"
    );

    for rank in 0..2 {
        let pid = number(&status, &format!("/ranks/{rank}/pid"));
        signal(pid, Signal::KILL);
    }
    assert_eq!(
        serve(),
        all,
        "a new worker serves what its predecessor stored"
    );

    let output = kvferry(&["reset", "--all", "--socket-dir", sockets]);
    assert!(output.status.success());
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(text.trim(), format!("{ready} pages forgotten"));
    next_leader(3);
    assert_eq!(serve(), first, "what was reset came back");
    let status = status_of(sockets, |_| true);
    assert_eq!(number(&status, "/counters/recovered_pages"), 0);
}
