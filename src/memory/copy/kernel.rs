//! Copies one range between two shared buffers.
#![expect(
    unsafe_code,
    reason = "raw and streaming copies between memory that other processes share"
)]

use crate::buffer::{BufferError, SharedBuffer};

/// Batches of at least this many bytes use non-temporal stores under [`super::CopyMode::Auto`]: measured from this size
/// on as at least as fast for fragments of 4 to 128 KiB. Smaller batches fit into a core's own cache, where their next
/// reader finds them.
pub const NON_TEMPORAL_MIN_BYTES: u64 = 256 << 10;

/// Ranges shorter than this are copied with plain stores: they are mostly head and tail.
#[cfg(target_arch = "x86_64")]
const STREAM_MIN_BYTES: usize = 512;

/// The store instructions of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kernel {
    /// `memcpy`.
    Plain,
    /// 32-byte streaming stores. Only [`Kernel::non_temporal`] creates this value, after it checked the processor.
    #[cfg(target_arch = "x86_64")]
    StreamAvx2,
    /// 16-byte streaming stores, which every x86-64 processor has.
    #[cfg(target_arch = "x86_64")]
    StreamSse2,
}

/// A range of a buffer.
#[derive(Clone, Copy)]
pub(super) struct BufferRange<'a> {
    pub(super) buffer: &'a SharedBuffer,
    pub(super) offset_bytes: u64,
}

impl BufferRange<'_> {
    fn start(&self, len_bytes: u64) -> Result<*mut u8, BufferError> {
        self.buffer.range(self.offset_bytes, len_bytes)
    }
}

impl Kernel {
    /// The widest streaming stores of this processor; plain stores where it has none.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn non_temporal() -> Self {
        if std::arch::is_x86_feature_detected!("avx2") {
            Self::StreamAvx2
        } else {
            Self::StreamSse2
        }
    }

    /// The widest streaming stores of this processor; plain stores where it has none.
    #[cfg(not(target_arch = "x86_64"))]
    pub(super) fn non_temporal() -> Self {
        Self::Plain
    }

    /// Copies `len_bytes` bytes and prefetches the first bytes of `next`, the source of the following copy.
    ///
    /// The ranges may overlap only if both are in the same mapping; the contents are then undefined, as with two
    /// concurrent writers.
    pub(super) fn copy(
        self,
        src: BufferRange<'_>,
        dst: BufferRange<'_>,
        len_bytes: u64,
        next: Option<BufferRange<'_>>,
    ) -> Result<(), BufferError> {
        let from = src.start(len_bytes)?.cast_const();
        let to = dst.start(len_bytes)?;
        let next = next.map_or(Ok(from), |next| Ok(next.start(0)?.cast_const()))?;
        // The length of a range in a mapping fits in usize.
        let len = len_bytes as usize;
        // SAFETY: `start` checked that `len` bytes lie in each mapping, and the borrowed buffers keep the mappings alive.
        unsafe { self.copy_unchecked(from, to, len, next) }
        Ok(())
    }

    /// Copies `len` bytes, and prefetches the first bytes at `next`, which may be any address.
    ///
    /// # Safety
    ///
    /// `len` bytes are readable at `from` and writable at `to`. They may overlap.
    unsafe fn copy_unchecked(self, from: *const u8, to: *mut u8, len: usize, next: *const u8) {
        match self {
            Self::Plain => {
                prefetch(next);
                // SAFETY: the caller guarantees both ranges; `copy` takes overlapping ones too.
                unsafe { std::ptr::copy(from, to, len) }
            }
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above; `non_temporal` found AVX2 before it made this value.
            Self::StreamAvx2 => unsafe { x86::stream_avx2(from, to, len, next) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above; SSE2 is part of x86-64.
            Self::StreamSse2 => unsafe { x86::stream_sse2(from, to, len, next) },
        }
    }

    /// Makes this thread's streaming stores visible before its later writes. Called at the end of each share of a
    /// thread.
    pub(super) fn finish(self) {
        #[cfg(target_arch = "x86_64")]
        if self != Self::Plain {
            // SAFETY: SSE, which has the instruction, is part of x86-64.
            unsafe { std::arch::x86_64::_mm_sfence() }
        }
    }
}

impl SharedBuffer {
    /// Copies `bytes` into the buffer, starting at `offset_bytes`, with the widest streaming stores of this processor. They
    /// do not fill the caches, which suits large copies that are read later. The bytes are visible to other threads before
    /// any later write of this thread.
    ///
    /// # Errors
    ///
    /// A range that does not lie in the buffer.
    pub fn write_streaming(&self, offset_bytes: u64, bytes: &[u8]) -> Result<(), BufferError> {
        let to = self.range(offset_bytes, bytes.len() as u64)?;
        let kernel = Kernel::non_temporal();
        // SAFETY: `range` checked that the bytes lie in the mapping, which lives as long as `self`; no reference into it is
        // ever formed, so that `bytes` cannot overlap it; and `non_temporal` found the instructions.
        unsafe { kernel.copy_unchecked(bytes.as_ptr(), to, bytes.len(), bytes.as_ptr()) }
        kernel.finish();
        Ok(())
    }
}

/// Prefetches the first bytes of the next source. Any address is allowed, because a prefetch never faults.
fn prefetch(next: *const u8) {
    #[cfg(target_arch = "x86_64")]
    for at in (0..x86::PREFETCH_BYTES).step_by(x86::LINE_BYTES) {
        x86::prefetch_line(next.wrapping_add(at));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = next;
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm_stream_si128, _mm256_loadu_si256,
        _mm256_stream_si256,
    };

    use super::STREAM_MIN_BYTES;

    /// One cache line.
    pub(super) const LINE_BYTES: usize = 64;
    /// Bytes of the next source that a plain copy prefetches before it starts.
    pub(super) const PREFETCH_BYTES: usize = 1024;
    /// Prefetch distance of a stream, which continues in the next source: large enough that a fragment at a random
    /// place arrives before it is read, small enough to stay in the L1 cache. Measured on a Zen core, for 8 KiB
    /// fragments in random order: 512 gives 8 GB/s, 4096 14 to 17, 8192 15 to 20, 16384 13 to 18.
    const AHEAD_BYTES: usize = 8192;

    /// Prefetches the cache line of `at`. Any address is allowed, because a prefetch never faults.
    #[inline(always)]
    pub(super) fn prefetch_line(at: *const u8) {
        // SAFETY: the instruction takes any address, and SSE, which has it, is part of x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }

    /// Splits a copy of `len` bytes into a head that ends where `to` is aligned to a line, a middle of whole lines and
    /// a tail. A copy shorter than [`STREAM_MIN_BYTES`] is all head.
    fn split(to: *mut u8, len: usize) -> (usize, usize) {
        if len < STREAM_MIN_BYTES {
            return (len, 0);
        }
        let head = to.align_offset(LINE_BYTES).min(len);
        (head, (len - head) / LINE_BYTES * LINE_BYTES)
    }

    macro_rules! stream {
        ($(#[$attribute:meta])* $name:ident, $vector_bytes:literal, $load:ident, $store:ident) => {
            $(#[$attribute])*
            /// Prefetches ahead in its own source, and towards its end in `next`, which may be any address.
            ///
            /// # Safety
            ///
            /// `len` bytes are readable at `from` and writable at `to`, and the processor has the instructions.
            pub(super) unsafe fn $name(from: *const u8, to: *mut u8, len: usize, next: *const u8) {
                let (head, middle) = split(to, len);
                let reach = AHEAD_BYTES.min(len);
                // SAFETY: the head is a part of the range that the caller guarantees.
                unsafe { std::ptr::copy(from, to, head) };
                for line in (head..head + middle).step_by(LINE_BYTES) {
                    let ahead = line + reach;
                    prefetch_line(match ahead.checked_sub(len) {
                        None => from.wrapping_add(ahead),
                        Some(beyond) => next.wrapping_add(beyond),
                    });
                    for at in (line..line + LINE_BYTES).step_by($vector_bytes) {
                        // SAFETY: `at` and a vector after it lie in the middle, a part of the range.
                        let vector = unsafe { $load(from.wrapping_add(at).cast()) };
                        // SAFETY: as above, for `to`. `split` aligned the start of the middle of `to` to a line, and
                        // `at` is a multiple of the vector's length after it, so that the store is aligned.
                        unsafe { $store(to.wrapping_add(at).cast(), vector) };
                    }
                }
                let done = head + middle;
                let (from, to) = (from.wrapping_add(done), to.wrapping_add(done));
                // SAFETY: the tail is the part of the range after the head and the middle.
                unsafe { std::ptr::copy(from, to, len - done) };
            }
        };
    }

    stream!(
        /// Copies with 32-byte streaming stores.
        #[target_feature(enable = "avx2")]
        stream_avx2, 32, _mm256_loadu_si256, _mm256_stream_si256
    );
    stream!(
        /// Copies with 16-byte streaming stores.
        stream_sse2, 16, _mm_loadu_si128, _mm_stream_si128
    );
}
