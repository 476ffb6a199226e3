//! The disk of a simulated worker: what the live worker's actor and its disk thread do, in virtual time.

use std::collections::BTreeSet;
use std::time::Duration;

use super::super::disk::{DiskFailure, SetKey, SimDisk};
use super::super::faults::Fault;
use super::super::saboteur::Lie;
use super::super::setup::CELL_BYTES;
use super::super::{SimContext, SimEvent};
use super::copies::RunningCopies;
use kvferry_protocol::{ErrorBody, ErrorCode, Inventory, ReadInventory};
use kvferry_shell::Unlisted;
use kvferry_types::{
    EndedCopy, Epoch, LinkId, PageRun, Record, RequestId, Scope, Stored, TierLayout, TransferId,
    WorkerId,
};

/// Failed copies in a row after which the disk is closed.
const FAILURES_MAX: u32 = 3;

/// A step of a worker's disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) enum DiskStep {
    /// Open the wanted set. A later attempt has a higher number.
    Open(u64),
    /// Close the set, because reads or writes fail.
    Fail,
    /// Write the headers that have changed.
    Write,
    /// Make durable what was written.
    Sync,
    /// Carry out the reset that waits.
    Reset,
    /// Carry out the flushes that wait.
    Flush,
    /// Try to use more of a disk that was full.
    Grow,
    /// Report copies that could not start.
    Refused,
    /// Report that the set was closed for another worker.
    Released,
}

/// What a worker does after a step.
#[derive(Debug, Default)]
pub(super) struct DiskReport {
    /// Copies that have ended.
    pub(super) ended: Vec<EndedCopy>,
    /// The disk has another number of pages.
    pub(super) changed: bool,
    /// The reset has ended.
    pub(super) reset: bool,
    /// Flushes that have ended, and whether everything is durable.
    pub(super) flushed: Vec<(FlushOrder, bool)>,
}

/// A leader's request to flush: its connection, the request, and the number of the flush.
pub(super) type FlushOrder = (LinkId, RequestId, u64);

#[derive(Debug, Default)]
enum ResetState {
    #[default]
    None,
    Running(Scope, Stored),
    Ended(Scope, Stored, Result<(), String>),
}

/// The disk as a worker's process sees it.
#[derive(Debug)]
pub(super) struct DiskSide {
    id: WorkerId,
    incarnation: u32,
    /// The set of the registered memory.
    wanted: Option<SetKey>,
    /// The set that is opened, and opened again after a failure.
    requested: Option<SetKey>,
    /// The set that is open.
    open: Option<SetKey>,
    attempts: u64,
    running: BTreeSet<TransferId>,
    refused: Vec<EndedCopy>,
    failures: u32,
    failing: bool,
    flushing: bool,
    growing: bool,
    reset: ResetState,
    flushes: Vec<FlushOrder>,
    reading: (Epoch, u64),
}

impl DiskSide {
    pub(super) fn new(id: WorkerId, incarnation: u32) -> Self {
        Self {
            id,
            incarnation,
            wanted: None,
            requested: None,
            open: None,
            attempts: 0,
            running: BTreeSet::new(),
            refused: Vec::new(),
            failures: 0,
            failing: false,
            flushing: false,
            growing: false,
            reset: ResetState::None,
            flushes: Vec::new(),
            reading: (Epoch(0), 0),
        }
    }

    fn process(&self) -> (WorkerId, u32) {
        (self.id, self.incarnation)
    }

    fn disk<'a>(&self, env: &'a mut SimContext) -> Option<&'a mut SimDisk> {
        env.disk_of(self.id.rank)
    }

    fn later(&self, env: &mut SimContext, wait: Duration, step: DiskStep) {
        let at = env.now() + wait.mul_f64(0.5 + env.rng.f64());
        let event = SimEvent::Disk {
            worker: self.id,
            incarnation: self.incarnation,
            step,
        };
        env.queue.push(at, event);
    }

    /// True if the set whose pages have this size is open and wanted.
    fn has(&self, page_bytes: u64) -> bool {
        let size = |key: &SetKey| u64::from(key.cells) * CELL_BYTES == page_bytes;
        self.open.filter(size).is_some() && self.open == self.wanted
    }

    /// Pages of this size that the worker states.
    pub(super) fn pages(&self, env: &SimContext, page_bytes: u64) -> u32 {
        let disk = env.disks.get(env.depot_of(self.id.rank));
        let disk = disk.filter(|_| self.has(page_bytes));
        disk.map_or(0, SimDisk::capacity_pages)
    }

    /// The newest leader of which the open set has pages.
    pub(super) fn last_epoch(&self, env: &SimContext) -> Epoch {
        let disk = env.disks.get(env.depot_of(self.id.rank));
        let disk = disk.filter(|_| self.open.is_some());
        disk.map_or(Epoch(0), SimDisk::newest).max(self.reading.0)
    }

    /// The pages of the set that is open or being opened.
    pub(super) fn layout(&self) -> Option<TierLayout> {
        self.wanted.map(|key| TierLayout {
            page_bytes: u64::from(key.cells) * CELL_BYTES,
            layout_fingerprint: key.layout,
        })
    }

    /// Opens the set for these pages, once no copy uses another one.
    pub(super) fn want(
        &mut self,
        env: &mut SimContext,
        copies: &mut RunningCopies,
        layout: TierLayout,
    ) {
        let key = SetKey {
            layout: layout.layout_fingerprint,
            cells: u32::try_from(layout.page_bytes / CELL_BYTES).unwrap_or(1),
        };
        if self.wanted != Some(key) {
            self.wanted = Some(key);
            self.running.iter().for_each(|copy| copies.stop(*copy));
            self.open_wanted(env);
        }
    }

    /// No engine's memory is registered: a worker of another replica may open the disk.
    pub(super) fn leave(&mut self, env: &mut SimContext, copies: &mut RunningCopies) {
        if self.wanted.is_none() || (self.open.is_some() && env.setup.replicas == 1) {
            return;
        }
        self.end(env);
        self.wanted = None;
        self.requested = None;
        if self.open.take().is_some() {
            self.later(env, Duration::from_micros(5), DiskStep::Released);
        }
        self.running.iter().for_each(|copy| copies.stop(*copy));
        // An attempt to open the set that is scheduled has no effect.
        self.attempts += 1;
    }

    fn open_wanted(&mut self, env: &mut SimContext) {
        if self.requested == self.wanted || !self.running.is_empty() {
            return;
        }
        self.open = None;
        self.requested = self.wanted;
        let first = env.setup.disk.opens_in;
        self.attempt(env, first);
    }

    fn attempt(&mut self, env: &mut SimContext, wait: Duration) {
        self.attempts += 1;
        self.later(env, wait, DiskStep::Open(self.attempts));
    }

    /// Begins a move from or to the disk, of pages before `end`. Returns false if its set is not open, or has no such pages:
    /// the move has ended.
    pub(super) fn begin(
        &mut self,
        env: &mut SimContext,
        copy: TransferId,
        (page_bytes, end): (u64, u64),
    ) -> bool {
        if end > u64::from(self.pages(env, page_bytes)) {
            if self.refused.is_empty() {
                self.later(env, Duration::from_micros(5), DiskStep::Refused);
            }
            self.refused.push(EndedCopy::failed(copy));
            return false;
        }
        self.running.insert(copy);
        let (worker, incarnation) = self.process();
        if let Some(disk) = self.disk(env) {
            disk.begin_copy((worker, incarnation, copy));
        }
        true
    }

    /// Notes the end of a move. Returns true if the disk has fewer pages from now on.
    pub(super) fn ended(
        &mut self,
        env: &mut SimContext,
        copies: &mut RunningCopies,
        ended: &EndedCopy,
        failure: Option<DiskFailure>,
    ) -> bool {
        if !self.running.remove(&ended.transfer) {
            return false;
        }
        let (worker, incarnation) = self.process();
        let Some(disk) = self.disk(env) else {
            return false;
        };
        disk.end_copy((worker, incarnation, ended.transfer));
        match failure {
            Some(DiskFailure::Io) => self.failures += 1,
            None if ended.complete => self.failures = 0,
            _ => {}
        }
        let full = failure == Some(DiskFailure::Full) && self.open.is_some();
        let shorter = full && self.disk(env).is_some_and(SimDisk::shrink);
        if self.failures >= FAILURES_MAX && self.open.is_some() {
            self.running.iter().for_each(|copy| copies.stop(*copy));
            self.failures = 0;
            self.fail_soon(env);
        } else {
            self.open_wanted(env);
        }
        if full {
            self.grow_later(env);
        }
        if shorter {
            env.faults.took_effect(Fault::DiskFull);
        }
        shorter
    }

    fn fail_soon(&mut self, env: &mut SimContext) {
        if !std::mem::replace(&mut self.failing, true) {
            self.later(env, Duration::from_micros(50), DiskStep::Fail);
        }
    }

    fn grow_later(&mut self, env: &mut SimContext) {
        if !std::mem::replace(&mut self.growing, true) {
            let every = env.setup.disk.grow_every;
            self.later(env, every, DiskStep::Grow);
        }
    }

    /// Schedules a flush if the headers have changed.
    pub(super) fn flush_later(&mut self, env: &mut SimContext) {
        let dirty = self.open.is_some() && self.disk(env).is_some_and(|disk| disk.is_dirty());
        if dirty && !std::mem::replace(&mut self.flushing, true) {
            let after = env.setup.disk.flush_after / 2;
            self.later(env, after, DiskStep::Write);
        }
    }

    /// A part of the inventory. Without an open set nothing is listed.
    pub(super) fn part(
        &mut self,
        env: &mut SimContext,
        epoch: Epoch,
        read: &ReadInventory,
    ) -> Result<Inventory, ErrorBody> {
        let reading = (epoch, read.read_id);
        if reading < self.reading {
            let text = "a later reading of this depot has begun";
            return Err(ErrorBody::new(ErrorCode::Invalid, text));
        }
        self.reading = reading;
        let pages = env.setup.inventory_pages;
        let disk = self.disk(env).filter(|_| self.has(read.page_bytes));
        let disk =
            disk.ok_or_else(|| ErrorBody::new(ErrorCode::NotReady, "the disk is not open"))?;
        let end = read.from.saturating_add(pages);
        let next = (end < disk.capacity_pages()).then_some(end);
        Ok(Inventory::new(read, next, &disk.records(read.from..end)))
    }

    /// Lists pages that were written to the open set.
    pub(super) fn list(&mut self, env: &mut SimContext, record: &Record) {
        let open = self.open.is_some();
        if let Some(disk) = self.disk(env) {
            match open {
                true => disk.list(record),
                false => disk.leave_out(record),
            }
        }
        self.flush_later(env);
    }

    /// Removes pages of the open set.
    pub(super) fn unlist(&mut self, env: &mut SimContext, run: PageRun) {
        let open = self.open.is_some();
        if let Some(disk) = self.disk(env).filter(|_| open) {
            disk.unlist(run);
        }
        self.flush_later(env);
    }

    /// Begins a reset, or tells how far it has come.
    pub(super) fn reset(
        &mut self,
        env: &mut SimContext,
        scope: &Scope,
        through: Stored,
    ) -> Unlisted {
        match std::mem::take(&mut self.reset) {
            ResetState::Ended(of, at, result) if of == *scope && at == through => {
                return result.map_or_else(Unlisted::Failed, |()| Unlisted::Done);
            }
            ResetState::Running(of, at) => self.reset = ResetState::Running(of, at),
            ResetState::None | ResetState::Ended(..) => {
                self.reset = ResetState::Running(scope.clone(), through);
                self.later(env, Duration::from_micros(100), DiskStep::Reset);
            }
        }
        Unlisted::Later
    }

    /// Begins a flush that a leader has requested.
    pub(super) fn flush(&mut self, env: &mut SimContext, order: FlushOrder) {
        if self.flushes.is_empty() {
            self.later(env, Duration::from_micros(50), DiskStep::Flush);
        }
        self.flushes.push(order);
    }

    /// Ends the process cleanly: flushes the set.
    pub(super) fn end(&mut self, env: &mut SimContext) {
        let now = env.now();
        let process = self.process();
        let held = self.open.is_some();
        let disk = self.disk(env).filter(|disk| held && disk.works(now));
        if let Some(disk) = disk {
            disk.write_headers();
            disk.sync();
            disk.close(process);
        }
    }

    /// Makes a step.
    pub(super) fn step(&mut self, env: &mut SimContext, step: DiskStep) -> DiskReport {
        let mut report = DiskReport::default();
        let now = env.now();
        let works = self.disk(env).is_some_and(|disk| disk.works(now));
        match step {
            DiskStep::Open(attempt) if attempt == self.attempts => {
                report.changed = self.try_open(env);
            }
            DiskStep::Open(_) => {}
            DiskStep::Fail => {
                self.failing = false;
                report.changed = self.fail(env);
            }
            DiskStep::Write | DiskStep::Sync if self.open.is_none() => self.flushing = false,
            DiskStep::Write | DiskStep::Sync if !works => {
                self.flushing = false;
                report.changed = self.fail(env);
            }
            DiskStep::Write => {
                if let Some(disk) = self.disk(env) {
                    disk.write_headers();
                }
                let takes = env.setup.disk.flush_after / 4;
                self.later(env, takes, DiskStep::Sync);
                if env.rng.u32(0..1_000_000) < env.setup.disk.power_loss_in_flush {
                    let at = now + takes.mul_f64(env.rng.f64() / 2.0);
                    env.queue.push(at, SimEvent::PowerLoss);
                }
            }
            DiskStep::Sync => {
                self.flushing = false;
                if let Some(disk) = self.disk(env) {
                    disk.sync();
                }
            }
            DiskStep::Reset => {
                if let ResetState::Running(scope, through) = std::mem::take(&mut self.reset) {
                    let result = self.carry_out_reset(env, &scope, through);
                    if result == Err(DiskFailure::Io) {
                        report.changed = self.fail(env);
                    }
                    let result = result.map_err(|failure| format!("the disk: {failure:?}"));
                    self.reset = ResetState::Ended(scope, through, result);
                    report.reset = true;
                }
            }
            DiskStep::Flush => {
                let durable = works && self.open.is_some();
                let disk = self.disk(env).filter(|_| durable);
                if let Some(disk) = disk {
                    disk.write_headers();
                    disk.sync();
                } else if self.open.is_some() {
                    report.changed = self.fail(env);
                }
                let flushes = std::mem::take(&mut self.flushes).into_iter();
                report.flushed = flushes.map(|order| (order, durable)).collect();
            }
            DiskStep::Grow => {
                self.growing = false;
                let disk = self.disk(env).filter(|_| self.open.is_some());
                if let Some(disk) = disk.filter(|disk| disk.is_short()) {
                    report.changed = disk.grow(now);
                    match report.changed {
                        true => env.counts.disks_grown += 1,
                        false => self.grow_later(env),
                    }
                }
            }
            DiskStep::Refused => report.ended = std::mem::take(&mut self.refused),
            DiskStep::Released => report.changed = true,
        }
        self.flush_later(env);
        report
    }

    /// Takes the lock and opens the wanted set. Returns true if it is open.
    fn try_open(&mut self, env: &mut SimContext) -> bool {
        let (process, now) = (self.process(), env.now());
        let (locked_every, failed_every) = (env.setup.disk.lock_every, env.setup.disk.open_every);
        let Some((key, disk)) = self.requested.zip(self.disk(env)) else {
            return false;
        };
        if !disk.reaches(self.id, now) {
            env.faults.took_effect(Fault::DiskMissing);
            self.attempt(env, failed_every);
            return false;
        }
        if !disk.works(now) {
            disk.close(process);
            self.attempt(env, failed_every);
            return false;
        }
        // The lock of a segment is free once no copy of any process uses it.
        if disk.is_busy() || !disk.take(process, now) {
            self.attempt(env, locked_every);
            return false;
        }
        let found = disk.open(key);
        env.counts.disk_pages_found += found.whole;
        env.counts.disk_pages_lost += found.lost;
        env.oracle.opened_disk();
        env.decided = true;
        self.open = Some(key).filter(|_| self.wanted == Some(key));
        self.failures = 0;
        self.open.is_some()
    }

    /// Closes the set, and opens it again later. Returns true if it was open.
    fn fail(&mut self, env: &mut SimContext) -> bool {
        let (process, now) = (self.process(), env.now());
        let away = self.disk(env).is_some_and(|disk| !disk.works(now));
        if let Some(disk) = self.disk(env) {
            disk.close(process);
        }
        let was_open = self.open.take().is_some();
        if away && was_open {
            env.faults.took_effect(Fault::DiskAway);
        }
        if self.requested.is_some() {
            let every = env.setup.disk.open_every;
            self.attempt(env, every);
        }
        was_open
    }

    fn carry_out_reset(
        &mut self,
        env: &mut SimContext,
        scope: &Scope,
        through: Stored,
    ) -> Result<(), DiskFailure> {
        let (process, now) = (self.process(), env.now());
        let lies = env.lies(Lie::LoseMark);
        env.decided = true;
        let id = self.id;
        let Some(disk) = self.disk(env) else {
            return Ok(());
        };
        if !disk.works(now) || !disk.reaches(id, now) {
            return Err(DiskFailure::Io);
        }
        // Another process has the disk open.
        if !disk.take(process, now) {
            return Err(DiskFailure::Full);
        }
        disk.reset(scope, through, lies);
        Ok(())
    }
}
