//! Limits of traces.

/// Longest line, in bytes, without its line feed.
pub const LINE_BYTES_MAX: usize = 64 << 20;
/// Largest number of requests of a trace.
pub const REQUESTS_MAX: u64 = 16 << 20;
/// Largest number of hash ids of a trace: 2 GiB of memory at 8 bytes each.
pub const BLOCKS_MAX: u64 = 256 << 20;
/// Largest decompressed size of a trace in bytes, blank lines and unknown fields included.
pub const DECODED_BYTES_MAX: u64 = 16 << 30;
/// Largest zstd window, as a power of two: 128 MiB of memory.
pub const ZSTD_WINDOW_LOG_MAX: u32 = 27;
/// Largest block size that an error message suggests, in tokens.
pub const SUGGESTED_TOKENS_MAX: u32 = 1 << 16;
/// Latest time of a request, in milliseconds: 100 years, so that microseconds fit easily in 64 bits.
pub const TIMESTAMP_MS_MAX: u64 = 100 * 366 * 24 * 3_600 * 1_000;
/// Longest prompt or answer, in tokens: larger than any model's context, and small enough that no later sum overflows.
pub const TOKENS_MAX: u64 = 1 << 32;
