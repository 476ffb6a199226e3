//! Storage tiers below host memory. Today: disks ([`disk`]).
//!
//! All functions block: an async caller runs them on a thread of its own.

pub mod disk;
#[cfg(test)]
#[path = "../../tests/support/skipped.rs"]
mod skipped;
