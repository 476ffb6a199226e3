//! A client's behaviour towards servers that are newer than the client or make mistakes.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::conversation_tests::{address, answer, client, hello, serve, status};
use crate::{
    Address, Client, ClientSettings, Incoming, Limits, Listener, ListenerEvent, MemoryTransport,
    PeerId, Transport, ZmqTransport,
};
use kvferry_protocol::{
    Cancel, Class, Empty, Envelope, ErrorCode, HELLO_VERSION, Header, Message, MessageKind, Role,
    StatusAnswer, VERSION, VERSION_MIN, Welcome, decode, encode,
};
use kvferry_session::ServerEvent;
use kvferry_types::{Epoch, RequestId};

/// A server that sends messages chosen by the test.
struct Scripted {
    listener: Listener,
    peer: PeerId,
}

impl Scripted {
    /// Starts a server and a client, and returns the client's hello.
    async fn start(
        transport: &MemoryTransport,
    ) -> (Self, Envelope, Client, mpsc::Receiver<Incoming>) {
        let listening = transport.listen(&address(), Limits::default()).await;
        let listener = listening.expect("it listens");
        let (client, incoming) = client(transport, hello(VERSION_MIN, VERSION));
        let mut scripted = Self {
            listener,
            peer: PeerId(0),
        };
        let hello = scripted.receive().await;
        (scripted, hello, client, incoming)
    }

    /// Receives the next message.
    async fn receive(&mut self) -> Envelope {
        loop {
            match self.listener.next().await.expect("tasks run") {
                ListenerEvent::Opened { peer, .. } => self.peer = peer,
                ListenerEvent::Frame { frame, .. } => {
                    let header = Header::from_bytes(&frame.header).expect("a header");
                    return decode(header, &frame.body).expect("a message");
                }
                ListenerEvent::Closed { reason, .. } => panic!("closed: {reason}"),
            }
        }
    }

    /// Receives the next message that is not a ping.
    async fn receive_more(&mut self) -> Envelope {
        loop {
            let received = self.receive().await;
            match received.message {
                Message::Ping(_) => self.send_message(0, Message::Pong(Empty {})),
                _ => return received,
            }
        }
    }

    fn send(&self, header: Header, body: &[u8]) {
        let frame = crate::Frame::new(header.to_bytes().to_vec(), body.to_vec());
        self.listener
            .sender()
            .try_send(self.peer, frame)
            .expect("sent");
    }

    fn send_message(&self, id: u64, message: Message) {
        let version = match message.kind() {
            MessageKind::Welcome => HELLO_VERSION,
            _ => VERSION,
        };
        let (header, body) = encode(&Envelope {
            version,
            correlation: RequestId(id),
            deadline_ms: u32::from(message.kind().class() == Class::Request),
            epoch: Epoch(1),
            message,
        })
        .expect("it can be said");
        let header = Header::from_bytes(&header).expect("a header");
        self.send(header, &body);
    }

    fn welcome(&self, version: u16) {
        self.send_message(
            0,
            Message::Welcome(Welcome {
                version,
                ..Welcome::new(1000)
            }),
        );
    }
}

fn header(kind: u16, id: u64) -> Header {
    Header {
        version: VERSION,
        kind,
        correlation: RequestId(id),
        deadline_ms: 1000,
        required: 0,
        epoch: Epoch(1),
    }
}

#[tokio::test(start_paused = true)]
async fn the_hello_has_a_version_of_its_own_and_a_deadline() {
    let (_server, hello, _client, _incoming) = Scripted::start(&MemoryTransport::default()).await;
    assert_eq!(hello.version, HELLO_VERSION);
    assert!(hello.deadline_ms > 0);
}

#[tokio::test(start_paused = true)]
async fn unknown_messages_end_neither_the_connection_nor_a_request() {
    let transport = MemoryTransport::default();
    let (mut server, _, client, mut incoming) = Scripted::start(&transport).await;
    server.welcome(VERSION);
    let requesting = tokio::spawn(async move {
        let timeout = Duration::from_secs(20);
        client.request_as(RequestId(42), status(), timeout).await
    });
    assert_eq!(server.receive_more().await.correlation, RequestId(42));
    // Answers of unknown kinds, under the id of an open request, and an answer to no open request.
    let unassigned = (17..).step_by(2);
    let mut unassigned = unassigned.filter(|number| MessageKind::from_number(*number).is_none());
    server.send(header(999, 42), &[0xc1]);
    server.send(header(unassigned.next().expect("a number"), 42), &[0xc1]);
    server.send(header(MessageKind::LookupAnswer.number(), 41), &[0xc1]);
    // Requests: of an unknown kind, of a kind that is not for a client, and one that does not decode.
    let requests = [
        (998, ErrorCode::UnknownKind),
        (MessageKind::Lookup.number(), ErrorCode::UnknownKind),
        (MessageKind::Transfer.number(), ErrorCode::Malformed),
    ];
    for (kind, code) in requests {
        server.send(header(kind, 42), &[0xc1]);
        let received = server.receive_more().await;
        assert_eq!(received.correlation, RequestId(42));
        match received.message {
            Message::Error(error) => assert_eq!(error.code(), code, "kind {kind}"),
            other => panic!("{} instead of an error", other.kind().name()),
        }
    }
    server.send_message(42, Message::Cancel(Cancel { transfers: vec![1] }));
    server.send_message(42, answer());
    assert_eq!(requesting.await.expect("no panic"), Ok(answer()));
    assert!(matches!(
        incoming.recv().await,
        Some(Incoming::Welcomed { .. })
    ));
    match incoming.recv().await {
        Some(Incoming::Request {
            envelope: order, ..
        }) => assert_eq!(order.message.kind(), MessageKind::Cancel),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_version_that_was_not_offered_is_refused_with_the_reason() {
    let transport = MemoryTransport::default();
    let (server, _, client, _incoming) = Scripted::start(&transport).await;
    let requesting =
        tokio::spawn(async move { client.request(status(), Duration::from_secs(20)).await });
    // Lets the client take up the request: virtual time advances only when nothing else is runnable.
    tokio::time::sleep(Duration::from_millis(1)).await;
    server.welcome(VERSION + 1);
    let failure = requesting
        .await
        .expect("no panic")
        .expect_err("no version in common");
    assert_eq!(failure.code, ErrorCode::UnsupportedVersion, "{failure}");
    assert!(failure.message.contains("has version 3"), "{failure}");
}

/// The client has a request to send and an answer to take when the connection ends, and does either first.
#[tokio::test(start_paused = true)]
async fn an_answer_before_the_end_of_a_connection_is_taken() {
    for round in 0..32 {
        let (mut server, _, client, _incoming) = Scripted::start(&MemoryTransport::default()).await;
        server.welcome(VERSION);
        let begin = |id| {
            let timeout = Duration::from_secs(5);
            let begun = client.begin_request(RequestId(id), status(), timeout, Duration::ZERO);
            begun.expect("there is room")
        };
        let first = begin(1);
        assert_eq!(server.receive_more().await.correlation, RequestId(1));
        server.send_message(1, answer());
        server.listener.sender().disconnect(server.peer);
        let _second = begin(2);
        assert_eq!(first.await, Ok(answer()), "round {round}");
    }
}

/// Over sockets, the client is told of a break while it reads, while it sends, and between.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_request_is_answered_over_connections_that_break() {
    const TASKS: u64 = 8;
    const REQUESTS: u64 = 100;
    let folder = tempfile::tempdir().expect("a folder");
    let address = Address::Directory(folder.path().join("server"));
    let listening = ZmqTransport.listen(&address, Limits::default()).await;
    let mut server = serve(listening.expect("it listens"), 1, vec![Role::Engine]);
    let answers = async {
        let replier = server.replier();
        let mut received = 0_u64;
        loop {
            for event in server.next().await.expect("the server receives") {
                let ServerEvent::Message { peer, envelope } = event else {
                    continue;
                };
                received += 1;
                // Before the answer, or after it: the client sends the request again, or has its answer.
                if received.is_multiple_of(67) {
                    replier.disconnect(peer);
                }
                let answer = StatusAnswer {
                    version: "x".repeat(usize::try_from(received % 7).expect("small") << 13),
                    ..StatusAnswer::default()
                };
                replier.reply(peer, envelope.correlation, Message::StatusAnswer(answer));
                if received.is_multiple_of(31) {
                    replier.disconnect(peer);
                }
            }
        }
    };
    let settings = ClientSettings {
        address: address.clone(),
        hello: hello(VERSION_MIN, VERSION),
        limits: Limits::default(),
    };
    let client = Client::without_incoming(Arc::new(ZmqTransport), settings);
    let mut tasks = JoinSet::new();
    for _ in 0..TASKS {
        let client = client.clone();
        tasks.spawn(async move {
            for _ in 0..REQUESTS {
                let answered = client.request(status(), Duration::from_secs(100)).await;
                assert!(
                    matches!(answered, Ok(Message::StatusAnswer(_))),
                    "{answered:?}"
                );
            }
        });
    }
    // If an end were not reported, the client would find it after three heartbeats, and the limit would pass.
    let all = async {
        while tasks
            .join_next()
            .await
            .transpose()
            .expect("no panic")
            .is_some()
        {}
    };
    let both = async {
        tokio::select! {
            () = all => {}
            never = answers => never,
        }
    };
    let limit = Duration::from_secs(60);
    tokio::time::timeout(limit, both).await.expect("in time");
}
