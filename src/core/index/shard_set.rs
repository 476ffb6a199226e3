//! Sets of shards: those whose part of a page has not been written yet.

use kvferry_types::Shard;

/// Shards of one engine, at most: a set is one 64-bit word.
pub const SHARDS_MAX: u16 = 64;

/// A set of shards below [`SHARDS_MAX`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ShardSet(u64);

impl ShardSet {
    /// The shards 0 to `count` - 1.
    pub fn first(count: u16) -> Self {
        match count.min(SHARDS_MAX) {
            SHARDS_MAX => Self(u64::MAX),
            count => Self((1 << count) - 1),
        }
    }

    /// Adds a shard. Returns false if the shard was in the set, or is none that a set can hold.
    pub fn insert(&mut self, shard: Shard) -> bool {
        let bit = Self::bit(shard);
        let new = bit & !self.0 != 0;
        self.0 |= bit;
        new
    }

    /// Removes a shard. Returns false if the shard was not in the set, so that a repeated report has no effect.
    pub fn remove(&mut self, shard: Shard) -> bool {
        let bit = Self::bit(shard);
        let there = self.0 & bit != 0;
        self.0 &= !bit;
        there
    }

    /// True if the shard is in the set.
    pub fn contains(self, shard: Shard) -> bool {
        self.0 & Self::bit(shard) != 0
    }

    /// True if the set has no shard.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Number of shards in the set.
    pub fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// The shards in ascending order.
    pub fn iter(self) -> impl Iterator<Item = Shard> {
        (0..SHARDS_MAX)
            .map(Shard)
            .filter(move |shard| self.contains(*shard))
    }

    fn bit(shard: Shard) -> u64 {
        if shard.0 < SHARDS_MAX {
            1 << shard.0
        } else {
            0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repeated_answer_is_seen_as_one() {
        let mut missing = ShardSet::first(2);
        assert!(missing.remove(Shard(1)));
        assert!(!missing.remove(Shard(1)));
        assert!(!missing.is_empty());
        assert!(missing.remove(Shard(0)));
        assert!(missing.is_empty());
    }

    #[test]
    fn a_shard_is_added_once() {
        let mut some = ShardSet::first(1);
        assert!(!some.insert(Shard(0)));
        assert!(some.insert(Shard(2)));
        assert!(!some.insert(Shard(2)));
        assert_eq!(some.iter().collect::<Vec<_>>(), [Shard(0), Shard(2)]);
    }

    #[test]
    fn holds_64_shards_and_no_more() {
        let mut all = ShardSet::first(64);
        assert_eq!(all.len(), 64);
        assert!(!all.insert(Shard(64)));
        assert!(!all.contains(Shard(64)));
    }
}
