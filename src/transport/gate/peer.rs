//! An open connection: messages of the client to the listener, queued frames to the client.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{Notify, OwnedSemaphorePermit, mpsc};
use tokio::time::timeout;

use super::{CHUNK_BYTES, ClientReader, Gate, OpenPeer};
use crate::listener::{Outgoing, PeerIntake, QueuedEvent};
use crate::zmtp::{self, Item, Part, PingContext};
use crate::{CloseReason, Frame};

/// The latest unanswered PING. One is enough, because a PONG only proves liveness.
#[derive(Default)]
struct Ping {
    context: Mutex<Option<PingContext>>,
    came: Notify,
}

impl Ping {
    fn put(&self, context: PingContext) {
        let mut slot = self.context.lock().unwrap_or_else(PoisonError::into_inner);
        *slot = Some(context);
        self.came.notify_one();
    }

    fn take(&self) -> Option<PingContext> {
        let mut slot = self.context.lock().unwrap_or_else(PoisonError::into_inner);
        slot.take()
    }
}

/// An open connection. Dropping it closes it.
pub(super) struct OpenConnection<R, W> {
    pub(super) client: ClientReader<R>,
    pub(super) write: W,
    pub(super) link: OpenPeer,
    pub(super) permit: OwnedSemaphorePermit,
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> OpenConnection<R, W> {
    pub(super) async fn run(mut self, gate: &Gate) {
        let link = &mut self.link.link;
        let (peer, slow_after) = (link.peer, gate.limits.slow_after);
        let (killed, closing) = (link.killed(), link.closing());
        let ping = Ping::default();
        let mut writer = ClientWriter {
            write: self.write,
            buffer: Vec::with_capacity(CHUNK_BYTES),
            slow_after,
        };
        let intake = gate.intake.of(peer);
        let reason = tokio::select! {
            biased;
            reason = killed => reason,
            reason = upward(&mut self.client, &intake, &ping) => reason,
            reason = writer.run(&mut link.outbox, &ping) => reason,
            () = async { closing.await; tokio::time::sleep(slow_after).await } => CloseReason::ByUs,
        };
        drop(self.client);
        drop(writer);
        drop(self.link);
        drop(self.permit);
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
    client: &mut ClientReader<R>,
    intake: &PeerIntake,
    ping: &Ping,
) -> CloseReason {
    let mut message = PartialMessage::default();
    loop {
        match client.fill().await {
            Ok(true) => {}
            Ok(false) => return CloseReason::ByPeer,
            Err(error) => return closed_by(&error),
        }
        loop {
            let frame = match client.next() {
                Ok(Some(item)) => message.take(item, ping),
                Ok(None) => break,
                Err(violation) => return CloseReason::Violation(violation),
            };
            if let Some(frame) = frame
                && intake.frame(frame).await.is_err()
            {
                return CloseReason::ByUs;
            }
        }
    }
}

/// The message that is being received.
#[derive(Default)]
struct PartialMessage {
    parts: [Vec<u8>; 2],
    current: usize,
}

impl PartialMessage {
    /// Adds an item of the stream. Returns the message once it is complete.
    fn take(&mut self, item: Item<'_>, ping: &Ping) -> Option<Frame> {
        match item {
            Item::Part { part, bytes } => {
                self.current = part as usize;
                // Within the limits: the parser has checked it. The system gives the memory when it is written.
                self.parts[self.current] =
                    Vec::with_capacity(usize::try_from(bytes).unwrap_or(usize::MAX));
            }
            Item::Payload(bytes) => self.parts[self.current].extend_from_slice(bytes),
            Item::End => {
                let [header, body] = std::mem::take(&mut self.parts);
                return Some(Frame::new(header, body));
            }
            Item::Ping(context) => ping.put(context),
            Item::Greeting | Item::Ready | Item::Ignored => {}
        }
        None
    }
}

fn closed_by(error: &io::Error) -> CloseReason {
    match error.kind() {
        io::ErrorKind::ConnectionReset
        | io::ErrorKind::BrokenPipe
        | io::ErrorKind::UnexpectedEof => CloseReason::ByPeer,
        kind => CloseReason::Io(kind),
    }
}

/// The direction to the client.
struct ClientWriter<W> {
    write: W,
    /// Bytes to be written: heads of parts, and short parts, of several frames.
    buffer: Vec<u8>,
    slow_after: Duration,
}

impl<W: AsyncWrite + Unpin> ClientWriter<W> {
    /// Sends READY, then queued frames until the peer must be closed, with PONGs between them.
    async fn run(&mut self, outbox: &mut mpsc::Receiver<Outgoing>, ping: &Ping) -> CloseReason {
        self.buffer.extend_from_slice(&zmtp::ready("ROUTER", b""));
        if let Err(reason) = self.send(outbox, ping).await {
            return reason;
        }
        if let Err(error) = self.write.shutdown().await {
            tracing::debug!(%error, "cannot end a stream");
        }
        CloseReason::ByUs
    }

    async fn send(
        &mut self,
        outbox: &mut mpsc::Receiver<Outgoing>,
        ping: &Ping,
    ) -> Result<(), CloseReason> {
        loop {
            if let Some(context) = ping.take() {
                self.buffer.extend_from_slice(&zmtp::pong(&context));
            }
            let next = match outbox.try_recv() {
                Ok(next) => Some(next),
                Err(_) => {
                    self.flush().await?;
                    tokio::select! {
                        next = outbox.recv() => next,
                        () = ping.came.notified() => continue,
                    }
                }
            };
            let Some(Outgoing::Frame(queued)) = next else {
                return self.flush().await;
            };
            let Frame { header, body } = queued.frame;
            self.part(Part::Header, header).await?;
            self.part(Part::Body, body).await?;
            // The frame counts as queued until its bytes are in the buffer or written.
            drop(queued.permit);
        }
    }

    /// Appends a part to the buffer, or writes it where it is long.
    async fn part(&mut self, part: Part, bytes: Bytes) -> Result<(), CloseReason> {
        zmtp::put_head(&mut self.buffer, part, bytes.len() as u64);
        if self.buffer.len() + bytes.len() <= CHUNK_BYTES {
            self.buffer.extend_from_slice(&bytes);
            return Ok(());
        }
        self.flush().await?;
        self.put(&bytes).await
    }

    async fn flush(&mut self) -> Result<(), CloseReason> {
        let mut buffer = std::mem::take(&mut self.buffer);
        self.put(&buffer).await?;
        buffer.clear();
        self.buffer = buffer;
        Ok(())
    }

    /// Writes all bytes. Fails when the client takes none for `slow_after`.
    async fn put(&mut self, mut bytes: &[u8]) -> Result<(), CloseReason> {
        while !bytes.is_empty() {
            match timeout(self.slow_after, self.write.write(bytes)).await {
                Ok(Ok(0)) => return Err(CloseReason::ByPeer),
                Ok(Ok(written)) => bytes = &bytes[written..],
                Ok(Err(error)) => return Err(closed_by(&error)),
                Err(_) => return Err(CloseReason::SlowConsumer),
            }
        }
        Ok(())
    }
}
