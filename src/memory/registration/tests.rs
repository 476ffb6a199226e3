use super::*;
use kvferry_types::{
    Allocation, AllocationKind, Attention, Chunk, Nonce, Rank, Slices, TensorView,
};

type Spoil = fn(&mut Registration);

/// Four layers of 6 pages, each layer in an allocation of its own: a page of K, then one of V, 2 tokens x 3 heads x 5
/// elements of 2 bytes each, pages 64 elements apart.
pub(crate) fn separate_layers() -> Registration {
    let tensors = (0..8).map(|index| TensorView {
        layer: index / 2,
        role: [TensorRole::K, TensorRole::V][index as usize % 2],
        allocation: index / 2,
        offset_bytes: 64 + u64::from(index % 2) * 60,
        shape: vec![6, 2, 3, 5],
        strides: vec![64, 15, 5, 1],
        element_bytes: 2,
        page_axis: 0,
        page_bytes: 60,
        page_stride_bytes: 128,
        slices: None,
    });
    let allocations = (0..4).map(|layer| Allocation {
        kind: AllocationKind::SharedMemory,
        handle: AllocationHandle::Path(format!("/dev/shm/layer-{layer}")),
        bytes: 64 + 6 * 128,
    });
    Registration {
        groups: vec![GroupMemory {
            attention: Attention::Full,
            window_tokens: 0,
            eagle: false,
            engine_page_tokens: 2,
            device_pages: 6,
            layers: 4,
            tensors: tensors.collect(),
        }],
        hash_tokens: 0,
        hit_tokens: 0,
        content: b"test".to_vec(),
        rank: Rank(1),
        tp_size: 2,
        shard: 1,
        allocations: allocations.collect(),
        nonce: Nonce {
            allocation: 0,
            offset_bytes: 0,
            bytes: vec![7; 32],
        },
        proofs: Vec::new(),
        device_uuid: None,
        timeline: None,
    }
}

fn refusal(spoil: Spoil) -> RegistrationError {
    let mut registration = separate_layers();
    spoil(&mut registration);
    validate(&registration).expect_err("a contradiction")
}

#[test]
fn fragments_are_ordered_by_layer_and_role() {
    let mut registration = separate_layers();
    registration.groups[0].tensors.reverse();
    let layout = validate(&registration).expect("consistent");
    let layout = &layout.groups[0];
    assert_eq!(layout.page_bytes, 480);
    assert_eq!(layout.device_pages, 6);
    let found: Vec<_> = layout
        .fragments
        .iter()
        .map(|it| {
            (
                it.layer,
                it.role,
                it.allocation,
                it.base_bytes,
                it.block_offset_bytes,
            )
        })
        .collect();
    assert_eq!(
        found[..2],
        [(0, TensorRole::K, 0, 64, 0), (0, TensorRole::V, 0, 124, 60)]
    );
    assert_eq!(found[7], (3, TensorRole::V, 3, 124, 420));
    assert_eq!(
        *layout,
        validate(&separate_layers()).expect("consistent").groups[0]
    );
}

/// Chunks of these lengths in bytes, each with a ticket of its own.
fn chunks(lengths: &[u64]) -> AllocationHandle {
    let numbered = (1..).zip(lengths);
    let list = numbered.map(|(number, bytes)| Chunk {
        handle: ChunkHandle::Ticket([number; 16]),
        bytes: *bytes,
    });
    AllocationHandle::Chunks(list.collect())
}

fn on_device(registration: &mut Registration, handle: AllocationHandle) {
    registration.device_uuid = Some("GPU-0".to_owned());
    for (number, allocation) in (0..).zip(&mut registration.allocations) {
        allocation.kind = AllocationKind::Device;
        allocation.handle = AllocationHandle::CudaFabric([number; 64]);
    }
    registration.allocations[1].handle = handle;
}

#[test]
fn chunks_must_make_up_their_allocation() {
    let mut registration = separate_layers();
    let bytes = registration.allocations[1].bytes;
    on_device(&mut registration, chunks(&[100, bytes - 100]));
    validate(&registration).expect("consistent");
    let cases: &[(&str, Vec<u64>)] = &[
        ("allocations[1].handle.chunks is a list of 0: ", vec![]),
        (
            "allocations[1].handle.chunks[1].bytes is 0: ",
            vec![bytes, 0],
        ),
        ("allocations[1].bytes is ", vec![bytes - 1]),
        ("allocations[1].bytes is ", vec![bytes, u64::MAX]),
    ];
    for (expected, lengths) in cases {
        on_device(&mut registration, chunks(lengths));
        let refused = validate(&registration).expect_err("refused").to_string();
        assert!(refused.starts_with(expected), "{refused}");
    }
    let chunk = Chunk {
        handle: ChunkHandle::CudaFabric([7; 64]),
        bytes: bytes / 2,
    };
    let twice = AllocationHandle::Chunks(vec![chunk.clone(), chunk.clone()]);
    on_device(&mut registration, twice);
    let refused = validate(&registration).expect_err("refused").to_string();
    assert!(
        refused.starts_with("allocations[1].handle.chunks[1].handle is one"),
        "{refused}"
    );
    let many = AllocationHandle::Chunks(vec![chunk; CHUNKS_MAX + 1]);
    on_device(&mut registration, many);
    let refused = validate(&registration).expect_err("refused").to_string();
    assert!(refused.contains("a list of 16385"), "{refused}");
}

#[test]
fn every_contradiction_is_refused_by_its_field() {
    let cases: &[(&str, Spoil)] = &[
        ("allocations", |r| r.allocations.clear()),
        ("allocations", |r| {
            r.allocations = vec![r.allocations[0].clone(); 257]
        }),
        ("groups[0].tensors", |r| r.groups[0].tensors.clear()),
        ("groups[0].tensors", |r| {
            r.groups[0].tensors = vec![r.groups[0].tensors[0].clone(); 4097]
        }),
        ("tp_size", |r| r.tp_size = 0),
        ("groups[0].engine_page_tokens", |r| {
            r.groups[0].engine_page_tokens = 0
        }),
        ("groups[0].device_pages", |r| r.groups[0].device_pages = 0),
        ("allocations[1].handle", |r| {
            r.allocations[1].handle = AllocationHandle::CudaIpc([1; 64]);
        }),
        ("allocations[1].handle", |r| {
            r.allocations[1].handle = chunks(&[4096]);
            r.allocations[1].bytes = 4096;
        }),
        ("allocations[1].handle", |r| {
            r.allocations[1].handle = AllocationHandle::CudaFabric([1; 64]);
        }),
        ("allocations[1].handle", |r| {
            r.allocations[1].kind = AllocationKind::Device;
        }),
        ("device_uuid", |r| {
            r.allocations[0].kind = AllocationKind::Device;
            r.allocations[0].handle = AllocationHandle::CudaIpc([1; 64]);
        }),
        ("groups", |r| r.groups.clear()),
        ("groups", |r| r.groups = vec![r.groups[0].clone(); 256]),
        ("groups[0].window_tokens", |r| {
            r.groups[0].attention = Attention::SlidingWindow;
        }),
        ("groups[0].window_tokens", |r| {
            r.groups[0].window_tokens = 128
        }),
        ("groups[0].layers", |r| r.groups[0].layers = 0),
        ("groups[0].layers", |r| r.groups[0].layers = 5),
        ("groups[0].layers", |r| r.groups[0].layers = u32::MAX),
        ("rank", |r| r.rank = Rank(2)),
        ("shard", |r| r.shard = 2),
        ("allocations[1].bytes", |r| r.allocations[1].bytes = 0),
        ("allocations[2].handle", |r| {
            r.allocations[2].handle = r.allocations[1].handle.clone();
        }),
        ("groups[0].tensors[6].layer", |r| r.groups[0].layers = 3),
        ("groups[0].tensors[3].shape", |r| {
            r.groups[0].tensors[3].shape.clear()
        }),
        ("groups[0].tensors[3].shape", |r| {
            r.groups[0].tensors[3].shape = vec![1; 9]
        }),
        ("groups[0].tensors[3].shape", |r| {
            r.groups[0].tensors[3].shape = vec![6, 1 << 40, 1 << 40, 1]
        }),
        ("groups[0].tensors[3].shape", |r| {
            r.groups[0].tensors[3].shape[1] = 1 << 30
        }),
        ("groups[0].tensors[3].shape[0]", |r| {
            r.groups[0].tensors[3].shape[0] = 7
        }),
        ("groups[0].tensors[3].shape[2]", |r| {
            r.groups[0].tensors[3].shape[2] = 0
        }),
        ("groups[0].tensors[3].strides", |r| {
            r.groups[0].tensors[3].strides.truncate(3)
        }),
        ("groups[0].tensors[3].strides", |r| {
            r.groups[0].tensors[3].strides[1] = 14
        }),
        ("groups[0].tensors[3].strides", |r| {
            r.groups[0].tensors[3].strides[3] = 0
        }),
        ("groups[0].tensors[3].page_axis", |r| {
            r.groups[0].tensors[3].page_axis = 4
        }),
        ("groups[0].tensors[3].element_bytes", |r| {
            r.groups[0].tensors[3].element_bytes = 0
        }),
        ("groups[0].tensors[3].page_bytes", |r| {
            r.groups[0].tensors[3].page_bytes = 64
        }),
        ("groups[0].tensors[3].page_bytes", |r| {
            r.groups[0].tensors[3].element_bytes = 1
        }),
        ("groups[0].tensors[3].page_stride_bytes", |r| {
            r.groups[0].tensors[3].page_stride_bytes = 64
        }),
        ("groups[0].tensors[3].page_stride_bytes", |r| {
            r.groups[0].tensors[3].strides[0] = u64::MAX
        }),
        ("groups[0].tensors[3].page_stride_bytes", |r| {
            r.groups[0].tensors[3].strides[0] = 29;
            r.groups[0].tensors[3].page_stride_bytes = 58;
        }),
        ("groups[0].tensors[3].page_stride_bytes", |r| {
            r.groups[0].tensors[3].strides[0] = 63;
            r.groups[0].tensors[3].page_stride_bytes = 126;
        }),
        ("groups[0].tensors[3].allocation", |r| {
            r.groups[0].tensors[3].allocation = 4
        }),
        ("groups[0].tensors[3].offset_bytes", |r| {
            r.groups[0].tensors[3].offset_bytes = 133
        }),
        ("groups[0].tensors[3].offset_bytes", |r| {
            r.groups[0].tensors[3].offset_bytes = u64::MAX
        }),
        ("groups[0].tensors[3].offset_bytes", |r| {
            r.groups[0].tensors[3].offset_bytes = 123
        }),
        ("groups[0].tensors[2].offset_bytes", |r| {
            r.groups[0].tensors[2].offset_bytes = 125
        }),
        ("groups[0].tensors[3].offset_bytes", |r| {
            r.groups[0].tensors[2].offset_bytes = 0;
            r.groups[0].tensors[3].offset_bytes = 70;
        }),
        ("groups[0].tensors[3].role", |r| {
            r.groups[0].tensors[3].role = TensorRole::K
        }),
        ("groups[0].tensors[2].role", |r| {
            r.groups[0].tensors[2].role = TensorRole::Kv
        }),
        ("groups[0].tensors[1].role", |r| {
            r.groups[0].tensors[1].role = TensorRole::Other
        }),
        ("allocations[2].kind", |r| {
            r.allocations[2].kind = AllocationKind::Other
        }),
        ("allocations[1].handle", |r| {
            r.allocations[1].handle = AllocationHandle::Other
        }),
        ("allocations[1].handle.chunks[0].handle", |r| {
            let mut unknown = chunks(&[832]);
            if let AllocationHandle::Chunks(chunks) = &mut unknown {
                chunks[0].handle = ChunkHandle::Other;
            }
            on_device(r, unknown);
        }),
        ("allocations[1].handle.chunks[0].handle", |r| {
            // Two unknown handles are not the same one.
            let mut unknown = chunks(&[416, 416]);
            if let AllocationHandle::Chunks(chunks) = &mut unknown {
                chunks
                    .iter_mut()
                    .for_each(|chunk| chunk.handle = ChunkHandle::Other);
            }
            on_device(r, unknown);
        }),
        ("nonce.allocation", |r| r.nonce.allocation = 4),
        ("nonce.bytes", |r| r.nonce.bytes.truncate(15)),
        ("nonce.bytes", |r| r.nonce.bytes.resize(65, 0)),
        ("nonce.offset_bytes", |r| {
            r.nonce.offset_bytes = 64 + 6 * 128 - 31
        }),
        ("nonce.offset_bytes", |r| r.nonce.offset_bytes = u64::MAX),
    ];
    for (number, (field, spoil)) in cases.iter().enumerate() {
        let error = refusal(*spoil);
        assert_eq!(&error.field, field, "case {number}: {error}");
        assert!(!error.remedy.is_empty());
    }
}

#[test]
fn a_refusal_reads_as_one_line() {
    let error = refusal(|r| r.groups[0].tensors[3].page_stride_bytes = 64);
    assert_eq!(
        error.to_string(),
        "groups[0].tensors[3].page_stride_bytes is 64: it must be strides[0] (64) x element_bytes (2)"
    );
    let missing = refusal(|r| {
        r.groups[0].tensors.retain(|tensor| tensor.layer != 2);
    });
    assert_eq!(
        missing.to_string(),
        "groups[0].layers is 4: layer 2 has no tensor: describe it, or lower the number"
    );
    let later = refusal(|r| r.groups[0].tensors[1].role = TensorRole::Other);
    assert_eq!(
        later.to_string(),
        "groups[0].tensors[1].role is a word that this version does not know: name k, v, kv, latent or state, or \
         update kvferry"
    );
}

/// Six pages of K/V planes in one tensor, 60 bytes per page and plane, followed by two scales of 4 bytes per page.
fn planes_with_scales() -> Registration {
    let mut registration = separate_layers();
    let tensors = &mut registration.groups[0].tensors;
    tensors.truncate(2);
    tensors[0] = TensorView {
        role: TensorRole::Kv,
        offset_bytes: 0,
        shape: vec![2, 6, 30],
        strides: vec![180, 30, 1],
        page_axis: 1,
        page_bytes: 120,
        page_stride_bytes: 60,
        slices: None,
        ..tensors[0].clone()
    };
    tensors[1] = TensorView {
        layer: 1,
        role: TensorRole::Kv,
        offset_bytes: 720,
        shape: vec![6, 2],
        strides: vec![2, 1],
        element_bytes: 4,
        page_bytes: 8,
        page_stride_bytes: 8,
        slices: None,
        ..tensors[1].clone()
    };
    registration.groups[0].layers = 2;
    registration.allocations.truncate(2);
    registration
}

#[test]
fn planes_and_scales_that_contradict_themselves_are_refused_by_field() {
    let layout = validate(&planes_with_scales()).expect("consistent");
    let found = layout.groups[0].fragments.iter();
    let found: Vec<_> = found.map(|it| (it.base_bytes, it.page_bytes)).collect();
    assert_eq!(found, [(0, 60), (360, 60), (720, 8)]);
    let cases: &[(&str, Spoil)] = &[
        // The second plane starts in the first one.
        ("groups[0].tensors[0].strides", |r| {
            r.groups[0].tensors[0].strides[0] = 179
        }),
        ("groups[0].tensors[0].strides", |r| {
            r.groups[0].tensors[0].strides[0] = 0
        }),
        ("groups[0].tensors[0].strides", |r| {
            r.groups[0].tensors[0].strides[0] = 15
        }),
        // The second plane ends after the allocation.
        ("groups[0].tensors[0].offset_bytes", |r| {
            r.groups[0].tensors[0].strides[0] = 250
        }),
        ("groups[0].tensors[0].offset_bytes", |r| {
            r.groups[0].tensors[0].strides[0] = u64::MAX
        }),
        // A page's size is that of both planes, its stride that of one.
        ("groups[0].tensors[0].page_bytes", |r| {
            r.groups[0].tensors[0].page_bytes = 60
        }),
        ("groups[0].tensors[0].page_stride_bytes", |r| {
            r.groups[0].tensors[0].page_stride_bytes = 120
        }),
        ("groups[0].tensors[0].page_stride_bytes", |r| {
            r.groups[0].tensors[0].strides[1] = 29;
            r.groups[0].tensors[0].page_stride_bytes = 58;
        }),
        ("groups[0].tensors[0].shape[0]", |r| {
            r.groups[0].tensors[0].page_axis = 0
        }),
        ("groups[0].tensors[1].allocation", |r| {
            r.groups[0].tensors[1].allocation = 2
        }),
        ("groups[0].tensors[1].offset_bytes", |r| {
            r.groups[0].tensors[1].offset_bytes = 785
        }),
        // Scales that overlap, page by page and scale by scale.
        ("groups[0].tensors[1].page_stride_bytes", |r| {
            r.groups[0].tensors[1].strides[0] = 1;
            r.groups[0].tensors[1].page_stride_bytes = 4;
        }),
        ("groups[0].tensors[1].strides", |r| {
            r.groups[0].tensors[1].strides = vec![1, 5];
            r.groups[0].tensors[1].page_stride_bytes = 4;
        }),
        // Scales between the pages: with another stride, and in the second plane only.
        ("groups[0].tensors[1].page_stride_bytes", |r| {
            r.groups[0].tensors[1].offset_bytes = 716
        }),
        ("groups[0].tensors[1].offset_bytes", |r| {
            r.groups[0].tensors[1].strides[0] = 15;
            r.groups[0].tensors[1].page_stride_bytes = 60;
            r.groups[0].tensors[1].offset_bytes = 364;
        }),
        // In the layer of the data instead of a layer of their own.
        ("groups[0].tensors[1].role", |r| {
            r.groups[0].tensors[1].layer = 0
        }),
        ("groups[0].tensors[1].element_bytes", |r| {
            r.groups[0].tensors[1].element_bytes = 0
        }),
    ];
    for (number, (field, spoil)) in cases.iter().enumerate() {
        let mut registration = planes_with_scales();
        spoil(&mut registration);
        let error = validate(&registration).expect_err("a contradiction");
        assert_eq!(&error.field, field, "case {number}: {error}");
    }
}

#[test]
fn a_page_in_too_many_pieces_is_refused() {
    // One piece for each scale, because the pages of a scale are contiguous.
    let with = |scales: u64| {
        let mut registration = planes_with_scales();
        registration.allocations[0].bytes = 1 << 20;
        let tensor = &mut registration.groups[0].tensors[1];
        tensor.shape[1] = scales;
        tensor.strides = vec![1, 6];
        tensor.page_bytes = scales * 4;
        tensor.page_stride_bytes = 4;
        validate(&registration)
    };
    let most = FRAGMENTS_MAX as u64 - 2;
    assert_eq!(
        with(most).map(|layout| layout.groups[0].fragments.len()),
        Ok(FRAGMENTS_MAX)
    );
    let error = with(most + 1).expect_err("too many");
    assert_eq!(error.field, "groups[0].tensors[1].strides");
}

#[test]
fn the_stride_of_a_single_page_is_ignored() {
    let with = |offset_bytes| {
        let mut registration = planes_with_scales();
        registration.groups[0].device_pages = 1;
        let tensors = &mut registration.groups[0].tensors;
        tensors[0].shape[1] = 1;
        tensors[0].strides = vec![30, 0, 1];
        tensors[0].page_stride_bytes = 0;
        tensors[1].shape[0] = 1;
        tensors[1].offset_bytes = offset_bytes;
        validate(&registration).map(|layout| layout.groups[0].fragments.len())
    };
    assert_eq!(with(120), Ok(2));
    let error = with(119).expect_err("an overlap");
    assert_eq!(error.field, "groups[0].tensors[1].offset_bytes");
}

#[test]
fn a_page_larger_than_the_limit_in_sum_is_refused() {
    let error = refusal(|r| {
        r.allocations.iter_mut().for_each(|it| it.bytes = u64::MAX);
        for tensor in &mut r.groups[0].tensors {
            tensor.shape = vec![6, 1 << 28];
            tensor.strides = vec![1 << 28, 1];
            tensor.page_bytes = 1 << 29;
            tensor.page_stride_bytes = 1 << 29;
        }
    });
    assert_eq!(error.field, "groups[0].tensors");
}

#[test]
fn the_fingerprint_follows_the_meaning_of_the_bytes() {
    let of = |spoil: Spoil| {
        let mut registration = separate_layers();
        spoil(&mut registration);
        validate(&registration).expect("consistent").groups[0].layout_fingerprint
    };
    let base = of(|_| ());
    let same: &[Spoil] = &[
        |r| r.rank = Rank(0),
        |r| r.shard = 0,
        |r| r.allocations.swap(0, 1),
        |r| r.device_uuid = Some("GPU-0".to_owned()),
        |r| {
            r.groups[0].device_pages = 5;
            r.groups[0]
                .tensors
                .iter_mut()
                .for_each(|tensor| tensor.shape[0] = 5);
        },
        |r| r.groups[0].tensors[1].offset_bytes = 128,
        |r| r.groups[0].tensors[1].strides = vec![64, 16, 5, 1],
        |r| {
            r.groups[0].tensors[0].shape.push(1);
            r.groups[0].tensors[0].strides.push(99);
        },
    ];
    for (number, spoil) in same.iter().enumerate() {
        assert_eq!(of(*spoil), base, "case {number}");
    }
    let other: &[Spoil] = &[
        |r| r.content = b"tesu".to_vec(),
        |r| r.content.push(0),
        |r| r.groups[0].engine_page_tokens = 4,
        |r| r.tp_size = 3,
        |r| r.groups[0].tensors[7].role = TensorRole::State,
        |r| {
            r.groups[0].tensors[7].element_bytes = 1;
            r.groups[0].tensors[7].strides = vec![128, 30, 10, 1];
            r.groups[0].tensors[7].shape[3] = 10;
        },
        |r| r.groups[0].tensors[0].strides = vec![64, 5, 10, 1],
        |r| {
            r.groups[0].tensors[0].shape = vec![6, 3, 2, 5];
            r.groups[0].tensors[0].strides = vec![64, 10, 5, 1];
        },
    ];
    for (number, spoil) in other.iter().enumerate() {
        assert_ne!(of(*spoil), base, "case {number}");
    }
}

#[test]
fn a_registration_without_content_is_refused_with_the_remedy() {
    let absent = refusal(|r| r.content.clear()).to_string();
    assert!(
        absent.starts_with("content is absent or empty: name model, revision, dtype"),
        "{absent}"
    );
    let long = refusal(|r| r.content = vec![1; CONTENT_BYTES_MAX + 1]);
    assert_eq!(
        (long.field.as_str(), long.value.as_str()),
        ("content", "1025 bytes long")
    );
    let mut longest = separate_layers();
    longest.content = vec![0; CONTENT_BYTES_MAX];
    assert!(validate(&longest).is_ok());
}

#[test]
fn slices_that_contradict_the_shape_are_refused() {
    let sliced = |kv_heads| {
        let mut registration = separate_layers();
        for tensor in &mut registration.groups[0].tensors {
            tensor.slices = Some(Slices::Heads {
                kv_heads,
                head_axis: 2,
                token_axis: 1,
            });
        }
        validate(&registration)
    };
    let layout = |registration| validate(&registration).expect("a layout");
    assert_eq!(sliced(6), Ok(layout(separate_layers())));
    assert_eq!(
        sliced(8).expect_err("a contradiction").to_string(),
        "slices is contradictory: group 0, layer 0, k: the registration has shape[head_axis] 3, but kv_heads is 8, of \
         which each of 2 ranks holds 4"
    );
}

#[test]
fn the_content_of_two_ranks_can_be_compared() {
    let of = |content: &[u8]| {
        let mut registration = separate_layers();
        registration.content = content.to_vec();
        let layout = validate(&registration).expect("consistent");
        layout.geometry.groups[0].content_digest
    };
    assert_eq!(of(b"model a"), of(b"model a"));
    assert_ne!(of(b"model a"), of(b"model b"));
}
