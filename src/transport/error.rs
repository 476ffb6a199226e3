//! What can go wrong, typed for those who must act on it.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Address, Violation};

/// Why a listener or a connection could not be made.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The address belongs to another transport.
    #[error("{0} is not an address of this transport")]
    Address(Address),
    /// The limits contradict each other; says which.
    #[error("limits: {0}")]
    Limits(&'static str),
    /// Others could reach into the directory.
    #[error("{} (mode {mode:04o}) {problem}; {remedy}", .path.display())]
    Directory {
        /// The directory, or its parent.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
        /// What is wrong with it.
        problem: &'static str,
        /// What to do about it.
        remedy: String,
    },
    /// A socket's path does not fit the kernel's limit of 107 bytes.
    #[error("{} is longer than the 107 bytes of a socket's path; choose a shorter directory", .0.display())]
    PathTooLong(PathBuf),
    /// Somebody listens there already.
    #[error("{address} is in use{}", .pid.map(|pid| format!(" by process {pid}")).unwrap_or_default())]
    InUse {
        /// Where.
        address: Address,
        /// Who, where known.
        pid: Option<i32>,
    },
    /// Nobody listened there by the deadline.
    #[error("nobody listens at {address} (waited {waited:?})")]
    Unreachable {
        /// Where.
        address: Address,
        /// How long was waited.
        waited: Duration,
    },
    /// The listener closed the connection before the handshake ended: too many connections, another user, or no ZMTP.
    #[error("{address} refused the connection: {detail}")]
    Refused {
        /// Where.
        address: Address,
        /// What was seen.
        detail: String,
    },
    /// A system call failed.
    #[error("{what} {}: {source}", .path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The ZMQ socket could not be set up.
    #[error("ZMQ socket: {0}")]
    Zmq(String),
}

impl TransportError {
    pub(super) fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Io { what, path, source }
    }
}

/// Why a frame was not queued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The peer is not, or no longer, connected.
    #[error("the peer is gone")]
    Gone,
    /// A part exceeds the limits; nothing was sent, the connection stays.
    #[error("the {part} part has {bytes} bytes, the limit is {limit}")]
    TooLong {
        /// `header` or `body`.
        part: &'static str,
        /// Its length.
        bytes: usize,
        /// Its limit.
        limit: usize,
    },
    /// Too much waits for the peer already. A listener closes such a peer; a connection stays, and the frame is not sent.
    #[error("too much waits for the peer already")]
    Slow,
}

/// Why a listener's peer was closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CloseReason {
    /// The client closed it or died.
    #[error("closed by the client")]
    ByPeer,
    /// [`FrameSender::disconnect`](super::FrameSender::disconnect).
    #[error("closed by this side")]
    ByUs,
    /// It did not take what was sent to it.
    #[error("the client reads too slowly")]
    SlowConsumer,
    /// It broke the protocol or a limit.
    #[error("the client broke the protocol: {0}")]
    Violation(Violation),
    /// Reading from or writing to it failed.
    #[error("I/O failed: {0}")]
    Io(io::ErrorKind),
}

/// Why a connection ended, as its client sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Closed {
    /// The server closed it or died.
    #[error("the server closed the connection")]
    ByServer,
    /// The server sent what the limits or the protocol forbid.
    #[error("the server broke the protocol: {0}")]
    Violation(Violation),
}
