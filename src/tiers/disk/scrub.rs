//! The scrub: reads the listed pages of a set in their order, at a limited rate, and removes those whose bytes have
//! changed on the disk, so that a load does not have to find them.

use std::io;
use std::time::{Duration, Instant};

use kvferry_types::PageRun;

use super::format::Geometry;
use super::set::DiskSet;
use super::verify::{PageFault, Verifier};

/// Shortest time from the beginning of one pass over all pages to that of the next one: a disk that loses bits does so
/// over months, and a small tier would otherwise be read all the time.
pub const SCRUB_EVERY: Duration = Duration::from_secs(24 * 60 * 60);
/// Time to the next pass if no page is listed.
const EMPTY_PAUSE: Duration = Duration::from_secs(60);
/// Bytes of one step, unless a page is larger. A command for the disk waits for at most one step.
const STEP_BYTES: u64 = 1 << 20;

/// What a pass has read and found so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ScrubPass {
    /// Pages that were read.
    pub pages: u64,
    /// Bytes that were read.
    pub bytes: u64,
    /// Pages whose bytes did not match their headers.
    pub bad_pages: u64,
    /// Pages that were removed: those, and the ones behind them in their blocks.
    pub removed_pages: u64,
    /// Pages that the disk did not read. They stay listed: a load of them counts as a failure of the disk.
    pub unreadable_pages: u64,
}

/// What one step did.
#[derive(Debug, Default)]
pub struct ScrubStep {
    /// Pages that were read.
    pub pages: u64,
    /// Pages that the disk did not read.
    pub unreadable_pages: u64,
    /// Pages that were removed.
    pub removed: Vec<PageRun>,
    /// Why the disk did not read a page.
    pub error: Option<io::Error>,
    /// The pass that ended with this step.
    pub ended: Option<ScrubPass>,
}

/// The scrub of one set. Plans by the times that it is given.
#[derive(Debug)]
pub struct Scrub {
    bytes_per_s: u64,
    /// Where the pass goes on.
    next: u32,
    due: Instant,
    begun: Instant,
    pass: ScrubPass,
    verifier: Verifier,
}

impl Scrub {
    /// A scrub of the set, with at most so many bytes a second; `None` for 0, which is no scrub.
    pub fn new(set: &DiskSet, bytes_per_s: u64, now: Instant) -> Option<Self> {
        (bytes_per_s > 0).then(|| Self {
            bytes_per_s,
            next: 0,
            due: now,
            begun: now,
            pass: ScrubPass::default(),
            verifier: Verifier::new(&set.file),
        })
    }

    /// When the next step may be taken.
    pub fn due(&self) -> Instant {
        self.due
    }

    /// Verifies the next pages, if it is time. `set` is the set that the scrub was made for.
    ///
    /// Pages that are written or removed meanwhile are skipped: a page is unlisted before it is overwritten, and only a
    /// page that is still listed as it was before its bytes were read is removed.
    pub fn step(&mut self, set: &DiskSet, now: Instant) -> ScrubStep {
        let mut step = ScrubStep::default();
        if now < self.due {
            return step;
        }
        let found = {
            let table = set.table();
            let found = table.block_from(self.next);
            found.map(|(start, block)| (start, block.clone()))
        };
        let Some((start, block)) = found else {
            let pass = std::mem::take(&mut self.pass);
            self.next = 0;
            self.due = match pass.pages {
                0 => now + EMPTY_PAUSE,
                _ => now.max(self.begun + SCRUB_EVERY),
            };
            self.begun = self.due;
            step.ended = (pass.pages > 0).then_some(pass);
            return step;
        };
        let first = self.next.saturating_sub(start) as usize;
        let count = step_pages(set.geometry()).min(block.pages.len() - first);
        let mut faults = Vec::new();
        let segment = |disk, number| set.segment(disk, number);
        let pages = first..first + count;
        let verifier = &mut self.verifier;
        verifier.verify(&segment, (start, &block), pages, &mut |index, fault| {
            faults.push((index, fault));
        });
        self.next = start + (first + count) as u32;
        for (index, fault) in faults {
            match fault {
                PageFault::Unreadable(error) => {
                    self.pass.unreadable_pages += 1;
                    step.unreadable_pages += 1;
                    step.error.get_or_insert(error);
                }
                PageFault::Checksum => {
                    let place = u16::try_from(index).unwrap_or(u16::MAX);
                    let removed = set.unlist_bad(start, place, &block.pages[index]);
                    self.pass.bad_pages += u64::from(removed.is_some());
                    if let Some(run) = removed {
                        self.pass.removed_pages += u64::from(run.count);
                        step.removed.push(run);
                    }
                }
            }
        }
        let bytes = count as u64 * set.geometry().stride;
        step.pages = count as u64;
        self.pass.pages += count as u64;
        self.pass.bytes += bytes;
        self.due = now + Duration::from_secs_f64(bytes as f64 / self.bytes_per_s as f64);
        step
    }
}

/// Pages of one step.
fn step_pages(geometry: &Geometry) -> usize {
    (STEP_BYTES / geometry.stride).max(1) as usize
}
