//! What a [`LeaderShell`](super::LeaderShell) needs of its process.

use std::time::Duration;

use crate::core::{Effect, Event, Leader};
use crate::protocol::Message;
use crate::shell::Peers;
use crate::types::{Epoch, PeerId, RequestId, Time, WorkerId};

/// The process of a leader, live or simulated. Its calls act or answer; whatever follows from them comes back later, as a
/// call of the shell.
pub trait LeaderHost: Peers {
    /// The time by which deadlines are set and kept.
    fn now(&self) -> Time;

    /// Answers a request. A peer that is gone, or does not read, is not waited for.
    fn reply(&mut self, peer: PeerId, request: RequestId, message: Message);

    /// Sends an order, which is to be carried out within `deadline`. False when it was not sent: nobody will answer it.
    fn order(
        &mut self,
        peer: PeerId,
        order: RequestId,
        message: Message,
        deadline: Duration,
    ) -> bool;

    /// Opens a handle to a process whose end is reported from then on, with [`super::LeaderShell::worker_exited`].
    fn watch(&mut self, pid: i32) -> Option<Self::Process>;

    /// True for the process that this leader is part of.
    fn is_own(&self, pid: i32) -> bool;

    /// Requests a supervisor to end a worker's process: that of this id, or whichever there is if it is not known. False
    /// where there is no supervisor.
    fn request_end(&mut self, worker: WorkerId, pid: Option<i32>) -> bool;

    /// Kills a worker's process.
    fn kill(&mut self, worker: WorkerId, process: &Self::Process);

    /// Notes that an epoch was used, so that the next leader has a later one; or says why that failed.
    fn raise_epoch(&mut self, used: Epoch) -> Result<(), String>;

    /// Time spent in the core's steps of lookups, for the status.
    fn lookup_time(&self) -> Duration;

    /// Called before each step of the core.
    fn before_step(&mut self, core: &Leader, event: &Event);

    /// Called after each step of the core, before its effects are carried out.
    fn after_step(&mut self, core: &Leader, effects: &[Effect]);
}
