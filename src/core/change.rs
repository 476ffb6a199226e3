//! Changes of a tier: which pages it has gained and lost, in the order in which that happened.
//!
//! Pages are moved to slower tiers, and engines are told about pages, from this one list. A pool records changes only
//! where they are consumed.

use crate::blocks::{BlockIndex, BlockRef};
use crate::pool::Pool;
use kvferry_types::{DomainId, Fingerprint};

/// A change of the readable pages of a tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Pages of a block became readable.
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
pub(super) struct Changes(Option<Vec<Change>>);

impl Changes {
    pub(super) fn add(&mut self, change: impl FnOnce() -> Change) {
        if let Some(changes) = &mut self.0 {
            changes.push(change());
        }
    }
}

impl Pool {
    /// Records changes from now on.
    pub fn record_changes(&mut self) {
        self.changes.0.get_or_insert_default();
    }

    /// The changes since they were taken last.
    pub fn take_changes(&mut self) -> Vec<Change> {
        self.changes
            .0
            .as_mut()
            .map(std::mem::take)
            .unwrap_or_default()
    }

    pub(super) fn note_stored(&mut self, block: BlockIndex) {
        let block = self.blocks.reference(block);
        self.changes.add(|| Change::Stored(block));
    }

    /// Notes the loss of readable pages of a block, from page `first` of the block on.
    pub(super) fn note_removed(&mut self, block: BlockIndex, first: u32, pages: u32) {
        let block = self.blocks.get(block);
        if pages > 0 && !block.retired {
            let (domain, start) = (block.domain, block.start + first);
            let blocks = &self.blocks;
            self.changes.add(|| Change::Removed {
                domain,
                pages: blocks.fingerprints(start, pages).to_vec(),
            });
        }
    }
}
