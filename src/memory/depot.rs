//! Host memory for one shard: a header, then one inventory entry for each of the arena's pages, then the pages.
//!
//! ```text
//! offset  bytes  field (numbers little-endian)
//!      0      8  magic "KVFDEPOT"
//!      8      4  format version
//!     12      4  reserved
//!     16      8  bytes of the whole depot
//!     24      8  page_bytes of the arena, 0 while no layout is known
//!     32     16  id of the depot, random
//!     48      8  epoch of the leader that last requested the inventory
//!     56      8  sequence number of that reading
//!     64   4032  a byte for each worker: see [`Depot::batch_mark`]
//!   4096         entry i of the inventory at 4096 + i x 80: see `inventory`
//!                page i at pages_at(page_bytes) + i x page_stride_bytes(page_bytes), after the last entry
//! ```
//!
//! A page starts at a multiple of [`PAGE_ALIGN_BYTES`], so that aligned streaming stores reach all of it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::buffer::{BufferError, SharedBuffer};
use kvferry_types::{DepotId, Epoch, INVENTORY_ENTRY_BYTES};

/// Bytes of one entry of the inventory.
pub const ENTRY_BYTES: u64 = INVENTORY_ENTRY_BYTES;
/// Bytes before the first entry.
pub const DEPOT_HEADER_BYTES: u64 = 4096;
/// Version of the header and of the layout that it describes.
pub const DEPOT_FORMAT_VERSION: u32 = 3;
/// Pages start at multiples of this: one cache line.
const PAGE_ALIGN_BYTES: u64 = 64;
const SYSTEM_PAGE_BYTES: u64 = 4096;
const MAGIC: [u8; 8] = *b"KVFDEPOT";
const VERSION_AT: u64 = 8;
const BYTES_AT: u64 = 16;
const PAGE_BYTES_AT: u64 = 24;
const NAME_AT: u64 = 32;
const READ_EPOCH_AT: u64 = 48;
const READING_AT: u64 = 56;
const MARKS_AT: u64 = 64;
/// Number of marks: worker `MARKS + n` shares the mark of worker `n`.
const MARKS: u64 = DEPOT_HEADER_BYTES - MARKS_AT;

/// Distance from one page of an arena to the next, in bytes.
pub const fn page_stride_bytes(page_bytes: u64) -> u64 {
    match page_bytes.checked_next_multiple_of(PAGE_ALIGN_BYTES) {
        Some(stride) => stride,
        None => page_bytes,
    }
}

/// The memory of one shard on one host. A depot outlives the workers that map it, because its creator keeps it and
/// passes its descriptor to each of them.
#[derive(Debug)]
pub struct Depot {
    buffer: SharedBuffer,
    id: DepotId,
}

/// Whether a worker may issue many copies by one call of a GPU's driver (a batched copy). The mark lies in the depot,
/// so that it outlives the worker: no error code reports that such a call hangs or ends the process; only the death of
/// the previous worker during one shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum BatchMark {
    /// No batched copy is in flight.
    None = 0,
    /// Batched copies are in flight.
    UnderWay = 1,
    /// A worker died while batched copies were in flight: no further ones are issued.
    Avoid = 2,
}

/// Why a depot could not be created or opened.
#[derive(Debug, thiserror::Error)]
pub enum DepotError {
    /// The memory could not be allocated or mapped.
    #[error(transparent)]
    Buffer(#[from] BufferError),
    /// No room for anything after the header.
    #[error(
        "a depot of {bytes} bytes holds no page: each shard needs {DEPOT_HEADER_BYTES} bytes for its header, and room for one page \
         of its KV at least"
    )]
    TooSmall {
        /// Bytes that were requested or found.
        bytes: u64,
    },
    /// The memory does not start with the magic of a depot.
    #[error("the memory is no depot: its first bytes are {found:02x?}")]
    NotADepot {
        /// The bytes in place of the magic.
        found: [u8; 8],
    },
    /// A depot of another version.
    #[error(
        "the depot has format version {found}, this build knows {DEPOT_FORMAT_VERSION}: start \
         with a new depot"
    )]
    Version {
        /// The version in the header.
        found: u32,
    },
    /// The system gave no random bytes for the depot's id.
    #[error("no random bytes: {0}")]
    Random(std::io::Error),
    /// The header describes a depot of another size.
    #[error("the depot's header has {header_bytes} bytes, the memory {bytes}")]
    Size {
        /// Bytes according to the header.
        header_bytes: u64,
        /// Bytes of the memory.
        bytes: u64,
    },
}

impl Depot {
    /// Creates an empty depot of `bytes` bytes, header included. The memory is reserved lazily: see [`Self::prefault`].
    pub fn create(bytes: u64) -> Result<Self, DepotError> {
        if bytes <= DEPOT_HEADER_BYTES {
            return Err(DepotError::TooSmall { bytes });
        }
        let buffer = SharedBuffer::create("kvferry-depot", bytes)?;
        buffer.write_from(VERSION_AT, &DEPOT_FORMAT_VERSION.to_le_bytes())?;
        buffer.write_from(BYTES_AT, &bytes.to_le_bytes())?;
        let mut name = [0; 16];
        rustix::rand::getrandom(&mut name, rustix::rand::GetRandomFlags::empty())
            .map_err(|errno| DepotError::Random(errno.into()))?;
        buffer.write_from(NAME_AT, &name)?;
        buffer.write_from(0, &MAGIC)?;
        let id = DepotId(u128::from_le_bytes(name));
        Ok(Self { buffer, id })
    }

    /// Opens a depot that another process created.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, DepotError> {
        let stat = rustix::fs::fstat(&fd).map_err(|errno| BufferError::Io {
            action: "look at the depot",
            source: errno.into(),
        })?;
        let bytes = u64::try_from(stat.st_size).unwrap_or(0);
        if bytes <= DEPOT_HEADER_BYTES {
            return Err(DepotError::TooSmall { bytes });
        }
        let mut depot = Self {
            buffer: SharedBuffer::from_fd(fd, bytes)?,
            id: DepotId::default(),
        };
        let found = depot.header(0)?;
        if found != MAGIC {
            return Err(DepotError::NotADepot { found });
        }
        let found = u32::from_le_bytes(depot.header(VERSION_AT)?);
        if found != DEPOT_FORMAT_VERSION {
            return Err(DepotError::Version { found });
        }
        let header_bytes = u64::from_le_bytes(depot.header(BYTES_AT)?);
        if header_bytes != bytes {
            return Err(DepotError::Size {
                header_bytes,
                bytes,
            });
        }
        depot.id = DepotId(u128::from_le_bytes(depot.header(NAME_AT)?));
        Ok(depot)
    }

    fn header<const N: usize>(&self, at: u64) -> Result<[u8; N], BufferError> {
        let mut field = [0; N];
        self.buffer.read_into(at, &mut field)?;
        Ok(field)
    }

    /// `page_bytes` of the layout whose pages the arena holds; `None` while none was set.
    pub fn page_bytes(&self) -> Result<Option<u64>, BufferError> {
        let page_bytes = u64::from_le_bytes(self.header(PAGE_BYTES_AT)?);
        Ok((page_bytes > 0).then_some(page_bytes))
    }

    /// Changes `page_bytes` from one value to another. Returns `false` when another process has changed it meanwhile.
    pub(super) fn exchange_page_bytes(&self, from: u64, to: u64) -> Result<bool, BufferError> {
        self.buffer.exchange_word(PAGE_BYTES_AT, from, to)
    }

    /// Epoch of the leader and sequence number of the last reading of the inventory; zeros before the first.
    pub fn last_reading(&self) -> Result<(Epoch, u64), BufferError> {
        let epoch = self.buffer.load_word(READ_EPOCH_AT)?;
        Ok((Epoch(epoch), self.buffer.load_word(READING_AT)?))
    }

    /// Stores the epoch and the sequence number of the current reading.
    pub(super) fn set_last_reading(
        &self,
        (epoch, number): (Epoch, u64),
    ) -> Result<(), BufferError> {
        self.buffer.store_word(READING_AT, number)?;
        self.buffer.store_word(READ_EPOCH_AT, epoch.0)
    }

    /// Random id of the depot. The id lies in the header, so that it survives the death of all processes that mapped
    /// it.
    pub fn id(&self) -> DepotId {
        self.id
    }

    /// The id as two words, the key of the entries' seals: entries of another depot's inventory are not valid here.
    pub(super) fn seal_key(&self) -> [u64; 2] {
        [(self.id.0 >> 64) as u64, self.id.0 as u64]
    }

    /// The mark of the worker with this number. A byte that no version writes counts as [`BatchMark::Avoid`].
    pub fn batch_mark(&self, worker: usize) -> Result<BatchMark, BufferError> {
        let [mark] = self.header(Self::mark_at(worker))?;
        Ok(match mark {
            0 => BatchMark::None,
            1 => BatchMark::UnderWay,
            _ => BatchMark::Avoid,
        })
    }

    /// Sets the mark of the worker with this number.
    pub fn set_batch_mark(&self, worker: usize, mark: BatchMark) -> Result<(), BufferError> {
        self.buffer.write_from(Self::mark_at(worker), &[mark as u8])
    }

    const fn mark_at(worker: usize) -> u64 {
        MARKS_AT + worker as u64 % MARKS
    }

    /// Bytes of the whole depot, header included.
    pub fn bytes(&self) -> u64 {
        self.buffer.len()
    }

    /// Number of whole pages of `page_bytes` that fit, 0 if `page_bytes` is 0.
    pub fn arena_pages(&self, page_bytes: u64) -> u32 {
        Self::pages_in(self.bytes(), page_bytes)
    }

    /// Number of whole pages of `page_bytes` that fit into a depot of `bytes` bytes, 0 if `page_bytes` is 0.
    pub fn pages_in(bytes: u64, page_bytes: u64) -> u32 {
        let room = bytes.saturating_sub(DEPOT_HEADER_BYTES);
        if page_bytes == 0 || page_bytes > room {
            return 0;
        }
        let each = page_stride_bytes(page_bytes) + ENTRY_BYTES;
        // The last page needs no padding after it, and the gap between entries and pages is less than a page of memory.
        let most = room / each + 1;
        let most = u32::try_from(most).unwrap_or(u32::MAX);
        let least = u32::try_from(room.saturating_sub(SYSTEM_PAGE_BYTES) / each);
        let least = least.unwrap_or(u32::MAX).min(most);
        let fits = |pages: &u32| Self::bytes_for(*pages, page_bytes) <= bytes;
        (least..=most).rev().find(fits).unwrap_or(0)
    }

    /// Bytes of a depot with room for `pages` pages of `page_bytes`.
    pub const fn bytes_for(pages: u32, page_bytes: u64) -> u64 {
        let stride = page_stride_bytes(page_bytes);
        let behind = match pages {
            0 => 0,
            _ => (pages as u64 - 1)
                .saturating_mul(stride)
                .saturating_add(page_bytes),
        };
        Self::pages_behind(pages).saturating_add(behind)
    }

    /// Offset of page 0 in bytes, a multiple of 4096.
    pub fn pages_at(&self, page_bytes: u64) -> u64 {
        Self::pages_behind(self.arena_pages(page_bytes))
    }

    const fn pages_behind(entries: u32) -> u64 {
        (DEPOT_HEADER_BYTES + entries as u64 * ENTRY_BYTES).next_multiple_of(SYSTEM_PAGE_BYTES)
    }

    /// Offset of a page's inventory entry in bytes.
    pub(super) const fn entry_at(page: u32) -> u64 {
        DEPOT_HEADER_BYTES + page as u64 * ENTRY_BYTES
    }

    /// The depot's memory, header included: for reads and writes of whole pages by disk and remote tiers.
    pub fn buffer(&self) -> &SharedBuffer {
        &self.buffer
    }
}

impl AsFd for Depot {
    /// The descriptor of the memory. Workers get duplicates of it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.buffer.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_process_opens_a_created_depot() {
        let depot = Depot::create(1 << 20).expect("memory");
        assert_eq!(depot.page_bytes().expect("readable"), None);
        depot.hold_pages_of(1000).expect("writable");
        let again = Depot::from_fd(depot.as_fd().try_clone_to_owned().expect("descriptor"))
            .expect("a depot");
        assert_eq!(again.bytes(), 1 << 20);
        assert_eq!(again.page_bytes().expect("readable"), Some(1000));
        assert_eq!(again.id(), depot.id());
        assert_ne!(Depot::create(1 << 20).expect("memory").id(), depot.id());
    }

    #[test]
    fn marks_of_workers_outlive_them() {
        let depot = Depot::create(1 << 20).expect("memory");
        depot.hold_pages_of(1000).expect("writable");
        let page_bytes = depot.page_bytes().expect("readable");
        let last = MARKS as usize - 1;
        for worker in [0, 1, last] {
            assert_eq!(depot.batch_mark(worker).expect("readable"), BatchMark::None);
            let set = depot.set_batch_mark(worker, BatchMark::UnderWay);
            set.expect("writable");
        }
        depot.set_batch_mark(1, BatchMark::Avoid).expect("writable");
        let again = Depot::from_fd(depot.as_fd().try_clone_to_owned().expect("descriptor"))
            .expect("a depot");
        let marks = [0, 1, 2, last, last + 1].map(|worker| again.batch_mark(worker));
        let marks = marks.map(|mark| mark.expect("readable"));
        use BatchMark::{Avoid, None, UnderWay};
        assert_eq!(marks, [UnderWay, Avoid, None, UnderWay, UnderWay]);
        assert_eq!(again.page_bytes().expect("readable"), page_bytes);
        assert_eq!(again.id(), depot.id());
    }

    #[test]
    fn as_many_pages_fit_as_there_is_room_for() {
        assert_eq!(page_stride_bytes(1000), 1024);
        for page_bytes in [1, 64, 1000, 1024, 4096, 18_432, 3 << 20] {
            for pages in [1, 2, 3, 63, 64, 1000] {
                let bytes = Depot::bytes_for(pages, page_bytes);
                assert_eq!(Depot::pages_in(bytes, page_bytes), pages, "{page_bytes}");
                assert_eq!(Depot::pages_in(bytes - 1, page_bytes), pages - 1);
            }
        }
        for none in [0, 1 << 30, u64::MAX] {
            assert_eq!(Depot::pages_in(1 << 20, none), 0);
        }
        assert_eq!(Depot::pages_in(u64::MAX, 1), u32::MAX);
        let depot = Depot::create(1 << 20).expect("memory");
        let pages = depot.arena_pages(1000);
        let end = depot.pages_at(1000) + u64::from(pages - 1) * 1024 + 1000;
        assert!(end <= 1 << 20 && Depot::entry_at(pages) <= depot.pages_at(1000));
        assert_eq!(depot.pages_at(1000) % 4096, 0);
    }

    #[test]
    fn memory_that_is_no_depot_is_refused() {
        assert!(matches!(
            Depot::create(4096),
            Err(DepotError::TooSmall { bytes: 4096 })
        ));
        let reopened =
            |depot: &Depot| Depot::from_fd(depot.as_fd().try_clone_to_owned().expect("descriptor"));
        let plain = SharedBuffer::create("kvferry-test", 8192).expect("memory");
        let found = Depot::from_fd(plain.as_fd().try_clone_to_owned().expect("descriptor"));
        assert!(matches!(
            found,
            Err(DepotError::NotADepot { found: [0, ..] })
        ));

        let depot = Depot::create(8192).expect("memory");
        depot
            .buffer()
            .write_from(BYTES_AT, &1_u64.to_le_bytes())
            .expect("written");
        assert!(matches!(
            reopened(&depot),
            Err(DepotError::Size {
                header_bytes: 1,
                ..
            })
        ));
        depot
            .buffer()
            .write_from(VERSION_AT, &[9])
            .expect("written");
        assert!(matches!(
            reopened(&depot),
            Err(DepotError::Version { found: 9 })
        ));
    }
}
