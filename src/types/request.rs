//! What engines ask of a leader, what it answers, and what it asks of workers: the vocabulary that the wire encodes, the
//! core decides about and engines speak.

use super::{EngineId, FragmentPair, OpId, PageHashes, PageList, Record, RequestId, SlotId, Time};

/// What an engine can ask for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// Which pages of a sequence are there? Opens the slot, or begins it anew, and pins what is found for a short time.
    Lookup {
        /// The engine's number of the request.
        slot: SlotId,
        /// Whose pages: salt, tenant, adapter. Two namespaces never share a page.
        namespace: Vec<u8>,
        /// Hashes of all full pages of the prompt.
        hashes: PageHashes,
        /// So many pages from the first on the engine has itself.
        device_pages: u32,
    },
    /// Copy pages that the last lookup found to the engine's memory.
    Load {
        /// Which slot.
        slot: SlotId,
        /// Position of the first page in the sequence.
        first_page: u32,
        /// Device pages, one for each page from there on.
        destination: PageList,
        /// The last number that the engine's ranks were given for a piece of work: until each rank says that it is written,
        /// the engine may still write into these pages, and nothing is copied there. 0: nothing does.
        after: RequestId,
    },
    /// Keep pages of the sequence. They are read once the engine's ranks say that they are written.
    Store {
        /// Which slot.
        slot: SlotId,
        /// Position of the first page in the sequence.
        first_page: u32,
        /// Hashes of pages that the slot may not know yet, and the position of the first of them.
        more: Option<(u32, PageHashes)>,
        /// Device pages, one for each page from `first_page` on.
        source: PageList,
    },
    /// Forget pages: none is found any more, now or after a restart, once this is answered. Refused while one of them is
    /// held.
    Reset {
        /// Which.
        scope: ResetScope,
    },
    /// Stop stores that are under way: their engine wants its pages back. Each of them is answered before this is.
    CancelStores {
        /// Those of this slot; without one all of the engine.
        slot: Option<SlotId>,
    },
    /// The request is over: let go of what the slot pins. Copies that are under way still end and are answered.
    Finish {
        /// Which slot.
        slot: SlotId,
    },
}

/// What comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// To a lookup.
    Lookup {
        /// Pages behind the engine's own that can be loaded.
        hit_pages: u32,
        /// The page behind those is on its way.
        pending: bool,
    },
    /// To a load: nothing writes its pages any more.
    Load {
        /// So many of them, from the first on, are in place on every rank; the engine computes the others.
        pages: u32,
    },
    /// To a store: a lookup finds `stored` and `present` pages from now on.
    Store {
        /// Pages that this request stored.
        stored_pages: u32,
        /// Pages that were there, or that another request stored meanwhile.
        present_pages: u32,
        /// Pages for which there was no room.
        refused_pages: u32,
        /// Pages whose copy failed.
        failed_pages: u32,
    },
    /// To a reset.
    Reset {
        /// Pages that were forgotten.
        pages: u32,
    },
    /// To a cancel of stores: no page of theirs is read any more.
    CancelStores {
        /// So many were under way.
        stores: u32,
    },
    /// To a finish.
    Finish,
}

/// What is to be forgotten.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ResetScope {
    /// Every page.
    Everything,
    /// Every page of a namespace.
    Namespace(Vec<u8>),
    /// These pages of a namespace, and what their blocks hold beside them.
    Pages(Vec<u8>, PageHashes),
}

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the engine's memory to a depot: a gather.
    Store,
    /// From a depot to the engine's memory: a scatter.
    Load,
}

/// One copy, the same on every rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copy {
    /// Its name; a store's is also the generation of its reservation.
    pub op: OpId,
    /// Whose memory.
    pub engine: EngineId,
    /// Which way.
    pub direction: Direction,
    /// Which pages: device pages on the engine's side, arena pages on the depot's.
    pub pairs: Vec<FragmentPair>,
    /// For which request. A copy for a request that the engine has abandoned never starts.
    pub request: RequestId,
    /// It starts once the rank's engine has said that everything up to this number is written: a store's own request, or
    /// the last work before a load that may write into its pages.
    pub after: RequestId,
    /// What a store writes into the inventory when its last byte is there.
    pub record: Option<Record>,
    /// When it is cancelled.
    pub deadline: Time,
}

/// The end of one copy on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndedCopy {
    /// Which copy.
    pub op: OpId,
    /// True when every byte was copied.
    pub whole: bool,
    /// When not: pages, from the first on and in the order of the pairs, of which every byte was.
    pub whole_pages: u32,
    /// Bytes that were copied.
    pub bytes: u64,
    /// How long the copy itself took, in microseconds.
    pub busy_us: u64,
}
