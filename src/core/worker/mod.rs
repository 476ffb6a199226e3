//! The worker: starts, orders and ends copies. It decides nothing about which page lives where.
//!
//! A copy waits until what it reads is written, then for a free place, then runs; it is reported when nothing of it reads
//! or writes any more. An order that comes again, late, or behind its own cancel is not carried out: the worker remembers
//! how the last [`WORKER_ENDED_MAX`] copies ended and refuses what is older. Whatever an older leader ordered is stopped
//! and never reported to a newer one, to which the worker attaches only when nothing of it is left.

mod link;
mod memory;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use crate::core::sabotage::{Bug, planted};
use crate::types::{
    AttachId, Copy, Direction, EndedCopy, EngineId, Epoch, Generation, OpId, PageRun, Record,
    RequestId, ResetId, Scope, Stored, Time,
};

use link::Link;
use memory::{Abandoning, Memory};

/// Copies that a worker keeps, waiting and running together. More are refused, reported as not whole.
pub const WORKER_COPIES_MAX: usize = 1 << 20;
/// Ends of copies that a worker remembers; about 100 bytes each.
pub const WORKER_ENDED_MAX: usize = 65_536;
/// Abandoned requests that a worker remembers one by one; it refuses copies for any that is older.
pub const WORKER_ABANDONED_MAX: usize = 4096;

/// Names one order of a leader, so that its answer finds back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BatchId(pub u64);

/// Settings of a worker.
#[derive(Debug, Clone)]
pub struct WorkerSettings {
    /// Copies that run at one time.
    pub running_max: usize,
    /// How long after it was told to stop a copy may take before the worker ends itself. Default: 10 s.
    pub fence: Duration,
    /// How often it says again who it is while the leader does not answer. Default: 1 s.
    pub attach_every: Duration,
}

impl WorkerSettings {
    /// The defaults, for a number of copies at one time.
    pub fn new(running_max: usize) -> Self {
        Self {
            running_max: running_max.max(1),
            fence: Duration::from_secs(10),
            attach_every: Duration::from_secs(1),
        }
    }
}

/// Something that happened to the worker.
#[derive(Debug, Clone)]
pub enum WorkerEvent {
    /// The leader, of this epoch, is there: for the first time, or over a new connection.
    LeaderFound(Epoch),
    /// The connection to the leader broke; its orders end now, unreported.
    LeaderLost,
    /// The depot is mapped: it can be named, and its inventory read.
    DepotReady,
    /// The leader knows this worker, or turned it away.
    Admitted {
        /// What it answers.
        attach: AttachId,
        /// Orders up to this one are not for this worker; `None` when it is turned away.
        after: Option<OpId>,
    },
    /// An engine has handed its memory over. It takes the place of any other.
    Registered {
        /// Which engine.
        engine: EngineId,
        /// Requests up to this one are over: nothing is copied for them any more.
        after: RequestId,
    },
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
    /// The leader wants these copies stopped, and to know which of them have ended.
    Cancel {
        /// The epoch of the order.
        epoch: Epoch,
        /// Where the answer goes.
        batch: BatchId,
        /// Which.
        ops: Vec<OpId>,
    },
    /// The leader wants pages struck out of the inventory.
    Strike {
        /// The epoch of the order.
        epoch: Epoch,
        /// Which reset.
        id: ResetId,
        /// Which pages.
        scope: Scope,
        /// The last store of this epoch that is meant: what was stored later stays listed.
        through: Generation,
    },
    /// An engine has written what stores up to this request read.
    Written {
        /// Which engine.
        engine: EngineId,
        /// Up to which request.
        through: RequestId,
    },
    /// An engine wants its pages back: nothing may be copied for these requests any more.
    Abandon {
        /// Which engine.
        engine: EngineId,
        /// Where the answer goes.
        ask: u64,
        /// Which requests.
        requests: Vec<RequestId>,
    },
    /// Copies ended: nothing of them reads or writes any more.
    CopiesEnded(Vec<EndedCopy>),
    /// Time passed.
    Tick,
}

/// What the worker wants done, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkerEffect {
    /// Tell the leader that nothing old is under way, and whose memory is here.
    Attach {
        /// Number of the message.
        attach: AttachId,
        /// The engine that has registered, if one has.
        engine: Option<EngineId>,
    },
    /// Tell an engine that its memory is used from now on, or that the leader turned it away.
    Registered {
        /// Which engine.
        engine: EngineId,
        /// Whether it is used.
        admitted: bool,
    },
    /// Strike these arena pages out of the inventory: they will be overwritten.
    StrikeOut(PageRun),
    /// Run these copies and report their ends.
    Start(Vec<Copy>),
    /// Stop this copy between two fragments; its end is still to be reported.
    Stop(OpId),
    /// The last byte of these pages is there: list them in the inventory.
    List(Record),
    /// Strike the pages of a scope out of the inventory, where they were stored by `through` or before.
    StrikeScope {
        /// Which pages.
        scope: Scope,
        /// The last store that is meant.
        through: Stored,
    },
    /// Tell the leader how copies of an order ended.
    Report {
        /// Which order.
        batch: BatchId,
        /// What is known; for a transfer, one result for each copy.
        copies: Vec<EndedCopy>,
    },
    /// Tell the leader that the pages of this reset are struck out.
    Struck(ResetId),
    /// Tell the engine that nothing is copied any more for what it abandoned.
    Abandoned {
        /// What it asked.
        ask: u64,
    },
    /// A copy does not stop: this process must end, so that it does.
    GiveUp,
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
    /// It was told to stop, or came too late: what it writes is worth nothing.
    stopped: Option<Time>,
}

#[derive(Debug, Default)]
struct Batch {
    open: usize,
    ended: Vec<EndedCopy>,
}

/// See the module.
#[derive(Debug)]
pub struct Worker {
    settings: WorkerSettings,
    link: Option<Link>,
    last_attach: u64,
    depot: bool,
    memory: Option<Memory>,
    tasks: HashMap<OpId, Task>,
    batches: HashMap<BatchId, Batch>,
    waiting: BTreeSet<(RequestId, OpId)>,
    queue: VecDeque<OpId>,
    running: usize,
    /// Deadlines of copies, and of copies that were told to stop.
    deadlines: BTreeSet<(Time, OpId)>,
    ended: BTreeMap<OpId, EndedCopy>,
    /// Orders up to this one are too old to be known, or not for this worker.
    floor: OpId,
    abandoning: Vec<Abandoning>,
}

impl Worker {
    /// A worker without leader, depot and engine.
    pub fn new(settings: WorkerSettings) -> Self {
        Self {
            settings,
            link: None,
            last_attach: 0,
            depot: false,
            memory: None,
            tasks: HashMap::new(),
            batches: HashMap::new(),
            waiting: BTreeSet::new(),
            queue: VecDeque::new(),
            running: 0,
            deadlines: BTreeSet::new(),
            ended: BTreeMap::new(),
            floor: OpId(0),
            abandoning: Vec::new(),
        }
    }

    /// Takes an event and appends what is to be done.
    pub fn step(&mut self, now: Time, event: WorkerEvent, effects: &mut Vec<WorkerEffect>) {
        match event {
            WorkerEvent::LeaderFound(epoch) => self.leader_found(now, epoch, effects),
            WorkerEvent::LeaderLost => self.leader_lost(now, effects),
            WorkerEvent::DepotReady => self.depot = true,
            WorkerEvent::Admitted { attach, after } => self.admitted(attach, after, effects),
            WorkerEvent::Registered { engine, after } => {
                self.registered(now, engine, after, effects);
            }
            WorkerEvent::MemoryGone(engine) => self.memory_gone(now, engine, effects),
            WorkerEvent::Ordered {
                epoch,
                batch,
                copies,
            } if self.obeys(epoch) => self.ordered(batch, copies, effects),
            WorkerEvent::Cancel { epoch, batch, ops } if self.obeys(epoch) => {
                self.cancelled(now, batch, &ops, effects);
            }
            WorkerEvent::Strike {
                epoch,
                id,
                scope,
                through: generation,
            } if self.obeys(epoch) => {
                let through = Stored { epoch, generation };
                effects.push(WorkerEffect::StrikeScope { scope, through });
                effects.push(WorkerEffect::Struck(id));
            }
            WorkerEvent::Ordered { .. }
            | WorkerEvent::Cancel { .. }
            | WorkerEvent::Strike { .. }
            | WorkerEvent::Tick => {}
            WorkerEvent::Written { engine, through } => self.wrote(engine, through),
            WorkerEvent::Abandon {
                engine,
                ask,
                requests,
            } => self.abandon(now, engine, ask, requests, effects),
            WorkerEvent::CopiesEnded(copies) => {
                for copy in copies {
                    self.running -= usize::from(self.is_running(copy.op));
                    self.end(now, copy, effects);
                }
            }
        }
        self.fire_deadlines(now, effects);
        self.start(effects);
        self.attach(now, effects);
    }

    /// When the next [`WorkerEvent::Tick`] is due.
    pub fn next_timeout(&self) -> Option<Time> {
        let copies = self.deadlines.first().map(|(at, _)| *at);
        let attach = self.link.as_ref().and_then(Link::next_timeout);
        copies.into_iter().chain(attach).min()
    }

    /// Copies that have not ended.
    pub fn open_copies(&self) -> usize {
        self.tasks.len()
    }

    fn ordered(&mut self, batch: BatchId, copies: Vec<Copy>, effects: &mut Vec<WorkerEffect>) {
        if self.batches.contains_key(&batch) {
            return;
        }
        let known = copies.iter().any(|copy| self.tasks.contains_key(&copy.op));
        if copies.is_empty() || known {
            return;
        }
        let open = copies.len();
        self.batches.insert(
            batch,
            Batch {
                open,
                ended: Vec::new(),
            },
        );
        for copy in copies {
            let op = copy.op;
            let again = self.ended.get(&op).copied();
            if let Some(ended) = again.filter(|_| !planted(Bug::RunTwice)) {
                self.report(batch, ended, effects);
                continue;
            }
            let full = self.tasks.len() >= WORKER_COPIES_MAX;
            let memory = self.memory.as_ref().filter(|memory| {
                op > self.floor
                    && !full
                    && memory.engine == copy.engine
                    && memory.may_copy_for(copy.request)
            });
            let Some(memory) = memory else {
                self.remember(refused(op));
                self.report(batch, refused(op), effects);
                continue;
            };
            let readable = copy.direction == Direction::Load || copy.request <= memory.written;
            self.deadlines.insert((copy.deadline, op));
            let phase = if readable {
                self.queue.push_back(op);
                Phase::Queued
            } else {
                self.waiting.insert((copy.request, op));
                Phase::Waiting
            };
            let task = Task {
                copy,
                batch,
                phase,
                stopped: None,
            };
            self.tasks.insert(op, task);
        }
    }

    /// Stops what is under way; says how the others ended. One that was never seen will not start any more.
    fn cancelled(
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

    fn wrote(&mut self, engine: EngineId, through: RequestId) {
        let Some(memory) = self
            .memory
            .as_mut()
            .filter(|memory| memory.engine == engine)
        else {
            return;
        };
        memory.written = through.max(memory.written);
        while let Some((request, op)) = self
            .waiting
            .first()
            .copied()
            .filter(|(request, _)| *request <= through)
        {
            self.waiting.remove(&(request, op));
            if let Some(task) = self.tasks.get_mut(&op) {
                task.phase = Phase::Queued;
                self.queue.push_back(op);
            }
        }
    }

    /// Starts as many copies as there are places, all in one batch. What they overwrite is struck out first.
    fn start(&mut self, effects: &mut Vec<WorkerEffect>) {
        let mut started = Vec::new();
        while self.running < self.settings.running_max {
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
        if started.is_empty() {
            return;
        }
        let stores = started
            .iter()
            .filter(|copy| copy.direction == Direction::Store);
        for run in stores
            .flat_map(|copy| &copy.pairs)
            .flat_map(|pair| &pair.dst.0)
        {
            if !planted(Bug::KeepRecord) {
                effects.push(WorkerEffect::StrikeOut(*run));
            }
        }
        if planted(Bug::RecordEarly) {
            let records = started.iter().filter_map(|copy| copy.record.clone());
            effects.extend(records.map(WorkerEffect::List));
        }
        effects.push(WorkerEffect::Start(started));
    }

    /// A copy that runs is told to stop and ends later; any other ends here and now.
    fn stop(&mut self, now: Time, op: OpId, effects: &mut Vec<WorkerEffect>) {
        let Some(task) = self.tasks.get_mut(&op) else {
            return;
        };
        if task.phase != Phase::Running {
            return self.end(now, refused(op), effects);
        }
        if task.stopped.is_none() {
            let fence = now + self.settings.fence;
            task.stopped = Some(fence);
            self.deadlines.remove(&(task.copy.deadline, op));
            self.deadlines.insert((fence, op));
            effects.push(WorkerEffect::Stop(op));
        }
    }

    fn stop_all(
        &mut self,
        now: Time,
        which: impl Fn(&Copy) -> bool,
        effects: &mut Vec<WorkerEffect>,
    ) -> BTreeSet<OpId> {
        let which = self.tasks.iter().filter(|(_, task)| which(&task.copy));
        let mut ops: BTreeSet<OpId> = which.map(|(op, _)| *op).collect();
        ops.iter().for_each(|op| self.stop(now, *op, effects));
        ops.retain(|op| self.tasks.contains_key(op));
        ops
    }

    /// A deadline stops a copy. One that was told to stop and has not is ended with this process.
    fn fire_deadlines(&mut self, now: Time, effects: &mut Vec<WorkerEffect>) {
        while let Some((at, op)) = self.deadlines.first().copied().filter(|(at, _)| *at <= now) {
            self.deadlines.pop_first();
            let stopped = self.tasks.get(&op).and_then(|task| task.stopped);
            if stopped == Some(at) {
                effects.push(WorkerEffect::GiveUp);
            } else {
                self.stop(now, op, effects);
            }
        }
    }

    /// A copy is over. What a stopped or late store wrote is worth nothing; anything else of it is listed first.
    fn end(&mut self, now: Time, mut ended: EndedCopy, effects: &mut Vec<WorkerEffect>) {
        let Some(task) = self.tasks.remove(&ended.op) else {
            return;
        };
        let Task {
            copy,
            batch,
            stopped,
            ..
        } = task;
        self.deadlines
            .remove(&(stopped.unwrap_or(copy.deadline), ended.op));
        self.waiting.remove(&(copy.request, ended.op));
        if copy.direction == Direction::Store {
            ended.whole &= stopped.is_none() && now <= copy.deadline;
        }
        ended.whole |= planted(Bug::SwallowError);
        if ended.whole
            && let Some(record) = copy.record
        {
            effects.push(WorkerEffect::List(record));
        }
        self.remember(ended);
        self.report(batch, ended, effects);
        self.abandoned(ended.op, effects);
    }

    fn remember(&mut self, ended: EndedCopy) {
        if ended.op > self.floor {
            self.ended.insert(ended.op, ended);
        }
        while self.ended.len() > WORKER_ENDED_MAX
            && let Some((oldest, _)) = self.ended.pop_first()
        {
            self.floor = self.floor.max(oldest);
        }
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
        whole_pages: 0,
        bytes: 0,
        busy_us: 0,
    }
}

#[cfg(test)]
mod tests;
