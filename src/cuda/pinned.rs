//! A depot whose memory a GPU reaches by itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use crossbeam::channel::{Sender, unbounded};

use super::driver::{Context, HostMemory, PinnedRange};
use super::error::CudaError;
use crate::memory::{Depot, Lifeline, LifelineEnd, SharedBuffer};

/// A depot is pinned in chunks of so many bytes: drivers refuse very large ones, and each is a step of progress.
pub const PIN_CHUNK_BYTES: u64 = 1 << 30;
/// Threads that pin a depot. One pins about 10 GiB a second; so many are as fast as memory.
const PIN_THREADS: u64 = 8;
/// `CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED`.
const HOST_REGISTER_SUPPORTED: u32 = 99;

/// A depot, pinned as a whole.
#[derive(Debug)]
pub struct PinnedDepot {
    // Given back before the memory is.
    _ranges: Vec<PinnedRange>,
    depot: Arc<Depot>,
    chunk_bytes: u64,
    lifeline: Lifeline,
}

/// The driver does not pin so much memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "g2: the CUDA driver pinned {pinned_bytes} of {bytes} bytes of host memory and no more: {source}; {}: lower g2, or raise \
     that limit",
    match .registers {
        true => "the limit is the host's free memory, the memory cgroup of a container, or the addresses of the IOMMU \
                 (ulimit -l does not count here)",
        false => "this GPU registers no host memory (attribute 99 is 0), as in a confidential virtual machine",
    }
)]
pub struct PinError {
    /// What was pinned before.
    pub pinned_bytes: u64,
    /// What was wanted.
    pub bytes: u64,
    /// The GPU reaches host memory of other makers at all.
    pub registers: bool,
    /// What the driver said.
    pub source: CudaError,
}

impl PinnedDepot {
    /// Pins all of a depot, by several threads. `progress` hears how many bytes are pinned. Blocks: a second for about 10 GiB
    /// with one thread.
    pub fn new(
        context: &Arc<Context>,
        depot: Arc<Depot>,
        chunk_bytes: u64,
        mut progress: impl FnMut(u64),
    ) -> Result<Self, PinError> {
        let (bytes, chunk_bytes) = (depot.buffer().len(), chunk_bytes.max(1));
        let chunks = bytes.div_ceil(chunk_bytes);
        let next = AtomicU64::new(0);
        let (mut ranges, mut pinned_bytes, mut refused) = (Vec::new(), 0, None);
        thread::scope(|scope| {
            let (tell, told) = unbounded();
            let mut threads = 0;
            for _ in 0..chunks.min(PIN_THREADS) {
                let (tell, next, depot) = (tell.clone(), &next, &depot);
                let thread = thread::Builder::new().name("kvferry-pin".to_owned());
                let pin = move || pin(context, depot, chunk_bytes, next, &tell);
                match thread.spawn_scoped(scope, pin) {
                    Ok(_) => threads += 1,
                    Err(error) => tracing::warn!(%error, "one thread less to pin host memory"),
                }
            }
            if threads == 0 {
                pin(context, &depot, chunk_bytes, &next, &tell);
            }
            drop(tell);
            for pinned in told {
                match pinned {
                    Ok((range, len_bytes)) => {
                        ranges.push(range);
                        pinned_bytes += len_bytes;
                        progress(pinned_bytes);
                    }
                    Err(error) => {
                        refused.get_or_insert(error);
                    }
                }
            }
        });
        if let Some(source) = refused {
            return Err(PinError {
                pinned_bytes,
                bytes,
                registers: context.attribute(HOST_REGISTER_SUPPORTED) != Ok(0),
                source,
            });
        }
        Ok(Self {
            _ranges: ranges,
            depot,
            chunk_bytes,
            lifeline: Lifeline::default(),
        })
    }

    /// The depot.
    pub fn depot(&self) -> &Arc<Depot> {
        &self.depot
    }

    /// Tells when the driver has unpinned all of it: it refuses to pin the same memory before that.
    pub fn end(&self) -> LifelineEnd {
        self.lifeline.end()
    }
}

/// Pins chunks, one after the other, until none is left or one is refused: then the other threads stop, too.
fn pin(
    context: &Arc<Context>,
    depot: &Arc<Depot>,
    chunk_bytes: u64,
    next: &AtomicU64,
    tell: &Sender<Result<(PinnedRange, u64), CudaError>>,
) {
    let bytes = depot.buffer().len();
    loop {
        let chunk = next.fetch_add(1, Ordering::Relaxed);
        let at = chunk.saturating_mul(chunk_bytes);
        if at >= bytes {
            return;
        }
        let len_bytes = chunk_bytes.min(bytes - at);
        let pinned = PinnedRange::register(context, depot, at, len_bytes);
        let refused = pinned.is_err();
        if refused {
            // Far enough that no thread comes back from there, and too few to wrap around.
            next.store(bytes.max(u64::MAX / 2), Ordering::Relaxed);
        }
        if tell.send(pinned.map(|range| (range, len_bytes))).is_err() || refused {
            return;
        }
    }
}

impl HostMemory for PinnedDepot {
    fn buffer(&self) -> &SharedBuffer {
        self.depot.buffer()
    }

    fn end_of_part(&self, offset_bytes: u64) -> u64 {
        (offset_bytes / self.chunk_bytes + 1).saturating_mul(self.chunk_bytes)
    }
}
