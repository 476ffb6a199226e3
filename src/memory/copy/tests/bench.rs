//! Memory of engines of all layouts, and the expected result of a copy.

use std::sync::Arc;

use super::super::{CopyJob, Direction};
use crate::buffer::SharedBuffer;
use crate::depot::Depot;
use crate::engine_memory::EngineMemory;
use crate::layout::PageLayout;
use crate::registration::validate;
use kvferry_types::{
    Allocation, AllocationHandle, AllocationKind, Attention, FragmentPair, GroupMemory, Nonce,
    Rank, Registration, TensorRole, TensorView,
};

/// Layout of an engine's pages.
#[derive(Debug, Clone, Copy)]
pub(super) enum Shape {
    /// Each layer in an allocation of its own; K and V of a page side by side, and a gap before the next page.
    SeparateLayers { gap: u64 },
    /// One allocation, page-major: a page is one range.
    Contiguous,
    /// Each layer in an allocation of its own: all pages of K, then all of V.
    Planes,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    pub(super) shape: Shape,
    pub(super) layers: u64,
    pub(super) pages: u64,
    pub(super) elements: u64,
    pub(super) element_bytes: u64,
    pub(super) lead_bytes: u64,
}

impl Layout {
    fn registration(self) -> Registration {
        let Self {
            layers,
            pages,
            elements,
            ..
        } = self;
        let fragment = elements * self.element_bytes;
        let tensors = (0..layers * 2).map(|index| {
            let (layer, role) = (index / 2, index % 2);
            let (allocation, place, stride) = match self.shape {
                Shape::SeparateLayers { gap } => (layer, role * elements, 2 * elements + gap),
                Shape::Contiguous => (0, index * elements, layers * 2 * elements),
                Shape::Planes => (layer, role * pages * elements, elements),
            };
            TensorView {
                layer: layer as u32,
                role: [TensorRole::K, TensorRole::V][role as usize],
                allocation: allocation as u32,
                offset_bytes: self.lead_bytes + place * self.element_bytes,
                shape: vec![pages, elements],
                strides: vec![stride, 1],
                element_bytes: self.element_bytes as u32,
                page_axis: 0,
                page_bytes: fragment,
                page_stride_bytes: stride * self.element_bytes,
                slices: None,
            }
        });
        let (allocations, bytes) = match self.shape {
            Shape::SeparateLayers { gap } => {
                (layers, pages * (2 * fragment + gap * self.element_bytes))
            }
            Shape::Contiguous => (1, pages * layers * 2 * fragment),
            Shape::Planes => (layers, pages * 2 * fragment),
        };
        let allocations = (0..allocations).map(|index| Allocation {
            kind: AllocationKind::SharedMemory,
            handle: AllocationHandle::Path(format!("/dev/shm/{index}")),
            bytes: self.lead_bytes + bytes + 16,
        });
        Registration {
            groups: vec![GroupMemory {
                attention: Attention::Full,
                window_tokens: 0,
                eagle: false,
                engine_page_tokens: 1,
                device_pages: pages as u32,
                layers: layers as u32,
                tensors: tensors.collect(),
            }],
            hash_tokens: 0,
            hit_tokens: 0,
            content: b"test".to_vec(),
            rank: Rank(0),
            tp_size: 1,
            shard: 0,
            allocations: allocations.collect(),
            nonce: Nonce {
                allocation: 0,
                offset_bytes: 0,
                bytes: vec![1; 16],
            },
            proofs: Vec::new(),
            device_uuid: None,
            timeline: None,
        }
    }
}

/// A registration, its memory, and a depot; both memories are filled with pseudo-random bytes.
pub(super) struct Bench {
    registration: Registration,
    pub(super) layout: Arc<PageLayout>,
    pub(super) device: Arc<EngineMemory>,
    pub(super) depot: Arc<Depot>,
}

fn noise(seed: u32, len: u64) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..len).map(|_| next()).collect()
}

fn contents(buffer: &SharedBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len() as usize];
    buffer.read_into(0, &mut bytes).expect("all of it");
    bytes
}

impl Bench {
    pub(super) fn new(layout: Layout, arena_pages: u64) -> Self {
        let registration = layout.registration();
        let layout = validate(&registration).expect("consistent");
        let layout = Arc::clone(&layout.groups[0]);
        let mut seed = 1;
        let buffers = registration.allocations.iter().map(|allocation| {
            let buffer = SharedBuffer::create("kvferry-test", allocation.bytes).expect("memory");
            seed += 1;
            buffer
                .write_from(0, &noise(seed, allocation.bytes))
                .expect("in bounds");
            buffer
        });
        let device = EngineMemory::new(&registration, buffers.collect()).expect("fits");
        let bytes = Depot::bytes_for(arena_pages as u32, layout.page_bytes);
        let depot = Depot::create(bytes).expect("memory");
        depot.hold_pages_of(layout.page_bytes).expect("writable");
        let pages_at = depot.pages_at(layout.page_bytes);
        depot
            .buffer()
            .write_from(pages_at, &noise(0, bytes - pages_at))
            .expect("in bounds");
        Self {
            registration,
            layout,
            device: Arc::new(device),
            depot: Arc::new(depot),
        }
    }

    pub(super) fn job(&self, direction: Direction, pairs: Vec<FragmentPair>) -> CopyJob {
        CopyJob {
            direction,
            layout: Arc::clone(&self.layout),
            device: Arc::clone(&self.device),
            depot: Arc::clone(&self.depot),
            pairs,
            cancel: Arc::default(),
        }
    }

    /// All allocations, then the depot.
    pub(super) fn snapshot(&self) -> Vec<Vec<u8>> {
        let allocations = 0..self.registration.allocations.len() as u32;
        let buffers = allocations.map(|index| self.device.buffer(index).expect("there"));
        buffers.chain([self.depot.buffer()]).map(contents).collect()
    }

    /// The snapshot after the job, computed byte by byte from the registration alone.
    pub(super) fn expected(&self, job: &CopyJob, mut memory: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
        let depot = memory.len() - 1;
        let mut tensors: Vec<_> = self.registration.groups[0].tensors.iter().collect();
        tensors.sort_by_key(|tensor| (tensor.layer, tensor.role));
        let page_bytes: u64 = tensors.iter().map(|tensor| tensor.page_bytes).sum();
        let stride = page_bytes.div_ceil(64) * 64;
        let entries = u64::from(self.depot.arena_pages(page_bytes));
        let pages_at = (4096 + entries * 80).div_ceil(4096) * 4096;
        for pair in &job.pairs {
            for (src, dst) in pair.src.iter_pages().zip(pair.dst.iter_pages()) {
                let (device_page, depot_page) = match job.direction {
                    Direction::Store => (src, dst),
                    Direction::Load => (dst, src),
                };
                let mut at = pages_at + u64::from(depot_page) * stride;
                for tensor in &tensors {
                    let base =
                        tensor.offset_bytes + u64::from(device_page) * tensor.page_stride_bytes;
                    for byte in 0..tensor.page_bytes {
                        let on_device = (tensor.allocation as usize, (base + byte) as usize);
                        let in_depot = (depot, at as usize);
                        let (from, to) = match job.direction {
                            Direction::Store => (on_device, in_depot),
                            Direction::Load => (in_depot, on_device),
                        };
                        memory[to.0][to.1] = memory[from.0][from.1];
                        at += 1;
                    }
                }
            }
        }
        memory
    }
}
