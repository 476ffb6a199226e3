//! The typed clients, dropped at every await point: a real leader has no hold, request or copy of theirs left long
//! before a hold would expire, and device pages are given back only when nothing touches them.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::Poll;
use std::time::Duration;

use kvferry_client::{
    AbandonOnRanks, AdminClient, EngineClient, EngineSettings, Failure, LoadGuard, PromptPages,
    RankSession, RankSessionSettings, RequestGuard, SessionMemory, StoredPages, TransferPages,
};
use kvferry_protocol::{ErrorCode, Message};
use kvferry_transport::{Limits, MemoryTransport};
use kvferry_types::{
    EngineId, GroupId, PageHashes, PageList, Part, Rank, Registration, Replica, RequestId,
    ResetScope, SlotId, Timeline,
};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::Instant;

use super::unregister::Memory;
use super::workers::{accept_all, ranks, worker};
use super::world::{Engine, Puppet, Received, address, leader, puppets, seconds, server, soon};

pub(super) const PAGES: u32 = 4;
pub(super) const WITHIN: Duration = Duration::from_secs(2);
/// Holds expire after 30 s, and an engine without a connection is forgotten after 10 s.
const AT_ONCE_S: f64 = 3.0;

/// The owner of device pages, which reports that it was dropped.
#[derive(Debug)]
pub(super) struct Owner(Arc<AtomicBool>);

impl Owner {
    pub(super) fn new() -> (Self, Arc<AtomicBool>) {
        let dropped = Arc::default();
        (Self(Arc::clone(&dropped)), dropped)
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

pub(super) fn prompt(slot: u64) -> PromptPages {
    let bytes = (0..PAGES as u8).flat_map(|page| [page + 1; 16]).collect();
    PromptPages {
        slot: SlotId(slot),
        namespace: Vec::new(),
        hashes: PageHashes::packed(16, bytes).expect("16 bytes a page"),
        have_pages: 0,
        limit_pages: None,
    }
}

pub(super) fn engine(
    transport: &MemoryTransport,
    ranks: Option<Arc<dyn AbandonOnRanks>>,
) -> EngineClient {
    let settings = EngineSettings {
        ranks,
        ..EngineSettings::new(address(), EngineId([1; 16]), "test")
    };
    EngineClient::start(Arc::new(transport.clone()), settings)
}

/// Copies that two workers were ordered to make, and those that were cancelled.
#[derive(Debug, Default)]
pub(super) struct Copies {
    pub(super) ordered: AtomicU32,
    cancelled: AtomicU32,
}

/// Attached workers that report copies as complete, while `open` is true.
pub(super) fn obey(workers: [Puppet; 2], open: &watch::Sender<bool>) -> Arc<Copies> {
    let copies: Arc<Copies> = Arc::default();
    for mut worker in workers {
        let (mut open, copies) = (open.subscribe(), Arc::clone(&copies));
        tokio::spawn(async move {
            let mut orders = Vec::new();
            loop {
                tokio::select! {
                    received = worker.receive() => match received {
                        Received::Order(order) => {
                            copies.ordered.fetch_add(1, Ordering::Relaxed);
                            orders.push(order);
                        }
                        Received::Cancel(transfers) => {
                            copies.cancelled.fetch_add(transfers.len() as u32, Ordering::Relaxed);
                        }
                        Received::Welcomed(_) | Received::Lost | Received::Invalidate(..) => {}
                    },
                    changed = open.changed() => if changed.is_err() { return },
                }
                if *open.borrow() {
                    for order in orders.drain(..) {
                        worker.ended(&order, true);
                    }
                }
            }
        });
    }
    copies
}

/// Stores the prompt's pages, looks them up, and loads them.
pub(super) async fn scenario(client: EngineClient, slot: u64, owner: Owner) -> Result<(), Failure> {
    let found = client.lookup(prompt(slot), WITHIN).await?;
    let stored = StoredPages {
        id: None,
        parts: vec![Part::new(GroupId(0), 0, PageList::run(0, PAGES))],
        more: None,
    };
    let stored = found.store(stored, owner, WITHIN).await;
    let (_, owner) = stored.map_err(|failed| failed.failure)?;
    found.finish().await?;
    let found = client.lookup(prompt(slot + 1), WITHIN).await?;
    assert_eq!(found.hit_pages(), PAGES);
    let loaded = load(&found, owner).await;
    let (answer, _) = loaded.map_err(|failed| failed.failure)?;
    assert_eq!(answer.pages, PAGES);
    found.finish().await
}

pub(super) fn load(found: &RequestGuard, owner: Owner) -> LoadGuard<Owner> {
    let destination = PageList::run(PAGES, PAGES);
    found.load(
        vec![Part::new(GroupId(0), 0, destination)],
        RequestId(0),
        owner,
        WITHIN,
    )
}

/// Polls a future once, and lets everything else run until it waits for time.
pub(super) async fn poll_once<F: Future>(future: &mut Pin<Box<F>>) -> Option<F::Output> {
    let polled = std::future::poll_fn(|context| {
        Poll::Ready(match future.as_mut().poll(context) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        })
    });
    let polled = polled.await;
    tokio::time::sleep(Duration::from_millis(1)).await;
    polled
}

/// Waits until the leader has no request, hold or copy. Returns the seconds until then.
pub(super) async fn until_nothing_is_left(status: &Engine) -> f64 {
    let begun = Instant::now();
    let nothing = async {
        loop {
            let now = status.status().await;
            if now.slots + now.pins + now.copies_under_way == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    soon("an empty leader", nothing).await;
    seconds(begun)
}

#[tokio::test(start_paused = true)]
async fn a_future_that_is_dropped_anywhere_leaves_nothing_behind() {
    let transport = MemoryTransport::default();
    let (process, _) = leader(&transport, 1).await;
    let status = Engine::start(&transport, 200);
    let (open, _) = watch::channel(true);
    obey(puppets(&transport).await, &open);
    let client = engine(&transport, None);
    let mut completed = false;
    let mut dropped_at = 0;
    for polls in 0..100 {
        let (owner, dropped) = Owner::new();
        let slot = 2 * polls + 1;
        let mut running = Box::pin(scenario(client.clone(), slot, owner));
        for _ in 0..polls {
            if let Some(ended) = poll_once(&mut running).await {
                ended.expect("every request succeeds");
                completed = true;
                break;
            }
        }
        drop(running);
        dropped_at = polls;
        let took = until_nothing_is_left(&status).await;
        assert!(took < AT_ONCE_S, "{took} s after {polls} polls");
        let given_back = async {
            while !dropped.load(Ordering::Relaxed) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        soon("the device pages", given_back).await;
        if completed {
            break;
        }
    }
    assert!(completed, "never complete");
    assert!(
        dropped_at >= 6,
        "{dropped_at} polls: too few to end at every await"
    );
    assert_eq!(status.contradiction().await, "");
    process.stop().await;
}

/// A leader with a stored prompt, and a guard for its lookup. From now on copies end only while the sender is true.
pub(super) struct Loading {
    pub(super) transport: MemoryTransport,
    pub(super) process: kvferry_actors::ProcessHandle,
    pub(super) status: Engine,
    pub(super) client: EngineClient,
    pub(super) found: RequestGuard,
    pub(super) open: watch::Sender<bool>,
    pub(super) copies: Arc<Copies>,
}

impl Loading {
    pub(super) async fn start(ranks: Option<Arc<dyn AbandonOnRanks>>) -> Self {
        let transport = MemoryTransport::default();
        let (process, _) = leader(&transport, 1).await;
        let status = Engine::start(&transport, 200);
        let (open, _) = watch::channel(true);
        let copies = obey(puppets(&transport).await, &open);
        let client = engine(&transport, ranks);
        let (owner, _) = Owner::new();
        let stored = scenario(client.clone(), 1, owner).await;
        stored.expect("every request succeeds");
        open.send_replace(false);
        let found = client.lookup(prompt(7), WITHIN).await;
        Self {
            transport,
            process,
            status,
            client,
            found: found.expect("an answer"),
            open,
            copies,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_dropped_load_keeps_its_device_pages_until_the_copies_have_ended() {
    for polls in 0..4 {
        let world = Loading::start(None).await;
        let (owner, dropped) = Owner::new();
        let mut loading = Box::pin(load(&world.found, owner));
        for _ in 0..polls {
            assert!(poll_once(&mut loading).await.is_none());
        }
        drop(loading);
        drop(world.found);
        tokio::time::sleep(WITHIN / 2).await;
        assert_eq!(world.status.status().await.copies_under_way, 1);
        assert!(
            !dropped.load(Ordering::Relaxed),
            "copies still write to the pages"
        );
        world.open.send_replace(true);
        assert!(until_nothing_is_left(&world.status).await < AT_ONCE_S);
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert!(dropped.load(Ordering::Relaxed));
        world.process.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_dropped_load_is_abandoned_on_the_ranks_and_returns_its_pages_when_they_confirm() {
    let (abandoned, mut abandons) = mpsc::unbounded_channel();
    let confirm = Arc::new(Semaphore::new(0));
    let confirms = Arc::clone(&confirm);
    let ranks = move |request: RequestId| {
        let (abandoned, confirms) = (abandoned.clone(), Arc::clone(&confirms));
        async move {
            abandoned.send(request).expect("the test runs");
            drop(confirms.acquire().await);
            Ok(())
        }
    };
    let world = Loading::start(Some(Arc::new(ranks))).await;
    let (owner, dropped) = Owner::new();
    let loading = load(&world.found, owner);
    let request = loading.request();
    tokio::time::sleep(Duration::from_millis(1)).await;
    drop(loading);
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(abandons.try_recv(), Ok(request));
    assert!(!dropped.load(Ordering::Relaxed), "no rank has confirmed");
    confirm.add_permits(1);
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert!(dropped.load(Ordering::Relaxed));
    world.process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_late_load_fails_in_time_and_its_pages_are_returned_when_its_end_is_known() {
    let world = Loading::start(None).await;
    let (owner, dropped) = Owner::new();
    let begun = Instant::now();
    let failed = load(&world.found, owner)
        .await
        .expect_err("no copy has ended");
    assert!(seconds(begun) < 5.0, "{} s", seconds(begun));
    assert_eq!(failed.failure.code, ErrorCode::Deadline);
    let TransferPages::InUse(pages) = failed.pages else {
        panic!("{:?}: the workers still copy", failed.pages)
    };
    assert!(!dropped.load(Ordering::Relaxed));
    world.open.send_replace(true);
    let owner = soon("the pages", pages.freed()).await;
    assert!(owner.is_some() && !dropped.load(Ordering::Relaxed));
    world.process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_client_that_is_dropped_finishes_its_requests_and_cancels_its_stores() {
    let world = Loading::start(None).await;
    let open = world
        .client
        .lookup(prompt(9), WITHIN)
        .await
        .expect("an answer");
    let stored = StoredPages {
        id: None,
        parts: vec![Part::new(GroupId(0), 0, PageList::run(0, PAGES))],
        more: None,
    };
    world
        .client
        .reset(ResetScope::Namespace(Vec::new()), WITHIN)
        .await
        .expect_err("pages are held");
    let other = PromptPages {
        namespace: b"other".to_vec(),
        ..prompt(11)
    };
    let storing = world.client.lookup(other, WITHIN).await.expect("an answer");
    let (owner, dropped) = Owner::new();
    let store = storing.store(stored, owner, WITHIN);
    tokio::time::sleep(Duration::from_millis(1)).await;
    drop(world.client);
    drop(store);
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert_eq!(
        world.copies.cancelled.load(Ordering::Relaxed),
        2,
        "one store on two ranks"
    );
    assert!(
        !dropped.load(Ordering::Relaxed),
        "its copies have not ended"
    );
    // The guards are alive, and hold nothing.
    assert_eq!(world.status.status().await.slots, 0);
    world.open.send_replace(true);
    assert!(until_nothing_is_left(&world.status).await < AT_ONCE_S);
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert!(dropped.load(Ordering::Relaxed));
    drop((open, storing, world.found));
    world.process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_slot_has_one_guard_and_may_be_looked_up_again_through_it() {
    let mut world = Loading::start(None).await;
    let refused = world.client.lookup(prompt(7), WITHIN).await;
    let failure = refused.expect_err("the slot is open");
    assert_eq!(failure.code, ErrorCode::Invalid);
    assert!(failure.message.contains("slot 7"), "{failure}");
    let PromptPages {
        namespace, hashes, ..
    } = prompt(7);
    let again = world
        .found
        .lookup(namespace, hashes, (1, None), WITHIN)
        .await;
    assert_eq!(again.expect("an answer").hit_pages, PAGES - 1);
    world.found.finish().await.expect("it is finished");
    let next = world.client.lookup(prompt(7), WITHIN).await;
    assert_eq!(next.expect("an answer").hit_pages(), PAGES);
    world.process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_operator_reads_the_state_and_resets_pages() {
    let world = Loading::start(None).await;
    world.found.finish().await.expect("it is finished");
    let transport = MemoryTransport::default();
    let absent = AdminClient::start(Arc::new(transport), address(), "test");
    let failure = absent.status(false, WITHIN).await.expect_err("no leader");
    assert_eq!(failure.code, ErrorCode::Deadline);
    let reset = world.client.reset(ResetScope::Everything, WITHIN);
    let failure = reset
        .await
        .expect_err("an engine removes pages of a namespace");
    assert_eq!(failure.code, ErrorCode::Forbidden);
    let namespace = ResetScope::Namespace(Vec::new());
    // No worker confirms the invalidation.
    let failure = world
        .client
        .reset(namespace, WITHIN)
        .await
        .expect_err("no confirmation");
    // The leader answers at the deadline, at which the client gives up.
    let codes = [ErrorCode::ResetUnconfirmed, ErrorCode::Deadline];
    assert!(codes.contains(&failure.code), "{failure}");
    assert!(
        world
            .client
            .status(false, WITHIN)
            .await
            .expect("a status")
            .ready
    );
    assert_eq!(world.client.cancel_stores(None, WITHIN).await, Ok(0));
    world.process.stop().await;
}

impl SessionMemory for Memory {
    type Error = std::convert::Infallible;

    fn timeline(&self) -> Option<Timeline> {
        None
    }

    fn finish_writes(&self) -> Result<(), Self::Error> {
        Ok(())
    }

    async fn registration(&self) -> Result<Registration, Self::Error> {
        let Message::Register(register) = Memory::registration(self, 1) else {
            panic!("it registers")
        };
        Ok(register.registration)
    }
}

fn session(
    transport: &MemoryTransport,
    memory: &Arc<Memory>,
    start_limit: Duration,
) -> RankSession {
    let settings = RankSessionSettings {
        worker: ranks(),
        engine: EngineId([1; 16]),
        replica: Replica(0),
        rank: Rank(0),
        name: "test".to_owned(),
        start_limit,
    };
    RankSession::start(Arc::new(transport.clone()), settings, Arc::clone(memory))
}

#[tokio::test]
async fn a_rank_registers_reports_abandons_and_unregisters() {
    let transport = MemoryTransport::default();
    let mut leader = server(&transport, 1, Limits::default()).await;
    let (process, _folder) = worker(&transport).await;
    let memory = Arc::new(Memory::new());
    let rank = session(&transport, &memory, Duration::MAX);
    let agreeing = tokio::spawn(async move { accept_all(&mut leader).await });
    soon("a registration", rank.registered())
        .await
        .expect("registered");
    assert!(memory.is_open());
    rank.written(RequestId(3)).await.expect("reported");
    let (one, other) = (rank.abandon(RequestId(2)), rank.abandon(RequestId(2)));
    soon("a confirmation", one).await.expect("confirmed");
    soon("a confirmation", other).await.expect("confirmed");
    assert!(soon("the end", rank.unregister(Duration::from_secs(60))).await);
    assert!(!memory.is_open(), "given back, and still open");

    // A session that is dropped at any await closes the memory, too.
    for wait in [false, true] {
        let rank = session(&transport, &memory, Duration::MAX);
        if wait {
            soon("a registration", rank.registered())
                .await
                .expect("registered");
        }
        drop(rank);
        let closed = async {
            while memory.is_open() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        soon("closed memory", closed).await;
    }
    agreeing.abort();
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_rank_without_a_worker_fails_at_its_limit() {
    let memory = Arc::new(Memory::new());
    let limit = Duration::from_secs(60);
    let rank = session(&MemoryTransport::default(), &memory, limit);
    let failure = rank.registered().await.expect_err("no worker");
    assert!(failure.to_string().contains("in 60s"), "{failure}");
    assert_eq!(rank.failed().await, failure);
}
