//! The disk tier of a worker: a thread of its own that opens sets, flushes them and carries out resets, and the threads of
//! the copies.
//!
//! One process at a time has a shard's directory open. The thread takes its lock as soon as the process before has ended.
//! A disk degrades step by step. A place that fails is not used again while the set is open. A disk that takes no writes is
//! only read, and probed until it takes them. A disk that cannot be read is closed, and opened again until that succeeds;
//! meanwhile the worker has no pages there.

mod health;
mod opener;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam::channel::{Sender, bounded};

use kvferry_memory::Depot;
use kvferry_protocol::{DiskHealth, DiskStatus};
use kvferry_tiers::disk::format::Geometry;
use kvferry_tiers::disk::{
    DiskCopier, DiskCopy, DiskCopyEnd, DiskDirectories, DiskIo, DiskSet, SetKey, is_full,
    is_read_only,
};
use kvferry_transport::SharedLogLimit;
use kvferry_types::{
    ByteSize, DepotId, Epoch, LinkId, PageRun, QUARANTINED_PAGES_MAX, Record, RequestId, Scope,
    Stored, TierLayout, Transfer, TransferId,
};

use health::{DiskCounters, WrittenBytes};
use opener::run;

/// Commands that may wait for the thread.
const COMMANDS_MAX: usize = 64;
/// Flushes of leaders that wait for the thread, at most: as many as a leader has open.
const FLUSHES_MAX: usize = kvferry_core::FLUSHES_OPEN_MAX;
/// Failed reads in a row after which the disk is closed, and failed writes in a row after which it is only read.
const FAILURES_MAX: u32 = 3;
/// How long the end of a worker waits for the last flush.
const CLOSE_LIMIT: Duration = Duration::from_secs(8);

static FAILED: SharedLogLimit = SharedLogLimit::new();
static CHANGED: SharedLogLimit = SharedLogLimit::new();

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
    /// Whether workers of other replicas may open the shard's part of the disk.
    pub shared: bool,
    /// Whether the places of removed pages are given back to the disk when a set is opened.
    pub discard: bool,
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
    /// The set is closed, to be opened anew at once.
    OpensAnew,
    /// The set is closed, so that another worker can open it.
    Released,
    /// The disk takes no writes, and is only read.
    ReadOnly(String),
    /// Without a wanted set: the disk was found, and has at most the cap.
    Fits,
    /// The disk takes writes again.
    Writable,
    /// Time to report the state of the disk.
    Status,
    /// A disk that was full has room again.
    Grown,
}

enum Command {
    Open(SetKey),
    /// Close the set, and let another process take the lock.
    Release,
    Reset(Scope, Stored),
    Flush,
    /// Close the set without a flush, because the disk cannot be read.
    Fail(String),
    /// Write nothing, until the disk takes writes again.
    ReadOnly(WritesFail),
    End(Sender<()>),
}

/// A leader's request to flush: its connection, the request, and the number of the flush.
pub(super) type FlushOrder = (LinkId, RequestId, u64);

/// Why a disk is only read.
#[derive(Debug, Clone)]
struct WritesFail {
    why: String,
    /// What the disk holds is not certain: the set is opened anew before it is written again.
    anew: bool,
}

impl WritesFail {
    fn of(action: &str, error: &std::io::Error) -> Self {
        Self {
            why: format!("{action}: {error}"),
            anew: !is_full(error) && !is_read_only(error),
        }
    }
}

/// The reason why a cap has no room for pages.
fn too_small(settings: &DiskSettings, key: &SetKey) -> String {
    let disks = u16::try_from(settings.directories.count()).unwrap_or(u16::MAX);
    let of = |share: u64| ByteSize(share * u64::from(disks) * u64::from(settings.shards));
    let g3 = ByteSize(settings.cap_bytes * u64::from(settings.shards));
    match Geometry::smallest_share(key, disks) {
        Some(share) => format!(
            "g3 is {g3}, and a block of this model needs more room: give it {} or more",
            of(share)
        ),
        None => format!(
            "g3 is {g3}, and cannot hold pages of {} bytes",
            key.page_bytes
        ),
    }
}

/// The log line of a page that a load or the scrub found to have changed.
const CHANGED_TEXT: &str =
    "a page on the disk has changed since it was written: it is not served, and computed anew";

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
    /// Copies in a row whose reads failed.
    read_failures: u32,
    /// Copies in a row whose writes failed.
    write_failures: u32,
    /// Why the disk is only read.
    read_only: Option<String>,
    written: WrittenBytes,
    counters: Arc<DiskCounters>,
    reset: ResetState,
    /// Flushes that the thread carries out, in their order.
    flushes: VecDeque<FlushOrder>,
    /// The last reading of the inventory.
    reading: (Epoch, u64),
    /// Why the tier is closed.
    problem: Option<String>,
}

impl Disk {
    pub(super) fn start(mut settings: DiskSettings, report: Report) -> std::io::Result<Self> {
        // The thread opens them, and closes them when their disk fails.
        settings.directories.close();
        let (commands, received) = bounded(COMMANDS_MAX);
        let to = Arc::clone(&report);
        let copier = DiskCopier::start((settings.depth, settings.io), move |end| {
            to(DiskReport::Ended(end))
        })?;
        let thread = std::thread::Builder::new().name("kvferry-disk-tier".to_owned());
        let of_thread = settings.clone();
        let counters = Arc::new(DiskCounters::default());
        let counted = Arc::clone(&counters);
        let thread = thread.spawn(move || run(&of_thread, &received, (&report, &counted)))?;
        Ok(Self {
            settings,
            commands,
            copier,
            thread: Some(thread),
            wanted: None,
            requested: None,
            open: None,
            running: BTreeSet::new(),
            read_failures: 0,
            write_failures: 0,
            read_only: None,
            written: WrittenBytes::new(Instant::now()),
            counters,
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
    pub(super) fn want(&mut self, layout: TierLayout) {
        let key = SetKey {
            layout: layout.layout_fingerprint,
            page_bytes: layout.page_bytes,
            ratio: self.settings.ratio,
            shards: self.settings.shards,
        };
        if self.wanted != Some(key) {
            self.wanted = Some(key);
            self.running.iter().for_each(|copy| self.copier.stop(*copy));
            self.open_wanted();
        }
    }

    /// The pages of the set that is open or being opened.
    pub(super) fn layout(&self) -> Option<TierLayout> {
        self.wanted.map(|key| TierLayout {
            page_bytes: key.page_bytes,
            layout_fingerprint: key.layout,
        })
    }

    /// Closes the set, because no engine's memory is registered, so that a worker of another replica can open it. Without
    /// other replicas the set stays open, or is opened once its disk is back, and is ready for the next engine.
    pub(super) fn leave(&mut self) {
        if self.wanted.is_none() || !self.settings.shared {
            return;
        }
        self.wanted = None;
        self.requested = None;
        self.open = None;
        self.read_only = None;
        // No attempt follows that would clear it.
        self.problem = None;
        self.running.iter().for_each(|copy| self.copier.stop(*copy));
        // A thread that takes no commands has the set open until the process ends.
        self.send(Command::Release);
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
            self.read_only = None;
            (self.read_failures, self.write_failures) = (0, 0);
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
        self.opens_anew()
    }

    /// Notes that the set is being opened anew. Returns whether it was open.
    pub(super) fn opens_anew(&mut self) -> bool {
        self.read_only = None;
        self.open.take().is_some()
    }

    /// Notes that the disk can be used, though no set is wanted.
    pub(super) fn fits(&mut self) {
        self.problem = None;
    }

    /// Notes that the disk takes no writes.
    pub(super) fn only_read(&mut self, why: String) {
        if self.open.is_some() {
            self.read_only = Some(why);
        }
    }

    /// Notes that the disk takes writes again.
    pub(super) fn writable(&mut self) {
        self.read_only = None;
        self.write_failures = 0;
    }

    /// Stops writing to the disk until it takes writes again.
    fn stop_writing(&mut self, fail: WritesFail) {
        if self.open.is_none() || self.read_only.is_some() {
            return;
        }
        let why = fail.why.clone();
        // Without the command the next failed copy tries again.
        if self.send(Command::ReadOnly(fail)) {
            self.read_only = Some(why);
        }
    }

    /// The state of the disk, for the leader's status.
    pub(super) fn status(&self) -> DiskStatus {
        let (health, reason) = match (&self.open, &self.read_only) {
            (None, _) => (DiskHealth::Off, self.why_closed()),
            (Some(_), Some(why)) => (DiskHealth::ReadOnly, why.clone()),
            (Some((key, set)), None) if set.capacity_pages() == 0 && !set.is_short() => {
                (DiskHealth::Off, too_small(&self.settings, key))
            }
            (Some((_, set)), None) if set.is_short() => {
                let text = "the disk has less room than g3: it uses what it has";
                (DiskHealth::Full, text.to_owned())
            }
            (Some(_), None) => (DiskHealth::Ok, String::new()),
        };
        let now = Instant::now();
        let open = self.open.as_ref();
        DiskStatus::new(health, reason).with(DiskStatus {
            used_bytes: self.counters.used_bytes(),
            cap_bytes: self.settings.cap_bytes,
            listed_pages: open.map_or(0, |(_, set)| set.listed().1),
            durable_pages: open.map_or(0, |(_, set)| set.durable_pages()),
            written_bytes: self.written.total(),
            day_written_bytes: self.written.last_day(now),
            scrubbed_pages: self.counters.scrubbed_pages(),
            bad_pages: self.counters.bad_pages(),
            unreadable_pages: self.counters.unreadable_pages(),
            bad_reads: self.counters.bad_reads(),
            quarantined_pages: open.map_or(0, |(_, set)| set.faulty_pages() as u64),
            ..DiskStatus::default()
        })
    }

    fn why_closed(&self) -> String {
        let other = match self.wanted {
            None => "no engine has registered its memory",
            Some(_) => "it is being opened, or another worker has it open",
        };
        self.problem.clone().unwrap_or_else(|| other.to_owned())
    }

    /// Begins a copy between host memory and the open set. Returns false if there is none for pages of this size, or if the
    /// set has fewer pages by now than the leader knows.
    pub(super) fn copy(&mut self, transfer: Transfer, depot: Arc<Depot>) -> bool {
        let Some(set) = self.set(transfer.page_bytes).cloned() else {
            return false;
        };
        let write = transfer.edge.to > transfer.edge.from;
        if write && self.read_only.is_some() {
            return false;
        }
        let pages = u64::from(set.capacity_pages());
        let of_disk = transfer.pairs.iter().flat_map(|pair| match write {
            true => &pair.dst.0,
            false => &pair.src.0,
        });
        if of_disk.into_iter().any(|run| run.end() > pages) {
            return false;
        }
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
        if end.write {
            self.written.add(Instant::now(), end.ended.bytes);
        }
        self.note_changed(&end.changed);
        let mut full_now = false;
        let mut failures = match end.write {
            true => self.write_failures,
            false => self.read_failures,
        };
        if let Some(error) = &end.error {
            full_now = is_full(error);
            if !full_now && let Some(left_out) = FAILED.line() {
                tracing::warn!(%transfer, %error, left_out, "the disk failed a copy");
            }
            // A full disk still serves what it has, and so does one that takes no writes.
            failures += u32::from(!full_now);
            if end.write && (is_read_only(error) || failures >= FAILURES_MAX) {
                self.stop_writing(WritesFail::of("cannot write", error));
            }
        } else if end.ended.complete {
            failures = 0;
        }
        match end.write {
            true => self.write_failures = failures,
            false => self.read_failures = failures,
        }
        let faulty = self.open.as_ref().map_or(0, |(_, set)| set.faulty_pages());
        if faulty >= QUARANTINED_PAGES_MAX {
            self.stop_writing(WritesFail {
                why: format!("{faulty} places of the disk failed: check the disk"),
                anew: true,
            });
        }
        if self.read_failures >= FAILURES_MAX && self.open.is_some() {
            self.running.iter().for_each(|copy| self.copier.stop(*copy));
            let error = end.error.as_ref().map(ToString::to_string);
            let why = format!("cannot read: {}", error.unwrap_or_default());
            // Without the command the next failed copy tries again.
            self.read_failures = if self.send(Command::Fail(why)) {
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
            tracing::info!(
                pages,
                "full: the disk has less room than g3, and uses what it has"
            );
        }
        shorter
    }

    /// Counts pages that had changed since they were written, and logs the first one.
    fn note_changed(&self, pages: &[u32]) {
        let Some(page) = pages.first() else {
            return;
        };
        let found = self.counters.add_bad_reads(pages.len() as u64);
        if let Some(left_out) = CHANGED.line() {
            tracing::error!(page, found, left_out, "{CHANGED_TEXT}");
        }
    }

    /// True while nothing is written.
    pub(super) fn is_read_only(&self) -> bool {
        self.read_only.is_some()
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
