//! The blocks of one tier: lookup, reservation, publication, pinning and eviction.
//!
//! Pages go free -> reserved -> filling -> ready -> free. Reserved and filling pages belong to their reservation, and
//! only that reservation frees them. Each reservation, also that of a growth, has one transfer that fills it. Pages become
//! ready when the *set* of shards whose part is not written yet is empty and none of them failed: with a set, a repeated
//! report counts once.

pub(crate) mod admission;
mod change_recorder;
pub(crate) mod changes;
mod check;
pub(crate) mod counts;
mod faults;
mod forget;
pub(crate) mod held;
mod page_lookup;
mod pins;
mod place;
pub(crate) mod policy;
pub(crate) mod policy_error;
pub(crate) mod recover;
pub(crate) mod store_window;
pub(crate) mod sweep;
pub(crate) mod tier_walk;
pub(crate) mod view;

use std::collections::BTreeMap;
use std::ops::Range;

use crate::eviction::{EvictionOrder, EvictionPolicy, RuleLimits};
use crate::index::anchor::Domain;
use crate::index::arena::Arena;
use crate::index::block_index::{Index, Match, MatchGoal};
use crate::index::blocks::{BlockIndex, Blocks, Filling};
use crate::index::page_index::PageIndex;
use crate::index::prefetch::HeadPrefetcher;
use crate::index::shard_set::ShardSet;
use crate::pool::admission::{Admitter, Offer};
use crate::pool::changes::Changes;
use crate::pool::counts::{PageStates, PoolCounts};
use crate::pool::policy::TierPolicy;
use kvferry_types::{HashView, PageRun, Ratio, RuleId, Shard, TransferId};

pub use pins::Pin;

/// The target of a reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReservationKind {
    /// A new block.
    New,
    /// Pages after the last page of an existing block.
    Growth,
}

/// The stage of a reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReservationStage {
    /// No copy has been ordered yet.
    Reserved,
    /// Copies may be writing the pages.
    Filling,
    /// The deadline has passed and copies may still be writing. The pages stay allocated until the copy of every
    /// shard has ended.
    Quarantined,
}

/// Pages reserved for one copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reserved {
    /// The transfer that fills the pages.
    pub transfer: TransferId,
    /// Position of the first page in the sequence.
    pub position: u32,
    /// The arena pages.
    pub run: PageRun,
    /// A new block or a growth.
    pub kind: ReservationKind,
}

#[derive(Debug)]
pub(super) struct Reservation {
    pub(super) block: BlockIndex,
    pub(super) pages: u32,
    stage: ReservationStage,
    /// Shards whose part of the pages has not been written yet.
    missing: ShardSet,
    failed: bool,
}

/// Consecutive pages of a sequence that lie in one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRun {
    /// Position of the run's first page in the sequence.
    pub position: u32,
    /// The block that holds the run.
    pub block: BlockIndex,
    /// Pages of the block before the run.
    pub offset: u32,
    /// Number of readable pages.
    pub pages: u32,
}

impl BlockRun {
    /// The readable pages that were found at a position.
    pub(super) fn readable(position: u32, found: Match) -> Self {
        Self {
            position,
            block: found.block,
            offset: found.offset,
            pages: found.ready,
        }
    }

    /// Pages of the block up to the last page of the run: what a pin of the run holds.
    pub fn through(&self) -> u32 {
        self.offset + self.pages
    }
}

/// How far a walk got.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PrefixMatch {
    /// Position after the last page that was found.
    pub end: u32,
    /// The page at `end` is reserved or filling: a later retry may find more.
    pub pending: bool,
}

/// The blocks of one tier.
#[derive(Debug)]
pub struct Pool {
    ratio: u32,
    policy: TierPolicy,
    admitter: Admitter,
    arena: Arena,
    blocks: Blocks,
    index: Index,
    /// With the setting, the index of pages.
    pages: Option<PageIndex>,
    reservations: BTreeMap<TransferId, Reservation>,
    counts: PoolCounts,
    pins: u64,
    changes: Changes,
    faults: faults::FaultyPlaces,
}

impl Pool {
    /// An empty pool of `capacity_pages`.
    pub fn new(capacity_pages: u32, ratio: Ratio) -> Self {
        Self {
            ratio: ratio.pages(),
            policy: TierPolicy::default(),
            admitter: Admitter::default(),
            arena: Arena::new(capacity_pages),
            blocks: Blocks::new(),
            index: Index::new(capacity_pages),
            pages: None,
            reservations: BTreeMap::new(),
            counts: PoolCounts::default(),
            pins: 0,
            changes: Changes::default(),
            faults: faults::FaultyPlaces::default(),
        }
    }

    /// Largest number of pages in a block.
    pub(super) fn ratio(&self) -> u32 {
        self.ratio
    }

    pub(super) fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    #[cfg(test)]
    pub(super) fn arena(&self) -> &Arena {
        &self.arena
    }

    #[cfg(test)]
    pub(super) fn parts_mut(&mut self) -> (&mut Blocks, &mut Option<PageIndex>) {
        (&mut self.blocks, &mut self.pages)
    }

    /// The pool with another policy, and with limits on the stored pages of rules. Blocks that it already has are kept.
    #[must_use]
    pub fn with_policy(mut self, policy: TierPolicy, rules: RuleLimits) -> Self {
        let capacity = self.arena.capacity_pages();
        let order = EvictionOrder::new(policy.eviction, policy.quota_pages, rules, capacity);
        self.blocks.set_order(order);
        self.admitter = Admitter::new(policy.admission.clone());
        self.policy = policy;
        self
    }

    /// Pages of the namespaces of a rule that has a limit in this tier; 0 without one.
    pub(super) fn pages_of_rule(&self, rule: RuleId) -> u32 {
        self.blocks.order().pages_of_rule(rule)
    }

    /// True if the policy admits every page.
    pub(super) fn admits_all(&self) -> bool {
        self.admitter.admits_all()
    }

    /// Offers a page that a store misses to the tier, once for each store. Returns whether the tier admits it.
    pub(super) fn admits(
        &mut self,
        domain: &Domain,
        hashes: HashView<'_>,
        position: u32,
        offer: Offer,
    ) -> bool {
        let admitted = self.admits_all() || {
            let page = domain.anchor(hashes.fingerprint(position as usize));
            self.admitter.admits(page, offer)
        };
        self.counts.unadmitted_pages += u64::from(!admitted);
        admitted
    }

    /// Of the pages that were admitted last, `pages` found no room: their budget is given back.
    pub(super) fn settle_admission(&mut self, pages: u32, offer: Offer) {
        self.admitter.settle(pages, offer);
    }

    /// Counts pages that were not tried, because pages before them found no room.
    pub(super) fn count_refused(&mut self, pages: u32) {
        self.counts.refused_pages += u64::from(pages);
    }

    /// Counters since the pool was created.
    pub fn counts(&self) -> PoolCounts {
        self.counts
    }

    /// Pins held now.
    pub fn pins(&self) -> u64 {
        self.pins
    }

    /// Blocks in the slab, including retired ones that still have a holder.
    pub fn live_blocks(&self) -> u32 {
        self.blocks.len()
    }

    /// Total pages of the arena.
    pub fn capacity_pages(&self) -> u32 {
        self.arena.capacity_pages()
    }

    /// The longest run of `hashes` from `position` on in one block: of the blocks that begin there, or, with an index of
    /// pages, of those that have that page inside.
    pub fn longest(
        &self,
        domain: &Domain,
        hashes: HashView<'_>,
        position: usize,
        want: MatchGoal,
    ) -> Option<Match> {
        let beginning = self.longest_beginning(domain, hashes, position, want);
        self.or_inside(beginning, domain, hashes, position, want)
    }

    /// Like [`Self::longest`], of the blocks that begin at `position`.
    pub(super) fn longest_beginning(
        &self,
        domain: &Domain,
        hashes: HashView<'_>,
        position: usize,
        want: MatchGoal,
    ) -> Option<Match> {
        let head = self
            .index
            .head(&self.blocks, domain.anchor(hashes.fingerprint(position)))?;
        self.longest_of(domain, head, hashes, position, want)
    }

    /// Like [`Self::longest`], of the blocks in the sibling list of `head`.
    pub(super) fn longest_of(
        &self,
        domain: &Domain,
        head: BlockIndex,
        hashes: HashView<'_>,
        position: usize,
        want: MatchGoal,
    ) -> Option<Match> {
        Index::longest(&self.blocks, domain.id(), head, hashes, position, want)
    }

    /// A prefetcher of the index heads of a sequence.
    pub(super) fn prefetcher<'a>(
        &'a self,
        domain: &'a Domain,
        hashes: HashView<'a>,
    ) -> HeadPrefetcher<'a> {
        HeadPrefetcher::new((&self.index, &self.blocks), self.ratio, domain, hashes)
    }

    /// Makes the runs the most recently used ones, last run first, so that the root of a sequence outlives its tail.
    pub fn touch(&mut self, runs: &[BlockRun]) {
        for run in runs.iter().rev() {
            self.blocks.touch(run.block);
        }
    }

    /// Counts a use of the runs, and makes them the most recently used ones.
    pub fn use_runs(&mut self, runs: &[BlockRun]) {
        for run in runs {
            self.blocks.note_use(run.block);
        }
        self.touch(runs);
    }

    /// True if a hole has room for `pages`, so that they are placed without an eviction.
    pub(super) fn has_hole(&self, pages: u32) -> bool {
        self.arena.largest_hole() >= pages
    }

    /// Counts a use of a block.
    pub(super) fn note_use(&mut self, block: BlockIndex) {
        self.blocks.note_use(block);
    }

    /// Sets the priority of the blocks of those runs that hold some of these pages.
    pub(super) fn set_priorities(&mut self, runs: &[BlockRun], pages: &Range<u32>, priority: u8) {
        if self.policy.eviction != EvictionPolicy::Priority {
            return;
        }
        let named =
            |run: &&BlockRun| run.position < pages.end && run.position + run.pages > pages.start;
        for run in runs.iter().filter(named) {
            self.set_priority(run.block, priority);
        }
    }

    /// Sets the priority of a block, for eviction by priority: blocks with the lowest one are evicted first.
    pub fn set_priority(&mut self, block: BlockIndex, priority: u8) {
        self.blocks.set_priority(block, priority);
    }

    /// The arena page of page `position` of the sequence. `run` must contain that page.
    pub fn arena_page(&self, run: &BlockRun, position: u32) -> u32 {
        self.blocks.get(run.block).start + run.offset + (position - run.position)
    }

    /// The reservation above the watermark of a block, if there is one.
    pub fn filling_of(&self, block: BlockIndex) -> Option<Filling> {
        self.blocks.get(block).filling()
    }

    /// Notes that copies into the pages of `transfer` were ordered, one for each of these shards.
    pub fn start_filling(&mut self, transfer: TransferId, shards: ShardSet) {
        if let Some(reservation) = self.reservations.get_mut(&transfer) {
            reservation.stage = ReservationStage::Filling;
            reservation.missing = shards;
        }
    }

    /// Notes that the deadline of `transfer` has passed.
    pub fn quarantine(&mut self, transfer: TransferId) {
        if let Some(reservation) = self.reservations.get_mut(&transfer) {
            reservation.stage = ReservationStage::Quarantined;
        }
    }

    /// Notes that the copy of one shard into the pages of `transfer` ended. After the last shard returns `Some(true)` if the
    /// pages became ready, and `Some(false)` if they were freed because a copy failed or was late or the block was
    /// forgotten meanwhile. An unknown transfer and a repeated report have no effect.
    pub fn ended(&mut self, transfer: TransferId, shard: Shard, complete: bool) -> Option<bool> {
        let reservation = self.reservations.get_mut(&transfer)?;
        if !reservation.missing.remove(shard) {
            return None;
        }
        reservation.failed |= !complete;
        if !reservation.missing.is_empty() {
            return None;
        }
        let (block, pages) = (reservation.block, reservation.pages);
        let late = reservation.stage == ReservationStage::Quarantined;
        let failed = reservation.failed || late || self.blocks.get(block).retired;
        self.reservations.remove(&transfer);
        let held = self.blocks.get_mut(block);
        held.set_filling(None);
        if failed {
            let ready = u32::from(held.ready);
            let (start, empty) = (held.start + ready, ready == 0);
            self.unindex_pages(block, ready..ready + pages);
            self.release(start, pages);
            self.blocks.remove_pages(block, pages);
            if empty {
                self.remove_empty(block);
                return Some(false);
            }
        } else {
            let first = u32::from(held.ready);
            held.ready += u16::try_from(pages).unwrap_or(0);
            self.note_stored(block, first, pages);
        }
        self.blocks.update_order(block);
        self.free_if_unheld(block);
        Some(!failed)
    }

    /// Counts the pages by state.
    pub fn page_states(&self) -> PageStates {
        let mut states = PageStates {
            free: self.arena.free_pages(),
            out_of_use: self.pages_out(),
            ..PageStates::default()
        };
        for reservation in self.reservations.values() {
            match reservation.stage {
                ReservationStage::Reserved => states.reserved += reservation.pages,
                ReservationStage::Filling => states.filling += reservation.pages,
                ReservationStage::Quarantined => states.quarantined += reservation.pages,
            }
        }
        let PageStates {
            free,
            reserved,
            filling,
            quarantined,
            out_of_use,
            ready: _,
        } = states;
        states.ready = self.capacity_pages() - free - reserved - filling - quarantined - out_of_use;
        states
    }
}

#[cfg(test)]
pub(crate) mod tests;
