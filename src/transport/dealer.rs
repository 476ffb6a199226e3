//! The DEALER of the `zeromq` crate as the client end of a connection.
//!
//! The crate bounds its queue of outgoing messages by count only, at 100,000. Here each message carries its permits (see
//! [`charged`]) until the crate has encoded it into its write buffer. So bytes are bounded, and the queue never fills:
//! permits suffice for 65,536 messages ([`super::PENDING_FRAMES_MAX`]). Incoming messages are read from the socket when the
//! owner receives or sends. See [`Limits`] for the sum of both.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::OwnedSemaphorePermit;
use zeromq::{
    DealerSocket, Socket as _, SocketEvent, SocketRecv as _, SocketSend as _, ZmqError, ZmqMessage,
};

use super::clock::within;
use super::queue::{Budget, INBOX_FRAMES, Queued};
use super::zmtp::{Part, check_part};
use super::{BoxFuture, Closed, Frame, Limits, SendError, Violation};

/// A connected DEALER, and the frames that the owner has not taken yet.
pub(super) struct Dealer {
    /// The socket, or why it was closed.
    state: Result<Open, Closed>,
    /// Frames that arrived while the owner sent others.
    inbox: Inbox,
    budget: Budget,
}

struct Open {
    socket: DealerSocket,
    /// Completes when the server is gone; a `recv` of the socket alone would then wait for ever.
    gone: BoxFuture<'static, ()>,
}

/// Frames that the owner has not taken: at most [`INBOX_FRAMES`], of [`Limits::pending_bytes`] and one frame more.
#[derive(Default)]
struct Inbox {
    frames: VecDeque<Frame>,
    bytes: usize,
}

impl Inbox {
    fn push(&mut self, frame: Frame) {
        self.bytes += frame.header.len() + frame.body.len();
        self.frames.push_back(frame);
    }

    fn pop(&mut self) -> Option<Frame> {
        let frame = self.frames.pop_front()?;
        self.bytes -= frame.header.len() + frame.body.len();
        Some(frame)
    }

    fn has_room(&self, limits: &Limits) -> bool {
        self.frames.len() < INBOX_FRAMES && self.bytes < limits.pending_bytes
    }
}

impl Dealer {
    /// Connects. The caller limits the time.
    pub(super) async fn connect(endpoint: &str, limits: Limits) -> Result<Self, ZmqError> {
        let mut socket = DealerSocket::new();
        let mut events = socket.monitor();
        socket.connect(endpoint).await?;
        let gone = async move {
            while let Ok(event) = events.recv().await {
                if matches!(event, SocketEvent::Disconnected(_)) {
                    return;
                }
            }
        };
        let gone: BoxFuture<'static, ()> = Box::pin(gone);
        Ok(Self {
            state: Ok(Open { socket, gone }),
            inbox: Inbox::default(),
            budget: Budget::new(Arc::new(limits)),
        })
    }

    /// See [`super::Connection::send`]. Reads what has arrived before it writes, and while it waits for room: the crate drops
    /// what it has not read when a write fails, and a server closes a client that reads nothing. When the server is gone,
    /// the crate drops its queue and the permits with it, which ends the wait.
    pub(super) async fn send(&mut self, frame: Frame) -> Result<(), SendError> {
        self.budget.check(&frame)?;
        let slow_after = self.budget.limits.slow_after;
        let sent = within(slow_after, self.send_with_room(frame)).await;
        sent.unwrap_or(Err(SendError::Slow))
    }

    /// Sends a frame, once there is room for it.
    async fn send_with_room(&mut self, frame: Frame) -> Result<(), SendError> {
        let queued = match self.room_for(frame).await {
            Ok(queued) => queued,
            Err(closed) => {
                self.state = Err(closed);
                return Err(SendError::Gone);
            }
        };
        let Ok(open) = &mut self.state else {
            return Err(SendError::Gone);
        };
        let sent = open.socket.send(charged(queued)).await;
        sent.map_err(|error| {
            tracing::debug!(%error, "cannot send");
            SendError::Gone
        })
    }

    /// Waits for room for a frame, or until the connection is closed.
    async fn room_for(&mut self, frame: Frame) -> Result<Queued, Closed> {
        let open = match &mut self.state {
            Ok(open) => open,
            Err(closed) => return Err(*closed),
        };
        let limits = &self.budget.limits;
        let admitted = self.budget.admit(frame);
        tokio::pin!(admitted);
        loop {
            tokio::select! {
                biased;
                received = open.receive(limits), if self.inbox.has_room(limits) => self.inbox.push(received?),
                queued = &mut admitted => return queued.ok_or(Closed::ByServer),
            }
        }
    }

    /// See [`super::Connection::recv`].
    pub(super) async fn recv(&mut self) -> Result<Frame, Closed> {
        if let Some(frame) = self.inbox.pop() {
            return Ok(frame);
        }
        let open = match &mut self.state {
            Ok(open) => open,
            Err(closed) => return Err(*closed),
        };
        let received = open.receive(&self.budget.limits).await;
        if let Err(closed) = received {
            self.state = Err(closed);
        }
        received
    }
}

impl Open {
    /// Returns the next frame, or why there will be none.
    async fn receive(&mut self, limits: &Limits) -> Result<Frame, Closed> {
        let received = tokio::select! {
            biased;
            received = self.socket.recv() => received,
            () = &mut self.gone => return Err(Closed::ByServer),
        };
        match received {
            Ok(message) => frame_of(message.into_vec(), limits).map_err(Closed::Violation),
            Err(error) => {
                tracing::debug!(%error, "the connection failed");
                Err(Closed::ByServer)
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

fn frame_of(parts: Vec<Bytes>, limits: &Limits) -> Result<Frame, Violation> {
    let [header, body]: [Bytes; 2] = parts.try_into().map_err(|_| Violation::Parts)?;
    check_part(limits, Part::Header, header.len() as u64)?;
    check_part(limits, Part::Body, body.len() as u64)?;
    Ok(Frame { header, body })
}
