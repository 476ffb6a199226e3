//! Device memory: memory files, which every process with a handle maps.
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

/// Size of the blocks that `cuMemAlloc` takes from a device. An allocation may be a part of a block, and other
/// processes always open the whole block.
const BLOCK_BYTES: usize = 2 << 20;
/// Allocations begin at multiples of this, and have multiples of this as their size.
const ALIGN_BYTES: usize = 512;
/// Size of the control page behind the memory: words about the memory, for every process that maps it.
const CONTROL_BYTES: usize = 4096;
const MAGIC: u64 = 0x4b56_4641_4b45_4d31;
/// Byte with which freed memory is filled.
const POISON: u8 = 0xDB;

/// An allocation: the size of its block, its offset in the block, and its size.
pub(crate) struct Part {
    pub(crate) block_bytes: usize,
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

impl Part {
    /// An allocation of `bytes`. Small allocations begin at different offsets, which depend on their number.
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

/// A block of device memory, as this process maps it.
pub(crate) struct Block {
    fd: OwnedFd,
    /// Address at which this process accesses the memory. Callers never get this address.
    base: *mut u8,
    bytes: usize,
}

// SAFETY: the mapping lives as long as the block, and is only touched by raw copies, which any thread may do.
unsafe impl Send for Block {}
// SAFETY: as above; concurrent copies race as copies on a device do.
unsafe impl Sync for Block {}

impl Block {
    /// Creates new memory of whole granules.
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

    /// Maps memory of another process. If `id` is given, the memory must have this id.
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
        // SAFETY: the control page lies behind the memory, and words there are only touched as atomics; `index` is
        // below 3 in every call.
        unsafe { &*at.wrapping_add(index) }
    }

    /// Size of the memory in bytes, without the control page.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Identity of the memory, equal in every process.
    pub(crate) fn id(&self) -> u64 {
        self.word(1).load(Ordering::SeqCst)
    }

    /// The file descriptor of the memory.
    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Number of the descriptor, which another process can open.
    pub(crate) fn fd_number(&self) -> i32 {
        self.fd.as_raw_fd()
    }

    /// Frees the memory by its owner: fills the used part with [`POISON`], and marks the block as freed for every
    /// process that still maps it.
    pub(crate) fn free(&self, offset: usize, bytes: usize) {
        self.word(2).store(1, Ordering::SeqCst);
        let bytes = bytes.min(self.bytes.saturating_sub(offset));
        // SAFETY: the range lies in the mapping and before its control page.
        unsafe { ptr::write_bytes(self.base.wrapping_add(offset), POISON, bytes) };
    }

    /// Whether the owner has freed the memory.
    pub(crate) fn is_freed(&self) -> bool {
        self.word(2).load(Ordering::SeqCst) != 0
    }

    /// Address of a byte in this process.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.bytes, "looked up before");
        self.base.wrapping_add(offset)
    }

    /// An aligned word for stream memory operations.
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
        // SAFETY: the mapping has no users left, because every user holds the block.
        let unmapped = unsafe { rustix::mm::munmap(self.base.cast(), self.bytes + CONTROL_BYTES) };
        debug_assert!(unmapped.is_ok(), "a mapping of our own");
    }
}

/// Reserved addresses that can be neither read nor written. Callers get these as device pointers.
pub(crate) struct Addresses {
    base: *mut c_void,
    bytes: usize,
}

// SAFETY: only a range of numbers; nothing is ever read there.
unsafe impl Send for Addresses {}

impl Addresses {
    /// Reserves a range of the address space.
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

    /// The first address.
    pub(crate) fn base(&self) -> u64 {
        self.base as u64
    }

    /// Number of addresses, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Addresses {
    fn drop(&mut self) {
        // SAFETY: this object owns the range, and no memory is accessed in it.
        let unmapped = unsafe { rustix::mm::munmap(self.base, self.bytes) };
        debug_assert!(unmapped.is_ok(), "a range of our own");
    }
}

thread_local! {
    /// Number of copies that this thread has made.
    static COPIES: Cell<u32> = const { Cell::new(0) };
}

/// One copy in this many lets other threads run between its two parts. Each yield costs a turn of all threads that are
/// ready: 3 ms were measured beside four busy processes on two cores, and a test makes tens of thousands of copies.
const YIELD_EVERY: u32 = 64;

/// Copies in two parts, so that a reader in between can observe a partial copy.
pub(crate) fn copy(to: *mut u8, from: *const u8, bytes: usize) -> Result<(), Code> {
    if to.is_null() || from.is_null() {
        return Err(ILLEGAL_ADDRESS);
    }
    let first = bytes / 2;
    // SAFETY: device ranges were looked up, and host ranges are the caller's responsibility, as with the real driver.
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

/// Writes a result of a call to the caller's address, which must not be null.
pub(crate) fn give<T>(place: *mut T, value: T) -> Result<(), Code> {
    if place.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller of the driver gave a place for one value.
    unsafe { place.write(value) };
    Ok(())
}

/// Reads a value at an address of the caller, which must not be null.
pub(crate) fn take<T: Copy>(place: *const T) -> Result<T, Code> {
    if place.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller of the driver points at one value.
    Ok(unsafe { place.read() })
}
