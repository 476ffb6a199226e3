//! Replay in virtual time: one engine, its workers and their leader as one discrete-event simulation.
//!
//! Leader, workers and scheduler are the state machines of the live system. A copy takes the bandwidth that its link
//! gives it ([`crate::links`]), a message takes a fixed time, prefill and decoding take the times of the settings.
//! Nothing else takes time, and nothing sleeps: the clock jumps to the earliest pending event or deadline. Of several
//! events at one time, copies end first, then messages arrive in the order in which they were sent, then timeouts fire,
//! then prompts arrive. Equal input therefore gives equal output, to the last bit.
//!
//! Not modelled: the time that leader and workers take to decide, hashing, and the engine's steps other than prefill
//! and decoding. Copies of one rank and direction share their link, as streams of a device do. A live worker that
//! copies with the CPU runs them one after another: of copies at one time the last ends at the same time, the others
//! earlier.

mod agenda;
mod compute;
mod copies;
mod engine;
#[cfg(test)]
mod lane_tests;
mod metrics;
mod settings;
#[cfg(test)]
mod tests;

use std::ops::ControlFlow;

use crate::ReplayError;
use crate::sequential::{ENGINE, attach};
use kvferry_core::{
    BatchId, Leader, LeaderEffect, LeaderEvent, MemoryBounds, RUNNING_COPIES_MAX, Refusal, Worker,
    WorkerEffect, WorkerEvent, WorkerSettings, Workers,
};
use kvferry_types::{
    Answer, AttachId, Edge, EndedCopy, MemoryGeometry, MemoryId, PerTier, Rank, Replica, Request,
    RequestId, SlotId, Time, Transfer, TransferId, WorkerId,
};
use kvferry_workload::scheduler::{Prompt, Scheduler, Served};

use agenda::Agenda;
use copies::TimedCopies;
use engine::TimedEngine;

pub use compute::{Formula, Polynomial, Prefill};
pub use metrics::{LinkUse, Measurements};
pub use settings::{
    Arrival, DISK_LATENCY, DISK_READ_BYTES_PER_S, DISK_WRITE_BYTES_PER_S, LINK_BYTES_PER_S,
    LINK_LATENCY, MESSAGE_LATENCY, Pace, TimedSettings,
};

/// An event on the agenda: a message in flight, or work whose end is known.
#[derive(Debug)]
enum TimedEvent {
    /// A request of the engine reaches the leader.
    Requested {
        id: RequestId,
        deadline: Time,
        request: Request,
    },
    /// An answer of the leader reaches the engine.
    Answered {
        id: RequestId,
        answer: Result<Answer, Refusal>,
    },
    /// An order of the leader reaches a worker.
    Ordered {
        rank: Rank,
        batch: BatchId,
        copies: Vec<Transfer>,
    },
    /// A cancel of the leader reaches a worker.
    Cancelled { rank: Rank, transfer: TransferId },
    /// A report of a worker reaches the leader.
    Reported { rank: Rank, copies: Vec<EndedCopy> },
    /// The prefill of a prompt ended; what the request stores is written.
    Computed {
        slot: SlotId,
        stores: Option<RequestId>,
    },
    /// Every worker is notified that everything up to this request is written.
    Written { through: RequestId },
}

/// What [`Timed::run_watched`] shows.
#[derive(Debug)]
pub enum Moment<'a> {
    /// A prompt arrives.
    Arrives(&'a Prompt),
    /// The leader may have changes to read.
    Changes(Time, &'a mut Leader),
}

/// The simulation of one leader, its workers and one engine.
#[derive(Debug)]
pub struct Timed {
    settings: TimedSettings,
    leader: Leader,
    workers: Vec<Worker>,
    engine: TimedEngine,
    copies: TimedCopies,
    /// Pages of the depots of each rank.
    arena_pages: PerTier<u32>,
    agenda: Agenda<TimedEvent>,
    now: Time,
    batches: u64,
    effects: Vec<LeaderEffect>,
    orders: Vec<WorkerEffect>,
}

impl Timed {
    /// Attaches `ranks` equal ranks with `arena_pages` each to the leader.
    ///
    /// # Errors
    ///
    /// A refusal of the leader, or a link with a rate of zero.
    pub fn new(
        mut leader: Leader,
        scheduler: Scheduler,
        ranks: u16,
        geometry: &MemoryGeometry,
        arena_pages: &PerTier<u32>,
        settings: TimedSettings,
    ) -> Result<Self, ReplayError> {
        attach(&mut leader, ranks, geometry, arena_pages)?;
        let worker = || {
            let mut its = WorkerSettings::new(RUNNING_COPIES_MAX);
            let rate = settings.store_bytes_per_s;
            its.bytes_per_s = rate.map(|rate| (Edge::STORE, rate)).into_iter().collect();
            let mut worker = Worker::new(its);
            let (engine, after) = (ENGINE, RequestId(0));
            let bounds = MemoryBounds::new(geometry);
            let after_none = Some(TransferId(0));
            let admitted = WorkerEvent::Admitted {
                attach: AttachId(1),
                after: after_none,
            };
            let memory_admitted = WorkerEvent::MemoryAdmitted {
                number: MemoryId(1),
                after: after_none,
            };
            for event in [
                WorkerEvent::DepotReady,
                WorkerEvent::Registered {
                    engine,
                    abandoned_through: after,
                    bounds,
                },
                WorkerEvent::LeaderFound(leader.epoch()),
                admitted,
                memory_admitted,
            ] {
                worker.step(Time(0), event, &mut Vec::new());
            }
            worker
        };
        let workers = (0..ranks).map(|_| worker()).collect();
        let copies = TimedCopies::new(&settings, ranks, geometry.page_bytes());
        Ok(Self {
            settings,
            workers,
            leader,
            engine: TimedEngine::new(scheduler, &settings, geometry.hash_tokens),
            copies: copies?,
            arena_pages: arena_pages.clone(),
            agenda: Agenda::new(),
            now: Time(0),
            batches: 0,
            effects: Vec::new(),
            orders: Vec::new(),
        })
    }

    /// Serves all prompts to their ends and calls `served` for each.
    ///
    /// # Errors
    ///
    /// A prompt does not fit into the engine's memory.
    pub fn run(
        &mut self,
        arrivals: impl Iterator<Item = Arrival>,
        pace: Pace,
        served: impl FnMut(&Served),
    ) -> Result<Measurements, ReplayError> {
        self.run_watched(arrivals, pace, served, |_| ControlFlow::Continue(()))
    }

    /// Like [`Self::run`]. Calls `watch` for each prompt that arrives, and before and after the events of each moment, which
    /// are those that the leader handles at one time. The leader's change log loses nothing if each call reads it.
    ///
    /// # Errors
    ///
    /// See [`Self::run`]; [`ReplayError::Ended`] if `watch` breaks.
    pub fn run_watched(
        &mut self,
        arrivals: impl Iterator<Item = Arrival>,
        pace: Pace,
        mut served: impl FnMut(&Served),
        mut watch: impl FnMut(Moment<'_>) -> ControlFlow<()>,
    ) -> Result<Measurements, ReplayError> {
        let mut arrivals = arrivals.peekable();
        let mut done = Vec::new();
        loop {
            let arrives = arrivals.peek().and_then(|arrival| match pace {
                Pace::Timestamps => Some(arrival.at.max(self.now)),
                Pace::Closed(limit) => (self.engine.open_prompts() < limit).then_some(self.now),
            });
            let Some(next) = self.next_event(arrives) else {
                break;
            };
            self.now = self.now.max(next);
            // The log would drop its records if it was not read for long.
            ended(watch(Moment::Changes(self.now, &mut self.leader)))?;
            self.end_copies();
            while let Some(event) = self.agenda.take_due(self.now) {
                self.happen(event);
            }
            self.tick();
            if arrives.is_some_and(|at| at <= self.now)
                && let Some(arrival) = arrivals.next()
            {
                ended(watch(Moment::Arrives(&arrival.prompt)))?;
                self.engine.arrive(self.now, arrival);
                self.act();
            }
            self.engine.take_served(&mut done);
            done.drain(..).for_each(|done| served(&done));
            ended(watch(Moment::Changes(self.now, &mut self.leader)))?;
        }
        match self.engine.open_prompts() {
            0 if arrivals.peek().is_none() => Ok(self.seen()),
            open => Err(ReplayError::PromptsLeft(open)),
        }
    }

    /// The leader, to read its counters.
    pub fn leader(&self) -> &Leader {
        &self.leader
    }

    /// Pages that the engine holds: zero between prompts.
    pub fn held_pages(&self) -> u32 {
        self.engine.held_pages()
    }

    /// Time of the next event; `None` at the end. Timeouts alone do not keep the simulation running, except those at
    /// which copies start.
    fn next_event(&mut self, arrives: Option<Time>) -> Option<Time> {
        let ends = self.copies.next_event();
        let sent = self.agenda.next_at();
        let starts = self.workers.iter().filter_map(Worker::next_start).min();
        let next = [arrives, ends, sent, starts].into_iter().flatten().min()?;
        let workers = self.workers.iter().filter_map(Worker::next_timeout);
        workers
            .chain(self.leader.next_timeout())
            .chain([next])
            .min()
    }

    fn happen(&mut self, event: TimedEvent) {
        match event {
            TimedEvent::Requested {
                id,
                deadline,
                request,
            } => {
                let engine = ENGINE;
                self.lead(LeaderEvent::Request {
                    engine,
                    id,
                    deadline,
                    request,
                });
            }
            TimedEvent::Reported { rank, copies } => {
                let epoch = self.leader.epoch();
                let worker = WorkerId {
                    replica: Replica(0),
                    rank,
                };
                self.lead(LeaderEvent::Ended {
                    worker,
                    epoch,
                    copies,
                });
            }
            TimedEvent::Answered { id, answer } => {
                self.engine.answered(self.now, id, answer.ok());
                self.act();
            }
            TimedEvent::Computed { slot, stores } => {
                let through = self.engine.computed(self.now, slot, stores);
                if let Some(through) = through {
                    self.send(TimedEvent::Written { through });
                }
                self.act();
            }
            TimedEvent::Ordered {
                rank,
                batch,
                copies,
            } => {
                self.copies.ordered(self.now, rank, &copies);
                let epoch = self.leader.epoch();
                self.work(
                    rank,
                    WorkerEvent::Ordered {
                        epoch,
                        batch,
                        transfers: copies,
                        arena_pages: self.arena_pages.clone(),
                    },
                );
            }
            TimedEvent::Cancelled { rank, transfer } => {
                self.batches += 1;
                let cancel = WorkerEvent::Cancel {
                    epoch: self.leader.epoch(),
                    batch: BatchId(self.batches),
                    transfers: vec![transfer],
                };
                self.work(rank, cancel);
            }
            TimedEvent::Written { through } => {
                self.copies.written(self.now, through);
                for rank in self.ranks() {
                    let engine = ENGINE;
                    self.work(rank, WorkerEvent::Written { engine, through });
                }
            }
        }
    }

    fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..u16::try_from(self.workers.len()).unwrap_or(u16::MAX)).map(Rank)
    }

    fn send(&mut self, message: TimedEvent) {
        self.agenda
            .add(self.now + self.settings.message_latency, message);
    }

    /// Carries out the actions of the scheduler.
    fn act(&mut self) {
        self.engine.act(self.now, &mut self.agenda);
    }

    fn lead(&mut self, event: LeaderEvent) {
        let mut effects = std::mem::take(&mut self.effects);
        self.leader.step(self.now, event, &mut effects);
        // Consecutive copies for the same workers are sent in one message to each of them.
        let mut orders: Vec<(Workers, Vec<Transfer>)> = Vec::new();
        for effect in effects.drain(..) {
            match effect {
                LeaderEffect::Answer { id, answer, .. } => {
                    self.send(TimedEvent::Answered { id, answer })
                }
                LeaderEffect::Transfer {
                    workers,
                    transfer: copy,
                } => match orders.last_mut().filter(|(to, _)| *to == workers) {
                    Some((_, copies)) => copies.push(copy),
                    None => orders.push((workers, vec![copy])),
                },
                LeaderEffect::Cancel { worker, transfers } => {
                    let rank = worker.rank;
                    for transfer in transfers {
                        self.send(TimedEvent::Cancelled { rank, transfer });
                    }
                }
                // Workers attach before the start and stop every cancelled copy, and no engine requests a reset.
                LeaderEffect::Admit { .. }
                | LeaderEffect::AdmitMemory { .. }
                | LeaderEffect::AdmitTiers { .. }
                | LeaderEffect::FenceWorker(..)
                | LeaderEffect::ReadInventory { .. }
                | LeaderEffect::Invalidate { .. }
                | LeaderEffect::OpenTiers { .. }
                | LeaderEffect::FlushTier { .. } => {}
            }
        }
        self.effects = effects;
        for (to, copies) in orders {
            for WorkerId { rank, .. } in to {
                self.batches += 1;
                let (batch, copies) = (BatchId(self.batches), copies.clone());
                self.send(TimedEvent::Ordered {
                    rank,
                    batch,
                    copies,
                });
            }
        }
    }

    fn work(&mut self, rank: Rank, event: WorkerEvent) {
        let mut next = Some(event);
        while let Some(event) = next.take() {
            let Some(worker) = self.workers.get_mut(usize::from(rank.0)) else {
                return;
            };
            let mut orders = std::mem::take(&mut self.orders);
            let mut stopped = Vec::new();
            worker.step(self.now, event, &mut orders);
            for order in orders.drain(..) {
                match order {
                    WorkerEffect::Start { copies, .. } => {
                        self.copies.start(self.now, rank, &copies)
                    }
                    WorkerEffect::Stop(transfer) => {
                        stopped.extend(self.copies.stop(self.now, rank, transfer));
                    }
                    WorkerEffect::Report { copies, .. } => {
                        self.copies.reported(rank, &copies);
                        self.send(TimedEvent::Reported { rank, copies });
                    }
                    // No process restarts, so no inventory is read.
                    WorkerEffect::Unlist { .. }
                    | WorkerEffect::Await { .. }
                    | WorkerEffect::List { .. }
                    | WorkerEffect::Invalidate { .. }
                    | WorkerEffect::Attach { .. }
                    | WorkerEffect::StateMemory { .. }
                    | WorkerEffect::StateTiers { .. }
                    | WorkerEffect::Registered { .. }
                    | WorkerEffect::Abandoned { .. }
                    | WorkerEffect::Refuse(_)
                    | WorkerEffect::Invalid { .. }
                    | WorkerEffect::ExitProcess => {}
                }
            }
            self.orders = orders;
            next = (!stopped.is_empty()).then_some(WorkerEvent::CopiesEnded(stopped));
        }
    }

    fn end_copies(&mut self) {
        let ended = self.copies.take_ended(self.now);
        for copies in ended.chunk_by(|(a, _), (b, _)| a == b) {
            let rank = copies[0].0;
            let copies = copies.iter().map(|(_, copy)| *copy).collect();
            self.work(rank, WorkerEvent::CopiesEnded(copies));
        }
    }

    fn tick(&mut self) {
        let due = |at: Option<Time>| at.is_some_and(|at| at <= self.now);
        let late: Vec<Rank> = self
            .ranks()
            .filter(|rank| due(self.workers[usize::from(rank.0)].next_timeout()))
            .collect();
        if due(self.leader.next_timeout()) {
            self.lead(LeaderEvent::Tick);
        }
        for rank in late {
            self.work(rank, WorkerEvent::Tick);
        }
    }

    fn seen(&mut self) -> Measurements {
        let mut seen = self.engine.seen(self.now);
        self.copies.fill(&mut seen);
        seen
    }
}

fn ended(watched: ControlFlow<()>) -> Result<(), ReplayError> {
    match watched {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(ReplayError::Ended),
    }
}

/// Pages of a copy in either direction.
fn pages(copy: &Transfer) -> u64 {
    copy.pairs.iter().map(|pair| pair.src.pages()).sum()
}
