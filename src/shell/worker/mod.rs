//! The worker's shell: requests of the leader and of ranks in, the core's steps, answers out.

mod abandon;
mod host;
mod invalidations;
mod operators;
mod orders;
mod ranks;
mod stated;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use kvferry_core::{Model, Worker, WorkerEffect, WorkerEvent, WorkerSettings};
use kvferry_protocol::{
    Attach, AttachDepot, Ended, ErrorBody, ErrorCode, Memory, Message, StatedMemory, TierPages,
    Tiers,
};
use kvferry_types::{
    AttachId, EndedCopy, EngineId, Epoch, LinkId, LogLimit, MemoryId, RequestId, Sharding, Time,
    TransferId, WorkerId,
};

pub use host::{Fatal, Registering, Unlisted, WorkerHost};
pub use invalidations::INVALIDATE_SLICE_ENTRIES;
use invalidations::{Invalidations, PendingInvalidation};
use operators::Probes;
use orders::arena_pages;
use ranks::Ranks;
use stated::StatedTiers;

/// Time limit of one attach request, or of one statement of the memory; the core sends it again.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(2);

/// Limit on attach requests and statements whose answers are still accepted. One of each is sent every second, and at each
/// change, and is open for [`STATEMENT_TIMEOUT`].
const STATEMENTS_MAX: usize = 16;

/// A request to the leader that is not answered.
#[derive(Debug, Clone, Copy)]
enum Statement {
    Attach(AttachId),
    Memory(MemoryId),
    Tiers(MemoryId),
}

/// Why a worker must end, besides failures of its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WorkerFailure {
    /// A copy does not stop. The end of the process ends that copy.
    #[error("a copy does not stop")]
    CopyStuck,
    /// The core started copies of an engine's memory, but the shell has no memory: a defect.
    #[error("copies started without memory")]
    NoMemory,
}

/// State of the connection to the leader.
#[derive(Debug, Default)]
struct LeaderConnection {
    /// The connection over which the leader was found.
    link: LinkId,
    /// Unanswered statements over that connection, at most [`STATEMENTS_MAX`].
    statements: BTreeMap<RequestId, Statement>,
    /// The pages of tiers that the leader may know.
    stated: StatedTiers,
    /// The order that is being carried out.
    order: RequestId,
    /// The leader's last refusal of this worker, until the rank receives it.
    turned_away: Option<ErrorBody>,
}

/// Translates between the messages of a worker's peers and [`Worker`], and keeps which rank's memory is used. `P` is
/// the host's handle to a process, and `M` is mapped memory.
///
/// A call returns an error when the process must end, because the state of its copies or of its inventory would be in
/// doubt.
#[derive(Debug)]
pub struct WorkerShell<P, M> {
    core: Worker,
    worker: WorkerId,
    sharding: Sharding,
    leader: LeaderConnection,
    ranks: Ranks<P, M>,
    invalidations: Invalidations,
    /// For lines about registrations.
    rank_lines: LogLimit,
    probes: Probes,
    effects: Vec<WorkerEffect>,
}

impl<P: fmt::Debug, M> WorkerShell<P, M> {
    /// A worker without a leader, a depot or ranks.
    pub fn new(worker: WorkerId, sharding: Sharding, settings: WorkerSettings) -> Self {
        Self {
            core: Worker::new(settings),
            worker,
            sharding,
            leader: LeaderConnection::default(),
            ranks: Ranks::new(worker.rank),
            invalidations: Invalidations::default(),
            rank_lines: LogLimit::new(),
            probes: Probes::default(),
            effects: Vec::new(),
        }
    }

    /// The state machine that this shell drives.
    pub fn core(&self) -> &Worker {
        &self.core
    }

    /// Time at which [`Self::tick`] is due; `None` while no timer is set.
    pub fn next_timeout(&self) -> Option<Time> {
        self.core.next_timeout()
    }

    /// Fires the timers that are due.
    pub fn tick(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
    ) -> Result<(), Fatal> {
        self.step(host, WorkerEvent::Tick)
    }

    /// Handles the end of the depot's mapping: [`WorkerHost::depot`] returns the depot from now on.
    pub fn depot_ready(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
    ) -> Result<(), Fatal> {
        self.step(host, WorkerEvent::DepotReady)
    }

    /// Handles a depot below host memory that was opened or closed: [`WorkerHost::arena_pages`] returns another number of
    /// pages for it.
    pub fn tiers_changed(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
    ) -> Result<(), Fatal> {
        self.step(host, WorkerEvent::TiersChanged)
    }

    /// Handles the end of copies, which no longer read or write anything.
    pub fn copies_ended(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        copies: Vec<EndedCopy>,
    ) -> Result<(), Fatal> {
        self.step(host, WorkerEvent::CopiesEnded(copies))
    }

    /// Handles the progress of an engine's device: its timeline has reached `through`.
    pub fn timeline_reached(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        engine: EngineId,
        through: RequestId,
    ) -> Result<(), Fatal> {
        self.step(host, WorkerEvent::Written { engine, through })
    }

    /// Handles a new connection to the leader of this epoch.
    pub fn leader_found(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        epoch: Epoch,
        link: LinkId,
    ) -> Result<(), Fatal> {
        self.leader.link = link;
        self.leader.statements.clear();
        self.leader.stated = StatedTiers::default();
        self.step(host, WorkerEvent::LeaderFound(epoch))
    }

    /// Handles the loss of the connection to the leader.
    pub fn leader_lost(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
    ) -> Result<(), Fatal> {
        self.invalidations.clear();
        self.step(host, WorkerEvent::LeaderLost)
    }

    /// Handles the leader's answer to a request of [`WorkerHost::request_leader`].
    pub fn leader_answered(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        id: RequestId,
        answer: Result<Message, ErrorBody>,
    ) -> Result<(), Fatal> {
        let Some(statement) = self.leader.statements.remove(&id) else {
            return Ok(());
        };
        let after = match (statement, answer) {
            (Statement::Attach(_), Ok(Message::Attached(attached))) => {
                Some(TransferId(attached.after))
            }
            (Statement::Memory(_), Ok(Message::MemoryAnswer(answer))) => {
                Some(TransferId(answer.after))
            }
            (Statement::Tiers(number), Ok(Message::TiersAnswer(_))) => {
                return self.tiers_admitted(host, number, true);
            }
            (Statement::Tiers(number), Err(error)) if error.code() == ErrorCode::UnknownKind => {
                return self.tiers_admitted(host, number, false);
            }
            (_, Ok(other)) => {
                tracing::warn!(kind = other.kind().name(), "no answer to {statement:?}");
                return Ok(());
            }
            (_, Err(error))
                if matches!(error.code(), ErrorCode::Invalid | ErrorCode::RankDisagrees) =>
            {
                tracing::error!(worker = %self.worker, message = error.message, "refused by the leader");
                host.report_problem(&error.message);
                self.leader.turned_away = Some(error);
                None
            }
            // The core sends it again.
            (_, Err(error)) => {
                tracing::debug!(worker = %self.worker, message = error.message, "not admitted yet");
                return Ok(());
            }
        };
        let event = match statement {
            Statement::Attach(attach) => WorkerEvent::Admitted { attach, after },
            Statement::Memory(number) => WorkerEvent::MemoryAdmitted { number, after },
            // Refusals of other kinds are repeated by the core.
            Statement::Tiers(_) => return Ok(()),
        };
        self.step(host, event)
    }

    fn tiers_admitted(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        number: MemoryId,
        known: bool,
    ) -> Result<(), Fatal> {
        self.step(host, WorkerEvent::TiersAdmitted { number, known })
    }

    fn step(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        event: WorkerEvent,
    ) -> Result<(), Fatal> {
        let mut effects = std::mem::take(&mut self.effects);
        self.core.step(host.now(), event, &mut effects);
        for effect in effects.drain(..) {
            tracing::trace!(worker = %self.worker, ?effect);
            self.carry_out(host, effect)?;
        }
        self.effects = effects;
        Ok(())
    }

    fn carry_out(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        effect: WorkerEffect,
    ) -> Result<(), Fatal> {
        match effect {
            WorkerEffect::Attach { attach } => self.attach(host, attach),
            WorkerEffect::StateMemory { number } => self.state_memory(host, number),
            WorkerEffect::StateTiers { number } => self.state_tiers(host, number),
            WorkerEffect::Registered { engine, admitted } => {
                self.registered(host, engine, admitted);
            }
            WorkerEffect::Start { edge, copies } => {
                let memory = self.ranks.memory();
                if memory.is_none() && copies.iter().any(|copy| copy.device.is_some()) {
                    return Err(WorkerFailure::NoMemory.into());
                }
                let copies = copies.into_iter().map(|copy| {
                    let ready_at = self.core.ready_at(copy.id);
                    (copy, ready_at.unwrap_or(host.now()))
                });
                let copies = copies.collect();
                host.start(edge, copies, memory)?;
            }
            WorkerEffect::Stop(transfer) => host.stop(transfer)?,
            WorkerEffect::Report { batch, copies } => {
                let body = Ended {
                    rank: self.worker.rank.0,
                    copies,
                };
                self.answer(host, RequestId(batch.0), Message::Ended(body));
            }
            WorkerEffect::Abandoned { number } => {
                if let Some((peer, request, answer)) = self.ranks.take_abandoning(number) {
                    host.reply(peer, request, answer);
                }
            }
            WorkerEffect::Await { engine, through } => {
                if let Some(memory) = self.ranks.memory_of(engine)
                    && !host.watch_timeline(memory, engine, through)
                {
                    tracing::trace!(worker = %self.worker, "the rank reports what it has written");
                }
            }
            WorkerEffect::Unlist { tier, run } => host.unlist(tier, run)?,
            WorkerEffect::List { tier, record } => host.list(tier, &record),
            WorkerEffect::Invalidate {
                id,
                scope,
                tier,
                through,
                deadline,
            } => {
                let covers = (scope, tier);
                let invalidate =
                    PendingInvalidation::new(id, covers, through, self.leader.order, deadline);
                self.invalidate(host, invalidate)?;
            }
            WorkerEffect::Refuse(refusal) => {
                self.refuse_order(host, self.leader.order, refusal);
            }
            WorkerEffect::Invalid { transfer, problem } => {
                tracing::error!(worker = %self.worker, %transfer, problem, "copy refused");
                host.invalid_copy(transfer, &problem);
            }
            WorkerEffect::ExitProcess => return Err(WorkerFailure::CopyStuck.into()),
        }
        Ok(())
    }

    /// Sends an attach request. The answer arrives in order with the leader's orders, because the orders that follow it
    /// need an admitted worker.
    fn attach(&mut self, host: &mut dyn WorkerHost<Process = P, Memory = M>, attach: AttachId) {
        let all = host.depots();
        let depots = all.iter().map(|(tier, depot)| {
            Ok(AttachDepot {
                tier: tier.number(),
                depot: depot.0.to_be_bytes(),
                epoch: host.last_reader(tier)?.0,
            })
        });
        let depots: Vec<AttachDepot> = match depots.collect::<Result<_, Fatal>>() {
            Ok(depots) => depots,
            Err(error) => return tracing::error!(%error, "a depot cannot be read: not attached"),
        };
        if depots.is_empty() {
            return tracing::error!(worker = %self.worker, "no depot is mapped: not attached");
        }
        let request = Attach {
            replica: self.worker.replica.0,
            rank: self.worker.rank.0,
            ranks: self.sharding.ranks(),
            kv_shards: self.sharding.shards(),
            attach: attach.0,
            depots,
        };
        self.request_leader(host, Message::Attach(request), Statement::Attach(attach));
    }

    /// States the registered memory, or that there is none. The answer arrives in order with the leader's orders.
    fn state_memory(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        number: MemoryId,
    ) {
        let registered = self.ranks.registered();
        let geometry = registered.map(|(_, memory)| host.geometry(memory));
        let model = geometry.and_then(|geometry| Model::new(geometry).ok());
        host.prepare_tiers(model.map(|model| model.tier_layout()));
        self.leader.stated.add(host);
        let memory = self.ranks.registered().map(|(engine, memory)| {
            let geometry = host.geometry(memory);
            let arena_pages = arena_pages(host, geometry.page_bytes());
            let arena_pages = arena_pages.iter().map(|(tier, pages)| TierPages {
                tier: tier.number(),
                pages: *pages,
            });
            StatedMemory {
                engine: engine.0,
                geometry,
                arena_pages: arena_pages.collect(),
            }
        });
        let request = Message::Memory(Memory {
            number: number.0,
            memory,
        });
        self.request_leader(host, request, Statement::Memory(number));
    }

    /// States the pages of the tiers below host memory.
    fn state_tiers(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        number: MemoryId,
    ) {
        let (layout, pages) = self.leader.stated.add(host);
        let pages = pages.iter().map(|(tier, pages)| TierPages {
            tier: tier.number(),
            pages: *pages,
        });
        let request = Message::Tiers(Tiers {
            number: number.0,
            page_bytes: layout.page_bytes,
            layout_fingerprint: layout.layout_fingerprint,
            pages: pages.collect(),
        });
        self.request_leader(host, request, Statement::Tiers(number));
    }

    /// Sends a statement to the leader; without an answer in time the core sends it again.
    fn request_leader(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        request: Message,
        statement: Statement,
    ) {
        let id = host.request_leader(self.leader.link, request, STATEMENT_TIMEOUT);
        let statements = &mut self.leader.statements;
        statements.insert(id, statement);
        if statements.len() > STATEMENTS_MAX {
            statements.pop_first();
        }
    }

    /// Answers an order over the connection over which the current leader was found.
    fn answer(
        &self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        order: RequestId,
        message: Message,
    ) {
        host.reply_to_leader(self.leader.link, order, message);
    }
}
