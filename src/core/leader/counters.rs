//! The counters of a leader.

use crate::leader::refusal::{Refusal, RefusalReason};
use crate::pool::counts::PoolCounts;
use kvferry_types::Request;

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
    /// Tokens of the pages that lookups found beyond the engines' own pages.
    pub hit_tokens: u64,
    /// Tokens of those that lay below host memory.
    pub below_tokens: u64,
    /// Tokens of pages below host memory that lookups did not offer, because they are computed sooner than loaded.
    pub declined_tokens: u64,
    /// Arena runs that loads began to read.
    pub loaded: u64,
    /// Pages that loads were answered with.
    pub loaded_pages: u64,
    /// Loads that were answered with all of their pages.
    pub loads_done: u64,
    /// Loads that were answered with their first pages only.
    pub loads_short: u64,
    /// Loads that began and were answered without a page.
    pub loads_failed: u64,
    /// Time from the arrival of these loads to their answers, in microseconds.
    pub load_us: u64,
    /// Stores that were answered without a failed page.
    pub stores_done: u64,
    /// Stores that were answered with failed pages, without a cancel.
    pub stores_failed: u64,
    /// Stores that were cancelled before all of their pages were copied.
    pub stores_cancelled: u64,
    /// Time from the arrival of these stores to their answers, in microseconds.
    pub store_us: u64,
    /// Pages that stores found in host memory, or that another store copied.
    pub present_pages: u64,
    /// Pages of stores that were to be copied and did not become ready.
    pub failed_pages: u64,
    /// Refused lookups, loads and stores, by reason.
    pub refusals: Refusals,
    /// Pages that became ready.
    pub published_pages: u64,
    /// Pages that were recovered from the inventories of the depots.
    pub recovered_pages: u64,
    /// Copies that failed on at least one rank.
    pub failed_copies: u64,
    /// Copies that missed their deadline.
    pub late_copies: u64,
    /// Pages that lookups found and did not offer, because their engine would have held more than half of host memory, or
    /// their namespace more than its limit.
    pub withheld_pages: u64,
    /// Lookups whose pages were released because the engine did not load or finish in time.
    pub expired_holds: u64,
    /// Loads that stopped waiting for other tiers at their deadline.
    pub expired_loads: u64,
    /// Stores that stopped waiting for the copies of others at their deadline.
    pub expired_stores: u64,
    /// Engines that did not connect again in time.
    pub expired_engines: u64,
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
    /// Blocks that waited to be written to a slower tier until they had left the faster one: evicted, removed by a reset, or
    /// gone with their tier.
    pub moves_gone: u64,
    /// Pages of a source that failed their checksum or were not read; they are not served again.
    pub bad_sources: u64,
    /// Places of failed pages below host memory that were taken out of use.
    pub quarantined_places: u64,
    /// Slices in which resets were carried out.
    pub reset_slices: u64,
    /// Most pages that one slice examined.
    pub largest_reset_slice_pages: u64,
}

/// The requests whose refusals are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusable {
    Lookup,
    Load,
    Store,
}

impl Refusable {
    /// The kind of a request; `None` for one whose refusals are not counted.
    pub(super) fn of(request: &Request) -> Option<Self> {
        match request {
            Request::Lookup { .. } => Some(Self::Lookup),
            Request::Load { .. } => Some(Self::Load),
            Request::Store { .. } => Some(Self::Store),
            _ => None,
        }
    }
}

/// Refused lookups, loads and stores, by reason. A load that began and failed is not refused.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Refusals([[u64; RefusalReason::ALL.len()]; 3]);

impl Refusals {
    /// Notes that a request is refused. A retry counts again where the leader keeps no record of the first one: as
    /// `busy`, and as `stale_request`, of a request that has ended before.
    pub(super) fn note(&mut self, request: Refusable, refusal: &Refusal) {
        self.0[request as usize][refusal.reason() as usize] += 1;
    }

    fn of(&self, request: Refusable, reason: RefusalReason) -> u64 {
        self.0[request as usize][reason as usize]
    }
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

/// The counter of the refusals of one kind of request for one reason.
macro_rules! refused {
    ($request:ident, $requests:literal, $reason:ident, $code:literal) => {
        counter(
            concat!("refused_", $requests, "_", $code),
            concat!("Refused ", $requests, " with the error `", $code, "`"),
            |l, _| l.refusals.of(Refusable::$request, RefusalReason::$reason),
        )
    };
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
        "hit_tokens",
        "Tokens of the pages of `hit_pages`",
        |l, _| l.hit_tokens,
    ),
    counter(
        "below_tokens",
        "Tokens of those below G2; the others lay in G2",
        |l, _| l.below_tokens,
    ),
    counter(
        "declined_tokens",
        "Tokens of pages below G2 that lookups did not offer: computing them takes less time than loading",
        |l, _| l.declined_tokens,
    ),
    counter(
        "blocks_loaded",
        "Runs of pages that loads began to read",
        |l, _| l.loaded,
    ),
    counter(
        "loaded_pages",
        "Pages of all groups that loads brought, by their answers",
        |l, _| l.loaded_pages,
    ),
    counter(
        "loads_done",
        "Loads answered with all of their pages",
        |l, _| l.loads_done,
    ),
    counter(
        "loads_short",
        "Loads answered with their first pages only: the engine computes the others",
        |l, _| l.loads_short,
    ),
    counter(
        "loads_failed",
        "Loads that began and were answered with the error `copy_failed`: no page was loaded",
        |l, _| l.loads_failed,
    ),
    counter(
        "load_us",
        "Microseconds from the arrival of these three kinds of loads to their answers",
        |l, _| l.load_us,
    ),
    counter(
        "stores_done",
        "Stores answered without a failed page; pages may have found no room",
        |l, _| l.stores_done,
    ),
    counter(
        "stores_failed",
        "Stores answered with failed pages that no `cancel_stores` stopped",
        |l, _| l.stores_failed,
    ),
    counter(
        "stores_cancelled",
        "Stores that `cancel_stores` stopped before all of their pages were copied",
        |l, _| l.stores_cancelled,
    ),
    counter(
        "store_us",
        "Microseconds from the arrival of these three kinds of stores to their answers",
        |l, _| l.store_us,
    ),
    counter(
        "present_pages",
        "Pages that stores found in G2 already, or that another store copied",
        |l, _| l.present_pages,
    ),
    counter(
        "failed_pages",
        "Pages of stores that did not become ready, because their copy failed, was late or was cancelled",
        |l, _| l.failed_pages,
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
        "withheld_pages",
        "Pages that lookups found and did not offer, because their engine, one of several, would have held more than half \
         of host memory, or because `held_pages` of their namespace is less",
        |l, _| l.withheld_pages,
    ),
    counter(
        "expired_holds",
        "Lookups whose pages were released, because they were neither loaded nor finished within 30 s",
        |l, _| l.expired_holds,
    ),
    counter(
        "expired_loads",
        "Loads that stopped waiting for a slower tier at their deadline; they are counted as short or failed as well",
        |l, _| l.expired_loads,
    ),
    counter(
        "expired_stores",
        "Stores that stopped waiting for the copies of other stores at their deadline",
        |l, _| l.expired_stores,
    ),
    counter(
        "expired_engines",
        "Engines that were disconnected for 10 s, after which their requests were dropped",
        |l, _| l.expired_engines,
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
    refused!(Lookup, "lookups", NotReady, "not_ready"),
    refused!(Lookup, "lookups", UnknownSlot, "unknown_slot"),
    refused!(Lookup, "lookups", Invalid, "invalid"),
    refused!(Lookup, "lookups", Limit, "limit"),
    refused!(Lookup, "lookups", StaleRequest, "stale_request"),
    refused!(Lookup, "lookups", Draining, "draining"),
    refused!(Lookup, "lookups", Quota, "quota"),
    refused!(Load, "loads", NotReady, "not_ready"),
    refused!(Load, "loads", UnknownSlot, "unknown_slot"),
    refused!(Load, "loads", Invalid, "invalid"),
    refused!(Load, "loads", NotPinned, "not_pinned"),
    refused!(Load, "loads", Limit, "limit"),
    refused!(Load, "loads", StaleRequest, "stale_request"),
    refused!(Load, "loads", Draining, "draining"),
    refused!(Load, "loads", Busy, "busy"),
    refused!(Store, "stores", NotReady, "not_ready"),
    refused!(Store, "stores", UnknownSlot, "unknown_slot"),
    refused!(Store, "stores", Invalid, "invalid"),
    refused!(Store, "stores", Limit, "limit"),
    refused!(Store, "stores", StaleRequest, "stale_request"),
    refused!(Store, "stores", Draining, "draining"),
    refused!(Store, "stores", Busy, "busy"),
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
        "moves_gone",
        "Blocks that were evicted, or removed by a reset, while they waited to be written to a slower tier: it is too slow for what is stored",
        |l, _| l.moves_gone,
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

#[cfg(test)]
mod tests;
