//! The leader's shell: peers in, core, peers out.

mod errors;
mod places;
mod status;

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::actors::clock::Clock;
use crate::actors::holder::Holder;
use crate::actors::mailbox::{Credited, Feeder};
use crate::core::{
    Attached, CANCELLED_MAX, Effect, EngineMemory, Event, LOAD_RUNS_MAX, Leader, LeaderSettings,
    RankSet, Refusal,
};
use crate::protocol::limits::{COPIES_MAX, PAIRS_MAX};
use crate::protocol::{
    Attach, Attached as AttachedBody, Cancel, Empty, Envelope, ErrorBody, ErrorCode, Message,
    Preparing, ReadInventory, Strike, Transfer,
};
use crate::transport::{PeerId, Quiet, Replier, Server, ServerEvent, ServerEvents};
use crate::types::{
    AttachId, Copy, DepotId, EndedCopy, EngineId, Epoch, OpId, Replica, Request, RequestId,
    ResetId, Time, WorkerId,
};

use errors::to_error;
use places::{PeerRole, WorkerPeer};

/// Ends the process of a worker: of this number, or whichever there is where none has spoken to the leader.
pub type EndWorker = Box<dyn FnMut(WorkerId, Option<i32>) + Send>;

/// Notes that an epoch was used, so that the next leader has a later one; or says why that failed.
pub type RaiseEpoch = Box<dyn Fn(Epoch) -> Result<(), String> + Send>;

// What the core orders with one effect can be said in one message.
const _: () = assert!(CANCELLED_MAX <= COPIES_MAX && LOAD_RUNS_MAX <= PAIRS_MAX);

/// What a leader needs to start.
pub struct LeaderArguments {
    /// Settings of the core.
    pub settings: LeaderSettings,
    /// Where engines, workers and people connect.
    pub server: Server,
    /// Ends a worker's process, where a supervisor does that. Without one, the leader ends it itself.
    pub supervisor: Option<EndWorker>,
    /// Makes the next leader begin above an epoch that a depot has seen, before this one ends for that reason.
    pub raise_epoch: Option<RaiseEpoch>,
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

pub(super) struct State {
    feeder: Feeder,
    core: Leader,
    settings: LeaderSettings,
    supervisor: Option<EndWorker>,
    raise_epoch: Option<RaiseEpoch>,
    /// Why this leader cannot serve: its epoch was used before.
    outdated: Option<String>,
    clock: Clock,
    replier: Replier,
    roles: HashMap<PeerId, PeerRole>,
    engines: HashMap<EngineId, Holder>,
    workers: HashMap<WorkerId, WorkerPeer>,
    watched: HashMap<i32, Arc<OwnedFd>>,
    /// Half of the name of each session of a person's command.
    admin_key: [u8; 8],
    /// Sessions of those so far.
    admins: u64,
    /// When everything was counted a second time last.
    checked: Option<Time>,
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
            raise_epoch,
        } = arguments;
        let replier = server.replier();
        let mut admin_key = [0; 8];
        rustix::rand::getrandom(&mut admin_key, rustix::rand::GetRandomFlags::empty())?;
        let feeder = Feeder::start(server, move |batch| {
            let message = batch.map_or(LeaderMessage::Deaf, LeaderMessage::Peers);
            myself.cast(message).is_ok()
        });
        Ok(State {
            feeder,
            core: Leader::new(settings.clone()),
            settings,
            supervisor,
            raise_epoch,
            outdated: None,
            clock: Clock::start(),
            replier,
            roles: HashMap::new(),
            engines: HashMap::new(),
            workers: HashMap::new(),
            watched: HashMap::new(),
            admin_key,
            admins: 0,
            checked: None,
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
        if let Some(why) = state.outdated.take() {
            return Err(why.into());
        }
        state.end_drain();
        state.arm(&myself);
        Ok(())
    }
}

impl State {
    fn peer_event(&mut self, event: ServerEvent, myself: &ActorRef<LeaderMessage>) {
        match event {
            ServerEvent::Opened { peer, hello, pid } => {
                self.opened(peer, &hello, pid, myself);
            }
            ServerEvent::Closed { peer } => self.closed(peer),
            ServerEvent::Message { peer, envelope } => self.message(peer, envelope, myself),
        }
    }

    fn message(&mut self, peer: PeerId, envelope: Envelope, myself: &ActorRef<LeaderMessage>) {
        let Envelope {
            correlation,
            deadline_ms,
            epoch,
            message,
            ..
        } = envelope;
        if let Err(error) = self.claim_again(peer, myself) {
            return match message {
                Message::Ended(_)
                | Message::Struck(_)
                | Message::Inventory(_)
                | Message::Error(_) => {}
                _ => self.replier.refuse(peer, correlation, error),
            };
        }
        let role = self.roles.get(&peer).copied();
        match (role, message) {
            (_, Message::Status(status)) => {
                let answer = match self.status(status.check) {
                    Ok(answer) => Message::StatusAnswer(*answer),
                    Err(error) => Message::Error(error),
                };
                self.replier.reply(peer, correlation, answer);
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
                // For the core it is an engine like any other, which has no memory.
                let known = self.engines.insert(name, Holder::new(peer, None));
                if known.is_none() {
                    self.step(Event::EngineOpened(name));
                }
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
            ranks: attach.ranks,
            shards: attach.kv_shards,
            attach: id,
            depot: DepotId(u128::from_be_bytes(attach.depot)),
            depot_epoch: Epoch(attach.depot_epoch),
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
                    deadline,
                } => {
                    let strike = Message::Strike(Strike::new(id, &scope, through));
                    let left = self.clock.now().until(deadline);
                    self.order(worker, strike, left);
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
        let peer = self.workers.get(&worker).map(|worker| worker.holder.peer);
        peer.is_some_and(|peer| self.replier.order(peer, correlation, message, deadline))
    }

    fn answer(
        &mut self,
        engine: EngineId,
        id: RequestId,
        answer: Result<crate::types::Answer, Refusal>,
    ) {
        let Some(peer) = self.engines.get(&engine).map(|holder| holder.peer) else {
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
                    .reply(known.holder.peer, correlation, Message::Attached(body));
            }
            Err(refusal) => {
                tracing::error!(%refusal, "worker turned away");
                self.replier
                    .refuse(known.holder.peer, correlation, to_error(&refusal));
                if let Refusal::EpochUsed { depot_epoch, .. } = refusal {
                    self.outdated(depot_epoch, refusal.to_string());
                }
            }
        }
    }

    /// A depot has seen this leader's epoch, or a later one: the process ends, and its successor begins behind that.
    fn outdated(&mut self, depot_epoch: Epoch, why: String) {
        let raised = self
            .raise_epoch
            .as_ref()
            .map_or(Ok(()), |raise| raise(depot_epoch));
        self.outdated = Some(match raised {
            Ok(()) => why,
            Err(error) => format!("{why}; but that epoch could not be noted: {error}"),
        });
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
