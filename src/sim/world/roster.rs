//! The workers that the leader has admitted, with their memory and depots: the checker's model of what a pool must fit.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_core::{
    ARENA_PAGES_MAX, AttachedDepot, Contradiction, Model, Pool, TierKey, WorkerMemory,
};
use kvferry_types::{
    AttachId, DepotId, EngineId, PerTier, Replica, Shard, TierId, TierLayout, WorkerId,
};

/// Lost workers of which any part may count, at most: with more, the pages of the others are not told apart.
const LOST_MAX: usize = 6;

/// The pages of tiers below host memory that a worker states.
type StatedTiers = (TierLayout, PerTier<u32>);

/// The admitted workers of one leader.
#[derive(Debug, Default)]
pub(super) struct AdmittedWorkers {
    memories: BTreeMap<WorkerId, WorkerMemory>,
    /// What the workers have open below host memory.
    tiers: BTreeMap<WorkerId, StatedTiers>,
    /// The same of workers whose connection broke, until they attach again or die.
    lost: BTreeMap<WorkerId, StatedTiers>,
    depots: BTreeMap<(TierId, Shard), DepotId>,
    shards: BTreeMap<WorkerId, Shard>,
    attaches: BTreeMap<WorkerId, AttachId>,
    /// Workers that have attached or died since the leader started: they run no copy of an older leader.
    clear: BTreeSet<WorkerId>,
}

impl AdmittedWorkers {
    /// Notes an admitted worker. It has no memory before it states one; a repeated request changes nothing.
    pub(super) fn attached(
        &mut self,
        (worker, attach): (WorkerId, AttachId),
        shard: Shard,
        depots: &PerTier<AttachedDepot>,
    ) {
        for (tier, named) in depots.iter() {
            self.depots.insert((tier, shard), named.depot);
        }
        self.shards.insert(worker, shard);
        if self.attaches.insert(worker, attach) != Some(attach) {
            self.refused(worker);
            self.closed(worker);
        }
    }

    /// Notes the memory of an admitted worker.
    pub(super) fn memory(&mut self, worker: WorkerId, memory: Option<WorkerMemory>) {
        self.refused(worker);
        if let Some(memory) = memory {
            if let Ok(model) = Model::new(memory.geometry.clone()) {
                self.tiers(worker, model.tier_layout(), memory.arena_pages.clone());
            }
            self.memories.insert(worker, memory);
        }
    }

    /// Notes what an admitted worker has open below host memory.
    pub(super) fn tiers(&mut self, worker: WorkerId, layout: TierLayout, pages: PerTier<u32>) {
        self.tiers.insert(worker, (layout, pages));
    }

    /// Notes that nothing is known of what a worker has open below host memory.
    pub(super) fn closed(&mut self, worker: WorkerId) {
        self.tiers.remove(&worker);
        self.lost.remove(&worker);
    }

    /// Notes that a worker's connection broke. Its process may still have a disk open.
    pub(super) fn gone(&mut self, worker: WorkerId) {
        self.attaches.remove(&worker);
        self.memories.remove(&worker);
        if let Some(tiers) = self.tiers.remove(&worker) {
            self.lost.insert(worker, tiers);
        }
    }

    /// Notes that a worker's process died.
    pub(super) fn died(&mut self, worker: WorkerId) {
        self.attaches.remove(&worker);
        self.refused(worker);
        self.closed(worker);
        self.cleared(worker);
    }

    /// Notes that a worker, or its memory, was refused.
    pub(super) fn refused(&mut self, worker: WorkerId) {
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
        (ranks, shards): (u16, u16),
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
        let memories = self.memories.iter().filter(|(_, memory)| same(memory));
        let layout = TierLayout {
            page_bytes: key.page_bytes,
            layout_fingerprint: key.layout_fingerprint,
        };
        let open = |tiers: &BTreeMap<WorkerId, StatedTiers>| -> Vec<(WorkerId, u32)> {
            let of_layout = tiers.iter().filter(|(_, (of, _))| *of == layout);
            let pages = of_layout.map(|(id, (_, pages))| (*id, pages.get(tier).copied()));
            pages.map(|(id, pages)| (id, pages.unwrap_or(0))).collect()
        };
        let (stated, lost) = match tier {
            TierId::Host => {
                let rooms = memories.map(|(worker, memory)| (*worker, memory.pages_of(tier)));
                (rooms.collect(), Vec::new())
            }
            _ => (open(&self.tiers), open(&self.lost)),
        };
        // The leader compares its pools with the workers when one attaches, states its memory or dies, and not when a
        // connection breaks.
        let some = |kept: u32| {
            let lost = lost.iter().enumerate();
            let lost = lost.filter(move |(place, _)| kept >> place & 1 == 1);
            lost.map(|(_, one)| *one)
        };
        let mut subsets = 0..1_u32 << lost.len().min(LOST_MAX);
        let fits = subsets.any(|kept| {
            let rooms = stated.iter().copied().chain(some(kept));
            let rooms = rooms.map(|(worker, pages)| (self.shards.get(&worker), pages));
            let room = room(tier, shards, &rooms.collect::<Vec<_>>()).min(ARENA_PAGES_MAX);
            (key.pages, pool.capacity_pages()) == (room, room)
        });
        if !fits {
            let pages = pool.capacity_pages();
            return Err(format!(
                "the pool of {tier} has {pages} pages, which is not the room of the smallest depot of {stated:?}"
            )
            .into());
        }
        Ok(())
    }
}

/// The pages of a tier that these workers state, each with its shard.
fn room(tier: TierId, shards: u16, rooms: &[(Option<&Shard>, u32)]) -> u32 {
    let room = match tier {
        TierId::Host => rooms.iter().map(|(_, pages)| *pages).min(),
        // A worker that has not got the disk open has no pages of it.
        _ => {
            let of_shard = |shard: u16| {
                let of_shard = rooms.iter().filter(|(of, _)| *of == Some(&Shard(shard)));
                let open = of_shard.map(|(_, pages)| *pages).filter(|pages| *pages > 0);
                open.min().unwrap_or(0)
            };
            (0..shards).map(of_shard).min()
        }
    };
    room.unwrap_or(0)
}
