//! Recovery: a new leader reads the inventories of the depots of a tier part by part, until it can open the pool.
//!
//! Before a worker answers an inventory request, it divides its depot into pages of the requested size, one entry after
//! another. A worker that is stopped in the middle of that may write entries at any later time, and if the pages are
//! larger by then, those entries lie inside pages. A request is therefore owed like a copy: until its worker has
//! answered, has attached again, has stated its memory or is known to be dead, no other worker receives a request for that
//! depot. After the fence time the worker is fenced.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::Contradiction;
use crate::leader::event::LeaderEffect;
use crate::pool::recover::Recovery;
use kvferry_types::{DepotId, PageRecord, Shard, TierId, Time, WorkerId};

use super::Leader;
use super::roster::Roster;
use super::tier::{Reading, ShardReading, Tier, TierKey, TierState, UnansweredRead};
use super::timers::{Timer, Timers};
use super::transfers::CHECKS_MAX;

/// A part of an inventory, as a worker sent it.
pub(super) struct InventoryPart {
    pub(super) worker: WorkerId,
    pub(super) depot: DepotId,
    pub(super) read_id: u64,
    pub(super) from: u32,
    pub(super) next: Option<u32>,
    pub(super) records: Vec<PageRecord>,
}

/// A request for a part of an inventory.
struct PartRequest {
    worker: WorkerId,
    depot: DepotId,
    from: u32,
}

impl Tier {
    /// The inventories read so far, while a pool is being recovered from them.
    pub(super) fn reading(&self) -> Option<&Reading> {
        match &self.state {
            TierState::Reading(reading) => Some(reading),
            _ => None,
        }
    }

    fn reading_mut(&mut self) -> Option<&mut Reading> {
        match &mut self.state {
            TierState::Reading(reading) => Some(reading),
            _ => None,
        }
    }

    /// Begins to read the inventories of all shards. Answers to requests up to number `after` are not part of it.
    fn begin_reading(
        &mut self,
        key: TierKey,
        recovery: Recovery,
        shards: usize,
        after: u64,
        again: Time,
    ) {
        let begin = || ShardReading {
            from: Some(0),
            ..ShardReading::default()
        };
        self.state = TierState::Reading(Reading {
            recovery,
            key,
            after,
            shards: (0..shards).map(|_| begin()).collect(),
            again,
        });
    }

    /// Ends the reading. Returns the inventories read so far, if there was one.
    fn take_reading(&mut self, id: TierId, timers: &mut Timers) -> Option<Reading> {
        match std::mem::take(&mut self.state) {
            TierState::Reading(reading) => {
                timers.clear(reading.again, Timer::Reading(id));
                Some(reading)
            }
            state => {
                self.state = state;
                None
            }
        }
    }

    /// The next request of each shard that has none open, which counts as sent. A shard of which many records wait for
    /// other shards gets none, so that what is kept does not grow with the inventory. Where a worker owes an answer for the
    /// depot, only that worker receives the request, and none is sent while that worker may not read.
    fn next_parts(&mut self, id: TierId, roster: &Roster) -> Vec<PartRequest> {
        let TierState::Reading(reading) = &mut self.state else {
            return Vec::new();
        };
        let workers = roster.reader_of_each_shard(id, reading.key.page_bytes);
        let mut requests = Vec::new();
        for ((of_shard, worker), shard) in reading.shards.iter_mut().zip(workers).zip(0..) {
            let (Some(from), Some(depot), None) = (
                of_shard.from,
                roster.depot(id, Shard(shard)),
                of_shard.requested_from,
            ) else {
                continue;
            };
            if reading.recovery.is_ahead(shard.into()) {
                continue;
            }
            let mut reader = self.unanswered.iter();
            let worker = match reader.find(|(_, open_read)| open_read.depot == depot) {
                Some((reader, _)) => Some(*reader).filter(|reader| roster.may_read(*reader)),
                None => worker,
            };
            let Some(worker) = worker else {
                continue;
            };
            of_shard.requested_from = Some(worker);
            requests.push(PartRequest {
                worker,
                depot,
                from,
            });
        }
        requests
    }

    /// Notes that a worker owes the answer to a request. Its earlier checks still count.
    fn note_request(
        &mut self,
        (id, worker): (TierId, WorkerId),
        depot: DepotId,
        number: u64,
        first_check: Time,
        timers: &mut Timers,
    ) {
        let open_read = self.unanswered.get(&worker);
        let (due, checks) = open_read.map_or((first_check, 0), |open_read| {
            (open_read.due, open_read.checks)
        });
        let open_read = UnansweredRead {
            depot,
            number,
            due,
            checks,
        };
        self.note_unanswered((id, worker), open_read, timers);
    }

    fn note_unanswered(
        &mut self,
        (id, worker): (TierId, WorkerId),
        open_read: UnansweredRead,
        timers: &mut Timers,
    ) {
        timers.set(open_read.due, Timer::UnansweredRead(id, worker));
        self.unanswered.insert(worker, open_read);
    }

    /// No inventory request of this worker is in flight any longer. Returns those that were.
    fn take_unanswered(
        &mut self,
        (id, worker): (TierId, WorkerId),
        timers: &mut Timers,
    ) -> Option<UnansweredRead> {
        let open_read = self.unanswered.remove(&worker)?;
        timers.clear(open_read.due, Timer::UnansweredRead(id, worker));
        Some(open_read)
    }

    /// Notes the answer to a request. If the worker still owes the answer to a later one, its fence time starts again:
    /// the next check is at `due`.
    fn answered(
        &mut self,
        (id, worker): (TierId, WorkerId),
        number: u64,
        due: Time,
        timers: &mut Timers,
    ) {
        let open_read = self.take_unanswered((id, worker), timers);
        if let Some(open_read) = open_read.filter(|open_read| number < open_read.number) {
            let open_read = UnansweredRead {
                due,
                checks: 0,
                ..open_read
            };
            self.note_unanswered((id, worker), open_read, timers);
        }
    }

    /// Checks a worker that owes an answer, and schedules the next check. Returns true when the fence time has passed.
    fn check_unanswered(
        &mut self,
        now: Time,
        (id, worker): (TierId, WorkerId),
        fence: Duration,
        timers: &mut Timers,
    ) -> bool {
        let Some(open_read) = self.unanswered.get(&worker).copied() else {
            return false;
        };
        let due = now + fence / 4;
        let expired = open_read.checks + 1 >= CHECKS_MAX;
        let checks = if expired { 0 } else { open_read.checks + 1 };
        self.note_unanswered(
            (id, worker),
            UnansweredRead {
                due,
                checks,
                ..open_read
            },
            timers,
        );
        expired
    }

    /// Every part counts as not requested, and the next time for that is `again`. Returns false if there is no reading.
    fn request_anew(&mut self, id: TierId, again: Time, timers: &mut Timers) -> bool {
        let Some(reading) = self.reading_mut() else {
            return false;
        };
        for of_shard in &mut reading.shards {
            of_shard.requested_from = None;
        }
        reading.again = again;
        timers.set(again, Timer::Reading(id));
        true
    }

    /// The parts that this worker was to send count as not requested.
    fn reader_lost(&mut self, worker: WorkerId) {
        let reading = self.reading_mut().into_iter();
        let reading = reading.flat_map(|reading| &mut reading.shards);
        for of_shard in reading.filter(|of_shard| of_shard.requested_from == Some(worker)) {
            of_shard.requested_from = None;
        }
    }

    /// Adds a part. Returns the key and the merged inventories after the last part.
    fn take_part(
        &mut self,
        id: TierId,
        part: InventoryPart,
        roster: &Roster,
        timers: &mut Timers,
    ) -> Option<(TierKey, Recovery)> {
        let shard = roster.shard_of(part.worker);
        let current = roster.depot(id, shard) == Some(part.depot);
        let requested = |reading: &&mut Reading| current && reading.after < part.read_id;
        let reading = self.reading_mut().filter(requested)?;
        let of_shard = reading.shards.get_mut(usize::from(shard.0))?;
        if of_shard.requested_from != Some(part.worker) || of_shard.from != Some(part.from) {
            return None;
        }
        // A part whose `next` does not advance would be repeated forever: treat it as the last one.
        let next = part.next.filter(|next| *next > part.from);
        of_shard.requested_from = None;
        of_shard.from = next.filter(|next| *next < reading.key.pages);
        reading.recovery.add(shard.0.into(), part.records, next);
        if reading
            .shards
            .iter()
            .any(|of_shard| of_shard.from.is_some())
        {
            return None;
        }
        let Reading { key, recovery, .. } = self.take_reading(id, timers)?;
        Some((key, recovery))
    }

    /// Checks that no depot has two workers that owe answers for it. `Err` names the first contradiction.
    pub(super) fn check_reads(&self) -> Result<(), Contradiction> {
        let mut depots = BTreeSet::new();
        let mut open_read = self.unanswered.iter();
        match open_read.find(|(_, open_read)| !depots.insert(open_read.depot)) {
            None => Ok(()),
            Some((worker, _)) => Err(format!("{worker} and another worker read one depot").into()),
        }
    }
}

impl Leader {
    /// Begins to read the inventories of tiers without a pool, once no order of another leader can write them.
    pub(super) fn open_pools(&mut self, now: Time, effects: &mut Vec<LeaderEffect>) {
        if !self.roster.all_clear() {
            return;
        }
        let again = now + self.settings.fence / 4;
        let shards = self.roster.shards().count();
        for id in self.tiers.ids() {
            let key = self.roster.key(id, self.tiers.wanted_key());
            let (Some(tier), Some(key)) = (self.tiers.get_mut(id), key) else {
                continue;
            };
            // A disk that no worker has open.
            let empty = key.pages == 0 && id != TierId::Host;
            if tier.is_shut() && !empty {
                self.timers.set(again, Timer::Reading(id));
                let mut recovery = Recovery::new(key.pages, self.settings.ratio, shards);
                if self.settings.page_index {
                    recovery = recovery.with_page_index(&self.settings.anchor_key);
                }
                tier.begin_reading(key, recovery, shards, self.next_id, again);
                self.request_parts(now, id, effects);
            }
        }
    }

    /// Requests the next part of each shard that has no request open. All requests of one call have one number.
    fn request_parts(&mut self, now: Time, id: TierId, effects: &mut Vec<LeaderEffect>) {
        let Some(tier) = self.tiers.get_mut(id) else {
            return;
        };
        let Some(page_bytes) = tier.reading().map(|reading| reading.key.page_bytes) else {
            return;
        };
        let read_id = self.next_id + 1;
        let first_check = now + self.settings.fence / 4;
        for request in tier.next_parts(id, &self.roster) {
            let PartRequest {
                worker,
                depot,
                from,
            } = request;
            self.next_id = read_id;
            effects.push(LeaderEffect::ReadInventory {
                worker,
                depot,
                page_bytes,
                read_id,
                from,
            });
            tier.note_request((id, worker), depot, read_id, first_check, &mut self.timers);
        }
    }

    /// Requests the next parts of all tiers.
    pub(super) fn request_all_parts(&mut self, now: Time, effects: &mut Vec<LeaderEffect>) {
        for id in self.tiers.ids() {
            self.request_parts(now, id, effects);
        }
    }

    /// No inventory request of this worker is in flight any longer.
    pub(super) fn settle_reads(&mut self, worker: WorkerId) {
        for (id, tier) in self.tiers.iter_mut() {
            tier.take_unanswered((id, worker), &mut self.timers);
        }
    }

    /// As [`Self::settle_reads`], for the tiers below host memory: a reading there changes nothing.
    pub(super) fn settle_reads_below(&mut self, worker: WorkerId) {
        let below = self.tiers.iter_mut().filter(|(id, _)| *id > TierId::Host);
        for (id, tier) in below {
            tier.take_unanswered((id, worker), &mut self.timers);
        }
    }

    /// Fences a worker that does not answer within the fence time: only its end proves that it writes no entry any
    /// longer.
    pub(super) fn read_overdue(&mut self, now: Time, id: TierId, worker: WorkerId) {
        let fence = self.settings.fence;
        let timers = &mut self.timers;
        let tier = self.tiers.get_mut(id);
        if tier.is_some_and(|tier| tier.check_unanswered(now, (id, worker), fence, timers)) {
            self.roster.request_fence([worker]);
        }
    }

    /// True while this worker owes the answer to an inventory request.
    pub fn has_unanswered_read(&self, worker: WorkerId) -> bool {
        let mut tiers = self.tiers.iter();
        tiers.any(|(_, tier)| tier.unanswered.contains_key(&worker))
    }

    /// Requests missing parts again, because a request or an answer may have been lost.
    pub(super) fn reading_due(&mut self, now: Time, id: TierId, effects: &mut Vec<LeaderEffect>) {
        let again = now + self.settings.fence / 4;
        let timers = &mut self.timers;
        let tier = self.tiers.get_mut(id);
        if tier.is_some_and(|tier| tier.request_anew(id, again, timers)) {
            self.request_parts(now, id, effects);
        }
    }

    /// A worker is gone, or has attached again: its parts are requested again, from it or from another worker of its
    /// shard, as soon as no answer is owed for the depot.
    pub(super) fn reader_lost(
        &mut self,
        now: Time,
        worker: WorkerId,
        effects: &mut Vec<LeaderEffect>,
    ) {
        for (_, tier) in self.tiers.iter_mut() {
            tier.reader_lost(worker);
        }
        self.request_all_parts(now, effects);
    }

    /// As [`Self::reader_lost`], for the tiers below host memory.
    pub(super) fn reader_lost_below(
        &mut self,
        now: Time,
        worker: WorkerId,
        effects: &mut Vec<LeaderEffect>,
    ) {
        let below = self.tiers.iter_mut().filter(|(id, _)| *id > TierId::Host);
        below.for_each(|(_, tier)| tier.reader_lost(worker));
        self.request_all_parts(now, effects);
    }

    /// A worker that owes answers to inventory requests may have refused them, and is known to live: its fence time starts
    /// again, and the requests are sent again.
    pub(super) fn read_again(
        &mut self,
        now: Time,
        worker: WorkerId,
        effects: &mut Vec<LeaderEffect>,
    ) {
        for (_, tier) in self.tiers.iter_mut() {
            if let Some(open_read) = tier.unanswered.get_mut(&worker) {
                open_read.checks = 0;
            }
        }
        self.reader_lost(now, worker, effects);
    }

    /// Stops the reading of a tier. Returns whether there was one.
    pub(super) fn stop_reading(&mut self, id: TierId) -> bool {
        let tier = self.tiers.get_mut(id);
        tier.is_some_and(|tier| tier.take_reading(id, &mut self.timers).is_some())
    }

    /// Starts the readings again, because the records read so far may list pages that have been removed since.
    pub(super) fn restart_readings(&mut self, now: Time, effects: &mut Vec<LeaderEffect>) {
        let mut stopped = false;
        for id in self.tiers.ids() {
            stopped |= self.stop_reading(id);
        }
        if stopped {
            self.open_pools(now, effects);
        }
    }

    /// Handles a part of an inventory. The pool of its tier opens with the last part.
    pub(super) fn inventory(
        &mut self,
        now: Time,
        part: InventoryPart,
        effects: &mut Vec<LeaderEffect>,
    ) {
        let due = now + self.settings.fence / 4;
        let (worker, number) = (part.worker, part.read_id);
        for (id, tier) in self.tiers.iter_mut() {
            tier.answered((id, worker), number, due, &mut self.timers);
        }
        let id = self.roster.tier_of(worker, part.depot);
        if let Some(id) = id
            && let Some(tier) = self.tiers.get_mut(id)
            && let Some((key, recovery)) = tier.take_part(id, part, &self.roster, &mut self.timers)
        {
            let (policy, rules) = (self.settings.policy(id), self.settings.rule_limits(id));
            let mut pool = recovery.into_pool().with_policy(policy, rules);
            if self.settings.moves.iter().any(|one| one.edge.from == id) {
                pool.record_gains();
            }
            self.counts.recovered_pages += u64::from(pool.page_states().ready);
            tier.open(key, pool);
            self.log_opened(id);
            self.reset_again(id);
        }
        self.request_all_parts(now, effects);
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;
    use crate::index::anchor::AnchorKey;
    use crate::leader::LeaderSettings;
    use crate::leader::event::LeaderEvent;
    use crate::leader::tests::{ENGINE, arrival};
    use crate::pool::recover::UNMERGED_MAX;
    use kvferry_types::{Anchor, DomainId, Epoch, Fingerprint, Rank, Ratio, Replica, Stored};

    fn worker(rank: u16) -> WorkerId {
        WorkerId {
            replica: Replica(0),
            rank: Rank(rank),
        }
    }

    #[test]
    fn a_shard_that_is_far_ahead_of_another_one_waits_for_it() {
        let pages = 4 * UNMERGED_MAX as u32;
        let ratio = Ratio::new(8).expect("in bounds");
        let settings = LeaderSettings::new(Epoch(2), 2, ratio, AnchorKey::new([7; 32]));
        let mut leader = Leader::new(settings);
        let mut step = |event| {
            let mut effects = Vec::new();
            leader.step(Time(0), event, &mut effects);
            let requests = effects.into_iter().filter_map(|effect| match effect {
                LeaderEffect::ReadInventory {
                    worker,
                    from,
                    read_id,
                    ..
                } => Some((worker.rank.0, from, read_id)),
                _ => None,
            });
            requests.collect::<Vec<_>>()
        };
        let part = |rank: u16, pages: Range<u32>, read_id| LeaderEvent::Inventory {
            worker: worker(rank),
            depot: DepotId(u128::from(rank) + 1),
            read_id,
            from: pages.start,
            next: Some(pages.end),
            records: pages.map(record).collect(),
        };
        step(LeaderEvent::EngineOpened(ENGINE));
        let mut arrive = |rank| arrival(1, (rank, 2), pages).map(&mut step);
        assert_eq!(arrive(0), [vec![], vec![]]);
        assert_eq!(arrive(1), [vec![], vec![(0, 0, 1), (1, 0, 1)]]);
        let few = UNMERGED_MAX as u32 - 1;
        assert_eq!(step(part(0, 0..few, 1)), [(0, few, 2)]);
        assert_eq!(step(part(0, few..few + 1, 2)), []);
        // The other shard reaches one of these pages.
        assert_eq!(step(part(1, 0..1, 1)), [(0, few + 1, 3), (1, 1, 3)]);
    }

    /// The record of a block of one page.
    fn record(page: u32) -> PageRecord {
        PageRecord {
            page,
            anchor: Anchor(page.into()),
            domain: DomainId(1),
            block_start: page,
            index: 0,
            phase: 0,
            stored: Stored::default(),
            fingerprint: Fingerprint(page.into()),
        }
    }

    #[test]
    fn two_workers_that_read_one_depot_are_detected() {
        let mut tier = Tier::default();
        for (rank, depot) in [(0, 1), (1, 2)] {
            let worker = worker(rank);
            let read = UnansweredRead {
                depot: DepotId(depot),
                number: 1,
                due: Time(0),
                checks: 0,
            };
            tier.unanswered.insert(worker, read);
        }
        assert_eq!(tier.check_reads(), Ok(()));
        for read in tier.unanswered.values_mut() {
            read.depot = DepotId(1);
        }
        let why = tier.check_reads().expect_err("one depot");
        assert!(why.to_string().ends_with("read one depot"), "{why:?}");
    }
}
