//! The CPU copy engine: pages between registered engine memory and a depot.
//!
//! A job is checked as a whole before its first byte moves ([`plan`]), then walked step by step, by the caller's thread
//! alone or together with a small pool ([`pool`]). A step is one contiguous range of at most [`CUT_BYTES`] on both
//! sides; the [`kernel`] copies it.

mod kernel;
mod plan;
mod pool;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::depot::Depot;
use super::engine_memory::EngineMemory;
use super::layout::PageLayout;
use crate::types::{Direction, FragmentPair};

pub use kernel::NON_TEMPORAL_MIN_BYTES;
pub use plan::{COPY_PART_BYTES, CUT_BYTES, CopyPlan, CopyRange, CopyRequest};
pub use pool::{CopyEngine, POOL_MIN_BYTES};

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

/// Which store instructions a batch uses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CopyMode {
    /// Non-temporal for batches of at least [`NON_TEMPORAL_MIN_BYTES`], plain below.
    #[default]
    Auto,
    /// Through the caches.
    Plain,
    /// Past the caches, where the machine can; plain elsewhere.
    NonTemporal,
}

/// Tells a running copy to stop. Set once, never cleared.
#[derive(Debug, Default)]
pub struct CancelFlag {
    cancelled: AtomicBool,
    #[cfg(test)]
    looks_left: std::sync::atomic::AtomicU64,
}

impl CancelFlag {
    /// Asks the copy to stop before its next step. It may already be past its last one.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// True once [`Self::cancel`] was called.
    pub fn is_cancelled(&self) -> bool {
        #[cfg(test)]
        if self.looks_left.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.cancel();
        }
        self.cancelled.load(Ordering::Relaxed)
    }

    /// A flag that sets itself when it is looked at the `looks`-th time.
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
    /// Which way.
    pub direction: Direction,
    /// Where the bytes of a page lie.
    pub layout: Arc<PageLayout>,
    /// The engine's memory.
    pub device: Arc<EngineMemory>,
    /// The host's memory; its pages are those of the layout.
    pub depot: Arc<Depot>,
    /// What is copied. For a gather `src` counts device pages and `dst` arena pages, for a scatter the reverse. No page
    /// is written twice.
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

/// What a finished copy moved.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CopyReport {
    /// Bytes copied: pages x page bytes.
    pub bytes: u64,
    /// Contiguous ranges they were copied in, after neighbours were merged and long ones cut.
    pub steps: u64,
}

/// Why a copy was refused or did not finish. Unless bytes are named, nothing was written.
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
    /// A page that the memory does not have.
    #[error("pair {pair} names {side} page {page}, there are {pages}")]
    OutOfRange {
        /// Index of the pair.
        pair: usize,
        /// Which memory.
        side: Side,
        /// The first page that is too high.
        page: u64,
        /// Pages of that memory.
        pages: u32,
    },
    /// A page that would be written twice, at once.
    #[error("{side} page {page} is written twice in one batch")]
    WrittenTwice {
        /// Which memory.
        side: Side,
        /// The page.
        page: u64,
    },
    /// The depot is divided into pages of another size than the engine's memory: no page lies where this copy would look
    /// for it. 0 stands for a depot that holds no pages yet.
    #[error(
        "the depot holds pages of {depot_bytes} bytes, the engine's memory has pages of {engine_bytes} bytes: nothing is \
         copied before the leader has read the depot's inventory for this engine; if that stays so, restart the worker"
    )]
    PageBytes {
        /// Bytes of a page by the depot's header.
        depot_bytes: u64,
        /// Bytes of a page by the registration.
        engine_bytes: u64,
    },
    /// The layout does not lie in the mapped memory.
    #[error("fragment {fragment} of the layout does not lie in the mapped engine memory")]
    Layout {
        /// Index into [`PageLayout::fragments`].
        fragment: usize,
    },
    /// The flag was set. The destination pages hold a mixture; no thread writes them any more.
    #[error("cancelled after {bytes_written} of {bytes} bytes")]
    Cancelled {
        /// Bytes that were written.
        bytes_written: u64,
        /// Bytes of the batch.
        bytes: u64,
    },
    /// A step failed after the checks had passed: a defect. No thread writes the destination pages any more.
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
