//! Changes of a tier: which pages it has gained and lost, in the order in which that happened.
//!
//! Write-through moves begin with this list, and the events of a cache will: pages that were removed have no other reader
//! yet. A pool records changes only where they are consumed.

use crate::blocks::BlockRef;
use kvferry_types::{DomainId, Fingerprint};

/// A change of the readable pages of a tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Pages of a block became readable. The block may be gone by the time at which the change is taken.
    Stored(BlockRef),
    /// Pages are not found any longer: they were evicted or forgotten, or failed their checksum.
    Removed {
        /// The domain of the pages.
        domain: DomainId,
        /// The pages, in the order of their block.
        pages: Vec<Fingerprint>,
    },
    /// No page of the tier is found any longer.
    Cleared,
}

/// The changes since they were taken last. A step of the leader takes them, so that they are at most those of one event:
/// 16 bytes for each page that it removes.
#[derive(Debug, Default)]
pub(super) struct Changes(pub(super) Option<Vec<Change>>);

impl Changes {
    pub(super) fn add(&mut self, change: impl FnOnce() -> Change) {
        if let Some(changes) = &mut self.0 {
            changes.push(change());
        }
    }
}
