//! The workers of this machine for a leader on another one, as `kvferry up --leader` starts them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::task::JoinHandle;

use crate::cli::remote::{LeaderPlace, place_at};
use crate::cli::worker_gone;
use crate::config::Config;
use crate::error::CommandError;
use kvferry_transport::CertificateHolder;
use kvferry_types::{Rank, Replica, WorkerId};

/// Time in which a leader must answer the statement that a worker has ended. A worker is not started before that.
const STATEMENT_LIMIT: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, clap::Args)]
pub(super) struct RemoteWorkersArguments {
    /// Start no leader, but the workers whose credentials are in --credentials, for the leader at this address of another
    /// machine (its --listen).
    #[arg(long, value_name = "HOST:PORT")]
    leader: Option<String>,
    /// Directory with the credentials of this machine's workers, files worker-REPLICA-RANK.pem that `kvferry keygen` wrote.
    #[arg(long, value_name = "DIR")]
    credentials: Option<PathBuf>,
}

/// The address of the leader, and the credentials of each worker.
pub(super) struct RemoteWorkers {
    at: String,
    files: BTreeMap<WorkerId, PathBuf>,
}

impl RemoteWorkersArguments {
    /// Finds and checks the credentials; `None` where the leader is on this machine.
    pub(super) fn load(&self, config: &Config) -> Result<Option<RemoteWorkers>, CommandError> {
        let (at, directory) = match (&self.leader, &self.credentials) {
            (None, None) => return Ok(None),
            (Some(at), Some(directory)) => (at, directory),
            (Some(at), None) => {
                return Err(CommandError::Config(format!(
                    "leader is {at}, without credentials: add --credentials DIR, a directory with the files of this machine's workers that `kvferry keygen` wrote"
                )));
            }
            (None, Some(directory)) => {
                return Err(CommandError::Config(format!(
                    "credentials is {}, without leader: add --leader, or leave --credentials out",
                    directory.display()
                )));
            }
        };
        if config.monitor.0.is_some() {
            return Err(CommandError::Config(format!(
                "monitor is {}, with --leader: leave it out, and run the monitor beside the leader",
                config.monitor
            )));
        }
        let files = files(directory)?;
        let remote = RemoteWorkers {
            at: at.clone(),
            files,
        };
        for (worker, file) in &remote.files {
            let WorkerId { replica, rank } = *worker;
            if replica.0 >= config.replicas || rank.0 >= config.ranks {
                return Err(CommandError::Config(format!(
                    "credentials {} are of a worker beyond replicas {} and ranks {}: remove the file, or give the settings of the leader",
                    file.display(),
                    config.replicas,
                    config.ranks
                )));
            }
            remote.place(*worker)?;
        }
        Ok(Some(remote))
    }
}

/// The credentials of workers in a directory.
fn files(directory: &Path) -> Result<BTreeMap<WorkerId, PathBuf>, CommandError> {
    let failed = |error: std::io::Error| {
        CommandError::Config(format!("credentials {}: {error}", directory.display()))
    };
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if let Some(worker) = path.file_name().and_then(|name| worker_of(name.to_str()?)) {
            files.insert(worker, path);
        }
    }
    match files.is_empty() {
        false => Ok(files),
        true => Err(CommandError::Config(format!(
            "credentials {} has no file worker-REPLICA-RANK.pem: copy those of this machine's workers there",
            directory.display()
        ))),
    }
}

/// The worker that a file of `keygen` is named after.
fn worker_of(name: &str) -> Option<WorkerId> {
    let (replica, rank) = name
        .strip_prefix("worker-")?
        .strip_suffix(".pem")?
        .split_once('-')?;
    Some(WorkerId {
        replica: Replica(replica.parse().ok()?),
        rank: Rank(rank.parse().ok()?),
    })
}

impl RemoteWorkers {
    pub(super) fn workers(&self) -> impl Iterator<Item = WorkerId> {
        self.files.keys().copied()
    }

    /// The flags that a worker needs beside the settings.
    pub(super) fn flags(&self, worker: WorkerId) -> Vec<PathBuf> {
        let flag = |name: &str, value: PathBuf| [PathBuf::from(name), value];
        let file = self.files.get(&worker).cloned().unwrap_or_default();
        let leader = flag("--leader", PathBuf::from(&self.at));
        leader
            .into_iter()
            .chain(flag("--credentials", file))
            .collect()
    }

    /// The place of the leader for a worker's credentials, which are read anew: they may have been renewed.
    fn place(&self, worker: WorkerId) -> Result<LeaderPlace, CommandError> {
        let own = CertificateHolder::Worker(worker);
        let file = self.files.get(&worker).cloned().unwrap_or_default();
        place_at(&self.at, &file, &own.to_string(), |holder| holder == own)
    }

    /// States in the background that a worker's process has ended. Start no other one before the task has ended.
    pub(super) fn state_gone(&self, worker: WorkerId) -> JoinHandle<()> {
        let place = self.place(worker);
        tokio::spawn(async move {
            let place = match place {
                Ok(place) => place,
                Err(error) => {
                    tracing::warn!(%error, %worker, "the leader does not learn that the worker has ended");
                    return;
                }
            };
            match worker_gone::state(&place, worker, STATEMENT_LIMIT).await {
                Ok(true) => tracing::info!(%worker, "the leader knows that the worker has ended"),
                Ok(false) => {
                    tracing::warn!(%worker, "the leader has a later process of the worker, or sees its process itself");
                }
                Err(failure) => {
                    tracing::warn!(%failure, %worker, "the leader does not learn that the worker has ended");
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_keygen_name_their_workers() {
        let worker = |replica, rank| WorkerId {
            replica: Replica(replica),
            rank: Rank(rank),
        };
        assert_eq!(worker_of("worker-1-12.pem"), Some(worker(1, 12)));
        for other in [
            "worker-1.pem",
            "worker-1-2-3.pem",
            "worker-1-2.pem.new",
            "leader.pem",
            "worker-a-b.pem",
        ] {
            assert_eq!(worker_of(other), None, "{other}");
        }
    }
}
