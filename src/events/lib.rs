//! KV events of an engine and of kvferry, merged into one stream: the part of `kvferry events` without I/O.
//!
//! An engine announces the pages of its device by the numbers of their hashes, with their tokens; the leader's change log
//! names the pages in kvferry by the last 16 bytes of their hashes, without tokens. [`Join`] keeps one record for each
//! page, and announces the pages in kvferry in the engine's format once the engine has described them. [`Feed`] follows
//! the leader, and [`Numbers`] the engine's stream.
//! [`TierEvents`] makes the events of a replay, whose engine publishes none.

#![forbid(unsafe_code)]

mod batch;
mod feed;
mod join;
mod numbers;
mod page;
#[cfg(test)]
mod tests;
mod tiers;

pub use batch::{BATCH_BYTES_MAX, Batch, Event, EventError, Removed, Shape, Stored};
pub use feed::{Change, Feed, Followed, PLACES_MAX};
pub use join::{GONE_MAX, Join, JoinSettings, Mode, PAGES_MAX};
pub use numbers::{Numbers, Step};
pub use page::{PageKey, Tier};
pub use tiers::TierEvents;
