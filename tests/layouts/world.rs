//! Real memory for a registration, and the expected result of a copy, byte by byte.

use std::sync::Arc;

use kvferry_memory::{
    CopyEngine, CopyJob, CopyMode, CopyReport, Depot, EngineMemory, PageLayout, SharedBuffer,
    validate,
};
use kvferry_types::{Direction, FragmentPair, PageList, Registration, TensorView};

use super::engine::addresses;

/// Pages of every depot in these tests.
pub const ARENA_PAGES: u32 = 11;

/// All allocations, then the depot.
type Memory = Vec<Vec<u8>>;

pub struct World {
    pub registration: Registration,
    pub layout: Arc<PageLayout>,
    device: Arc<EngineMemory>,
    depot: Arc<Depot>,
}

fn noise(seed: u64, bytes: u64) -> Vec<u8> {
    let mut state = seed;
    let next = |_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..bytes).map(next).collect()
}

impl World {
    /// Fills every byte of both memories with noise. The registration must be accepted.
    pub fn new(registration: Registration) -> Self {
        let layout = validate(&registration).expect("consistent");
        let layout = Arc::clone(&layout.groups[0]);
        let buffers = (1..)
            .zip(&registration.allocations)
            .map(|(seed, allocation)| {
                let buffer =
                    SharedBuffer::create("kvferry-test", allocation.bytes).expect("memory");
                let bytes = noise(seed, allocation.bytes);
                buffer.write_from(0, &bytes).expect("in bounds");
                buffer
            });
        let device = EngineMemory::new(&registration, buffers.collect()).expect("fits");
        let depot_bytes = Depot::bytes_for(ARENA_PAGES, layout.page_bytes);
        let depot = Depot::create(depot_bytes).expect("memory");
        depot.hold_pages_of(layout.page_bytes).expect("writable");
        let buffer = depot.buffer();
        buffer
            .write_from(4096, &noise(0, depot_bytes - 4096))
            .expect("in bounds");
        Self {
            registration,
            layout,
            device: Arc::new(device),
            depot: Arc::new(depot),
        }
    }

    fn snapshot(&self) -> Memory {
        let allocations = 0..self.registration.allocations.len() as u32;
        let buffers = allocations.map(|index| self.device.buffer(index).expect("there"));
        let contents = |buffer: &SharedBuffer| {
            let mut bytes = vec![0; buffer.len() as usize];
            buffer.read_into(0, &mut bytes).expect("all of it");
            bytes
        };
        buffers.chain([self.depot.buffer()]).map(contents).collect()
    }

    /// Expected range of a page in the depot: behind the header and the inventory, at multiples of 64 bytes.
    fn depot_range(&self, page: u32) -> std::ops::Range<usize> {
        let tensors = self.registration.groups[0].tensors.iter();
        let page_bytes: usize = tensors.map(|tensor| addresses(tensor, 0).len()).sum();
        let pages_at = (4096 + ARENA_PAGES as usize * 80).div_ceil(4096) * 4096;
        let start = pages_at + page as usize * page_bytes.div_ceil(64) * 64;
        start..start + page_bytes
    }

    /// The depot's bytes of a page.
    pub fn depot_page(&self, page: u32) -> Vec<u8> {
        let depot = self.snapshot().pop().expect("a depot");
        depot[self.depot_range(page)].to_vec()
    }

    /// The memory that a copy must produce.
    fn expected(&self, direction: Direction, pages: &[(u32, u32)], mut memory: Memory) -> Memory {
        let depot = memory.len() - 1;
        let mut tensors: Vec<&TensorView> = self.registration.groups[0].tensors.iter().collect();
        tensors.sort_by_key(|tensor| (tensor.layer, tensor.role));
        for (device_page, depot_page) in pages {
            let mut in_depot = self.depot_range(*depot_page);
            for tensor in &tensors {
                let allocation = tensor.allocation as usize;
                for at in addresses(tensor, *device_page) {
                    let place = in_depot.next().expect("as many bytes");
                    match direction {
                        Direction::Store => memory[depot][place] = memory[allocation][at],
                        Direction::Load => memory[allocation][at] = memory[depot][place],
                    }
                }
            }
        }
        memory
    }

    /// Copies pages, given as (device page, depot page), `cut` of them per pair, and compares every byte of both
    /// memories with the reference.
    pub fn copy(
        &self,
        direction: Direction,
        pages: &[(u32, u32)],
        cut: usize,
        mode: CopyMode,
    ) -> Result<CopyReport, String> {
        let pairs = pages.chunks(cut).map(|chunk| {
            let device: PageList = chunk.iter().map(|pages| pages.0).collect();
            let depot: PageList = chunk.iter().map(|pages| pages.1).collect();
            match direction {
                Direction::Store => FragmentPair {
                    src: device,
                    dst: depot,
                },
                Direction::Load => FragmentPair {
                    src: depot,
                    dst: device,
                },
            }
        });
        let job = CopyJob {
            direction,
            layout: Arc::clone(&self.layout),
            device: Arc::clone(&self.device),
            depot: Arc::clone(&self.depot),
            pairs: pairs.collect(),
            cancel: Arc::default(),
        };
        let expected = self.expected(direction, pages, self.snapshot());
        let engine = CopyEngine::with_mode(1, mode).expect("no threads");
        let report = engine.run(&job).map_err(|error| error.to_string())?;
        let found = self.snapshot();
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let wrong = (0..found.len()).filter(|at| found[*at] != expected[*at]);
            let wrong: Vec<usize> = wrong.take(8).collect();
            if !wrong.is_empty() {
                return Err(format!("memory {index} is wrong at {wrong:?}"));
            }
        }
        Ok(report)
    }

    /// Stores some pages in no order, and loads them to other pages, with both copy modes.
    pub fn copy_both_ways(&self) {
        let gathered = [(3, 9), (4, 10), (0, 2), (6, 0), (1, 5), (2, 6)];
        let scattered = [(0, 9), (5, 5), (6, 6), (2, 10)];
        for mode in [CopyMode::Plain, CopyMode::NonTemporal] {
            let stored = self.copy(Direction::Store, &gathered, 4, mode);
            stored.expect("a gather as the reference has it");
            let loaded = self.copy(Direction::Load, &scattered, 3, mode);
            loaded.expect("a scatter as the reference has it");
        }
    }
}
