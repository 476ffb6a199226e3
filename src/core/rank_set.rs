//! Sets of ranks: those that still owe a report, those that failed.

use kvferry_types::Rank;

/// Most ranks of one engine: a set is one 64-bit word.
pub const RANKS_MAX: u16 = 64;

/// A set of ranks below [`RANKS_MAX`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RankSet(u64);

impl RankSet {
    /// The ranks 0 to `count` - 1.
    pub fn first(count: u16) -> Self {
        match count.min(RANKS_MAX) {
            RANKS_MAX => Self(u64::MAX),
            count => Self((1 << count) - 1),
        }
    }

    /// Adds a rank. Returns false if the rank was in the set, or is none that a set can hold.
    pub fn insert(&mut self, rank: Rank) -> bool {
        let bit = Self::bit(rank);
        let new = bit & !self.0 != 0;
        self.0 |= bit;
        new
    }

    /// Removes a rank. Returns false if the rank was not in the set, so that a repeated report has no effect.
    pub fn remove(&mut self, rank: Rank) -> bool {
        let bit = Self::bit(rank);
        let there = self.0 & bit != 0;
        self.0 &= !bit;
        there
    }

    /// True if the rank is in the set.
    pub fn contains(self, rank: Rank) -> bool {
        self.0 & Self::bit(rank) != 0
    }

    /// True if the set has no rank.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Number of ranks in the set.
    pub fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// The ranks in ascending order.
    pub fn iter(self) -> impl Iterator<Item = Rank> {
        (0..RANKS_MAX)
            .map(Rank)
            .filter(move |rank| self.contains(*rank))
    }

    fn bit(rank: Rank) -> u64 {
        if rank.0 < RANKS_MAX { 1 << rank.0 } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_answer_is_seen_as_one() {
        let mut missing = RankSet::first(2);
        assert!(missing.remove(Rank(1)));
        assert!(!missing.remove(Rank(1)));
        assert!(!missing.is_empty());
        assert!(missing.remove(Rank(0)));
        assert!(missing.is_empty());
    }

    #[test]
    fn a_rank_is_added_once() {
        let mut some = RankSet::first(1);
        assert!(!some.insert(Rank(0)));
        assert!(some.insert(Rank(2)));
        assert!(!some.insert(Rank(2)));
        assert_eq!(some.iter().collect::<Vec<_>>(), [Rank(0), Rank(2)]);
    }

    #[test]
    fn holds_64_ranks_and_no_more() {
        let mut all = RankSet::first(64);
        assert_eq!(all.len(), 64);
        assert!(!all.insert(Rank(64)));
        assert!(!all.contains(Rank(64)));
    }
}
