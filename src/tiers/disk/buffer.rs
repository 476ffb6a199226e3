//! Private memory whose start is aligned for direct I/O.

use super::files::UNIT_BYTES;

/// Zeroed memory of this process alone, aligned to [`UNIT_BYTES`].
#[derive(Debug)]
pub struct AlignedBuffer {
    memory: Vec<u8>,
    /// Place of the first aligned byte.
    start: usize,
    len: usize,
}

impl AlignedBuffer {
    /// A buffer of `len` bytes.
    pub fn new(len: usize) -> Self {
        let unit = UNIT_BYTES as usize;
        let memory = vec![0; len + unit];
        let start = memory.as_ptr().align_offset(unit).min(unit);
        Self { memory, start, len }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.len]
    }

    /// The bytes, mutable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.len]
    }
}
