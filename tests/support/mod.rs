//! What several integration tests need: the program, and the shared traces.
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

/// The folder with traces and reference tables: `KVFERRY_SHARED`, or `../shared`. Says that the test is skipped when
/// it is not there.
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

/// A trace of the shared folder.
pub fn trace(name: &str) -> Option<PathBuf> {
    let file = match name {
        "conv" => "mooncake_conversation_trace.jsonl.zst",
        _ => "weka40_flat64.jsonl.zst",
    };
    Some(shared()?.join("traces").join(file))
}

/// Variable with the path of the program, where the tests do not run on the machine that built them.
const PROGRAM: &str = "PROGRAM_UNDER_TEST";

/// The path of the program.
pub fn program() -> PathBuf {
    let named = std::env::var_os(PROGRAM);
    named.map_or_else(|| env!("CARGO_BIN_EXE_kvferry").into(), PathBuf::from)
}

/// The program, still to be started. It starts with every signal at its default.
pub fn command() -> Command {
    signals::set_to_defaults();
    Command::new(program())
}

/// Runs the program.
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

/// The same, with variables of the environment.
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

/// A number of a report, by its path.
pub fn number(report: &Value, path: &str) -> u64 {
    report
        .pointer(path)
        .and_then(Value::as_u64)
        .unwrap_or_else(|| panic!("{path} in {report}"))
}

/// A directory of its own for sockets, with mode 0700.
pub fn socket_dir() -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt;
    let owner_only = std::fs::Permissions::from_mode(0o700);
    tempfile::Builder::new()
        .prefix("kvferry-test-")
        .permissions(owner_only)
        .tempdir()
        .expect("a directory")
}

/// A process of the program; killed when dropped.
pub struct Running(pub std::process::Child);

impl Running {
    /// Starts the program; its standard input stays open, its standard error is read when it ends.
    pub fn start(arguments: &[&str]) -> Self {
        Self::start_in(arguments, &std::env::temp_dir())
    }

    /// The same, with a folder of its own for temporary files.
    pub fn start_in(arguments: &[&str], temporary: &Path) -> Self {
        Self::start_with(&[], arguments, temporary)
    }

    /// The same, with variables of the environment.
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

    /// Starts a command with the standard streams of all the others.
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

    /// Waits for the end, at most so long. Returns exit code and standard error.
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
