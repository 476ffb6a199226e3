//! The tier of host memory: which pages its pool is for, when the pool opens, and when it closes.
//!
//! A pool identifies pages by number. Which bytes a number means depends on the page size, the layout and the depot of
//! each shard. The pool carries these as its [`TierKey`], and closes as soon as the workers have another key. A closing
//! pool serves no page and holds none; its copies are cancelled and awaited, because they still read and write at the
//! old offsets. Then the pool is dropped, and the inventories are read for the new key.

use crate::event::LeaderEffect;
use crate::pool::{Pool, PoolCounts};
use kvferry_types::{DepotId, GroupGeometry, Time};

use super::Leader;

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
struct Tier {
    key: TierKey,
    pool: Pool,
    closing: bool,
}

impl Tier {
    fn new(key: TierKey, pool: Pool) -> Self {
        Self {
            key,
            pool,
            closing: false,
        }
    }

    /// The pool for requests; `None` while it closes.
    fn serving(&self) -> Option<&Pool> {
        (!self.closing).then_some(&self.pool)
    }

    /// Like `serving`, but mutable.
    fn serving_mut(&mut self) -> Option<&mut Pool> {
        (!self.closing).then_some(&mut self.pool)
    }

    /// The key; `None` while the pool closes.
    fn key(&self) -> Option<&TierKey> {
        (!self.closing).then_some(&self.key)
    }
}

/// The pool of host memory, if there is one, and what was counted in those before it.
#[derive(Debug, Default)]
pub(super) struct HostTier {
    tier: Option<Tier>,
    /// Counters of the pools that were closed.
    closed: PoolCounts,
}

impl HostTier {
    /// Opens a pool. There must be none.
    pub(super) fn open(&mut self, key: TierKey, pool: Pool) {
        self.tier = Some(Tier::new(key, pool));
    }

    /// Closes the pool: forgets its blocks, whose holders have been removed. Returns false if no pool serves.
    fn close(&mut self) -> bool {
        let Some(tier) = self.tier.as_mut().filter(|tier| !tier.closing) else {
            return false;
        };
        tier.closing = true;
        tier.pool.reset();
        true
    }

    /// Drops a closed pool, whose copies have ended. Returns whether there was one.
    fn drop_closed(&mut self) -> bool {
        let Some(tier) = self.tier.take_if(|tier| tier.closing) else {
            return false;
        };
        self.closed = self.closed.with(tier.pool.counts());
        true
    }

    /// True when a pool serves or closes.
    pub(super) fn is_some(&self) -> bool {
        self.tier.is_some()
    }

    /// The pool for requests; `None` while it closes.
    pub(super) fn serving(&self) -> Option<&Pool> {
        self.tier.as_ref().and_then(Tier::serving)
    }

    /// Like `serving`, but mutable.
    pub(super) fn serving_mut(&mut self) -> Option<&mut Pool> {
        self.tier.as_mut().and_then(Tier::serving_mut)
    }

    /// The key of the pool that serves.
    pub(super) fn key(&self) -> Option<&TierKey> {
        self.tier.as_ref().and_then(Tier::key)
    }

    /// The pool for the ends of copies, also while it closes.
    pub(super) fn pool(&self) -> Option<&Pool> {
        self.tier.as_ref().map(|tier| &tier.pool)
    }

    /// Like `pool`, but mutable.
    pub(super) fn pool_mut(&mut self) -> Option<&mut Pool> {
        self.tier.as_mut().map(|tier| &mut tier.pool)
    }

    /// A pool that has stopped serving and waits for the ends of its last copies.
    pub(super) fn closing(&self) -> Option<&Pool> {
        let tier = self.tier.as_ref().filter(|tier| tier.closing)?;
        Some(&tier.pool)
    }

    /// Counters of all pools since the start.
    pub(super) fn counts(&self) -> PoolCounts {
        let now = self.tier.as_ref().map(|tier| tier.pool.counts());
        self.closed.with(now.unwrap_or_default())
    }
}

impl Leader {
    /// The key of the pool that serves, or of the pool that is being recovered.
    pub(super) fn wanted_key(&self) -> Option<&TierKey> {
        self.tier.key().or(self.recovery.key())
    }

    /// Closes the pool and stops the reading whose key differs from what the workers have. Called after each change of
    /// the roster.
    pub(super) fn close_unfit_tier(&mut self) {
        let Some(key) = self.wanted_key() else {
            return;
        };
        if self.roster.have(key) {
            return;
        }
        self.recovery.stop(&mut self.timers);
        self.close_tier();
    }

    /// Closes the pool: releases all holds, forgets its blocks, and cancels its copies.
    fn close_tier(&mut self) {
        if self.tier.serving().is_none() {
            return;
        }
        for (engine, slot) in self.sessions.slot_ids() {
            self.drop_holds(engine, slot);
        }
        self.tier.close();
        self.transfers.cancel_all();
    }

    /// Drops a closed pool whose last copy has ended, and opens the next one.
    pub(super) fn reopen_tier(&mut self, now: Time, effects: &mut Vec<LeaderEffect>) {
        if self.transfers.is_empty() && self.tier.drop_closed() {
            self.open_pool(now, effects);
        }
    }

    /// The G2 pool that serves; `None` before every rank has attached and while a pool closes.
    pub fn pool(&self) -> Option<&Pool> {
        self.tier.serving()
    }

    /// A pool that has stopped serving and waits for the ends of its last copies.
    pub fn closing_pool(&self) -> Option<&Pool> {
        self.tier.closing()
    }

    /// The key of the pool that serves.
    pub fn tier_key(&self) -> Option<&TierKey> {
        self.tier.key()
    }

    /// True while inventories are being read.
    pub fn is_reading(&self) -> bool {
        self.recovery.key().is_some()
    }
}
