//! Roles of clients.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The role of a client. More may be added: an unknown role is answered with an error, and is no protocol violation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(transform = kvferry_types::open_words)]
pub enum Role {
    /// The scheduler of an engine: sends lookups, loads, stores.
    Engine,
    /// One rank of an engine: registers its memory with its worker.
    Rank,
    /// A worker.
    Worker,
    /// An operator or a probe.
    Admin,
    /// The process that starts the worker of one rank on another machine, and sees its end.
    Supervisor,
    /// A role that this version does not know.
    #[serde(other)]
    #[schemars(skip)]
    Unknown,
}

impl Role {
    /// The roles that this version knows.
    pub const ALL: [Self; 5] = [
        Self::Engine,
        Self::Rank,
        Self::Worker,
        Self::Admin,
        Self::Supervisor,
    ];

    /// The name on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Engine => "engine",
            Self::Rank => "rank",
            Self::Worker => "worker",
            Self::Admin => "admin",
            Self::Supervisor => "supervisor",
            Self::Unknown => "unknown",
        }
    }
}
