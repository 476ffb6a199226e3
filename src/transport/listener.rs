//! The server end of connections, common to all transports: bounded queues and tasks of the transport.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::{Instant, timeout};

use super::clock::within;
use super::queue::{Budget, Queued};
use super::zmtp::Violation;
use super::{Address, CloseReason, Frame, Limits, ListenerEvent, Origin, PeerId, SendError};

/// Most events queued for [`Listener::next`]; their bytes are bounded by [`Limits::pending_bytes`].
const EVENTS_MAX: usize = 1024;
/// Most frames of one peer that are queued for [`Listener::next`]: a frame waits for at most this many of each other
/// peer, however fast the others send.
pub(super) const PEER_FRAMES_MAX: usize = 64;
/// Longest wait of [`Listener::close`] for its tasks.
const CLOSE_DEADLINE: Duration = Duration::from_secs(5);

static NEXT_PEER: AtomicU64 = AtomicU64::new(1);

/// An item in the queue of a peer.
pub(super) enum Outgoing {
    /// A frame, and when it was queued.
    Frame(Queued, Instant),
    /// Close the connection after all frames before it are written.
    Close,
}

/// The listener's side of one open peer, kept in [`Peers`].
struct PeerEntry {
    outbox: mpsc::Sender<Outgoing>,
    budget: Budget,
    end: watch::Sender<End>,
}

/// Whether a peer is to be closed by this side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    No,
    /// When the frames that are queued for it are written.
    AfterFrames,
    Now(CloseReason),
}

impl End {
    fn is_now(&self) -> bool {
        matches!(self, Self::Now(_))
    }
}

impl PeerEntry {
    fn kill(&self, reason: CloseReason) {
        self.end.send_if_modified(|end| {
            let first = !end.is_now();
            if first {
                *end = End::Now(reason);
            }
            first
        });
    }

    fn close_after_frames(&self) {
        self.end.send_if_modified(|end| {
            let first = *end == End::No;
            if first {
                *end = End::AfterFrames;
            }
            first
        });
        if self.outbox.try_send(Outgoing::Close).is_err() {
            self.kill(CloseReason::ByUs);
        }
    }
}

/// The transport task's side of one open peer.
pub(super) struct PeerLink {
    pub(super) peer: PeerId,
    pub(super) outbox: mpsc::Receiver<Outgoing>,
    end: watch::Receiver<End>,
}

impl PeerLink {
    /// Completes when the peer must be closed immediately, with the reason.
    pub(super) fn killed(&self) -> impl Future<Output = CloseReason> + Send + use<> {
        let mut end = self.end.clone();
        async move {
            match end.wait_for(End::is_now).await.as_deref() {
                Ok(End::Now(reason)) => *reason,
                _ => CloseReason::ByUs,
            }
        }
    }

    /// Completes when the connection must end, with the reason: as [`Self::killed`], or `limit` after the begin of a close
    /// behind queued frames.
    pub(super) fn ended(
        &self,
        limit: Duration,
    ) -> impl Future<Output = CloseReason> + Send + use<> {
        let (mut end, killed) = (self.end.clone(), self.killed());
        async move {
            end.wait_for(|end| *end != End::No).await.ok();
            timeout(limit, killed).await.unwrap_or(CloseReason::ByUs)
        }
    }
}

/// The open peers of a listener.
pub(super) struct Peers {
    entries: Mutex<BTreeMap<PeerId, Arc<PeerEntry>>>,
    limits: Arc<Limits>,
    /// Connections that were refused before they were open.
    refused: AtomicU64,
    /// Connections that were closed because their bytes broke the rules.
    violations: AtomicU64,
    /// Those of them that were closed because a part was longer than its limit.
    too_long: AtomicU64,
}

/// What a listener refused, since its start.
pub(crate) struct RefusedCounts {
    /// Connections, before they were open.
    pub(crate) handshakes: u64,
    /// Open connections that were closed because their bytes broke the rules.
    pub(crate) violations: u64,
    /// Those of them whose bytes were a part longer than its limit.
    pub(crate) too_long: u64,
}

impl Peers {
    fn entries(&self) -> MutexGuard<'_, BTreeMap<PeerId, Arc<PeerEntry>>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn next_id() -> PeerId {
        PeerId(NEXT_PEER.fetch_add(1, Ordering::Relaxed))
    }

    /// Adds a peer; from now on frames for it are queued.
    pub(super) fn open(&self, peer: PeerId) -> PeerLink {
        let budget = Budget::new(self.limits.clone());
        let (outbox, outbox_rx) = mpsc::channel(budget.capacity());
        let (end, end_rx) = watch::channel(End::No);
        let entry = PeerEntry {
            outbox,
            budget,
            end,
        };
        self.entries().insert(peer, Arc::new(entry));
        PeerLink {
            peer,
            outbox: outbox_rx,
            end: end_rx,
        }
    }

    pub(super) fn close(&self, peer: PeerId) {
        self.entries().remove(&peer);
    }

    /// Counts a connection that is refused before it is open.
    pub(super) fn note_refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a connection that is closed because its bytes broke the rules.
    pub(super) fn note_violation(&self, violation: Violation) {
        self.violations.fetch_add(1, Ordering::Relaxed);
        if matches!(violation, Violation::HeaderTooLong | Violation::BodyTooLong) {
            self.too_long.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn get(&self, peer: PeerId) -> Result<Arc<PeerEntry>, SendError> {
        self.entries().get(&peer).cloned().ok_or(SendError::Gone)
    }
}

/// A queued [`ListenerEvent`] that holds the permits of its frame.
pub(super) enum QueuedEvent {
    Opened {
        peer: PeerId,
        origin: Origin,
    },
    Frame {
        peer: PeerId,
        queued: Queued,
        /// One of the places of the peer, free again once the event is taken.
        place: OwnedSemaphorePermit,
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
    /// Nothing is sent: the listener waits until all clones are dropped.
    _task: mpsc::Sender<()>,
}

impl Intake {
    /// The part of a peer, made once for each connection.
    pub(super) fn of(&self, peer: PeerId) -> PeerIntake {
        PeerIntake {
            peer,
            intake: self.clone(),
            places: Arc::new(Semaphore::new(PEER_FRAMES_MAX)),
        }
    }

    /// Queues an event, waiting for room; `Err` once the listener is gone.
    pub(super) async fn push(&self, event: QueuedEvent) -> Result<(), SendError> {
        self.events.send(event).await.map_err(|_| SendError::Gone)
    }
}

/// The frames of one peer on their way to the listener: at most [`PEER_FRAMES_MAX`] in its queue.
pub(super) struct PeerIntake {
    peer: PeerId,
    intake: Intake,
    places: Arc<Semaphore>,
}

impl PeerIntake {
    /// Queues a frame, waiting for room; `Err` once the listener is gone. Peers that wait are served in turn.
    pub(super) async fn frame(&self, frame: Frame) -> Result<(), SendError> {
        let admitted = async {
            let place = self.places.clone().acquire_owned().await.ok()?;
            Some((place, self.intake.budget.admit(frame).await?))
        };
        let (place, queued) = tokio::select! {
            biased;
            admitted = admitted => admitted.ok_or(SendError::Gone)?,
            () = self.intake.events.closed() => return Err(SendError::Gone),
        };
        let peer = self.peer;
        let event = QueuedEvent::Frame {
            peer,
            queued,
            place,
        };
        self.intake.push(event).await
    }
}

/// Accepts connections and reports their events. Dropping the listener closes all connections and frees the address.
pub struct Listener {
    events: mpsc::Receiver<QueuedEvent>,
    tasks: mpsc::Receiver<()>,
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
            entries: Mutex::new(BTreeMap::new()),
            limits: limits.clone(),
            refused: AtomicU64::new(0),
            violations: AtomicU64::new(0),
            too_long: AtomicU64::new(0),
        });
        let (task, tasks) = mpsc::channel(1);
        let intake = Intake {
            _task: task,
            events,
            peers: peers.clone(),
            budget: Budget::new(limits.clone()),
        };
        let listener = Self {
            events: events_rx,
            tasks,
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
        Some(charged(self.events.recv().await?))
    }

    /// As [`Self::next_charged`], without waiting; `None` also when no event is queued.
    pub(super) fn try_next_charged(
        &mut self,
    ) -> Option<(ListenerEvent, Option<OwnedSemaphorePermit>)> {
        Some(charged(self.events.try_recv().ok()?))
    }

    /// Events that are queued.
    pub(super) fn queued(&self) -> usize {
        self.events.len()
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
        if timeout(CLOSE_DEADLINE, self.tasks.recv()).await.is_err() {
            tracing::warn!(address = %self.address, "listener tasks did not end in time");
        }
    }
}

/// Splits a queued event into the event and the permits of its frame. Gives the place of its peer in the queue back.
fn charged(event: QueuedEvent) -> (ListenerEvent, Option<OwnedSemaphorePermit>) {
    match event {
        QueuedEvent::Opened { peer, origin } => (ListenerEvent::Opened { peer, origin }, None),
        QueuedEvent::Frame {
            peer,
            queued,
            place,
        } => {
            drop(place);
            let Queued { frame, permit } = queued;
            (ListenerEvent::Frame { peer, frame }, Some(permit))
        }
        QueuedEvent::Closed { peer, reason } => (ListenerEvent::Closed { peer, reason }, None),
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
        let mut end = entry.end.subscribe();
        let admitted = tokio::select! {
            biased;
            admitted = within(entry.budget.limits.slow_after, entry.budget.admit(frame)) => admitted,
            _ = end.wait_for(End::is_now) => return Err(SendError::Gone),
            () = entry.outbox.closed() => return Err(SendError::Gone),
        };
        match admitted {
            Some(Some(queued)) => Self::enqueue(&entry, queued),
            Some(None) => Err(SendError::Gone),
            None => {
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
        let sent = entry
            .outbox
            .try_send(Outgoing::Frame(queued, Instant::now()));
        sent.map_err(|_| SendError::Gone)
    }

    pub(super) fn refused(&self) -> RefusedCounts {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        RefusedCounts {
            handshakes: count(&self.peers.refused),
            violations: count(&self.peers.violations),
            too_long: count(&self.peers.too_long),
        }
    }

    /// Closes a peer after the frames sent to it before are written (for at most [`Limits::slow_after`]). Frames from
    /// the peer may still arrive until its `Closed`. No effect if the peer is gone.
    pub fn disconnect(&self, peer: PeerId) {
        if let Ok(entry) = self.peers.get(peer) {
            entry.close_after_frames();
        }
    }
}
