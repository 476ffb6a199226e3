//! An open connection: messages of the client to the listener, queued frames to the client.

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::{Gate, OpenPeer};
use crate::CloseReason;
use crate::listener::{Outgoing, PeerIntake, QueuedEvent};
use crate::stream::{FrameReader, FrameWriter, Ping, StreamEnd};

/// An open connection. Dropping it closes it.
pub(super) struct OpenConnection<R, W> {
    pub(super) reader: FrameReader<R>,
    pub(super) writer: FrameWriter<W>,
    pub(super) link: OpenPeer,
    pub(super) permit: OwnedSemaphorePermit,
    /// The place of its certificate, or of its user.
    pub(super) place: Option<OwnedSemaphorePermit>,
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> OpenConnection<R, W> {
    pub(super) async fn run(mut self, gate: &Gate) {
        let link = &mut self.link.link;
        let (peer, slow_after) = (link.peer, gate.limits.slow_after);
        let ended = link.ended(slow_after);
        let ping = Ping::default();
        let intake = gate.intake.of(peer);
        let reason = tokio::select! {
            biased;
            reason = ended => reason,
            reason = upward(&mut self.reader, &intake, &ping) => reason,
            reason = downward(&mut self.writer, &mut link.outbox, &ping) => reason,
        };
        if let CloseReason::Violation(violation) = reason {
            gate.intake.peers.note_violation(violation);
        }
        drop(self.reader);
        drop(self.writer);
        drop(self.link);
        drop((self.permit, self.place));
        tracing::debug!(%peer, %reason, "closed a connection");
        gate.intake
            .push(QueuedEvent::Closed { peer, reason })
            .await
            .ok();
    }
}

/// Moves messages of the client to the listener. Waits while the listener has no room for the peer, and reads nothing
/// meanwhile.
async fn upward<R: AsyncRead + Unpin>(
    reader: &mut FrameReader<R>,
    intake: &PeerIntake,
    ping: &Ping,
) -> CloseReason {
    loop {
        let frame = match reader.frame(ping).await {
            Ok(frame) => frame,
            Err(end) => return end.into(),
        };
        if intake.frame(frame).await.is_err() {
            return CloseReason::ByUs;
        }
    }
}

/// Sends READY, then queued frames until the peer must be closed, with PONGs between them.
async fn downward<W: AsyncWrite + Unpin>(
    writer: &mut FrameWriter<W>,
    outbox: &mut mpsc::Receiver<Outgoing>,
    ping: &Ping,
) -> CloseReason {
    writer.ready("ROUTER");
    match send(writer, outbox, ping).await {
        Ok(()) => CloseReason::ByUs,
        Err(end) => end.into(),
    }
}

async fn send<W: AsyncWrite + Unpin>(
    writer: &mut FrameWriter<W>,
    outbox: &mut mpsc::Receiver<Outgoing>,
    ping: &Ping,
) -> Result<(), StreamEnd> {
    loop {
        writer.pong(ping);
        let next = match outbox.try_recv() {
            Ok(next) => Some(next),
            Err(_) => {
                writer.flush().await?;
                tokio::select! {
                    biased;
                    next = outbox.recv() => next,
                    () = ping.came() => continue,
                }
            }
        };
        let Some(Outgoing::Frame(queued, since)) = next else {
            return writer.end().await;
        };
        writer.queued(since);
        writer.frame(queued.frame).await?;
        // The frame counts as queued until its bytes are in the buffer or written.
        drop(queued.permit);
    }
}

impl From<StreamEnd> for CloseReason {
    fn from(end: StreamEnd) -> Self {
        match end {
            StreamEnd::Closed | StreamEnd::Unused => Self::ByPeer,
            StreamEnd::Violation(violation) => Self::Violation(violation),
            StreamEnd::Io(error) => Self::Io(error.kind()),
            StreamEnd::Slow => Self::SlowConsumer,
        }
    }
}
