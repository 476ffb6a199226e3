//! The worker's actor: runs a [`WorkerShell`] on sockets, threads and timers.

mod gpu;
mod gpu_state;
mod host;
mod registration;

use std::num::NonZeroU64;
use std::sync::Arc;

use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::SetLog;
use crate::depot::{DepotActor, DepotArguments, DepotProgress, DepotReport, DepotSettings};
use crate::disk::{Disk, DiskReport, DiskSettings};
use crate::gpu::{EngineSide, Gpu};
use crate::mailbox::{Credited, Credits, MailboxPump};
use crate::probe::PROBE;
use crate::processes::Process;
use crate::readiness::ReadinessReporter;
use crate::transfer::{
    CopyThreads, RUNNING_COPIES_MAX, TransferActor, TransferArguments, TransferMessage,
};
use kvferry_core::WorkerSettings;
use kvferry_cuda::{Announced, CudaError};
use kvferry_memory::WaitingLoads;
use kvferry_protocol::{ErrorBody, ErrorCode, Message, TierFlushed};
use kvferry_shell::{Fatal, Registering, WorkerHost, WorkerShell};
use kvferry_transport::{
    Client, Clock, FdReceiver, Incoming, Server, ServerEvent, ServerEvents, SharedLogLimit,
};
use kvferry_types::{Edge, EndedCopy, GpuCopy, Sharding, Time, WorkerId};

/// Pause between two log lines about the progress of the depot.
const LOG_EVERY: std::time::Duration = std::time::Duration::from_secs(3);

static UNPROVEN: SharedLogLimit = SharedLogLimit::new();

use gpu::IDLE_LIMIT;
use gpu_state::{GpuRefusal, GpuState};
use host::Host;

/// Arguments of a worker.
pub struct WorkerArguments {
    /// The replica and rank that the worker serves.
    pub worker: WorkerId,
    /// The ranks that hold the same KV.
    pub sharding: Sharding,
    /// The socket to which the engine's rank connects.
    pub server: Server,
    /// The socket over which the engine's rank passes file descriptors.
    pub fds: FdReceiver,
    /// The connection to the leader.
    pub leader: Client,
    /// Events of that connection: orders of the leader, answers, reconnects.
    pub incoming: mpsc::Receiver<Incoming>,
    /// Settings of the worker's depot.
    pub depot: DepotSettings,
    /// The disk below host memory.
    pub disk: Option<DiskSettings>,
    /// Threads that share one large copy.
    pub copy_threads: usize,
    /// Most bytes per second that are copied out of an engine's memory, on average; `None` for no limit.
    pub store_bytes_per_s: Option<NonZeroU64>,
    /// How copies are submitted to a GPU's driver.
    pub gpu_copy: GpuCopy,
    /// How long a GPU is kept after its last engine has left; `None` for 300 s.
    pub gpu_idle: Option<std::time::Duration>,
    /// Changes the filter of the log; `None` where operators may not.
    pub set_log: Option<SetLog>,
}

pub(super) enum WorkerMessage {
    Ranks(Credited<ServerEvents>),
    Leader(Credited<Incoming>),
    /// A task that feeds the mailbox has ended.
    InputClosed(&'static str),
    /// A step of the preparation of the depot.
    Depot(DepotReport),
    Disk(DiskReport),
    /// The leader has received why this worker ends.
    Failed(String),
    Mapped(Registering, Box<Result<EngineSide, ErrorBody>>),
    /// The result of a check of memory that is not copied: its group, and the bytes of one page.
    Checked(Registering, Result<u64, ErrorBody>),
    /// Bytes of the depot that are pinned for the GPU so far.
    Pinned(u64),
    /// The GPU that a rank named is ready, or cannot be used.
    Gpu(Result<Arc<Gpu>, GpuRefusal>),
    /// An engine left some time ago, when the GPU had been requested this many times.
    GpuIdle(u64),
    /// The GPU no longer works for this process.
    GpuLost(CudaError),
    /// Copies still hold a GPU's memory although its engine is gone.
    StillHeld,
    /// Announced work that engines have written by now.
    Written(Vec<Announced>),
    Ended(Vec<EndedCopy>),
    /// Carry out the next slice of a reset.
    Invalidate,
    Tick,
}

fn cast(worker: &ActorRef<WorkerMessage>, message: WorkerMessage) {
    if worker.cast(message).is_err() {
        tracing::debug!("the worker has stopped");
    }
}

pub(super) struct WorkerActor;

pub(super) struct State {
    feeder: MailboxPump,
    transfer: ActorRef<TransferMessage>,
    shell: WorkerShell<Process, EngineSide>,
    host: Host,
    /// When the progress of the depot was last logged.
    logged: Time,
    timer: Option<JoinHandle<Result<(), ractor::MessagingErr<WorkerMessage>>>>,
    armed_at: Option<Time>,
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
            disk,
            copy_threads,
            store_bytes_per_s,
            gpu_copy,
            gpu_idle,
            set_log,
        } = arguments;
        let number = depot.gpu;
        let replier = server.replier();
        let progress = Arc::new(DepotProgress::default());
        let clock = Clock::start();
        let waiting = WaitingLoads::default();
        let copies = CopyThreads::default();
        let transfer = TransferArguments {
            copy_threads,
            waiting: waiting.clone(),
            clock,
            threads: copies.clone(),
            report: Arc::new({
                let to = myself.clone();
                move |copies| to.cast(WorkerMessage::Ended(copies)).is_ok()
            }),
        };
        let cell = myself.get_cell();
        let (transfer, _) =
            Actor::spawn_linked(None, TransferActor, transfer, cell.clone()).await?;
        let to = myself.clone();
        let depot = DepotArguments {
            settings: depot,
            progress: Arc::clone(&progress),
            report: Arc::new(move |step| cast(&to, WorkerMessage::Depot(step))),
        };
        Actor::spawn_linked(None, DepotActor, depot, cell).await?;
        let to = myself.clone();
        let disk = disk.map(|settings| {
            let report = move |report| cast(&to, WorkerMessage::Disk(report));
            Disk::start(settings, Arc::new(report))
        });
        let disk = disk.transpose()?;
        let ranks = myself.clone();
        let feeder = MailboxPump::start(server, move |batch| {
            let message = batch.map_or(
                WorkerMessage::InputClosed("the listener"),
                WorkerMessage::Ranks,
            );
            ranks.cast(message).is_ok()
        });
        let readiness = ReadinessReporter::start(leader.clone(), {
            let to = myself.clone();
            move |why| cast(&to, WorkerMessage::Failed(why))
        });
        tokio::spawn(feed_leader(incoming, myself.clone()));
        let mut settings = WorkerSettings::new(RUNNING_COPIES_MAX);
        let rate = store_bytes_per_s.map(|rate| (Edge::STORE, rate));
        settings.bytes_per_s = rate.into_iter().collect();
        Ok(State {
            feeder,
            transfer,
            shell: WorkerShell::new(worker, sharding, settings),
            host: Host {
                myself,
                worker,
                clock,
                replier,
                fds: Arc::new(fds),
                leader,
                copies,
                waiting,
                progress,
                readiness,
                depot: None,
                prefaulted: false,
                disk,
                closing: Vec::new(),
                proofs_logged: false,
                gpu: GpuState::default(),
                gpu_copy,
                gpu_idle: gpu_idle.unwrap_or(IDLE_LIMIT),
                gpu_uses: 0,
                set_log,
                probe: None,
                number,
            },
            logged: Time(0),
            timer: None,
            armed_at: None,
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
        if let Some(mut disk) = state.host.disk.take() {
            tokio::task::spawn_blocking(move || disk.end()).await?;
        }
        Ok(())
    }

    async fn handle(
        &self,
        _myself: ActorRef<WorkerMessage>,
        message: WorkerMessage,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        let State { shell, host, .. } = state;
        match message {
            WorkerMessage::Ranks(batch) => {
                for event in batch.item {
                    match event {
                        ServerEvent::Opened {
                            peer,
                            hello,
                            caller,
                        } => {
                            shell.opened(host, peer, &hello, caller);
                        }
                        ServerEvent::Closed { peer } => shell.closed(host, peer)?,
                        ServerEvent::Message { peer, envelope } => {
                            shell.message(host, peer, envelope)?;
                        }
                    }
                }
            }
            WorkerMessage::Leader(incoming) => match incoming.item {
                Incoming::Welcomed { epoch, link, .. } => {
                    host.readiness.report_bytes(host.progress.bytes());
                    shell.leader_found(host, epoch, link)?;
                }
                Incoming::Lost => shell.leader_lost(host)?,
                Incoming::Request { link, envelope } => shell.order(host, link, *envelope)?,
                Incoming::Answered { id, answer } => {
                    shell.leader_answered(host, id, answer.map_err(ErrorBody::from))?;
                }
            },
            WorkerMessage::InputClosed(what) => return Err(format!("{what} has ended").into()),
            WorkerMessage::Depot(DepotReport::Opened(depot)) => {
                host.depot = Some(depot);
                shell.depot_ready(host)?;
            }
            WorkerMessage::Depot(DepotReport::Prefaulted(Ok(()))) => {
                let bytes = host.depot.as_ref().map(|depot| depot.bytes());
                tracing::info!(worker = %host.worker, bytes, "host memory ready");
                host.prefaulted = true;
                host.readiness.report_bytes(host.progress.bytes());
            }
            WorkerMessage::Depot(DepotReport::Progress) => {
                let now = host.clock.now();
                if state.logged.until(now) >= LOG_EVERY {
                    state.logged = now;
                    tracing::info!(worker = %host.worker, "{}", host.progress.line());
                }
                host.readiness.report_bytes(host.progress.bytes());
            }
            WorkerMessage::Depot(DepotReport::Prefaulted(Err(error))) => {
                let why = error.to_string();
                tracing::error!(worker = %host.worker, why, "no host memory");
                host.readiness.report_end(why);
            }
            WorkerMessage::Disk(report) => disk_reported(shell, host, report)?,
            WorkerMessage::Failed(why) => return Err(why.into()),
            WorkerMessage::Mapped(registering, memory) => {
                let failed = memory.is_err();
                if let Err(error) = memory.as_ref() {
                    host.log_unproven(error);
                }
                shell.mapped(host, registering, *memory)?;
                if failed {
                    host.watch_gpu();
                }
            }
            WorkerMessage::Checked(registering, found) => {
                shell.checked(host, registering, found)?
            }
            WorkerMessage::Pinned(bytes) => host.pinned(bytes),
            WorkerMessage::Gpu(gpu) => {
                if let Some(why) = host.gpu_started(gpu) {
                    shell.rank_refused(host, &why);
                }
            }
            WorkerMessage::GpuIdle(uses) => host.gpu_idle(uses, shell.is_used()),
            WorkerMessage::GpuLost(error) => host.gpu_lost(error),
            WorkerMessage::StillHeld => {
                let why = "copies still hold a GPU's memory that its engine has left".to_owned();
                tracing::error!(worker = %host.worker, why, "this worker ends");
                host.readiness.report_end(why);
            }
            WorkerMessage::Written(announced) => {
                for Announced { engine, through } in announced {
                    shell.timeline_reached(host, engine, through)?;
                }
            }
            WorkerMessage::Ended(mut copies) => {
                let probe = copies.extract_if(.., |copy| copy.transfer == PROBE);
                for ended in probe.collect::<Vec<_>>() {
                    let memory = host.probe.as_ref();
                    let copied = memory.map(|memory| memory.end(&ended));
                    let none = || Err("no probe has begun".to_owned());
                    shell.probed(host, copied.unwrap_or_else(none));
                }
                if !copies.is_empty() {
                    shell.copies_ended(host, copies)?;
                }
            }
            WorkerMessage::Invalidate => shell.continue_invalidations(host)?,
            WorkerMessage::Tick => {
                state.armed_at = None;
                shell.tick(host)?;
            }
        }
        state.arm();
        Ok(())
    }
}

/// Handles a report of the disk.
fn disk_reported(
    shell: &mut WorkerShell<Process, EngineSide>,
    host: &mut Host,
    report: DiskReport,
) -> Result<(), Fatal> {
    let Some(disk) = &mut host.disk else {
        return Ok(());
    };
    // The thread reports the state regularly and after each flush: not once more at the end of every copy.
    let mut changes = !matches!(report, DiskReport::Ended(_));
    match report {
        DiskReport::Opened(key, set) => {
            if disk.opened(key, set) {
                shell.tiers_changed(host)?;
            }
        }
        DiskReport::Failed(why) => {
            if disk.failed(why) {
                shell.tiers_changed(host)?;
            }
        }
        DiskReport::OpensAnew => {
            if disk.opens_anew() {
                shell.tiers_changed(host)?;
            }
        }
        DiskReport::Grown | DiskReport::Released => shell.tiers_changed(host)?,
        DiskReport::ReadOnly(why) => disk.only_read(why),
        DiskReport::Writable => disk.writable(),
        DiskReport::Fits => disk.fits(),
        DiskReport::Status => {}
        DiskReport::Ended(end) => {
            let before = disk.is_read_only();
            let shorter = disk.ended(&end);
            if before != disk.is_read_only() {
                // Before the end of the write that failed, after which the leader orders the next one.
                host.readiness.disk(disk.status());
            }
            // The leader orders the next move with this end, into the pages that it knows by then.
            if shorter {
                shell.tiers_changed(host)?;
            }
            shell.copies_ended(host, vec![end.ended])?;
            changes = shorter;
        }
        DiskReport::Flushed(result) => {
            if let Some((link, order, flush)) = disk.flushed() {
                let flushed = result.map(|()| Message::TierFlushed(TierFlushed { flush }));
                let message = flushed
                    .unwrap_or_else(|why| Message::Error(ErrorBody::new(ErrorCode::Internal, why)));
                host.reply_to_leader(link, order, message);
            }
        }
        DiskReport::Reset(scope, through, result) => {
            disk.reset_ended(scope, through, result);
            shell.continue_invalidations(host)?;
        }
    }
    if let Some(disk) = host.disk.as_ref().filter(|_| changes) {
        host.readiness.disk(disk.status());
    }
    Ok(())
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
        .cast(WorkerMessage::InputClosed(
            "the conversation with the leader",
        ))
        .is_err()
    {
        tracing::debug!("the worker has stopped");
    }
}

impl State {
    /// Sets the timer for the next timeout, unless the current one fires earlier: an early tick does nothing but set
    /// the timer again. Requests often move timeouts, but rarely the earliest one.
    fn arm(&mut self) {
        let Some(next) = self.shell.next_timeout() else {
            return;
        };
        if self.armed_at.is_some_and(|at| at <= next) {
            return;
        }
        self.armed_at = Some(next);
        if let Some(timer) = self.timer.take() {
            timer.abort();
        }
        let left = self.host.clock.now().until(next);
        self.timer = Some(self.host.myself.send_after(left, || WorkerMessage::Tick));
    }
}
