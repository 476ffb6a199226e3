//! The directories of a disk tier, and whether they are still there.

use std::num::ParseIntError;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fmt, io};

use kvferry_types::DepotId;

use super::files::{Files, RealDirectory};
use super::format::{DiskIdentity, FormatError};

/// Most disks of a tier.
pub const DISKS_MAX: usize = 64;
/// How long the identity of a new directory waits for another process that writes it.
const IDENTITY_LIMIT: Duration = Duration::from_secs(10);
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
    /// Files of the tier were removed, or other ones have their names.
    #[error(
        "g3_dir {}: {name} was removed or replaced while it was in use: its pages are gone, and it is made again",
        directory.display()
    )]
    Lost {
        /// The directory of the setting.
        directory: PathBuf,
        /// Path of the directory or file below it.
        name: String,
    },
    /// Nothing of the tier lies at the path any longer.
    #[error("g3_dir {}: the disk of the tier is missing: mount it again", .0.display())]
    Missing(PathBuf),
    /// No directory, or too many.
    #[error("g3_dir names {0} directories: name 1 to {DISKS_MAX}")]
    Disks(usize),
}

/// The directories of a disk tier, which all shards share.
#[derive(Debug, Clone)]
pub struct DiskDirectories {
    pub(super) paths: Vec<PathBuf>,
    /// The open directories; none after [`Self::close`].
    pub(super) disks: Vec<Arc<dyn Files>>,
    known: KnownTier,
    opened_by: Open,
    /// Number of shards that use the tier; 0 if it is not known.
    shards: u16,
}

/// A tier that a process has opened, in a form for another one: the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownTier {
    /// The tier of the identities.
    tier: u128,
    /// Device and inode of each directory when it was opened last.
    ids: Vec<(u64, u64)>,
}

impl fmt::Display for KnownTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.tier)?;
        let mut ids = self.ids.iter();
        ids.try_for_each(|(device, inode)| write!(f, ",{device:x}:{inode:x}"))
    }
}

impl FromStr for KnownTier {
    type Err = ParseIntError;

    fn from_str(text: &str) -> Result<Self, ParseIntError> {
        let (tier, ids) = text.split_once(',').unwrap_or((text, ""));
        let number = |text: &str| u64::from_str_radix(text, 16);
        let id = |text: &str| {
            let (device, inode) = text.split_once(':').unwrap_or((text, ""));
            Ok((number(device)?, number(inode)?))
        };
        Ok(Self {
            tier: u128::from_str_radix(tier, 16)?,
            ids: ids.split(',').map(id).collect::<Result<_, _>>()?,
        })
    }
}

type OpenDirectory = dyn Fn(&Path) -> io::Result<Arc<dyn Files>> + Send + Sync;

/// Opens the directory that has a path.
#[derive(Clone)]
struct Open(Arc<OpenDirectory>);

impl fmt::Debug for Open {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Open")
    }
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
        Self::of(paths, disks, open_existing)
    }

    /// The directories of a tier that another process has opened. None is open before [`Self::reopened`], and none is made
    /// at the path of a disk that is not mounted now.
    ///
    /// # Errors
    ///
    /// Another number of directories than the tier has.
    pub fn of_known(paths: &[PathBuf], known: KnownTier) -> Result<Self, DiskError> {
        if known.ids.len() != paths.len() {
            return Err(DiskError::Disks(paths.len()));
        }
        Ok(Self {
            known,
            paths: paths.to_vec(),
            disks: Vec::new(),
            opened_by: Open(Arc::new(open_existing)),
            shards: 0,
        })
    }

    /// The tier, for another process that uses it.
    pub fn known(&self) -> &KnownTier {
        &self.known
    }

    /// The tier of the identities.
    pub(super) fn tier(&self) -> u128 {
        self.known.tier
    }

    /// Opens directories of another kind. `paths` are their names in errors; `open` opens the one that has a path later.
    ///
    /// # Errors
    ///
    /// As [`Self::open`].
    pub fn of(
        paths: &[PathBuf],
        disks: Vec<Arc<dyn Files>>,
        open: impl Fn(&Path) -> io::Result<Arc<dyn Files>> + Send + Sync + 'static,
    ) -> Result<Self, DiskError> {
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
        let ids = paths.iter().zip(&disks);
        let ids = ids.map(|(path, disk)| disk.id().map_err(failed(path, "read it")));
        Ok(Self {
            known: KnownTier {
                tier: tier.unwrap_or_default(),
                ids: ids.collect::<Result<_, _>>()?,
            },
            paths: paths.to_vec(),
            disks,
            opened_by: Open(Arc::new(open)),
            shards: 0,
        })
    }

    /// Number of the directories.
    pub fn count(&self) -> usize {
        self.paths.len()
    }

    /// The directories, as used by this number of shards. Files of shards beyond it, which were left when there were more,
    /// count towards the caps of these, and make room first.
    #[must_use]
    pub fn for_shards(self, shards: u16) -> Self {
        Self { shards, ..self }
    }

    /// Of each disk the directories of shards that no worker has now, and whose room a shard may use. No other process uses
    /// them as long as they are open.
    pub(super) fn left_by_others(&self, shard: u16) -> io::Result<Vec<Vec<Arc<dyn Files>>>> {
        let mut found = vec![Vec::new(); self.disks.len()];
        let Some(first) = self.disks.first().filter(|_| self.shards > 0) else {
            return Ok(found);
        };
        for name in first.names()? {
            let number = name.strip_prefix("shard-");
            let number = number.and_then(|number| number.parse::<u16>().ok());
            let left = number.is_some_and(|number| {
                number >= self.shards && number % self.shards == shard % self.shards
            });
            let directory = match left {
                true => first.directory(&name)?,
                false => None,
            };
            let Some(directory) = directory else {
                continue;
            };
            if !directory.try_lock()? {
                tracing::warn!(
                    name,
                    "another process uses a shard beyond the number of shards"
                );
                continue;
            }
            for (disk, others) in self.disks.iter().zip(&mut found).skip(1) {
                others.extend(disk.directory(&name)?);
            }
            found[0].push(directory);
        }
        Ok(found)
    }

    /// The directories that have the paths now: other ones than these where a disk was mounted again. Creates nothing.
    ///
    /// # Errors
    ///
    /// A directory that is missing, or has another identity, or none: a disk that is not mounted leaves an empty
    /// directory behind, which must not be used in its place. The directory that was open is given its identity again, if
    /// that was removed with everything else.
    pub fn reopened(&self) -> Result<Self, DiskError> {
        let mut disks: Vec<Arc<dyn Files>> = Vec::new();
        let mut ids = Vec::new();
        let count = u16::try_from(self.paths.len()).unwrap_or(u16::MAX);
        for ((number, path), last) in (0_u16..).zip(&self.paths).zip(&self.known.ids) {
            let disk = (self.opened_by.0)(path).map_err(failed(path, "open it"))?;
            let id = disk.id().map_err(failed(path, "read it"))?;
            ids.push(id);
            let found = DiskIdentity::read(disk.as_ref());
            match found.map_err(failed(path, "read its identity"))? {
                Some(Ok(found)) if (found.tier, found.disk) == (self.tier(), number) => {}
                Some(Err(error)) => {
                    let directory = path.clone();
                    return Err(DiskError::Format { directory, error });
                }
                None if id == *last => {
                    let identity = DiskIdentity {
                        tier: self.tier(),
                        disk: number,
                        disks: count,
                    };
                    let written = identity.write(disk.as_ref());
                    written.map_err(failed(path, "write its identity"))?;
                }
                _ => return Err(DiskError::Missing(path.clone())),
            }
            disks.push(disk);
        }
        let known = KnownTier {
            tier: self.tier(),
            ids,
        };
        Ok(Self {
            disks,
            known,
            ..self.clone()
        })
    }

    /// Closes the directories, so that their disks can be unmounted.
    pub fn close(&mut self) {
        self.disks.clear();
    }

    /// Checks that each path still leads to the directory that is open.
    ///
    /// # Errors
    ///
    /// A directory that was removed, or whose disk is not mounted any longer.
    pub fn check_present(&self) -> Result<(), DiskError> {
        for (path, disk) in self.paths.iter().zip(&self.disks) {
            let now = (self.opened_by.0)(path).and_then(|found| found.id());
            if now.map_err(failed(path, "open it"))?
                != disk.id().map_err(failed(path, "read it"))?
            {
                return Err(DiskError::Missing(path.clone()));
            }
        }
        Ok(())
    }

    /// Id of the depot of a shard: random, and the same for every process.
    pub fn depot(&self, shard: u16) -> DepotId {
        DepotId(self.tier() ^ (u128::from(shard) + 1))
    }
}

fn open_existing(path: &Path) -> io::Result<Arc<dyn Files>> {
    Ok(Arc::new(RealDirectory::open_existing(path)?))
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
    let mut locked = false;
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
            None if locked => break,
            None => {}
        }
        if disk.try_lock().map_err(failed(path, "lock it"))? {
            // Another process may have written the identity and ended since it was read.
            locked = true;
            continue;
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
