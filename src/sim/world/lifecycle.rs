//! Start, death and pauses of processes.

use std::collections::VecDeque;
use std::time::Duration;

use super::engine::EngineProcess;
use super::faults::Fault;
use super::leader::LeaderProcess;
use super::worker::WorkerProcess;
use super::{NodeId, SimEvent, SimProcess, SimWorld, nemesis};
use kvferry_core::LeaderSettings;
use kvferry_types::{Epoch, Ratio, TierId};

impl SimWorld {
    pub(super) fn begin_process(&mut self, who: NodeId) {
        if self.incarnation(who).is_some() {
            return;
        }
        let incarnation = self.incarnations_so_far(who) + 1;
        let env = &mut self.env;
        env.pids.begin(who, incarnation);
        match who {
            NodeId::Leader => {
                self.epoch = Epoch(self.epoch.0 + 1);
                env.counts.leaders += 1;
                let ratio = Ratio::new(env.setup.ratio).unwrap_or_default();
                let mut settings =
                    LeaderSettings::new(self.epoch, env.setup.ranks, ratio, env.setup.anchor_key());
                settings.sharding = env.setup.sharding;
                settings.replicas = env.setup.replicas;
                settings.tiers.clone_from(&env.setup.tiers);
                settings.moves.clone_from(&env.setup.moves);
                settings.prefill_tokens_per_s = env.setup.prefill_tokens_per_s;
                settings.tier_policies.clone_from(&env.setup.policies);
                settings.page_index = env.setup.page_index(self.epoch);
                settings.namespaces = env.setup.rules_of(self.epoch);
                settings.halves_held_pages = env.setup.halves_held_pages;
                settings.fence = env.setup.fence;
                settings.hold_for = env.setup.hold_for;
                settings.engine_grace = env.setup.engine_grace;
                settings.open_requests_max = env.setup.open_requests_max(self.epoch);
                // The slice size changes with the epoch, so that some leaders do a reset in one slice and others in
                // many.
                settings.reset_slice_pages = match self.epoch.0 % 3 {
                    0 => 8,
                    1 => 64,
                    _ => settings.reset_slice_pages,
                };
                self.awake_since = env.now();
                self.leader = SimProcess {
                    incarnation,
                    state: Some(LeaderProcess::start(env, settings)),
                    pauses: self.leader.pauses,
                    ..SimProcess::new()
                };
            }
            NodeId::Worker(id) => {
                let Some(process) = self.workers.get_mut(&id) else {
                    return;
                };
                if env.setup.standalone && incarnation > 1 {
                    let shard = env.depot_of(id.rank);
                    // A disk outlives the worker.
                    let tiers = env.setup.tiers.clone().into_iter();
                    tiers
                        .filter(|tier| *tier != TierId::Disk)
                        .for_each(|tier| env.lose_depot(tier, shard));
                    env.faults.injected(Fault::DepotLoss);
                }
                *process = SimProcess {
                    incarnation,
                    state: Some(WorkerProcess::start(env, id, incarnation)),
                    pauses: process.pauses,
                    ..SimProcess::new()
                };
            }
            NodeId::Engine(replica) => {
                let process = &mut self.engines[usize::from(replica.0)];
                *process = SimProcess {
                    incarnation,
                    state: Some(EngineProcess::start(env, replica, incarnation)),
                    pauses: process.pauses,
                    ..SimProcess::new()
                };
                env.queue.push(
                    env.queue.now(),
                    SimEvent::Arrive {
                        replica,
                        incarnation,
                    },
                );
            }
        }
        env.queue
            .push(env.queue.now(), SimEvent::Wake { who, incarnation });
    }

    /// Number of incarnations of a process so far.
    fn incarnations_so_far(&self, who: NodeId) -> u32 {
        match who {
            NodeId::Leader => self.leader.incarnation,
            NodeId::Worker(worker) => self.workers[&worker].incarnation,
            NodeId::Engine(replica) => self.engines[usize::from(replica.0)].incarnation,
        }
    }

    /// Ends a process: its state is lost, its copies end, and it is scheduled to start again.
    pub(super) fn crash(&mut self, who: NodeId) {
        tracing::trace!(?who, "dies");
        let incarnation = self.incarnations_so_far(who);
        let env = &mut self.env;
        env.pids.end(who, incarnation);
        match who {
            NodeId::Leader => {
                if let Some(leader) = self.leader.state.take() {
                    env.count_decisions(leader.core());
                }
                self.seen = (None, false);
                env.oracle.leader_died(self.epoch);
            }
            NodeId::Worker(id) => {
                let Some(process) = self.workers.get_mut(&id) else {
                    return;
                };
                if process
                    .state
                    .take()
                    .is_some_and(|worker| worker.has_stuck_copy())
                {
                    env.faults.took_effect(Fault::CopyStuck);
                }
                env.oracle.touched.died(id, incarnation);
                let drained = env.now() + Duration::from_micros(env.rng.u64(0..2000));
                if let Some(disk) = env.disk_of(id.rank) {
                    disk.died((id, incarnation), drained);
                }
                for to in [NodeId::Leader, NodeId::Engine(id.replica)] {
                    let at = env.queue.now() + Duration::from_micros(env.rng.u64(20..3000));
                    let died = SimEvent::Died {
                        to,
                        worker: id,
                        incarnation,
                    };
                    env.queue.push(at, died);
                }
            }
            NodeId::Engine(replica) => self.engines[usize::from(replica.0)].state = None,
        }
        env.net
            .died(&mut env.queue, &mut env.rng, &mut env.faults, who);
        let at = env.queue.now() + Duration::from_micros(env.rng.u64(200..60_000));
        env.queue.push(at, SimEvent::Begin(who));
    }

    /// Continues a paused process and delivers the events that waited for it, in order.
    pub(super) fn resume(&mut self, who: NodeId, pause: u32) {
        fn awake<S>(process: &mut SimProcess<S>, pause: u32) -> Option<VecDeque<SimEvent>> {
            (process.paused && process.pauses == pause).then(|| {
                process.paused = false;
                std::mem::take(&mut process.inbox)
            })
        }
        let inbox = match who {
            NodeId::Leader => {
                self.awake_since = self.env.now();
                awake(&mut self.leader, pause)
            }
            NodeId::Worker(id) => self.workers.get_mut(&id).and_then(|process| {
                let inbox = awake(process, pause);
                if let Some(worker) = process.state.as_mut().filter(|_| inbox.is_some()) {
                    worker.resumed();
                }
                inbox
            }),
            NodeId::Engine(replica) => awake(&mut self.engines[usize::from(replica.0)], pause),
        };
        let (Some(inbox), Some(incarnation)) = (inbox, self.incarnation(who)) else {
            return;
        };
        if !inbox.is_empty() {
            self.env.faults.took_effect(nemesis::pause_of(who));
        }
        for event in inbox {
            self.to(who, Some(incarnation), event);
        }
    }
}
