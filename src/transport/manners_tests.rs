//! Messages that a server accepts from each kind of peer: over the in-memory transport, in virtual time.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::conversation_tests::{HEARTBEAT, Raw, answer, hello, listen_on, server_within, status};
use crate::{Frame, Limits, MemoryTransport, STRANGERS_MAX, Server, ServerEvent};
use kvferry_protocol::{
    Envelope, ErrorBody, ErrorCode, HELLO_VERSION, Header, Hello, Message, MessageKind, Role,
    VERSION, VERSION_MIN, encode, limits,
};
use kvferry_types::{Epoch, RequestId};

/// A byte that no decoder accepts.
const GARBAGE: u8 = 0xc1;

async fn server(transport: &MemoryTransport) -> Server {
    let roles = vec![Role::Engine, Role::Worker, Role::Admin];
    server_within(transport, 1, Limits::default(), roles).await
}

/// A server that reads and does not answer.
async fn mute(transport: &MemoryTransport) {
    let mut server = server(transport).await;
    tokio::spawn(async move { listen_on(&mut server).await });
}

fn as_role(role: Role) -> Message {
    Message::Hello(Hello {
        role,
        ..hello(1, 2)
    })
}

fn header(kind: u16, id: u64) -> Header {
    Header {
        version: VERSION,
        kind,
        correlation: RequestId(id),
        deadline_ms: 1000,
        required: 0,
        epoch: Epoch(0),
    }
}

impl Raw {
    async fn welcomed(transport: &MemoryTransport, role: Role) -> Self {
        let mut raw = Self::connect(transport).await;
        raw.send_message(0, as_role(role)).await;
        assert_eq!(raw.receive().await.message.kind(), MessageKind::Welcome);
        raw
    }

    /// Returns false when the connection is closed.
    async fn send(&mut self, header: Header, body: Vec<u8>) -> bool {
        let frame = Frame::new(header.to_bytes().to_vec(), body);
        self.0.send(frame).await.is_ok()
    }

    /// Asserts that the server has sent nothing to the peer before this ping's answer.
    async fn receive_nothing(&mut self, id: u64) {
        self.send_message(id, Message::Ping(kvferry_protocol::Empty {}))
            .await;
        let received = self.receive().await;
        assert_eq!(
            (received.message.kind(), received.correlation.0),
            (MessageKind::Pong, id)
        );
    }

    async fn receive_refusal(&mut self) -> (u64, ErrorBody) {
        let received = self.receive().await;
        match received.message {
            Message::Error(error) => (received.correlation.0, error),
            other => panic!("{} instead of an error", other.kind().name()),
        }
    }

    /// Completes when the server has closed the connection.
    async fn closed(&mut self) {
        while self.0.recv().await.is_ok() {}
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_before_the_hello_is_not_read_and_the_peer_is_closed() {
    let transport = MemoryTransport::default();
    mute(&transport).await;
    let mut stranger = Raw::connect(&transport).await;
    let mut sent = 0;
    while stranger
        .send(
            header(MessageKind::Lookup.number(), sent),
            vec![GARBAGE; limits::BODY_BYTES_MAX],
        )
        .await
    {
        assert_eq!(
            stranger.receive_error().await,
            (sent, ErrorCode::HelloFirst)
        );
        sent += 1;
        if sent == 17 {
            stranger.closed().await;
            return;
        }
    }
    panic!("closed after {sent}");
}

#[tokio::test(start_paused = true)]
async fn a_kind_that_a_role_may_not_send_is_refused_unread() {
    let transport = MemoryTransport::default();
    mute(&transport).await;
    let mut engine = Raw::welcomed(&transport, Role::Engine).await;
    for (id, kind) in [
        (1, MessageKind::Attach),
        (2, MessageKind::Register),
        (3, MessageKind::Hello),
    ] {
        engine
            .send(header(kind.number(), id), vec![GARBAGE; 64])
            .await;
        let code = match kind {
            MessageKind::Hello => ErrorCode::Invalid,
            _ => ErrorCode::Forbidden,
        };
        assert_eq!(engine.receive_error().await, (id, code), "{}", kind.name());
    }
    // Answers to requests that were never sent. The server must not answer: the engine would take an error for the
    // answer to a request of its own.
    for (id, kind) in [
        (4, MessageKind::Ended),
        (5, MessageKind::Inventory),
        (6, MessageKind::Error),
    ] {
        engine
            .send(header(kind.number(), id), vec![GARBAGE; 64])
            .await;
        engine.receive_nothing(id).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_still_open_is_not_read_again() {
    let transport = MemoryTransport::default();
    mute(&transport).await;
    let mut engine = Raw::welcomed(&transport, Role::Engine).await;
    engine.send_message(7, status()).await;
    let again = header(MessageKind::Lookup.number(), 7);
    engine.send(again, vec![GARBAGE; 64]).await;
    engine.receive_nothing(8).await;
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_pings_and_never_sends_a_hello_is_closed() {
    let transport = MemoryTransport::default();
    mute(&transport).await;
    let _kept = Raw::welcomed(&transport, Role::Engine).await;
    let mut stranger = Raw::connect(&transport).await;
    let begun = tokio::time::Instant::now();
    let pinging = async {
        loop {
            stranger.receive_nothing(1).await;
            tokio::time::sleep(HEARTBEAT / 2).await;
            if let Ok(Err(_)) =
                tokio::time::timeout(Duration::from_millis(1), stranger.0.recv()).await
            {
                return;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(8), pinging)
        .await
        .expect("it is closed");
    assert!(begun.elapsed() >= Duration::from_secs(5));
}

/// Messages without an event are handled between those of others, also when new ones arrive all the time.
#[tokio::test(start_paused = true)]
async fn messages_that_need_no_answer_delay_a_request_by_a_few_of_their_kind() {
    const PEERS: u64 = 8;
    const MOST: u64 = 1_000_000;
    let transport = MemoryTransport::default();
    let mut server = server(&transport).await;
    let sent = Arc::new(AtomicU64::new(0));
    for _ in 0..PEERS {
        let (transport, sent) = (transport.clone(), Arc::clone(&sent));
        tokio::spawn(async move {
            let mut raw = Raw::welcomed(&transport, Role::Admin).await;
            // An answer of an unknown kind is dropped.
            while raw.send(header(999, 1), vec![0x80]).await && sent.load(Relaxed) < MOST {
                sent.fetch_add(1, Relaxed);
            }
            raw.closed().await;
        });
    }
    let (before, flood) = (Arc::new(AtomicU64::new(0)), Arc::clone(&sent));
    let requested = Arc::clone(&before);
    tokio::spawn(async move {
        let mut engine = Raw::welcomed(&transport, Role::Engine).await;
        while flood.load(Relaxed) < 10_000 {
            tokio::task::yield_now().await;
        }
        requested.store(flood.load(Relaxed), Relaxed);
        engine.send_message(1, status()).await;
        engine.closed().await;
    });
    loop {
        let mut events = server.next().await.expect("events");
        if events.any(|event| matches!(event, ServerEvent::Message { .. })) {
            break;
        }
    }
    let waited_for = sent.load(Relaxed) - before.load(Relaxed);
    assert!(waited_for < 20_000, "{waited_for} messages came first");
}

#[tokio::test(start_paused = true)]
async fn a_new_connection_closes_the_oldest_one_without_a_hello() {
    let transport = MemoryTransport::default();
    mute(&transport).await;
    let mut strangers = Vec::new();
    for _ in 0..STRANGERS_MAX {
        strangers.push(Raw::connect(&transport).await);
    }
    let mut engine = Raw::welcomed(&transport, Role::Engine).await;
    strangers[0].closed().await;
    engine.receive_nothing(1).await;
    for stranger in &mut strangers[1..] {
        stranger.receive_nothing(1).await;
    }
}

#[tokio::test(start_paused = true)]
async fn other_roles_leave_the_workers_reserved_connections_free() {
    let transport = MemoryTransport::default();
    let roles = vec![Role::Engine, Role::Worker, Role::Admin];
    let limits = Limits {
        connections: 5,
        reserved_connections: 3,
        ..Limits::default()
    };
    let mut server = server_within(&transport, 1, limits, roles).await;
    tokio::spawn(async move { listen_on(&mut server).await });
    let engine = Raw::welcomed(&transport, Role::Engine).await;
    let _admin = Raw::welcomed(&transport, Role::Admin).await;
    let mut second = Raw::connect(&transport).await;
    second.send_message(1, as_role(Role::Engine)).await;
    let (_, refused) = second.receive_refusal().await;
    assert_eq!((refused.code(), refused.retry), (ErrorCode::Busy, true));
    let _workers = [
        Raw::welcomed(&transport, Role::Worker).await,
        Raw::welcomed(&transport, Role::Worker).await,
    ];
    drop(engine);
    tokio::time::sleep(Duration::from_millis(1)).await;
    second.send_message(2, as_role(Role::Engine)).await;
    assert_eq!(second.receive().await.message.kind(), MessageKind::Welcome);
}

#[test]
fn a_leader_accepts_a_connection_of_every_worker_and_every_engine() {
    for (ranks, replicas) in [(1, 1), (8, 8), (64, 64)] {
        let limits = Limits::of_leader(ranks, replicas);
        let workers = usize::from(ranks) * usize::from(replicas);
        assert!(limits.reserved_connections >= workers + STRANGERS_MAX);
        let others = limits.connections - limits.reserved_connections;
        assert!(others > usize::from(replicas), "{ranks} x {replicas}");
        assert!(limits.check().is_ok());
    }
}

#[tokio::test(start_paused = true)]
async fn unknown_kinds_are_answered_or_dropped_without_a_limit() {
    let transport = MemoryTransport::default();
    mute(&transport).await;
    let mut newer = Raw::welcomed(&transport, Role::Engine).await;
    for id in 1..=100 {
        newer.send(header(998, id), vec![GARBAGE; 64]).await;
        assert_eq!(newer.receive_error().await, (id, ErrorCode::UnknownKind));
        newer.send(header(999, id), vec![GARBAGE; 64]).await;
        newer.receive_nothing(id).await;
    }
}

#[tokio::test(start_paused = true)]
async fn unknown_required_bits_are_refused_and_other_bits_skipped() {
    let transport = MemoryTransport::default();
    mute(&transport).await;
    let mut newer = Raw::welcomed(&transport, Role::Engine).await;
    let ping = header(MessageKind::Ping.number(), 3);
    let required = Header {
        required: 4,
        ..ping
    };
    newer.send(required, vec![0x80]).await;
    let (id, refused) = newer.receive_refusal().await;
    assert_eq!((id, refused.code()), (3, ErrorCode::Unsupported));
    assert!(refused.message.contains("0x0004"), "{}", refused.message);
    let mut skipped = ping.to_bytes().to_vec();
    skipped[22..24].fill(0xff);
    let frame = Frame::new(skipped, vec![0x80]);
    newer.0.send(frame).await.expect("it is sent");
    assert_eq!(newer.receive().await.message.kind(), MessageKind::Pong);
}

#[tokio::test(start_paused = true)]
async fn a_message_that_never_fits_is_answered_limit_without_retry() {
    let transport = MemoryTransport::default();
    mute(&transport).await;
    let mut engine = Raw::welcomed(&transport, Role::Engine).await;
    // A load with one page more than a message may name: slot, parts of one: first_page, count, pages [[0, n]].
    let mut pages =
        b"\x82\xa4slot\x01\xa5parts\x91\x83\xaafirst_page\x00\xa5count\x00\xa5pages\x91\x92\x00\xce"
            .to_vec();
    let count = u32::try_from(limits::PAGES_MAX + 1).expect("small");
    pages.extend_from_slice(&count.to_be_bytes());
    // A list with one item more than allowed: parts of one, pages [0, 0, ...].
    let mut items =
        b"\x82\xa4slot\x01\xa5parts\x91\x83\xaafirst_page\x00\xa5count\x00\xa5pages\xdd".to_vec();
    let count = u32::try_from(limits::PAGE_ITEMS_MAX + 1).expect("small");
    items.extend_from_slice(&count.to_be_bytes());
    items.resize(items.len() + count as usize, 0);
    // Nested deeper than a body may be.
    let deep = [b"\x81\xa1?".as_slice(), &[0x91; 100]].concat();
    let load = MessageKind::Load.number();
    for (id, body) in [(1, pages), (2, items), (3, deep)] {
        engine.send(header(load, id), body).await;
        let (refused_id, refused) = engine.receive_refusal().await;
        assert_eq!(refused_id, id);
        assert_eq!(refused.code(), ErrorCode::Limit, "{}", refused.message);
        assert!(!refused.retry, "{}", refused.message);
    }
    let long_ping = vec![0x80; limits::SMALL_BODY_BYTES_MAX + 1];
    engine
        .send(header(MessageKind::Ping.number(), 4), long_ping)
        .await;
    let (id, refused) = engine.receive_refusal().await;
    assert_eq!(
        (id, refused.code(), refused.retry),
        (4, ErrorCode::Limit, false)
    );
}

#[tokio::test(start_paused = true)]
async fn hello_and_welcome_have_a_version_of_their_own() {
    let transport = MemoryTransport::default();
    mute(&transport).await;
    let mut raw = Raw::connect(&transport).await;
    raw.send_message(1, status()).await;
    let refused = raw.receive().await;
    assert_eq!(
        (refused.version, refused.message.kind()),
        (HELLO_VERSION, MessageKind::Error)
    );
    raw.send_message(2, Message::Hello(hello(VERSION + 1, VERSION + 1)))
        .await;
    let refused = raw.receive().await;
    assert_eq!(
        (refused.version, refused.message.kind()),
        (HELLO_VERSION, MessageKind::Error)
    );
    raw.send_message(3, Message::Hello(hello(VERSION_MIN, VERSION)))
        .await;
    let welcome = raw.receive().await;
    assert_eq!(
        (welcome.version, welcome.message.kind()),
        (HELLO_VERSION, MessageKind::Welcome)
    );
    raw.send_message(4, Message::Hello(hello(1, 2))).await;
    assert_eq!(raw.receive().await.version, VERSION);
}

#[tokio::test(start_paused = true)]
async fn an_unknown_role_is_refused_with_the_reason() {
    let transport = MemoryTransport::default();
    mute(&transport).await;
    let mut newer = Raw::connect(&transport).await;
    let envelope = Envelope {
        version: HELLO_VERSION,
        correlation: RequestId(1),
        deadline_ms: 1,
        epoch: Epoch(0),
        message: as_role(Role::Engine),
    };
    let (head, body) = encode(&envelope).expect("it can be said");
    let at = body.windows(7).position(|word| word == b"\xa6engine");
    let at = at.expect("the word of its role") + 1;
    let name = body[at..].windows(6).position(|word| word == b"engine");
    assert_eq!(name, Some(0));
    let mut other = body.clone();
    other[at..at + 6].copy_from_slice(b"censor");
    newer
        .0
        .send(Frame::new(head.to_vec(), other))
        .await
        .expect("it is sent");
    let (_, refused) = newer.receive_refusal().await;
    assert_eq!(refused.code(), ErrorCode::Invalid, "{}", refused.message);
    assert!(refused.message.contains("role"), "{}", refused.message);
}

#[tokio::test(start_paused = true)]
async fn a_deadline_is_cut_to_the_longest() {
    let transport = MemoryTransport::default();
    let mut server = server(&transport).await;
    let mut engine = Raw::connect(&transport).await;
    engine.send_message(0, as_role(Role::Engine)).await;
    for (id, deadline_ms) in [(1, u32::MAX), (2, 3000)] {
        let long = Header {
            deadline_ms,
            ..header(MessageKind::Status.number(), id)
        };
        engine.send(long, vec![0x80]).await;
    }
    let mut received = Vec::new();
    while received.len() < 2 {
        for event in server.next().await.expect("the server receives") {
            if let ServerEvent::Message { envelope, .. } = event {
                received.push(envelope.deadline_ms);
            }
        }
    }
    assert_eq!(received, [limits::DEADLINE_MAX_MS, 3000]);
    match engine.receive().await.message {
        Message::Welcome(welcome) => assert_eq!(welcome.deadline_max_ms, limits::DEADLINE_MAX_MS),
        other => panic!("{} instead of a welcome", other.kind().name()),
    }
}

/// The consumer of the events is slow: events that it has taken but not handled still count.
#[tokio::test(start_paused = true)]
async fn unhandled_messages_are_bounded_in_bytes() {
    let transport = MemoryTransport::default();
    let narrow = Limits {
        body_bytes: 64 << 10,
        pending_bytes: 256 << 10,
        ..Limits::default()
    };
    let mut server = server_within(&transport, 1, narrow, vec![Role::Engine]).await;
    let replier = server.replier();
    let mut engine = Raw::connect(&transport).await;
    engine.send_message(0, as_role(Role::Engine)).await;
    // A status with an unknown field: 81 a1 '?' c6 length bytes.
    let mut body = b"\x81\xa1?\xc6".to_vec();
    body.extend_from_slice(&(60_u32 << 10).to_be_bytes());
    body.resize(body.len() + (60 << 10), 0);
    let said = tokio::spawn(async move {
        for id in 1..=40 {
            let sent = engine.send(header(MessageKind::Status.number(), id), body.clone());
            assert!(sent.await, "closed");
        }
        engine
    });
    let mut handled = 0;
    while handled < 40 {
        let mut held = Vec::new();
        while let Ok(events) = tokio::time::timeout(Duration::from_millis(10), server.next()).await
        {
            held.push(events.expect("the server receives"));
        }
        let mut batches = held.into_iter().map(Iterator::collect::<Vec<_>>);
        let taken: Vec<ServerEvent> = batches.by_ref().flatten().collect();
        assert!(!taken.is_empty(), "nothing comes any more");
        let mut waited = 0;
        for event in taken {
            if let ServerEvent::Message { peer, envelope } = event {
                waited += 1;
                replier.reply(peer, envelope.correlation, answer());
            }
        }
        assert!(
            waited * 60 <= 256,
            "{waited} messages of 60 KiB were taken unhandled"
        );
        handled += waited;
    }
    drop(said.await.expect("no panic"));
}
