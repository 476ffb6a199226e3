//! The tier on a simulated disk.

mod copies;
mod crashes;
mod damage;
mod durable;
mod failures;
mod fence;
mod fsck;
mod fsck_files;
#[path = "../../../../tests/support/loop_disk.rs"]
mod loop_disk;
mod put_back;
mod scrub;
mod segments;
mod sim_files;
mod world;
