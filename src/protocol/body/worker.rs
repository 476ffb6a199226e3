//! Bodies of the messages between a leader and its workers: attach, copies and readiness.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::handshake::cut;
use super::{DiskStatus, PairSchema, RecordBody};
use crate::pairs::Pairs;
use kvferry_types::{EndedCopy, MemoryGeometry};

/// Attaches a worker: no order that it received over an older connection is in flight.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Attach {
    /// Engine instance of the worker.
    #[serde(default)]
    pub replica: u16,
    /// Rank of the worker.
    pub rank: u16,
    /// Ranks of an engine, by the worker's settings. A leader with other settings refuses the worker.
    pub ranks: u16,
    /// Shards of an engine's KV, by the worker's settings. A leader with other settings refuses the worker.
    pub kv_shards: u16,
    /// Sequence number of attaches over one connection. A repeated number is a retry.
    pub attach: u64,
    /// The depot of the worker's shard in each tier that the worker reaches, one for each tier.
    pub depots: Vec<AttachDepot>,
}

/// The pages of one shard in one tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AttachDepot {
    /// The tier: 2 is host memory, 3 a disk, 4 storage of other hosts.
    pub tier: u8,
    /// Identity of the depot: 16 random bytes, drawn when the depot was created.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "kvferry_types::BinarySchema")]
    pub depot: [u8; 16],
    /// Epoch of the leader that read the depot's inventory last; 0 without one. A leader ends if its epoch is not above
    /// those of all leaders before it.
    pub epoch: u64,
}

/// Answer to [`Attach`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Attached {
    /// Sequence number of the attach.
    pub attach: u64,
    /// Copies up to this number are not carried out by this worker.
    pub after: u64,
}

/// States that no process of the worker that the sender's hello names has run since before that hello, and that none starts
/// before the sender's connection has ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WorkerGone {}

/// Answer to [`WorkerGone`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct WorkerGoneAnswer {
    /// The leader counts the worker's process as ended. False if a connection that is younger than the sender's has the
    /// seat, or a process that the leader sees itself: the statement then had no effect.
    pub gone: bool,
}

/// States the engine memory of an attached worker, or that it has none: no copy of other memory is in flight. Sent after
/// each attach, and whenever that changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Memory {
    /// Sequence number of the statements over one connection. A repeated number is a retry.
    pub number: u64,
    /// The memory of the worker's engine; absent without one.
    #[serde(default)]
    pub memory: Option<StatedMemory>,
}

/// The engine memory of a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StatedMemory {
    /// Identity of the engine.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "kvferry_types::BinarySchema")]
    pub engine: [u8; 16],
    /// Geometry of the memory.
    #[schemars(with = "serde_json::Value")]
    pub geometry: MemoryGeometry,
    /// Pages of the size of the engine's largest page for which the depot of each tier has room.
    pub arena_pages: Vec<TierPages>,
}

/// Room of a depot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TierPages {
    /// The tier: 2 is host memory, 3 a disk, 4 storage of other hosts.
    pub tier: u8,
    /// Number of pages.
    pub pages: u32,
}

/// Answer to [`Memory`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MemoryAnswer {
    /// Sequence number of the statement.
    pub number: u64,
    /// Copies of an engine's memory up to this number are not carried out by this worker.
    pub after: u64,
}

/// States the pages of the tiers below host memory that an attached worker has open, after that has changed. Unlike after
/// [`Memory`], copies of the engine's memory go on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Tiers {
    /// Sequence number; [`Memory`] and this message share one sequence. A repeated number is a retry.
    pub number: u64,
    /// Bytes of one page; 0 if no tier is open.
    pub page_bytes: u64,
    /// Fingerprint of the layout of a page.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "kvferry_types::BinarySchema")]
    pub layout_fingerprint: [u8; 16],
    /// Number of those pages in each tier below host memory; 0 in one that is not open.
    pub pages: Vec<TierPages>,
}

/// Answer to [`Tiers`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TiersAnswer {
    /// Sequence number of the statement.
    pub number: u64,
}

/// Has a worker without an engine open its tiers below host memory for the pages of host memory, which wait to be written
/// there. It states them once they are open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OpenTiers {
    /// Bytes of one page; 0 to close the tiers, so that another worker can open them.
    pub page_bytes: u64,
    /// Fingerprint of the layout of a page.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "kvferry_types::BinarySchema")]
    pub layout_fingerprint: [u8; 16],
}

/// One transfer of an order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TransferBody {
    /// Id of the transfer, unique within the epoch.
    pub id: u64,
    /// The pages to copy: device pages on the engine's side, arena pages on that of any other tier.
    #[schemars(with = "Vec<PairSchema>")]
    pub pairs: Pairs,
    /// Record that is added to the inventory of the written tier after the last byte.
    #[serde(default)]
    pub record: Option<RecordBody>,
}

/// Orders transfers between two tiers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TransferOrder {
    /// The tier whose pages are read: 1 the engine's memory, 2 host memory, 3 a disk, 4 remote storage.
    pub from: u8,
    /// The tier whose pages are written.
    pub to: u8,
    /// Identity of the engine whose memory is read or written; absent if neither tier is 1.
    #[serde(with = "serde_bytes", default)]
    #[schemars(with = "Option<kvferry_types::BinarySchema>")]
    pub engine: Option<[u8; 16]>,
    /// The engine's request for which the transfers are. A transfer for a request that the engine has abandoned does not
    /// start.
    #[serde(default)]
    pub request: u64,
    /// The transfers start after the rank has reported that everything up to this number is written; those of a store
    /// with 0 after it has reported `request`.
    #[serde(default)]
    pub after: u64,
    /// The group of layers whose pages are copied, if `from` or `to` is 1.
    #[serde(default)]
    pub group: u8,
    /// Bytes of one page of the tiers below the engine's memory. A worker carries out no transfer of pages of another size
    /// than it knows.
    #[serde(default)]
    pub page_bytes: u64,
    /// The transfers. They may end in any order.
    pub transfers: Vec<TransferBody>,
}

/// Answer to [`TransferOrder`]: none of these transfers reads or writes any longer on this worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Ended {
    /// Rank of the worker.
    pub rank: u16,
    /// One result for each copy.
    pub copies: Vec<EndedCopy>,
}

/// Stops copies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Cancel {
    /// Numbers of the copies.
    pub transfers: Vec<u64>,
}

/// Progress of a worker that cannot serve yet, and its problem, if any.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Readiness {
    /// Bytes of the depot that are in memory.
    pub ready_bytes: u64,
    /// Bytes of the depot; 0 while it is not open.
    pub bytes: u64,
    /// Bytes of the depot that are pinned for a GPU; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pinned_bytes: Option<u64>,
    /// Reason why the worker gave up, or refused the engine's rank; empty without a problem.
    pub problem: String,
    /// The worker's disk; absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<Box<DiskStatus>>,
}

impl Readiness {
    /// Builds a progress report. A `problem` longer than [`TEXT_BYTES_MAX`] is cut.
    pub fn new(ready_bytes: u64, bytes: u64, pinned_bytes: Option<u64>, problem: String) -> Self {
        Self {
            ready_bytes,
            bytes,
            pinned_bytes,
            problem: cut(problem),
            disk: None,
        }
    }
}
