//! The entrance of other machines: TCP and TLS before ZMTP.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::net::sockopt;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, ReadHalf, WriteHalf, split};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::{ConnectionRefusal, Gate, HANDSHAKES_MAX, OpenConnection, open_connection, serve};
use crate::handshake_permits::HandshakePermits;
use crate::{Credentials, Origin, SharedLogLimit};

/// Most handshakes from one address. A further one closes the oldest of that address.
pub(crate) const HANDSHAKES_OF_SOURCE_MAX: usize = 32;
/// Time and bytes for which a refused peer is read, so that it receives the reason before the connection is reset.
const REFUSED_TIME: Duration = Duration::from_millis(500);
const REFUSED_BYTES: u64 = 64 << 10;
/// A connection over which nothing came for this long is probed, so that the end of a machine is noticed also while
/// nothing is sent.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 3;
/// A connection is closed when sent bytes are not acknowledged for this long, in milliseconds.
const UNACKNOWLEDGED_MS: u32 = 25_000;
static REFUSALS: SharedLogLimit = SharedLogLimit::new();

type Connection = OpenConnection<ReadHalf<TlsStream<TcpStream>>, WriteHalf<TlsStream<TcpStream>>>;

/// The listening side of TLS.
pub(crate) struct TlsSide {
    pub(crate) acceptor: TlsAcceptor,
    pub(crate) credentials: Arc<Credentials>,
}

/// Accepts connections of other machines until the listener is gone. Their handshakes take no place from those of this
/// machine.
pub(crate) async fn run_tls(gate: Arc<Gate>, public: TcpListener, side: TlsSide) {
    let side = Arc::new(side);
    let handshakes = HandshakePermits::new(HANDSHAKES_MAX);
    while let Some((stream, source)) = gate.accept(|| public.accept()).await {
        let handshake = handshakes.take_from(source.ip(), HANDSHAKES_OF_SOURCE_MAX);
        let (gate, side) = (gate.clone(), side.clone());
        tokio::spawn(async move {
            let shaking = shake_hands(&gate, &side, stream);
            if let Some(reason) = serve(&gate, shaking, handshake).await {
                let refused = 1 + gate.refused.tls.fetch_add(1, Ordering::Relaxed);
                if let Some(left_out) = REFUSALS.line() {
                    tracing::warn!(%reason, %source, refused, left_out, "refused a connection of another machine");
                }
            }
        });
    }
}

/// Performs the handshakes of TLS and of ZMTP.
async fn shake_hands(
    gate: &Gate,
    side: &TlsSide,
    stream: TcpStream,
) -> Result<Connection, ConnectionRefusal> {
    set_up(&stream)?;
    let accepted = side.acceptor.accept(stream).into_fallible().await;
    let stream = match accepted {
        Ok(stream) => stream,
        Err((error, stream)) => {
            refuse(stream).await;
            return Err(ConnectionRefusal::Certificate(error.to_string()));
        }
    };
    let claims = side.credentials.claims_of_peer(stream.get_ref().1);
    let claims = claims.map_err(ConnectionRefusal::Certificate)?;
    let (read, write) = split(stream);
    open_connection(gate, read, write, Origin::Certificate(claims)).await
}

/// Ends a connection whose handshake has failed. The reason is written already; bytes of the peer that are not read would
/// reset the connection before the peer reads it.
async fn refuse(mut stream: TcpStream) {
    let end = async {
        stream.shutdown().await?;
        let mut rest = stream.take(REFUSED_BYTES);
        tokio::io::copy(&mut rest, &mut tokio::io::sink()).await
    };
    if let Ok(Err(error)) = timeout(REFUSED_TIME, end).await {
        tracing::debug!(%error, "a refused peer");
    }
}

/// Sends small messages at once, and notices the end of a machine.
pub(crate) fn set_up(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES)?;
    sockopt::set_tcp_user_timeout(stream, UNACKNOWLEDGED_MS)?;
    Ok(())
}
