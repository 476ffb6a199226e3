//! Locks and sockets in the directory of a process.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use rustix::fs::{FileType, FlockOperation, OFlags, Stat};

use super::{Address, OtherUsers, OwnDirectory, TransportError, UsedBy, own_uid};

/// File name of the socket that clients connect to.
pub(super) const SOCKET_NAME: &str = "kvferry.sock";
/// File name of the socket that receives descriptors.
pub(super) const FD_SOCKET_NAME: &str = "fds.sock";
/// Pause between two looks whether a socket is still there.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Longest path of a Unix socket on Linux in bytes, without the terminating zero.
const SOCKET_PATH_BYTES_MAX: usize = 107;

/// Returns the path of `name` in the directory; fails if it is too long for a socket.
pub(super) fn socket_path(directory: &Path, name: &str) -> Result<PathBuf, TransportError> {
    let path = directory.join(name);
    match path.as_os_str().as_bytes().len() <= SOCKET_PATH_BYTES_MAX {
        true => Ok(path),
        false => Err(TransportError::PathTooLong(path)),
    }
}

/// A lock file, held with `flock`, that contains the holder's process id and PID namespace. Dropping it releases the lock;
/// the file stays.
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
    /// [`TransportError::InUse`] with the holder; another error if other users can change the directory, or
    /// if the file cannot be opened, locked or written.
    pub fn take(directory: &Path, name: &str) -> Result<Self, TransportError> {
        Self::take_in(&OwnDirectory::open(directory)?, name)
    }

    fn take_in(directory: &OwnDirectory, name: &str) -> Result<Self, TransportError> {
        let path = directory.path().join(name);
        let mut lock = directory
            .open_file(name, OFlags::RDWR | OFlags::CREATE)
            .map_err(TransportError::io("cannot open", &path))?;
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(TransportError::InUse {
                    address: Address::Directory(directory.path().to_owned()),
                    by: read_holder(&mut lock, pid_namespace().as_deref()),
                });
            }
            Err(errno) => return Err(TransportError::io("cannot lock", &path)(errno.into())),
        }
        // The number is for messages alone; a full disk has no room for it.
        if let Err(error) = write_holder(&mut lock) {
            tracing::debug!(%error, path = %path.display(), "the lock has no process id");
        }
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

fn identity(found: &Stat) -> FileIdentity {
    (found.st_dev, found.st_ino)
}

/// The exclusive right to listen on one socket of a directory. Dropping it removes the socket that was bound, if it is
/// still there, and then releases the lock.
#[derive(Debug)]
pub(super) struct Claim {
    directory: OwnDirectory,
    name: &'static str,
    socket: PathBuf,
    bound: Option<FileIdentity>,
    _lock: DirectoryLock,
}

impl Claim {
    /// Takes the lock; fails with the holder.
    pub(super) fn take(
        directory: OwnDirectory,
        name: &'static str,
    ) -> Result<Self, TransportError> {
        Ok(Self {
            socket: socket_path(directory.path(), name)?,
            _lock: DirectoryLock::take_in(&directory, &lock_name(name))?,
            directory,
            name,
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
        let (listener, identity) = self.bind_with(mode)?;
        self.bound = Some(identity);
        let set_up = || TransportError::io("cannot set up", &self.socket);
        listener.set_nonblocking(true).map_err(set_up())?;
        tokio::net::UnixListener::from_std(listener).map_err(set_up())
    }

    /// Logs when the socket that was bound is removed.
    pub(super) fn watched(self) -> Arc<Self> {
        let claim = Arc::new(self);
        tokio::spawn(watch(Arc::downgrade(&claim)));
        claim
    }

    /// False if the socket was removed, or another one has its path.
    fn is_bound(&self) -> bool {
        let found = fs::symlink_metadata(&self.socket).ok();
        found.map(|found| (found.dev(), found.ino())) == self.bound
    }

    /// Binds a socket with this mode, and returns it with what identifies its file. Replaces an existing socket: the lock
    /// is held, so no process listens on it.
    fn bind_with(&self, mode: u32) -> Result<(UnixListener, FileIdentity), TransportError> {
        let (directory, name, path) = (&self.directory, self.name, &self.socket);
        let refuse = |found: &Stat, problem, remedy: &str| TransportError::Directory {
            path: path.to_owned(),
            mode: found.st_mode & 0o7777,
            problem,
            remedy: remedy.to_owned(),
        };
        match directory.stat_of(name) {
            Ok(found) if is_socket(&found) => directory
                .remove(name)
                .map_err(TransportError::io("cannot remove the stale socket", path))?,
            Ok(found) => {
                let problem = "is no socket but lies where one is to be made";
                return Err(refuse(&found, problem, "remove it"));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(TransportError::io("cannot read", path)(error)),
        }
        // By the path, because tools show it for the socket. A directory that was exchanged for another one meanwhile has
        // the socket that is then missing in the checked one.
        let listener = UnixListener::bind(path).map_err(TransportError::io("cannot bind", path))?;
        directory
            .set_mode_of(name, mode)
            .map_err(TransportError::io("cannot set the mode of", path))?;
        let found = directory.stat_of(name);
        let found = found.map_err(TransportError::io("cannot read", path))?;
        if !is_socket(&found) || found.st_mode & 0o777 != mode || found.st_uid != own_uid() {
            let problem = "is not the socket that was just made";
            return Err(refuse(
                &found,
                problem,
                "use a directory that nothing else writes to",
            ));
        }
        Ok((listener, identity(&found)))
    }
}

/// Logs that the socket of a listener was removed, until the listener is dropped. Its open connections go on, so there is
/// no other sign.
async fn watch(claim: Weak<Claim>) {
    let mut known = false;
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let Some(claim) = claim.upgrade() else { return };
        let lost = !claim.is_bound();
        if lost && !known {
            let path = claim.socket.display();
            tracing::error!(%path, "the socket was removed: no process can connect; start kvferry again");
        }
        known = lost;
    }
}

fn is_socket(found: &Stat) -> bool {
    FileType::from_raw_mode(found.st_mode) == FileType::Socket
}

impl Drop for Claim {
    fn drop(&mut self) {
        let found = self.directory.stat_of(self.name);
        if found.ok().as_ref().map(identity) != self.bound || self.bound.is_none() {
            tracing::debug!(path = %self.socket.display(), "the socket is not there to remove");
            return;
        }
        if let Err(error) = self.directory.remove(self.name) {
            tracing::debug!(path = %self.socket.display(), %error, "cannot remove the socket");
        }
    }
}

/// Reads the holder of a lock, for a process of the PID namespace `own`. Unknown before the holder has written it. The lock
/// of an earlier version has no namespace, and is taken for one of this namespace.
fn read_holder(lock: &mut File, own: Option<&str>) -> UsedBy {
    let mut text = String::new();
    if lock.take(64).read_to_string(&mut text).is_err() {
        return UsedBy::Unknown;
    }
    let mut lines = text.lines();
    let pid = lines.next().and_then(|line| line.parse().ok());
    match (pid, lines.next(), own) {
        (Some(_), Some(namespace), Some(own)) if namespace != own => UsedBy::OtherNamespace,
        (Some(pid), ..) => UsedBy::Process(pid),
        (None, ..) => UsedBy::Unknown,
    }
}

fn write_holder(lock: &mut File) -> io::Result<()> {
    lock.set_len(0)?;
    let namespace = pid_namespace().unwrap_or_default();
    write!(lock, "{}\n{namespace}", std::process::id())
}

/// Names the PID namespace of this process, such as `pid:[4026531836]`; `None` without /proc.
fn pid_namespace() -> Option<String> {
    let link = fs::read_link("/proc/self/ns/pid").ok()?;
    link.into_os_string().into_string().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_of_a_lock_is_named_where_its_number_means_something() {
        for (text, expected) in [
            ("7\npid:[1]", UsedBy::Process(7)),
            ("7\npid:[2]", UsedBy::OtherNamespace),
            ("7\n", UsedBy::Process(7)),
            ("", UsedBy::Unknown),
        ] {
            let mut file = tempfile::tempfile().expect("a file");
            file.write_all(text.as_bytes()).expect("written");
            std::io::Seek::rewind(&mut file).expect("a file");
            assert_eq!(read_holder(&mut file, Some("pid:[1]")), expected, "{text}");
        }
    }
}
