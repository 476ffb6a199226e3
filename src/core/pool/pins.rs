//! Holds on pages: of lookups, loads and plans, and of moves on their sources.

use super::Pool;
use crate::index::blocks::{BlockIndex, BlockRef};
use kvferry_types::{DomainId, Fingerprint};

/// A hold on the first `pages` pages of a block. Not `Clone`: the holder releases the pin exactly once.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a pin that is dropped is never released"]
pub struct Pin {
    block: BlockRef,
    pages: u32,
}

impl Pin {
    /// The block that is held.
    pub(crate) fn block(&self) -> BlockRef {
        self.block
    }
}

impl Pool {
    /// A block with the stamp of its creation.
    pub(crate) fn block_ref(&self, block: BlockIndex) -> BlockRef {
        self.blocks.reference(block)
    }

    /// Holds the first `pages` pages of a block until [`Self::unpin`].
    pub fn pin(&mut self, block: BlockIndex, pages: u32) -> Pin {
        self.pins += 1;
        let reference = self.blocks.reference(block);
        let held = self.blocks.holders_mut(block);
        held.pins += 1;
        held.pinned_pages = held
            .pinned_pages
            .max(u16::try_from(pages).unwrap_or(u16::MAX));
        self.blocks.update_order(block);
        Pin {
            block: reference,
            pages,
        }
    }

    /// Holds the first `pages` pages of a block until its last pin is released, if it has one.
    pub(crate) fn extend_pins(&mut self, block: BlockIndex, pages: u32) {
        let held = self.blocks.holders_mut(block);
        if held.pins > 0 {
            let pages = u16::try_from(pages).unwrap_or(u16::MAX);
            held.pinned_pages = held.pinned_pages.max(pages);
        }
    }

    /// Releases a pin, and frees the pages of a retired block that has no other holder.
    pub fn unpin(&mut self, pin: Pin) {
        self.pins -= 1;
        debug_assert!(
            self.blocks.find(pin.block).is_some(),
            "a pinned block lives"
        );
        let index = pin.block.index;
        let block = self.blocks.holders_mut(index);
        block.pins -= 1;
        if block.pins == 0 {
            block.pinned_pages = 0;
            self.blocks.update_order(index);
            self.free_if_unheld(index);
        }
    }

    /// Number of pages that a pin holds.
    pub fn pinned_pages(pin: &Pin) -> u32 {
        pin.pages
    }

    /// The domain, the place in its cell, the first arena page and the pages of a block that can be moved: readable ones
    /// that no reset is about to remove.
    pub(crate) fn movable(
        &self,
        block: BlockRef,
    ) -> Option<(DomainId, u32, u32, impl Iterator<Item = Fingerprint> + '_)> {
        let held = self.blocks.find(block)?;
        if held.retired || held.ready == 0 || self.blocks.is_hidden(held) {
            return None;
        }
        let pages = self.blocks.fingerprints(held.start, held.ready.into());
        let pages = pages.iter().copied();
        Some((held.domain, held.phase.into(), held.start, pages))
    }

    /// Holds the pages of a block up to arena page `end`; `None` if the block has none of them any longer.
    pub(crate) fn pin_through(&mut self, block: BlockRef, end: u32) -> Option<Pin> {
        let held = self.blocks.find(block)?;
        let ready = held.start + u32::from(held.ready);
        let pages = end.checked_sub(held.start)?;
        (end <= ready).then(|| self.pin(block.index, pages))
    }
}
