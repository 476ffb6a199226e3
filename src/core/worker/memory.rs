//! The registered memory of an engine: for which requests its pages may be copied.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvferry_types::{EngineId, RequestId, Time, TransferId, User};

use crate::Contradiction;

use super::check::MemoryBounds;
use super::copies::Copies;
use super::{
    WORKER_ABANDONED_MAX, WORKER_ABANDONERS_MAX, WORKER_ABANDONERS_OF_USER_MAX, WORKER_ENGINES_MAX,
    Worker, WorkerEffect,
};

/// Time for which an engine's last abandoned request is remembered after its list was dropped: longer than an order can be
/// on its way, because a worker that takes no orders is ended within seconds.
const ABANDONED_KEPT: Duration = Duration::from_secs(600);

/// The registered memory of one engine.
#[derive(Debug)]
pub(super) struct Memory {
    engine: EngineId,
    bounds: MemoryBounds,
    /// Everything up to this request is written.
    written: RequestId,
    /// Requests up to this one were over at registration.
    abandoned_through: RequestId,
}

impl Memory {
    pub(super) fn new(
        engine: EngineId,
        abandoned_through: RequestId,
        bounds: MemoryBounds,
    ) -> Self {
        Self {
            engine,
            bounds,
            // Starts at 0 and not at `abandoned_through`: a request may be over while earlier work of the device still runs.
            written: RequestId(0),
            abandoned_through,
        }
    }

    pub(super) fn engine(&self) -> EngineId {
        self.engine
    }

    pub(super) fn bounds(&self) -> &MemoryBounds {
        &self.bounds
    }

    pub(super) fn written(&self) -> RequestId {
        self.written
    }

    /// Everything up to this request is written.
    pub(super) fn wrote(&mut self, through: RequestId) {
        self.written = through.max(self.written);
    }

    pub(super) fn may_copy_for(&self, request: RequestId, abandoned: &Abandoned) -> bool {
        request > self.abandoned_through && !abandoned.is_over(self.engine, request)
    }
}

/// Abandoned requests of one engine. They stay abandoned when the engine registers memory later.
#[derive(Debug)]
struct AbandonedRequests {
    engine: EngineId,
    user: User,
    /// Requests up to this one count as over: the individual record of this one was dropped.
    dropped_through: RequestId,
    /// Later requests that were abandoned.
    abandoned: BTreeSet<RequestId>,
}

impl AbandonedRequests {
    /// Requests up to this one are over.
    fn abandon_through(&mut self, through: RequestId) {
        self.dropped_through = through.max(self.dropped_through);
        let over = self.dropped_through;
        self.abandoned.retain(|request| *request > over);
    }

    /// The last abandoned request.
    fn last(&self) -> RequestId {
        *self.abandoned.last().unwrap_or(&self.dropped_through)
    }

    /// Remembers the latest abandoned requests individually. Requests older than a dropped one count as over.
    fn abandon(&mut self, requests: &BTreeSet<RequestId>) {
        let later = requests.range(RequestId(self.dropped_through.0.saturating_add(1))..);
        self.abandoned.extend(later);
        while self.abandoned.len() > WORKER_ABANDONED_MAX
            && let Some(oldest) = self.abandoned.pop_first()
        {
            self.dropped_through = oldest;
        }
    }
}

/// An unanswered `Abandon` that waits until none of its copies runs.
#[derive(Debug)]
struct Abandoning {
    number: u64,
    running: BTreeSet<TransferId>,
}

/// The last request that an engine abandoned, kept without the others.
#[derive(Debug)]
struct LastAbandoned {
    request: RequestId,
    user: User,
    until: Time,
}

/// The requests that engines abandoned, and the `Abandon`s that are not answered.
#[derive(Debug, Default)]
pub(super) struct Abandoned {
    /// Abandoned requests of at most [`WORKER_ENGINES_MAX`] engines, in order of the engines' last `Abandon`.
    over: Vec<AbandonedRequests>,
    /// Of at most [`WORKER_ABANDONERS_MAX`] engines that were dropped from `over`: requests up to this one count as over.
    /// A dropped engine has no memory registered. If it registers again, requests up to this one still count as over, also
    /// those that it did not abandon: they fail, and it computes their pages.
    dropped: BTreeMap<EngineId, LastAbandoned>,
    abandoning: Vec<Abandoning>,
}

impl Abandoned {
    fn is_over(&self, engine: EngineId, request: RequestId) -> bool {
        let dropped = self.dropped.get(&engine);
        if dropped.is_some_and(|last| request <= last.request) {
            return true;
        }
        let over = self.over.iter().find(|over| over.engine == engine);
        over.is_some_and(|over| {
            request <= over.dropped_through || over.abandoned.contains(&request)
        })
    }

    /// False if there is no room to remember what another engine of this user abandons.
    fn has_room_for(&self, now: Time, engine: EngineId, user: User) -> bool {
        if self.over.iter().any(|over| over.engine == engine) || self.dropped.contains_key(&engine)
        {
            return true;
        }
        let dropped = self.dropped.values().filter(|last| last.until > now);
        if dropped.clone().count() >= WORKER_ABANDONERS_MAX {
            return false;
        }
        let users = self.over.iter().map(|over| over.user);
        let users = users.chain(dropped.map(|last| last.user));
        user == User::Own
            || users.filter(|other| *other == user).count() < WORKER_ABANDONERS_OF_USER_MAX
    }

    /// Keeps the last request of abandoned ones. If there are too many engines, the one that has been kept for the longest
    /// time is dropped.
    fn keep_last(&mut self, now: Time, over: &AbandonedRequests) {
        if self.dropped.len() >= WORKER_ABANDONERS_MAX {
            self.dropped.retain(|_, last| last.until > now);
        }
        if self.dropped.len() >= WORKER_ABANDONERS_MAX {
            let oldest = self.dropped.iter().min_by_key(|(_, last)| last.until);
            if let Some(oldest) = oldest.map(|(engine, _)| *engine) {
                self.dropped.remove(&oldest);
            }
        }
        let last = LastAbandoned {
            request: over.last(),
            user: over.user,
            until: now + ABANDONED_KEPT,
        };
        self.dropped.insert(over.engine, last);
    }

    /// The abandoned requests of an engine. If there are too many engines, the list of the one with the oldest last
    /// `Abandon` is dropped, except for the registered engine; its last request stays.
    fn of(
        &mut self,
        now: Time,
        (engine, user): (EngineId, User),
        registered: Option<EngineId>,
    ) -> &mut AbandonedRequests {
        let known = self.over.iter().position(|over| over.engine == engine);
        let over = match known {
            Some(index) => self.over.remove(index),
            None => AbandonedRequests {
                engine,
                user,
                dropped_through: self
                    .dropped
                    .remove(&engine)
                    .map_or(RequestId(0), |last| last.request),
                abandoned: BTreeSet::new(),
            },
        };
        if self.over.len() >= WORKER_ENGINES_MAX {
            let oldest = self
                .over
                .iter()
                .position(|over| Some(over.engine) != registered);
            let oldest = self.over.remove(oldest.unwrap_or(0));
            self.keep_last(now, &oldest);
        }
        self.over.push(over);
        let last = self.over.len() - 1;
        &mut self.over[last]
    }

    #[cfg(test)]
    pub(super) fn engines(&self) -> usize {
        self.over.len()
    }

    /// Notes that a copy ended. Returns the `Abandon`s that waited for no other copy, which are answered now.
    pub(super) fn ended(&mut self, transfer: TransferId) -> impl Iterator<Item = u64> + use<> {
        let mut answered = Vec::new();
        self.abandoning.retain_mut(|waiting| {
            let last = waiting.running.remove(&transfer) && waiting.running.is_empty();
            if last {
                answered.push(waiting.number);
            }
            !last
        });
        answered.into_iter()
    }

    /// Checks that every `Abandon` waits for open copies only. `Err` names the first contradiction.
    pub(super) fn check(&self, copies: &Copies) -> Result<(), Contradiction> {
        for Abandoning { number, running } in &self.abandoning {
            if running.is_empty() || running.iter().any(|transfer| !copies.contains(*transfer)) {
                return Err(format!("abandon {number} waits for a copy that is not open").into());
            }
        }
        Ok(())
    }
}

impl Worker {
    /// Stops the copies for these requests and refuses later ones. The engine is answered when none of the copies runs.
    pub(super) fn abandon(
        &mut self,
        now: Time,
        (engine, user): (EngineId, User),
        number: u64,
        requests: &BTreeSet<RequestId>,
        effects: &mut Vec<WorkerEffect>,
    ) {
        let registered = self.memory.as_ref().map(Memory::engine);
        self.abandoned
            .of(now, (engine, user), registered)
            .abandon(requests);
        let copies = requests
            .iter()
            .flat_map(|request| self.copies.of_requests(engine, *request..=*request));
        self.end_abandoned(now, number, copies.collect(), effects);
    }

    /// As [`Self::abandon`], for all requests up to this one.
    pub(super) fn abandon_through(
        &mut self,
        now: Time,
        (engine, user): (EngineId, User),
        number: u64,
        through: RequestId,
        effects: &mut Vec<WorkerEffect>,
    ) {
        let registered = self.memory.as_ref().map(Memory::engine);
        let over = self.abandoned.of(now, (engine, user), registered);
        over.abandon_through(through);
        let copies = self.copies.of_requests(engine, RequestId(0)..=through);
        self.end_abandoned(now, number, copies.collect(), effects);
    }

    /// True if the worker can remember what this engine abandons. It remembers engines without memory for a limited time,
    /// at most [`WORKER_ABANDONERS_MAX`] of them, and of another user [`WORKER_ABANDONERS_OF_USER_MAX`].
    pub fn remembers_abandoned_of(&self, now: Time, engine: EngineId, user: User) -> bool {
        self.abandoned.has_room_for(now, engine, user)
    }

    /// Stops these copies. The engine is answered when none of them runs.
    fn end_abandoned(
        &mut self,
        now: Time,
        number: u64,
        copies: Vec<TransferId>,
        effects: &mut Vec<WorkerEffect>,
    ) {
        let mut running = BTreeSet::new();
        for transfer in copies {
            self.stop(now, transfer, effects);
            running.extend(self.copies.contains(transfer).then_some(transfer));
        }
        let abandoning = &mut self.abandoned.abandoning;
        if running.is_empty() {
            effects.push(WorkerEffect::Abandoned { number });
        } else if !abandoning.iter().any(|waiting| waiting.number == number) {
            abandoning.push(Abandoning { number, running });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_abandon_that_waits_for_no_open_copy_is_detected() {
        let copies = Copies::default();
        for running in [BTreeSet::new(), BTreeSet::from([TransferId(1)])] {
            let mut abandoned = Abandoned::default();
            assert_eq!(abandoned.check(&copies), Ok(()));
            let number = 3;
            abandoned.abandoning.push(Abandoning { number, running });
            let why = abandoned.check(&copies).expect_err("no copy is open");
            assert_eq!(
                why.to_string(),
                "abandon 3 waits for a copy that is not open"
            );
        }
    }
}
