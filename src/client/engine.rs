//! The client of an engine's scheduler, and the guard of one running request.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore};

use crate::shared::{AbandonOnRanks, Shared, SlotState, TIMEOUT_MAX, TRANSFER_KIB};
use crate::transfer::{LoadGuard, PendingTransfer, StoreGuard};
use kvferry_protocol::{
    CancelStores, ErrorCode, Hello, Lookup, Message, Reset, Role, Status, StatusAnswer,
};
use kvferry_transport::{Address, Client, ClientSettings, Failure, Limits, Transport};
use kvferry_types::{
    Answer, EngineId, LookupAnswer, PageHashes, PagesBelow, Part, Replica, Request, RequestId,
    ResetScope, SlotId,
};

/// The leader to connect to, and the identity of the engine.
#[derive(Clone)]
pub struct EngineSettings {
    /// Address of the leader.
    pub address: Address,
    /// Identity of the engine: 16 random bytes, drawn at each start, the same as that of its ranks.
    pub engine: EngineId,
    /// The instance of the engine beside the leader.
    pub replica: Replica,
    /// Name for logs.
    pub name: String,
    /// Limits of the connection.
    pub limits: Limits,
    /// First id of the client's requests. It must be above every id that a client of the same engine has used, because
    /// the leader answers a known id as before. Default: the microseconds since 1970.
    pub first_id: RequestId,
    /// Stops the copies of a load that is dropped, or of a load or a store that is late. `None`: their pages are given
    /// back when the leader reports their end.
    pub ranks: Option<Arc<dyn AbandonOnRanks>>,
}

impl EngineSettings {
    /// Replica 0 with the default limits, and without access to its ranks.
    pub fn new(address: Address, engine: EngineId, name: impl Into<String>) -> Self {
        Self {
            address,
            engine,
            replica: Replica(0),
            name: name.into(),
            limits: Limits::default(),
            first_id: RequestId(first_id()),
            ranks: None,
        }
    }
}

/// Microseconds since 1970; 1 if the clock is set to before. No client makes more than a request each microsecond, so
/// that the ids of a later client are above those of an earlier one, unless the clock is set back.
#[expect(
    clippy::disallowed_methods,
    reason = "ids must grow over the lives of clients, which no monotonic clock does"
)]
fn first_id() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(1, |since| u64::try_from(since.as_micros()).unwrap_or(1))
}

/// The pages of a prompt, for a lookup.
#[derive(Debug, Clone)]
pub struct PromptPages {
    /// The engine's number of the running request.
    pub slot: SlotId,
    /// Namespace of the pages: salt, tenant, adapter.
    pub namespace: Vec<u8>,
    /// Hashes of the prompt, one for each unit of the registered `hash_tokens`: for a model with one group, one for each
    /// full page.
    pub hashes: PageHashes,
    /// Units, from the first one on, whose pages the engine has itself, in every group.
    pub have_pages: u32,
    /// Largest end of a hit, in units; `None` for all of them.
    pub limit_pages: Option<u32>,
}

/// The pages of a store.
#[derive(Debug, Clone)]
pub struct StoredPages {
    /// Number of the request, drawn by [`EngineClient::next_id`] for this store alone and after the guard's last
    /// lookup, so that the ranks can get it before; drawn by the store when it is absent. A number from before that
    /// lookup is refused as `unknown_slot`.
    pub id: Option<RequestId>,
    /// The pages, and the device pages that hold them.
    pub parts: Vec<Part>,
    /// Position of the first, and hashes that the lookup did not name.
    pub more: Option<(u32, PageHashes)>,
}

/// The connection of an engine's scheduler to its leader. Cheap to clone. An engine has one client at a time: a second
/// one with the same identity takes the first one's place at the leader, and starts only after the requests of the
/// first one were finished.
///
/// When the last clone is dropped, the stores in flight are cancelled and the open requests are finished, in the
/// background and without waiting for a hold to expire. Loads in flight keep their device pages until their end is
/// known. Then the connection closes, whether guards of the client live or not: [`EngineClient::closed`] waits for
/// that.
#[derive(Debug, Clone)]
pub struct EngineClient {
    shared: Arc<Shared>,
    _close: Arc<CloseOnDrop>,
}

#[derive(Debug)]
struct CloseOnDrop(Arc<Shared>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        let shared = Arc::clone(&self.0);
        let slots: Vec<(SlotId, SlotState)> = shared
            .slots()
            .iter()
            .map(|(slot, state)| (*slot, *state))
            .collect();
        for (slot, state) in slots {
            if let SlotState::Guarded(guard) = state {
                shared.finish_later(slot, guard);
            }
        }
        // Drawn after every guard has lost its slot, so that it is above the ids of their stores.
        let cancel = shared.next_id();
        // Guards may live on, so that they do not close the connection.
        drop(self.0.runtime.spawn(async move {
            shared.repeat_cancel(cancel).await;
            shared.idle().await;
            shared.client.close();
        }));
    }
}

impl EngineClient {
    /// Connects in the background. Must be called within a Tokio runtime, on which the guards clean up.
    pub fn start(transport: Arc<dyn Transport>, settings: EngineSettings) -> Self {
        let hello = Hello {
            engine: settings.engine.0,
            replica: settings.replica.0,
            ..Hello::new(Role::Engine, settings.name)
        };
        let client = ClientSettings {
            address: settings.address,
            hello,
            limits: settings.limits,
        };
        let body_bytes = client.limits.body_bytes;
        let shared = Arc::new(Shared {
            body_bytes,
            client: Client::without_incoming(transport, client),
            runtime: Handle::current(),
            ranks: settings.ranks,
            transfers: Arc::new(Semaphore::new(TRANSFER_KIB as usize)),
            next_id: AtomicU64::new(settings.first_id.0),
            slots: Mutex::default(),
            finished: Notify::new(),
        });
        Self {
            _close: Arc::new(CloseOnDrop(Arc::clone(&shared))),
            shared,
        }
    }

    /// Waits until the connection has closed, which it does some time after the last clone of the client was dropped.
    /// Has no deadline, as the wait for the end of a transfer has none.
    pub fn closed(&self) -> impl Future<Output = ()> + Send + use<> {
        let client = self.shared.client.clone();
        async move { client.closed().await }
    }

    /// Draws a number, above those of all earlier requests and below those of all later ones: for a step of work that
    /// the ranks report as written, and that loads wait for.
    pub fn next_id(&self) -> RequestId {
        self.shared.next_id()
    }

    /// Finds the stored pages of a prompt, and holds them for as long as the guard lives, at most 30 s.
    ///
    /// # Errors
    /// `invalid` if this client has a guard for the slot already, `busy` while the slot's earlier request is being finished;
    /// otherwise those of the leader.
    pub async fn lookup(
        &self,
        prompt: PromptPages,
        timeout: Duration,
    ) -> Result<RequestGuard, Failure> {
        let slot = prompt.slot;
        let number = self.shared.open(slot)?;
        // The guard exists before the first await: a lookup that is dropped while it waits is finished, too.
        let mut guard = RequestGuard {
            shared: Arc::clone(&self.shared),
            slot,
            number,
            found: NOTHING_FOUND,
        };
        guard
            .lookup(
                prompt.namespace,
                prompt.hashes,
                (prompt.have_pages, prompt.limit_pages),
                timeout,
            )
            .await?;
        Ok(guard)
    }

    /// Stops the stores in flight of a slot, or of all slots. Once this is answered, none of their pages is read.
    ///
    /// # Errors
    /// `deadline` while copies still run.
    pub async fn cancel_stores(
        &self,
        slot: Option<SlotId>,
        timeout: Duration,
    ) -> Result<u32, Failure> {
        let request = Request::CancelStores { slot };
        let id = self.shared.next_id();
        let requested = self.shared.request::<CancelStores>(id, request, timeout);
        let answer = requested.await?;
        Ok(answer.stores)
    }

    /// Removes the pages of `scope` from every tier, and returns their number.
    ///
    /// # Errors
    /// `leased` when a lookup or a load holds one of the pages; nothing is removed then.
    pub async fn reset(&self, scope: ResetScope, timeout: Duration) -> Result<u32, Failure> {
        let (id, request) = (self.shared.next_id(), Request::Reset { scope, tier: None });
        let answer = self.shared.request::<Reset>(id, request, timeout).await?;
        Ok(answer.pages)
    }

    /// Requests the state of the leader: see [`crate::AdminClient::status`].
    ///
    /// # Errors
    /// `deadline` when no leader answers within `timeout`.
    pub async fn status(&self, check: bool, timeout: Duration) -> Result<StatusAnswer, Failure> {
        self.shared.client.call(Status { check }, timeout).await
    }

    /// Sends a request of the engine under an id of its own, for schedulers that keep the state of their requests
    /// themselves. No guard gives anything back. Ids must grow over all requests of the engine: a client whose requests
    /// are made here makes none by the other methods before its last.
    ///
    /// # Errors
    /// The errors of the leader, and `deadline` when it did not answer in time. Only with [`Failure::over`] may the pages of
    /// a load or a store be used again.
    pub async fn request(
        &self,
        id: RequestId,
        request: Request,
        timeout: Duration,
    ) -> Result<Answer, Failure> {
        // Ids that are drawn later, such as that of the cancel at the end, are above it.
        self.shared
            .next_id
            .fetch_max(id.0.saturating_add(1), Ordering::Relaxed);
        let message = Message::from(request);
        let kind = message.kind();
        let answer = self.shared.client.request_as(id, message, timeout).await?;
        let typed = answer.answer();
        typed.ok_or_else(|| Failure::unexpected(kind, &answer))
    }
}

/// A running request, and the pages that its lookup holds.
///
/// Dropping the guard finishes the request in the background, which gives the holds back at once. Loads and stores that
/// were begun through it go on.
#[derive(Debug)]
pub struct RequestGuard {
    shared: Arc<Shared>,
    slot: SlotId,
    /// Tells this guard from a later one of the slot.
    number: u64,
    found: LookupAnswer,
}

/// The holds of a guard before its first lookup, and while they are unknown.
const NOTHING_FOUND: LookupAnswer = LookupAnswer {
    hit_pages: 0,
    pending: false,
    below_pages: PagesBelow { disk: 0, remote: 0 },
    ready_in_ms: None,
    declined_pages: 0,
};

impl RequestGuard {
    /// The engine's number of the request.
    pub fn slot(&self) -> SlotId {
        self.slot
    }

    /// Pages after the engine's own that can be loaded.
    pub fn hit_pages(&self) -> u32 {
        self.found.hit_pages
    }

    /// Whether the page after those is being stored, so that a later lookup may find more.
    pub fn is_pending(&self) -> bool {
        self.found.pending
    }

    /// Repeats the lookup, which replaces the holds of the one before. See [`PromptPages`] for the fields.
    ///
    /// # Errors
    /// The errors of the leader. The holds are unknown then, as when the future is dropped: [`Self::hit_pages`] is 0, and the
    /// guard still gives them back.
    pub async fn lookup(
        &mut self,
        namespace: Vec<u8>,
        hashes: PageHashes,
        (have_pages, limit_pages): (u32, Option<u32>),
        timeout: Duration,
    ) -> Result<LookupAnswer, Failure> {
        let Some(id) = self.id() else {
            return Err(self.client_dropped());
        };
        let request = Request::Lookup {
            slot: self.slot,
            namespace,
            hashes,
            have_pages,
            limit_pages,
        };
        // From now on the leader may hold other pages for the slot, whether this call completes or not.
        self.found = NOTHING_FOUND;
        let requested = self
            .shared
            .request::<Lookup>(id, request, timeout.min(TIMEOUT_MAX));
        self.found = requested.await?;
        Ok(self.found)
    }

    /// Draws the id of a request; `None` after the client was dropped.
    fn id(&self) -> Option<RequestId> {
        self.shared.id_of_guard(self.slot, self.number)
    }

    fn client_dropped(&self) -> Failure {
        let text = format!(
            "the client was dropped, and finishes {} by itself",
            self.slot
        );
        Failure {
            retry: false,
            ..Failure::unsent(ErrorCode::Draining, text)
        }
    }

    /// Begins to copy held pages to device pages. `after` is the last number of work that may write to these device
    /// pages; 0 without such work. A load of several parts is carried out as a whole.
    ///
    /// The guard keeps `pages`, the owner of the device pages, until nothing writes to them any longer.
    pub fn load<P: Send + 'static>(
        &self,
        parts: Vec<Part>,
        after: RequestId,
        pages: P,
        timeout: Duration,
    ) -> LoadGuard<P> {
        let request = Request::Load {
            slot: self.slot,
            parts,
            after,
        };
        match self.id() {
            Some(id) => PendingTransfer::begin(&self.shared, id, request, pages, timeout),
            None => PendingTransfer::refused(self.shared.next_id(), self.client_dropped(), pages),
        }
    }

    /// Begins to copy device pages to host memory. Each rank's pages are read once that rank has reported
    /// [`StoreGuard::request`] as written.
    ///
    /// The guard keeps `pages`, the owner of the device pages, until nothing reads them any longer.
    pub fn store<P: Send + 'static>(
        &self,
        stored: StoredPages,
        pages: P,
        timeout: Duration,
    ) -> StoreGuard<P> {
        let request = Request::Store {
            slot: self.slot,
            parts: stored.parts,
            more: stored.more,
            after: RequestId(0),
        };
        match self.id() {
            Some(id) => {
                let id = stored.id.unwrap_or(id);
                PendingTransfer::begin(&self.shared, id, request, pages, timeout)
            }
            None => PendingTransfer::refused(self.shared.next_id(), self.client_dropped(), pages),
        }
    }

    /// Ends the request and waits until the leader has confirmed. Dropping the returned future does not stop it.
    ///
    /// # Errors
    /// The leader's, if it refuses for good, or does not answer for [`FINISH_LIMIT`]; `draining` after the last clone of the
    /// client was dropped, which finishes the request by itself.
    pub async fn finish(self) -> Result<(), Failure> {
        let Some(finishing) = self.shared.finish(self.slot, self.number) else {
            return Err(self.client_dropped());
        };
        match self.shared.runtime.spawn(finishing).await {
            Ok(finished) => finished,
            Err(error) => Err(Failure::new(ErrorCode::Draining, error.to_string())),
        }
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.shared.finish_later(self.slot, self.number);
    }
}
