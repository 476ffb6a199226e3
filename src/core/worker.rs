//! The worker: starts, orders and ends copies. It decides nothing about which page lives where.
//!
//! A copy waits until what it reads is written, then for a free place, then runs; it is reported exactly once, when
//! nothing of it reads or writes any more. Whatever an older leader ordered is stopped and never reported to a newer one.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use crate::types::{Copy, Direction, EndedCopy, EngineId, Epoch, OpId, RequestId, Time};

/// Copies that a worker keeps, waiting and running together. More are refused, reported as not whole.
pub const WORKER_COPIES_MAX: usize = 1 << 20;

/// Names one order of a leader, so that its answer finds back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BatchId(pub u64);

/// Something that happened to the worker.
#[derive(Debug, Clone)]
pub enum WorkerEvent {
    /// The leader, of this epoch, is there; orders of older epochs end now.
    Leader(Epoch),
    /// The connection to the leader broke; its orders end now, unreported.
    LeaderLost,
    /// The memory of an engine can be reached; for the first time, or still.
    MemoryReady(EngineId),
    /// The memory of this engine is going away.
    MemoryGone(EngineId),
    /// The leader orders copies.
    Ordered {
        /// The epoch of the order.
        epoch: Epoch,
        /// Where the answer goes.
        batch: BatchId,
        /// The copies.
        copies: Vec<Copy>,
    },
    /// The leader wants these copies stopped.
    Cancel(Vec<OpId>),
    /// An engine has written what stores up to this request read.
    Written {
        /// Which engine.
        engine: EngineId,
        /// Up to which request.
        through: RequestId,
    },
    /// Copies ended: nothing of them reads or writes any more.
    CopiesEnded(Vec<EndedCopy>),
    /// Time passed.
    Tick,
}

/// What the worker wants done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkerEffect {
    /// Run these copies and report their ends.
    Start(Vec<Copy>),
    /// Stop this copy between two fragments; its end is still to be reported.
    Stop(OpId),
    /// Tell the leader how the copies of an order ended.
    Report {
        /// Which order.
        batch: BatchId,
        /// One result for each copy.
        copies: Vec<EndedCopy>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// What it reads is not written yet.
    Waiting,
    /// It waits for a place.
    Queued,
    /// It may read and write.
    Running,
}

#[derive(Debug)]
struct Task {
    copy: Copy,
    batch: BatchId,
    phase: Phase,
}

#[derive(Debug, Default)]
struct Batch {
    open: usize,
    ended: Vec<EndedCopy>,
}

/// See the module.
#[derive(Debug)]
pub struct Worker {
    running_max: usize,
    epoch: Epoch,
    tasks: HashMap<OpId, Task>,
    batches: HashMap<BatchId, Batch>,
    waiting: BTreeMap<EngineId, BTreeSet<(RequestId, OpId)>>,
    queue: VecDeque<OpId>,
    running: usize,
    written: HashMap<EngineId, RequestId>,
    deadlines: BTreeSet<(Time, OpId)>,
}

impl Worker {
    /// A worker that runs at most `running_max` copies at one time.
    pub fn new(running_max: usize) -> Self {
        Self {
            running_max: running_max.max(1),
            epoch: Epoch(0),
            tasks: HashMap::new(),
            batches: HashMap::new(),
            waiting: BTreeMap::new(),
            queue: VecDeque::new(),
            running: 0,
            written: HashMap::new(),
            deadlines: BTreeSet::new(),
        }
    }

    /// Takes an event and appends what is to be done.
    pub fn step(&mut self, now: Time, event: WorkerEvent, effects: &mut Vec<WorkerEffect>) {
        match event {
            WorkerEvent::Leader(epoch) if epoch == self.epoch => {}
            WorkerEvent::Leader(epoch) => {
                self.epoch = epoch;
                self.drop_orders(effects);
            }
            WorkerEvent::LeaderLost => self.drop_orders(effects),
            WorkerEvent::MemoryReady(engine) => {
                self.written.entry(engine).or_insert(RequestId(0));
            }
            WorkerEvent::MemoryGone(engine) => {
                self.written.remove(&engine);
                let lost = |task: &Task| task.copy.engine == engine;
                self.stop_all(lost, effects);
            }
            WorkerEvent::Ordered {
                epoch,
                batch,
                copies,
            } => {
                self.ordered(epoch, batch, copies, effects);
            }
            WorkerEvent::Cancel(ops) => ops.into_iter().for_each(|op| self.stop(op, effects)),
            WorkerEvent::Written { engine, through } => self.wrote(engine, through),
            WorkerEvent::CopiesEnded(copies) => {
                for copy in copies {
                    self.running -= usize::from(self.is_running(copy.op));
                    self.end(copy, effects);
                }
            }
            WorkerEvent::Tick => {}
        }
        while let Some((_, op)) = self.deadlines.first().copied().filter(|(at, _)| *at <= now) {
            self.deadlines.pop_first();
            self.stop(op, effects);
        }
        self.start(effects);
    }

    /// When the next [`WorkerEvent::Tick`] is due.
    pub fn next_timeout(&self) -> Option<Time> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// Copies that have not ended.
    pub fn open_copies(&self) -> usize {
        self.tasks.len()
    }

    fn drop_orders(&mut self, effects: &mut Vec<WorkerEffect>) {
        self.batches.clear();
        self.stop_all(|_| true, effects);
    }

    fn ordered(
        &mut self,
        epoch: Epoch,
        batch: BatchId,
        copies: Vec<Copy>,
        effects: &mut Vec<WorkerEffect>,
    ) {
        if epoch != self.epoch || self.batches.contains_key(&batch) {
            return;
        }
        self.batches.insert(
            batch,
            Batch {
                open: copies.len(),
                ended: Vec::new(),
            },
        );
        for copy in copies {
            let op = copy.op;
            let known = self.tasks.contains_key(&op) || self.tasks.len() >= WORKER_COPIES_MAX;
            let Some(written) = self.written.get(&copy.engine).copied().filter(|_| !known) else {
                self.report(batch, refused(op), effects);
                continue;
            };
            let readable = copy.direction == Direction::Load || copy.after <= written;
            self.deadlines.insert((copy.deadline, op));
            let phase = match readable {
                true => {
                    self.queue.push_back(op);
                    Phase::Queued
                }
                false => {
                    self.waiting
                        .entry(copy.engine)
                        .or_default()
                        .insert((copy.after, op));
                    Phase::Waiting
                }
            };
            self.tasks.insert(op, Task { copy, batch, phase });
        }
    }

    fn wrote(&mut self, engine: EngineId, through: RequestId) {
        let Some(written) = self.written.get_mut(&engine) else {
            return;
        };
        *written = through.max(*written);
        let Some(waiting) = self.waiting.get_mut(&engine) else {
            return;
        };
        while let Some((after, op)) = waiting
            .first()
            .copied()
            .filter(|(after, _)| *after <= through)
        {
            waiting.remove(&(after, op));
            if let Some(task) = self.tasks.get_mut(&op) {
                task.phase = Phase::Queued;
                self.queue.push_back(op);
            }
        }
    }

    /// Starts as many copies as there are places, all in one batch.
    fn start(&mut self, effects: &mut Vec<WorkerEffect>) {
        let mut started = Vec::new();
        while self.running < self.running_max {
            let Some(op) = self.queue.pop_front() else {
                break;
            };
            let queued = self
                .tasks
                .get_mut(&op)
                .filter(|task| task.phase == Phase::Queued);
            if let Some(task) = queued {
                task.phase = Phase::Running;
                self.running += 1;
                started.push(task.copy.clone());
            }
        }
        if !started.is_empty() {
            effects.push(WorkerEffect::Start(started));
        }
    }

    /// A copy that runs is told to stop and ends later; any other ends here and now.
    fn stop(&mut self, op: OpId, effects: &mut Vec<WorkerEffect>) {
        let Some(task) = self.tasks.get(&op) else {
            return;
        };
        match task.phase {
            Phase::Running => effects.push(WorkerEffect::Stop(op)),
            Phase::Waiting | Phase::Queued => self.end(refused(op), effects),
        }
    }

    fn stop_all(&mut self, which: impl Fn(&Task) -> bool, effects: &mut Vec<WorkerEffect>) {
        let mut ops: Vec<OpId> = self
            .tasks
            .iter()
            .filter(|(_, task)| which(task))
            .map(|(op, _)| *op)
            .collect();
        ops.sort_unstable();
        ops.into_iter().for_each(|op| self.stop(op, effects));
    }

    fn end(&mut self, ended: EndedCopy, effects: &mut Vec<WorkerEffect>) {
        let Some(task) = self.tasks.remove(&ended.op) else {
            return;
        };
        self.deadlines.remove(&(task.copy.deadline, ended.op));
        if let Some(waiting) = self.waiting.get_mut(&task.copy.engine) {
            waiting.remove(&(task.copy.after, ended.op));
        }
        self.report(task.batch, ended, effects);
    }

    fn report(&mut self, id: BatchId, ended: EndedCopy, effects: &mut Vec<WorkerEffect>) {
        let Some(batch) = self.batches.get_mut(&id) else {
            return;
        };
        batch.ended.push(ended);
        if batch.ended.len() == batch.open
            && let Some(batch) = self.batches.remove(&id)
        {
            effects.push(WorkerEffect::Report {
                batch: id,
                copies: batch.ended,
            });
        }
    }

    fn is_running(&self, op: OpId) -> bool {
        self.tasks
            .get(&op)
            .is_some_and(|task| task.phase == Phase::Running)
    }
}

fn refused(op: OpId) -> EndedCopy {
    EndedCopy {
        op,
        whole: false,
        bytes: 0,
        busy_us: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{FragmentPair, PageList};

    const ENGINE: EngineId = EngineId([1; 16]);

    fn copy(op: u64, direction: Direction, after: u64) -> Copy {
        let pair = FragmentPair {
            src: PageList::run(0, 1),
            dst: PageList::run(0, 1),
        };
        Copy {
            op: OpId(op),
            engine: ENGINE,
            direction,
            pairs: vec![pair],
            after: RequestId(after),
            deadline: Time(100),
        }
    }

    fn worker() -> Worker {
        let mut worker = Worker::new(2);
        worker.step(Time(0), WorkerEvent::Leader(Epoch(1)), &mut vec![]);
        worker.step(Time(0), WorkerEvent::MemoryReady(ENGINE), &mut vec![]);
        worker
    }

    fn step(worker: &mut Worker, now: u64, event: WorkerEvent) -> Vec<WorkerEffect> {
        let mut effects = Vec::new();
        worker.step(Time(now), event, &mut effects);
        effects
    }

    fn order(worker: &mut Worker, epoch: u64, batch: u64, copies: Vec<Copy>) -> Vec<WorkerEffect> {
        let batch = BatchId(batch);
        step(
            worker,
            0,
            WorkerEvent::Ordered {
                epoch: Epoch(epoch),
                batch,
                copies,
            },
        )
    }

    fn whole(op: u64) -> EndedCopy {
        EndedCopy {
            op: OpId(op),
            whole: true,
            bytes: 1,
            busy_us: 1,
        }
    }

    #[test]
    fn a_store_reads_nothing_before_it_is_written() {
        let mut worker = worker();
        assert_eq!(
            order(&mut worker, 1, 1, vec![copy(1, Direction::Store, 5)]),
            []
        );
        let early = WorkerEvent::Written {
            engine: ENGINE,
            through: RequestId(4),
        };
        assert_eq!(step(&mut worker, 0, early), []);
        let written = WorkerEvent::Written {
            engine: ENGINE,
            through: RequestId(5),
        };
        let effects = step(&mut worker, 0, written);
        assert_eq!(
            effects,
            [WorkerEffect::Start(vec![copy(1, Direction::Store, 5)])]
        );
    }

    #[test]
    fn an_order_is_reported_once_when_all_of_it_has_ended() {
        let mut worker = worker();
        let copies = vec![copy(1, Direction::Load, 0), copy(2, Direction::Load, 0)];
        order(&mut worker, 1, 1, copies);
        assert_eq!(
            step(&mut worker, 0, WorkerEvent::CopiesEnded(vec![whole(2)])),
            []
        );
        let effects = step(
            &mut worker,
            0,
            WorkerEvent::CopiesEnded(vec![whole(1), whole(1)]),
        );
        let copies = vec![whole(2), whole(1)];
        assert_eq!(
            effects,
            [WorkerEffect::Report {
                batch: BatchId(1),
                copies
            }]
        );
        assert_eq!(worker.open_copies(), 0);
    }

    #[test]
    fn no_more_copies_run_than_there_are_places() {
        let mut worker = worker();
        let copies = (1..=3).map(|op| copy(op, Direction::Load, 0)).collect();
        let effects = order(&mut worker, 1, 1, copies);
        assert!(matches!(&effects[..], [WorkerEffect::Start(started)] if started.len() == 2));
        let effects = step(&mut worker, 0, WorkerEvent::CopiesEnded(vec![whole(1)]));
        assert!(matches!(&effects[..], [WorkerEffect::Start(started)] if started[0].op == OpId(3)));
    }

    #[test]
    fn a_late_copy_is_stopped_and_reported_only_when_it_has_ended() {
        let mut worker = worker();
        order(&mut worker, 1, 1, vec![copy(1, Direction::Load, 0)]);
        assert_eq!(
            step(&mut worker, 100, WorkerEvent::Tick),
            [WorkerEffect::Stop(OpId(1))]
        );
        let ended = refused(OpId(1));
        let effects = step(&mut worker, 101, WorkerEvent::CopiesEnded(vec![ended]));
        assert_eq!(
            effects,
            [WorkerEffect::Report {
                batch: BatchId(1),
                copies: vec![ended]
            }]
        );
    }

    #[test]
    fn a_copy_that_waits_in_vain_ends_at_its_deadline() {
        let mut worker = worker();
        order(&mut worker, 1, 1, vec![copy(1, Direction::Store, 5)]);
        let effects = step(&mut worker, 100, WorkerEvent::Tick);
        let copies = vec![refused(OpId(1))];
        assert_eq!(
            effects,
            [WorkerEffect::Report {
                batch: BatchId(1),
                copies
            }]
        );
        let written = WorkerEvent::Written {
            engine: ENGINE,
            through: RequestId(5),
        };
        assert_eq!(step(&mut worker, 101, written), []);
    }

    #[test]
    fn orders_of_an_older_epoch_have_no_effect_and_their_ends_are_not_reported() {
        let mut worker = worker();
        order(&mut worker, 1, 1, vec![copy(1, Direction::Load, 0)]);
        let effects = step(&mut worker, 0, WorkerEvent::Leader(Epoch(2)));
        assert_eq!(effects, [WorkerEffect::Stop(OpId(1))]);
        assert_eq!(
            step(
                &mut worker,
                0,
                WorkerEvent::CopiesEnded(vec![refused(OpId(1))])
            ),
            []
        );
        assert_eq!(
            order(&mut worker, 1, 2, vec![copy(9, Direction::Load, 0)]),
            []
        );
        assert_eq!(worker.open_copies(), 0);
    }

    #[test]
    fn what_was_written_stays_known_until_the_memory_goes() {
        let mut worker = worker();
        let written = WorkerEvent::Written {
            engine: ENGINE,
            through: RequestId(5),
        };
        step(&mut worker, 0, written);
        step(&mut worker, 0, WorkerEvent::Leader(Epoch(2)));
        step(&mut worker, 0, WorkerEvent::MemoryReady(ENGINE));
        let effects = order(&mut worker, 2, 1, vec![copy(1, Direction::Store, 5)]);
        assert!(matches!(&effects[..], [WorkerEffect::Start(_)]));
        step(&mut worker, 0, WorkerEvent::MemoryGone(ENGINE));
        step(&mut worker, 0, WorkerEvent::MemoryReady(ENGINE));
        assert_eq!(
            order(&mut worker, 2, 2, vec![copy(2, Direction::Store, 5)]),
            []
        );
    }

    #[test]
    fn copies_of_memory_that_is_not_there_are_refused() {
        let mut worker = worker();
        step(&mut worker, 0, WorkerEvent::MemoryGone(ENGINE));
        let effects = order(&mut worker, 1, 1, vec![copy(1, Direction::Load, 0)]);
        let copies = vec![refused(OpId(1))];
        assert_eq!(
            effects,
            [WorkerEffect::Report {
                batch: BatchId(1),
                copies
            }]
        );
    }
}
