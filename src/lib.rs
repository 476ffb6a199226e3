//! kvferry: a KV-cache offload runtime.
//!
//! A leader and one worker per GPU run beside an LLM engine and move KV blocks between the engine's memory (G1) and
//! host blocks (G2), so that a prompt prefix that was computed once is loaded instead of computed again.
//!
//! # Map of modules
//!
//! Read them in this order. An arrow says who may use whom; `tests/tidy.rs` holds the arrows.
//!
//! ```text
//! types     <- core <- shell <- actors           what exists, and what is decided about it
//! types     <- protocol <- session <- transport <- actors   how it is said, and how it gets there
//! types     <- memory <- cuda <- actors          the bytes, in host memory and on GPUs
//! types, protocol, transport, memory, cuda <- engine   the reference engine, a client like any other
//! core, session, shell, engine <- sim            the same core, shell and sessions, without processes
//! everything <- cli                              the commands
//! ```
//!
//! [`core`] never sees a socket, a file, a clock, a random source or an async runtime: it is
//! `step(now, event, effects)` on plain data. [`shell`] translates between messages and the core, with as little. So the
//! live system and the simulator run the same code.

#[cfg(test)]
extern crate self as kvferry;

pub mod actors;
pub mod cli;
pub mod config;
pub mod core;
pub mod cuda;
pub mod engine;
pub mod error;
pub mod memory;
pub mod protocol;
pub mod session;
pub mod shell;
pub mod sim;
#[cfg(test)]
#[path = "../tests/support/skipped.rs"]
mod skipped;
pub mod telemetry;
pub mod transport;
pub mod types;
