//! The server's side of conversations: hello and versions, credits, heartbeats, and a typed error for every message that
//! cannot be carried out.
//!
//! A [`Server`] hands over whole batches of [`ServerEvent`]s; a [`Replier`] answers. A peer that has used up its credits
//! gets `busy` at once, so what waits behind a server is bounded by credits, not by luck.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::protocol::{
    DecodeError, Empty, Envelope, ErrorBody, ErrorCode, Header, Hello, Kind, Message, Role,
    VERSION, VERSION_MIN, Welcome, decode, limits,
};
use crate::transport::process::ProcessWatch;
use crate::transport::session::to_frame;
use crate::transport::{Frame, FrameSender, Listener, ListenerEvent, PeerId};
use crate::types::{Epoch, RequestId};

/// Most events handed over at once.
pub const SERVER_BATCH_MAX: usize = 256;
/// Messages that are no messages, after which a peer is closed.
const MALFORMED_MAX: u32 = 16;

/// What a server is like.
#[derive(Debug, Clone)]
pub struct ServerSettings {
    /// Said in every header.
    pub epoch: Epoch,
    /// Silence after which a peer says ping; three times that, and it is closed. Default: 1 s.
    pub heartbeat: Duration,
    /// Who may say hello.
    pub roles: Vec<Role>,
    /// What this side can do beyond its version, as in [`Hello::features`].
    pub features: u64,
}

/// Something that a peer did.
#[derive(Debug)]
pub enum ServerEvent {
    /// It said hello, and was welcomed.
    Opened {
        /// Which connection.
        peer: PeerId,
        /// What it said.
        hello: Hello,
        /// Its process, where the system tells.
        pid: Option<i32>,
    },
    /// It asks or answers.
    Message {
        /// Which connection.
        peer: PeerId,
        /// What it said.
        envelope: Envelope,
    },
    /// It is gone. Comes exactly once after `Opened`.
    Closed {
        /// Which connection.
        peer: PeerId,
    },
}

#[derive(Debug)]
struct Peer {
    pid: Option<i32>,
    /// Watches it, where it has memory that is used here.
    _process: Option<ProcessWatch>,
    welcomed: bool,
    version: u16,
    heard: Instant,
    malformed: u32,
    open: HashMap<RequestId, u64>,
    open_bytes: u64,
}

type Peers = Arc<Mutex<HashMap<PeerId, Peer>>>;

/// Answers peers, from anywhere. Cheap to clone.
#[derive(Clone)]
pub struct Replier {
    sender: FrameSender,
    peers: Peers,
    epoch: Epoch,
}

impl Replier {
    /// Answers a request. A peer that is gone, or does not read, is not waited for.
    pub fn reply(&self, peer: PeerId, correlation: RequestId, message: Message) {
        self.settle(peer, correlation);
        self.say(peer, correlation, message, 0);
    }

    /// Answers a request with an error.
    pub fn refuse(&self, peer: PeerId, correlation: RequestId, error: ErrorBody) {
        self.reply(peer, correlation, Message::Error(error));
    }

    /// Asks a peer for something; false when it is not there.
    pub fn order(
        &self,
        peer: PeerId,
        correlation: RequestId,
        message: Message,
        deadline: Duration,
    ) -> bool {
        let deadline_ms = u32::try_from(deadline.as_millis())
            .unwrap_or(u32::MAX)
            .max(1);
        self.say(peer, correlation, message, deadline_ms)
    }

    /// Closes a connection.
    pub fn disconnect(&self, peer: PeerId) {
        self.sender.disconnect(peer);
    }

    fn settle(&self, peer: PeerId, correlation: RequestId) {
        if let Some(peer) = lock(&self.peers).get_mut(&peer) {
            let bytes = peer.open.remove(&correlation).unwrap_or(0);
            peer.open_bytes -= bytes;
        }
    }

    fn say(
        &self,
        peer: PeerId,
        correlation: RequestId,
        message: Message,
        deadline_ms: u32,
    ) -> bool {
        let version = lock(&self.peers)
            .get(&peer)
            .map_or(VERSION, |peer| peer.version);
        let epoch = self.epoch;
        let envelope = Envelope {
            version,
            correlation,
            deadline_ms,
            epoch,
            message,
        };
        let frame = match to_frame(&envelope) {
            Ok(frame) => frame,
            Err(error) => {
                tracing::error!(%error, "message cannot be said");
                if deadline_ms > 0 {
                    return false;
                }
                let message =
                    Message::Error(ErrorBody::new(ErrorCode::Internal, error.to_string()));
                let Ok(frame) = to_frame(&Envelope {
                    message,
                    ..envelope
                }) else {
                    return false;
                };
                frame
            }
        };
        match self.sender.try_send(peer, frame) {
            Ok(()) => true,
            Err(error) => {
                tracing::debug!(%error, ?peer, "peer closed: it does not take its messages");
                self.sender.disconnect(peer);
                false
            }
        }
    }
}

/// Listens, welcomes, and keeps order.
pub struct Server {
    listener: Listener,
    settings: ServerSettings,
    replier: Replier,
    swept: Instant,
}

impl Server {
    /// Serves what a listener hears.
    pub fn new(listener: Listener, settings: ServerSettings) -> Self {
        let peers = Peers::default();
        let replier = Replier {
            sender: listener.sender(),
            peers,
            epoch: settings.epoch,
        };
        Self {
            listener,
            settings,
            replier,
            swept: Instant::now(),
        }
    }

    /// Answers peers.
    pub fn replier(&self) -> Replier {
        self.replier.clone()
    }

    /// Stops listening: closes every connection and removes the socket.
    pub async fn close(self) {
        self.listener.close().await;
    }

    /// The next events, at most [`SERVER_BATCH_MAX`]; `None` when the listener has ended. Dropping the future loses
    /// nothing.
    pub async fn next(&mut self) -> Option<Vec<ServerEvent>> {
        loop {
            let mut events = Vec::new();
            match tokio::time::timeout(self.settings.heartbeat, self.listener.next()).await {
                Ok(Some(event)) => self.take(event, &mut events),
                Ok(None) => return None,
                Err(_) => {}
            }
            self.close_silent();
            while events.len() < SERVER_BATCH_MAX {
                let more = tokio::select! {
                    biased;
                    event = self.listener.next() => event,
                    () = std::future::ready(()) => None,
                };
                let Some(event) = more else { break };
                self.take(event, &mut events);
            }
            if !events.is_empty() {
                return Some(events);
            }
        }
    }

    fn take(&mut self, event: ListenerEvent, events: &mut Vec<ServerEvent>) {
        match event {
            ListenerEvent::Opened { peer, pid, .. } => {
                let heard = Instant::now();
                let state = Peer {
                    pid,
                    _process: None,
                    welcomed: false,
                    version: VERSION,
                    heard,
                    malformed: 0,
                    open: HashMap::new(),
                    open_bytes: 0,
                };
                lock(&self.replier.peers).insert(peer, state);
            }
            ListenerEvent::Closed { peer, .. } => {
                let state = lock(&self.replier.peers).remove(&peer);
                if state.is_some_and(|state| state.welcomed) {
                    events.push(ServerEvent::Closed { peer });
                }
            }
            ListenerEvent::Frame { peer, frame } => self.read(peer, &frame, events),
        }
    }

    fn read(&mut self, peer: PeerId, frame: &Frame, events: &mut Vec<ServerEvent>) {
        let read = Header::from_bytes(&frame.header).and_then(|header| {
            let complain = |error: &DecodeError| self.complain(peer, header.correlation, error);
            decode(header, &frame.body).inspect_err(complain)
        });
        let envelope = match read {
            Ok(envelope) => envelope,
            Err(error) => return self.malformed(peer, &error),
        };
        match self.admit(peer, &envelope, frame.body.len() as u64) {
            Ok(true) => match envelope.message {
                Message::Hello(hello) => self.welcome(peer, envelope.correlation, hello, events),
                Message::Ping(_) => {
                    self.replier
                        .reply(peer, envelope.correlation, Message::Pong(Empty {}));
                }
                Message::Pong(_) => {}
                _ => events.push(ServerEvent::Message { peer, envelope }),
            },
            Ok(false) => {}
            Err(error) => {
                self.replier
                    .say(peer, envelope.correlation, Message::Error(error), 0);
            }
        }
    }

    /// Counts a message against the credits of its peer. `Ok(false)`: the peer is gone, or repeats a request that is
    /// still open and will be answered.
    fn admit(&self, id: PeerId, envelope: &Envelope, bytes: u64) -> Result<bool, ErrorBody> {
        let mut peers = lock(&self.replier.peers);
        let Some(peer) = peers.get_mut(&id) else {
            return Ok(false);
        };
        peer.heard = Instant::now();
        let kind = envelope.message.kind();
        match kind {
            Kind::Hello | Kind::Ping | Kind::Pong => return Ok(true),
            _ if !peer.welcomed => {
                let text = format!("{} before hello: say hello first", kind.name());
                return Err(ErrorBody::new(ErrorCode::HelloFirst, text));
            }
            Kind::Ended | Kind::Struck | Kind::Inventory | Kind::Error => return Ok(true),
            _ => {}
        }
        if peer.open.contains_key(&envelope.correlation) {
            return Ok(false);
        }
        if peer.open.len() >= limits::REQUEST_CREDITS as usize
            || (peer.open_bytes + bytes > limits::BYTE_CREDITS && !peer.open.is_empty())
        {
            let text = format!(
                "{} requests with {} bytes wait for answers: at most {} and {} may",
                peer.open.len(),
                peer.open_bytes,
                limits::REQUEST_CREDITS,
                limits::BYTE_CREDITS
            );
            return Err(ErrorBody::new(ErrorCode::Busy, text));
        }
        peer.open.insert(envelope.correlation, bytes);
        peer.open_bytes += bytes;
        Ok(true)
    }

    fn welcome(
        &mut self,
        id: PeerId,
        correlation: RequestId,
        hello: Hello,
        events: &mut Vec<ServerEvent>,
    ) {
        let version = hello.version_max.min(VERSION);
        let refusal = if version < hello.version_min.max(VERSION_MIN) {
            let (min, max) = (hello.version_min, hello.version_max);
            let text = format!(
                "you speak versions {min} to {max}, this side {VERSION_MIN} to {VERSION}: update the \
                 older side"
            );
            Some(ErrorBody::new(ErrorCode::UnsupportedVersion, text))
        } else if !self.settings.roles.contains(&hello.role) {
            let text = format!("a {:?} has no business here: check the address", hello.role);
            Some(ErrorBody::new(ErrorCode::Invalid, text))
        } else {
            None
        };
        if let Some(refusal) = refusal {
            self.replier.refuse(id, correlation, refusal);
            return;
        }
        let pid = {
            let mut peers = lock(&self.replier.peers);
            let Some(peer) = peers.get_mut(&id) else {
                return;
            };
            if peer.welcomed {
                drop(peers);
                let error =
                    ErrorBody::new(ErrorCode::Invalid, "hello was said before: once is enough");
                return self.replier.refuse(id, correlation, error);
            }
            peer.welcomed = true;
            peer.version = version;
            if hello.role == Role::Rank {
                // Its memory is not used behind its end, whoever has its connection then.
                let sender = self.replier.sender.clone();
                let ended = move || {
                    tracing::debug!(peer = ?id, "closed: its process has ended");
                    sender.disconnect(id);
                };
                peer._process = peer.pid.and_then(|pid| ProcessWatch::start(pid, ended));
            }
            peer.pid
        };
        let heartbeat_ms = u32::try_from(self.settings.heartbeat.as_millis()).unwrap_or(u32::MAX);
        let welcome = Welcome {
            version,
            heartbeat_ms,
            request_credits: limits::REQUEST_CREDITS,
            byte_credits: limits::BYTE_CREDITS,
            features: hello.features & self.settings.features,
        };
        self.replier
            .reply(id, correlation, Message::Welcome(welcome));
        events.push(ServerEvent::Opened {
            peer: id,
            hello,
            pid,
        });
    }

    fn complain(&self, peer: PeerId, correlation: RequestId, error: &DecodeError) {
        let error = ErrorBody::new(error.code(), error.to_string());
        self.replier
            .say(peer, correlation, Message::Error(error), 0);
    }

    /// A peer that goes on sending what is no message is closed.
    fn malformed(&self, id: PeerId, error: &DecodeError) {
        tracing::debug!(peer = ?id, %error, "not a message");
        let too_many = {
            let mut peers = lock(&self.replier.peers);
            let Some(peer) = peers.get_mut(&id) else {
                return;
            };
            peer.malformed += 1;
            peer.malformed > MALFORMED_MAX
        };
        if too_many {
            self.replier.disconnect(id);
        }
    }

    /// Closes who was silent too long; looks at most once a heartbeat. While nobody listened here, nobody was heard: what
    /// was said meanwhile is heard before anybody is judged.
    fn close_silent(&mut self) {
        let now = Instant::now();
        let since = now.duration_since(self.swept);
        if since < self.settings.heartbeat {
            return;
        }
        self.swept = now;
        if since > self.settings.heartbeat * 2 {
            return;
        }
        let limit = self.settings.heartbeat * 3;
        let silent: Vec<PeerId> = lock(&self.replier.peers)
            .iter()
            .filter(|(_, peer)| now.duration_since(peer.heard) > limit)
            .map(|(id, _)| *id)
            .collect();
        for peer in silent {
            tracing::debug!(?peer, "closed: silent for three heartbeats");
            self.replier.disconnect(peer);
        }
    }
}

/// A poisoned map is still a map: nothing in here panics between two changes that belong together.
fn lock(peers: &Peers) -> MutexGuard<'_, HashMap<PeerId, Peer>> {
    peers.lock().unwrap_or_else(PoisonError::into_inner)
}
