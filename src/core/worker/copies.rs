//! The open copies of a worker: which wait for their engine, which are ready, which run, and when they must have ended.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use kvferry_types::{Edge, EngineId, RequestId, Time, Transfer, TransferId};

use crate::Contradiction;

use super::lanes::Lanes;
use super::{BatchId, WorkerSettings};

/// The stage of an open copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CopyPhase {
    /// Waits until the engine has written its pages.
    Waiting,
    /// Waits until fewer copies of its edge run and the rate of the edge permits its start.
    Queued,
    /// May read and write memory.
    Running,
}

/// The open copies of one edge.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EdgeLoad {
    /// Copies that wait until their engine has written its pages.
    pub waiting: u64,
    /// Copies that wait for other copies, or for the rate of the edge.
    pub queued: u64,
    /// Copies that run.
    pub running: u64,
}

/// An open copy.
#[derive(Debug)]
pub(super) struct OpenCopy {
    pub(super) transfer: Transfer,
    /// Bytes that are copied if all of it is copied.
    bytes: u64,
    /// The order that began the copy, and whose answer reports its end.
    pub(super) batch: BatchId,
    phase: CopyPhase,
    /// When the copy was ordered and its pages were written, whichever is later.
    ready_at: Time,
    /// When the copy must have ended, once it was ordered to stop. Pages that a stopped store writes are never listed.
    stopped: Option<Time>,
    /// The connection to the leader that ordered the copy is lost. Its end is not reported, because another leader may
    /// use the same number for a copy of its own.
    pub(super) orphan: bool,
}

impl OpenCopy {
    /// The request that the copy is for; 0 if it touches no engine's memory.
    fn request(&self) -> RequestId {
        self.transfer
            .device
            .map_or(RequestId(0), |device| device.request)
    }

    /// The request up to which the engine must have written before the copy starts.
    fn after(&self) -> RequestId {
        self.transfer
            .device
            .map_or(RequestId(0), |device| device.after)
    }

    /// When a copy that has run was ready to run; `None` for one that never ran.
    pub(super) fn ran_since(&self) -> Option<Time> {
        (self.phase == CopyPhase::Running).then_some(self.ready_at)
    }

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
    /// Open copies that touch an engine's memory.
    of_device: usize,
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

    /// When an open copy was ready, if it is.
    pub(super) fn ready_at(&self, transfer: TransferId) -> Option<Time> {
        let task = self.open.get(&transfer);
        let ready = task.filter(|task| task.phase != CopyPhase::Waiting);
        ready.map(|task| task.ready_at)
    }

    /// The open copies of each edge that has any, by what they wait for.
    pub(super) fn loads(&self) -> BTreeMap<Edge, EdgeLoad> {
        let mut loads: BTreeMap<Edge, EdgeLoad> = BTreeMap::new();
        for task in self.open.values() {
            let load = loads.entry(task.transfer.edge).or_default();
            match task.phase {
                CopyPhase::Waiting => load.waiting += 1,
                CopyPhase::Queued => load.queued += 1,
                CopyPhase::Running => load.running += 1,
            }
        }
        loads
    }

    /// The numbers of all open copies, in ascending order.
    pub(super) fn ids(&self) -> Vec<TransferId> {
        self.open.keys().copied().collect()
    }

    /// True while a copy that touches an engine's memory is open.
    pub(super) fn has_device(&self) -> bool {
        self.of_device > 0
    }

    /// The numbers of the open copies that touch an engine's memory, in ascending order.
    pub(super) fn ids_of_device(&self) -> Vec<TransferId> {
        let open = self.open.iter();
        let of_device = open.filter(|(_, task)| task.transfer.device.is_some());
        of_device.map(|(id, _)| *id).collect()
    }

    /// The open copies for these requests of an engine.
    pub(super) fn of_requests(
        &self,
        engine: EngineId,
        requests: RangeInclusive<RequestId>,
    ) -> impl Iterator<Item = TransferId> {
        let (first, last) = (*requests.start(), *requests.end());
        let range = (first, TransferId(0))..=(last, TransferId(u64::MAX));
        let its = move |transfer: &TransferId| {
            let task = self.open.get(transfer);
            let device = task.and_then(|task| task.transfer.device);
            device.is_some_and(|device| device.engine == engine)
        };
        let copies = self.requests.range(range).map(|(_, transfer)| *transfer);
        copies.filter(its)
    }

    /// Adds a copy that moves this many bytes: ready if its pages are written, else waiting.
    pub(super) fn begin(
        &mut self,
        now: Time,
        batch: BatchId,
        transfer: Transfer,
        bytes: u64,
        written: bool,
    ) {
        let id = transfer.id;
        let mut task = OpenCopy {
            transfer,
            bytes,
            batch,
            phase: CopyPhase::Waiting,
            ready_at: now,
            stopped: None,
            orphan: false,
        };
        self.deadlines.insert((task.transfer.deadline, id));
        self.requests.insert((task.request(), id));
        self.of_device += usize::from(task.transfer.device.is_some());
        if written {
            self.lanes.push(task.transfer.edge, id);
            task.phase = CopyPhase::Queued;
        } else {
            self.waiting.insert((task.after(), id));
        }
        self.open.insert(id, task);
    }

    /// The engine has written everything up to this request: the copies that waited for it are ready.
    pub(super) fn wrote(&mut self, now: Time, through: RequestId) {
        while let Some((request, transfer)) = self
            .waiting
            .first()
            .copied()
            .filter(|(request, _)| *request <= through)
        {
            self.waiting.remove(&(request, transfer));
            if let Some(task) = self.open.get_mut(&transfer) {
                task.phase = CopyPhase::Queued;
                task.ready_at = now;
                self.lanes.push(task.transfer.edge, transfer);
            }
        }
    }

    /// Starts ready copies up to the limit and the rate of each edge, in the order of [`Lanes::edges`]. Returns those of
    /// each edge that has any.
    pub(super) fn start(
        &mut self,
        now: Time,
        settings: &WorkerSettings,
    ) -> Vec<(Edge, Vec<Transfer>)> {
        let mut all = Vec::new();
        for edge in self.lanes.edges() {
            let mut started = Vec::new();
            let bytes_per_s = settings.bytes_per_s.get(&edge).copied();
            while let Some(transfer) = self.lanes.pop(now, edge, settings.running_max) {
                let queued = self.open.get_mut(&transfer);
                if let Some(task) = queued.filter(|task| task.phase == CopyPhase::Queued) {
                    task.phase = CopyPhase::Running;
                    self.lanes.started(now, edge, task.bytes, bytes_per_s);
                    started.push(task.transfer.clone());
                }
            }
            if !started.is_empty() {
                all.push((edge, started));
            }
        }
        let open = &self.open;
        let queued = |transfer| {
            open.get(&transfer)
                .is_some_and(|task| task.phase == CopyPhase::Queued)
        };
        self.lanes.clean(open.len(), queued);
        all
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
        self.deadlines.remove(&(task.transfer.deadline, transfer));
        self.deadlines.insert((fence, transfer));
        Stop::Order
    }

    /// Forgets the queues, after every copy in them was stopped. The next leader uses the numbers of these copies again, for
    /// copies of any edge.
    pub(super) fn forget_queues(&mut self) {
        self.lanes.clear_queues();
    }

    /// No end of an open copy is reported: the leader that ordered them is lost.
    pub(super) fn orphan_all(&mut self) {
        self.open.values_mut().for_each(|task| task.orphan = true);
    }

    /// Removes a copy that ended.
    pub(super) fn end(&mut self, transfer: TransferId) -> Option<OpenCopy> {
        let task = self.open.remove(&transfer)?;
        self.of_device -= usize::from(task.transfer.device.is_some());
        if task.phase == CopyPhase::Running {
            self.lanes.ended(task.transfer.edge);
        }
        self.requests.remove(&(task.request(), transfer));
        let deadline = task.stopped.unwrap_or(task.transfer.deadline);
        self.deadlines.remove(&(deadline, transfer));
        self.waiting.remove(&(task.after(), transfer));
        Some(task)
    }

    /// When the next copy expires.
    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// When the next copy starts that waits for nothing but the rate of its edge.
    pub(super) fn next_start(&self, running_max: usize) -> Option<Time> {
        self.lanes.next_start(running_max)
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
    pub(super) fn queue_len(&self, edge: Edge) -> usize {
        self.lanes.entries(edge)
    }

    /// Recounts the running copies, and compares the indexes with the copies. `Err` names the first contradiction.
    pub(super) fn check(&self) -> Result<(), Contradiction> {
        let mut running: BTreeMap<Edge, usize> = BTreeMap::new();
        let tasks = self.open.values();
        for task in tasks.filter(|task| task.phase == CopyPhase::Running) {
            *running.entry(task.transfer.edge).or_default() += 1;
        }
        let counted = self.lanes.running();
        if running != counted {
            return Err(format!("{running:?} copies run, the lanes count {counted:?}").into());
        }
        let of_device = self.ids_of_device().len();
        if of_device != self.of_device {
            let counted = self.of_device;
            return Err(format!("{of_device} copies of engine memory, counted {counted}").into());
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
    use kvferry_types::{DeviceEnd, FragmentPair, GroupId, PageList};

    fn copy(id: u64, edge: Edge) -> Transfer {
        let device = DeviceEnd {
            group: GroupId(0),
            engine: EngineId([1; 16]),
            request: RequestId(id),
            after: RequestId(id),
        };
        Transfer {
            id: TransferId(id),
            edge,
            device: Some(device),
            page_bytes: 1,
            pairs: vec![FragmentPair {
                src: PageList::run(0, 1),
                dst: PageList::run(0, 1),
            }],
            record: None,
            deadline: Time(100),
        }
    }

    /// Starts ready copies. Returns their ids.
    fn start(copies: &mut Copies, running_max: usize) -> Vec<TransferId> {
        let started = copies.start(Time(0), &WorkerSettings::new(running_max));
        let copies = started.iter().flat_map(|(_, copies)| copies);
        copies.map(|copy| copy.id).collect()
    }

    /// Two ready loads and two waiting stores, of which one load runs.
    fn copies() -> Copies {
        let mut copies = Copies::default();
        for (transfer, edge) in [
            (1, Edge::LOAD),
            (2, Edge::LOAD),
            (3, Edge::STORE),
            (4, Edge::STORE),
        ] {
            copies.begin(
                Time(0),
                BatchId(1),
                copy(transfer, edge),
                1,
                edge == Edge::LOAD,
            );
        }
        assert_eq!(start(&mut copies, 1), [TransferId(1)]);
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
            |copies| copies.lanes.started(Time(0), Edge::STORE, 1, None),
            "{Edge { from: Host, to: Device }: 1} copies run, the lanes count {Edge { from: Device, to: Host }: 1, Edge { from: Host, to: Device }: 1}",
        );
        wrong(
            |copies| copies.lanes.ended(Edge::LOAD),
            "{Edge { from: Host, to: Device }: 1} copies run, the lanes count {}",
        );
        wrong(
            |copies| copies.waiting.clear(),
            "4 copies, 2 of them wait; the indexes have 4 and 0",
        );
        wrong(
            |copies| copies.of_device = 3,
            "4 copies of engine memory, counted 3",
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
            copies.begin(Time(0), BatchId(1), copy(transfer, Edge::LOAD), 1, true);
        }
        assert_eq!(start(&mut copies, 1), [TransferId(1)]);
        (2..200).for_each(|transfer| assert!(copies.end(TransferId(transfer)).is_some()));
        assert!(start(&mut copies, 1).is_empty(), "one copy runs");
        assert_eq!(copies.lanes.entries(Edge::LOAD), 1);
        assert!(copies.end(TransferId(1)).is_some());
        assert_eq!(start(&mut copies, 1), [TransferId(200)]);
    }

    #[test]
    fn a_copy_that_ended_in_its_queue_is_not_started() {
        let mut copies = copies();
        assert!(
            copies
                .end(TransferId(2))
                .is_some_and(|ended| ended.transfer.id == TransferId(2))
        );
        assert!(copies.end(TransferId(1)).is_some());
        assert!(
            start(&mut copies, 8).is_empty(),
            "the stores wait for their engine"
        );
        copies.wrote(Time(0), RequestId(3));
        assert_eq!(start(&mut copies, 8), [TransferId(3)]);
        assert_eq!((copies.len(), copies.check()), (2, Ok(())));
        assert!(copies.end(TransferId(2)).is_none(), "its end is known");
    }
}
