//! The state that an engine's client and its guards share.

use std::collections::BTreeSet;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use kvferry_protocol::{Call, Finish};
use kvferry_transport::{Client, Failure};
use kvferry_types::{Request, RequestId, SlotId};

/// Longest time for which a dropped guard, or a dropped client, repeats its `finish`. The leader forgets an engine
/// without a connection after 10 s.
pub const FINISH_LIMIT: Duration = Duration::from_secs(60);
/// Deadline of one `finish`, and of the `cancel_stores` of a dropped client.
pub(crate) const FINISH_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause before a `finish` is repeated that was refused with a retryable error.
const FINISH_PAUSE: Duration = Duration::from_millis(50);

/// A future of [`AbandonOnRanks`].
pub type Abandoned = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Stops the copies of a request on every rank of the engine.
pub trait AbandonOnRanks: Send + Sync + 'static {
    /// Completes when the worker of every rank has confirmed that nothing is copied for the request, now or later:
    /// [`crate::RankSession::abandon`] on each.
    fn abandon(&self, request: RequestId) -> Abandoned;
}

impl<F, A> AbandonOnRanks for F
where
    F: Fn(RequestId) -> A + Send + Sync + 'static,
    A: Future<Output = ()> + Send + 'static,
{
    fn abandon(&self, request: RequestId) -> Abandoned {
        Box::pin(self(request))
    }
}

/// State of the client that its guards share.
pub(crate) struct Shared {
    pub(crate) client: Client,
    pub(crate) runtime: Handle,
    pub(crate) ranks: Option<Arc<dyn AbandonOnRanks>>,
    pub(crate) transfers: Arc<Semaphore>,
    pub(crate) next_id: AtomicU64,
    /// Slots that the leader may know.
    pub(crate) open: Mutex<BTreeSet<SlotId>>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared")
            .field("client", &self.client)
            .finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) fn next_id(&self) -> RequestId {
        RequestId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) fn open(&self) -> std::sync::MutexGuard<'_, BTreeSet<SlotId>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) async fn request<C: Call>(
        &self,
        request: Request,
        timeout: Duration,
    ) -> Result<C::Answer, Failure> {
        let answer = self
            .client
            .request_as(self.next_id(), request.into(), timeout)
            .await?;
        C::answer(answer).map_err(|other| Failure::unexpected(C::KIND, &other))
    }

    /// Repeats a `finish` until the leader has accepted it, at most [`FINISH_LIMIT`]. The id is drawn here, so that
    /// requests of the slot that were sent before have no effect if they arrive after it.
    pub(crate) fn finish(
        self: &Arc<Self>,
        slot: SlotId,
    ) -> impl Future<Output = Result<(), Failure>> + use<> {
        let (shared, id) = (Arc::clone(self), self.next_id());
        async move {
            let until = Instant::now() + FINISH_LIMIT;
            let finish = Finish { slot: slot.0 };
            loop {
                let finished = shared
                    .client
                    .call_as(id, finish, FINISH_TIMEOUT, Duration::ZERO);
                let failure = match finished.await {
                    Ok(_) => break,
                    Err(failure) => failure,
                };
                if !failure.retry || Instant::now() >= until {
                    tracing::warn!(%slot, %failure, "a request was not finished");
                    shared.open().remove(&slot);
                    return Err(failure);
                }
                tokio::time::sleep(FINISH_PAUSE).await;
            }
            shared.open().remove(&slot);
            Ok(())
        }
    }

    /// Finishes a slot in the background, unless that was done before.
    pub(crate) fn finish_later(self: &Arc<Self>, slot: SlotId) {
        drop(self.runtime.spawn(self.finish(slot)));
    }
}
