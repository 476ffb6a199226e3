//! Handles to processes: pidfds.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// A pidfd: refers to one process, even after the system has reused its id.
pub(super) type Process = Arc<OwnedFd>;

/// Opens a handle to a process.
pub(super) fn open(pid: i32) -> std::io::Result<Process> {
    let pid = Pid::from_raw(pid).ok_or(std::io::ErrorKind::InvalidInput)?;
    Ok(Arc::new(pidfd_open(pid, PidfdFlags::empty())?))
}

/// True when a process is known to have ended.
pub(super) fn has_ended(process: &Process) -> bool {
    let mut ended = [PollFd::new(&**process, PollFlags::IN)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut ended, Some(&now)).is_ok_and(|events| events > 0)
}

/// Blocks until a process has ended. Returns false when the end cannot be determined.
pub(super) fn wait_for_end(process: &Process) -> bool {
    let mut ended = [PollFd::new(&**process, PollFlags::IN)];
    while poll(&mut ended, None).is_err_and(|error| error == rustix::io::Errno::INTR) {}
    ended[0].revents().contains(PollFlags::IN)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn the_end_of_a_process_is_noticed_at_once() {
        let mut child = Command::new("cat");
        let mut child = child.stdin(Stdio::piped()).spawn().expect("it runs");
        let pid = i32::try_from(child.id()).expect("small");
        let process = open(pid).expect("it lives");
        assert!(!has_ended(&process));
        child.kill().expect("it lives");
        child.wait().expect("it has ended");
        assert!(has_ended(&process));
        assert!(wait_for_end(&process));
        assert!(open(0).is_err(), "a process of another PID namespace");
    }
}
