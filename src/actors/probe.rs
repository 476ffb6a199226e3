//! The memory of a worker's probe: one page that stands for an engine's, and a depot of one page. Nothing that is served
//! lies there.

use std::sync::Arc;

use kvferry_memory::{Depot, EngineMemory, RegisteredMemory, SharedBuffer, validate};
use kvferry_types::{
    Allocation, AllocationHandle, AllocationKind, Attention, Edge, EndedCopy, FragmentPair,
    GroupMemory, Nonce, PageList, Rank, Registration, TensorRole, TensorView, Time, Transfer,
    TransferId,
};

/// Bytes of the page that a probe copies.
const PAGE_BYTES: u64 = 4096;
/// Number of the copy of a probe. A leader counts its transfers from 1 on, and never comes this far.
pub(super) const PROBE: TransferId = TransferId(u64::MAX);

/// The failure to create the memory, or to read and write it.
type Failure = Box<dyn std::error::Error + Send + Sync>;

/// See the module.
#[derive(Debug)]
pub(super) struct ProbeMemory {
    memory: RegisteredMemory,
    depot: Arc<Depot>,
    /// The first byte that the last probe copied, so that each one copies other bytes.
    turn: u8,
}

impl ProbeMemory {
    /// Creates the memory: about 16 KiB.
    pub(super) fn create() -> Result<Self, Failure> {
        let registration = registration();
        let layout = validate(&registration)?;
        let buffer = SharedBuffer::create("kvferry-probe", PAGE_BYTES)?;
        let memory = EngineMemory::new(&registration, vec![buffer])?;
        let depot = Depot::create(Depot::bytes_for(1, PAGE_BYTES))?;
        depot.hold_pages_of(PAGE_BYTES)?;
        Ok(Self {
            memory: RegisteredMemory {
                memory: Arc::new(memory),
                layout: Arc::new(layout),
            },
            depot: Arc::new(depot),
            turn: 0,
        })
    }

    /// Writes new bytes into the depot, and returns the load that is to copy them, with its memory.
    pub(super) fn begin(&mut self) -> Result<((Transfer, RegisteredMemory), Arc<Depot>), Failure> {
        self.turn = self.turn.wrapping_add(1);
        let at = self.depot.pages_at(PAGE_BYTES);
        self.depot.buffer().write_from(at, &page(self.turn))?;
        let pair = FragmentPair {
            src: PageList::run(0, 1),
            dst: PageList::run(0, 1),
        };
        let load = Transfer {
            id: PROBE,
            edge: Edge::LOAD,
            device: None,
            page_bytes: PAGE_BYTES,
            pairs: vec![pair],
            record: None,
            deadline: Time::NEVER,
        };
        Ok(((load, self.memory.clone()), Arc::clone(&self.depot)))
    }

    /// Compares the bytes that arrived. Returns their number.
    pub(super) fn end(&self, ended: &EndedCopy) -> Result<u64, String> {
        if !ended.complete {
            return Err(
                "the copy of a probe did not end completely: see the worker's log".to_owned(),
            );
        }
        let mut arrived = page(0);
        let buffer = self.memory.memory.buffer(0);
        let read = buffer.map(|buffer| buffer.read_into(0, &mut arrived));
        match read {
            Some(Ok(())) if arrived == page(self.turn) => Ok(PAGE_BYTES),
            Some(Ok(())) => Err("the copy of a probe has other bytes than its source".to_owned()),
            Some(Err(error)) => Err(error.to_string()),
            None => Err("the memory of the probe is missing".to_owned()),
        }
    }
}

/// Bytes that differ at every place from those of the turn before.
fn page(turn: u8) -> Vec<u8> {
    let bytes = (0..PAGE_BYTES).map(|at| (at as u8).wrapping_add(turn));
    bytes.collect()
}

fn registration() -> Registration {
    let tensor = TensorView {
        layer: 0,
        role: TensorRole::Kv,
        allocation: 0,
        offset_bytes: 0,
        shape: vec![1, PAGE_BYTES],
        strides: vec![PAGE_BYTES, 1],
        element_bytes: 1,
        page_axis: 0,
        page_bytes: PAGE_BYTES,
        page_stride_bytes: PAGE_BYTES,
        slices: None,
    };
    Registration {
        groups: vec![GroupMemory {
            attention: Attention::Full,
            window_tokens: 0,
            eagle: false,
            engine_page_tokens: 1,
            device_pages: 1,
            layers: 1,
            tensors: vec![tensor],
        }],
        hash_tokens: 0,
        hit_tokens: 0,
        content: b"probe".to_vec(),
        rank: Rank(0),
        tp_size: 1,
        shard: 0,
        allocations: vec![Allocation {
            kind: AllocationKind::SharedMemory,
            handle: AllocationHandle::Ticket([0; 16]),
            bytes: PAGE_BYTES,
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

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(complete: bool) -> EndedCopy {
        EndedCopy {
            complete_pages: u32::from(complete),
            bytes: PAGE_BYTES,
            copy_us: 1,
            ..EndedCopy::new(PROBE, complete)
        }
    }

    #[test]
    fn a_probe_fails_unless_every_byte_of_its_page_arrived() {
        let mut memory = ProbeMemory::create().expect("memory");
        for _ in 0..300 {
            let ((load, to), depot) = memory.begin().expect("begun");
            assert_eq!((load.id, load.edge), (PROBE, Edge::LOAD));
            assert!(memory.end(&ended(true)).is_err(), "nothing was copied");
            let mut bytes = page(0);
            let from = depot.pages_at(PAGE_BYTES);
            depot.buffer().read_into(from, &mut bytes).expect("read");
            let buffer = to.memory.buffer(0).expect("one allocation");
            buffer.write_from(0, &bytes).expect("written");
            assert_eq!(memory.end(&ended(true)), Ok(PAGE_BYTES));
            assert!(memory.end(&ended(false)).is_err());
        }
    }
}
