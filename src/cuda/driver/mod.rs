//! The only calls into the CUDA driver. The interface is safe: memory that a stream works on lives until that work has
//! ended, and every range is checked before it is submitted to a stream.
#![expect(unsafe_code, reason = "calls into the CUDA driver")]

mod api;
mod context;
mod copies;
mod exit;
mod memory;
mod stream;
mod types;
mod uuid;
mod vmm;

use std::ffi::{CStr, c_int};
use std::ptr;
use std::sync::{Mutex, OnceLock, PoisonError};

use self::api::Api;
use self::types::Code;
use super::error::{CudaError, NoDriver};

pub use context::Context;
pub use copies::BATCH_COPIES_MAX;
pub use exit::end_process;
pub use memory::{DeviceMemory, DeviceSide, HostMemory, PinnedRange};
pub use stream::{NotSubmitted, Stream, Submitted};
pub use types::IPC_HANDLE_BYTES;
pub use uuid::DeviceUuid;
pub use vmm::{Physical, SharedChunk, Sharing};

const SUCCESS: Code = 0;
const NO_DEVICE: Code = 100;
/// Characters of a GPU's name, with the terminating 0.
const NAME_BYTES: usize = 96;
/// Characters of a bus id, with the terminating 0.
const BUS_ID_BYTES: usize = 32;

/// The CUDA driver of this machine, initialised.
pub struct Driver {
    api: Api,
    version: i32,
    devices: c_int,
}

/// One GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    ordinal: c_int,
    /// UUID of the GPU or MIG instance, equal in all processes.
    pub uuid: DeviceUuid,
}

impl Driver {
    /// Loads and initialises the driver, once in a process.
    ///
    /// A missing library is searched again by the next call. `cuInit` is called only once: after a failure it cannot be
    /// relied on to work later in the same process, so its first result is kept for this process.
    pub fn get() -> Result<&'static Self, NoDriver> {
        static DRIVER: OnceLock<Driver> = OnceLock::new();
        static REFUSED: Mutex<Option<NoDriver>> = Mutex::new(None);
        let mut refused = REFUSED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(driver) = DRIVER.get() {
            return Ok(driver);
        }
        if let Some(refusal) = *refused {
            return Err(refusal);
        }
        match Self::start() {
            Ok(started) => Ok(DRIVER.get_or_init(|| started)),
            Err(refusal) => {
                *refused = refusal.is_final().then_some(refusal);
                Err(refusal)
            }
        }
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

    /// Version of CUDA that the driver supports: 1000 x major + 10 x minor.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// Every GPU that this process may use.
    pub fn devices(&'static self) -> Result<Vec<Device>, CudaError> {
        (0..self.devices).map(|index| self.device(index)).collect()
    }

    fn device(&self, index: c_int) -> Result<Device, CudaError> {
        let mut ordinal = 0;
        // SAFETY: writes one number.
        let code = unsafe { (self.api.cuDeviceGet)(&raw mut ordinal, index) };
        self.check("cuDeviceGet", code)?;
        Ok(Device {
            ordinal,
            uuid: self.uuid(ordinal)?,
        })
    }

    /// The UUID of the GPU or of the MIG instance that this process computes on. The older function returns the UUID of
    /// the whole GPU in both cases, which all of its instances share.
    fn uuid(&self, ordinal: c_int) -> Result<DeviceUuid, CudaError> {
        let mut gpu = [0; 16];
        // SAFETY: writes 16 bytes.
        let code = unsafe { (self.api.cuDeviceGetUuid)(&raw mut gpu, ordinal) };
        self.check("cuDeviceGetUuid", code)?;
        let Some(newer) = self.api.cuDeviceGetUuid_v2 else {
            return Ok(DeviceUuid::gpu(gpu));
        };
        let mut own = [0; 16];
        // SAFETY: writes 16 bytes.
        let code = unsafe { newer(&raw mut own, ordinal) };
        self.check("cuDeviceGetUuid_v2", code)?;
        Ok(match own == gpu {
            true => DeviceUuid::gpu(gpu),
            false => DeviceUuid::instance(own),
        })
    }

    /// Product name of the GPU, such as `NVIDIA H200`.
    pub fn name(&self, device: Device) -> Result<String, CudaError> {
        let mut text = [0_u8; NAME_BYTES];
        let (at, length) = (text.as_mut_ptr().cast(), NAME_BYTES as c_int);
        // SAFETY: writes at most `length` characters, the last of them 0.
        let code = unsafe { (self.api.cuDeviceGetName)(at, length, device.ordinal) };
        self.check("cuDeviceGetName", code)?;
        Ok(until_zero(&text))
    }

    /// The GPU with this UUID, if this process may use it.
    pub fn find(&'static self, uuid: DeviceUuid) -> Result<Option<Device>, CudaError> {
        let devices = self.devices()?;
        Ok(devices.into_iter().find(|device| device.uuid == uuid))
    }

    /// PCI bus id of a GPU, such as `0000:3b:00.0`.
    pub fn pci_bus_id(&self, device: Device) -> Result<String, CudaError> {
        let mut text = [0_u8; BUS_ID_BYTES];
        let (at, length) = (text.as_mut_ptr().cast(), BUS_ID_BYTES as c_int);
        // SAFETY: writes at most `length` characters, the last of them 0.
        let code = unsafe { (self.api.cuDeviceGetPCIBusId)(at, length, device.ordinal) };
        self.check("cuDeviceGetPCIBusId", code)?;
        Ok(until_zero(&text))
    }

    /// Whether streams can write words to device memory.
    pub fn writes_words(&self) -> bool {
        self.api.cuStreamWriteValue64_v2.is_some()
    }

    /// Whether the driver has a call for many copies, that of CUDA 12.8 or of 13.0.
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
            // SAFETY: the driver returns a string that lives as long as its library, which is never unloaded.
            true => unsafe { CStr::from_ptr::<'static>(text) }
                .to_str()
                .unwrap_or("?"),
            false => "an error that it does not know",
        };
        Err(CudaError::Answered { call, code, name })
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

/// The text before the first 0.
fn until_zero(text: &[u8]) -> String {
    let length = text.iter().position(|byte| *byte == 0);
    String::from_utf8_lossy(&text[..length.unwrap_or(text.len())]).into_owned()
}
