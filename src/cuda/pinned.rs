//! A depot whose memory a GPU reaches by itself.

use std::sync::Arc;

use rustix::process::{Resource, getrlimit};

use super::driver::{Context, HostMemory, PinnedRange};
use super::error::CudaError;
use crate::memory::{Depot, SharedBuffer};

/// A depot is pinned in chunks of so many bytes: drivers refuse very large ones, and each is a step of progress.
pub const PIN_CHUNK_BYTES: u64 = 1 << 30;

/// A depot, pinned as a whole.
#[derive(Debug)]
pub struct PinnedDepot {
    // Given back before the memory is.
    _ranges: Vec<PinnedRange>,
    depot: Arc<Depot>,
    chunk_bytes: u64,
}

/// The driver does not pin so much memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "g2: the CUDA driver pinned {pinned_bytes} of {bytes} bytes of host memory and no more: {source}; locked memory is \
     limited to {limit} (ulimit -l, LimitMEMLOCK of systemd): raise that limit, or lower g2"
)]
pub struct PinError {
    /// What was pinned before.
    pub pinned_bytes: u64,
    /// What was wanted.
    pub bytes: u64,
    /// The limit of this process, in words.
    pub limit: String,
    /// What the driver said.
    pub source: CudaError,
}

impl PinnedDepot {
    /// Pins all of a depot. `progress` hears how many bytes are pinned. Blocks: about 0.1 s a GiB.
    pub fn new(
        context: &Arc<Context>,
        depot: Arc<Depot>,
        chunk_bytes: u64,
        mut progress: impl FnMut(u64),
    ) -> Result<Self, PinError> {
        let (bytes, mut pinned_bytes) = (depot.buffer().len(), 0);
        let chunk_bytes = chunk_bytes.max(1);
        let mut ranges = Vec::new();
        while pinned_bytes < bytes {
            let len_bytes = chunk_bytes.min(bytes - pinned_bytes);
            let range = PinnedRange::register(context, &depot, pinned_bytes, len_bytes);
            let range = range.map_err(|source| PinError {
                pinned_bytes,
                bytes,
                limit: memlock_limit(),
                source,
            })?;
            ranges.push(range);
            pinned_bytes += len_bytes;
            progress(pinned_bytes);
        }
        Ok(Self {
            _ranges: ranges,
            depot,
            chunk_bytes,
        })
    }

    /// The depot.
    pub fn depot(&self) -> &Arc<Depot> {
        &self.depot
    }
}

fn memlock_limit() -> String {
    let limit = getrlimit(Resource::Memlock).current;
    limit.map_or("nothing".to_owned(), |bytes| format!("{bytes} bytes"))
}

impl HostMemory for PinnedDepot {
    fn buffer(&self) -> &SharedBuffer {
        self.depot.buffer()
    }

    fn end_of_part(&self, offset_bytes: u64) -> u64 {
        (offset_bytes / self.chunk_bytes + 1).saturating_mul(self.chunk_bytes)
    }
}
