//! The state that an engine's client and its guards share.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

use kvferry_protocol::limits::DEADLINE_MAX_MS;
use kvferry_protocol::{Call, CancelStores, ErrorCode, Finish};
use kvferry_transport::{Client, Failure, answer_of};
use kvferry_types::{Request, RequestId, SlotId};

/// Longest time for which a dropped guard, or a dropped client, repeats its `finish`. Longer than any request that the
/// guard made can wait, 120 s: no lookup opens the slot after that, unless the leader was stopped for longer and reads
/// it from a connection that has broken meanwhile. The slot then stays until it is looked up again, its holds for 30 s.
/// The leader forgets an engine without a connection after 10 s.
pub const FINISH_LIMIT: Duration = Duration::from_secs(180);
/// Longest timeout of a request: a leader cuts later deadlines to it.
pub(crate) const TIMEOUT_MAX: Duration = Duration::from_millis(DEADLINE_MAX_MS as u64);
/// Deadline of one `finish`, and of the `cancel_stores` of a dropped client.
pub(crate) const FINISH_TIMEOUT: Duration = Duration::from_secs(5);
/// Slots of one client that are open or being finished, at most: as many as a leader keeps for an engine. 24 bytes
/// each, and about 1 KiB for the task of each that is being finished.
pub const SLOTS_MAX: usize = 65_536;
/// Credits of a connection, in KiB, that loads and stores may use. The other 8 MiB, and 128 requests, are for lookups,
/// `finish` and `cancel_stores`, which must pass while every transfer waits.
pub(crate) const TRANSFER_KIB: u32 = 56 * 1024;
/// Pause before the `cancel_stores` of a dropped client is repeated.
const CANCEL_PAUSE: Duration = Duration::from_millis(500);
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
    /// [`crate::RankSession::abandon`] on each. After an error the pages stay in use until the leader reports their
    /// end.
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
    /// Longest body of a message on this connection.
    pub(crate) body_bytes: usize,
    /// Free KiB of [`TRANSFER_KIB`].
    pub(crate) transfers: Arc<Semaphore>,
    pub(crate) next_id: AtomicU64,
    /// Slots that the leader may know, at most [`SLOTS_MAX`].
    pub(crate) slots: Mutex<BTreeMap<SlotId, SlotState>>,
    /// Notified when a slot is finished.
    pub(crate) finished: Notify,
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

/// True if a `finish` or a `cancel_stores` can succeed when it is repeated, under a new id after `stale_request`.
fn may_repeat(failure: &Failure) -> bool {
    failure.retry || failure.code == ErrorCode::StaleRequest
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
        id: RequestId,
        request: Request,
        timeout: Duration,
    ) -> Result<C::Answer, Failure> {
        let answer = self.client.request_as(id, request.into(), timeout).await?;
        answer_of::<C>(answer)
    }

    /// Draws the id of a request of this guard; `None` if the slot is no longer the guard's. The id is below that of
    /// the slot's `finish`.
    pub(crate) fn id_of_guard(&self, slot: SlotId, guard: u64) -> Option<RequestId> {
        let slots = self.slots();
        let guarded = slots.get(&slot) == Some(&SlotState::Guarded(guard));
        guarded.then(|| self.next_id())
    }

    /// Repeats a `finish` until the leader has accepted it, at most [`FINISH_LIMIT`]; `None` if the slot is no longer
    /// this guard's. The id is drawn here, so that it is above those of all requests that were made through the guard.
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
            shared.finished.notify_waiters();
            finished
        })
    }

    /// Repeats a `finish` under its id, because the leader may have carried it out already. An id that became too old
    /// while it waited among many others is replaced.
    async fn repeat_finish(&self, mut id: RequestId, slot: SlotId) -> Result<(), Failure> {
        let until = Instant::now() + FINISH_LIMIT;
        let finish = Finish { slot: slot.0 };
        loop {
            let finished = self
                .client
                .call_as(id, finish, FINISH_TIMEOUT, Duration::ZERO);
            let Err(failure) = finished.await else {
                return Ok(());
            };
            if !may_repeat(&failure) || Instant::now() >= until {
                tracing::warn!(%slot, %failure, "a request was not finished");
                return Err(failure);
            }
            if failure.code == ErrorCode::StaleRequest {
                id = self.next_id();
            }
            tokio::time::sleep(FINISH_PAUSE).await;
        }
    }

    /// Cancels all stores, until the leader has confirmed, at most [`FINISH_LIMIT`]. Each attempt has an id of its own,
    /// because a leader answers a known id as before.
    pub(crate) async fn repeat_cancel(&self, mut id: RequestId) {
        let until = Instant::now() + FINISH_LIMIT;
        let cancel = CancelStores { slot: None };
        loop {
            let cancelled = self
                .client
                .call_as(id, cancel, FINISH_TIMEOUT, Duration::ZERO);
            let Err(failure) = cancelled.await else {
                return;
            };
            let ended = self.transfers.available_permits() == TRANSFER_KIB as usize;
            if !may_repeat(&failure) || ended || Instant::now() >= until {
                tracing::debug!(%failure, "the stores of a closed client were not cancelled");
                return;
            }
            tokio::time::sleep(CANCEL_PAUSE).await;
            id = self.next_id();
        }
    }

    /// Waits until every slot is finished, and the end of every load and store is known. Later ones are refused. Has no
    /// deadline, as the wait for a transfer's end has none: its pages are in use until then.
    pub(crate) async fn idle(&self) {
        loop {
            let finished = self.finished.notified();
            if self.slots().is_empty() {
                break;
            }
            finished.await;
        }
        // Keeps the credits, so that no transfer gets them before the semaphore is closed.
        if let Ok(all) = self.transfers.acquire_many(TRANSFER_KIB).await {
            all.forget();
        }
        self.transfers.close();
    }

    /// Finishes a slot in the background, unless it is no longer this guard's.
    pub(crate) fn finish_later(self: &Arc<Self>, slot: SlotId, guard: u64) {
        if let Some(finishing) = self.finish(slot, guard) {
            drop(self.runtime.spawn(finishing));
        }
    }
}
