//! Looking at a pool from outside, and forgetting what is seen: records for inventories, views for checks, resets.

use crate::core::blocks::BlockIndex;
use crate::core::pool::Pool;
use crate::core::sabotage::{Bug, planted};
use crate::types::{DomainId, Epoch, Fingerprint, Generation, Record, Scope, Stored};

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

    /// Forgets the blocks that hold a page of `scope`: none is found any more. What is filling is freed when its copies
    /// have ended; their reservations are returned, with the number of pages that are forgotten. Changes nothing and
    /// returns the number of holders when any of these blocks is held.
    pub fn retire(&mut self, scope: &Scope) -> Result<(u32, Vec<Generation>), u64> {
        let meant = |block: &BlockView<'_>| {
            let mut pages = block.fingerprints.iter();
            pages.any(|page| scope.contains(block.domain, *page))
        };
        let blocks: Vec<BlockIndex> = self
            .view()
            .filter(|block| !block.retired && meant(block))
            .map(|block| block.index)
            .collect();
        let holders: u64 = blocks
            .iter()
            .map(|block| u64::from(self.blocks.get(*block).pins))
            .sum();
        if holders > 0 {
            return Err(holders);
        }
        let (mut pages, mut filling) = (0, Vec::new());
        for index in blocks {
            let block = self.blocks.get(index);
            pages += block.total_pages();
            filling.extend(block.filling.map(|filling| filling.generation));
            if !(planted(Bug::ResetSkipsInFlight) && block.filling.is_some()) {
                self.retire_block(index);
            }
        }
        filling.sort_unstable();
        Ok((pages, filling))
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
