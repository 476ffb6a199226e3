//! The server's side of conversations: hello and versions, credits, heartbeats, and a typed error for every message that
//! cannot be carried out.
//!
//! A [`Server`] hands over whole batches of [`ServerEvent`]s; a [`Replier`] answers. A peer that has used up its credits
//! gets `busy` at once, so what waits behind a server is bounded by credits, not by luck.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use crate::protocol::{
    Class, DecodeError, Empty, Envelope, ErrorBody, ErrorCode, HELLO_VERSION, Header, Hello,
    Message, Role, VERSION, VERSION_MIN, Welcome, decode, limits,
};
use crate::transport::admission::{HELLO_DEADLINE, Peer, Verdict};
use crate::transport::process::ProcessWatch;
use crate::transport::session::to_frame;
use crate::transport::{Frame, FrameSender, Listener, ListenerEvent, PeerId};
use crate::types::{Epoch, RequestId};

/// Most events handed over at once.
pub const SERVER_BATCH_MAX: usize = 256;
/// Connections on which nobody has said hello yet; when there is one more, the oldest of them is closed.
pub const STRANGERS_MAX: usize = 16;

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

/// Events that are handed over at once. Their frames count against [`crate::transport::Limits::pending_bytes`] until the
/// last of them is taken out and this is dropped: so what waits for whoever handles them is bounded in bytes.
#[derive(Debug, Default)]
pub struct ServerEvents {
    events: std::collections::VecDeque<ServerEvent>,
    charge: Option<OwnedSemaphorePermit>,
}

impl ServerEvents {
    fn push(&mut self, event: ServerEvent) {
        self.events.push_back(event);
    }

    fn charge(&mut self, more: Option<OwnedSemaphorePermit>) {
        match (&mut self.charge, more) {
            (Some(charge), Some(more)) => charge.merge(more),
            (None, more) => self.charge = more,
            (Some(_), None) => {}
        }
    }
}

impl Iterator for ServerEvents {
    type Item = ServerEvent;

    fn next(&mut self) -> Option<ServerEvent> {
        self.events.pop_front()
    }
}

type Peers = Arc<Mutex<HashMap<PeerId, Peer>>>;

/// Answers peers, from anywhere. Cheap to clone.
#[derive(Clone)]
pub struct Replier {
    sender: FrameSender,
    peers: Peers,
    epoch: Epoch,
    heartbeat: Duration,
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

    /// True when a peer is connected and was heard within a heartbeat, give or take another one for the way of its ping.
    pub fn is_live(&self, peer: PeerId) -> bool {
        let peers = lock(&self.peers);
        let heard = peers.get(&peer).map(|peer| peer.heard.elapsed());
        heard.is_some_and(|silent| silent <= self.heartbeat * 2)
    }

    /// Closes a connection.
    pub fn disconnect(&self, peer: PeerId) {
        self.sender.disconnect(peer);
    }

    fn settle(&self, peer: PeerId, correlation: RequestId) {
        if let Some(peer) = lock(&self.peers).get_mut(&peer) {
            peer.settle(correlation);
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
            .map_or(HELLO_VERSION, |peer| peer.version);
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
            heartbeat: settings.heartbeat,
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
    pub async fn next(&mut self) -> Option<ServerEvents> {
        loop {
            let mut events = ServerEvents::default();
            match tokio::time::timeout(self.sweep(), self.listener.next_charged()).await {
                Ok(Some(event)) => self.take(event, &mut events),
                Ok(None) => return None,
                Err(_) => {}
            }
            self.close_silent();
            while events.events.len() < SERVER_BATCH_MAX {
                let more = tokio::select! {
                    biased;
                    event = self.listener.next_charged() => event,
                    () = std::future::ready(()) => None,
                };
                let Some(event) = more else { break };
                self.take(event, &mut events);
            }
            if !events.events.is_empty() {
                return Some(events);
            }
        }
    }

    fn take(
        &mut self,
        (event, charge): (ListenerEvent, Option<OwnedSemaphorePermit>),
        events: &mut ServerEvents,
    ) {
        match event {
            ListenerEvent::Opened { peer, pid, .. } => {
                self.make_room_for_a_stranger();
                let state = Peer::new(pid, Instant::now());
                lock(&self.replier.peers).insert(peer, state);
            }
            ListenerEvent::Closed { peer, .. } => {
                let state = lock(&self.replier.peers).remove(&peer);
                if state.is_some_and(|state| state.role.is_some()) {
                    events.push(ServerEvent::Closed { peer });
                }
            }
            ListenerEvent::Frame { peer, frame } => {
                let before = events.events.len();
                self.read(peer, &frame, events);
                if events.events.len() > before {
                    events.charge(charge);
                }
            }
        }
    }

    /// Peers that never say hello cannot keep others out.
    fn make_room_for_a_stranger(&self) {
        let oldest = {
            let peers = lock(&self.replier.peers);
            let strangers = peers.iter().filter(|(_, peer)| peer.role.is_none());
            match strangers.clone().count() < STRANGERS_MAX {
                true => None,
                // Their numbers grow.
                false => strangers.map(|(id, _)| *id).min(),
            }
        };
        if let Some(oldest) = oldest {
            tracing::debug!(peer = ?oldest, "closed: it has not said hello, and others come");
            self.forget(oldest);
        }
    }

    /// Closes a peer that nothing was told about, and looks at nothing that still comes from it.
    fn forget(&self, stranger: PeerId) {
        lock(&self.replier.peers).remove(&stranger);
        self.replier.disconnect(stranger);
    }

    fn read(&mut self, peer: PeerId, frame: &Frame, events: &mut ServerEvents) {
        let now = Instant::now();
        let header = match Header::from_bytes(&frame.header) {
            Ok(header) => header,
            Err(error) => return self.misbehaves(peer, now, &error.to_string()),
        };
        let judged = lock(&self.replier.peers)
            .get_mut(&peer)
            .map(|known| known.judge(&header, frame.body.len(), now));
        let Some((verdict, bad)) = judged else {
            return;
        };
        match verdict {
            Verdict::Read => match decode(header, &frame.body) {
                Ok(envelope) => self.heard(peer, envelope, frame.body.len() as u64, events),
                Err(error) => self.unreadable(peer, &header, now, &error),
            },
            Verdict::Refuse(error) => {
                let error = Message::Error(error);
                self.replier.say(peer, header.correlation, error, 0);
            }
            Verdict::Drop => {}
        }
        if bad {
            self.misbehaves(peer, now, "it should not have come");
        }
    }

    fn heard(&mut self, peer: PeerId, said: Envelope, bytes: u64, events: &mut ServerEvents) {
        let envelope = Envelope {
            deadline_ms: said.deadline_ms.min(limits::DEADLINE_MAX_MS),
            ..said
        };
        let kind = envelope.message.kind();
        match envelope.message {
            Message::Hello(hello) => self.welcome(peer, envelope.correlation, hello, events),
            Message::Ping(_) => {
                self.replier
                    .reply(peer, envelope.correlation, Message::Pong(Empty {}));
            }
            Message::Pong(_) => {}
            _ => {
                if kind.class() == Class::Request
                    && let Some(peer) = lock(&self.replier.peers).get_mut(&peer)
                {
                    peer.owe(envelope.correlation, bytes);
                }
                events.push(ServerEvent::Message { peer, envelope });
            }
        }
    }

    fn welcome(
        &mut self,
        id: PeerId,
        correlation: RequestId,
        hello: Hello,
        events: &mut ServerEvents,
    ) {
        let version = hello.version_max.min(VERSION);
        let refusal = if version < hello.version_min.max(VERSION_MIN) {
            let (min, max) = (hello.version_min, hello.version_max);
            let text = format!(
                "you speak versions {min} to {max}, this side {VERSION_MIN} to {VERSION}: update the \
                 older side"
            );
            Some(ErrorBody::new(ErrorCode::UnsupportedVersion, text))
        } else if hello.role == Role::Unknown {
            let text = format!(
                "the role of your hello is unknown here, this side takes {:?}: check the address, or update this side",
                self.settings.roles
            );
            Some(ErrorBody::new(ErrorCode::Invalid, text))
        } else if !self.settings.roles.contains(&hello.role) {
            let text = format!("a {:?} has no business here: check the address", hello.role);
            Some(ErrorBody::new(ErrorCode::Invalid, text))
        } else {
            self.no_place_for(hello.role)
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
            peer.role = Some(hello.role);
            if hello.role == Role::Rank {
                // Its memory is not used behind its end, whoever has its connection then.
                let sender = self.replier.sender.clone();
                let ended = move || {
                    tracing::debug!(peer = ?id, "closed: its process has ended");
                    sender.disconnect(id);
                };
                peer.process = peer.pid.and_then(|pid| ProcessWatch::start(pid, ended));
            }
            peer.pid
        };
        let heartbeat_ms = u32::try_from(self.settings.heartbeat.as_millis()).unwrap_or(u32::MAX);
        let welcome = Welcome {
            version,
            heartbeat_ms,
            request_credits: limits::REQUEST_CREDITS,
            byte_credits: limits::BYTE_CREDITS,
            deadline_max_ms: limits::DEADLINE_MAX_MS,
            features: hello.features & self.settings.features,
        };
        self.replier
            .reply(id, correlation, Message::Welcome(welcome));
        if let Some(peer) = lock(&self.replier.peers).get_mut(&id) {
            peer.version = version;
        }
        events.push(ServerEvent::Opened {
            peer: id,
            hello,
            pid,
        });
    }

    /// Workers keep their places: without them nothing is served.
    fn no_place_for(&self, role: Role) -> Option<ErrorBody> {
        if role == Role::Worker {
            return None;
        }
        let limits = self.listener.limits();
        let max = limits
            .connections
            .saturating_sub(limits.reserved_connections);
        let taken = lock(&self.replier.peers)
            .values()
            .filter(|peer| peer.role.is_some_and(|role| role != Role::Worker))
            .count();
        let text = format!("{taken} others are connected, as many as may be: close one of them");
        (taken >= max).then(|| ErrorBody::new(ErrorCode::Busy, text))
    }

    fn unreadable(&self, peer: PeerId, header: &Header, now: Instant, error: &DecodeError) {
        if Class::of(header.kind) == Class::Request {
            let said = ErrorBody::for_good(error.code(), error.to_string());
            self.replier
                .say(peer, header.correlation, Message::Error(said), 0);
        }
        self.misbehaves(peer, now, &error.to_string());
    }

    /// A peer that goes on sending what cannot be read, or is not its to say, is closed.
    fn misbehaves(&self, id: PeerId, now: Instant, why: &str) {
        tracing::debug!(peer = ?id, why, "a message that is not taken");
        let too_many = lock(&self.replier.peers)
            .get_mut(&id)
            .is_some_and(|peer| peer.misbehaves(now));
        if too_many {
            self.replier.disconnect(id);
        }
    }

    /// How often silence is looked for.
    fn sweep(&self) -> Duration {
        self.settings.heartbeat.min(HELLO_DEADLINE / 5)
    }

    /// Closes peers that have said nothing for three heartbeats, or no hello in time; looks at most once a sweep. While
    /// nobody listened here, nobody was heard: what was said meanwhile is heard before anybody is judged.
    fn close_silent(&mut self) {
        let now = Instant::now();
        let since = now.duration_since(self.swept);
        if since < self.sweep() {
            return;
        }
        self.swept = now;
        if since > self.sweep() * 2 {
            return;
        }
        let limit = self.settings.heartbeat * 3;
        let silent: Vec<(PeerId, bool)> = lock(&self.replier.peers)
            .iter()
            .filter(|(_, peer)| peer.is_silent(now, limit))
            .map(|(id, peer)| (*id, peer.role.is_some()))
            .collect();
        for (peer, welcomed) in silent {
            tracing::debug!(?peer, welcomed, "closed: it keeps silent");
            match welcomed {
                true => self.replier.disconnect(peer),
                false => self.forget(peer),
            }
        }
    }
}

/// A poisoned map is still a map: nothing in here panics between two changes that belong together.
fn lock(peers: &Peers) -> MutexGuard<'_, HashMap<PeerId, Peer>> {
    peers.lock().unwrap_or_else(PoisonError::into_inner)
}
