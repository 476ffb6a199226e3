//! Shared code of the integration tests: the program under test, and the shared traces.
#![allow(
    dead_code,
    clippy::allow_attributes,
    reason = "each test uses a part of this"
)]

pub mod signals;
pub mod skipped;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// The folder with traces and reference tables: `KVFERRY_SHARED`, or `../shared`. Reports the test as skipped and
/// returns `None` when the folder does not exist.
pub fn shared() -> Option<PathBuf> {
    let named = std::env::var_os("KVFERRY_SHARED").map(PathBuf::from);
    let path = named.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared"));
    let there = path.join("traces").is_dir();
    if !there {
        skipped::skipped(&format!(
            "no traces in {} (set KVFERRY_SHARED)",
            path.display()
        ));
    }
    there.then_some(path)
}

/// Path of a trace in the shared folder: `conv`, or the Weka trace for any other name.
pub fn trace(name: &str) -> Option<PathBuf> {
    let file = match name {
        "conv" => "mooncake_conversation_trace.jsonl.zst",
        _ => "weka40_flat64.jsonl.zst",
    };
    Some(shared()?.join("traces").join(file))
}

/// Environment variable with the path of the program, for tests that run on another machine than the one that built
/// them.
const PROGRAM: &str = "PROGRAM_UNDER_TEST";

/// Path of the program under test.
pub fn program() -> PathBuf {
    let named = std::env::var_os(PROGRAM);
    named.map_or_else(|| env!("CARGO_BIN_EXE_kvferry").into(), PathBuf::from)
}

/// A command for the program. The process starts with every signal at its default.
pub fn command() -> Command {
    signals::set_to_defaults();
    Command::new(program())
}

/// Runs the program to its end.
pub fn kvferry(arguments: &[&str]) -> Output {
    command()
        .args(arguments)
        .output()
        .expect("the program runs")
}

/// Runs a replay and returns its report.
pub fn replay(arguments: &[&str]) -> Value {
    replay_with(&[], arguments)
}

/// Runs a replay with these environment variables and returns its report.
pub fn replay_with(variables: &[(&str, OsString)], arguments: &[&str]) -> Value {
    let mut command = command();
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    command
        .args(["replay", "--quiet", "--json", "-"])
        .args(arguments);
    let output = command.output().expect("the program runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {errors}");
    serde_json::from_slice(&output.stdout).expect("a report")
}

/// The unsigned number at this JSON pointer of a report. Panics if there is none.
pub fn number(report: &Value, path: &str) -> u64 {
    report
        .pointer(path)
        .and_then(Value::as_u64)
        .unwrap_or_else(|| panic!("{path} in {report}"))
}

/// A new temporary directory for sockets, with mode 0700.
pub fn socket_dir() -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt;
    let owner_only = std::fs::Permissions::from_mode(0o700);
    tempfile::Builder::new()
        .prefix("kvferry-test-")
        .permissions(owner_only)
        .tempdir()
        .expect("a directory")
}

/// A running process of the program. Killed when dropped.
pub struct Running(pub std::process::Child);

impl Running {
    /// Starts the program. Its standard input stays open, its standard error is read by [`Self::end`].
    pub fn start(arguments: &[&str]) -> Self {
        Self::start_in(arguments, &std::env::temp_dir())
    }

    /// Starts the program with `TMPDIR` set to `temporary`.
    pub fn start_in(arguments: &[&str], temporary: &Path) -> Self {
        Self::start_with(&[], arguments, temporary)
    }

    /// Starts the program with `TMPDIR` set to `temporary` and with these environment variables.
    pub fn start_with(
        variables: &[(&str, OsString)],
        arguments: &[&str],
        temporary: &Path,
    ) -> Self {
        let mut command = command();
        command
            .args(arguments)
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .env("TMPDIR", temporary);
        Self::spawn(&mut command)
    }

    /// Starts a command with piped standard input and error, and without standard output.
    pub fn spawn(command: &mut Command) -> Self {
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        Self(command.spawn().expect("the program starts"))
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// Sends a signal to this process alone.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).expect("it runs");
    }

    /// Waits at most `limit` for the process to end. Returns its exit code and standard error.
    pub fn end(mut self, limit: std::time::Duration) -> (Option<i32>, String) {
        use std::io::Read;
        let begun = std::time::Instant::now();
        let mut errors = self.0.stderr.take().expect("standard error");
        let reader = std::thread::spawn(move || {
            let mut text = String::new();
            errors.read_to_string(&mut text).expect("UTF-8");
            text
        });
        while self.0.try_wait().expect("a child").is_none() {
            assert!(begun.elapsed() < limit, "it does not end");
            std::thread::yield_now();
        }
        let status = self.0.wait().expect("a status");
        (status.code(), reader.join().expect("a reader"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.0.kill().is_ok() {
            self.0.wait().expect("a status");
        }
    }
}
