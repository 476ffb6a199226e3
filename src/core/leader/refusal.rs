//! Refusals: why the leader does not carry out a request. Each names the field, the value and the remedy.

use crate::group::GroupError;
use kvferry_types::{Epoch, RequestId, SlotId, TierId, WorkerId};

/// A typed refusal. The caller loses no data: an engine computes the pages that it could not load.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Not every rank of this engine has attached with its memory.
    #[error(
        "not ready: {waiting_for} of {all} ranks have no engine memory yet{detail}; start the engine, or retry once it has registered",
        all = u32::from(*.ranks) * u32::from(*.replicas)
    )]
    NotReady {
        /// Ranks of all replicas that have not attached with an engine's memory.
        waiting_for: u32,
        /// Ranks of an engine.
        ranks: u16,
        /// Engines that the leader was started for.
        replicas: u16,
        /// Why the last worker was refused, in parentheses; empty if its attach request was accepted.
        detail: String,
    },
    /// Every rank has attached, with the memory of another engine than the one that sent the request.
    #[error(
        "not ready: the ranks have the memory of another engine, not of this one{detail}; retry later"
    )]
    AnotherEngine {
        /// Why the last worker was refused, in parentheses; empty if its attach request was accepted.
        detail: String,
    },
    /// The leader is reading the inventories of the depots, or waits to do so, and serves no pages before that.
    #[error("not ready: the inventories of the depots are being read; retry later")]
    Reading,
    /// A worker states its memory before it has attached.
    #[error("{worker} has not attached: attach first, then state the memory again")]
    NotAttached {
        /// The worker that is refused.
        worker: WorkerId,
    },
    /// A rank describes other memory than a rank that attached before.
    #[error(
        "{worker} disagrees with {other}: {field} is {value}, {other} has {other_value}; start every \
         rank of an engine, and every replica, with the same model (also its revision and dtype), page size and layout"
    )]
    RankDisagrees {
        /// The worker that is refused.
        worker: WorkerId,
        /// The attached worker that it differs from.
        other: WorkerId,
        /// The field in which they differ.
        field: &'static str,
        /// The value of the refused worker.
        value: String,
        /// The value of the attached worker.
        other_value: String,
    },
    /// The groups of a rank's memory have no rules.
    #[error("{worker}: {error}")]
    Groups {
        /// The worker that is refused.
        worker: WorkerId,
        /// The contradiction.
        error: GroupError,
    },
    /// A replica or rank beyond the configured numbers.
    #[error(
        "{worker} is none of the {replicas} x {ranks} this leader was started for: check --ranks and --replicas"
    )]
    NoSuchWorker {
        /// The seat that the worker claims.
        worker: WorkerId,
        /// Ranks of an engine.
        ranks: u16,
        /// Engines that the leader was started for.
        replicas: u16,
    },
    /// A worker that was started for engines with another number of ranks, or of shards. A replica would count as
    /// complete while some of its engine's ranks have no worker.
    #[error(
        "attach.{setting} of {worker} is {value}, and this leader was started for {expected}: start leader and workers \
         with the same {setting}"
    )]
    SettingDiffers {
        /// The worker that is refused.
        worker: WorkerId,
        /// The setting, which is also the field's name.
        setting: &'static str,
        /// The worker's value of the setting.
        value: u16,
        /// The leader's value of the setting.
        expected: u16,
    },
    /// The depot was read by a leader of this epoch, or of a later one, before this leader has read any depot: the file
    /// with the last epoch was lost. Pages stored in an epoch that is used twice could not be told apart from those
    /// stored in its first use.
    #[error(
        "the depot of {worker} was read by a leader of {depot_epoch}, and this leader has {epoch}: end it and \
         start it again, the next one has a later epoch"
    )]
    EpochUsed {
        /// The worker that is refused.
        worker: WorkerId,
        /// The epoch of the leader that last read its depot.
        depot_epoch: Epoch,
        /// The epoch of this leader.
        epoch: Epoch,
    },
    /// The depot names an epoch that no leader of this deployment can have had.
    #[error(
        "the depot of {worker} was read by a leader of {depot_epoch}, which is impossible beside the {epoch} of this \
         leader: epochs begin with the time in milliseconds; check the worker's disk, or give it an empty directory"
    )]
    EpochUnknown {
        /// The worker that is refused.
        worker: WorkerId,
        /// The epoch that its depot names.
        depot_epoch: Epoch,
        /// The epoch of this leader.
        epoch: Epoch,
    },
    /// Two workers of one shard have different depots.
    #[error(
        "{worker} has another depot than {other}: workers on a host that hold one shard of the KV share its depot"
    )]
    DepotNotShared {
        /// The worker that is refused.
        worker: WorkerId,
        /// The attached worker of the same shard.
        other: WorkerId,
    },
    /// A worker names no depot for a tier of the leader.
    #[error("{worker} names no depot for {tier}: start leader and workers with the same tiers")]
    DepotMissing {
        /// The worker that is refused.
        worker: WorkerId,
        /// The tier.
        tier: TierId,
    },
    /// A worker has the depot of another shard.
    #[error(
        "{worker} has the depot of shard {shard}: start leader and workers with the same ranks and kv_shards, and give \
         each shard a depot of its own"
    )]
    DepotOfTwoShards {
        /// The worker that is refused.
        worker: WorkerId,
        /// The shard whose depot it is.
        shard: u16,
    },
    /// A depot with room for fewer pages than one block, or than the pool that is in use.
    #[error(
        "{worker}: G2 has room for {arena_pages} pages and needs {least_pages}: one block at least, and as much \
         as the other ranks while they are in use; give G2 more, or lower the ratio"
    )]
    DepotTooSmall {
        /// The worker that is refused.
        worker: WorkerId,
        /// Pages that its depot has room for.
        arena_pages: u32,
        /// Pages that are needed.
        least_pages: u32,
    },
    /// A worker reports more pages than the depot of a shard has room for.
    #[error(
        "memory.arena_pages of {worker} is {arena_pages}, and G2 has room for {most_pages} pages of {page_bytes} \
         bytes: start leader and workers with the same g2 and kv_shards"
    )]
    DepotTooLarge {
        /// The worker that is refused.
        worker: WorkerId,
        /// Pages that the worker reports.
        arena_pages: u32,
        /// Bytes of one page, as reported by the worker.
        page_bytes: u64,
        /// Pages that fit into a depot by the leader's own settings.
        most_pages: u64,
    },
    /// The slot was never opened, is finished, or was opened for another layout.
    #[error("{0} is unknown: look up first")]
    UnknownSlot(SlotId),
    /// The request is older than the last lookup or finish of its slot, which may be open for other pages.
    #[error(
        "the request has a lower id than a later lookup or finish of {0}: take ids that grow, and look up again"
    )]
    OlderThanSlot(SlotId),
    /// A field of the request is invalid.
    #[error("{field} is {value}: {remedy}")]
    Invalid {
        /// Name of the field.
        field: &'static str,
        /// The value of the field.
        value: String,
        /// A value that would be valid, or what the engine should do.
        remedy: &'static str,
    },
    /// The pages are not pinned: the lookup did not find them, or its holds have expired or were released.
    #[error(
        "the last lookup of {slot} does not hold all of pages {first_page} to {} (first_page and count): load pages that it \
         found, or look up again",
        end.saturating_sub(1)
    )]
    NotPinned {
        /// The slot whose pages are loaded.
        slot: SlotId,
        /// Position of the first requested page.
        first_page: u32,
        /// Position after the last requested page.
        end: u32,
    },
    /// A limit is reached.
    #[error("limit reached: {limit} is {max}; retry when requests have finished")]
    Limit {
        /// The quantity that is limited.
        limit: &'static str,
        /// Its maximum.
        max: u64,
    },
    /// No copy of a load began: its pages could not be brought into host memory, or were found to be bad.
    #[error(
        "no page was loaded: no time was left before the deadline, host memory had no room for them until then, or they are \
         no longer there; compute the pages"
    )]
    NotLoaded,
    /// A copy failed on this number of ranks; it has ended everywhere.
    #[error(
        "the copy failed on {0} rank(s), or had not begun there by the deadline (did the ranks report `written`?); nothing \
         writes these pages any longer"
    )]
    CopyFailed(u32),
    /// Pages of a load had changed, or were not read, where this number of ranks read them; the copies have ended everywhere.
    #[error(
        "pages failed their checksum, or were not read, on {0} rank(s): they are removed and are not served again; compute the \
         pages. Nothing writes them any longer"
    )]
    BadPages(u32),
    /// Copies of stores that were cancelled have not ended by the request's deadline.
    #[error(
        "{stores} store(s) are being cancelled and have not ended yet: their pages are free when they are answered; \
         retry with a longer deadline"
    )]
    StillRead {
        /// Stores that have not been answered.
        stores: u32,
    },
    /// The leader drains, by an operator's order or before it ends, and begins no new request.
    #[error(
        "the leader drains: it takes requests again after `kvferry drain --resume` if an operator has ordered that, or when its \
         successor serves"
    )]
    Draining,
    /// Pages of the reset are held.
    #[error("{holders} lookups or loads hold some of these pages: retry when they have finished")]
    Leased {
        /// Lookups and loads that hold such pages.
        holders: u64,
    },
    /// Not every shard has confirmed by the deadline that the pages are removed from its inventory.
    #[error(
        "the pages are removed, but {shards} shard(s) have not confirmed that: they may be found again after a \
         restart of the leader; retry"
    )]
    ResetUnconfirmed {
        /// Shards that have not confirmed.
        shards: usize,
    },
    /// The deadline passed before the leader had visited every page.
    #[error(
        "the deadline passed before all pages were examined: some may still be found; retry with a later deadline"
    )]
    ResetUnfinished,
    /// A flush of a leader that has no disk tier.
    #[error("no tier keeps pages over a restart: start kvferry with g3 and g3_dir")]
    NothingLasts,
    /// A flush or a reset of a disk that takes no writes.
    #[error(
        "the disk of a rank takes no writes, and nothing was flushed or removed: status says why; retry once it does"
    )]
    OnlyRead,
    /// A flush or a reset of a disk that no worker of a shard has open.
    #[error(
        "the disk of a rank is not open, and nothing was flushed or removed: status says why; retry once it is open, or \
         reset g2 alone"
    )]
    NotOpen,
    /// Pages are still on their way to the disk.
    #[error(
        "the deadline passed before all stored pages were moved to the disk: retry with a later deadline"
    )]
    FlushUnfinished,
    /// Not every shard has confirmed by the deadline that its pages are durable.
    #[error(
        "{shards} shard(s) have not confirmed that their pages are durable: retry, and look at the disk's state"
    )]
    FlushUnconfirmed {
        /// Shards that have not confirmed.
        shards: usize,
    },
    /// A load or a store, beyond the limit of those that wait until no copy of an older leader can run.
    #[error(
        "{max} loads and stores of this engine wait until every worker has reported that no older copy runs, which is \
         the limit: retry with the same id"
    )]
    Crowded {
        /// Loads and stores of one engine that may wait.
        max: u64,
    },
    /// The lookups and loads of a namespace's rule, or of an engine, hold too many pages for another lookup.
    #[error(
        "{limit} is {max}: {held} pages are held, and this lookup needs {pages} more; compute, and look up again when \
         others have ended"
    )]
    Quota {
        /// The limit.
        limit: &'static str,
        /// Its value, in pages.
        max: u64,
        /// Pages that are held.
        held: u64,
        /// Pages that the lookup found.
        pages: u64,
    },
    /// The request id is older than the answers that are kept, or of an earlier process of the engine.
    #[error("{id} is older than every answer kept: use growing request ids")]
    StaleRequest {
        /// The id.
        id: RequestId,
        /// No copy of a request with this id is running.
        is_over: bool,
    },
}

/// The reason of a refusal, by which refusals are counted; each is an error code of the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalReason {
    /// A rank, its memory or the pages of the depots are missing.
    NotReady,
    /// The memory of a rank differs from that of another.
    RankDisagrees,
    /// A field is invalid.
    Invalid,
    /// The deadline passed.
    Deadline,
    /// The leader drains.
    Draining,
    /// Pages of a reset are held.
    Leased,
    /// A reset was not confirmed, or is not complete.
    ResetUnconfirmed,
    /// The slot is not open.
    UnknownSlot,
    /// The pages are not pinned.
    NotPinned,
    /// A limit is reached.
    Limit,
    /// Too many requests wait for copies of an older leader.
    Busy,
    /// No page was loaded.
    CopyFailed,
    /// The answer to the request is no longer kept.
    StaleRequest,
    /// Too many pages are held.
    Quota,
}

impl RefusalReason {
    /// Every reason, in the order of the variants.
    pub const ALL: [Self; 14] = [
        Self::NotReady,
        Self::RankDisagrees,
        Self::Invalid,
        Self::Deadline,
        Self::Draining,
        Self::Leased,
        Self::ResetUnconfirmed,
        Self::UnknownSlot,
        Self::NotPinned,
        Self::Limit,
        Self::Busy,
        Self::CopyFailed,
        Self::StaleRequest,
        Self::Quota,
    ];
}

impl Refusal {
    /// The reason, as counters and the wire name it.
    pub fn reason(&self) -> RefusalReason {
        match self {
            Self::NotReady { .. }
            | Self::AnotherEngine { .. }
            | Self::EpochUsed { .. }
            | Self::NotAttached { .. }
            | Self::OnlyRead
            | Self::NotOpen
            | Self::Reading => RefusalReason::NotReady,
            Self::RankDisagrees { .. } => RefusalReason::RankDisagrees,
            Self::Groups { .. }
            | Self::NoSuchWorker { .. }
            | Self::SettingDiffers { .. }
            | Self::EpochUnknown { .. }
            | Self::DepotNotShared { .. }
            | Self::DepotMissing { .. }
            | Self::DepotOfTwoShards { .. }
            | Self::DepotTooSmall { .. }
            | Self::DepotTooLarge { .. }
            | Self::NothingLasts
            | Self::Invalid { .. } => RefusalReason::Invalid,
            Self::StillRead { .. } | Self::FlushUnfinished | Self::FlushUnconfirmed { .. } => {
                RefusalReason::Deadline
            }
            Self::Draining => RefusalReason::Draining,
            Self::Leased { .. } => RefusalReason::Leased,
            Self::ResetUnconfirmed { .. } | Self::ResetUnfinished => {
                RefusalReason::ResetUnconfirmed
            }
            Self::UnknownSlot(_) | Self::OlderThanSlot(_) => RefusalReason::UnknownSlot,
            Self::NotPinned { .. } => RefusalReason::NotPinned,
            Self::Limit { .. } => RefusalReason::Limit,
            Self::Crowded { .. } => RefusalReason::Busy,
            Self::CopyFailed(_) | Self::BadPages(_) | Self::NotLoaded => RefusalReason::CopyFailed,
            Self::StaleRequest { .. } => RefusalReason::StaleRequest,
            Self::Quota { .. } => RefusalReason::Quota,
        }
    }

    /// True when no copy of the refused request is running or will start, so that its engine may reuse its pages. False
    /// for a refusal that the leader gives before it can know that.
    pub fn is_over(&self) -> bool {
        !matches!(
            self,
            Self::Crowded { .. }
                | Self::StillRead { .. }
                | Self::StaleRequest { is_over: false, .. }
        )
    }
}
