//! The client's side of a conversation: hello, requests with deadlines, retries over reconnects, heartbeats, credits.
//!
//! A [`Client`] keeps one connection. When it breaks, it connects again, says hello again, and sends what has not been
//! answered once more under the same id, until each request's own deadline. So a caller sees an answer or a typed
//! failure, exactly one, in time, whatever happens to the other side.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use crate::protocol::{
    Class, DecodeError, Empty, Envelope, ErrorBody, ErrorCode, HELLO_VERSION, Header, Hello, Kind,
    Message, VERSION, Welcome, decode, encode,
};
use crate::transport::{Address, Connection, Frame, Limits, Transport};
use crate::types::{Epoch, RequestId};

/// Requests that wait in a client before they are taken up; a caller waits for a place beyond that. At worst 8 GiB, with
/// the longest body of the wire each (8 MiB); with the hashes of 4,096 pages each, 128 MiB.
pub const CLIENT_QUEUE: usize = 1024;
/// Requests that a client has taken up and that are not answered; it takes up no more. At worst 32 GiB, with the longest
/// body of the wire each; with the hashes of 4,096 pages each, 512 MiB.
pub const CLIENT_OPEN_MAX: usize = 4096;
/// Ids of requests that a client numbers itself begin here; callers number theirs below.
const OWN_IDS: u64 = 1 << 63;
const BACKOFF_FIRST: Duration = Duration::from_millis(20);
const BACKOFF_MAX: Duration = Duration::from_secs(1);
/// Longest wait for a connection, and then for the welcome.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a request was not carried out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}: {message}", code.name())]
pub struct Failure {
    /// Which kind of failure.
    pub code: ErrorCode,
    /// One line for people.
    pub message: String,
    /// The leader says that nothing of the request is under way, and nothing will be.
    pub over: bool,
}

impl Failure {
    fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            over: false,
        }
    }
}

impl From<ErrorBody> for Failure {
    fn from(body: ErrorBody) -> Self {
        Self {
            code: body.code(),
            message: body.message,
            over: body.over,
        }
    }
}

/// Names one connection of a client: grows with each.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct LinkId(pub u64);

/// What a client hears without having asked.
#[derive(Debug)]
pub enum Incoming {
    /// The other side said welcome over a new connection; its epoch may be a new one.
    Welcomed {
        /// The other side's epoch.
        epoch: Epoch,
        /// Names the connection.
        link: LinkId,
        /// What both sides can do beyond the version, as in [`Welcome::features`].
        features: u64,
    },
    /// The connection broke; the client connects again by itself.
    Lost,
    /// The other side asks for something; answer with [`Client::reply`].
    Request {
        /// The connection over which it asks, and the only one over which the answer is sent.
        link: LinkId,
        /// What it asks.
        envelope: Box<Envelope>,
    },
    /// The other side answered what was asked with [`Client::ask_in_order`].
    Answered {
        /// Which question.
        id: RequestId,
        /// What it said.
        answer: Box<Result<Message, Failure>>,
    },
}

/// Whom to speak to, and as whom.
#[derive(Debug, Clone)]
pub struct ClientSettings {
    /// Where the other side listens.
    pub address: Address,
    /// What is said first, again after every reconnect.
    pub hello: Hello,
    /// Limits of the transport.
    pub limits: Limits,
}

enum Command {
    Ask {
        id: RequestId,
        message: Message,
        deadline: Instant,
        patience: Duration,
        link: Option<LinkId>,
        reply: ReplyTo,
    },
    Reply {
        link: LinkId,
        correlation: RequestId,
        message: Message,
    },
}

/// Where the answer to a question goes.
enum ReplyTo {
    /// To a caller that waits for it.
    Caller(oneshot::Sender<Result<Message, Failure>>),
    /// Into the stream of what the other side says, between the messages before and after it. A question that is not
    /// answered ends without a word there.
    Stream,
}

impl ReplyTo {
    /// Tells the caller. The stream carries only what the other side said itself.
    fn send(self, id: RequestId, answer: Result<Message, Failure>) {
        if let Self::Caller(caller) = self
            && caller.send(answer).is_err()
        {
            tracing::trace!(%id, "nobody waits for this answer any more");
        }
    }
}

/// Speaks to one server. Cheap to clone; the conversation ends when the last clone is dropped.
#[derive(Debug, Clone)]
pub struct Client {
    commands: mpsc::Sender<Command>,
    next_own_id: Arc<AtomicU64>,
}

impl Client {
    /// Starts a conversation in the background. What the other side asks comes out of the receiver; it must be read,
    /// or the conversation stands still.
    pub fn start(
        transport: Arc<dyn Transport>,
        settings: ClientSettings,
    ) -> (Self, mpsc::Receiver<Incoming>) {
        let (commands, command_queue) = mpsc::channel(CLIENT_QUEUE);
        let (incoming, incoming_queue) = mpsc::channel(CLIENT_QUEUE);
        let session = Session {
            transport,
            settings,
            incoming,
            commands: command_queue,
            pending: BTreeMap::new(),
            unsent: VecDeque::new(),
            in_flight_bytes: 0,
            version: VERSION,
            epoch: Epoch(0),
            link: LinkId(0),
            said: Instant::now(),
        };
        tokio::spawn(session.run());
        (
            Self {
                commands,
                next_own_id: Arc::new(AtomicU64::new(OWN_IDS)),
            },
            incoming_queue,
        )
    }

    /// Asks, under an id that the client chooses.
    pub async fn ask(&self, message: Message, timeout: Duration) -> Result<Message, Failure> {
        let id = RequestId(self.next_own_id.fetch_add(1, Ordering::Relaxed));
        self.ask_as(id, message, timeout).await
    }

    /// Asks, under an id of the caller's, below 2^63. The same id again is a retry.
    pub async fn ask_as(
        &self,
        id: RequestId,
        message: Message,
        timeout: Duration,
    ) -> Result<Message, Failure> {
        self.ask_patiently(id, message, timeout, Duration::ZERO)
            .await
    }

    /// Asks over this connection or not at all: what is true now need not be true when the client has connected again.
    /// When the connection breaks, the caller is told that no answer came, at its deadline or at the next connection.
    pub async fn ask_over(
        &self,
        link: LinkId,
        message: Message,
        timeout: Duration,
    ) -> Result<Message, Failure> {
        let id = RequestId(self.next_own_id.fetch_add(1, Ordering::Relaxed));
        self.command(id, message, timeout, Duration::ZERO, Some(link))
            .await
    }

    /// The same, but waits for `patience` beyond the deadline that the other side is told: a load that misses its deadline
    /// is answered only when nothing writes its pages any more.
    pub async fn ask_patiently(
        &self,
        id: RequestId,
        message: Message,
        timeout: Duration,
        patience: Duration,
    ) -> Result<Message, Failure> {
        self.command(id, message, timeout, patience, None).await
    }

    async fn command(
        &self,
        id: RequestId,
        message: Message,
        timeout: Duration,
        patience: Duration,
        link: Option<LinkId>,
    ) -> Result<Message, Failure> {
        let gone = || Failure::new(ErrorCode::Draining, "the connection was closed");
        let (reply, answer) = oneshot::channel();
        let deadline = Instant::now() + timeout;
        let command = Command::Ask {
            id,
            message,
            deadline,
            patience,
            link,
            reply: ReplyTo::Caller(reply),
        };
        self.commands.send(command).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }

    /// Asks over this connection or not at all, without waiting. The answer comes as [`Incoming::Answered`], in its place
    /// among the other things that this connection brings: what the other side said after it is not handled before it.
    /// Without an answer by the deadline, or when the connection breaks, nothing comes; ask again.
    pub fn ask_in_order(&self, link: LinkId, message: Message, timeout: Duration) -> RequestId {
        let id = RequestId(self.next_own_id.fetch_add(1, Ordering::Relaxed));
        self.post(Command::Ask {
            id,
            message,
            deadline: Instant::now() + timeout,
            patience: Duration::ZERO,
            link: Some(link),
            reply: ReplyTo::Stream,
        });
        id
    }

    /// Answers a request that came over this connection, without waiting. When that connection is gone, the answer is
    /// dropped: over the next one, under the epoch of another leader, it would answer something else. An answer more than
    /// the queue holds waits in a task of its own, and there are no more of those than the other side has open requests.
    pub fn reply(&self, link: LinkId, correlation: RequestId, message: Message) {
        self.post(Command::Reply {
            link,
            correlation,
            message,
        });
    }

    fn post(&self, command: Command) {
        if let Err(mpsc::error::TrySendError::Full(command)) = self.commands.try_send(command) {
            let commands = self.commands.clone();
            tokio::spawn(async move {
                if commands.send(command).await.is_err() {
                    tracing::debug!("nothing said: the conversation has ended");
                }
            });
        }
    }
}

struct Pending {
    message: Message,
    /// What the other side is told.
    deadline: Instant,
    /// When the caller is told that no answer came.
    expires: Instant,
    bytes: u64,
    /// The only connection over which it may be said.
    link: Option<LinkId>,
    reply: ReplyTo,
}

struct Session {
    transport: Arc<dyn Transport>,
    settings: ClientSettings,
    incoming: mpsc::Sender<Incoming>,
    commands: mpsc::Receiver<Command>,
    pending: BTreeMap<RequestId, Pending>,
    unsent: VecDeque<RequestId>,
    in_flight_bytes: u64,
    version: u16,
    epoch: Epoch,
    /// The connection that there is, or was last.
    link: LinkId,
    /// When something was said last over that connection.
    said: Instant,
}

fn broken() -> Failure {
    Failure::new(
        ErrorCode::Deadline,
        "the connection broke before an answer came",
    )
}

/// Why the inner loop ended.
enum End {
    Broken(String),
    Dropped,
}

impl Session {
    async fn run(mut self) {
        let mut backoff = BACKOFF_FIRST;
        loop {
            let connecting = connect(Arc::clone(&self.transport), self.settings.clone());
            let Some(connected) = self.meanwhile(connecting).await else {
                return;
            };
            match connected {
                Ok((connection, welcome, epoch)) => {
                    self.version = welcome.version;
                    self.epoch = epoch;
                    self.link = LinkId(self.link.0 + 1);
                    backoff = BACKOFF_FIRST;
                    if self
                        .incoming
                        .send(Incoming::Welcomed {
                            epoch: self.epoch,
                            link: self.link,
                            features: welcome.features,
                        })
                        .await
                        .is_err()
                    {
                        return;
                    }
                    match self.converse(connection, &welcome).await {
                        End::Dropped => return,
                        End::Broken(why) => tracing::debug!(why, "connection lost"),
                    }
                    if self.incoming.send(Incoming::Lost).await.is_err() {
                        return;
                    }
                }
                Err(failure) if !failure.code.retry() => self.fail_all(&failure),
                Err(failure) => tracing::debug!(%failure, "cannot connect yet"),
            }
            if self.meanwhile(tokio::time::sleep(backoff)).await.is_none() {
                return;
            }
            backoff = (backoff * 2).min(BACKOFF_MAX);
        }
    }

    async fn converse(&mut self, mut connection: Connection, welcome: &Welcome) -> End {
        self.in_flight_bytes = 0;
        self.drop_bound();
        self.unsent = self.pending.keys().copied().collect();
        let beat = Duration::from_millis(u64::from(welcome.heartbeat_ms.max(10)));
        let mut heard = Instant::now();
        let mut asked_for_life = false;
        self.said = Instant::now();
        loop {
            if let Err(why) = self.send_unsent(&mut connection, welcome).await {
                return End::Broken(why);
            }
            // Pings after a heartbeat without a word of its own, however much the other side says: that closes a
            // client that has said nothing for three. Pings too when the other side is silent, to find out whether
            // it is there.
            let next_word = self.said + beat;
            let next_beat = match asked_for_life {
                true => next_word.min(heard + beat * 3),
                false => next_word.min(heard + beat),
            };
            let wake = self
                .next_deadline()
                .map_or(next_beat, |at| at.min(next_beat));
            tokio::select! {
                frame = connection.recv() => {
                    let Ok(frame) = frame else { return End::Broken("closed".to_owned()) };
                    heard = Instant::now();
                    asked_for_life = false;
                    match self.received(&frame, &mut connection).await {
                        Ok(true) => {}
                        Ok(false) => return End::Dropped,
                        Err(why) => return End::Broken(why),
                    }
                }
                command = self.commands.recv(), if self.pending.len() < CLIENT_OPEN_MAX => match command {
                    None => return End::Dropped,
                    Some(command) => if let Err(why) = self.commanded(command, Some(&mut connection)).await {
                        return End::Broken(why);
                    },
                },
                () = tokio::time::sleep_until(wake) => {
                    self.expire();
                    if Instant::now() >= next_beat {
                        if asked_for_life && heard.elapsed() >= beat * 3 {
                            return End::Broken("silent for three heartbeats".to_owned());
                        }
                        asked_for_life = true;
                        let beat_ms = welcome.heartbeat_ms.max(1);
                        let ping = self.frame(RequestId(0), Message::Ping(Empty {}), beat_ms);
                        let ping = ping.map_err(|failure| failure.to_string());
                        let said = match ping {
                            Ok(ping) => self.say(&mut connection, ping).await,
                            Err(why) => Err(why),
                        };
                        if let Err(why) = said {
                            return End::Broken(why);
                        }
                    }
                }
            }
        }
    }

    /// Waits for something while there is no connection: takes commands, and tells callers whose time is up. `None` when
    /// nobody speaks to the client any more.
    async fn meanwhile<T>(&mut self, something: impl Future<Output = T>) -> Option<T> {
        let mut something = std::pin::pin!(something);
        loop {
            self.expire();
            let wake = self.next_deadline();
            tokio::select! {
                done = &mut something => return Some(done),
                command = self.commands.recv(), if self.pending.len() < CLIENT_OPEN_MAX => {
                    if let Err(why) = self.commanded(command?, None).await {
                        tracing::debug!(why, "command dropped");
                    }
                }
                () = sleep_until(wake) => {}
            }
        }
    }

    async fn commanded(
        &mut self,
        command: Command,
        connection: Option<&mut Connection>,
    ) -> Result<(), String> {
        match command {
            Command::Ask {
                id,
                message,
                deadline,
                patience,
                link,
                reply,
            } => {
                if link.is_some_and(|link| connection.is_none() || link != self.link) {
                    reply.send(id, Err(broken()));
                    return Ok(());
                }
                self.pending.insert(
                    id,
                    Pending {
                        message,
                        deadline,
                        expires: deadline + patience,
                        bytes: 0,
                        link,
                        reply,
                    },
                );
                self.unsent.push_back(id);
                Ok(())
            }
            Command::Reply {
                link,
                correlation,
                message,
            } => {
                let Some(connection) = connection.filter(|_| link == self.link) else {
                    tracing::debug!(%correlation, "answer dropped: the connection it belongs to is gone");
                    return Ok(());
                };
                match self.frame(correlation, message, 0) {
                    Ok(frame) => self.say(connection, frame).await,
                    Err(failure) => {
                        tracing::error!(%failure, "answer cannot be said");
                        Ok(())
                    }
                }
            }
        }
    }

    /// Sends what waits, as far as the credits of the other side reach.
    async fn send_unsent(
        &mut self,
        connection: &mut Connection,
        welcome: &Welcome,
    ) -> Result<(), String> {
        while let Some(id) = self.unsent.front().copied() {
            let sent = self.pending.len() - self.unsent.len();
            if sent >= welcome.request_credits as usize && sent > 0 {
                return Ok(());
            }
            let Some(pending) = self.pending.get(&id) else {
                self.unsent.pop_front();
                continue;
            };
            let left = pending.deadline.saturating_duration_since(Instant::now());
            let left_ms = u32::try_from(left.as_millis()).unwrap_or(u32::MAX).max(1);
            let frame = match self.frame(id, pending.message.clone(), left_ms) {
                Ok(frame) => frame,
                Err(failure) => {
                    self.unsent.pop_front();
                    self.settle(id, Err(failure));
                    continue;
                }
            };
            let bytes = frame.body.len() as u64;
            if sent > 0 && self.in_flight_bytes + bytes > welcome.byte_credits {
                return Ok(());
            }
            self.unsent.pop_front();
            self.in_flight_bytes += bytes;
            if let Some(pending) = self.pending.get_mut(&id) {
                pending.bytes = bytes;
            }
            self.say(connection, frame).await?;
        }
        Ok(())
    }

    /// Sends a frame over the connection that there is.
    async fn say(&mut self, connection: &mut Connection, frame: Frame) -> Result<(), String> {
        let sent = connection.send(frame).await;
        self.said = Instant::now();
        sent.map_err(|error| error.to_string())
    }

    /// False when nobody listens any more.
    async fn received(
        &mut self,
        frame: &Frame,
        connection: &mut Connection,
    ) -> Result<bool, String> {
        let header = Header::from_bytes(&frame.header).map_err(|error| error.to_string())?;
        let kind = Kind::from_number(header.kind);
        match Class::of(header.kind) {
            Class::Request => self.asked(kind, header, frame, connection).await,
            // What nobody waits for, or is not known here, is dropped.
            Class::Answer if kind.is_none_or(|kind| kind == Kind::Pong) => Ok(true),
            Class::Answer if !self.pending.contains_key(&header.correlation) => Ok(true),
            Class::Answer => {
                let envelope = decode(header, &frame.body).map_err(|error| error.to_string())?;
                let answer = match envelope.message {
                    Message::Error(error) => Err(error.into()),
                    message => Ok(message),
                };
                let id = envelope.correlation;
                match self.close(id) {
                    Some(ReplyTo::Stream) => {
                        let answer = Box::new(answer);
                        let answered = Incoming::Answered { id, answer };
                        return Ok(self.incoming.send(answered).await.is_ok());
                    }
                    Some(caller) => caller.send(id, answer),
                    None => {}
                }
                Ok(true)
            }
        }
    }

    /// The other side asks for something. What cannot be read is refused, and the conversation goes on.
    async fn asked(
        &mut self,
        kind: Option<Kind>,
        header: Header,
        frame: &Frame,
        connection: &mut Connection,
    ) -> Result<bool, String> {
        let answer = match kind.filter(|kind| kind.asked_of_clients()) {
            Some(Kind::Ping) => Message::Pong(Empty {}),
            Some(_) => match decode(header, &frame.body) {
                Ok(envelope) => {
                    let request = Incoming::Request {
                        link: self.link,
                        envelope: Box::new(envelope),
                    };
                    return Ok(self.incoming.send(request).await.is_ok());
                }
                Err(error) => refusal(&error),
            },
            None => refusal(&DecodeError::UnknownKind(header.kind)),
        };
        let answer = self.frame(header.correlation, answer, 0);
        let answer = answer.map_err(|failure| failure.to_string())?;
        self.say(connection, answer).await?;
        Ok(true)
    }

    fn settle(&mut self, id: RequestId, answer: Result<Message, Failure>) {
        if let Some(reply) = self.close(id) {
            reply.send(id, answer);
        }
    }

    /// Ends a question; returns where its answer goes.
    fn close(&mut self, id: RequestId) -> Option<ReplyTo> {
        let pending = self.pending.remove(&id)?;
        self.in_flight_bytes = self.in_flight_bytes.saturating_sub(pending.bytes);
        Some(pending.reply)
    }

    /// What may be said over an older connection only is not said any more.
    fn drop_bound(&mut self) {
        let bound = self
            .pending
            .iter()
            .filter(|(_, pending)| pending.link.is_some_and(|link| link != self.link));
        for id in bound.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.settle(id, Err(broken()));
        }
    }

    fn expire(&mut self) {
        let now = Instant::now();
        let late = self
            .pending
            .iter()
            .filter(|(_, pending)| pending.expires <= now);
        for id in late.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.unsent.retain(|unsent| *unsent != id);
            let failure = Failure::new(ErrorCode::Deadline, "no answer by the deadline");
            self.settle(id, Err(failure));
        }
    }

    fn fail_all(&mut self, failure: &Failure) {
        self.unsent.clear();
        for id in self.pending.keys().copied().collect::<Vec<_>>() {
            self.settle(id, Err(failure.clone()));
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.pending.values().map(|pending| pending.expires).min()
    }

    fn frame(&self, id: RequestId, message: Message, deadline_ms: u32) -> Result<Frame, Failure> {
        let envelope = Envelope {
            version: self.version,
            correlation: id,
            deadline_ms,
            epoch: self.epoch,
            message,
        };
        to_frame(&envelope).map_err(|error| Failure::new(ErrorCode::Limit, error.to_string()))
    }
}

/// Connects and says hello, in the version of first words, which every server reads.
async fn connect(
    transport: Arc<dyn Transport>,
    settings: ClientSettings,
) -> Result<(Connection, Welcome, Epoch), Failure> {
    let busy = |error: String| Failure::new(ErrorCode::Busy, error);
    let ClientSettings {
        address,
        hello,
        limits,
    } = settings;
    let connecting = transport.connect(&address, limits, CONNECT_TIMEOUT);
    let mut connection = connecting.await.map_err(|error| busy(error.to_string()))?;
    let versions = hello.version_min..=hello.version_max;
    let envelope = Envelope {
        version: HELLO_VERSION,
        correlation: RequestId(0),
        deadline_ms: u32::try_from(CONNECT_TIMEOUT.as_millis()).unwrap_or(u32::MAX),
        epoch: Epoch(0),
        message: Message::Hello(hello),
    };
    let hello =
        to_frame(&envelope).map_err(|error| Failure::new(ErrorCode::Limit, error.to_string()))?;
    connection
        .send(hello)
        .await
        .map_err(|error| busy(error.to_string()))?;
    let answer = tokio::time::timeout(CONNECT_TIMEOUT, connection.recv()).await;
    let answer = answer.map_err(|_| busy("no welcome in time".to_owned()))?;
    let answer = read(&answer.map_err(|error| busy(error.to_string()))?);
    match answer.map_err(|error| busy(error.to_string()))? {
        Envelope {
            message: Message::Welcome(welcome),
            epoch,
            ..
        } if versions.contains(&welcome.version) => Ok((connection, welcome, epoch)),
        Envelope {
            message: Message::Welcome(welcome),
            ..
        } => Err(Failure::new(
            ErrorCode::UnsupportedVersion,
            format!(
                "the welcome says version {}, this side speaks {} to {}: update the older side",
                welcome.version,
                versions.start(),
                versions.end()
            ),
        )),
        Envelope {
            message: Message::Error(error),
            ..
        } => Err(error.into()),
        other => Err(busy(format!(
            "{} instead of a welcome",
            other.message.kind().name()
        ))),
    }
}

/// Sleeps until a point in time; for ever without one.
async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// The frame of a message.
pub(super) fn to_frame(envelope: &Envelope) -> Result<Frame, crate::protocol::EncodeError> {
    let (header, body) = encode(envelope)?;
    Ok(Frame::new(Bytes::copy_from_slice(&header), body))
}

fn refusal(error: &DecodeError) -> Message {
    Message::Error(ErrorBody::for_good(error.code(), error.to_string()))
}

/// The message of a frame.
fn read(frame: &Frame) -> Result<Envelope, DecodeError> {
    decode(Header::from_bytes(&frame.header)?, &frame.body)
}
