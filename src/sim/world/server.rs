//! Conversations as a server: who said hello, who is silent.

use std::collections::BTreeMap;
use std::time::Duration;

use super::Env;
use super::client::HEARTBEAT;
use super::net::{ConnectionId, End, Heard};
use crate::protocol::{Empty, Envelope, Hello, Message, Welcome, limits};
use crate::types::{Epoch, RequestId, Time};

#[derive(Debug)]
struct Peer {
    hello: Option<Hello>,
    heard: Time,
}

/// All clients of a process.
#[derive(Debug)]
pub(super) struct Server {
    epoch: Epoch,
    peers: BTreeMap<ConnectionId, Peer>,
    next: Time,
}

/// What a server notices.
#[derive(Debug)]
pub(super) enum Noticed {
    Opened(Hello),
    Closed,
    Message(Envelope),
}

impl Server {
    pub(super) fn new(epoch: Epoch, now: Time) -> Self {
        Self {
            epoch,
            peers: BTreeMap::new(),
            next: now + HEARTBEAT,
        }
    }

    pub(super) fn hello(&self, id: ConnectionId) -> Option<&Hello> {
        self.peers.get(&id)?.hello.as_ref()
    }

    pub(super) fn next_timeout(&self) -> Time {
        self.next
    }

    /// Those that were silent for too long.
    pub(super) fn tick(&mut self, env: &mut Env) -> Vec<ConnectionId> {
        let now = env.now();
        if now < self.next {
            return Vec::new();
        }
        self.next = now + HEARTBEAT;
        let silent = self
            .peers
            .iter()
            .filter(|(_, peer)| now >= peer.heard + 3 * HEARTBEAT);
        let silent: Vec<ConnectionId> = silent.map(|(id, _)| *id).collect();
        silent.iter().for_each(|id| self.close(env, *id));
        silent
    }

    pub(super) fn close(&mut self, env: &mut Env, id: ConnectionId) {
        self.peers.remove(&id);
        env.close(id, End::Server);
    }

    /// Something came over a connection.
    pub(super) fn hear(
        &mut self,
        env: &mut Env,
        id: ConnectionId,
        heard: Heard,
    ) -> Option<Noticed> {
        let envelope = match heard {
            Heard::Closed => return self.peers.remove(&id).map(|_| Noticed::Closed),
            Heard::Message(envelope) => *envelope,
        };
        let heard = env.now();
        let peer = self.peers.entry(id).or_insert(Peer { hello: None, heard });
        peer.heard = heard;
        match envelope.message {
            Message::Hello(hello) => {
                let new = peer.hello.replace(hello.clone()).is_none();
                let welcome = Message::Welcome(Welcome {
                    version: hello.version_max,
                    heartbeat_ms: u32::try_from(HEARTBEAT.as_millis()).unwrap_or(u32::MAX),
                    request_credits: limits::REQUEST_CREDITS,
                    byte_credits: limits::BYTE_CREDITS,
                    deadline_max_ms: limits::DEADLINE_MAX_MS,
                    features: 0,
                });
                self.say(env, id, envelope.correlation, Duration::ZERO, welcome);
                new.then_some(Noticed::Opened(hello))
            }
            // Its hello was lost or is late: nothing is done for a stranger.
            _ if peer.hello.is_none() => None,
            Message::Ping(_) => {
                self.say(
                    env,
                    id,
                    envelope.correlation,
                    Duration::ZERO,
                    Message::Pong(Empty {}),
                );
                None
            }
            _ => Some(Noticed::Message(envelope)),
        }
    }

    pub(super) fn say(
        &self,
        env: &mut Env,
        id: ConnectionId,
        correlation: RequestId,
        deadline: Duration,
        message: Message,
    ) {
        env.say(id, End::Server, correlation, deadline, self.epoch, message);
    }
}
