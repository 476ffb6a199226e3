//! `kvferry worker`

use std::fs::OpenOptions;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::time::Duration;

use tokio::sync::watch;

use crate::cli::arguments::ConfigArguments;
use crate::cli::common::{block_on, open_as_many_files_as_allowed};
use crate::cli::remote::LeaderArguments;
use crate::cli::shutdown::{ChildReport, EndedBy, Ending, end_with_supervisor};
use crate::cli::socket_paths::{SocketPaths, prepare_sockets};
use crate::config::Config;
use crate::error::CommandError;
use kvferry_actors::{DepotSettings, DiskSettings, WorkerArguments, run_worker};
use kvferry_memory::{DEPOT_HEADER_BYTES, NumaNode};
use kvferry_protocol::{FEATURE_TIMELINE, Hello, Role};
use kvferry_tiers::disk::{DiskDirectories, KnownTier};
use kvferry_transport::{
    Address, CertificateHolder, Client, ClientSettings, FdReceiver, Limits, Server, ServerSettings,
    Transport, ZmqTransport,
};
use kvferry_types::{Epoch, Rank, Replica, WorkerId};

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    config: ConfigArguments,
    /// The rank that this worker serves.
    #[arg(long)]
    rank: u16,
    /// The engine whose rank it is.
    #[arg(long, default_value_t = 0)]
    replica: u16,
    #[command(flatten)]
    leader: LeaderArguments,
    /// Descriptor of the memory that a supervisor holds for this worker's depot.
    #[arg(long, hide = true)]
    depot_fd: Option<u32>,
    /// The disk tier that the supervisor has opened.
    #[arg(long, hide = true)]
    g3_tier: Option<KnownTier>,
    /// Seconds for which a GPU is kept after its last engine has left.
    #[arg(long, hide = true)]
    gpu_idle_s: Option<u64>,
    /// End when standard input ends.
    #[arg(long, hide = true)]
    supervised: bool,
}

impl Arguments {
    pub(super) fn run(self) -> Result<(), CommandError> {
        let config = self.config.load()?;
        end_with_supervisor(self.supervised)?;
        let worker = WorkerId {
            replica: Replica(self.replica),
            rank: Rank(self.rank),
        };
        if self.replica >= config.replicas {
            return Err(CommandError::Config(format!(
                "replica is {}: there are {} replicas, so it is 0 to {}",
                self.replica,
                config.replicas,
                config.replicas - 1
            )));
        }
        if self.rank >= config.ranks {
            return Err(CommandError::Config(format!(
                "rank is {}: there are {} ranks, so it is 0 to {}",
                self.rank,
                config.ranks,
                config.ranks - 1
            )));
        }
        let socket_paths = SocketPaths::new(&config.socket_dir);
        let own = CertificateHolder::Worker(worker);
        let place = self
            .leader
            .load(&socket_paths, &own.to_string(), |holder| holder == own)?;
        let node = config.g2_numa.of(config.kv_shards.of(worker.rank));
        let node = node.map(NumaNode::find).transpose();
        let node = node.map_err(|error| CommandError::Config(error.to_string()))?;
        let held = self.depot_fd.map(reopen).transpose()?;
        open_as_many_files_as_allowed();
        block_on(2, async move {
            let mut ending = Ending::listen(EndedBy::child(self.supervised))?;
            let users = config.users.others();
            prepare_sockets(socket_paths.root(), &users)?;
            let directory = socket_paths.worker(worker);
            let listener = ZmqTransport
                .listen(
                    &Address::Directory(directory.clone()),
                    Limits::default().with_users(users.clone()),
                )
                .await
                .map_err(CommandError::failed)?;
            let fds = FdReceiver::bind_for(&directory, users).map_err(CommandError::failed)?;
            let server = Server::new(
                listener,
                ServerSettings {
                    epoch: Epoch(0),
                    heartbeat: Duration::from_millis(config.heartbeat_ms),
                    roles: vec![Role::Rank, Role::Admin],
                    features: FEATURE_TIMELINE,
                    worker_seats: None,
                },
            )
            .with_version_max(config.wire_max);
            let hello = Hello {
                rank: self.rank,
                replica: self.replica,
                version_max: config.wire_max,
                ..Hello::new(Role::Worker, format!("worker of {worker}"))
            };
            let settings = ClientSettings {
                address: place.address,
                hello,
                limits: Limits::default(),
            };
            let (leader, incoming) = Client::start(place.transport, settings);
            let threads = usize::from(config.copy_threads);
            let (ready, is_ready) = watch::channel(false);
            let bytes = config.host_memory().0 / u64::from(config.kv_shards.shards());
            let arguments = WorkerArguments {
                worker,
                sharding: config.kv_shards,
                server,
                fds,
                leader,
                incoming,
                depot: DepotSettings {
                    held,
                    bytes: bytes.max(DEPOT_HEADER_BYTES),
                    threads,
                    node,
                    gpu: usize::from(self.replica) * usize::from(config.ranks)
                        + usize::from(self.rank),
                    lock: config.g2_lock,
                    ready,
                },
                disk: disk(&config, worker, self.g3_tier.as_ref())?,
                copy_threads: threads,
                store_bytes_per_s: NonZeroU64::new(config.store_bytes_per_s.0),
                gpu_copy: config.gpu_copy,
                set_log: Some(crate::telemetry::change),
                gpu_idle: self.gpu_idle_s.map(Duration::from_secs),
            };
            let mut process = run_worker(arguments).await.map_err(CommandError::failed)?;
            tracing::info!(%worker, "worker ready");
            tokio::select! {
                () = ending.requested() => {}
                why = process.failed() => return Err(match *is_ready.borrow() {
                    true => CommandError::Failed(why),
                    false => CommandError::NoMemory(why),
                }),
                () = report_ready(self.supervised, is_ready.clone()) => {}
            }
            process.stop().await;
            tracing::info!(%worker, "worker ended");
            Ok(())
        })
    }
}

/// Reports to the supervisor once the host memory is ready. Never returns.
async fn report_ready(supervised: bool, mut is_ready: watch::Receiver<bool>) {
    if is_ready.wait_for(|ready| *ready).await.is_ok() && supervised {
        ChildReport::Ready.send();
    }
    std::future::pending().await
}

/// The directories of the disk tier, with the setting. Creates those that do not exist, unless the supervisor has opened
/// the tier: its disks may not be mounted now.
pub(super) fn disks(
    config: &Config,
    known: Option<&KnownTier>,
) -> Result<Option<DiskDirectories>, CommandError> {
    let opened = (config.g3.0 > 0).then(|| match known {
        Some(known) => DiskDirectories::of_known(&config.g3_dir.0, known.clone()),
        None => DiskDirectories::open(&config.g3_dir.0),
    });
    let opened = opened.transpose();
    let opened = opened.map(|opened| Some(opened?.for_shards(config.kv_shards.shards())));
    opened.map_err(|error| CommandError::Config(error.to_string()))
}

/// Settings of this worker's disk.
fn disk(
    config: &Config,
    worker: WorkerId,
    known: Option<&KnownTier>,
) -> Result<Option<DiskSettings>, CommandError> {
    let shards = config.kv_shards.shards();
    let disks = disks(config, known)?;
    Ok(disks.map(|directories| DiskSettings {
        directories,
        shard: config.kv_shards.of(worker.rank).0,
        shards,
        ratio: config.ratio.pages(),
        cap_bytes: config.g3.0 / u64::from(shards),
        depth: config.g3_depth.into(),
        io: config.g3_io,
        scrub_bytes_per_s: config.g3_scrub_bytes_per_s.0,
        shared: config.replicas > 1,
        discard: config.g3_discard,
    }))
}

/// Reopens an inherited descriptor by its name in `/proc`.
fn reopen(fd: u32) -> Result<OwnedFd, CommandError> {
    let path = format!("/proc/self/fd/{fd}");
    let file = OpenOptions::new().read(true).write(true).open(&path);
    file.map(OwnedFd::from)
        .map_err(|error| CommandError::Failed(format!("{path}: {error}")))
}
