//! The leader's process: the leader's shell on the simulated network and processes, and an observer for the checker.

use std::collections::BTreeMap;
use std::time::Duration;

use super::net::{ConnectionId, Received};
use super::oracle::ArrivedRequest;
use super::saboteur::Lie;
use super::server::{SimServer, SimServerEvent, connection, peer};
use super::{NodeId, SimContext};
use kvferry_core::{
    AttachRequest, Leader, LeaderEffect, LeaderEvent, LeaderSettings, LogPart, LogRead,
    MemoryStatement, Refusal, TierKey, TiersStatement, WorkerMemory,
};
use kvferry_protocol::{ErrorCode, Message, Role};
use kvferry_shell::{HolderPeers, HostError, LeaderHost, LeaderShell};
use kvferry_types::{Answer, Epoch, PeerId, Request, RequestId, TierId, Time, WorkerId};

/// Start of the names of operators' sessions, which no engine has.
const ADMIN_KEY: [u8; 8] = [0x5a; 8];

/// One incarnation of the leader.
#[derive(Debug)]
pub(super) struct LeaderProcess {
    shell: LeaderShell<i32>,
    server: SimServer,
    epoch: Epoch,
    /// Last attach request of each worker.
    attaching: BTreeMap<WorkerId, AttachRequest>,
    /// Last statement of each worker's memory.
    stating: BTreeMap<WorkerId, MemoryStatement>,
    /// Last statement of each worker's tiers.
    opening: BTreeMap<WorkerId, TiersStatement>,
    /// The moves that were ordered, as the orders say.
    moved: Moved,
}

/// Moves that were ordered, with their pages, and the pages of those to a slower tier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Moved {
    moves: u64,
    pages: u64,
    written: u64,
}

impl LeaderProcess {
    pub(super) fn start(env: &SimContext, settings: LeaderSettings) -> Self {
        let epoch = settings.epoch;
        Self {
            shell: LeaderShell::new(settings, ADMIN_KEY),
            server: SimServer::new(epoch, &[Role::Engine, Role::Worker, Role::Admin], env.now()),
            epoch,
            attaching: BTreeMap::new(),
            stating: BTreeMap::new(),
            opening: BTreeMap::new(),
            moved: Moved::default(),
        }
    }

    pub(super) fn core(&self) -> &Leader {
        self.shell.core()
    }

    pub(super) fn read_log(&mut self, now: Time, read: &LogRead) -> LogPart {
        self.shell.read_log(now, read)
    }

    pub(super) fn next_timeout(&self, env: &SimContext) -> Time {
        let core = self.shell.next_timeout().unwrap_or(Time::NEVER);
        let core = match env.lies(Lie::WallClock) {
            true => env.when_wall_shows(core),
            false => core,
        };
        core.min(self.server.next_timeout())
    }

    pub(super) fn tick(&mut self, env: &mut SimContext) {
        for silent in self.server.tick(env) {
            self.run(env, |shell, host| shell.closed(host, peer(silent)));
        }
        self.run(env, |shell, host| shell.tick(host));
    }

    pub(super) fn receive(&mut self, env: &mut SimContext, id: ConnectionId, received: Received) {
        match self.server.receive(env, id, received) {
            None => {}
            Some(SimServerEvent::Closed) => {
                self.run(env, |shell, host| shell.closed(host, peer(id)))
            }
            Some(SimServerEvent::Opened(hello)) => {
                let pid = env.visible_pid(id);
                self.run(env, |shell, host| shell.opened(host, peer(id), &hello, pid));
            }
            Some(SimServerEvent::Message(envelope)) => {
                self.run(env, |shell, host| shell.message(host, peer(id), envelope));
            }
        }
    }

    /// Handles the end of a worker's process.
    pub(super) fn died(&mut self, env: &mut SimContext, worker: WorkerId, incarnation: u32) {
        if let Some(pid) = env.pids.of(NodeId::Worker(worker), incarnation) {
            self.run(env, |shell, host| shell.worker_exited(host, pid));
        }
    }

    fn run(
        &mut self,
        env: &mut SimContext,
        call: impl FnOnce(&mut LeaderShell<i32>, &mut Host<'_>),
    ) {
        let mut host = Host {
            env,
            server: &mut self.server,
            epoch: self.epoch,
            attaching: &mut self.attaching,
            stating: &mut self.stating,
            opening: &mut self.opening,
            moved: &mut self.moved,
            before: None,
        };
        call(&mut self.shell, &mut host);
        if let Some(why) = self.shell.take_outdated() {
            env.violated(format!("the leader's epoch was used before: {why}"));
        }
    }
}

/// Environment of the leader's shell. Reports every step to the checker.
struct Host<'a> {
    env: &'a mut SimContext,
    server: &'a mut SimServer,
    epoch: Epoch,
    attaching: &'a mut BTreeMap<WorkerId, AttachRequest>,
    stating: &'a mut BTreeMap<WorkerId, MemoryStatement>,
    opening: &'a mut BTreeMap<WorkerId, TiersStatement>,
    moved: &'a mut Moved,
    /// The key of the leader's tier before the step.
    before: Option<TierKey>,
}

impl HolderPeers for Host<'_> {
    type Process = i32;

    fn is_live(&self, peer: PeerId) -> bool {
        self.server.is_live(connection(peer), self.env.now())
    }

    fn open_process(&mut self, pid: i32) -> Option<i32> {
        self.env.pids.lives(pid).then_some(pid)
    }

    fn has_ended(&self, process: &i32) -> bool {
        !self.env.pids.lives(*process)
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.server.close(self.env, connection(peer));
    }
}

impl LeaderHost for Host<'_> {
    /// Clock of all decisions: virtual time, or the wall clock as a lie.
    fn now(&self) -> Time {
        match self.env.lies(Lie::WallClock) {
            true => self.env.wall(),
            false => self.env.now(),
        }
    }

    fn is_open(&self, peer: PeerId, request: RequestId) -> bool {
        self.server.is_open(connection(peer), request)
    }

    fn reply(&mut self, peer: PeerId, request: RequestId, message: Message) {
        let id = connection(peer);
        let engine = self.server.hello(id).map(|hello| hello.role) == Some(Role::Engine);
        if let Message::Error(error) = &message {
            let misplaced = matches!(error.code(), ErrorCode::UnknownKind | ErrorCode::Forbidden);
            if misplaced || engine && error.code() == ErrorCode::Invalid {
                let text = &error.message;
                self.env.violated(format!(
                    "the leader refuses a message of a simulated process: {text}"
                ));
            }
        }
        self.server.reply(self.env, id, request, message);
    }

    fn order(
        &mut self,
        peers: &[PeerId],
        order: RequestId,
        message: Message,
        deadline: Duration,
    ) -> Vec<PeerId> {
        self.server.order(self.env, peers, order, message, deadline)
    }

    fn watch(&mut self, pid: i32) -> Option<i32> {
        self.open_process(pid)
    }

    fn is_own(&self, _: i32) -> bool {
        false
    }

    fn request_end(&mut self, worker: WorkerId, pid: Option<i32>) -> bool {
        self.env.request_fence(worker, pid);
        // A supervisor can end its children. Where processes are unseen, an operator ends them.
        !self.env.setup.processes_unseen
    }

    fn kill(&mut self, worker: WorkerId, process: &i32) {
        self.env.request_fence(worker, Some(*process));
    }

    fn raise_epoch(&mut self, _: Epoch) -> Result<(), HostError> {
        Ok(())
    }

    fn lookup_time(&self) -> Duration {
        Duration::ZERO
    }

    fn before_step(&mut self, core: &Leader, event: &LeaderEvent) {
        let env = &mut *self.env;
        match event {
            LeaderEvent::EngineOpened(engine) => {
                if engine.0.starts_with(&ADMIN_KEY) {
                    env.oracle.operators.insert(*engine);
                }
                env.oracle.came(env.queue.now(), self.epoch, *engine);
            }
            // Each start of an engine here has a name of its own.
            LeaderEvent::EngineReplaced(_) => {}
            LeaderEvent::EngineClosed(engine) => {
                let due = env.now() + env.setup.engine_grace;
                env.oracle.went(self.epoch, *engine, due);
            }
            LeaderEvent::WorkerLost(worker) => env.oracle.roster.gone(*worker),
            LeaderEvent::WorkerDead(worker) => env.oracle.roster.died(*worker),
            LeaderEvent::Attach(attached) => {
                env.oracle.roster.cleared(attached.worker);
                self.attaching.insert(attached.worker, attached.clone());
            }
            LeaderEvent::Memory(stated) => {
                self.stating.insert(stated.worker, stated.clone());
            }
            LeaderEvent::Tiers(stated) => {
                self.opening.insert(stated.worker, stated.clone());
            }
            LeaderEvent::Request {
                engine,
                id,
                deadline,
                request,
            } => {
                let workers = usize::from(env.setup.ranks) * usize::from(env.setup.replicas);
                let question = ArrivedRequest {
                    left: LeaderHost::now(self).until(*deadline),
                    all_clear: self.env.oracle.roster.all_clear(workers),
                    request,
                };
                let now = self.env.now();
                let shape = self.env.memory(*engine).shape;
                let plain = self.env.setup.groups(shape).is_empty();
                let gate = &mut self.env.oracle.gate;
                gate.arrived((*engine, *id), request, plain);
                self.env
                    .oracle
                    .arrived(now, self.epoch, *engine, *id, &question);
                if let Request::Lookup {
                    namespace,
                    hashes,
                    have_pages,
                    ..
                } = request
                {
                    let geometry = self.env.geometry(*engine);
                    let SimContext { oracle, setup, .. } = &mut *self.env;
                    let lookup = (&namespace[..], hashes, *have_pages);
                    let asked = (*engine, *id);
                    // Without an index of pages, blocks of sequences that begin at different pages are found by chance.
                    if !setup.tails || setup.page_index(self.epoch) {
                        oracle.hits.arrived((core, setup), asked, geometry, lookup);
                    }
                }
            }
            LeaderEvent::Ended {
                worker,
                epoch,
                copies,
            } if *epoch == self.epoch => {
                for ended in copies {
                    let key = |tier| core.tier_key(tier).cloned();
                    env.oracle.ended(*worker, ended, key);
                    env.oracle.gate.ended(ended);
                }
            }
            LeaderEvent::Unsent { worker, copies } => {
                for ended in copies {
                    let key = |tier| core.tier_key(tier).cloned();
                    env.oracle.ended(*worker, ended, key);
                }
            }
            LeaderEvent::Inventory { .. }
            | LeaderEvent::Invalidated { .. }
            | LeaderEvent::TierFlushed { .. }
            | LeaderEvent::Ended { .. }
            | LeaderEvent::Writable { .. }
            | LeaderEvent::Tick => {}
        }
        self.before = core.tier_key(TierId::Host).cloned();
    }

    fn after_step(&mut self, core: &Leader, effects: &[LeaderEffect]) {
        for effect in effects {
            tracing::trace!(?effect, "leader");
            match effect {
                LeaderEffect::Admit {
                    worker,
                    attach,
                    verdict,
                } => {
                    let attached = self.attaching.get(worker);
                    if let Some(attached) = attached.filter(|known| known.attach == *attach) {
                        let attached = attached.clone();
                        self.attached(core, attached, verdict.as_ref().err());
                    }
                }
                LeaderEffect::AdmitMemory {
                    worker,
                    number,
                    verdict,
                } => {
                    let stated = self.stating.get(worker);
                    if let Some(stated) = stated.filter(|known| known.number == *number) {
                        let memory = stated.memory.clone();
                        self.stated(core, *worker, memory, verdict.as_ref().err());
                    }
                }
                LeaderEffect::AdmitTiers {
                    worker,
                    number,
                    verdict: Ok(()),
                } => {
                    let stated = self.opening.get(worker);
                    if let Some(stated) = stated.filter(|known| known.number == *number) {
                        let (layout, pages) = (stated.layout, stated.pages.clone());
                        let roster = &mut self.env.oracle.roster;
                        roster.tiers(*worker, layout, pages);
                    }
                }
                LeaderEffect::Answer { engine, id, answer } => {
                    let oracle = &mut self.env.oracle;
                    if let Ok(Answer::Lookup(found)) = answer
                        && !oracle.is_answered(self.epoch, *engine, *id)
                        && let Some(wrong) = oracle.hits.answered(core, (*engine, *id), found)
                    {
                        self.env.violated(wrong);
                    }
                    self.env.answered(self.epoch, *engine, *id, answer);
                    let on = self.env.setup.prefill_tokens_per_s.is_some();
                    let gate = &mut self.env.oracle.gate;
                    let wrong = answer.as_ref().ok();
                    let wrong = wrong.and_then(|answer| gate.answered((*engine, *id), answer, on));
                    if let Some(wrong) = wrong {
                        self.env.violated(wrong);
                    }
                }
                LeaderEffect::Transfer { transfer: copy, .. } => {
                    if copy.device.is_none() {
                        let pages: u64 = copy.pairs.iter().map(|pair| pair.dst.pages()).sum();
                        let written = if copy.edge.to > copy.edge.from {
                            pages
                        } else {
                            0
                        };
                        self.moved.moves += 1;
                        self.moved.pages += pages;
                        self.moved.written += written;
                    }
                    let key = |tier| core.tier_key(tier).cloned();
                    let now = self.env.queue.now();
                    self.env.oracle.gate.ordered(copy);
                    if let Some(wrong) = self.env.oracle.ordered(now, copy, key) {
                        self.env.violated(wrong);
                    }
                }
                LeaderEffect::AdmitTiers { .. }
                | LeaderEffect::Cancel { .. }
                | LeaderEffect::Invalidate { .. }
                | LeaderEffect::OpenTiers { .. }
                | LeaderEffect::FlushTier { .. }
                | LeaderEffect::ReadInventory { .. }
                | LeaderEffect::FenceWorker(_) => {}
            }
        }
        let counts = core.counts();
        let counted = Moved {
            moves: counts.moves,
            pages: counts.moved_pages,
            written: counts.written_through_pages,
        };
        if counted != *self.moved {
            let moved = *self.moved;
            self.env
                .violated(format!("{moved:?} were ordered, and counted {counted:?}"));
        }
        self.env.decided = true;
    }
}

impl Host<'_> {
    /// Notes whether a worker was admitted. A refused worker must not change the pool.
    fn attached(&mut self, core: &Leader, attached: AttachRequest, refusal: Option<&Refusal>) {
        let worker = attached.worker;
        match refusal {
            None => {
                let shard = self.env.setup.sharding.of(worker.rank);
                let roster = &mut self.env.oracle.roster;
                roster.attached((worker, attached.attach), shard, &attached.depots);
            }
            Some(refusal) => {
                self.env.oracle.roster.closed(worker);
                self.refused(core, worker, refusal);
            }
        }
    }

    /// Notes whether the memory of a worker is used. Refused memory must not change the pool.
    fn stated(
        &mut self,
        core: &Leader,
        worker: WorkerId,
        memory: Option<WorkerMemory>,
        refusal: Option<&Refusal>,
    ) {
        match refusal {
            None => self.env.oracle.roster.memory(worker, memory),
            Some(refusal) => self.refused(core, worker, refusal),
        }
    }

    fn refused(&mut self, core: &Leader, worker: WorkerId, refusal: &Refusal) {
        self.env.oracle.roster.refused(worker);
        if self.before.is_some() && core.tier_key(TierId::Host) != self.before.as_ref() {
            self.env.violated(format!(
                "a pool ended though {worker} was refused: {refusal}"
            ));
        }
    }
}
