//! A depot that is pinned for a GPU.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use crossbeam::channel::{Sender, unbounded};

use super::driver::{Context, HostMemory, PinnedRange};
use super::error::CudaError;
use kvferry_memory::{Depot, DropSignal, DropWaiter, SharedBuffer};

/// A depot is pinned in chunks of this many bytes: drivers refuse very large ones, and each chunk is a step of
/// progress.
pub const PIN_CHUNK_BYTES: u64 = 1 << 30;
/// Threads that pin a depot. One thread pins about 10 GiB/s; 8 reach the speed of the memory.
const PIN_THREADS: u64 = 8;
/// `CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED`.
const HOST_REGISTER_SUPPORTED: u32 = 99;

/// A depot that is pinned completely.
#[derive(Debug)]
pub struct PinnedDepot {
    // Dropped before the depot, so that its memory is unpinned before it is unmapped.
    _ranges: Vec<PinnedRange>,
    depot: Arc<Depot>,
    chunk_bytes: u64,
    drop_signal: DropSignal,
}

/// The driver does not pin this much memory.
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
    /// Bytes that had been pinned before the refusal.
    pub pinned_bytes: u64,
    /// Bytes of the depot.
    pub bytes: u64,
    /// Whether the GPU can register host memory at all (attribute 99).
    pub registers: bool,
    /// Error of the driver.
    pub source: CudaError,
}

impl PinnedDepot {
    /// Pins a whole depot with several threads. `progress` receives the number of bytes that are pinned. Blocks: 1 s
    /// per 10 GiB with one thread.
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
            let (sender, reported) = unbounded();
            let mut threads = 0;
            for _ in 0..chunks.min(PIN_THREADS) {
                let (sender, next, depot) = (sender.clone(), &next, &depot);
                let thread = thread::Builder::new().name("kvferry-pin".to_owned());
                let pin = move || pin(context, depot, chunk_bytes, next, &sender);
                match thread.spawn_scoped(scope, pin) {
                    Ok(_) => threads += 1,
                    Err(error) => tracing::warn!(%error, "one thread less to pin host memory"),
                }
            }
            if threads == 0 {
                pin(context, &depot, chunk_bytes, &next, &sender);
            }
            drop(sender);
            for pinned in reported {
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
            drop_signal: DropSignal::default(),
        })
    }

    /// The pinned depot.
    pub fn depot(&self) -> &Arc<Depot> {
        &self.depot
    }

    /// Signals that the driver has unpinned the whole depot: until then it refuses to pin the same memory.
    pub fn end(&self) -> DropWaiter {
        self.drop_signal.end()
    }
}

/// Body of one thread: pins chunks one after another until none is left or one is refused, which stops the other
/// threads too.
fn pin(
    context: &Arc<Context>,
    depot: &Arc<Depot>,
    chunk_bytes: u64,
    next: &AtomicU64,
    sender: &Sender<Result<(PinnedRange, u64), CudaError>>,
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
            // Past the end for every thread, and low enough that the counter does not wrap around.
            next.store(bytes.max(u64::MAX / 2), Ordering::Relaxed);
        }
        if sender.send(pinned.map(|range| (range, len_bytes))).is_err() || refused {
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
