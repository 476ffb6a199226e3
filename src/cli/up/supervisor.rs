//! Starts the children of `up`, and starts them again when they end.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io;
use std::net::TcpListener;
use std::process::ExitStatus;
use std::task::Poll;
use std::time::Duration;

use tokio::sync::mpsc;

use super::deaths::Deaths;
use super::part::{ChildKind, Part};
use super::reports::{Reported, listen};
use super::system::System;
use crate::cli::monitor;
use crate::cli::remote_workers::RemoteWorkers;
use crate::cli::restarts::{Cause, Restarts};
use crate::cli::shutdown::{ChildReport, DRAIN_LIMIT, FenceWorker};
use crate::cli::socket_paths::SocketPaths;
use crate::config::Config;
use crate::error::CommandError;
use kvferry_memory::{DEPOT_HEADER_BYTES, Depot};
use kvferry_tiers::disk::KnownTier;
use kvferry_types::{ByteSize, Shard, WorkerId};

/// Time in which the leader must end before it is killed: its copies have [`DRAIN_LIMIT`] of it.
const LEADER_END_LIMIT: Duration = DRAIN_LIMIT.saturating_add(Duration::from_secs(2));
/// The same for every other child, from when the leader has ended.
const END_LIMIT: Duration = Duration::from_secs(10);
/// Time in which a child that was killed must end. One that the kernel does not let go is left to it.
const KILL_LIMIT: Duration = Duration::from_secs(2);
/// Reports of children that may wait to be handled.
const REPORTS_MAX: usize = 64;

pub(super) struct Supervisor<S: System> {
    pub(super) system: S,
    pub(super) config: Config,
    pub(super) no_tiers: bool,
    /// The leader and the workers, where the leader is on another machine.
    pub(super) remote: Option<RemoteWorkers>,
    /// The disk tier that was found at the start. Its disks may be away when a child starts.
    pub(super) tier: Option<KnownTier>,
    pub(super) depots: BTreeMap<Shard, Depot>,
    /// The socket of the monitor, which stays open while the monitor starts again.
    pub(super) monitored: Option<TcpListener>,
    pub(super) parts: Vec<Part<S::Child>>,
    reports: mpsc::Receiver<Reported>,
    reporter: mpsc::Sender<Reported>,
    deaths: Deaths,
    restarts: Restarts,
    /// The counts were not written since they changed.
    unpublished: bool,
}

enum Happened {
    Ended(usize, io::Result<ExitStatus>),
    Due(usize),
    Reported(Reported),
}

impl<S: System> Supervisor<S> {
    /// Creates the memory of the workers. Starts nothing: [`Self::watch`] does.
    pub(super) fn new(
        system: S,
        config: Config,
        no_tiers: bool,
        (remote, tier): (Option<RemoteWorkers>, Option<KnownTier>),
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
                let created = system.create_depot(each);
                depot.insert(created.map_err(|error| {
                    let shards = config.kv_shards.shards();
                    let each = ByteSize(each);
                    CommandError::Config(format!(
                        "g2 is {}, {each} for each of {shards} shards: {error}",
                        config.g2
                    ))
                })?);
            }
        }
        let listen = |address| monitor::listen(address, |address| system.listen(address));
        let monitored = config.monitor.0.map(listen).transpose()?;
        let workers = workers.iter().copied().map(ChildKind::Worker);
        let monitor = monitored.iter().map(|_| ChildKind::Monitor);
        let leader = remote.is_none().then_some(ChildKind::Leader);
        let parts = leader.into_iter().chain(workers).chain(monitor);
        let (reporter, reports) = mpsc::channel(REPORTS_MAX);
        let mut supervisor = Self {
            parts: parts.map(Part::new).collect(),
            restarts: Restarts::default(),
            unpublished: true,
            deaths: Deaths::watch(),
            system,
            config,
            no_tiers,
            remote,
            tier,
            depots,
            monitored,
            reports,
            reporter,
        };
        supervisor.publish_restarts();
        Ok(supervisor)
    }

    /// Starts the children, and starts them again when they end, with growing pauses. Returns only when a child fails
    /// permanently, after all others have ended.
    pub(super) async fn watch(&mut self) -> CommandError {
        loop {
            let failed = match self.next().await {
                Happened::Ended(index, status) => self.ended(index, status),
                Happened::Due(index) => {
                    self.await_statement(index).await;
                    self.start(index)
                }
                Happened::Reported(reported) => {
                    self.reported(&reported);
                    Ok(())
                }
            };
            self.publish_restarts();
            if let Err(error) = failed {
                self.end_all().await;
                return error;
            }
        }
    }

    fn start(&mut self, index: usize) -> Result<(), CommandError> {
        let kind = self.parts[index].kind;
        let error = match self.launch(index) {
            Ok((child, reports)) => {
                let pid = self.system.pid(&child);
                tracing::info!(pid, "{kind} started");
                if let Some(reports) = reports {
                    tokio::spawn(listen(reports, (index, pid), self.reporter.clone()));
                }
                self.parts[index].has_started(child);
                return Ok(());
            }
            Err(error) => error,
        };
        let pause = self.parts[index].not_started(&error)?;
        tracing::error!(%error, ?pause, "{kind} cannot be started: trying again");
        self.count(kind, Cause::NotStarted);
        Ok(())
    }

    fn ended(&mut self, index: usize, waited: io::Result<ExitStatus>) -> Result<(), CommandError> {
        let part = &mut self.parts[index];
        let kind = part.kind;
        if let (Err(error), Some(child)) = (&waited, &mut part.child) {
            tracing::warn!(%error, "whether the {kind} runs cannot be read: it is killed");
            if let Err(error) = self.system.kill(child) {
                tracing::debug!(%error, "the {kind} cannot be killed");
            }
        }
        if let (Some(remote), ChildKind::Worker(worker)) = (&self.remote, kind) {
            part.stating = Some(remote.state_gone(worker));
        }
        let end = self.deaths.explain(waited, part.fenced);
        let pause = part.ended(&end)?;
        tracing::warn!(?pause, how = end.text, "{kind} ended: starting it again");
        self.count(kind, end.cause);
        Ok(())
    }

    /// Counts that a child is to be started again, where leader, monitor and operators read it.
    fn count(&mut self, kind: ChildKind, cause: Cause) {
        self.restarts.count(kind.name(), cause);
        self.unpublished = true;
    }

    /// Writes the counts, if they have changed. After a failure, they are written with the next event.
    fn publish_restarts(&mut self) {
        if !self.unpublished {
            return;
        }
        let path = SocketPaths::new(&self.config.socket_dir).restarts();
        match self.system.replace(&path, &self.restarts.text()) {
            Ok(()) => self.unpublished = false,
            Err(error) => {
                tracing::warn!(%error, path = %path.display(), "status and metrics have older numbers of restarts");
            }
        }
    }

    /// Waits until a leader on another machine knows of the end of a child, or the time for that is over: a process of the
    /// worker that had started meanwhile could be taken for the one that has ended.
    async fn await_statement(&mut self, index: usize) {
        let stating = &mut self.parts[index].stating;
        // Kept until it has ended: this wait may be given up, and is then repeated at the end of all.
        if let Some(waited) = stating.as_mut() {
            if let Err(error) = waited.await {
                tracing::warn!(%error, "the statement that a worker has ended");
            }
            *stating = None;
        }
    }

    fn reported(&mut self, Reported { index, pid, report }: &Reported) {
        match report {
            ChildReport::Ready => {
                let part = &mut self.parts[*index];
                // A report of a process that has ended is not one of its successor.
                if let Some(child) = &part.child
                    && self.system.pid(child) == *pid
                {
                    part.is_ready();
                }
            }
            ChildReport::Fence(fence) => self.fence(*fence),
        }
    }

    /// Kills a worker that is silent or does not end its copies. Its end is handled like any other. A process that took
    /// its seat, and is not a child of this process, is left to the leader.
    fn fence(&mut self, FenceWorker { worker, pid }: FenceWorker) {
        let kind = ChildKind::Worker(worker);
        let part = self.parts.iter_mut().find(|part| part.kind == kind);
        let found = part.and_then(|part| Some((part.child.as_mut()?, &mut part.fenced)));
        let Some((child, fenced)) = found else {
            tracing::info!("{kind} is to be ended, and has ended");
            return;
        };
        let own = self.system.pid(child).and_then(|id| i32::try_from(id).ok());
        if let Some(pid) = pid.filter(|pid| own != Some(*pid)) {
            tracing::error!(
                pid,
                "a process that was not started here has the seat of the {kind}: it is not ended here"
            );
            return;
        }
        tracing::warn!("{kind} is ended on request of the leader");
        match self.system.kill(child) {
            Ok(()) => *fenced = true,
            Err(error) => tracing::warn!(%error, "{kind} cannot be killed"),
        }
    }

    async fn next(&mut self) -> Happened {
        let due = self
            .parts
            .iter()
            .enumerate()
            .filter_map(|(index, part)| Some((part.due?, index)))
            .min();
        let start = async {
            match due {
                Some((at, index)) => {
                    tokio::time::sleep_until(at).await;
                    index
                }
                None => std::future::pending().await,
            }
        };
        let ended = next_end(&self.system, &mut self.parts);
        tokio::select! {
            (index, status) = ended => Happened::Ended(index, status),
            index = start => Happened::Due(index),
            Some(reported) = self.reports.recv() => Happened::Reported(reported),
        }
    }

    /// Ends the leader first, so that its copies end while the workers run; then all others at once: a child that does
    /// not end takes no time from the others.
    pub(super) async fn end_all(&mut self) {
        let parts = self.parts.iter_mut();
        let (leader, others) = parts.partition(|part| part.kind == ChildKind::Leader);
        end_each(&self.system, leader, LEADER_END_LIMIT).await;
        end_each(&self.system, others, END_LIMIT).await;
        for part in &mut self.parts {
            if let (Some(remote), ChildKind::Worker(worker), true) =
                (&self.remote, part.kind, part.child.take().is_some())
            {
                part.stating = Some(remote.state_gone(worker));
            }
        }
        for index in 0..self.parts.len() {
            self.await_statement(index).await;
        }
    }
}

/// Ends children, and kills those that run after `limit`.
async fn end_each<S: System>(system: &S, parts: Vec<&mut Part<S::Child>>, limit: Duration) {
    let ends = parts.into_iter().filter_map(|part| {
        part.due = None;
        let child = part.child.as_mut()?;
        Some(Box::pin(end(system, part.kind, child, limit)))
    });
    let mut ends: Vec<_> = ends.collect();
    std::future::poll_fn(|context| {
        ends.retain_mut(|end| end.as_mut().poll(context).is_pending());
        match ends.is_empty() {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
}

async fn end<S: System>(system: &S, kind: ChildKind, child: &mut S::Child, limit: Duration) {
    // Not by a signal: children leave signals to this process, which may have received the same one.
    if let Err(error) = system.end(child).await {
        tracing::debug!(%error, "{kind} had ended");
    }
    let ended = tokio::time::timeout(limit, system.wait(child)).await;
    if matches!(ended, Ok(Ok(_))) {
        return;
    }
    tracing::warn!("{kind} does not end: killed");
    if let Err(error) = system.kill(child) {
        tracing::warn!(%error, "{kind} cannot be killed");
    }
    let ended = tokio::time::timeout(KILL_LIMIT, system.wait(child)).await;
    if !matches!(ended, Ok(Ok(_))) {
        tracing::warn!("{kind} was killed and may still run");
    }
}

/// Waits for the first child that ends.
async fn next_end<S: System>(
    system: &S,
    parts: &mut [Part<S::Child>],
) -> (usize, io::Result<ExitStatus>) {
    let waits = parts.iter_mut().enumerate().filter_map(|(index, part)| {
        let child = part.child.as_mut()?;
        Some(Box::pin(async move { (index, system.wait(child).await) }))
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
