//! Tests of the transports: shared behaviour, hostile clients of the gate, and the directory checks.

mod bench;
mod descriptors;
mod directories;
mod hostile;
mod parser;
mod pressure;
mod publish;
mod semantics;
mod tls;
mod users;

use std::time::Duration;

use kvferry_types::User;
use tokio::time::timeout;

use super::{
    Address, CloseReason, Connection, Frame, Limits, Listener, ListenerEvent, Origin, PeerId,
    Transport, ZmqTransport,
};

/// Deadline that suffices on a loaded machine; reached only when a test fails.
const TEST_TIMEOUT: Duration = Duration::from_secs(20);

fn frame(header: &str, body: &str) -> Frame {
    Frame::new(header.to_owned(), body.to_owned())
}

async fn event(listener: &mut Listener) -> ListenerEvent {
    let next = timeout(TEST_TIMEOUT, listener.next()).await;
    next.expect("an event in time").expect("tasks run")
}

async fn opened(listener: &mut Listener) -> PeerId {
    match event(listener).await {
        ListenerEvent::Opened { peer, origin } => {
            match origin {
                Origin::Local { user, .. } => assert_eq!(user, User::Own),
                Origin::Certificate(claims) => assert_eq!(claims.deployment, "test"),
            }
            peer
        }
        other => panic!("not opened: {other:?}"),
    }
}

async fn arrived(listener: &mut Listener) -> (PeerId, Frame) {
    match event(listener).await {
        ListenerEvent::Frame { peer, frame } => (peer, frame),
        other => panic!("not a frame: {other:?}"),
    }
}

async fn closed(listener: &mut Listener) -> (PeerId, CloseReason) {
    match event(listener).await {
        ListenerEvent::Closed { peer, reason } => (peer, reason),
        other => panic!("not closed: {other:?}"),
    }
}

async fn received(connection: &mut Connection) -> Frame {
    let received = timeout(TEST_TIMEOUT, connection.recv()).await;
    received.expect("a frame in time").expect("open")
}

/// Returns a temporary directory, removed on drop, and a listener's address in it.
fn own_directory() -> (tempfile::TempDir, Address) {
    let root = tempfile::tempdir().expect("temporary directory");
    let address = Address::Directory(root.path().join("own"));
    (root, address)
}

async fn zmq_listener(limits: Limits) -> (tempfile::TempDir, Address, Listener) {
    let (root, address) = own_directory();
    let listener = ZmqTransport
        .listen(&address, limits)
        .await
        .expect("listens");
    (root, address, listener)
}
