//! An engine's memory and a depot, and copies between them without actors or processes.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::error::CommandError;
use kvferry_memory::{
    CancelFlag, CopyEngine, CopyJob, Depot, EngineMemory, Prefault, RegisteredMemory, SharedBuffer,
    validate,
};
use kvferry_types::{
    Allocation, AllocationHandle, AllocationKind, Attention, Direction, FragmentPair, GroupMemory,
    Nonce, PageList, Rank, Registration, TensorRole, TensorView,
};

/// Pages of a block.
const BLOCK_PAGES: usize = 32;
/// Bytes of memory that are filled at a time.
const STEP_BYTES: usize = 1 << 20;

/// An engine's memory and a depot. All memory is touched before the first copy.
pub(super) struct CopyFixture {
    job: CopyJob,
    memory: RegisteredMemory,
    order: Vec<u32>,
}

impl CopyFixture {
    /// Creates the memory that a registration describes, in one allocation, and a depot of `arena_pages`.
    pub(super) fn new(registration: &Registration, arena_pages: u32) -> Result<Self, CommandError> {
        let layout = validate(registration).map_err(CommandError::failed)?;
        let page_bytes = layout.geometry.page_bytes();
        let bytes = registration.allocations.iter().map(|one| one.bytes).sum();
        let buffer = SharedBuffer::create("kvferry-bench", bytes).map_err(CommandError::failed)?;
        let filler = vec![1; STEP_BYTES];
        let mut at = 0;
        while at < bytes {
            let step = usize::try_from(bytes - at).unwrap_or(usize::MAX);
            let step = &filler[..step.min(STEP_BYTES)];
            buffer.write_from(at, step).map_err(CommandError::failed)?;
            at += step.len() as u64;
        }
        let depot = Depot::create(Depot::bytes_for(arena_pages, page_bytes));
        let depot = depot.map_err(CommandError::failed)?;
        let held = depot.hold_pages_of(page_bytes);
        held.map_err(CommandError::failed)?;
        let by = Prefault {
            threads: 1,
            chunk_bytes: 64 << 20,
            node: None,
        };
        let never = AtomicBool::new(false);
        depot
            .prefault(&by, &|_, _| (), &never)
            .map_err(CommandError::failed)?;
        let device = EngineMemory::new(registration, vec![buffer]).map_err(CommandError::failed)?;
        let memory = RegisteredMemory {
            memory: Arc::new(device),
            layout: Arc::new(layout),
        };
        let job = CopyJob {
            direction: Direction::Store,
            layout: Arc::clone(&memory.layout.groups[0]),
            device: Arc::clone(&memory.memory),
            depot: Arc::new(depot),
            pairs: Vec::new(),
            cancel: Arc::new(CancelFlag::default()),
        };
        Ok(Self {
            job,
            memory,
            order: shuffled(registration.groups[0].device_pages),
        })
    }

    /// The engine's memory, as registered with a worker.
    pub(super) fn memory(&self) -> RegisteredMemory {
        self.memory.clone()
    }

    /// A copy between `count` device pages of `set` and blocks of 32 arena pages, which start at `count * place`. Equal
    /// sets have equal device pages.
    pub(super) fn job(&self, direction: Direction, set: u32, place: u32, count: u32) -> CopyJob {
        let pairs = gather(set_of(&self.order, set, count), count * place);
        let pairs = match direction {
            Direction::Store => pairs,
            Direction::Load => pairs.into_iter().map(turned).collect(),
        };
        CopyJob {
            direction,
            pairs,
            ..self.job.clone()
        }
    }
}

/// Gathers and scatters of small fragments by one thread, whose cost is the walk of the plan rather than the bytes.
pub struct CopySteps {
    engine: CopyEngine,
    store: CopyJob,
    load: CopyJob,
}

impl CopySteps {
    /// Pages of a copy, each of which is one fragment, and bytes of a fragment.
    const PAGES: u32 = 512;
    const FRAGMENT_BYTES: u64 = 1024;

    /// Creates the memory of both sides.
    pub fn new() -> Result<Self, CommandError> {
        let registration = registration(Self::FRAGMENT_BYTES, Self::PAGES);
        let fixture = CopyFixture::new(&registration, Self::PAGES)?;
        Ok(Self {
            engine: CopyEngine::new(1).map_err(CommandError::failed)?,
            store: fixture.job(Direction::Store, 0, 0, Self::PAGES),
            load: fixture.job(Direction::Load, 0, 0, Self::PAGES),
        })
    }

    /// Gathers all pages, then scatters them.
    pub fn round(&self) -> Result<(), CommandError> {
        for job in [&self.store, &self.load] {
            self.engine.run(job).map_err(CommandError::failed)?;
        }
        Ok(())
    }
}

/// Returns the `count` pages of `order` that belong to `set`. Sets are disjoint.
pub(super) fn set_of(order: &[u32], set: u32, count: u32) -> &[u32] {
    let first = set * count;
    &order[first as usize..(first + count) as usize]
}

/// Pairs pages with consecutive blocks of an arena.
pub(super) fn gather(pages: &[u32], first: u32) -> Vec<FragmentPair> {
    let blocks = pages.chunks(BLOCK_PAGES).enumerate();
    let pairs = blocks.map(|(index, pages)| FragmentPair {
        src: pages.iter().copied().collect(),
        dst: PageList::run(first + (BLOCK_PAGES * index) as u32, pages.len() as u32),
    });
    pairs.collect()
}

pub(super) fn turned(pair: FragmentPair) -> FragmentPair {
    FragmentPair {
        src: pair.dst,
        dst: pair.src,
    }
}

/// The numbers below `count` in an order that no prefetcher predicts. Equal arguments give an equal order.
pub(super) fn shuffled(count: u32) -> Vec<u32> {
    let mut order: Vec<u32> = (0..count).collect();
    fastrand::Rng::with_seed(5).shuffle(&mut order);
    order
}

/// One tensor in which a page is one fragment.
pub(super) fn registration(fragment: u64, pages: u32) -> Registration {
    let bytes = fragment * u64::from(pages);
    Registration {
        groups: vec![GroupMemory {
            attention: Attention::Full,
            window_tokens: 0,
            eagle: false,
            engine_page_tokens: 16,
            device_pages: pages,
            layers: 1,
            tensors: vec![TensorView {
                layer: 0,
                role: TensorRole::Kv,
                allocation: 0,
                offset_bytes: 0,
                shape: vec![u64::from(pages), fragment],
                strides: vec![fragment, 1],
                element_bytes: 1,
                page_axis: 0,
                page_bytes: fragment,
                page_stride_bytes: fragment,
                slices: None,
            }],
        }],
        hash_tokens: 0,
        hit_tokens: 0,
        content: b"bench".to_vec(),
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
    }
}
