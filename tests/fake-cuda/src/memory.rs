//! Device memory: files in memory, which every process that has a handle maps.
#![expect(
    unsafe_code,
    reason = "maps memory, and copies between addresses that the callers of a driver give"
)]

use std::cell::Cell;
use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

use crate::code::{Code, ILLEGAL_ADDRESS, INVALID_VALUE, OUT_OF_MEMORY};

/// What `cuMemAlloc` takes from a device at a time: memory of which one allocation may be a part. Other processes always open
/// all of it.
const BLOCK_BYTES: usize = 2 << 20;
/// Allocations begin at multiples of so many bytes and have multiples of them.
const ALIGN_BYTES: usize = 512;
/// Behind the memory: words about it, for every process that maps it.
const CONTROL_BYTES: usize = 4096;
const MAGIC: u64 = 0x4b56_4641_4b45_4d31;
/// What freed memory is filled with.
const POISON: u8 = 0xDB;

/// An allocation: the bytes of its block, where it begins in that, and how long it is.
pub(crate) struct Part {
    pub(crate) block_bytes: usize,
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

impl Part {
    /// Of so many bytes. Small ones begin anywhere, by their number.
    pub(crate) fn new(bytes: usize, number: u64) -> Option<Self> {
        let bytes = bytes.checked_next_multiple_of(ALIGN_BYTES)?;
        let offset = match bytes <= BLOCK_BYTES / 2 {
            true => number as usize % 7 * ALIGN_BYTES,
            false => 0,
        };
        let block_bytes = (offset + bytes).checked_next_multiple_of(BLOCK_BYTES)?;
        Some(Self {
            block_bytes,
            offset,
            bytes,
        })
    }
}

/// Some device memory, as this process maps it.
pub(crate) struct Block {
    fd: OwnedFd,
    /// Where this process reads and writes it. Callers never learn this address.
    base: *mut u8,
    bytes: usize,
}

// SAFETY: the mapping lives as long as the block, and is only touched by raw copies, which any thread may do.
unsafe impl Send for Block {}
// SAFETY: as above; concurrent copies race as copies on a device do.
unsafe impl Sync for Block {}

impl Block {
    /// New memory of whole granules.
    pub(crate) fn create(bytes: usize, id: u64) -> Result<Self, Code> {
        let fd = rustix::fs::memfd_create("fake-cuda", MemfdFlags::CLOEXEC);
        let fd = fd.map_err(|_| OUT_OF_MEMORY)?;
        let whole = (bytes + CONTROL_BYTES) as u64;
        rustix::fs::ftruncate(&fd, whole).map_err(|_| OUT_OF_MEMORY)?;
        let block = Self::map(fd, bytes)?;
        block.word(0).store(MAGIC, Ordering::SeqCst);
        block.word(1).store(id, Ordering::SeqCst);
        Ok(block)
    }

    /// Maps memory of another process, which must be the one with this id where one is given.
    pub(crate) fn open(fd: OwnedFd, id: Option<u64>) -> Result<Self, Code> {
        let stat = rustix::fs::fstat(&fd).map_err(|_| INVALID_VALUE)?;
        let bytes = usize::try_from(stat.st_size).unwrap_or(0);
        let bytes = bytes.checked_sub(CONTROL_BYTES).ok_or(INVALID_VALUE)?;
        let block = Self::map(fd, bytes)?;
        let (magic, found) = (block.word(0), block.word(1));
        let right = magic.load(Ordering::SeqCst) == MAGIC
            && id.is_none_or(|id| found.load(Ordering::SeqCst) == id)
            && !block.is_freed();
        right.then_some(block).ok_or(INVALID_VALUE)
    }

    fn map(fd: OwnedFd, bytes: usize) -> Result<Self, Code> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let whole = bytes + CONTROL_BYTES;
        // SAFETY: a new mapping at an address of the system's choice touches no memory of ours.
        let base = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                whole,
                protection,
                MapFlags::SHARED,
                fd.as_fd(),
                0,
            )
        };
        let base = base.map_err(|_| OUT_OF_MEMORY)?.cast();
        Ok(Self { fd, base, bytes })
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        let at = self.base.wrapping_add(self.bytes).cast::<AtomicU64>();
        // SAFETY: the control page lies behind the memory, and words there are only touched as atomics; `index` is below 3
        // in every call.
        unsafe { &*at.wrapping_add(index) }
    }

    /// Bytes of it.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its name, the same in every process.
    pub(crate) fn id(&self) -> u64 {
        self.word(1).load(Ordering::SeqCst)
    }

    /// The descriptor behind it.
    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Number of the descriptor, for another process to open.
    pub(crate) fn fd_number(&self) -> i32 {
        self.fd.as_raw_fd()
    }

    /// Its owner gives it back: who still has it mapped finds rubbish in the part that was used, and is told.
    pub(crate) fn free(&self, offset: usize, bytes: usize) {
        self.word(2).store(1, Ordering::SeqCst);
        let bytes = bytes.min(self.bytes.saturating_sub(offset));
        // SAFETY: the range lies in the mapping and before its control page.
        unsafe { ptr::write_bytes(self.base.wrapping_add(offset), POISON, bytes) };
    }

    /// Whether its owner gave it back.
    pub(crate) fn is_freed(&self) -> bool {
        self.word(2).load(Ordering::SeqCst) != 0
    }

    /// Address of a byte, for this process.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.bytes, "looked up before");
        self.base.wrapping_add(offset)
    }

    /// A word of stream memory operations.
    pub(crate) fn value(&self, offset: usize) -> Result<&AtomicU64, Code> {
        if !offset.is_multiple_of(8) || offset + 8 > self.bytes {
            return Err(INVALID_VALUE);
        }
        // SAFETY: in bounds and aligned; other processes touch it as a word, too.
        Ok(unsafe { &*self.at(offset).cast::<AtomicU64>() })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: nothing uses the mapping any more: who does holds the block.
        let unmapped = unsafe { rustix::mm::munmap(self.base.cast(), self.bytes + CONTROL_BYTES) };
        debug_assert!(unmapped.is_ok(), "a mapping of our own");
    }
}

/// Addresses that nothing can be read at or written to: what callers get as device pointers.
pub(crate) struct Addresses {
    base: *mut c_void,
    bytes: usize,
}

// SAFETY: only a range of numbers; nothing is ever read there.
unsafe impl Send for Addresses {}

impl Addresses {
    /// Takes a range of the address space.
    pub(crate) fn reserve(bytes: usize) -> Result<Self, Code> {
        // SAFETY: a new mapping at an address of the system's choice touches no memory of ours.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                ptr::null_mut(),
                bytes,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        let base = base.map_err(|_| OUT_OF_MEMORY)?;
        Ok(Self { base, bytes })
    }

    /// The first of them.
    pub(crate) fn base(&self) -> u64 {
        self.base as u64
    }

    /// How many there are.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Addresses {
    fn drop(&mut self) {
        // SAFETY: the range is ours, and nothing lies there.
        let unmapped = unsafe { rustix::mm::munmap(self.base, self.bytes) };
        debug_assert!(unmapped.is_ok(), "a range of our own");
    }
}

thread_local! {
    /// Copies of this thread.
    static COPIES: Cell<u32> = const { Cell::new(0) };
}

/// One of so many copies lets other threads run between its two parts. Each costs a turn of everything that is ready to
/// run: beside four busy processes on two cores 3 ms were seen, and a test makes tens of thousands of copies.
const YIELD_EVERY: u32 = 64;

/// Copies, in two parts: who looks in between sees that.
pub(crate) fn copy(to: *mut u8, from: *const u8, bytes: usize) -> Result<(), Code> {
    if to.is_null() || from.is_null() {
        return Err(ILLEGAL_ADDRESS);
    }
    let first = bytes / 2;
    // SAFETY: device ranges were looked up, host ranges are the caller's word, as with the real driver.
    unsafe { ptr::copy(from, to, first) };
    let copies = COPIES.get().wrapping_add(1);
    COPIES.set(copies);
    if copies % YIELD_EVERY == 1 {
        std::thread::yield_now();
    }
    let (to, from) = (to.wrapping_add(first), from.wrapping_add(first));
    // SAFETY: as above.
    unsafe { ptr::copy(from, to, bytes - first) };
    Ok(())
}

/// Writes what a call gives back, where its caller said.
pub(crate) fn give<T>(place: *mut T, value: T) -> Result<(), Code> {
    if place.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller of the driver gave a place for one value.
    unsafe { place.write(value) };
    Ok(())
}

/// Reads what the caller of a driver points at.
pub(crate) fn take<T: Copy>(place: *const T) -> Result<T, Code> {
    if place.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller of the driver points at one value.
    Ok(unsafe { place.read() })
}
