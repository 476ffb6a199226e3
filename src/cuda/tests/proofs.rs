//! Each piece of an engine's memory is proven: a piece that contains other memory than the engine described is refused
//! by name, also where the nonce lies in another piece.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::fake;
use super::neighbour::{Neighbour, bytes, contents, context, registration};
use crate::{
    Context, DeviceIo, DeviceMemories, DeviceMemory, Physical, RegisteredDevice, SharedChunk,
    Sharing,
};
use kvferry_types::{
    Allocation, AllocationHandle, AllocationKind, Chunk, ChunkHandle, Nonce, Registration,
};

/// Size of a chunk, as with real drivers.
const CHUNK_BYTES: u64 = 2 << 20;
const CHUNKS: u8 = 4;

fn open(
    registration: &Registration,
    context: &Arc<Context>,
    staged_io: &mut DeviceIo,
    take: impl Fn(&[u8; 16]) -> Option<OwnedFd>,
) -> Result<(), String> {
    let opened = RegisteredDevice::open(registration, context, staged_io, take);
    opened.map(|_| ()).map_err(|error| error.to_string())
}

/// Three allocations of another process; the nonce lies in the first. Their contents are those of generations 1 to 3.
fn allocations(neighbour: &mut Neighbour) -> Registration {
    let mut handles = (1..4).map(|generation| neighbour.memory(generation, true));
    let first = handles.next().expect("three");
    let mut described = registration(first, 1);
    for handle in handles {
        described.allocations.push(Allocation {
            kind: AllocationKind::Device,
            handle: AllocationHandle::CudaIpc(handle),
            bytes: bytes(),
        });
    }
    let proof = |allocation: u32, offset_bytes: u64| {
        let written = contents(u64::from(allocation) + 1, bytes() as usize);
        Nonce {
            allocation,
            offset_bytes,
            bytes: written[offset_bytes as usize..][..32].to_vec(),
        }
    };
    let places = [64, bytes() / 2, bytes() - 32];
    let of_one = |allocation| places.map(|offset_bytes| proof(allocation, offset_bytes));
    described.proofs = (0..3).flat_map(of_one).collect();
    described
}

#[test]
fn allocations_that_are_exchanged_are_refused_by_name() {
    fake::anywhere("", || {
        let mut neighbour = Neighbour::start();
        let (context, described) = (context(), allocations(&mut neighbour));
        let mut staged_io = DeviceIo::new(&context).expect("a window");
        open(&described, &context, &mut staged_io, |_| None).expect("as it is");
        let mut exchanged = described.clone();
        exchanged.allocations.swap(1, 2);
        let refused = open(&exchanged, &context, &mut staged_io, |_| None);
        let text = refused.expect_err("exchanged");
        let expected = "registration.allocations[1] has other bytes at byte 64 of its allocation";
        assert!(text.starts_with(expected), "{text}");
        // Without proofs the exchange cannot be detected.
        exchanged.proofs.clear();
        open(&exchanged, &context, &mut staged_io, |_| None).expect("taken at its word");
    });
}

#[test]
fn an_engine_that_writes_meanwhile_is_accepted() {
    fake::anywhere("", || {
        let mut neighbour = Neighbour::start();
        let (context, mut described) = (context(), allocations(&mut neighbour));
        let mut staged_io = DeviceIo::new(&context).expect("a window");
        // Two of three proofs of each allocation no longer match when they are compared.
        for (index, proof) in described.proofs.iter_mut().enumerate() {
            if index % 3 != 1 {
                proof.bytes.fill(0);
            }
        }
        open(&described, &context, &mut staged_io, |_| None).expect("one of each is found");
        // No proof of one allocation matches: the rank must register again, with the bytes that it reads then.
        let then = described.proofs.clone();
        described.proofs[7].bytes.fill(0);
        let opened = RegisteredDevice::open(&described, &context, &mut staged_io, |_| None);
        assert!(opened.expect_err("not found").may_pass());
        described.proofs = then;
        open(&described, &context, &mut staged_io, |_| None).expect("one of each is found");
    });
}

#[test]
fn a_handle_that_maps_other_memory_is_refused_by_name() {
    fake::under("stale=3", || {
        let mut neighbour = Neighbour::start();
        let (context, described) = (context(), allocations(&mut neighbour));
        let mut staged_io = DeviceIo::new(&context).expect("a window");
        let refused = open(&described, &context, &mut staged_io, |_| None);
        let text = refused.expect_err("the memory of the second");
        assert!(
            text.starts_with("registration.allocations[2] has"),
            "{text}"
        );
        // The second open returns the right memory.
        open(&described, &context, &mut staged_io, |_| None).expect("as it is");
    });
}

/// One allocation of chunks, each with contents of its own; the nonce lies in the first.
struct Chunked {
    chunks: Vec<Physical>,
    described: Registration,
    _memory: Arc<DeviceMemories>,
}

fn chunked(context: &Arc<Context>, staged_io: &mut DeviceIo) -> Chunked {
    let complete = u64::from(CHUNKS) * CHUNK_BYTES;
    let made = DeviceMemory::allocate_chunks(context, complete, CHUNK_BYTES, Sharing::Fd);
    let (memory, chunks) = made.expect("memory");
    assert_eq!(chunks.len(), usize::from(CHUNKS));
    let memory = DeviceMemories::own(vec![memory]);
    let written = contents(1, complete as usize);
    for (offset, part) in (0..).step_by(1 << 16).zip(written.chunks(1 << 16)) {
        let place = [(offset, part.len() as u64)];
        staged_io.write(&memory, 0, &place, part).expect("written");
    }
    let listed = (0..CHUNKS).map(|number| Chunk {
        handle: ChunkHandle::Ticket([number; 16]),
        bytes: CHUNK_BYTES,
    });
    let mut described = registration([0; 64], 1);
    described.allocations[0] = Allocation {
        kind: AllocationKind::Device,
        handle: AllocationHandle::Chunks(listed.collect()),
        bytes: complete,
    };
    let place = |allocation, offset_bytes: u64| Nonce {
        allocation,
        offset_bytes,
        bytes: written[offset_bytes as usize..][..32].to_vec(),
    };
    described.nonce = place(0, 0);
    let begins = (0..u64::from(CHUNKS)).map(|number| number * CHUNK_BYTES);
    let both = |begin| [begin + 512, begin + CHUNK_BYTES - 32];
    let places = begins.flat_map(both);
    described.proofs = places.map(|offset_bytes| place(0, offset_bytes)).collect();
    Chunked {
        chunks,
        described,
        _memory: memory,
    }
}

impl Chunked {
    /// Opens the allocation with the ticket of chunk `n` resolved to chunk `chunk(n)`.
    fn open(
        &self,
        context: &Arc<Context>,
        staged_io: &mut DeviceIo,
        chunk: impl Fn(usize) -> usize,
    ) -> Result<(), String> {
        open(&self.described, context, staged_io, |ticket| {
            match self.chunks[chunk(usize::from(ticket[0]))].share() {
                Ok(SharedChunk::Fd(fd)) => Some(fd),
                _ => None,
            }
        })
    }
}

#[test]
fn chunks_in_another_order_are_refused_by_name() {
    fake::anywhere("", || {
        let context = context();
        let mut staged_io = DeviceIo::new(&context).expect("a window");
        let memory = chunked(&context, &mut staged_io);
        let as_it_is = memory.open(&context, &mut staged_io, |number| number);
        as_it_is.expect("as it is");
        // The first chunk, which contains the nonce, is right.
        let order = [0, 1, 3, 2];
        let refused = memory.open(&context, &mut staged_io, |number| order[number]);
        let text = refused.expect_err("another order");
        let expected = "registration.allocations[0].handle.chunks[2] has other bytes at byte 4194816 of its allocation";
        assert!(text.starts_with(expected), "{text}");
    });
}

#[test]
fn a_chunk_that_maps_the_previous_one_is_refused_by_name() {
    fake::under("stale=4", || {
        let context = context();
        let mut staged_io = DeviceIo::new(&context).expect("a window");
        let memory = chunked(&context, &mut staged_io);
        let refused = memory.open(&context, &mut staged_io, |number| number);
        let text = refused.expect_err("the third chunk twice");
        let expected = "registration.allocations[0].handle.chunks[3] has";
        assert!(text.starts_with(expected), "{text}");
    });
}
