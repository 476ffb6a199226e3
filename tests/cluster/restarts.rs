//! Live replays with a disk, over restarts of every process.

use std::ffi::OsString;
use std::fs;
use std::fs::Permissions;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use super::replay_events::compare;
use crate::support::{Running, kvferry, number, replay, replay_with, socket_dir};

/// A directory on a disk: temporary directories may lie in memory, where a disk tier cannot be.
pub fn disk() -> TempDir {
    tempfile::Builder::new()
        .permissions(Permissions::from_mode(0o700))
        .tempdir_in(env!("CARGO_TARGET_TMPDIR"))
        .expect("a directory")
}

fn live(directory: &Path, arguments: &[&str]) -> Value {
    live_with(&[], directory, arguments)
}

fn live_with(variables: &[(&str, OsString)], directory: &Path, arguments: &[&str]) -> Value {
    let directory = directory.to_str().expect("UTF-8");
    let disk = ["--g3", "64MiB", "--g3-dir", directory, "--log", "error"];
    let report = replay_with(variables, &[arguments, &disk[..]].concat());
    assert_eq!(number(&report, "/bytes/mismatched"), 0);
    report
}

/// Sizes with which lookups find pages in every tier, and host memory has room for every load.
const SIZES: [&str; 6] = [
    "--requests",
    "120",
    "--g1-pages",
    "16",
    "--g2-pages",
    "2000",
];

/// Runs a sequential live replay with a disk, and the same offline. Both decide the same, and write the same KV events.
/// Returns the live report.
fn live_equals_offline(live_only: &[&str], offline_only: &[&str]) -> Value {
    let directory = disk();
    let sequential = [&["--sequential"][..], &SIZES].concat();
    let folder = socket_dir();
    let paths = ["live", "offline"].map(|mode| folder.path().join(mode));
    let names = paths.each_ref().map(|path| path.to_str().expect("UTF-8"));
    let events = ["--events", names[0]];
    let report = live(
        directory.path(),
        &[&sequential[..], live_only, &events].concat(),
    );
    let pages = number(&report, "/setup/g3_pages").to_string();
    let offline = ["--mode", "offline", "--g3-pages", &pages];
    let events = ["--events", names[1]];
    let offline = replay(&[&sequential[..], &offline, offline_only, &events].concat());
    compare(&paths[0], &paths[1], &report);
    for key in [
        "/tokens",
        "/blocks",
        "/arena",
        "/moves",
        "/requests",
        "/setup",
        "/restart/at",
        "/restart/used_pages",
        "/restart/listed_pages",
        "/restart/tokens",
        "/restart/decisions_digest",
        "/decisions_digest",
    ] {
        assert_eq!(report.pointer(key), offline.pointer(key), "{key}");
    }
    assert_eq!(
        number(&report, "/bytes/verified"),
        number(&report, "/bytes/scattered")
    );
    assert_eq!(number(&report, "/disturbed_requests"), 0);
    assert!(number(&report, "/tokens/hit_g3") > 0, "no page from disk");
    report
}

#[test]
fn sequential_live_and_offline_decide_the_same_with_a_disk() {
    let report = live_equals_offline(&[], &[]);
    assert!(report["restart"].is_null());
}

#[test]
fn hits_after_a_restart_of_everything_are_those_that_the_disk_predicts() {
    let report = live_equals_offline(&["--restart-at", "60"], &["--restart-at", "60"]);
    assert_eq!(report["restart"]["by"], "restart");
    assert!(number(&report, "/restart/tokens/hit_g3") > 0);
}

#[test]
fn hits_after_a_kill_of_everything_are_those_that_the_disk_predicts() {
    let report = live_equals_offline(&["--kill-at", "60"], &["--restart-at", "60"]);
    assert_eq!(report["restart"]["by"], "kill");
    assert!(number(&report, "/restart/tokens/hit_g3") > 0);
}

#[test]
fn a_concurrent_replay_brings_every_byte_back_over_a_kill_of_everything() {
    let directory = disk();
    let paced = ["--concurrency", "6", "--kill-at", "60"];
    let report = live(directory.path(), &[&SIZES[..], &paced].concat());
    assert_eq!(number(&report, "/requests"), 120);
    assert!(number(&report, "/bytes/verified") > 0);
    let from_disk = number(&report, "/restart/tokens/hit_g3");
    assert!(from_disk > 0, "the disk kept nothing");
}

/// Overwrites a part of every page in the second half of each file of pages. Returns the number of places.
fn damage(directory: &Path) -> u64 {
    let mut damaged = 0;
    for set in fs::read_dir(directory.join("shard-0")).expect("a shard") {
        let Ok(files) = fs::read_dir(set.expect("an entry").path()) else {
            continue;
        };
        for file in files {
            let path = file.expect("an entry").path();
            if !path.to_string_lossy().contains("segment-") {
                continue;
            }
            let segment = fs::File::options().write(true).open(&path).expect("opened");
            let bytes = segment.metadata().expect("a size").len();
            // Behind the table of headers, and closer than pages are long: which of them a replay reads depends on
            // where the first one placed them.
            for at in (bytes / 2..bytes).step_by(4 << 10) {
                segment.write_all_at(&[0xa5; 64], at).expect("written");
                damaged += 1;
            }
        }
    }
    damaged
}

#[test]
fn pages_that_were_changed_on_the_disk_are_computed_again_and_leave_nothing_behind() {
    let directory = disk();
    let sequential = [&["--sequential"][..], &SIZES].concat();
    live(directory.path(), &sequential);
    assert!(damage(directory.path()) > 0);
    // Without the scrub, which on a busy machine finds every damaged page before a request does.
    let no_scrub = [("KVFERRY_G3_SCRUB_BYTES_PER_S", "0".into())];
    let report = live_with(&no_scrub, directory.path(), &sequential);
    assert!(number(&report, "/tokens/hit_g3") > 0);
    assert!(
        number(&report, "/disturbed_requests") > 0,
        "no damage was met"
    );
}

#[test]
fn a_directory_is_used_by_one_leader_at_a_time() {
    let (directory, folder) = (disk(), socket_dir());
    let path = directory.path().to_str().expect("UTF-8");
    let sockets = |name: &str| {
        let sockets = folder.path().join(name);
        sockets.to_str().expect("UTF-8").to_owned()
    };
    let (one, other) = (sockets("one"), sockets("other"));
    let leader = |sockets: &str| {
        let disk = ["leader", "--g2", "32MiB", "--g3", "64MiB", "--g3-dir", path];
        let all = disk
            .iter()
            .chain(&["--socket-dir"])
            .map(|text| (*text).to_owned());
        all.chain([sockets.to_owned()]).collect::<Vec<String>>()
    };
    let (one, other) = (leader(&one), leader(&other));
    let first = Running::start(&one.iter().map(String::as_str).collect::<Vec<_>>());
    let until = Instant::now() + Duration::from_secs(30);
    while !directory.path().join("leader/epoch").exists() {
        assert!(Instant::now() < until, "no leader");
        std::thread::sleep(Duration::from_millis(5));
    }
    let second = kvferry(&other.iter().map(String::as_str).collect::<Vec<_>>());
    let errors = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(1), "{errors}");
    assert!(errors.contains("in use by another leader"), "{errors}");
    let check = kvferry(&["fsck", path]);
    let errors = String::from_utf8_lossy(&check.stderr);
    assert!(errors.contains("stop kvferry first"), "{errors}");
    first.terminate();
    assert_eq!(first.end(Duration::from_secs(30)).0, Some(0));
}

#[test]
fn engines_of_two_layouts_in_turn_find_their_own_pages_again() {
    let directory = disk();
    // The share of the prompts that is computed, in percent.
    let computed = |page_tokens| {
        let few = ["--requests", "20", "--g1-pages", "16", "--g2-pages", "2000"];
        let layout = ["--concurrency", "4", "--engine-page-tokens", page_tokens];
        let report = live(directory.path(), &[&few[..], &layout].concat());
        100 * number(&report, "/tokens/computed") / number(&report, "/tokens/prompt")
    };
    let layouts = ["16", "32"];
    for layout in layouts {
        let percent = computed(layout);
        assert!(percent > 20, "cold, and {percent} % are computed");
    }
    for layout in layouts {
        let percent = computed(layout);
        assert!(percent < 5, "warm, and {percent} % are computed");
    }
}

#[test]
fn a_restart_without_a_disk_is_refused() {
    for (arguments, text) in [
        (
            &["--kill-at", "5"][..],
            "--kill-at is 5, and only a disk keeps pages over it: give --g3 and --g3-dir",
        ),
        (
            &["--mode", "offline", "--sequential", "--restart-at", "5"],
            "--restart-at is 5, and only a disk keeps pages over it: give --g3-pages",
        ),
        (
            &["--mode", "offline", "--kill-at", "5"],
            "--kill-at is for live replays",
        ),
    ] {
        let output = kvferry(&[&["replay"], arguments].concat());
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success());
        assert!(errors.contains(text), "{errors}");
    }
}
