//! The leader's shell: peers in, core, peers out.

mod status;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ractor::{Actor, ActorProcessingErr, ActorRef};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::actors::clock::Clock;
use crate::actors::mailbox::{Credited, Feeder};
use crate::core::{
    Attached, CANCELLED_MAX, Effect, EngineMemory, Event, LOAD_RUNS_MAX, Leader, LeaderSettings,
    RankSet, Refusal,
};
use crate::protocol::limits::{COPIES_MAX, PAIRS_MAX};
use crate::protocol::{
    Attach, Attached as AttachedBody, Cancel, Empty, Envelope, ErrorBody, ErrorCode, Message,
    Preparing, ReadInventory, Role, Strike, Transfer,
};
use crate::transport::{PeerId, Quiet, Replier, Server, ServerEvent, ServerEvents};
use crate::types::{
    AttachId, Copy, DepotId, EndedCopy, EngineId, OpId, Rank, Replica, Request, RequestId, ResetId,
    Time, WorkerId,
};

// What the core orders with one effect can be said in one message.
const _: () = assert!(CANCELLED_MAX <= COPIES_MAX && LOAD_RUNS_MAX <= PAIRS_MAX);

/// What a leader needs to start.
pub struct LeaderArguments {
    /// Settings of the core.
    pub settings: LeaderSettings,
    /// Where engines, workers and people connect.
    pub server: Server,
    /// Ends a worker's process, where a supervisor does that. Without one, the leader ends it itself.
    pub supervisor: Option<Box<dyn FnMut(WorkerId) + Send>>,
}

/// What can be sent to the leader.
pub(super) enum LeaderMessage {
    Peers(Credited<ServerEvents>),
    /// The listener has ended.
    Deaf,
    WorkerExited {
        pid: i32,
    },
    Tick,
    Drain(oneshot::Sender<()>),
}

/// A running leader.
#[derive(Clone)]
pub struct LeaderHandle(ActorRef<LeaderMessage>);

impl LeaderHandle {
    pub(super) fn new(actor: ActorRef<LeaderMessage>) -> Self {
        Self(actor)
    }

    /// Takes no new work and waits until no copy is under way, at most `limit`. True when all ended in time.
    pub async fn drain(&self, limit: Duration) -> bool {
        let (done, drained) = oneshot::channel();
        if self.0.cast(LeaderMessage::Drain(done)).is_err() {
            return true;
        }
        matches!(tokio::time::timeout(limit, drained).await, Ok(Ok(())))
    }
}

static REFUSED_ORDERS: Quiet = Quiet::new();

pub(super) struct LeaderActor;

struct WorkerPeer {
    peer: PeerId,
    pid: Option<i32>,
    /// Its process, as long as it lives.
    process: Option<Arc<OwnedFd>>,
    /// The last attach request of each number: where its answer goes.
    attaching: Option<(AttachId, RequestId)>,
}

pub(super) struct State {
    feeder: Feeder,
    core: Leader,
    settings: LeaderSettings,
    supervisor: Option<Box<dyn FnMut(WorkerId) + Send>>,
    clock: Clock,
    replier: Replier,
    roles: HashMap<PeerId, PeerRole>,
    engines: HashMap<EngineId, PeerId>,
    workers: HashMap<WorkerId, WorkerPeer>,
    watched: HashMap<i32, Arc<OwnedFd>>,
    /// How far each worker said last that it is; at most as many as there are places.
    preparing: HashMap<WorkerId, Preparing>,
    /// What the core's steps of lookups took.
    lookup_time: Duration,
    next_order: u64,
    timer: Option<JoinHandle<Result<(), ractor::MessagingErr<LeaderMessage>>>>,
    armed_at: Option<Time>,
    draining: Option<oneshot::Sender<()>>,
    effects: Vec<Effect>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PeerRole {
    Engine(EngineId),
    Worker(WorkerId),
    /// A person's command. It may ask for a reset, under a name of its own.
    Admin(EngineId),
}

impl Actor for LeaderActor {
    type Msg = LeaderMessage;
    type State = State;
    type Arguments = LeaderArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<LeaderMessage>,
        arguments: LeaderArguments,
    ) -> Result<State, ActorProcessingErr> {
        let LeaderArguments {
            settings,
            server,
            supervisor,
        } = arguments;
        let replier = server.replier();
        let feeder = Feeder::start(server, move |batch| {
            let message = batch.map_or(LeaderMessage::Deaf, LeaderMessage::Peers);
            myself.cast(message).is_ok()
        });
        Ok(State {
            feeder,
            core: Leader::new(settings.clone()),
            settings,
            supervisor,
            clock: Clock::start(),
            replier,
            roles: HashMap::new(),
            engines: HashMap::new(),
            workers: HashMap::new(),
            watched: HashMap::new(),
            preparing: HashMap::new(),
            lookup_time: Duration::ZERO,
            next_order: 0,
            timer: None,
            armed_at: None,
            draining: None,
            effects: Vec::new(),
        })
    }

    async fn post_stop(
        &self,
        _myself: ActorRef<LeaderMessage>,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        state.feeder.stop().await;
        Ok(())
    }

    async fn handle(
        &self,
        myself: ActorRef<LeaderMessage>,
        message: LeaderMessage,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            LeaderMessage::Peers(batch) => {
                for event in batch.item {
                    state.peer_event(event, &myself);
                }
            }
            LeaderMessage::Deaf => return Err("the listener has ended".into()),
            LeaderMessage::WorkerExited { pid } => state.worker_exited(pid),
            LeaderMessage::Tick => {
                state.armed_at = None;
                state.step(Event::Tick);
            }
            LeaderMessage::Drain(done) => {
                state.core.drain();
                state.draining = Some(done);
            }
        }
        state.end_drain();
        state.arm(&myself);
        Ok(())
    }
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
    fn peer_event(&mut self, event: ServerEvent, myself: &ActorRef<LeaderMessage>) {
        match event {
            ServerEvent::Opened { peer, hello, pid } => {
                let role = match hello.role {
                    Role::Engine => PeerRole::Engine(EngineId(hello.engine)),
                    Role::Worker => PeerRole::Worker(WorkerId {
                        replica: Replica(hello.replica),
                        rank: Rank(hello.rank),
                    }),
                    Role::Rank | Role::Admin | Role::Unknown => {
                        PeerRole::Admin(EngineId(hello.engine))
                    }
                };
                self.roles.insert(peer, role);
                self.opened(peer, role, pid, myself);
            }
            ServerEvent::Closed { peer } => self.closed(peer),
            ServerEvent::Message { peer, envelope } => self.message(peer, envelope),
        }
    }

    fn opened(
        &mut self,
        peer: PeerId,
        role: PeerRole,
        pid: Option<i32>,
        myself: &ActorRef<LeaderMessage>,
    ) {
        match role {
            PeerRole::Engine(engine) => {
                if let Some(before) = self.engines.insert(engine, peer) {
                    self.replier.disconnect(before);
                }
                self.step(Event::EngineOpened(engine));
            }
            PeerRole::Worker(worker) => {
                if let Some(before) = self.workers.get(&worker) {
                    tracing::warn!(%worker, "connected again, or a second one took over");
                    self.roles.remove(&before.peer);
                    self.replier.disconnect(before.peer);
                }
                self.step(Event::WorkerLost(worker));
                let process = pid.and_then(|pid| self.watch(pid, myself));
                self.workers.insert(
                    worker,
                    WorkerPeer {
                        peer,
                        pid,
                        process,
                        attaching: None,
                    },
                );
            }
            PeerRole::Admin(_) => {}
        }
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

    /// Ends a worker's process. Its end is seen like any other.
    fn expel(&mut self, worker: WorkerId) {
        let peer = self.workers.get(&worker);
        if let Some(supervisor) = &mut self.supervisor {
            tracing::error!(%worker, "worker does not end its copies, or keeps silent: it is ended");
            return supervisor(worker);
        }
        if let Some(peer) = peer.filter(|peer| peer.pid == i32::try_from(std::process::id()).ok()) {
            // It lives in this process: all that can be ended is the conversation.
            tracing::error!(%worker, "worker does not end its copies, or keeps silent: closing it");
            return self.replier.disconnect(peer.peer);
        }
        let Some(process) = peer.and_then(|peer| peer.process.as_ref()) else {
            tracing::error!(%worker, "worker keeps silent, and its process is not known: end it by hand");
            return;
        };
        tracing::error!(%worker, "worker does not end its copies, or keeps silent: killed");
        if let Err(error) = pidfd_send_signal(process, Signal::KILL) {
            tracing::warn!(%error, %worker, "it had ended, or cannot be killed");
        }
    }

    fn closed(&mut self, peer: PeerId) {
        match self.roles.remove(&peer) {
            Some(PeerRole::Engine(engine)) if self.engines.get(&engine) == Some(&peer) => {
                self.engines.remove(&engine);
                self.step(Event::EngineClosed(engine));
            }
            Some(PeerRole::Worker(worker))
                if self
                    .workers
                    .get(&worker)
                    .is_some_and(|known| known.peer == peer) =>
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
    fn worker_exited(&mut self, pid: i32) {
        self.watched.remove(&pid);
        let dead = self
            .workers
            .iter()
            .find(|(_, worker)| worker.pid == Some(pid));
        if let Some(worker) = dead.map(|(worker, _)| *worker) {
            // What it said before it died, and arrives behind its death, is not heard.
            if let Some(dead) = self.workers.remove(&worker) {
                self.roles.remove(&dead.peer);
                self.replier.disconnect(dead.peer);
            }
            self.step(Event::WorkerDead(worker));
        }
    }

    fn message(&mut self, peer: PeerId, envelope: Envelope) {
        let Envelope {
            correlation,
            deadline_ms,
            epoch,
            message,
            ..
        } = envelope;
        let role = self.roles.get(&peer).copied();
        match (role, message) {
            (_, Message::Status(status)) => {
                let answer = Box::new(self.status(status.check));
                self.replier
                    .reply(peer, correlation, Message::StatusAnswer(*answer));
            }
            (Some(PeerRole::Worker(worker)), Message::Attach(attach)) => {
                self.attach(worker, correlation, attach);
            }
            (Some(PeerRole::Worker(worker)), Message::Preparing(preparing)) => {
                self.prepares(worker, preparing);
                self.replier
                    .reply(peer, correlation, Message::PreparingAnswer(Empty {}));
            }
            (Some(PeerRole::Worker(worker)), Message::Ended(ended)) => {
                let copies = ended.copies.iter().map(EndedCopy::from).collect();
                self.step(Event::Ended {
                    worker,
                    epoch,
                    copies,
                });
            }
            (Some(PeerRole::Worker(worker)), Message::Struck(struck)) => {
                if epoch == self.settings.epoch {
                    let id = ResetId(struck.reset);
                    self.step(Event::Struck { worker, id });
                }
            }
            (Some(PeerRole::Worker(worker)), Message::Inventory(inventory)) => {
                self.step(Event::Inventory {
                    worker,
                    depot: DepotId(u128::from_be_bytes(inventory.depot)),
                    reading: inventory.reading,
                    from: inventory.from,
                    next: inventory.next,
                    records: inventory.pages(),
                });
            }
            (Some(PeerRole::Worker(worker)), Message::Error(error)) => {
                if let Some(left_out) = REFUSED_ORDERS.line() {
                    tracing::warn!(%worker, message = error.message, left_out, "worker refuses an order");
                }
            }
            (Some(PeerRole::Admin(name)), message @ Message::Reset(_)) => {
                // From here on it is an engine like any other, which has no memory.
                let role = PeerRole::Engine(name);
                self.roles.insert(peer, role);
                self.engines.insert(name, peer);
                self.step(Event::EngineOpened(name));
                self.engine_asks(peer, name, correlation, deadline_ms, message);
            }
            (Some(PeerRole::Engine(engine)), message) => {
                self.engine_asks(peer, engine, correlation, deadline_ms, message);
            }
            (_, message) => {
                let kind = message.kind().name();
                let text = format!("{kind} is not for this peer to send here: check its role");
                self.replier.refuse(
                    peer,
                    correlation,
                    ErrorBody::new(ErrorCode::UnknownKind, text),
                );
            }
        }
    }

    fn attach(&mut self, worker: WorkerId, correlation: RequestId, attach: Attach) {
        let id = AttachId(attach.attach);
        if let Some(peer) = self.workers.get_mut(&worker) {
            peer.attaching = Some((id, correlation));
        }
        let memory = attach.memory.map(|memory| EngineMemory {
            engine: EngineId(memory.engine),
            geometry: memory.geometry,
            arena_pages: memory.arena_pages,
        });
        self.step(Event::Attached(Attached {
            worker,
            attach: id,
            depot: DepotId(u128::from_be_bytes(attach.depot)),
            memory,
        }));
    }

    fn engine_asks(
        &mut self,
        peer: PeerId,
        engine: EngineId,
        id: RequestId,
        deadline_ms: u32,
        message: Message,
    ) {
        let request = match Request::try_from(message) {
            Ok(request) => request,
            Err(error) => return self.replier.refuse(peer, id, error),
        };
        let deadline = self.clock.after_ms(deadline_ms);
        self.step(Event::Request {
            engine,
            id,
            deadline,
            request,
        });
    }

    fn step(&mut self, event: Event) {
        let mut next = self.step_once(event);
        // A copy that was not sent has ended: nobody ever hears of it. Its end orders no further copies of its own.
        while let Some(event) = next.pop() {
            next.extend(self.step_once(event));
        }
    }

    /// Carries out what one event leads to. Returns the ends of copies that could not be sent.
    fn step_once(&mut self, event: Event) -> Vec<Event> {
        let mut effects = std::mem::take(&mut self.effects);
        let is_lookup = matches!(
            event,
            Event::Request {
                request: Request::Lookup { .. },
                ..
            }
        );
        let begun = is_lookup.then(Instant::now);
        self.core.step(self.clock.now(), event, &mut effects);
        self.lookup_time += begun.map_or(Duration::ZERO, |begun| begun.elapsed());
        let mut copies: Vec<(Replica, RankSet, Copy)> = Vec::new();
        for effect in effects.drain(..) {
            match effect {
                Effect::Answer { engine, id, answer } => self.answer(engine, id, answer),
                Effect::Admit {
                    worker,
                    attach,
                    verdict,
                } => self.admit(worker, attach, verdict),
                Effect::Copy {
                    replica,
                    ranks,
                    copy,
                } => copies.push((replica, ranks, copy)),
                Effect::Cancel { worker, ops } => {
                    let ops = ops.into_iter().map(|op| op.0).collect();
                    let cancel = Message::Cancel(Cancel { ops });
                    self.order(worker, cancel, Duration::ZERO);
                }
                Effect::Strike {
                    worker,
                    id,
                    scope,
                    through,
                } => {
                    let strike = Message::Strike(Strike::new(id, &scope, through));
                    self.order(worker, strike, Duration::ZERO);
                }
                Effect::ReadInventory {
                    worker,
                    depot,
                    page_bytes,
                    reading,
                    from,
                } => {
                    let read = Message::ReadInventory(ReadInventory {
                        depot: depot.0.to_be_bytes(),
                        page_bytes,
                        reading,
                        from,
                    });
                    self.order(worker, read, Duration::ZERO);
                }
                Effect::Expel(worker) => self.expel(worker),
            }
        }
        self.effects = effects;
        self.transfer(&copies)
    }

    /// Orders the copies of a step: those of one request, for the same ranks, in as few messages to each rank as can be
    /// said. Returns the ends of copies that no worker will ever hear of: those whose message could not be said, or found
    /// no connection to be sent over.
    fn transfer(&mut self, copies: &[(Replica, RankSet, Copy)]) -> Vec<Event> {
        let mut unsent = Vec::new();
        let same_ranks = |one: &(Replica, RankSet, Copy), other: &(Replica, RankSet, Copy)| {
            (one.0, one.1) == (other.0, other.1)
        };
        for group in copies.chunk_by(same_ranks) {
            let list: Vec<&Copy> = group.iter().map(|(_, _, copy)| copy).collect();
            let (replica, ranks) = (group[0].0, group[0].1);
            for (deadline, transfer) in Transfer::all_of(&list) {
                let left = self.clock.now().until(deadline);
                for rank in ranks.iter() {
                    let worker = WorkerId { replica, rank };
                    if !self.order(worker, Message::Transfer(transfer.clone()), left) {
                        let copies = transfer.copies.len();
                        tracing::warn!(%worker, copies, "order not sent: its copies count as failed");
                        unsent.push(Event::Ended {
                            worker,
                            epoch: self.settings.epoch,
                            copies: transfer.unsent(),
                        });
                    }
                }
            }
        }
        unsent
    }

    fn order(&mut self, worker: WorkerId, message: Message, deadline: Duration) -> bool {
        self.next_order += 1;
        let correlation = RequestId(self.next_order);
        let peer = self.workers.get(&worker).map(|worker| worker.peer);
        peer.is_some_and(|peer| self.replier.order(peer, correlation, message, deadline))
    }

    fn answer(
        &mut self,
        engine: EngineId,
        id: RequestId,
        answer: Result<crate::types::Answer, Refusal>,
    ) {
        let Some(peer) = self.engines.get(&engine).copied() else {
            return;
        };
        match answer {
            Ok(answer) => self.replier.reply(peer, id, answer.into()),
            Err(refusal) => self.replier.refuse(peer, id, to_error(&refusal)),
        }
    }

    fn admit(&mut self, worker: WorkerId, attach: AttachId, verdict: Result<OpId, Refusal>) {
        let attached_ranks = self.core.attached_workers();
        let Some(known) = self.workers.get_mut(&worker) else {
            return;
        };
        let Some((_, correlation)) = known.attaching.take_if(|(asked, _)| *asked == attach) else {
            return;
        };
        match verdict {
            Ok(after) => {
                let body = AttachedBody {
                    attach: attach.0,
                    after: after.0,
                    attached_ranks,
                };
                self.replier
                    .reply(known.peer, correlation, Message::Attached(body));
            }
            Err(refusal) => {
                tracing::error!(%refusal, "worker turned away");
                self.replier
                    .refuse(known.peer, correlation, to_error(&refusal));
            }
        }
    }

    fn end_drain(&mut self) {
        if self.core.copies_under_way() == 0
            && let Some(done) = self.draining.take()
            && done.send(()).is_err()
        {
            tracing::debug!("nobody waits for the end of the drain");
        }
    }

    /// Sets the timer for the next timeout, unless it fires before that anyway: a tick that comes early finds nothing to do
    /// and sets it anew. Requests move timeouts all the time, the first of them rarely.
    fn arm(&mut self, myself: &ActorRef<LeaderMessage>) {
        let Some(next) = self.core.next_timeout() else {
            return;
        };
        if self.armed_at.is_some_and(|at| at <= next) {
            return;
        }
        self.armed_at = Some(next);
        if let Some(timer) = self.timer.take() {
            timer.abort();
        }
        let left = self.clock.now().until(next);
        self.timer = Some(myself.send_after(left, || LeaderMessage::Tick));
    }
}

/// What an engine or a worker is told.
fn to_error(refusal: &Refusal) -> ErrorBody {
    let code = match refusal {
        Refusal::NotReady { .. } | Refusal::AnotherEngine { .. } | Refusal::Reading => {
            ErrorCode::NotReady
        }
        Refusal::RankDisagrees { .. } => ErrorCode::RankDisagrees,
        Refusal::NoSuchWorker { .. }
        | Refusal::DepotNotShared { .. }
        | Refusal::DepotOfTwoShards { .. }
        | Refusal::DepotTooSmall { .. }
        | Refusal::Invalid { .. } => ErrorCode::Invalid,
        Refusal::StillRead { .. } => ErrorCode::Deadline,
        Refusal::Draining => ErrorCode::Draining,
        Refusal::Leased { .. } => ErrorCode::Leased,
        Refusal::ResetUnconfirmed { .. } => ErrorCode::ResetUnconfirmed,
        Refusal::UnknownSlot(_) => ErrorCode::UnknownSlot,
        Refusal::NotPinned { .. } => ErrorCode::NotPinned,
        Refusal::Limit { .. } => ErrorCode::Limit,
        Refusal::CopyFailed(_) => ErrorCode::CopyFailed,
        Refusal::StaleRequest(_) => ErrorCode::StaleRequest,
    };
    ErrorBody::new(code, refusal.to_string())
}
