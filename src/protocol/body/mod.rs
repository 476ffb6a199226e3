//! Message bodies: a MessagePack map with these fields as keys. Unknown keys are skipped; a field that may be absent
//! has a default. One file for each pair of processes that exchange them.

mod engine;
mod events;
mod handshake;
mod inventory;
mod operator;
mod rank;
mod status;
mod tier;
mod worker;

pub use engine::{
    CancelStores, Finish, Flush, Load, Lookup, NumberedStore, PartBody, Reset, ResetPages, Store,
    StoreResult, Stores, StoresAnswer,
};
pub use events::{EventKind, EventReason, EventRecord, Events, ReadEvents};
pub(crate) use handshake::cut;
pub use handshake::{ErrorBody, FEATURE_TAILS, FEATURE_TIMELINE, Hello, Welcome};
pub use inventory::{
    FlushTier, Invalidate, Invalidated, Inventory, ReadInventory, RecordBody, TierFlushed,
};
pub use operator::{
    Connections, Drain, DrainAnswer, Durations, EdgeMeasure, GroupHits, Measure, MeasureAnswer,
    NamespaceMeasure, Probe, ProbeAnswer, SetLog, SetLogAnswer, StoredPages,
};
pub use rank::{Abandon, Register, Registered, Unregister, Written};
pub use status::{
    DiskHealth, DiskStatus, MovesStatus, RankStatus, RequestsStatus, RestartedProcess, Status,
    StatusAnswer, TierStatus,
};
pub(crate) use tier::tier_of;
pub use worker::{
    Attach, AttachDepot, Attached, Cancel, Ended, Memory, MemoryAnswer, OpenTiers, Readiness,
    StatedMemory, TierPages, Tiers, TiersAnswer, TransferBody, TransferOrder, WorkerGone,
    WorkerGoneAnswer,
};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A message without fields.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Empty {}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
const fn is_zero(number: &u64) -> bool {
    *number == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
const fn is_false(value: &bool) -> bool {
    !*value
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
