//! The worker's shell: a leader and engine ranks outside, the core inside, copies on threads of their own.

use std::sync::Arc;

use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::actors::clock::Clock;
use crate::actors::mailbox::{Credited, Credits, Feeder};
use crate::actors::pool::{PoolActor, PoolArguments, PoolSettings, Progress};
use crate::actors::transfer::{
    RUNNING_COPIES_MAX, TransferActor, TransferArguments, TransferMessage,
};
use crate::core::{BatchId, Worker, WorkerEffect, WorkerEvent};
use crate::memory::{Depot, RegisteredMemory};
use crate::protocol::{
    Attach, CopyResult, Empty, Ended, Envelope, ErrorBody, ErrorCode, Message, Register, Registered,
};
use crate::transport::{
    Client, Failure, FdReceiver, Incoming, PeerId, Replier, Server, ServerEvent,
};
use crate::types::{EndedCopy, EngineId, Epoch, OpId, Rank, RequestId, Time};

/// How long the leader may take to admit a rank.
const ATTACH_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(10);

/// What a worker needs to start.
pub struct WorkerArguments {
    /// Which rank it serves.
    pub rank: Rank,
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
}

pub(super) enum WorkerMessage {
    Ranks(Credited<Vec<ServerEvent>>),
    Leader(Credited<Incoming>),
    /// A feeding task has ended.
    Deaf(&'static str),
    Depot(Result<Arc<Depot>, String>),
    Mapped(Registering, Box<Result<RegisteredMemory, String>>),
    Admitted(Registering, Result<(), Failure>),
    Ended(Vec<EndedCopy>),
    Tick,
}

/// A rank that registers: who asked, under which id, for which engine. `asked` is empty when the worker attaches again
/// by itself.
#[derive(Debug, Clone)]
pub(super) struct Registering {
    asked: Option<(PeerId, RequestId)>,
    engine: EngineId,
}

/// Memory that was mapped and, once the leader has agreed, is used.
struct Mapped {
    engine: EngineId,
    peer: Option<PeerId>,
    memory: RegisteredMemory,
}

pub(super) struct WorkerActor;

pub(super) struct State {
    feeder: Feeder,
    rank: Rank,
    core: Worker,
    clock: Clock,
    replier: Replier,
    fds: Arc<FdReceiver>,
    leader: Client,
    leader_epoch: Option<Epoch>,
    transfer: ActorRef<TransferMessage>,
    progress: Arc<Progress>,
    depot: Option<Arc<Depot>>,
    /// The epoch in which this depot was last attached: only there does the leader know what it holds.
    attached_in: Option<Epoch>,
    mapped: Option<Mapped>,
    /// An attach that waits until no copy is under way.
    attach_next: Option<Registering>,
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
            rank,
            server,
            fds,
            leader,
            incoming,
            depot,
            copy_threads,
        } = arguments;
        let replier = server.replier();
        let progress = Arc::new(Progress::default());
        let transfer = TransferArguments {
            copy_threads,
            worker: myself.clone(),
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
        tokio::spawn(feed_leader(incoming, myself));
        Ok(State {
            feeder,
            rank,
            core: Worker::new(RUNNING_COPIES_MAX),
            clock: Clock::start(),
            replier,
            fds: Arc::new(fds),
            leader,
            leader_epoch: None,
            transfer,
            progress,
            depot: None,
            attached_in: None,
            mapped: None,
            attach_next: None,
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
            WorkerMessage::Leader(incoming) => state.leader_says(incoming.item)?,
            WorkerMessage::Deaf(what) => return Err(format!("{what} has ended").into()),
            WorkerMessage::Depot(Ok(depot)) => {
                tracing::info!(
                    rank = state.rank.0,
                    bytes = depot.bytes(),
                    "host memory ready"
                );
                state.depot = Some(depot);
            }
            WorkerMessage::Depot(Err(why)) => return Err(why.into()),
            WorkerMessage::Mapped(who, memory) => match *memory {
                Ok(memory) => state.mapped(who, memory)?,
                Err(why) => state.refuse(&who, ErrorCode::Invalid, why),
            },
            WorkerMessage::Admitted(who, verdict) => state.admitted(&who, verdict)?,
            WorkerMessage::Ended(copies) => state.step(WorkerEvent::CopiesEnded(copies))?,
            WorkerMessage::Tick => {
                state.armed_at = None;
                state.step(WorkerEvent::Tick)?;
            }
        }
        state.attach_if_idle(&myself);
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
            ServerEvent::Opened { .. } => Ok(()),
            ServerEvent::Closed { peer } => self.rank_gone(peer),
            ServerEvent::Message { peer, envelope } => {
                let correlation = envelope.correlation;
                match envelope.message {
                    Message::Register(register) => {
                        self.register(peer, correlation, register, myself);
                        Ok(())
                    }
                    Message::Written(written) => {
                        let engine = self
                            .mapped
                            .as_ref()
                            .filter(|mapped| mapped.peer == Some(peer));
                        let Some(engine) = engine.map(|mapped| mapped.engine) else {
                            let who = Registering {
                                asked: Some((peer, correlation)),
                                engine: EngineId::default(),
                            };
                            self.refuse(
                                &who,
                                ErrorCode::Invalid,
                                "register your memory first".to_owned(),
                            );
                            return Ok(());
                        };
                        let through = RequestId(written.through);
                        self.replier
                            .reply(peer, correlation, Message::WrittenAnswer(Empty {}));
                        self.step(WorkerEvent::Written { engine, through })
                    }
                    other => {
                        let text = format!("{} is not for a worker to answer", other.kind().name());
                        let error = ErrorBody::new(ErrorCode::UnknownKind, text);
                        self.replier.refuse(peer, correlation, error);
                        Ok(())
                    }
                }
            }
        }
    }

    fn rank_gone(&mut self, peer: PeerId) -> Handled {
        let gone = self.mapped.take_if(|mapped| mapped.peer == Some(peer));
        match gone {
            Some(mapped) => self.step(WorkerEvent::MemoryGone(mapped.engine)),
            None => Ok(()),
        }
    }

    /// Checks what can be checked at once; opens and maps the memory on a thread of its own.
    fn register(
        &mut self,
        peer: PeerId,
        correlation: RequestId,
        register: Register,
        myself: &ActorRef<WorkerMessage>,
    ) {
        let engine = EngineId(register.engine);
        let who = Registering {
            asked: Some((peer, correlation)),
            engine,
        };
        let registration = register.registration;
        if registration.rank != self.rank {
            let text = format!(
                "registration.rank is {}, this worker serves {}: connect to the worker of your rank",
                registration.rank.0, self.rank
            );
            return self.refuse(&who, ErrorCode::Invalid, text);
        }
        if self.depot.is_none() {
            return self.refuse(&who, ErrorCode::NotReady, self.progress.line());
        }
        let fds = Arc::clone(&self.fds);
        let myself = myself.clone();
        tokio::task::spawn_blocking(move || {
            let memory = RegisteredMemory::open(&registration, |ticket| fds.take(ticket));
            let memory = Box::new(memory.map_err(|error| error.to_string()));
            if myself.cast(WorkerMessage::Mapped(who, memory)).is_err() {
                tracing::debug!("the worker has stopped");
            }
        });
    }

    /// The new memory takes the place of the old one; the leader is asked once nothing is under way any more.
    fn mapped(&mut self, who: Registering, memory: RegisteredMemory) -> Handled {
        let peer = who.asked.map(|(peer, _)| peer);
        let before = self.mapped.replace(Mapped {
            engine: who.engine,
            peer,
            memory,
        });
        self.attach_next = Some(who);
        match before {
            Some(before) => self.step(WorkerEvent::MemoryGone(before.engine)),
            None => Ok(()),
        }
    }

    fn attach_if_idle(&mut self, myself: &ActorRef<WorkerMessage>) {
        if self.core.open_copies() > 0 {
            return;
        }
        let (Some(epoch), Some(depot), Some(mapped)) =
            (self.leader_epoch, &self.depot, &self.mapped)
        else {
            return;
        };
        let Some(who) = self.attach_next.take() else {
            return;
        };
        let attach = Attach {
            rank: self.rank.0,
            geometry: mapped.memory.geometry.clone(),
            arena_pages: depot.arena_pages(mapped.memory.geometry.page_bytes),
            keeps_pages: self.attached_in == Some(epoch),
        };
        let (leader, myself) = (self.leader.clone(), myself.clone());
        tokio::spawn(async move {
            let answer = leader.ask(Message::Attach(attach), ATTACH_TIMEOUT).await;
            let verdict = answer.map(|_| ());
            if myself.cast(WorkerMessage::Admitted(who, verdict)).is_err() {
                tracing::debug!("the worker has stopped");
            }
        });
    }

    fn admitted(&mut self, who: &Registering, verdict: Result<(), Failure>) -> Handled {
        let current = self
            .mapped
            .as_ref()
            .filter(|mapped| mapped.engine == who.engine);
        let Some(mapped) = current else {
            self.refuse(
                who,
                ErrorCode::Invalid,
                "another engine registered meanwhile".to_owned(),
            );
            return Ok(());
        };
        match verdict {
            Ok(()) => {
                self.attached_in = self.leader_epoch;
                let page_bytes = mapped.memory.geometry.page_bytes;
                let arena_pages = self
                    .depot
                    .as_ref()
                    .map_or(0, |depot| depot.arena_pages(page_bytes));
                let engine = mapped.engine;
                if let Some((peer, correlation)) = who.asked {
                    let body = Registered {
                        arena_pages,
                        page_bytes,
                    };
                    self.replier
                        .reply(peer, correlation, Message::Registered(body));
                }
                tracing::info!(
                    rank = self.rank.0,
                    arena_pages,
                    page_bytes,
                    "engine memory registered"
                );
                self.step(WorkerEvent::MemoryReady(engine))
            }
            Err(failure) => {
                if who.asked.is_some() {
                    self.mapped = None;
                }
                self.refuse(who, failure.code, failure.message);
                Ok(())
            }
        }
    }

    fn leader_says(&mut self, incoming: Incoming) -> Handled {
        match incoming {
            Incoming::Welcomed(epoch) => {
                self.leader_epoch = Some(epoch);
                if let Some(mapped) = &self.mapped
                    && self.attach_next.is_none()
                {
                    self.attach_next = Some(Registering {
                        asked: None,
                        engine: mapped.engine,
                    });
                }
                self.step(WorkerEvent::Leader(epoch))
            }
            Incoming::Lost => {
                self.leader_epoch = None;
                self.step(WorkerEvent::LeaderLost)
            }
            Incoming::Request(envelope) => self.ordered(*envelope),
        }
    }

    fn ordered(&mut self, envelope: Envelope) -> Handled {
        let Envelope {
            correlation,
            deadline_ms,
            epoch,
            message,
            ..
        } = envelope;
        if self.leader_epoch != Some(epoch) {
            let error = ErrorBody::new(ErrorCode::StaleEpoch, format!("{epoch} is over"));
            self.leader.reply(correlation, Message::Error(error));
            return Ok(());
        }
        match message {
            Message::Transfer(transfer) if !transfer.copies.is_empty() => {
                let deadline = self.clock.after_ms(deadline_ms);
                let copies = transfer.into_copies(deadline).collect();
                self.step(WorkerEvent::Ordered {
                    epoch,
                    batch: BatchId(correlation.0),
                    copies,
                })
            }
            Message::Cancel(cancel) => {
                self.leader
                    .reply(correlation, Message::CancelAnswer(Empty {}));
                self.step(WorkerEvent::Cancel(
                    cancel.ops.into_iter().map(OpId).collect(),
                ))
            }
            other => {
                let text = format!("{} without anything to do", other.kind().name());
                let error = ErrorBody::new(ErrorCode::Invalid, text);
                self.leader.reply(correlation, Message::Error(error));
                Ok(())
            }
        }
    }

    fn step(&mut self, event: WorkerEvent) -> Handled {
        let mut effects = std::mem::take(&mut self.effects);
        self.core.step(self.clock.now(), event, &mut effects);
        for effect in effects.drain(..) {
            match effect {
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
            }
        }
        self.effects = effects;
        Ok(())
    }

    fn report(&self, batch: BatchId, copies: &[EndedCopy]) {
        let results = copies.iter().map(|copy| CopyResult {
            op: copy.op.0,
            whole: copy.whole,
            bytes: copy.bytes,
            busy_us: copy.busy_us,
        });
        let body = Ended {
            rank: self.rank.0,
            copies: results.collect(),
        };
        self.leader.reply(RequestId(batch.0), Message::Ended(body));
    }

    fn refuse(&self, who: &Registering, code: ErrorCode, text: String) {
        match who.asked {
            Some((peer, correlation)) => {
                self.replier
                    .refuse(peer, correlation, ErrorBody::new(code, text));
            }
            None => tracing::error!(
                rank = self.rank.0,
                text,
                "the leader turned this worker away"
            ),
        }
    }

    /// Sets the timer for the next timeout, if that is another one than before.
    fn arm(&mut self, myself: &ActorRef<WorkerMessage>) {
        let next = self.core.next_timeout();
        if self.armed_at == next {
            return;
        }
        self.armed_at = next;
        if let Some(timer) = self.timer.take() {
            timer.abort();
        }
        if let Some(at) = next {
            let left = self.clock.now().until(at);
            self.timer = Some(myself.send_after(left, || WorkerMessage::Tick));
        }
    }
}
