//! What takes how long, and what is to be served when.

use std::time::Duration;

use crate::engine::scheduler::Prompt;
use crate::types::Time;

use super::Prefill;

/// How long a message takes unless told otherwise: half of the round trip of a small lookup, which
/// `kvferry bench rpc` finds to take 56 to 84 microseconds (docs/benchmarks/copies-and-round-trips.md).
pub const MESSAGE_LATENCY: Duration = Duration::from_micros(35);
/// What a link moves unless told otherwise, in bytes per second: PCIe 4.0 with 16 lanes, less its framing.
pub const LINK_BYTES_PER_S: u64 = 25_000_000_000;
/// How long a copy takes before its first byte unless told otherwise: a launch and a doorbell.
pub const LINK_LATENCY: Duration = Duration::from_micros(10);

/// What takes how long.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimedSettings {
    /// Bytes per second from each rank's device to its host, at least 1. Default: [`LINK_BYTES_PER_S`].
    pub d2h_bytes_per_s: u64,
    /// Bytes per second from each rank's host to its device, at least 1. Default: [`LINK_BYTES_PER_S`].
    pub h2d_bytes_per_s: u64,
    /// A copy joins its link so long after it starts. Default: [`LINK_LATENCY`].
    pub link_latency: Duration,
    /// From the sender of a message to its receiver. Default: [`MESSAGE_LATENCY`].
    pub message_latency: Duration,
    /// Of a prompt. Default: no time.
    pub prefill: Prefill,
    /// For each token of an answer; the prompt holds its pages meanwhile. Default: no time.
    pub decode_per_token: Duration,
    /// One prefill after another, as on one device. Default: on.
    pub serial_prefill: bool,
}

impl Default for TimedSettings {
    fn default() -> Self {
        Self {
            d2h_bytes_per_s: LINK_BYTES_PER_S,
            h2d_bytes_per_s: LINK_BYTES_PER_S,
            link_latency: LINK_LATENCY,
            message_latency: MESSAGE_LATENCY,
            prefill: Prefill::Instant,
            decode_per_token: Duration::ZERO,
            serial_prefill: true,
        }
    }
}

/// A prompt and when it comes.
#[derive(Debug, Clone)]
pub struct Arrival {
    /// When; no earlier than the one before. Without meaning for [`Pace::Closed`].
    pub at: Time,
    /// What is asked.
    pub prompt: Prompt,
    /// Length of the answer.
    pub output_tokens: u64,
}

/// When prompts arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// When they say.
    Timestamps,
    /// As soon as fewer than so many are open.
    Closed(usize),
}
