//! The ZMQ transport: ROUTER and DEALER of the `zeromq` crate over `ipc://`, with bounded queues.
//!
//! The crate bounds its queues by count only, at 100,000 messages a peer. Here each message that is passed to the crate
//! carries its permits (see [`charged`]) and releases them when the crate has copied it to the wire. So bytes are
//! bounded, and the crate's queues never fill.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::time::{Instant, sleep_until, timeout_at};
use zeromq::{
    DealerRecvHalf, DealerSendHalf, DealerSocket, RouterRecvHalf, RouterSendHalf, RouterSocket,
    Socket as _, SocketEvent, SocketOptions, SocketRecv as _, SocketSend as _, ZmqError,
    ZmqMessage,
};

use super::connection::ConnectionLink;
use super::directory::{self, Claim, SOCKET_NAME};
use super::gate::{self, Gate};
use super::listener::{Intake, Outgoing, PeerLink};
use super::queue::{Budget, Queued};
use super::zmtp::{Part, check_part};
use super::{
    Address, BoxFuture, CloseReason, Closed, Connection, Frame, Limits, Listener, PeerId,
    Transport, TransportError, Violation,
};

/// First and longest pause between two checks for a listener that is not there yet.
const LOOK_PAUSE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(100));
/// Longest single attempt to connect and complete the handshake.
const ATTEMPT: Duration = Duration::from_secs(2);

/// The transport between processes of one machine and one user.
#[derive(Debug, Clone, Copy, Default)]
pub struct ZmqTransport;

impl Transport for ZmqTransport {
    fn listen<'a>(
        &'a self,
        address: &'a Address,
        limits: Limits,
    ) -> BoxFuture<'a, Result<Listener, TransportError>> {
        Box::pin(listen(address, limits))
    }

    fn connect<'a>(
        &'a self,
        address: &'a Address,
        limits: Limits,
        deadline: Duration,
    ) -> BoxFuture<'a, Result<Connection, TransportError>> {
        Box::pin(connect(address, limits, deadline))
    }
}

fn directory_of(address: &Address) -> Result<&Path, TransportError> {
    match address {
        Address::Directory(path) => Ok(path),
        Address::Memory(_) => Err(TransportError::Address(address.clone())),
    }
}

async fn listen(address: &Address, limits: Limits) -> Result<Listener, TransportError> {
    let path = directory_of(address)?;
    limits.check()?;
    directory::prepare(path)?;
    let claim = Claim::take(path, SOCKET_NAME)?;
    directory::remove_stale_inner(path)?;
    let public = directory::bind(claim.socket())?;
    public
        .set_nonblocking(true)
        .map_err(TransportError::io("cannot set up", claim.socket()))?;
    let public = tokio::net::UnixListener::from_std(public)
        .map_err(TransportError::io("cannot set up", claim.socket()))?;
    let inner = directory::inner_path(path)?;
    let mut socket = RouterSocket::new();
    let mut monitor = socket.monitor();
    let zmq_error = |error: ZmqError| TransportError::Zmq(error.to_string());
    socket
        .bind_listener(directory::bind(&inner)?)
        .await
        .map_err(zmq_error)?;
    let (send, recv) = socket.split();
    let router = Router {
        send,
        expected: Arc::default(),
    };
    let limits = Arc::new(limits);
    let (listener, intake) = Listener::new(address.clone(), &limits, |_| Box::new(claim));

    let expected = router.expected.clone();
    tokio::spawn(async move {
        while let Ok(event) = monitor.recv().await {
            note(&expected, event);
        }
    });
    tokio::spawn(pump(recv, intake.clone()));
    let gate = Gate {
        router,
        intake,
        limits,
        inner,
    };
    tokio::spawn(gate::run(gate, public));
    Ok(listener)
}

type Expected = Arc<Mutex<HashMap<PeerId, oneshot::Sender<()>>>>;

fn locked(expected: &Expected) -> MutexGuard<'_, HashMap<PeerId, oneshot::Sender<()>>> {
    expected.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notifies the gate that the ROUTER has accepted a peer.
fn note(expected: &Expected, event: SocketEvent) {
    match event {
        SocketEvent::Accepted(_, identity) => {
            let waiting = peer_of(&identity).and_then(|peer| locked(expected).remove(&peer));
            match waiting {
                Some(waiting) => drop(waiting.send(())),
                None => tracing::warn!("a connection to the inner socket went around the gate"),
            }
        }
        SocketEvent::AcceptFailed(error) => tracing::debug!(%error, "inner handshake failed"),
        _ => {}
    }
}

fn peer_of(identity: &[u8]) -> Option<PeerId> {
    let bytes = identity.try_into().ok()?;
    Some(PeerId(u64::from_be_bytes(bytes)))
}

/// The sending side of the ROUTER, as the gate's connections use it.
pub(super) struct Router {
    send: RouterSendHalf,
    expected: Expected,
}

/// A peer that the gate is about to connect to the ROUTER. Dropping it removes the expectation.
pub(super) struct Introduction {
    peer: PeerId,
    expected: Expected,
    accepted: oneshot::Receiver<()>,
}

impl Introduction {
    /// Waits until the ROUTER can route to the peer.
    pub(super) async fn wait(mut self) -> Option<()> {
        (&mut self.accepted).await.ok()
    }
}

impl Drop for Introduction {
    fn drop(&mut self) {
        locked(&self.expected).remove(&self.peer);
    }
}

impl Router {
    /// Registers a peer. Call it before the gate connects as `peer`.
    pub(super) fn expect(&self, peer: PeerId) -> Introduction {
        let (sender, accepted) = oneshot::channel();
        locked(&self.expected).insert(peer, sender);
        Introduction {
            peer,
            expected: self.expected.clone(),
            accepted,
        }
    }

    /// Sends queued frames of a peer to the ROUTER until the peer must be closed.
    pub(super) async fn feed(&self, link: &mut PeerLink) -> CloseReason {
        let mut send = self.send.clone();
        let identity = Bytes::copy_from_slice(&link.peer.0.to_be_bytes());
        while let Some(Outgoing::Frame(queued)) = link.outbox.recv().await {
            let mut message = charged(queued);
            message.push_front(identity.clone());
            if let Err(error) = send.send(message).await {
                tracing::debug!(peer = %link.peer, %error, "cannot route");
                return CloseReason::ByUs;
            }
        }
        CloseReason::ByUs
    }
}

/// Bytes that release their permits when the last reference to them is dropped.
struct Charged {
    bytes: Bytes,
    _permit: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for Charged {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Builds a message of two parts whose body holds the frame's permits.
fn charged(queued: Queued) -> ZmqMessage {
    let Queued { frame, permit } = queued;
    let body = Charged {
        bytes: frame.body,
        _permit: permit,
    };
    let mut message = ZmqMessage::from(frame.header);
    message.push_back(Bytes::from_owner(body));
    message
}

/// Moves frames from the ROUTER to the listener.
async fn pump(mut router: RouterRecvHalf, intake: Intake) {
    loop {
        let received = tokio::select! {
            received = router.recv() => received,
            () = intake.events.closed() => return,
        };
        let message = match received {
            Ok(message) => message,
            Err(error) => {
                tracing::error!(%error, "the inner socket failed");
                return;
            }
        };
        let parts: Result<[Bytes; 3], _> = message.into_vec().try_into();
        let Ok([identity, header, body]) = parts else {
            continue;
        };
        let Some(peer) = peer_of(&identity).filter(|peer| intake.peers.is_open(*peer)) else {
            continue;
        };
        if intake.frame(peer, Frame { header, body }).await.is_err() {
            return;
        }
    }
}

async fn connect(
    address: &Address,
    limits: Limits,
    deadline: Duration,
) -> Result<Connection, TransportError> {
    let directory = directory_of(address)?;
    limits.check()?;
    let socket = directory::socket_path(directory, SOCKET_NAME)?;
    let by = Instant::now() + deadline;
    let mut pause = LOOK_PAUSE.0;
    while Instant::now() < by {
        if is_there(directory, &socket)?
            && let Some(connection) = try_connect(address, &socket, &limits, by).await?
        {
            return Ok(connection);
        }
        sleep_until(by.min(Instant::now() + pause)).await;
        pause = (pause * 2).min(LOOK_PAUSE.1);
    }
    Err(TransportError::Unreachable {
        address: address.clone(),
        waited: deadline,
    })
}

/// Whether the socket exists. Refuses a directory in which another user could have created it, because a hostile server
/// could make the crate abort this process.
fn is_there(directory: &Path, socket: &Path) -> Result<bool, TransportError> {
    match directory::check(directory) {
        Ok(()) => Ok(socket.exists()),
        Err(TransportError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Attempts one connection. `None` when no listener answered: a stale socket, or a busy listener.
async fn try_connect(
    address: &Address,
    socket: &Path,
    limits: &Limits,
    by: Instant,
) -> Result<Option<Connection>, TransportError> {
    let by = by.min(Instant::now() + ATTEMPT);
    let mut options = SocketOptions::default();
    options.connect_timeout(ATTEMPT);
    let mut dealer = DealerSocket::with_options(options);
    let mut monitor = dealer.monitor();
    let endpoint = format!("ipc://{}", socket.display());
    match timeout_at(by, dealer.connect(&endpoint)).await {
        Ok(Ok(())) => {}
        Err(_) | Ok(Err(ZmqError::ConnectTimeout(_))) => return Ok(None),
        Ok(Err(error)) => {
            return Err(TransportError::Refused {
                address: address.clone(),
                detail: error.to_string(),
            });
        }
    }
    let gone = async move {
        while let Ok(event) = monitor.recv().await {
            if matches!(event, SocketEvent::Disconnected(_)) {
                return;
            }
        }
    };
    let (connection, link) = Connection::new(&Arc::new(limits.clone()));
    tokio::spawn(carry(dealer, link, gone));
    Ok(Some(connection))
}

/// Moves frames between a connection and its DEALER until either end is gone.
async fn carry(dealer: DealerSocket, mut link: ConnectionLink, gone: impl Future<Output = ()>) {
    let (mut send, mut recv) = dealer.split();
    let ConnectionLink {
        outbox,
        inbox,
        inbound,
        ..
    } = &mut link;
    let reason = tokio::select! {
        biased;
        () = inbox.closed() => None,
        reason = receive(&mut recv, inbox, inbound, gone) => Some(reason),
        () = transmit(&mut send, outbox) => None,
    };
    match reason {
        Some(reason) => link.close(reason),
        None => {
            outbox.close();
            while let Some(queued) = outbox.recv().await {
                if send.send(charged(queued)).await.is_err() {
                    return;
                }
            }
        }
    }
}

/// Sends queued frames. Never returns: when the server is gone, the receiving side ends the connection, after it has
/// delivered all received frames.
async fn transmit(send: &mut DealerSendHalf, outbox: &mut mpsc::Receiver<Queued>) {
    while let Some(queued) = outbox.recv().await {
        if let Err(error) = send.send(charged(queued)).await {
            tracing::debug!(%error, "cannot send");
            break;
        }
    }
    std::future::pending().await
}

/// Delivers received frames to the connection until the server is gone. The crate's DEALER itself would wait forever.
async fn receive(
    recv: &mut DealerRecvHalf,
    inbox: &mpsc::Sender<Queued>,
    inbound: &Budget,
    gone: impl Future<Output = ()>,
) -> Closed {
    tokio::pin!(gone);
    loop {
        let received = tokio::select! {
            biased;
            received = recv.recv() => received,
            () = &mut gone => return Closed::ByServer,
        };
        let message = match received {
            Ok(message) => message.into_vec(),
            Err(error) => {
                tracing::debug!(%error, "the connection failed");
                return Closed::ByServer;
            }
        };
        let frame = match frame_of(message, &inbound.limits) {
            Ok(frame) => frame,
            Err(violation) => return Closed::Violation(violation),
        };
        let Some(queued) = inbound.admit(frame).await else {
            return Closed::ByServer;
        };
        if inbox.send(queued).await.is_err() {
            return Closed::ByServer;
        }
    }
}

fn frame_of(parts: Vec<Bytes>, limits: &Limits) -> Result<Frame, Violation> {
    let [header, body]: [Bytes; 2] = parts.try_into().map_err(|_| Violation::Parts)?;
    check_part(limits, Part::Header, header.len() as u64)?;
    check_part(limits, Part::Body, body.len() as u64)?;
    Ok(Frame { header, body })
}
