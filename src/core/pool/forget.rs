//! Removal of blocks and of pages whose checksum is wrong. Held pages are freed with their last holder.

use super::Pool;
use crate::index::blocks::{BlockIndex, BlockRef};
use crate::pool::changes::{Change, GoneReason};

impl Pool {
    /// Forgets every block, so that no lookup finds one. Pinned and filling pages are freed with their last holder.
    pub fn reset(&mut self) {
        let all: Vec<BlockIndex> = self.blocks.by_age().map(|(index, _)| index).collect();
        self.changes.add(Change::Cleared);
        for index in all {
            self.forget_block(index);
        }
    }

    /// Forgets a block. Its pages are freed with their last holder.
    pub(crate) fn retire_block(&mut self, index: BlockIndex, reason: GoneReason) {
        let ready = u32::from(self.blocks.get(index).ready);
        self.note_gone(index, 0, ready, reason);
        self.forget_block(index);
    }

    pub(super) fn forget_block(&mut self, index: BlockIndex) {
        let block = self.blocks.get(index);
        if !block.retired {
            self.unindex_pages(index, 0..block.total_pages());
            self.index.remove(&mut self.blocks, index);
            self.blocks.get_mut(index).retired = true;
        }
        self.free_if_unheld(index);
    }

    /// Removes an empty block from the index and the slab.
    pub(super) fn remove_empty(&mut self, index: BlockIndex) {
        if !self.blocks.get(index).retired {
            self.index.remove(&mut self.blocks, index);
        }
        self.blocks.remove(index);
    }

    /// Frees the pages of a retired block that have no holder, and removes the block when none of its pages are held.
    pub(super) fn free_if_unheld(&mut self, index: BlockIndex) {
        let block = self.blocks.get(index);
        if !block.retired || block.filling().is_some() {
            return;
        }
        let block = self.blocks.get_mut(index);
        let kept = block.pinned_pages.min(block.ready);
        let (start, freed) = (block.start + u32::from(kept), u32::from(block.ready - kept));
        block.ready = kept;
        if freed > 0 {
            self.blocks.remove_pages(index, freed);
            self.release(start, freed);
        }
        if kept == 0 {
            self.blocks.remove(index);
        } else {
            self.blocks.update_order(index);
        }
    }

    /// True if a held block is not found by lookups any longer.
    pub(crate) fn is_forgotten(&self, block: BlockIndex) -> bool {
        self.blocks.get(block).retired
    }

    /// Forgets the pages of a block from arena page `page` on, because that page failed its checksum. While the block has
    /// other holders or grows, all of its pages are forgotten.
    pub(crate) fn cut(&mut self, block: BlockRef, page: u32) {
        let Some(held) = self.blocks.find(block).filter(|held| !held.retired) else {
            return;
        };
        let ready = u32::from(held.ready);
        let keep = page.saturating_sub(held.start);
        if keep >= ready {
            return;
        }
        let start = held.start;
        let idle = held.pins == 0 && held.filling().is_none();
        if idle && keep > 0 {
            self.note_gone(block.index, keep, ready - keep, GoneReason::Damaged);
            self.unindex_pages(block.index, keep..ready);
            self.blocks.remove_pages(block.index, ready - keep);
            self.release(start + keep, ready - keep);
            self.blocks.get_mut(block.index).ready = u16::try_from(keep).unwrap_or(0);
            self.blocks.update_order(block.index);
        } else {
            self.retire_block(block.index, GoneReason::Damaged);
        }
    }
}
