//! The leader: decides which page lives where, and answers engines.
//!
//! [`Leader::step`] is a plain function of its state, the time and an event. It touches no KV byte, reads no clock, draws
//! no random number and waits for nothing: it appends effects, and whoever drives it carries them out. The live leader
//! and a replay in virtual time drive the same code.

mod cancel;
mod inventory;
mod load;
mod lookup;
mod ops;
mod requests;
mod reset;
mod store;
mod tier;
mod workers;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use crate::core::anchor::{AnchorKey, Domain};
use crate::core::decision::{RequestDigest, RunDigest};
use crate::core::event::{Effect, Event};
use crate::core::pool::PoolCounts;
use crate::core::sabotage::{Bug, planted};
use crate::core::slot::{Session, Slot};
use crate::types::{
    EngineId, Epoch, Generation, GroupGeometry, OpId, Ratio, RequestId, ResetId, Sharding, SlotId,
    Time, WorkerId,
};

pub use cancel::CANCELS_MAX;
use cancel::{CancelId, Cancelling};
use inventory::{Owed, Part, Readings};
pub use load::LOAD_RUNS_MAX;
use ops::Op;
pub use requests::OPEN_REQUESTS_MAX;
use requests::Parked;
use reset::Reset;
pub use reset::{RESET_PAGES_OPEN_MAX, RESET_SLICE_PAGES, RESETS_OPEN_MAX};
use store::{PendingStore, StoreKey};
use tier::Tier;
pub use tier::TierKey;
pub use workers::REPLICAS_MAX;
use workers::Workers;

/// Settings of a leader. Data only.
#[derive(Debug, Clone)]
pub struct LeaderSettings {
    /// Grows with each start.
    pub epoch: Epoch,
    /// Ranks of one engine, and which of them hold the same KV.
    pub sharding: Sharding,
    /// Engines that share the depots. Default: 1.
    pub replicas: u16,
    /// Pages of the largest block.
    pub ratio: Ratio,
    /// Secret of the anchors.
    pub anchor_key: AnchorKey,
    /// How long a lookup holds what it found. Default: 30 s.
    pub hold_for: Duration,
    /// How long after its deadline a copy may take to end before its worker is expelled. Default: 10 s.
    pub fence: Duration,
    /// Requests of one engine under way at one time, and loads and stores of one engine that wait for copies of an older
    /// leader to end; more are refused. Default: [`OPEN_REQUESTS_MAX`].
    pub open_requests_max: usize,
    /// How long an engine is remembered after its connection broke. Default: 10 s.
    pub engine_grace: Duration,
    /// Longest time until the deadline of a request; a later deadline is cut to it. It bounds how long a store whose pages
    /// are never written, or a reset that is never confirmed, takes up room. Default: 120 s.
    pub deadline_max: Duration,
    /// Pages that one slice of a reset looks at. Default: [`RESET_SLICE_PAGES`].
    pub reset_slice_pages: u32,
    /// Bytes of the depot of one shard, where the leader knows them: a worker that names more pages than fit is turned
    /// away. The leader keeps 29 bytes for each page. Default: unknown.
    pub depot_bytes: Option<u64>,
    /// There is a tier, with room for one block at least. Without, every store is refused: a baseline. Default: on.
    pub tiers: bool,
    /// Keep the digest of decisions. Default: on.
    pub record_decisions: bool,
}

impl LeaderSettings {
    /// The defaults, for an epoch, a number of ranks with KV of their own, a ratio and a key.
    pub fn new(epoch: Epoch, ranks: u16, ratio: Ratio, anchor_key: AnchorKey) -> Self {
        Self {
            epoch,
            sharding: Sharding::each(ranks),
            replicas: 1,
            ratio,
            anchor_key,
            open_requests_max: OPEN_REQUESTS_MAX,
            hold_for: Duration::from_secs(30),
            fence: Duration::from_secs(10),
            engine_grace: Duration::from_secs(10),
            deadline_max: Duration::from_secs(120),
            reset_slice_pages: RESET_SLICE_PAGES,
            depot_bytes: None,
            tiers: true,
            record_decisions: true,
        }
    }
}

/// What a timeout is about. Ordered, so that equal times fire in one order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Hold(EngineId, SlotId),
    Copy(OpId),
    Store(StoreKey),
    /// The deadline of a reset.
    Reset(ResetId),
    /// The next slice of the resets.
    Resets,
    Cancel(CancelId),
    Reading,
    /// Questions for an inventory that this worker has not answered.
    Owed(WorkerId),
    Silent,
    Engine(EngineId),
}

/// Counted since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LeaderCounts {
    /// Lookups answered.
    pub lookups: u64,
    /// Pages that lookups were asked about.
    pub lookup_pages: u64,
    /// Pages that engines had themselves.
    pub device_pages: u64,
    /// Further pages found.
    pub hit_pages: u64,
    /// Block runs read by loads.
    pub loaded: u64,
    /// Pages read by loads.
    pub loaded_pages: u64,
    /// Pages that became ready.
    pub published_pages: u64,
    /// Pages that were found in the depots when this leader began.
    pub recovered_pages: u64,
    /// Copies that failed on some rank.
    pub failed_copies: u64,
    /// Copies that missed their deadline.
    pub late_copies: u64,
    /// Bytes gathered, summed over ranks.
    pub gathered_bytes: u64,
    /// Bytes scattered, summed over ranks.
    pub scattered_bytes: u64,
    /// Time that gathers took, summed over ranks.
    pub gather_us: u64,
    /// Time that scatters took, summed over ranks.
    pub scatter_us: u64,
    /// Positions of sequences that stores looked up.
    pub store_looks: u64,
    /// Slices in which resets were done.
    pub reset_slices: u64,
    /// Most pages that one of those looked at.
    pub largest_reset_slice_pages: u64,
}

/// See the module.
#[derive(Debug)]
pub struct Leader {
    settings: LeaderSettings,
    workers: Workers,
    tier: Option<Tier>,
    /// Of the pools that were closed.
    pool_counts: PoolCounts,
    /// Inventories that were read so far, while a pool is being made from them.
    reading: Option<Readings>,
    /// Questions for inventories that were not answered, also those of readings that are over.
    owed_readings: BTreeMap<WorkerId, Owed>,
    sessions: HashMap<EngineId, Session>,
    ops: HashMap<OpId, Op>,
    stores: HashMap<StoreKey, PendingStore>,
    waiters: HashMap<Generation, Vec<StoreKey>>,
    /// Requests to cancel stores that wait for the ends of those.
    cancels: BTreeMap<CancelId, Cancelling>,
    next_cancel: CancelId,
    resets: BTreeMap<ResetId, Reset>,
    /// When the next slice of the resets is done, while it waits.
    resets_at: Option<Time>,
    /// Loads and stores that came while copies of an older leader could be under way. Their engine may not take its pages
    /// back before those have ended; so they are refused only then.
    parked: BTreeMap<(EngineId, RequestId), Parked>,
    /// Nothing new is begun.
    draining: bool,
    /// When workers that have not said a word are looked at next.
    silent_at: Option<Time>,
    /// Looks at those since the beginning, or since they were expelled.
    silent_looks: u32,
    timers: BTreeSet<(Time, Timer)>,
    /// Copies that this step cancels, and workers that it expels: each worker is told once.
    stops: BTreeMap<WorkerId, BTreeSet<OpId>>,
    expelled: BTreeSet<WorkerId>,
    next_id: u64,
    next_reset: u64,
    next_store: u64,
    counts: LeaderCounts,
    digest: RunDigest,
}

impl Leader {
    /// A leader without workers and engines.
    pub fn new(settings: LeaderSettings) -> Self {
        Self {
            workers: Workers::new(settings.replicas, settings.sharding),
            settings,
            tier: None,
            pool_counts: PoolCounts::default(),
            reading: None,
            owed_readings: BTreeMap::new(),
            sessions: HashMap::new(),
            ops: HashMap::new(),
            stores: HashMap::new(),
            waiters: HashMap::new(),
            cancels: BTreeMap::new(),
            next_cancel: 0,
            resets: BTreeMap::new(),
            resets_at: None,
            parked: BTreeMap::new(),
            draining: false,
            silent_at: None,
            silent_looks: 0,
            timers: BTreeSet::new(),
            stops: BTreeMap::new(),
            expelled: BTreeSet::new(),
            next_id: 0,
            next_reset: 0,
            next_store: 0,
            counts: LeaderCounts::default(),
            digest: RunDigest::default(),
        }
    }

    /// Takes an event and appends what is to be done.
    pub fn step(&mut self, now: Time, event: Event, effects: &mut Vec<Effect>) {
        if self.silent_at.is_none() {
            self.expect_workers(now);
        }
        // What is late is late before anything else happens, also when nobody looked in time.
        if !planted(Bug::LookLate) {
            self.fire_timers(now, effects);
        }
        match event {
            Event::EngineOpened(engine) => self.engine_opened(engine),
            Event::EngineClosed(engine) => self.engine_closed(now, engine),
            Event::Attached(attached) => self.attached(now, attached, effects),
            Event::WorkerLost(worker) => {
                self.workers.lost(worker);
                self.not_asked(worker);
                self.reader_lost(now, worker, effects);
            }
            Event::WorkerDead(worker) => self.worker_dead(now, worker, effects),
            Event::Inventory {
                worker,
                depot,
                reading,
                from,
                next,
                records,
            } => {
                let part = Part {
                    worker,
                    depot,
                    reading,
                    from,
                    next,
                    records,
                };
                self.inventory(now, part, effects);
            }
            Event::Struck { worker, epoch, id } => {
                // Numbers of resets begin anew with each leader.
                if epoch == self.settings.epoch {
                    self.struck(now, worker, id, effects);
                }
            }
            Event::Request {
                engine,
                id,
                deadline,
                request,
            } => {
                let due = Due {
                    engine,
                    id,
                    deadline: deadline.min(now + self.settings.deadline_max),
                };
                self.request(now, due, request, effects);
            }
            Event::Ended {
                worker,
                epoch,
                copies,
            } => {
                if epoch == self.settings.epoch {
                    self.copies_ended(worker, &copies, effects);
                }
            }
            Event::Tick => {}
        }
        self.fire_timers(now, effects);
        self.settle_tier(now, effects);
        self.go_on_with_resets(now, effects);
        self.stop_workers(effects);
    }

    /// When the next [`Event::Tick`] is due.
    pub fn next_timeout(&self) -> Option<Time> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Begins nothing new from now on: what is asked for the first time is refused. What is under way ends as ever.
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// This leader's epoch.
    pub fn epoch(&self) -> Epoch {
        self.settings.epoch
    }

    /// Ranks of an engine, and which of them hold the same KV.
    pub fn sharding(&self) -> Sharding {
        self.settings.sharding
    }

    /// What happened since the start.
    pub fn counts(&self) -> LeaderCounts {
        self.counts
    }

    /// Copies that have not ended.
    pub fn copies_under_way(&self) -> usize {
        self.ops.len()
    }

    /// Slots of all engines.
    pub fn slots(&self) -> usize {
        self.sessions
            .values()
            .map(|session| session.slots.len())
            .sum()
    }

    /// True when lookups are served, for one engine at least.
    pub fn is_ready(&self) -> bool {
        self.tier_key().is_some_and(|key| self.workers.serve(key))
    }

    /// Workers that have attached with the memory of an engine.
    pub fn attached_workers(&self) -> u32 {
        self.workers.with_memory()
    }

    /// True when this worker has attached with the memory of an engine.
    pub fn is_attached(&self, worker: WorkerId) -> bool {
        self.workers.has_memory(worker)
    }

    /// Requests that have not been answered.
    pub fn open_requests(&self) -> usize {
        let sessions = self.sessions.values();
        sessions.map(|session| session.answers.open()).sum()
    }

    /// Those of them that cancel stores.
    pub fn open_cancels(&self) -> usize {
        self.cancels.len()
    }

    /// Tokens of one page; 0 before a rank attached.
    pub fn engine_page_tokens(&self) -> u32 {
        self.tokens_per_page()
    }

    /// Every counter with its name: the names that status and reports use.
    pub fn counters(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let pool = self.all_pool_counts();
        let c = self.counts;
        [
            ("lookups", c.lookups),
            ("lookup_pages", c.lookup_pages),
            ("device_pages", c.device_pages),
            ("hit_pages", c.hit_pages),
            ("blocks_loaded", c.loaded),
            ("loaded_pages", c.loaded_pages),
            ("published_pages", c.published_pages),
            ("recovered_pages", c.recovered_pages),
            ("failed_copies", c.failed_copies),
            ("late_copies", c.late_copies),
            ("gathered_bytes", c.gathered_bytes),
            ("scattered_bytes", c.scattered_bytes),
            ("gather_us", c.gather_us),
            ("scatter_us", c.scatter_us),
            ("reset_slices", c.reset_slices),
            ("largest_reset_slice_pages", c.largest_reset_slice_pages),
            ("blocks_stored", pool.stored),
            ("blocks_grown", pool.grown),
            ("blocks_branched", pool.branched),
            ("blocks_split", pool.split),
            ("blocks_evicted", pool.evicted),
            ("evicted_pages", pool.evicted_pages),
            ("blocks_refused", pool.refused),
            ("refused_pages", pool.refused_pages),
            (
                "largest_eviction_pages",
                u64::from(pool.largest_eviction_pages),
            ),
        ]
        .into_iter()
    }

    /// Digest of all decisions about finished requests.
    pub fn decisions_digest(&self) -> String {
        self.digest.hex()
    }

    /// Recounts pools and holds by a second path. `Err` names the first contradiction.
    pub fn check(&self) -> Result<(), String> {
        let pins = match &self.tier {
            Some(tier) => {
                tier.pool().check()?;
                tier.pool().pins()
            }
            None => 0,
        };
        let slots = self
            .sessions
            .values()
            .flat_map(|session| session.slots.values());
        let held: usize = slots.map(|slot| slot.held.len()).sum();
        let leased: usize = self.ops.values().map(Op::pins).sum();
        if (held + leased) as u64 != pins {
            return Err(format!(
                "{held} held and {leased} leased, the pool counts {pins}"
            ));
        }
        if held > 0 && self.tier_key().is_none() {
            return Err(format!("{held} held, and no pool serves"));
        }
        Ok(())
    }

    /// Ends a slot: its holds are given back and its decisions are added up. Unknown slots are finished already.
    fn finish(&mut self, engine: EngineId, slot: SlotId) {
        let Some(session) = self.sessions.get_mut(&engine) else {
            return;
        };
        let Some(mut slot_state) = session.slots.remove(&slot) else {
            return;
        };
        session.hash_bytes -= slot_state.hashes.as_bytes().len();
        self.digest.add(&slot_state.digest);
        self.let_go(engine, slot, &mut slot_state);
    }

    /// Gives back what the last lookup of a slot holds.
    fn let_go(&mut self, engine: EngineId, id: SlotId, slot: &mut Slot) {
        self.timers
            .remove(&(slot.held_until, Timer::Hold(engine, id)));
        if let Some(tier) = &mut self.tier {
            for held in slot.held.drain(..) {
                tier.pool_mut().unpin(held.pin);
            }
        }
    }

    fn engine_opened(&mut self, engine: EngineId) {
        let session = self.sessions.entry(engine).or_default();
        session.gone = false;
        if let Some(at) = session.gone_at.take() {
            self.timers.remove(&(at, Timer::Engine(engine)));
        }
    }

    fn engine_closed(&mut self, now: Time, engine: EngineId) {
        self.unpark(engine);
        let Some(session) = self.sessions.get_mut(&engine) else {
            return;
        };
        let at = now + self.settings.engine_grace;
        if let Some(before) = session.gone_at.replace(at) {
            self.timers.remove(&(before, Timer::Engine(engine)));
        }
        self.timers.insert((at, Timer::Engine(engine)));
    }

    /// True while something of this engine is remembered.
    pub fn knows(&self, engine: EngineId) -> bool {
        self.sessions.contains_key(&engine)
    }

    /// Lets go of everything that an engine held. What is still being copied for it stays known until it has ended: asked
    /// again, it must not be refused while a worker reads or writes that engine's pages.
    fn forget_engine(&mut self, engine: EngineId) {
        let Some(session) = self.sessions.get(&engine) else {
            return;
        };
        let mut slots: Vec<SlotId> = session.slots.keys().copied().collect();
        slots.sort_unstable();
        if planted(Bug::KeepLease) {
            slots.clear();
        }
        for slot in slots {
            self.finish(engine, slot);
        }
        if let Some(session) = self.sessions.get_mut(&engine) {
            session.gone = true;
            if session.answers.open() == 0 || planted(Bug::ForgetTooSoon) {
                self.sessions.remove(&engine);
            }
        }
    }

    fn fire_timers(&mut self, now: Time, effects: &mut Vec<Effect>) {
        while let Some((at, timer)) = self.timers.first().copied().filter(|(at, _)| *at <= now) {
            self.timers.remove(&(at, timer));
            match timer {
                Timer::Hold(engine, slot) => self.hold_expired(engine, slot),
                Timer::Copy(op) => self.copy_due(now, op, effects),
                Timer::Store(key) => self.store_due(key, effects),
                Timer::Reset(id) => self.reset_late(id, effects),
                Timer::Resets => self.resets_due(now, effects),
                Timer::Cancel(id) => self.cancel_due(id, effects),
                Timer::Reading => self.reading_due(now, effects),
                Timer::Owed(worker) => self.reading_owed(now, worker),
                Timer::Silent => self.silent_due(now),
                Timer::Engine(engine) => self.forget_engine(engine),
            }
        }
    }

    fn hold_expired(&mut self, engine: EngineId, id: SlotId) {
        self.drop_holds(engine, id);
    }

    /// The slot stays, and holds nothing.
    fn drop_holds(&mut self, engine: EngineId, id: SlotId) {
        let slot = self
            .sessions
            .get_mut(&engine)
            .and_then(|session| session.slots.remove(&id));
        if let Some(mut slot) = slot {
            self.let_go(engine, id, &mut slot);
            if let Some(session) = self.sessions.get_mut(&engine) {
                session.slots.insert(id, slot);
            }
        }
    }

    /// The domain of a namespace, for pages of this geometry.
    fn domain(&self, geometry: &GroupGeometry, namespace: &[u8]) -> Domain {
        Domain::new(
            &self.settings.anchor_key,
            namespace,
            &geometry.layout_fingerprint,
            geometry.group,
        )
    }

    fn new_digest(&self) -> RequestDigest {
        RequestDigest::new(self.settings.record_decisions)
    }
}

/// Who is waiting for an answer, and until when.
#[derive(Debug, Clone, Copy)]
struct Due {
    engine: EngineId,
    id: RequestId,
    deadline: Time,
}

#[cfg(test)]
mod bounds_tests;
#[cfg(test)]
mod tests;
