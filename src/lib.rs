//! kvferry: a KV-cache offload runtime.
//!
//! A leader and one worker per GPU run beside an LLM engine and move KV blocks between the engine's memory (G1) and
//! host blocks (G2), so that a prompt prefix that was computed once is loaded instead of computed again.
//!
//! # Map of packages
//!
//! Each folder of `src` with a `Cargo.toml` is a package; this package is the program, with the modules `cli`,
//! `config`, `error` and `telemetry`. `docs/architecture.md` has the map of packages: which depends on which, and why.
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
