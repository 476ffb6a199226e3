//! The same core without processes.

pub mod links;
pub mod sequential;
pub mod world;
