//! The counters of a leader.

use crate::pool_counts::PoolCounts;

/// Counters since the leader started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LeaderCounts {
    /// Lookups answered.
    pub lookups: u64,
    /// Pages in the requested sequences of all lookups.
    pub lookup_pages: u64,
    /// Pages of those that the engines had themselves.
    pub device_pages: u64,
    /// Pages that lookups found beyond the engines' own pages.
    pub hit_pages: u64,
    /// Pages of those that lay below host memory.
    pub below_pages: u64,
    /// Tokens of pages below host memory that lookups did not offer, because they are computed sooner than loaded.
    pub declined_tokens: u64,
    /// Arena runs read by loads.
    pub loaded: u64,
    /// Pages read by loads.
    pub loaded_pages: u64,
    /// Pages that became ready.
    pub published_pages: u64,
    /// Pages that were recovered from the inventories of the depots.
    pub recovered_pages: u64,
    /// Copies that failed on at least one rank.
    pub failed_copies: u64,
    /// Copies that missed their deadline.
    pub late_copies: u64,
    /// Bytes gathered, summed over ranks.
    pub gathered_bytes: u64,
    /// Bytes scattered, summed over ranks.
    pub scattered_bytes: u64,
    /// Time that gathers took, in microseconds, summed over ranks.
    pub gather_us: u64,
    /// Time that scatters took, in microseconds, summed over ranks.
    pub scatter_us: u64,
    /// Positions of sequences that stores looked up.
    pub store_looks: u64,
    /// Transfers between tiers.
    pub moves: u64,
    /// Pages of those.
    pub moved_pages: u64,
    /// Pages of those that were written to a slower tier.
    pub written_through_pages: u64,
    /// Blocks that were not moved to a slower tier, or not fetched from one, because too many waited, or because their moves
    /// failed several times.
    pub moves_left_out: u64,
    /// Pages of a source that failed their checksum or were not read; they are not served again.
    pub bad_sources: u64,
    /// Places of failed pages below host memory that were taken out of use.
    pub quarantined_places: u64,
    /// Slices in which resets were carried out.
    pub reset_slices: u64,
    /// Most pages that one slice examined.
    pub largest_reset_slice_pages: u64,
}

/// A counter, as `status` and the reports of replays name it.
#[derive(Debug, Clone, Copy)]
pub struct Counter {
    /// Its name.
    pub name: &'static str,
    /// Its meaning, in Markdown.
    pub meaning: &'static str,
    pub(super) value: fn(&LeaderCounts, &PoolCounts) -> u64,
}

const fn counter(
    name: &'static str,
    meaning: &'static str,
    value: fn(&LeaderCounts, &PoolCounts) -> u64,
) -> Counter {
    Counter {
        name,
        meaning,
        value,
    }
}

/// Every counter of a leader. All run since its start.
pub const COUNTERS: &[Counter] = &[
    counter("lookups", "Lookups answered", |l, _| l.lookups),
    counter(
        "lookup_pages",
        "Pages of the sequences that lookups named, counted by their hashes",
        |l, _| l.lookup_pages,
    ),
    counter(
        "device_pages",
        "Pages of those that the engine had itself, counted by their hashes",
        |l, _| l.device_pages,
    ),
    counter(
        "hit_pages",
        "Pages that lookups found beyond the engine's own, counted by their hashes",
        |l, _| l.hit_pages,
    ),
    counter(
        "below_pages",
        "Pages of those that lay below G2, counted by their hashes",
        |l, _| l.below_pages,
    ),
    counter(
        "declined_tokens",
        "Tokens of pages below G2 that lookups did not offer: computing them takes less time than loading",
        |l, _| l.declined_tokens,
    ),
    counter("blocks_loaded", "Runs of pages read by loads", |l, _| {
        l.loaded
    }),
    counter(
        "loaded_pages",
        "Pages of all groups read by loads",
        |l, _| l.loaded_pages,
    ),
    counter("published_pages", "Pages that became ready", |l, _| {
        l.published_pages
    }),
    counter(
        "recovered_pages",
        "Pages recovered from the inventories of the depots",
        |l, _| l.recovered_pages,
    ),
    counter(
        "failed_copies",
        "Copies that failed or were cancelled on at least one rank; their pages were freed",
        |l, _| l.failed_copies,
    ),
    counter(
        "late_copies",
        "Copies that missed their deadline: the machine is too slow for it, or a rank never sent `written`",
        |l, _| l.late_copies,
    ),
    counter(
        "gathered_bytes",
        "Bytes copied from engines, summed over ranks",
        |l, _| l.gathered_bytes,
    ),
    counter(
        "scattered_bytes",
        "Bytes copied to engines, summed over ranks",
        |l, _| l.scattered_bytes,
    ),
    counter(
        "gather_us",
        "Microseconds that these copies from engines took, summed over ranks",
        |l, _| l.gather_us,
    ),
    counter(
        "scatter_us",
        "Microseconds that these copies to engines took, summed over ranks",
        |l, _| l.scatter_us,
    ),
    counter("moves", "Transfers between G2 and slower tiers", |l, _| {
        l.moves
    }),
    counter("moved_pages", "Pages of those transfers", |l, _| {
        l.moved_pages
    }),
    counter(
        "written_through_pages",
        "Pages of those that were written to a slower tier; the others were read from one",
        |l, _| l.written_through_pages,
    ),
    counter(
        "moves_left_out",
        "Blocks that were not moved, because too many waited: the slower tier is too slow for what is stored; or because their moves failed three times",
        |l, _| l.moves_left_out,
    ),
    counter(
        "bad_sources",
        "Pages that failed their checksum, or that the disk did not read; they are not served again from there",
        |l, _| l.bad_sources,
    ),
    counter(
        "quarantined_places",
        "Places of pages that failed on a disk and were taken out of use, until the disk is opened anew",
        |l, _| l.quarantined_places,
    ),
    counter(
        "reset_slices",
        "Slices in which resets were carried out",
        |l, _| l.reset_slices,
    ),
    counter(
        "largest_reset_slice_pages",
        "Most pages that one slice examined",
        |l, _| l.largest_reset_slice_pages,
    ),
    counter(
        "blocks_stored",
        "Blocks reserved for new runs of pages",
        |_, p| p.stored,
    ),
    counter("blocks_grown", "Blocks that grew in place", |_, p| p.grown),
    counter(
        "blocks_branched",
        "New blocks for a sequence that leaves another one inside a block",
        |_, p| p.branched,
    ),
    counter(
        "blocks_split",
        "Additional blocks because a run was split over several holes: the arena is fragmented, copies get smaller",
        |_, p| p.split,
    ),
    counter(
        "blocks_evicted",
        "Times that a block lost pages to eviction",
        |_, p| p.evicted,
    ),
    counter(
        "evicted_pages",
        "Pages evicted; normal when G2 is full",
        |_, p| p.evicted_pages,
    ),
    counter(
        "blocks_refused",
        "Runs of pages that found no room, in whole or in part",
        |_, p| p.refused,
    ),
    counter(
        "refused_pages",
        "Pages that found no room: pages are pinned or filling, or G2 is small for the requests that run at one time",
        |_, p| p.refused_pages,
    ),
    counter(
        "unadmitted_pages",
        "Pages that the admission of `g2_policy` kept out of G2",
        |_, p| p.unadmitted_pages,
    ),
    counter(
        "largest_eviction_pages",
        "Most pages evicted for one allocation",
        |_, p| p.largest_eviction_pages.into(),
    ),
];
