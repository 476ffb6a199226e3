//! Runs a test in a process that loads the fake driver in place of a real one.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use super::fake_cuda::variables;
pub use super::fake_cuda::{folder, library, on_gpu};
use crate::{Context, Driver};

/// Time limit of a test process, exceeded only by one that hangs: the longest test takes 30 s of one core, four run at
/// a time, and on two cores beside other work 5 minutes were observed.
const LIMIT: Duration = Duration::from_mins(20);
/// Time limit on a GPU, where registering memory is slow.
const GPU_LIMIT: Duration = Duration::from_mins(10);
/// Variable that marks the process that has the driver.
const INSIDE: &str = "FAKE_CUDA_INSIDE";
/// Whether this process is the child process of a test.
pub fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// Runs the calling test again in a child process, with this folder first in the library path and these settings.
pub fn again(folder: &Path, settings: &str) -> Output {
    again_in(variables(folder, settings).into_iter(), LIMIT)
}

fn again_in(
    environment: impl Iterator<Item = (&'static str, OsString)>,
    limit: Duration,
) -> Output {
    let test = std::thread::current();
    let test = test.name().expect("tests run on threads with their names");
    let mut command = Command::new(std::env::current_exe().expect("a program"));
    command
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(INSIDE, "1")
        .envs(environment)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let child = command.spawn().expect("it runs");
    let process = rustix::process::Pid::from_child(&child);
    let (over, ended) = std::sync::mpsc::channel::<()>();
    let watch = std::thread::spawn(move || {
        if ended.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
            let killed = rustix::process::kill_process(process, rustix::process::Signal::KILL);
            killed.expect("not waited for yet");
        }
    });
    let output = child.wait_with_output().expect("its output");
    drop(over);
    watch.join().expect("no panic");
    output
}

/// Runs the body of a test in a child process, with the fake driver under these settings. Returns the output of the
/// child; in the child, `None`.
pub fn under(settings: &str, body: impl FnOnce()) -> Option<String> {
    if is_inside() {
        body();
        return None;
    }
    let folder = folder(&library());
    Some(succeeded(&again(folder.path(), settings), settings))
}

/// The output of a child process, which must have succeeded.
pub fn succeeded(output: &Output, what: &str) -> String {
    let said = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.status.success(), "{what}: {}\n{said}", output.status);
    assert!(said.contains("1 passed"), "{what}: ran no test\n{said}");
    said
}

/// Like [`under`], and checks that no resource of the driver is left when the process ends.
pub fn under_and_clean(settings: &str, body: impl FnOnce()) {
    let reports = tempfile::tempdir().expect("a folder");
    let with_report = format!("{settings};report={}", reports.path().display());
    if under(&with_report, body).is_none() {
        return;
    }
    let report = only_file(reports.path());
    let left = report.split_whitespace().find(|part| !part.ends_with("=0"));
    assert_eq!(left, None, "{settings}: {report}");
}

/// Like [`under_and_clean`], or with the machine's own driver where that is requested.
pub fn anywhere(settings: &str, body: impl FnOnce()) {
    if !on_gpu() {
        return under_and_clean(settings, body);
    }
    if !is_inside() {
        succeeded(&again_in(std::iter::empty(), GPU_LIMIT), "on a GPU");
        return;
    }
    // A real context takes long to create, and ends with its last user.
    let driver = Driver::get().expect("a driver");
    let device = driver.devices().expect("listed")[0];
    let _held = Context::new(driver, device).expect("a context");
    body();
}

/// The text of the only file in a folder.
pub fn only_file(folder: &Path) -> String {
    let mut files = std::fs::read_dir(folder).expect("a folder");
    let file = files.next().expect("a report").expect("readable");
    assert!(files.next().is_none(), "one process, one report");
    std::fs::read_to_string(file.path()).expect("text")
}
