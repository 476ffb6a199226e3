//! Handles of device memory, with which other processes open the memory.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{Mode, OFlags};

use crate::code::{Code, INVALID_CONTEXT, INVALID_VALUE};
use crate::memory::Block;

/// Size of `CUipcMemHandle` and of `CUmemFabricHandle`.
pub(crate) const HANDLE_BYTES: usize = 64;
const MAGIC: [u8; 8] = *b"KVFAKEH1";

/// A handle with which another process finds a block and the offset in it.
pub(crate) fn handle(block: &Block, offset: usize, namespace: u32) -> [u8; HANDLE_BYTES] {
    let mut bytes = [0; HANDLE_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&std::process::id().to_le_bytes());
    bytes[12..16].copy_from_slice(&block.fd_number().to_le_bytes());
    bytes[16..24].copy_from_slice(&block.id().to_le_bytes());
    bytes[24..32].copy_from_slice(&(offset as u64).to_le_bytes());
    bytes[32..36].copy_from_slice(&namespace.to_le_bytes());
    bytes
}

fn number<const N: usize>(bytes: &[u8; HANDLE_BYTES], at: usize) -> [u8; N] {
    let mut number = [0; N];
    number.copy_from_slice(&bytes[at..at + N]);
    number
}

/// Whether a handle was made by this process.
pub(crate) fn is_ours(bytes: &[u8; HANDLE_BYTES]) -> bool {
    u32::from_le_bytes(number(bytes, 8)) == std::process::id()
}

/// Offset at which the memory of a handle begins in its block.
pub(crate) fn offset(bytes: &[u8; HANDLE_BYTES]) -> u64 {
    u64::from_le_bytes(number(bytes, 24))
}

/// Opens another process's block. Fails after that process has ended or has freed the block, and in another namespace.
pub(crate) fn open(bytes: &[u8; HANDLE_BYTES], namespace: u32) -> Result<Block, Code> {
    if bytes[..8] == MAGIC && u32::from_le_bytes(number(bytes, 32)) != namespace {
        return Err(INVALID_CONTEXT);
    }
    open_anywhere(bytes)
}

/// Opens a block like [`open`], in any namespace.
pub(crate) fn open_anywhere(bytes: &[u8; HANDLE_BYTES]) -> Result<Block, Code> {
    if bytes[..8] != MAGIC {
        return Err(INVALID_VALUE);
    }
    let process = u32::from_le_bytes(number(bytes, 8));
    let fd = i32::from_le_bytes(number(bytes, 12));
    let path = format!("/proc/{process}/fd/{fd}");
    let fd = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    let fd = fd.map_err(|_| INVALID_VALUE)?;
    Block::open(fd, Some(u64::from_le_bytes(number(bytes, 16))))
}

/// A new descriptor of a block, which the caller must close.
pub(crate) fn export(block: &Block) -> Result<i32, Code> {
    let fd = block.fd().try_clone().map_err(|_| INVALID_VALUE)?;
    // The caller owns the number from here on, as with the real driver.
    Ok(std::os::fd::IntoRawFd::into_raw_fd(fd))
}

/// Opens the block of a descriptor, which remains the caller's.
pub(crate) fn import(fd: i32) -> Result<Block, Code> {
    let path = format!("/proc/self/fd/{fd}");
    let opened = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    let opened: OwnedFd = opened.map_err(|_| INVALID_VALUE)?;
    debug_assert!(opened.as_raw_fd() != fd, "a descriptor of its own");
    Block::open(opened, None)
}
