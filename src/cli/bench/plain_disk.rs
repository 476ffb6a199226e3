//! Plain direct reads and writes of the files of a disk tier, by threads that do nothing else: the floor of its
//! measurements.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::error::CommandError;
use kvferry_tiers::disk::buffer::AlignedBuffer;
use kvferry_tiers::disk::format::Geometry;

/// Bytes of one read or write.
const PART_BYTES: usize = 4 << 20;
/// Numbers of threads among which [`PlainFiles::best_depth`] chooses.
const DEPTHS: [usize; 4] = [2, 4, 8, 16];
/// `O_DIRECT` of this system.
const DIRECT: i32 = rustix::fs::OFlags::DIRECT.bits() as i32;

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

    /// The number of threads with which all parts are read fastest.
    pub(super) fn best_depth(&self) -> Result<usize, CommandError> {
        let mut best = (0, f64::MAX);
        for depth in DEPTHS {
            let seconds = self.run(false, depth)?;
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
        let each = self.parts.len() / share.1.max(1);
        let parts = &self.parts[share.0 * each..(share.0 + 1) * each];
        let next = AtomicUsize::new(0);
        let failed = Mutex::new(None);
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..depth {
                scope.spawn(|| {
                    let mut buffer = AlignedBuffer::new(PART_BYTES);
                    while let Some((file, at)) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let file = &self.files[*file];
                        let done = match write {
                            true => file.write_all_at(buffer.bytes(), *at),
                            false => file.read_exact_at(buffer.bytes_mut(), *at),
                        };
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
