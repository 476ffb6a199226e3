//! The memory that workers state, and in which fields two of them differ.

use std::sync::Arc;

use crate::event::MemoryStatement;
use crate::model::Model;
use crate::refusal::Refusal;
use kvferry_types::{EngineId, GroupGeometry, MemoryGeometry, PerTier, TierId};

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
