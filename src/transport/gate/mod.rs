//! The gate: accepts the connections of a listening socket and reads and writes ZMTP on them.
//!
//! No library of ZMQ reads these bytes. Each connection is one task, which parses the client's stream as it arrives
//! ([`zmtp`]), moves whole messages to the listener and queued frames to the client, and answers PINGs between them.
//! Nothing is kept of a message that the limits do not allow.
//!
//! Memory of a connection, beside queued frames: two buffers of [`CHUNK_BYTES`], and the message that is being
//! received, within the limits.

mod peer;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::handshake_permits::{HandshakePermit, HandshakePermits};
use super::listener::{Intake, PeerLink, Peers, QueuedEvent};
use super::zmtp::{self, Item, Parser};
use super::{Limits, PeerId, SendError, SharedLogLimit, Violation};
use peer::OpenConnection;

/// Most bytes of one read.
pub(super) const CHUNK_BYTES: usize = 64 << 10;
/// Most connections in the handshake. A further one closes the oldest. They do not count as open connections.
pub(super) const HANDSHAKES_MAX: usize = 64;
static REFUSALS: SharedLogLimit = SharedLogLimit::new();
static ACCEPT_ERRORS: SharedLogLimit = SharedLogLimit::new();
/// Pause after `accept` failed, so that a lack of file descriptors does not cause a busy loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// State shared by all connections of a gate.
pub(super) struct Gate {
    pub(super) intake: Intake,
    pub(super) limits: Arc<Limits>,
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
            let shaking = shake_hands(&gate, stream, &open);
            serve(&gate, shaking, handshake).await;
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

/// Carries out a handshake within its limits, then serves the connection until it or the listener is closed.
async fn serve<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    gate: &Gate,
    shaking: impl Future<Output = Result<OpenConnection<R, W>, ConnectionRefusal>>,
    mut handshake: HandshakePermit,
) {
    let serving = async {
        let shaken = tokio::select! {
            biased;
            shaken = timeout(gate.limits.handshake, shaking) => {
                shaken.unwrap_or(Err(ConnectionRefusal::Late))
            }
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
    };
    tokio::select! {
        () = serving => {}
        () = gate.intake.events.closed() => {}
    }
}

/// Performs the handshake of a Unix socket, whose peer the kernel knows.
async fn shake_hands(
    gate: &Gate,
    stream: UnixStream,
    open: &Arc<Semaphore>,
) -> Result<OpenConnection<OwnedReadHalf, OwnedWriteHalf>, ConnectionRefusal> {
    let cred = stream.peer_cred()?;
    if cred.uid() != rustix::process::geteuid().as_raw() {
        return Err(ConnectionRefusal::User(cred.uid()));
    }
    let origin = Origin {
        uid: cred.uid(),
        // The kernel reports 0 for a process of another PID namespace: unknown.
        pid: cred.pid().filter(|pid| *pid > 0),
    };
    let (read, write) = stream.into_split();
    open_connection(gate, read, write, origin, open).await
}

/// The process at the other end of a connection.
struct Origin {
    uid: u32,
    pid: Option<i32>,
}

/// Performs the handshake of ZMTP and opens the connection. It is visible to the listener only on success: then frames
/// can be sent to it, and `Opened` is queued. The client gets its READY after that.
async fn open_connection<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    gate: &Gate,
    read: R,
    mut write: W,
    origin: Origin,
    open: &Arc<Semaphore>,
) -> Result<OpenConnection<R, W>, ConnectionRefusal> {
    write.write_all(&zmtp::greeting()).await?;
    write.flush().await?;
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
    let link = OpenPeer::new(gate, peer);
    let Origin { uid, pid } = origin;
    let opened = QueuedEvent::Opened { peer, uid, pid };
    gate.intake.push(opened).await?;
    Ok(OpenConnection {
        client,
        write,
        link,
        permit,
    })
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
struct ClientReader<R> {
    read: R,
    parser: Parser,
    buffer: Vec<u8>,
    /// The part of `buffer` that is read and not parsed yet.
    filled: std::ops::Range<usize>,
}

impl<R: AsyncRead + Unpin> ClientReader<R> {
    /// Reads more bytes if all are parsed. Returns `false` at the end of the stream.
    async fn fill(&mut self) -> io::Result<bool> {
        if self.filled.is_empty() {
            let bytes = self.read.read(&mut self.buffer).await?;
            self.filled = 0..bytes;
        }
        Ok(!self.filled.is_empty())
    }

    /// The next item of the bytes that were read, or `None` when all are parsed.
    fn next(&mut self) -> Result<Option<Item<'_>>, Violation> {
        let mut input = &self.buffer[self.filled.clone()];
        let item = self.parser.next(&mut input);
        self.filled.start = self.filled.end - input.len();
        item
    }

    async fn expect_ready(&mut self) -> Result<(), ConnectionRefusal> {
        loop {
            if !self.fill().await? {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
            while let Some(item) = self.next()? {
                if item == Item::Ready {
                    return Ok(());
                }
            }
        }
    }
}
