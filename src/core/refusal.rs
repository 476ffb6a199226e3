//! Why the leader does not do what it is asked. Each names the field, the value and the remedy.

use crate::types::{Rank, RequestId, SlotId};

/// A typed no. The caller loses nothing: an engine computes what it could not load.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Not every rank is there yet.
    #[error("not ready: waiting for {waiting_for} of {ranks} ranks{detail}; ask again later")]
    NotReady {
        /// Ranks that have not attached.
        waiting_for: u32,
        /// Ranks in all.
        ranks: u16,
        /// Why a rank was turned away, if one was.
        detail: String,
    },
    /// A rank describes other memory than the ranks before it.
    #[error(
        "{rank} disagrees with {other}: {field} is {value}, {other} has {other_value}; start every \
         rank of an engine with the same model, page size and layout"
    )]
    RankDisagrees {
        /// The rank that was turned away.
        rank: Rank,
        /// A rank that was there.
        other: Rank,
        /// The field in which they differ.
        field: &'static str,
        /// The value of the one turned away.
        value: String,
        /// The value of the other.
        other_value: String,
    },
    /// A rank beyond the configured number.
    #[error("{rank} is none of the {ranks} ranks this leader was started for: check --ranks")]
    NoSuchRank {
        /// The rank that was given.
        rank: Rank,
        /// Ranks in all.
        ranks: u16,
    },
    /// A depot without room for one block.
    #[error(
        "{rank}: G2 has room for {arena_pages} pages, one block takes {ratio}: give G2 at least \
         {ratio} pages on each rank, or lower the ratio"
    )]
    DepotTooSmall {
        /// Which rank.
        rank: Rank,
        /// Pages there is room for.
        arena_pages: u32,
        /// Pages of the largest block.
        ratio: u32,
    },
    /// The slot was never opened, or is finished.
    #[error("{0} is unknown: look up first")]
    UnknownSlot(SlotId),
    /// A field of the request does not fit.
    #[error("{field} is {value}: {remedy}")]
    Invalid {
        /// Which field.
        field: &'static str,
        /// What it held.
        value: String,
        /// What would fit.
        remedy: &'static str,
    },
    /// The pages are not pinned: the lookup is too long ago, or did not find them.
    #[error("pages {first_page}..{end} of {slot} are not pinned: look up again")]
    NotPinned {
        /// Which slot.
        slot: SlotId,
        /// First page that was asked for.
        first_page: u32,
        /// Behind the last one.
        end: u32,
    },
    /// A limit is reached.
    #[error("limit reached: {limit} is {max}; retry when requests have finished")]
    Limit {
        /// Which limit.
        limit: &'static str,
        /// Its value.
        max: u64,
    },
    /// A copy failed on these ranks; it has ended everywhere.
    #[error("the copy failed on {0} rank(s); nothing writes these pages any more")]
    CopyFailed(u32),
    /// A request id below those that are remembered.
    #[error("{0} is older than every answer kept: use growing request ids")]
    StaleRequest(RequestId),
}
