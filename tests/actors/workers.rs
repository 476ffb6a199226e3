//! A real worker with a small depot, in this process.

use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;

use kvferry_actors::{DepotSettings, ProcessHandle, WorkerArguments, run_worker};
use kvferry_memory::DEPOT_HEADER_BYTES;
use kvferry_protocol::{Attached, MemoryAnswer, Message, Role};
use kvferry_transport::{
    Address, Client, ClientSettings, FdReceiver, Incoming, Limits, MemoryTransport, PeerId, Server,
    ServerEvent, ServerSettings, Transport,
};
use kvferry_types::{Epoch, GpuCopy, Rank, Replica, RequestId, Sharding, WorkerId};
use tokio::sync::mpsc;

use super::world::{HEARTBEAT, client, hello, soon};

/// Address to which the worker's rank connects.
pub fn ranks() -> Address {
    Address::Memory("worker".to_owned())
}

/// Starts a worker whose depot lies in `held`, or in memory of its own. The worker receives the leader's unrequested
/// messages from `incoming`, or else from its own connection to the leader.
pub async fn worker_with(
    transport: &MemoryTransport,
    held: Option<OwnedFd>,
    incoming: Option<mpsc::Receiver<Incoming>>,
) -> (ProcessHandle, tempfile::TempDir) {
    worker_of(transport, 1 << 20, held, incoming).await
}

/// Starts such a worker with `bytes` for pages.
async fn worker_of(
    transport: &MemoryTransport,
    bytes: u64,
    held: Option<OwnedFd>,
    incoming: Option<mpsc::Receiver<Incoming>>,
) -> (ProcessHandle, tempfile::TempDir) {
    let listener = transport.listen(&ranks(), Limits::default()).await;
    let settings = ServerSettings {
        epoch: Epoch(0),
        heartbeat: HEARTBEAT,
        roles: vec![Role::Rank],
        features: 0,
        worker_seats: None,
    };
    let server = Server::new(listener.expect("it listens"), settings);
    let owner_only = std::fs::Permissions::from_mode(0o700);
    let directory = tempfile::Builder::new().permissions(owner_only).tempdir();
    let directory = directory.expect("a directory");
    let (leader, says) = client(transport, hello(Role::Worker, 0, 0), Limits::default());
    let started = run_worker(WorkerArguments {
        set_log: None,
        worker: WorkerId {
            replica: Replica(0),
            rank: Rank(0),
        },
        sharding: Sharding::each(1),
        server,
        fds: FdReceiver::bind(directory.path()).expect("a socket"),
        leader,
        incoming: incoming.unwrap_or(says),
        depot: DepotSettings {
            gpu: 0,
            held,
            bytes: DEPOT_HEADER_BYTES + bytes,
            threads: 1,
            node: None,
            lock: false,
            ready: Default::default(),
        },
        disk: None,
        copy_threads: 1,
        store_bytes_per_s: None,
        gpu_copy: GpuCopy::Async,
        gpu_idle: None,
    });
    (started.await.expect("a worker"), directory)
}

/// Starts a worker without an engine.
pub async fn worker(transport: &MemoryTransport) -> (ProcessHandle, tempfile::TempDir) {
    worker_with(transport, None, None).await
}

/// Starts a worker without an engine, with `bytes` for pages.
pub async fn worker_with_room(
    transport: &MemoryTransport,
    bytes: u64,
) -> (ProcessHandle, tempfile::TempDir) {
    worker_of(transport, bytes, None, None).await
}

/// A client as a rank of engine 1.
pub fn rank(transport: &MemoryTransport) -> Client {
    let settings = ClientSettings {
        address: ranks(),
        hello: hello(Role::Rank, 1, 0),
        limits: Limits::default(),
    };
    let (rank, mut incoming) = Client::start(Arc::new(transport.clone()), settings);
    tokio::spawn(async move { while incoming.recv().await.is_some() {} });
    rank
}

/// An attach request of a worker.
#[derive(Debug, Clone, Copy)]
pub struct Attaching {
    pub peer: PeerId,
    pub requested: RequestId,
    /// Number of the attach request.
    pub attach: u64,
    pub depot: [u8; 16],
}

/// A worker's statement of its memory.
#[derive(Debug, Clone, Copy)]
pub struct Stating {
    pub peer: PeerId,
    pub requested: RequestId,
    /// Number of the statement.
    pub number: u64,
    /// Whether the worker has an engine's memory.
    pub memory: bool,
}

/// What a worker says of itself.
#[derive(Debug, Clone, Copy)]
pub enum Statement {
    Attach(Attaching),
    Memory(Stating),
}

/// Waits for the next attach request of a worker, or statement of its memory.
pub async fn statement(server: &mut Server) -> Statement {
    let wait = async {
        loop {
            for event in server.next().await.expect("the server receives") {
                let ServerEvent::Message { peer, envelope } = event else {
                    continue;
                };
                let requested = envelope.correlation;
                match envelope.message {
                    Message::Attach(attach) => {
                        return Statement::Attach(Attaching {
                            peer,
                            requested,
                            attach: attach.attach,
                            depot: attach.depots[0].depot,
                        });
                    }
                    Message::Memory(memory) => {
                        return Statement::Memory(Stating {
                            peer,
                            requested,
                            number: memory.number,
                            memory: memory.memory.is_some(),
                        });
                    }
                    _ => {}
                }
            }
        }
    };
    soon("a statement", wait).await
}

/// Waits for the next attach request of a worker.
pub async fn attaching(server: &mut Server) -> Attaching {
    loop {
        if let Statement::Attach(attaching) = statement(server).await {
            return attaching;
        }
    }
}

/// Accepts attach requests, and statements that there is no memory, until a worker states its memory.
pub async fn stating(server: &mut Server) -> Stating {
    loop {
        match statement(server).await {
            Statement::Memory(stating) if stating.memory => return stating,
            other => accept(server, other),
        }
    }
}

/// Accepts a statement.
pub fn accept(server: &Server, statement: Statement) {
    match statement {
        Statement::Attach(attaching) => agree(server, attaching),
        Statement::Memory(stating) => {
            let answer = Message::MemoryAnswer(MemoryAnswer {
                number: stating.number,
                after: 0,
            });
            let (peer, requested) = (stating.peer, stating.requested);
            server.replier().reply(peer, requested, answer);
        }
    }
}

/// Accepts every statement.
pub async fn accept_all(server: &mut Server) {
    loop {
        let statement = statement(server).await;
        accept(server, statement);
    }
}

/// Accepts an attach request.
pub fn agree(server: &Server, attaching: Attaching) {
    let answer = Message::Attached(Attached {
        attach: attaching.attach,
        after: 0,
    });
    server
        .replier()
        .reply(attaching.peer, attaching.requested, answer);
}

/// Accepts an attach request and the statement that there is no memory, and checks that the worker sends nothing further
/// for half a heartbeat.
pub async fn admit(server: &mut Server, attaching: Attaching) {
    settle(server, attaching).await;
    let quiet = tokio::time::timeout(HEARTBEAT / 2, server.next()).await;
    assert!(quiet.is_err(), "{quiet:?}");
}

/// Accepts an attach request and the statement that there is no memory.
pub async fn settle(server: &mut Server, attaching: Attaching) {
    agree(server, attaching);
    let stated = statement(server).await;
    assert!(
        matches!(stated, Statement::Memory(Stating { memory: false, .. })),
        "{stated:?}"
    );
    accept(server, stated);
}
