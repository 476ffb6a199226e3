//! Decode and encode errors, and the error codes sent to peers.

use crate::kind::MessageKind;
use crate::{VERSION, VERSION_MIN};

macro_rules! codes {
    ($($(#[doc = $meaning:literal])+ $name:ident = $number:literal, $text:literal, $retry:literal;)*) => {
        /// Why a request was not carried out. Numbers are never reused.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u16)]
        pub enum ErrorCode {
            $($(#[doc = $meaning])+ $name = $number,)*
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

            /// Meaning of the code, and what its receiver does.
            pub fn meaning(self) -> &'static str {
                let text = match self {
                    $(Self::$name => concat!($($meaning,)+),)*
                };
                text.trim_start()
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
    /// The bytes are not a message: the sender is defective.
    Malformed = 1, "malformed", false;
    /// Both sides have no version in common: update the older one.
    UnsupportedVersion = 2, "unsupported_version", false;
    /// A kind of message that the receiver does not know, or that is not for a client.
    UnknownKind = 3, "unknown_kind", false;
    /// A limit of the leader, such as that of open requests, slots or hashes: retry when something has ended. Or a
    /// limit of the wire, with `retry` false: send less in one message. The text names the limit.
    Limit = 4, "limit", true;
    /// A rank is missing, its memory is not ready, pinned or released yet (the text has the progress), a worker is not
    /// attached, or another process has the seat: compute, and retry later.
    NotReady = 5, "not_ready", true;
    /// The slot was never opened, or is finished: begin with a lookup.
    UnknownSlot = 6, "unknown_slot", false;
    /// A field is wrong; the text names the field, the value and the remedy.
    Invalid = 7, "invalid", false;
    /// A load of pages that the last lookup did not find, or found too long ago: look them up again.
    NotPinned = 8, "not_pinned", false;
    /// A copy failed, and nothing touches its pages any longer: compute.
    CopyFailed = 9, "copy_failed", true;
    /// The request id is older than every answer that is kept: use a later one.
    StaleRequest = 10, "stale_request", false;
    /// The peer has used up its credits, no place is left for its connection, as many readers of events, probes, loads and
    /// stores wait as may, or `status` with `check` was carried out less than 1 s ago: retry later. After an `abandon` that is
    /// answered so, the worker may still copy its pages.
    Busy = 11, "busy", true;
    /// The deadline passed. Also the answer to `cancel_stores` while copies run, and of a worker to an `invalidate`
    /// that it could not complete in time: retry.
    Deadline = 12, "deadline", true;
    /// An order of another epoch than the worker's; the error says nothing about copies. The leader of the new epoch
    /// sends its own orders.
    StaleEpoch = 13, "stale_epoch", true;
    /// The memory of a rank differs from that of the ranks before it; the text names the ranks, the field and the
    /// values.
    RankDisagrees = 14, "rank_disagrees", false;
    /// Another message came before hello: send hello first.
    HelloFirst = 15, "hello_first", false;
    /// The leader takes no lookups, loads and stores, because it is about to end: retry with its successor.
    Draining = 16, "draining", true;
    /// A defect of the program, or a code of a newer version: report it.
    Internal = 17, "internal", false;
    /// Pages of a reset are held by lookups or loads; the text has the number of holders: retry.
    Leased = 18, "leased", true;
    /// The pages are not served any longer, but not every worker has confirmed that they do not return after a restart:
    /// retry.
    ResetUnconfirmed = 19, "reset_unconfirmed", true;
    /// The sender may not do this: its role, user or certificate does not send such a message, the namespace is of another
    /// user, or the request covers all namespaces. The text names the field and the remedy.
    Forbidden = 20, "forbidden", false;
    /// Lookups hold as many pages as those of the namespace, or those of the engine, may hold together; the text names the
    /// limit: compute, and retry when other lookups have ended.
    Quota = 21, "quota", true;
    /// The header requires a feature (bytes 20 and 21) that the receiver does not know: send without it, or update the
    /// receiver.
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
    /// The magic begins with its last byte.
    #[error(
        "header begins with YFVK, not with KVFY: write the magic as bytes, and the numbers of a header big-endian"
    )]
    MagicReversed,
    /// Version and kind are those of a message only with their bytes exchanged; as they are, the kind is unknown.
    #[error(
        "version {version} and kind {kind} have their bytes exchanged: write the numbers of a header big-endian, as \
         version {} and kind {}",
        version.swap_bytes(),
        kind.swap_bytes()
    )]
    ByteOrder {
        /// The version as it was read.
        version: u16,
        /// The kind as it was read.
        kind: u16,
    },
    /// The header requires features that this program does not support. Holds the bits.
    #[error(
        "bits {0:#06x} of the header's bytes 20 and 21 are unknown here: send without them, or update this side"
    )]
    Required(u16),
    /// A version that this program does not support.
    #[error("the header has version {0}, this side supports {min} to {max}", min = VERSION_MIN, max = VERSION)]
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
    #[error("{bytes} bytes follow the body of {kind}: send one map, and nothing after it")]
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
            // No kind is one with its bytes exchanged.
            Self::UnknownKind(_) | Self::ByteOrder { .. } => ErrorCode::UnknownKind,
            Self::BodyLength { .. } | Self::Limit { .. } => ErrorCode::Limit,
            Self::Required(_) => ErrorCode::Unsupported,
            _ => ErrorCode::Malformed,
        }
    }

    /// The text for logs, without the decoder's, which has the value that does not fit: a namespace, hash or token that
    /// stands in the place of another type. The sender gets the whole text.
    pub fn without_values(&self) -> String {
        match self {
            Self::Body { kind, .. } => format!("body of {kind}: it cannot be read"),
            Self::Limit { kind, .. } => format!("{kind}: beyond a limit"),
            other => other.to_string(),
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
    /// A list names no page, or a run that has none.
    #[error(
        "{kind}: {field} has {value}: name at least one page, with indices below {}",
        u32::MAX
    )]
    Pages {
        /// Name of the message's kind.
        kind: &'static str,
        /// Name of the list.
        field: &'static str,
        /// The list's entry.
        value: String,
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
    /// The code of a request that fails for this reason.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Pages { .. } => ErrorCode::Invalid,
            Self::Limit { .. } | Self::Version { .. } | Self::Body { .. } => ErrorCode::Limit,
        }
    }

    pub(super) fn limit(kind: MessageKind, what: &'static str, value: u64, max: u64) -> Self {
        Self::Limit {
            kind: kind.name(),
            what,
            value,
            max,
        }
    }
}
