//! The leader's shell: messages of peers in, the core's steps, messages to peers out.

mod access;
mod batches;
mod errors;
mod host;
mod readers;
mod seats;
mod status;

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use crate::Holder;
use crate::log_filter::set_log;
use kvferry_core::{
    AttachRequest, AttachedDepot, CANCELLED_MAX, LOAD_RUNS_MAX, Leader, LeaderEffect, LeaderEvent,
    LeaderSettings, MemoryStatement, Refusal, TiersStatement, WorkerMemory, Workers,
};
use kvferry_protocol::limits::{COPIES_MAX, PAIRS_MAX};
use kvferry_protocol::{
    Attach, AttachDepot, Attached as AttachedBody, Cancel, DrainAnswer, Empty, Envelope, ErrorBody,
    ErrorCode, FlushTier, Invalidate, Memory, MemoryAnswer, Message, OpenTiers, ProbeAnswer,
    ReadInventory, Readiness, Tiers, TiersAnswer, TransferOrder, WorkerGoneAnswer,
};
use kvferry_types::{
    Answer, AttachId, DepotId, EngineId, Epoch, FlushId, LogLimit, MemoryId, PeerId, PerTier,
    Request, RequestId, ResetId, TierId, TierLayout, Time, Transfer, TransferId, User, WorkerId,
};

use batches::StoreBatches;
use errors::to_error;
pub use host::{HostError, LeaderHost};
use readers::LogReaders;
pub use readers::read_events;
use seats::{PeerRole, WorkerPeer};
pub use status::LOOKUP_NS;

// The core's effect of one order fits into one message.
const _: () = assert!(CANCELLED_MAX <= COPIES_MAX && LOAD_RUNS_MAX <= PAIRS_MAX);

/// Lines about seats within a minute, at most: a few for each of 64 ranks that start together. About 40 MB a day.
const SEAT_LINES_MAX: u32 = 128;

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
    pub fn tick<H: LeaderHost<Process = P>>(&mut self, host: &mut H) {
        self.step(host, LeaderEvent::Tick);
        self.end_waits(host);
        self.answer_alone(host);
    }

    /// Takes the reason why the leader's process must end: `Some` at most once.
    pub fn take_outdated(&mut self) -> Option<String> {
        self.outdated.take()
    }

    /// Handles a message of a peer that has sent its hello.
    pub fn message<H: LeaderHost<Process = P>>(
        &mut self,
        host: &mut H,
        peer: PeerId,
        envelope: Envelope,
    ) {
        let Envelope {
            correlation,
            deadline_ms,
            epoch,
            message,
            ..
        } = envelope;
        if let Err(error) = self.claim_again(host, peer) {
            return match message {
                Message::Ended(_)
                | Message::Invalidated(_)
                | Message::Inventory(_)
                | Message::TierFlushed(_)
                | Message::OpenTiersAnswer(_)
                | Message::Error(_) => {}
                _ => host.reply(peer, correlation, Message::Error(error)),
            };
        }
        if let Err(error) = self.check_access(host, peer, &message) {
            return host.reply(peer, correlation, Message::Error(error));
        }
        let role = self.roles.get(&peer).copied();
        if let Some(PeerRole::Engine(engine)) = role
            && let Err(error) = self.batches.check_id(engine, correlation)
        {
            return host.reply(peer, correlation, Message::Error(error));
        }
        match (role, message) {
            (Some(_), Message::Status(status)) => {
                let answer = match self.status(host, status.check) {
                    Ok(answer) => Message::StatusAnswer(*answer),
                    Err(error) => Message::Error(error),
                };
                host.reply(peer, correlation, answer);
            }
            (Some(PeerRole::Admin(..)), Message::Measure(_)) => {
                let answer = Message::MeasureAnswer(self.measure(host));
                host.reply(peer, correlation, answer);
            }
            (Some(PeerRole::Admin(..)), Message::Probe(_)) => {
                let answer = ProbeAnswer {
                    tiers: u8::try_from(self.core.probe()).unwrap_or(u8::MAX),
                    copied_bytes: 0,
                    draining: self.core.is_draining(),
                };
                host.reply(peer, correlation, Message::ProbeAnswer(answer));
            }
            (Some(PeerRole::Admin(..)), Message::Drain(drain)) => {
                let drained = self.core.is_draining();
                match drain.resume {
                    true => self.core.resume(),
                    false => self.core.drain(),
                }
                let loads = (self.core.open_loads() + self.core.parked_requests()) as u64;
                let stores = self.core.open_stores() as u64;
                let transfers = self.core.copies_under_way() as u64;
                match (drained, self.core.is_draining()) {
                    (false, true) => tracing::info!(
                        loads,
                        stores,
                        transfers,
                        "drains, by order of an operator: new lookups, loads and stores are refused"
                    ),
                    (true, false) => {
                        tracing::info!("takes requests again, by order of an operator")
                    }
                    _ => {}
                }
                let answer = DrainAnswer {
                    drained: self.core.is_draining() && loads + stores + transfers == 0,
                    loads,
                    stores,
                    transfers,
                };
                host.reply(peer, correlation, Message::DrainAnswer(answer));
            }
            (Some(PeerRole::Admin(..)), Message::SetLog(log)) => {
                let answer = set_log(host, &log);
                host.reply(peer, correlation, answer);
            }
            (Some(PeerRole::Worker(worker)), Message::Attach(attach)) => {
                self.attach(host, (peer, worker), correlation, attach);
            }
            (Some(PeerRole::Worker(worker)), Message::Memory(stated)) => {
                self.memory(host, (peer, worker), correlation, stated);
            }
            (Some(PeerRole::Worker(worker)), Message::Tiers(stated)) => {
                self.tiers_stated(host, (peer, worker), correlation, stated);
            }
            (Some(PeerRole::Worker(worker)), Message::Readiness(readiness)) => {
                let disk = readiness.disk.as_ref().map(|disk| disk.health);
                self.readiness_reported(host.now(), worker, readiness);
                if let Some(health) = disk {
                    let event = LeaderEvent::Writable {
                        worker,
                        tier: TierId::Disk,
                        writable: health.takes_writes(),
                    };
                    self.step(host, event);
                }
                host.reply(peer, correlation, Message::ReadinessAnswer(Empty {}));
            }
            (Some(PeerRole::Worker(worker)), Message::Ended(ended)) => {
                let copies = ended.copies;
                let event = LeaderEvent::Ended {
                    worker,
                    epoch,
                    copies,
                };
                self.step(host, event);
            }
            (Some(PeerRole::Worker(worker)), Message::Invalidated(invalidated)) => {
                let id = ResetId(invalidated.reset);
                self.step(host, LeaderEvent::Invalidated { worker, epoch, id });
            }
            (Some(PeerRole::Worker(worker)), Message::TierFlushed(flushed)) => {
                let id = FlushId(flushed.flush);
                self.step(host, LeaderEvent::TierFlushed { worker, epoch, id });
            }
            (Some(PeerRole::Worker(worker)), Message::Inventory(inventory)) => {
                let event = LeaderEvent::Inventory {
                    worker,
                    depot: DepotId(u128::from_be_bytes(inventory.depot)),
                    read_id: inventory.read_id,
                    from: inventory.from,
                    next: inventory.next,
                    records: inventory.pages(),
                };
                self.step(host, event);
            }
            // What is open by then is stated.
            (Some(PeerRole::Worker(_)), Message::OpenTiersAnswer(_)) => {}
            // An order that crossed a statement of the worker: the leader orders again.
            (Some(PeerRole::Worker(worker)), Message::Error(error))
                if error.code() == ErrorCode::NotReady =>
            {
                tracing::debug!(%worker, message = error.message, "worker refuses an order");
            }
            (Some(PeerRole::Worker(worker)), Message::Error(error)) => {
                if let Some(left_out) = self.refused_orders.line(host.now()) {
                    tracing::warn!(%worker, message = error.message, left_out, "worker refuses an order");
                }
            }
            (Some(PeerRole::Supervisor(worker)), Message::WorkerGone(_)) => {
                let gone = self.worker_gone(host, peer, worker);
                let answer = WorkerGoneAnswer { gone };
                host.reply(peer, correlation, Message::WorkerGoneAnswer(answer));
            }
            (Some(PeerRole::Admin(..) | PeerRole::Engine(_)), Message::ReadEvents(read)) => {
                self.read_events(host, (peer, correlation), deadline_ms, read)
            }
            (
                Some(PeerRole::Admin(name, pid)),
                message @ (Message::Reset(_) | Message::Flush(_)),
            ) => {
                // For the core, an admin session is an engine without memory.
                let holder = Holder::new(host, peer, pid);
                if self.engines.insert(name, holder).is_none() {
                    self.step(host, LeaderEvent::EngineOpened(name));
                }
                self.request(host, (peer, name, correlation), deadline_ms, message);
            }
            (Some(PeerRole::Engine(engine)), Message::Stores(stores)) => {
                self.stores(host, (peer, engine, correlation), deadline_ms, stores);
            }
            (Some(PeerRole::Engine(engine)), message) => {
                self.request(host, (peer, engine, correlation), deadline_ms, message);
            }
            (role, message) => {
                let kind = message.kind().name();
                let (code, text) = match role {
                    Some(_) => (ErrorCode::Forbidden, "its sender has another role"),
                    None => (
                        ErrorCode::NotReady,
                        "another connection has its seat; connect again",
                    ),
                };
                let error = ErrorBody::new(code, format!("{kind} is not served here: {text}"));
                host.reply(peer, correlation, Message::Error(error));
            }
        }
    }

    fn attach<H: LeaderHost<Process = P>>(
        &mut self,
        host: &mut H,
        (peer, worker): (PeerId, WorkerId),
        correlation: RequestId,
        attach: Attach,
    ) {
        let id = AttachId(attach.attach);
        let named = attach.depots.iter().map(|depot| (depot.tier, *depot));
        let depots: PerTier<AttachDepot> = match by_tier("attach.depots.tier", named) {
            Ok(depots) => depots,
            Err(error) => return host.reply(peer, correlation, Message::Error(error)),
        };
        if let Some(peer) = self.workers.get_mut(&worker) {
            peer.attaching = Some((id, correlation));
        }
        let depots = depots.iter().map(|(tier, depot)| {
            let attached = AttachedDepot {
                depot: DepotId(u128::from_be_bytes(depot.depot)),
                epoch: Epoch(depot.epoch),
            };
            (tier, attached)
        });
        let attached = AttachRequest {
            worker,
            ranks: attach.ranks,
            shards: attach.kv_shards,
            attach: id,
            depots: depots.collect(),
        };
        self.step(host, LeaderEvent::Attach(attached));
    }

    fn memory<H: LeaderHost<Process = P>>(
        &mut self,
        host: &mut H,
        (peer, worker): (PeerId, WorkerId),
        correlation: RequestId,
        stated: Memory,
    ) {
        let number = MemoryId(stated.number);
        let memory = stated.memory.map(|memory| {
            let rooms = memory
                .arena_pages
                .iter()
                .map(|room| (room.tier, room.pages));
            Ok(WorkerMemory {
                engine: EngineId(memory.engine),
                arena_pages: by_tier("memory.arena_pages.tier", rooms)?,
                geometry: memory.geometry,
            })
        });
        let memory = match memory.transpose() {
            Ok(memory) => memory,
            Err(error) => return host.reply(peer, correlation, Message::Error(error)),
        };
        if let Some(peer) = self.workers.get_mut(&worker) {
            peer.stating = Some((number, correlation));
        }
        let stated = MemoryStatement {
            worker,
            number,
            memory,
        };
        self.step(host, LeaderEvent::Memory(stated));
    }

    fn tiers_stated<H: LeaderHost<Process = P>>(
        &mut self,
        host: &mut H,
        (peer, worker): (PeerId, WorkerId),
        correlation: RequestId,
        stated: Tiers,
    ) {
        let number = MemoryId(stated.number);
        let pages = stated.pages.iter().map(|of| (of.tier, of.pages));
        let pages = match by_tier("pages.tier", pages) {
            Ok(pages) => pages,
            Err(error) => return host.reply(peer, correlation, Message::Error(error)),
        };
        if let Some(peer) = self.workers.get_mut(&worker) {
            peer.stating = Some((number, correlation));
        }
        let layout = TierLayout {
            page_bytes: stated.page_bytes,
            layout_fingerprint: stated.layout_fingerprint,
        };
        let stated = TiersStatement {
            worker,
            number,
            layout,
            pages,
        };
        self.step(host, LeaderEvent::Tiers(stated));
    }

    fn request<H: LeaderHost<Process = P>>(
        &mut self,
        host: &mut H,
        (peer, engine, id): (PeerId, EngineId, RequestId),
        deadline_ms: u32,
        message: Message,
    ) {
        let request = match Request::try_from(message) {
            Ok(request) => request,
            Err(error) => return host.reply(peer, id, Message::Error(error)),
        };
        let deadline = host.now() + Duration::from_millis(u64::from(deadline_ms));
        let event = LeaderEvent::Request {
            engine,
            id,
            deadline,
            request,
        };
        self.step(host, event);
    }

    fn step<H: LeaderHost<Process = P>>(&mut self, host: &mut H, event: LeaderEvent) {
        let mut next = self.step_once(host, event);
        // The copies of an order that was not sent have ended, because no worker will report them.
        while let Some(event) = next.pop() {
            next.extend(self.step_once(host, event));
        }
        self.answer_readers(host);
    }

    /// Carries out the effects of one event. Returns the ends of copies whose orders could not be sent.
    fn step_once<H: LeaderHost<Process = P>>(
        &mut self,
        host: &mut H,
        event: LeaderEvent,
    ) -> Vec<LeaderEvent> {
        let mut effects = std::mem::take(&mut self.effects);
        host.before_step(&self.core, &event);
        self.core.step(host.now(), event, &mut effects);
        host.after_step(&self.core, &effects);
        let mut transfers: Vec<(Workers, Transfer)> = Vec::new();
        for effect in effects.drain(..) {
            match effect {
                LeaderEffect::Answer { engine, id, answer } => {
                    self.answer(host, engine, id, answer)
                }
                LeaderEffect::Admit {
                    worker,
                    attach,
                    verdict,
                } => self.admit(host, worker, attach, verdict),
                LeaderEffect::AdmitMemory {
                    worker,
                    number,
                    verdict,
                } => self.admit_memory(host, worker, number, verdict),
                LeaderEffect::AdmitTiers {
                    worker,
                    number,
                    verdict,
                } => self.admit_tiers(host, worker, number, verdict),
                LeaderEffect::Transfer { workers, transfer } => transfers.push((workers, transfer)),
                LeaderEffect::Cancel { worker, transfers } => {
                    let transfers = transfers.into_iter().map(|transfer| transfer.0).collect();
                    let cancel = Message::Cancel(Cancel { transfers });
                    self.order(host, &[worker], cancel, Duration::ZERO);
                }
                LeaderEffect::Invalidate {
                    worker,
                    id,
                    scope,
                    tier,
                    through,
                    deadline,
                } => {
                    let order = Invalidate::new(id, &scope, tier, through);
                    let invalidate = Message::Invalidate(order);
                    let left = host.now().until(deadline);
                    self.order(host, &[worker], invalidate, left);
                }
                LeaderEffect::OpenTiers { worker, layout } => {
                    let layout = layout.unwrap_or_default();
                    let open = Message::OpenTiers(OpenTiers {
                        page_bytes: layout.page_bytes,
                        layout_fingerprint: layout.layout_fingerprint,
                    });
                    self.order(host, &[worker], open, Duration::ZERO);
                }
                LeaderEffect::FlushTier {
                    worker,
                    id,
                    tier,
                    deadline,
                } => {
                    let flush = Message::FlushTier(FlushTier {
                        flush: id.0,
                        tier: tier.number(),
                    });
                    let left = host.now().until(deadline);
                    self.order(host, &[worker], flush, left);
                }
                LeaderEffect::ReadInventory {
                    worker,
                    depot,
                    page_bytes,
                    read_id: reading,
                    from,
                } => {
                    let read = Message::ReadInventory(ReadInventory {
                        depot: depot.0.to_be_bytes(),
                        page_bytes,
                        read_id: reading,
                        from,
                    });
                    self.order(host, &[worker], read, Duration::ZERO);
                }
                LeaderEffect::FenceWorker(worker) => self.fence(host, worker),
            }
        }
        self.effects = effects;
        self.transfer(host, &transfers)
    }

    /// Orders the transfers of a step. Transfers of one request for the same workers share messages: as few as they fit
    /// into, each encoded once for all of these workers. Returns the ends of transfers that no worker will report,
    /// because their message could not be encoded or sent.
    fn transfer<H: LeaderHost<Process = P>>(
        &mut self,
        host: &mut H,
        transfers: &[(Workers, Transfer)],
    ) -> Vec<LeaderEvent> {
        let mut unsent = Vec::new();
        for group in transfers.chunk_by(|(one, _), (other, _)| one == other) {
            let list: Vec<&Transfer> = group.iter().map(|(_, transfer)| transfer).collect();
            let workers = &group[0].0;
            for (deadline, order) in TransferOrder::all_of(&list) {
                let left = host.now().until(deadline);
                let copies = order.unsent();
                for worker in self.order(host, workers, Message::Transfer(order), left) {
                    let transfers = copies.len();
                    tracing::warn!(%worker, transfers, "order not sent: its transfers count as failed");
                    unsent.push(LeaderEvent::Unsent {
                        worker,
                        copies: copies.clone(),
                    });
                }
            }
        }
        unsent
    }

    /// Sends one order to each of these workers. Returns those to whom it was not sent.
    fn order<H: LeaderHost<Process = P>>(
        &mut self,
        host: &mut H,
        workers: &[WorkerId],
        message: Message,
        deadline: Duration,
    ) -> Vec<WorkerId> {
        self.next_order += 1;
        let correlation = RequestId(self.next_order);
        let peer = |worker: &WorkerId| Some(self.workers.get(worker)?.holder.peer);
        let peers: Vec<PeerId> = workers.iter().filter_map(peer).collect();
        let unsent = host.order(&peers, correlation, message, deadline);
        let is_unsent = |worker: &&WorkerId| peer(worker).is_none_or(|peer| unsent.contains(&peer));
        workers.iter().filter(is_unsent).copied().collect()
    }

    fn answer<H: LeaderHost<Process = P>>(
        &mut self,
        host: &mut H,
        engine: EngineId,
        id: RequestId,
        answer: Result<Answer, Refusal>,
    ) {
        let Some(peer) = self.engines.get(&engine).map(|holder| holder.peer) else {
            return;
        };
        if let Ok(Answer::Reset(reset)) = &answer
            && let Some(left_out) = self.reset_lines.line(host.now())
        {
            let by = match self.roles.get(&peer) {
                Some(PeerRole::Engine(engine)) => engine.to_string(),
                _ => "an operator".to_owned(),
            };
            let (pages, below_pages) = (reset.pages, &reset.below_pages);
            tracing::info!(
                by,
                pages,
                ?below_pages,
                left_out,
                "a reset has removed pages"
            );
        }
        let message = match answer {
            Ok(answer) => answer.into(),
            Err(refusal) => Message::Error(to_error(&refusal)),
        };
        self.reply(host, (peer, engine, id), message);
    }

    fn admit<H: LeaderHost<Process = P>>(
        &mut self,
        host: &mut H,
        worker: WorkerId,
        attach: AttachId,
        verdict: Result<TransferId, Refusal>,
    ) {
        let Some(known) = self.workers.get_mut(&worker) else {
            return;
        };
        let Some((_, correlation)) = known.attaching.take_if(|(id, _)| *id == attach) else {
            return;
        };
        let peer = known.holder.peer;
        match verdict {
            Ok(after) => {
                let body = AttachedBody {
                    attach: attach.0,
                    after: after.0,
                };
                host.reply(peer, correlation, Message::Attached(body));
            }
            Err(refusal) => {
                if let Some(left_out) = self.refused_workers.line(host.now()) {
                    tracing::error!(%refusal, left_out, "worker refused");
                }
                host.reply(peer, correlation, Message::Error(to_error(&refusal)));
                if let Refusal::EpochUsed { depot_epoch, .. } = refusal {
                    self.end_outdated(host, depot_epoch, refusal.to_string());
                }
            }
        }
    }

    fn admit_memory<H: LeaderHost<Process = P>>(
        &mut self,
        host: &mut H,
        worker: WorkerId,
        number: MemoryId,
        verdict: Result<TransferId, Refusal>,
    ) {
        let Some(known) = self.workers.get_mut(&worker) else {
            return;
        };
        let Some((_, correlation)) = known.stating.take_if(|(id, _)| *id == number) else {
            return;
        };
        let answer = match verdict {
            Ok(after) => Message::MemoryAnswer(MemoryAnswer {
                number: number.0,
                after: after.0,
            }),
            Err(refusal) => {
                if let Some(left_out) = self.refused_workers.line(host.now()) {
                    tracing::error!(%refusal, left_out, "engine memory refused");
                }
                Message::Error(to_error(&refusal))
            }
        };
        host.reply(known.holder.peer, correlation, answer);
    }

    fn admit_tiers<H: LeaderHost<Process = P>>(
        &mut self,
        host: &mut H,
        worker: WorkerId,
        number: MemoryId,
        verdict: Result<(), Refusal>,
    ) {
        let Some(known) = self.workers.get_mut(&worker) else {
            return;
        };
        let Some((_, correlation)) = known.stating.take_if(|(id, _)| *id == number) else {
            return;
        };
        let answer = match verdict {
            Ok(()) => Message::TiersAnswer(TiersAnswer { number: number.0 }),
            Err(refusal) => Message::Error(to_error(&refusal)),
        };
        host.reply(known.holder.peer, correlation, answer);
    }

    /// Ends this leader, because a depot has recorded its epoch or a later one. The successor takes an epoch after that
    /// one.
    fn end_outdated<H: LeaderHost<Process = P>>(
        &mut self,
        host: &mut H,
        depot_epoch: Epoch,
        why: String,
    ) {
        self.outdated = Some(match host.raise_epoch(depot_epoch) {
            Ok(()) => why,
            Err(error) => format!("{why}; but that epoch could not be noted: {error}"),
        });
    }
}

/// The values that a message gives for tiers. Refuses numbers that name no tier below the device, and repeated ones.
fn by_tier<T>(field: &str, values: impl Iterator<Item = (u8, T)>) -> Result<PerTier<T>, ErrorBody> {
    let mut all = PerTier::default();
    for (number, value) in values {
        let tier = TierId::of_number(number).filter(|tier| *tier != TierId::Device);
        let new = tier.is_some_and(|tier| all.insert(tier, value).is_none());
        if !new {
            let text = format!("{field} is {number}: name each of the tiers 2 to 4 once");
            return Err(ErrorBody::new(ErrorCode::Invalid, text));
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests;
