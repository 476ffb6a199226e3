//! Why the leader does not do what it is asked. Each names the field, the value and the remedy.

use crate::types::{Epoch, RequestId, SlotId, WorkerId};

/// A typed no. The caller loses nothing: an engine computes what it could not load.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Not every rank of this engine is there yet.
    #[error(
        "not ready: {waiting_for} of {all} ranks have no engine memory yet{detail}; ask again later",
        all = u32::from(*.ranks) * u32::from(*.replicas)
    )]
    NotReady {
        /// Ranks of all replicas that have not attached with an engine's memory.
        waiting_for: u32,
        /// Ranks of an engine.
        ranks: u16,
        /// Engines.
        replicas: u16,
        /// Why a rank was turned away.
        detail: String,
    },
    /// Every rank is there, with the memory of another engine than the one that asks.
    #[error(
        "not ready: the ranks have the memory of another engine, not of this one{detail}; ask again later"
    )]
    AnotherEngine {
        /// Why a rank was turned away.
        detail: String,
    },
    /// A leader that has begun reads what the depots hold before it serves.
    #[error("not ready: what the depots hold is being read; ask again later")]
    Reading,
    /// A rank describes other memory than the ranks before it.
    #[error(
        "{worker} disagrees with {other}: {field} is {value}, {other} has {other_value}; start every \
         rank of an engine, and every replica, with the same model (also its revision and dtype), page size and layout"
    )]
    RankDisagrees {
        /// The one that was turned away.
        worker: WorkerId,
        /// One that was there.
        other: WorkerId,
        /// The field in which they differ.
        field: &'static str,
        /// The value of the one turned away.
        value: String,
        /// The value of the other.
        other_value: String,
    },
    /// A rank beyond the configured number.
    #[error(
        "{worker} is none of the {replicas} x {ranks} this leader was started for: check --ranks and --replicas"
    )]
    NoSuchWorker {
        /// The place that was given.
        worker: WorkerId,
        /// Ranks of an engine.
        ranks: u16,
        /// Engines.
        replicas: u16,
    },
    /// A worker that was started for engines with another number of ranks, or of shards. A replica would count as complete
    /// while some of its engine's ranks have no worker.
    #[error(
        "attach.{setting} of {worker} is {value}, and this leader was started for {expected}: start leader and workers \
         with the same {setting}"
    )]
    SettingDiffers {
        /// The one that was turned away.
        worker: WorkerId,
        /// The setting, which is also the field's name.
        setting: &'static str,
        /// What the worker was started for.
        value: u16,
        /// What the leader was started for.
        expected: u16,
    },
    /// A depot that a leader of this epoch, or of a later one, has read before this one has read anything: the file with
    /// the last epoch was lost. What is stored in an epoch that was used before could not be told from what was stored then.
    #[error(
        "the depot of {worker} was read by a leader of {depot_epoch}, and this leader has {epoch}: end it and \
         start it again, the next one has a later epoch"
    )]
    EpochUsed {
        /// The one that was turned away.
        worker: WorkerId,
        /// The epoch that its depot has seen.
        depot_epoch: Epoch,
        /// The leader's own.
        epoch: Epoch,
    },
    /// Two workers of one shard with memory of their own.
    #[error(
        "{worker} has another depot than {other}: workers on a host that hold one shard of the KV share its depot"
    )]
    DepotNotShared {
        /// The one that was turned away.
        worker: WorkerId,
        /// One that was there.
        other: WorkerId,
    },
    /// A depot that holds another slice of the KV.
    #[error(
        "{worker} has the depot of shard {shard}: start leader and workers with the same ranks and kv_shards, and give \
         each shard a depot of its own"
    )]
    DepotOfTwoShards {
        /// The one that was turned away.
        worker: WorkerId,
        /// The shard whose depot it is.
        shard: u16,
    },
    /// A depot without room for one block.
    #[error(
        "{worker}: G2 has room for {arena_pages} pages and needs {least_pages}: one block at least, and as much \
         as the other ranks while they are in use; give G2 more, or lower the ratio"
    )]
    DepotTooSmall {
        /// Which worker.
        worker: WorkerId,
        /// Pages there is room for.
        arena_pages: u32,
        /// Pages that are needed.
        least_pages: u32,
    },
    /// More pages than the depot of a shard has room for.
    #[error(
        "attach.memory.arena_pages of {worker} is {arena_pages}, and G2 has room for {most_pages} pages of {page_bytes} \
         bytes: start leader and workers with the same g2 and kv_shards"
    )]
    DepotTooLarge {
        /// Which worker.
        worker: WorkerId,
        /// Pages that it names.
        arena_pages: u32,
        /// Bytes of one page, by its word.
        page_bytes: u64,
        /// Pages that the leader's own settings leave room for.
        most_pages: u64,
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
    /// Copies of stores that were cancelled have not ended by the request's deadline.
    #[error(
        "{stores} store(s) have been told to stop and have not ended yet: their pages come back when they are answered; \
         ask again, with a longer deadline"
    )]
    StillRead {
        /// How many.
        stores: u32,
    },
    /// Nothing new is begun.
    #[error("the leader is shutting down: ask its successor")]
    Draining,
    /// Pages that are to be forgotten are held.
    #[error("{holders} lookups or loads hold pages of these: ask again when they have finished")]
    Leased {
        /// How many.
        holders: u64,
    },
    /// Not every shard said in time that it struck the pages out.
    #[error(
        "the pages are forgotten, but {shards} shard(s) have not confirmed it: they may be found again after a \
         restart of the leader; ask again"
    )]
    ResetUnconfirmed {
        /// How many.
        shards: usize,
    },
    /// The deadline passed before every page was looked at.
    #[error(
        "the deadline passed before all pages were looked at: some may still be found; ask again with a later deadline"
    )]
    ResetUnfinished,
    /// A load or a store that waits until nothing of an older leader is under way, beyond the limit.
    #[error(
        "{max} loads and stores of this engine wait until every worker has said that nothing older is under way, which is \
         the limit: ask again with the same id"
    )]
    Crowded {
        /// The limit.
        max: u64,
    },
    /// A request id below those that are remembered.
    #[error("{0} is older than every answer kept: use growing request ids")]
    StaleRequest(RequestId),
}

impl Refusal {
    /// True when nothing of the refused request is under way, and nothing will be: its engine may use its pages again. A
    /// request that came too early to know is refused without that.
    pub fn is_over(&self) -> bool {
        !matches!(self, Self::Crowded { .. } | Self::StillRead { .. })
    }
}
