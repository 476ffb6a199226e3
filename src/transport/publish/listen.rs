//! The listening sockets of a publisher: accepts connections, carries out handshakes, and limits how many are open.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;
use tokio::time::timeout;

use super::{PublicAddress, READ_BYTES, Stream, replays, subscriber};
use crate::SharedLogLimit;
use crate::gate::{HANDSHAKES_MAX, HANDSHAKES_OF_SOURCE_MAX, set_up};
use crate::handshake_permits::{HandshakePermit, HandshakePermits};
use crate::stream::{FrameReader, FrameWriter, StreamEnd};
use crate::zmtp::Parser;

/// Pause after `accept` failed, so that a lack of file descriptors does not cause a busy loop.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
static REFUSALS: SharedLogLimit = SharedLogLimit::new();
static ENDS: SharedLogLimit = SharedLogLimit::new();
static ACCEPT_ERRORS: SharedLogLimit = SharedLogLimit::new();

/// What a socket is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Service {
    Subscribers,
    Replays,
}

/// Why a connection is not served.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("no handshake in time")]
    Late,
    #[error("its handshake was the oldest of too many")]
    Crowded,
    #[error("{0} connections are open")]
    Full(usize),
    #[error("its address has {0} connections")]
    FullAddress(usize),
    #[error("{0}")]
    Stream(#[from] StreamEnd),
}

/// An open socket. Its task ends with the publisher.
pub(super) struct Door {
    port: Option<u16>,
    _file: Option<SocketFile>,
}

impl Door {
    pub(super) async fn open(
        at: &PublicAddress,
        service: Service,
        stream: Arc<Stream>,
        next: watch::Receiver<u64>,
    ) -> io::Result<Self> {
        let shared = Shared {
            places: Arc::new(Places::new(
                stream.limits.connections,
                stream.limits.of_address,
            )),
            handshakes: HandshakePermits::new(HANDSHAKES_MAX),
            service,
            stream,
            next,
        };
        Ok(match at {
            PublicAddress::Tcp(at) => {
                let listener = bind_tcp(at).await?;
                let port = listener.local_addr()?.port();
                tokio::spawn(shared.accept_tcp(listener));
                Self {
                    port: Some(port),
                    _file: None,
                }
            }
            PublicAddress::Ipc(path) => {
                let listener = bind_ipc(path)?;
                let file = SocketFile::new(path)?;
                tokio::spawn(shared.accept_ipc(listener));
                Self {
                    port: None,
                    _file: Some(file),
                }
            }
        })
    }

    pub(super) fn port(&self) -> Option<u16> {
        self.port
    }
}

async fn bind_tcp(at: &str) -> io::Result<TcpListener> {
    let wrong = || io::Error::other(format!("{at} is no HOST:PORT"));
    let (host, port) = at.rsplit_once(':').ok_or_else(wrong)?;
    let port: u16 = port.parse().map_err(|_| wrong())?;
    let host = host.trim_start_matches('[').trim_end_matches(']');
    TcpListener::bind((host, port)).await
}

/// Binds a Unix socket, in place of one that a process has left behind.
fn bind_ipc(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_left_behind(path) => {
            fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        bound => bound,
    }
}

/// Whether no process listens at a socket any longer.
fn is_left_behind(path: &Path) -> bool {
    let is_socket = fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
    let connected = std::os::unix::net::UnixStream::connect(path);
    is_socket && connected.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

/// The file of a Unix socket, which is removed on drop unless another one has taken its place.
struct SocketFile {
    path: PathBuf,
    inode: (u64, u64),
}

impl SocketFile {
    fn new(path: &Path) -> io::Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            inode: Self::inode(path)?,
        })
    }

    fn inode(path: &Path) -> io::Result<(u64, u64)> {
        let file = fs::symlink_metadata(path)?;
        Ok((file.dev(), file.ino()))
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let own = Self::inode(&self.path).is_ok_and(|inode| inode == self.inode);
        if own && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "the socket was not removed");
        }
    }
}

/// The places of a socket's open connections.
struct Places {
    taken: Mutex<Taken>,
    max: usize,
    of_address_max: usize,
}

#[derive(Default)]
struct Taken {
    all: usize,
    of_address: HashMap<IpAddr, usize>,
}

impl Places {
    fn new(max: usize, of_address_max: usize) -> Self {
        Self {
            taken: Mutex::default(),
            max,
            of_address_max,
        }
    }

    fn take(self: &Arc<Self>, address: Option<IpAddr>) -> Result<Place, Refusal> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.all >= self.max {
            return Err(Refusal::Full(self.max));
        }
        if let Some(address) = address {
            let of_address = taken.of_address.entry(address).or_default();
            if *of_address >= self.of_address_max {
                return Err(Refusal::FullAddress(self.of_address_max));
            }
            *of_address += 1;
        }
        taken.all += 1;
        Ok(Place {
            places: Arc::clone(self),
            address,
        })
    }
}

/// One of the [`Places`], freed on drop.
struct Place {
    places: Arc<Places>,
    address: Option<IpAddr>,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self
            .places
            .taken
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        taken.all -= 1;
        if let Some(address) = self.address
            && let Some(of_address) = taken.of_address.get_mut(&address)
        {
            *of_address -= 1;
            if *of_address == 0 {
                taken.of_address.remove(&address);
            }
        }
    }
}

/// What all connections of a socket have in common.
#[derive(Clone)]
struct Shared {
    service: Service,
    stream: Arc<Stream>,
    next: watch::Receiver<u64>,
    places: Arc<Places>,
    handshakes: Arc<HandshakePermits>,
}

impl Shared {
    async fn accept_tcp(self, listener: TcpListener) {
        while let Some((stream, source)) = self.accepted(|| listener.accept()).await {
            if let Err(error) = set_up(&stream) {
                // The peer is gone already.
                tracing::debug!(%error, %source, "a connection that cannot be set up");
                continue;
            }
            let address = source.ip();
            let handshake = self.handshakes.take_from(address, HANDSHAKES_OF_SOURCE_MAX);
            let (read, write) = stream.into_split();
            self.spawn(read, write, Some(address), handshake);
        }
    }

    async fn accept_ipc(self, listener: UnixListener) {
        while let Some((stream, _)) = self.accepted(|| listener.accept()).await {
            let handshake = self.handshakes.take();
            let (read, write) = stream.into_split();
            self.spawn(read, write, None, handshake);
        }
    }

    /// The next connection; `None` once the publisher is gone.
    async fn accepted<T, F>(&self, accept: impl Fn() -> F) -> Option<T>
    where
        F: Future<Output = io::Result<T>>,
    {
        loop {
            let accepted = tokio::select! {
                accepted = accept() => accepted,
                () = gone(self.next.clone()) => return None,
            };
            match accepted {
                Ok(accepted) => return Some(accepted),
                Err(error) => {
                    if let Some(left_out) = ACCEPT_ERRORS.line() {
                        tracing::warn!(%error, left_out, "cannot accept a subscriber");
                    }
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn spawn<R, W>(&self, read: R, write: W, address: Option<IpAddr>, handshake: HandshakePermit)
    where
        R: AsyncRead + Unpin + Send + 'static,
        W: AsyncWrite + Unpin + Send + 'static,
    {
        let shared = self.clone();
        tokio::spawn(async move {
            let peer = address.map_or("of this machine".to_owned(), |address| address.to_string());
            let next = shared.next.clone();
            tokio::select! {
                refused = shared.serve(read, write, address, handshake) => if let Err(reason) = refused
                    && let Some(left_out) = REFUSALS.line()
                {
                    tracing::warn!(%reason, peer, left_out, "refused a subscriber");
                },
                () = gone(next) => {}
            }
        });
    }

    /// Carries out a handshake, and serves the connection until it ends.
    async fn serve<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
        self,
        read: R,
        write: W,
        address: Option<IpAddr>,
        mut handshake: HandshakePermit,
    ) -> Result<(), Refusal> {
        let limits = &self.stream.limits;
        let parser = match self.service {
            Service::Subscribers => Parser::subscriber(),
            Service::Replays => Parser::requester(),
        };
        let mut writer = FrameWriter::new(write, limits.slow_after);
        let mut reader = FrameReader::with_buffer(read, parser, READ_BYTES);
        let shaking = async {
            writer.greet();
            writer.flush().await?;
            reader.handshake().await
        };
        tokio::select! {
            biased;
            shaken = timeout(limits.handshake, shaking) => shaken.map_err(|_| Refusal::Late)??,
            () = handshake.lost() => return Err(Refusal::Crowded),
        }
        let _place = self.places.take(address)?;
        drop(handshake);
        let (stream, next) = (&*self.stream, self.next);
        let reason = match self.service {
            Service::Subscribers => subscriber::serve(stream, next, reader, writer).await,
            Service::Replays => replays::serve(stream, reader, writer).await,
        };
        match reason {
            StreamEnd::Closed | StreamEnd::Unused => tracing::debug!("a subscriber has left"),
            reason => {
                if let Some(left_out) = ENDS.line() {
                    tracing::info!(%reason, left_out, "closed the connection of a subscriber");
                }
            }
        }
        Ok(())
    }
}

/// Completes when the publisher is gone.
async fn gone(mut next: watch::Receiver<u64>) {
    while next.changed().await.is_ok() {}
}
