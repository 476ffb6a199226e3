//! The report of a replay, with the same keys live and offline. `schema/replay.json` describes them.

mod measured;
mod table;

use schemars::JsonSchema;
use serde::Serialize;

use crate::error::CommandError;
use kvferry_core::ARENA_PAGES_MAX;
use kvferry_workload::scheduler::Served;

use super::Arguments;
use super::workload::Workload;

pub use measured::{FirstToken, LinkReports, Prefills, Waits};

/// Version of the report's format. Increases when a key is added or changes its meaning.
pub(super) const REPORT_VERSION: u32 = 6;

/// Report of `kvferry replay --json`. Values that a mode cannot know are null.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub struct ReplayReport {
    /// Version of the report's format.
    pub version: u32,
    /// `live` or `offline`.
    pub mode: &'static str,
    /// True if the requests ran one after another.
    pub sequential: bool,
    /// Requests that were served.
    pub requests: u64,
    /// Requests during which the leader refused something, or a copy failed.
    pub disturbed_requests: u64,
    /// The replayed trace.
    pub trace: TraceInfo,
    /// The sizes of the replay.
    pub setup: Setup,
    /// Tokens by their source.
    pub tokens: Tokens,
    /// Blocks.
    pub blocks: BlockCounts,
    /// The arena of G2.
    pub arena: ArenaInfo,
    /// Transfers between G2 and G3, and G3 itself: all zero without G3.
    pub moves: MoveCounts,
    /// The restart of all processes; null without one.
    pub restart: Option<Restart>,
    /// Bytes, all ranks together.
    pub bytes: Bytes,
    /// Rates of the copies while they ran, per rank.
    pub rates: Rates,
    /// Durations of requests, in microseconds.
    pub latency_us: Latency,
    /// From a prompt's arrival to the end of its prefill, in microseconds.
    pub first_token_us: FirstToken,
    /// The links of all ranks.
    pub links: LinkReports,
    /// Waits and refusals of prompts and stores.
    pub waits: Waits,
    /// Time of all prefills together.
    pub prefill_seconds: Prefills,
    /// Duration of the replay.
    pub seconds: Seconds,
    /// Resources that were still held at the end: all zero unless some leaked.
    pub left: Left,
    /// Digest of all decisions: equal when two sequential runs decided the same. `not recorded` after a replay against
    /// a leader without `record_decisions`.
    pub decisions_digest: String,
}

/// The trace.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub struct TraceInfo {
    /// Name of the file, or of the built-in workload.
    pub name: String,
    /// Digest of the requests.
    pub digest: String,
    /// Tokens of one hash id.
    pub block_tokens: u32,
}

/// Sizes.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub struct Setup {
    /// Model whose page sizes are used.
    pub model: String,
    /// Ranks of an engine.
    pub ranks: u16,
    /// Slices of KV that the ranks hold, each stored once per host.
    pub kv_shards: u16,
    /// Engines that share the leader.
    pub replicas: u16,
    /// Tokens of a page; with several groups, of the unit in which hits are counted.
    pub engine_page_tokens: u32,
    /// Pages of the largest block.
    pub ratio: u32,
    /// The policy of G2, as in the setting `g2_policy`; `unknown` with `--socket-dir`.
    pub g2_policy: String,
    /// Pages that the cache of an engine keeps.
    pub g1_pages: u32,
    /// Bytes of a page on one rank; with several groups, of the largest one.
    pub page_bytes: u64,
    /// Pages of G2 on each rank; null when unlimited.
    pub g2_pages: Option<u64>,
    /// Pages of G3 on each rank, 0 for none; null when unlimited.
    pub g3_pages: Option<u64>,
    /// Longer prompts are cut to this many tokens; null when none is.
    pub max_prompt_tokens: Option<u64>,
    /// Factor by which timestamps pass faster; null where they are not used.
    pub speedup: Option<f64>,
    /// Number of requests that run at a time; null when the timestamps determine it.
    pub concurrency: Option<u32>,
}

/// Tokens of all prompts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Tokens {
    /// All tokens of all prompts, including those after the last full page.
    pub prompt: u64,
    /// Found in the engine's own cache, in full pages.
    pub hit_g1: u64,
    /// The further part of the same prefixes found in G2, in full pages.
    pub hit_g2: u64,
    /// The part of the same prefixes found in G3 alone, in full pages.
    pub hit_g3: u64,
    /// The other tokens, which were computed.
    pub computed: u64,
}

/// Blocks, counted since the start of the replay.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct BlockCounts {
    /// New blocks.
    pub stored: u64,
    /// Blocks that grew in place.
    pub grown: u64,
    /// Runs that loads read.
    pub loaded: u64,
    /// New blocks that begin where a sequence leaves another one inside a block.
    pub branched: u64,
    /// Additional blocks, because a run was split over several holes.
    pub split: u64,
    /// Times that a block lost pages to eviction, wholly or at its tail.
    pub evicted: u64,
    /// Runs for which there was no room.
    pub refused: u64,
}

/// The arena.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ArenaInfo {
    /// Pages on each rank; null when unlimited.
    pub capacity_pages: Option<u64>,
    /// Pages in use at the end.
    pub used_pages: u64,
    /// Most pages evicted for one allocation. With `--socket-dir`: 0 if there was one of as many pages before.
    pub largest_eviction_pages: u64,
    /// Pages evicted in all.
    pub evicted_pages: u64,
}

/// Moves between G2 and G3.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct MoveCounts {
    /// Transfers.
    pub moves: u64,
    /// Pages of these transfers.
    pub pages: u64,
    /// Those of the pages that were written to G3; the others were read from it.
    pub written_through_pages: u64,
    /// Blocks that were not moved, because too many waited.
    pub left_out: u64,
    /// Tokens of G3 that lookups did not offer, because they are computed sooner than loaded: with `--cost-gate`.
    pub declined_tokens: u64,
    /// Pages of G3 on each rank; null when unlimited, and without G3.
    pub g3_pages: Option<u64>,
    /// Pages of G3 in use at the end.
    pub g3_used_pages: u64,
    /// Pages evicted from G3.
    pub g3_evicted_pages: u64,
}

/// How all processes stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RestartKind {
    /// In order, by SIGTERM.
    Restart,
    /// By SIGKILL.
    Kill,
}

impl RestartKind {
    /// The flag that asks for it.
    pub(super) fn flag(self) -> &'static str {
        match self {
            Self::Restart => "--restart-at",
            Self::Kill => "--kill-at",
        }
    }
}

/// A restart of all processes, after which the engine and host memory are empty.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct Restart {
    /// Requests that were served before it.
    pub at: u64,
    /// How the processes stopped.
    pub by: RestartKind,
    /// Pages of G3 in use before it.
    pub used_pages: u64,
    /// Pages that the new leader found on the disk: those in use that were durable, and evicted ones that were not
    /// overwritten.
    pub listed_pages: u64,
    /// Time from the stop until every tier served again; null offline.
    pub down_seconds: Option<f64>,
    /// Tokens of the prompts after it.
    pub tokens: Tokens,
    /// Digest of the decisions before it; `decisions_digest` has those after it.
    pub decisions_digest: String,
}

/// Bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Bytes {
    /// From the engine's memory to G2.
    pub gathered: u64,
    /// From G2 to the engine's memory.
    pub scattered: u64,
    /// Loaded bytes that were compared with the expected ones.
    pub verified: u64,
    /// Compared bytes that were wrong.
    pub mismatched: u64,
}

/// Rates in GB/s (10^9 bytes).
#[derive(Debug, Clone, Copy, Default, Serialize, JsonSchema)]
pub struct Rates {
    /// Rate of gathers.
    pub gather_gb_per_s: Option<f64>,
    /// Rate of scatters.
    pub scatter_gb_per_s: Option<f64>,
}

/// Latencies as the engine sees them.
#[derive(Debug, Clone, Copy, Default, Serialize, JsonSchema)]
pub struct Latency {
    /// Median of lookups.
    pub lookup_p50: Option<u64>,
    /// 99th percentile of lookups.
    pub lookup_p99: Option<u64>,
    /// Median of loads.
    pub load_p50: Option<u64>,
    /// 95th percentile of loads.
    pub load_p95: Option<u64>,
    /// 99th percentile of loads.
    pub load_p99: Option<u64>,
}

/// Durations.
#[derive(Debug, Clone, Copy, Default, Serialize, JsonSchema)]
pub struct Seconds {
    /// Wall time.
    pub wall: f64,
    /// Time of the trace; null where time plays no part.
    pub r#virtual: Option<f64>,
}

/// Resources that were still held at the end.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Left {
    /// Running requests of the leader.
    pub slots: u64,
    /// Holds and leases.
    pub pins: u64,
    /// Copies that have not ended.
    pub copies_under_way: u64,
    /// Pages that are neither free nor ready.
    pub unsettled_pages: u64,
    /// Pages that requests of the engines hold.
    pub device_pages: u64,
    /// First contradiction that the leader's second count found; empty without one.
    pub contradiction: String,
    /// First wrong bytes and refusals.
    pub complaints: Vec<String>,
}

impl ReplayReport {
    /// Creates a report from the values that are known before the run.
    pub(super) fn new(arguments: &Arguments, workload: &Workload) -> Self {
        Self {
            version: REPORT_VERSION,
            mode: arguments.mode.name(),
            sequential: arguments.sequential,
            requests: 0,
            disturbed_requests: 0,
            trace: TraceInfo {
                name: workload.trace.name.clone(),
                digest: workload.trace.digest.clone(),
                block_tokens: workload.trace.block_tokens,
            },
            setup: Setup {
                model: arguments.model.to_string(),
                ranks: arguments.ranks,
                kv_shards: workload.sharding.shards(),
                replicas: arguments.replicas,
                engine_page_tokens: workload.unit_tokens,
                ratio: workload.ratio.pages(),
                g2_policy: match arguments.socket_dir {
                    Some(_) => "unknown".to_owned(),
                    None => arguments.policy().to_string(),
                },
                g1_pages: arguments.g1_pages,
                page_bytes: workload.page_bytes(),
                g2_pages: (workload.arena_pages < ARENA_PAGES_MAX)
                    .then_some(u64::from(workload.arena_pages)),
                g3_pages: (workload.disk_pages < ARENA_PAGES_MAX)
                    .then_some(u64::from(workload.disk_pages)),
                max_prompt_tokens: arguments.max_prompt_tokens,
                speedup: arguments.timestamps_speedup(),
                concurrency: arguments.concurrency,
            },
            tokens: Tokens::default(),
            blocks: BlockCounts::default(),
            arena: ArenaInfo::default(),
            moves: MoveCounts::default(),
            restart: None,
            bytes: Bytes::default(),
            rates: Rates::default(),
            latency_us: Latency::default(),
            first_token_us: FirstToken::default(),
            links: LinkReports::default(),
            waits: Waits::default(),
            prefill_seconds: Prefills::default(),
            seconds: Seconds::default(),
            left: Left::default(),
            decisions_digest: String::new(),
        }
    }

    /// Sets the bytes that all ranks together have copied from and to the engine's memory.
    pub(super) fn copied(&mut self, gathered: u64, scattered: u64) {
        self.bytes.gathered = gathered;
        self.bytes.scattered = scattered;
        self.links.d2h.bytes = gathered;
        self.links.h2d.bytes = scattered;
    }

    /// Adds a served request.
    pub(super) fn add(&mut self, served: &Served) {
        let page_tokens = u64::from(self.setup.engine_page_tokens);
        let (g1, found) = (u64::from(served.device_pages), u64::from(served.hit_pages));
        let g3 = u64::from(served.below_pages);
        self.requests += 1;
        self.disturbed_requests += u64::from(served.refusals > 0);
        self.waits.page_waits += u64::from(served.waited_for_pages);
        self.waits.refused_stores += u64::from(served.store_refused);
        self.tokens.prompt += served.tokens;
        self.tokens.hit_g1 += g1 * page_tokens;
        self.tokens.hit_g2 += (found - g3) * page_tokens;
        self.tokens.hit_g3 += g3 * page_tokens;
        self.tokens.computed += served.tokens - (g1 + found) * page_tokens;
    }

    /// Notes that all processes stop.
    pub(super) fn stopped(&mut self, by: RestartKind, used_pages: u64, digest: String) {
        self.restart = Some(Restart {
            at: self.requests,
            by,
            used_pages,
            listed_pages: 0,
            down_seconds: None,
            // Those before, until the end.
            tokens: self.tokens,
            decisions_digest: digest,
        });
    }

    /// At the end: counts the tokens after a restart.
    pub(super) fn restarted(&mut self) {
        let all = self.tokens;
        if let Some(restart) = &mut self.restart {
            let before = restart.tokens;
            restart.tokens = Tokens {
                prompt: all.prompt - before.prompt,
                hit_g1: all.hit_g1 - before.hit_g1,
                hit_g2: all.hit_g2 - before.hit_g2,
                hit_g3: all.hit_g3 - before.hit_g3,
                computed: all.computed - before.computed,
            };
        }
    }

    /// Copies the leader's counters, by their names.
    pub(super) fn count(&mut self, counter: impl Fn(&str) -> u64) {
        self.blocks = BlockCounts {
            stored: counter("blocks_stored"),
            grown: counter("blocks_grown"),
            loaded: counter("blocks_loaded"),
            branched: counter("blocks_branched"),
            split: counter("blocks_split"),
            evicted: counter("blocks_evicted"),
            refused: counter("blocks_refused"),
        };
        self.moves.moves = counter("moves");
        self.moves.pages = counter("moved_pages");
        self.moves.written_through_pages = counter("written_through_pages");
        self.moves.declined_tokens = counter("declined_tokens");
        self.moves.left_out = counter("moves_left_out");
        self.arena.largest_eviction_pages = counter("largest_eviction_pages");
        self.arena.evicted_pages = counter("evicted_pages");
    }

    /// Fails if bytes differed, something leaked, or the second count found a contradiction.
    pub(super) fn verdict(&self) -> Result<(), CommandError> {
        let Left {
            slots,
            pins,
            copies_under_way,
            unsettled_pages,
            device_pages,
            ..
        } = &self.left;
        let detail = self
            .left
            .complaints
            .first()
            .map_or_else(String::new, |text| format!(": {text}"));
        if self.bytes.mismatched > 0 {
            let bytes = self.bytes.mismatched;
            return Err(CommandError::Found(format!(
                "{bytes} bytes came back wrong{detail}"
            )));
        }
        if !self.left.contradiction.is_empty() {
            return Err(CommandError::Found(format!(
                "second count: {}",
                self.left.contradiction
            )));
        }
        if slots + pins + copies_under_way + unsettled_pages + device_pages > 0 {
            return Err(CommandError::Found(format!(
                "leaked: {slots} requests, {pins} pins, {copies_under_way} copies, {unsettled_pages} \
                 arena pages, {device_pages} device pages{detail}"
            )));
        }
        Ok(())
    }
}

/// Sorts a list and returns its percentile, given in thousandths; `None` for an empty list.
pub(super) fn percentile(values: &mut [u64], thousandths: usize) -> Option<u64> {
    values.sort_unstable();
    let last = values.len().checked_sub(1)?;
    values.get(last * thousandths / 1000).copied()
}
