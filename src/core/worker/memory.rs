//! The registered memory of an engine: for which requests its pages may be copied.

use std::collections::BTreeSet;

use kvferry_types::{EngineId, OpId, RequestId, Time};

use super::check::MemoryBounds;
use super::{WORKER_ABANDONED_MAX, WORKER_ENGINES_MAX, Worker, WorkerEffect};

/// The registered memory of one engine.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) engine: EngineId,
    pub(super) bounds: MemoryBounds,
    /// Everything up to this request is written.
    pub(super) written: RequestId,
    /// Requests up to this one were over at registration.
    after: RequestId,
}

/// Abandoned requests of one engine. They stay abandoned when the engine registers memory later.
#[derive(Debug)]
pub(super) struct Over {
    engine: EngineId,
    /// Requests up to this one count as over: the individual record of this one was dropped.
    forgotten: RequestId,
    /// Later requests that were abandoned.
    abandoned: BTreeSet<RequestId>,
}

/// An unanswered `Abandon` that waits until none of its copies runs.
#[derive(Debug)]
pub(super) struct Abandoning {
    ask: u64,
    running: BTreeSet<OpId>,
}

impl Memory {
    pub(super) fn new(engine: EngineId, after: RequestId, bounds: MemoryBounds) -> Self {
        Self {
            engine,
            bounds,
            // Not `after`: work with a lower number than a finished request may be unfinished. The rank reports what is
            // written.
            written: RequestId(0),
            after,
        }
    }

    pub(super) fn may_copy_for(&self, request: RequestId, over: &[Over]) -> bool {
        let is_over = |over: &Over| request <= over.forgotten || over.abandoned.contains(&request);
        let over = over.iter().find(|over| over.engine == self.engine);
        request > self.after && !over.is_some_and(is_over)
    }
}

impl Over {
    /// Remembers the latest abandoned requests individually. Requests older than a dropped one count as over.
    fn abandon(&mut self, requests: &BTreeSet<RequestId>) {
        let later = requests.range(RequestId(self.forgotten.0.saturating_add(1))..);
        self.abandoned.extend(later);
        while self.abandoned.len() > WORKER_ABANDONED_MAX
            && let Some(oldest) = self.abandoned.pop_first()
        {
            self.forgotten = oldest;
        }
    }
}

impl Worker {
    /// The abandoned requests of an engine. If there are too many engines, the one with the oldest last `Abandon` is
    /// dropped, except for the registered engine.
    fn over(&mut self, engine: EngineId) -> &mut Over {
        let known = self.over.iter().position(|over| over.engine == engine);
        let over = match known {
            Some(index) => self.over.remove(index),
            None => Over {
                engine,
                forgotten: RequestId(0),
                abandoned: BTreeSet::new(),
            },
        };
        if self.over.len() >= WORKER_ENGINES_MAX {
            let registered = self.memory.as_ref().map(|memory| memory.engine);
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

    /// Stops the copies for these requests and refuses later ones. The engine is answered when none of the copies runs.
    pub(super) fn abandon(
        &mut self,
        now: Time,
        engine: EngineId,
        ask: u64,
        requests: &BTreeSet<RequestId>,
        effects: &mut Vec<WorkerEffect>,
    ) {
        self.over(engine).abandon(requests);
        let mut running = BTreeSet::new();
        for request in requests {
            let copies = self
                .requests
                .range((*request, OpId(0))..=(*request, OpId(u64::MAX)));
            let copies: Vec<OpId> = copies.map(|(_, op)| *op).collect();
            for op in copies {
                let its = |task: &super::Task| task.copy.engine == engine;
                if self.tasks.get(&op).is_some_and(its) {
                    self.stop(now, op, effects);
                    running.extend(self.tasks.contains_key(&op).then_some(op));
                }
            }
        }
        if running.is_empty() {
            effects.push(WorkerEffect::Abandoned { ask });
        } else if !self.abandoning.iter().any(|waiting| waiting.ask == ask) {
            self.abandoning.push(Abandoning { ask, running });
        }
    }

    /// Notes that a copy ended, and answers each `Abandon` that waited for no other copy.
    pub(super) fn abandoned(&mut self, op: OpId, effects: &mut Vec<WorkerEffect>) {
        self.abandoning.retain_mut(|waiting| {
            let last = waiting.running.remove(&op) && waiting.running.is_empty();
            if last {
                effects.push(WorkerEffect::Abandoned { ask: waiting.ask });
            }
            !last
        });
    }
}
