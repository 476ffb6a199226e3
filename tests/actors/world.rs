//! A leader in this process, scripted engines and workers, and paused time, which advances only while all tasks wait.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvferry_actors::{LeaderArguments, LeaderHandle, ProcessHandle, run_leader};
use kvferry_core::{AnchorKey, LeaderSettings};
use kvferry_protocol::{
    Attach, AttachDepot, Attached, Call, Ended, Envelope, ErrorCode, Header, Hello, Invalidated,
    Inventory, Load, LoadAnswer, Lookup, LookupAnswer, Memory, Message, PartBody, Role,
    StatedMemory, Status, StatusAnswer, Store, StoreAnswer, TierPages, TransferOrder, VERSION,
    decode, encode,
};
use kvferry_transport::{
    Address, Client, ClientSettings, Closed, Connection, Failure, Frame, Incoming, Limits, LinkId,
    MemoryTransport, Server, ServerSettings, Transport,
};
use kvferry_types::{
    EndedCopy, Epoch, GroupGeometry, GroupId, PageList, Ratio, RequestId, TransferId,
};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

pub const RANKS: u16 = 2;
pub const HEARTBEAT: Duration = Duration::from_secs(1);
/// Longer than anything takes in these tests. Paused time makes the wait cheap.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(600);

pub fn address() -> Address {
    Address::Memory("leader".to_owned())
}

pub fn hello(role: Role, engine: u8, rank: u16) -> Hello {
    Hello {
        engine: [engine; 16],
        rank,
        ..Hello::new(role, "test")
    }
}

/// A server with a leader's settings and the given limits.
pub async fn server(transport: &MemoryTransport, epoch: u64, limits: Limits) -> Server {
    let listener = transport.listen(&address(), limits).await;
    let settings = ServerSettings {
        epoch: Epoch(epoch),
        heartbeat: HEARTBEAT,
        roles: vec![Role::Engine, Role::Worker, Role::Admin],
        features: 0,
        worker_seats: None,
    };
    Server::new(listener.expect("it listens"), settings)
}

pub async fn leader_within(
    transport: &MemoryTransport,
    epoch: u64,
    limits: Limits,
) -> (ProcessHandle, LeaderHandle) {
    let ratio = Ratio::new(4).expect("in bounds");
    let settings = LeaderSettings::new(Epoch(epoch), RANKS, ratio, AnchorKey::new([7; 32]));
    let server = server(transport, epoch, limits).await;
    let started = run_leader(LeaderArguments {
        set_log: None,
        restarts: None,
        settings,
        server,
        supervisor: None,
        raise_epoch: None,
    })
    .await;
    started.expect("a leader")
}

pub async fn leader(transport: &MemoryTransport, epoch: u64) -> (ProcessHandle, LeaderHandle) {
    leader_within(transport, epoch, Limits::default()).await
}

pub fn client(
    transport: &MemoryTransport,
    hello: Hello,
    limits: Limits,
) -> (Client, mpsc::Receiver<Incoming>) {
    let settings = ClientSettings {
        address: address(),
        hello,
        limits,
    };
    Client::start(Arc::new(transport.clone()), settings)
}

/// Waits for a future, at most [`TEST_TIMEOUT`].
pub async fn soon<T>(what: &str, something: impl Future<Output = T>) -> T {
    let waited = timeout(TEST_TIMEOUT, something).await;
    waited.unwrap_or_else(|_| panic!("never: {what}"))
}

/// The scheduler of an engine.
#[derive(Clone)]
pub struct Engine(pub Client);

pub type Answered<T> = Result<T, Failure>;

impl Engine {
    pub fn start(transport: &MemoryTransport, engine: u8) -> Self {
        Self::start_within(transport, engine, Limits::default())
    }

    pub fn start_within(transport: &MemoryTransport, engine: u8, limits: Limits) -> Self {
        let (client, mut incoming) = client(transport, hello(Role::Engine, engine, 0), limits);
        tokio::spawn(async move { while incoming.recv().await.is_some() {} });
        Self(client)
    }

    pub async fn lookup(&self, id: u64, slot: u64, pages: u8) -> Answered<LookupAnswer> {
        self.call(id, lookup(slot, pages), TEST_TIMEOUT, Duration::ZERO)
            .await
    }

    pub async fn store(
        &self,
        id: u64,
        slot: u64,
        pages: u32,
        within: Duration,
    ) -> Answered<StoreAnswer> {
        self.call(id, store(slot, pages), within, TEST_TIMEOUT)
            .await
    }

    pub async fn load(
        &self,
        id: u64,
        slot: u64,
        pages: u32,
        within: Duration,
    ) -> Answered<LoadAnswer> {
        let load = Load {
            slot,
            parts: vec![PartBody {
                group: 0,
                first_page: 0,
                pages: PageList::run(0, pages).into(),
                count: u64::from(pages),
                priority: None,
            }],
            after: 0,
        };
        self.call(id, load, within, TEST_TIMEOUT).await
    }

    async fn call<C: Call>(
        &self,
        id: u64,
        call: C,
        within: Duration,
        grace: Duration,
    ) -> Answered<C::Answer> {
        self.0.call_as(RequestId(id), call, within, grace).await
    }

    pub async fn status(&self) -> StatusAnswer {
        let status = self.0.call(Status { check: false }, TEST_TIMEOUT).await;
        status.expect("a status")
    }

    /// The contradiction that a second count finds, or an empty string. The leader makes at most one count each second.
    pub async fn contradiction(&self) -> String {
        loop {
            match self.0.call(Status { check: true }, TEST_TIMEOUT).await {
                Ok(status) => return status.contradiction.expect("counted"),
                Err(failure) if failure.code == ErrorCode::Busy => {
                    tokio::time::sleep(HEARTBEAT).await;
                }
                Err(failure) => panic!("{failure} instead of a status"),
            }
        }
    }

    /// Requests the status until lookups are served.
    pub async fn until_ready(&self) {
        let ready = async {
            while !self.status().await.ready {
                tokio::time::sleep(HEARTBEAT).await;
            }
        };
        soon("a leader with all its workers", ready).await;
    }
}

pub fn lookup(slot: u64, pages: u8) -> Lookup {
    Lookup {
        slot,
        namespace: Vec::new(),
        hash_bytes: 16,
        hashes: (0..pages).flat_map(|page| [page + 1; 16]).collect(),
        have_pages: 0,
        limit_pages: None,
    }
}

pub fn store(slot: u64, pages: u32) -> Store {
    Store {
        slot,
        parts: vec![PartBody {
            group: 0,
            first_page: 0,
            pages: PageList::run(0, pages).into(),
            count: u64::from(pages),
            priority: None,
        }],
        hash_bytes: 0,
        more_hashes: Vec::new(),
        more_from: 0,
        after: 0,
    }
}

/// A transfer that the leader ordered a worker to carry out.
#[derive(Debug, Clone)]
pub struct Order {
    link: LinkId,
    id: RequestId,
    pub transfer: TransferOrder,
}

/// An event that a worker received from its leader.
#[derive(Debug)]
pub enum Received {
    Welcomed(u64),
    Lost,
    Order(Order),
    Cancel(Vec<u64>),
    /// Connection, id of the order, number of the reset, and the milliseconds that are left for it.
    Invalidate(LinkId, RequestId, u64, u32),
}

/// A scripted worker that copies nothing and sends what the test orders.
pub struct Puppet {
    pub rank: u16,
    client: Client,
    incoming: mpsc::Receiver<Incoming>,
    reading: tokio::task::JoinHandle<()>,
    attaches: u64,
    pages: u32,
    /// The epoch that its depot has seen last.
    pub depot_epoch: u64,
}

impl Puppet {
    pub fn start(transport: &MemoryTransport, rank: u16) -> Self {
        Self::with(transport, rank, VERSION, 32)
    }

    /// A scripted worker that supports no version after `version` and has room for `pages` pages.
    pub fn with(transport: &MemoryTransport, rank: u16, version: u16, pages: u32) -> Self {
        let hello = Hello {
            version_max: version,
            ..hello(Role::Worker, 0, rank)
        };
        let (client, mut received) = client(transport, hello, Limits::default());
        let (sender, incoming) = mpsc::channel(1024);
        let depot = client.clone();
        let reading = tokio::spawn(async move {
            while let Some(next) = received.recv().await {
                match empty_depot(&next) {
                    Some((link, requested, inventory)) => depot.reply(link, requested, inventory),
                    None if sender.send(next).await.is_err() => return,
                    None => {}
                }
            }
        });
        Self {
            rank,
            client,
            incoming,
            reading,
            attaches: 0,
            pages,
            depot_epoch: 0,
        }
    }

    /// Closes its connection. Everything else stays as it is.
    pub async fn leave(self) {
        self.reading.abort();
        let ended = self.reading.await;
        assert!(ended.is_err_and(|error| error.is_cancelled()));
    }

    pub async fn receive(&mut self) -> Received {
        let next = soon("a word of the leader", self.incoming.recv()).await;
        match next.expect("the conversation goes on") {
            Incoming::Welcomed { epoch, .. } => Received::Welcomed(epoch.0),
            Incoming::Lost => Received::Lost,
            Incoming::Answered { .. } => panic!("it asks nothing in order"),
            Incoming::Request { link, envelope } => match envelope.message {
                Message::Transfer(transfer) => Received::Order(Order {
                    link,
                    id: envelope.correlation,
                    transfer,
                }),
                Message::Cancel(cancel) => Received::Cancel(cancel.transfers),
                Message::Invalidate(invalidate) => Received::Invalidate(
                    link,
                    envelope.correlation,
                    invalidate.reset,
                    envelope.deadline_ms,
                ),
                other => panic!("{} is not for this worker", other.kind().name()),
            },
        }
    }

    /// Attaches without running copies, and states the memory of engine 1. The leader must accept both.
    pub async fn attach(&mut self) {
        let attached = self.request_attach().await;
        assert!(attached.is_ok(), "{attached:?} to {}", self.rank);
        let memory = self.memory();
        let admitted = self.client.call(memory, TEST_TIMEOUT).await;
        assert!(admitted.is_ok(), "{admitted:?} to {}", self.rank);
    }

    fn memory(&self) -> Memory {
        let geometry = GroupGeometry {
            group: GroupId(0),
            engine_page_tokens: 16,
            layers: 1,
            page_bytes: 64,
            device_pages: 2 * self.pages,
            content_digest: [0; 16],
            layout_fingerprint: [1; 16],
            ..GroupGeometry::default()
        };
        Memory {
            number: self.attaches,
            memory: Some(StatedMemory {
                engine: [1; 16],
                geometry: geometry.into(),
                arena_pages: vec![TierPages {
                    tier: 2,
                    pages: self.pages,
                }],
            }),
        }
    }

    /// Sends the attach request of [`Self::attach`] and returns the answer, which may be a refusal.
    pub async fn request_attach(&mut self) -> Answered<Attached> {
        self.attaches += 1;
        let attach = Attach {
            replica: 0,
            rank: self.rank,
            ranks: RANKS,
            kv_shards: RANKS,
            attach: self.attaches,
            depots: vec![AttachDepot {
                tier: 2,
                depot: [self.rank as u8; 16],
                epoch: self.depot_epoch,
            }],
        };
        self.client.call(attach, TEST_TIMEOUT).await
    }

    /// Waits until the leader welcomes the worker, then attaches. Returns the leader's epoch.
    pub async fn begin(&mut self) -> u64 {
        loop {
            if let Received::Welcomed(epoch) = self.receive().await {
                self.attach().await;
                return epoch;
            }
        }
    }

    pub async fn order(&mut self) -> Order {
        loop {
            if let Received::Order(order) = self.receive().await {
                return order;
            }
        }
    }

    /// Reports that the copies of an order have ended.
    pub fn ended(&self, order: &Order, complete: bool) {
        let results = order.transfer.transfers.iter().map(|transfer| EndedCopy {
            bytes: 64,
            copy_us: 1,
            ..EndedCopy::new(TransferId(transfer.id), complete)
        });
        let ended = Ended {
            rank: self.rank,
            copies: results.collect(),
        };
        self.client
            .reply(order.link, order.id, Message::Ended(ended));
    }

    /// Attaches to every leader that appears, and reports every copy as complete at once.
    pub fn obey(self) -> tokio::task::JoinHandle<()> {
        self.obey_and_count(Arc::default())
    }

    /// Obeys like [`Self::obey`], and counts the invalidations that it confirms in `invalidated`.
    pub fn obey_and_count(mut self, invalidated: Arc<Mutex<u32>>) -> tokio::task::JoinHandle<()> {
        tokio::spawn(async move {
            loop {
                match self.receive().await {
                    Received::Welcomed(_) => self.attach().await,
                    Received::Order(order) => self.ended(&order, true),
                    Received::Invalidate(link, order, reset, _) => {
                        *invalidated.lock().expect("no panic") += 1;
                        self.client
                            .reply(link, order, Message::Invalidated(Invalidated { reset }));
                    }
                    Received::Lost | Received::Cancel(_) => {}
                }
            }
        })
    }
}

/// The answer of an empty depot to a request for its inventory.
fn empty_depot(incoming: &Incoming) -> Option<(LinkId, RequestId, Message)> {
    let Incoming::Request { link, envelope } = incoming else {
        return None;
    };
    let Message::ReadInventory(read) = envelope.message else {
        return None;
    };
    let inventory = Inventory {
        depot: read.depot,
        read_id: read.read_id,
        from: read.from,
        next: None,
        records: Vec::new(),
    };
    Some((*link, envelope.correlation, Message::Inventory(inventory)))
}

/// Both workers, attached. The leader has read their depots, which are empty, and serves.
pub async fn puppets(transport: &MemoryTransport) -> [Puppet; 2] {
    puppets_of(transport, VERSION, 32).await
}

/// Both workers, attached, with this highest version and room for `pages` pages.
pub async fn puppets_of(transport: &MemoryTransport, version: u16, pages: u32) -> [Puppet; 2] {
    let mut both = [0, 1].map(|rank| Puppet::with(transport, rank, version, pages));
    for puppet in &mut both {
        puppet.begin().await;
    }
    Engine::start(transport, 200).until_ready().await;
    both
}

/// A misbehaving client, without a session: it sends and reads only what the test orders.
pub struct Raw(pub Connection);

impl Raw {
    pub async fn connect(transport: &MemoryTransport, limits: Limits) -> Self {
        let connected = transport.connect(&address(), limits, TEST_TIMEOUT).await;
        Self(connected.expect("it connects"))
    }

    /// Connects and identifies itself as an engine. The leader accepts.
    pub async fn engine(transport: &MemoryTransport, engine: u8, limits: Limits) -> Self {
        let mut raw = Self::connect(transport, limits).await;
        let welcomed = raw.send_message(0, Message::Hello(hello(Role::Engine, engine, 0)));
        assert!(welcomed.await, "it is received");
        let received = raw.receive().await.expect("an answer").message;
        assert!(matches!(received, Message::Welcome(_)), "{received:?}");
        raw
    }

    /// Sends a message. Returns false when the connection is closed.
    pub async fn send_message(&mut self, id: u64, message: Message) -> bool {
        let envelope = Envelope {
            version: VERSION,
            correlation: RequestId(id),
            deadline_ms: 60_000,
            epoch: Epoch(0),
            message,
        };
        let (header, body) = encode(&envelope).expect("it can be said");
        self.send(Frame::new(header.to_vec(), body)).await
    }

    pub async fn send(&mut self, frame: Frame) -> bool {
        soon("room for a frame", self.0.send(frame)).await.is_ok()
    }

    pub async fn receive(&mut self) -> Result<Envelope, Closed> {
        let frame = soon("an answer", self.0.recv()).await?;
        let header = Header::from_bytes(&frame.header).expect("a header");
        Ok(decode(header, &frame.body).expect("a message"))
    }

    pub async fn receive_error(&mut self) -> (u64, ErrorCode) {
        let received = self.receive().await.expect("an answer");
        match received.message {
            Message::Error(error) => (received.correlation.0, error.code()),
            other => panic!("{} instead of an error", other.kind().name()),
        }
    }
}

/// Seconds since `begun`, in the time of the test (paused).
pub fn seconds(begun: Instant) -> f64 {
    begun.elapsed().as_secs_f64()
}
