//! Runs a [`ClientSession`] on a connection.
//!
//! Each request gets exactly one answer or typed failure, in time, whatever happens to the server.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};

use crate::clock::{Timer, within};
use crate::{
    Address, Clock, Connection, Frame, Limits, SendError, SharedLogLimit, Transport, TransportError,
};
use kvferry_protocol::{Call, Envelope, ErrorCode, Hello, Message};
use kvferry_session::{
    CONNECT_TIMEOUT, ClientEvent, ClientRequest, ClientSession, ClientTimes, Failure, answer_of,
};
use kvferry_types::{Epoch, LinkId, RequestId, Time};

/// Requests queued in a client; beyond that, callers wait for room. At worst 8 GiB, if each request has the longest
/// body of the wire (8 MiB); 128 MiB with the hashes of 4,096 pages each.
pub const CLIENT_QUEUE: usize = 1024;
/// Time after the deadline of a request, and its grace, in which the session itself reports the failure of a request
/// that it has sent. Requests that are still queued then fail without it.
const EXPIRED_AFTER: Duration = Duration::from_millis(200);
/// First id of the requests that a client numbers itself; callers number theirs below.
const CLIENT_ID_BASE: u64 = 1 << 63;

static REFUSALS: SharedLogLimit = SharedLogLimit::new();

/// An event of a client's connection.
#[derive(Debug)]
pub enum Incoming {
    /// The server sent a welcome over a new connection. Its epoch may have changed.
    Welcomed {
        /// The server's epoch.
        epoch: Epoch,
        /// Identifies the connection.
        link: LinkId,
        /// Features that both sides support beyond the version, as in [`kvferry_protocol::Welcome::features`].
        features: u64,
    },
    /// The connection broke. The client reconnects on its own.
    Lost,
    /// The server sent a request; answer it with [`Client::reply`].
    Request {
        /// The connection of the request. The answer is sent over this connection only.
        link: LinkId,
        /// The request.
        envelope: Box<Envelope>,
    },
    /// The server answered a request of [`Client::request_in_order`].
    Answered {
        /// Id of the answered request.
        id: RequestId,
        /// The answer, or an error from the server.
        answer: Box<Result<Message, Failure>>,
    },
}

/// The server to connect to, and the identity of the client.
#[derive(Debug, Clone)]
pub struct ClientSettings {
    /// Address of the server.
    pub address: Address,
    /// First message of each connection, sent again after every reconnect.
    pub hello: Hello,
    /// Limits of the connection. A request beyond [`Limits::body_bytes`] fails with `limit`.
    pub limits: Limits,
}

enum ClientCommand {
    Request(ClientRequest<ReplyReceiver>),
    Reply {
        link: LinkId,
        correlation: RequestId,
        message: Message,
    },
    Close,
}

/// Destination of the answer to a request.
enum ReplyReceiver {
    /// A caller that waits for the answer.
    Caller(oneshot::Sender<Result<Message, Failure>>),
    /// The stream of server messages, in order with the messages before and after the answer. A request that is not
    /// answered produces no event there.
    Stream,
}

impl ReplyReceiver {
    /// Delivers the server's answer to the caller, or returns it for the stream.
    fn answer(self, id: RequestId, answer: Result<Message, Failure>) -> Option<Incoming> {
        match self {
            Self::Stream => {
                let answer = Box::new(answer);
                return Some(Incoming::Answered { id, answer });
            }
            Self::Caller(caller) => {
                if caller.send(answer).is_err() {
                    tracing::trace!(%id, "no receiver for this answer any longer");
                }
            }
        }
        None
    }

    /// Fails the caller's request. The stream gets nothing, because it carries only messages that the server sent.
    fn fail(self, failure: Failure) {
        if let Self::Caller(caller) = self
            && caller.send(Err(failure)).is_err()
        {
            tracing::trace!("no receiver for this answer any longer");
        }
    }
}

/// A connection to one server that survives reconnects. Cheap to clone; closes when the last clone is dropped.
#[derive(Debug, Clone)]
pub struct Client {
    commands: mpsc::Sender<ClientCommand>,
    next_client_id: Arc<AtomicU64>,
    clock: Clock,
    refused: watch::Receiver<BTreeMap<ErrorCode, u64>>,
}

impl Client {
    /// Connects in the background. Events and requests of the server come out of the receiver, which must be read: the
    /// client stalls while it is full.
    pub fn start(
        transport: Arc<dyn Transport>,
        settings: ClientSettings,
    ) -> (Self, mpsc::Receiver<Incoming>) {
        let (commands, command_queue) = mpsc::channel(CLIENT_QUEUE);
        let (incoming, incoming_queue) = mpsc::channel(CLIENT_QUEUE);
        let (note_refused, refused) = watch::channel(BTreeMap::new());
        let ClientSettings {
            address,
            hello,
            limits,
        } = settings;
        let clock = Clock::start();
        let runner = ClientTask {
            session: ClientSession::new(hello, ClientTimes::default(), clock.now())
                .with_body_limit(limits.body_bytes),
            transport,
            address,
            limits,
            clock,
            incoming,
            commands: command_queue,
            connecting: None,
            connection: None,
            refused: note_refused,
            timer: Timer::new(),
        };
        tokio::spawn(runner.run());
        (
            Self {
                commands,
                next_client_id: Arc::new(AtomicU64::new(CLIENT_ID_BASE)),
                clock,
                refused,
            },
            incoming_queue,
        )
    }

    /// Connects like [`Self::start`], for a client to which its server sends no requests.
    pub fn without_incoming(transport: Arc<dyn Transport>, settings: ClientSettings) -> Self {
        let (client, mut incoming) = Self::start(transport, settings);
        tokio::spawn(async move { while incoming.recv().await.is_some() {} });
        client
    }

    /// Errors that were answered to requests of the server, by code, since the start.
    pub fn refused(&self) -> BTreeMap<ErrorCode, u64> {
        self.refused.borrow().clone()
    }

    /// Sends a request under an id that the client chooses, and waits for the answer.
    pub async fn request(&self, message: Message, timeout: Duration) -> Result<Message, Failure> {
        let id = RequestId(self.next_client_id.fetch_add(1, Ordering::Relaxed));
        self.request_as(id, message, timeout).await
    }

    /// As [`Self::request`], and returns the answer as its own type.
    pub async fn call<C: Call>(&self, call: C, timeout: Duration) -> Result<C::Answer, Failure> {
        answer_of::<C>(self.request(call.into(), timeout).await?)
    }

    /// As [`Self::call`], over this connection only: see [`Self::request_on`].
    pub async fn call_on<C: Call>(
        &self,
        link: LinkId,
        call: C,
        timeout: Duration,
    ) -> Result<C::Answer, Failure> {
        answer_of::<C>(self.request_on(link, call.into(), timeout).await?)
    }

    /// As [`Self::call`], under an id chosen by the caller, and with `grace` beyond the deadline: see
    /// [`Self::request_with_grace`].
    pub async fn call_as<C: Call>(
        &self,
        id: RequestId,
        call: C,
        timeout: Duration,
        grace: Duration,
    ) -> Result<C::Answer, Failure> {
        let message = call.into();
        answer_of::<C>(self.request_with_grace(id, message, timeout, grace).await?)
    }

    /// Sends a request under an id chosen by the caller, below 2^63. A repeated id is a retry.
    pub async fn request_as(
        &self,
        id: RequestId,
        message: Message,
        timeout: Duration,
    ) -> Result<Message, Failure> {
        self.request_with_grace(id, message, timeout, Duration::ZERO)
            .await
    }

    /// Sends a request over this connection only, because it may no longer hold after a reconnect. If the connection
    /// breaks, the request fails at its deadline or at the next connection.
    pub async fn request_on(
        &self,
        link: LinkId,
        message: Message,
        timeout: Duration,
    ) -> Result<Message, Failure> {
        let id = RequestId(self.next_client_id.fetch_add(1, Ordering::Relaxed));
        self.command(id, message, timeout, Duration::ZERO, Some(link))
            .await
    }

    /// As [`Self::request_as`], but waits up to `grace` beyond the deadline that is sent to the server: a load that
    /// misses its deadline is answered only when nothing writes its pages any longer.
    pub async fn request_with_grace(
        &self,
        id: RequestId,
        message: Message,
        timeout: Duration,
        grace: Duration,
    ) -> Result<Message, Failure> {
        self.command(id, message, timeout, grace, None).await
    }

    /// As [`Self::request_with_grace`], but the request is queued before this returns: requests that are made later are
    /// sent later. Does not wait.
    ///
    /// # Errors
    /// `busy`, with [`Failure::unsent`], when [`CLIENT_QUEUE`] requests are queued already.
    pub fn begin_request(
        &self,
        id: RequestId,
        message: Message,
        timeout: Duration,
        grace: Duration,
    ) -> Result<PendingAnswer, Failure> {
        let (command, answer) = self.prepare(id, message, timeout, grace, None);
        match self.commands.try_send(command) {
            Ok(()) => Ok(answer),
            Err(mpsc::error::TrySendError::Full(_)) => Err(Failure::unsent(
                ErrorCode::Busy,
                "too many requests wait to be sent",
            )),
            Err(mpsc::error::TrySendError::Closed(_)) => Err(closed()),
        }
    }

    async fn command(
        &self,
        id: RequestId,
        message: Message,
        timeout: Duration,
        grace: Duration,
        link: Option<LinkId>,
    ) -> Result<Message, Failure> {
        let (command, answer) = self.prepare(id, message, timeout, grace, link);
        let limit = timeout.saturating_add(grace);
        match within(limit, self.commands.send(command)).await {
            Some(Ok(())) => answer.await,
            Some(Err(_)) => Err(closed()),
            None => Err(Failure::unsent(
                ErrorCode::Deadline,
                "the request was not sent: too many others wait to be sent",
            )),
        }
    }

    fn prepare(
        &self,
        id: RequestId,
        message: Message,
        timeout: Duration,
        grace: Duration,
        link: Option<LinkId>,
    ) -> (ClientCommand, PendingAnswer) {
        let (reply, answer) = oneshot::channel();
        let deadline = self.clock.now() + timeout;
        let command = ClientCommand::Request(ClientRequest {
            id,
            message,
            deadline,
            grace,
            link,
            to: ReplyReceiver::Caller(reply),
        });
        let answer = PendingAnswer {
            answer,
            clock: self.clock,
            until: deadline + grace + EXPIRED_AFTER,
            expired: None,
        };
        (command, answer)
    }

    /// Sends a request over this connection only, without waiting. The answer arrives as [`Incoming::Answered`], in
    /// order with the other messages of this connection: messages that the server sent after it are not handled before
    /// it. Without an answer by the deadline, or if the connection breaks, no event arrives; the caller must retry.
    pub fn request_in_order(&self, link: LinkId, message: Message, timeout: Duration) -> RequestId {
        let id = RequestId(self.next_client_id.fetch_add(1, Ordering::Relaxed));
        self.post(ClientCommand::Request(ClientRequest {
            id,
            message,
            deadline: self.clock.now() + timeout,
            grace: Duration::ZERO,
            link: Some(link),
            to: ReplyReceiver::Stream,
        }));
        id
    }

    /// Answers a request that came over this connection, without waiting. The answer is dropped if that connection is
    /// gone: over the next one, under the epoch of another leader, it would answer a different request. Answers beyond
    /// the capacity of the queue wait in a task each; there are no more of those than the server has open requests.
    pub fn reply(&self, link: LinkId, correlation: RequestId, message: Message) {
        self.post(ClientCommand::Reply {
            link,
            correlation,
            message,
        });
    }

    /// Closes the connection for all clones. Requests that are not answered fail, sent or not, and later ones too.
    pub fn close(&self) {
        self.post(ClientCommand::Close);
    }

    /// Waits until the client has closed. The caller's clone does not keep it open once [`Self::close`] was called.
    pub async fn closed(&self) {
        self.commands.closed().await;
    }

    fn post(&self, command: ClientCommand) {
        if let Err(mpsc::error::TrySendError::Full(command)) = self.commands.try_send(command) {
            let commands = self.commands.clone();
            tokio::spawn(async move {
                if commands.send(command).await.is_err() {
                    tracing::debug!("message not sent: the session has ended");
                }
            });
        }
    }
}

/// The failure of requests after the client's task has ended: no further request can succeed.
fn closed() -> Failure {
    Failure {
        retry: false,
        ..Failure::new(ErrorCode::Draining, "the connection was closed")
    }
}

/// The answer to a request of [`Client::begin_request`]. Completes by the deadline of the request and its grace, and
/// [`EXPIRED_AFTER`] at most.
#[derive(Debug)]
pub struct PendingAnswer {
    answer: oneshot::Receiver<Result<Message, Failure>>,
    clock: Clock,
    until: Time,
    /// The timer, which belongs to the runtime that polls this first.
    expired: Option<Pin<Box<tokio::time::Sleep>>>,
}

impl Future for PendingAnswer {
    type Output = Result<Message, Failure>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let Poll::Ready(answer) = Pin::new(&mut self.answer).poll(context) {
            return Poll::Ready(answer.unwrap_or_else(|_| Err(closed())));
        }
        let until = self.clock.instant(self.until);
        let expired = self.expired.get_or_insert_with(|| match until {
            Some(until) => Box::pin(tokio::time::sleep_until(until)),
            None => Box::pin(tokio::time::sleep(Duration::MAX)),
        });
        expired.as_mut().poll(context).map(|()| {
            let text = "no answer came in time: the client has too much to send, or its events are not read";
            Err(Failure::new(ErrorCode::Deadline, text))
        })
    }
}

/// Drives a [`ClientSession`]: connects, and moves its messages.
struct ClientTask {
    session: ClientSession<ReplyReceiver>,
    transport: Arc<dyn Transport>,
    address: Address,
    limits: Limits,
    clock: Clock,
    incoming: mpsc::Sender<Incoming>,
    commands: mpsc::Receiver<ClientCommand>,
    connecting: Option<Connecting>,
    connection: Option<Connection>,
    refused: watch::Sender<BTreeMap<ErrorCode, u64>>,
    /// Fires when the session's timers are due, or earlier.
    timer: Timer,
}

type Connecting = Pin<Box<dyn Future<Output = Result<Connection, TransportError>> + Send>>;

/// The receiver of [`Incoming`] events was dropped.
struct Dropped;

impl ClientTask {
    async fn run(mut self) {
        loop {
            // Before the errors are sent, so that a count is never behind them.
            let refused = self.session.refused();
            self.refused.send_if_modified(|counts| {
                let changed = counts != refused;
                if changed {
                    counts.clone_from(refused);
                }
                changed
            });
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
                        Err(error) => {
                            log_refusal(&self.address, &error);
                            self.session.not_connected(now, &error.to_string());
                        }
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
                    Some(ClientCommand::Request(request)) => self.session.request(self.clock.now(), request),
                    Some(ClientCommand::Reply { link, correlation, message }) => {
                        self.session.reply(self.clock.now(), link, correlation, message);
                    }
                    Some(ClientCommand::Close) | None => return,
                },
                () = self.timer.fired(due) => self.session.tick(self.clock.now()),
            }
        }
    }

    async fn act(&mut self, event: ClientEvent<ReplyReceiver>) -> Result<(), Dropped> {
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
                // Messages for a connection that has broken meanwhile are dropped.
                let Some(connection) = &mut self.connection else {
                    return Ok(());
                };
                match connection.send(Frame::new(header.to_vec(), body)).await {
                    // The frames that were received before are still to be taken; then the connection reports its end.
                    // What is sent meanwhile is sent again over the next connection, as what the server has not read.
                    Ok(()) | Err(SendError::Gone) => {}
                    // Too slow or too long: received frames are dropped with the connection.
                    Err(error) => {
                        self.connection = None;
                        let now = self.clock.now();
                        self.session.disconnected(now, &error.to_string());
                    }
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

/// Logs why there is no connection to another machine. On this machine, commands name the reason.
fn log_refusal(address: &Address, error: &TransportError) {
    let (TransportError::Refused { detail, .. } | TransportError::Untrusted { detail, .. }) = error
    else {
        return;
    };
    if let Address::Tcp(at) = address
        && let Some(left_out) = REFUSALS.line()
    {
        tracing::warn!(at, detail, left_out, "no connection: refused");
    }
}

/// Waits for the connection attempt in progress; for ever without one.
async fn opened(connecting: &mut Option<Connecting>) -> Result<Connection, TransportError> {
    match connecting {
        Some(connecting) => connecting.await,
        None => std::future::pending().await,
    }
}

/// Waits for the next frame; `None` when the connection is closed. Waits for ever without a connection.
async fn received(connection: &mut Option<Connection>) -> Option<Frame> {
    match connection {
        Some(connection) => connection.recv().await.ok(),
        None => std::future::pending().await,
    }
}
