//! Flushes: what is stored at the time of the request is moved to the disk, made durable there by every shard, and then
//! the request is answered.

use std::collections::BTreeMap;

use crate::Contradiction;
use crate::leader::event::LeaderEffect;
use crate::leader::refusal::Refusal;
use kvferry_types::{Answer, FlushAnswer, FlushId, TierId, WorkerId};

use super::by_shard::Confirmations;
use super::roster::Roster;
use super::timers::{Timer, Timers};
use super::{Leader, ReplyTo};

/// Flushes of all clients that are not answered, at most. More are refused. About 200 bytes each.
pub const FLUSHES_OPEN_MAX: usize = 64;

/// A flush that has not been answered.
#[derive(Debug)]
struct OpenFlush {
    reply_to: ReplyTo,
    /// The last block that had been queued for a move when the flush was requested.
    through: u64,
    /// Those moves have ended: the shards make durable what they wrote.
    moved: bool,
    confirmations: Confirmations,
}

/// The flushes that are not answered.
#[derive(Debug, Default)]
pub(super) struct Flushes {
    open: BTreeMap<FlushId, OpenFlush>,
    last: u64,
}

impl Flushes {
    fn begin(&mut self, reply_to: ReplyTo, through: u64, roster: &Roster, timers: &mut Timers) {
        self.last += 1;
        let id = FlushId(self.last);
        timers.set(reply_to.deadline, Timer::Flush(id));
        let flush = OpenFlush {
            reply_to,
            through,
            moved: false,
            confirmations: Confirmations::new(roster),
        };
        self.open.insert(id, flush);
    }

    /// The worker lost its connection, or answers none of the requests that it received before.
    pub(super) fn request_again(&mut self, worker: WorkerId) {
        let flushes = self.open.values_mut();
        flushes.for_each(|flush| flush.confirmations.request_again(worker));
    }

    fn take(&mut self, id: FlushId, timers: &mut Timers) -> Option<OpenFlush> {
        let flush = self.open.remove(&id)?;
        timers.clear(flush.reply_to.deadline, Timer::Flush(id));
        Some(flush)
    }

    /// Checks that every flush has work left. `Err` names the first contradiction.
    pub(super) fn check(&self) -> Result<(), Contradiction> {
        let mut open = self.open.iter();
        match open.find(|(_, flush)| flush.moved && flush.confirmations.missing() == 0) {
            None => Ok(()),
            Some((id, _)) => Err(format!("{id} is over and not answered").into()),
        }
    }
}

impl Leader {
    /// Begins a flush of the disk tier.
    pub(super) fn flush(&mut self, reply_to: ReplyTo) -> Result<(), Refusal> {
        if !self.settings.tiers.contains(&TierId::Disk) {
            return Err(Refusal::NothingLasts);
        }
        if self.flushes.open.len() >= FLUSHES_OPEN_MAX {
            return Err(Refusal::Limit {
                limit: "flushes under way",
                max: FLUSHES_OPEN_MAX as u64,
            });
        }
        if self.tiers.serving(TierId::Disk).is_none() {
            let stored = self.tiers.serving(TierId::Host).is_some();
            return Err(match (self.roster.any_replica(), stored) {
                (true, _) => Refusal::Reading,
                (false, true) => Refusal::NotOpen,
                (false, false) => self.roster.not_ready(),
            });
        }
        self.takes_writes(TierId::Disk)?;
        // Pages of the last step may not be queued yet.
        self.queue_changes();
        let through = self.moves.last_queued();
        self.flushes
            .begin(reply_to, through, &self.roster, &mut self.timers);
        Ok(())
    }

    /// Checks that a worker of each shard has a tier below host memory open, and that none of them is only read.
    pub(super) fn takes_writes(&self, tier: TierId) -> Result<(), Refusal> {
        if !self.roster.is_writable(tier) {
            return Err(Refusal::OnlyRead);
        }
        match self.roster.reaching_each_shard(tier).contains(&None) {
            true => Err(Refusal::NotOpen),
            false => Ok(()),
        }
    }

    /// Requests of every shard that it makes durable what was moved, for the flushes whose moves have ended.
    pub(super) fn run_flushes(&mut self, effects: &mut Vec<LeaderEffect>) {
        if self.flushes.open.is_empty() {
            return;
        }
        let workers = self.roster.reaching_each_shard(TierId::Disk);
        for (id, flush) in &mut self.flushes.open {
            flush.moved = flush.moved || self.moves.are_over(TierId::Disk, flush.through);
            if !flush.moved {
                continue;
            }
            while let Some(worker) = flush.confirmations.next_worker(&self.roster, &workers) {
                let shard = self.roster.shard_of(worker);
                flush.confirmations.requested(shard, worker);
                effects.push(LeaderEffect::FlushTier {
                    worker,
                    id: *id,
                    tier: TierId::Disk,
                    deadline: flush.reply_to.deadline,
                });
            }
        }
    }

    /// A worker has made durable what its shard had written.
    pub(super) fn tier_flushed(
        &mut self,
        worker: WorkerId,
        id: FlushId,
        effects: &mut Vec<LeaderEffect>,
    ) {
        let shard = self.roster.shard_of(worker);
        let Some(flush) = self.flushes.open.get_mut(&id) else {
            return;
        };
        if !flush.confirmations.confirmed(shard, worker) || flush.confirmations.missing() > 0 {
            return;
        }
        if let Some(flush) = self.flushes.take(id, &mut self.timers) {
            // While the list of the disk is read again, its pages are not counted.
            let pool = self.tiers.serving(TierId::Disk).ok_or(Refusal::NotOpen);
            let answer = pool.map(|pool| {
                let pages = pool.page_states().ready;
                Answer::Flush(FlushAnswer { pages })
            });
            self.answer(flush.reply_to.engine, flush.reply_to.id, answer, effects);
        }
    }

    /// The deadline of a flush has passed.
    pub(super) fn flush_late(&mut self, id: FlushId, effects: &mut Vec<LeaderEffect>) {
        if let Some(flush) = self.flushes.take(id, &mut self.timers) {
            let refusal = match flush.moved {
                true => Refusal::FlushUnconfirmed {
                    shards: flush.confirmations.missing(),
                },
                false => Refusal::FlushUnfinished,
            };
            let ReplyTo { engine, id, .. } = flush.reply_to;
            self.answer(engine, id, Err(refusal), effects);
        }
    }
}
