//! The roster of workers: which are attached, with which memory and depot, and whether they agree.
//!
//! A worker *attaches* when no copy or other order of an older leader, or of an older connection, is in flight any
//! longer, and then states its engine's *memory*, or that it has none, whenever that changes. Until every seat has
//! attached or is known to be dead, an old order may still read or write engine memory and depots. Before that the
//! leader reads no inventory, and refuses no request that names engine pages.

use std::cmp::{Ordering, Reverse};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use crate::Contradiction;
use crate::group::model::Model;
use crate::index::arena::ARENA_PAGES_MAX;
use crate::index::shard_set::{SHARDS_MAX, ShardSet};
use crate::leader::event::{AttachRequest, TiersStatement, Workers};
use crate::leader::refusal::Refusal;
use kvferry_types::{
    AttachId, DepotId, Edge, EngineId, MemoryId, PerTier, Rank, Replica, Shard, Sharding, TierId,
    TierLayout, Time, TransferId, WorkerId,
};

use super::memory::{OpenTiers, SeatMemory, difference};
use super::tier::TierKey;
use super::timers::{Timer, Timers};
use super::transfers::CHECKS_MAX;

/// Replicas of one leader, at most.
pub const REPLICAS_MAX: u16 = 64;

/// The state of one seat.
#[derive(Debug, Clone, Default)]
struct Seat {
    attached: bool,
    /// No order of another leader is in flight: the worker attached at least once, or is known to be dead.
    clear: bool,
    memory: Option<SeatMemory>,
    /// The last attach request, and its answer.
    last_attach: Option<(AttachId, SeatVerdict)>,
    /// The last statement of the memory or of the tiers since then, and its answer.
    last_memory: Option<(MemoryId, SeatVerdict)>,
    /// The tiers below host memory that the worker has open. They stay when the engine leaves: a worker goes on to reach the
    /// disk that it has open.
    tiers: OpenTiers,
    /// The tiers that the worker's process reads, and into which it takes no writes.
    read_only: Vec<TierId>,
}

/// Answer to an attach request, or to a statement of the memory: the highest number of an order that the worker may have
/// carried out before.
pub(super) type SeatVerdict = Result<TransferId, Refusal>;

/// The answer to a numbered request that is not new: `Some(None)` for one that is older than the last, `Some` with the
/// verdict for the last one again.
fn answered<I: Ord>(last: Option<&(I, SeatVerdict)>, number: &I) -> Option<Option<SeatVerdict>> {
    let (last, verdict) = last?;
    match number.cmp(last) {
        Ordering::Less => Some(None),
        Ordering::Equal => Some(Some(verdict.clone())),
        Ordering::Greater => None,
    }
}

/// The seats of all workers.
#[derive(Debug)]
pub(super) struct Roster {
    ranks: u16,
    sharding: Sharding,
    replicas: u16,
    seats: Vec<Seat>,
    /// The depot of each shard in each tier, once a worker has named it.
    depots: PerTier<Vec<Option<DepotId>>>,
    /// Why the last worker that requested to attach was not admitted; `None` if it was.
    last_rejection: Option<Refusal>,
    /// When the roster next checks for workers that have not attached yet and are not known to be dead.
    overdue_check_at: Option<Time>,
    /// Checks for such workers since the start, or since they were fenced.
    overdue_checks: u32,
    /// Workers that this step fences.
    to_fence: BTreeSet<WorkerId>,
}

impl Roster {
    pub(super) fn new(replicas: u16, sharding: Sharding, tiers: &[TierId]) -> Self {
        let depots = vec![None; usize::from(sharding.shards())];
        let (replicas, ranks) = (replicas.min(REPLICAS_MAX), sharding.ranks().min(SHARDS_MAX));
        Self {
            ranks,
            sharding,
            replicas,
            seats: vec![Seat::default(); usize::from(replicas) * usize::from(ranks)],
            depots: tiers.iter().map(|tier| (*tier, depots.clone())).collect(),
            last_rejection: None,
            overdue_check_at: None,
            overdue_checks: 0,
            to_fence: BTreeSet::new(),
        }
    }

    fn index(&self, worker: WorkerId) -> Option<usize> {
        let within = worker.replica.0 < self.replicas && worker.rank.0 < self.ranks;
        within.then(|| {
            usize::from(worker.replica.0) * usize::from(self.ranks) + usize::from(worker.rank.0)
        })
    }

    fn seat(&mut self, worker: WorkerId) -> Option<&mut Seat> {
        let index = self.index(worker)?;
        self.seats.get_mut(index)
    }

    fn ids(&self) -> impl Iterator<Item = WorkerId> + use<> {
        let ranks = self.ranks;
        let replicas = (0..self.replicas).map(Replica);
        replicas.flat_map(move |replica| {
            (0..ranks).map(move |rank| WorkerId {
                replica,
                rank: Rank(rank),
            })
        })
    }

    fn all(&self) -> impl Iterator<Item = (WorkerId, &Seat)> {
        self.ids().zip(&self.seats)
    }

    /// True when this worker has attached with an engine's memory.
    pub(super) fn has_memory(&self, worker: WorkerId) -> bool {
        self.memories().any(|(id, _)| id == worker)
    }

    /// True when this worker has attached, with an engine's memory or without.
    pub(super) fn is_attached(&self, worker: WorkerId) -> bool {
        self.all().any(|(id, seat)| id == worker && seat.attached)
    }

    /// Number of seats whose worker has attached with an engine's memory.
    pub(super) fn with_memory(&self) -> u32 {
        let there = self
            .seats
            .iter()
            .filter(|seat| seat.attached && seat.memory.is_some());
        u32::try_from(there.count()).unwrap_or(u32::MAX)
    }

    /// The depot of a shard in a tier, once a worker has named it.
    pub(super) fn depot(&self, tier: TierId, shard: Shard) -> Option<DepotId> {
        *self.depots.get(tier)?.get(usize::from(shard.0))?
    }

    /// The tier in which this is the depot of a worker's shard.
    pub(super) fn tier_of(&self, worker: WorkerId, depot: DepotId) -> Option<TierId> {
        let shard = self.shard_of(worker);
        let mut tiers = self.depots.tiers();
        tiers.find(|tier| self.depot(*tier, shard) == Some(depot))
    }

    pub(super) fn lost(&mut self, worker: WorkerId) {
        if let Some(seat) = self.seat(worker) {
            seat.attached = false;
            seat.last_attach = None;
        }
    }

    /// The process of a worker is dead. Returns the tiers below host memory that it had open.
    pub(super) fn dead(&mut self, worker: WorkerId) -> Vec<TierId> {
        self.lost(worker);
        let Some(seat) = self.seat(worker) else {
            return Vec::new();
        };
        seat.clear = true;
        seat.read_only.clear();
        std::mem::take(&mut seat.tiers).tiers().collect()
    }

    /// Notes whether a worker's process takes writes into a tier.
    pub(super) fn set_writable(&mut self, worker: WorkerId, tier: TierId, writable: bool) {
        if let Some(seat) = self.seat(worker) {
            seat.read_only.retain(|known| *known != tier);
            if !writable {
                seat.read_only.push(tier);
            }
        }
    }

    /// False while a worker that reaches a tier takes no writes into it.
    pub(super) fn is_writable(&self, tier: TierId) -> bool {
        let mut reaching = self.all().filter(|(_, seat)| {
            let reaches = seat.tiers.have(tier);
            seat.attached && reaches
        });
        reaching.all(|(_, seat)| !seat.read_only.contains(&tier))
    }

    /// True when no order of another leader can be in flight on any worker.
    pub(super) fn all_clear(&self) -> bool {
        self.seats.iter().all(|seat| seat.clear)
    }

    /// True when no order of another leader can be in flight on this worker.
    pub(super) fn is_clear(&self, worker: WorkerId) -> bool {
        self.not_clear().all(|other| other != worker)
    }

    pub(super) fn not_clear(&self) -> impl Iterator<Item = WorkerId> {
        self.all().filter(|(_, seat)| !seat.clear).map(|(id, _)| id)
    }

    /// Replicas of which every rank has attached with the memory of the same engine.
    fn complete(&self) -> impl Iterator<Item = (Replica, &SeatMemory)> {
        let replicas = self.seats.chunks(usize::from(self.ranks.max(1)));
        replicas.zip(0..).filter_map(|(ranks, replica)| {
            let mut memories = ranks.iter().map(|seat| {
                let memory = seat.memory.as_ref();
                memory.filter(|_| seat.attached)
            });
            let first = memories.next()??;
            memories
                .all(|memory| memory.is_some_and(|memory| memory.engine == first.engine))
                .then_some((Replica(replica), first))
        })
    }

    /// The replica of which every rank has this engine's memory, and its model.
    pub(super) fn memory_of(&self, engine: EngineId) -> Option<(Replica, &Arc<Model>)> {
        let mut complete = self.complete();
        let found = complete.find(|(_, memory)| memory.engine == engine);
        found.map(|(replica, memory)| (replica, &memory.model))
    }

    /// The workers of all ranks of a replica: each of them copies a load.
    pub(super) fn loading(&self, replica: Replica) -> Workers {
        let ranks = (0..self.ranks).map(Rank);
        ranks.map(|rank| WorkerId { replica, rank }).collect()
    }

    /// The worker of one rank of each shard of a replica, which stores the KV that all ranks of that shard hold;
    /// `number` rotates the choice.
    pub(super) fn storing(&self, replica: Replica, number: u64) -> Workers {
        let ranks = self.sharding.representatives(number);
        ranks.map(|rank| WorkerId { replica, rank }).collect()
    }

    /// One attached worker of each shard, which can move pages over an edge between tiers, with an engine's memory or without:
    /// one that reaches all tiers, where there is one. `None` while a shard has none.
    pub(super) fn moving(&self, edge: Edge) -> Option<Workers> {
        let reaches = |seat: &Seat, tier| tier <= TierId::Host || seat.tiers.have(tier);
        let both =
            self.first_of_each_shard(|seat| reaches(seat, edge.from) && reaches(seat, edge.to));
        both.into_iter().collect()
    }

    /// The shards of an engine's KV.
    pub(super) fn shard_set(&self) -> ShardSet {
        ShardSet::first(self.sharding.shards())
    }

    /// The shard that a worker's rank holds.
    pub(super) fn shard_of(&self, worker: WorkerId) -> Shard {
        self.sharding.of(worker.rank)
    }

    pub(super) fn shards(&self) -> impl Iterator<Item = Shard> + use<> {
        (0..self.sharding.shards()).map(Shard)
    }

    /// True when every rank of some replica has the memory of the same engine.
    pub(super) fn any_replica(&self) -> bool {
        self.complete().next().is_some()
    }

    /// True when every rank of at least two replicas has memory.
    pub(super) fn are_several(&self) -> bool {
        self.complete().nth(1).is_some()
    }

    /// True when every rank of some replica has memory that this key is for.
    pub(super) fn serve(&self, key: &TierKey) -> bool {
        self.complete().any(|(_, memory)| key.is_for(&memory.model))
    }

    /// The key of the pool of a tier for a complete replica: one whose memory `known` is for, if there is one. Without a
    /// complete replica, workers go on to move pages of the known key between host memory and the tiers below. The smallest
    /// depot sets the number of pages, up to the limit of an arena.
    pub(super) fn key(&self, tier: TierId, known: Option<&TierKey>) -> Option<TierKey> {
        let is_known = |memory: &SeatMemory| known.is_some_and(|known| known.is_for(&memory.model));
        let complete = self.complete();
        let complete = complete.min_by_key(|(replica, memory)| (!is_known(memory), replica.0));
        let layout = match complete {
            Some((_, memory)) => memory.model.tier_layout(),
            None => {
                let known = known.filter(|_| tier > TierId::Host);
                known.filter(|_| self.have_all_stated())?.layout()
            }
        };
        let TierLayout {
            page_bytes,
            layout_fingerprint,
        } = layout;
        let depots: Option<Vec<DepotId>> = self.depots.get(tier)?.iter().copied().collect();
        let mut key = TierKey {
            page_bytes,
            layout_fingerprint,
            pages: ARENA_PAGES_MAX,
            depots: depots?,
        };
        let room = match tier {
            TierId::Host => {
                let memories = self.memories().map(|(_, memory)| memory);
                let memories = memories.filter(|memory| key.is_for(&memory.model));
                memories.map(|memory| memory.pages_of(tier)).min()
            }
            // One worker of each shard has the depot open. The others have no pages.
            _ => {
                let attached = self.all().filter(|(_, seat)| seat.attached);
                let rooms =
                    attached.map(|(id, seat)| (self.shard_of(id), seat.tiers.pages_of(tier, &key)));
                let rooms: Vec<_> = rooms.filter(|(_, pages)| *pages > 0).collect();
                let of_shard = |shard| {
                    let rooms = rooms.iter().filter(|(of, _)| *of == shard);
                    rooms.map(|(_, pages)| *pages).min().unwrap_or(0)
                };
                self.shards().map(of_shard).min()
            }
        };
        key.pages = key.pages.min(room?);
        Some(key)
    }

    /// False when a shard has another depot than this key names, or when the complete replicas need another key.
    pub(super) fn have(&self, tier: TierId, key: &TierKey) -> bool {
        let depots = self.depots.get(tier).into_iter().flatten().zip(&key.depots);
        let mut depots = depots.filter_map(|(now, then)| now.map(|now| now == *then));
        depots.all(|same| same)
            && self
                .key(tier, Some(key))
                .is_none_or(|wanted| wanted == *key)
    }

    /// For each shard an attached worker, if there is one.
    pub(super) fn worker_of_each_shard(&self) -> Vec<Option<WorkerId>> {
        self.first_of_each_shard(|_| true)
    }

    /// For each shard an attached worker that can read an inventory of pages of this size, if there is one: a worker
    /// with an engine's memory divides its depot into pages of that engine's size only.
    /// The depot of a tier below host memory is read by a worker that has it open.
    pub(super) fn reader_of_each_shard(
        &self,
        tier: TierId,
        page_bytes: u64,
    ) -> Vec<Option<WorkerId>> {
        self.first_of_each_shard(|seat| {
            let memory = seat.memory.as_ref();
            let fits = memory.is_none_or(|memory| memory.model.page_bytes() == page_bytes);
            let reaches = tier == TierId::Host || seat.tiers.have(tier);
            fits && reaches && seat.last_memory.is_some()
        })
    }

    /// For each shard an attached worker that has its part of a tier below host memory open, if there is one.
    pub(super) fn reaching_each_shard(&self, tier: TierId) -> Vec<Option<WorkerId>> {
        self.first_of_each_shard(|seat| seat.tiers.have(tier))
    }

    /// Workers that have attached and said that they have no engine's memory.
    pub(super) fn stated_without_memory(&self) -> Vec<WorkerId> {
        let stated = self
            .all()
            .filter(|(_, seat)| seat.attached && seat.last_memory.is_some());
        let idle = stated.filter(|(_, seat)| seat.memory.is_none());
        idle.map(|(id, _)| id).collect()
    }

    /// True if a worker has a tier below host memory open for these pages.
    pub(super) fn has_open(&self, worker: WorkerId, layout: &TierLayout) -> bool {
        let mut all = self.all();
        all.any(|(id, seat)| id == worker && seat.attached && seat.tiers.are_for(layout))
    }

    /// For each shard of which no worker has an engine's memory, the worker that is to have the tiers below host memory open:
    /// one that has, if there is one.
    pub(super) fn opening_idle(&self, layout: Option<&TierLayout>) -> Vec<WorkerId> {
        let idle = self.stated_without_memory();
        let of_shard = |shard: Shard| {
            let mut of_shard = self.all().filter(|(id, _)| self.shard_of(*id) == shard);
            if of_shard.any(|(_, seat)| seat.attached && seat.memory.is_some()) {
                return None;
            }
            let idle = idle.iter().filter(|id| self.shard_of(**id) == shard);
            let has = |id: &WorkerId| layout.is_some_and(|layout| self.has_open(*id, layout));
            idle.min_by_key(|id| (!has(id), **id)).copied()
        };
        self.shards().filter_map(of_shard).collect()
    }

    /// True when an attached worker of each shard has said which memory and which tiers it has.
    fn have_all_stated(&self) -> bool {
        let stated = self.first_of_each_shard(|seat| seat.last_memory.is_some());
        !stated.contains(&None)
    }

    /// True when this worker may read inventories: it has attached, and has said which memory it has.
    pub(super) fn may_read(&self, worker: WorkerId) -> bool {
        let mut all = self.all();
        all.any(|(id, seat)| id == worker && seat.attached && seat.last_memory.is_some())
    }

    fn first_of_each_shard(&self, fits: impl Fn(&Seat) -> bool) -> Vec<Option<WorkerId>> {
        let of_shard = |shard: Shard| {
            let attached = self.all().filter(|(_, seat)| seat.attached && fits(seat));
            let of_shard = attached.filter(|(id, _)| self.shard_of(*id) == shard);
            // The first one of those that reach the most tiers.
            let best = of_shard.min_by_key(|(id, seat)| (Reverse(seat.tiers.tiers().count()), *id));
            best.map(|(id, _)| id)
        };
        self.shards().map(of_shard).collect()
    }

    fn memories(&self) -> impl Iterator<Item = (WorkerId, &SeatMemory)> {
        self.all().filter_map(|(id, seat)| {
            let memory = seat.memory.as_ref().filter(|_| seat.attached)?;
            Some((id, memory))
        })
    }

    /// The model of some worker's memory that this key is for; without a key, of any worker's memory.
    pub(super) fn model(&self, key: Option<&TierKey>) -> Option<&Arc<Model>> {
        let mut models = self.memories().map(|(_, memory)| &memory.model);
        models.find(|model| key.is_none_or(|key| key.is_for(model)))
    }

    /// Refusal for an engine that is not served because not all of its ranks have attached.
    pub(super) fn not_ready(&self) -> Refusal {
        let waiting_for = u32::from(self.ranks) * u32::from(self.replicas) - self.with_memory();
        let why = self.last_rejection.as_ref();
        let detail = why.map(|why| format!(" ({why})")).unwrap_or_default();
        if waiting_for == 0 {
            return Refusal::AnotherEngine { detail };
        }
        Refusal::NotReady {
            waiting_for,
            ranks: self.ranks,
            replicas: self.replicas,
            detail,
        }
    }

    /// The answer to an attach request that is not new; see [`answered`].
    pub(super) fn answered_attach(
        &mut self,
        worker: WorkerId,
        attach: AttachId,
    ) -> Option<Option<SeatVerdict>> {
        answered(self.seat(worker)?.last_attach.as_ref(), &attach)
    }

    /// The answer to a statement of the memory that is not new; see [`answered`].
    pub(super) fn answered_memory(
        &mut self,
        worker: WorkerId,
        number: MemoryId,
    ) -> Option<Option<SeatVerdict>> {
        answered(self.seat(worker)?.last_memory.as_ref(), &number)
    }

    /// All earlier orders of a worker have ended, and its attach request is about to be checked. It has no memory before
    /// it states one. Returns the tiers below host memory that it had open.
    pub(super) fn begin_attach(&mut self, worker: WorkerId) -> Vec<TierId> {
        self.begin_memory(worker);
        let Some(seat) = self.seat(worker) else {
            return Vec::new();
        };
        seat.attached = false;
        seat.clear = true;
        seat.last_memory = None;
        std::mem::take(&mut seat.tiers).tiers().collect()
    }

    /// All copies of a worker's earlier memory have ended, and what it states is about to be checked.
    pub(super) fn begin_memory(&mut self, worker: WorkerId) {
        if let Some(seat) = self.seat(worker) {
            seat.memory = None;
        }
    }

    /// Notes the memory of a worker, or why it is not used.
    pub(super) fn end_memory(
        &mut self,
        worker: WorkerId,
        number: MemoryId,
        verdict: Result<(Option<SeatMemory>, TransferId), Refusal>,
    ) -> SeatVerdict {
        self.last_rejection = verdict.clone().err();
        let (memory, verdict) = match verdict {
            Ok((memory, after)) => (memory, Ok(after)),
            Err(refusal) => (None, Err(refusal)),
        };
        if let Some(seat) = self.seat(worker) {
            if let Some(memory) = &memory {
                seat.tiers = memory.open_tiers();
            }
            seat.memory = memory;
            seat.last_memory = Some((number, verdict.clone()));
        }
        verdict
    }

    /// Notes the tiers below host memory that a worker has open from now on.
    pub(super) fn set_tiers(&mut self, stated: &TiersStatement) {
        if let Some(seat) = self.seat(stated.worker) {
            seat.tiers = OpenTiers::new(stated.layout, &stated.pages);
            // The verdict of a statement of tiers names no order.
            seat.last_memory = Some((stated.number, Ok(TransferId(0))));
        }
    }

    /// Gives a worker its seat, or notes why not.
    pub(super) fn end_attach(&mut self, attached: &AttachRequest, verdict: &SeatVerdict) {
        self.last_rejection = verdict.clone().err();
        let worker = attached.worker;
        if verdict.is_ok() {
            let shard = usize::from(self.shard_of(worker).0);
            for (tier, depots) in self.depots.iter_mut() {
                depots[shard] = attached.depots.get(tier).map(|named| named.depot);
            }
        }
        if let Some(seat) = self.seat(worker) {
            seat.attached = verdict.is_ok();
            seat.last_attach = Some((attached.attach, verdict.clone()));
        }
    }

    /// Schedules the next check for workers that are not clear, unless one is scheduled. From the first event on,
    /// workers have the fence time (`CHECKS_MAX` checks, a quarter of it apart) to attach.
    pub(super) fn expect_workers(&mut self, now: Time, fence: Duration, timers: &mut Timers) {
        if self.overdue_check_at.is_some() {
            return;
        }
        let at = now + fence / 4;
        self.overdue_check_at = Some(at);
        if !self.all_clear() {
            timers.set(at, Timer::AttachOverdue);
        }
    }

    /// Fences workers that have not become clear within the fence time, because they may still read and write for an
    /// older leader. Their successors attach.
    pub(super) fn check_overdue(&mut self, now: Time, fence: Duration, timers: &mut Timers) {
        self.overdue_checks += 1;
        if self.overdue_checks >= CHECKS_MAX {
            let not_clear: Vec<WorkerId> = self.not_clear().collect();
            self.request_fence(not_clear);
            self.overdue_checks = 0;
        }
        self.overdue_check_at = None;
        self.expect_workers(now, fence, timers);
    }

    /// Every worker is clear: no check for silent ones is needed.
    pub(super) fn stop_overdue_checks(&mut self, timers: &mut Timers) {
        if let Some(at) = self.overdue_check_at {
            timers.clear(at, Timer::AttachOverdue);
        }
    }

    /// Fences workers at the end of this step.
    pub(super) fn request_fence(&mut self, workers: impl IntoIterator<Item = WorkerId>) {
        self.to_fence.extend(workers);
    }

    /// The workers that this step fences.
    pub(super) fn take_to_fence(&mut self) -> BTreeSet<WorkerId> {
        std::mem::take(&mut self.to_fence)
    }

    /// Checks that an attached worker is clear, and that its shard has a depot. `Err` names the first contradiction.
    pub(super) fn check(&self) -> Result<(), Contradiction> {
        for (worker, seat) in self.all().filter(|(_, seat)| seat.attached) {
            if !seat.clear {
                return Err(format!("{worker} is attached and not clear").into());
            }
            let shard = self.shard_of(worker);
            let mut tiers = self.depots.tiers();
            if let Some(tier) = tiers.find(|tier| self.depot(*tier, shard).is_none()) {
                return Err(
                    format!("{worker} is attached and its shard has no depot in {tier}").into(),
                );
            }
        }
        Ok(())
    }

    /// Checks an attach request against the settings and against the depots of the other workers.
    pub(super) fn validate(&self, attached: &AttachRequest) -> Result<(), Refusal> {
        let worker = attached.worker;
        self.same_settings(attached)?;
        if self.index(worker).is_none() {
            return Err(Refusal::NoSuchWorker {
                worker,
                ranks: self.ranks,
                replicas: self.replicas,
            });
        }
        let shares = |(id, seat): &(WorkerId, &Seat)| {
            self.shard_of(*id) == self.shard_of(worker) && *id != worker && seat.attached
        };
        let sharer = self.all().find(shares).map(|(other, _)| other);
        for tier in self.depots.tiers() {
            let Some(depot) = attached.depots.get(tier).map(|named| named.depot) else {
                return Err(Refusal::DepotMissing { worker, tier });
            };
            let known = self.depot(tier, self.shard_of(worker));
            if let Some(other) = sharer
                && known.is_some_and(|known| known != depot)
            {
                return Err(Refusal::DepotNotShared { worker, other });
            }
            if let Some(shard) = self.other_user(attached, tier, depot) {
                return Err(Refusal::DepotOfTwoShards {
                    worker,
                    shard: shard.0,
                });
            }
        }
        Ok(())
    }

    /// Checks the memory of a worker against the depots, of which each must have `least_pages`, and against the memory of
    /// the other workers.
    pub(super) fn validate_memory(
        &self,
        worker: WorkerId,
        memory: &SeatMemory,
        least_pages: &PerTier<u32>,
        key: Option<&TierKey>,
    ) -> Result<(), Refusal> {
        for (tier, least_pages) in least_pages.iter() {
            let (arena_pages, least_pages) = (memory.pages_of(tier), *least_pages);
            if arena_pages < least_pages {
                return Err(Refusal::DepotTooSmall {
                    worker,
                    arena_pages,
                    least_pages,
                });
            }
        }
        for (other, theirs) in self.memories().filter(|(other, _)| *other != worker) {
            let same_replica = other.replica == worker.replica;
            if let Some((field, value, other_value)) =
                difference(&memory.model, &theirs.model, same_replica)
                && (same_replica || self.yields((worker, memory), (other, theirs), key))
            {
                return Err(Refusal::RankDisagrees {
                    worker,
                    other,
                    field,
                    value,
                    other_value,
                });
            }
        }
        Ok(())
    }

    /// The shard for which a depot is used already: another shard, or the same one in another tier.
    fn other_user(&self, attached: &AttachRequest, tier: TierId, depot: DepotId) -> Option<Shard> {
        let own = self.shard_of(attached.worker);
        let mut others = attached.depots.iter().filter(|(other, _)| *other != tier);
        if others.any(|(_, named)| named.depot == depot) {
            return Some(own);
        }
        let uses = self
            .depots
            .tiers()
            .flat_map(|other| self.shards().map(move |shard| (other, shard)));
        let mut uses = uses.filter(|(_, shard)| *shard != own);
        let user = uses.find(|(other, shard)| self.depot(*other, *shard) == Some(depot));
        user.map(|(_, shard)| shard)
    }

    /// Checks that the worker was started for engines of as many ranks and shards as this leader. A replica is complete
    /// when all of the leader's own ranks are attached: if the leader has fewer ranks than the engine, the other ranks
    /// would attend to pages that no worker has loaded.
    fn same_settings(&self, attached: &AttachRequest) -> Result<(), Refusal> {
        let shards = self.sharding.shards();
        let settings = [
            ("ranks", attached.ranks, self.ranks),
            ("kv_shards", attached.shards, shards),
        ];
        match settings.into_iter().find(|(_, value, own)| value != own) {
            None => Ok(()),
            Some((setting, value, expected)) => Err(Refusal::SettingDiffers {
                worker: attached.worker,
                setting,
                value,
                expected,
            }),
        }
    }

    /// True when the worker that states its memory makes room for a worker of another replica that differs from it. The
    /// replica that makes room is the one that the pool is not for, else the one that is not complete, else the higher
    /// one. Without this rule two engines that register at the same time could each keep the other one from becoming
    /// complete.
    fn yields(
        &self,
        (worker, memory): (WorkerId, &SeatMemory),
        (other, theirs): (WorkerId, &SeatMemory),
        key: Option<&TierKey>,
    ) -> bool {
        let is_for = |model: &Model| key.is_some_and(|key| key.is_for(model));
        if is_for(&theirs.model) || is_for(&memory.model) {
            return is_for(&theirs.model);
        }
        let complete = self.complete().any(|(replica, _)| replica == other.replica);
        complete || other.replica < worker.replica
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leader::tests::serving;

    #[test]
    fn an_attached_worker_without_clearance_or_depot_is_detected() {
        let mut leader = serving();
        assert_eq!(leader.roster.check(), Ok(()));
        leader.roster.seats[0].clear = false;
        let why = leader.roster.check().expect_err("orders may be in flight");
        assert!(
            why.to_string().ends_with("attached and not clear"),
            "{why:?}"
        );
        leader.roster.seats[0].clear = true;
        leader.roster.depots = PerTier::host(vec![None; 2]);
        let why = leader.roster.check().expect_err("no depot");
        assert!(why.to_string().ends_with("has no depot in g2"), "{why:?}");
    }
}
