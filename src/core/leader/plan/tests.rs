use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::eviction::RuleLimits;
use crate::index::shard_set::ShardSet;
use crate::pool::BlockRun;
use crate::pool::tests::domain;
use kvferry_types::{Fingerprint, PageHashes, Ratio, Scope, Shard};

const RATIO: u32 = 4;
const SEQUENCES: usize = 5;
const PAGES: u32 = 26;

/// Page hashes of a sequence: two sequences have the same pages up to the one at which they diverge.
fn hashes(sequence: usize, len: u32) -> PageHashes {
    let shared = [0, PAGES, 9, 6, 13][sequence];
    PageHashes::of_fingerprints((0..len).map(|page| {
        let of = if page < shared { 1 } else { sequence + 1 };
        Fingerprint(u128::from(page) << 8 | of as u128)
    }))
}

#[derive(Debug, Clone)]
enum Step {
    /// Stores pages of a sequence of which no further hashes are known.
    Store {
        sequence: usize,
        first: u32,
        pages: u32,
    },
    /// Stores the pages after those that were stored last.
    Grow {
        sequence: usize,
        pages: u32,
    },
    /// Ends a transfer, and the store that waits for it.
    End {
        which: usize,
        complete: bool,
    },
    LookUp {
        sequence: usize,
    },
    /// Holds the first block of a sequence, or releases all holds.
    Hold {
        sequence: usize,
    },
    Release,
    Hide {
        sequence: usize,
    },
    Show,
    Reset,
}

fn step() -> impl Strategy<Value = Step> {
    let sequence = || 0..SEQUENCES;
    prop_oneof![
        4 => (sequence(), 0..PAGES, 1..9_u32)
            .prop_map(|(sequence, first, pages)| Step::Store { sequence, first, pages }),
        12 => (sequence(), 1..4_u32).prop_map(|(sequence, pages)| Step::Grow { sequence, pages }),
        16 => (0..8_usize, prop::bool::weighted(0.9))
            .prop_map(|(which, complete)| Step::End { which, complete }),
        3 => sequence().prop_map(|sequence| Step::LookUp { sequence }),
        1 => sequence().prop_map(|sequence| Step::Hold { sequence }),
        1 => Just(Step::Release),
        1 => sequence().prop_map(|sequence| Step::Hide { sequence }),
        1 => Just(Step::Show),
        1 => prop::bool::weighted(0.1).prop_map(|reset| match reset {
            true => Step::Reset,
            false => Step::Release,
        }),
    ]
}

/// A store whose transfers have not ended.
#[derive(Debug)]
struct Open {
    transfer: TransferId,
    sequence: usize,
    wanted: Range<u32>,
    known: u32,
}

/// A pool whose stores follow trails, or walk the whole sequence and pin it before anything else.
struct Stored {
    pool: Pool,
    trails: Option<Vec<Trail>>,
    next_id: u64,
    next: [u32; SEQUENCES],
    open: Vec<Open>,
    held: Vec<Pin>,
    hidden: Option<crate::index::blocks::Hidden>,
    evicted: Vec<PageRun>,
}

impl Stored {
    fn new(policy: &str, trails: bool) -> Self {
        let ratio = Ratio::new(RATIO).expect("in bounds");
        let policy = policy.parse().expect("a policy");
        Self {
            pool: Pool::new(40, ratio).with_policy(policy, RuleLimits::new()),
            trails: trails.then(|| (0..SEQUENCES).map(|_| Trail::default()).collect()),
            next_id: 0,
            next: [0; SEQUENCES],
            open: Vec::new(),
            held: Vec::new(),
            hidden: None,
            evicted: Vec::new(),
        }
    }

    fn store(&mut self, sequence: usize, wanted: Range<u32>) {
        let known = wanted.end;
        let hashes = hashes(sequence, known);
        let mut held = Vec::new();
        if self.trails.is_none() {
            let mut around = LooksAround::default();
            let mut looks = Looks::new(&wanted, RATIO, &mut around);
            let all = (&domain(), hashes.view());
            for run in before_own(&mut self.pool, all, 0, None, &mut looks) {
                held.push(self.pool.pin(run.block, run.ready_through()));
            }
        }
        let trail = self.trails.as_ref().map(|trails| &trails[sequence]);
        let walk = PlanWalk {
            from: 0,
            wanted: wanted.clone(),
            trail,
            offer: None,
            around: LooksAround::default(),
        };
        let planned = plan(
            &mut self.pool,
            (&domain(), hashes.view()),
            walk,
            &mut self.next_id,
        );
        held.into_iter().for_each(|pin| self.pool.unpin(pin));
        self.evicted.extend(planned.evicted);
        for reserved in planned.reserved {
            let transfer = reserved.transfer;
            self.pool.start_filling(transfer, ShardSet::first(1));
            let wanted = wanted.clone();
            self.open.push(Open {
                transfer,
                sequence,
                wanted,
                known,
            });
        }
    }

    fn end(&mut self, which: usize, complete: bool) {
        if self.open.is_empty() {
            return;
        }
        let open = self.open.remove(which % self.open.len());
        self.pool.ended(open.transfer, Shard(0), complete);
        let hashes = hashes(open.sequence, open.known);
        let mut none = Trail::default();
        let trail = match &mut self.trails {
            Some(trails) => &mut trails[open.sequence],
            None => &mut none,
        };
        let mut runs = Vec::new();
        let pool = &mut self.pool;
        pool.walk_around(
            &domain(),
            hashes.view(),
            &open.wanted,
            (trail, &mut LooksAround::default()),
            &mut runs,
        );
        pool.touch(&runs);
    }

    fn runs(&self, sequence: usize) -> Vec<BlockRun> {
        let mut runs = Vec::new();
        let hashes = hashes(sequence, PAGES);
        self.pool.walk(&domain(), hashes.view(), 0, &mut runs);
        runs
    }

    fn take(&mut self, step: &Step) {
        match *step {
            Step::Store {
                sequence,
                first,
                pages,
            } => {
                self.store(sequence, first..(first + pages).min(PAGES));
            }
            Step::Grow { sequence, pages } => {
                let first = self.next[sequence] % PAGES;
                let end = (first + pages).min(PAGES);
                self.next[sequence] = end;
                self.store(sequence, first..end);
            }
            Step::End { which, complete } => self.end(which, complete),
            Step::LookUp { sequence } => {
                let runs = self.runs(sequence);
                self.pool.use_runs(&runs);
            }
            Step::Hold { sequence } => {
                let first = self.runs(sequence).first().copied();
                let pool = &mut self.pool;
                self.held
                    .extend(first.map(|run| pool.pin(run.block, run.through())));
            }
            Step::Release => {
                for pin in self.held.drain(..) {
                    self.pool.unpin(pin);
                }
            }
            Step::Hide { sequence } => {
                let pages = hashes(sequence, PAGES).fingerprints(5).step_by(7).collect();
                let scope = Scope::Pages(domain().id().namespace(), pages);
                if self.hidden.is_none() {
                    self.hidden = Some(self.pool.parts_mut().0.hide(scope));
                }
            }
            Step::Show => {
                if let Some(hidden) = self.hidden.take() {
                    self.pool.parts_mut().0.show(&hidden);
                }
            }
            Step::Reset => self.pool.reset(),
        }
        self.pool.check().expect("the second count agrees");
    }

    /// All that later decisions depend on: the blocks by age, the holes, the counters and what was evicted.
    fn state(&self) -> String {
        let blocks: Vec<_> = self.pool.view().collect();
        let holes = self.pool.arena().holes();
        let counts = self.pool.counts();
        format!("{blocks:?} {holes:?} {counts:?} {:?}", self.evicted)
    }
}

proptest! {
    #[test]
    fn stores_that_follow_trails_decide_as_stores_that_walk_their_whole_sequence(
        steps in vec(step(), 1..160),
        policy in prop_oneof![Just("pieces=2"), Just("pieces=0"), Just("eviction=arc")],
    ) {
        let (mut trails, mut walks) = (Stored::new(policy, true), Stored::new(policy, false));
        for step in &steps {
            trails.take(step);
            walks.take(step);
            assert_eq!(trails.state(), walks.state(), "after {step:?}");
        }
    }
}
