//! Lookups: which pages of a sequence are in G2.

use std::sync::Arc;

use crate::anchor::Domain;
use crate::decision::Decision;
use crate::pool::Run;
use crate::refusal::Refusal;
use crate::slot::{HASH_BYTES_PER_ENGINE_MAX, HeldRun, SLOTS_MAX, Slot};
use kvferry_types::Answer;
use kvferry_types::{PageHashes, SlotId, Time};

use super::tier::Tier;
use super::{Due, Leader, Timer};

impl Leader {
    pub(super) fn lookup(
        &mut self,
        now: Time,
        due: Due,
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
        let (_, geometry) = self.served(due.engine)?;
        let tokens_per_page = geometry.engine_page_tokens;
        let layout = geometry.layout_fingerprint;
        let domain = self.domain(geometry, namespace);
        let session = self.sessions.get(&due.engine);
        if session.is_some_and(|session| session.is_finished(due.id, id)) {
            return Err(Refusal::UnknownSlot(id));
        }
        self.open_slot(due, id, domain, layout, hashes)?;
        let Some(pool) = self.tier.as_mut().and_then(Tier::serving_mut) else {
            return Err(Refusal::Reading);
        };
        let session = self.sessions.entry(due.engine).or_default();
        let slot = session.slots.get_mut(&id).ok_or(Refusal::UnknownSlot(id))?;

        let mut runs: Vec<Run> = Vec::new();
        let reach = pool.walk(&slot.domain, &slot.hashes, device_pages as usize, &mut runs);
        pool.touch(&runs);
        let hit_pages = reach.end.saturating_sub(device_pages);
        for run in runs
            .iter()
            .filter(|run| hit_pages > 0 && run.position + run.pages > device_pages)
        {
            slot.held.push(HeldRun {
                position: run.position,
                pages: run.pages,
                arena_start: pool.arena_page(run, run.position),
                block: run.block,
                pin: pool.pin(run.block, run.pages),
            });
        }
        if !slot.held.is_empty() {
            slot.held_until = now + self.settings.hold_for;
            self.timers
                .insert((slot.held_until, Timer::Hold(due.engine, id)));
        }
        let found = Decision::Found {
            device_pages,
            hit_pages,
        };
        slot.digest.add(tokens_per_page, found);
        self.counts.lookups += 1;
        self.counts.lookup_pages += slot.hashes.len() as u64;
        self.counts.device_pages += u64::from(device_pages);
        self.counts.hit_pages += u64::from(hit_pages);
        Ok(Answer::Lookup {
            hit_pages,
            pending: reach.pending,
        })
    }

    /// Opens the slot, or resets it: the holds of an earlier lookup are released.
    fn open_slot(
        &mut self,
        due: Due,
        id: SlotId,
        domain: Domain,
        layout: [u8; 16],
        hashes: PageHashes,
    ) -> Result<(), Refusal> {
        let session = self.sessions.entry(due.engine).or_default();
        let before = session.slots.remove(&id);
        let digest = match before {
            Some(mut slot) => {
                session.hash_bytes -= slot.hashes.as_bytes().len();
                self.let_go(due.engine, id, &mut slot);
                slot.digest
            }
            None => self.new_digest(),
        };
        let session = self.sessions.entry(due.engine).or_default();
        if session.slots.len() >= SLOTS_MAX {
            return Err(Refusal::Limit {
                limit: "running requests",
                max: SLOTS_MAX as u64,
            });
        }
        let bytes = session.hash_bytes + hashes.as_bytes().len();
        if bytes > HASH_BYTES_PER_ENGINE_MAX {
            let max = HASH_BYTES_PER_ENGINE_MAX as u64;
            return Err(Refusal::Limit {
                limit: "bytes of page hashes",
                max,
            });
        }
        session.hash_bytes = bytes;
        let slot = Slot {
            domain,
            layout,
            hashes: Arc::new(hashes),
            held: Vec::new(),
            held_until: Time::NEVER,
            digest,
        };
        session.slots.insert(id, slot);
        Ok(())
    }
}
