//! The worker: starts, orders and ends copies. It decides nothing about which page lives where.
//!
//! A copy waits until what it reads is written, then for a free place, then runs; it is reported when nothing of it reads
//! or writes any more. Loads and stores wait for places of their own. An order that comes again, late, or after its own
//! cancel is not carried out: the worker remembers how the last [`WORKER_ENDED_MAX`] copies ended and refuses what is
//! older. Every order is answered; see [`orders`] for how. Whatever an older leader ordered is stopped
//! and never reported to a newer one, to which the worker attaches only when nothing of it is left.

mod check;
mod lanes;
mod link;
mod memory;
mod orders;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use crate::core::sabotage::{Bug, planted};
use crate::types::{
    AttachId, Copy, Direction, EndedCopy, EngineId, Epoch, Generation, OpId, PageRun, Record,
    RequestId, ResetId, Scope, Stored, Time,
};

pub use check::MemoryBounds;
use lanes::Lanes;
use link::Link;
use memory::{Abandoning, Memory, Over};
pub use orders::OrderRefusal;
use orders::refused;

/// Copies that a worker keeps, waiting and running together. More are refused, reported as not whole. At worst 0.5 GiB
/// for copies of a few pages, of about 0.5 KB each; every further page takes about 24 bytes.
pub const WORKER_COPIES_MAX: usize = 1 << 20;
/// Ends of copies that a worker remembers; about 100 bytes each.
pub const WORKER_ENDED_MAX: usize = 65_536;
/// Abandoned requests that a worker remembers one by one; it refuses copies for any that is older.
pub const WORKER_ABANDONED_MAX: usize = 4096;
/// Engines of which a worker remembers what they abandoned: the one that is registered, and those before it or about to
/// register. About 1 MiB with [`WORKER_ABANDONED_MAX`] requests each.
pub const WORKER_ENGINES_MAX: usize = 4;

/// Names one order of a leader, so that its answer finds back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BatchId(pub u64);

/// Settings of a worker.
#[derive(Debug, Clone)]
pub struct WorkerSettings {
    /// Copies of one direction that run at one time.
    pub running_max: usize,
    /// How long after it was told to stop a copy may take before the worker ends itself. Default: 10 s.
    pub fence: Duration,
    /// How often it says again who it is while the leader does not answer. Default: 1 s.
    pub attach_every: Duration,
}

impl WorkerSettings {
    /// The defaults, for a number of copies of one direction at one time.
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
        /// What the pages of its copies must lie within.
        bounds: MemoryBounds,
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
        /// When the leader gives the reset up.
        deadline: Time,
    },
    /// An engine has written everything up to this number: pages that stores read, and work that loads wait for.
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
        /// Which requests; at most [`WORKER_ABANDONED_MAX`], or the worker refuses healthy ones that are older.
        requests: BTreeSet<RequestId>,
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
    /// A load waits until this engine has written everything up to here: look for it where the engine's device says so.
    Await {
        /// Which engine.
        engine: EngineId,
        /// Up to which number.
        through: RequestId,
    },
    /// Strike these arena pages out of the inventory: they will be overwritten.
    StrikeOut(PageRun),
    /// Run these copies and report their ends.
    Start(Vec<Copy>),
    /// Stop this copy between two steps (CPU) or parts (GPU); its end is still to be reported.
    Stop(OpId),
    /// The last byte of these pages is there: list them in the inventory.
    List(Record),
    /// Strike the pages of a scope out of the inventory, where they were stored by `through` or before, in slices, and then
    /// tell the leader so. Copies start and end meanwhile. From the deadline on nothing is struck out, and the leader is told
    /// that instead.
    Strike {
        /// Which reset.
        id: ResetId,
        /// Which pages.
        scope: Scope,
        /// The last store that is meant.
        through: Stored,
        /// When the leader gives the reset up.
        deadline: Time,
    },
    /// Tell the leader how copies of an order ended.
    Report {
        /// Which order.
        batch: BatchId,
        /// What is known; for a transfer, one result for each copy.
        copies: Vec<EndedCopy>,
    },
    /// Answer the order that is being handled with an error. It says nothing about any copy.
    Refuse(OrderRefusal),
    /// Tell people that this copy names what it may not. It is reported as not whole.
    Invalid {
        /// Which copy.
        op: OpId,
        /// One line: the field, its value and the remedy.
        problem: String,
    },
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
    /// What a store reads is not written yet, or what a load overwrites.
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
    /// The leader that ordered it is gone: no other one hears of its end, under a number that it may use itself.
    orphan: bool,
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
    /// Every copy, by its request.
    requests: BTreeSet<(RequestId, OpId)>,
    lanes: Lanes,
    /// Deadlines of copies, and of copies that were told to stop.
    deadlines: BTreeSet<(Time, OpId)>,
    ended: BTreeMap<OpId, EndedCopy>,
    /// Orders up to this one are too old to be known, or not for this worker.
    floor: OpId,
    /// What engines abandoned, at most [`WORKER_ENGINES_MAX`] of them; the last that spoke stands last.
    over: Vec<Over>,
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
            requests: BTreeSet::new(),
            lanes: Lanes::default(),
            deadlines: BTreeSet::new(),
            ended: BTreeMap::new(),
            floor: OpId(0),
            over: Vec::new(),
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
            WorkerEvent::Registered {
                engine,
                after,
                bounds,
            } => self.registered(now, Memory::new(engine, after, bounds), effects),
            WorkerEvent::MemoryGone(engine) => self.memory_gone(now, engine, effects),
            WorkerEvent::Ordered {
                epoch,
                batch,
                copies,
            } if self.follows(epoch) => self.ordered(batch, copies, effects),
            WorkerEvent::Cancel { epoch, batch, ops } if self.follows(epoch) => {
                self.cancelled(now, batch, &ops, effects);
            }
            WorkerEvent::Strike {
                epoch,
                id,
                scope,
                through: generation,
                deadline,
            } if self.obeys(epoch) => {
                let through = Stored { epoch, generation };
                effects.push(WorkerEffect::Strike {
                    id,
                    scope,
                    through,
                    deadline,
                });
            }
            WorkerEvent::Strike { epoch, .. } if self.follows(epoch) => {
                effects.push(WorkerEffect::Refuse(OrderRefusal::NotAttached));
            }
            WorkerEvent::Ordered { epoch, .. }
            | WorkerEvent::Cancel { epoch, .. }
            | WorkerEvent::Strike { epoch, .. } => self.refuse_stale(epoch, effects),
            WorkerEvent::Tick => {}
            WorkerEvent::Written { engine, through } => self.wrote(engine, through),
            WorkerEvent::Abandon {
                engine,
                ask,
                requests,
            } => self.abandon(now, engine, ask, &requests, effects),
            WorkerEvent::CopiesEnded(copies) => {
                for copy in copies {
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
                let lane = self.lanes.of(task.copy.direction);
                lane.queue.push_back(op);
            }
        }
    }

    /// Starts as many copies as each direction has places for, all in one batch, loads first. What they overwrite is struck
    /// out first.
    fn start(&mut self, effects: &mut Vec<WorkerEffect>) {
        let mut started = Vec::new();
        for direction in [Direction::Load, Direction::Store] {
            let lane = self.lanes.of(direction);
            while lane.running < self.settings.running_max {
                let Some(op) = lane.queue.pop_front() else {
                    break;
                };
                let queued = self
                    .tasks
                    .get_mut(&op)
                    .filter(|task| task.phase == Phase::Queued && task.copy.direction == direction);
                if let Some(task) = queued {
                    task.phase = Phase::Running;
                    lane.running += 1;
                    started.push(task.copy.clone());
                }
            }
        }
        let tasks = &self.tasks;
        let queued = |op| {
            tasks
                .get(&op)
                .is_some_and(|task| task.phase == Phase::Queued)
        };
        self.lanes.clean(tasks.len(), queued);
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

    fn stop_all(&mut self, now: Time, effects: &mut Vec<WorkerEffect>) {
        let ops: BTreeSet<OpId> = self.tasks.keys().copied().collect();
        ops.into_iter().for_each(|op| self.stop(now, op, effects));
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
            phase,
            stopped,
            orphan,
        } = task;
        let lane = self.lanes.of(copy.direction);
        lane.running -= usize::from(phase == Phase::Running);
        self.requests.remove(&(copy.request, ended.op));
        self.deadlines
            .remove(&(stopped.unwrap_or(copy.deadline), ended.op));
        self.waiting.remove(&(copy.after, ended.op));
        if copy.direction == Direction::Store {
            ended.whole &= stopped.is_none() && now <= copy.deadline;
        }
        ended.whole |= planted(Bug::SwallowError);
        if ended.whole
            && let Some(record) = copy.record
        {
            effects.push(WorkerEffect::List(record));
        }
        if !orphan {
            self.remember(ended);
            self.report(batch, ended, effects);
        }
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
}

#[cfg(test)]
mod tests;
