//! An engine's memory on a GPU, opened in this process.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::device_memories::DeviceMemories;
use super::driver::{Context, DeviceMemory, DeviceUuid, SharedChunk};
use super::error::CudaError;
use super::staged_io::{DeviceIo, SmallCopyError};
use kvferry_memory::{MemoryLayout, ProofError, RegistrationError, validate, verify_proofs};
use kvferry_types::{AllocationHandle, AllocationKind, Chunk, ChunkHandle, Registration, Timeline};

/// A registration whose device memory was opened and proven.
#[derive(Debug, Clone)]
pub struct RegisteredDevice {
    /// The opened allocations.
    pub memory: Arc<DeviceMemories>,
    /// Location of each page in the allocations, by group.
    pub layout: Arc<MemoryLayout>,
    /// The word to which the engine's device writes its progress; `None` if the engine has none.
    pub timeline: Option<Timeline>,
}

/// Why device memory cannot be used. Each error names the field.
#[derive(Debug, thiserror::Error)]
pub enum DeviceOpenError {
    /// The description contradicts itself.
    #[error(transparent)]
    Registration(#[from] RegistrationError),
    /// An allocation is not on a GPU while others are.
    #[error(
        "registration.allocations[{0}].kind is shared_memory, others are device: give all of one kind"
    )]
    Mixed(usize),
    /// `device_uuid` is not the UUID of a GPU.
    #[error(
        "registration.device_uuid is '{0}': give it as nvidia-smi -L does, GPU- and 32 hexadecimal digits"
    )]
    Uuid(String),
    /// The handle of device memory is a path.
    #[error("registration.allocations[{0}].handle is a path: device memory has none")]
    Path(usize),
    /// No file descriptor arrived under this ticket, or it arrived more than 30 s ago.
    #[error(
        "registration.allocations[{0}].handle: no file descriptor was received under this ticket (chunk {1}): send it first, and \
         register within 30 s"
    )]
    Ticket(usize, usize),
    /// The driver does not open the handle.
    #[error("registration.allocations[{index}].handle: {source}{}", not_opened(*.source))]
    Open {
        /// Index of the allocation.
        index: usize,
        /// Error of the driver.
        source: CudaError,
    },
    /// The memory is shorter than described.
    #[error("registration.allocations[{index}].bytes is {bytes}, the memory has {found}")]
    TooShort {
        /// Index of the allocation.
        index: usize,
        /// Bytes according to the registration.
        bytes: u64,
        /// Bytes of the opened memory.
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
    /// The opened memory does not contain the nonce.
    #[error(
        "registration.nonce: not at byte {0} of its allocation: the opened memory is not the engine's"
    )]
    OtherMemory(u64),
    /// A piece of the opened memory does not contain the bytes that the engine gave as proof.
    #[error("registration.{0}")]
    Proof(#[from] ProofError<SmallCopyError>),
}

impl DeviceOpenError {
    /// The error, if it means that the GPU no longer works for this process.
    pub fn fatal(&self) -> Option<CudaError> {
        let error = match self {
            Self::Open { source, .. } => Some(*source),
            Self::Nonce(SmallCopyError::Cuda(error))
            | Self::Proof(ProofError::Read(SmallCopyError::Cuda(error))) => Some(*error),
            _ => None,
        };
        error.filter(|error| error.is_fatal())
    }

    /// Whether the same memory may be accepted when the engine registers it again.
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::Proof(ProofError::Other { .. }))
    }
}

/// Advice about a handle that the driver does not open; empty where nothing is known.
fn not_opened(error: CudaError) -> &'static str {
    match error.code() {
        Some(201) => {
            ": an engine in another PID namespace cannot hand memory over by CUDA IPC handles: let both share one (hostPID or \
             shareProcessNamespace of a pod, --pid of a container), or let the engine allocate in chunks \
             (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True)"
        }
        _ => "",
    }
}

/// The GPU that a registration names.
pub fn device_of(registration: &Registration) -> Result<DeviceUuid, DeviceOpenError> {
    let text = registration.device_uuid.clone().unwrap_or_default();
    text.parse().map_err(|()| DeviceOpenError::Uuid(text))
}

/// The chunks of an allocation that is not opened by a CUDA IPC handle, each with its length in bytes.
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
        AllocationHandle::Path(_) | AllocationHandle::CudaIpc(_) | AllocationHandle::Other => {
            return Err(DeviceOpenError::Path(index));
        }
    };
    let shared = |(place, chunk): (usize, &Chunk)| {
        let shared = match &chunk.handle {
            ChunkHandle::Ticket(ticket) => taken(place, ticket)?,
            ChunkHandle::CudaFabric(handle) => SharedChunk::Fabric(*handle),
            ChunkHandle::Other => return Err(DeviceOpenError::Path(index)),
        };
        Ok((shared, chunk.bytes))
    };
    list.iter().enumerate().map(shared).collect()
}

impl RegisteredDevice {
    /// Checks the description, opens the allocations and verifies the nonce and the proofs. `take` returns the
    /// descriptor of a ticket. Blocks on the driver.
    pub fn open(
        registration: &Registration,
        context: &Arc<Context>,
        staged_io: &mut DeviceIo,
        take: impl Fn(&[u8; 16]) -> Option<OwnedFd>,
    ) -> Result<Self, DeviceOpenError> {
        let layout = validate(registration)?;
        let mut memories: Vec<DeviceMemory> = Vec::with_capacity(registration.allocations.len());
        for (index, allocation) in registration.allocations.iter().enumerate() {
            if allocation.kind == AllocationKind::SharedMemory {
                return Err(DeviceOpenError::Mixed(index));
            }
            let memory = match &allocation.handle {
                AllocationHandle::CudaIpc(handle) => {
                    DeviceMemory::open_ipc(context, handle, allocation.bytes)
                }
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
        staged_io.read(&memory, nonce.allocation, &[place], &mut seen)?;
        if seen != nonce.bytes {
            return Err(DeviceOpenError::OtherMemory(nonce.offset_bytes));
        }
        let unknown = verify_proofs(registration, |allocation, ranges, out| {
            staged_io.read(&memory, allocation, ranges, out)
        })?;
        if unknown > 0 {
            tracing::debug!(
                pieces = unknown,
                "device memory whose contents prove nothing"
            );
        }
        Ok(Self {
            memory,
            layout: Arc::new(layout),
            timeline: registration.timeline,
        })
    }
}
