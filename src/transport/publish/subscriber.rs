//! A connection of the PUB.

use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::Stream;
use crate::Violation;
use crate::stream::{FrameReader, FrameWriter, Ping, StreamEnd};

/// Serves a subscriber until its connection ends; returns why.
pub(super) async fn serve<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    stream: &Stream,
    next: watch::Receiver<u64>,
    mut reader: FrameReader<R>,
    mut writer: FrameWriter<W>,
) -> StreamEnd {
    let (subscriptions, ping) = (Subscriptions::new(stream), Ping::default());
    let end = tokio::select! {
        biased;
        end = upward(&mut reader, &subscriptions, &ping) => end,
        end = downward(&mut writer, &subscriptions, next, &ping) => end,
    };
    match end {
        Ok(()) => StreamEnd::Closed,
        Err(end) => end,
    }
}

/// Reads subscriptions.
async fn upward<R: AsyncRead + Unpin>(
    reader: &mut FrameReader<R>,
    subscriptions: &Subscriptions<'_>,
    ping: &Ping,
) -> Result<(), StreamEnd> {
    loop {
        let message = reader.frame(ping).await?.body;
        match message.split_first() {
            Some((1, topic)) => subscriptions.change(topic, true),
            Some((0, topic)) => subscriptions.change(topic, false),
            _ => return Err(Violation::NoSubscription.into()),
        }
    }
}

/// Sends READY, then batches, with PONGs between them, until the publisher is gone.
async fn downward<W: AsyncWrite + Unpin>(
    writer: &mut FrameWriter<W>,
    subscriptions: &Subscriptions<'_>,
    mut next: watch::Receiver<u64>,
    ping: &Ping,
) -> Result<(), StreamEnd> {
    writer.ready("PUB");
    let topic = &subscriptions.stream.topic;
    loop {
        writer.pong(ping);
        // Marked as seen before the look, so that a batch that comes after the look ends the wait.
        next.borrow_and_update();
        if let Some((number, payload)) = subscriptions.due() {
            let parts: [&[u8]; 3] = [topic, &number.to_be_bytes(), &payload];
            writer.queued(Instant::now());
            writer.message(&parts).await?;
            continue;
        }
        writer.flush().await?;
        tokio::select! {
            changed = next.changed() => if changed.is_err() {
                return writer.end().await;
            },
            () = subscriptions.changed.notified() => {}
            () = ping.came() => {}
        }
    }
}

/// The subscriptions of one connection, and its position in the stream.
struct Subscriptions<'a> {
    stream: &'a Stream,
    state: Mutex<State>,
    changed: Notify,
}

struct State {
    /// Whether the beginning of the topic with this length is subscribed.
    lengths: Vec<bool>,
    /// The number of the next batch to send; `None` without a subscription.
    position: Option<u64>,
}

impl<'a> Subscriptions<'a> {
    fn new(stream: &'a Stream) -> Self {
        Self {
            stream,
            state: Mutex::new(State {
                lengths: vec![false; stream.topic.len() + 1],
                position: None,
            }),
            changed: Notify::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds or removes a subscription. Of one that can never match, nothing is kept.
    fn change(&self, topic: &[u8], on: bool) {
        if !self.stream.topic.starts_with(topic) {
            return;
        }
        let mut state = self.state();
        state.lengths[topic.len()] = on;
        let subscribed = state.lengths.contains(&true);
        match (subscribed, state.position) {
            (true, None) => {
                state.position = Some(self.stream.kept().next());
                self.changed.notify_one();
            }
            (false, Some(_)) => state.position = None,
            _ => {}
        }
    }

    /// The next batch to send, which counts as sent.
    fn due(&self) -> Option<(u64, Bytes)> {
        let mut state = self.state();
        let position = state.position.as_mut()?;
        let (number, payload) = self.stream.kept().from(*position)?;
        *position = number + 1;
        Some((number, payload))
    }
}
