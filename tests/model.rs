//! Small models of the protocol, every one of their states visited: two ranks, a network that loses, repeats and
//! reorders, late copies, dead workers and restarted leaders.
//!
//! Each model runs the project's own code beside it, from the beginning of every path, and compares. Each has broken
//! variants in which the checker must find what goes wrong: so the properties can fail.

#![expect(
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test says what it expects and what it found"
)]

mod model {
    mod epochs;
    mod growth;
    pub mod harness;
    mod leases;
    mod publish;
}
