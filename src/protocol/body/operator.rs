//! Bodies of the requests of operators: numbers, probes, drains and the filter of the log.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::is_false;
use crate::bounded::at_most;
use crate::limits::{NAMESPACE_ENTRIES_MAX, TIERS_MAX};

/// Requests the numbers of a leader or a worker that its status does not have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Measure {}

/// Numbers of one process. Counters run since its start.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MeasureAnswer {
    /// The clients of the process.
    pub connections: Connections,
    /// Tokens that lookups found beyond the engines' own, by tier and group; empty from a worker.
    pub hits: Vec<GroupHits>,
    /// Copies of the edges that were used; empty from a leader.
    pub edges: Vec<EdgeMeasure>,
    /// Orders of the leader that the worker refused, and errors that it answered to them, by code; empty from a leader.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub refused_orders: BTreeMap<String, u64>,
    /// The entries of the leader's file `namespaces`, in the order of the file; empty without one, and from a worker.
    #[serde(
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "at_most::<_, _, NAMESPACE_ENTRIES_MAX>"
    )]
    pub namespaces: Vec<NamespaceMeasure>,
    /// The leader refuses lookups, loads and stores.
    #[serde(skip_serializing_if = "is_false")]
    pub draining: bool,
}

/// The clients of one process, and what it refused.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Connections {
    /// Schedulers of engines that are connected.
    pub engines: u64,
    /// Ranks of engines that are connected.
    pub ranks: u64,
    /// Workers that are connected.
    pub workers: u64,
    /// Operators that are connected.
    pub admins: u64,
    /// Connections without a hello.
    pub strangers: u64,
    /// Requests that are not answered: credits in use.
    pub open_requests: u64,
    /// Bytes of those.
    pub open_bytes: u64,
    /// Messages that were not taken, and connections that were closed because their bytes are no messages.
    pub malformed_messages: u64,
    /// Connections that were refused before their handshake was complete.
    pub refused_handshakes: u64,
    /// Clients whose hello was refused.
    pub refused_hellos: u64,
    /// Requests that came again while they were open, and were not read.
    pub repeated_requests: u64,
    /// Messages that were refused by their bytes, their header, their sender's role or its credits, by the code of the
    /// reason. A request among them was answered with that error, an answer was dropped.
    pub refused_messages: BTreeMap<String, u64>,
    /// Errors that were sent, by code.
    pub errors: BTreeMap<String, u64>,
}

/// Tokens of hits, in [`MeasureAnswer`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GroupHits {
    /// Number of the tier.
    pub tier: u8,
    /// Number of the group.
    pub group: u8,
    /// Tokens.
    pub tokens: u64,
}

/// Pages of the namespaces of one entry of the file `namespaces`, in [`MeasureAnswer`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct NamespaceMeasure {
    /// Number of the entry in the file, from 1.
    pub entry: u32,
    /// Pages that lookups and loads hold.
    pub held_pages: u64,
    /// Most pages that they may hold; absent without a limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held_pages_max: Option<u64>,
    /// Stored pages in the tiers in which the entry has a limit.
    #[serde(deserialize_with = "at_most::<_, _, TIERS_MAX>")]
    pub stored: Vec<StoredPages>,
}

/// Stored pages of one entry in one tier, in [`NamespaceMeasure`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct StoredPages {
    /// Number of the tier.
    pub tier: u8,
    /// Pages that the tier holds.
    pub pages: u64,
    /// Pages from which on the entry's stores evict its own pages alone.
    pub pages_max: u64,
}

/// Copies of one edge on one worker, in [`MeasureAnswer`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct EdgeMeasure {
    /// Number of the tier that is read; 1 is the engine's memory.
    pub from: u8,
    /// Number of the tier that is written.
    pub to: u8,
    /// Copies that copied everything.
    pub complete: u64,
    /// Copies that ended before that.
    pub incomplete: u64,
    /// Bytes that were copied.
    pub bytes: u64,
    /// Copies that wait until their engine has written its pages.
    pub waiting: u64,
    /// Copies that wait for other copies, or for the rate of the edge.
    pub queued: u64,
    /// Copies that run.
    pub running: u64,
    /// Time that copies waited in their lane.
    pub queue: Durations,
    /// Time that copies ran.
    pub copy: Durations,
}

/// A histogram of durations.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Durations {
    /// Durations in each bucket; the bounds are the `latency_bounds_us` of `schema/messages.json`, and the last
    /// bucket has the durations above them.
    pub counts: Vec<u64>,
    /// Sum of the durations, in microseconds.
    pub sum_us: u64,
}

/// Checks that a leader or a worker handles requests. A leader looks a page up that no engine has; a worker copies one page
/// from memory of its own into memory of its own, through its lane of loads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Probe {}

/// Answer to a probe, after it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ProbeAnswer {
    /// Tiers in which the page was looked up; 0 from a worker.
    pub tiers: u8,
    /// Bytes that were copied and compared; 0 from a leader.
    pub copied_bytes: u64,
    /// The leader refuses lookups, loads and stores.
    #[serde(skip_serializing_if = "is_false")]
    pub draining: bool,
}

/// Makes a leader refuse lookups, loads and stores with `draining`, until its end or a `drain` with `resume`. Repeated, it
/// tells what still runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Drain {
    /// Ends the drain: requests are taken again.
    pub resume: bool,
}

/// Answer to a `drain`, at once: whether the leader is drained, and what still runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DrainAnswer {
    /// Nothing runs any longer that an end of the leader would interrupt.
    pub drained: bool,
    /// Loads that are not answered, also parked ones.
    #[serde(default)]
    pub loads: u64,
    /// Stores that are not answered.
    #[serde(default)]
    pub stores: u64,
    /// Transfers that have not ended on every rank, moves between tiers among them.
    #[serde(default)]
    pub transfers: u64,
}

/// Changes the filter of the process's log until its end.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SetLog {
    /// The filter, as in the setting `log`; at most 1,024 bytes.
    pub filter: String,
}

/// Answer to `set_log`: the filter is in use.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SetLogAnswer {
    /// The filter before.
    pub before: String,
}
