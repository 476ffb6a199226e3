//! Bodies of `status`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::handshake::cut;
use super::{is_false, is_zero};
use crate::bounded::at_most;
use crate::limits::{PROCESSES_MAX, TIERS_MAX};

/// Requests the state of a leader.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Status {
    /// Recounts pages, pins and blocks independently, in time proportional to the size of the arena.
    #[serde(default)]
    pub check: bool,
}

/// How far a disk can be used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = kvferry_types::open_words)]
#[serde(rename_all = "snake_case")]
pub enum DiskHealth {
    /// It is read and written.
    Ok,
    /// It has less room than its cap, and uses what it has.
    Full,
    /// It is read, and takes no writes.
    ReadOnly,
    /// It serves nothing.
    #[default]
    Off,
    /// A state that this version does not know.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

impl DiskHealth {
    /// Whether moves and resets may be recorded on the disk. A full one records resets. A word of a later version counts
    /// as one that takes no writes: nothing is lost by moves that are not ordered.
    pub fn takes_writes(self) -> bool {
        !matches!(self, Self::ReadOnly | Self::Unknown)
    }

    /// The name in status.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Full => "full",
            Self::ReadOnly => "read_only",
            Self::Off => "off",
            Self::Unknown => "unknown",
        }
    }
}

/// The disk of one worker. Counters run since the start of the worker.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct DiskStatus {
    /// How far the disk can be used.
    pub health: DiskHealth,
    /// Why it cannot be used as configured; empty for `ok`.
    pub reason: String,
    /// Bytes that all files of the shard use.
    pub used_bytes: u64,
    /// Bytes that they may use.
    pub cap_bytes: u64,
    /// Pages of the open set that the disk lists.
    pub listed_pages: u64,
    /// Pages of those that are durable, as of the last flush.
    pub durable_pages: u64,
    /// Bytes of the pages that were written.
    pub written_bytes: u64,
    /// Bytes of those in the present hour and the 23 before it.
    pub day_written_bytes: u64,
    /// Pages that the scrub has read.
    pub scrubbed_pages: u64,
    /// Pages of those that had changed.
    pub bad_pages: u64,
    /// Pages of those that the disk did not read.
    pub unreadable_pages: u64,
    /// Pages whose place failed since the disk was opened.
    pub quarantined_pages: u64,
    /// Pages that had changed when they were read to be served; `bad_pages` are those that the scrub found.
    #[serde(skip_serializing_if = "is_zero")]
    pub bad_reads: u64,
}

impl DiskStatus {
    /// The state of a disk. A `reason` longer than [`TEXT_BYTES_MAX`](super::TEXT_BYTES_MAX) is cut.
    pub fn new(health: DiskHealth, reason: String) -> Self {
        Self {
            health,
            reason: cut(reason),
            ..Self::default()
        }
    }

    /// The same state, with these numbers.
    #[must_use]
    pub fn with(self, numbers: Self) -> Self {
        Self {
            health: self.health,
            reason: self.reason,
            ..numbers
        }
    }
}

/// A rank in [`StatusAnswer`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RankStatus {
    /// Number of the rank.
    pub rank: u16,
    /// The rank's worker is attached with the engine's memory.
    pub attached: bool,
    /// Process id of the worker; 0 if unknown.
    #[serde(default)]
    pub pid: u32,
    /// Engine instance of the rank.
    #[serde(default)]
    pub replica: u16,
    /// Stores that the worker has not ended.
    #[serde(default)]
    pub stores: u32,
    /// Loads that the worker has not ended.
    #[serde(default)]
    pub loads: u32,
    /// Bytes of the depot that are in memory.
    #[serde(default)]
    pub host_ready_bytes: u64,
    /// Bytes of the depot; 0 before the worker has reported them.
    #[serde(default)]
    pub host_bytes: u64,
    /// Bytes of the depot that are pinned for a GPU; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_pinned_bytes: Option<u64>,
    /// Reason why the worker gave up, was refused, or refused the engine's rank; empty without a problem.
    #[serde(default)]
    pub problem: String,
    /// A worker of the rank is connected; absent from leaders of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connected: Option<bool>,
    /// The worker's disk; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<Box<DiskStatus>>,
}

/// A tier below the device, in [`StatusAnswer`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TierStatus {
    /// Number of the tier: 2 is host memory (G2), 3 a disk (G3).
    pub tier: u8,
    /// Pages of the tier; 0 while it serves none, because a rank is missing or its contents are being read.
    pub pages: u64,
    /// Pages of those that hold something.
    pub used_pages: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Pages that lookups found there and in no faster tier, counted by their hashes.
    pub hit_pages: u64,
    /// Pages that lookups did not find in a faster tier, counted by their hashes: `hit_pages`, and those that lookups did
    /// not find at all.
    pub lookup_pages: u64,
    /// Pages that were evicted.
    pub evicted_pages: u64,
    /// Places of pages that failed on a disk and are out of use.
    pub quarantined_pages: u64,
    /// Pages by state: free, reserved, filling, ready, quarantined, out_of_use.
    pub page_states: std::collections::BTreeMap<String, u64>,
}

/// Transfers between tiers below the device, in [`StatusAnswer`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MovesStatus {
    /// Moves in flight.
    pub under_way: u64,
    /// Blocks that wait to be moved.
    pub waiting: u64,
    /// Moves that were ordered.
    pub ordered: u64,
    /// Pages of those.
    pub pages: u64,
    /// Blocks that were not moved, because too many waited.
    pub left_out: u64,
    /// Pages that failed their checksum when they were read.
    pub bad_sources: u64,
    /// Blocks that left host memory while they waited to be moved to a slower tier.
    #[serde(skip_serializing_if = "is_zero")]
    pub gone: u64,
}

/// The engines of a leader, their open requests, and the pages of running copies.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct RequestsStatus {
    /// Pages that running copies read from engines, which engines keep until then; pages of all groups.
    pub storing_pages: u64,
    /// Pages that running copies write to engines; pages of all groups.
    pub loading_pages: u64,
    /// Number of engines that are connected.
    pub engines: u64,
    /// Number of requests of engines and of admin sessions that are not answered, except parked ones.
    pub open_requests: u64,
    /// Loads of those.
    pub open_loads: u64,
    /// Stores of those.
    pub open_stores: u64,
    /// Loads and stores that wait until no copy of an older leader can run, and are then refused.
    pub parked_requests: u64,
}

/// How often a supervisor has started a process again since the supervisor's own start, in [`StatusAnswer`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct RestartedProcess {
    /// The process: `leader`, `monitor`, or `worker-R-N` for rank N of replica R.
    pub process: String,
    /// Number of restarts by the cause of the end before: `exit`, `signal`, `out_of_memory`, `fenced`, `not_started`,
    /// `unknown`.
    pub causes: std::collections::BTreeMap<String, u64>,
}

/// Answer to [`Status`]. Counters run since the leader's start; readers skip unknown ones.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct StatusAnswer {
    /// Version of the program.
    pub version: String,
    /// Epoch of the leader.
    pub epoch: u64,
    /// True when lookups are served for at least one engine.
    pub ready: bool,
    /// The leader refuses lookups, loads and stores, as an operator has ordered.
    #[serde(skip_serializing_if = "is_false")]
    pub draining: bool,
    /// Pages of the largest block.
    pub ratio: u32,
    /// Tokens of one hash, in which hits are counted: the page of a model with one group. 0 before a rank has attached.
    pub hash_tokens: u32,
    /// The ranks of all replicas.
    pub ranks: Vec<RankStatus>,
    /// Number of running requests.
    pub slots: u64,
    /// Number of pins and leases.
    pub pins: u64,
    /// Number of copies that have not ended.
    pub copies_under_way: u64,
    /// Engines, their open requests, and the pages of running copies.
    pub requests: Box<RequestsStatus>,
    /// Counters by name.
    pub counters: std::collections::BTreeMap<String, u64>,
    /// The tiers below the device, fastest first.
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "at_most::<_, _, TIERS_MAX>"
    )]
    pub tiers: Vec<TierStatus>,
    /// Transfers between tiers; absent from a leader with one tier.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moves: Option<Box<MovesStatus>>,
    /// Digest of the decisions about finished requests; absent without the setting `record_decisions`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decisions_digest: Option<String>,
    /// First contradiction of the second count, empty without one; absent if no second count was requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub contradiction: Option<String>,
    /// Processes that were started again; empty without any, and from a leader that `kvferry up` has not started.
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "at_most::<_, _, PROCESSES_MAX>"
    )]
    pub restarts: Vec<RestartedProcess>,
}

impl StatusAnswer {
    /// The state of a tier, by its number; `None` if the leader has no such tier.
    pub fn tier(&self, number: u8) -> Option<&TierStatus> {
        self.tiers.iter().find(|tier| tier.tier == number)
    }

    /// Pages of a tier that are in a state, by its name.
    pub fn pages_in(&self, tier: u8, state: &str) -> u64 {
        let states = self.tier(tier).map(|tier| &tier.page_states);
        states
            .and_then(|states| states.get(state))
            .copied()
            .unwrap_or(0)
    }
}
