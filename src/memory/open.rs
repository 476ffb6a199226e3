//! Opens registered memory: checks an engine's description, maps its allocations and verifies the proofs.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use crate::{
    BufferError, EngineMemory, EngineMemoryError, MemoryLayout, NonceMismatch, ProofError,
    RegistrationError, SharedBuffer, validate, verify_proofs,
};
use kvferry_types::{AllocationHandle, AllocationKind, Registration};

/// An engine's memory that was checked, mapped and proven.
#[derive(Debug, Clone)]
pub struct RegisteredMemory {
    /// The mapped allocations.
    pub memory: Arc<EngineMemory>,
    /// Location of each page in the allocations, by group.
    pub layout: Arc<MemoryLayout>,
}

/// Why registered memory cannot be used. Each error names the field.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The description contradicts itself.
    #[error(transparent)]
    Registration(#[from] RegistrationError),
    /// No file descriptor arrived under this ticket, or it arrived more than 30 s ago.
    #[error(
        "registration.allocations[{0}].handle: no file descriptor was received under this ticket: send it \
         first, and register within 30 s"
    )]
    Ticket(usize),
    /// An allocation is memory of a GPU, which this worker cannot reach.
    #[error(
        "registration.allocations[{0}].kind is device: this worker cannot reach the memory of a GPU; \
         register host memory"
    )]
    Device(usize),
    /// The allocation cannot be mapped.
    #[error("registration.allocations[{index}]: {source}")]
    Buffer {
        /// Index of the allocation.
        index: usize,
        /// Why it cannot be mapped.
        source: BufferError,
    },
    /// The mapped allocations do not match the registration.
    #[error(transparent)]
    Memory(#[from] EngineMemoryError),
    /// The mapped memory does not contain the nonce.
    #[error("registration.nonce: {0}")]
    Nonce(#[from] NonceMismatch),
    /// A mapped piece of memory does not contain the bytes that the engine gave as proof.
    #[error("registration.{0}")]
    Proof(#[from] ProofError<BufferError>),
}

impl OpenError {
    /// Whether the same memory may be accepted when the engine registers it again.
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::Proof(ProofError::Other { .. }))
    }
}

impl RegisteredMemory {
    /// Checks the description, maps the allocations and verifies the nonce and the proofs. `take` returns the
    /// descriptor of a ticket. Blocks on system calls.
    pub fn open(
        registration: &Registration,
        take: impl Fn(&[u8; 16]) -> Option<OwnedFd>,
    ) -> Result<Self, OpenError> {
        let layout = validate(registration)?;
        let mut buffers = Vec::with_capacity(registration.allocations.len());
        for (index, allocation) in registration.allocations.iter().enumerate() {
            if allocation.kind == AllocationKind::Device {
                return Err(OpenError::Device(index));
            }
            let buffer = match &allocation.handle {
                AllocationHandle::Path(path) => {
                    SharedBuffer::open_path(Path::new(path), allocation.bytes)
                }
                AllocationHandle::Ticket(ticket) => {
                    let fd = take(ticket).ok_or(OpenError::Ticket(index))?;
                    SharedBuffer::from_fd(fd, allocation.bytes)
                }
                AllocationHandle::CudaIpc(_)
                | AllocationHandle::CudaFabric(_)
                | AllocationHandle::Chunks(_)
                | AllocationHandle::Other => return Err(OpenError::Device(index)),
            };
            buffers.push(buffer.map_err(|source| OpenError::Buffer { index, source })?);
        }
        let memory = EngineMemory::new(registration, buffers)?;
        memory.verify_nonce(&registration.nonce)?;
        verify_proofs(registration, |allocation, ranges, out| {
            memory.read(allocation, ranges, out)
        })?;
        Ok(Self {
            memory: Arc::new(memory),
            layout: Arc::new(layout),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::registration::tests::separate_layers;
    use super::*;
    use kvferry_types::Nonce;

    #[test]
    fn an_allocation_without_the_nonce_is_proven_too() {
        let mut registration = separate_layers();
        let buffers: Vec<SharedBuffer> = registration
            .allocations
            .iter()
            .map(|it| SharedBuffer::create("kvferry-test", it.bytes).expect("memory"))
            .collect();
        let nonce = registration.nonce.bytes.clone();
        buffers[0].write_from(0, &nonce).expect("in bounds");
        for (number, allocation) in (0..).zip(&mut registration.allocations) {
            allocation.handle = AllocationHandle::Ticket([number; 16]);
            let bytes: Vec<u8> = (number * 32..).take(32).collect();
            let offset_bytes = allocation.bytes - 32;
            let buffer = &buffers[usize::from(number)];
            buffer.write_from(offset_bytes, &bytes).expect("in bounds");
            registration.proofs.push(Nonce {
                allocation: number.into(),
                offset_bytes,
                bytes,
            });
        }
        let open = |order: [usize; 4]| {
            let take = |ticket: &[u8; 16]| {
                let buffer = &buffers[order[usize::from(ticket[0])]];
                Some(buffer.try_clone_fd().expect("a descriptor"))
            };
            RegisteredMemory::open(&registration, take)
        };
        open([0, 1, 2, 3]).expect("as it is");
        let refused = open([0, 1, 3, 2]).expect_err("exchanged");
        assert!(refused.may_pass());
        let text = refused.to_string();
        let expected = "registration.allocations[2] has other bytes at byte 800 of its allocation";
        assert!(text.starts_with(expected), "{text}");
    }

    #[test]
    fn device_memory_is_refused_with_the_reason() {
        let mut registration = separate_layers();
        registration.device_uuid = Some("GPU-0".to_owned());
        registration.allocations[1].kind = AllocationKind::Device;
        registration.allocations[1].handle = AllocationHandle::CudaIpc([7; 64]);
        registration.allocations.swap(0, 1);
        for tensor in &mut registration.groups[0].tensors {
            tensor.allocation = match tensor.allocation {
                0 => 1,
                1 => 0,
                other => other,
            };
        }
        let opened = RegisteredMemory::open(&registration, |_| None);
        let text = opened.expect_err("refused").to_string();
        assert!(
            text.starts_with("registration.allocations[0].kind is device: "),
            "{text}"
        );
    }
}
