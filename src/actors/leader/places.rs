//! Who is who: engines, workers and people's commands, and the processes behind them.
//!
//! A peer that names an engine or a worker's place in its hello gets it when nobody has it: not while the holder is
//! connected, was heard of late and its process lives. Until then each of its requests is refused with `not_ready`, and
//! asks anew. Two connections of one process are the same peer, and the younger one counts.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ractor::ActorRef;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::{LeaderMessage, State};
use crate::actors::holder::{Holder, InUse};
use crate::core::Event;
use crate::protocol::{ErrorBody, Hello, Role};
use crate::transport::PeerId;
use crate::types::{AttachId, Direction, EngineId, Rank, Replica, RequestId, WorkerId};

/// What a peer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PeerRole {
    Engine(EngineId),
    Worker(WorkerId),
    /// A person's command. It may ask for a reset, under a name that this leader has given it: whatever its hello named,
    /// another's answers are not for it.
    Admin(EngineId),
    /// It has named what another process has, in this process of its own.
    Waiting(Place, Option<i32>),
}

/// What only one process has at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Engine(EngineId),
    Worker(WorkerId),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Engine(engine) => write!(f, "{engine}"),
            Self::Worker(worker) => write!(f, "{worker}"),
        }
    }
}

/// The worker that has a place, also when its connection broke: its process may live and copy.
pub(super) struct WorkerPeer {
    pub(super) holder: Holder,
    /// The last attach request of each number: where its answer goes.
    pub(super) attaching: Option<(AttachId, RequestId)>,
    /// The supervisor was told to end it.
    told: bool,
}

/// Waits for the end of a process, on a thread of its own: there are as many as workers.
fn watch(pid: i32, actor: ActorRef<LeaderMessage>) -> std::io::Result<Arc<OwnedFd>> {
    let process = Pid::from_raw(pid).ok_or(std::io::ErrorKind::InvalidInput)?;
    let process = Arc::new(pidfd_open(process, PidfdFlags::empty())?);
    let watched = Arc::clone(&process);
    let wait = move || {
        let mut ended = [PollFd::new(&*watched, PollFlags::IN)];
        while poll(&mut ended, None).is_err_and(|error| error == rustix::io::Errno::INTR) {}
        if ended[0].revents().contains(PollFlags::IN)
            && actor.cast(LeaderMessage::WorkerExited { pid }).is_err()
        {
            tracing::debug!("the leader has stopped");
        }
    };
    std::thread::Builder::new()
        .name("kvferry-pidfd".to_owned())
        .spawn(wait)?;
    Ok(process)
}

impl State {
    pub(super) fn opened(
        &mut self,
        peer: PeerId,
        hello: &Hello,
        pid: Option<i32>,
        myself: &ActorRef<LeaderMessage>,
    ) {
        let place = match hello.role {
            Role::Engine => Place::Engine(EngineId(hello.engine)),
            Role::Worker => Place::Worker(WorkerId {
                replica: Replica(hello.replica),
                rank: Rank(hello.rank),
            }),
            Role::Rank | Role::Admin | Role::Unknown => {
                let name = self.next_admin();
                self.roles.insert(peer, PeerRole::Admin(name));
                return;
            }
        };
        if let Err(in_use) = self.claim(peer, place, pid, myself) {
            tracing::warn!(%place, pid, "not given to a newcomer: {in_use}");
        }
    }

    /// A name that no engine has: half of it is a secret of this leader.
    fn next_admin(&mut self) -> EngineId {
        self.admins += 1;
        let mut name = [0; 16];
        name[..8].copy_from_slice(&self.admin_key);
        name[8..].copy_from_slice(&self.admins.to_be_bytes());
        EngineId(name)
    }

    /// Gives a place to a peer, or has it wait.
    fn claim(
        &mut self,
        peer: PeerId,
        place: Place,
        pid: Option<i32>,
        myself: &ActorRef<LeaderMessage>,
    ) -> Result<(), InUse> {
        self.roles.insert(peer, PeerRole::Waiting(place, pid));
        match place {
            Place::Engine(engine) => self.claim_engine(peer, engine, pid),
            Place::Worker(worker) => self.claim_worker(peer, worker, pid, myself),
        }
    }

    /// A peer that waits asks for something: it may have its place by now, or hears why not.
    pub(super) fn claim_again(
        &mut self,
        peer: PeerId,
        myself: &ActorRef<LeaderMessage>,
    ) -> Result<(), ErrorBody> {
        let Some(PeerRole::Waiting(place, pid)) = self.roles.get(&peer).copied() else {
            return Ok(());
        };
        let claimed = self.claim(peer, place, pid, myself);
        claimed.map_err(|in_use| in_use.refusal(&place.to_string()))
    }

    fn claim_engine(
        &mut self,
        peer: PeerId,
        engine: EngineId,
        pid: Option<i32>,
    ) -> Result<(), InUse> {
        if let Some(before) = self.engines.get(&engine) {
            if let Some(in_use) = before.in_use(&self.replier, pid) {
                return Err(in_use);
            }
            tracing::info!(%engine, pid, "connected again");
            let before = before.peer;
            self.roles.remove(&before);
            self.replier.disconnect(before);
        }
        self.roles.insert(peer, PeerRole::Engine(engine));
        self.engines.insert(engine, Holder::new(peer, pid));
        self.step(Event::EngineOpened(engine));
        Ok(())
    }

    fn claim_worker(
        &mut self,
        peer: PeerId,
        worker: WorkerId,
        pid: Option<i32>,
        myself: &ActorRef<LeaderMessage>,
    ) -> Result<(), InUse> {
        if let Some(before) = self.workers.get(&worker) {
            let holder = &before.holder;
            let silent_and_owes = || match self.owes(worker) {
                true => holder.lives(pid),
                false => None,
            };
            if let Some(in_use) = holder.in_use(&self.replier, pid).or_else(silent_and_owes) {
                return Err(in_use);
            }
            tracing::warn!(%worker, pid, "connected again, or took over from one that is gone");
            let before = holder.peer;
            self.roles.remove(&before);
            self.replier.disconnect(before);
        }
        self.roles.insert(peer, PeerRole::Worker(worker));
        self.step(Event::WorkerLost(worker));
        let process = pid.and_then(|pid| self.watch(pid, myself));
        let holder = Holder { peer, pid, process };
        self.workers.insert(
            worker,
            WorkerPeer {
                holder,
                attaching: None,
                told: false,
            },
        );
        Ok(())
    }

    /// A copy that it was asked for has not ended, or a question for its inventory is not answered: its process may read
    /// or write.
    fn owes(&self, worker: WorkerId) -> bool {
        let mut directions = [Direction::Load, Direction::Store].into_iter();
        directions.any(|direction| self.core.owed_by(worker, direction) > 0)
            || self.core.owes_reading(worker)
    }

    fn watch(&mut self, pid: i32, myself: &ActorRef<LeaderMessage>) -> Option<Arc<OwnedFd>> {
        if let Some(process) = self.watched.get(&pid) {
            return Some(Arc::clone(process));
        }
        match watch(pid, myself.clone()) {
            Ok(process) => {
                self.watched.insert(pid, Arc::clone(&process));
                Some(process)
            }
            Err(error) => {
                tracing::warn!(%error, pid, "cannot watch this worker");
                None
            }
        }
    }

    /// Ends the process that has a worker's place. Its end is seen like any other. A supervisor ends a child of its own and
    /// nothing else; a process that still lives when it is to be ended again is none, and is killed from here.
    pub(super) fn expel(&mut self, worker: WorkerId) {
        let pid = self.workers.get(&worker).and_then(|peer| peer.holder.pid);
        if let Some(supervisor) = &mut self.supervisor {
            tracing::error!(%worker, pid, "worker does not end its copies, or keeps silent: it is ended");
            supervisor(worker, pid);
            let known = self.workers.get_mut(&worker);
            if known.is_none_or(|peer| !std::mem::replace(&mut peer.told, true)) {
                return;
            }
        }
        let peer = self.workers.get(&worker).map(|peer| &peer.holder);
        if let Some(peer) = peer.filter(|peer| peer.pid == i32::try_from(std::process::id()).ok()) {
            // It lives in this process: all that can be ended is the conversation.
            tracing::error!(%worker, "worker does not end its copies, or keeps silent: closing it");
            return self.replier.disconnect(peer.peer);
        }
        let Some(process) = peer.and_then(|peer| peer.process.as_ref()) else {
            tracing::error!(%worker, "worker keeps silent, and its process is not known: end it by hand");
            return;
        };
        tracing::error!(%worker, pid, "worker does not end its copies, or keeps silent: killed");
        if let Err(error) = pidfd_send_signal(process, Signal::KILL) {
            tracing::warn!(%error, %worker, "it had ended, or cannot be killed");
        }
    }

    pub(super) fn closed(&mut self, peer: PeerId) {
        match self.roles.remove(&peer) {
            Some(PeerRole::Engine(engine) | PeerRole::Admin(engine))
                if self
                    .engines
                    .get(&engine)
                    .is_some_and(|known| known.peer == peer) =>
            {
                self.engines.remove(&engine);
                self.step(Event::EngineClosed(engine));
            }
            Some(PeerRole::Worker(worker))
                if self
                    .workers
                    .get(&worker)
                    .is_some_and(|known| known.holder.peer == peer) =>
            {
                tracing::warn!(%worker, "worker lost");
                if !self.places().any(|place| place == worker) {
                    self.workers.remove(&worker);
                }
                self.step(Event::WorkerLost(worker));
            }
            _ => {}
        }
    }

    /// Only the end of the process proves that nothing is written any more.
    pub(super) fn worker_exited(&mut self, pid: i32) {
        self.watched.remove(&pid);
        let dead = self
            .workers
            .iter()
            .find(|(_, worker)| worker.holder.pid == Some(pid));
        if let Some(worker) = dead.map(|(worker, _)| *worker) {
            // What it said before it died, and arrives behind its death, is not heard.
            if let Some(dead) = self.workers.remove(&worker) {
                self.roles.remove(&dead.holder.peer);
                self.replier.disconnect(dead.holder.peer);
            }
            self.step(Event::WorkerDead(worker));
        }
    }
}
