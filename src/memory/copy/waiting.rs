//! Loads that wait for a CPU, and stores that offer theirs.
//!
//! A store copies for up to milliseconds. If the scheduler wakes the thread of a load on the store's CPU, the load waits
//! for the end of the store or of its time slice. A store therefore yields its CPU between two steps while a load waits,
//! and now and then also without one, for the threads that bring the load.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes after which a store offers its CPU although no load waits: about 25 us.
pub const STORE_YIELD_BYTES: u64 = 256 << 10;

/// Number of loads that are ordered and whose copies have not started. Clones count together.
#[derive(Debug, Clone, Default)]
pub struct WaitingLoads(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    waiting: AtomicUsize,
    #[cfg(test)]
    offered: AtomicUsize,
}

/// A load that waits, until this value is dropped.
#[derive(Debug)]
pub struct WaitingLoad(WaitingLoads);

impl WaitingLoads {
    /// Counts a load until the returned value is dropped.
    pub fn add(&self) -> WaitingLoad {
        self.0.waiting.fetch_add(1, Ordering::Relaxed);
        WaitingLoad(self.clone())
    }

    /// Returns true while a load waits.
    pub(super) fn any(&self) -> bool {
        self.0.waiting.load(Ordering::Relaxed) > 0
    }

    /// Lets the other threads of this CPU run.
    pub(super) fn offer_cpu(&self) {
        #[cfg(test)]
        self.0.offered.fetch_add(1, Ordering::Relaxed);
        rustix::thread::sched_yield();
    }

    /// How often a store has offered its CPU.
    #[cfg(test)]
    pub(super) fn offered(&self) -> usize {
        self.0.offered.load(Ordering::Relaxed)
    }
}

impl Drop for WaitingLoad {
    fn drop(&mut self) {
        self.0.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}
