//! Misbehaving peers: the memory that they can occupy is bounded, each of their messages is answered or ends their
//! connection, and other peers are served meanwhile.

use std::time::Duration;

use kvferry_protocol::{
    ErrorCode, HEADER_BYTES, Header, Load, Message, MessageKind, PartBody, Status, Store,
    Unregister, VERSION, limits,
};
use kvferry_transport::{Frame, Limits, MemoryTransport, PENDING_FRAMES_MAX};
use kvferry_types::{Epoch, PageList, RequestId};
use tokio::time::Instant;

use super::world::{
    Engine, Puppet, Raw, TEST_TIMEOUT, leader, leader_within, puppets, seconds, store,
};

/// Limits under which a few messages fill every queue.
fn narrow() -> Limits {
    Limits {
        body_bytes: 16 << 10,
        pending_bytes: 64 << 10,
        ..Limits::default()
    }
}

async fn is_served(engine: &Engine) {
    let begun = Instant::now();
    engine.status().await;
    assert!(seconds(begun) < 1.0, "served after {} s", seconds(begun));
    assert_eq!(engine.contradiction().await, "");
}

#[tokio::test(start_paused = true)]
async fn requests_beyond_the_credits_are_refused_and_others_are_served() {
    let transport = MemoryTransport::default();
    let (process, _) = leader(&transport, 1).await;
    let engine = Engine::start(&transport, 1);
    // Stores wait, because no worker has attached.
    let mut flood = Raw::engine(&transport, 2, Limits::default()).await;
    let credits = u64::from(limits::REQUEST_CREDITS);
    for id in 1..=credits {
        assert!(flood.send_message(id, store(id, 1).into()).await);
    }
    is_served(&engine).await;
    for id in credits + 1..=credits + 100 {
        assert!(flood.send_message(id, store(id, 1).into()).await);
        assert_eq!(flood.receive_error().await, (id, ErrorCode::Busy));
    }
    is_served(&engine).await;
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn bytes_beyond_the_credits_are_refused() {
    let transport = MemoryTransport::default();
    let (process, _) = leader(&transport, 1).await;
    let mut flood = Raw::engine(&transport, 2, Limits::default()).await;
    let large = |slot| {
        Message::Store(Store {
            slot,
            parts: vec![PartBody {
                group: 0,
                first_page: 0,
                pages: PageList::run(0, 1).into(),
                count: 1,
                priority: None,
            }],
            hash_bytes: 64,
            more_hashes: vec![0; 64 * 100_000],
            more_from: 0,
            after: 0,
        })
    };
    let fit = limits::BYTE_CREDITS / (64 * 100_000);
    for id in 1..=fit {
        assert!(flood.send_message(id, large(id)).await);
    }
    assert!(flood.send_message(fit + 1, large(fit + 1)).await);
    assert_eq!(flood.receive_error().await, (fit + 1, ErrorCode::Busy));
    // A request that fits beside the others is accepted: the store waits and is not answered yet.
    assert!(flood.send_message(fit + 2, store(1, 1).into()).await);
    let answer = tokio::time::timeout(Duration::from_millis(500), flood.0.recv()).await;
    assert!(answer.is_err(), "{answer:?}");
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_never_reads_is_closed_and_others_are_served() {
    let transport = MemoryTransport::default();
    let (process, _) = leader_within(&transport, 1, narrow()).await;
    let engine = Engine::start_within(&transport, 1, narrow());
    is_served(&engine).await;
    let mut unread = Raw::engine(&transport, 2, narrow()).await;
    let mut said = 0_usize;
    while unread
        .send_message(1 + said as u64, Message::Status(Status { check: false }))
        .await
    {
        said += 1;
        assert!(said < PENDING_FRAMES_MAX, "its answers are kept for ever");
        if said.is_multiple_of(16) {
            is_served(&engine).await;
        }
    }
    is_served(&engine).await;
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_far_exceeds_its_credits_is_still_answered() {
    let transport = MemoryTransport::default();
    let (process, _) = leader(&transport, 1).await;
    let workers = puppets(&transport).await.map(Puppet::obey);
    let engine = Engine::start(&transport, 1);
    let count = 3 * u64::from(limits::REQUEST_CREDITS);
    let requested: Vec<_> = (1..=count)
        .map(|id| {
            let engine = engine.clone();
            tokio::spawn(async move { engine.lookup(id, id % 64, 8).await })
        })
        .collect();
    for answer in requested {
        let answer = answer.await.expect("no panic");
        assert!(answer.is_ok(), "{answer:?}");
    }
    assert_eq!(engine.status().await.counters["lookups"], count);
    workers.iter().for_each(|worker| worker.abort());
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn invalid_messages_to_a_leader_are_answered_with_typed_errors() {
    let transport = MemoryTransport::default();
    let (process, _) = leader(&transport, 1).await;
    let _workers = puppets(&transport).await;
    let mut raw = Raw::engine(&transport, 1, Limits::default()).await;
    assert!(
        raw.send_message(1, Message::Unregister(Unregister {}))
            .await
    );
    assert_eq!(raw.receive_error().await, (1, ErrorCode::Forbidden));
    let beyond = Message::Load(Load {
        slot: 1,
        parts: vec![PartBody {
            group: 0,
            first_page: 0,
            pages: PageList::run(1000, 1).into(),
            count: 1,
            priority: None,
        }],
        after: 0,
    });
    assert!(raw.send_message(2, beyond).await);
    assert_eq!(raw.receive_error().await, (2, ErrorCode::Invalid));
    let header = Header {
        version: VERSION,
        kind: MessageKind::Lookup.number(),
        correlation: RequestId(3),
        deadline_ms: 1000,
        required: 0,
        epoch: Epoch(0),
    };
    let cut_off = Frame::new(header.to_bytes().to_vec(), vec![0x81]);
    assert!(raw.send(cut_off).await);
    assert_eq!(raw.receive_error().await, (3, ErrorCode::Malformed));
    assert!(raw.send_message(4, super::world::lookup(1, 1).into()).await);
    let answer = raw.receive().await.expect("an answer");
    assert_eq!(answer.correlation, RequestId(4), "it goes on");
    process.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_sends_only_noise_is_closed_and_others_are_served() {
    let transport = MemoryTransport::default();
    let (process, _) = leader(&transport, 1).await;
    let engine = Engine::start(&transport, 1);
    let mut noise = Raw::engine(&transport, 2, Limits::default()).await;
    let mut sent = 0;
    while noise
        .send(Frame::new(vec![0xa5; HEADER_BYTES], vec![0xc1]))
        .await
    {
        sent += 1;
        assert!(sent < 100, "it is received for ever");
        is_served(&engine).await;
    }
    let received = tokio::time::timeout(TEST_TIMEOUT, noise.0.recv()).await;
    assert!(matches!(received, Ok(Err(_))), "{received:?}");
    is_served(&engine).await;
    process.stop().await;
}
