//! Cancelling stores: their copies are stopped, so that the engine gets its pages back within a part of a copy.

use std::collections::BTreeMap;

use crate::leader::event::LeaderEffect;
use crate::leader::refusal::Refusal;
use kvferry_types::{Answer, CancelStoresAnswer, EngineId, SlotId};

use super::store::Stopped;
use super::timers::{CancelId, StoreKey, Timer, Timers};
use super::{Leader, ReplyTo};

/// Open `cancel_stores` requests of one engine, at most; about 100 bytes each, and 8 bytes for each store that one of
/// them waits for.
pub const CANCELS_MAX: usize = 16;

/// A `cancel_stores` request that has not been answered.
#[derive(Debug)]
struct Cancelling {
    reply_to: ReplyTo,
    /// Stores that were in flight when it arrived.
    stores: u32,
    /// Number of these stores that have not been answered.
    missing: u32,
}

/// The `cancel_stores` requests that wait until their stores have ended.
#[derive(Debug, Default)]
pub(super) struct Cancels {
    open: BTreeMap<CancelId, Cancelling>,
    last: CancelId,
}

impl Cancels {
    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    fn of(&self, engine: EngineId) -> usize {
        let open = self.open.values();
        open.filter(|cancelling| cancelling.reply_to.engine == engine)
            .count()
    }

    /// Adds a request that waits for `missing` of its `stores` stores.
    fn wait(
        &mut self,
        reply_to: ReplyTo,
        stores: u32,
        missing: u32,
        timers: &mut Timers,
    ) -> CancelId {
        self.last += 1;
        timers.set(reply_to.deadline, Timer::Cancel(self.last));
        let cancelling = Cancelling {
            reply_to,
            stores,
            missing,
        };
        self.open.insert(self.last, cancelling);
        self.last
    }

    /// A store of this request was answered. Returns the request with its number of stores if that was the last one.
    fn store_ended(&mut self, id: CancelId, timers: &mut Timers) -> Option<(ReplyTo, u32)> {
        let cancelling = self.open.get_mut(&id)?;
        cancelling.missing -= 1;
        if cancelling.missing > 0 {
            return None;
        }
        let Cancelling {
            reply_to, stores, ..
        } = self.open.remove(&id)?;
        timers.clear(reply_to.deadline, Timer::Cancel(id));
        Some((reply_to, stores))
    }
}

impl Leader {
    /// Stops the stores that an engine requested before, of one of its slots or of all. Answers after the last of them
    /// has been answered. Stores with higher ids continue: they may be those of the engine's next client. Stores with
    /// lower ids that arrive later are answered without a copy.
    pub(super) fn cancel_stores(
        &mut self,
        reply_to: ReplyTo,
        slot: Option<SlotId>,
        effects: &mut Vec<LeaderEffect>,
    ) -> Result<Option<Answer>, Refusal> {
        // Copies that an older leader ordered may read the engine's pages, and this leader has no record of them.
        if !self.roster.all_clear() {
            return Err(self.roster.not_ready());
        }
        if self.cancels.of(reply_to.engine) >= CANCELS_MAX {
            return Err(Refusal::Limit {
                limit: "cancel_stores of an engine under way",
                max: CANCELS_MAX as u64,
            });
        }
        let session = self.sessions.open(reply_to.engine);
        session.note_cancel(reply_to.id, slot);
        let mut keys = self.stores.before(reply_to.engine, reply_to.id, slot);
        let stores = u32::try_from(keys.len()).unwrap_or(u32::MAX);
        keys.iter().for_each(|key| self.stop_store(*key, effects));
        keys.retain(|key| self.stores.contains(*key));
        if keys.is_empty() {
            return Ok(Some(Answer::CancelStores(CancelStoresAnswer { stores })));
        }
        let missing = u32::try_from(keys.len()).unwrap_or(u32::MAX);
        let id = self
            .cancels
            .wait(reply_to, stores, missing, &mut self.timers);
        for key in keys {
            self.stores.add_cancel(key, id);
        }
        Ok(None)
    }

    /// Stops the copies of a store. Copies of other requests that it waits for read none of its pages, so they
    /// continue.
    fn stop_store(&mut self, key: StoreKey, effects: &mut Vec<LeaderEffect>) {
        match self.stores.stop(key) {
            Stopped::Before => {}
            Stopped::Ended => self.store_ended(key, effects),
            Stopped::Waits(own) => {
                for transfer in own {
                    self.transfers.cancel(transfer);
                }
            }
        }
    }

    /// A store was answered: answers the `cancel_stores` requests that waited for no other store.
    pub(super) fn cancelled(&mut self, cancels: &[CancelId], effects: &mut Vec<LeaderEffect>) {
        for id in cancels {
            if let Some((reply_to, stores)) = self.cancels.store_ended(*id, &mut self.timers) {
                let answer = Ok(Answer::CancelStores(CancelStoresAnswer { stores }));
                self.answer(reply_to.engine, reply_to.id, answer, effects);
            }
        }
    }

    /// The deadline of a `cancel_stores` request has passed: refuses it. Its stores stay stopped, and are answered when
    /// they have ended.
    pub(super) fn cancel_due(&mut self, id: CancelId, effects: &mut Vec<LeaderEffect>) {
        if let Some(Cancelling {
            reply_to, missing, ..
        }) = self.cancels.open.remove(&id)
        {
            let refusal = Refusal::StillRead { stores: missing };
            self.answer(reply_to.engine, reply_to.id, Err(refusal), effects);
        }
    }
}
