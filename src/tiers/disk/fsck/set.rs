//! The check of one set.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

use super::super::files::{DiskFile, EntryKind, Files};
use super::super::format::{
    BlockHeader, FormatError, Geometry, INDEX_NAME, Index, Marks, REGION_PAGES, SET_NAME, SetFile,
    Sweeps, check_index, is_ours, segment_name, segment_number,
};
use super::super::recover::{
    Headers, TableReader, cut_without_segment, lengths, read_tables, resolve,
};
use super::super::room::Room;
use super::super::set::{DiskSet, Segments, lock_file};
use super::super::sweep::{is_swept, write_sweep};
use super::super::table::Table;
use super::super::verify::{PageFault, Verifier, segment_of};
use super::{Checker, FindingKind, FsckError, Place, Shard, directory};

/// First page, header and sequence number of each block.
type Blocks = Vec<(u32, BlockHeader, u64)>;

const CUT: &str = "removed from the page on";
const REWRITTEN: &str = "both slots written again";
const SET_REMOVED: &str = "set removed";
const SEGMENT_REMOVED: &str = "segment removed";
const UNSWEPT: &str =
    "the file was not there when pages of a reset were removed, or its first headers are damaged";

pub(super) struct SetCheck<'a, 'b> {
    checker: &'a mut Checker<'b>,
    shard: u16,
    name: &'a str,
    tier: Option<u128>,
    /// Regions of which a slot lacks what it should say.
    rewrite: BTreeSet<u32>,
    /// The index is to be written again.
    bad_index: bool,
    /// Some slot is of another version: the set is not repaired.
    foreign: bool,
    /// Where the progress was at the beginning of this set.
    before: u64,
    geometry: Option<Geometry>,
}

impl<'a, 'b> SetCheck<'a, 'b> {
    pub(super) fn new(
        checker: &'a mut Checker<'b>,
        (shard, name): (u16, &'a str),
        tier: Option<u128>,
    ) -> Self {
        Self {
            before: checker.done,
            checker,
            shard,
            name,
            tier,
            rewrite: BTreeSet::new(),
            bad_index: false,
            foreign: false,
            geometry: None,
        }
    }

    fn place(&self, disk: usize) -> Place {
        Place {
            disk: u16::try_from(disk).ok(),
            shard: Some(self.shard),
            set: Some(self.name.to_owned()),
            ..Place::default()
        }
    }

    fn file(&self, disk: usize, name: &str) -> Place {
        Place {
            file: Some(name.to_owned()),
            ..self.place(disk)
        }
    }

    /// The place of a page, with its file.
    fn page(&self, page: u32) -> Place {
        let extents = self.geometry.map(|geometry| geometry.extents(page, 1));
        let extent = extents.and_then(|extents| extents.first().copied());
        let place = extent.map(|one| self.file(one.disk, &segment_name(one.segment)));
        Place {
            page: Some(page),
            ..place.unwrap_or_else(|| self.place(0))
        }
    }

    pub(super) fn run(mut self, shard: &Shard, marks: &Marks) -> Result<(), FsckError> {
        self.checker.report.sets += 1;
        let mut directories = Vec::new();
        for (disk, files) in shard.iter().enumerate() {
            let opened = files
                .as_ref()
                .map_or(Ok(None), |files| directory(files.as_ref(), self.name));
            directories.push(opened.map_err(self.checker.failed(disk, "open a set"))?);
        }
        // What is left of a set on other disks, after the first one needed the room, has no meaning.
        let Some(Some(first)) = directories.first() else {
            return Ok(());
        };
        let first = Arc::clone(first);
        let Some(file) = self.set_file(shard, &directories, first.as_ref())? else {
            return Ok(());
        };
        let geometry = file.geometry;
        self.geometry = Some(geometry);
        let row = u64::from(geometry.segment_pages) * u64::from(geometry.disks);
        let most = u32::try_from((1 << 31) / row).unwrap_or(u32::MAX);
        let known = move |name: &str| match segment_number(name) {
            Some(number) => {
                (number < most && name == segment_name(number)).then_some(EntryKind::File)
            }
            None => is_ours(name).then_some(EntryKind::File),
        };
        let mut numbers = BTreeSet::new();
        for (disk, files) in directories.iter().enumerate() {
            let Some(files) = files else {
                continue;
            };
            let place = self.place(disk);
            self.checker.check_names(files.as_ref(), &place, &known)?;
            let names = files
                .names()
                .map_err(self.checker.failed(disk, "list a set"))?;
            let ours = names.iter().filter(|name| known(name).is_some());
            numbers.extend(ours.filter_map(|name| segment_number(name)));
        }
        let count = numbers.last().map_or(0, |last| last + 1);
        let mut segments = Vec::new();
        let mut short = Vec::new();
        for (disk, files) in directories.iter().enumerate() {
            let opened = (&file, disk, files.as_deref());
            let opened = self.open_segments(opened, count, marks.sweeps(), &mut short);
            segments.push(opened.map_err(self.checker.failed(disk, "open a segment"))?);
        }
        let regions = u64::from(geometry.segment_pages / REGION_PAGES);
        let opened = segments.iter().flatten().flatten().count() as u64;
        self.checker.report.segments += opened;
        self.checker.report.slots += 2 * regions * opened;
        let headers = read_tables(&file, &segments, &mut self);
        let headers = headers.map_err(self.checker.failed(0, "read the headers"))?;
        let is_open = |region: u32| {
            let (disk, segment, _) = geometry.slot_at(region, 0);
            segment_of(&segments, disk, segment).is_ok()
        };
        let (headers, by_index) = self.index(first.as_ref(), &file, headers, count, &is_open);
        let (mut table, recent) = self.table(&directories, &segments, headers, count);
        let before = table.pages();
        for mark in marks.iter() {
            let mut from = Some(0);
            while let Some(page) = from {
                from = table.invalidate(&mark.scope, mark.through, page, u32::MAX);
            }
        }
        self.checker.report.reset_pages += before - table.pages();
        let cuts = self.verify(&file, &segments, &table, &recent);
        self.rewrite.retain(|region| is_open(*region));
        let changed = table.is_dirty() || !self.rewrite.is_empty() || !cuts.is_empty();
        if !self.checker.repair || self.foreign || !(changed || self.bad_index || !short.is_empty())
        {
            return Ok(());
        }
        for (start, keep) in cuts {
            table.cut_both(start, keep);
        }
        self.rewrite
            .iter()
            .for_each(|region| table.rewrite(*region));
        let directories = self.all_directories(shard, directories)?;
        let sweep = marks.sweeps().over;
        let repaired = repair((file, sweep), directories, segments, &short, table);
        repaired.map_err(self.checker.failed(0, "repair a set"))?;
        tracing::info!(set = self.name, shard = self.shard, by_index, "repaired");
        Ok(())
    }

    /// Reads the set file; `None` if the set cannot be checked.
    fn set_file(
        &mut self,
        shard: &Shard,
        directories: &[Option<Arc<dyn Files>>],
        first: &dyn Files,
    ) -> Result<Option<SetFile>, FsckError> {
        let read = SetFile::read(first).map_err(self.checker.failed(0, "read a set file"))?;
        let what = match read {
            Some(Ok(file)) => {
                let same = self.tier.is_none_or(|tier| tier == file.tier)
                    && file.shard == self.shard
                    && file.key.name() == self.name
                    && usize::from(file.geometry.disks) == directories.len();
                if same {
                    return Ok(Some(file));
                }
                "the set file is that of another tier, shard or set".to_owned()
            }
            Some(Err(error @ FormatError::Version { .. })) => {
                let place = self.file(0, SET_NAME);
                self.checker
                    .find(FindingKind::Version, place, error.to_string(), None);
                return Ok(None);
            }
            Some(Err(error)) => format!("{error}: where the pages lie is not known"),
            None => {
                let mut segments = 0;
                for (disk, files) in directories.iter().enumerate() {
                    let names = files.as_ref().map_or(Ok(Vec::new()), |files| files.names());
                    let names = names.map_err(self.checker.failed(disk, "list a set"))?;
                    segments += names.iter().filter_map(|name| segment_number(name)).count();
                }
                if segments == 0 {
                    return Ok(None);
                }
                "the set file is missing: where the pages lie is not known".to_owned()
            }
        };
        let place = self.file(0, SET_NAME);
        self.checker
            .find(FindingKind::SetFile, place, what, Some(SET_REMOVED));
        if self.checker.repair {
            self.checker.remove_set(shard, self.name)?;
        }
        Ok(None)
    }

    fn open_segments(
        &mut self,
        (of, disk, files): (&SetFile, usize, Option<&dyn Files>),
        count: u32,
        sweeps: Sweeps,
        short: &mut Vec<(usize, u32)>,
    ) -> io::Result<Segments> {
        let bytes = self.geometry.map_or(0, |geometry| geometry.segment_bytes());
        let mut segments: Segments = Vec::new();
        for number in 0..count {
            let name = segment_name(number);
            let entry = files.map_or(Ok(None), |files| files.entry(&name))?;
            let is_file = entry.is_some_and(|entry| entry.kind == EntryKind::File);
            let mut file = match files.filter(|_| is_file) {
                Some(files) => files.open(&name)?,
                None => None,
            };
            if let (Some(opened), Some(files)) = (&file, files) {
                lock_file(opened.as_ref())?;
                let has = opened.bytes()?;
                // A disk that cannot be read at the moment tells nothing of the segment: its pages are kept.
                let swept = match has {
                    0 => true,
                    _ => is_swept(of, (disk, number), opened.as_ref(), sweeps)?,
                };
                if !swept {
                    let place = self.file(disk, &name);
                    let (kind, what) = (FindingKind::Segment, UNSWEPT.to_owned());
                    self.checker.find(kind, place, what, Some(SEGMENT_REMOVED));
                    file = None;
                    if self.checker.repair {
                        files.remove(&name)?;
                        files.sync()?;
                    }
                }
            }
            if let Some(file) = &file {
                let has = file.bytes()?;
                if has < bytes {
                    let place = self.file(disk, &name);
                    let what = format!("the file has {has} of {bytes} bytes");
                    self.checker
                        .find(FindingKind::Segment, place, what, Some("extended"));
                    short.push((disk, number));
                }
            }
            segments.push(file);
        }
        Ok(segments)
    }

    /// Compares the index with the headers of regions that are open. Returns what a start goes by: the index, unless it is
    /// older.
    fn index(
        &mut self,
        first: &dyn Files,
        file: &SetFile,
        headers: Headers,
        count: u32,
        is_open: &dyn Fn(u32) -> bool,
    ) -> (Headers, bool) {
        let place = self.file(0, INDEX_NAME);
        let (what, index) = match check_index(first, file.set, file.geometry.pages(count)) {
            Ok(None) => return (headers, false),
            Ok(Some(Ok(index))) if index.sequence >= headers.sequence => (None, Some(index)),
            Ok(Some(Ok(index))) => {
                let what = format!(
                    "the index is that of write {}, and the headers are those of write {}",
                    index.sequence, headers.sequence
                );
                (Some(what), None)
            }
            Ok(Some(Err(error))) => (Some(error.to_string()), None),
            Err(error) => (Some(format!("the index cannot be read: {error}")), None),
        };
        if let Some(what) = what {
            self.bad_index = true;
            self.checker.find(
                FindingKind::Index,
                place.clone(),
                what,
                Some("written again"),
            );
        }
        let Some(index) = index else {
            return (headers, false);
        };
        let mut regions = differing(&index, &headers);
        regions.retain(|region| is_open(*region));
        for region in regions {
            self.rewrite.insert(region);
            let place = Place {
                region: Some(region),
                ..place.clone()
            };
            let what = "the index and the header of the region differ";
            self.checker
                .find(FindingKind::Index, place, what, Some(REWRITTEN));
        }
        let blocks = index.blocks.into_iter();
        let blocks = blocks.map(|(start, block)| (start, block, index.sequence));
        let headers = Headers {
            blocks: blocks.collect(),
            sequence: index.sequence,
            durable: index.sequence,
            ..headers
        };
        (headers, true)
    }

    /// Removes what a start removes. Returns the headers, and the first pages of blocks that may not have reached the
    /// disk.
    fn table(
        &mut self,
        directories: &[Option<Arc<dyn Files>>],
        segments: &[Segments],
        headers: Headers,
        count: u32,
    ) -> (Table, BTreeSet<u32>) {
        let Headers {
            mut blocks,
            slots,
            sequence,
            durable,
            ..
        } = headers;
        let Some(geometry) = self.geometry else {
            return (Table::default(), BTreeSet::new());
        };
        let listed = lengths(&blocks);
        cut_without_segment(&geometry, segments, &mut blocks);
        for (start, kept, had) in cuts(&listed, &blocks) {
            self.rewrite.insert(start / REGION_PAGES);
            let page = start + kept as u32;
            let extents = geometry.extents(page, 1);
            let disk = extents.first().map_or(0, |extent| extent.disk);
            if directories.get(disk).is_some_and(Option::is_none) {
                self.checker.report.displaced_pages += (had - kept) as u64;
                continue;
            }
            let what =
                format!("the block at page {start} has {had} pages, and no file has this one");
            self.bad_index = true;
            let place = self.page(page);
            self.checker
                .find(FindingKind::NoSegment, place, what, Some(CUT));
        }
        let listed = lengths(&blocks);
        resolve(&mut blocks, geometry.pages(count));
        for (start, kept, had) in cuts(&listed, &blocks) {
            self.rewrite.insert(start / REGION_PAGES);
            let what = format!(
                "the block at page {start} has {had} pages, and another block has this one too"
            );
            let place = self.page(start + kept as u32);
            self.checker
                .find(FindingKind::Overlap, place, what, Some(CUT));
        }
        let recent = blocks.iter().filter(|(.., written)| *written > durable);
        let recent = recent.map(|(start, ..)| *start).collect();
        let blocks = blocks.into_iter().map(|(start, block, _)| (start, block));
        // A repair begins with a sync of all files.
        (Table::new(blocks, slots, (sequence, sequence)), recent)
    }

    /// Verifies every listed page. Returns the blocks that have bad ones, with the number of pages before these.
    fn verify(
        &mut self,
        file: &SetFile,
        segments: &[Segments],
        table: &Table,
        recent: &BTreeSet<u32>,
    ) -> Vec<(u32, u32)> {
        let mut verifier = Verifier::new(file);
        let segment = |disk, number| segment_of(segments, disk, number);
        let files = segments.iter().flatten().flatten();
        let bytes: u64 = files.map(|file| file.bytes().unwrap_or(0)).sum();
        let (all, begun) = (table.pages().max(1), self.checker.done);
        let left = (self.before + bytes).saturating_sub(begun);
        let mut cuts = Vec::new();
        let mut done = 0;
        for (start, block) in table.blocks() {
            let count = block.pages.len();
            let mut faults = Vec::new();
            verifier.verify(&segment, (start, block), 0..count, &mut |index, fault| {
                faults.push((index, fault));
            });
            self.checker.report.blocks += 1;
            self.checker.report.pages += count as u64;
            self.checker.report.good_pages += (count - faults.len()) as u64;
            if let Some((index, _)) = faults.first() {
                self.rewrite.insert(start / REGION_PAGES);
                cuts.push((start, *index as u32));
            }
            for (index, fault) in faults {
                let (kind, what) = match fault {
                    PageFault::Unreadable(error) => {
                        (FindingKind::Unreadable, format!("the page cannot be read: {error}"))
                    }
                    PageFault::Checksum if recent.contains(&start) => (
                        FindingKind::RecentPage,
                        "the checksum does not match: the page was written shortly before an unclean end".to_owned(),
                    ),
                    PageFault::Checksum => {
                        (FindingKind::Page, "the checksum does not match".to_owned())
                    }
                };
                let place = self.page(start + index as u32);
                self.checker.find(kind, place, what, Some(CUT));
            }
            done += count as u64;
            let part = u128::from(left) * u128::from(done) / u128::from(all);
            self.checker
                .advance(begun + u64::try_from(part).unwrap_or(left));
        }
        self.checker.advance(self.before + bytes);
        cuts
    }

    /// The set's directory on every disk. Creates those that are missing.
    fn all_directories(
        &self,
        shard: &Shard,
        directories: Vec<Option<Arc<dyn Files>>>,
    ) -> Result<Vec<Arc<dyn Files>>, FsckError> {
        let mut all = Vec::new();
        for (disk, (of_shard, found)) in shard.iter().zip(directories).enumerate() {
            let directory = match (found, of_shard) {
                (Some(found), _) => found,
                (None, Some(of_shard)) => {
                    let made = of_shard.create_directory(self.name);
                    made.map_err(self.checker.failed(disk, "create a set's directory"))?
                }
                (None, None) => {
                    let missing = io::Error::other("the shard has no directory there");
                    return Err(self.checker.failed(disk, "repair a set")(missing).into());
                }
            };
            all.push(directory);
        }
        Ok(all)
    }
}

impl TableReader for SetCheck<'_, '_> {
    fn read(
        &mut self,
        file: &dyn DiskFile,
        (disk, segment): (usize, u32),
        out: &mut [u8],
        at: u64,
    ) -> io::Result<()> {
        if file.read(out, at).is_ok() {
            return Ok(());
        }
        let Some(geometry) = self.geometry else {
            return Ok(());
        };
        // One slot that the disk does not read must not hide the others. Without its bytes, it counts as never written.
        let has = file.bytes()?;
        let slot_bytes = geometry.slot_bytes;
        for (index, slot) in (at / slot_bytes..).zip(out.chunks_exact_mut(slot_bytes as usize)) {
            let at = index * slot_bytes;
            let Err(error) = file.read(slot, at) else {
                continue;
            };
            slot.fill(0);
            if at + slot_bytes > has {
                continue;
            }
            let first = u32::try_from(index / 2).unwrap_or(u32::MAX) * REGION_PAGES;
            let page = geometry.page_of(disk, segment, first);
            let region = u32::try_from(page).unwrap_or(u32::MAX) / REGION_PAGES;
            self.rewrite.insert(region);
            let place = Place {
                region: Some(region),
                slot: Some((index % 2) as u8),
                ..self.file(disk, &segment_name(segment))
            };
            let what = format!("the slot cannot be read: {error}");
            self.checker
                .find(FindingKind::Unreadable, place, what, Some(REWRITTEN));
        }
        Ok(())
    }

    fn progress(&mut self, done: u64, _: u64) {
        self.checker.advance(self.before + done);
    }

    fn bad_slot(&mut self, region: u32, slot: u8, error: FormatError) {
        let Some(geometry) = self.geometry else {
            return;
        };
        let (disk, segment, _) = geometry.slot_at(region, slot);
        let place = Place {
            region: Some(region),
            slot: Some(slot),
            ..self.file(disk, &segment_name(segment))
        };
        if matches!(error, FormatError::Version { .. }) {
            self.foreign = true;
            self.checker
                .find(FindingKind::Version, place, error.to_string(), None);
            return;
        }
        self.rewrite.insert(region);
        self.checker
            .find(FindingKind::Slot, place, error.to_string(), Some(REWRITTEN));
    }
}

/// Blocks that have fewer pages than before: first page, pages now, and pages before.
fn cuts(before: &[(u32, usize)], blocks: &Blocks) -> Vec<(u32, usize, usize)> {
    let now: BTreeMap<u32, usize> = lengths(blocks).into_iter().collect();
    let kept = |start: &u32| now.get(start).copied().unwrap_or(0);
    let cuts = before.iter().filter(|(start, had)| kept(start) < *had);
    cuts.map(|(start, had)| (*start, kept(start), *had))
        .collect()
}

/// Regions of which index and headers say different things.
fn differing(index: &Index, headers: &Headers) -> BTreeSet<u32> {
    let mut regions = BTreeSet::new();
    let indexed: BTreeMap<u32, (u8, u64)> = index
        .regions
        .iter()
        .map(|(region, slots)| (*region, (slots.newest, slots.sequence)))
        .collect();
    for (region, slots) in &indexed {
        let found = headers.slots.get(region);
        let found = found.map(|found| (found.newest, found.sequence));
        // A region of which nothing was ever written has no sequence number.
        if found != Some(*slots) && slots.1 > 0 {
            regions.insert(*region);
        }
    }
    let unknown = headers
        .slots
        .keys()
        .filter(|region| !indexed.contains_key(region));
    regions.extend(unknown);
    let blocks: BTreeMap<u32, &BlockHeader> = headers
        .blocks
        .iter()
        .map(|(start, block, _)| (*start, block))
        .collect();
    let of_index = index.blocks.iter();
    let lacking = of_index.filter(|(start, block)| blocks.get(start) != Some(&block));
    regions.extend(lacking.map(|(start, _)| start / REGION_PAGES));
    let listed: BTreeSet<u32> = index.blocks.iter().map(|(start, _)| *start).collect();
    let surplus = blocks.keys().filter(|start| !listed.contains(start));
    regions.extend(surplus.map(|start| start / REGION_PAGES));
    regions
}

/// Writes what the table says. Each step leaves files that a start reads.
fn repair(
    (file, sweep): (SetFile, u32),
    directories: Vec<Arc<dyn Files>>,
    segments: Vec<Segments>,
    short: &[(usize, u32)],
    table: Table,
) -> io::Result<()> {
    // From here on the headers change, and the index does not.
    if let Some(first) = directories.first()
        && first.entry(INDEX_NAME)?.is_some()
    {
        first.remove(INDEX_NAME)?;
        first.sync()?;
    }
    let bytes = file.geometry.segment_bytes();
    for (disk, number) in short {
        let segment = segment_of(&segments, *disk, *number)?;
        let is_new = segment.bytes()? == 0;
        segment.allocate(bytes)?;
        if is_new {
            write_sweep(&file, (*disk, *number), segment.as_ref(), sweep)?;
        }
    }
    // A slot is overwritten only while the other one is durable.
    for opened in segments.iter().flatten().flatten() {
        opened.sync()?;
    }
    let room = Arc::new(Room::none());
    DiskSet::new(file, directories, segments, (room, sweep), table).close()
}
