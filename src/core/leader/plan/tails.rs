//! Random stores and lookups of tails, against a list of what every arena page holds.

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::index::anchor::AnchorKey;
use crate::index::blocks::{BlockIndex, Hidden};
use crate::index::shard_set::ShardSet;
use crate::pool::tests::domain_of;
use crate::pool::{BlockRun, ReservationKind};
use kvferry_types::{Fingerprint, PageHashes, Ratio, Scope, Shard};

const SEQUENCES: usize = 4;
const PAGES: u32 = 24;

/// Page hashes of a sequence: two sequences have the same pages up to the one at which they diverge.
fn pages_of(sequence: usize) -> Vec<Fingerprint> {
    let shared = [0, PAGES, 9, 14][sequence];
    let of = |page| if page < shared { 1 } else { sequence + 1 };
    (0..PAGES)
        .map(|page| Fingerprint(u128::from(page) << 8 | of(page) as u128))
        .collect()
}

#[derive(Debug, Clone)]
enum Step {
    Store(usize, Range<u32>),
    End { which: usize, complete: bool },
    LookUp(usize, u32),
    Hold(usize, u32),
    Release,
    Cut(usize),
    Hide(usize),
    Show,
    Forget(usize),
    Reset,
}

fn step() -> impl Strategy<Value = Step> {
    let sequence = || 0..SEQUENCES;
    let part = || (0..PAGES, 1..12_u32).prop_map(|(from, pages)| from..(from + pages).min(PAGES));
    prop_oneof![
        12 => (sequence(), part()).prop_map(|(sequence, pages)| Step::Store(sequence, pages)),
        14 => (0..8_usize, prop::bool::weighted(0.9))
            .prop_map(|(which, complete)| Step::End { which, complete }),
        8 => (sequence(), 0..PAGES).prop_map(|(sequence, from)| Step::LookUp(sequence, from)),
        2 => (sequence(), 0..PAGES).prop_map(|(sequence, from)| Step::Hold(sequence, from)),
        2 => Just(Step::Release),
        1 => (0..40_usize).prop_map(Step::Cut),
        1 => sequence().prop_map(Step::Hide),
        1 => Just(Step::Show),
        1 => sequence().prop_map(Step::Forget),
        1 => prop::bool::weighted(0.1).prop_map(|reset| match reset {
            true => Step::Reset,
            false => Step::Release,
        }),
    ]
}

/// What an arena page holds, as far as lookups are concerned.
#[derive(Debug, Clone, Copy)]
struct Known {
    page: (u8, Fingerprint),
    /// The copy into it has not ended.
    filling: Option<TransferId>,
    /// Lookups do not find it any longer.
    forgotten: bool,
}

struct World {
    pool: Pool,
    next_id: u64,
    known: BTreeMap<u32, Known>,
    open: Vec<TransferId>,
    held: Vec<Pin>,
    hidden: Option<Hidden>,
}

/// The namespace of a sequence: the second one has the pages of the first in another namespace.
fn space(sequence: usize) -> u8 {
    u8::from(sequence == 1)
}

impl World {
    fn new(ratio: u32) -> Self {
        let ratio = Ratio::new(ratio).expect("in bounds");
        Self {
            pool: Pool::new(40, ratio).with_page_index(&AnchorKey::new([1; 32])),
            next_id: 0,
            known: BTreeMap::new(),
            open: Vec::new(),
            held: Vec::new(),
            hidden: None,
        }
    }

    /// True if an arena page lies in a block that is hidden.
    fn is_hidden(&self, at: u32) -> bool {
        let Some(hidden) = &self.hidden else {
            return false;
        };
        let mut blocks = self.pool.view();
        let block = blocks.find(|block| {
            let total = block.fingerprints.len() as u32;
            (block.start..block.start + total).contains(&at)
        });
        block.is_some_and(|block| {
            hidden.contains(self.pool.blocks(), self.pool.blocks().get(block.index))
        })
    }

    fn visible(&self, page: (u8, Fingerprint)) -> impl Iterator<Item = &Known> {
        let same = self
            .known
            .iter()
            .filter(move |(_, known)| known.page == page);
        same.filter(|(at, known)| !known.forgotten && !self.is_hidden(**at))
            .map(|(_, known)| known)
    }

    fn is_ready(&self, page: (u8, Fingerprint)) -> bool {
        self.visible(page).any(|known| known.filling.is_none())
    }

    fn store(&mut self, sequence: usize, pages: Range<u32>) {
        let space = space(sequence);
        let all = pages_of(sequence);
        let named = &all[pages.start as usize..pages.end as usize];
        let hashes = PageHashes::of_fingerprints(named.iter().copied());
        let count = named.len() as u32;
        let present = named
            .iter()
            .filter(|page| self.visible((space, **page)).next().is_some())
            .count();
        let passed: Vec<Fingerprint> = named
            .iter()
            .copied()
            .take_while(|page| self.is_ready((space, *page)))
            .collect();
        let walk = PlanWalk {
            from: 0,
            wanted: 0..count,
            trail: None,
            offer: None,
            around: LooksAround::default(),
        };
        let domain = domain_of(space);
        let into = &mut self.next_id;
        let planned = plan(&mut self.pool, (&domain, hashes.view()), walk, into);
        let evicted: u32 = planned.evicted.iter().map(|run| run.count).sum();
        if evicted == 0 && planned.refused.is_empty() {
            let reserved: u32 = planned.reserved.iter().map(|piece| piece.run.count).sum();
            assert_eq!(
                reserved,
                count - present as u32,
                "only missing pages are stored"
            );
        }
        for run in &planned.evicted {
            for at in run.start..run.start + run.count {
                let gone = self.known.remove(&at);
                assert!(
                    gone.is_some_and(|known| known.filling.is_none()),
                    "page {at}"
                );
            }
        }
        // A page that is ready in one block and filling in another may be waited for in the second one.
        for page in passed {
            assert!(
                self.visible((space, page)).next().is_some(),
                "{page:?} was evicted for the next page"
            );
        }
        for piece in planned.reserved {
            for offset in 0..piece.run.count {
                let page = (space, named[(piece.position + offset) as usize]);
                assert_eq!(self.visible(page).count(), 0, "{page:?} is stored twice");
                let known = Known {
                    page,
                    filling: Some(piece.transfer),
                    forgotten: false,
                };
                let before = self.known.insert(piece.run.start + offset, known);
                assert!(
                    before.is_none_or(|before| before.forgotten),
                    "a page in use"
                );
            }
            self.pool.start_filling(piece.transfer, ShardSet::first(1));
            self.open.push(piece.transfer);
        }
    }

    fn end(&mut self, which: usize, complete: bool) {
        if self.open.is_empty() {
            return;
        }
        let transfer = self.open.swap_remove(which % self.open.len());
        let published = self.pool.ended(transfer, Shard(0), complete) == Some(true);
        self.known
            .retain(|_, known| match known.filling == Some(transfer) {
                true => published,
                false => true,
            });
        for known in self
            .known
            .values_mut()
            .filter(|known| known.filling == Some(transfer))
        {
            known.filling = None;
        }
    }

    /// Looks up a tail: exactly the pages that are ready are found, and where they lie.
    fn look_up(&mut self, sequence: usize, from: u32) -> Vec<BlockRun> {
        let space = space(sequence);
        let named = pages_of(sequence).split_off(from as usize);
        let hashes = PageHashes::of_fingerprints(named.iter().copied());
        let mut runs = Vec::new();
        let reach = self
            .pool
            .walk(&domain_of(space), hashes.view(), 0, &mut runs);
        let ready = named
            .iter()
            .take_while(|page| self.is_ready((space, **page)));
        assert_eq!(
            reach.end as usize,
            ready.count(),
            "pages of a tail from {from} on"
        );
        let mut position = 0;
        for run in &runs {
            assert_eq!(run.position, position);
            for at in run.position..run.position + run.pages {
                let known = &self.known[&self.pool.arena_page(run, at)];
                assert_eq!(
                    known.page,
                    (space, named[at as usize]),
                    "the bytes of page {at}"
                );
                assert!(known.filling.is_none(), "page {at} is being written");
            }
            position += run.pages;
        }
        self.pool.use_runs(&runs);
        let (mut trail, mut around) = (Trail::default(), Vec::new());
        let all = 0..named.len() as u32;
        let domain = domain_of(space);
        self.pool.walk_around(
            &domain,
            hashes.view(),
            &all,
            (&mut trail, &mut LooksAround::default()),
            &mut around,
        );
        let found: u32 = around.iter().map(|run| run.pages).sum();
        let ready = named.iter().filter(|page| self.is_ready((space, **page)));
        assert!(found as usize <= ready.count() && found >= position);
        runs
    }

    /// Forgets the pages of blocks for which `forgets` says so, where the pool does the same.
    fn forget(&mut self, forgets: impl Fn(&Pool, BlockIndex) -> bool) {
        for block in self.pool.view() {
            if forgets(&self.pool, block.index) {
                for at in block.start..block.start + block.fingerprints.len() as u32 {
                    if let Some(known) = self.known.get_mut(&at) {
                        known.forgotten = true;
                    }
                }
            }
        }
    }

    fn cut(&mut self, which: usize) {
        let all: Vec<(u32, u32)> = self
            .pool
            .view()
            .map(|block| (block.index, block.ready))
            .collect();
        let Some((index, ready)) = all.get(which % all.len().max(1)).copied() else {
            return;
        };
        let block = self.pool.blocks().get(index);
        let (start, retired) = (block.start, block.retired);
        let keep = which as u32 % ready.max(1);
        if retired || keep >= ready {
            return;
        }
        let idle = block.pins == 0 && block.filling().is_none();
        if idle && keep > 0 {
            (start + keep..start + ready).for_each(|at| {
                self.known.remove(&at);
            });
        } else {
            self.forget(|_, other| other == index);
        }
        let reference = self.pool.blocks().reference(index);
        self.pool.cut(reference, start + keep);
    }

    fn apply(&mut self, step: Step) {
        match step {
            Step::Store(sequence, pages) => self.store(sequence, pages),
            Step::End { which, complete } => self.end(which, complete),
            Step::LookUp(sequence, from) => drop(self.look_up(sequence, from)),
            Step::Hold(sequence, from) => {
                for run in self.look_up(sequence, from) {
                    self.held.push(self.pool.pin(run.block, run.through()));
                }
            }
            Step::Release => {
                let held = std::mem::take(&mut self.held);
                held.into_iter().for_each(|pin| self.pool.unpin(pin));
            }
            Step::Cut(which) => self.cut(which),
            Step::Hide(sequence) => {
                if self.hidden.is_none() {
                    let scope = Scope::Namespace(domain_of(space(sequence)).id().namespace());
                    self.hidden = Some(self.pool.parts_mut().0.hide(scope));
                }
            }
            Step::Show => {
                if let Some(hidden) = self.hidden.take() {
                    self.pool.parts_mut().0.show(&hidden);
                }
            }
            Step::Forget(sequence) => {
                let scope = Scope::Namespace(domain_of(space(sequence)).id().namespace());
                let mut sweep = self.pool.begin_sweep(scope);
                let id = domain_of(space(sequence)).id();
                self.forget(|pool, block| pool.blocks().get(block).domain == id);
                self.pool
                    .remove_next(&mut sweep, &mut 1_000, &mut Vec::new());
                self.pool.end_sweep(&sweep);
            }
            Step::Reset => {
                self.forget(|_, _| true);
                self.pool.reset();
            }
        }
        self.known.retain(|at, known| {
            let mut blocks = self.pool.view();
            !known.forgotten
                || blocks.any(|block| {
                    let total = block.fingerprints.len() as u32;
                    (block.start..block.start + total).contains(at)
                })
        });
        assert_eq!(self.pool.check(), Ok(()));
    }
}

/// A store of a tail begins in the middle of a block, fills the block up, and goes on where the whole sequence would.
#[test]
fn the_store_of_a_tail_grows_the_block_that_it_continues() {
    let mut world = World::new(4);
    world.store(0, 0..6);
    for _ in 0..2 {
        world.end(0, true);
    }
    let before: Vec<u32> = world.known.keys().copied().collect();
    let named = PageHashes::of_fingerprints(pages_of(0)[5..14].iter().copied());
    let walk = PlanWalk {
        from: 0,
        wanted: 0..9,
        trail: None,
        offer: None,
        around: LooksAround::default(),
    };
    let mut next_id = 100;
    let sequence = (&domain_of(0), named.view());
    let planned = plan(&mut world.pool, sequence, walk, &mut next_id);
    let pieces = planned.reserved.iter();
    let pieces: Vec<_> = pieces
        .map(|one| (one.position, one.run.count, one.kind))
        .collect();
    let (new, grown) = (ReservationKind::New, ReservationKind::Growth);
    assert_eq!(pieces, [(1, 2, grown), (3, 4, new), (7, 2, new)]);
    assert_eq!(planned.reserved[0].run.start, before[5] + 1);
    assert_eq!(planned.present_pages, 1);
    assert_eq!(world.pool.check(), Ok(()));
}

/// While a reset that will be refused hides a block, its pages are stored again.
#[test]
fn a_readable_page_inside_a_block_is_found_while_another_block_with_it_fills() {
    let mut world = World::new(4);
    world.store(0, 0..4);
    world.end(0, true);
    world.apply(Step::Hide(0));
    world.store(0, 2..4);
    world.apply(Step::Show);
    assert_eq!(world.look_up(0, 2).len(), 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn tails_find_exactly_the_pages_that_are_present(
        ratio in prop_oneof![Just(1_u32), Just(4), Just(8)],
        steps in vec(step(), 1..120),
    ) {
        let mut world = World::new(ratio);
        for step in steps {
            world.apply(step);
        }
    }
}
