//! What the depots still hold, read by a new leader part by part, until it knows enough to open its pool.
//!
//! To answer a question for its inventory, a worker first divides its depot into pages of the size that is asked for, one
//! slot after another. A worker that stands still in the middle of that may write slots at any later time, and where pages
//! are larger by then, slots lie in pages. A question is therefore owed like a copy: until its worker has answered it, has
//! attached anew or is seen dead, no other worker is asked for that depot. After the fence time the worker is expelled.

use crate::core::event::Effect;
use crate::core::pool::Pool;
use crate::core::sabotage::{Bug, planted};
use crate::types::{DepotId, PageRecord, Shard, Time, WorkerId};

use super::ops::LOOKS;
use super::tier::{Tier, TierKey};
use super::{Leader, Timer};

/// The inventory of one shard, as far as it was read. At most one record, of 112 bytes, for each arena page.
#[derive(Debug, Default)]
struct Reading {
    /// The worker that was asked for the next part.
    asked: Option<WorkerId>,
    /// The arena page at which that part begins; `None` when there is none left.
    from: Option<u32>,
    records: Vec<PageRecord>,
}

/// The inventories of all shards.
#[derive(Debug)]
pub(super) struct Readings {
    /// What the pool will be a pool of. Noted when the reading begins, because engines may leave before it ends.
    pub(super) key: TierKey,
    /// Answers to questions up to this one are not of this reading: what they list may be struck out by now.
    after: u64,
    shards: Vec<Reading>,
    /// When what has not come is asked for again.
    again: Time,
}

/// Questions for the inventory of a depot that a worker has not answered.
#[derive(Debug, Clone, Copy)]
pub(super) struct Owed {
    depot: DepotId,
    /// Number of the last one. A worker takes no question behind a later one, so its answer settles all of them.
    number: u64,
    /// When it is looked at next, every quarter of the fence time.
    due: Time,
    /// How often it was looked at since the worker was asked first, or answered last.
    looks: u32,
}

/// A part of an inventory.
pub(super) struct Part {
    pub(super) worker: WorkerId,
    pub(super) depot: DepotId,
    pub(super) reading: u64,
    pub(super) from: u32,
    pub(super) next: Option<u32>,
    pub(super) records: Vec<PageRecord>,
}

impl Leader {
    /// Asks for the inventories once nothing writes them behind this leader's back.
    pub(super) fn open_pool(&mut self, now: Time, effects: &mut Vec<Effect>) {
        let clear = self.workers.all_clear() || planted(Bug::ReadTooSoon);
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

    /// Nothing is read any more.
    pub(super) fn stop_reading(&mut self) -> Option<Readings> {
        let readings = self.reading.take()?;
        self.timers.remove(&(readings.again, Timer::Reading));
        Some(readings)
    }

    /// Asks a worker of every shard whose next part nobody was asked for: the one that owes an answer for the depot, if one
    /// does, and nobody while that one is not attached.
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

    /// Nothing that this worker was asked of its depot is under way any more.
    pub(super) fn reading_over(&mut self, worker: WorkerId) -> Option<Owed> {
        let owed = self.owed_readings.remove(&worker)?;
        self.timers.remove(&(owed.due, Timer::Owed(worker)));
        Some(owed)
    }

    /// A worker has answered a question. While it owes the answer to a later one it has the fence time anew.
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

    /// A worker that does not answer within the fence time is expelled: only its end proves that it writes no slot any more.
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

    /// True while this worker owes the answer to a question for its inventory.
    pub fn owes_reading(&self, worker: WorkerId) -> bool {
        self.owed_readings.contains_key(&worker)
    }

    /// Some parts have not come: a question or an answer may be lost.
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

    /// A worker that was asked is gone, or has attached anew: it, or another one of its shard, is asked when nothing is
    /// owed for the depot.
    pub(super) fn reader_lost(&mut self, now: Time, worker: WorkerId, effects: &mut Vec<Effect>) {
        let readings = self.reading.iter_mut();
        let readings = readings.flat_map(|readings| &mut readings.shards);
        for reading in readings.filter(|reading| reading.asked == Some(worker)) {
            reading.asked = None;
        }
        self.read_on(now, effects);
    }

    /// What was read may list pages that are struck out by now: it is read anew.
    pub(super) fn read_anew(&mut self, now: Time, effects: &mut Vec<Effect>) {
        if self.stop_reading().is_some() {
            self.open_pool(now, effects);
        }
    }

    /// A part of an inventory has come. With the last one the pool opens.
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
        // A part that goes back would never end.
        let next = part.next.filter(|next| *next > part.from);
        let within = |page: u32| page >= part.from && next.is_none_or(|next| page < next);
        let capacity = readings.key.pages;
        let records = part.records.into_iter();
        let records = records.filter(|record| within(record.page) && record.page < capacity);
        // A page that is listed twice, or before an earlier one, is left out: each has one record at most.
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
