//! The wire protocol: message types, their encoding, versions and limits.
//!
//! No sockets, no async, no clock, no panic. Every message has two parts: a fixed [`Header`] and a MessagePack map.
//! [`encode`] and [`decode`] are the only ways between bytes and [`Message`]s; both enforce [`limits`].

#![forbid(unsafe_code)]

mod body;
mod catalogue;
mod codec;
mod convert;
mod error;
mod examples;
mod header;
mod kind;
pub mod limits;
mod named;
mod orders;
mod pairs;
mod transfer;

pub use body::{
    Abandon, Attach, Attached, AttachedMemory, Cancel, CancelStores, CancelStoresAnswer, CopyOrder,
    CopyResult, Empty, Ended, ErrorBody, FEATURE_TIMELINE, Finish, Hello, Invalidate, Invalidated,
    Inventory, Load, LoadAnswer, Lookup, LookupAnswer, RankStatus, ReadInventory, Readiness,
    RecordBody, Register, Registered, Reset, ResetAnswer, Role, Status, StatusAnswer, Store,
    StoreAnswer, Transfer, Welcome, Written,
};
pub use catalogue::catalogue;
pub use codec::{Envelope, Message, decode, encode, judge};
pub use error::{DecodeError, EncodeError, ErrorCode};
pub use examples::examples;
pub use header::{HEADER_BYTES, Header};
pub use kind::{Class, Kind};
pub use pairs::{Pages, Pairs};

/// Version in the header of a hello, a welcome, and every error before the welcome, whatever versions a side supports.
/// Never changes, so that every peer can read why it is refused.
pub const HELLO_VERSION: u16 = 1;
/// Newest version that this program supports: fragment pairs.
pub const VERSION: u16 = 2;
/// Oldest version that this program supports: pairs of single pages.
pub const VERSION_MIN: u16 = 1;
