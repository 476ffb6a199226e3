//! A disk tier: pages in files, with the proof of every byte. See [`mod@format`] for the files.

pub mod buffer;
mod copy;
mod directories;
mod discard;
mod faults;
pub mod files;
pub mod format;
pub mod fsck;
mod recover;
mod room;
pub mod scrub;
mod set;
mod sweep;
mod table;
#[cfg(test)]
mod tests;
mod tier;
mod verify;

use std::time::Duration;

pub use copy::{DISK_DEPTH, DISK_DEPTH_MAX, DiskCopier, DiskCopy, DiskCopyEnd, DiskIo};
pub use directories::{DISKS_MAX, DiskDirectories, DiskError, KnownTier};
pub use faults::{is_full, is_read_only};
pub use format::{SetKey, segment_bytes, segment_files};
pub use recover::Recovered;
pub use set::DiskSet;
pub use table::NotListed;
pub use tier::DiskTier;

/// Longest time between the listing of a page and the flush that makes it durable.
pub const FLUSH_AFTER: Duration = Duration::from_secs(1);
