//! The leader: decides where pages are stored, and answers the requests of engines.
//!
//! [`Leader::step`] is a plain function of its state, the time and an event. `step` touches no KV bytes, reads no
//! clock, draws no random numbers and does not block: it appends effects, and its caller carries them out. The live
//! leader and a replay in virtual time run the same code.

mod attach;
mod below;
mod by_shard;
mod cancel;
mod counters;
pub(crate) mod decision;
pub(crate) mod event;
mod flush;
mod gate;
mod held;
mod idle_tiers;
mod load;
mod log;
mod log_read;
mod lookup;
mod memory;
mod moves;
mod parts;
mod plan;
mod probe;
mod rates;
mod recovery;
pub(crate) mod refusal;
mod requests;
mod reset;
mod roster;
pub(crate) mod session;
mod store;
mod stretch;
mod tier;
mod timers;
mod transfers;

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use crate::Contradiction;
use crate::eviction::RuleLimits;
use crate::index::anchor::AnchorKey;
use crate::index::namespaces::Namespaces;
use crate::leader::decision::RunDigest;
use crate::leader::event::{LeaderEffect, LeaderEvent};
use crate::leader::session::{HASH_BYTES_LEFT_MAX, Session, Sessions, Slot};
use crate::pool::counts::PoolCounts;
use crate::pool::held::HeldCount;
use crate::pool::policy::TierPolicy;
use kvferry_types::{
    Edge, EngineId, Epoch, PerTier, Ratio, RequestId, Sharding, SlotId, TierId, Time, WorkerId,
};

pub use cancel::CANCELS_MAX;
use cancel::Cancels;
pub use counters::{COUNTERS, Counter, LeaderCounts, Refusals};
pub use flush::FLUSHES_OPEN_MAX;
use flush::Flushes;
pub use held::RuleUsage;
use idle_tiers::IdleTiers;
pub use load::LOAD_RUNS_MAX;
use load::Loads;
use log::ChangeLog;
pub use log::{LOG_IDLE, LOG_PAGES_MAX, LOG_RECORDS_MAX};
pub use log_read::{LOG_READ_PAGES_MAX, LogPart, LogRead};
use moves::Moves;
pub use moves::{MOVE_ATTEMPTS_MAX, MOVES_WAITING_MAX, MoveEdge};
use probe::HitTokens;
use rates::Rates;
use recovery::InventoryPart;
pub use requests::OPEN_REQUESTS_MAX;
use requests::Parked;
use reset::Resets;
pub use reset::{RESET_PAGES_OPEN_MAX, RESET_SLICE_PAGES, RESETS_OPEN_MAX};
pub use roster::REPLICAS_MAX;
use roster::Roster;
use store::Stores;
pub use tier::TierKey;
use tier::Tiers;
use timers::{Timer, Timers};
use transfers::Transfers;

/// Settings of a leader.
#[derive(Debug, Clone)]
pub struct LeaderSettings {
    /// Epoch of this leader, which grows with each start.
    pub epoch: Epoch,
    /// Number of ranks of one engine, and which of them hold the same KV.
    pub sharding: Sharding,
    /// Number of engines that share the depots. Default: 1.
    pub replicas: u16,
    /// Largest number of pages in a block.
    pub ratio: Ratio,
    /// How the pool of each tier places, evicts and admits pages. Default: see [`TierPolicy`]; a tier below host memory
    /// splits no run.
    pub tier_policies: PerTier<TierPolicy>,
    /// Secret key of the anchors, with the secrets of namespaces.
    pub anchor_key: AnchorKey,
    /// Rules about namespaces. Default: none.
    pub namespaces: Arc<Namespaces>,
    /// While several engines have memory, the lookups and loads of each hold at most half of the pages of host memory.
    /// Default: off.
    pub halves_held_pages: bool,
    /// Time for which a lookup holds the pages that it found. Default: 30 s.
    pub hold_for: Duration,
    /// Time after its deadline in which a copy must end before its worker is fenced. Default: 10 s.
    pub fence: Duration,
    /// Open stores of one engine, its other open requests, and its loads and stores that wait until the copies of an older
    /// leader have ended: at most this many of each, more are refused. Default: [`OPEN_REQUESTS_MAX`].
    pub open_requests_max: usize,
    /// Time for which the slots of an engine are kept after its connection broke. Default: 10 s.
    pub engine_grace: Duration,
    /// Longest time until the deadline of a request; a later deadline is cut to it. Bounds how long a store whose pages
    /// are never written, or a reset that is never confirmed, uses resources. Default: 120 s.
    pub deadline_max: Duration,
    /// Pages that one slice of a reset examines. Default: [`RESET_SLICE_PAGES`].
    pub reset_slice_pages: u32,
    /// The tiers below the device. Every worker must name a depot for each of them. Default: host memory.
    pub tiers: Vec<TierId>,
    /// Edges between tiers over which the leader moves pages by itself. Default: none.
    pub moves: Vec<MoveEdge>,
    /// Bytes of the depot of one shard in each tier of which the leader knows them: a worker that reports more pages than
    /// fit is refused. The leader keeps 29 bytes for each page, and 8 more with `page_index`. Default: unknown.
    pub depot_bytes: PerTier<u64>,
    /// Prompt tokens that an engine computes in a second: pages below host memory are offered only if they are loaded
    /// sooner than computed. Default: unknown, so that they are always offered.
    pub prefill_tokens_per_s: Option<NonZeroU64>,
    /// Accept depots without room for a block, for a baseline without host memory. Default: off.
    pub accepts_empty_depots: bool,
    /// The pools find pages inside blocks, for engines that name the tails of sequences alone. Default: off.
    pub page_index: bool,
    /// Keep the digest of decisions: a hash of every decision about each request. Default: off.
    pub record_decisions: bool,
}

impl LeaderSettings {
    /// The policy of a tier. Default: that of host memory, and for slower tiers one that splits no run, because their
    /// transfers are slow to begin.
    pub(super) fn policy(&self, tier: TierId) -> TierPolicy {
        match (self.tier_policies.get(tier), tier) {
            (Some(policy), _) => policy.clone(),
            (None, TierId::Host) => TierPolicy::default(),
            (None, _) => TierPolicy::evict_first(),
        }
    }

    /// The limits of rules about namespaces in a tier. Two of 256 rules have one id, and then the lower limit, once in
    /// 130,000 leaders.
    pub(super) fn rule_limits(&self, tier: TierId) -> RuleLimits {
        let mut limits = RuleLimits::new();
        for rule in self.namespaces.rules() {
            if let Some(pages) = rule.stored_pages.get(tier) {
                let limit = limits
                    .entry(self.anchor_key.rule(&rule.prefix))
                    .or_insert(*pages);
                *limit = (*limit).min(*pages);
            }
        }
        limits
    }

    /// Default settings for an epoch, a number of ranks that each hold KV of their own, a ratio and an anchor key.
    pub fn new(epoch: Epoch, ranks: u16, ratio: Ratio, anchor_key: AnchorKey) -> Self {
        Self {
            epoch,
            sharding: Sharding::each(ranks),
            replicas: 1,
            ratio,
            tier_policies: PerTier::default(),
            anchor_key,
            namespaces: Arc::default(),
            halves_held_pages: false,
            open_requests_max: OPEN_REQUESTS_MAX,
            hold_for: Duration::from_secs(30),
            fence: Duration::from_secs(10),
            engine_grace: Duration::from_secs(10),
            deadline_max: Duration::from_secs(120),
            reset_slice_pages: RESET_SLICE_PAGES,
            tiers: vec![TierId::Host],
            moves: Vec::new(),
            depot_bytes: PerTier::default(),
            prefill_tokens_per_s: None,
            accepts_empty_depots: false,
            page_index: false,
            record_decisions: false,
        }
    }
}

/// The leader's state machine: dispatches events to the parts that own its state, and combines their results. See the
/// module.
#[derive(Debug)]
pub struct Leader {
    settings: LeaderSettings,
    /// The workers, and the order in which they agree.
    roster: Roster,
    /// The tiers, with their pools.
    tiers: Tiers,
    /// The engines, their running requests, and the answers kept for them.
    sessions: Sessions,
    /// Pages that lookups and loads hold, for each rule about namespaces.
    held_of_rules: Vec<HeldCount>,
    /// Requests that are refused once no copy of an older leader can run.
    parked: Parked,
    /// Copies in flight.
    transfers: Transfers,
    /// Measured rates of the edges.
    rates: Rates,
    /// Moves between tiers.
    moves: Moves,
    /// Tiers that workers without an engine have open.
    idle_tiers: IdleTiers,
    /// Loads that wait for transfers.
    loads: Loads,
    /// Stores that wait for copies.
    stores: Stores,
    /// `cancel_stores` requests that wait for stores.
    cancels: Cancels,
    /// Resets that wait for stores and shards.
    resets: Resets,
    /// Flushes that wait for moves and shards.
    flushes: Flushes,
    /// The pages that the tiers gained and lost, for readers.
    log: ChangeLog,
    timers: Timers,
    /// Time of the step that is being handled.
    step_time: Time,
    /// New requests are refused.
    draining: bool,
    /// The last number that was given to a copy, a reservation or an inventory request.
    next_id: u64,
    counts: LeaderCounts,
    hits: HitTokens,
    digest: RunDigest,
}

impl Leader {
    /// Creates a leader without workers and engines.
    pub fn new(settings: LeaderSettings) -> Self {
        Self {
            roster: Roster::new(settings.replicas, settings.sharding, &settings.tiers),
            tiers: Tiers::new(settings.tiers.iter().copied()),
            digest: RunDigest::new(settings.record_decisions),
            held_of_rules: settings
                .namespaces
                .rules()
                .iter()
                .map(|_| HeldCount::default())
                .collect(),
            settings,
            sessions: Sessions::default(),
            parked: Parked::default(),
            transfers: Transfers::default(),
            rates: Rates::default(),
            moves: Moves::default(),
            idle_tiers: IdleTiers::default(),
            loads: Loads::default(),
            stores: Stores::default(),
            cancels: Cancels::default(),
            resets: Resets::default(),
            flushes: Flushes::default(),
            log: ChangeLog::default(),
            timers: Timers::default(),
            step_time: Time(0),
            draining: false,
            next_id: 0,
            counts: LeaderCounts::default(),
            hits: HitTokens::default(),
        }
    }

    /// Handles an event and appends the effects.
    pub fn step(&mut self, now: Time, event: LeaderEvent, effects: &mut Vec<LeaderEffect>) {
        self.step_time = now;
        self.end_idle_log(now);
        let fence = self.settings.fence;
        self.roster.expect_workers(now, fence, &mut self.timers);
        // Fire expired timers before the event, also when no tick was delivered in time: an event that is processed
        // late must not revive an operation whose deadline has passed.
        self.fire_timers(now, effects);
        let mut may_move = true;
        match event {
            LeaderEvent::EngineOpened(engine) => self.engine_opened(engine),
            LeaderEvent::EngineReplaced(engine) => self.engine_replaced(engine),
            LeaderEvent::EngineClosed(engine) => self.engine_closed(now, engine),
            LeaderEvent::Attach(attached) => self.attached(now, attached, effects),
            LeaderEvent::Memory(stated) => self.memory_stated(now, stated, effects),
            LeaderEvent::Tiers(stated) => self.tiers_stated(now, stated, effects),
            LeaderEvent::WorkerLost(worker) => self.worker_lost(now, worker, effects),
            LeaderEvent::WorkerDead(worker) => self.worker_dead(now, worker, effects),
            LeaderEvent::Inventory {
                worker,
                depot,
                read_id: reading,
                from,
                next,
                records,
            } => {
                let part = InventoryPart {
                    worker,
                    depot,
                    read_id: reading,
                    from,
                    next,
                    records,
                };
                self.inventory(now, part, effects);
            }
            LeaderEvent::Invalidated { worker, epoch, id } => {
                // The numbers of resets start again with each leader.
                if epoch == self.settings.epoch {
                    self.invalidated(now, worker, id, effects);
                }
            }
            LeaderEvent::TierFlushed { worker, epoch, id } => {
                // The numbers of flushes start again with each leader.
                if epoch == self.settings.epoch {
                    self.tier_flushed(worker, id, effects);
                }
            }
            LeaderEvent::Request {
                engine,
                id,
                deadline,
                request,
            } => {
                let reply_to = ReplyTo {
                    engine,
                    id,
                    deadline: deadline.min(now + self.settings.deadline_max),
                    arrived: now,
                };
                self.request(now, reply_to, request, effects);
            }
            LeaderEvent::Ended {
                worker,
                epoch,
                copies,
            } => {
                if epoch == self.settings.epoch {
                    self.copies_ended(worker, &copies, effects);
                }
            }
            LeaderEvent::Unsent { worker, copies } => {
                may_move = false;
                self.copies_ended(worker, &copies, effects);
            }
            LeaderEvent::Writable {
                worker,
                tier,
                writable,
            } => self.roster.set_writable(worker, tier, writable),
            LeaderEvent::Tick => {}
        }
        self.fire_timers(now, effects);
        // Before a closed pool is dropped with its changes.
        self.log_changes();
        self.reopen_tiers(now, effects);
        self.run_reset_slice(now, effects);
        if may_move {
            self.run_moves(now, effects);
        }
        self.run_flushes(effects);
        self.send_cancels(effects);
        self.log_changes();
    }

    /// When the next [`LeaderEvent::Tick`] is due.
    pub fn next_timeout(&self) -> Option<Time> {
        self.timers.next()
    }

    /// From now on refuses new lookups, loads and stores. Requests in flight end as usual.
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// Takes lookups, loads and stores again.
    pub fn resume(&mut self) {
        self.draining = false;
    }

    /// True while new lookups, loads and stores are refused.
    pub fn is_draining(&self) -> bool {
        self.draining
    }

    /// The epoch of this leader.
    pub fn epoch(&self) -> Epoch {
        self.settings.epoch
    }

    /// Number of ranks of an engine, and which of them hold the same KV.
    pub fn sharding(&self) -> Sharding {
        self.settings.sharding
    }

    /// Counters since the start.
    pub fn counts(&self) -> LeaderCounts {
        self.counts
    }

    /// Number of copies that have not ended on every rank.
    pub fn copies_under_way(&self) -> usize {
        self.transfers.len()
    }

    /// Number of moves of [`Self::copies_under_way`], and of blocks that wait for one.
    pub fn moves_under_way(&self) -> (usize, usize) {
        (self.moves.pins(), self.moves.waiting())
    }

    /// False while moves into a tier wait, because the disk of a shard takes no writes.
    pub fn is_writable(&self, tier: TierId) -> bool {
        self.roster.is_writable(tier)
    }

    /// Counters of all pools of a tier since the start.
    pub fn pool_counts(&self, tier: TierId) -> PoolCounts {
        self.tiers.counts(tier)
    }

    /// Number of slots of all engines.
    pub fn slots(&self) -> usize {
        self.sessions.slots()
    }

    /// True when lookups are served for at least one engine.
    pub fn is_ready(&self) -> bool {
        self.tiers
            .key(TierId::Host)
            .is_some_and(|key| self.roster.serve(key))
    }

    /// Number of workers that have attached with the memory of an engine.
    pub fn attached_workers(&self) -> u32 {
        self.roster.with_memory()
    }

    /// True when this worker has attached with the memory of an engine.
    pub fn is_attached(&self, worker: WorkerId) -> bool {
        self.roster.has_memory(worker)
    }

    /// False while an order of an older leader may be in flight on this worker: it has neither attached to this leader
    /// nor is known to be dead.
    pub fn is_clear(&self, worker: WorkerId) -> bool {
        self.roster.is_clear(worker)
    }

    /// Requests that have not been answered, except parked ones.
    pub fn open_requests(&self) -> usize {
        self.sessions.open_requests()
    }

    /// Stores of [`Self::open_requests`].
    pub fn open_stores(&self) -> usize {
        self.stores.len()
    }

    /// Loads of [`Self::open_requests`].
    pub fn open_loads(&self) -> usize {
        self.loads.len()
    }

    /// Loads and stores that wait until no copy of an older leader can run, and are then refused.
    pub fn parked_requests(&self) -> usize {
        self.parked.len()
    }

    /// Pages of the transfers in flight over an edge, those of all groups.
    pub fn pages_over(&self, edge: Edge) -> u64 {
        self.transfers.pages_over(edge)
    }

    /// Open requests that cancel stores.
    pub fn open_cancels(&self) -> usize {
        self.cancels.len()
    }

    /// Tokens of the unit in which hits are counted: the page of a model with one group. 0 before a rank has attached.
    pub fn engine_page_tokens(&self) -> u32 {
        let model = self.roster.model(self.tiers.wanted_key());
        model.map_or(0, |model| model.hash_tokens())
    }

    /// The value of every counter, in the order of [`COUNTERS`].
    pub fn counters(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let (leader, pools) = (self.counts, self.tiers.counts(TierId::Host));
        COUNTERS
            .iter()
            .map(move |counter| (counter.name, (counter.value)(&leader, &pools)))
    }

    /// Digest of all decisions about finished requests; `None` if the settings do not record them.
    pub fn decisions_digest(&self) -> Option<String> {
        self.digest.hex()
    }

    /// Recounts what each part counts, and the pins of the pool by their holders. `Err` names the first contradiction.
    pub fn check(&self) -> Result<(), Contradiction> {
        self.roster.check()?;
        self.sessions.check()?;
        self.transfers.check()?;
        self.stores.check()?;
        self.resets.check()?;
        self.flushes.check()?;
        self.tiers.check()?;
        let pins: u64 = self.tiers.pools().map(|(_, pool)| pool.pins()).sum();
        let (held, leased) = (self.sessions.pins(), self.loads.pins());
        let moved = self.moves.pins();
        if (held + leased + moved) as u64 != pins {
            return Err(format!(
                "{held} held, {leased} leased and {moved} moved, the pools count {pins}"
            )
            .into());
        }
        if held > 0 && self.tiers.key(TierId::Host).is_none() {
            return Err(format!("{held} held, and no pool serves").into());
        }
        self.check_held()?;
        self.loads.check()?;
        self.moves.check(&self.tiers)
    }

    /// Time in microseconds that a request has been in the leader.
    fn us_since_arrival(&self, reply_to: ReplyTo) -> u64 {
        let time = self.step_time - reply_to.arrived;
        u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
    }

    /// Ends a slot: releases its holds and adds its decisions to the digest. An unknown slot has already been finished.
    fn finish(&mut self, engine: EngineId, id: SlotId) {
        let session = self.sessions.get_mut(engine);
        if let Some(mut slot) = session.and_then(|session| session.take_slot(id)) {
            self.digest.add(slot.digest());
            self.touch_below(slot.sequence());
            release_holds(&mut slot, engine, id, &mut self.tiers, &mut self.timers);
        }
    }

    /// Releases the holds of a slot and keeps the slot.
    fn drop_holds(&mut self, engine: EngineId, id: SlotId) {
        let session = self.sessions.get_mut(engine);
        if let Some(slot) = session.and_then(|session| session.any_slot(id)) {
            release_holds(slot, engine, id, &mut self.tiers, &mut self.timers);
        }
    }

    fn engine_opened(&mut self, engine: EngineId) {
        if let Some(at) = self.sessions.open(engine).opened() {
            self.timers.clear(at, Timer::Engine(engine));
        }
    }

    fn engine_closed(&mut self, now: Time, engine: EngineId) {
        self.parked.drop_engine(engine);
        let Some(session) = self.sessions.get_mut(engine) else {
            return;
        };
        let at = now + self.settings.engine_grace;
        if let Some(before) = session.closed(at) {
            self.timers.clear(before, Timer::Engine(engine));
        }
        self.timers.set(at, Timer::Engine(engine));
        for (at, engine) in self.sessions.left_beyond(HASH_BYTES_LEFT_MAX) {
            self.timers.clear(at, Timer::Engine(engine));
            self.remove_engine(engine);
        }
    }

    /// Finishes all slots of an engine's earlier process, and refuses its request ids, so that no answer to an old request
    /// is taken for one to a new request with the same id.
    fn engine_replaced(&mut self, engine: EngineId) {
        self.parked.drop_engine(engine);
        self.finish_all(engine);
        if let Some(session) = self.sessions.get_mut(engine) {
            session.replaced();
        }
    }

    /// How long the requests of an engine wait for it after its connection broke.
    pub fn engine_grace(&self) -> Duration {
        self.settings.engine_grace
    }

    /// Number of running requests of an engine.
    pub fn slots_of(&self, engine: EngineId) -> usize {
        let session = self.sessions.get(engine);
        session.map_or(0, |session| session.slot_ids().len())
    }

    /// True while the leader keeps state of this engine.
    pub fn knows(&self, engine: EngineId) -> bool {
        self.sessions.get(engine).is_some()
    }

    /// Finishes all slots of an engine, and forgets it once its requests in progress are answered.
    pub(super) fn remove_engine(&mut self, engine: EngineId) {
        self.finish_all(engine);
        self.sessions.remove(engine);
    }

    fn finish_all(&mut self, engine: EngineId) {
        let slots = self.sessions.get(engine).map(Session::slot_ids);
        for slot in slots.unwrap_or_default() {
            self.finish(engine, slot);
        }
    }

    fn fire_timers(&mut self, now: Time, effects: &mut Vec<LeaderEffect>) {
        while let Some(timer) = self.timers.take_expired(now) {
            match timer {
                Timer::Hold(engine, slot) => {
                    self.counts.expired_holds += 1;
                    self.drop_holds(engine, slot);
                }
                Timer::Transfer(transfer) => self.transfer_due(now, transfer, effects),
                Timer::Store(key) => self.store_due(key, effects),
                Timer::Reset(id) => self.reset_late(id, effects),
                Timer::Flush(id) => self.flush_late(id, effects),
                Timer::Resets => self.resets_due(now, effects),
                Timer::Cancel(id) => self.cancel_due(id, effects),
                Timer::Reading(tier) => self.reading_due(now, tier, effects),
                Timer::UnansweredRead(tier, worker) => self.read_overdue(now, tier, worker),
                Timer::IdleTiers => self.idle_tiers_due(now, effects),
                Timer::AttachOverdue => {
                    let fence = self.settings.fence;
                    self.roster.check_overdue(now, fence, &mut self.timers);
                }
                Timer::Engine(engine) => {
                    self.counts.expired_engines += 1;
                    self.remove_engine(engine);
                }
                Timer::Load(key) => self.load_due(key, effects),
            }
        }
    }
}

/// Releases the pages that the last lookup of a slot holds.
fn release_holds(
    slot: &mut Slot,
    engine: EngineId,
    id: SlotId,
    tiers: &mut Tiers,
    timers: &mut Timers,
) {
    timers.clear(slot.held_until(), Timer::Hold(engine, id));
    for held in slot.take_held() {
        tiers.unpin(held.tier, held.pin);
    }
}

/// The engine and request that wait for an answer, the deadline of that answer, and when the request arrived.
#[derive(Debug, Clone, Copy)]
struct ReplyTo {
    engine: EngineId,
    id: RequestId,
    deadline: Time,
    arrived: Time,
}

#[cfg(test)]
mod bounds_tests;
#[cfg(test)]
mod tests;
