//! A worker's process: what `actors::worker` and the copy engine do, without actors and threads.

use std::collections::BTreeMap;
use std::time::Duration;

use super::client::{self, Client};
use super::faults::Fault;
use super::ghost::Touched;
use super::net::{ConnectionId, End, Heard};
use super::server::{self, Server};
use super::storage::{Hold, Storage, TORN};
use super::{Env, Happening, Who};
use crate::core::{BatchId, MemoryBounds, Worker, WorkerEffect, WorkerEvent, WorkerSettings};
use crate::protocol::{
    Attach, AttachedMemory, CopyResult, Empty, Ended, Envelope, ErrorBody, ErrorCode, Inventory,
    Message, ReadInventory, Registered, Role, Struck,
};
use crate::session::Failure;
use crate::types::{
    AttachId, Copy, DepotId, Direction, EndedCopy, EngineId, Epoch, Generation, OpId, RequestId,
    ResetId, Shard, Time, WorkerId,
};

/// A copy that runs: page by page.
#[derive(Debug)]
struct Running {
    copy: Copy,
    /// Source and destination pages.
    pages: Vec<(u32, u32)>,
    done: usize,
    stop: bool,
    fate: Fate,
    pace: Duration,
    /// The process stood still while this copy ran.
    held: bool,
    /// Its last byte is written, or it has stopped; the core has not heard of it yet.
    over: Option<bool>,
}

/// A depot that is being divided for a question, slot by slot. The process hears nothing meanwhile, and goes on with it
/// whatever has become of its connection.
#[derive(Debug)]
struct Dividing {
    correlation: RequestId,
    read: ReadInventory,
    /// The depot; another one may have taken its place.
    depot: DepotId,
    /// The first slot that is not cleared.
    next: u32,
    /// Time for one slice.
    pace: Duration,
}

/// Slices in which a depot is divided.
const DIVIDE_SLICES: u32 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Good,
    /// Fails before this page.
    Fails(usize),
    /// The same, because its rank fails for a while.
    FailsWithRank(usize),
    /// Takes too long.
    Slow,
    /// Never goes on behind its first page.
    Stuck,
}

/// See the module.
#[derive(Debug)]
pub(super) struct WorkerProcess {
    id: WorkerId,
    life: u32,
    pub(super) core: Worker,
    leader: Client,
    server: Server,
    /// Correlations of attaches: an error names no attach.
    attaching: BTreeMap<RequestId, AttachId>,
    next_question: u64,
    memory: Option<(EngineId, ConnectionId, Option<RequestId>)>,
    abandoning: BTreeMap<u64, (ConnectionId, RequestId)>,
    next_ask: u64,
    order: RequestId,
    running: BTreeMap<OpId, Running>,
    dividing: Option<Dividing>,
    gave_up: bool,
}

impl WorkerProcess {
    pub(super) fn start(env: &mut Env, id: WorkerId, life: u32) -> Self {
        let hello = Client::hello(Role::Worker, EngineId::default(), id, env.setup.version_max);
        let settings = WorkerSettings {
            running_max: env.setup.running_max,
            fence: env.setup.fence,
            attach_every: env.setup.attach_every,
        };
        let mut process = Self {
            id,
            life,
            core: Worker::new(settings),
            leader: Client::new(env, (Who::Worker(id), life), Who::Leader, hello),
            server: Server::new(Epoch(0), &[Role::Rank], env.now()),
            attaching: BTreeMap::new(),
            next_question: 0,
            memory: None,
            abandoning: BTreeMap::new(),
            next_ask: 0,
            order: RequestId(0),
            running: BTreeMap::new(),
            dividing: None,
            gave_up: false,
        };
        process.step(env, WorkerEvent::DepotReady);
        process
    }

    pub(super) fn gave_up(&self) -> bool {
        self.gave_up
    }

    pub(super) fn is_dividing(&self) -> bool {
        self.dividing.is_some()
    }

    pub(super) fn has_stuck_copy(&self) -> bool {
        self.running
            .values()
            .any(|running| running.fate == Fate::Stuck && running.done > 0)
    }

    pub(super) fn next_timeout(&self) -> Time {
        let core = self.core.next_timeout().unwrap_or(Time::NEVER);
        core.min(self.leader.next_timeout())
            .min(self.server.next_timeout())
    }

    pub(super) fn tick(&mut self, env: &mut Env) {
        for noticed in self.leader.tick(env) {
            self.leader_says(env, noticed);
        }
        for silent in self.server.tick(env) {
            self.rank_gone(env, silent);
        }
        self.step(env, WorkerEvent::Tick);
    }

    pub(super) fn hear(&mut self, env: &mut Env, id: ConnectionId, to: End, heard: Heard) {
        if to == End::Client {
            if self.leader.is(id) {
                for noticed in self.leader.hear(env, heard) {
                    self.leader_says(env, noticed);
                }
            }
            return;
        }
        match self.server.hear(env, id, heard) {
            None | Some(server::Noticed::Opened(_)) => {}
            Some(server::Noticed::Closed) => self.rank_gone(env, id),
            Some(server::Noticed::Message(envelope)) => self.rank_asks(env, id, envelope),
        }
    }

    fn leader_says(&mut self, env: &mut Env, noticed: client::Noticed) {
        match noticed {
            client::Noticed::Welcomed(epoch) => self.step(env, WorkerEvent::LeaderFound(epoch)),
            client::Noticed::Lost => self.step(env, WorkerEvent::LeaderLost),
            client::Noticed::Request(envelope) => self.leader_asks(env, *envelope),
            client::Noticed::Answered(id, answer) => self.leader_answers(env, id, *answer),
        }
    }

    fn leader_answers(&mut self, env: &mut Env, id: RequestId, answer: Result<Message, Failure>) {
        let Some(attach) = self.attaching.remove(&id) else {
            return;
        };
        let after = match answer {
            Ok(Message::Attached(attached)) => Some(OpId(attached.after)),
            Ok(other) => {
                let kind = other.kind().name();
                return env.violated(format!("{kind} is no answer to an attach"));
            }
            Err(failure)
                if matches!(failure.code, ErrorCode::Invalid | ErrorCode::RankDisagrees) =>
            {
                None
            }
            // The core attaches again.
            Err(_) => return,
        };
        self.step(env, WorkerEvent::Admitted { attach, after });
    }

    fn leader_asks(&mut self, env: &mut Env, envelope: Envelope) {
        let Envelope {
            correlation,
            deadline_ms,
            epoch,
            message,
            ..
        } = envelope;
        self.order = correlation;
        let batch = BatchId(correlation.0);
        let deadline = env.now() + Duration::from_millis(u64::from(deadline_ms));
        let event = match message {
            Message::Transfer(transfer) => WorkerEvent::Ordered {
                epoch,
                batch,
                copies: transfer.into_copies(epoch, deadline).collect(),
            },
            Message::Cancel(cancel) => WorkerEvent::Cancel {
                epoch,
                batch,
                ops: cancel.ops.into_iter().map(OpId).collect(),
            },
            Message::ReadInventory(read) => {
                return self.read_inventory(env, correlation, epoch, read);
            }
            Message::Strike(strike) => match strike.scope() {
                Ok(scope) => WorkerEvent::Strike {
                    epoch,
                    id: ResetId(strike.reset),
                    scope,
                    through: Generation(strike.through),
                    deadline,
                },
                Err(error) => {
                    return env.violated(format!("a strike was not understood: {error:?}"));
                }
            },
            other => {
                let kind = other.kind().name();
                return env.violated(format!("a worker cannot place a message: {kind}"));
            }
        };
        self.step(env, event);
    }

    /// A part of what the depot lists, once it holds pages of this size.
    fn read_inventory(
        &mut self,
        env: &mut Env,
        correlation: RequestId,
        epoch: Epoch,
        read: ReadInventory,
    ) {
        let at = env.depot_of(self.id.rank);
        let shape = Env::shape(read.page_bytes, [0; 16]);
        let depot = &mut env.depots[at];
        let meant = depot.id().0.to_be_bytes() == read.depot;
        let taken = self.core.take_reading(epoch, read.reading);
        let hold = match meant && taken.is_ok() {
            true => depot.hold(shape, (epoch, read.reading)),
            false => Hold::Late,
        };
        match hold {
            Hold::Held => self.say_inventory(env, correlation, &read),
            Hold::Divide => {
                let depot = depot.id();
                let time = env.setup.divide_time.mul_f64(env.rng.f64());
                self.dividing = Some(Dividing {
                    correlation,
                    read,
                    depot,
                    next: 0,
                    pace: time / DIVIDE_SLICES,
                });
                env.divides.push(self.id);
                self.divide_on(env);
            }
            Hold::Late => {
                let error = ErrorBody::new(ErrorCode::Invalid, "another depot, or late");
                let error = Message::Error(error);
                self.leader.reply(env, correlation, error);
            }
        }
    }

    fn divide_on(&self, env: &mut Env) {
        let Some(dividing) = &self.dividing else {
            return;
        };
        let (worker, life) = (self.id, self.life);
        let at = env.now() + dividing.pace;
        env.queue.push(at, Happening::Divide { worker, life });
    }

    /// Clears one slice of the slots; behind the last one, answers.
    pub(super) fn divide(&mut self, env: &mut Env) {
        let at = env.depot_of(self.id.rank);
        let Some(dividing) = &mut self.dividing else {
            return;
        };
        let shape = Env::shape(dividing.read.page_bytes, [0; 16]);
        let depot = &mut env.depots[at];
        if depot.id() == dividing.depot {
            let pages = depot.pages(shape);
            let end = dividing.next.saturating_add(pages / DIVIDE_SLICES + 1);
            let end = end.min(pages);
            (dividing.next..end).for_each(|page| depot.clear(page));
            dividing.next = end;
            env.decided = true;
            if end < pages {
                return self.divide_on(env);
            }
            depot.divided(shape);
        }
        if let Some(Dividing {
            correlation, read, ..
        }) = self.dividing.take()
        {
            self.say_inventory(env, correlation, &read);
        }
    }

    fn say_inventory(&mut self, env: &mut Env, correlation: RequestId, read: &ReadInventory) {
        let shape = Env::shape(read.page_bytes, [0; 16]);
        let depot = &env.depots[env.depot_of(self.id.rank)];
        let body = if depot.holds() == Some(shape.cells) {
            let end = read.from.saturating_add(env.setup.inventory_pages);
            let mut pages = depot.listed();
            pages.retain(|page| (read.from..end).contains(&page.page));
            let next = (end < depot.pages(shape)).then_some(end);
            Message::Inventory(Inventory::new(read, next, &pages))
        } else {
            Message::Error(ErrorBody::new(ErrorCode::Invalid, "divided otherwise"))
        };
        self.leader.reply(env, correlation, body);
    }

    fn rank_asks(&mut self, env: &mut Env, id: ConnectionId, envelope: Envelope) {
        let correlation = envelope.correlation;
        let Some(engine) = self.server.hello(id).map(|hello| EngineId(hello.engine)) else {
            return;
        };
        match envelope.message {
            Message::Register(register) => {
                let engine = EngineId(register.engine);
                let after = RequestId(register.after);
                if let Some((known, connection, asked)) = &mut self.memory
                    && (*known, *connection) == (engine, id)
                {
                    // Said again: it is answered when the leader has agreed, or has agreed already.
                    match asked {
                        Some(asked) => *asked = correlation,
                        None => self.registered(env, engine, Some(correlation), true),
                    }
                    return;
                }
                self.memory = Some((engine, id, Some(correlation)));
                let bounds = MemoryBounds {
                    device_pages: env.geometry(engine).device_pages,
                    arena_pages: self.room(env, engine),
                };
                let registered = WorkerEvent::Registered {
                    engine,
                    after,
                    bounds,
                };
                self.step(env, registered);
            }
            Message::Written(written) => {
                if self
                    .memory
                    .is_some_and(|(_, connection, _)| connection == id)
                {
                    self.server
                        .reply(env, id, correlation, Message::WrittenAnswer(Empty {}));
                    let through = RequestId(written.through);
                    self.step(env, WorkerEvent::Written { engine, through });
                }
            }
            Message::Abandon(abandon) => {
                self.next_ask += 1;
                let ask = self.next_ask;
                self.abandoning.insert(ask, (id, correlation));
                let requests = abandon.requests.into_iter().map(RequestId).collect();
                let event = WorkerEvent::Abandon {
                    engine,
                    ask,
                    requests,
                };
                self.step(env, event);
            }
            other => env.violated(format!("a rank said {}", other.kind().name())),
        }
    }

    fn rank_gone(&mut self, env: &mut Env, id: ConnectionId) {
        self.abandoning
            .retain(|_, (connection, _)| *connection != id);
        if let Some((engine, ..)) = self.memory.take_if(|(_, connection, _)| *connection == id) {
            self.step(env, WorkerEvent::MemoryGone(engine));
        }
    }

    fn registered(
        &mut self,
        env: &mut Env,
        engine: EngineId,
        asked: Option<RequestId>,
        admitted: bool,
    ) {
        let Some((known, connection, waiting)) = self.memory.as_mut() else {
            return;
        };
        if *known != engine {
            return;
        }
        let asked = asked.or(waiting.take());
        let connection = *connection;
        if !admitted {
            self.memory = None;
        }
        let Some(asked) = asked else {
            if !admitted {
                self.server.close(env, connection);
                self.rank_gone(env, connection);
            }
            return;
        };
        let message = match admitted {
            true => Message::Registered(Registered {
                arena_pages: self.room(env, engine),
                page_bytes: env.geometry(engine).page_bytes,
                not_served: String::new(),
            }),
            false => Message::Error(ErrorBody::new(ErrorCode::RankDisagrees, "turned away")),
        };
        self.server.reply(env, connection, asked, message);
    }

    fn step(&mut self, env: &mut Env, event: WorkerEvent) {
        let mut effects = Vec::new();
        self.core.step(env.now(), event, &mut effects);
        let shard = env.depot_of(self.id.rank);
        for effect in effects {
            tracing::trace!(worker = %self.id, ?effect);
            match effect {
                WorkerEffect::Attach { attach, .. } => self.attach(env, attach),
                WorkerEffect::Registered { engine, admitted } => {
                    self.registered(env, engine, None, admitted);
                }
                // Its engine's ranks say what they have written.
                WorkerEffect::Await { .. } => {}
                WorkerEffect::StrikeOut(run) => env.depots[shard].strike_out(run),
                WorkerEffect::Strike {
                    id,
                    scope,
                    through,
                    deadline,
                } => {
                    let body = if env.now() < deadline {
                        env.depots[shard].strike_scope(&scope, through);
                        Message::Struck(Struck { reset: id.0 })
                    } else {
                        Message::Error(ErrorBody::new(ErrorCode::Deadline, "too late"))
                    };
                    self.leader.reply(env, self.order, body);
                }
                WorkerEffect::List(record) => env.depots[shard].list(&record),
                WorkerEffect::Start(copies) => {
                    copies
                        .into_iter()
                        .for_each(|copy| self.start_copy(env, copy));
                }
                WorkerEffect::Stop(op) => {
                    if let Some(running) = self.running.get_mut(&op) {
                        running.stop = true;
                    }
                }
                WorkerEffect::Report { batch, copies } => self.report(env, batch, &copies),
                WorkerEffect::Abandoned { ask } => {
                    if let Some((id, correlation)) = self.abandoning.remove(&ask) {
                        let body = Message::AbandonAnswer(Empty {});
                        self.server.reply(env, id, correlation, body);
                    }
                }
                WorkerEffect::Refuse(refusal) => {
                    let error = ErrorBody::new(ErrorCode::NotReady, refusal.to_string());
                    let error = Message::Error(error);
                    self.leader.reply(env, self.order, error);
                }
                WorkerEffect::Invalid { op, problem } => {
                    env.violated(format!(
                        "{op} was ordered with what it may not name: {problem}"
                    ));
                }
                WorkerEffect::GiveUp => self.gave_up = true,
            }
        }
    }

    fn attach(&mut self, env: &mut Env, attach: AttachId) {
        self.next_question += 1;
        let correlation = RequestId(self.next_question);
        self.attaching.insert(correlation, attach);
        while self.attaching.len() > 64 {
            self.attaching.pop_first();
        }
        let memory = self.memory.map(|(engine, ..)| AttachedMemory {
            engine: engine.0,
            geometry: env.geometry(engine),
            arena_pages: self.room(env, engine),
        });
        let body = Message::Attach(Attach {
            replica: self.id.replica.0,
            rank: self.id.rank.0,
            ranks: env.setup.sharding.ranks(),
            kv_shards: env.setup.sharding.shards(),
            attach: attach.0,
            depot: env.depots[env.depot_of(self.id.rank)].id().0.to_be_bytes(),
            depot_epoch: env.depots[env.depot_of(self.id.rank)].last_reader().0,
            memory,
        });
        self.leader.request_here(env, correlation, body);
    }

    /// Pages of this engine's shape that the depot has room for.
    fn room(&self, env: &Env, engine: EngineId) -> u32 {
        let depot = &env.depots[env.depot_of(self.id.rank)];
        depot.pages(env.memory(engine).shape)
    }

    fn report(&mut self, env: &mut Env, batch: BatchId, copies: &[EndedCopy]) {
        let body = Message::Ended(Ended {
            rank: self.id.rank.0,
            copies: copies.iter().map(CopyResult::from).collect(),
        });
        self.leader.reply(env, RequestId(batch.0), body);
    }

    fn start_copy(&mut self, env: &mut Env, copy: Copy) {
        let pairs = copy.pairs.iter();
        let pages: Vec<(u32, u32)> = pairs
            .flat_map(|pair| pair.src.iter_pages().zip(pair.dst.iter_pages()))
            .collect();
        let fate = self.fate(env, &copy, pages.len());
        env.counts.copies += 1;
        let pace = match fate {
            Fate::Slow => env.setup.request_timeout,
            _ => env.setup.page_time,
        };
        self.touch(env, &copy, &pages, Touched::begin);
        let op = copy.op;
        let running = Running {
            copy,
            pages,
            done: 0,
            stop: false,
            fate,
            pace,
            held: false,
            over: None,
        };
        let whole = pace * u32::try_from(running.pages.len()).unwrap_or(u32::MAX);
        self.running.insert(op, running);
        self.tear(env, op);
        self.go_on(env, op, pace);
        env.leader_may_die(whole);
    }

    fn fate(&self, env: &mut Env, copy: &Copy, pages: usize) -> Fate {
        let chances = env.net.chances;
        let dice = env.rng.u32(0..1_000_000);
        if env
            .failing
            .is_some_and(|(rank, until)| rank == self.id.rank && env.now() < until)
        {
            env.faults.injected(Fault::RankFailure);
            if copy.direction == Direction::Store {
                env.faults.took_effect(Fault::RankFailure);
            }
            return Fate::FailsWithRank(env.rng.usize(0..=pages));
        }
        if dice < chances.copy_error {
            env.faults.injected(Fault::CopyError);
            return Fate::Fails(env.rng.usize(0..=pages));
        }
        if dice < chances.copy_error + chances.copy_late {
            env.faults.injected(Fault::CopyLate);
            return Fate::Slow;
        }
        if dice < chances.copy_error + chances.copy_late + chances.copy_stuck {
            env.faults.injected(Fault::CopyStuck);
            return Fate::Stuck;
        }
        Fate::Good
    }

    /// Begins or ends the copy's hold on what it reads and writes, for the checker.
    fn touch(
        &self,
        env: &mut Env,
        copy: &Copy,
        pages: &[(u32, u32)],
        with: fn(&mut Touched, &TouchedPages<'_>),
    ) {
        let touched = TouchedPages {
            worker: self.id,
            shard: env.setup.sharding.of(self.id.rank),
            life: self.life,
            copy,
            pages,
            cells: env.memory(copy.engine).shape.cells,
        };
        with(&mut env.ghost.touched, &touched);
        env.check_touched();
    }

    /// The next page of a copy is half written.
    fn tear(&self, env: &mut Env, op: OpId) {
        let Some(running) = self.running.get(&op) else {
            return;
        };
        if let Some((_, destination)) = running.pages.get(running.done) {
            env.write(&running.copy, self.id.rank, *destination, TORN);
        }
    }

    fn go_on(&self, env: &mut Env, op: OpId, pace: Duration) {
        let late = pace.mul_f64(0.5 + env.rng.f64());
        let (worker, life) = (self.id, self.life);
        let at = env.now() + late;
        env.queue.push(at, Happening::CopyStep { worker, life, op });
    }

    /// The process stood still: what it was copying may go on behind its deadline.
    pub(super) fn resumed(&mut self) {
        self.running
            .values_mut()
            .for_each(|running| running.held = true);
    }

    /// One page more, or the end.
    pub(super) fn copy_step(&mut self, env: &mut Env, op: OpId) {
        let now = env.now();
        let rank = self.id.rank;
        let Some(running) = self.running.get_mut(&op) else {
            return;
        };
        if let Some(whole) = running.over {
            return self.copy_over(env, op, whole);
        }
        let stuck = running.fate == Fate::Stuck && running.done == running.pages.len() / 2;
        if stuck {
            return;
        }
        let fails =
            matches!(running.fate, Fate::Fails(at) | Fate::FailsWithRank(at) if at == running.done);
        let stops = running.stop && running.done.is_multiple_of(env.setup.granule);
        let over = stops || fails || running.done == running.pages.len();
        if !over {
            let (source, destination) = running.pages[running.done];
            if running.held && now > running.copy.deadline {
                env.faults.injected(Fault::LateWriter);
                env.faults.took_effect(Fault::LateWriter);
            }
            let content = env.read(&running.copy, rank, source);
            env.write(&running.copy, rank, destination, content);
            running.done += 1;
            let pace = running.pace;
            self.tear(env, op);
            return self.go_on(env, op, pace);
        }
        let whole = running.done == running.pages.len() && !fails;
        match running.fate {
            Fate::Fails(_) if !whole => env.faults.took_effect(Fault::CopyError),
            Fate::Slow if !whole || now > running.copy.deadline => {
                env.faults.took_effect(Fault::CopyLate)
            }
            _ => {}
        }
        running.over = Some(whole);
        let pace = running.pace.min(env.setup.page_time);
        self.go_on(env, op, pace);
    }

    /// The core hears that a copy is over.
    fn copy_over(&mut self, env: &mut Env, op: OpId, whole: bool) {
        let Some(running) = self.running.remove(&op) else {
            return;
        };
        self.touch(env, &running.copy, &running.pages, Touched::end);
        let ended = EndedCopy {
            op,
            whole,
            whole_pages: u32::try_from(running.done).unwrap_or(0),
            bytes: running.done as u64 * env.geometry(running.copy.engine).page_bytes,
            busy_us: 1,
        };
        self.step(env, WorkerEvent::CopiesEnded(vec![ended]));
    }
}

/// What a copy touches.
#[derive(Debug)]
pub(super) struct TouchedPages<'a> {
    pub(super) worker: WorkerId,
    pub(super) shard: Shard,
    pub(super) life: u32,
    pub(super) copy: &'a Copy,
    pub(super) pages: &'a [(u32, u32)],
    /// Cells of a depot's page.
    pub(super) cells: u32,
}
