//! The registered memory of an engine: for which requests its pages may be copied.

use std::collections::BTreeSet;

use kvferry_types::{EngineId, RequestId, Time, TransferId};

use crate::Contradiction;

use super::check::MemoryBounds;
use super::copies::Copies;
use super::{WORKER_ABANDONED_MAX, WORKER_ENGINES_MAX, Worker, WorkerEffect};

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
    /// Requests up to this one count as over: the individual record of this one was dropped.
    dropped_through: RequestId,
    /// Later requests that were abandoned.
    abandoned: BTreeSet<RequestId>,
}

impl AbandonedRequests {
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

/// The requests that engines abandoned, and the `Abandon`s that are not answered.
#[derive(Debug, Default)]
pub(super) struct Abandoned {
    /// Abandoned requests of at most [`WORKER_ENGINES_MAX`] engines, in order of the engines' last `Abandon`.
    over: Vec<AbandonedRequests>,
    abandoning: Vec<Abandoning>,
}

impl Abandoned {
    fn is_over(&self, engine: EngineId, request: RequestId) -> bool {
        let over = self.over.iter().find(|over| over.engine == engine);
        over.is_some_and(|over| {
            request <= over.dropped_through || over.abandoned.contains(&request)
        })
    }

    /// The abandoned requests of an engine. If there are too many engines, the one with the oldest last `Abandon` is
    /// dropped, except for the registered engine.
    fn of(&mut self, engine: EngineId, registered: Option<EngineId>) -> &mut AbandonedRequests {
        let known = self.over.iter().position(|over| over.engine == engine);
        let over = match known {
            Some(index) => self.over.remove(index),
            None => AbandonedRequests {
                engine,
                dropped_through: RequestId(0),
                abandoned: BTreeSet::new(),
            },
        };
        if self.over.len() >= WORKER_ENGINES_MAX {
            let oldest = self
                .over
                .iter()
                .position(|over| Some(over.engine) != registered);
            self.over.remove(oldest.unwrap_or(0));
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
        engine: EngineId,
        number: u64,
        requests: &BTreeSet<RequestId>,
        effects: &mut Vec<WorkerEffect>,
    ) {
        let registered = self.memory.as_ref().map(Memory::engine);
        self.abandoned.of(engine, registered).abandon(requests);
        let mut running = BTreeSet::new();
        for request in requests {
            for transfer in self.copies.of_request(engine, *request) {
                self.stop(now, transfer, effects);
                running.extend(self.copies.contains(transfer).then_some(transfer));
            }
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
