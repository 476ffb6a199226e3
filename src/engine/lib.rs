//! The reference engine: a paged prefix cache driven by a trace, a client of the public protocol like any other.
//!
//! `fleet` and `driver` run the scheduler of [`kvferry_workload`] against a leader. `rank`, `registered`, `layout`,
//! `memory` and `pipe` run rank processes, whose memory holds bytes that can be verified. `calls` replays what an engine
//! has recorded.

#![forbid(unsafe_code)]

pub mod calls;
pub mod driver;
pub mod error;
pub mod fleet;
pub mod layout;
pub mod memory;
pub mod metrics;
pub mod pipe;
mod random;
pub mod rank;
pub mod rank_pipe;
mod registered;
pub mod settings;
