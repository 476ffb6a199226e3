//! Layout of the reference engine's pages in one allocation.

use crate::settings::{EngineLayout, RankSettings};
use kvferry_types::{
    Allocation, AllocationHandle, AllocationKind, Attention, GroupMemory, Nonce, Registration,
    TensorRole, TensorView,
};

/// Bytes after the pages for the nonce of a registration. The nonce needs its own bytes, because a rank registers again
/// while its pages are in use.
pub(super) const NONCE_ROOM_BYTES: u64 = 64;

impl EngineLayout {
    /// Byte offset of a fragment; `role` is its index within the layer.
    pub fn offset(self, settings: &RankSettings, layer: u32, role: usize, page: u32) -> u64 {
        let geometry = &settings.geometry;
        let tensor = u64::from(layer) * geometry.roles.len() as u64 + role as u64;
        match self {
            Self::LayerSeparate => {
                (tensor * u64::from(settings.device_pages) + u64::from(page))
                    * geometry.fragment_bytes
            }
            Self::Contiguous => {
                u64::from(page) * geometry.page_bytes() + tensor * geometry.fragment_bytes
            }
        }
    }

    fn page_stride_bytes(self, settings: &RankSettings) -> u64 {
        match self {
            Self::LayerSeparate => settings.geometry.fragment_bytes,
            Self::Contiguous => settings.geometry.page_bytes(),
        }
    }
}

/// Bytes of all pages, and the offset of the nonce.
pub(super) fn pages_bytes(settings: &RankSettings) -> u64 {
    settings.geometry.page_bytes() * u64::from(settings.device_pages)
}

/// The registration of a rank's memory, handed over under `ticket`.
pub fn describe(settings: &RankSettings, ticket: [u8; 16], nonce: Nonce) -> Registration {
    let geometry = &settings.geometry;
    let element_bytes = u64::from(geometry.element_bytes);
    let layout = settings.layout;
    let view = |layer: u32, index: usize, role: TensorRole| TensorView {
        layer,
        role,
        allocation: 0,
        offset_bytes: layout.offset(settings, layer, index, 0),
        shape: vec![
            u64::from(settings.device_pages),
            geometry.fragment_bytes / element_bytes,
        ],
        strides: vec![layout.page_stride_bytes(settings) / element_bytes, 1],
        element_bytes: geometry.element_bytes,
        page_axis: 0,
        page_bytes: geometry.fragment_bytes,
        page_stride_bytes: layout.page_stride_bytes(settings),
    };
    let tensors = (0..geometry.layers).flat_map(|layer| {
        geometry
            .roles
            .iter()
            .enumerate()
            .map(move |(index, role)| (layer, index, *role))
    });
    Registration {
        groups: vec![GroupMemory {
            attention: Attention::Full,
            window_tokens: 0,
            eagle: false,
            engine_page_tokens: settings.engine_page_tokens,
            device_pages: settings.device_pages,
            layers: geometry.layers,
            tensors: tensors
                .map(|(layer, index, role)| view(layer, index, role))
                .collect(),
        }],
        hash_tokens: 0,
        hit_tokens: 0,
        content: settings.content.clone(),
        rank: settings.rank,
        tp_size: settings.ranks,
        shard: settings.shard.0,
        allocations: vec![Allocation {
            kind: AllocationKind::SharedMemory,
            handle: AllocationHandle::Ticket(ticket),
            bytes: pages_bytes(settings) + NONCE_ROOM_BYTES,
        }],
        nonce,
        proofs: Vec::new(),
        device_uuid: None,
        timeline: None,
    }
}
