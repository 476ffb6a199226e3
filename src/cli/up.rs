//! `kvferry up`: a leader and its workers on one machine, without other software.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::task::Poll;
use std::time::Duration;

use command_fds::{CommandFdExt, FdMapping};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::cli::preflight::preflight_memory;
use crate::cli::remote_workers::{RemoteWorkers, RemoteWorkersArguments};
use crate::cli::shutdown::{END_IN_ORDER, EndedBy, Ending, FenceWorker};
use crate::cli::{
    ConfigArguments, block_on, monitor, namespaces, socket_paths::SocketPaths, status,
    worker::disks,
};
use crate::config::Config;
use crate::error::{CommandError, NO_MEMORY};
use kvferry_memory::{DEPOT_HEADER_BYTES, Depot};
use kvferry_protocol::StatusAnswer;
use kvferry_transport::{DirectoryLock, TransportError, prepare_for};
use kvferry_types::{Rank, Replica, Shard, WorkerId};

/// Lock file, held while an `up` uses the socket directory.
const LOCK_NAME: &str = "up.lock";
/// Time in which children must end before they are killed.
const END_LIMIT: Duration = Duration::from_secs(10);
/// Time in which stored pages must be on the disk before the children end. A second signal ends it at once.
const FLUSH_LIMIT: Duration = Duration::from_secs(10);
/// Exit code of a child whose configuration is wrong.
const CONFIGURATION_ERROR: i32 = 78;
const RESTART_FIRST: Duration = Duration::from_millis(100);
const RESTART_MAX: Duration = Duration::from_secs(5);
/// Requests of the leader that may wait to be handled.
const LINES_MAX: usize = 64;
/// Longest line that the leader may write, in bytes.
const LINE_BYTES_MAX: u64 = 256;
/// A child that ran at least this long restarts with the shortest pause again.
const SETTLED_AFTER: Duration = Duration::from_secs(10);
/// `up` ends when a child ends this many times in a row without settling.
const FAILURES_MAX: u32 = 8;
/// Number of the file descriptor of a worker's depot.
const DEPOT_FD: i32 = 3;

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    config: ConfigArguments,
    #[command(flatten)]
    remote: RemoteWorkersArguments,
    /// End when standard input ends.
    #[arg(long, hide = true)]
    supervised: bool,
    /// Start without any tier.
    #[arg(long, hide = true)]
    no_tiers: bool,
}

/// The role of a child process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ChildKind {
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

struct Supervised {
    part: ChildKind,
    child: Option<Child>,
    /// Standard input of the child, which ends when it is closed. Taken from `child`, because waiting for a child would
    /// close it.
    input: Option<ChildStdin>,
    started: Instant,
    /// Time of the next restart; `None` while the child runs.
    restart: Option<Instant>,
    pause: Duration,
    failures: u32,
    /// A child of this part ran with its configuration.
    has_run: bool,
    /// The statement to a leader on another machine that the child has ended.
    stating: Option<JoinHandle<()>>,
}

struct Supervisor {
    config: Config,
    no_tiers: bool,
    /// The leader and the workers, where the leader is on another machine.
    remote: Option<RemoteWorkers>,
    depots: BTreeMap<Shard, Depot>,
    /// The socket of the monitor, which stays open while the monitor starts again.
    monitored: Option<TcpListener>,
    parts: Vec<Supervised>,
    /// Requests of leaders to end a worker.
    fence_requests: mpsc::Receiver<FenceWorker>,
    fence_requester: mpsc::Sender<FenceWorker>,
}

enum Happened {
    Ended(usize, Option<ExitStatus>),
    Due(usize),
    FenceWorker(FenceWorker),
}

impl Arguments {
    pub(super) fn run(self) -> Result<(), CommandError> {
        let (no_tiers, supervised) = (self.no_tiers, self.supervised);
        let config = self.config.load()?;
        let remote = self.remote.load(&config)?;
        block_on(1, async move {
            let mut ending = Ending::listen(match supervised {
                true => EndedBy::SignalOrInput,
                false => EndedBy::Signals,
            })?;
            warn_of_sizes(&config);
            warn_of_closed_folders(&config);
            let _alone = claim(&config)?;
            drop(namespaces::load(&config)?);
            // A directory that cannot be used is reported here once, and not by each process at each start.
            drop(disks(&config)?);
            let workers = workers(&config, remote.as_ref());
            let shards = workers
                .iter()
                .map(|worker| config.kv_shards.of(worker.rank));
            let shards: BTreeSet<Shard> = shards.collect();
            if !no_tiers {
                tokio::select! {
                    () = ending.requested() => return Ok(()),
                    found = preflight_memory(&config, &shards) => found?,
                }
            }
            let lasts = config.g3.0 > 0 && !no_tiers && remote.is_none();
            let socket_dir = config.socket_dir.clone();
            let mut supervisor = Supervisor::new(config, no_tiers, remote, &workers)?;
            supervisor.start_all()?;
            tokio::select! {
                () = ending.requested() => {
                    if lasts {
                        tokio::select! {
                            () = flush(&socket_dir) => {}
                            () = ending.requested() => tracing::warn!("requested again to end: pages may not be on the disk"),
                            failed = supervisor.watch() => {
                                supervisor_failed(&failed);
                                return Err(failed);
                            }
                        }
                    }
                    supervisor.end_all().await;
                    tracing::info!("all ended");
                    Ok(())
                }
                failed = supervisor.watch() => {
                    supervisor_failed(&failed);
                    Err(failed)
                }
            }
        })
    }
}

/// The workers of this machine.
fn workers(config: &Config, remote: Option<&RemoteWorkers>) -> Vec<WorkerId> {
    if let Some(remote) = remote {
        return remote.workers().collect();
    }
    let replicas = (0..config.replicas).map(Replica);
    let workers = replicas.flat_map(|replica| {
        let ranks = (0..config.ranks).map(Rank);
        ranks.map(move |rank| WorkerId { replica, rank })
    });
    workers.collect()
}

/// Creates the socket directory and locks it. Refuses a directory in which another `up` runs, because its children
/// would never become ready.
fn claim(config: &Config) -> Result<DirectoryLock, CommandError> {
    let socket_paths = SocketPaths::new(&config.socket_dir);
    let root = socket_paths.root();
    prepare_for(root, &config.users.others()).map_err(CommandError::failed)?;
    DirectoryLock::take(root, LOCK_NAME).map_err(|error| match error {
        TransportError::InUse { pid, .. } => CommandError::Failed(format!(
            "{} is in use by {}: end it, or name another --socket-dir",
            root.display(),
            pid.map_or_else(
                || "another process".to_owned(),
                |pid| format!("process {pid}")
            )
        )),
        error => CommandError::failed(error),
    })
}

/// Says which folders keep the users of the setting from the sockets. An access list may let them pass all the same.
fn warn_of_closed_folders(config: &Config) {
    if config.users.others().is_empty() {
        return;
    }
    for folder in config.socket_dir.ancestors().skip(1) {
        let mode = std::fs::metadata(folder).map(|found| found.permissions().mode());
        if mode.is_ok_and(|mode| mode & 0o001 == 0) {
            let folder = folder.display();
            tracing::warn!(%folder, users = %config.users, "others cannot pass this folder to the sockets: run chmod o+x");
        }
    }
}

/// A tier that is smaller than the one above it holds nothing that the other one does not hold.
fn warn_of_sizes(config: &Config) {
    let (g2, g3) = (config.host_memory(), config.g3);
    if g3.0 > 0 && g3.0 < g2.0 {
        tracing::warn!(
            "g3 is {g3}, less than the {g2} of host memory: pages leave the disk first, give it more"
        );
    }
}

/// Moves what is stored to the disk before the processes end, so that the next start serves it.
async fn flush(socket_dir: &Path) {
    let begun = Instant::now();
    let socket_paths = SocketPaths::new(socket_dir);
    if let Ok(status) = status::request(&socket_paths, false).await
        && holds_nothing(&status)
    {
        tracing::info!("no engine has registered: no pages are moved to the disk");
        return;
    }
    let leader = status::admin(&socket_paths, "up");
    let left = FLUSH_LIMIT.saturating_sub(begun.elapsed());
    match leader.flush(left).await {
        Ok(pages) => {
            tracing::info!(pages, took = ?begun.elapsed(), "the pages on the disk are durable")
        }
        Err(failure) => {
            tracing::warn!(%failure, "stored pages may not all be on the disk, and are computed again");
        }
    }
}

/// True if no engine has registered since the leader started, and nothing was stored.
fn holds_nothing(status: &StatusAnswer) -> bool {
    let stored = status.counters.get("blocks_stored");
    !status.ready
        && stored.is_none_or(|blocks| *blocks == 0)
        && status.ranks.iter().all(|rank| !rank.attached)
}

fn supervisor_failed(error: &CommandError) {
    tracing::error!(%error, "giving up");
}

impl Supervisor {
    fn new(
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

    fn start_all(&mut self) -> Result<(), CommandError> {
        (0..self.parts.len()).try_for_each(|index| self.start(index))
    }

    fn start(&mut self, index: usize) -> Result<(), CommandError> {
        let part = self.parts[index].part;
        let program = std::env::current_exe().map_err(CommandError::failed)?;
        let mut command = Command::new(program);
        match part {
            ChildKind::Leader => command.arg("leader"),
            ChildKind::Worker(_) => command.arg("worker"),
            ChildKind::Monitor => command.args(["monitor", "--inherits-socket"]),
        };
        let config = &self.config;
        command
            .arg("--supervised")
            .args(["--ranks", &config.ranks.to_string()])
            .args(["--kv-shards", &config.kv_shards.shards().to_string()])
            .args(["--replicas", &config.replicas.to_string()])
            .args(["--ratio", &config.ratio.to_string()])
            .args(["--g2", &config.g2.0.to_string()])
            .args(["--g2-lock", &config.g2_lock.to_string()])
            .args(["--g2-numa", &config.g2_numa.to_string()])
            .args(["--g2-policy", &config.g2_policy.to_string()])
            .args(["--g3", &config.g3.0.to_string()])
            .args(["--g3-dir", &config.g3_dir.to_string()])
            .args(["--g3-policy", &config.g3_policy.to_string()])
            .args(["--g3-depth", &config.g3_depth.to_string()])
            .args(["--g3-io", &config.g3_io.to_string()])
            .args([
                "--g3-scrub-bytes-per-s",
                &config.g3_scrub_bytes_per_s.0.to_string(),
            ])
            .args(["--g3-discard", &config.g3_discard.to_string()])
            .args([
                "--prefill-tokens-per-s",
                &config.prefill_tokens_per_s.to_string(),
            ])
            .args(["--copy-threads", &config.copy_threads.to_string()])
            .args([
                "--store-bytes-per-s",
                &config.store_bytes_per_s.0.to_string(),
            ])
            .args(["--gpu-copy", &config.gpu_copy.to_string()])
            .args(["--heartbeat-ms", &config.heartbeat_ms.to_string()])
            .args(["--wire-max", &config.wire_max.to_string()])
            .args(["--users", &config.users.to_string()])
            .args(["--monitor", &config.monitor.to_string()])
            .args(["--page-index", &config.page_index.to_string()])
            .args(["--record-decisions", &config.record_decisions.to_string()])
            .args(["--log", &config.log])
            .arg("--socket-dir")
            .arg(&config.socket_dir)
            .stdin(Stdio::piped())
            .stdout(match (part, &self.monitored) {
                (ChildKind::Leader, _) => Stdio::piped(),
                (ChildKind::Monitor, Some(listener)) => {
                    let listener = listener.try_clone().map_err(CommandError::failed)?;
                    Stdio::from(OwnedFd::from(listener))
                }
                _ => Stdio::null(),
            })
            .kill_on_drop(true);
        // The command line takes no empty path.
        if !config.namespaces.as_os_str().is_empty() {
            command.arg("--namespaces").arg(&config.namespaces);
        }
        match part {
            ChildKind::Leader if self.no_tiers => {
                command.arg("--no-tiers");
            }
            ChildKind::Leader | ChildKind::Monitor => {}
            ChildKind::Worker(WorkerId { replica, rank }) => {
                let parent_fd: OwnedFd = self.depots[&config.kv_shards.of(rank)]
                    .try_clone_fd()
                    .map_err(CommandError::failed)?;
                let mapping = FdMapping {
                    parent_fd,
                    child_fd: DEPOT_FD,
                };
                command.args(["--rank", &rank.0.to_string()]);
                command.args(["--replica", &replica.0.to_string()]);
                command.args(["--depot-fd", &DEPOT_FD.to_string()]);
                if let Some(remote) = &self.remote {
                    command.args(remote.flags(WorkerId { replica, rank }));
                }
                command
                    .fd_mappings(vec![mapping])
                    .map_err(CommandError::failed)?;
            }
        }
        let child = command.spawn();
        let mut child = child.map_err(|error| CommandError::Failed(format!("{part}: {error}")))?;
        tracing::info!(pid = child.id(), "{part} started");
        let supervised = &mut self.parts[index];
        supervised.input = child.stdin.take();
        if let Some(lines) = child.stdout.take() {
            tokio::spawn(listen(lines, self.fence_requester.clone()));
        }
        supervised.child = Some(child);
        supervised.restart = None;
        supervised.started = Instant::now();
        Ok(())
    }

    /// Restarts children that end, with growing pauses. Returns only when a child fails permanently.
    async fn watch(&mut self) -> CommandError {
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
    async fn end_all(&mut self) {
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

/// Reads the requests of a leader until its output ends. A line that cannot be parsed is logged and skipped.
async fn listen(output: ChildStdout, wants: mpsc::Sender<FenceWorker>) {
    let mut output = BufReader::new(output);
    loop {
        let mut line = String::new();
        let mut limited = (&mut output).take(LINE_BYTES_MAX);
        match limited.read_line(&mut line).await {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(%error, "requests of the leader are silent");
                return;
            }
        }
        match line.trim_end().parse() {
            Ok(wanted) => {
                if wants.send(wanted).await.is_err() {
                    return;
                }
            }
            Err(()) => tracing::warn!(line, "the leader sent an unexpected message"),
        }
    }
}
