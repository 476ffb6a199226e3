//! The wire protocol: message types, their encoding, versions and limits.
//!
//! No sockets, no async, no clock, no panic. Every message has two parts: a fixed [`Header`] and a MessagePack map.
//! [`encode`] and [`decode`] are the only ways between bytes and [`Message`]s; both enforce [`limits`].

#![forbid(unsafe_code)]

mod body;
mod bounded;
mod call;
mod catalogue;
mod codec;
#[cfg(test)]
mod encodings_tests;
mod error;
mod examples;
mod header;
mod kind;
pub mod limits;
mod named;
mod operator_examples;
mod orders;
mod pairs;
mod request;
mod role;
mod table;
mod trail;
mod transfer;

pub use body::{
    Abandon, Attach, AttachDepot, Attached, Cancel, CancelStores, Connections, DiskHealth,
    DiskStatus, Drain, DrainAnswer, Durations, EdgeMeasure, Empty, Ended, ErrorBody, EventKind,
    EventReason, EventRecord, Events, FEATURE_TAILS, FEATURE_TIMELINE, Finish, Flush, FlushTier,
    GroupHits, Hello, Invalidate, Invalidated, Inventory, Load, Lookup, Measure, MeasureAnswer,
    Memory, MemoryAnswer, MovesStatus, NamespaceMeasure, NumberedStore, OpenTiers, PartBody, Probe,
    ProbeAnswer, RankStatus, ReadEvents, ReadInventory, Readiness, RecordBody, Register,
    Registered, RequestsStatus, Reset, ResetPages, RestartedProcess, SetLog, SetLogAnswer,
    StatedMemory, Status, StatusAnswer, Store, StoreResult, StoredPages, Stores, StoresAnswer,
    TierFlushed, TierPages, TierStatus, Tiers, TiersAnswer, TransferBody, TransferOrder,
    Unregister, Welcome, WorkerGone, WorkerGoneAnswer, Written,
};
pub use call::Call;
pub use catalogue::catalogue;
pub use codec::{Envelope, EnvelopeFields, Message, check_header, decode, encode, encode_message};
pub use error::{DecodeError, EncodeError, ErrorCode};
pub use header::{HEADER_BYTES, Header};
pub use kind::{Class, MessageKind};
pub use pairs::{Pages, Pairs};
pub use role::Role;

/// One message of each kind, with values that show every field. Names are unique.
pub fn examples() -> Vec<(&'static str, Message)> {
    let mut all = examples::examples();
    all.extend(operator_examples::examples());
    all
}

pub use kvferry_types::{
    CancelStoresAnswer, FlushAnswer, LoadAnswer, LookupAnswer, ResetAnswer, StoreAnswer,
};

/// Version in the header of a hello, a welcome, and every error before the welcome, whatever versions a side supports.
/// Never changes, so that every peer can read why it is refused.
pub const HELLO_VERSION: u16 = 1;
/// Newest version that this program supports: fragment pairs.
pub const VERSION: u16 = 2;
/// Oldest version that this program supports: pairs of single pages.
pub const VERSION_MIN: u16 = 1;
