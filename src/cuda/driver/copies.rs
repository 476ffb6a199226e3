//! Submits copies to the driver: each by a call of its own, or many by one call (batched copies).
#![expect(unsafe_code, reason = "calls into the CUDA driver")]

use std::ffi::c_uint;
use std::iter;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Context;
use super::memory::{DeviceSide, HostMemory, host_range};
use super::types::DeviceAddress;
use crate::error::CudaError;
use cudarc::driver::sys;
use kvferry_memory::CopyRange;
use kvferry_types::Direction;

/// Descriptors that a stream keeps for later copies. With [`BATCH_COPIES_MAX`] of 32 bytes each: 2 MiB per stream.
const SPARE_DESCRIPTORS: usize = 16;
/// Most copies of one call. Drivers have been observed to fail with ten times as many.
pub const BATCH_COPIES_MAX: usize = 4096;
/// `CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`: sources are read in stream order.
const ACCESS_IN_ORDER: c_uint = 1;

/// One copy. Lies in both memories, and on the host in one registered part.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub(super) to: DeviceAddress,
    pub(super) from: DeviceAddress,
    pub(super) bytes: usize,
}

/// The two memories of a copy, and its direction.
pub(super) struct Sides<'a> {
    pub(super) direction: Direction,
    pub(super) device: &'a dyn DeviceSide,
    pub(super) host: &'a dyn HostMemory,
}

impl Sides<'_> {
    /// A range, cut where the parts of the host's memory end. A range that does not lie in both memories gives an
    /// error.
    pub(super) fn pieces(
        &self,
        range: CopyRange,
    ) -> impl Iterator<Item = Result<Piece, CudaError>> + '_ {
        let mut done = 0;
        iter::from_fn(move || {
            if done >= range.len_bytes {
                return None;
            }
            let piece = self.piece(&range, done);
            let piece = piece.ok_or(CudaError::OutOfRange("a range that is to be copied"));
            done = match &piece {
                Ok(piece) => done + piece.bytes as u64,
                Err(_) => range.len_bytes,
            };
            Some(piece)
        })
    }

    fn piece(&self, range: &CopyRange, done: u64) -> Option<Piece> {
        let depot_bytes = range.depot_bytes + done;
        let part = self.host.end_of_part(depot_bytes);
        let part = part.saturating_sub(depot_bytes);
        let len_bytes = part.min(range.len_bytes - done);
        let memory = self.device.memory(range.allocation)?;
        let at_device = memory.range(range.device_bytes + done, len_bytes)?;
        let at_host = host_range(self.host.buffer(), depot_bytes, len_bytes)? as DeviceAddress;
        let (to, from) = match self.direction {
            Direction::Store => (at_host, at_device),
            Direction::Load => (at_device, at_host),
        };
        Some(Piece {
            to,
            from,
            bytes: usize::try_from(len_bytes).ok()?,
        })
    }
}

/// `CUmemcpyAttributes`.
#[repr(C)]
struct Attributes {
    source_access_order: c_uint,
    /// Locations of both memories, for memory whose location the driver does not know.
    hints: [c_uint; 4],
    flags: c_uint,
}

const _: () = assert!(size_of::<Attributes>() == 24);

/// Arguments of one batched call. Nothing guarantees that the driver has read all of them when the call returns, so
/// they are kept as long as the memory that is copied.
pub(super) struct Descriptors {
    to: Vec<DeviceAddress>,
    from: Vec<DeviceAddress>,
    bytes: Vec<usize>,
    /// Either an attribute index for each copy, or the first copy for each attribute: zeros are right for both.
    attributes_of: Vec<usize>,
    attributes: Box<Attributes>,
}

impl Descriptors {
    fn new(copies: usize) -> Self {
        Self {
            to: Vec::with_capacity(copies),
            from: Vec::with_capacity(copies),
            bytes: Vec::with_capacity(copies),
            attributes_of: vec![0; copies],
            attributes: Box::new(Attributes {
                source_access_order: ACCESS_IN_ORDER,
                hints: [0; 4],
                flags: 0,
            }),
        }
    }

    fn clear(&mut self) {
        self.to.clear();
        self.from.clear();
        self.bytes.clear();
    }

    fn push(&mut self, piece: Piece) {
        self.to.push(piece.to);
        self.from.push(piece.from);
        self.bytes.push(piece.bytes);
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(super) fn piece(&self, index: usize) -> Piece {
        Piece {
            to: self.to[index],
            from: self.from[index],
            bytes: self.bytes[index],
        }
    }

    /// Submits all copies to a stream by one call.
    pub(super) fn submit(
        &mut self,
        context: &Context,
        handle: sys::CUstream,
    ) -> Result<(), CudaError> {
        let api = context.bind()?;
        let count = self.len();
        let (to, from) = (self.to.as_mut_ptr(), self.from.as_mut_ptr());
        let (sizes, of) = (self.bytes.as_mut_ptr(), self.attributes_of.as_mut_ptr());
        let attributes = ptr::from_mut(self.attributes.as_mut()).cast();
        if let Some(call) = api.cuMemcpyBatchAsync_v2 {
            // SAFETY: the argument for one copy holds for each of them. There are `count` places in each list, and one
            // attribute; all of it is kept as long as the memory that is copied, and not accessed until then.
            let code = unsafe { call(to, from, sizes, count, attributes, of, 1, handle) };
            return context.check("cuMemcpyBatchAsync_v2", code);
        }
        let Some(call) = api.cuMemcpyBatchAsync else {
            return Err(CudaError::NoFunction("cuMemcpyBatchAsync"));
        };
        let mut failed = usize::MAX;
        let failed = &raw mut failed;
        // SAFETY: as above; the call also writes one number before it returns.
        let code = unsafe { call(to, from, sizes, count, attributes, of, 1, failed, handle) };
        context.check("cuMemcpyBatchAsync", code)
    }
}

/// Issues batched copies for a stream.
pub(super) struct Batches {
    /// Most copies of one call.
    most: usize,
    spare: Mutex<Vec<Descriptors>>,
}

impl Batches {
    /// Creates batches of at most `most` copies, limited to 1 to [`BATCH_COPIES_MAX`].
    pub(super) fn new(most: usize) -> Self {
        Self {
            most: most.clamp(1, BATCH_COPIES_MAX),
            spare: Mutex::default(),
        }
    }

    /// Most copies of one call.
    pub(super) fn most(&self) -> usize {
        self.most
    }

    fn spare(&self) -> MutexGuard<'_, Vec<Descriptors>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the next pieces, as many as one call takes.
    pub(super) fn next(
        &self,
        pieces: &mut impl Iterator<Item = Result<Piece, CudaError>>,
    ) -> Result<Descriptors, CudaError> {
        let spare = self.spare().pop();
        let mut descriptors = spare.unwrap_or_else(|| Descriptors::new(self.most));
        descriptors.clear();
        for piece in pieces.take(self.most) {
            descriptors.push(piece?);
        }
        Ok(descriptors)
    }

    /// Returns descriptors that the driver no longer reads.
    pub(super) fn give_back(&self, descriptors: impl IntoIterator<Item = Descriptors>) {
        let mut spare = self.spare();
        let room = SPARE_DESCRIPTORS.saturating_sub(spare.len());
        spare.extend(descriptors.into_iter().take(room));
    }
}
