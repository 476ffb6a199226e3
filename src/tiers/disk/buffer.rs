//! Private memory whose start is aligned for direct I/O.

use memmap2::{Advice, MmapMut};

/// Reads and writes begin at multiples of this and have multiples of it as their length, in bytes: the largest logical
/// sector of today's disks, and the page of memory.
pub const UNIT_BYTES: u64 = 4096;
/// Smallest buffer for which huge pages are requested: one of them.
const HUGE_BYTES: usize = 2 << 20;

/// Zeroed memory of this process alone, aligned to [`UNIT_BYTES`].
///
/// Large buffers are in huge pages where the system has some. A device describes each contiguous range of memory by one
/// entry of a bounded list, so that a read into scattered pages of 4 KiB is split into several requests.
#[derive(Debug)]
pub struct AlignedBuffer {
    memory: Memory,
    /// Place of the first aligned byte.
    start: usize,
    len: usize,
}

#[derive(Debug)]
enum Memory {
    Heap(Vec<u8>),
    Mapped(MmapMut),
}

impl AlignedBuffer {
    /// A buffer of `len` bytes.
    pub fn new(len: usize) -> Self {
        if len >= HUGE_BYTES
            && let Ok(map) = MmapMut::map_anon(len)
        {
            // Without huge pages the buffer is slower, and just as good.
            if let Err(error) = map.advise(Advice::HugePage) {
                tracing::debug!(%error, "no huge pages for the buffer of a disk");
            }
            let (memory, start) = (Memory::Mapped(map), 0);
            return Self { memory, start, len };
        }
        let unit = UNIT_BYTES as usize;
        let memory = vec![0; len + unit];
        let start = memory.as_ptr().align_offset(unit).min(unit);
        let memory = Memory::Heap(memory);
        Self { memory, start, len }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        let all: &[u8] = match &self.memory {
            Memory::Heap(all) => all,
            Memory::Mapped(all) => all,
        };
        &all[self.start..self.start + self.len]
    }

    /// The bytes, mutable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let all: &mut [u8] = match &mut self.memory {
            Memory::Heap(all) => all,
            Memory::Mapped(all) => all,
        };
        &mut all[self.start..self.start + self.len]
    }
}
