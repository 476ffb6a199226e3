//! The disk's thread: takes the lock, opens sets, flushes them, carries out resets, and finds out whether a disk that
//! failed is back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError};

use kvferry_tiers::disk::scrub::Scrub;
use kvferry_tiers::disk::{DiskDirectories, DiskSet, DiskTier, FLUSH_AFTER, SetKey};
use kvferry_types::{Scope, Stored};

use super::health::DiskCounters;
use super::{
    CHANGED, CHANGED_TEXT, Command, DiskReport, DiskSettings, FAILED, Report, WritesFail, too_small,
};

/// Pause between two attempts to take the lock of the directory.
const LOCK_EVERY: Duration = Duration::from_millis(100);
/// Pause between two attempts to open a disk that failed.
const OPEN_EVERY: Duration = Duration::from_secs(2);
/// Pause between two attempts to use more of a disk that was full.
const GROW_EVERY: Duration = Duration::from_secs(60);
/// Pause between two attempts to write to a disk that is only read.
const PROBE_EVERY: Duration = Duration::from_secs(5);
/// The same for a disk whose writes failed for another reason than a missing permission or room: a disk that fails now
/// and then must not be opened anew all the time.
const PROBE_FAILED_EVERY: Duration = Duration::from_secs(30);
/// Pause between two looks whether the directories are still those that are open.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Pause between two reports of the state.
const STATUS_EVERY: Duration = Duration::from_secs(2);

/// A disk that is only read.
struct ReadOnly {
    fail: WritesFail,
    next_probe: Instant,
}

impl ReadOnly {
    fn new(fail: WritesFail, now: Instant) -> Self {
        let pause = match fail.anew {
            true => PROBE_FAILED_EVERY,
            false => PROBE_EVERY,
        };
        Self {
            next_probe: now + pause,
            fail,
        }
    }
}

/// State of the thread.
struct Opener<'a> {
    settings: &'a DiskSettings,
    report: &'a Report,
    counters: &'a DiskCounters,
    /// The directories as they were opened last.
    directories: DiskDirectories,
    read_only: Option<ReadOnly>,
    tier: Option<DiskTier>,
    wanted: Option<SetKey>,
    open: Option<Arc<DiskSet>>,
    /// The scrub of the open set.
    scrub: Option<Scrub>,
    /// What the disk had was brought down to the cap, since the start.
    fitted: bool,
    /// When the wanted set is tried next.
    next_try: Instant,
    flushed: Instant,
    /// When a full disk is tried next.
    next_growth: Instant,
    next_look: Instant,
    next_status: Instant,
}

/// Carries out commands until the end.
pub(super) fn run(
    settings: &DiskSettings,
    commands: &Receiver<Command>,
    (report, counters): (&Report, &DiskCounters),
) {
    let now = Instant::now();
    let mut opener = Opener {
        settings,
        report,
        counters,
        directories: settings.directories.clone(),
        read_only: None,
        tier: None,
        wanted: None,
        open: None,
        scrub: None,
        fitted: false,
        next_try: now,
        flushed: now,
        next_growth: now,
        next_look: now + LOOK_EVERY,
        next_status: now + STATUS_EVERY,
    };
    loop {
        match commands.recv_timeout(opener.pause()) {
            Ok(Command::Open(key)) => {
                opener.wanted = Some(key);
                opener.open = None;
                opener.scrub = None;
                opener.read_only = None;
                opener.next_try = Instant::now();
            }
            Ok(Command::Release) => {
                opener.wanted = None;
                opener.release();
                report(DiskReport::Released);
            }
            Ok(Command::Reset(scope, through)) => {
                let result = opener.reset(&scope, through);
                report(DiskReport::Reset(scope, through, result));
                if opener.wanted.is_none() {
                    opener.release();
                }
            }
            Ok(Command::Flush) => report(DiskReport::Flushed(opener.flush_now())),
            Ok(Command::Fail(why)) => opener.fail(why),
            Ok(Command::ReadOnly(fail)) => opener.stop_writing(fail),
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
            (false, None) if !self.fitted => {
                self.next_try.saturating_duration_since(Instant::now())
            }
            (false, None) => OPEN_EVERY,
        }
    }

    fn step(&mut self) {
        let now = Instant::now();
        if self.open.is_none() && self.wanted.is_some() && self.next_try <= now {
            self.try_open();
        } else if self.wanted.is_none() && !self.fitted && self.next_try <= now {
            self.fit();
        }
        if self.tier.is_some() && self.next_look <= now {
            self.next_look = now + LOOK_EVERY;
            match self.directories.check_present() {
                Err(error) => self.fail(error.to_string()),
                Ok(()) => {
                    self.close_if_lost();
                }
            }
        }
        if self.read_only.is_some() {
            self.probe(now);
        } else {
            self.write(now);
        }
        self.scrub(now);
        if self.next_status <= now {
            self.next_status = now + STATUS_EVERY;
            self.measure();
            (self.report)(DiskReport::Status);
        }
    }

    /// Tries whether a disk that is only read takes writes again, once it is time. One that cannot be read either is
    /// closed.
    fn probe(&mut self, now: Instant) {
        let Some(read_only) = self
            .read_only
            .take_if(|read_only| read_only.next_probe <= now)
        else {
            return;
        };
        let fail = read_only.fail;
        let Some(tier) = self.tier.as_ref().filter(|_| self.open.is_some()) else {
            return;
        };
        if let Err(error) = tier.probe_writes() {
            tracing::debug!(%error, "the disk takes no writes");
            let reads = tier.probe_reads();
            if self.close_if_lost() {
                return;
            }
            match reads {
                Ok(()) => self.read_only = Some(ReadOnly::new(fail, Instant::now())),
                Err(error) => self.fail(format!("cannot read: {error}")),
            }
            return;
        }
        if fail.anew {
            // Writes that failed may have left anything. What is there is read again, and resets are carried out again.
            tracing::info!("the disk takes writes again, and is opened anew");
            self.close();
            self.next_try = Instant::now();
            return (self.report)(DiskReport::OpensAnew);
        }
        if self.flush().is_ok() && self.open.is_some() {
            tracing::info!("the disk takes writes again");
            (self.report)(DiskReport::Writable);
        }
    }

    /// Writes nothing until the disk takes writes again. Reads go on.
    fn stop_writing(&mut self, fail: WritesFail) {
        if self.open.is_none() || self.close_if_lost() {
            return;
        }
        let why = fail.why.clone();
        // The stricter reason stays, and of two alike the first.
        let known = self.read_only.as_ref();
        if known.is_none_or(|known| fail.anew && !known.fail.anew) {
            tracing::error!(why, "the disk is only read");
            self.read_only = Some(ReadOnly::new(fail, Instant::now()));
        }
        (self.report)(DiskReport::ReadOnly(why));
    }

    /// Uses more of a disk that was full, and makes durable what was listed.
    fn write(&mut self, now: Instant) {
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
            && let Err(error) = self.flush()
        {
            tracing::debug!(%error, "the periodic flush failed");
        }
    }

    /// Verifies the next pages of the open set, if it is time. Pages that have changed are unlisted here; the leader
    /// removes them when it has them read, and a worker refuses pages that are not listed.
    fn scrub(&mut self, now: Instant) {
        let (Some(set), Some(scrub)) = (&self.open, &mut self.scrub) else {
            return;
        };
        let step = scrub.step(set, now);
        self.counters.add_scrubbed(&step);
        for run in step.removed {
            if let Some(left_out) = CHANGED.line() {
                let (page, removed) = (run.start, run.count);
                tracing::error!(page, removed, left_out, "{CHANGED_TEXT}");
            }
        }
        if let Some(error) = step.error
            && let Some(left_out) = FAILED.line()
        {
            tracing::error!(%error, left_out, "the disk does not read a page");
        }
        if let Some(pass) = step.ended {
            tracing::info!(?pass, "all pages on the disk are verified");
        }
    }

    /// Makes durable what is listed, for a leader that waits for it.
    fn flush_now(&mut self) -> Result<(), String> {
        if self.open.is_none() {
            return Err("the disk is not open".to_owned());
        }
        if let Some(read_only) = &self.read_only {
            return Err(format!("the disk is only read: {}", read_only.fail.why));
        }
        self.flush()
            .map_err(|error| format!("cannot flush: {error}"))?;
        // A file that was removed takes what is written to it, and no start finds it.
        match self.close_if_lost() {
            true => Err("files of the disk were removed while it was in use".to_owned()),
            false => Ok(()),
        }
    }

    /// Makes durable what is listed.
    fn flush(&mut self) -> std::io::Result<()> {
        let flushed = self.tier.as_ref().map_or(Ok(()), DiskTier::flush);
        self.flushed = Instant::now();
        match &flushed {
            // The leader learns at once which pages are durable.
            Ok(()) => (self.report)(DiskReport::Status),
            Err(error) => self.stop_writing(WritesFail::of("cannot flush", error)),
        }
        flushed
    }

    /// Takes the lock, unless this process has it. Returns false while another process has it.
    fn take(&mut self) -> Result<bool, String> {
        if self.tier.is_none() {
            let DiskSettings {
                shard, cap_bytes, ..
            } = self.settings;
            // A disk that was mounted again has another directory at the same path.
            let taken = self.directories.reopened().and_then(|directories| {
                self.directories = directories;
                DiskTier::take(&self.directories, *shard, *cap_bytes)
            });
            self.tier = taken.map_err(|error| error.to_string())?;
            if self.tier.is_none() {
                self.directories.close();
            } else {
                self.fitted = true;
                self.measure();
            }
        }
        Ok(self.tier.is_some())
    }

    /// Looks how many bytes the disk has in use.
    fn measure(&self) {
        match self.tier.as_ref().map(DiskTier::used_bytes) {
            Some(Ok(bytes)) => self.counters.set_used_bytes(bytes),
            Some(Err(error)) => tracing::debug!(%error, "the files of the disk are not counted"),
            None => {}
        }
    }

    /// Brings what the disk has down to the cap, before an engine registers. A process that has the lock has done that.
    fn fit(&mut self) {
        match self.take() {
            Ok(true) => {
                self.close();
                (self.report)(DiskReport::Fits);
            }
            Ok(false) => self.next_try = Instant::now() + OPEN_EVERY,
            Err(why) => self.fail(why),
        }
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
                    tracing::warn!("{}", too_small(self.settings, &key));
                }
                if self.settings.discard {
                    match set.discard_free() {
                        Ok(bytes) => tracing::info!(bytes, "unused places are given back"),
                        Err(error) => tracing::warn!(%error, "unused places are not given back"),
                    }
                }
                self.scrub = Scrub::new(&set, self.settings.scrub_bytes_per_s, Instant::now());
                self.open = Some(Arc::clone(&set));
                (self.report)(DiskReport::Opened(key, set));
            }
            Err(error) => self.fail(format!("cannot open the pages of this layout: {error}")),
        }
    }

    /// Closes the set without a flush: what the disk has is read again. Nothing stays open that would keep the disk from
    /// being unmounted.
    fn close(&mut self) {
        self.open = None;
        self.read_only = None;
        self.scrub = None;
        self.tier = None;
        self.directories.close();
    }

    /// Closes the set of a disk that cannot be read, and tries again later.
    fn fail(&mut self, why: String) {
        self.close();
        self.next_try = Instant::now() + OPEN_EVERY;
        (self.report)(DiskReport::Failed(why));
    }

    /// Closes a tier whose files were removed or replaced, so that it is opened anew at once, without the pages that are gone.
    /// Returns false if the files are still there.
    fn close_if_lost(&mut self) -> bool {
        let Some(Err(error)) = self.tier.as_ref().map(DiskTier::check_present) else {
            return false;
        };
        self.fail(error.to_string());
        self.next_try = Instant::now();
        true
    }

    /// Carries out a reset. Where the directory with the marks was removed, they are written again in the new one: what was
    /// removed is no longer used, also if it is put back.
    fn reset(&mut self, scope: &Scope, through: Stored) -> Result<(), String> {
        for _ in 0..2 {
            if !self.take()? {
                return Err("another process has the disk open".to_owned());
            }
            let Some(tier) = &self.tier else {
                break;
            };
            let noted = tier.reset(scope, through);
            let kept = tier.has_marks();
            let lost = self.close_if_lost();
            match noted {
                Ok(()) if kept => return Ok(()),
                Err(error) if !lost => {
                    self.stop_writing(WritesFail::of("cannot note a reset", &error));
                    return Err(format!("the reset is not durable on the disk: {error}"));
                }
                _ => {}
            }
        }
        Err("files of the disk are removed again and again".to_owned())
    }

    /// Closes the set cleanly, and lets another process take the lock.
    fn release(&mut self) {
        self.end();
        self.close();
    }

    fn end(&mut self) {
        if let Some(tier) = &self.tier
            && let Err(error) = tier.close()
        {
            tracing::warn!(%error, "the disk was not closed cleanly: its headers are read at the next start");
        }
    }
}
