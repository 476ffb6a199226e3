//! The cap of a disk tier: what its files use, and the removal of sets of other layouts for the set that is open.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use super::files::{EntryKind, Files};
use super::format::{INDEX_NAME, SetFile, SetKey, is_ours, segment_number};

/// Opens the directory of a set; `None` if the name is that of a file.
pub(super) fn directory_of_set(
    directory: &dyn Files,
    name: &str,
) -> io::Result<Option<Arc<dyn Files>>> {
    match SetKey::is_name(name) {
        true => directory.directory(name),
        false => Ok(None),
    }
}

/// The files of one disk.
#[derive(Debug)]
struct DiskRoom {
    /// The shard's directory, then those of shards that no worker has, because their number was larger.
    directories: Vec<Arc<dyn Files>>,
    /// Bytes of the segments of the open set.
    open_bytes: u64,
    /// The sets that are not open, by the number of their directory and name.
    closed: BTreeMap<(usize, String), ClosedSet>,
}

/// A set that is not open.
#[derive(Debug, Clone, Copy)]
struct ClosedSet {
    /// Bytes of its files.
    bytes: u64,
    /// When its files changed last, as [`Entry::changed`](super::files::Entry::changed) says.
    changed: i64,
}

impl DiskRoom {
    /// Counts the files of all sets. The one of this name in the shard's directory is the open one.
    fn count(&mut self, open: Option<&str>) -> io::Result<()> {
        self.closed.clear();
        self.open_bytes = 0;
        for (number, directory) in self.directories.iter().enumerate() {
            for name in directory.names()? {
                let Some(set) = directory_of_set(directory.as_ref(), &name)? else {
                    continue;
                };
                match number == 0 && Some(name.as_str()) == open {
                    true => self.open_bytes = segment_bytes(set.as_ref())?,
                    false => {
                        let bytes = set_bytes(set.as_ref())?;
                        let changed = directory.entry(&name)?.map_or(0, |entry| entry.changed);
                        let closed = ClosedSet { bytes, changed };
                        self.closed.insert((number, name), closed);
                    }
                }
            }
        }
        Ok(())
    }

    fn closed_bytes(&self) -> u64 {
        self.closed.values().map(|set| set.bytes).sum()
    }

    /// Removes a set that is not open and has not the name `kept`: of a shard that no worker has first, then the one that was
    /// not used for the longest time. Returns false if none is left.
    fn remove_closed(&mut self, kept: Option<&str>, why: &str) -> io::Result<bool> {
        let closed = self.closed.iter();
        let closed =
            closed.filter(|((number, name), _)| *number > 0 || Some(name.as_str()) != kept);
        let first = closed.min_by_key(|((number, _), set)| (*number == 0, set.changed));
        let Some((key, bytes)) = first.map(|(key, set)| (key.clone(), set.bytes)) else {
            return Ok(false);
        };
        self.closed.remove(&key);
        let (number, set) = key;
        tracing::info!(set, bytes, "{why}: a set that is not in use makes room");
        if let Some(directory) = self.directories.get(number) {
            remove_set(directory.as_ref(), &set)?;
        }
        Ok(true)
    }
}

/// Use of the cap by one shard.
#[derive(Debug)]
pub(super) struct Room {
    /// Bytes that the shard may use on each disk.
    share: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    disks: Vec<DiskRoom>,
    /// Bytes of each disk's share that are kept for files other than segments.
    reserved: u64,
}

impl Room {
    /// The use of these directories, of which no set is open: of each disk the shard's directory, and those of shards that
    /// no worker has.
    pub(super) fn new(share: u64, disks: Vec<Vec<Arc<dyn Files>>>) -> io::Result<Self> {
        let disks = disks.into_iter().map(|directories| {
            let mut disk = DiskRoom {
                directories,
                open_bytes: 0,
                closed: BTreeMap::new(),
            };
            disk.count(None)?;
            Ok(disk)
        });
        let disks = disks.collect::<io::Result<_>>()?;
        Ok(Self {
            share,
            state: Mutex::new(State { disks, reserved: 0 }),
        })
    }

    /// A room without disks, for a set that gets no further segments.
    pub(super) fn none() -> Self {
        Self {
            share: 0,
            state: Mutex::default(),
        }
    }

    /// Bytes that the shard may use on each disk.
    pub(super) fn share(&self) -> u64 {
        self.share
    }

    /// Brings what lies on the disks down to the share, as after a change of the cap: removes all sets but the one that was
    /// used last, as far as necessary, and of that one the last segments. No set is open.
    pub(super) fn fit(&self) -> io::Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let own = state
            .disks
            .first()
            .into_iter()
            .flat_map(|disk| &disk.closed);
        let own = own.filter(|((number, _), _)| *number == 0);
        let last = own.max_by_key(|(_, set)| set.changed);
        let Some(last) = last.map(|((_, name), _)| name.clone()) else {
            return (0..state.disks.len()).try_for_each(|disk| self.make_room(&mut state, disk, 0));
        };
        let why = "g3 is smaller than what the disk has";
        for disk in &mut state.disks {
            while disk.closed_bytes() > self.share && disk.remove_closed(Some(&last), why)? {}
        }
        if state
            .disks
            .iter()
            .all(|disk| disk.closed_bytes() <= self.share)
        {
            return Ok(());
        }
        let kept = self.segments_of(&state, &last)?;
        for disk in &mut state.disks {
            if let Some(directory) = disk.directories.first()
                && let Some(set) = directory.directory(&last)?
            {
                tracing::info!(set = last, kept, "{why}: segments of the set are removed");
                trim_set(set.as_ref(), kept)?;
            }
            disk.count(None)?;
        }
        (0..state.disks.len()).try_for_each(|disk| self.make_room(&mut state, disk, 0))
    }

    /// Segments of a set for which each disk has room; 0 if the set file does not tell.
    fn segments_of(&self, state: &State, set: &str) -> io::Result<u32> {
        let first = state
            .disks
            .first()
            .and_then(|disk| disk.directories.first());
        let opened = first.map(|first| first.directory(set)).transpose()?;
        let file = opened.flatten().map(|set| SetFile::read(set.as_ref()));
        let file = file.transpose()?.flatten().and_then(Result::ok);
        Ok(file.map_or(0, |file| file.geometry.segments(self.share)))
    }

    /// Counts the files of all sets, of which none is open.
    pub(super) fn count(&self) -> io::Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.disks.iter_mut().try_for_each(|disk| disk.count(None))
    }

    /// Counts a set as the open one, and the one before as closed. `reserved`: bytes on each disk for files other than
    /// segments. Removes closed sets where the files use more than the share.
    pub(super) fn open(&self, name: &str, reserved: u64) -> io::Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.reserved = reserved;
        state
            .disks
            .iter_mut()
            .try_for_each(|disk| disk.count(Some(name)))?;
        (0..state.disks.len()).try_for_each(|disk| self.make_room(&mut state, disk, 0))
    }

    /// Makes room for a segment of the open set, and counts it.
    ///
    /// # Errors
    ///
    /// [`io::ErrorKind::StorageFull`] if the cap has no room and no closed set is left.
    pub(super) fn make(&self, disk: usize, bytes: u64) -> io::Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.make_room(&mut state, disk, bytes)?;
        if let Some(disk) = state.disks.get_mut(disk) {
            disk.open_bytes += bytes;
        }
        Ok(())
    }

    /// A segment that was counted could not be created.
    pub(super) fn take_back(&self, disk: usize, bytes: u64) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(disk) = state.disks.get_mut(disk) {
            disk.open_bytes = disk.open_bytes.saturating_sub(bytes);
        }
    }

    /// Removes a set of another layout than `kept` from a disk that has less room than the cap. Returns false if none is
    /// left.
    pub(super) fn remove_closed(&self, disk: usize, kept: &str) -> io::Result<bool> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(disk) = state.disks.get_mut(disk) else {
            return Ok(false);
        };
        disk.remove_closed(Some(kept), "the disk is full")
    }

    fn make_room(&self, state: &mut State, disk: usize, bytes: u64) -> io::Result<()> {
        let limit = self.share.saturating_sub(state.reserved);
        let Some(disk) = state.disks.get_mut(disk) else {
            return Ok(());
        };
        loop {
            if disk.open_bytes + disk.closed_bytes() + bytes <= limit {
                return Ok(());
            }
            if disk.remove_closed(None, "the cap is reached")? {
                continue;
            }
            if bytes == 0 {
                return Ok(());
            }
            let text = format!(
                "the cap of {} bytes has no room for {bytes} more",
                self.share
            );
            return Err(io::Error::new(io::ErrorKind::StorageFull, text));
        }
    }

    /// Bytes of all files now, on all disks.
    pub(super) fn file_bytes(&self) -> io::Result<u64> {
        let directories: Vec<Arc<dyn Files>> = {
            let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let disks = state.disks.iter();
            disks.flat_map(|disk| disk.directories.clone()).collect()
        };
        let mut bytes = 0;
        for directory in directories {
            bytes += set_bytes(directory.as_ref())?;
            for name in directory.names()? {
                if let Some(set) = directory_of_set(directory.as_ref(), &name)? {
                    bytes += set_bytes(set.as_ref())?;
                }
            }
        }
        Ok(bytes)
    }
}

/// Removes the segments of a set from this one on, and the index, which lists pages of them.
fn trim_set(set: &dyn Files, from: u32) -> io::Result<()> {
    let mut names = set.names()?;
    names.retain(|name| {
        name == INDEX_NAME || segment_number(name).is_some_and(|number| number >= from)
    });
    names.sort_by_key(|name| name != INDEX_NAME);
    names.iter().try_for_each(|name| set.remove(name))?;
    set.sync()
}

/// Bytes of all files of a set, or of another directory, without those of directories below.
pub(super) fn set_bytes(set: &dyn Files) -> io::Result<u64> {
    bytes_of(set, |_| true)
}

/// Bytes of the segments of a set.
fn segment_bytes(set: &dyn Files) -> io::Result<u64> {
    bytes_of(set, |name| segment_number(name).is_some())
}

fn bytes_of(directory: &dyn Files, counts: impl Fn(&str) -> bool) -> io::Result<u64> {
    let names = directory.names()?;
    let files = names.iter().filter(|name| counts(name)).map(|name| {
        let entry = directory.entry(name)?;
        let file = entry.filter(|entry| entry.kind == EntryKind::File);
        Ok(file.map_or(0, |file| file.bytes))
    });
    files.sum()
}

/// Removes a set with all of its files. The index goes first: it lists pages of the segments. The set file goes last:
/// without it the other files have no meaning.
pub(super) fn remove_set(directory: &dyn Files, name: &str) -> io::Result<()> {
    let Some(set) = directory.directory(name)? else {
        return Ok(());
    };
    let mut names = set.names()?;
    names.retain(|name| is_ours(name));
    names.sort_by_key(|name| (name != INDEX_NAME, segment_number(name).is_none()));
    names.iter().try_for_each(|name| set.remove(name))?;
    set.sync()?;
    directory.remove_directory(name)?;
    directory.sync()
}
