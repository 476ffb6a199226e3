//! Runs copies on threads of its own, one for each direction, so that a load never waits for a store.
//!
//! The worker's actor gives copies to [`CopyThreads`], and the threads report their ends to it. [`TransferActor`] owns the
//! threads: it starts them, stops them with all of their copies, and fails when one of them has panicked.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam::channel::{Receiver, Sender, bounded};
use ractor::{Actor, ActorProcessingErr, ActorRef};

use crate::gpu::{EngineSide, Gpu};
use kvferry_cuda::RegisteredDevice;
use kvferry_memory::{
    COPY_PART_BYTES, CancelFlag, CopyEngine, CopyError, CopyJob, Depot, RegisteredMemory,
    WaitingLoad, WaitingLoads,
};
use kvferry_transport::Clock;
use kvferry_types::{Direction, EndedCopy, FragmentPair, GroupId, Time, Transfer, TransferId};

pub(super) use kvferry_core::RUNNING_COPIES_MAX;

/// Receives the ends of copies, on the thread that made them. Returns false once the worker has stopped.
pub type ReportEnds = Arc<dyn Fn(Vec<EndedCopy>) -> bool + Send + Sync>;

/// Copies of one direction between an engine's memory and host memory, which run in this order.
pub struct CopyBatch {
    /// The direction of all of them.
    pub direction: Direction,
    /// The copies, each with the time at which it was ready.
    pub copies: Vec<(Transfer, Time)>,
    /// The engine's memory.
    pub memory: EngineSide,
    /// The depot.
    pub depot: Arc<Depot>,
    /// With loads: stores yield their CPUs until the first of these starts.
    pub waiting: Option<WaitingLoad>,
}

/// A batch on its way to a copying thread.
struct HostBatch {
    direction: Direction,
    copies: Vec<(Transfer, Time, Arc<CancelFlag>)>,
    memory: RegisteredMemory,
    depot: Arc<Depot>,
    /// Dropped when the first of these copies starts.
    waiting: Option<WaitingLoad>,
}

/// The queues of the copying threads, and the flags that stop copies. Cheap to clone.
#[derive(Clone, Default)]
pub struct CopyThreads(Arc<Mutex<CopyState>>);

#[derive(Default)]
struct CopyState {
    /// Of every copy that was given to a thread and has not ended.
    flags: HashMap<TransferId, Arc<CancelFlag>>,
    /// Of stores and of loads; `None` before the threads start and after they have stopped.
    queues: Option<[Sender<HostBatch>; 2]>,
}

/// A copy that was not given to a thread, and why.
#[derive(Debug, thiserror::Error)]
#[error("copies are not started: {0}")]
pub struct NotStarted(&'static str);

impl CopyThreads {
    fn state(&self) -> MutexGuard<'_, CopyState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives copies to the thread of their direction, or to their GPU's. Never blocks.
    ///
    /// # Errors
    ///
    /// The threads have ended, or have more copies than a worker runs at a time.
    pub fn start(&self, batch: CopyBatch) -> Result<(), NotStarted> {
        let CopyBatch {
            direction,
            copies,
            memory,
            depot,
            waiting,
        } = batch;
        let mut state = self.state();
        let queues = state.queues.as_ref();
        let [stores, loads] = queues.ok_or(NotStarted("the copying threads do not run"))?;
        let queue = match direction {
            Direction::Store => stores.clone(),
            Direction::Load => loads.clone(),
        };
        let memory = match memory {
            EngineSide::Host(memory) => memory,
            EngineSide::Device(memory, gpu) => {
                return state.start_on(&gpu, direction, copies, &memory);
            }
        };
        let copies = copies
            .into_iter()
            .map(|(copy, ready_at)| {
                let flag = state.flag(copy.id);
                (copy, ready_at, flag)
            })
            .collect();
        let batch = HostBatch {
            direction,
            copies,
            memory,
            depot,
            waiting,
        };
        // The core runs at most as many copies as a queue has places, beside that of a probe.
        let sent = queue.try_send(batch);
        sent.map_err(|_| NotStarted("a copying thread has ended, or its queue is full"))
    }

    /// Stops a copy between two steps (CPU) or parts (GPU). Its end is still reported.
    pub fn stop(&self, transfer: TransferId) {
        if let Some(flag) = self.state().flags.get(&transfer) {
            flag.cancel();
        }
    }

    /// Removes the flags of copies that have ended.
    pub(super) fn ended(&self, copies: &[EndedCopy]) {
        let mut state = self.state();
        for copy in copies {
            state.flags.remove(&copy.transfer);
        }
    }

    /// Stops all copies, and takes no others. The threads end.
    fn close(&self) {
        let mut state = self.state();
        state.queues = None;
        state.flags.values().for_each(|flag| flag.cancel());
    }
}

impl CopyState {
    fn flag(&mut self, transfer: TransferId) -> Arc<CancelFlag> {
        let flag = Arc::new(CancelFlag::default());
        self.flags.insert(transfer, Arc::clone(&flag));
        flag
    }

    /// Submits copies to the GPU's thread, which reports their ends.
    fn start_on(
        &mut self,
        gpu: &Gpu,
        direction: Direction,
        copies: Vec<(Transfer, Time)>,
        memory: &RegisteredDevice,
    ) -> Result<(), NotStarted> {
        for (copy, _) in copies {
            let flag = self.flag(copy.id);
            let group = copy.device.map_or(GroupId(0), |device| device.group);
            let page_bytes = memory
                .layout
                .of(group)
                .map_or(1, |layout| layout.page_bytes);
            let parts = FragmentPair::parts(copy.pairs, page_bytes, COPY_PART_BYTES);
            if !gpu.copy((copy.id, direction, group), parts, memory, flag) {
                return Err(NotStarted("the GPU's thread takes no copies"));
            }
        }
        Ok(())
    }
}

/// A message to the transfer actor.
pub enum TransferMessage {
    /// This thread has panicked. Its copies never end.
    Panicked(&'static str),
}

/// Arguments of the transfer actor.
pub struct TransferArguments {
    /// Threads that share one copy.
    pub copy_threads: usize,
    /// The loads to which stores yield their CPUs.
    pub waiting: WaitingLoads,
    /// The clock of the times at which copies were ready.
    pub clock: Clock,
    /// Where the worker gives copies to the threads.
    pub threads: CopyThreads,
    /// Receives the ends of copies.
    pub report: ReportEnds,
}

/// The actor that owns the copying threads.
pub struct TransferActor;

/// The actor's state.
pub struct State {
    threads: CopyThreads,
    handles: Vec<JoinHandle<()>>,
}

impl Actor for TransferActor {
    type Msg = TransferMessage;
    type State = State;
    type Arguments = TransferArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<TransferMessage>,
        arguments: TransferArguments,
    ) -> Result<State, ActorProcessingErr> {
        let engine = CopyEngine::new(arguments.copy_threads)?;
        let engine = Arc::new(engine.yielding_to(arguments.waiting));
        let (stores, store_work) = bounded(RUNNING_COPIES_MAX);
        // One more, for the copy of a probe.
        let (loads, load_work) = bounded(RUNNING_COPIES_MAX + 1);
        arguments.threads.state().queues = Some([stores, loads]);
        // From here on, a failed start closes the queues when it drops the state.
        let mut state = State {
            threads: arguments.threads.clone(),
            handles: Vec::new(),
        };
        for (name, work) in [
            ("kvferry-gather", store_work),
            ("kvferry-scatter", load_work),
        ] {
            let actor = myself.clone();
            let thread = CopyThread {
                work,
                engine: Arc::clone(&engine),
                threads: arguments.threads.clone(),
                report: Arc::clone(&arguments.report),
                clock: arguments.clock,
            };
            let run = move || {
                let ran = catch_unwind(AssertUnwindSafe(|| thread.run()));
                if ran.is_err() && actor.cast(TransferMessage::Panicked(name)).is_err() {
                    tracing::error!("{name} panicked after its actor had stopped");
                }
            };
            let builder = std::thread::Builder::new().name(name.to_owned());
            state.handles.push(builder.spawn(run)?);
        }
        Ok(state)
    }

    async fn handle(
        &self,
        _myself: ActorRef<TransferMessage>,
        message: TransferMessage,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        let TransferMessage::Panicked(name) = message;
        state.threads.close();
        tracing::error!("the thread {name} has panicked: this worker ends");
        Err(format!("the thread {name} has panicked").into())
    }

    async fn post_stop(
        &self,
        _myself: ActorRef<TransferMessage>,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        state.threads.close();
        for handle in state.handles.drain(..) {
            if handle.join().is_err() {
                tracing::error!("a copying thread panicked");
            }
        }
        Ok(())
    }
}

/// The threads hold the queues, too, so that these do not close by themselves: an actor that fails has no `post_stop`.
impl Drop for State {
    fn drop(&mut self) {
        self.threads.close();
    }
}

/// A copying thread.
struct CopyThread {
    work: Receiver<HostBatch>,
    engine: Arc<CopyEngine>,
    threads: CopyThreads,
    report: ReportEnds,
    clock: Clock,
}

impl CopyThread {
    fn run(&self) {
        while let Ok(HostBatch {
            direction,
            copies,
            memory,
            depot,
            waiting,
        }) = self.work.recv()
        {
            drop(waiting);
            // Reports each end separately, so that a small copy is not reported after a large one of the same order. The
            // last end is reported after the memory is released.
            let mut last = None;
            for (copy, ready_at, cancel) in copies {
                let waited_us = ready_at.until(self.clock.now()).as_micros();
                let copy = (copy, direction);
                let ended = copied(
                    copy,
                    &cancel,
                    &self.engine,
                    &memory,
                    &depot,
                    COPY_PART_BYTES,
                );
                let EndedCopy {
                    transfer,
                    bytes,
                    copy_us,
                    ..
                } = ended;
                // `kvferry bench lanes` reads these lines.
                tracing::debug!(%transfer, ?direction, waited_us, copy_us, bytes, "copy ended");
                if last.replace(ended).is_some_and(|ended| !self.end(ended)) {
                    return;
                }
            }
            drop((memory, depot));
            if last.is_some_and(|ended| !self.end(ended)) {
                return;
            }
        }
    }

    /// Reports the end of a copy. Returns false once the worker has stopped.
    fn end(&self, ended: EndedCopy) -> bool {
        self.threads.ended(&[ended]);
        (self.report)(vec![ended])
    }
}

/// Runs one copy. A load runs in parts, so that the pages copied before it was stopped can be used.
fn copied(
    (transfer, direction): (Transfer, Direction),
    cancel: &Arc<CancelFlag>,
    engine: &CopyEngine,
    memory: &RegisteredMemory,
    depot: &Arc<Depot>,
    load_part_bytes: u64,
) -> EndedCopy {
    let (begun, id) = (Instant::now(), transfer.id);
    let part_bytes = match direction {
        Direction::Store => u64::MAX,
        Direction::Load => load_part_bytes,
    };
    let mut ended = EndedCopy::complete(id);
    let group = transfer.device.map_or(GroupId(0), |device| device.group);
    let Some(layout) = memory.layout.of(group) else {
        tracing::error!(transfer = %id, %group, "copy of no registered group refused");
        ended.complete = false;
        return ended;
    };
    for pairs in FragmentPair::parts(transfer.pairs, layout.page_bytes, part_bytes) {
        let pages: u64 = pairs.iter().map(|pair| pair.dst.pages()).sum();
        let job = CopyJob {
            direction,
            layout: Arc::clone(layout),
            device: Arc::clone(&memory.memory),
            depot: Arc::clone(depot),
            pairs,
            cancel: Arc::clone(cancel),
        };
        match engine.run(&job) {
            Ok(report) => {
                ended.bytes += report.bytes;
                ended.complete_pages += u32::try_from(pages).unwrap_or(0);
            }
            Err(error) => {
                match error {
                    CopyError::Cancelled { .. } => tracing::info!(transfer = %id, "copy cancelled"),
                    _ => tracing::error!(transfer = %id, %error, "copy refused"),
                }
                ended.complete = false;
                break;
            }
        }
    }
    ended.copy_us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
    ended
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_memory::{EngineMemory, SharedBuffer, validate};
    use kvferry_types::{
        Allocation, AllocationHandle, AllocationKind, Attention, Edge, GroupMemory, Nonce,
        PageList, Rank, Registration, TensorRole, TensorView,
    };

    const PAGES: u32 = 8;
    const PAGE_BYTES: u64 = 4096;

    /// Engine memory and a depot of 8 pages each.
    fn memories() -> (RegisteredMemory, Arc<Depot>) {
        let bytes = u64::from(PAGES) * PAGE_BYTES;
        let registration = Registration {
            groups: vec![GroupMemory {
                attention: Attention::Full,
                window_tokens: 0,
                eagle: false,
                engine_page_tokens: 16,
                device_pages: PAGES,
                layers: 1,
                tensors: vec![TensorView {
                    layer: 0,
                    role: TensorRole::Kv,
                    allocation: 0,
                    offset_bytes: 0,
                    shape: vec![u64::from(PAGES), PAGE_BYTES],
                    strides: vec![PAGE_BYTES, 1],
                    element_bytes: 1,
                    page_axis: 0,
                    page_bytes: PAGE_BYTES,
                    page_stride_bytes: PAGE_BYTES,
                    slices: None,
                }],
            }],
            hash_tokens: 0,
            hit_tokens: 0,
            content: b"test".to_vec(),
            rank: Rank(0),
            tp_size: 1,
            shard: 0,
            allocations: vec![Allocation {
                kind: AllocationKind::SharedMemory,
                handle: AllocationHandle::Ticket([0; 16]),
                bytes,
            }],
            nonce: Nonce {
                allocation: 0,
                offset_bytes: 0,
                bytes: vec![0; 16],
            },
            proofs: Vec::new(),
            device_uuid: None,
            timeline: None,
        };
        let layout = validate(&registration).expect("consistent");
        let buffer = SharedBuffer::create("kvferry-test", bytes).expect("memory");
        let memory = EngineMemory::new(&registration, vec![buffer]).expect("fits");
        let depot = Depot::create(Depot::bytes_for(PAGES, PAGE_BYTES)).expect("memory");
        let memory = RegisteredMemory {
            memory: Arc::new(memory),
            layout: Arc::new(layout),
        };
        depot.hold_pages_of(PAGE_BYTES).expect("writable");
        (memory, Arc::new(depot))
    }

    /// A started actor, and what gives it copies.
    async fn started(report: ReportEnds) -> (ActorRef<TransferMessage>, CopyThreads) {
        let threads = CopyThreads::default();
        let arguments = TransferArguments {
            copy_threads: 1,
            waiting: WaitingLoads::default(),
            clock: Clock::start(),
            threads: threads.clone(),
            report,
        };
        let (actor, _) = Actor::spawn(None, TransferActor, arguments)
            .await
            .expect("threads");
        (actor, threads)
    }

    fn load(id: u64) -> CopyBatch {
        let (memory, depot) = memories();
        let copy = Transfer {
            id: TransferId(id),
            edge: Edge::LOAD,
            device: None,
            page_bytes: PAGE_BYTES,
            pairs: vec![FragmentPair {
                src: PageList::run(0, 1),
                dst: PageList::run(0, 1),
            }],
            record: None,
            deadline: Time::NEVER,
        };
        CopyBatch {
            direction: Direction::Load,
            copies: vec![(copy, Time(0))],
            memory: EngineSide::Host(memory),
            depot,
            waiting: None,
        }
    }

    #[tokio::test]
    async fn an_ended_copy_has_no_flag_and_stopped_threads_take_no_copies() {
        let (ends, ended) = bounded(1);
        let report = move |copies| ends.send(copies).is_ok();
        let (actor, threads) = started(Arc::new(report)).await;
        threads.start(load(3)).expect("a thread that runs");
        let limit = std::time::Duration::from_secs(60);
        let copies = ended.recv_timeout(limit).expect("its end");
        let [copy] = &copies[..] else {
            panic!("one copy ended, not {copies:?}");
        };
        assert!(copy.transfer == TransferId(3) && copy.complete, "{copy:?}");
        assert!(threads.state().flags.is_empty());
        actor.stop_and_wait(None, None).await.expect("stopped");
        let why = threads.start(load(4)).expect_err("no thread runs");
        assert!(why.to_string().contains("do not run"), "{why}");
    }

    #[tokio::test]
    async fn a_thread_that_panics_ends_its_actor() {
        let (actor, threads) = started(Arc::new(|_| panic!("a defect"))).await;
        threads.start(load(3)).expect("a thread that runs");
        let limit = std::time::Duration::from_secs(60);
        actor.wait(Some(limit)).await.expect("the actor ends");
        let why = threads.start(load(4)).expect_err("its threads end too");
        assert!(why.to_string().contains("do not run"), "{why}");
    }

    #[test]
    fn nothing_is_copied_from_or_to_a_depot_with_pages_of_another_size() {
        let (memory, depot) = memories();
        let engine = CopyEngine::new(1).expect("threads");
        let run = |direction| {
            let transfer = Transfer {
                id: TransferId(7),
                edge: Edge::STORE,
                device: None,
                page_bytes: PAGE_BYTES,
                pairs: vec![FragmentPair {
                    src: PageList::run(0, 2),
                    dst: PageList::run(0, 2),
                }],
                record: None,
                deadline: Time::NEVER,
            };
            let copy = (transfer, direction);
            let ended = copied(copy, &Arc::default(), &engine, &memory, &depot, PAGE_BYTES);
            (
                ended.transfer,
                ended.complete,
                ended.complete_pages,
                ended.bytes,
            )
        };
        let refused = (TransferId(7), false, 0, 0);
        for direction in [Direction::Store, Direction::Load] {
            depot.hold_pages_of(PAGE_BYTES / 2).expect("writable");
            assert_eq!(run(direction), refused, "pages of half the size");
            depot.hold_pages_of(PAGE_BYTES).expect("writable");
            assert!(run(direction).1, "pages of this size");
        }
    }

    #[test]
    fn a_load_that_fails_in_the_middle_reports_the_pages_before() {
        let (memory, depot) = memories();
        let engine = CopyEngine::new(1).expect("threads");
        let run = |direction, last: u32| {
            let pages = |start, count| FragmentPair {
                src: PageList::run(start, count),
                dst: PageList::run(start, count),
            };
            let transfer = Transfer {
                id: TransferId(1),
                edge: Edge::STORE,
                device: None,
                page_bytes: PAGE_BYTES,
                pairs: vec![pages(0, 2), pages(2, 1), pages(last, 2)],
                record: None,
                deadline: Time::NEVER,
            };
            let copy = (transfer, direction);
            let ended = copied(copy, &Arc::default(), &engine, &memory, &depot, PAGE_BYTES);
            (
                ended.complete,
                ended.complete_pages,
                ended.bytes / PAGE_BYTES,
            )
        };
        assert_eq!(run(Direction::Load, 6), (true, 5, 5));
        assert_eq!(run(Direction::Load, PAGES), (false, 3, 3));
        assert_eq!(
            run(Direction::Store, PAGES),
            (false, 0, 0),
            "a store is one"
        );
    }
}
