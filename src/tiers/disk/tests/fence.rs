//! The end of a process with writes in flight: its successor opens the files once the kernel has carried out the last of
//! them, and not when the process is dead.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_memory::Depot;
use kvferry_types::{
    Anchor, DomainId, Edge, Epoch, Fingerprint, FragmentPair, PageList, Record, Stored, TierId,
    Time, Transfer, TransferId,
};

use super::super::format::SetKey;
use super::super::{DiskCopier, DiskCopy, DiskDirectories, DiskIo, DiskTier};
use super::loop_disk::LoopDisk;

const PAGE_BYTES: u64 = 1 << 20;
const PAGES: u32 = 64;
const CAP: u64 = 192 << 20;
/// Writes of the process that is killed: 64 MiB take 16 s.
const BYTES_PER_S: u64 = 4 << 20;
/// The directory of the process that is killed.
const DIRECTORY: &str = "KVFERRY_TEST_FENCE_DIRECTORY";

fn take(directory: &Path) -> Option<DiskTier> {
    let directories = DiskDirectories::open(&[directory.to_owned()]).expect("a directory");
    DiskTier::take(&directories, 0, CAP).expect("it can be used")
}

fn key() -> SetKey {
    SetKey {
        layout: [1; 16],
        page_bytes: PAGE_BYTES,
        ratio: 1,
        shards: 1,
    }
}

/// Writes all pages with the same byte, until it is killed.
fn write(directory: &Path, io: DiskIo) -> ! {
    let tier = take(directory).expect("the lock");
    let (set, _) = tier.open(key(), &|_, _| {}).expect("files");
    let depot = Depot::create(Depot::bytes_for(PAGES, PAGE_BYTES)).expect("memory");
    depot.hold_pages_of(PAGE_BYTES).expect("writable");
    let page = vec![0xa5; PAGE_BYTES as usize];
    for number in 0..PAGES {
        let at = depot.pages_at(PAGE_BYTES) + u64::from(number) * PAGE_BYTES;
        depot.buffer().write_from(at, &page).expect("in range");
    }
    let depot = Arc::new(depot);
    // Creates the files before the disk is slow.
    println!("open");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("a line");
    let copier = DiskCopier::start((PAGES as usize, io), |_| {}).expect("threads");
    for number in 0..PAGES {
        let run = PageList::run(number, 1);
        copier.copy(DiskCopy {
            transfer: Transfer {
                id: TransferId(u64::from(number) + 1),
                edge: Edge {
                    from: TierId::Host,
                    to: TierId::Disk,
                },
                device: None,
                page_bytes: PAGE_BYTES,
                pairs: vec![FragmentPair {
                    src: run.clone(),
                    dst: run,
                }],
                record: Some(Record {
                    anchor: Anchor(number.into()),
                    domain: DomainId(1),
                    block_start: number,
                    first: 0,
                    phase: 0,
                    stored: Stored {
                        epoch: Epoch(1),
                        transfer: TransferId(u64::from(number) + 1),
                    },
                    fingerprints: vec![Fingerprint(number.into())],
                }),
                deadline: Time::NEVER,
            },
            depot: Arc::clone(&depot),
            set: Arc::clone(&set),
        });
    }
    println!("writing");
    loop {
        std::thread::park();
    }
}

/// A control group whose processes write slowly, removed when dropped. They must have ended by then.
struct SlowWriter(PathBuf);

impl SlowWriter {
    /// Limits the writes of a process, by the block controller of cgroups, version 1.
    fn new(pid: u32, disk: &LoopDisk) -> Self {
        let group = Path::new("/sys/fs/cgroup/blkio").join(format!("kvferry-test-{pid}"));
        std::fs::create_dir(&group).expect("the block controller of cgroups, version 1");
        let name = disk.device.trim_start_matches("/dev/");
        let number = std::fs::read_to_string(format!("/sys/block/{name}/dev")).expect("a number");
        let limit = format!("{} {BYTES_PER_S}", number.trim());
        let file = group.join("blkio.throttle.write_bps_device");
        std::fs::write(file, limit).expect("a limit");
        std::fs::write(group.join("cgroup.procs"), pid.to_string()).expect("a member");
        Self(group)
    }
}

impl Drop for SlowWriter {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir(&self.0) {
            println!("{}: {error}", self.0.display());
        }
    }
}

/// Bytes that a process has given to the kernel for a disk.
fn written_bytes(pid: u32) -> u64 {
    let counts = std::fs::read_to_string(format!("/proc/{pid}/io")).expect("counts");
    let line = counts
        .lines()
        .find_map(|line| line.strip_prefix("write_bytes: "));
    line.expect("a count").parse().expect("a number")
}

/// All bytes of the set's files.
fn content(set: &Path) -> Vec<Vec<u8>> {
    let entries = std::fs::read_dir(set).expect("a set");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("a name").path()).collect();
    paths.retain(|path| path.to_string_lossy().contains("segment-"));
    paths.sort();
    let read = |path: &PathBuf| {
        let file = std::fs::File::options()
            .read(true)
            .open(path)
            .expect("a segment");
        // The kernel's cache may be older than what a late write puts on the disk.
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("a hint");
        let mut bytes = Vec::new();
        (&file).read_to_end(&mut bytes).expect("readable");
        bytes
    };
    paths.iter().map(read).collect()
}

fn a_successor_waits(io: DiskIo) {
    if let Some(directory) = std::env::var_os(DIRECTORY) {
        write(Path::new(&directory), io);
    }
    let disk = LoopDisk::new(512);
    let directory = disk.path().join("tier");
    let name = std::thread::current().name().expect("a name").to_owned();
    let mut writer = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", &name, "--ignored", "--nocapture"])
        .env(DIRECTORY, &directory)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a process");
    let mut lines = BufReader::new(writer.stdout.take().expect("piped")).lines();
    let mut wait_for = |what: &str| {
        let found = lines.any(|line| line.expect("text") == what);
        assert!(found, "the writer ended before: {what}");
    };
    wait_for("open");
    let slow = SlowWriter::new(writer.id(), &disk);
    drop(writer.stdin.take());
    wait_for("writing");
    // Some writes are with the kernel, and most of them cannot have ended.
    let begun = Instant::now();
    while written_bytes(writer.id()) < u64::from(PAGES) * PAGE_BYTES / 4 {
        assert!(
            begun.elapsed() < Duration::from_secs(60),
            "it does not write"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    writer.kill().expect("it lives");
    let killed = Instant::now();
    let tier = loop {
        if let Some(tier) = take(&directory) {
            break tier;
        }
        assert!(
            killed.elapsed() < Duration::from_secs(60),
            "locked for ever"
        );
        std::thread::sleep(Duration::from_millis(5));
    };
    let (set, _) = tier.open(key(), &|_, _| {}).expect("the successor's");
    let opened = killed.elapsed();
    let files = directory.join("shard-0").join(key().name());
    let before = content(&files);
    // No write of the dead process is carried out from here on. Without the locks the last one would end 16 s after the
    // first: the absence of a write can only be waited for.
    std::thread::sleep(Duration::from_secs(20).saturating_sub(opened));
    assert!(content(&files) == before, "a write came after the opening");
    let written = before.iter().flatten().filter(|byte| **byte == 0xa5);
    eprintln!(
        "{io}: opened {opened:?} after the kill; {} MiB were written by then",
        written.count() >> 20
    );
    drop(set);
    writer.wait().expect("it was killed");
    drop(slow);
}

#[test]
#[ignore = "needs root and loop devices: cargo xtask disk"]
fn on_a_slow_disk_a_successor_opens_after_the_last_write_of_io_uring() {
    a_successor_waits(DiskIo::IoUring);
}

#[test]
#[ignore = "needs root and loop devices: cargo xtask disk"]
fn on_a_slow_disk_a_successor_opens_after_the_last_write_of_threads() {
    a_successor_waits(DiskIo::Threads);
}
