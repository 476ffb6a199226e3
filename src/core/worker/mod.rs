//! The worker: starts, orders and ends copies. Page placement is decided by the leader alone.
//!
//! A copy waits until the engine has written the pages that it reads or overwrites, then until fewer than `running_max`
//! copies of its edge run and the rate of its edge permits its start, then runs. Its end is reported when it no longer
//! reads or writes memory. Loads and stores have separate queues, limits and rates. An order that is repeated, late, or
//! received after its own cancellation is not carried out: the worker remembers how the last [`WORKER_ENDED_MAX`]
//! copies ended and refuses older ones. Every order is answered; see [`orders`] for the answers. Copies that an older
//! leader ordered are stopped and never reported to a newer one. The worker attaches to the newer leader only when none
//! of those copies is left, and states an engine's memory only when no copy of other memory is left; see [`link`].

mod check;
mod copies;
mod lanes;
mod link;
mod memory;
mod meters;
mod orders;
mod pace;

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;
use std::time::Duration;

use kvferry_types::{
    AttachId, Edge, EndedCopy, EngineId, Epoch, MemoryId, PageRun, PerTier, Record, RequestId,
    ResetId, Scope, Stored, TierId, Time, Transfer, TransferId, User,
};

use crate::Contradiction;

pub use check::{GroupBounds, MemoryBounds};
pub use copies::EdgeLoad;
use copies::{Copies, Expired, OpenCopy, Stop};
use link::LeaderLink;
use memory::{Abandoned, Memory};
pub use meters::EdgeCounts;
use meters::Meters;
pub use orders::OrderRefusal;
use orders::{Orders, refused};
pub use pace::PACE_BURST;

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
/// Engines without memory of which a worker remembers the last request that they abandoned, after it has dropped their
/// lists: 400 KiB at most. An engine beyond them is refused.
pub const WORKER_ABANDONERS_MAX: usize = 4096;
/// Engines of those of each user other than kvferry's own: 16 such users leave half of them to the others.
pub const WORKER_ABANDONERS_OF_USER_MAX: usize = 128;

/// Identifies one order of a leader, so that the answer can be matched to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BatchId(pub u64);

/// Settings of a worker.
#[derive(Debug, Clone)]
pub struct WorkerSettings {
    /// Most copies of one edge that run at the same time.
    pub running_max: usize,
    /// Most bytes a second that the copies of an edge move, on average; without an entry as many as they can. A copy
    /// starts when those before it are paid for; see [`PACE_BURST`].
    pub bytes_per_s: BTreeMap<Edge, NonZeroU64>,
    /// How long a stopped copy may take to end before the worker ends its own process. Default: 10 s.
    pub fence: Duration,
    /// Interval at which the worker repeats an unanswered attach request or memory statement. Default: 1 s.
    pub attach_every: Duration,
}

impl WorkerSettings {
    /// The defaults, with at least 1 running copy for each edge and no limits of their rates.
    pub fn new(running_max: usize) -> Self {
        Self {
            running_max: running_max.max(1),
            bytes_per_s: BTreeMap::new(),
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
    /// A depot below host memory was opened or closed: the number of its pages is another one.
    TiersChanged,
    /// The leader answered an attach request: the worker is admitted or rejected.
    Admitted {
        /// The attach request that is answered.
        attach: AttachId,
        /// Orders up to this one are not for this worker. `None` if the worker is rejected.
        after: Option<TransferId>,
    },
    /// The leader answered a statement of the memory: the memory is in use or rejected.
    MemoryAdmitted {
        /// The statement that is answered.
        number: MemoryId,
        /// Orders for an engine's memory up to this one are not for this memory. `None` if the memory is rejected.
        after: Option<TransferId>,
    },
    /// The leader answered a statement of the tiers.
    TiersAdmitted {
        /// The statement that is answered.
        number: MemoryId,
        /// False if the leader knows no such statement.
        known: bool,
    },
    /// An engine has registered its memory, which replaces that of any other engine.
    Registered {
        /// The engine that registered.
        engine: EngineId,
        /// Requests up to this one are over: nothing is copied for them.
        abandoned_through: RequestId,
        /// Bounds for the device pages of its copies.
        bounds: MemoryBounds,
    },
    /// The memory of this engine is about to go away: its copies must stop.
    MemoryGone(EngineId),
    /// The leader orders transfers.
    Ordered {
        /// Epoch of the leader that sent the order.
        epoch: Epoch,
        /// Identifies the order in its answer.
        batch: BatchId,
        /// The transfers.
        transfers: Vec<Transfer>,
        /// Pages of the size that the order names in the depot of each tier.
        arena_pages: PerTier<u32>,
    },
    /// The leader cancels copies and requests the results of those that have ended.
    Cancel {
        /// Epoch of the leader that sent the order.
        epoch: Epoch,
        /// Identifies the order in its answer.
        batch: BatchId,
        /// The copies to cancel.
        transfers: Vec<TransferId>,
    },
    /// The leader orders the removal of pages from the inventory, for a reset.
    Invalidate {
        /// Epoch of the leader that sent the order.
        epoch: Epoch,
        /// The reset.
        id: ResetId,
        /// The pages to remove.
        scope: Scope,
        /// The tier whose inventory is changed; `None` for all of them.
        tier: Option<TierId>,
        /// The last store of this epoch that the reset covers: pages stored later stay listed.
        through: TransferId,
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
        /// Its user.
        user: User,
        /// Identifies the request in [`WorkerEffect::Abandoned`].
        number: u64,
        /// The abandoned requests, at most [`WORKER_ABANDONED_MAX`]: with more, the worker also refuses older requests
        /// that were not abandoned.
        requests: BTreeSet<RequestId>,
    },
    /// As [`Self::Abandon`], for all requests up to this one.
    AbandonThrough {
        /// The engine that abandons.
        engine: EngineId,
        /// Its user.
        user: User,
        /// Identifies the request in [`WorkerEffect::Abandoned`].
        number: u64,
        /// The last abandoned request.
        through: RequestId,
    },
    /// Copies ended: they no longer read or write memory.
    CopiesEnded(Vec<EndedCopy>),
    /// Time passed; see [`Worker::next_timeout`].
    Tick,
}

/// An action that the worker's shell carries out. Effects are carried out in the order in which they are appended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkerEffect {
    /// Send the leader an attach request: no copy is open.
    Attach {
        /// Number of the request. A retry has the same number.
        attach: AttachId,
    },
    /// State the registered memory to the leader, or that there is none: no copy of other memory is open.
    StateMemory {
        /// Number of the statement. A retry has the same number.
        number: MemoryId,
    },
    /// State the pages of the tiers below host memory to the leader: their number has changed. Copies go on.
    StateTiers {
        /// Number of the statement; statements of the memory share its sequence. A retry has the same number.
        number: MemoryId,
    },
    /// Report to an engine that its memory is in use from now on, or that the leader rejected it.
    Registered {
        /// The engine that registered.
        engine: EngineId,
        /// True if the memory is in use, false if the leader rejected it.
        admitted: bool,
    },
    /// A load, or a store of what earlier work writes, waits until this engine has written everything up to `through`.
    /// Watch the engine's progress in its device's memory if it is published there; otherwise the rank reports it.
    Await {
        /// The engine that the copy waits for.
        engine: EngineId,
        /// The last number that must be written.
        through: RequestId,
    },
    /// Remove these arena pages from the inventory of a tier, because they are about to be overwritten, or failed their
    /// checksum.
    Unlist {
        /// The tier.
        tier: TierId,
        /// The pages.
        run: PageRun,
    },
    /// Run these copies and report their ends.
    Start {
        /// The edge of all of them.
        edge: Edge,
        /// The copies, in the order in which they start.
        copies: Vec<Transfer>,
    },
    /// Stop this copy between two steps (CPU) or parts (GPU). Its end must still be reported.
    Stop(TransferId),
    /// Add these pages to the inventory of a tier: their last byte was copied.
    List {
        /// The tier.
        tier: TierId,
        /// The pages.
        record: Record,
    },
    /// Remove the pages of a scope from the inventory, in slices, if they were stored by `through` or before, and then
    /// report to the leader. Copies start and end meanwhile. After the deadline no page is removed, and the leader
    /// receives a report of that instead.
    Invalidate {
        /// The reset.
        id: ResetId,
        /// The pages to remove.
        scope: Scope,
        /// The tier whose inventory is changed; `None` for all of them.
        tier: Option<TierId>,
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
        transfer: TransferId,
        /// One line: the field, its value and the remedy.
        problem: String,
    },
    /// Report to the engine that nothing is copied any longer for the requests that it abandoned.
    Abandoned {
        /// The `number` of the [`WorkerEvent::Abandon`] or [`WorkerEvent::AbandonThrough`] that is answered.
        number: u64,
    },
    /// End this process: a stopped copy has not ended in time, and only the end of the process ends it.
    ExitProcess,
}

/// The decisions of one worker. See the module documentation.
#[derive(Debug)]
pub struct Worker {
    settings: WorkerSettings,
    /// The connection to the leader, and the attach requests over it.
    leader: LeaderLink,
    /// The orders that are not answered, and the ends of earlier copies.
    orders: Orders,
    copies: Copies,
    /// The registered memory of an engine.
    memory: Option<Memory>,
    /// The requests that engines abandoned.
    abandoned: Abandoned,
    /// The copies that ended.
    meters: Meters,
}

impl Worker {
    /// A worker without a leader, depot or engine.
    pub fn new(settings: WorkerSettings) -> Self {
        Self {
            settings,
            leader: LeaderLink::default(),
            orders: Orders::default(),
            copies: Copies::default(),
            memory: None,
            abandoned: Abandoned::default(),
            meters: Meters::default(),
        }
    }

    /// Handles an event and appends the resulting effects.
    pub fn step(&mut self, now: Time, event: WorkerEvent, effects: &mut Vec<WorkerEffect>) {
        match event {
            WorkerEvent::LeaderFound(epoch) => self.leader_found(now, epoch, effects),
            WorkerEvent::LeaderLost => self.leader_lost(now, effects),
            WorkerEvent::DepotReady => self.leader.depot_ready(),
            WorkerEvent::TiersChanged => self.tiers_changed(),
            WorkerEvent::Admitted { attach, after } => self.admitted(attach, after, effects),
            WorkerEvent::MemoryAdmitted { number, after } => {
                self.memory_admitted(number, after, effects);
            }
            WorkerEvent::TiersAdmitted { number, known } => {
                self.tiers_admitted(now, number, known, effects);
            }
            WorkerEvent::Registered {
                engine,
                abandoned_through,
                bounds,
            } => self.registered(now, Memory::new(engine, abandoned_through, bounds), effects),
            WorkerEvent::MemoryGone(engine) => self.memory_gone(now, engine, effects),
            WorkerEvent::Ordered {
                epoch,
                batch,
                transfers,
                arena_pages,
            } if self.leader.is_of_leader(epoch) => {
                self.ordered(now, batch, (transfers, &arena_pages), effects);
            }
            WorkerEvent::Cancel {
                epoch,
                batch,
                transfers,
            } if self.leader.is_of_leader(epoch) => {
                self.cancelled(now, batch, &transfers, effects);
            }
            WorkerEvent::Invalidate {
                epoch,
                id,
                scope,
                tier,
                through: transfer,
                deadline,
            } if self.leader.is_attached_to(epoch) => {
                let through = Stored { epoch, transfer };
                effects.push(WorkerEffect::Invalidate {
                    id,
                    scope,
                    tier,
                    through,
                    deadline,
                });
            }
            WorkerEvent::Invalidate { epoch, .. } if self.leader.is_of_leader(epoch) => {
                effects.push(WorkerEffect::Refuse(OrderRefusal::NotAttached));
            }
            WorkerEvent::Ordered { epoch, .. }
            | WorkerEvent::Cancel { epoch, .. }
            | WorkerEvent::Invalidate { epoch, .. } => self.refuse_stale(epoch, effects),
            WorkerEvent::Tick => {}
            WorkerEvent::Written { engine, through } => self.wrote(now, engine, through),
            WorkerEvent::Abandon {
                engine,
                user,
                number,
                requests,
            } => self.abandon(now, (engine, user), number, &requests, effects),
            WorkerEvent::AbandonThrough {
                engine,
                user,
                number,
                through,
            } => self.abandon_through(now, (engine, user), number, through, effects),
            WorkerEvent::CopiesEnded(copies) => {
                for copy in copies {
                    self.end(now, copy, effects);
                }
            }
        }
        self.fire_deadlines(now, effects);
        self.start(now, effects);
        self.attach(now, effects);
    }

    /// The copies that ended since the worker's start, by edge.
    pub fn edge_counts(&self) -> &BTreeMap<Edge, EdgeCounts> {
        self.meters.counts()
    }

    /// The open copies of each edge that has any. Takes time in proportion to their number.
    pub fn edge_loads(&self) -> BTreeMap<Edge, EdgeLoad> {
        self.copies.loads()
    }

    /// When the next [`WorkerEvent::Tick`] is due.
    pub fn next_timeout(&self) -> Option<Time> {
        let timeouts = [
            self.next_start(),
            self.copies.next_timeout(),
            self.leader.next_timeout(),
        ];
        timeouts.into_iter().flatten().min()
    }

    /// When the next of the copies starts that wait for nothing but the rate of their edge.
    pub fn next_start(&self) -> Option<Time> {
        self.copies.next_start(self.settings.running_max)
    }

    /// When an open copy was ordered and its pages were written, whichever is later; `None` before.
    pub fn ready_at(&self, transfer: TransferId) -> Option<Time> {
        self.copies.ready_at(transfer)
    }

    /// Copies that have not ended.
    pub fn open_copies(&self) -> usize {
        self.copies.len()
    }

    /// Recounts what each part counts. `Err` names the first contradiction.
    pub fn check(&self) -> Result<(), Contradiction> {
        self.copies.check()?;
        self.orders.check()?;
        self.abandoned.check(&self.copies)
    }

    fn wrote(&mut self, now: Time, engine: EngineId, through: RequestId) {
        let memory = self.memory.as_mut();
        if let Some(memory) = memory.filter(|memory| memory.engine() == engine) {
            memory.wrote(through);
            self.copies.wrote(now, through);
        }
    }

    /// Starts ready copies, those of each edge in one batch. The pages of a tier that they overwrite are removed from its
    /// inventory first.
    fn start(&mut self, now: Time, effects: &mut Vec<WorkerEffect>) {
        let started = self.copies.start(now, &self.settings);
        let to_tier = started.iter().filter(|(edge, _)| edge.to != TierId::Device);
        for (edge, copies) in to_tier {
            let pairs = copies.iter().flat_map(|copy| &copy.pairs);
            for run in pairs.flat_map(|pair| &pair.dst.0) {
                let (tier, run) = (edge.to, *run);
                effects.push(WorkerEffect::Unlist { tier, run });
            }
        }
        let starts = started.into_iter();
        effects.extend(starts.map(|(edge, copies)| WorkerEffect::Start { edge, copies }));
    }

    /// Stops a copy: a running one is ordered to stop and ends later; any other ends immediately.
    fn stop(&mut self, now: Time, transfer: TransferId, effects: &mut Vec<WorkerEffect>) {
        match self.copies.stop(transfer, now + self.settings.fence) {
            Stop::Nothing => {}
            Stop::Ends => self.end(now, refused(transfer), effects),
            Stop::Order => effects.push(WorkerEffect::Stop(transfer)),
        }
    }

    fn stop_all(&mut self, now: Time, transfers: Vec<TransferId>, effects: &mut Vec<WorkerEffect>) {
        for transfer in transfers {
            self.stop(now, transfer, effects);
        }
    }

    /// Stops copies whose deadline has passed, and gives up the process if a stopped copy has not ended by its fence.
    fn fire_deadlines(&mut self, now: Time, effects: &mut Vec<WorkerEffect>) {
        while let Some(expired) = self.copies.take_expired(now) {
            match expired {
                Expired::Deadline(transfer) => self.stop(now, transfer, effects),
                Expired::Fence => effects.push(WorkerEffect::ExitProcess),
            }
        }
    }

    /// Removes a copy that ended. A stopped or late store counts as not complete; the pages of a complete store are
    /// added to the inventory before the end is reported.
    fn end(&mut self, now: Time, mut ended: EndedCopy, effects: &mut Vec<WorkerEffect>) {
        let Some(task) = self.copies.end(ended.transfer) else {
            return;
        };
        if task.transfer.edge.to != TierId::Device {
            ended.complete &= !task.is_stopped() && now <= task.transfer.deadline;
        }
        self.meters.note(now, &task, &ended);
        let OpenCopy {
            transfer,
            batch,
            orphan,
            ..
        } = task;
        if ended.bad_source {
            effects.extend(unlist_bad_page(&transfer, ended.complete_pages));
        }
        if let Some(page) = ended.faulty_page
            && transfer.edge.from > transfer.edge.to
        {
            effects.extend(unlist_bad_page(&transfer, page));
        }
        if ended.complete
            && let Some(record) = transfer.record
        {
            let tier = transfer.edge.to;
            effects.push(WorkerEffect::List { tier, record });
        }
        if !orphan {
            self.orders.remember(ended);
            effects.extend(self.orders.report(batch, ended));
        }
        let answered = self.abandoned.ended(ended.transfer);
        effects.extend(answered.map(|number| WorkerEffect::Abandoned { number }));
    }
}

/// Removes the page of a source that failed its checksum from the inventory, so that no later leader finds it.
fn unlist_bad_page(transfer: &Transfer, complete_pages: u32) -> Option<WorkerEffect> {
    let tier = transfer.edge.from;
    let mut pages = transfer.pairs.iter().flat_map(|pair| pair.src.iter_pages());
    let bad = pages.nth(complete_pages as usize);
    let run = PageRun {
        start: bad.filter(|_| tier != TierId::Device)?,
        count: 1,
    };
    Some(WorkerEffect::Unlist { tier, run })
}

#[cfg(test)]
mod tests;
