//! kvferry: a KV-cache offload runtime.
//!
//! A leader and one worker per GPU run beside an LLM engine and move KV blocks between the engine's memory (G1) and
//! host blocks (G2), so that a prompt prefix that was computed once is loaded instead of computed again.
//!
//! # Map of packages
//!
//! Each folder of `src` with a `Cargo.toml` is a package; this package is the program. Read them in this order. An arrow
//! says which package depends on which.
//!
//! ```text
//! types     <- core <- shell <- actors           plain data, and the decisions about it
//! types     <- protocol <- session <- transport <- actors   messages, and their transport
//! types     <- memory <- cuda <- actors          the bytes, in host memory and on GPUs
//! types     <- workload                          traces, models, and the scheduler of the reference engine
//! workload, protocol, transport, memory, cuda <- engine     the reference engine, an ordinary client
//! core, session, shell, workload <- sim          the same core, shell and sessions, without processes
//! everything <- cli                              the commands: the program
//! everything <- tools                            programs of the developers; not shipped
//! ```
//!
//! [`kvferry_core`] has no access to a socket, file, clock, random source or async runtime: it is
//! `step(now, event, effects)` on plain data. `kvferry-shell` translates between messages and the core, with the same
//! limits. The live system and the simulator therefore run the same code. Manifests and `clippy.toml` of these packages
//! hold the limits.

#![forbid(unsafe_code)]

pub mod cli;
pub mod config;
pub mod error;
pub mod telemetry;
