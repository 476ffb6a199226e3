//! Sizes that leader, workers and engine must agree on.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Attention, GroupId};

/// Largest number of engine pages in one block.
pub const RATIO_MAX: u32 = 256;

/// Engine pages in the largest block, 1..=[`RATIO_MAX`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Ratio(u32);

impl Ratio {
    /// Returns the ratio, or an error when it is out of bounds.
    pub fn new(pages: u32) -> Result<Self, GeometryError> {
        match pages {
            1..=RATIO_MAX => Ok(Self(pages)),
            _ => Err(GeometryError::Ratio(pages)),
        }
    }

    /// The ratio that makes blocks of `offload_page_tokens` out of pages of `engine_page_tokens`.
    pub fn from_tokens(
        engine_page_tokens: u32,
        offload_page_tokens: u32,
    ) -> Result<Self, GeometryError> {
        if engine_page_tokens == 0 {
            return Err(GeometryError::ZeroPage);
        }
        if !offload_page_tokens.is_multiple_of(engine_page_tokens) {
            return Err(GeometryError::NotMultiple {
                engine_page_tokens,
                offload_page_tokens,
            });
        }
        Self::new(offload_page_tokens / engine_page_tokens)
    }

    /// Pages in the largest block.
    pub const fn pages(self) -> u32 {
        self.0
    }

    /// Tokens in the largest block, or an error when that does not fit in 32 bits.
    pub fn offload_page_tokens(self, engine_page_tokens: u32) -> Result<u32, GeometryError> {
        if engine_page_tokens == 0 {
            return Err(GeometryError::ZeroPage);
        }
        engine_page_tokens
            .checked_mul(self.0)
            .ok_or(GeometryError::Overflow {
                engine_page_tokens,
                ratio: self.0,
            })
    }
}

impl Default for Ratio {
    fn default() -> Self {
        Self(32)
    }
}

impl TryFrom<u32> for Ratio {
    type Error = GeometryError;

    fn try_from(pages: u32) -> Result<Self, GeometryError> {
        Self::new(pages)
    }
}

impl From<Ratio> for u32 {
    fn from(ratio: Ratio) -> Self {
        ratio.0
    }
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A contradiction between sizes. Each error names the field, the value and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GeometryError {
    /// The ratio is zero or above [`RATIO_MAX`].
    #[error("ratio is {0}: a block holds 1 to {RATIO_MAX} pages; 32 suits most engines")]
    Ratio(u32),
    /// A page has no tokens.
    #[error("engine_page_tokens is 0: a page holds at least one token; vLLM's default is 16")]
    ZeroPage,
    /// The block is not a whole number of pages.
    #[error(
        "offload_page_tokens is {offload_page_tokens}, which is no multiple of engine_page_tokens \
         ({engine_page_tokens}): choose {engine_page_tokens} x ratio"
    )]
    NotMultiple {
        /// Tokens of an engine page.
        engine_page_tokens: u32,
        /// Tokens of the requested block.
        offload_page_tokens: u32,
    },
    /// Tokens of a block exceed 32 bits.
    #[error(
        "engine_page_tokens ({engine_page_tokens}) x ratio ({ratio}) does not fit in 32 bits: \
         lower one of them"
    )]
    Overflow {
        /// Tokens of an engine page.
        engine_page_tokens: u32,
        /// Pages of a block.
        ratio: u32,
    },
}

/// The sizes of one group that all ranks must agree on, as each derives them from its own memory.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupGeometry {
    /// The group.
    pub group: GroupId,
    /// The tokens that its layers attend to.
    #[serde(default)]
    pub attention: Attention,
    /// Tokens of a sliding window or a chunk; 0 without one.
    #[serde(default)]
    pub window_tokens: u32,
    /// Whether draft layers (EAGLE) use the group.
    #[serde(default)]
    pub eagle: bool,
    /// Tokens of one page.
    pub engine_page_tokens: u32,
    /// Number of layers in the group.
    pub layers: u32,
    /// Bytes of one page in the lower tiers: all layers and roles of this shard, without padding.
    pub page_bytes: u64,
    /// Pages of the engine's own memory.
    pub device_pages: u32,
    /// Digest of [`Registration::content`](super::Registration::content), by which a difference of the content is
    /// named.
    #[serde(with = "serde_bytes")]
    pub content_digest: [u8; 16],
    /// Digest of everything that changes the meaning of a page's bytes: the layout, and the content.
    #[serde(with = "serde_bytes")]
    pub layout_fingerprint: [u8; 16],
}

/// The sizes of the memory of one rank that all ranks of an engine must agree on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryGeometry {
    /// Tokens by which one page hash extends the previous one.
    pub hash_tokens: u32,
    /// Hits end at multiples of this many tokens.
    pub hit_tokens: u32,
    /// The groups, by id from 0.
    pub groups: Vec<GroupGeometry>,
}

impl MemoryGeometry {
    /// Bytes of one page of the lower tiers, which has room for a page of any group.
    pub fn page_bytes(&self) -> u64 {
        let bytes = self.groups.iter().map(|group| group.page_bytes);
        bytes.max().unwrap_or(0)
    }

    /// The group whose pages leave most of their places in the lower tiers empty, if they fill less than one part in `parts`.
    pub fn sparse_group(&self, parts: u64) -> Option<&GroupGeometry> {
        let smallest = self.groups.iter().min_by_key(|group| group.page_bytes)?;
        let fills = smallest.page_bytes.saturating_mul(parts);
        (fills < self.page_bytes()).then_some(smallest)
    }

    /// Pages of the engine's memory of a group; 0 if there is no such group.
    pub fn device_pages(&self, group: GroupId) -> u32 {
        let found = self.groups.get(usize::from(group.0));
        found.map_or(0, |group| group.device_pages)
    }
}

impl From<GroupGeometry> for MemoryGeometry {
    /// Memory of one group, whose hashes and hits are counted in its own pages.
    fn from(group: GroupGeometry) -> Self {
        Self {
            hash_tokens: group.engine_page_tokens,
            hit_tokens: group.engine_page_tokens,
            groups: vec![group],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_that_leaves_most_of_its_places_empty_is_found() {
        let groups = |bytes: &[u64]| MemoryGeometry {
            hash_tokens: 1,
            hit_tokens: 1,
            groups: (0..)
                .zip(bytes)
                .map(|(group, bytes)| GroupGeometry {
                    group: GroupId(group),
                    page_bytes: *bytes,
                    ..GroupGeometry::default()
                })
                .collect(),
        };
        for (bytes, found) in [
            (&[100][..], None),
            (&[100, 25], None),
            (&[100, 24], Some(1)),
            (&[3, 100, 2, 50], Some(2)),
        ] {
            let geometry = groups(bytes);
            let sparse = geometry.sparse_group(4).map(|group| group.group.0);
            assert_eq!(sparse, found, "{bytes:?}");
        }
    }

    #[test]
    fn a_ratio_lies_between_1_and_256() {
        assert_eq!(Ratio::new(0), Err(GeometryError::Ratio(0)));
        assert_eq!(Ratio::new(257), Err(GeometryError::Ratio(257)));
        assert_eq!(Ratio::new(256).map(Ratio::pages), Ok(256));
    }

    #[test]
    fn tokens_must_divide_and_fit() {
        assert_eq!(Ratio::from_tokens(16, 512).map(Ratio::pages), Ok(32));
        assert!(matches!(
            Ratio::from_tokens(16, 500),
            Err(GeometryError::NotMultiple { .. })
        ));
        assert_eq!(Ratio::from_tokens(0, 500), Err(GeometryError::ZeroPage));
        assert_eq!(Ratio::from_tokens(16, 0), Err(GeometryError::Ratio(0)));
        let ratio = Ratio::new(256).expect("in bounds");
        assert!(matches!(
            ratio.offload_page_tokens(1 << 24),
            Err(GeometryError::Overflow { .. })
        ));
    }
}
