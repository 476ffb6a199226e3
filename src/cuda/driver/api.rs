//! The functions of the driver, looked up by name.
//!
//! The library is loaded by the name that the driver installs, `libcuda.so.1`, and by no other: `libcuda.so` in the
//! folder of a CUDA toolkit is a stub that refuses every call. Functions are called through a table of this module and
//! not through cudarc's bindings: those abort the process when a function is missing, and convert the driver's result
//! to an enum, which is undefined behaviour for a code that is newer than the bindings.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;
use libloading::Library;

use super::types::{Access, Code, DeviceAddress, IpcHandle, Properties};
use crate::error::NoDriver;

/// The driver's library.
const LIBRARY: &str = "libcuda.so.1";

/// The driver's library, loaded once and never unloaded: its functions are used until the process ends.
fn library() -> Result<&'static Library, NoDriver> {
    static LOADED: OnceLock<Library> = OnceLock::new();
    if let Some(library) = LOADED.get() {
        return Ok(library);
    }
    // SAFETY: loading runs the initialisers of the driver's library, which are made to run in any process.
    let library = unsafe { Library::new(LIBRARY) }.map_err(|error| {
        tracing::debug!(%error, "no CUDA driver");
        NoDriver::NoLibrary
    })?;
    Ok(LOADED.get_or_init(|| library))
}

macro_rules! functions {
    (
        required { $($name:ident: fn($($argument:ty),*),)* }
        optional { $($newer:ident: fn($($its:ty),*),)* }
    ) => {
        /// The functions of this driver.
        #[expect(non_snake_case, reason = "the names that the driver has")]
        pub(super) struct Api {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> Code,)*
            $(pub(super) $newer: Option<unsafe extern "C" fn($($its),*) -> Code>,)*
        }

        impl Api {
            /// Loads the library and looks up its functions.
            pub(super) fn load() -> Result<Self, NoDriver> {
                let library = library()?;
                Ok(Self {
                    $($name: {
                        // SAFETY: the type is that of this function in the driver's header.
                        let found = unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) };
                        *found.map_err(|_| NoDriver::TooOld(stringify!($name)))?
                    },)*
                    $($newer: {
                        // SAFETY: the type is that of this function in the driver's header.
                        let found = unsafe { library.get(concat!(stringify!($newer), "\0").as_bytes()) };
                        found.ok().map(|function| *function)
                    },)*
                })
            }
        }
    };
}

functions! {
    required {
        cuInit: fn(c_uint),
        cuDriverGetVersion: fn(*mut c_int),
        cuGetErrorName: fn(Code, *mut *const c_char),
        cuDeviceGetCount: fn(*mut c_int),
        cuDeviceGet: fn(*mut c_int, c_int),
        cuDeviceGetAttribute: fn(*mut c_int, c_uint, c_int),
        cuDeviceGetUuid: fn(*mut [u8; 16], c_int),
        cuDeviceGetName: fn(*mut c_char, c_int, c_int),
        cuDeviceGetPCIBusId: fn(*mut c_char, c_int, c_int),
        cuDevicePrimaryCtxRetain: fn(*mut sys::CUcontext, c_int),
        cuDevicePrimaryCtxRelease_v2: fn(c_int),
        cuCtxSetCurrent: fn(sys::CUcontext),
        cuStreamCreateWithPriority: fn(*mut sys::CUstream, c_uint, c_int),
        cuStreamDestroy_v2: fn(sys::CUstream),
        cuStreamSynchronize: fn(sys::CUstream),
        cuEventCreate: fn(*mut sys::CUevent, c_uint),
        cuEventRecord: fn(sys::CUevent, sys::CUstream),
        cuEventQuery: fn(sys::CUevent),
        cuEventDestroy_v2: fn(sys::CUevent),
        cuMemAlloc_v2: fn(*mut DeviceAddress, usize),
        cuMemFree_v2: fn(DeviceAddress),
        cuMemGetAddressRange_v2: fn(*mut DeviceAddress, *mut usize, DeviceAddress),
        cuMemcpyAsync: fn(DeviceAddress, DeviceAddress, usize, sys::CUstream),
        cuMemHostRegister_v2: fn(*mut c_void, usize, c_uint),
        cuMemHostUnregister: fn(*mut c_void),
        cuIpcGetMemHandle: fn(*mut IpcHandle, DeviceAddress),
        cuIpcOpenMemHandle_v2: fn(*mut DeviceAddress, IpcHandle, c_uint),
        cuIpcCloseMemHandle: fn(DeviceAddress),
        cuMemGetAllocationGranularity: fn(*mut usize, *const Properties, c_uint),
        cuMemCreate: fn(*mut u64, usize, *const Properties, u64),
        cuMemRelease: fn(u64),
        cuMemExportToShareableHandle: fn(*mut c_void, u64, c_uint, u64),
        cuMemImportFromShareableHandle: fn(*mut u64, *mut c_void, c_uint),
        cuMemAddressReserve: fn(*mut DeviceAddress, usize, usize, DeviceAddress, u64),
        cuMemAddressFree: fn(DeviceAddress, usize),
        cuMemMap: fn(DeviceAddress, usize, usize, u64, u64),
        cuMemUnmap: fn(DeviceAddress, usize),
        cuMemSetAccess: fn(DeviceAddress, usize, *const Access, usize),
    }
    optional {
        cuDeviceGetUuid_v2: fn(*mut [u8; 16], c_int),
        cuStreamWriteValue64_v2: fn(sys::CUstream, DeviceAddress, u64, c_uint),
        cuMemcpyBatchAsync: fn(*mut DeviceAddress, *mut DeviceAddress, *mut usize, usize, *mut c_void, *mut usize, usize, *mut usize, sys::CUstream),
        cuMemcpyBatchAsync_v2: fn(*mut DeviceAddress, *mut DeviceAddress, *mut usize, usize, *mut c_void, *mut usize, usize, sys::CUstream),
    }
}
