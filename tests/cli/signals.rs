//! How signals end the program, and which of them stay ignored.

use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tokio::signal::unix::SignalKind;

use crate::support::{self, Running, kvferry, signals, socket_dir};
use crate::{LIMIT, status_once};

/// Starts `up` for a test, and waits until it answers.
fn up(mut command: Command, sockets: &str) -> Running {
    command.args(["--ranks", "2", "--g2", "32MiB", "--socket-dir", sockets]);
    let running = Running::spawn(&mut command);
    status_once(sockets, |_| true);
    running
}

/// Checks that `up` ended in order, its socket is gone, and no process of its group is left.
fn ended(running: Running, folder: &tempfile::TempDir) {
    let group = Pid::from_child(&running.0);
    let (code, errors) = running.end(LIMIT);
    assert_eq!(code, Some(0), "{errors}");
    assert!(errors.contains("leader ended"), "{errors}");
    for wrong in ["starting it again", "the supervisor is gone"] {
        assert!(!errors.contains(wrong), "{errors}");
    }
    assert!(!folder.path().join("leader/kvferry.sock").exists());
    assert!(
        rustix::process::test_kill_process_group(group).is_err(),
        "something of it is left"
    );
}

#[test]
fn up_ends_in_order_by_a_signal_to_it_alone() {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let folder = socket_dir();
        let mut command = support::command();
        command.arg("up").process_group(0);
        let running = up(command, folder.path().to_str().expect("UTF-8"));
        running.signal(signal);
        ended(running, &folder);
    }
}

/// Waits until a process handles SIGTERM. One that has just been started still ends by it.
fn handles_sigterm(process: &str) {
    let until = Instant::now() + LIMIT;
    loop {
        let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("a status");
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
        let caught = u64::from_str_radix(caught.expect("a mask").trim(), 16).expect("a number");
        if caught & (1 << (Signal::TERM.as_raw() - 1)) != 0 {
            return;
        }
        assert!(Instant::now() < until, "process {process}: {status}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A service manager sends SIGTERM to each process of a group, and children must not end before `up` has flushed.
#[test]
fn children_leave_sigterm_to_up() {
    let folder = socket_dir();
    let mut command = support::command();
    command.arg("up").process_group(0);
    let running = up(command, folder.path().to_str().expect("UTF-8"));
    let own = running.0.id();
    let children = format!("/proc/{own}/task/{own}/children");
    let children = || std::fs::read_to_string(&children).expect("children");
    let before = children();
    assert_eq!(before.split_whitespace().count(), 3, "{before}");
    before.split_whitespace().for_each(handles_sigterm);
    for child in before.split_whitespace() {
        let child = Pid::from_raw(child.parse().expect("a number")).expect("above 0");
        kill_process(child, Signal::TERM).expect("a child");
    }
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(children(), before);
    running.terminate();
    ended(running, &folder);
}

/// A terminal and a service manager send their signals to each process of a group.
#[test]
fn up_ends_in_order_by_a_signal_to_all_its_processes() {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let folder = socket_dir();
        let mut command = support::command();
        command.arg("up").process_group(0);
        let running = up(command, folder.path().to_str().expect("UTF-8"));
        kill_process_group(Pid::from_child(&running.0), signal).expect("a group");
        ended(running, &folder);
    }
}

#[test]
fn up_with_a_disk_ends_without_a_warning_when_no_engine_has_registered() {
    let folder = socket_dir();
    let directory = folder.path().join("disk");
    let mut command = support::command();
    command.args(["up", "--g3", "64MiB", "--g3-dir"]);
    command.arg(&directory).process_group(0);
    let running = up(command, folder.path().to_str().expect("UTF-8"));
    running.terminate();
    let (code, errors) = running.end(LIMIT);
    assert_eq!(code, Some(0), "{errors}");
    assert!(errors.contains("no engine has registered"), "{errors}");
    assert!(!errors.contains("stored pages may not"), "{errors}");
}

/// A shell that ignores signals passes that on to its children.
#[test]
fn signals_that_are_ignored_at_the_start_stay_ignored() {
    let folder = socket_dir();
    let sockets = folder.path().to_str().expect("UTF-8");
    support::signals::set_to_defaults();
    let mut command = Command::new("sh");
    command.args(["-c", r#"trap "" INT HUP TERM; exec "$0" up "$@""#]);
    command.arg(support::program()).process_group(0);
    let running = up(command, sockets);
    let process = running.0.id().to_string();
    for (kind, expected) in [
        (SignalKind::interrupt(), true),
        (SignalKind::hangup(), true),
        (SignalKind::terminate(), false),
    ] {
        assert_eq!(signals::ignored(&process, kind), expected, "{kind:?}");
    }
    let group = Pid::from_child(&running.0);
    for signal in [Signal::INT, Signal::HUP] {
        kill_process_group(group, signal).expect("a group");
    }
    status_once(sockets, |_| true);
    running.terminate();
    ended(running, &folder);
}

#[test]
fn a_replay_whose_terminal_is_closed_leaves_nothing_behind() {
    let folder = socket_dir();
    let mut command = support::command();
    command.args(["replay", "--quiet"]).process_group(0);
    command.env("TMPDIR", folder.path());
    let running = Running::spawn(&mut command);
    let begun = Instant::now();
    while std::fs::read_dir(folder.path()).expect("a folder").count() == 0 {
        assert!(begun.elapsed() < LIMIT, "the replay does not start");
        std::thread::yield_now();
    }
    kill_process_group(Pid::from_child(&running.0), Signal::HUP).expect("a group");
    let (code, errors) = running.end(LIMIT);
    assert_eq!(code, Some(1), "{errors}");
    assert_eq!(
        std::fs::read_dir(folder.path()).expect("a folder").count(),
        0
    );
}

/// A replay that is killed closes the pipes to its ranks, and can do no more.
#[test]
fn a_rank_ends_with_its_replay_before_a_worker_has_accepted_its_memory() {
    let folder = socket_dir();
    let worker = folder.path().join("worker-0-0");
    let mut command = support::command();
    command.args(["engine-rank", "--engine", "1", "--model", "tiny"]);
    command.args(["--replica", "0", "--rank", "0", "--ranks", "1"]);
    command.args(["--engine-page-tokens", "16", "--device-pages", "8"]);
    command.args(["--layout", "contiguous", "--start-limit-s", "600"]);
    command.arg("--worker-dir").arg(worker);
    let mut rank = Running::spawn(&mut command);
    let process = rank.0.id();
    // Its memory is made, and it waits for its worker.
    let begun = Instant::now();
    let memory = || {
        let files = std::fs::read_dir(format!("/proc/{process}/fd"))?;
        let files = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
        std::io::Result::Ok(
            files
                .filter(|file| file.to_string_lossy().starts_with("/memfd:"))
                .count(),
        )
    };
    while memory().is_ok_and(|files| files == 0) {
        assert!(begun.elapsed() < LIMIT, "it makes no memory");
        std::thread::yield_now();
    }
    drop(rank.0.stdin.take());
    let (code, errors) = rank.end(LIMIT);
    assert_eq!(code, Some(0), "{errors}");
}

#[test]
fn a_flush_that_takes_too_long_ends_by_the_setting_and_says_what_is_durable() {
    let folder = socket_dir();
    let sockets = folder.path().to_str().expect("UTF-8");
    let directory = folder.path().join("disk");
    let directory = directory.to_str().expect("UTF-8");
    let disk = [
        "--g3",
        "64MiB",
        "--g3-dir",
        directory,
        "--flush-limit-s",
        "1",
    ];
    let up = [
        "up",
        "--ranks",
        "2",
        "--g2",
        "32MiB",
        "--socket-dir",
        sockets,
    ];
    let up = Running::start(&[&up[..], &disk].concat());
    status_once(sockets, |_| true);
    let replay = [
        "replay",
        "--quiet",
        "--concurrency",
        "8",
        "--requests",
        "50",
    ];
    let replay = kvferry(&[&replay[..], &["--socket-dir", sockets]].concat());
    assert!(replay.status.success(), "{replay:?}");
    let status = status_once(sockets, |_| true);
    let worker = status["ranks"][0]["pid"].as_u64().expect("a number");
    let worker = Pid::from_raw(i32::try_from(worker).expect("a pid")).expect("above 0");
    kill_process(worker, Signal::STOP).expect("it runs");
    let begun = Instant::now();
    up.terminate();
    let (code, errors) = up.end(LIMIT);
    assert_eq!(code, Some(0), "{errors}");
    // The flush, the end of the processes, and the time that a busy machine takes.
    let most = Duration::from_secs(1 + 17 + 2 + 5);
    assert!(begun.elapsed() < most, "{:?}", begun.elapsed());
    for word in [
        "s not all stored pages are on the disk",
        "pages are durable there",
        "are in host memory",
        "flush_limit_s",
        "kvferry flush --timeout",
    ] {
        assert!(errors.contains(word), "{word}: {errors}");
    }
}
