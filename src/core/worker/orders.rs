//! Orders of the leader: what is begun, what is refused, and how each is answered.
//!
//! Every order is answered, and the leader takes only a result in [`WorkerEffect::Report`] for the end of a copy:
//!
//! * an order of the leader that the worker follows is answered with one result for each of its copies, once they have
//!   ended. A copy that is not carried out (too old, cancelled before, for other memory, out of bounds, or ordered while the
//!   leader does not know this worker's memory) is reported as not whole: it has not begun, and the worker remembers that,
//!   so that it will not begin either when the order is repeated;
//! * a copy that is under way is left out of the answer to any other order that names it. Its end is reported with the
//!   order that began it: a repeated order must never make the leader believe that a running copy has ended;
//! * an order of another epoch is answered with [`WorkerEffect::Refuse`], which says nothing about any copy.

use std::collections::BTreeSet;

use crate::core::sabotage::{Bug, planted};
use crate::types::{Copy, Direction, EndedCopy, Epoch, OpId, Time};

use super::check::check;
use super::{Batch, BatchId, Phase, Task, WORKER_COPIES_MAX, Worker, WorkerEffect};

/// Why an order is not taken. It says nothing about copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OrderRefusal {
    /// The order is of another epoch than the leader that the worker follows.
    #[error("the order is of {order}, this worker follows {followed}: connect again")]
    StaleEpoch {
        /// The epoch of the order.
        order: Epoch,
        /// The epoch of the leader that was found last; 0 without one.
        followed: Epoch,
    },
    /// The leader has not admitted the worker as it is now.
    #[error("this worker is not attached as it is now: order again after its next attach")]
    NotAttached,
    /// A question for the inventory that is behind a later one, or behind the last attach.
    #[error(
        "this reading has number {number}, and everything up to {last} is over: read with a new number"
    )]
    OldReading {
        /// Number of the question.
        number: u64,
        /// The last number that is not taken any more.
        last: u64,
    },
}

impl Worker {
    /// Begins the copies that are new, and reports those that are not carried out.
    pub(super) fn ordered(
        &mut self,
        batch: BatchId,
        copies: Vec<Copy>,
        effects: &mut Vec<WorkerEffect>,
    ) {
        if self.batches.contains_key(&batch) {
            // The same order again, while it is open: it has one answer.
            return;
        }
        let mut named = BTreeSet::new();
        let mut copies = copies;
        copies.retain(|copy| !self.tasks.contains_key(&copy.op) && named.insert(copy.op));
        if copies.is_empty() {
            let copies = Vec::new();
            effects.push(WorkerEffect::Report { batch, copies });
            return;
        }
        let (open, ended) = (copies.len(), Vec::new());
        self.batches.insert(batch, Batch { open, ended });
        for copy in copies {
            let again = self.ended.get(&copy.op).copied();
            if let Some(ended) = again.filter(|_| !planted(Bug::RunTwice)) {
                self.report(batch, ended, effects);
            } else if !self.begin(batch, copy.clone(), effects) {
                self.remember(refused(copy.op));
                self.report(batch, refused(copy.op), effects);
            }
        }
    }

    /// False when a copy is not carried out.
    fn begin(&mut self, batch: BatchId, copy: Copy, effects: &mut Vec<WorkerEffect>) -> bool {
        let op = copy.op;
        let admitted = self.link.as_ref().is_some_and(|link| link.admitted);
        let full = self.tasks.len() >= WORKER_COPIES_MAX;
        let memory = self
            .memory
            .as_ref()
            .filter(|memory| admitted && !full && op > self.floor && memory.engine == copy.engine);
        let Some(memory) = memory.filter(|memory| memory.may_copy_for(copy.request, &self.over))
        else {
            return false;
        };
        if let Err(problem) = check(&copy, memory.bounds) {
            let problem = problem.to_string();
            effects.push(WorkerEffect::Invalid { op, problem });
            return false;
        }
        let early = planted(Bug::IgnoreWrites) && copy.direction == Direction::Load;
        let written = copy.after <= memory.written || early;
        self.deadlines.insert((copy.deadline, op));
        self.requests.insert((copy.request, op));
        let phase = if written {
            self.lanes.of(copy.direction).queue.push_back(op);
            Phase::Queued
        } else {
            self.waiting.insert((copy.after, op));
            if copy.direction == Direction::Load {
                effects.push(WorkerEffect::Await {
                    engine: copy.engine,
                    through: copy.after,
                });
            }
            Phase::Waiting
        };
        let task = Task {
            copy,
            batch,
            phase,
            stopped: None,
            orphan: false,
        };
        self.tasks.insert(op, task);
        true
    }

    /// Stops what is under way; says how the others ended. One that was never seen will not start any more.
    pub(super) fn cancelled(
        &mut self,
        now: Time,
        batch: BatchId,
        ops: &[OpId],
        effects: &mut Vec<WorkerEffect>,
    ) {
        let mut copies = Vec::new();
        for op in ops {
            self.stop(now, *op, effects);
            if self.tasks.contains_key(op) {
                continue;
            }
            let ended = self.ended.get(op).copied().unwrap_or(refused(*op));
            self.remember(ended);
            copies.push(ended);
        }
        effects.push(WorkerEffect::Report { batch, copies });
    }

    /// Refuses an order of another epoch than that of the leader that was found last.
    pub(super) fn refuse_stale(&self, order: Epoch, effects: &mut Vec<WorkerEffect>) {
        let followed = self.link.as_ref().map_or(Epoch(0), |link| link.epoch);
        effects.push(WorkerEffect::Refuse(OrderRefusal::StaleEpoch {
            order,
            followed,
        }));
    }
}

pub(super) fn refused(op: OpId) -> EndedCopy {
    EndedCopy {
        op,
        whole: false,
        whole_pages: 0,
        bytes: 0,
        busy_us: 0,
    }
}
