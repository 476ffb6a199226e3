//! The reference engine: a paged prefix cache driven by a trace, a client of the public protocol like any other.
//!
//! `trace`, `hashes`, `models`: what is asked; `cache`, `scheduler`: what an engine does with it, without I/O; `fleet`,
//! `driver`: the scheduler, live; `rank`, `speaker`, `owed`, `layout`, `memory`, `content`, `pipe`: processes with memory and bytes
//! that prove themselves.

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
