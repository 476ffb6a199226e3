//! The client's side of a connection: hello, requests with deadlines, retries over reconnects, heartbeats, credits.
//!
//! A session keeps one connection. When that breaks, the session reconnects, repeats its hello, and sends each
//! unanswered request again under the same id, until that request's own deadline.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use super::failure::Failure;
use super::server::Encoded;
use kvferry_protocol::{
    Class, DecodeError, Empty, Envelope, EnvelopeFields, ErrorBody, ErrorCode, HELLO_VERSION,
    Header, Hello, Message, MessageKind, VERSION, Welcome, decode, encode, encode_message,
};
use kvferry_types::{Epoch, LinkId, RequestId, Time};

/// Limit on unanswered requests of a client. At worst they hold 32 GiB, with the longest body of the protocol in each;
/// with the hashes of 4,096 pages in each, 512 MiB.
pub const CLIENT_OPEN_MAX: usize = 4096;
/// Limit on the wait for a connection, and then for the welcome.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Waits of a client that belong to no request.
#[derive(Debug, Clone, Copy)]
pub struct ClientTimes {
    /// Limit on the wait for the welcome, once a connection is open.
    pub welcome: Duration,
    /// Pause before a reconnect after a welcomed connection broke. Doubles with every failure, up to `reconnect_max`.
    pub reconnect: Duration,
    /// Limit on that pause.
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

/// A message that makes its connection useless: nothing after it can be understood.
#[derive(Debug, thiserror::Error)]
enum Unusable {
    #[error(transparent)]
    Received(#[from] DecodeError),
    /// An answer to it cannot be encoded.
    #[error(transparent)]
    Answer(#[from] Failure),
}

/// An action of the client's process, in order. `R` identifies the receiver of an answer.
#[derive(Debug)]
pub enum ClientEvent<R> {
    /// Connect, within [`CONNECT_TIMEOUT`], and call [`ClientSession::connected`] or [`ClientSession::not_connected`].
    Connect,
    /// Close the connection.
    Disconnect,
    /// Send a message.
    Send(Encoded),
    /// The other side sent its welcome over a new connection; its epoch may be a new one.
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
        /// The connection over which the request arrived: the only one over which an answer is sent.
        link: LinkId,
        /// The request.
        envelope: Box<Envelope>,
    },
    /// The other side answered a request.
    Answered {
        /// The request.
        id: RequestId,
        /// The receiver of the answer.
        to: R,
        /// The answer.
        answer: Result<Message, Failure>,
    },
    /// A request failed without an answer.
    Failed {
        /// The receiver of the answer.
        to: R,
        /// The reason.
        failure: Failure,
    },
}

/// A request of a client.
#[derive(Debug)]
pub struct ClientRequest<R> {
    /// Id of the request. A repeated id is a retry.
    pub id: RequestId,
    /// The body.
    pub message: Message,
    /// The deadline that is sent to the other side.
    pub deadline: Time,
    /// Time after `deadline` after which the request fails if no answer has arrived.
    pub grace: Duration,
    /// The only connection over which the request may be sent; `None` for any.
    pub link: Option<LinkId>,
    /// The receiver of the answer.
    pub to: R,
}

#[derive(Debug)]
struct Pending<R> {
    request: ClientRequest<R>,
    /// The message was sent over this or an earlier connection.
    sent: bool,
}

impl<R> Pending<R> {
    fn expires(&self) -> Time {
        self.request.deadline + self.request.grace
    }
}

/// Progress of the connection.
#[derive(Debug)]
enum State {
    /// No connection until `connect_at`.
    Apart { connect_at: Time },
    /// The process connects.
    Connecting,
    /// The hello is sent; the welcome is due by `until`.
    Greeting { until: Time },
    /// The other side sent its welcome.
    Open(Open),
}

#[derive(Debug)]
struct Open {
    heartbeat: Duration,
    request_credits: usize,
    byte_credits: u64,
    /// When a message was last received, and last sent.
    received: Time,
    sent: Time,
    /// A ping was sent since the last message received.
    pinged: bool,
}

/// Requests that were sent over this connection and not answered, with their bytes, as the other side counts them: a
/// request whose caller no longer waits uses its credits until it is answered. Within the other side's credits.
#[derive(Debug, Default)]
struct InFlight {
    requests: BTreeMap<RequestId, u64>,
    bytes: u64,
}

impl InFlight {
    fn add(&mut self, id: RequestId, bytes: u64) {
        let before = self.requests.insert(id, bytes);
        self.bytes = self.bytes - before.unwrap_or(0) + bytes;
    }

    fn remove(&mut self, id: RequestId) {
        self.bytes -= self.requests.remove(&id).unwrap_or(0);
    }
}

/// The client's side of a connection, which survives reconnects.
#[derive(Debug)]
pub struct ClientSession<R> {
    hello: Hello,
    times: ClientTimes,
    state: State,
    pending: BTreeMap<RequestId, Pending<R>>,
    /// A lower bound of the times at which pending requests expire; exact after [`Self::expire`] has searched. Kept because
    /// a search for each message would cost more than the message.
    earliest_expiry: Time,
    /// Pending requests that are not in flight, in order.
    unsent: VecDeque<RequestId>,
    in_flight: InFlight,
    /// Longest body that a connection of the process carries.
    body_bytes_max: usize,
    version: u16,
    epoch: Epoch,
    /// The current connection, or the last one.
    link: LinkId,
    backoff: Duration,
    /// Actions for the process. Requests in here are within the other side's credits, 64 MiB of messages, but for those
    /// that their callers repeat while they are in flight. Answers in here are no more than the other side's open
    /// requests.
    events: VecDeque<ClientEvent<R>>,
    /// Errors that were answered to requests of the other side.
    refused: BTreeMap<ErrorCode, u64>,
}

fn broken() -> Failure {
    Failure::new(
        ErrorCode::Deadline,
        "the connection broke before an answer came",
    )
}

impl<R> ClientSession<R> {
    /// A client that connects on its first [`Self::tick`].
    pub fn new(hello: Hello, times: ClientTimes, now: Time) -> Self {
        Self {
            hello,
            times,
            state: State::Apart { connect_at: now },
            pending: BTreeMap::new(),
            earliest_expiry: Time::NEVER,
            unsent: VecDeque::new(),
            in_flight: InFlight::default(),
            body_bytes_max: usize::MAX,
            version: VERSION,
            epoch: Epoch(0),
            link: LinkId(0),
            backoff: times.reconnect,
            events: VecDeque::new(),
            refused: BTreeMap::new(),
        }
    }

    /// Sets the longest body that a connection of the process carries, where that is less than the protocol allows. A
    /// longer request fails; sent, it would break the connection, and again after each reconnect.
    pub fn with_body_limit(self, body_bytes_max: usize) -> Self {
        Self {
            body_bytes_max,
            ..self
        }
    }

    /// The next action; `None` when there is none until an event arrives or [`Self::next_timeout`] is reached.
    pub fn poll(&mut self) -> Option<ClientEvent<R>> {
        self.events.pop_front()
    }

    /// True while no further request is accepted: [`CLIENT_OPEN_MAX`] are unanswered.
    pub fn is_full(&self) -> bool {
        self.pending.len() >= CLIENT_OPEN_MAX
    }

    /// Time at which [`Self::tick`] is due, or an earlier one.
    pub fn next_timeout(&self) -> Time {
        let state = match &self.state {
            State::Apart { connect_at } => *connect_at,
            State::Connecting => Time::NEVER,
            State::Greeting { until } => *until,
            State::Open(open) => open.next_beat(),
        };
        self.earliest_expiry.min(state)
    }

    /// Fires the timers that are due.
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
                let ping = self.encode(RequestId(0), &Message::Ping(Empty {}), beat_ms);
                match ping {
                    Ok(ping) => self.send(now, ping),
                    Err(failure) => self.lose(now, &failure.message),
                }
            }
            _ => {}
        }
        self.send_unsent(now);
    }

    /// Sends a request as soon as there are a connection and credits.
    pub fn request(&mut self, now: Time, request: ClientRequest<R>) {
        let open = matches!(self.state, State::Open(_));
        if request.link.is_some_and(|link| !open || link != self.link) {
            let (to, failure) = (request.to, broken());
            self.events.push_back(ClientEvent::Failed { to, failure });
            return;
        }
        let id = request.id;
        let in_flight = self.in_flight.requests.contains_key(&id);
        let sent = in_flight || self.pending.get(&id).is_some_and(|before| before.sent);
        let pending = Pending { request, sent };
        self.earliest_expiry = self.earliest_expiry.min(pending.expires());
        let before = self.pending.insert(id, pending);
        // The caller of an earlier request under this id no longer waits. Sent again while it is in flight, the request
        // uses no further credits.
        if in_flight && open {
            if let Some(encoded) = self.encode_request(now, id) {
                self.send_request(now, id, encoded);
            }
        } else if !in_flight && (before.is_none() || !self.unsent.contains(&id)) {
            // New, or answered with a kind that this version does not know.
            self.unsent.push_back(id);
        }
        self.send_unsent(now);
    }

    /// Errors that were answered to requests of the other side, by code.
    pub fn refused(&self) -> &BTreeMap<ErrorCode, u64> {
        &self.refused
    }

    /// Answers a request that arrived over this connection. The answer is dropped when that connection is gone: over
    /// the next one, under another leader's epoch, it would answer a different request.
    pub fn reply(&mut self, now: Time, link: LinkId, correlation: RequestId, message: Message) {
        if !matches!(self.state, State::Open(_)) || link != self.link {
            tracing::debug!(%correlation, "answer dropped: the connection it belongs to is gone");
            return;
        }
        if let Message::Error(error) = &message {
            *self.refused.entry(error.code()).or_default() += 1;
        }
        match self.encode(correlation, &message, 0) {
            Ok(encoded) => self.send(now, encoded),
            Err(failure) => tracing::error!(%failure, "an answer cannot be encoded"),
        }
    }

    /// Handles a new connection of the process: sends the hello.
    pub fn connected(&mut self, now: Time) {
        let until = now + self.times.welcome;
        self.state = State::Greeting { until };
        // Encoded in the version of hello messages, which every server reads.
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

    /// Handles a failed attempt to connect.
    pub fn not_connected(&mut self, now: Time, why: &str) {
        tracing::debug!(why, "cannot connect yet");
        self.wait(now);
    }

    /// Handles the close of the connection, by the other side or by an error.
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

    /// Handles a message of the other side.
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
                    self.lose(now, &why.to_string());
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
                    "the welcome has version {}, this side supports {} to {}: update the older side",
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
        self.in_flight = InFlight::default();
        self.unsent = self.pending.keys().copied().collect();
    }

    /// Handles a message after the welcome. An error breaks the connection.
    fn take(&mut self, now: Time, header: &[u8], body: &[u8]) -> Result<(), Unusable> {
        let header = Header::from_bytes(header)?;
        let kind = MessageKind::from_number(header.kind);
        match Class::of(header.kind) {
            Class::Request => self.take_request(now, kind, header, body),
            // Drops answers of an unknown kind, and answers to no pending request.
            Class::Answer if kind.is_none_or(|kind| kind == MessageKind::Pong) => {
                // The other side has answered, so that the request uses none of its credits any longer.
                self.in_flight.remove(header.correlation);
                Ok(())
            }
            Class::Answer if !self.pending.contains_key(&header.correlation) => {
                self.in_flight.remove(header.correlation);
                Ok(())
            }
            Class::Answer => {
                let id = header.correlation;
                let answer = match decode(header, body) {
                    Ok(envelope) => match envelope.message {
                        Message::Error(error) => Err(error.into()),
                        message => Ok(message),
                    },
                    // Of the request nothing is known: the error does not say that its copies are over.
                    Err(unreadable) => {
                        let text = format!("the answer cannot be read: {unreadable}");
                        Err(ErrorBody::new(ErrorCode::Internal, text).into())
                    }
                };
                self.in_flight.remove(id);
                if let Some(pending) = self.pending.remove(&id) {
                    let to = pending.request.to;
                    self.events
                        .push_back(ClientEvent::Answered { id, to, answer });
                }
                Ok(())
            }
        }
    }

    /// Handles a request of the other side. A request that cannot be decoded is refused, and the connection stays.
    fn take_request(
        &mut self,
        now: Time,
        kind: Option<MessageKind>,
        header: Header,
        body: &[u8],
    ) -> Result<(), Unusable> {
        let refused = &mut self.refused;
        let mut refusal = |error: &DecodeError| {
            *refused.entry(error.code()).or_default() += 1;
            Message::Error(ErrorBody::for_good(error.code(), error.to_string()))
        };
        let answer = match kind.filter(|kind| kind.sent_to_clients()) {
            Some(MessageKind::Ping) => Message::Pong(Empty {}),
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
            None => {
                let unknown = DecodeError::UnknownKind(header.kind);
                refusal(&header.byte_order().unwrap_or(unknown))
            }
        };
        let encoded = self.encode(header.correlation, &answer, 0)?;
        self.send(now, encoded);
        Ok(())
    }

    /// Sends unsent requests, as far as the other side's credits allow.
    fn send_unsent(&mut self, now: Time) {
        while let State::Open(open) = &self.state
            && let Some(id) = self.unsent.front().copied()
        {
            let sent = self.in_flight.requests.len();
            let (request_credits, byte_credits) = (open.request_credits, open.byte_credits);
            if sent >= request_credits && sent > 0 {
                return;
            }
            let Some(encoded) = self.encode_request(now, id) else {
                self.unsent.retain(|unsent| *unsent != id);
                continue;
            };
            if sent > 0 && self.in_flight.bytes + encoded.1.len() as u64 > byte_credits {
                return;
            }
            self.unsent.pop_front();
            self.send_request(now, id, encoded);
        }
    }

    /// Encodes a request. Fails it if no message holds it.
    fn encode_request(&mut self, now: Time, id: RequestId) -> Option<Encoded> {
        let pending = self.pending.get(&id)?;
        let unsent = !pending.sent;
        let left = now.until(pending.request.deadline);
        let left_ms = u32::try_from(left.as_millis()).unwrap_or(u32::MAX).max(1);
        let encoded = self.encode(id, &pending.request.message, left_ms);
        let failed = |failure| self.fail(id, Failure { unsent, ..failure });
        encoded.map_err(failed).ok()
    }

    fn send_request(&mut self, now: Time, id: RequestId, encoded: Encoded) {
        self.in_flight.add(id, encoded.1.len() as u64);
        if let Some(pending) = self.pending.get_mut(&id) {
            pending.sent = true;
        }
        self.send(now, encoded);
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
        message: &Message,
        deadline_ms: u32,
    ) -> Result<Encoded, Failure> {
        let fields = EnvelopeFields {
            version: self.version,
            correlation: id,
            deadline_ms,
            epoch: self.epoch,
        };
        let encoded = encode_message(fields, message);
        let failed = |code, text: String| Failure {
            // The same message fits into no later attempt.
            retry: false,
            ..Failure::new(code, text)
        };
        let encoded = encoded.map_err(|error| failed(error.code(), error.to_string()))?;
        let (bytes, max) = (encoded.1.len(), self.body_bytes_max);
        match bytes <= max {
            true => Ok(encoded),
            false => Err(failed(
                ErrorCode::Limit,
                format!("a message of {bytes} bytes: this client's connection carries {max}"),
            )),
        }
    }

    /// Fails a request without an answer. While it is in flight it keeps its credits.
    fn fail(&mut self, id: RequestId, failure: Failure) {
        if let Some(pending) = self.pending.remove(&id) {
            let to = pending.request.to;
            self.events.push_back(ClientEvent::Failed { to, failure });
        }
        if !self.in_flight.requests.contains_key(&id) {
            self.unsent.retain(|unsent| *unsent != id);
        }
    }

    /// Fails requests that are bound to an older connection.
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

    /// Fails orders that were sent: repeated over the next connection, they could undo what another operator has ordered
    /// since, or order it from a successor.
    fn fail_orders(&mut self) {
        let kinds = [MessageKind::Drain, MessageKind::SetLog];
        let sent = self
            .pending
            .iter()
            .filter(|(_, pending)| pending.sent && kinds.contains(&pending.request.message.kind()));
        for id in sent.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.fail(id, broken());
        }
    }

    fn expire(&mut self, now: Time) {
        if now < self.earliest_expiry {
            return;
        }
        let late = self
            .pending
            .iter()
            .filter(|(_, pending)| pending.expires() <= now);
        for (id, unsent) in late
            .map(|(id, pending)| (*id, !pending.sent))
            .collect::<Vec<_>>()
        {
            let failure = Failure::new(ErrorCode::Deadline, "no answer by the deadline");
            self.fail(id, Failure { unsent, ..failure });
        }
        let earliest = self.pending.values().map(Pending::expires).min();
        self.earliest_expiry = earliest.unwrap_or(Time::NEVER);
    }

    /// Handles a hello that was not welcomed. A permanent error fails all requests.
    fn not_welcome(&mut self, now: Time, failure: &Failure) {
        self.events.push_back(ClientEvent::Disconnect);
        if failure.retry {
            tracing::debug!(%failure, "cannot connect yet");
        } else {
            let pending = self.pending.iter();
            let pending = pending.map(|(id, pending)| (*id, !pending.sent));
            for (id, unsent) in pending.collect::<Vec<_>>() {
                let failure = failure.clone();
                self.fail(id, Failure { unsent, ..failure });
            }
        }
        self.wait(now);
    }

    /// Handles the break of a welcomed connection.
    fn lose(&mut self, now: Time, why: &str) {
        tracing::debug!(why, "connection lost");
        self.fail_orders();
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
    /// When the next ping, or the end of a silent connection, is due. A ping is due one heartbeat after the last
    /// message sent, however much the other side sends, because that side closes a client that sends nothing for three
    /// heartbeats. A ping is also due one heartbeat after the last message received, to check that the other side is
    /// reachable. After a ping, three heartbeats of silence end the connection.
    fn next_beat(&self) -> Time {
        let silent = match self.pinged {
            true => self.received + self.heartbeat * 3,
            false => self.received + self.heartbeat,
        };
        silent.min(self.sent + self.heartbeat)
    }
}
