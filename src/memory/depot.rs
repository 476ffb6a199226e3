//! Host memory for one shard: a header, then the arena's pages.
//!
//! ```text
//! offset  bytes  field (numbers little-endian)
//!      0      8  magic "KVFDEPOT"
//!      8      4  format version
//!     12      4  reserved
//!     16      8  bytes of the whole depot
//!     24      8  page_bytes of the arena, 0 while no layout is known
//!     32     16  reserved: key of the anchors
//!     48      8  reserved: last epoch
//!     56   4040  reserved, zero
//!   4096         page 0; page i at 4096 + i x page_stride_bytes(page_bytes)
//! ```
//!
//! A page starts at a multiple of [`PAGE_ALIGN_BYTES`], so that aligned streaming stores reach all of it.

use std::os::fd::OwnedFd;

use super::buffer::{BufferError, SharedBuffer};

/// Bytes before page 0.
pub const DEPOT_HEADER_BYTES: u64 = 4096;
/// Version of the header and of what it describes.
pub const DEPOT_FORMAT_VERSION: u32 = 1;
/// Pages start at multiples of this: one cache line.
const PAGE_ALIGN_BYTES: u64 = 64;
const MAGIC: [u8; 8] = *b"KVFDEPOT";
const VERSION_AT: u64 = 8;
const BYTES_AT: u64 = 16;
const PAGE_BYTES_AT: u64 = 24;

/// Distance from one page of an arena to the next, in bytes.
pub const fn page_stride_bytes(page_bytes: u64) -> u64 {
    page_bytes.next_multiple_of(PAGE_ALIGN_BYTES)
}

/// The memory of one shard on one host. It outlives the workers that map it: its creator hands the descriptor on.
#[derive(Debug)]
pub struct Depot {
    buffer: SharedBuffer,
}

/// Why a depot could not be made or taken over.
#[derive(Debug, thiserror::Error)]
pub enum DepotError {
    /// The memory could not be had or mapped.
    #[error(transparent)]
    Buffer(#[from] BufferError),
    /// No room for the header and anything behind it.
    #[error("a depot of {bytes} bytes holds no page: give it more than {DEPOT_HEADER_BYTES} bytes")]
    TooSmall {
        /// Bytes that were asked for or found.
        bytes: u64,
    },
    /// The memory does not start as a depot does.
    #[error("the memory is no depot: its first bytes are {found:02x?}")]
    NotADepot {
        /// What stands where the magic should.
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
    /// The header describes a depot of another size.
    #[error("the depot's header says {header_bytes} bytes, the memory has {bytes}")]
    Size {
        /// Bytes by the header.
        header_bytes: u64,
        /// Bytes of the memory.
        bytes: u64,
    },
}

impl Depot {
    /// A new, empty depot of `bytes` bytes in all. Memory is only promised, not taken: see [`Self::prefault`].
    pub fn create(bytes: u64) -> Result<Self, DepotError> {
        if bytes <= DEPOT_HEADER_BYTES {
            return Err(DepotError::TooSmall { bytes });
        }
        let buffer = SharedBuffer::create("kvferry-depot", bytes)?;
        buffer.write_from(VERSION_AT, &DEPOT_FORMAT_VERSION.to_le_bytes())?;
        buffer.write_from(BYTES_AT, &bytes.to_le_bytes())?;
        buffer.write_from(0, &MAGIC)?;
        Ok(Self { buffer })
    }

    /// Takes over a depot from the process that created it.
    pub fn from_fd(fd: OwnedFd) -> Result<Self, DepotError> {
        let stat = rustix::fs::fstat(&fd).map_err(|errno| BufferError::Io {
            action: "look at the depot",
            source: errno.into(),
        })?;
        let bytes = u64::try_from(stat.st_size).unwrap_or(0);
        if bytes <= DEPOT_HEADER_BYTES {
            return Err(DepotError::TooSmall { bytes });
        }
        let depot = Self {
            buffer: SharedBuffer::from_fd(fd, bytes)?,
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
        Ok(depot)
    }

    fn header<const N: usize>(&self, at: u64) -> Result<[u8; N], DepotError> {
        let mut field = [0; N];
        self.buffer.read_into(at, &mut field)?;
        Ok(field)
    }

    /// `page_bytes` of the layout whose pages the arena holds; `None` while none was set.
    pub fn page_bytes(&self) -> Result<Option<u64>, DepotError> {
        let page_bytes = u64::from_le_bytes(self.header(PAGE_BYTES_AT)?);
        Ok((page_bytes > 0).then_some(page_bytes))
    }

    /// Notes the layout's `page_bytes`. The caller drops what the arena held before, if it was another number.
    pub fn set_page_bytes(&self, page_bytes: u64) -> Result<(), DepotError> {
        Ok(self
            .buffer
            .write_from(PAGE_BYTES_AT, &page_bytes.to_le_bytes())?)
    }

    /// Bytes in all, header included.
    pub fn bytes(&self) -> u64 {
        self.buffer.len()
    }

    /// Whole pages of `page_bytes` that fit, 0 for pages of no bytes.
    pub fn arena_pages(&self, page_bytes: u64) -> u32 {
        let room = self.bytes() - DEPOT_HEADER_BYTES;
        match page_bytes {
            0 => 0,
            // The last page needs no padding behind it.
            _ if page_bytes > room => 0,
            _ if page_bytes > u64::MAX - PAGE_ALIGN_BYTES => 0,
            _ => {
                let pages = (room - page_bytes) / page_stride_bytes(page_bytes) + 1;
                u32::try_from(pages).unwrap_or(u32::MAX)
            }
        }
    }

    /// The memory behind it, header included: for reads and writes of whole pages by disk and remote tiers.
    pub fn buffer(&self) -> &SharedBuffer {
        &self.buffer
    }

    /// Another descriptor of the same memory, to be handed to a worker.
    pub fn try_clone_fd(&self) -> Result<OwnedFd, DepotError> {
        Ok(self.buffer.try_clone_fd()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_process_takes_over_what_was_created() {
        let depot = Depot::create(1 << 20).expect("memory");
        assert_eq!(depot.page_bytes().expect("readable"), None);
        depot.set_page_bytes(1000).expect("writable");
        let again = Depot::from_fd(depot.try_clone_fd().expect("descriptor")).expect("a depot");
        assert_eq!(again.bytes(), 1 << 20);
        assert_eq!(again.page_bytes().expect("readable"), Some(1000));
    }

    #[test]
    fn pages_are_counted_with_their_padding() {
        let depot = Depot::create(DEPOT_HEADER_BYTES + 1024 * 3).expect("memory");
        assert_eq!(page_stride_bytes(1000), 1024);
        assert_eq!(depot.arena_pages(1024), 3);
        assert_eq!(depot.arena_pages(1000), 3);
        assert_eq!(depot.arena_pages(1025), 2);
        assert_eq!(depot.arena_pages(3072), 1);
        for none in [0, 3073, u64::MAX] {
            assert_eq!(depot.arena_pages(none), 0);
        }
    }

    #[test]
    fn what_is_no_depot_is_refused() {
        assert!(matches!(
            Depot::create(4096),
            Err(DepotError::TooSmall { bytes: 4096 })
        ));
        let reopened = |depot: &Depot| Depot::from_fd(depot.try_clone_fd().expect("descriptor"));
        let plain = SharedBuffer::create("kvferry-test", 8192).expect("memory");
        let found = Depot::from_fd(plain.try_clone_fd().expect("descriptor"));
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
