//! The reference engine: a paged prefix cache driven by a trace, a client of the public protocol like any other.
//!
//! `trace`, `hashes`, `models`: what is asked; `cache`, `scheduler`: what an engine does with it, without I/O; `driver`:
//! the scheduler, live; `rank`, `layout`, `content`, `pipe`: processes with memory and bytes that prove themselves.

pub mod cache;
pub mod content;
pub mod driver;
pub mod hashes;
pub mod layout;
pub mod models;
pub mod pipe;
pub mod rank;
pub mod scheduler;
pub mod trace;
