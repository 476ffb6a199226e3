//! Message bodies: a MessagePack map with these fields as keys. Unknown keys are skipped; a field that may be absent
//! has a default.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::pairs::{Pages, Pairs};
use kvferry_types::{GroupGeometry, Registration};

/// A message without fields.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Empty {}

/// The role of a client. More may be added: an unknown role is answered with an error, and is no protocol violation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The scheduler of an engine: sends lookups, loads, stores.
    Engine,
    /// One rank of an engine: registers its memory with its worker.
    Rank,
    /// A worker.
    Worker,
    /// An operator or a probe.
    Admin,
    /// A role that this version does not know.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// First message of a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Hello {
    /// Oldest protocol version that the client supports.
    pub version_min: u16,
    /// Newest protocol version that the client supports.
    pub version_max: u16,
    /// Role of the client.
    pub role: Role,
    /// Identity of the engine, 16 bytes, the same over reconnects; zero for other roles.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub engine: [u8; 16],
    /// Rank of a worker or of an engine's rank; 0 for other roles.
    #[serde(default)]
    pub rank: u16,
    /// Name for logs.
    #[serde(default)]
    pub name: String,
    /// Engine instance that a worker or a rank belongs to.
    #[serde(default)]
    pub replica: u16,
    /// Features beyond the version, one bit each: [`FEATURE_TIMELINE`].
    #[serde(default, skip_serializing_if = "no_features")]
    pub features: u64,
}

/// Feature bit: the rank's device writes its progress into a word of its own memory, and the worker polls that word
/// ([`Registration::timeline`], [`Written::timeline`]).
pub const FEATURE_TIMELINE: u64 = 1;

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
const fn no_features(features: &u64) -> bool {
    *features == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
const fn is_false(value: &bool) -> bool {
    !*value
}

/// Answer to [`Hello`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Welcome {
    /// The protocol version of this connection.
    pub version: u16,
    /// Milliseconds of a heartbeat. A client that has sent nothing, or received nothing, for a heartbeat sends `ping`.
    /// The server closes a connection over which it has received nothing for three heartbeats; a client that has
    /// received nothing for as long reconnects.
    pub heartbeat_ms: u32,
    /// Most requests that may be unanswered at one time.
    pub request_credits: u32,
    /// Most bytes of requests that may be unanswered at one time.
    pub byte_credits: u64,
    /// Longest deadline of a request; a later one is cut to it.
    #[serde(default)]
    pub deadline_max_ms: u32,
    /// The features of the hello that the server has, too.
    #[serde(default, skip_serializing_if = "no_features")]
    pub features: u64,
}

/// Answer to a request that is not carried out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ErrorBody {
    /// The error code; `docs/wire.md` lists all codes.
    pub code: u16,
    /// One line for people: the field, its value and the remedy.
    pub message: String,
    /// True when the same request may succeed later.
    #[serde(default)]
    pub retry: bool,
    /// True when no copy for the refused request runs or will run: only then may an engine reuse the pages of a load or
    /// a store. Only the leader sets it, after it has examined the request.
    #[serde(default)]
    pub over: bool,
}

/// Finds and holds the pages of a sequence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Lookup {
    /// The engine's number of the running request.
    pub slot: u64,
    /// Namespace of the pages.
    #[serde(with = "serde_bytes", default)]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub namespace: Vec<u8>,
    /// Bytes of one page hash, 16 to 64.
    pub hash_bytes: u8,
    /// The hashes of all full pages of the prompt, packed.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub hashes: Vec<u8>,
    /// Number of pages, from the first one on, that the engine has itself.
    #[serde(default)]
    pub device_pages: u32,
}

/// Answer to [`Lookup`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LookupAnswer {
    /// Pages after the engine's own that can be loaded. They are held for a limited time.
    pub hit_pages: u32,
    /// The page after those is being stored: a later lookup may find more.
    #[serde(default)]
    pub pending: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
const fn nothing_before(after: &u64) -> bool {
    *after == 0
}

/// Copies held pages to the engine's memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Load {
    /// Slot of the lookup that holds the pages.
    pub slot: u64,
    /// Position of the first page in the sequence.
    pub first_page: u32,
    /// Device pages, one for each page from there on.
    #[schemars(with = "Vec<PageItemSchema>")]
    pub destination: Pages,
    /// The last request number that the ranks received for work of their own (`written`): each rank's copy starts after
    /// everything up to it is written. Lower than the id of this request. 0: nothing writes to the destination.
    #[serde(default, skip_serializing_if = "nothing_before")]
    pub after: u64,
}

/// Answer to [`Load`]: the pages are no longer written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LoadAnswer {
    /// Number of pages, from the first one on, that are in place on every rank. The engine computes the others.
    pub pages: u32,
}

/// Stores pages of a sequence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Store {
    /// Slot of the lookup that opened the sequence.
    pub slot: u64,
    /// Position of the first page in the sequence.
    pub first_page: u32,
    /// Device pages, one for each page from there on.
    #[schemars(with = "Vec<PageItemSchema>")]
    pub source: Pages,
    /// Bytes of one page hash; 0 without further hashes.
    #[serde(default)]
    pub hash_bytes: u8,
    /// Hashes of pages that the slot may not have yet, packed.
    #[serde(with = "serde_bytes", default)]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub more_hashes: Vec<u8>,
    /// Position of the first of them. Hashes that the slot has must be equal, and none may be left out.
    #[serde(default)]
    pub more_from: u32,
}

/// Answer to [`Store`]: lookups find stored and present pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StoreAnswer {
    /// Pages that this request stored.
    pub stored_pages: u32,
    /// Pages that were stored before.
    pub present_pages: u32,
    /// Pages for which there was no room.
    #[serde(default)]
    pub refused_pages: u32,
    /// Pages whose copy failed.
    #[serde(default)]
    pub failed_pages: u32,
}

/// Ends a running request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Finish {
    /// Slot of the request.
    pub slot: u64,
}

/// Stops the stores in flight that were requested before this one, because their engine needs the pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CancelStores {
    /// Stops the stores of this slot; those of all slots when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<u64>,
}

/// Answer to [`CancelStores`]: each of the stores has been answered, and none of their pages is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CancelStoresAnswer {
    /// Number of stores that were in flight.
    pub stores: u32,
}

/// Registers the KV memory of one engine rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Register {
    /// Requests up to this one are over: no copy for them starts.
    #[serde(default)]
    pub after: u64,
    /// Identity of the engine, 16 bytes: that of its scheduler's hello.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub engine: [u8; 16],
    /// Layout and handles of the memory.
    #[schemars(with = "serde_json::Value")]
    pub registration: Registration,
}

/// Answer to [`Register`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Registered {
    /// Pages for which this rank's depot has room.
    pub arena_pages: u32,
    /// Bytes of one page in the depot.
    pub page_bytes: u64,
    /// Reason why this group is not copied; empty when it is served.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub not_served: String,
}

/// Everything up to this request is written: pages that stores read, and work that loads wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Written {
    /// Id of the last such request.
    pub through: u64,
    /// The request is written as soon as the word of [`Registration::timeline`] is at least `through`, and not before.
    #[serde(default, skip_serializing_if = "is_false")]
    pub timeline: bool,
}

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
    /// Identity of the depot of the worker's shard: 16 random bytes, drawn when the depot was created.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub depot: [u8; 16],
    /// Epoch of the leader that read the depot's inventory last; 0 without one. A leader ends if its epoch is not above
    /// those of all leaders before it.
    pub depot_epoch: u64,
    /// The memory of the worker's engine, once a rank has registered it.
    #[serde(default)]
    pub memory: Option<AttachedMemory>,
}

/// The engine memory of a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AttachedMemory {
    /// Identity of the engine.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub engine: [u8; 16],
    /// Geometry of the memory.
    #[schemars(with = "serde_json::Value")]
    pub geometry: GroupGeometry,
    /// Pages of that size for which the depot has room.
    pub arena_pages: u32,
}

/// Answer to [`Attach`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Attached {
    /// Sequence number of the attach.
    pub attach: u64,
    /// Copies up to this number are not carried out by this worker.
    pub after: u64,
    /// Workers of all replicas that are attached with an engine's memory.
    pub attached_ranks: u32,
}

/// One copy of a transfer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CopyOrder {
    /// Number of the copy, unique within the epoch.
    pub op: u64,
    /// The pages to copy. A store reads device pages and writes arena pages, a load the reverse.
    #[schemars(with = "Vec<PairSchema>")]
    pub pairs: Pairs,
    /// Record that a store adds to the inventory after its last byte.
    #[serde(default)]
    pub record: Option<RecordBody>,
}

/// The inventory's record of the pages that a store fills.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RecordBody {
    /// Keyed hash by which the block is found, big-endian.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub anchor: [u8; 16],
    /// Keyed hashes, big-endian: 8 bytes of the namespace, 8 of namespace, layout and group.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub domain: [u8; 16],
    /// First arena page of the block.
    pub block_start: u32,
    /// Position in the block of the first page that is filled.
    pub first: u16,
    /// Position of the block's first page in its sequence, modulo the ratio.
    pub phase: u16,
    /// Orders the stores of one epoch.
    pub generation: u64,
    /// Fingerprints, 16 bytes for each page that is filled, big-endian.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub fingerprints: Vec<u8>,
}

/// Orders copies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Transfer {
    /// Identity of the engine whose memory is copied.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub engine: [u8; 16],
    /// True: from the device to the depot. False: from the depot to the device.
    pub store: bool,
    /// The request for which the copies are. A copy for a request that the engine has abandoned does not start.
    #[serde(default)]
    pub request: u64,
    /// The copies start after the rank has reported that everything up to this number is written; those of a store also
    /// wait for `request`.
    #[serde(default)]
    pub after: u64,
    /// The copies. They may end in any order.
    pub copies: Vec<CopyOrder>,
}

/// The result of one copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CopyResult {
    /// Number of the copy.
    pub op: u64,
    /// True when every byte was copied.
    pub complete: bool,
    /// If not: number of pages, from the first one on and in the order of the pairs, of which every byte was copied.
    #[serde(default)]
    pub complete_pages: u32,
    /// Bytes that were copied.
    #[serde(default)]
    pub bytes: u64,
    /// Duration of the copy, in microseconds.
    #[serde(default)]
    pub copy_us: u64,
}

/// Answer to [`Transfer`]: none of these copies reads or writes any longer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Ended {
    /// Rank of the worker.
    pub rank: u16,
    /// One result for each copy.
    pub copies: Vec<CopyResult>,
}

/// Stops copies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Cancel {
    /// Numbers of the copies.
    pub ops: Vec<u64>,
}

/// Removes pages from the inventory of the worker's shard. Without a namespace: all pages; without fingerprints: all pages
/// of the namespace. Pages that were stored after `through` stay listed, because this request may be repeated after they
/// were stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Invalidate {
    /// Number of the reset.
    pub reset: u64,
    /// Empty, or 8 bytes: selects the pages whose domain begins with these.
    #[serde(with = "serde_bytes", default)]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub namespace: Vec<u8>,
    /// Fingerprints of the pages, 16 bytes each, big-endian.
    #[serde(with = "serde_bytes", default)]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub fingerprints: Vec<u8>,
    /// Covers stores of the header's epoch up to this `generation`, and all stores of older epochs.
    pub through: u64,
}

/// Answer to [`Invalidate`]: the pages are removed from the inventory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Invalidated {
    /// Number of the reset.
    pub reset: u64,
}

/// Reads the inventory of the worker's depot from an arena page on. A depot with pages of another size is emptied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ReadInventory {
    /// Identity of the depot.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub depot: [u8; 16],
    /// Bytes of one page of one rank.
    pub page_bytes: u64,
    /// Number of the request: an answer to one of an earlier reading may list pages that have been removed since.
    #[serde(default)]
    pub reading: u64,
    /// First arena page to read.
    pub from: u32,
}

/// Answer to [`ReadInventory`]: the pages that the depot lists, from a page on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Inventory {
    /// Identity of the depot that was read.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub depot: [u8; 16],
    /// Number of the request.
    pub reading: u64,
    /// First arena page that was read.
    pub from: u32,
    /// First arena page that was not read; absent after the last page.
    #[serde(default)]
    pub next: Option<u32>,
    /// 76 bytes for each page in use: arena page (4), first arena page of its block (4), position in the block (2),
    /// phase of the block (2), epoch (8) and generation (8) of its store, anchor (16), domain (16), fingerprint (16);
    /// numbers big-endian.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub records: Vec<u8>,
}

/// Removes pages. Without a namespace: every page; without hashes: every page of the namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Reset {
    /// Namespace of the pages; absent for all namespaces.
    #[serde(default)]
    #[schemars(with = "Option<Vec<u8>>")]
    pub namespace: Option<serde_bytes::ByteBuf>,
    /// Bytes of one hash; 0 without hashes.
    #[serde(default)]
    pub hash_bytes: u8,
    /// Hashes of the pages, packed.
    #[serde(with = "serde_bytes", default)]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub hashes: Vec<u8>,
}

/// Answer to [`Reset`]: lookups find none of the pages, neither now nor after a restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ResetAnswer {
    /// Number of pages that were removed.
    pub pages: u32,
}

/// Stops the copies for these requests, and forbids later ones. Answered when none of them runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Abandon {
    /// Ids of the requests.
    pub requests: Vec<u64>,
}

/// Requests the state of a leader.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Status {
    /// Recounts pages, pins and blocks independently, in time proportional to the size of the arena.
    #[serde(default)]
    pub check: bool,
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
    pub gathers: u32,
    /// Loads that the worker has not ended.
    #[serde(default)]
    pub scatters: u32,
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
    /// Pages of the largest block.
    pub ratio: u32,
    /// Tokens of one page; 0 before a rank has attached.
    pub engine_page_tokens: u32,
    /// The ranks of all replicas.
    pub ranks: Vec<RankStatus>,
    /// Number of running requests.
    pub slots: u64,
    /// Number of holds and leases.
    pub pins: u64,
    /// Number of copies that have not ended.
    pub copies_under_way: u64,
    /// Pages of the arena by state: free, reserved, filling, ready, quarantined.
    pub pages: std::collections::BTreeMap<String, u64>,
    /// Number of blocks.
    pub blocks: u64,
    /// Counters by name.
    pub counters: std::collections::BTreeMap<String, u64>,
    /// Digest of the decisions about finished requests.
    pub decisions_digest: String,
    /// First contradiction of the recount; empty without one, or if no recount was requested.
    pub contradiction: String,
}

/// A page index, or a run `[start, count]`.
#[derive(JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "describes the wire, is never made")]
pub enum PageItemSchema {
    /// One page.
    Page(u32),
    /// Consecutive pages.
    Run(u32, u32),
}

/// `[src, dst]` of version 1, or `[[srcs], [dsts]]` of version 2.
#[derive(JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "describes the wire, is never made")]
pub enum PairSchema {
    /// Two page indices.
    Pages(u32, u32),
    /// Two lists of items with the same number of pages.
    Fragments(Vec<PageItemSchema>, Vec<PageItemSchema>),
}
