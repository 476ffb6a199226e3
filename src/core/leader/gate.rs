//! The cost gate: pages of a slower tier are offered to an engine only if they are loaded sooner than computed.
//!
//! The estimate of a load is that of bringing its pages up, and of copying them to the engine, each behind the bytes that
//! were ordered over the same edge before. Computing takes the prefill rate of the settings. A load whose edge was not
//! measured lately is offered, so that it is measured.

use std::num::NonZeroU64;
use std::time::Duration;

use crate::pool::tier_walk::ServedPages;
use kvferry_types::{Edge, TierId, Time};

use super::Leader;

/// Time in which an engine computes these tokens.
pub(super) fn prefill_time(tokens: u64, tokens_per_s: NonZeroU64) -> Duration {
    let us = u128::from(tokens) * 1_000_000 / u128::from(tokens_per_s.get());
    Duration::from_micros(u64::try_from(us).unwrap_or(u64::MAX))
}

impl Leader {
    /// Time in which these pages reach host memory from the slower tiers that hold them; zero if all of them are there,
    /// and `None` if an edge was not measured lately.
    pub(super) fn time_up(&self, now: Time, served: &[ServedPages]) -> Option<Duration> {
        let mut slowest = Duration::ZERO;
        for tier in self
            .tiers
            .ids()
            .into_iter()
            .filter(|tier| *tier > TierId::Host)
        {
            let pages = pages_in(served, |of| of == tier);
            if pages > 0 {
                let edge = Edge {
                    from: tier,
                    to: TierId::Host,
                };
                // Tiers are read at one time.
                slowest = slowest.max(self.time_over(now, edge, pages)?);
            }
        }
        Some(slowest)
    }

    /// True if `tokens` tokens are loaded sooner than computed: `all` are the pages of the hit with them, `without` those of
    /// the hit without.
    pub(super) fn is_worth_loading(
        &self,
        now: Time,
        tokens: u64,
        all: &[ServedPages],
        without: &[ServedPages],
    ) -> bool {
        let Some(rate) = self.settings.prefill_tokens_per_s else {
            return true;
        };
        let Some(up) = self.time_up(now, all) else {
            return true;
        };
        let more = pages_in(all, |_| true).saturating_sub(pages_in(without, |_| true));
        let copied = self.time_over(now, Edge::LOAD, more);
        up + copied.unwrap_or_default() < prefill_time(tokens, rate)
    }

    /// Time in which each worker moves these pages over an edge, behind those that were ordered before.
    fn time_over(&self, now: Time, edge: Edge, pages: u64) -> Option<Duration> {
        let page_bytes = self.tiers.key(TierId::Host)?.page_bytes;
        let pages = pages.saturating_add(self.transfers.pages_over(edge));
        self.rates
            .time_of(now, edge, pages.saturating_mul(page_bytes))
    }
}

/// Pages that these tiers serve.
fn pages_in(served: &[ServedPages], tiers: impl Fn(TierId) -> bool) -> u64 {
    let served = served.iter().filter(|served| tiers(served.tier));
    served.map(|served| served.pages.len() as u64).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_prefill_is_that_of_its_tokens() {
        let rate = NonZeroU64::new(2_000).expect("above 0");
        assert_eq!(prefill_time(0, rate), Duration::ZERO);
        assert_eq!(prefill_time(500, rate), Duration::from_millis(250));
        assert!(prefill_time(u64::MAX, rate) > Duration::from_secs(1 << 40));
    }
}
