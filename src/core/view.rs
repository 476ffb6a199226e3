//! Looking at a pool from outside: records for inventories, views for checks.

use crate::core::pool::Pool;
use crate::types::{DomainId, Epoch, Fingerprint, Generation, Record, Stored};

/// A block as it is now, to be looked at: by checks and by people.
#[derive(Debug, Clone, Copy)]
pub struct BlockView<'a> {
    /// Its number among those that live.
    pub index: u32,
    /// Whose it is.
    pub domain: DomainId,
    /// First arena page.
    pub start: u32,
    /// Pages that can be read, from the first on.
    pub ready: u32,
    /// The reservation behind those, and its pages.
    pub filling: Option<(Generation, u32)>,
    /// Holders.
    pub pins: u32,
    /// No longer found; goes with its last holder.
    pub retired: bool,
    /// What its pages hold, the filling ones included.
    pub fingerprints: &'a [Fingerprint],
}

impl Pool {
    /// What a store into the pages of `generation` leaves in the inventories.
    pub fn record(&self, generation: Generation, epoch: Epoch) -> Option<Record> {
        let reservation = self.reservations.get(&generation)?;
        let block = self.blocks.get(reservation.block);
        let start = block.start + u32::from(block.ready);
        Some(Record {
            anchor: block.anchor,
            domain: block.domain,
            block_start: block.start,
            first: block.ready,
            phase: block.phase,
            stored: Stored { epoch, generation },
            fingerprints: self.blocks.fingerprints(start, reservation.pages).to_vec(),
        })
    }

    /// Every block, the oldest first.
    pub fn view(&self) -> impl Iterator<Item = BlockView<'_>> {
        self.blocks.by_age().map(|(index, block)| BlockView {
            index,
            domain: block.domain,
            start: block.start,
            ready: u32::from(block.ready),
            filling: block
                .filling
                .map(|filling| (filling.generation, filling.pages)),
            pins: block.pins,
            retired: block.retired,
            fingerprints: self.blocks.fingerprints(block.start, block.total_pages()),
        })
    }
}
