//! The CPU copy engine: copies pages between registered engine memory and a depot.
//!
//! A job is checked as a whole before its first byte is copied ([`plan`]), then executed step by step, by the caller's
//! thread alone or together with a few more ([`threads`]). A step is one contiguous range of at most [`CUT_BYTES`] on
//! both sides; the [`kernel`] copies it.

mod kernel;
mod plan;
#[cfg(test)]
mod tests;
mod threads;
mod waiting;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::depot::Depot;
use super::engine_memory::EngineMemory;
use super::layout::PageLayout;
use kvferry_types::{Direction, FragmentPair};

pub use kernel::NON_TEMPORAL_MIN_BYTES;
pub use plan::{COPY_PART_BYTES, CUT_BYTES, CopyPlan, CopyRange, CopyRequest};
pub use threads::{CopyEngine, POOL_MIN_BYTES};
pub use waiting::{STORE_YIELD_BYTES, WaitingLoad, WaitingLoads};

/// One of the two memories of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The engine's memory.
    Device,
    /// The depot's arena.
    Depot,
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Device => "device",
            Self::Depot => "depot",
        })
    }
}

/// The store instructions of a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CopyMode {
    /// Non-temporal for batches of at least [`NON_TEMPORAL_MIN_BYTES`], plain below.
    #[default]
    Auto,
    /// Plain stores, through the caches.
    Plain,
    /// Non-temporal stores, past the caches, where the machine has them; plain elsewhere.
    NonTemporal,
}

/// Stops a running copy. Set once, never cleared.
#[derive(Debug, Default)]
pub struct CancelFlag {
    cancelled: AtomicBool,
    #[cfg(test)]
    looks_left: std::sync::atomic::AtomicU64,
}

impl CancelFlag {
    /// Stops the copy before its next step. The copy may already be past its last one.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Returns true after [`Self::cancel`] was called.
    pub fn is_cancelled(&self) -> bool {
        #[cfg(test)]
        if self.looks_left.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.cancel();
        }
        self.cancelled.load(Ordering::Relaxed)
    }

    /// A flag that sets itself at the `looks`-th check.
    #[cfg(test)]
    pub(super) fn after_looks(looks: u64) -> Self {
        Self {
            looks_left: looks.into(),
            ..Self::default()
        }
    }
}

/// One batch of page copies.
#[derive(Debug, Clone)]
pub struct CopyJob {
    /// Store or load.
    pub direction: Direction,
    /// Layout of the bytes of a page.
    pub layout: Arc<PageLayout>,
    /// The engine's memory.
    pub device: Arc<EngineMemory>,
    /// The host's memory; its page size must be that of the layout.
    pub depot: Arc<Depot>,
    /// Pages to copy. For a store `src` counts device pages and `dst` arena pages, for a load the reverse. No page is
    /// written twice.
    pub pairs: Vec<FragmentPair>,
    /// Stops the copy between two steps.
    pub cancel: Arc<CancelFlag>,
}

impl CopyJob {
    fn plan(&self) -> Result<CopyPlan, CopyError> {
        let request = CopyRequest {
            direction: self.direction,
            layout: &self.layout,
            depot: &self.depot,
            pairs: &self.pairs,
        };
        CopyPlan::new(&request, |index| {
            self.device.buffer(index).map(|buffer| buffer.len())
        })
    }
}

/// Result of a complete copy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CopyReport {
    /// Bytes copied: pages x page bytes.
    pub bytes: u64,
    /// Contiguous ranges that were copied, after neighbours were merged and long ones cut.
    pub steps: u64,
}

/// Why a copy was refused or did not complete. Nothing was written unless the error contains `bytes_written`.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// A pair's lists have different numbers of pages.
    #[error("pair {pair} reads {src_pages} pages and writes {dst_pages}")]
    PageCounts {
        /// Index of the pair.
        pair: usize,
        /// Pages of its sources.
        src_pages: u64,
        /// Pages of its destinations.
        dst_pages: u64,
    },
    /// A page that does not exist in that memory.
    #[error("pair {pair} names {side} page {page}, there are {pages}")]
    OutOfRange {
        /// Index of the pair.
        pair: usize,
        /// The memory that lacks the page.
        side: Side,
        /// The first page that is too high.
        page: u64,
        /// Pages of that memory.
        pages: u32,
    },
    /// A page that would be written twice in one batch.
    #[error("{side} page {page} is written twice in one batch")]
    WrittenTwice {
        /// The destination of the copy.
        side: Side,
        /// The page.
        page: u64,
    },
    /// The depot is divided into pages of another size than the engine's memory: offsets computed from this layout
    /// would be wrong. `depot_bytes` is 0 if the depot holds no pages yet.
    #[error(
        "the depot holds pages of {depot_bytes} bytes, the engine's memory has pages of {engine_bytes} bytes: nothing is \
         copied before the leader has read the depot's inventory for this engine; if that stays so, restart the worker"
    )]
    PageBytes {
        /// Page size in the depot's header.
        depot_bytes: u64,
        /// Page size of the registration.
        engine_bytes: u64,
    },
    /// A fragment of the layout does not lie in the mapped memory.
    #[error("fragment {fragment} of the layout is outside of the mapped engine memory")]
    Layout {
        /// Index into [`PageLayout::fragments`].
        fragment: usize,
    },
    /// The flag was set. The destination pages hold a mixture of old and new bytes; no thread writes to them any
    /// longer.
    #[error("cancelled after {bytes_written} of {bytes} bytes")]
    Cancelled {
        /// Bytes that were written.
        bytes_written: u64,
        /// Bytes of the batch.
        bytes: u64,
    },
    /// A step failed after the checks had passed: a bug. No thread writes to the destination pages any longer.
    #[error("the copy stopped after {bytes_written} of {bytes} bytes")]
    Incomplete {
        /// Bytes that were written.
        bytes_written: u64,
        /// Bytes of the batch.
        bytes: u64,
    },
    /// The pool's threads could not be started.
    #[error("cannot start a copy thread: {0}")]
    Threads(std::io::Error),
}
