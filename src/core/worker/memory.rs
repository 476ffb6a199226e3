//! The engine's memory: what of it may be copied, and until when.

use std::collections::BTreeSet;

use crate::core::sabotage::{Bug, planted};
use crate::types::{EngineId, OpId, RequestId, Time};

use super::check::MemoryBounds;
use super::{WORKER_ABANDONED_MAX, WORKER_ENGINES_MAX, Worker, WorkerEffect};

/// The memory of one engine.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) engine: EngineId,
    pub(super) bounds: MemoryBounds,
    /// Everything up to this request is written.
    pub(super) written: RequestId,
    /// Requests up to this one are over.
    after: RequestId,
}

/// What an engine abandoned. It counts for memory that the engine registers later, too.
#[derive(Debug)]
pub(super) struct Over {
    engine: EngineId,
    /// Requests up to this one are over: a younger one was forgotten.
    forgotten: RequestId,
    /// Later ones that are over, one by one.
    abandoned: BTreeSet<RequestId>,
}

/// An engine that waits until nothing is copied any more for what it abandoned.
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
            // Work with a lower number than a request that is over may not be done yet: the rank says what is.
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
    /// Remembers the youngest one by one; whatever is older than one that is forgotten is over as well.
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
    /// What an engine abandoned; the engine that was asked about longest ago makes room for a new one.
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

    /// The engine hears back when no copy for these requests runs, and none will.
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
        if running.is_empty() || planted(Bug::AbandonEarly) {
            effects.push(WorkerEffect::Abandoned { ask });
        } else if !self.abandoning.iter().any(|waiting| waiting.ask == ask) {
            self.abandoning.push(Abandoning { ask, running });
        }
    }

    /// A copy is over: whoever waited for it and nothing else hears so.
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
