//! Models of several groups of layers, with pages of different sizes and kinds.

use fastrand::Rng;

use kvferry_workload::hybrid::{HybridCache, LayerGroup, LayerKind};

/// Cells of the largest page.
pub(super) const CELLS_MAX: u32 = 4;

/// A group of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimGroup {
    /// What its layers read, and the tokens of its pages.
    pub layers: LayerGroup,
    /// Cells of one page, 1 to `CELLS_MAX`.
    pub cells: u32,
}

/// Draws the groups of a model: one to three, mostly with a prefix group.
pub(super) fn draw_model(rng: &mut Rng) -> Vec<SimGroup> {
    let count = rng.choice([1, 2, 2, 3, 3]).unwrap_or(2);
    let prefix_at = (rng.u8(0..8) > 0).then(|| rng.usize(0..count));
    let groups = (0..count).map(|index| {
        let page_tokens = 4 << rng.u32(0..3);
        let kind = match rng.u8(0..7) {
            _ if prefix_at == Some(index) => LayerKind::Full,
            0 => LayerKind::Full,
            1 | 2 => LayerKind::Window(rng.u32(2..=60)),
            3 | 4 => LayerKind::Chunk(4 * rng.u32(1..=12)),
            _ => LayerKind::Recurrent,
        };
        let can_draft = matches!(kind, LayerKind::Full | LayerKind::Window(_));
        let layers = LayerGroup {
            kind,
            page_tokens,
            layers: 1,
            drafted: can_draft && rng.u8(0..8) == 0,
        };
        let cells = rng.u32(1..=CELLS_MAX);
        SimGroup { layers, cells }
    });
    groups.collect()
}

/// The groups as the engine's own cache sees them.
pub(super) fn layers(groups: &[SimGroup]) -> Vec<LayerGroup> {
    groups.iter().map(|group| group.layers).collect()
}

/// Tokens of the unit of the hashes, and of the alignment of hits.
pub(super) fn units(groups: &[SimGroup]) -> (u32, u32) {
    let cache = HybridCache::new(layers(groups), 0, 0);
    (cache.hash_tokens(), cache.block_tokens())
}
