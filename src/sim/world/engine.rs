//! An engine's process: the reference engine's scheduler, its registered KV memory on every rank, and its client
//! sessions.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::client::{SimClient, SimClientEvent};
use super::net::{ConnectionId, Received};
use super::prompts;
use super::saboteur::Lie;
use super::setup::Shape;
use super::storage::TORN;
use super::{NodeId, SimContext, SimEvent};
use kvferry_protocol::{Abandon, Message, Register, Role, Written};
use kvferry_types::{
    Answer, EngineId, Fingerprint, GroupId, PRIORITIES, PRIORITY_DEFAULT, Part, Rank, Replica,
    Request, RequestId, ResetAnswer, ResetScope, SlotId, TierId, Time, WorkerId,
};
use kvferry_workload::scheduler::{Action, Prompt, Scheduler, WorkKind};

/// Interval at which an engine repeats an unanswered request.
const AGAIN: Duration = Duration::from_millis(12);
/// Interval at which an engine repeats an unanswered registration. Longer than [`AGAIN`], because each registration
/// replaces the one before it and has to be agreed on again.
const REGISTER_AGAIN: Duration = Duration::from_millis(250);
/// Most prompts that an engine serves in one incarnation.
const PROMPTS_MAX: u64 = 1 << 40;

/// A request that is not over: not answered, or abandoned on some ranks only.
#[derive(Debug)]
struct OpenRequest {
    message: Message,
    due: Time,
    again: Time,
    /// The scheduler has been notified that the request was given up.
    abandoned: bool,
    /// Ranks whose workers have not yet confirmed that no copy runs for the request.
    abandoning: BTreeSet<u16>,
    kind: RequestKind,
    /// An operator's command, which has a session of its own.
    by_operator: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequestKind {
    Lookup,
    Pages,
    Finish,
    Reset,
}

impl RequestKind {
    /// How long an answer is still used after the deadline. Pages of a load or store belong to the leader until it
    /// answers.
    fn grace(self) -> Duration {
        match self {
            Self::Pages => Duration::from_secs(2),
            Self::Lookup | Self::Finish | Self::Reset => Duration::ZERO,
        }
    }
}

/// The session with one rank's worker.
#[derive(Debug)]
struct RankSide {
    client: SimClient,
    /// Incarnation of the worker at which this engine's memory is registered.
    registered: Option<u32>,
    again: Time,
    /// When an unanswered registration is sent again.
    register_again: Time,
    /// The last `written` that was sent to the worker, and the last that it acknowledged (`confirmed_written`).
    sent_written: RequestId,
    confirmed_written: RequestId,
    registering: Option<RequestId>,
    reporting: BTreeMap<RequestId, RequestId>,
    abandoning: BTreeMap<RequestId, RequestId>,
}

#[derive(Debug)]
struct DeviceWork {
    slot: SlotId,
    kind: WorkKind,
    parts: Vec<Part>,
    reads: Vec<Part>,
    through: Option<RequestId>,
    /// The scheduler was notified before the work was done: the device writes late.
    late: bool,
}

/// One incarnation of an engine.
#[derive(Debug)]
pub(super) struct EngineProcess {
    pub(super) id: EngineId,
    replica: Replica,
    incarnation: u32,
    pub(super) scheduler: Scheduler,
    shape: Shape,
    leader: SimClient,
    /// The session of commands, from the first one on.
    operator: Option<SimClient>,
    ranks: Vec<RankSide>,
    requests: BTreeMap<RequestId, OpenRequest>,
    /// The highest request id so far.
    highest: RequestId,
    /// Everything up to this request is written. Requests whose pages are still being computed are in `unwritten`.
    written: RequestId,
    unwritten: BTreeSet<RequestId>,
    /// When the device finishes the last work whose end the scheduler was notified of early.
    device_until: Time,
    work: BTreeMap<u64, DeviceWork>,
    next: u64,
    namespaces: BTreeMap<SlotId, u8>,
    next_slot: u64,
    actions: Vec<Action>,
}

/// First of the ids for requests to the worker.
const CLIENT_ID_BASE: u64 = 1 << 32;

impl EngineProcess {
    pub(super) fn start(env: &mut SimContext, replica: Replica, incarnation: u32) -> Self {
        let mut id = [0; 16];
        id[0] = u8::try_from(replica.0).unwrap_or(0);
        id[1..5].copy_from_slice(&incarnation.to_be_bytes());
        let id = EngineId(id);
        let me = NodeId::Engine(replica);
        let version = env.setup.version_max;
        let place = |rank| WorkerId { replica, rank };
        let hello = |role, rank| SimClient::hello(role, id, place(Rank(rank)), version);
        let ranks = (0..env.setup.ranks).map(|rank| RankSide {
            client: SimClient::new(
                env,
                (me, incarnation),
                NodeId::Worker(place(Rank(rank))),
                hello(Role::Rank, rank),
            ),
            registered: None,
            again: Time(0),
            register_again: Time(0),
            sent_written: RequestId(0),
            confirmed_written: RequestId(0),
            registering: None,
            reporting: BTreeMap::new(),
            abandoning: BTreeMap::new(),
        });
        let ranks: Vec<RankSide> = ranks.collect();
        let leader = SimClient::new(
            env,
            (me, incarnation),
            NodeId::Leader,
            hello(Role::Engine, 0),
        );
        let memory = env.add_memory(id);
        Self {
            id,
            replica,
            incarnation,
            scheduler: env.setup.scheduler(memory.shape, memory.device_pages),
            shape: memory.shape,
            leader,
            operator: None,
            ranks,
            requests: BTreeMap::new(),
            highest: RequestId(0),
            written: RequestId(0),
            unwritten: BTreeSet::new(),
            device_until: Time(0),
            work: BTreeMap::new(),
            next: CLIENT_ID_BASE,
            namespaces: BTreeMap::new(),
            next_slot: 0,
            actions: Vec::new(),
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.scheduler.open_prompts() == 0 && self.requests.is_empty()
    }

    /// Everything that the engine waits for, as text for a report.
    pub(super) fn waits(&self) -> String {
        let requested: Vec<String> = self
            .requests
            .iter()
            .map(|(id, requested)| {
                format!(
                    "{id} {:?} {:?} {:?}",
                    requested.kind, requested.abandoned, requested.abandoning
                )
            })
            .collect();
        let ranks: Vec<Option<u32>> = self.ranks.iter().map(|rank| rank.registered).collect();
        format!(
            "{} prompts, asked {requested:?}, ranks {ranks:?}, work {:?}",
            self.scheduler.open_prompts(),
            self.work
        )
    }

    pub(super) fn next_timeout(&self) -> Time {
        let requested = self.requests.values().map(|requested| {
            match requested.abandoned || requested.kind == RequestKind::Finish {
                true => requested.again,
                false => requested.again.min(requested.due),
            }
        });
        let ranks = self
            .ranks
            .iter()
            .map(|rank| rank.again.min(rank.client.next_timeout()));
        requested
            .chain(ranks)
            .min()
            .unwrap_or(Time::NEVER)
            .min(self.leader.next_timeout())
            .min(
                self.operator
                    .as_ref()
                    .map_or(Time::NEVER, SimClient::next_timeout),
            )
    }

    pub(super) fn tick(&mut self, env: &mut SimContext) {
        for noticed in self.leader.tick(env) {
            self.leader_event(env, noticed);
        }
        let operator = self.operator.as_mut().map(|operator| operator.tick(env));
        for noticed in operator.into_iter().flatten() {
            self.leader_event(env, noticed);
        }
        for rank in 0..self.ranks.len() {
            for noticed in self.ranks[rank].client.tick(env) {
                self.rank_event(env, rank, noticed);
            }
            self.serve_rank(env, rank);
        }
        self.repeat_requests(env);
        self.act(env);
    }

    pub(super) fn receive(&mut self, env: &mut SimContext, id: ConnectionId, received: Received) {
        if self.leader.is(id) {
            for noticed in self.leader.receive(env, received) {
                self.leader_event(env, noticed);
            }
        } else if let Some(operator) = self.operator.as_mut().filter(|operator| operator.is(id)) {
            for noticed in operator.receive(env, received) {
                self.leader_event(env, noticed);
            }
        } else if let Some(rank) = self.ranks.iter().position(|rank| rank.client.is(id)) {
            for noticed in self.ranks[rank].client.receive(env, received) {
                self.rank_event(env, rank, noticed);
            }
        }
        self.act(env);
    }

    fn leader_event(&mut self, env: &mut SimContext, noticed: SimClientEvent) {
        match noticed {
            SimClientEvent::Lost => {}
            // Unanswered requests are sent again, to this leader or its successor.
            SimClientEvent::Welcomed { .. } => {
                self.requests
                    .values_mut()
                    .for_each(|requested| requested.again = env.now());
                self.repeat_requests(env);
            }
            SimClientEvent::Request { envelope, .. } => {
                let kind = envelope.message.kind().name();
                env.violated(format!("an engine received a request: {kind}"));
            }
            SimClientEvent::Answered(id, answer) => {
                if let Err(failure) = &*answer
                    && (!failure.over && self.refused_for_now(id)
                        || failure.retry && self.is_finish(id))
                {
                    env.counts.refusals += 1;
                    return;
                }
                let Some(requested) = self.requests.remove(&id) else {
                    return;
                };
                if requested.kind == RequestKind::Pages {
                    env.check_over(self.id, id);
                }
                let answer: Option<Answer> = answer.ok().and_then(|message| message.answer());
                env.counts.answers += 1;
                env.counts.refusals += u64::from(answer.is_none());
                if let Some(Answer::Reset(ResetAnswer { .. })) = answer {
                    env.counts.resets += 1;
                }
                env.counts.flushes += u64::from(matches!(answer, Some(Answer::Flush(_))));
                self.scheduler.answered(id, answer, &mut self.actions);
            }
        }
    }

    /// Handles an error that frees no page: the workers are requested to abandon the copies of this load or store.
    /// Returns false when the request names no pages.
    fn refused_for_now(&mut self, id: RequestId) -> bool {
        let requested = self.requests.get_mut(&id);
        let Some(requested) = requested.filter(|requested| requested.kind == RequestKind::Pages)
        else {
            return false;
        };
        if !std::mem::replace(&mut requested.abandoned, true) {
            self.scheduler.abandoned(id, &mut self.actions);
        }
        true
    }

    /// True for a `finish`. An engine repeats it until it succeeds, because the leader keeps the slot until then.
    fn is_finish(&self, id: RequestId) -> bool {
        let requested = self.requests.get(&id);
        requested.is_some_and(|requested| requested.kind == RequestKind::Finish)
    }

    fn repeat_requests(&mut self, env: &mut SimContext) {
        let now = env.now();
        let mut given_up = Vec::new();
        for (id, requested) in &mut self.requests {
            if now >= requested.due && !requested.abandoned && requested.kind != RequestKind::Finish
            {
                requested.abandoned = true;
                given_up.push((*id, requested.kind));
            }
            if now < requested.again {
                continue;
            }
            requested.again = now + AGAIN;
            let wait = (now.until(requested.due).max(AGAIN), requested.kind.grace());
            let client = match (&mut self.operator, requested.by_operator) {
                (Some(operator), true) => operator,
                _ => &mut self.leader,
            };
            client.request(env, *id, wait, requested.message.clone());
            for rank in &requested.abandoning {
                self.next += 1;
                let correlation = RequestId(self.next);
                let side = &mut self.ranks[usize::from(*rank)];
                side.abandoning.insert(correlation, *id);
                let body = Message::Abandon(Abandon {
                    requests: vec![id.0],
                });
                side.client.request_here(env, correlation, body);
            }
        }
        for (id, kind) in given_up {
            env.counts.given_up += 1;
            if kind != RequestKind::Pages {
                self.requests.remove(&id);
            }
            self.scheduler.abandoned(id, &mut self.actions);
        }
    }

    fn rank_event(&mut self, env: &mut SimContext, rank: usize, noticed: SimClientEvent) {
        let side = &mut self.ranks[rank];
        match noticed {
            SimClientEvent::Lost => {
                side.registered = None;
                side.registering = None;
                side.again = env.now();
            }
            SimClientEvent::Welcomed { .. } => side.again = env.now(),
            SimClientEvent::Request { envelope, .. } => {
                let kind = envelope.message.kind().name();
                env.violated(format!("a rank received a request: {kind}"));
            }
            SimClientEvent::Answered(id, answer) => match *answer {
                Ok(Message::Registered(_)) if side.registering == Some(id) => {
                    side.registering = None;
                    side.registered = side.client.server_incarnation(env);
                    side.confirmed_written = RequestId(0);
                    side.again = env.now();
                }
                Err(_) if side.registering == Some(id) => {
                    side.registering = None;
                    side.again = env.now() + AGAIN;
                }
                Ok(Message::WrittenAnswer(_)) => {
                    if let Some(through) = side.reporting.remove(&id) {
                        side.confirmed_written = side.confirmed_written.max(through);
                    }
                }
                Ok(Message::AbandonAnswer(_)) => {
                    if let Some(request) = side.abandoning.remove(&id) {
                        self.abandoned(env, rank, request);
                    }
                }
                Ok(Message::Registered(_)) | Err(_) => {}
                Ok(other) => {
                    env.violated(format!("a worker sent {} to a rank", other.kind().name()))
                }
            },
        }
        self.serve_rank(env, rank);
    }

    /// Sends the registration or the `written` message that is due to a rank's worker.
    fn serve_rank(&mut self, env: &mut SimContext, rank: usize) {
        let now = env.now();
        let highest = self.highest;
        let side = &mut self.ranks[rank];
        if now < side.again {
            return;
        }
        side.again = now + AGAIN;
        if side.client.epoch().is_none() {
            return;
        }
        self.next += 1;
        let correlation = RequestId(self.next);
        if side.registered.is_none() {
            if side.registering.is_some() && now < side.register_again {
                return;
            }
            side.register_again = now + REGISTER_AGAIN;
            side.registering = Some(correlation);
            let rank = Rank(u16::try_from(rank).unwrap_or(0));
            let shard = u16::try_from(env.depot_of(rank)).unwrap_or(0);
            let geometry = env.geometry(self.id);
            let registration = env.setup.registration(&geometry, rank, shard);
            let body = Message::Register(Register {
                abandoned_through: highest.0,
                engine: self.id.0,
                registration,
                check_only: false,
            });
            return side.client.request_here(env, correlation, body);
        }
        if side.confirmed_written < self.written {
            side.sent_written = self.written;
            side.reporting.insert(correlation, self.written);
            while side.reporting.len() > 64 {
                side.reporting.pop_first();
            }
            let body = Message::Written(Written {
                timeline: false,
                through: self.written.0,
            });
            side.client.request_here(env, correlation, body);
        } else {
            side.again = Time::NEVER;
        }
    }

    /// Handles the death of a worker. If this engine's memory was registered there, none of its copies run any longer.
    pub(super) fn died(&mut self, env: &mut SimContext, worker: WorkerId, incarnation: u32) {
        let rank = usize::from(worker.rank.0);
        if worker.replica != self.replica || self.ranks[rank].registered != Some(incarnation) {
            return;
        }
        self.ranks[rank].registered = None;
        self.ranks[rank].registering = None;
        self.ranks[rank].again = env.now();
        let open: Vec<RequestId> = self.requests.keys().copied().collect();
        open.into_iter()
            .for_each(|request| self.abandoned(env, rank, request));
        self.act(env);
    }

    /// A rank's worker runs no copy for the request any longer. After the last rank, the request is over.
    fn abandoned(&mut self, env: &mut SimContext, rank: usize, request: RequestId) {
        let rank = u16::try_from(rank).unwrap_or(u16::MAX);
        let Some(requested) = self.requests.get_mut(&request) else {
            return;
        };
        if requested.abandoning.remove(&rank) && requested.abandoning.is_empty() {
            self.requests.remove(&request);
            env.check_over(self.id, request);
            self.scheduler.answered(request, None, &mut self.actions);
        }
    }

    /// A prompt arrives, and the next arrival is scheduled.
    pub(super) fn arrive(&mut self, env: &mut SimContext) {
        if env.arrivals_end() || self.next_slot >= PROMPTS_MAX {
            return;
        }
        if self.scheduler.open_prompts() < env.setup.concurrency {
            self.next_slot += 1;
            let (namespace, hashes) = prompts::draw(env);
            let slot = SlotId(self.next_slot);
            self.namespaces.insert(slot, namespace);
            env.counts.prompts += 1;
            let tokens = match env.setup.groups(self.shape) {
                [] => hashes.len() as u64,
                _ => {
                    let unit = u64::from(env.setup.units(self.shape).0);
                    hashes.len() as u64 * unit + env.rng.u64(0..unit)
                }
            };
            let prompt = Prompt {
                slot,
                namespace: Arc::from([namespace]),
                tokens,
                hashes: Arc::new(hashes),
            };
            self.scheduler.arrive(prompt, &mut self.actions);
            match env.rng.u8(..) {
                0..4 => self.reset(env),
                4..10 => self.cancel_stores(env),
                10..16 if env.setup.tiers.contains(&TierId::Disk) => self.flush(env),
                _ => {}
            }
            self.act(env);
        }
        let (replica, incarnation) = (self.replica, self.incarnation);
        let at = env.now() + Duration::from_micros(env.rng.u64(50..4000));
        env.queue.push(
            at,
            SimEvent::Arrive {
                replica,
                incarnation,
            },
        );
    }

    fn reset(&mut self, env: &mut SimContext) {
        let (namespace, hashes) = prompts::draw(env);
        let scope = match env.rng.u8(0..3) {
            0 => ResetScope::Everything,
            1 => ResetScope::Namespace(vec![namespace]),
            _ => ResetScope::Pages(vec![namespace], hashes),
        };
        // Every second reset of a world with several tiers is one of a single tier.
        let tiers = env.setup.tiers.clone();
        let tier = match tiers.len() {
            1 => None,
            len => tiers.get(env.rng.usize(..2 * len)).copied(),
        };
        let id = self.draw_id();
        let reset = Request::Reset { scope, tier };
        self.request(env, id, reset, RequestKind::Reset);
    }

    /// Has the disk flushed.
    fn flush(&mut self, env: &mut SimContext) {
        let id = self.draw_id();
        self.request(env, id, Request::Flush, RequestKind::Reset);
    }

    /// Cancels the stores of all slots, or of one slot that may already be finished.
    fn cancel_stores(&mut self, env: &mut SimContext) {
        let slot = env.rng.u64(..=2 * self.next_slot);
        let slot = (slot <= self.next_slot).then_some(SlotId(slot));
        let id = self.draw_id();
        self.request(env, id, Request::CancelStores { slot }, RequestKind::Reset);
    }

    /// The session of an operator's commands on the engine's machine.
    fn new_operator(&self, env: &SimContext) -> SimClient {
        let place = WorkerId {
            replica: self.replica,
            rank: Rank(0),
        };
        let hello = SimClient::hello(Role::Admin, self.id, place, env.setup.version_max);
        let me = (NodeId::Engine(self.replica), self.incarnation);
        SimClient::new(env, me, NodeId::Leader, hello)
    }

    fn draw_id(&mut self) -> RequestId {
        self.highest = self.scheduler.draw_id();
        self.highest
    }

    fn request(
        &mut self,
        env: &mut SimContext,
        id: RequestId,
        request: Request,
        kind: RequestKind,
    ) {
        let now = env.now();
        // An engine removes the pages of a namespace, and an operator those of all.
        let by_operator = matches!(
            request,
            Request::Reset {
                scope: ResetScope::Everything,
                ..
            }
        );
        let message: Message = request.into();
        let timeout = env.setup.request_timeout;
        let wait = (timeout, kind.grace());
        let client = match by_operator {
            true => {
                let operator = self.operator.take();
                let operator = operator.unwrap_or_else(|| self.new_operator(env));
                self.operator.insert(operator)
            }
            false => &mut self.leader,
        };
        client.request(env, id, wait, message.clone());
        let requested = OpenRequest {
            message,
            due: now + timeout,
            again: now + AGAIN,
            abandoned: false,
            abandoning: BTreeSet::new(),
            kind,
            by_operator,
        };
        self.requests.insert(id, requested);
    }

    fn act(&mut self, env: &mut SimContext) {
        let mut next = 0;
        while let Some(action) = self.actions.get_mut(next) {
            tracing::trace!(engine = %self.id, ?action);
            next += 1;
            match std::mem::replace(action, Action::Idle) {
                Action::Idle => {}
                Action::Send { id, mut request } => {
                    if let Request::Store { parts, .. } = &mut request {
                        // Where a tier evicts by priority, each store has another one than the store before.
                        let priority = id.0 % u64::from(PRIORITIES);
                        let priority = u8::try_from(priority).unwrap_or(PRIORITY_DEFAULT);
                        parts.iter_mut().for_each(|part| part.priority = priority);
                    }
                    self.highest = self.highest.max(id);
                    let kind = match &request {
                        Request::Lookup { .. } => RequestKind::Lookup,
                        Request::Load { .. } | Request::Store { .. } => RequestKind::Pages,
                        Request::Finish { .. } => RequestKind::Finish,
                        Request::Reset { .. } | Request::Flush | Request::CancelStores { .. } => {
                            RequestKind::Reset
                        }
                    };
                    let store = matches!(request, Request::Store { .. });
                    self.request(env, id, request, kind);
                    if store && env.lies(Lie::ReleaseSource) {
                        self.scheduler.answered(id, None, &mut self.actions);
                    }
                }
                Action::Work {
                    slot,
                    kind,
                    parts,
                    reads,
                    written_through,
                } => self.work(env, (slot, kind), (parts, reads), written_through),
                Action::Abandon { id } => {
                    if let Some(requested) = self.requests.get_mut(&id) {
                        requested.abandoning = (0..env.setup.ranks).collect();
                        requested.again = env.now();
                    }
                }
                Action::Done(served) => {
                    env.counts.served += 1;
                    let loaded = u64::from(served.loaded_pages);
                    env.counts.hit_pages += loaded;
                    if env.setup.groups(self.shape).len() > 1 {
                        env.counts.group_hit_pages += loaded;
                    }
                    self.namespaces.remove(&served.slot);
                }
            }
        }
        self.actions.clear();
    }

    fn work(
        &mut self,
        env: &mut SimContext,
        (slot, kind): (SlotId, WorkKind),
        (parts, reads): (Vec<Part>, Vec<Part>),
        through: Option<RequestId>,
    ) {
        self.next += 1;
        let ticket = self.next;
        let late = kind == WorkKind::Poison && env.rng.u8(..) < 64;
        let work = DeviceWork {
            slot,
            kind,
            parts,
            reads,
            through,
            late,
        };
        self.unwritten.extend(work.through);
        self.work.insert(ticket, work);
        let (replica, incarnation) = (self.replica, self.incarnation);
        // A device works in order: no work overtakes the late writes of earlier work.
        let mut at = env.now() + Duration::from_micros(env.rng.u64(1..600));
        at = at.max(self.device_until + Duration::from_micros(1));
        if late {
            at = at + Duration::from_micros(env.rng.u64(..3000));
            self.device_until = at;
        }
        env.queue.push(
            at,
            SimEvent::Worked {
                replica,
                incarnation,
                ticket,
            },
        );
        if late {
            self.scheduler.worked(slot, kind, &mut self.actions);
        }
    }

    /// A piece of work is complete on every rank.
    pub(super) fn worked(&mut self, env: &mut SimContext, ticket: u64) {
        let Some(work) = self.work.remove(&ticket) else {
            return;
        };
        self.carry_out(env, &work);
        if let Some(through) = work.through {
            self.unwritten.remove(&through);
            self.written = match self.unwritten.first() {
                Some(first) => RequestId(first.0 - 1),
                None => self.highest,
            };
            for rank in 0..self.ranks.len() {
                self.ranks[rank].again = env.now();
                self.serve_rank(env, rank);
            }
        }
        if !work.late {
            self.scheduler
                .worked(work.slot, work.kind, &mut self.actions);
        }
        self.act(env);
    }

    fn carry_out(&self, env: &mut SimContext, work: &DeviceWork) {
        let namespace = self.namespaces.get(&work.slot).copied().unwrap_or(0);
        let pages_of = |parts: &[Part]| -> Vec<(GroupId, u32, Fingerprint)> {
            let pages = parts.iter().flat_map(|part| {
                let pages = (part.first_page..).zip(part.pages.iter_pages());
                pages.filter_map(|(position, page)| {
                    let content = self.scheduler.content(work.slot, part.group, position)?;
                    Some((part.group, page, content))
                })
            });
            pages.collect()
        };
        let (pages, reads) = (pages_of(&work.parts), pages_of(&work.reads));
        for rank in 0..env.setup.ranks {
            let must = |env: &SimContext, group, content| {
                env.expected(namespace, (self.shape, group), content, Rank(rank))
            };
            for (group, page, content) in &pages {
                let must = must(env, *group, *content);
                match work.kind {
                    WorkKind::Poison => env.engine_writes(self.id, rank, *page, TORN),
                    WorkKind::Compute => env.engine_writes(self.id, rank, *page, must),
                    WorkKind::Verify => env.engine_reads(self.id, rank, *page, must, "loaded"),
                }
            }
            // Also pages that were cached or loaded must be correct.
            for (group, page, content) in &reads {
                let must = must(env, *group, *content);
                env.engine_reads(self.id, rank, *page, must, "held");
            }
        }
    }
}
