//! Credits for mailboxes. An actor's mailbox has no limit of its own: a sender takes a credit before each message, and
//! the credit returns when the message has been handled.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;

use kvferry_transport::{Server, ServerEvents};

/// Batches that each sending task may have in an actor's mailbox. Batches of a server are bounded in bytes as well: see
/// [`ServerEvents`].
pub(super) const MAILBOX_CREDITS: usize = 8;

/// Time limit for the close of a server's connections.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);

/// Sends the events of a server to an actor, one credit per batch, until it is stopped.
#[derive(Debug)]
pub(super) struct MailboxPump {
    stop: Arc<Notify>,
    task: JoinHandle<()>,
}

impl MailboxPump {
    /// `deliver` receives a batch, or `None` when the server has ended by itself; it returns false when the actor has
    /// stopped.
    pub(super) fn start(
        mut server: Server,
        deliver: impl Fn(Option<Credited<ServerEvents>>) -> bool + Send + 'static,
    ) -> Self {
        let stop = Arc::new(Notify::new());
        let stopped = Arc::clone(&stop);
        let task = tokio::spawn(async move {
            let credits = Credits::new();
            let mut stopped = pin!(stopped.notified());
            loop {
                let events = tokio::select! {
                    biased;
                    () = &mut stopped => break,
                    events = server.next() => events,
                };
                let batch = match events {
                    Some(events) => credits.attach(events).await,
                    None => None,
                };
                let ended = batch.is_none();
                if !deliver(batch) || ended {
                    break;
                }
            }
            server.close().await;
        });
        Self { stop, task }
    }

    /// Stops the server and waits until its socket is closed, for at most 2 s.
    pub(super) async fn stop(&mut self) {
        self.stop.notify_one();
        if tokio::time::timeout(CLOSE_LIMIT, &mut self.task)
            .await
            .is_err()
        {
            tracing::warn!("connections did not close in {CLOSE_LIMIT:?}");
        }
    }
}

/// Credits of one mailbox and sending task.
#[derive(Debug, Clone)]
pub(super) struct Credits(Arc<Semaphore>);

/// A message with its credit, which returns when this value is dropped.
#[derive(Debug)]
pub(super) struct Credited<T> {
    pub(super) item: T,
    _credit: OwnedSemaphorePermit,
}

impl Credits {
    pub(super) fn new() -> Self {
        Self(Arc::new(Semaphore::new(MAILBOX_CREDITS)))
    }

    /// Waits for a credit. `None` never occurs: the semaphore is never closed.
    pub(super) async fn attach<T>(&self, item: T) -> Option<Credited<T>> {
        let credit = Arc::clone(&self.0).acquire_owned().await.ok()?;
        Some(Credited {
            item,
            _credit: credit,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_feeder_waits_until_a_message_was_handled() {
        let credits = Credits::new();
        let mut waiting = Vec::new();
        for item in 0..MAILBOX_CREDITS {
            waiting.push(credits.attach(item).await.expect("a credit"));
        }
        let mut next = Box::pin(credits.attach(99));
        let early = futures_poll(&mut next);
        assert!(early.is_none(), "all credits are out");
        waiting.pop();
        assert_eq!(next.await.expect("a credit").item, 99);
    }

    fn futures_poll<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match std::pin::Pin::new(future).poll(&mut context) {
            std::task::Poll::Ready(output) => Some(output),
            std::task::Poll::Pending => None,
        }
    }
}
