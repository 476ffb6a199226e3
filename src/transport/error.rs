//! Errors of the transport, typed for callers that handle them.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Address, Violation};

/// The process that holds an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UsedBy {
    /// A process of this PID namespace.
    #[error("process {0}")]
    Process(i32),
    /// A process of another PID namespace: its number there is another process here.
    #[error("a process of another container (PID namespace)")]
    OtherNamespace,
    /// The holder is not known.
    #[error("another process")]
    Unknown,
}

impl UsedBy {
    /// The process with this id, if it is known.
    pub(super) fn process(pid: impl TryInto<i32>) -> Self {
        pid.try_into().map_or(Self::Unknown, Self::Process)
    }
}

/// Why a listener or a connection could not be created.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The address belongs to another transport.
    #[error("{0} is not an address of this transport")]
    Address(Address),
    /// The limits contradict each other; holds the contradiction.
    #[error("limits: {0}")]
    Limits(&'static str),
    /// Other users could access the directory, or it is not usable as one.
    #[error("{} (mode {mode:04o}) {problem}; {remedy}", .path.display())]
    Directory {
        /// The directory, or its parent.
        path: PathBuf,
        /// Permission bits of `path`.
        mode: u32,
        /// The defect found.
        problem: &'static str,
        /// How to fix the defect.
        remedy: String,
    },
    /// A socket's path does not fit the kernel's limit of 107 bytes.
    #[error("{} is longer than the 107 bytes of a socket's path; choose a shorter directory", .0.display())]
    PathTooLong(PathBuf),
    /// Another listener holds the address.
    #[error("{address} is in use by {by}")]
    InUse {
        /// The requested address.
        address: Address,
        /// The process that holds the address.
        by: UsedBy,
    },
    /// No listener accepted by the deadline.
    #[error("no process listens at {address} (waited {waited:?})")]
    Unreachable {
        /// The requested address.
        address: Address,
        /// The deadline that was given.
        waited: Duration,
    },
    /// The listener closed the connection before the handshake ended: too many connections, another user, or no ZMTP.
    #[error("{address} refused the connection: {detail}")]
    Refused {
        /// The requested address.
        address: Address,
        /// The error of the attempt, as text.
        detail: String,
    },
    /// A certificate is not accepted, so that no later attempt succeeds either.
    #[error("{address} is not trusted: {detail}")]
    Untrusted {
        /// The requested address.
        address: Address,
        /// What is wrong with the certificate.
        detail: String,
    },
    /// TLS cannot be set up; holds the reason.
    #[error("TLS: {0}")]
    Tls(String),
    /// A system call failed.
    #[error("{what} {}: {source}", .path.display())]
    Io {
        /// The operation that failed.
        what: &'static str,
        /// The file or directory of the operation.
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
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
    /// A part exceeds the limits; nothing was sent, and the connection stays open.
    #[error("the {part} part has {bytes} bytes, the limit is {limit}")]
    TooLong {
        /// `header` or `body`.
        part: &'static str,
        /// Length of the part.
        bytes: usize,
        /// Longest allowed length of the part.
        limit: usize,
    },
    /// The queue of the peer is full. A listener closes such a peer; a client's connection stays open, and the frame is
    /// not sent.
    #[error("too many bytes wait for the peer")]
    Slow,
}

/// Why a listener's peer was closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CloseReason {
    /// The client closed the connection or died.
    #[error("closed by the client")]
    ByPeer,
    /// Closed by [`FrameSender::disconnect`](super::FrameSender::disconnect), or because this side ended.
    #[error("closed by this side")]
    ByUs,
    /// The client did not read what was sent to it.
    #[error("the client reads too slowly")]
    SlowConsumer,
    /// The client broke the protocol or a limit.
    #[error("the client broke the protocol: {0}")]
    Violation(Violation),
    /// Reading from or writing to the connection failed.
    #[error("I/O failed: {0}")]
    Io(io::ErrorKind),
}

/// Why a connection ended, as its client sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Closed {
    /// The server closed the connection or died.
    #[error("the server closed the connection")]
    ByServer,
    /// The server sent something that the limits or the protocol forbid.
    #[error("the server broke the protocol: {0}")]
    Violation(Violation),
}
