//! The only calls into the CUDA driver. What this file offers is safe: memory that a stream works on lives until that work
//! is over, and every range is checked before it is given to a stream.
#![expect(unsafe_code, reason = "calls into the CUDA driver")]

mod api;

use std::cell::Cell;
use std::ffi::{CStr, c_int};
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use self::api::{Address, Api, Code};
use super::error::{CudaError, NoDriver};
use super::sabotage::{Bug, planted};
use crate::memory::{CopyRange, Depot, SharedBuffer};
use crate::types::Direction;

/// Bytes of a `cudaIpcMemHandle_t`.
pub const IPC_HANDLE_BYTES: usize = 64;

const SUCCESS: Code = 0;
const NO_DEVICE: Code = 100;
const NOT_READY: Code = 600;
/// `CU_STREAM_NON_BLOCKING`: not held up by the default stream.
const STREAM_NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`.
const EVENT_DISABLE_TIMING: u32 = 2;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, which must be given.
const IPC_LAZY_PEER_ACCESS: u32 = 1;
/// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`.
const REGISTER_FLAGS: u32 = 1 | 2;
/// How long the end of work is waited for when its owner is gone. Then its memory is left as it is, for ever.
const DROP_LIMIT: Duration = Duration::from_secs(2);
const DROP_PAUSE: Duration = Duration::from_micros(200);

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

    /// Whether streams can wait for words in device memory, and write them.
    pub fn has_stream_values(&self) -> bool {
        self.api.cuStreamWaitValue64_v2.is_some() && self.api.cuStreamWriteValue64_v2.is_some()
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
        }))
    }

    /// Which GPU.
    pub fn device(&self) -> Device {
        self.device
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
        if let Err(error) = given {
            tracing::debug!(%error, "the driver took nothing back");
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Allocated,
    OpenedIpc,
}

/// Device memory with an address in this process.
pub struct DeviceMemory {
    context: Arc<Context>,
    address: Address,
    bytes: u64,
    source: Source,
}

impl DeviceMemory {
    /// New memory, with any contents.
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

    /// How another process opens it.
    pub fn ipc_handle(&self) -> Result<[u8; IPC_HANDLE_BYTES], CudaError> {
        let api = self.context.bind()?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: writes one handle; the address is that of live memory.
        let code = unsafe { (api.cuIpcGetMemHandle)(&raw mut handle, self.address) };
        self.context.check("cuIpcGetMemHandle", code)?;
        Ok(handle.reserved.map(i8::cast_unsigned))
    }

    /// Opens another process's memory: all of the allocation that the handle is of, from its first byte.
    pub fn open_ipc(
        context: &Arc<Context>,
        handle: &[u8; IPC_HANDLE_BYTES],
    ) -> Result<Self, CudaError> {
        let (api, mut address) = (context.bind()?, 0);
        let reserved = handle.map(u8::cast_signed);
        let handle = sys::CUipcMemHandle { reserved };
        // SAFETY: writes one address. The handle is any 64 bytes: the driver refuses those that are none.
        let code =
            unsafe { (api.cuIpcOpenMemHandle_v2)(&raw mut address, handle, IPC_LAZY_PEER_ACCESS) };
        context.check("cuIpcOpenMemHandle_v2", code)?;
        let mut opened = Self {
            context: Arc::clone(context),
            address,
            bytes: 0,
            source: Source::OpenedIpc,
        };
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: writes an address and a size.
        let code = unsafe { (api.cuMemGetAddressRange_v2)(&raw mut base, &raw mut bytes, address) };
        context.check("cuMemGetAddressRange_v2", code)?;
        // What lies before the address belongs to no part of the handle's memory.
        let before = address.saturating_sub(base);
        opened.bytes = (bytes as u64).saturating_sub(before);
        Ok(opened)
    }

    /// How much there is.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether two are the same memory.
    pub fn is(&self, other: &Self) -> bool {
        self.address == other.address
    }

    fn range(&self, offset_bytes: u64, len_bytes: u64) -> Option<Address> {
        let end = offset_bytes.checked_add(len_bytes)?;
        (end <= self.bytes).then(|| self.address + offset_bytes)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let address = self.address;
        match self.source {
            // SAFETY: it was allocated here, and what a stream works on is held until that is over.
            Source::Allocated => self
                .context
                .give_back("cuMemFree_v2", |api| unsafe { (api.cuMemFree_v2)(address) }),
            Source::OpenedIpc => self.context.give_back("cuIpcCloseMemHandle", |api| {
                // SAFETY: it was opened here, and what a stream works on is held until that is over.
                unsafe { (api.cuIpcCloseMemHandle)(address) }
            }),
        }
    }
}

impl std::fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DeviceMemory({} bytes, {:?})", self.bytes, self.source)
    }
}

/// A part of a depot's memory that the GPU reaches without the driver's help, until it is dropped.
#[derive(Debug)]
pub struct PinnedRange {
    context: Arc<Context>,
    address: usize,
    /// What is pinned stays mapped: the driver would go on with the pages that were there.
    _depot: Arc<Depot>,
}

impl PinnedRange {
    /// Pins a range of a depot's memory.
    pub fn register(
        context: &Arc<Context>,
        depot: &Arc<Depot>,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<Self, CudaError> {
        let api = context.bind()?;
        let out_of_range = CudaError {
            call: "cuMemHostRegister_v2",
            code: 1,
            name: "CUDA_ERROR_INVALID_VALUE",
        };
        let address = host_range(depot.buffer(), offset_bytes, len_bytes).ok_or(out_of_range)?;
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
            _depot: Arc::clone(depot),
        })
    }
}

impl Drop for PinnedRange {
    fn drop(&mut self) {
        let address = ptr::with_exposed_provenance_mut(self.address);
        self.context.give_back("cuMemHostUnregister", |api| {
            // SAFETY: it was registered here.
            unsafe { (api.cuMemHostUnregister)(address) }
        });
    }
}

fn host_range(buffer: &SharedBuffer, offset_bytes: u64, len_bytes: u64) -> Option<usize> {
    let end = offset_bytes.checked_add(len_bytes)?;
    let inside = len_bytes > 0 && end <= buffer.len();
    inside.then(|| buffer.address() + offset_bytes as usize)
}

/// Work in order, beside that of other streams.
pub struct Stream {
    context: Arc<Context>,
    handle: sys::CUstream,
}

// SAFETY: a stream may be used by any thread that has made its context its own.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver locks what it must.
unsafe impl Sync for Stream {}

/// Host memory that a stream copies from or to.
pub trait HostMemory: Send + Sync + 'static {
    /// The memory.
    fn buffer(&self) -> &SharedBuffer;

    /// First byte behind the part that holds this offset and that one copy must not leave.
    fn end_of_part(&self, offset_bytes: u64) -> u64;
}

/// Device memory that a stream copies from or to, by number.
pub trait DeviceSide: Send + Sync + 'static {
    /// One of the allocations.
    fn memory(&self, allocation: u32) -> Option<&DeviceMemory>;
}

/// Why copies were not given to a stream, all or in part.
#[derive(Debug)]
pub enum NotSubmitted {
    /// A call was refused. Copies that were given before are under way, if there were any.
    Refused(CudaError, Option<Submitted>),
    /// Copies are under way, and nothing tells when they are over.
    EndUnknown(CudaError),
}

impl NotSubmitted {
    /// What the driver said.
    pub fn error(&self) -> CudaError {
        match self {
            Self::Refused(error, _) | Self::EndUnknown(error) => *error,
        }
    }
}

impl Stream {
    /// A stream of its own.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>, CudaError> {
        let (api, mut handle) = (context.bind()?, ptr::null_mut());
        // SAFETY: writes one handle.
        let code =
            unsafe { (api.cuStreamCreateWithPriority)(&raw mut handle, STREAM_NON_BLOCKING, 0) };
        context.check("cuStreamCreateWithPriority", code)?;
        Ok(Arc::new(Self {
            context: Arc::clone(context),
            handle,
        }))
    }

    /// Gives copies to the stream, and returns what tells when they are over. Both memories live until then.
    ///
    /// Ranges that do not lie in the memories are refused like errors of the driver; those before them are under way.
    pub fn submit(
        self: &Arc<Self>,
        direction: Direction,
        device: Arc<dyn DeviceSide>,
        host: Arc<dyn HostMemory>,
        ranges: &mut dyn Iterator<Item = CopyRange>,
    ) -> Result<Submitted, Box<NotSubmitted>> {
        let nothing = |error| Box::new(NotSubmitted::Refused(error, None));
        let mut submitted = Submitted {
            stream: Arc::clone(self),
            event: Event::new(&self.context).map_err(nothing)?,
            keeps: ManuallyDrop::new((device, host)),
            end: End::Over,
        };
        if planted(Bug::RecordTooSoon) {
            submitted.event.record(self).map_err(nothing)?;
        }
        let mut copied = Ok(());
        for range in ranges {
            copied = self.copy(direction, &mut submitted, range);
            if copied.is_err() {
                break;
            }
        }
        if submitted.end == End::Over {
            // Nothing was given.
            return match copied {
                Ok(()) => Ok(submitted),
                Err(error) => Err(nothing(error)),
            };
        }
        let recorded = match () {
            () if planted(Bug::RecordTooSoon) => Ok(()),
            () if planted(Bug::RecordElsewhere) => {
                Self::new(&self.context).and_then(|other| submitted.event.record(&other))
            }
            () => submitted.event.record(self),
        };
        match (copied, recorded) {
            (copied, Ok(())) => {
                submitted.end = End::AtEvent;
                match copied {
                    Ok(()) => Ok(submitted),
                    Err(error) => Err(Box::new(NotSubmitted::Refused(error, Some(submitted)))),
                }
            }
            (copied, Err(error)) => {
                // No event tells the end of these copies: it is waited for, or their memory is left alone for ever.
                let error = copied.err().unwrap_or(error);
                match self.synchronize() {
                    Ok(()) => {
                        submitted.end = End::Over;
                        Err(nothing(error))
                    }
                    Err(_) => Err(Box::new(NotSubmitted::EndUnknown(error))),
                }
            }
        }
    }

    fn copy(
        &self,
        direction: Direction,
        submitted: &mut Submitted,
        range: CopyRange,
    ) -> Result<(), CudaError> {
        let (device, host) = &*submitted.keeps;
        let mut done = 0;
        while done < range.len_bytes {
            let depot_bytes = range.depot_bytes + done;
            let part = host.end_of_part(depot_bytes).saturating_sub(depot_bytes);
            let part = if planted(Bug::CrossChunks) {
                u64::MAX
            } else {
                part
            };
            let len_bytes = part.min(range.len_bytes - done);
            let here = device
                .memory(range.allocation)
                .and_then(|memory| memory.range(range.device_bytes + done, len_bytes))
                .zip(host_range(host.buffer(), depot_bytes, len_bytes));
            let Some((at_device, at_host)) = here else {
                return Err(CudaError {
                    call: "cuMemcpyAsync",
                    code: 1,
                    name: "CUDA_ERROR_INVALID_VALUE",
                });
            };
            let wrong_way = planted(Bug::WrongWay);
            let (to, from) = match direction {
                Direction::Store if wrong_way => (at_device, at_host as u64),
                Direction::Load if wrong_way => (at_host as u64, at_device),
                Direction::Store => (at_host as u64, at_device),
                Direction::Load => (at_device, at_host as u64),
            };
            let api = self.context.bind()?;
            // SAFETY: both ranges lie in memory that the caller keeps until the stream has come behind this copy. Other
            // processes may write the same bytes, which are then any bytes; nothing in this process refers to them.
            let code = unsafe { (api.cuMemcpyAsync)(to, from, len_bytes as usize, self.handle) };
            self.context.check("cuMemcpyAsync", code)?;
            submitted.end = End::Unknown;
            done += len_bytes;
        }
        Ok(())
    }

    /// Waits until everything in the stream is done.
    fn synchronize(&self) -> Result<(), CudaError> {
        let api = self.context.bind()?;
        // SAFETY: the stream is ours.
        let code = unsafe { (api.cuStreamSynchronize)(self.handle) };
        self.context.check("cuStreamSynchronize", code)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let handle = self.handle;
        self.context.give_back("cuStreamDestroy_v2", |api| {
            // SAFETY: it was made here. What is still in it goes on; its memory is held by who waits for it.
            unsafe { (api.cuStreamDestroy_v2)(handle) }
        });
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Stream({:?})", self.context)
    }
}

/// A point in a stream.
struct Event {
    context: Arc<Context>,
    handle: sys::CUevent,
}

// SAFETY: an event may be used by any thread that has made its context its own.
unsafe impl Send for Event {}

impl Event {
    fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let (api, mut handle) = (context.bind()?, ptr::null_mut());
        // SAFETY: writes one handle.
        let code = unsafe { (api.cuEventCreate)(&raw mut handle, EVENT_DISABLE_TIMING) };
        context.check("cuEventCreate", code)?;
        Ok(Self {
            context: Arc::clone(context),
            handle,
        })
    }

    fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        let api = self.context.bind()?;
        // SAFETY: both are live, and of one context.
        let code = unsafe { (api.cuEventRecord)(self.handle, stream.handle) };
        self.context.check("cuEventRecord", code)
    }

    fn reached(&self) -> Result<bool, CudaError> {
        let api = self.context.bind()?;
        // SAFETY: the event is live.
        let code = unsafe { (api.cuEventQuery)(self.handle) };
        match code {
            NOT_READY => Ok(false),
            _ => self.context.check("cuEventQuery", code).map(|()| true),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let handle = self.handle;
        self.context.give_back("cuEventDestroy_v2", |api| {
            // SAFETY: it was made here; the driver keeps what a stream still needs of it.
            unsafe { (api.cuEventDestroy_v2)(handle) }
        });
    }
}

/// Copies under way, and the memory that they touch. Both memories are let go when the copies are known to be over, and
/// never when that cannot be known.
pub struct Submitted {
    stream: Arc<Stream>,
    event: Event,
    keeps: ManuallyDrop<(Arc<dyn DeviceSide>, Arc<dyn HostMemory>)>,
    end: End,
}

/// When copies are over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// They are, or none was given.
    Over,
    /// When the event is reached.
    AtEvent,
    /// Nobody can say.
    Unknown,
}

impl Submitted {
    /// Whether they are over.
    pub fn poll(&mut self) -> Result<bool, CudaError> {
        let over = match self.end {
            End::Over => true,
            End::AtEvent => planted(Bug::MissingEventWait) || self.event.reached()?,
            End::Unknown => false,
        };
        if over {
            self.end = End::Over;
        }
        Ok(over)
    }

    /// Lets nothing go, ever: the process is about to end.
    pub fn forget(mut self) {
        self.end = End::Unknown;
    }
}

impl Drop for Submitted {
    fn drop(&mut self) {
        let until = Instant::now() + DROP_LIMIT;
        while self.end != End::Over && !planted(Bug::LetGoEarly) {
            match self.poll() {
                Ok(true) => {}
                Ok(false) if self.end == End::AtEvent && Instant::now() < until => {
                    std::thread::sleep(DROP_PAUSE);
                }
                not_over => {
                    tracing::error!(
                        ?not_over,
                        "copies whose end is not known: their memory stays"
                    );
                    return;
                }
            }
        }
        // SAFETY: dropped here, once, and not used behind this.
        unsafe { ManuallyDrop::drop(&mut self.keeps) };
    }
}

impl std::fmt::Debug for Submitted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Submitted({:?}, {:?})", self.stream, self.end)
    }
}
