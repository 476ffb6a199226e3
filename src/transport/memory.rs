//! The transport within one process: the events, limits and errors of the socket transport, without I/O. Follows paused
//! time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{timeout, timeout_at};

use super::connection::TaskSide;
use super::listener::{Intake, Outgoing, PeerIntake, PeerLink, Peers, QueuedEvent};
use super::queue::{Budget, Queued};
use super::zmtp::{Part, check_part};
use kvferry_types::User;

use super::{
    Address, BoxFuture, CloseReason, Closed, Connection, Frame, Limits, Listener, Origin,
    Transport, TransportError, UsedBy, Violation,
};

/// Connects listeners and clients by name. Clones share their names; separate instances share nothing.
#[derive(Clone, Default)]
pub struct MemoryTransport {
    registry: Arc<Registry>,
    /// Process id reported for connections made through this instance. `None`: that of this process.
    pid: Option<i32>,
    /// User reported for connections made through this instance.
    user: User,
}

#[derive(Default)]
struct Registry {
    slots: Mutex<HashMap<String, Slot>>,
    appeared: Notify,
}

/// The entry of a listener, for its clients.
#[derive(Clone)]
struct Slot {
    intake: Intake,
    connections: Arc<Semaphore>,
    limits: Arc<Limits>,
}

impl Registry {
    fn slots(&self) -> MutexGuard<'_, HashMap<String, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Frees the name when the listener is dropped.
struct Claim {
    registry: Arc<Registry>,
    name: String,
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.registry.slots().remove(&self.name);
    }
}

impl Transport for MemoryTransport {
    fn listen<'a>(
        &'a self,
        address: &'a Address,
        limits: Limits,
    ) -> BoxFuture<'a, Result<Listener, TransportError>> {
        Box::pin(async move { self.listen_now(address, limits) })
    }

    fn connect<'a>(
        &'a self,
        address: &'a Address,
        limits: Limits,
        deadline: Duration,
    ) -> BoxFuture<'a, Result<Connection, TransportError>> {
        Box::pin(self.connect_by(address, limits, deadline))
    }
}

impl MemoryTransport {
    /// Returns a clone that shares the names and whose connections report `pid` as their process.
    pub fn of_process(&self, pid: i32) -> Self {
        Self {
            registry: Arc::clone(&self.registry),
            pid: Some(pid),
            user: self.user,
        }
    }

    /// Returns a clone that shares the names and whose connections report `user` as their user.
    pub fn of_user(&self, user: User) -> Self {
        Self {
            user,
            ..self.clone()
        }
    }

    fn listen_now(&self, address: &Address, limits: Limits) -> Result<Listener, TransportError> {
        let name = name_of(address)?;
        limits.check()?;
        let limits = Arc::new(limits);
        let mut slots = self.registry.slots();
        if slots.contains_key(name) {
            return Err(TransportError::InUse {
                address: address.clone(),
                by: UsedBy::process(std::process::id()),
            });
        }
        let claim = Claim {
            registry: self.registry.clone(),
            name: name.to_owned(),
        };
        let (listener, intake) = Listener::new(address.clone(), &limits, |_| Box::new(claim));
        let slot = Slot {
            intake,
            connections: Arc::new(Semaphore::new(limits.connections)),
            limits,
        };
        slots.insert(name.to_owned(), slot);
        drop(slots);
        self.registry.appeared.notify_waiters();
        Ok(listener)
    }

    async fn connect_by(
        &self,
        address: &Address,
        limits: Limits,
        deadline: Duration,
    ) -> Result<Connection, TransportError> {
        let name = name_of(address)?;
        limits.check()?;
        let unreachable = || TransportError::Unreachable {
            address: address.clone(),
            waited: deadline,
        };
        let by = tokio::time::Instant::now() + deadline;
        let slot = timeout_at(by, self.find(name))
            .await
            .map_err(|_| unreachable())?;
        let permit =
            slot.connections
                .clone()
                .try_acquire_owned()
                .map_err(|_| TransportError::Refused {
                    address: address.clone(),
                    detail: "it has as many connections as it may".to_owned(),
                })?;
        let peer = Peers::next_id();
        let peer_link = slot.intake.peers.open(peer);
        let opened = QueuedEvent::Opened {
            peer,
            origin: Origin::Local {
                user: self.user,
                pid: self.pid.or_else(|| i32::try_from(std::process::id()).ok()),
            },
        };
        match timeout_at(by, slot.intake.push(opened)).await {
            Ok(Ok(())) => {}
            _ => {
                slot.intake.peers.close(peer);
                return Err(unreachable());
            }
        }
        let (connection, task_side) = Connection::queued(&Arc::new(limits));
        let wire = Wire {
            slot,
            peer: peer_link,
            client: task_side,
        };
        tokio::spawn(wire.run(permit));
        Ok(connection)
    }

    /// Waits until a listener exists under `name`.
    async fn find(&self, name: &str) -> Slot {
        loop {
            let appeared = self.registry.appeared.notified();
            tokio::pin!(appeared);
            appeared.as_mut().enable();
            if let Some(slot) = self.registry.slots().get(name) {
                return slot.clone();
            }
            appeared.await;
        }
    }
}

fn name_of(address: &Address) -> Result<&str, TransportError> {
    match address {
        Address::Memory(name) => Ok(name),
        Address::Directory(_) | Address::Tcp(_) => Err(TransportError::Address(address.clone())),
    }
}

/// One connection: stands in for the socket and the gate of the ZMQ transport.
struct Wire {
    slot: Slot,
    peer: PeerLink,
    client: TaskSide,
}

impl Wire {
    async fn run(mut self, permit: OwnedSemaphorePermit) {
        let (peer, killed) = (self.peer.peer, self.peer.killed());
        let Slot { intake, limits, .. } = &self.slot;
        let frames = intake.of(peer);
        let TaskSide {
            outbox,
            inbox,
            inbound,
            ..
        } = &mut self.client;
        let mut client_reason = Closed::ByServer;
        let reason = tokio::select! {
            biased;
            () = intake.events.closed() => None,
            reason = killed => Some(reason),
            violation = upward(&frames, limits, outbox) => {
                Some(violation)
            }
            end = downward(limits, &mut self.peer, inbox, inbound) => match end {
                DownwardEnd::ByUs => Some(CloseReason::ByUs),
                DownwardEnd::Slow => Some(CloseReason::SlowConsumer),
                DownwardEnd::Refused(closed) => {
                    client_reason = closed;
                    Some(CloseReason::ByPeer)
                }
                DownwardEnd::ByPeer => {
                    outbox.close();
                    let rest = upward_rest(&frames, limits, outbox).await;
                    Some(rest.unwrap_or(CloseReason::ByPeer))
                }
            },
        };
        intake.peers.close(peer);
        let intake = intake.clone();
        self.client.close(client_reason);
        drop(permit);
        if let Some(reason) = reason {
            intake.push(QueuedEvent::Closed { peer, reason }).await.ok();
        }
    }
}

/// Moves frames to the listener while the client may send. Returns only on a violation.
async fn upward(
    frames: &PeerIntake,
    limits: &Limits,
    outbox: &mut mpsc::Receiver<Queued>,
) -> CloseReason {
    match upward_rest(frames, limits, outbox).await {
        Some(reason) => reason,
        None => std::future::pending().await,
    }
}

/// Moves frames to the listener until the client's queue is closed and empty, or a frame is refused.
async fn upward_rest(
    frames: &PeerIntake,
    limits: &Limits,
    outbox: &mut mpsc::Receiver<Queued>,
) -> Option<CloseReason> {
    while let Some(queued) = outbox.recv().await {
        if let Err(violation) = check(limits, &queued.frame) {
            return Some(CloseReason::Violation(violation));
        }
        frames.frame(queued.frame).await.ok()?;
    }
    None
}

enum DownwardEnd {
    ByUs,
    ByPeer,
    Slow,
    /// The client refused a frame from the listener.
    Refused(Closed),
}

/// Moves frames from the listener to the client.
async fn downward(
    limits: &Limits,
    peer: &mut PeerLink,
    inbox: &mpsc::Sender<Queued>,
    inbound: &Budget,
) -> DownwardEnd {
    loop {
        let outgoing = tokio::select! {
            outgoing = peer.outbox.recv() => outgoing,
            () = inbox.closed() => return DownwardEnd::ByPeer,
        };
        let Some(Outgoing::Frame(queued, _)) = outgoing else {
            return DownwardEnd::ByUs;
        };
        if let Err(violation) = check(&inbound.limits, &queued.frame) {
            return DownwardEnd::Refused(Closed::Violation(violation));
        }
        let deliver = async {
            let moved = inbound.admit(queued.frame.clone()).await?;
            inbox.send(moved).await.ok()
        };
        let delivered = tokio::select! {
            delivered = timeout(limits.slow_after, deliver) => delivered,
            () = inbox.closed() => return DownwardEnd::ByPeer,
        };
        match delivered {
            Ok(Some(())) => {}
            Ok(None) => return DownwardEnd::ByPeer,
            Err(_) => return DownwardEnd::Slow,
        }
    }
}

fn check(limits: &Limits, frame: &Frame) -> Result<(), Violation> {
    check_part(limits, Part::Header, frame.header.len() as u64)?;
    check_part(limits, Part::Body, frame.body.len() as u64)
}
