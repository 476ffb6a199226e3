//! Copies in flight: which ranks owe their ends, and what follows from deadlines and ends.
//!
//! [`Transfers`] knows neither loads nor stores. A transfer has ended when every rank has reported its end; until then
//! its workers may touch memory. A store's pages are published by the set of ranks of their reservation, which lies in
//! the pool.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::Contradiction;
use crate::event::{CANCELLED_MAX, LeaderEffect};
use crate::rank_set::RankSet;
use kvferry_types::{Direction, EndedCopy, Rank, Replica, Time, TransferId, WorkerId};

use super::Leader;
use super::timers::{Timer, Timers};

/// Checks of what a worker owes, a quarter of the fence time apart, before the worker is fenced. A leader that was
/// stopped for a while counts that time as one check, because the answers may be in its own mailbox.
pub(super) const CHECKS_MAX: u32 = 4;

/// One copy that was ordered and has not ended on every rank.
#[derive(Debug)]
struct TransferInFlight {
    replica: Replica,
    direction: Direction,
    /// Ranks that have not reported their end.
    missing: RankSet,
    /// Ranks that reported a failure.
    failed: u32,
    /// Pages, from the first on, that were copied completely on every rank that has ended; at first all pages.
    complete_pages: u32,
    /// When the copy is checked next: at its deadline, then every quarter of the fence time.
    next: Time,
    /// Number of checks so far, of which the first is at the deadline.
    checks: u32,
}

impl TransferInFlight {
    fn awaits(&self, worker: WorkerId) -> bool {
        self.replica == worker.replica && self.missing.contains(worker.rank)
    }
}

/// A copy that is begun.
#[derive(Debug, Clone, Copy)]
pub(super) struct Begun {
    pub(super) id: TransferId,
    pub(super) replica: Replica,
    pub(super) direction: Direction,
    pub(super) ranks: RankSet,
    pub(super) pages: u32,
    pub(super) deadline: Time,
}

/// How a copy ended on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RankEnd {
    /// Every byte was copied.
    Complete,
    /// Only the first `complete_pages` pages were copied completely.
    Failed { complete_pages: u32 },
}

impl RankEnd {
    fn of(copy: &EndedCopy) -> Self {
        match copy.complete {
            true => Self::Complete,
            false => Self::Failed {
                complete_pages: copy.complete_pages,
            },
        }
    }
}

/// How a copy ended on all of its ranks.
#[derive(Debug, Clone, Copy)]
pub(super) struct TransferOutcome {
    /// Ranks on which the copy failed.
    pub(super) failed: u32,
    /// Pages, from the first on, that were copied completely on every rank.
    pub(super) complete_pages: u32,
}

/// A check of a copy whose deadline has passed.
#[derive(Debug)]
struct Late {
    direction: Direction,
    /// The first check, at the deadline itself.
    first: bool,
    /// Workers that did not report within the fence time.
    expired: Vec<WorkerId>,
}

/// The copies in flight. See the module.
#[derive(Debug, Default)]
pub(super) struct Transfers {
    in_flight: BTreeMap<TransferId, TransferInFlight>,
    /// Copies that this step cancels, collected so that each worker is notified once.
    cancels: BTreeMap<WorkerId, BTreeSet<TransferId>>,
}

impl Transfers {
    pub(super) fn begin(&mut self, begun: Begun, timers: &mut Timers) {
        timers.set(begun.deadline, Timer::Copy(begun.id));
        let transfer = TransferInFlight {
            replica: begun.replica,
            direction: begun.direction,
            missing: begun.ranks,
            failed: 0,
            complete_pages: begun.pages,
            next: begun.deadline,
            checks: 0,
        };
        self.in_flight.insert(begun.id, transfer);
    }

    /// Notes the end of a copy on one rank. Returns its direction, and the outcome if this was the last rank; `None`
    /// when that end was already known or is of no copy in flight.
    fn ended(
        &mut self,
        worker: WorkerId,
        id: TransferId,
        end: RankEnd,
        timers: &mut Timers,
    ) -> Option<(Direction, Option<TransferOutcome>)> {
        let transfer = self.in_flight.get_mut(&id)?;
        if transfer.replica != worker.replica || !transfer.missing.remove(worker.rank) {
            return None;
        }
        if let RankEnd::Failed { complete_pages } = end {
            transfer.failed += 1;
            transfer.complete_pages = complete_pages.min(transfer.complete_pages);
        }
        let TransferInFlight {
            direction,
            failed,
            complete_pages,
            next,
            ..
        } = *transfer;
        if !transfer.missing.is_empty() {
            return Some((direction, None));
        }
        self.in_flight.remove(&id);
        timers.clear(next, Timer::Copy(id));
        let outcome = TransferOutcome {
            failed,
            complete_pages,
        };
        Some((direction, Some(outcome)))
    }

    /// Checks a copy whose timer has expired, and schedules the next check.
    fn check_late(
        &mut self,
        now: Time,
        id: TransferId,
        fence: Duration,
        timers: &mut Timers,
    ) -> Option<Late> {
        let transfer = self.in_flight.get_mut(&id)?;
        let (first, expired) = (transfer.checks == 0, transfer.checks >= CHECKS_MAX);
        transfer.checks = transfer.checks.saturating_add(1);
        transfer.next = now + fence / 4;
        timers.set(transfer.next, Timer::Copy(id));
        let replica = transfer.replica;
        let ranks = transfer.missing.iter().filter(|_| expired);
        Some(Late {
            direction: transfer.direction,
            first,
            expired: ranks.map(|rank| WorkerId { replica, rank }).collect(),
        })
    }

    /// Cancels a copy on the ranks where it has not ended, at the end of this step.
    pub(super) fn cancel(&mut self, id: TransferId) {
        let Some(transfer) = self.in_flight.get(&id) else {
            return;
        };
        let replica = transfer.replica;
        for rank in transfer.missing.iter() {
            let worker = WorkerId { replica, rank };
            self.cancels.entry(worker).or_default().insert(id);
        }
    }

    /// Cancels every copy, at the end of this step.
    pub(super) fn cancel_all(&mut self) {
        let ids: Vec<TransferId> = self.in_flight.keys().copied().collect();
        ids.into_iter().for_each(|id| self.cancel(id));
    }

    /// The cancels of this step for each worker, without copies that have ended meanwhile.
    fn take_cancels(&mut self) -> impl Iterator<Item = (WorkerId, Vec<TransferId>)> {
        let cancels = std::mem::take(&mut self.cancels);
        cancels.into_iter().map(|(worker, ids)| {
            let is_awaited = |id: &TransferId| {
                let transfer = self.in_flight.get(id);
                transfer.is_some_and(|transfer| transfer.awaits(worker))
            };
            (worker, ids.into_iter().filter(is_awaited).collect())
        })
    }

    /// The copies whose end a worker owes.
    fn awaited_from(&self, worker: WorkerId) -> impl Iterator<Item = (TransferId, Direction)> {
        let in_flight = self.in_flight.iter();
        let awaited = in_flight.filter(move |(_, transfer)| transfer.awaits(worker));
        awaited.map(|(id, transfer)| (*id, transfer.direction))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.in_flight.len()
    }

    /// Checks that every copy waits for a rank. `Err` names the first contradiction.
    pub(super) fn check(&self) -> Result<(), Contradiction> {
        let mut in_flight = self.in_flight.iter();
        match in_flight.find(|(_, transfer)| transfer.missing.is_empty()) {
            None => Ok(()),
            Some((id, _)) => Err(format!("copy {} waits for no rank", id.0).into()),
        }
    }
}

impl Leader {
    pub(super) fn copies_ended(
        &mut self,
        worker: WorkerId,
        copies: &[EndedCopy],
        effects: &mut Vec<LeaderEffect>,
    ) {
        for copy in copies {
            if let Some(direction) =
                self.copy_ended(worker, copy.transfer, RankEnd::of(copy), effects)
            {
                self.count_bytes(direction, copy);
            }
        }
    }

    /// Ends all copies that a worker owes, none of them complete: its process is dead, or has reported that they ended.
    pub(super) fn fail_copies_of(&mut self, worker: WorkerId, effects: &mut Vec<LeaderEffect>) {
        let ids: Vec<TransferId> = self
            .transfers
            .awaited_from(worker)
            .map(|(id, _)| id)
            .collect();
        for id in ids {
            self.copy_ended(worker, id, RankEnd::Failed { complete_pages: 0 }, effects);
        }
    }

    /// Notes the end of a copy on one rank. Returns its direction, or `None` when that end was already known or is of
    /// no copy in flight.
    fn copy_ended(
        &mut self,
        worker: WorkerId,
        id: TransferId,
        end: RankEnd,
        effects: &mut Vec<LeaderEffect>,
    ) -> Option<Direction> {
        let (direction, outcome) = self.transfers.ended(worker, id, end, &mut self.timers)?;
        match direction {
            Direction::Store => {
                let transfer = id;
                self.filled(transfer, worker.rank, end == RankEnd::Complete, effects);
            }
            Direction::Load => {
                if let Some(outcome) = outcome {
                    self.load_ended(id, outcome, effects);
                }
            }
        }
        Some(direction)
    }

    /// The deadline of a copy has passed: cancels the copy on the ranks where it has not ended, and again every quarter
    /// of the fence time. Its pages are not reused before it has ended everywhere. After the fence time only the death
    /// of its workers proves that the pages are not written any longer.
    pub(super) fn copy_due(&mut self, now: Time, id: TransferId, effects: &mut Vec<LeaderEffect>) {
        let fence = self.settings.fence;
        let Some(late) = self.transfers.check_late(now, id, fence, &mut self.timers) else {
            return;
        };
        if late.first {
            self.counts.late_copies += 1;
            if late.direction == Direction::Store
                && let Some(pool) = self.tier.pool_mut()
            {
                pool.quarantine(id);
                self.never_published(id, effects);
            }
        }
        self.transfers.cancel(id);
        self.roster.request_fence(late.expired);
    }

    /// Sends each worker the cancels of this step together, and fences workers.
    pub(super) fn send_cancels(&mut self, effects: &mut Vec<LeaderEffect>) {
        for (worker, ids) in self.transfers.take_cancels() {
            effects.extend(ids.chunks(CANCELLED_MAX).map(|ids| LeaderEffect::Cancel {
                worker,
                transfers: ids.to_vec(),
            }));
        }
        let fenced = self.roster.take_to_fence();
        effects.extend(fenced.into_iter().map(LeaderEffect::FenceWorker));
    }

    fn count_bytes(&mut self, direction: Direction, copy: &EndedCopy) {
        match direction {
            Direction::Store => {
                self.counts.gathered_bytes += copy.bytes;
                self.counts.gather_us += copy.copy_us;
            }
            Direction::Load => {
                self.counts.scattered_bytes += copy.bytes;
                self.counts.scatter_us += copy.copy_us;
            }
        }
    }

    /// Number of copies of this direction whose end this worker owes.
    pub fn awaited_from(&self, worker: WorkerId, direction: Direction) -> usize {
        let awaited = self.transfers.awaited_from(worker);
        awaited.filter(|(_, awaited)| *awaited == direction).count()
    }

    /// Copies that have not ended, with the ranks that owe their ends: for checks.
    pub fn awaited(&self) -> impl Iterator<Item = (TransferId, Replica, Vec<Rank>)> {
        let in_flight = self.transfers.in_flight.iter();
        in_flight.map(|(id, transfer)| (*id, transfer.replica, transfer.missing.iter().collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::anchor::AnchorKey;
    use crate::leader::LeaderSettings;
    use kvferry_types::{Epoch, Ratio};

    fn begun(id: u64, direction: Direction, replica: u16) -> Begun {
        Begun {
            id: TransferId(id),
            replica: Replica(replica),
            direction,
            ranks: RankSet::first(2),
            pages: 4,
            deadline: Time(100),
        }
    }

    #[test]
    fn a_copy_that_waits_for_no_rank_is_detected() {
        let (mut transfers, mut timers) = (Transfers::default(), Timers::default());
        transfers.begin(begun(3, Direction::Load, 0), &mut timers);
        assert_eq!(transfers.check(), Ok(()));
        for transfer in transfers.in_flight.values_mut() {
            transfer.missing = RankSet::first(0);
        }
        let why = transfers.check().expect_err("no rank is missing");
        assert_eq!(why.to_string(), "copy 3 waits for no rank");
    }

    #[test]
    fn copies_are_counted_by_the_worker_that_owes_them_and_by_direction() {
        let ratio = Ratio::new(4).expect("in bounds");
        let settings = LeaderSettings::new(Epoch(1), 2, ratio, AnchorKey([1; 32]));
        let mut leader = Leader::new(settings);
        for (id, direction, replica) in [
            (1, Direction::Store, 0),
            (2, Direction::Store, 0),
            (3, Direction::Load, 0),
            (4, Direction::Load, 1),
        ] {
            let begun = begun(id, direction, replica);
            leader.transfers.begin(begun, &mut leader.timers);
        }
        let worker = |replica, rank| WorkerId {
            replica: Replica(replica),
            rank: Rank(rank),
        };
        for (worker, stores, loads) in [
            (worker(0, 0), 2, 1),
            (worker(0, 1), 2, 1),
            (worker(1, 1), 0, 1),
            (worker(0, 2), 0, 0),
        ] {
            assert_eq!(leader.awaited_from(worker, Direction::Store), stores);
            assert_eq!(leader.awaited_from(worker, Direction::Load), loads);
        }
    }
}
