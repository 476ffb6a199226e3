//! `kvferry worker-gone`: states to a leader on another machine that a worker of this machine has ended.

use std::cell::Cell;
use std::path::PathBuf;
use std::time::Duration;

use crate::cli::arguments::LocalArguments;
use crate::cli::common::{block_on, print_line};
use crate::cli::remote::{LeaderArguments, LeaderPlace};
use crate::cli::socket_paths::SocketPaths;
use crate::error::CommandError;
use kvferry_protocol::{Hello, Role, WorkerGone};
use kvferry_transport::{
    CertificateHolder, Client, ClientSettings, DirectoryLock, Failure, Limits, TransportError,
};
use kvferry_types::WorkerId;

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    local: LocalArguments,
    #[command(flatten)]
    leader: LeaderArguments,
    /// The worker ran on a machine that is off: its lock is not looked for here. A worker that runs although this is
    /// stated corrupts pages.
    #[arg(long)]
    host_is_off: bool,
    /// Seconds within which the leader must answer.
    #[arg(long, default_value = "10", value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
}

impl Arguments {
    pub(super) fn run(self) -> Result<(), CommandError> {
        let limit = Duration::from_secs(self.timeout);
        let socket_paths = self.local.load()?;
        if !self.leader.is_given() {
            return Err(CommandError::Config(
                "leader is missing: give --leader HOST:PORT and --credentials of the worker; the leader of this machine sees the ends of its workers itself".to_owned(),
            ));
        }
        let named = Cell::new(None);
        let is_worker = |holder| match holder {
            CertificateHolder::Worker(worker) => {
                named.set(Some(worker));
                true
            }
            _ => false,
        };
        let place = self.leader.load(&socket_paths, "the worker", is_worker)?;
        let Some(worker) = named.get() else {
            return Err(CommandError::Failed(
                "the credentials name no worker".to_owned(),
            ));
        };
        // Held until the connection has ended: no process of the worker starts meanwhile.
        let _lock = match self.host_is_off {
            true => None,
            false => Some(lock(&socket_paths, worker)?),
        };
        block_on(1, async move {
            place.check_trust().await?;
            let gone = state(&place, worker, limit).await;
            match gone.map_err(CommandError::failed)? {
                true => print_line(&format!(
                    "the leader counts the worker of {worker} as ended"
                )),
                false => {
                    return Err(CommandError::Failed(format!(
                        "the worker of {worker} has connected meanwhile, is on the leader's machine, or has no seat by the leader's settings: nothing was changed"
                    )));
                }
            }
            Ok(())
        })
    }
}

/// Takes the lock that a worker of this machine holds while it runs.
fn lock(socket_paths: &SocketPaths, worker: WorkerId) -> Result<DirectoryLock, CommandError> {
    let directory: PathBuf = socket_paths.worker(worker);
    if !directory.is_dir() {
        return Err(CommandError::Failed(format!(
            "{} does not exist, so that the worker's lock cannot be looked at: give its --socket-dir, or --host-is-off if its machine is off",
            directory.display()
        )));
    }
    DirectoryLock::of_listener(&directory).map_err(|error| match error {
        TransportError::InUse { by, .. } => {
            CommandError::Failed(format!("the worker of {worker} runs as {by}: end it first"))
        }
        error => CommandError::failed(error),
    })
}

/// States that no process of a worker has run since before the call, and none starts before its end. Returns whether the
/// statement had an effect.
///
/// # Errors
/// [`Failure`] with `deadline` when no leader answers within `limit`.
pub(super) async fn state(
    place: &LeaderPlace,
    worker: WorkerId,
    limit: Duration,
) -> Result<bool, Failure> {
    let hello = Hello {
        replica: worker.replica.0,
        rank: worker.rank.0,
        ..Hello::new(Role::Supervisor, format!("supervisor of {worker}"))
    };
    let settings = ClientSettings {
        address: place.address.clone(),
        hello,
        limits: Limits::default(),
    };
    let client = Client::without_incoming(place.transport.clone(), settings);
    let answer = client.call(WorkerGone {}, limit).await?;
    Ok(answer.gone)
}
