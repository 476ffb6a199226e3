//! Runs a [`ServerSession`] on a listener.
//!
//! A [`Server`] hands over batches of [`ServerEvent`]s; a [`Replier`] sends answers. A peer that has used up its
//! credits gets `busy` at once, so the work queued behind a server is bounded by credits.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;

use crate::clock::Timer;
use crate::process::ProcessWatch;
use crate::{Clock, Frame, FrameSender, Listener, ListenerEvent, PeerId};
use kvferry_protocol::{Connections, ErrorBody, ErrorCode, Message, decode};
use kvferry_session::{
    Encoded, ServerEvent, ServerHost, ServerSession, ServerSettings, encode_order, encode_reply,
    order_envelope,
};
use kvferry_types::{Epoch, RequestId, Time};

/// Most events in one batch.
pub const SERVER_BATCH_MAX: usize = 256;

/// A batch of events. Its frames count against [`crate::Limits::pending_bytes`] until the last event is
/// taken out and the batch is dropped, which bounds the bytes that wait to be handled.
#[derive(Debug, Default)]
pub struct ServerEvents {
    events: VecDeque<ServerEvent>,
    charge: Option<OwnedSemaphorePermit>,
}

impl ServerEvents {
    /// Makes room for about this many events: for one event, less than a queue takes by itself.
    fn reserve(&mut self, events: usize) {
        self.events.reserve_exact(events.min(SERVER_BATCH_MAX));
    }

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

type Shared = Arc<Mutex<ServerSession>>;

/// Sends answers and orders to peers, from any task. Cheap to clone.
#[derive(Clone)]
pub struct Replier {
    sender: FrameSender,
    session: Shared,
    epoch: Epoch,
    clock: Clock,
}

impl Replier {
    /// Answers a request. Never waits for a peer: a peer that is gone is ignored, and one that does not read is closed.
    pub fn reply(&self, peer: PeerId, correlation: RequestId, message: Message) {
        let version = {
            let mut session = lock(&self.session);
            if let Message::Error(error) = &message {
                session.note_error(error.code());
            }
            session.settle(peer, correlation)
        };
        // Encoded outside the lock, because an answer may be large.
        if let Some(encoded) = encode_reply(version, self.epoch, correlation, message) {
            send(&self.sender, peer, frame(encoded));
        }
    }

    /// Answers a request with an error.
    pub fn refuse(&self, peer: PeerId, correlation: RequestId, error: ErrorBody) {
        self.reply(peer, correlation, Message::Error(error));
    }

    /// Sends an order to several peers, encoded once for each version that they use. Returns the peers to which it was
    /// not sent, because they are not connected or the order cannot be encoded.
    pub fn order(
        &self,
        peers: &[PeerId],
        correlation: RequestId,
        message: Message,
        deadline: Duration,
    ) -> Vec<PeerId> {
        let versions: Vec<u16> = {
            let session = lock(&self.session);
            peers.iter().map(|peer| session.version(*peer)).collect()
        };
        let mut order = order_envelope(self.epoch, correlation, message, deadline);
        let mut encoded: Option<(u16, Option<Frame>)> = None;
        let mut unsent = Vec::new();
        for (peer, version) in peers.iter().zip(versions) {
            let (_, frame) = match encoded.take() {
                Some(same) if same.0 == version => encoded.insert(same),
                _ => encoded.insert((version, encode_order(version, &mut order).map(frame))),
            };
            let sent = frame
                .clone()
                .is_some_and(|frame| send(&self.sender, *peer, frame));
            if !sent {
                unsent.push(*peer);
            }
        }
        unsent
    }

    /// The clients, and what was refused.
    pub fn connections(&self) -> Connections {
        let mut connections = lock(&self.session).connections();
        let refused = self.sender.refused();
        connections.refused_handshakes = refused.handshakes;
        connections.malformed_messages += refused.violations;
        let malformed = refused.violations.saturating_sub(refused.too_long);
        for (code, count) in [
            (ErrorCode::Limit, refused.too_long),
            (ErrorCode::Malformed, malformed),
        ] {
            let counted = connections.refused_messages.entry(code.name().to_owned());
            *counted.or_default() += count;
        }
        connections
    }

    /// See [`ServerSession::is_live`].
    pub fn is_live(&self, peer: PeerId) -> bool {
        lock(&self.session).is_live(peer, self.clock.now())
    }

    /// See [`ServerSession::is_open`].
    pub fn is_open(&self, peer: PeerId, request: RequestId) -> bool {
        lock(&self.session).is_open(peer, request)
    }

    /// Closes a connection.
    pub fn disconnect(&self, peer: PeerId) {
        self.sender.disconnect(peer);
    }
}

fn frame((header, body): Encoded) -> Frame {
    Frame::new(header.to_vec(), body)
}

/// Sends without waiting. Closes a peer that has no room for the message.
fn send(sender: &FrameSender, peer: PeerId, frame: Frame) -> bool {
    match sender.try_send(peer, frame) {
        Ok(()) => true,
        Err(error) => {
            tracing::debug!(%error, ?peer, "peer closed: it does not read its messages");
            sender.disconnect(peer);
            false
        }
    }
}

/// A listener with the server side of the protocol.
pub struct Server {
    listener: Listener,
    session: Shared,
    host: Host,
    epoch: Epoch,
    /// Fires when the session's timers are due, or earlier.
    timer: Timer,
    /// The last batch was full: other tasks of the thread run before the next one.
    full: bool,
}

impl Server {
    /// Starts to serve the clients of a listener.
    pub fn new(listener: Listener, settings: ServerSettings) -> Self {
        let limits = listener.limits();
        let guests_max = limits
            .connections
            .saturating_sub(limits.reserved_connections);
        let host = Host {
            clock: Clock::start(),
            sender: listener.sender(),
            watches: HashMap::new(),
            guests_max,
        };
        let epoch = settings.epoch;
        let session = ServerSession::new(settings, host.now());
        Self {
            listener,
            session: Arc::new(Mutex::new(session)),
            host,
            epoch,
            timer: Timer::new(),
            full: false,
        }
    }

    /// Speaks no newer version of the protocol than this one. Before the first call of [`Self::next`].
    #[must_use]
    pub fn with_version_max(self, version_max: u16) -> Self {
        lock(&self.session).limit_version(version_max);
        self
    }

    /// Returns a handle to send answers and orders.
    pub fn replier(&self) -> Replier {
        Replier {
            sender: self.host.sender.clone(),
            session: Arc::clone(&self.session),
            epoch: self.epoch,
            clock: self.host.clock,
        }
    }

    /// Closes every connection and removes the socket.
    pub async fn close(self) {
        self.listener.close().await;
    }

    /// Returns the next events, at most [`SERVER_BATCH_MAX`]; `None` when the listener has ended. Cancel safe.
    ///
    /// Takes at most as many frames at a time, including those that the session answers itself: a peer that sends pings or
    /// refused requests without a pause keeps neither the events of others waiting nor the session's timers.
    pub async fn next(&mut self) -> Option<ServerEvents> {
        loop {
            if std::mem::take(&mut self.full) {
                tokio::task::yield_now().await;
            }
            let due = self.host.clock.instant(lock(&self.session).next_timeout());
            let first = tokio::select! {
                biased;
                first = self.listener.next_charged() => Some(first?),
                () = self.timer.fired(due) => None,
            };
            let mut events = ServerEvents::default();
            if let Some(first) = first {
                events.reserve(1 + self.listener.queued());
                self.take(first, &mut events);
            }
            // The result is not needed: the listener reports the closed peers.
            lock(&self.session).tick(&mut self.host);
            let mut taken = 1;
            while taken < SERVER_BATCH_MAX
                && let Some(event) = self.listener.try_next_charged()
            {
                self.take(event, &mut events);
                taken += 1;
            }
            self.full = taken == SERVER_BATCH_MAX;
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
            ListenerEvent::Opened { peer, origin } => {
                lock(&self.session).opened(&mut self.host, peer, origin);
            }
            ListenerEvent::Closed { peer, .. } => {
                self.host.watches.remove(&peer);
                if let Some(event) = lock(&self.session).closed(peer) {
                    events.push(event);
                }
            }
            ListenerEvent::Frame { peer, frame } => {
                if let Some(event) = self.message(peer, &frame) {
                    events.push(event);
                    events.charge(charge);
                }
            }
        }
    }

    fn message(&mut self, peer: PeerId, Frame { header, body }: &Frame) -> Option<ServerEvent> {
        let (host, bytes) = (&mut self.host, body.len());
        let header = lock(&self.session).admit(host, peer, header, bytes)?;
        // Decoded outside the lock, so that other peers can be answered meanwhile.
        let decoded = decode(header, body);
        lock(&self.session).receive(host, peer, &header, decoded, bytes)
    }
}

struct Host {
    clock: Clock,
    sender: FrameSender,
    /// Watches on the processes whose memory this process uses, by the connection over which each shared it.
    watches: HashMap<PeerId, ProcessWatch>,
    guests_max: usize,
}

impl ServerHost for Host {
    fn now(&self) -> Time {
        self.clock.now()
    }

    fn send(&mut self, peer: PeerId, message: Encoded) -> bool {
        send(&self.sender, peer, frame(message))
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.sender.disconnect(peer);
    }

    fn watch(&mut self, peer: PeerId, pid: Option<i32>) {
        let sender = self.sender.clone();
        let ended = move || {
            tracing::debug!(?peer, "closed: its process has ended");
            sender.disconnect(peer);
        };
        if let Some(watch) = pid.and_then(|pid| ProcessWatch::start(pid, ended)) {
            self.watches.insert(peer, watch);
        }
    }

    fn guests_max(&self) -> usize {
        self.guests_max
    }
}

/// Locks the session and ignores poisoning: no panic can leave the session between two changes that belong together.
fn lock(session: &Shared) -> MutexGuard<'_, ServerSession> {
    session.lock().unwrap_or_else(PoisonError::into_inner)
}
