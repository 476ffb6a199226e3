//! Lookups: which pages of a sequence are in the tiers.

use crate::anchor::Domain;
use crate::blocks::BlockRef;
use crate::cover::TierRun;
use crate::decision::{Decision, RequestDigest};
use crate::refusal::Refusal;
use crate::session::{PinnedRun, Slot};
use kvferry_types::{Answer, LookupAnswer};
use kvferry_types::{PageHashes, SlotId, TierId, Time};

use super::timers::Timer;
use super::{Leader, ReplyTo, release_holds};

impl Leader {
    /// Refuses a request that arrives late, when its slot was finished or has another lookup: the slot may be open for
    /// other pages.
    pub(super) fn check_current(&self, reply_to: ReplyTo, slot: SlotId) -> Result<(), Refusal> {
        let session = self.sessions.get(reply_to.engine);
        match session.is_some_and(|session| session.is_outdated(reply_to.id, slot)) {
            true => Err(Refusal::UnknownSlot(slot)),
            false => Ok(()),
        }
    }

    pub(super) fn lookup(
        &mut self,
        now: Time,
        reply_to: ReplyTo,
        id: SlotId,
        namespace: &[u8],
        hashes: PageHashes,
        device_pages: u32,
    ) -> Result<Answer, Refusal> {
        if device_pages as usize > hashes.len() {
            return Err(Refusal::Invalid {
                field: "device_pages",
                value: device_pages.to_string(),
                remedy: "at most the number of page hashes",
            });
        }
        let (_, geometry) = self.served(reply_to.engine)?;
        let tokens_per_page = geometry.engine_page_tokens;
        let layout = geometry.layout_fingerprint;
        let domain = self.domain(geometry, namespace);
        self.check_current(reply_to, id)?;
        self.open_slot(reply_to, id, domain, layout, hashes)?;
        if self.tiers.serving(TierId::Host).is_none() {
            return Err(Refusal::Reading);
        }
        let slot = self.sessions.open(reply_to.engine).any_slot(id);
        let slot = slot.ok_or(Refusal::UnknownSlot(id))?;

        let mut runs: Vec<TierRun> = Vec::new();
        let (domain, hashes) = (slot.domain(), slot.hashes());
        let looked_up = hashes.len() as u64;
        let reach = self
            .tiers
            .walk(domain, hashes.view(), device_pages, &mut runs);
        self.tiers.use_runs(&runs);
        let hit_pages = reach.end.saturating_sub(device_pages);
        let mut below: Vec<(TierId, BlockRef)> = Vec::new();
        for TierRun { tier, run } in runs
            .iter()
            .filter(|found| hit_pages > 0 && found.run.position + found.run.pages > device_pages)
        {
            let Some(pool) = self.tiers.serving_mut(*tier) else {
                continue;
            };
            let pin = pool.pin(run.block, run.pages);
            if *tier != TierId::Host {
                below.push((*tier, pin.block()));
            }
            slot.hold(PinnedRun {
                tier: *tier,
                position: run.position,
                pages: run.pages,
                arena_start: pool.arena_page(run, run.position),
                block: run.block,
                pin,
            });
        }
        let until = now + self.settings.hold_for;
        if slot.hold_until(until) {
            self.timers.set(until, Timer::Hold(reply_to.engine, id));
        }
        let found = Decision::Found {
            device_pages,
            hit_pages,
        };
        slot.decide(tokens_per_page, found);
        for (tier, block) in below {
            self.fetch(tier, block);
        }
        self.counts.lookups += 1;
        self.counts.lookup_pages += looked_up;
        self.counts.device_pages += u64::from(device_pages);
        self.counts.hit_pages += u64::from(hit_pages);
        Ok(Answer::Lookup(LookupAnswer {
            hit_pages,
            pending: reach.pending,
        }))
    }

    /// Opens the slot, or resets it: the holds of an earlier lookup are released.
    fn open_slot(
        &mut self,
        reply_to: ReplyTo,
        id: SlotId,
        domain: Domain,
        layout: [u8; 16],
        hashes: PageHashes,
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
        let slot = Slot::new(reply_to.id, domain, layout, hashes, digest);
        self.sessions.open(reply_to.engine).open_slot(id, slot)?;
        Ok(())
    }
}
