//! The assignment of KV shards to the ranks of an engine.

use serde::Serialize;

use crate::{Rank, Shard};

/// Ranks, and the shards of KV that they hold. With fewer shards than ranks, neighbouring ranks hold the same shard:
/// all ranks of a model whose attention keeps one latent, or those that share one KV head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Sharding {
    ranks: u16,
    shards: u16,
}

impl Sharding {
    /// A sharding in which each rank holds a shard of its own.
    pub fn each(ranks: u16) -> Self {
        Self {
            ranks,
            shards: ranks,
        }
    }

    /// A sharding in which each shard is held by the same number of ranks; `None` when the numbers do not allow that.
    pub fn new(ranks: u16, shards: u16) -> Option<Self> {
        let fits = shards > 0 && ranks >= shards && ranks.is_multiple_of(shards);
        fits.then_some(Self { ranks, shards })
    }

    /// Number of ranks of an engine.
    pub fn ranks(self) -> u16 {
        self.ranks
    }

    /// Number of shards of its KV.
    pub fn shards(self) -> u16 {
        self.shards
    }

    /// Number of ranks that hold one shard.
    fn copies(self) -> u16 {
        self.ranks.checked_div(self.shards).unwrap_or(1).max(1)
    }

    /// The shard that a rank holds.
    pub fn of(self, rank: Rank) -> Shard {
        Shard(rank.0 / self.copies())
    }

    /// Returns one rank of each shard. Consecutive numbers take turns among the ranks of a shard.
    pub fn representatives(self, number: u64) -> impl Iterator<Item = Rank> {
        let copies = self.copies();
        let which = u16::try_from(number % u64::from(copies)).unwrap_or(0);
        (0..self.shards).map(move |shard| Rank(shard * copies + which))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_share_a_shard() {
        let all = |sharding: Sharding| -> Vec<u16> {
            (0..sharding.ranks())
                .map(|rank| sharding.of(Rank(rank)).0)
                .collect()
        };
        assert_eq!(all(Sharding::each(3)), [0, 1, 2]);
        assert_eq!(all(Sharding::new(4, 1).expect("divides")), [0, 0, 0, 0]);
        assert_eq!(
            all(Sharding::new(6, 3).expect("divides")),
            [0, 0, 1, 1, 2, 2]
        );
    }

    #[test]
    fn each_number_takes_another_rank_of_every_shard() {
        let sharding = Sharding::new(6, 2).expect("divides");
        let taken = |number| {
            sharding
                .representatives(number)
                .map(|rank| rank.0)
                .collect::<Vec<u16>>()
        };
        assert_eq!([0, 1, 2, 3].map(taken), [[0, 3], [1, 4], [2, 5], [0, 3]]);
        let each = Sharding::each(3).representatives(7);
        assert_eq!(each.collect::<Vec<Rank>>(), [Rank(0), Rank(1), Rank(2)]);
    }

    #[test]
    fn numbers_that_do_not_divide_are_refused() {
        for (ranks, shards) in [(4, 0), (4, 3), (2, 4), (0, 1), (0, 0)] {
            assert_eq!(Sharding::new(ranks, shards), None);
        }
    }
}
