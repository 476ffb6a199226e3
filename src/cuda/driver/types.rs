//! Types of the driver's interface.

use std::ffi::{c_int, c_uint, c_void};

/// `CUresult`.
pub(super) type Code = u32;
/// `CUdeviceptr`.
pub(super) type DeviceAddress = u64;

/// Bytes of a `cudaIpcMemHandle_t`.
pub const IPC_HANDLE_BYTES: usize = 64;

/// `CUipcMemHandle`, passed by value. Bytes and not `c_char`, whose sign differs between processors.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct IpcHandle(pub(super) [u8; IPC_HANDLE_BYTES]);

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Location {
    pub(super) kind: c_uint,
    pub(super) id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
pub(super) struct Properties {
    pub(super) kind: c_uint,
    pub(super) shareable: c_uint,
    pub(super) location: Location,
    pub(super) windows_only: *const c_void,
    pub(super) flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
pub(super) struct Access {
    pub(super) location: Location,
    pub(super) flags: c_uint,
}
