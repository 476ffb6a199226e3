//! The same core without processes.

pub mod sequential;
pub mod world;
