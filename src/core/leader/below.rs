//! Uses of pages in the tiers below host memory.
//!
//! A lookup takes each page from the fastest tier that has it, and uses the copies in the slower tiers, too: otherwise
//! a slower tier would evict what engines use most, because faster tiers serve it. Used pages that a slower tier lacks
//! are written to it again. A request that ends makes its sequence the newest one there, its first page last: the pages
//! that were written meanwhile are newer than the ones before them, without which they are of no use.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::blocks::{BlockIndex, BlockRef};
use crate::cover::TierRun;
use crate::group::GroupKind;
use crate::model::Sequence;
use crate::pool::{BlockRun, Pool};
use crate::reach::UsedPages;
use kvferry_types::{Edge, GroupId, PagesBelow, PerTier, TierId};

use super::Leader;
use super::tier::Tiers;

/// The parts of a hit that lie below host memory, in units of the hashes. A unit counts for the slowest tier in which a
/// page of some group lies.
pub(super) fn pages_below(
    sequence: &Sequence,
    needed: &[(GroupId, TierRun)],
    hit: &Range<u32>,
) -> PagesBelow {
    let from = |tier| units_from(sequence, needed, hit, tier);
    let remote = from(TierId::Remote);
    PagesBelow {
        disk: from(TierId::Disk) - remote,
        remote,
    }
}

/// The units of `hit` of which a page of some group lies in this tier or in a slower one.
fn units_from(
    sequence: &Sequence,
    needed: &[(GroupId, TierRun)],
    hit: &Range<u32>,
    from_tier: TierId,
) -> u32 {
    let mut spans: Vec<Range<u32>> = Vec::new();
    let (mut last, mut at) = (None, 0);
    for (group, TierRun { tier, run }) in needed {
        if last.replace(*group) != Some(*group) {
            at = 0;
        }
        // A run of a slower tier may begin before the pages that it is needed for.
        let from = run.position.max(at);
        at = at.max(run.position + run.pages);
        if *tier >= from_tier && from < at {
            let units = sequence.model().hashes_per_page(*group);
            spans.push(from * units..at * units);
        }
    }
    spans.sort_unstable_by_key(|span| span.start);
    let (mut below, mut at) = (0, hit.start);
    for span in spans {
        let end = span.end.min(hit.end);
        below += end.saturating_sub(span.start.max(at));
        at = at.max(end);
    }
    below
}

impl Leader {
    /// Uses the pages of a lookup in the tiers below host memory, and queues those for a move that a slower tier lacks.
    /// `served` are the runs that were used already.
    pub(super) fn use_below(
        &mut self,
        sequence: &Sequence,
        used: &[UsedPages],
        served: &[TierRun],
    ) {
        if self.tiers.serving_pools().len() < 2 {
            return;
        }
        for UsedPages { group, pages } in used {
            let mut found: PerTier<Vec<BlockRun>> = PerTier::default();
            for (tier, pool) in self.tiers.below_host() {
                found.insert(tier, runs_of(pool, sequence, *group, pages.clone()));
            }
            for (tier, runs) in found.iter() {
                self.tiers.use_in(tier, runs, served);
            }
            self.offer_again(sequence, *group, pages.clone(), found);
        }
    }

    /// Queues the blocks that a slower tier lacks, in whole or in part, for the edges to it.
    fn offer_again(
        &mut self,
        sequence: &Sequence,
        group: GroupId,
        pages: Range<u32>,
        mut found: PerTier<Vec<BlockRun>>,
    ) {
        for index in 0..self.settings.moves.len() {
            let edge = self.settings.moves[index].edge;
            let Some(there) = found.get(edge.to).filter(|_| edge.from < edge.to) else {
                continue;
            };
            let gaps = gaps(there, pages.clone());
            if gaps.is_empty() {
                continue;
            }
            let Some(from) = self.tiers.serving(edge.from) else {
                continue;
            };
            if found.get(edge.from).is_none() {
                let runs = runs_of(from, sequence, group, pages.clone());
                found.insert(edge.from, runs);
            }
            let runs = found.get(edge.from).into_iter().flatten();
            let lacking = runs.filter(|run| overlaps(run, &gaps));
            let blocks: Vec<BlockRef> = lacking.map(|run| from.block_ref(run.block)).collect();
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
            let (_, hashes) = sequence.of(group);
            let end = u32::try_from(hashes.len()).unwrap_or(u32::MAX);
            let below = self.tiers.below_host();
            let found = below.map(|(tier, pool)| (tier, runs_of(pool, sequence, group, 0..end)));
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

    /// Makes the runs the most recently used ones of their tier, and counts a use of those that did not serve.
    fn use_in(&mut self, tier: TierId, runs: &[BlockRun], served: &[TierRun]) {
        let Some(pool) = self.serving_mut(tier) else {
            return;
        };
        let served = served.iter().filter(|found| found.tier == tier);
        let served: BTreeSet<BlockIndex> = served.map(|found| found.run.block).collect();
        for run in runs.iter().filter(|run| !served.contains(&run.block)) {
            pool.note_use(run.block);
        }
        pool.touch(runs);
    }
}

/// The runs of a tier that hold these pages of a group. Of a group with a prefix, `pages` begins with the first one.
fn runs_of(pool: &Pool, sequence: &Sequence, group: GroupId, pages: Range<u32>) -> Vec<BlockRun> {
    let (domain, hashes) = sequence.of(group);
    match sequence.model().kind(group) {
        Some(GroupKind::Prefix) => {
            let mut runs = Vec::new();
            pool.walk(domain, hashes, pages.end as usize, &mut runs);
            runs
        }
        _ => pool.covering_any(domain, hashes, pages),
    }
}

/// The parts of `pages` that the runs, which ascend, do not hold.
fn gaps(runs: &[BlockRun], pages: Range<u32>) -> Vec<Range<u32>> {
    let (mut gaps, mut at) = (Vec::new(), pages.start);
    for run in runs {
        if run.position > at {
            gaps.push(at..run.position.min(pages.end));
        }
        at = at.max(run.position + run.pages);
    }
    if at < pages.end {
        gaps.push(at..pages.end);
    }
    gaps
}

fn overlaps(run: &BlockRun, gaps: &[Range<u32>]) -> bool {
    let first = gaps.partition_point(|gap| gap.end <= run.position);
    gaps.get(first)
        .is_some_and(|gap| gap.start < run.position + run.pages)
}
