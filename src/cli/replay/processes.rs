//! The processes of a live replay: `kvferry up`, and the ranks of its engines.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::process::{Child, ChildStdin};
use tokio::time::Instant;

use crate::cli::socket_paths::SocketPaths;
use crate::cli::{engine_rank, program, status, temporary};
use crate::error::CommandError;
use kvferry_engine::rank_pipe::RankPipe;
use kvferry_protocol::StatusAnswer;
use kvferry_types::{EngineId, Rank, Ratio, Replica, WorkerId};

use super::Arguments;
use super::workload::Workload;

/// Time in which leader, workers and ranks must be ready, host memory included.
pub(super) const START_LIMIT: Duration = Duration::from_secs(120);
/// Time in which the processes must end.
pub(super) const END_LIMIT: Duration = Duration::from_secs(30);

/// Pause between two looks at killed processes.
const KILL_PAUSE: Duration = Duration::from_millis(5);

/// Leader and workers: started for this replay, or an `up` that already runs.
pub(super) enum Up {
    Started {
        child: Box<Child>,
        /// Held open until the end: `up` ends when its standard input is closed, and waiting for `child` would close
        /// it.
        _input: Option<ChildStdin>,
        directory: TempDir,
    },
    Attached {
        socket_paths: SocketPaths,
        /// What its leader had counted before the replay.
        before: Box<StatusAnswer>,
    },
}

impl Up {
    /// # Errors
    /// Also if no leader answers in the directory of an `up` that is to be used.
    pub(super) async fn start(settings: &UpSettings<'_>) -> Result<Self, CommandError> {
        if let Some(directory) = &settings.arguments.socket_dir {
            let socket_paths = SocketPaths::new(directory);
            let before = Box::new(status::request(&socket_paths, false).await?);
            return Ok(Self::Attached {
                socket_paths,
                before,
            });
        }
        let directory = temporary::socket_dir("kvferry-replay-")?;
        let mut child = start_up(settings, directory.path())?;
        let _input = child.stdin.take();
        Ok(Self::Started {
            child: Box::new(child),
            _input,
            directory,
        })
    }

    pub(super) fn socket_paths(&self) -> SocketPaths {
        match self {
            Self::Started { directory, .. } => SocketPaths::new(directory.path()),
            Self::Attached { socket_paths, .. } => socket_paths.clone(),
        }
    }

    /// What the leader of an `up` that already ran had counted before the replay.
    pub(super) fn before(&self) -> Option<&StatusAnswer> {
        match self {
            Self::Started { .. } => None,
            Self::Attached { before, .. } => Some(before),
        }
    }

    /// Waits until the started `up` ends by itself, which is an error. Never returns for an `up` that was not started
    /// here.
    pub(super) async fn ended_early(&mut self) -> CommandError {
        match self {
            Self::Attached { .. } => std::future::pending().await,
            Self::Started { child, .. } => CommandError::Failed(match child.wait().await {
                Ok(status) => format!("kvferry up ended early with {status}"),
                Err(error) => format!("kvferry up: {error}"),
            }),
        }
    }

    /// Kills the started `up`, its leader and its workers, and waits until none of them runs.
    pub(super) async fn kill(self) -> Result<(), CommandError> {
        let Self::Started { mut child, .. } = self else {
            return Ok(());
        };
        let children = child.id().map(children_of).unwrap_or_default();
        child.kill().await.map_err(CommandError::failed)?;
        for pid in &children {
            // They end with `up`, too.
            if let Err(error) = kill_process(*pid, Signal::KILL) {
                tracing::debug!(%error, "a child of up had ended");
            }
        }
        let limit = Instant::now() + END_LIMIT;
        while children.iter().any(|pid| runs(*pid)) {
            if Instant::now() >= limit {
                let text = format!("killed processes still run after {END_LIMIT:?}");
                return Err(CommandError::Failed(text));
            }
            tokio::time::sleep(KILL_PAUSE).await;
        }
        Ok(())
    }

    /// Ends the started `up`, which must end in time and with success.
    pub(super) async fn end(self) -> Result<(), CommandError> {
        match self {
            Self::Attached { .. } => Ok(()),
            Self::Started { mut child, .. } => end_up(&mut child).await,
        }
    }
}

/// Processes whose parent is this one.
fn children_of(parent: u32) -> Vec<Pid> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten();
    let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let pids = pids.filter_map(Pid::from_raw);
    let is_child = |pid: &Pid| stat(*pid).is_some_and(|(_, found)| found == parent);
    pids.filter(is_child).collect()
}

/// Whether a process has not ended. A zombie has.
fn runs(pid: Pid) -> bool {
    stat(pid).is_some_and(|(state, _)| !matches!(state, 'Z' | 'X'))
}

/// State letter and parent of a process.
fn stat(pid: Pid) -> Option<(char, u32)> {
    let path = format!("/proc/{}/stat", pid.as_raw_pid());
    let text = std::fs::read_to_string(path).ok()?;
    let mut words = text.rsplit_once(')')?.1.split_whitespace();
    let state = words.next()?.chars().next()?;
    Some((state, words.next()?.parse().ok()?))
}

/// Sizes and settings of an `up` that is started for a replay.
pub(super) struct UpSettings<'a> {
    pub(super) ranks: u16,
    pub(super) shards: u16,
    pub(super) replicas: u16,
    pub(super) ratio: Ratio,
    /// Host memory of all ranks together, in bytes; 0 for none.
    pub(super) g2_bytes: u64,
    pub(super) arguments: &'a Arguments,
}

fn start_up(settings: &UpSettings<'_>, directory: &Path) -> Result<Child, CommandError> {
    let arguments = settings.arguments;
    let mut command = program::command();
    command
        .args(["up", "--supervised"])
        .args(["--ranks", &settings.ranks.to_string()])
        .args(["--kv-shards", &settings.shards.to_string()])
        .args(["--replicas", &settings.replicas.to_string()])
        .args(["--ratio", &settings.ratio.to_string()])
        .args(["--g2", &settings.g2_bytes.max(1).to_string()])
        .args(["--g2-policy", &arguments.policy().to_string()])
        .args(["--log", &arguments.log])
        .arg("--record-decisions")
        .arg("--socket-dir")
        .arg(directory)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .kill_on_drop(true);
    if let (Some(g3), Some(directories)) = (arguments.g3, &arguments.g3_dir) {
        let directories = directories.absolute().map_err(CommandError::failed)?;
        command.args(["--g3", &g3.0.to_string()]);
        command.args(["--g3-dir", &directories.to_string()]);
        if arguments.sequential {
            // Copies end in their order then, as offline: which pages a move takes depends on the ends of those before.
            command.args(["--g3-depth", "1", "--copy-threads", "1"]);
        }
    }
    if settings.g2_bytes == 0 {
        command.arg("--no-tiers");
    }
    command.spawn().map_err(CommandError::failed)
}

/// Sends SIGTERM to `up`, which must end in time and with success.
async fn end_up(up: &mut Child) -> Result<(), CommandError> {
    let pid = up
        .id()
        .and_then(|id| i32::try_from(id).ok())
        .and_then(Pid::from_raw);
    let Some(pid) = pid else { return Ok(()) };
    kill_process(pid, Signal::TERM).map_err(CommandError::failed)?;
    match tokio::time::timeout(END_LIMIT, up.wait()).await {
        Ok(Ok(status)) if status.success() => Ok(()),
        Ok(Ok(status)) => Err(CommandError::Failed(format!(
            "kvferry up ended with {status}"
        ))),
        Ok(Err(error)) => Err(CommandError::failed(error)),
        Err(_) => Err(CommandError::Failed(format!(
            "kvferry up did not end in {END_LIMIT:?}"
        ))),
    }
}

/// Starts the ranks of one engine, which register by themselves.
pub(super) fn start_ranks(
    arguments: &Arguments,
    workload: &Workload,
    socket_paths: &SocketPaths,
    engine: EngineId,
    replica: Replica,
) -> Result<Vec<RankPipe>, CommandError> {
    let start = |rank| {
        let worker = WorkerId {
            replica,
            rank: Rank(rank),
        };
        let rank = engine_rank::Arguments {
            worker_dir: socket_paths.worker(worker),
            engine,
            replica: replica.0,
            rank,
            ranks: arguments.ranks,
            engine_page_tokens: workload.unit_tokens,
            device_pages: workload.device_pages,
            model: arguments.model,
            device: arguments.device.unwrap_or_default(),
            layout: arguments.layout.unwrap_or_default(),
            start_limit_s: START_LIMIT.as_secs(),
        };
        rank.start()
    };
    (0..arguments.ranks).map(start).collect()
}
