//! The reference engine: a paged prefix cache driven by a trace, a client of the public protocol like any other.
//!
//! `trace`, `hashes` and `models` describe the workload. `cache` and `scheduler` decide what an engine does with a
//! prompt, without I/O. `fleet` and `driver` run the scheduler live. `rank`, `speaker`, `owed`, `layout`, `memory`,
//! `content` and `pipe` run rank processes, whose memory holds bytes that can be verified.

pub mod cache;
pub mod content;
mod driver;
pub mod fleet;
pub mod hashes;
pub mod layout;
pub mod memory;
pub mod models;
pub mod observed;
mod owed;
pub mod pipe;
pub mod rank;
pub mod rank_pipe;
pub mod scheduler;
mod speaker;
pub mod trace;
