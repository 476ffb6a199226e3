//! The requests that the reference engine serves, and its decisions, without I/O.
//!
//! * `trace`: request traces, read or generated;
//! * `models`: the KV geometry of models;
//! * `hashes`: page hashes of a prompt;
//! * `content`: bytes of a page that can be verified;
//! * `cache`: a paged prefix cache;
//! * `hybrid`: the prefix cache for models with several groups of layers;
//! * `scheduler`: the steps of an engine for a prompt, and its requests to the leader.

#![forbid(unsafe_code)]

pub mod cache;
pub mod content;
pub mod hashes;
pub mod hybrid;
pub mod models;
pub mod scheduler;
#[cfg(test)]
#[path = "../../tests/support/skipped.rs"]
mod skipped;
pub mod trace;
