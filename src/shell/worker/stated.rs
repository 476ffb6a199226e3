//! The pages of the tiers below host memory that a worker has stated to its leader.
//!
//! A leader orders moves of pages that it knows, and a disk that fails or is full has fewer from one moment to the next. So
//! an order is checked against what was stated. A move that does not fit into what the disk has now is not carried out,
//! as if the disk had failed it.

use std::fmt;

use std::collections::VecDeque;

use kvferry_types::{PerTier, TierId, TierLayout};

use super::WorkerHost;

/// Statements that are remembered, at most. The last one is not enough: an order may have been sent before the leader
/// received the statement, and arrives after the answer.
const STATED_MAX: usize = 16;

/// The last statements over a connection that differ, oldest first.
#[derive(Debug, Default)]
pub(super) struct StatedTiers(VecDeque<(TierLayout, PerTier<u32>)>);

impl StatedTiers {
    /// Notes the pages that a worker states now, and returns them.
    pub(super) fn add<P: fmt::Debug, M>(
        &mut self,
        host: &dyn WorkerHost<Process = P, Memory = M>,
    ) -> (TierLayout, PerTier<u32>) {
        let layout = host.tier_layout().unwrap_or_default();
        let tiers: Vec<TierId> = host.depots().tiers().collect();
        let below = tiers.into_iter().filter(|tier| *tier > TierId::Host);
        let pages = below.map(|tier| (tier, host.arena_pages(tier, layout.page_bytes)));
        let stated = (layout, pages.collect());
        if self.0.back() != Some(&stated) {
            self.0.push_back(stated.clone());
        }
        if self.0.len() > STATED_MAX {
            self.0.pop_front();
        }
        stated
    }

    /// Raises the pages of each tier below host memory to the number of this size that the leader may know.
    pub(super) fn raise(&self, pages: &mut PerTier<u32>, page_bytes: u64) {
        let stated = self.0.iter();
        let stated = stated.filter(|(layout, _)| layout.page_bytes == page_bytes);
        for (tier, most) in stated.flat_map(|(_, pages)| pages.iter()) {
            if let Some(pages) = pages.get_mut(tier) {
                *pages = (*pages).max(*most);
            }
        }
    }
}
