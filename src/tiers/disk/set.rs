//! An open set: its files, and its headers in memory and on the disks.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use kvferry_types::{PageRecord, PageRun, Record, Stored, TransferId};

use super::buffer::AlignedBuffer;
use super::faults::{FaultyPages, is_full};
use super::files::{DiskFile, Files};
use super::format::{
    Geometry, HeaderPage, Numbers, PageSum, Region, SetFile, SetKeys, segment_name, write_index,
};
use super::room::Room;
use super::sweep::{first_region, write_sweep};
use super::table::{NotListed, Table};

/// Locks for the writes of regions: two writes of one region never overlap.
const REGION_LOCKS: usize = 64;
/// How long a start waits for I/O of an ended process, which the kernel may still carry out.
const DRAIN_LIMIT: Duration = Duration::from_secs(60);
/// Copies whose checksums wait for their listing, at most: more than run at one time.
const WRITTEN_MAX: usize = 1024;
/// Regions that are written between two looks at the table.
const FLUSH_REGIONS: usize = 256;
const DRAIN_PAUSE: Duration = Duration::from_millis(20);

/// The segments of one disk, opened when first needed.
pub(super) type Segments = Vec<Option<Arc<dyn DiskFile>>>;

/// Checksums of pages that were written and not listed yet.
#[derive(Debug, Default)]
struct Written {
    /// By transfer, with the number of the entry.
    sums: BTreeMap<TransferId, (u64, Vec<PageSum>)>,
    entries: u64,
}

impl Written {
    /// Adds those of a transfer. A copy whose end the leader no longer waits for is never listed: the oldest ones are
    /// dropped, whatever their ids, because a new leader numbers transfers from the beginning.
    fn add(&mut self, transfer: TransferId, sums: Vec<PageSum>) {
        self.entries += 1;
        self.sums.insert(transfer, (self.entries, sums));
        if self.sums.len() > WRITTEN_MAX {
            let ages = self.sums.iter().map(|(id, (entry, _))| (*entry, *id));
            if let Some((_, oldest)) = ages.min() {
                self.sums.remove(&oldest);
            }
        }
    }

    fn take(&mut self, transfer: TransferId) -> Option<Vec<PageSum>> {
        self.sums.remove(&transfer).map(|(_, sums)| sums)
    }
}

/// An open set. All calls may block on a disk.
#[derive(Debug)]
pub struct DiskSet {
    pub(super) file: SetFile,
    pub(super) keys: SetKeys,
    /// The set's directory on each disk.
    directories: Vec<Arc<dyn Files>>,
    /// Segments of each disk that the cap permits.
    count: u32,
    /// Held to look up and to publish a file, and never during I/O.
    segments: Mutex<Vec<Segments>>,
    /// Held for each disk while one of its segments is created.
    creations: Vec<Mutex<()>>,
    room: Arc<Room>,
    /// The sweep that the headers follow, or that is running.
    sweep: AtomicU32,
    /// Segments of each disk that may be used: fewer than the cap permits while the disk has no room for more.
    usable: AtomicU32,
    table: Mutex<Table>,
    /// Checksums of pages that were written and not listed yet.
    written: Mutex<Written>,
    region_locks: Vec<Mutex<()>>,
    /// Pages whose place failed.
    pub(super) faulty: FaultyPages,
    /// Held for reading from the sequence number of a write to its end, so that a flush knows which writes have ended.
    writes: RwLock<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that holds these locks leaves a state half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DiskSet {
    /// A set with these files and headers, which follow a sweep.
    pub(super) fn new(
        file: SetFile,
        directories: Vec<Arc<dyn Files>>,
        segments: Vec<Segments>,
        (room, sweep): (Arc<Room>, u32),
        table: Table,
    ) -> Self {
        Self {
            keys: SetKeys::new(file.set, file.shard),
            file,
            creations: directories.iter().map(|_| Mutex::default()).collect(),
            directories,
            count: u32::try_from(segments.first().map_or(0, Vec::len)).unwrap_or(u32::MAX),
            segments: Mutex::new(segments),
            room,
            sweep: AtomicU32::new(sweep),
            usable: AtomicU32::new(u32::MAX),
            written: Mutex::default(),
            table: Mutex::new(table),
            region_locks: (0..REGION_LOCKS).map(|_| Mutex::default()).collect(),
            faulty: FaultyPages::default(),
            writes: RwLock::default(),
        }
    }

    /// Sizes and places of the set's files.
    pub fn geometry(&self) -> &Geometry {
        &self.file.geometry
    }

    /// Number of pages of the set that may be used. Takes no lock.
    pub fn capacity_pages(&self) -> u32 {
        let usable = self.usable.load(Ordering::Relaxed);
        self.geometry().pages(self.count.min(usable))
    }

    /// The name of a directory, or of a file below it, that was removed or replaced since the set was opened: the first of a
    /// disk, whose directory of the shard is `shard`.
    pub(super) fn lost(&self, disk: usize, shard: &dyn Files) -> io::Result<Option<String>> {
        let name = self.file.key.name();
        let Some(mine) = self.directories.get(disk) else {
            return Ok(None);
        };
        let now = shard.directory(&name)?.map(|now| now.id()).transpose()?;
        if now != Some(mine.id()?) {
            return Ok(Some(name));
        }
        let opened: Vec<_> = {
            let segments = lock(&self.segments);
            segments.get(disk).cloned().unwrap_or_default()
        };
        for (segment, file) in (0_u32..).zip(opened) {
            let Some(file) = file else {
                continue;
            };
            // By its name: a file that was moved away, or that has another link, still exists.
            let segment = segment_name(segment);
            let named = mine.entry(&segment)?;
            if named.map(|named| named.id) != Some(file.id()?) {
                return Ok(Some(format!("{name}/{segment}")));
            }
        }
        Ok(None)
    }

    /// Uses no more than the segments that exist, because the disk has no room for another one. Returns true if that
    /// leaves fewer pages than before.
    pub fn shrink(&self) -> bool {
        let before = self.capacity_pages();
        let exists = |of_disk: &Segments| of_disk.iter().take_while(|one| one.is_some()).count();
        let least = lock(&self.segments).iter().map(exists).min().unwrap_or(0);
        let least = u32::try_from(least).unwrap_or(u32::MAX);
        self.usable.fetch_min(least, Ordering::Relaxed);
        self.capacity_pages() < before
    }

    /// Number of pages whose place failed since the set was opened. Nothing is written there.
    pub fn faulty_pages(&self) -> usize {
        self.faulty.len()
    }

    /// True while the disk has less room than the cap.
    pub fn is_short(&self) -> bool {
        self.usable.load(Ordering::Relaxed) < u32::MAX
    }

    /// Creates the segments behind those that are used. Returns true if the disk had room for them: all that the cap
    /// permits may be used again.
    pub fn grow(&self) -> bool {
        let next = self.usable.load(Ordering::Relaxed);
        let disks = usize::from(self.geometry().disks);
        let grown = (0..disks).all(|disk| self.segment(disk, next).is_ok());
        if grown {
            self.usable.store(u32::MAX, Ordering::Relaxed);
        }
        grown
    }

    pub(super) fn table(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }

    /// Notes the checksums of the pages that a transfer has written.
    pub(super) fn written(&self, transfer: TransferId, sums: Vec<PageSum>) {
        lock(&self.written).add(transfer, sums);
    }

    /// Lists the pages that a transfer has written. They are durable after the next flush.
    ///
    /// # Errors
    ///
    /// A record that does not fit the pages that were written. Nothing is listed then.
    pub fn list(&self, record: &Record) -> Result<(), NotListed> {
        let sums = lock(&self.written).take(record.stored.transfer);
        self.table().list(record, &sums.unwrap_or_default())
    }

    /// Removes pages that will be overwritten, or that failed their checksum, and those behind them in their blocks.
    pub fn unlist(&self, run: PageRun) {
        self.table().unlist(run);
    }

    /// Removes a page whose bytes do not match its header, and those behind it in its block, unless the header has changed
    /// since it was read. Returns the pages that were removed.
    pub(super) fn unlist_bad(&self, start: u32, index: u16, read: &HeaderPage) -> Option<PageRun> {
        let mut table = self.table();
        let page = start + u32::from(index);
        let block = table.block(start)?;
        if block.pages.get(usize::from(index)) != Some(read) {
            return None;
        }
        let count = u32::try_from(block.pages.len()).ok()? - u32::from(index);
        let run = PageRun { start: page, count };
        table.unlist(run);
        drop(table);
        self.faulty.note(page);
        Some(run)
    }

    /// Records of the listed pages among `count` pages from `from` on, in order.
    pub fn records(&self, from: u32, count: u32) -> Vec<PageRecord> {
        self.table().records(from..from.saturating_add(count))
    }

    /// The newest store of a listed page.
    pub fn newest(&self) -> Stored {
        self.table().newest()
    }

    /// Numbers of listed blocks and pages.
    pub fn listed(&self) -> (u64, u64) {
        let table = self.table();
        (table.len() as u64, table.pages())
    }

    /// True while a change waits to be written.
    pub fn is_dirty(&self) -> bool {
        self.table().is_dirty()
    }

    /// The file of a segment; `None` if there is none yet.
    pub(super) fn existing_segment(&self, disk: usize, segment: u32) -> Option<Arc<dyn DiskFile>> {
        let segments = lock(&self.segments);
        segments.get(disk)?.get(segment as usize)?.clone()
    }

    /// The file of a segment. Creates it, if there is none yet, with room for all of its pages.
    pub(super) fn segment(&self, disk: usize, segment: u32) -> io::Result<Arc<dyn DiskFile>> {
        if let Some(file) = self.existing_segment(disk, segment) {
            return Ok(file);
        }
        let creation = self.creations.get(disk);
        let (Some(creation), true) = (creation, segment < self.count) else {
            return Err(io::Error::other(format!("there is no segment {segment}")));
        };
        let _alone = lock(creation);
        // Another thread may have created the file meanwhile.
        if let Some(file) = self.existing_segment(disk, segment) {
            return Ok(file);
        }
        let created = self.create_segment(disk, segment)?;
        let mut segments = lock(&self.segments);
        let of_disk = segments.get_mut(disk);
        if let Some(place) = of_disk.and_then(|of_disk| of_disk.get_mut(segment as usize)) {
            *place = Some(Arc::clone(&created));
        }
        Ok(created)
    }

    /// Creates a segment. On a disk with less room than the cap, sets of other layouts make room.
    fn create_segment(&self, disk: usize, segment: u32) -> io::Result<Arc<dyn DiskFile>> {
        let bytes = self.geometry().segment_bytes();
        self.room.make(disk, bytes)?;
        let name = segment_name(segment);
        let sweep = |file: &dyn DiskFile| {
            let sweep = self.sweep.load(Ordering::SeqCst);
            write_sweep(&self.file, (disk, segment), file, sweep)
        };
        let created = loop {
            let directory = self.directories[disk].as_ref();
            let created = create_file(directory, &name, bytes, &sweep);
            let full = created.as_ref().is_err_and(is_full);
            if !full || !self.room.remove_closed(disk, &self.file.key.name())? {
                break created;
            }
        };
        if created.is_err() {
            self.room.take_back(disk, bytes);
        }
        created
    }

    /// Makes durable what the disk has to know before the pages of a run are overwritten: otherwise a header could
    /// outlive the pages that it lists.
    pub(super) fn write_removals(&self, run: PageRun) -> io::Result<()> {
        let regions = self.table().removals_of(run);
        regions
            .into_iter()
            .try_for_each(|region| self.write_region(region, true))
    }

    /// Writes up to `max` regions that the disk does not know, from region `from` on. Returns where to go on; `None` if
    /// all were written.
    pub(super) fn write_dirty(&self, from: u32, max: usize) -> io::Result<Option<u32>> {
        let regions = self.table().to_write(from, max);
        for region in &regions {
            self.write_region(*region, false)?;
        }
        let last = regions.last().filter(|_| regions.len() == max);
        Ok(last.map(|last| last + 1))
    }

    /// Writes a slot of a region, if it has to be written; with `synced`, it is durable when the call returns.
    fn write_region(&self, region: u32, synced: bool) -> io::Result<()> {
        let _alone = lock(&self.region_locks[region as usize % REGION_LOCKS]);
        let mut slot = AlignedBuffer::new(self.geometry().slot_bytes as usize);
        let _counted = self.writes.read().unwrap_or_else(PoisonError::into_inner);
        let (write, encoded) = {
            let mut table = self.table();
            let Some(write) = table.begin_write(region, synced) else {
                return Ok(());
            };
            let numbers = Numbers {
                sequence: write.sequence,
                durable: write.durable,
                sweep: self.sweep.load(Ordering::SeqCst),
            };
            let (id, blocks) = (self.file.region_id(region), table.region(region));
            (write, Region::encode(id, numbers, blocks, slot.bytes_mut()))
        };
        let written = encoded.map_err(io::Error::other).and_then(|()| {
            let (disk, segment, at) = self.geometry().slot_at(region, write.slot);
            let file = self.segment(disk, segment)?;
            match synced {
                true => file.write_synced(slot.bytes(), at),
                false => file.write(slot.bytes(), at),
            }
        });
        let ended = (written.is_ok(), synced);
        self.table().end_write(region, write, ended);
        written
    }

    /// Makes durable what was listed and removed before this call. After it, no slot lists a page that was removed by a
    /// reset before the call.
    pub(super) fn flush(&self) -> io::Result<()> {
        self.flush_once()?;
        // The second slots of regions with removed pages are written once the first ones are durable.
        let dirty = self.table().is_dirty();
        if dirty { self.flush_once() } else { Ok(()) }
    }

    /// Begins a sweep: the next flush writes its number into each segment.
    pub(super) fn begin_sweep(&self, sweep: u32) {
        self.sweep.store(sweep, Ordering::SeqCst);
        for (disk, creation) in self.creations.iter().enumerate() {
            // A segment that is created meanwhile has the number from before, or is created with this one.
            let _none_begins = lock(creation);
            let existing = lock(&self.segments).get(disk).cloned();
            let mut table = self.table();
            for (segment, opened) in (0..).zip(existing.unwrap_or_default()) {
                if opened.is_some() {
                    table.rewrite(first_region(&self.file, (disk, segment)));
                }
            }
        }
    }

    /// Number of listed pages that are durable: a start finds them after a loss of power.
    pub fn durable_pages(&self) -> u64 {
        self.table().durable_pages()
    }

    fn flush_once(&self) -> io::Result<()> {
        let mut from = Some(0);
        while let Some(region) = from {
            from = self.write_dirty(region, FLUSH_REGIONS)?;
        }
        let sequence = {
            let _none_runs = self.writes.write().unwrap_or_else(PoisonError::into_inner);
            self.table().sequence()
        };
        let files: Vec<_> = lock(&self.segments)
            .iter()
            .flatten()
            .flatten()
            .cloned()
            .collect();
        files.iter().try_for_each(|file| file.sync())?;
        self.table().note_durable(sequence);
        Ok(())
    }

    /// Flushes, and writes the index, so that the next start need not read the headers.
    pub(super) fn close(&self) -> io::Result<()> {
        self.flush()?;
        let (first, segment, _) = self.geometry().slot_at(0, 0);
        if self.existing_segment(first, segment).is_none() {
            return Ok(());
        }
        // The last write of the headers is that of region 0, so that a start sees which index belongs to them.
        self.table().checkpoint();
        self.flush()?;
        let table = self.table();
        if table.is_dirty() || table.newest_of(0) != table.sequence() {
            return Ok(());
        }
        let (set, sequence) = (self.file.set, table.sequence());
        let directory = self.directories.first();
        directory.map_or(Ok(()), |directory| {
            write_index(
                directory.as_ref(),
                (set, sequence),
                table.slots(),
                table.blocks(),
            )
        })
    }
}

/// Creates the file of a segment with room for all of its pages. A file that has its name was put there while the set was
/// open, and has headers that nobody has read.
fn create_file(
    directory: &dyn Files,
    name: &str,
    bytes: u64,
    prepare: &dyn Fn(&dyn DiskFile) -> io::Result<()>,
) -> io::Result<Arc<dyn DiskFile>> {
    if directory.entry(name)?.is_some() {
        tracing::warn!(
            name,
            "a file was put in the place of a segment that is created: it is removed"
        );
        directory.remove(name)?;
    }
    let created = directory.create(name)?;
    let prepared = created
        .allocate(bytes)
        .and_then(|()| lock_file(created.as_ref()))
        .and_then(|()| prepare(created.as_ref()));
    if let Err(error) = prepared.and_then(|()| directory.sync()) {
        // A file without room for all of its pages would count as one that has it.
        drop(created);
        if let Err(second) = directory.remove(name) {
            tracing::warn!(%second, name, "a segment without room for its pages is not removed");
        }
        return Err(error);
    }
    Ok(created)
}

/// Takes the lock of a file, and waits for I/O of an ended process.
pub(super) fn lock_file(file: &dyn DiskFile) -> io::Result<()> {
    let begun = std::time::Instant::now();
    while !file.try_lock()? {
        if begun.elapsed() > DRAIN_LIMIT {
            let text = format!("I/O of an ended process is still in flight after {DRAIN_LIMIT:?}");
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, text));
        }
        std::thread::sleep(DRAIN_PAUSE);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_of_writes_that_are_never_listed_make_room_by_age_and_not_by_id() {
        let mut written = Written::default();
        for id in 10_000..10_000 + WRITTEN_MAX as u64 {
            written.add(TransferId(id), Vec::new());
        }
        // A new leader numbers from the beginning.
        written.add(TransferId(1), vec![PageSum(7)]);
        assert_eq!(written.sums.len(), WRITTEN_MAX);
        assert_eq!(written.take(TransferId(10_000)), None);
        assert_eq!(written.take(TransferId(1)), Some(vec![PageSum(7)]));
        assert_eq!(written.take(TransferId(1)), None);
    }
}
