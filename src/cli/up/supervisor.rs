//! Starts the children of `up`, and starts them again when they end.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::TcpListener;
use std::process::ExitStatus;
use std::task::Poll;
use std::time::Duration;

use tokio::io::AsyncWriteExt as _;
use tokio::process::{Child, ChildStdin};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::cli::monitor;
use crate::cli::remote_workers::RemoteWorkers;
use crate::cli::shutdown::{END_IN_ORDER, FenceWorker};
use crate::config::Config;
use crate::error::{CommandError, NO_MEMORY};
use kvferry_memory::{DEPOT_HEADER_BYTES, Depot};
use kvferry_types::{Shard, WorkerId};

/// Time in which children must end before they are killed.
const END_LIMIT: Duration = Duration::from_secs(10);
/// Exit code of a child whose configuration is wrong.
const CONFIGURATION_ERROR: i32 = 78;
const RESTART_FIRST: Duration = Duration::from_millis(100);
const RESTART_MAX: Duration = Duration::from_secs(5);
/// Requests of the leader that may wait to be handled.
const LINES_MAX: usize = 64;
/// A child that ran at least this long restarts with the shortest pause again.
const SETTLED_AFTER: Duration = Duration::from_secs(10);
/// `up` ends when a child ends this many times in a row without settling.
const FAILURES_MAX: u32 = 8;

/// The role of a child process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChildKind {
    Leader,
    Worker(WorkerId),
    /// Metrics and health.
    Monitor,
}

impl std::fmt::Display for ChildKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Leader => f.write_str("leader"),
            Self::Worker(worker) => write!(f, "worker of {worker}"),
            Self::Monitor => f.write_str("monitor"),
        }
    }
}

pub(super) struct Supervised {
    pub(super) part: ChildKind,
    pub(super) child: Option<Child>,
    /// Standard input of the child, which ends when it is closed. Taken from `child`, because waiting for a child would
    /// close it.
    pub(super) input: Option<ChildStdin>,
    pub(super) started: Instant,
    /// Time of the next restart; `None` while the child runs.
    pub(super) restart: Option<Instant>,
    pub(super) pause: Duration,
    pub(super) failures: u32,
    /// A child of this part ran with its configuration.
    pub(super) has_run: bool,
    /// The statement to a leader on another machine that the child has ended.
    pub(super) stating: Option<JoinHandle<()>>,
}

pub(super) struct Supervisor {
    pub(super) config: Config,
    pub(super) no_tiers: bool,
    /// The leader and the workers, where the leader is on another machine.
    pub(super) remote: Option<RemoteWorkers>,
    pub(super) depots: BTreeMap<Shard, Depot>,
    /// The socket of the monitor, which stays open while the monitor starts again.
    pub(super) monitored: Option<TcpListener>,
    pub(super) parts: Vec<Supervised>,
    /// Requests of leaders to end a worker.
    pub(super) fence_requests: mpsc::Receiver<FenceWorker>,
    pub(super) fence_requester: mpsc::Sender<FenceWorker>,
}

enum Happened {
    Ended(usize, Option<ExitStatus>),
    Due(usize),
    FenceWorker(FenceWorker),
}

impl Supervisor {
    pub(super) fn new(
        config: Config,
        no_tiers: bool,
        remote: Option<RemoteWorkers>,
        workers: &[WorkerId],
    ) -> Result<Self, CommandError> {
        let each = match no_tiers {
            // One byte after the header: a depot without room for any page.
            true => DEPOT_HEADER_BYTES + 1,
            false => config.host_memory().0 / u64::from(config.kv_shards.shards()),
        };
        let mut depots = BTreeMap::new();
        for worker in workers {
            if let Entry::Vacant(depot) = depots.entry(config.kv_shards.of(worker.rank)) {
                let created = Depot::create(each);
                depot.insert(created.map_err(|error| {
                    CommandError::Config(format!("g2 is {}: {error}", config.g2))
                })?);
            }
        }
        let workers = workers.iter().copied().map(ChildKind::Worker);
        let monitored = config.monitor.0.map(monitor::listen).transpose()?;
        let monitor = monitored.iter().map(|_| ChildKind::Monitor);
        let leader = remote.is_none().then_some(ChildKind::Leader);
        let parts = leader.into_iter().chain(workers).chain(monitor);
        let started = Instant::now();
        let parts = parts.map(|part| Supervised {
            part,
            child: None,
            input: None,
            started,
            restart: None,
            pause: RESTART_FIRST,
            failures: 0,
            has_run: false,
            stating: None,
        });
        let (wants, wanted) = mpsc::channel(LINES_MAX);
        Ok(Self {
            fence_requests: wanted,
            fence_requester: wants,
            parts: parts.collect(),
            depots,
            monitored,
            no_tiers,
            remote,
            config,
        })
    }

    pub(super) fn start_all(&mut self) -> Result<(), CommandError> {
        (0..self.parts.len()).try_for_each(|index| self.start(index))
    }

    /// Restarts children that end, with growing pauses. Returns only when a child fails permanently.
    pub(super) async fn watch(&mut self) -> CommandError {
        loop {
            let failed = match self.next().await {
                Happened::Ended(index, status) => self.ended(index, status),
                Happened::Due(index) => {
                    self.await_statement(index).await;
                    self.start(index)
                }
                Happened::FenceWorker(fence) => {
                    self.kill(fence);
                    Ok(())
                }
            };
            if let Err(error) = failed {
                self.end_all().await;
                return error;
            }
        }
    }

    fn ended(&mut self, index: usize, status: Option<ExitStatus>) -> Result<(), CommandError> {
        let supervised = &mut self.parts[index];
        supervised.child = None;
        let part = supervised.part;
        if let (Some(remote), ChildKind::Worker(worker)) = (&self.remote, part) {
            supervised.stating = Some(remote.state_gone(worker));
        }
        let code = status.and_then(|status| status.code());
        let no_memory = code == Some(i32::from(NO_MEMORY));
        // A child that finds no memory may run longer than `SETTLED_AFTER` before it fails.
        if supervised.started.elapsed() >= SETTLED_AFTER && !no_memory {
            supervised.pause = RESTART_FIRST;
            supervised.failures = 0;
        }
        let misconfigured = code == Some(CONFIGURATION_ERROR);
        supervised.has_run |= !misconfigured;
        // A file of the configuration has changed since an earlier child ran: the pages that the others have are kept until
        // the file is mended.
        let to_mend = misconfigured && supervised.has_run;
        if to_mend {
            tracing::error!(
                "{part} cannot start with its present configuration, see above: mend it, stored pages are kept"
            );
        }
        // A child that a signal killed has no exit code and does not count as a failure.
        if code.is_some() && !to_mend {
            supervised.failures += 1;
        }
        // Nothing is served worse without the monitor: it is started again however often it fails.
        let needed = part != ChildKind::Monitor;
        let gives_up = misconfigured && !to_mend || supervised.failures >= FAILURES_MAX;
        if needed && gives_up {
            return Err(CommandError::Failed(format!(
                "{part} does not stay up: see its messages above"
            )));
        }
        let how = status.map_or_else(String::new, |status| status.to_string());
        tracing::warn!(pause = ?supervised.pause, how, "{part} ended: starting it again");
        supervised.restart = Some(Instant::now() + supervised.pause);
        supervised.pause = (supervised.pause * 2).min(RESTART_MAX);
        Ok(())
    }

    /// Waits until a leader on another machine knows of the end of a child, or the time for that is over: a process of the
    /// worker that had started meanwhile could be taken for the one that has ended.
    async fn await_statement(&mut self, index: usize) {
        if let Some(stating) = self.parts[index].stating.take()
            && let Err(error) = stating.await
        {
            tracing::warn!(%error, "the statement that a worker has ended");
        }
    }

    /// Kills a worker that is silent or does not end its copies. Its end is handled like any other. A process that took
    /// its seat, and is not a child of this process, is left to the leader.
    fn kill(&mut self, FenceWorker { worker, pid }: FenceWorker) {
        let part = ChildKind::Worker(worker);
        let child = self
            .parts
            .iter_mut()
            .find(|supervised| supervised.part == part)
            .and_then(|supervised| supervised.child.as_mut());
        let Some(child) = child else {
            tracing::info!("{part} is to be ended, and has ended");
            return;
        };
        let own = child.id().and_then(|id| i32::try_from(id).ok());
        if let Some(pid) = pid.filter(|pid| own != Some(*pid)) {
            tracing::error!(
                pid,
                "a process that was not started here has the seat of the {part}: it is not ended here"
            );
            return;
        }
        tracing::warn!("{part} is ended on request of the leader");
        if let Err(error) = child.start_kill() {
            tracing::warn!(%error, "{part} cannot be killed");
        }
    }

    async fn next(&mut self) -> Happened {
        let due = self
            .parts
            .iter()
            .enumerate()
            .filter_map(|(index, supervised)| Some((supervised.restart?, index)))
            .min();
        let restart = async {
            match due {
                Some((at, index)) => {
                    tokio::time::sleep_until(at).await;
                    index
                }
                None => std::future::pending().await,
            }
        };
        let ended = next_end(&mut self.parts);
        tokio::select! {
            (index, status) = ended => Happened::Ended(index, status),
            index = restart => Happened::Due(index),
            Some(wanted) = self.fence_requests.recv() => Happened::FenceWorker(wanted),
        }
    }

    /// Ends the leader first, so that its copies end while the workers run; then the workers.
    pub(super) async fn end_all(&mut self) {
        let limit = Instant::now() + END_LIMIT;
        for supervised in &mut self.parts {
            let Some(mut child) = supervised.child.take() else {
                continue;
            };
            // Not by a signal: children leave signals to this process, which may have received the same one.
            if let Some(mut input) = supervised.input.take()
                && let Err(error) = input.write_all(&[END_IN_ORDER]).await
            {
                tracing::debug!(%error, "{} had ended", supervised.part);
            }
            if tokio::time::timeout_at(limit, child.wait()).await.is_err() {
                tracing::warn!("{} does not end: killed", supervised.part);
                if let Err(error) = child.kill().await {
                    tracing::warn!(%error, "{} cannot be killed", supervised.part);
                }
            }
            if let (Some(remote), ChildKind::Worker(worker)) = (&self.remote, supervised.part) {
                supervised.stating = Some(remote.state_gone(worker));
            }
        }
        for index in 0..self.parts.len() {
            self.await_statement(index).await;
        }
    }
}

/// Waits for the first child that ends.
async fn next_end(parts: &mut [Supervised]) -> (usize, Option<ExitStatus>) {
    let waits = parts.iter_mut().enumerate().filter_map(|(index, part)| {
        let child = part.child.as_mut()?;
        Some(Box::pin(async move { (index, child.wait().await.ok()) }))
    });
    let mut waits: Vec<_> = waits.collect();
    std::future::poll_fn(|context| {
        for wait in &mut waits {
            if let Poll::Ready(ended) = wait.as_mut().poll(context) {
                return Poll::Ready(ended);
            }
        }
        Poll::Pending
    })
    .await
}
