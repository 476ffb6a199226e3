//! The blocks of one tier: lookup, reservation, publication, pinning and eviction.
//!
//! Pages go free -> reserved -> filling -> ready -> free. Reserved and filling pages belong to their reservation, and
//! only that reservation frees them. Each reservation, also that of a growth, has one transfer that fills it. Pages become
//! ready when the *set* of shards whose part is not written yet is empty and none of them failed: with a set, a repeated
//! report counts once.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::admission::{Admitter, Offer};
use crate::anchor::Domain;
use crate::arena::Arena;
use crate::blocks::{BlockIndex, BlockRef, Blocks, Filling};
use crate::change::{Change, Changes};
use crate::eviction::{EvictionOrder, EvictionPolicy};
use crate::index::{Index, Match, MatchGoal};
use crate::page_index::PageIndex;
use crate::policy::TierPolicy;
use crate::pool_counts::{PageStates, PoolCounts};
use crate::prefetch::HeadPrefetcher;
use crate::shard_set::ShardSet;
use kvferry_types::{HashView, PageRun, Ratio, Shard, TransferId};

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

/// A hold on the first `pages` pages of a block. Not `Clone`: the holder releases the pin exactly once.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a pin that is dropped is never released"]
pub struct Pin {
    block: BlockRef,
    pages: u32,
}

impl Pin {
    /// The block that is held.
    pub(super) fn block(&self) -> BlockRef {
        self.block
    }
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
    pub(super) ratio: u32,
    policy: TierPolicy,
    admitter: Admitter,
    pub(super) arena: Arena,
    pub(super) blocks: Blocks,
    pub(super) index: Index,
    /// With the setting, the index of pages.
    pub(super) pages: Option<PageIndex>,
    pub(super) reservations: BTreeMap<TransferId, Reservation>,
    counts: PoolCounts,
    pins: u64,
    pub(super) changes: Changes,
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
            index: Index::default(),
            pages: None,
            reservations: BTreeMap::new(),
            counts: PoolCounts::default(),
            pins: 0,
            changes: Changes::default(),
        }
    }

    /// Largest number of pages in a block.
    pub(super) fn ratio(&self) -> u32 {
        self.ratio
    }

    /// The pool with another policy. Blocks that it already has are kept.
    #[must_use]
    pub fn with_policy(mut self, policy: TierPolicy) -> Self {
        let capacity = self.arena.capacity_pages();
        let order = EvictionOrder::new(policy.eviction, policy.quota_pages, capacity);
        self.blocks.set_order(order);
        self.admitter = Admitter::new(policy.admission.clone());
        self.policy = policy;
        self
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
    pub(super) fn extend_pins(&mut self, block: BlockIndex, pages: u32) {
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

    /// Reserves pages `position..end` of a sequence, which must not cross a multiple of the ratio. `tail` is the block
    /// that holds the page before `position`, if any: that block grows in place if possible. Evicts at most twice the
    /// pages that are requested, and splits a run over several holes as [`TierPolicy::pieces_max`] says. Appends the
    /// reservations in order and the evicted runs, and returns the number of pages that found room.
    #[expect(
        clippy::too_many_arguments,
        reason = "one call, one decision; a struct would only rename them"
    )]
    pub fn reserve(
        &mut self,
        domain: &Domain,
        hashes: HashView<'_>,
        position: u32,
        end: u32,
        tail: Option<Match>,
        next_id: &mut u64,
        reserved: &mut Vec<Reserved>,
        evicted: &mut Vec<PageRun>,
    ) -> u32 {
        let phase = position % self.ratio;
        let into = (next_id, reserved, evicted);
        self.reserve_in_cell(domain, hashes, position..end, phase, tail, into)
    }

    /// Like [`Self::reserve`]. `phase` is the place of the first page in its cell, the pages between two multiples of the
    /// ratio: a sequence of which the tail alone is named does not begin at a multiple.
    pub(super) fn reserve_in_cell(
        &mut self,
        domain: &Domain,
        hashes: HashView<'_>,
        Range {
            start: position,
            end,
        }: Range<u32>,
        phase: u32,
        tail: Option<Match>,
        (next_id, reserved, evicted): (&mut u64, &mut Vec<Reserved>, &mut Vec<PageRun>),
    ) -> u32 {
        let wanted = end - position;
        let pages = (position..end).map(|page| hashes.fingerprint(page as usize));
        let again = self.blocks.order_mut().recall(domain.id(), pages);
        if let Some(tail) = tail.filter(|_| phase > 0)
            && let Some(run) = self.grow(tail, hashes, position, wanted)
        {
            let transfer = next_transfer(next_id);
            self.fill(transfer, tail.block, wanted);
            self.index_pages(tail.block, tail.through()..tail.through() + wanted);
            self.blocks.order_mut().trim();
            self.counts.grown += 1;
            reserved.push(Reserved {
                transfer,
                position,
                run,
                kind: ReservationKind::Growth,
            });
            return wanted;
        }
        let leaves =
            tail.is_some_and(|tail| tail.through() < self.blocks.get(tail.block).total_pages());
        let mut at = position;
        for run in self.place(domain, hashes, position, wanted, evicted) {
            let transfer = next_transfer(next_id);
            let phase = phase + at - position;
            let block = self.open(transfer, domain, hashes, (at, phase), run);
            if again {
                self.blocks.note_use(block);
            }
            reserved.push(Reserved {
                transfer,
                position: at,
                run,
                kind: ReservationKind::New,
            });
            self.counts.stored += 1;
            self.counts.branched += u64::from(leaves && at == position);
            self.counts.split += u64::from(at != position);
            at += run.count;
        }
        self.blocks.order_mut().trim();
        if at < end {
            self.counts.refused += 1;
            self.counts.refused_pages += u64::from(end - at);
        }
        at - position
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
            self.arena.release(start, pages);
            self.blocks.remove_pages(block, pages);
            if empty {
                self.remove_empty(block);
                return Some(false);
            }
        } else {
            held.ready += u16::try_from(pages).unwrap_or(0);
            self.note_stored(block);
        }
        self.blocks.update_order(block);
        self.free_if_unheld(block);
        Some(!failed)
    }

    /// Forgets every block, so that no lookup finds one. Pinned and filling pages are freed with their last holder.
    pub fn reset(&mut self) {
        let all: Vec<BlockIndex> = self.blocks.by_age().map(|(index, _)| index).collect();
        self.changes.add(|| Change::Cleared);
        for index in all {
            self.forget_block(index);
        }
    }

    /// Forgets a block. Its pages are freed with their last holder.
    pub(super) fn retire_block(&mut self, index: BlockIndex) {
        let ready = u32::from(self.blocks.get(index).ready);
        self.note_removed(index, 0, ready);
        self.forget_block(index);
    }

    fn forget_block(&mut self, index: BlockIndex) {
        let block = self.blocks.get(index);
        if !block.retired {
            self.unindex_pages(index, 0..block.total_pages());
            self.index.remove(&mut self.blocks, index);
            self.blocks.get_mut(index).retired = true;
        }
        self.free_if_unheld(index);
    }

    /// Counts the pages by state.
    pub fn page_states(&self) -> PageStates {
        let mut states = PageStates {
            free: self.arena.free_pages(),
            ..PageStates::default()
        };
        for reservation in self.reservations.values() {
            match reservation.stage {
                ReservationStage::Reserved => states.reserved += reservation.pages,
                ReservationStage::Filling => states.filling += reservation.pages,
                ReservationStage::Quarantined => states.quarantined += reservation.pages,
            }
        }
        let set_aside = states.free + states.reserved + states.filling + states.quarantined;
        states.ready = self.capacity_pages() - set_aside;
        states
    }

    /// Extends a block in place. Its own phase bounds its length: a sequence that was named from its middle on has other
    /// multiples of the ratio than the whole sequence.
    fn grow(
        &mut self,
        tail: Match,
        hashes: HashView<'_>,
        position: u32,
        wanted: u32,
    ) -> Option<PageRun> {
        let block = self.blocks.get(tail.block);
        let start = block.start + tail.through();
        let idle = block.total_pages() == tail.through() && block.filling().is_none();
        let short = u32::from(block.phase) + tail.through() + wanted <= self.ratio;
        let next_to_it = idle && short && self.arena.alloc_at(start, wanted);
        if !next_to_it {
            return None;
        }
        self.blocks
            .write_fingerprints(start, hashes, position as usize, wanted);
        Some(PageRun {
            start,
            count: wanted,
        })
    }

    /// Allocates pages for a run, evicting if necessary, and in several pieces if no hole is long enough.
    fn place(
        &mut self,
        domain: &Domain,
        hashes: HashView<'_>,
        position: u32,
        wanted: u32,
        evicted: &mut Vec<PageRun>,
    ) -> Vec<PageRun> {
        if self.index.is_full(
            &self.blocks,
            domain.anchor(hashes.fingerprint(position as usize)),
        ) {
            return Vec::new();
        }
        let mut taken = 0;
        let mut pieces = self.fit(domain, hashes, position, wanted);
        while pieces.is_empty() && taken < wanted {
            let namespace = domain.id().namespace();
            let own = self.blocks.order().over_quota(namespace, wanted);
            let victim = own.and_then(|own| self.blocks.oldest_evictable(Some(own)));
            let victim = victim.or_else(|| self.blocks.oldest_evictable(None));
            let Some(victim) = victim else {
                break;
            };
            let run = self.trim(victim, wanted);
            taken += run.count;
            evicted.push(run);
            pieces = self.fit(domain, hashes, position, wanted);
        }
        self.counts.largest_eviction_pages = self.counts.largest_eviction_pages.max(taken);
        match pieces.is_empty() {
            true => self.split(domain, hashes, position, wanted, u32::MAX),
            false => pieces,
        }
    }

    /// Allocates all pages of a run without an eviction: in one hole, or in as many of the largest holes as the policy
    /// allows. Returns nothing, and allocates nothing, if they have no room for the run.
    fn fit(
        &mut self,
        domain: &Domain,
        hashes: HashView<'_>,
        position: u32,
        wanted: u32,
    ) -> Vec<PageRun> {
        if let Some(start) = self.arena.alloc(wanted) {
            return vec![PageRun {
                start,
                count: wanted,
            }];
        }
        let pieces_max = self.policy.pieces_max;
        let room = self.arena.largest_hole().saturating_mul(pieces_max);
        if pieces_max < 2 || room.min(self.arena.free_pages()) < wanted {
            return Vec::new();
        }
        let pieces = self.split(domain, hashes, position, wanted, pieces_max);
        if pieces.iter().map(|piece| piece.count).sum::<u32>() == wanted {
            return pieces;
        }
        for piece in pieces {
            self.arena.release(piece.start, piece.count);
        }
        Vec::new()
    }

    /// Allocates pages for a run in at most `pieces_max` of the largest holes, as far as they reach.
    fn split(
        &mut self,
        domain: &Domain,
        hashes: HashView<'_>,
        position: u32,
        wanted: u32,
        pieces_max: u32,
    ) -> Vec<PageRun> {
        let mut pieces = Vec::new();
        let mut left = wanted;
        for _ in 0..pieces_max.min(wanted) {
            let count = left.min(self.arena.largest_hole());
            let at = position + wanted - left;
            let full = self
                .index
                .is_full(&self.blocks, domain.anchor(hashes.fingerprint(at as usize)));
            let Some(start) = (!full).then(|| self.arena.alloc(count)).flatten() else {
                break;
            };
            pieces.push(PageRun { start, count });
            left -= count;
            if left == 0 {
                break;
            }
        }
        pieces
    }

    /// Frees pages from the tail of a block: as many as form a hole of `wanted` pages together with the free pages
    /// after it.
    pub(super) fn trim(&mut self, index: BlockIndex, wanted: u32) -> PageRun {
        let block = self.blocks.get(index);
        let end = block.start + u32::from(block.ready);
        let behind = self.arena.hole_at(end);
        let count = wanted
            .saturating_sub(behind)
            .clamp(1, block.evictable_pages());
        let run = PageRun {
            start: end - count,
            count,
        };
        let first = run.start - block.start;
        self.note_removed(index, first, count);
        self.unindex_pages(index, first..first + count);
        self.blocks.note_evicted(index, run.start, count);
        self.blocks.remove_pages(index, count);
        self.arena.release(run.start, count);
        self.counts.evicted += 1;
        self.counts.evicted_pages += u64::from(count);
        let block = self.blocks.get_mut(index);
        block.ready -= u16::try_from(count).unwrap_or(block.ready);
        if block.ready == 0 {
            self.remove_empty(index);
        } else {
            self.blocks.update_order(index);
        }
        run
    }

    fn open(
        &mut self,
        transfer: TransferId,
        domain: &Domain,
        hashes: HashView<'_>,
        (position, phase): (u32, u32),
        run: PageRun,
    ) -> BlockIndex {
        self.blocks
            .write_fingerprints(run.start, hashes, position as usize, run.count);
        let anchor = domain.anchor(hashes.fingerprint(position as usize));
        let phase = u16::try_from(phase).unwrap_or(0);
        let filling = Filling {
            transfer,
            pages: run.count,
        };
        let block = self
            .blocks
            .insert(anchor, domain.id(), run.start, phase, filling);
        let room = self.index.insert(&mut self.blocks, block);
        debug_assert!(room, "place() asked the index first");
        self.fill(transfer, block, run.count);
        self.index_pages(block, 0..run.count);
        block
    }

    fn fill(&mut self, transfer: TransferId, block: BlockIndex, pages: u32) {
        self.blocks
            .get_mut(block)
            .set_filling(Some(Filling { transfer, pages }));
        self.blocks.add_pages(block, pages);
        self.blocks.update_order(block);
        let reservation = Reservation {
            block,
            pages,
            stage: ReservationStage::Reserved,
            missing: ShardSet::default(),
            failed: false,
        };
        self.reservations.insert(transfer, reservation);
    }

    /// Removes an empty block from the index and the slab.
    fn remove_empty(&mut self, index: BlockIndex) {
        if !self.blocks.get(index).retired {
            self.index.remove(&mut self.blocks, index);
        }
        self.blocks.remove(index);
    }

    /// Frees the pages of a retired block that have no holder, and removes the block when none of its pages are held.
    fn free_if_unheld(&mut self, index: BlockIndex) {
        let block = self.blocks.get(index);
        if !block.retired || block.filling().is_some() {
            return;
        }
        let block = self.blocks.get_mut(index);
        let kept = block.pinned_pages.min(block.ready);
        let (start, freed) = (block.start + u32::from(kept), u32::from(block.ready - kept));
        block.ready = kept;
        if freed > 0 {
            self.blocks.remove_pages(index, freed);
            self.arena.release(start, freed);
        }
        if kept == 0 {
            self.blocks.remove(index);
        } else {
            self.blocks.update_order(index);
        }
    }
}

fn next_transfer(next: &mut u64) -> TransferId {
    *next += 1;
    TransferId(*next)
}
