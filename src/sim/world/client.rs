//! One conversation as a client: hello, heartbeats, silence, and once more from the start.

use std::time::Duration;

use super::net::{ConnectionId, End, Heard};
use super::{Env, Who};
use crate::protocol::{Empty, Envelope, Hello, Message, Role, VERSION_MIN};
use crate::types::{EngineId, Epoch, RequestId, Time, WorkerId};

/// How often a silent side is asked whether it is there; three times that without a word, and it is gone.
pub(super) const HEARTBEAT: Duration = Duration::from_millis(20);

/// See the module.
#[derive(Debug)]
pub(super) struct Client {
    me: Who,
    life: u32,
    server: Who,
    hello: Hello,
    connection: Option<ConnectionId>,
    /// The server's epoch, once it has said welcome.
    welcomed: Option<Epoch>,
    heard: Time,
    next: Time,
}

/// What a client notices.
#[derive(Debug)]
pub(super) enum Noticed {
    Welcomed(Epoch),
    Lost,
    Message(Box<Envelope>),
}

impl Client {
    pub(super) fn new(me: Who, life: u32, server: Who, hello: Hello) -> Self {
        Self {
            me,
            life,
            server,
            hello,
            connection: None,
            welcomed: None,
            heard: Time(0),
            next: Time(0),
        }
    }

    pub(super) fn hello(role: Role, engine: EngineId, place: WorkerId, version_max: u16) -> Hello {
        Hello {
            version_min: VERSION_MIN,
            version_max,
            role,
            engine: engine.0,
            rank: place.rank.0,
            name: String::new(),
            replica: place.replica.0,
            features: 0,
        }
    }

    pub(super) fn is(&self, id: ConnectionId) -> bool {
        self.connection == Some(id)
    }

    pub(super) fn epoch(&self) -> Option<Epoch> {
        self.welcomed
    }

    /// The life of the process at the other end.
    pub(super) fn server_life(&self, env: &Env) -> Option<u32> {
        self.connection.and_then(|id| env.net.life_of_server(id))
    }

    pub(super) fn next_timeout(&self) -> Time {
        self.next
    }

    /// Connects, asks whether the other side is there, gives up.
    pub(super) fn tick(&mut self, env: &mut Env) -> Option<Noticed> {
        let now = env.now();
        if now < self.next {
            return None;
        }
        self.next = now + HEARTBEAT;
        let Some(id) = self.connection else {
            let version = self.hello.version_max;
            let id = env.net.connect(self.me, self.life, self.server, version);
            self.connection = Some(id);
            self.heard = now;
            let hello = Message::Hello(self.hello.clone());
            env.say(
                id,
                End::Client,
                RequestId(0),
                Duration::ZERO,
                Epoch(0),
                hello,
            );
            return None;
        };
        if now >= self.heard + 3 * HEARTBEAT {
            env.close(id, End::Client);
            return self.lost(now);
        }
        let (epoch, message) = match self.welcomed {
            Some(epoch) => (epoch, Message::Ping(Empty {})),
            None => (Epoch(0), Message::Hello(self.hello.clone())),
        };
        env.say(
            id,
            End::Client,
            RequestId(0),
            Duration::ZERO,
            epoch,
            message,
        );
        None
    }

    fn lost(&mut self, now: Time) -> Option<Noticed> {
        self.connection = None;
        self.next = now + HEARTBEAT / 4;
        self.welcomed.take().map(|_| Noticed::Lost)
    }

    /// Something came over this client's connection.
    pub(super) fn hear(&mut self, now: Time, heard: Heard) -> Option<Noticed> {
        let envelope = match heard {
            Heard::Closed => return self.lost(now),
            Heard::Message(envelope) => envelope,
        };
        self.heard = now;
        match envelope.message {
            Message::Welcome(_) if self.welcomed.is_none() => {
                self.welcomed = Some(envelope.epoch);
                Some(Noticed::Welcomed(envelope.epoch))
            }
            Message::Welcome(_) | Message::Pong(_) => None,
            _ if self.welcomed.is_none() => None,
            _ => Some(Noticed::Message(envelope)),
        }
    }

    /// Says something, if there is anybody to hear it.
    pub(super) fn say(
        &self,
        env: &mut Env,
        correlation: RequestId,
        deadline: Duration,
        message: Message,
    ) {
        if let (Some(id), Some(epoch)) = (self.connection, self.welcomed) {
            env.say(id, End::Client, correlation, deadline, epoch, message);
        }
    }
}
