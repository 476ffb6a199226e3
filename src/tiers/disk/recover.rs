//! Opens a set: reads its index or the tables of its segments, and keeps the headers whose pages no later store has
//! overwritten and no reset has removed.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use kvferry_types::Stored;

use super::buffer::AlignedBuffer;
use super::faults::is_full;
use super::files::{DiskFile, Files};
use super::format::{
    BlockHeader, FormatError, Geometry, INDEX_NAME, Mark, Marks, Numbers, REGION_PAGES, Region,
    SetFile, SetKey, Sweeps, read_index, segment_name, segment_number,
};
use super::room::Room;
use super::set::{DiskSet, Segments, lock_file};
use super::sweep::{is_swept, write_sweep};
use super::table::{Slots, Table};
use super::verify::{Verifier, segment_of};

/// Bytes of a table that are read at one time.
const TABLE_PART_BYTES: u64 = 4 << 20;
/// What stands in the place of a slot that cannot be read: no slot begins with it.
const NO_SLOT: u8 = 0xff;

/// What a set was opened for.
#[derive(Debug, Clone, Copy)]
pub(super) struct SetOf {
    pub(super) tier: u128,
    pub(super) shard: u16,
    pub(super) key: SetKey,
}

/// What a recovery found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Recovered {
    /// The headers came from the index of a clean end.
    pub by_index: bool,
    /// Pages that are listed now.
    pub pages: u64,
    /// Blocks that are listed now.
    pub blocks: u64,
    /// Slots whose checksum or fields were wrong: torn writes, or damage.
    pub bad_slots: u64,
    /// Pages that were listed, and that a later store had overwritten.
    pub overwritten_pages: u64,
    /// Pages that were listed and that resets had removed.
    pub reset_pages: u64,
    /// Pages that were written shortly before an unclean end and did not reach the disk.
    pub lost_pages: u64,
    /// Pages that were written shortly before an unclean end and did.
    pub recent_pages: u64,
}

impl Recovered {
    /// True if the headers on the disk differ from those that are listed, or may not be durable.
    fn changed(&self) -> bool {
        let cut = self.overwritten_pages + self.reset_pages + self.lost_pages + self.recent_pages;
        cut + self.bad_slots > 0
    }
}

/// The headers of a set's tables.
#[derive(Debug, Default)]
pub(super) struct Headers {
    /// First page and header of each block, with the sequence number of its slot.
    pub(super) blocks: Vec<(u32, BlockHeader, u64)>,
    pub(super) slots: HashMap<u32, Slots>,
    pub(super) sequence: u64,
    /// Writes up to this one were durable.
    pub(super) durable: u64,
    pub(super) bad_slots: u64,
}

/// Opens a set, and creates it if it does not exist. Blocks while the tables are read: `progress` is called with the
/// bytes that were read and those of all tables.
pub(super) fn open_set(
    of: SetOf,
    disks: &[Arc<dyn Files>],
    (room, marks): (&Arc<Room>, &Marks),
    progress: &dyn Fn(u64, u64),
) -> io::Result<(DiskSet, Recovered)> {
    let directories = set_directories(of, disks)?;
    let file = set_file(of, &directories, room.share())?;
    let geometry = file.geometry;
    let count = geometry.segments(room.share());
    let (mut segments, mut short) = (Vec::new(), false);
    let name = of.key.name();
    for (disk, directory) in directories.iter().enumerate() {
        let opening = Opening {
            file: &file,
            disk,
            sweeps: marks.sweeps(),
            make_room: &|| room.remove_closed(disk, &name),
        };
        let (opened, complete) = opening.segments(directory.as_ref(), count)?;
        segments.push(opened);
        short |= !complete;
    }
    let segments_bytes = u64::from(count) * geometry.segment_bytes();
    room.open(&name, room.share().saturating_sub(segments_bytes))?;
    let index = match directories.first() {
        Some(directory) => {
            let index = read_index(directory.as_ref(), file.set, geometry.pages(count))?;
            let index = index.filter(|index| matches_headers(&file, &segments, index.sequence));
            // From here on the headers change, and the index does not.
            if directory.open(INDEX_NAME)?.is_some() {
                directory.remove(INDEX_NAME)?;
                directory.sync()?;
            }
            index
        }
        None => None,
    };
    let mut found = Recovered {
        by_index: index.is_some(),
        ..Recovered::default()
    };
    let mut recovering = Recovering {
        slot_bytes: geometry.slot_bytes,
        progress,
        marks,
        stale: Vec::new(),
    };
    let headers = match index {
        Some(index) => {
            let blocks = index.blocks.into_iter();
            Headers {
                blocks: blocks
                    .map(|(start, block)| (start, block, index.sequence))
                    .collect(),
                slots: index.regions.into_iter().collect(),
                sequence: index.sequence,
                durable: index.sequence,
                bad_slots: 0,
            }
        }
        None => read_tables(&file, &segments, &mut recovering)?,
    };
    found.bad_slots = headers.bad_slots;
    let Headers {
        mut blocks,
        slots,
        sequence,
        durable,
        ..
    } = headers;
    let lengths: Vec<(u32, usize)> = lengths(&blocks);
    let capacity = geometry.pages(count);
    cut_without_segment(&geometry, &segments, &mut blocks);
    found.overwritten_pages = resolve(&mut blocks, capacity);
    let (blocks, lost, recent) = verify_recent(&file, &segments, blocks, durable);
    (found.lost_pages, found.recent_pages) = (lost, recent);
    let mut table = Table::new(blocks, slots, (sequence, durable));
    for (start, listed) in lengths {
        let kept = table.block(start).map_or(0, |block| block.pages.len());
        if kept != listed {
            table.mark_dirty(start);
        }
    }
    for mark in marks.iter() {
        let before = table.pages();
        let mut from = Some(0);
        while let Some(page) = from {
            from = table.invalidate(&mark.scope, mark.through, page, u32::MAX);
        }
        found.reset_pages += before - table.pages();
    }
    let stale = recovering.stale.into_iter();
    stale.for_each(|region| table.rewrite(region));
    (found.pages, found.blocks) = (table.pages(), table.len() as u64);
    let shared = (Arc::clone(room), marks.sweeps().over);
    let set = DiskSet::new(file, directories, segments, shared, table);
    if short {
        set.shrink();
    }
    if !found.by_index {
        // What was read need not be durable: a process that ended may not have flushed it.
        set.flush()?;
    }
    let (first, segment, _) = geometry.slot_at(0, 0);
    if found.changed() || set.existing_segment(first, segment).is_some() {
        // So that the next start does not verify the same pages again, and a copy of an index does not match any longer.
        set.table().checkpoint();
        set.flush()?;
    }
    Ok((set, found))
}

/// True if the index is that of the last clean end, and not one that was put back: region 0 is written as the last thing
/// before the index, and once more at a start before anything else is.
fn matches_headers(file: &SetFile, segments: &[Segments], sequence: u64) -> bool {
    let geometry = &file.geometry;
    let (disk, segment, at) = geometry.slot_at(0, 0);
    let mut slots = AlignedBuffer::new(2 * geometry.slot_bytes as usize);
    let read =
        segment_of(segments, disk, segment).and_then(|opened| opened.read(slots.bytes_mut(), at));
    let mut headers = Headers::default();
    if read.is_ok() {
        headers.add(file, 0, slots.bytes(), &mut Unchecked);
    }
    let matches = headers.bad_slots == 0 && headers.sequence == sequence;
    if !matches {
        let found = headers.sequence;
        tracing::warn!(
            sequence,
            found,
            "the index of a disk is not that of the last clean end: its headers are read"
        );
    }
    matches
}

/// First page and listed length of each block.
pub(super) fn lengths(blocks: &[(u32, BlockHeader, u64)]) -> Vec<(u32, usize)> {
    let blocks = blocks.iter();
    blocks
        .map(|(start, block, _)| (*start, block.pages.len()))
        .collect()
}

/// Cuts blocks at the first page whose segment is gone: another set needed the room on that disk, or the cap is smaller
/// now.
pub(super) fn cut_without_segment(
    geometry: &Geometry,
    segments: &[Segments],
    blocks: &mut Vec<(u32, BlockHeader, u64)>,
) {
    for (start, block, _) in &mut *blocks {
        let mut kept = 0;
        for extent in geometry.extents(*start, block.pages.len() as u32) {
            let of_disk = segments.get(extent.disk);
            match of_disk.and_then(|of_disk| of_disk.get(extent.segment as usize)) {
                Some(Some(_)) => kept += extent.pages as usize,
                _ => break,
            }
        }
        block.pages.truncate(kept);
    }
    blocks.retain(|(_, block, _)| !block.pages.is_empty());
}

fn set_directories(of: SetOf, disks: &[Arc<dyn Files>]) -> io::Result<Vec<Arc<dyn Files>>> {
    let name = of.key.name();
    let directories = disks.iter().map(|disk| match disk.directory(&name)? {
        Some(directory) => Ok(directory),
        None => {
            let directory = disk.create_directory(&name)?;
            disk.sync()?;
            Ok(directory)
        }
    });
    directories.collect()
}

/// The set file, which lies on the first disk. Written for a new set.
fn set_file(of: SetOf, directories: &[Arc<dyn Files>], share: u64) -> io::Result<SetFile> {
    let first = directories.first();
    let first = first.ok_or_else(|| io::Error::other("a disk tier needs a directory"))?;
    let disks = u16::try_from(directories.len()).map_err(io::Error::other)?;
    match SetFile::read(first.as_ref())? {
        Some(Ok(file)) => {
            let expected = (of.tier, of.shard, of.key, disks);
            let found = (file.tier, file.shard, file.key, file.geometry.disks);
            if expected != found {
                return Err(invalid(FormatError::Field {
                    field: "identity of the set",
                    value: file.shard.into(),
                }));
            }
            let fitting = Geometry::new(&of.key, disks, share).map_err(invalid)?;
            if file.geometry.segments(share) > 0 || fitting == file.geometry {
                return Ok(file);
            }
            // The set was made for a larger cap: its segments would stay too large for this one for ever.
            if remove_segments(directories)? {
                tracing::warn!(
                    set = of.key.name(),
                    share,
                    segment = file.geometry.segment_bytes(),
                    "g3 leaves {share} bytes of a disk to this shard, less than one segment of the set needs: its pages are \
                     removed, and it begins anew with smaller segments"
                );
            }
            new_set(of, first.as_ref(), (disks, share))
        }
        Some(Err(FormatError::Checksum | FormatError::Short | FormatError::Magic(_))) => {
            // Without it, nothing says where the pages lie. The pages are lost.
            tracing::error!(
                set = of.key.name(),
                "the set file is damaged: its pages are removed"
            );
            remove_segments(directories)?;
            new_set(of, first.as_ref(), (disks, share))
        }
        Some(Err(error)) => Err(invalid(error)),
        None => new_set(of, first.as_ref(), (disks, share)),
    }
}

/// Removes all segments of a set. Returns false if there were none.
fn remove_segments(directories: &[Arc<dyn Files>]) -> io::Result<bool> {
    let mut removed = false;
    for directory in directories {
        let mut names = directory.names()?;
        names.retain(|name| segment_number(name).is_some());
        removed |= !names.is_empty();
        names.iter().try_for_each(|name| directory.remove(name))?;
        directory.sync()?;
    }
    Ok(removed)
}

fn new_set(of: SetOf, first: &dyn Files, (disks, share): (u16, u64)) -> io::Result<SetFile> {
    let mut id = [0; 16];
    rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())?;
    let file = SetFile {
        set: u128::from_le_bytes(id),
        tier: of.tier,
        shard: of.shard,
        key: of.key,
        geometry: Geometry::new(&of.key, disks, share).map_err(invalid)?,
    };
    file.write(first)?;
    Ok(file)
}

/// An error of the format as one of the file system, for callers that treat both alike.
pub(super) fn invalid(error: FormatError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// How the segments of a disk are opened.
struct Opening<'a> {
    file: &'a SetFile,
    disk: usize,
    sweeps: Sweeps,
    make_room: &'a dyn Fn() -> io::Result<bool>,
}

impl Opening<'_> {
    /// Opens the segments for which the cap has room, and removes those behind, and those that a sweep has left out. A segment
    /// whose creation did not end, and that the disk has no room for, is removed, too; the second value is false then.
    fn segments(&self, directory: &dyn Files, count: u32) -> io::Result<(Segments, bool)> {
        let (mut segments, mut complete) = (vec![None; count as usize], true);
        for name in directory.names()? {
            let Some(number) = segment_number(&name) else {
                continue;
            };
            let Some(place) = segments.get_mut(number as usize) else {
                directory.remove(&name)?;
                continue;
            };
            let Some(file) = directory.open(&segment_name(number))? else {
                continue;
            };
            lock_file(file.as_ref())?;
            if !self.is_used(number, file.as_ref())? {
                let (set, disk) = (self.file.key.name(), self.disk);
                tracing::warn!(
                    set,
                    disk,
                    name,
                    "the segment was not there when pages of a reset were removed, or its first headers are damaged: it is \
                     removed with its pages"
                );
                drop(file);
                directory.remove(&name)?;
                continue;
            }
            match self.allocate(number, file.as_ref()) {
                Ok(()) => *place = Some(file),
                // No header lists a page of a file that ends in its table.
                Err(error)
                    if is_full(&error) && file.bytes()? <= self.file.geometry.table_bytes() =>
                {
                    tracing::warn!(%error, name, "the disk has no room for a segment: it is removed");
                    drop(file);
                    directory.remove(&name)?;
                    complete = false;
                }
                Err(error) => return Err(error),
            }
        }
        directory.sync()?;
        Ok((segments, complete))
    }

    /// True for a segment whose headers list nothing that a sweep has removed.
    fn is_used(&self, number: u32, file: &dyn DiskFile) -> io::Result<bool> {
        Ok(file.bytes()? == 0 || is_swept(self.file, (self.disk, number), file, self.sweeps)?)
    }

    /// Gives a segment the room of all of its pages.
    fn allocate(&self, number: u32, file: &dyn DiskFile) -> io::Result<()> {
        let is_new = file.bytes()? == 0;
        loop {
            let allocated = file.allocate(self.file.geometry.segment_bytes());
            if !allocated.as_ref().is_err_and(is_full) || !(self.make_room)()? {
                allocated?;
                break;
            }
        }
        match is_new {
            true => write_sweep(self.file, (self.disk, number), file, self.sweeps.over),
            false => Ok(()),
        }
    }
}

/// How the tables of a set are read, and what is done with slots that are not whole.
pub(super) trait TableReader {
    /// Reads a part of the table of a segment.
    fn read(
        &mut self,
        file: &dyn DiskFile,
        _of: (usize, u32),
        out: &mut [u8],
        at: u64,
    ) -> io::Result<()> {
        file.read(out, at)
    }

    /// Called with the bytes that were read, and those of all tables.
    fn progress(&mut self, done: u64, all: u64);

    /// Called for each slot of a region that is not whole.
    fn bad_slot(&mut self, _region: u32, _slot: u8, _error: FormatError) {}

    /// Called for a whole slot that does not count, because the other one of its region is newer.
    fn older_slot(&mut self, _region: u32, _slot: &Region) {}
}

/// Counts slots that are not whole, and goes on.
struct Unchecked;

impl TableReader for Unchecked {
    fn progress(&mut self, _: u64, _: u64) {}
}

/// Recovery finds the slots that would bring pages of a reset back, if the newer slot of their region were damaged after
/// the marks are dropped.
struct Recovering<'a> {
    slot_bytes: u64,
    progress: &'a dyn Fn(u64, u64),
    marks: &'a Marks,
    /// Regions whose older slot lists a page that a mark covers.
    stale: Vec<u32>,
}

impl TableReader for Recovering<'_> {
    /// One slot that the disk does not read does not hide the others. It counts as one that is not whole.
    fn read(
        &mut self,
        file: &dyn DiskFile,
        (disk, segment): (usize, u32),
        out: &mut [u8],
        at: u64,
    ) -> io::Result<()> {
        let Err(first) = file.read(out, at) else {
            return Ok(());
        };
        let slot_bytes = self.slot_bytes;
        let mut whole = false;
        for (index, slot) in (at / slot_bytes..).zip(out.chunks_exact_mut(slot_bytes as usize)) {
            match file.read(slot, index * slot_bytes) {
                Ok(()) => whole = true,
                Err(error) => {
                    tracing::warn!(%error, disk, segment, index, "a slot of headers cannot be read");
                    slot.fill(NO_SLOT);
                }
            }
        }
        // A disk that reads nothing has not lost its headers.
        if whole { Ok(()) } else { Err(first) }
    }

    fn progress(&mut self, done: u64, all: u64) {
        (self.progress)(done, all);
    }

    fn older_slot(&mut self, region: u32, slot: &Region) {
        let covers = |mark: &Mark, block: &BlockHeader| {
            block.pages.iter().any(|page| {
                let old = page.stored <= mark.through;
                old && mark.scope.contains(block.domain, page.fingerprint)
            })
        };
        let mut blocks = slot.blocks.iter();
        if blocks.any(|(_, block)| self.marks.iter().any(|mark| covers(mark, block))) {
            self.stale.push(region);
        }
    }
}

/// Reads the tables of all segments.
pub(super) fn read_tables(
    file: &SetFile,
    segments: &[Segments],
    reader: &mut dyn TableReader,
) -> io::Result<Headers> {
    let geometry = &file.geometry;
    let pair = 2 * geometry.slot_bytes;
    let part = TABLE_PART_BYTES.next_multiple_of(pair);
    let existing = segments.iter().flatten().flatten().count() as u64;
    let (mut done, all) = (0, existing * geometry.table_bytes());
    let mut headers = Headers::default();
    let mut buffer = AlignedBuffer::new(part as usize);
    for (disk, of_disk) in segments.iter().enumerate() {
        for (segment, opened) in (0_u32..).zip(of_disk) {
            let Some(opened) = opened else {
                continue;
            };
            let mut at = 0;
            while at < geometry.table_bytes() {
                let bytes = part.min(geometry.table_bytes() - at);
                let read = &mut buffer.bytes_mut()[..bytes as usize];
                reader.read(opened.as_ref(), (disk, segment), read, at)?;
                for (index, slots) in (at / pair..).zip(read.chunks_exact(pair as usize)) {
                    let index = u32::try_from(index).unwrap_or(u32::MAX) * REGION_PAGES;
                    let page = geometry.page_of(disk, segment, index);
                    if let Ok(page) = u32::try_from(page) {
                        headers.add(file, page / REGION_PAGES, slots, reader);
                    }
                }
                at += bytes;
                done += bytes;
                reader.progress(done, all);
            }
        }
    }
    Ok(headers)
}

impl Headers {
    /// Adds a region: the slot with the higher sequence number that is whole.
    fn add(&mut self, file: &SetFile, number: u32, slots: &[u8], reader: &mut dyn TableReader) {
        let id = file.region_id(number);
        let halves = slots
            .chunks_exact(slots.len() / 2)
            .map(|slot| Region::decode(id, slot));
        let mut newest: Option<(u8, Region)> = None;
        for (slot, region) in (0_u8..).zip(halves) {
            match region {
                Ok(None) => {}
                Err(error) => {
                    self.bad_slots += 1;
                    reader.bad_slot(number, slot, error);
                }
                Ok(Some(region)) => {
                    let Numbers {
                        sequence, durable, ..
                    } = region.numbers;
                    self.sequence = self.sequence.max(sequence);
                    self.durable = self.durable.max(durable);
                    let older = match newest.take() {
                        Some(other) if other.1.numbers.sequence >= sequence => {
                            newest = Some(other);
                            Some(region)
                        }
                        other => {
                            newest = Some((slot, region));
                            other.map(|(_, region)| region)
                        }
                    };
                    if let Some(older) = older {
                        reader.older_slot(number, &older);
                    }
                }
            }
        }
        if let Some((slot, region)) = newest {
            let sequence = region.numbers.sequence;
            // A slot of the creation of its segment says nothing of the region.
            if sequence > 0 {
                self.slots.insert(
                    number,
                    Slots {
                        newest: slot,
                        sequence,
                        synced: false,
                    },
                );
            }
            let blocks = region.blocks.into_iter();
            self.blocks
                .extend(blocks.map(|(start, block)| (start, block, sequence)));
        }
    }
}

/// Cuts blocks whose pages a later store has overwritten, or that lie beyond the capacity. Returns the number of pages.
pub(super) fn resolve(blocks: &mut Vec<(u32, BlockHeader, u64)>, capacity: u32) -> u64 {
    blocks.sort_unstable_by_key(|(start, ..)| *start);
    let end = |start: u32, block: &BlockHeader| start.saturating_add(block.pages.len() as u32);
    let mut keep: Vec<u32> = blocks
        .iter()
        .map(|(start, block, _)| end(*start, block).min(capacity).saturating_sub(*start))
        .collect();
    // Blocks that reach into those behind them: blocks have at most 256 pages, so few do.
    let mut before: Vec<usize> = Vec::new();
    for index in 0..blocks.len() {
        let (start, block, _) = &blocks[index];
        before.retain(|other| end(blocks[*other].0, &blocks[*other].1) > *start);
        for other in &before {
            let (other_start, other_block, _) = &blocks[*other];
            let shared = *start..end(*start, block).min(end(*other_start, other_block));
            let stored = |first: u32, block: &BlockHeader, page: u32| -> Stored {
                block.pages[(page - first) as usize].stored
            };
            for page in shared {
                let mine = stored(*start, block, page);
                let others = stored(*other_start, other_block, page);
                // No two stores are equal: of two blocks that claim so, neither is believed.
                if mine <= others {
                    keep[index] = keep[index].min(page - start);
                }
                if others <= mine {
                    keep[*other] = keep[*other].min(page - other_start);
                }
            }
        }
        before.push(index);
    }
    let mut cut = 0;
    for ((_, block, _), keep) in blocks.iter_mut().zip(keep) {
        cut += (block.pages.len() as u64).saturating_sub(keep.into());
        block.pages.truncate(keep as usize);
    }
    blocks.retain(|(_, block, _)| !block.pages.is_empty());
    cut
}

/// Reads the pages of blocks whose headers were written after the last flush that the disk knows of, and cuts the blocks
/// at the first page that did not reach the disk. Returns the numbers of pages that were cut, and that were not.
fn verify_recent(
    file: &SetFile,
    segments: &[Segments],
    blocks: Vec<(u32, BlockHeader, u64)>,
    durable: u64,
) -> (Vec<(u32, BlockHeader)>, u64, u64) {
    let (mut lost, mut recent) = (0, 0);
    let mut verifier = Verifier::new(file);
    let segment = |disk, number| segment_of(segments, disk, number);
    let mut kept = Vec::with_capacity(blocks.len());
    for (start, mut block, sequence) in blocks {
        if sequence > durable {
            let mut whole = block.pages.len();
            verifier.verify(&segment, (start, &block), 0..whole, &mut |index, _| {
                whole = whole.min(index);
            });
            lost += (block.pages.len() - whole) as u64;
            recent += whole as u64;
            block.pages.truncate(whole);
        }
        if !block.pages.is_empty() {
            kept.push((start, block));
        }
    }
    (kept, lost, recent)
}
