//! The client's side of a conversation: hello, requests with deadlines, retries over reconnects, heartbeats, credits.
//!
//! A session keeps one connection. When it breaks, the session connects again, says hello again, and sends each request that
//! is not answered once more under the same id, until that request's own deadline.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::server::Encoded;
use crate::protocol::{
    Class, DecodeError, Empty, Envelope, ErrorBody, ErrorCode, HELLO_VERSION, Header, Hello, Kind,
    Message, VERSION, Welcome, decode, encode,
};
use crate::types::{Epoch, LinkId, RequestId, Time};

/// Requests of a client without an answer; it takes no more. At worst 32 GiB, with the longest body of the wire each; with
/// the hashes of 4,096 pages each, 512 MiB.
pub const CLIENT_OPEN_MAX: usize = 4096;
/// Longest wait for a connection, and then for the welcome.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a client waits, for what it does not request.
#[derive(Debug, Clone, Copy)]
pub struct ClientTimes {
    /// For the welcome, once a connection is there.
    pub welcome: Duration,
    /// Before it connects again after a welcomed connection broke. Doubles with every failure, up to `reconnect_max`.
    pub reconnect: Duration,
    /// The longest such wait.
    pub reconnect_max: Duration,
}

impl Default for ClientTimes {
    fn default() -> Self {
        Self {
            welcome: CONNECT_TIMEOUT,
            reconnect: Duration::from_millis(20),
            reconnect_max: Duration::from_secs(1),
        }
    }
}

/// Why a request was not carried out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {message}", code.name())]
pub struct Failure {
    /// Which kind of failure.
    pub code: ErrorCode,
    /// One line for people.
    pub message: String,
    /// The same request may succeed later.
    pub retry: bool,
    /// The leader says that nothing of the request is under way, and nothing will be.
    pub over: bool,
}

impl Failure {
    /// A failure on this side: nothing is known of the request.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            retry: code.retry(),
            over: false,
        }
    }
}

impl From<ErrorBody> for Failure {
    fn from(body: ErrorBody) -> Self {
        Self {
            code: body.code(),
            message: body.message,
            retry: body.retry,
            over: body.over,
        }
    }
}

impl From<Failure> for ErrorBody {
    fn from(failure: Failure) -> Self {
        Self {
            retry: failure.retry,
            over: failure.over,
            ..Self::new(failure.code, failure.message)
        }
    }
}

/// What a client's process has to do, in this order. `R` says where the answer to a request goes.
#[derive(Debug)]
pub enum ClientEvent<R> {
    /// Connect, within [`CONNECT_TIMEOUT`], and call [`ClientSession::connected`] or [`ClientSession::not_connected`].
    Connect,
    /// Close the connection.
    Disconnect,
    /// Send a message.
    Send(Encoded),
    /// The other side said welcome over a new connection; its epoch may be a new one.
    Welcomed {
        /// The other side's epoch.
        epoch: Epoch,
        /// The connection.
        link: LinkId,
        /// Features of both sides beyond the version, as in [`Welcome::features`].
        features: u64,
    },
    /// The connection broke after its welcome.
    Lost,
    /// The other side sent a request; answer it with [`ClientSession::reply`].
    Request {
        /// The connection over which it came, and the only one over which the answer is sent.
        link: LinkId,
        /// The request.
        envelope: Box<Envelope>,
    },
    /// The other side answered a request.
    Answered {
        /// The request.
        id: RequestId,
        /// Where its answer goes.
        to: R,
        /// The answer.
        answer: Result<Message, Failure>,
    },
    /// A request got no answer.
    Failed {
        /// Where its answer goes.
        to: R,
        /// Why.
        failure: Failure,
    },
}

/// A request of a client.
#[derive(Debug)]
pub struct ClientRequest<R> {
    /// The same id again is a retry.
    pub id: RequestId,
    /// What is requested.
    pub message: Message,
    /// The other side's deadline.
    pub deadline: Time,
    /// The request fails so long after its deadline when no answer came.
    pub grace: Duration,
    /// The only connection over which it may be sent.
    pub link: Option<LinkId>,
    /// Where its answer goes.
    pub to: R,
}

#[derive(Debug)]
struct Pending<R> {
    request: ClientRequest<R>,
    /// Bytes of its message, once it is sent over this connection; 0 while it is among the unsent ones.
    bytes: u64,
}

impl<R> Pending<R> {
    fn expires(&self) -> Time {
        self.request.deadline + self.request.grace
    }
}

/// How far the connection is.
#[derive(Debug)]
enum State {
    /// There is none until then.
    Apart { connect_at: Time },
    /// The process connects.
    Connecting,
    /// The hello is sent; the welcome is due by then.
    Greeting { until: Time },
    /// The other side said welcome.
    Open(Open),
}

#[derive(Debug)]
struct Open {
    heartbeat: Duration,
    request_credits: usize,
    byte_credits: u64,
    /// When something was received last, and sent last.
    received: Time,
    sent: Time,
    /// A ping was sent since.
    pinged: bool,
}

/// See the module.
#[derive(Debug)]
pub struct ClientSession<R> {
    hello: Hello,
    times: ClientTimes,
    state: State,
    pending: BTreeMap<RequestId, Pending<R>>,
    /// Pending requests that are not sent over this connection, in order.
    unsent: VecDeque<RequestId>,
    in_flight_bytes: u64,
    version: u16,
    epoch: Epoch,
    /// The connection that there is, or was last.
    link: LinkId,
    backoff: Duration,
    /// What the process has to do. Requests in here are within the other side's credits: 64 MiB of messages, beside answers
    /// to the other side, of which there are no more than it has open requests.
    events: VecDeque<ClientEvent<R>>,
}

fn broken() -> Failure {
    Failure::new(
        ErrorCode::Deadline,
        "the connection broke before an answer came",
    )
}

impl<R> ClientSession<R> {
    /// A client that connects at once.
    pub fn new(hello: Hello, times: ClientTimes, now: Time) -> Self {
        Self {
            hello,
            times,
            state: State::Apart { connect_at: now },
            pending: BTreeMap::new(),
            unsent: VecDeque::new(),
            in_flight_bytes: 0,
            version: VERSION,
            epoch: Epoch(0),
            link: LinkId(0),
            backoff: times.reconnect,
            events: VecDeque::new(),
        }
    }

    /// The next thing to do; `None` when there is nothing until something happens or [`Self::next_timeout`] has come.
    pub fn poll(&mut self) -> Option<ClientEvent<R>> {
        self.events.pop_front()
    }

    /// True when no more requests are taken before one is answered.
    pub fn is_full(&self) -> bool {
        self.pending.len() >= CLIENT_OPEN_MAX
    }

    /// When [`Self::tick`] is due.
    pub fn next_timeout(&self) -> Time {
        let expires = self.pending.values().map(Pending::expires).min();
        let state = match &self.state {
            State::Apart { connect_at } => *connect_at,
            State::Connecting => Time::NEVER,
            State::Greeting { until } => *until,
            State::Open(open) => open.next_beat(),
        };
        expires.unwrap_or(Time::NEVER).min(state)
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Time) {
        self.expire(now);
        match &mut self.state {
            State::Apart { connect_at } if now >= *connect_at => {
                self.state = State::Connecting;
                self.events.push_back(ClientEvent::Connect);
            }
            State::Greeting { until } if now >= *until => {
                let failure = Failure::new(ErrorCode::Busy, "no welcome in time");
                self.not_welcome(now, &failure);
            }
            State::Open(open) if now >= open.next_beat() => {
                if open.pinged && now - open.received >= open.heartbeat * 3 {
                    return self.lose(now, "silent for three heartbeats");
                }
                open.pinged = true;
                let beat_ms = u32::try_from(open.heartbeat.as_millis()).unwrap_or(u32::MAX);
                let ping = self.encode(RequestId(0), Message::Ping(Empty {}), beat_ms);
                match ping {
                    Ok(ping) => self.send(now, ping),
                    Err(failure) => self.lose(now, &failure.message),
                }
            }
            _ => {}
        }
        self.send_unsent(now);
    }

    /// Sends a request, now or as soon as there are a connection and credits.
    pub fn request(&mut self, now: Time, request: ClientRequest<R>) {
        let open = matches!(self.state, State::Open(_));
        if request.link.is_some_and(|link| !open || link != self.link) {
            let (to, failure) = (request.to, broken());
            self.events.push_back(ClientEvent::Failed { to, failure });
            return;
        }
        let id = request.id;
        match self.pending.insert(id, Pending { request, bytes: 0 }) {
            // Its caller does not wait any more.
            Some(before) if before.bytes == 0 => {}
            before => {
                let bytes = before.map_or(0, |before| before.bytes);
                self.in_flight_bytes = self.in_flight_bytes.saturating_sub(bytes);
                self.unsent.push_back(id);
            }
        }
        self.send_unsent(now);
    }

    /// Answers a request that came over this connection. When that connection is gone, the answer is dropped: over the next
    /// one, under the epoch of another leader, it would answer something else.
    pub fn reply(&mut self, now: Time, link: LinkId, correlation: RequestId, message: Message) {
        if !matches!(self.state, State::Open(_)) || link != self.link {
            tracing::debug!(%correlation, "answer dropped: the connection it belongs to is gone");
            return;
        }
        match self.encode(correlation, message, 0) {
            Ok(encoded) => self.send(now, encoded),
            Err(failure) => tracing::error!(%failure, "an answer cannot be encoded"),
        }
    }

    /// The process has connected.
    pub fn connected(&mut self, now: Time) {
        let until = now + self.times.welcome;
        self.state = State::Greeting { until };
        // In the version of first words, which every server reads.
        let hello = encode(&Envelope {
            version: HELLO_VERSION,
            correlation: RequestId(0),
            deadline_ms: u32::try_from(self.times.welcome.as_millis()).unwrap_or(u32::MAX),
            epoch: Epoch(0),
            message: Message::Hello(self.hello.clone()),
        });
        match hello {
            Ok(hello) => self.events.push_back(ClientEvent::Send(hello)),
            Err(error) => {
                let failure = Failure::new(ErrorCode::Limit, error.to_string());
                self.not_welcome(now, &failure);
            }
        }
    }

    /// The process could not connect.
    pub fn not_connected(&mut self, now: Time, why: &str) {
        tracing::debug!(why, "cannot connect yet");
        self.wait(now);
    }

    /// The connection is closed, by the other side or by an error.
    pub fn disconnected(&mut self, now: Time, why: &str) {
        match self.state {
            State::Open(_) => self.lose(now, why),
            State::Greeting { .. } => {
                let failure = Failure::new(ErrorCode::Busy, why);
                self.not_welcome(now, &failure);
            }
            State::Apart { .. } | State::Connecting => {}
        }
    }

    /// A message has come.
    pub fn received(&mut self, now: Time, header: &[u8], body: &[u8]) {
        match &mut self.state {
            State::Apart { .. } | State::Connecting => {}
            State::Greeting { .. } => match self.welcome(header, body) {
                Ok((welcome, epoch)) => self.open(now, &welcome, epoch),
                Err(failure) => self.not_welcome(now, &failure),
            },
            State::Open(open) => {
                open.received = now;
                open.pinged = false;
                if let Err(why) = self.take(now, header, body) {
                    self.lose(now, &why);
                }
            }
        }
        self.send_unsent(now);
    }

    fn welcome(&self, header: &[u8], body: &[u8]) -> Result<(Welcome, Epoch), Failure> {
        let busy = |error: String| Failure::new(ErrorCode::Busy, error);
        let header = Header::from_bytes(header).map_err(|error| busy(error.to_string()))?;
        let envelope = decode(header, body).map_err(|error| busy(error.to_string()))?;
        let versions = self.hello.version_min..=self.hello.version_max;
        match envelope.message {
            Message::Welcome(welcome) if versions.contains(&welcome.version) => {
                Ok((welcome, envelope.epoch))
            }
            Message::Welcome(welcome) => Err(Failure::new(
                ErrorCode::UnsupportedVersion,
                format!(
                    "the welcome says version {}, this side speaks {} to {}: update the older side",
                    welcome.version,
                    versions.start(),
                    versions.end()
                ),
            )),
            Message::Error(error) => Err(error.into()),
            other => Err(busy(format!(
                "{} instead of a welcome",
                other.kind().name()
            ))),
        }
    }

    fn open(&mut self, now: Time, welcome: &Welcome, epoch: Epoch) {
        self.version = welcome.version;
        self.epoch = epoch;
        self.link = LinkId(self.link.0 + 1);
        self.backoff = self.times.reconnect;
        self.state = State::Open(Open {
            heartbeat: Duration::from_millis(u64::from(welcome.heartbeat_ms.max(10))),
            request_credits: welcome.request_credits as usize,
            byte_credits: welcome.byte_credits,
            received: now,
            sent: now,
            pinged: false,
        });
        self.events.push_back(ClientEvent::Welcomed {
            epoch,
            link: self.link,
            features: welcome.features,
        });
        self.fail_bound();
        self.in_flight_bytes = 0;
        self.unsent = self.pending.keys().copied().collect();
        for pending in self.pending.values_mut() {
            pending.bytes = 0;
        }
    }

    /// Takes a message after the welcome. An error breaks the connection.
    fn take(&mut self, now: Time, header: &[u8], body: &[u8]) -> Result<(), String> {
        let header = Header::from_bytes(header).map_err(|error| error.to_string())?;
        let kind = Kind::from_number(header.kind);
        match Class::of(header.kind) {
            Class::Request => self.take_request(now, kind, header, body),
            // Answers to no request, and those of an unknown kind, are dropped.
            Class::Answer if kind.is_none_or(|kind| kind == Kind::Pong) => Ok(()),
            Class::Answer if !self.pending.contains_key(&header.correlation) => Ok(()),
            Class::Answer => {
                let envelope = decode(header, body).map_err(|error| error.to_string())?;
                let answer = match envelope.message {
                    Message::Error(error) => Err(error.into()),
                    message => Ok(message),
                };
                let id = envelope.correlation;
                if let Some(to) = self.end(id) {
                    self.events
                        .push_back(ClientEvent::Answered { id, to, answer });
                }
                Ok(())
            }
        }
    }

    /// A request that cannot be decoded is refused, and the conversation goes on.
    fn take_request(
        &mut self,
        now: Time,
        kind: Option<Kind>,
        header: Header,
        body: &[u8],
    ) -> Result<(), String> {
        let refusal = |error: &DecodeError| {
            Message::Error(ErrorBody::for_good(error.code(), error.to_string()))
        };
        let answer = match kind.filter(|kind| kind.asked_of_clients()) {
            Some(Kind::Ping) => Message::Pong(Empty {}),
            Some(_) => match decode(header, body) {
                Ok(envelope) => {
                    self.events.push_back(ClientEvent::Request {
                        link: self.link,
                        envelope: Box::new(envelope),
                    });
                    return Ok(());
                }
                Err(error) => refusal(&error),
            },
            None => refusal(&DecodeError::UnknownKind(header.kind)),
        };
        let encoded = self.encode(header.correlation, answer, 0);
        let encoded = encoded.map_err(|failure| failure.to_string())?;
        self.send(now, encoded);
        Ok(())
    }

    /// Sends requests that wait, as far as the other side's credits allow.
    fn send_unsent(&mut self, now: Time) {
        while let State::Open(open) = &self.state
            && let Some(id) = self.unsent.front().copied()
        {
            let sent = self.pending.len() - self.unsent.len();
            let (request_credits, byte_credits) = (open.request_credits, open.byte_credits);
            if sent >= request_credits && sent > 0 {
                return;
            }
            let Some(pending) = self.pending.get(&id) else {
                self.unsent.pop_front();
                continue;
            };
            let left = now.until(pending.request.deadline);
            let left_ms = u32::try_from(left.as_millis()).unwrap_or(u32::MAX).max(1);
            let encoded = match self.encode(id, pending.request.message.clone(), left_ms) {
                Ok(encoded) => encoded,
                Err(failure) => {
                    self.unsent.pop_front();
                    self.fail(id, failure);
                    continue;
                }
            };
            let bytes = encoded.1.len() as u64;
            if sent > 0 && self.in_flight_bytes + bytes > byte_credits {
                return;
            }
            self.unsent.pop_front();
            self.in_flight_bytes += bytes;
            if let Some(pending) = self.pending.get_mut(&id) {
                pending.bytes = bytes;
            }
            self.send(now, encoded);
        }
    }

    fn send(&mut self, now: Time, message: Encoded) {
        if let State::Open(open) = &mut self.state {
            open.sent = now;
        }
        self.events.push_back(ClientEvent::Send(message));
    }

    fn encode(
        &self,
        id: RequestId,
        message: Message,
        deadline_ms: u32,
    ) -> Result<Encoded, Failure> {
        let encoded = encode(&Envelope {
            version: self.version,
            correlation: id,
            deadline_ms,
            epoch: self.epoch,
            message,
        });
        encoded.map_err(|error| Failure::new(ErrorCode::Limit, error.to_string()))
    }

    /// Ends a request; returns where its answer goes.
    fn end(&mut self, id: RequestId) -> Option<R> {
        let pending = self.pending.remove(&id)?;
        self.in_flight_bytes = self.in_flight_bytes.saturating_sub(pending.bytes);
        Some(pending.request.to)
    }

    fn fail(&mut self, id: RequestId, failure: Failure) {
        if let Some(to) = self.end(id) {
            self.events.push_back(ClientEvent::Failed { to, failure });
        }
    }

    /// Fails requests that may be sent over an older connection only.
    fn fail_bound(&mut self) {
        let link = self.link;
        let bound = self
            .pending
            .iter()
            .filter(|(_, pending)| pending.request.link.is_some_and(|bound| bound != link));
        for id in bound.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.fail(id, broken());
        }
    }

    fn expire(&mut self, now: Time) {
        let late = self
            .pending
            .iter()
            .filter(|(_, pending)| pending.expires() <= now);
        for id in late.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.unsent.retain(|unsent| *unsent != id);
            let failure = Failure::new(ErrorCode::Deadline, "no answer by the deadline");
            self.fail(id, failure);
        }
    }

    /// The other side did not say welcome. An error that will not go away fails all requests.
    fn not_welcome(&mut self, now: Time, failure: &Failure) {
        self.events.push_back(ClientEvent::Disconnect);
        if failure.code.retry() {
            tracing::debug!(%failure, "cannot connect yet");
        } else {
            self.unsent.clear();
            for id in self.pending.keys().copied().collect::<Vec<_>>() {
                self.fail(id, failure.clone());
            }
        }
        self.wait(now);
    }

    /// The connection broke after its welcome.
    fn lose(&mut self, now: Time, why: &str) {
        tracing::debug!(why, "connection lost");
        self.events.push_back(ClientEvent::Disconnect);
        self.events.push_back(ClientEvent::Lost);
        self.wait(now);
    }

    fn wait(&mut self, now: Time) {
        let connect_at = now + self.backoff;
        self.state = State::Apart { connect_at };
        self.backoff = (self.backoff * 2).min(self.times.reconnect_max);
    }
}

impl Open {
    /// When a ping is due: a heartbeat after the last message sent, however much the other side sends, because that closes
    /// a client that sends nothing for three; and a heartbeat after the last message received, to find out whether the other
    /// side is there. Then, when that side is to be given up.
    fn next_beat(&self) -> Time {
        let silent = match self.pinged {
            true => self.received + self.heartbeat * 3,
            false => self.received + self.heartbeat,
        };
        silent.min(self.sent + self.heartbeat)
    }
}
