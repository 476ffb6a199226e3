//! A leader that stops, and its successor at the same address: engines and workers reconnect, and requests are
//! answered.

use std::time::Duration;

use kvferry_protocol::{Abandon, ErrorCode, Message, Written};
use kvferry_transport::{Limits, MemoryTransport};

use super::workers::{Attaching, admit, attaching, rank, worker};
use super::world::{Engine, Puppet, Received, TEST_TIMEOUT, leader, puppets, server, soon};

const PAGES: u8 = 4;

async fn hits(engine: &Engine, id: u64, slot: u64) -> u32 {
    match engine.lookup(id, slot, PAGES).await {
        Ok(found) => found.hit_pages,
        other => panic!("{other:?} instead of a lookup's answer"),
    }
}

#[tokio::test(start_paused = true)]
async fn engines_and_workers_continue_with_the_next_leader() {
    let transport = MemoryTransport::default();
    let (first, _) = leader(&transport, 1).await;
    let engine = Engine::start(&transport, 1);
    let workers = puppets(&transport).await.map(Puppet::obey);
    assert_eq!(hits(&engine, 1, 1).await, 0);
    let stored = engine.store(2, 1, PAGES.into(), TEST_TIMEOUT).await;
    assert!(stored.is_ok(), "{stored:?}");
    assert_eq!(hits(&engine, 3, 2).await, u32::from(PAGES));

    first.stop().await;
    let requesting = engine.clone();
    let unheard = tokio::spawn(async move { requesting.status().await });
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert!(!unheard.is_finished(), "nobody is there");
    let (second, _) = leader(&transport, 2).await;
    let status = soon("an answer of the next leader", unheard).await;
    assert_eq!(status.expect("no panic").epoch, 2);
    engine.until_ready().await;
    assert_eq!(hits(&engine, 4, 3).await, 0, "it knows of no page");
    let stored = engine.store(5, 3, PAGES.into(), TEST_TIMEOUT).await;
    assert!(stored.is_ok(), "{stored:?}");
    assert_eq!(hits(&engine, 6, 4).await, u32::from(PAGES));
    assert_eq!(engine.contradiction().await, "");
    workers.iter().for_each(|worker| worker.abort());
    second.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_store_that_outlives_its_leader_is_refused_when_no_worker_reads_its_pages() {
    let transport = MemoryTransport::default();
    let (first, _) = leader(&transport, 1).await;
    let engine = Engine::start(&transport, 1);
    let mut workers = puppets(&transport).await;
    engine.lookup(1, 1, PAGES).await.expect("an answer");
    let requesting = engine.clone();
    let requested =
        tokio::spawn(async move { requesting.store(2, 1, PAGES.into(), TEST_TIMEOUT).await });
    for worker in &mut workers {
        worker.order().await;
    }
    first.stop().await;
    let (second, _) = leader(&transport, 2).await;
    let [one, other] = &mut workers;
    assert_eq!(one.begin().await, 2);
    while !matches!(other.receive().await, Received::Welcomed(2)) {}
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(engine.status().await.epoch, 2);
    assert!(
        !requested.is_finished(),
        "a worker may still read these pages"
    );
    other.attach().await;
    let answer = soon("an answer", requested).await.expect("no panic");
    let failure = answer.expect_err("its slot is unknown");
    assert_eq!(failure.code, ErrorCode::UnknownSlot, "{failure}");
    second.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_worker_attaches_again_to_every_new_leader() {
    let transport = MemoryTransport::default();
    let mut first = server(&transport, 1, Limits::default()).await;
    let (worker, _directory) = worker(&transport).await;
    let requested = attaching(&mut first).await;
    admit(&mut first, requested).await;
    first.close().await;
    let mut second = server(&transport, 2, Limits::default()).await;
    let Attaching { attach, .. } = attaching(&mut second).await;
    assert!(
        attach > requested.attach,
        "{attach} after {}",
        requested.attach
    );
    worker.stop().await;
}

#[tokio::test(start_paused = true)]
async fn reports_of_one_connection_are_not_sent_over_the_next() {
    let transport = MemoryTransport::default();
    let mut first = server(&transport, 1, Limits::default()).await;
    let (worker, _directory) = worker(&transport).await;
    let requested = attaching(&mut first).await;
    let again = attaching(&mut first).await;
    assert_eq!(
        again.attach, requested.attach,
        "it says so again while nobody answers"
    );
    // From here on the worker may receive copies. Its second attach request stays unanswered.
    admit(&mut first, requested).await;
    first.close().await;
    let mut second = server(&transport, 1, Limits::default()).await;
    let Attaching { attach, .. } = attaching(&mut second).await;
    assert!(
        attach > requested.attach,
        "attach {attach} says that nothing is under way, and was said before copies began"
    );
    worker.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_worker_refuses_copies_for_an_unknown_engine() {
    let transport = MemoryTransport::default();
    let (worker, _directory) = worker(&transport).await;
    let rank = rank(&transport);
    let written = Message::Written(Written {
        through: 5,
        timeline: false,
    });
    let refused = rank.request(written, TEST_TIMEOUT).await;
    let failure = refused.expect_err("there is no memory");
    assert_eq!(failure.code, ErrorCode::Invalid, "{failure}");
    let abandon = Message::Abandon(Abandon {
        requests: vec![3, 5],
    });
    let answer = rank.request(abandon, TEST_TIMEOUT).await;
    assert!(
        matches!(answer, Ok(Message::AbandonAnswer(_))),
        "{answer:?}"
    );
    worker.stop().await;
}
