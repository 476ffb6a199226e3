//! The processes of a live replay: `kvferry up`, and the ranks of its engines.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::process::{Child, ChildStdin, Command};

use crate::cli::engine_rank;
use crate::cli::socket_paths::SocketPaths;
use crate::error::CommandError;
use kvferry_engine::rank_pipe::RankPipe;
use kvferry_types::{EngineId, Rank, Replica, WorkerId};

use super::Arguments;
use super::workload::Workload;

/// Time in which leader, workers and ranks must be ready, host memory included.
pub(super) const START_LIMIT: Duration = Duration::from_secs(120);
/// Time in which the processes must end.
pub(super) const END_LIMIT: Duration = Duration::from_secs(30);

/// Leader and workers: started for this replay, or an `up` that already runs.
pub(super) enum Up {
    Started {
        child: Box<Child>,
        /// Held open until the end: `up` ends when its standard input is closed, and waiting for `child` would close
        /// it.
        _input: Option<ChildStdin>,
        directory: TempDir,
    },
    Attached(SocketPaths),
}

impl Up {
    pub(super) fn start(arguments: &Arguments, workload: &Workload) -> Result<Self, CommandError> {
        if let Some(directory) = &arguments.socket_dir {
            return Ok(Self::Attached(SocketPaths::new(directory)));
        }
        let owner_only = Permissions::from_mode(0o700);
        let directory = tempfile::Builder::new()
            .prefix("kvferry-replay-")
            .permissions(owner_only)
            .tempdir();
        let directory = directory.map_err(CommandError::failed)?;
        let mut child = start_up(arguments, workload, directory.path())?;
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
            Self::Attached(socket_paths) => socket_paths.clone(),
        }
    }

    /// Waits until the started `up` ends by itself, which is an error. Never returns for an `up` that was not started
    /// here.
    pub(super) async fn ended_early(&mut self) -> CommandError {
        match self {
            Self::Attached(_) => std::future::pending().await,
            Self::Started { child, .. } => CommandError::Failed(match child.wait().await {
                Ok(status) => format!("kvferry up ended early with {status}"),
                Err(error) => format!("kvferry up: {error}"),
            }),
        }
    }

    /// Ends the started `up`, which must end in time and with success.
    pub(super) async fn end(self) -> Result<(), CommandError> {
        match self {
            Self::Attached(_) => Ok(()),
            Self::Started { mut child, .. } => end_up(&mut child).await,
        }
    }
}

fn start_up(
    arguments: &Arguments,
    workload: &Workload,
    directory: &Path,
) -> Result<Child, CommandError> {
    let program = std::env::current_exe().map_err(CommandError::failed)?;
    let mut command = Command::new(program);
    command
        .args(["up", "--supervised"])
        .args(["--ranks", &arguments.ranks.to_string()])
        .args(["--kv-shards", &workload.sharding.shards().to_string()])
        .args(["--replicas", &arguments.replicas.to_string()])
        .args(["--ratio", &workload.ratio.to_string()])
        .args(["--g2", &workload.g2_bytes.max(1).to_string()])
        .args(["--g2-policy", &arguments.g2_policy.to_string()])
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
    }
    if workload.arena_pages == 0 {
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
