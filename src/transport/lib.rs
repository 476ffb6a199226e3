//! Transport of messages between processes, of one machine and of several.
//!
//! Two layers: frames, and on top of them conversations. A [`Server`] accepts hellos and enforces the protocol; a
//! [`Client`] sends requests, retries them and enforces deadlines.
//!
//! A frame has two parts, header and body, which this layer does not interpret. A [`Transport`] makes listeners and
//! connections, which have the same types for every transport. A listener has bounded queues, and a task for each of its
//! connections. A [`Connection`] over TLS or in memory has two bounded queues, and a task that moves frames; over `ipc://`
//! its owner's task sends to the DEALER of the `zeromq` crate, and reads from it.
//!
//! [`ZmqTransport`] uses ZMTP 3.0 over `ipc://`, so that any ZMQ library can be a client; its gate reads every byte
//! itself, within limits. [`TlsTransport`] is the same over TCP, for processes that have certificates. [`MemoryTransport`]
//! works inside one process with the same events, limits and errors, for tests and for paused time.
//!
//! Beside them, a [`Publisher`] serves ZMQ subscribers of other programs, which have no sessions.
//!
//! The frame layer does not reconnect, does not retry frames and does not store them for later: the owner of a
//! connection decides that.

#![forbid(unsafe_code)]

mod client;
mod clock;
mod connection;
mod dealer;
mod directory;
mod error;
mod fds;
mod gate;
mod handshake_permits;
mod listener;
mod listening;
mod log_limit;
mod memory;
mod own_directory;
mod process;
mod publish;
mod queue;
mod server;
#[cfg(test)]
#[path = "../../tests/support/skipped.rs"]
mod skipped;
mod stream;
mod tcp;
mod tls;
mod trusted_file;
mod users;
mod zmq;
pub mod zmtp;

#[cfg(test)]
mod client_tests;
#[cfg(test)]
mod conversation_tests;
#[cfg(test)]
mod manners_tests;
#[cfg(test)]
mod tests;

use std::fmt;
use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;

pub use client::{CLIENT_QUEUE, Client, ClientSettings, Incoming, PendingAnswer};
pub use clock::Clock;
pub use connection::Connection;
pub use directory::DirectoryLock;
pub use error::{CloseReason, Closed, SendError, TransportError, UsedBy};
pub use fds::{
    FdError, FdReceiver, TICKET_BYTES, Ticket, UNTAKEN_MAX, UNTAKEN_TTL, send_fd, send_fds,
};
pub use listener::{FrameSender, Listener};
pub use listening::{Listening, has_socket, listening_in};
pub use log_limit::SharedLogLimit;
pub use memory::MemoryTransport;
pub use own_directory::{OwnDirectory, prepare_for};
pub use publish::{PublicAddress, Publisher, PublisherLimits};
pub use server::{Replier, SERVER_BATCH_MAX, Server, ServerEvents};
pub use tcp::TlsTransport;
pub use tls::{Credentials, CredentialsError, KeygenError, LEAF_DAYS, ROOT_DAYS, Root, Written};
pub use trusted_file::{FileRefused, Readers, read_trusted};
pub use users::{OtherUsers, USER_CONNECTIONS_MAX, USERS_MAX, own_uid};
pub use zmq::ZmqTransport;
pub use zmtp::Violation;

pub use kvferry_session::{
    CLIENT_OPEN_MAX, CertificateHolder, Claims, Failure, Origin, STRANGERS_MAX, ServerEvent,
    ServerSettings, answer_of, by_name,
};
pub use kvferry_types::{LinkId, PeerId};

/// Largest [`Limits::header_bytes`] and [`Limits::body_bytes`] together: 256 MiB.
pub const FRAME_BYTES_MAX: usize = 256 << 20;

/// Smallest charge for a queued frame, in bytes, so that a bound in bytes also bounds the number of frames.
pub const FRAME_OVERHEAD_BYTES: usize = 256;

/// Most frames queued for one peer, whatever their size.
pub const PENDING_FRAMES_MAX: usize = 65_536;

/// Connections that a leader accepts beyond those of its workers and one engine for each replica.
pub const TOOLS_MAX: usize = 32;

/// The unit of transfer: a header and a body that belong together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// First part, at most [`Limits::header_bytes`] long.
    pub header: Bytes,
    /// Second part, at most [`Limits::body_bytes`] long; may be empty.
    pub body: Bytes,
}

impl Frame {
    /// Builds a frame from its parts.
    pub fn new(header: impl Into<Bytes>, body: impl Into<Bytes>) -> Self {
        Self {
            header: header.into(),
            body: body.into(),
        }
    }
}

/// An event of a listener. For each peer: one `Opened`, any number of `Frame`s, one `Closed`, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenerEvent {
    /// A client completed the handshake; frames can be sent to it from now on.
    Opened {
        /// Identifies the connection until its `Closed`.
        peer: PeerId,
        /// The client's process.
        origin: Origin,
    },
    /// A client sent a frame within the limits.
    Frame {
        /// The sending connection.
        peer: PeerId,
        /// The received frame.
        frame: Frame,
    },
    /// The connection is closed. No further event of the peer follows, and sends to it fail.
    Closed {
        /// The closed connection.
        peer: PeerId,
        /// Why the connection was closed.
        reason: CloseReason,
    },
}

/// Address of a listener.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// A directory that belongs to the listening process alone (0700, created if missing), with fixed names for socket
    /// and lock.
    Directory(PathBuf),
    /// A name within one [`MemoryTransport`].
    Memory(String),
    /// `HOST:PORT` of a [`TlsTransport`]; an address and a port to listen at.
    Tcp(String),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => write!(f, "ipc:{}", path.display()),
            Self::Memory(name) => write!(f, "memory:{name}"),
            Self::Tcp(at) => write!(f, "tls:{at}"),
        }
    }
}

/// Limits of a listener or a connection. Both ends should agree on the frame sizes: a frame within the sender's limits
/// and beyond the receiver's closes the connection.
///
/// Worst-case memory of a listener: `pending_bytes` (frames that are not handled yet) + `connections` x
/// (`pending_bytes` + `header_bytes` + `body_bytes` + 128 KiB of buffers, 256 KiB with TLS), plus 128 KiB for each of 64
/// handshakes of the own user, of 64 of other users, and of 64 of other machines. With the defaults: 16 MiB and 24.1 MiB a
/// connection, so 1.6 GiB when each of 64 peers sends half of a longest message and does not read its answers as fast as it
/// requests them: for at most `slow_after` if it reads none, and as long as it likes if it reads 280 KB each second. A
/// [`Server`] decodes the frames that it hands over, at most `pending_bytes` at a time; decoded lists of small numbers take up
/// to 16 times their bytes, so 256 MiB with the defaults.
/// Worst-case memory of a connection over TLS or in memory: 2 x `pending_bytes` + `header_bytes` + `body_bytes` + 256 KiB.
/// Over `ipc://`: 2 x `pending_bytes` + 5 x (`header_bytes` + `body_bytes`) + 5 MiB, if the server keeps to the limits: the
/// buffers of the `zeromq` crate grow by doubling, and it checks no lengths, so that a message is checked when it is
/// complete. Only a process that can write to the server's directory can send a longer one. A [`Client`] holds its requests
/// beside: [`CLIENT_QUEUE`] of them that wait for the session, and [`kvferry_session::CLIENT_OPEN_MAX`] in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Longest header in bytes. Default: 256.
    pub header_bytes: usize,
    /// Longest body in bytes. Default: 8 MiB, the limit of the protocol.
    pub body_bytes: usize,
    /// Most open connections of a listener; further ones are refused. Each takes a file descriptor. Default: 64.
    pub connections: usize,
    /// How many of the connections a server reserves for workers and for clients that have not sent a hello. Others are
    /// refused when only these are left. Default: 0.
    pub reserved_connections: usize,
    /// Most bytes queued for one peer, and most bytes queued for the reader of a listener or a connection. A frame
    /// counts with its length and an overhead of at least [`FRAME_OVERHEAD_BYTES`]. Default: 16 MiB.
    pub pending_bytes: usize,
    /// Time limit of the handshake: greeting and READY. Default: 5 s.
    pub handshake: Duration,
    /// A peer that reads nothing for this long while bytes wait for it is closed; so is one for which a frame waits six times
    /// as long, because it reads less than `pending_bytes` in that time. A [`MemoryTransport`] has the first rule alone. Default:
    /// 10 s.
    pub slow_after: Duration,
    /// Users beside that of this process whose processes may connect, at a listener of this machine. Default: none.
    pub users: OtherUsers,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            header_bytes: 256,
            body_bytes: kvferry_protocol::limits::BODY_BYTES_MAX,
            connections: 64,
            reserved_connections: 0,
            pending_bytes: 16 << 20,
            handshake: Duration::from_secs(5),
            slow_after: Duration::from_secs(10),
            users: OtherUsers::default(),
        }
    }
}

impl Limits {
    /// Returns the limits of a leader's listener: one connection for every worker and every engine, [`TOOLS_MAX`] for
    /// probes, commands and short-lived engines, and [`STRANGERS_MAX`] for clients that have not sent a hello.
    pub fn of_leader(ranks: u16, replicas: u16) -> Self {
        let workers = usize::from(ranks) * usize::from(replicas);
        let reserved_connections = workers + STRANGERS_MAX;
        Self {
            connections: reserved_connections + usize::from(replicas) + TOOLS_MAX,
            reserved_connections,
            ..Self::default()
        }
    }

    /// The same limits, where processes of these users may connect, too: with places for them, so that they take none of
    /// this user's.
    #[must_use]
    pub fn with_users(mut self, users: OtherUsers) -> Self {
        self.connections += users.len() * USER_CONNECTIONS_MAX;
        self.users = users;
        self
    }

    /// Refuses limits that contradict each other or exceed what the queues support, for example when a largest frame
    /// could never be sent.
    fn check(&self) -> Result<(), TransportError> {
        let frame = self.header_bytes.saturating_add(self.body_bytes);
        if frame > FRAME_BYTES_MAX {
            return Err(TransportError::Limits(
                "header_bytes and body_bytes exceed 256 MiB",
            ));
        }
        if self.pending_bytes < frame.saturating_add(self.overhead_bytes()) {
            return Err(TransportError::Limits(
                "pending_bytes cannot hold one largest frame",
            ));
        }
        if u32::try_from(self.pending_bytes).is_err() {
            return Err(TransportError::Limits("pending_bytes exceeds 4 GiB"));
        }
        match self.connections {
            0 => Err(TransportError::Limits("connections is 0")),
            _ => Ok(()),
        }
    }

    /// Charge for each queued frame beside its bytes. Grows with `pending_bytes`, so that at most
    /// [`PENDING_FRAMES_MAX`] frames fit.
    fn overhead_bytes(&self) -> usize {
        FRAME_OVERHEAD_BYTES.max(self.pending_bytes / PENDING_FRAMES_MAX)
    }
}

/// A boxed future, so that a transport can be a `dyn Transport`.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Creates listeners and connections. Needs a tokio runtime with I/O and time.
pub trait Transport: Send + Sync + 'static {
    /// Listens at `address` until the listener is dropped.
    ///
    /// # Errors
    /// [`TransportError`]: an address of another transport, contradictory limits, a directory that other users can
    /// access, an address in use, or a failed system call.
    fn listen<'a>(
        &'a self,
        address: &'a Address,
        limits: Limits,
    ) -> BoxFuture<'a, Result<Listener, TransportError>>;

    /// Connects to the listener at `address`, waiting at most `deadline` for it to appear. On return, the listener's
    /// `Opened` is queued.
    ///
    /// # Errors
    /// [`TransportError`]: as for `listen`, no listener by the deadline, or refused by the listener.
    fn connect<'a>(
        &'a self,
        address: &'a Address,
        limits: Limits,
        deadline: Duration,
    ) -> BoxFuture<'a, Result<Connection, TransportError>>;
}
