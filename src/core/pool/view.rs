//! Views of a pool for code outside it: records for inventories, and blocks for checks.

use crate::pool::Pool;
use kvferry_types::{DomainId, Epoch, Fingerprint, Record, Stored, TransferId};

/// A read-only view of a block, for checks and for users.
#[derive(Debug, Clone, Copy)]
pub struct BlockView<'a> {
    /// Position in the slab. Unique among live blocks.
    pub index: u32,
    /// The domain that the block belongs to.
    pub domain: DomainId,
    /// First arena page.
    pub start: u32,
    /// Number of readable pages, from the first on.
    pub ready: u32,
    /// Transfer and number of pages of the reservation after the readable pages.
    pub filling: Option<(TransferId, u32)>,
    /// Number of pins and leases.
    pub pins: u32,
    /// No longer found by lookups; removed with its last holder.
    pub retired: bool,
    /// Not found by lookups while a reset removes it.
    pub hidden: bool,
    /// Fingerprints of its pages, including the filling ones.
    pub fingerprints: &'a [Fingerprint],
}

impl Pool {
    /// The record that a store into the pages of `transfer` adds to the inventories.
    pub fn record(&self, transfer: TransferId, epoch: Epoch) -> Option<Record> {
        let reservation = self.reservations.get(&transfer)?;
        let block = self.blocks.get(reservation.block);
        let start = block.start + u32::from(block.ready);
        Some(Record {
            anchor: block.anchor,
            domain: block.domain,
            block_start: block.start,
            first: block.ready,
            phase: block.phase,
            stored: Stored { epoch, transfer },
            fingerprints: self.blocks.fingerprints(start, reservation.pages).to_vec(),
        })
    }

    /// All blocks, oldest first.
    pub fn view(&self) -> impl Iterator<Item = BlockView<'_>> {
        self.blocks.by_age().map(|(index, block)| BlockView {
            index,
            domain: block.domain,
            start: block.start,
            ready: u32::from(block.ready),
            filling: block
                .filling()
                .map(|filling| (filling.transfer, filling.pages)),
            pins: block.pins,
            retired: block.retired,
            hidden: self.blocks.is_hidden(block),
            fingerprints: self.blocks.fingerprints(block.start, block.total_pages()),
        })
    }
}
