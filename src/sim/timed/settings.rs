//! Settings of a timed replay: the time of each step, and the arrivals of prompts.

use std::num::NonZeroU64;
use std::time::Duration;

use kvferry_types::Time;
use kvferry_workload::scheduler::Prompt;

use super::Prefill;

/// Default latency of a message: half of the round trip of a small lookup, which `kvferry-tools bench rpc` measures as
/// 56 to 84 microseconds (docs/benchmarks/copies-and-round-trips.md).
pub const MESSAGE_LATENCY: Duration = Duration::from_micros(35);
/// Default bandwidth of a link in bytes per second: PCIe 4.0 with 16 lanes, less its framing.
pub const LINK_BYTES_PER_S: u64 = 25_000_000_000;
/// Default time of a copy before its first byte: a launch and a doorbell.
pub const LINK_LATENCY: Duration = Duration::from_micros(10);

/// Default bytes per second that a disk writes and reads: an NVMe drive on PCIe 4.0 with 4 lanes.
pub const DISK_WRITE_BYTES_PER_S: u64 = 3_000_000_000;
/// See [`DISK_WRITE_BYTES_PER_S`].
pub const DISK_READ_BYTES_PER_S: u64 = 6_000_000_000;
/// Default time of a transfer from or to a disk before its first byte.
pub const DISK_LATENCY: Duration = Duration::from_micros(100);

/// Settings of a timed replay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimedSettings {
    /// Bytes per second from each rank's device to its host, at least 1. Default: [`LINK_BYTES_PER_S`].
    pub d2h_bytes_per_s: u64,
    /// Bytes per second from each rank's host to its device, at least 1. Default: [`LINK_BYTES_PER_S`].
    pub h2d_bytes_per_s: u64,
    /// Most bytes per second that each worker stores, on average. Default: no limit.
    pub store_bytes_per_s: Option<NonZeroU64>,
    /// Time from the start of a copy until its first byte. Default: [`LINK_LATENCY`].
    pub link_latency: Duration,
    /// Bytes per second that the disk of all ranks writes, at least 1. Default: [`DISK_WRITE_BYTES_PER_S`].
    pub disk_write_bytes_per_s: u64,
    /// Bytes per second that the disk of all ranks reads, at least 1. Default: [`DISK_READ_BYTES_PER_S`].
    pub disk_read_bytes_per_s: u64,
    /// Time from the start of a transfer from or to the disk until its first byte. Default: [`DISK_LATENCY`].
    pub disk_latency: Duration,
    /// Time of a message from sender to receiver. Default: [`MESSAGE_LATENCY`].
    pub message_latency: Duration,
    /// Prefill time of a prompt. Default: no time.
    pub prefill: Prefill,
    /// Decoding time for each token of an answer; the prompt holds its pages meanwhile. Default: no time.
    pub decode_per_token: Duration,
    /// Runs one prefill after another, as on one device. Default: on.
    pub serial_prefill: bool,
}

impl Default for TimedSettings {
    fn default() -> Self {
        Self {
            d2h_bytes_per_s: LINK_BYTES_PER_S,
            h2d_bytes_per_s: LINK_BYTES_PER_S,
            store_bytes_per_s: None,
            link_latency: LINK_LATENCY,
            disk_write_bytes_per_s: DISK_WRITE_BYTES_PER_S,
            disk_read_bytes_per_s: DISK_READ_BYTES_PER_S,
            disk_latency: DISK_LATENCY,
            message_latency: MESSAGE_LATENCY,
            prefill: Prefill::Instant,
            decode_per_token: Duration::ZERO,
            serial_prefill: true,
        }
    }
}

/// A prompt and when it arrives.
#[derive(Debug, Clone)]
pub struct Arrival {
    /// Arrival time, no earlier than that of the prompt before. Ignored with [`Pace::Closed`].
    pub at: Time,
    /// The prompt.
    pub prompt: Prompt,
    /// Length of the answer in tokens.
    pub output_tokens: u64,
}

/// When prompts arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// At their arrival times.
    Timestamps,
    /// As soon as fewer than this number of prompts are open.
    Closed(usize),
}
