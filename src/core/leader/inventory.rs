//! What the depots still hold, read by a new leader part by part, until it knows enough to open its pool.

use crate::core::event::Effect;
use crate::core::pool::Pool;
use crate::core::sabotage::{Bug, planted};
use crate::types::{DepotId, PageRecord, Shard, Time, WorkerId};

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
    /// Answers to what was asked for an earlier reading are not of this one: what they list may be struck out by now.
    number: u64,
    shards: Vec<Reading>,
    /// When what has not come is asked for again.
    again: Time,
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
        self.readings += 1;
        self.reading = Some(Readings {
            key,
            number: self.readings,
            shards: self.workers.shards().map(|_| begin()).collect(),
            again,
        });
        self.read_on(effects);
    }

    /// Nothing is read any more.
    pub(super) fn stop_reading(&mut self) -> Option<Readings> {
        let readings = self.reading.take()?;
        self.timers.remove(&(readings.again, Timer::Reading));
        Some(readings)
    }

    /// Asks a worker of every shard whose next part nobody was asked for.
    pub(super) fn read_on(&mut self, effects: &mut Vec<Effect>) {
        let Some(readings) = &mut self.reading else {
            return;
        };
        let page_bytes = readings.key.page_bytes;
        let workers = self.workers.one_of_each_shard();
        for ((reading, worker), shard) in readings.shards.iter_mut().zip(workers).zip(0..) {
            let depot = self.workers.depot(Shard(shard));
            let (Some(from), Some(worker), Some(depot), None) =
                (reading.from, worker, depot, reading.asked)
            else {
                continue;
            };
            reading.asked = Some(worker);
            effects.push(Effect::ReadInventory {
                worker,
                depot,
                page_bytes,
                reading: readings.number,
                from,
            });
        }
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
        self.read_on(effects);
    }

    /// A worker that was asked is gone: another one of its shard is.
    pub(super) fn reader_lost(&mut self, worker: WorkerId, effects: &mut Vec<Effect>) {
        let readings = self.reading.iter_mut();
        let readings = readings.flat_map(|readings| &mut readings.shards);
        for reading in readings.filter(|reading| reading.asked == Some(worker)) {
            reading.asked = None;
        }
        self.read_on(effects);
    }

    /// What was read may list pages that are struck out by now: it is read anew.
    pub(super) fn read_anew(&mut self, now: Time, effects: &mut Vec<Effect>) {
        if self.stop_reading().is_some() {
            self.open_pool(now, effects);
        }
    }

    /// A part of an inventory has come. With the last one the pool opens.
    pub(super) fn inventory(&mut self, part: Part, effects: &mut Vec<Effect>) {
        let shard = self.workers.shard_of(part.worker);
        let current = self.workers.depot(shard) == Some(part.depot);
        let asked = |readings: &&mut Readings| current && readings.number == part.reading;
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
            return self.read_on(effects);
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
