//! The sockets of `kvferry events`: the engine's stream, its replay, and our own.
//!
//! A batch has the frames topic, number (8 bytes, big-endian) and payload. A subscriber that lacks batches sends the first
//! missing number to the replay socket, behind an empty frame, and gets the kept ones from there on, and a last one with
//! the number 2^64 - 1.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::timeout;
use zeromq::{
    DealerSocket, PubSocket, RouterSocket, Socket as _, SocketRecv as _, SocketSend as _,
    SubSocket, ZmqMessage,
};

use crate::error::CommandError;
use kvferry_events::{BATCH_BYTES_MAX, Kept};

/// Time for one attempt to connect to the engine.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Longest wait for the next batch of a replay, and for the whole replay. Nothing is published meanwhile.
const REPLAY_PAUSE_MAX: Duration = Duration::from_secs(5);
const REPLAY_LIMIT: Duration = Duration::from_secs(30);
/// Batches of one replay, and their bytes, at most.
const REPLAY_BATCHES_MAX: usize = 100_000;
const REPLAY_BYTES_MAX: usize = 256 << 20;
/// Longest wait for a subscriber that takes a replay. Nothing is published meanwhile.
const SEND_LIMIT: Duration = Duration::from_secs(5);
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

/// Our own stream.
pub(super) struct Publisher {
    events: PubSocket,
    replay: Option<RouterSocket>,
    topic: Bytes,
}

/// A request for earlier batches.
pub(super) struct ReplayRequest {
    peer: Bytes,
    from: u64,
}

impl Publisher {
    pub(super) async fn bind(
        endpoint: &str,
        replay: Option<&str>,
        topic: &str,
    ) -> Result<Self, CommandError> {
        let mut events = PubSocket::new();
        let failed = |endpoint: &str, error| CommandError::Failed(format!("{endpoint}: {error}"));
        let bound = events.bind(endpoint).await;
        bound.map_err(|error| failed(endpoint, error))?;
        let replay = match replay {
            None => None,
            Some(endpoint) => {
                let mut socket = RouterSocket::new();
                let bound = socket.bind(endpoint).await;
                bound.map_err(|error| failed(endpoint, error))?;
                Some(socket)
            }
        };
        Ok(Self {
            events,
            replay,
            topic: Bytes::copy_from_slice(topic.as_bytes()),
        })
    }

    pub(super) async fn publish(&mut self, number: u64, payload: Vec<u8>) {
        let mut message = ZmqMessage::from(self.topic.clone());
        message.push_back(Bytes::copy_from_slice(&number.to_be_bytes()));
        message.push_back(Bytes::from(payload));
        if let Err(error) = self.events.send(message).await {
            tracing::warn!(%error, "batch {number} was not published: subscribers see a gap");
        }
    }

    /// The next request for earlier batches; never, where none are answered.
    pub(super) async fn request(&mut self) -> ReplayRequest {
        let Some(socket) = &mut self.replay else {
            return std::future::pending().await;
        };
        loop {
            match socket.recv().await {
                Ok(message) => {
                    let last = message.get(message.len() - 1);
                    let from = last.and_then(|last| last.as_ref().try_into().ok());
                    if let (Some(peer), Some(from)) = (message.get(0), from) {
                        return ReplayRequest {
                            peer: peer.clone(),
                            from: u64::from_be_bytes(from),
                        };
                    }
                    tracing::warn!("a request for earlier batches has no number of 8 bytes");
                }
                Err(error) => tracing::debug!(%error, "a peer of the replay socket"),
            }
        }
    }

    /// Sends the kept batches, and the end.
    pub(super) async fn replay(&mut self, request: ReplayRequest, kept: &Kept) {
        let Some(socket) = &mut self.replay else {
            return;
        };
        let send = async {
            let last = (END, &[][..]);
            for (number, payload) in kept.since(request.from).chain([last]) {
                let mut message = ZmqMessage::from(request.peer.clone());
                message.push_back(Bytes::new());
                let topic = if number == END {
                    Bytes::new()
                } else {
                    self.topic.clone()
                };
                message.push_back(topic);
                message.push_back(Bytes::copy_from_slice(&number.to_be_bytes()));
                message.push_back(Bytes::copy_from_slice(payload));
                socket.send(message).await?;
            }
            Ok::<(), zeromq::ZmqError>(())
        };
        match timeout(SEND_LIMIT, send).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::info!(%error, "a replay was not sent"),
            Err(_) => tracing::info!("a subscriber does not take its replay within {SEND_LIMIT:?}"),
        }
    }
}
