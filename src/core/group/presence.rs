//! The pages of a sequence that the tiers have, for the rules of several groups.
//!
//! A prefix group is followed from its first page, as for a model with one group. The pages of the other groups lie in
//! runs with holes between them: each cell of a group, the pages between two multiples of the ratio, is examined once,
//! when a rule first asks about one of its pages.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;

use crate::group::model::Sequence;
use crate::group::{GroupKind, Hit, LookupBounds, Presence};
use crate::index::block_index::MatchGoal;
use crate::pool::tier_walk::{TierRun, serving, walk_tiers};
use crate::pool::{BlockRun, Pool};
use kvferry_types::{GroupId, TierId};
use smallvec::SmallVec;

/// The runs that begin in one cell: one for each position at most, in each tier.
type CellRuns = SmallVec<[TierRun; 2]>;

/// The pages of one group.
#[derive(Debug)]
enum GroupPages {
    /// The runs that follow each other from the first page on, and where the last one ends.
    Prefix { runs: Vec<TierRun>, end: u32 },
    /// The runs of the cells that were examined. A block of a state begins with its only page.
    Cells {
        cells: RefCell<BTreeMap<u32, CellRuns>>,
        cell_pages: u32,
    },
}

/// A lookup of a sequence of several groups in the tiers that serve, the fastest one first.
pub(crate) struct Reach<'a> {
    pools: &'a [(TierId, &'a Pool)],
    sequence: &'a Sequence,
    groups: Vec<GroupPages>,
    /// A page was missing that is reserved or filling.
    pending: Cell<bool>,
}

impl<'a> Reach<'a> {
    /// Follows the prefix groups. Pages of the first `device_tokens` may be missing, because the engine has them.
    pub(crate) fn new(
        pools: &'a [(TierId, &'a Pool)],
        sequence: &'a Sequence,
        device_tokens: u32,
    ) -> Self {
        let ratio = pools.first().map_or(1, |(_, pool)| pool.ratio());
        let mut pending = false;
        let specs = sequence.model().groups().specs();
        let groups = specs.map(|(group, spec)| match spec.kind {
            GroupKind::Prefix => {
                let (domain, hashes) = sequence.of(group);
                let covered = (device_tokens / spec.page_tokens) as usize;
                let mut runs = Vec::new();
                let reach = walk_tiers(pools, domain, hashes, covered, |tier, run| {
                    runs.push(TierRun { tier, run });
                });
                pending |= reach.pending;
                let end = reach.end;
                GroupPages::Prefix { runs, end }
            }
            GroupKind::State => GroupPages::cells(1),
            GroupKind::Window { .. } | GroupKind::Chunk { .. } => GroupPages::cells(ratio),
        });
        let groups = groups.collect();
        Self {
            pools,
            sequence,
            groups,
            pending: Cell::new(pending),
        }
    }

    /// The longest hit that every group can continue at.
    pub(crate) fn hit(&self, bounds: LookupBounds) -> Option<Hit> {
        self.sequence.model().groups().reach(bounds, self)
    }

    /// True if a later lookup may find more: a page that was asked for is reserved or filling.
    pub(crate) fn is_pending(&self) -> bool {
        self.pending.get()
    }

    /// All runs that were found of the prefix groups.
    pub(crate) fn prefix_runs(&self) -> Vec<(GroupId, TierRun)> {
        let mut found = Vec::new();
        for (group, pages) in (0..).map(GroupId).zip(&self.groups) {
            if let GroupPages::Prefix { runs, .. } = pages {
                found.extend(runs.iter().map(|run| (group, *run)));
            }
        }
        found
    }

    /// The runs that hold the pages of a group, in order. Pages that the tiers do not have are left out.
    pub(crate) fn runs(&self, group: GroupId, pages: Range<u32>) -> Vec<TierRun> {
        match &self.groups[usize::from(group.0)] {
            GroupPages::Prefix { runs, .. } => {
                serving(pages, runs.iter()).map(|(run, _)| run).collect()
            }
            GroupPages::Cells { .. } => {
                let mut found = Vec::new();
                let mut page = pages.start;
                while page < pages.end {
                    let run = self.run_of(group, page);
                    page = run.map_or(page + 1, |found| found.run.position + found.run.pages);
                    found.extend(run);
                }
                found
            }
        }
    }

    /// The run that holds a page of a group with holes: of the fastest tier that has the page, the one that reaches
    /// furthest. A run of a slower tier ends where a faster one has the next page, and at the end of the cell, behind which
    /// the faster tiers were not examined.
    fn run_of(&self, group: GroupId, page: u32) -> Option<TierRun> {
        let GroupPages::Cells { cells, cell_pages } = &self.groups[usize::from(group.0)] else {
            return None;
        };
        let cell = page / cell_pages;
        let mut cells = cells.borrow_mut();
        let runs = cells.entry(cell).or_insert_with(|| {
            let end = (cell + 1).saturating_mul(*cell_pages);
            self.runs_of_cell(group, cell * cell_pages..end)
        });
        let holds = |found: &&TierRun| {
            (found.run.position..found.run.position + found.run.pages).contains(&page)
        };
        let holding = runs.iter().filter(holds).copied();
        let mut found = holding.min_by_key(|found| {
            let end = found.run.position + found.run.pages;
            (found.tier, std::cmp::Reverse(end))
        })?;
        if self
            .pools
            .first()
            .is_some_and(|(tier, _)| *tier < found.tier)
        {
            let faster = runs.iter().filter(|other| other.tier < found.tier);
            let begins = faster.map(|other| other.run.position);
            let next = begins.filter(|begin| *begin > page).min();
            let end = next.unwrap_or((cell + 1).saturating_mul(*cell_pages));
            let run = &mut found.run;
            run.pages = run.pages.min(end - run.position);
        }
        Some(found)
    }

    /// The readable runs in one cell of a group: those that begin there, and the one that reaches into it.
    fn runs_of_cell(&self, group: GroupId, pages: Range<u32>) -> CellRuns {
        let (domain, hashes) = self.sequence.of(group);
        let len = u32::try_from(hashes.len()).unwrap_or(u32::MAX);
        let mut runs = CellRuns::new();
        for (tier, pool) in self.pools {
            for position in pages.start..pages.end.min(len) {
                let (at, goal) = (position as usize, MatchGoal::Readable);
                // A block that begins before these pages holds the first of them, if it holds any.
                let found = match position == pages.start {
                    true => pool.longest(domain, hashes, at, goal),
                    false => pool.longest_beginning(domain, hashes, at, goal),
                };
                let Some(found) = found else {
                    continue;
                };
                if found.pages > found.ready {
                    self.pending.set(true);
                }
                if found.ready > 0 {
                    let run = BlockRun::readable(position, found);
                    runs.push(TierRun { tier: *tier, run });
                }
            }
        }
        runs
    }
}

impl GroupPages {
    fn cells(cell_pages: u32) -> Self {
        Self::Cells {
            cells: RefCell::default(),
            cell_pages,
        }
    }
}

impl Presence for Reach<'_> {
    fn has(&self, group: GroupId, page: u32) -> bool {
        match &self.groups[usize::from(group.0)] {
            GroupPages::Prefix { end, .. } => page < *end,
            GroupPages::Cells { .. } => self.run_of(group, page).is_some(),
        }
    }

    fn first_missing(&self, group: GroupId, pages: Range<u32>) -> Option<u32> {
        match &self.groups[usize::from(group.0)] {
            GroupPages::Prefix { end, .. } => {
                let missing = pages.start.max(*end);
                (missing < pages.end).then_some(missing)
            }
            GroupPages::Cells { .. } => pages.clone().find(|page| !self.has(group, *page)),
        }
    }
}
