//! A disk of real processes: when it opens, when its files are removed, and what `status` has about it.

use std::io::Read as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;
use serde_json::Value;

use super::disturbed::LIMIT;
use super::processes::{leader_beside, signal};
use super::recovery::status_of;
use super::restarts::disk;
use crate::support::{Running, kvferry, number, replay, socket_dir};

/// An `up` of two ranks with a disk.
struct Site {
    sockets: tempfile::TempDir,
    disk: tempfile::TempDir,
    up: Option<Running>,
}

impl Site {
    fn new() -> Self {
        Self {
            sockets: socket_dir(),
            disk: disk(),
            up: None,
        }
    }

    fn start(&mut self, g3: &str) {
        let disk = self.disk.path().to_str().expect("UTF-8").to_owned();
        let common = ["up", "--ranks", "2", "--g2", "16MiB", "--g3", g3];
        let places = ["--g3-dir", &disk, "--socket-dir", self.sockets()];
        self.up = Some(Running::start(&[&common[..], &places].concat()));
    }

    fn sockets(&self) -> &str {
        self.sockets.path().to_str().expect("UTF-8")
    }

    /// Pages that a check of the files finds in the headers.
    fn pages_of_files(&self) -> u64 {
        let disk = self.disk.path().to_str().expect("UTF-8");
        let found = kvferry(&["fsck", disk, "--json"]);
        let found: Value = serde_json::from_slice(&found.stdout).expect("a report");
        number(&found, "/pages")
    }

    /// Replays some requests, and compares the bytes that came back.
    fn replay(&self, requests: &str) {
        status_of(self.sockets(), |_| true);
        let common = [
            "--requests",
            requests,
            "--g1-pages",
            "0",
            "--concurrency",
            "4",
        ];
        let report = replay(&[&common[..], &["--socket-dir", self.sockets()]].concat());
        assert_eq!(number(&report, "/bytes/mismatched"), 0);
    }

    /// Waits until the processes have logged a text a number of times. Leaves what follows to the next call.
    fn await_logged(&mut self, text: &str, times: usize) {
        let up = self.up.as_mut().expect("it runs");
        let errors = up.0.stderr.as_mut().expect("standard error");
        let (begun, mut log) = (Instant::now(), Vec::new());
        while String::from_utf8_lossy(&log).matches(text).count() < times {
            let mut ready = [PollFd::new(errors, PollFlags::IN)];
            let limit = Timespec {
                tv_sec: 1,
                tv_nsec: 0,
            };
            if poll(&mut ready, Some(&limit)).expect("a pipe") > 0 {
                let mut part = [0; 4096];
                let count = errors.read(&mut part).expect("a pipe");
                log.extend(&part[..count]);
            }
            let log = String::from_utf8_lossy(&log);
            assert!(begun.elapsed() < LIMIT, "'{text}' is not in: {log}");
        }
    }

    /// Ends the processes. Returns what they have logged.
    fn end(&mut self) -> String {
        let up = self.up.take().expect("it runs");
        up.terminate();
        let (status, log) = up.end(LIMIT);
        assert_eq!(status, Some(0), "{log}");
        log
    }

    fn shard(&self, shard: u16) -> std::path::PathBuf {
        self.disk.path().join(format!("shard-{shard}"))
    }
}

fn disks(status: &Value) -> Vec<&Value> {
    let ranks = status["ranks"].as_array().expect("ranks");
    ranks.iter().map(|rank| &rank["disk"]).collect()
}

/// Bytes of all files below a directory.
fn bytes_below(directory: &Path) -> u64 {
    let entries = std::fs::read_dir(directory).expect("read");
    let bytes = entries.map(|entry| {
        let entry = entry.expect("read");
        match entry.path().is_dir() {
            true => bytes_below(&entry.path()),
            false => entry.metadata().expect("read").len(),
        }
    });
    bytes.sum()
}

/// The disk opens some milliseconds after the engine has registered, while the engine stores.
#[test]
fn engines_that_store_at_once_lose_nothing_to_a_disk_that_opens_and_nothing_is_warned_of() {
    for round in 0..4 {
        let mut site = Site::new();
        site.start("64MiB");
        site.replay("8");
        let status = status_of(site.sockets(), |_| true);
        for counter in ["failed_copies", "late_copies", "loads_failed"] {
            assert_eq!(
                number(&status, &format!("/counters/{counter}")),
                0,
                "{round} {counter}"
            );
        }
        let log = site.end();
        let mut lines = log.lines();
        let warned = lines.find(|line| line.contains("WARN") || line.contains("ERROR"));
        assert_eq!(warned, None, "{round}");
    }
}

#[test]
fn the_numbers_of_the_disks_are_those_of_their_files_and_everything_is_durable_soon() {
    let mut site = Site::new();
    site.start("64MiB");
    site.replay("60");
    // Without a flush: the disks make durable what they list by themselves.
    let still = |status: &Value| {
        let moves = (&status["moves"]["under_way"], &status["moves"]["waiting"]);
        moves == (&0.into(), &0.into())
            && disks(status).iter().all(|disk| {
                disk["listed_pages"] != 0 && disk["listed_pages"] == disk["durable_pages"]
            })
    };
    let status = status_of(site.sockets(), still);
    for shard in 0..2 {
        let bytes = || bytes_below(&site.shard(shard));
        let at = format!("/ranks/{shard}/disk/used_bytes");
        let status = status_of(site.sockets(), |status| number(status, &at) == bytes());
        assert!(number(&status, &at) <= number(&status, &format!("/ranks/{shard}/disk/cap_bytes")));
    }
    let listed: Vec<u64> = (0..2)
        .map(|rank| number(&status, &format!("/ranks/{rank}/disk/listed_pages")))
        .collect();
    site.end();
    let listed: u64 = listed.iter().sum();
    assert_eq!(site.pages_of_files(), listed);
    // A smaller disk, without an engine.
    let cap = 8 << 20;
    site.start("8MiB");
    let trimmed = |status: &Value| {
        let disks = disks(status);
        disks.iter().all(|disk| {
            let used = disk["used_bytes"].as_u64();
            used.is_some_and(|used| used > 0 && used <= cap / 2)
        })
    };
    status_of(site.sockets(), trimmed);
    let used: u64 = (0..2).map(|shard| bytes_below(&site.shard(shard))).sum();
    assert!(used > 0 && used <= cap, "{used}");
    let table = kvferry(&["status", "--socket-dir", site.sockets()]);
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    assert!(table.contains("no engine has registered"), "{table}");
    site.end();
    let kept = site.pages_of_files();
    assert!(kept > 0 && kept < listed, "{kept} of {listed} are kept");
}

#[test]
fn a_worker_that_was_killed_without_an_engine_writes_what_its_host_memory_has() {
    let mut site = Site::new();
    site.start("64MiB");
    site.replay("30");
    let status = status_of(site.sockets(), |status| status["ready"] == false);
    let worker = number(&status, "/ranks/1/pid");
    signal(worker, Signal::KILL);
    let begun = Instant::now();
    loop {
        let flushed = kvferry(&["flush", "--socket-dir", site.sockets()]);
        let error = String::from_utf8_lossy(&flushed.stderr).into_owned();
        if flushed.status.success() {
            break;
        }
        assert!(begun.elapsed() < LIMIT, "{error}");
    }
    let status = status_of(site.sockets(), |_| true);
    assert_ne!(number(&status, "/ranks/1/pid"), worker);
    let pages = number(&status, "/tiers/1/page_states/ready");
    assert!(pages > 0, "{status}");
    for disk in disks(&status) {
        assert_eq!(
            (&disk["health"], &disk["durable_pages"]),
            (&"ok".into(), &pages.into())
        );
    }
    let log = site.end();
    assert!(!log.contains("may not all be on the disk"), "{log}");
    assert_eq!(
        site.pages_of_files(),
        2 * pages,
        "on the disks of two ranks"
    );
}

#[test]
fn the_directory_of_a_shard_that_is_removed_is_made_again_and_resets_go_on() {
    let mut site = Site::new();
    site.start("64MiB");
    site.replay("30");
    let workers = |status: &Value| {
        (
            number(status, "/ranks/0/pid"),
            number(status, "/ranks/1/pid"),
        )
    };
    let before = workers(&status_of(site.sockets(), |_| true));
    std::fs::remove_dir_all(site.shard(0)).expect("removed");
    let made = |_: &Value| site.shard(0).join("id").exists();
    let begun = Instant::now();
    loop {
        let reset = kvferry(&["reset", "--all", "--socket-dir", site.sockets()]);
        if reset.status.success() {
            break;
        }
        let error = String::from_utf8_lossy(&reset.stderr).into_owned();
        assert!(
            error.contains("not_ready") && begun.elapsed() < LIMIT,
            "{error}"
        );
    }
    let status = status_of(site.sockets(), made);
    assert_eq!(workers(&status), before, "no worker has ended");
    assert_eq!(number(&status, "/tiers/1/used_pages"), 0);
    site.replay("30");
    let ok = |status: &Value| disks(status).iter().all(|disk| disk["health"] == "ok");
    let status = status_of(site.sockets(), ok);
    assert_eq!(workers(&status), before);
    assert!(number(&status, "/tiers/1/used_pages") > 0);
}

/// Below a mount point without its disk is an empty directory.
#[test]
fn processes_that_start_while_the_disk_is_away_make_nothing_in_its_place_and_lose_no_page() {
    let mut site = Site::new();
    site.start("64MiB");
    site.replay("30");
    let flushed = kvferry(&["flush", "--socket-dir", site.sockets()]);
    assert!(flushed.status.success(), "{flushed:?}");
    let status = status_of(site.sockets(), |status| status["ready"] == false);
    let pages = number(&status, "/tiers/1/used_pages");
    assert!(pages > 0, "{status}");
    let (mounted, away) = (site.disk.path(), site.disk.path().with_extension("away"));
    let worker = number(&status, "/ranks/0/pid");
    let leader = leader_beside(worker);
    std::fs::rename(mounted, &away).expect("renamed");
    let mut own = std::fs::DirBuilder::new();
    own.mode(0o700).create(mounted).expect("created");
    signal(number(&status, "/ranks/1/pid"), Signal::KILL);
    site.await_logged("worker ready", 3);
    signal(leader, Signal::KILL);
    site.await_logged("waiting for the disk", 1);
    let mounted = site.disk.path();
    let found = std::fs::read_dir(mounted).expect("read").count();
    assert_eq!(found, 0, "nothing is made in the empty directory");
    std::fs::remove_dir(mounted).expect("empty");
    std::fs::rename(&away, mounted).expect("renamed");
    let found = |status: &Value| {
        let disks = disks(status);
        let missing = |disk: &&Value| disk["reason"].to_string().contains("missing");
        // A leader that has just started does not know the worker's process yet.
        let is_known = status["ranks"][0]["pid"].as_u64() > Some(0);
        is_known && disks.len() == 2 && !disks.iter().any(missing)
    };
    let status = status_of(site.sockets(), found);
    assert_eq!(number(&status, "/ranks/0/pid"), worker, "it lives");
    // An engine with the same pages finds all of them.
    site.replay("30");
    let status = status_of(site.sockets(), |_| true);
    assert_eq!(number(&status, "/tiers/1/used_pages"), pages);
    site.end();
    assert_eq!(site.pages_of_files(), 2 * pages);
}
