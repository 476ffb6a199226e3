//! Registrations of a model for any number of ranks and tokens of a page.

use kvferry_types::{
    Allocation, AllocationHandle, AllocationKind, Attention, GroupMemory, Nonce, Rank,
    Registration, Slices, StatePart, TensorRole, TensorView,
};

use crate::{PlanSide, Side};

/// An axis inside a page: what it counts, and its length for axes that do not depend on the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Inner {
    Heads,
    Tokens,
    Other(u64),
}

/// One tensor of every layer of a group.
#[derive(Debug, Clone)]
pub(super) enum Tensor {
    /// Heads of the whole model, and the axes of a page in memory order, outermost first.
    Heads(u32, Vec<Inner>),
    /// Axes of a page that every rank holds whole.
    Whole(Vec<Inner>),
    /// Parts of a state: dimension of the whole model, and bytes of a row.
    Parts(Vec<(u32, u64)>),
}

#[derive(Debug, Clone)]
pub(super) struct Group {
    pub(super) attention: Attention,
    pub(super) window_tokens: u32,
    pub(super) layers: u32,
    pub(super) tensors: Vec<(TensorRole, Tensor)>,
}

impl Group {
    /// A group of full attention with one layer, and one tensor of K.
    pub(super) fn of(tensor: Tensor) -> Self {
        Self {
            attention: Attention::Full,
            window_tokens: 0,
            layers: 1,
            tensors: vec![(TensorRole::K, tensor)],
        }
    }
}

/// Heads before tokens, with heads of this many bytes.
pub(super) fn heads_first(heads: u32, bytes: u64) -> Tensor {
    Tensor::Heads(
        heads,
        vec![Inner::Heads, Inner::Tokens, Inner::Other(bytes)],
    )
}

/// Tokens before heads.
pub(super) fn tokens_first(heads: u32, bytes: u64) -> Tensor {
    Tensor::Heads(
        heads,
        vec![Inner::Tokens, Inner::Heads, Inner::Other(bytes)],
    )
}

/// The slice of the heads of one rank: the first, and their number. A second way to say what `holders` computes.
pub(super) fn held_heads(heads: u32, ranks: u16, rank: u16) -> (u32, u32) {
    let (ranks, rank) = (u32::from(ranks), u32::from(rank));
    if heads.is_multiple_of(ranks) {
        let each = heads / ranks;
        (rank * each, each)
    } else {
        (rank / (ranks / heads), 1)
    }
}

/// Memory of a rank. State groups have pages of `page_tokens` as well.
pub(super) fn registration(groups: &[Group], ranks: u16, page_tokens: u32) -> Registration {
    let groups = groups.iter().map(|group| memory(group, ranks, page_tokens));
    Registration {
        groups: groups.collect(),
        hash_tokens: 1,
        hit_tokens: page_tokens,
        content: b"model".to_vec(),
        rank: Rank(0),
        tp_size: ranks,
        shard: 0,
        allocations: vec![Allocation {
            kind: AllocationKind::SharedMemory,
            handle: AllocationHandle::Path("/dev/shm/kv".to_owned()),
            bytes: 1 << 40,
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

pub(super) fn source(groups: &[Group], ranks: u16, page_tokens: u32) -> Side {
    Side::of(PlanSide::Source, &registration(groups, ranks, page_tokens)).expect("a side")
}

pub(super) fn target(groups: &[Group], ranks: u16, page_tokens: u32) -> Side {
    Side::of(PlanSide::Target, &registration(groups, ranks, page_tokens)).expect("a side")
}

fn memory(group: &Group, ranks: u16, page_tokens: u32) -> GroupMemory {
    let tensors = (0..group.layers).flat_map(|layer| {
        let tensors = group.tensors.iter();
        tensors.map(move |(role, tensor)| view(layer, *role, tensor, ranks, page_tokens))
    });
    GroupMemory {
        attention: group.attention,
        window_tokens: group.window_tokens,
        eagle: false,
        engine_page_tokens: page_tokens,
        device_pages: 8,
        layers: group.layers,
        tensors: tensors.collect(),
    }
}

/// A tensor whose axes are listed from the innermost to the outermost, with the pages last, so that the order of the
/// shape is not that of the memory.
fn view(layer: u32, role: TensorRole, tensor: &Tensor, ranks: u16, page_tokens: u32) -> TensorView {
    let (lengths, slices) = match tensor {
        Tensor::Heads(heads, axes) => {
            let place = |wanted| {
                axes.iter()
                    .rev()
                    .position(|axis| *axis == wanted)
                    .expect("named") as u32
            };
            let slices = Slices::Heads {
                kv_heads: *heads,
                head_axis: place(Inner::Heads),
                token_axis: place(Inner::Tokens),
            };
            let held = u64::from(held_heads(*heads, ranks, 0).1);
            (lengths(axes, held, page_tokens), slices)
        }
        Tensor::Whole(axes) => {
            let token_axis = axes
                .iter()
                .rev()
                .position(|axis| *axis == Inner::Tokens)
                .expect("named") as u32;
            (lengths(axes, 1, page_tokens), Slices::Whole { token_axis })
        }
        Tensor::Parts(parts) => {
            let bytes = parts
                .iter()
                .map(|(dim, row)| u64::from(dim / u32::from(ranks)) * row);
            let named = parts.iter().map(|(dim, row_bytes)| StatePart {
                dim: *dim,
                row_bytes: *row_bytes,
            });
            (
                vec![bytes.sum()],
                Slices::Parts {
                    parts: named.collect(),
                },
            )
        }
    };
    let mut shape: Vec<u64> = lengths.into_iter().rev().collect();
    let mut strides = Vec::new();
    let mut stride = 1;
    for length in &shape {
        strides.push(stride);
        stride *= length;
    }
    let page_axis = shape.len() as u32;
    shape.push(8);
    strides.push(stride);
    TensorView {
        layer,
        role,
        allocation: 0,
        offset_bytes: 0,
        shape,
        strides,
        element_bytes: 1,
        page_axis,
        page_bytes: stride,
        page_stride_bytes: stride,
        slices: Some(slices),
    }
}

/// Lengths of the axes on a rank, outermost first.
pub(super) fn lengths(axes: &[Inner], heads: u64, page_tokens: u32) -> Vec<u64> {
    let lengths = axes.iter().map(|axis| match axis {
        Inner::Heads => heads,
        Inner::Tokens => u64::from(page_tokens),
        Inner::Other(length) => *length,
    });
    lengths.collect()
}
