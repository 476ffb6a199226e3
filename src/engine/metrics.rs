//! Measurements and errors that an engine's driver collects.

/// Latencies of requests, in microseconds. One entry per request or prompt.
#[derive(Debug, Clone, Default)]
pub struct Latencies {
    /// Lookups.
    pub lookup_us: Vec<u64>,
    /// Loads.
    pub load_us: Vec<u64>,
    /// Stores.
    pub store_us: Vec<u64>,
    /// From a prompt's arrival to the end of its computation, verification of the loaded pages included.
    pub first_token_us: Vec<u64>,
    /// From a prompt's arrival to its lookup, for prompts that waited for pages.
    pub page_wait_us: Vec<u64>,
}

/// Measurements and errors of one engine, or of a fleet.
#[derive(Debug, Clone, Default)]
pub struct EngineMetrics {
    /// Bytes of loaded pages that were compared, over all ranks.
    pub verified_bytes: u64,
    /// Bytes that were wrong.
    pub mismatched_bytes: u64,
    /// The first complaints of the ranks, at most 8.
    pub complaints: Vec<String>,
    /// The first refusals of the leader, at most 8.
    pub refusals: Vec<String>,
    /// Loads and stores that were not answered in time, and whose pages the workers had to release.
    pub abandoned: u64,
    /// The longest time until a lookup, load or store was answered or given up, in microseconds.
    pub answer_max_us: u64,
    /// The longest time from giving up until the workers had released the pages, in microseconds.
    pub abandon_max_us: u64,
    /// Latencies of requests.
    pub latencies: Latencies,
}

/// Largest number of complaints, and of refusals, that are kept.
const KEPT_TEXTS: usize = 8;

impl EngineMetrics {
    pub(super) fn complain(&mut self, text: String) {
        keep(&mut self.complaints, text);
    }

    pub(super) fn refused(&mut self, text: String) {
        keep(&mut self.refusals, text);
    }

    /// Adds the measurements of another engine.
    pub fn add(&mut self, other: Self) {
        self.verified_bytes += other.verified_bytes;
        self.mismatched_bytes += other.mismatched_bytes;
        self.abandoned += other.abandoned;
        self.answer_max_us = self.answer_max_us.max(other.answer_max_us);
        self.abandon_max_us = self.abandon_max_us.max(other.abandon_max_us);
        for text in other.complaints {
            self.complain(text);
        }
        for text in other.refusals {
            self.refused(text);
        }
        let (mine, others) = (&mut self.latencies, other.latencies);
        mine.lookup_us.extend(others.lookup_us);
        mine.load_us.extend(others.load_us);
        mine.store_us.extend(others.store_us);
        mine.first_token_us.extend(others.first_token_us);
        mine.page_wait_us.extend(others.page_wait_us);
    }
}

fn keep(texts: &mut Vec<String>, text: String) {
    if texts.len() < KEPT_TEXTS {
        texts.push(text);
    }
}
