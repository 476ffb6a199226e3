//! The session of one engine rank with its worker, for the lifetime of the engine.
//!
//! When the connection breaks, or another worker takes over, the memory is registered again. The leader refuses the
//! scheduler's requests in the meantime; nothing else is lost.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

use crate::outbox::{Outbox, RankRequest};
use kvferry_protocol::{
    Abandon, ErrorCode, FEATURE_TIMELINE, Hello, Register, Role, Unregister, Written,
};
use kvferry_transport::{
    Address, Client, ClientSettings, Failure, Incoming, Limits, LinkId, Transport,
};
use kvferry_types::{EngineId, Rank, Registration, Replica, RequestId, Timeline};

/// Time limit of one request to the worker, after which it is repeated. A registration waits for the leader.
const REQUEST_LIMIT: Duration = Duration::from_secs(30);
/// Pause after a request that failed; doubles with each failure, up to `PAUSE_MAX`.
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Longest limit of the first registration: thirty years, which the runtime's clock can add to now.
const START_LIMIT_MAX: Duration = Duration::from_secs(30 * 365 * 24 * 3600);
/// Commands that wait for the session's task; further callers wait.
const COMMANDS: usize = 1024;

/// The KV memory of one rank, as its session registers it.
pub trait SessionMemory: Send + Sync + 'static {
    /// Why the memory is not available.
    type Error: std::fmt::Display + Send;

    /// The word to which the device writes its progress. `None` when writes are complete as they return.
    fn timeline(&self) -> Option<Timeline>;

    /// Waits until all earlier writes are complete. Called on a thread that may block.
    fn finish_writes(&self) -> Result<(), Self::Error>;

    /// Writes a new nonce into the memory, hands the memory over to the worker, and describes both. The session sets
    /// [`Registration::timeline`].
    fn registration(&self) -> impl Future<Output = Result<Registration, Self::Error>> + Send;
}

/// The worker of a rank, and the identity of the rank.
#[derive(Debug, Clone)]
pub struct RankSessionSettings {
    /// Address of the worker.
    pub worker: Address,
    /// The engine that the rank belongs to: that of its scheduler.
    pub engine: EngineId,
    /// The instance of the engine beside the leader.
    pub replica: Replica,
    /// The rank's number within the engine.
    pub rank: Rank,
    /// Name for logs.
    pub name: String,
    /// Time limit of the first registration, the worker's start included.
    pub start_limit: Duration,
}

/// Why a session has ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RankFailure {
    /// No worker accepted the memory in time.
    #[error("{rank}: no worker accepted its memory in {limit:?}: {last}")]
    TooLate {
        /// The rank.
        rank: Rank,
        /// [`RankSessionSettings::start_limit`].
        limit: Duration,
        /// The last refusal; empty without one.
        last: String,
    },
    /// The worker refused the first registration for good.
    #[error("{rank}: {failure}")]
    Refused {
        /// The rank.
        rank: Rank,
        /// The worker's error.
        failure: Failure,
    },
    /// The connection, or the runtime, has ended.
    #[error("the session of {0} has ended")]
    Ended(Rank),
}

enum SessionCommand {
    Written(RequestId),
    Abandon(RequestId, oneshot::Sender<()>),
    Unregister(oneshot::Sender<()>),
}

#[derive(Debug, Clone, PartialEq)]
enum SessionProgress {
    Starting,
    Registered,
    Failed(RankFailure),
}

/// Keeps the memory of one rank registered with its worker, and sends what the rank owes it: what is written, and the
/// requests that are abandoned. Both are repeated until a worker has confirmed them.
///
/// Dropping the session closes the connection, upon which the worker closes the memory. [`Self::unregister`] also waits
/// for that: memory of a GPU must not be freed before.
#[derive(Debug)]
pub struct RankSession {
    rank: Rank,
    commands: mpsc::Sender<SessionCommand>,
    progress: watch::Receiver<SessionProgress>,
    task: JoinHandle<()>,
}

impl Drop for RankSession {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl RankSession {
    /// Connects and registers in the background.
    pub fn start<M: SessionMemory>(
        transport: Arc<dyn Transport>,
        settings: RankSessionSettings,
        memory: Arc<M>,
    ) -> Self {
        let hello = Hello {
            engine: settings.engine.0,
            rank: settings.rank.0,
            replica: settings.replica.0,
            features: memory.timeline().map_or(0, |_| FEATURE_TIMELINE),
            ..Hello::new(Role::Rank, settings.name.clone())
        };
        let client = ClientSettings {
            address: settings.worker.clone(),
            hello,
            limits: Limits::default(),
        };
        let (worker, incoming) = Client::start(transport, client);
        let (commands, queue) = mpsc::channel(COMMANDS);
        let (report, progress) = watch::channel(SessionProgress::Starting);
        let rank = settings.rank;
        let runner = SessionTask {
            start_by: Some(Instant::now() + settings.start_limit.min(START_LIMIT_MAX)),
            requester: Requester {
                settings: Arc::new(settings),
                memory,
                worker,
                features: 0,
            },
            incoming,
            outbox: Outbox::new(),
            in_flight: JoinSet::new(),
            pause: PAUSE_FIRST,
            last_refusal: String::new(),
            abandoned: BTreeMap::new(),
        };
        let task = tokio::spawn(async move {
            let failure = runner.run(queue, &report).await;
            report.send_replace(SessionProgress::Failed(failure));
        });
        Self {
            rank,
            commands,
            progress,
            task,
        }
    }

    /// Waits until a worker has accepted the memory for the first time.
    ///
    /// # Errors
    /// [`RankFailure`] when no worker accepted the memory in time, or one refused it permanently.
    pub async fn registered(&self) -> Result<(), RankFailure> {
        let mut progress = self.progress.clone();
        let changed = progress
            .wait_for(|now| *now != SessionProgress::Starting)
            .await;
        match changed.as_deref() {
            Ok(SessionProgress::Failed(failure)) => Err(failure.clone()),
            Ok(_) => Ok(()),
            Err(_) => Err(RankFailure::Ended(self.rank)),
        }
    }

    /// Waits until the session has failed. Completes only then.
    pub async fn failed(&self) -> RankFailure {
        let mut progress = self.progress.clone();
        let failed = progress
            .wait_for(|now| matches!(now, SessionProgress::Failed(_)))
            .await;
        match failed.as_deref() {
            Ok(SessionProgress::Failed(failure)) => failure.clone(),
            _ => RankFailure::Ended(self.rank),
        }
    }

    /// Reports that everything up to this number is written: pages that stores read, and work that loads wait for. On
    /// memory with a timeline the device must have received the write of the number before.
    ///
    /// # Errors
    /// [`RankFailure`] when the session has ended.
    pub async fn written(&self, through: RequestId) -> Result<(), RankFailure> {
        self.command(SessionCommand::Written(through)).await
    }

    /// Stops the copies for a request on this rank, and forbids later ones. The returned future requests this when it
    /// is polled, and completes once the worker, or the one that took over, has confirmed it. A future that is dropped
    /// before may have requested it or not.
    ///
    /// # Errors
    /// [`RankFailure`] when the session has ended.
    pub fn abandon(
        &self,
        request: RequestId,
    ) -> impl Future<Output = Result<(), RankFailure>> + Send + use<> {
        let (confirm, confirmed) = oneshot::channel();
        let (commands, rank) = (self.commands.clone(), self.rank);
        async move {
            let ended = RankFailure::Ended(rank);
            let sent = commands
                .send(SessionCommand::Abandon(request, confirm))
                .await;
            sent.map_err(|_| ended.clone())?;
            confirmed.await.map_err(|_| ended)
        }
    }

    /// Gives the memory back, and waits at most `limit` until nothing of it is open in the worker. Returns false when
    /// the worker has not confirmed that in time; the connection is closed in any case.
    pub async fn unregister(self, limit: Duration) -> bool {
        let (confirm, confirmed) = oneshot::channel();
        let requested = async {
            let sent = self.command(SessionCommand::Unregister(confirm)).await;
            sent.is_ok() && confirmed.await.is_ok()
        };
        tokio::time::timeout(limit, requested)
            .await
            .unwrap_or(false)
    }

    async fn command(&self, command: SessionCommand) -> Result<(), RankFailure> {
        let sent = self.commands.send(command).await;
        sent.map_err(|_| RankFailure::Ended(self.rank))
    }
}

/// The outcome of a request to the worker.
struct RankRequestEnd {
    link: LinkId,
    request: RankRequest,
    answer: Result<(), Failure>,
}

/// Sends the requests that a rank owes its worker, and reports their ends.
struct SessionTask<M> {
    requester: Requester<M>,
    incoming: mpsc::Receiver<Incoming>,
    outbox: Outbox,
    in_flight: JoinSet<RankRequestEnd>,
    pause: Duration,
    /// Deadline of the first registration; `None` once it has succeeded.
    start_by: Option<Instant>,
    last_refusal: String,
    /// Callers that wait until an abandoned request is confirmed.
    abandoned: BTreeMap<u64, Vec<oneshot::Sender<()>>>,
}

/// State that is needed to send one request.
struct Requester<M> {
    settings: Arc<RankSessionSettings>,
    memory: Arc<M>,
    worker: Client,
    /// Features of both sides, from the last welcome.
    features: u64,
}

impl<M> Clone for Requester<M> {
    fn clone(&self) -> Self {
        Self {
            settings: Arc::clone(&self.settings),
            memory: Arc::clone(&self.memory),
            worker: self.worker.clone(),
            features: self.features,
        }
    }
}

impl<M: SessionMemory> SessionTask<M> {
    /// Runs until the memory is given back or a fatal error; returns the reason.
    async fn run(
        mut self,
        mut commands: mpsc::Receiver<SessionCommand>,
        progress: &watch::Sender<SessionProgress>,
    ) -> RankFailure {
        let rank = self.requester.settings.rank;
        loop {
            while let Some((link, request)) = self.outbox.next() {
                let (requester, pause) = (self.requester.clone(), self.pause);
                self.in_flight.spawn(requester.send(link, request, pause));
            }
            let step = tokio::select! {
                incoming = self.incoming.recv() => self.received(incoming),
                command = commands.recv() => match command {
                    Some(SessionCommand::Unregister(confirm)) => return self.unregister(confirm).await,
                    Some(command) => {
                        self.command(command);
                        Ok(())
                    }
                    None => Err(RankFailure::Ended(rank)),
                },
                Some(outcome) = self.in_flight.join_next() => match outcome {
                    Ok(outcome) => self.answered(outcome, progress),
                    Err(error) if error.is_cancelled() => Ok(()),
                    Err(_) => Err(RankFailure::Ended(rank)),
                },
                () = expired(self.start_by) => Err(RankFailure::TooLate {
                    rank,
                    limit: self.requester.settings.start_limit,
                    last: std::mem::take(&mut self.last_refusal),
                }),
            };
            if let Err(failure) = step {
                return failure;
            }
        }
    }

    fn command(&mut self, command: SessionCommand) {
        match command {
            SessionCommand::Written(through) => self.outbox.wrote(through.0),
            SessionCommand::Abandon(request, confirm) => {
                self.abandoned.entry(request.0).or_default().push(confirm);
                self.outbox.abandon(request.0);
            }
            // Handled where it is received.
            SessionCommand::Unregister(_) => {}
        }
    }

    fn received(&mut self, incoming: Option<Incoming>) -> Result<(), RankFailure> {
        let ended = RankFailure::Ended(self.requester.settings.rank);
        match incoming.ok_or(ended)? {
            Incoming::Welcomed { link, features, .. } => {
                self.requester.features = features;
                self.in_flight.abort_all();
                self.pause = PAUSE_FIRST;
                self.outbox.connected(link);
            }
            Incoming::Lost => {
                self.in_flight.abort_all();
                self.outbox.lost();
            }
            Incoming::Request { envelope, .. } => {
                let kind = envelope.message.kind().name();
                tracing::debug!(
                    kind,
                    "a worker sent a rank a request, which no rank answers"
                );
            }
            Incoming::Answered { id, .. } => {
                tracing::debug!(%id, "an answer arrived in order, which no rank requests");
            }
        }
        Ok(())
    }

    fn answered(
        &mut self,
        outcome: RankRequestEnd,
        progress: &watch::Sender<SessionProgress>,
    ) -> Result<(), RankFailure> {
        let RankRequestEnd {
            link,
            request,
            answer,
        } = outcome;
        let registers = matches!(request, RankRequest::Register { .. });
        let confirmed = answer.is_ok();
        if let Err(failure) = answer {
            let rank = self.requester.settings.rank;
            tracing::debug!(%rank, ?request, %failure, "repeating a request to the worker");
            if failure.code == ErrorCode::Invalid {
                self.outbox.memory_dropped(link);
            }
            if registers {
                self.last_refusal = failure.to_string();
                if self.start_by.is_some() && !failure.retry {
                    return Err(RankFailure::Refused { rank, failure });
                }
            }
            self.pause = (self.pause * 2).min(PAUSE_MAX);
        } else {
            self.pause = PAUSE_FIRST;
        }
        let ended = self.outbox.answered(link, &request, confirmed);
        if confirmed && registers && self.start_by.take().is_some() {
            progress.send_replace(SessionProgress::Registered);
        }
        for request in ended {
            for confirm in self.abandoned.remove(&request).unwrap_or_default() {
                if confirm.send(()).is_err() {
                    tracing::trace!(request, "no receiver for the end of an abandoned request");
                }
            }
        }
        Ok(())
    }

    /// Repeats `unregister` until the worker has confirmed it, or the caller no longer waits.
    async fn unregister(mut self, mut confirm: oneshot::Sender<()>) -> RankFailure {
        let ended = RankFailure::Ended(self.requester.settings.rank);
        let worker = self.requester.worker.clone();
        // The client stalls while its events are not read.
        tokio::spawn(async move { while self.incoming.recv().await.is_some() {} });
        let repeat = async {
            // A task that is running ends at its next await, and may queue a registration before: no registration may
            // be sent after the request that ends it.
            self.in_flight.shutdown().await;
            while worker.call(Unregister {}, REQUEST_LIMIT).await.is_err() {
                tokio::time::sleep(PAUSE_FIRST).await;
            }
        };
        tokio::select! {
            () = repeat => {
                if confirm.send(()).is_err() {
                    tracing::trace!("no receiver for the end of a registration");
                }
            }
            () = confirm.closed() => {}
        }
        ended
    }
}

impl<M: SessionMemory> Requester<M> {
    /// Sends one request over this connection; pauses after a failure.
    async fn send(self, link: LinkId, request: RankRequest, pause: Duration) -> RankRequestEnd {
        let answer = match &request {
            RankRequest::Register { abandoned_through } => {
                self.register(link, *abandoned_through).await
            }
            RankRequest::Written { through } => self.written(link, *through).await,
            RankRequest::Abandon { requests } => {
                let requests = requests.clone();
                let abandon = Abandon { requests };
                let sent = self.worker.call_on(link, abandon, REQUEST_LIMIT);
                sent.await.map(|_| ())
            }
        };
        if answer.is_err() {
            tokio::time::sleep(pause).await;
        }
        RankRequestEnd {
            link,
            request,
            answer,
        }
    }

    /// The word to which the device writes its progress; `None` if it has none, or the worker does not read it.
    fn timeline(&self) -> Option<Timeline> {
        let both = self.features & FEATURE_TIMELINE != 0;
        self.memory.timeline().filter(|_| both)
    }

    /// Reports what is written. With a timeline the device's word shows when its writes are complete; without one, the
    /// report is sent after they are.
    async fn written(&self, link: LinkId, through: u64) -> Result<(), Failure> {
        let timeline = self.timeline().is_some();
        if !timeline {
            let memory = Arc::clone(&self.memory);
            let finished =
                tokio::task::spawn_blocking(move || memory.finish_writes().map_err(not_now));
            finished.await.map_err(not_now)??;
        }
        let written = Written { through, timeline };
        let sent = self.worker.call_on(link, written, REQUEST_LIMIT);
        sent.await.map(|_| ())
    }

    /// Hands the memory over to the worker and registers it.
    async fn register(&self, link: LinkId, abandoned_through: u64) -> Result<(), Failure> {
        let described = self.memory.registration().await;
        let register = Register {
            abandoned_through,
            engine: self.settings.engine.0,
            registration: Registration {
                timeline: self.timeline(),
                ..described.map_err(not_now)?
            },
            check_only: false,
        };
        let registered = self.worker.call_on(link, register, REQUEST_LIMIT).await?;
        match registered.not_served.is_empty() {
            true => Ok(()),
            false => Err(Failure::new(ErrorCode::Invalid, registered.not_served)),
        }
    }
}

fn not_now(error: impl std::fmt::Display) -> Failure {
    Failure::new(ErrorCode::NotReady, error.to_string())
}

/// Waits until a point in time; forever if there is none.
async fn expired(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
