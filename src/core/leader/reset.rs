//! Resets: pages are removed from the pool, then from every inventory, and then the reset is answered.
//!
//! A reset may cover every page of a large arena, so it runs in slices, with other events in between: one slice in the
//! step that requests it, the next ones by a timer. From that first step on no lookup finds a page of the reset. The
//! slices visit every block twice: first they count the holders of pages, and the reset is refused if there is any;
//! then they remove the pages. Each shard receives one request over one connection to remove the pages from its
//! inventory.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::event::Effect;
use crate::refusal::Refusal;
use crate::sweep::Sweep;
use kvferry_types::{Answer, Generation, OpId, ResetId, ResetScope, Scope, Shard, Time, WorkerId};

use super::tier::Tier;
use super::{Due, Leader, Timer};

/// Resets of all engines that are not answered, at most. More are refused.
pub const RESETS_OPEN_MAX: usize = 64;
/// Pages that open resets name one by one, at most. Each takes up to
/// [`PAGE_SET_BYTES_PER_PAGE_MAX`](kvferry_types::PAGE_SET_BYTES_PER_PAGE_MAX) bytes: 60 MiB, for as many pages as 16 of
/// the largest messages can name.
pub const RESET_PAGES_OPEN_MAX: usize = 1 << 21;
/// Pages that a slice of a reset visits, unless the settings say otherwise: a fraction of a millisecond.
pub const RESET_SLICE_PAGES: u32 = 4096;
/// Time between two slices, in which other events are handled.
const RESET_PAUSE: Duration = Duration::from_micros(500);

/// Progress of the leader's own part of a reset.
#[derive(Debug)]
enum Stage {
    /// Counts the holders of pages.
    Looking { sweep: Sweep, holders: u64 },
    /// Removes pages from the pool.
    Forgetting(Sweep),
    /// All pages are removed from the pool; the shards remove them from their inventories.
    Striking,
}

/// A reset that has not been answered.
#[derive(Debug)]
pub(super) struct Reset {
    due: Due,
    scope: Scope,
    /// The last store before the reset. Pages of later stores stay listed, because a strike may be repeated after new
    /// pages of the same scope were stored.
    through: Generation,
    stage: Stage,
    pages: u32,
    /// Stores of these pages that were in flight at the reset and have not ended.
    ending: BTreeSet<Generation>,
    /// Shards that have not confirmed that the pages are removed.
    missing: BTreeSet<Shard>,
    /// The worker that received the request for a shard, and whose connection has not been lost since.
    asked: BTreeMap<Shard, WorkerId>,
}

impl Leader {
    /// Begins a reset; its first slice runs at the end of this step.
    pub(super) fn reset(&mut self, due: Due, scope: ResetScope) -> Result<(), Refusal> {
        self.room_for_reset(&scope)?;
        let scope = self.scope(scope);
        let Some(pool) = self.tier.as_mut().and_then(Tier::serving_mut) else {
            return Err(match self.workers.any_replica() {
                true => Refusal::Reading,
                false => self.workers.not_ready(),
            });
        };
        let sweep = pool.begin_sweep(scope.clone());
        self.next_reset += 1;
        let id = ResetId(self.next_reset);
        let reset = Reset {
            due,
            scope,
            through: Generation(self.next_id),
            stage: Stage::Looking { sweep, holders: 0 },
            pages: 0,
            ending: BTreeSet::new(),
            missing: self.workers.shards().collect(),
            asked: BTreeMap::new(),
        };
        self.timers.insert((due.deadline, Timer::Reset(id)));
        self.resets.insert(id, reset);
        Ok(())
    }

    /// Refuses a reset beyond the limits on all open resets together.
    fn room_for_reset(&self, scope: &ResetScope) -> Result<(), Refusal> {
        if self.resets.len() >= RESETS_OPEN_MAX {
            return Err(Refusal::Limit {
                limit: "resets under way",
                max: RESETS_OPEN_MAX as u64,
            });
        }
        let named = match scope {
            ResetScope::Pages(_, hashes) => hashes.len(),
            ResetScope::Everything | ResetScope::Namespace(_) => 0,
        };
        let open = self.resets.values().map(|reset| reset.scope.named_pages());
        if open.sum::<usize>() + named > RESET_PAGES_OPEN_MAX {
            return Err(Refusal::Limit {
                limit: "pages named by resets under way",
                max: RESET_PAGES_OPEN_MAX as u64,
            });
        }
        Ok(())
    }

    /// The pages of the reset in every layout, because pages of engines that have left are still listed in the depots.
    fn scope(&self, scope: ResetScope) -> Scope {
        let namespace = |namespace: &[u8]| self.settings.anchor_key.namespace(namespace);
        match scope {
            ResetScope::Everything => Scope::Everything,
            ResetScope::Namespace(name) => Scope::Namespace(namespace(&name)),
            ResetScope::Pages(name, hashes) => {
                let pages = (0..hashes.len()).map(|page| hashes.fingerprint(page));
                Scope::Pages(namespace(&name), pages.collect())
            }
        }
    }

    /// Runs one slice at the end of a step, unless the next slice is scheduled.
    pub(super) fn go_on_with_resets(&mut self, now: Time, effects: &mut Vec<Effect>) {
        if !self.resets.is_empty() && self.resets_at.is_none() {
            self.resets_due(now, effects);
        }
    }

    /// Runs one slice, and sets the timer for the next one while there is work left.
    pub(super) fn resets_due(&mut self, now: Time, effects: &mut Vec<Effect>) {
        self.resets_at = None;
        let slice = self.settings.reset_slice_pages.max(1);
        let mut budget = slice;
        while budget > 0
            && let Some(id) = self.next_reset_to_do()
        {
            let before = budget;
            self.advance_reset(now, id, &mut budget, effects);
            // An empty pool costs no budget: take off one page all the same, so that the loop ends.
            budget = budget.min(before - 1);
        }
        if budget < slice {
            self.counts.reset_slices += 1;
            self.counts.largest_reset_slice_pages = self
                .counts
                .largest_reset_slice_pages
                .max(u64::from(slice - budget));
        }
        if self.next_reset_to_do().is_some() {
            let at = now + RESET_PAUSE;
            self.resets_at = Some(at);
            self.timers.insert((at, Timer::Resets));
        }
    }

    /// The first reset that the leader itself can advance now.
    fn next_reset_to_do(&self) -> Option<ResetId> {
        let mut workers = None;
        // Copies into a closing pool are listed when they end, so they must have ended before the pages are removed
        // from the inventories.
        let closes = self.closing_pool().is_some();
        let mut to_do = |reset: &Reset| match reset.stage {
            Stage::Looking { .. } | Stage::Forgetting(_) => !closes,
            Stage::Striking => {
                let workers = workers.get_or_insert_with(|| self.workers.one_of_each_shard());
                self.to_be_asked(reset, workers).is_some()
            }
        };
        let mut resets = self.resets.iter();
        resets.find(|(_, reset)| to_do(reset)).map(|(id, _)| *id)
    }

    /// A worker of a shard that has not confirmed the reset and has no request in flight for it.
    fn to_be_asked(&self, reset: &Reset, workers: &[Option<WorkerId>]) -> Option<WorkerId> {
        if !reset.ending.is_empty() {
            return None;
        }
        let mut workers = workers.iter().flatten().copied();
        workers.find(|worker| {
            let shard = self.workers.shard_of(*worker);
            reset.missing.contains(&shard) && !reset.asked.contains_key(&shard)
        })
    }

    fn advance_reset(
        &mut self,
        now: Time,
        id: ResetId,
        budget: &mut u32,
        effects: &mut Vec<Effect>,
    ) {
        let workers = self.workers.one_of_each_shard();
        let Some(reset) = self.resets.get(&id) else {
            return;
        };
        let ask = match reset.stage {
            Stage::Striking => self.to_be_asked(reset, &workers),
            _ => None,
        };
        let Some(reset) = self.resets.get_mut(&id) else {
            return;
        };
        let Some(pool) = self.tier.as_mut().and_then(Tier::serving_mut) else {
            // The pool was closed: no page of it is found any longer, and its last copies have ended.
            if let Some(worker) = ask {
                self.strike(id, worker, budget, effects);
            } else {
                reset.stage = Stage::Striking;
            }
            return self.struck_out(now, id, effects);
        };
        match &mut reset.stage {
            Stage::Looking { sweep, holders } => {
                *holders += pool.count_holders(sweep, budget);
                if !sweep.is_over() {
                    return;
                }
                let holders = *holders;
                if holders > 0 {
                    return self.refuse_reset(id, Refusal::Leased { holders }, effects);
                }
                sweep.again();
                let over = Stage::Striking;
                if let Stage::Looking { sweep, .. } = std::mem::replace(&mut reset.stage, over) {
                    reset.stage = Stage::Forgetting(sweep);
                }
            }
            Stage::Forgetting(sweep) => {
                let mut filling = Vec::new();
                reset.pages += pool.forget_next(sweep, budget, &mut filling);
                if sweep.is_over() {
                    pool.end_sweep(sweep);
                    reset.stage = Stage::Striking;
                }
                reset.ending.extend(filling.iter().copied());
                filling.sort_unstable();
                for generation in filling {
                    self.cancel(OpId(generation.0));
                }
                // After a new pool has opened, the last shard may have answered between two slices.
                self.struck_out(now, id, effects);
            }
            Stage::Striking => {
                if let Some(worker) = ask {
                    self.strike(id, worker, budget, effects);
                }
            }
        }
    }

    /// Requests the removal from one worker. The pages that the message names count toward the budget.
    fn strike(
        &mut self,
        id: ResetId,
        worker: WorkerId,
        budget: &mut u32,
        effects: &mut Vec<Effect>,
    ) {
        let shard = self.workers.shard_of(worker);
        if let Some(reset) = self.resets.get_mut(&id) {
            reset.asked.insert(shard, worker);
            let named = u32::try_from(reset.scope.named_pages()).unwrap_or(u32::MAX);
            *budget = budget.saturating_sub(named);
            effects.push(Effect::Strike {
                worker,
                id,
                scope: reset.scope.clone(),
                through: reset.through,
                deadline: reset.due.deadline,
            });
        }
    }

    /// The worker lost its connection, or answers none of the requests that it received before: its shards are
    /// requested again.
    pub(super) fn not_asked(&mut self, worker: WorkerId) {
        for reset in self.resets.values_mut() {
            reset.asked.retain(|_, asked| *asked != worker);
        }
    }

    /// A pool has opened with the pages that the depots list: starts to remove the pages of all open resets from that
    /// pool.
    pub(super) fn reset_again(&mut self) {
        let Some(pool) = self.tier.as_mut().and_then(Tier::serving_mut) else {
            return;
        };
        for reset in self.resets.values_mut() {
            reset.stage = Stage::Forgetting(pool.begin_sweep(reset.scope.clone()));
        }
    }

    /// A store has ended, whether its pages were published or not: resets that waited for it continue.
    pub(super) fn store_over(&mut self, generation: Generation) {
        for reset in self.resets.values_mut() {
            reset.ending.remove(&generation);
        }
    }

    /// A worker has removed the pages from the inventory of its shard.
    pub(super) fn struck(
        &mut self,
        now: Time,
        worker: WorkerId,
        id: ResetId,
        effects: &mut Vec<Effect>,
    ) {
        let shard = self.workers.shard_of(worker);
        if let Some(reset) = self.resets.get_mut(&id)
            && reset.ending.is_empty()
            && reset.asked.contains_key(&shard)
        {
            reset.missing.remove(&shard);
            self.struck_out(now, id, effects);
        }
    }

    /// Answers a reset for which no work is left.
    fn struck_out(&mut self, now: Time, id: ResetId, effects: &mut Vec<Effect>) {
        let done = self.resets.get(&id).is_some_and(|reset| {
            matches!(reset.stage, Stage::Striking)
                && reset.missing.is_empty()
                && reset.ending.is_empty()
        });
        if done {
            self.end_reset(id, effects);
            self.read_anew(now, effects);
        }
    }

    fn end_reset(&mut self, id: ResetId, effects: &mut Vec<Effect>) {
        if let Some(reset) = self.take_reset(id) {
            let answer = Ok(Answer::Reset { pages: reset.pages });
            self.answer(reset.due.engine, reset.due.id, answer, effects);
        }
    }

    fn refuse_reset(&mut self, id: ResetId, refusal: Refusal, effects: &mut Vec<Effect>) {
        if let Some(reset) = self.take_reset(id) {
            self.answer(reset.due.engine, reset.due.id, Err(refusal), effects);
        }
    }

    /// Takes a reset out; no page is hidden for it any longer.
    fn take_reset(&mut self, id: ResetId) -> Option<Reset> {
        let reset = self.resets.remove(&id)?;
        self.timers.remove(&(reset.due.deadline, Timer::Reset(id)));
        if let (Some(pool), Stage::Looking { sweep, .. } | Stage::Forgetting(sweep)) =
            (self.tier.as_mut().and_then(Tier::serving_mut), &reset.stage)
        {
            pool.end_sweep(sweep);
        }
        Some(reset)
    }

    /// The deadline of a reset has passed: pages that were removed stay removed from the pool, but may be found again
    /// after a restart.
    pub(super) fn reset_late(&mut self, id: ResetId, effects: &mut Vec<Effect>) {
        let Some(reset) = self.resets.get(&id) else {
            return;
        };
        let late = match reset.stage {
            Stage::Striking => Refusal::ResetUnconfirmed {
                shards: reset.missing.len(),
            },
            Stage::Looking { .. } | Stage::Forgetting(_) => Refusal::ResetUnfinished,
        };
        self.refuse_reset(id, late, effects);
    }
}
