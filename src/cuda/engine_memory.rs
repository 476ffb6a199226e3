//! An engine's memory on a GPU, opened in this process.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::driver::{
    Context, DeviceMemory, DeviceSide, DeviceUuid, HostMemory, SharedChunk, Stream,
};
use super::error::CudaError;
use crate::memory::{
    BufferError, CopyRange, PageLayout, RegistrationError, SharedBuffer, validate,
};
use crate::types::{
    AllocationHandle, AllocationKind, Chunk, ChunkHandle, Direction, GroupGeometry, Registration,
};

/// How long one copy of a few bytes may take; the GPU may be busy with an engine's work.
const SMALL_COPY_LIMIT: Duration = Duration::from_secs(10);
/// So long it is looked at all the time, then in between.
const SMALL_COPY_SPIN: Duration = Duration::from_micros(100);
const SMALL_COPY_PAUSE: Duration = Duration::from_micros(50);
/// What a window holds at least.
const WINDOW_BYTES: u64 = 1 << 16;

/// One piece of device memory for each allocation of a registration, in order.
#[derive(Debug)]
pub struct DeviceMemories(Vec<DeviceMemory>);

impl DeviceMemories {
    /// Memory of this process's own.
    pub fn own(memories: Vec<DeviceMemory>) -> Arc<Self> {
        Arc::new(Self(memories))
    }

    /// One of them.
    pub fn get(&self, allocation: u32) -> Option<&DeviceMemory> {
        self.0.get(allocation as usize)
    }
}

impl DeviceSide for DeviceMemories {
    fn memory(&self, allocation: u32) -> Option<&DeviceMemory> {
        self.get(allocation)
    }
}

/// Reads and writes a few bytes of device memory, through host memory of its own, and waits for them.
pub struct Window {
    stream: Arc<Stream>,
    staging: Arc<Staging>,
}

impl Window {
    /// With a stream of its own.
    pub fn new(context: &Arc<Context>) -> Result<Self, SmallCopyError> {
        Ok(Self {
            stream: Stream::new(context)?,
            staging: Staging::new(WINDOW_BYTES)?,
        })
    }

    /// Reads bytes: those of several ranges (offset and length), one behind the other.
    pub fn read(
        &mut self,
        memory: &Arc<DeviceMemories>,
        allocation: u32,
        ranges: &[(u64, u64)],
        out: &mut [u8],
    ) -> Result<(), SmallCopyError> {
        check_length(ranges, out.len())?;
        self.make_room(out.len() as u64)?;
        self.copy(Direction::Store, memory, allocation, ranges)?;
        Ok(self.staging.0.read_into(0, out)?)
    }

    /// Writes bytes to several ranges.
    pub fn write(
        &mut self,
        memory: &Arc<DeviceMemories>,
        allocation: u32,
        ranges: &[(u64, u64)],
        bytes: &[u8],
    ) -> Result<(), SmallCopyError> {
        check_length(ranges, bytes.len())?;
        self.make_room(bytes.len() as u64)?;
        self.staging.0.write_from(0, bytes)?;
        self.copy(Direction::Load, memory, allocation, ranges)
    }

    /// A copy that went wrong may still use the host memory; then the next one gets another.
    fn make_room(&mut self, len_bytes: u64) -> Result<(), SmallCopyError> {
        let free = Arc::get_mut(&mut self.staging).is_some();
        if !free || self.staging.0.len() < len_bytes {
            self.staging = Staging::new(len_bytes.max(WINDOW_BYTES))?;
        }
        Ok(())
    }

    fn copy(
        &self,
        direction: Direction,
        memory: &Arc<DeviceMemories>,
        allocation: u32,
        ranges: &[(u64, u64)],
    ) -> Result<(), SmallCopyError> {
        let mut depot_bytes = 0;
        let mut ranges = ranges.iter().map(|(device_bytes, len_bytes)| {
            let range = CopyRange {
                allocation,
                device_bytes: *device_bytes,
                depot_bytes,
                len_bytes: *len_bytes,
            };
            depot_bytes += len_bytes;
            range
        });
        let device = Arc::clone(memory) as Arc<dyn DeviceSide>;
        let host = Arc::clone(&self.staging) as Arc<dyn HostMemory>;
        let submitted = self.stream.submit(direction, device, host, &mut ranges);
        let mut submitted = submitted.map_err(|refused| refused.error())?;
        let begun = Instant::now();
        while !submitted.poll()? {
            match begun.elapsed() {
                waited if waited < SMALL_COPY_SPIN => std::thread::yield_now(),
                waited if waited < SMALL_COPY_LIMIT => std::thread::sleep(SMALL_COPY_PAUSE),
                _ => return Err(SmallCopyError::Late),
            }
        }
        Ok(())
    }
}

fn check_length(ranges: &[(u64, u64)], bytes: usize) -> Result<(), SmallCopyError> {
    let described: u64 = ranges.iter().map(|(_, len_bytes)| len_bytes).sum();
    match described == bytes as u64 {
        true => Ok(()),
        false => Err(SmallCopyError::Length { described, bytes }),
    }
}

/// Host memory for small copies.
struct Staging(SharedBuffer);

impl Staging {
    fn new(bytes: u64) -> Result<Arc<Self>, BufferError> {
        let buffer = SharedBuffer::create("kvferry-staging", bytes)?;
        Ok(Arc::new(Self(buffer)))
    }
}

impl HostMemory for Staging {
    fn buffer(&self) -> &SharedBuffer {
        &self.0
    }

    fn end_of_part(&self, _offset_bytes: u64) -> u64 {
        self.0.len()
    }
}

/// Why some bytes of device memory were not read or written.
#[derive(Debug, thiserror::Error)]
pub enum SmallCopyError {
    /// The driver's error.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The host's memory.
    #[error(transparent)]
    Buffer(#[from] BufferError),
    /// The ranges have other bytes than there are.
    #[error("ranges of {described} bytes for {bytes} bytes")]
    Length {
        /// Bytes of the ranges.
        described: u64,
        /// Bytes that were given.
        bytes: usize,
    },
    /// It takes too long.
    #[error("a copy of a few bytes was not done within 10 s: the GPU does not answer")]
    Late,
}

/// A registration whose device memory was opened and proven.
#[derive(Debug, Clone)]
pub struct RegisteredDevice {
    /// The opened allocations.
    pub memory: Arc<DeviceMemories>,
    /// Where each page lies in them.
    pub layout: Arc<PageLayout>,
    /// What all ranks must have in common.
    pub geometry: GroupGeometry,
}

/// Why device memory cannot be used. Each names the field.
#[derive(Debug, thiserror::Error)]
pub enum DeviceOpenError {
    /// The description contradicts itself.
    #[error(transparent)]
    Registration(#[from] RegistrationError),
    /// Some of the memory is not on a GPU.
    #[error(
        "registration.allocations[{0}].kind is shared_memory, others are device: give all of one kind"
    )]
    Mixed(usize),
    /// The name of no GPU.
    #[error(
        "registration.device_uuid is '{0}': give it as nvidia-smi -L does, GPU- and 32 hexadecimal digits"
    )]
    Uuid(String),
    /// The path of a file.
    #[error("registration.allocations[{0}].handle is a path: device memory has none")]
    Path(usize),
    /// Nobody handed a file descriptor over under this ticket, or too long ago.
    #[error(
        "registration.allocations[{0}].handle: no file descriptor came under this ticket (chunk {1}): send it first, and \
         register within 30 s"
    )]
    Ticket(usize, usize),
    /// The driver does not open the handle.
    #[error("registration.allocations[{index}].handle: {source}")]
    Open {
        /// Which allocation.
        index: usize,
        /// What the driver said.
        source: CudaError,
    },
    /// The memory is shorter than it was described.
    #[error("registration.allocations[{index}].bytes is {bytes}, the memory has {found}")]
    TooShort {
        /// Which allocation.
        index: usize,
        /// Bytes by the registration.
        bytes: u64,
        /// Bytes that there are.
        found: u64,
    },
    /// Two allocations are the same memory.
    #[error(
        "registration.allocations[{second}] is the same memory as allocations[{first}]: list it once"
    )]
    SameMemory {
        /// Index of the first one.
        first: usize,
        /// Index of the second one.
        second: usize,
    },
    /// The nonce could not be read.
    #[error("registration.nonce: {0}")]
    Nonce(#[from] SmallCopyError),
    /// What was opened is not what the engine described.
    #[error(
        "registration.nonce: not at byte {0} of its allocation: the opened memory is not the engine's"
    )]
    OtherMemory(u64),
}

impl DeviceOpenError {
    /// An error after which nothing of this process works on the GPU any more.
    pub fn fatal(&self) -> Option<CudaError> {
        let error = match self {
            Self::Open { source, .. } => Some(*source),
            Self::Nonce(SmallCopyError::Cuda(error)) => Some(*error),
            _ => None,
        };
        error.filter(|error| error.is_fatal())
    }
}

/// The GPU that a registration names.
pub fn device_of(registration: &Registration) -> Result<DeviceUuid, DeviceOpenError> {
    let text = registration.device_uuid.clone().unwrap_or_default();
    text.parse().map_err(|()| DeviceOpenError::Uuid(text))
}

/// The chunks of an allocation that is not opened as a whole, each with its length.
fn chunks(
    index: usize,
    handle: &AllocationHandle,
    bytes: u64,
    take: impl Fn(&[u8; 16]) -> Option<OwnedFd>,
) -> Result<Vec<(SharedChunk, u64)>, DeviceOpenError> {
    let taken = |place: usize, ticket: &[u8; 16]| {
        let fd = take(ticket).ok_or(DeviceOpenError::Ticket(index, place));
        fd.map(SharedChunk::Fd)
    };
    let list = match handle {
        AllocationHandle::Ticket(ticket) => return Ok(vec![(taken(0, ticket)?, bytes)]),
        AllocationHandle::CudaFabric(handle) => {
            return Ok(vec![(SharedChunk::Fabric(*handle), bytes)]);
        }
        AllocationHandle::Chunks(list) => list,
        AllocationHandle::Path(_) | AllocationHandle::CudaIpc(_) => {
            return Err(DeviceOpenError::Path(index));
        }
    };
    let shared = |(place, chunk): (usize, &Chunk)| {
        let shared = match &chunk.handle {
            ChunkHandle::Ticket(ticket) => taken(place, ticket)?,
            ChunkHandle::CudaFabric(handle) => SharedChunk::Fabric(*handle),
        };
        Ok((shared, chunk.bytes))
    };
    list.iter().enumerate().map(shared).collect()
}

impl RegisteredDevice {
    /// Checks the description, opens the allocations and looks for the nonce. `take` finds the descriptor of a ticket.
    /// Blocks on the driver.
    pub fn open(
        registration: &Registration,
        context: &Arc<Context>,
        window: &mut Window,
        take: impl Fn(&[u8; 16]) -> Option<OwnedFd>,
    ) -> Result<Self, DeviceOpenError> {
        let layout = validate(registration)?;
        let mut memories: Vec<DeviceMemory> = Vec::with_capacity(registration.allocations.len());
        for (index, allocation) in registration.allocations.iter().enumerate() {
            if allocation.kind == AllocationKind::SharedMemory {
                return Err(DeviceOpenError::Mixed(index));
            }
            let memory = match &allocation.handle {
                AllocationHandle::CudaIpc(handle) => DeviceMemory::open_ipc(context, handle),
                other => {
                    let chunks = chunks(index, other, allocation.bytes, &take)?;
                    DeviceMemory::open_chunks(context, &chunks)
                }
            };
            let memory = memory.map_err(|source| DeviceOpenError::Open { index, source })?;
            if memory.bytes() < allocation.bytes {
                return Err(DeviceOpenError::TooShort {
                    index,
                    bytes: allocation.bytes,
                    found: memory.bytes(),
                });
            }
            if let Some(first) = memories.iter().position(|earlier| earlier.is(&memory)) {
                let second = index;
                return Err(DeviceOpenError::SameMemory { first, second });
            }
            memories.push(memory);
        }
        let (memory, nonce) = (DeviceMemories::own(memories), &registration.nonce);
        let mut seen = vec![0; nonce.bytes.len()];
        let place = (nonce.offset_bytes, seen.len() as u64);
        window.read(&memory, nonce.allocation, &[place], &mut seen)?;
        if seen != nonce.bytes {
            return Err(DeviceOpenError::OtherMemory(nonce.offset_bytes));
        }
        let geometry = layout.geometry(registration);
        Ok(Self {
            memory,
            layout: Arc::new(layout),
            geometry,
        })
    }
}
