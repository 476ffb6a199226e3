//! Finds pages from any position of a sequence on, also where a block begins before that position, and in several
//! tiers.
//!
//! Pages that lie in several tiers are taken from the fastest one. A block of a slower tier may begin before the pages
//! that are missing in the faster ones, because the tail of a block is evicted before its beginning.

use std::ops::Range;

use crate::index::anchor::Domain;
use crate::index::block_index::{Match, MatchGoal};
use crate::index::blocks::BlockIndex;
use crate::index::prefetch::{HeadPrefetcher, KnownAnchors};
use crate::pool::store_window::MISSES_AROUND_MAX;
use crate::pool::{BlockRun, Pool, PrefixMatch};
use kvferry_types::{Anchor, GroupId, HashView, TierId};
use smallvec::SmallVec;

/// A run of pages in one block of a tier. The run may begin before the pages that it was found for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TierRun {
    pub(crate) tier: TierId,
    pub(crate) run: BlockRun,
}

/// Pages of a group that a hit needs, and the tier that serves them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ServedPages {
    pub(crate) group: GroupId,
    pub(crate) tier: TierId,
    pub(crate) pages: Range<u32>,
}

impl ServedPages {
    /// Those of the pages of a group that these runs hold, which ascend.
    pub(crate) fn of<'a>(
        group: GroupId,
        pages: Range<u32>,
        runs: impl Iterator<Item = &'a TierRun>,
    ) -> impl Iterator<Item = Self> {
        serving(pages, runs).map(move |(found, pages)| Self {
            group,
            tier: found.tier,
            pages,
        })
    }
}

/// The runs, which ascend, that serve some of these pages, with the pages that each serves. A run may begin before the
/// pages that it was found for, and end after them: one that was found for a later page serves none of these, although it
/// may hold some.
pub(crate) fn serving<'a>(
    pages: Range<u32>,
    runs: impl Iterator<Item = &'a TierRun>,
) -> impl Iterator<Item = (TierRun, Range<u32>)> {
    let mut at = pages.start;
    runs.filter_map(move |found| {
        let from = found.run.position.max(at);
        at = at.max((found.run.position + found.run.pages).min(pages.end));
        (from < at).then_some((*found, from..at))
    })
}

impl Pool {
    /// Follows a sequence from its first page, run by run, and appends the readable runs. Pages below `covered` may be
    /// missing, because the caller has them elsewhere.
    pub fn walk(
        &self,
        domain: &Domain,
        hashes: HashView<'_>,
        covered: usize,
        runs: &mut Vec<BlockRun>,
    ) -> PrefixMatch {
        let tiers = [(TierId::Host, self)];
        walk_tiers(&tiers, domain, hashes, covered, |_, run| runs.push(run))
    }

    /// The run that holds the page at `position`, with the position of the run's first page. Examines that position
    /// first, and then, without an index of pages, those before it in which a block may begin: at most one for each page
    /// of a block.
    pub(crate) fn containing(
        &self,
        domain: &Domain,
        hashes: HashView<'_>,
        position: u32,
    ) -> Option<(u32, Match)> {
        let anchor = domain.anchor(hashes.fingerprint(position as usize));
        self.containing_at(domain, hashes, position, anchor)
    }

    /// Like [`Self::containing`], with the anchor of the position.
    pub(crate) fn containing_at(
        &self,
        domain: &Domain,
        hashes: HashView<'_>,
        position: u32,
        anchor: Anchor,
    ) -> Option<(u32, Match)> {
        let head = self.index.head(&self.blocks, anchor);
        self.containing_from(domain, hashes, position, head)
    }

    /// Like [`Self::containing`], with the first block under the anchor of the position.
    fn containing_from(
        &self,
        domain: &Domain,
        hashes: HashView<'_>,
        position: u32,
        head: Option<BlockIndex>,
    ) -> Option<(u32, Match)> {
        let goal = MatchGoal::Readable;
        let (at, holds) = (position as usize, |found: &Match| found.ready > 0);
        let first = head.and_then(|head| self.longest_of(domain, head, hashes, at, goal));
        let first = self.or_inside(first, domain, hashes, at, goal);
        if let Some(found) = first.filter(holds) {
            return Some((position, found));
        }
        let cell = match self.has_page_index() {
            true => position,
            false => position / self.ratio * self.ratio,
        };
        let mut found = (cell..position).filter_map(|start| {
            let found = self.longest(domain, hashes, start as usize, goal)?;
            (start + found.ready > position).then_some((start, found))
        });
        found.next()
    }

    /// The anchor of the first page of a block.
    pub(crate) fn anchor_of(&self, block: BlockIndex) -> Anchor {
        self.blocks.get(block).anchor
    }

    /// The readable runs that hold the pages from `first` to `end`, up to the first page that is missing.
    pub(crate) fn covering(
        &self,
        domain: &Domain,
        hashes: HashView<'_>,
        first: u32,
        end: u32,
    ) -> Vec<BlockRun> {
        let (mut runs, mut position) = (Vec::new(), first);
        while position < end
            && let Some((start, found)) = self.containing(domain, hashes, position)
        {
            runs.push(BlockRun::readable(start, found));
            position = start + found.ready;
        }
        runs
    }

    /// The readable runs that hold some of these pages, past at most [`MISSES_AROUND_MAX`] that are missing.
    pub(crate) fn covering_any(
        &self,
        domain: &Domain,
        hashes: HashView<'_>,
        pages: Range<u32>,
    ) -> Vec<BlockRun> {
        let (mut runs, mut position) = (Vec::new(), pages.start);
        for _ in 0..=MISSES_AROUND_MAX {
            if position >= pages.end {
                break;
            }
            let found = self.covering(domain, hashes, position, pages.end);
            position = found
                .last()
                .map_or(position + 1, |run| run.position + run.pages + 1);
            runs.extend(found);
        }
        runs
    }
}

/// Follows a sequence from its first page over several tiers, the fastest one first, and reports each readable run. Each
/// page is taken from the fastest tier that has it: a run of a slower tier ends where a faster one has the next page.
/// Pages below `covered` may be missing, because the caller has them elsewhere. Where [`MISSES_AROUND_MAX`] of them are
/// missing, the others are skipped: they only count as used.
pub(crate) fn walk_tiers(
    pools: &[(TierId, &Pool)],
    domain: &Domain,
    hashes: HashView<'_>,
    covered: usize,
    mut add: impl FnMut(TierId, BlockRun),
) -> PrefixMatch {
    let len = u32::try_from(hashes.len()).unwrap_or(u32::MAX);
    let (mut position, mut pending) = (0, false);
    let Some(((fastest, host), slower)) = pools.split_first() else {
        return PrefixMatch::default();
    };
    let known = KnownAnchors::default();
    let mut ahead = host.prefetcher(domain, hashes);
    if slower.iter().any(|(_, pool)| pool.live_blocks() > 0) {
        ahead = ahead.sharing(&known);
    }
    // Those of the slower tiers, once one of them is asked.
    let mut ahead_below: SmallVec<[HeadPrefetcher<'_>; 2]> = SmallVec::new();
    // A block that holds the first page that is not covered begins here or later.
    let last_cell = u32::try_from(covered)
        .unwrap_or(u32::MAX)
        .saturating_sub(host.ratio - 1);
    let mut misses = 0;
    while position < len {
        let goal = MatchGoal::Readable;
        let at = position as usize;
        let found = ahead
            .head(at)
            .and_then(|head| host.longest_of(domain, head, hashes, at, goal));
        let found = host.or_inside(found, domain, hashes, at, goal);
        if let Some(found) = found.filter(|found| found.offset > 0 || at == 0) {
            ahead.align(position, host.phase_of(found));
        }
        if let Some(found) = found.filter(|found| found.ready > 0) {
            pending = found.pages > found.ready;
            add(*fastest, BlockRun::readable(position, found));
            position += found.ready;
            continue;
        }
        pending = pending || found.is_some();
        if ahead_below.is_empty() {
            let readers = slower.iter();
            ahead_below = readers
                .map(|(_, pool)| pool.prefetcher(domain, hashes).sharing(&known))
                .collect();
        }
        let below = slower.iter().zip(&mut ahead_below).enumerate();
        let mut below = below.filter(|(_, ((_, pool), _))| pool.live_blocks() > 0);
        let below = below.find_map(|(faster, ((tier, pool), ahead))| {
            let (start, found) = pool.containing_from(domain, hashes, position, ahead.head(at))?;
            Some((faster + 1, *tier, start, found))
        });
        if let Some((faster, tier, start, found)) = below {
            let behind = position + 1..start + found.ready;
            let end = first_beginning(&pools[..faster], domain, hashes, behind);
            let mut run = BlockRun::readable(start, found);
            run.pages = end - start;
            add(tier, run);
            position = end;
            pending = false;
        } else if at < covered {
            pending = false;
            misses += 1;
            position += 1;
            if misses >= MISSES_AROUND_MAX {
                position = position.max(last_cell);
            }
        } else {
            break;
        }
    }
    PrefixMatch {
        end: position,
        pending,
    }
}

/// The first of `positions` at which a block of one of these tiers begins with a readable page, or their end.
fn first_beginning(
    pools: &[(TierId, &Pool)],
    domain: &Domain,
    hashes: HashView<'_>,
    positions: Range<u32>,
) -> u32 {
    let mut end = positions.end;
    for (_, pool) in pools {
        if pool.index.begins_with_cells() {
            continue;
        }
        let count = end.saturating_sub(positions.start) as usize;
        let pages = hashes.low_halves(positions.start as usize).take(count);
        for (at, low_half) in (positions.start..).zip(pages) {
            if !pool.index.may_begin_inside(low_half) {
                continue;
            }
            let found = pool.longest_beginning(domain, hashes, at as usize, MatchGoal::Readable);
            if found.is_some_and(|found| found.ready > 0) {
                end = at;
                break;
            }
        }
    }
    end
}

#[cfg(test)]
mod tests;
