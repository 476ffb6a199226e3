//! Descriptions of an engine's memory.

use std::collections::BTreeMap;

use kvferry_memory::{FragmentLayout, PageLayout, validate};
use kvferry_protocol::{Header, Message, MessageKind, VERSION, decode};
use kvferry_types::{
    Allocation, AllocationHandle, AllocationKind, Attention, Epoch, GroupMemory, Nonce, Rank,
    Registration, RequestId, TensorRole, TensorView,
};

use super::Input;
use super::allocated::most_held;

/// Pages of a layout that are compared with each other: the first ones and the last one.
const COMPARED_PAGES: u64 = 40;
/// Ranges that are compared at most.
const COMPARED_RANGES: usize = 20_000;
/// Memory that a check may hold: claims and fragments of [`kvferry_memory::FRAGMENTS_MAX`] pieces, and as much for plans.
const CHECK_BYTES: usize = 8 << 20;

/// A description that is accepted has each byte of every page inside its allocation, and no byte twice in a group.
pub fn registration(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let registration = match input.below(4) {
        0 => match decode(register(), input.rest()).map(|envelope| envelope.message) {
            Ok(Message::Register(register)) => register.registration,
            _ => return,
        },
        _ => described(&mut input),
    };
    let (checked, held) = most_held(|| validate(&registration));
    assert!(held <= CHECK_BYTES + 64 * bytes.len(), "{held} bytes held");
    let Ok(layout) = checked else { return };
    assert_eq!(layout.groups.len(), registration.groups.len());
    for (group, layout) in registration.groups.iter().zip(&layout.groups) {
        check_sizes(group, layout);
        check_inside(&registration, layout);
        check_overlap(layout);
    }
}

/// The header of a registration.
fn register() -> Header {
    Header {
        version: VERSION,
        kind: MessageKind::Register.number(),
        correlation: RequestId(1),
        deadline_ms: 1,
        required: 0,
        epoch: Epoch(1),
    }
}

fn check_sizes(group: &GroupMemory, layout: &PageLayout) {
    let stated: u64 = group.tensors.iter().map(|tensor| tensor.page_bytes).sum();
    assert_eq!(layout.page_bytes, stated);
    assert!(layout.page_bytes <= layout.slot_bytes);
    assert_eq!(layout.device_pages, group.device_pages);
    let mut next = 0;
    for fragment in &layout.fragments {
        assert_eq!(fragment.block_offset_bytes, next, "a gap in the slot");
        assert!(fragment.page_bytes > 0);
        next += fragment.page_bytes;
    }
    assert_eq!(next, layout.page_bytes);
}

/// The bytes of a page of a fragment.
fn range(fragment: &FragmentLayout, page: u64) -> (u128, u128) {
    let start =
        u128::from(fragment.base_bytes) + u128::from(page) * u128::from(fragment.page_stride_bytes);
    (start, start + u128::from(fragment.page_bytes))
}

fn check_inside(registration: &Registration, layout: &PageLayout) {
    let last = u64::from(layout.device_pages) - 1;
    for fragment in &layout.fragments {
        let index = usize::try_from(fragment.allocation).expect("small");
        let bytes = registration.allocations[index].bytes;
        let (_, end) = range(fragment, last);
        assert!(end <= u128::from(bytes), "{fragment:?} beyond {bytes}");
    }
}

fn check_overlap(layout: &PageLayout) {
    let pages = u64::from(layout.device_pages);
    let most = (COMPARED_RANGES / layout.fragments.len().max(1)).max(2) as u64;
    let compared = COMPARED_PAGES.min(most).min(pages);
    let compared = (0..compared).chain((pages > compared).then_some(pages - 1));
    let mut ranges: BTreeMap<u32, Vec<(u128, u128)>> = BTreeMap::new();
    for page in compared {
        for fragment in &layout.fragments {
            let list = ranges.entry(fragment.allocation).or_default();
            list.push(range(fragment, page));
        }
    }
    for list in ranges.values_mut() {
        list.sort_unstable();
        let apart = list.windows(2).all(|two| two[0].1 <= two[1].0);
        assert!(apart, "two pages share a byte");
    }
}

/// A description with small numbers, most of which fit together.
fn described(input: &mut Input<'_>) -> Registration {
    let allocations = (0..1 + input.below(3)).map(|number| Allocation {
        kind: AllocationKind::SharedMemory,
        handle: AllocationHandle::Path(format!("/dev/shm/{number}")),
        bytes: match input.rarely() {
            true => input.number(),
            false => 1 << (4 + input.below(16)),
        },
    });
    let allocations: Vec<Allocation> = allocations.collect();
    let groups = 1 + input.below(2);
    let groups = (0..groups).map(|_| group(input, allocations.len()));
    Registration {
        groups: groups.collect(),
        hash_tokens: 0,
        hit_tokens: 0,
        content: b"c".to_vec(),
        rank: Rank(0),
        tp_size: 1,
        shard: 0,
        allocations,
        nonce: Nonce {
            allocation: 0,
            offset_bytes: 0,
            bytes: vec![7; 16],
        },
        proofs: Vec::new(),
        device_uuid: None,
        timeline: None,
    }
}

fn group(input: &mut Input<'_>, allocations: usize) -> GroupMemory {
    let device_pages = match input.rarely() {
        true => input.number32(),
        false => 1 + input.below(12) as u32,
    };
    let count = 1 + input.below(4);
    let split = input.flag();
    let tensors: Vec<TensorView> = (0..count)
        .map(|number| {
            let (layer, role) = match split {
                true => (number / 2, [TensorRole::K, TensorRole::V][number % 2]),
                false => (number, TensorRole::Kv),
            };
            tensor(input, (layer as u32, role), allocations, device_pages)
        })
        .collect();
    let layers = tensors.last().map_or(0, |tensor| tensor.layer + 1);
    GroupMemory {
        attention: Attention::Full,
        window_tokens: 0,
        eagle: false,
        engine_page_tokens: 4,
        device_pages,
        layers,
        tensors,
    }
}

/// A tensor whose axes nest in any order, with gaps, and whose page sizes agree with them.
fn tensor(
    input: &mut Input<'_>,
    (layer, role): (u32, TensorRole),
    allocations: usize,
    device_pages: u32,
) -> TensorView {
    let element_bytes = input.one_of(&[1_u32, 2, 3, 4]);
    let axes = 1 + input.below(4);
    let page_axis = input.below(axes);
    let mut shape: Vec<u64> = (0..axes).map(|_| 1 + input.below(4) as u64).collect();
    shape[page_axis] = u64::from(device_pages);
    // The order of the axes in memory, innermost first: each axis is put at one of the places so far.
    let mut order: Vec<usize> = Vec::new();
    for axis in 0..axes {
        order.insert(input.below(order.len() + 1), axis);
    }
    let mut strides = vec![0; axes];
    let mut next: u64 = 1;
    for axis in order {
        strides[axis] = match input.below(8) {
            0 => next.saturating_add(input.below(5) as u64),
            1 => next.saturating_mul(2),
            2 if input.rarely() => input.number(),
            _ => next,
        };
        next = strides[axis].saturating_mul(shape[axis]);
    }
    let inner = shape
        .iter()
        .enumerate()
        .filter(|(axis, _)| *axis != page_axis);
    let elements: u64 = inner.map(|(_, length)| *length).product();
    let bytes = u64::from(element_bytes);
    TensorView {
        layer,
        role,
        allocation: input.below(allocations) as u32,
        offset_bytes: match input.below(4) {
            0 => input.number(),
            _ => input.below(64) as u64 * bytes,
        },
        page_bytes: elements * bytes,
        page_stride_bytes: strides[page_axis].saturating_mul(bytes),
        shape,
        strides,
        element_bytes,
        page_axis: page_axis as u32,
        slices: None,
    }
}
