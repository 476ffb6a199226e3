//! Attach requests of workers, and their statements of an engine's memory.
//!
//! The two are separate, so that an engine that comes or goes disturbs nothing but the copies of its own memory: moves
//! between tiers, resets and the other replicas go on. An attach request says that no earlier order of any kind is in
//! flight on the worker. A statement of the memory says that no copy of other memory is.

use kvferry_types::{INVENTORY_ENTRY_BYTES, TierId, Time, TransferId, WorkerId};

use crate::leader::event::{AttachRequest, LeaderEffect, MemoryStatement, TiersStatement};
use crate::leader::refusal::Refusal;

use super::Leader;
use super::memory::SeatMemory;

/// How far the epoch that a depot names may be above that of the leader: 100 years. Epochs begin with the time in
/// milliseconds since 1970 and grow by one a start, so that a larger difference is a damaged or invented number. It would
/// become the successor's epoch, and one near the largest number leaves no epoch for the leaders after it.
const EPOCH_AHEAD_MAX: u64 = 100 * 366 * 24 * 3600 * 1000;

impl Leader {
    /// Handles an attach request: all earlier orders of the worker have ended. A repeated request gets the same answer.
    pub(super) fn attached(
        &mut self,
        now: Time,
        attached: AttachRequest,
        effects: &mut Vec<LeaderEffect>,
    ) {
        let (worker, attach) = (attached.worker, attached.attach);
        if let Some(answered) = self.roster.answered_attach(worker, attach) {
            if let Some(verdict) = answered {
                effects.push(LeaderEffect::Admit {
                    worker,
                    attach,
                    verdict,
                });
                // The earlier answer may have arrived late, so that the worker refused the invalidations that followed:
                // send them again.
                self.request_again(worker);
            }
            return;
        }
        self.fail_copies_of(worker, effects);
        self.request_again(worker);
        self.settle_reads(worker);
        // A disk that was closed and opened again while the worker had no connection may have fewer pages.
        for tier in self.roster.begin_attach(worker) {
            self.stop_reading(tier);
            self.close_tier(tier);
        }
        self.idle_tiers.forget(worker);
        let verdict = self.validate(&attached);
        let verdict = verdict.map(|()| TransferId(self.next_id));
        self.roster.end_attach(&attached, &verdict);
        self.close_unfit_tiers();
        effects.push(LeaderEffect::Admit {
            worker,
            attach,
            verdict,
        });
        self.reader_lost(now, worker, effects);
        self.roster_changed(now, effects);
    }

    /// Handles a statement of a worker's memory: all copies of other memory have ended. A repeated statement gets the same
    /// answer. Requests to read an inventory are settled, because the worker refuses those that arrive before the answer.
    pub(super) fn memory_stated(
        &mut self,
        now: Time,
        stated: MemoryStatement,
        effects: &mut Vec<LeaderEffect>,
    ) {
        let (worker, number) = (stated.worker, stated.number);
        let admit = |verdict| LeaderEffect::AdmitMemory {
            worker,
            number,
            verdict,
        };
        if !self.roster.is_attached(worker) {
            effects.push(admit(Err(Refusal::NotAttached { worker })));
            return;
        }
        if let Some(answered) = self.roster.answered_memory(worker, number) {
            if let Some(verdict) = answered {
                effects.push(admit(verdict));
                // The earlier answer may have arrived late, so that the worker refused the requests to read an inventory
                // that followed it: send them again, to this worker.
                self.read_again(now, worker, effects);
            }
            return;
        }
        self.fail_device_copies_of(worker, effects);
        self.settle_reads(worker);
        self.roster.begin_memory(worker);
        self.idle_tiers.forget(worker);
        let memory = SeatMemory::of(&stated).and_then(|memory| {
            if let Some(memory) = &memory {
                self.validate_memory(worker, memory)?;
            }
            Ok((memory, TransferId(self.next_id)))
        });
        let verdict = self.roster.end_memory(worker, number, memory);
        self.close_unfit_tiers();
        effects.push(admit(verdict));
        self.reader_lost(now, worker, effects);
        self.roster_changed(now, effects);
    }

    /// Handles a statement of the tiers below host memory that a worker has open. Copies of engine memory go on, and so do
    /// readings of host memory. A worker that reads a disk may have refused to, because the disk was closed.
    pub(super) fn tiers_stated(
        &mut self,
        now: Time,
        stated: TiersStatement,
        effects: &mut Vec<LeaderEffect>,
    ) {
        let (worker, number) = (stated.worker, stated.number);
        let admit = |verdict| LeaderEffect::AdmitTiers {
            worker,
            number,
            verdict,
        };
        if !self.roster.may_read(worker) {
            effects.push(admit(Err(Refusal::NotAttached { worker })));
            return;
        }
        if let Some(answered) = self.roster.answered_memory(worker, number) {
            effects.extend(answered.map(|_| admit(Ok(()))));
            return;
        }
        self.settle_reads_below(worker);
        self.roster.set_tiers(&stated);
        self.close_unfit_tiers();
        effects.push(admit(Ok(())));
        self.reader_lost_below(now, worker, effects);
        self.roster_changed(now, effects);
    }

    /// Checks a worker against the settings, and then against the other workers.
    fn validate(&self, attached: &AttachRequest) -> Result<(), Refusal> {
        // A later epoch ends this leader: only the depot of a worker that it would take otherwise may do that.
        self.roster.validate(attached)?;
        let epoch = self.settings.epoch;
        for (_, named) in attached.depots.iter() {
            let depot_epoch = named.epoch;
            if depot_epoch.0.saturating_sub(epoch.0) > EPOCH_AHEAD_MAX {
                return Err(Refusal::EpochUnknown {
                    worker: attached.worker,
                    depot_epoch,
                    epoch,
                });
            }
            // An inventory request takes a number from `next_id`. Before the first one, no depot can have seen the epoch
            // of this leader.
            if depot_epoch > epoch || (depot_epoch == epoch && self.next_id == 0) {
                return Err(Refusal::EpochUsed {
                    worker: attached.worker,
                    depot_epoch,
                    epoch,
                });
            }
        }
        Ok(())
    }

    /// Checks the memory of a worker against the settings and the pool in use, and then against the other workers.
    fn validate_memory(&self, worker: WorkerId, memory: &SeatMemory) -> Result<(), Refusal> {
        let page_bytes = memory.model.page_bytes();
        for (tier, depot_bytes) in self.settings.depot_bytes.iter() {
            let most_pages = depot_bytes / page_bytes.saturating_add(INVENTORY_ENTRY_BYTES);
            let arena_pages = memory.pages_of(tier);
            if page_bytes == 0 || u64::from(arena_pages) > most_pages {
                return Err(Refusal::DepotTooLarge {
                    worker,
                    arena_pages,
                    page_bytes,
                    most_pages,
                });
            }
        }
        let least_pages = self.tiers.ids().into_iter();
        let least_pages = least_pages.map(|tier| (tier, self.least_pages(tier, memory)));
        let (least_pages, key) = (least_pages.collect(), self.tiers.wanted_key());
        self.roster
            .validate_memory(worker, memory, &least_pages, key)
    }

    /// The pages that a worker's depot of a tier must have room for: those of a block, and those of a pool that is in
    /// use and does not close for this memory.
    fn least_pages(&self, tier: TierId, memory: &SeatMemory) -> u32 {
        // A disk that is not open, or fails, has no pages: the tier closes, and the engine is served without it.
        if tier != TierId::Host {
            return 0;
        }
        let block = match self.settings.accepts_empty_depots {
            true => 0,
            false => self.settings.ratio.pages(),
        };
        let in_use = self.tiers.serving(tier);
        let in_use = in_use.filter(|pool| pool.pins() > 0 || !self.transfers.is_empty());
        let key = self.tiers.key(tier);
        let stays = key.filter(|key| key.is_for(&memory.model));
        in_use.and(stays).map_or(0, |key| key.pages).max(block)
    }

    /// The worker carries out none of the requests to its shard that it received before: they are sent again.
    fn request_again(&mut self, worker: WorkerId) {
        self.resets.request_again(worker);
        self.flushes.request_again(worker);
    }

    /// The connection of a worker broke.
    pub(super) fn worker_lost(
        &mut self,
        now: Time,
        worker: WorkerId,
        effects: &mut Vec<LeaderEffect>,
    ) {
        self.roster.lost(worker);
        self.request_again(worker);
        self.reader_lost(now, worker, effects);
    }

    /// The process of a worker is dead: no order of it runs any longer.
    pub(super) fn worker_dead(
        &mut self,
        now: Time,
        worker: WorkerId,
        effects: &mut Vec<LeaderEffect>,
    ) {
        // A disk that the process had open has no pages until another one has it open: that one may find fewer.
        self.idle_tiers.forget(worker);
        for tier in self.roster.dead(worker) {
            self.stop_reading(tier);
            self.close_tier(tier);
        }
        self.close_unfit_tiers();
        self.request_again(worker);
        self.settle_reads(worker);
        self.reader_lost(now, worker, effects);
        self.fail_copies_of(worker, effects);
        self.roster_changed(now, effects);
    }

    /// Continues operations that waited for workers to attach or to die.
    fn roster_changed(&mut self, now: Time, effects: &mut Vec<LeaderEffect>) {
        if self.roster.all_clear() {
            self.roster.stop_overdue_checks(&mut self.timers);
            self.refuse_parked(effects);
        }
        self.open_pools(now, effects);
        self.request_all_parts(now, effects);
        self.order_idle_tiers(now, effects);
    }
}
