//! `kvferry up`: a leader and its workers on one machine, without other software.

mod claim;
mod deaths;
mod end_flush;
mod launch;
mod limits;
mod part;
mod preflight;
mod reports;
mod supervisor;
mod system;

use std::collections::BTreeSet;
use std::time::Duration;

use crate::cli::arguments::ConfigArguments;
use crate::cli::common::block_on;
use crate::cli::remote_workers::{RemoteWorkers, RemoteWorkersArguments};
use crate::cli::shutdown::{EndedBy, Ending};
use crate::cli::{leader, namespaces, worker::disks};
use crate::config::Config;
use crate::error::CommandError;
use claim::{claim_disks, claim_sockets, warn_of_closed_folders, warn_of_sizes};
use end_flush::flush;
use kvferry_types::{Rank, Replica, Shard, WorkerId};
use limits::check_limits;
use preflight::preflight_memory;
use supervisor::Supervisor;
use system::{Linux, System};

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

/// The processes that `up` runs.
struct Plan {
    config: Config,
    /// The leader and the workers, where the leader is on another machine.
    remote: Option<RemoteWorkers>,
    no_tiers: bool,
}

impl Arguments {
    pub(super) fn run(self) -> Result<(), CommandError> {
        let (no_tiers, supervised) = (self.no_tiers, self.supervised);
        let config = self.config.load()?;
        let remote = self.remote.load(&config)?;
        let plan = Plan {
            config,
            remote,
            no_tiers,
        };
        block_on(1, async move {
            let mut ending = Ending::listen(match supervised {
                true => EndedBy::SignalOrInput,
                false => EndedBy::Signals,
            })?;
            supervise(Linux, plan, async || ending.requested().await).await
        })
    }
}

/// Runs the processes until their end is requested, or one of them fails permanently. `requested` returns at each request.
async fn supervise<S: System>(
    system: S,
    plan: Plan,
    mut requested: impl AsyncFnMut(),
) -> Result<(), CommandError> {
    let Plan {
        config,
        remote,
        no_tiers,
    } = plan;
    warn_of_sizes(&config);
    warn_of_closed_folders(&config);
    let _alone = claim_sockets(&system, &config)?;
    drop(namespaces::load(&config)?);
    // A directory that cannot be used is reported here once, and not by each process at each start.
    let tier = disks(&config, None)?.map(|disks| disks.known().clone());
    // Several `up` may share a disk for a leader on another machine: each has shards of its own there.
    let _disks = match &remote {
        None => claim_disks(&system, &config)?,
        Some(_) => None,
    };
    if let (None, Some(first)) = (&remote, config.g3_dir.0.first()) {
        leader::until_free(first).await?;
    }
    let workers = workers(&config, remote.as_ref());
    let shards = workers
        .iter()
        .map(|worker| config.kv_shards.of(worker.rank));
    let shards: BTreeSet<Shard> = shards.collect();
    check_limits(&config, &workers, &shards, no_tiers)?;
    if !no_tiers {
        tokio::select! {
            () = requested() => return Ok(()),
            found = preflight_memory(&config, &shards) => found?,
        }
    }
    let lasts = config.g3.0 > 0 && !no_tiers && remote.is_none();
    let socket_dir = config.socket_dir.clone();
    let flush_limit = Duration::from_secs(config.flush_limit_s.into());
    let mut supervisor = Supervisor::new(system, config, no_tiers, (remote, tier), &workers)?;
    tokio::select! {
        () = requested() => {}
        failed = supervisor.watch() => return Err(gave_up(failed)),
    }
    if lasts {
        tokio::select! {
            () = flush(&socket_dir, flush_limit) => {}
            () = requested() => tracing::warn!("requested again to end: pages may not be on the disk"),
            failed = supervisor.watch() => return Err(gave_up(failed)),
        }
    }
    supervisor.end_all().await;
    tracing::info!("all ended");
    Ok(())
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

fn gave_up(error: CommandError) -> CommandError {
    tracing::error!(%error, "giving up");
    error
}

#[cfg(test)]
mod faults;
