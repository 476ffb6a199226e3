//! Messages of commands that cannot do what they are asked for: each names what is wrong, the value, and what to do.

use std::fs;
use std::os::unix::fs::chown;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::skipped::skipped;
use crate::support::{Running, kvferry, socket_dir};
use crate::{LIMIT, refused, status_once};

/// Runs `status` and `replay`, which must fail sooner than they would wait for an answer. Returns what both say.
fn no_status(sockets: &Path) -> String {
    let said = ["status", "replay"].map(|command| no_answer(command, sockets));
    assert_eq!(said[0], said[1]);
    said.into_iter().next().expect("two")
}

fn no_answer(command: &str, sockets: &Path) -> String {
    let begun = Instant::now();
    let output = kvferry(&[command, "--socket-dir", sockets.to_str().expect("UTF-8")]);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(begun.elapsed() < Duration::from_secs(4), "{errors}");
    assert_eq!(errors.lines().count(), 1, "{errors}");
    assert!(
        errors.contains(sockets.to_str().expect("UTF-8")),
        "{errors}"
    );
    errors
}

#[test]
fn a_missing_directory_an_empty_one_and_a_stopped_leader_are_told_apart() {
    let folder = socket_dir();
    let missing = no_status(&folder.path().join("missing"));
    assert!(missing.contains("does not exist"), "{missing}");
    let empty = no_status(folder.path());
    assert!(empty.contains("no process listens there"), "{empty}");

    let sockets = folder.path().to_str().expect("UTF-8");
    let leader = Running::start(&["leader", "--g2", "16MiB", "--socket-dir", sockets]);
    status_once(sockets, |_| true);
    leader.signal(Signal::STOP);
    let stopped = no_status(folder.path());
    let pid = leader.0.id();
    for words in [
        &format!("process {pid}"),
        "state T",
        &format!("kill -CONT {pid}"),
    ] {
        assert!(stopped.contains(words), "{words}: {stopped}");
    }
    leader.signal(Signal::KILL);
    let (code, errors) = leader.end(LIMIT);
    assert_eq!(code, None, "{errors}");
    // Its socket is still there.
    let killed = no_status(folder.path());
    assert!(killed.contains("no process listens there"), "{killed}");
}

#[test]
fn the_directory_of_another_user_is_named_with_that_user() {
    if !rustix::process::geteuid().is_root() {
        return skipped("it needs root, which gives a directory to another user");
    }
    let folder = socket_dir();
    chown(folder.path(), Some(12_345), None).expect("given");
    let other = no_status(folder.path());
    assert!(
        other.contains("belongs to uid 12345: run the command as that user"),
        "{other}"
    );
}

#[test]
fn negative_sizes_are_refused_as_sizes() {
    for flag in [
        "--g2",
        "--g3",
        "--store-bytes-per-s",
        "--g3-scrub-bytes-per-s",
    ] {
        for value in ["-1", "-1GiB"] {
            refused(&["up", flag, value], 2, &[flag, value, "is not a size"]);
        }
    }
    refused(&["up", "--ranks", "-1"], 2, &["--ranks", "-1"]);
    refused(
        &["replay", "--g2", "-1"],
        2,
        &["--g2", "-1", "is not a size"],
    );
}

#[test]
fn a_share_of_host_memory_without_room_for_a_page_is_named_with_all_of_it() {
    let folder = socket_dir();
    let sockets = folder.path().join("s");
    let up = ["up", "--g2", "5000", "--ranks", "2", "--socket-dir"];
    let up = [&up[..], &[sockets.to_str().expect("UTF-8")]].concat();
    refused(
        &up,
        78,
        &["g2 is", "each of 2 shards", "2500 bytes", "4096"],
    );
}

#[test]
fn a_replay_of_more_requests_than_there_are_says_how_many_there_are() {
    let offline = ["replay", "--mode", "offline", "--sequential", "--json", "-"];
    let output = kvferry(&[&offline[..], &["--requests", "6000"]].concat());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    for words in ["--requests is 6000", "the built-in workload has 400"] {
        assert!(errors.contains(words), "{words}: {errors}");
    }
    let output = kvferry(&[&offline[..], &["--requests", "20"]].concat());
    assert!(output.stderr.is_empty());
}

#[test]
fn a_comma_in_a_directory_of_a_replay_makes_no_directory_elsewhere() {
    let folder = socket_dir();
    let name = format!("{}/a,b", folder.path().display());
    let replay = ["replay", "--g3", "64MiB", "--g3-dir", &name];
    refused(&replay, 78, &[&name, "b is not absolute", "without commas"]);
    assert!(!Path::new("b").exists());
}

#[test]
fn a_socket_directory_that_is_too_long_is_named_with_its_length_and_where_it_comes_from() {
    let folder = socket_dir();
    let long = folder.path().join("\u{e9}".repeat(50));
    fs::create_dir(&long).expect("made");
    let bytes = long.as_os_str().len() + "/kvferry".len();
    let status = crate::support::command()
        .arg("status")
        .env("XDG_RUNTIME_DIR", &long)
        .env_remove("KVFERRY_SOCKET_DIR")
        .output()
        .expect("the program runs");
    let errors = String::from_utf8_lossy(&status.stderr);
    assert_eq!(status.status.code(), Some(78), "{errors}");
    for words in [
        "XDG_RUNTIME_DIR",
        "at most 80",
        &format!("has {bytes}"),
        "--socket-dir",
    ] {
        assert!(errors.contains(words), "{words}: {errors}");
    }
    assert_eq!(
        errors.matches('"').count(),
        2,
        "its quotes are closed: {errors}"
    );
}

#[test]
fn a_group_whose_pages_leave_most_of_their_places_empty_is_named_with_both_sizes() {
    let warned = |model: &str| {
        let replay = ["replay", "--model", model, "--ranks", "1", "--quiet"];
        let load = ["--requests", "4", "--concurrency", "2"];
        let output = kvferry(&[&replay[..], &load].concat());
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{errors}");
        errors
    };
    let errors = warned("two-sizes");
    assert!(
        errors.contains("a page of group 0 has 8 KiB and takes 64 KiB of g2 and g3"),
        "{errors}"
    );
    let errors = warned("tiny");
    assert!(!errors.contains("a page of group"), "{errors}");
}
