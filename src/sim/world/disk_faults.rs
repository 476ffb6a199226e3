//! Faults of disks, and of the power of their host.

use std::time::Duration;

use fastrand::Rng;

use super::faults::Fault;
use super::{NodeId, SimEvent, SimWorld};
use kvferry_types::{TierId, Time, WorkerId};

/// Times and faults of a world's disks.
#[derive(Debug, Clone, Default)]
pub struct DiskSetup {
    /// Longest time between the listing of a page and the flush that makes it durable.
    pub flush_after: Duration,
    /// Pause between two attempts to open a disk that failed.
    pub open_every: Duration,
    /// Pause between two attempts to take the lock.
    pub lock_every: Duration,
    /// Pause between two attempts to use more of a disk that was full.
    pub grow_every: Duration,
    /// Time to copy a page from or to a disk, in times of that between memories.
    pub pace: f64,
    /// Reads that fail, per million.
    pub read_error: u32,
    /// Writes that fail, per million.
    pub write_error: u32,
    /// A page that cannot be read is reported as a bad source.
    pub unread_is_bad: bool,
    /// Time between two faults of the disks, on average.
    pub fault_every: Duration,
    /// The host loses its power now and then.
    pub power_losses: bool,
    /// Flushes during which it does, per million.
    pub power_loss_in_flush: u32,
    /// Disks that are full at the start, per million.
    pub full: u32,
    /// Workers that do not reach their disk at the start, per million.
    pub unreachable: u32,
    /// Time to open a disk, whose headers are read.
    pub opens_in: Duration,
}

fn one_of<T: Copy, const N: usize>(rng: &mut Rng, from: [T; N]) -> T {
    from[rng.usize(0..N)]
}

impl DiskSetup {
    /// Draws the times and faults of disks.
    pub fn draw(rng: &mut Rng, request_timeout: Duration) -> Self {
        let ms = |rng: &mut Rng, from: u64, to: u64| Duration::from_millis(rng.u64(from..=to));
        let often = |rng: &mut Rng, most: u32| match rng.u8(0..3) {
            0 => 0,
            1 => rng.u32(0..most / 10 + 1),
            _ => rng.u32(0..most + 1),
        };
        let power_losses = rng.bool();
        Self {
            flush_after: match rng.bool() {
                true => ms(rng, 1, 10),
                false => ms(rng, 10, 100),
            },
            open_every: ms(rng, 2, 40),
            lock_every: ms(rng, 1, 4),
            grow_every: ms(rng, 5, 100),
            pace: one_of(rng, [0.25, 1.0, 4.0]),
            read_error: often(rng, 100_000),
            write_error: often(rng, 40_000),
            unread_is_bad: rng.bool(),
            fault_every: match rng.u8(0..3) {
                0 => request_timeout * 2,
                1 => request_timeout * 8,
                _ => request_timeout * 32,
            },
            power_losses,
            power_loss_in_flush: one_of(rng, [20_000, 100_000, 400_000]) * u32::from(power_losses),
            full: one_of(rng, [0, 0, 500_000]),
            unreachable: one_of(rng, [0, 0, 300_000]),
            // Before the engine learns that its memory is in use, or while it stores and loads.
            opens_in: match rng.u8(0..3) {
                0 => Duration::from_micros(20),
                1 => ms(rng, 1, 10),
                _ => ms(rng, 5, 100),
            },
        }
    }
}

impl SimWorld {
    /// Schedules the first fault of a disk. Some disks are full at the start, and some workers do not reach theirs.
    pub(super) fn begin_disk_faults(&mut self) {
        if self.env.disks.is_empty() {
            return;
        }
        let workers: Vec<WorkerId> = self.workers.keys().copied().collect();
        for worker in workers {
            if self.env.rng.u32(0..1_000_000) < self.env.setup.disk.unreachable {
                self.hide_disk(worker);
            }
        }
        let env = &mut self.env;
        for disk in &mut env.disks {
            if env.rng.u32(0..1_000_000) < env.setup.disk.full {
                env.faults.injected(Fault::DiskFull);
                let time = env.setup.request_timeout.mul_f64(env.rng.f64() * 4.0);
                disk.full_until = Some(Time(0) + time);
            }
        }
        let every = env.setup.disk.fault_every;
        let at = env.now() + every.mul_f64(env.rng.f64());
        env.queue.push(at, SimEvent::DiskNemesis);
    }

    /// Injects a fault of a disk, and schedules the next one.
    pub(super) fn disk_nemesis(&mut self) {
        if self.env.closing {
            return;
        }
        let env = &mut self.env;
        let every = env.setup.disk.fault_every.mul_f64(env.rng.f64() * 2.0);
        let now = env.now();
        env.queue.push(now + every, SimEvent::DiskNemesis);
        let shard = env.rng.usize(0..env.disks.len());
        let until = now + env.setup.request_timeout.mul_f64(env.rng.f64() * 2.0);
        match env.rng.u8(0..10) {
            0..4 => {
                env.faults.injected(Fault::DiskAway);
                env.disks[shard].go_away(until, &mut env.rng);
            }
            4..7 => {
                env.faults.injected(Fault::DiskFull);
                env.disks[shard].full_until = Some(until);
            }
            7 => {
                let workers: Vec<WorkerId> = self.workers.keys().copied().collect();
                let worker = workers[env.rng.usize(0..workers.len())];
                self.hide_disk(worker);
            }
            _ if env.setup.disk.power_losses => self.lose_power(),
            _ => {}
        }
    }

    /// A worker does not reach its disk for a while, unless it has it open.
    fn hide_disk(&mut self, worker: WorkerId) {
        let env = &mut self.env;
        env.faults.injected(Fault::DiskMissing);
        let time = env.setup.request_timeout.mul_f64(env.rng.f64() * 4.0);
        let until = env.now() + time;
        if let Some(disk) = env.disk_of(worker.rank) {
            disk.unreachable.insert(worker, until);
        }
    }

    /// All processes of the host die, and what was not durable is lost in part.
    pub(super) fn lose_power(&mut self) {
        if self.env.closing {
            return;
        }
        self.env.faults.injected(Fault::PowerLoss);
        let everyone: Vec<NodeId> = self.everyone().collect();
        for who in everyone {
            if self.incarnation(who).is_some() {
                self.crash(who);
            }
        }
        let env = &mut self.env;
        let mut lost = 0;
        for disk in &mut env.disks {
            let of_disk = disk.lose(&mut env.rng);
            lost += of_disk.cells + of_disk.regions;
        }
        if lost > 0 {
            env.faults.took_effect(Fault::PowerLoss);
        }
        for shard in 0..env.disks.len() {
            env.lose_depot(TierId::Host, shard);
        }
    }
}
