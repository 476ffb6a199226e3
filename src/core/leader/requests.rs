//! Admission of requests: retries, limits and parking.
//!
//! An engine reuses the pages of a load or a store after its answer, or after a refusal that is over
//! ([`Refusal::is_over`]). The leader sends neither while a worker may touch them, for the copy of this request or for
//! one that an older leader ordered for it.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::group::model::Model;
use crate::leader::event::LeaderEffect;
use crate::leader::refusal::Refusal;
use crate::leader::session::{RequestState, Session};
use kvferry_types::{Answer, EngineId, Replica, Request, RequestId, SlotId, Time};

use super::counters::Refusable;
use super::lookup::Lookup;
use super::store::Store;
use super::{Leader, ReplyTo};

/// Open requests of one engine, at most, unless the settings have another number.
pub const OPEN_REQUESTS_MAX: usize = 1024;

/// Loads and stores that arrived while copies of an older leader could still run. Their engine takes a refusal as
/// permission to reuse its pages, so they are refused only after those copies have ended. About 100 bytes each; one
/// engine has at most as many of them as it may have open requests, and one connection, with which they are dropped:
/// the number of connections bounds the sum.
#[derive(Debug, Default)]
pub(super) struct Parked(BTreeMap<(EngineId, RequestId), (Refusable, SlotId)>);

impl Parked {
    /// Adds a request. Returns false when the engine has `max` of them.
    fn add(
        &mut self,
        engine: EngineId,
        id: RequestId,
        parked: (Refusable, SlotId),
        max: usize,
    ) -> bool {
        if self.0.contains_key(&(engine, id)) {
            return true;
        }
        let (first, last) = (RequestId(0), RequestId(u64::MAX));
        let of_engine = self.0.range((engine, first)..=(engine, last));
        let room = of_engine.count() < max;
        if room {
            self.0.insert((engine, id), parked);
        }
        room
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The connection of an engine broke: the engine retries unanswered requests over the next connection.
    pub(super) fn drop_engine(&mut self, engine: EngineId) {
        self.0.retain(|(whose, _), _| *whose != engine);
    }
}

impl Leader {
    /// The replica of an engine that is served, and the model of its memory.
    pub(super) fn served(&self, engine: EngineId) -> Result<(Replica, &Arc<Model>), Refusal> {
        let found = self.roster.memory_of(engine);
        let key = self.tiers.wanted_key();
        found
            .filter(|(_, model)| key.is_none_or(|key| key.is_for(model)))
            .ok_or_else(|| self.roster.not_ready())
    }

    pub(super) fn request(
        &mut self,
        now: Time,
        reply_to: ReplyTo,
        request: Request,
        effects: &mut Vec<LeaderEffect>,
    ) {
        let ReplyTo { engine, id, .. } = reply_to;
        let kind = Refusable::of(&request);
        match (&request, kind) {
            (Request::Load { slot, .. } | Request::Store { slot, .. }, Some(kind))
                if !self.roster.all_clear() && !self.knows_request(engine, id) =>
            {
                return self.park(reply_to, (kind, *slot), effects);
            }
            _ => {}
        }
        let finishes = matches!(
            request,
            Request::Finish { .. } | Request::CancelStores { .. }
        );
        // `finish` and `cancel_stores` are exempt from the limit, because they free requests.
        let stores = matches!(request, Request::Store { .. });
        let full = !finishes && self.is_full(engine, stores);
        match self.sessions.open(engine).begin(id) {
            RequestState::New => {}
            RequestState::UnderWay => return,
            RequestState::Answered(answer) => {
                let answer = match answer {
                    Ok(kept) if !kept.is_to(&request) => {
                        let refusal = Refusal::Invalid {
                            field: "the correlation id",
                            value: format!("{}, and was that of a request of another kind", id.0),
                            remedy: "take ids that grow, one for each request",
                        };
                        self.count_refusal(kind, &refusal);
                        Err(refusal)
                    }
                    kept => kept,
                };
                return effects.push(LeaderEffect::Answer { engine, id, answer });
            }
            stale @ (RequestState::Stale | RequestState::StaleUnderWay) => {
                let is_over = stale == RequestState::Stale;
                let refusal = Refusal::StaleRequest { id, is_over };
                self.count_refusal(kind, &refusal);
                let answer = Err(refusal);
                return effects.push(LeaderEffect::Answer { engine, id, answer });
            }
        }
        // A refused request stays refused: an engine that receives the refusal continues without it, so a retry must
        // not carry out the request.
        if self.draining && kind.is_some() {
            return self.refuse(reply_to, kind, Refusal::Draining, effects);
        }
        if full {
            let refusal = Refusal::Limit {
                limit: match stores {
                    true => "stores of an engine under way",
                    false => "requests of an engine under way, without stores",
                },
                max: self.settings.open_requests_max as u64,
            };
            return self.refuse(reply_to, kind, refusal, effects);
        }
        let answer = match request {
            Request::Lookup {
                slot,
                namespace,
                hashes,
                have_pages: device_pages,
                limit_pages,
            } => {
                let lookup = Lookup {
                    namespace: &namespace,
                    hashes,
                    device_pages,
                    limit_pages,
                };
                self.lookup(now, reply_to, slot, lookup).map(Some)
            }
            Request::Load { slot, parts, after } => self
                .load(reply_to, slot, &parts, after, effects)
                .map(|()| None),
            Request::Store {
                slot,
                parts,
                more,
                after,
            } => {
                let store = Store {
                    parts: &parts,
                    more,
                    after,
                };
                self.store(now, reply_to, slot, store, effects)
            }
            Request::CancelStores { slot } => self.cancel_stores(reply_to, slot, effects),
            Request::Reset { scope, tier } => self.reset(reply_to, scope, tier).map(|()| None),
            Request::Flush => self.flush(reply_to).map(|()| None),
            Request::Finish { slot } => {
                let session = self.sessions.open(engine);
                session.note_finish(id, slot);
                // A lookup with a higher id has opened the slot again.
                if !session.is_newer(slot, id) {
                    self.finish(engine, slot);
                }
                Ok(Some(Answer::Finish))
            }
        };
        match answer {
            Ok(None) => {}
            Ok(Some(answer)) => self.answer(engine, id, Ok(answer), effects),
            Err(refusal) => self.refuse(reply_to, kind, refusal, effects),
        }
    }

    /// True if an engine has as many stores under way as it may have, or as many other requests. One message brings many
    /// stores, which must not keep its lookups and loads out.
    fn is_full(&self, engine: EngineId, stores: bool) -> bool {
        let max = self.settings.open_requests_max;
        let session = self.sessions.get(engine);
        let open = session.map_or(0, Session::open_requests);
        if open < max {
            return false;
        }
        let open_stores = self.stores.of(engine);
        match stores {
            true => open_stores >= max,
            false => open - open_stores >= max,
        }
    }

    /// True if a request has come under this id, except for parked ones.
    fn knows_request(&self, engine: EngineId, id: RequestId) -> bool {
        let session = self.sessions.get(engine);
        session.is_some_and(|session| session.knows_request(id))
    }

    /// Refuses a request that has not begun.
    fn refuse(
        &mut self,
        reply_to: ReplyTo,
        kind: Option<Refusable>,
        refusal: Refusal,
        effects: &mut Vec<LeaderEffect>,
    ) {
        self.count_refusal(kind, &refusal);
        self.answer(reply_to.engine, reply_to.id, Err(refusal), effects);
    }

    fn count_refusal(&mut self, kind: Option<Refusable>, refusal: &Refusal) {
        if let Some(kind) = kind {
            self.counts.refusals.note(kind, refusal);
        }
    }

    pub(super) fn answer(
        &mut self,
        engine: EngineId,
        id: RequestId,
        answer: Result<Answer, Refusal>,
        effects: &mut Vec<LeaderEffect>,
    ) {
        if self.sessions.answered(engine, id, &answer) {
            // Requests that came since the engine is gone may have opened slots.
            self.remove_engine(engine);
        }
        effects.push(LeaderEffect::Answer { engine, id, answer });
    }

    /// Parks a request that names engine pages until no copy of an older leader touches them. Beyond the limit the
    /// request is refused without being noted, because a copy of it may be running: the engine may retry it with the
    /// same id.
    fn park(
        &mut self,
        reply_to: ReplyTo,
        parked: (Refusable, SlotId),
        effects: &mut Vec<LeaderEffect>,
    ) {
        let max = self.settings.open_requests_max;
        if !self.parked.add(reply_to.engine, reply_to.id, parked, max) {
            let max = max as u64;
            let refusal = Refusal::Crowded { max };
            self.count_refusal(Some(parked.0), &refusal);
            effects.push(LeaderEffect::Answer {
                engine: reply_to.engine,
                id: reply_to.id,
                answer: Err(refusal),
            });
        }
    }

    /// No copy of an older leader is running: refuses the parked requests, because this leader has answered no lookup
    /// before.
    pub(super) fn refuse_parked(&mut self, effects: &mut Vec<LeaderEffect>) {
        let parked = std::mem::take(&mut self.parked);
        for ((engine, id), (kind, slot)) in parked.0 {
            let session = self.sessions.get_mut(engine);
            let before = session.map(|session| session.begin(id));
            if let Some(RequestState::UnderWay | RequestState::Answered(_)) = before {
                // Another request has come under this id, and its answer is the answer to both.
                continue;
            }
            // The answers of so many later requests may have been dropped meanwhile that the id is stale.
            let refusal = Refusal::UnknownSlot(slot);
            self.count_refusal(Some(kind), &refusal);
            self.answer(engine, id, Err(refusal), effects);
        }
    }
}
