//! Which process listens in a directory, without a message to it.

use std::io;
use std::path::Path;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::time::timeout;

use super::directory::SOCKET_NAME;
use super::{OwnDirectory, TransportError};

/// Longest wait for the kernel to accept a connection. It waits only where more connections wait than a socket may have.
const CONNECT_LIMIT: Duration = Duration::from_millis(50);

/// What a look at a directory finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listening {
    /// No process listens there.
    Nobody,
    /// A process listens, though it may not accept. `None` if it is in another PID namespace.
    Process(Option<i32>),
}

/// False if no process can connect in a directory, whether or not one has connections there.
pub fn has_socket(directory: &Path) -> bool {
    directory.join(SOCKET_NAME).exists()
}

/// Looks which process listens in a directory of this user. The process sees a connection that closes at once.
///
/// # Errors
/// As [`OwnDirectory::open`].
pub async fn listening_in(directory: &Path) -> Result<Listening, TransportError> {
    let directory = OwnDirectory::open(directory)?;
    if !directory.contains(SOCKET_NAME) {
        return Ok(Listening::Nobody);
    }
    let connecting = UnixStream::connect(directory.through(SOCKET_NAME));
    match timeout(CONNECT_LIMIT, connecting).await {
        Ok(Ok(stream)) => {
            let pid = stream.peer_cred().ok().and_then(|peer| peer.pid());
            Ok(Listening::Process(pid.filter(|pid| *pid > 0)))
        }
        Ok(Err(error)) if is_nobody(&error) => Ok(Listening::Nobody),
        Ok(Err(_)) | Err(_) => Ok(Listening::Process(None)),
    }
}

fn is_nobody(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
    )
}
