//! Admission of requests: retries, limits and parking.
//!
//! An engine takes any answer to a load or a store, except [`Refusal::Crowded`], as permission to reuse its pages. The
//! leader therefore answers only when no worker can touch them any longer, neither for the copy of this request nor for
//! one that an older leader ordered for it.

use crate::event::Effect;
use crate::refusal::Refusal;
use crate::slot::Seen;
use kvferry_types::{Answer, EngineId, Request, RequestId, SlotId, Time};

use super::{Due, Leader};

/// Open requests of one engine, at most, unless the settings say otherwise.
pub const OPEN_REQUESTS_MAX: usize = 1024;

/// A load or store that is refused once no copy of an older leader can run; about 100 bytes. One engine has at most as
/// many of them as it may have open requests, and one connection, with which they are dropped: the number of
/// connections bounds the sum.
#[derive(Debug)]
pub(super) struct Parked {
    due: Due,
    slot: SlotId,
}

impl Leader {
    pub(super) fn request(
        &mut self,
        now: Time,
        due: Due,
        request: Request,
        effects: &mut Vec<Effect>,
    ) {
        let Due { engine, id, .. } = due;
        match request {
            Request::Load { slot, .. } | Request::Store { slot, .. }
                if !self.workers.all_clear() =>
            {
                return self.park(due, slot, effects);
            }
            _ => {}
        }
        let finishes = matches!(
            request,
            Request::Finish { .. } | Request::CancelStores { .. }
        );
        let answers = &mut self.sessions.entry(engine).or_default().answers;
        // `finish` and `cancel_stores` are exempt from the limit, because they free requests.
        let full = answers.open() >= self.settings.open_requests_max && !finishes;
        match answers.begin(id) {
            Seen::New => {}
            Seen::UnderWay => return,
            Seen::Answered(answer) => return effects.push(Effect::Answer { engine, id, answer }),
            Seen::Stale => {
                let answer = Err(Refusal::StaleRequest(id));
                return effects.push(Effect::Answer { engine, id, answer });
            }
        }
        // A refused request stays refused: an engine that receives the refusal continues without it, so a retry must
        // not carry out the request.
        if self.draining && !finishes {
            return self.answer(engine, id, Err(Refusal::Draining), effects);
        }
        if full {
            let refused = Err(Refusal::Limit {
                limit: "requests of an engine under way",
                max: self.settings.open_requests_max as u64,
            });
            return self.answer(engine, id, refused, effects);
        }
        let answer = match request {
            Request::Lookup {
                slot,
                namespace,
                hashes,
                device_pages,
            } => self
                .lookup(now, due, slot, &namespace, hashes, device_pages)
                .map(Some),
            Request::Load {
                slot,
                first_page,
                destination,
                after,
            } => self
                .load(due, slot, first_page, &destination, after, effects)
                .map(|()| None),
            Request::Store {
                slot,
                first_page,
                more,
                source,
            } => self.store(due, slot, first_page, more, &source, effects),
            Request::CancelStores { slot } => self.cancel_stores(due, slot, effects),
            Request::Reset { scope } => self.reset(due, scope).map(|()| None),
            Request::Finish { slot } => {
                let session = self.sessions.entry(engine).or_default();
                session.note_finish(id, slot);
                self.finish(engine, slot);
                Ok(Some(Answer::Finish))
            }
        };
        if let Some(answer) = answer.transpose() {
            self.answer(engine, id, answer, effects);
        }
    }

    pub(super) fn answer(
        &mut self,
        engine: EngineId,
        id: RequestId,
        answer: Result<Answer, Refusal>,
        effects: &mut Vec<Effect>,
    ) {
        if let Some(session) = self.sessions.get_mut(&engine) {
            session.answers.end(id, &answer);
            if session.gone && session.answers.open() == 0 {
                self.sessions.remove(&engine);
            }
        }
        effects.push(Effect::Answer { engine, id, answer });
    }

    /// Parks a request that names engine pages until no copy of an older leader touches them. Beyond the limit the
    /// request is refused without being noted, because a copy of it may be running: the engine may retry it with the
    /// same id.
    fn park(&mut self, due: Due, slot: SlotId, effects: &mut Vec<Effect>) {
        let key = (due.engine, due.id);
        if self.parked.contains_key(&key) {
            return;
        }
        let first = (due.engine, RequestId(0));
        let last = (due.engine, RequestId(u64::MAX));
        let max = self.settings.open_requests_max;
        if self.parked.range(first..=last).count() >= max {
            let max = max as u64;
            return effects.push(Effect::Answer {
                engine: due.engine,
                id: due.id,
                answer: Err(Refusal::Crowded { max }),
            });
        }
        self.parked.insert(key, Parked { due, slot });
    }

    /// The connection of an engine broke: the engine retries unanswered requests over the next connection.
    pub(super) fn unpark(&mut self, engine: EngineId) {
        self.parked.retain(|(whose, _), _| *whose != engine);
    }

    /// No copy of an older leader is running: refuses the parked requests, because this leader does not have their
    /// slots.
    pub(super) fn refuse_parked(&mut self, effects: &mut Vec<Effect>) {
        for ((engine, id), parked) in std::mem::take(&mut self.parked) {
            if let Some(session) = self.sessions.get_mut(&engine) {
                session.answers.begin(id);
            }
            let refusal = Refusal::UnknownSlot(parked.slot);
            self.answer(parked.due.engine, parked.due.id, Err(refusal), effects);
        }
    }
}
