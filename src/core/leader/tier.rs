//! The tier of host memory: which pages its pool is for, when the pool opens, and when it closes.
//!
//! A pool identifies pages by number. Which bytes a number means depends on the page size, the layout and the depot of
//! each shard. The pool carries these as its [`TierKey`], and closes as soon as the workers have another key. A closing
//! pool serves no page and holds none; its copies are cancelled and awaited, because they still read and write at the
//! old offsets. Then the pool is dropped, and the inventories are read for the new key.

use crate::event::Effect;
use crate::pool::{Pool, PoolCounts};
use kvferry_types::{DepotId, EngineId, GroupGeometry, OpId, SlotId, Time};

use super::{Leader, Timer};

/// Identity of a pool: two keys that differ in any field mean different bytes by the same page number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TierKey {
    /// Bytes of one page.
    pub page_bytes: u64,
    /// Fingerprint of the layout of a page.
    pub layout_fingerprint: [u8; 16],
    /// Number of pages that the smallest depot has room for.
    pub pages: u32,
    /// The depot of each shard.
    pub depots: Vec<DepotId>,
}

impl TierKey {
    /// True when pages of this geometry are those that the key describes.
    pub(super) fn is_for(&self, geometry: &GroupGeometry) -> bool {
        self.page_bytes == geometry.page_bytes
            && self.layout_fingerprint == geometry.layout_fingerprint
    }
}

/// A pool with its key. See the module.
#[derive(Debug)]
pub(super) struct Tier {
    key: TierKey,
    pool: Pool,
    closing: bool,
}

impl Tier {
    pub(super) fn new(key: TierKey, pool: Pool) -> Self {
        Self {
            key,
            pool,
            closing: false,
        }
    }

    /// The pool for requests; `None` while it closes.
    pub(super) fn serving(&self) -> Option<&Pool> {
        (!self.closing).then_some(&self.pool)
    }

    /// Like `serving`, but mutable.
    pub(super) fn serving_mut(&mut self) -> Option<&mut Pool> {
        (!self.closing).then_some(&mut self.pool)
    }

    /// The key; `None` while the pool closes.
    pub(super) fn key(&self) -> Option<&TierKey> {
        (!self.closing).then_some(&self.key)
    }

    /// The pool for the ends of copies, also while it closes.
    pub(super) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Like `pool`, but mutable.
    pub(super) fn pool_mut(&mut self) -> &mut Pool {
        &mut self.pool
    }
}

impl Leader {
    /// The key of the pool that serves, or of the pool that is being recovered.
    pub(super) fn wanted_key(&self) -> Option<&TierKey> {
        let serving = self.tier.as_ref().and_then(Tier::key);
        serving.or(self.reading.as_ref().map(|readings| &readings.key))
    }

    /// Closes the pool and stops the reading whose key differs from what the workers have. Called after each change of
    /// the roster.
    pub(super) fn fit_tier(&mut self) {
        let Some(key) = self.wanted_key() else {
            return;
        };
        if self.workers.have(key) {
            return;
        }
        self.stop_reading();
        self.close_tier();
    }

    /// Closes the pool: releases all holds, forgets its blocks, and cancels its copies.
    fn close_tier(&mut self) {
        let Some(tier) = self.tier.as_mut().filter(|tier| !tier.closing) else {
            return;
        };
        tier.closing = true;
        let slots = self.sessions.iter().flat_map(|(engine, session)| {
            let slots = session.slots.iter();
            slots.map(|(id, slot)| (*engine, *id, slot.held_until))
        });
        let slots: Vec<(EngineId, SlotId, Time)> = slots.collect();
        for (engine, id, held_until) in slots {
            self.timers.remove(&(held_until, Timer::Hold(engine, id)));
            self.drop_holds(engine, id);
        }
        if let Some(tier) = &mut self.tier {
            tier.pool.reset();
        }
        let mut ops: Vec<OpId> = self.ops.keys().copied().collect();
        ops.sort_unstable();
        for op in ops {
            self.cancel(op);
        }
    }

    /// Drops a closed pool whose last copy has ended, and opens the next one.
    pub(super) fn settle_tier(&mut self, now: Time, effects: &mut Vec<Effect>) {
        let closed = |tier: &mut Tier| tier.closing;
        if self.ops.is_empty()
            && let Some(tier) = self.tier.take_if(closed)
        {
            self.pool_counts = self.pool_counts.with(tier.pool.counts());
            self.open_pool(now, effects);
        }
    }

    /// Counters of all pools since the start.
    pub(super) fn all_pool_counts(&self) -> PoolCounts {
        let now = self.tier.as_ref().map(|tier| tier.pool.counts());
        self.pool_counts.with(now.unwrap_or_default())
    }

    /// The G2 pool that serves; `None` before every rank has attached and while a pool closes.
    pub fn pool(&self) -> Option<&Pool> {
        self.tier.as_ref().and_then(Tier::serving)
    }

    /// A pool that has stopped serving and waits for the ends of its last copies.
    pub fn closing_pool(&self) -> Option<&Pool> {
        let tier = self.tier.as_ref().filter(|tier| tier.closing)?;
        Some(&tier.pool)
    }

    /// The key of the pool that serves.
    pub fn tier_key(&self) -> Option<&TierKey> {
        self.tier.as_ref().and_then(Tier::key)
    }

    /// True while inventories are being read.
    pub fn is_reading(&self) -> bool {
        self.reading.is_some()
    }
}
