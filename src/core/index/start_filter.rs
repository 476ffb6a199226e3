//! A filter of the pages with which blocks begin inside a cell.
//!
//! A lookup that takes a run from a slower tier asks at each of its pages whether a faster tier has a block that begins
//! there. That is rarely so, and an anchor takes longer to compute than the rest of the step: most pages are ruled out by
//! their fingerprint here, without an anchor.

use kvferry_types::Fingerprint;

/// Pages of the arena for each counter: a block has several, and few blocks begin inside a cell.
const PAGES_PER_COUNTER: u32 = 8;
/// Fewest and most counters. A larger arena is ruled out less well: 4 MiB are enough for 30 million pages.
const COUNTERS: std::ops::RangeInclusive<u32> = 64..=1 << 22;

/// Counts beginnings by a hash of their fingerprint, in at most a quarter of a byte for each page of the arena, and 4 MiB.
#[derive(Debug)]
pub(crate) struct StartFilter {
    /// A counter that reaches its maximum stays there.
    counters: Box<[u8]>,
    /// Bits of the hash that are dropped.
    shift: u32,
    /// Number of the beginnings.
    count: u32,
}

impl StartFilter {
    /// A filter for the blocks of an arena.
    pub(crate) fn new(arena_pages: u32) -> Self {
        let counters = arena_pages / PAGES_PER_COUNTER;
        let counters = counters.clamp(*COUNTERS.start(), *COUNTERS.end());
        let counters = u64::from(counters).next_power_of_two();
        Self {
            counters: vec![0; usize::try_from(counters).unwrap_or(0)].into(),
            shift: u64::BITS - counters.trailing_zeros(),
            count: 0,
        }
    }

    pub(crate) fn insert(&mut self, first: Fingerprint) {
        let counter = &mut self.counters[self.place(low_half(first))];
        *counter = counter.saturating_add(1);
        self.count += 1;
    }

    pub(crate) fn remove(&mut self, first: Fingerprint) {
        let counter = &mut self.counters[self.place(low_half(first))];
        if *counter < u8::MAX {
            *counter = counter.saturating_sub(1);
        }
        self.count -= 1;
    }

    /// True if no block begins inside a cell.
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// False if no block begins with a page whose fingerprint has this low half.
    #[inline]
    pub(crate) fn may_have(&self, low_half: u64) -> bool {
        self.counters[self.place(low_half)] > 0
    }

    /// True if `counted`, a new filter of the same size, has the same counters, as far as they can be compared.
    pub(crate) fn agrees_with(&self, counted: &Self) -> bool {
        let mut counters = self.counters.iter().zip(&counted.counters);
        counters.all(|(kept, counted)| kept == counted || *kept == u8::MAX)
            && self.count == counted.count
    }

    /// The hash need not resist an engine that chooses its fingerprints: such an engine slows its own lookups.
    fn place(&self, low_half: u64) -> usize {
        (low_half.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is wanted")]
fn low_half(Fingerprint(page): Fingerprint) -> u64 {
    page as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_found_until_its_last_block_is_removed() {
        let mut filter = StartFilter::new(1 << 16);
        let page = |number: u128| Fingerprint(number << 64 | number);
        (0..1_000).for_each(|number| filter.insert(page(number)));
        filter.insert(page(3));
        let may_have = |filter: &StartFilter, number| filter.may_have(low_half(page(number)));
        assert!((0..1_000).all(|number| may_have(&filter, number)));
        let others = (1_000..11_000).filter(|number| may_have(&filter, *number));
        assert!(
            others.count() < 2_000,
            "an eighth of 8,192 counters is used"
        );
        (0..1_000).for_each(|number| filter.remove(page(number)));
        assert!(may_have(&filter, 3), "it was inserted twice");
        filter.remove(page(3));
        assert!(filter.is_empty());
        assert!(filter.counters.iter().all(|counter| *counter == 0));
    }

    #[test]
    fn a_counter_at_its_maximum_stays_there() {
        let mut filter = StartFilter::new(0);
        let page = Fingerprint(7);
        (0..300).for_each(|_| filter.insert(page));
        (0..300).for_each(|_| filter.remove(page));
        assert!(filter.may_have(low_half(page)), "some of 300 may be left");
        assert!(filter.agrees_with(&StartFilter::new(0)));
    }
}
