//! The tier on a simulated disk.

mod copies;
mod crashes;
mod damage;
mod sim_files;
mod world;
