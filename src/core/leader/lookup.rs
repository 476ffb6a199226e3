//! Lookups: which pages of a sequence are in the tiers.

use std::sync::Arc;

use crate::group::model::Sequence;
use crate::group::presence::Reach;
use crate::group::{GroupKind, LookupBounds};
use crate::index::blocks::BlockRef;
use crate::leader::decision::{Decision, RequestDigest};
use crate::leader::refusal::Refusal;
use crate::leader::session::{PinnedRun, Slot};
use crate::pool::Pool;
use crate::pool::held::HoldOwners;
use crate::pool::tier_walk::{ServedPages, TierRun, serving, walk_tiers};
use kvferry_types::{Answer, LookupAnswer};
use kvferry_types::{GroupId, PageHashes, SlotId, TierId, Time};

use super::below::pages_below;
use super::timers::Timer;
use super::{Leader, ReplyTo, release_holds};

/// The fields of a lookup request.
pub(super) struct Lookup<'a> {
    pub(super) namespace: &'a [u8],
    pub(super) hashes: PageHashes,
    pub(super) device_pages: u32,
    pub(super) limit_pages: Option<u32>,
}

/// The result of a lookup. Pages are counted in units of the hashes.
#[derive(Debug, Default)]
struct Found {
    hit_pages: u32,
    /// A later lookup may find more.
    pending: bool,
    /// The runs with the pages that the hit needs and the engine lacks.
    needed: Vec<(GroupId, TierRun)>,
    /// These pages by the tier that serves them.
    served: Vec<ServedPages>,
    /// The runs whose pages count as used, in every tier that has them, the ones to keep longest first.
    used: Vec<(GroupId, TierRun)>,
}

impl Leader {
    /// Refuses a request that arrives late, when its slot was finished or has another lookup: the slot may be open for
    /// other pages.
    pub(super) fn check_current(&self, reply_to: ReplyTo, slot: SlotId) -> Result<(), Refusal> {
        let session = self.sessions.get(reply_to.engine);
        match session.is_some_and(|session| session.is_outdated(reply_to.id, slot)) {
            true => Err(Refusal::OlderThanSlot(slot)),
            false => Ok(()),
        }
    }

    pub(super) fn lookup(
        &mut self,
        now: Time,
        reply_to: ReplyTo,
        id: SlotId,
        lookup: Lookup<'_>,
    ) -> Result<Answer, Refusal> {
        let Lookup {
            namespace,
            hashes,
            device_pages,
            limit_pages,
        } = lookup;
        if device_pages as usize > hashes.len() {
            return Err(Refusal::Invalid {
                field: "have_pages",
                value: device_pages.to_string(),
                remedy: "at most the number of page hashes",
            });
        }
        let (_, model) = self.served(reply_to.engine)?;
        let key = &self.settings.anchor_key;
        let sequence = Sequence::new(Arc::clone(model), key, namespace, hashes);
        self.check_current(reply_to, id)?;
        let owners = self.hold_owners(reply_to.engine, namespace);
        self.open_slot(reply_to, id, sequence.clone(), owners.clone())?;
        if self.tiers.serving(TierId::Host).is_none() {
            return Err(Refusal::Reading);
        }
        let (mut found, mut declined_pages) =
            self.find_offered(now, &sequence, device_pages, limit_pages);
        let ends = [
            self.end_within_half(reply_to.engine, &sequence, &found.needed)?,
            self.end_within_rule(namespace, &sequence, &found.needed),
        ];
        if let Some(end) = ends.into_iter().flatten().min() {
            let whole = found.hit_pages;
            (found, declined_pages) =
                self.find_offered(now, &sequence, device_pages, Some(end.max(device_pages)));
            self.counts.withheld_pages += u64::from(whole.saturating_sub(found.hit_pages));
        }
        self.check_rule(namespace, &found.needed)?;
        self.tiers.use_runs(&found.used);
        self.use_below(&sequence, &found.used);
        let hit_pages = found.hit_pages;
        let hit = device_pages..device_pages + hit_pages;
        let below_pages = pages_below(&sequence, &found.served, &hit);
        self.hits.note(&sequence, &found.served, hit);
        let ready_in = self
            .time_up(now, &found.served)
            .filter(|_| !below_pages.is_empty());
        let ready_in_ms = ready_in.map(|time| {
            let ms = time.as_micros().div_ceil(1_000);
            u32::try_from(ms).unwrap_or(u32::MAX)
        });
        let slot = self.sessions.open(reply_to.engine).any_slot(id);
        let slot = slot.ok_or(Refusal::UnknownSlot(id))?;
        let mut below: Vec<(TierId, BlockRef)> = Vec::new();
        for (group, TierRun { tier, run }) in found.needed {
            let Some(pool) = self.tiers.serving_mut(tier) else {
                continue;
            };
            let pin = pool.pin(run.block, run.through());
            if tier != TierId::Host {
                below.push((tier, pin.block()));
            }
            slot.hold(PinnedRun {
                group,
                tier,
                position: run.position,
                offset: run.offset,
                pages: run.pages,
                arena_start: pool.arena_page(&run, run.position),
                block: run.block,
                pin,
                // The pages before the run cannot be evicted, either.
                counted: owners.hold(run.through(), tier == TierId::Host),
            });
        }
        let until = now + self.settings.hold_for;
        if slot.hold_until(until) {
            self.timers.set(until, Timer::Hold(reply_to.engine, id));
        }
        let decision = Decision::Found {
            device_pages,
            hit_pages,
        };
        slot.decide(GroupId(0), decision);
        for (tier, block) in below {
            self.queue_prefetch(tier, block);
        }
        self.counts.lookups += 1;
        self.counts.lookup_pages += sequence.hashes().len() as u64;
        self.counts.device_pages += u64::from(device_pages);
        self.counts.hit_pages += u64::from(hit_pages);
        self.counts.below_pages += u64::from(below_pages.total());
        let tokens = |pages: u32| u64::from(pages) * u64::from(sequence.model().hash_tokens());
        self.counts.hit_tokens += tokens(hit_pages);
        self.counts.below_tokens += tokens(below_pages.total());
        self.counts.declined_tokens += tokens(declined_pages);
        Ok(Answer::Lookup(LookupAnswer {
            hit_pages,
            pending: found.pending,
            below_pages,
            ready_in_ms,
            declined_pages,
        }))
    }

    /// Finds the pages that a hit needs, without those of slower tiers that are computed sooner than loaded. Returns the
    /// number of pages by which the hit is shorter for that, too. All pages that were found count as used.
    fn find_offered(
        &self,
        now: Time,
        sequence: &Sequence,
        device_pages: u32,
        limit_pages: Option<u32>,
    ) -> (Found, u32) {
        let pools = self.tiers.serving_pools();
        let mut found = self.find(&pools, sequence, device_pages, limit_pages);
        let whole = found.hit_pages;
        if self.settings.prefill_tokens_per_s.is_none() {
            return (found, 0);
        }
        for slowest in (1..pools.len()).rev() {
            let (tier, _) = pools[slowest];
            if found.served.iter().all(|served| served.tier != tier) {
                continue;
            }
            let without = self.find(&pools[..slowest], sequence, device_pages, limit_pages);
            let pages = found.hit_pages.saturating_sub(without.hit_pages);
            let tokens = u64::from(pages) * u64::from(sequence.model().hash_tokens());
            if !self.is_worth_loading(now, tokens, &found.served, &without.served) {
                found.hit_pages = without.hit_pages;
                found.needed = without.needed;
                found.served = without.served;
            }
        }
        let declined = whole - found.hit_pages.min(whole);
        (found, declined)
    }

    /// Finds the pages that a hit needs in these tiers, without changing anything.
    fn find(
        &self,
        pools: &[(TierId, &Pool)],
        sequence: &Sequence,
        device_pages: u32,
        limit_pages: Option<u32>,
    ) -> Found {
        let limit = limit_pages.unwrap_or(u32::MAX);
        if sequence.model().is_plain() {
            return find_plain(pools, sequence, device_pages, limit);
        }
        let model = sequence.model();
        let tokens = |pages: u32| pages.saturating_mul(model.hash_tokens());
        let bounds = LookupBounds {
            hashes: u32::try_from(sequence.hashes().len()).unwrap_or(u32::MAX),
            device_tokens: tokens(device_pages),
            limit_tokens: tokens(limit),
        };
        let reach = Reach::new(pools, sequence, bounds.device_tokens);
        // As with one group, all runs of a prefix count as used, also those of pages that the engine has.
        let mut used = reach.prefix_runs();
        let Some(hit) = reach.hit(bounds) else {
            let pending = reach.is_pending();
            return Found {
                pending,
                used,
                ..Found::default()
            };
        };
        // Prefix groups come first, and the runs are made the most recently used ones in reverse: a window or a state is
        // of no use without the prefix before it, and is evicted before it.
        let mut groups: Vec<GroupId> = model.groups().specs().map(|(group, _)| group).collect();
        groups.sort_by_key(|group| model.kind(*group) != Some(GroupKind::Prefix));
        let mut needed: Vec<(GroupId, TierRun)> = Vec::new();
        let mut served = Vec::new();
        for group in groups {
            let pages = model.groups().needed(group, hit);
            let runs = reach.runs(group, pages.clone());
            served.extend(ServedPages::of(group, pages, runs.iter()));
            let runs = runs.into_iter().map(|run| (group, run));
            if model.kind(group) != Some(GroupKind::Prefix) {
                used.extend(runs.clone());
            }
            needed.extend(runs);
        }
        Found {
            hit_pages: (hit.end_tokens() - hit.device_tokens()) / model.hash_tokens(),
            pending: reach.is_pending(),
            used,
            needed,
            served,
        }
    }

    /// Opens the slot, or resets it: the holds of an earlier lookup are released.
    fn open_slot(
        &mut self,
        reply_to: ReplyTo,
        id: SlotId,
        sequence: Sequence,
        owners: HoldOwners,
    ) -> Result<(), Refusal> {
        let before = self.sessions.open(reply_to.engine).take_slot(id);
        let digest = match before {
            Some(mut slot) => {
                release_holds(
                    &mut slot,
                    reply_to.engine,
                    id,
                    &mut self.tiers,
                    &mut self.timers,
                );
                slot.into_digest()
            }
            None => RequestDigest::new(self.settings.record_decisions),
        };
        let slot = Slot::new(reply_to.id, sequence, digest).with_owners(owners);
        self.sessions.open(reply_to.engine).open_slot(id, slot)?;
        Ok(())
    }
}

/// Follows the only group from its first page. All runs that are found count as used, also those of pages that the
/// engine has, so that the beginning of a sequence outlives its tail.
fn find_plain(
    pools: &[(TierId, &Pool)],
    sequence: &Sequence,
    device_pages: u32,
    limit: u32,
) -> Found {
    let group = GroupId(0);
    let (domain, hashes) = sequence.of(group);
    let mut used: Vec<(GroupId, TierRun)> = Vec::new();
    let reach = walk_tiers(pools, domain, hashes, device_pages as usize, |tier, run| {
        used.push((group, TierRun { tier, run }));
    });
    let end = reach.end.min(limit);
    let hit_pages = end.saturating_sub(device_pages);
    let runs = used.iter().map(|(_, run)| run);
    let needed = serving(device_pages..end.max(device_pages), runs);
    let needed: Vec<(GroupId, TierRun)> = needed.map(|(run, _)| (group, run)).collect();
    let runs = needed.iter().map(|(_, run)| run);
    let served = ServedPages::of(group, device_pages..end.max(device_pages), runs);
    Found {
        hit_pages,
        pending: reach.pending,
        served: served.collect(),
        needed,
        used,
    }
}
