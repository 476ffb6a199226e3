//! The role of each peer: engine, worker or admin command, and the process that each belongs to.
//!
//! A peer that names an engine or a worker in its hello gets that seat when it is free. A seat is taken while its
//! holder is connected and not silent, and its process lives. Until the seat is free, each request of the peer is
//! refused with `not_ready`, and each request tries again. Two connections of one process are the same peer, and the
//! younger one counts.

use std::fmt;

use super::{LeaderHost, LeaderShell};
use crate::{Holder, InUse};
use kvferry_core::{LeaderEvent, engine_of};
use kvferry_protocol::{ErrorBody, Hello, Role};
use kvferry_types::{
    AttachId, Caller, EngineId, MemoryId, PeerId, Rank, Replica, RequestId, User, WorkerId,
};

/// Peers that wait for one seat, at most.
const WAITING_MAX: usize = 4;

/// The role of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PeerRole {
    Engine(EngineId),
    Worker(WorkerId),
    /// An admin command. May request a reset, under a name given by this leader, so that no answer to the engine named
    /// in the hello reaches the command; with the id of its process.
    Admin(EngineId, Option<i32>),
    /// The supervisor of a worker on another machine.
    Supervisor(WorkerId),
    /// Names a seat that another process has; with the id of the peer's own process.
    Waiting(SeatId, Option<i32>),
}

/// The seat of an engine or a worker, which only one process has at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SeatId {
    Engine(EngineId),
    Worker(WorkerId),
}

impl fmt::Display for SeatId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Engine(engine) => write!(f, "{engine}"),
            Self::Worker(worker) => write!(f, "{worker}"),
        }
    }
}

/// The worker that has a seat. The entry is kept after its connection broke, because its process may still live and
/// copy.
#[derive(Debug)]
pub(super) struct WorkerPeer<P> {
    pub(super) holder: Holder<P>,
    /// The last attach, and the request that its answer belongs to.
    pub(super) attaching: Option<(AttachId, RequestId)>,
    /// The last statement of the memory, and the request that its answer belongs to.
    pub(super) stating: Option<(MemoryId, RequestId)>,
    /// The supervisor was requested to end the process.
    end_requested: bool,
}

impl<P: fmt::Debug> LeaderShell<P> {
    /// Handles the hello of a peer.
    pub fn opened(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        peer: PeerId,
        hello: &Hello,
        caller: impl Into<Caller>,
    ) {
        let Caller { user, pid } = caller.into();
        if user != User::Own {
            self.other_users.insert(peer, user);
        }
        let worker = WorkerId {
            replica: Replica(hello.replica),
            rank: Rank(hello.rank),
        };
        let seat = match hello.role {
            Role::Engine => SeatId::Engine(engine_of(user, hello.engine)),
            Role::Worker => SeatId::Worker(worker),
            Role::Supervisor => {
                self.roles.insert(peer, PeerRole::Supervisor(worker));
                return;
            }
            // The session welcomes none: such a peer has no role here, and its requests are refused.
            Role::Rank | Role::Unknown => return,
            Role::Admin => {
                let name = self.admin_name(host, hello.engine, pid);
                self.roles.insert(peer, PeerRole::Admin(name, pid));
                return;
            }
        };
        if let Err(in_use) = self.claim(host, peer, seat, pid) {
            if let Some(left_out) = self.seat_lines.line(host.now()) {
                tracing::warn!(%seat, pid, left_out, "seat not given to another process: {in_use}");
            }
            self.close_oldest_waiting(host, seat);
        }
    }

    /// Closes the oldest peers that wait for a seat, beyond [`WAITING_MAX`]: those that come again and again would take the
    /// places of others.
    fn close_oldest_waiting(&mut self, host: &mut dyn LeaderHost<Process = P>, seat: SeatId) {
        let waits =
            |role: &PeerRole| matches!(role, PeerRole::Waiting(wanted, _) if *wanted == seat);
        let waiting = self.roles.iter().filter(|(_, role)| waits(role));
        // Ids of connections grow, so the lowest is the oldest.
        let waiting: Vec<PeerId> = waiting.map(|(peer, _)| *peer).collect();
        for peer in waiting.iter().rev().skip(WAITING_MAX) {
            self.roles.remove(peer);
            host.disconnect(*peer);
        }
    }

    /// Returns a name that no engine has: half of it is a secret of this leader. A command that connects again with the
    /// same identity gets the same name, and its earlier connection is closed, so that a repeated request is
    /// recognised.
    fn admin_name(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        identity: [u8; 16],
        pid: Option<i32>,
    ) -> EngineId {
        let mut name = [0; 16];
        name[..8].copy_from_slice(&self.admin_key);
        if identity != [0; 16] {
            // The first byte of this half is 0 in a counted name.
            name[8] = 1;
            // All 16 bytes count: those that are drawn from a clock differ in their second half alone.
            let folded = identity[..7].iter().zip(&identity[9..]);
            let folded = folded.map(|(first, last)| first ^ last.rotate_left(3));
            for (byte, folded) in name[9..].iter_mut().zip(folded) {
                *byte = folded;
            }
            let name = EngineId(name);
            // The roles and not the names in use: a session has its name from its hello on, before its first request.
            let known = self.roles.iter().find_map(|(peer, role)| match role {
                PeerRole::Admin(known, pid) if *known == name => Some((*peer, *pid)),
                _ => None,
            });
            let Some((before, its_pid)) = known else {
                return name;
            };
            if Holder::new(host, before, its_pid)
                .in_use(host, pid)
                .is_none()
            {
                self.closed(host, before);
                host.disconnect(before);
                return name;
            }
        }
        self.admins += 1;
        name[8..].copy_from_slice(&self.admins.to_be_bytes());
        EngineId(name)
    }

    /// Gives a seat to a peer, or makes the peer wait for it.
    fn claim(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        peer: PeerId,
        seat: SeatId,
        pid: Option<i32>,
    ) -> Result<(), InUse> {
        self.roles.insert(peer, PeerRole::Waiting(seat, pid));
        match seat {
            SeatId::Engine(engine) => self.claim_engine(host, peer, engine, pid)?,
            SeatId::Worker(worker) => self.claim_worker(host, peer, worker, pid)?,
        }
        self.close_older_waiting(host, peer, seat, pid);
        Ok(())
    }

    /// Closes the older connections of a process that waited for the seat which its newest one now has: what is left to read
    /// of them would take the seat from it.
    fn close_older_waiting(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        peer: PeerId,
        seat: SeatId,
        pid: Option<i32>,
    ) {
        // The system does not show a process of another machine or PID namespace; its older connections are refused.
        if pid.is_none_or(|pid| pid <= 0) {
            return;
        }
        let waiting = PeerRole::Waiting(seat, pid);
        // Ids of connections grow.
        let older = self
            .roles
            .range(..peer)
            .filter(|(_, role)| **role == waiting);
        for older in older.map(|(older, _)| *older).collect::<Vec<_>>() {
            self.roles.remove(&older);
            host.disconnect(older);
        }
    }

    /// Claims the seat of a waiting peer again, when that peer sends a request. The error says why the seat is still
    /// taken.
    pub(super) fn claim_again(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        peer: PeerId,
    ) -> Result<(), ErrorBody> {
        let Some(PeerRole::Waiting(seat, pid)) = self.roles.get(&peer).copied() else {
            return Ok(());
        };
        let claimed = self.claim(host, peer, seat, pid);
        claimed.map_err(|in_use| in_use.refusal(&seat.to_string()))
    }

    fn claim_engine(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        peer: PeerId,
        engine: EngineId,
        pid: Option<i32>,
    ) -> Result<(), InUse> {
        if let Some(before) = self.engines.get(&engine) {
            if let Some(in_use) = before.in_use(host, pid) {
                return Err(in_use);
            }
            if let Some(left_out) = self.seat_lines.line(host.now()) {
                tracing::info!(%engine, pid, left_out, "connected again");
            }
            let before = before.peer;
            self.roles.remove(&before);
            host.disconnect(before);
        }
        self.roles.insert(peer, PeerRole::Engine(engine));
        self.note_process(host, engine, pid);
        self.engines.insert(engine, Holder::new(host, peer, pid));
        self.batches.forget(engine);
        self.step(host, LeaderEvent::EngineOpened(engine));
        Ok(())
    }

    /// Notes which process has the name of an engine. Another one than before begins without the answers, slots and ids of
    /// the earlier one, which may be as low as its own.
    fn note_process(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        engine: EngineId,
        pid: Option<i32>,
    ) {
        // As many as the core has engines, each forgotten some time after its connection ended.
        self.processes.retain(|known, _| self.core.knows(*known));
        let Some(pid) = pid else {
            return;
        };
        if let Some(before) = self.processes.insert(engine, pid)
            && before != pid
        {
            if let Some(left_out) = self.seat_lines.line(host.now()) {
                tracing::warn!(
                    %engine, pid, before, left_out,
                    "another process has the name of this engine: its request ids must be above the earlier ones"
                );
            }
            self.step(host, LeaderEvent::EngineReplaced(engine));
        }
    }

    fn claim_worker(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        peer: PeerId,
        worker: WorkerId,
        pid: Option<i32>,
    ) -> Result<(), InUse> {
        if let Some(before) = self.workers.get(&worker) {
            let holder = &before.holder;
            let silent_and_owes = || match self.may_write(worker) {
                true => holder.lives(host, pid),
                false => None,
            };
            if let Some(in_use) = holder.in_use(host, pid).or_else(silent_and_owes) {
                return Err(in_use);
            }
            if let Some(left_out) = self.seat_lines.line(host.now()) {
                tracing::warn!(%worker, pid, left_out, "connected again, or took over from one that is gone");
            }
            let before = holder.peer;
            self.roles.remove(&before);
            host.disconnect(before);
        }
        self.roles.insert(peer, PeerRole::Worker(worker));
        self.step(host, LeaderEvent::WorkerLost(worker));
        let process = pid.and_then(|pid| host.watch(pid));
        let holder = Holder { peer, pid, process };
        self.workers.insert(
            worker,
            WorkerPeer {
                holder,
                attaching: None,
                stating: None,
                end_requested: false,
            },
        );
        Ok(())
    }

    /// True while a copy of this worker has not ended, a request for its inventory is unanswered, or an order of an
    /// older leader may be in flight on it: its process may read or write.
    fn may_write(&self, worker: WorkerId) -> bool {
        self.core.is_awaited(worker)
            || self.core.has_unanswered_read(worker)
            || !self.core.is_clear(worker)
    }

    /// Ends the process that has a worker's seat. Its exit is handled like any other. A supervisor ends only its own
    /// child, so a process that still lives when its end is requested a second time is killed by the leader.
    pub(super) fn fence(&mut self, host: &mut dyn LeaderHost<Process = P>, worker: WorkerId) {
        let pid = self.workers.get(&worker).and_then(|peer| peer.holder.pid);
        if host.request_end(worker, pid) {
            tracing::error!(%worker, pid, "worker does not end its copies, or is silent: it is ended");
            let known = self.workers.get_mut(&worker);
            if known.is_none_or(|peer| !std::mem::replace(&mut peer.end_requested, true)) {
                return;
            }
        }
        let Some(holder) = self.workers.get(&worker).map(|peer| &peer.holder) else {
            tracing::error!(%worker, "worker is silent, and its process is unknown: end it by hand");
            return;
        };
        if holder.pid.is_some_and(|pid| host.is_own(pid)) {
            // The worker is part of this process: all that can be ended is the connection.
            tracing::error!(%worker, "worker does not end its copies, or is silent: closing it");
            return host.disconnect(holder.peer);
        }
        let Some(process) = &holder.process else {
            tracing::error!(%worker, "worker is silent, and its process is unknown: end it by hand");
            return;
        };
        tracing::error!(%worker, pid, "worker does not end its copies, or is silent: killed");
        host.kill(worker, process);
    }

    /// Handles the close of a connection whose peer had sent its hello. A peer that lost its seat to another one has no
    /// role any longer, so its close has no effect on the seat.
    pub fn closed(&mut self, host: &mut dyn LeaderHost<Process = P>, peer: PeerId) {
        self.readers.forget(peer);
        self.other_users.remove(&peer);
        match self.roles.remove(&peer) {
            Some(role @ (PeerRole::Engine(engine) | PeerRole::Admin(engine, _))) => {
                let holds = |holder: &Holder<P>| holder.peer == peer;
                if !self.engines.get(&engine).is_some_and(holds) {
                    return;
                }
                if matches!(role, PeerRole::Engine(_))
                    && let Some(left_out) = self.seat_lines.line(host.now())
                {
                    let (requests, within) = (self.core.slots_of(engine), self.core.engine_grace());
                    tracing::info!(
                        %engine, requests, ?within, left_out,
                        "engine gone: its requests are finished unless it connects again in time"
                    );
                }
                self.engines.remove(&engine);
                self.batches.forget(engine);
                self.step(host, LeaderEvent::EngineClosed(engine));
            }
            Some(PeerRole::Worker(worker)) => {
                if let Some(left_out) = self.seat_lines.line(host.now()) {
                    tracing::warn!(%worker, left_out, "worker lost");
                }
                if !self.seats().any(|seat| seat == worker) {
                    self.workers.remove(&worker);
                }
                self.step(host, LeaderEvent::WorkerLost(worker));
            }
            Some(PeerRole::Supervisor(_) | PeerRole::Waiting(..)) | None => {}
        }
    }

    /// Handles the exit of a watched process. Only the exit proves that the process writes nothing more.
    pub fn worker_exited(&mut self, host: &mut dyn LeaderHost<Process = P>, pid: i32) {
        let mut workers = self.workers.iter();
        let dead = workers.find(|(_, worker)| worker.holder.pid == Some(pid));
        if let Some(worker) = dead.map(|(worker, _)| *worker) {
            self.worker_ended(host, worker);
        }
    }

    /// Handles the end of the process that has a worker's seat.
    fn worker_ended(&mut self, host: &mut dyn LeaderHost<Process = P>, worker: WorkerId) {
        // Drops messages that the worker sent before its death and that arrive after this event.
        if let Some(dead) = self.workers.remove(&worker) {
            self.roles.remove(&dead.holder.peer);
            host.disconnect(dead.holder.peer);
        }
        self.step(host, LeaderEvent::WorkerDead(worker));
    }

    /// Handles a supervisor's statement that no process of its worker has run since before the hello of `supervisor`.
    /// Returns whether the statement has an effect.
    ///
    /// A worker connects while it runs, and the supervisor after that; ids of connections grow. So older connections for
    /// the seat are of processes that have ended, and a younger one is of a process that was started later.
    pub(super) fn worker_gone(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        supervisor: PeerId,
        worker: WorkerId,
    ) -> bool {
        let holder = self.workers.get(&worker).map(|known| &known.holder);
        let lives_on = holder.is_some_and(|holder| {
            // The leader sees the ends of processes of its own machine itself.
            holder.peer > supervisor || holder.process.is_some()
        });
        if lives_on || !self.seats().any(|seat| seat == worker) {
            return false;
        }
        let seat = SeatId::Worker(worker);
        let waits =
            |role: &PeerRole| matches!(role, PeerRole::Waiting(wanted, _) if *wanted == seat);
        let of_the_dead = self.roles.iter().filter(|(_, role)| waits(role));
        let of_the_dead = of_the_dead.map(|(peer, _)| *peer);
        let of_the_dead: Vec<PeerId> = of_the_dead.filter(|peer| *peer < supervisor).collect();
        for peer in of_the_dead {
            self.roles.remove(&peer);
            host.disconnect(peer);
        }
        if let Some(left_out) = self.seat_lines.line(host.now()) {
            tracing::warn!(%worker, left_out, "worker has ended, as its supervisor reports");
        }
        self.worker_ended(host, worker);
        true
    }
}
