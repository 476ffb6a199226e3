//! Cancelling stores: their copies are stopped, so that the engine gets its pages back within a part of a copy.

use crate::event::Effect;
use crate::refusal::Refusal;
use kvferry_types::{Answer, EngineId, OpId, SlotId};

use super::store::StoreKey;
use super::{Due, Leader, Timer};

/// Open `cancel_stores` requests of one engine, at most; about 100 bytes each, and 8 bytes for each store that one of
/// them waits for.
pub const CANCELS_MAX: usize = 16;

/// Number of a `cancel_stores` request.
pub(super) type CancelId = u64;

/// A `cancel_stores` request that has not been answered.
#[derive(Debug)]
pub(super) struct Cancelling {
    due: Due,
    /// Stores that were in flight when it arrived.
    stores: u32,
    /// Those of them that have not been answered.
    missing: u32,
}

impl Leader {
    /// Stops the stores of an engine, or of one of its slots. Answers after the last of them has been answered.
    pub(super) fn cancel_stores(
        &mut self,
        due: Due,
        slot: Option<SlotId>,
        effects: &mut Vec<Effect>,
    ) -> Result<Option<Answer>, Refusal> {
        // Copies that an older leader ordered may read the engine's pages, and this leader has no record of them.
        if !self.workers.all_clear() {
            return Err(self.workers.not_ready());
        }
        if self.cancels_of(due.engine) >= CANCELS_MAX {
            return Err(Refusal::Limit {
                limit: "cancel_stores of an engine under way",
                max: CANCELS_MAX as u64,
            });
        }
        let meant = self.stores.iter().filter(|(_, store)| {
            store.due.engine == due.engine && slot.is_none_or(|slot| slot == store.slot)
        });
        let mut keys: Vec<StoreKey> = meant.map(|(key, _)| *key).collect();
        keys.sort_unstable();
        let stores = u32::try_from(keys.len()).unwrap_or(u32::MAX);
        keys.iter().for_each(|key| self.stop_store(*key, effects));
        keys.retain(|key| self.stores.contains_key(key));
        if keys.is_empty() {
            return Ok(Some(Answer::CancelStores { stores }));
        }
        self.next_cancel += 1;
        let id = self.next_cancel;
        for key in &keys {
            if let Some(store) = self.stores.get_mut(key) {
                store.cancels.push(id);
            }
        }
        let missing = u32::try_from(keys.len()).unwrap_or(u32::MAX);
        self.timers.insert((due.deadline, Timer::Cancel(id)));
        let cancelling = Cancelling {
            due,
            stores,
            missing,
        };
        self.cancels.insert(id, cancelling);
        Ok(None)
    }

    fn cancels_of(&self, engine: EngineId) -> usize {
        let open = self.cancels.values();
        open.filter(|cancelling| cancelling.due.engine == engine)
            .count()
    }

    /// Stops the copies of a store. Copies of other requests that it waits for read none of its pages, so they
    /// continue.
    fn stop_store(&mut self, key: StoreKey, effects: &mut Vec<Effect>) {
        let Some(store) = self.stores.get_mut(&key) else {
            return;
        };
        if std::mem::replace(&mut store.stopped, true) {
            return;
        }
        let waits = std::mem::take(&mut store.waits);
        let (own, others): (Vec<_>, Vec<_>) = waits.into_iter().partition(|wait| wait.own);
        store.failed_pages += others.iter().map(|wait| wait.pages).sum::<u32>();
        store.waits.clone_from(&own);
        for wait in &others {
            if let Some(waiting) = self.waiters.get_mut(&wait.generation) {
                waiting.retain(|waiting| *waiting != key);
            }
        }
        if own.is_empty() {
            return self.store_ended(key, effects);
        }
        for wait in own {
            self.cancel(OpId(wait.generation.0));
        }
    }

    /// A store was answered: answers the `cancel_stores` requests that waited for no other store.
    pub(super) fn cancelled(&mut self, cancels: &[CancelId], effects: &mut Vec<Effect>) {
        for id in cancels {
            let Some(cancelling) = self.cancels.get_mut(id) else {
                continue;
            };
            cancelling.missing -= 1;
            if cancelling.missing == 0
                && let Some(Cancelling { due, stores, .. }) = self.cancels.remove(id)
            {
                self.timers.remove(&(due.deadline, Timer::Cancel(*id)));
                let answer = Ok(Answer::CancelStores { stores });
                self.answer(due.engine, due.id, answer, effects);
            }
        }
    }

    /// The deadline of a `cancel_stores` request has passed: refuses it. Its stores stay stopped, and are answered when
    /// they have ended.
    pub(super) fn cancel_due(&mut self, id: CancelId, effects: &mut Vec<Effect>) {
        if let Some(Cancelling { due, missing, .. }) = self.cancels.remove(&id) {
            let refusal = Refusal::StillRead { stores: missing };
            self.answer(due.engine, due.id, Err(refusal), effects);
        }
    }
}
