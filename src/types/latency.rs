//! Histograms of durations.

/// Upper bounds of the buckets of a [`LatencyHistogram`], in microseconds. A last bucket has the durations above them.
pub const LATENCY_BOUNDS_US: [u64; 17] = [
    50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000,
    1_000_000, 2_500_000, 5_000_000, 10_000_000,
];

const BUCKETS: usize = LATENCY_BOUNDS_US.len() + 1;

/// Durations, counted in the buckets of [`LATENCY_BOUNDS_US`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LatencyHistogram {
    counts: [u64; BUCKETS],
    sum_us: u64,
}

impl LatencyHistogram {
    /// Counts a duration. A duration that equals a bound counts in the bucket of that bound.
    pub fn note(&mut self, us: u64) {
        let bucket = LATENCY_BOUNDS_US.partition_point(|bound| *bound < us);
        self.counts[bucket] += 1;
        self.sum_us = self.sum_us.saturating_add(us);
    }

    /// Durations in each bucket, not cumulated; the last bucket has those above every bound.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// Sum of all durations, in microseconds.
    pub const fn sum_us(&self) -> u64 {
        self.sum_us
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_counts_in_the_first_bucket_whose_bound_is_not_below_it() {
        let mut histogram = LatencyHistogram::default();
        for us in [0, 50, 51, 10_000_000, 10_000_001, u64::MAX] {
            histogram.note(us);
        }
        let mut expected = [0; BUCKETS];
        expected[0] = 2;
        expected[1] = 1;
        expected[BUCKETS - 2] = 1;
        expected[BUCKETS - 1] = 2;
        assert_eq!(histogram.counts(), expected);
        assert_eq!(histogram.sum_us(), u64::MAX);
    }
}
