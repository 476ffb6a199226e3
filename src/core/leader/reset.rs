//! Resets: pages are forgotten here, then struck out of every inventory, and only then is it said.

use std::collections::BTreeSet;

use crate::core::event::Effect;
use crate::core::refusal::Refusal;
use crate::core::sabotage::{Bug, planted};
use crate::types::{
    Answer, EngineId, Generation, OpId, ResetId, ResetScope, Scope, Shard, Time, WorkerId,
};

use super::tier::Tier;
use super::{Due, Leader, Timer};

/// A reset that has not been answered.
#[derive(Debug)]
pub(super) struct Reset {
    due: Due,
    scope: Scope,
    /// The last store before the reset. Later ones are not struck out: a strike may be repeated after new pages of the
    /// same scope were stored.
    through: Generation,
    pages: u32,
    /// Stores of these pages that were under way, and are not over.
    ending: BTreeSet<Generation>,
    /// Shards that have not struck the pages out.
    missing: BTreeSet<Shard>,
    /// When the shards are asked again, or the answer is due.
    next: Time,
}

impl Reset {
    /// Which pages it means.
    pub(super) fn scope(&self) -> &Scope {
        &self.scope
    }
}

impl Leader {
    pub(super) fn reset(
        &mut self,
        now: Time,
        due: Due,
        scope: ResetScope,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let scope = self.scope(due.engine, scope)?;
        let Some(pool) = self.tier.as_mut().and_then(Tier::serving_mut) else {
            return Err(match self.workers.any_replica() {
                true => Refusal::Reading,
                false => self.workers.not_ready(),
            });
        };
        let retired = pool.retire(&scope);
        let (pages, filling) = retired.map_err(|holders| Refusal::Leased { holders })?;
        for generation in &filling {
            self.cancel(OpId(generation.0));
        }
        self.next_reset += 1;
        let next = due.deadline.min(now + self.settings.fence / 4);
        let reset = Reset {
            due,
            scope,
            through: Generation(self.next_id),
            pages,
            ending: match planted(Bug::ResetSkipsInFlight) {
                true => BTreeSet::new(),
                false => filling.into_iter().collect(),
            },
            missing: self.workers.shards().collect(),
            next,
        };
        let id = ResetId(self.next_reset);
        self.timers.insert((next, Timer::Reset(id)));
        self.resets.insert(id, reset);
        self.strike_one(id, effects);
        Ok(())
    }

    /// The asking engine's pages; for anybody else, those of the engines that are served.
    fn scope(&self, engine: EngineId, scope: ResetScope) -> Result<Scope, Refusal> {
        let own = self.served(engine).ok().map(|(_, geometry)| geometry);
        let geometry = own.or_else(|| self.workers.geometry(self.wanted_key()));
        let domain = |namespace: &[u8]| {
            let geometry = geometry.ok_or_else(|| self.workers.not_ready())?;
            Ok(self.domain(geometry, namespace).id())
        };
        Ok(match scope {
            ResetScope::Everything => Scope::Everything,
            ResetScope::Namespace(namespace) => Scope::Domain(domain(&namespace)?),
            ResetScope::Pages(namespace, hashes) => {
                let pages = (0..hashes.len()).map(|page| hashes.fingerprint(page));
                Scope::Pages(domain(&namespace)?, pages.collect())
            }
        })
    }

    /// A store is over, one way or the other: resets that waited for it go on.
    pub(super) fn store_over(&mut self, generation: Generation, effects: &mut Vec<Effect>) {
        let waited = self.resets.iter_mut().filter_map(|(id, reset)| {
            let last = reset.ending.remove(&generation) && reset.ending.is_empty();
            last.then_some(*id)
        });
        let ready: Vec<ResetId> = waited.collect();
        ready
            .into_iter()
            .for_each(|id| self.strike_one(id, effects));
    }

    /// Asks every shard that has not struck out, of every reset that waits for nothing else.
    pub(super) fn strike(&mut self, effects: &mut Vec<Effect>) {
        let open: Vec<ResetId> = self.resets.keys().copied().collect();
        open.into_iter().for_each(|id| self.strike_one(id, effects));
    }

    fn strike_one(&mut self, id: ResetId, effects: &mut Vec<Effect>) {
        if planted(Bug::ResetKeepsRecords) {
            return self.end_reset(id, effects);
        }
        let Some(reset) = self.resets.get(&id).filter(|reset| reset.ending.is_empty()) else {
            return;
        };
        let workers = self.workers.one_of_each_shard().into_iter().flatten();
        let missing = |worker: &WorkerId| reset.missing.contains(&self.workers.shard_of(*worker));
        let asked = workers.filter(missing);
        effects.extend(asked.map(|worker| Effect::Strike {
            worker,
            id,
            scope: reset.scope.clone(),
            through: reset.through,
        }));
    }

    /// A worker has struck the pages out of its shard's inventory.
    pub(super) fn struck(
        &mut self,
        now: Time,
        worker: WorkerId,
        id: ResetId,
        effects: &mut Vec<Effect>,
    ) {
        let shard = self.workers.shard_of(worker);
        let Some(reset) = self
            .resets
            .get_mut(&id)
            .filter(|reset| reset.ending.is_empty())
        else {
            return;
        };
        if reset.missing.remove(&shard) && reset.missing.is_empty() {
            self.end_reset(id, effects);
            self.read_anew(now, effects);
        }
    }

    fn end_reset(&mut self, id: ResetId, effects: &mut Vec<Effect>) {
        if let Some(reset) = self.resets.remove(&id) {
            self.timers.remove(&(reset.next, Timer::Reset(id)));
            let answer = Ok(Answer::Reset { pages: reset.pages });
            self.answer(reset.due.engine, reset.due.id, answer, effects);
        }
    }

    /// Asks again, or gives up: then the pages are forgotten, but may be found again after a restart.
    pub(super) fn reset_due(&mut self, now: Time, id: ResetId, effects: &mut Vec<Effect>) {
        let Some(reset) = self.resets.get_mut(&id) else {
            return;
        };
        if now < reset.due.deadline {
            reset.next = reset.due.deadline.min(now + self.settings.fence / 4);
            self.timers.insert((reset.next, Timer::Reset(id)));
            return self.strike_one(id, effects);
        }
        if let Some(reset) = self.resets.remove(&id) {
            let late = Refusal::ResetUnconfirmed {
                shards: reset.missing.len(),
            };
            self.answer(reset.due.engine, reset.due.id, Err(late), effects);
        }
    }
}
