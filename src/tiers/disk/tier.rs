//! The disk tier of one shard: its directories, its lock, the resets that its sets have to carry out, and the set that is
//! open.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvferry_types::{DepotId, Scope, Stored};

use super::files::{Files, RealDirectory};
use super::format::{DiskIdentity, FormatError, Geometry, Mark, Marks, SetKey};
use super::recover::{Recovered, SetOf, open_set};
use super::room::Room;
use super::set::DiskSet;

/// Most disks of a tier.
pub const DISKS_MAX: usize = 64;
/// How long the identity of a new directory waits for another process that writes it.
const IDENTITY_LIMIT: Duration = Duration::from_secs(10);
/// Pages of a set that a reset visits without a pause for other threads.
const RESET_SLICE_PAGES: u32 = 65_536;
const LOCK_PAUSE: Duration = Duration::from_millis(5);

/// Why a disk tier cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// A call of the file system failed.
    #[error("g3_dir {}: cannot {action}: {source}", directory.display())]
    Io {
        /// The directory of the setting.
        directory: PathBuf,
        /// The operation that failed.
        action: &'static str,
        /// The error of the system call.
        source: io::Error,
    },
    /// The directory holds something else, or another version.
    #[error("g3_dir {}: {error}", directory.display())]
    Format {
        /// The directory of the setting.
        directory: PathBuf,
        /// What is wrong with it.
        error: FormatError,
    },
    /// The directory belongs to another tier, or to another number of disks.
    #[error(
        "g3_dir {} is disk {} of {} of its tier, and is named as disk {expected} of {disks}: name the directories of one \
         tier, all of them and in their order, or give empty ones",
        directory.display(), found.disk, found.disks
    )]
    Identity {
        /// The directory of the setting.
        directory: PathBuf,
        /// What the directory says.
        found: DiskIdentity,
        /// Its place in the setting.
        expected: u16,
        /// Number of directories in the setting.
        disks: u16,
    },
    /// No directory, or too many.
    #[error("g3_dir names {0} directories: name 1 to {DISKS_MAX}")]
    Disks(usize),
}

/// The directories of a disk tier, which all shards share.
#[derive(Debug, Clone)]
pub struct DiskDirectories {
    paths: Vec<PathBuf>,
    disks: Vec<Arc<dyn Files>>,
    tier: u128,
}

impl DiskDirectories {
    /// Opens the directories, in the order of the setting. Directories that do not exist are created, and empty ones
    /// become those of a new tier.
    ///
    /// # Errors
    ///
    /// A directory that cannot be used, belongs to another user, or is that of another tier.
    pub fn open(paths: &[PathBuf]) -> Result<Self, DiskError> {
        let mut disks: Vec<Arc<dyn Files>> = Vec::new();
        for path in paths {
            let directory = RealDirectory::open(path).map_err(failed(path, "open it"))?;
            disks.push(Arc::new(directory));
        }
        Self::of(paths, disks)
    }

    /// Opens directories of another kind. `paths` are their names in errors.
    pub(super) fn of(paths: &[PathBuf], disks: Vec<Arc<dyn Files>>) -> Result<Self, DiskError> {
        let count = u16::try_from(disks.len()).unwrap_or(u16::MAX);
        if disks.is_empty() || disks.len() > DISKS_MAX {
            return Err(DiskError::Disks(disks.len()));
        }
        let mut tier = None;
        for ((number, path), disk) in (0_u16..).zip(paths).zip(&disks) {
            let found = identity(path, disk.as_ref(), (number, count), tier)?;
            let same = tier.is_none_or(|tier| tier == found.tier);
            if (found.disk, found.disks) != (number, count) || !same {
                return Err(DiskError::Identity {
                    directory: path.clone(),
                    found,
                    expected: number,
                    disks: count,
                });
            }
            tier = Some(found.tier);
        }
        Ok(Self {
            paths: paths.to_vec(),
            disks,
            tier: tier.unwrap_or_default(),
        })
    }

    /// Id of the depot of a shard: random, and the same for every process.
    pub fn depot(&self, shard: u16) -> DepotId {
        DepotId(self.tier ^ (u128::from(shard) + 1))
    }
}

pub(super) fn failed<'a>(
    directory: &'a Path,
    action: &'static str,
) -> impl FnOnce(io::Error) -> DiskError + 'a {
    move |source| DiskError::Io {
        directory: directory.to_owned(),
        action,
        source,
    }
}

/// Reads the identity of a directory, or gives it one. Of several processes that start at one time, one writes it.
fn identity(
    path: &Path,
    disk: &dyn Files,
    (number, disks): (u16, u16),
    tier: Option<u128>,
) -> Result<DiskIdentity, DiskError> {
    let begun = Instant::now();
    loop {
        let read = DiskIdentity::read(disk).map_err(failed(path, "read its identity"))?;
        match read {
            Some(Ok(found)) => return Ok(found),
            Some(Err(error)) => {
                return Err(DiskError::Format {
                    directory: path.to_owned(),
                    error,
                });
            }
            None => {}
        }
        if disk.try_lock().map_err(failed(path, "lock it"))? {
            break;
        }
        if begun.elapsed() > IDENTITY_LIMIT {
            let text = "another process has it locked and writes no identity";
            return Err(failed(path, "set it up")(io::Error::other(text)));
        }
        std::thread::sleep(LOCK_PAUSE);
    }
    let names = disk.names().map_err(failed(path, "list it"))?;
    if names
        .iter()
        .any(|name| !name.starts_with("disk") && name != "lost+found")
    {
        let text = "it holds other files: give an empty directory";
        return Err(failed(path, "set it up")(io::Error::other(text)));
    }
    let mut id = [0; 16];
    rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())
        .map_err(|errno| failed(path, "set it up")(errno.into()))?;
    let identity = DiskIdentity {
        tier: tier.unwrap_or(u128::from_le_bytes(id)),
        disk: number,
        disks,
    };
    identity
        .write(disk)
        .map_err(failed(path, "write its identity"))?;
    Ok(identity)
}

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
        let name = format!("shard-{shard}");
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
        let marks =
            Marks::read(first.as_ref()).map_err(failed(path, "read the marks of resets"))?;
        let marks = marks.map_err(|error| DiskError::Format {
            directory: path.clone(),
            error,
        });
        let share = cap / disks.len() as u64;
        let room = Room::new(share, &disks).map_err(failed(path, "list its sets"))?;
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
        self.room.open(None, 0)?;
        let of = SetOf {
            tier: self.directories.tier,
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

    /// Carries out a reset: removes the pages of a scope that were stored by `through` or before. When the call returns, no
    /// start of a process finds a page that the reset covers, in any set.
    ///
    /// # Errors
    ///
    /// The error of the file system: the reset must not be answered as carried out.
    pub fn reset(&self, scope: &Scope, through: Stored) -> io::Result<()> {
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
        let before = {
            let state = self.state();
            // A reset that is being carried out has pages that are still listed.
            let swept = state.resets == 0 && !state.marks.is_empty();
            (state.open.clone(), swept.then_some(state.changes))
        };
        let (Some(set), swept) = before else {
            return Ok(());
        };
        set.flush()?;
        let mut state = self.state();
        if swept != Some(state.changes) {
            return Ok(());
        }
        for disk in &self.disks {
            let names = disk.names()?;
            if names.iter().filter(|name| SetKey::is_name(name)).count() > 1 {
                return Ok(());
            }
        }
        if let Some(first) = self.disks.first() {
            Marks::default().write(first.as_ref())?;
        }
        state.marks = Marks::default();
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

    /// Bytes that the files of all sets use on each disk.
    pub fn used_bytes(&self) -> Vec<u64> {
        self.room.used_bytes()
    }
}
