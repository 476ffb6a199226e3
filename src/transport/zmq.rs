//! The ZMQ transport over `ipc://`: listeners are gates, clients the DEALER of the `zeromq` crate with bounded queues.
//!
//! The crate bounds its queues by count only, at 100,000 messages a peer. Here each message that is passed to the crate
//! carries its permits (see [`charged`]) and releases them when the crate has copied it to the wire. So bytes are
//! bounded, and the crate's queues never fill.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::{Instant, sleep_until, timeout_at};
use zeromq::{
    DealerRecvHalf, DealerSendHalf, DealerSocket, Socket as _, SocketEvent, SocketOptions,
    SocketRecv as _, SocketSend as _, ZmqError, ZmqMessage,
};

use super::connection::ConnectionLink;
use super::directory::{self, Claim, SOCKET_NAME};
use super::gate::{self, Gate};
use super::queue::{Budget, Queued};
use super::zmtp::{Part, check_part};
use super::{
    Address, BoxFuture, Closed, Connection, Frame, Limits, Listener, Transport, TransportError,
    Violation,
};

/// First and longest pause between two checks for a listener that is not there yet.
const LOOK_PAUSE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(100));
/// Longest single attempt to connect and complete the handshake.
const ATTEMPT: Duration = Duration::from_secs(2);

/// The transport between processes of one machine: of one user, and at a listener of those that [`Limits::users`] names.
#[derive(Debug, Clone, Copy, Default)]
pub struct ZmqTransport;

impl Transport for ZmqTransport {
    fn listen<'a>(
        &'a self,
        address: &'a Address,
        limits: Limits,
    ) -> BoxFuture<'a, Result<Listener, TransportError>> {
        Box::pin(async move { open(address, limits).map(|(listener, _)| listener) })
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
        Address::Memory(_) | Address::Tcp(_) => Err(TransportError::Address(address.clone())),
    }
}

/// Listens in a directory. The gate can take connections of other sockets as well.
pub(super) fn open(
    address: &Address,
    limits: Limits,
) -> Result<(Listener, Arc<Gate>), TransportError> {
    let path = directory_of(address)?;
    limits.check()?;
    directory::prepare_for(path, &limits.users)?;
    let mut claim = Claim::take(path, SOCKET_NAME)?;
    let public = claim.bind(&limits.users)?;
    let limits = Arc::new(limits);
    let (listener, intake) = Listener::new(address.clone(), &limits, |_| Box::new(claim));
    let gate = Arc::new(Gate::new(intake, limits));
    tokio::spawn(gate::run(gate.clone(), public));
    Ok((listener, gate))
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
