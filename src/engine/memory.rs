//! A rank's KV memory, on the host or on a GPU.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::EngineError;
use crate::layout::describe;
use crate::random::random;
use crate::settings::{EngineDevice, RankSettings};
use kvferry_cuda::{
    Context, DeviceIo, DeviceMemories, DeviceMemory, Driver, IPC_HANDLE_BYTES, Physical,
    SharedChunk, Sharing,
};
use kvferry_memory::{SharedBuffer, TIMELINE_BYTES};
use kvferry_transport::{send_fd, send_fds};
use kvferry_types::{
    AllocationHandle, AllocationKind, Chunk, ChunkHandle, Nonce, Rank, Registration, Timeline,
};

/// Longest wait for a worker to accept a file descriptor.
const HAND_OVER_LIMIT: Duration = Duration::from_secs(2);

/// Allocation granularity of the driver: 2 MiB.
const DRIVER_PIECE_BYTES: u64 = 2 << 20;

/// Requested size of a chunk, which the driver may round up: 2 MiB as for PyTorch's small segments, so that pages cross
/// chunk boundaries.
const CHUNK_BYTES: u64 = 2 << 20;

/// KV memory of one rank.
pub(super) enum RankMemory {
    Host(SharedBuffer),
    Device(OnDevice),
}

pub(super) struct OnDevice {
    memory: Arc<DeviceMemories>,
    shared: Shared,
    bytes: u64,
    timeline: Option<Timeline>,
    uuid: String,
    window: Mutex<DeviceIo>,
}

/// How other processes open the memory.
enum Shared {
    Whole([u8; IPC_HANDLE_BYTES]),
    Chunks(Vec<Physical>),
}

/// The memory's part of a registration.
pub(super) struct Described {
    kind: AllocationKind,
    handle: AllocationHandle,
    bytes: u64,
    device_uuid: Option<String>,
}

impl Described {
    /// Adds the tensors and the nonce, which gives the full registration.
    pub(super) fn complete(self, settings: &RankSettings, nonce: Nonce) -> Registration {
        let mut registration = describe(settings, [0; 16], nonce);
        for allocation in &mut registration.allocations {
            allocation.kind = self.kind;
            allocation.handle = self.handle.clone();
            allocation.bytes = self.bytes;
        }
        registration.device_uuid = self.device_uuid;
        registration
    }
}

impl RankMemory {
    /// Allocates memory. Its contents are unspecified.
    pub(super) fn create(
        device: EngineDevice,
        rank: Rank,
        bytes: u64,
    ) -> Result<Self, EngineError> {
        match device {
            EngineDevice::Cpu => {
                let buffer = SharedBuffer::create("kvferry-engine", bytes);
                Ok(Self::Host(buffer?))
            }
            _ => OnDevice::create(device, rank, bytes).map(Self::Device),
        }
    }

    /// Reads ranges (offset and length) into `out`, one after another.
    pub(super) fn read(&self, ranges: &[(u64, u64)], out: &mut [u8]) -> Result<(), EngineError> {
        match self {
            Self::Host(buffer) => {
                let mut rest = out;
                for (offset_bytes, len_bytes) in ranges {
                    let (part, behind) = split(rest, *len_bytes)?;
                    buffer.read_into(*offset_bytes, part)?;
                    rest = behind;
                }
                Ok(())
            }
            Self::Device(device) => {
                let mut window = device.window();
                Ok(window.read(&device.memory, 0, ranges, out)?)
            }
        }
    }

    /// Writes ranges in the order of [`Self::read`]. On a GPU the writes complete at the latest when
    /// [`Self::finish`] returns.
    pub(super) fn write(&self, ranges: &[(u64, u64)], bytes: &mut [u8]) -> Result<(), EngineError> {
        match self {
            Self::Host(buffer) => {
                let mut rest = bytes;
                for (offset_bytes, len_bytes) in ranges {
                    let (part, behind) = split(rest, *len_bytes)?;
                    buffer.write_from(*offset_bytes, part)?;
                    rest = behind;
                }
                Ok(())
            }
            Self::Device(device) => {
                let mut window = device.window();
                Ok(window.write_later(&device.memory, 0, ranges, bytes)?)
            }
        }
    }

    /// Waits until all writes are complete.
    pub(super) fn finish(&self) -> Result<(), EngineError> {
        match self {
            Self::Host(_) => Ok(()),
            Self::Device(device) => Ok(device.window().finish()?),
        }
    }

    /// The word to which the device writes its progress. `None` if writes are complete when they return, or if the
    /// device cannot write words.
    pub(super) fn timeline(&self) -> Option<Timeline> {
        match self {
            Self::Host(_) => None,
            Self::Device(device) => device.timeline,
        }
    }

    /// Makes the device write, after all earlier writes, that everything up to this request is written.
    pub(super) fn mark(&self, through: u64) -> Result<(), EngineError> {
        match self {
            Self::Device(device) if let Some(word) = device.timeline => {
                Ok(device.window().mark(&device.memory, word, through)?)
            }
            _ => Ok(()),
        }
    }

    /// Shares the memory with the worker whose sockets are in `worker_dir`.
    pub(super) async fn hand_over(&self, worker_dir: &Path) -> Result<Described, EngineError> {
        match self {
            Self::Host(buffer) => {
                let mut ticket = [0; 16];
                random(&mut ticket)?;
                let fd = buffer.try_clone_fd()?;
                let sent = send_fd(worker_dir, &ticket, fd.as_fd(), HAND_OVER_LIMIT);
                sent.await?;
                Ok(Described {
                    kind: AllocationKind::SharedMemory,
                    handle: AllocationHandle::Ticket(ticket),
                    bytes: buffer.len(),
                    device_uuid: None,
                })
            }
            Self::Device(device) => Ok(Described {
                kind: AllocationKind::Device,
                handle: device.shared.hand_over(worker_dir).await?,
                bytes: device.bytes,
                device_uuid: Some(device.uuid.clone()),
            }),
        }
    }
}

impl Shared {
    async fn hand_over(&self, worker_dir: &Path) -> Result<AllocationHandle, EngineError> {
        let chunks = match self {
            Self::Whole(handle) => return Ok(AllocationHandle::CudaIpc(*handle)),
            Self::Chunks(chunks) => chunks,
        };
        let (mut list, mut tickets) = (Vec::new(), Vec::new());
        for chunk in chunks {
            let handle = match chunk.share()? {
                SharedChunk::Fabric(handle) => ChunkHandle::CudaFabric(handle),
                SharedChunk::Fd(fd) => {
                    let mut ticket = [0; 16];
                    random(&mut ticket)?;
                    tickets.push((ticket, fd));
                    ChunkHandle::Ticket(ticket)
                }
            };
            let bytes = chunk.bytes();
            list.push(Chunk { handle, bytes });
        }
        let fds: Vec<_> = tickets
            .iter()
            .map(|(ticket, fd)| (*ticket, fd.as_fd()))
            .collect();
        let sent = send_fds(worker_dir, &fds, HAND_OVER_LIMIT).await;
        sent?;
        Ok(AllocationHandle::Chunks(list))
    }
}

impl OnDevice {
    fn window(&self) -> MutexGuard<'_, DeviceIo> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn create(kind: EngineDevice, rank: Rank, bytes: u64) -> Result<Self, EngineError> {
        // The timeline word lies after the pages and the nonce.
        let word_at = bytes.next_multiple_of(TIMELINE_BYTES);
        let bytes = word_at + TIMELINE_BYTES;
        let driver = Driver::get()?;
        let devices = driver.devices()?;
        let device = devices[usize::from(rank.0) % devices.len()];
        let context = Context::new(driver, device)?;
        let in_chunks = |sharing| {
            let made = DeviceMemory::allocate_chunks(&context, bytes, CHUNK_BYTES, sharing);
            let (memory, chunks) = made?;
            Ok::<_, EngineError>((memory, Shared::Chunks(chunks)))
        };
        let (memory, shared) = match kind {
            EngineDevice::CudaFd => in_chunks(Sharing::Fd)?,
            EngineDevice::CudaFabric => in_chunks(Sharing::Fabric)?,
            EngineDevice::Cpu | EngineDevice::Cuda => {
                // Smaller allocations would share one piece of the driver's memory, and with it one IPC handle.
                let bytes = bytes.next_multiple_of(DRIVER_PIECE_BYTES);
                let memory = DeviceMemory::allocate(&context, bytes)?;
                let handle = memory.ipc_handle()?;
                (memory, Shared::Whole(handle))
            }
        };
        let bytes = memory.bytes();
        let memory = DeviceMemories::own(vec![memory]);
        let mut window = DeviceIo::new(&context)?;
        let word = Timeline {
            allocation: 0,
            offset_bytes: word_at,
        };
        let place = [(word.offset_bytes, TIMELINE_BYTES)];
        let zero = [0; TIMELINE_BYTES as usize];
        let zeroed = window.write(&memory, word.allocation, &place, &zero);
        zeroed?;
        // Not every device can write timeline words.
        let marked = window.mark(&memory, word, 0).and_then(|()| window.finish());
        let timeline = marked.is_ok().then_some(word);
        Ok(Self {
            shared,
            bytes,
            memory,
            timeline,
            uuid: device.uuid.to_string(),
            window: Mutex::new(window),
        })
    }
}

fn split(bytes: &mut [u8], at: u64) -> Result<(&mut [u8], &mut [u8]), EngineError> {
    let at = usize::try_from(at).map_err(|_| EngineError::Ranges)?;
    bytes.split_at_mut_checked(at).ok_or(EngineError::Ranges)
}
