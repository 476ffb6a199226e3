//! A process's context on a GPU.
#![expect(unsafe_code, reason = "calls into the CUDA driver")]

use std::cell::Cell;
use std::ffi::c_uint;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use cudarc::driver::sys;

use super::api::Api;
use super::types::Code;
use super::{Device, Driver};
use crate::error::CudaError;

/// `CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM`. Only batched copies need it; single copies do not.
const OWN_ADDRESSES_OF_REGISTERED_MEMORY: c_uint = 91;

thread_local! {
    /// Number of the context that this thread last made current.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

/// This process's primary context on a GPU. Released when its last user drops it.
pub struct Context {
    /// A number that no other context of this process has had: the driver may return the same handle again.
    number: u64,
    driver: &'static Driver,
    pub(super) device: Device,
    handle: sys::CUcontext,
    /// The driver refused a batched copy: no further ones are issued.
    refused_batch: AtomicBool,
}

// SAFETY: a context may be used by any thread; each thread makes it current before a call.
unsafe impl Send for Context {}
// SAFETY: as above; the driver does its own locking.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the primary context of a GPU.
    pub fn new(driver: &'static Driver, device: Device) -> Result<Arc<Self>, CudaError> {
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle.
        let code =
            unsafe { (driver.api.cuDevicePrimaryCtxRetain)(&raw mut handle, device.ordinal) };
        driver.check("cuDevicePrimaryCtxRetain", code)?;
        static LAST: AtomicU64 = AtomicU64::new(0);
        Ok(Arc::new(Self {
            number: LAST.fetch_add(1, Ordering::Relaxed) + 1,
            driver,
            device,
            handle,
            refused_batch: AtomicBool::new(false),
        }))
    }

    /// The GPU of this context.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Product name of the GPU, such as `NVIDIA H200`.
    pub fn name(&self) -> Result<String, CudaError> {
        self.driver.name(self.device)
    }

    /// Whether the driver accepts batched copies: it has such a call, which reads registered host memory at the
    /// process's own addresses, and has not refused one yet.
    pub fn copies_together(&self) -> Result<bool, CudaError> {
        if !self.driver.has_batches() || self.has_refused_batches() {
            return Ok(false);
        }
        match self.attribute(OWN_ADDRESSES_OF_REGISTERED_MEMORY) {
            Ok(value) => Ok(value == 1),
            Err(error) if error.is_fatal() => Err(error),
            Err(error) => {
                tracing::warn!(%error, "copies are given to the driver one by one");
                Ok(false)
            }
        }
    }

    /// An attribute of the GPU, by its number in `CUdevice_attribute`.
    pub fn attribute(&self, number: c_uint) -> Result<i32, CudaError> {
        let (api, mut value) = (self.bind()?, 0);
        // SAFETY: writes one number.
        let code =
            unsafe { (api.cuDeviceGetAttribute)(&raw mut value, number, self.device.ordinal) };
        self.check("cuDeviceGetAttribute", code)?;
        Ok(value)
    }

    pub(super) fn has_refused_batches(&self) -> bool {
        self.refused_batch.load(Ordering::Relaxed)
    }

    pub(super) fn refused_batch(&self, error: CudaError) {
        tracing::warn!(%error, "copies are given to the driver one by one from now on");
        self.refused_batch.store(true, Ordering::Relaxed);
    }

    /// PCI bus id of the GPU, such as `0000:3b:00.0`.
    pub fn pci_bus_id(&self) -> Result<String, CudaError> {
        self.driver.pci_bus_id(self.device)
    }

    /// Makes the context current on this thread, unless it is already.
    pub(super) fn bind(&self) -> Result<&Api, CudaError> {
        if CURRENT.get() != self.number {
            // SAFETY: the context is retained.
            let code = unsafe { (self.driver.api.cuCtxSetCurrent)(self.handle) };
            self.driver.check("cuCtxSetCurrent", code)?;
            CURRENT.set(self.number);
        }
        Ok(&self.driver.api)
    }

    pub(super) fn check(&self, call: &'static str, code: Code) -> Result<(), CudaError> {
        self.driver.check(call, code)
    }

    /// Releases a resource. Errors are only logged: if the GPU is lost, nothing remains to be done.
    pub(super) fn give_back(&self, call: &'static str, give: impl FnOnce(&Api) -> Code) {
        let given = self.bind().and_then(|api| self.check(call, give(api)));
        match given {
            Ok(()) => {}
            // The GPU is lost to this process, which will end.
            Err(error) if error.is_fatal() => {
                tracing::debug!(%error, "the driver unpinned nothing");
            }
            Err(error) => tracing::error!(%error, "the driver unpinned nothing"),
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context was retained once, and everything created in it holds it.
        let code = unsafe { (self.driver.api.cuDevicePrimaryCtxRelease_v2)(self.device.ordinal) };
        if let Err(error) = self.check("cuDevicePrimaryCtxRelease_v2", code) {
            tracing::debug!(%error, "the driver unpinned nothing");
        }
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Context({})", self.device.uuid)
    }
}
