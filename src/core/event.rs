//! What goes into the leader and what comes out.

use crate::core::refusal::Refusal;
use crate::core::shards::RankSet;
use crate::types::{
    Answer, AttachId, Copy, DepotId, EndedCopy, EngineId, Epoch, Generation, GroupGeometry, OpId,
    PageRecord, Replica, Request, RequestId, ResetId, Scope, Time, WorkerId,
};

/// Copies that one [`Effect::Cancel`] names.
pub const CANCELLED_MAX: usize = 65_536;

/// Something that happened to the leader.
#[derive(Debug, Clone)]
pub enum Event {
    /// An engine said hello: for the first time, or again after its connection broke.
    EngineOpened(EngineId),
    /// The connection of an engine broke. Its leases stay for the grace time.
    EngineClosed(EngineId),
    /// A worker has its depot, and the memory of its engine once there is one. Whatever it copied before has ended.
    Attached(Attached),
    /// The connection of a worker broke, or a new one took its place. Its copies may go on.
    WorkerLost(WorkerId),
    /// The process of a worker is seen dead: nothing of it writes any more.
    WorkerDead(WorkerId),
    /// A part of what the inventory of a worker's depot lists.
    Inventory {
        /// Which worker read it.
        worker: WorkerId,
        /// Which depot it read.
        depot: DepotId,
        /// For which reading.
        reading: u64,
        /// First arena page that it looked at.
        from: u32,
        /// First arena page that it did not look at, unless it came to the last.
        next: Option<u32>,
        /// One item for each page in between that holds something.
        records: Vec<PageRecord>,
    },
    /// A worker has struck the pages of a reset out of its depot's inventory.
    Struck {
        /// Which worker.
        worker: WorkerId,
        /// The epoch of the leader that asked for it.
        epoch: Epoch,
        /// Which reset.
        id: ResetId,
    },
    /// An engine asks for something.
    Request {
        /// Who asks.
        engine: EngineId,
        /// The same id again is a retry.
        id: RequestId,
        /// When the answer is due.
        deadline: Time,
        /// What is asked.
        request: Request,
    },
    /// A worker's copies ended.
    Ended {
        /// Which worker.
        worker: WorkerId,
        /// The epoch in which they were asked for.
        epoch: Epoch,
        /// One item for each copy.
        copies: Vec<EndedCopy>,
    },
    /// Time passed; [`crate::core::Leader::next_timeout`] says when this is due.
    Tick,
}

/// What a worker says when nothing that was asked of it before is under way.
#[derive(Debug, Clone)]
pub struct Attached {
    /// Which worker.
    pub worker: WorkerId,
    /// Ranks of an engine, by the worker's settings.
    pub ranks: u16,
    /// Shards of an engine's KV, by the worker's settings.
    pub shards: u16,
    /// Grows over one connection; the same again is a retry.
    pub attach: AttachId,
    /// The depot of its shard.
    pub depot: DepotId,
    /// Epoch of the leader that asked last for that depot's inventory; 0 when none has.
    pub depot_epoch: Epoch,
    /// The memory of its engine, once that has registered it.
    pub memory: Option<EngineMemory>,
}

/// The memory that a worker copies from and to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineMemory {
    /// Whose.
    pub engine: EngineId,
    /// What it looks like.
    pub geometry: GroupGeometry,
    /// Pages of that size that the depot has room for.
    pub arena_pages: u32,
}

/// What the leader wants done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// Answer a request. The engine may be gone by now.
    Answer {
        /// To whom.
        engine: EngineId,
        /// Which request.
        id: RequestId,
        /// With what.
        answer: Result<Answer, Refusal>,
    },
    /// Tell a worker that it belongs, or why not.
    Admit {
        /// Which worker.
        worker: WorkerId,
        /// What it said.
        attach: AttachId,
        /// Orders up to this one are not for it; or a refusal that names the field.
        verdict: Result<OpId, Refusal>,
    },
    /// Copy on these ranks of a replica.
    Copy {
        /// Which replica.
        replica: Replica,
        /// Which ranks.
        ranks: RankSet,
        /// What.
        copy: Copy,
    },
    /// Stop copies on a worker as soon as may be; their ends are still reported. One effect for all copies of a step, unless
    /// they are more than [`CANCELLED_MAX`].
    Cancel {
        /// Which worker.
        worker: WorkerId,
        /// Which copies, all of which this worker still owes the end of.
        ops: Vec<OpId>,
    },
    /// Read what the inventory of this worker's depot lists.
    ReadInventory {
        /// Which worker.
        worker: WorkerId,
        /// Which depot is meant.
        depot: DepotId,
        /// Bytes of one page: a depot that held pages of another size holds nothing.
        page_bytes: u64,
        /// Number of the question, said again in the answer. Numbers ascend, together with those of copies.
        reading: u64,
        /// First arena page to look at.
        from: u32,
    },
    /// Strike these pages out of the inventory of this worker's shard, and say so.
    Strike {
        /// Which worker.
        worker: WorkerId,
        /// Which reset.
        id: ResetId,
        /// Which pages.
        scope: Scope,
        /// The last store that the reset means. Pages of the scope that were stored later stay listed, however often the
        /// strike is repeated.
        through: Generation,
        /// When the reset is refused unless all shards have said so: nothing comes of a strike that ends later.
        deadline: Time,
    },
    /// This worker did not end a copy within the fence time, or does not say whether it did: end its process. Once a step,
    /// however many copies it owes.
    Expel(WorkerId),
}
