//! Translation between messages and the core, without sockets, clocks, threads or async.
//!
//! A shell receives messages of peers, steps the core with events, and sends messages for the core's effects. Every
//! difference between a live process and a simulated one is behind a trait, the shell's *host*: the actors implement it
//! with sockets and processes, the simulator with its network and its faults. Both therefore run the same translation.

#![forbid(unsafe_code)]

mod holder;
mod leader;
mod log_filter;
mod worker;

pub use holder::{Holder, HolderPeers, InUse};
pub use leader::{HostError, LOOKUP_NS, LeaderHost, LeaderShell, read_events};
pub use worker::{
    Fatal, INVALIDATE_SLICE_ENTRIES, Registering, Unlisted, WorkerFailure, WorkerHost, WorkerShell,
};
