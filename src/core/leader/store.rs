//! Stores: which pages are missing in G2, where they are stored, and when they are ready.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::Contradiction;
use crate::group::GroupKind;
use crate::group::model::Sequence;
use crate::index::sequence_cursor::Trail;
use crate::leader::decision::Decision;
use crate::leader::event::{LeaderEffect, Workers};
use crate::leader::refusal::Refusal;
use crate::leader::session::HASH_BYTES_PER_ENGINE_MAX;
use crate::pool::admission::Offer;
use crate::pool::store_window::LooksAround;
use crate::pool::{BlockRun, ReservationKind, Reserved};
use kvferry_types::{Answer, DeviceEnd, Edge, StoreAnswer, Transfer};
use kvferry_types::{
    EngineId, FragmentPair, GroupId, PageCursor, PageHashes, PageList, Part, RequestId, Shard,
    SlotId, TierId, Time, TransferId,
};

use super::parts::check_parts;
use super::plan::{PlanWalk, Wait, plan};
use super::timers::{CancelId, StoreKey, Timer, Timers};
use super::transfers::Begun;
use super::{Leader, ReplyTo};

/// A store that waits for copies.
#[derive(Debug)]
struct OpenStore {
    reply_to: ReplyTo,
    slot: SlotId,
    /// The lookup that opened the slot.
    lookup: RequestId,
    sequence: Sequence,
    /// The pages to store.
    wanted: Vec<WantedPages>,
    /// Copies that have not ended.
    waits: BTreeMap<TransferId, StoreWait>,
    /// The engine cancelled the store: its copies were stopped.
    stopped: bool,
    /// `cancel_stores` requests that wait for its end.
    cancels: Vec<CancelId>,
    stored_pages: u32,
    present_pages: u32,
    refused_pages: u32,
    failed_pages: u32,
}

/// What an engine requests to store.
pub(super) struct Store<'a> {
    pub(super) parts: &'a [Part],
    /// Position of the first of these hashes, and hashes that the slot may not have yet.
    pub(super) more: Option<(u32, PageHashes)>,
    /// Number of the work that writes the pages; 0: the request's own.
    pub(super) after: RequestId,
}

/// Pages of one part of a store.
#[derive(Debug, Clone)]
struct WantedPages {
    group: GroupId,
    pages: Range<u32>,
    priority: u8,
}

/// What a store waits for in one copy.
#[derive(Debug, Clone, Copy)]
struct StoreWait {
    /// Pages of this store in the copy.
    pages: u32,
    /// True if this store ordered the copy. A store that names one page twice finds the second one in its own copy.
    own: bool,
}

impl OpenStore {
    fn wait_for(&mut self, wait: Wait) {
        let Wait {
            transfer,
            pages,
            own,
        } = wait;
        let known = self.waits.entry(transfer);
        let known = known.or_insert(StoreWait { pages: 0, own });
        known.pages += pages;
        known.own |= own;
    }

    fn hash_bytes(&self) -> usize {
        self.sequence.hash_bytes()
    }
}

/// What the parts of one store share.
struct StoreTerms {
    workers: Workers,
    offer: Offer,
    /// How far the store has looked around its own pages so far.
    around: LooksAround,
    /// The pages are read once this number is reported as written.
    after: RequestId,
}

/// Effect of stopping a store.
pub(super) enum Stopped {
    /// The store was stopped before, or is answered.
    Before,
    /// The store waits for no copy of its own.
    Ended,
    /// The store waits for these copies of its own, which are to be cancelled.
    Waits(Vec<TransferId>),
}

/// The stores that wait for copies.
#[derive(Debug, Default)]
pub(super) struct Stores {
    waiting: BTreeMap<StoreKey, OpenStore>,
    /// The stores that wait for each copy.
    waiters: BTreeMap<TransferId, Vec<StoreKey>>,
    last: StoreKey,
    /// Bytes of page hashes in the waiting stores of each engine, at most [`HASH_BYTES_PER_ENGINE_MAX`]. A store keeps
    /// its hashes when its slot is finished. Hashes that several stores share count for each.
    hash_bytes: BTreeMap<EngineId, usize>,
}

impl Stores {
    /// Number of stores that are not answered.
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Number of stores of one engine.
    pub(super) fn of(&self, engine: EngineId) -> usize {
        let stores = self.waiting.values();
        stores
            .filter(|store| store.reply_to.engine == engine)
            .count()
    }

    pub(super) fn contains(&self, key: StoreKey) -> bool {
        self.waiting.contains_key(&key)
    }

    /// The stores that an engine requested before the request `id`, of one of its slots or of all, in the order in
    /// which they arrived.
    pub(super) fn before(
        &self,
        engine: EngineId,
        id: RequestId,
        slot: Option<SlotId>,
    ) -> Vec<StoreKey> {
        let waiting = self.waiting.iter();
        let meant = waiting.filter(|(_, store)| {
            store.reply_to.engine == engine
                && store.reply_to.id < id
                && slot.is_none_or(|slot| slot == store.slot)
        });
        meant.map(|(key, _)| *key).collect()
    }

    /// Notes a `cancel_stores` request that waits for the end of a store.
    pub(super) fn add_cancel(&mut self, key: StoreKey, id: CancelId) {
        if let Some(store) = self.waiting.get_mut(&key) {
            store.cancels.push(id);
        }
    }

    /// Adds a store, and sets its timer if it waits for copies of other requests.
    fn wait(&mut self, pending: OpenStore, timers: &mut Timers) {
        self.last += 1;
        for transfer in pending.waits.keys() {
            let waiting = self.waiters.entry(*transfer).or_default();
            waiting.push(self.last);
        }
        if pending.waits.values().any(|wait| !wait.own) {
            timers.set(pending.reply_to.deadline, Timer::Store(self.last));
        }
        *self.hash_bytes.entry(pending.reply_to.engine).or_default() += pending.hash_bytes();
        self.waiting.insert(self.last, pending);
    }

    /// The stores that wait for a copy.
    fn waiting_for(&self, transfer: TransferId) -> Vec<StoreKey> {
        self.waiters.get(&transfer).cloned().unwrap_or_default()
    }

    /// A copy that a store waits for has ended. Returns the number of pages that became ready, if they are its own.
    fn copy_ended(&mut self, key: StoreKey, transfer: TransferId, published: bool) -> u32 {
        let Some(store) = self.waiting.get_mut(&key) else {
            return 0;
        };
        let Some(wait) = store.waits.remove(&transfer) else {
            return 0;
        };
        match (published, wait.own) {
            (true, true) => {
                store.stored_pages += wait.pages;
                return wait.pages;
            }
            (true, false) => store.present_pages += wait.pages,
            (false, _) => store.failed_pages += wait.pages,
        }
        0
    }

    /// A store waits no longer for copies of other requests: their pages count as failed.
    fn fail_foreign_waits(&mut self, key: StoreKey) {
        let Some(store) = self.waiting.get_mut(&key) else {
            return;
        };
        let foreign = store.waits.extract_if(.., |_, wait| !wait.own);
        let foreign: Vec<(TransferId, StoreWait)> = foreign.collect();
        for (transfer, wait) in foreign {
            store.failed_pages += wait.pages;
            forget_waiter(&mut self.waiters, transfer, key);
        }
    }

    /// A store waits no longer for this copy, if another request ordered it.
    fn fail_foreign_wait(&mut self, key: StoreKey, transfer: TransferId) {
        if let Some(store) = self.waiting.get_mut(&key)
            && store.waits.get(&transfer).is_some_and(|wait| !wait.own)
            && let Some(wait) = store.waits.remove(&transfer)
        {
            store.failed_pages += wait.pages;
            forget_waiter(&mut self.waiters, transfer, key);
        }
    }

    /// Stops a store: it no longer waits for copies of other requests.
    pub(super) fn stop(&mut self, key: StoreKey) -> Stopped {
        let Some(store) = self.waiting.get_mut(&key) else {
            return Stopped::Before;
        };
        if std::mem::replace(&mut store.stopped, true) {
            return Stopped::Before;
        }
        self.fail_foreign_waits(key);
        let waits = self.waiting.get(&key).into_iter();
        let own: Vec<TransferId> = waits
            .flat_map(|store| store.waits.keys().copied())
            .collect();
        match own.is_empty() {
            true => Stopped::Ended,
            false => Stopped::Waits(own),
        }
    }

    /// True when a store waits for no copy any longer.
    fn is_over(&self, key: StoreKey) -> bool {
        let store = self.waiting.get(&key);
        store.is_some_and(|store| store.waits.is_empty())
    }

    /// Removes a store with its timer.
    fn take(&mut self, key: StoreKey, timers: &mut Timers) -> Option<OpenStore> {
        let store = self.waiting.remove(&key)?;
        timers.clear(store.reply_to.deadline, Timer::Store(key));
        if let Some(bytes) = self.hash_bytes.get_mut(&store.reply_to.engine) {
            *bytes -= store.hash_bytes();
            if *bytes == 0 {
                self.hash_bytes.remove(&store.reply_to.engine);
            }
        }
        Some(store)
    }

    /// Refuses a store of an engine whose waiting stores leave no room for its hashes.
    fn check_hash_bytes(&self, engine: EngineId, hash_bytes: usize) -> Result<(), Refusal> {
        let before = self.hash_bytes.get(&engine).copied().unwrap_or(0);
        match before + hash_bytes <= HASH_BYTES_PER_ENGINE_MAX {
            true => Ok(()),
            false => Err(Refusal::Limit {
                limit: "bytes of page hashes in stores under way",
                max: HASH_BYTES_PER_ENGINE_MAX as u64,
            }),
        }
    }

    /// Checks that stores and copies name each other, and recounts the bytes of hashes. `Err` names the first
    /// contradiction.
    pub(super) fn check(&self) -> Result<(), Contradiction> {
        let mut hash_bytes: BTreeMap<EngineId, usize> = BTreeMap::new();
        for store in self.waiting.values() {
            *hash_bytes.entry(store.reply_to.engine).or_default() += store.hash_bytes();
        }
        if hash_bytes != self.hash_bytes {
            let counted = &self.hash_bytes;
            return Err(
                format!("{hash_bytes:?} bytes of hashes in stores, {counted:?} counted").into(),
            );
        }
        for (transfer, keys) in &self.waiters {
            for key in keys {
                let store = self.waiting.get(key);
                if !store.is_some_and(|store| store.waits.contains_key(transfer)) {
                    return Err(format!(
                        "store {key} is noted at copy {} and does not wait for it",
                        transfer.0
                    )
                    .into());
                }
            }
        }
        for (key, store) in &self.waiting {
            let noted = |transfer: &TransferId| {
                let keys = self.waiters.get(transfer);
                keys.is_some_and(|keys| keys.contains(key))
            };
            if let Some(transfer) = store.waits.keys().find(|transfer| !noted(transfer)) {
                return Err(format!(
                    "store {key} waits for copy {} and is not noted there",
                    transfer.0
                )
                .into());
            }
        }
        Ok(())
    }
}

/// A store is no longer noted as waiting for a copy.
fn forget_waiter(
    waiters: &mut BTreeMap<TransferId, Vec<StoreKey>>,
    transfer: TransferId,
    key: StoreKey,
) {
    if let Some(waiting) = waiters.get_mut(&transfer) {
        waiting.retain(|other| *other != key);
        if waiting.is_empty() {
            waiters.remove(&transfer);
        }
    }
}

impl Leader {
    /// Begins a store. Returns the answer when there is nothing to copy and nothing to wait for.
    pub(super) fn store(
        &mut self,
        now: Time,
        reply_to: ReplyTo,
        id: SlotId,
        Store { parts, more, after }: Store<'_>,
        effects: &mut Vec<LeaderEffect>,
    ) -> Result<Option<Answer>, Refusal> {
        if after >= reply_to.id {
            return Err(Refusal::Invalid {
                field: "after",
                value: after.0.to_string(),
                remedy: "name a number that the ranks were given before, below the store's own id, or leave it out",
            });
        }
        let (replica, model) = self.served(reply_to.engine)?;
        check_parts(model, parts)?;
        let layout = *model.layout_fingerprint();
        // All copies of a store are for the same workers, so that they share messages.
        let workers = self.roster.storing(replica, self.stores.last);
        let offer = Offer {
            now,
            page_bytes: model.page_bytes(),
        };
        self.check_current(reply_to, id)?;
        if self.tiers.serving(TierId::Host).is_none() {
            return Err(Refusal::Reading);
        }
        let session = self.sessions.open(reply_to.engine);
        let cancelled = session.is_cancelled(reply_to.id, id);
        let slot = session.extend_hashes(id, layout, more)?;
        let (lookup, sequence) = (slot.lookup(), slot.sequence().clone());
        let mut wanted = Vec::with_capacity(parts.len());
        for part in parts {
            let end = u64::from(part.first_page) + part.pages.pages();
            let (_, hashes) = sequence.of(part.group);
            let end = u32::try_from(end).ok();
            let end = end.filter(|end| *end as usize <= hashes.len());
            let end = end.ok_or_else(|| Refusal::Invalid {
                field: "parts.pages",
                value: format!(
                    "{} pages from first_page {} on, and the slot has the hashes of {}",
                    part.pages.pages(),
                    part.first_page,
                    hashes.len()
                ),
                remedy: "send the hashes of all pages that are stored, as more_hashes",
            })?;
            wanted.push(WantedPages {
                group: part.group,
                pages: part.first_page..end,
                priority: part.priority,
            });
        }

        if cancelled {
            let pages = wanted.iter().map(|part| part.pages.end - part.pages.start);
            let failed_pages: u32 = pages.sum();
            self.counts.stores_cancelled += 1;
            self.counts.failed_pages += u64::from(failed_pages);
            return Ok(Some(Answer::Store(StoreAnswer {
                stored_pages: 0,
                present_pages: 0,
                refused_pages: 0,
                failed_pages,
            })));
        }
        self.stores
            .check_hash_bytes(reply_to.engine, sequence.hash_bytes())?;
        let mut pending = OpenStore {
            reply_to,
            slot: id,
            lookup,
            sequence,
            wanted: Vec::new(),
            waits: BTreeMap::new(),
            stopped: false,
            cancels: Vec::new(),
            stored_pages: 0,
            present_pages: 0,
            refused_pages: 0,
            failed_pages: 0,
        };
        let mut terms = StoreTerms {
            workers,
            offer,
            around: LooksAround::default(),
            after: match after {
                RequestId(0) => reply_to.id,
                after => after,
            },
        };
        for (part, WantedPages { group, pages, .. }) in parts.iter().zip(&wanted) {
            let mut cursor = PageCursor::new(&part.pages);
            let whole = match pending.sequence.model().kind(*group) {
                // A state is of use by itself: of a block of several, eviction would take the latest state first.
                Some(GroupKind::State) => 1,
                _ => pages.end - pages.start,
            };
            let mut first = pages.start;
            while first < pages.end {
                let piece = (*group, first..first + whole);
                self.store_part(piece, &mut cursor, &mut terms, &mut pending, effects);
                first += whole;
            }
        }
        pending.wanted = wanted;
        if pending.waits.is_empty() {
            return Ok(Some(self.end_store(&pending)));
        }
        self.stores.wait(pending, &mut self.timers);
        Ok(None)
    }

    /// Orders the copies of the missing pages among `wanted`, which the next pages of `source` hold.
    fn store_part(
        &mut self,
        (group, wanted): (GroupId, Range<u32>),
        source: &mut PageCursor<'_>,
        StoreTerms {
            workers,
            offer,
            around,
            after,
        }: &mut StoreTerms,
        pending: &mut OpenStore,
        effects: &mut Vec<LeaderEffect>,
    ) {
        let (reply_to, epoch) = (pending.reply_to, self.settings.epoch);
        let shards = self.roster.shard_set();
        let session = self.sessions.get_mut(reply_to.engine);
        let slot = session.and_then(|session| session.any_slot(pending.slot));
        let (Some(pool), Some(slot)) = (self.tiers.serving_mut(TierId::Host), slot) else {
            return;
        };
        let sequence = &pending.sequence;
        let from = match sequence.model().kind(group) {
            Some(GroupKind::Prefix) => 0,
            _ => sequence
                .model()
                .first_of_cell(group, wanted.start, pool.ratio()),
        };
        let walk = PlanWalk {
            from,
            wanted: wanted.clone(),
            trail: slot.trail(group),
            offer: Some(*offer),
            around: *around,
        };
        let plan = plan(pool, sequence.of(group), walk, &mut self.next_id);
        self.counts.store_looks += u64::from(plan.looks);
        *around = plan.around;
        for run in &plan.evicted {
            slot.decide(group, Decision::Evicted(*run));
        }
        let mut at = wanted.start;
        for reserved in &plan.reserved {
            let Reserved {
                transfer,
                position,
                run,
                kind,
            } = *reserved;
            let grown = kind == ReservationKind::Growth;
            let stored = Decision::Stored {
                position,
                run,
                grown,
            };
            slot.decide(group, stored);
            source.skip(position - at);
            let src = source.take(run.count);
            at = position + run.count;
            let pair = FragmentPair {
                src,
                dst: PageList::run(run.start, run.count),
            };
            let device = DeviceEnd {
                engine: reply_to.engine,
                group,
                request: reply_to.id,
                after: *after,
            };
            let id = transfer;
            let transfer = Transfer {
                id,
                edge: Edge::STORE,
                device: Some(device),
                page_bytes: offer.page_bytes,
                pairs: vec![pair],
                record: pool.record(id, epoch),
                deadline: reply_to.deadline,
            };
            effects.push(LeaderEffect::Transfer {
                workers: workers.clone(),
                transfer,
            });
            pool.start_filling(id, shards);
            let begun = Begun {
                id,
                edge: Edge::STORE,
                workers: workers.clone(),
                pages: run.count,
                deadline: reply_to.deadline,
            };
            self.transfers.begin(begun, &mut self.timers);
        }
        source.skip(wanted.end - at);
        for refused in &plan.refused {
            let (position, count) = (refused.start, refused.end - refused.start);
            slot.decide(group, Decision::Refused { position, count });
        }
        pending.refused_pages += plan.refused_pages();
        pending.present_pages += plan.present_pages;
        plan.waits
            .into_iter()
            .for_each(|wait| pending.wait_for(wait));
    }

    /// Notes the end of one shard's copy into a reservation. The last end publishes or frees the pages and notifies the
    /// stores that wait for it. Returns true if it published them, and false if it freed them.
    pub(super) fn filled(
        &mut self,
        transfer: TransferId,
        (tier, shard): (TierId, Shard),
        complete: bool,
        effects: &mut Vec<LeaderEffect>,
    ) -> Option<bool> {
        let pool = self.tiers.pool_mut(tier)?;
        let published = pool.ended(transfer, shard, complete)?;
        self.counts.failed_copies += u64::from(!published);
        self.resets.store_ended(transfer);
        for key in self.stores.waiters.remove(&transfer).unwrap_or_default() {
            let ready = self.stores.copy_ended(key, transfer, published);
            self.counts.published_pages += u64::from(ready);
            self.answer_store(key, effects);
        }
        Some(published)
    }

    /// Answers a store that has no copies left to wait for.
    fn answer_store(&mut self, key: StoreKey, effects: &mut Vec<LeaderEffect>) {
        if self.stores.is_over(key) {
            self.store_ended(key, effects);
        }
    }

    /// The deadline of a store has passed: the store stops waiting for copies of other requests, because they read none
    /// of its pages. Its own copies have deadlines of their own.
    pub(super) fn store_due(&mut self, key: StoreKey, effects: &mut Vec<LeaderEffect>) {
        self.counts.expired_stores += 1;
        self.stores.fail_foreign_waits(key);
        self.answer_store(key, effects);
    }

    /// The pages of a late copy will not be published: stores that wait for it and do not own it count them as failed
    /// at once, instead of after the copy has ended on every rank.
    pub(super) fn never_published(
        &mut self,
        transfer: TransferId,
        effects: &mut Vec<LeaderEffect>,
    ) {
        for key in self.stores.waiting_for(transfer) {
            self.stores.fail_foreign_wait(key, transfer);
            self.answer_store(key, effects);
        }
    }

    /// Answers a store that has no copies in flight.
    pub(super) fn store_ended(&mut self, key: StoreKey, effects: &mut Vec<LeaderEffect>) {
        if let Some(store) = self.stores.take(key, &mut self.timers) {
            let answer = self.end_store(&store);
            self.answer(
                store.reply_to.engine,
                store.reply_to.id,
                Ok(answer),
                effects,
            );
            self.cancelled(&store.cancels, effects);
        }
    }

    /// Counts a store that is answered now.
    fn count_store(&mut self, store: &OpenStore) {
        let us = self.us_since_arrival(store.reply_to);
        let counts = &mut self.counts;
        match (store.failed_pages, store.stopped) {
            (0, _) => counts.stores_done += 1,
            (_, true) => counts.stores_cancelled += 1,
            (_, false) => counts.stores_failed += 1,
        }
        counts.store_us += us;
        counts.present_pages += u64::from(store.present_pages);
        counts.failed_pages += u64::from(store.failed_pages);
    }

    /// Makes the sequence of a store the newest, tail first, and returns the answer. Windows and states come before the
    /// prefix, without which they are of no use, so that they are evicted before it.
    fn end_store(&mut self, store: &OpenStore) -> Answer {
        self.count_store(store);
        if let Some(pool) = self.tiers.serving_mut(TierId::Host) {
            let model = store.sequence.model();
            let is_prefix = |group: GroupId| model.kind(group) == Some(GroupKind::Prefix);
            for part in store.wanted.iter().filter(|part| !is_prefix(part.group)) {
                let (domain, hashes) = store.sequence.of(part.group);
                let runs = pool.covering_any(domain, hashes, part.pages.clone());
                pool.set_priorities(&runs, &part.pages, part.priority);
                pool.touch(&runs);
            }
            let session = self.sessions.get_mut(store.reply_to.engine);
            let slot = session.and_then(|session| session.any_slot(store.slot));
            let mut slot = slot.filter(|slot| slot.lookup() == store.lookup);
            let mut around = LooksAround::default();
            for part in store.wanted.iter().filter(|part| is_prefix(part.group)) {
                let (group, wanted) = (part.group, &part.pages);
                let mut none = Trail::default();
                let trail = match &mut slot {
                    Some(slot) => slot.trail_mut(group),
                    None => &mut none,
                };
                let mut runs: Vec<BlockRun> = Vec::with_capacity(trail.len() + 1);
                let (domain, hashes) = store.sequence.of(group);
                let known = (trail, &mut around);
                let looks = pool.walk_around(domain, hashes, wanted, known, &mut runs);
                self.counts.store_looks += u64::from(looks);
                pool.set_priorities(&runs, wanted, part.priority);
                pool.touch(&runs);
            }
        }
        Answer::Store(StoreAnswer {
            stored_pages: store.stored_pages,
            present_pages: store.present_pages,
            refused_pages: store.refused_pages,
            failed_pages: store.failed_pages,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leader::tests::{ENGINE, hashes, lookup, request, serving, store};

    #[test]
    fn stores_that_contradict_their_copies_or_their_bytes_are_detected() {
        let mut leader = serving();
        assert!(request(&mut leader, 1, lookup(1, 2)).is_some());
        assert_eq!(request(&mut leader, 2, store(1, None)), None);
        let stores = &mut leader.stores;
        assert_eq!(stores.check(), Ok(()));
        type Change = fn(&mut Stores);
        let cases: [(&str, Change); 4] = [
            ("does not wait for it", |stores| {
                for store in stores.waiting.values_mut() {
                    store.waits.clear();
                }
            }),
            ("does not wait for it", |stores| stores.waiting.clear()),
            ("is not noted there", |stores| stores.waiters.clear()),
            ("bytes of hashes in stores", |stores| {
                *stores.hash_bytes.entry(ENGINE).or_default() += 1;
            }),
        ];
        assert_eq!(hashes(16, 2).as_bytes().len(), stores.hash_bytes[&ENGINE]);
        for (expected, change) in cases {
            let mut leader = serving();
            assert!(request(&mut leader, 1, lookup(1, 2)).is_some());
            assert_eq!(request(&mut leader, 2, store(1, None)), None);
            change(&mut leader.stores);
            if leader.stores.waiting.is_empty() {
                leader.stores.hash_bytes.clear();
            }
            let why = leader.stores.check().expect_err(expected);
            assert!(why.to_string().contains(expected), "{why:?}");
        }
    }
}
