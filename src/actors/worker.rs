//! The worker's shell: a leader and engine ranks outside, the core inside, copies on threads of their own.

mod gpu;
mod registration;
mod strikes;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::actors::gpu::{EngineSide, Gpu};
use crate::actors::mailbox::{Credited, Credits, Feeder};
use crate::actors::pool::{PoolActor, PoolArguments, PoolSettings, Progress};
use crate::actors::processes::Process;
use crate::actors::teller::Teller;
use crate::actors::transfer::{
    RUNNING_COPIES_MAX, TransferActor, TransferArguments, TransferMessage,
};
use crate::core::{BatchId, OrderRefusal, Worker, WorkerEffect, WorkerEvent, WorkerSettings};
use crate::cuda::{Announced, CudaError};
use crate::memory::{BufferError, Depot, LifelineEnd};
use crate::protocol::limits::PAGE_RECORDS_MAX;
use crate::protocol::{
    Abandon, CopyResult, Empty, Ended, Envelope, ErrorBody, ErrorCode, Inventory, Message,
    ReadInventory,
};
use crate::shell::Holder;
use crate::transport::Clock;
use crate::transport::{
    Client, Failure, FdReceiver, Incoming, LinkId, PeerId, Replier, Server, ServerEvent,
    ServerEvents,
};
use crate::types::{
    AttachId, EndedCopy, EngineId, Epoch, Generation, GpuCopy, GroupId, OpId, RequestId, ResetId,
    Sharding, Time, WorkerId,
};

/// How long one question of a worker to its leader may take; the core asks again.
const ATTACH_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(2);

/// Questions of a worker to its leader whose answers it still takes. One is asked every second, and each is open for
/// [`ATTACH_TIMEOUT`].
const ATTACHING_MAX: usize = 8;

/// Pause between two lines of the log about how far the depot is.
const LOG_EVERY: std::time::Duration = std::time::Duration::from_secs(3);

use gpu::{GpuState, IDLE_LIMIT, NO_TIMELINE, Refusal};
use registration::{Mapped, Registering};
use strikes::{Strike, Strikes};

/// What a worker needs to start.
pub struct WorkerArguments {
    /// Which rank of which engine it serves.
    pub worker: WorkerId,
    /// Which ranks hold the same KV.
    pub sharding: Sharding,
    /// Where its engine rank connects.
    pub server: Server,
    /// Where its engine rank hands over file descriptors.
    pub fds: FdReceiver,
    /// The conversation with the leader.
    pub leader: Client,
    /// What the leader says unasked.
    pub incoming: mpsc::Receiver<Incoming>,
    /// Its host memory.
    pub depot: PoolSettings,
    /// Threads for large copies.
    pub copy_threads: usize,
    /// How a GPU's driver gets copies.
    pub gpu_copy: GpuCopy,
    /// How long a GPU is kept after its last engine has left; a default without it.
    pub gpu_idle: Option<std::time::Duration>,
}

pub(super) enum WorkerMessage {
    Ranks(Credited<ServerEvents>),
    Leader(Credited<Incoming>),
    /// A feeding task has ended.
    Deaf(&'static str),
    /// The depot is mapped.
    Depot(Arc<Depot>),
    /// More of its memory is there.
    Preparing,
    /// All of it is there, or never will be.
    Prefaulted(Result<(), String>),
    /// The leader has been told why this worker ends.
    Failed(String),
    Mapped(Registering, Box<Result<EngineSide, (ErrorCode, String)>>),
    /// Memory that is not copied: its group, the bytes of a page, and why.
    Understood(Registering, Result<(GroupId, u64, String), String>),
    /// So many bytes of the depot are pinned for the GPU by now.
    Pinned(u64),
    /// The GPU that a rank named is ready, or cannot be used.
    Gpu(Result<Arc<Gpu>, Refusal>),
    /// A while ago an engine left, and the GPU had been asked for so many times.
    GpuIdle(u64),
    /// The GPU does not work for this process any more.
    GpuLost(CudaError),
    /// A GPU's memory is held by copies though its engine is gone.
    StillHeld,
    /// What engines announced is written by now.
    Written(Vec<Announced>),
    Ended(Vec<EndedCopy>),
    /// The next slice of what a reset strikes out.
    Strike,
    Tick,
}

/// A rank that is connected.
struct RankPeer {
    /// The engine that it named in its hello.
    engine: EngineId,
    holder: Holder<Process>,
}

impl From<Vec<EndedCopy>> for WorkerMessage {
    fn from(copies: Vec<EndedCopy>) -> Self {
        Self::Ended(copies)
    }
}

impl TryFrom<WorkerMessage> for Vec<EndedCopy> {
    type Error = ();

    fn try_from(message: WorkerMessage) -> Result<Self, ()> {
        match message {
            WorkerMessage::Ended(copies) => Ok(copies),
            _ => Err(()),
        }
    }
}

pub(super) struct WorkerActor;

pub(super) struct State {
    feeder: Feeder,
    worker: WorkerId,
    sharding: Sharding,
    core: Worker,
    clock: Clock,
    replier: Replier,
    fds: Arc<FdReceiver>,
    leader: Client,
    /// The connection to the leader over which it was found.
    link: LinkId,
    /// What the leader was asked over that connection, and which attach each question says; at most
    /// [`ATTACHING_MAX`].
    attaching: BTreeMap<RequestId, AttachId>,
    transfer: ActorRef<TransferMessage>,
    progress: Arc<Progress>,
    /// When the log said last how far the depot is.
    logged: Time,
    teller: Teller,
    depot: Option<Arc<Depot>>,
    prefaulted: bool,
    mapped: Option<Mapped>,
    /// Memory that is being closed, of which engine, until it is.
    closing: Vec<(EngineId, LifelineEnd)>,
    /// Ranks whose memory is being opened, and how often.
    opening: HashMap<PeerId, u32>,
    /// Ranks that have taken their memory back.
    unregistered: HashSet<PeerId>,
    /// Whether the log says that an engine leaves memory unproven.
    told_of_proofs: bool,
    gpu: GpuState,
    gpu_copy: GpuCopy,
    gpu_idle: std::time::Duration,
    /// How often ranks have asked for a GPU.
    gpu_uses: u64,
    /// Of this worker, among all that may share a depot.
    number: usize,
    /// Ranks that are connected.
    ranks: HashMap<PeerId, RankPeer>,
    /// Why the leader turned this worker away, last.
    turned_away: Option<Failure>,
    /// Ranks that wait until nothing is copied for what they abandoned, by the number that the core was given.
    abandoning: HashMap<u64, (PeerId, RequestId)>,
    next_ask: u64,
    /// The order that is being carried out.
    order: RequestId,
    strikes: Strikes,
    timer: Option<JoinHandle<Result<(), ractor::MessagingErr<WorkerMessage>>>>,
    armed_at: Option<Time>,
    effects: Vec<WorkerEffect>,
}

impl Actor for WorkerActor {
    type Msg = WorkerMessage;
    type State = State;
    type Arguments = WorkerArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<WorkerMessage>,
        arguments: WorkerArguments,
    ) -> Result<State, ActorProcessingErr> {
        let WorkerArguments {
            worker,
            sharding,
            server,
            fds,
            leader,
            incoming,
            depot,
            copy_threads,
            gpu_copy,
            gpu_idle,
        } = arguments;
        let number = depot.gpu;
        let replier = server.replier();
        let progress = Arc::new(Progress::default());
        let transfer = TransferArguments {
            copy_threads,
            ended: myself.get_derived(),
        };
        let cell = myself.get_cell();
        let (transfer, _) =
            Actor::spawn_linked(None, TransferActor, transfer, cell.clone()).await?;
        let pool = PoolArguments {
            settings: depot,
            progress: Arc::clone(&progress),
            worker: myself.clone(),
        };
        Actor::spawn_linked(None, PoolActor, pool, cell).await?;
        let ranks = myself.clone();
        let feeder = Feeder::start(server, move |batch| {
            let message = batch.map_or(WorkerMessage::Deaf("the listener"), WorkerMessage::Ranks);
            ranks.cast(message).is_ok()
        });
        let teller = Teller::start(leader.clone(), myself.clone());
        tokio::spawn(feed_leader(incoming, myself));
        Ok(State {
            feeder,
            worker,
            sharding,
            core: Worker::new(WorkerSettings::new(RUNNING_COPIES_MAX)),
            clock: Clock::start(),
            replier,
            fds: Arc::new(fds),
            leader,
            link: LinkId::default(),
            attaching: BTreeMap::new(),
            transfer,
            progress,
            logged: Time(0),
            teller,
            depot: None,
            prefaulted: false,
            mapped: None,
            closing: Vec::new(),
            opening: HashMap::new(),
            unregistered: HashSet::new(),
            told_of_proofs: false,
            gpu: GpuState::default(),
            gpu_copy,
            gpu_idle: gpu_idle.unwrap_or(IDLE_LIMIT),
            gpu_uses: 0,
            number,
            ranks: HashMap::new(),
            turned_away: None,
            abandoning: HashMap::new(),
            next_ask: 0,
            order: RequestId(0),
            strikes: Strikes::default(),
            timer: None,
            armed_at: None,
            effects: Vec::new(),
        })
    }

    async fn post_stop(
        &self,
        _myself: ActorRef<WorkerMessage>,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        state.feeder.stop().await;
        if let Err(error) = state.transfer.stop_and_wait(None, None).await {
            tracing::debug!(%error, "the copies had ended");
        }
        Ok(())
    }

    async fn handle(
        &self,
        myself: ActorRef<WorkerMessage>,
        message: WorkerMessage,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            WorkerMessage::Ranks(batch) => {
                for event in batch.item {
                    state.rank_event(event, &myself)?;
                }
            }
            WorkerMessage::Leader(incoming) => state.leader_says(incoming.item, &myself)?,
            WorkerMessage::Deaf(what) => return Err(format!("{what} has ended").into()),
            WorkerMessage::Depot(depot) => {
                state.depot = Some(depot);
                state.step(WorkerEvent::DepotReady, &myself)?;
            }
            WorkerMessage::Prefaulted(Ok(())) => {
                let bytes = state.depot.as_ref().map(|depot| depot.bytes());
                tracing::info!(worker = %state.worker, bytes, "host memory ready");
                state.prefaulted = true;
                state.teller.tell(state.progress.bytes());
            }
            WorkerMessage::Preparing => {
                let now = state.clock.now();
                if state.logged.until(now) >= LOG_EVERY {
                    state.logged = now;
                    tracing::info!(worker = %state.worker, "{}", state.progress.line());
                }
                state.teller.tell(state.progress.bytes());
            }
            WorkerMessage::Prefaulted(Err(why)) => {
                tracing::error!(worker = %state.worker, why, "no host memory");
                state.teller.give_up(why);
            }
            WorkerMessage::Failed(why) => return Err(why.into()),
            WorkerMessage::Mapped(who, memory) => state.mapped(who, *memory, &myself)?,
            WorkerMessage::Understood(who, answer) => state.understood(&who, answer),
            WorkerMessage::Pinned(bytes) => state.pinned(bytes),
            WorkerMessage::Gpu(gpu) => state.gpu_started(gpu, &myself),
            WorkerMessage::GpuIdle(uses) => state.gpu_idle(uses),
            WorkerMessage::GpuLost(error) => state.gpu_lost(error),
            WorkerMessage::StillHeld => {
                let why = "copies do not let go a GPU's memory that its engine has left".to_owned();
                tracing::error!(worker = %state.worker, why, "this worker ends");
                state.teller.give_up(why);
            }
            WorkerMessage::Written(announced) => {
                for Announced { engine, through } in announced {
                    state.step(WorkerEvent::Written { engine, through }, &myself)?;
                }
            }
            WorkerMessage::Ended(copies) => {
                state.step(WorkerEvent::CopiesEnded(copies), &myself)?;
            }
            WorkerMessage::Strike => state.strike_on(&myself)?,
            WorkerMessage::Tick => {
                state.armed_at = None;
                state.step(WorkerEvent::Tick, &myself)?;
            }
        }
        state.arm(&myself);
        Ok(())
    }
}

async fn feed_leader(mut incoming: mpsc::Receiver<Incoming>, actor: ActorRef<WorkerMessage>) {
    let credits = Credits::new();
    while let Some(item) = incoming.recv().await {
        let Some(item) = credits.attach(item).await else {
            break;
        };
        if actor.cast(WorkerMessage::Leader(item)).is_err() {
            return;
        }
    }
    if actor
        .cast(WorkerMessage::Deaf("the conversation with the leader"))
        .is_err()
    {
        tracing::debug!("the worker has stopped");
    }
}

type Handled = Result<(), ActorProcessingErr>;

impl State {
    fn rank_event(&mut self, event: ServerEvent, myself: &ActorRef<WorkerMessage>) -> Handled {
        match event {
            ServerEvent::Opened { peer, hello, pid } => {
                let engine = EngineId(hello.engine);
                let holder = Holder::new(&mut self.replier, peer, pid);
                self.ranks.insert(peer, RankPeer { engine, holder });
                Ok(())
            }
            ServerEvent::Closed { peer } => self.rank_gone(peer, myself),
            ServerEvent::Message { peer, envelope } => {
                self.rank_asks(peer, envelope.correlation, envelope.message, myself)
            }
        }
    }

    fn rank_asks(
        &mut self,
        peer: PeerId,
        correlation: RequestId,
        message: Message,
        myself: &ActorRef<WorkerMessage>,
    ) -> Handled {
        match message {
            Message::Register(register) => {
                self.register(peer, correlation, register, myself);
                Ok(())
            }
            Message::Abandon(abandon) => self.abandon(peer, correlation, &abandon, myself),
            Message::Written(written) => {
                let mapped = self.mapped.as_ref().filter(|mapped| mapped.peer == peer);
                let Some(mapped) = mapped else {
                    let text = "register your memory first".to_owned();
                    self.refuse(peer, correlation, ErrorCode::Invalid, text);
                    return Ok(());
                };
                let (engine, through) = (mapped.engine, RequestId(written.through));
                if written.timeline {
                    let announced = Announced { engine, through };
                    let answer = match Self::announced(&mapped.memory, announced) {
                        true => Message::WrittenAnswer(Empty {}),
                        false => Message::Error(ErrorBody::new(ErrorCode::Invalid, NO_TIMELINE)),
                    };
                    self.replier.reply(peer, correlation, answer);
                    return Ok(());
                }
                Self::said(&mapped.memory, through);
                self.replier
                    .reply(peer, correlation, Message::WrittenAnswer(Empty {}));
                self.step(WorkerEvent::Written { engine, through }, myself)
            }
            Message::Unregister(_) => self.unregister(peer, correlation, myself),
            other => {
                let text = format!("{} is not for a worker to answer", other.kind().name());
                self.refuse(peer, correlation, ErrorCode::UnknownKind, text);
                Ok(())
            }
        }
    }

    /// Also for an engine that has not registered here: a worker that took over from a dead one copies nothing for it, and
    /// says so.
    fn abandon(
        &mut self,
        peer: PeerId,
        correlation: RequestId,
        abandon: &Abandon,
        myself: &ActorRef<WorkerMessage>,
    ) -> Handled {
        let mapped = self.mapped.as_ref().filter(|mapped| mapped.peer == peer);
        let engine = mapped.map(|mapped| mapped.engine);
        let named = self.ranks.get(&peer).map(|rank| rank.engine);
        let Some(engine) = engine.or(named) else {
            return Ok(());
        };
        if let Some(error) = self.registered_by_another(peer, engine) {
            self.replier.refuse(peer, correlation, error);
            return Ok(());
        }
        self.next_ask += 1;
        let ask = self.next_ask;
        self.abandoning.insert(ask, (peer, correlation));
        let event = WorkerEvent::Abandon {
            engine,
            ask,
            requests: abandon.requests.iter().copied().map(RequestId).collect(),
        };
        self.step(event, myself)
    }

    fn rank_gone(&mut self, peer: PeerId, myself: &ActorRef<WorkerMessage>) -> Handled {
        self.ranks.remove(&peer);
        self.unregistered.remove(&peer);
        self.opening.remove(&peer);
        self.abandoning.retain(|_, (waiting, _)| *waiting != peer);
        let gone = self.mapped.take_if(|mapped| mapped.peer == peer);
        match gone {
            Some(mapped) => {
                let stepped = self.step(WorkerEvent::MemoryGone(mapped.engine), myself);
                self.close(mapped.engine, mapped.memory, myself);
                stepped
            }
            None => Ok(()),
        }
    }

    fn leader_says(&mut self, incoming: Incoming, myself: &ActorRef<WorkerMessage>) -> Handled {
        match incoming {
            Incoming::Welcomed { epoch, link, .. } => {
                self.link = link;
                self.attaching.clear();
                self.teller.tell(self.progress.bytes());
                self.step(WorkerEvent::LeaderFound(epoch), myself)
            }
            Incoming::Lost => {
                self.strikes.clear();
                self.step(WorkerEvent::LeaderLost, myself)
            }
            Incoming::Request { link, envelope } if link == self.link => {
                self.ordered(*envelope, myself)
            }
            Incoming::Request { link, .. } => {
                tracing::debug!(?link, "an order of a connection that is gone");
                Ok(())
            }
            Incoming::Answered { id, answer } => match self.attaching.remove(&id) {
                Some(attach) => self.admitted(attach, *answer, myself),
                None => Ok(()),
            },
        }
    }

    fn ordered(&mut self, envelope: Envelope, myself: &ActorRef<WorkerMessage>) -> Handled {
        let Envelope {
            correlation,
            deadline_ms,
            epoch,
            message,
            ..
        } = envelope;
        self.order = correlation;
        let batch = BatchId(correlation.0);
        let event = match message {
            Message::Transfer(transfer) if !transfer.copies.is_empty() => WorkerEvent::Ordered {
                epoch,
                batch,
                copies: transfer
                    .into_copies(epoch, self.clock.after_ms(deadline_ms))
                    .collect(),
            },
            Message::Cancel(cancel) => WorkerEvent::Cancel {
                epoch,
                batch,
                ops: cancel.ops.into_iter().map(OpId).collect(),
            },
            Message::ReadInventory(read) => {
                return self.read_inventory(correlation, epoch, read);
            }
            Message::Strike(strike) => match strike.scope() {
                Ok(scope) => WorkerEvent::Strike {
                    epoch,
                    id: ResetId(strike.reset),
                    scope,
                    through: Generation(strike.through),
                    deadline: self.clock.after_ms(deadline_ms),
                },
                Err(error) => {
                    self.answer(correlation, Message::Error(error));
                    return Ok(());
                }
            },
            other => {
                let text = format!("{} without anything to do", other.kind().name());
                let error = ErrorBody::new(ErrorCode::Invalid, text);
                self.answer(correlation, Message::Error(error));
                return Ok(());
            }
        };
        self.step(event, myself)
    }

    fn step(&mut self, event: WorkerEvent, myself: &ActorRef<WorkerMessage>) -> Handled {
        let mut effects = std::mem::take(&mut self.effects);
        self.core.step(self.clock.now(), event, &mut effects);
        for effect in effects.drain(..) {
            match effect {
                WorkerEffect::Attach { attach, .. } => self.attach(attach),
                WorkerEffect::Registered { engine, admitted } => {
                    self.registered(engine, admitted, myself);
                }
                WorkerEffect::Start(copies) => match (&self.mapped, &self.depot) {
                    (Some(mapped), Some(depot)) => {
                        let (memory, depot) = (mapped.memory.clone(), Arc::clone(depot));
                        self.transfer.cast(TransferMessage::Start {
                            copies,
                            memory,
                            depot,
                        })?;
                    }
                    _ => return Err("copies started without memory".into()),
                },
                WorkerEffect::Stop(op) => self.transfer.cast(TransferMessage::Stop(op))?,
                WorkerEffect::Report { batch, copies } => self.report(batch, &copies),
                WorkerEffect::Abandoned { ask } => {
                    if let Some((peer, correlation)) = self.abandoning.remove(&ask) {
                        self.replier
                            .reply(peer, correlation, Message::AbandonAnswer(Empty {}));
                    }
                }
                WorkerEffect::Await { engine, through } => {
                    let mapped = self.mapped.as_ref();
                    if let Some(mapped) = mapped.filter(|mapped| mapped.engine == engine)
                        && !Self::announced(&mapped.memory, Announced { engine, through })
                    {
                        tracing::trace!(worker = %self.worker, "the rank says itself what it has written");
                    }
                }
                WorkerEffect::StrikeOut(run) => {
                    self.inventory(|depot, page_bytes| depot.strike_out(page_bytes, run))?;
                }
                WorkerEffect::List(record) => {
                    // Pages that are not listed are served all the same; only the leader's successor does not find them.
                    let listed =
                        self.inventory(|depot, page_bytes| depot.list(page_bytes, &record));
                    if let Err(error) = listed {
                        tracing::error!(worker = %self.worker, %error, "stored pages are not listed");
                    }
                }
                WorkerEffect::Strike {
                    id,
                    scope,
                    through,
                    deadline,
                } => {
                    let strike = Strike::new(id, scope, through, self.order, deadline);
                    self.strike(strike, myself)?;
                }
                WorkerEffect::Refuse(refusal) => {
                    self.refuse_order(self.order, refusal);
                }
                WorkerEffect::Invalid { op, problem } => {
                    tracing::error!(worker = %self.worker, %op, problem, "copy refused");
                }
                WorkerEffect::GiveUp => return Err("a copy does not stop".into()),
            }
        }
        self.effects = effects;
        Ok(())
    }

    /// Writes the inventory. A depot that holds no pages lists none.
    fn inventory(&self, write: impl FnOnce(&Depot, u64) -> Result<(), BufferError>) -> Handled {
        let Some(depot) = &self.depot else {
            return Ok(());
        };
        if let Some(page_bytes) = depot.page_bytes()? {
            write(depot, page_bytes)?;
        }
        Ok(())
    }

    /// A part of what the depot lists, as pages of this size.
    fn read_inventory(
        &mut self,
        correlation: RequestId,
        epoch: Epoch,
        read: ReadInventory,
    ) -> Handled {
        if let Err(refusal) = self.core.take_reading(epoch, read.reading) {
            self.refuse_order(correlation, refusal);
            return Ok(());
        }
        let Some(depot) = self
            .depot
            .as_ref()
            .filter(|depot| depot.id().0.to_be_bytes() == read.depot)
        else {
            let error = ErrorBody::new(ErrorCode::Invalid, "this worker has another depot");
            self.answer(correlation, Message::Error(error));
            return Ok(());
        };
        let mapped = self.mapped.as_ref().map(|mapped| mapped.memory.geometry());
        if let Some(geometry) = mapped.filter(|geometry| geometry.page_bytes != read.page_bytes) {
            let text = format!(
                "page_bytes is {}, and the engine's pages have {}: read the inventory of the memory that is attached",
                read.page_bytes, geometry.page_bytes
            );
            let error = ErrorBody::new(ErrorCode::Invalid, text);
            self.answer(correlation, Message::Error(error));
            return Ok(());
        }
        if !depot.hold_pages_for(read.page_bytes, (epoch, read.reading))? {
            let text = "a later reading of this depot has begun";
            let error = ErrorBody::new(ErrorCode::Invalid, text);
            self.answer(correlation, Message::Error(error));
            return Ok(());
        }
        let pages = PAGE_RECORDS_MAX as u32;
        let records = depot
            .hold_pages_of(read.page_bytes)
            .and_then(|()| depot.read_inventory(read.page_bytes, read.from, pages));
        let records = match records {
            Ok(records) => records,
            Err(error) => {
                tracing::error!(worker = %self.worker, %error, "the inventory cannot be read");
                let error = ErrorBody::new(ErrorCode::Internal, error.to_string());
                self.answer(correlation, Message::Error(error));
                return Ok(());
            }
        };
        let end = read.from.saturating_add(pages);
        let next = (end < depot.arena_pages(read.page_bytes)).then_some(end);
        let part = Inventory::new(&read, next, &records);
        self.answer(correlation, Message::Inventory(part));
        Ok(())
    }

    fn refuse_order(&self, correlation: RequestId, refusal: OrderRefusal) {
        let code = match refusal {
            OrderRefusal::StaleEpoch { .. } => ErrorCode::StaleEpoch,
            OrderRefusal::NotAttached => ErrorCode::NotReady,
            OrderRefusal::OldReading { .. } => ErrorCode::Invalid,
        };
        tracing::warn!(worker = %self.worker, %refusal, "order refused");
        let error = ErrorBody::new(code, refusal.to_string());
        self.answer(correlation, Message::Error(error));
    }

    fn report(&self, batch: BatchId, copies: &[EndedCopy]) {
        let body = Ended {
            rank: self.worker.rank.0,
            copies: copies.iter().map(CopyResult::from).collect(),
        };
        self.answer(RequestId(batch.0), Message::Ended(body));
    }

    /// Answers an order of the leader that was found last, over the connection over which it was found.
    fn answer(&self, correlation: RequestId, message: Message) {
        self.leader.reply(self.link, correlation, message);
    }

    fn refuse(&self, peer: PeerId, correlation: RequestId, code: ErrorCode, text: String) {
        self.replier
            .refuse(peer, correlation, ErrorBody::new(code, text));
    }

    /// Sets the timer for the next timeout, unless it fires before that anyway: a tick that comes early finds nothing to do
    /// and sets it anew. Requests move timeouts all the time, the first of them rarely.
    fn arm(&mut self, myself: &ActorRef<WorkerMessage>) {
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
        self.timer = Some(myself.send_after(left, || WorkerMessage::Tick));
    }
}
