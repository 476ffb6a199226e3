//! `kvferry replay`: runs a request trace through leader, workers and an engine and verifies every byte, or runs it
//! through the same core without processes.

mod calls;
mod compare;
mod events;
mod flags;
mod live;
mod offline;
mod processes;
mod report;
mod timed;
mod workload;

use std::fmt::Display;
use std::fs::{Metadata, OpenOptions};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;

use crate::cli::common::print_line;
use crate::config::Directories;
use crate::error::CommandError;
use kvferry_core::{ARENA_PAGES_MAX, TierPolicy};
use kvferry_engine::settings::{EngineDevice, EngineLayout};
use kvferry_types::ByteSize;
use kvferry_workload::models::Model;
use kvferry_workload::scheduler::REQUEST_TIMEOUT;

use flags::ReplayKind;
pub(super) use report::ReplayReport;
use timed::TimedArguments;
use workload::Workload;

/// Default pages of the largest block.
const DEFAULT_RATIO: u32 = 32;
/// Default host memory of a replay, all ranks together.
const DEFAULT_G2: ByteSize = ByteSize(256 << 20);

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Mode {
    /// Real processes, real bytes.
    Live,
    /// The same core, without processes and bytes.
    Offline,
}

impl Mode {
    fn name(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Offline => "offline",
        }
    }
}

/// Pages of the arena of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ArenaPages {
    Count(u32),
    Unlimited,
}

impl FromStr for ArenaPages {
    type Err = CommandError;

    fn from_str(text: &str) -> Result<Self, CommandError> {
        match text {
            "unlimited" => Ok(Self::Unlimited),
            _ => match text.parse() {
                Ok(pages) if pages < ARENA_PAGES_MAX => Ok(Self::Count(pages)),
                _ => Err(CommandError::Config(format!(
                    "a number of pages below {ARENA_PAGES_MAX}, or 'unlimited'"
                ))),
            },
        }
    }
}

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// Request trace; without it, a built-in multi-turn workload. JSON lines, also .zst or .gz, each with timestamp
    /// (milliseconds), input_length, output_length (tokens) and hash_ids: one id for each block of --trace-block-tokens
    /// tokens of the prompt; the last one may stand for fewer, and is not cached then.
    trace: Option<PathBuf>,
    /// Real processes and bytes, or the core alone, in virtual time.
    #[arg(long, value_enum, default_value = "live")]
    mode: Mode,
    /// One request after another: each and all its copies end before the next one arrives. Offline, nothing takes time
    /// then.
    #[arg(long)]
    sequential: bool,
    /// Replay only the first N requests.
    #[arg(long, value_name = "N")]
    requests: Option<usize>,
    /// Cut longer prompts to their first N tokens.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    max_prompt_tokens: Option<u64>,
    /// Replay timestamps X times as fast. [default: 1]
    #[arg(long, value_name = "X", value_parser = positive)]
    speedup: Option<f64>,
    /// Keep N requests running, and ignore the timestamps.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), conflicts_with = "speedup")]
    concurrency: Option<u32>,
    /// Ranks of the engine.
    #[arg(long, value_name = "N", default_value = "2", value_parser = clap::value_parser!(u16).range(1..=64))]
    ranks: u16,
    /// Engines that share one leader; requests are distributed over them in turn. Live only.
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=16))]
    replicas: u16,
    /// Tokens of an engine page, for models with one group of layers. [default: 16]
    #[arg(long, value_name = "TOKENS")]
    engine_page_tokens: Option<u32>,
    /// Engine pages in the largest block. [default: 32; with --calls that of the recorded leader]
    #[arg(long, value_name = "PAGES")]
    ratio: Option<u32>,
    /// Pages that each engine's own cache keeps; 0 for no reuse.
    #[arg(long, value_name = "N", default_value = "2048")]
    g1_pages: u32,
    /// Host memory for blocks, all ranks together. [default: 256 MiB]
    #[arg(long, value_name = "SIZE", conflicts_with = "g2_pages")]
    g2: Option<ByteSize>,
    /// Pages of host memory on each rank instead; 0 for none, 'unlimited' offline only.
    #[arg(long, value_name = "N")]
    g2_pages: Option<ArenaPages>,
    /// Pages of a disk below host memory on each rank, in an offline replay; 0 for none, or 'unlimited'. [default: 0]
    #[arg(long, value_name = "N")]
    g3_pages: Option<ArenaPages>,
    /// How pages are placed in host memory and leave it: see `g2_policy` in the settings.
    /// [default: pieces=2]
    #[arg(long, value_name = "POLICY")]
    g2_policy: Option<TierPolicy>,
    /// Disk space for blocks of a live replay, all ranks together. 0 for none. [default: 0]
    #[arg(long, value_name = "SIZE", requires = "g3_dir")]
    g3: Option<ByteSize>,
    /// Directory of the blocks on disk; several with commas between them. What it holds is used, and stays.
    #[arg(long, value_name = "DIR[,DIR...]", requires = "g3")]
    g3_dir: Option<Directories>,
    /// Stop every process after N requests, start all again, and go on with what the disk kept; the engine's own cache is
    /// empty then. Offline, only G3 is kept.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), conflicts_with = "kill_at")]
    restart_at: Option<u32>,
    /// The same by killing every process, whatever it does. Live only.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    kill_at: Option<u32>,
    /// Model whose page sizes are used.
    #[arg(long, value_enum, default_value = "tiny")]
    model: Model,
    /// How the engine of a live replay lays out its memory. [default: layer-separate]
    #[arg(long, value_enum)]
    layout: Option<EngineLayout>,
    /// Where the engine of a live replay keeps its KV. [default: cpu]
    #[arg(long, value_enum)]
    device: Option<EngineDevice>,
    /// Tokens that one hash id of the trace stands for. [default: 512; 16 for the built-in workload]
    #[arg(long, value_name = "TOKENS")]
    trace_block_tokens: Option<u32>,
    /// Seed of the built-in workload.
    #[arg(long, default_value = "1")]
    seed: u64,
    /// Write the report as JSON (schema/replay.json); '-' for standard output.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the KV events of the tiers below the engine: what host memory and disk have stored and removed, a batch in each
    /// line, with its time in seconds. Its format is in docs/events.md.
    #[arg(long, value_name = "FILE")]
    events: Option<PathBuf>,
    /// No progress, no table.
    #[arg(long)]
    quiet: bool,
    /// Log filter of the processes of a live replay.
    #[arg(long, value_name = "FILTER", default_value = "warn")]
    log: String,
    /// Use a `kvferry up` that runs with this socket directory, and leave it running: `status`, `flush` and `reset` then see
    /// what the replay has stored.
    #[arg(long, value_name = "DIR")]
    socket_dir: Option<PathBuf>,
    /// How long an engine of a live replay waits for an answer.
    #[arg(long, value_name = "MS", hide = true, value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    request_timeout_ms: Option<u64>,
    /// Compare two reports that --json wrote, of the same requests and sizes, key by key; replays nothing.
    #[arg(long, num_args = 2, value_names = ["LIVE", "OFFLINE"], exclusive = true)]
    compare: Option<Vec<PathBuf>>,
    /// Replay the calls that an engine of vLLM has recorded with the connector's setting `record`, with real processes, and
    /// compare every answer with the recorded one. Pages have 1 KiB here, whatever the engine's pages have; host memory has
    /// as many as the recorded leader, unless --g2-pages or --g2 says otherwise. Exit code 1 when answers differ that do
    /// not depend on time.
    #[arg(long, value_name = "FILE", conflicts_with_all = NOT_OF_CALLS)]
    calls: Option<PathBuf>,
    #[command(flatten)]
    timed: TimedArguments,
}

/// Arguments of replays of traces that a replay of recorded calls does not have.
const NOT_OF_CALLS: [&str; 22] = [
    "trace",
    "mode",
    "sequential",
    "requests",
    "max_prompt_tokens",
    "speedup",
    "concurrency",
    "ranks",
    "replicas",
    "engine_page_tokens",
    "g1_pages",
    "g3_pages",
    "restart_at",
    "kill_at",
    "model",
    "layout",
    "device",
    "trace_block_tokens",
    "seed",
    "json",
    "events",
    "TimedArguments",
];

fn positive(text: &str) -> Result<f64, CommandError> {
    match text.parse::<f64>() {
        Ok(factor) if factor.is_finite() && factor > 0.0 => Ok(factor),
        _ => Err(CommandError::Config("a number above 0".to_owned())),
    }
}

impl Arguments {
    /// Tokens of the unit of the hashes: of an engine page, for a model with one group.
    fn unit_tokens(&self) -> u32 {
        let own = self.model.unit_tokens();
        self.engine_page_tokens.unwrap_or(own)
    }

    /// The policy of host memory.
    fn policy(&self) -> TierPolicy {
        self.g2_policy.clone().unwrap_or_default()
    }

    fn request_timeout(&self) -> Duration {
        self.request_timeout_ms
            .map_or(REQUEST_TIMEOUT, Duration::from_millis)
    }

    pub(super) fn run(self) -> Result<(), CommandError> {
        crate::telemetry::start(&self.log)?;
        if let Some([live, offline]) = self.compare.as_deref() {
            print_line(&compare::run(live, offline)?);
            return Ok(());
        }
        if let Some(path) = &self.calls {
            return calls::run(&self, path);
        }
        self.check_flags()?;
        let workload = Workload::load(&self)?;
        self.check_restart(&workload)?;
        self.check_outputs()?;
        let report = match self.kind() {
            ReplayKind::Live | ReplayKind::LiveSequential => live::run(&self, &workload)?,
            ReplayKind::Timed => timed::run(&self, &workload)?,
            ReplayKind::OfflineSequential => offline::run(&self, &workload)?,
        };
        self.publish(&report)?;
        report.verdict()
    }

    /// Refuses output files that cannot be written.
    fn check_outputs(&self) -> Result<(), CommandError> {
        let json = self.json.as_deref().filter(|path| path.as_os_str() != "-");
        if let Some(path) = json {
            self.check_output("--json", path)?;
        }
        if let Some(path) = &self.events {
            self.check_output("--events", path)?;
            let whole = |path: &Path| std::path::absolute(path).ok();
            if json.is_some_and(|json| whole(json) == whole(path)) {
                let path = path.display();
                return Err(CommandError::Data(format!(
                    "--events {path}: is that of --json, too: name another file"
                )));
            }
        }
        Ok(())
    }

    /// Refuses an output path that could not be written after the replay, or that is the trace itself.
    fn check_output(&self, flag: &str, path: &Path) -> Result<(), CommandError> {
        let refuse =
            |why: &dyn Display| CommandError::Data(format!("{flag} {}: {why}", path.display()));
        let found = match std::fs::metadata(path) {
            // A pipe or a device is not probed: opening and closing a pipe would end its reader, and a device need not
            // be created.
            Ok(found) if !found.is_file() && !found.is_dir() => return Ok(()),
            found => found.ok(),
        };
        OpenOptions::new()
            .append(true)
            .create(true)
            .open(path)
            .map_err(|error| refuse(&error))?;
        let Some(found) = found else {
            return std::fs::remove_file(path).map_err(|error| refuse(&error));
        };
        let trace = self.trace.as_deref().and_then(|path| path.metadata().ok());
        let same = |trace: Metadata| (trace.dev(), trace.ino()) == (found.dev(), found.ino());
        match trace.is_some_and(same) {
            true => Err(refuse(&"is the trace itself: name another file")),
            false => Ok(()),
        }
    }

    fn publish(&self, report: &ReplayReport) -> Result<(), CommandError> {
        let to_stdout = self
            .json
            .as_deref()
            .is_some_and(|path| path.as_os_str() == "-");
        if !self.quiet && !to_stdout {
            print_line(&report.table());
        }
        let Some(path) = &self.json else {
            return Ok(());
        };
        let mut text = serde_json::to_string_pretty(report).map_err(CommandError::failed)?;
        if to_stdout {
            print_line(&text);
            return Ok(());
        }
        text.push('\n');
        std::fs::write(path, text)
            .map_err(|error| CommandError::Failed(format!("--json {}: {error}", path.display())))
    }
}
