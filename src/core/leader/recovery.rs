//! Recovery: a new leader reads the inventories of the depots part by part, until it can open its pool.
//!
//! Before a worker answers an inventory request, it divides its depot into pages of the requested size, one entry after
//! another. A worker that is stopped in the middle of that may write entries at any later time, and if the pages are
//! larger by then, those entries lie inside pages. A request is therefore owed like a copy: until its worker has
//! answered, has attached again or is known to be dead, no other worker receives a request for that depot. After the
//! fence time the worker is fenced.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::Contradiction;
use crate::event::LeaderEffect;
use crate::pool::Pool;
use kvferry_types::{DepotId, PageRecord, Shard, Time, WorkerId};

use super::Leader;
use super::roster::Roster;
use super::tier::TierKey;
use super::timers::{Timer, Timers};
use super::transfers::CHECKS_MAX;

/// The part of one shard's inventory that was read so far. At most one record of 112 bytes for each arena page.
#[derive(Debug, Default)]
struct ShardScan {
    /// The worker that received the request for the next part.
    requested_from: Option<WorkerId>,
    /// The arena page at which that part begins; `None` when the inventory is read completely.
    from: Option<u32>,
    records: Vec<PageRecord>,
}

/// The inventories of all shards.
#[derive(Debug)]
struct RecoveryScan {
    /// The key of the pool that will open. Noted when the reading begins, because engines may leave before it ends.
    key: TierKey,
    /// Answers to requests up to this number do not belong to this reading: the pages that they list may have been
    /// removed since.
    after: u64,
    shards: Vec<ShardScan>,
    /// When missing parts are requested again.
    again: Time,
}

/// The inventory requests for one depot that a worker has not answered.
#[derive(Debug, Clone, Copy)]
struct UnansweredRead {
    depot: DepotId,
    /// Number of the last request. A worker carries out no request after a later one, so its answer settles all of
    /// them.
    number: u64,
    /// When the worker is checked next, every quarter of the fence time.
    due: Time,
    /// Checks since the worker's first open request, or since its last answer.
    checks: u32,
}

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

/// The recovery of a pool from inventories, and the inventory requests that are not answered.
#[derive(Debug, Default)]
pub(super) struct Recovery {
    /// Inventories read so far, while a pool is being recovered from them.
    scan: Option<RecoveryScan>,
    /// Inventory requests that were not answered, including those of readings that were stopped.
    unanswered: BTreeMap<WorkerId, UnansweredRead>,
}

impl Recovery {
    /// The key of the pool that is being recovered.
    pub(super) fn key(&self) -> Option<&TierKey> {
        self.scan.as_ref().map(|scan| &scan.key)
    }

    /// Begins to read the inventories of all shards. Answers to requests up to number `after` are not part of it.
    fn begin(&mut self, key: TierKey, after: u64, shards: usize, again: Time, timers: &mut Timers) {
        timers.set(again, Timer::RecoveryScan);
        let begin = || ShardScan {
            from: Some(0),
            ..ShardScan::default()
        };
        self.scan = Some(RecoveryScan {
            key,
            after,
            shards: (0..shards).map(|_| begin()).collect(),
            again,
        });
    }

    /// Stops the reading. Returns whether there was one.
    pub(super) fn stop(&mut self, timers: &mut Timers) -> bool {
        self.take(timers).is_some()
    }

    fn take(&mut self, timers: &mut Timers) -> Option<RecoveryScan> {
        let scan = self.scan.take()?;
        timers.clear(scan.again, Timer::RecoveryScan);
        Some(scan)
    }

    /// The next request of each shard that has none open, which counts as sent. Where a worker owes an answer for the
    /// depot, only that worker receives the request, and none is sent while that worker is not attached.
    fn next_parts(&mut self, roster: &Roster) -> Vec<PartRequest> {
        let Some(scan) = &mut self.scan else {
            return Vec::new();
        };
        let workers = roster.reader_of_each_shard(scan.key.page_bytes);
        let mut requests = Vec::new();
        for ((shard_scan, worker), shard) in scan.shards.iter_mut().zip(workers).zip(0..) {
            let (Some(from), Some(depot), None) = (
                shard_scan.from,
                roster.depot(Shard(shard)),
                shard_scan.requested_from,
            ) else {
                continue;
            };
            let mut reader = self.unanswered.iter();
            let worker = match reader.find(|(_, open_read)| open_read.depot == depot) {
                Some((reader, _)) => Some(*reader).filter(|reader| roster.is_attached(*reader)),
                None => worker,
            };
            let Some(worker) = worker else {
                continue;
            };
            shard_scan.requested_from = Some(worker);
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
        worker: WorkerId,
        depot: DepotId,
        number: u64,
        first_check: Time,
        timers: &mut Timers,
    ) {
        let open_read = self.unanswered.get(&worker);
        let (due, looks) = open_read.map_or((first_check, 0), |open_read| {
            (open_read.due, open_read.checks)
        });
        let open_read = UnansweredRead {
            depot,
            number,
            due,
            checks: looks,
        };
        self.note_unanswered(worker, open_read, timers);
    }

    fn note_unanswered(
        &mut self,
        worker: WorkerId,
        open_read: UnansweredRead,
        timers: &mut Timers,
    ) {
        timers.set(open_read.due, Timer::UnansweredRead(worker));
        self.unanswered.insert(worker, open_read);
    }

    /// No inventory request of this worker is in flight any longer.
    pub(super) fn settle_read(&mut self, worker: WorkerId, timers: &mut Timers) {
        self.take_unanswered(worker, timers);
    }

    fn take_unanswered(&mut self, worker: WorkerId, timers: &mut Timers) -> Option<UnansweredRead> {
        let open_read = self.unanswered.remove(&worker)?;
        timers.clear(open_read.due, Timer::UnansweredRead(worker));
        Some(open_read)
    }

    /// Notes the answer to a request. If the worker still owes the answer to a later one, its fence time starts again:
    /// the next check is at `due`.
    fn answered(&mut self, worker: WorkerId, number: u64, due: Time, timers: &mut Timers) {
        let open_read = self.take_unanswered(worker, timers);
        if let Some(open_read) = open_read.filter(|open_read| number < open_read.number) {
            let open_read = UnansweredRead {
                due,
                checks: 0,
                ..open_read
            };
            self.note_unanswered(worker, open_read, timers);
        }
    }

    /// Checks a worker that owes an answer, and schedules the next check. Returns true when the fence time has passed.
    fn check_unanswered(
        &mut self,
        now: Time,
        worker: WorkerId,
        fence: Duration,
        timers: &mut Timers,
    ) -> bool {
        let Some(open_read) = self.unanswered.get(&worker).copied() else {
            return false;
        };
        let due = now + fence / 4;
        let expired = open_read.checks + 1 >= CHECKS_MAX;
        let looks = if expired { 0 } else { open_read.checks + 1 };
        self.note_unanswered(
            worker,
            UnansweredRead {
                due,
                checks: looks,
                ..open_read
            },
            timers,
        );
        expired
    }

    /// Every part counts as not requested, and the next time for that is `again`. Returns false if there is no reading.
    fn request_anew(&mut self, again: Time, timers: &mut Timers) -> bool {
        let Some(scan) = &mut self.scan else {
            return false;
        };
        for shard_scan in &mut scan.shards {
            shard_scan.requested_from = None;
        }
        scan.again = again;
        timers.set(again, Timer::RecoveryScan);
        true
    }

    /// The parts that this worker was to send count as not requested.
    fn reader_lost(&mut self, worker: WorkerId) {
        let scan = self.scan.iter_mut();
        let scan = scan.flat_map(|scan| &mut scan.shards);
        for shard_scan in scan.filter(|shard_scan| shard_scan.requested_from == Some(worker)) {
            shard_scan.requested_from = None;
        }
    }

    /// Adds a part. Returns the key and the records of all shards after the last part.
    fn take_part(
        &mut self,
        part: InventoryPart,
        roster: &Roster,
        timers: &mut Timers,
    ) -> Option<(TierKey, Vec<Vec<PageRecord>>)> {
        let shard = roster.shard_of(part.worker);
        let current = roster.depot(shard) == Some(part.depot);
        let requested = |scan: &&mut RecoveryScan| current && scan.after < part.read_id;
        let scan = self.scan.as_mut().filter(requested)?;
        let shard_scan = scan.shards.get_mut(usize::from(shard.0))?;
        if shard_scan.requested_from != Some(part.worker) || shard_scan.from != Some(part.from) {
            return None;
        }
        // A part whose `next` does not advance would be repeated forever: treat it as the last one.
        let next = part.next.filter(|next| *next > part.from);
        let within = |page: u32| page >= part.from && next.is_none_or(|next| page < next);
        let capacity = scan.key.pages;
        let records = part.records.into_iter();
        let records = records.filter(|record| within(record.page) && record.page < capacity);
        // Pages must ascend: a page that is listed twice, or after a higher one, is left out, so that each page has one
        // record at most.
        let mut listed = shard_scan.records.last().map(|record| record.page);
        let records = records.filter(|record| {
            let ascends = listed.is_none_or(|last| last < record.page);
            if ascends {
                listed = Some(record.page);
            }
            ascends
        });
        let room = (capacity as usize).saturating_sub(shard_scan.records.len());
        shard_scan.records.extend(records.take(room));
        shard_scan.requested_from = None;
        shard_scan.from = next.filter(|next| *next < capacity);
        if scan
            .shards
            .iter()
            .any(|shard_scan| shard_scan.from.is_some())
        {
            return None;
        }
        let RecoveryScan { key, shards, .. } = self.take(timers)?;
        let records = shards.into_iter().map(|shard_scan| shard_scan.records);
        Some((key, records.collect()))
    }

    /// Checks that no worker owes answers for two depots, and that no depot has two workers that owe. `Err` names the
    /// first contradiction.
    pub(super) fn check(&self) -> Result<(), Contradiction> {
        let mut depots = BTreeSet::new();
        let mut open_read = self.unanswered.iter();
        match open_read.find(|(_, open_read)| !depots.insert(open_read.depot)) {
            None => Ok(()),
            Some((worker, _)) => Err(format!("{worker} and another worker read one depot").into()),
        }
    }
}

impl Leader {
    /// Begins to read the inventories, once no order of another leader can write them.
    pub(super) fn open_pool(&mut self, now: Time, effects: &mut Vec<LeaderEffect>) {
        let clear = self.roster.all_clear();
        let begun = self.tier.is_some() || self.recovery.key().is_some();
        let Some(key) = self.roster.key(None).filter(|_| clear && !begun) else {
            return;
        };
        let again = now + self.settings.fence / 4;
        let shards = self.roster.shards().count();
        self.recovery
            .begin(key, self.next_id, shards, again, &mut self.timers);
        self.request_parts(now, effects);
    }

    /// Requests the next part of each shard that has no request open. All requests of one call have one number.
    pub(super) fn request_parts(&mut self, now: Time, effects: &mut Vec<LeaderEffect>) {
        let Some(page_bytes) = self.recovery.key().map(|key| key.page_bytes) else {
            return;
        };
        let read_id = self.next_id + 1;
        let first_check = now + self.settings.fence / 4;
        for request in self.recovery.next_parts(&self.roster) {
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
            self.recovery
                .note_request(worker, depot, read_id, first_check, &mut self.timers);
        }
    }

    /// Fences a worker that does not answer within the fence time: only its end proves that it writes no entry any
    /// longer.
    pub(super) fn read_overdue(&mut self, now: Time, worker: WorkerId) {
        let fence = self.settings.fence;
        if self
            .recovery
            .check_unanswered(now, worker, fence, &mut self.timers)
        {
            self.roster.request_fence([worker]);
        }
    }

    /// True while this worker owes the answer to an inventory request.
    pub fn has_unanswered_read(&self, worker: WorkerId) -> bool {
        self.recovery.unanswered.contains_key(&worker)
    }

    /// Requests missing parts again, because a request or an answer may have been lost.
    pub(super) fn reading_due(&mut self, now: Time, effects: &mut Vec<LeaderEffect>) {
        let again = now + self.settings.fence / 4;
        if self.recovery.request_anew(again, &mut self.timers) {
            self.request_parts(now, effects);
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
        self.recovery.reader_lost(worker);
        self.request_parts(now, effects);
    }

    /// Starts the reading again, because the records read so far may list pages that have been removed since.
    pub(super) fn restart_reading(&mut self, now: Time, effects: &mut Vec<LeaderEffect>) {
        if self.recovery.stop(&mut self.timers) {
            self.open_pool(now, effects);
        }
    }

    /// Handles a part of an inventory. The pool opens with the last part.
    pub(super) fn inventory(
        &mut self,
        now: Time,
        part: InventoryPart,
        effects: &mut Vec<LeaderEffect>,
    ) {
        let due = now + self.settings.fence / 4;
        self.recovery
            .answered(part.worker, part.read_id, due, &mut self.timers);
        let read = self
            .recovery
            .take_part(part, &self.roster, &mut self.timers);
        if let Some((key, records)) = read {
            let pool = Pool::recover(key.pages, self.settings.ratio, &records);
            self.counts.recovered_pages += u64::from(pool.page_states().ready);
            self.tier.open(key, pool);
            self.reset_again();
        }
        self.request_parts(now, effects);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_types::{Rank, Replica};

    #[test]
    fn two_workers_that_read_one_depot_are_detected() {
        let mut recovery = Recovery::default();
        for (rank, depot) in [(0, 1), (1, 2)] {
            let worker = WorkerId {
                replica: Replica(0),
                rank: Rank(rank),
            };
            let read = UnansweredRead {
                depot: DepotId(depot),
                number: 1,
                due: Time(0),
                checks: 0,
            };
            recovery.unanswered.insert(worker, read);
        }
        assert_eq!(recovery.check(), Ok(()));
        for read in recovery.unanswered.values_mut() {
            read.depot = DepotId(1);
        }
        let why = recovery.check().expect_err("one depot");
        assert!(why.to_string().ends_with("read one depot"), "{why:?}");
    }
}
