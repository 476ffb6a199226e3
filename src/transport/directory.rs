//! The directory of a process. Its mode controls access to the sockets in it, so both sides check the mode.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{
    DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _,
    PermissionsExt as _,
};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags};

use super::{Address, OtherUsers, TransportError, own_uid};

/// File name of the socket that clients connect to.
pub(super) const SOCKET_NAME: &str = "kvferry.sock";
/// File name of the socket that receives descriptors.
pub(super) const FD_SOCKET_NAME: &str = "fds.sock";
/// Longest path of a Unix socket on Linux in bytes, without the terminating zero.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// Mode of a directory that its owner alone can use.
const PRIVATE: u32 = 0o700;
/// Mode of a directory whose sockets other users can reach. They cannot list it, nor make anything in it.
const PASSABLE: u32 = 0o711;

/// Creates the directory with mode 0700 if it is missing, then checks it.
pub fn prepare(path: &Path) -> Result<(), TransportError> {
    prepare_for(path, &OtherUsers::default())
}

/// As [`prepare`], with mode 0711 if there are other users. A directory with the other one of the two modes, of an
/// earlier start, gets the right one.
pub fn prepare_for(path: &Path, users: &OtherUsers) -> Result<(), TransportError> {
    let (mode, other) = match users.is_empty() {
        true => (PRIVATE, PASSABLE),
        false => (PASSABLE, PRIVATE),
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
    check_modes(path, &[mode, other])?;
    let failed =
        |errno: rustix::io::Errno| TransportError::io("cannot set the mode of", path)(errno.into());
    let found = open(path)?;
    if rustix::fs::fstat(&found).map_err(failed)?.st_mode & 0o777 != mode {
        rustix::fs::fchmod(&found, Mode::from_raw_mode(mode)).map_err(failed)?;
    }
    check_modes(path, &[mode])
}

/// Refuses a directory that another user could read, write or replace. Others may pass through it, where kvferry accepts
/// connections of theirs.
pub fn check(path: &Path) -> Result<(), TransportError> {
    check_modes(path, &[PRIVATE, PASSABLE])
}

fn open(path: &Path) -> Result<OwnedFd, TransportError> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
    rustix::fs::open(path, flags, Mode::empty())
        .map_err(|errno| TransportError::io("cannot open", path)(errno.into()))
}

fn check_modes(path: &Path, modes: &[u32]) -> Result<(), TransportError> {
    let refuse = |path: &Path, mode: u32, problem, remedy| TransportError::Directory {
        path: path.to_owned(),
        mode: mode & 0o7777,
        problem,
        remedy,
    };
    let link = fs::symlink_metadata(path).map_err(TransportError::io("cannot read", path))?;
    if !link.is_dir() {
        let remedy = "name a directory itself".to_owned();
        return Err(refuse(
            path,
            link.mode(),
            "is a link or no directory",
            remedy,
        ));
    }
    let found = rustix::fs::fstat(&open(path)?)
        .map_err(|errno| TransportError::io("cannot read", path)(errno.into()))?;
    if found.st_uid != own_uid() {
        let remedy = format!("use a directory that belongs to uid {}", own_uid());
        return Err(refuse(
            path,
            found.st_mode,
            "belongs to another user",
            remedy,
        ));
    }
    if !modes.contains(&(found.st_mode & 0o777)) {
        let remedy = format!("run chmod 700 {}", path.display());
        return Err(refuse(
            path,
            found.st_mode,
            "must be open to its owner alone",
            remedy,
        ));
    }
    check_parent(path, refuse)
}

fn check_parent(
    path: &Path,
    refuse: impl Fn(&Path, u32, &'static str, String) -> TransportError,
) -> Result<(), TransportError> {
    let absolute = path
        .canonicalize()
        .map_err(TransportError::io("cannot resolve", path))?;
    let Some(parent) = absolute.parent() else {
        return Ok(());
    };
    let found = fs::metadata(parent).map_err(TransportError::io("cannot read", parent))?;
    let (mode, owner) = (found.mode(), found.uid());
    if owner != 0 && owner != own_uid() {
        let remedy = "use a directory under a parent of root or of this user".to_owned();
        return Err(refuse(
            parent,
            mode,
            "belongs to another user, who could swap what lies in it",
            remedy,
        ));
    }
    if mode & 0o022 != 0 && mode & 0o1000 == 0 {
        let remedy = format!("run chmod go-w {}", parent.display());
        return Err(refuse(
            parent,
            mode,
            "can be written by others, who could swap what lies in it",
            remedy,
        ));
    }
    Ok(())
}

/// Returns the path of `name` in the directory; fails if it is too long for a socket.
pub(super) fn socket_path(directory: &Path, name: &str) -> Result<PathBuf, TransportError> {
    let path = directory.join(name);
    match path.as_os_str().as_bytes().len() <= SOCKET_PATH_BYTES_MAX {
        true => Ok(path),
        false => Err(TransportError::PathTooLong(path)),
    }
}

/// A lock file, held with `flock`, that contains the holder's process id. Dropping it releases the lock; the file
/// stays.
#[derive(Debug)]
pub struct DirectoryLock(#[expect(dead_code, reason = "held open, which is the lock")] File);

impl DirectoryLock {
    /// Takes the lock that the listener of a directory holds, so that no process listens there meanwhile.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn of_listener(directory: &Path) -> Result<Self, TransportError> {
        Self::take(directory, &lock_name(SOCKET_NAME))
    }

    /// Takes the lock on the file `name` in a directory, without waiting.
    ///
    /// # Errors
    /// [`TransportError::InUse`] with the holder's process id; another error if the file cannot be opened, locked or
    /// written.
    pub fn take(directory: &Path, name: &str) -> Result<Self, TransportError> {
        let path = directory.join(name);
        let mut lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
            .open(&path)
            .map_err(TransportError::io("cannot open", &path))?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(TransportError::InUse {
                    address: Address::Directory(directory.to_owned()),
                    pid: read_pid(&mut lock),
                });
            }
            Err(errno) => return Err(TransportError::io("cannot lock", &path)(errno.into())),
        }
        write_pid(&mut lock).map_err(TransportError::io("cannot write", &path))?;
        Ok(Self(lock))
    }
}

/// The name of the lock beside a socket.
fn lock_name(socket: &str) -> String {
    let stem = socket.strip_suffix(".sock").unwrap_or(socket);
    format!("{stem}.lock")
}

/// Device and number of a file.
type FileIdentity = (u64, u64);

fn identity(found: &fs::Metadata) -> FileIdentity {
    (found.dev(), found.ino())
}

/// The exclusive right to listen on one socket of a directory. Dropping it removes the socket that was bound, if it is
/// still there, and then releases the lock.
#[derive(Debug)]
pub(super) struct Claim {
    socket: PathBuf,
    bound: Option<FileIdentity>,
    _lock: DirectoryLock,
}

impl Claim {
    /// Takes the lock; fails with the holder's process id.
    pub(super) fn take(directory: &Path, name: &str) -> Result<Self, TransportError> {
        let socket = socket_path(directory, name)?;
        Ok(Self {
            _lock: DirectoryLock::take(directory, &lock_name(name))?,
            socket,
            bound: None,
        })
    }

    /// Binds the socket for tasks of the runtime; call it once. Every user can connect if there are other users: the
    /// accepting side compares them.
    pub(super) fn bind(
        &mut self,
        users: &OtherUsers,
    ) -> Result<tokio::net::UnixListener, TransportError> {
        let mode = if users.is_empty() { 0o600 } else { 0o666 };
        let (listener, identity) = bind(&self.socket, mode)?;
        self.bound = Some(identity);
        let set_up = || TransportError::io("cannot set up", &self.socket);
        listener.set_nonblocking(true).map_err(set_up())?;
        tokio::net::UnixListener::from_std(listener).map_err(set_up())
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let found = fs::symlink_metadata(&self.socket);
        if found.ok().as_ref().map(identity) != self.bound || self.bound.is_none() {
            tracing::debug!(path = %self.socket.display(), "the socket is not there to remove");
            return;
        }
        if let Err(error) = fs::remove_file(&self.socket) {
            tracing::debug!(path = %self.socket.display(), %error, "cannot remove the socket");
        }
    }
}

/// Binds a socket with this mode in a checked directory, and returns it with what identifies its file. Replaces an
/// existing socket: the caller holds the lock, so no process listens on it.
fn bind(path: &Path, mode: u32) -> Result<(UnixListener, FileIdentity), TransportError> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => {
            fs::remove_file(path)
                .map_err(TransportError::io("cannot remove the stale socket", path))?;
        }
        Ok(found) => {
            return Err(TransportError::Directory {
                path: path.to_owned(),
                mode: found.mode() & 0o7777,
                problem: "is no socket but lies where one is to be made",
                remedy: "remove it".to_owned(),
            });
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(TransportError::io("cannot read", path)(error)),
    }
    let listener = UnixListener::bind(path).map_err(TransportError::io("cannot bind", path))?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
        .map_err(TransportError::io("cannot set the mode of", path))?;
    let found = fs::symlink_metadata(path).map_err(TransportError::io("cannot read", path))?;
    if !found.file_type().is_socket() || found.mode() & 0o777 != mode || found.uid() != own_uid() {
        return Err(TransportError::Directory {
            path: path.to_owned(),
            mode: found.mode() & 0o7777,
            problem: "is not the socket that was just made",
            remedy: "use a directory that nothing else writes to".to_owned(),
        });
    }
    Ok((listener, identity(&found)))
}

/// Reads the process id of the lock's holder; `None` before the holder has written it.
fn read_pid(lock: &mut File) -> Option<i32> {
    let mut text = String::new();
    lock.take(16).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

fn write_pid(lock: &mut File) -> io::Result<()> {
    lock.set_len(0)?;
    writeln!(lock, "{}", std::process::id())
}
