//! `kvferry up`: a leader and its workers on one machine, without other software.

mod claim;
mod end_flush;
mod launch;
mod preflight;
mod requests;
mod supervisor;

use std::collections::BTreeSet;

use crate::cli::remote_workers::{RemoteWorkers, RemoteWorkersArguments};
use crate::cli::shutdown::{EndedBy, Ending};
use crate::cli::{ConfigArguments, block_on, namespaces, worker::disks};
use crate::config::Config;
use crate::error::CommandError;
use claim::{claim, warn_of_closed_folders, warn_of_sizes};
use end_flush::flush;
use kvferry_types::{Rank, Replica, Shard, WorkerId};
use preflight::preflight_memory;
use supervisor::Supervisor;

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

fn supervisor_failed(error: &CommandError) {
    tracing::error!(%error, "giving up");
}
