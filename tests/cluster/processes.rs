//! Processes by number.

use rustix::process::{Pid, Signal, kill_process};

/// Sends a signal.
pub fn signal(pid: u64, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    kill_process(pid.expect("a process"), signal).expect("it runs");
}

/// The leader beside this worker: the other kind of child of the same process.
pub fn leader_beside(worker: u64) -> u64 {
    let parent = parent_of(worker).expect("it runs");
    let is_leader = |pid: &u64| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let command = line.split(|byte| *byte == 0).nth(1);
        command == Some(b"leader")
    };
    let mut leaders = children(parent).into_iter().filter(is_leader);
    leaders.next().expect("a leader")
}

/// What a process has started and runs.
pub fn children(parent: u64) -> Vec<u64> {
    let processes = std::fs::read_dir("/proc").expect("a list of processes");
    let processes = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let children = processes.filter(|pid| parent_of(*pid) == Some(parent));
    children.collect()
}

/// Whether it runs, or is stopped: a zombie does neither.
pub fn lives(pid: u64) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(')').map(|(_, rest)| rest.trim_start());
    state.is_some_and(|state| !state.starts_with(['Z', 'X']))
}

fn parent_of(pid: u64) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let behind_name = stat.rsplit_once(')')?.1;
    behind_name.split_whitespace().nth(1)?.parse().ok()
}
