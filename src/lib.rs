//! kvferry: a KV-cache offload runtime.
//!
//! A leader and one worker per GPU run beside an LLM engine and move KV blocks between the engine's memory (G1) and
//! host blocks (G2), so that a prompt prefix that was computed once is loaded instead of computed again.
//!
//! # Map of modules
//!
//! Read the modules in this order. An arrow says which module may use which; `tests/tidy.rs` checks the arrows.
//!
//! ```text
//! types     <- core <- shell <- actors           plain data, and the decisions about it
//! types     <- protocol <- session <- transport <- actors   messages, and their transport
//! types     <- memory <- cuda <- actors          the bytes, in host memory and on GPUs
//! types, protocol, transport, memory, cuda <- engine   the reference engine, an ordinary client
//! core, session, shell, engine <- sim            the same core, shell and sessions, without processes
//! everything <- cli                              the commands
//! ```
//!
//! [`core`] has no access to a socket, file, clock, random source or async runtime: it is `step(now, event, effects)`
//! on plain data. [`shell`] translates between messages and the core, with the same limits. The live system and the
//! simulator therefore run the same code.

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
