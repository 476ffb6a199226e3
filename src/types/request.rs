//! Requests of engines to a leader: the types that the protocol encodes, the core decides about and engines use.

use super::{PageHashes, PageList, RequestId, SlotId};

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
