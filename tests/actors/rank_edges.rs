//! The session of a rank at its edges: requests that are being made when the session ends.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use kvferry_client::{RankSession, RankSessionSettings, SessionMemory};
use kvferry_protocol::{Empty, Message, MessageKind, Role};
use kvferry_transport::{Limits, MemoryTransport, Server, ServerEvent, ServerSettings, Transport};
use kvferry_types::{EngineId, Epoch, Rank, Registration, Replica, Timeline};
use tokio::sync::Notify;

use super::unregister::Memory;
use super::workers::ranks;
use super::world::{HEARTBEAT, soon};

/// Memory whose description takes a while, without an await in between: a device completes its writes first.
struct SlowMemory {
    memory: Memory,
    begun: Notify,
}

impl SessionMemory for SlowMemory {
    type Error = Infallible;

    fn timeline(&self) -> Option<Timeline> {
        None
    }

    fn finish_writes(&self) -> Result<(), Infallible> {
        Ok(())
    }

    async fn registration(&self) -> Result<Registration, Infallible> {
        self.begun.notify_one();
        std::thread::sleep(Duration::from_millis(200));
        let Message::Register(register) = self.memory.registration(1) else {
            panic!("it registers")
        };
        Ok(register.registration)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_registration_is_sent_after_the_memory_was_unregistered() {
    let transport = MemoryTransport::default();
    let listener = transport.listen(&ranks(), Limits::default()).await;
    let settings = ServerSettings {
        epoch: Epoch(1),
        heartbeat: HEARTBEAT,
        roles: vec![Role::Rank],
        features: 0,
        worker_seats: None,
    };
    let mut server = Server::new(listener.expect("it listens"), settings);
    let memory = Arc::new(SlowMemory {
        memory: Memory::new(),
        begun: Notify::new(),
    });
    let session = RankSessionSettings {
        worker: ranks(),
        engine: EngineId([1; 16]),
        replica: Replica(0),
        rank: Rank(0),
        name: "test".to_owned(),
        start_limit: Duration::MAX,
    };
    let transport = Arc::new(transport.clone());
    let rank = RankSession::start(transport, session, Arc::clone(&memory));
    // The worker answers only unregister, and the connection closes after the session has ended.
    let worker = tokio::spawn(async move {
        let mut received = Vec::new();
        while let Some(events) = server.next().await {
            for event in events {
                match event {
                    ServerEvent::Message { peer, envelope } => {
                        received.push(envelope.message.kind());
                        if let Message::Unregister(_) = envelope.message {
                            let done = Message::Unregistered(Empty {});
                            let replier = server.replier();
                            replier.reply(peer, envelope.correlation, done);
                        }
                    }
                    ServerEvent::Closed { .. } => return received,
                    ServerEvent::Opened { .. } => {}
                }
            }
        }
        received
    });
    soon("a registration", memory.begun.notified()).await;
    assert!(soon("the end", rank.unregister(Duration::from_secs(60))).await);
    let received = soon("a closed connection", worker).await.expect("no panic");
    let last = received.last();
    assert_eq!(last, Some(&MessageKind::Unregister), "{received:?}");
}
