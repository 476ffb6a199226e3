//! Message bodies: a MessagePack map with these fields as keys. Unknown keys are skipped; a field that may be absent
//! has a default.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::pairs::{Pages, Pairs};
use kvferry_types::{GroupGeometry, Registration};

/// A body without any field.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Empty {}

/// What a client is. More may follow: a server refuses one that it does not know with an error, and not as malformed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The scheduler of an engine: looks up, loads, stores.
    Engine,
    /// One rank of an engine: registers its memory with its worker.
    Rank,
    /// A worker.
    Worker,
    /// A person or a probe.
    Admin,
    /// Another word.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// First message of a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Hello {
    /// Oldest version it speaks.
    pub version_min: u16,
    /// Newest version it speaks.
    pub version_max: u16,
    /// What it is.
    pub role: Role,
    /// 16 bytes that name the engine, kept over reconnects; zero for others.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub engine: [u8; 16],
    /// Its rank; 0 where there is none.
    #[serde(default)]
    pub rank: u16,
    /// A name for people, in logs.
    #[serde(default)]
    pub name: String,
    /// Which engine instance a worker or a rank belongs to.
    #[serde(default)]
    pub replica: u16,
    /// What it can do beyond its version, a bit each: [`FEATURE_TIMELINE`].
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
    /// The version that both speak from now on.
    pub version: u16,
    /// A client that has said nothing for so long, or heard nothing, says ping. The server closes a client that has said
    /// nothing for three times that; a client that has heard nothing for three times that connects anew.
    pub heartbeat_ms: u32,
    /// Requests that may wait for an answer at one time.
    pub request_credits: u32,
    /// Bytes of requests that may wait for an answer at one time.
    pub byte_credits: u64,
    /// Longest deadline of a request; a longer one is cut to it.
    #[serde(default)]
    pub deadline_max_ms: u32,
    /// Those of the features in the hello that this side can do, too.
    #[serde(default, skip_serializing_if = "no_features")]
    pub features: u64,
}

/// Answer to a request that is not carried out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ErrorBody {
    /// See the list of codes.
    pub code: u16,
    /// One line for people: what, which value, what to do.
    pub message: String,
    /// True when the same request may succeed later.
    #[serde(default)]
    pub retry: bool,
    /// True when nothing of the refused request is under way, and nothing will be: only then may an engine use the pages of
    /// a load or a store again. A leader that has looked at the request says so, and nobody else.
    #[serde(default)]
    pub over: bool,
}

/// Which pages of a sequence are there?
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Lookup {
    /// The engine's number of the request.
    pub slot: u64,
    /// Whose pages these are.
    #[serde(with = "serde_bytes", default)]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub namespace: Vec<u8>,
    /// Bytes of one page hash, 16 to 64.
    pub hash_bytes: u8,
    /// The hashes of all full pages of the prompt, packed.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub hashes: Vec<u8>,
    /// So many pages from the first on the engine has itself.
    #[serde(default)]
    pub device_pages: u32,
}

/// Answer to [`Lookup`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LookupAnswer {
    /// Pages behind the engine's own that can be loaded. They are pinned for a short time.
    pub hit_pages: u32,
    /// The page behind those is on its way: asking again may find more.
    #[serde(default)]
    pub pending: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
const fn nothing_before(after: &u64) -> bool {
    *after == 0
}

/// Copy found pages to the engine's memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Load {
    /// Which slot.
    pub slot: u64,
    /// Position of the first page in the sequence.
    pub first_page: u32,
    /// Device pages, one for each page from there on.
    #[schemars(with = "Vec<PageItemSchema>")]
    pub destination: Pages,
    /// The last number that the ranks were given for work of theirs (`written`): each of them copies once it has said that
    /// everything up to it is written. Lower than the id of this request. 0: nothing writes into the destination any more.
    #[serde(default, skip_serializing_if = "nothing_before")]
    pub after: u64,
}

/// Answer to [`Load`]: nothing writes its pages any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LoadAnswer {
    /// So many of them, from the first on, are in place on every rank. The engine computes the others.
    pub pages: u32,
}

/// Keep pages of a sequence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Store {
    /// Which slot.
    pub slot: u64,
    /// Position of the first page in the sequence.
    pub first_page: u32,
    /// Device pages, one for each page from there on.
    #[schemars(with = "Vec<PageItemSchema>")]
    pub source: Pages,
    /// Bytes of one page hash; 0 without further hashes.
    #[serde(default)]
    pub hash_bytes: u8,
    /// Hashes of pages that the slot may not know yet, packed.
    #[serde(with = "serde_bytes", default)]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub more_hashes: Vec<u8>,
    /// Position of the first of them. What the slot knows already must be the same, and nothing may be left out.
    #[serde(default)]
    pub more_from: u32,
}

/// Answer to [`Store`]: a lookup finds stored and present pages from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StoreAnswer {
    /// Pages that this request stored.
    pub stored_pages: u32,
    /// Pages that were there.
    pub present_pages: u32,
    /// Pages for which there was no room.
    #[serde(default)]
    pub refused_pages: u32,
    /// Pages whose copy failed.
    #[serde(default)]
    pub failed_pages: u32,
}

/// The request is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Finish {
    /// Which slot.
    pub slot: u64,
}

/// Stop stores that are under way, as far as they were asked before this: their engine wants its pages back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CancelStores {
    /// Those of this slot; all stores of the engine when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<u64>,
}

/// Answer to [`CancelStores`]: each of the stores has been answered, and no page of theirs is read any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CancelStoresAnswer {
    /// So many were under way.
    pub stores: u32,
}

/// This is the KV memory of one engine rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Register {
    /// Requests up to this one are over: nothing is copied for them any more.
    #[serde(default)]
    pub after: u64,
    /// 16 bytes that name the engine: those of its scheduler's hello.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub engine: [u8; 16],
    /// The memory.
    #[schemars(with = "serde_json::Value")]
    pub registration: Registration,
}

/// Answer to [`Register`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Registered {
    /// Pages that this rank's depot has room for.
    pub arena_pages: u32,
    /// Bytes of one page below the device.
    pub page_bytes: u64,
    /// Why nothing of this group is copied; empty when it is served.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub not_served: String,
}

/// Everything up to this number is written: pages that stores read, and work that loads wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Written {
    /// Id of the last such request.
    pub through: u64,
    /// It is written once the word of [`Registration::timeline`] is at least `through`, and not before.
    #[serde(default, skip_serializing_if = "is_false")]
    pub timeline: bool,
}

/// A worker is there: nothing that it was asked for over an older connection is under way any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Attach {
    /// Which engine instance it serves.
    #[serde(default)]
    pub replica: u16,
    /// Which rank of it.
    pub rank: u16,
    /// Ranks of an engine, by the worker's own settings. A leader that was started for another number refuses it.
    pub ranks: u16,
    /// Shards of an engine's KV, by the worker's own settings. The same holds.
    pub kv_shards: u16,
    /// Grows with each attach over one connection; the same again is a retry.
    pub attach: u64,
    /// The depot of its shard: 16 bytes drawn when that was made.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub depot: [u8; 16],
    /// Epoch of the leader that asked last for the depot's inventory; 0 when none has. A leader whose epoch is not above
    /// that of every leader before it ends.
    pub depot_epoch: u64,
    /// The memory of its engine, once that has registered it.
    #[serde(default)]
    pub memory: Option<AttachedMemory>,
}

/// The memory that a worker copies from and to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AttachedMemory {
    /// Whose.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub engine: [u8; 16],
    /// What the memory looks like.
    #[schemars(with = "serde_json::Value")]
    pub geometry: GroupGeometry,
    /// Pages of that size that the depot has room for.
    pub arena_pages: u32,
}

/// Answer to [`Attach`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Attached {
    /// Which attach.
    pub attach: u64,
    /// Transfers of copies up to this one are not for this worker.
    pub after: u64,
    /// Workers of all replicas that have attached with an engine's memory by now.
    pub attached_ranks: u32,
}

/// One copy of a transfer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CopyOrder {
    /// Its name, unique within the epoch.
    pub op: u64,
    /// Which pages. A store reads device pages and writes arena pages, a load the reverse.
    #[schemars(with = "Vec<PairSchema>")]
    pub pairs: Pairs,
    /// What a store writes into the inventory behind its last byte.
    #[serde(default)]
    pub record: Option<RecordBody>,
}

/// What an inventory keeps of the pages that a store fills.
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
    /// Place in the block of the first page that is filled.
    pub first: u16,
    /// Position of the block's first page in its sequence, modulo the ratio.
    pub phase: u16,
    /// Orders stores within the epoch.
    pub generation: u64,
    /// 16 bytes for each page that is filled, big-endian.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub fingerprints: Vec<u8>,
}

/// Copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Transfer {
    /// Whose memory.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub engine: [u8; 16],
    /// True: from the device to the depot. False: from the depot to the device.
    pub store: bool,
    /// For which request. A copy for a request that the engine has abandoned never starts.
    #[serde(default)]
    pub request: u64,
    /// The copies start once the rank has said that everything up to this number is written; those of a store also wait for
    /// `request`.
    #[serde(default)]
    pub after: u64,
    /// The copies. They may end in any order.
    pub copies: Vec<CopyOrder>,
}

/// How one copy ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CopyResult {
    /// Which copy.
    pub op: u64,
    /// True when every byte was copied.
    pub complete: bool,
    /// When not: pages, from the first on and in the order of the pairs, of which every byte was.
    #[serde(default)]
    pub complete_pages: u32,
    /// Bytes that were copied.
    #[serde(default)]
    pub bytes: u64,
    /// How long it took, in microseconds.
    #[serde(default)]
    pub copy_us: u64,
}

/// Answer to [`Transfer`]: nothing of these copies reads or writes any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Ended {
    /// Which rank.
    pub rank: u16,
    /// One result for each copy.
    pub copies: Vec<CopyResult>,
}

/// Stop copies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Cancel {
    /// Which.
    pub ops: Vec<u64>,
}

/// Removes pages from the inventory of the worker's shard. Without a namespace: all pages; without fingerprints: all pages
/// of the namespace. Pages that were stored after `through` stay listed, because this request may be repeated after they
/// were stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Invalidate {
    /// Number of the reset.
    pub reset: u64,
    /// No byte, or 8: the pages whose domain begins with these.
    #[serde(with = "serde_bytes", default)]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub namespace: Vec<u8>,
    /// 16 bytes for each page, big-endian.
    #[serde(with = "serde_bytes", default)]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub fingerprints: Vec<u8>,
    /// `generation` of the last store of the header's epoch that is meant. All stores of older epochs are.
    pub through: u64,
}

/// Answer to [`Invalidate`]: the pages are removed from the inventory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Invalidated {
    /// Number of the reset.
    pub reset: u64,
}

/// Read the inventory of the worker's depot from an arena page on. A depot that held pages of another size is emptied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ReadInventory {
    /// Which depot is meant.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub depot: [u8; 16],
    /// Bytes of one page of one rank.
    pub page_bytes: u64,
    /// Number of the request: an answer to one of an earlier reading may list pages that have been removed since.
    #[serde(default)]
    pub reading: u64,
    /// First arena page that is looked at.
    pub from: u32,
}

/// Answer to [`ReadInventory`]: what the depot lists from a page on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Inventory {
    /// Which depot was read.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub depot: [u8; 16],
    /// That of the question.
    pub reading: u64,
    /// First arena page that was looked at.
    pub from: u32,
    /// First arena page that was not, unless it was the last.
    #[serde(default)]
    pub next: Option<u32>,
    /// 76 bytes for each page that holds something: arena page (4), first arena page of its block (4), place in the block
    /// (2), phase of the block (2), epoch (8) and generation (8) of its store, anchor (16), domain (16), fingerprint (16);
    /// numbers big-endian.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "Vec<u8>", extend("contentEncoding" = "binary"))]
    pub records: Vec<u8>,
}

/// Forget pages. Without a namespace: every page; without hashes: every page of the namespace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Reset {
    /// Whose pages, or everybody's.
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

/// Answer to [`Reset`]: none of them is found any more, now or after a restart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ResetAnswer {
    /// Pages that were forgotten.
    pub pages: u32,
}

/// An engine's rank wants pages back: nothing may be copied for these requests any more. The answer comes when nothing is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Abandon {
    /// Which requests.
    pub requests: Vec<u64>,
}

/// How is it going?
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Status {
    /// Recount pools and holds by a second path, which takes time in proportion to the arena.
    #[serde(default)]
    pub check: bool,
}

/// How far a worker is that cannot serve yet: what of its host memory is there, and what keeps it from going on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Readiness {
    /// Bytes of its depot that are in memory.
    pub ready_bytes: u64,
    /// Bytes of its depot; 0 while it is not open.
    pub bytes: u64,
    /// Bytes of its depot that are pinned for a GPU; absent where none copies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pinned_bytes: Option<u64>,
    /// Why it gave up, or turned the engine's rank away; empty when all is well.
    pub problem: String,
}

/// A rank in [`StatusAnswer`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RankStatus {
    /// Which rank.
    pub rank: u16,
    /// Its worker is there, with the engine's memory.
    pub attached: bool,
    /// Process id of the worker; 0 when it is not known.
    #[serde(default)]
    pub pid: u32,
    /// Of which engine instance.
    #[serde(default)]
    pub replica: u16,
    /// Stores that it copies, or is about to.
    #[serde(default)]
    pub gathers: u32,
    /// Loads that it copies, or is about to.
    #[serde(default)]
    pub scatters: u32,
    /// Bytes of its depot that are in memory.
    #[serde(default)]
    pub host_ready_bytes: u64,
    /// Bytes of its depot; 0 before its worker has said so.
    #[serde(default)]
    pub host_bytes: u64,
    /// Bytes of its depot that are pinned for a GPU; absent where none copies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_pinned_bytes: Option<u64>,
    /// Why its worker gave up or was turned away, or turned the engine's rank away; empty when all is well.
    #[serde(default)]
    pub problem: String,
}

/// Answer to [`Status`]. Counters run since the leader's start; a reader skips those that it does not know.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct StatusAnswer {
    /// Version of the program.
    pub version: String,
    /// Epoch of the leader.
    pub epoch: u64,
    /// Every rank is there: lookups are served.
    pub ready: bool,
    /// Pages of the largest block.
    pub ratio: u32,
    /// Tokens of one page; 0 before a rank attached.
    pub engine_page_tokens: u32,
    /// The ranks.
    pub ranks: Vec<RankStatus>,
    /// Running requests.
    pub slots: u64,
    /// Holds and leases.
    pub pins: u64,
    /// Copies that have not ended.
    pub copies_under_way: u64,
    /// Pages of the arena by state: free, reserved, filling, ready, quarantined.
    pub pages: std::collections::BTreeMap<String, u64>,
    /// Blocks that live.
    pub blocks: u64,
    /// Counters by name.
    pub counters: std::collections::BTreeMap<String, u64>,
    /// Digest of the decisions about finished requests.
    pub decisions_digest: String,
    /// What the second count found wrong; empty when nothing, or when it was not asked for.
    pub contradiction: String,
}

/// A page index, or a run `[start, count]`.
#[derive(JsonSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "describes the wire, is never made")]
pub enum PageItemSchema {
    /// One page.
    Page(u32),
    /// Neighbours.
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
