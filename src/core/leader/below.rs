//! Uses of pages in the tiers below host memory.
//!
//! A lookup takes each page from the fastest tier that has it, and uses the copies in the slower tiers, too: otherwise
//! a slower tier would evict what engines use most, because faster tiers serve it. Used pages that a slower tier lacks
//! are written to it again. A request that ends makes its sequence the newest one there, its first page last: the pages
//! that were written meanwhile are newer than the ones before them, without which they are of no use.

use std::ops::Range;

use crate::group::GroupKind;
use crate::group::model::Sequence;
use crate::index::blocks::BlockRef;
use crate::index::cells::Cells;
use crate::pool::tier_walk::{ServedPages, TierRun};
use crate::pool::{BlockRun, Pool};
use kvferry_types::{Edge, GroupId, PagesBelow, PerTier, TierId};

use super::Leader;
use super::tier::Tiers;

/// The parts of a hit that are served from below host memory, in units of the hashes. A unit counts for the slowest tier
/// that serves a page of some group.
pub(super) fn pages_below(
    sequence: &Sequence,
    served: &[ServedPages],
    hit: &Range<u32>,
) -> PagesBelow {
    if served.iter().all(|served| served.tier <= TierId::Host) {
        return PagesBelow::default();
    }
    let from = |tier| units_from(sequence, served, hit, tier);
    let remote = from(TierId::Remote);
    PagesBelow {
        disk: from(TierId::Disk) - remote,
        remote,
    }
}

/// The units of `hit` of which a page of some group is served from this tier or from a slower one.
fn units_from(
    sequence: &Sequence,
    served: &[ServedPages],
    hit: &Range<u32>,
    from_tier: TierId,
) -> u32 {
    let below = served.iter().filter(|served| served.tier >= from_tier);
    let spans = below.map(|ServedPages { group, pages, .. }| {
        let units = sequence.model().hashes_per_page(*group);
        pages.start * units..pages.end * units
    });
    let mut spans: Vec<Range<u32>> = spans.collect();
    spans.sort_unstable_by_key(|span| span.start);
    let (mut below, mut at) = (0, hit.start);
    for span in spans {
        let end = span.end.min(hit.end);
        below += end.saturating_sub(span.start.max(at));
        at = at.max(end);
    }
    below
}

/// A run of a tier below host memory whose pages a lookup used.
#[derive(Debug, Clone, Copy)]
struct UsedRun {
    run: BlockRun,
    /// A faster tier has some of the pages, and served them.
    is_copy: bool,
}

impl Leader {
    /// Uses the pages of a lookup in the tiers below host memory, and queues those for a move that a slower tier lacks.
    /// `used` are the runs that the lookup found, in ascending order in each group, and that were used already.
    pub(super) fn use_below(&mut self, sequence: &Sequence, used: &[(GroupId, TierRun)]) {
        if self.tiers.below_host().next().is_none() {
            return;
        }
        let mut all: PerTier<Vec<UsedRun>> = PerTier::default();
        for of_group in used.chunk_by(|(one, _), (other, _)| one == other) {
            let found: PerTier<Vec<UsedRun>> = {
                let pools = self.tiers.serving_pools();
                let below = pools.iter().filter(|(tier, _)| *tier > TierId::Host);
                let found = below.map(|of| (of.0, used_in(&pools, *of, sequence, of_group)));
                found.collect()
            };
            self.offer_again(of_group, &found);
            for (tier, runs) in found.iter() {
                match all.get_mut(tier) {
                    Some(all) => all.extend(runs),
                    None => drop(all.insert(tier, runs.clone())),
                }
            }
        }
        for (tier, runs) in all.iter() {
            self.tiers.use_copies(tier, runs);
        }
    }

    /// Queues the blocks with pages that a slower tier lacks for the edges to it. `used` are the runs that a lookup found of
    /// one group, and `below` the runs with these pages in each tier below host memory.
    fn offer_again(&mut self, used: &[(GroupId, TierRun)], below: &PerTier<Vec<UsedRun>>) {
        for index in 0..self.settings.moves.len() {
            let edge = self.settings.moves[index].edge;
            let Some(there) = below.get(edge.to).filter(|_| edge.from < edge.to) else {
                continue;
            };
            let Some(from) = self.tiers.serving(edge.from) else {
                continue;
            };
            let lacking = |run: &BlockRun| lacks(there, run).then(|| from.block_ref(run.block));
            let blocks: Vec<BlockRef> = match below.get(edge.from) {
                Some(runs) => runs.iter().filter_map(|used| lacking(&used.run)).collect(),
                None => {
                    let runs = used.iter().filter(|(_, found)| found.tier == edge.from);
                    runs.filter_map(|(_, found)| lacking(&found.run)).collect()
                }
            };
            for block in blocks {
                self.queue_move(edge, block);
            }
        }
    }

    /// Makes the sequence of a request that ends the newest one in the tiers below host memory, its first page last.
    pub(super) fn touch_below(&mut self, sequence: &Sequence) {
        if self.tiers.serving_pools().len() < 2 {
            return;
        }
        let specs = sequence.model().groups().specs();
        let prefixes = specs.filter(|(_, spec)| spec.kind == GroupKind::Prefix);
        for group in prefixes.map(|(group, _)| group).collect::<Vec<_>>() {
            let below = self.tiers.below_host();
            let found = below.map(|(tier, pool)| (tier, runs_by_cell(pool, sequence, group)));
            let found: PerTier<Vec<BlockRun>> = found.collect();
            for (tier, runs) in found.iter() {
                if let Some(pool) = self.tiers.serving_mut(tier) {
                    pool.touch(runs);
                }
            }
        }
    }

    /// Queues a block for a move over an edge.
    pub(super) fn queue_move(&mut self, edge: Edge, block: BlockRef) {
        let queued = self.moves.queue(edge, block);
        self.counts.moves_left_out += u64::from(!queued);
    }
}

impl Tiers {
    /// The pools of the tiers below host memory that serve.
    fn below_host(&self) -> impl Iterator<Item = (TierId, &Pool)> {
        let pools = self.serving_pools().into_iter();
        pools.filter(|(tier, _)| *tier > TierId::Host)
    }

    /// Counts a use of the copies among these runs, which ascend, and makes the runs the most recently used ones of their
    /// tier. Runs that served were used already, but may have to become newer than copies behind them.
    fn use_copies(&mut self, tier: TierId, runs: &[UsedRun]) {
        if !runs.iter().any(|used| used.is_copy) {
            return;
        }
        let Some(pool) = self.serving_mut(tier) else {
            return;
        };
        for used in runs.iter().filter(|used| used.is_copy) {
            pool.note_use(used.run.block);
        }
        for used in runs.iter().rev() {
            pool.touch(std::slice::from_ref(&used.run));
        }
    }
}

/// The runs of a tier below host memory that served a lookup, and those with the pages that faster tiers served. `used` are
/// the runs of one group that the lookup found. Where the tier lacks a page, the rest of the faster tier's run is not
/// examined: it counts as lacking, and the move of its block leaves out what is there.
fn used_in(
    pools: &[(TierId, &Pool)],
    (tier, pool): (TierId, &Pool),
    sequence: &Sequence,
    used: &[(GroupId, TierRun)],
) -> Vec<UsedRun> {
    let mut runs: Vec<UsedRun> = Vec::new();
    let Some((group, _)) = used.first().filter(|_| pool.live_blocks() > 0) else {
        return runs;
    };
    let (domain, hashes) = sequence.of(*group);
    // The pages before this position are examined.
    let mut at = 0;
    let mut add = |run: BlockRun, is_copy| match runs.last_mut() {
        // A run that a faster tier interrupts.
        Some(last) if last.run.block == run.block => {
            last.run.pages = run.position + run.pages - last.run.position;
        }
        _ => runs.push(UsedRun { run, is_copy }),
    };
    for (_, TierRun { tier: faster, run }) in used {
        let end = run.position + run.pages;
        if *faster == tier {
            add(*run, false);
            at = end;
            continue;
        }
        at = at.max(run.position);
        while *faster < tier && at < end {
            let found = match at == run.position && run.offset == 0 {
                // Blocks of both tiers mostly begin at the same pages, whose anchor is known here.
                true => {
                    let mut of_faster = pools.iter().filter(|(tier, _)| tier == faster);
                    let anchor = of_faster.next().map(|(_, pool)| pool.anchor_of(run.block));
                    anchor.and_then(|anchor| pool.containing_at(domain, hashes, at, anchor))
                }
                false => pool.containing(domain, hashes, at),
            };
            let Some((start, found)) = found else {
                break;
            };
            add(BlockRun::readable(start, found), true);
            at = start + found.ready;
        }
    }
    runs
}

/// The runs of a tier that hold pages of a group with a prefix: those that begin with a cell, and where one of them ends.
fn runs_by_cell(pool: &Pool, sequence: &Sequence, group: GroupId) -> Vec<BlockRun> {
    let mut runs = Vec::new();
    if pool.live_blocks() == 0 {
        return runs;
    }
    let (domain, hashes) = sequence.of(group);
    let mut cells = Cells::new(pool.ratio());
    let mut at = 0;
    while (at as usize) < hashes.len() {
        match pool.containing(domain, hashes, at) {
            Some((start, found)) => {
                cells.align(start, pool.phase_of(found));
                runs.push(BlockRun::readable(start, found));
                at = start + found.ready;
            }
            None => at = cells.next(at),
        }
    }
    runs
}

/// True if these runs, which ascend, lack one of the pages of `run`.
fn lacks(runs: &[UsedRun], run: &BlockRun) -> bool {
    let (mut at, end) = (run.position, run.position + run.pages);
    let first = runs.partition_point(|used| used.run.position + used.run.pages <= at);
    for UsedRun { run, .. } in &runs[first..] {
        if at >= end || run.position > at {
            break;
        }
        at = at.max(run.position + run.pages);
    }
    at < end
}
