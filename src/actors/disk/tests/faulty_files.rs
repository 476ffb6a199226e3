//! Real files whose calls fail as a test orders.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use kvferry_tiers::disk::files::{DiskFile, Entry, EntryKind, Files};

/// Which calls fail, and with which error.
#[derive(Debug, Default)]
pub(super) struct Faults {
    pub(super) reads: Option<i32>,
    pub(super) writes: Option<i32>,
    pub(super) syncs: Option<i32>,
}

pub(super) type SharedFaults = Arc<Mutex<Faults>>;

fn check(fault: Option<i32>) -> std::io::Result<()> {
    fault.map_or(Ok(()), |code| Err(std::io::Error::from_raw_os_error(code)))
}

fn reads(faults: &SharedFaults) -> std::io::Result<()> {
    check(faults.lock().expect("no panic").reads)
}

fn writes(faults: &SharedFaults) -> std::io::Result<()> {
    check(faults.lock().expect("no panic").writes)
}

/// A real directory whose calls fail on order.
#[derive(Debug)]
pub(super) struct FaultyDirectory(pub(super) Arc<dyn Files>, pub(super) SharedFaults);

#[derive(Debug)]
struct FaultyFile(Arc<dyn DiskFile>, SharedFaults);

impl FaultyDirectory {
    fn file(&self, file: Arc<dyn DiskFile>) -> Arc<dyn DiskFile> {
        Arc::new(FaultyFile(file, Arc::clone(&self.1)))
    }

    fn below(&self, directory: Arc<dyn Files>) -> Arc<dyn Files> {
        Arc::new(Self(directory, Arc::clone(&self.1)))
    }
}

impl Files for FaultyDirectory {
    fn open(&self, name: &str) -> std::io::Result<Option<Arc<dyn DiskFile>>> {
        Ok(self.0.open(name)?.map(|file| self.file(file)))
    }

    fn create(&self, name: &str) -> std::io::Result<Arc<dyn DiskFile>> {
        writes(&self.1)?;
        Ok(self.file(self.0.create(name)?))
    }

    fn directory(&self, name: &str) -> std::io::Result<Option<Arc<dyn Files>>> {
        Ok(self.0.directory(name)?.map(|found| self.below(found)))
    }

    fn create_directory(&self, name: &str) -> std::io::Result<Arc<dyn Files>> {
        writes(&self.1)?;
        Ok(self.below(self.0.create_directory(name)?))
    }

    fn names(&self) -> std::io::Result<Vec<String>> {
        self.0.names()
    }

    fn entry(&self, name: &str) -> std::io::Result<Option<Entry>> {
        self.0.entry(name)
    }

    fn set_mode(&self, name: &str, kind: EntryKind) -> std::io::Result<()> {
        self.0.set_mode(name, kind)
    }

    fn rename(&self, from: &str, to: &str) -> std::io::Result<()> {
        writes(&self.1)?;
        self.0.rename(from, to)
    }

    fn remove(&self, name: &str) -> std::io::Result<()> {
        writes(&self.1)?;
        self.0.remove(name)
    }

    fn remove_directory(&self, name: &str) -> std::io::Result<()> {
        writes(&self.1)?;
        self.0.remove_directory(name)
    }

    fn sync(&self) -> std::io::Result<()> {
        check(self.1.lock().expect("no panic").syncs)?;
        self.0.sync()
    }

    fn id(&self) -> std::io::Result<(u64, u64)> {
        self.0.id()
    }

    fn try_lock(&self) -> std::io::Result<bool> {
        self.0.try_lock()
    }
}

impl DiskFile for FaultyFile {
    fn bytes(&self) -> std::io::Result<u64> {
        self.0.bytes()
    }

    fn read(&self, out: &mut [u8], at: u64) -> std::io::Result<()> {
        reads(&self.1)?;
        self.0.read(out, at)
    }

    fn write(&self, bytes: &[u8], at: u64) -> std::io::Result<()> {
        writes(&self.1)?;
        self.0.write(bytes, at)
    }

    fn write_synced(&self, bytes: &[u8], at: u64) -> std::io::Result<()> {
        writes(&self.1)?;
        self.0.write_synced(bytes, at)
    }

    fn sync(&self) -> std::io::Result<()> {
        check(self.1.lock().expect("no panic").syncs)?;
        self.0.sync()
    }

    fn allocate(&self, bytes: u64) -> std::io::Result<()> {
        self.0.allocate(bytes)
    }

    fn discard(&self, at: u64, bytes: u64) -> std::io::Result<()> {
        self.0.discard(at, bytes)
    }

    fn try_lock(&self) -> std::io::Result<bool> {
        self.0.try_lock()
    }

    fn id(&self) -> std::io::Result<(u64, u64)> {
        self.0.id()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
