//! The transport between machines: ZMTP over TLS over TCP.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, split};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::connection::TaskSide;
use super::gate::{self, Gate, TlsSide};
use super::queue::{Budget, Queued};
use super::stream::{self, FrameReader, FrameWriter, Ping, StreamEnd};
use super::zmq;
use super::{
    Address, BoxFuture, CertificateHolder, Closed, Connection, Credentials, Limits, Listener,
    Transport, TransportError, UsedBy,
};

/// First and longest pause between two attempts to connect.
const RETRY_PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));
/// Frames that a client had queued when it closed are written within this time.
const LAST_WRITES: Duration = Duration::from_secs(5);

/// The transport between processes that have certificates of one deployment.
#[derive(Debug, Clone)]
pub struct TlsTransport {
    credentials: Arc<Credentials>,
}

impl TlsTransport {
    /// A transport with the credentials of this process.
    pub fn new(credentials: Credentials) -> Self {
        Self {
            credentials: Arc::new(credentials),
        }
    }

    /// Listens at a TCP address as well as in a directory of this machine, with one queue and one limit of connections
    /// for both.
    ///
    /// # Errors
    /// As [`Transport::listen`] of both.
    pub async fn listen_beside(
        &self,
        local: &Address,
        at: SocketAddr,
        limits: Limits,
    ) -> Result<Listener, TransportError> {
        let (public, side) = self.bind(at).await?;
        let (listener, gate) = zmq::open(local, limits)?;
        tokio::spawn(gate::run_tls(gate, public, side));
        Ok(listener)
    }

    async fn bind(&self, at: SocketAddr) -> Result<(TcpListener, TlsSide), TransportError> {
        let holder = self.credentials.claims().holder;
        if holder != CertificateHolder::Leader {
            return Err(TransportError::Tls(format!(
                "the credentials are of {holder}: a listener needs those of the leader"
            )));
        }
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::AddrInUse => TransportError::InUse {
                address: Address::Tcp(at.to_string()),
                by: UsedBy::Unknown,
            },
            _ => TransportError::Io {
                what: "cannot listen at",
                path: PathBuf::from(at.to_string()),
                source,
            },
        };
        let side = TlsSide {
            acceptor: self.credentials.acceptor().map_err(TransportError::Tls)?,
            credentials: Arc::clone(&self.credentials),
        };
        Ok((TcpListener::bind(at).await.map_err(failed)?, side))
    }

    /// Listens at a TCP address alone.
    pub(super) async fn open(
        &self,
        address: &Address,
        limits: Limits,
    ) -> Result<(Listener, Arc<Gate>), TransportError> {
        let at = host_of(address)?;
        limits.check()?;
        let parsed = at.parse::<SocketAddr>();
        let at = parsed.map_err(|_| TransportError::Address(address.clone()))?;
        let (public, side) = self.bind(at).await?;
        let limits = Arc::new(limits);
        let (listener, intake) = Listener::new(address.clone(), &limits, |_| Box::new(()));
        let gate = Arc::new(Gate::new(intake, limits));
        tokio::spawn(gate::run_tls(gate.clone(), public, side));
        Ok((listener, gate))
    }

    async fn connect_by(
        &self,
        address: &Address,
        limits: Limits,
        deadline: Duration,
    ) -> Result<Connection, TransportError> {
        let at = host_of(address)?;
        limits.check()?;
        let by = Instant::now() + deadline;
        let mut pause = RETRY_PAUSE.0;
        while Instant::now() < by {
            let attempt = by.min(Instant::now() + limits.handshake);
            match timeout_at(attempt, self.try_connect(at, &limits)).await {
                Ok(Ok(connection)) => return Ok(connection),
                Ok(Err(Attempt::Refused(detail))) => {
                    let address = address.clone();
                    return Err(TransportError::Refused { address, detail });
                }
                Ok(Err(Attempt::Untrusted(detail))) => {
                    let address = address.clone();
                    return Err(TransportError::Untrusted { address, detail });
                }
                Ok(Err(Attempt::Unreachable(error))) => {
                    tracing::debug!(%error, at, "cannot connect yet");
                }
                Err(_) => tracing::debug!(at, "no handshake in time"),
            }
            sleep_until(by.min(Instant::now() + pause)).await;
            pause = (pause * 2).min(RETRY_PAUSE.1);
        }
        Err(TransportError::Unreachable {
            address: address.clone(),
            waited: deadline,
        })
    }

    async fn try_connect(&self, at: &str, limits: &Limits) -> Result<Connection, Attempt> {
        let stream = TcpStream::connect(at).await.map_err(Attempt::Unreachable)?;
        gate::set_up(&stream).map_err(Attempt::Unreachable)?;
        let (connector, name) = self.credentials.connector().map_err(Attempt::Refused)?;
        let stream = connector
            .connect(name, stream)
            .await
            .map_err(handshake_failure)?;
        let claims = self.credentials.claims_of_peer(stream.get_ref().1);
        let claims = claims.map_err(Attempt::Untrusted)?;
        if claims.holder != CertificateHolder::Leader {
            return Err(Attempt::Untrusted(format!("{claims} is no leader")));
        }
        let (read, write) = split(stream);
        let joined = stream::join(read, write, limits).await;
        let (reader, writer) = joined.map_err(|end| Attempt::Refused(end.to_string()))?;
        let (connection, task_side) = Connection::queued(&Arc::new(limits.clone()));
        tokio::spawn(carry(reader, writer, task_side));
        Ok(connection)
    }
}

/// Why a handshake failed, with the remedy where the certificate of the other side is of another root.
fn handshake_failure(error: io::Error) -> Attempt {
    use tokio_rustls::rustls::CertificateError::{BadSignature, UnknownIssuer};
    use tokio_rustls::rustls::Error::InvalidCertificate;
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref());
    match inner {
        Some(InvalidCertificate(BadSignature | UnknownIssuer)) => Attempt::Untrusted(format!(
            "{error}: the other side's file is of another directory of kvferry keygen; use files of one directory"
        )),
        Some(InvalidCertificate(_)) => Attempt::Untrusted(error.to_string()),
        _ => Attempt::Refused(error.to_string()),
    }
}

/// Why an attempt to connect failed.
enum Attempt {
    /// Nothing answers there yet.
    Unreachable(io::Error),
    /// The other side, or this one, refuses.
    Refused(String),
    /// The certificate of the other side is not accepted.
    Untrusted(String),
}

impl Transport for TlsTransport {
    fn listen<'a>(
        &'a self,
        address: &'a Address,
        limits: Limits,
    ) -> BoxFuture<'a, Result<Listener, TransportError>> {
        Box::pin(async move { Ok(self.open(address, limits).await?.0) })
    }

    fn connect<'a>(
        &'a self,
        address: &'a Address,
        limits: Limits,
        deadline: Duration,
    ) -> BoxFuture<'a, Result<Connection, TransportError>> {
        Box::pin(self.connect_by(address, limits, deadline))
    }
}

fn host_of(address: &Address) -> Result<&str, TransportError> {
    match address {
        Address::Tcp(at) => Ok(at),
        Address::Directory(_) | Address::Memory(_) => Err(TransportError::Address(address.clone())),
    }
}

/// Moves frames between a connection and its stream until either end is gone. Frames that are queued when the owner
/// closes the connection are still written.
async fn carry<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    mut reader: FrameReader<R>,
    mut writer: FrameWriter<W>,
    mut task_side: TaskSide,
) {
    let ping = Ping::default();
    let TaskSide {
        outbox,
        inbox,
        inbound,
        ..
    } = &mut task_side;
    let late = async {
        inbox.closed().await;
        tokio::time::sleep(LAST_WRITES).await;
    };
    let reason = tokio::select! {
        biased;
        reason = receive(&mut reader, inbox, inbound, &ping) => Some(reason),
        () = transmit(&mut writer, outbox, &ping, inbox.closed()) => None,
        () = late => None,
    };
    if let Some(reason) = reason {
        task_side.close(reason);
    }
}

/// Writes queued frames. Returns when all are written after the owner has closed the connection, and never when the
/// server is gone: then the receiving side ends the connection, after it has delivered all received frames.
async fn transmit<W: AsyncWrite + Unpin>(
    writer: &mut FrameWriter<W>,
    outbox: &mut mpsc::Receiver<Queued>,
    ping: &Ping,
    closed: impl Future<Output = ()>,
) {
    let mut closed = std::pin::pin!(closed);
    let mut is_closed = false;
    let written = async {
        loop {
            writer.pong(ping);
            let next = match outbox.try_recv() {
                Ok(queued) => queued,
                Err(mpsc::error::TryRecvError::Disconnected) if is_closed => {
                    return writer.end().await;
                }
                Err(_) => {
                    writer.flush().await?;
                    tokio::select! {
                        Some(queued) = outbox.recv() => queued,
                        () = ping.came() => continue,
                        () = &mut closed, if !is_closed => {
                            is_closed = true;
                            outbox.close();
                            continue;
                        }
                    }
                }
            };
            writer.frame(next.frame).await?;
            drop(next.permit);
        }
    };
    if let Err(end) = written.await {
        tracing::debug!(%end, "cannot send");
        std::future::pending().await
    }
}

/// Delivers received frames to the connection until the server is gone.
async fn receive<R: AsyncRead + Unpin>(
    reader: &mut FrameReader<R>,
    inbox: &mpsc::Sender<Queued>,
    inbound: &Budget,
    ping: &Ping,
) -> Closed {
    loop {
        let frame = match reader.frame(ping).await {
            Ok(frame) => frame,
            Err(StreamEnd::Violation(violation)) => return Closed::Violation(violation),
            Err(end) => {
                tracing::debug!(%end, "the connection ended");
                return Closed::ByServer;
            }
        };
        let Some(queued) = inbound.admit(frame).await else {
            return Closed::ByServer;
        };
        if inbox.send(queued).await.is_err() {
            // The owner has closed the connection: the other direction ends it.
            std::future::pending().await
        }
    }
}
