//! Draining a leader: running copies end first, and no new request is accepted.

use std::time::Duration;

use kvferry_protocol::{ErrorCode, StoreAnswer};
use kvferry_transport::MemoryTransport;
use kvferry_types::RequestId;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::world::{
    Answered, Engine, Order, Puppet, TEST_TIMEOUT, leader, puppets, seconds, soon, store,
};

const PAGES: u8 = 4;

fn code<T>(answer: Answered<T>) -> Option<ErrorCode> {
    answer.err().map(|failure| failure.code)
}

/// Requests a store. Returns the pending store and the orders, which both workers have received and not finished.
async fn under_way(
    engine: &Engine,
    workers: &mut [Puppet; 2],
) -> (JoinHandle<Answered<StoreAnswer>>, Vec<Order>) {
    engine.lookup(1, 1, PAGES).await.expect("an answer");
    let requesting = engine.clone();
    let requested =
        tokio::spawn(async move { requesting.store(2, 1, u32::from(PAGES), TEST_TIMEOUT).await });
    let mut orders = Vec::new();
    for worker in workers {
        orders.push(worker.order().await);
    }
    (requested, orders)
}

#[tokio::test(start_paused = true)]
async fn running_copies_end_before_a_drain_and_no_new_copy_begins() {
    let transport = MemoryTransport::default();
    let (process, handle) = leader(&transport, 1).await;
    let engine = Engine::start(&transport, 1);
    let mut workers = puppets(&transport).await;
    let (requested, orders) = under_way(&engine, &mut workers).await;

    let draining = handle.clone();
    let drained = tokio::spawn(async move { draining.drain(TEST_TIMEOUT).await });
    // Requests after the order to drain are refused.
    let refused = async {
        let mut id = 10;
        while code(engine.lookup(id, 2, PAGES).await) != Some(ErrorCode::Draining) {
            id += 1;
            assert!(id < 1000, "lookups go on");
        }
        id
    };
    let id = soon("a refusal", refused).await;
    let store = engine
        .0
        .call_as(RequestId(id + 1), store(1, 1), TEST_TIMEOUT, Duration::ZERO);
    assert_eq!(code(store.await), Some(ErrorCode::Draining));
    assert!(!drained.is_finished(), "a copy is under way");
    assert!(!requested.is_finished(), "a copy is under way");

    workers[0].ended(&orders[0], true);
    assert_eq!(engine.status().await.copies_under_way, 1);
    assert!(!drained.is_finished(), "the other rank still copies");
    workers[1].ended(&orders[1], true);
    assert!(drained.await.expect("no panic"), "all ended in time");
    let answer = requested.await.expect("no panic").expect("stored");
    assert!(answer.stored_pages == 4);
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_drain_gives_up_at_its_limit() {
    let transport = MemoryTransport::default();
    let (process, handle) = leader(&transport, 1).await;
    let engine = Engine::start(&transport, 1);
    let mut workers = puppets(&transport).await;
    let (requested, _) = under_way(&engine, &mut workers).await;
    let begun = Instant::now();
    assert!(!handle.drain(Duration::from_secs(5)).await);
    assert_eq!(seconds(begun).round(), 5.0);
    assert!(!requested.is_finished(), "its copies may still run");
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_idle_leader_is_drained_at_once_and_lets_slots_finish() {
    let transport = MemoryTransport::default();
    let (process, handle) = leader(&transport, 1).await;
    let engine = Engine::start(&transport, 1);
    let _workers = puppets(&transport).await;
    engine.lookup(1, 1, PAGES).await.expect("an answer");
    assert!(handle.drain(Duration::from_secs(5)).await);
    let finish = kvferry_protocol::Finish { slot: 1 };
    let finished = engine
        .0
        .call_as(RequestId(2), finish, TEST_TIMEOUT, Duration::ZERO)
        .await;
    assert!(finished.is_ok(), "{finished:?}");
    assert_eq!(engine.status().await.slots, 0);
    let again = engine.lookup(1, 1, PAGES).await;
    assert!(again.is_ok(), "what was answered is said again: {again:?}");
    process.stop().await;
    assert!(
        handle.drain(TEST_TIMEOUT).await,
        "a leader that has ended is drained"
    );
}
