//! Runs a [`ServerSession`] on a listener.
//!
//! A [`Server`] hands over whole batches of [`ServerEvent`]s; a [`Replier`] answers. A peer that has used up its credits
//! gets `busy` at once, so what waits behind a server is bounded by credits, not by luck.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;

use crate::protocol::{ErrorBody, Message, decode};
use crate::session::{
    Encoded, ServerEvent, ServerHost, ServerSession, ServerSettings, encode_order, encode_reply,
};
use crate::transport::process::ProcessWatch;
use crate::transport::{Clock, Frame, FrameSender, Listener, ListenerEvent, PeerId};
use crate::types::{Epoch, RequestId, Time};

/// Most events handed over at once.
pub const SERVER_BATCH_MAX: usize = 256;

/// Events that are handed over at once. Their frames count against [`crate::transport::Limits::pending_bytes`] until the
/// last of them is taken out and this is dropped: so what waits for whoever handles them is bounded in bytes.
#[derive(Debug, Default)]
pub struct ServerEvents {
    events: VecDeque<ServerEvent>,
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

type Shared = Arc<Mutex<ServerSession>>;

/// Answers peers, from anywhere. Cheap to clone.
#[derive(Clone)]
pub struct Replier {
    sender: FrameSender,
    session: Shared,
    epoch: Epoch,
    clock: Clock,
}

impl Replier {
    /// Answers a request. A peer that is gone, or does not read, is not waited for.
    pub fn reply(&self, peer: PeerId, correlation: RequestId, message: Message) {
        let version = lock(&self.session).settle(peer, correlation);
        // Encoded without the lock: an answer may be large.
        if let Some(encoded) = encode_reply(version, self.epoch, correlation, message) {
            send(&self.sender, peer, encoded);
        }
    }

    /// Answers a request with an error.
    pub fn refuse(&self, peer: PeerId, correlation: RequestId, error: ErrorBody) {
        self.reply(peer, correlation, Message::Error(error));
    }

    /// Sends an order; false when the peer is not there.
    pub fn order(
        &self,
        peer: PeerId,
        correlation: RequestId,
        message: Message,
        deadline: Duration,
    ) -> bool {
        let version = lock(&self.session).version(peer);
        encode_order(version, self.epoch, correlation, message, deadline)
            .is_some_and(|encoded| send(&self.sender, peer, encoded))
    }

    /// See [`ServerSession::is_live`].
    pub fn is_live(&self, peer: PeerId) -> bool {
        lock(&self.session).is_live(peer, self.clock.now())
    }

    /// Closes a connection.
    pub fn disconnect(&self, peer: PeerId) {
        self.sender.disconnect(peer);
    }
}

/// Sends without waiting: a peer that does not take its messages is closed.
fn send(sender: &FrameSender, peer: PeerId, (header, body): Encoded) -> bool {
    match sender.try_send(peer, Frame::new(header.to_vec(), body)) {
        Ok(()) => true,
        Err(error) => {
            tracing::debug!(%error, ?peer, "peer closed: it does not take its messages");
            sender.disconnect(peer);
            false
        }
    }
}

/// Listens, welcomes, and keeps order.
pub struct Server {
    listener: Listener,
    session: Shared,
    host: Host,
    epoch: Epoch,
}

impl Server {
    /// Serves the clients of a listener.
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
        }
    }

    /// Answers peers.
    pub fn replier(&self) -> Replier {
        Replier {
            sender: self.host.sender.clone(),
            session: Arc::clone(&self.session),
            epoch: self.epoch,
            clock: self.host.clock,
        }
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
            let sweep = lock(&self.session).sweep();
            match tokio::time::timeout(sweep, self.listener.next_charged()).await {
                Ok(Some(event)) => self.take(event, &mut events),
                Ok(None) => return None,
                Err(_) => {}
            }
            // The listener reports those that are closed.
            lock(&self.session).tick(&mut self.host);
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
                lock(&self.session).opened(&mut self.host, peer, pid);
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
        // Decoded without the lock: others are answered meanwhile.
        let decoded = decode(header, body);
        lock(&self.session).receive(host, peer, &header, decoded, bytes)
    }
}

struct Host {
    clock: Clock,
    sender: FrameSender,
    /// Processes whose memory is used here, by the connection over which they gave it.
    watches: HashMap<PeerId, ProcessWatch>,
    guests_max: usize,
}

impl ServerHost for Host {
    fn now(&self) -> Time {
        self.clock.now()
    }

    fn send(&mut self, peer: PeerId, message: Encoded) -> bool {
        send(&self.sender, peer, message)
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

/// A session behind a poisoned lock is still a session: nothing in it panics between two changes that belong together.
fn lock(session: &Shared) -> MutexGuard<'_, ServerSession> {
    session.lock().unwrap_or_else(PoisonError::into_inner)
}
