//! Faults of processes, and the quiet end of a run without faults.

use std::time::Duration;

use super::disk::SimDisk;
use super::faults::Fault;
use super::setup::{Chances, TROUBLES, pick};
use super::{LIVENESS_BOUND, NodeId, QUIET_STEPS_MAX, SimEvent, SimWorld};
use kvferry_types::{Rank, Replica, TierId, WorkerId};

/// The fault that counts the pauses of a process.
pub(super) fn pause_of(who: NodeId) -> Fault {
    match who {
        NodeId::Leader => Fault::LeaderPause,
        NodeId::Worker(_) => Fault::WorkerPause,
        NodeId::Engine(_) => Fault::EnginePause,
    }
}

impl SimWorld {
    /// Injects a fault, and schedules the next one.
    pub(super) fn nemesis(&mut self) {
        if self.env.closing {
            return;
        }
        let env = &mut self.env;
        let every = env.setup.fault_every.mul_f64(env.rng.f64() * 2.0);
        let at = env.now() + every;
        env.queue.push(at, SimEvent::Nemesis);
        let any = env.rng.u8(0..TROUBLES);
        let favourite = env.setup.favourite.filter(|_| env.rng.u8(0..3) > 0);
        match favourite.unwrap_or(any) {
            0 => self.kill(NodeId::Leader, Fault::LeaderCrash),
            1 | 2 => {
                let worker = self.some_worker();
                self.kill(NodeId::Worker(worker), Fault::WorkerCrash);
            }
            3 => {
                let engine = self.some_engine();
                self.kill(engine, Fault::EngineCrash);
            }
            4 => self.pause(NodeId::Leader),
            5 | 6 => {
                let worker = self.some_worker();
                self.pause(NodeId::Worker(worker));
            }
            7 => {
                let engine = self.some_engine();
                self.pause(engine);
            }
            8 | 9 => self.cut(),
            10 => self.slow_down(),
            11 => self.lose_a_depot(),
            _ => self.jump_or_fail(),
        }
    }

    fn some_worker(&mut self) -> WorkerId {
        let workers: Vec<WorkerId> = self.workers.keys().copied().collect();
        let mut some: Vec<WorkerId> = (0..3).map(|_| *pick(&mut self.env.rng, &workers)).collect();
        // Prefers a worker with open copies, so that the fault has an effect.
        some.sort_by_key(|id| {
            let worker = self.workers[id].state.as_ref();
            worker.map_or(0, |worker| worker.core().open_copies())
        });
        some[some.len() - 1]
    }

    fn some_engine(&mut self) -> NodeId {
        NodeId::Engine(Replica(self.env.rng.u16(0..self.env.setup.replicas)))
    }

    fn someone(&mut self) -> NodeId {
        let everyone: Vec<NodeId> = self.everyone().collect();
        *pick(&mut self.env.rng, &everyone)
    }

    fn kill(&mut self, who: NodeId, fault: Fault) {
        self.env.faults.injected(fault);
        let busy = match who {
            NodeId::Leader => self.leader.state.as_ref().is_some_and(|leader| {
                leader.core().open_requests() > 0 || leader.core().copies_under_way() > 0
            }),
            NodeId::Worker(id) => {
                let worker = self.workers[&id].state.as_ref();
                worker.is_some_and(|worker| worker.core().open_copies() > 0)
            }
            NodeId::Engine(replica) => {
                let engine = self.engines[usize::from(replica.0)].state.as_ref();
                engine.is_some_and(|engine| engine.scheduler.open_prompts() > 0)
            }
        };
        if busy {
            self.env.faults.took_effect(fault);
        }
        if let NodeId::Worker(id) = who
            && !self.env.disks.is_empty()
            && self.env.rng.u8(0..4) == 0
            && let Some(worker) = self.workers.get_mut(&id)
            && let Some(worker) = worker.state.as_mut()
        {
            worker.end(&mut self.env);
        }
        if self.incarnation(who).is_some() {
            self.crash(who);
        }
    }

    /// Pauses a process, sometimes for longer than any deadline and the fence together.
    fn pause(&mut self, who: NodeId) {
        if self.incarnation(who).is_none() {
            return;
        }
        self.env.faults.injected(pause_of(who));
        let longest = (self.env.setup.request_timeout + self.env.setup.fence) * 2;
        let time = longest.mul_f64(self.env.rng.f64());
        let pause = match who {
            NodeId::Leader => stand_still(&mut self.leader),
            NodeId::Worker(id) => self.workers.get_mut(&id).map_or(0, stand_still),
            NodeId::Engine(replica) => stand_still(&mut self.engines[usize::from(replica.0)]),
        };
        let at = self.env.now() + time;
        self.env.queue.push(at, SimEvent::Resume { who, pause });
    }

    /// Pauses, by chance, a worker that has started to divide a depot. Engines may leave meanwhile, so that the next
    /// ones need pages of another size.
    pub(super) fn pause_divider(&mut self, worker: WorkerId) {
        let env = &mut self.env;
        if env.closing || env.rng.u32(0..1_000_000) >= env.setup.pause_while_dividing {
            return;
        }
        self.pause(NodeId::Worker(worker));
        if self.env.rng.bool() {
            return;
        }
        for replica in (0..self.env.setup.replicas).map(Replica) {
            let incarnation = self.engines[usize::from(replica.0)].incarnation;
            let env = &mut self.env;
            let longest = env.setup.request_timeout;
            let at = env.now() + longest.mul_f64(env.rng.f64());
            env.queue.push(
                at,
                SimEvent::Leave {
                    replica,
                    incarnation,
                },
            );
        }
    }

    fn cut(&mut self) {
        let (from, to) = (self.someone(), self.someone());
        if from == to {
            return;
        }
        self.env.faults.injected(Fault::Partition);
        let time = self
            .env
            .setup
            .request_timeout
            .mul_f64(self.env.rng.f64() * 2.0);
        let until = self.env.now() + time;
        let now = self.env.now();
        self.env.net.partitions.retain(|(_, _, until)| *until > now);
        self.env.net.partitions.push((from, to, until));
    }

    fn slow_down(&mut self) {
        let who = self.someone();
        self.env.faults.injected(Fault::SlowConsumer);
        let each = Duration::from_micros(self.env.rng.u64(100..3000));
        let until = self.env.now() + self.env.setup.request_timeout;
        let slow = Some((each, until));
        match who {
            NodeId::Leader => self.leader.slow = slow,
            NodeId::Worker(id) => {
                if let Some(process) = self.workers.get_mut(&id) {
                    process.slow = slow;
                }
            }
            NodeId::Engine(replica) => self.engines[usize::from(replica.0)].slow = slow,
        }
    }

    fn jump_or_fail(&mut self) {
        let env = &mut self.env;
        if env.rng.bool() {
            env.faults.injected(Fault::WallJump);
            let most: i64 = *pick(&mut env.rng, &[100_000_000, 3_600_000_000_000]);
            let by = env.rng.i64(-most..=most);
            env.jump_wall(by);
            if self
                .leader
                .state
                .as_ref()
                .is_some_and(|leader| leader.core().copies_under_way() > 0)
            {
                env.faults.took_effect(Fault::WallJump);
            }
        } else {
            let rank = Rank(env.rng.u16(0..env.setup.ranks));
            let time = env.setup.request_timeout.mul_f64(env.rng.f64());
            env.failing = Some((rank, env.now() + time));
        }
    }

    /// Loses the depot of a shard, together with all workers that had it.
    fn lose_a_depot(&mut self) {
        let shards = usize::from(self.env.setup.sharding.shards());
        let shard = self.env.rng.usize(0..shards);
        let tier = match self.env.setup.tiers[..] {
            [only] => only,
            ref tiers => *pick(&mut self.env.rng, tiers),
        };
        self.env.faults.injected(Fault::DepotLoss);
        let workers: Vec<WorkerId> = self.workers.keys().copied().collect();
        for worker in workers {
            let who = NodeId::Worker(worker);
            if self.env.depot_of(worker.rank) == shard && self.incarnation(who).is_some() {
                self.crash(who);
            }
        }
        self.env.lose_depot(tier, shard);
    }

    /// Counts the effect when a pool closes. When a reading of inventories starts, an engine may leave.
    pub(super) fn notice(&mut self) {
        let Some(leader) = &self.leader.state else {
            return;
        };
        let reading = leader.core().is_reading(TierId::Host);
        let began = reading && !self.seen.1;
        self.seen.1 = reading;
        if leader.core().tier_key(TierId::Host) != self.seen.0.as_ref() {
            let before = self.seen.0.take();
            self.seen.0 = leader.core().tier_key(TierId::Host).cloned();
            if let Some(before) = before {
                let lost = self
                    .env
                    .oracle
                    .roster
                    .has_other_depots(TierId::Host, &before);
                self.env.faults.took_effect(match lost {
                    true => Fault::DepotLoss,
                    false => Fault::OtherShape,
                });
            }
        }
        let env = &mut self.env;
        if began && !env.closing && env.rng.u32(0..1_000_000) < env.setup.leave_while_reading {
            let replica = Replica(env.rng.u16(0..env.setup.replicas));
            let incarnation = self.engines[usize::from(replica.0)].incarnation;
            let at = env.now() + Duration::from_micros(env.rng.u64(0..200));
            env.queue.push(
                at,
                SimEvent::Leave {
                    replica,
                    incarnation,
                },
            );
        }
    }

    pub(super) fn leader_dies(&mut self) {
        if self.env.closing || self.incarnation(NodeId::Leader).is_none() {
            return;
        }
        self.env.faults.injected(Fault::LeaderCrashInCopy);
        if self.env.oracle.touched.any_copy() {
            self.env.faults.took_effect(Fault::LeaderCrashInCopy);
        }
        self.crash(NodeId::Leader);
    }

    pub(super) fn leave(&mut self, replica: Replica, incarnation: u32) {
        let who = NodeId::Engine(replica);
        if self.incarnation(who) != Some(incarnation) {
            return;
        }
        self.env.faults.injected(Fault::ReadingLeft);
        let leader = self.leader.state.as_ref();
        if leader.is_some_and(|leader| leader.core().is_reading(TierId::Host)) {
            self.env.faults.took_effect(Fault::ReadingLeft);
        }
        self.crash(who);
    }

    /// Runs without faults and without new prompts: everything pending must end.
    pub(super) fn quiet(&mut self) {
        self.env.closing = true;
        self.env.net.chances = Chances::default();
        self.env.net.partitions.clear();
        self.env.failing = None;
        self.env.disks.iter_mut().for_each(SimDisk::heal);
        let everyone: Vec<NodeId> = self.everyone().collect();
        for who in everyone {
            let pause = match who {
                NodeId::Leader => self.leader.pauses,
                NodeId::Worker(id) => self.workers[&id].pauses,
                NodeId::Engine(replica) => self.engines[usize::from(replica.0)].pauses,
            };
            let now = self.env.now();
            self.env.queue.push(now, SimEvent::Resume { who, pause });
        }
        let (begun, first) = (self.env.now(), self.env.counts.steps);
        while self.env.violation.is_none() {
            if self.is_quiet() {
                return self.check_end();
            }
            let late = self.env.now() > begun + LIVENESS_BOUND
                || self.env.counts.steps > first + QUIET_STEPS_MAX;
            if late {
                let open = self.pending();
                return self
                    .env
                    .violated(format!("still pending after the last fault: {open}"));
            }
            self.next();
        }
    }
}

fn stand_still<S>(process: &mut super::SimProcess<S>) -> u32 {
    process.paused = true;
    process.pauses += 1;
    process.pauses
}
