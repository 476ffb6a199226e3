//! One copy between host memory and a disk, in parts.

mod faulty;
mod sources;

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Instant;

use kvferry_memory::{Depot, NON_TEMPORAL_MIN_BYTES, page_stride_bytes};
use kvferry_types::{EndedCopy, PageRun, Record, Transfer};

use super::super::faults::is_of_a_place;
use super::super::files::DiskFile;
use super::super::format::{BlockHeader, HeaderPage, PageSum};
use super::super::set::DiskSet;
use sources::{Source, sources};

/// Bytes of one read or write, unless a page is larger: with less, disks do not reach their bandwidth.
pub(super) const PART_BYTES: u64 = 4 << 20;

/// Bytes that are copied before their checksum is taken, while a core's own cache still has them.
const STEP_BYTES: usize = 64 << 10;

/// A copy between host memory and the open set of a disk.
#[derive(Debug)]
pub struct DiskCopy {
    /// What is copied. One end is host memory, and the other the disk.
    pub transfer: Transfer,
    /// Host memory.
    pub depot: Arc<Depot>,
    /// The set whose pages the transfer names.
    pub set: Arc<DiskSet>,
}

/// How a copy ended.
#[derive(Debug)]
pub struct DiskCopyEnd {
    /// The report.
    pub ended: EndedCopy,
    /// Pages were written to the disk, not read from it.
    pub write: bool,
    /// Why the disk did not carry out a read or write.
    pub error: Option<io::Error>,
    /// Pages of the disk whose bytes had changed since they were written, of those that were read.
    pub changed: Vec<u32>,
}

/// Pages whose disk pages are consecutive.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    /// Index in the transfer of the first page.
    first: usize,
    /// The first disk page.
    disk: u32,
    pages: u32,
}

/// One read or write of a part.
pub(super) struct Operation {
    pub(super) file: Arc<dyn DiskFile>,
    pub(super) at: u64,
    /// Bytes of the part's buffer.
    pub(super) bytes: Range<usize>,
}

impl Operation {
    /// Reads into `bytes`, or writes them, and waits for the end.
    pub(super) fn carry_out(&self, write: bool, bytes: &mut [u8]) -> io::Result<()> {
        match write {
            true => self.file.write(bytes, self.at),
            false => self.file.read(bytes, self.at),
        }
    }
}

#[derive(Debug, Default)]
struct Progress {
    /// Parts that have not ended and were not left out.
    open: usize,
    /// Parts, and preparations, that are in flight.
    running: usize,
    /// Which pages were copied.
    copied: Vec<bool>,
    /// Checksums of the pages that were written.
    sums: Vec<PageSum>,
    /// Index of the first page that failed its checksum.
    bad: Option<usize>,
    /// Pages of the disk that failed their checksum: at most one of each part.
    changed: Vec<u32>,
    /// Index of the first page whose place failed.
    faulty: Option<usize>,
    error: Option<io::Error>,
    /// No further part begins.
    stopped: bool,
    reported: bool,
}

/// A copy that is being carried out.
#[derive(Debug)]
pub(super) struct Job {
    copy: DiskCopy,
    pub(super) write: bool,
    begun: Instant,
    /// Host page of each page.
    host: Vec<u32>,
    pub(super) parts: Vec<Part>,
    sources: Vec<Option<Source>>,
    progress: Mutex<Progress>,
    /// Held for reading while a part touches host memory; true once none may.
    detached: RwLock<bool>,
}

impl Job {
    /// Splits a copy into parts.
    pub(super) fn new(copy: DiskCopy) -> Self {
        let write = copy.transfer.edge.to > copy.transfer.edge.from;
        let pairs = copy.transfer.pairs.iter();
        let pages: Vec<(u32, u32)> = pairs
            .flat_map(|pair| pair.src.iter_pages().zip(pair.dst.iter_pages()))
            .map(|(src, dst)| if write { (src, dst) } else { (dst, src) })
            .collect();
        let sources = match write {
            true => Vec::new(),
            false => sources(&copy.set, &pages, copy.transfer.record.as_ref()),
        };
        // A page that is not listed is a bad source, and no page behind it is read.
        let bad = sources.iter().position(Option::is_none);
        let disk_pages = pages.iter().map(|(_, disk)| *disk);
        // Nothing is written to a place that failed, nor read from one, unless the page there was verified since.
        let faulty = match write {
            true => copy.set.faulty.first_of(disk_pages),
            false => bad.filter(|index| copy.set.faulty.contains(pages[*index].1)),
        };
        let part_pages = (PART_BYTES / copy.set.geometry().stride).max(1);
        let mut parts: Vec<Part> = Vec::new();
        let most = match write && faulty.is_some() {
            true => 0,
            false => bad.unwrap_or(usize::MAX),
        };
        for (first, (_, disk)) in pages.iter().take(most).enumerate() {
            match parts.last_mut() {
                Some(last)
                    if u64::from(last.pages) < part_pages
                        && last.disk.checked_add(last.pages) == Some(*disk) =>
                {
                    last.pages += 1;
                }
                _ => parts.push(Part {
                    first,
                    disk: *disk,
                    pages: 1,
                }),
            }
        }
        let progress = Progress {
            open: parts.len(),
            bad,
            faulty,
            copied: vec![false; pages.len()],
            sums: vec![PageSum::default(); if write { pages.len() } else { 0 }],
            ..Progress::default()
        };
        Self {
            write,
            begun: Instant::now(),
            host: pages.into_iter().map(|(host, _)| host).collect(),
            parts,
            sources,
            progress: Mutex::new(progress),
            detached: RwLock::new(false),
            copy,
        }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of the buffer that a part needs.
    pub(super) fn buffer_bytes(&self, part: Part) -> usize {
        part.pages as usize * self.copy.set.geometry().stride as usize
    }

    /// Counts a part, or the preparation, as in flight. Returns false if the copy has been stopped.
    fn enter(&self) -> bool {
        let mut progress = self.progress();
        let stopped = progress.stopped;
        progress.running += usize::from(!stopped);
        !stopped
    }

    /// Makes durable what a write needs before its first byte. Returns the end of the copy if it was stopped meanwhile.
    pub(super) fn prepare(&self) -> Option<DiskCopyEnd> {
        if !self.enter() {
            return None;
        }
        let prepared = self.write_removals();
        let mut progress = self.progress();
        progress.running -= 1;
        if let Err(error) = prepared {
            progress.stopped = true;
            progress.error.get_or_insert(error);
        }
        (progress.stopped && progress.running == 0).then(|| self.report(&mut progress))?
    }

    fn write_removals(&self) -> io::Result<()> {
        for part in &self.parts {
            self.copy.set.write_removals(PageRun {
                start: part.disk,
                count: part.pages,
            })?;
        }
        Ok(())
    }

    /// Begins a part. Returns false if the copy has been stopped.
    pub(super) fn begin(&self) -> bool {
        self.enter()
    }

    /// Fills the buffer for a write. Returns the operations.
    pub(super) fn operations(&self, part: Part, buffer: &mut [u8]) -> io::Result<Vec<Operation>> {
        if self.write {
            self.gather(part, buffer)?;
        }
        let set = &self.copy.set;
        let stride = set.geometry().stride as usize;
        let mut from = 0;
        let extents = set.geometry().extents(part.disk, part.pages);
        let operations = extents.into_iter().map(|extent| {
            let bytes = from..from + extent.pages as usize * stride;
            from = bytes.end;
            Ok(Operation {
                file: set.segment(extent.disk, extent.segment)?,
                at: extent.at,
                bytes,
            })
        });
        operations.collect()
    }

    /// Ends a part whose operations could not begin. Returns the end of the copy if it was the last one.
    pub(super) fn end_unbegun(&self, part: Part, error: io::Error) -> Option<DiskCopyEnd> {
        self.end_part(part, Err(error))
    }

    /// Ends a part whose operations have all ended. Returns the end of the copy if it was the last one.
    pub(super) fn end(
        &self,
        part: Part,
        buffer: &mut [u8],
        result: io::Result<()>,
    ) -> Option<DiskCopyEnd> {
        let (done, error) = match result {
            Ok(()) => (part.pages, None),
            Err(error) if is_of_a_place(&error) && !self.progress().stopped => {
                self.page_by_page(part, buffer)
            }
            Err(error) => (0, Some(error)),
        };
        let whole = Part {
            pages: done,
            ..part
        };
        let copied = match self.write {
            true => Ok(done as usize),
            false => self.scatter(whole, buffer),
        };
        if let Some(error) = error {
            if let Ok(pages) = copied {
                self.progress().copied[part.first..part.first + pages].fill(true);
            }
            return self.end_part(part, Err(error));
        }
        self.end_part(part, copied)
    }

    fn end_part(&self, part: Part, copied: io::Result<usize>) -> Option<DiskCopyEnd> {
        let mut progress = self.progress();
        progress.open -= 1;
        progress.running -= 1;
        match copied {
            Ok(pages) => {
                progress.copied[part.first..part.first + pages].fill(true);
                if pages < part.pages as usize {
                    progress.stopped = true;
                }
            }
            Err(error) => {
                progress.stopped = true;
                progress.error.get_or_insert(error);
            }
        }
        let over = progress.open == 0 || progress.stopped && progress.running == 0;
        over.then(|| self.report(&mut progress))?
    }

    /// Stops a copy. Returns its end if nothing of it touches host memory or pages of the disk any longer: a read ends at
    /// once, because what the disk still delivers goes to memory of this process alone.
    pub(super) fn stop(&self) -> Option<DiskCopyEnd> {
        {
            let mut progress = self.progress();
            progress.stopped = true;
            if self.write {
                return (progress.running == 0).then(|| self.report(&mut progress))?;
            }
        }
        *self
            .detached
            .write()
            .unwrap_or_else(PoisonError::into_inner) = true;
        self.report(&mut self.progress())
    }

    fn report(&self, progress: &mut Progress) -> Option<DiskCopyEnd> {
        if std::mem::replace(&mut progress.reported, true) {
            return None;
        }
        let whole = progress.copied.iter().take_while(|copied| **copied).count();
        let complete = whole == progress.copied.len();
        let transfer = &self.copy.transfer;
        if complete && self.write {
            let sums = std::mem::take(&mut progress.sums);
            self.copy.set.written(transfer.id, sums);
        }
        let bytes = progress.copied.iter().filter(|copied| **copied).count() as u64;
        Some(DiskCopyEnd {
            ended: EndedCopy {
                complete_pages: u32::try_from(whole).unwrap_or(u32::MAX),
                bytes: bytes * transfer.page_bytes,
                copy_us: u64::try_from(self.begun.elapsed().as_micros()).unwrap_or(u64::MAX),
                bad_source: !complete && progress.bad == Some(whole),
                faulty_page: progress
                    .faulty
                    .filter(|_| !complete)
                    .and_then(|index| u32::try_from(index).ok()),
                ..EndedCopy::new(transfer.id, complete)
            },
            write: self.write,
            error: progress.error.take(),
            changed: std::mem::take(&mut progress.changed),
        })
    }

    /// Copies the pages of a part from host memory, and takes their checksums from the copy, which nobody can change.
    fn gather(&self, part: Part, buffer: &mut [u8]) -> io::Result<()> {
        let record = self.copy.transfer.record.as_ref();
        let record = record.ok_or_else(|| io::Error::other("a write without a record"))?;
        let block = block_of(record);
        let geometry = self.copy.set.geometry();
        let page_bytes = geometry.page_bytes as usize;
        let mut sums = Vec::with_capacity(part.pages as usize);
        let pages = buffer.chunks_exact_mut(geometry.stride as usize);
        for (index, page) in (part.first..).zip(pages).take(part.pages as usize) {
            let (bytes, padding) = page.split_at_mut(page_bytes);
            let mut sum = self.copy.set.keys.begin_sum();
            let mut at = self.host_offset(index);
            for bytes in bytes.chunks_mut(STEP_BYTES) {
                let read = self.copy.depot.buffer().read_into(at, bytes);
                read.map_err(io::Error::other)?;
                sum.add(bytes);
                at += bytes.len() as u64;
            }
            padding.fill(0);
            let fingerprint = record.fingerprints.get(index).copied();
            let listed = HeaderPage {
                fingerprint: fingerprint
                    .ok_or_else(|| io::Error::other("a page without a record"))?,
                stored: record.stored,
                sum: PageSum::default(),
            };
            let place = usize::from(record.first) + index;
            let place = u16::try_from(place).map_err(io::Error::other)?;
            sums.push(
                self.copy
                    .set
                    .keys
                    .end_sum(&block.place(place, &listed), sum),
            );
        }
        let mut progress = self.progress();
        progress.sums[part.first..part.first + sums.len()].copy_from_slice(&sums);
        Ok(())
    }

    /// Copies the pages of a part into host memory and verifies them. Returns the number of pages before the first one
    /// whose checksum does not match.
    fn scatter(&self, part: Part, buffer: &[u8]) -> io::Result<usize> {
        let detached = self.detached.read().unwrap_or_else(PoisonError::into_inner);
        if *detached {
            return Ok(0);
        }
        let geometry = self.copy.set.geometry();
        let streaming = buffer.len() as u64 >= NON_TEMPORAL_MIN_BYTES;
        let pages = buffer.chunks_exact(geometry.stride as usize);
        for (count, page) in pages.take(part.pages as usize).enumerate() {
            let index = part.first + count;
            let bytes = &page[..geometry.page_bytes as usize];
            // The pages of the destination are reserved: what lies there counts only after the end of the copy.
            let mut sum = self.copy.set.keys.begin_sum();
            let mut at = self.host_offset(index);
            for bytes in bytes.chunks(STEP_BYTES) {
                sum.add(bytes);
                let depot = self.copy.depot.buffer();
                let written = match streaming {
                    true => depot.write_streaming(at, bytes),
                    false => depot.write_from(at, bytes),
                };
                written.map_err(io::Error::other)?;
                at += bytes.len() as u64;
            }
            let matches = self.sources[index].as_ref().is_some_and(|source| {
                let listed = &source.block.pages[usize::from(source.index)];
                let place = source.block.place(source.index, listed);
                self.copy.set.keys.end_sum(&place, sum) == listed.sum
            });
            if !matches {
                self.place_failed(index, part.disk + count as u32);
                let mut progress = self.progress();
                progress.changed.push(part.disk + count as u32);
                progress.bad = Some(progress.bad.map_or(index, |bad| bad.min(index)));
                return Ok(count);
            }
        }
        Ok(part.pages as usize)
    }

    /// Where a page lies in host memory, in bytes.
    fn host_offset(&self, index: usize) -> u64 {
        let page_bytes = self.copy.transfer.page_bytes;
        let stride = page_stride_bytes(page_bytes);
        self.copy.depot.pages_at(page_bytes) + u64::from(self.host[index]) * stride
    }
}

/// The block of a record, for checksums.
fn block_of(record: &Record) -> BlockHeader {
    BlockHeader {
        anchor: record.anchor,
        domain: record.domain,
        phase: record.phase,
        pages: Vec::new(),
    }
}
