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
use crate::kind::MessageKind;
use crate::{VERSION, VERSION_MIN};
use kvferry_types::{Epoch, RequestId};

/// Length of a header in bytes.
pub const HEADER_BYTES: usize = 32;

const MAGIC: [u8; 4] = *b"KVFY";
/// The magic of a header whose numbers are little-endian, and the magic one of them.
const MAGIC_REVERSED: [u8; 4] = *b"YFVK";

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
        if bytes[..4] == MAGIC_REVERSED {
            return Err(DecodeError::MagicReversed);
        }
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

    /// The reason to refuse a header whose version and kind are valid only with their bytes exchanged: its sender wrote
    /// them in little-endian order. `None` for any other header.
    pub fn byte_order(&self) -> Option<DecodeError> {
        let supported = |version: u16| (VERSION_MIN..=VERSION).contains(&version);
        let (version, kind) = (self.version.swap_bytes(), self.kind.swap_bytes());
        let known = |kind: u16| MessageKind::from_number(kind).is_some();
        let exchanged = supported(version) && known(kind);
        (exchanged && !supported(self.version) && !known(self.kind)).then_some(
            DecodeError::ByteOrder {
                version: self.version,
                kind: self.kind,
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ErrorCode, check_header};

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

    /// The same header with its numbers in little-endian order.
    fn little_endian(header: Header) -> [u8; HEADER_BYTES] {
        let mut bytes = header.to_bytes();
        for field in [4..6, 6..8, 8..16, 16..20, 20..22, 24..32] {
            bytes[field].reverse();
        }
        bytes
    }

    #[test]
    fn every_header_in_little_endian_order_is_refused_with_the_byte_order() {
        for version in VERSION_MIN..=VERSION {
            for kind in MessageKind::ALL {
                let sent = Header {
                    version,
                    kind: kind.number(),
                    correlation: RequestId(1),
                    deadline_ms: 1000,
                    required: 0,
                    epoch: Epoch(0),
                };
                let header = Header::from_bytes(&little_endian(sent)).expect("a header");
                let refused = check_header(&header, 0).expect_err("no kind");
                assert_eq!(refused.code(), ErrorCode::UnknownKind);
                let named = format!(
                    "version {} and kind {} have their bytes exchanged",
                    header.version, header.kind
                );
                let text = refused.to_string();
                assert!(
                    text.starts_with(&named) && text.contains("big-endian"),
                    "{text}"
                );
                assert_eq!(sent.byte_order(), None);
            }
        }
    }

    #[test]
    fn a_version_that_no_byte_order_explains_is_an_unknown_version() {
        let unknown = Header {
            version: 0x0900,
            kind: MessageKind::Ping.number(),
            correlation: RequestId(1),
            deadline_ms: 1000,
            required: 0,
            epoch: Epoch(0),
        };
        assert_eq!(
            check_header(&unknown, 0),
            Err(DecodeError::Version(0x0900)),
            "version 9 is unsupported in both orders"
        );
        let mut bytes = unknown.to_bytes();
        bytes[..4].reverse();
        let refused = Header::from_bytes(&bytes).expect_err("another magic");
        assert!(refused.to_string().contains("big-endian"), "{refused}");
    }
}
