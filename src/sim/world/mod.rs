//! A simulated world with faults: leader, workers, engines, their messages, copies and memory, in one thread and
//! virtual time.
//!
//! The state machines and the bytes of the messages are those of the live system. Everything else is drawn from one
//! seed: the processes, their requests, how long each step takes, and the faults. After every step the checker compares
//! the leader's state with the contents of memory. After the last fault every pending request and copy must end within
//! [`LIVENESS_BOUND`].
//!
//! [`run`] runs one seed. `setup` holds what a seed decides, `faults` the kinds of faults, `oracle` and `checker` the
//! model that the core is checked against, and `saboteur` the lies that the checker must find.

mod checker;
mod client;
mod context;
mod counts;
mod credit;
mod disk;
mod disk_faults;
mod engine;
mod faults;
mod follower;
mod gate;
mod groups;
mod leader;
mod lifecycle;
mod memories;
mod nemesis;
mod net;
mod oracle;
mod pids;
mod process;
mod prompts;
mod queue;
mod roster;
mod rules;
mod saboteur;
mod server;
mod setup;
mod storage;
mod summary;
mod worker;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::hash::Hasher;
use std::time::Duration;

use siphasher::sip128::Hasher128;

use kvferry_core::TierKey;
use kvferry_types::{Epoch, Replica, Time, TransferId, WorkerId};

use context::SimContext;
pub use counts::Counts;
pub use disk_faults::DiskSetup;
use engine::EngineProcess;
pub use faults::{Fault, FaultCounts};
use follower::Follower;
use leader::LeaderProcess;
use net::{ConnectionEnd, ConnectionId, Packet};
use process::{Delivery, SimProcess};
pub use saboteur::Lie;
pub use setup::{Chances, Setup, Shape};
pub use storage::{CONTENT_MIN, Content, EMPTY, Hold, NOWHERE, SimDepot, Storage, TORN};
pub use summary::{RUNS_MIN, Summary};
use worker::{DiskStep, WorkerProcess};

/// Anchor key of the depots. Every leader gets the same one, so that a new leader finds the stored pages.
const ANCHOR_KEY: [u8; 32] = [0x5a; 32];
/// Time within which every pending request and copy must end after the last fault.
pub const LIVENESS_BOUND: Duration = Duration::from_secs(20);
/// Most steps of the quiet end of a run.
const QUIET_STEPS_MAX: u64 = 400_000;

/// The seat of a process. At most one incarnation runs in a seat at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum NodeId {
    /// The leader.
    Leader,
    /// A worker.
    Worker(WorkerId),
    /// An engine.
    Engine(Replica),
}

/// An event of the simulation.
#[derive(Debug)]
enum SimEvent {
    /// A packet arrives.
    Packet {
        id: ConnectionId,
        to: ConnectionEnd,
        packet: Packet,
    },
    /// A timer of a process fires.
    Wake { who: NodeId, incarnation: u32 },
    /// A copy makes its next step.
    CopyStep {
        worker: WorkerId,
        incarnation: u32,
        transfer: TransferId,
    },
    /// A worker clears the next slots of a depot that it divides.
    Divide { worker: WorkerId, incarnation: u32 },
    /// A worker does the next slice of a reset.
    Invalidate { worker: WorkerId, incarnation: u32 },
    /// A worker has opened the memory of an engine.
    Opened {
        worker: WorkerId,
        incarnation: u32,
        opening: u64,
    },
    /// An engine has computed or compared.
    Worked {
        replica: Replica,
        incarnation: u32,
        ticket: u64,
    },
    /// A prompt arrives.
    Arrive { replica: Replica, incarnation: u32 },
    /// A process starts.
    Begin(NodeId),
    /// A slow process reads its next message from its inbox.
    Read { who: NodeId, incarnation: u32 },
    /// A paused process continues.
    Resume { who: NodeId, pause: u32 },
    /// A worker's process is killed.
    Kill { worker: WorkerId, incarnation: u32 },
    /// An engine's process ends while inventories are read.
    Leave { replica: Replica, incarnation: u32 },
    /// The leader's process dies while copies that it ordered run.
    LeaderDies,
    /// A process is notified that a worker's process has ended.
    Died {
        to: NodeId,
        worker: WorkerId,
        incarnation: u32,
    },
    /// A worker's disk makes a step.
    Disk {
        worker: WorkerId,
        incarnation: u32,
        step: DiskStep,
    },
    /// A fault of a process is injected.
    Nemesis,
    /// A fault of a disk is injected.
    DiskNemesis,
    /// The host loses its power while a disk is flushed.
    PowerLoss,
}

/// The result of a run.
#[derive(Debug, Clone)]
pub struct SimOutcome {
    /// Seed that the run was drawn from.
    pub seed: u64,
    /// Configuration drawn from the seed.
    pub setup: Setup,
    /// Events of the run, counted.
    pub counts: Counts,
    /// Faults that were injected, and those that had an effect.
    pub faults: FaultCounts,
    /// Digest of all events in order. Two runs of one seed have the same digest.
    pub digest: u128,
    /// The first violated invariant, `None` if all held.
    pub violation: Option<String>,
}

struct SimWorld {
    env: SimContext,
    leader: SimProcess<LeaderProcess>,
    epoch: Epoch,
    workers: BTreeMap<WorkerId, SimProcess<WorkerProcess>>,
    engines: Vec<SimProcess<EngineProcess>>,
    /// Key of the leader's pool, and whether the leader was reading inventories, both after the previous step.
    seen: (Option<TierKey>, bool),
    /// When the leader last handled an event or continued after a pause.
    awake_since: Time,
    checks: u64,
    /// Readers of the leader's change log.
    followers: [Follower; 2],
}

/// Runs a seed: `steps` events with faults, then a quiet end without faults until nothing is pending.
pub fn run(seed: u64, steps: u64) -> SimOutcome {
    run_with(seed, steps, None)
}

/// Runs a seed like [`run`], in a world whose hosts have `lie`, if any.
pub fn run_with(seed: u64, steps: u64, lie: Option<Lie>) -> SimOutcome {
    let mut world = SimWorld::new(seed, lie);
    world.begin();
    while world.env.violation.is_none() && world.env.counts.steps < steps {
        world.next();
    }
    if world.env.violation.is_none() {
        world.quiet();
    }
    if let Some(leader) = &world.leader.state {
        world.env.count_decisions(leader.core());
    }
    let SimContext {
        mut counts,
        faults,
        setup,
        violation,
        digest,
        net,
        queue,
        ..
    } = world.env;
    counts.messages = net.sent;
    counts.virtual_ms = queue.now().0 / 1_000_000;
    SimOutcome {
        seed,
        setup,
        counts,
        faults,
        digest: digest.finish128().as_u128(),
        violation,
    }
}

impl SimWorld {
    fn new(seed: u64, lie: Option<Lie>) -> Self {
        let env = SimContext::new(seed, lie);
        let replicas = (0..env.setup.replicas).map(Replica);
        let ranks = env.setup.ranks;
        let places = replicas.flat_map(|replica| {
            (0..ranks).map(move |rank| WorkerId {
                replica,
                rank: kvferry_types::Rank(rank),
            })
        });
        Self {
            leader: SimProcess::new(),
            epoch: Epoch(0),
            workers: places.map(|place| (place, SimProcess::new())).collect(),
            engines: (0..env.setup.replicas).map(|_| SimProcess::new()).collect(),
            seen: (None, false),
            awake_since: Time(0),
            checks: 0,
            followers: [None, Some(vec![0])].map(Follower::new),
            env,
        }
    }

    fn begin(&mut self) {
        let everyone: Vec<NodeId> = self.everyone().collect();
        for who in everyone {
            let at = Time(self.env.rng.u64(0..20_000_000));
            self.env.queue.push(at, SimEvent::Begin(who));
        }
        let first = self.env.setup.fault_every;
        self.env.queue.push(Time(0) + first, SimEvent::Nemesis);
        self.begin_disk_faults();
    }

    fn everyone(&self) -> impl Iterator<Item = NodeId> + use<> {
        let workers: Vec<WorkerId> = self.workers.keys().copied().collect();
        let engines = (0..self.env.setup.replicas)
            .map(Replica)
            .map(NodeId::Engine);
        std::iter::once(NodeId::Leader)
            .chain(workers.into_iter().map(NodeId::Worker))
            .chain(engines)
    }

    /// Handles the next event and runs the checks after it.
    fn next(&mut self) -> bool {
        let Some((number, event)) = self.env.queue.pop() else {
            self.env.violated("nothing happens any longer".to_owned());
            return false;
        };
        self.env.counts.steps += 1;
        self.env.digest.write_u64(number);
        self.env.digest.write_u64(self.env.queue.now().0);
        self.dispatch(event);
        self.after();
        true
    }

    fn dispatch(&mut self, event: SimEvent) {
        tracing::trace!(at = %self.env.now(), ?event);
        match event {
            SimEvent::Packet { id, to, packet } => self.packet(id, to, packet),
            SimEvent::Wake { who, incarnation } => {
                self.to(who, Some(incarnation), SimEvent::Wake { who, incarnation })
            }
            SimEvent::CopyStep {
                worker,
                incarnation,
                transfer,
            } => {
                let event = SimEvent::CopyStep {
                    worker,
                    incarnation,
                    transfer,
                };
                self.to(NodeId::Worker(worker), Some(incarnation), event);
            }
            SimEvent::Invalidate {
                worker,
                incarnation,
            } => {
                let event = SimEvent::Invalidate {
                    worker,
                    incarnation,
                };
                self.to(NodeId::Worker(worker), Some(incarnation), event);
            }
            SimEvent::Opened {
                worker,
                incarnation,
                opening,
            } => {
                let event = SimEvent::Opened {
                    worker,
                    incarnation,
                    opening,
                };
                self.to(NodeId::Worker(worker), Some(incarnation), event);
            }
            SimEvent::Disk {
                worker,
                incarnation,
                step,
            } => {
                let event = SimEvent::Disk {
                    worker,
                    incarnation,
                    step,
                };
                self.to(NodeId::Worker(worker), Some(incarnation), event);
            }
            SimEvent::Divide {
                worker,
                incarnation,
            } => {
                let event = SimEvent::Divide {
                    worker,
                    incarnation,
                };
                self.to(NodeId::Worker(worker), Some(incarnation), event);
            }
            SimEvent::Worked {
                replica,
                incarnation,
                ticket,
            } => {
                let event = SimEvent::Worked {
                    replica,
                    incarnation,
                    ticket,
                };
                self.to(NodeId::Engine(replica), Some(incarnation), event);
            }
            SimEvent::Arrive {
                replica,
                incarnation,
            } => {
                self.to(
                    NodeId::Engine(replica),
                    Some(incarnation),
                    SimEvent::Arrive {
                        replica,
                        incarnation,
                    },
                );
            }
            SimEvent::Died {
                to,
                worker,
                incarnation,
            } => {
                self.to(
                    to,
                    None,
                    SimEvent::Died {
                        to,
                        worker,
                        incarnation,
                    },
                );
            }
            SimEvent::Begin(who) => self.begin_process(who),
            SimEvent::Read { who, incarnation } => self.read_next(who, incarnation),
            SimEvent::Resume { who, pause } => self.resume(who, pause),
            SimEvent::Kill {
                worker,
                incarnation,
            } => {
                if self.workers[&worker].incarnation == incarnation
                    && self.workers[&worker].state.is_some()
                {
                    self.crash(NodeId::Worker(worker));
                }
            }
            SimEvent::Leave {
                replica,
                incarnation,
            } => self.leave(replica, incarnation),
            SimEvent::LeaderDies => self.leader_dies(),
            SimEvent::Nemesis => self.nemesis(),
            SimEvent::DiskNemesis => self.disk_nemesis(),
            SimEvent::PowerLoss => self.lose_power(),
        }
    }

    fn packet(&mut self, id: ConnectionId, to: ConnectionEnd, packet: Packet) {
        let Some(who) = self.env.net.receiver(id, to) else {
            return;
        };
        if self.incarnation(who).is_none() {
            let env = &mut self.env;
            env.net.receive(
                &mut env.queue,
                &mut env.rng,
                &mut env.faults,
                id,
                to,
                None,
                packet,
            );
            return;
        }
        self.to(who, None, SimEvent::Packet { id, to, packet });
    }

    /// Number of the running incarnation of a process, `None` while it is dead.
    fn incarnation(&self, who: NodeId) -> Option<u32> {
        match who {
            NodeId::Leader => self.leader.state.as_ref().map(|_| self.leader.incarnation),
            NodeId::Worker(worker) => {
                let process = &self.workers[&worker];
                process.state.as_ref().map(|_| process.incarnation)
            }
            NodeId::Engine(replica) => {
                let process = &self.engines[usize::from(replica.0)];
                process.state.as_ref().map(|_| process.incarnation)
            }
        }
    }

    /// Delivers an event to a process: at once, or later when the process is paused, busy or slow.
    fn to(&mut self, who: NodeId, incarnation: Option<u32>, event: SimEvent) {
        let Some(lives) = self.incarnation(who) else {
            return;
        };
        if incarnation.is_some_and(|incarnation| incarnation != lives) {
            return;
        }
        let now = self.env.now();
        if let Some(event) = self.hold_back(who, now, event) {
            self.handle(who, lives, event);
        }
    }

    /// Queues the event in the inbox of a process that is paused, busy or slow. Returns the event if it can be handled
    /// now.
    fn hold_back(&mut self, who: NodeId, now: Time, event: SimEvent) -> Option<SimEvent> {
        let message = matches!(event, SimEvent::Packet { .. });
        let divides = matches!(event, SimEvent::Divide { .. });
        let busy = !divides && self.is_dividing(who);
        let incarnation = self.incarnation(who)?;
        let place = self.place(who)?;
        if *place.paused || busy {
            place.inbox.push_back(event);
            return None;
        }
        if divides {
            return Some(event);
        }
        let slow = place.slow.filter(|(_, until)| message && now < *until);
        if !(slow.is_some() || message && !place.inbox.is_empty()) {
            return Some(event);
        }
        place.inbox.push_back(event);
        let waits = place.inbox.len() > 1;
        if !std::mem::replace(place.reading, true) {
            let each = slow.map_or(Duration::ZERO, |(each, _)| each);
            self.env
                .queue
                .push(now + each, SimEvent::Read { who, incarnation });
        }
        if waits {
            self.env.faults.took_effect(Fault::SlowConsumer);
        }
        None
    }

    /// Handles the next message of a slow process, and schedules the read of the one after it.
    fn read_next(&mut self, who: NodeId, incarnation: u32) {
        if self.incarnation(who) != Some(incarnation) {
            return;
        }
        let now = self.env.now();
        let busy = self.is_dividing(who);
        let Some(place) = self.place(who) else { return };
        *place.reading = false;
        if *place.paused || busy {
            return;
        }
        let Some(event) = place.inbox.pop_front() else {
            return;
        };
        if !place.inbox.is_empty() {
            *place.reading = true;
            let slow = place.slow.filter(|(_, until)| now < *until);
            let each = slow.map_or(Duration::ZERO, |(each, _)| each);
            self.env
                .queue
                .push(now + each, SimEvent::Read { who, incarnation });
        }
        self.handle(who, incarnation, event);
    }

    /// True while a worker divides its depot: it handles no other events until that is done.
    fn is_dividing(&self, who: NodeId) -> bool {
        let NodeId::Worker(worker) = who else {
            return false;
        };
        let worker = self.workers.get(&worker);
        let worker = worker.and_then(|process| process.state.as_ref());
        worker.is_some_and(WorkerProcess::is_dividing)
    }

    fn place(&mut self, who: NodeId) -> Option<Delivery<'_>> {
        match who {
            NodeId::Leader => Some(self.leader.delivery()),
            NodeId::Worker(worker) => self.workers.get_mut(&worker).map(SimProcess::delivery),
            NodeId::Engine(replica) => self
                .engines
                .get_mut(usize::from(replica.0))
                .map(SimProcess::delivery),
        }
    }

    fn handle(&mut self, who: NodeId, incarnation: u32, event: SimEvent) {
        let received = match event {
            SimEvent::Packet { id, to, packet } => {
                let env = &mut self.env;
                let received = env.net.receive(
                    &mut env.queue,
                    &mut env.rng,
                    &mut env.faults,
                    id,
                    to,
                    Some(incarnation),
                    packet,
                );
                match received {
                    Some(received) => Err((id, to, received)),
                    None => return,
                }
            }
            other => Ok(other),
        };
        match who {
            NodeId::Leader => self.handle_leader(received),
            NodeId::Worker(worker) => self.handle_worker(worker, received),
            NodeId::Engine(replica) => self.handle_engine(replica, received),
        }
    }

    fn handle_leader(
        &mut self,
        event: Result<SimEvent, (ConnectionId, ConnectionEnd, net::Received)>,
    ) {
        let now = self.env.now();
        let awake = now - self.awake_since;
        self.awake_since = now;
        let Some(mut leader) = self.leader.state.take() else {
            return;
        };
        match event {
            Err((id, _, received)) => leader.receive(&mut self.env, id, received),
            Ok(SimEvent::Wake { .. }) => {
                self.leader.armed = Time::NEVER;
                leader.tick(&mut self.env);
            }
            Ok(SimEvent::Died {
                worker,
                incarnation,
                ..
            }) => leader.died(&mut self.env, worker, incarnation),
            Ok(other) => self.env.violated(format!("the leader was given {other:?}")),
        }
        let forgot = |engine| !leader.core().knows(engine);
        self.env.oracle.forgot(self.epoch, forgot);
        if let Some(late) = self.env.oracle.passed(self.epoch, awake) {
            self.env.violated(late);
        }
        let next = leader.next_timeout(&self.env);
        if next < self.leader.armed {
            self.leader.armed = next;
            let (who, incarnation) = (NodeId::Leader, self.leader.incarnation);
            self.env
                .queue
                .push(next, SimEvent::Wake { who, incarnation });
        }
        self.leader.state = Some(leader);
    }

    fn handle_worker(
        &mut self,
        id: WorkerId,
        event: Result<SimEvent, (ConnectionId, ConnectionEnd, net::Received)>,
    ) {
        let Some(process) = self.workers.get_mut(&id) else {
            return;
        };
        let Some(mut worker) = process.state.take() else {
            return;
        };
        let dividing = worker.is_dividing();
        let env = &mut self.env;
        match event {
            Err((connection, to, received)) => worker.receive(env, connection, to, received),
            Ok(SimEvent::Wake { .. }) => {
                process.armed = Time::NEVER;
                worker.tick(env);
            }
            Ok(SimEvent::CopyStep { transfer, .. }) => worker.copy_step(env, transfer),
            Ok(SimEvent::Divide { .. }) => worker.divide(env),
            Ok(SimEvent::Invalidate { .. }) => worker.continue_invalidations(env),
            Ok(SimEvent::Opened { opening, .. }) => worker.opened(env, opening),
            Ok(SimEvent::Disk { step, .. }) => worker.disk_step(env, step),
            Ok(other) => env.violated(format!("a worker was given {other:?}")),
        }
        let next = worker.next_timeout();
        if next < process.armed {
            process.armed = next;
            let (who, incarnation) = (NodeId::Worker(id), process.incarnation);
            env.queue.push(next, SimEvent::Wake { who, incarnation });
        }
        let over = worker.has_failed();
        let waited = match dividing && !worker.is_dividing() {
            true => std::mem::take(&mut process.inbox),
            false => VecDeque::new(),
        };
        let incarnation = process.incarnation;
        process.state = Some(worker);
        if over {
            self.crash(NodeId::Worker(id));
        }
        for event in waited {
            self.to(NodeId::Worker(id), Some(incarnation), event);
        }
    }

    fn handle_engine(
        &mut self,
        replica: Replica,
        event: Result<SimEvent, (ConnectionId, ConnectionEnd, net::Received)>,
    ) {
        let process = &mut self.engines[usize::from(replica.0)];
        let Some(mut engine) = process.state.take() else {
            return;
        };
        let env = &mut self.env;
        match event {
            Err((id, _, received)) => engine.receive(env, id, received),
            Ok(SimEvent::Wake { .. }) => {
                process.armed = Time::NEVER;
                engine.tick(env);
            }
            Ok(SimEvent::Worked { ticket, .. }) => engine.worked(env, ticket),
            Ok(SimEvent::Arrive { .. }) => engine.arrive(env),
            Ok(SimEvent::Died {
                worker,
                incarnation,
                ..
            }) => engine.died(env, worker, incarnation),
            Ok(other) => env.violated(format!("an engine was given {other:?}")),
        }
        let next = engine.next_timeout();
        if next < process.armed {
            process.armed = next;
            let (who, incarnation) = (NodeId::Engine(replica), process.incarnation);
            env.queue.push(next, SimEvent::Wake { who, incarnation });
        }
        process.state = Some(engine);
    }

    /// Runs after every step: schedules the end of fenced workers, injects faults that follow from the step, and
    /// checks the invariants if the step decided anything.
    fn after(&mut self) {
        for (worker, pid) in std::mem::take(&mut self.env.to_fence) {
            let incarnation = self.workers[&worker].incarnation;
            let known = self.env.pids.of(NodeId::Worker(worker), incarnation);
            if pid.is_some() && pid != known {
                continue;
            }
            let late = match self.env.setup.processes_unseen {
                true => self.env.setup.by_hand(),
                false => Duration::from_micros(self.env.rng.u64(100..5000)),
            };
            let at = self.env.now() + late;
            self.env.queue.push(
                at,
                SimEvent::Kill {
                    worker,
                    incarnation,
                },
            );
        }
        for worker in std::mem::take(&mut self.env.divides) {
            self.pause_divider(worker);
        }
        self.notice();
        if std::mem::take(&mut self.env.decided) {
            self.check();
        }
    }
}
