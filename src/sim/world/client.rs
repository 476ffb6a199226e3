//! One session as a client: the client's session on the simulated network.

use std::time::Duration;

use super::net::{ConnectionEnd, ConnectionId, Received};
use super::{NodeId, SimContext};
use kvferry_protocol::{Envelope, Header, Hello, Message, Role, VERSION_MIN, decode};
use kvferry_session::{ClientEvent, ClientRequest, ClientSession, ClientTimes, Failure};
use kvferry_types::{EngineId, Epoch, LinkId, RequestId, Time, WorkerId};

/// Silence after which a side is pinged. After three times that without a message, the connection counts as lost.
pub(super) const HEARTBEAT: Duration = Duration::from_millis(20);
/// Timeout of a request that is bound to one connection.
const ANSWER_GRACE: Duration = Duration::from_secs(2);

/// A client session of a process.
#[derive(Debug)]
pub(super) struct SimClient {
    me: NodeId,
    incarnation: u32,
    server: NodeId,
    session: ClientSession<()>,
    connection: Option<ConnectionId>,
    /// Link of the connection that the server has welcomed, and the server's epoch.
    welcomed: Option<(LinkId, Epoch)>,
}

/// An event of a client session.
#[derive(Debug)]
pub(super) enum SimClientEvent {
    Welcomed {
        epoch: Epoch,
        link: LinkId,
    },
    Lost,
    /// The server sent a request.
    Request {
        link: LinkId,
        envelope: Box<Envelope>,
    },
    Answered(RequestId, Box<Result<Message, Failure>>),
}

impl SimClient {
    pub(super) fn new(
        env: &SimContext,
        (me, incarnation): (NodeId, u32),
        server: NodeId,
        hello: Hello,
    ) -> Self {
        let reconnect = env.setup.reconnect;
        let times = ClientTimes {
            welcome: HEARTBEAT * 3,
            reconnect,
            reconnect_max: reconnect * 4,
        };
        Self {
            me,
            incarnation,
            server,
            session: ClientSession::new(hello, times, Time(0)),
            connection: None,
            welcomed: None,
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
        self.welcomed.map(|(_, epoch)| epoch)
    }

    /// Incarnation of the process at the other end.
    pub(super) fn server_incarnation(&self, env: &SimContext) -> Option<u32> {
        self.connection
            .and_then(|id| env.net.incarnation_of_server(id))
    }

    pub(super) fn next_timeout(&self) -> Time {
        self.session.next_timeout()
    }

    pub(super) fn tick(&mut self, env: &mut SimContext) -> Vec<SimClientEvent> {
        self.session.tick(env.now());
        self.act(env)
    }

    /// Handles bytes or a close that came over this client's connection.
    pub(super) fn receive(
        &mut self,
        env: &mut SimContext,
        received: Received,
    ) -> Vec<SimClientEvent> {
        match received {
            Received::Closed => self.session.disconnected(env.now(), "closed"),
            Received::Bytes { header, body } => {
                let read = Header::from_bytes(&header).and_then(|header| decode(header, &body));
                if let Err(error) = read {
                    env.violated(format!("a message was not understood: {error}"));
                }
                self.session.received(env.now(), &header, &body);
            }
        }
        self.act(env)
    }

    /// Sends a request, over this connection or the next one. `wait` is the time until its deadline, and how much
    /// longer its answer is of use.
    pub(super) fn request(
        &mut self,
        env: &mut SimContext,
        id: RequestId,
        wait: (Duration, Duration),
        message: Message,
    ) {
        self.send(env, id, wait, None, message);
    }

    /// Sends a request, over this connection or not at all.
    pub(super) fn request_here(&mut self, env: &mut SimContext, id: RequestId, message: Message) {
        if let Some((link, _)) = self.welcomed {
            self.request_on(env, link, id, message);
        }
    }

    /// Sends a request, over the connection with this link id or not at all.
    pub(super) fn request_on(
        &mut self,
        env: &mut SimContext,
        link: LinkId,
        id: RequestId,
        message: Message,
    ) {
        self.send(env, id, (ANSWER_GRACE, Duration::ZERO), Some(link), message);
    }

    fn send(
        &mut self,
        env: &mut SimContext,
        id: RequestId,
        (left, grace): (Duration, Duration),
        link: Option<LinkId>,
        message: Message,
    ) {
        let now = env.now();
        let request = ClientRequest {
            id,
            message,
            deadline: now + left,
            grace,
            link,
            to: (),
        };
        self.session.request(now, request);
        self.nothing_more(env);
    }

    /// Answers a request that came over the connection with this link id.
    pub(super) fn reply(
        &mut self,
        env: &mut SimContext,
        link: LinkId,
        correlation: RequestId,
        message: Message,
    ) {
        self.session.reply(env.now(), link, correlation, message);
        self.nothing_more(env);
    }

    /// Sends what is queued. An event of the session at this point is a violation.
    fn nothing_more(&mut self, env: &mut SimContext) {
        let noticed = self.act(env);
        if !noticed.is_empty() {
            env.violated(format!("a client notices {noticed:?} while it sends"));
        }
    }

    fn act(&mut self, env: &mut SimContext) -> Vec<SimClientEvent> {
        let mut noticed = Vec::new();
        while let Some(event) = self.session.poll() {
            match event {
                ClientEvent::Connect => {
                    self.connection = Some(env.net.connect(self.me, self.incarnation, self.server));
                    self.session.connected(env.now());
                }
                ClientEvent::Disconnect => {
                    if let Some(id) = self.connection.take() {
                        env.close(id, ConnectionEnd::Client);
                    }
                }
                ClientEvent::Send(message) => {
                    if let Some(id) = self.connection {
                        env.send(id, ConnectionEnd::Client, message);
                    }
                }
                ClientEvent::Welcomed { epoch, link, .. } => {
                    self.welcomed = Some((link, epoch));
                    noticed.push(SimClientEvent::Welcomed { epoch, link });
                }
                ClientEvent::Lost => {
                    self.welcomed = None;
                    noticed.push(SimClientEvent::Lost);
                }
                ClientEvent::Request { link, envelope } => {
                    noticed.push(SimClientEvent::Request { link, envelope });
                }
                ClientEvent::Answered { id, answer, .. } => {
                    noticed.push(SimClientEvent::Answered(id, Box::new(answer)));
                }
                // The process itself repeats requests that it still needs.
                ClientEvent::Failed { .. } => {}
            }
        }
        noticed
    }
}
