//! Recovery: a new leader reads the inventories of the depots part by part, until it can open its pool.
//!
//! Before a worker answers an inventory request, it divides its depot into pages of the requested size, one slot after
//! another. A worker that is stopped in the middle of that may write slots at any later time, and if the pages are
//! larger by then, those slots lie inside pages. A request is therefore owed like a copy: until its worker has
//! answered, has attached again or is known to be dead, no other worker receives a request for that depot. After the
//! fence time the worker is expelled.

use crate::event::Effect;
use crate::pool::Pool;
use kvferry_types::{DepotId, PageRecord, Shard, Time, WorkerId};

use super::ops::LOOKS;
use super::tier::{Tier, TierKey};
use super::{Leader, Timer};

/// The part of one shard's inventory that was read so far. At most one record of 112 bytes for each arena page.
#[derive(Debug, Default)]
struct Reading {
    /// The worker that received the request for the next part.
    asked: Option<WorkerId>,
    /// The arena page at which that part begins; `None` when the inventory is read completely.
    from: Option<u32>,
    records: Vec<PageRecord>,
}

/// The inventories of all shards.
#[derive(Debug)]
pub(super) struct Readings {
    /// The key of the pool that will open. Noted when the reading begins, because engines may leave before it ends.
    pub(super) key: TierKey,
    /// Answers to requests up to this number do not belong to this reading: the pages that they list may have been
    /// removed since.
    after: u64,
    shards: Vec<Reading>,
    /// When missing parts are requested again.
    again: Time,
}

/// The inventory requests for one depot that a worker has not answered.
#[derive(Debug, Clone, Copy)]
pub(super) struct Owed {
    depot: DepotId,
    /// Number of the last request. A worker carries out no request after a later one, so its answer settles all of
    /// them.
    number: u64,
    /// When the worker is checked next, every quarter of the fence time.
    due: Time,
    /// Checks since the worker's first open request, or since its last answer.
    looks: u32,
}

/// A part of an inventory, as a worker sent it.
pub(super) struct Part {
    pub(super) worker: WorkerId,
    pub(super) depot: DepotId,
    pub(super) reading: u64,
    pub(super) from: u32,
    pub(super) next: Option<u32>,
    pub(super) records: Vec<PageRecord>,
}

impl Leader {
    /// Begins to read the inventories, once no order of another leader can write them.
    pub(super) fn open_pool(&mut self, now: Time, effects: &mut Vec<Effect>) {
        let clear = self.workers.all_clear();
        let begun = self.tier.is_some() || self.reading.is_some();
        let Some(key) = self.workers.key(None).filter(|_| clear && !begun) else {
            return;
        };
        let begin = || Reading {
            from: Some(0),
            ..Reading::default()
        };
        let again = now + self.settings.fence / 4;
        self.timers.insert((again, Timer::Reading));
        self.reading = Some(Readings {
            key,
            after: self.next_id,
            shards: self.workers.shards().map(|_| begin()).collect(),
            again,
        });
        self.read_on(now, effects);
    }

    /// Stops the reading, if there is one.
    pub(super) fn stop_reading(&mut self) -> Option<Readings> {
        let readings = self.reading.take()?;
        self.timers.remove(&(readings.again, Timer::Reading));
        Some(readings)
    }

    /// Sends a request for the next part of each shard that has none open. Where a worker owes an answer for the depot,
    /// only that worker receives the request, and none is sent while that worker is not attached.
    pub(super) fn read_on(&mut self, now: Time, effects: &mut Vec<Effect>) {
        let Some(readings) = &mut self.reading else {
            return;
        };
        let page_bytes = readings.key.page_bytes;
        let number = self.next_id + 1;
        let workers = self.workers.reader_of_each_shard(page_bytes);
        let mut asked = Vec::new();
        for ((reading, worker), shard) in readings.shards.iter_mut().zip(workers).zip(0..) {
            let (Some(from), Some(depot), None) = (
                reading.from,
                self.workers.depot(Shard(shard)),
                reading.asked,
            ) else {
                continue;
            };
            let mut owing = self.owed_readings.iter();
            let worker = match owing.find(|(_, owed)| owed.depot == depot) {
                Some((owing, _)) => Some(*owing).filter(|owing| self.workers.is_attached(*owing)),
                None => worker,
            };
            let Some(worker) = worker else {
                continue;
            };
            reading.asked = Some(worker);
            asked.push((worker, depot));
            effects.push(Effect::ReadInventory {
                worker,
                depot,
                page_bytes,
                reading: number,
                from,
            });
        }
        for (worker, depot) in asked {
            self.next_id = number;
            let owed = self.owed_readings.get(&worker);
            let (due, looks) = owed.map_or((now + self.settings.fence / 4, 0), |owed| {
                (owed.due, owed.looks)
            });
            let owed = Owed {
                depot,
                number,
                due,
                looks,
            };
            self.owe_reading(worker, owed);
        }
    }

    fn owe_reading(&mut self, worker: WorkerId, owed: Owed) {
        self.timers.insert((owed.due, Timer::Owed(worker)));
        self.owed_readings.insert(worker, owed);
    }

    /// No inventory request of this worker is in flight any longer.
    pub(super) fn reading_over(&mut self, worker: WorkerId) -> Option<Owed> {
        let owed = self.owed_readings.remove(&worker)?;
        self.timers.remove(&(owed.due, Timer::Owed(worker)));
        Some(owed)
    }

    /// Notes the answer to a request. If the worker still owes the answer to a later one, its fence time starts again.
    fn reading_answered(&mut self, now: Time, worker: WorkerId, number: u64) {
        let owed = self.reading_over(worker);
        if let Some(owed) = owed.filter(|owed| number < owed.number) {
            let due = now + self.settings.fence / 4;
            let owed = Owed {
                due,
                looks: 0,
                ..owed
            };
            self.owe_reading(worker, owed);
        }
    }

    /// Expels a worker that does not answer within the fence time: only its end proves that it writes no slot any
    /// longer.
    pub(super) fn reading_owed(&mut self, now: Time, worker: WorkerId) {
        if let Some(owed) = self.owed_readings.get(&worker).copied() {
            let due = now + self.settings.fence / 4;
            let mut looks = owed.looks + 1;
            if looks >= LOOKS {
                self.expelled.insert(worker);
                looks = 0;
            }
            self.owe_reading(worker, Owed { due, looks, ..owed });
        }
    }

    /// True while this worker owes the answer to an inventory request.
    pub fn owes_reading(&self, worker: WorkerId) -> bool {
        self.owed_readings.contains_key(&worker)
    }

    /// Requests missing parts again, because a request or an answer may have been lost.
    pub(super) fn reading_due(&mut self, now: Time, effects: &mut Vec<Effect>) {
        let Some(readings) = &mut self.reading else {
            return;
        };
        for reading in &mut readings.shards {
            reading.asked = None;
        }
        readings.again = now + self.settings.fence / 4;
        self.timers.insert((readings.again, Timer::Reading));
        self.read_on(now, effects);
    }

    /// A worker is gone, or has attached again: its parts are requested again, from it or from another worker of its
    /// shard, as soon as no answer is owed for the depot.
    pub(super) fn reader_lost(&mut self, now: Time, worker: WorkerId, effects: &mut Vec<Effect>) {
        let readings = self.reading.iter_mut();
        let readings = readings.flat_map(|readings| &mut readings.shards);
        for reading in readings.filter(|reading| reading.asked == Some(worker)) {
            reading.asked = None;
        }
        self.read_on(now, effects);
    }

    /// Starts the reading again, because the records read so far may list pages that have been removed since.
    pub(super) fn read_anew(&mut self, now: Time, effects: &mut Vec<Effect>) {
        if self.stop_reading().is_some() {
            self.open_pool(now, effects);
        }
    }

    /// Handles a part of an inventory. The pool opens with the last part.
    pub(super) fn inventory(&mut self, now: Time, part: Part, effects: &mut Vec<Effect>) {
        self.reading_answered(now, part.worker, part.reading);
        self.take_part(part);
        self.read_on(now, effects);
    }

    fn take_part(&mut self, part: Part) {
        let shard = self.workers.shard_of(part.worker);
        let current = self.workers.depot(shard) == Some(part.depot);
        let asked = |readings: &&mut Readings| current && readings.after < part.reading;
        let Some(readings) = self.reading.as_mut().filter(asked) else {
            return;
        };
        let Some(reading) = readings.shards.get_mut(usize::from(shard.0)) else {
            return;
        };
        if reading.asked != Some(part.worker) || reading.from != Some(part.from) {
            return;
        }
        // A part whose `next` does not advance would be repeated forever: treat it as the last one.
        let next = part.next.filter(|next| *next > part.from);
        let within = |page: u32| page >= part.from && next.is_none_or(|next| page < next);
        let capacity = readings.key.pages;
        let records = part.records.into_iter();
        let records = records.filter(|record| within(record.page) && record.page < capacity);
        // Pages must ascend: a page that is listed twice, or after a higher one, is left out, so that each page has one
        // record at most.
        let mut listed = reading.records.last().map(|record| record.page);
        let records = records.filter(|record| {
            let ascends = listed.is_none_or(|last| last < record.page);
            if ascends {
                listed = Some(record.page);
            }
            ascends
        });
        let room = (capacity as usize).saturating_sub(reading.records.len());
        reading.records.extend(records.take(room));
        reading.asked = None;
        reading.from = next.filter(|next| *next < capacity);
        if readings.shards.iter().any(|reading| reading.from.is_some()) {
            return;
        }
        let Some(Readings { key, shards, .. }) = self.stop_reading() else {
            return;
        };
        let shards: Vec<Vec<PageRecord>> =
            shards.into_iter().map(|reading| reading.records).collect();
        let pool = Pool::recover(capacity, self.settings.ratio, &shards);
        self.counts.recovered_pages += u64::from(pool.page_states().ready);
        self.tier = Some(Tier::new(key, pool));
        self.reset_again();
    }
}
