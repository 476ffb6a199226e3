//! The gate: accepts the connections of a listening socket and reads and writes ZMTP on them.
//!
//! No library of ZMQ reads these bytes. Each connection is one task, which parses the client's stream as it arrives
//! ([`super::stream`]), moves whole messages to the listener and queued frames to the client, and answers PINGs between them.
//! Nothing is kept of a message that the limits do not allow.
//!
//! Memory of a connection, beside queued frames: two buffers of [`super::stream::CHUNK_BYTES`], and the message that is being
//! received, within the limits.

mod peer;
#[cfg(test)]
mod tests;
mod tls;

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use kvferry_types::User;

use super::handshake_permits::{HandshakePermit, HandshakePermits};
use super::listener::{Intake, PeerLink, Peers, QueuedEvent};
use super::stream::{FrameReader, FrameWriter, StreamEnd};
use super::zmtp::Parser;
use super::{Limits, Origin, PeerId, SendError, SharedLogLimit, USER_CONNECTIONS_MAX};
use peer::OpenConnection;
pub(super) use tls::{HANDSHAKES_OF_SOURCE_MAX, TlsSide, run_tls, set_up};

/// Most connections in the handshake. A further one closes the oldest. They do not count as open connections.
pub(super) const HANDSHAKES_MAX: usize = 64;
/// Most connections with one certificate, open or in the handshake of ZMTP. A process uses one, and has more only until
/// a broken one is noticed.
pub(super) const CERTIFICATE_CONNECTIONS_MAX: usize = 8;
static REFUSALS: SharedLogLimit = SharedLogLimit::new();
static ACCEPT_ERRORS: SharedLogLimit = SharedLogLimit::new();
/// Pause after `accept` failed, so that a lack of file descriptors does not cause a busy loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// State shared by all connections of a listener.
pub(super) struct Gate {
    intake: Intake,
    limits: Arc<Limits>,
    open: Arc<Semaphore>,
    /// Places of each certificate, by its claims, and of each other user. The root's owner, and the limits, decide how many
    /// there are.
    places: Mutex<HashMap<String, Arc<Semaphore>>>,
    refused: Arc<Refused>,
}

/// Connections that were refused before they were open.
#[derive(Debug, Default)]
pub(super) struct Refused {
    pub(super) local: AtomicU64,
    pub(super) tls: AtomicU64,
}

impl Gate {
    pub(super) fn new(intake: Intake, limits: Arc<Limits>) -> Self {
        Self {
            open: Arc::new(Semaphore::new(limits.connections)),
            places: Mutex::default(),
            refused: Arc::default(),
            intake,
            limits,
        }
    }

    /// The counts of refused connections, for tests.
    #[cfg(test)]
    pub(super) fn refused(&self) -> Arc<Refused> {
        Arc::clone(&self.refused)
    }

    /// Takes a place of a certificate, or of another user, so that its holder cannot use up those of all others. This user's
    /// own processes need none.
    fn place_of(&self, origin: &Origin) -> Result<Option<OwnedSemaphorePermit>, ConnectionRefusal> {
        let (holder, max) = match origin {
            Origin::Local {
                user: User::Own, ..
            } => return Ok(None),
            Origin::Local { user, .. } => (user.to_string(), USER_CONNECTIONS_MAX),
            Origin::Certificate(claims) => (claims.to_string(), CERTIFICATE_CONNECTIONS_MAX),
        };
        let places = self.places.lock();
        let places = places
            .unwrap_or_else(PoisonError::into_inner)
            .entry(holder.clone())
            .or_insert_with(|| Arc::new(Semaphore::new(max)))
            .clone();
        let place = places.try_acquire_owned();
        place.map(Some).map_err(|_| ConnectionRefusal::Many(holder))
    }

    /// Where a connection of this machine comes from: the kernel knows its user.
    fn origin_of(&self, stream: &UnixStream) -> Result<Origin, ConnectionRefusal> {
        let cred = stream.peer_cred()?;
        let user = self.limits.users.find(cred.uid());
        Ok(Origin::Local {
            user: user.ok_or(ConnectionRefusal::User(cred.uid()))?,
            // The kernel reports 0 for a process of another PID namespace: unknown.
            pid: cred.pid().filter(|pid| *pid > 0),
        })
    }

    /// Counts a refused connection of this machine, and logs some of them.
    fn refused_local(&self, reason: &ConnectionRefusal) {
        let refused = 1 + self.refused.local.fetch_add(1, Ordering::Relaxed);
        if let Some(left_out) = REFUSALS.line() {
            tracing::info!(%reason, refused, left_out, "refused a connection");
        }
    }

    /// Accepts the next connection; `None` once the listener is gone.
    async fn accept<T, F>(&self, accept: impl Fn() -> F) -> Option<T>
    where
        F: Future<Output = io::Result<T>>,
    {
        loop {
            let accepted = tokio::select! {
                accepted = accept() => accepted,
                () = self.intake.events.closed() => return None,
            };
            match accepted {
                Ok(accepted) => return Some(accepted),
                Err(error) => {
                    if let Some(left_out) = ACCEPT_ERRORS.line() {
                        tracing::warn!(%error, left_out, "cannot accept a connection");
                    }
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

/// Accepts connections of this machine until the listener is gone.
pub(super) async fn run(gate: Arc<Gate>, public: UnixListener) {
    let handshakes = HandshakePermits::new(HANDSHAKES_MAX);
    let of_others = HandshakePermits::new(HANDSHAKES_MAX);
    while let Some((stream, _)) = gate.accept(|| public.accept()).await {
        // Before anything is read, and before a place is taken: processes of all users may reach the socket.
        let origin = match gate.origin_of(&stream) {
            Ok(origin) => origin,
            Err(reason) => {
                gate.intake.peers.note_refused();
                gate.refused_local(&reason);
                continue;
            }
        };
        let handshake = match origin.caller().user {
            User::Own => handshakes.take(),
            User::Other(_) => of_others.take(),
        };
        let gate = gate.clone();
        tokio::spawn(async move {
            let (read, write) = stream.into_split();
            let shaking = open_connection(&gate, read, write, origin);
            if let Some(reason) = serve(&gate, shaking, handshake).await {
                gate.refused_local(&reason);
            }
        });
    }
}

/// Why a connection was refused before it was open.
#[derive(Debug, thiserror::Error)]
enum ConnectionRefusal {
    #[error("the peer runs as uid {0}")]
    User(u32),
    #[error("{0} has as many connections as it may")]
    Many(String),
    #[error("too many connections are open")]
    Full,
    #[error("no handshake in time")]
    Late,
    #[error("its handshake was the oldest of too many")]
    Crowded,
    #[error("{0}")]
    Stream(#[from] StreamEnd),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("the listener is gone")]
    Gone(#[from] SendError),
    #[error("{0}")]
    Certificate(String),
}

/// Carries out a handshake within its limits, then serves the connection until it or the listener is closed. Returns why
/// it was refused before it was open.
async fn serve<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    gate: &Gate,
    shaking: impl Future<Output = Result<OpenConnection<R, W>, ConnectionRefusal>>,
    mut handshake: HandshakePermit,
) -> Option<ConnectionRefusal> {
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
            Ok(connection) => {
                connection.run(gate).await;
                None
            }
            // A client that looks whether a process listens.
            Err(ConnectionRefusal::Stream(StreamEnd::Unused)) => None,
            Err(reason) => {
                gate.intake.peers.note_refused();
                Some(reason)
            }
        }
    };
    tokio::select! {
        biased;
        refused = serving => refused,
        () = gate.intake.events.closed() => None,
    }
}

/// Performs the handshake of ZMTP and opens the connection. It is visible to the listener only on success: then frames
/// can be sent to it, and `Opened` is queued. The client gets its READY after that.
async fn open_connection<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    gate: &Gate,
    read: R,
    write: W,
    origin: Origin,
) -> Result<OpenConnection<R, W>, ConnectionRefusal> {
    let place = gate.place_of(&origin)?;
    let mut writer = FrameWriter::new(write, gate.limits.slow_after);
    writer.greet();
    writer.flush().await?;
    let mut reader = FrameReader::new(read, Parser::client(&gate.limits));
    reader.handshake().await?;
    let permit = gate.open.clone().try_acquire_owned();
    let permit = permit.map_err(|_| ConnectionRefusal::Full)?;
    let peer = Peers::next_id();
    let link = OpenPeer::new(gate, peer);
    gate.intake
        .push(QueuedEvent::Opened { peer, origin })
        .await?;
    Ok(OpenConnection {
        reader,
        writer,
        link,
        permit,
        place,
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
