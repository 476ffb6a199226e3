//! Simulations: the state machines of the live system without processes, in virtual time.

#![forbid(unsafe_code)]

mod error;
pub mod links;
pub mod sequential;
pub mod timed;
#[cfg(any(test, feature = "worlds"))]
pub mod world;

pub use error::ReplayError;
pub use kvferry_shell::read_events;
