//! Sessions as a server: the server's session on the simulated network.

use std::collections::BTreeMap;
use std::time::Duration;

use super::SimContext;
use super::client::HEARTBEAT;
use super::net::{ConnectionEnd, ConnectionId, Received};
use kvferry_protocol::{Envelope, Hello, Message, Role, decode};
use kvferry_session::{
    Encoded, Origin, ServerEvent, ServerHost, ServerSession, ServerSettings, encode_order,
    encode_reply, order_envelope,
};
use kvferry_types::{Epoch, PeerId, RequestId, Time, User};

/// The sessions of all clients of a process.
#[derive(Debug)]
pub(super) struct SimServer {
    session: ServerSession,
    hellos: BTreeMap<ConnectionId, Hello>,
}

/// An event of a server session.
#[derive(Debug)]
pub(super) enum SimServerEvent {
    Opened(Hello),
    Closed,
    Message(Envelope),
}

impl SimServer {
    pub(super) fn new(epoch: Epoch, roles: &[Role], now: Time) -> Self {
        let settings = ServerSettings {
            epoch,
            heartbeat: HEARTBEAT,
            roles: roles.to_vec(),
            features: 0,
            worker_seats: None,
        };
        Self {
            session: ServerSession::new(settings, now),
            hellos: BTreeMap::new(),
        }
    }

    pub(super) fn hello(&self, id: ConnectionId) -> Option<&Hello> {
        self.hellos.get(&id)
    }

    pub(super) fn is_live(&self, id: ConnectionId, now: Time) -> bool {
        self.session.is_live(peer(id), now)
    }

    pub(super) fn is_open(&self, id: ConnectionId, request: RequestId) -> bool {
        self.session.is_open(peer(id), request)
    }

    pub(super) fn next_timeout(&self) -> Time {
        self.session.next_timeout()
    }

    /// Fires due timers. Returns the connections that were closed because they were silent for too long.
    pub(super) fn tick(&mut self, env: &mut SimContext) -> Vec<ConnectionId> {
        let silent = self.session.tick(&mut Host::new(env));
        let silent: Vec<ConnectionId> = silent.into_iter().map(connection).collect();
        silent.iter().for_each(|id| self.remove(*id));
        silent
    }

    pub(super) fn close(&mut self, env: &mut SimContext, id: ConnectionId) {
        self.remove(id);
        env.close(id, ConnectionEnd::Server);
    }

    fn remove(&mut self, id: ConnectionId) {
        self.session.closed(peer(id));
        self.hellos.remove(&id);
    }

    /// Handles bytes or a close that came over a connection.
    pub(super) fn receive(
        &mut self,
        env: &mut SimContext,
        id: ConnectionId,
        received: Received,
    ) -> Option<SimServerEvent> {
        let (header, body) = match received {
            Received::Closed => {
                self.session.closed(peer(id));
                return self.hellos.remove(&id).map(|_| SimServerEvent::Closed);
            }
            Received::Bytes { header, body } => (header, body),
        };
        let pid = env.pid_of_client(id);
        if !self.session.knows(peer(id)) {
            let origin = Origin::Local {
                user: User::Own,
                pid,
            };
            self.session.opened(&mut Host::new(env), peer(id), origin);
        }
        let mut host = Host::new(env);
        let bytes = body.len();
        let admitted = self.session.admit(&mut host, peer(id), &header, bytes);
        let event = admitted.and_then(|header| {
            let decoded = decode(header, &body);
            self.session
                .receive(&mut host, peer(id), &header, decoded, bytes)
        });
        if host.disconnected {
            self.session.closed(peer(id));
            return self.hellos.remove(&id).map(|_| SimServerEvent::Closed);
        }
        match event? {
            ServerEvent::Opened { hello, .. } => {
                self.hellos.insert(id, hello.clone());
                Some(SimServerEvent::Opened(hello))
            }
            ServerEvent::Message { envelope, .. } => Some(SimServerEvent::Message(envelope)),
            ServerEvent::Closed { .. } => Some(SimServerEvent::Closed),
        }
    }

    /// Answers a request.
    pub(super) fn reply(
        &mut self,
        env: &mut SimContext,
        id: ConnectionId,
        request: RequestId,
        message: Message,
    ) {
        let version = self.session.settle(peer(id), request);
        let encoded = encode_reply(version, self.session.epoch(), request, message);
        if let Some(encoded) = encoded {
            Host::new(env).send(peer(id), encoded);
        }
    }

    /// Sends an order. Returns the peers to which it was not sent.
    pub(super) fn order(
        &mut self,
        env: &mut SimContext,
        peers: &[PeerId],
        order: RequestId,
        message: Message,
        deadline: Duration,
    ) -> Vec<PeerId> {
        let mut envelope = order_envelope(self.session.epoch(), order, message, deadline);
        let mut send = |peer: &PeerId| {
            let encoded = encode_order(self.session.version(*peer), &mut envelope);
            encoded.is_some_and(|encoded| Host::new(env).send(*peer, encoded))
        };
        peers.iter().filter(|peer| !send(peer)).copied().collect()
    }
}

pub(super) fn peer(id: ConnectionId) -> PeerId {
    PeerId(id.0)
}

pub(super) fn connection(peer: PeerId) -> ConnectionId {
    ConnectionId(peer.0)
}

/// Environment of the server session.
struct Host<'a> {
    env: &'a mut SimContext,
    /// Set when the session has closed a connection.
    disconnected: bool,
}

impl<'a> Host<'a> {
    fn new(env: &'a mut SimContext) -> Self {
        let disconnected = false;
        Self { env, disconnected }
    }
}

impl ServerHost for Host<'_> {
    fn now(&self) -> Time {
        self.env.now()
    }

    fn send(&mut self, peer: PeerId, message: Encoded) -> bool {
        self.env
            .send(connection(peer), ConnectionEnd::Server, message)
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.disconnected = true;
        self.env.close(connection(peer), ConnectionEnd::Server);
    }

    /// Nothing to watch: the network closes the connections of a process that ends.
    fn watch(&mut self, _: PeerId, _: Option<i32>) {}

    fn guests_max(&self) -> usize {
        usize::MAX
    }
}
