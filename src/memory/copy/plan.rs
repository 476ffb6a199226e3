//! Checks a job and cuts it into steps.
//!
//! Steps are computed on the fly from their number, so that a plan's size depends on its runs and its layout, not on
//! the number of its pages.

use super::{CopyError, Side};
use crate::depot::{Depot, page_stride_bytes};
use crate::layout::PageLayout;
use kvferry_types::{Direction, FragmentPair, PageList, PageRun};

/// Longest step in bytes: the most that each thread still copies after a cancel, or while a load waits for its CPU.
pub const CUT_BYTES: u64 = 128 << 10;

/// Approximate bytes of a part: loads, and all copies of a GPU, are cut into parts. Large compared with the cost of
/// starting one.
pub const COPY_PART_BYTES: u64 = 32 << 20;

/// One contiguous copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyRange {
    /// Index of the allocation in the registration.
    pub allocation: u32,
    /// Byte offset in the allocation.
    pub device_bytes: u64,
    /// Byte offset in the depot's memory, header included.
    pub depot_bytes: u64,
    /// Length in bytes.
    pub len_bytes: u64,
}

/// A copy before any check.
#[derive(Debug, Clone, Copy)]
pub struct CopyRequest<'a> {
    /// Store or load.
    pub direction: Direction,
    /// Layout of the bytes of a page.
    pub layout: &'a PageLayout,
    /// The host's memory.
    pub depot: &'a Depot,
    /// As in [`super::CopyJob::pairs`].
    pub pairs: &'a [FragmentPair],
}

/// Pages that are consecutive on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PairRun {
    device: u64,
    depot: u64,
    pages: u64,
    /// Number of this run's first step.
    first_step: u64,
}

/// A part of every page that is contiguous on both sides, at most [`CUT_BYTES`] long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    allocation: u32,
    base_bytes: u64,
    stride_bytes: u64,
    block_offset_bytes: u64,
    len_bytes: u64,
}

/// A checked job: the contiguous ranges that it copies.
#[derive(Debug)]
pub struct CopyPlan {
    runs: Vec<PairRun>,
    pieces: Vec<Piece>,
    /// True if pages are consecutive without a gap on both sides, so that a run of them is one range.
    seamless: bool,
    page_bytes: u64,
    depot_stride_bytes: u64,
    /// Offset of page 0 in the depot.
    pages_at: u64,
    /// Number of steps.
    pub(super) steps: u64,
    /// Bytes of all steps.
    pub(super) bytes: u64,
}

impl CopyPlan {
    /// Checks a job completely; an error names the pair and the page. `allocation_bytes` returns the size of an
    /// allocation of the layout.
    pub fn new(
        job: &CopyRequest<'_>,
        allocation_bytes: impl Fn(u32) -> Option<u64>,
    ) -> Result<Self, CopyError> {
        check_layout(job.layout, allocation_bytes)?;
        check_pages(job)?;
        let layout = job.layout;
        let columns = columns(layout);
        let depot_stride_bytes = page_stride_bytes(layout.slot_bytes);
        let seamless = depot_stride_bytes == layout.page_bytes
            && columns.len() == 1
            && columns[0].stride_bytes == layout.page_bytes;
        let mut plan = Self {
            runs: pair_runs(job.direction, job.pairs),
            pieces: columns.into_iter().flat_map(cut).collect(),
            seamless,
            page_bytes: layout.page_bytes,
            depot_stride_bytes,
            pages_at: job.depot.pages_at(layout.slot_bytes),
            steps: 0,
            bytes: 0,
        };
        for index in 0..plan.runs.len() {
            plan.runs[index].first_step = plan.steps;
            plan.steps += plan.steps_of(plan.runs[index].pages);
            plan.bytes += plan.runs[index].pages * plan.page_bytes;
        }
        Ok(plan)
    }

    fn steps_of(&self, pages: u64) -> u64 {
        if self.seamless {
            (pages * self.page_bytes).div_ceil(CUT_BYTES)
        } else {
            pages * self.pieces.len() as u64
        }
    }

    /// The steps of `range`, page by page, and within a page in the order of the depot, so that depot offsets ascend
    /// within a run of pages.
    pub(super) fn steps(
        &self,
        range: std::ops::Range<u64>,
    ) -> impl Iterator<Item = CopyRange> + '_ {
        let at = self
            .runs
            .partition_point(|run| run.first_step <= range.start);
        let mut at = at.saturating_sub(1);
        range.map_while(move |number| {
            while self
                .runs
                .get(at + 1)
                .is_some_and(|next| next.first_step <= number)
            {
                at += 1;
            }
            let run = self.runs.get(at)?;
            Some(self.step(run, number - run.first_step))
        })
    }

    /// Bytes of the whole plan.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The whole plan as ranges of maximal length: no two neighbours are contiguous in both memories.
    pub fn ranges(&self) -> impl Iterator<Item = CopyRange> + '_ {
        self.ranges_from(0).map(|(range, _)| range)
    }

    /// The ranges from a step on, each with the number of the step after it, at which a later call continues. See
    /// [`Self::is_done`].
    pub fn ranges_from(&self, first_step: u64) -> impl Iterator<Item = (CopyRange, u64)> + '_ {
        let mut steps = self.steps(first_step..self.steps).peekable();
        let mut step = first_step;
        std::iter::from_fn(move || {
            let mut range = steps.next()?;
            step += 1;
            while let Some(next) = steps.next_if(|next| range.goes_on_with(next)) {
                range.len_bytes += next.len_bytes;
                step += 1;
            }
            Some((range, step))
        })
    }

    /// Returns true if no step is left from this one on.
    pub fn is_done(&self, step: u64) -> bool {
        step >= self.steps
    }

    fn step(&self, run: &PairRun, number: u64) -> CopyRange {
        if self.seamless {
            let start = number * CUT_BYTES;
            let piece = &self.pieces[0];
            return CopyRange {
                allocation: piece.allocation,
                device_bytes: piece.base_bytes + run.device * self.page_bytes + start,
                depot_bytes: self.pages_at + run.depot * self.page_bytes + start,
                len_bytes: CUT_BYTES.min(run.pages * self.page_bytes - start),
            };
        }
        let pieces = self.pieces.len() as u64;
        let (page, piece) = (number / pieces, &self.pieces[(number % pieces) as usize]);
        let depot_page = self.pages_at + (run.depot + page) * self.depot_stride_bytes;
        CopyRange {
            allocation: piece.allocation,
            device_bytes: piece.base_bytes + (run.device + page) * piece.stride_bytes,
            depot_bytes: depot_page + piece.block_offset_bytes,
            len_bytes: piece.len_bytes,
        }
    }
}

impl CopyRange {
    fn goes_on_with(&self, next: &Self) -> bool {
        self.allocation == next.allocation
            && self.device_bytes + self.len_bytes == next.device_bytes
            && self.depot_bytes + self.len_bytes == next.depot_bytes
    }
}

/// The fragments of a page, merged where they are contiguous on the device in the same order as in the depot.
fn columns(layout: &PageLayout) -> Vec<Piece> {
    let mut columns: Vec<Piece> = Vec::new();
    for fragment in &layout.fragments {
        match columns.last_mut() {
            Some(last)
                if last.allocation == fragment.allocation
                    && last.stride_bytes == fragment.page_stride_bytes
                    && last.base_bytes + last.len_bytes == fragment.base_bytes =>
            {
                last.len_bytes += fragment.page_bytes;
            }
            _ => columns.push(Piece {
                allocation: fragment.allocation,
                base_bytes: fragment.base_bytes,
                stride_bytes: fragment.page_stride_bytes,
                block_offset_bytes: fragment.block_offset_bytes,
                len_bytes: fragment.page_bytes,
            }),
        }
    }
    columns
}

fn cut(column: Piece) -> impl Iterator<Item = Piece> {
    (0..column.len_bytes.div_ceil(CUT_BYTES)).map(move |index| {
        let start = index * CUT_BYTES;
        Piece {
            base_bytes: column.base_bytes + start,
            block_offset_bytes: column.block_offset_bytes + start,
            len_bytes: CUT_BYTES.min(column.len_bytes - start),
            ..column
        }
    })
}

/// Checks that every page of every fragment lies in its mapped allocation, whichever memory the layout was derived for.
fn check_layout(
    layout: &PageLayout,
    allocation_bytes: impl Fn(u32) -> Option<u64>,
) -> Result<(), CopyError> {
    let last_page = u64::from(layout.device_pages.saturating_sub(1));
    for (index, fragment) in layout.fragments.iter().enumerate() {
        let end = last_page
            .checked_mul(fragment.page_stride_bytes)
            .and_then(|bytes| bytes.checked_add(fragment.page_bytes))
            .and_then(|bytes| bytes.checked_add(fragment.base_bytes));
        if end.is_none() || end > allocation_bytes(fragment.allocation) {
            return Err(CopyError::Layout { fragment: index });
        }
    }
    Ok(())
}

fn check_pages(job: &CopyRequest<'_>) -> Result<(), CopyError> {
    // Offsets in the depot are computed from the engine's layout, so that both must have the same page size.
    let (depot_bytes, engine_bytes) = (job.depot.page_bytes(), job.layout.slot_bytes);
    let depot_bytes = depot_bytes.ok().flatten().unwrap_or(0);
    if depot_bytes != engine_bytes {
        return Err(CopyError::PageBytes {
            depot_bytes,
            engine_bytes,
        });
    }
    let device = (Side::Device, job.layout.device_pages);
    let depot = (Side::Depot, job.depot.arena_pages(job.layout.slot_bytes));
    let (src, dst) = match job.direction {
        Direction::Store => (device, depot),
        Direction::Load => (depot, device),
    };
    for (pair, lists) in job.pairs.iter().enumerate() {
        check_list(pair, &lists.src, src)?;
        check_list(pair, &lists.dst, dst)?;
        let (src_pages, dst_pages) = (lists.src.pages(), lists.dst.pages());
        if src_pages != dst_pages {
            return Err(CopyError::PageCounts {
                pair,
                src_pages,
                dst_pages,
            });
        }
    }
    let mut written: Vec<PageRun> = job
        .pairs
        .iter()
        .flat_map(|pair| pair.dst.0.iter())
        .copied()
        .collect();
    written.retain(|run| run.count > 0);
    written.sort_unstable();
    let twice = written
        .windows(2)
        .find(|runs| runs[0].end() > u64::from(runs[1].start));
    match twice {
        Some(runs) => Err(CopyError::WrittenTwice {
            side: dst.0,
            page: u64::from(runs[1].start),
        }),
        None => Ok(()),
    }
}

fn check_list(pair: usize, list: &PageList, (side, pages): (Side, u32)) -> Result<(), CopyError> {
    match list.0.iter().find(|run| run.end() > u64::from(pages)) {
        Some(run) => Err(CopyError::OutOfRange {
            pair,
            side,
            page: u64::from(run.start.max(pages)),
            pages,
        }),
        None => Ok(()),
    }
}

/// Walks both lists of every pair in parallel and merges pages that are consecutive on both sides, also across pairs.
fn pair_runs(direction: Direction, pairs: &[FragmentPair]) -> Vec<PairRun> {
    let mut runs: Vec<PairRun> = Vec::new();
    for pair in pairs {
        let (device, depot) = match direction {
            Direction::Store => (&pair.src, &pair.dst),
            Direction::Load => (&pair.dst, &pair.src),
        };
        let (mut device, mut depot) = (Cursor::new(device), Cursor::new(depot));
        while let (Some(from), Some(to)) = (device.rest(), depot.rest()) {
            let pages = from.pages.min(to.pages);
            device.skip(pages);
            depot.skip(pages);
            match runs.last_mut() {
                Some(last)
                    if last.device + last.pages == from.start
                        && last.depot + last.pages == to.start =>
                {
                    last.pages += pages;
                }
                _ => runs.push(PairRun {
                    device: from.start,
                    depot: to.start,
                    pages,
                    first_step: 0,
                }),
            }
        }
    }
    runs
}

/// A position in a list of pages.
struct Cursor<'a> {
    runs: &'a [PageRun],
    skipped: u64,
}

/// The rest of a run after the cursor.
struct Rest {
    start: u64,
    pages: u64,
}

impl<'a> Cursor<'a> {
    fn new(list: &'a PageList) -> Self {
        Self {
            runs: &list.0,
            skipped: 0,
        }
    }

    fn rest(&mut self) -> Option<Rest> {
        loop {
            let run = self.runs.first()?;
            if self.skipped < u64::from(run.count) {
                return Some(Rest {
                    start: u64::from(run.start) + self.skipped,
                    pages: u64::from(run.count) - self.skipped,
                });
            }
            self.runs = &self.runs[1..];
            self.skipped = 0;
        }
    }

    fn skip(&mut self, pages: u64) {
        self.skipped += pages;
    }
}
