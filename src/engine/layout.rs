//! Layout of the reference engine's pages in one allocation.

use crate::settings::{EngineLayout, RankSettings};
use kvferry_types::{
    Allocation, AllocationHandle, AllocationKind, GroupMemory, Nonce, Registration, TensorView,
};
use kvferry_workload::models::ModelGroup;

/// Bytes after the pages for the nonce of a registration. The nonce needs its own bytes, because a rank registers again
/// while its pages are in use.
pub(super) const NONCE_ROOM_BYTES: u64 = 64;

/// A fragment of a page: one layer and role of a group.
#[derive(Debug, Clone, Copy)]
pub struct Fragment {
    /// Index of the group.
    pub group: usize,
    /// Layer within the group.
    pub layer: u32,
    /// Index of the role within the layer.
    pub role: usize,
}

impl EngineLayout {
    /// Byte offset of a fragment of a page.
    pub fn offset(self, settings: &RankSettings, fragment: Fragment, page: u32) -> u64 {
        let groups = &settings.groups;
        let geometry = &groups[fragment.group].geometry;
        let layer = u64::from(fragment.layer);
        let tensor = layer * geometry.roles.len() as u64 + fragment.role as u64;
        match self {
            Self::LayerSeparate => {
                let before = groups[..fragment.group].iter();
                let before: u64 = before.map(|group| group.geometry.page_bytes()).sum();
                let pages = u64::from(settings.device_pages);
                before * pages + (tensor * pages + u64::from(page)) * geometry.fragment_bytes
            }
            Self::Contiguous => {
                u64::from(page) * largest_page_bytes(settings) + tensor * geometry.fragment_bytes
            }
        }
    }

    fn page_stride_bytes(self, settings: &RankSettings, group: usize) -> u64 {
        match self {
            Self::LayerSeparate => settings.groups[group].geometry.fragment_bytes,
            Self::Contiguous => largest_page_bytes(settings),
        }
    }
}

fn largest_page_bytes(settings: &RankSettings) -> u64 {
    let groups = settings.groups.iter();
    let bytes = groups.map(|group| group.geometry.page_bytes());
    bytes.max().unwrap_or(0)
}

/// Bytes of all pages, and the offset of the nonce.
pub(super) fn pages_bytes(settings: &RankSettings) -> u64 {
    let groups = settings.groups.iter();
    let all = groups.map(|group| group.geometry.page_bytes()).sum();
    let page_bytes = match settings.layout {
        EngineLayout::LayerSeparate => all,
        EngineLayout::Contiguous => largest_page_bytes(settings),
    };
    page_bytes * u64::from(settings.device_pages)
}

/// The pages of one group in a registration.
fn group_memory(settings: &RankSettings, group: usize) -> GroupMemory {
    let ModelGroup { layers, geometry } = settings.groups[group];
    let element_bytes = u64::from(geometry.element_bytes);
    let layout = settings.layout;
    let view = |layer: u32, role: usize| {
        let fragment = Fragment { group, layer, role };
        let stride = layout.page_stride_bytes(settings, group);
        TensorView {
            layer,
            role: geometry.roles[role],
            allocation: 0,
            offset_bytes: layout.offset(settings, fragment, 0),
            shape: vec![
                u64::from(settings.device_pages),
                geometry.fragment_bytes / element_bytes,
            ],
            strides: vec![stride / element_bytes, 1],
            element_bytes: geometry.element_bytes,
            page_axis: 0,
            page_bytes: geometry.fragment_bytes,
            page_stride_bytes: stride,
            slices: None,
        }
    };
    let tensors = (0..geometry.layers)
        .flat_map(|layer| (0..geometry.roles.len()).map(move |role| view(layer, role)));
    let (attention, window_tokens) = layers.kind.attention();
    GroupMemory {
        attention,
        window_tokens,
        eagle: layers.drafted,
        engine_page_tokens: layers.page_tokens,
        device_pages: settings.device_pages,
        layers: geometry.layers,
        tensors: tensors.collect(),
    }
}

/// The registration of a rank's memory, handed over under `ticket`.
pub fn describe(settings: &RankSettings, ticket: [u8; 16], nonce: Nonce) -> Registration {
    let groups = 0..settings.groups.len();
    Registration {
        groups: groups.map(|group| group_memory(settings, group)).collect(),
        hash_tokens: settings.hash_tokens,
        hit_tokens: settings.hit_tokens,
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
