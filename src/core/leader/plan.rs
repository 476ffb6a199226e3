//! Plans where the missing pages of a sequence are placed in a tier: for a store, a promotion or a write-through.

use std::ops::Range;

use crate::index::anchor::Domain;
use crate::index::block_index::{Match, MatchGoal};
use crate::index::cells::Cells;
use crate::index::sequence_cursor::Trail;
use crate::pool::admission::Offer;
use crate::pool::store_window::{Looks, LooksAround};
use crate::pool::{Pin, Pool, Reserved};
use kvferry_types::{HashView, PageRun, TransferId};

/// A transfer that fills wanted pages.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wait {
    pub(super) transfer: TransferId,
    /// Wanted pages that it fills.
    pub(super) pages: u32,
    /// True if this plan reserved them.
    pub(super) own: bool,
}

/// Where the missing pages of a sequence are placed, found by looking up the pages one after another.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) reserved: Vec<Reserved>,
    pub(super) evicted: Vec<PageRun>,
    /// The transfers that fill wanted pages: those of the reservations, and earlier ones.
    pub(super) waits: Vec<Wait>,
    pub(super) present_pages: u32,
    /// Runs of pages that found no room or were not admitted, in order.
    pub(super) refused: Vec<Range<u32>>,
    pub(super) looks: u32,
    /// How far the store has looked around its own pages, with this part.
    pub(super) around: LooksAround,
}

/// The part of a sequence for which [`plan`] finds places.
pub(super) struct PlanWalk<'a> {
    /// Where the walk begins.
    pub(super) from: u32,
    /// The pages that are placed if they are missing.
    pub(super) wanted: Range<u32>,
    /// The first blocks of the sequence, as an earlier walk found them.
    pub(super) trail: Option<&'a Trail>,
    /// Offers the missing pages to the admission of the pool; `None` admits every page.
    pub(super) offer: Option<Offer>,
    /// How far the store has looked around its own pages in earlier parts.
    pub(super) around: LooksAround,
}

/// Walks a sequence, looking up a bounded number of positions before `wanted`. Pages that are ready or filling are left
/// alone, missing pages in `wanted` are reserved. Ready pages that the walk passes are held until it ends, so that making
/// room for the tail does not evict the root; those before `wanted` once something may be evicted.
pub(super) fn plan(
    pool: &mut Pool,
    (domain, hashes): (&Domain, HashView<'_>),
    walk: PlanWalk<'_>,
    next_id: &mut u64,
) -> Plan {
    let ratio = pool.ratio();
    let PlanWalk {
        from,
        wanted,
        trail,
        offer,
        mut around,
    } = walk;
    let mut plan = Plan::default();
    let mut held: Vec<Pin> = Vec::new();
    let mut tail: Option<Match> = None;
    let mut looks = Looks::new(&wanted, ratio, &mut around);
    let mut before = before_own(pool, (domain, hashes), from, trail, &mut looks);
    // Blocks of the pages before do not reach into these, because no block crosses a multiple of the ratio. Where the
    // multiples are those of another sequence, an index of pages finds such a block from the middle on.
    let mut position = from.max(looks.own_start());
    let mut cells = Cells::new(ratio);
    let mut gate = AdmissionOnce {
        offer,
        verdict: None,
    };
    while position < wanted.end {
        let found = pool.longest(domain, hashes, position as usize, MatchGoal::Present);
        looks.note(position, found.is_some());
        if let Some(found) = found {
            if found.ready > 0 {
                held.push(pool.pin(found.block, found.ready_through()));
                if position >= wanted.start {
                    pool.note_use(found.block);
                }
            }
            plan.count_present(pool, found, position, &wanted);
            // Without an index of pages, sequences are named from their first page on.
            if pool.has_page_index() {
                cells.align(position, pool.phase_of(found));
            }
            position += found.pages;
            tail = Some(found);
        } else if position < wanted.start {
            position += 1;
            tail = None;
        } else if !gate.admits(pool, (domain, hashes), position) {
            plan.refuse(position..position + 1);
            position += 1;
            tail = None;
        } else {
            let phase = cells.phase(position);
            let limit = wanted.end.min(cells.next(position));
            let end = missing_until(pool, (domain, hashes), position, limit);
            let end = gate.admitted_until(pool, (domain, hashes), position, end);
            if !pool.has_hole(end - position) {
                let before = before.drain(..);
                held.extend(before.map(|found| pool.pin(found.block, found.ready_through())));
            }
            let known = plan.reserved.len();
            let into = (&mut *next_id, &mut plan.reserved, &mut plan.evicted);
            let room = pool.reserve_in_cell(domain, hashes, position..end, phase, tail, into);
            for reserved in &plan.reserved[known..] {
                let (transfer, pages) = (reserved.transfer, reserved.run.count);
                plan.waits.push(Wait {
                    transfer,
                    pages,
                    own: true,
                });
            }
            position += room;
            if let Some(offer) = offer {
                pool.settle_admission(end - position, offer);
            }
            if position < end {
                // The pages behind are not tried: without those before them they are of no use.
                pool.count_refused(wanted.end - end);
                plan.refuse(position..wanted.end);
                break;
            }
            tail = None;
        }
    }
    for pin in held {
        pool.unpin(pin);
    }
    plan.looks = looks.all;
    plan.around = around;
    plan
}

/// The readable runs from `from` on, up to the store's own pages, at a bounded number of positions. Other holders of their
/// blocks hold these pages from now on.
fn before_own(
    pool: &mut Pool,
    (domain, hashes): (&Domain, HashView<'_>),
    from: u32,
    trail: Option<&Trail>,
    looks: &mut Looks<'_>,
) -> Vec<Match> {
    let end = looks.own_start();
    let mut found = Vec::with_capacity(trail.map_or(0, Trail::len));
    let mut steps = trail
        .filter(|_| from == 0)
        .map(|trail| trail.follow(pool.blocks()));
    let mut position = from;
    while let Some(at) = looks.next(position).filter(|at| *at < end) {
        let known = steps
            .as_mut()
            .and_then(|steps| steps.next(pool.blocks(), at, end));
        let present = MatchGoal::Present;
        let next = known.or_else(|| pool.longest(domain, hashes, at as usize, present));
        looks.note(at, next.is_some());
        position = at + next.map_or(1, |next| next.pages);
        found.extend(next.filter(|next| next.ready > 0));
    }
    for run in &found {
        pool.extend_pins(run.block, run.ready_through());
    }
    found
}

/// End of the pages from `position` on that are missing: the first page that is present again, or `limit`.
fn missing_until(
    pool: &Pool,
    (domain, hashes): (&Domain, HashView<'_>),
    position: u32,
    limit: u32,
) -> u32 {
    let there = |page: &u32| {
        pool.longest(domain, hashes, *page as usize, MatchGoal::Present)
            .is_some()
    };
    (position + 1..limit).find(there).unwrap_or(limit)
}

/// The admission of the missing pages of a store. Offers each page once, although the walk may return to the page at
/// which a run ended.
struct AdmissionOnce {
    /// `None` if every page is admitted.
    offer: Option<Offer>,
    /// The page that was offered last, and the verdict.
    verdict: Option<(u32, bool)>,
}

impl AdmissionOnce {
    fn admits(
        &mut self,
        pool: &mut Pool,
        (domain, hashes): (&Domain, HashView<'_>),
        position: u32,
    ) -> bool {
        let Some(offer) = self.offer else {
            return true;
        };
        match self.verdict {
            Some((offered, admitted)) if offered == position => admitted,
            _ => {
                let admitted = pool.admits(domain, hashes, position, offer);
                self.verdict = Some((position, admitted));
                admitted
            }
        }
    }

    /// End of the pages from `position` on, all of them missing, that are admitted.
    fn admitted_until(
        &mut self,
        pool: &mut Pool,
        sequence: (&Domain, HashView<'_>),
        position: u32,
        end: u32,
    ) -> u32 {
        match self.offer.is_none() || pool.admits_all() {
            true => end,
            false => (position..end)
                .find(|page| !self.admits(pool, sequence, *page))
                .unwrap_or(end),
        }
    }
}

impl Plan {
    /// Notes pages that are not stored, behind all that were noted so far.
    fn refuse(&mut self, pages: Range<u32>) {
        match self
            .refused
            .last_mut()
            .filter(|last| last.end == pages.start)
        {
            Some(last) => last.end = pages.end,
            None => self.refused.push(pages),
        }
    }

    /// Pages for which there is no room, or that are not admitted.
    pub(super) fn refused_pages(&self) -> u32 {
        self.refused
            .iter()
            .map(|pages| pages.end - pages.start)
            .sum()
    }

    /// Counts the wanted pages of a run that is present; pages that are not ready yet are waited for.
    fn count_present(&mut self, pool: &Pool, found: Match, position: u32, wanted: &Range<u32>) {
        let overlap =
            |from: u32, to: u32| to.min(wanted.end).saturating_sub(from.max(wanted.start));
        let ready_end = position + found.ready;
        self.present_pages += overlap(position, ready_end);
        let pages = overlap(ready_end, position + found.pages);
        if pages > 0
            && let Some(filling) = pool.filling_of(found.block)
        {
            let transfer = filling.transfer;
            self.waits.push(Wait {
                transfer,
                pages,
                own: false,
            });
        }
    }
}

#[cfg(test)]
mod tails;
#[cfg(test)]
mod tests;
