//! What `up` requests of the operating system. Each call goes through one trait, so that a test can let any of them fail.

use std::ffi::OsString;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::{ExitStatus, Stdio};

use command_fds::{CommandFdExt as _, FdMapping};
use tokio::io::{AsyncRead, AsyncWriteExt as _};
use tokio::process::{Child, ChildStdin, ChildStdout};

use crate::cli::shutdown::END_IN_ORDER;
use crate::cli::{program, restarts};
use kvferry_memory::{Depot, DepotError};
use kvferry_transport::{DirectoryLock, TransportError};

/// Number of the file descriptor of a worker's depot.
pub(super) const DEPOT_FD: i32 = 3;

/// A child to start. It ends when its standard input does.
pub(super) struct Launch {
    pub(super) arguments: Vec<OsString>,
    /// Its standard output; `None` for a pipe, on which it reports.
    pub(super) output: Option<OwnedFd>,
    /// Memory that it gets as descriptor [`DEPOT_FD`].
    pub(super) depot: Option<OwnedFd>,
}

/// The calls of `up`.
pub(super) trait System {
    /// A child that was started. Dropping it kills it.
    type Child;
    /// The reports of a child.
    type Reports: AsyncRead + Unpin + Send + 'static;

    /// Locks a file in a directory. See [`DirectoryLock::take`].
    fn lock(&self, directory: &Path, name: &str) -> Result<DirectoryLock, TransportError>;

    /// Creates the memory of a shard.
    fn create_depot(&self, bytes: u64) -> Result<Depot, DepotError>;

    /// Opens a socket that listens at an address.
    fn listen(&self, address: SocketAddr) -> io::Result<TcpListener>;

    /// Duplicates a descriptor for a child.
    fn clone_fd(&self, fd: BorrowedFd<'_>) -> io::Result<OwnedFd>;

    /// Replaces a small file.
    fn replace(&self, path: &Path, text: &str) -> io::Result<()>;

    /// Starts a child.
    fn spawn(&self, launch: Launch) -> io::Result<(Self::Child, Option<Self::Reports>)>;

    /// The process id of a child that has not ended.
    fn pid(&self, child: &Self::Child) -> Option<u32>;

    /// Waits for the end of a child. May be dropped and called again.
    async fn wait(&self, child: &mut Self::Child) -> io::Result<ExitStatus>;

    /// Requests the end of a child in order.
    async fn end(&self, child: &mut Self::Child) -> io::Result<()>;

    /// Kills a child. Its end is still to be waited for.
    fn kill(&self, child: &mut Self::Child) -> io::Result<()>;
}

/// The operating system.
pub(super) struct Linux;

/// A child, and its standard input, which is closed to end it. Waiting for a [`Child`] would close it.
pub(super) struct LinuxChild {
    process: Child,
    input: Option<ChildStdin>,
}

impl System for Linux {
    type Child = LinuxChild;
    type Reports = ChildStdout;

    fn lock(&self, directory: &Path, name: &str) -> Result<DirectoryLock, TransportError> {
        DirectoryLock::take(directory, name)
    }

    fn create_depot(&self, bytes: u64) -> Result<Depot, DepotError> {
        Depot::create(bytes)
    }

    fn listen(&self, address: SocketAddr) -> io::Result<TcpListener> {
        TcpListener::bind(address)
    }

    fn clone_fd(&self, fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        fd.try_clone_to_owned()
    }

    fn replace(&self, path: &Path, text: &str) -> io::Result<()> {
        restarts::replace(path, text)
    }

    fn spawn(&self, launch: Launch) -> io::Result<(LinuxChild, Option<ChildStdout>)> {
        let mut command = program::command();
        command
            .args(launch.arguments)
            .stdin(Stdio::piped())
            .stdout(launch.output.map_or_else(Stdio::piped, Stdio::from))
            .kill_on_drop(true);
        if let Some(parent_fd) = launch.depot {
            let child_fd = DEPOT_FD;
            let mappings = vec![FdMapping {
                parent_fd,
                child_fd,
            }];
            command.fd_mappings(mappings).map_err(io::Error::other)?;
        }
        let mut process = command.spawn()?;
        let (input, reports) = (process.stdin.take(), process.stdout.take());
        Ok((LinuxChild { process, input }, reports))
    }

    fn pid(&self, child: &LinuxChild) -> Option<u32> {
        child.process.id()
    }

    async fn wait(&self, child: &mut LinuxChild) -> io::Result<ExitStatus> {
        child.process.wait().await
    }

    async fn end(&self, child: &mut LinuxChild) -> io::Result<()> {
        match child.input.take() {
            Some(mut input) => input.write_all(&[END_IN_ORDER]).await,
            None => Ok(()),
        }
    }

    fn kill(&self, child: &mut LinuxChild) -> io::Result<()> {
        child.process.start_kill()
    }
}
