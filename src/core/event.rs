//! What goes into the leader and what comes out.

use crate::core::refusal::Refusal;
use crate::core::shards::RankSet;
use crate::types::{
    Answer, Copy, EndedCopy, EngineId, Epoch, GroupGeometry, OpId, Rank, Request, RequestId, Time,
};

/// Something that happened to the leader.
#[derive(Debug, Clone)]
pub enum Event {
    /// An engine said hello: for the first time, or again after its connection broke.
    EngineOpened(EngineId),
    /// The connection of an engine broke. Its leases stay for the grace time.
    EngineClosed(EngineId),
    /// A worker has its engine's memory and its depot. Whatever it copied before has ended.
    Attached(Attached),
    /// The connection of a worker broke. Its copies may go on.
    WorkerLost(Rank),
    /// The process of a worker is seen dead: nothing of it writes any more.
    WorkerDead(Rank),
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
        rank: Rank,
        /// The epoch in which they were asked for.
        epoch: Epoch,
        /// One item for each copy.
        copies: Vec<EndedCopy>,
    },
    /// Time passed; [`crate::core::Leader::next_timeout`] says when this is due.
    Tick,
}

/// What a worker says when it is ready.
#[derive(Debug, Clone)]
pub struct Attached {
    /// Which rank.
    pub rank: Rank,
    /// What the memory of its engine looks like.
    pub geometry: GroupGeometry,
    /// Pages that its depot has room for.
    pub arena_pages: u32,
    /// True when the depot still holds what this leader stored there.
    pub keeps_pages: bool,
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
        rank: Rank,
        /// The refusal names the rank and the field.
        verdict: Result<(), Refusal>,
    },
    /// Copy on these ranks.
    Copy {
        /// Which.
        ranks: RankSet,
        /// What.
        copy: Copy,
    },
    /// Stop a copy on these ranks as soon as may be; its end is still reported.
    Cancel {
        /// Which.
        ranks: RankSet,
        /// Which copy.
        op: OpId,
    },
    /// This worker did not end a copy within the fence time: end its process.
    Expel(Rank),
}
