//! KV cache sizes of known models.

use std::fmt;

use crate::hybrid::{HybridCache, HybridModel, LayerGroup, LayerKind};
use kvferry_types::{Sharding, TensorRole};

/// Bytes of one element: bfloat16.
const ELEMENT_BYTES: u32 = 2;
/// Bytes of one fragment of [`Model::Tiny`].
const TINY_FRAGMENT_BYTES: u64 = 1 << 10;
/// Bytes of a token in one layer and role of a model with several groups.
const HYBRID_TOKEN_BYTES: u64 = 64;
/// Bytes of the state of one recurrent layer.
const HYBRID_STATE_BYTES: u64 = 10 << 10;
/// Tokens of a page of a model with one group, where the user names none.
const PAGE_TOKENS: u32 = 16;

/// A model whose KV cache the reference engine imitates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum Model {
    /// 2 layers of K and V, 1 KiB a fragment whatever the size of a page: 4 KiB a page and rank. No real model; for
    /// tests.
    #[value(name = "tiny")]
    Tiny,
    /// 32 layers, 8 KV heads of 128 elements: 128 KiB a token. "The Llama 3 Herd of Models" (arXiv:2407.21783), table
    /// 3, and `config.json` of meta-llama/Meta-Llama-3-8B (4,096 wide, 32 heads).
    #[value(name = "llama-3-8b")]
    Llama3_8b,
    /// 80 layers, 8 KV heads of 128 elements: 320 KiB a token. The same table, and `config.json` of
    /// meta-llama/Meta-Llama-3-70B (8,192 wide, 64 heads).
    #[value(name = "llama-3-70b")]
    Llama3_70b,
    /// 61 layers, one latent of 512 + 64 elements (`kv_lora_rank` and `qk_rope_head_dim`): 68.6 KiB a token.
    /// "DeepSeek-V3 Technical Report" (arXiv:2412.19437), section 4.2, and `config.json` of deepseek-ai/DeepSeek-V3.
    #[value(name = "deepseek-v3-mla")]
    DeepseekV3Mla,
    /// 20 layers with a window of 512 tokens beside 4 layers of full attention; pages of 16 tokens. No real model, as
    /// are the following; each has the groups of a family of models, with 128 B a token and layer.
    #[value(name = "gemma-like")]
    GemmaLike,
    /// 8 layers with a window of 128 tokens in pages of 64 beside 4 layers of full attention in pages of 16.
    #[value(name = "two-sizes")]
    TwoSizes,
    /// 6 recurrent layers with states of 10 KiB beside 2 layers of full attention; pages of 64 tokens.
    #[value(name = "mamba-like")]
    MambaLike,
    /// 6 layers with chunks of 256 tokens beside 2 layers of full attention; pages of 16 tokens.
    #[value(name = "chunked")]
    Chunked,
}

/// One group of layers of a model, on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelGroup {
    /// What its layers read, and the tokens of a page.
    pub layers: LayerGroup,
    /// Composition of its pages.
    pub geometry: ModelGeometry,
}

/// Composition of one rank's pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelGeometry {
    /// Number of layers.
    pub layers: u32,
    /// The tensors of each layer; each holds one fragment of a page.
    pub roles: &'static [TensorRole],
    /// Bytes of one element.
    pub element_bytes: u32,
    /// Bytes of one page in one layer and role, on one rank.
    pub fragment_bytes: u64,
}

impl ModelGeometry {
    /// Bytes of one page on one rank: all layers and roles.
    pub fn page_bytes(&self) -> u64 {
        u64::from(self.layers) * self.roles.len() as u64 * self.fragment_bytes
    }
}

/// Tokens of the unit of the hashes, and of the alignment of hits.
pub fn units(groups: &[ModelGroup]) -> (u32, u32) {
    let layers = groups.iter().map(|group| group.layers).collect();
    let cache = HybridCache::new(layers, 0, 0);
    (cache.hash_tokens(), cache.block_tokens())
}

/// Why a model cannot be laid out on the given ranks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModelError {
    /// The page size is 0 tokens.
    #[error("--engine-page-tokens is 0: a page holds at least one token; 16 suits most engines")]
    ZeroPage,
    /// The model has several groups, and something else can use one only.
    #[error(
        "{0} has several groups of layers, and one is needed here: use a model with one, such as tiny"
    )]
    SeveralGroups(Model),
    /// The model determines the sizes of its pages.
    #[error(
        "--engine-page-tokens is {tokens}, but the pages of {model} have sizes of their own, in units of {unit} \
         tokens: leave the option out"
    )]
    OwnPages {
        /// The model.
        model: Model,
        /// The requested tokens of a page.
        tokens: u32,
        /// Tokens of the unit of the hashes.
        unit: u32,
    },
    /// The number of ranks is 0.
    #[error("ranks is 0: an engine has at least one rank")]
    ZeroRanks,
    /// There are more ranks than KV heads, and not a multiple of them.
    #[error(
        "ranks is {ranks}, but {model} has {kv_heads} KV heads: use {kv_heads} ranks or fewer, or a \
         multiple of it, where several ranks hold one head"
    )]
    TooManyRanks {
        /// The model.
        model: Model,
        /// The model's KV heads.
        kv_heads: u32,
        /// Ranks that were requested.
        ranks: u16,
    },
    /// The KV heads cannot be divided evenly among the ranks.
    #[error(
        "ranks is {ranks}, which does not divide the {kv_heads} KV heads of {model}: use a divisor \
         of {kv_heads}"
    )]
    Uneven {
        /// The model.
        model: Model,
        /// The model's KV heads.
        kv_heads: u32,
        /// Ranks that were requested.
        ranks: u16,
    },
}

/// Composition of a token's KV.
enum KvComposition {
    Fixed,
    Groups,
    Heads { kv_heads: u32, head_elements: u32 },
    Latent { elements: u32 },
}

const KEYS_AND_VALUES: &[TensorRole] = &[TensorRole::K, TensorRole::V];
const LATENT: &[TensorRole] = &[TensorRole::Latent];
const STATE: &[TensorRole] = &[TensorRole::State];

impl Model {
    /// The groups of a model that has several.
    pub fn hybrid(self) -> Option<HybridModel> {
        match self {
            Self::GemmaLike => Some(HybridModel::GemmaLike),
            Self::TwoSizes => Some(HybridModel::TwoSizes),
            Self::MambaLike => Some(HybridModel::MambaLike),
            Self::Chunked => Some(HybridModel::Chunked),
            Self::Tiny | Self::Llama3_8b | Self::Llama3_70b | Self::DeepseekV3Mla => None,
        }
    }

    /// Tokens of the unit of the hashes where the user names none: the page of a model with one group.
    pub fn unit_tokens(self) -> u32 {
        let own = self
            .hybrid()
            .map(|model| HybridCache::new(model.groups(), 0, 0));
        own.map_or(PAGE_TOKENS, |cache| cache.hash_tokens())
    }

    /// The groups of layers on each of `ranks` ranks. Only a model with one group has pages of `unit_tokens` tokens;
    /// for one with several, `unit_tokens` must be [`Self::unit_tokens`].
    pub fn groups(self, unit_tokens: u32, ranks: u16) -> Result<Vec<ModelGroup>, ModelError> {
        let Some(model) = self.hybrid() else {
            let geometry = self.geometry(unit_tokens, ranks)?;
            let layers = LayerGroup {
                kind: LayerKind::Full,
                page_tokens: unit_tokens,
                layers: geometry.layers,
                drafted: false,
            };
            return Ok(vec![ModelGroup { layers, geometry }]);
        };
        let unit = self.unit_tokens();
        if unit_tokens != unit {
            return Err(ModelError::OwnPages {
                model: self,
                tokens: unit_tokens,
                unit,
            });
        }
        let groups = model.groups().into_iter().map(|layers| {
            let (roles, fragment_bytes) = match layers.kind {
                LayerKind::Recurrent => (STATE, HYBRID_STATE_BYTES),
                _ => (
                    KEYS_AND_VALUES,
                    u64::from(layers.page_tokens) * HYBRID_TOKEN_BYTES,
                ),
            };
            let geometry = ModelGeometry {
                layers: layers.layers,
                roles,
                element_bytes: ELEMENT_BYTES,
                fragment_bytes,
            };
            ModelGroup { layers, geometry }
        });
        Ok(groups.collect())
    }

    /// The composition of pages of `engine_page_tokens` tokens of a model with one group on each of `ranks` ranks, which divide the KV heads
    /// evenly. Every rank holds a latent in full.
    pub fn geometry(
        self,
        engine_page_tokens: u32,
        ranks: u16,
    ) -> Result<ModelGeometry, ModelError> {
        if engine_page_tokens == 0 {
            return Err(ModelError::ZeroPage);
        }
        if ranks == 0 {
            return Err(ModelError::ZeroRanks);
        }
        let (layers, attention) = self.architecture();
        let plane = |elements: u32| {
            u64::from(engine_page_tokens) * u64::from(elements) * u64::from(ELEMENT_BYTES)
        };
        let (roles, fragment_bytes) = match attention {
            KvComposition::Fixed => (KEYS_AND_VALUES, TINY_FRAGMENT_BYTES),
            KvComposition::Groups => return Err(ModelError::SeveralGroups(self)),
            KvComposition::Latent { elements } => (LATENT, plane(elements)),
            KvComposition::Heads {
                kv_heads,
                head_elements,
            } => {
                let heads = self.heads_per_rank(kv_heads, ranks)?;
                (KEYS_AND_VALUES, plane(heads * head_elements))
            }
        };
        Ok(ModelGeometry {
            layers,
            roles,
            element_bytes: ELEMENT_BYTES,
            fragment_bytes,
        })
    }

    /// Distinguishes the model's KV from that of other models with the same shape: `registration.content`.
    pub fn content(self) -> Vec<u8> {
        format!("model={self}\ndtype=bfloat16").into_bytes()
    }

    /// The ranks that hold the same KV: all ranks hold one latent, and ranks beyond the number of KV heads share a
    /// head.
    pub fn sharding(self, ranks: u16) -> Result<Sharding, ModelError> {
        let shards = match self.architecture().1 {
            KvComposition::Fixed | KvComposition::Groups => ranks,
            KvComposition::Latent { .. } => 1,
            KvComposition::Heads { kv_heads, .. } => {
                self.heads_per_rank(kv_heads, ranks)?;
                ranks.min(u16::try_from(kv_heads).unwrap_or(ranks))
            }
        };
        // Zero ranks is the only count that none of these divides.
        Sharding::new(ranks, shards).ok_or(ModelError::ZeroRanks)
    }

    fn architecture(self) -> (u32, KvComposition) {
        let heads = KvComposition::Heads {
            kv_heads: 8,
            head_elements: 128,
        };
        match self {
            Self::Tiny => (2, KvComposition::Fixed),
            Self::Llama3_8b => (32, heads),
            Self::Llama3_70b => (80, heads),
            Self::DeepseekV3Mla => (61, KvComposition::Latent { elements: 512 + 64 }),
            Self::GemmaLike | Self::TwoSizes | Self::MambaLike | Self::Chunked => {
                (0, KvComposition::Groups)
            }
        }
    }

    fn heads_per_rank(self, kv_heads: u32, ranks: u16) -> Result<u32, ModelError> {
        let (model, count) = (self, u32::from(ranks));
        if count > kv_heads && count.is_multiple_of(kv_heads) {
            return Ok(1);
        }
        if count > kv_heads {
            return Err(ModelError::TooManyRanks {
                model,
                kv_heads,
                ranks,
            });
        }
        if !kv_heads.is_multiple_of(count) {
            return Err(ModelError::Uneven {
                model,
                kv_heads,
                ranks,
            });
        }
        Ok(kv_heads / count)
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Tiny => "tiny",
            Self::Llama3_8b => "llama-3-8b",
            Self::Llama3_70b => "llama-3-70b",
            Self::DeepseekV3Mla => "deepseek-v3-mla",
            Self::GemmaLike => "gemma-like",
            Self::TwoSizes => "two-sizes",
            Self::MambaLike => "mamba-like",
            Self::Chunked => "chunked",
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    fn page_bytes(model: Model, tokens: u32, ranks: u16) -> u64 {
        model.geometry(tokens, ranks).expect("fits").page_bytes()
    }

    #[test]
    fn sizes_are_those_of_the_models() {
        assert_eq!(page_bytes(Model::Llama3_8b, 1, 1), 128 << 10);
        assert_eq!(page_bytes(Model::Llama3_8b, 16, 2), 1 << 20);
        assert_eq!(page_bytes(Model::Llama3_70b, 1, 1), 320 << 10);
        assert_eq!(page_bytes(Model::Llama3_70b, 16, 8), 640 << 10);
        assert_eq!(page_bytes(Model::DeepseekV3Mla, 1, 1), 61 * 576 * 2);
        let geometry = Model::Llama3_8b.geometry(16, 1).expect("fits");
        assert_eq!((geometry.layers, geometry.fragment_bytes), (32, 32 << 10));
        assert_eq!(geometry.roles, [TensorRole::K, TensorRole::V]);
    }

    #[test]
    fn a_tiny_page_is_4_kib_whatever_its_tokens_and_ranks() {
        for (tokens, ranks) in [(1, 1), (16, 3), (u32::MAX, 64)] {
            assert_eq!(page_bytes(Model::Tiny, tokens, ranks), 4 << 10);
        }
    }

    #[test]
    fn a_latent_is_the_same_on_every_rank() {
        let one = Model::DeepseekV3Mla.geometry(16, 1);
        assert_eq!(Model::DeepseekV3Mla.geometry(16, 7), one);
        assert_eq!(
            one.map(|geometry| geometry.roles),
            Ok(&[TensorRole::Latent][..])
        );
        let shards = |model: Model| model.sharding(7).map(Sharding::shards);
        assert_eq!(shards(Model::DeepseekV3Mla), Ok(1));
        assert_eq!(shards(Model::Tiny), Ok(7));
    }

    #[test]
    fn ranks_beyond_the_heads_share_them() {
        let model = Model::Llama3_8b;
        let shards = |ranks| model.sharding(ranks).map(Sharding::shards);
        assert_eq!((shards(1), shards(4), shards(8)), (Ok(1), Ok(4), Ok(8)));
        assert_eq!((shards(16), shards(32)), (Ok(8), Ok(8)));
        assert_eq!(model.geometry(16, 32), model.geometry(16, 8));
        assert!(shards(12).is_err());
    }

    #[test]
    fn heads_that_cannot_be_divided_are_refused_with_the_numbers() {
        let uneven = Model::Llama3_8b
            .geometry(16, 3)
            .expect_err("3 of 8")
            .to_string();
        assert!(uneven.contains("ranks is 3, which does not divide the 8 KV heads of llama-3-8b"));
        let many = Model::Llama3_70b
            .geometry(16, 12)
            .expect_err("12 of 8")
            .to_string();
        assert!(
            many.contains("ranks is 12, but llama-3-70b has 8 KV heads"),
            "{many}"
        );
        assert_eq!(Model::Tiny.geometry(0, 1), Err(ModelError::ZeroPage));
        assert_eq!(Model::Tiny.geometry(16, 0), Err(ModelError::ZeroRanks));
    }

    #[test]
    fn names_are_the_same_on_the_command_line_and_in_messages() {
        for model in Model::value_variants() {
            let name = model.to_string();
            assert_eq!(Model::from_str(&name, false), Ok(*model));
        }
        assert_eq!(format!("{:>6}", Model::Tiny), "  tiny");
    }

    #[test]
    fn the_largest_page_does_not_overflow() {
        let models = Model::value_variants().iter();
        for model in models.filter(|model| model.hybrid().is_none()) {
            assert!(page_bytes(*model, u32::MAX, 1) > 0);
        }
    }

    #[test]
    fn groups_have_pages_of_their_own() {
        let bytes = |model: Model| -> Vec<u64> {
            let groups = model.groups(model.unit_tokens(), 2).expect("its own pages");
            groups
                .iter()
                .map(|group| group.geometry.page_bytes())
                .collect()
        };
        assert_eq!(bytes(Model::Tiny), [4 << 10]);
        assert_eq!(bytes(Model::GemmaLike), [8 << 10, 40 << 10]);
        assert_eq!(bytes(Model::TwoSizes), [8 << 10, 64 << 10]);
        assert_eq!(bytes(Model::MambaLike), [60 << 10, 16 << 10]);
        assert_eq!(bytes(Model::Chunked), [12 << 10, 4 << 10]);
        let refused = Model::MambaLike.groups(16, 2).expect_err("pages of 64");
        assert!(
            refused
                .to_string()
                .contains("--engine-page-tokens is 16, but the pages of mamba-like"),
            "{refused}"
        );
        let refused = Model::Chunked.geometry(16, 2).expect_err("two groups");
        assert!(
            refused
                .to_string()
                .starts_with("chunked has several groups"),
            "{refused}"
        );
    }
}
