//! Page layouts: the location of each byte of a page on the device, and in a block of the lower tiers.

use std::sync::Arc;

use kvferry_types::{
    GroupGeometry, GroupId, GroupMemory, MemoryGeometry, Registration, TensorRole, TensorView,
};

/// Domain separator of the layout hash. A change of the recipe must change it, so that fingerprints differ.
const FINGERPRINT_DOMAIN: &[u8] = b"kvferry page layout 2\0";

/// Domain separator of the digest of the content alone.
const CONTENT_DOMAIN: &[u8] = b"kvferry content 1\0";

/// One contiguous range of every page: a tensor's page, or a piece of it where the axes inside a page leave gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FragmentLayout {
    /// Layer within the group, from 0.
    pub layer: u32,
    /// K, V, or another role of the range's tensor.
    pub role: TensorRole,
    /// Index into [`Registration::allocations`].
    pub allocation: u32,
    /// Byte offset of page 0 in the allocation.
    pub base_bytes: u64,
    /// Bytes of the range.
    pub page_bytes: u64,
    /// Bytes from one page to the next in the allocation, at least `page_bytes`.
    pub page_stride_bytes: u64,
    /// Byte offset of the range inside a page of the lower tiers.
    pub block_offset_bytes: u64,
}

/// The layouts of all groups of one rank, derived from a checked registration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryLayout {
    /// By group; never empty.
    pub groups: Vec<Arc<PageLayout>>,
    /// Sizes on which all ranks must agree.
    pub geometry: MemoryGeometry,
}

impl MemoryLayout {
    /// Derives the layouts of a registration in which every field was checked before.
    pub(super) fn derive(registration: &Registration) -> Self {
        let groups = registration.groups.iter();
        let mut groups: Vec<PageLayout> = groups
            .map(|group| PageLayout::derive(registration, group))
            .collect();
        let slot_bytes = groups.iter().map(|group| group.page_bytes).max();
        for group in &mut groups {
            group.slot_bytes = slot_bytes.unwrap_or(0);
        }
        let content_digest = content_digest(&registration.content);
        let described = (0..).map(GroupId).zip(&registration.groups).zip(&groups);
        let described = described.map(|((id, group), layout)| GroupGeometry {
            group: id,
            attention: group.attention,
            window_tokens: group.window_tokens,
            eagle: group.eagle,
            engine_page_tokens: group.engine_page_tokens,
            layers: group.layers,
            page_bytes: layout.page_bytes,
            device_pages: group.device_pages,
            content_digest,
            layout_fingerprint: layout.layout_fingerprint,
        });
        let (hash_tokens, hit_tokens) = registration.units();
        let geometry = MemoryGeometry {
            hash_tokens,
            hit_tokens,
            groups: described.collect(),
        };
        Self {
            groups: groups.into_iter().map(Arc::new).collect(),
            geometry,
        }
    }

    /// The layout of a group.
    pub fn of(&self, group: GroupId) -> Option<&Arc<PageLayout>> {
        self.groups.get(usize::from(group.0))
    }
}

/// The layout of one group's pages on one rank.
///
/// In the lower tiers a page is its tensors in order of (layer, role), without gaps, and each tensor's bytes in the
/// order in which they lie on the device. It begins at the start of a slot, which has room for a page of any group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageLayout {
    /// Ordered by (layer, role, place on the device); never empty.
    pub fragments: Vec<FragmentLayout>,
    /// Bytes of one page in the lower tiers: the sum over the fragments.
    pub page_bytes: u64,
    /// Bytes of a slot of the lower tiers: those of the largest page of all groups of the rank.
    pub slot_bytes: u64,
    /// Pages of the engine's memory.
    pub device_pages: u32,
    /// Digest of everything that changes the meaning of a page's bytes. The location of the memory, its number of pages
    /// and the rank that holds it are not part of it.
    pub layout_fingerprint: [u8; 16],
}

impl PageLayout {
    /// Derives the layout of a group. The slots are of its own pages.
    fn derive(registration: &Registration, group: &GroupMemory) -> Self {
        let mut tensors: Vec<&TensorView> = group.tensors.iter().collect();
        tensors.sort_by_key(|tensor| (tensor.layer, tensor.role));
        let mut page_bytes = 0;
        let mut fragments = Vec::with_capacity(tensors.len());
        for tensor in &tensors {
            let pieces = Pieces::of(tensor);
            for offset_bytes in pieces.offsets() {
                fragments.push(FragmentLayout {
                    layer: tensor.layer,
                    role: tensor.role,
                    allocation: tensor.allocation,
                    base_bytes: tensor.offset_bytes + offset_bytes,
                    page_bytes: pieces.piece_bytes,
                    page_stride_bytes: tensor.page_stride_bytes,
                    block_offset_bytes: page_bytes,
                });
                page_bytes += pieces.piece_bytes;
            }
        }
        Self {
            fragments,
            page_bytes,
            slot_bytes: page_bytes,
            device_pages: group.device_pages,
            layout_fingerprint: fingerprint(registration, group, &tensors),
        }
    }
}

/// The contiguous pieces of a tensor's page: one, unless an axis inside the page leaves a gap, as the K/V axis does
/// when it stands before the page axis.
pub(super) struct Pieces {
    /// Bytes of each piece.
    pub(super) piece_bytes: u64,
    /// Number of pieces.
    pub(super) count: u64,
    /// The axes that step from piece to piece, outermost first: length, and stride in bytes.
    steps: Vec<(u64, u64)>,
}

impl Pieces {
    /// Takes a tensor whose axes, strides and page size were checked before.
    pub(super) fn of(tensor: &TensorView) -> Self {
        let element_bytes = u64::from(tensor.element_bytes);
        let mut steps = inner_axes(tensor);
        steps.sort_unstable_by_key(|(_, stride)| std::cmp::Reverse(*stride));
        let mut piece_bytes = element_bytes;
        while let Some((length, stride)) = steps.last().copied()
            && stride * element_bytes == piece_bytes
        {
            piece_bytes *= length;
            steps.pop();
        }
        for (_, stride) in &mut steps {
            *stride *= element_bytes;
        }
        Self {
            piece_bytes,
            count: steps.iter().map(|(length, _)| *length).product(),
            steps,
        }
    }

    /// Start of each piece of page 0, in bytes after the tensor's first byte, in ascending order.
    pub(super) fn offsets(&self) -> Vec<u64> {
        self.steps.iter().fold(vec![0], |offsets, (length, step)| {
            offsets
                .iter()
                .flat_map(|offset| (0..*length).map(move |index| offset + index * step))
                .collect()
        })
    }
}

/// Hashes numbers as little-endian and lists with their length, so that no two layouts hash the same input.
fn fingerprint(
    registration: &Registration,
    group: &GroupMemory,
    tensors: &[&TensorView],
) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(FINGERPRINT_DOMAIN);
    hasher.update(&(registration.content.len() as u64).to_le_bytes());
    hasher.update(&registration.content);
    hasher.update(&group.engine_page_tokens.to_le_bytes());
    hasher.update(&registration.tp_size.to_le_bytes());
    hasher.update(&group.layers.to_le_bytes());
    hasher.update(&(tensors.len() as u64).to_le_bytes());
    for tensor in tensors {
        hasher.update(&tensor.layer.to_le_bytes());
        hasher.update(&[role_number(tensor.role)]);
        hasher.update(&tensor.element_bytes.to_le_bytes());
        hasher.update(&tensor.page_bytes.to_le_bytes());
        let axes = inner_places(tensor);
        hasher.update(&(axes.len() as u64).to_le_bytes());
        for (length, place) in axes {
            hasher.update(&length.to_le_bytes());
            hasher.update(&place.to_le_bytes());
        }
    }
    first_half(&hasher)
}

fn content_digest(content: &[u8]) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(CONTENT_DOMAIN);
    hasher.update(content);
    first_half(&hasher)
}

fn first_half(hasher: &blake3::Hasher) -> [u8; 16] {
    let mut first = [0; 16];
    first.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    first
}

/// Number of a role in the fingerprint: never renumber.
fn role_number(role: TensorRole) -> u8 {
    match role {
        TensorRole::K => 0,
        TensorRole::V => 1,
        TensorRole::Kv => 2,
        TensorRole::Latent => 3,
        TensorRole::State => 4,
        TensorRole::Other => u8::MAX,
    }
}

/// The axes inside a page that are longer than 1, in the engine's order: length, and stride in elements.
fn inner_axes(tensor: &TensorView) -> Vec<(u64, u64)> {
    tensor
        .shape
        .iter()
        .zip(&tensor.strides)
        .enumerate()
        .filter(|(axis, (length, _))| *axis as u64 != u64::from(tensor.page_axis) && **length > 1)
        .map(|(_, (length, stride))| (*length, *stride))
        .collect()
}

/// The axes of [`inner_axes`], each with its position in memory order (0 is the innermost) instead of its stride. A
/// transposed page has the same lengths and other positions. Gaps between the axes have no effect, as the lower tiers
/// have none.
fn inner_places(tensor: &TensorView) -> Vec<(u64, u64)> {
    let axes = inner_axes(tensor);
    axes.iter()
        .map(|(length, stride)| {
            let inside = axes.iter().filter(|(_, other)| other < stride).count();
            (*length, inside as u64)
        })
        .collect()
}
