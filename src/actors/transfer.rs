//! Runs copies on threads of its own, one for each direction, so that a load never waits for a store.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam::channel::{Receiver, Sender, bounded};
use ractor::{Actor, ActorProcessingErr, ActorRef, DerivedActorRef};

use crate::gpu::{EngineSide, Gpu};
use kvferry_cuda::RegisteredDevice;
use kvferry_memory::{
    COPY_PART_BYTES, CancelFlag, CopyEngine, CopyError, CopyJob, Depot, RegisteredMemory,
    WaitingLoad, WaitingLoads,
};
use kvferry_transport::Clock;
use kvferry_types::{
    Direction, EndedCopy, FragmentPair, GroupId, TierId, Time, Transfer, TransferId,
};

pub(super) use kvferry_core::RUNNING_COPIES_MAX;

/// A message to the transfer actor.
pub enum TransferMessage {
    /// Run these copies, in order within each direction.
    Start {
        /// The copies, each with the time at which it was ready.
        copies: Vec<(Transfer, Time)>,
        /// The engine's memory.
        memory: EngineSide,
        /// The depot.
        depot: Arc<Depot>,
        /// Present if the copies contain loads: stores yield their CPUs until the first of these loads starts.
        waiting: Option<WaitingLoad>,
    },
    /// Stop this copy between two steps (CPU) or parts (GPU).
    Stop(TransferId),
    /// From a copying thread: these copies have ended.
    Ended(Vec<EndedCopy>),
}

/// Arguments of the transfer actor.
pub struct TransferArguments {
    /// Threads that share one copy.
    pub copy_threads: usize,
    /// The loads to which stores yield their CPUs.
    pub waiting: WaitingLoads,
    /// The clock of the times at which copies were ready.
    pub clock: Clock,
    /// Receives the ends of copies.
    pub ended: DerivedActorRef<Vec<EndedCopy>>,
}

/// A batch of copies for a copying thread.
struct CopyBatch {
    direction: Direction,
    copies: Vec<(Transfer, Time, Arc<CancelFlag>)>,
    memory: RegisteredMemory,
    depot: Arc<Depot>,
    /// Dropped when the first of these copies starts.
    waiting: Option<WaitingLoad>,
}

/// The actor that runs copies.
pub struct TransferActor;

/// The actor's state.
pub struct State {
    ended: DerivedActorRef<Vec<EndedCopy>>,
    flags: HashMap<TransferId, Arc<CancelFlag>>,
    stores: Sender<CopyBatch>,
    loads: Sender<CopyBatch>,
    threads: Vec<JoinHandle<()>>,
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
        let mut threads = Vec::new();
        for (name, work) in [
            ("kvferry-gather", store_work),
            ("kvferry-scatter", load_work),
        ] {
            let (engine, actor) = (Arc::clone(&engine), myself.clone());
            let clock = arguments.clock;
            let thread = std::thread::Builder::new().name(name.to_owned());
            threads.push(thread.spawn(move || run(&work, &engine, &actor, clock))?);
        }
        Ok(State {
            ended: arguments.ended,
            flags: HashMap::new(),
            stores,
            loads,
            threads,
        })
    }

    async fn handle(
        &self,
        _myself: ActorRef<TransferMessage>,
        message: TransferMessage,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            TransferMessage::Start {
                copies,
                memory,
                depot,
                waiting,
            } => {
                let memory = match memory {
                    EngineSide::Host(memory) => memory,
                    EngineSide::Device(memory, gpu) => {
                        let copies = copies.into_iter().map(|(copy, _)| copy).collect();
                        return state.start_on(&gpu, copies, &memory);
                    }
                };
                let (stores, loads): (Vec<_>, Vec<_>) = copies
                    .into_iter()
                    .partition(|(transfer, _)| transfer.edge.to != TierId::Device);
                state.start((loads, waiting), Direction::Load, &memory, &depot)?;
                state.start((stores, None), Direction::Store, &memory, &depot)?;
            }
            TransferMessage::Stop(transfer) => {
                if let Some(flag) = state.flags.get(&transfer) {
                    flag.cancel();
                }
            }
            TransferMessage::Ended(copies) => {
                for copy in &copies {
                    state.flags.remove(&copy.transfer);
                }
                state.ended.cast(copies)?;
            }
        }
        Ok(())
    }

    async fn post_stop(
        &self,
        _myself: ActorRef<TransferMessage>,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        state.flags.values().for_each(|flag| flag.cancel());
        let (closed, _) = bounded(0);
        state.stores = closed.clone();
        state.loads = closed;
        for thread in state.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a copying thread panicked");
            }
        }
        Ok(())
    }
}

impl State {
    /// Submits copies to the GPU's thread, which reports their ends.
    fn start_on(
        &mut self,
        gpu: &Gpu,
        copies: Vec<Transfer>,
        memory: &RegisteredDevice,
    ) -> Result<(), ActorProcessingErr> {
        for copy in copies {
            let Some(direction) = copy.edge.direction() else {
                return Err(format!("{} from {} is not for a GPU", copy.id, copy.edge).into());
            };
            let flag = Arc::new(CancelFlag::default());
            self.flags.insert(copy.id, Arc::clone(&flag));
            let group = copy.device.map_or(GroupId(0), |device| device.group);
            let page_bytes = memory
                .layout
                .of(group)
                .map_or(1, |layout| layout.page_bytes);
            let parts = FragmentPair::parts(copy.pairs, page_bytes, COPY_PART_BYTES);
            if !gpu.copy((copy.id, direction, group), parts, memory, flag) {
                return Err("the GPU's thread takes no copies".into());
            }
        }
        Ok(())
    }

    fn start(
        &mut self,
        (copies, waiting): (Vec<(Transfer, Time)>, Option<WaitingLoad>),
        direction: Direction,
        memory: &RegisteredMemory,
        depot: &Arc<Depot>,
    ) -> Result<(), ActorProcessingErr> {
        if copies.is_empty() {
            return Ok(());
        }
        let flagged = copies.into_iter().map(|(copy, ready_at)| {
            let flag = Arc::new(CancelFlag::default());
            self.flags.insert(copy.id, Arc::clone(&flag));
            (copy, ready_at, flag)
        });
        let work = CopyBatch {
            direction,
            copies: flagged.collect(),
            memory: memory.clone(),
            depot: Arc::clone(depot),
            waiting,
        };
        let queue = match direction {
            Direction::Store => &self.stores,
            Direction::Load => &self.loads,
        };
        // Never blocks: the core runs at most as many copies as the queue has places, beside that of a probe.
        queue
            .try_send(work)
            .map_err(|error| error.to_string().into())
    }
}

fn run(
    work: &Receiver<CopyBatch>,
    engine: &CopyEngine,
    actor: &ActorRef<TransferMessage>,
    clock: Clock,
) {
    while let Ok(CopyBatch {
        direction,
        copies,
        memory,
        depot,
        waiting,
    }) = work.recv()
    {
        drop(waiting);
        // Reports each end separately, so that a small copy is not reported after a large one of the same order. The
        // last end is reported after the memory is released.
        let mut last = None;
        for (copy, ready_at, cancel) in copies {
            let waited_us = ready_at.until(clock.now()).as_micros();
            let copy = (copy, direction);
            let ended = copied(copy, &cancel, engine, &memory, &depot, COPY_PART_BYTES);
            let EndedCopy {
                transfer,
                bytes,
                copy_us,
                ..
            } = ended;
            // `kvferry bench lanes` reads these lines.
            tracing::debug!(%transfer, ?direction, waited_us, copy_us, bytes, "copy ended");
            let before = last.replace(ended);
            if let Some(ended) = before
                && actor.cast(TransferMessage::Ended(vec![ended])).is_err()
            {
                return;
            }
        }
        drop((memory, depot));
        let last = last.into_iter().collect();
        if actor.cast(TransferMessage::Ended(last)).is_err() {
            return;
        }
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
