//! Loads and stores in flight, which own their device pages until nothing touches them any longer.

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::sync::{TryAcquireError, oneshot};
use tokio::time::timeout;

use crate::shared::{Shared, TRANSFER_KIB};
use kvferry_protocol::limits::{PAGE_ITEMS_MAX, PARTS_MAX};
use kvferry_protocol::{Call, ErrorCode, Load, Message, MessageKind, Store};
use kvferry_transport::{Failure, PendingAnswer, answer_of};
use kvferry_types::{Part, Request, RequestId};

/// Time after the deadline of a load or a store in which its answer is awaited before the guard reports a failure.
const GRACE: Duration = Duration::from_secs(2);
/// Least credits of one transfer, in KiB.
const TRANSFER_KIB_MIN: u32 = 64;
/// Loads and stores of one client whose ends are not known, at most, and fewer when their messages are larger than 64
/// KiB in the mean; one more is refused at once. Each has a task with its message, and the connection has a copy: 112
/// MiB in all.
pub const TRANSFERS_MAX: usize = (TRANSFER_KIB / TRANSFER_KIB_MIN) as usize;
/// Bytes of an encoded item of a list of pages, at most: a run `[start, count]`, and a page index, of which version 1
/// of the wire has one for each page.
const RUN_BYTES: usize = 11;
const PAGE_BYTES: usize = 5;
/// Bytes of a part of a request beside its pages: names of fields, group and position.
const PART_BYTES: usize = 40;
/// Bytes of a message beside its lists, at most.
const MESSAGE_BYTES: usize = 256;
/// First and longest pause before a request whose end is unknown is repeated under its id, which requests its end. Doubles
/// with each repetition: an answer that cannot be read comes again each time.
const REPEAT_PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));
/// Longest wait for the report of a request that is over for every rank.
const REPORT_LIMIT: Duration = Duration::from_secs(120);

/// A load in flight: completes with the number of pages in place and the owner of the device pages.
///
/// Dropping it stops the copies through [`crate::EngineSettings::ranks`], where that is set, and keeps the device pages
/// until nothing writes to them any longer.
pub type LoadGuard<P> = PendingTransfer<Load, P>;
/// A store in flight. Dropping it lets the store go on, and keeps the device pages until nothing reads them any longer.
pub type StoreGuard<P> = PendingTransfer<Store, P>;

/// A load or a store that was not carried out.
#[derive(thiserror::Error)]
#[error("a load or a store was not carried out: {failure}")]
pub struct TransferFailure<P> {
    /// The reason.
    pub failure: Failure,
    /// The device pages.
    pub pages: TransferPages<P>,
}

/// The device pages of a load or a store that failed.
pub enum TransferPages<P> {
    /// Nothing touches the pages.
    Free(P),
    /// Workers may still touch the pages.
    InUse(PagesInUse<P>),
    /// The process gave up waiting, because its runtime ends. The pages are lost to it.
    Lost,
}

impl<P> fmt::Debug for TransferPages<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Free(_) => "Free",
            Self::InUse(_) => "InUse",
            Self::Lost => "Lost",
        })
    }
}

impl<P> fmt::Debug for TransferFailure<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = f.debug_struct("TransferFailure");
        fields
            .field("failure", &self.failure)
            .field("pages", &self.pages)
            .finish()
    }
}

/// Device pages that workers may still touch. Dropping this keeps them until nothing does.
#[derive(Debug)]
pub struct PagesInUse<P>(oneshot::Receiver<P>);

impl<P> PagesInUse<P> {
    /// Waits until nothing touches the pages, and returns their owner; `None` if the runtime ends before. There is no
    /// limit on the wait: a leader that is gone may be back at any time, with workers that copy for it.
    pub async fn freed(self) -> Option<P> {
        self.0.await.ok()
    }
}

/// A value that is leaked when it is dropped without [`Self::release`]. A task that a runtime drops at its end does not
/// know whether a copy still runs, so it must not give device pages back.
struct LeakOnDrop<P>(Option<P>);

impl<P> LeakOnDrop<P> {
    fn release(mut self) -> Option<P> {
        self.0.take()
    }
}

impl<P> Drop for LeakOnDrop<P> {
    fn drop(&mut self) {
        if let Some(pages) = self.0.take() {
            let _leaked = ManuallyDrop::new(pages);
        }
    }
}

type TransferEnd<C, P> = Result<(<C as Call>::Answer, P), (Failure, TransferPages<P>)>;

/// A load or a store in flight. See [`LoadGuard`] and [`StoreGuard`].
#[must_use = "see what dropping a load or a store does"]
pub struct PendingTransfer<C: Call, P> {
    request: RequestId,
    ended: oneshot::Receiver<TransferEnd<C, P>>,
}

impl<C: Call, P> fmt::Debug for PendingTransfer<C, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer")
            .field("request", &self.request)
            .finish_non_exhaustive()
    }
}

impl<C, P> PendingTransfer<C, P>
where
    C: Call + 'static,
    C::Answer: Send,
    P: Send + 'static,
{
    /// Queues the request, so that it precedes whatever is requested later, and awaits its end in a task of its own.
    pub(crate) fn begin(
        shared: &Arc<Shared>,
        id: RequestId,
        request: Request,
        pages: P,
        timeout: Duration,
    ) -> Self {
        let checked = check_size(&request, shared.body_bytes);
        let credits = transfer_kib(&request);
        let message = Message::from(request);
        let permit = |()| {
            let permit = Arc::clone(&shared.transfers).try_acquire_many_owned(credits);
            permit.map_err(|refused| match refused {
                TryAcquireError::NoPermits => {
                    let text = "too many loads and stores wait for their ends";
                    Failure::unsent(ErrorCode::Busy, text)
                }
                TryAcquireError::Closed => {
                    Failure::unsent(ErrorCode::Draining, "the client was dropped")
                }
            })
        };
        let begun = checked.and_then(permit).and_then(|permit| {
            let client = &shared.client;
            let answer = client.begin_request(id, message.clone(), timeout, GRACE)?;
            Ok((permit, answer))
        });
        match begun {
            Err(failure) => Self::refused(id, failure, pages),
            Ok((permit, answer)) => {
                let (report, ended) = oneshot::channel();
                let task = TransferTask::<C> {
                    shared: Arc::clone(shared),
                    id,
                    message,
                    timeout,
                    answer: PhantomData,
                };
                // Bound here, because a runtime that ends may drop the task before it is polled.
                let pages = LeakOnDrop(Some(pages));
                drop(shared.runtime.spawn(async move {
                    task.run(answer, pages, report).await;
                    drop(permit);
                }));
                Self { request: id, ended }
            }
        }
    }

    /// A request that failed before it was queued.
    pub(crate) fn refused(id: RequestId, failure: Failure, pages: P) -> Self {
        let (report, ended) = oneshot::channel();
        // The receiver is alive: it is returned below.
        drop(report.send(Err((failure, TransferPages::Free(pages)))));
        Self { request: id, ended }
    }

    /// Number of the request. A store begins when each rank has reported everything up to it as written.
    pub fn request(&self) -> RequestId {
        self.request
    }
}

impl<C: Call, P> Future for PendingTransfer<C, P> {
    type Output = Result<(C::Answer, P), TransferFailure<P>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let ended = ready!(Pin::new(&mut self.ended).poll(context));
        Poll::Ready(match ended {
            Ok(Ok(ended)) => Ok(ended),
            Ok(Err((failure, pages))) => Err(TransferFailure { failure, pages }),
            Err(_) => Err(TransferFailure {
                failure: Failure::new(ErrorCode::Draining, "the runtime of this process ends"),
                pages: TransferPages::Lost,
            }),
        })
    }
}

/// Sends the request of a transfer until its end is known.
struct TransferTask<C> {
    shared: Arc<Shared>,
    id: RequestId,
    message: Message,
    timeout: Duration,
    answer: PhantomData<fn() -> C>,
}

impl<C: Call> TransferTask<C> {
    async fn run<P: Send>(
        self,
        mut answer: PendingAnswer,
        pages: LeakOnDrop<P>,
        mut report: oneshot::Sender<TransferEnd<C, P>>,
    ) {
        let is_abandoned = C::KIND == MessageKind::Load && self.shared.ranks.is_some();
        let (failure, first) = tokio::select! {
            biased;
            answer = &mut answer => match answer.and_then(answer_of::<C>) {
                Ok(answer) => {
                    if let Some(pages) = pages.release() {
                        // Without a receiver the pages are dropped, which gives them back: their end is known.
                        drop(report.send(Ok((answer, pages))));
                    }
                    return;
                }
                Err(failure) if is_over(&failure) => {
                    if let Some(pages) = pages.release() {
                        drop(report.send(Err((failure, TransferPages::Free(pages)))));
                    }
                    return;
                }
                Err(failure) => (Some(failure), None),
            },
            // The guard was dropped.
            () = report.closed(), if is_abandoned => (None, Some(answer)),
        };
        let give_back = failure.map(|failure| {
            let (give_back, given_back) = oneshot::channel();
            drop(report.send(Err((failure, TransferPages::InUse(PagesInUse(given_back))))));
            give_back
        });
        let mut reported = pin!(self.until_reported(first));
        let abandoned = async {
            match &self.shared.ranks {
                Some(ranks) if ranks.abandon(self.id).await.is_ok() => {}
                _ => std::future::pending().await,
            }
        };
        let (free, is_reported) = tokio::select! {
            over = &mut reported => (over, true),
            () = abandoned => (true, false),
        };
        if free && let Some(pages) = pages.release() {
            // Without a receiver the pages are dropped, which gives them back.
            drop(give_back.map(|give_back| give_back.send(pages)));
        }
        // The request uses credits of the connection until its end is reported. A leader whose reports cannot be read
        // never frees them.
        if !is_reported && timeout(REPORT_LIMIT, reported).await.is_err() {
            tracing::warn!(request = %self.id, "the end of a request that is over for every rank is not reported");
        }
    }

    /// Sends the request once more, under the same id: the leader answers it as the one before.
    async fn repeat(&self) -> Result<C::Answer, Failure> {
        let (message, client) = (self.message.clone(), &self.shared.client);
        let repeated = client.request_with_grace(self.id, message, self.timeout, GRACE);
        answer_of::<C>(repeated.await?)
    }

    /// Waits until the leader has reported the end of the request: in the answer to `first`, if that is still awaited,
    /// or to a repetition. Returns false when the client has ended, after which the end cannot be known.
    async fn until_reported(&self, first: Option<PendingAnswer>) -> bool {
        if let Some(first) = first {
            match first.await.and_then(answer_of::<C>) {
                Ok(_) => return true,
                Err(failure) if is_over(&failure) => return true,
                Err(_) => {}
            }
        }
        let (mut pause, longest) = REPEAT_PAUSES;
        loop {
            match self.repeat().await {
                Ok(_) => return true,
                Err(failure) if failure.over => return true,
                // The task of the connection has ended.
                Err(failure) if failure.code == ErrorCode::Draining && !failure.retry => {
                    return false;
                }
                Err(_) => {
                    tokio::time::sleep(pause).await;
                    pause = longest.min(pause * 2);
                }
            }
        }
    }
}

/// True for a failure of the first message under an id after which nothing of the request runs. A repetition that was
/// not sent proves nothing about the message before it.
fn is_over(first: &Failure) -> bool {
    first.over || first.unsent
}

/// The parts of a load or a store, and the bytes of its hashes.
fn parts_of(request: &Request) -> Option<(&[Part], usize)> {
    match request {
        Request::Load { parts, .. } => Some((parts, 0)),
        Request::Store { parts, more, .. } => {
            let hashes = more.as_ref();
            let hashes = hashes.map_or(0, |(_, hashes)| hashes.as_bytes().len());
            Some((parts, hashes))
        }
        _ => None,
    }
}

/// Refuses a request that does not fit into a message of version 1 of the wire: a leader of that version may take over,
/// and the repetition that requests the end could not be encoded for it.
fn check_size(request: &Request, body_bytes_max: usize) -> Result<(), Failure> {
    let Some((parts, _)) = parts_of(request) else {
        return Ok(());
    };
    let pages: u64 = parts.iter().map(|part| part.pages.pages()).sum();
    let (count, bytes) = (parts.len(), transfer_bytes(request));
    let text = if pages > PAGE_ITEMS_MAX as u64 {
        format!("the request names {pages} pages, and at most {PAGE_ITEMS_MAX} fit")
    } else if count > PARTS_MAX {
        format!("the request has {count} parts, and at most {PARTS_MAX} fit")
    } else if bytes > body_bytes_max {
        format!("the request takes up to {bytes} bytes, and a message at most {body_bytes_max}")
    } else {
        return Ok(());
    };
    Err(Failure {
        retry: false,
        ..Failure::unsent(ErrorCode::Limit, format!("{text}: make several requests"))
    })
}

/// Bytes of the message of a load or a store, at most, in every version of the wire.
fn transfer_bytes(request: &Request) -> usize {
    let Some((parts, hashes)) = parts_of(request) else {
        return MESSAGE_BYTES;
    };
    let bytes_of = |part: &Part| {
        let list = &part.pages;
        let pages = usize::try_from(list.pages()).unwrap_or(usize::MAX);
        let items = (list.0.len() * RUN_BYTES).max(pages.saturating_mul(PAGE_BYTES));
        items.saturating_add(PART_BYTES)
    };
    let items = parts.iter().map(bytes_of);
    let items = items.fold(0, usize::saturating_add);
    items.saturating_add(MESSAGE_BYTES + hashes)
}

/// Credits of a load or a store, in KiB: at least its encoded size.
fn transfer_kib(request: &Request) -> u32 {
    let kib = transfer_bytes(request).div_ceil(1024);
    u32::try_from(kib)
        .unwrap_or(u32::MAX)
        .clamp(TRANSFER_KIB_MIN, TRANSFER_KIB)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use kvferry_protocol::{Hello, Role};
    use kvferry_transport::{Address, Client, ClientSettings, Limits, MemoryTransport};
    use kvferry_types::{GroupId, PageHashes, PageList, SlotId};
    use tokio::sync::{Notify, Semaphore};

    use super::*;

    #[derive(Debug)]
    struct Owner(Arc<AtomicBool>);

    impl Drop for Owner {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    fn shared(runtime: tokio::runtime::Handle) -> Arc<Shared> {
        let settings = ClientSettings {
            address: Address::Memory("absent".to_owned()),
            hello: Hello::new(Role::Engine, "test"),
            limits: Limits::default(),
        };
        let transport = Arc::new(MemoryTransport::default());
        Arc::new(Shared {
            body_bytes: settings.limits.body_bytes,
            client: Client::without_incoming(transport, settings),
            runtime,
            ranks: None,
            transfers: Arc::new(Semaphore::new(TRANSFER_KIB as usize)),
            next_id: AtomicU64::new(1),
            slots: std::sync::Mutex::default(),
            finished: Notify::new(),
        })
    }

    fn load(destination: PageList) -> Request {
        Request::Load {
            slot: SlotId(1),
            parts: vec![Part::new(GroupId(0), 0, destination)],
            after: RequestId(0),
        }
    }

    #[tokio::test]
    async fn a_load_that_is_begun_after_the_end_of_its_client_is_refused() {
        let shared = shared(tokio::runtime::Handle::current());
        shared.idle().await;
        shared.client.close();
        let (load, limit) = (load(PageList::run(0, 1)), Duration::from_secs(1));
        let loading = LoadGuard::begin(&shared, RequestId(1), load, (), limit);
        let failed = loading.await.expect_err("nothing sends it");
        assert!(
            matches!(failed.pages, TransferPages::Free(())),
            "{failed:?}"
        );
    }

    #[test]
    fn a_transfer_has_credits_for_its_message_in_every_version() {
        let scattered = (0..20_000).map(|page| kvferry_types::PageRun {
            start: 3_000_000_000 + 2 * page,
            count: 1,
        });
        for list in [
            PageList::run(4_000_000_000, 131_072),
            PageList(scattered.collect()),
            PageList::run(0, 1),
        ] {
            let request = load(list);
            let credits = transfer_kib(&request) as usize * 1024;
            for version in [1, 2] {
                let envelope = kvferry_protocol::Envelope {
                    version,
                    correlation: RequestId(u64::MAX),
                    deadline_ms: u32::MAX,
                    epoch: kvferry_types::Epoch(u64::MAX),
                    message: request.clone().into(),
                };
                let (_, body) = kvferry_protocol::encode(&envelope).expect("it fits");
                assert!(body.len() <= credits, "{} > {credits}", body.len());
            }
        }
    }

    /// A leader of version 1, which names each page, may take over while the request is in flight.
    #[test]
    fn a_request_is_refused_that_fits_only_as_runs() {
        let hashes = |pages: usize| PageHashes::packed(64, vec![7; 64 * pages]);
        let store = |pages: u32, hashed: usize| Request::Store {
            slot: SlotId(1),
            parts: vec![Part::new(
                GroupId(0),
                0,
                PageList::run(4_000_000_000, pages),
            )],
            more: hashes(hashed).map(|hashes| (0, hashes)),
            after: RequestId(0),
        };
        let limit = 64 << 10;
        let mut refused = 0;
        for request in [
            load(PageList::run(4_000_000_000, 13_000)),
            load(PageList::run(4_000_000_000, 30_000)),
            store(100, 1000),
            store(4_000, 800),
            store(100, 1_100),
        ] {
            let encoded = |version| {
                let envelope = kvferry_protocol::Envelope {
                    version,
                    correlation: RequestId(u64::MAX),
                    deadline_ms: u32::MAX,
                    epoch: kvferry_types::Epoch(u64::MAX),
                    message: request.clone().into(),
                };
                let (_, body) = kvferry_protocol::encode(&envelope).expect("it fits");
                body.len()
            };
            let checked = check_size(&request, limit);
            let fits = encoded(1) <= limit && encoded(2) <= limit;
            assert_eq!(checked.is_ok(), fits, "{} bytes", encoded(1));
            if let Err(failure) = checked {
                assert!(failure.unsent && !failure.retry, "{failure:?}");
                refused += 1;
            }
        }
        assert_eq!(refused, 3);
    }

    /// The request is queued for a task of another runtime, which may send it.
    #[tokio::test]
    async fn a_runtime_that_ends_before_a_load_is_polled_keeps_the_device_pages() {
        let other = tokio::runtime::Builder::new_current_thread()
            .build()
            .expect("a runtime");
        let runtime = other.handle().clone();
        other.shutdown_background();
        let shared = shared(runtime);
        let dropped = Arc::default();
        let load = load(PageList::run(0, 1));
        let owner = Owner(Arc::clone(&dropped));
        let limit = Duration::from_secs(1);
        let loading = LoadGuard::begin(&shared, RequestId(1), load, owner, limit);
        let failed = loading.await.expect_err("its task cannot run");
        assert!(matches!(failed.pages, TransferPages::Lost), "{failed:?}");
        assert!(!dropped.load(Ordering::Relaxed), "workers may write");
    }
}
