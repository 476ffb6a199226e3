//! The configuration: a TOML file, overridden by the environment, overridden by the flags.

mod error;
mod sources;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use figment::Figment;
use serde::{Deserialize, Serialize};

use kvferry_types::{ByteSize, GpuCopy, NumaNodes, Ratio, Sharding};

pub use error::ConfigError;
pub use sources::{CONFIG_BYTES_MAX, ENVIRONMENT_PREFIX, OTHER_VARIABLES};

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
/// Longest socket directory, in bytes: Linux limits the whole path of a socket to 107 bytes.
pub const SOCKET_DIR_BYTES_MAX: usize = 80;

/// Everything that can be configured. Values are in bounds, and a file, a variable or a flag can give each of them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Config {
    /// Where the sockets are: an absolute path of at most [`SOCKET_DIR_BYTES_MAX`] bytes.
    /// Default: `$XDG_RUNTIME_DIR/kvferry`, or `/tmp/kvferry-<uid>` without that variable.
    pub socket_dir: PathBuf,
    /// Ranks of the engine, one worker each, 1..=[`RANKS_MAX`]. Default: `1`.
    pub ranks: u16,
    /// Slices of KV that the ranks hold: fewer than ranks where neighbours hold the same, 1 for MLA. It divides the ranks.
    /// Each is stored once a host. Default: `0`, as many as ranks.
    pub kv_shards: Sharding,
    /// Engines of the same model that share the host memory, each with workers of its own, 1..=[`REPLICAS_MAX`].
    /// Default: `1`.
    pub replicas: u16,
    /// Engine pages in the largest block, 1..=256. Default: `32`.
    pub ratio: Ratio,
    /// Host memory for blocks, at least one byte. Default: `8GiB`.
    pub g2: ByteSize,
    /// Keep it in memory: it is never swapped out. Needs a limit of locked memory that is high enough. Default: `false`.
    pub g2_lock: bool,
    /// NUMA nodes from which it is taken, one for each KV shard in turn. Default: none, wherever a worker runs.
    pub g2_numa: NumaNodes,
    /// Threads that copy for each worker, 1..=[`COPY_THREADS_MAX`]. Default: `4`.
    pub copy_threads: u16,
    /// How copies are given to a GPU's driver. Default: `async`.
    pub gpu_copy: GpuCopy,
    /// Time between heartbeats, in milliseconds, [`HEARTBEAT_MS_MIN`]..=[`HEARTBEAT_MS_MAX`]. Default: `1000`.
    pub heartbeat_ms: u64,
    /// What is logged, as a filter of targets and levels such as `info,kvferry=debug`. Default: `info`.
    pub log: String,
}

/// The same, as flags give it: what is `None` was not given.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, clap::Args)]
pub struct Flags {
    /// Where the sockets are; a relative path counts from the current folder. Its parent must be there.
    #[arg(long, value_name = "DIR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket_dir: Option<PathBuf>,
    /// Ranks of the engine, one worker each: 1 to 64.
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ranks: Option<u16>,
    /// Slices of KV that the ranks hold; 1 for MLA, 0 for as many as ranks.
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_shards: Option<u16>,
    /// Engines of the same model that share the host memory: 1 to 64.
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u16>,
    /// Engine pages in the largest block: 1 to 256.
    #[arg(long, value_name = "PAGES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<u32>,
    /// Host memory for blocks, such as 8GiB.
    #[arg(long, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub g2: Option<ByteSize>,
    /// Lock the host memory, so that it is never swapped out.
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub g2_lock: Option<bool>,
    /// NUMA nodes of the host memory, one for each KV shard in turn, such as 0,1.
    #[arg(long, value_name = "NODES")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub g2_numa: Option<NumaNodes>,
    /// Threads that copy for each worker: 1 to 256.
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub copy_threads: Option<u16>,
    /// How copies are given to a GPU's driver: async (each by itself) or batch (many by one call).
    #[arg(long, value_name = "WAY")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_copy: Option<GpuCopy>,
    /// Time between heartbeats, in milliseconds: 10 to 60000.
    #[arg(long, value_name = "MS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heartbeat_ms: Option<u64>,
    /// What is logged, such as info,kvferry=debug.
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
            .map(|(_, value)| PathBuf::from(value));
        let mut settings = Figment::new();
        for setting in sources::defaults(&socket_dir_in(runtime_dir)) {
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
        Self::check(&Settings(settings))
    }

    /// Default socket directory: `$XDG_RUNTIME_DIR/kvferry`, or `/tmp/kvferry-<uid>` if that variable is not set, not
    /// an absolute path, or not UTF-8.
    pub fn default_socket_dir() -> PathBuf {
        socket_dir_in(std::env::var_os(RUNTIME_DIR).map(PathBuf::from))
    }

    fn check(settings: &Settings) -> Result<Self, ConfigError> {
        let directory = format!("an absolute path of at most {SOCKET_DIR_BYTES_MAX} bytes");
        let bounds = |start: u64, end: u64| format!("a whole number from {start} to {end}");
        let ranks = settings.get("ranks", &bounds(1, RANKS_MAX.into()), |ranks| {
            (1..=RANKS_MAX).contains(&ranks).then_some(ranks)
        })?;
        let divides = format!("a whole number that divides the {ranks} ranks, or 0 for as many");
        Ok(Self {
            socket_dir: settings.get("socket_dir", &directory, |path: PathBuf| {
                let fits = path.as_os_str().len() <= SOCKET_DIR_BYTES_MAX;
                (path.is_absolute() && fits).then_some(path)
            })?,
            ranks,
            kv_shards: settings.get("kv_shards", &divides, |shards| match shards {
                0 => Some(Sharding::each(ranks)),
                shards => Sharding::new(ranks, shards),
            })?,
            replicas: settings.get("replicas", &bounds(1, REPLICAS_MAX.into()), |replicas| {
                (1..=REPLICAS_MAX).contains(&replicas).then_some(replicas)
            })?,
            ratio: settings.get(
                "ratio",
                &bounds(1, kvferry_types::RATIO_MAX.into()),
                |ratio| Ratio::new(ratio).ok(),
            )?,
            g2: settings.get("g2", "a size above 0, such as \"8GiB\"", |g2: ByteSize| {
                (g2.0 > 0).then_some(g2)
            })?,
            g2_numa: settings.get("g2_numa", "node numbers such as \"0,1\", or \"\"", Some)?,
            g2_lock: settings.get("g2_lock", "true or false", Some)?,
            copy_threads: settings.get(
                "copy_threads",
                &bounds(1, COPY_THREADS_MAX.into()),
                |threads| (1..=COPY_THREADS_MAX).contains(&threads).then_some(threads),
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
            log: settings.get("log", "a filter such as \"info,kvferry=debug\"", Some)?,
        })
    }
}

const RUNTIME_DIR: &str = "XDG_RUNTIME_DIR";

fn socket_dir_in(runtime_dir: Option<PathBuf>) -> PathBuf {
    match runtime_dir.filter(|path| path.is_absolute() && path.to_str().is_some()) {
        Some(path) => path.join("kvferry"),
        None => format!("/tmp/kvferry-{}", rustix::process::getuid().as_raw()).into(),
    }
}

/// All settings, each with the source that provided it.
struct Settings(Figment);

impl Settings {
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
