//! Transfers in flight: which workers owe their ends, and what follows from deadlines and ends.
//!
//! [`Transfers`] knows neither loads nor stores. A transfer has ended when every worker that carries it out has reported
//! its end; until then those workers may touch memory. Pages that a transfer writes are published by another set, the
//! shards of their reservation, which lies in the pool.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::Contradiction;
use crate::leader::event::{CANCELLED_MAX, LeaderEffect, Workers};
use kvferry_types::{Direction, Edge, EndedCopy, TierId, Time, TransferId, WorkerId};

use super::Leader;
use super::timers::{Timer, Timers};

/// Checks of what a worker owes, a quarter of the fence time apart, before the worker is fenced. A leader that was
/// stopped for a while counts that time as one check, because the answers may be in its own mailbox.
pub(super) const CHECKS_MAX: u32 = 4;

/// One transfer that was ordered and has not ended on every worker.
#[derive(Debug)]
struct TransferInFlight {
    edge: Edge,
    pages: u32,
    /// Workers that have not reported their end, and may still read and write the pages.
    touching: Workers,
    /// Workers that reported a failure.
    failed: u32,
    /// Pages, from the first on, that were copied completely on every worker that has ended; at first all pages.
    complete_pages: u32,
    /// The first page that failed its checksum in the source, on any worker.
    bad_page: Option<u32>,
    /// When the copy is checked next: at its deadline, then every quarter of the fence time.
    next: Time,
    /// Number of checks so far, of which the first is at the deadline.
    checks: u32,
}

impl TransferInFlight {
    fn awaits(&self, worker: WorkerId) -> bool {
        self.touching.contains(&worker)
    }

    /// Notes the end on one worker. Returns false if that end is known, or the worker does not take part.
    fn ended(&mut self, worker: WorkerId) -> bool {
        let place = self.touching.iter().position(|other| *other == worker);
        place
            .map(|place| self.touching.swap_remove(place))
            .is_some()
    }
}

/// A transfer that is begun.
#[derive(Debug, Clone)]
pub(super) struct Begun {
    pub(super) id: TransferId,
    pub(super) edge: Edge,
    pub(super) workers: Workers,
    pub(super) pages: u32,
    pub(super) deadline: Time,
}

/// How a transfer ended on one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WorkerEnd {
    /// Every byte was copied.
    Complete,
    /// Only the first `complete_pages` pages were copied completely.
    Failed {
        complete_pages: u32,
        /// The next page failed its checksum in the source.
        bad_source: bool,
        /// A page whose place in the tier below host memory failed.
        faulty_page: Option<u32>,
    },
}

impl WorkerEnd {
    /// Nothing was copied, as far as is known.
    const NOTHING: Self = Self::Failed {
        complete_pages: 0,
        bad_source: false,
        faulty_page: None,
    };

    fn of(copy: &EndedCopy) -> Self {
        match copy.complete {
            true => Self::Complete,
            false => Self::Failed {
                complete_pages: copy.complete_pages,
                bad_source: copy.bad_source,
                faulty_page: copy.faulty_page,
            },
        }
    }
}

/// How a transfer ended on all of its workers.
#[derive(Debug, Clone, Copy)]
pub(super) struct TransferOutcome {
    /// Workers on which the transfer failed.
    pub(super) failed: u32,
    /// Pages, from the first on, that were copied completely on every worker.
    pub(super) complete_pages: u32,
    /// The first page that failed its checksum in the source.
    pub(super) bad_page: Option<u32>,
}

/// A check of a copy whose deadline has passed.
#[derive(Debug)]
struct Late {
    edge: Edge,
    /// The first check, at the deadline itself.
    first: bool,
    /// Workers that did not report within the fence time.
    expired: Vec<WorkerId>,
}

/// The copies in flight. See the module.
#[derive(Debug, Default)]
pub(super) struct Transfers {
    in_flight: BTreeMap<TransferId, TransferInFlight>,
    /// Pages of them, by edge.
    pages: BTreeMap<Edge, u64>,
    /// Copies that this step cancels, collected so that each worker is notified once.
    cancels: BTreeMap<WorkerId, BTreeSet<TransferId>>,
}

impl Transfers {
    pub(super) fn begin(&mut self, begun: Begun, timers: &mut Timers) {
        timers.set(begun.deadline, Timer::Transfer(begun.id));
        *self.pages.entry(begun.edge).or_default() += u64::from(begun.pages);
        let transfer = TransferInFlight {
            edge: begun.edge,
            pages: begun.pages,
            touching: begun.workers,
            failed: 0,
            complete_pages: begun.pages,
            bad_page: None,
            next: begun.deadline,
            checks: 0,
        };
        self.in_flight.insert(begun.id, transfer);
    }

    /// Notes the end of a transfer on one worker. Returns its edge, and the outcome if this was the last worker; `None`
    /// when that end was already known or is of no transfer in flight.
    fn ended(
        &mut self,
        worker: WorkerId,
        id: TransferId,
        end: WorkerEnd,
        timers: &mut Timers,
    ) -> Option<(Edge, Option<TransferOutcome>)> {
        let transfer = self.in_flight.get_mut(&id)?;
        if !transfer.ended(worker) {
            return None;
        }
        if let WorkerEnd::Failed {
            complete_pages,
            bad_source,
            faulty_page,
        } = end
        {
            transfer.failed += 1;
            let reads = transfer.edge.from > transfer.edge.to;
            let bad = bad_source.then_some(complete_pages);
            let faulty = faulty_page.filter(|_| reads);
            // A worker may report any page; one that the transfer does not copy is of no block.
            let pages = transfer.pages;
            for page in bad.into_iter().chain(faulty).filter(|page| *page < pages) {
                let first = transfer.bad_page.unwrap_or(u32::MAX);
                transfer.bad_page = Some(first.min(page));
            }
            transfer.complete_pages = complete_pages.min(transfer.complete_pages);
        }
        let TransferInFlight {
            edge,
            pages,
            failed,
            complete_pages,
            bad_page,
            next,
            ..
        } = *transfer;
        if !transfer.touching.is_empty() {
            return Some((edge, None));
        }
        self.in_flight.remove(&id);
        if let Some(of_edge) = self.pages.get_mut(&edge) {
            *of_edge -= u64::from(pages);
        }
        timers.clear(next, Timer::Transfer(id));
        let outcome = TransferOutcome {
            failed,
            complete_pages,
            bad_page,
        };
        Some((edge, Some(outcome)))
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
        timers.set(transfer.next, Timer::Transfer(id));
        let touching = transfer.touching.iter().filter(|_| expired);
        Some(Late {
            edge: transfer.edge,
            first,
            expired: touching.copied().collect(),
        })
    }

    /// Cancels a transfer on the workers where it has not ended, at the end of this step.
    pub(super) fn cancel(&mut self, id: TransferId) {
        let Some(transfer) = self.in_flight.get(&id) else {
            return;
        };
        for worker in &transfer.touching {
            self.cancels.entry(*worker).or_default().insert(id);
        }
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

    /// The transfers whose end a worker owes.
    fn awaited_from(&self, worker: WorkerId) -> impl Iterator<Item = (TransferId, Edge)> {
        let in_flight = self.in_flight.iter();
        let awaited = in_flight.filter(move |(_, transfer)| transfer.awaits(worker));
        awaited.map(|(id, transfer)| (*id, transfer.edge))
    }

    /// Cancels every transfer that reads or writes a tier, at the end of this step.
    pub(super) fn cancel_tier(&mut self, tier: TierId) {
        let in_flight = self.in_flight.iter();
        let touching = in_flight.filter(|(_, transfer)| transfer.edge.touches(tier));
        let ids: Vec<TransferId> = touching.map(|(id, _)| *id).collect();
        ids.into_iter().for_each(|id| self.cancel(id));
    }

    /// True while a transfer reads or writes a tier.
    pub(super) fn touch(&self, tier: TierId) -> bool {
        let mut in_flight = self.in_flight.values();
        in_flight.any(|transfer| transfer.edge.touches(tier))
    }

    /// Pages of the transfers in flight over an edge.
    pub(super) fn pages_over(&self, edge: Edge) -> u64 {
        self.pages.get(&edge).copied().unwrap_or(0)
    }

    /// True while a worker owes the end of a transfer.
    pub(super) fn awaits(&self, id: TransferId) -> bool {
        self.in_flight.contains_key(&id)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.in_flight.len()
    }

    /// Checks that every transfer waits for a worker. `Err` names the first contradiction.
    pub(super) fn check(&self) -> Result<(), Contradiction> {
        let mut in_flight = self.in_flight.iter();
        if let Some((id, _)) = in_flight.find(|(_, transfer)| transfer.touching.is_empty()) {
            return Err(format!("{id} waits for no worker").into());
        }
        let mut pages: BTreeMap<Edge, u64> = BTreeMap::new();
        for transfer in self.in_flight.values() {
            *pages.entry(transfer.edge).or_default() += u64::from(transfer.pages);
        }
        let counted = self.pages.iter().filter(|(_, pages)| **pages > 0);
        match counted.eq(pages.iter().filter(|(_, pages)| **pages > 0)) {
            true => Ok(()),
            false => Err(format!("{pages:?} pages in flight, counted {:?}", self.pages).into()),
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
            if let Some(edge) =
                self.transfer_ended(worker, copy.transfer, WorkerEnd::of(copy), effects)
            {
                self.count_bytes(edge, copy);
                let (now, of) = (self.step_time, (edge, worker));
                self.rates.note(now, of, copy.bytes, copy.copy_us);
            }
        }
    }

    /// Ends all copies that a worker owes, none of them complete: its process is dead, or has reported that they ended.
    pub(super) fn fail_copies_of(&mut self, worker: WorkerId, effects: &mut Vec<LeaderEffect>) {
        self.fail_copies(worker, |_| true, effects);
    }

    /// Like [`Self::fail_copies_of`], for the copies that touch an engine's memory.
    pub(super) fn fail_device_copies_of(
        &mut self,
        worker: WorkerId,
        effects: &mut Vec<LeaderEffect>,
    ) {
        self.fail_copies(worker, |edge| edge.touches(TierId::Device), effects);
    }

    fn fail_copies(
        &mut self,
        worker: WorkerId,
        fails: impl Fn(Edge) -> bool,
        effects: &mut Vec<LeaderEffect>,
    ) {
        let awaited = self.transfers.awaited_from(worker);
        let ids: Vec<TransferId> = awaited
            .filter(|(_, edge)| fails(*edge))
            .map(|(id, _)| id)
            .collect();
        for id in ids {
            self.transfer_ended(worker, id, WorkerEnd::NOTHING, effects);
        }
    }

    /// Notes the end of a transfer on one worker. Returns its edge, or `None` when that end was already known or is of no
    /// transfer in flight.
    fn transfer_ended(
        &mut self,
        worker: WorkerId,
        id: TransferId,
        end: WorkerEnd,
        effects: &mut Vec<LeaderEffect>,
    ) -> Option<Edge> {
        let (edge, outcome) = self.transfers.ended(worker, id, end, &mut self.timers)?;
        if let WorkerEnd::Failed {
            faulty_page: Some(page),
            ..
        } = end
        {
            self.place_failed(id, edge, page);
        }
        let shard = self.roster.shard_of(worker);
        let complete = end == WorkerEnd::Complete;
        let served = match edge.to {
            TierId::Device => None,
            tier => self.filled(id, (tier, shard), complete, effects),
        };
        if let WorkerEnd::Failed {
            complete_pages,
            bad_source: true,
            ..
        } = end
            && outcome.is_none()
        {
            self.source_is_bad(id, complete_pages);
        }
        if let Some(outcome) = outcome {
            self.move_ended(id, &outcome, served == Some(true));
            self.loads_go_on(id, outcome, effects);
        }
        Some(edge)
    }

    /// The deadline of a copy has passed: cancels the copy on the workers where it has not ended, and again every quarter
    /// of the fence time. Its pages are not reused before it has ended everywhere. After the fence time only the death
    /// of its workers proves that the pages are not written any longer.
    pub(super) fn transfer_due(
        &mut self,
        now: Time,
        id: TransferId,
        effects: &mut Vec<LeaderEffect>,
    ) {
        let fence = self.settings.fence;
        let Some(late) = self.transfers.check_late(now, id, fence, &mut self.timers) else {
            return;
        };
        if late.first {
            self.counts.late_copies += 1;
            if late.edge.to != TierId::Device
                && let Some(pool) = self.tiers.pool_mut(late.edge.to)
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

    /// Adds what a worker reports, which may be any number.
    fn count_bytes(&mut self, edge: Edge, copy: &EndedCopy) {
        let counts = &mut self.counts;
        let (bytes, us) = match edge.direction() {
            Some(Direction::Store) => (&mut counts.gathered_bytes, &mut counts.gather_us),
            Some(Direction::Load) => (&mut counts.scattered_bytes, &mut counts.scatter_us),
            None => return,
        };
        *bytes = bytes.saturating_add(copy.bytes);
        *us = us.saturating_add(copy.copy_us);
    }

    /// Number of transfers over this edge whose end this worker owes.
    pub fn awaited_from(&self, worker: WorkerId, edge: Edge) -> usize {
        let awaited = self.transfers.awaited_from(worker);
        awaited.filter(|(_, awaited)| *awaited == edge).count()
    }

    /// True while this worker owes the end of a transfer.
    pub fn is_awaited(&self, worker: WorkerId) -> bool {
        self.transfers.awaited_from(worker).next().is_some()
    }

    /// Transfers that have not ended, with the workers that owe their ends: for checks.
    pub fn awaited(&self) -> impl Iterator<Item = (TransferId, &Workers)> {
        let in_flight = self.transfers.in_flight.iter();
        in_flight.map(|(id, transfer)| (*id, &transfer.touching))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::anchor::AnchorKey;
    use crate::leader::LeaderSettings;
    use kvferry_types::{Epoch, Rank, Ratio, Replica};

    fn worker(replica: u16, rank: u16) -> WorkerId {
        WorkerId {
            replica: Replica(replica),
            rank: Rank(rank),
        }
    }

    fn begun(id: u64, edge: Edge, replica: u16) -> Begun {
        Begun {
            id: TransferId(id),
            edge,
            workers: [worker(replica, 0), worker(replica, 1)]
                .into_iter()
                .collect(),
            pages: 4,
            deadline: Time(100),
        }
    }

    #[test]
    fn a_copy_that_waits_for_no_worker_is_detected() {
        let (mut transfers, mut timers) = (Transfers::default(), Timers::default());
        transfers.begin(begun(3, Edge::LOAD, 0), &mut timers);
        assert_eq!(transfers.check(), Ok(()));
        for transfer in transfers.in_flight.values_mut() {
            transfer.touching.clear();
        }
        let why = transfers.check().expect_err("no worker is awaited");
        assert_eq!(why.to_string(), "transfer 3 waits for no worker");
    }

    #[test]
    fn copies_are_counted_by_the_worker_that_owes_them_and_by_edge() {
        let ratio = Ratio::new(4).expect("in bounds");
        let settings = LeaderSettings::new(Epoch(1), 2, ratio, AnchorKey::new([1; 32]));
        let mut leader = Leader::new(settings);
        for (id, edge, replica) in [
            (1, Edge::STORE, 0),
            (2, Edge::STORE, 0),
            (3, Edge::LOAD, 0),
            (4, Edge::LOAD, 1),
        ] {
            let begun = begun(id, edge, replica);
            leader.transfers.begin(begun, &mut leader.timers);
        }
        for (worker, stores, loads) in [
            (worker(0, 0), 2, 1),
            (worker(0, 1), 2, 1),
            (worker(1, 1), 0, 1),
            (worker(0, 2), 0, 0),
        ] {
            assert_eq!(leader.awaited_from(worker, Edge::STORE), stores);
            assert_eq!(leader.awaited_from(worker, Edge::LOAD), loads);
        }
    }
}
