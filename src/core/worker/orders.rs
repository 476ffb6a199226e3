//! Orders of the leader: which copies begin, which are refused, and how each order is answered.
//!
//! Every order is answered, and the leader treats only a result in [`WorkerEffect::Report`] as the end of a copy:
//!
//! * an order of the leader that the worker follows is answered with one result for each of its copies, once they have
//!   ended. A copy that is not carried out (too old, cancelled before, for other memory, out of bounds, or ordered
//!   while the leader does not know this worker's memory) is reported as not complete: it has not begun, and the worker
//!   remembers the refusal, so that a repeated order does not begin the copy either;
//! * a copy that is open already is left out of the answer to any other order that names it. Its end is reported with
//!   the order that began it, because the answer to a repeated order must never mark a running copy as ended;
//! * an order of another epoch is answered with [`WorkerEffect::Refuse`], which implies nothing about any copy.

use std::collections::BTreeSet;

use kvferry_types::{Copy, Direction, EndedCopy, Epoch, OpId, Time};

use super::check::check;
use super::{Batch, BatchId, Phase, Task, WORKER_COPIES_MAX, Worker, WorkerEffect};

/// Reasons for refusing an order. A refusal implies nothing about any copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OrderRefusal {
    /// The order is of another epoch than the leader that the worker follows.
    #[error("the order is of {order}, this worker follows {followed}: connect again")]
    StaleEpoch {
        /// The epoch of the order.
        order: Epoch,
        /// Epoch of the leader that was found last; 0 without one.
        followed: Epoch,
    },
    /// The leader has not admitted the worker with its current memory.
    #[error("this worker is not attached as it is now: order again after its next attach")]
    NotAttached,
    /// A request to read the inventory whose number is not above that of a later request or of the last attach.
    #[error(
        "this reading has number {number}, and everything up to {last} is over: read with a new number"
    )]
    OldReading {
        /// Number of the request.
        number: u64,
        /// The last number that is no longer accepted.
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
            // A repeat of an open order: the order is answered once.
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
            if let Some(ended) = self.ended.get(&copy.op).copied() {
                self.report(batch, ended, effects);
            } else if !self.begin(batch, copy.clone(), effects) {
                self.remember(refused(copy.op));
                self.report(batch, refused(copy.op), effects);
            }
        }
    }

    /// Registers a copy as waiting or queued. Returns false if the copy is not carried out.
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
        let written = copy.after <= memory.written;
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

    /// Stops the open copies and reports how the others ended. A copy that the worker has never seen is marked as
    /// refused and does not start later.
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

    /// Refuses an order whose epoch is not that of the leader that was found last.
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
