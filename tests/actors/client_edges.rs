//! Edges of the typed clients: several clients of one engine, futures that race, full queues, absent leaders, and
//! messages that no wire takes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvferry_client::{NotConfirmed, PromptPages, StoredPages, TransferPages};
use kvferry_protocol::ErrorCode;
use kvferry_transport::MemoryTransport;
use kvferry_types::{GroupId, PageList, PageRun, Part, RequestId};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::clients::{
    Loading, Owner, PAGES, WITHIN, engine, load, obey, poll_once, prompt, scenario,
    until_nothing_is_left,
};
use super::world::{Engine, leader, puppets, seconds};

pub(super) fn stored() -> StoredPages {
    StoredPages {
        id: None,
        parts: vec![Part::new(GroupId(0), 0, PageList::run(0, PAGES))],
        more: None,
    }
}

#[tokio::test(start_paused = true)]
async fn a_second_client_of_an_engine_gets_no_answers_of_the_first_one() {
    let transport = MemoryTransport::default();
    let (process, _) = leader(&transport, 1).await;
    let status = Engine::start(&transport, 200);
    let (open, _) = watch::channel(true);
    let copies = obey(puppets(&transport).await, &open);
    for (client, ordered) in [
        (1, 4), // a store and a load on two ranks
        (2, 6), // the pages are stored already
    ] {
        let (owner, _) = Owner::new();
        let done = scenario(engine(&transport, None), 1, owner).await;
        done.expect("every request succeeds");
        assert!(until_nothing_is_left(&status).await < 3.0);
        assert_eq!(
            copies.ordered.load(Ordering::Relaxed),
            ordered,
            "client {client}"
        );
    }
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_repeated_lookup_that_is_dropped_leaves_nothing_to_load() {
    let mut world = Loading::start(None).await;
    assert_eq!(world.found.hit_pages(), PAGES);
    let PromptPages { hashes, .. } = prompt(7);
    let mut again = Box::pin(
        world
            .found
            .lookup(b"other".to_vec(), hashes, (0, None), WITHIN),
    );
    assert!(poll_once(&mut again).await.is_none());
    drop(again);
    assert_eq!(
        world.found.hit_pages(),
        0,
        "the leader may hold other pages now"
    );
    world.process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_finish_ends_its_own_guard_and_not_the_next_one_of_the_slot() {
    let mut world = Loading::start(None).await;
    world.open.send_replace(true);
    let mut finishing = Box::pin(world.found.finish());
    assert!(poll_once(&mut finishing).await.is_none());
    // The leader has confirmed, and the future was not polled again.
    let next = world.client.lookup(prompt(7), WITHIN).await;
    world.found = next.expect("the slot is free");
    drop(finishing);
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert_eq!(world.status.status().await.slots, 1);
    let (owner, _) = Owner::new();
    load(&world.found, owner).await.expect("its pages are held");
    world.process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_guard_that_outlives_its_client_opens_nothing() {
    let mut world = Loading::start(None).await;
    drop(world.client);
    let PromptPages {
        namespace, hashes, ..
    } = prompt(7);
    let again = world
        .found
        .lookup(namespace, hashes, (0, None), WITHIN)
        .await;
    let failure = again.expect_err("the client is gone");
    assert!(failure.unsent && !failure.retry, "{failure:?}");
    // Its slot may be that of another client now.
    let ordered = world.copies.ordered.load(Ordering::Relaxed);
    let (owner, _) = Owner::new();
    let loaded = load(&world.found, owner).await;
    let refused = loaded.expect_err("the client is gone");
    assert!(
        matches!(refused.pages, TransferPages::Free(_)),
        "{refused:?}"
    );
    let (owner, _) = Owner::new();
    let storing = world.found.store(stored(), owner, WITHIN).await;
    let refused = storing.expect_err("the client is gone");
    assert!(
        matches!(refused.pages, TransferPages::Free(_)),
        "{refused:?}"
    );
    assert_eq!(world.copies.ordered.load(Ordering::Relaxed), ordered);
    let finished = world.found.finish().await;
    assert_eq!(
        finished.expect_err("not by this guard").code,
        ErrorCode::Draining
    );
    assert!(until_nothing_is_left(&world.status).await < 3.0);
    world.process.stop().await;
}

/// Loads may be begun outside of a runtime, and in one that ends before them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_belongs_to_the_runtime_of_its_client() {
    let world = Loading::start(None).await;
    let (owner, dropped) = Owner::new();
    let found = world.found;
    let loading = std::thread::spawn(move || {
        let other = tokio::runtime::Builder::new_current_thread().build();
        let other = other.expect("a runtime");
        let entered = other.enter();
        let loading = load(&found, owner);
        drop(entered);
        (loading, found)
    });
    let (loading, found) = loading.join().expect("no panic");
    let far = found.load(
        vec![Part::new(GroupId(0), 0, PageList::run(40, 1))],
        RequestId(0),
        (),
        Duration::MAX,
    );
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(!dropped.load(Ordering::Relaxed));
    world.open.send_replace(true);
    loading.await.expect("the load goes on");
    drop((far, found));
    world.process.stop().await;
}

/// On a thread of a runtime the task that was spawned last runs first.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_a_guard_has_begun_precedes_its_end() {
    let world = Loading::start(None).await;
    world.open.send_replace(true);
    let (client, found) = (world.client.clone(), world.found);
    let running = tokio::spawn(async move {
        let (owner, _) = Owner::new();
        let loading = load(&found, owner);
        drop(found);
        loading.await.expect("the load goes on");
        for slot in 20..40 {
            let other = PromptPages {
                namespace: vec![slot],
                ..prompt(slot.into())
            };
            let found = client.lookup(other, WITHIN).await.expect("an answer");
            let (owner, _) = Owner::new();
            let storing = found.store(stored(), owner, WITHIN);
            drop(found);
            let (answer, _) = storing.await.expect("the store goes on");
            assert_eq!(answer.stored_pages, PAGES);
        }
    });
    running.await.expect("no panic");
    world.process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn guards_that_are_dropped_without_a_leader_delay_no_later_request() {
    let client = engine(&MemoryTransport::default(), None);
    let mut lookups = JoinSet::new();
    for slot in 0..6_000 {
        let client = client.clone();
        lookups.spawn(async move { client.lookup(prompt(slot), Duration::from_millis(1)).await });
    }
    while let Some(lookup) = lookups.join_next().await {
        let failure = lookup.expect("no panic").expect_err("no leader");
        assert_eq!(failure.code, ErrorCode::Deadline);
    }
    let refused = client.lookup(prompt(1), WITHIN).await;
    let failure = refused.expect_err("its finish was not confirmed");
    assert!(
        failure.retry && failure.code == ErrorCode::Busy,
        "{failure:?}"
    );
    for slot in 6_000..6_010 {
        let begun = Instant::now();
        let limit = Duration::from_millis(50);
        let lookup = client.lookup(prompt(slot), limit).await;
        assert_eq!(lookup.expect_err("no leader").code, ErrorCode::Deadline);
        assert!(seconds(begun) < 0.5, "{} s", seconds(begun));
    }
}

#[tokio::test(start_paused = true)]
async fn a_load_that_no_message_holds_gives_its_pages_back_at_once() {
    let world = Loading::start(None).await;
    let scattered = (0..131_073).map(|page| PageRun {
        start: 2 * page,
        count: 1,
    });
    // Version 1 of the wire has the single run as so many pages.
    let lists = [PageList(scattered.collect()), PageList::run(0, 131_073)];
    for destination in lists {
        let (owner, _) = Owner::new();
        let loading = world.found.load(
            vec![Part::new(GroupId(0), 0, destination)],
            RequestId(0),
            owner,
            WITHIN,
        );
        let failed = loading.await.expect_err("too many pages");
        assert_eq!(failed.failure.code, ErrorCode::Limit);
        assert!(!failed.failure.retry, "the same message never fits");
        assert!(
            matches!(failed.pages, TransferPages::Free(_)),
            "{:?}",
            failed.pages
        );
    }
    world.process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn ranks_that_end_before_they_confirm_free_no_pages() {
    let ranks = |_: RequestId| async { Err(NotConfirmed) };
    let world = Loading::start(Some(Arc::new(ranks))).await;
    let (owner, dropped) = Owner::new();
    let loading = load(&world.found, owner);
    tokio::time::sleep(Duration::from_millis(1)).await;
    drop(loading);
    tokio::time::sleep(WITHIN / 2).await;
    assert!(
        !dropped.load(Ordering::Relaxed),
        "copies still write to the pages"
    );
    world.open.send_replace(true);
    tokio::time::sleep(WITHIN).await;
    assert!(
        dropped.load(Ordering::Relaxed),
        "the leader has reported their end"
    );
    world.process.stop().await;
}
