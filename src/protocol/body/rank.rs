//! Bodies of the requests of engine ranks to their worker, and of its answers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::is_false;
use kvferry_types::Registration;

/// Registers the KV memory of one engine rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Register {
    /// Requests up to this one are over: no copy for them starts.
    #[serde(default)]
    pub abandoned_through: u64,
    /// Identity of the engine, 16 bytes: that of its scheduler's hello.
    #[serde(with = "serde_bytes")]
    #[schemars(with = "kvferry_types::BinarySchema")]
    pub engine: [u8; 16],
    /// Layout and handles of the memory.
    pub registration: Registration,
    /// The worker only checks the description, opens the memory and answers; it serves none of it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub check_only: bool,
}

/// Answer to [`Register`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Registered {
    /// Pages for which this rank's depot has room.
    pub arena_pages: u32,
    /// Bytes of one page in the depot.
    pub page_bytes: u64,
    /// Reason why the memory is not copied; empty when it is served.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub not_served: String,
}

/// Everything up to this request is written: pages that stores read, and work that loads wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Written {
    /// Id of the last such request.
    pub through: u64,
    /// The request is written as soon as the word of [`Registration::timeline`] is at least `through`, and not before.
    #[serde(default, skip_serializing_if = "is_false")]
    pub timeline: bool,
}

/// Stops the copies for these requests, and forbids later ones. Answered when none of them runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Abandon {
    /// Ids of the requests.
    pub requests: Vec<u64>,
}

/// Removes the registered memory of a rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Unregister {}
