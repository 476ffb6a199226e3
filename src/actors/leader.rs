//! The leader's actor: runs a [`LeaderShell`] on sockets, processes and a timer.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use ractor::{Actor, ActorProcessingErr, ActorRef};
use rustix::process::{Signal, pidfd_send_signal};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::SetLog;
use crate::mailbox::{Credited, MailboxPump};
use crate::processes::{self, Process};
use kvferry_core::{Leader, LeaderEffect, LeaderEvent, LeaderSettings};
use kvferry_protocol::{Connections, Message, RestartedProcess};
use kvferry_shell::{HolderPeers, HostError, LeaderHost, LeaderShell};
use kvferry_transport::Clock;
use kvferry_transport::{Replier, Server, ServerEvent, ServerEvents};
use kvferry_types::{Epoch, PeerId, Request, RequestId, Time, WorkerId};

/// Ends the process of a worker: the process with this id, or the worker's current process if none has connected to the
/// leader.
pub type EndWorker = Box<dyn FnMut(WorkerId, Option<i32>) + Send>;

/// Records that an epoch was used, so that the next leader takes a later one. An error is the reason of the failure.
pub type RaiseEpoch = Box<dyn Fn(Epoch) -> Result<(), HostError> + Send>;

/// Reads which processes a supervisor has started again.
pub type ReadRestarts = Box<dyn Fn() -> Vec<RestartedProcess> + Send>;

/// Arguments of a leader.
pub struct LeaderArguments {
    /// Settings of the core.
    pub settings: LeaderSettings,
    /// The socket to which engines, workers and admin commands connect.
    pub server: Server,
    /// Ends a worker's process through a supervisor; `None` where the leader ends it itself.
    pub supervisor: Option<EndWorker>,
    /// Raises the stored epoch above one that a depot has recorded, before this leader ends for that reason.
    pub raise_epoch: Option<RaiseEpoch>,
    /// Changes the filter of the log; `None` where operators may not.
    pub set_log: Option<SetLog>,
    /// Reads the restarts of processes, for the status; `None` without a supervisor that counts them.
    pub restarts: Option<ReadRestarts>,
}

/// A message to the leader's actor.
pub(super) enum LeaderMessage {
    Peers(Credited<ServerEvents>),
    /// The listener has ended.
    ListenerClosed,
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

    /// Refuses new work and waits until no copies run, at most for `limit`. Returns true when all copies ended in time.
    pub async fn drain(&self, limit: Duration) -> bool {
        let (done, drained) = oneshot::channel();
        if self.0.cast(LeaderMessage::Drain(done)).is_err() {
            return true;
        }
        matches!(tokio::time::timeout(limit, drained).await, Ok(Ok(())))
    }
}

pub(super) struct LeaderActor;

pub(super) struct State {
    feeder: MailboxPump,
    shell: LeaderShell<Process>,
    host: Host,
    timer: Option<JoinHandle<Result<(), ractor::MessagingErr<LeaderMessage>>>>,
    armed_at: Option<Time>,
    draining: Option<oneshot::Sender<()>>,
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
            set_log,
            restarts,
        } = arguments;
        let host = Host {
            clock: Clock::start(),
            replier: server.replier(),
            supervisor,
            raise_epoch,
            set_log,
            restarts,
            watched: HashMap::new(),
            actor: myself.clone(),
            lookup_begun: None,
            lookup_time: Duration::ZERO,
        };
        let mut admin_key = [0; 8];
        rustix::rand::getrandom(&mut admin_key, rustix::rand::GetRandomFlags::empty())?;
        let feeder = MailboxPump::start(server, move |batch| {
            let message = batch.map_or(LeaderMessage::ListenerClosed, LeaderMessage::Peers);
            myself.cast(message).is_ok()
        });
        Ok(State {
            feeder,
            shell: LeaderShell::new(settings, admin_key),
            host,
            timer: None,
            armed_at: None,
            draining: None,
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
        let State { shell, host, .. } = state;
        match message {
            LeaderMessage::Peers(batch) => {
                for event in batch.item {
                    match event {
                        ServerEvent::Opened {
                            peer,
                            hello,
                            caller,
                        } => {
                            shell.opened(host, peer, &hello, caller);
                        }
                        ServerEvent::Closed { peer } => shell.closed(host, peer),
                        ServerEvent::Message { peer, envelope } => {
                            shell.message(host, peer, envelope);
                        }
                    }
                }
            }
            LeaderMessage::ListenerClosed => return Err("the listener has ended".into()),
            LeaderMessage::WorkerExited { pid } => {
                host.watched.remove(&pid);
                shell.worker_exited(host, pid);
            }
            LeaderMessage::Tick => {
                state.armed_at = None;
                shell.tick(host);
            }
            LeaderMessage::Drain(done) => {
                shell.drain();
                state.draining = Some(done);
            }
        }
        if let Some(why) = state.shell.take_outdated() {
            return Err(why.into());
        }
        state.end_drain();
        state.arm(&myself);
        Ok(())
    }
}

impl State {
    fn end_drain(&mut self) {
        if self.shell.core().copies_under_way() == 0
            && let Some(done) = self.draining.take()
            && done.send(()).is_err()
        {
            tracing::debug!("no receiver for the end of the drain");
        }
    }

    /// Sets the timer for the next timeout, unless the current one fires earlier: an early tick does nothing but set
    /// the timer again. Requests often move timeouts, but rarely the earliest one.
    fn arm(&mut self, myself: &ActorRef<LeaderMessage>) {
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
        self.timer = Some(myself.send_after(left, || LeaderMessage::Tick));
    }
}

/// The live process of a leader.
struct Host {
    clock: Clock,
    replier: Replier,
    supervisor: Option<EndWorker>,
    raise_epoch: Option<RaiseEpoch>,
    set_log: Option<SetLog>,
    restarts: Option<ReadRestarts>,
    /// Watched processes, by id.
    watched: HashMap<i32, Process>,
    actor: ActorRef<LeaderMessage>,
    /// Start of the lookup that runs now.
    lookup_begun: Option<Instant>,
    lookup_time: Duration,
}

impl HolderPeers for Host {
    type Process = Process;

    fn is_live(&self, peer: PeerId) -> bool {
        self.replier.is_live(peer)
    }

    fn open_process(&mut self, pid: i32) -> Option<Process> {
        processes::open(pid).ok()
    }

    fn has_ended(&self, process: &Process) -> bool {
        processes::has_ended(process)
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.replier.disconnect(peer);
    }

    fn connections(&self) -> Connections {
        self.replier.connections()
    }

    fn set_log(&mut self, filter: &str) -> Result<String, String> {
        let none = || Err("this process lets nobody change its log".to_owned());
        self.set_log.map_or_else(none, |set_log| set_log(filter))
    }
}

impl LeaderHost for Host {
    fn now(&self) -> Time {
        self.clock.now()
    }

    fn is_open(&self, peer: PeerId, request: RequestId) -> bool {
        self.replier.is_open(peer, request)
    }

    fn reply(&mut self, peer: PeerId, request: RequestId, message: Message) {
        self.replier.reply(peer, request, message);
    }

    fn order(
        &mut self,
        peers: &[PeerId],
        order: RequestId,
        message: Message,
        deadline: Duration,
    ) -> Vec<PeerId> {
        self.replier.order(peers, order, message, deadline)
    }

    fn watch(&mut self, pid: i32) -> Option<Process> {
        if let Some(process) = self.watched.get(&pid) {
            return Some(process.clone());
        }
        match watch(pid, self.actor.clone()) {
            Ok(process) => {
                self.watched.insert(pid, process.clone());
                Some(process)
            }
            Err(error) => {
                tracing::warn!(%error, pid, "cannot watch this worker");
                None
            }
        }
    }

    fn is_own(&self, pid: i32) -> bool {
        u32::try_from(pid) == Ok(std::process::id())
    }

    fn request_end(&mut self, worker: WorkerId, pid: Option<i32>) -> bool {
        let Some(supervisor) = &mut self.supervisor else {
            return false;
        };
        supervisor(worker, pid);
        true
    }

    fn kill(&mut self, worker: WorkerId, process: &Process) {
        if let Err(error) = pidfd_send_signal(process, Signal::KILL) {
            tracing::warn!(%error, %worker, "it had ended, or cannot be killed");
        }
    }

    fn raise_epoch(&mut self, used: Epoch) -> Result<(), HostError> {
        self.raise_epoch
            .as_ref()
            .map_or(Ok(()), |raise| raise(used))
    }

    fn lookup_time(&self) -> Duration {
        self.lookup_time
    }

    fn restarts(&self) -> Vec<RestartedProcess> {
        self.restarts.as_ref().map_or_else(Vec::new, |read| read())
    }

    fn before_step(&mut self, _: &Leader, event: &LeaderEvent) {
        if let LeaderEvent::Request {
            request: Request::Lookup { .. },
            ..
        } = event
        {
            self.lookup_begun = Some(Instant::now());
        }
    }

    fn after_step(&mut self, _: &Leader, _: &[LeaderEffect]) {
        if let Some(begun) = self.lookup_begun.take() {
            self.lookup_time += begun.elapsed();
        }
    }
}

/// Reports the exit of a process, from a thread of its own: one thread per worker.
fn watch(pid: i32, actor: ActorRef<LeaderMessage>) -> std::io::Result<Process> {
    let process = processes::open(pid)?;
    let watched = process.clone();
    let wait = move || {
        if processes::wait_for_end(&watched)
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
