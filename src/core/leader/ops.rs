//! Copies in flight: their deadlines, their ends, and the answers that follow from them.

use crate::event::{CANCELLED_MAX, Effect};
use crate::pool::Pin;
use crate::refusal::Refusal;
use crate::shards::RankSet;
use kvferry_types::{Answer, Direction, EndedCopy};
use kvferry_types::{Generation, OpId, Rank, Replica, Time, WorkerId};

use super::{Due, Leader, Timer};

/// Checks of what a worker owes, a quarter of the fence time apart, before the worker is expelled. A leader that was
/// stopped for a while counts that time as one check, because the answers may be in its own mailbox.
pub(super) const LOOKS: u32 = 4;

/// One copy that was ordered and has not ended on every rank.
#[derive(Debug)]
pub(super) struct Op {
    pub(super) replica: Replica,
    pub(super) work: Work,
    /// When the copy is checked next: at its deadline, then every quarter of the fence time.
    pub(super) next: Time,
    /// Number of checks so far, of which the first is at the deadline.
    looks: u32,
}

#[derive(Debug)]
pub(super) enum Work {
    /// Answers one request. The lease is released when the copy has ended.
    Load {
        due: Due,
        lease: Vec<Pin>,
        missing: RankSet,
        failed: u32,
        /// Pages, from the first on, that were copied completely on every rank that has ended; at first all pages.
        whole_pages: u32,
    },
    /// Fills the reservation of the same number, for which stores wait. `missing` is used for deadlines only: the pages
    /// are published by the reservation's own set of ranks.
    Store { missing: RankSet },
}

/// How a copy ended on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// Every byte was copied.
    Whole,
    /// Only the first `whole_pages` pages were copied completely.
    Failed { whole_pages: u32 },
}

impl End {
    fn of(copy: &EndedCopy) -> Self {
        match copy.whole {
            true => Self::Whole,
            false => Self::Failed {
                whole_pages: copy.whole_pages,
            },
        }
    }
}

impl Op {
    pub(super) fn new(replica: Replica, work: Work, deadline: Time) -> Self {
        Self {
            replica,
            work,
            next: deadline,
            looks: 0,
        }
    }

    /// Number of pins that the lease holds.
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

    fn direction(&self) -> Direction {
        match self.work {
            Work::Load { .. } => Direction::Load,
            Work::Store { .. } => Direction::Store,
        }
    }

    fn owes(&self, worker: WorkerId) -> bool {
        self.replica == worker.replica && self.missing().contains(worker.rank)
    }
}

impl Leader {
    pub(super) fn begin_op(&mut self, id: OpId, op: Op) {
        self.timers.insert((op.next, Timer::Copy(id)));
        self.ops.insert(id, op);
    }

    pub(super) fn copies_ended(
        &mut self,
        worker: WorkerId,
        copies: &[EndedCopy],
        effects: &mut Vec<Effect>,
    ) {
        for copy in copies {
            let end = End::of(copy);
            if let Some(direction) = self.copy_ended(worker, copy.op, end, effects) {
                self.count_bytes(direction, copy);
            }
        }
    }

    /// Ends all copies that a worker owes, none of them complete: its process is dead, or has reported that they ended.
    pub(super) fn end_all_of(&mut self, worker: WorkerId, effects: &mut Vec<Effect>) {
        let mut ops: Vec<OpId> = self
            .ops
            .iter()
            .filter(|(_, op)| op.owes(worker))
            .map(|(id, _)| *id)
            .collect();
        ops.sort_unstable();
        for op in ops {
            self.copy_ended(worker, op, End::Failed { whole_pages: 0 }, effects);
        }
    }

    /// Notes the end of a copy on one rank. Returns its direction, or `None` when that end was already known or is of
    /// no copy in flight.
    fn copy_ended(
        &mut self,
        worker: WorkerId,
        id: OpId,
        end: End,
        effects: &mut Vec<Effect>,
    ) -> Option<Direction> {
        let rank = worker.rank;
        let op = self.ops.get_mut(&id)?;
        if op.replica != worker.replica {
            return None;
        }
        let (news, last) = match &mut op.work {
            Work::Load {
                missing,
                failed,
                whole_pages,
                ..
            } => {
                let news = missing.remove(rank);
                if let (true, End::Failed { whole_pages: here }) = (news, end) {
                    *failed += 1;
                    *whole_pages = here.min(*whole_pages);
                }
                (news, missing.is_empty())
            }
            Work::Store { missing } => (missing.remove(rank), missing.is_empty()),
        };
        let direction = op.direction();
        if !news {
            return None;
        }
        if direction == Direction::Store {
            self.filled(Generation(id.0), rank, end == End::Whole, effects);
        }
        if last && let Some(op) = self.ops.remove(&id) {
            self.timers.remove(&(op.next, Timer::Copy(id)));
            if let Work::Load {
                due,
                lease,
                failed,
                whole_pages,
                ..
            } = op.work
            {
                self.load_ended(due, lease, whole_pages, failed, effects);
            }
        }
        Some(direction)
    }

    fn load_ended(
        &mut self,
        due: Due,
        lease: Vec<Pin>,
        whole_pages: u32,
        failed: u32,
        effects: &mut Vec<Effect>,
    ) {
        if let Some(tier) = &mut self.tier {
            lease.into_iter().for_each(|pin| tier.pool_mut().unpin(pin));
        }
        let answer = match whole_pages {
            0 => Err(Refusal::CopyFailed(failed)),
            pages => Ok(Answer::Load { pages }),
        };
        self.counts.failed_copies += u64::from(failed > 0);
        self.answer(due.engine, due.id, answer, effects);
    }

    /// The deadline of a copy has passed: cancels the copy on the ranks where it has not ended, and again every quarter
    /// of the fence time. Its pages are not reused before it has ended everywhere. After the fence time only the death
    /// of its workers proves that the pages are not written any longer.
    pub(super) fn copy_due(&mut self, now: Time, id: OpId, effects: &mut Vec<Effect>) {
        let fence = self.settings.fence;
        let Some(op) = self.ops.get_mut(&id) else {
            return;
        };
        let (replica, missing) = (op.replica, op.missing());
        let (first, expired) = (op.looks == 0, op.looks >= LOOKS);
        op.looks = op.looks.saturating_add(1);
        op.next = now + fence / 4;
        self.timers.insert((op.next, Timer::Copy(id)));
        let store = matches!(op.work, Work::Store { .. });
        if first {
            self.counts.late_copies += 1;
            if store && let Some(tier) = &mut self.tier {
                tier.pool_mut().quarantine(Generation(id.0));
                self.never_published(Generation(id.0), effects);
            }
        }
        self.cancel(id);
        if expired {
            let late = missing.iter().map(|rank| WorkerId { replica, rank });
            self.expelled.extend(late);
        }
    }

    /// Cancels a copy on the ranks where it has not ended, at the end of this step.
    pub(super) fn cancel(&mut self, id: OpId) {
        if let Some(op) = self.ops.get(&id) {
            let replica = op.replica;
            for rank in op.missing().iter() {
                let worker = WorkerId { replica, rank };
                self.stops.entry(worker).or_default().insert(id);
            }
        }
    }

    /// Sends each worker the cancels of this step together, without copies that have ended meanwhile, and expels
    /// workers.
    pub(super) fn stop_workers(&mut self, effects: &mut Vec<Effect>) {
        for (worker, ops) in std::mem::take(&mut self.stops) {
            let owed = |op: &OpId| self.ops.get(op).is_some_and(|op| op.owes(worker));
            let ops: Vec<OpId> = ops.into_iter().filter(owed).collect();
            effects.extend(ops.chunks(CANCELLED_MAX).map(|ops| Effect::Cancel {
                worker,
                ops: ops.to_vec(),
            }));
        }
        let expelled = std::mem::take(&mut self.expelled);
        effects.extend(expelled.into_iter().map(Effect::Expel));
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

    /// Number of copies of this direction whose end this worker owes.
    pub fn owed_by(&self, worker: WorkerId, direction: Direction) -> usize {
        let owed = self.ops.values().filter(|op| op.owes(worker));
        owed.filter(|op| op.direction() == direction).count()
    }

    /// Copies that have not ended, with the ranks that owe their ends: for checks.
    pub fn owed(&self) -> impl Iterator<Item = (OpId, Replica, Vec<Rank>)> {
        self.ops
            .iter()
            .map(|(id, op)| (*id, op.replica, op.missing().iter().collect()))
    }
}
