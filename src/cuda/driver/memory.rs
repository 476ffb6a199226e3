//! Device memory, and host memory that is pinned for a GPU.
#![expect(unsafe_code, reason = "calls into the CUDA driver")]

use std::ptr;
use std::sync::Arc;

use super::Context;
use super::types::{DeviceAddress, IPC_HANDLE_BYTES, IpcHandle};
use super::vmm::{Mapped, Physical, SharedChunk, Sharing, granularity};
use crate::error::CudaError;
use kvferry_memory::{Depot, SharedBuffer};

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, a required flag.
const IPC_LAZY_PEER_ACCESS: u32 = 1;
/// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`.
const REGISTER_FLAGS: u32 = 1 | 2;

/// Origin of memory, which determines how it is released.
pub(super) enum Source {
    Allocated,
    OpenedIpc,
    /// Releases itself.
    Chunks {
        _mapped: Mapped,
    },
}

/// Device memory with an address in this process.
pub struct DeviceMemory {
    pub(super) context: Arc<Context>,
    pub(super) address: DeviceAddress,
    pub(super) bytes: u64,
    pub(super) source: Source,
}

impl DeviceMemory {
    /// Allocates memory with arbitrary contents.
    pub fn allocate(context: &Arc<Context>, bytes: u64) -> Result<Self, CudaError> {
        let (api, mut address) = (context.bind()?, 0);
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        // SAFETY: writes one address.
        let code = unsafe { (api.cuMemAlloc_v2)(&raw mut address, length) };
        context.check("cuMemAlloc_v2", code)?;
        Ok(Self {
            context: Arc::clone(context),
            address,
            bytes,
            source: Source::Allocated,
        })
    }

    /// Exports a handle by which another process opens the memory.
    pub fn ipc_handle(&self) -> Result<[u8; IPC_HANDLE_BYTES], CudaError> {
        let api = self.context.bind()?;
        let mut handle = IpcHandle([0; IPC_HANDLE_BYTES]);
        // SAFETY: writes one handle; the address is that of live memory.
        let code = unsafe { (api.cuIpcGetMemHandle)(&raw mut handle, self.address) };
        self.context.check("cuIpcGetMemHandle", code)?;
        Ok(handle.0)
    }

    /// Opens another process's memory: the whole allocation that the handle refers to, from its first byte. The size is
    /// the one that the driver reports, or `described_bytes` where the driver does not know it.
    pub fn open_ipc(
        context: &Arc<Context>,
        handle: &[u8; IPC_HANDLE_BYTES],
        described_bytes: u64,
    ) -> Result<Self, CudaError> {
        let (api, mut address) = (context.bind()?, 0);
        let handle = IpcHandle(*handle);
        // SAFETY: writes one address. The handle may be any 64 bytes: the driver refuses those that are no handle.
        let code =
            unsafe { (api.cuIpcOpenMemHandle_v2)(&raw mut address, handle, IPC_LAZY_PEER_ACCESS) };
        context.check("cuIpcOpenMemHandle_v2", code)?;
        let mut opened = Self {
            context: Arc::clone(context),
            address,
            bytes: described_bytes,
            source: Source::OpenedIpc,
        };
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: writes an address and a size.
        let code = unsafe { (api.cuMemGetAddressRange_v2)(&raw mut base, &raw mut bytes, address) };
        match context.check("cuMemGetAddressRange_v2", code) {
            Ok(()) => {
                // Memory before the address is not part of the handle's memory.
                let before = address.saturating_sub(base);
                opened.bytes = (bytes as u64).saturating_sub(before);
            }
            Err(error) if error.is_fatal() => return Err(error),
            Err(error) => {
                tracing::warn!(%error, described_bytes, "the size of an engine's memory is reported by the engine alone");
            }
        }
        Ok(opened)
    }

    /// Opens chunks of another process, each with its length in bytes, and maps them one after another.
    pub fn open_chunks(
        context: &Arc<Context>,
        chunks: &[(SharedChunk, u64)],
    ) -> Result<Self, CudaError> {
        let total = chunks
            .iter()
            .fold(0, |sum: u64, (_, bytes)| sum.saturating_add(*bytes));
        let mut mapped = Mapped::reserve(context, total)?;
        for (shared, bytes) in chunks {
            let chunk = Physical::import(context, shared, *bytes)?;
            mapped.push(&chunk)?;
        }
        mapped.allow()?;
        Ok(Self::of_chunks(mapped))
    }

    /// Allocates at least `bytes` bytes, with arbitrary contents, in chunks of about `chunk_bytes` that can be shared.
    /// Both sizes are rounded up to the driver's granularity.
    pub fn allocate_chunks(
        context: &Arc<Context>,
        bytes: u64,
        chunk_bytes: u64,
        sharing: Sharing,
    ) -> Result<(Self, Vec<Physical>), CudaError> {
        let granularity = granularity(context, sharing)?;
        let complete = |bytes: u64| {
            bytes
                .max(1)
                .div_ceil(granularity)
                .saturating_mul(granularity)
        };
        let (total, chunk_bytes) = (complete(bytes), complete(chunk_bytes));
        let mut mapped = Mapped::reserve(context, total)?;
        let mut chunks = Vec::new();
        while mapped.mapped_bytes < total {
            let len_bytes = chunk_bytes.min(total - mapped.mapped_bytes);
            let chunk = Physical::create(context, len_bytes, sharing)?;
            mapped.push(&chunk)?;
            chunks.push(chunk);
        }
        mapped.allow()?;
        Ok((Self::of_chunks(mapped), chunks))
    }

    fn of_chunks(mapped: Mapped) -> Self {
        Self {
            context: Arc::clone(&mapped.context),
            address: mapped.address,
            bytes: mapped.bytes,
            source: Source::Chunks { _mapped: mapped },
        }
    }

    /// Size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether both are the same memory.
    pub fn is(&self, other: &Self) -> bool {
        self.address == other.address
    }

    pub(super) fn range(&self, offset_bytes: u64, len_bytes: u64) -> Option<DeviceAddress> {
        let end = offset_bytes.checked_add(len_bytes)?;
        (end <= self.bytes).then(|| self.address + offset_bytes)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let address = self.address;
        match &self.source {
            // SAFETY: the memory was allocated here, and memory that a stream works on is held until that work has
            // ended.
            Source::Allocated => self
                .context
                .give_back("cuMemFree_v2", |api| unsafe { (api.cuMemFree_v2)(address) }),
            Source::OpenedIpc => self.context.give_back("cuIpcCloseMemHandle", |api| {
                // SAFETY: the memory was opened here, and memory that a stream works on is held until that work has
                // ended.
                unsafe { (api.cuIpcCloseMemHandle)(address) }
            }),
            Source::Chunks { .. } => {}
        }
    }
}

impl std::fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let source = match &self.source {
            Source::Allocated => "allocated",
            Source::OpenedIpc => "opened",
            Source::Chunks { .. } => "in chunks",
        };
        write!(f, "DeviceMemory({} bytes, {source})", self.bytes)
    }
}

/// A value that keeps host memory mapped while it lives.
pub trait Mapping: Send + Sync + 'static {
    /// The mapped memory.
    fn mapped(&self) -> &SharedBuffer;
}

impl Mapping for SharedBuffer {
    fn mapped(&self) -> &SharedBuffer {
        self
    }
}

impl Mapping for Depot {
    fn mapped(&self) -> &SharedBuffer {
        self.buffer()
    }
}

/// A range of host memory that is pinned for the GPU until it is dropped.
pub struct PinnedRange {
    context: Arc<Context>,
    address: usize,
    /// Keeps pinned memory mapped: otherwise the driver would continue to use the pages that were mapped before.
    _mapping: Arc<dyn Mapping>,
}

impl PinnedRange {
    /// Pins a range, which must lie in the mapping.
    pub fn register<M: Mapping>(
        context: &Arc<Context>,
        mapping: &Arc<M>,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<Self, CudaError> {
        let api = context.bind()?;
        let out_of_range = CudaError::OutOfRange("host memory that is to be pinned");
        let address = host_range(mapping.mapped(), offset_bytes, len_bytes).ok_or(out_of_range)?;
        // SAFETY: the range lies in a live mapping. The driver pins its pages and changes no byte.
        let code = unsafe {
            (api.cuMemHostRegister_v2)(
                ptr::with_exposed_provenance_mut(address),
                len_bytes as usize,
                REGISTER_FLAGS,
            )
        };
        context.check("cuMemHostRegister_v2", code)?;
        Ok(Self {
            context: Arc::clone(context),
            address,
            _mapping: Arc::clone(mapping) as Arc<dyn Mapping>,
        })
    }
}

impl std::fmt::Debug for PinnedRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PinnedRange({:?}, {:#x})", self.context, self.address)
    }
}

impl Drop for PinnedRange {
    fn drop(&mut self) {
        let address = ptr::with_exposed_provenance_mut(self.address);
        self.context.give_back("cuMemHostUnregister", |api| {
            // SAFETY: the range was registered here.
            unsafe { (api.cuMemHostUnregister)(address) }
        });
    }
}

pub(super) fn host_range(
    buffer: &SharedBuffer,
    offset_bytes: u64,
    len_bytes: u64,
) -> Option<usize> {
    let end = offset_bytes.checked_add(len_bytes)?;
    let inside = len_bytes > 0 && end <= buffer.len();
    inside.then(|| buffer.address() + offset_bytes as usize)
}

/// Host memory that a stream copies from or to.
pub trait HostMemory: Send + Sync + 'static {
    /// The mapped memory.
    fn buffer(&self) -> &SharedBuffer;

    /// Offset of the first byte after the part that contains this offset. One copy must not cross it.
    fn end_of_part(&self, offset_bytes: u64) -> u64;
}

/// Device memory that a stream copies from or to, in numbered allocations.
pub trait DeviceSide: Send + Sync + 'static {
    /// An allocation by its index; `None` if there is no such allocation.
    fn memory(&self, allocation: u32) -> Option<&DeviceMemory>;
}
