//! The worker: starts, orders and ends copies. Page placement is decided by the leader alone.
//!
//! A copy waits until the engine has written the pages that it reads or overwrites, then until fewer than `running_max`
//! copies of its direction run, then runs. Its end is reported when it no longer reads or writes memory. Loads and
//! stores have separate limits. An order that is repeated, late, or received after its own cancellation is not carried
//! out: the worker remembers how the last [`WORKER_ENDED_MAX`] copies ended and refuses older ones. Every order is
//! answered; see [`orders`] for the answers. Copies that an older leader ordered are stopped and never reported to a
//! newer one. The worker attaches to the newer leader only when none of those copies is left.

mod check;
mod lanes;
mod link;
mod memory;
mod orders;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvferry_types::{
    AttachId, Copy, Direction, EndedCopy, EngineId, Epoch, Generation, OpId, PageRun, Record,
    RequestId, ResetId, Scope, Stored, Time,
};

pub use check::MemoryBounds;
use lanes::Lanes;
use link::Link;
use memory::{Abandoning, Memory, Over};
pub use orders::OrderRefusal;
use orders::refused;

/// Most copies that a worker keeps, waiting and running together. Further copies are refused: reported as not complete.
/// At worst 0.5 GiB for copies of a few pages, of about 0.5 KB each; every further page takes about 24 bytes.
pub const WORKER_COPIES_MAX: usize = 1 << 20;
/// Results of ended copies that a worker remembers; about 100 bytes each.
pub const WORKER_ENDED_MAX: usize = 65_536;
/// Abandoned requests that a worker remembers individually for each engine. Copies for any older request are refused.
pub const WORKER_ABANDONED_MAX: usize = 4096;
/// Engines whose abandoned requests a worker remembers: the registered one, and earlier ones or ones about to register.
/// About 1 MiB with [`WORKER_ABANDONED_MAX`] requests each.
pub const WORKER_ENGINES_MAX: usize = 4;

/// Identifies one order of a leader, so that the answer can be matched to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BatchId(pub u64);

/// Settings of a worker.
#[derive(Debug, Clone)]
pub struct WorkerSettings {
    /// Most copies of one direction that run at the same time.
    pub running_max: usize,
    /// How long a stopped copy may take to end before the worker ends its own process. Default: 10 s.
    pub fence: Duration,
    /// Interval at which the worker repeats an unanswered attach request. Default: 1 s.
    pub attach_every: Duration,
}

impl WorkerSettings {
    /// The defaults, with at least 1 running copy per direction.
    pub fn new(running_max: usize) -> Self {
        Self {
            running_max: running_max.max(1),
            fence: Duration::from_secs(10),
            attach_every: Duration::from_secs(1),
        }
    }
}

/// An input of the worker.
#[derive(Debug, Clone)]
pub enum WorkerEvent {
    /// A leader of this epoch is connected, for the first time or over a new connection.
    LeaderFound(Epoch),
    /// The connection to the leader broke. Its copies are stopped, and their ends are not reported.
    LeaderLost,
    /// The depot is mapped: an attach request can name it, and its inventory can be read.
    DepotReady,
    /// The leader answered an attach request: the worker is admitted or rejected.
    Admitted {
        /// The attach request that is answered.
        attach: AttachId,
        /// Orders up to this one are not for this worker. `None` if the worker is rejected.
        after: Option<OpId>,
    },
    /// An engine has registered its memory, which replaces that of any other engine.
    Registered {
        /// The engine that registered.
        engine: EngineId,
        /// Requests up to this one are over: nothing is copied for them.
        after: RequestId,
        /// Bounds for the pages of its copies.
        bounds: MemoryBounds,
    },
    /// The memory of this engine is about to go away: its copies must stop.
    MemoryGone(EngineId),
    /// The leader orders copies.
    Ordered {
        /// Epoch of the leader that sent the order.
        epoch: Epoch,
        /// Identifies the order in its answer.
        batch: BatchId,
        /// The copies.
        copies: Vec<Copy>,
    },
    /// The leader cancels copies and requests the results of those that have ended.
    Cancel {
        /// Epoch of the leader that sent the order.
        epoch: Epoch,
        /// Identifies the order in its answer.
        batch: BatchId,
        /// The copies to cancel.
        ops: Vec<OpId>,
    },
    /// The leader orders the removal of pages from the inventory, for a reset.
    Strike {
        /// Epoch of the leader that sent the order.
        epoch: Epoch,
        /// The reset.
        id: ResetId,
        /// The pages to remove.
        scope: Scope,
        /// The last store of this epoch that the reset covers: pages stored later stay listed.
        through: Generation,
        /// When the leader gives up the reset.
        deadline: Time,
    },
    /// An engine has written everything up to this request: pages that stores read, and work that loads wait for.
    Written {
        /// The engine that reports.
        engine: EngineId,
        /// The last request whose work is written.
        through: RequestId,
    },
    /// An engine takes back its pages: nothing may be copied for these requests from now on.
    Abandon {
        /// The engine that abandons.
        engine: EngineId,
        /// Identifies the request in [`WorkerEffect::Abandoned`].
        ask: u64,
        /// The abandoned requests, at most [`WORKER_ABANDONED_MAX`]: with more, the worker also refuses older requests
        /// that were not abandoned.
        requests: BTreeSet<RequestId>,
    },
    /// Copies ended: they no longer read or write memory.
    CopiesEnded(Vec<EndedCopy>),
    /// Time passed; see [`Worker::next_timeout`].
    Tick,
}

/// An action that the worker's shell carries out. Effects are carried out in the order in which they are appended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkerEffect {
    /// Send the leader an attach request: no copy is open, and this engine's memory is registered.
    Attach {
        /// Number of the request. A retry has the same number.
        attach: AttachId,
        /// The engine that has registered, or `None`.
        engine: Option<EngineId>,
    },
    /// Report to an engine that its memory is in use from now on, or that the leader rejected it.
    Registered {
        /// The engine that registered.
        engine: EngineId,
        /// True if the memory is in use, false if the leader rejected it.
        admitted: bool,
    },
    /// A load waits until this engine has written everything up to `through`. Watch the engine's progress in its
    /// device's memory if it is published there; otherwise the rank reports it.
    Await {
        /// The engine that the load waits for.
        engine: EngineId,
        /// The last request that must be written.
        through: RequestId,
    },
    /// Remove these arena pages from the inventory, because they are about to be overwritten.
    StrikeOut(PageRun),
    /// Run these copies and report their ends.
    Start(Vec<Copy>),
    /// Stop this copy between two steps (CPU) or parts (GPU). Its end must still be reported.
    Stop(OpId),
    /// Add these pages to the inventory: their last byte was copied.
    List(Record),
    /// Remove the pages of a scope from the inventory, in slices, if they were stored by `through` or before, and then
    /// report to the leader. Copies start and end meanwhile. After the deadline no page is removed, and the leader
    /// receives a report of that instead.
    Strike {
        /// The reset.
        id: ResetId,
        /// The pages to remove.
        scope: Scope,
        /// The last store that the reset covers.
        through: Stored,
        /// When the leader gives up the reset.
        deadline: Time,
    },
    /// Report to the leader how the copies of an order ended.
    Report {
        /// The order that is answered.
        batch: BatchId,
        /// The known results: for a transfer, one for each copy that was not open already.
        copies: Vec<EndedCopy>,
    },
    /// Answer the current order with an error. The error implies nothing about any copy.
    Refuse(OrderRefusal),
    /// Log for operators that a copy failed validation. The copy is reported as not complete.
    Invalid {
        /// The copy that failed validation.
        op: OpId,
        /// One line: the field, its value and the remedy.
        problem: String,
    },
    /// Report to the engine that nothing is copied any longer for the requests that it abandoned.
    Abandoned {
        /// The `ask` of the [`WorkerEvent::Abandon`] that is answered.
        ask: u64,
    },
    /// End this process: a stopped copy has not ended in time, and only the end of the process ends it.
    GiveUp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Waits until the engine has written up to `after`: the pages that a store reads, or that a load overwrites.
    Waiting,
    /// Waits until fewer than `running_max` copies of its direction run.
    Queued,
    /// May read and write memory.
    Running,
}

#[derive(Debug)]
struct Task {
    copy: Copy,
    batch: BatchId,
    phase: Phase,
    /// When the copy must have ended, once it was ordered to stop. Pages that a stopped store writes are never listed.
    stopped: Option<Time>,
    /// The connection to the leader that ordered the copy is lost. Its end is not reported, because another leader may
    /// use the same number for a copy of its own.
    orphan: bool,
}

#[derive(Debug, Default)]
struct Batch {
    open: usize,
    ended: Vec<EndedCopy>,
}

/// The decisions of one worker. See the module documentation.
#[derive(Debug)]
pub struct Worker {
    settings: WorkerSettings,
    link: Option<Link>,
    last_attach: u64,
    depot: bool,
    memory: Option<Memory>,
    tasks: BTreeMap<OpId, Task>,
    batches: BTreeMap<BatchId, Batch>,
    waiting: BTreeSet<(RequestId, OpId)>,
    /// Open copies, by request.
    requests: BTreeSet<(RequestId, OpId)>,
    lanes: Lanes,
    /// Deadlines of copies, and fences of stopped copies.
    deadlines: BTreeSet<(Time, OpId)>,
    ended: BTreeMap<OpId, EndedCopy>,
    /// Orders up to this one are too old to be remembered, or not for this worker.
    floor: OpId,
    /// Abandoned requests of at most [`WORKER_ENGINES_MAX`] engines, in order of the engines' last `Abandon`.
    over: Vec<Over>,
    abandoning: Vec<Abandoning>,
}

impl Worker {
    /// A worker without a leader, depot or engine.
    pub fn new(settings: WorkerSettings) -> Self {
        Self {
            settings,
            link: None,
            last_attach: 0,
            depot: false,
            memory: None,
            tasks: BTreeMap::new(),
            batches: BTreeMap::new(),
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

    /// Handles an event and appends the resulting effects.
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

    /// Starts copies up to `running_max` per direction, all in one batch, loads first. The pages that stores overwrite
    /// are removed from the inventory first.
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
            effects.push(WorkerEffect::StrikeOut(*run));
        }
        effects.push(WorkerEffect::Start(started));
    }

    /// Stops a copy: a running one is ordered to stop and ends later; any other ends immediately.
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

    /// Stops copies whose deadline has passed, and gives up the process if a stopped copy has not ended by its fence.
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

    /// Removes a copy that ended. A stopped or late store counts as not complete; the pages of a complete store are
    /// added to the inventory before the end is reported.
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
