//! The leader's shell: messages of peers in, the core's steps, messages to peers out.

mod access;
mod batches;
mod effects;
mod errors;
mod host;
mod operators;
mod readers;
mod reports;
mod seats;
mod statements;
mod status;

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use crate::Holder;
use crate::log_filter::set_log;
use kvferry_core::{
    CANCELLED_MAX, LOAD_RUNS_MAX, Leader, LeaderEffect, LeaderEvent, LeaderSettings,
};
use kvferry_protocol::limits::{COPIES_MAX, PAIRS_MAX};
use kvferry_protocol::{Envelope, ErrorBody, ErrorCode, Message, Readiness, WorkerGoneAnswer};
use kvferry_types::{EngineId, Epoch, LogLimit, PeerId, Request, RequestId, Time, User, WorkerId};

use batches::StoreBatches;
pub use host::{HostError, LeaderHost};
use readers::LogReaders;
pub use readers::read_events;
use seats::{PeerRole, WorkerPeer};
pub use status::LOOKUP_NS;

// The core's effect of one order fits into one message.
const _: () = assert!(CANCELLED_MAX <= COPIES_MAX && LOAD_RUNS_MAX <= PAIRS_MAX);

/// Lines about seats within a minute, at most: a few for each of 64 ranks that start together. About 40 MB a day.
const SEAT_LINES_MAX: u32 = 128;

/// Where a message came from, and what its header says.
#[derive(Debug, Clone, Copy)]
struct Origin {
    peer: PeerId,
    request: RequestId,
    deadline_ms: u32,
    /// Epoch of the leader for which the sender wrote it.
    epoch: Epoch,
}

/// Translates between the messages of a leader's peers and [`Leader`], and maps each peer to its role. `P` is the
/// host's handle to a process.
#[derive(Debug)]
pub struct LeaderShell<P> {
    core: Leader,
    settings: LeaderSettings,
    /// Why this leader must end: its epoch was used before. `None` while it can serve.
    outdated: Option<String>,
    roles: BTreeMap<PeerId, PeerRole>,
    engines: BTreeMap<EngineId, Holder<P>>,
    /// The process that had the name of each engine last, while the core knows the engine.
    processes: BTreeMap<EngineId, i32>,
    workers: BTreeMap<WorkerId, WorkerPeer<P>>,
    /// First half of the name of each admin session; a secret of this leader.
    admin_key: [u8; 8],
    /// Admin sessions so far.
    admins: u64,
    /// When the last audit ended that a peer requested.
    checked: Option<Time>,
    /// The last progress that each worker has reported; at most one for each seat.
    readiness: BTreeMap<WorkerId, Readiness>,
    problems: LogLimit,
    refused_orders: LogLimit,
    /// Resets by engines may be many.
    reset_lines: LogLimit,
    refused_workers: LogLimit,
    /// The users of the peers that are not of kvferry's own: at most one for each connection.
    other_users: BTreeMap<PeerId, User>,
    /// For lines about seats that are given or refused.
    seat_lines: LogLimit,
    /// For lines about requests that are not for their sender's user.
    forbidden_lines: LogLimit,
    readers: LogReaders,
    batches: StoreBatches,
    next_order: u64,
    effects: Vec<LeaderEffect>,
}

impl<P: fmt::Debug> LeaderShell<P> {
    /// A leader without peers. `admin_key` is secret, so that no peer can guess the name of an admin session.
    pub fn new(settings: LeaderSettings, admin_key: [u8; 8]) -> Self {
        Self {
            core: Leader::new(settings.clone()),
            settings,
            outdated: None,
            roles: BTreeMap::new(),
            engines: BTreeMap::new(),
            processes: BTreeMap::new(),
            workers: BTreeMap::new(),
            admin_key,
            admins: 0,
            checked: None,
            readiness: BTreeMap::new(),
            problems: LogLimit::new(),
            refused_orders: LogLimit::new(),
            reset_lines: LogLimit::of(SEAT_LINES_MAX),
            refused_workers: LogLimit::new(),
            other_users: BTreeMap::new(),
            seat_lines: LogLimit::of(SEAT_LINES_MAX),
            forbidden_lines: LogLimit::new(),
            readers: LogReaders::default(),
            batches: StoreBatches::default(),
            next_order: 0,
            effects: Vec::new(),
        }
    }

    /// The state machine that this shell drives.
    pub fn core(&self) -> &Leader {
        &self.core
    }

    /// Refuses new work from now on.
    pub fn drain(&mut self) {
        self.core.drain();
    }

    /// Time at which [`Self::tick`] is due; `None` while no timer is set.
    pub fn next_timeout(&self) -> Option<Time> {
        let own = [self.readers.next_timeout(), self.batches.next_timeout()];
        let own = own.into_iter().flatten();
        self.core.next_timeout().into_iter().chain(own).min()
    }

    /// Fires the timers that are due.
    pub fn tick(&mut self, host: &mut dyn LeaderHost<Process = P>) {
        self.step(host, LeaderEvent::Tick);
        self.end_waits(host);
        self.answer_alone(host);
    }

    /// Takes the reason why the leader's process must end: `Some` at most once.
    pub fn take_outdated(&mut self) -> Option<String> {
        self.outdated.take()
    }

    /// Handles a message of a peer that has sent its hello.
    pub fn message(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        peer: PeerId,
        envelope: Envelope,
    ) {
        let Envelope {
            correlation: request,
            deadline_ms,
            epoch,
            message,
            ..
        } = envelope;
        let origin = Origin {
            peer,
            request,
            deadline_ms,
            epoch,
        };
        if let Err(error) = self.claim_again(host, peer) {
            return match message {
                // Nobody waits for an answer to these.
                Message::Ended(_)
                | Message::Invalidated(_)
                | Message::Inventory(_)
                | Message::TierFlushed(_)
                | Message::OpenTiersAnswer(_)
                | Message::Error(_) => {}
                _ => host.reply(peer, request, Message::Error(error)),
            };
        }
        if let Err(error) = self.check_access(host, peer, &message) {
            return host.reply(peer, request, Message::Error(error));
        }
        let role = self.roles.get(&peer).copied();
        if let Some(PeerRole::Engine(engine)) = role
            && let Err(error) = self.batches.check_id(engine, request)
        {
            return host.reply(peer, request, Message::Error(error));
        }
        match (role, message) {
            (Some(_), Message::Status(body)) => self.read_status(host, origin, body),
            (Some(role), message) => match role {
                PeerRole::Admin(name, pid) => self.of_admin(host, origin, (name, pid), message),
                PeerRole::Engine(engine) => self.of_engine(host, origin, engine, message),
                PeerRole::Worker(worker) => self.of_worker(host, origin, worker, message),
                PeerRole::Supervisor(worker) => self.of_supervisor(host, origin, worker, message),
                PeerRole::Waiting(..) => refuse_role(host, origin, &message),
            },
            (None, message) => {
                let why = "another connection has its seat; connect again";
                not_served(host, origin, &message, ErrorCode::NotReady, why);
            }
        }
    }

    fn of_admin(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        origin: Origin,
        (name, pid): (EngineId, Option<i32>),
        message: Message,
    ) {
        match message {
            Message::Measure(_) => {
                let answer = Message::MeasureAnswer(self.measure(host));
                host.reply(origin.peer, origin.request, answer);
            }
            Message::Probe(_) => self.probe(host, origin),
            Message::Drain(body) => self.drain_or_resume(host, origin, &body),
            Message::SetLog(body) => {
                let answer = set_log(host, &body);
                host.reply(origin.peer, origin.request, answer);
            }
            Message::ReadEvents(body) => self.read_events(host, origin, body),
            Message::Reset(_) | Message::Flush(_) => {
                // For the core, an admin session is an engine without memory.
                let holder = Holder::new(host, origin.peer, pid);
                if self.engines.insert(name, holder).is_none() {
                    self.step(host, LeaderEvent::EngineOpened(name));
                }
                self.request(host, origin, name, message);
            }
            other => refuse_role(host, origin, &other),
        }
    }

    fn of_engine(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        origin: Origin,
        engine: EngineId,
        message: Message,
    ) {
        match message {
            Message::ReadEvents(body) => self.read_events(host, origin, body),
            Message::Stores(body) => self.stores(host, origin, engine, body),
            // A message that is no request is refused by the conversion.
            request => self.request(host, origin, engine, request),
        }
    }

    fn of_worker(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        origin: Origin,
        worker: WorkerId,
        message: Message,
    ) {
        match message {
            Message::Attach(body) => self.attach(host, origin, worker, body),
            Message::Memory(body) => self.memory_stated(host, origin, worker, body),
            Message::Tiers(body) => self.tiers_stated(host, origin, worker, body),
            Message::Readiness(body) => self.report_readiness(host, origin, worker, body),
            Message::Ended(body) => self.copies_ended(host, origin, worker, body),
            Message::Invalidated(body) => self.invalidated(host, origin, worker, body),
            Message::TierFlushed(body) => self.tier_flushed(host, origin, worker, body),
            Message::Inventory(body) => self.inventory_read(host, worker, body),
            // What is open by then is stated.
            Message::OpenTiersAnswer(_) => {}
            Message::Error(body) => self.order_refused(host, worker, &body),
            other => refuse_role(host, origin, &other),
        }
    }

    fn of_supervisor(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        origin: Origin,
        worker: WorkerId,
        message: Message,
    ) {
        match message {
            Message::WorkerGone(_) => {
                let gone = self.worker_gone(host, origin.peer, worker);
                let answer = Message::WorkerGoneAnswer(WorkerGoneAnswer { gone });
                host.reply(origin.peer, origin.request, answer);
            }
            other => refuse_role(host, origin, &other),
        }
    }

    fn request(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        origin: Origin,
        engine: EngineId,
        message: Message,
    ) {
        let id = origin.request;
        let request = match Request::try_from(message) {
            Ok(request) => request,
            Err(error) => return host.reply(origin.peer, id, Message::Error(error)),
        };
        let deadline = host.now() + Duration::from_millis(u64::from(origin.deadline_ms));
        let event = LeaderEvent::Request {
            engine,
            id,
            deadline,
            request,
        };
        self.step(host, event);
    }
}

fn not_served<P: fmt::Debug>(
    host: &mut dyn LeaderHost<Process = P>,
    origin: Origin,
    message: &Message,
    code: ErrorCode,
    why: &str,
) {
    let kind = message.kind().name();
    let error = ErrorBody::new(code, format!("{kind} is not served here: {why}"));
    host.reply(origin.peer, origin.request, Message::Error(error));
}

fn refuse_role<P: fmt::Debug>(
    host: &mut dyn LeaderHost<Process = P>,
    origin: Origin,
    message: &Message,
) {
    let why = "its sender has another role";
    not_served(host, origin, message, ErrorCode::Forbidden, why);
}

#[cfg(test)]
mod tests;
