//! The tier on a simulated disk.

mod copies;
mod crashes;
mod damage;
mod fsck;
mod fsck_files;
mod scrub;
mod sim_files;
mod world;
