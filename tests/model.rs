//! Small models of the protocol, each checked in all of its states: two ranks, a network that loses, repeats and
//! reorders messages, late copies, dead workers and restarted leaders.
//!
//! Each model runs the project's own code in parallel, from the start of every path, and compares the results. Each
//! model also has broken variants in which the checker must find the violation, which proves that its properties can
//! fail.

#![expect(
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test says what it expects and what it found"
)]
#![expect(
    clippy::disallowed_types,
    reason = "the checker, unlike the code that it checks, may use clocks and hash maps"
)]

mod model {
    mod epochs;
    mod growth;
    pub mod harness;
    mod leases;
    mod publish;
}
