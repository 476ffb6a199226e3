//! Which ranks of the source hold a slice that a rank of the target holds.

use std::ops::Range;

/// A run of the slice of a target rank that one source rank holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) source_rank: u16,
    /// First index in the slice of the source rank.
    pub(crate) first_there: u64,
    /// First index in the slice of the target rank.
    pub(crate) first_here: u64,
    pub(crate) count: u64,
}

/// The runs of a target rank, ascending: of heads, or of rows of a part of a state. `heads`: of the whole model; either
/// number of ranks divides it or is divided by it. Both divide the rows of a part.
///
/// Of several source ranks that hold the same head, takes the one nearest to the place of the target rank among its
/// peers, so that the readers are spread evenly.
pub(crate) fn heads(heads: u64, source_ranks: u16, target_ranks: u16, rank: u16) -> Vec<Run> {
    let (sources, targets, rank) = (
        u64::from(source_ranks),
        u64::from(target_ranks),
        u64::from(rank),
    );
    let mine = slice(heads, targets, rank);
    let mut runs = Vec::new();
    let mut head = mine.start;
    while head < mine.end {
        let source_rank = if sources <= heads {
            head / (heads / sources)
        } else {
            let holders = head * sources / heads..=(head + 1) * sources / heads - 1;
            (rank * sources / targets).clamp(*holders.start(), *holders.end())
        };
        let there = slice(heads, sources, source_rank);
        let count = there.end.min(mine.end) - head;
        runs.push(Run {
            source_rank: u16::try_from(source_rank).unwrap_or(u16::MAX),
            first_there: head - there.start,
            first_here: head - mine.start,
            count,
        });
        head += count;
    }
    runs
}

/// The heads that a rank holds: a part of them, or one with other ranks.
fn slice(heads: u64, ranks: u64, rank: u64) -> Range<u64> {
    if ranks <= heads {
        rows(heads, ranks, rank)
    } else {
        let head = heads * rank / ranks;
        head..head + 1
    }
}

/// The source rank of something that every rank holds.
pub(crate) fn whole(source_ranks: u16, target_ranks: u16, rank: u16) -> u16 {
    let nearest = u32::from(rank) * u32::from(source_ranks) / u32::from(target_ranks);
    u16::try_from(nearest).unwrap_or(u16::MAX)
}

/// The rows of a part of a state that a rank holds.
fn rows(dim: u64, ranks: u64, rank: u64) -> Range<u64> {
    rank * dim / ranks..(rank + 1) * dim / ranks
}
