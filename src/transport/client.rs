//! Runs a [`ClientSession`] on a connection.
//!
//! A caller of a [`Client`] sees an answer or a typed failure, exactly one, in time, whatever happens to the other side.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use crate::protocol::{Envelope, ErrorCode, Hello, Message};
use crate::session::{
    CONNECT_TIMEOUT, ClientEvent, ClientRequest, ClientSession, ClientTimes, Failure,
};
use crate::transport::{Address, Clock, Connection, Frame, Limits, Transport, TransportError};
use crate::types::{Epoch, LinkId, RequestId};

/// Requests that wait in a client before they are taken up; a caller waits for a place beyond that. At worst 8 GiB, with
/// the longest body of the wire each (8 MiB); with the hashes of 4,096 pages each, 128 MiB.
pub const CLIENT_QUEUE: usize = 1024;
/// Ids of requests that a client numbers itself begin here; callers number theirs below.
const OWN_IDS: u64 = 1 << 63;

/// What a client hears without having asked.
#[derive(Debug)]
pub enum Incoming {
    /// The other side said welcome over a new connection; its epoch may be a new one.
    Welcomed {
        /// The other side's epoch.
        epoch: Epoch,
        /// Names the connection.
        link: LinkId,
        /// What both sides can do beyond the version, as in [`crate::protocol::Welcome::features`].
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
    Ask(ClientRequest<ReplyTo>),
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
    /// Gives the other side's answer to the caller, or returns it for the stream.
    fn answer(self, id: RequestId, answer: Result<Message, Failure>) -> Option<Incoming> {
        match self {
            Self::Stream => {
                let answer = Box::new(answer);
                return Some(Incoming::Answered { id, answer });
            }
            Self::Caller(caller) => {
                if caller.send(answer).is_err() {
                    tracing::trace!(%id, "nobody waits for this answer any more");
                }
            }
        }
        None
    }

    /// Tells the caller that no answer came. The stream carries only what the other side sent itself.
    fn fail(self, failure: Failure) {
        if let Self::Caller(caller) = self
            && caller.send(Err(failure)).is_err()
        {
            tracing::trace!("nobody waits for this answer any more");
        }
    }
}

/// Speaks to one server. Cheap to clone; the conversation ends when the last clone is dropped.
#[derive(Debug, Clone)]
pub struct Client {
    commands: mpsc::Sender<Command>,
    next_own_id: Arc<AtomicU64>,
    clock: Clock,
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
        let ClientSettings {
            address,
            hello,
            limits,
        } = settings;
        let clock = Clock::start();
        let runner = Runner {
            session: ClientSession::new(hello, ClientTimes::default(), clock.now()),
            transport,
            address,
            limits,
            clock,
            incoming,
            commands: command_queue,
            connecting: None,
            connection: None,
        };
        tokio::spawn(runner.run());
        (
            Self {
                commands,
                next_own_id: Arc::new(AtomicU64::new(OWN_IDS)),
                clock,
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
        // This client has ended: nothing that it requests can succeed any more.
        let gone = || Failure {
            retry: false,
            ..Failure::new(ErrorCode::Draining, "the connection was closed")
        };
        let (reply, answer) = oneshot::channel();
        let command = Command::Ask(ClientRequest {
            id,
            message,
            deadline: self.clock.now() + timeout,
            grace: patience,
            link,
            to: ReplyTo::Caller(reply),
        });
        self.commands.send(command).await.map_err(|_| gone())?;
        answer.await.map_err(|_| gone())?
    }

    /// Asks over this connection or not at all, without waiting. The answer comes as [`Incoming::Answered`], in its place
    /// among the other things that this connection brings: what the other side said after it is not handled before it.
    /// Without an answer by the deadline, or when the connection breaks, nothing comes; ask again.
    pub fn ask_in_order(&self, link: LinkId, message: Message, timeout: Duration) -> RequestId {
        let id = RequestId(self.next_own_id.fetch_add(1, Ordering::Relaxed));
        self.post(Command::Ask(ClientRequest {
            id,
            message,
            deadline: self.clock.now() + timeout,
            grace: Duration::ZERO,
            link: Some(link),
            to: ReplyTo::Stream,
        }));
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

/// Connects a session, and carries its messages.
struct Runner {
    session: ClientSession<ReplyTo>,
    transport: Arc<dyn Transport>,
    address: Address,
    limits: Limits,
    clock: Clock,
    incoming: mpsc::Sender<Incoming>,
    commands: mpsc::Receiver<Command>,
    connecting: Option<Connecting>,
    connection: Option<Connection>,
}

type Connecting = Pin<Box<dyn Future<Output = Result<Connection, TransportError>> + Send>>;

/// Nobody uses the client any more.
struct Dropped;

impl Runner {
    async fn run(mut self) {
        loop {
            while let Some(event) = self.session.poll() {
                if self.act(event).await.is_err() {
                    return;
                }
            }
            let due = self.clock.instant(self.session.next_timeout());
            tokio::select! {
                connected = opened(&mut self.connecting) => {
                    self.connecting = None;
                    let now = self.clock.now();
                    match connected {
                        Ok(connection) => {
                            self.connection = Some(connection);
                            self.session.connected(now);
                        }
                        Err(error) => self.session.not_connected(now, &error.to_string()),
                    }
                }
                frame = received(&mut self.connection) => {
                    let now = self.clock.now();
                    match frame {
                        Some(frame) => self.session.received(now, &frame.header, &frame.body),
                        None => self.session.disconnected(now, "closed"),
                    }
                }
                command = self.commands.recv(), if !self.session.is_full() => match command {
                    Some(Command::Ask(request)) => self.session.request(self.clock.now(), request),
                    Some(Command::Reply { link, correlation, message }) => {
                        self.session.reply(self.clock.now(), link, correlation, message);
                    }
                    None => return,
                },
                () = sleep_until(due) => self.session.tick(self.clock.now()),
            }
        }
    }

    async fn act(&mut self, event: ClientEvent<ReplyTo>) -> Result<(), Dropped> {
        let incoming = match event {
            ClientEvent::Connect => {
                let (transport, address) = (Arc::clone(&self.transport), self.address.clone());
                let limits = self.limits.clone();
                self.connecting = Some(Box::pin(async move {
                    transport.connect(&address, limits, CONNECT_TIMEOUT).await
                }));
                return Ok(());
            }
            ClientEvent::Disconnect => {
                self.connection = None;
                return Ok(());
            }
            ClientEvent::Send((header, body)) => {
                // What was to be sent over a connection that broke meanwhile is not sent.
                let Some(connection) = &mut self.connection else {
                    return Ok(());
                };
                let sent = connection.send(Frame::new(header.to_vec(), body)).await;
                if let Err(error) = sent {
                    self.connection = None;
                    let now = self.clock.now();
                    self.session.disconnected(now, &error.to_string());
                }
                return Ok(());
            }
            ClientEvent::Failed { to, failure } => {
                to.fail(failure);
                return Ok(());
            }
            ClientEvent::Answered { id, to, answer } => match to.answer(id, answer) {
                Some(answered) => answered,
                None => return Ok(()),
            },
            ClientEvent::Welcomed {
                epoch,
                link,
                features,
            } => Incoming::Welcomed {
                epoch,
                link,
                features,
            },
            ClientEvent::Lost => Incoming::Lost,
            ClientEvent::Request { link, envelope } => Incoming::Request { link, envelope },
        };
        self.incoming.send(incoming).await.map_err(|_| Dropped)
    }
}

/// The connection that is being made, once it is there.
async fn opened(connecting: &mut Option<Connecting>) -> Result<Connection, TransportError> {
    match connecting {
        Some(connecting) => connecting.await,
        None => std::future::pending().await,
    }
}

/// The next message of a connection; `None` when it is closed.
async fn received(connection: &mut Option<Connection>) -> Option<Frame> {
    match connection {
        Some(connection) => connection.recv().await.ok(),
        None => std::future::pending().await,
    }
}

/// Sleeps until a point in time; for ever without one.
async fn sleep_until(at: Option<tokio::time::Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
