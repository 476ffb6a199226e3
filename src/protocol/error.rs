//! What can be wrong with a message, and what is said about it.

use crate::protocol::kind::Kind;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $text:literal, $retry:literal;)*) => {
        /// Why a request was not carried out. Numbers are never reused.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u16)]
        pub enum ErrorCode {
            $($(#[$doc])* $name = $number,)*
        }

        impl ErrorCode {
            /// Every code, by number.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The code of a number; unknown ones, of newer peers, count as internal errors.
            pub fn from_number(number: u16) -> Self {
                match number {
                    $($number => Self::$name,)*
                    _ => Self::Internal,
                }
            }

            /// Its name in schema and logs.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }

            /// True when the same request may succeed later.
            pub fn retry(self) -> bool {
                match self {
                    $(Self::$name => $retry,)*
                }
            }

            /// Its number on the wire.
            pub fn number(self) -> u16 {
                self as u16
            }
        }
    };
}

codes! {
    /// The bytes are no message.
    Malformed = 1, "malformed", false;
    /// No version in common.
    UnsupportedVersion = 2, "unsupported_version", false;
    /// A kind that this side does not know, or does not take from this peer.
    UnknownKind = 3, "unknown_kind", false;
    /// A limit of the wire, or of the leader.
    Limit = 4, "limit", true;
    /// Not every rank is there yet.
    NotReady = 5, "not_ready", true;
    /// The slot was never opened, or is finished.
    UnknownSlot = 6, "unknown_slot", false;
    /// A field does not fit.
    Invalid = 7, "invalid", false;
    /// Pages are not pinned any more.
    NotPinned = 8, "not_pinned", false;
    /// A copy failed, and has ended everywhere.
    CopyFailed = 9, "copy_failed", true;
    /// The request id is older than every answer kept.
    StaleRequest = 10, "stale_request", false;
    /// The peer has used up its credits.
    Busy = 11, "busy", true;
    /// The deadline passed.
    Deadline = 12, "deadline", true;
    /// The epoch is over.
    StaleEpoch = 13, "stale_epoch", true;
    /// A rank's memory differs from that of the ranks before it.
    RankDisagrees = 14, "rank_disagrees", false;
    /// Something else than a hello came first.
    HelloFirst = 15, "hello_first", false;
    /// The process is shutting down.
    Draining = 16, "draining", true;
    /// A bug, or something that this version has no code for.
    Internal = 17, "internal", false;
    /// Pages that are to be forgotten are held.
    Leased = 18, "leased", true;
    /// Pages are forgotten, but not every worker said so.
    ResetUnconfirmed = 19, "reset_unconfirmed", true;
    /// Something that was not agreed.
    Unsupported = 24, "unsupported", false;
}

/// Why bytes are no message. Each says what was found and what would have been right.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The first part has another length.
    #[error("header has {0} bytes, not 32")]
    HeaderLength(usize),
    /// It does not begin with the magic.
    #[error("header does not begin with KVFY")]
    Magic,
    /// The header has bits for things that this program does not know.
    #[error(
        "bits {0:#06x} of the header's bytes 20 and 21 are not known here: send without them, or update this side"
    )]
    Required(u16),
    /// A version that this program does not speak.
    #[error("version {0} is none of 1 to 2")]
    Version(u16),
    /// A number that names no kind.
    #[error("kind {0} is unknown")]
    UnknownKind(u16),
    /// The body is too long.
    #[error("body has {bytes} bytes, more than the limit of {max}")]
    BodyLength {
        /// Bytes that it has.
        bytes: usize,
        /// Bytes that it may have.
        max: usize,
    },
    /// A limit of the wire.
    #[error("{kind}: {reason}")]
    Limit {
        /// What it is.
        kind: &'static str,
        /// Which limit, and what it is.
        reason: String,
    },
    /// The body does not fit its kind.
    #[error("body of {kind}: {reason}")]
    Body {
        /// What it should have been.
        kind: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// Something follows the body.
    #[error("{bytes} bytes follow the body of {kind}")]
    Trailing {
        /// What it is.
        kind: &'static str,
        /// How many bytes too many.
        bytes: usize,
    },
}

impl DecodeError {
    /// What the sender is told. The same message fails in the same way again.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Version(_) => ErrorCode::UnsupportedVersion,
            Self::UnknownKind(_) => ErrorCode::UnknownKind,
            Self::BodyLength { .. } | Self::Limit { .. } => ErrorCode::Limit,
            Self::Required(_) => ErrorCode::Unsupported,
            _ => ErrorCode::Malformed,
        }
    }
}

/// Why a message cannot be said.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// A limit of the wire.
    #[error("{kind}: {what} is {value}, more than the limit of {max}")]
    Limit {
        /// What was to be said.
        kind: &'static str,
        /// Which limit.
        what: &'static str,
        /// The value.
        value: u64,
        /// The limit.
        max: u64,
    },
    /// The peer's version has no words for it.
    #[error("{kind} has no form in version {version}")]
    Version {
        /// What was to be said.
        kind: &'static str,
        /// The peer's version.
        version: u16,
    },
    /// MessagePack refused it.
    #[error("{kind}: {reason}")]
    Body {
        /// What was to be said.
        kind: &'static str,
        /// Why.
        reason: String,
    },
}

impl EncodeError {
    pub(super) fn limit(kind: Kind, what: &'static str, value: u64, max: u64) -> Self {
        Self::Limit {
            kind: kind.name(),
            what,
            value,
            max,
        }
    }
}
