//! The prefix cache of an engine with several groups of layers (G1), as the reference engine keeps it.
//!
//! Its rules start from the tokens that a layer reads, and are written apart from those of the core, so that each can be
//! checked by the other. `device` has the pages of device memory, `cache` the lookups and the running requests.

mod cache;
mod device;

use kvferry_types::{Attention, GroupId};

pub use cache::{ComputeStep, HybridCache, PageCopy, RunningSequence};

/// The earlier tokens that a layer reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// All of them.
    Full,
    /// The last tokens, so many with the reading one; at least 2.
    Window(u32),
    /// Those of the reading token's chunk of so many tokens; at least 1.
    Chunk(u32),
    /// None: the layer continues from a state, which replaces its predecessor.
    Recurrent,
}

impl LayerKind {
    /// The attention of a registration, and the tokens of its window or chunk.
    pub fn attention(self) -> (Attention, u32) {
        match self {
            Self::Full => (Attention::Full, 0),
            Self::Window(tokens) => (Attention::SlidingWindow, tokens),
            Self::Chunk(tokens) => (Attention::ChunkedLocal, tokens),
            Self::Recurrent => (Attention::State, 0),
        }
    }

    /// The first token that token `reader` reads.
    fn first_read(self, reader: u32) -> u32 {
        match self {
            Self::Full => 0,
            Self::Window(tokens) => reader.saturating_sub(tokens.saturating_sub(1)),
            Self::Chunk(tokens) => reader - reader % tokens,
            Self::Recurrent => reader.saturating_sub(1),
        }
    }
}

/// Layers that share a page table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerGroup {
    /// What they read.
    pub kind: LayerKind,
    /// Tokens of one page; for recurrent layers, tokens between two states that are kept.
    pub page_tokens: u32,
    /// Number of layers.
    pub layers: u32,
    /// Whether draft layers read the group, which compute the last page of a match again.
    pub drafted: bool,
}

/// Models with several groups. No real ones; each has the groups of a family of models.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HybridModel {
    /// Five layers with a window of 512 tokens for each layer of full attention; pages of 16 tokens.
    GemmaLike,
    /// A window of 128 tokens in pages of 64 beside full attention in pages of 16.
    TwoSizes,
    /// Three recurrent layers for each layer of full attention; pages of 64 tokens.
    MambaLike,
    /// Three layers with chunks of 256 tokens for each layer of full attention; pages of 16 tokens.
    Chunked,
}

impl HybridModel {
    /// Every model.
    pub const ALL: [Self; 4] = [
        Self::GemmaLike,
        Self::TwoSizes,
        Self::MambaLike,
        Self::Chunked,
    ];

    /// The groups, by id.
    pub fn groups(self) -> Vec<LayerGroup> {
        let group = |kind, page_tokens, layers| LayerGroup {
            kind,
            page_tokens,
            layers,
            drafted: false,
        };
        match self {
            Self::GemmaLike => vec![
                group(LayerKind::Full, 16, 4),
                group(LayerKind::Window(512), 16, 20),
            ],
            Self::TwoSizes => vec![
                group(LayerKind::Full, 16, 4),
                group(LayerKind::Window(128), 64, 8),
            ],
            Self::MambaLike => vec![
                group(LayerKind::Recurrent, 64, 6),
                group(LayerKind::Full, 64, 2),
            ],
            Self::Chunked => vec![
                group(LayerKind::Chunk(256), 16, 6),
                group(LayerKind::Full, 16, 2),
            ],
        }
    }
}

/// Ids and groups, in order.
fn with_ids(groups: &[LayerGroup]) -> impl Iterator<Item = (GroupId, &LayerGroup)> {
    (0..=u8::MAX).map(GroupId).zip(groups)
}

#[cfg(test)]
mod tests;
