//! A worker's process: the worker's shell on the simulated network, depot and memory.

mod copies;
mod disk;
mod host;

use super::client::{self, SimClient};
use super::net::{ConnectionEnd, ConnectionId, Received};
use super::server::{self, SimServer, peer};
use super::{NodeId, SimContext};
use kvferry_core::{Worker, WorkerSettings};
use kvferry_protocol::{ErrorBody, ErrorCode, Message, Role, TierFlushed};
use kvferry_shell::{Fatal, WorkerFailure, WorkerHost, WorkerShell};
use kvferry_types::{EngineId, Epoch, Time, TransferId, WorkerId};

pub(super) use disk::DiskStep;
use host::{Host, Parts};

/// One incarnation of a worker.
#[derive(Debug)]
pub(super) struct WorkerProcess {
    shell: WorkerShell<i32, EngineId>,
    parts: Parts,
    failed: bool,
}

impl WorkerProcess {
    pub(super) fn start(env: &mut SimContext, id: WorkerId, incarnation: u32) -> Self {
        let hello = SimClient::hello(Role::Worker, EngineId::default(), id, env.setup.version_max);
        let settings = WorkerSettings {
            running_max: env.setup.running_max,
            bytes_per_s: env.setup.bytes_per_s.clone(),
            fence: env.setup.fence,
            attach_every: env.setup.attach_every,
        };
        let leader = SimClient::new(
            env,
            (NodeId::Worker(id), incarnation),
            NodeId::Leader,
            hello,
        );
        let server = SimServer::new(Epoch(0), &[Role::Rank], env.now());
        let mut process = Self {
            shell: WorkerShell::new(id, env.setup.sharding, settings),
            parts: Parts::new((id, incarnation), leader, server),
            failed: false,
        };
        process.run(env, |shell, host| shell.depot_ready(host));
        process
    }

    pub(super) fn core(&self) -> &Worker {
        self.shell.core()
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed
    }

    pub(super) fn is_dividing(&self) -> bool {
        self.parts.dividing.is_some()
    }

    pub(super) fn has_stuck_copy(&self) -> bool {
        self.parts.copies.has_stuck()
    }

    pub(super) fn next_timeout(&self) -> Time {
        let core = self.shell.next_timeout().unwrap_or(Time::NEVER);
        core.min(self.parts.leader.next_timeout())
            .min(self.parts.server.next_timeout())
    }

    pub(super) fn tick(&mut self, env: &mut SimContext) {
        for noticed in self.parts.leader.tick(env) {
            self.leader_event(env, noticed);
        }
        for silent in self.parts.server.tick(env) {
            self.run(env, |shell, host| shell.closed(host, peer(silent)));
        }
        self.run(env, |shell, host| shell.tick(host));
    }

    pub(super) fn receive(
        &mut self,
        env: &mut SimContext,
        id: ConnectionId,
        to: ConnectionEnd,
        received: Received,
    ) {
        if to == ConnectionEnd::Client {
            if self.parts.leader.is(id) {
                for noticed in self.parts.leader.receive(env, received) {
                    self.leader_event(env, noticed);
                }
            }
            return;
        }
        match self.parts.server.receive(env, id, received) {
            None => {}
            Some(server::SimServerEvent::Opened(hello)) => {
                let pid = env.visible_pid(id);
                self.run(env, |shell, host| {
                    shell.opened(host, peer(id), &hello, pid);
                    Ok(())
                });
            }
            Some(server::SimServerEvent::Closed) => {
                self.run(env, |shell, host| shell.closed(host, peer(id)));
            }
            Some(server::SimServerEvent::Message(envelope)) => {
                self.run(env, |shell, host| shell.message(host, peer(id), envelope));
            }
        }
    }

    fn leader_event(&mut self, env: &mut SimContext, noticed: client::SimClientEvent) {
        match noticed {
            client::SimClientEvent::Welcomed { epoch, link } => {
                self.run(env, |shell, host| shell.leader_found(host, epoch, link));
            }
            client::SimClientEvent::Lost => self.run(env, |shell, host| shell.leader_lost(host)),
            client::SimClientEvent::Request { link, envelope } => {
                let understood = match &envelope.message {
                    Message::Invalidate(invalidate) => invalidate.scope().is_ok(),
                    Message::Transfer(order) => !order.transfers.is_empty(),
                    _ => true,
                };
                if !understood {
                    let kind = envelope.message.kind().name();
                    env.violated(format!("a worker cannot read an order: {kind}"));
                }
                self.run(env, |shell, host| shell.order(host, link, *envelope));
            }
            client::SimClientEvent::Answered(id, answer) => {
                if let Ok(other) = &*answer
                    && !matches!(
                        other,
                        Message::Attached(_) | Message::MemoryAnswer(_) | Message::TiersAnswer(_)
                    )
                {
                    let kind = other.kind().name();
                    env.violated(format!("{kind} answers no statement of a worker"));
                }
                let answer = answer.map_err(ErrorBody::from);
                self.run(env, |shell, host| shell.leader_answered(host, id, answer));
            }
        }
    }

    /// Handles the end of opening an engine's memory.
    pub(super) fn opened(&mut self, env: &mut SimContext, opening: u64) {
        if let Some(registering) = self.parts.opening.remove(&opening) {
            let memory = Ok(registering.engine);
            self.run(env, |shell, host| shell.mapped(host, registering, memory));
        }
    }

    /// Does the next slice of a reset.
    pub(super) fn continue_invalidations(&mut self, env: &mut SimContext) {
        self.run(env, |shell, host| shell.continue_invalidations(host));
    }

    /// Clears the next entries of a depot that is being divided.
    pub(super) fn divide(&mut self, env: &mut SimContext) {
        let Self { parts, .. } = self;
        Host { env, parts }.divide();
    }

    /// Notes that the process was paused: copies may continue after their deadlines.
    pub(super) fn resumed(&mut self) {
        self.parts.copies.resumed();
    }

    /// Makes the next step of a copy.
    pub(super) fn copy_step(&mut self, env: &mut SimContext, transfer: TransferId) {
        let Parts { copies, disk, .. } = &mut self.parts;
        let Some((ended, failure)) = copies.step(env, transfer) else {
            return;
        };
        let shorter = disk.ended(env, copies, &ended, failure);
        if shorter {
            self.run(env, |shell, host| shell.tiers_changed(host));
        }
        self.run(env, |shell, host| shell.copies_ended(host, vec![ended]));
    }

    /// Makes a step of the disk.
    pub(super) fn disk_step(&mut self, env: &mut SimContext, step: DiskStep) {
        let report = self.parts.disk.step(env, step);
        if !report.ended.is_empty() {
            self.run(env, |shell, host| shell.copies_ended(host, report.ended));
        }
        if report.changed {
            self.run(env, |shell, host| shell.tiers_changed(host));
        }
        for ((link, order, flush), durable) in report.flushed {
            let answer = match durable {
                true => Message::TierFlushed(TierFlushed { flush }),
                false => {
                    let text = "the disk is not open, or fails";
                    Message::Error(ErrorBody::new(ErrorCode::Internal, text))
                }
            };
            self.run(env, |_, host| {
                host.reply_to_leader(link, order, answer);
                Ok(())
            });
        }
        if report.reset {
            self.run(env, |shell, host| shell.continue_invalidations(host));
        }
    }

    /// Prepares for a clean end of the process.
    pub(super) fn end(&mut self, env: &mut SimContext) {
        self.parts.disk.end(env);
    }

    fn run(
        &mut self,
        env: &mut SimContext,
        call: impl FnOnce(&mut WorkerShell<i32, EngineId>, &mut Host<'_>) -> Result<(), Fatal>,
    ) {
        let Self { shell, parts, .. } = self;
        let mut host = Host { env, parts };
        let mut ended = call(shell, &mut host);
        while let Some(closed) = host.parts.disconnected.pop() {
            ended = ended.and(shell.closed(&mut host, closed));
        }
        let Err(why) = ended else {
            return;
        };
        self.failed = true;
        if why.downcast_ref() != Some(&WorkerFailure::CopyStuck) {
            env.violated(format!("a worker must end: {why}"));
        }
    }
}
