//! The core: plain, synchronous state machines on plain data.
//!
//! [`Leader::step`] takes the time and an event and appends effects. The core uses no sockets, files, clocks, random
//! sources or async runtime; time and keys are passed in. Read in this order:
//!
//! 1. `index`: where runs of pages are, what they hold, and how they are found; `eviction`: which go first;
//! 2. `pool`: one tier: reserve, fill, publish, pin, evict; walks over several tiers; an independent recount of all of it;
//! 3. `group`: kinds of layers, which pages a hit needs of each, and how far it reaches;
//! 4. `leader`: the state of each engine, and the decisions; its events, effects and refusals;
//! 5. `worker`: how a worker carries out the leader's orders.

#![forbid(unsafe_code)]

mod eviction;
mod group;
mod index;
mod leader;
mod pool;
mod worker;

pub use eviction::{EvictionPolicy, REMEMBERED_PAGES_MAX, RuleLimits};
pub use group::model::{Model, Sequence};
pub use group::{
    GROUPS_MAX, GroupError, GroupField, GroupKind, GroupSpec, Groups, HIT_TOKENS_MAX, Hit,
    LookupBounds, Presence, Retention, SEQUENCE_TOKENS_MAX, Written,
};
pub use index::anchor::{AnchorKey, Domain};
pub use index::arena::{ARENA_PAGES_MAX, Arena};
pub use index::block_index::{Match, MatchGoal, SIBLINGS_MAX};
pub use index::blocks::BlockRef;
pub use index::contradiction::Contradiction;
pub use index::namespaces::{
    NAMESPACE_RULES_MAX, NamespaceRule, NamespaceSecret, Namespaces, engine_of,
};
pub use index::shard_set::ShardSet;
pub use leader::decision::NOT_RECORDED;
pub use leader::event::{
    AttachRequest, AttachedDepot, CANCELLED_MAX, LeaderEffect, LeaderEvent, MemoryStatement,
    TiersStatement, WorkerMemory, Workers,
};
pub use leader::refusal::{Refusal, RefusalReason};
pub use leader::{
    CANCELS_MAX, COUNTERS, Counter, FLUSHES_OPEN_MAX, LOAD_RUNS_MAX, LOG_IDLE, LOG_PAGES_MAX,
    LOG_READ_PAGES_MAX, LOG_RECORDS_MAX, Leader, LeaderCounts, LeaderSettings, LogPart, LogRead,
    MOVE_ATTEMPTS_MAX, MOVES_WAITING_MAX, MoveEdge, OPEN_REQUESTS_MAX, REPLICAS_MAX,
    RESET_PAGES_OPEN_MAX, RESET_SLICE_PAGES, RESETS_OPEN_MAX, Refusals, RuleUsage, TierKey,
};
pub use pool::admission::{ADMISSION_RULES_MAX, Admission, SEEN_PAGES_MAX};
pub use pool::changes::{Change, GoneReason, PlacedPages};
pub use pool::counts::{PageStates, PoolCounts};
pub use pool::policy::{PIECES_MAX, TierPolicy};
pub use pool::policy_error::ParseTierPolicyError;
pub use pool::store_window::{LOOKS_AROUND_MAX, MISSES_AROUND_MAX};
pub use pool::view::BlockView;
pub use pool::{BlockRun, Pin, Pool, PrefixMatch, ReservationKind, Reserved};
pub use worker::{
    BatchId, EdgeCounts, EdgeLoad, GroupBounds, MemoryBounds, OrderRefusal, PACE_BURST,
    WORKER_ABANDONED_MAX, WORKER_ABANDONERS_MAX, WORKER_ABANDONERS_OF_USER_MAX, WORKER_COPIES_MAX,
    WORKER_ENDED_MAX, Worker, WorkerEffect, WorkerEvent, WorkerSettings,
};

/// Copies that a worker runs at one time, at most; further copies wait.
pub const RUNNING_COPIES_MAX: usize = 256;
