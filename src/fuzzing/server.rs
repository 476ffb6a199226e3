//! The server's side of connections, with peers that send anything.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;
use std::time::Duration;

use kvferry_protocol::{
    Class, Empty, Envelope, HEADER_BYTES, Header, Hello, Message, MessageKind, Role, VERSION,
    VERSION_MIN, decode, encode, examples, limits,
};
use kvferry_session::{
    BAD_MAX, Encoded, Origin, STRANGERS_MAX, ServerEvent, ServerHost, ServerSession,
    ServerSettings, encode_reply,
};
use kvferry_types::{Epoch, PeerId, RequestId, Time, User};

use super::Input;

const EPOCH: Epoch = Epoch(5);
const GUESTS_MAX: usize = 3;
const PEERS_MAX: u64 = 40;
const HEARTBEAT: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Host {
    now: Time,
    sent: Vec<(PeerId, Encoded)>,
    disconnected: BTreeSet<PeerId>,
}

impl ServerHost for Host {
    fn now(&self) -> Time {
        self.now
    }

    fn send(&mut self, peer: PeerId, message: Encoded) -> bool {
        self.sent.push((peer, message));
        true
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.disconnected.insert(peer);
    }

    fn watch(&mut self, _: PeerId, _: Option<i32>) {}

    fn guests_max(&self) -> usize {
        GUESTS_MAX
    }
}

/// What is known of a peer whose connection is open.
#[derive(Default)]
struct Known {
    role: Option<Role>,
    /// Requests without an answer, with their bytes.
    open: BTreeMap<RequestId, u64>,
    /// Messages since the clock was moved that count as bad.
    bad: u32,
}

struct World {
    session: ServerSession,
    host: Host,
    peers: BTreeMap<PeerId, Known>,
    opened: u64,
}

/// A message as a peer sends it.
struct Sent {
    head: Vec<u8>,
    body: Vec<u8>,
    bytes: usize,
}

/// Operations: connections open and close, messages arrive, requests are answered, time passes.
pub fn server(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let settings = ServerSettings {
        epoch: EPOCH,
        heartbeat: HEARTBEAT,
        roles: vec![Role::Engine, Role::Rank, Role::Worker, Role::Admin],
        features: 1,
        worker_seats: None,
    };
    let mut world = World {
        session: ServerSession::new(settings, Time(0)),
        host: Host::default(),
        peers: BTreeMap::new(),
        opened: 0,
    };
    while !input.is_empty() {
        world.take(&mut input);
        world.check();
    }
    world.end();
}

impl World {
    fn take(&mut self, input: &mut Input<'_>) {
        match input.below(12) {
            0 if self.opened < PEERS_MAX => self.open(),
            1 => {
                if let Some(peer) = self.one_peer(input) {
                    self.close(peer);
                }
            }
            2 => self.answer(input),
            3 => {
                let ms = input.one_of(&[0_u64, 1, 300, 1000, 1001, 3001, 5001, 11_000]);
                self.host.now = self.host.now + Duration::from_millis(ms);
                if ms > 0 {
                    self.peers.values_mut().for_each(|peer| peer.bad = 0);
                }
                let closed = self.session.tick(&mut self.host);
                for peer in closed {
                    assert!(self.host.disconnected.contains(&peer));
                }
            }
            4 => self.hello(input),
            _ => self.message(input),
        }
    }

    fn open(&mut self) {
        self.opened += 1;
        let peer = PeerId(self.opened);
        let origin = Origin::Local {
            user: User::Own,
            pid: Some(1),
        };
        self.session.opened(&mut self.host, peer, origin);
        self.peers.insert(peer, Known::default());
    }

    /// A connection, or one that never was.
    fn one_peer(&self, input: &mut Input<'_>) -> Option<PeerId> {
        let which = input.below(self.peers.len() + 1);
        self.peers.keys().nth(which).copied()
    }

    /// The listener reports the end of a connection.
    fn close(&mut self, peer: PeerId) {
        let known = self.peers.remove(&peer);
        let closed = self.session.closed(peer);
        let was_open = known.is_some_and(|known| known.role.is_some());
        assert_eq!(closed.is_some(), was_open, "{peer}: an end without a begin");
        assert!(!self.session.knows(peer));
        assert_eq!(self.session.open_requests(peer), None);
        assert!(self.session.closed(peer).is_none(), "it ends once");
        self.host.disconnected.remove(&peer);
    }

    fn answer(&mut self, input: &mut Input<'_>) {
        let Some(peer) = self.one_peer(input) else {
            return;
        };
        let Some(known) = self.peers.get_mut(&peer) else {
            return;
        };
        let which = input.below(known.open.len() + 1);
        let id = known.open.keys().nth(which).copied();
        let id = id.unwrap_or(RequestId(input.number()));
        known.open.remove(&id);
        let version = self.session.settle(peer, id);
        let message = Message::FinishAnswer(Empty {});
        assert!(encode_reply(version, EPOCH, id, message).is_some());
    }

    fn hello(&mut self, input: &mut Input<'_>) {
        let Some(peer) = self.one_peer(input) else {
            return;
        };
        let roles = [
            Role::Engine,
            Role::Rank,
            Role::Worker,
            Role::Admin,
            Role::Unknown,
        ];
        let versions = [(1, VERSION), (1, 1), (VERSION, 9), (7, 9), (9, 1), (0, 0)];
        let (version_min, version_max) = input.one_of(&versions);
        let hello = Hello {
            version_min,
            version_max,
            features: input.number(),
            ..Hello::new(input.one_of(&roles), "peer")
        };
        let envelope = Envelope {
            version: input.one_of(&[1, VERSION]),
            correlation: RequestId(input.number()),
            deadline_ms: 1,
            epoch: Epoch(0),
            message: Message::Hello(hello),
        };
        let (head, body) = encode(&envelope).expect("a hello");
        let bytes = body.len();
        let head = head.to_vec();
        self.receive(peer, &Sent { head, body, bytes });
    }

    fn message(&mut self, input: &mut Input<'_>) {
        let Some(peer) = self.one_peer(input) else {
            return;
        };
        let kinds = MessageKind::ALL;
        let kind = kinds.get(input.below(kinds.len() + 2));
        let number = kind.map_or_else(|| input.number16(), |kind| kind.number());
        let header = Header {
            version: input.one_of(&[VERSION, VERSION, VERSION, 1, 0, 3]),
            kind: number,
            correlation: RequestId(input.number()),
            deadline_ms: input.number32(),
            required: u16::from(input.rarely()),
            epoch: Epoch(input.number()),
        };
        let mut head = header.to_bytes().to_vec();
        if input.rarely() {
            head = input.bytes(HEADER_BYTES).to_vec();
        }
        let body = match kind.filter(|_| !input.rarely()) {
            Some(kind) => example(*kind, header.version),
            None => input.bytes(16).to_vec(),
        };
        // The session takes the length from the listener; the body is not made so long.
        let bytes = match input.below(8) {
            0 => limits::BODY_BYTES_MAX,
            1 => limits::BODY_BYTES_MAX + 1,
            2 => limits::SMALL_BODY_BYTES_MAX + 1,
            _ => body.len(),
        };
        self.receive(peer, &Sent { head, body, bytes });
    }

    /// Delivers a message and checks the reaction.
    fn receive(&mut self, peer: PeerId, sent: &Sent) {
        let before = self.session.open_requests(peer);
        assert_eq!(
            self.session.knows(peer),
            before.is_some(),
            "two views of a peer"
        );
        let forgotten = before.is_none();
        let header = Header::from_bytes(&sent.head).ok();
        self.host.sent.clear();
        let admitted = self
            .session
            .admit(&mut self.host, peer, &sent.head, sent.bytes);
        let mut bad = header.is_none();
        let event = match &admitted {
            None => None,
            Some(admitted) => {
                assert_eq!(Some(*admitted), header);
                let decoded = decode(*admitted, &sent.body);
                bad |= decoded.is_err();
                self.session
                    .receive(&mut self.host, peer, admitted, decoded, sent.bytes)
            }
        };
        let answers = std::mem::take(&mut self.host.sent);
        if forgotten {
            assert!(
                event.is_none() && answers.is_empty(),
                "it speaks to nobody: {event:?}"
            );
            return;
        }
        let known = self.peers.get_mut(&peer).expect("an open connection");
        let welcomed = known.role.is_some();
        if let Some(header) = header {
            let allowed_before_welcome =
                [MessageKind::Hello, MessageKind::Ping, MessageKind::Pong].map(MessageKind::number);
            bad |= !welcomed && !allowed_before_welcome.contains(&header.kind);
            check_answers(&header, &answers, peer);
            check_reaction(known, &header, event.as_ref(), answers.len());
        } else {
            assert!(event.is_none() && answers.is_empty());
        }
        known.bad += u32::from(bad);
        if known.bad > BAD_MAX {
            assert!(
                self.host.disconnected.contains(&peer),
                "{peer} sent {} bad messages",
                known.bad
            );
        }
        match event {
            Some(ServerEvent::Opened { hello, .. }) => {
                assert!(!welcomed, "welcomed twice");
                known.role = Some(hello.role);
            }
            Some(ServerEvent::Message { envelope, .. }) => {
                let kind = envelope.message.kind();
                if kind.class() == Class::Request {
                    known.open.insert(envelope.correlation, sent.bytes as u64);
                }
            }
            Some(ServerEvent::Closed { .. }) => panic!("no end was reported"),
            None => {}
        }
    }

    fn check(&self) {
        for (peer, known) in &self.peers {
            if let Some(open) = self.session.open_requests(*peer) {
                let expected = (known.open.len() as u64, known.open.values().sum());
                assert_eq!(open, expected, "{peer}");
                assert!(known.open.len() <= limits::REQUEST_CREDITS as usize);
                let most = limits::BYTE_CREDITS;
                assert!(expected.1 <= most || known.open.len() == 1);
            } else {
                assert!(self.host.disconnected.contains(peer), "{peer} is forgotten");
                assert!(known.role.is_none(), "a welcomed peer is forgotten");
            }
        }
        let strangers = self
            .peers
            .iter()
            .filter(|(id, known)| known.role.is_none() && self.session.knows(**id));
        assert!(strangers.count() <= STRANGERS_MAX);
        let guests = self
            .peers
            .values()
            .filter(|known| known.role.is_some_and(|role| !matches!(role, Role::Worker)));
        assert!(guests.count() <= GUESTS_MAX);
    }

    /// Answers every request and closes every connection: nothing is left.
    fn end(&mut self) {
        for (peer, known) in &mut self.peers {
            for id in std::mem::take(&mut known.open).into_keys() {
                self.session.settle(*peer, id);
            }
            if let Some(open) = self.session.open_requests(*peer) {
                assert_eq!(open, (0, 0), "credits of {peer} are lost");
            }
        }
        let peers: Vec<PeerId> = self.peers.keys().copied().collect();
        for peer in peers {
            self.close(peer);
        }
    }
}

/// The body of an example of a kind.
fn example(kind: MessageKind, version: u16) -> Vec<u8> {
    static BODIES: OnceLock<BTreeMap<(MessageKind, u16), Vec<u8>>> = OnceLock::new();
    let bodies = BODIES.get_or_init(|| {
        let messages = examples().into_iter().map(|(_, message)| message);
        messages
            .flat_map(|message| {
                (VERSION_MIN..=VERSION).map(move |version| {
                    let key = (message.kind(), version);
                    (key, body_of(message.clone(), version))
                })
            })
            .collect()
    });
    let version = version.clamp(VERSION_MIN, VERSION);
    let body = bodies.get(&(kind, version));
    body.expect("every kind has an example").clone()
}

fn body_of(message: Message, version: u16) -> Vec<u8> {
    let envelope = Envelope {
        version,
        correlation: RequestId(0),
        deadline_ms: 0,
        epoch: Epoch(0),
        message,
    };
    encode(&envelope).expect("an example can be written").1
}

/// At most one answer, to the peer, with the id of its request. An answer is never answered.
fn check_answers(header: &Header, answers: &[(PeerId, Encoded)], peer: PeerId) {
    assert!(answers.len() <= 1, "{} answers", answers.len());
    for (to, (head, body)) in answers {
        assert_eq!(*to, peer, "an answer to another peer");
        assert_eq!(
            Class::of(header.kind),
            Class::Request,
            "an answer is answered"
        );
        let head = Header::from_bytes(head).expect("a header");
        assert_eq!((head.correlation, head.epoch), (header.correlation, EPOCH));
        let answer = decode(head, body).expect("an answer can be read");
        assert_eq!(answer.message.kind().class(), Class::Answer);
    }
}

/// A request is carried out or answered, or dropped if it is open; one that is carried out was not open.
fn check_reaction(known: &Known, header: &Header, event: Option<&ServerEvent>, answers: usize) {
    let is_request = Class::of(header.kind) == Class::Request;
    let is_open = known.open.contains_key(&header.correlation);
    match event {
        Some(ServerEvent::Message { envelope, .. }) => {
            let role = known.role.expect("a message before the welcome");
            assert!(envelope.message.kind().sent_by(role), "{role:?}");
            assert!(envelope.deadline_ms <= limits::DEADLINE_MAX_MS);
            assert_eq!(answers, 0, "answered, and carried out");
            assert!(!is_request || !is_open, "carried out twice");
        }
        Some(ServerEvent::Opened { .. }) => assert_eq!(answers, 1, "no welcome"),
        Some(ServerEvent::Closed { .. }) => {}
        None => assert!(
            answers == 1 || !is_request || is_open,
            "a request of kind {} without an answer",
            header.kind
        ),
    }
}
