//! A worker's disk with its real thread, on files that fail as the tests order.

mod faulty_files;
mod loop_devices;
#[path = "../../../tests/support/loop_disk.rs"]
mod loop_disk;
mod lost;

use std::path::Path;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};

use kvferry_memory::page_stride_bytes;
use kvferry_tiers::disk::files::{Files, RealDirectory};
use kvferry_types::{
    Anchor, DomainId, Edge, Fingerprint, FragmentPair, NamespaceId, PageList, TierId, TierLayout,
    Time,
};

use super::*;
use faulty_files::{Faults, FaultyDirectory, SharedFaults};

const PAGE_BYTES: u64 = 64 << 10;
const PAGES: u32 = 4;
const CAP_BYTES: u64 = 64 << 20;
/// Longer than any pause of the thread.
const WAIT: Duration = Duration::from_secs(60);
const EIO: i32 = 5;
const EROFS: i32 = 30;

/// A disk with its thread, and what the worker's actor does with its reports.
struct Rig {
    disk: Disk,
    reports: Receiver<DiskReport>,
    depot: Arc<Depot>,
    transfers: u64,
    /// How often the number of pages changed.
    changes: u32,
    /// How often the disk failed, or could not be opened.
    attempts: u32,
    /// Flushes that have ended.
    flushes: Vec<(u64, Result<(), String>)>,
}

impl Rig {
    fn new(directories: DiskDirectories) -> Self {
        let mut rig = Self::idle(directories, false);
        rig.want();
        rig.until("open", |disk| disk.open.is_some());
        rig
    }

    fn want(&mut self) {
        self.disk.want(TierLayout {
            page_bytes: PAGE_BYTES,
            layout_fingerprint: [1; 16],
        });
    }

    /// A disk of a worker without an engine. `shared`: with workers of other replicas.
    fn idle(directories: DiskDirectories, shared: bool) -> Self {
        Self::with_cap(directories, shared, CAP_BYTES)
    }

    fn with_cap(directories: DiskDirectories, shared: bool, cap_bytes: u64) -> Self {
        let settings = DiskSettings {
            directories,
            shard: 0,
            shards: 1,
            ratio: 16,
            cap_bytes,
            depth: 2,
            io: DiskIo::Threads,
            scrub_bytes_per_s: 0,
            shared,
            discard: false,
        };
        let (report, reports) = channel();
        let report = Mutex::new(report);
        let send = move |told| {
            if report.lock().expect("no panic").send(told).is_err() {
                tracing::debug!("the test is over");
            }
        };
        let depot = Depot::create(Depot::bytes_for(2 * PAGES, PAGE_BYTES)).expect("memory");
        depot.hold_pages_of(PAGE_BYTES).expect("writable");
        Self {
            disk: Disk::start(settings, Arc::new(send)).expect("threads"),
            reports,
            depot: Arc::new(depot),
            transfers: 0,
            changes: 0,
            attempts: 0,
            flushes: Vec::new(),
        }
    }

    /// Handles the next report as the worker's actor does. Returns the end of a copy, or of a reset.
    fn step(&mut self) -> (Option<DiskCopyEnd>, Option<Result<(), String>>) {
        let report = self.reports.recv_timeout(WAIT).expect("a report in time");
        match report {
            DiskReport::Opened(key, set) => {
                self.changes += u32::from(self.disk.opened(key, set));
            }
            DiskReport::Failed(why) => {
                self.attempts += 1;
                self.changes += u32::from(self.disk.failed(why));
            }
            DiskReport::OpensAnew => self.changes += u32::from(self.disk.opens_anew()),
            DiskReport::Grown | DiskReport::Released => self.changes += 1,
            DiskReport::ReadOnly(why) => self.disk.only_read(why),
            DiskReport::Writable => self.disk.writable(),
            DiskReport::Fits => self.disk.fits(),
            DiskReport::Status => {}
            DiskReport::Flushed(result) => {
                let (_, _, flush) = self.disk.flushed().expect("a flush was ordered");
                self.flushes.push((flush, result));
            }
            DiskReport::Ended(end) => {
                self.changes += u32::from(self.disk.ended(&end));
                return (Some(end), None);
            }
            DiskReport::Reset(_, _, result) => return (None, Some(result)),
        }
        (None, None)
    }

    fn until(&mut self, what: &str, reached: impl Fn(&Disk) -> bool) {
        let begun = Instant::now();
        while !reached(&self.disk) {
            assert!(begun.elapsed() < WAIT, "never {what}: {:?}", self.health());
            self.step();
        }
    }

    fn until_health(&mut self, health: DiskHealth) {
        self.until(health.name(), |disk| disk.status().health == health);
    }

    fn health(&self) -> DiskHealth {
        self.disk.status().health
    }

    fn at(&self, page: u32) -> u64 {
        self.depot.pages_at(PAGE_BYTES) + u64::from(page) * page_stride_bytes(PAGE_BYTES)
    }

    fn copy(&mut self, edge: Edge, (src, dst): (u32, u32)) -> Option<DiskCopyEnd> {
        self.transfers += 1;
        let id = TransferId(self.transfers);
        let write = edge.to == TierId::Disk;
        let record = write.then(|| Record {
            anchor: Anchor(dst.into()),
            domain: DomainId(3 << 64),
            block_start: dst,
            first: 0,
            phase: 0,
            stored: Stored {
                epoch: Epoch(1),
                transfer: id,
            },
            fingerprints: (dst..dst + PAGES)
                .map(|page| Fingerprint(page.into()))
                .collect(),
        });
        let (src, dst) = (PageList::run(src, PAGES), PageList::run(dst, PAGES));
        let transfer = Transfer {
            id,
            edge,
            device: None,
            page_bytes: PAGE_BYTES,
            pairs: vec![FragmentPair {
                src,
                dst: dst.clone(),
            }],
            record: record.clone(),
            deadline: Time::NEVER,
        };
        if let Some(record) = &record {
            let (start, count) = (record.block_start, PAGES);
            self.disk.unlist(PageRun { start, count });
        }
        if !self.disk.copy(transfer, Arc::clone(&self.depot)) {
            return None;
        }
        loop {
            if let (Some(end), _) = self.step() {
                if let Some(record) = record.as_ref().filter(|_| end.ended.complete) {
                    self.disk.list(record);
                }
                return Some(end);
            }
        }
    }

    /// Writes pages with bytes that follow from their numbers. `None` if the disk takes no copy.
    fn write(&mut self, to: u32) -> Option<DiskCopyEnd> {
        for page in 0..PAGES {
            let bytes = vec![byte_of(to + page); PAGE_BYTES as usize];
            let at = self.at(page);
            self.depot
                .buffer()
                .write_from(at, &bytes)
                .expect("in range");
        }
        let edge = Edge {
            from: TierId::Host,
            to: TierId::Disk,
        };
        self.copy(edge, (0, to))
    }

    /// Reads pages, and compares those that were reported with what was written. Returns their number; `None` if the
    /// disk takes no copy.
    fn read(&mut self, from: u32) -> Option<u32> {
        let edge = Edge {
            from: TierId::Disk,
            to: TierId::Host,
        };
        let end = self.copy(edge, (from, PAGES))?;
        for page in 0..end.ended.complete_pages {
            let mut bytes = vec![0; PAGE_BYTES as usize];
            let at = self.at(PAGES + page);
            self.depot
                .buffer()
                .read_into(at, &mut bytes)
                .expect("in range");
            let expected = byte_of(from + page);
            assert!(bytes.iter().all(|byte| *byte == expected), "wrong bytes");
        }
        Some(end.ended.complete_pages)
    }

    /// Removes every page that was stored so far. The result is that which the leader gets.
    fn reset(&mut self) -> Result<(), String> {
        let through = Stored {
            epoch: Epoch(1),
            transfer: TransferId(self.transfers),
        };
        let scope = Scope::Namespace(NamespaceId(3));
        match self.disk.reset(&scope, through) {
            ResetProgress::Ended(result) => return result,
            ResetProgress::Running => {}
        }
        loop {
            if let (_, Some(result)) = self.step() {
                self.disk.reset_ended(scope, through, result.clone());
                return result;
            }
        }
    }

    /// Has the disk flushed, as a leader does.
    fn flush(&mut self) -> Result<(), String> {
        let number = self.flushes.len() as u64 + 1;
        self.disk.flush((LinkId(1), RequestId(1), number))?;
        while self.flushes.len() < number as usize {
            self.step();
        }
        let (flush, result) = self.flushes[number as usize - 1].clone();
        assert_eq!(flush, number, "in the order of the orders");
        result
    }

    /// Waits until everything that was listed is durable.
    fn flushed(&mut self) {
        self.until("flushed", |disk| {
            disk.open.as_ref().is_some_and(|(_, set)| !set.is_dirty())
        });
    }

    /// Waits until pages are read that were durable.
    fn serves(&mut self, from: u32) {
        self.until_health(DiskHealth::Ok);
        assert_eq!(self.read(from), Some(PAGES));
    }
}

fn byte_of(page: u32) -> u8 {
    page as u8 + 1
}

/// A disk in a directory whose calls fail on order.
fn faulty() -> (Rig, SharedFaults, tempfile::TempDir) {
    let root = tempfile::tempdir().expect("a directory");
    let path = root.path().join("disk");
    let faults = SharedFaults::default();
    let of = Arc::clone(&faults);
    let open = move |path: &Path| -> std::io::Result<Arc<dyn Files>> {
        let real = Arc::new(RealDirectory::open(path)?);
        Ok(Arc::new(FaultyDirectory(real, Arc::clone(&of))))
    };
    let opened = vec![open(&path).expect("a directory")];
    let directories = DiskDirectories::of(&[path], opened, open).expect("a tier");
    (Rig::new(directories), faults, root)
}

fn set(faults: &SharedFaults, change: impl FnOnce(&mut Faults)) {
    change(&mut faults.lock().expect("no panic"));
}

#[test]
fn a_disk_without_write_permission_is_read_on_and_written_again_without_being_opened_anew() {
    let (mut rig, faults, _root) = faulty();
    assert!(rig.write(0).expect("taken").ended.complete);
    rig.flushed();
    set(&faults, |faults| faults.writes = Some(EROFS));
    let end = rig.write(16).expect("taken");
    assert_eq!((end.ended.complete, end.ended.faulty_page), (false, None));
    assert_eq!(rig.health(), DiskHealth::ReadOnly);
    let reason = rig.disk.status().reason;
    assert!(reason.contains("Read-only file system"), "{reason}");
    let changes = rig.changes;
    assert!(rig.write(16).is_none(), "no write begins");
    assert_eq!(rig.read(0), Some(PAGES));
    let refused = rig.reset().expect_err("the reset is not durable");
    assert!(refused.contains("not durable"), "{refused}");
    assert_eq!(rig.read(0), Some(PAGES), "nothing was removed");
    let refused = rig.flush().expect_err("nothing is written");
    assert!(refused.contains("only read"), "{refused}");
    set(&faults, |faults| faults.writes = None);
    rig.serves(0);
    assert_eq!(rig.flush(), Ok(()));
    assert_eq!(rig.changes, changes, "the set stayed open");
    assert!(rig.write(16).expect("taken").ended.complete);
    assert_eq!(rig.read(16), Some(PAGES));
    assert_eq!(rig.reset(), Ok(()));
    assert_eq!(rig.read(0), Some(0));
}

#[test]
fn a_disk_whose_flush_fails_is_read_on_and_opened_anew_once_it_takes_writes() {
    let (mut rig, faults, _root) = faulty();
    assert!(rig.write(0).expect("taken").ended.complete);
    rig.flushed();
    assert!(rig.write(16).expect("taken").ended.complete);
    set(&faults, |faults| faults.syncs = Some(EIO));
    let failed = rig.flush().expect_err("it is not durable");
    assert!(
        failed.contains("flush") || failed.contains("only read"),
        "{failed}"
    );
    rig.until_health(DiskHealth::ReadOnly);
    assert_eq!(rig.read(0), Some(PAGES));
    assert_eq!(rig.read(16), Some(PAGES), "from the list in memory");
    set(&faults, |faults| faults.syncs = None);
    let changes = rig.changes;
    rig.serves(0);
    assert_eq!(rig.changes, changes + 2, "closed and opened");
    let pages = rig.read(16);
    assert!(
        pages <= Some(PAGES),
        "its headers may be lost, not its bytes wrong"
    );
}

#[test]
fn a_disk_whose_writes_fail_in_a_row_is_only_read() {
    let (mut rig, faults, _root) = faulty();
    assert!(rig.write(0).expect("taken").ended.complete);
    // So that their segments exist.
    for to in [16, 32, 48] {
        assert!(rig.write(to).expect("taken").ended.complete);
    }
    rig.flushed();
    set(&faults, |faults| faults.reads = Some(EIO));
    assert_eq!(rig.read(32), Some(0));
    let status = rig.disk.status();
    assert_eq!(
        (status.health, status.quarantined_pages),
        (DiskHealth::Ok, 1)
    );
    set(&faults, |faults| faults.reads = None);
    set(&faults, |faults| faults.writes = Some(EIO));
    // A flush of what the writes remove fails, too, and may be the first.
    for to in [16, 48, 16] {
        if let Some(end) = rig.write(to) {
            assert!(!end.ended.complete && end.error.is_some(), "{end:?}");
        }
    }
    assert_eq!(rig.health(), DiskHealth::ReadOnly);
    assert_eq!(rig.read(0), Some(PAGES));
    assert_eq!(rig.disk.status().quarantined_pages, 1);
    set(&faults, |faults| faults.writes = None);
    rig.serves(0);
    assert_eq!(rig.disk.status().quarantined_pages, 0, "opened anew");
    assert!(rig.write(16).expect("taken").ended.complete);
}

#[test]
fn a_disk_that_cannot_be_read_is_closed_and_back_by_itself() {
    let (mut rig, faults, _root) = faulty();
    assert!(rig.write(0).expect("taken").ended.complete);
    rig.flushed();
    set(&faults, |faults| {
        (faults.reads, faults.writes) = (Some(EIO), Some(EIO));
    });
    while rig.health() != DiskHealth::Off {
        // A copy that is refused has begun nothing.
        assert!(rig.read(0).unwrap_or(0) == 0);
        if rig.disk.open.is_some() && rig.disk.read_failures == 0 {
            rig.until_health(DiskHealth::Off);
        }
    }
    let reason = rig.disk.status().reason;
    assert!(reason.contains("os error 5"), "{reason}");
    assert!(rig.read(0).is_none() && rig.write(16).is_none());
    assert!(rig.reset().is_err(), "a reset is not carried out");
    set(&faults, |faults| *faults = Faults::default());
    rig.serves(0);
}

#[test]
fn a_directory_that_is_away_closes_the_disk_and_an_empty_one_does_not_replace_it() {
    let root = tempfile::tempdir().expect("a directory");
    let (path, away) = (root.path().join("disk"), root.path().join("away"));
    let directories = DiskDirectories::open(std::slice::from_ref(&path)).expect("a tier");
    let mut rig = Rig::new(directories);
    assert!(rig.write(0).expect("taken").ended.complete);
    rig.flushed();
    std::fs::rename(&path, &away).expect("renamed");
    rig.until_health(DiskHealth::Off);
    std::fs::create_dir(&path).expect("created");
    // The second attempt from now on began when the empty directory was there.
    let attempts = rig.attempts + 2;
    while rig.attempts < attempts {
        rig.step();
    }
    assert!(rig.read(0).is_none());
    let found = std::fs::read_dir(&path).expect("read").count();
    assert_eq!(found, 0, "nothing is written to the empty directory");
    std::fs::remove_dir(&path).expect("empty");
    std::fs::rename(&away, &path).expect("renamed");
    rig.serves(0);
    assert!(rig.write(16).expect("taken").ended.complete);
}

/// A directory for several disks, which is opened anew for each as by processes of their own.
fn directory(root: &tempfile::TempDir) -> DiskDirectories {
    DiskDirectories::open(&[root.path().join("disk")]).expect("a tier")
}

#[test]
fn a_worker_whose_engine_has_left_lets_one_of_another_replica_open_the_disk() {
    let root = tempfile::tempdir().expect("a directory");
    let mut first = Rig::idle(directory(&root), true);
    first.want();
    first.until("open", |disk| disk.open.is_some());
    assert!(first.write(0).expect("taken").ended.complete);
    let mut second = Rig::idle(directory(&root), true);
    second.want();
    first.disk.leave();
    second.until("open", |disk| disk.open.is_some());
    assert_eq!(second.read(0), Some(PAGES), "closed cleanly");
    // The engine of the first one is back, and leaves before the disk is free.
    first.want();
    first.disk.leave();
    second.disk.end();
    let mut third = Rig::idle(directory(&root), true);
    third.want();
    third.until("open", |disk| disk.open.is_some());
    assert_eq!(third.read(0), Some(PAGES));
}

#[test]
fn a_disk_that_nobody_else_may_open_stays_open_without_an_engine() {
    let root = tempfile::tempdir().expect("a directory");
    let mut rig = Rig::new(directory(&root));
    rig.disk.leave();
    assert!(rig.disk.open.is_some());
}

#[test]
fn a_reset_of_a_worker_without_an_engine_keeps_no_lock() {
    let root = tempfile::tempdir().expect("a directory");
    let mut idle = Rig::idle(directory(&root), true);
    assert_eq!(idle.reset(), Ok(()));
    Rig::new(directory(&root));
}
