//! The interface between a [`LeaderShell`](super::LeaderShell) and its process.

use std::time::Duration;

use crate::HolderPeers;
use kvferry_core::{Leader, LeaderEffect, LeaderEvent};
use kvferry_protocol::{Message, RestartedProcess};
use kvferry_types::{Epoch, PeerId, RequestId, Time, WorkerId};

/// The cause of a host's failure, of whatever kind the host has.
pub type HostError = Box<dyn std::error::Error + Send + Sync>;

/// The process of a leader, live or simulated. A call acts or returns a value; its consequences arrive later, as calls
/// of the shell.
pub trait LeaderHost: HolderPeers {
    /// The clock of deadlines.
    fn now(&self) -> Time;

    /// True while a request of this peer, with a message of its own, has no answer.
    fn is_open(&self, peer: PeerId, request: RequestId) -> bool;

    /// Answers a request. Never waits for a peer that is gone or does not read.
    fn reply(&mut self, peer: PeerId, request: RequestId, message: Message);

    /// Sends one order to each of these workers, who must carry it out within `deadline`. Returns those to whom the
    /// order was not sent: no answer of theirs will come.
    fn order(
        &mut self,
        peers: &[PeerId],
        order: RequestId,
        message: Message,
        deadline: Duration,
    ) -> Vec<PeerId>;

    /// Opens a handle to a process whose end is reported from then on, with [`super::LeaderShell::worker_exited`].
    fn watch(&mut self, pid: i32) -> Option<Self::Process>;

    /// True for the process that this leader is part of.
    fn is_own(&self, pid: i32) -> bool;

    /// Requests that a supervisor end a worker's process: the process `pid`, or the worker's current process if that is
    /// `None`. Returns false where there is no supervisor.
    fn request_end(&mut self, worker: WorkerId, pid: Option<i32>) -> bool;

    /// Kills a worker's process.
    fn kill(&mut self, worker: WorkerId, process: &Self::Process);

    /// Records that an epoch was used, so that the next leader takes a later one. An error is the reason of the
    /// failure.
    fn raise_epoch(&mut self, used: Epoch) -> Result<(), HostError>;

    /// Time spent in the core's steps of lookups, for the status.
    fn lookup_time(&self) -> Duration;

    /// Processes that a supervisor has started again, for the status. A host without a supervisor knows of none.
    fn restarts(&self) -> Vec<RestartedProcess> {
        Vec::new()
    }

    /// Called before each step of the core.
    fn before_step(&mut self, core: &Leader, event: &LeaderEvent);

    /// Called after each step of the core, before its effects are carried out.
    fn after_step(&mut self, core: &Leader, effects: &[LeaderEffect]);
}
