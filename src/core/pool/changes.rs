//! Changes of a tier: which pages it gained and lost, in the order in which that happened.
//!
//! Two parts of the leader read them: moves queue the blocks that gained pages, and the change log keeps the pages for its
//! readers. A pool records for each of the two only while it is read.

use crate::index::blocks::BlockRef;
use kvferry_types::{DomainId, Fingerprint};

/// Readable pages in consecutive arena pages of a tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacedPages {
    /// The domain of the pages.
    pub domain: DomainId,
    /// Arena page of the first of them.
    pub start: u32,
    /// The pages: at least one, and at most those of a block.
    pub pages: Box<[Fingerprint]>,
}

/// Why pages are not found any longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GoneReason {
    /// They made room for other pages.
    Evicted,
    /// They, or a page before them in their block, failed their checksum or were not read.
    Damaged,
    /// A reset covers them.
    Reset,
}

/// A change of the readable pages of a tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Pages became readable.
    Stored(PlacedPages),
    /// Pages are not found any longer.
    Gone(PlacedPages, GoneReason),
    /// No page of the tier is found any longer: it closed.
    Cleared,
}

impl Change {
    /// The pages that were gained or lost; `None` if all were lost.
    pub fn pages(&self) -> Option<&PlacedPages> {
        match self {
            Self::Stored(pages) | Self::Gone(pages, _) => Some(pages),
            Self::Cleared => None,
        }
    }
}

/// The changes since they were taken last, for each reader. A step of the leader takes them, so that they are at most those
/// of one event: 16 bytes for each page that it adds or removes, and 64 for each block.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// Blocks that gained pages. One may be gone by the time at which it is taken.
    pub(crate) gained: Option<Vec<BlockRef>>,
    /// Pages that were gained and lost.
    pub(crate) all: Option<Vec<Change>>,
}

impl Changes {
    pub(crate) fn add(&mut self, change: Change) {
        if let Some(changes) = &mut self.all {
            changes.push(change);
        }
    }
}
