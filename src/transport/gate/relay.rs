//! Forwarding on an open connection: checked messages upward to the ROUTER, everything downward to the client.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Notify, OwnedSemaphorePermit};
use tokio::time::timeout;

use super::{CHUNK_BYTES, ClientReader, Gate, OpenPeer};
use crate::listener::QueuedEvent;
use crate::zmtp::{self, Item, Parser, PingContext};
use crate::{CloseReason, Violation};

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

/// An open connection. Dropping it closes both hops.
pub(super) struct Connection {
    pub(super) client: ClientReader,
    pub(super) client_write: OwnedWriteHalf,
    pub(super) inner: UnixStream,
    pub(super) link: OpenPeer,
    pub(super) permit: OwnedSemaphorePermit,
}

impl Connection {
    pub(super) async fn run(mut self, gate: &Gate) {
        let peer = self.link.link.peer;
        let limits = &gate.limits;
        let (mut inner_read, mut inner_write) = self.inner.into_split();
        let ping = Ping::default();
        let killed = self.link.link.killed();
        let mut down = Downward {
            parser: Parser::traffic(limits),
            buffer: vec![0; CHUNK_BYTES],
            write: self.client_write,
            slow_after: limits.slow_after,
        };
        let mut reason = down.put(&zmtp::ready("ROUTER", b"")).await.err();
        if reason.is_none() {
            let mut downward = std::pin::pin!(down.run(&mut inner_read, &ping));
            let (why, down_ended) = tokio::select! {
                biased;
                why = killed => (why, false),
                why = upward(&mut self.client, &mut inner_write, &ping) => (why, false),
                why = &mut downward => (why, true),
                why = gate.router.feed(&mut self.link.link) => (why, false),
            };
            // On the end of the stream the ROUTER writes and delivers what it has, and closes the hop.
            inner_write.shutdown().await.ok();
            if why == CloseReason::ByUs && !down_ended {
                timeout(limits.slow_after, downward).await.ok();
            }
            reason = Some(why);
        }
        let reason = reason.unwrap_or(CloseReason::ByUs);
        drop(inner_write);
        drop(self.client);
        drop(down.write);
        drain(&mut inner_read).await;
        drop(self.link);
        drop(self.permit);
        tracing::debug!(%peer, %reason, "closed a connection");
        gate.intake
            .push(QueuedEvent::Closed { peer, reason })
            .await
            .ok();
    }
}

/// Reads until the ROUTER has closed the hop. No frame of the peer can reach the listener after that.
async fn drain(inner: &mut OwnedReadHalf) {
    let mut buffer = vec![0; CHUNK_BYTES];
    while let Ok(1..) = inner.read(&mut buffer).await {}
}

/// Forwards checked messages to the ROUTER. Waits while the ROUTER is busy, and reads nothing from the client
/// meanwhile.
async fn upward(client: &mut ClientReader, inner: &mut OwnedWriteHalf, ping: &Ping) -> CloseReason {
    let mut checked = Vec::with_capacity(CHUNK_BYTES);
    loop {
        match client.fill().await {
            Ok(true) => {}
            Ok(false) => return CloseReason::ByPeer,
            Err(error) => return closed_by(&error),
        }
        let mut input = &client.buffer[client.filled.clone()];
        let parsed = check(&mut client.parser, &mut input, &mut checked, ping);
        client.filled = 0..0;
        if inner.write_all(&checked).await.is_err() {
            return CloseReason::ByUs;
        }
        checked.clear();
        if let Err(violation) = parsed {
            return CloseReason::Violation(violation);
        }
    }
}

/// Parses `input` and appends its valid message bytes to `checked`, in canonical form. Stops at a violation.
fn check(
    parser: &mut Parser,
    input: &mut &[u8],
    checked: &mut Vec<u8>,
    ping: &Ping,
) -> Result<(), Violation> {
    while let Some(item) = parser.next(input)? {
        match item {
            Item::Part { part, bytes } => zmtp::put_head(checked, part, bytes),
            Item::Payload(bytes) => checked.extend_from_slice(bytes),
            Item::Ping(context) => ping.put(context),
            Item::Greeting | Item::Ready | Item::Ignored | Item::End => {}
        }
    }
    Ok(())
}

fn closed_by(error: &io::Error) -> CloseReason {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => CloseReason::ByPeer,
        kind => CloseReason::Io(kind),
    }
}

/// The direction from the ROUTER to the client.
struct Downward {
    parser: Parser,
    buffer: Vec<u8>,
    write: OwnedWriteHalf,
    slow_after: Duration,
}

impl Downward {
    /// Forwards bytes until the ROUTER closes the hop, and inserts PONGs between messages.
    async fn run(&mut self, inner: &mut OwnedReadHalf, ping: &Ping) -> CloseReason {
        let mut between = true;
        loop {
            let bytes = tokio::select! {
                bytes = inner.read(&mut self.buffer) => bytes.unwrap_or(0),
                () = ping.came.notified(), if between => {
                    if let Err(reason) = self.pong(ping).await {
                        return reason;
                    }
                    continue;
                }
            };
            if bytes == 0 {
                return CloseReason::ByUs;
            }
            match self.pass(bytes, ping).await {
                Ok(at_end) => between = at_end,
                Err(reason) => return reason,
            }
        }
    }

    /// Writes the first `bytes` of the buffer. Returns whether they end at the end of a message.
    async fn pass(&mut self, bytes: usize, ping: &Ping) -> Result<bool, CloseReason> {
        let end = self.last_end(bytes)?;
        let buffer = std::mem::take(&mut self.buffer);
        let (whole, rest) = buffer[..bytes].split_at(end.unwrap_or(0));
        self.put(whole).await?;
        if end.is_some() {
            self.pong(ping).await?;
        }
        self.put(rest).await?;
        let at_end = rest.is_empty();
        self.buffer = buffer;
        Ok(at_end)
    }

    /// Returns the offset in the buffer at which the last complete message ends.
    fn last_end(&mut self, bytes: usize) -> Result<Option<usize>, CloseReason> {
        let mut input = &self.buffer[..bytes];
        let mut end = None;
        while let Some(item) = self
            .parser
            .next(&mut input)
            .map_err(CloseReason::Violation)?
        {
            if item == Item::End {
                end = Some(bytes - input.len());
            }
        }
        Ok(end)
    }

    async fn pong(&mut self, ping: &Ping) -> Result<(), CloseReason> {
        match ping.take() {
            Some(context) => self.put(&zmtp::pong(&context)).await,
            None => Ok(()),
        }
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
