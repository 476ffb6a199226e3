//! The leader's process: what `actors::leader` does, without an actor.

use std::collections::BTreeMap;
use std::time::Duration;

use super::ghost::Question;
use super::net::{ConnectionId, Heard};
use super::server::{Noticed, Server};
use super::{Env, Who};
use crate::core::sabotage::{Bug, planted};
use crate::core::{
    Attached, Effect, EngineMemory, Event, Leader, LeaderSettings, RankSet, Refusal, TierKey,
};
use crate::protocol::{
    Attached as AttachedBody, Cancel, Envelope, ErrorBody, ErrorCode, Message, ReadInventory, Role,
    Strike, Transfer,
};
use crate::types::{
    AttachId, Copy, DepotId, EndedCopy, EngineId, Epoch, OpId, Rank, Replica, Request, RequestId,
    ResetId, Time, WorkerId,
};

#[derive(Debug, Clone, Copy)]
enum Peer {
    Engine(EngineId),
    Worker(WorkerId),
}

#[derive(Debug)]
struct WorkerPeer {
    connection: ConnectionId,
    life: Option<u32>,
    attaching: Option<(AttachId, RequestId)>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct LeaderProcess {
    pub(super) core: Leader,
    settings: LeaderSettings,
    server: Server,
    peers: BTreeMap<ConnectionId, Peer>,
    engines: BTreeMap<EngineId, ConnectionId>,
    workers: BTreeMap<WorkerId, WorkerPeer>,
    next_order: u64,
    /// What each worker said last of itself.
    attaching: BTreeMap<WorkerId, Attached>,
}

impl LeaderProcess {
    pub(super) fn start(env: &Env, settings: LeaderSettings) -> Self {
        Self {
            core: Leader::new(settings.clone()),
            server: Server::new(settings.epoch, env.now()),
            settings,
            peers: BTreeMap::new(),
            engines: BTreeMap::new(),
            workers: BTreeMap::new(),
            next_order: 0,
            attaching: BTreeMap::new(),
        }
    }

    /// The time that decisions are made by.
    fn now(env: &Env) -> Time {
        match planted(Bug::WallClock) {
            true => env.wall(),
            false => env.now(),
        }
    }

    pub(super) fn next_timeout(&self, env: &Env) -> Time {
        let core = self.core.next_timeout().unwrap_or(Time::NEVER);
        let core = match planted(Bug::WallClock) {
            true => env.when_wall_shows(core),
            false => core,
        };
        core.min(self.server.next_timeout())
    }

    pub(super) fn tick(&mut self, env: &mut Env) {
        for silent in self.server.tick(env) {
            self.closed(env, silent);
        }
        self.step(env, Event::Tick);
    }

    pub(super) fn hear(&mut self, env: &mut Env, id: ConnectionId, heard: Heard) {
        match self.server.hear(env, id, heard) {
            None => {}
            Some(Noticed::Closed) => self.closed(env, id),
            Some(Noticed::Opened(hello)) => match hello.role {
                Role::Engine => self.engine_opened(env, id, EngineId(hello.engine)),
                Role::Worker => {
                    let (replica, rank) = (Replica(hello.replica), Rank(hello.rank));
                    self.worker_opened(env, id, WorkerId { replica, rank });
                }
                Role::Rank | Role::Admin | Role::Unknown => {
                    env.violated("a stranger speaks to the leader".to_owned())
                }
            },
            Some(Noticed::Message(envelope)) => self.message(env, id, envelope),
        }
    }

    fn engine_opened(&mut self, env: &mut Env, id: ConnectionId, engine: EngineId) {
        self.peers.insert(id, Peer::Engine(engine));
        if let Some(before) = self.engines.insert(engine, id) {
            self.peers.remove(&before);
            self.server.close(env, before);
        }
        env.ghost.came(env.now(), self.settings.epoch, engine);
        self.step(env, Event::EngineOpened(engine));
    }

    fn worker_opened(&mut self, env: &mut Env, id: ConnectionId, worker: WorkerId) {
        self.peers.insert(id, Peer::Worker(worker));
        let life = env.life_of_client(Who::Worker(worker), id);
        let peer = WorkerPeer {
            connection: id,
            life,
            attaching: None,
        };
        if let Some(before) = self.workers.insert(worker, peer) {
            self.peers.remove(&before.connection);
            self.server.close(env, before.connection);
        }
        self.step(env, Event::WorkerLost(worker));
    }

    fn closed(&mut self, env: &mut Env, id: ConnectionId) {
        match self.peers.remove(&id) {
            Some(Peer::Engine(engine)) if self.engines.get(&engine) == Some(&id) => {
                self.engines.remove(&engine);
                let due = env.now() + env.setup.engine_grace;
                env.ghost.went(self.settings.epoch, engine, due);
                self.step(env, Event::EngineClosed(engine));
            }
            Some(Peer::Worker(worker))
                if self
                    .workers
                    .get(&worker)
                    .is_some_and(|peer| peer.connection == id) =>
            {
                self.step(env, Event::WorkerLost(worker));
            }
            _ => {}
        }
    }

    /// The process of a worker that this leader spoke to is seen dead.
    pub(super) fn died(&mut self, env: &mut Env, worker: WorkerId, life: u32) {
        if self
            .workers
            .get(&worker)
            .is_some_and(|peer| peer.life == Some(life))
        {
            // What it said before it died, and arrives behind its death, is not heard.
            if let Some(dead) = self.workers.remove(&worker) {
                self.peers.remove(&dead.connection);
                self.server.close(env, dead.connection);
            }
            self.step(env, Event::WorkerDead(worker));
        }
    }

    fn message(&mut self, env: &mut Env, id: ConnectionId, envelope: Envelope) {
        let Envelope {
            correlation,
            deadline_ms,
            epoch,
            message,
            ..
        } = envelope;
        match (self.peers.get(&id).copied(), message) {
            (Some(Peer::Worker(worker)), Message::Attach(attach)) => {
                let attach_id = AttachId(attach.attach);
                if let Some(peer) = self.workers.get_mut(&worker) {
                    peer.attaching = Some((attach_id, correlation));
                }
                let memory = attach.memory.map(|memory| EngineMemory {
                    engine: EngineId(memory.engine),
                    geometry: memory.geometry,
                    arena_pages: memory.arena_pages,
                });
                let attached = Attached {
                    worker,
                    ranks: attach.ranks,
                    shards: attach.kv_shards,
                    attach: attach_id,
                    depot: DepotId(u128::from_be_bytes(attach.depot)),
                    depot_epoch: Epoch(attach.depot_epoch),
                    memory,
                };
                self.attaching.insert(worker, attached.clone());
                self.step(env, Event::Attached(attached));
            }
            (Some(Peer::Worker(worker)), Message::Ended(ended)) => {
                let copies = ended.copies.iter().map(EndedCopy::from).collect();
                let event = Event::Ended {
                    worker,
                    epoch,
                    copies,
                };
                self.step(env, event);
            }
            (Some(Peer::Worker(worker)), Message::Struck(struck)) => {
                let id = ResetId(struck.reset);
                self.step(env, Event::Struck { worker, id });
            }
            (Some(Peer::Worker(worker)), Message::Inventory(inventory)) => {
                let event = Event::Inventory {
                    worker,
                    depot: DepotId(u128::from_be_bytes(inventory.depot)),
                    reading: inventory.reading,
                    from: inventory.from,
                    next: inventory.next,
                    records: inventory.pages(),
                };
                self.step(env, event);
            }
            (Some(Peer::Worker(_)), Message::Error(_)) => {}
            (Some(Peer::Engine(engine)), message) => {
                let request = match Request::try_from(message) {
                    Ok(request) => request,
                    Err(error) => {
                        return env.violated(format!("an engine was not understood: {error:?}"));
                    }
                };
                let left = Duration::from_millis(u64::from(deadline_ms));
                let (now, deadline) = (env.now(), Self::now(env) + left);
                let workers = usize::from(env.setup.ranks) * usize::from(env.setup.replicas);
                let question = Question {
                    left,
                    all_clear: env.ghost.roster.all_clear(workers),
                    request: &request,
                };
                let epoch = self.settings.epoch;
                env.ghost.asked(now, epoch, engine, correlation, &question);
                let event = Event::Request {
                    engine,
                    id: correlation,
                    deadline,
                    request,
                };
                self.step(env, event);
            }
            // It said hello and was replaced, or is dead.
            (None, _) => {}
            (_, message) => {
                let kind = message.kind().name();
                env.violated(format!("the leader cannot place a message: {kind}"));
            }
        }
    }

    fn step(&mut self, env: &mut Env, event: Event) {
        let mut effects = Vec::new();
        if let Event::WorkerLost(worker) | Event::WorkerDead(worker) = &event {
            env.ghost.roster.gone(*worker);
        }
        if let Event::WorkerDead(worker) | Event::Attached(Attached { worker, .. }) = &event {
            env.ghost.roster.cleared(*worker);
        }
        let before = self.core.tier_key().cloned();
        self.core.step(Self::now(env), event, &mut effects);
        self.attached(env, before.as_ref(), &effects);
        let mut copies: Vec<(Replica, RankSet, Copy)> = Vec::new();
        for effect in effects {
            tracing::trace!(?effect, "leader");
            match effect {
                Effect::Answer { engine, id, answer } => self.answer(env, engine, id, answer),
                Effect::Admit {
                    worker,
                    attach,
                    verdict,
                } => self.admit(env, worker, attach, verdict),
                Effect::Copy {
                    replica,
                    ranks,
                    copy,
                } => {
                    env.ghost.ordered(env.queue.now(), &copy);
                    copies.push((replica, ranks, copy));
                }
                Effect::Cancel { worker, ops } => {
                    let ops = ops.into_iter().map(|op| op.0).collect();
                    let cancel = Message::Cancel(Cancel { ops });
                    self.order(env, worker, cancel, Duration::ZERO);
                }
                Effect::Strike {
                    worker,
                    id,
                    scope,
                    through,
                    deadline,
                } => {
                    let strike = Message::Strike(Strike::new(id, &scope, through));
                    let left = Self::now(env).until(deadline);
                    self.order(env, worker, strike, left);
                }
                Effect::ReadInventory {
                    worker,
                    depot,
                    page_bytes,
                    reading,
                    from,
                } => {
                    let read = Message::ReadInventory(ReadInventory {
                        depot: depot.0.to_be_bytes(),
                        page_bytes,
                        reading,
                        from,
                    });
                    self.order(env, worker, read, Duration::ZERO);
                }
                Effect::Expel(worker) => env.expel(worker),
            }
        }
        self.transfer(env, &copies);
        env.decided = true;
    }

    /// Notes who was let in. Who is turned away disturbs nobody else.
    fn attached(&mut self, env: &mut Env, before: Option<&TierKey>, effects: &[Effect]) {
        for effect in effects {
            let Effect::Admit {
                worker,
                attach,
                verdict,
            } = effect
            else {
                continue;
            };
            let said = self.attaching.get(worker);
            let Some(said) = said.filter(|said| said.attach == *attach) else {
                continue;
            };
            match verdict {
                Ok(_) => {
                    let shard = env.setup.sharding.of(worker.rank);
                    let memory = said.memory.clone();
                    env.ghost
                        .roster
                        .attached(*worker, shard, said.depot, memory);
                }
                Err(refusal) => {
                    env.ghost.roster.gone(*worker);
                    if before.is_some() && self.core.tier_key() != before {
                        env.violated(format!(
                            "a pool ended though {worker} was refused: {refusal}"
                        ));
                    }
                }
            }
        }
    }

    fn transfer(&mut self, env: &mut Env, copies: &[(Replica, RankSet, Copy)]) {
        let alike = |one: &(Replica, RankSet, Copy), other: &(Replica, RankSet, Copy)| {
            (one.0, one.1) == (other.0, other.1)
        };
        for group in copies.chunk_by(alike) {
            let list: Vec<&Copy> = group.iter().map(|(_, _, copy)| copy).collect();
            let (replica, ranks) = (group[0].0, group[0].1);
            for (deadline, transfer) in Transfer::all_of(&list) {
                let left = Self::now(env).until(deadline);
                for rank in ranks.iter() {
                    let worker = WorkerId { replica, rank };
                    self.order(env, worker, Message::Transfer(transfer.clone()), left);
                }
            }
        }
    }

    fn order(&mut self, env: &mut Env, worker: WorkerId, message: Message, deadline: Duration) {
        self.next_order += 1;
        if let Some(peer) = self.workers.get(&worker) {
            let correlation = RequestId(self.next_order);
            self.server
                .say(env, peer.connection, correlation, deadline, message);
        }
    }

    fn answer(
        &mut self,
        env: &mut Env,
        engine: EngineId,
        id: RequestId,
        answer: Result<crate::types::Answer, Refusal>,
    ) {
        env.answered(self.settings.epoch, engine, id, &answer);
        if let Err(refusal @ Refusal::Invalid { .. }) = &answer {
            env.violated(format!(
                "engine {engine} asks for nothing invalid: {refusal}"
            ));
        }
        if let Some(connection) = self.engines.get(&engine) {
            let message = match answer {
                Ok(answer) => answer.into(),
                Err(refusal) => refused(&refusal),
            };
            self.server
                .say(env, *connection, id, Duration::ZERO, message);
        }
    }

    fn admit(
        &mut self,
        env: &mut Env,
        worker: WorkerId,
        attach: AttachId,
        verdict: Result<OpId, Refusal>,
    ) {
        let Some(peer) = self.workers.get_mut(&worker) else {
            return;
        };
        let Some((_, correlation)) = peer.attaching.filter(|(asked, _)| *asked == attach) else {
            return;
        };
        let message = match verdict {
            Ok(after) => Message::Attached(AttachedBody {
                attach: attach.0,
                after: after.0,
                attached_ranks: self.core.attached_workers(),
            }),
            Err(refusal) => refused(&refusal),
        };
        self.server
            .say(env, peer.connection, correlation, Duration::ZERO, message);
    }
}

/// An error as the live leader words it, but for its code, which nobody in this world looks at.
fn refused(refusal: &Refusal) -> Message {
    Message::Error(ErrorBody {
        over: refusal.is_over(),
        ..ErrorBody::new(ErrorCode::Invalid, refusal.to_string())
    })
}
