//! The client end of a connection: of a DEALER, or of two bounded queues and a task of the transport.

use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use super::clock::within;
use super::dealer::Dealer;
use super::queue::{Budget, Queued};
use super::{Closed, Frame, Limits, SendError};

/// Most frames queued for [`Connection::recv`]; their bytes are bounded by [`Limits::pending_bytes`].
pub(super) const INBOX_FRAMES: usize = 64;

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

/// A client's connection to a listener. Does not reconnect. Closes when it is dropped; frames sent before that are still
/// written while the runtime lives.
pub struct Connection(Link);

enum Link {
    Dealer(Box<Dealer>),
    Queues(Queues),
}

impl Connection {
    /// A connection whose task moves frames between two queues and the server.
    pub(super) fn queued(limits: &Arc<Limits>) -> (Self, ConnectionLink) {
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
        let link = ConnectionLink {
            outbox: outbox_rx,
            inbox,
            inbound: Budget::new(limits.clone()),
            closed,
        };
        (Self(Link::Queues(queues)), link)
    }

    /// A connection whose owner's task moves the frames itself.
    pub(super) fn dealer(dealer: Dealer) -> Self {
        Self(Link::Dealer(Box::new(dealer)))
    }

    /// Queues a frame, waiting at most [`Limits::slow_after`] for room. `Ok` means that the frame is queued, not that
    /// it was read.
    ///
    /// # Errors
    /// [`SendError`]; after [`SendError::Slow`] the connection stays open, and the frame is dropped.
    pub async fn send(&mut self, frame: Frame) -> Result<(), SendError> {
        match &mut self.0 {
            Link::Dealer(dealer) => dealer.send(frame).await,
            Link::Queues(queues) => queues.send(frame).await,
        }
    }

    /// Returns the next frame. Cancel safe.
    ///
    /// # Errors
    /// [`Closed`] once the connection has ended and all frames received before are taken; again on every further call.
    pub async fn recv(&mut self) -> Result<Frame, Closed> {
        match &mut self.0 {
            Link::Dealer(dealer) => dealer.recv().await,
            Link::Queues(queues) => queues.recv().await,
        }
    }
}

/// The owner's side of a [`ConnectionLink`].
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
