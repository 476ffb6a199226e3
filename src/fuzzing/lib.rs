//! Fuzz targets: properties that hold for any bytes. A target is a function of bytes that panics where its property is
//! violated.
//!
//! `fuzz/` runs them with libFuzzer, and `tests/fuzz_corpus.rs` replays `fuzz/corpus` with every test run. Targets of
//! stateful code read their input as a list of operations ([`input`]), so that every input is valid. Each fuzzer calls its
//! target by its path and not through [`TARGETS`]: libFuzzer reads every counter of the program after every run, and a
//! program with all targets has several times as many.

#![forbid(unsafe_code)]
#![expect(
    clippy::panic,
    clippy::expect_used,
    reason = "a violated property ends the process"
)]

pub mod allocated;
mod input;
mod leader_core;
mod message;
mod registration;
mod server;
mod worker_core;
mod zmtp;

use input::Input;
pub use leader_core::leader_core;
pub use message::{body, frame, transfer_twin};
pub use registration::registration;
pub use server::server;
pub use worker_core::worker_core;
pub use zmtp::zmtp;

/// A fuzz target: its name, which is that of its folder in `fuzz/corpus`, and its property.
pub type Target = (&'static str, fn(&[u8]));

/// Every target.
pub const TARGETS: &[Target] = &[
    ("frame", frame),
    ("body", body),
    ("transfer_twin", transfer_twin),
    ("zmtp", zmtp),
    ("server", server),
    ("leader_core", leader_core),
    ("worker_core", worker_core),
    ("registration", registration),
];

/// Runs the target with this name.
pub fn run(name: &str, bytes: &[u8]) {
    let found = TARGETS.iter().find(|(target, _)| *target == name);
    let (_, target) = found.expect("the name of a target");
    target(bytes);
}
