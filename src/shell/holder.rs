//! The holder of a seat: the process that has the seat of a worker, of an engine, or of an engine's memory. A seat that
//! is in use is not given to another process; a process that reconnects gets its own seat again.

use std::fmt;

use kvferry_protocol::{Connections, ErrorBody, ErrorCode};
use kvferry_types::PeerId;

/// Access to the peers of a process, and to the processes of those peers.
pub trait HolderPeers {
    /// A handle to one process. The system may reuse the process id after that process has ended; the handle never
    /// refers to another process.
    type Process: fmt::Debug;

    /// True when a peer is connected and something was received from it within two heartbeats.
    fn is_live(&self, peer: PeerId) -> bool;

    /// Opens a handle to a process; `None` when no process is visible under this id.
    fn open_process(&mut self, pid: i32) -> Option<Self::Process>;

    /// True when a process is known to have ended.
    fn has_ended(&self, process: &Self::Process) -> bool;

    /// Closes the connection of a peer.
    fn disconnect(&mut self, peer: PeerId);

    /// The clients of the process. A host without connections has none.
    fn connections(&self) -> Connections {
        Connections::default()
    }

    /// Changes the filter of the process's log, and returns the one before. An error is one line for users.
    fn set_log(&mut self, filter: &str) -> Result<String, String> {
        Err(format!(
            "set_log.filter is '{filter}': this process has no log"
        ))
    }
}

/// The peer that has a seat.
#[derive(Debug, Clone)]
pub struct Holder<P> {
    /// The connection of the holder.
    pub peer: PeerId,
    /// The id of the holder's process, if the system shows it.
    pub pid: Option<i32>,
    /// A handle to that process; `None` when the process is not visible.
    pub process: Option<P>,
}

/// The seat is in use; by this process, if the system shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InUse(Option<i32>);

impl fmt::Display for InUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(pid) => write!(f, "in use by process {pid}"),
            None => f.write_str("in use by a process that cannot be seen from here"),
        }
    }
}

impl InUse {
    /// The error for the newcomer. The newcomer may retry: the seat is free once its holder has ended or is silent.
    pub fn refusal(self, seat: &str) -> ErrorBody {
        let text = format!("{seat} is {self}: end that process, or retry when it has ended");
        ErrorBody::new(ErrorCode::NotReady, text)
    }
}

impl<P: fmt::Debug> Holder<P> {
    /// A holder with a handle to its process, if that is visible.
    pub fn new(host: &mut dyn HolderPeers<Process = P>, peer: PeerId, pid: Option<i32>) -> Self {
        let process = pid.and_then(|pid| host.open_process(pid));
        Self { peer, pid, process }
    }

    /// True when the holder's process is known to have ended.
    fn has_ended(&self, host: &dyn HolderPeers<Process = P>) -> bool {
        let process = self.process.as_ref();
        process.is_some_and(|process| host.has_ended(process))
    }

    /// True when `pid` is the holder's own process: a second connection of that process is not a newcomer. A process of
    /// another PID namespace, whose id reads as 0, never matches.
    pub fn is_process(&self, pid: Option<i32>) -> bool {
        self.pid.is_some_and(|own| own > 0) && self.pid == pid
    }

    /// Returns why another process, `pid`, does not get the seat: the holder is connected, is not silent, and has not
    /// ended.
    pub fn in_use(&self, host: &dyn HolderPeers<Process = P>, pid: Option<i32>) -> Option<InUse> {
        let live = host.is_live(self.peer) && !self.has_ended(host);
        (live && !self.is_process(pid)).then_some(InUse(self.pid))
    }

    /// Like [`Self::in_use`], for a holder that is silent but whose process is known to live.
    pub fn lives(&self, host: &dyn HolderPeers<Process = P>, pid: Option<i32>) -> Option<InUse> {
        let lives = self.process.is_some() && !self.has_ended(host);
        (lives && !self.is_process(pid)).then_some(InUse(self.pid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Process 7 lives, process 8 has ended, and no other one is visible. Peer 1 is connected.
    struct Host;

    impl HolderPeers for Host {
        type Process = i32;

        fn is_live(&self, peer: PeerId) -> bool {
            peer == PeerId(1)
        }

        fn open_process(&mut self, pid: i32) -> Option<i32> {
            [7, 8].contains(&pid).then_some(pid)
        }

        fn has_ended(&self, process: &i32) -> bool {
            *process == 8
        }

        fn disconnect(&mut self, _: PeerId) {}
    }

    fn holder(peer: u64, pid: Option<i32>) -> Holder<i32> {
        Holder::new(&mut Host, PeerId(peer), pid)
    }

    #[test]
    fn a_connected_holder_keeps_its_seat_unless_its_process_has_ended() {
        for pid in [Some(7), Some(6), None] {
            let in_use = holder(1, pid).in_use(&Host, Some(9));
            assert_eq!(in_use, Some(InUse(pid)), "process {pid:?}");
        }
        assert_eq!(holder(1, Some(8)).in_use(&Host, Some(9)), None);
        assert_eq!(holder(2, Some(7)).in_use(&Host, Some(9)), None, "silent");
    }

    #[test]
    fn a_silent_holder_lives_only_if_its_process_is_visible() {
        assert_eq!(
            holder(2, Some(7)).lives(&Host, Some(9)),
            Some(InUse(Some(7)))
        );
        assert_eq!(holder(2, Some(7)).lives(&Host, None), Some(InUse(Some(7))));
        assert_eq!(holder(2, Some(8)).lives(&Host, Some(9)), None);
        assert_eq!(holder(2, None).lives(&Host, Some(9)), None);
    }

    #[test]
    fn only_a_visible_process_is_recognised_when_it_connects_again() {
        assert_eq!(holder(1, Some(7)).in_use(&Host, Some(7)), None);
        assert_eq!(holder(2, Some(7)).lives(&Host, Some(7)), None);
        for unseen in [Some(0), None] {
            let in_use = holder(1, unseen).in_use(&Host, unseen);
            assert_eq!(in_use, Some(InUse(unseen)), "another one may have this id");
        }
    }

    #[test]
    fn a_refusal_names_the_seat_and_its_holder() {
        let text = InUse(None).refusal("rank 0").message;
        assert!(text.starts_with("rank 0 is in use by a process"), "{text}");
        let text = InUse(Some(7)).refusal("rank 0").message;
        assert!(text.starts_with("rank 0 is in use by process 7:"), "{text}");
    }
}
