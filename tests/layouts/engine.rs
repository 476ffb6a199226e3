//! Engines with arbitrary KV layouts: an order of axes, gaps between them, and the division into tensors.

use kvferry_types::{
    Allocation, AllocationHandle, AllocationKind, Attention, GroupMemory, Nonce, Rank,
    Registration, TensorRole, TensorView,
};

/// The meaning of an axis of the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axis {
    Layer,
    Page,
    /// Keys, then values.
    Half,
    Head,
    Token,
    /// The elements of one head for one token.
    Content,
}

/// The division of keys and values into tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Roles {
    /// One tensor of keys and one of values.
    Split,
    /// One tensor of both.
    Packed,
    /// One latent plane.
    Latent,
}

/// An additional tensor for each tensor: a few numbers per page, described as layers of their own.
#[derive(Debug, Clone, Copy)]
pub struct Scales {
    pub per_page: u64,
    pub element_bytes: u32,
    /// `[page][scale]`; otherwise `[scale][page]`.
    pub page_first: bool,
    /// All scales are in an allocation of their own; otherwise they are behind the data that they belong to.
    pub own_allocation: bool,
}

/// Offsets of the bytes of one page of a tensor in its allocation, ascending, from shape and strides alone.
pub fn addresses(tensor: &TensorView, page: u32) -> Vec<usize> {
    let element_bytes = u64::from(tensor.element_bytes);
    let mut elements = vec![0];
    for axis in 0..tensor.shape.len() {
        let indices = match axis == tensor.page_axis as usize {
            true => u64::from(page)..u64::from(page) + 1,
            false => 0..tensor.shape[axis],
        };
        elements = elements
            .iter()
            .flat_map(|at| indices.clone().map(move |i| at + i * tensor.strides[axis]))
            .collect();
    }
    let mut bytes = Vec::new();
    for at in elements {
        let start = tensor.offset_bytes + at * element_bytes;
        bytes.extend((start..start + element_bytes).map(|byte| byte as usize));
    }
    bytes.sort_unstable();
    bytes
}

#[derive(Debug, Clone)]
pub struct Engine {
    /// All six axes in memory order, outermost first.
    pub order: Vec<Axis>,
    /// Unused elements behind each axis of `order`.
    pub gaps: [u64; 6],
    /// The order in which a tensor names its axes.
    pub view: Vec<Axis>,
    pub layers: u64,
    pub pages: u64,
    pub heads: u64,
    pub tokens: u64,
    pub content: u64,
    pub element_bytes: u32,
    /// Bytes before the first element of each allocation.
    pub lead_bytes: u64,
    pub roles: Roles,
    pub allocation_per_layer: bool,
    pub scales: Option<Scales>,
}

pub const AXES: [Axis; 6] = [
    Axis::Layer,
    Axis::Page,
    Axis::Half,
    Axis::Head,
    Axis::Token,
    Axis::Content,
];

impl Engine {
    /// An engine without gaps, with one allocation, small lengths of all axes, and fragments of no round size.
    pub fn new(order: [Axis; 6], roles: Roles) -> Self {
        Self {
            order: order.to_vec(),
            gaps: [0; 6],
            view: AXES.to_vec(),
            layers: 3,
            pages: 7,
            heads: 2,
            tokens: 4,
            content: 5,
            element_bytes: 2,
            lead_bytes: 0,
            roles,
            allocation_per_layer: false,
            scales: None,
        }
    }

    fn length(&self, axis: Axis) -> u64 {
        match axis {
            Axis::Layer if self.allocation_per_layer => 1,
            Axis::Layer => self.layers,
            Axis::Page => self.pages,
            Axis::Half if self.roles == Roles::Latent => 1,
            Axis::Half => 2,
            Axis::Head => self.heads,
            Axis::Token => self.tokens,
            Axis::Content => self.content,
        }
    }

    /// Elements from one index of the axis to the next. `None` gives the size of the whole memory.
    fn stride(&self, axis: Option<Axis>) -> u64 {
        let mut extent = 1;
        for (place, inner) in self.order.iter().enumerate().rev() {
            if Some(*inner) == axis {
                break;
            }
            extent = extent * self.length(*inner) + self.gaps[place];
        }
        extent
    }

    /// The tensors of a layer: role, and the half of the layer's memory that it covers.
    fn tensors(&self) -> &'static [(TensorRole, u64)] {
        match self.roles {
            Roles::Split => &[(TensorRole::K, 0), (TensorRole::V, 1)],
            Roles::Packed => &[(TensorRole::Kv, 0)],
            Roles::Latent => &[(TensorRole::Latent, 0)],
        }
    }

    fn data(&self, layer: u64, role: TensorRole, half: u64) -> TensorView {
        let inside = |axis: &Axis| match axis {
            Axis::Layer => false,
            Axis::Half => self.roles == Roles::Packed,
            _ => true,
        };
        let axes: Vec<Axis> = self.view.iter().copied().filter(inside).collect();
        let (allocation, place) = match self.allocation_per_layer {
            true => (layer, 0),
            false => (0, layer * self.stride(Some(Axis::Layer))),
        };
        let place = place + half * self.stride(Some(Axis::Half));
        let page_axis = axes.iter().position(|axis| *axis == Axis::Page);
        view(
            (layer, role, allocation),
            self.lead_bytes + place * u64::from(self.element_bytes),
            axes.iter()
                .map(|axis| (self.length(*axis), self.stride(Some(*axis))))
                .collect(),
            page_axis.expect("a page axis"),
            self.element_bytes,
        )
    }

    /// Adds the tensors of the scales, and the room that they need in the allocations.
    fn add_scales(&self, scales: Scales, tensors: &mut Vec<TensorView>, sizes: &mut Vec<u64>) {
        if scales.own_allocation {
            sizes.push(self.lead_bytes);
        }
        for layer in 0..self.layers {
            for (role, _) in self.tensors() {
                let allocation = match self.allocation_per_layer && !scales.own_allocation {
                    true => layer as usize,
                    false => sizes.len() - 1,
                };
                let strides = match scales.page_first {
                    true => (scales.per_page, 1),
                    false => (1, self.pages),
                };
                tensors.push(view(
                    (self.layers + layer, *role, allocation as u64),
                    sizes[allocation],
                    vec![(scales.per_page, strides.1), (self.pages, strides.0)],
                    1,
                    scales.element_bytes,
                ));
                sizes[allocation] += scales.per_page * self.pages * u64::from(scales.element_bytes);
            }
        }
    }

    pub fn registration(&self) -> Registration {
        let bytes = self.lead_bytes + self.stride(None) * u64::from(self.element_bytes);
        let mut sizes = match self.allocation_per_layer {
            true => vec![bytes; self.layers as usize],
            false => vec![bytes],
        };
        let mut tensors: Vec<TensorView> = (0..self.layers)
            .flat_map(|layer| {
                let roles = self.tensors().iter();
                roles.map(move |(role, half)| self.data(layer, *role, *half))
            })
            .collect();
        let mut layers = self.layers;
        if let Some(scales) = self.scales {
            self.add_scales(scales, &mut tensors, &mut sizes);
            layers *= 2;
        }
        registration(self.pages, layers, &sizes, tensors)
    }
}

/// A tensor whose page size follows from its axes: length and stride of each, in elements.
pub fn view(
    (layer, role, allocation): (u64, TensorRole, u64),
    offset_bytes: u64,
    axes: Vec<(u64, u64)>,
    page_axis: usize,
    element_bytes: u32,
) -> TensorView {
    let page = axes[page_axis];
    let elements = axes.iter().map(|axis| axis.0).product::<u64>() / page.0;
    TensorView {
        layer: layer as u32,
        role,
        allocation: allocation as u32,
        offset_bytes,
        shape: axes.iter().map(|axis| axis.0).collect(),
        strides: axes.iter().map(|axis| axis.1).collect(),
        element_bytes,
        page_axis: page_axis as u32,
        page_bytes: elements * u64::from(element_bytes),
        page_stride_bytes: page.1 * u64::from(element_bytes),
        slices: None,
    }
}

/// A registration with allocations of the given sizes, each with 16 bytes added at its end for the nonce.
pub fn registration(
    pages: u64,
    layers: u64,
    sizes: &[u64],
    tensors: Vec<TensorView>,
) -> Registration {
    let allocations = sizes.iter().enumerate().map(|(index, bytes)| Allocation {
        kind: AllocationKind::SharedMemory,
        handle: AllocationHandle::Path(format!("/dev/shm/{index}")),
        bytes: bytes + 16,
    });
    Registration {
        groups: vec![GroupMemory {
            attention: Attention::Full,
            window_tokens: 0,
            eagle: false,
            engine_page_tokens: 4,
            device_pages: pages as u32,
            layers: layers as u32,
            tensors,
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
            offset_bytes: sizes[0],
            bytes: vec![1; 16],
        },
        proofs: Vec::new(),
        device_uuid: None,
        timeline: None,
    }
}
