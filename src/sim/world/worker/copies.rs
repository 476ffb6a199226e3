//! The copies of a simulated worker, page by page, with the faults that its world draws.

use std::collections::BTreeMap;
use std::time::Duration;

use super::super::disk::DiskFailure;
use super::super::faults::Fault;
use super::super::oracle::{PageAccesses, TouchedPages};
use super::super::saboteur::Lie;
use super::super::setup::{CELL_BYTES, Shape};
use super::super::storage::{Content, TORN};
use super::super::{SimContext, SimEvent};
use kvferry_types::{EndedCopy, Rank, TierId, Time, Transfer, TransferId, WorkerId};

/// A running copy.
#[derive(Debug)]
struct RunningCopy {
    copy: Transfer,
    /// Shape of the pages: that of the worker's memory, or for a move that of the order.
    shape: Shape,
    /// Source and destination pages.
    pages: Vec<(u32, u32)>,
    done: usize,
    stop: bool,
    fate: Fate,
    pace: Duration,
    /// The process was paused while this copy ran.
    held: bool,
    begun: Time,
    /// Checksums of the source pages, as the disk listed them when the copy began; `None` for a source without.
    sums: Option<Vec<Option<Content>>>,
    /// Contents that were written.
    written: Vec<Content>,
    /// The disk did not carry out a read or write.
    failure: Option<DiskFailure>,
    /// Set when the last byte is written or the copy has stopped: whether the copy is complete. The core is notified
    /// one step later.
    over: Option<bool>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Good,
    /// Fails before it copies this page.
    Fails(usize),
    /// Fails before it copies this page, because its rank fails for a while.
    FailsWithRank(usize),
    /// This page of the source fails its checksum, as a copy finds when it reads the page.
    BadSource(usize),
    /// The disk does not read or write this page.
    DiskError(usize),
    /// Takes the request timeout for each page, so that it may miss its deadline.
    Slow,
    /// Stops for ever after half of its pages, rounded down.
    Stuck,
}

/// The copies that run in one process.
#[derive(Debug)]
pub(super) struct RunningCopies {
    worker: WorkerId,
    incarnation: u32,
    running: BTreeMap<TransferId, RunningCopy>,
}

impl RunningCopies {
    pub(super) fn new(worker: WorkerId, incarnation: u32) -> Self {
        Self {
            worker,
            incarnation,
            running: BTreeMap::new(),
        }
    }

    /// True when a copy that never ends has copied at least one page.
    pub(super) fn has_stuck(&self) -> bool {
        self.running
            .values()
            .any(|running| running.fate == Fate::Stuck && running.done > 0)
    }

    pub(super) fn stop(&mut self, transfer: TransferId) {
        if let Some(running) = self.running.get_mut(&transfer) {
            running.stop = true;
        }
    }

    pub(super) fn start(&mut self, env: &mut SimContext, copy: Transfer) {
        let shape = match copy.device {
            Some(device) => env.memory(device.engine).shape,
            None => SimContext::shape(copy.page_bytes, [0; 16]),
        };
        let pairs = copy.pairs.iter();
        let pages: Vec<(u32, u32)> = pairs
            .flat_map(|pair| pair.src.iter_pages().zip(pair.dst.iter_pages()))
            .collect();
        let fate = self.fate(env, (&copy, shape), pages.len());
        env.counts.copies += 1;
        let of_disk = copy.edge.touches(TierId::Disk);
        let pace = match fate {
            Fate::Slow => env.setup.request_timeout,
            _ if of_disk => env.setup.page_time.mul_f64(env.setup.disk.pace),
            _ => env.setup.page_time,
        };
        let sums = (copy.edge.from == TierId::Disk).then(|| {
            let disk = env.disk_of(self.worker.rank);
            let sum = |(page, _): &(u32, u32)| disk.as_ref()?.sum(*page);
            pages.iter().map(sum).collect()
        });
        self.touch(env, (&copy, shape), &pages, PageAccesses::begin);
        let transfer = copy.id;
        let running = RunningCopy {
            copy,
            shape,
            pages,
            done: 0,
            stop: false,
            fate,
            pace,
            held: false,
            begun: env.now(),
            sums,
            written: Vec::new(),
            failure: None,
            over: None,
        };
        let complete = pace * u32::try_from(running.pages.len()).unwrap_or(u32::MAX);
        self.running.insert(transfer, running);
        self.tear(env, transfer);
        self.go_on(env, transfer, pace);
        env.leader_may_die(complete);
    }

    fn fate(&self, env: &mut SimContext, (copy, shape): (&Transfer, Shape), pages: usize) -> Fate {
        let chances = env.net.chances;
        env.spoil_page(copy, shape, self.worker.rank, pages);
        if copy.edge.touches(TierId::Disk) {
            let (chance, fault) = match copy.edge.from {
                TierId::Disk => (env.setup.disk.read_error, Fault::DiskReadError),
                _ => (env.setup.disk.write_error, Fault::DiskWriteError),
            };
            if env.rng.u32(0..1_000_000) < chance && !env.closing {
                env.faults.injected(fault);
                return Fate::DiskError(env.rng.usize(0..pages));
            }
        }
        let dice = env.rng.u32(0..1_000_000);
        if env
            .failing
            .is_some_and(|(rank, until)| rank == self.worker.rank && env.now() < until)
        {
            env.faults.injected(Fault::RankFailure);
            if copy.edge.to != TierId::Device {
                env.faults.took_effect(Fault::RankFailure);
            }
            return Fate::FailsWithRank(env.rng.usize(0..=pages));
        }
        if dice < chances.copy_error {
            env.faults.injected(Fault::CopyError);
            return Fate::Fails(env.rng.usize(0..=pages));
        }
        if dice < chances.copy_error + chances.copy_late {
            env.faults.injected(Fault::CopyLate);
            return Fate::Slow;
        }
        if dice < chances.copy_error + chances.copy_late + chances.copy_stuck {
            env.faults.injected(Fault::CopyStuck);
            return Fate::Stuck;
        }
        Fate::Good
    }

    /// Notes for the checker that the copy begins or ends to touch its pages.
    fn touch(
        &self,
        env: &mut SimContext,
        (copy, shape): (&Transfer, Shape),
        pages: &[(u32, u32)],
        with: fn(&mut PageAccesses, &TouchedPages<'_>),
    ) {
        let touched = TouchedPages {
            worker: self.worker,
            shard: env.setup.sharding.of(self.worker.rank),
            incarnation: self.incarnation,
            copy,
            pages,
            cells: shape.cells,
        };
        with(&mut env.oracle.touched, &touched);
        env.check_touched();
    }

    /// Marks the next page of a copy as half written. Before that, a disk makes durable that the page is not listed.
    fn tear(&mut self, env: &mut SimContext, transfer: TransferId) {
        let Some(running) = self.running.get_mut(&transfer) else {
            return;
        };
        if let Some((_, destination)) = running.pages.get(running.done) {
            let (now, lies) = (env.now(), env.lies(Lie::LateRemoval));
            if running.copy.edge.to == TierId::Disk
                && let Some(disk) = env.disk_of(self.worker.rank)
                && let Err(failure) = disk.prepare(*destination, now, lies)
            {
                running.failure = Some(failure);
                return;
            }
            env.write(
                &running.copy,
                running.shape,
                self.worker.rank,
                *destination,
                TORN,
            );
        }
    }

    fn go_on(&self, env: &mut SimContext, transfer: TransferId, pace: Duration) {
        let late = pace.mul_f64(0.5 + env.rng.f64());
        let (worker, incarnation) = (self.worker, self.incarnation);
        let at = env.now() + late;
        env.queue.push(
            at,
            SimEvent::CopyStep {
                worker,
                incarnation,
                transfer,
            },
        );
    }

    /// Notes that the process was paused: its running copies may continue after their deadlines.
    pub(super) fn resumed(&mut self) {
        self.running
            .values_mut()
            .for_each(|running| running.held = true);
    }

    /// Copies one more page, or ends the copy. Returns the end of a copy one step after its last byte.
    pub(super) fn step(
        &mut self,
        env: &mut SimContext,
        transfer: TransferId,
    ) -> Option<(EndedCopy, Option<DiskFailure>)> {
        let now = env.now();
        let rank = self.worker.rank;
        let running = self.running.get_mut(&transfer)?;
        if let Some(complete) = running.over {
            return self.ended(env, transfer, complete);
        }
        let stuck = running.fate == Fate::Stuck && running.done == running.pages.len() / 2;
        if stuck {
            return None;
        }
        if running.done < running.pages.len() {
            running.ask_disk(env, rank);
        }
        let fails = running.failure.is_some()
            || matches!(running.fate, Fate::Fails(at) | Fate::FailsWithRank(at) | Fate::BadSource(at) if at == running.done);
        let stops = running.stop && running.done.is_multiple_of(env.setup.granule);
        let over = stops || fails || running.done == running.pages.len();
        if !over {
            let (source, destination) = running.pages[running.done];
            if running.held && now > running.copy.deadline {
                env.faults.injected(Fault::LateWriter);
                env.faults.took_effect(Fault::LateWriter);
            }
            let shape = running.shape;
            let content = env.read(&running.copy, shape, rank, source);
            env.write(&running.copy, shape, rank, destination, content);
            running.written.push(content);
            running.done += 1;
            let pace = running.pace;
            self.tear(env, transfer);
            self.go_on(env, transfer, pace);
            return None;
        }
        let complete = running.done == running.pages.len() && !fails;
        match running.fate {
            Fate::Fails(_) if !complete => env.faults.took_effect(Fault::CopyError),
            Fate::BadSource(_) if !complete => env.faults.took_effect(Fault::BadSource),
            Fate::DiskError(_) if running.failure.is_some() => {
                env.faults
                    .took_effect(match running.copy.edge.from == TierId::Disk {
                        true => Fault::DiskReadError,
                        false => Fault::DiskWriteError,
                    });
            }
            Fate::Slow if !complete || now > running.copy.deadline => {
                env.faults.took_effect(Fault::CopyLate)
            }
            _ => {}
        }
        running.over = Some(complete);
        let pace = running.pace.min(env.setup.page_time);
        self.go_on(env, transfer, pace);
        None
    }

    /// Ends a copy: it no longer reads or writes.
    fn ended(
        &mut self,
        env: &mut SimContext,
        transfer: TransferId,
        complete: bool,
    ) -> Option<(EndedCopy, Option<DiskFailure>)> {
        let running = self.running.remove(&transfer)?;
        let copy = (&running.copy, running.shape);
        self.touch(env, copy, &running.pages, PageAccesses::end);
        let (edge, pages) = (running.copy.edge, running.done as u64);
        match running.copy.device {
            None if edge.to > edge.from => env.counts.pages_down += pages,
            None => env.counts.pages_up += pages,
            Some(_) => {}
        }
        if complete
            && edge.to == TierId::Disk
            && let Some(disk) = env.disk_of(self.worker.rank)
        {
            disk.written(transfer, running.written);
        }
        let unread = edge.from == TierId::Disk && running.fate == Fate::DiskError(running.done);
        let bad =
            running.fate == Fate::BadSource(running.done) || unread && env.setup.disk.unread_is_bad;
        let place =
            matches!(running.fate, Fate::DiskError(at) | Fate::BadSource(at) if at == running.done);
        let faulty = place && edge.touches(TierId::Disk);
        let copy_us = env.now() - running.begun;
        let ended = EndedCopy {
            complete_pages: u32::try_from(running.done).unwrap_or(0),
            bytes: running.done as u64 * u64::from(running.shape.cells) * CELL_BYTES,
            copy_us: u64::try_from(copy_us.as_micros()).unwrap_or(u64::MAX),
            bad_source: !complete && bad,
            faulty_page: (!complete && faulty).then_some(u32::try_from(running.done).unwrap_or(0)),
            ..EndedCopy::new(transfer, complete || env.lies(Lie::SwallowError))
        };
        Some((ended, running.failure))
    }
}

impl RunningCopy {
    /// Finds out what the next page meets: a source that fails its checksum, or a disk that fails.
    fn ask_disk(&mut self, env: &mut SimContext, rank: Rank) {
        let (now, edge) = (env.now(), self.copy.edge);
        let (source, _) = self.pages[self.done];
        let content = env.read(&self.copy, self.shape, rank, source);
        let unchecked = env.lies(Lie::UncheckedSource);
        let bad = match &self.sums {
            Some(sums) => sums[self.done] != Some(content) && !unchecked,
            None => env.is_bad(&self.copy, rank, self.done),
        };
        let disk = env.disk_of(rank).filter(|_| edge.touches(TierId::Disk));
        let away = disk.is_some_and(|disk| !disk.works(now));
        if away || self.fate == Fate::DiskError(self.done) {
            self.failure.get_or_insert(DiskFailure::Io);
        } else if bad {
            self.fate = Fate::BadSource(self.done);
        }
    }
}
