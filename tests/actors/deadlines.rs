//! Deadlines: a late copy is cancelled, its worker is fenced after the fence time, and its engine receives the
//! failure only when nothing can write its pages any longer.

use std::time::Duration;

use kvferry_protocol::limits::PAIRS_MAX;
use kvferry_protocol::{ErrorCode, LoadAnswer, Lookup, Reset, ResetPages, StoreAnswer};
use kvferry_transport::MemoryTransport;
use kvferry_types::RequestId;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::world::{
    Answered, Engine, Order, Puppet, Received, leader, puppets, puppets_of, seconds, soon,
};

const PAGES: u32 = 4;
const WITHIN: Duration = Duration::from_secs(2);
/// Default fence time of a leader.
const FENCE_SECONDS: f64 = 10.0;

/// Stores pages, then requests a load of them. Returns the pending load and the load orders of both workers.
async fn loading(
    engine: &Engine,
    workers: &mut [Puppet; 2],
) -> (JoinHandle<Answered<LoadAnswer>>, [Order; 2]) {
    let stored = storing(engine, workers).await;
    for (worker, order) in workers.iter().zip(&stored.1) {
        worker.ended(order, true);
    }
    let answer = stored.0.await.expect("no panic");
    assert!(answer.is_ok(), "{answer:?}");
    let found = engine.lookup(3, 2, PAGES as u8).await;
    assert!(matches!(found, Ok(found) if found.hit_pages == PAGES));
    let requesting = engine.clone();
    let requested = tokio::spawn(async move { requesting.load(4, 2, PAGES, WITHIN).await });
    (requested, orders(workers).await)
}

/// Requests a store. Returns the pending store and the orders that both workers received.
async fn storing(
    engine: &Engine,
    workers: &mut [Puppet; 2],
) -> (JoinHandle<Answered<StoreAnswer>>, [Order; 2]) {
    engine.lookup(1, 1, PAGES as u8).await.expect("an answer");
    let requesting = engine.clone();
    let requested = tokio::spawn(async move { requesting.store(2, 1, PAGES, WITHIN).await });
    (requested, orders(workers).await)
}

async fn orders([first, second]: &mut [Puppet; 2]) -> [Order; 2] {
    [first.order().await, second.order().await]
}

fn about(found: f64, expected: f64) {
    assert!(
        (found - expected).abs() < 0.1,
        "{found} s, not {expected} s"
    );
}

#[tokio::test(start_paused = true)]
async fn a_load_is_answered_only_after_the_silent_worker_is_fenced() {
    let transport = MemoryTransport::default();
    let (process, _) = leader(&transport, 1).await;
    let engine = Engine::start(&transport, 1);
    let mut workers = puppets(&transport).await;
    let (requested, [first, second]) = loading(&engine, &mut workers).await;
    let transfer = second.transfer.transfers[0].id;
    let begun = Instant::now();
    workers[0].ended(&first, true);

    let mut cancels = Vec::new();
    loop {
        match workers[1].receive().await {
            Received::Cancel(transfers) => {
                assert_eq!(transfers, [transfer]);
                cancels.push(seconds(begun));
                assert!(cancels.len() < 100, "it is never fenced");
            }
            Received::Lost => break,
            other => panic!("{other:?} for a worker that is late"),
        }
    }
    about(cancels[0], WITHIN.as_secs_f64());
    assert!(cancels.len() >= 4, "cancelled again and again: {cancels:?}");
    about(seconds(begun), WITHIN.as_secs_f64() + FENCE_SECONDS);
    assert!(
        !requested.is_finished(),
        "it is fenced, and may still write"
    );

    assert!(matches!(workers[1].receive().await, Received::Welcomed(1)));
    tokio::time::sleep(Duration::from_secs(100)).await;
    assert_eq!(engine.status().await.copies_under_way, 1);
    assert!(!requested.is_finished(), "it is back, and may still write");
    let mut back = Puppet::start(&transport, 1);
    back.begin().await;
    let failure = requested.await.expect("no panic").expect_err("it failed");
    assert_eq!(failure.code, ErrorCode::CopyFailed, "{failure}");
    assert_eq!(engine.status().await.pins, 0);
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_load_is_answered_at_its_last_end_and_no_worker_is_fenced() {
    let transport = MemoryTransport::default();
    let (process, _) = leader(&transport, 1).await;
    let engine = Engine::start(&transport, 1);
    let mut workers = puppets(&transport).await;
    let (requested, [first, second]) = loading(&engine, &mut workers).await;
    let begun = Instant::now();
    assert!(matches!(workers[1].receive().await, Received::Cancel(_)));
    workers[0].ended(&first, false);
    engine.status().await;
    assert!(!requested.is_finished(), "the other rank still copies");
    workers[1].ended(&second, false);
    let failure = requested.await.expect("no panic").expect_err("it failed");
    assert_eq!(failure.code, ErrorCode::CopyFailed, "{failure}");
    about(seconds(begun), WITHIN.as_secs_f64());

    let further = tokio::time::timeout(Duration::from_secs(60), workers[1].receive()).await;
    assert!(further.is_err(), "{further:?} after the end");
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn pages_of_a_late_store_stay_set_aside_until_both_workers_have_ended() {
    let transport = MemoryTransport::default();
    let (process, _) = leader(&transport, 1).await;
    let engine = Engine::start(&transport, 1);
    let mut workers = puppets(&transport).await;
    let (requested, [first, second]) = storing(&engine, &mut workers).await;
    workers[0].ended(&first, true);
    assert!(matches!(workers[1].receive().await, Received::Cancel(_)));
    let pages = |state: &'static str| {
        let engine = engine.clone();
        async move { engine.status().await.pages_in(2, state) }
    };
    assert_eq!(pages("quarantined").await, u64::from(PAGES));
    workers[1].ended(&second, true);
    let answer = soon("an answer", requested).await.expect("no panic");
    let expected = StoreAnswer {
        stored_pages: 0,
        present_pages: 0,
        refused_pages: 0,
        failed_pages: PAGES,
    };
    assert_eq!(answer, Ok(expected));
    assert_eq!(pages("quarantined").await, 0);
    assert_eq!(pages("ready").await, 0);
    process.stop().await;
}

/// Version 1 names pages one by one, and a copy of that version is limited to `PAIRS_MAX` of them.
#[tokio::test(start_paused = true)]
async fn a_load_that_cannot_be_sent_to_its_workers_fails_at_once() {
    let transport = MemoryTransport::default();
    let (process, _) = leader(&transport, 1).await;
    let engine = Engine::start(&transport, 1);
    let pages = PAIRS_MAX as u32 + 1;
    let workers = puppets_of(&transport, 1, 2 * pages).await;
    let workers = workers.map(Puppet::obey);
    let hashes = (0..pages).flat_map(|page| u128::from(page + 1).to_be_bytes());
    let hashes: Vec<u8> = hashes.collect();
    let look = |slot| Lookup {
        slot,
        namespace: Vec::new(),
        hash_bytes: 16,
        hashes: hashes.clone(),
        have_pages: 0,
        limit_pages: None,
    };
    let found = engine
        .0
        .call_as(RequestId(1), look(1), WITHIN, Duration::ZERO)
        .await;
    assert!(found.is_ok(), "{found:?}");
    let stored = engine.store(2, 1, pages, 10 * WITHIN).await;
    assert!(stored.is_ok(), "{stored:?}");
    let found = engine
        .0
        .call_as(RequestId(3), look(2), WITHIN, Duration::ZERO)
        .await;
    assert!(matches!(found, Ok(found) if found.hit_pages == pages));

    let begun = Instant::now();
    let loaded = engine.load(4, 2, pages, 10 * WITHIN).await;
    let failure = loaded.expect_err("nobody can be told to load that");
    assert_eq!(failure.code, ErrorCode::CopyFailed, "{failure}");
    about(seconds(begun), 0.0);
    assert_eq!(engine.status().await.copies_under_way, 0);
    workers.iter().for_each(|worker| worker.abort());
    process.stop().await;
}

/// An invalidation carries the time that is left for its reset, because a worker must not remove pages for a reset
/// that its leader has given up.
#[tokio::test(start_paused = true)]
async fn an_invalidation_gives_the_deadline_of_its_reset() {
    let transport = MemoryTransport::default();
    let (process, _) = leader(&transport, 1).await;
    let engine = Engine::start(&transport, 1);
    let mut workers = puppets(&transport).await;
    engine.until_ready().await;
    let reset = Reset {
        which: ResetPages::Namespace,
        tier: 0,
        namespace: Some(b"tenant".to_vec().into()),
        hash_bytes: 0,
        hashes: Vec::new(),
    };
    let requesting = engine.clone();
    let requested = tokio::spawn(async move { requesting.0.call(reset, WITHIN).await });
    for worker in &mut workers {
        match worker.receive().await {
            Received::Invalidate(_, _, _, left_ms) => {
                let left = Duration::from_millis(left_ms.into());
                assert!(left <= WITHIN && left > WITHIN / 2, "{left:?}");
            }
            other => panic!("{other:?}"),
        }
    }
    let answer = requested.await.expect("no panic");
    assert!(answer.is_err(), "nobody confirms it: {answer:?}");
    process.stop().await;
}
