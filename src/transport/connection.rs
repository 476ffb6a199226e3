//! The client end of a connection, common to all transports: two bounded queues and a task of the transport.

use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use super::clock::within;
use super::queue::{Budget, Queued};
use super::{Closed, Frame, Limits, SendError};

/// Most frames queued for [`Connection::recv`]; their bytes are bounded by [`Limits::pending_bytes`].
const INBOX_FRAMES: usize = 64;

/// The transport task's side of a [`Connection`].
pub(super) struct ConnectionLink {
    pub(super) outbox: mpsc::Receiver<Queued>,
    pub(super) inbox: mpsc::Sender<Queued>,
    pub(super) inbound: Budget,
    closed: watch::Sender<Option<Closed>>,
}

impl ConnectionLink {
    /// Reports the reason of the close to the owner. Call it last.
    pub(super) fn close(self, reason: Closed) {
        self.closed.send_replace(Some(reason));
    }
}

/// A client's connection to a listener. Does not reconnect. Closes when its receiving half is dropped; frames sent
/// before that are still written while the runtime lives.
pub struct Connection {
    sender: ConnectionSender,
    receiver: ConnectionReceiver,
}

impl Connection {
    pub(super) fn new(limits: &Arc<Limits>) -> (Self, ConnectionLink) {
        let budget = Budget::new(limits.clone());
        let (outbox, outbox_rx) = mpsc::channel(budget.capacity());
        let (inbox, inbox_rx) = mpsc::channel(INBOX_FRAMES);
        let (closed, closed_rx) = watch::channel(None);
        let connection = Self {
            sender: ConnectionSender { outbox, budget },
            receiver: ConnectionReceiver {
                inbox: inbox_rx,
                closed: closed_rx,
            },
        };
        let link = ConnectionLink {
            outbox: outbox_rx,
            inbox,
            inbound: Budget::new(limits.clone()),
            closed,
        };
        (connection, link)
    }

    /// See [`ConnectionSender::send`].
    ///
    /// # Errors
    /// As [`ConnectionSender::send`].
    pub async fn send(&self, frame: Frame) -> Result<(), SendError> {
        self.sender.send(frame).await
    }

    /// See [`ConnectionReceiver::recv`].
    ///
    /// # Errors
    /// As [`ConnectionReceiver::recv`].
    pub async fn recv(&mut self) -> Result<Frame, Closed> {
        self.receiver.recv().await
    }

    /// Splits the connection into halves for two tasks.
    pub fn split(self) -> (ConnectionSender, ConnectionReceiver) {
        (self.sender, self.receiver)
    }
}

/// The sending half of a [`Connection`].
#[derive(Clone)]
pub struct ConnectionSender {
    outbox: mpsc::Sender<Queued>,
    budget: Budget,
}

impl ConnectionSender {
    /// Queues a frame, waiting at most [`Limits::slow_after`] for room. `Ok` means that the frame is queued, not that
    /// it was read.
    ///
    /// # Errors
    /// [`SendError`]; after [`SendError::Slow`] the connection stays open, and the frame is dropped.
    pub async fn send(&self, frame: Frame) -> Result<(), SendError> {
        self.budget.check(&frame)?;
        let admitted = tokio::select! {
            biased;
            admitted = within(self.budget.limits.slow_after, self.budget.admit(frame)) => admitted,
            () = self.outbox.closed() => return Err(SendError::Gone),
        };
        match admitted {
            Some(Some(queued)) => self.enqueue(queued),
            Some(None) => Err(SendError::Gone),
            None => Err(SendError::Slow),
        }
    }

    /// Queues a frame without waiting; fails if there is no room.
    ///
    /// # Errors
    /// As [`Self::send`].
    pub fn try_send(&self, frame: Frame) -> Result<(), SendError> {
        self.budget.check(&frame)?;
        if self.outbox.is_closed() {
            return Err(SendError::Gone);
        }
        self.enqueue(self.budget.try_admit(frame)?)
    }

    fn enqueue(&self, queued: Queued) -> Result<(), SendError> {
        self.outbox.try_send(queued).map_err(|_| SendError::Gone)
    }
}

/// The receiving half of a [`Connection`]; dropping it closes the connection.
pub struct ConnectionReceiver {
    inbox: mpsc::Receiver<Queued>,
    closed: watch::Receiver<Option<Closed>>,
}

impl ConnectionReceiver {
    /// Returns the next frame. Cancel safe.
    ///
    /// # Errors
    /// [`Closed`] once the connection has ended and all frames received before are taken; again on every further call.
    pub async fn recv(&mut self) -> Result<Frame, Closed> {
        match self.inbox.recv().await {
            Some(queued) => Ok(queued.frame),
            None => Err(self.closed.borrow().unwrap_or(Closed::ByServer)),
        }
    }
}
