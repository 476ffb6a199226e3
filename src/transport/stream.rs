//! Frames on a stream of bytes, in both directions: ZMTP after and in the handshake, for both ends.

#[cfg(test)]
mod tests;

use std::io;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::clock::{within, within_late};
use super::zmtp::{self, Item, Parser, Part, PingContext};
use super::{Frame, Limits, Violation};

/// Most bytes of one read, and of the frames that one write collects.
pub(super) const CHUNK_BYTES: usize = 64 << 10;
/// How many times as long as `slow_after` a frame may wait for the other side to read it: a peer that reads a little now and
/// then is slow, too.
const WAIT_FACTOR: u32 = 6;

/// Why nothing more is read or written.
#[derive(Debug, thiserror::Error)]
pub(super) enum StreamEnd {
    #[error("the other side closed the connection")]
    Closed,
    #[error("the other side sent nothing and closed the connection")]
    Unused,
    #[error("{0}")]
    Violation(#[from] Violation),
    #[error("{0}")]
    Io(io::Error),
    #[error("the other side reads nothing")]
    Slow,
}

impl From<io::Error> for StreamEnd {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::UnexpectedEof => Self::Closed,
            _ => Self::Io(error),
        }
    }
}

/// The latest unanswered PING. One is enough, because a PONG only proves liveness.
#[derive(Default)]
pub(super) struct Ping {
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

    /// Waits for a PING.
    pub(super) async fn came(&self) {
        self.came.notified().await;
    }
}

/// Reads the frames of the other side.
pub(super) struct FrameReader<R> {
    read: R,
    parser: Parser,
    buffer: Vec<u8>,
    /// The part of `buffer` that is read and not parsed yet.
    filled: Range<usize>,
    message: PartialMessage,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    pub(super) fn new(read: R, parser: Parser) -> Self {
        Self::with_buffer(read, parser, CHUNK_BYTES)
    }

    /// A reader of at most `bytes` at a time, for peers that send little.
    pub(super) fn with_buffer(read: R, parser: Parser, bytes: usize) -> Self {
        Self {
            read,
            parser,
            buffer: vec![0; bytes],
            filled: 0..0,
            message: PartialMessage::default(),
        }
    }

    /// Reads greeting and READY.
    pub(super) async fn handshake(&mut self) -> Result<(), StreamEnd> {
        let mut first = true;
        loop {
            match self.fill().await {
                Err(StreamEnd::Closed) if first => return Err(StreamEnd::Unused),
                filled => filled?,
            }
            first = false;
            while let Some(item) = self.next()? {
                if item == Item::Ready {
                    return Ok(());
                }
            }
        }
    }

    /// Reads the next frame, and notes PINGs. A subscription by command is returned as the message that it replaces.
    pub(super) async fn frame(&mut self, ping: &Ping) -> Result<Frame, StreamEnd> {
        loop {
            let mut input = &self.buffer[self.filled.clone()];
            while let Some(item) = self.parser.next(&mut input)? {
                let frame = match item {
                    Item::Subscription { on } => {
                        let message = [&[u8::from(on)], self.parser.topic()].concat();
                        Some(Frame::new(Bytes::new(), message))
                    }
                    item => self.message.take(item, ping),
                };
                if let Some(frame) = frame {
                    self.filled.start = self.filled.end - input.len();
                    return Ok(frame);
                }
            }
            self.filled = 0..0;
            self.fill().await?;
        }
    }

    /// Reads more bytes if all are parsed.
    async fn fill(&mut self) -> Result<(), StreamEnd> {
        if self.filled.is_empty() {
            let bytes = self.read.read(&mut self.buffer).await?;
            self.filled = 0..bytes;
        }
        match self.filled.is_empty() {
            true => Err(StreamEnd::Closed),
            false => Ok(()),
        }
    }

    /// The next item of the bytes that were read, or `None` when all are parsed.
    fn next(&mut self) -> Result<Option<Item<'_>>, Violation> {
        let mut input = &self.buffer[self.filled.clone()];
        let item = self.parser.next(&mut input);
        self.filled.start = self.filled.end - input.len();
        item
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
                let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
                self.parts[self.current] = Vec::with_capacity(bytes);
            }
            Item::Payload(bytes) => self.parts[self.current].extend_from_slice(bytes),
            Item::End => {
                let [header, body] = std::mem::take(&mut self.parts);
                return Some(Frame::new(header, body));
            }
            Item::Ping(context) => ping.put(context),
            Item::Greeting | Item::Ready | Item::Ignored | Item::Subscription { .. } => {}
        }
        None
    }
}

/// Writes frames to the other side.
pub(super) struct FrameWriter<W> {
    write: W,
    /// Bytes to be written: heads of parts, and short parts, of several frames.
    buffer: Vec<u8>,
    slow_after: Duration,
    /// When the oldest frame of which bytes are in the buffer, or in the part that is written, must be written. `None` without
    /// such a frame.
    due: Option<Instant>,
    /// The same for the newest such frame.
    last_due: Option<Instant>,
}

impl<W: AsyncWrite + Unpin> FrameWriter<W> {
    /// A writer that fails when the other side takes nothing for `slow_after`, or when frames wait [`WAIT_FACTOR`] times as
    /// long since [`Self::queued`].
    pub(super) fn new(write: W, slow_after: Duration) -> Self {
        Self {
            write,
            buffer: Vec::with_capacity(CHUNK_BYTES),
            slow_after,
            due: None,
            last_due: None,
        }
    }

    /// Appends the greeting.
    pub(super) fn greet(&mut self) {
        self.buffer.extend_from_slice(&zmtp::greeting());
    }

    /// Appends the READY of a socket of this type.
    pub(super) fn ready(&mut self, socket_type: &str) {
        self.buffer
            .extend_from_slice(&zmtp::ready(socket_type, b""));
    }

    /// Appends the answer to the latest PING, if there is one. Call it between frames.
    pub(super) fn pong(&mut self, ping: &Ping) {
        if let Some(context) = ping.take() {
            self.buffer.extend_from_slice(&zmtp::pong(&context));
        }
    }

    /// States since when the frame that is appended next has waited.
    pub(super) fn queued(&mut self, since: Instant) {
        self.last_due = since.checked_add(self.slow_after.saturating_mul(WAIT_FACTOR));
        self.due = self.due.or(self.last_due);
    }

    /// Appends a frame; writes when [`CHUNK_BYTES`] are collected.
    pub(super) async fn frame(&mut self, frame: Frame) -> Result<(), StreamEnd> {
        self.part(Part::Header, &frame.header).await?;
        self.part(Part::Body, &frame.body).await?;
        self.appended();
        Ok(())
    }

    /// Forgets when frames are due if none of their bytes is left.
    fn appended(&mut self) {
        if self.buffer.is_empty() {
            (self.due, self.last_due) = (None, None);
        }
    }

    /// Appends a message of several parts; writes when [`CHUNK_BYTES`] are collected.
    pub(super) async fn message(&mut self, parts: &[&[u8]]) -> Result<(), StreamEnd> {
        let Some((last, before)) = parts.split_last() else {
            return Ok(());
        };
        for part in before {
            self.part(Part::Header, part).await?;
        }
        self.part(Part::Body, last).await?;
        self.appended();
        Ok(())
    }

    async fn part(&mut self, part: Part, bytes: &[u8]) -> Result<(), StreamEnd> {
        zmtp::put_head(&mut self.buffer, part, bytes.len() as u64);
        if self.buffer.len() + bytes.len() <= CHUNK_BYTES {
            self.buffer.extend_from_slice(bytes);
            return Ok(());
        }
        self.write_buffer().await?;
        self.put(bytes).await
    }

    /// Writes all bytes that are collected.
    pub(super) async fn flush(&mut self) -> Result<(), StreamEnd> {
        self.write_buffer().await?;
        self.appended();
        match within(self.slow_after, self.write.flush()).await {
            Some(flushed) => Ok(flushed?),
            None => Err(StreamEnd::Slow),
        }
    }

    /// Writes all bytes that are collected, and ends the stream.
    pub(super) async fn end(&mut self) -> Result<(), StreamEnd> {
        self.flush().await?;
        match within(self.slow_after, self.write.shutdown()).await {
            Some(ended) => Ok(ended?),
            None => Err(StreamEnd::Slow),
        }
    }

    async fn write_buffer(&mut self) -> Result<(), StreamEnd> {
        let mut buffer = std::mem::take(&mut self.buffer);
        self.put(&buffer).await?;
        buffer.clear();
        self.buffer = buffer;
        self.due = self.last_due;
        Ok(())
    }

    async fn put(&mut self, mut bytes: &[u8]) -> Result<(), StreamEnd> {
        let (slow_after, due) = (self.slow_after, self.due);
        let limit = || match due {
            Some(due) => slow_after.min(due.saturating_duration_since(Instant::now())),
            None => slow_after,
        };
        while !bytes.is_empty() {
            match within_late(limit, self.write.write(bytes)).await {
                Some(Ok(0)) => return Err(StreamEnd::Closed),
                Some(Ok(written)) => bytes = &bytes[written..],
                Some(Err(error)) => return Err(error.into()),
                None => return Err(StreamEnd::Slow),
            }
        }
        Ok(())
    }
}

/// Writes greeting and READY as a DEALER, and waits for those of a ROUTER.
pub(super) async fn join<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    read: R,
    write: W,
    limits: &Limits,
) -> Result<(FrameReader<R>, FrameWriter<W>), StreamEnd> {
    // A server that does not read holds the client back; the session ends a connection over which it receives nothing.
    let mut writer = FrameWriter::new(write, Duration::MAX);
    writer.greet();
    writer.ready("DEALER");
    writer.flush().await?;
    let mut reader = FrameReader::new(read, Parser::server(limits));
    reader.handshake().await?;
    Ok((reader, writer))
}
