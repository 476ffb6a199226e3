//! Counts of the pages that lookups and loads hold, by their owners: the rule of a namespace, and an engine.
//!
//! Each hold counts by itself: a page that two lookups hold counts twice. A count goes back when what holds the pages is
//! dropped, whatever the reason.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use smallvec::SmallVec;

/// The pages that one owner holds.
#[derive(Debug, Clone, Default)]
pub struct HeldCount(Arc<AtomicU64>);

impl HeldCount {
    /// Number of pages.
    pub fn pages(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// The owners of the pages of one sequence.
#[derive(Debug, Clone, Default)]
pub struct HoldOwners {
    /// The rule of the namespace, if it has a limit.
    pub rule: Option<HeldCount>,
    /// The engine, for its pages in host memory.
    pub engine: Option<HeldCount>,
}

impl HoldOwners {
    /// Counts pages until the returned value is dropped. `in_host_memory`: they lie there.
    pub fn hold(&self, pages: u32, in_host_memory: bool) -> HeldPages {
        let engine = self.engine.as_ref().filter(|_| in_host_memory);
        let counts = self.rule.iter().chain(engine).cloned();
        let held = HeldPages {
            counts: counts.collect(),
            pages: u64::from(pages),
        };
        for HeldCount(count) in &held.counts {
            count.fetch_add(held.pages, Ordering::Relaxed);
        }
        held
    }
}

/// Pages that count for their owners until this is dropped.
#[derive(Debug, Default)]
pub struct HeldPages {
    counts: SmallVec<[HeldCount; 2]>,
    pages: u64,
}

impl HeldPages {
    /// The pages, once for each owner.
    pub fn counted(&self) -> u64 {
        self.pages * self.counts.len() as u64
    }
}

impl Drop for HeldPages {
    fn drop(&mut self) {
        for HeldCount(count) in &self.counts {
            count.fetch_sub(self.pages, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_count_for_each_owner_until_they_are_dropped() {
        let owners = HoldOwners {
            rule: Some(HeldCount::default()),
            engine: Some(HeldCount::default()),
        };
        let counts = || {
            [&owners.rule, &owners.engine].map(|count| count.as_ref().map_or(0, HeldCount::pages))
        };
        let first = owners.hold(5, true);
        let below = owners.hold(3, false);
        assert_eq!(counts(), [8, 5]);
        drop(first);
        assert_eq!(counts(), [3, 0]);
        drop(below);
        assert_eq!(counts(), [0, 0]);
    }
}
