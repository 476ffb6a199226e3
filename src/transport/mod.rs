//! How messages travel between processes of one machine.
//!
//! Below are frames, above them conversations: a [`Server`] welcomes and keeps order, a [`Client`] asks, retries and keeps
//! deadlines.
//!
//! A frame has two parts, header and body; what they mean is not known here. A [`Transport`] makes listeners and
//! connections, which are the same concrete types for every transport: bounded queues, and a task behind them that moves
//! frames. [`ZmqTransport`] speaks ZMTP 3.0 over `ipc://`, so that any ZMQ library can be a client; it stands behind a
//! gate that checks every byte before the `zeromq` crate sees it. [`MemoryTransport`] is its twin inside one process,
//! with the same events, limits and errors, for tests and for paused time.
//!
//! Nothing here reconnects, retries a frame or keeps one for later: whoever owns a connection decides that.

mod client;
mod clock;
mod connection;
mod directory;
mod error;
mod fds;
mod gate;
mod listener;
mod log_limit;
mod memory;
mod places;
mod process;
mod queue;
mod server;
mod zmq;
mod zmtp;

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

pub use client::{CLIENT_QUEUE, Client, ClientSettings, Incoming};
pub use clock::Clock;
pub use connection::{Connection, ConnectionReceiver, ConnectionSender};
pub use directory::{DirectoryLock, check as check_directory, prepare as prepare_directory};
pub use error::{CloseReason, Closed, SendError, TransportError};
pub use fds::{
    FdError, FdReceiver, TICKET_BYTES, Ticket, UNTAKEN_MAX, UNTAKEN_TTL, send_fd, send_fds,
};
pub use listener::{FrameSender, Listener};
pub use log_limit::SharedLogLimit;
pub use memory::MemoryTransport;
pub use server::{Replier, SERVER_BATCH_MAX, Server, ServerEvents};
pub use zmq::ZmqTransport;
pub use zmtp::Violation;

pub use crate::session::{CLIENT_OPEN_MAX, Failure, STRANGERS_MAX, ServerEvent, ServerSettings};
pub use crate::types::{LinkId, PeerId};

/// Largest [`Limits::header_bytes`] and [`Limits::body_bytes`] together: 256 MiB.
pub const FRAME_BYTES_MAX: usize = 256 << 20;

/// What every queued frame is charged at least, in bytes, so that a bound in bytes bounds the number of frames too.
pub const FRAME_OVERHEAD_BYTES: usize = 256;

/// Most frames that wait for one peer, whatever their size.
pub const PENDING_FRAMES_MAX: usize = 65_536;

/// Connections of a leader beside those of its workers and one engine for each replica.
pub const TOOLS_MAX: usize = 32;

/// What travels: two parts that belong together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Part one, at most [`Limits::header_bytes`].
    pub header: Bytes,
    /// Part two, at most [`Limits::body_bytes`]; may be empty.
    pub body: Bytes,
}

impl Frame {
    /// A frame of these two parts.
    pub fn new(header: impl Into<Bytes>, body: impl Into<Bytes>) -> Self {
        Self {
            header: header.into(),
            body: body.into(),
        }
    }
}

/// What happens at a listener. For each peer: one `Opened`, any number of `Frame`s, one `Closed`, in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenerEvent {
    /// A client shook hands; frames can be sent to it from now on.
    Opened {
        /// Its name until `Closed`.
        peer: PeerId,
        /// The user it runs as, by the kernel's word.
        uid: u32,
        /// Its process, by the kernel's word, where the kernel says.
        pid: Option<i32>,
    },
    /// It sent a frame within the limits.
    Frame {
        /// Who.
        peer: PeerId,
        /// What.
        frame: Frame,
    },
    /// It is gone; nothing of it follows, and sends to it fail.
    Closed {
        /// Who.
        peer: PeerId,
        /// Why.
        reason: CloseReason,
    },
}

/// Where a listener listens.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Address {
    /// A directory of the listening process alone (0700, made if missing); socket and lock have fixed names in it.
    Directory(PathBuf),
    /// A name within one [`MemoryTransport`].
    Memory(String),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => write!(f, "ipc:{}", path.display()),
            Self::Memory(name) => write!(f, "memory:{name}"),
        }
    }
}

/// Bounds of a listener or a connection. Both ends should agree on the frame sizes: what is within the sender's limits and
/// beyond the receiver's closes the connection.
///
/// Worst-case memory of a listener: `pending_bytes` (frames that nobody has handled yet) + `connections` x
/// (`pending_bytes` + `header_bytes` + `body_bytes` + 512 KiB of buffers), plus 192 KiB for each of 64 handshakes. With the
/// defaults: 16 MiB and 24.5 MiB a connection, so 1.6 GiB when each of 64 peers sends half of a longest message and reads
/// none of its answers, for at most `slow_after`. A [`Server`] decodes what it hands over: no more than `pending_bytes` at a
/// time, and lists of small numbers take up to 16 times their bytes, so 256 MiB with the defaults.
/// Of a connection: 2 x `pending_bytes` + `header_bytes` + `body_bytes` + 256 KiB.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Longest header part. Default: 256 bytes.
    pub header_bytes: usize,
    /// Longest body part. Default: 8 MiB, that of the protocol.
    pub body_bytes: usize,
    /// Most open connections of a listener; further ones are refused. Each takes three file descriptors. Default: 64.
    pub connections: usize,
    /// So many of them a server keeps for workers and for those that have not said hello: others are refused. Default: 0.
    pub reserved_connections: usize,
    /// Most bytes that wait for one peer, and most that wait for the reader of a listener or a connection. A frame counts
    /// with its length and an overhead of at least [`FRAME_OVERHEAD_BYTES`]. Default: 16 MiB.
    pub pending_bytes: usize,
    /// Time for greeting and READY. Default: 5 s.
    pub handshake: Duration,
    /// A peer that takes nothing for this long while something waits for it is closed. Default: 10 s.
    pub slow_after: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            header_bytes: 256,
            body_bytes: crate::protocol::limits::BODY_BYTES_MAX,
            connections: 64,
            reserved_connections: 0,
            pending_bytes: 16 << 20,
            handshake: Duration::from_secs(5),
            slow_after: Duration::from_secs(10),
        }
    }
}

impl Limits {
    /// Limits of a leader's listener: a place for every worker and every engine, [`TOOLS_MAX`] for probes, commands and
    /// engines that come and go, and [`STRANGERS_MAX`] for those that have not said hello.
    pub fn of_leader(ranks: u16, replicas: u16) -> Self {
        let workers = usize::from(ranks) * usize::from(replicas);
        let reserved_connections = workers + STRANGERS_MAX;
        Self {
            connections: reserved_connections + usize::from(replicas) + TOOLS_MAX,
            reserved_connections,
            ..Self::default()
        }
    }

    /// Refuses limits under which a largest frame could never be sent.
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

    /// What each queued frame costs beside its bytes; grows with `pending_bytes` to hold [`PENDING_FRAMES_MAX`].
    fn overhead_bytes(&self) -> usize {
        FRAME_OVERHEAD_BYTES.max(self.pending_bytes / PENDING_FRAMES_MAX)
    }
}

/// A boxed future, so that a transport can be a `dyn Transport`.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Makes listeners and connections. Needs a tokio runtime with I/O and time.
pub trait Transport: Send + Sync + 'static {
    /// Listens at `address` until the listener is dropped.
    ///
    /// # Errors
    /// [`TransportError`]: an address of another transport, limits that contradict, a directory that others could reach,
    /// an address that is in use, or a failed system call.
    fn listen<'a>(
        &'a self,
        address: &'a Address,
        limits: Limits,
    ) -> BoxFuture<'a, Result<Listener, TransportError>>;

    /// Connects to the listener at `address`, waiting for it to appear for at most `deadline`. When it returns, the
    /// listener's `Opened` is queued.
    ///
    /// # Errors
    /// [`TransportError`]: as for `listen`, nobody there by the deadline, or refused by the listener.
    fn connect<'a>(
        &'a self,
        address: &'a Address,
        limits: Limits,
        deadline: Duration,
    ) -> BoxFuture<'a, Result<Connection, TransportError>>;
}
