//! A directory that other users can neither list nor change, held open.
//!
//! The directory is checked through the descriptor by which it is used. Whoever can write to one of the directories above
//! can replace the path, and nothing that is opened through the descriptor; so the directories above are not checked.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, Mode, OFlags, Stat};
use rustix::io::Errno;

use super::{OtherUsers, TransportError, own_uid};

/// Mode of a directory that its owner alone can use.
const PRIVATE: u32 = 0o700;
/// Mode of a directory whose sockets other users can reach. They cannot list it, nor make anything in it.
const PASSABLE: u32 = 0o711;

/// An open directory of this user that was checked. What is opened through it lies in it, whatever becomes of its path.
#[derive(Debug)]
pub struct OwnDirectory {
    path: PathBuf,
    fd: OwnedFd,
}

impl OwnDirectory {
    /// Opens a directory. Others may pass through it, where kvferry accepts connections of theirs.
    ///
    /// # Errors
    /// [`TransportError::Directory`] if another user could read it or make something in it.
    pub fn open(path: &Path) -> Result<Self, TransportError> {
        // Needs no right to read the directory, which other users do not have.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::NOTDIR | Errno::LOOP) => {
                let found =
                    fs::symlink_metadata(path).map_err(TransportError::io("cannot read", path))?;
                let remedy = "name a directory itself".to_owned();
                return Err(refuse(
                    path,
                    found.mode(),
                    "is a link or no directory",
                    remedy,
                ));
            }
            Err(errno) => return Err(TransportError::io("cannot open", path)(errno.into())),
        };
        let path = path.to_owned();
        let directory = Self { path, fd };
        directory.check()?;
        Ok(directory)
    }

    fn check(&self) -> Result<(), TransportError> {
        let (path, found) = (&self.path, self.stat()?);
        if found.st_uid != own_uid() {
            let remedy = match rustix::fs::accessat(
                &self.fd,
                ".",
                Access::WRITE_OK | Access::EXEC_OK,
                AtFlags::EACCESS,
            ) {
                // The root of a volume, or a directory such as /tmp.
                Ok(()) => self.below(),
                Err(_) => format!("use a directory that belongs to uid {}", own_uid()),
            };
            let problem = "belongs to another user";
            return Err(refuse(path, found.st_mode, problem, remedy));
        }
        if ![PRIVATE, PASSABLE].contains(&(found.st_mode & 0o777)) {
            let remedy = self.closing(found.st_mode);
            let problem = "must be open to its owner alone";
            return Err(refuse(path, found.st_mode, problem, remedy));
        }
        if rustix::fs::stat(self.through("")).is_err() {
            let problem = "is reached through /proc, which is missing";
            return Err(refuse(path, found.st_mode, problem, "mount it".to_owned()));
        }
        Ok(())
    }

    /// How other users are kept out of a directory of this user with this mode. Others use one with the sticky bit, such as
    /// /tmp, and may use one that holds something.
    fn closing(&self, mode: u32) -> String {
        let close = format!("run chmod 700 {}", self.path.display());
        let is_empty = fs::read_dir(&self.path).is_ok_and(|mut entries| entries.next().is_none());
        match (mode & Mode::SVTX.as_raw_mode() != 0, is_empty) {
            (true, _) => self.below(),
            (false, true) => close,
            (false, false) => format!("{close} if kvferry alone uses it, or {}", self.below()),
        }
    }

    fn below(&self) -> String {
        format!(
            "name a directory below it, such as {}, which kvferry makes itself",
            self.path.join("kvferry").display()
        )
    }

    fn stat(&self) -> Result<Stat, TransportError> {
        rustix::fs::fstat(&self.fd)
            .map_err(|errno| TransportError::io("cannot read", &self.path)(errno.into()))
    }

    /// The path by which it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A path to a file in it, which other processes cannot use and which is valid as long as this value.
    pub(super) fn through(&self, name: &str) -> PathBuf {
        format!("/proc/self/fd/{}/{name}", self.fd.as_raw_fd()).into()
    }

    /// Whether there is a file, or anything else, with this name in it.
    pub fn contains(&self, name: &str) -> bool {
        self.stat_of(name).is_ok()
    }

    /// What a file in it is. Does not follow a link.
    pub(super) fn stat_of(&self, name: &str) -> io::Result<Stat> {
        Ok(rustix::fs::statat(
            &self.fd,
            name,
            AtFlags::SYMLINK_NOFOLLOW,
        )?)
    }

    pub(super) fn set_mode_of(&self, name: &str, mode: u32) -> io::Result<()> {
        let mode = Mode::from_raw_mode(mode);
        Ok(rustix::fs::chmodat(&self.fd, name, mode, AtFlags::empty())?)
    }

    pub(super) fn remove(&self, name: &str) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.fd, name, AtFlags::empty())?)
    }

    /// Opens a file in it, which its owner alone can use if it is made. Does not follow a link.
    pub(super) fn open_file(&self, name: &str, flags: OFlags) -> io::Result<File> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        Ok(rustix::fs::openat(&self.fd, name, flags, mode)?.into())
    }

    /// Reads a file in it.
    ///
    /// # Errors
    /// Of the system, without the name.
    pub fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.open_file(name, OFlags::RDONLY)?
            .read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Replaces a file in it atomically and durably. Its owner alone can read it.
    ///
    /// # Errors
    /// Of the system, without the name. The file is then the earlier one, or the new one.
    pub fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let fresh = format!("{name}.new");
        // One that a process left which was killed may have another mode.
        match self.remove(&fresh) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
        let mut file = self.open_file(&fresh, flags)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        rustix::fs::renameat(&self.fd, &fresh, &self.fd, name)?;
        self.open_file(".", OFlags::RDONLY | OFlags::DIRECTORY)?
            .sync_all()
    }
}

/// Opens a directory with mode 0700, or 0711 if there are other users, which is made if it is missing. One with the other
/// of these two modes, of an earlier start, gets the right one.
///
/// # Errors
/// As [`OwnDirectory::open`].
pub fn prepare_for(path: &Path, users: &OtherUsers) -> Result<OwnDirectory, TransportError> {
    let mode = match users.is_empty() {
        true => PRIVATE,
        false => PASSABLE,
    };
    match fs::DirBuilder::new().mode(PRIVATE).create(path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let what = "cannot make a directory whose parent is missing";
            return Err(TransportError::io(what, path)(error));
        }
        Err(error) => return Err(TransportError::io("cannot make directory", path)(error)),
    }
    let directory = OwnDirectory::open(path)?;
    if directory.stat()?.st_mode & 0o777 != mode {
        directory
            .set_mode_of(".", mode)
            .map_err(TransportError::io("cannot set the mode of", path))?;
    }
    Ok(directory)
}

fn refuse(path: &Path, mode: u32, problem: &'static str, remedy: String) -> TransportError {
    TransportError::Directory {
        path: path.to_owned(),
        mode: mode & 0o7777,
        problem,
        remedy,
    }
}
