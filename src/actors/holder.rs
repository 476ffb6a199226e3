//! A peer that has a place: a worker's, an engine's, or that of an engine's memory. A place that is in use is not given to
//! another process; a process that connects again takes its own.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::protocol::{ErrorBody, ErrorCode};
use crate::transport::{PeerId, Replier};

/// See the module.
#[derive(Debug, Clone)]
pub(super) struct Holder {
    pub(super) peer: PeerId,
    /// Its process, where the system tells.
    pub(super) pid: Option<i32>,
    /// The same process as long as it lives; the number may be another process's afterwards.
    pub(super) process: Option<Arc<OwnedFd>>,
}

/// Why a place is not given away: it is in use, by this process where the system tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct InUse(Option<i32>);

impl std::fmt::Display for InUse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(pid) => write!(f, "in use by process {pid}"),
            None => f.write_str("in use by a process that cannot be seen from here"),
        }
    }
}

impl InUse {
    /// What the newcomer is told. It may ask again: the place is free once its holder has ended or fallen silent.
    pub(super) fn refusal(self, place: &str) -> ErrorBody {
        let text = format!("{place} is {self}: end that process, or ask again when it has ended");
        ErrorBody::new(ErrorCode::NotReady, text)
    }
}

impl Holder {
    /// A peer and its process, if the system shows it.
    pub(super) fn new(peer: PeerId, pid: Option<i32>) -> Self {
        let process = pid
            .and_then(Pid::from_raw)
            .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        Self {
            peer,
            pid,
            process: process.map(Arc::new),
        }
    }

    /// True when its process is known to have ended.
    pub(super) fn has_ended(&self) -> bool {
        self.process.as_ref().is_some_and(|process| {
            let mut ended = [PollFd::new(&**process, PollFlags::IN)];
            let now = Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            poll(&mut ended, Some(&now)).is_ok_and(|events| events > 0)
        })
    }

    /// True when `pid` is known to be the holder's own process: a second connection of one process is no newcomer. A process
    /// of another PID namespace, whose id reads as 0, is never known.
    pub(super) fn is_process(&self, pid: Option<i32>) -> bool {
        self.pid.is_some_and(|own| own > 0) && self.pid == pid
    }

    /// Why another process, `pid`, does not get the place: its holder is connected, was heard of late, and has not ended.
    pub(super) fn in_use(&self, replier: &Replier, pid: Option<i32>) -> Option<InUse> {
        let live = replier.is_live(self.peer) && !self.has_ended();
        (live && !self.is_process(pid)).then_some(InUse(self.pid))
    }

    /// The same for a holder that is silent, but whose process is seen to live.
    pub(super) fn lives(&self, pid: Option<i32>) -> Option<InUse> {
        let lives = self.process.is_some() && !self.has_ended();
        (lives && !self.is_process(pid)).then_some(InUse(self.pid))
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn processes_that_cannot_be_told_apart_are_not_one_process() {
        let (holder, own) = (Holder::new(PeerId(1), Some(0)), std::process::id());
        assert!(!holder.is_process(Some(0)));
        assert!(!Holder::new(PeerId(1), None).is_process(None));
        let own = i32::try_from(own).ok();
        assert!(Holder::new(PeerId(1), own).is_process(own));
    }

    #[test]
    fn the_end_of_a_holders_process_is_seen_at_once() {
        let mut child = Command::new("cat");
        let mut child = child.stdin(Stdio::piped()).spawn().expect("it runs");
        let pid = i32::try_from(child.id()).expect("small");
        let holder = Holder::new(PeerId(1), Some(pid));
        assert!(!holder.has_ended());
        assert_eq!(holder.lives(Some(pid)), None, "its own place");
        assert_eq!(holder.lives(Some(1)), Some(InUse(Some(pid))));
        assert_eq!(holder.lives(None), Some(InUse(Some(pid))));
        child.kill().expect("it lives");
        child.wait().expect("it has ended");
        assert!(holder.has_ended());
        assert_eq!(holder.lives(Some(1)), None);
    }

    #[test]
    fn a_process_that_cannot_be_seen_counts_as_living_while_it_is_connected() {
        let unseen = Holder::new(PeerId(1), None);
        assert!(!unseen.has_ended());
        assert!(!unseen.is_process(None));
        assert_eq!(unseen.lives(Some(1)), None);
        let text = InUse(None).refusal("rank 0").message;
        assert!(text.starts_with("rank 0 is in use by a process"), "{text}");
    }
}
