//! The byte bounds of the queues of every transport.
//!
//! Semaphores bound the bytes: a queued frame holds its permits until the next stage has taken it over. The channels'
//! capacity follows from that bound and never refuses a frame.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{Frame, Limits, SendError};

/// Most frames that a client's connection has read and its owner has not taken; [`Limits::pending_bytes`] bounds their
/// bytes.
pub(super) const INBOX_FRAMES: usize = 64;

/// A bound in bytes on the frames of one queue.
#[derive(Clone)]
pub(super) struct Budget {
    semaphore: Arc<Semaphore>,
    pub(super) limits: Arc<Limits>,
}

impl Budget {
    pub(super) fn new(limits: Arc<Limits>) -> Self {
        Self {
            semaphore: Arc::new(Semaphore::new(limits.pending_bytes)),
            limits,
        }
    }

    fn cost(&self, frame: &Frame) -> u32 {
        let bytes = frame.header.len() + frame.body.len() + self.limits.overhead_bytes();
        u32::try_from(bytes.min(self.limits.pending_bytes)).unwrap_or(u32::MAX)
    }

    /// Waits for room. A queue that is dropped gives its permits back, which ends the wait. Where frames keep their permits
    /// beyond the queue, as those of a [`super::ServerEvents`], the caller must watch for the end of the other side.
    pub(super) async fn admit(&self, frame: Frame) -> Option<Queued> {
        let cost = self.cost(&frame);
        let permit = self.semaphore.clone().acquire_many_owned(cost).await.ok()?;
        Some(Queued { frame, permit })
    }

    pub(super) fn try_admit(&self, frame: Frame) -> Result<Queued, SendError> {
        let cost = self.cost(&frame);
        let permit = self.semaphore.clone().try_acquire_many_owned(cost);
        match permit {
            Ok(permit) => Ok(Queued { frame, permit }),
            Err(_) => Err(SendError::Slow),
        }
    }

    pub(super) fn check(&self, frame: &Frame) -> Result<(), SendError> {
        let parts = [
            ("header", frame.header.len(), self.limits.header_bytes),
            ("body", frame.body.len(), self.limits.body_bytes),
        ];
        match parts.into_iter().find(|(_, bytes, limit)| bytes > limit) {
            Some((part, bytes, limit)) => Err(SendError::TooLong { part, bytes, limit }),
            None => Ok(()),
        }
    }

    /// Most frames that fit the budget, plus one for [`Outgoing::Close`](super::listener::Outgoing::Close).
    pub(super) fn capacity(&self) -> usize {
        self.limits.pending_bytes / self.limits.overhead_bytes() + 1
    }
}

/// A frame in a queue, with the permits that it holds there.
pub(super) struct Queued {
    pub(super) frame: Frame,
    pub(super) permit: OwnedSemaphorePermit,
}
