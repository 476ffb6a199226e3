//! The open copies of a worker: which wait for their engine, which are ready, which run, and when they must have ended.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_types::{Copy, Direction, EngineId, RequestId, Time, TransferId};

use crate::Contradiction;

use super::BatchId;
use super::lanes::Lanes;

/// The stage of an open copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CopyPhase {
    /// Waits until the engine has written its pages.
    Waiting,
    /// Waits until fewer copies of its direction run.
    Queued,
    /// May read and write memory.
    Running,
}

/// An open copy.
#[derive(Debug)]
pub(super) struct OpenCopy {
    pub(super) copy: Copy,
    /// The order that began the copy, and whose answer reports its end.
    pub(super) batch: BatchId,
    phase: CopyPhase,
    /// When the copy must have ended, once it was ordered to stop. Pages that a stopped store writes are never listed.
    stopped: Option<Time>,
    /// The connection to the leader that ordered the copy is lost. Its end is not reported, because another leader may
    /// use the same number for a copy of its own.
    pub(super) orphan: bool,
}

impl OpenCopy {
    /// True once the copy was ordered to stop.
    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.is_some()
    }
}

/// Effect of stopping a copy.
pub(super) enum Stop {
    /// No such copy is open, or it was ordered to stop before.
    Nothing,
    /// The copy does not run: it ends at once.
    Ends,
    /// The copy runs: it is ordered to stop, and ends later.
    Order,
}

/// A copy whose time has passed.
pub(super) enum Expired {
    /// The deadline of the copy.
    Deadline(TransferId),
    /// The fence of a stopped copy, which has not ended.
    Fence,
}

/// The open copies. See the module.
#[derive(Debug, Default)]
pub(super) struct Copies {
    open: BTreeMap<TransferId, OpenCopy>,
    /// Copies that wait for their engine, by the request that must be written.
    waiting: BTreeSet<(RequestId, TransferId)>,
    /// Open copies, by request.
    requests: BTreeSet<(RequestId, TransferId)>,
    lanes: Lanes,
    /// Deadlines of copies, and fences of stopped copies.
    deadlines: BTreeSet<(Time, TransferId)>,
}

impl Copies {
    pub(super) fn len(&self) -> usize {
        self.open.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    pub(super) fn contains(&self, transfer: TransferId) -> bool {
        self.open.contains_key(&transfer)
    }

    /// The numbers of all open copies, in ascending order.
    pub(super) fn ids(&self) -> Vec<TransferId> {
        self.open.keys().copied().collect()
    }

    /// The open copies for a request of an engine.
    pub(super) fn of_request(&self, engine: EngineId, request: RequestId) -> Vec<TransferId> {
        let range = (request, TransferId(0))..=(request, TransferId(u64::MAX));
        let its = |transfer: &TransferId| {
            let task = self.open.get(transfer);
            task.is_some_and(|task| task.copy.engine == engine)
        };
        let copies = self.requests.range(range).map(|(_, transfer)| *transfer);
        copies.filter(its).collect()
    }

    /// Adds a copy: ready if its pages are written, else waiting.
    pub(super) fn begin(&mut self, batch: BatchId, copy: Copy, written: bool) {
        let transfer = copy.transfer;
        self.deadlines.insert((copy.deadline, transfer));
        self.requests.insert((copy.request, transfer));
        let phase = if written {
            self.lanes.push(copy.direction, transfer);
            CopyPhase::Queued
        } else {
            self.waiting.insert((copy.after, transfer));
            CopyPhase::Waiting
        };
        let task = OpenCopy {
            copy,
            batch,
            phase,
            stopped: None,
            orphan: false,
        };
        self.open.insert(transfer, task);
    }

    /// The engine has written everything up to this request: the copies that waited for it are ready.
    pub(super) fn wrote(&mut self, through: RequestId) {
        while let Some((request, transfer)) = self
            .waiting
            .first()
            .copied()
            .filter(|(request, _)| *request <= through)
        {
            self.waiting.remove(&(request, transfer));
            if let Some(task) = self.open.get_mut(&transfer) {
                task.phase = CopyPhase::Queued;
                self.lanes.push(task.copy.direction, transfer);
            }
        }
    }

    /// Starts ready copies up to `running_max` per direction, loads first.
    pub(super) fn start(&mut self, running_max: usize) -> Vec<Copy> {
        let mut started = Vec::new();
        for direction in [Direction::Load, Direction::Store] {
            while let Some(transfer) = self.lanes.pop(direction, running_max) {
                let queued = self.open.get_mut(&transfer).filter(|task| {
                    task.phase == CopyPhase::Queued && task.copy.direction == direction
                });
                if let Some(task) = queued {
                    task.phase = CopyPhase::Running;
                    self.lanes.started(direction);
                    started.push(task.copy.clone());
                }
            }
        }
        let open = &self.open;
        let queued = |transfer| {
            open.get(&transfer)
                .is_some_and(|task| task.phase == CopyPhase::Queued)
        };
        self.lanes.clean(open.len(), queued);
        started
    }

    /// Stops a copy. A running one must have ended by `fence`.
    pub(super) fn stop(&mut self, transfer: TransferId, fence: Time) -> Stop {
        let Some(task) = self.open.get_mut(&transfer) else {
            return Stop::Nothing;
        };
        if task.phase != CopyPhase::Running {
            return Stop::Ends;
        }
        if task.stopped.is_some() {
            return Stop::Nothing;
        }
        task.stopped = Some(fence);
        self.deadlines.remove(&(task.copy.deadline, transfer));
        self.deadlines.insert((fence, transfer));
        Stop::Order
    }

    /// No end of an open copy is reported: the leader that ordered them is lost.
    pub(super) fn orphan_all(&mut self) {
        self.open.values_mut().for_each(|task| task.orphan = true);
    }

    /// Removes a copy that ended.
    pub(super) fn end(&mut self, transfer: TransferId) -> Option<OpenCopy> {
        let task = self.open.remove(&transfer)?;
        if task.phase == CopyPhase::Running {
            self.lanes.ended(task.copy.direction);
        }
        self.requests.remove(&(task.copy.request, transfer));
        let deadline = task.stopped.unwrap_or(task.copy.deadline);
        self.deadlines.remove(&(deadline, transfer));
        self.waiting.remove(&(task.copy.after, transfer));
        Some(task)
    }

    /// When the next copy expires.
    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// The next copy whose deadline or fence has passed; returned once.
    pub(super) fn take_expired(&mut self, now: Time) -> Option<Expired> {
        let (at, transfer) = self
            .deadlines
            .first()
            .copied()
            .filter(|(at, _)| *at <= now)?;
        self.deadlines.pop_first();
        let stopped = self.open.get(&transfer).and_then(|task| task.stopped);
        Some(match stopped == Some(at) {
            true => Expired::Fence,
            false => Expired::Deadline(transfer),
        })
    }

    #[cfg(test)]
    pub(super) fn queue_len(&mut self, direction: Direction) -> usize {
        self.lanes.entries(direction)
    }

    /// Recounts the running copies, and compares the indexes with the copies. `Err` names the first contradiction.
    pub(super) fn check(&self) -> Result<(), Contradiction> {
        for direction in [Direction::Load, Direction::Store] {
            let tasks = self.open.values();
            let running = tasks
                .filter(|task| task.phase == CopyPhase::Running && task.copy.direction == direction)
                .count();
            let counted = self.lanes.running(direction);
            if running != counted {
                return Err(format!(
                    "{running} copies run in direction {direction:?}, the lane counts {counted}"
                )
                .into());
            }
        }
        let waiting = self.open.values();
        let waiting = waiting
            .filter(|task| task.phase == CopyPhase::Waiting)
            .count();
        if waiting != self.waiting.len() || self.requests.len() != self.open.len() {
            return Err(format!(
                "{} copies, {waiting} of them wait; the indexes have {} and {}",
                self.open.len(),
                self.requests.len(),
                self.waiting.len()
            )
            .into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_types::{FragmentPair, PageList};

    fn copy(transfer: u64, direction: Direction) -> Copy {
        Copy {
            transfer: TransferId(transfer),
            engine: EngineId([1; 16]),
            direction,
            pairs: vec![FragmentPair {
                src: PageList::run(0, 1),
                dst: PageList::run(0, 1),
            }],
            request: RequestId(transfer),
            after: RequestId(transfer),
            record: None,
            deadline: Time(100),
        }
    }

    /// Two ready loads and two waiting stores, of which one load runs.
    fn copies() -> Copies {
        let mut copies = Copies::default();
        for (transfer, direction) in [
            (1, Direction::Load),
            (2, Direction::Load),
            (3, Direction::Store),
            (4, Direction::Store),
        ] {
            copies.begin(
                BatchId(1),
                copy(transfer, direction),
                direction == Direction::Load,
            );
        }
        let started: Vec<TransferId> = copies.start(1).iter().map(|copy| copy.transfer).collect();
        assert_eq!(started, [TransferId(1)]);
        assert_eq!((copies.len(), copies.check()), (4, Ok(())));
        copies
    }

    #[test]
    fn counts_that_differ_from_the_copies_are_detected() {
        let wrong = |spoil: fn(&mut Copies), expected: &str| {
            let mut copies = copies();
            spoil(&mut copies);
            let why = copies.check().expect_err(expected).to_string();
            assert_eq!(why, expected);
        };
        wrong(
            |copies| copies.lanes.started(Direction::Store),
            "0 copies run in direction Store, the lane counts 1",
        );
        wrong(
            |copies| copies.lanes.ended(Direction::Load),
            "1 copies run in direction Load, the lane counts 0",
        );
        wrong(
            |copies| copies.waiting.clear(),
            "4 copies, 2 of them wait; the indexes have 4 and 0",
        );
        wrong(
            |copies| copies.requests.clear(),
            "4 copies, 2 of them wait; the indexes have 0 and 2",
        );
    }

    #[test]
    fn a_queue_forgets_copies_that_ended_in_it_and_no_others() {
        let mut copies = Copies::default();
        for transfer in 1..=200 {
            copies.begin(BatchId(1), copy(transfer, Direction::Load), true);
        }
        let start = |copies: &mut Copies| -> Vec<TransferId> {
            copies.start(1).iter().map(|copy| copy.transfer).collect()
        };
        assert_eq!(start(&mut copies), [TransferId(1)]);
        (2..200).for_each(|transfer| assert!(copies.end(TransferId(transfer)).is_some()));
        assert!(start(&mut copies).is_empty(), "one copy runs");
        assert_eq!(copies.lanes.entries(Direction::Load), 1);
        assert!(copies.end(TransferId(1)).is_some());
        assert_eq!(start(&mut copies), [TransferId(200)]);
    }

    #[test]
    fn a_copy_that_ended_in_its_queue_is_not_started() {
        let mut copies = copies();
        assert!(
            copies
                .end(TransferId(2))
                .is_some_and(|ended| ended.copy.transfer == TransferId(2))
        );
        assert!(copies.end(TransferId(1)).is_some());
        assert!(
            copies.start(8).is_empty(),
            "the stores wait for their engine"
        );
        copies.wrote(RequestId(3));
        let started: Vec<TransferId> = copies.start(8).iter().map(|copy| copy.transfer).collect();
        assert_eq!(started, [TransferId(3)]);
        assert_eq!((copies.len(), copies.check()), (2, Ok(())));
        assert!(copies.end(TransferId(2)).is_none(), "its end is known");
    }
}
