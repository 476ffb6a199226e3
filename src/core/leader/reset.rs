//! Resets: pages are removed from the pools, then from every inventory, and then the reset is answered.
//!
//! A reset may cover every page of a large arena, so it runs in slices, with other events in between: one slice in the
//! step that requests it, the next ones by a timer. From that first step on no lookup finds a page of the reset. The
//! slices visit every block twice: first they count the holders of pages, and the reset is refused if there is any;
//! then they remove the pages. Each shard receives one request over one connection to remove the pages from its
//! inventory.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::Contradiction;
use crate::leader::event::LeaderEffect;
use crate::leader::refusal::Refusal;
use crate::pool::sweep::Sweep;
use kvferry_types::{
    Answer, PagesBelow, PerTier, ResetAnswer, ResetId, ResetScope, Scope, Shard, TierId, Time,
    TransferId, WorkerId,
};

use super::by_shard::Confirmations;
use super::moves::Moves;
use super::roster::Roster;
use super::tier::Tiers;
use super::timers::{Timer, Timers};
use super::{Leader, ReplyTo};

/// Resets of all engines that are not answered, at most. More are refused.
pub const RESETS_OPEN_MAX: usize = 64;
/// Pages that open resets name one by one, at most. Each takes up to
/// [`PAGE_SET_BYTES_PER_PAGE_MAX`](kvferry_types::PAGE_SET_BYTES_PER_PAGE_MAX) bytes: 60 MiB, for as many pages as 16
/// of the largest messages can name.
pub const RESET_PAGES_OPEN_MAX: usize = 1 << 21;
/// Pages that a slice of a reset visits, unless the settings have another number: a fraction of a millisecond.
pub const RESET_SLICE_PAGES: u32 = 4096;
/// Time between two slices, in which other events are handled.
const RESET_PAUSE: Duration = Duration::from_micros(500);

/// Progress of the leader's own part of a reset.
#[derive(Debug)]
enum ResetStage {
    /// Counts the holders of pages.
    CountingHolders {
        sweeps: PerTier<Sweep>,
        holders: u64,
    },
    /// Removes pages from the pools.
    RemovingPages(PerTier<Sweep>),
    /// All pages are removed from the pools; the shards remove them from their inventories.
    Invalidating,
}

impl ResetStage {
    /// The sweeps over the pools.
    fn sweeps(&self) -> Option<&PerTier<Sweep>> {
        match self {
            Self::CountingHolders { sweeps, .. } | Self::RemovingPages(sweeps) => Some(sweeps),
            Self::Invalidating => None,
        }
    }
}

/// A reset that has not been answered.
#[derive(Debug)]
struct OpenReset {
    reply_to: ReplyTo,
    scope: Scope,
    /// The tier that forgets the pages; `None` for all tiers.
    tier: Option<TierId>,
    /// The last store before the reset. Pages of later stores stay listed, because an invalidation may be repeated
    /// after new pages of the same scope were stored.
    through: TransferId,
    stage: ResetStage,
    /// Pages that were removed, once for each tier that had them, and those of them that tiers below host memory had.
    pages: u32,
    below_pages: PagesBelow,
    /// Stores of these pages that were in flight at the reset and have not ended.
    ending: BTreeSet<TransferId>,
    /// The shards' confirmations that the pages are removed.
    confirmations: Confirmations,
}

impl OpenReset {
    /// A worker of a shard that has not confirmed the reset and has no request in flight for it.
    fn next_worker(&self, roster: &Roster, workers: &[Option<WorkerId>]) -> Option<WorkerId> {
        match self.ending.is_empty() {
            true => self.confirmations.next_worker(roster, workers),
            false => None,
        }
    }

    /// True when no work is left.
    fn is_over(&self) -> bool {
        matches!(self.stage, ResetStage::Invalidating)
            && self.confirmations.missing() == 0
            && self.ending.is_empty()
    }
}

/// The result of a slice of one reset.
enum Advance {
    /// Nothing yet.
    Nothing,
    /// Pages of the reset have holders: the reset is refused.
    Refuse { holders: u64 },
    /// Blocks were removed; these copies into pages of the reset are cancelled.
    Removed { cancel: Vec<TransferId> },
    /// A worker removes the pages from its inventory.
    Invalidate(WorkerId),
}

/// True if every sweep over a pool that serves is over.
fn are_over(sweeps: &PerTier<Sweep>, tiers: &Tiers) -> bool {
    let mut sweeps = sweeps.iter();
    sweeps.all(|(tier, sweep)| sweep.is_over() || tiers.serving(tier).is_none())
}

impl Tiers {
    /// Begins a walk over the pages of a scope in each pool that serves, or in that of one tier.
    fn begin_sweeps(&mut self, scope: &Scope, only: Option<TierId>) -> PerTier<Sweep> {
        let serving = self.all_serving();
        let serving = serving.filter(|(tier, _)| only.is_none_or(|only| only == *tier));
        serving
            .map(|(tier, pool)| (tier, pool.begin_sweep(scope.clone())))
            .collect()
    }

    /// True if a pool of these walks serves.
    fn any_serves(&self, sweeps: &PerTier<Sweep>) -> bool {
        sweeps.tiers().any(|tier| self.serving(tier).is_some())
    }

    /// Ends walks: the pages of their scope are found again.
    fn end_sweeps(&mut self, sweeps: &PerTier<Sweep>) {
        for (tier, pool) in self.all_serving() {
            if let Some(sweep) = sweeps.get(tier) {
                pool.end_sweep(sweep);
            }
        }
    }
}

/// The resets that are not answered.
#[derive(Debug, Default)]
pub(super) struct Resets {
    open: BTreeMap<ResetId, OpenReset>,
    /// When the next slice is due, while one is scheduled.
    next_slice: Option<Time>,
    last: u64,
}

impl Resets {
    /// Refuses a reset beyond the limits on all open resets together.
    fn room_for(&self, scope: &ResetScope) -> Result<(), Refusal> {
        if self.open.len() >= RESETS_OPEN_MAX {
            return Err(Refusal::Limit {
                limit: "resets under way",
                max: RESETS_OPEN_MAX as u64,
            });
        }
        let named = match scope {
            ResetScope::Pages(_, hashes) => hashes.len(),
            ResetScope::Everything | ResetScope::Namespace(_) => 0,
        };
        let open = self.open.values().map(|reset| reset.scope.named_pages());
        if open.sum::<usize>() + named > RESET_PAGES_OPEN_MAX {
            return Err(Refusal::Limit {
                limit: "pages named by resets under way",
                max: RESET_PAGES_OPEN_MAX as u64,
            });
        }
        Ok(())
    }

    fn begin(
        &mut self,
        reply_to: ReplyTo,
        (scope, tier): (Scope, Option<TierId>),
        through: TransferId,
        sweeps: PerTier<Sweep>,
        roster: &Roster,
        timers: &mut Timers,
    ) {
        self.last += 1;
        let id = ResetId(self.last);
        let reset = OpenReset {
            reply_to,
            scope,
            tier,
            through,
            stage: ResetStage::CountingHolders { sweeps, holders: 0 },
            pages: 0,
            below_pages: PagesBelow::default(),
            ending: BTreeSet::new(),
            confirmations: Confirmations::new(roster),
        };
        timers.set(reply_to.deadline, Timer::Reset(id));
        self.open.insert(id, reset);
    }

    /// The first reset that the leader itself can advance now. `closes`: a pool closes. Copies into a closing pool are
    /// listed when they end, so they must have ended before the pages are removed from the inventories.
    fn next_to_do(&self, closes: bool, roster: &Roster) -> Option<ResetId> {
        let mut workers = None;
        let mut to_do = |reset: &OpenReset| match reset.stage {
            ResetStage::CountingHolders { .. } | ResetStage::RemovingPages(_) => !closes,
            ResetStage::Invalidating => {
                let workers = workers.get_or_insert_with(|| roster.worker_of_each_shard());
                reset.next_worker(roster, workers).is_some()
            }
        };
        let mut resets = self.open.iter();
        resets.find(|(_, reset)| to_do(reset)).map(|(id, _)| *id)
    }

    /// Runs a slice of one reset. The pages of a pool that does not serve any longer are not found.
    fn advance(
        &mut self,
        id: ResetId,
        (tiers, moves): (&mut Tiers, &Moves),
        roster: &Roster,
        budget: &mut u32,
    ) -> Advance {
        let Some(reset) = self.open.get_mut(&id) else {
            return Advance::Nothing;
        };
        let worker = match reset.stage {
            ResetStage::Invalidating => reset.next_worker(roster, &roster.worker_of_each_shard()),
            ResetStage::CountingHolders { .. } | ResetStage::RemovingPages(_) => None,
        };
        if let Some(worker) = worker {
            return Advance::Invalidate(worker);
        }
        let mut filling = Vec::new();
        match &mut reset.stage {
            ResetStage::CountingHolders { sweeps, .. } if !tiers.any_serves(sweeps) => {
                reset.stage = ResetStage::Invalidating;
                Advance::Removed { cancel: filling }
            }
            ResetStage::CountingHolders { sweeps, holders } => {
                for (tier, sweep) in sweeps.iter_mut() {
                    if let Some(pool) = tiers.serving(tier) {
                        *holders += pool.count_holders(sweep, budget, &moves.pins_of(tier));
                    }
                }
                if !are_over(sweeps, tiers) {
                    return Advance::Nothing;
                }
                let holders = *holders;
                if holders > 0 {
                    return Advance::Refuse { holders };
                }
                let mut sweeps = std::mem::take(sweeps);
                sweeps.iter_mut().for_each(|(_, sweep)| sweep.again());
                reset.stage = ResetStage::RemovingPages(sweeps);
                Advance::Nothing
            }
            ResetStage::RemovingPages(sweeps) => {
                for (tier, sweep) in sweeps.iter_mut() {
                    if let Some(pool) = tiers.serving_mut(tier) {
                        let removed = pool.remove_next(sweep, budget, &mut filling);
                        reset.pages += removed;
                        reset.below_pages.add(tier, removed);
                    }
                }
                reset.ending.extend(filling.iter().copied());
                filling.sort_unstable();
                if are_over(sweeps, tiers) {
                    tiers.end_sweeps(sweeps);
                    reset.stage = ResetStage::Invalidating;
                }
                Advance::Removed { cancel: filling }
            }
            ResetStage::Invalidating => Advance::Nothing,
        }
    }

    /// Requests the removal from one worker. The pages that the message names count toward the budget.
    fn invalidate(
        &mut self,
        id: ResetId,
        worker: WorkerId,
        roster: &Roster,
        budget: &mut u32,
    ) -> Option<LeaderEffect> {
        let reset = self.open.get_mut(&id)?;
        reset
            .confirmations
            .requested(roster.shard_of(worker), worker);
        let named = u32::try_from(reset.scope.named_pages()).unwrap_or(u32::MAX);
        *budget = budget.saturating_sub(named);
        Some(LeaderEffect::Invalidate {
            worker,
            id,
            scope: reset.scope.clone(),
            tier: reset.tier,
            through: reset.through,
            deadline: reset.reply_to.deadline,
        })
    }

    /// The worker lost its connection, or answers none of the requests that it received before: its shards are
    /// requested again.
    pub(super) fn request_again(&mut self, worker: WorkerId) {
        for reset in self.open.values_mut() {
            reset.confirmations.request_again(worker);
        }
    }

    /// A store has ended, whether its pages were published or not: resets that waited for it continue.
    pub(super) fn store_ended(&mut self, transfer: TransferId) {
        for reset in self.open.values_mut() {
            reset.ending.remove(&transfer);
        }
    }

    /// The last reset that was begun.
    #[cfg(test)]
    pub(super) fn last(&self) -> ResetId {
        ResetId(self.last)
    }

    /// A worker has confirmed a reset for its shard. Returns false if it was not requested of that worker, or if stores of
    /// the reset are in flight.
    fn confirmed(&mut self, id: ResetId, shard: Shard, worker: WorkerId) -> bool {
        let Some(reset) = self.open.get_mut(&id) else {
            return false;
        };
        reset.ending.is_empty() && reset.confirmations.confirmed(shard, worker)
    }

    /// Takes a reset out, with its timer; no page is hidden for it any longer.
    fn take(&mut self, id: ResetId, tiers: &mut Tiers, timers: &mut Timers) -> Option<OpenReset> {
        let reset = self.open.remove(&id)?;
        timers.clear(reset.reply_to.deadline, Timer::Reset(id));
        if let Some(sweeps) = reset.stage.sweeps() {
            tiers.end_sweeps(sweeps);
        }
        Some(reset)
    }

    /// Checks that every reset has work left. `Err` names the first contradiction.
    pub(super) fn check(&self) -> Result<(), Contradiction> {
        match self.open.iter().find(|(_, reset)| reset.is_over()) {
            None => Ok(()),
            Some((id, _)) => Err(format!("reset {} is over and not answered", id.0).into()),
        }
    }
}

impl Leader {
    /// Begins a reset; its first slice runs at the end of this step.
    pub(super) fn reset(
        &mut self,
        reply_to: ReplyTo,
        scope: ResetScope,
        tier: Option<TierId>,
    ) -> Result<(), Refusal> {
        if let Some(unknown) = tier.filter(|tier| !self.settings.tiers.contains(tier)) {
            return Err(Refusal::Invalid {
                field: "tier",
                value: unknown.to_string(),
                remedy: "name a tier that the leader has, or none for all tiers",
            });
        }
        // The workers could not remove the pages from the list on that disk, and would find them again.
        let covers_disk = self.settings.tiers.contains(&TierId::Disk)
            && tier.is_none_or(|tier| tier == TierId::Disk);
        if covers_disk && !self.roster.is_writable(TierId::Disk) {
            return Err(Refusal::OnlyRead);
        }
        self.resets.room_for(&scope)?;
        let scope = self.scope(scope);
        let needed = tier.unwrap_or(TierId::Host);
        if self.tiers.serving(needed).is_none() {
            return Err(match self.roster.any_replica() {
                true => Refusal::Reading,
                false => self.roster.not_ready(),
            });
        }
        if covers_disk {
            self.takes_writes(TierId::Disk)?;
        }
        let sweeps = self.tiers.begin_sweeps(&scope, tier);
        let through = TransferId(self.next_id);
        self.resets.begin(
            reply_to,
            (scope, tier),
            through,
            sweeps,
            &self.roster,
            &mut self.timers,
        );
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
    pub(super) fn run_reset_slice(&mut self, now: Time, effects: &mut Vec<LeaderEffect>) {
        if !self.resets.open.is_empty() && self.resets.next_slice.is_none() {
            self.resets_due(now, effects);
        }
    }

    /// Runs one slice, and sets the timer for the next one while there is work left.
    pub(super) fn resets_due(&mut self, now: Time, effects: &mut Vec<LeaderEffect>) {
        self.resets.next_slice = None;
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
            self.resets.next_slice = Some(at);
            self.timers.set(at, Timer::Resets);
        }
    }

    fn next_reset_to_do(&self) -> Option<ResetId> {
        let closes = self.tiers.any_closes();
        self.resets.next_to_do(closes, &self.roster)
    }

    fn advance_reset(
        &mut self,
        now: Time,
        id: ResetId,
        budget: &mut u32,
        effects: &mut Vec<LeaderEffect>,
    ) {
        let advance = self
            .resets
            .advance(id, (&mut self.tiers, &self.moves), &self.roster, budget);
        match advance {
            Advance::Nothing => {}
            Advance::Refuse { holders } => {
                self.refuse_reset(id, Refusal::Leased { holders }, effects);
            }
            Advance::Removed { cancel } => {
                for transfer in cancel {
                    self.transfers.cancel(transfer);
                }
                // After a new pool has opened, the last shard may have answered between two slices.
                self.answer_if_over(now, id, effects);
            }
            Advance::Invalidate(worker) => {
                effects.extend(self.resets.invalidate(id, worker, &self.roster, budget));
            }
        }
    }

    /// The pool of a tier has opened with the pages that the depots list: the pages of all open resets are removed from
    /// that pool, too.
    pub(super) fn reset_again(&mut self, tier: TierId) {
        let Some(pool) = self.tiers.serving_mut(tier) else {
            return;
        };
        let covers = |reset: &&mut OpenReset| reset.tier.is_none_or(|only| only == tier);
        for reset in self.resets.open.values_mut().filter(covers) {
            let sweep = pool.begin_sweep(reset.scope.clone());
            match &mut reset.stage {
                ResetStage::CountingHolders { sweeps, .. } | ResetStage::RemovingPages(sweeps) => {
                    sweeps.insert(tier, sweep);
                }
                ResetStage::Invalidating => {
                    let sweeps = [(tier, sweep)].into_iter().collect();
                    reset.stage = ResetStage::RemovingPages(sweeps);
                }
            }
        }
    }

    /// A worker has removed the pages from the inventory of its shard.
    pub(super) fn invalidated(
        &mut self,
        now: Time,
        worker: WorkerId,
        id: ResetId,
        effects: &mut Vec<LeaderEffect>,
    ) {
        let shard = self.roster.shard_of(worker);
        if self.resets.confirmed(id, shard, worker) {
            self.answer_if_over(now, id, effects);
        }
    }

    /// Answers a reset for which no work is left.
    fn answer_if_over(&mut self, now: Time, id: ResetId, effects: &mut Vec<LeaderEffect>) {
        let reset = self.resets.open.get(&id);
        if reset.is_some_and(OpenReset::is_over) {
            self.end_reset(id, effects);
            self.restart_readings(now, effects);
        }
    }

    fn end_reset(&mut self, id: ResetId, effects: &mut Vec<LeaderEffect>) {
        if let Some(reset) = self.resets.take(id, &mut self.tiers, &mut self.timers) {
            let answer = Ok(Answer::Reset(ResetAnswer {
                pages: reset.pages,
                below_pages: reset.below_pages,
            }));
            self.answer(reset.reply_to.engine, reset.reply_to.id, answer, effects);
        }
    }

    fn refuse_reset(&mut self, id: ResetId, refusal: Refusal, effects: &mut Vec<LeaderEffect>) {
        if let Some(reset) = self.resets.take(id, &mut self.tiers, &mut self.timers) {
            self.answer(
                reset.reply_to.engine,
                reset.reply_to.id,
                Err(refusal),
                effects,
            );
        }
    }

    /// The deadline of a reset has passed: pages that were removed stay removed from the pool, but may be found again
    /// after a restart.
    pub(super) fn reset_late(&mut self, id: ResetId, effects: &mut Vec<LeaderEffect>) {
        let Some(reset) = self.resets.open.get(&id) else {
            return;
        };
        let late = match reset.stage {
            ResetStage::Invalidating => Refusal::ResetUnconfirmed {
                shards: reset.confirmations.missing(),
            },
            ResetStage::CountingHolders { .. } | ResetStage::RemovingPages(_) => {
                Refusal::ResetUnfinished
            }
        };
        self.refuse_reset(id, late, effects);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leader::tests::{ENGINE, serving};
    use kvferry_types::RequestId;

    #[test]
    fn a_reset_that_is_over_and_not_answered_is_detected() {
        let mut leader = serving();
        let engine = ENGINE;
        let reply_to = ReplyTo {
            engine,
            id: RequestId(1),
            deadline: Time(100),
            arrived: Time(0),
        };
        let begun = leader.reset(reply_to, ResetScope::Everything, None);
        assert_eq!(begun, Ok(()));
        assert_eq!(leader.resets.check(), Ok(()));
        for reset in leader.resets.open.values_mut() {
            reset.stage = ResetStage::Invalidating;
            reset.confirmations.set_missing([]);
        }
        let why = leader.resets.check().expect_err("no work is left");
        assert_eq!(why.to_string(), "reset 1 is over and not answered");
    }

    /// A confirmation from before the last request says nothing about pages that were listed since.
    #[test]
    fn a_confirmation_counts_only_when_it_was_requested_and_no_store_of_the_reset_is_in_flight() {
        let mut leader = serving();
        let reply_to = ReplyTo {
            engine: ENGINE,
            id: RequestId(1),
            deadline: Time(100),
            arrived: Time(0),
        };
        assert_eq!(leader.reset(reply_to, ResetScope::Everything, None), Ok(()));
        let (id, shard) = (leader.resets.last(), Shard(0));
        let worker = leader.roster.worker_of_each_shard()[0].expect("a worker serves");
        for (requested, in_flight, counts) in [
            (false, false, false),
            (false, true, false),
            (true, true, false),
            (true, false, true),
        ] {
            let reset = leader.resets.open.get_mut(&id).expect("it is open");
            reset.confirmations.set_missing([shard]);
            reset.ending.clear();
            if requested {
                reset.confirmations.requested(shard, worker);
            }
            if in_flight {
                reset.ending.insert(TransferId(9));
            }
            let of_another_replica = WorkerId {
                replica: kvferry_types::Replica(worker.replica.0 + 1),
                ..worker
            };
            assert!(!leader.resets.confirmed(id, shard, of_another_replica));
            let counted = leader.resets.confirmed(id, shard, worker);
            let missing = leader.resets.open[&id].confirmations.missing();
            assert_eq!(
                (counted, missing),
                (counts, usize::from(!counts)),
                "{requested} {in_flight}"
            );
        }
    }
}
