//! The disk tier of a worker: a thread of its own that opens sets, flushes them and carries out resets, and the threads of
//! the copies.
//!
//! One process at a time has a shard's directory open. The thread takes its lock as soon as the process before has ended.
//! A disk that fails is closed and opened again until that succeeds; meanwhile the worker has no pages there.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, Sender, bounded};

use kvferry_memory::Depot;
use kvferry_tiers::disk::scrub::Scrub;
use kvferry_tiers::disk::{
    DiskCopier, DiskCopy, DiskCopyEnd, DiskDirectories, DiskIo, DiskSet, DiskTier, FLUSH_AFTER,
    SetKey,
};
use kvferry_transport::SharedLogLimit;
use kvferry_types::{
    DepotId, Epoch, LinkId, PageRun, Record, RequestId, Scope, Stored, Transfer, TransferId,
};

/// Commands that may wait for the thread.
const COMMANDS_MAX: usize = 64;
/// Flushes of leaders that wait for the thread, at most: as many as a leader has open.
const FLUSHES_MAX: usize = kvferry_core::FLUSHES_OPEN_MAX;
/// Pause between two attempts to take the lock of the directory.
const LOCK_EVERY: Duration = Duration::from_millis(100);
/// Pause between two attempts to open a disk that failed.
const OPEN_EVERY: Duration = Duration::from_secs(2);
/// Failed reads or writes in a row after which the disk is closed.
const FAILURES_MAX: u32 = 3;
/// How long the end of a worker waits for the last flush.
const CLOSE_LIMIT: Duration = Duration::from_secs(8);

/// Pause between two attempts to use more of a disk that was full.
const GROW_EVERY: Duration = Duration::from_secs(60);

static FAILED: SharedLogLimit = SharedLogLimit::new();

/// The disk tier that a worker may use.
#[derive(Debug, Clone)]
pub struct DiskSettings {
    /// The directories.
    pub directories: DiskDirectories,
    /// The shard of this worker.
    pub shard: u16,
    /// Number of shards.
    pub shards: u16,
    /// Pages in the largest block.
    pub ratio: u32,
    /// Bytes that all files of this shard may use.
    pub cap_bytes: u64,
    /// Reads and writes in flight.
    pub depth: usize,
    /// How they are submitted.
    pub io: DiskIo,
    /// Bytes a second that the scrub reads; 0 for no scrub.
    pub scrub_bytes_per_s: u64,
}

/// A report of the disk's threads.
#[derive(Debug)]
pub(super) enum DiskReport {
    /// The set of a key is open.
    Opened(SetKey, Arc<DiskSet>),
    /// A copy has ended.
    Ended(DiskCopyEnd),
    /// A reset was carried out durably, or not.
    Reset(Scope, Stored, Result<(), String>),
    /// What had been written is durable, or not. One report for each command, in their order.
    Flushed(Result<(), String>),
    /// The disk failed: its set is closed.
    Failed(String),
    /// A disk that was full has room again.
    Grown,
}

enum Command {
    Open(SetKey),
    Reset(Scope, Stored),
    Flush,
    /// Close the set without a flush, because the disk fails.
    Fail,
    End(Sender<()>),
}

/// A leader's request to flush: its connection, the request, and the number of the flush.
pub(super) type FlushOrder = (LinkId, RequestId, u64);

type Report = Arc<dyn Fn(DiskReport) + Send + Sync>;

/// The reset that is being carried out, or was last.
#[derive(Debug, Default)]
enum ResetState {
    #[default]
    None,
    Running(Scope, Stored),
    Ended(Scope, Stored, Result<(), String>),
}

/// How far a reset has come.
pub(super) enum ResetProgress {
    Running,
    Ended(Result<(), String>),
}

/// The disk tier as the worker's actor sees it. No call blocks.
pub(super) struct Disk {
    settings: DiskSettings,
    commands: Sender<Command>,
    copier: DiskCopier,
    thread: Option<JoinHandle<()>>,
    /// The key of the registered memory.
    wanted: Option<SetKey>,
    /// The key that the thread opens, and opens again after a failure.
    requested: Option<SetKey>,
    /// The set that is open.
    open: Option<(SetKey, Arc<DiskSet>)>,
    running: BTreeSet<TransferId>,
    /// Copies in a row that the disk has failed.
    failures: u32,
    reset: ResetState,
    /// Flushes that the thread carries out, in their order.
    flushes: VecDeque<FlushOrder>,
    /// The last reading of the inventory.
    reading: (Epoch, u64),
    /// Why the tier is closed.
    problem: Option<String>,
}

impl Disk {
    pub(super) fn start(settings: DiskSettings, report: Report) -> std::io::Result<Self> {
        let (commands, received) = bounded(COMMANDS_MAX);
        let to = Arc::clone(&report);
        let copier = DiskCopier::start((settings.depth, settings.io), move |end| {
            to(DiskReport::Ended(end))
        })?;
        let thread = std::thread::Builder::new().name("kvferry-disk-tier".to_owned());
        let of_thread = settings.clone();
        let thread = thread.spawn(move || run(&of_thread, &received, &report))?;
        Ok(Self {
            settings,
            commands,
            copier,
            thread: Some(thread),
            wanted: None,
            requested: None,
            open: None,
            running: BTreeSet::new(),
            failures: 0,
            reset: ResetState::None,
            flushes: VecDeque::new(),
            reading: (Epoch(0), 0),
            problem: None,
        })
    }

    /// Id of the depot: that of the directory, whether this process has it open or not.
    pub(super) fn depot(&self) -> DepotId {
        self.settings.directories.depot(self.settings.shard)
    }

    /// The newest leader of which the open set has pages.
    pub(super) fn last_epoch(&self) -> Epoch {
        let newest = self.open.as_ref().map(|(_, set)| set.newest().epoch);
        newest.unwrap_or_default().max(self.reading.0)
    }

    /// The set whose pages have this size, if it is open and wanted.
    pub(super) fn set(&self, page_bytes: u64) -> Option<&Arc<DiskSet>> {
        let (key, set) = self.open.as_ref()?;
        let wanted = self.wanted == Some(*key) && key.page_bytes == page_bytes;
        wanted.then_some(set)
    }

    /// Opens the set for pages of this layout, once no copy uses another one.
    pub(super) fn want(&mut self, layout: [u8; 16], page_bytes: u64) {
        let key = SetKey {
            layout,
            page_bytes,
            ratio: self.settings.ratio,
            shards: self.settings.shards,
        };
        if self.wanted != Some(key) {
            self.wanted = Some(key);
            self.running.iter().for_each(|copy| self.copier.stop(*copy));
            self.open_wanted();
        }
    }

    /// Requests the wanted set from the thread, unless that was done or copies still use another one.
    fn open_wanted(&mut self) {
        if self.requested == self.wanted || !self.running.is_empty() {
            return;
        }
        if let Some(key) = self.wanted {
            self.open = None;
            if self.send(Command::Open(key)) {
                self.requested = self.wanted;
            }
        }
    }

    /// Returns false if the thread takes no command, because a call of the disk does not return.
    fn send(&self, command: Command) -> bool {
        let sent = self.commands.try_send(command).is_ok();
        if !sent {
            tracing::error!("the disk is silent: its thread takes no commands");
        }
        sent
    }

    /// Notes that a set was opened. Returns false if another one is wanted by now.
    pub(super) fn opened(&mut self, key: SetKey, set: Arc<DiskSet>) -> bool {
        let wanted = self.wanted == Some(key);
        if wanted {
            self.open = Some((key, set));
            self.problem = None;
            self.failures = 0;
        }
        wanted
    }

    /// Notes that the disk failed. Returns whether it had a set open.
    pub(super) fn failed(&mut self, why: String) -> bool {
        // Logs a reason once, and not for every attempt that fails for it.
        if self.problem.as_ref() != Some(&why) {
            tracing::error!(why, "the disk tier is closed");
            self.problem = Some(why);
        }
        self.open.take().is_some()
    }

    /// Begins a copy between host memory and the open set. Returns false if there is none for pages of this size.
    pub(super) fn copy(&mut self, transfer: Transfer, depot: Arc<Depot>) -> bool {
        let Some(set) = self.set(transfer.page_bytes).cloned() else {
            return false;
        };
        self.running.insert(transfer.id);
        self.copier.copy(DiskCopy {
            transfer,
            depot,
            set,
        });
        true
    }

    pub(super) fn stop(&self, transfer: TransferId) {
        if self.running.contains(&transfer) {
            self.copier.stop(transfer);
        }
    }

    /// Notes the end of a copy. Returns true if the disk has fewer pages from now on, because it is full.
    pub(super) fn ended(&mut self, end: &DiskCopyEnd) -> bool {
        let transfer = end.ended.transfer;
        self.running.remove(&transfer);
        let mut full_now = false;
        match &end.error {
            Some(error) => {
                if let Some(left_out) = FAILED.line() {
                    tracing::warn!(%transfer, %error, left_out, "the disk failed a copy");
                }
                // A full disk still serves what it has.
                let full = matches!(
                    error.kind(),
                    std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded
                );
                self.failures += u32::from(!full);
                full_now = full;
            }
            None if end.ended.complete => self.failures = 0,
            None => {}
        }
        if self.failures >= FAILURES_MAX && self.open.is_some() {
            self.running.iter().for_each(|copy| self.copier.stop(*copy));
            // Without the command the next failed copy tries again.
            self.failures = if self.send(Command::Fail) {
                0
            } else {
                FAILURES_MAX
            };
        } else {
            self.open_wanted();
        }
        let set = self.open.as_ref().filter(|_| full_now).map(|(_, set)| set);
        let shorter = set.is_some_and(|set| set.shrink());
        if let Some(set) = set.filter(|_| shorter) {
            let pages = set.capacity_pages();
            tracing::warn!(pages, "the disk has less room than g3: it uses what it has");
        }
        shorter
    }

    pub(super) fn unlist(&self, run: PageRun) {
        if let Some((_, set)) = &self.open {
            set.unlist(run);
        }
    }

    pub(super) fn list(&self, record: &Record) {
        let Some((_, set)) = &self.open else {
            return;
        };
        if let Err(error) = set.list(record) {
            tracing::error!(%error, "moved pages are not listed");
        }
    }

    /// Notes a reading of the inventory. Returns false if a later one came before.
    pub(super) fn begin_reading(&mut self, reading: (Epoch, u64)) -> bool {
        let current = reading >= self.reading;
        self.reading = self.reading.max(reading);
        current
    }

    /// Begins a reset, or tells how far it has come.
    pub(super) fn reset(&mut self, scope: &Scope, through: Stored) -> ResetProgress {
        match std::mem::take(&mut self.reset) {
            ResetState::Ended(of, at, result) if of == *scope && at == through => {
                return ResetProgress::Ended(result);
            }
            ResetState::Running(of, at) => self.reset = ResetState::Running(of, at),
            ResetState::None | ResetState::Ended(..) => {
                if !self.send(Command::Reset(scope.clone(), through)) {
                    return ResetProgress::Ended(Err("the disk is silent".to_owned()));
                }
                self.reset = ResetState::Running(scope.clone(), through);
            }
        }
        ResetProgress::Running
    }

    /// Begins a flush, whose end is reported with [`DiskReport::Flushed`].
    pub(super) fn flush(&mut self, order: FlushOrder) -> Result<(), String> {
        if self.open.is_none() {
            let why = self.problem.as_deref().unwrap_or("it is being opened");
            return Err(format!("the disk is not open: {why}"));
        }
        if self.flushes.len() >= FLUSHES_MAX || !self.send(Command::Flush) {
            return Err("the disk is silent: it ends no flush".to_owned());
        }
        self.flushes.push_back(order);
        Ok(())
    }

    /// Notes the end of the flush that began first, and returns it.
    pub(super) fn flushed(&mut self) -> Option<FlushOrder> {
        self.flushes.pop_front()
    }

    pub(super) fn reset_ended(
        &mut self,
        scope: Scope,
        through: Stored,
        result: Result<(), String>,
    ) {
        self.reset = ResetState::Ended(scope, through, result);
    }

    /// Flushes and closes the set, within a limit. Blocks.
    pub(super) fn end(&mut self) {
        self.running.iter().for_each(|copy| self.copier.stop(*copy));
        self.open = None;
        let (ended, end) = bounded(1);
        let sent = self.commands.send_timeout(Command::End(ended), CLOSE_LIMIT);
        if sent.is_err() || end.recv_timeout(CLOSE_LIMIT).is_err() {
            tracing::warn!(
                "the disk did not end in {CLOSE_LIMIT:?}: its headers are read at the next start"
            );
            return;
        }
        if self
            .thread
            .take()
            .is_some_and(|thread| thread.join().is_err())
        {
            tracing::error!("the disk's thread panicked");
        }
    }
}

/// State of the thread.
struct Opener<'a> {
    settings: &'a DiskSettings,
    report: &'a Report,
    tier: Option<DiskTier>,
    wanted: Option<SetKey>,
    open: Option<Arc<DiskSet>>,
    /// The scrub of the open set.
    scrub: Option<Scrub>,
    /// When the wanted set is tried next.
    next_try: Instant,
    flushed: Instant,
    /// When a full disk is tried next.
    next_growth: Instant,
}

fn run(settings: &DiskSettings, commands: &Receiver<Command>, report: &Report) {
    let now = Instant::now();
    let mut opener = Opener {
        settings,
        report,
        tier: None,
        wanted: None,
        open: None,
        scrub: None,
        next_try: now,
        flushed: now,
        next_growth: now,
    };
    loop {
        match commands.recv_timeout(opener.pause()) {
            Ok(Command::Open(key)) => {
                opener.wanted = Some(key);
                opener.open = None;
                opener.scrub = None;
                opener.next_try = Instant::now();
            }
            Ok(Command::Reset(scope, through)) => {
                let result = opener.reset(&scope, through);
                report(DiskReport::Reset(scope, through, result));
            }
            Ok(Command::Flush) => report(DiskReport::Flushed(opener.flush())),
            Ok(Command::Fail) => opener.fail("reads or writes fail".to_owned()),
            Ok(Command::End(ended)) => {
                opener.end();
                if ended.send(()).is_err() {
                    tracing::debug!("the worker no longer waits for its disk");
                }
                return;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        opener.step();
    }
}

impl Opener<'_> {
    fn pause(&self) -> Duration {
        match (self.wanted.is_some() && self.open.is_none(), &self.open) {
            (true, _) => self.next_try.saturating_duration_since(Instant::now()),
            (false, Some(_)) => {
                let scrub = self.scrub.as_ref();
                let due = scrub.map(|scrub| scrub.due().saturating_duration_since(Instant::now()));
                due.map_or(FLUSH_AFTER / 4, |due| due.min(FLUSH_AFTER / 4))
            }
            (false, None) => OPEN_EVERY,
        }
    }

    fn step(&mut self) {
        let now = Instant::now();
        if self.open.is_none() && self.wanted.is_some() && self.next_try <= now {
            self.try_open();
        }
        match &self.open {
            Some(set) if set.is_short() && self.next_growth <= now => {
                self.next_growth = now + GROW_EVERY;
                if set.grow() {
                    tracing::info!("the disk has room again");
                    (self.report)(DiskReport::Grown);
                }
            }
            Some(set) if set.is_short() => {}
            _ => self.next_growth = now + GROW_EVERY,
        }
        if let Some(set) = &self.open
            && set.is_dirty()
            && now.duration_since(self.flushed) >= FLUSH_AFTER / 2
        {
            if let Err(why) = self.flush() {
                tracing::debug!(why, "the periodic flush failed");
            }
        }
        self.scrub(now);
    }

    /// Verifies the next pages of the open set, if it is time. Pages that have changed are unlisted here; the leader
    /// removes them when it has them read, and a worker refuses pages that are not listed.
    fn scrub(&mut self, now: Instant) {
        let (Some(set), Some(scrub)) = (&self.open, &mut self.scrub) else {
            return;
        };
        let step = scrub.step(set, now);
        for run in step.removed {
            tracing::error!(
                page = run.start,
                removed = run.count,
                "a page on the disk has changed: it is not served"
            );
        }
        if let Some(error) = step.error {
            tracing::error!(%error, "the disk does not read a page");
        }
        if let Some(pass) = step.ended {
            tracing::info!(?pass, "all pages on the disk are verified");
        }
    }

    /// Makes durable what is listed. A disk that fails is closed.
    fn flush(&mut self) -> Result<(), String> {
        let Some(tier) = self.tier.as_ref().filter(|_| self.open.is_some()) else {
            return Err("the disk is not open".to_owned());
        };
        let flushed = tier.flush();
        self.flushed = Instant::now();
        flushed.map_err(|error| {
            let why = format!("cannot flush: {error}");
            self.fail(why.clone());
            why
        })
    }

    /// Takes the lock, unless this process has it. Returns false while another process has it.
    fn take(&mut self) -> Result<bool, String> {
        if self.tier.is_none() {
            let DiskSettings {
                directories,
                shard,
                cap_bytes,
                ..
            } = self.settings;
            let taken = DiskTier::take(directories, *shard, *cap_bytes);
            self.tier = taken.map_err(|error| error.to_string())?;
        }
        Ok(self.tier.is_some())
    }

    fn try_open(&mut self) {
        let Some(key) = self.wanted else {
            return;
        };
        match self.take() {
            Ok(true) => {}
            Ok(false) => {
                self.next_try = Instant::now() + LOCK_EVERY;
                return;
            }
            Err(why) => return self.fail(why),
        }
        let Some(tier) = &self.tier else {
            return;
        };
        let begun = Instant::now();
        let shown = std::cell::Cell::new(begun);
        let progress = |done: u64, all: u64| {
            if shown.get().elapsed() >= Duration::from_secs(1) {
                shown.set(Instant::now());
                tracing::info!(done, all, "reading the headers of the disk");
            }
        };
        match tier.open(key, &progress) {
            Ok((set, found)) => {
                let ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
                let pages = set.capacity_pages();
                tracing::info!(pages, ?found, ms, "disk open");
                if pages == 0 {
                    let cap = self.settings.cap_bytes;
                    tracing::warn!(
                        cap,
                        "g3 has no room for the pages of one segment of this model: give it more"
                    );
                }
                self.scrub = Scrub::new(&set, self.settings.scrub_bytes_per_s, Instant::now());
                self.open = Some(Arc::clone(&set));
                (self.report)(DiskReport::Opened(key, set));
            }
            Err(error) => self.fail(format!("cannot open the pages of this layout: {error}")),
        }
    }

    /// Closes the set of a disk that fails, and tries again later.
    fn fail(&mut self, why: String) {
        self.open = None;
        self.scrub = None;
        // Without a flush: what the disk has is read again.
        self.tier = None;
        self.next_try = Instant::now() + OPEN_EVERY;
        (self.report)(DiskReport::Failed(why));
    }

    fn reset(&mut self, scope: &Scope, through: Stored) -> Result<(), String> {
        if !self.take()? {
            return Err("another process has the disk open".to_owned());
        }
        let reset = self.tier.as_ref().map(|tier| tier.reset(scope, through));
        reset.unwrap_or(Ok(())).map_err(|error| {
            let why = format!("the reset is not durable on the disk: {error}");
            self.fail(why.clone());
            why
        })
    }

    fn end(&mut self) {
        if let Some(tier) = &self.tier
            && let Err(error) = tier.close()
        {
            tracing::warn!(%error, "the disk was not closed cleanly: its headers are read at the next start");
        }
    }
}
