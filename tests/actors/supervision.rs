//! A process that has lost one of its parts reports which part and why, and ends. A process that is stopped leaves
//! nothing behind.

use std::os::fd::OwnedFd;
use std::time::Duration;

use kvferry_actors::ProcessHandle;
use kvferry_transport::{Address, Incoming, Limits, MemoryTransport, Transport};
use tokio::sync::mpsc;

use super::workers::{ranks, worker_with};
use super::world::{address, leader, soon};

struct Worker {
    process: ProcessHandle,
    /// Messages that the leader sends unrequested.
    incoming: mpsc::Sender<Incoming>,
    _directory: tempfile::TempDir,
}

async fn worker(transport: &MemoryTransport, held: Option<OwnedFd>) -> Worker {
    let (says, incoming) = mpsc::channel(1);
    let (process, _directory) = worker_with(transport, held, Some(incoming)).await;
    Worker {
        process,
        incoming: says,
        _directory,
    }
}

/// Whether a connection to this address is accepted.
async fn listens(transport: &MemoryTransport, address: &Address) -> bool {
    let connected = transport.connect(address, Limits::default(), Duration::from_secs(1));
    connected.await.is_ok()
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_loses_its_session_with_the_leader_ends_with_the_reason() {
    let transport = MemoryTransport::default();
    let Worker {
        mut process,
        incoming,
        _directory,
    } = worker(&transport, None).await;
    let early = tokio::time::timeout(Duration::from_secs(60), process.failed()).await;
    assert!(early.is_err(), "{early:?}");
    drop(incoming);
    let why = soon("the failure", process.failed()).await;
    assert_eq!(why, "the conversation with the leader has ended");
    soon("the end", process.stop()).await;
}

#[tokio::test(start_paused = true)]
async fn a_worker_whose_memory_is_no_depot_ends_with_the_reason() {
    let transport = MemoryTransport::default();
    let file = tempfile::tempfile().expect("a file");
    let mut worker = worker(&transport, Some(file.into())).await;
    let why = soon("the failure", worker.process.failed()).await;
    assert!(why.contains("depot") || why.contains("bytes"), "{why}");
    soon("the end", worker.process.stop()).await;
}

#[tokio::test(start_paused = true)]
async fn a_stopped_process_no_longer_listens_and_has_not_failed() {
    let transport = MemoryTransport::default();
    let worker = worker(&transport, None).await;
    let (leader, _) = leader(&transport, 1).await;
    assert!(listens(&transport, &ranks()).await);
    assert!(listens(&transport, &address()).await);
    worker.process.stop().await;
    assert!(!listens(&transport, &ranks()).await);
    leader.stop().await;
    assert!(!listens(&transport, &address()).await);
}
