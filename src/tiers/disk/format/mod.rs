//! The format of a disk tier.
//!
//! ```text
//! DIR/                          one for each disk; 0700, files 0600
//!   disk                        which disk of which tier this is            (`identity`)
//!   shard-S.id                  which directory of this name has the shard's pages (`shard`)
//!   shard-S/                    everything of one shard; one process at a time has its lock
//!     id                        the same
//!     lock
//!     marks                     resets that not every set has carried out   (`marks`)
//!     SET/                      the pages of one layout, page size and ratio (`geometry`)
//!       set                     what the pages are                          (`set_file`)
//!       segment-NNNNN           a table of regions, then pages              (`region`)
//!       index                   all headers in one file, after a clean end only (`index`)
//! ```
//!
//! Numbers are little-endian. Every file is a whole number of units of 4 KiB. Each of the files names the version of the
//! format; a directory of another version is refused, never read.
//!
//! # Why this order
//!
//! * A page is found by its number alone, so that a block is one range and I/O is as large as the block. With several
//!   disks, stripes of `stripe_pages` pages alternate between them.
//! * A header does not lie beside its block but in a table of fixed places at the start of the segment: recovery reads
//!   the tables, 512 bytes for each page with a ratio of up to 44, and not the data.
//! * The table has one place for each *region* of 16 pages, which holds the headers of all blocks that begin in it. A
//!   place for each block would need room for one block a page, or a second allocator.
//! * Each place has two slots. A change writes the slot with the older sequence number, so that a write that is torn
//!   leaves the headers as they were. New pages cost their own bytes and one slot; so does growth.
//! * Pages carry no header. Their checksums lie in the block's header, and cover the place of the page in its block, the
//!   block's anchor and domain, the shard and the set, and the store that wrote it. A page whose header is durable and
//!   whose bytes are not is a miss. So header and bytes may become durable in any order, and no flush separates them.
//! * Headers that list pages which a later block has overwritten lose by the sequence number of the store. The regions
//!   from which such pages were removed are durable before the pages are overwritten, so that no header lists pages that
//!   are not there, however a process ends.
//! * A slot is not overwritten while it is the only durable one of its region.
//! * The first region of each segment says which sweep the segment has followed last. A segment that was away during a sweep,
//!   and is put back, is removed: its headers list what the sweep has removed (`marks`).
//! * The index is a copy of the headers, written at a clean end and removed at the next start before anything changes. Its
//!   sequence number is that of the last write of region 0, which each start writes once more: an index that is put back
//!   later is not used.
//!
//! # What is durable when
//!
//! A store is acknowledged when host memory has it. Its move to the disk is complete when its bytes are written and
//! listed in this process. It is durable when its bytes and its header have been flushed, at most
//! [`FLUSH_AFTER`](super::FLUSH_AFTER) later, and a flush can be requested. A reset is durable before it is answered: its
//! mark is, and recovery applies all marks.
//!
//! # Upgrades
//!
//! [`FORMAT_VERSION`] changes with every change that an older program would read wrongly. Every version keeps the place of
//! the version, the length and the checksum of small files, so that a damaged version is not taken for another one. A
//! program reads the versions that it knows and names the others in its refusal. A set of an older version that a program
//! can read is rewritten, region by region, as its blocks change; a set that it cannot read is left alone until its room
//! is needed.

mod checksum;
mod codec;
mod geometry;
mod identity;
mod index;
mod marks;
mod names;
mod region;
mod set_file;
mod shard;

pub use checksum::PageSum;
pub(super) use checksum::SetKeys;
pub use geometry::{Extent, Geometry, SetKey, segment_bytes, segment_files};
pub use identity::{DiskIdentity, IDENTITY_NAME};
pub use index::INDEX_NAME;
pub(super) use index::{Index, check_index, read_index, write_index};
pub use marks::Mark;
pub(super) use marks::{MARKS_NAME, Marks, Sweeps};
pub(super) use names::{is_ours, segment_name, segment_number};
pub use region::{BlockHeader, HeaderPage, REGION_PAGES};
pub(super) use region::{Numbers, Region, RegionId};
pub(super) use set_file::{SET_NAME, SetFile};
pub(super) use shard::{SHARD_ID_NAME, ShardDirectory, shard_beside, shard_name};

/// Version of the format. See the module.
pub const FORMAT_VERSION: u32 = 1;

/// Why bytes are not what the format says.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// The bytes do not begin with the magic of this kind of file.
    #[error("not a {0} file of kvferry")]
    Magic(&'static str),
    /// Another version of the format.
    #[error(
        "format version {found}, and this program reads {FORMAT_VERSION}: start the program that wrote it, or give another \
         directory"
    )]
    Version {
        /// The version in the file.
        found: u32,
    },
    /// The checksum does not match: bytes were changed, or never written.
    #[error("the checksum does not match")]
    Checksum,
    /// A field has a value that no program writes.
    #[error("{field} is {value}, which is out of its range")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// The file ends inside a field.
    #[error("the file ends in the middle")]
    Short,
}
