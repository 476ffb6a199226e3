//! Decode and encode errors, and the error codes sent to peers.

use crate::kind::Kind;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $text:literal, $retry:literal;)*) => {
        /// Why a request was not carried out. Numbers are never reused.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u16)]
        pub enum ErrorCode {
            $($(#[$doc])* $name = $number,)*
        }

        impl ErrorCode {
            /// Every code, ordered by number.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// Returns the code of a number. Unknown numbers, from newer peers, map to [`ErrorCode::Internal`].
            pub fn from_number(number: u16) -> Self {
                match number {
                    $($number => Self::$name,)*
                    _ => Self::Internal,
                }
            }

            /// Name of the code in the schema and in logs.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }

            /// Whether a retry of the same request may succeed later.
            pub fn retry(self) -> bool {
                match self {
                    $(Self::$name => $retry,)*
                }
            }

            /// Number of the code on the wire.
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

/// Why bytes were refused as a message. The text states what was found and what is expected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The header is not 32 bytes long. Holds its length.
    #[error("header has {0} bytes, not 32")]
    HeaderLength(usize),
    /// The header does not begin with the magic `KVFY`.
    #[error("header does not begin with KVFY")]
    Magic,
    /// The header requires features that this program does not support. Holds the bits.
    #[error(
        "bits {0:#06x} of the header's bytes 20 and 21 are not known here: send without them, or update this side"
    )]
    Required(u16),
    /// A version that this program does not support.
    #[error("version {0} is none of 1 to 2")]
    Version(u16),
    /// A kind number that is not assigned.
    #[error("kind {0} is unknown")]
    UnknownKind(u16),
    /// The body is longer than its kind allows.
    #[error("body has {bytes} bytes, more than the limit of {max}")]
    BodyLength {
        /// Length of the body.
        bytes: usize,
        /// Longest body allowed for the kind.
        max: usize,
    },
    /// A value exceeds a limit of the wire.
    #[error("{kind}: {reason}")]
    Limit {
        /// Name of the message's kind.
        kind: &'static str,
        /// The exceeded limit and its value, as text.
        reason: String,
    },
    /// The body does not decode as its kind.
    #[error("body of {kind}: {reason}")]
    Body {
        /// Name of the kind in the header.
        kind: &'static str,
        /// The decoder's error text.
        reason: String,
    },
    /// Bytes remain after the body.
    #[error("{bytes} bytes follow the body of {kind}")]
    Trailing {
        /// Name of the message's kind.
        kind: &'static str,
        /// Number of trailing bytes.
        bytes: usize,
    },
}

impl DecodeError {
    /// The error code for the sender. A retry of the same message fails in the same way.
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

/// Why a message cannot be encoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// A value exceeds a limit of the wire.
    #[error("{kind}: {what} is {value}, more than the limit of {max}")]
    Limit {
        /// Name of the message's kind.
        kind: &'static str,
        /// Name of the exceeded limit.
        what: &'static str,
        /// The value that exceeds it.
        value: u64,
        /// Largest allowed value.
        max: u64,
    },
    /// The version has no form for this kind.
    #[error("{kind} has no form in version {version}")]
    Version {
        /// Name of the message's kind.
        kind: &'static str,
        /// The version of the envelope.
        version: u16,
    },
    /// The MessagePack serializer failed.
    #[error("{kind}: {reason}")]
    Body {
        /// Name of the message's kind.
        kind: &'static str,
        /// The serializer's error text.
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
