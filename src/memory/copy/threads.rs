//! Executes a plan's steps on one or several threads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crossbeam::channel::{Receiver, Sender, bounded};

use super::kernel::{BufferRange, Kernel, NON_TEMPORAL_MIN_BYTES};
use super::plan::{CopyPlan, CopyRange};
use super::waiting::{STORE_YIELD_BYTES, WaitingLoads};
use super::{CancelFlag, CopyError, CopyJob, CopyMode, CopyReport};
use crate::buffer::SharedBuffer;
use crate::depot::Depot;
use crate::engine_memory::EngineMemory;
use kvferry_types::Direction;

/// Batches of at least this many bytes are shared with the pool; for smaller ones waking it costs more than it gains.
pub const POOL_MIN_BYTES: u64 = 1 << 20;
/// Approximate bytes of the steps that a thread claims at a time.
const SHARE_BYTES: u64 = 512 << 10;

/// Copies batches of pages. Can be shared: batches of several callers run concurrently.
#[derive(Debug)]
pub struct CopyEngine {
    /// Threads besides the caller's.
    helpers: usize,
    mode: CopyMode,
    offers: Sender<Arc<Offer>>,
    waiting: WaitingLoads,
}

impl CopyEngine {
    /// Creates an engine that copies large batches with up to `threads` threads, the caller's own included.
    pub fn new(threads: usize) -> Result<Self, CopyError> {
        Self::with_mode(threads, CopyMode::Auto)
    }

    /// Creates an engine with a choice of the store instructions.
    pub fn with_mode(threads: usize, mode: CopyMode) -> Result<Self, CopyError> {
        let helpers = threads.saturating_sub(1);
        let (offers, taken) = bounded::<Arc<Offer>>(helpers);
        for _ in 0..helpers {
            let taken = taken.clone();
            std::thread::Builder::new()
                .name("kvferry-copy".to_owned())
                .spawn(move || help(&taken))
                .map_err(CopyError::Threads)?;
        }
        Ok(Self {
            helpers,
            mode,
            offers,
            waiting: WaitingLoads::default(),
        })
    }

    /// The same engine, whose stores yield their CPUs to these loads.
    #[must_use]
    pub fn yielding_to(self, waiting: WaitingLoads) -> Self {
        Self { waiting, ..self }
    }

    /// Copies all pages of a job, or none when a check refuses it. Blocks until the copy has ended.
    ///
    /// After `run` returns, also with an error, no thread reads or writes the job's memory, and the engine holds no
    /// reference to it.
    pub fn run(&self, job: &CopyJob) -> Result<CopyReport, CopyError> {
        let plan = job.plan()?;
        let (bytes, steps) = (plan.bytes, plan.steps);
        if steps == 0 {
            return Ok(CopyReport::default());
        }
        let streams = match self.mode {
            CopyMode::Auto => bytes >= NON_TEMPORAL_MIN_BYTES,
            CopyMode::Plain => false,
            CopyMode::NonTemporal => true,
        };
        let work = Arc::new(SharedBatch {
            kernel: if streams {
                Kernel::non_temporal()
            } else {
                Kernel::Plain
            },
            share_steps: (steps.saturating_mul(SHARE_BYTES) / bytes.max(1)).clamp(1, steps),
            plan,
            direction: job.direction,
            device: Arc::clone(&job.device),
            depot: Arc::clone(&job.depot),
            cancel: Arc::clone(&job.cancel),
            waiting: self.waiting.clone(),
            next_step: AtomicU64::new(0),
            written_bytes: AtomicU64::new(0),
        });
        let offer = Arc::new(Offer::new(Arc::clone(&work)));
        if bytes >= POOL_MIN_BYTES {
            self.call_helpers(&offer, &work);
        }
        work.walk();
        offer.close();
        let bytes_written = work.written_bytes.load(Ordering::Relaxed);
        match bytes_written {
            _ if bytes_written == bytes => Ok(CopyReport { bytes, steps }),
            _ if job.cancel.is_cancelled() => Err(CopyError::Cancelled {
                bytes_written,
                bytes,
            }),
            _ => Err(CopyError::Incomplete {
                bytes_written,
                bytes,
            }),
        }
    }

    /// Offers the work to as many helpers as there are further shares. A full channel means that all helpers are busy.
    fn call_helpers(&self, offer: &Arc<Offer>, work: &SharedBatch) {
        let shares = work.plan.steps.div_ceil(work.share_steps);
        for _ in 0..shares.saturating_sub(1).min(self.helpers as u64) {
            if self.offers.try_send(Arc::clone(offer)).is_err() {
                return;
            }
        }
    }
}

/// Body of a helper thread: processes offers until the engine is dropped.
fn help(offers: &Receiver<Arc<Offer>>) {
    for offer in offers {
        let share = offer.enter();
        if let Some(work) = share.as_ref().and_then(|share| share.work.as_ref()) {
            work.walk();
        }
    }
}

/// Work that helpers may join while the offer is open.
#[derive(Debug)]
struct Offer {
    state: Mutex<OfferState>,
    idle: Condvar,
}

#[derive(Debug)]
struct OfferState {
    /// `None` once closed: a helper that takes the offer late has no memory to touch.
    work: Option<Arc<SharedBatch>>,
    /// Number of helpers that copy.
    active: usize,
}

impl Offer {
    fn new(work: Arc<SharedBatch>) -> Self {
        let state = OfferState {
            work: Some(work),
            active: 0,
        };
        Self {
            state: Mutex::new(state),
            idle: Condvar::new(),
        }
    }

    /// Ignores poisoning: the state is valid between any two statements, so that a panic elsewhere does not corrupt it.
    fn lock(&self) -> MutexGuard<'_, OfferState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self) -> Option<Share<'_>> {
        let mut state = self.lock();
        let work = Arc::clone(state.work.as_ref()?);
        state.active += 1;
        Some(Share {
            work: Some(work),
            offer: self,
        })
    }

    /// Admits no further helper and waits until the last one has left.
    fn close(&self) {
        let mut state = self.lock();
        state.work = None;
        while state.active > 0 {
            state = self
                .idle
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// A helper's participation in an offer; ends when it is dropped, also in a panic.
struct Share<'a> {
    /// `None` only during the drop.
    work: Option<Arc<SharedBatch>>,
    offer: &'a Offer,
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        // Must be dropped first: a caller that saw the last helper leave may rely on the memory being released.
        drop(self.work.take());
        let mut state = self.offer.lock();
        state.active -= 1;
        if state.active == 0 {
            self.offer.idle.notify_all();
        }
    }
}

/// One batch, shared by the threads that copy it.
#[derive(Debug)]
struct SharedBatch {
    plan: CopyPlan,
    direction: Direction,
    device: Arc<EngineMemory>,
    depot: Arc<Depot>,
    cancel: Arc<CancelFlag>,
    waiting: WaitingLoads,
    kernel: Kernel,
    /// Steps that a thread claims at a time.
    share_steps: u64,
    next_step: AtomicU64,
    written_bytes: AtomicU64,
}

impl SharedBatch {
    /// Claims shares of the steps and copies them until none is left or the flag is set.
    fn walk(&self) {
        loop {
            let start = self
                .next_step
                .fetch_add(self.share_steps, Ordering::Relaxed);
            if start >= self.plan.steps {
                return;
            }
            let end = self.plan.steps.min(start + self.share_steps);
            let (written_bytes, complete) = self.copy_steps(start..end);
            self.kernel.finish();
            self.written_bytes
                .fetch_add(written_bytes, Ordering::Relaxed);
            if !complete {
                return;
            }
        }
    }

    /// Copies steps in order. Returns the bytes written, and whether all steps were copied.
    fn copy_steps(&self, range: std::ops::Range<u64>) -> (u64, bool) {
        let mut written_bytes = 0;
        let mut offered_at = 0;
        let mut steps = self.plan.steps(range).peekable();
        while let Some(step) = steps.next() {
            if self.cancel.is_cancelled() {
                return (written_bytes, false);
            }
            let next = steps.peek().and_then(|next| self.places(next));
            let next = next.map(|(src, _)| src);
            let copied = self
                .places(&step)
                .is_some_and(|(src, dst)| self.kernel.copy(src, dst, step.len_bytes, next).is_ok());
            if !copied {
                return (written_bytes, false);
            }
            written_bytes += step.len_bytes;
            let due = written_bytes - offered_at >= STORE_YIELD_BYTES || self.waiting.any();
            if self.direction == Direction::Store && due {
                offered_at = written_bytes;
                self.waiting.offer_cpu();
            }
        }
        (written_bytes, true)
    }

    /// Source and destination of a step; `None` if the allocation is missing, which the plan has ruled out.
    fn places(&self, step: &CopyRange) -> Option<(BufferRange<'_>, BufferRange<'_>)> {
        let device = place(self.device.buffer(step.allocation)?, step.device_bytes);
        let depot = place(self.depot.buffer(), step.depot_bytes);
        Some(match self.direction {
            Direction::Store => (device, depot),
            Direction::Load => (depot, device),
        })
    }
}

fn place(buffer: &SharedBuffer, offset_bytes: u64) -> BufferRange<'_> {
    BufferRange {
        buffer,
        offset_bytes,
    }
}
