//! State that outlives processes, and state that does not.

use std::time::Instant;

use rustix::process::Signal;
use serde_json::Value;

use super::disturbed::LIMIT;
use super::processes::{children, leader_beside, lives, signal};
use crate::support::{Running, kvferry, number, replay, socket_dir};

/// Waits until `is_true` holds for a leader's status, and returns the status.
pub fn status_of(sockets: &str, is_true: impl Fn(&Value) -> bool) -> Value {
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
fn stored_pages_outlive_leader_and_workers_and_reset_pages_do_not_return() {
    outlives(&[], &["--requests", "40"]);
}

#[test]
fn pages_stored_once_for_two_ranks_outlive_them() {
    let model = ["--model", "deepseek-v3-mla", "--max-prompt-tokens", "512"];
    let replayed = [&model[..], &["--requests", "8"]].concat();
    outlives(&["--kv-shards", "1"], &replayed);
}

/// Kills the leader and then both workers of an `up` between equal replays, and resets it.
fn outlives(started: &[&str], replayed: &[&str]) {
    let folder = socket_dir();
    let sockets = folder.path().to_str().expect("UTF-8");
    let common = ["--socket-dir", sockets];
    let up = ["up", "--ranks", "2", "--g2", "1GiB"];
    let _up = Running::start(&[&up[..], started, &common].concat());
    let serve = || {
        status_of(sockets, |_| true);
        let sequential = ["--sequential", "--g1-pages", "0"];
        let report = replay(&[replayed, &sequential, &common].concat());
        assert_eq!(number(&report, "/bytes/mismatched"), 0);
        number(&report, "/tokens/hit_g2")
    };
    let first = serve();
    let status = status_of(sockets, |_| true);
    let ready = number(&status, "/tiers/0/page_states/ready");
    assert!(ready > 0, "nothing was stored");

    let next_leader = || {
        let status = status_of(sockets, |status| status["ranks"][0]["pid"].is_u64());
        let epoch = number(&status, "/epoch") + 1;
        let leader = leader_beside(number(&status, "/ranks/0/pid"));
        signal(leader, Signal::KILL);
        status_of(sockets, |status| number(status, "/epoch") == epoch);
    };
    next_leader();
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
    assert_eq!(text.trim(), format!("pages forgotten: {ready} in g2"));
    next_leader();
    assert_eq!(serve(), first, "what was reset came back");
    let status = status_of(sockets, |_| true);
    assert_eq!(number(&status, "/counters/recovered_pages"), 0);
}

#[test]
fn everything_ends_with_up_and_the_next_start_begins_empty() {
    let folder = socket_dir();
    let sockets = folder.path().to_str().expect("UTF-8");
    let common = ["--socket-dir", sockets];
    let up = [&["up", "--ranks", "2", "--g2", "256MiB"], &common[..]].concat();
    let serve = || {
        status_of(sockets, |_| true);
        let sequential = ["--sequential", "--g1-pages", "0", "--requests", "20"];
        let report = replay(&[&sequential, &common[..]].concat());
        assert_eq!(number(&report, "/bytes/mismatched"), 0);
        number(&report, "/tokens/hit_g2")
    };
    let mut first = Running::start(&up);
    let empty = serve();
    let kept = serve();
    assert!(kept > empty, "nothing was kept while it ran");
    let mut files = files_below(folder.path());
    let pid = u64::from(first.0.id());
    let parts = children(pid);
    assert_eq!(parts.len(), 3, "a leader and two workers");
    signal(pid, Signal::KILL);
    first.0.wait().expect("killed");
    let begun = Instant::now();
    while parts.iter().any(|part| lives(*part)) {
        assert!(begun.elapsed() < LIMIT, "a part of it goes on");
        std::thread::yield_now();
    }

    let _second = Running::start(&up);
    assert_eq!(serve(), empty, "host memory is gone");
    let mut again = files_below(folder.path());
    for list in [&mut files, &mut again] {
        list.sort();
    }
    assert_eq!(again, files, "the first one left something behind");
}

/// Paths of all files below a folder.
pub fn files_below(folder: &std::path::Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("a folder");
    let entries = entries.map(|entry| entry.expect("an entry").path());
    let (folders, files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
    let names = files.iter().map(|path| path.display().to_string());
    let below = folders.iter().flat_map(|folder| files_below(folder));
    names.chain(below).collect()
}
