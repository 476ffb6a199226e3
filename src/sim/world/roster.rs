//! What the leader was told of its workers, as far as it let them in: what a pool must be made for.

use std::collections::{BTreeMap, BTreeSet};

use crate::core::{ARENA_PAGES_MAX, EngineMemory, Pool, TierKey};
use crate::types::{DepotId, EngineId, Replica, Shard, WorkerId};

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Roster {
    memories: BTreeMap<WorkerId, EngineMemory>,
    depots: BTreeMap<Shard, DepotId>,
    /// Workers that have attached since the leader began, or died: they run no copy of an older leader.
    clear: BTreeSet<WorkerId>,
}

impl Roster {
    /// A worker was let in.
    pub(super) fn attached(
        &mut self,
        worker: WorkerId,
        shard: Shard,
        depot: DepotId,
        memory: Option<EngineMemory>,
    ) {
        self.depots.insert(shard, depot);
        self.gone(worker);
        if let Some(memory) = memory {
            self.memories.insert(worker, memory);
        }
    }

    /// Its connection broke, its process died, or it was turned away.
    pub(super) fn gone(&mut self, worker: WorkerId) {
        self.memories.remove(&worker);
    }

    /// A worker attached, admitted or not, or its process died: its copies of older leaders have ended.
    pub(super) fn cleared(&mut self, worker: WorkerId) {
        self.clear.insert(worker);
    }

    /// True when no copy of an older leader is under way on any of so many workers.
    pub(super) fn all_clear(&self, workers: usize) -> bool {
        self.clear.len() >= workers
    }

    /// True when a shard has another depot than this pool.
    pub(super) fn has_other_depots(&self, key: &TierKey) -> bool {
        let mut depots = self.depots.iter();
        depots.any(|(shard, depot)| key.depots.get(usize::from(shard.0)) != Some(depot))
    }

    /// Memory of the replicas whose every rank has the same engine's.
    fn complete(&self, ranks: u16) -> Vec<&EngineMemory> {
        let mut counts: BTreeMap<(Replica, EngineId), (u16, &EngineMemory)> = BTreeMap::new();
        for (worker, memory) in &self.memories {
            let count = counts
                .entry((worker.replica, memory.engine))
                .or_insert((0, memory));
            count.0 += 1;
        }
        let counts = counts.into_values();
        let complete = counts.filter(|(count, _)| *count == ranks);
        complete.map(|(_, memory)| memory).collect()
    }

    /// A pool that serves is for the depots, the pages and the room that the workers have.
    pub(super) fn check(&self, key: &TierKey, pool: &Pool, ranks: u16) -> Result<(), String> {
        if self.has_other_depots(key) {
            let depots = &self.depots;
            return Err(format!(
                "a pool of {key:?} serves, the depots are {depots:?}"
            ));
        }
        let same = |memory: &EngineMemory| {
            let geometry = &memory.geometry;
            (geometry.page_bytes, geometry.layout_fingerprint)
                == (key.page_bytes, key.layout_fingerprint)
        };
        let complete = self.complete(ranks);
        let Some(first) = complete.first() else {
            return Ok(());
        };
        if !complete.iter().any(|memory| same(memory)) {
            let geometry = &first.geometry;
            return Err(format!(
                "a pool of {key:?} serves, the engines have {geometry:?}"
            ));
        }
        let rooms = self.memories.values().filter(|memory| same(memory));
        let room = rooms.map(|memory| memory.arena_pages).min().unwrap_or(0);
        let room = room.min(ARENA_PAGES_MAX);
        if (key.pages, pool.capacity_pages()) != (room, room) {
            let pages = pool.capacity_pages();
            return Err(format!(
                "the pool has {pages} pages, the smallest depot has room for {room}"
            ));
        }
        Ok(())
    }
}
