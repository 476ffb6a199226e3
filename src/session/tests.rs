//! A client's session connected to a server's session, without a network between them.

use std::time::Duration;

use super::{
    ClientEvent, ClientRequest, ClientSession, ClientTimes, Encoded, Failure, Origin, ServerEvent,
    ServerHost, ServerSession, ServerSettings, encode_reply,
};
use kvferry_protocol::{
    Connections, Drain, DrainAnswer, Empty, Envelope, ErrorBody, ErrorCode, HELLO_VERSION, Header,
    Hello, Message, MessageKind, Role, Status, VERSION, Welcome, decode, encode,
};
use kvferry_types::{Epoch, PeerId, RequestId, Time, User};

const HEARTBEAT: Duration = Duration::from_secs(1);
const TIMES: ClientTimes = ClientTimes {
    welcome: Duration::from_secs(2),
    reconnect: Duration::from_millis(20),
    reconnect_max: Duration::from_secs(1),
};
const PEER: PeerId = PeerId(1);

fn at(ms: u64) -> Time {
    Time(ms * 1_000_000)
}

fn hello(role: Role) -> Hello {
    Hello {
        engine: [5; 16],
        ..Hello::new(role, "test")
    }
}

fn status() -> Message {
    Message::Status(Status { check: false })
}

fn envelope((header, body): &Encoded) -> Envelope {
    let header = Header::from_bytes(header).expect("a header");
    decode(header, body).expect("a message")
}

fn from_server(version: u16, id: u64, message: Message) -> Encoded {
    let envelope = Envelope {
        version,
        correlation: RequestId(id),
        deadline_ms: 0,
        epoch: Epoch(7),
        message,
    };
    encode(&envelope).expect("it can be encoded")
}

/// A client session, with its messages and answers recorded.
struct Client {
    session: ClientSession<u64>,
    sent: Vec<Envelope>,
    answered: Vec<(u64, Result<MessageKind, ErrorCode>)>,
    connects: usize,
    lost: usize,
}

impl Client {
    fn new() -> Self {
        Self {
            session: ClientSession::new(hello(Role::Engine), TIMES, at(0)),
            sent: Vec::new(),
            answered: Vec::new(),
            connects: 0,
            lost: 0,
        }
    }

    /// Returns a client that is connected and welcomed with these credits.
    fn welcomed(now: Time, request_credits: u32) -> Self {
        let mut client = Self::new();
        client.tick(now);
        client.session.connected(now);
        client.welcome(now, request_credits);
        client.sent.clear();
        client
    }

    fn welcome(&mut self, now: Time, request_credits: u32) {
        let welcome = Welcome {
            request_credits,
            ..Welcome::new(1000)
        };
        self.receive(
            now,
            &from_server(HELLO_VERSION, 0, Message::Welcome(welcome)),
        );
    }

    fn receive(&mut self, now: Time, (header, body): &Encoded) {
        self.session.received(now, header, body);
        self.act();
    }

    fn tick(&mut self, now: Time) {
        self.session.tick(now);
        self.act();
    }

    fn request(&mut self, now: Time, id: u64) {
        self.send(now, id, status());
    }

    fn send(&mut self, now: Time, id: u64, message: Message) {
        self.send_by(now, id, message, now + Duration::from_secs(60));
    }

    fn send_by(&mut self, now: Time, id: u64, message: Message, deadline: Time) {
        self.session.request(
            now,
            ClientRequest {
                id: RequestId(id),
                message,
                deadline,
                grace: Duration::ZERO,
                link: None,
                to: id,
            },
        );
        self.act();
    }

    fn act(&mut self) {
        while let Some(event) = self.session.poll() {
            match event {
                ClientEvent::Connect => self.connects += 1,
                ClientEvent::Send(message) => self.sent.push(envelope(&message)),
                ClientEvent::Lost => self.lost += 1,
                ClientEvent::Answered { to, answer, .. } => {
                    let answer = answer.map(|message| message.kind());
                    self.answered
                        .push((to, answer.map_err(|failure| failure.code)));
                }
                ClientEvent::Failed { to, failure } => {
                    self.answered.push((to, Err(failure.code)));
                }
                ClientEvent::Disconnect
                | ClientEvent::Welcomed { .. }
                | ClientEvent::Request { .. } => {}
            }
        }
    }

    /// Returns the requests that were sent since the last call.
    fn requests(&mut self) -> Vec<u64> {
        let sent = std::mem::take(&mut self.sent);
        let requests = sent
            .iter()
            .filter(|sent| sent.message.kind() == MessageKind::Status);
        requests.map(|sent| sent.correlation.0).collect()
    }
}

#[test]
fn a_request_that_is_repeated_before_it_was_sent_is_sent_once() {
    let mut client = Client::welcomed(at(0), 1);
    client.request(at(1), 1);
    for _ in 0..3 {
        client.request(at(2), 2);
    }
    assert_eq!(client.requests(), [1], "there is one credit");
    let error = ErrorBody::new(ErrorCode::Busy, "later");
    client.receive(at(3), &from_server(VERSION, 1, Message::Error(error)));
    assert_eq!(client.answered, [(1, Err(ErrorCode::Busy))]);
    assert_eq!(client.requests(), [2]);
    client.request(at(4), 2);
    assert_eq!(client.requests(), [2], "a retry");
}

#[test]
fn a_request_keeps_its_credit_until_it_is_answered() {
    let mut client = Client::welcomed(at(0), 1);
    let error = |id| {
        let error = ErrorBody::new(ErrorCode::Busy, "later");
        from_server(VERSION, id, Message::Error(error))
    };
    client.request(at(1), 1);
    client.request(at(2), 2);
    client.request(at(3), 1);
    assert_eq!(
        client.requests(),
        [1, 1],
        "a repeated request uses one credit"
    );
    client.tick(at(60_003));
    let late = Err(ErrorCode::Deadline);
    assert_eq!(client.answered, [(1, late), (2, late)]);
    client.request(at(60_004), 3);
    assert!(client.requests().is_empty(), "the server still counts 1");
    client.request(at(60_005), 1);
    assert_eq!(client.requests(), [1]);
    client.receive(at(60_006), &error(1));
    assert_eq!(client.answered[2], (1, Err(ErrorCode::Busy)));
    assert_eq!(client.requests(), [3]);
    client.tick(at(120_010));
    client.request(at(120_011), 4);
    client.receive(at(120_012), &error(3));
    assert_eq!(
        client.requests(),
        [4],
        "an answer without a receiver frees its credit"
    );
}

/// Requests that were repeated, answered and late leave the count of credits right.
#[test]
fn an_answer_that_cannot_be_read_ends_its_request_alone() {
    let now = at(0);
    let mut client = Client::welcomed(now, 2);
    client.request(now, 1);
    client.request(now, 2);
    client.request(now, 3);
    assert_eq!(client.requests(), [1, 2]);
    let (header, _) = from_server(VERSION, 1, Message::DrainAnswer(DrainAnswer::default()));
    // A list instead of a map, and a map that ends too early.
    for body in [&[0x93, 1, 2, 3][..], &[0x84]] {
        client.receive(now, &(header, body.to_vec()));
    }
    assert_eq!(client.answered, [(1, Err(ErrorCode::Internal))]);
    assert_eq!(client.lost, 0);
    // Its credit is free, and the others are answered.
    assert_eq!(client.requests(), [3]);
    client.receive(
        now,
        &from_server(VERSION, 3, Message::DrainAnswer(DrainAnswer::default())),
    );
    assert_eq!(
        client.answered.last(),
        Some(&(3, Ok(MessageKind::DrainAnswer)))
    );
}

#[test]
fn an_answer_of_an_unknown_kind_frees_the_credit_of_its_request() {
    let mut client = Client::welcomed(at(0), 1);
    client.request(at(0), 1);
    client.request(at(0), 2);
    assert_eq!(client.requests(), [1]);
    let (mut header, body) = from_server(VERSION, 1, Message::FinishAnswer(Empty {}));
    header[6..8].copy_from_slice(&201_u16.to_be_bytes());
    client.receive(at(1), &(header, body));
    assert!(client.answered.is_empty());
    // The request ends at its deadline; the next one is sent at once.
    client.tick(at(1));
    assert_eq!(client.requests(), [2]);
    // A repeat of it is sent again.
    client.receive(
        at(2),
        &from_server(VERSION, 2, Message::FinishAnswer(Empty {})),
    );
    client.request(at(2), 1);
    assert_eq!(client.requests(), [1]);
}

#[test]
fn a_refusal_of_the_hello_with_an_unknown_code_is_final_only_without_retry() {
    for retry in [true, false] {
        let mut client = Client::new();
        client.tick(at(0));
        client.session.connected(at(0));
        client.request(at(0), 1);
        let error = ErrorBody {
            code: 99,
            retry,
            ..ErrorBody::new(ErrorCode::Internal, "a code of a later version")
        };
        client.receive(at(1), &from_server(HELLO_VERSION, 0, Message::Error(error)));
        assert_eq!(client.answered.is_empty(), retry);
    }
}

#[test]
fn requests_that_expire_before_they_are_sent_stop_no_later_ones() {
    let mut client = Client::welcomed(at(0), 2);
    (1..=4).for_each(|id| client.request(at(id), id));
    client.request(at(5), 1);
    let error = ErrorBody::new(ErrorCode::Busy, "later");
    client.receive(at(6), &from_server(VERSION, 1, Message::Error(error)));
    assert_eq!(client.requests(), [1, 2, 1, 3]);
    client.tick(at(60_010));
    assert_eq!(client.answered.len(), 4);
    client.session.disconnected(at(60_011), "closed");
    client.tick(client.session.next_timeout());
    client.session.connected(at(60_100));
    client.welcome(at(60_100), 2);
    client.request(at(60_101), 5);
    assert_eq!(client.requests(), [5]);
}

/// Ticks only at the session's own timeouts.
#[test]
fn every_request_fails_at_its_own_deadline() {
    let mut client = Client::welcomed(at(0), 100);
    let deadlines = [900, 300, 700, 300, 100, 800];
    for (id, deadline) in (1..).zip(deadlines) {
        client.send_by(at(1), id, status(), at(deadline));
    }
    // Request 5 is answered, request 1 is retried with an earlier deadline, and request 2 with a later one.
    let error = ErrorBody::new(ErrorCode::Busy, "later");
    client.receive(at(2), &from_server(VERSION, 5, Message::Error(error)));
    client.send_by(at(3), 1, status(), at(200));
    client.send_by(at(3), 2, status(), at(600));
    client.answered.clear();
    let mut failed = Vec::new();
    let mut now = at(3);
    while now < at(999) {
        let next = client.session.next_timeout();
        assert!(next > now, "{next:?} is not after {now:?}");
        now = next;
        client.tick(now);
        failed.extend(client.answered.drain(..).map(|(id, _)| (now, id)));
    }
    let due = [(200, 1), (300, 4), (600, 2), (700, 3), (800, 6)];
    assert_eq!(failed, due.map(|(ms, id)| (at(ms), id)));
}

#[test]
fn a_request_is_sent_again_over_the_next_connection_until_its_deadline() {
    let mut client = Client::welcomed(at(0), 10);
    client.request(at(1), 1);
    assert_eq!(client.requests(), [1]);
    client.session.disconnected(at(2), "closed");
    client.act();
    assert_eq!((client.lost, client.connects), (1, 1));
    client.tick(client.session.next_timeout());
    assert_eq!(client.connects, 2);
    client.session.connected(at(100));
    client.welcome(at(100), 10);
    assert_eq!(client.requests(), [1]);
    client.tick(at(60_001));
    assert_eq!(client.answered, [(1, Err(ErrorCode::Deadline))]);
}

#[test]
fn an_order_is_not_repeated_over_the_next_connection() {
    let mut client = Client::welcomed(at(0), 10);
    client.request(at(1), 1);
    client.send(at(1), 2, Message::Drain(Drain { resume: false }));
    assert_eq!(client.requests(), [1]);
    client.session.disconnected(at(2), "closed");
    client.act();
    assert_eq!(client.answered, [(2, Err(ErrorCode::Deadline))]);
    // An order that was not sent yet is sent.
    client.send(at(2), 3, Message::Drain(Drain { resume: true }));
    client.tick(client.session.next_timeout());
    client.session.connected(at(100));
    client.welcome(at(100), 10);
    assert_eq!(client.answered.len(), 1);
    let sent = client.sent.iter();
    let ids: Vec<u64> = sent.map(|envelope| envelope.correlation.0).collect();
    assert!(ids.ends_with(&[1, 3]), "{ids:?}");
}

/// A lost welcome must not leave a client waiting, even if the other side sends other messages.
#[test]
fn a_client_without_a_welcome_connects_again() {
    let mut client = Client::new();
    client.tick(at(0));
    client.session.connected(at(0));
    assert_eq!(client.session.next_timeout(), at(2000));
    client.tick(at(2000));
    client.tick(client.session.next_timeout());
    assert_eq!(client.connects, 2);
    client.session.connected(at(3000));
    let refusal = ErrorBody::new(ErrorCode::Busy, "too many");
    client.receive(
        at(3000),
        &from_server(HELLO_VERSION, 0, Message::Error(refusal)),
    );
    client.tick(client.session.next_timeout());
    assert_eq!(client.connects, 3);
}

#[test]
fn a_permanent_refusal_fails_every_request() {
    let mut client = Client::new();
    client.request(at(0), 1);
    client.tick(at(0));
    client.session.connected(at(0));
    let refusal = ErrorBody::new(ErrorCode::UnsupportedVersion, "no");
    client.receive(
        at(0),
        &from_server(HELLO_VERSION, 0, Message::Error(refusal)),
    );
    assert_eq!(client.answered, [(1, Err(ErrorCode::UnsupportedVersion))]);
}

/// A server's host that records what is sent.
#[derive(Default)]
struct Sent {
    now: Time,
    sent: Vec<(PeerId, Envelope)>,
    closed: Vec<PeerId>,
}

impl ServerHost for Sent {
    fn now(&self) -> Time {
        self.now
    }

    fn send(&mut self, peer: PeerId, message: Encoded) -> bool {
        self.sent.push((peer, envelope(&message)));
        true
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.closed.push(peer);
    }

    fn watch(&mut self, _: PeerId, _: Option<i32>) {}

    fn guests_max(&self) -> usize {
        8
    }
}

fn local(pid: Option<i32>) -> Origin {
    Origin::Local {
        user: User::Own,
        pid,
    }
}

fn server() -> (ServerSession, Sent) {
    let settings = ServerSettings {
        epoch: Epoch(7),
        heartbeat: HEARTBEAT,
        roles: vec![Role::Engine],
        features: 0,
        worker_seats: None,
    };
    (ServerSession::new(settings, at(0)), Sent::default())
}

/// Takes a message as a server's process does.
fn take(
    server: &mut ServerSession,
    host: &mut Sent,
    header: &[u8],
    body: &[u8],
) -> Option<ServerEvent> {
    let header = server.admit(host, PEER, header, body.len())?;
    server.receive(host, PEER, &header, decode(header, body), body.len())
}

/// The places for connections of workers are as many as their seats.
#[test]
fn a_worker_is_welcomed_for_a_seat_that_the_leader_has() {
    for (replica, rank, welcomed) in [(0, 0, true), (1, 3, true), (2, 0, false), (0, 4, false)] {
        let settings = ServerSettings {
            epoch: Epoch(7),
            heartbeat: HEARTBEAT,
            roles: vec![Role::Worker],
            features: 0,
            worker_seats: Some((2, 4)),
        };
        let (mut server, mut host) = (ServerSession::new(settings, at(0)), Sent::default());
        server.opened(&mut host, PEER, local(Some(5)));
        let hello = Hello {
            replica,
            rank,
            ..Hello::new(Role::Worker, "worker")
        };
        let (header, body) = from_server(HELLO_VERSION, 0, Message::Hello(hello));
        let opened = take(&mut server, &mut host, &header, &body);
        assert_eq!(opened.is_some(), welcomed, "{replica} {rank}");
        let (_, answer) = host.sent.pop().expect("an answer");
        let code = match answer.message {
            Message::Error(error) => Some(error.code()),
            _ => None,
        };
        assert_eq!(code, (!welcomed).then_some(ErrorCode::Invalid));
    }
}

#[test]
fn a_hello_names_its_oldest_version_first() {
    let (mut server, mut host) = server();
    server.opened(&mut host, PEER, local(Some(5)));
    let hello = Hello {
        version_min: 2,
        version_max: 1,
        ..hello(Role::Engine)
    };
    let (header, body) = from_server(HELLO_VERSION, 0, Message::Hello(hello));
    assert!(take(&mut server, &mut host, &header, &body).is_none());
    let (_, answer) = host.sent.pop().expect("an answer");
    let Message::Error(error) = answer.message else {
        panic!("unexpected {answer:?}");
    };
    assert_eq!(error.code(), ErrorCode::Invalid);
    assert!(
        error
            .message
            .starts_with("version_min is 2 and version_max 1"),
        "{}",
        error.message
    );
}

#[test]
fn an_engine_without_a_name_is_refused() {
    let zero = [0; 16];
    for (role, engine, welcomed) in [
        (Role::Engine, zero, false),
        (Role::Rank, zero, false),
        (Role::Engine, [1; 16], true),
        (Role::Admin, zero, true),
    ] {
        let settings = ServerSettings {
            epoch: Epoch(7),
            heartbeat: HEARTBEAT,
            roles: vec![Role::Engine, Role::Rank, Role::Admin],
            features: 0,
            worker_seats: None,
        };
        let (mut server, mut host) = (ServerSession::new(settings, at(0)), Sent::default());
        server.opened(&mut host, PEER, local(Some(5)));
        let hello = Hello {
            engine,
            ..Hello::new(role, "test")
        };
        let (header, body) = from_server(HELLO_VERSION, 0, Message::Hello(hello));
        let opened = take(&mut server, &mut host, &header, &body);
        assert_eq!(opened.is_some(), welcomed, "{role:?} {engine:?}");
        let (_, answer) = host.sent.pop().expect("an answer");
        match answer.message {
            Message::Error(error) => {
                assert_eq!((error.code(), welcomed), (ErrorCode::Invalid, false));
                assert!(error.message.contains("engine is absent or zero"));
            }
            _ => assert!(welcomed, "{role:?} {engine:?}"),
        }
    }
}

#[test]
fn a_client_is_welcomed_and_its_request_is_answered() {
    let (mut server, mut host) = server();
    let mut client = Client::new();
    client.tick(at(0));
    client.session.connected(at(0));
    client.act();
    server.opened(&mut host, PEER, local(Some(42)));
    let hello = client.sent.pop().expect("a hello");
    let (header, body) = encode(&hello).expect("encoded");
    match take(&mut server, &mut host, &header, &body) {
        Some(ServerEvent::Opened { peer, caller, .. }) => {
            assert_eq!((peer, caller.pid), (PEER, Some(42)));
        }
        other => panic!("{other:?}"),
    }
    let (_, welcome) = host.sent.pop().expect("a welcome");
    client.receive(at(1), &encode(&welcome).expect("encoded"));
    client.request(at(2), 9);
    let request = client.sent.pop().expect("a request");
    let (header, body) = encode(&request).expect("encoded");
    let received = take(&mut server, &mut host, &header, &body);
    assert!(matches!(received, Some(ServerEvent::Message { .. })));
    // A repeated request is answered once.
    assert!(take(&mut server, &mut host, &header, &body).is_none());
    assert_eq!(server.settle(PEER, RequestId(9)), VERSION);
    let answer = Message::ReadinessAnswer(Empty {});
    let answer = encode_reply(VERSION, server.epoch(), RequestId(9), answer).expect("encoded");
    host.send(PEER, answer);
    let (_, answer) = host.sent.pop().expect("an answer");
    assert!(host.sent.is_empty());
    client.receive(at(3), &encode(&answer).expect("encoded"));
    assert_eq!(client.answered, [(9, Ok(MessageKind::ReadinessAnswer))]);
    assert!(server.closed(PEER).is_some());
    assert!(server.closed(PEER).is_none());
}

/// A process that was stopped has received nothing: its peers must not be measured by that time.
#[test]
fn silent_peers_are_closed_after_three_heartbeats_and_not_right_after_a_pause() {
    let (mut server, mut host) = server();
    server.opened(&mut host, PEER, local(None));
    let hello = Envelope {
        version: HELLO_VERSION,
        correlation: RequestId(0),
        deadline_ms: 1,
        epoch: Epoch(0),
        message: Message::Hello(hello(Role::Engine)),
    };
    let (header, body) = encode(&hello).expect("encoded");
    assert!(take(&mut server, &mut host, &header, &body).is_some());
    host.now = at(60_000);
    assert_eq!(server.tick(&mut host), [], "the first look after a pause");
    host.now = host.now + HEARTBEAT;
    assert_eq!(server.tick(&mut host), [PEER]);
    assert_eq!(host.closed, [PEER]);
}

#[test]
fn a_failure_names_its_code() {
    let failure = Failure::new(ErrorCode::Deadline, "no answer by the deadline");
    assert_eq!(failure.to_string(), "deadline: no answer by the deadline");
}

#[test]
fn connections_and_what_was_refused_are_counted() {
    let (mut server, mut host) = server();
    server.opened(&mut host, PEER, local(None));
    let errors = |server: &ServerSession| {
        let errors = server.connections().errors;
        assert_eq!(
            errors.len(),
            ErrorCode::ALL.len(),
            "codes that never occurred are 0"
        );
        errors
            .into_iter()
            .filter(|(_, count)| *count > 0)
            .collect::<Vec<_>>()
    };
    let say = |server: &mut ServerSession, host: &mut Sent, id, message| {
        let (header, body) = from_server(VERSION, id, message);
        let event = take(server, host, &header, &body);
        event.is_some()
    };
    assert!(!say(&mut server, &mut host, 1, status()), "no hello yet");
    let before = Connections {
        strangers: 1,
        malformed_messages: 1,
        ..server.connections()
    };
    assert_eq!(server.connections(), before);
    assert_eq!(errors(&server), [("hello_first".to_owned(), 1)]);
    let rank = Message::Hello(hello(Role::Rank));
    assert!(
        !say(&mut server, &mut host, 2, rank),
        "this server takes no ranks"
    );
    assert_eq!(server.connections().refused_hellos, 1);
    let engine = Message::Hello(hello(Role::Engine));
    assert!(say(&mut server, &mut host, 3, engine));
    assert!(say(&mut server, &mut host, 4, status()));
    let open = server.connections();
    assert_eq!(
        (open.engines, open.strangers, open.open_requests),
        (1, 0, 1)
    );
    assert!(open.open_bytes > 0);
    assert!(server.is_open(PEER, RequestId(4)));
    assert!(!server.is_open(PEER, RequestId(5)));
    server.settle(PEER, RequestId(4));
    assert!(!server.is_open(PEER, RequestId(4)));
    let settled = server.connections();
    assert_eq!((settled.open_requests, settled.open_bytes), (0, 0));
    let all = [("hello_first".to_owned(), 1), ("invalid".to_owned(), 1)];
    assert_eq!(errors(&server), all);
    server.closed(PEER);
    assert_eq!(server.connections().engines, 0);
}

#[test]
fn each_message_that_is_refused_or_repeated_counts_once_also_a_dropped_answer() {
    let (mut server, mut host) = server();
    server.opened(&mut host, PEER, local(None));
    let refused = |server: &ServerSession| {
        let connections = server.connections();
        let counts = connections.refused_messages.into_iter();
        let counts: Vec<(String, u64)> = counts.filter(|(_, count)| *count > 0).collect();
        (counts, connections.repeated_requests)
    };
    let mut say = |server: &mut ServerSession, version, id, message| {
        let (header, body) = from_server(version, id, message);
        take(server, &mut host, &header, &body)
    };
    // An answer before the hello is dropped without an error.
    say(&mut server, VERSION, 1, Message::FinishAnswer(Empty {}));
    let before = [("hello_first".to_owned(), 1)].to_vec();
    assert_eq!(refused(&server), (before.clone(), 0));
    assert_eq!(server.connections().errors["hello_first"], 0);
    say(&mut server, 1, 2, Message::Hello(hello(Role::Engine)));
    assert_eq!(refused(&server), (before, 0), "a welcomed hello");
    for _ in 0..3 {
        say(&mut server, VERSION, 3, status());
    }
    // An answer that an engine does not send.
    say(&mut server, VERSION, 4, Message::FinishAnswer(Empty {}));
    let (header, _) = from_server(VERSION, 5, status());
    take(&mut server, &mut host, &header, b"no map");
    take(&mut server, &mut host, &header[1..], b"");
    let all = [("malformed", 2), ("forbidden", 1), ("hello_first", 1)];
    let mut all = all.map(|(code, count)| (code.to_owned(), count)).to_vec();
    all.sort();
    assert_eq!(refused(&server), (all, 2));
}

#[test]
fn a_client_counts_the_errors_that_it_answers() {
    let mut client = Client::welcomed(at(0), 9);
    let (header, body) = from_server(VERSION, 1, status());
    client.receive(at(1), &(header, body));
    let order = Message::ReadInventory(kvferry_protocol::ReadInventory {
        depot: [1; 16],
        page_bytes: 64,
        read_id: 1,
        from: 0,
    });
    let (header, _) = from_server(VERSION, 2, order);
    client.receive(at(2), &(header, b"no map".to_vec()));
    let refused = client.session.refused();
    let expected = [(ErrorCode::Malformed, 1), (ErrorCode::UnknownKind, 1)];
    assert_eq!(*refused, expected.into());
}
