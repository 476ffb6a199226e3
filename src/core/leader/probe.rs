//! The numbers of hits by tier and group, and a lookup that checks that lookups are served.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::group::model::Sequence;
use crate::index::anchor::Domain;
use crate::pool::tier_walk::{ServedPages, walk_tiers};
use kvferry_types::{Fingerprint, GroupId, PageHashes, TierId};

use super::Leader;

/// Tokens that lookups found, by tier and group: at most 255 groups in each tier.
#[derive(Debug, Default)]
pub(super) struct HitTokens(BTreeMap<(TierId, GroupId), u64>);

impl HitTokens {
    /// Counts the tokens of the pages that a hit needs of each tier and group, as far as they belong to the part of the
    /// sequence that the engine need not compute. Pages of a group that covers others, such as a state, count with their
    /// tokens.
    pub(super) fn note(&mut self, sequence: &Sequence, served: &[ServedPages], hit: Range<u32>) {
        let hash_tokens = u64::from(sequence.model().hash_tokens());
        for ServedPages { group, tier, pages } in served {
            let units = sequence.model().hashes_per_page(*group);
            let from = (pages.start * units).max(hit.start);
            let units = (pages.end * units).min(hit.end).saturating_sub(from);
            if units > 0 {
                *self.0.entry((*tier, *group)).or_default() += u64::from(units) * hash_tokens;
            }
        }
    }
}

impl Leader {
    /// Tokens that lookups found beyond the engines' own, by tier and group. The groups of different models count together.
    pub fn hit_tokens(&self) -> &BTreeMap<(TierId, GroupId), u64> {
        &self.hits.0
    }

    /// Looks a page up that no engine has, in every tier that serves, without changing anything. Returns the number of
    /// tiers.
    pub fn probe(&self) -> usize {
        let pools = self.tiers.serving_pools();
        let domain = Domain::new(&self.settings.anchor_key, &[], &[0; 16], GroupId(0));
        let hashes = PageHashes::of_fingerprints([Fingerprint(0)]);
        let found = walk_tiers(&pools, &domain, hashes.view(), 0, |_, _| {});
        debug_assert_eq!(found.end, 0, "no layout has a fingerprint of zeros");
        pools.len()
    }
}
