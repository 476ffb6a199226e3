//! Bodies of the handshake, and of errors.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::is_zero;
use crate::error::ErrorCode;
use crate::limits::{self, TEXT_BYTES_MAX};
use crate::role::Role;
use crate::{VERSION, VERSION_MIN};

/// First message of a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Hello {
    /// Oldest protocol version that the client supports.
    pub version_min: u16,
    /// Newest protocol version that the client supports.
    pub version_max: u16,
    /// Role of the client.
    pub role: Role,
    /// Of an engine or a rank, its engine's identity: 16 bytes, the same over reconnects and on all ranks; zero is refused as
    /// `invalid`. Of an admin session: random bytes, or zero where it repeats no request. Zero, or absent, for other roles.
    #[serde(with = "serde_bytes", default)]
    #[schemars(with = "kvferry_types::BinarySchema")]
    pub engine: [u8; 16],
    /// Rank of a worker, of its supervisor, or of an engine's rank; 0 for other roles.
    #[serde(default)]
    pub rank: u16,
    /// Name for logs.
    #[serde(default)]
    pub name: String,
    /// Engine instance that a worker, its supervisor or a rank belongs to.
    #[serde(default)]
    pub replica: u16,
    /// Features beyond the version. Bit 0 (value 1): the timeline; bit 1 (value 2): tails of sequences.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub features: u64,
}

impl Hello {
    /// A hello with every version that this program supports, without an engine, of rank 0 of replica 0.
    pub fn new(role: Role, name: impl Into<String>) -> Self {
        Self {
            version_min: VERSION_MIN,
            version_max: VERSION,
            role,
            engine: [0; 16],
            rank: 0,
            name: name.into(),
            replica: 0,
            features: 0,
        }
    }
}

/// Feature bit: the rank's device writes its progress into a word of its own memory, and the worker polls that word
/// ([`Registration::timeline`], [`Written::timeline`]).
pub const FEATURE_TIMELINE: u64 = 1;

/// Feature bit: the leader finds and stores pages also where the first hash of a lookup is in the middle of a sequence.
pub const FEATURE_TAILS: u64 = 2;

/// Answer to [`Hello`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Welcome {
    /// The protocol version of this connection.
    pub version: u16,
    /// Milliseconds of a heartbeat. A client that has sent nothing, or received nothing, for a heartbeat sends `ping`.
    /// The server closes a connection over which it has received nothing for three heartbeats; a client that has
    /// received nothing for as long reconnects.
    pub heartbeat_ms: u32,
    /// Most requests that may be unanswered at one time.
    pub request_credits: u32,
    /// Most bytes of requests that may be unanswered at one time.
    pub byte_credits: u64,
    /// Longest deadline of a request; a later one is cut to it.
    #[serde(default)]
    pub deadline_max_ms: u32,
    /// Name and version of the program, for logs.
    #[serde(default)]
    pub program: String,
    /// The limits of the server, by their names in `schema/messages.json`. A message beyond one of them is refused.
    #[serde(default)]
    pub limits: BTreeMap<String, u64>,
    /// The features of the hello that the server supports, too.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub features: u64,
}

impl Welcome {
    /// A welcome with the limits of this program, of its newest version, without features.
    pub fn new(heartbeat_ms: u32) -> Self {
        Self {
            version: VERSION,
            heartbeat_ms,
            request_credits: limits::REQUEST_CREDITS,
            byte_credits: limits::BYTE_CREDITS,
            deadline_max_ms: limits::DEADLINE_MAX_MS,
            program: PROGRAM.to_owned(),
            limits: limits::NAMED
                .into_iter()
                .map(|(name, most)| (name.to_owned(), most))
                .collect(),
            features: 0,
        }
    }
}

/// Name and version of this program.
const PROGRAM: &str = concat!("kvferry ", env!("CARGO_PKG_VERSION"));

/// Answer to a request that is not carried out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ErrorBody {
    /// The error code; `docs/reference/error-codes.md` lists all codes.
    pub code: u16,
    /// One line of text: the field, its value and the remedy.
    pub message: String,
    /// True when the same request may succeed later.
    #[serde(default)]
    pub retry: bool,
    /// True when no copy for the refused request runs or will run: only then may an engine reuse the pages of a load or
    /// a store. Only the leader sets it, after it has examined the request.
    #[serde(default)]
    pub over: bool,
}

impl ErrorBody {
    /// Builds an error with the retry flag of its code, and with `over` false, so that the engine must not reuse any
    /// page. A message longer than [`TEXT_BYTES_MAX`] is cut.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code: code.number(),
            message: cut(message.into()),
            retry: code.retry(),
            over: false,
        }
    }

    /// Builds an error for a request that can never succeed: `retry` is false, whatever the code implies.
    pub fn for_good(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            retry: false,
            ..Self::new(code, message)
        }
    }

    /// Returns the code. Unknown numbers map to [`ErrorCode::Internal`].
    pub fn code(&self) -> ErrorCode {
        ErrorCode::from_number(self.code)
    }
}

/// Cuts a text to at most [`TEXT_BYTES_MAX`] bytes, at a character boundary, and replaces control characters: it may repeat
/// what a peer sent, and is one line of a log.
pub(crate) fn cut(mut text: String) -> String {
    if text.len() > TEXT_BYTES_MAX {
        let end = (0..=TEXT_BYTES_MAX)
            .rev()
            .find(|end| text.is_char_boundary(*end));
        text.truncate(end.unwrap_or(0));
    }
    // Control characters have one of these bytes. Few texts have one, and bytes are compared faster than characters: many at
    // a time, because the search does not end at the first one.
    let may_have_control = |byte: u8| (byte < b' ') | (byte == 0x7f) | (byte == 0xc2);
    let bytes = text.as_bytes().iter();
    match bytes.fold(false, |found, byte| found | may_have_control(*byte)) {
        true => text.replace(char::is_control, "?"),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_an_error_is_one_short_line() {
        let text = |given: &str| ErrorBody::new(ErrorCode::Invalid, given).message;
        assert_eq!(
            text("page is 'a\nb\0\u{85}': name it"),
            "page is 'a?b??': name it"
        );
        assert_eq!(text("à la page"), "à la page");
        assert_eq!(text(&"é".repeat(TEXT_BYTES_MAX)).len(), TEXT_BYTES_MAX);
        let long = format!("{}\u{85}", "a".repeat(TEXT_BYTES_MAX - 1));
        assert_eq!(text(&long).len(), TEXT_BYTES_MAX - 1);
    }
}
