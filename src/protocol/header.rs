//! The first part of every message: 32 bytes, numbers big-endian.
//!
//! | bytes | field |
//!  --- | --- |
//!  0..4 | magic `KVFY` |
//!  4..6 | protocol version |
//!  6..8 | kind |
//!  8..16 | correlation id: an answer carries that of its request |
//!  16..20 | milliseconds left until the deadline; 0 in answers |
//!  20..22 | bit mask of features that a reader must understand; none is defined |
//!  22..24 | zero; a reader ignores other values |
//!  24..32 | epoch of the leader that the sender is or is connected to; 0 before the sender has received one |

use crate::error::DecodeError;
use kvferry_types::{Epoch, RequestId};

/// Length of a header in bytes.
pub const HEADER_BYTES: usize = 32;

const MAGIC: [u8; 4] = *b"KVFY";

/// The fixed part of every message. `kind` is a bare number, so that an unknown kind can still be answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Version of the body.
    pub version: u16,
    /// Number of the message's [`MessageKind`](crate::MessageKind).
    pub kind: u16,
    /// Copied from a request to its answer. For engine requests: the request id.
    pub correlation: RequestId,
    /// Milliseconds until the deadline; 0 in answers. A duration, so that clocks need not agree.
    pub deadline_ms: u32,
    /// Bit mask of features that a reader must understand to interpret the message. This program defines none.
    pub required: u16,
    /// Epoch of the leader; fences off orders of older leaders.
    pub epoch: Epoch,
}

impl Header {
    /// Returns the encoded header.
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&self.version.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.kind.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.correlation.0.to_be_bytes());
        bytes[16..20].copy_from_slice(&self.deadline_ms.to_be_bytes());
        bytes[20..22].copy_from_slice(&self.required.to_be_bytes());
        bytes[24..].copy_from_slice(&self.epoch.0.to_be_bytes());
        bytes
    }

    /// Decodes exactly [`HEADER_BYTES`] bytes. Accepts any version, kind and required bits, so that a message that this
    /// side does not understand can still be answered.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, DecodeError> {
        let bytes: &[u8; HEADER_BYTES] = bytes
            .try_into()
            .map_err(|_| DecodeError::HeaderLength(bytes.len()))?;
        if bytes[..4] != MAGIC {
            return Err(DecodeError::Magic);
        }
        let u16_at = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
        let u32_at = |at: usize| u32::from(u16_at(at)) << 16 | u32::from(u16_at(at + 2));
        let u64_at = |at: usize| u64::from(u32_at(at)) << 32 | u64::from(u32_at(at + 4));
        Ok(Self {
            version: u16_at(4),
            kind: u16_at(6),
            correlation: RequestId(u64_at(8)),
            deadline_ms: u32_at(16),
            required: u16_at(20),
            epoch: Epoch(u64_at(24)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_a_round_trip_and_other_bytes_are_refused() {
        let header = Header {
            version: 2,
            kind: 0xabcd,
            correlation: RequestId(0x0102_0304_0506_0708),
            deadline_ms: 0xdead_beef,
            required: 0x8001,
            epoch: Epoch(7),
        };
        let bytes = header.to_bytes();
        assert_eq!(Header::from_bytes(&bytes), Ok(header));
        assert_eq!(
            Header::from_bytes(&bytes[1..]),
            Err(DecodeError::HeaderLength(31))
        );
        let mut other = bytes;
        other[0] = b'X';
        assert_eq!(Header::from_bytes(&other), Err(DecodeError::Magic));
        let mut other = bytes;
        other[22..24].fill(0xff);
        assert_eq!(Header::from_bytes(&other), Ok(header), "skipped");
    }
}
