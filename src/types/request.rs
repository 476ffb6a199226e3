//! Requests of engines to a leader: the types that the protocol encodes, the core decides about and engines use.

use super::{GroupId, PageHashes, PageList, RequestId, SlotId, TierId};

/// Number of priorities of pages: those with priority 0 are evicted first.
pub const PRIORITIES: u8 = 8;
/// The priority of pages that are stored without one.
pub const PRIORITY_DEFAULT: u8 = 4;

/// Consecutive pages of one group of a sequence, and the engine's own pages that hold them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The group of layers.
    pub group: GroupId,
    /// Position of the first page in the sequence, in pages of the group.
    pub first_page: u32,
    /// Device pages, one for each page from there on.
    pub pages: PageList,
    /// For a store, where a tier evicts by priority: how long the pages are kept, below [`PRIORITIES`].
    pub priority: u8,
}

impl Part {
    /// Pages of a group from `first_page` on, with the default priority.
    pub fn new(group: GroupId, first_page: u32, pages: PageList) -> Self {
        Self {
            group,
            first_page,
            pages,
            priority: PRIORITY_DEFAULT,
        }
    }
}

/// A request of an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// Find the stored pages of a sequence. Opens the slot, or restarts it, and pins the found pages for a short time.
    Lookup {
        /// The engine's number of the request.
        slot: SlotId,
        /// Namespace of the pages: salt, tenant, adapter. Two namespaces never share a page.
        namespace: Vec<u8>,
        /// Hashes of the prompt, one for each unit of the registered `hash_tokens`: for a model with one group, one for
        /// each full page.
        hashes: PageHashes,
        /// Number of units, from the first one on, whose pages the engine has itself, in every group.
        have_pages: u32,
        /// Largest end of a hit, in units; `None` for all of them. An engine computes at least the last token of a
        /// prompt. Hashes beyond the limit are of use to groups with draft layers only.
        limit_pages: Option<u32>,
    },
    /// Copy pages that the last lookup found to the engine's memory. A load of one part may end early, and its answer
    /// gives the pages that were copied; a load of several parts is answered when all pages were copied, or refused.
    Load {
        /// The slot of that lookup.
        slot: SlotId,
        /// The pages, in any order of groups.
        parts: Vec<Part>,
        /// Last number that the engine's ranks received for a piece of work. The engine may still write into the
        /// destination pages until each rank has reported that number as written, and nothing is copied there before.
        /// 0: no work writes there.
        after: RequestId,
    },
    /// Store pages of the sequence. A page is read once the engine's ranks have reported it as written.
    Store {
        /// The slot of the sequence.
        slot: SlotId,
        /// The pages. A group may have several parts, where not all of its pages are stored.
        parts: Vec<Part>,
        /// Position of the first of these hashes, and hashes that the slot may not have yet.
        more: Option<(u32, PageHashes)>,
        /// The number of the work that writes the pages, where the engine's ranks received it before the store was
        /// requested. Pages are read once each rank has reported it as written. 0: the request's own id.
        after: RequestId,
    },
    /// Remove pages: once this is answered no lookup finds them, also after a restart. Refused while one of them is
    /// held.
    Reset {
        /// The pages that are forgotten.
        scope: ResetScope,
        /// The tier that forgets them; `None` for all tiers.
        tier: Option<TierId>,
    },
    /// Move what is stored to the disk, and make it durable there.
    Flush,
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
