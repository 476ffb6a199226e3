//! A stream of numbered batches for ZMQ subscribers of other programs: a PUB, and a ROUTER that sends earlier batches again.
//!
//! A batch has the frames topic, number (8 bytes, big-endian) and payload. A client that lacks batches sends the first
//! missing number to the ROUTER, behind an empty frame, and gets the kept batches from there on, each behind an empty
//! frame, and a last one with an empty topic, the number 2^64 - 1 and an empty payload.
//!
//! No ZMQ library reads the bytes of a peer: they go through the parser of the gate ([`super::zmtp`]). Nothing is queued for
//! a connection: its task has a position in the batches that are kept for all, and writes from there. A subscriber that is
//! slower than the stream for so long that its position is dropped continues at the oldest kept batch, and sees a gap in
//! the numbers. A subscription is kept as the length of its topic, because only beginnings of the one topic can match.

mod kept;
mod listen;
mod replays;
mod subscriber;

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;

use super::zmtp::TOPIC_BYTES_MAX;
use kept::Kept;
use listen::{Door, Service};

/// The number of the batch that ends a replay.
const REPLAY_END: u64 = u64::MAX;
/// Most bytes of one read. Peers send subscriptions and requests alone.
const READ_BYTES: usize = 4 << 10;

/// Limits of a [`Publisher`].
///
/// Worst-case memory: `kept_bytes`, and for each of the two sockets 72 KiB and one batch for each of `connections`, and
/// 72 KiB for each of 64 handshakes. With the defaults, and batches of at most 8 MiB: 256 MiB, and 2 GiB if each connection
/// is in the middle of a longest batch that is no longer kept, for at most `slow_after` if it has stopped, and for six times
/// as long if it reads slowly.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublisherLimits {
    /// Most batches that are kept. Default: 10,000.
    pub kept_batches: usize,
    /// Most bytes of all of them. Default: 256 MiB.
    pub kept_bytes: usize,
    /// Most open connections of each socket; further ones are refused. Default: 128.
    pub connections: usize,
    /// Most open connections of one address of the network with each socket. Default: 64.
    pub of_address: usize,
    /// Time limit of the handshake. Default: 5 s.
    pub handshake: Duration,
    /// A peer that takes no byte for this long while bytes wait for it is closed; so is one that takes six times as long for
    /// one batch. Default: 25 s, after which the kernel
    /// closes a TCP connection of its own accord.
    pub slow_after: Duration,
}

impl Default for PublisherLimits {
    fn default() -> Self {
        Self {
            kept_batches: 10_000,
            kept_bytes: 256 << 20,
            connections: 128,
            of_address: 64,
            handshake: Duration::from_secs(5),
            slow_after: Duration::from_secs(25),
        }
    }
}

/// Where a [`Publisher`] listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PublicAddress {
    /// `HOST:PORT`. An IPv6 address may be in brackets.
    Tcp(String),
    /// A Unix socket. Its permissions follow from the umask: the directory decides who may connect.
    Ipc(PathBuf),
}

/// The stream, for all of its connections.
struct Stream {
    topic: Bytes,
    limits: PublisherLimits,
    kept: Mutex<Kept>,
}

impl Stream {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Publishes batches. Dropping it closes its sockets and all connections.
pub struct Publisher {
    stream: Arc<Stream>,
    /// The number of the next batch. Connections end when it is dropped.
    next: watch::Sender<u64>,
    doors: Vec<Door>,
}

impl Publisher {
    /// A stream of batches under one topic, numbered from `first` on. A publisher that starts again begins above the numbers
    /// of before, for example with the microseconds since 1970, so that subscribers see a gap instead of old batches.
    ///
    /// # Errors
    /// A topic longer than 512 bytes, to which nobody could subscribe.
    pub fn new(topic: &str, first: u64, limits: PublisherLimits) -> io::Result<Self> {
        if topic.len() > TOPIC_BYTES_MAX {
            let bytes = topic.len();
            return Err(io::Error::other(format!(
                "the topic has {bytes} bytes: give at most {TOPIC_BYTES_MAX}"
            )));
        }
        let kept = Kept::new(first, limits.kept_batches, limits.kept_bytes);
        let stream = Stream {
            topic: Bytes::copy_from_slice(topic.as_bytes()),
            kept: Mutex::new(kept),
            limits,
        };
        Ok(Self {
            stream: Arc::new(stream),
            next: watch::channel(first).0,
            doors: Vec::new(),
        })
    }

    /// Opens a PUB. Returns the port of a TCP address.
    ///
    /// # Errors
    /// Those of the system, for example an address that is in use.
    pub async fn serve_subscribers(&mut self, at: &PublicAddress) -> io::Result<Option<u16>> {
        self.open(at, Service::Subscribers).await
    }

    /// Opens a ROUTER that answers requests for earlier batches. Returns the port of a TCP address.
    ///
    /// # Errors
    /// As [`Self::serve_subscribers`].
    pub async fn serve_replays(&mut self, at: &PublicAddress) -> io::Result<Option<u16>> {
        self.open(at, Service::Replays).await
    }

    async fn open(&mut self, at: &PublicAddress, service: Service) -> io::Result<Option<u16>> {
        let next = self.next.subscribe();
        let door = Door::open(at, service, self.stream.clone(), next).await?;
        let port = door.port();
        self.doors.push(door);
        Ok(port)
    }

    /// Publishes a batch, and returns its number. Never waits for a subscriber.
    pub fn publish(&self, payload: impl Into<Bytes>) -> u64 {
        let mut kept = self.stream.kept();
        let number = kept.add(payload.into());
        self.next.send_replace(number + 1);
        number
    }
}
