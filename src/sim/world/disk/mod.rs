//! The disk of one shard: pages and headers that outlive processes, a part of which a power loss may take.
//!
//! Models what `tiers/disk` guarantees. The process that has the disk open keeps a table of the listed pages. The table is
//! written to headers, one for each region, and made durable by a flush. Between two flushes the disk has two versions of
//! what was written since: the one that processes read, and the durable one. The end of a process loses the table alone. A
//! power loss, or a disk that goes away, takes any part of what was not flushed: each region, and each cell of a page, by
//! itself. A removal is durable before its page is overwritten, and so is the mark of a reset before it is answered.

mod headers;
mod pages;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use fastrand::Rng;

use super::storage::{Content, EMPTY};
use kvferry_types::{DepotId, PageRecord, Scope, Stored, Time, TransferId, WorkerId};

/// Pages whose blocks' headers lie in one region.
const REGION_PAGES: u32 = 8;
/// Segments of a full set.
const SEGMENTS: u32 = 4;

/// Identity of the pages of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SetKey {
    pub(super) layout: [u8; 16],
    /// Cells of one page.
    pub(super) cells: u32,
}

/// One copy of a process.
pub(super) type DiskCopyId = (WorkerId, u32, TransferId);

/// A page of a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Listed {
    record: PageRecord,
    /// Stands for the checksum: the content that was written.
    sum: Content,
}

/// The headers of the disk: the pages of each region that has some.
type Headers = BTreeMap<u32, BTreeMap<u32, Listed>>;

/// The files of a set.
#[derive(Debug)]
struct SimSet {
    /// What processes read.
    cells: Vec<Content>,
    /// The durable content of the cells that were written since the last flush.
    durable_cells: BTreeMap<usize, Content>,
    /// What processes read.
    headers: Headers,
    durable_headers: Headers,
    segments: BTreeSet<u32>,
}

/// State of the process that has a set open, which ends with it.
#[derive(Debug, Default)]
struct OpenSet {
    table: BTreeMap<u32, Listed>,
    dirty: BTreeSet<u32>,
    /// Contents of pages that were written and not listed yet.
    written: BTreeMap<TransferId, Vec<Content>>,
    /// Segments that may be used, of a disk without room for more.
    usable: Option<u32>,
}

/// Why the disk does not do what was requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DiskFailure {
    /// The disk is away, or a read or write fails.
    Io,
    /// The disk has no room for another segment.
    Full,
}

/// What a loss took.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Lost {
    pub(super) cells: u64,
    pub(super) regions: u64,
}

/// What was found when a set was opened.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct FoundPages {
    /// Listed pages whose content is there.
    pub(super) whole: u64,
    /// Listed pages whose content was lost.
    pub(super) lost: u64,
}

/// The disk of one shard.
#[derive(Debug)]
pub(super) struct SimDisk {
    id: DepotId,
    capacity_cells: u32,
    sets: BTreeMap<SetKey, SimSet>,
    /// The set that is open, or was last: copies still use it.
    current: Option<SetKey>,
    open: Option<OpenSet>,
    /// The process that has the lock, and the time before which no other process gets it, because writes of an ended process
    /// are in flight.
    holder: Option<(WorkerId, u32)>,
    locked_until: Time,
    /// Copies that read or write the current set.
    copies: BTreeSet<DiskCopyId>,
    /// Resets that are not in all headers yet.
    marks: Vec<(Scope, Stored)>,
    mark_changes: u64,
    /// Headers written by the flush that is under way, and the number of marks then.
    flushing: Option<u64>,
    /// Pages that the leader may take for readable although they are not: they were lost or removed without its doing.
    excused: BTreeSet<u32>,
    away_until: Option<Time>,
    /// The disk was away since it was opened: what the process has open fails until it is opened again.
    broken: bool,
    pub(super) full_until: Option<Time>,
    /// Until when these workers do not reach the disk.
    pub(super) unreachable: BTreeMap<WorkerId, Time>,
}

impl SimDisk {
    pub(super) fn new(id: DepotId, capacity_cells: u32) -> Self {
        Self {
            id,
            capacity_cells,
            sets: BTreeMap::new(),
            current: None,
            open: None,
            holder: None,
            locked_until: Time(0),
            copies: BTreeSet::new(),
            marks: Vec::new(),
            mark_changes: 0,
            flushing: None,
            excused: BTreeSet::new(),
            away_until: None,
            broken: false,
            full_until: None,
            unreachable: BTreeMap::new(),
        }
    }

    pub(super) fn id(&self) -> DepotId {
        self.id
    }

    /// The disk goes away, with any part of what is not durable.
    pub(super) fn go_away(&mut self, until: Time, rng: &mut Rng) -> Lost {
        self.away_until = Some(until);
        self.broken = self.holder.is_some() || self.is_busy();
        self.lose(rng)
    }

    /// Ends the faults of the disk.
    pub(super) fn heal(&mut self) {
        self.away_until = None;
        self.full_until = None;
        self.unreachable.clear();
    }

    /// True if the disk can be opened.
    pub(super) fn is_there(&self, now: Time) -> bool {
        self.away_until.is_none_or(|until| until <= now)
    }

    /// False while every read and write fails.
    pub(super) fn works(&self, now: Time) -> bool {
        self.is_there(now) && !self.broken
    }

    fn is_full(&self, now: Time) -> bool {
        self.full_until.is_some_and(|until| until > now)
    }

    /// True if this worker reaches the disk.
    pub(super) fn reaches(&self, worker: WorkerId, now: Time) -> bool {
        let until = self.unreachable.get(&worker);
        until.is_none_or(|until| *until <= now)
    }

    /// Takes the lock, unless the process has it. Returns false while another process, or what it began, has it.
    pub(super) fn take(&mut self, process: (WorkerId, u32), now: Time) -> bool {
        if self.holder.is_none() && self.locked_until <= now {
            self.holder = Some(process);
        }
        self.holder == Some(process)
    }

    /// The process closes the disk without a flush.
    pub(super) fn close(&mut self, process: (WorkerId, u32)) {
        if self.holder == Some(process) {
            self.holder = None;
            self.open = None;
            self.flushing = None;
            self.broken &= self.is_busy();
        }
    }

    /// The process has ended. What it began ends by `drained`.
    pub(super) fn died(&mut self, process: (WorkerId, u32), drained: Time) {
        self.copies
            .retain(|(worker, incarnation, _)| (*worker, *incarnation) != process);
        if self.holder == Some(process) {
            self.close(process);
            self.locked_until = drained;
        }
        self.broken &= self.open.is_some() || self.is_busy();
    }

    pub(super) fn begin_copy(&mut self, copy: DiskCopyId) {
        self.copies.insert(copy);
    }

    pub(super) fn end_copy(&mut self, copy: DiskCopyId) {
        self.copies.remove(&copy);
        self.broken &= self.open.is_some() || self.is_busy();
    }

    /// True while a copy uses a set: no other one is opened.
    pub(super) fn is_busy(&self) -> bool {
        !self.copies.is_empty()
    }

    /// Pages of a set that the cap has room for.
    fn pages(&self, key: SetKey) -> u32 {
        self.capacity_cells / key.cells
    }

    fn segment_pages(&self, key: SetKey) -> u32 {
        self.pages(key).div_ceil(SEGMENTS).max(1)
    }

    fn set(&self) -> Option<&SimSet> {
        self.sets.get(&self.current?)
    }

    fn set_mut(&mut self) -> Option<&mut SimSet> {
        self.sets.get_mut(&self.current?)
    }

    /// The set that is open.
    pub(super) fn open_key(&self) -> Option<SetKey> {
        self.current.filter(|_| self.open.is_some())
    }

    /// Opens a set for the holder of the lock: reads its headers, and leaves out what a reset has removed. The set that was
    /// open is flushed.
    pub(super) fn open(&mut self, key: SetKey) -> FoundPages {
        if self.open.is_some() {
            self.write_headers();
            self.sync();
        }
        self.current = Some(key);
        let cells = self.capacity_cells as usize;
        let set = self.sets.entry(key).or_insert_with(|| SimSet {
            cells: vec![EMPTY; cells],
            durable_cells: BTreeMap::new(),
            headers: BTreeMap::new(),
            durable_headers: BTreeMap::new(),
            segments: BTreeSet::new(),
        });
        let listed = set.headers.values().flatten();
        let mut open = OpenSet {
            table: listed.map(|(page, listed)| (*page, *listed)).collect(),
            ..OpenSet::default()
        };
        for (scope, through) in &self.marks {
            open.invalidate(scope, *through);
        }
        self.open = Some(open);
        self.flushing = None;
        let mut found = FoundPages::default();
        let all = 0..self.pages(key);
        self.excused = all.filter(|page| self.served(*page).is_none()).collect();
        let open = self.open.iter();
        for page in open.flat_map(|open| open.table.keys()) {
            match self.served(*page) {
                Some(_) => found.whole += 1,
                None => found.lost += 1,
            }
        }
        found
    }

    /// Pages of the open set that may be used.
    pub(super) fn capacity_pages(&self) -> u32 {
        let (Some(key), Some(open)) = (self.current, &self.open) else {
            return 0;
        };
        let usable = open.usable.unwrap_or(SEGMENTS);
        self.pages(key).min(usable * self.segment_pages(key))
    }

    /// Uses no more than the segments that exist. Returns true if that leaves fewer pages.
    pub(super) fn shrink(&mut self) -> bool {
        let before = self.capacity_pages();
        let segments = self.set().map(|set| &set.segments);
        let exist = segments.map_or(0, |segments| {
            (0..SEGMENTS)
                .take_while(|one| segments.contains(one))
                .count()
        });
        let exist = u32::try_from(exist).unwrap_or(SEGMENTS);
        if let Some(open) = &mut self.open {
            open.usable = Some(open.usable.unwrap_or(SEGMENTS).min(exist));
        }
        self.capacity_pages() < before
    }

    /// True while the disk has less room than the cap.
    pub(super) fn is_short(&self) -> bool {
        self.open.as_ref().is_some_and(|open| open.usable.is_some())
    }

    /// Uses all that the cap permits again, if there is room for the next segment.
    pub(super) fn grow(&mut self, now: Time) -> bool {
        let next = self.open.as_ref().and_then(|open| open.usable);
        let grown = next.is_some_and(|next| self.make_segment(next, now).is_ok());
        if let Some(open) = self.open.as_mut().filter(|_| grown) {
            open.usable = None;
        }
        grown
    }

    /// Makes a segment that does not exist. Sets that are not open make room for it.
    fn make_segment(&mut self, segment: u32, now: Time) -> Result<(), DiskFailure> {
        let Some(key) = self.current else {
            return Err(DiskFailure::Io);
        };
        if self
            .set()
            .is_some_and(|set| set.segments.contains(&segment))
        {
            return Ok(());
        }
        if !self.works(now) {
            return Err(DiskFailure::Io);
        }
        if self.is_full(now) {
            return Err(DiskFailure::Full);
        }
        let used = |(key, set): (&SetKey, &SimSet)| {
            let segments = u32::try_from(set.segments.len()).unwrap_or(SEGMENTS);
            segments * self.segment_pages(*key) * key.cells
        };
        let used: u32 = self.sets.iter().map(used).sum();
        if used + self.segment_pages(key) * key.cells > self.capacity_cells + SEGMENTS * key.cells {
            self.sets.retain(|other, _| *other == key);
        }
        if let Some(set) = self.set_mut() {
            set.segments.insert(segment);
        }
        Ok(())
    }
}
