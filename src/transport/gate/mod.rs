//! The gate: a filter between clients and the `zeromq` crate's ROUTER.
//!
//! The crate aborts the process on a forged frame length, buffers endless multipart messages, lets a second client take
//! over the identity of the first, has no handshake deadline and drops peers that PING. So a task of this module
//! accepts on the public socket, and each connection is two hops: client to gate, and gate to ROUTER over an inner
//! socket in the same directory. Only checked messages of a client are forwarded; the gate produces greeting and READY
//! itself, with an identity that it chose. In the other direction the gate forwards everything and inserts PONGs
//! between messages.
//!
//! Memory of a connection, beside queued frames: three buffers of [`CHUNK_BYTES`] here, and in the ROUTER one message
//! within the limits and two chunks.

mod relay;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::unix::OwnedReadHalf;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::handshake_permits::{HandshakePermit, HandshakePermits};
use super::listener::{Intake, PeerLink, Peers, QueuedEvent};
use super::router::Router;
use super::zmtp::{self, Item, Parser};
use super::{Limits, PeerId, SendError, SharedLogLimit, Violation};
use relay::Connection;

/// Most bytes of one read, in either direction.
const CHUNK_BYTES: usize = 64 << 10;
/// Most connections in the handshake. A further one closes the oldest. They do not count as open connections.
pub(super) const HANDSHAKES_MAX: usize = 64;
static REFUSALS: SharedLogLimit = SharedLogLimit::new();
static ACCEPT_ERRORS: SharedLogLimit = SharedLogLimit::new();
/// Pause after `accept` failed, so that a lack of file descriptors does not cause a busy loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// State shared by all connections of a gate.
pub(super) struct Gate {
    pub(super) router: Router,
    pub(super) intake: Intake,
    pub(super) limits: Arc<Limits>,
    /// Path of the ROUTER's socket.
    pub(super) inner: PathBuf,
}

/// Accepts connections until the listener is gone.
pub(super) async fn run(gate: Gate, public: UnixListener) {
    let gate = Arc::new(gate);
    let handshakes = HandshakePermits::new(HANDSHAKES_MAX);
    let open = Arc::new(Semaphore::new(gate.limits.connections));
    loop {
        let accepted = tokio::select! {
            accepted = public.accept() => accepted,
            () = gate.intake.events.closed() => return,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                if let Some(left_out) = ACCEPT_ERRORS.line() {
                    tracing::warn!(%error, left_out, "cannot accept a connection");
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let handshake = handshakes.take();
        let (gate, open) = (gate.clone(), open.clone());
        tokio::spawn(async move {
            let events = gate.intake.events.clone();
            tokio::select! {
                () = serve(&gate, stream, &open, handshake) => {}
                () = events.closed() => {}
            }
        });
    }
}

/// Why a connection was refused before it was open.
#[derive(Debug, thiserror::Error)]
enum ConnectionRefusal {
    #[error("the peer runs as uid {0}")]
    User(u32),
    #[error("too many connections are open")]
    Full,
    #[error("no handshake in time")]
    Late,
    #[error("its handshake was the oldest of too many")]
    Crowded,
    #[error("{0}")]
    Violation(#[from] Violation),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("the listener is gone")]
    Gone(#[from] SendError),
}

async fn serve(
    gate: &Gate,
    stream: UnixStream,
    open: &Arc<Semaphore>,
    mut handshake: HandshakePermit,
) {
    let shaking = timeout(gate.limits.handshake, shake_hands(gate, stream, open));
    let shaken = tokio::select! {
        biased;
        shaken = shaking => shaken.unwrap_or(Err(ConnectionRefusal::Late)),
        () = handshake.lost() => Err(ConnectionRefusal::Crowded),
    };
    drop(handshake);
    match shaken {
        Ok(connection) => connection.run(gate).await,
        Err(reason) => {
            if let Some(left_out) = REFUSALS.line() {
                tracing::info!(%reason, left_out, "refused a connection");
            }
        }
    }
}

/// Performs the handshake and opens the connection. The connection is visible to the listener only on success: then it
/// is open at both ends, and `Opened` is queued.
async fn shake_hands(
    gate: &Gate,
    stream: UnixStream,
    open: &Arc<Semaphore>,
) -> Result<Connection, ConnectionRefusal> {
    let cred = stream.peer_cred()?;
    if cred.uid() != rustix::process::geteuid().as_raw() {
        return Err(ConnectionRefusal::User(cred.uid()));
    }
    let (read, mut write) = stream.into_split();
    write.write_all(&zmtp::greeting()).await?;
    let mut client = ClientReader {
        read,
        parser: Parser::client(&gate.limits),
        buffer: vec![0; CHUNK_BYTES],
        filled: 0..0,
    };
    client.expect_ready().await?;
    let permit = open.clone().try_acquire_owned();
    let permit = permit.map_err(|_| ConnectionRefusal::Full)?;
    let peer = Peers::next_id();
    let inner = connect_inner(gate, peer).await?;
    let link = OpenPeer::new(gate, peer);
    let opened = QueuedEvent::Opened {
        peer,
        uid: cred.uid(),
        // The kernel reports 0 for a process of another PID namespace: unknown.
        pid: cred.pid().filter(|pid| *pid > 0),
    };
    gate.intake.push(opened).await?;
    let connection = Connection {
        client,
        client_write: write,
        inner,
        link,
        permit,
    };
    Ok(connection)
}

/// Connects to the ROUTER as the DEALER named `peer`, and waits until the ROUTER can route to it.
async fn connect_inner(gate: &Gate, peer: PeerId) -> Result<UnixStream, ConnectionRefusal> {
    let accepted = gate.router.expect(peer);
    let mut inner = UnixStream::connect(&gate.inner).await?;
    inner.write_all(&zmtp::greeting()).await?;
    let ready = zmtp::ready("DEALER", &peer.0.to_be_bytes());
    inner.write_all(&ready).await?;
    let mut greeting = [0; zmtp::GREETING_BYTES];
    inner.read_exact(&mut greeting).await?;
    let mut head = [0; 2];
    inner.read_exact(&mut head).await?;
    let mut ready = [0; u8::MAX as usize];
    inner.read_exact(&mut ready[..usize::from(head[1])]).await?;
    let routed = accepted.wait().await;
    routed.ok_or_else(|| io::Error::other("the inner socket did not take the connection"))?;
    Ok(inner)
}

/// The entry of an open peer, removed when dropped.
struct OpenPeer {
    link: PeerLink,
    peers: Arc<Peers>,
}

impl OpenPeer {
    fn new(gate: &Gate, peer: PeerId) -> Self {
        Self {
            link: gate.intake.peers.open(peer),
            peers: gate.intake.peers.clone(),
        }
    }
}

impl Drop for OpenPeer {
    fn drop(&mut self) {
        self.peers.close(self.link.peer);
    }
}

/// The client's stream and its parser.
struct ClientReader {
    read: OwnedReadHalf,
    parser: Parser,
    buffer: Vec<u8>,
    /// The part of `buffer` that is read and not parsed yet.
    filled: std::ops::Range<usize>,
}

impl ClientReader {
    /// Reads more bytes if all are parsed. Returns `false` at the end of the stream.
    async fn fill(&mut self) -> io::Result<bool> {
        if self.filled.is_empty() {
            let bytes = self.read.read(&mut self.buffer).await?;
            self.filled = 0..bytes;
        }
        Ok(!self.filled.is_empty())
    }

    async fn expect_ready(&mut self) -> Result<(), ConnectionRefusal> {
        loop {
            if !self.fill().await? {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
            let mut input = &self.buffer[self.filled.clone()];
            let mut ready = false;
            while !ready && let Some(item) = self.parser.next(&mut input)? {
                ready = item == Item::Ready;
            }
            self.filled.start = self.filled.end - input.len();
            if ready {
                return Ok(());
            }
        }
    }
}
