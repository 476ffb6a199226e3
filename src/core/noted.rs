//! Notes the changes of a pool, where they are consumed.

use crate::blocks::BlockIndex;
use crate::change::Change;
use crate::pool::Pool;

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
