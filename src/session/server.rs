//! The server's side of connections: hello and versions, credits, silence, and a typed error for every message that
//! cannot be carried out.

use std::collections::BTreeMap;
use std::time::Duration;

use super::admission::{HELLO_DEADLINE, Peer, STRANGERS_MAX, Verdict};
use super::origin::Origin;
use kvferry_protocol::{
    Class, Connections, DecodeError, Empty, Envelope, ErrorBody, ErrorCode, HEADER_BYTES,
    HELLO_VERSION, Header, Hello, Message, Role, VERSION, VERSION_MIN, Welcome, encode, limits,
};
use kvferry_types::{Caller, Epoch, LogLimit, PeerId, RequestId, Time, User};

/// The header and the body of a message.
pub type Encoded = ([u8; HEADER_BYTES], Vec<u8>);

/// Settings of a server.
#[derive(Debug, Clone)]
pub struct ServerSettings {
    /// Epoch of every header that is sent.
    pub epoch: Epoch,
    /// A client pings after this much silence; after three times that, its connection is closed. Default: 1 s.
    pub heartbeat: Duration,
    /// Roles that are accepted in a hello.
    pub roles: Vec<Role>,
    /// Features beyond the version, as in [`Hello::features`].
    pub features: u64,
    /// Numbers of replicas and ranks: workers with other ones are refused, because the places for connections of workers
    /// are as many as their seats. `None` accepts all.
    pub worker_seats: Option<(u16, u16)>,
}

/// An event of a peer.
#[derive(Debug)]
pub enum ServerEvent {
    /// The peer sent its hello, and was welcomed.
    Opened {
        /// The connection.
        peer: PeerId,
        /// The peer's hello.
        hello: Hello,
        /// The peer's process.
        caller: Caller,
    },
    /// The peer sent a request or an answer.
    Message {
        /// The connection.
        peer: PeerId,
        /// The message.
        envelope: Envelope,
    },
    /// The connection was closed. Comes exactly once after `Opened`.
    Closed {
        /// The connection.
        peer: PeerId,
    },
}

/// The process of a server, live or simulated.
pub trait ServerHost {
    /// The clock by which silence is measured.
    fn now(&self) -> Time;

    /// Sends a message without waiting. Returns false when the peer is gone or does not read; its connection is then
    /// closed.
    fn send(&mut self, peer: PeerId, message: Encoded) -> bool;

    /// Closes a connection.
    fn disconnect(&mut self, peer: PeerId);

    /// Closes a connection as soon as the process that opened it has ended, even if another process holds it open too:
    /// that process has shared its memory with this one.
    fn watch(&mut self, peer: PeerId, pid: Option<i32>);

    /// Limit on connections other than workers'. Workers are exempt, because nothing is served without them.
    fn guests_max(&self) -> usize;
}

/// All connections of a server.
#[derive(Debug)]
pub struct ServerSession {
    settings: ServerSettings,
    version_max: u16,
    peers: BTreeMap<PeerId, Peer>,
    /// When silent peers were last searched for.
    swept: Time,
    malformed_messages: u64,
    refused_hellos: u64,
    repeated_requests: u64,
    /// Messages that were not carried out, by the code of the reason.
    refused: BTreeMap<ErrorCode, u64>,
    /// Errors that were sent.
    errors: BTreeMap<ErrorCode, u64>,
    /// Log lines about messages whose headers cannot be read.
    unreadable_lines: LogLimit,
}

impl ServerSession {
    /// A server without peers.
    pub fn new(settings: ServerSettings, now: Time) -> Self {
        Self {
            settings,
            version_max: VERSION,
            peers: BTreeMap::new(),
            swept: now,
            malformed_messages: 0,
            refused_hellos: 0,
            repeated_requests: 0,
            refused: BTreeMap::new(),
            errors: BTreeMap::new(),
            unreadable_lines: LogLimit::new(),
        }
    }

    /// Welcomes peers in no newer version than this one.
    pub fn limit_version(&mut self, version_max: u16) {
        self.version_max = version_max.clamp(VERSION_MIN, VERSION);
    }

    /// The clients, and what was refused. Connections that were refused before they were open are not known here.
    pub fn connections(&self) -> Connections {
        let mut connections = Connections {
            malformed_messages: self.malformed_messages,
            refused_hellos: self.refused_hellos,
            repeated_requests: self.repeated_requests,
            refused_messages: by_name(&self.refused),
            errors: by_name(&self.errors),
            ..Connections::default()
        };
        for peer in self.peers.values() {
            let (requests, bytes) = peer.open_requests();
            connections.open_requests += requests;
            connections.open_bytes += bytes;
            *match peer.role {
                Some(Role::Engine) => &mut connections.engines,
                Some(Role::Rank) => &mut connections.ranks,
                Some(Role::Worker) => &mut connections.workers,
                Some(Role::Admin | Role::Supervisor) => &mut connections.admins,
                Some(Role::Unknown) | None => &mut connections.strangers,
            } += 1;
        }
        connections
    }

    /// Counts an error that is sent to a peer.
    pub fn note_error(&mut self, code: ErrorCode) {
        *self.errors.entry(code).or_default() += 1;
    }

    /// Counts a message that is not carried out, whether or not an error is sent.
    fn note_refused(&mut self, code: ErrorCode) {
        *self.refused.entry(code).or_default() += 1;
    }

    /// Interval at which [`Self::tick`] is due.
    pub fn sweep(&self) -> Duration {
        self.settings.heartbeat.min(HELLO_DEADLINE / 5)
    }

    /// Time at which [`Self::tick`] is due.
    pub fn next_timeout(&self) -> Time {
        self.swept + self.sweep()
    }

    /// True while a peer is connected.
    pub fn knows(&self, peer: PeerId) -> bool {
        self.peers.contains_key(&peer)
    }

    /// True when a peer is connected and a message was received from it within two heartbeats: a ping is due after one,
    /// and takes time to arrive.
    pub fn is_live(&self, peer: PeerId, now: Time) -> bool {
        let peer = self.peers.get(&peer);
        peer.is_some_and(|peer| now - peer.last_received() <= self.settings.heartbeat * 2)
    }

    /// Handles a connection that was accepted.
    pub fn opened(&mut self, host: &mut impl ServerHost, peer: PeerId, origin: Origin) {
        // Peers that never send a hello cannot keep others out, and those of other users go first.
        let strangers = self.peers.iter().filter(|(_, peer)| peer.role.is_none());
        if strangers.clone().count() >= STRANGERS_MAX {
            let is_own = |peer: &Peer| peer.origin.caller().user == User::Own;
            // Ids of connections grow, so the lowest is the oldest.
            let oldest = strangers.map(|(id, peer)| (is_own(peer), *id)).min();
            let oldest = oldest.map(|(_, id)| id);
            if let Some(oldest) = oldest {
                tracing::debug!(peer = ?oldest, "closed: no hello, and new connections arrive");
                self.remove_peer(host, oldest);
            }
        }
        self.peers.insert(peer, Peer::new(origin, host.now()));
    }

    /// Handles the close of a connection, by either side.
    pub fn closed(&mut self, peer: PeerId) -> Option<ServerEvent> {
        let state = self.peers.remove(&peer)?;
        state.role.map(|_| ServerEvent::Closed { peer })
    }

    /// Closes a connection before its hello. Messages that still arrive from it are dropped.
    fn remove_peer(&mut self, host: &mut impl ServerHost, stranger: PeerId) {
        self.peers.remove(&stranger);
        host.disconnect(stranger);
    }

    /// Decides by header and length whether the body of a message is decoded; `None` when it is not. The result of
    /// decoding goes to [`Self::receive`].
    pub fn admit(
        &mut self,
        host: &mut impl ServerHost,
        peer: PeerId,
        header: &[u8],
        bytes: usize,
    ) -> Option<Header> {
        let header = match Header::from_bytes(header) {
            Ok(header) => header,
            Err(error) => {
                if let Some(left_out) = self.unreadable_lines.line(host.now()) {
                    tracing::warn!(?peer, %error, left_out, "a message gets no answer: its first part is no header");
                }
                self.note_refused(error.code());
                self.misbehaves(host, peer, &error.to_string());
                return None;
            }
        };
        let known = self.peers.get_mut(&peer)?;
        let (verdict, bad) = known.admit(&header, bytes, host.now());
        let read = verdict == Verdict::Read;
        match verdict {
            Verdict::Read => {}
            Verdict::Refuse(error) => {
                self.note_refused(error.code());
                self.send(host, peer, header.correlation, Message::Error(error));
            }
            Verdict::Drop(code) => self.note_refused(code),
            Verdict::Repeated => self.repeated_requests += 1,
        }
        if bad {
            self.misbehaves(host, peer, "it should not have come");
        }
        read.then_some(header)
    }

    /// Handles the result of decoding an admitted message of `bytes` bytes.
    pub fn receive(
        &mut self,
        host: &mut impl ServerHost,
        peer: PeerId,
        header: &Header,
        decoded: Result<Envelope, DecodeError>,
        bytes: usize,
    ) -> Option<ServerEvent> {
        let mut envelope = match decoded {
            Ok(envelope) => envelope,
            Err(error) => {
                self.note_refused(error.code());
                if Class::of(header.kind) == Class::Request {
                    let error = ErrorBody::for_good(error.code(), error.to_string());
                    self.send(host, peer, header.correlation, Message::Error(error));
                }
                self.misbehaves(host, peer, &error.without_values());
                return None;
            }
        };
        envelope.deadline_ms = envelope.deadline_ms.min(limits::DEADLINE_MAX_MS);
        let correlation = envelope.correlation;
        let class = envelope.message.kind().class();
        match envelope.message {
            Message::Hello(hello) => self.welcome(host, peer, correlation, hello),
            Message::Ping(_) => {
                self.send(host, peer, correlation, Message::Pong(Empty {}));
                None
            }
            Message::Pong(_) => None,
            _ => {
                if class == Class::Request {
                    self.peers
                        .get_mut(&peer)?
                        .note_request(correlation, bytes as u64);
                }
                Some(ServerEvent::Message { peer, envelope })
            }
        }
    }

    fn welcome(
        &mut self,
        host: &mut impl ServerHost,
        id: PeerId,
        correlation: RequestId,
        hello: Hello,
    ) -> Option<ServerEvent> {
        let version = hello.version_max.min(self.version_max);
        let origin = &self.peers.get(&id)?.origin;
        let refusal = self.refusal(host, &hello, version);
        if let Some(refusal) = refusal.or_else(|| origin.permits(&hello).err()) {
            self.refused_hellos += 1;
            self.note_refused(refusal.code());
            self.send(host, id, correlation, Message::Error(refusal));
            return None;
        }
        let heartbeat_ms = u32::try_from(self.settings.heartbeat.as_millis()).unwrap_or(u32::MAX);
        let welcome = Welcome {
            version,
            features: hello.features & self.settings.features,
            ..Welcome::new(heartbeat_ms)
        };
        // Encoded in the version of hello messages, which every client reads.
        self.send(host, id, correlation, Message::Welcome(welcome));
        let peer = self.peers.get_mut(&id)?;
        peer.role = Some(hello.role);
        peer.version = version;
        tracing::debug!(role = ?hello.role, version, name = hello.name, "welcomed");
        let caller = peer.origin.caller();
        if hello.role == Role::Rank {
            host.watch(id, caller.pid);
        }
        Some(ServerEvent::Opened {
            peer: id,
            hello,
            caller,
        })
    }

    /// Why this side does not welcome such a client, whatever its origin; `None` when it does.
    fn refusal(&self, host: &impl ServerHost, hello: &Hello, version: u16) -> Option<ErrorBody> {
        self.version_refusal(hello, version)
            .or_else(|| self.identity_refusal(hello))
            .or_else(|| match hello.role {
                Role::Worker => self.seat_refusal(hello),
                _ => self.guest_refusal(host),
            })
    }

    /// The refusal of a client with which this side has no version in common.
    fn version_refusal(&self, hello: &Hello, version: u16) -> Option<ErrorBody> {
        let (min, max) = (hello.version_min, hello.version_max);
        if min > max {
            let text = format!(
                "version_min is {min} and version_max {max}: give the oldest and the newest version that you support"
            );
            return Some(ErrorBody::new(ErrorCode::Invalid, text));
        }
        if version < min.max(VERSION_MIN) {
            let newest = self.version_max;
            let text = format!(
                "you support versions {min} to {max}, this side {VERSION_MIN} to {newest}: update the older side"
            );
            return Some(ErrorBody::new(ErrorCode::UnsupportedVersion, text));
        }
        None
    }

    /// The refusal of a role that this side does not take, and of an engine without an identity.
    fn identity_refusal(&self, hello: &Hello) -> Option<ErrorBody> {
        let text = if hello.role == Role::Unknown {
            format!(
                "role of your hello is a word that this version does not know, this side takes {}: check its spelling and the \
                 address, or update this side",
                self.roles()
            )
        } else if !self.settings.roles.contains(&hello.role) {
            format!(
                "role is '{}', and this side takes {}: engines and workers connect to the leader, ranks to their worker",
                hello.role.name(),
                self.roles()
            )
        } else if matches!(hello.role, Role::Engine | Role::Rank) && hello.engine == [0; 16] {
            "engine is absent or zero, so that the requests of two engines could not be told apart: give 16 random bytes, \
             the same over reconnects and on all ranks of the engine"
                .to_owned()
        } else {
            return None;
        };
        Some(ErrorBody::new(ErrorCode::Invalid, text))
    }

    /// The refusal of a worker whose replica or rank the leader does not have.
    fn seat_refusal(&self, hello: &Hello) -> Option<ErrorBody> {
        let (replicas, ranks) = self.settings.worker_seats?;
        let (replica, rank) = (hello.replica, hello.rank);
        if replica < replicas && rank < ranks {
            return None;
        }
        let (field, value) = match rank < ranks {
            true => ("replica", replica),
            false => ("rank", rank),
        };
        let text = format!(
            "{field} is {value}, too high: the leader has {replicas} replicas of {ranks} ranks, from 0 on; start leader and \
             workers with the same ranks and replicas"
        );
        Some(ErrorBody::new(ErrorCode::Invalid, text))
    }

    /// The refusal of a client other than a worker, when [`ServerHost::guests_max`] of them are connected.
    fn guest_refusal(&self, host: &impl ServerHost) -> Option<ErrorBody> {
        let guest = |peer: &&Peer| peer.role.is_some_and(|role| role != Role::Worker);
        let guests = self.peers.values().filter(guest).count();
        if guests < host.guests_max() {
            return None;
        }
        let text = format!("{guests} others are connected, as many as may be: close one of them");
        Some(ErrorBody::new(ErrorCode::Busy, text))
    }

    /// The accepted roles, for messages.
    fn roles(&self) -> String {
        let names = self.settings.roles.iter().map(|role| role.name());
        names.collect::<Vec<_>>().join(", ")
    }

    /// Counts a bad message, and closes a peer that sent too many.
    fn misbehaves(&mut self, host: &mut impl ServerHost, id: PeerId, why: &str) {
        tracing::debug!(peer = ?id, why, "a message that is not taken");
        self.malformed_messages += 1;
        let peer = self.peers.get_mut(&id);
        if peer.is_some_and(|peer| peer.misbehaves(host.now())) {
            host.disconnect(id);
        }
    }

    /// Closes peers that sent nothing for three heartbeats, or no hello in time. Searches at most once per
    /// [`Self::sweep`]. Returns the closed peers that had been welcomed.
    ///
    /// After a pause of this process, no peer is closed before the messages that arrived meanwhile are received.
    pub fn tick(&mut self, host: &mut impl ServerHost) -> Vec<PeerId> {
        let now = host.now();
        let since = now - self.swept;
        if since < self.sweep() {
            return Vec::new();
        }
        self.swept = now;
        if since > self.sweep() * 2 {
            return Vec::new();
        }
        let limit = self.settings.heartbeat * 3;
        let silent = self
            .peers
            .iter()
            .filter(|(_, peer)| peer.is_silent(now, limit))
            .map(|(id, peer)| (*id, peer.role.is_some()));
        let mut closed = Vec::new();
        for (peer, welcomed) in silent.collect::<Vec<_>>() {
            tracing::debug!(?peer, welcomed, "closed: it is silent");
            match welcomed {
                true => {
                    host.disconnect(peer);
                    closed.push(peer);
                }
                false => self.remove_peer(host, peer),
            }
        }
        closed
    }

    /// Gives a peer the credits of a request back that is about to be answered. Returns the version of messages to this
    /// peer.
    pub fn settle(&mut self, peer: PeerId, request: RequestId) -> u16 {
        let peer = self.peers.get_mut(&peer);
        peer.map_or(HELLO_VERSION, |peer| {
            peer.settle(request);
            peer.version
        })
    }

    /// True while this request of a peer waits for its answer.
    pub fn is_open(&self, peer: PeerId, request: RequestId) -> bool {
        self.peers
            .get(&peer)
            .is_some_and(|peer| peer.is_open(request))
    }

    /// Requests of a peer that wait for answers, and their bytes; `None` without such a peer.
    pub fn open_requests(&self, peer: PeerId) -> Option<(u64, u64)> {
        self.peers.get(&peer).map(Peer::open_requests)
    }

    /// The version of messages to a peer.
    pub fn version(&self, peer: PeerId) -> u16 {
        let peer = self.peers.get(&peer);
        peer.map_or(HELLO_VERSION, |peer| peer.version)
    }

    /// Epoch of every header that is sent.
    pub fn epoch(&self) -> Epoch {
        self.settings.epoch
    }

    fn send(
        &mut self,
        host: &mut impl ServerHost,
        peer: PeerId,
        correlation: RequestId,
        message: Message,
    ) {
        if let Message::Error(error) = &message {
            self.note_error(error.code());
        }
        let version = self.version(peer);
        if let Some(encoded) = encode_reply(version, self.settings.epoch, correlation, message) {
            host.send(peer, encoded);
        }
    }
}

/// Counts of every code, by its name.
pub fn by_name(counts: &BTreeMap<ErrorCode, u64>) -> BTreeMap<String, u64> {
    let counts = ErrorCode::ALL.iter().map(|code| {
        let count = counts.get(code).copied();
        (code.name().to_owned(), count.unwrap_or(0))
    });
    counts.collect()
}

/// Encodes an answer, or an error in its place if the answer cannot be encoded.
pub fn encode_reply(
    version: u16,
    epoch: Epoch,
    correlation: RequestId,
    message: Message,
) -> Option<Encoded> {
    let envelope = |message| Envelope {
        version,
        correlation,
        deadline_ms: 0,
        epoch,
        message,
    };
    let error = match encode(&envelope(message)) {
        Ok(encoded) => return Some(encoded),
        Err(error) => error.to_string(),
    };
    tracing::error!(error, "an answer cannot be encoded");
    let error = ErrorBody::new(ErrorCode::Internal, error);
    encode(&envelope(Message::Error(error))).ok()
}

/// The envelope of an order that is to be carried out within `deadline`, in the newest version.
pub fn order_envelope(
    epoch: Epoch,
    correlation: RequestId,
    message: Message,
    deadline: Duration,
) -> Envelope {
    let deadline_ms = u32::try_from(deadline.as_millis())
        .unwrap_or(u32::MAX)
        .max(1);
    Envelope {
        version: VERSION,
        correlation,
        deadline_ms,
        epoch,
        message,
    }
}

/// Encodes an order in a version; `None` if that is not possible.
pub fn encode_order(version: u16, order: &mut Envelope) -> Option<Encoded> {
    order.version = version;
    encode(order)
        .inspect_err(|error| tracing::error!(%error, "an order cannot be encoded"))
        .ok()
}
