//! A connection of the ROUTER that sends earlier batches again.

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::{REPLAY_END, Stream};
use crate::Violation;
use crate::stream::{FrameReader, FrameWriter, Ping, StreamEnd};

/// Requests of a connection that wait while one is answered. With more, nothing is read.
const WAITING_MAX: usize = 1;

/// Serves a client until its connection ends; returns why.
pub(super) async fn serve<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    stream: &Stream,
    mut reader: FrameReader<R>,
    mut writer: FrameWriter<W>,
) -> StreamEnd {
    let ping = Ping::default();
    let (requests, mut waiting) = mpsc::channel(WAITING_MAX);
    let end = tokio::select! {
        biased;
        end = upward(&mut reader, &requests, &ping) => end,
        end = downward(&mut writer, stream, &mut waiting, &ping) => end,
    };
    match end {
        Ok(()) => StreamEnd::Closed,
        Err(end) => end,
    }
}

/// Reads requests.
async fn upward<R: AsyncRead + Unpin>(
    reader: &mut FrameReader<R>,
    requests: &mpsc::Sender<u64>,
    ping: &Ping,
) -> Result<(), StreamEnd> {
    loop {
        let number = reader.frame(ping).await?.body;
        let number = <[u8; 8]>::try_from(&number[..]).map_err(|_| Violation::NoNumber)?;
        if requests.send(u64::from_be_bytes(number)).await.is_err() {
            return Ok(());
        }
    }
}

/// Sends READY, and the answers to requests, with PONGs between their batches.
async fn downward<W: AsyncWrite + Unpin>(
    writer: &mut FrameWriter<W>,
    stream: &Stream,
    requests: &mut mpsc::Receiver<u64>,
    ping: &Ping,
) -> Result<(), StreamEnd> {
    writer.ready("ROUTER");
    loop {
        writer.pong(ping);
        writer.flush().await?;
        tokio::select! {
            request = requests.recv() => match request {
                Some(from) => replay(writer, stream, from, ping).await?,
                None => return Ok(()),
            },
            () = ping.came() => {}
        }
    }
}

/// Sends the batches that are kept from a number on and were published before the request, and the end.
async fn replay<W: AsyncWrite + Unpin>(
    writer: &mut FrameWriter<W>,
    stream: &Stream,
    from: u64,
    ping: &Ping,
) -> Result<(), StreamEnd> {
    let (mut from, until) = (from, stream.kept().next());
    let next = |from| -> Option<(u64, Bytes)> {
        let batch = stream.kept().from(from);
        batch.filter(|(number, _)| *number < until)
    };
    while let Some((number, payload)) = next(from) {
        let parts: [&[u8]; 4] = [b"", &stream.topic, &number.to_be_bytes(), &payload];
        writer.queued(Instant::now());
        writer.message(&parts).await?;
        writer.pong(ping);
        from = number + 1;
    }
    let end: [&[u8]; 4] = [b"", b"", &REPLAY_END.to_be_bytes(), b""];
    writer.queued(Instant::now());
    writer.message(&end).await
}
