//! The ZMQ transport over `ipc://`: listeners are gates, clients the DEALER of the `zeromq` crate.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout_at};

use super::dealer::Dealer;
use super::directory::{self, Claim, SOCKET_NAME};
use super::gate::{self, Gate};
use super::{
    Address, BoxFuture, Connection, Limits, Listener, OwnDirectory, Transport, TransportError,
    prepare_for,
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
    let directory = prepare_for(path, &limits.users)?;
    let mut claim = Claim::take(directory, SOCKET_NAME)?;
    let public = claim.bind(&limits.users)?;
    let claim = claim.watched();
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
    directory::socket_path(directory, SOCKET_NAME)?;
    let by = Instant::now() + deadline;
    let mut pause = LOOK_PAUSE.0;
    while Instant::now() < by {
        if let Some(directory) = with_socket(directory)?
            && let Some(connection) = try_connect(address, &directory, &limits, by).await?
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

/// Opens the directory, if there is one with the socket. Refuses one in which another user could have created the socket,
/// because a hostile server could make the crate abort this process.
fn with_socket(directory: &Path) -> Result<Option<OwnDirectory>, TransportError> {
    match OwnDirectory::open(directory) {
        Ok(directory) => Ok(directory.contains(SOCKET_NAME).then_some(directory)),
        Err(TransportError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Attempts one connection. `None` when no listener answered: a stale socket, or a busy listener.
async fn try_connect(
    address: &Address,
    directory: &OwnDirectory,
    limits: &Limits,
    by: Instant,
) -> Result<Option<Connection>, TransportError> {
    let by = by.min(Instant::now() + ATTEMPT);
    // Through the directory that was checked: its path may name another one by now.
    let endpoint = format!("ipc://{}", directory.through(SOCKET_NAME).display());
    match timeout_at(by, Dealer::connect(&endpoint, limits.clone())).await {
        Ok(Ok(dealer)) => Ok(Some(Connection::dealer(dealer))),
        Err(_) => Ok(None),
        Ok(Err(error)) => Err(TransportError::Refused {
            address: address.clone(),
            detail: error.to_string(),
        }),
    }
}
