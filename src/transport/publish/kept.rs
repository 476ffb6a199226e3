//! The newest batches of a stream, by number.

use std::collections::VecDeque;

use bytes::Bytes;

/// The newest published batches. All connections read them here, so that a slow one keeps none of its own.
#[derive(Debug)]
pub(super) struct Kept {
    /// Number of the first one that is kept.
    first: u64,
    batches: VecDeque<Bytes>,
    bytes: usize,
    batches_max: usize,
    bytes_max: usize,
}

impl Kept {
    /// Numbers batches from `first` on, and keeps at most so many batches and bytes.
    pub(super) const fn new(first: u64, batches_max: usize, bytes_max: usize) -> Self {
        Self {
            first,
            batches: VecDeque::new(),
            bytes: 0,
            batches_max,
            bytes_max,
        }
    }

    /// The number of the next batch.
    pub(super) fn next(&self) -> u64 {
        self.first + self.batches.len() as u64
    }

    /// Keeps a batch, in place of the oldest ones where there is no room; returns its number.
    pub(super) fn add(&mut self, batch: Bytes) -> u64 {
        let number = self.next();
        self.bytes += batch.len();
        self.batches.push_back(batch);
        while self.batches.len() > self.batches_max || self.bytes > self.bytes_max {
            let Some(dropped) = self.batches.pop_front() else {
                break;
            };
            self.bytes -= dropped.len();
            self.first += 1;
        }
        number
    }

    /// The first kept batch from a number on, with its own number.
    pub(super) fn from(&self, number: u64) -> Option<(u64, Bytes)> {
        let skipped = usize::try_from(number.saturating_sub(self.first)).ok()?;
        let batch = self.batches.get(skipped)?;
        Some((self.first + skipped as u64, batch.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(kept: &Kept) -> Vec<u64> {
        let next = |at: &u64| kept.from(at + 1).map(|(number, _)| number);
        std::iter::successors(kept.from(0).map(|(number, _)| number), next).collect()
    }

    #[test]
    fn batches_are_kept_from_a_number_on() {
        let mut kept = Kept::new(100, 10, 100);
        let mut add = |byte: u8| kept.add(Bytes::from(vec![byte]));
        assert_eq!([add(1), add(2), add(3)], [100, 101, 102]);
        assert_eq!(numbers(&kept), [100, 101, 102]);
        assert_eq!(kept.from(102), Some((102, Bytes::from_static(&[3]))));
        assert_eq!(kept.from(103), None);
        assert_eq!(kept.from(u64::MAX), None);
        assert_eq!(kept.next(), 103);
    }

    #[test]
    fn the_oldest_batches_are_dropped_by_number_and_by_size() {
        let mut kept = Kept::new(0, 10, 100);
        for _ in 0..15 {
            kept.add(Bytes::from_static(&[0]));
        }
        assert_eq!(numbers(&kept), [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]);
        let number = kept.add(Bytes::from(vec![0; 100]));
        assert_eq!(numbers(&kept), [number]);
        assert_eq!(kept.bytes, 100);
        kept.add(Bytes::from(vec![0; 101]));
        assert_eq!((numbers(&kept), kept.bytes), (Vec::new(), 0));
        assert_eq!(kept.next(), number + 2, "a number is never used again");
    }
}
