//! The engine's stream and its replay, of which `kvferry events` is a client. The own stream is a [`Publisher`].
//!
//! A batch has the frames topic, number (8 bytes, big-endian) and payload. A client that lacks batches sends the first
//! missing number to the replay socket, behind an empty frame, and gets the kept ones from there on, and a last one with
//! the number 2^64 - 1.
//!
//! [`Publisher`]: kvferry_transport::Publisher

use std::time::Duration;

use bytes::Bytes;
use tokio::time::timeout;
use zeromq::{DealerSocket, Socket as _, SocketRecv as _, SocketSend as _, SubSocket, ZmqMessage};

use crate::error::CommandError;
use kvferry_events::BATCH_BYTES_MAX;

/// Time for one attempt to connect to the engine.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Longest wait for the next batch of a replay, and for the whole replay. Nothing is published meanwhile.
const REPLAY_PAUSE_MAX: Duration = Duration::from_secs(5);
const REPLAY_LIMIT: Duration = Duration::from_secs(30);
/// Batches of one replay, and their bytes, at most.
const REPLAY_BATCHES_MAX: usize = 100_000;
const REPLAY_BYTES_MAX: usize = 256 << 20;
/// The number that ends a replay.
const END: u64 = u64::MAX;

/// A batch.
#[derive(Debug)]
pub(super) struct Frame {
    pub(super) number: u64,
    pub(super) payload: Bytes,
}

impl Frame {
    /// Reads the last two frames of a message, whatever comes before them.
    fn of(message: &ZmqMessage) -> Option<Self> {
        let count = message.len();
        let number = message.get(count.checked_sub(2)?)?;
        Some(Self {
            number: u64::from_be_bytes(number.as_ref().try_into().ok()?),
            payload: message.get(count - 1)?.clone(),
        })
    }
}

/// The engine's publisher.
pub(super) struct EngineStream {
    events: SubSocket,
    replay: Option<String>,
}

impl EngineStream {
    pub(super) async fn connect(
        endpoint: &str,
        replay: Option<&str>,
        topic: &str,
    ) -> Result<Self, CommandError> {
        let mut events = SubSocket::new();
        let failed = |error| CommandError::Failed(format!("engine {endpoint}: {error}"));
        events.subscribe(topic).await.map_err(failed)?;
        // The engine may start later: the socket connects in the background, and again after each loss.
        let mut told = false;
        loop {
            // The socket itself tries for long.
            let error = match timeout(CONNECT_LIMIT, events.connect(endpoint)).await {
                Ok(Ok(())) => break,
                Ok(Err(error)) => error.to_string(),
                Err(_) => format!("no connection within {CONNECT_LIMIT:?}"),
            };
            if !told {
                told = true;
                tracing::warn!(
                    "engine {endpoint}: {error}: waits until the engine publishes there"
                );
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        Ok(Self {
            events,
            replay: replay.map(str::to_owned),
        })
    }

    /// The next batch.
    pub(super) async fn receive(&mut self) -> Result<Frame, CommandError> {
        loop {
            match self.events.recv().await {
                Ok(message) => match Frame::of(&message) {
                    Some(frame) if frame.payload.len() <= BATCH_BYTES_MAX => return Ok(frame),
                    _ => tracing::warn!("a message of the engine is no batch of events"),
                },
                // The socket connects again by itself.
                Err(error) => {
                    tracing::warn!(%error, "the connection to the engine's events broke: it is made again");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    /// The batches from a number on that the engine has kept; none if it does not answer.
    pub(super) async fn replay(&self, from: u64) -> Vec<Frame> {
        let mut frames = Vec::new();
        let Some(endpoint) = &self.replay else {
            return frames;
        };
        let replayed = timeout(REPLAY_LIMIT, replay(endpoint, from, &mut frames)).await;
        let late = |_| Err(format!("it does not end within {REPLAY_LIMIT:?}"));
        if let Err(error) = replayed.unwrap_or_else(late) {
            tracing::warn!(%error, "the engine's replay at {endpoint} from batch {from}");
        }
        frames
    }
}

async fn replay(endpoint: &str, from: u64, frames: &mut Vec<Frame>) -> Result<(), String> {
    let late = |_| "no answer in time".to_owned();
    let failed = |error: zeromq::ZmqError| error.to_string();
    let mut socket = DealerSocket::new();
    let connected = timeout(REPLAY_PAUSE_MAX, socket.connect(endpoint)).await;
    connected.map_err(late)?.map_err(failed)?;
    let mut request = ZmqMessage::from(Bytes::new());
    request.push_back(Bytes::copy_from_slice(&from.to_be_bytes()));
    socket.send(request).await.map_err(failed)?;
    let mut bytes = 0;
    loop {
        let message = timeout(REPLAY_PAUSE_MAX, socket.recv()).await;
        let message = message.map_err(late)?.map_err(failed)?;
        let Some(frame) = Frame::of(&message) else {
            return Err("a message is no batch of events".to_owned());
        };
        bytes += frame.payload.len();
        if frame.number == END {
            return Ok(());
        }
        if frames.len() == REPLAY_BATCHES_MAX || bytes > REPLAY_BYTES_MAX {
            return Err(format!(
                "more than {REPLAY_BATCHES_MAX} batches or {REPLAY_BYTES_MAX} bytes"
            ));
        }
        frames.push(frame);
    }
}
