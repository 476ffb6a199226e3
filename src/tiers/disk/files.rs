//! The files of a disk tier: what the tier asks of a file system, and the implementation with real files.
//!
//! Every file is read and written in whole units of [`UNIT_BYTES`](super::buffer::UNIT_BYTES), past the page cache where the file system permits
//! it. A directory is opened once, and everything in it relative to that handle, without following links: a directory
//! that is renamed or replaced meanwhile is still the one whose lock is held.

use std::fs::File as StdFile;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, Dir, FallocateFlags, FileType, FlockOperation, Mode, OFlags};
use rustix::io::{Errno, ReadWriteFlags};

/// Bytes of zeros that one call writes where a file system cannot preallocate.
const ZEROS_BYTES: usize = 4 << 20;
const FILE_MODE: Mode = Mode::from_raw_mode(0o600);
const DIR_MODE: Mode = Mode::from_raw_mode(0o700);

/// A directory.
pub trait Files: Send + Sync + std::fmt::Debug {
    /// Opens a file for reading and writing, or for reading alone where the disk takes no writes; `None` if there is none
    /// of this name.
    fn open(&self, name: &str) -> io::Result<Option<Arc<dyn DiskFile>>>;
    /// Creates an empty file. Fails if there is one of this name.
    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>>;
    /// Opens a directory below; `None` if there is none of this name.
    fn directory(&self, name: &str) -> io::Result<Option<Arc<dyn Files>>>;
    /// Creates a directory below, with access for its owner alone.
    fn create_directory(&self, name: &str) -> io::Result<Arc<dyn Files>>;
    /// Names of all files and directories, in order.
    fn names(&self) -> io::Result<Vec<String>>;
    /// What a name stands for, `.` for the directory itself; `None` if nothing has it.
    fn entry(&self, name: &str) -> io::Result<Option<Entry>>;
    /// Gives a file or directory, `.` for this one, the permissions of its kind.
    fn set_mode(&self, name: &str, kind: EntryKind) -> io::Result<()>;
    /// Gives a file another name. Replaces the file that had it, at once for every observer.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Removes a file. A file that is still open goes on to exist without a name.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Removes an empty directory.
    fn remove_directory(&self, name: &str) -> io::Result<()>;
    /// Makes creations, renamings and removals durable.
    fn sync(&self) -> io::Result<()>;
    /// Identity of the directory among all that exist.
    fn id(&self) -> io::Result<(u64, u64)>;
    /// Takes the directory's lock, until the last handle of it is closed. Returns false while another process has it.
    fn try_lock(&self) -> io::Result<bool>;
}

/// What a name in a directory stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Identity of the file or directory among all that exist.
    pub id: (u64, u64),
    /// A regular file, a directory, or something else.
    pub kind: EntryKind,
    /// Permissions: the last 9 bits of the mode.
    pub mode: u32,
    /// Length of a file.
    pub bytes: u64,
    /// When a directory gained or lost a name last: seconds since 1970, or another number that ascends.
    pub changed: i64,
}

/// Kind of a name in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A link, a socket, a device.
    Other,
}

impl EntryKind {
    /// The permissions that a file or directory of a tier has.
    pub fn mode(self) -> u32 {
        match self {
            Self::Directory => DIR_MODE.bits(),
            Self::File | Self::Other => FILE_MODE.bits(),
        }
    }
}

/// A file of a disk tier.
pub trait DiskFile: Send + Sync + std::fmt::Debug {
    /// Bytes of the file.
    fn bytes(&self) -> io::Result<u64>;
    /// Fills `out` from an offset on. Fails with [`io::ErrorKind::UnexpectedEof`] behind the file's end.
    fn read(&self, out: &mut [u8], at: u64) -> io::Result<()>;
    /// Writes all of `bytes` at an offset.
    fn write(&self, bytes: &[u8], at: u64) -> io::Result<()>;
    /// Writes all of `bytes` at an offset. They are durable when the call returns.
    fn write_synced(&self, bytes: &[u8], at: u64) -> io::Result<()>;
    /// Makes everything durable that was written, and the file's length.
    fn sync(&self) -> io::Result<()>;
    /// Grows the file to this length, with room on the disk for all of it.
    fn allocate(&self, bytes: u64) -> io::Result<()>;
    /// Tells the disk that a range holds nothing of value. Its contents are undefined until they are written again.
    fn discard(&self, at: u64, bytes: u64) -> io::Result<()>;
    /// Takes the file's lock. Returns false while another process has it, or while its I/O on this file is in flight.
    fn try_lock(&self) -> io::Result<bool>;
    /// Identity of the file among all that exist: that of the entry by which it was opened.
    fn id(&self) -> io::Result<(u64, u64)>;
    /// The descriptor, for interfaces that need one; `None` for files that have none.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;
}

/// A directory of a file system.
#[derive(Debug)]
pub struct RealDirectory(OwnedFd);

/// A file of a file system.
#[derive(Debug)]
pub struct RealFile(StdFile);

/// The error of a directory that cannot be created or opened, with the remedy where there is a usual one.
fn with_remedy(error: Errno) -> io::Error {
    let user = rustix::process::getuid().as_raw();
    let text = match error {
        Errno::NOENT => "its parent directory does not exist: create that".to_owned(),
        Errno::NOTDIR => "it, or a parent, is no directory: name another path".to_owned(),
        Errno::ACCESS | Errno::PERM => {
            format!("user {user} may not create it there: create it, with mode 700, for that user")
        }
        other => return other.into(),
    };
    io::Error::new(io::Error::from(error).kind(), text)
}

impl RealDirectory {
    /// Opens a directory, and creates it if its parent exists.
    ///
    /// # Errors
    ///
    /// The error of the system call; [`io::ErrorKind::PermissionDenied`] for a directory that belongs to another user, or
    /// that others may read or write.
    pub fn open(path: &Path) -> io::Result<Self> {
        match rustix::fs::mkdir(path, DIR_MODE) {
            Ok(()) | Err(Errno::EXIST | Errno::ROFS) => {}
            Err(error) => return Err(with_remedy(error)),
        }
        let directory = Self::open_existing(path)?;
        let stat = rustix::fs::fstat(&directory.0)?;
        if stat.st_mode & 0o077 != 0 {
            let mode = stat.st_mode & 0o777;
            let text = format!("other users may enter the directory (mode {mode:o}): chmod 700 it");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
        Ok(directory)
    }

    /// Opens a directory, whatever its permissions.
    ///
    /// # Errors
    ///
    /// The error of the system call; [`io::ErrorKind::PermissionDenied`] for a directory that belongs to another user.
    pub fn open_existing(path: &Path) -> io::Result<Self> {
        let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(path, flags, Mode::empty());
        let fd = opened.map_err(|error| match error {
            Errno::NOTDIR => with_remedy(error),
            other => other.into(),
        })?;
        let stat = rustix::fs::fstat(&fd)?;
        let ours = rustix::process::getuid().as_raw();
        if stat.st_uid != ours {
            let owner = stat.st_uid;
            let or_give = match ours {
                // The files below it would stay with their owner.
                0 => String::new(),
                _ => format!(", or give the directory and all below it to user {ours}"),
            };
            let text = format!(
                "the directory belongs to user {owner}, and this process runs as user {ours}: run it as user {owner}{or_give}"
            );
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
        Ok(Self(fd))
    }

    fn open_file(&self, name: &str, access: OFlags) -> io::Result<RealFile> {
        let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK | access;
        let open = |flags| rustix::fs::openat(&self.0, name, flags, FILE_MODE);
        // Some file systems, and tmpfs before Linux 6.6, refuse direct I/O.
        let fd = match open(flags | OFlags::DIRECT) {
            Err(Errno::INVAL) => open(flags - OFlags::EXCL)?,
            opened => opened?,
        };
        let stat = rustix::fs::fstat(&fd)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(io::Error::other(format!("{name} is no regular file")));
        }
        Ok(RealFile(StdFile::from(fd)))
    }
}

impl Files for RealDirectory {
    fn open(&self, name: &str) -> io::Result<Option<Arc<dyn DiskFile>>> {
        let opened = match self.open_file(name, OFlags::RDWR) {
            Err(error) if super::is_read_only(&error) => self.open_file(name, OFlags::RDONLY),
            opened => opened,
        };
        match opened {
            Ok(file) => Ok(Some(Arc::new(file))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        let file = self.open_file(name, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL)?;
        Ok(Arc::new(file))
    }

    fn directory(&self, name: &str) -> io::Result<Option<Arc<dyn Files>>> {
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match rustix::fs::openat(&self.0, name, flags, Mode::empty()) {
            Ok(fd) => Ok(Some(Arc::new(Self(fd)))),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn create_directory(&self, name: &str) -> io::Result<Arc<dyn Files>> {
        rustix::fs::mkdirat(&self.0, name, DIR_MODE)?;
        let gone = || io::Error::other(format!("{name} was removed after its creation"));
        self.directory(name)?.ok_or_else(gone)
    }

    fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.0)? {
            let entry = entry?;
            if let Ok(name) = entry.file_name().to_str()
                && !matches!(name, "." | "..")
            {
                names.push(name.to_owned());
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    fn entry(&self, name: &str) -> io::Result<Option<Entry>> {
        let stat = match rustix::fs::statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(None),
            stat => stat?,
        };
        let kind = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => EntryKind::File,
            FileType::Directory => EntryKind::Directory,
            _ => EntryKind::Other,
        };
        Ok(Some(Entry {
            id: (stat.st_dev, stat.st_ino),
            kind,
            mode: stat.st_mode & 0o777,
            bytes: u64::try_from(stat.st_size).unwrap_or(0),
            changed: stat.st_mtime,
        }))
    }

    fn set_mode(&self, name: &str, kind: EntryKind) -> io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let fd = rustix::fs::openat(&self.0, name, flags, Mode::empty())?;
        Ok(rustix::fs::fchmod(&fd, Mode::from_raw_mode(kind.mode()))?)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(rustix::fs::renameat(&self.0, from, &self.0, to)?)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.0, name, AtFlags::empty())?)
    }

    fn remove_directory(&self, name: &str) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.0, name, AtFlags::REMOVEDIR)?)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fsync(&self.0)?)
    }

    fn id(&self) -> io::Result<(u64, u64)> {
        let stat = rustix::fs::fstat(&self.0)?;
        Ok((stat.st_dev, stat.st_ino))
    }

    fn try_lock(&self) -> io::Result<bool> {
        try_lock(&self.0)
    }
}

fn try_lock(fd: impl AsFd) -> io::Result<bool> {
    match rustix::fs::flock(fd, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(Errno::AGAIN) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

impl DiskFile for RealFile {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn read(&self, out: &mut [u8], at: u64) -> io::Result<()> {
        self.0.read_exact_at(out, at)
    }

    fn write(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, at)
    }

    fn write_synced(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let parts = [io::IoSlice::new(bytes)];
        match rustix::io::pwritev2(&self.0, &parts, at, ReadWriteFlags::DSYNC) {
            Ok(written) if written == bytes.len() => Ok(()),
            Ok(_) | Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INTR) => {
                self.write(bytes, at)?;
                self.sync()
            }
            Err(error) => Err(error.into()),
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync_data()
    }

    fn allocate(&self, bytes: u64) -> io::Result<()> {
        let len = self.bytes()?;
        if len >= bytes {
            return Ok(());
        }
        match rustix::fs::fallocate(&self.0, FallocateFlags::empty(), len, bytes - len) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => self.fill(len, bytes),
            done => Ok(done?),
        }
    }

    fn discard(&self, at: u64, bytes: u64) -> io::Result<()> {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.0, hole, at, bytes)?;
        // The room stays reserved, so that the next write into the range finds it.
        match rustix::fs::fallocate(&self.0, FallocateFlags::KEEP_SIZE, at, bytes) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            done => Ok(done?),
        }
    }

    fn try_lock(&self) -> io::Result<bool> {
        try_lock(&self.0)
    }

    fn id(&self) -> io::Result<(u64, u64)> {
        let stat = rustix::fs::fstat(&self.0)?;
        Ok((stat.st_dev, stat.st_ino))
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }
}

impl RealFile {
    /// Writes zeros from `from` to `to`: room that no preallocation gives.
    fn fill(&self, from: u64, to: u64) -> io::Result<()> {
        let zeros = super::buffer::AlignedBuffer::new(ZEROS_BYTES);
        let mut at = from;
        while at < to {
            let bytes = (to - at).min(ZEROS_BYTES as u64);
            self.write(&zeros.bytes()[..bytes as usize], at)?;
            at += bytes;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_is_told_to_run_as_the_owner_of_a_directory() {
        if !rustix::process::geteuid().is_root() {
            return crate::skipped::skipped(
                "it needs root, which gives a directory to another user",
            );
        }
        let folder = tempfile::tempdir().expect("a directory");
        std::os::unix::fs::chown(folder.path(), Some(12_345), None).expect("given");
        let refused = RealDirectory::open_existing(folder.path());
        let text = refused.expect_err("not of this user").to_string();
        assert!(text.ends_with("run it as user 12345"), "{text}");
    }
}
