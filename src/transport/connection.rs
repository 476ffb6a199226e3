//! The client end of a connection. Over TLS and in memory, a task of the transport moves frames between two bounded queues
//! and the server. Over `ipc://` the owner's task uses a DEALER itself, which saves two wake-ups for each request. See
//! [`Limits`] for the sum of the bytes.

use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use super::clock::within;
use super::dealer::Dealer;
use super::queue::{Budget, INBOX_FRAMES, Queued};
use super::{Closed, Frame, Limits, SendError};

/// The transport task's side of a [`Connection`] with queues.
pub(super) struct TaskSide {
    pub(super) outbox: mpsc::Receiver<Queued>,
    pub(super) inbox: mpsc::Sender<Queued>,
    pub(super) inbound: Budget,
    closed: watch::Sender<Option<Closed>>,
}

impl TaskSide {
    /// Reports the reason of the close to the owner. Call it last.
    pub(super) fn close(self, reason: Closed) {
        self.closed.send_replace(Some(reason));
    }
}

/// A client's connection to a listener. Does not reconnect. Closes when it is dropped. Frames sent before that are still
/// written while the runtime lives: over TLS for at most 5 s, over a DEALER until the server has taken them or is gone.
pub struct Connection(ClientEnd);

enum ClientEnd {
    Dealer(Box<Dealer>),
    Queues(Queues),
}

impl Connection {
    /// A connection whose task moves frames between two queues and the server.
    pub(super) fn queued(limits: &Arc<Limits>) -> (Self, TaskSide) {
        let budget = Budget::new(limits.clone());
        let (outbox, outbox_rx) = mpsc::channel(budget.capacity());
        let (inbox, inbox_rx) = mpsc::channel(INBOX_FRAMES);
        let (closed, closed_rx) = watch::channel(None);
        let queues = Queues {
            outbox,
            budget,
            inbox: inbox_rx,
            closed: closed_rx,
        };
        let task_side = TaskSide {
            outbox: outbox_rx,
            inbox,
            inbound: Budget::new(limits.clone()),
            closed,
        };
        (Self(ClientEnd::Queues(queues)), task_side)
    }

    /// A connection that sends to a DEALER and reads from it, without a task of the transport.
    pub(super) fn dealer(dealer: Dealer) -> Self {
        Self(ClientEnd::Dealer(Box::new(dealer)))
    }

    /// Queues a frame, waiting at most [`Limits::slow_after`] for room. `Ok` means that the frame is queued, not that
    /// it was read. Cancelled while it waits, it drops the frame and keeps what was received.
    ///
    /// # Errors
    /// [`SendError`]; after [`SendError::Slow`] the connection stays open, and the frame is dropped.
    pub async fn send(&mut self, frame: Frame) -> Result<(), SendError> {
        match &mut self.0 {
            ClientEnd::Dealer(dealer) => dealer.send(frame).await,
            ClientEnd::Queues(queues) => queues.send(frame).await,
        }
    }

    /// Returns the next frame. Cancel safe.
    ///
    /// # Errors
    /// [`Closed`] once the connection has ended and all frames received before are taken; again on every further call. Over
    /// a DEALER, frames that are not read when a write fails are lost: a send reads only what the runtime has reported, as
    /// far as there is room.
    pub async fn recv(&mut self) -> Result<Frame, Closed> {
        match &mut self.0 {
            ClientEnd::Dealer(dealer) => dealer.recv().await,
            ClientEnd::Queues(queues) => queues.recv().await,
        }
    }
}

/// The owner's side of a [`TaskSide`].
struct Queues {
    outbox: mpsc::Sender<Queued>,
    budget: Budget,
    inbox: mpsc::Receiver<Queued>,
    closed: watch::Receiver<Option<Closed>>,
}

impl Queues {
    async fn send(&mut self, frame: Frame) -> Result<(), SendError> {
        self.budget.check(&frame)?;
        let admitted = tokio::select! {
            biased;
            admitted = within(self.budget.limits.slow_after, self.budget.admit(frame)) => admitted,
            () = self.outbox.closed() => return Err(SendError::Gone),
        };
        match admitted {
            Some(Some(queued)) => self.outbox.try_send(queued).map_err(|_| SendError::Gone),
            Some(None) => Err(SendError::Gone),
            None => Err(SendError::Slow),
        }
    }

    async fn recv(&mut self) -> Result<Frame, Closed> {
        match self.inbox.recv().await {
            Some(queued) => Ok(queued.frame),
            None => Err(self.closed.borrow().unwrap_or(Closed::ByServer)),
        }
    }
}
