//! The core: plain, synchronous state machines on plain data.
//!
//! [`Leader::step`] takes the time and an event and appends effects. The core uses no sockets, files, clocks, random
//! sources or async runtime; time and keys are passed in. Read in this order:
//!
//! 1. `arena`: where runs of pages are; `blocks`: what they hold and how old they are; `anchor`, `index`, `page_index`,
//!    `prefetch`: how they are found;
//! 2. `pool`: one tier: reserve, fill, publish, pin, evict; `pool_counts`: its counters; `policy`: its settings
//!    (`admission`: which pages enter it; `policy_error`: its error); `view`: read-only views of it; `sweep`: resets;
//!    `recover`: from inventories; `change`, `noted`: which pages it gained and lost; `cover`: pages found from any
//!    position on, in several tiers, and `inside`, from inside blocks; `trail`: the first blocks of a sequence that grows;
//!    `check`: an independent recount of all of it (`contradiction`: its error);
//! 3. `group`: kinds of layers, which pages a hit needs of each, and how far it reaches;
//! 4. `session`: the state of an engine; `namespaces`: whose they are; `held`: counts of held pages; `event`, `refusal`:
//!    inputs and outputs;
//! 5. `leader`: the decisions; `decision`: their digest; `worker`: how a worker carries out its orders.

#![forbid(unsafe_code)]

mod admission;
mod anchor;
mod arena;
mod around;
mod blocks;
mod cells;
mod change;
mod check;
mod contradiction;
mod cover;
mod decision;
mod event;
mod eviction;
mod group;
mod held;
mod index;
mod inside;
mod leader;
mod model;
mod namespaces;
mod noted;
mod page_index;
mod policy;
mod policy_error;
mod pool;
mod pool_counts;
mod prefetch;
mod reach;
mod recover;
mod refusal;
mod session;
mod shard_set;
mod starts;
mod sweep;
mod trail;
mod view;
mod worker;

pub use admission::{ADMISSION_RULES_MAX, Admission, SEEN_PAGES_MAX};
pub use anchor::{AnchorKey, Domain};
pub use arena::{ARENA_PAGES_MAX, Arena};
pub use around::{LOOKS_AROUND_MAX, MISSES_AROUND_MAX};
pub use blocks::BlockRef;
pub use change::{Change, GoneReason, PlacedPages};
pub use contradiction::Contradiction;
pub use decision::NOT_RECORDED;
pub use event::{
    AttachRequest, AttachedDepot, CANCELLED_MAX, LeaderEffect, LeaderEvent, MemoryStatement,
    TiersStatement, WorkerMemory, Workers,
};
pub use eviction::{EvictionPolicy, REMEMBERED_PAGES_MAX, RuleLimits};
pub use group::{
    GROUPS_MAX, GroupError, GroupField, GroupKind, GroupSpec, Groups, HIT_TOKENS_MAX, Hit,
    LookupBounds, Presence, Retention, SEQUENCE_TOKENS_MAX, Written,
};
pub use index::{Match, MatchGoal, SIBLINGS_MAX};
pub use leader::{
    CANCELS_MAX, COUNTERS, Counter, FLUSHES_OPEN_MAX, LOAD_RUNS_MAX, LOG_IDLE, LOG_PAGES_MAX,
    LOG_READ_PAGES_MAX, LOG_RECORDS_MAX, Leader, LeaderCounts, LeaderSettings, LogPart, LogRead,
    MOVE_ATTEMPTS_MAX, MOVES_WAITING_MAX, MoveEdge, OPEN_REQUESTS_MAX, REPLICAS_MAX,
    RESET_PAGES_OPEN_MAX, RESET_SLICE_PAGES, RESETS_OPEN_MAX, Refusals, RuleUsage, TierKey,
};
pub use model::{Model, Sequence};
pub use namespaces::{NAMESPACE_RULES_MAX, NamespaceRule, NamespaceSecret, Namespaces, engine_of};
pub use policy::{PIECES_MAX, TierPolicy};
pub use policy_error::ParseTierPolicyError;
pub use pool::{BlockRun, Pin, Pool, PrefixMatch, ReservationKind, Reserved};
pub use pool_counts::{PageStates, PoolCounts};
pub use refusal::{Refusal, RefusalReason};
pub use shard_set::ShardSet;
pub use view::BlockView;
pub use worker::{
    BatchId, EdgeCounts, EdgeLoad, GroupBounds, MemoryBounds, OrderRefusal, PACE_BURST,
    WORKER_ABANDONED_MAX, WORKER_ABANDONERS_MAX, WORKER_ABANDONERS_OF_USER_MAX, WORKER_COPIES_MAX,
    WORKER_ENDED_MAX, Worker, WorkerEffect, WorkerEvent, WorkerSettings,
};

/// Copies that a worker runs at one time, at most; further copies wait.
pub const RUNNING_COPIES_MAX: usize = 256;

#[cfg(test)]
mod tests;
