//! Ids, keys, units and geometry: plain data that every other module uses.
//!
//! Nothing here does I/O, reads a clock or decides anything. Imports nothing from the crate.

#![forbid(unsafe_code)]

mod answer;
mod fragment;
mod geometry;
mod gpu_copy;
mod hash;
mod ids;
mod latency;
mod log_limit;
mod numa;
mod page_set;
mod per_tier;
mod record;
mod registration;
mod request;
mod schema;
mod sharding;
mod tier_layout;
mod time;
mod transfer;
mod units;
mod user;

pub use answer::{
    Answer, CancelStoresAnswer, FlushAnswer, LoadAnswer, LookupAnswer, PagesBelow, ResetAnswer,
    StoreAnswer,
};
pub use fragment::{FragmentPair, PageCursor, PageList, PageRun};
pub use geometry::{GeometryError, GroupGeometry, MemoryGeometry, RATIO_MAX, Ratio};
pub use gpu_copy::{GpuCopy, ParseGpuCopyError};
pub use hash::{
    Anchor, Fingerprint, HASH_BYTES_MAX, HASH_BYTES_MIN, HashView, HashesDiffer, PageHashes,
};
pub use ids::{
    AttachId, DepotId, DomainId, EngineId, Epoch, FlushId, GroupId, LinkId, MemoryId, NamespaceId,
    PeerId, Rank, Replica, RequestId, ResetId, RuleId, Shard, SlotId, TransferId, WorkerId,
};
pub use latency::{LATENCY_BOUNDS_US, LatencyHistogram};
pub use log_limit::LogLimit;
pub use numa::{NumaNodes, ParseNumaNodesError};
pub use page_set::{PAGE_SET_BYTES_PER_PAGE_MAX, PageSet};
pub use per_tier::PerTier;
pub use record::{INVENTORY_ENTRY_BYTES, PageRecord, Record, Scope, Stored};
pub use registration::{
    Allocation, AllocationHandle, AllocationKind, Attention, CONTENT_BYTES_MAX, Chunk, ChunkHandle,
    GroupMemory, Nonce, Registration, Slices, StatePart, TensorRole, TensorView, Timeline,
};
pub use request::{PRIORITIES, PRIORITY_DEFAULT, Part, Request, ResetScope};
pub use schema::{BinarySchema, open_words};
pub use sharding::Sharding;
pub use tier_layout::TierLayout;
pub use time::Time;
pub use transfer::{
    DeviceEnd, Direction, Edge, EndedCopy, QUARANTINED_PAGES_MAX, TierId, Transfer,
};
pub use units::{ByteSize, ParseByteSizeError};
pub use user::{Caller, User};
