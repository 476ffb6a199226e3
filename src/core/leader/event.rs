//! Events that enter the leader, and effects that it returns.

use crate::leader::refusal::Refusal;
use kvferry_types::{
    Answer, AttachId, DepotId, EndedCopy, EngineId, Epoch, FlushId, MemoryGeometry, MemoryId,
    PageRecord, PerTier, Request, RequestId, ResetId, Scope, TierId, TierLayout, Time, Transfer,
    TransferId, WorkerId,
};
use smallvec::SmallVec;

/// Copies that one [`LeaderEffect::Cancel`] names, at most.
pub const CANCELLED_MAX: usize = 65_536;

/// The workers that carry out one transfer: every rank of an engine, or one rank of each shard.
pub type Workers = SmallVec<[WorkerId; 8]>;

/// An input of the leader.
#[derive(Debug, Clone)]
pub enum LeaderEvent {
    /// An engine sent its hello: for the first time, or again after its connection broke.
    EngineOpened(EngineId),
    /// Another process has the name of an engine, which it opens next: the requests and slots of the earlier process are
    /// none of its own.
    EngineReplaced(EngineId),
    /// The connection of an engine broke. Its slots and holds stay for the grace time, its parked requests are dropped.
    EngineClosed(EngineId),
    /// A worker has its depots. All its earlier copies have ended.
    Attach(AttachRequest),
    /// An attached worker states its engine's memory, or that it has none. All copies of other memory have ended.
    Memory(MemoryStatement),
    /// An attached worker states the pages of the tiers below host memory, which have changed. Its copies go on.
    Tiers(TiersStatement),
    /// The connection of a worker broke, or a new one replaced it. Its copies may continue.
    WorkerLost(WorkerId),
    /// The process of a worker is dead: it does not write any longer.
    WorkerDead(WorkerId),
    /// A part of the records in the inventory of a worker's depot.
    Inventory {
        /// The worker that read it.
        worker: WorkerId,
        /// The depot that was read.
        depot: DepotId,
        /// Number of the request that this answers.
        read_id: u64,
        /// First arena page that was read.
        from: u32,
        /// First arena page that was not read; `None` when the part reaches the last page.
        next: Option<u32>,
        /// One record for each page in between that holds KV.
        records: Vec<PageRecord>,
    },
    /// A worker has removed the pages of a reset from its depot's inventory.
    Invalidated {
        /// The worker that confirms it.
        worker: WorkerId,
        /// The epoch of the leader that requested it.
        epoch: Epoch,
        /// The reset that is confirmed.
        id: ResetId,
    },
    /// A worker has made durable what was written to a tier of its shard.
    TierFlushed {
        /// The worker that confirms it.
        worker: WorkerId,
        /// The epoch of the leader that requested it.
        epoch: Epoch,
        /// The flush that is confirmed.
        id: FlushId,
    },
    /// An engine sent a request.
    Request {
        /// The engine that sent it.
        engine: EngineId,
        /// Number of the request. A repeated number is a retry.
        id: RequestId,
        /// When the answer is due.
        deadline: Time,
        /// The request itself.
        request: Request,
    },
    /// Copies of a worker ended.
    Ended {
        /// The worker that reports them.
        worker: WorkerId,
        /// The epoch in which they were ordered.
        epoch: Epoch,
        /// One item for each copy.
        copies: Vec<EndedCopy>,
    },
    /// The order of these copies could not be sent to a worker: they have not begun and never will. No moves begin in this
    /// step, because their orders could not be sent either.
    Unsent {
        /// The worker.
        worker: WorkerId,
        /// One item for each copy.
        copies: Vec<EndedCopy>,
    },
    /// A worker reports whether the depot that it has open in a tier takes writes. Moves into a tier that does not wait.
    Writable {
        /// The worker.
        worker: WorkerId,
        /// The tier.
        tier: TierId,
        /// False while the depot is only read.
        writable: bool,
    },
    /// Time passed. Due at [`crate::Leader::next_timeout`].
    Tick,
}

/// The attach request of a worker, sent when none of its earlier orders is in flight.
#[derive(Debug, Clone)]
pub struct AttachRequest {
    /// The worker that attaches.
    pub worker: WorkerId,
    /// Ranks of an engine, by the worker's settings.
    pub ranks: u16,
    /// Shards of an engine's KV, by the worker's settings.
    pub shards: u16,
    /// Sequence number of the attach requests on one connection. A repeated number is a retry.
    pub attach: AttachId,
    /// The depot of the worker's shard in each tier that the worker reaches.
    pub depots: PerTier<AttachedDepot>,
}

/// What a worker states about its engine's memory: after each attach, and whenever that changes.
#[derive(Debug, Clone)]
pub struct MemoryStatement {
    /// The worker.
    pub worker: WorkerId,
    /// Sequence number of the statements on one connection. A repeated number is a retry.
    pub number: MemoryId,
    /// The memory of the worker's engine; `None` without one.
    pub memory: Option<WorkerMemory>,
}

/// What a worker states about the tiers below host memory when their number of pages changes.
#[derive(Debug, Clone)]
pub struct TiersStatement {
    /// The worker.
    pub worker: WorkerId,
    /// Sequence number, in one sequence with the statements of the memory. A repeated number is a retry.
    pub number: MemoryId,
    /// The pages for which the tiers are open.
    pub layout: TierLayout,
    /// Number of those pages for which the depot of each tier below host memory has room; 0 for one that is not open.
    pub pages: PerTier<u32>,
}

impl LeaderEvent {
    /// The attach request of a worker, and then the statement of its memory under the same number: the events of a worker
    /// that arrives with its engine.
    pub fn arrival(attached: AttachRequest, memory: WorkerMemory) -> [Self; 2] {
        let stated = MemoryStatement {
            worker: attached.worker,
            number: MemoryId(attached.attach.0),
            memory: Some(memory),
        };
        [Self::Attach(attached), Self::Memory(stated)]
    }
}

/// The pages of one shard in one tier, as a worker that reaches them describes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttachedDepot {
    /// The depot.
    pub depot: DepotId,
    /// Epoch of the leader that last requested its inventory; 0 if none has.
    pub epoch: Epoch,
}

/// The memory that a worker copies from and to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerMemory {
    /// The engine that registered the memory.
    pub engine: EngineId,
    /// Page sizes, numbers of pages and layouts of the groups of the memory.
    pub geometry: MemoryGeometry,
    /// Pages of that size that the depot of each tier has room for.
    pub arena_pages: PerTier<u32>,
}

impl WorkerMemory {
    /// Pages that the depot of a tier has room for.
    pub fn pages_of(&self, tier: TierId) -> u32 {
        self.arena_pages.get(tier).copied().unwrap_or(0)
    }
}

/// An output of the leader, for its caller to carry out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeaderEffect {
    /// Answer a request. The engine may have disconnected by now.
    Answer {
        /// The engine that sent the request.
        engine: EngineId,
        /// The request that is answered.
        id: RequestId,
        /// The answer, or the reason of the refusal.
        answer: Result<Answer, Refusal>,
    },
    /// Answer an attach request: the worker is admitted or refused.
    Admit {
        /// The worker that attached.
        worker: WorkerId,
        /// The attach request that is answered.
        attach: AttachId,
        /// Ok: the number of the last order before this admission; the worker carries out no order up to it. Err: a
        /// refusal that names the field.
        verdict: Result<TransferId, Refusal>,
    },
    /// Answer a statement of a worker's memory.
    AdmitMemory {
        /// The worker whose memory it is.
        worker: WorkerId,
        /// The statement that is answered.
        number: MemoryId,
        /// Ok: the number of the last order before this answer; the worker carries out no order for an engine's memory up
        /// to it. Err: a refusal that names the field. The worker then counts as one without memory.
        verdict: Result<TransferId, Refusal>,
    },
    /// Answer a statement of a worker's tiers.
    AdmitTiers {
        /// The worker whose tiers they are.
        worker: WorkerId,
        /// The statement that is answered.
        number: MemoryId,
        /// Err: the worker has not attached, or has not stated its memory since.
        verdict: Result<(), Refusal>,
    },
    /// Order a transfer.
    Transfer {
        /// The workers that carry out the transfer, each its own part.
        workers: Workers,
        /// The transfer, equal for each of them.
        transfer: Transfer,
    },
    /// Stop copies on a worker as soon as possible; their ends are still reported. One effect for all copies of a step,
    /// unless there are more than [`CANCELLED_MAX`].
    Cancel {
        /// The worker that runs the copies.
        worker: WorkerId,
        /// The copies to stop. The worker still owes the end of each.
        transfers: Vec<TransferId>,
    },
    /// Request a part of the inventory of this worker's depot.
    ReadInventory {
        /// The worker that reads.
        worker: WorkerId,
        /// The depot that the leader expects the worker to have.
        depot: DepotId,
        /// Bytes of one page. A depot that held pages of another size holds none of this size.
        page_bytes: u64,
        /// Number of the request, repeated in the answer. Numbers ascend, in one sequence with those of copies.
        read_id: u64,
        /// First arena page to read.
        from: u32,
    },
    /// Remove these pages from the inventory of this worker's shard, and confirm it.
    Invalidate {
        /// The worker that removes them.
        worker: WorkerId,
        /// The reset that they belong to.
        id: ResetId,
        /// The pages to remove.
        scope: Scope,
        /// The tier whose inventories are changed; `None` for all tiers.
        tier: Option<TierId>,
        /// The last store that the reset covers. Pages of the scope that were stored later stay listed, however often
        /// the invalidation is repeated.
        through: TransferId,
        /// Deadline of the reset, which is refused unless all shards have confirmed by then. An invalidation that ends
        /// later has no effect on the answer.
        deadline: Time,
    },
    /// Have a worker without an engine open the tiers below host memory for these pages, or close them for another worker. The
    /// worker then states the tiers.
    OpenTiers {
        /// The worker.
        worker: WorkerId,
        /// The pages; `None` to close the tiers.
        layout: Option<TierLayout>,
    },
    /// Make durable what was written to a tier of this worker's shard, and confirm it.
    FlushTier {
        /// The worker that flushes.
        worker: WorkerId,
        /// The flush.
        id: FlushId,
        /// The tier.
        tier: TierId,
        /// Deadline of the flush. A confirmation that arrives later has no effect.
        deadline: Time,
    },
    /// End the process of this worker, because it did not end a copy within the fence time, or did not report whether
    /// it did. At most once a step, however many copies the worker owes.
    FenceWorker(WorkerId),
}
