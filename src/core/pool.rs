//! One tier's blocks: found, reserved, filled, published, pinned, evicted.
//!
//! Pages go free -> reserved -> filling -> ready -> free. Reserved and filling pages belong to their reservation and are
//! freed only by it; every reservation, also every growth, has a generation of its own. Pages become ready when the *set*
//! of ranks that still owe an answer is empty and none failed: a set, so that a repeated answer counts once.

use std::collections::HashMap;

use crate::core::ahead::Ahead;
use crate::core::anchor::Domain;
use crate::core::arena::Arena;
use crate::core::blocks::{BlockIndex, BlockRef, Blocks, Filling};
use crate::core::index::{Index, Match, Want};
use crate::core::sabotage::{Bug, planted};
use crate::core::shards::RankSet;
use crate::types::{Fingerprint, Generation, PageHashes, PageRecord, PageRun, Rank, Ratio};

/// Blocks that one search for an evictable block looks at before it gives up: pinned blocks are young, so the oldest
/// ones are rarely pinned.
pub const EVICTION_SCAN_BLOCKS_MAX: usize = 4096;

/// What a reservation adds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A block of its own.
    New,
    /// Pages behind the last one of a block.
    Growth,
}

/// How far the pages of a reservation are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// No copy was asked for yet.
    Reserved,
    /// Copies may be writing.
    Filling,
    /// The deadline passed; copies may still be writing. The pages stay until every end is known.
    Quarantined,
}

/// Pages set aside for one copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reserved {
    /// Its own generation.
    pub generation: Generation,
    /// Position of the first page in the sequence.
    pub position: u32,
    /// The arena pages.
    pub run: PageRun,
    /// Block or growth.
    pub kind: Kind,
}

#[derive(Debug)]
pub(super) struct Reservation {
    pub(super) block: BlockIndex,
    pub(super) pages: u32,
    stage: Stage,
    missing: RankSet,
    failed: bool,
    /// Answers so far: kept for nothing but a planted bug.
    answers: u32,
}

/// A hold on the first `pages` pages of a block. Not `Clone`: whoever has it gives it back, once.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a pin that is dropped is never released"]
pub struct Pin {
    block: BlockRef,
    pages: u32,
}

/// A stretch of a sequence that lies in one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Position of the first page in the sequence.
    pub position: u32,
    /// Which block.
    pub block: BlockIndex,
    /// How many pages of it can be read.
    pub pages: u32,
}

/// How far a walk came.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reach {
    /// Position behind the last page that was found.
    pub end: u32,
    /// The page at `end` is on its way: asking again later may find more.
    pub pending: bool,
}

/// Counted since the start. Blocks, except where the name says pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolCounts {
    /// Blocks reserved for new runs.
    pub stored: u64,
    /// Growths reserved.
    pub grown: u64,
    /// New blocks that begin where a sequence leaves another one inside a block.
    pub branched: u64,
    /// Additional blocks because no hole was long enough.
    pub split: u64,
    /// Times that a block lost pages to eviction, wholly or at its tail.
    pub evicted: u64,
    /// Pages lost to eviction.
    pub evicted_pages: u64,
    /// Runs for which there was no room.
    pub refused: u64,
    /// Pages of those.
    pub refused_pages: u64,
    /// Most pages evicted for one allocation.
    pub largest_eviction_pages: u32,
}

impl PoolCounts {
    /// These and those of another pool.
    pub(super) fn with(self, other: Self) -> Self {
        Self {
            stored: self.stored + other.stored,
            grown: self.grown + other.grown,
            branched: self.branched + other.branched,
            split: self.split + other.split,
            evicted: self.evicted + other.evicted,
            evicted_pages: self.evicted_pages + other.evicted_pages,
            refused: self.refused + other.refused,
            refused_pages: self.refused_pages + other.refused_pages,
            largest_eviction_pages: self
                .largest_eviction_pages
                .max(other.largest_eviction_pages),
        }
    }
}

/// Pages by state. They add up to the capacity.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PageStates {
    /// In holes.
    pub free: u32,
    /// Set aside, no copy asked for.
    pub reserved: u32,
    /// Copies may be writing.
    pub filling: u32,
    /// Readable.
    pub ready: u32,
    /// Past the deadline, copies may still be writing.
    pub quarantined: u32,
}

impl PageStates {
    /// Each state with its name.
    pub fn by_name(self) -> [(&'static str, u32); 5] {
        let Self {
            free,
            reserved,
            filling,
            ready,
            quarantined,
        } = self;
        [
            ("free", free),
            ("reserved", reserved),
            ("filling", filling),
            ("ready", ready),
            ("quarantined", quarantined),
        ]
    }
}

/// The blocks of one tier.
#[derive(Debug)]
pub struct Pool {
    pub(super) ratio: u32,
    pub(super) arena: Arena,
    pub(super) blocks: Blocks,
    pub(super) index: Index,
    pub(super) reservations: HashMap<Generation, Reservation>,
    counts: PoolCounts,
    pins: u64,
}

impl Pool {
    /// An empty pool of `capacity_pages`.
    pub fn new(capacity_pages: u32, ratio: Ratio) -> Self {
        Self {
            ratio: ratio.pages(),
            arena: Arena::new(capacity_pages),
            blocks: Blocks::new(),
            index: Index::default(),
            reservations: HashMap::new(),
            counts: PoolCounts::default(),
            pins: 0,
        }
    }

    /// What happened since the start.
    pub fn counts(&self) -> PoolCounts {
        self.counts
    }

    /// Pins that are held now.
    pub fn pins(&self) -> u64 {
        self.pins
    }

    /// Blocks that live now.
    pub fn live_blocks(&self) -> u32 {
        self.blocks.len()
    }

    /// Pages in all.
    pub fn capacity_pages(&self) -> u32 {
        self.arena.capacity_pages()
    }

    /// The longest run at `position`.
    pub fn longest(
        &self,
        domain: &Domain,
        hashes: &PageHashes,
        position: usize,
        want: Want,
    ) -> Option<Match> {
        let head = self
            .index
            .head(&self.blocks, domain.anchor(hashes, position))?;
        Index::longest(&self.blocks, domain.id(), head, hashes, position, want)
    }

    /// Follows a sequence from its first page, run by run, and appends the runs that can be read. Pages below
    /// `covered` may be missing: whoever asks has them elsewhere.
    pub fn walk(
        &self,
        domain: &Domain,
        hashes: &PageHashes,
        covered: usize,
        runs: &mut Vec<Run>,
    ) -> Reach {
        let mut position = 0;
        let mut pending = false;
        let mut ahead = Ahead::new(self, domain, hashes);
        while position < hashes.len() {
            let found = ahead.head(position).and_then(|head| {
                let want = Want::Readable;
                Index::longest(&self.blocks, domain.id(), head, hashes, position, want)
            });
            let ready = found.map_or(0, |found| found.ready);
            if let Some(found) = found.filter(|_| ready > 0) {
                pending = found.pages > ready;
                runs.push(Run {
                    position: position as u32,
                    block: found.block,
                    pages: ready,
                });
                position += ready as usize;
            } else if position < covered {
                pending = false;
                position += 1;
            } else {
                pending = pending || found.is_some();
                break;
            }
        }
        Reach {
            end: position as u32,
            pending,
        }
    }

    /// Makes runs the newest ones, the last run first, so that the root of a sequence outlives its tail.
    pub fn touch(&mut self, runs: &[Run]) {
        for run in runs.iter().rev() {
            self.blocks.touch(run.block);
        }
    }

    /// Arena page of page `position` of the sequence, which lies in `run`.
    pub fn arena_page(&self, run: &Run, position: u32) -> u32 {
        self.blocks.get(run.block).start + (position - run.position)
    }

    /// Holds the first `pages` pages of a block.
    pub fn pin(&mut self, block: BlockIndex, pages: u32) -> Pin {
        self.pins += 1;
        let reference = self.blocks.reference(block);
        let held = self.blocks.get_mut(block);
        held.pins += 1;
        held.pinned_pages = held
            .pinned_pages
            .max(u16::try_from(pages).unwrap_or(u16::MAX));
        Pin {
            block: reference,
            pages,
        }
    }

    /// Gives a pin back.
    pub fn unpin(&mut self, pin: Pin) {
        self.pins -= 1;
        debug_assert!(
            self.blocks.find(pin.block).is_some(),
            "a pinned block lives"
        );
        let index = pin.block.index;
        let block = self.blocks.get_mut(index);
        block.pins -= 1;
        if block.pins == 0 {
            block.pinned_pages = 0;
            self.bury(index);
        }
    }

    /// Pages that a pin holds.
    pub fn pinned_pages(pin: &Pin) -> u32 {
        pin.pages
    }

    /// Sets pages `position..end` of a sequence aside. They must not cross a multiple of the ratio. `tail` is the block
    /// that holds the page before `position`, if any: it grows where it can. Evicts at most twice the pages that are
    /// asked for. Appends what was reserved, in order, and what was evicted; returns how many pages found room.
    #[expect(
        clippy::too_many_arguments,
        reason = "one call, one decision; a struct would only rename them"
    )]
    pub fn reserve(
        &mut self,
        domain: &Domain,
        hashes: &PageHashes,
        position: u32,
        end: u32,
        tail: Option<Match>,
        next_generation: &mut u64,
        reserved: &mut Vec<Reserved>,
        evicted: &mut Vec<PageRun>,
    ) -> u32 {
        let wanted = end - position;
        let aligned = position.is_multiple_of(self.ratio);
        if let Some(tail) = tail.filter(|_| !aligned)
            && let Some(run) = self.grow(tail, hashes, position, wanted)
        {
            let generation = fresh(next_generation);
            self.fill(generation, tail.block, wanted);
            self.counts.grown += 1;
            reserved.push(Reserved {
                generation,
                position,
                run,
                kind: Kind::Growth,
            });
            return wanted;
        }
        let leaves =
            tail.is_some_and(|tail| tail.pages < self.blocks.get(tail.block).total_pages());
        let mut at = position;
        for run in self.place(domain, hashes, position, wanted, evicted) {
            let generation = fresh(next_generation);
            self.open(generation, domain, hashes, at, run);
            reserved.push(Reserved {
                generation,
                position: at,
                run,
                kind: Kind::New,
            });
            self.counts.stored += 1;
            self.counts.branched += u64::from(leaves && at == position);
            self.counts.split += u64::from(at != position);
            at += run.count;
        }
        if at < end {
            self.counts.refused += 1;
            self.counts.refused_pages += u64::from(end - at);
        }
        at - position
    }

    /// What fills behind the watermark of a block.
    pub fn filling_of(&self, block: BlockIndex) -> Option<Filling> {
        self.blocks.get(block).filling
    }

    /// Copies into the pages of `generation` were asked for, of these ranks.
    pub fn start_filling(&mut self, generation: Generation, ranks: RankSet) {
        if let Some(reservation) = self.reservations.get_mut(&generation) {
            reservation.stage = Stage::Filling;
            reservation.missing = ranks;
        }
    }

    /// The deadline of `generation` passed.
    pub fn quarantine(&mut self, generation: Generation) {
        if let Some(reservation) = self.reservations.get_mut(&generation) {
            reservation.stage = Stage::Quarantined;
        }
    }

    /// One rank's copy into the pages of `generation` ended. Once all have: `Some(true)` when the pages became ready,
    /// `Some(false)` when they were freed: a copy failed or was late, or the block was forgotten meanwhile. An unknown
    /// generation and a repeated answer have no effect.
    pub fn ended(&mut self, generation: Generation, rank: Rank, whole: bool) -> Option<bool> {
        let reservation = self.reservations.get_mut(&generation)?;
        let owed = reservation.missing.len() + reservation.answers;
        let news = reservation.missing.remove(rank);
        if !news && !planted(Bug::CountAcks) {
            return None;
        }
        reservation.answers += 1;
        reservation.failed |= !whole && !planted(Bug::PublishOnFailure);
        if planted(Bug::FreeTwice) && !whole && !reservation.missing.is_empty() {
            let (block, pages) = (reservation.block, reservation.pages);
            let held = self.blocks.get(block);
            self.arena
                .release(held.start + u32::from(held.ready), pages);
            return None;
        }
        let all = match planted(Bug::CountAcks) {
            true => reservation.answers >= owed,
            false => reservation.missing.is_empty(),
        };
        if !all {
            return None;
        }
        let (block, pages) = (reservation.block, reservation.pages);
        let late = reservation.stage == Stage::Quarantined && !planted(Bug::PublishLate);
        let failed = reservation.failed || late || self.blocks.get(block).retired;
        self.reservations.remove(&generation);
        let held = self.blocks.get_mut(block);
        held.filling = None;
        if failed {
            let start = held.start + u32::from(held.ready);
            let empty = held.ready == 0;
            if !planted(Bug::LeakOnAbort) {
                self.arena.release(start, pages);
            }
            if empty {
                self.forget(block);
                return Some(false);
            }
        } else {
            held.ready += u16::try_from(pages).unwrap_or(0);
        }
        self.bury(block);
        Some(!failed)
    }

    /// Adds a block that a depot was found to hold; its pages are allocated already.
    pub(super) fn adopt(
        &mut self,
        first: &PageRecord,
        pages: impl ExactSizeIterator<Item = Fingerprint>,
    ) {
        let count = u32::try_from(pages.len()).unwrap_or(0);
        self.blocks.set_fingerprints(first.page, pages);
        let filling = Filling {
            generation: Generation(0),
            pages: count,
        };
        let block =
            self.blocks
                .insert(first.anchor, first.domain, first.page, first.phase, filling);
        let held = self.blocks.get_mut(block);
        held.filling = None;
        held.ready = u16::try_from(count).unwrap_or(0);
        if !self.index.insert(&mut self.blocks, block) {
            self.blocks.remove(block);
            self.arena.release(first.page, count);
        }
    }

    /// Forgets every block: none is found any more. What is pinned or filling goes with its last holder.
    pub fn reset(&mut self) {
        let all: Vec<BlockIndex> = self.blocks.by_age().map(|(index, _)| index).collect();
        for index in all {
            self.retire_block(index);
        }
    }

    pub(super) fn retire_block(&mut self, index: BlockIndex) {
        if !self.blocks.get(index).retired {
            self.index.remove(&mut self.blocks, index);
            self.blocks.get_mut(index).retired = true;
        }
        self.bury(index);
    }

    /// Pages by state.
    pub fn page_states(&self) -> PageStates {
        let mut states = PageStates {
            free: self.arena.free_pages(),
            ..PageStates::default()
        };
        for reservation in self.reservations.values() {
            match reservation.stage {
                Stage::Reserved => states.reserved += reservation.pages,
                Stage::Filling => states.filling += reservation.pages,
                Stage::Quarantined => states.quarantined += reservation.pages,
            }
        }
        let set_aside = states.free + states.reserved + states.filling + states.quarantined;
        states.ready = self.capacity_pages() - set_aside;
        states
    }

    fn grow(
        &mut self,
        tail: Match,
        hashes: &PageHashes,
        position: u32,
        wanted: u32,
    ) -> Option<PageRun> {
        let block = self.blocks.get(tail.block);
        let start = block.start + tail.pages;
        let idle = block.total_pages() == tail.pages && block.filling.is_none();
        let next_to_it = (idle || planted(Bug::GrowTwice)) && self.arena.alloc_at(start, wanted);
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

    /// Finds room for a run, by eviction if need be; in several pieces when no hole is long enough.
    fn place(
        &mut self,
        domain: &Domain,
        hashes: &PageHashes,
        position: u32,
        wanted: u32,
        evicted: &mut Vec<PageRun>,
    ) -> Vec<PageRun> {
        if self
            .index
            .is_full(&self.blocks, domain.anchor(hashes, position as usize))
        {
            return Vec::new();
        }
        let mut taken = 0;
        let mut start = self.arena.alloc(wanted);
        while start.is_none() && taken < wanted {
            let Some(victim) = self.oldest_evictable() else {
                break;
            };
            let run = self.trim(victim, wanted);
            taken += run.count;
            evicted.push(run);
            start = self.arena.alloc(wanted);
        }
        self.counts.largest_eviction_pages = self.counts.largest_eviction_pages.max(taken);
        if let Some(start) = start {
            return vec![PageRun {
                start,
                count: wanted,
            }];
        }
        let mut pieces = Vec::new();
        let mut left = wanted;
        while left > 0 {
            let count = left.min(self.arena.largest_hole());
            let at = position + wanted - left;
            let full = self
                .index
                .is_full(&self.blocks, domain.anchor(hashes, at as usize));
            let Some(start) = (!full).then(|| self.arena.alloc(count)).flatten() else {
                break;
            };
            pieces.push(PageRun { start, count });
            left -= count;
        }
        pieces
    }

    fn oldest_evictable(&self) -> Option<BlockIndex> {
        self.blocks
            .by_age()
            .take(EVICTION_SCAN_BLOCKS_MAX)
            .find(|(_, block)| block.evictable_pages() > 0)
            .map(|(index, _)| index)
    }

    /// Frees pages from the tail of a block: as many as make a hole of `wanted` with the free pages behind it.
    fn trim(&mut self, index: BlockIndex, wanted: u32) -> PageRun {
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
        self.arena.release(run.start, count);
        self.counts.evicted += 1;
        self.counts.evicted_pages += u64::from(count);
        let block = self.blocks.get_mut(index);
        block.ready -= u16::try_from(count).unwrap_or(block.ready);
        if block.ready == 0 {
            self.forget(index);
        }
        run
    }

    fn open(
        &mut self,
        generation: Generation,
        domain: &Domain,
        hashes: &PageHashes,
        position: u32,
        run: PageRun,
    ) {
        self.blocks
            .write_fingerprints(run.start, hashes, position as usize, run.count);
        let anchor = domain.anchor(hashes, position as usize);
        let phase = u16::try_from(position % self.ratio).unwrap_or(0);
        let filling = Filling {
            generation,
            pages: run.count,
        };
        let block = self
            .blocks
            .insert(anchor, domain.id(), run.start, phase, filling);
        let room = self.index.insert(&mut self.blocks, block);
        debug_assert!(room, "place() asked the index first");
        self.fill(generation, block, run.count);
    }

    fn fill(&mut self, generation: Generation, block: BlockIndex, pages: u32) {
        self.blocks.get_mut(block).filling = Some(Filling { generation, pages });
        let reservation = Reservation {
            block,
            pages,
            stage: Stage::Reserved,
            missing: RankSet::default(),
            failed: false,
            answers: 0,
        };
        self.reservations.insert(generation, reservation);
    }

    /// Takes an empty block out of index and slab.
    fn forget(&mut self, index: BlockIndex) {
        if !self.blocks.get(index).retired {
            self.index.remove(&mut self.blocks, index);
        }
        self.blocks.remove(index);
    }

    /// Frees what nobody holds of a retired block, and the block with its last holder.
    fn bury(&mut self, index: BlockIndex) {
        let block = self.blocks.get_mut(index);
        if !block.retired || block.filling.is_some() {
            return;
        }
        let kept = block.pinned_pages.min(block.ready);
        let (start, freed) = (block.start + u32::from(kept), u32::from(block.ready - kept));
        block.ready = kept;
        if freed > 0 {
            self.arena.release(start, freed);
        }
        if kept == 0 {
            self.blocks.remove(index);
        }
    }
}

fn fresh(next: &mut u64) -> Generation {
    *next += 1;
    Generation(*next)
}
