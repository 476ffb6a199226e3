//! The same core without processes.

pub mod links;
pub mod sequential;
pub mod timed;
pub mod world;
