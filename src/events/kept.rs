//! Published batches that subscribers may request again.

use std::collections::VecDeque;

/// Batches that are kept, at most.
pub const KEPT_BATCHES_MAX: usize = 10_000;
/// Bytes of all of them, at most.
pub const KEPT_BYTES_MAX: usize = 256 << 20;

/// The newest published batches, by number.
#[derive(Debug)]
pub struct Kept {
    /// Number of the first one that is kept.
    first: u64,
    batches: VecDeque<Vec<u8>>,
    bytes: usize,
}

impl Kept {
    /// Numbers batches from `first` on. A publisher that starts again begins above the numbers of before, for example with
    /// the microseconds since 1970, so that subscribers see a gap instead of old batches.
    pub const fn new(first: u64) -> Self {
        Self {
            first,
            batches: VecDeque::new(),
            bytes: 0,
        }
    }

    /// Keeps a batch; returns its number.
    pub fn add(&mut self, batch: Vec<u8>) -> u64 {
        let number = self.first + self.batches.len() as u64;
        self.bytes += batch.len();
        self.batches.push_back(batch);
        while self.batches.len() > KEPT_BATCHES_MAX || self.bytes > KEPT_BYTES_MAX {
            let Some(dropped) = self.batches.pop_front() else {
                break;
            };
            self.bytes -= dropped.len();
            self.first += 1;
        }
        number
    }

    /// The kept batches from a number on.
    pub fn since(&self, number: u64) -> impl Iterator<Item = (u64, &[u8])> {
        let skipped = usize::try_from(number.saturating_sub(self.first)).unwrap_or(usize::MAX);
        let batches = self.batches.iter().enumerate().skip(skipped);
        batches.map(|(at, batch)| (self.first + at as u64, batch.as_slice()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_kept_from_a_number_on() {
        let mut kept = Kept::new(100);
        assert_eq!(
            [kept.add(vec![1]), kept.add(vec![2]), kept.add(vec![3])],
            [100, 101, 102]
        );
        let since = |number| {
            kept.since(number)
                .map(|(at, bytes)| (at, bytes[0]))
                .collect::<Vec<_>>()
        };
        assert_eq!(since(0), [(100, 1), (101, 2), (102, 3)]);
        assert_eq!(since(102), [(102, 3)]);
        assert_eq!(since(103), []);
        assert_eq!(since(u64::MAX), []);
    }

    #[test]
    fn the_oldest_batches_are_dropped_by_number_and_by_size() {
        let mut kept = Kept::new(0);
        for _ in 0..KEPT_BATCHES_MAX + 5 {
            kept.add(vec![0]);
        }
        assert_eq!(kept.batches.len(), KEPT_BATCHES_MAX);
        assert_eq!(kept.since(0).next().map(|(at, _)| at), Some(5));
        let number = kept.add(vec![0; KEPT_BYTES_MAX]);
        assert_eq!(
            kept.since(0).map(|(at, _)| at).collect::<Vec<_>>(),
            [number]
        );
        assert_eq!(kept.bytes, KEPT_BYTES_MAX);
    }
}
