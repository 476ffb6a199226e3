//! Requests of engines to a leader, its answers, and its copy orders to workers: the types that the protocol encodes,
//! the core decides about and engines use.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    EngineId, FragmentPair, PageHashes, PageList, Record, RequestId, SlotId, Time, TransferId,
};

/// A request of an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// Find the stored pages of a sequence. Opens the slot, or restarts it, and pins the found pages for a short time.
    Lookup {
        /// The engine's number of the request.
        slot: SlotId,
        /// Namespace of the pages: salt, tenant, adapter. Two namespaces never share a page.
        namespace: Vec<u8>,
        /// Hashes of all full pages of the prompt.
        hashes: PageHashes,
        /// Number of pages, from the first one on, that the engine has itself.
        device_pages: u32,
    },
    /// Copy pages that the last lookup found to the engine's memory.
    Load {
        /// The slot of that lookup.
        slot: SlotId,
        /// Position of the first page in the sequence.
        first_page: u32,
        /// Device pages, one for each page from there on.
        destination: PageList,
        /// Last number that the engine's ranks received for a piece of work. The engine may still write into the
        /// destination pages until each rank has reported that number as written, and nothing is copied there before.
        /// 0: no work writes there.
        after: RequestId,
    },
    /// Store pages of the sequence. A page is read once the engine's ranks have reported it as written.
    Store {
        /// The slot of the sequence.
        slot: SlotId,
        /// Position of the first page in the sequence.
        first_page: u32,
        /// Position of the first of these pages, and hashes of pages that the slot may not have yet.
        more: Option<(u32, PageHashes)>,
        /// Device pages, one for each page from `first_page` on.
        source: PageList,
    },
    /// Remove pages: once this is answered no lookup finds them, also after a restart. Refused while one of them is
    /// held.
    Reset {
        /// The pages that are forgotten.
        scope: ResetScope,
    },
    /// Stop stores that are in flight, because their engine needs its pages back. Each of them is answered before this
    /// request.
    CancelStores {
        /// The slot whose stores are stopped; `None` for all of the engine.
        slot: Option<SlotId>,
    },
    /// The request has ended: release the pages that the slot pins. Copies in flight still end, and are answered.
    Finish {
        /// The slot that ends.
        slot: SlotId,
    },
}

/// The pages that a reset removes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ResetScope {
    /// Every page.
    Everything,
    /// Every page of a namespace.
    Namespace(Vec<u8>),
    /// These pages of a namespace, with the other pages of their blocks.
    Pages(Vec<u8>, PageHashes),
}

/// Direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the engine's memory to a depot: a gather.
    Store,
    /// From a depot to the engine's memory: a scatter.
    Load,
}

/// One copy, equal on every rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copy {
    /// Id of the transfer; for a store also that of its reservation.
    pub transfer: TransferId,
    /// The engine whose memory is read or written.
    pub engine: EngineId,
    /// From the engine's memory, or to it.
    pub direction: Direction,
    /// The pages: device pages on the engine's side, arena pages on the depot's.
    pub pairs: Vec<FragmentPair>,
    /// The request that the copy belongs to. A copy for a request that the engine has abandoned never starts.
    pub request: RequestId,
    /// The copy starts once the rank has reported everything up to this number as written: for a store its own request,
    /// for a load the last work that may write into the destination pages.
    pub after: RequestId,
    /// For a store, the record that is added to the inventory after its last byte; `None` for a load.
    pub record: Option<Record>,
    /// Time at which the copy is cancelled.
    pub deadline: Time,
}

/// The end of one copy on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EndedCopy {
    /// Number of the copy.
    pub transfer: TransferId,
    /// True when every byte was copied.
    pub complete: bool,
    /// If not: number of pages, from the first one on and in the order of the pairs, of which every byte was copied.
    #[serde(default)]
    pub complete_pages: u32,
    /// Bytes that were copied.
    #[serde(default)]
    pub bytes: u64,
    /// Duration of the copy, in microseconds.
    #[serde(default)]
    pub copy_us: u64,
}
