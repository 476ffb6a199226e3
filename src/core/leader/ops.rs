//! Copies under way: their deadlines, their ends, and what follows from those.

use crate::core::event::Effect;
use crate::core::pool::Pin;
use crate::core::refusal::Refusal;
use crate::core::shards::RankSet;
use crate::types::{Answer, Direction, EndedCopy};
use crate::types::{Generation, OpId, Rank, Time};

use super::{Due, Leader, Timer};

/// One copy that was asked for and has not ended on every rank.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) work: Work,
    pub(super) deadline: Time,
}

#[derive(Debug)]
pub(super) enum Work {
    /// Answers one request; its lease ends with it.
    Load {
        due: Due,
        lease: Vec<Pin>,
        pages: u32,
        missing: RankSet,
        failed: u32,
    },
    /// Fills the reservation of the same number; stores wait for it. `missing` is here for deadlines only: what
    /// publishes is the reservation's own set.
    Store { missing: RankSet },
}

impl Op {
    /// Pins that its lease holds.
    pub(super) fn pins(&self) -> usize {
        match &self.work {
            Work::Load { lease, .. } => lease.len(),
            Work::Store { .. } => 0,
        }
    }

    fn missing(&self) -> RankSet {
        match &self.work {
            Work::Load { missing, .. } | Work::Store { missing } => *missing,
        }
    }
}

impl Leader {
    pub(super) fn begin_op(&mut self, id: OpId, op: Op) {
        self.timers.insert((op.deadline, Timer::Deadline(id)));
        self.ops.insert(id, op);
    }

    pub(super) fn copies_ended(
        &mut self,
        rank: Rank,
        copies: &[EndedCopy],
        effects: &mut Vec<Effect>,
    ) {
        for copy in copies {
            if let Some(direction) = self.copy_ended(rank, copy.op, copy.whole, effects) {
                self.count_bytes(direction, copy);
            }
        }
        self.open_pool(effects);
    }

    /// Everything that was asked of `rank` has ended, none of it whole: its process is dead, or says so itself.
    pub(super) fn end_all_of(&mut self, rank: Rank, effects: &mut Vec<Effect>) {
        let mut ops: Vec<OpId> = self
            .ops
            .iter()
            .filter(|(_, op)| op.missing().contains(rank))
            .map(|(id, _)| *id)
            .collect();
        ops.sort_unstable();
        for op in ops {
            self.copy_ended(rank, op, false, effects);
        }
    }

    /// Which way the copy went, when its end was news.
    fn copy_ended(
        &mut self,
        rank: Rank,
        id: OpId,
        whole: bool,
        effects: &mut Vec<Effect>,
    ) -> Option<Direction> {
        let op = self.ops.get_mut(&id)?;
        let (news, last) = match &mut op.work {
            Work::Load {
                missing, failed, ..
            } => {
                let news = missing.remove(rank);
                *failed += u32::from(news && !whole);
                (news, missing.is_empty())
            }
            Work::Store { missing } => (missing.remove(rank), missing.is_empty()),
        };
        if !news {
            return None;
        }
        let direction = match op.work {
            Work::Load { .. } => Direction::Load,
            Work::Store { .. } => Direction::Store,
        };
        if direction == Direction::Store {
            self.filled(Generation(id.0), rank, whole, effects);
        }
        if last && let Some(op) = self.ops.remove(&id) {
            self.timers.remove(&(op.deadline, Timer::Deadline(id)));
            self.timers
                .remove(&(op.deadline + self.settings.fence, Timer::Fence(id)));
            if let Work::Load {
                due,
                lease,
                pages,
                failed,
                ..
            } = op.work
            {
                self.load_ended(due, lease, pages, failed, effects);
            }
        }
        Some(direction)
    }

    fn load_ended(
        &mut self,
        due: Due,
        lease: Vec<Pin>,
        pages: u32,
        failed: u32,
        effects: &mut Vec<Effect>,
    ) {
        if let Some(pool) = &mut self.pool {
            lease.into_iter().for_each(|pin| pool.unpin(pin));
        }
        let answer = match failed {
            0 => Ok(Answer::Load { pages }),
            _ => Err(Refusal::CopyFailed(failed)),
        };
        self.counts.failed_copies += u64::from(failed > 0);
        self.answer(due.engine, due.id, answer, effects);
    }

    /// The deadline of a copy passed: it is cancelled where it has not ended. Its pages stay as they are until it has.
    pub(super) fn copy_late(&mut self, id: OpId, at: Time, effects: &mut Vec<Effect>) {
        let Some(op) = self.ops.get(&id) else { return };
        effects.push(Effect::Cancel {
            ranks: op.missing(),
            op: id,
        });
        if let Work::Store { .. } = op.work
            && let Some(pool) = &mut self.pool
        {
            pool.quarantine(Generation(id.0));
        }
        self.counts.late_copies += 1;
        self.timers
            .insert((at + self.settings.fence, Timer::Fence(id)));
    }

    /// The fence time passed as well: only the death of these workers proves that nothing is written any more.
    pub(super) fn copy_stuck(&mut self, id: OpId, effects: &mut Vec<Effect>) {
        let Some(op) = self.ops.get(&id) else { return };
        effects.extend(op.missing().iter().map(Effect::Expel));
    }

    fn count_bytes(&mut self, direction: Direction, copy: &EndedCopy) {
        match direction {
            Direction::Store => {
                self.counts.gathered_bytes += copy.bytes;
                self.counts.gather_us += copy.busy_us;
            }
            Direction::Load => {
                self.counts.scattered_bytes += copy.bytes;
                self.counts.scatter_us += copy.busy_us;
            }
        }
    }
}
