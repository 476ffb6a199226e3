//! Bodies of the leader's change log: which pages its tiers gained and lost.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
const fn is_zero(value: &u8) -> bool {
    *value == 0
}

/// Reads the change log from a record on, and the pages that are present, for a reader that begins.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ReadEvents {
    /// Epoch of the leader whose records the reader has; 0 without any.
    pub epoch: u64,
    /// Number of the first record to read: `next` of the last answer, 0 without one.
    pub from: u64,
    /// Time for which the answer may wait for the first change; at most 30 s, and at most the deadline of the request. 0: the
    /// answer comes at once.
    #[serde(default)]
    pub wait_ms: u32,
    /// Pages that the answer names, at most; from 1 to 8,192. A record with more of them is not divided.
    pub most: u32,
    /// Only pages of this namespace, in the layout that the leader serves; absent for all pages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<kvferry_types::BinarySchema>")]
    pub namespace: Option<serde_bytes::ByteBuf>,
    /// The answer lists present pages, too: from this cursor on, 0 for the first ones. Absent for records alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cursor: Option<u64>,
}

/// Answer to [`ReadEvents`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Events {
    /// Epoch of the leader.
    pub epoch: u64,
    /// Number of the first record that the reader does not have yet.
    pub next: u64,
    /// Records before these are missing: the reader forgets every page, and begins again.
    pub lost: bool,
    /// Bytes of a hash in the records: the last ones of the engine's hash.
    pub hash_bytes: u8,
    /// Changes in their order.
    pub records: Vec<EventRecord>,
    /// Cursor of the next present pages; absent when all are listed, or none were requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cursor: Option<u64>,
}

/// What a record reports.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = kvferry_types::open_words)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// Pages are found in the tier.
    Stored,
    /// Pages are not found in the tier any longer.
    Gone,
    /// No page is found in the tier any longer: it closed.
    Cleared,
    /// A later kind, which changes no page's place: readers skip it.
    #[default]
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// Why pages are gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = kvferry_types::open_words)]
#[serde(rename_all = "snake_case")]
pub enum EventReason {
    /// They made room for other pages.
    Evicted,
    /// They, or a page before them in their block, failed their checksum or were not read.
    Damaged,
    /// A reset covers them.
    Reset,
    /// A later reason.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

/// One change: of pages of one domain, which lie in consecutive arena pages of a tier.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EventRecord {
    /// What happened.
    pub event: EventKind,
    /// Number of the tier: 2 for host memory, 3 for the disk.
    pub tier: u8,
    /// 8 bytes: stand for the namespace. Empty in `cleared`.
    #[serde(with = "serde_bytes", default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "kvferry_types::BinarySchema")]
    pub namespace: Vec<u8>,
    /// 7 bytes: stand for the layout within that namespace. Empty in `cleared`.
    #[serde(with = "serde_bytes", default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "kvferry_types::BinarySchema")]
    pub layout: Vec<u8>,
    /// The group of layers.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub group: u8,
    /// Arena page of the first page. The others follow it.
    #[serde(default)]
    pub place: u32,
    /// Hashes of the pages, packed. Empty in `cleared`.
    #[serde(with = "serde_bytes", default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(with = "kvferry_types::BinarySchema")]
    pub hashes: Vec<u8>,
    /// Why the pages are gone; absent unless they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<EventReason>,
}
