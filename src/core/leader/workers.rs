//! Workers come and go: who is there, what each of them has, and whether they agree.
//!
//! A worker *attaches* when nothing that an older leader, or an older connection, ordered of it is under way any more.
//! Until every place has attached or is seen dead, something old may still read or write engine memory and depots: no
//! inventory is read, and nothing that names engine pages is refused, before that.

use crate::core::arena::ARENA_PAGES_MAX;
use crate::core::event::{Attached, Effect, EngineMemory};
use crate::core::pool::Pool;
use crate::core::refusal::Refusal;
use crate::core::shards::{RANKS_MAX, RankSet};
use crate::types::{
    AttachId, DepotId, EngineId, GroupGeometry, OpId, Rank, Replica, Shard, Sharding, Time,
    WorkerId,
};

use super::{Leader, Timer};

/// Replicas of one leader, at most.
pub const REPLICAS_MAX: u16 = 64;

/// What is known of one place.
#[derive(Debug, Clone, Default)]
struct Place {
    attached: bool,
    /// Nothing that this leader did not order is under way: it attached once, or is seen dead.
    clear: bool,
    memory: Option<EngineMemory>,
    /// The last time that it said who it is, and what it was told.
    last: Option<(AttachId, Result<OpId, Refusal>)>,
}

/// What is known of all of them.
#[derive(Debug)]
pub(super) struct Workers {
    ranks: u16,
    sharding: Sharding,
    replicas: u16,
    places: Vec<Place>,
    /// The depot of each shard, once a worker has named it.
    depots: Vec<Option<DepotId>>,
    turned_away: Option<Refusal>,
}

impl Workers {
    pub(super) fn new(replicas: u16, sharding: Sharding) -> Self {
        let (replicas, ranks) = (replicas.min(REPLICAS_MAX), sharding.ranks().min(RANKS_MAX));
        Self {
            ranks,
            sharding,
            replicas,
            places: vec![Place::default(); usize::from(replicas) * usize::from(ranks)],
            depots: vec![None; usize::from(sharding.shards())],
            turned_away: None,
        }
    }

    fn index(&self, worker: WorkerId) -> Option<usize> {
        let within = worker.replica.0 < self.replicas && worker.rank.0 < self.ranks;
        within.then(|| {
            usize::from(worker.replica.0) * usize::from(self.ranks) + usize::from(worker.rank.0)
        })
    }

    fn place(&mut self, worker: WorkerId) -> Option<&mut Place> {
        let index = self.index(worker)?;
        self.places.get_mut(index)
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

    fn all(&self) -> impl Iterator<Item = (WorkerId, &Place)> {
        self.ids().zip(&self.places)
    }

    /// It has attached with an engine's memory.
    pub(super) fn has_memory(&self, worker: WorkerId) -> bool {
        self.memories().any(|(id, _)| id == worker)
    }

    /// Places whose worker has attached with an engine's memory.
    pub(super) fn with_memory(&self) -> u32 {
        let there = self
            .places
            .iter()
            .filter(|place| place.attached && place.memory.is_some());
        u32::try_from(there.count()).unwrap_or(u32::MAX)
    }

    /// The depot of a shard, once a worker has named it.
    pub(super) fn depot(&self, shard: Shard) -> Option<DepotId> {
        *self.depots.get(usize::from(shard.0))?
    }

    pub(super) fn lost(&mut self, worker: WorkerId) {
        if let Some(place) = self.place(worker) {
            place.attached = false;
            place.last = None;
        }
    }

    pub(super) fn dead(&mut self, worker: WorkerId) {
        self.lost(worker);
        if let Some(place) = self.place(worker) {
            place.clear = true;
        }
    }

    /// Nothing is under way anywhere that this leader did not order.
    pub(super) fn all_clear(&self) -> bool {
        self.places.iter().all(|place| place.clear)
    }

    pub(super) fn unclear(&self) -> impl Iterator<Item = WorkerId> {
        self.all()
            .filter(|(_, place)| !place.clear)
            .map(|(id, _)| id)
    }

    /// The replica whose every rank has this engine's memory.
    pub(super) fn replica_of(&self, engine: EngineId) -> Option<Replica> {
        self.places
            .chunks(usize::from(self.ranks.max(1)))
            .zip(0..)
            .find(|(ranks, _)| {
                ranks.iter().all(|place| {
                    let memory = place.memory.as_ref().filter(|_| place.attached);
                    memory.is_some_and(|memory| memory.engine == engine)
                })
            })
            .map(|(_, replica)| Replica(replica))
    }

    /// All ranks of an engine: what is loaded is copied by each.
    pub(super) fn ranks(&self) -> RankSet {
        RankSet::first(self.ranks)
    }

    /// One rank of each shard, which store what all that hold it have; another one for each number.
    pub(super) fn storers(&self, number: u64) -> RankSet {
        let mut storers = RankSet::default();
        for rank in self.sharding.one_of_each(number) {
            storers.insert(rank);
        }
        storers
    }

    /// What a worker's rank holds.
    pub(super) fn shard_of(&self, worker: WorkerId) -> Shard {
        self.sharding.of(worker.rank)
    }

    pub(super) fn shards(&self) -> impl Iterator<Item = Shard> + use<> {
        (0..self.sharding.shards()).map(Shard)
    }

    /// Some replica has every rank, with one engine's memory.
    pub(super) fn any_replica(&self) -> bool {
        let engines = self.places.iter().filter_map(|place| place.memory.as_ref());
        engines
            .map(|memory| memory.engine)
            .any(|engine| self.replica_of(engine).is_some())
    }

    /// An attached worker for each shard that has one.
    pub(super) fn one_of_each_shard(&self) -> Vec<Option<WorkerId>> {
        let of_shard = |shard: Shard| {
            self.all()
                .find(|(id, place)| self.shard_of(*id) == shard && place.attached)
                .map(|(id, _)| id)
        };
        self.shards().map(of_shard).collect()
    }

    fn memories(&self) -> impl Iterator<Item = (WorkerId, &EngineMemory)> {
        self.all().filter_map(|(id, place)| {
            let memory = place.memory.as_ref().filter(|_| place.attached)?;
            Some((id, memory))
        })
    }

    /// What all workers with memory agree on.
    pub(super) fn geometry(&self) -> Option<&GroupGeometry> {
        self.memories().next().map(|(_, memory)| &memory.geometry)
    }

    /// Pages that every one of them has room for: the smallest sets the capacity, up to what an arena can have.
    pub(super) fn arena_pages(&self) -> u32 {
        self.memories()
            .map(|(_, memory)| memory.arena_pages)
            .min()
            .unwrap_or(0)
            .min(ARENA_PAGES_MAX)
    }

    /// Why an engine is not served whose ranks are not all there.
    pub(super) fn not_ready(&self) -> Refusal {
        let waiting_for = u32::from(self.ranks) * u32::from(self.replicas) - self.with_memory();
        let why = self.turned_away.as_ref();
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

    fn judge(&self, attached: &Attached, least_pages: u32) -> Result<(), Refusal> {
        let worker = attached.worker;
        if self.index(worker).is_none() {
            return Err(Refusal::NoSuchWorker {
                worker,
                ranks: self.ranks,
                replicas: self.replicas,
            });
        }
        let shares = |(id, place): &(WorkerId, &Place)| {
            self.shard_of(*id) == self.shard_of(worker) && *id != worker && place.attached
        };
        let known = self.depot(self.shard_of(worker));
        if let Some((other, _)) = self.all().find(shares)
            && known.is_some_and(|known| known != attached.depot)
        {
            return Err(Refusal::DepotNotShared { worker, other });
        }
        let another = |shard: &Shard| *shard != self.shard_of(worker);
        let mut others = self.shards().filter(another);
        if let Some(shard) = others.find(|shard| self.depot(*shard) == Some(attached.depot)) {
            return Err(Refusal::DepotOfTwoShards {
                worker,
                shard: shard.0,
            });
        }
        let Some(memory) = &attached.memory else {
            return Ok(());
        };
        if memory.arena_pages < least_pages {
            return Err(Refusal::DepotTooSmall {
                worker,
                arena_pages: memory.arena_pages,
                least_pages,
            });
        }
        for (other, theirs) in self.memories().filter(|(other, _)| *other != worker) {
            let same_replica = other.replica == worker.replica;
            if let Some((field, value, other_value)) =
                difference(&memory.geometry, &theirs.geometry, same_replica)
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
}

/// The first field in which two workers differ, with both values. Replicas may have memory of different sizes.
fn difference(
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

impl Leader {
    /// A worker says who it is; everything that it was asked for before has ended. Said again, it is told the same.
    pub(super) fn attached(&mut self, now: Time, attached: Attached, effects: &mut Vec<Effect>) {
        let (worker, attach) = (attached.worker, attached.attach);
        let last = self
            .workers
            .place(worker)
            .and_then(|place| place.last.clone());
        if let Some((last, verdict)) = last.filter(|(last, _)| attach <= *last) {
            if attach == last {
                effects.push(Effect::Admit {
                    worker,
                    attach,
                    verdict,
                });
            }
            return;
        }
        self.end_all_of(worker, effects);
        if let Some(place) = self.workers.place(worker) {
            place.attached = false;
            place.clear = true;
        }
        let verdict = self.judge(&attached);
        let told = verdict.clone().map(|()| OpId(self.next_id));
        self.workers.turned_away = verdict.err();
        if told.is_ok() {
            self.adopt_depot(self.workers.shard_of(worker), attached.depot);
            self.fit_pool(attached.memory.as_ref());
        }
        if let Some(place) = self.workers.place(worker) {
            place.attached = told.is_ok();
            place.memory = attached.memory;
            place.last = Some((attach, told.clone()));
        }
        effects.push(Effect::Admit {
            worker,
            attach,
            verdict: told,
        });
        self.look_around(now, effects);
    }

    /// Beside what the workers themselves agree on: a pool that is in use keeps its size.
    fn judge(&self, attached: &Attached) -> Result<(), Refusal> {
        let block = match self.settings.tiers {
            true => self.settings.ratio.pages(),
            false => 0,
        };
        let in_use = self
            .pool
            .as_ref()
            .filter(|pool| pool.pins() > 0 || !self.ops.is_empty());
        let least_pages = in_use.map_or(0, Pool::capacity_pages).max(block);
        self.workers.judge(attached, least_pages)
    }

    /// A pool that nobody uses makes room for a smaller one.
    fn fit_pool(&mut self, memory: Option<&EngineMemory>) {
        let fits =
            |pool: &Pool| memory.is_none_or(|memory| memory.arena_pages >= pool.capacity_pages());
        if !self.pool.as_ref().is_none_or(fits) {
            self.pool = None;
        }
    }

    /// Another depot than before holds nothing of what the pool knows.
    fn adopt_depot(&mut self, shard: Shard, depot: DepotId) {
        let known = &mut self.workers.depots[usize::from(shard.0)];
        if known.replace(depot).is_some_and(|known| known != depot) {
            self.stop_reading();
            if let Some(pool) = &mut self.pool {
                pool.reset();
            }
        }
    }

    pub(super) fn worker_dead(&mut self, now: Time, worker: WorkerId, effects: &mut Vec<Effect>) {
        self.workers.dead(worker);
        self.reader_lost(worker, effects);
        self.end_all_of(worker, effects);
        self.look_around(now, effects);
    }

    /// From the first moment on, workers have the fence time to say that nothing old is under way.
    pub(super) fn expect_workers(&mut self, now: Time) {
        let at = now + self.settings.fence;
        self.silent_at = Some(at);
        if !self.workers.all_clear() {
            self.timers.insert((at, Timer::Silent));
        }
    }

    /// Who keeps silent may still read and write for an older leader: it must go, and its successor will speak.
    pub(super) fn silent_due(&mut self, now: Time, effects: &mut Vec<Effect>) {
        effects.extend(self.workers.unclear().map(Effect::Expel));
        self.expect_workers(now);
    }

    /// What becomes possible when workers have come or gone.
    pub(super) fn look_around(&mut self, now: Time, effects: &mut Vec<Effect>) {
        if self.workers.all_clear() {
            if let Some(at) = self.silent_at {
                self.timers.remove(&(at, Timer::Silent));
            }
            self.refuse_parked(effects);
        }
        self.open_pool(now, effects);
        self.read_on(effects);
        self.strike(effects);
    }
}
