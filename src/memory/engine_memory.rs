//! The mapped allocations of one registration.

use super::buffer::{BufferError, SharedBuffer};
use super::drop_signal::{DropSignal, DropWaiter};
use super::registration::{NONCE_BYTES_MAX, NONCE_BYTES_MIN};
use kvferry_types::{Nonce, Registration};

/// An engine rank's KV memory as this process maps it: one buffer for each of [`Registration::allocations`], in order.
#[derive(Debug)]
pub struct EngineMemory {
    buffers: Vec<SharedBuffer>,
    drop_signal: DropSignal,
}

/// Why the mapped buffers do not match the registration.
#[derive(Debug, thiserror::Error)]
pub enum EngineMemoryError {
    /// More or fewer buffers than allocations.
    #[error("{buffers} buffers were mapped for {allocations} allocations")]
    Count {
        /// Buffers that were mapped.
        buffers: usize,
        /// Allocations of the registration.
        allocations: usize,
    },
    /// A buffer that is shorter than its allocation.
    #[error("allocations[{allocation}].bytes is {bytes}, {mapped_bytes} are mapped")]
    TooShort {
        /// Index of the allocation.
        allocation: usize,
        /// Bytes according to the registration.
        bytes: u64,
        /// Bytes of the buffer.
        mapped_bytes: u64,
    },
    /// Two allocations are the same file: every page would exist twice.
    #[error("allocations[{second}] is the same memory as allocations[{first}]: list it once")]
    SameMemory {
        /// Index of the first one.
        first: usize,
        /// Index of the second one.
        second: usize,
    },
    /// The system could not identify the file of a buffer.
    #[error("allocations[{allocation}]: {source}")]
    Buffer {
        /// Index of the allocation.
        allocation: usize,
        /// The error of the system call.
        source: BufferError,
    },
}

/// The mapping does not contain the bytes that the engine wrote: it is other memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the nonce is not at byte {offset_bytes} of allocations[{allocation}]: the mapped memory is \
     not the engine's"
)]
pub struct NonceMismatch {
    /// Index of the allocation that was compared.
    pub allocation: u32,
    /// Offset of the nonce in the allocation.
    pub offset_bytes: u64,
}

impl EngineMemory {
    /// Takes the mapped buffers of a registration, in the order of its allocations.
    pub fn new(
        registration: &Registration,
        buffers: Vec<SharedBuffer>,
    ) -> Result<Self, EngineMemoryError> {
        let allocations = &registration.allocations;
        if buffers.len() != allocations.len() {
            return Err(EngineMemoryError::Count {
                buffers: buffers.len(),
                allocations: allocations.len(),
            });
        }
        let mut files = Vec::with_capacity(buffers.len());
        for (index, (buffer, allocation)) in buffers.iter().zip(allocations).enumerate() {
            if buffer.len() < allocation.bytes {
                return Err(EngineMemoryError::TooShort {
                    allocation: index,
                    bytes: allocation.bytes,
                    mapped_bytes: buffer.len(),
                });
            }
            let file = buffer
                .file_id()
                .map_err(|source| EngineMemoryError::Buffer {
                    allocation: index,
                    source,
                })?;
            if let Some(first) = files.iter().position(|earlier| *earlier == file) {
                return Err(EngineMemoryError::SameMemory {
                    first,
                    second: index,
                });
            }
            files.push(file);
        }
        let drop_signal = DropSignal::default();
        Ok(Self {
            buffers,
            drop_signal,
        })
    }

    /// Signals when this process maps none of the allocations any longer.
    pub fn end(&self) -> DropWaiter {
        self.drop_signal.end()
    }

    /// Proves that the mapping is the memory into which the engine wrote its nonce.
    pub fn verify_nonce(&self, nonce: &Nonce) -> Result<(), NonceMismatch> {
        let mismatch = NonceMismatch {
            allocation: nonce.allocation,
            offset_bytes: nonce.offset_bytes,
        };
        // An empty nonce would prove nothing.
        if nonce.bytes.len() < NONCE_BYTES_MIN {
            return Err(mismatch);
        }
        let mut seen = [0; NONCE_BYTES_MAX];
        let seen = seen.get_mut(..nonce.bytes.len()).ok_or(mismatch)?;
        let buffer = self.buffer(nonce.allocation).ok_or(mismatch)?;
        buffer
            .read_into(nonce.offset_bytes, seen)
            .map_err(|_| mismatch)?;
        if *seen == nonce.bytes[..] {
            Ok(())
        } else {
            Err(mismatch)
        }
    }

    /// Reads ranges (offset and length) of an allocation, one after another, into `out`.
    pub fn read(
        &self,
        allocation: u32,
        ranges: &[(u64, u64)],
        mut out: &mut [u8],
    ) -> Result<(), BufferError> {
        for (offset_bytes, len_bytes) in ranges {
            let outside = BufferError::OutOfRange {
                offset_bytes: *offset_bytes,
                len_bytes: *len_bytes,
                bytes: self.buffer(allocation).map_or(0, SharedBuffer::len),
            };
            let split = usize::try_from(*len_bytes).ok();
            let split = split.and_then(|len| out.split_at_mut_checked(len));
            let (Some((part, behind)), Some(buffer)) = (split, self.buffer(allocation)) else {
                return Err(outside);
            };
            buffer.read_into(*offset_bytes, part)?;
            out = behind;
        }
        Ok(())
    }

    /// The buffer of one allocation.
    pub fn buffer(&self, allocation: u32) -> Option<&SharedBuffer> {
        self.buffers.get(usize::try_from(allocation).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use super::super::registration::tests::separate_layers;
    use super::*;

    fn mapped(registration: &Registration) -> Vec<SharedBuffer> {
        let allocations = registration.allocations.iter();
        allocations
            .map(|allocation| {
                SharedBuffer::create("kvferry-test", allocation.bytes).expect("memory")
            })
            .collect()
    }

    #[test]
    fn a_nonce_proves_the_mapping() {
        let registration = separate_layers();
        let memory = EngineMemory::new(&registration, mapped(&registration)).expect("fits");
        let nonce = &registration.nonce;
        let mismatch = NonceMismatch {
            allocation: nonce.allocation,
            offset_bytes: nonce.offset_bytes,
        };
        assert_eq!(memory.verify_nonce(nonce), Err(mismatch));
        let buffer = memory.buffer(nonce.allocation).expect("there");
        buffer
            .write_from(nonce.offset_bytes, &nonce.bytes)
            .expect("in bounds");
        assert_eq!(memory.verify_nonce(nonce), Ok(()));
        for (allocation, offset_bytes) in [(99, 0), (0, u64::MAX), (0, nonce.offset_bytes + 1)] {
            let other = Nonce {
                allocation,
                offset_bytes,
                bytes: nonce.bytes.clone(),
            };
            assert!(memory.verify_nonce(&other).is_err());
        }
    }

    #[test]
    fn buffers_must_match_the_registration() {
        let registration = separate_layers();
        let found = EngineMemory::new(&registration, Vec::new());
        assert!(matches!(
            found,
            Err(EngineMemoryError::Count { buffers: 0, .. })
        ));

        let mut short = mapped(&registration);
        short[1] = SharedBuffer::create("kvferry-test", 1).expect("memory");
        let found = EngineMemory::new(&registration, short);
        assert!(matches!(
            found,
            Err(EngineMemoryError::TooShort { allocation: 1, .. })
        ));

        let mut same = mapped(&registration);
        let fd = same[0].try_clone_fd().expect("descriptor");
        same[1] = SharedBuffer::from_fd(fd, registration.allocations[1].bytes).expect("mapped");
        let found = EngineMemory::new(&registration, same);
        assert!(matches!(
            found,
            Err(EngineMemoryError::SameMemory {
                first: 0,
                second: 1
            })
        ));
    }
}
