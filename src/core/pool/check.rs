//! The second count: recomputes the counters and lists of a pool from its blocks and holes.

use std::collections::{BTreeMap, BTreeSet};

use crate::Contradiction;
use crate::index::blocks::Block;
use crate::pool::Pool;

impl Pool {
    /// Walks all blocks and holes and compares them with the counters. `Err` names the first contradiction. Takes time
    /// in proportion to the arena: for tests, the simulator and the end of a run.
    pub fn check(&self) -> Result<(), Contradiction> {
        self.arena.check()?;
        let mut spans = self.arena.holes();
        let mut filling = BTreeSet::new();
        let (mut pins, mut blocks) = (0, 0);
        for (index, block) in self.blocks.by_age() {
            blocks += 1;
            pins += u64::from(block.pins);
            let total = block.total_pages();
            if total == 0 {
                return Err(format!("block {index} holds no page").into());
            }
            if u32::from(block.phase) + total > self.ratio {
                return Err(format!("block {index} crosses a multiple of the ratio").into());
            }
            if block.pins == 0 && block.pinned_pages != 0 {
                return Err(format!("block {index} has pinned pages and no holder").into());
            }
            if block.pinned_pages > block.ready {
                return Err(format!("block {index} lost pinned pages").into());
            }
            spans.push((block.start, total));
            if let Some(fill) = block.filling() {
                filling.insert(fill.transfer);
                let owner = self.reservations.get(&fill.transfer);
                if !owner.is_some_and(|owner| owner.block == index && owner.pages == fill.pages) {
                    return Err(
                        format!("{} of block {index} has no such owner", fill.transfer).into(),
                    );
                }
            }
        }
        if blocks != self.blocks.len() {
            return Err(
                format!("{blocks} blocks by age, {} in the slab", self.blocks.len()).into(),
            );
        }
        if pins != self.pins() {
            return Err(format!("blocks count {pins} pins, the pool {}", self.pins()).into());
        }
        if filling.len() != self.reservations.len() {
            return Err(format!(
                "{} blocks fill, {} reservations live",
                filling.len(),
                self.reservations.len()
            )
            .into());
        }
        spans.extend(self.spans_out());
        check_cover(&mut spans, self.capacity_pages())?;
        self.check_faults()?;
        self.check_order()?;
        self.check_page_index()?;
        self.index.check(&self.blocks, self.capacity_pages())?;
        let states = self.page_states();
        let ready: u32 = self
            .blocks
            .by_age()
            .map(|(_, block)| u32::from(block.ready))
            .sum();
        let set_aside = states.reserved + states.filling + states.quarantined + states.out_of_use;
        let sum = states.free + set_aside + ready;
        if sum != self.capacity_pages() || ready != states.ready {
            return Err(
                format!("{states:?} do not add up: blocks hold {ready} ready pages").into(),
            );
        }
        let mut all = self.blocks.by_age();
        let misplaced =
            |index, block: &Block| block.evictable_pages() > 0 && !self.blocks.is_in_order(index);
        match all.find(|(index, block)| misplaced(*index, block)) {
            None => Ok(()),
            Some((index, _)) => {
                Err(format!("block {index} and the order of eviction disagree").into())
            }
        }
    }
}

impl Pool {
    /// Compares the pages of each list and share in the order of eviction with those of the blocks.
    fn check_order(&self) -> Result<(), Contradiction> {
        let order = self.blocks.order();
        let mut pages = vec![0; order.pages().len()];
        let mut used = BTreeMap::new();
        for (_, block) in self.blocks.by_age() {
            pages[usize::from(block.list())] += u64::from(block.total_pages());
            for share in order.shares(block.domain.namespace()) {
                *used.entry(share).or_default() += block.total_pages();
            }
        }
        if pages != order.pages() {
            let counted = order.pages();
            return Err(format!("blocks have {pages:?} pages by list, {counted:?} counted").into());
        }
        let counted = order.used();
        match counted == used {
            true => Ok(()),
            false => Err(format!("shares have {used:?} pages, {counted:?} counted").into()),
        }
    }
}

/// Checks that holes and blocks together cover every page exactly once.
fn check_cover(spans: &mut [(u32, u32)], capacity: u32) -> Result<(), Contradiction> {
    spans.sort_unstable();
    let mut next = 0;
    for (start, length) in spans {
        if *start != next {
            return Err(format!("page {next} is lost, or page {start} is held twice").into());
        }
        next = *start + *length;
    }
    match next == capacity {
        true => Ok(()),
        false => Err(format!("pages from {next} to {capacity} are lost").into()),
    }
}
