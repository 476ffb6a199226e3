//! The tiers: which pages the pool of a tier is for, when it opens, and when it closes.
//!
//! A pool identifies pages by number. Which bytes a number means depends on the page size, the layout and the depot of
//! each shard. The pool carries these as its [`TierKey`], and closes as soon as the workers have another key. A closing
//! pool serves no page and holds none; its copies are cancelled and awaited, because they still read and write at the
//! old offsets. Then the pool is dropped, and the inventories are read for the new key.

use std::collections::BTreeMap;

use crate::Contradiction;
use crate::group::model::Model;
use crate::index::blocks::BlockIndex;
use crate::leader::event::LeaderEffect;
use crate::pool::counts::PoolCounts;
use crate::pool::recover::Recovery;
use crate::pool::tier_walk::TierRun;
use crate::pool::{Pin, Pool};
use kvferry_types::{DepotId, GroupId, PerTier, TierId, TierLayout, Time, WorkerId};
use smallvec::SmallVec;

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
    /// The pages that the key describes.
    pub(super) fn layout(&self) -> TierLayout {
        TierLayout {
            page_bytes: self.page_bytes,
            layout_fingerprint: self.layout_fingerprint,
        }
    }

    /// True when the pages of this model are those that the key describes.
    pub(super) fn is_for(&self, model: &Model) -> bool {
        self.layout() == model.tier_layout()
    }
}

/// How far one shard's inventory was read.
#[derive(Debug, Default)]
pub(super) struct ShardReading {
    /// The worker that received the request for the next part.
    pub(super) requested_from: Option<WorkerId>,
    /// The arena page at which that part begins; `None` when the inventory is read completely.
    pub(super) from: Option<u32>,
}

/// The inventories of all shards of a tier.
#[derive(Debug)]
pub(super) struct Reading {
    /// The key of the pool that will open. Noted when the reading begins, because engines may leave before it ends.
    pub(super) key: TierKey,
    /// Answers to requests up to this number do not belong to this reading: the pages that they list may have been
    /// removed since.
    pub(super) after: u64,
    pub(super) shards: Vec<ShardReading>,
    /// What was read of them.
    pub(super) recovery: Recovery,
    /// When missing parts are requested again.
    pub(super) again: Time,
}

/// The inventory requests for one depot that a worker has not answered.
#[derive(Debug, Clone, Copy)]
pub(super) struct UnansweredRead {
    pub(super) depot: DepotId,
    /// Number of the last request. A worker carries out no request after a later one, of whatever tier, so its answer
    /// settles all of them.
    pub(super) number: u64,
    /// When the worker is checked next, every quarter of the fence time.
    pub(super) due: Time,
    /// Checks since the worker's first open request, or since its last answer.
    pub(super) checks: u32,
}

/// The stage of a tier.
#[derive(Debug, Default)]
pub(super) enum TierState {
    /// There is no pool.
    #[default]
    Shut,
    /// The inventories are read, and a pool opens with the last part of them.
    Reading(Reading),
    /// The pool serves.
    Open {
        /// The pages that the pool is for.
        key: TierKey,
        pool: Pool,
    },
    /// The pool has stopped serving and waits for the ends of its last copies.
    Closing(Pool),
}

/// One tier below the device. See the module.
#[derive(Debug, Default)]
pub(super) struct Tier {
    pub(super) state: TierState,
    /// Inventory requests that were not answered, including those of readings that were stopped.
    pub(super) unanswered: BTreeMap<WorkerId, UnansweredRead>,
    /// Counters of the pools that were closed.
    closed: PoolCounts,
}

impl Tier {
    /// Opens a pool. There must be none.
    pub(super) fn open(&mut self, key: TierKey, pool: Pool) {
        self.state = TierState::Open { key, pool };
    }

    /// Closes the pool: forgets its blocks, whose holders have been removed.
    fn close(&mut self) {
        self.state = match std::mem::take(&mut self.state) {
            TierState::Open { mut pool, .. } => {
                pool.reset();
                TierState::Closing(pool)
            }
            state => state,
        };
    }

    /// Drops a closed pool, whose copies have ended.
    fn drop_closed(&mut self) {
        if let TierState::Closing(pool) = &self.state {
            self.closed = self.closed.with(pool.counts());
            self.state = TierState::Shut;
        }
    }

    /// The pool for requests; `None` while it closes.
    fn serving(&self) -> Option<&Pool> {
        match &self.state {
            TierState::Open { pool, .. } => Some(pool),
            _ => None,
        }
    }

    /// Like `serving`, but mutable.
    fn serving_mut(&mut self) -> Option<&mut Pool> {
        match &mut self.state {
            TierState::Open { pool, .. } => Some(pool),
            _ => None,
        }
    }

    /// The pool for the ends of copies, also while it closes.
    fn pool(&self) -> Option<&Pool> {
        match &self.state {
            TierState::Open { pool, .. } | TierState::Closing(pool) => Some(pool),
            _ => None,
        }
    }

    /// Like `pool`, but mutable.
    fn pool_mut(&mut self) -> Option<&mut Pool> {
        match &mut self.state {
            TierState::Open { pool, .. } | TierState::Closing(pool) => Some(pool),
            _ => None,
        }
    }

    fn closing(&self) -> Option<&Pool> {
        match &self.state {
            TierState::Closing(pool) => Some(pool),
            _ => None,
        }
    }

    /// The key of the pool that serves.
    fn key(&self) -> Option<&TierKey> {
        match &self.state {
            TierState::Open { key, .. } => Some(key),
            _ => None,
        }
    }

    /// The key of the pool that serves, or of the pool that is being recovered.
    fn wanted_key(&self) -> Option<&TierKey> {
        self.key().or(self.reading().map(|reading| &reading.key))
    }

    /// True if no pool serves or closes, and none is being recovered.
    pub(super) fn is_shut(&self) -> bool {
        matches!(self.state, TierState::Shut)
    }
}

/// The tiers of the settings.
#[derive(Debug)]
pub(super) struct Tiers(PerTier<Tier>);

impl Tiers {
    pub(super) fn new(tiers: impl IntoIterator<Item = TierId>) -> Self {
        let tiers = tiers.into_iter().map(|tier| (tier, Tier::default()));
        Self(tiers.collect())
    }

    /// The tiers, fastest first.
    pub(super) fn ids(&self) -> Vec<TierId> {
        self.0.tiers().collect()
    }

    pub(super) fn get_mut(&mut self, tier: TierId) -> Option<&mut Tier> {
        self.0.get_mut(tier)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (TierId, &Tier)> {
        self.0.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (TierId, &mut Tier)> {
        self.0.iter_mut()
    }

    /// The pool of a tier for requests; `None` while it closes.
    pub(super) fn serving(&self, tier: TierId) -> Option<&Pool> {
        self.0.get(tier).and_then(Tier::serving)
    }

    /// Like `serving`, but mutable.
    pub(super) fn serving_mut(&mut self, tier: TierId) -> Option<&mut Pool> {
        self.0.get_mut(tier).and_then(Tier::serving_mut)
    }

    /// The pools for requests.
    pub(super) fn all_serving(&mut self) -> impl Iterator<Item = (TierId, &mut Pool)> {
        let tiers = self.iter_mut();
        tiers.filter_map(|(id, tier)| Some((id, tier.serving_mut()?)))
    }

    /// The pools, also those that close, slowest first.
    pub(super) fn slowest_first(&mut self) -> impl Iterator<Item = (TierId, &mut Pool)> {
        let mut pools: SmallVec<[(TierId, &mut Pool); 3]> = self
            .iter_mut()
            .filter_map(|(id, tier)| Some((id, tier.pool_mut()?)))
            .collect();
        pools.reverse();
        pools.into_iter()
    }

    /// The key of the pool of a tier that serves.
    pub(super) fn key(&self, tier: TierId) -> Option<&TierKey> {
        self.0.get(tier).and_then(Tier::key)
    }

    /// The pool of a tier for the ends of copies, also while it closes.
    pub(super) fn pool_mut(&mut self, tier: TierId) -> Option<&mut Pool> {
        self.0.get_mut(tier).and_then(Tier::pool_mut)
    }

    /// Releases a pin on a block of a tier. A tier has its pool for as long as that pool has pins or copies.
    pub(super) fn unpin(&mut self, tier: TierId, pin: Pin) {
        if let Some(pool) = self.pool_mut(tier) {
            pool.unpin(pin);
        }
    }

    /// The tiers that serve, fastest first.
    pub(super) fn serving_pools(&self) -> SmallVec<[(TierId, &Pool); 3]> {
        let pools = self
            .iter()
            .filter_map(|(id, tier)| Some((id, tier.serving()?)));
        pools.collect()
    }

    /// Counts a use of these runs, and makes their blocks the most recently used ones, the last run first. A block that a
    /// faster tier interrupts is used once.
    pub(super) fn use_runs(&mut self, runs: &[(GroupId, TierRun)]) {
        let mut last: PerTier<BlockIndex> = PerTier::default();
        for (_, TierRun { tier, run }) in runs {
            let before = last.insert(*tier, run.block);
            if let Some(pool) = self
                .serving_mut(*tier)
                .filter(|_| before != Some(run.block))
            {
                pool.note_use(run.block);
            }
        }
        for (_, TierRun { tier, run }) in runs.iter().rev() {
            if let Some(pool) = self.serving_mut(*tier) {
                pool.touch(std::slice::from_ref(run));
            }
        }
    }

    /// The pools, also those that close.
    pub(super) fn pools(&self) -> impl Iterator<Item = (TierId, &Pool)> {
        self.iter()
            .filter_map(|(id, tier)| Some((id, tier.pool()?)))
    }

    /// The key of a pool that serves, or that is being recovered. All of them are for pages of one geometry.
    pub(super) fn wanted_key(&self) -> Option<&TierKey> {
        self.iter().find_map(|(_, tier)| tier.wanted_key())
    }

    /// True while a pool closes.
    pub(super) fn any_closes(&self) -> bool {
        self.iter().any(|(_, tier)| tier.closing().is_some())
    }

    /// Counters of all pools of a tier since the start.
    pub(super) fn counts(&self, tier: TierId) -> PoolCounts {
        let Some(tier) = self.0.get(tier) else {
            return PoolCounts::default();
        };
        let now = tier.pool().map(Pool::counts);
        tier.closed.with(now.unwrap_or_default())
    }

    /// Recounts what each pool counts. `Err` names the first contradiction.
    pub(super) fn check(&self) -> Result<(), Contradiction> {
        self.iter().try_for_each(|(_, tier)| tier.check_reads())?;
        self.pools().try_for_each(|(_, pool)| pool.check())
    }
}

impl Leader {
    /// Closes the pools and stops the readings whose key differs from what the workers have. Called after each change of
    /// the roster.
    pub(super) fn close_unfit_tiers(&mut self) {
        for tier in self.tiers.ids() {
            let key = self.tiers.0.get(tier).and_then(Tier::wanted_key);
            if key.is_none_or(|key| self.roster.have(tier, key)) {
                continue;
            }
            self.stop_reading(tier);
            self.close_tier(tier);
        }
    }

    /// Closes a pool: releases all holds, forgets its blocks, and cancels the transfers that touch it.
    pub(super) fn close_tier(&mut self, tier: TierId) {
        if self.tiers.serving(tier).is_none() {
            return;
        }
        for (engine, slot) in self.sessions.slot_ids() {
            self.drop_holds(engine, slot);
            let session = self.sessions.get_mut(engine);
            if let Some(slot) = session.and_then(|session| session.any_slot(slot)) {
                slot.clear_trails();
            }
        }
        if let Some(closes) = self.tiers.get_mut(tier) {
            closes.close();
        }
        self.transfers.cancel_tier(tier);
        self.counts.moves_gone += self.moves.forget(tier);
    }

    /// Drops closed pools whose last transfers have ended, and opens the next ones. A load that waits for other pages may
    /// still hold pages of a closed pool.
    pub(super) fn reopen_tiers(&mut self, now: Time, effects: &mut Vec<LeaderEffect>) {
        let mut dropped = false;
        for (id, tier) in self.tiers.iter_mut() {
            let unheld = tier.closing().is_some_and(|pool| pool.pins() == 0);
            if unheld && !self.transfers.touch(id) {
                tier.drop_closed();
                dropped = true;
            }
        }
        if dropped {
            self.open_pools(now, effects);
        }
    }

    /// The pool of host memory that serves; `None` before every rank has attached and while a pool closes.
    pub fn pool(&self) -> Option<&Pool> {
        self.pool_of(TierId::Host)
    }

    /// The pool of a tier that serves.
    pub fn pool_of(&self, tier: TierId) -> Option<&Pool> {
        self.tiers.serving(tier)
    }

    /// A pool that has stopped serving and waits for the ends of its last copies.
    pub fn closing_pool(&self, tier: TierId) -> Option<&Pool> {
        self.tiers.0.get(tier).and_then(Tier::closing)
    }

    /// The key of the pool of a tier that serves.
    pub fn tier_key(&self, tier: TierId) -> Option<&TierKey> {
        self.tiers.key(tier)
    }

    /// True while inventories of a tier are being read.
    pub fn is_reading(&self, tier: TierId) -> bool {
        let tier = self.tiers.0.get(tier);
        tier.is_some_and(|tier| tier.reading().is_some())
    }
}
