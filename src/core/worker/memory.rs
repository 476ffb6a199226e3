//! The engine's memory: what of it may be copied, and until when.

use std::collections::BTreeSet;

use crate::core::sabotage::{Bug, planted};
use crate::types::{EngineId, OpId, RequestId, Time};

use super::{WORKER_ABANDONED_MAX, Worker, WorkerEffect};

/// The memory of one engine.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) engine: EngineId,
    /// Everything up to this request is written.
    pub(super) written: RequestId,
    /// Requests up to this one are over.
    after: RequestId,
    /// Later ones that are over.
    abandoned: BTreeSet<RequestId>,
}

/// An engine that waits until nothing is copied any more for what it abandoned.
#[derive(Debug)]
pub(super) struct Abandoning {
    ask: u64,
    running: BTreeSet<OpId>,
}

impl Memory {
    pub(super) fn new(engine: EngineId, after: RequestId) -> Self {
        Self {
            engine,
            written: after,
            after,
            abandoned: BTreeSet::new(),
        }
    }

    pub(super) fn may_copy_for(&self, request: RequestId) -> bool {
        request > self.after && !self.abandoned.contains(&request)
    }

    /// Remembers the youngest one by one; whatever is older than one that is forgotten is over as well.
    fn abandon(&mut self, requests: &[RequestId]) {
        self.abandoned
            .extend(requests.iter().filter(|request| **request > self.after));
        while self.abandoned.len() > WORKER_ABANDONED_MAX
            && let Some(oldest) = self.abandoned.pop_first()
        {
            self.after = oldest;
        }
    }
}

impl Worker {
    /// The engine hears back when no copy for these requests runs, and none will.
    pub(super) fn abandon(
        &mut self,
        now: Time,
        engine: EngineId,
        ask: u64,
        requests: Vec<RequestId>,
        effects: &mut Vec<WorkerEffect>,
    ) {
        if let Some(memory) = self
            .memory
            .as_mut()
            .filter(|memory| memory.engine == engine)
        {
            memory.abandon(&requests);
        }
        let running = self.stop_all(
            now,
            |copy| copy.engine == engine && requests.contains(&copy.request),
            effects,
        );
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
