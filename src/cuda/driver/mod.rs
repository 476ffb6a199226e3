//! The only calls into the CUDA driver. What this module offers is safe: memory that a stream works on lives until that work
//! is over, and every range is checked before it is given to a stream.
#![expect(unsafe_code, reason = "calls into the CUDA driver")]

mod api;
mod copies;
mod memory;
mod stream;
mod vmm;

use std::cell::Cell;
use std::ffi::{CStr, c_int, c_uint};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;

use self::api::{Api, Code};
use super::error::{CudaError, NoDriver};

pub use copies::BATCH_COPIES_MAX;
pub use memory::{DeviceMemory, IPC_HANDLE_BYTES, PinnedRange};
pub use stream::{DeviceSide, HostMemory, NotSubmitted, Stream, Submitted};
pub use vmm::{Physical, SharedChunk, Sharing};

const SUCCESS: Code = 0;
const NO_DEVICE: Code = 100;
/// `CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM`. Copies by themselves do without.
const OWN_ADDRESSES_OF_REGISTERED_MEMORY: c_uint = 91;

/// The driver of this machine, started.
pub struct Driver {
    api: Api,
    version: i32,
    devices: c_int,
}

/// 16 bytes that name a GPU, the same in every process.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceUuid(pub [u8; 16]);

/// One GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    ordinal: c_int,
    /// Its name for other processes.
    pub uuid: DeviceUuid,
}

thread_local! {
    /// Number of the context that this thread has made its own, last.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

impl Driver {
    /// Loads and starts the driver, once in a process. One that does not start may do so later.
    pub fn get() -> Result<&'static Self, NoDriver> {
        static DRIVER: OnceLock<Driver> = OnceLock::new();
        if let Some(driver) = DRIVER.get() {
            return Ok(driver);
        }
        let started = Self::start()?;
        Ok(DRIVER.get_or_init(|| started))
    }

    fn start() -> Result<Self, NoDriver> {
        let mut driver = Self {
            api: Api::load()?,
            version: 0,
            devices: 0,
        };
        // SAFETY: may be called at any time, by any thread.
        let started = unsafe { (driver.api.cuInit)(0) };
        if started == NO_DEVICE {
            return Err(NoDriver::NoDevice);
        }
        let failed = |error| NoDriver::InitFailed { error };
        driver.check("cuInit", started).map_err(failed)?;
        // SAFETY: writes one number.
        let code = unsafe { (driver.api.cuDriverGetVersion)(&raw mut driver.version) };
        driver.check("cuDriverGetVersion", code).map_err(failed)?;
        // SAFETY: writes one number.
        let code = unsafe { (driver.api.cuDeviceGetCount)(&raw mut driver.devices) };
        driver.check("cuDeviceGetCount", code).map_err(failed)?;
        match driver.devices {
            ..=0 => Err(NoDriver::NoDevice),
            _ => Ok(driver),
        }
    }

    /// Version of CUDA that it was made for: 1000 x major + 10 x minor.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// Every GPU that this process may use.
    pub fn devices(&'static self) -> Result<Vec<Device>, CudaError> {
        (0..self.devices).map(|index| self.device(index)).collect()
    }

    fn device(&self, index: c_int) -> Result<Device, CudaError> {
        let (mut ordinal, mut uuid) = (0, [0; 16]);
        // SAFETY: writes one number.
        let code = unsafe { (self.api.cuDeviceGet)(&raw mut ordinal, index) };
        self.check("cuDeviceGet", code)?;
        // SAFETY: writes 16 bytes.
        let code = unsafe { (self.api.cuDeviceGetUuid)(&raw mut uuid, ordinal) };
        self.check("cuDeviceGetUuid", code)?;
        Ok(Device {
            ordinal,
            uuid: DeviceUuid(uuid),
        })
    }

    /// The GPU with this name, if this process may use it.
    pub fn find(&'static self, uuid: DeviceUuid) -> Result<Option<Device>, CudaError> {
        let devices = self.devices()?;
        Ok(devices.into_iter().find(|device| device.uuid == uuid))
    }

    /// Where a GPU is plugged in, such as `0000:3b:00.0`.
    pub fn pci_bus_id(&self, device: Device) -> Result<String, CudaError> {
        let mut text = [0; 32];
        // SAFETY: writes at most 32 characters, the last of them 0.
        let code = unsafe { (self.api.cuDeviceGetPCIBusId)(text.as_mut_ptr(), 32, device.ordinal) };
        self.check("cuDeviceGetPCIBusId", code)?;
        let characters = text.iter().take_while(|each| **each != 0);
        Ok(characters
            .map(|each| char::from(each.cast_unsigned()))
            .collect())
    }

    /// Whether streams can write words in device memory.
    pub fn writes_words(&self) -> bool {
        self.api.cuStreamWriteValue64_v2.is_some()
    }

    /// Whether it has a call for many copies, 12.8's or 13.0's.
    fn has_batches(&self) -> bool {
        self.api.cuMemcpyBatchAsync.is_some() || self.api.cuMemcpyBatchAsync_v2.is_some()
    }

    fn check(&self, call: &'static str, code: Code) -> Result<(), CudaError> {
        if code == SUCCESS {
            return Ok(());
        }
        let mut text = ptr::null();
        // SAFETY: writes one pointer.
        let known = unsafe { (self.api.cuGetErrorName)(code, &raw mut text) };
        let name = match known == SUCCESS && !text.is_null() {
            // SAFETY: the driver gives a string that lives as long as its library, which is never unloaded.
            true => unsafe { CStr::from_ptr::<'static>(text) }
                .to_str()
                .unwrap_or("?"),
            false => "an error that it does not know",
        };
        Err(CudaError { call, code, name })
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut all = f.debug_struct("Driver");
        all.field("version", &self.version)
            .field("devices", &self.devices);
        all.finish()
    }
}

impl std::fmt::Display for DeviceUuid {
    /// As `nvidia-smi -L` writes it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GPU-")?;
        for (index, byte) in self.0.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for DeviceUuid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl std::str::FromStr for DeviceUuid {
    type Err = ();

    /// With or without `GPU-`.
    fn from_str(text: &str) -> Result<Self, ()> {
        let text = text.strip_prefix("GPU-").unwrap_or(text);
        let digits: String = text.chars().filter(|each| *each != '-').collect();
        let number = u128::from_str_radix(&digits, 16).map_err(|_| ())?;
        match digits.len() {
            32 => Ok(Self(number.to_be_bytes())),
            _ => Err(()),
        }
    }
}

/// This process's primary context on a GPU. Given back when nothing uses it any more.
pub struct Context {
    /// A number that no other context of this process has had: the driver may give the same handle again.
    number: u64,
    driver: &'static Driver,
    device: Device,
    handle: sys::CUcontext,
    /// The driver refused a call for many copies: it gets none any more.
    refused_batch: AtomicBool,
}

// SAFETY: a context may be used by any thread; each makes it its own before a call.
unsafe impl Send for Context {}
// SAFETY: as above; the driver locks what it must.
unsafe impl Sync for Context {}

impl Context {
    /// Takes the context of a GPU.
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

    /// Which GPU.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Whether the driver takes many copies by one call: it has such a call, which reads registered host memory at its own
    /// addresses, and has not refused one yet.
    pub fn copies_together(&self) -> Result<bool, CudaError> {
        if !self.driver.has_batches() || self.has_refused_batches() {
            return Ok(false);
        }
        let (api, mut value) = (self.bind()?, 0);
        // SAFETY: writes one number.
        let code = unsafe {
            (api.cuDeviceGetAttribute)(
                &raw mut value,
                OWN_ADDRESSES_OF_REGISTERED_MEMORY,
                self.device.ordinal,
            )
        };
        match self.check("cuDeviceGetAttribute", code) {
            Ok(()) => Ok(value == 1),
            Err(error) if error.is_fatal() => Err(error),
            Err(error) => {
                tracing::warn!(%error, "copies are given to the driver one by one");
                Ok(false)
            }
        }
    }

    fn has_refused_batches(&self) -> bool {
        self.refused_batch.load(Ordering::Relaxed)
    }

    fn refused_batch(&self, error: CudaError) {
        tracing::warn!(%error, "copies are given to the driver one by one from now on");
        self.refused_batch.store(true, Ordering::Relaxed);
    }

    /// Where it is plugged in.
    pub fn pci_bus_id(&self) -> Result<String, CudaError> {
        self.driver.pci_bus_id(self.device)
    }

    /// Makes it this thread's own, where it is not.
    fn bind(&self) -> Result<&Api, CudaError> {
        if CURRENT.get() != self.number {
            // SAFETY: the context is retained.
            let code = unsafe { (self.driver.api.cuCtxSetCurrent)(self.handle) };
            self.driver.check("cuCtxSetCurrent", code)?;
            CURRENT.set(self.number);
        }
        Ok(&self.driver.api)
    }

    fn check(&self, call: &'static str, code: Code) -> Result<(), CudaError> {
        self.driver.check(call, code)
    }

    /// Gives something back. The GPU may be gone, then nothing is left to do.
    fn give_back(&self, call: &'static str, give: impl FnOnce(&Api) -> Code) {
        let given = self.bind().and_then(|api| self.check(call, give(api)));
        match given {
            Ok(()) => {}
            // The GPU is lost, and with it this process.
            Err(error) if error.is_fatal() => {
                tracing::debug!(%error, "the driver took nothing back");
            }
            Err(error) => tracing::error!(%error, "the driver took nothing back"),
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was retained once, and everything of it holds it.
        let code = unsafe { (self.driver.api.cuDevicePrimaryCtxRelease_v2)(self.device.ordinal) };
        if let Err(error) = self.check("cuDevicePrimaryCtxRelease_v2", code) {
            tracing::debug!(%error, "the driver took nothing back");
        }
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Context({})", self.device.uuid)
    }
}
