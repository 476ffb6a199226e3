//! The server end of connections, common to all transports: bounded queues and tasks of the transport.

use std::any::Any;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, mpsc, watch};
use tokio::time::timeout;

use super::queue::{Budget, Queued};
use super::{Address, CloseReason, Frame, Limits, ListenerEvent, PeerId, SendError};

/// Most events queued for [`Listener::next`]; their bytes are bounded by [`Limits::pending_bytes`].
const EVENTS_MAX: usize = 1024;
/// Longest wait of [`Listener::close`] for its tasks.
const CLOSE_DEADLINE: Duration = Duration::from_secs(5);

static NEXT_PEER: AtomicU64 = AtomicU64::new(1);

/// An item in the queue of a peer.
pub(super) enum Outgoing {
    Frame(Queued),
    /// Close the connection after all frames before it are written.
    Close,
}

/// The listener's side of one open peer, kept in [`Peers`].
struct PeerEntry {
    outbox: mpsc::Sender<Outgoing>,
    budget: Budget,
    kill: watch::Sender<Option<CloseReason>>,
}

impl PeerEntry {
    fn kill(&self, reason: CloseReason) {
        self.kill.send_if_modified(|slot| {
            let first = slot.is_none();
            if first {
                *slot = Some(reason);
            }
            first
        });
    }
}

/// The transport task's side of one open peer.
pub(super) struct PeerLink {
    pub(super) peer: PeerId,
    pub(super) outbox: mpsc::Receiver<Outgoing>,
    kill: watch::Receiver<Option<CloseReason>>,
}

impl PeerLink {
    /// Completes when the peer must be closed immediately, with the reason.
    pub(super) fn killed(&self) -> impl Future<Output = CloseReason> + Send + use<> {
        let mut kill = self.kill.clone();
        async move {
            match kill.wait_for(Option::is_some).await {
                Ok(reason) => reason.unwrap_or(CloseReason::ByUs),
                Err(_) => CloseReason::ByUs,
            }
        }
    }
}

/// The open peers of a listener.
pub(super) struct Peers {
    entries: Mutex<HashMap<PeerId, Arc<PeerEntry>>>,
    limits: Arc<Limits>,
}

impl Peers {
    fn entries(&self) -> MutexGuard<'_, HashMap<PeerId, Arc<PeerEntry>>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn next_id() -> PeerId {
        PeerId(NEXT_PEER.fetch_add(1, Ordering::Relaxed))
    }

    /// Adds a peer; from now on frames for it are queued.
    pub(super) fn open(&self, peer: PeerId) -> PeerLink {
        let budget = Budget::new(self.limits.clone());
        let (outbox, outbox_rx) = mpsc::channel(budget.capacity());
        let (kill, kill_rx) = watch::channel(None);
        let entry = PeerEntry {
            outbox,
            budget,
            kill,
        };
        self.entries().insert(peer, Arc::new(entry));
        PeerLink {
            peer,
            outbox: outbox_rx,
            kill: kill_rx,
        }
    }

    pub(super) fn close(&self, peer: PeerId) {
        self.entries().remove(&peer);
    }

    pub(super) fn is_open(&self, peer: PeerId) -> bool {
        self.entries().contains_key(&peer)
    }

    fn get(&self, peer: PeerId) -> Result<Arc<PeerEntry>, SendError> {
        self.entries().get(&peer).cloned().ok_or(SendError::Gone)
    }
}

/// A queued [`ListenerEvent`] that holds the permits of its frame.
pub(super) enum QueuedEvent {
    Opened {
        peer: PeerId,
        uid: u32,
        pid: Option<i32>,
    },
    Frame {
        peer: PeerId,
        queued: Queued,
    },
    Closed {
        peer: PeerId,
        reason: CloseReason,
    },
}

/// The transport tasks' side of a listener. [`Listener::close`] waits until all clones are dropped.
#[derive(Clone)]
pub(super) struct Intake {
    pub(super) events: mpsc::Sender<QueuedEvent>,
    pub(super) peers: Arc<Peers>,
    budget: Budget,
}

impl Intake {
    /// Queues a frame, waiting for room; `Err` once the listener is gone.
    pub(super) async fn frame(&self, peer: PeerId, frame: Frame) -> Result<(), SendError> {
        let queued = tokio::select! {
            queued = self.budget.admit(frame) => queued.ok_or(SendError::Gone)?,
            () = self.events.closed() => return Err(SendError::Gone),
        };
        self.push(QueuedEvent::Frame { peer, queued }).await
    }

    /// Queues an event, waiting for room; `Err` once the listener is gone.
    pub(super) async fn push(&self, event: QueuedEvent) -> Result<(), SendError> {
        self.events.send(event).await.map_err(|_| SendError::Gone)
    }
}

/// Accepts connections and reports their events. Dropping the listener closes all connections and frees the address.
pub struct Listener {
    events: mpsc::Receiver<QueuedEvent>,
    sender: FrameSender,
    address: Address,
    guard: Option<Box<dyn Any + Send + Sync>>,
}

impl Listener {
    /// Creates a listener and its tasks' side. `guard` is dropped first when the listener is closed or dropped.
    pub(super) fn new(
        address: Address,
        limits: &Arc<Limits>,
        guard: impl FnOnce(&Intake) -> Box<dyn Any + Send + Sync>,
    ) -> (Self, Intake) {
        let (events, events_rx) = mpsc::channel(EVENTS_MAX);
        let peers = Arc::new(Peers {
            entries: Mutex::new(HashMap::new()),
            limits: limits.clone(),
        });
        let intake = Intake {
            events,
            peers: peers.clone(),
            budget: Budget::new(limits.clone()),
        };
        let listener = Self {
            events: events_rx,
            sender: FrameSender { peers },
            address,
            guard: Some(guard(&intake)),
        };
        (listener, intake)
    }

    /// Returns the next event; `None` only when the transport's tasks have ended. Cancel safe.
    pub async fn next(&mut self) -> Option<ListenerEvent> {
        let (event, _charge) = self.next_charged().await?;
        Some(event)
    }

    /// As [`Self::next`], with the permits of a frame, which counts against [`Limits::pending_bytes`] until they are
    /// dropped.
    pub(super) async fn next_charged(
        &mut self,
    ) -> Option<(ListenerEvent, Option<OwnedSemaphorePermit>)> {
        let event = self.events.recv().await?;
        Some(match event {
            QueuedEvent::Opened { peer, uid, pid } => {
                (ListenerEvent::Opened { peer, uid, pid }, None)
            }
            QueuedEvent::Frame { peer, queued } => {
                let Queued { frame, permit } = queued;
                (ListenerEvent::Frame { peer, frame }, Some(permit))
            }
            QueuedEvent::Closed { peer, reason } => (ListenerEvent::Closed { peer, reason }, None),
        })
    }

    /// The limits that the listener was created with.
    pub(super) fn limits(&self) -> &Limits {
        &self.sender.peers.limits
    }

    /// Returns a handle to send to the peers of this listener. May be cloned and outlive the listener.
    pub fn sender(&self) -> FrameSender {
        self.sender.clone()
    }

    /// The address of the listener.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Closes every connection and frees the address; pending events are dropped. Returns when the tasks have ended, or
    /// after 5 s.
    pub async fn close(mut self) {
        self.guard = None;
        self.events.close();
        let ended = async { while self.events.recv().await.is_some() {} };
        if timeout(CLOSE_DEADLINE, ended).await.is_err() {
            tracing::warn!(address = %self.address, "listener tasks did not end in time");
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.guard = None;
    }
}

/// Sends frames to the peers of one listener.
#[derive(Clone)]
pub struct FrameSender {
    peers: Arc<Peers>,
}

impl FrameSender {
    /// Queues a frame, waiting at most [`Limits::slow_after`] for room. `Ok` means that the frame is queued, not that
    /// it was read. Frames of one task arrive in order.
    ///
    /// # Errors
    /// [`SendError::Gone`], [`SendError::TooLong`]; [`SendError::Slow`] if there was no room in time, and the peer is
    /// then closed as a slow consumer.
    pub async fn send(&self, peer: PeerId, frame: Frame) -> Result<(), SendError> {
        let entry = self.peers.get(peer)?;
        entry.budget.check(&frame)?;
        let mut kill = entry.kill.subscribe();
        let admitted = tokio::select! {
            admitted = timeout(entry.budget.limits.slow_after, entry.budget.admit(frame)) => admitted,
            _ = kill.wait_for(Option::is_some) => return Err(SendError::Gone),
            () = entry.outbox.closed() => return Err(SendError::Gone),
        };
        match admitted {
            Ok(Some(queued)) => Self::enqueue(&entry, queued),
            Ok(None) => Err(SendError::Gone),
            Err(_) => {
                entry.kill(CloseReason::SlowConsumer);
                Err(SendError::Slow)
            }
        }
    }

    /// Queues a frame without waiting; fails if there is no room.
    ///
    /// # Errors
    /// As [`Self::send`]; without room the peer is closed immediately, because otherwise the frame would be lost
    /// silently.
    pub fn try_send(&self, peer: PeerId, frame: Frame) -> Result<(), SendError> {
        let entry = self.peers.get(peer)?;
        entry.budget.check(&frame)?;
        match entry.budget.try_admit(frame) {
            Ok(queued) => Self::enqueue(&entry, queued),
            Err(error) => {
                entry.kill(CloseReason::SlowConsumer);
                Err(error)
            }
        }
    }

    fn enqueue(entry: &PeerEntry, queued: Queued) -> Result<(), SendError> {
        let sent = entry.outbox.try_send(Outgoing::Frame(queued));
        sent.map_err(|_| SendError::Gone)
    }

    /// Closes a peer after the frames sent to it before are written (for at most [`Limits::slow_after`]). Frames from
    /// the peer may still arrive until its `Closed`. No effect if the peer is gone.
    pub fn disconnect(&self, peer: PeerId) {
        let Ok(entry) = self.peers.get(peer) else {
            return;
        };
        if entry.outbox.try_send(Outgoing::Close).is_err() {
            entry.kill(CloseReason::ByUs);
        }
    }
}
