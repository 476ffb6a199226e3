//! Signals to processes and their state, by process id.

use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};

use super::disturbed::LIMIT;

/// Sends a signal to a process.
pub fn signal(pid: u64, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    kill_process(pid.expect("a process"), signal).expect("it runs");
}

/// Stops a process, and waits until each of its threads stands. Until one of them was scheduled and has seen the
/// signal, the others continue, on a busy machine for long.
pub fn stop(pid: u64) {
    signal(pid, Signal::STOP);
    let begun = Instant::now();
    while !stands(pid) {
        assert!(begun.elapsed() < LIMIT, "process {pid} does not stop");
        std::thread::yield_now();
    }
}

fn stands(pid: u64) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    threads
        .flatten()
        .filter_map(|thread| std::fs::read_to_string(thread.path().join("stat")).ok())
        .all(|stat| matches!(state_in(&stat), Some('T' | 'Z' | 'X')))
}

/// The leader that was started by the same process as this worker.
pub fn leader_beside(worker: u64) -> u64 {
    let parent = parent_of(worker).expect("it runs");
    child_named(parent, "leader")
}

/// The running child of `up` that runs this command. Waits for one that starts again.
pub fn child_named(up: u64, command: &str) -> u64 {
    let runs = |pid: &u64| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let named = line.split(|byte| *byte == 0).nth(1);
        named == Some(command.as_bytes()) && lives(*pid)
    };
    let begun = Instant::now();
    loop {
        if let Some(child) = children(up).into_iter().find(runs) {
            return child;
        }
        assert!(begun.elapsed() < LIMIT, "no {command} runs");
        std::thread::yield_now();
    }
}

/// The running children of a process.
pub fn children(parent: u64) -> Vec<u64> {
    let processes = std::fs::read_dir("/proc").expect("a list of processes");
    let processes = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let children = processes.filter(|pid| parent_of(*pid) == Some(parent));
    children.collect()
}

/// Whether a process runs or is stopped. A zombie does neither.
pub fn lives(pid: u64) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    state_in(&stat).is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// The state letter after the name in `/proc/PID/stat`.
fn state_in(stat: &str) -> Option<char> {
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

fn parent_of(pid: u64) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let behind_name = stat.rsplit_once(')')?.1;
    behind_name.split_whitespace().nth(1)?.parse().ok()
}
