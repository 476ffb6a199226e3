//! The ROUTER of the `zeromq` crate behind a gate: which peers it may accept, and the frames to and from them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use zeromq::{
    RouterRecvHalf, RouterSendHalf, SocketEvent, SocketRecv as _, SocketSend as _, ZmqMessage,
};

use super::listener::{Intake, Outgoing, PeerLink};
use super::queue::Queued;
use super::{CloseReason, Frame, PeerId};

pub(super) type Expected = Arc<Mutex<HashMap<PeerId, oneshot::Sender<()>>>>;

fn locked(expected: &Expected) -> MutexGuard<'_, HashMap<PeerId, oneshot::Sender<()>>> {
    expected.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notifies the gate that the ROUTER has accepted a peer.
pub(super) fn note(expected: &Expected, event: SocketEvent) {
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
    pub(super) fn new(send: RouterSendHalf) -> Self {
        Self {
            send,
            expected: Arc::default(),
        }
    }

    /// The peers that the gate is about to connect, for [`note`].
    pub(super) fn expected(&self) -> Expected {
        Arc::clone(&self.expected)
    }

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
pub(super) fn charged(queued: Queued) -> ZmqMessage {
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
pub(super) async fn pump(mut router: RouterRecvHalf, intake: Intake) {
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
