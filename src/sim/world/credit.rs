//! The checker's own count of hits: from which tier each page is served that a lookup offers, by the contents of the tiers
//! before the lookup, and the sums of it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::setup::Setup;
use kvferry_core::{Domain, Leader};
use kvferry_types::{
    Attention, DomainId, EngineId, Fingerprint, GroupGeometry, GroupId, LookupAnswer,
    MemoryGeometry, PageHashes, RequestId, TierId,
};

/// A lookup, and where the pages of its sequence lay when it arrived.
#[derive(Debug)]
struct LookedUp {
    asked: (EngineId, RequestId),
    have_pages: u32,
    hashes: u32,
    geometry: MemoryGeometry,
    /// The fastest tier with each page of each group.
    tiers: Vec<Vec<Option<TierId>>>,
}

/// The sums of the lookups that a leader answered.
#[derive(Debug, Default)]
pub(super) struct HitModel {
    looked_up: Option<LookedUp>,
    sums: BTreeMap<&'static str, u64>,
    tokens: BTreeMap<(TierId, GroupId), u64>,
}

impl HitModel {
    /// Notes a lookup before the leader handles it.
    pub(super) fn arrived(
        &mut self,
        (leader, setup): (&Leader, &Setup),
        asked: (EngineId, RequestId),
        geometry: MemoryGeometry,
        (namespace, hashes, have_pages): (&[u8], &PageHashes, u32),
    ) {
        let mut held: BTreeMap<(DomainId, Fingerprint), TierId> = BTreeMap::new();
        for tier in setup.tiers.iter().rev() {
            let blocks = leader.pool_of(*tier).into_iter();
            let blocks = blocks.flat_map(|pool| pool.view());
            for block in blocks.filter(|block| !block.retired && !block.hidden) {
                let pages = &block.fingerprints[..block.ready as usize];
                held.extend(pages.iter().map(|page| ((block.domain, *page), *tier)));
            }
        }
        let key = setup.anchor_key();
        let layout = leader
            .tier_key(TierId::Host)
            .map(|key| key.layout_fingerprint);
        let tiers = (0..).map(GroupId).zip(&geometry.groups).map(|(group, of)| {
            let domain = Domain::new(&key, namespace, &layout.unwrap_or_default(), group).id();
            let pages = hashes.view_of(of.engine_page_tokens / geometry.hash_tokens);
            let pages = pages.fingerprints(0);
            pages
                .map(|page| held.get(&(domain, page)).copied())
                .collect()
        });
        self.looked_up = Some(LookedUp {
            asked,
            have_pages,
            hashes: u32::try_from(hashes.len()).unwrap_or(u32::MAX),
            tiers: tiers.collect(),
            geometry,
        });
    }

    /// Compares an answer with the tiers that had its pages, and the leader's counters with the sums. Returns what differs.
    pub(super) fn answered(
        &mut self,
        leader: &Leader,
        asked: (EngineId, RequestId),
        answer: &LookupAnswer,
    ) -> Option<String> {
        let found = self.looked_up.take().filter(|found| found.asked == asked)?;
        let (below, by_group) = match found.served(answer.hit_pages) {
            Ok(served) => served,
            Err(missing) => {
                return Some(format!("{} offers {missing}, which no tier has", asked.1));
            }
        };
        let answered = [answer.below_pages.disk, answer.below_pages.remote];
        if answered != below {
            let (id, pages) = (asked.1, answer.hit_pages);
            return Some(format!(
                "{id} finds {pages} pages, {answered:?} of them on disk and remote, where {below:?} lie"
            ));
        }
        let hash_tokens = u64::from(found.geometry.hash_tokens);
        let below = u64::from(below[0] + below[1]);
        for (name, more) in [
            ("lookups", 1),
            ("lookup_pages", found.hashes.into()),
            ("device_pages", found.have_pages.into()),
            ("hit_pages", answer.hit_pages.into()),
            ("hit_tokens", u64::from(answer.hit_pages) * hash_tokens),
            ("below_pages", below),
            ("below_tokens", below * hash_tokens),
            (
                "declined_tokens",
                u64::from(answer.declined_pages) * hash_tokens,
            ),
        ] {
            *self.sums.entry(name).or_default() += more;
        }
        for (of, units) in by_group {
            *self.tokens.entry(of).or_default() += u64::from(units) * hash_tokens;
        }
        let differs = leader.counters().find_map(|(name, counted)| {
            let sum = *self.sums.get(name)?;
            (sum != counted).then(|| format!("{name} counts {counted}, of {sum}"))
        });
        differs.or_else(|| {
            let counted = leader.hit_tokens();
            (*counted != self.tokens).then(|| {
                format!(
                    "tokens by tier and group: {counted:?}, of {:?}",
                    self.tokens
                )
            })
        })
    }
}

type ByGroup = BTreeMap<(TierId, GroupId), u32>;

impl LookedUp {
    /// The units of a hit by the slowest tier that a page of them is served from, disk and remote, and by tier and group.
    /// An error names a page that no tier has.
    fn served(&self, hit_pages: u32) -> Result<([u32; 2], ByGroup), String> {
        let hit = self.have_pages..self.have_pages + hit_pages;
        let (mut disk, mut remote) = (BTreeSet::new(), BTreeSet::new());
        let mut by_group = ByGroup::new();
        let groups = (0..).map(GroupId).zip(&self.geometry.groups);
        for ((group, of), tiers) in groups.zip(&self.tiers) {
            let hash_tokens = self.geometry.hash_tokens;
            let per_page = of.engine_page_tokens / hash_tokens;
            for page in needed(of, hit.start * hash_tokens..hit.end * hash_tokens) {
                let Some(tier) = tiers.get(page as usize).copied().flatten() else {
                    return Err(format!("page {page} of group {}", group.0));
                };
                let first = (page * per_page).max(hit.start);
                let units = first..((page + 1) * per_page).min(hit.end);
                *by_group.entry((tier, group)).or_default() += units.len() as u32;
                match tier {
                    TierId::Device | TierId::Host => {}
                    TierId::Disk => disk.extend(units),
                    TierId::Remote => remote.extend(units),
                }
            }
        }
        by_group.retain(|_, units| *units > 0);
        let only_disk = disk.difference(&remote).count();
        Ok(([only_disk as u32, remote.len() as u32], by_group))
    }
}

/// The pages of a group that an engine reads to go on at the end of a hit, and lacks: those with a token that its layers
/// read there.
fn needed(group: &GroupGeometry, hit: Range<u32>) -> Range<u32> {
    if hit.is_empty() {
        return 0..0;
    }
    let end = hit.end;
    let first_read = match group.attention {
        Attention::Full | Attention::Other => 0,
        Attention::SlidingWindow => end.saturating_sub((group.window_tokens - 1).max(1)),
        Attention::ChunkedLocal => end - end % group.window_tokens,
        Attention::State => end - 1,
    };
    let size = group.engine_page_tokens;
    first_read.max(hit.start) / size..end / size
}
