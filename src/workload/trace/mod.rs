//! Request traces: the arrival time and the length of each request, and the token blocks that it shares with others.
//!
//! A trace is read from a file ([`read()`]) or made by the built-in workload ([`generate()`]). In both cases it is
//! plain data, sorted by time. Two runs replayed the same requests if the digests of their traces are equal.

mod error;
mod generate;
mod limits;
mod line;
mod read;

pub use error::{LineError, TraceError};
pub use generate::{Shape, generate};
pub use limits::{
    BLOCKS_MAX, DECODED_BYTES_MAX, LINE_BYTES_MAX, REQUESTS_MAX, SUGGESTED_TOKENS_MAX,
    TIMESTAMP_MS_MAX, TOKENS_MAX, ZSTD_WINDOW_LOG_MAX,
};
pub use read::read;

/// One request of a trace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TraceRequest {
    /// Arrival time, in microseconds from the start of the trace's clock.
    pub timestamp_us: u64,
    /// Length of the prompt, in tokens.
    pub input_tokens: u64,
    /// Length of the answer, in tokens.
    pub output_tokens: u64,
    /// Hash ids of the full blocks of the prompt, in order: `input_tokens / block_tokens` of them. Prompts with equal
    /// ids up to a position are equal up to that position.
    pub blocks: Vec<u64>,
}

/// Requests sorted by time; requests of the same time are in the order of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// The file name without its endings, or the built-in workload's name and seed.
    pub name: String,
    /// `blake3:` and 64 hex digits over `block_tokens` and all requests. The name, the compression and the formatting
    /// of the lines have no influence.
    pub digest: String,
    /// Tokens that one hash id stands for.
    pub block_tokens: u32,
    /// The requests, sorted by time.
    pub requests: Vec<TraceRequest>,
}

impl Trace {
    /// Creates a trace and computes its digest. The requests must be sorted by time.
    fn new(name: String, block_tokens: u32, requests: Vec<TraceRequest>) -> Self {
        let digest = digest(block_tokens, &requests);
        Self {
            name,
            digest,
            block_tokens,
            requests,
        }
    }
}

/// Hashes every number as 8 bytes, little-endian, and every list after its length, so that no two traces hash the same
/// bytes.
fn digest(block_tokens: u32, requests: &[TraceRequest]) -> String {
    let mut hasher = blake3::Hasher::new_derive_key("kvferry trace digest 1");
    hasher.update(&u64::from(block_tokens).to_le_bytes());
    hasher.update(&(requests.len() as u64).to_le_bytes());
    let mut bytes = Vec::new();
    for request in requests {
        bytes.clear();
        let head = [
            request.timestamp_us,
            request.input_tokens,
            request.output_tokens,
            request.blocks.len() as u64,
        ];
        for number in head.iter().chain(&request.blocks) {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        hasher.update(&bytes);
    }
    format!("blake3:{}", hasher.finalize().to_hex())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> Vec<TraceRequest> {
        vec![
            TraceRequest {
                timestamp_us: 1,
                input_tokens: 32,
                output_tokens: 3,
                blocks: vec![7, 8],
            },
            TraceRequest {
                timestamp_us: 2,
                input_tokens: 16,
                output_tokens: 4,
                blocks: vec![7],
            },
        ]
    }

    #[test]
    fn every_number_of_a_trace_changes_its_digest() {
        let whole = digest(16, &two());
        let mut seen = vec![whole, digest(17, &two()), digest(16, &two()[..1])];
        let edits: [fn(&mut Vec<TraceRequest>); 6] = [
            |requests| requests[0].timestamp_us = 0,
            |requests| requests[0].input_tokens = 33,
            |requests| requests[1].output_tokens = 5,
            |requests| requests[1].blocks[0] = 8,
            |requests| requests[0].blocks.truncate(1),
            |requests| requests.swap(0, 1),
        ];
        for edit in edits {
            let mut requests = two();
            edit(&mut requests);
            seen.push(digest(16, &requests));
        }
        for (i, digest) in seen.iter().enumerate() {
            assert!(digest.starts_with("blake3:") && digest.len() == 7 + 64);
            assert!(!seen[..i].contains(digest), "{i}");
        }
    }

    #[test]
    fn the_name_is_no_part_of_the_digest() {
        let a = Trace::new("a".to_owned(), 16, two());
        let b = Trace::new("b".to_owned(), 16, two());
        assert_eq!(a.digest, b.digest);
    }
}
