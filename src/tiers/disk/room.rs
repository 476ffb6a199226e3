//! The cap of a disk tier: what its files use, and the removal of sets of other layouts for the set that is open.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use super::files::Files;
use super::format::INDEX_NAME;
use super::set::{is_ours, segment_number};

/// The files of one disk.
#[derive(Debug)]
struct DiskRoom {
    /// The shard's directory, then those of shards that no worker has, because their number was larger.
    directories: Vec<Arc<dyn Files>>,
    /// Bytes of the segments of the open set.
    open_bytes: u64,
    /// The sets that are not open, by the number of their directory and name, with the bytes of their files.
    closed: BTreeMap<(usize, String), u64>,
}

impl DiskRoom {
    /// Counts the files of all sets. The one of this name in the shard's directory is the open one.
    fn count(&mut self, open: Option<&str>) -> io::Result<()> {
        self.closed.clear();
        self.open_bytes = 0;
        for (number, directory) in self.directories.iter().enumerate() {
            for name in directory.names()? {
                let Some(set) = directory.directory_of_set(&name)? else {
                    continue;
                };
                match number == 0 && Some(name.as_str()) == open {
                    true => self.open_bytes = segment_bytes(set.as_ref())?,
                    false => {
                        let bytes = set_bytes(set.as_ref())?;
                        self.closed.insert((number, name), bytes);
                    }
                }
            }
        }
        Ok(())
    }

    /// Removes a set that is not open and has not the name `kept`, of a shard that no worker has first. Returns false if none
    /// is left.
    fn remove_closed(&mut self, kept: Option<&str>, why: &str) -> io::Result<bool> {
        let mut closed = self.closed.iter().rev();
        let found = closed.find(|((number, name), _)| *number > 0 || Some(name.as_str()) != kept);
        let Some((key, bytes)) = found.map(|(key, bytes)| (key.clone(), *bytes)) else {
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

    /// Counts a set as the open one, and the one before as closed. `reserved`: bytes on each disk for files other than
    /// segments. Removes closed sets where the files use more than the share, as after a change of the cap.
    pub(super) fn open(&self, name: Option<&str>, reserved: u64) -> io::Result<()> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.reserved = reserved;
        state
            .disks
            .iter_mut()
            .try_for_each(|disk| disk.count(name))?;
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
            let closed: u64 = disk.closed.values().sum();
            if disk.open_bytes + closed + bytes <= limit {
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

    /// Bytes of all sets on each disk, open and closed.
    pub(super) fn used_bytes(&self) -> Vec<u64> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let disks = state.disks.iter();
        let used = disks.map(|disk| disk.open_bytes + disk.closed.values().sum::<u64>());
        used.collect()
    }
}

/// Bytes of all files of a set.
pub(super) fn set_bytes(set: &dyn Files) -> io::Result<u64> {
    let names = set.names()?;
    let files = names.iter().map(|name| {
        let file = set.open(name)?;
        file.map_or(Ok(0), |file| file.bytes())
    });
    files.sum()
}

/// Bytes of the segments of a set.
fn segment_bytes(set: &dyn Files) -> io::Result<u64> {
    let names = set.names()?;
    let segments = names.iter().filter(|name| segment_number(name).is_some());
    let bytes = segments.map(|name| {
        let file = set.open(name)?;
        file.map_or(Ok(0), |file| file.bytes())
    });
    bytes.sum()
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
