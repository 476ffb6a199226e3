//! `kvferry leader`

use std::fs;
use std::io::{self, ErrorKind};
use std::num::NonZeroU64;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::cli::arguments::ConfigArguments;
use crate::cli::common::{block_on, open_as_many_files_as_allowed, random};
use crate::cli::remote::{ListenArguments, listen};
use crate::cli::shutdown::{
    ChildReport, DRAIN_LIMIT, EndedBy, Ending, FenceWorker, end_with_supervisor,
};
use crate::cli::worker::disks;
use crate::cli::{
    disk_room,
    lock_holder::lock_holder,
    namespaces, restarts,
    socket_paths::{SocketPaths, prepare_sockets},
};
use crate::config::Config;
use crate::error::CommandError;
use kvferry_actors::{EndWorker, LeaderArguments, ReadRestarts, run_leader};
use kvferry_core::{AnchorKey, LeaderSettings, MoveEdge};
use kvferry_protocol::{FEATURE_TAILS, Role};
use kvferry_tiers::disk::{KnownTier, is_full};
use kvferry_transport::{Limits, OtherUsers, OwnDirectory, Server, ServerSettings, prepare_for};
use kvferry_types::{Epoch, PerTier, TierId, WorkerId};

/// How long a leader waits for the one before, which may still be ending.
const LOCK_LIMIT: Duration = Duration::from_secs(5);
const LOCK_PAUSE: Duration = Duration::from_millis(20);
/// How long a leader waits for disks that are not mounted. `up` starts another one then, a few times.
const MOUNT_LIMIT: Duration = Duration::from_secs(60);
const MOUNT_PAUSE: Duration = Duration::from_millis(200);
/// File with the secret key of the anchors.
const ANCHOR_KEY: &str = "anchor-key";
/// File with the epoch of the last leader.
const EPOCH: &str = "epoch";

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    config: ConfigArguments,
    #[command(flatten)]
    remote: ListenArguments,
    /// End when standard input ends.
    #[arg(long, hide = true)]
    supervised: bool,
    /// Serve lookups without any tier: every store is refused.
    #[arg(long, hide = true)]
    no_tiers: bool,
    /// The disk tier that the supervisor has opened.
    #[arg(long, hide = true)]
    g3_tier: Option<KnownTier>,
}

impl Arguments {
    pub(super) fn run(self) -> Result<(), CommandError> {
        let config = self.config.load()?;
        let remote = self.remote.load()?;
        end_with_supervisor(self.supervised)?;
        open_as_many_files_as_allowed();
        // One thread: a message passes through several tasks, and waking another thread for each would take longer than
        // most requests.
        block_on(1, async move {
            let mut ending = Ending::listen(EndedBy::child(self.supervised))?;
            let socket_paths = SocketPaths::new(&config.socket_dir);
            let users = config.users.others();
            prepare_sockets(socket_paths.root(), &users)?;
            let namespaces = Arc::new(namespaces::load(&config)?);
            namespaces::log_doubts(&config, &namespaces);
            let limits = Limits::of_leader(config.ranks, config.replicas).with_users(users);
            let mut requested = pin!(ending.requested());
            let has_disks = tokio::select! {
                () = &mut requested => return Ok(()),
                found = until_mounted(&config, self.g3_tier.as_ref()) => found?,
            };
            let listener = listen(&socket_paths.leader_address(), remote, limits)
                .await
                .map_err(CommandError::failed)?;
            // Held to the end: two leaders would give the same numbers to different stores.
            let mut lock = None;
            // Beside the tier that lasts longest: without the key, nothing in it is found.
            let directory = match has_disks {
                true => {
                    let directory = config.g3_dir.0[0].join("leader");
                    let prepared = prepare_for(&directory, &OtherUsers::default())
                        .map_err(CommandError::failed)?;
                    lock = Some(take(&directory, &config.g3_dir.0[0]).await?);
                    disk_room::warn_of_small_disks(config.g3, &config.g3_dir.0);
                    prepared
                }
                false => {
                    OwnDirectory::open(&socket_paths.leader()).map_err(CommandError::failed)?
                }
            };
            let epoch = next_epoch(&directory, write_epoch)?;
            if lock.is_some() && !directory.contains(ANCHOR_KEY) {
                warn_of_lost_key(&config.g3_dir.0[0]);
            }
            let key = anchor_key(&directory)?;
            let key = AnchorKey::new(key).with_namespaces(Arc::clone(&namespaces));
            let mut settings = LeaderSettings::new(epoch, config.ranks, config.ratio, key);
            settings.namespaces = namespaces;
            settings.halves_held_pages = true;
            settings.sharding = config.kv_shards;
            settings.replicas = config.replicas;
            settings.tier_policies = PerTier::host(config.g2_policy.clone());
            settings.accepts_empty_depots = self.no_tiers;
            let depot_bytes = config.host_memory().0 / u64::from(config.kv_shards.shards());
            settings.depot_bytes = PerTier::host(depot_bytes);
            if config.g3.0 > 0 {
                settings.tiers = vec![TierId::Host, TierId::Disk];
                settings.moves = MoveEdge::between(&settings.tiers);
                settings
                    .tier_policies
                    .insert(TierId::Disk, config.g3_policy.clone());
            }
            settings.prefill_tokens_per_s = NonZeroU64::new(config.prefill_tokens_per_s.into());
            settings.page_index = config.page_index;
            settings.record_decisions = config.record_decisions;
            let server = Server::new(
                listener,
                ServerSettings {
                    epoch,
                    heartbeat: Duration::from_millis(config.heartbeat_ms),
                    roles: vec![Role::Engine, Role::Worker, Role::Admin, Role::Supervisor],
                    features: features(&config),
                    worker_seats: Some((config.replicas, config.ranks)),
                },
            )
            .with_version_max(config.wire_max);
            let supervisor = self
                .supervised
                .then(|| Box::new(request_fence) as EndWorker);
            let started = run_leader(LeaderArguments {
                settings,
                server,
                supervisor,
                set_log: Some(crate::telemetry::change),
                restarts: self.supervised.then(|| read_restarts(&socket_paths)),
                raise_epoch: Some(Box::new(move |seen| Ok(raise_epoch(&directory, seen)?))),
            })
            .await;
            let (mut process, leader) = started.map_err(CommandError::failed)?;
            tracing::info!(
                epoch = epoch.0,
                ranks = config.ranks,
                replicas = config.replicas,
                ratio = config.ratio.pages(),
                "leader ready"
            );
            if self.supervised {
                ChildReport::Ready.send();
            }
            tokio::select! {
                () = requested => {}
                why = process.failed() => return Err(CommandError::Failed(why)),
            }
            if !leader.drain(DRAIN_LIMIT).await {
                tracing::warn!("copies were still under way after {DRAIN_LIMIT:?}");
            }
            process.stop().await;
            drop(lock);
            tracing::info!("leader ended");
            Ok(())
        })
    }
}

/// Returns whether there is a disk tier. Waits until the disks of one that the supervisor has opened are mounted: on another
/// disk, the key of the tier and its epoch would be made anew, and no page would be found.
async fn until_mounted(config: &Config, known: Option<&KnownTier>) -> Result<bool, CommandError> {
    let Some(directories) = disks(config, known)? else {
        return Ok(false);
    };
    if known.is_none() {
        return Ok(true);
    }
    let until = Instant::now() + MOUNT_LIMIT;
    let mut warned = false;
    while let Err(error) = directories.reopened() {
        if Instant::now() >= until {
            return Err(CommandError::Failed(error.to_string()));
        }
        if !warned {
            tracing::warn!(%error, "no leader can start: waiting for the disk");
            warned = true;
        }
        tokio::time::sleep(MOUNT_PAUSE).await;
    }
    Ok(true)
}

/// The features of a leader with this configuration.
fn features(config: &Config) -> u64 {
    let tails = config.page_index || config.ratio.pages() == 1;
    if tails { FEATURE_TAILS } else { 0 }
}

/// Reads what the supervisor counts, for the status.
fn read_restarts(socket_paths: &SocketPaths) -> ReadRestarts {
    let path = socket_paths.restarts();
    Box::new(move || restarts::read(&path))
}

/// Requests the supervisor, over standard output, to end a worker. The leader repeats the request while the worker
/// stays silent.
fn request_fence(worker: WorkerId, pid: Option<i32>) {
    ChildReport::Fence(FenceWorker { worker, pid }).send();
}

/// Waits until no leader and no `fsck` uses a disk tier. A leader whose supervisor was killed may still be ending.
pub(super) async fn until_free(tier: &Path) -> Result<(), CommandError> {
    let directory = tier.join("leader");
    match directory.is_dir() {
        true => take(&directory, tier).await.map(drop),
        false => Ok(()),
    }
}

/// Takes the lock of the leader's directory of a disk tier. A leader that was killed releases it as it ends.
async fn take(directory: &Path, tier: &Path) -> Result<fs::File, CommandError> {
    let until = Instant::now() + LOCK_LIMIT;
    let failed =
        |error: io::Error| CommandError::Failed(format!("{}: {error}", directory.display()));
    let opened = fs::File::open(directory).map_err(failed)?;
    loop {
        match flock(&opened, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(opened),
            Err(Errno::AGAIN) if Instant::now() < until => tokio::time::sleep(LOCK_PAUSE).await,
            Err(Errno::AGAIN) => {
                let process = lock_holder(directory)
                    .map_or_else(String::new, |pid| format!(", process {pid}"));
                return Err(CommandError::Failed(format!(
                    "g3_dir {} is in use by another leader or by fsck{process}: end it, or name another g3_dir",
                    tier.display()
                )));
            }
            Err(error) => return Err(failed(error.into())),
        }
    }
}

/// Says that the pages of a tier whose leader's key is gone are not found.
fn warn_of_lost_key(tier: &Path) {
    let shards = fs::read_dir(tier).into_iter().flatten().flatten();
    let shards = shards.filter(|entry| entry.file_name().to_string_lossy().starts_with("shard-"));
    // A worker that starts at the same time makes a directory of a shard without a set of pages.
    let below = shards.flat_map(|shard| fs::read_dir(shard.path()).into_iter().flatten().flatten());
    if below.into_iter().any(|entry| entry.path().is_dir()) {
        tracing::warn!(
            g3_dir = %tier.display(),
            "leader/anchor-key is missing: no page on the disk is found, and all make room for new ones"
        );
    }
}

/// Returns the secret key of the anchors, which all leaders of this directory share. With another key, no page in the
/// depots would be found.
fn anchor_key(directory: &OwnDirectory) -> Result<[u8; 32], CommandError> {
    let path = directory.path().join(ANCHOR_KEY);
    let failed = |error: io::Error| CommandError::Failed(format!("{}: {error}", path.display()));
    match directory.read(ANCHOR_KEY) {
        Ok(bytes) => <[u8; 32]>::try_from(bytes.as_slice()).map_err(|_| {
            CommandError::Failed(format!(
                "{} has {} bytes, not 32: remove it when no leader runs here; the contents of the depots are lost then",
                path.display(),
                bytes.len()
            ))
        }),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let mut key = [0; 32];
            random(&mut key)?;
            directory.replace(ANCHOR_KEY, &key).map_err(failed)?;
            Ok(key)
        }
        Err(error) => Err(failed(error)),
    }
}

/// Returns the number after the last leader's in this directory, and stores it in a file that is replaced atomically.
/// If the file is missing, the number is the time in milliseconds: depots and workers may have seen epochs of earlier
/// leaders, which counted from an earlier time, and leaders start less often than once a millisecond. If the clock was
/// set back in between, a worker reports the epoch that its depot has seen, and [`raise_epoch`] raises the file.
fn next_epoch(
    directory: &OwnDirectory,
    write: impl FnOnce(&OwnDirectory, u64) -> io::Result<()>,
) -> Result<Epoch, CommandError> {
    let path = directory.path().join(EPOCH);
    let path = path.display();
    let last = match directory.read(EPOCH) {
        Ok(text) => {
            let number = str::from_utf8(&text).ok();
            let number = number.and_then(|text| text.trim().parse::<u64>().ok());
            number.ok_or_else(|| {
                CommandError::Failed(format!(
                    "{path} holds no number: remove it when no leader runs here"
                ))
            })?
        }
        Err(error) if error.kind() == ErrorKind::NotFound => unix_ms(),
        Err(error) => return Err(CommandError::Failed(format!("{path}: {error}"))),
    };
    let next = last.checked_add(1).ok_or_else(|| {
        CommandError::Failed(format!(
            "{path} holds the largest possible number: stop the workers, remove it, and start them again"
        ))
    })?;
    match write(directory, next) {
        Ok(()) => Ok(Epoch(next)),
        // Host memory is served all the same. The time is later than the epochs of all leaders before, as without a file.
        // The next leader whose epoch is noted again may begin before it, and is raised by what the depots have seen.
        Err(error) if is_full(&error) || error.kind() == ErrorKind::ReadOnlyFilesystem => {
            tracing::warn!(%path, %error, "the disk takes no writes: the epoch of this leader is the time");
            Ok(Epoch(next.max(unix_ms())))
        }
        Err(error) => Err(CommandError::Failed(format!("{path}: {error}"))),
    }
}

/// Makes the next leader of this directory start after an epoch that a depot has seen.
fn raise_epoch(directory: &OwnDirectory, seen: Epoch) -> Result<(), CommandError> {
    write_epoch(directory, seen.0).map_err(|error| {
        let path = directory.path().join(EPOCH);
        CommandError::Failed(format!("{}: {error}", path.display()))
    })
}

fn write_epoch(directory: &OwnDirectory, epoch: u64) -> io::Result<()> {
    directory.replace(EPOCH, format!("{epoch}\n").as_bytes())
}

/// Milliseconds since 1970; 0 before.
#[expect(
    clippy::disallowed_methods,
    reason = "it is where a count begins, once; no decision depends on it"
)]
fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leader_whose_disk_takes_no_writes_has_an_epoch_after_all_before() {
        let root = tempfile::tempdir().expect("a directory");
        let directory = prepare_for(&root.path().join("leader"), &OtherUsers::default());
        let directory = directory.expect("made");
        let first = next_epoch(&directory, write_epoch).expect("noted");
        for kind in [ErrorKind::StorageFull, ErrorKind::ReadOnlyFilesystem] {
            let next = next_epoch(&directory, |_, _| Err(kind.into())).expect("the time");
            assert!(next > first && next.0 >= unix_ms() - 1000, "{next:?}");
        }
        let ahead = unix_ms() + 1_000_000;
        write_epoch(&directory, ahead).expect("noted");
        let next = next_epoch(&directory, |_, _| Err(ErrorKind::StorageFull.into()));
        assert_eq!(next.expect("the next"), Epoch(ahead + 1));
        let refused = next_epoch(&directory, |_, _| Err(ErrorKind::Other.into()));
        let text = refused.expect_err("not a full disk").to_string();
        assert!(text.contains("leader/epoch"), "{text}");
    }
}
