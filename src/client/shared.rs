//! The state that an engine's client and its guards share.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use kvferry_protocol::{Call, ErrorCode, Finish};
use kvferry_transport::{Client, Failure};
use kvferry_types::{Request, RequestId, SlotId};

/// Longest time for which a dropped guard, or a dropped client, repeats its `finish`. The leader forgets an engine
/// without a connection after 10 s.
pub const FINISH_LIMIT: Duration = Duration::from_secs(60);
/// Deadline of one `finish`, and of the `cancel_stores` of a dropped client.
pub(crate) const FINISH_TIMEOUT: Duration = Duration::from_secs(5);
/// Slots of one client that are open or being finished, at most: as many as a leader keeps for an engine. 24 bytes each,
/// and about 1 KiB for the task of each that is being finished.
pub const SLOTS_MAX: usize = 65_536;
/// Pause before a `finish` is repeated that was refused with a retryable error.
const FINISH_PAUSE: Duration = Duration::from_millis(50);

/// Some rank's session has ended before its worker had confirmed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not every rank has confirmed that nothing is copied")]
pub struct NotConfirmed;

/// A future of [`AbandonOnRanks`].
pub type Abandoned = Pin<Box<dyn Future<Output = Result<(), NotConfirmed>> + Send>>;

/// Stops the copies of a request on every rank of the engine.
pub trait AbandonOnRanks: Send + Sync + 'static {
    /// Completes when the worker of every rank has confirmed that nothing is copied for the request, now or later:
    /// [`crate::RankSession::abandon`] on each. After an error the pages stay in use until the leader reports their end.
    fn abandon(&self, request: RequestId) -> Abandoned;
}

impl<F, A> AbandonOnRanks for F
where
    F: Fn(RequestId) -> A + Send + Sync + 'static,
    A: Future<Output = Result<(), NotConfirmed>> + Send + 'static,
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
    /// Slots that the leader may know, at most [`SLOTS_MAX`].
    pub(crate) slots: Mutex<BTreeMap<SlotId, SlotState>>,
}

/// Why the leader may know a slot. Each guard has a number of its own, because a slot may have a new guard before the
/// former one is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotState {
    /// The guard of this number lives.
    Guarded(u64),
    /// The leader has not confirmed the `finish` of the slot.
    Finishing,
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

    pub(crate) fn slots(&self) -> MutexGuard<'_, BTreeMap<SlotId, SlotState>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a slot for a guard, and returns the guard's number.
    pub(crate) fn open(&self, slot: SlotId) -> Result<u64, Failure> {
        let mut slots = self.slots();
        let (code, text) = match slots.get(&slot) {
            Some(SlotState::Guarded(_)) => (
                ErrorCode::Invalid,
                format!(
                    "{slot} is open: finish its request, or repeat the lookup through its guard"
                ),
            ),
            Some(SlotState::Finishing) => (
                ErrorCode::Busy,
                format!(
                    "the earlier request of {slot} is being finished: retry, or take another slot"
                ),
            ),
            None if slots.len() >= SLOTS_MAX => (
                ErrorCode::Busy,
                format!("{SLOTS_MAX} requests are open or being finished: retry later"),
            ),
            None => {
                let guard = self.next_id().0;
                slots.insert(slot, SlotState::Guarded(guard));
                return Ok(guard);
            }
        };
        Err(Failure::unsent(code, text))
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

    /// True while the slot belongs to this guard.
    pub(crate) fn is_guarded(&self, slot: SlotId, guard: u64) -> bool {
        self.slots().get(&slot) == Some(&SlotState::Guarded(guard))
    }

    /// Repeats a `finish` until the leader has accepted it, at most [`FINISH_LIMIT`]; `None` if the slot is no longer this
    /// guard's. The id is drawn here, so that it is above those of all requests that were made through the guard.
    pub(crate) fn finish(
        self: &Arc<Self>,
        slot: SlotId,
        guard: u64,
    ) -> Option<impl Future<Output = Result<(), Failure>> + use<>> {
        {
            let mut slots = self.slots();
            let state = slots.get_mut(&slot)?;
            if *state != SlotState::Guarded(guard) {
                return None;
            }
            *state = SlotState::Finishing;
        }
        let (shared, id) = (Arc::clone(self), self.next_id());
        Some(async move {
            let finished = shared.repeat_finish(id, slot).await;
            shared.slots().remove(&slot);
            finished
        })
    }

    async fn repeat_finish(&self, id: RequestId, slot: SlotId) -> Result<(), Failure> {
        let until = Instant::now() + FINISH_LIMIT;
        let finish = Finish { slot: slot.0 };
        loop {
            let finished = self
                .client
                .call_as(id, finish, FINISH_TIMEOUT, Duration::ZERO);
            let Err(failure) = finished.await else {
                return Ok(());
            };
            if !failure.retry || Instant::now() >= until {
                tracing::warn!(%slot, %failure, "a request was not finished");
                return Err(failure);
            }
            tokio::time::sleep(FINISH_PAUSE).await;
        }
    }

    /// Finishes a slot in the background, unless it is no longer this guard's.
    pub(crate) fn finish_later(self: &Arc<Self>, slot: SlotId, guard: u64) {
        if let Some(finishing) = self.finish(slot, guard) {
            drop(self.runtime.spawn(finishing));
        }
    }
}
