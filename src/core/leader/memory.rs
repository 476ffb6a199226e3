//! The memory that workers state, and in which fields two of them differ.

use std::sync::Arc;

use crate::group::model::Model;
use crate::leader::event::MemoryStatement;
use crate::leader::refusal::Refusal;
use kvferry_types::{EngineId, GroupGeometry, MemoryGeometry, PerTier, TierId, TierLayout};

use super::tier::TierKey;

/// The memory of an attached worker.
#[derive(Debug, Clone)]
pub(super) struct SeatMemory {
    pub(super) engine: EngineId,
    pub(super) model: Arc<Model>,
    arena_pages: PerTier<u32>,
}

impl SeatMemory {
    /// Checks the groups of the memory that a worker states.
    pub(super) fn of(stated: &MemoryStatement) -> Result<Option<Self>, Refusal> {
        let Some(memory) = &stated.memory else {
            return Ok(None);
        };
        let model = Model::new(memory.geometry.clone()).map_err(|error| Refusal::Groups {
            worker: stated.worker,
            error,
        })?;
        Ok(Some(Self {
            engine: memory.engine,
            model: Arc::new(model),
            arena_pages: memory.arena_pages.clone(),
        }))
    }

    /// Pages that the depot of a tier has room for.
    pub(super) fn pages_of(&self, tier: TierId) -> u32 {
        self.arena_pages.get(tier).copied().unwrap_or(0)
    }

    /// The pages of the tiers below host memory.
    pub(super) fn open_tiers(&self) -> OpenTiers {
        OpenTiers::new(self.model.tier_layout(), &self.arena_pages)
    }
}

/// The tiers below host memory that a worker has open, with an engine's memory or without.
#[derive(Debug, Clone, Default)]
pub(super) struct OpenTiers {
    /// The pages for which they are open.
    layout: TierLayout,
    /// The number of those pages; above 0.
    pages: PerTier<u32>,
}

impl OpenTiers {
    /// The tiers of which a worker states the pages.
    pub(super) fn new(layout: TierLayout, pages: &PerTier<u32>) -> Self {
        let open = pages
            .iter()
            .filter(|(tier, pages)| *tier > TierId::Host && **pages > 0);
        Self {
            layout,
            pages: open.map(|(tier, pages)| (tier, *pages)).collect(),
        }
    }

    /// True if a tier is open.
    pub(super) fn have(&self, tier: TierId) -> bool {
        self.pages.get(tier).is_some()
    }

    /// True if a tier is open for these pages.
    pub(super) fn are_for(&self, layout: &TierLayout) -> bool {
        self.layout == *layout && self.pages.tiers().next().is_some()
    }

    pub(super) fn tiers(&self) -> impl Iterator<Item = TierId> {
        self.pages.tiers()
    }

    /// Pages of a tier for which a key is.
    pub(super) fn pages_of(&self, tier: TierId, key: &TierKey) -> u32 {
        let pages = self.pages.get(tier).filter(|_| key.layout() == self.layout);
        pages.copied().unwrap_or(0)
    }
}

/// The first field in which two workers differ, with both values. Replicas may have memory of different sizes.
pub(super) fn difference(
    a: &Model,
    b: &Model,
    same_replica: bool,
) -> Option<(&'static str, String, String)> {
    let (a, b) = (a.geometry(), b.geometry());
    let groups = a.groups.iter().zip(&b.groups);
    let mut of_groups = groups.filter_map(|(a, b)| group_difference(a, b, same_replica));
    let of_memory = || {
        let count = |geometry: &MemoryGeometry| geometry.groups.len().to_string();
        let fields = [
            ("groups", count(a), count(b)),
            (
                "hash_tokens",
                a.hash_tokens.to_string(),
                b.hash_tokens.to_string(),
            ),
            (
                "hit_tokens",
                a.hit_tokens.to_string(),
                b.hit_tokens.to_string(),
            ),
        ];
        fields.into_iter().find(|(_, a, b)| a != b)
    };
    of_groups.next().or_else(of_memory)
}

fn group_difference(
    a: &GroupGeometry,
    b: &GroupGeometry,
    same_replica: bool,
) -> Option<(&'static str, String, String)> {
    let hex = |bytes: &[u8; 16]| {
        bytes
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>()
    };
    let device_pages = |pages: u32| {
        if same_replica {
            pages.to_string()
        } else {
            String::new()
        }
    };
    let fields = [
        ("group", a.group.0.to_string(), b.group.0.to_string()),
        (
            "engine_page_tokens",
            a.engine_page_tokens.to_string(),
            b.engine_page_tokens.to_string(),
        ),
        (
            "attention",
            a.attention.name().to_owned(),
            b.attention.name().to_owned(),
        ),
        (
            "window_tokens",
            a.window_tokens.to_string(),
            b.window_tokens.to_string(),
        ),
        ("eagle", a.eagle.to_string(), b.eagle.to_string()),
        ("layers", a.layers.to_string(), b.layers.to_string()),
        (
            "page_bytes",
            a.page_bytes.to_string(),
            b.page_bytes.to_string(),
        ),
        (
            "device_pages",
            device_pages(a.device_pages),
            device_pages(b.device_pages),
        ),
        ("content", hex(&a.content_digest), hex(&b.content_digest)),
        (
            "layout_fingerprint",
            hex(&a.layout_fingerprint),
            hex(&b.layout_fingerprint),
        ),
    ];
    fields.into_iter().find(|(_, a, b)| a != b)
}
