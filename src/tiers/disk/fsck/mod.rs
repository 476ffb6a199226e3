//! Checks the directories of a disk tier that no process uses, and repairs them.
//!
//! A check changes nothing. It takes the lock of every shard, reads all files, and compares: the identity of the
//! directories, the set files, every slot of every region, the index with the headers, and every listed page with its
//! checksum. It lists as findings what differs from the files of a tier whose processes have ended cleanly. After a
//! process or a machine has died, slots that were being written and pages that did not reach the disk are findings too;
//! the next start removes them by itself, as a repair does.
//!
//! A repair removes and never guesses: a block ends before its first page that is not proven, a set whose pages cannot be
//! placed is removed, and a shard whose resets are not known loses all of its pages. It writes both slots of each region
//! that it changes. It leaves files that are not kvferry's, and files of another version of the format.

mod finding;
mod set;

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

pub use finding::{Finding, FindingKind, Place};

use super::directories::{DISKS_MAX, DiskError, failed};
use super::files::{EntryKind, Files, RealDirectory};
use super::format::{
    DiskIdentity, FormatError, IDENTITY_NAME, MARKS_NAME, Marks, SHARD_ID_NAME, SetFile, SetKey,
    shard_beside, shard_name,
};
use super::room::{directory_of_set, remove_set, set_bytes};
use super::tier::PROBE_NAME;
use set::SetCheck;

/// Findings that a report lists; it counts all of them.
pub const FINDINGS_MAX: usize = 1000;

/// The leader's directory, on the first disk: its key and its last epoch. A check looks at its permissions alone.
const LEADER_NAME: &str = "leader";
/// The lock of `up`, on the first disk.
const LOCK_NAME: &str = "up.lock";

/// Why a check cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum FsckError {
    /// A directory cannot be used.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The directory holds no disk tier.
    #[error(
        "{}: no disk tier is there: name the directories of g3_dir, all of them and in their order", .0.display()
    )]
    NoTier(PathBuf),
    /// A leader uses the tier.
    #[error("{}: it is in use: stop kvferry first", .0.display())]
    Leader(PathBuf),
    /// A process uses the tier.
    #[error("{}: shard {shard} is in use: stop kvferry first", directory.display())]
    InUse {
        /// The first directory.
        directory: PathBuf,
        /// The shard.
        shard: u16,
    },
}

/// What a check has found.
#[derive(Debug, Default)]
pub struct FsckReport {
    /// Shards that have a directory.
    pub shards: u64,
    /// Sets: pages of one layout, page size and ratio, of one shard.
    pub sets: u64,
    /// Files of pages.
    pub segments: u64,
    /// Slots of headers that were read.
    pub slots: u64,
    /// Blocks that are listed.
    pub blocks: u64,
    /// Pages that are listed. Each was read and compared with its checksum.
    pub pages: u64,
    /// Pages whose checksum matches.
    pub good_pages: u64,
    /// Pages that headers list and that a reset has removed: they are not served.
    pub reset_pages: u64,
    /// Pages that headers list on a disk on which another set needed the room: they are not served.
    pub displaced_pages: u64,
    /// Bytes of all files of pages.
    pub bytes: u64,
    /// What is wrong: the first [`FINDINGS_MAX`].
    pub findings: Vec<Finding>,
    /// Number of all findings.
    pub findings_total: u64,
    /// Files and directories that are not kvferry's: the first [`FINDINGS_MAX`].
    pub unknown: Vec<Place>,
    /// Number of all of them.
    pub unknown_total: u64,
    /// Findings that a repair has removed.
    pub repaired: u64,
}

/// Checks the directories of a tier, in the order of the setting, and repairs them if `repair`. `progress` is called with
/// the bytes that were checked and those of all files of pages.
///
/// # Errors
///
/// See [`FsckError`]. A tier that another process uses, or another version of the format, is left alone.
pub fn fsck(
    paths: &[PathBuf],
    repair: bool,
    progress: &dyn Fn(u64, u64),
) -> Result<FsckReport, FsckError> {
    let mut disks: Vec<Arc<dyn Files>> = Vec::new();
    for path in paths {
        let opened = RealDirectory::open_existing(path).map_err(failed(path, "open it"))?;
        disks.push(Arc::new(opened));
    }
    check(paths, &disks, repair, progress)
}

/// Checks directories of another kind.
pub(super) fn check(
    paths: &[PathBuf],
    disks: &[Arc<dyn Files>],
    repair: bool,
    progress: &dyn Fn(u64, u64),
) -> Result<FsckReport, FsckError> {
    if disks.is_empty() || disks.len() > DISKS_MAX {
        return Err(DiskError::Disks(disks.len()).into());
    }
    let mut checker = Checker {
        paths,
        disks,
        repair,
        progress,
        report: FsckReport::default(),
        done: 0,
    };
    let identities = checker.identities()?;
    let shards = checker.shards()?;
    // Held to the end of the check.
    let _leader = checker.lock_leader()?;
    let locked = checker.lock(&shards)?;
    let tier = match identities.iter().flatten().next() {
        Some(identity) => Some(identity.tier),
        None => checker.tier_of_sets(&locked)?,
    };
    checker.check_identities(&identities, tier)?;
    for (disk, files) in (0_u16..).zip(disks) {
        let place = Place {
            disk: Some(disk),
            ..Place::default()
        };
        let known = |name: &str| match name {
            IDENTITY_NAME | "disk.new" | LOCK_NAME => Some(EntryKind::File),
            LEADER_NAME => Some(EntryKind::Directory),
            name if shard_beside(name).is_some() => Some(EntryKind::File),
            name => shard_number(name).map(|_| EntryKind::Directory),
        };
        checker.check_names(files.as_ref(), &place, &known)?;
    }
    for (_, shard) in &locked {
        checker.report.bytes += checker.shard_bytes(shard)?;
    }
    for (number, shard) in &locked {
        checker.report.shards += 1;
        checker.check_shard(*number, shard, tier)?;
    }
    Ok(checker.report)
}

/// The number of a shard's directory; `None` for other names.
fn shard_number(name: &str) -> Option<u16> {
    let number = name.strip_prefix("shard-")?.parse().ok()?;
    (name == shard_name(number)).then_some(number)
}

/// The directories of one shard: `None` on a disk that has none.
type Shard = Vec<Option<Arc<dyn Files>>>;

struct Checker<'a> {
    paths: &'a [PathBuf],
    disks: &'a [Arc<dyn Files>],
    repair: bool,
    progress: &'a dyn Fn(u64, u64),
    report: FsckReport,
    /// Bytes that were checked.
    done: u64,
}

impl Checker<'_> {
    fn failed(&self, disk: usize, action: &'static str) -> impl FnOnce(io::Error) -> DiskError {
        let path = self.paths.get(disk).cloned().unwrap_or_default();
        move |error| failed(&path, action)(error)
    }

    /// Notes what is wrong. `repair`: what a repair does about it; `None` if it does nothing.
    fn find(
        &mut self,
        kind: FindingKind,
        place: Place,
        what: impl Into<String>,
        repair: Option<&'static str>,
    ) {
        let repair = repair.filter(|_| self.repair);
        self.report.findings_total += 1;
        self.report.repaired += u64::from(repair.is_some());
        if self.report.findings.len() < FINDINGS_MAX {
            self.report.findings.push(Finding {
                kind,
                place,
                what: what.into(),
                repair,
            });
        }
    }

    fn advance(&mut self, to: u64) {
        self.done = self.done.max(to).min(self.report.bytes);
        (self.progress)(self.done, self.report.bytes);
    }

    /// The identity of each directory; `None` if it cannot be read.
    fn identities(&self) -> Result<Vec<Option<DiskIdentity>>, FsckError> {
        let mut identities: Vec<Option<DiskIdentity>> = Vec::new();
        let disks = u16::try_from(self.disks.len()).unwrap_or(u16::MAX);
        for (path, (number, disk)) in self.paths.iter().zip((0_u16..).zip(self.disks)) {
            let found = DiskIdentity::read(disk.as_ref());
            let found = match found.map_err(failed(path, "read its identity"))? {
                Some(Ok(found)) => found,
                Some(Err(error @ FormatError::Version { .. })) => {
                    let directory = path.clone();
                    return Err(DiskError::Format { directory, error }.into());
                }
                Some(Err(_)) => {
                    identities.push(None);
                    continue;
                }
                None => {
                    let names = disk.names().map_err(failed(path, "list it"))?;
                    if !names.iter().any(|name| shard_number(name).is_some()) {
                        return Err(FsckError::NoTier(path.clone()));
                    }
                    identities.push(None);
                    continue;
                }
            };
            let first = identities.iter().flatten().next();
            let same = first.is_none_or(|first| first.tier == found.tier);
            if (found.disk, found.disks) != (number, disks) || !same {
                let error = DiskError::Identity {
                    directory: path.clone(),
                    found,
                    expected: number,
                    disks,
                };
                return Err(error.into());
            }
            identities.push(Some(found));
        }
        Ok(identities)
    }

    fn check_identities(
        &mut self,
        identities: &[Option<DiskIdentity>],
        tier: Option<u128>,
    ) -> Result<(), FsckError> {
        let disks = u16::try_from(self.disks.len()).unwrap_or(u16::MAX);
        for (disk, identity) in (0_u16..).zip(identities) {
            if identity.is_some() {
                continue;
            }
            let place = Place {
                disk: Some(disk),
                file: Some(IDENTITY_NAME.to_owned()),
                ..Place::default()
            };
            let what = "the identity of the directory is missing or damaged";
            let repair = tier.map(|_| "written again");
            self.find(FindingKind::Identity, place, what, repair);
            if let Some(tier) = tier.filter(|_| self.repair) {
                let identity = DiskIdentity { tier, disk, disks };
                let files = self.disks[usize::from(disk)].as_ref();
                let written = identity.write(files);
                written.map_err(self.failed(disk.into(), "write its identity"))?;
            }
        }
        Ok(())
    }

    /// The numbers of all shards.
    fn shards(&self) -> Result<BTreeSet<u16>, FsckError> {
        let mut shards = BTreeSet::new();
        for (disk, files) in self.disks.iter().enumerate() {
            let names = files.names().map_err(self.failed(disk, "list it"))?;
            shards.extend(names.iter().filter_map(|name| shard_number(name)));
        }
        Ok(shards)
    }

    /// Opens and locks the leader's directory, if there is one.
    fn lock_leader(&self) -> Result<Option<Arc<dyn Files>>, FsckError> {
        let Some(first) = self.disks.first() else {
            return Ok(None);
        };
        let opened = directory(first.as_ref(), LEADER_NAME);
        let opened = opened.map_err(self.failed(0, "open the leader's directory"))?;
        if let Some(opened) = &opened
            && !opened.try_lock().map_err(self.failed(0, "lock it"))?
        {
            let path = self.paths.first().cloned().unwrap_or_default();
            return Err(FsckError::Leader(path));
        }
        Ok(opened)
    }

    /// Opens and locks the directories of all shards. The lock of a shard is that of its first directory.
    fn lock(&self, shards: &BTreeSet<u16>) -> Result<Vec<(u16, Shard)>, FsckError> {
        let mut locked = Vec::new();
        for shard in shards {
            let mut directories: Shard = Vec::new();
            for (disk, files) in self.disks.iter().enumerate() {
                let opened = directory(files.as_ref(), &shard_name(*shard));
                directories.push(opened.map_err(self.failed(disk, "open a shard"))?);
            }
            if let Some(first) = directories.iter().flatten().next()
                && !first.try_lock().map_err(self.failed(0, "lock it"))?
            {
                return Err(FsckError::InUse {
                    directory: self.paths.first().cloned().unwrap_or_default(),
                    shard: *shard,
                });
            }
            locked.push((*shard, directories));
        }
        Ok(locked)
    }

    /// The tier that the set files name, for directories without an identity.
    fn tier_of_sets(&self, shards: &[(u16, Shard)]) -> Result<Option<u128>, FsckError> {
        for (_, shard) in shards {
            let Some(Some(first)) = shard.first() else {
                continue;
            };
            for name in first.names().map_err(self.failed(0, "list a shard"))? {
                let set = directory_of_set(first.as_ref(), &name);
                let Some(set) = set.map_err(self.failed(0, "open a set"))? else {
                    continue;
                };
                let read = SetFile::read(set.as_ref()).map_err(self.failed(0, "read a set"))?;
                if let Some(Ok(file)) = read
                    && usize::from(file.geometry.disks) == self.disks.len()
                {
                    return Ok(Some(file.tier));
                }
            }
        }
        Ok(None)
    }

    /// Bytes of all sets of a shard.
    fn shard_bytes(&self, shard: &Shard) -> Result<u64, FsckError> {
        let mut bytes = 0;
        for (disk, files) in shard.iter().enumerate() {
            let Some(files) = files else {
                continue;
            };
            for name in files.names().map_err(self.failed(disk, "list a shard"))? {
                if SetKey::is_name(&name)
                    && let Some(set) =
                        directory(files.as_ref(), &name).map_err(self.failed(disk, "open a set"))?
                {
                    // What cannot be opened is a finding later.
                    bytes += set_bytes(set.as_ref()).unwrap_or(0);
                }
            }
        }
        Ok(bytes)
    }

    /// Checks the kinds and permissions of the names in a directory, and its own. `known` gives the kind of a name that
    /// is kvferry's; other names are reported as unknown.
    fn check_names(
        &mut self,
        files: &dyn Files,
        place: &Place,
        known: &dyn Fn(&str) -> Option<EntryKind>,
    ) -> Result<(), FsckError> {
        let disk = usize::from(place.disk.unwrap_or_default());
        let mut names = files.names().map_err(self.failed(disk, "list it"))?;
        names.push(".".to_owned());
        for name in names {
            let place = Place {
                file: (name != ".").then(|| name.clone()),
                ..place.clone()
            };
            let expected = match name.as_str() {
                "." => Some(EntryKind::Directory),
                name => known(name),
            };
            let Some(expected) = expected else {
                if name != "lost+found" {
                    self.report.unknown_total += 1;
                    if self.report.unknown.len() < FINDINGS_MAX {
                        self.report.unknown.push(place);
                    }
                }
                continue;
            };
            let entry = files.entry(&name);
            let Some(entry) = entry.map_err(self.failed(disk, "read an entry"))? else {
                continue;
            };
            if entry.kind != expected {
                let what = match expected {
                    EntryKind::Directory => "this is no directory",
                    EntryKind::File | EntryKind::Other => "this is no regular file",
                };
                // A directory in the place of a file may hold anything.
                let removed = (entry.kind != EntryKind::Directory).then_some("removed");
                self.find(FindingKind::Kind, place, what, removed);
                if self.repair && removed.is_some() {
                    let done = files.remove(&name).and_then(|()| files.sync());
                    done.map_err(self.failed(disk, "remove an entry"))?;
                }
            } else if entry.mode & 0o077 != 0 {
                let what = format!(
                    "other users have access: mode {:o}, not {:o}",
                    entry.mode,
                    expected.mode()
                );
                self.find(
                    FindingKind::Permissions,
                    place,
                    what,
                    Some("access removed"),
                );
                if self.repair {
                    let done = files.set_mode(&name, expected);
                    done.map_err(self.failed(disk, "change a mode"))?;
                }
            }
        }
        Ok(())
    }

    fn check_shard(
        &mut self,
        number: u16,
        shard: &Shard,
        tier: Option<u128>,
    ) -> Result<(), FsckError> {
        let known = |name: &str| match name {
            "lock" | MARKS_NAME | "marks.new" | PROBE_NAME | SHARD_ID_NAME | "id.new" => {
                Some(EntryKind::File)
            }
            name => SetKey::is_name(name).then_some(EntryKind::Directory),
        };
        let mut sets = BTreeSet::new();
        for (disk, files) in (0_u16..).zip(shard) {
            let Some(files) = files else {
                continue;
            };
            let place = Place {
                disk: Some(disk),
                shard: Some(number),
                ..Place::default()
            };
            self.check_names(files.as_ref(), &place, &known)?;
            let names = files.names();
            let names = names.map_err(self.failed(disk.into(), "list a shard"))?;
            sets.extend(names.into_iter().filter(|name| SetKey::is_name(name)));
        }
        // Without its first directory, a shard has neither marks nor set files: nothing of it is served.
        let Some(Some(first)) = shard.first() else {
            return Ok(());
        };
        let marks = Marks::read(first.as_ref()).map_err(self.failed(0, "read the marks"))?;
        let place = Place {
            disk: Some(0),
            shard: Some(number),
            file: Some(MARKS_NAME.to_owned()),
            ..Place::default()
        };
        let marks = match marks {
            Ok(marks) => marks,
            Err(error @ FormatError::Version { .. }) => {
                self.find(FindingKind::Version, place, error.to_string(), None);
                return Ok(());
            }
            Err(error) => {
                let what = format!("{error}: resets that the pages have to follow are not known");
                let repair = Some("all pages of the shard removed");
                self.find(FindingKind::Marks, place, what, repair);
                if self.repair {
                    return self.remove_all(shard, &sets);
                }
                Marks::default()
            }
        };
        for name in &sets {
            SetCheck::new(self, (number, name), tier).run(shard, &marks)?;
        }
        Ok(())
    }

    /// Removes all sets of a shard, then its marks.
    fn remove_all(&self, shard: &Shard, sets: &BTreeSet<String>) -> Result<(), FsckError> {
        for name in sets {
            self.remove_set(shard, name)?;
        }
        if let Some(Some(first)) = shard.first() {
            let written = Marks::anew().and_then(|marks| marks.write(first.as_ref()));
            written.map_err(self.failed(0, "write the marks"))?;
        }
        Ok(())
    }

    /// Removes a set from all disks.
    fn remove_set(&self, shard: &Shard, name: &str) -> Result<(), FsckError> {
        for (disk, files) in shard.iter().enumerate() {
            if let Some(files) = files {
                let removed = remove_set(files.as_ref(), name);
                removed.map_err(self.failed(disk, "remove a set"))?;
            }
        }
        Ok(())
    }
}

/// Opens a directory below; `None` if there is none of this name, or something else has it.
fn directory(files: &dyn Files, name: &str) -> io::Result<Option<Arc<dyn Files>>> {
    match files.entry(name)? {
        Some(entry) if entry.kind == EntryKind::Directory => files.directory(name),
        _ => Ok(None),
    }
}
