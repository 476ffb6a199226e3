//! Files in memory that lose what was not made durable, as a disk does at a loss of power.
//!
//! Of each unit of 4 KiB a crash keeps the durable contents or those of any write since, drawn for each unit. Of the
//! creations, renamings and removals of a directory it keeps a number of the first ones since the directory was synced.
//! Of a file's lengths since its last sync it keeps one.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use super::super::buffer::UNIT_BYTES;
use super::super::files::{DiskFile, Entry as Named, EntryKind, Files};
use super::super::format::DiskIdentity;

type Unit = Arc<[u8]>;

#[derive(Debug, Default, Clone)]
struct Inode {
    /// Lengths since the last sync; the first one is durable.
    lengths: Vec<u64>,
    /// Contents of each unit since the last sync, oldest first; the first one is durable. A missing unit is zeros.
    units: BTreeMap<u64, Vec<Option<Unit>>>,
}

#[derive(Debug, Clone)]
enum Entry {
    File(usize),
    Directory(usize),
}

#[derive(Debug, Clone)]
enum NameChange {
    Add(String, Entry),
    Rename(String, String),
    Remove(String),
}

#[derive(Debug, Default)]
struct SimDirectory {
    durable: BTreeMap<String, Entry>,
    changes: Vec<NameChange>,
    /// Grows with each change of a name on the disk.
    changed: i64,
}

impl SimDirectory {
    fn with(&self, changes: usize) -> BTreeMap<String, Entry> {
        let mut names = self.durable.clone();
        for change in &self.changes[..changes] {
            match change.clone() {
                NameChange::Add(name, entry) => {
                    names.insert(name, entry);
                }
                NameChange::Rename(from, to) => {
                    if let Some(entry) = names.remove(&from) {
                        names.insert(to, entry);
                    }
                }
                NameChange::Remove(name) => {
                    names.remove(&name);
                }
            }
        }
        names
    }

    fn now(&self) -> BTreeMap<String, Entry> {
        self.with(self.changes.len())
    }
}

#[derive(Debug, Default)]
struct Disk {
    inodes: Vec<Inode>,
    directories: Vec<SimDirectory>,
    /// Changes that may still be made; `None` for any number. At 0 the process is dead.
    budget: Option<u64>,
    changes: u64,
    /// Bytes that were written to files.
    written: u64,
    /// Fails every write with this error.
    failing: Option<io::ErrorKind>,
    /// Fails every change, as a file system does that is mounted read-only.
    read_only: bool,
    /// Fails everything: the disk was pulled out.
    gone: bool,
    /// Places that are not read, or not written, by file.
    bad: Vec<BadPlace>,
    /// Bytes that files may still be allocated; `None` for any number.
    room: Option<u64>,
    /// No file is created.
    no_new_files: bool,
    /// Reads, writes and allocations of files wait.
    silent: bool,
    /// Writes that wait.
    waiting: usize,
    /// The identity that another process writes before the first lock is taken.
    late: Option<DiskIdentity>,
}

/// Bytes of a file that the disk does not read, or does not write.
#[derive(Debug)]
struct BadPlace {
    inode: usize,
    bytes: Range<u64>,
    write: bool,
}

const EIO: i32 = 5;

impl Disk {
    /// The error of a read or write of these bytes.
    fn error_at(&self, inode: usize, bytes: &Range<u64>, write: bool) -> io::Result<()> {
        let hit = |bad: &BadPlace| {
            let overlaps = bad.bytes.start < bytes.end && bytes.start < bad.bytes.end;
            bad.inode == inode && bad.write == write && overlaps
        };
        match self.gone || self.bad.iter().any(hit) {
            true => Err(io::Error::from_raw_os_error(EIO)),
            false => Ok(()),
        }
    }

    fn name_change(&mut self, directory: usize, change: NameChange) {
        let changed = i64::try_from(self.changes).expect("few changes");
        let directory = &mut self.directories[directory];
        directory.changes.push(change);
        directory.changed = changed;
    }

    fn inode_named(&self, name: &str) -> usize {
        let found = self
            .directories
            .iter()
            .find_map(|directory| match directory.now().get(name) {
                Some(Entry::File(inode)) => Some(*inode),
                _ => None,
            });
        found.expect("a file of this name")
    }
}

/// A disk.
#[derive(Debug, Clone, Default)]
pub(in super::super) struct SimDisk(Arc<(Mutex<Disk>, Condvar)>);

#[derive(Debug)]
struct SimFiles(SimDisk, usize);

#[derive(Debug)]
struct SimFile(SimDisk, usize);

impl SimDisk {
    pub(in super::super) fn new() -> Self {
        let disk = Self::default();
        disk.lock().directories.push(SimDirectory::default());
        disk
    }

    fn lock(&self) -> MutexGuard<'_, Disk> {
        self.0
            .0
            .lock()
            .expect("no test panics while it holds the lock")
    }

    pub(in super::super) fn root(&self) -> Arc<dyn Files> {
        Arc::new(SimFiles(self.clone(), 0))
    }

    /// Its root, unless it is gone.
    pub(in super::super) fn mounted(&self) -> io::Result<Arc<dyn Files>> {
        match self.lock().gone {
            true => Err(io::ErrorKind::NotFound.into()),
            false => Ok(self.root()),
        }
    }

    /// The process dies before the change that follows this many others.
    pub(in super::super) fn die_after(&self, changes: Option<u64>) {
        self.lock().budget = changes;
    }

    /// Number of changes so far.
    pub(in super::super) fn changes(&self) -> u64 {
        self.lock().changes
    }

    /// Bytes that were written to files so far.
    pub(in super::super) fn written(&self) -> u64 {
        self.lock().written
    }

    /// Every write fails with this error, or none does.
    pub(in super::super) fn fail_writes(&self, kind: Option<io::ErrorKind>) {
        self.lock().failing = kind;
    }

    /// The disk is mounted read-only, or writable again.
    pub(in super::super) fn set_read_only(&self, read_only: bool) {
        self.lock().read_only = read_only;
    }

    /// The disk is pulled out, or is back with its contents.
    pub(in super::super) fn set_gone(&self, gone: bool) {
        self.lock().gone = gone;
    }

    /// Does not read, or does not write, these bytes of a file that has this name, somewhere.
    pub(in super::super) fn fail_place(&self, name: &str, bytes: Range<u64>, write: bool) {
        let mut disk = self.lock();
        let inode = disk.inode_named(name);
        disk.bad.push(BadPlace {
            inode,
            bytes,
            write,
        });
    }

    /// All places are read and written again.
    pub(in super::super) fn mend(&self) {
        self.lock().bad.clear();
    }

    /// The disk has room for files of this many bytes, besides those that it has.
    pub(in super::super) fn set_room(&self, room: Option<u64>) {
        self.lock().room = room;
    }

    /// Files can be created, or cannot, as on a full file system that still takes writes into the files that it has.
    pub(in super::super) fn set_new_files(&self, possible: bool) {
        self.lock().no_new_files = !possible;
    }

    /// Lets reads, writes and allocations wait until the value is dropped.
    pub(in super::super) fn silence(&self) -> super::copies::Silence {
        self.lock().silent = true;
        super::copies::Silence(self.clone())
    }

    pub(in super::super) fn speak(&self) {
        self.lock().silent = false;
        self.0.1.notify_all();
    }

    /// Waits until a write waits.
    pub(in super::super) fn await_write(&self) {
        let disk = self.0.1.wait_while(self.lock(), |disk| disk.waiting == 0);
        drop(disk.expect("no test panics while it holds the lock"));
    }

    fn spoken(&self, write: bool) {
        let mut disk = self.lock();
        disk.waiting += usize::from(write);
        self.0.1.notify_all();
        let mut disk = self
            .0
            .1
            .wait_while(disk, |disk| disk.silent)
            .expect("no panic");
        disk.waiting -= usize::from(write);
    }

    /// Keeps a copy of a file that is replaced or removed later, never written: its directory and its number.
    pub(in super::super) fn keep(&self, name: &str) -> (usize, usize) {
        let disk = self.lock();
        let inode = disk.inode_named(name);
        let has = |directory: &SimDirectory| {
            let now = directory.now();
            matches!(now.get(name), Some(Entry::File(found)) if *found == inode)
        };
        let directory = disk.directories.iter().position(has);
        (directory.expect("a directory with the file"), inode)
    }

    /// Makes a copy of a file, without a name: see [`Self::keep`].
    pub(in super::super) fn copy(&self, name: &str) -> (usize, usize) {
        let (directory, inode) = self.keep(name);
        let mut disk = self.lock();
        let copy = disk.inodes[inode].clone();
        disk.inodes.push(copy);
        (directory, disk.inodes.len() - 1)
    }

    /// Another process writes this identity and ends, right before a lock is taken.
    pub(in super::super) fn write_before_lock(&self, identity: DiskIdentity) {
        self.lock().late = Some(identity);
    }

    /// Lengthens a file that has this name, somewhere.
    pub(in super::super) fn lengthen(&self, name: &str, bytes: u64) {
        let mut disk = self.lock();
        let inode = disk.inode_named(name);
        disk.inodes[inode].lengths = vec![bytes];
    }

    /// Cuts a file that has this name, somewhere, to no bytes.
    pub(in super::super) fn cut_file(&self, name: &str) {
        let mut disk = self.lock();
        let inode = disk.inode_named(name);
        disk.inodes[inode] = Inode {
            lengths: vec![0],
            units: BTreeMap::new(),
        };
    }

    /// Puts a file back that was kept.
    pub(in super::super) fn put_back(&self, name: &str, (directory, inode): (usize, usize)) {
        let mut disk = self.lock();
        let directory = &mut disk.directories[directory];
        directory.durable = directory.now();
        directory.changes.clear();
        directory
            .durable
            .insert(name.to_owned(), Entry::File(inode));
    }

    /// The contents after a loss of power. The disk works again.
    pub(in super::super) fn crash(&self, rng: &mut fastrand::Rng) {
        let mut disk = self.lock();
        disk.budget = None;
        for inode in &mut disk.inodes {
            let pick = rng.usize(0..inode.lengths.len());
            inode.lengths = vec![inode.lengths[pick]];
            for versions in inode.units.values_mut() {
                let pick = rng.usize(0..versions.len());
                *versions = vec![versions[pick].clone()];
            }
        }
        for directory in &mut disk.directories {
            let kept = rng.usize(0..=directory.changes.len());
            directory.durable = directory.with(kept);
            directory.changes.clear();
        }
    }

    /// Bytes of all files that have a name.
    pub(in super::super) fn used(&self) -> u64 {
        fn of(disk: &Disk, directory: usize) -> u64 {
            let names = disk.directories[directory].now();
            let bytes = names.values().map(|entry| match entry {
                Entry::File(inode) => disk.inodes[*inode].lengths.last().copied().unwrap_or(0),
                Entry::Directory(below) => of(disk, *below),
            });
            bytes.sum()
        }
        of(&self.lock(), 0)
    }

    /// Changes one bit of a file that has this name, somewhere.
    pub(in super::super) fn flip_bit(&self, name: &str, at: u64, bit: u8) {
        let mut disk = self.lock();
        let found = disk.inode_named(name);
        let inode = &mut disk.inodes[found];
        let versions = inode
            .units
            .entry(at / UNIT_BYTES)
            .or_insert_with(|| vec![None]);
        let mut unit = versions
            .last()
            .and_then(|unit| unit.as_deref().map(<[u8]>::to_vec))
            .unwrap_or_else(|| vec![0; UNIT_BYTES as usize]);
        unit[(at % UNIT_BYTES) as usize] ^= 1 << bit;
        *versions = vec![Some(unit.into())];
    }

    fn change(&self) -> io::Result<MutexGuard<'_, Disk>> {
        let mut disk = self.lock();
        match &mut disk.budget {
            Some(0) => return Err(io::Error::other("the process is dead")),
            Some(left) => *left -= 1,
            None => {}
        }
        if disk.gone {
            return Err(io::Error::from_raw_os_error(EIO));
        }
        if disk.read_only {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        disk.changes += 1;
        Ok(disk)
    }
}

impl Files for SimFiles {
    fn open(&self, name: &str) -> io::Result<Option<Arc<dyn DiskFile>>> {
        Ok(match self.0.lock().directories[self.1].now().get(name) {
            Some(Entry::File(inode)) => Some(Arc::new(SimFile(self.0.clone(), *inode))),
            _ => None,
        })
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        let mut disk = self.0.change()?;
        if disk.no_new_files {
            return Err(io::ErrorKind::StorageFull.into());
        }
        if disk.directories[self.1].now().contains_key(name) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let inode = disk.inodes.len();
        disk.inodes.push(Inode {
            lengths: vec![0],
            units: BTreeMap::new(),
        });
        let add = NameChange::Add(name.to_owned(), Entry::File(inode));
        disk.name_change(self.1, add);
        Ok(Arc::new(SimFile(self.0.clone(), inode)))
    }

    fn directory(&self, name: &str) -> io::Result<Option<Arc<dyn Files>>> {
        Ok(match self.0.lock().directories[self.1].now().get(name) {
            Some(Entry::Directory(below)) => Some(Arc::new(SimFiles(self.0.clone(), *below))),
            _ => None,
        })
    }

    fn create_directory(&self, name: &str) -> io::Result<Arc<dyn Files>> {
        let mut disk = self.0.change()?;
        let below = disk.directories.len();
        disk.directories.push(SimDirectory::default());
        let add = NameChange::Add(name.to_owned(), Entry::Directory(below));
        disk.name_change(self.1, add);
        Ok(Arc::new(SimFiles(self.0.clone(), below)))
    }

    fn names(&self) -> io::Result<Vec<String>> {
        Ok(self.0.lock().directories[self.1]
            .now()
            .into_keys()
            .collect())
    }

    fn entry(&self, name: &str) -> io::Result<Option<Named>> {
        let disk = self.0.lock();
        let of_directory = |number: usize| {
            (
                (0, number as u64),
                EntryKind::Directory,
                0,
                disk.directories[number].changed,
            )
        };
        let (id, kind, bytes, changed) = match disk.directories[self.1].now().get(name) {
            _ if name == "." => of_directory(self.1),
            Some(Entry::Directory(number)) => of_directory(*number),
            Some(Entry::File(inode)) => {
                let bytes = disk.inodes[*inode].lengths.last().copied();
                ((1, *inode as u64), EntryKind::File, bytes.unwrap_or(0), 0)
            }
            None => return Ok(None),
        };
        let mode = kind.mode();
        Ok(Some(Named {
            id,
            kind,
            mode,
            bytes,
            changed,
        }))
    }

    fn set_mode(&self, _: &str, _: EntryKind) -> io::Result<()> {
        Ok(())
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut disk = self.0.change()?;
        let rename = NameChange::Rename(from.to_owned(), to.to_owned());
        disk.name_change(self.1, rename);
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        let mut disk = self.0.change()?;
        if let Some(Entry::File(inode)) = disk.directories[self.1].now().get(name) {
            let bytes = disk.inodes[*inode].lengths.last().copied().unwrap_or(0);
            disk.room = disk.room.map(|room| room + bytes);
        }
        disk.name_change(self.1, NameChange::Remove(name.to_owned()));
        Ok(())
    }

    fn remove_directory(&self, name: &str) -> io::Result<()> {
        self.remove(name)
    }

    fn sync(&self) -> io::Result<()> {
        let mut disk = self.0.change()?;
        let directory = &mut disk.directories[self.1];
        directory.durable = directory.now();
        directory.changes.clear();
        Ok(())
    }

    fn id(&self) -> io::Result<(u64, u64)> {
        Ok((0, self.1 as u64))
    }

    fn try_lock(&self) -> io::Result<bool> {
        let late = self.0.lock().late.take();
        late.map_or(Ok(()), |late| late.write(self))?;
        Ok(true)
    }
}

impl DiskFile for SimFile {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.0.lock().inodes[self.1]
            .lengths
            .last()
            .copied()
            .unwrap_or(0))
    }

    fn read(&self, out: &mut [u8], at: u64) -> io::Result<()> {
        if at + out.len() as u64 > self.bytes()? {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.0.spoken(false);
        let disk = self.0.lock();
        disk.error_at(self.1, &(at..at + out.len() as u64), false)?;
        let inode = &disk.inodes[self.1];
        for (number, part) in (at / UNIT_BYTES..).zip(out.chunks_mut(UNIT_BYTES as usize)) {
            let unit = inode
                .units
                .get(&number)
                .and_then(|versions| versions.last()?.as_ref());
            match unit {
                Some(unit) => part.copy_from_slice(&unit[..part.len()]),
                None => part.fill(0),
            }
        }
        Ok(())
    }

    fn write(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        assert_eq!((at % UNIT_BYTES, bytes.len() as u64 % UNIT_BYTES), (0, 0));
        self.0.spoken(true);
        let mut disk = self.0.change()?;
        if let Some(kind) = disk.failing {
            return Err(kind.into());
        }
        disk.error_at(self.1, &(at..at + bytes.len() as u64), true)?;
        disk.written += bytes.len() as u64;
        let inode = &mut disk.inodes[self.1];
        for (number, part) in (at / UNIT_BYTES..).zip(bytes.chunks(UNIT_BYTES as usize)) {
            let versions = inode.units.entry(number).or_insert_with(|| vec![None]);
            versions.push(Some(part.into()));
        }
        let end = at + bytes.len() as u64;
        if inode.lengths.last().is_none_or(|len| *len < end) {
            inode.lengths.push(end);
        }
        Ok(())
    }

    fn write_synced(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.write(bytes, at)?;
        let mut disk = self.0.lock();
        let inode = &mut disk.inodes[self.1];
        let units = at / UNIT_BYTES..(at + bytes.len() as u64) / UNIT_BYTES;
        for (_, versions) in inode.units.range_mut(units) {
            versions.drain(..versions.len() - 1);
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut disk = self.0.change()?;
        let inode = &mut disk.inodes[self.1];
        inode.lengths.drain(..inode.lengths.len() - 1);
        for versions in inode.units.values_mut() {
            versions.drain(..versions.len() - 1);
        }
        Ok(())
    }

    fn allocate(&self, bytes: u64) -> io::Result<()> {
        self.0.spoken(true);
        let mut disk = self.0.change()?;
        if let Some(kind) = disk.failing {
            return Err(kind.into());
        }
        let has = disk.inodes[self.1].lengths.last().copied().unwrap_or(0);
        let more = bytes.saturating_sub(has);
        if disk.room.is_some_and(|room| room < more) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        if more > 0 {
            disk.inodes[self.1].lengths.push(bytes);
        }
        if let Some(room) = disk.room.as_mut() {
            *room -= more;
        }
        Ok(())
    }

    fn discard(&self, at: u64, bytes: u64) -> io::Result<()> {
        // What is read from there is undefined.
        self.write(&vec![0xdd; bytes as usize], at)
    }

    fn try_lock(&self) -> io::Result<bool> {
        Ok(true)
    }

    fn id(&self) -> io::Result<(u64, u64)> {
        Ok((1, self.1 as u64))
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
