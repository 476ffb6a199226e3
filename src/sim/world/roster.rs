//! The workers that the leader has admitted, with their memory and depots: the checker's model of what a pool must fit.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_core::{
    ARENA_PAGES_MAX, AttachedDepot, Contradiction, Model, Pool, TierKey, WorkerMemory,
};
use kvferry_types::{DepotId, EngineId, PerTier, Replica, Shard, TierId, WorkerId};

/// The admitted workers of one leader.
#[derive(Debug, Default)]
pub(super) struct AdmittedWorkers {
    memories: BTreeMap<WorkerId, WorkerMemory>,
    depots: BTreeMap<(TierId, Shard), DepotId>,
    /// Workers that have attached or died since the leader started: they run no copy of an older leader.
    clear: BTreeSet<WorkerId>,
}

impl AdmittedWorkers {
    /// Notes an admitted worker.
    pub(super) fn attached(
        &mut self,
        worker: WorkerId,
        shard: Shard,
        depots: &PerTier<AttachedDepot>,
    ) {
        for (tier, named) in depots.iter() {
            self.depots.insert((tier, shard), named.depot);
        }
        self.gone(worker);
    }

    /// Notes the memory of an admitted worker.
    pub(super) fn memory(&mut self, worker: WorkerId, memory: Option<WorkerMemory>) {
        self.gone(worker);
        if let Some(memory) = memory {
            self.memories.insert(worker, memory);
        }
    }

    /// Notes that a worker's connection broke, its process died, or it was refused.
    pub(super) fn gone(&mut self, worker: WorkerId) {
        self.memories.remove(&worker);
    }

    /// Notes that a worker attached, admitted or not, or that its process died: its copies of older leaders have ended.
    pub(super) fn cleared(&mut self, worker: WorkerId) {
        self.clear.insert(worker);
    }

    /// True when no copy of an older leader runs on any of `workers` workers.
    pub(super) fn all_clear(&self, workers: usize) -> bool {
        self.clear.len() >= workers
    }

    /// True when a shard has another depot than this pool's key.
    pub(super) fn has_other_depots(&self, tier: TierId, key: &TierKey) -> bool {
        let mut depots = self.depots.iter().filter(|((of, _), _)| *of == tier);
        depots.any(|((_, shard), depot)| key.depots.get(usize::from(shard.0)) != Some(depot))
    }

    /// Memory of the replicas of which every rank has memory of the same engine.
    fn complete(&self, ranks: u16) -> Vec<&WorkerMemory> {
        let mut counts: BTreeMap<(Replica, EngineId), (u16, &WorkerMemory)> = BTreeMap::new();
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

    /// Checks that a serving pool fits the depots, the page shape and the room of the workers.
    pub(super) fn check(
        &self,
        tier: TierId,
        key: &TierKey,
        pool: &Pool,
        ranks: u16,
    ) -> Result<(), Contradiction> {
        if self.has_other_depots(tier, key) {
            let depots = &self.depots;
            return Err(format!("a pool of {key:?} serves, the depots are {depots:?}").into());
        }
        let same = |memory: &WorkerMemory| {
            let model = Model::new(memory.geometry.clone());
            model.is_ok_and(|model| {
                (model.page_bytes(), *model.layout_fingerprint())
                    == (key.page_bytes, key.layout_fingerprint)
            })
        };
        let complete = self.complete(ranks);
        let Some(first) = complete.first() else {
            return Ok(());
        };
        if !complete.iter().any(|memory| same(memory)) {
            let geometry = &first.geometry;
            return Err(format!("a pool of {key:?} serves, the engines have {geometry:?}").into());
        }
        let rooms = self.memories.values().filter(|memory| same(memory));
        let room = rooms.map(|memory| memory.pages_of(tier)).min().unwrap_or(0);
        let room = room.min(ARENA_PAGES_MAX);
        if (key.pages, pool.capacity_pages()) != (room, room) {
            let pages = pool.capacity_pages();
            return Err(format!(
                "the pool has {pages} pages, the smallest depot has room for {room}"
            )
            .into());
        }
        Ok(())
    }
}
