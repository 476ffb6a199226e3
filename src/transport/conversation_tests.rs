//! Server and client together, over the in-memory transport and in virtual time.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use crate::listener::PEER_FRAMES_MAX;
use crate::{
    Address, Client, ClientSettings, Connection, Frame, Incoming, Limits, Listener,
    MemoryTransport, SERVER_BATCH_MAX, Server, ServerEvent, ServerSettings, Transport,
};
use kvferry_protocol::{
    Cancel, Empty, Ended, Envelope, ErrorCode, Header, Hello, Message, MessageKind, Role, Status,
    StatusAnswer, VERSION, VERSION_MIN, decode, encode, limits,
};
use kvferry_types::{Epoch, RequestId};

pub(super) const HEARTBEAT: Duration = Duration::from_secs(1);

pub(super) fn address() -> Address {
    Address::Memory("server".to_owned())
}

pub(super) fn hello(version_min: u16, version_max: u16) -> Hello {
    let name = "test".to_owned();
    Hello {
        version_min,
        version_max,
        role: Role::Engine,
        engine: [5; 16],
        rank: 0,
        replica: 0,
        features: 0,
        name,
    }
}

async fn server(transport: &MemoryTransport, epoch: u64) -> Server {
    server_within(transport, epoch, Limits::default(), vec![Role::Engine]).await
}

pub(super) async fn server_within(
    transport: &MemoryTransport,
    epoch: u64,
    limits: Limits,
    roles: Vec<Role>,
) -> Server {
    let listener = transport
        .listen(&address(), limits)
        .await
        .expect("it listens");
    serve(listener, epoch, roles)
}

pub(super) fn serve(listener: Listener, epoch: u64, roles: Vec<Role>) -> Server {
    Server::new(
        listener,
        ServerSettings {
            features: 0,
            worker_seats: None,
            epoch: Epoch(epoch),
            heartbeat: HEARTBEAT,
            roles,
        },
    )
}

pub(super) fn client(
    transport: &MemoryTransport,
    hello: Hello,
) -> (Client, tokio::sync::mpsc::Receiver<Incoming>) {
    let settings = ClientSettings {
        address: address(),
        hello,
        limits: Limits::default(),
    };
    Client::start(Arc::new(transport.clone()), settings)
}

pub(super) fn status() -> Message {
    Message::Status(Status { check: false })
}

pub(super) fn answer() -> Message {
    Message::StatusAnswer(StatusAnswer {
        version: "answered".to_owned(),
        ..StatusAnswer::default()
    })
}

/// Waits for the next request and returns its sender and id.
async fn next_request(server: &mut Server) -> (crate::PeerId, RequestId) {
    loop {
        for event in server.next().await.expect("the server receives") {
            if let ServerEvent::Message { peer, envelope } = event {
                return (peer, envelope.correlation);
            }
        }
    }
}

/// Reads events without answering, for as long as the future is polled.
pub(super) async fn listen_on(server: &mut Server) {
    while server.next().await.is_some() {}
}

/// A client that sends messages chosen by the test.
pub(super) struct Raw(pub(super) Connection);

impl Raw {
    pub(super) async fn connect(transport: &MemoryTransport) -> Self {
        let connected = transport
            .connect(&address(), Limits::default(), HEARTBEAT)
            .await;
        Self(connected.expect("it connects"))
    }

    pub(super) async fn send_message(&mut self, id: u64, message: Message) {
        let correlation = RequestId(id);
        let envelope = Envelope {
            version: VERSION,
            correlation,
            deadline_ms: 1,
            epoch: Epoch(0),
            message,
        };
        let (header, body) = encode(&envelope).expect("it can be said");
        self.0
            .send(Frame::new(header.to_vec(), body))
            .await
            .expect("it is sent");
    }

    pub(super) async fn receive(&mut self) -> Envelope {
        let frame = self.0.recv().await.expect("an answer");
        let header = Header::from_bytes(&frame.header).expect("a header");
        decode(header, &frame.body).expect("a message")
    }

    pub(super) async fn receive_error(&mut self) -> (u64, ErrorCode) {
        let received = self.receive().await;
        match received.message {
            Message::Error(error) => (received.correlation.0, error.code()),
            other => panic!("{} instead of an error", other.kind().name()),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_is_answered_in_the_older_version() {
    let transport = MemoryTransport::default();
    let mut server = server(&transport, 3).await;
    let (client, mut incoming) = client(&transport, hello(VERSION_MIN, VERSION_MIN));
    let requesting = tokio::spawn(async move { client.request(status(), HEARTBEAT).await });
    let (peer, id) = next_request(&mut server).await;
    server.replier().reply(peer, id, answer());
    assert_eq!(requesting.await.expect("no panic"), Ok(answer()));
    assert!(matches!(
        incoming.recv().await,
        Some(Incoming::Welcomed {
            epoch: Epoch(3),
            ..
        })
    ));
}

#[tokio::test(start_paused = true)]
async fn without_a_common_version_every_request_fails_with_the_reason() {
    let transport = MemoryTransport::default();
    let mut server = server(&transport, 1).await;
    let (client, _incoming) = client(&transport, hello(VERSION + 1, VERSION + 5));
    let requesting = client.request(status(), Duration::from_secs(5));
    let failure = tokio::select! {
        answer = requesting => answer.expect_err("no version in common"),
        () = listen_on(&mut server) => unreachable!("the server ends with the test"),
    };
    assert_eq!(failure.code, ErrorCode::UnsupportedVersion, "{failure}");
    assert!(failure.message.contains("3 to 7"), "{failure}");
}

#[tokio::test(start_paused = true)]
async fn without_a_server_a_request_fails_at_its_deadline() {
    let transport = MemoryTransport::default();
    let (client, _incoming) = client(&transport, hello(1, 2));
    let begun = tokio::time::Instant::now();
    let failure = client
        .request(status(), Duration::from_secs(7))
        .await
        .expect_err("nobody is there");
    assert_eq!(failure.code, ErrorCode::Deadline);
    assert_eq!(begun.elapsed().as_secs(), 7);
    let patient =
        client.request_with_grace(RequestId(1), status(), HEARTBEAT, Duration::from_secs(4));
    assert!(patient.await.is_err());
    assert_eq!(
        begun.elapsed().as_secs(),
        12,
        "the deadline and the grace time"
    );
}

#[tokio::test(start_paused = true)]
async fn an_unanswered_request_is_sent_again_under_the_same_id_after_a_new_hello() {
    let transport = MemoryTransport::default();
    let mut first = server(&transport, 1).await;
    let (client, mut incoming) = client(&transport, hello(1, 2));
    let requesting = tokio::spawn(async move {
        client
            .request_as(RequestId(42), status(), Duration::from_secs(60))
            .await
    });
    let (_, id) = next_request(&mut first).await;
    assert_eq!(id, RequestId(42));
    first.close().await;
    let mut second = server(&transport, 2).await;
    let (peer, id) = next_request(&mut second).await;
    assert_eq!(id, RequestId(42));
    second.replier().reply(peer, id, answer());
    assert_eq!(requesting.await.expect("no panic"), Ok(answer()));
    let mut seen = Vec::new();
    while seen.len() < 3 {
        match incoming.recv().await.expect("it goes on") {
            Incoming::Welcomed { epoch, .. } => seen.push(epoch.0),
            Incoming::Lost => seen.push(0),
            Incoming::Request { .. } | Incoming::Answered { .. } => {
                unreachable!("nothing is ordered, and nothing was asked in order")
            }
        }
    }
    assert_eq!(
        seen,
        [1, 0, 2],
        "welcomed, lost, welcomed by the next epoch"
    );
}

#[tokio::test(start_paused = true)]
async fn violations_of_the_protocol_are_answered_with_typed_errors() {
    let transport = MemoryTransport::default();
    let mut server = server(&transport, 1).await;
    tokio::spawn(async move { listen_on(&mut server).await });
    let mut raw = Raw::connect(&transport).await;
    raw.send_message(1, status()).await;
    assert_eq!(raw.receive_error().await, (1, ErrorCode::HelloFirst));
    raw.send_message(
        2,
        Message::Hello(Hello {
            role: Role::Worker,
            ..hello(1, 2)
        }),
    )
    .await;
    assert_eq!(
        raw.receive_error().await,
        (2, ErrorCode::Invalid),
        "no role for this server"
    );
    raw.send_message(3, Message::Hello(hello(1, 2))).await;
    assert_eq!(raw.receive().await.message.kind(), MessageKind::Welcome);
    raw.send_message(4, Message::Hello(hello(1, 2))).await;
    assert_eq!(
        raw.receive_error().await,
        (4, ErrorCode::Invalid),
        "the hello was sent before"
    );
    raw.send_message(5, Message::Ping(Empty {})).await;
    assert_eq!(raw.receive().await.message.kind(), MessageKind::Pong);
    let unknown = Header {
        version: VERSION,
        kind: 998,
        correlation: RequestId(6),
        deadline_ms: 1,
        required: 0,
        epoch: Epoch(0),
    };
    raw.0
        .send(Frame::new(unknown.to_bytes().to_vec(), vec![0x80]))
        .await
        .expect("it is sent");
    assert_eq!(raw.receive_error().await, (6, ErrorCode::UnknownKind));
    let malformed = Header {
        kind: MessageKind::Lookup.number(),
        correlation: RequestId(7),
        ..unknown
    };
    raw.0
        .send(Frame::new(malformed.to_bytes().to_vec(), vec![0xc1]))
        .await
        .expect("it is sent");
    assert_eq!(raw.receive_error().await, (7, ErrorCode::Malformed));
}

#[tokio::test(start_paused = true)]
async fn one_request_more_than_the_credits_is_answered_busy() {
    let transport = MemoryTransport::default();
    let mut server = server(&transport, 1).await;
    tokio::spawn(async move { listen_on(&mut server).await });
    let mut raw = Raw::connect(&transport).await;
    raw.send_message(0, Message::Hello(hello(1, 2))).await;
    assert_eq!(raw.receive().await.message.kind(), MessageKind::Welcome);
    for id in 1..=u64::from(limits::REQUEST_CREDITS) {
        raw.send_message(id, status()).await;
    }
    let one_more = u64::from(limits::REQUEST_CREDITS) + 1;
    raw.send_message(one_more, status()).await;
    assert_eq!(raw.receive_error().await, (one_more, ErrorCode::Busy));
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_stays_silent_is_closed_after_three_heartbeats() {
    let transport = MemoryTransport::default();
    let mut server = server(&transport, 1).await;
    let mut raw = Raw::connect(&transport).await;
    raw.send_message(1, Message::Hello(hello(1, 2))).await;
    let begun = tokio::time::Instant::now();
    let closed = async {
        loop {
            for event in server.next().await.expect("the server receives") {
                if let ServerEvent::Closed { .. } = event {
                    return;
                }
            }
        }
    };
    tokio::time::timeout(HEARTBEAT * 6, closed)
        .await
        .expect("it is closed");
    assert!(begun.elapsed() > HEARTBEAT * 3);
    assert_eq!(raw.receive().await.message.kind(), MessageKind::Welcome);
    assert!(raw.0.recv().await.is_err(), "the connection is gone");
}

/// The kernel wakes a process a little late, now more and now less.
#[tokio::test(start_paused = true)]
async fn a_silent_peer_is_closed_in_time_however_late_timers_fire() {
    let transport = MemoryTransport::default();
    let mut server = server(&transport, 1).await;
    let mut raw = Raw::connect(&transport).await;
    raw.send_message(1, Message::Hello(hello(1, 2))).await;
    let begun = tokio::time::Instant::now();
    let late = async {
        let step = Duration::from_millis(10);
        for (beat, late_ms) in (1..).zip([1, 0, 2, 1, 3, 2, 4, 3]) {
            while begun.elapsed() < HEARTBEAT * beat - step {
                tokio::time::advance(step).await;
            }
            let until = HEARTBEAT * beat + Duration::from_millis(late_ms);
            tokio::time::advance(until - begun.elapsed()).await;
        }
    };
    let closed = async {
        loop {
            for event in server.next().await.expect("the server receives") {
                if let ServerEvent::Closed { .. } = event {
                    return begun.elapsed();
                }
            }
        }
    };
    let closed = tokio::select! {
        biased;
        closed = closed => closed,
        () = late => panic!("not closed within {:?}", begun.elapsed()),
    };
    assert!(closed < HEARTBEAT * 5, "{closed:?}");
}

#[tokio::test(start_paused = true)]
async fn other_tasks_run_between_two_full_batches() {
    const PEERS: usize = 8;
    let transport = MemoryTransport::default();
    let mut server = server(&transport, 1).await;
    let mut peers = Vec::new();
    for _ in 0..PEERS {
        let mut raw = Raw::connect(&transport).await;
        for ping in 0..PEER_FRAMES_MAX {
            raw.send_message(ping as u64, Message::Ping(Empty {})).await;
        }
        peers.push(raw);
    }
    // Virtual time advances when no task can go on: then all frames wait in the server's queue.
    tokio::time::sleep(Duration::from_millis(1)).await;
    {
        let mut next = pin!(server.next());
        let once = poll_fn(|context| Poll::Ready(next.as_mut().poll(context).is_pending()));
        assert!(once.await, "pings are no events");
    }
    let mut answered = 0;
    for raw in &mut peers {
        let within = Duration::from_millis(1);
        while tokio::time::timeout(within, raw.receive()).await.is_ok() {
            answered += 1;
        }
    }
    const { assert!(PEERS * PEER_FRAMES_MAX > SERVER_BATCH_MAX + PEERS) };
    // The first batch also has the events of new connections.
    let one_batch = SERVER_BATCH_MAX - PEERS..=SERVER_BATCH_MAX;
    assert!(one_batch.contains(&answered), "{answered}");
}

#[tokio::test(start_paused = true)]
async fn messages_that_arrived_while_the_server_was_busy_count() {
    let transport = MemoryTransport::default();
    let mut server = server(&transport, 1).await;
    let mut peers = [
        Raw::connect(&transport).await,
        Raw::connect(&transport).await,
    ];
    for peer in &mut peers {
        peer.send_message(1, Message::Hello(hello(1, 2))).await;
    }
    let received = tokio::time::timeout(HEARTBEAT / 2, listen_on(&mut server)).await;
    assert!(received.is_err(), "the server goes on");
    for peer in &mut peers {
        peer.send_message(2, status()).await;
    }
    // Longer than the silence after which a peer is closed.
    tokio::time::advance(HEARTBEAT * 5).await;
    let mut requested = 0;
    let listen = async {
        loop {
            for event in server.next().await.expect("the server receives") {
                match event {
                    ServerEvent::Message { .. } => requested += 1,
                    ServerEvent::Closed { .. } => return,
                    ServerEvent::Opened { .. } => {}
                }
            }
        }
    };
    let closed = tokio::time::timeout(HEARTBEAT * 2, listen).await;
    assert!(closed.is_err(), "closed although it had spoken");
    assert_eq!(requested, peers.len());
}

/// The client sends its requests at the start and then only receives: one answer every half heartbeat, for ten seconds.
#[tokio::test(start_paused = true)]
async fn a_client_that_only_listens_is_kept() {
    let transport = MemoryTransport::default();
    let mut server = server(&transport, 1).await;
    let (client, mut incoming) = client(&transport, hello(1, 2));
    let requested: Vec<_> = (1..=20)
        .map(|id| {
            let client = client.clone();
            tokio::spawn(async move {
                let timeout = Duration::from_secs(60);
                client.request_as(RequestId(id), status(), timeout).await
            })
        })
        .collect();
    let mut questions = Vec::new();
    while questions.len() < requested.len() {
        for event in server.next().await.expect("the server receives") {
            if let ServerEvent::Message { peer, envelope } = event {
                questions.push((peer, envelope.correlation));
            }
        }
    }
    let replier = server.replier();
    let listening = tokio::spawn(async move {
        loop {
            for event in server.next().await.expect("the server receives") {
                assert!(!matches!(event, ServerEvent::Closed { .. }), "closed");
            }
        }
    });
    for (peer, id) in questions {
        tokio::time::sleep(HEARTBEAT / 2).await;
        assert!(!listening.is_finished(), "the server closed the client");
        replier.reply(peer, id, answer());
    }
    for requested in requested {
        assert_eq!(requested.await.expect("no panic"), Ok(answer()));
    }
    assert!(matches!(incoming.try_recv(), Ok(Incoming::Welcomed { .. })));
    assert!(incoming.try_recv().is_err(), "the connection was lost");
    listening.abort();
}

#[tokio::test(start_paused = true)]
async fn a_silent_server_is_disconnected_and_a_client_that_pings_is_kept() {
    let transport = MemoryTransport::default();
    let mut server = server(&transport, 1).await;
    let (_client, mut incoming) = client(&transport, hello(1, 2));
    let kept = tokio::time::timeout(HEARTBEAT * 30, listen_on(&mut server)).await;
    assert!(kept.is_err(), "the server goes on");
    assert!(matches!(incoming.try_recv(), Ok(Incoming::Welcomed { .. })));
    assert!(incoming.try_recv().is_err(), "pings kept the connection");
    // From here on the server does not read the pings.
    let lost = tokio::time::timeout(HEARTBEAT * 10, incoming.recv()).await;
    assert!(matches!(lost, Ok(Some(Incoming::Lost))));
    drop(server);
}

#[tokio::test(start_paused = true)]
async fn the_answer_to_an_order_of_one_connection_is_not_sent_over_the_next() {
    let transport = MemoryTransport::default();
    let listen = |epoch| {
        let roles = vec![Role::Worker];
        server_within(&transport, epoch, Limits::default(), roles)
    };
    let mut first = listen(1).await;
    let worker = Hello {
        role: Role::Worker,
        ..hello(1, 2)
    };
    let (client, mut incoming) = client(&transport, worker);
    let peer = loop {
        let events = first.next().await.expect("the server receives");
        let opened = events.into_iter().find_map(|event| match event {
            ServerEvent::Opened { peer, .. } => Some(peer),
            _ => None,
        });
        if let Some(peer) = opened {
            break peer;
        }
    };
    let cancel = Message::Cancel(Cancel { transfers: vec![1] });
    let ended = || {
        Message::Ended(Ended {
            rank: 0,
            copies: Vec::new(),
        })
    };
    assert_eq!(
        first
            .replier()
            .order(&[peer], RequestId(7), cancel, HEARTBEAT),
        []
    );
    let link = loop {
        match incoming.recv().await.expect("it goes on") {
            Incoming::Request { link, .. } => break link,
            other => assert!(matches!(other, Incoming::Welcomed { .. }), "{other:?}"),
        }
    };
    first.close().await;
    let mut second = listen(2).await;
    let receives = tokio::spawn(async move { next_request(&mut second).await.1 });
    let next = loop {
        match incoming.recv().await.expect("it goes on") {
            Incoming::Welcomed { link, .. } => break link,
            other => assert!(matches!(other, Incoming::Lost), "{other:?}"),
        }
    };
    client.reply(link, RequestId(7), ended());
    client.reply(next, RequestId(8), ended());
    let received = receives.await.expect("no panic");
    assert_eq!(received, RequestId(8), "7 was asked by another server");
}

#[tokio::test(start_paused = true)]
async fn an_answer_in_order_is_sent_before_later_messages() {
    let transport = MemoryTransport::default();
    let mut server = server(&transport, 1).await;
    let (client, mut incoming) = client(&transport, hello(1, 2));
    let receives = tokio::spawn(async move {
        for round in 0..100 {
            let (peer, id) = next_request(&mut server).await;
            server.replier().reply(peer, id, answer());
            let cancel = Message::Cancel(Cancel {
                transfers: vec![round],
            });
            let order = RequestId(round);
            let unsent = server.replier().order(&[peer], order, cancel, HEARTBEAT);
            assert_eq!(unsent, []);
        }
        server
    });
    let Some(Incoming::Welcomed { link, .. }) = incoming.recv().await else {
        panic!("no welcome")
    };
    for round in 0..100 {
        let requested = client.request_in_order(link, status(), HEARTBEAT);
        let first = incoming.recv().await;
        let Some(Incoming::Answered { id, answer: said }) = first else {
            panic!("{first:?} before the answer")
        };
        assert_eq!((id, *said), (requested, Ok(answer())));
        let second = incoming.recv().await;
        let Some(Incoming::Request { envelope, .. }) = second else {
            panic!("{second:?} after the answer")
        };
        assert_eq!(envelope.correlation, RequestId(round));
    }
    let server = receives.await.expect("no panic");
    // A request without an answer produces no event, and a request for one connection is not sent over another.
    let stale = crate::LinkId(link.0 + 1);
    client.request_in_order(stale, status(), HEARTBEAT);
    let quiet = tokio::time::timeout(HEARTBEAT * 2, incoming.recv()).await;
    assert!(
        quiet.is_err() || matches!(quiet, Ok(Some(Incoming::Lost))),
        "{quiet:?}"
    );
    drop(server);
}
