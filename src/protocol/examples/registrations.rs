//! Example registrations.

use kvferry_types::{
    Allocation, AllocationHandle, AllocationKind, Attention, Chunk, ChunkHandle, GroupMemory,
    Nonce, Rank, Registration, Slices, TensorRole, TensorView, Timeline,
};

pub(super) fn registration() -> Registration {
    Registration {
        groups: vec![GroupMemory {
            attention: Attention::Full,
            window_tokens: 0,
            eagle: false,
            engine_page_tokens: 16,
            device_pages: 4,
            layers: 1,
            tensors: vec![TensorView {
                layer: 0,
                role: TensorRole::Kv,
                allocation: 0,
                offset_bytes: 0,
                shape: vec![4, 16, 64],
                strides: vec![1024, 64, 1],
                element_bytes: 2,
                page_axis: 0,
                page_bytes: 2048,
                page_stride_bytes: 2048,
                slices: None,
            }],
        }],
        hash_tokens: 0,
        hit_tokens: 0,
        content: b"org/model@0123abcd bfloat16".to_vec(),
        rank: Rank(1),
        tp_size: 2,
        shard: 1,
        allocations: vec![
            Allocation {
                kind: AllocationKind::SharedMemory,
                handle: AllocationHandle::Ticket([5; 16]),
                bytes: 8192,
            },
            Allocation {
                kind: AllocationKind::SharedMemory,
                handle: AllocationHandle::Path("/dev/shm/example".to_owned()),
                bytes: 8192,
            },
        ],
        nonce: Nonce {
            allocation: 0,
            offset_bytes: 0,
            bytes: vec![3; 16],
        },
        proofs: Vec::new(),
        device_uuid: None,
        timeline: None,
    }
}

/// A sliding window beside full attention, in the same bytes. The window says which heads the rank has: 2 of 4.
pub(super) fn of_two_groups() -> Registration {
    let full = registration();
    let tensor = TensorView {
        shape: vec![4, 16, 2, 32],
        strides: vec![1024, 64, 32, 1],
        slices: Some(Slices::Heads {
            kv_heads: 4,
            head_axis: 2,
            token_axis: 1,
        }),
        ..full.groups[0].tensors[0].clone()
    };
    let window = GroupMemory {
        attention: Attention::SlidingWindow,
        window_tokens: 128,
        tensors: vec![tensor],
        ..full.groups[0].clone()
    };
    Registration {
        groups: vec![full.groups[0].clone(), window],
        hash_tokens: 16,
        hit_tokens: 16,
        ..full
    }
}

/// Ways to reach the memory of a GPU.
pub(super) fn device_registration() -> Registration {
    let host = registration();
    let chunks = [
        ChunkHandle::Ticket([9; 16]),
        ChunkHandle::CudaFabric([10; 64]),
    ];
    let chunks = chunks.map(|handle| Chunk {
        handle,
        bytes: 1 << 20,
    });
    let handles = [
        AllocationHandle::CudaIpc([6; 64]),
        AllocationHandle::CudaFabric([7; 64]),
        AllocationHandle::Ticket([8; 16]),
        AllocationHandle::Chunks(chunks.to_vec()),
    ];
    let allocations = handles.map(|handle| Allocation {
        kind: AllocationKind::Device,
        handle,
        bytes: 2 << 20,
    });
    Registration {
        allocations: allocations.to_vec(),
        device_uuid: Some("GPU-5f1d1a3c-0000-0000-0000-000000000000".to_owned()),
        timeline: Some(Timeline {
            allocation: 0,
            offset_bytes: 1 << 20,
        }),
        proofs: vec![
            Nonce {
                allocation: 1,
                offset_bytes: 0,
                bytes: (1..33).collect(),
            },
            Nonce {
                allocation: 3,
                offset_bytes: 1 << 20,
                bytes: (33..65).collect(),
            },
        ],
        ..host
    }
}
