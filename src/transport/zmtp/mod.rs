//! The part of ZMTP 3 that the listeners need: an incremental parser that refuses before it buffers, and encoders for their
//! own frames. Sans I/O. Sources: <https://rfc.zeromq.org/spec/23/>, and <https://rfc.zeromq.org/spec/37/> for the commands
//! of subscribers.
//!
//! A stream is a greeting of 64 bytes, then frames: a flags byte (1 more, 2 long, 4 command), a length of 1 or 8 bytes,
//! big-endian, and that many bytes. The parser buffers at most 64 bytes of a greeting, 9 of a frame's head or
//! [`COMMAND_BYTES_MAX`] of a command; payload is passed on as it arrives.

mod parser;
mod write;

use super::Limits;

pub use parser::{Item, Parser};
pub(super) use write::{greeting, pong, put_head, ready};

/// Longest command in bytes, including READY with all its properties.
pub const COMMAND_BYTES_MAX: usize = 1024;
/// Longest topic of a subscription, in bytes.
pub const TOPIC_BYTES_MAX: usize = 512;
/// Longest first part of a request for earlier batches in bytes: as long as an identity may be.
const DELIMITER_BYTES_MAX: usize = 255;
/// Length of a batch's number in bytes.
const NUMBER_BYTES: usize = 8;
/// Length of a greeting in bytes.
pub(super) const GREETING_BYTES: usize = 64;
/// Longest context of a PING in bytes, by the specification.
const PING_CONTEXT_BYTES_MAX: usize = 16;
/// Longest head of a frame in bytes: flags and eight bytes of length.
const HEAD_BYTES_MAX: usize = 9;

const FLAG_MORE: u8 = 1;
const FLAG_LONG: u8 = 2;
const FLAG_COMMAND: u8 = 4;

/// A violation of the protocol or the limits by a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// The stream does not start like ZMTP 3.
    #[error("no ZMTP 3 greeting")]
    Greeting,
    /// A security mechanism other than NULL.
    #[error("a security mechanism other than NULL")]
    Mechanism,
    /// Reserved bits of a frame's flags are set.
    #[error("reserved flag bits")]
    Flags,
    /// A command that does not parse.
    #[error("a malformed command")]
    Command,
    /// A command longer than 1 KiB.
    #[error("a command longer than {COMMAND_BYTES_MAX} bytes")]
    CommandTooLong,
    /// A command that is unknown, or not allowed at this point.
    #[error("a command that is not allowed here")]
    UnexpectedCommand,
    /// A message before READY.
    #[error("a message before READY")]
    NotReady,
    /// A socket type that does not fit the own one.
    #[error("a socket type that does not fit that of this side")]
    SocketType,
    /// The first part is longer than the limit.
    #[error("a header longer than its limit")]
    HeaderTooLong,
    /// The second part is longer than the limit.
    #[error("a body longer than its limit")]
    BodyTooLong,
    /// A message with another number of parts: a subscription has one, every other message two.
    #[error("a message with too few or too many parts")]
    Parts,
    /// A message to a PUB that is no subscription.
    #[error("a message that is no subscription")]
    NoSubscription,
    /// A request for earlier batches whose number does not have 8 bytes.
    #[error("a request without a number of {NUMBER_BYTES} bytes")]
    NoNumber,
}

/// The parts of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The first one of two. Every part that another one follows is written in the same way.
    Header,
    /// The last one.
    Body,
}

/// Refuses a part that is longer than the limits.
pub(super) fn check_part(limits: &Limits, part: Part, bytes: u64) -> Result<(), Violation> {
    let (limit, violation) = match part {
        Part::Header => (limits.header_bytes, Violation::HeaderTooLong),
        Part::Body => (limits.body_bytes, Violation::BodyTooLong),
    };
    match bytes <= limit as u64 {
        true => Ok(()),
        false => Err(violation),
    }
}

/// The context of a PING, to be sent back in a PONG.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PingContext {
    /// The bytes, filled up with zeros.
    pub bytes: [u8; PING_CONTEXT_BYTES_MAX],
    /// Number of the bytes.
    pub len: usize,
}
