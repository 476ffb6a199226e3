//! Plain direct reads and writes of the files of a disk tier, by threads that do nothing else: the floor of its
//! measurements. And the same reads by threads that also verify and copy what they read, as every disk tier has to: the
//! limit that the cores and the memory of the machine set.

use std::fs::File;
use std::hash::Hasher as _;
use std::hint::black_box;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::error::CommandError;
use kvferry_memory::SharedBuffer;
use kvferry_tiers::disk::buffer::AlignedBuffer;
use kvferry_tiers::disk::format::Geometry;
use twox_hash::XxHash3_64;

/// Bytes of one read or write.
const PART_BYTES: usize = 4 << 20;
/// Bytes that are verified before they are copied, while a core's own cache has them.
const STEP_BYTES: usize = 64 << 10;
/// Numbers of threads among which [`PlainFiles::best_depth`] chooses.
const DEPTHS: [usize; 4] = [2, 4, 8, 16];
/// `O_DIRECT` of this system.
const DIRECT: i32 = rustix::fs::OFlags::DIRECT.bits() as i32;

/// The work on the bytes of a read: their checksum, and a copy into each of these memories.
#[derive(Debug)]
pub(super) struct ReadWork(Vec<SharedBuffer>);

impl ReadWork {
    /// Work with `copies` copies of each byte, for reads of `bytes` bytes in all.
    pub(super) fn new(copies: usize, bytes: u64) -> Result<Self, CommandError> {
        let memory = || {
            let memory = SharedBuffer::create("kvferry-bench", bytes)?;
            let zeros = vec![0; STEP_BYTES];
            for at in (0..bytes / STEP_BYTES as u64).map(|step| step * STEP_BYTES as u64) {
                memory.write_from(at, &zeros)?;
            }
            Ok(memory)
        };
        let memories: Result<Vec<_>, kvferry_memory::BufferError> =
            (0..copies).map(|_| memory()).collect();
        memories.map(Self).map_err(CommandError::failed)
    }

    fn carry_out(&self, at: u64, bytes: &[u8]) -> std::io::Result<()> {
        let mut sum = XxHash3_64::new();
        for (step, bytes) in bytes.chunks(STEP_BYTES).enumerate() {
            sum.write(bytes);
            let at = at + (step * STEP_BYTES) as u64;
            for memory in &self.0 {
                let written = memory.write_streaming(at, bytes);
                written.map_err(std::io::Error::other)?;
            }
        }
        black_box(sum.finish());
        Ok(())
    }
}

/// The segments of a set, opened a second time.
#[derive(Debug, Default)]
pub(super) struct PlainFiles {
    files: Vec<File>,
    /// The parts of the pages: the file and the offset.
    parts: Vec<(usize, u64)>,
}

impl PlainFiles {
    /// Opens the segments in the directory of a set, whose first `pages` pages were written.
    pub(super) fn open(set: &Path, geometry: &Geometry, pages: u32) -> Result<Self, CommandError> {
        let entries = std::fs::read_dir(set).map_err(CommandError::failed)?;
        let mut paths: Vec<PathBuf> = Vec::new();
        for entry in entries {
            paths.push(entry.map_err(CommandError::failed)?.path());
        }
        paths.retain(|path| path.to_string_lossy().contains("segment-"));
        paths.sort();
        let mut plain = Self::default();
        let mut left = u64::from(pages) * geometry.stride;
        for path in paths {
            let mut options = File::options();
            let options = options.read(true).write(true).custom_flags(DIRECT);
            let file = options.open(path).map_err(CommandError::failed)?;
            let bytes = (u64::from(geometry.segment_pages) * geometry.stride).min(left);
            left -= bytes;
            let at = |part: u64| geometry.table_bytes() + part * PART_BYTES as u64;
            let number = plain.files.len();
            let parts = (0..bytes / PART_BYTES as u64).map(|part| (number, at(part)));
            plain.parts.extend(parts);
            plain.files.push(file);
        }
        Ok(plain)
    }

    /// The number of threads with which all parts are read, or written, fastest.
    pub(super) fn best_depth(&self, write: bool) -> Result<usize, CommandError> {
        let mut best = (0, f64::MAX);
        for depth in DEPTHS {
            let seconds = self.run(write, depth)?;
            if seconds < best.1 {
                best = (depth, seconds);
            }
        }
        Ok(best.0)
    }

    /// Writes or reads all parts. Returns the seconds until the last one has ended; for writes until all is durable. The
    /// pages are not valid after a write.
    pub(super) fn run(&self, write: bool, depth: usize) -> Result<f64, CommandError> {
        self.run_parts(write, depth, (0, 1))
    }

    /// The same for one of several equal shares of the parts: the `share.0`-th of `share.1`.
    pub(super) fn run_parts(
        &self,
        write: bool,
        depth: usize,
        share: (usize, usize),
    ) -> Result<f64, CommandError> {
        self.run_with(write, depth, share, &|_, _| Ok(()))
    }

    /// Reads a share of the parts, and does the work on them. Returns the seconds until the last one has ended.
    pub(super) fn read_and_work(
        &self,
        depth: usize,
        share: (usize, usize),
        work: &ReadWork,
    ) -> Result<f64, CommandError> {
        let carry_out =
            |part: usize, bytes: &[u8]| work.carry_out((part * PART_BYTES) as u64, bytes);
        self.run_with(false, depth, share, &carry_out)
    }

    fn run_with(
        &self,
        write: bool,
        depth: usize,
        share: (usize, usize),
        after: &(dyn Fn(usize, &[u8]) -> std::io::Result<()> + Sync),
    ) -> Result<f64, CommandError> {
        let each = self.parts.len() / share.1.max(1);
        let parts = &self.parts[share.0 * each..(share.0 + 1) * each];
        let next = AtomicUsize::new(0);
        let failed = Mutex::new(None);
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..depth {
                scope.spawn(|| {
                    let mut buffer = AlignedBuffer::new(PART_BYTES);
                    loop {
                        let part = next.fetch_add(1, Ordering::Relaxed);
                        let Some((file, at)) = parts.get(part) else {
                            break;
                        };
                        let file = &self.files[*file];
                        let done = match write {
                            true => file.write_all_at(buffer.bytes(), *at),
                            false => file.read_exact_at(buffer.bytes_mut(), *at),
                        };
                        let done = done.and_then(|()| after(part, buffer.bytes()));
                        if let (Err(error), Ok(mut failed)) = (done, failed.lock()) {
                            failed.get_or_insert(error);
                        }
                    }
                });
            }
        });
        if write {
            for file in &self.files {
                file.sync_data().map_err(CommandError::failed)?;
            }
        }
        match failed.into_inner() {
            Ok(None) => Ok(begun.elapsed().as_secs_f64()),
            Ok(Some(error)) => Err(CommandError::failed(error)),
            Err(_) => Err(CommandError::Failed("a thread panicked".to_owned())),
        }
    }
}
