//! The disk tier of one shard: its directories, its lock, the resets that its sets have to carry out, and the set that is
//! open.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvferry_types::{DepotId, Scope, Stored};

use super::buffer::{AlignedBuffer, UNIT_BYTES};
use super::directories::{DiskDirectories, DiskError, failed};
use super::files::Files;
use super::format::{
    DiskIdentity, Geometry, Mark, Marks, SetKey, ShardDirectory, Sweeps, shard_name,
};
use super::recover::{Recovered, SetOf, open_set};
use super::room::{Room, remove_set};
use super::set::DiskSet;

/// Pages of a set that a reset visits without a pause for other threads.
const RESET_SLICE_PAGES: u32 = 65_536;
/// A file that shows whether a disk takes writes.
pub(super) const PROBE_NAME: &str = "probe";

/// The disk tier of one shard, which no other process uses. All calls may block on a disk.
#[derive(Debug)]
pub struct DiskTier {
    directories: DiskDirectories,
    shard: u16,
    /// The shard's directory on each disk. The lock is that of the first one.
    disks: Vec<Arc<dyn Files>>,
    room: Arc<Room>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    marks: Marks,
    /// How often marks were added.
    changes: u64,
    /// Resets that are being carried out.
    resets: usize,
    open: Option<Arc<DiskSet>>,
}

impl DiskTier {
    /// Takes the lock of a shard. `Ok(None)` while another process has it. `cap` is what all files of this shard may use,
    /// on all disks together.
    ///
    /// # Errors
    ///
    /// A directory that cannot be used.
    pub fn take(
        directories: &DiskDirectories,
        shard: u16,
        cap: u64,
    ) -> Result<Option<Self>, DiskError> {
        let name = shard_name(shard);
        let mut disks: Vec<Arc<dyn Files>> = Vec::new();
        for (path, disk) in directories.paths.iter().zip(&directories.disks) {
            let directory = || match disk.directory(&name)? {
                Some(found) => Ok(found),
                None => {
                    let made = match disk.create_directory(&name) {
                        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                            disk.directory(&name)?
                        }
                        made => Some(made?),
                    };
                    disk.sync()?;
                    made.ok_or_else(|| io::Error::other("the shard's directory was removed"))
                }
            };
            disks.push(directory().map_err(failed(path, "open the shard's directory"))?);
        }
        let (Some(first), Some(path)) = (disks.first(), directories.paths.first()) else {
            return Err(DiskError::Disks(0));
        };
        if !first.try_lock().map_err(failed(path, "lock it"))? {
            return Ok(None);
        }
        let of_disks = directories.paths.iter().zip(&directories.disks);
        for (number, ((path, root), disk)) in of_disks.zip(&disks).enumerate() {
            let made = make_current((root.as_ref(), shard), disk.as_ref(), number == 0);
            made.map_err(failed(path, "set up the shard's directory"))?;
        }
        let marks =
            Marks::read(first.as_ref()).map_err(failed(path, "read the marks of resets"))?;
        let marks = marks.map_err(|error| DiskError::Format {
            directory: path.clone(),
            error,
        });
        let share = cap / disks.len() as u64;
        let others = directories.left_by_others(shard);
        let others = others.map_err(failed(path, "list the shards of other numbers of them"))?;
        let of_disks = disks.iter().zip(others);
        let of_disks = of_disks.map(|(disk, others)| [vec![Arc::clone(disk)], others].concat());
        let room = Room::new(share, of_disks.collect());
        let room = room.map_err(failed(path, "list its sets"))?;
        room.fit().map_err(failed(path, "bring it down to g3"))?;
        let marks = marks?;
        Ok(Some(Self {
            directories: directories.clone(),
            shard,
            disks,
            room: Arc::new(room),
            state: Mutex::new(State {
                marks,
                ..State::default()
            }),
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Id of this shard's depot.
    pub fn depot(&self) -> DepotId {
        self.directories.depot(self.shard)
    }

    /// The set that is open.
    pub fn open_set(&self) -> Option<Arc<DiskSet>> {
        self.state().open.clone()
    }

    /// Opens the set of a key, and creates it if it does not exist. The set that was open is closed; no copy may use it
    /// any longer. `progress` is called with the bytes of headers that were read, and all of them.
    ///
    /// # Errors
    ///
    /// The error of the file system. No set is open then.
    pub fn open(
        &self,
        key: SetKey,
        progress: &dyn Fn(u64, u64),
    ) -> io::Result<(Arc<DiskSet>, Recovered)> {
        let mut state = self.state();
        if let Some(open) = &state.open
            && open.file.key == key
        {
            return Ok((Arc::clone(open), Recovered::default()));
        }
        if let Some(open) = state.open.take() {
            open.close()?;
        }
        self.room.count()?;
        let of = SetOf {
            tier: self.directories.tier(),
            shard: self.shard,
            key,
        };
        let (set, found) = open_set(of, &self.disks, (&self.room, &state.marks), progress)?;
        let set = Arc::new(set);
        state.open = Some(Arc::clone(&set));
        Ok((set, found))
    }

    /// Number of pages that a set of this key has room for, if the cap holds no other.
    pub fn capacity_pages(&self, key: &SetKey) -> u32 {
        let disks = u16::try_from(self.disks.len()).unwrap_or(u16::MAX);
        let share = self.room.share();
        let geometry = Geometry::new(key, disks, share);
        geometry.map_or(0, |geometry| geometry.pages(geometry.segments(share)))
    }

    /// The last store that a reset through this one covers. The disk has stores of a later leader only where the leader's
    /// epoch file was replaced by an older one: they came before the reset, too.
    fn covers(&self, through: Stored) -> Stored {
        let newest = self.open_set().map(|set| set.newest());
        newest
            .filter(|newest| newest.epoch > through.epoch)
            .unwrap_or(through)
    }

    /// Carries out a reset: removes the pages of a scope that were stored by `through` or before. When the call returns, no
    /// start of a process finds a page that the reset covers, in any set.
    ///
    /// # Errors
    ///
    /// The error of the file system: the reset must not be answered as carried out.
    pub fn reset(&self, scope: &Scope, through: Stored) -> io::Result<()> {
        let through = self.covers(through);
        let open = {
            let mut state = self.state();
            let mut marks = state.marks.clone();
            let scope = scope.clone();
            let bytes_max = Geometry::marks_bytes(self.room.share()) / 2;
            marks.add(Mark { scope, through }, bytes_max);
            if let Some(first) = self.disks.first() {
                marks.write(first.as_ref())?;
            }
            state.marks = marks;
            state.changes += 1;
            state.resets += 1;
            state.open.clone()
        };
        if let Some(set) = open {
            let mut from = Some(0);
            while let Some(page) = from {
                from = set
                    .table()
                    .invalidate(scope, through, page, RESET_SLICE_PAGES);
            }
        }
        self.state().resets -= 1;
        Ok(())
    }

    /// Makes durable what was listed before this call, and drops the marks of resets whose pages no header lists any
    /// longer.
    ///
    /// # Errors
    ///
    /// The error of the file system.
    pub fn flush(&self) -> io::Result<()> {
        let (Some(set), Some(first)) = (self.open_set(), self.disks.first()) else {
            return Ok(());
        };
        let begun = self.begin_sweep(&set, first.as_ref());
        // Also on a disk without room for the marks: what is listed has its room.
        set.flush()?;
        let begun = begun?;
        let mut state = self.state();
        // The headers followed this sweep if no mark was added since, and no other sweep has begun.
        if begun == Some((state.changes, state.marks.sweeps())) {
            let swept = state.marks.swept();
            swept.write(first.as_ref())?;
            state.marks = swept;
        }
        Ok(())
    }

    /// Begins a sweep if there are marks that need not be kept after it. Returns how often marks were added before, and the
    /// sweeps with this one.
    fn begin_sweep(&self, set: &DiskSet, first: &dyn Files) -> io::Result<Option<(u64, Sweeps)>> {
        let mut state = self.state();
        // A reset that is being carried out has pages that are still listed.
        if state.resets > 0 || state.marks.is_empty() {
            return Ok(None);
        }
        for disk in &self.disks {
            let names = disk.names()?;
            // A set that is not open follows the marks when it is opened.
            if names.iter().filter(|name| SetKey::is_name(name)).count() > 1 {
                return Ok(None);
            }
        }
        let marks = state.marks.clone().with_sweep()?;
        marks.write(first)?;
        let (sweeps, changes) = (marks.sweeps(), state.changes);
        state.marks = marks;
        drop(state);
        set.begin_sweep(sweeps.begun);
        Ok(Some((changes, sweeps)))
    }

    /// Writes and removes a small file on each disk, durably, in the room that is kept for the marks of resets.
    ///
    /// # Errors
    ///
    /// The error of the file system: the disk takes no writes.
    pub fn probe_writes(&self) -> io::Result<()> {
        // The marks are not replaced meanwhile.
        let _state = self.state();
        let mut unit = AlignedBuffer::new(UNIT_BYTES as usize);
        unit.bytes_mut().fill(0);
        for disk in &self.disks {
            if disk.open(PROBE_NAME)?.is_some() {
                disk.remove(PROBE_NAME)?;
            }
            let file = disk.create(PROBE_NAME)?;
            file.write_synced(unit.bytes(), 0)?;
            drop(file);
            disk.remove(PROBE_NAME)?;
            disk.sync()?;
        }
        Ok(())
    }

    /// False if the directory with the lock and the marks of resets was removed or replaced: what is noted there is gone.
    pub fn has_marks(&self) -> bool {
        let first = self.directories.disks.first().zip(self.disks.first());
        first.is_none_or(|(root, disk)| is_current((root.as_ref(), self.shard), disk.as_ref()))
    }

    /// Checks that the shard's directories, and the files of the open set, are still those that are open.
    ///
    /// # Errors
    ///
    /// [`DiskError::Lost`] for a directory or file that was removed or replaced: what is written there is gone. No error for a
    /// disk that cannot be read.
    pub fn check_present(&self) -> Result<(), DiskError> {
        let (name, set) = (shard_name(self.shard), self.open_set());
        let of_disks = self.directories.paths.iter().zip(&self.directories.disks);
        for ((number, (path, root)), disk) in (0..).zip(of_disks).zip(&self.disks) {
            let lost = |name: String| DiskError::Lost {
                directory: path.clone(),
                name,
            };
            if !is_current((root.as_ref(), self.shard), disk.as_ref()) {
                return Err(lost(name));
            }
            let set = set.as_ref().map(|set| set.lost(number, disk.as_ref()));
            if let Some(Ok(Some(below))) = set {
                return Err(lost(format!("{name}/{below}")));
            }
        }
        Ok(())
    }

    /// Reads a small file of each disk.
    ///
    /// # Errors
    ///
    /// The error of the file system: the disk cannot be read.
    pub fn probe_reads(&self) -> io::Result<()> {
        for disk in &self.directories.disks {
            let found = DiskIdentity::read(disk.as_ref())?;
            if !matches!(found, Some(Ok(_))) {
                return Err(io::Error::other("the identity of the disk is gone"));
            }
        }
        Ok(())
    }

    /// Ends cleanly: flushes, and writes the index.
    ///
    /// # Errors
    ///
    /// The error of the file system. The next start reads the headers.
    pub fn close(&self) -> io::Result<()> {
        let open = self.state().open.take();
        open.map_or(Ok(()), |open| open.close())
    }

    /// Bytes of all files of the shard now, and of those that shards beyond the number of shards have left to it.
    ///
    /// # Errors
    ///
    /// The error of the file system.
    pub fn used_bytes(&self) -> io::Result<u64> {
        self.room.file_bytes()
    }
}

/// False if the directory of a shard was removed, or another one has its name. True if that cannot be found out.
fn is_current((root, shard): (&dyn Files, u16), directory: &dyn Files) -> bool {
    let now = root.directory(&shard_name(shard));
    let now = now.and_then(|now| now.map(|now| now.id()).transpose());
    match (now, directory.id()) {
        (Ok(now), Ok(mine)) => now == Some(mine),
        _ => true,
    }
}

/// Makes sure that the directory of a shard on one disk, whose lock this process has, is the one that was used last. One that
/// was put back loses its pages: resets since then are not noted in it.
fn make_current(
    (root, shard): (&dyn Files, u16),
    directory: &dyn Files,
    has_marks: bool,
) -> io::Result<()> {
    let found = ShardDirectory::of((root, shard), directory)?;
    let mut sets = directory.names()?;
    sets.retain(|name| SetKey::is_name(name));
    match found {
        ShardDirectory::Current => return Ok(()),
        // Of an earlier version.
        ShardDirectory::Unnumbered if !sets.is_empty() => return Ok(()),
        ShardDirectory::Unnumbered => {}
        ShardDirectory::Other => {
            if !sets.is_empty() {
                tracing::warn!(
                    shard,
                    "the directory of the shard is not the one that was used last: its pages are removed, because resets \
                     since then are not noted in it"
                );
            }
            sets.iter()
                .try_for_each(|name| remove_set(directory, name))?;
        }
    }
    if has_marks {
        Marks::anew()?.write(directory)?;
    }
    ShardDirectory::renew((root, shard), directory)
}
