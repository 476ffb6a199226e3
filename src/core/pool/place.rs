//! Reservations: where the pages of a sequence are placed, and what is evicted for them.

use std::ops::Range;

use super::{Pool, Reservation, ReservationKind, ReservationStage, Reserved};
use crate::index::anchor::Domain;
use crate::index::block_index::Match;
use crate::index::blocks::{BlockIndex, Filling};
use crate::index::shard_set::ShardSet;
use crate::pool::changes::GoneReason;
use kvferry_types::{HashView, NamespaceId, PageRun, TransferId};

impl Pool {
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
    pub(crate) fn reserve_in_cell(
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
        let mut within = wanted;
        let mut pieces = self.fit(domain, hashes, position, wanted);
        while pieces.is_empty() && taken < within {
            let namespace = domain.id().namespace();
            let Some(victim) = self.victim(namespace, within) else {
                // A rule without blocks to evict gets as many pages of others as its limit leaves.
                match self.blocks.order().room_of_rule(namespace) {
                    Some(room) if (1..within).contains(&room) => within = room,
                    _ => break,
                }
                // So many places may be free without an eviction.
                pieces = self.fit(domain, hashes, position, within);
                continue;
            };
            let run = self.trim(victim, within);
            taken += run.count;
            evicted.push(run);
            pieces = self.fit(domain, hashes, position, within);
        }
        self.counts.largest_eviction_pages = self.counts.largest_eviction_pages.max(taken);
        match pieces.is_empty() {
            true => self.split(domain, hashes, position, wanted, u32::MAX),
            false => pieces,
        }
    }

    /// The block that loses the next pages for a run of this namespace: one of the namespace, if the run exceeds its limit;
    /// one of its rule, and of no other, if the run exceeds that limit; else one of a rule above its limit, before any
    /// other.
    fn victim(&mut self, namespace: NamespaceId, wanted: u32) -> Option<BlockIndex> {
        let [own, rule] = self.blocks.order().exceeded(namespace, wanted);
        let mut shares = Vec::from_iter(own.into_iter().chain(rule));
        if rule.is_none() {
            shares.append(&mut self.blocks.order().above());
        }
        let mut victims = shares
            .into_iter()
            .filter_map(|share| self.blocks.oldest_evictable(Some(share)));
        if let Some(victim) = victims.next() {
            return Some(victim);
        }
        match rule {
            Some(_) => None,
            None => self.blocks.oldest_evictable(None),
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
    pub(crate) fn trim(&mut self, index: BlockIndex, wanted: u32) -> PageRun {
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
        self.note_gone(index, first, count, GoneReason::Evicted);
        self.unindex_pages(index, first..first + count);
        self.blocks.note_evicted(index, run.start, count);
        self.blocks.remove_pages(index, count);
        self.release(run.start, count);
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
}

fn next_transfer(next: &mut u64) -> TransferId {
    *next += 1;
    TransferId(*next)
}
