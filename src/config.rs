//! The configuration: a TOML file, overridden by the environment, overridden by the flags.

mod directories;
mod error;
mod keys;
mod monitor_address;
mod reference;
mod service_links;
mod sources;
mod tier_size;
mod user_list;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use figment::Figment;
use serde::{Deserialize, Serialize};

use kvferry_core::TierPolicy;
use kvferry_protocol::{VERSION, VERSION_MIN};
use kvferry_tiers::disk::DiskIo;
use kvferry_types::{ByteSize, GpuCopy, NumaNodes, Ratio, Sharding};

pub use directories::Directories;
pub use error::ConfigError;
pub use keys::CONFIG_BYTES_MAX;
pub use monitor_address::MonitorAddress;
pub use reference::{SettingReference, settings};
pub use sources::{ENVIRONMENT_PREFIX, OTHER_VARIABLES};
pub use tier_size::TierSize;
pub use user_list::{UNKNOWN_UID, UserList};

/// Largest number of ranks of an engine.
pub const RANKS_MAX: u16 = 64;
/// Largest number of engines of one leader.
pub const REPLICAS_MAX: u16 = 64;
/// Largest number of copy threads of one worker.
pub const COPY_THREADS_MAX: u16 = 256;
/// Shortest time between heartbeats, in milliseconds: with less, a busy machine would look dead.
pub const HEARTBEAT_MS_MIN: u64 = 10;
/// Longest time between heartbeats, in milliseconds: a dead peer is detected a few heartbeats later.
pub const HEARTBEAT_MS_MAX: u64 = 60_000;
/// Largest number of reads and writes of a disk tier in flight.
pub const G3_DEPTH_MAX: u16 = 256;
/// Host memory of each shard with g2 = 0: a few blocks of each direction, also of large pages.
pub const BOUNCE_BYTES: u64 = 256 << 20;
/// Longest socket directory, in bytes: Linux limits the whole path of a socket to 107 bytes.
pub const SOCKET_DIR_BYTES_MAX: usize = 80;
/// Lowest limit of stored bytes a second: with less, no store of a large block would end in time.
pub const STORE_BYTES_PER_S_MIN: u64 = 1 << 20;

/// Characters of a value or a line that an error shows.
const SHOWN_CHARS_MAX: usize = 120;
/// Longest flush at the end of `up`, in seconds.
pub const FLUSH_LIMIT_S_MAX: u32 = 86_400;

/// The default of `socket_dir`, for readers.
const SOCKET_DIR_DEFAULT: &str =
    "$XDG_RUNTIME_DIR/kvferry, or /tmp/kvferry-UID without that variable";

/// Everything that can be configured. Values are in bounds, and a file, a variable or a flag can give each of them.
/// [`Flags`] describes the keys, `keys::KEYS` has their defaults, and `docs/reference/settings.md` is made of both.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[expect(missing_docs, reason = "`Flags` describes the same keys")]
pub struct Config {
    pub socket_dir: PathBuf,
    pub ranks: u16,
    pub kv_shards: Sharding,
    pub replicas: u16,
    pub ratio: Ratio,
    pub g2: ByteSize,
    pub g2_lock: bool,
    pub g2_numa: NumaNodes,
    #[serde(serialize_with = "as_text")]
    pub g2_policy: TierPolicy,
    pub g3: ByteSize,
    pub g3_dir: Directories,
    #[serde(serialize_with = "as_text")]
    pub g3_policy: TierPolicy,
    pub g3_depth: u16,
    #[serde(serialize_with = "as_text")]
    pub g3_io: DiskIo,
    pub g3_scrub_bytes_per_s: ByteSize,
    pub g3_discard: bool,
    pub prefill_tokens_per_s: u32,
    pub copy_threads: u16,
    pub store_bytes_per_s: ByteSize,
    pub gpu_copy: GpuCopy,
    pub heartbeat_ms: u64,
    pub wire_max: u16,
    #[serde(serialize_with = "as_text")]
    pub users: UserList,
    pub namespaces: PathBuf,
    #[serde(serialize_with = "as_text")]
    pub monitor: MonitorAddress,
    pub page_index: bool,
    pub record_decisions: bool,
    pub flush_limit_s: u32,
    pub log: String,
}

/// Settings that the command line gives; `None` where it gives none. The first paragraph of each describes the
/// setting, the second its bounds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, clap::Args)]
pub struct Flags {
    /// Directory of the sockets.
    ///
    /// An absolute path of at most 80 bytes; a flag may be relative to the current folder. Its parent must exist.
    #[arg(long, value_name = "DIR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket_dir: Option<PathBuf>,
    /// Ranks of an engine, with one worker each.
    ///
    /// 1 to 64.
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ranks: Option<u16>,
    /// Different slices of KV that the ranks hold. Each is stored once per host.
    ///
    /// Divides the ranks: 1 for MLA, the number of KV heads where there are more ranks than heads, 0 for as many as
    /// ranks.
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_shards: Option<u16>,
    /// Engines of the same model that share the host memory, each with workers of its own.
    ///
    /// 1 to 64.
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u16>,
    /// Engine pages in the largest block.
    ///
    /// 1 to 256.
    #[arg(long, value_name = "PAGES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<u32>,
    /// Host memory for blocks, divided evenly among the KV shards.
    ///
    /// Such as 8GiB, or pages and their size, such as 4096x2MiB: room for 4096 pages of 2 MiB in each KV shard. 0 with g3
    /// above 0: 256 MiB for each KV shard, through which blocks go between devices and the disk.
    #[arg(long, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub g2: Option<TierSize>,
    /// Lock the host memory, so that it is never swapped out.
    ///
    /// true or false. true needs CAP_IPC_LOCK, or a limit of locked memory of g2 / kv_shards for each worker.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub g2_lock: Option<bool>,
    /// NUMA nodes of the host memory, one for each KV shard in turn. Threads on that node touch the shard's memory
    /// first.
    ///
    /// Numbers such as 0,1. Without them: near the GPU of the rank's number, if there is one; else the node on which a
    /// worker runs.
    #[arg(long, value_name = "NODES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub g2_numa: Option<NumaNodes>,
    /// How pages are placed in host memory and leave it, such as pieces=2.
    ///
    /// Settings separated by commas. pieces=N, 0 to 32: before a page is evicted, a run is split over at most N holes;
    /// with 0 and 1, pages are evicted first. eviction=lru, arc or priority: which block is evicted first (the lowest
    /// priority that stores named, from 0 to 7). quota=PAGES: a namespace with more pages evicts its own blocks first.
    /// admission=RULE: which pages enter: all, seen:K (offered K times, 2 to 255), bytes-per-day:SIZE, or several of
    /// them joined by & (all of them) and | (any of them).
    #[arg(long, value_name = "POLICY")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub g2_policy: Option<String>,
    /// Disk space for blocks, divided evenly among the KV shards and the directories.
    ///
    /// Such as 1TiB, or pages and their size as for g2; 0 for no disk. All files count, those of other layouts too.
    #[arg(long, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub g3: Option<TierSize>,
    /// Directories of the blocks on disk, one for each disk.
    ///
    /// Absolute paths separated by commas, none inside another. Their parents must exist. Needed for g3 above 0, and
    /// rejected without it.
    #[arg(long, value_name = "DIR[,DIR...]")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub g3_dir: Option<Directories>,
    /// How pages are placed on disk and leave it.
    ///
    /// As g2_policy. admission=seen:2 writes pages that were stored at least twice; admission=bytes-per-day:SIZE limits
    /// the wear of the disk.
    #[arg(long, value_name = "POLICY")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub g3_policy: Option<String>,
    /// Reads and writes of each worker that the disk has in flight.
    ///
    /// 1 to 256. Each takes 4 MiB of memory, or one page where pages are larger.
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub g3_depth: Option<u16>,
    /// How the disk is read and written: by io_uring, or by threads that block.
    ///
    /// auto, io_uring or threads. auto: io_uring where the kernel permits it.
    #[arg(long, value_name = "HOW")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub g3_io: Option<String>,
    /// Most bytes a second that each worker reads of its own disk pages, to find those that have changed; 0 for none.
    ///
    /// 0, or a size such as 8MiB. A pass over all pages begins at most once a day. The default takes less than a hundredth
    /// of the bandwidth of an NVMe disk, and reads 100 GiB in 4 hours, 1 TiB in 37.
    #[arg(long, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub g3_scrub_bytes_per_s: Option<ByteSize>,
    /// Give the places of pages that were removed back to the disk, each time that a worker opens it.
    ///
    /// For SSDs that last longer or write faster with spare room, where the file system passes discards on (mount option
    /// discard, or fstrim). The room stays reserved for the disk tier.
    #[arg(long, value_name = "BOOL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub g3_discard: Option<bool>,
    /// Prompt tokens that an engine computes in a second: pages on disk are offered only if they are loaded sooner.
    ///
    /// 0 if unknown: pages on disk are always offered.
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_tokens_per_s: Option<u32>,
    /// Threads that copy for each worker.
    ///
    /// 1 to 256.
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub copy_threads: Option<u16>,
    /// Most bytes a second that each worker copies out of its engine's memory, on average; 0 for no limit. Loads do not
    /// count and never wait for it.
    ///
    /// 0, or at least 1MiB, such as 2GiB. Stores that wait longer than their deadline are not stored.
    #[arg(long, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store_bytes_per_s: Option<ByteSize>,
    /// How copies are submitted to a GPU's driver.
    ///
    /// async: one call for each copy; batch: up to 4,096 copies in one call, or one by one with a driver that cannot.
    #[arg(long, value_name = "WAY")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_copy: Option<GpuCopy>,
    /// Milliseconds between heartbeats.
    ///
    /// 10 to 60000.
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heartbeat_ms: Option<u64>,
    /// Newest version of the protocol between processes, for others of an older program.
    ///
    /// 1 or 2. Engines, ranks, workers and leader agree on the newest version that both sides support.
    #[arg(long, value_name = "VERSION")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wire_max: Option<u16>,
    /// Users beside kvferry's own whose engines may connect to leader and workers.
    ///
    /// User ids separated by commas, such as 1001,1002: at most 16, not 65534, which stands for all users of other user
    /// namespaces. Directories of sockets then have mode 0711 and sockets 0666, and the kernel's id of each peer decides.
    /// These users have the roles engine and rank. Set namespaces as well: without it, all engines share all pages.
    #[arg(long, value_name = "UID[,UID...]")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub users: Option<String>,
    /// File with rules about namespaces: whose engines may name them, how many pages they hold, and their secrets.
    ///
    /// An absolute path; a flag may be relative to the current folder. A TOML file that only its owner can write, with at
    /// most 256 entries. Without it, every engine may name every namespace.
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespaces: Option<PathBuf>,
    /// Where metrics and health are served over HTTP, for leader and workers together: /metrics, /startupz, /livez,
    /// /readyz.
    ///
    /// off; a port such as 9464, of the loopback address; or an address such as 0.0.0.0:9464, which other hosts reach.
    /// Port 0: any free one, which the log names.
    #[arg(long, value_name = "ADDRESS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub monitor: Option<String>,
    /// Find pages inside blocks, for engines that name only the tail of a sequence.
    ///
    /// true or false. Takes 8 bytes of the leader's memory for each page that host memory has room for, and time in each
    /// store. Without it, lookups of such engines miss pages, and their stores store them again; a ratio of 1 avoids that.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub page_index: Option<bool>,
    /// Keep the digest of the leader's decisions, for comparisons with an offline replay.
    ///
    /// true or false. A digest costs time in each lookup, load and store. replay records decisions in the leader that it
    /// starts.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub record_decisions: Option<bool>,
    /// Most seconds that `up` takes to make stored pages durable on the disk before its processes end.
    ///
    /// 0 to 86400; 0: pages that are not on the disk by then are computed again. A second signal ends it at once. Give the
    /// service manager or the kubelet at least 15 s more.
    #[arg(long, value_name = "SECONDS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flush_limit_s: Option<u32>,
    /// Filter of the log, by targets and levels.
    ///
    /// Such as info,kvferry=debug.
    #[arg(long, value_name = "FILTER")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log: Option<String>,
}

impl Config {
    /// Reads `file`, if given, the process's environment, and `flags`; later sources override earlier ones.
    ///
    /// # Errors
    ///
    /// See [`ConfigError`]. A configuration with any invalid key is rejected as a whole.
    pub fn load(file: Option<&Path>, flags: &Flags) -> Result<Self, ConfigError> {
        Self::load_with(file, std::env::vars_os(), flags)
    }

    /// [`Config::load`] with the given environment: names and values of all variables.
    pub fn load_with(
        file: Option<&Path>,
        environment: impl IntoIterator<Item = (OsString, OsString)>,
        flags: &Flags,
    ) -> Result<Self, ConfigError> {
        let environment: Vec<_> = environment.into_iter().collect();
        let runtime_dir = environment
            .iter()
            .find(|(name, _)| name == RUNTIME_DIR)
            .map(|(_, value)| PathBuf::from(value))
            .filter(|path| is_usable(path));
        let origin = match &runtime_dir {
            Some(_) => format!("default, from {RUNTIME_DIR}"),
            None => "default".to_owned(),
        };
        let mut settings = Figment::new();
        for setting in sources::defaults(&socket_dir_in(runtime_dir), &origin) {
            settings = settings.merge(setting);
        }
        for setting in file.map(sources::file).transpose()?.unwrap_or_default() {
            settings = settings.merge(setting);
        }
        for setting in sources::environment(&environment)? {
            settings = settings.merge(setting);
        }
        for setting in sources::flags(flags)? {
            settings = settings.merge(setting);
        }
        let settings = Settings(settings);
        let config = Self::check(&settings)?;
        if config.g2.0 == 0 && config.g3.0 == 0 {
            let expected = "a size above 0, such as \"8GiB\", because g3 is 0, too: without a tier nothing is kept";
            settings.get("g2", expected, |_: TierSize| None::<()>)?;
        }
        if config.g3.0 > 0 && config.g3_dir.0.is_empty() {
            let expected = "0, or g3_dir beside it, the directory of the blocks: give --g3-dir DIR";
            settings.get("g3", expected, |_: TierSize| None::<()>)?;
        }
        if config.g3.0 == 0 && !config.g3_dir.0.is_empty() {
            let expected = "no directory, because g3 is 0, and nothing would be kept there: give --g3 SIZE, or leave \
                            g3_dir out";
            settings.get("g3_dir", expected, |_: Directories| None::<()>)?;
        }
        if let Some((outer, inner)) = config.g3_dir.overlapping() {
            let (outer, inner) = (outer.display(), inner.display());
            let expected = match outer.to_string() == inner.to_string() {
                true => format!("each directory once, and {outer} is named twice: leave one out"),
                false => format!(
                    "directories beside each other, and {inner} lies in {outer}: name another one"
                ),
            };
            settings.get("g3_dir", &expected, |_: Directories| None::<()>)?;
        }
        Ok(config)
    }

    /// Host memory of all shards: g2, or with g2 = 0 what blocks need on their way between devices and the disk.
    pub fn host_memory(&self) -> ByteSize {
        match self.g2.0 {
            0 => ByteSize(BOUNCE_BYTES * u64::from(self.kv_shards.shards())),
            _ => self.g2,
        }
    }

    /// Default socket directory: `$XDG_RUNTIME_DIR/kvferry`, or `/tmp/kvferry-<uid>` if that variable is not set, not
    /// an absolute path, or not UTF-8.
    pub fn default_socket_dir() -> PathBuf {
        socket_dir_in(std::env::var_os(RUNTIME_DIR).map(PathBuf::from))
    }

    fn check(settings: &Settings) -> Result<Self, ConfigError> {
        let directory = settings.path_length("socket_dir").map_or_else(
            || format!("an absolute path of at most {SOCKET_DIR_BYTES_MAX} bytes"),
            |bytes| {
                format!(
                    "an absolute path of at most {SOCKET_DIR_BYTES_MAX} bytes, and it has {bytes}: name a shorter one \
                     with --socket-dir"
                )
            },
        );
        let bounds = |start: u64, end: u64| format!("a whole number from {start} to {end}");
        let ranks = settings.get("ranks", &bounds(1, RANKS_MAX.into()), |ranks| {
            (1..=RANKS_MAX).contains(&ranks).then_some(ranks)
        })?;
        let divides = format!("a whole number that divides the {ranks} ranks, or 0 for as many");
        let kv_shards = settings.get("kv_shards", &divides, |shards| match shards {
            0 => Some(Sharding::each(ranks)),
            shards => Sharding::new(ranks, shards),
        })?;
        let pages = bounds(1, kvferry_types::RATIO_MAX.into());
        let ratio = settings.get("ratio", &pages, |ratio| Ratio::new(ratio).ok())?;
        let g3_dir = settings.get(
            "g3_dir",
            "absolute paths without commas, such as \"/a,/b\" or [\"/a\", \"/b\"]",
            |paths: Directories| paths.are_absolute().then_some(paths),
        )?;
        Ok(Self {
            socket_dir: settings.get("socket_dir", &directory, |path: PathBuf| {
                let fits = path.as_os_str().len() <= SOCKET_DIR_BYTES_MAX;
                (path.is_absolute() && fits).then_some(path)
            })?,
            ranks,
            kv_shards,
            replicas: settings.get("replicas", &bounds(1, REPLICAS_MAX.into()), |replicas| {
                (1..=REPLICAS_MAX).contains(&replicas).then_some(replicas)
            })?,
            ratio,
            g2: settings.get(
                "g2",
                "a size such as \"8GiB\" or \"4096x2MiB\", or 0 with g3",
                |size: TierSize| size.host_bytes(kv_shards.shards()),
            )?,
            g2_numa: settings.get("g2_numa", "node numbers such as \"0,1\", or \"\"", Some)?,
            g2_lock: settings.get("g2_lock", "true or false", Some)?,
            g2_policy: settings.policy("g2_policy")?,
            g3: settings.get(
                "g3",
                "a size such as \"1TiB\" or \"100000x2MiB\", or 0 for none",
                |size: TierSize| size.disk_bytes(kv_shards.shards(), g3_dir.0.len(), ratio.pages()),
            )?,
            g3_dir,
            g3_policy: settings.policy("g3_policy")?,
            g3_depth: settings.get("g3_depth", &bounds(1, G3_DEPTH_MAX.into()), |depth| {
                (1..=G3_DEPTH_MAX).contains(&depth).then_some(depth)
            })?,
            g3_io: settings.get("g3_io", "auto, io_uring or threads", |io: String| {
                io.parse().ok()
            })?,
            g3_scrub_bytes_per_s: settings.get(
                "g3_scrub_bytes_per_s",
                "a size such as \"8MiB\", or 0 for none",
                Some,
            )?,
            g3_discard: settings.get("g3_discard", "true or false", Some)?,
            prefill_tokens_per_s: settings.get(
                "prefill_tokens_per_s",
                &bounds(0, u32::MAX.into()),
                Some,
            )?,
            copy_threads: settings.get(
                "copy_threads",
                &bounds(1, COPY_THREADS_MAX.into()),
                |threads| (1..=COPY_THREADS_MAX).contains(&threads).then_some(threads),
            )?,
            store_bytes_per_s: settings.get(
                "store_bytes_per_s",
                "0 for no limit, or a size of at least 1MiB, such as \"2GiB\"",
                |rate: ByteSize| (rate.0 == 0 || rate.0 >= STORE_BYTES_PER_S_MIN).then_some(rate),
            )?,
            gpu_copy: settings.get("gpu_copy", "\"async\" or \"batch\"", Some)?,
            heartbeat_ms: settings.get(
                "heartbeat_ms",
                &bounds(HEARTBEAT_MS_MIN, HEARTBEAT_MS_MAX),
                |ms| {
                    (HEARTBEAT_MS_MIN..=HEARTBEAT_MS_MAX)
                        .contains(&ms)
                        .then_some(ms)
                },
            )?,
            wire_max: settings.get(
                "wire_max",
                &bounds(VERSION_MIN.into(), VERSION.into()),
                |version| {
                    (VERSION_MIN..=VERSION)
                        .contains(&version)
                        .then_some(version)
                },
            )?,
            users: settings.get(
                "users",
                "at most 16 user ids such as \"1001,1002\", without 65534",
                |users: String| users.parse().ok(),
            )?,
            namespaces: settings.get(
                "namespaces",
                "an absolute path of a file, or \"\"",
                |path: PathBuf| (path.as_os_str().is_empty() || path.is_absolute()).then_some(path),
            )?,
            monitor: settings.get(
                "monitor",
                "off, a port such as \"9464\", or an address such as \"127.0.0.1:9464\"",
                |address: String| address.parse().ok(),
            )?,
            page_index: settings.get("page_index", "true or false", Some)?,
            record_decisions: settings.get("record_decisions", "true or false", Some)?,
            flush_limit_s: settings.get(
                "flush_limit_s",
                &bounds(0, FLUSH_LIMIT_S_MAX.into()),
                |seconds| (seconds <= FLUSH_LIMIT_S_MAX).then_some(seconds),
            )?,
            log: settings.get("log", "a filter such as \"info,kvferry=debug\"", Some)?,
        })
    }
}

/// Serializes a value as its text.
fn as_text<S: serde::Serializer>(
    value: &impl std::fmt::Display,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

const RUNTIME_DIR: &str = "XDG_RUNTIME_DIR";

fn is_usable(runtime_dir: &Path) -> bool {
    runtime_dir.is_absolute() && runtime_dir.to_str().is_some()
}

fn socket_dir_in(runtime_dir: Option<PathBuf>) -> PathBuf {
    match runtime_dir.filter(|path| is_usable(path)) {
        Some(path) => path.join("kvferry"),
        None => format!("/tmp/kvferry-{}", rustix::process::getuid().as_raw()).into(),
    }
}

/// All settings, each with the source that provided it.
struct Settings(Figment);

impl Settings {
    /// Bytes of a path, if it is longer than a socket directory may be.
    fn path_length(&self, key: &str) -> Option<usize> {
        let path: PathBuf = self.0.extract_inner(key).ok()?;
        let bytes = path.as_os_str().len();
        (bytes > SOCKET_DIR_BYTES_MAX).then_some(bytes)
    }

    /// Returns the policy of a tier. An error says what is wrong with its text.
    fn policy(&self, key: &'static str) -> Result<TierPolicy, ConfigError> {
        let text: Option<String> = self.0.extract_inner(key).ok();
        let read = text.as_deref().map(str::parse::<TierPolicy>);
        let expected = match &read {
            Some(Err(error)) => format!("a policy, and {error}"),
            _ => "a policy such as \"pieces=2\"".to_owned(),
        };
        self.get(key, &expected, |_: String| read.and_then(Result::ok))
    }

    /// Returns the value of `key` if `check` accepts it.
    fn get<T: for<'de> Deserialize<'de>, U>(
        &self,
        key: &'static str,
        expected: &str,
        check: impl FnOnce(T) -> Option<U>,
    ) -> Result<U, ConfigError> {
        let value = self.0.find_value(key).ok();
        let taken = value.as_ref().and_then(|value| value.deserialize().ok());
        taken.and_then(check).ok_or_else(|| {
            let origin = value
                .as_ref()
                .and_then(|value| self.0.get_metadata(value.tag()));
            ConfigError::Value {
                key,
                value: value.as_ref().map(error::show).unwrap_or_default(),
                origin: origin
                    .map(|metadata| metadata.name.to_string())
                    .unwrap_or_default(),
                expected: expected.to_owned(),
            }
        })
    }
}

#[cfg(test)]
mod tests;
