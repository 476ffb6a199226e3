//! What must not end `up`, and the host memory with it: a new program file, and a log that cannot be written.

use std::fs;
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::support::{Running, command, kvferry, program, signals, socket_dir};
use crate::{LIMIT, status_once};

/// Process ids of the leader's one worker; 0 while there is none.
fn worker(status: &Value) -> u64 {
    status["ranks"][0]["pid"].as_u64().expect("a number")
}

fn kill(pid: u64) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    kill_process(pid.expect("a process"), Signal::KILL).expect("it runs");
}

/// The children of a process, by the first word of their arguments.
fn child(parent: u32, name: &str) -> Option<u64> {
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"));
    let children = children.expect("children");
    let mut children = children.split_whitespace();
    let found = children.find(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).nth(1) == Some(name.as_bytes())
    });
    found.map(|pid| pid.parse().expect("a number"))
}

/// A copy of the program in a folder.
fn copied(folder: &Path) -> std::path::PathBuf {
    let copy = folder.join("kvferry");
    if fs::hard_link(program(), &copy).is_err() {
        fs::copy(program(), &copy).expect("a copy");
    }
    copy
}

#[test]
fn children_start_again_after_the_program_file_was_replaced() {
    let folder = socket_dir();
    let program = copied(folder.path());
    let sockets = folder.path().join("s");
    let sockets = sockets.to_str().expect("UTF-8");
    signals::set_to_defaults();
    let mut command = Command::new(&program);
    let arguments = ["up", "--g2", "16MiB", "--monitor", "0", "--socket-dir"];
    let up = Running::spawn(command.args(arguments).arg(sockets));
    let mut before = worker(&status_once(sockets, |status| worker(status) > 0));

    // As package managers do it, and as an operator who removes the file.
    let replaced = folder.path().join("new");
    fs::write(&replaced, "another version").expect("written");
    fs::rename(&replaced, &program).expect("replaced");
    for removed in [false, true] {
        if removed {
            fs::remove_file(&program).expect("removed");
        }
        for name in ["worker", "leader", "monitor"] {
            let begun = Instant::now();
            let old = child(up.0.id(), name).expect("it runs");
            kill(old);
            while child(up.0.id(), name).is_none_or(|new| new == old) {
                assert!(begun.elapsed() < LIMIT, "{name} does not start again");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let again = |status: &Value| worker(status) > 0 && worker(status) != before;
        before = worker(&status_once(sockets, again));
    }
    // Each process has the name of the program in `ps`, whatever file it was started from.
    let names = ["leader", "worker", "monitor"].map(|name| {
        let pid = child(up.0.id(), name).expect("it runs");
        fs::read_to_string(format!("/proc/{pid}/comm")).expect("a name")
    });
    assert_eq!(names, ["kvferry\n"; 3]);
    up.terminate();
    let (code, errors) = up.end(LIMIT);
    assert_eq!(code, Some(0), "{errors}");
}

/// Starts `up` with this standard error, and waits until its worker is there.
fn up_into(errors: impl Into<Stdio>, sockets: &str) -> Running {
    let mut command = command();
    command
        .args(["up", "--g2", "16MiB", "--socket-dir", sockets])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(errors);
    let up = Running(command.spawn().expect("the program starts"));
    status_once(sockets, |status| worker(status) > 0);
    up
}

/// Lets every process write lines, replaces the worker, and ends `up` in order.
fn serves_and_ends(mut up: Running, sockets: &str) {
    let old = worker(&status_once(sockets, |_| true));
    kill(old);
    status_once(sockets, |status| ![0, old].contains(&worker(status)));
    for _ in 0..3 {
        let changed = kvferry(&["log", "info", "--socket-dir", sockets]);
        assert!(changed.status.success(), "{changed:?}");
    }
    up.terminate();
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = up.0.try_wait().expect("a child") {
            break status;
        }
        assert!(begun.elapsed() < LIMIT, "it does not end");
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(status.code(), Some(0));
}

#[test]
fn a_full_disk_under_the_log_ends_no_process() {
    let folder = socket_dir();
    let sockets = folder.path().to_str().expect("UTF-8");
    let full = fs::File::options().write(true).open("/dev/full");
    let up = up_into(full.expect("/dev/full"), sockets);
    serves_and_ends(up, sockets);
}

#[test]
fn a_closed_log_ends_no_process() {
    let folder = socket_dir();
    let sockets = folder.path().to_str().expect("UTF-8");
    let (reader, writer) = io::pipe().expect("a pipe");
    let up = up_into(OwnedFd::from(writer), sockets);
    drop(reader);
    serves_and_ends(up, sockets);
}

#[test]
fn a_log_that_nobody_reads_stops_no_process_and_lost_lines_are_counted() {
    let folder = socket_dir();
    let sockets = folder.path().to_str().expect("UTF-8");
    let (mut reader, writer) = io::pipe().expect("a pipe");
    let up = up_into(OwnedFd::from(writer), sockets);
    // Each change writes a line of the leader and of the worker; the pipe has room for 64 KiB.
    let long = format!("info,{}=info", "kvferry".repeat(140));
    let change = |filter: &str| {
        let changed = kvferry(&["log", filter, "--socket-dir", sockets]);
        assert!(changed.status.success(), "{changed:?}");
    };
    for _ in 0..40 {
        change(&long);
    }
    let readers = std::thread::spawn(move || {
        let mut text = String::new();
        reader.read_to_string(&mut text).expect("UTF-8");
        text
    });
    change("info");
    serves_and_ends(up, sockets);
    let text = readers.join().expect("a reader");
    let lost = text.lines().filter(|line| line.contains(" were lost: "));
    let lost: Vec<&str> = lost.collect();
    assert!(
        (1..=2).contains(&lost.len()),
        "the leader and the worker say it once each: {lost:?}"
    );
    assert!(lost[0].contains("standard error takes nothing"), "{lost:?}");
}

#[test]
fn a_reader_that_takes_one_line_is_no_failure() {
    let folder = socket_dir();
    let sockets = folder.path().to_str().expect("UTF-8");
    let _up = Running::start(&["up", "--g2", "16MiB", "--socket-dir", sockets]);
    status_once(sockets, |_| true);
    for arguments in [
        &["status"][..],
        &["status", "--json"],
        &["status", "--wait-s", "1"],
        &["--help"],
        &[
            "replay",
            "--mode",
            "offline",
            "--sequential",
            "--requests",
            "10",
        ],
        &["bench", "copy", "--help"],
    ] {
        for closed in ["1", "2"] {
            let (reader, writer) = io::pipe().expect("a pipe");
            drop(reader);
            let mut command = command();
            command.args(arguments).stdin(Stdio::null());
            if !arguments.contains(&"--help") && arguments[0] == "status" {
                command.args(["--socket-dir", sockets]);
            }
            let writer = Stdio::from(OwnedFd::from(writer));
            match closed {
                "1" => command.stdout(writer).stderr(Stdio::piped()),
                _ => command.stdout(Stdio::null()).stderr(writer),
            };
            let output = command.output().expect("it runs");
            let errors = String::from_utf8_lossy(&output.stderr);
            let code = output.status.code();
            assert_ne!(code, Some(101), "{arguments:?} {closed}: {errors}");
            assert!(!errors.contains("panicked"), "{arguments:?}: {errors}");
        }
    }
}

/// `up` with its log in a file.
struct Logged {
    up: Running,
    log: std::path::PathBuf,
}

impl Logged {
    fn start(folder: &Path, sockets: &str) -> Self {
        let log = folder.join("log");
        let file = fs::File::create(&log).expect("a log");
        let up = up_into(file, sockets);
        Self { up, log }
    }

    /// Waits until the log has a text.
    fn says(&self, text: &str) {
        let begun = Instant::now();
        while !self.text().contains(text) {
            assert!(begun.elapsed() < LIMIT, "{text}: {}", self.text());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn text(&self) -> String {
        fs::read_to_string(&self.log).expect("a log")
    }

    /// Sets the most files that `up` may have open.
    fn files(&self, soft: &str) {
        let pid = self.up.0.id().to_string();
        let set = Command::new("prlimit")
            .args(["--pid", &pid, &format!("--nofile={soft}:")])
            .status();
        assert!(set.expect("prlimit runs").success());
    }
}

#[test]
fn a_start_that_fails_for_lack_of_files_is_tried_until_it_succeeds() {
    let folder = socket_dir();
    let sockets = folder.path().to_str().expect("UTF-8");
    let logged = Logged::start(folder.path(), sockets);
    let old = worker(&status_once(sockets, |_| true));
    logged.files("4");
    kill(old);
    logged.says("worker of rank 0 cannot be started: trying again");
    assert!(
        logged.text().contains("4 open files (ulimit -n)"),
        "{}",
        logged.text()
    );
    logged.files("1000");
    let again = |status: &Value| {
        let restarts = status["restarts"].as_array().into_iter().flatten();
        let of_worker = restarts.filter(|each| each["process"] == "worker-0-0");
        let mut causes = of_worker.map(|each| &each["causes"]);
        let failed = causes.any(|causes| causes["not_started"].as_u64() > Some(0));
        failed && ![0, old].contains(&worker(status))
    };
    status_once(sockets, again);
    serves_and_ends(logged.up, sockets);
}

#[test]
fn a_worker_that_never_settles_ends_up_with_an_exit_code() {
    let folder = socket_dir();
    let sockets = folder.path().to_str().expect("UTF-8");
    let mut logged = Logged::start(folder.path(), sockets);
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = logged.up.0.try_wait().expect("a child") {
            break status;
        }
        assert!(
            begun.elapsed() < LIMIT,
            "it does not end: {}",
            logged.text()
        );
        if let Some(worker) = child(logged.up.0.id(), "worker") {
            let worker = i32::try_from(worker).ok().and_then(Pid::from_raw);
            // It may have been killed already.
            kill_process(worker.expect("a process"), Signal::KILL).ok();
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let text = logged.text();
    assert_eq!(status.code(), Some(70), "{text}");
    for word in [
        "worker of rank 0 does not stay up",
        "8 times in a row",
        "SIGKILL",
    ] {
        assert!(text.contains(word), "{word}: {text}");
    }
    assert_eq!(
        text.matches("worker of rank 0 started").count(),
        8,
        "{text}"
    );
    assert!(text.contains("leader ended"), "{text}");
}
