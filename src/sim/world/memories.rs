//! The KV memory of a world's engines: its geometry, its scheduler and its registration.

use super::groups::{SimGroup, layers, units};
use super::setup::{CELL_BYTES, Setup, Shape};
use kvferry_types::{
    GroupGeometry, GroupId, GroupMemory, MemoryGeometry, Nonce, Rank, Registration,
};
use kvferry_workload::scheduler::Scheduler;

impl Setup {
    /// The groups of a shape; empty for a model of one prefix group whose page is the unit of the hashes.
    pub(super) fn groups(&self, shape: Shape) -> &[SimGroup] {
        self.models.get(shape.model).map_or(&[], Vec::as_slice)
    }

    /// Tokens of the unit of the hashes, and of the alignment of hits.
    pub(super) fn units(&self, shape: Shape) -> (u32, u32) {
        let groups = self.groups(shape);
        if groups.is_empty() {
            return (4 * shape.cells, 4 * shape.cells);
        }
        units(groups)
    }

    /// The geometry of an engine's memory of this many pages.
    pub(super) fn geometry(&self, shape: Shape, device_pages: u32) -> MemoryGeometry {
        let groups = self.groups(shape);
        let plain = GroupGeometry {
            group: GroupId(0),
            engine_page_tokens: 4 * shape.cells,
            layers: 1,
            page_bytes: u64::from(shape.cells) * CELL_BYTES,
            device_pages,
            content_digest: shape.layout,
            layout_fingerprint: shape.layout,
            ..GroupGeometry::default()
        };
        if groups.is_empty() {
            return plain.into();
        }
        let (hash_tokens, hit_tokens) = self.units(shape);
        let groups = (0..).map(GroupId).zip(groups).map(|(group, its)| {
            let (attention, window_tokens) = its.layers.kind.attention();
            let mut layout_fingerprint = shape.layout;
            layout_fingerprint[1] = group.0;
            GroupGeometry {
                group,
                attention,
                window_tokens,
                eagle: its.layers.drafted,
                engine_page_tokens: its.layers.page_tokens,
                page_bytes: u64::from(its.cells) * CELL_BYTES,
                layout_fingerprint,
                ..plain
            }
        });
        MemoryGeometry {
            hash_tokens,
            hit_tokens,
            groups: groups.collect(),
        }
    }

    /// The scheduler of an engine with this memory. With several groups, page 0 is the null page.
    pub(super) fn scheduler(&self, shape: Shape, device_pages: u32) -> Scheduler {
        match self.groups(shape) {
            [] => Scheduler::new(device_pages, self.cached_pages),
            groups => Scheduler::of_groups(
                layers(groups),
                device_pages - 1,
                self.cached_pages,
                self.steps,
            ),
        }
    }

    /// Registration of one rank's memory. A simulated worker does not check the memory itself.
    pub(super) fn registration(
        &self,
        geometry: &MemoryGeometry,
        rank: Rank,
        shard: u16,
    ) -> Registration {
        let groups = geometry.groups.iter().map(|group| GroupMemory {
            attention: group.attention,
            window_tokens: group.window_tokens,
            eagle: group.eagle,
            engine_page_tokens: group.engine_page_tokens,
            device_pages: group.device_pages,
            layers: group.layers,
            tensors: Vec::new(),
        });
        Registration {
            groups: groups.collect(),
            hash_tokens: geometry.hash_tokens,
            hit_tokens: geometry.hit_tokens,
            content: b"sim".to_vec(),
            rank,
            tp_size: self.ranks,
            shard,
            allocations: Vec::new(),
            nonce: Nonce {
                allocation: 0,
                offset_bytes: 0,
                bytes: Vec::new(),
            },
            proofs: Vec::new(),
            device_uuid: None,
            timeline: None,
        }
    }
}
