//! Memory that consists of chunks, each shared by itself: memory of CUDA's virtual memory management, of which
//! PyTorch's expandable segments consist.
#![expect(unsafe_code, reason = "calls into the CUDA driver")]

use std::ffi::{c_uint, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;

use super::Context;
use super::types::{Access, DeviceAddress, Location, Properties};
use crate::error::CudaError;

/// Bytes of a `CUmemFabricHandle`.
const FABRIC_HANDLE_BYTES: usize = 64;

/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: c_uint = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const ON_DEVICE: c_uint = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_WRITE: c_uint = 3;
/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`.
const GRANULARITY_MINIMUM: c_uint = 0;

/// How a chunk of device memory is shared with another process. The numbers are those of `CUmemAllocationHandleType`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Sharing {
    /// A file descriptor, within a host.
    Fd = 1,
    /// A handle of 64 bytes, within hosts that NVLink connects.
    Fabric = 8,
}

/// Handle by which another process opens a chunk.
#[derive(Debug)]
pub enum SharedChunk {
    /// The chunk's file descriptor.
    Fd(OwnedFd),
    /// The chunk's fabric handle.
    Fabric([u8; FABRIC_HANDLE_BYTES]),
}

fn location(context: &Context) -> Location {
    Location {
        kind: ON_DEVICE,
        id: context.device.ordinal,
    }
}

fn properties(context: &Context, sharing: Sharing) -> Properties {
    Properties {
        kind: PINNED,
        shareable: sharing as c_uint,
        location: location(context),
        windows_only: ptr::null(),
        flags: [0; 8],
    }
}

/// The physical memory of a chunk, wherever it is mapped. The memory exists as long as it is mapped anywhere, also
/// after this handle was dropped.
pub struct Physical {
    context: Arc<Context>,
    handle: u64,
    bytes: u64,
    sharing: Sharing,
}

impl Physical {
    pub(super) fn create(
        context: &Arc<Context>,
        bytes: u64,
        sharing: Sharing,
    ) -> Result<Self, CudaError> {
        let (api, mut handle) = (context.bind()?, 0);
        let properties = properties(context, sharing);
        // SAFETY: writes one handle; the properties are read during the call.
        let code =
            unsafe { (api.cuMemCreate)(&raw mut handle, bytes as usize, &raw const properties, 0) };
        context.check("cuMemCreate", code)?;
        Ok(Self {
            context: Arc::clone(context),
            handle,
            bytes,
            sharing,
        })
    }

    pub(super) fn import(
        context: &Arc<Context>,
        shared: &SharedChunk,
        bytes: u64,
    ) -> Result<Self, CudaError> {
        let (api, mut handle) = (context.bind()?, 0);
        let (at, sharing): (*mut c_void, _) = match shared {
            // The driver expects the number of the descriptor in place of a pointer.
            SharedChunk::Fd(fd) => (
                ptr::without_provenance_mut(fd.as_raw_fd() as usize),
                Sharing::Fd,
            ),
            SharedChunk::Fabric(bytes) => (ptr::from_ref(bytes).cast_mut().cast(), Sharing::Fabric),
        };
        // SAFETY: writes one handle. The descriptor remains owned by the caller, and the 64 bytes are only read: the
        // driver refuses a handle that it has not made.
        let code =
            unsafe { (api.cuMemImportFromShareableHandle)(&raw mut handle, at, sharing as c_uint) };
        context.check("cuMemImportFromShareableHandle", code)?;
        Ok(Self {
            context: Arc::clone(context),
            handle,
            bytes,
            sharing,
        })
    }

    /// Exports a handle by which another process opens the chunk.
    pub fn share(&self) -> Result<SharedChunk, CudaError> {
        let api = self.context.bind()?;
        let (mut fd, mut fabric) = (-1, [0; FABRIC_HANDLE_BYTES]);
        let at: *mut c_void = match self.sharing {
            Sharing::Fd => (&raw mut fd).cast(),
            Sharing::Fabric => (&raw mut fabric).cast(),
        };
        // SAFETY: writes a descriptor or 64 bytes, according to the kind of the handle, and the place for either is
        // large enough.
        let code = unsafe {
            (api.cuMemExportToShareableHandle)(at, self.handle, self.sharing as c_uint, 0)
        };
        self.context.check("cuMemExportToShareableHandle", code)?;
        Ok(match self.sharing {
            // SAFETY: the driver has created this descriptor for the caller, who is its only owner.
            Sharing::Fd => SharedChunk::Fd(unsafe { OwnedFd::from_raw_fd(fd) }),
            Sharing::Fabric => SharedChunk::Fabric(fabric),
        })
    }

    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        let handle = self.handle;
        self.context.give_back("cuMemRelease", |api| {
            // SAFETY: the handle was created or imported here; where the memory is mapped it stays mapped.
            unsafe { (api.cuMemRelease)(handle) }
        });
    }
}

impl std::fmt::Debug for Physical {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Physical({} bytes, {:?})", self.bytes, self.sharing)
    }
}

/// A reserved range of addresses of this process; the first `mapped_bytes` of it are mapped.
pub(super) struct Mapped {
    pub(super) context: Arc<Context>,
    pub(super) address: DeviceAddress,
    pub(super) bytes: u64,
    pub(super) mapped_bytes: u64,
}

impl Mapped {
    pub(super) fn reserve(context: &Arc<Context>, bytes: u64) -> Result<Self, CudaError> {
        let (api, mut address) = (context.bind()?, 0);
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        // SAFETY: writes one address; the reserved range contains nothing that this process uses.
        let code = unsafe { (api.cuMemAddressReserve)(&raw mut address, length, 0, 0, 0) };
        context.check("cuMemAddressReserve", code)?;
        Ok(Self {
            context: Arc::clone(context),
            address,
            bytes,
            mapped_bytes: 0,
        })
    }

    /// Maps a chunk after those that are mapped.
    pub(super) fn push(&mut self, chunk: &Physical) -> Result<(), CudaError> {
        let (api, at) = (self.context.bind()?, self.address + self.mapped_bytes);
        let behind = self.mapped_bytes.checked_add(chunk.bytes);
        let Some(behind) = behind.filter(|behind| *behind <= self.bytes) else {
            return Err(CudaError::OutOfRange("a chunk that is to be mapped"));
        };
        // SAFETY: the range is reserved by `self` and not mapped yet; a chunk that is shorter is refused by the driver.
        let code = unsafe { (api.cuMemMap)(at, chunk.bytes as usize, 0, chunk.handle, 0) };
        self.context.check("cuMemMap", code)?;
        self.mapped_bytes = behind;
        Ok(())
    }

    pub(super) fn allow(&self) -> Result<(), CudaError> {
        let api = self.context.bind()?;
        let access = Access {
            location: location(&self.context),
            flags: READ_WRITE,
        };
        // SAFETY: the range is mapped by `self`; the description is read during the call.
        let code = unsafe {
            (api.cuMemSetAccess)(
                self.address,
                self.mapped_bytes as usize,
                &raw const access,
                1,
            )
        };
        self.context.check("cuMemSetAccess", code)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let (address, bytes, mapped) = (self.address, self.bytes as usize, self.mapped_bytes);
        if mapped > 0 {
            self.context.give_back("cuMemUnmap", |api| {
                // SAFETY: the range was mapped here, and memory that a stream works on is held until that work has
                // ended.
                unsafe { (api.cuMemUnmap)(address, mapped as usize) }
            });
        }
        self.context.give_back("cuMemAddressFree", |api| {
            // SAFETY: the range was reserved here, and nothing is mapped there any longer.
            unsafe { (api.cuMemAddressFree)(address, bytes) }
        });
    }
}

/// The driver's granularity of chunks, in bytes: at least 1.
pub(super) fn granularity(context: &Context, sharing: Sharing) -> Result<u64, CudaError> {
    let (api, mut granularity) = (context.bind()?, 0);
    let properties = properties(context, sharing);
    // SAFETY: writes one number; the properties are read during the call.
    let code = unsafe {
        (api.cuMemGetAllocationGranularity)(
            &raw mut granularity,
            &raw const properties,
            GRANULARITY_MINIMUM,
        )
    };
    context.check("cuMemGetAllocationGranularity", code)?;
    Ok((granularity as u64).max(1))
}
