//! Stores: which pages are missing in G2, where they are stored, and when they are ready.

use std::sync::Arc;

use crate::anchor::Domain;
use crate::around::Looks;
use crate::decision::Decision;
use crate::event::Effect;
use crate::index::{Match, Want};
use crate::pool::{Kind, Pin, Pool, Reserved, Run};
use crate::refusal::Refusal;
use crate::slot::{HASH_BYTES_PER_ENGINE_MAX, Slot, slot_of};
use kvferry_types::{Answer, Copy, Direction};
use kvferry_types::{
    FragmentPair, Generation, HashesDiffer, OpId, PageCursor, PageHashes, PageList, PageRun, Rank,
    SlotId,
};

use super::cancel::CancelId;
use super::load::check_device_pages;
use super::ops::{Op, Work};
use super::tier::Tier;
use super::{Due, Leader, Timer};

/// Number of a store request that waits for copies: its own, and those of others that it found in flight.
pub(super) type StoreKey = u64;

#[derive(Debug)]
pub(super) struct PendingStore {
    pub(super) due: Due,
    pub(super) slot: SlotId,
    domain: Domain,
    hashes: Arc<PageHashes>,
    /// Positions of the pages to store.
    wanted: std::ops::Range<u32>,
    /// Copies that have not ended, each with the number of pages of this request in it, and whether they are its own.
    pub(super) waits: Vec<Wait>,
    /// The engine cancelled the store: its copies were stopped.
    pub(super) stopped: bool,
    /// `cancel_stores` requests that wait for its end.
    pub(super) cancels: Vec<CancelId>,
    stored_pages: u32,
    present_pages: u32,
    refused_pages: u32,
    pub(super) failed_pages: u32,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Wait {
    pub(super) generation: Generation,
    pub(super) pages: u32,
    pub(super) own: bool,
}

/// The plan of a store, built while its pages are looked up one after another.
#[derive(Debug, Default)]
struct Plan {
    reserved: Vec<Reserved>,
    evicted: Vec<PageRun>,
    waits: Vec<Wait>,
    present_pages: u32,
    refused_pages: u32,
    looks: u32,
}

impl Leader {
    /// Begins a store. Returns the answer when there is nothing to copy and nothing to wait for.
    pub(super) fn store(
        &mut self,
        due: Due,
        id: SlotId,
        first_page: u32,
        more: Option<(u32, PageHashes)>,
        source: &PageList,
        effects: &mut Vec<Effect>,
    ) -> Result<Option<Answer>, Refusal> {
        let (replica, geometry) = self.served(due.engine)?;
        check_device_pages(geometry, "source", source)?;
        let tokens_per_page = geometry.engine_page_tokens;
        let layout = geometry.layout_fingerprint;
        // All copies of a store are for the same ranks, so they fit into one message to each rank.
        let ranks = self.workers.storers(self.next_store);
        let epoch = self.settings.epoch;
        let ratio = self.settings.ratio.pages();
        let Some(pool) = self.tier.as_mut().and_then(Tier::serving_mut) else {
            return Err(Refusal::Reading);
        };
        let session = self.sessions.entry(due.engine).or_default();
        let slot = slot_of(&mut session.slots, id, layout)?;
        extend_hashes(slot, &mut session.hash_bytes, more)?;
        let end = u64::from(first_page) + source.pages();
        let end = u32::try_from(end)
            .ok()
            .filter(|end| *end as usize <= slot.hashes.len());
        let end = end.ok_or_else(|| Refusal::Invalid {
            field: "source",
            value: format!("{} pages from page {first_page} on", source.pages()),
            remedy: "send the hashes of all pages that are stored",
        })?;

        let plan = plan(pool, slot, first_page..end, ratio, &mut self.next_id);
        self.counts.store_looks += u64::from(plan.looks);
        for run in &plan.evicted {
            slot.digest.add(tokens_per_page, Decision::Evicted(*run));
        }
        let mut cursor = PageCursor::new(source);
        let mut at = first_page;
        for reserved in &plan.reserved {
            let Reserved {
                generation,
                position,
                run,
                kind,
            } = *reserved;
            let grown = kind == Kind::Growth;
            slot.digest.add(
                tokens_per_page,
                Decision::Stored {
                    position,
                    run,
                    grown,
                },
            );
            cursor.skip(position - at);
            let src = cursor.take(run.count);
            at = position + run.count;
            let pair = FragmentPair {
                src,
                dst: PageList::run(run.start, run.count),
            };
            let copy = Copy {
                op: OpId(generation.0),
                engine: due.engine,
                direction: Direction::Store,
                pairs: vec![pair],
                request: due.id,
                after: due.id,
                record: pool.record(generation, epoch),
                deadline: due.deadline,
            };
            effects.push(Effect::Copy {
                replica,
                ranks,
                copy,
            });
            pool.start_filling(generation, ranks);
        }
        if plan.refused_pages > 0 {
            let (position, count) = (end - plan.refused_pages, plan.refused_pages);
            slot.digest
                .add(tokens_per_page, Decision::Refused { position, count });
        }
        let pending = PendingStore {
            due,
            slot: id,
            domain: slot.domain.clone(),
            hashes: Arc::clone(&slot.hashes),
            wanted: first_page..end,
            waits: plan.waits,
            stopped: false,
            cancels: Vec::new(),
            stored_pages: 0,
            present_pages: plan.present_pages,
            refused_pages: plan.refused_pages,
            failed_pages: 0,
        };
        for reserved in &plan.reserved {
            let work = Work::Store { missing: ranks };
            let op = Op::new(replica, work, due.deadline);
            self.begin_op(OpId(reserved.generation.0), op);
        }
        Ok(self.wait_or_end(pending))
    }

    /// Notes the end of one rank's copy into a reservation. The last end publishes or frees the pages and notifies the
    /// stores that wait for it.
    pub(super) fn filled(
        &mut self,
        generation: Generation,
        rank: Rank,
        whole: bool,
        effects: &mut Vec<Effect>,
    ) {
        let Some(tier) = &mut self.tier else { return };
        let Some(published) = tier.pool_mut().ended(generation, rank, whole) else {
            return;
        };
        self.counts.failed_copies += u64::from(!published);
        self.store_over(generation);
        for key in self.waiters.remove(&generation).unwrap_or_default() {
            let Some(store) = self.stores.get_mut(&key) else {
                continue;
            };
            let Some(index) = store
                .waits
                .iter()
                .position(|wait| wait.generation == generation)
            else {
                continue;
            };
            let wait = store.waits.swap_remove(index);
            match (published, wait.own) {
                (true, true) => {
                    store.stored_pages += wait.pages;
                    self.counts.published_pages += u64::from(wait.pages);
                }
                (true, false) => store.present_pages += wait.pages,
                (false, _) => store.failed_pages += wait.pages,
            }
            self.answer_store(key, effects);
        }
    }

    /// Answers a store that has no copies left to wait for.
    fn answer_store(&mut self, key: StoreKey, effects: &mut Vec<Effect>) {
        let store = self.stores.get(&key);
        if store.is_some_and(|store| store.waits.is_empty()) {
            self.store_ended(key, effects);
        }
    }

    /// The deadline of a store has passed: the store stops waiting for copies of other requests, because they read none
    /// of its pages. Its own copies have deadlines of their own.
    pub(super) fn store_due(&mut self, key: StoreKey, effects: &mut Vec<Effect>) {
        self.give_up_waits(key, |wait| !wait.own, effects);
    }

    /// The pages of a late copy will not be published: stores that wait for it and do not own it count them as failed
    /// at once, instead of after the copy has ended on every rank.
    pub(super) fn never_published(&mut self, generation: Generation, effects: &mut Vec<Effect>) {
        let waiting = self.waiters.get(&generation).cloned();
        for key in waiting.unwrap_or_default() {
            let foreign = |wait: &Wait| !wait.own && wait.generation == generation;
            self.give_up_waits(key, foreign, effects);
        }
    }

    /// Counts the pages of some waits as failed, and answers the store if no other wait is left.
    fn give_up_waits(
        &mut self,
        key: StoreKey,
        which: impl Fn(&Wait) -> bool,
        effects: &mut Vec<Effect>,
    ) {
        let Some(store) = self.stores.get_mut(&key) else {
            return;
        };
        let (given_up, waits) = store.waits.drain(..).partition(which);
        store.waits = waits;
        let given_up: Vec<Wait> = given_up;
        for wait in given_up {
            store.failed_pages += wait.pages;
            if let Some(waiting) = self.waiters.get_mut(&wait.generation) {
                waiting.retain(|waits| *waits != key);
                if waiting.is_empty() {
                    self.waiters.remove(&wait.generation);
                }
            }
        }
        self.answer_store(key, effects);
    }

    /// Answers a store that has no copies in flight.
    pub(super) fn store_ended(&mut self, key: StoreKey, effects: &mut Vec<Effect>) {
        if let Some(store) = self.stores.remove(&key) {
            self.timers.remove(&(store.due.deadline, Timer::Store(key)));
            let answer = self.end_store(&store);
            self.answer(store.due.engine, store.due.id, Ok(answer), effects);
            self.cancelled(&store.cancels, effects);
        }
    }

    fn wait_or_end(&mut self, pending: PendingStore) -> Option<Answer> {
        if pending.waits.is_empty() {
            return Some(self.end_store(&pending));
        }
        self.next_store += 1;
        for wait in &pending.waits {
            let waiting = self.waiters.entry(wait.generation).or_default();
            waiting.push(self.next_store);
        }
        if pending.waits.iter().any(|wait| !wait.own) {
            let due = (pending.due.deadline, Timer::Store(self.next_store));
            self.timers.insert(due);
        }
        self.stores.insert(self.next_store, pending);
        None
    }

    /// Makes the sequence of a store the newest, tail first, and returns the answer.
    fn end_store(&mut self, store: &PendingStore) -> Answer {
        if let Some(pool) = self.tier.as_mut().and_then(Tier::serving_mut) {
            let mut runs: Vec<Run> = Vec::new();
            let looks = pool.walk_around(&store.domain, &store.hashes, &store.wanted, &mut runs);
            self.counts.store_looks += u64::from(looks);
            pool.touch(&runs);
        }
        Answer::Store {
            stored_pages: store.stored_pages,
            present_pages: store.present_pages,
            refused_pages: store.refused_pages,
            failed_pages: store.failed_pages,
        }
    }
}

/// Appends hashes that the slot does not have yet; overlapping hashes must be equal.
fn extend_hashes(
    slot: &mut Slot,
    hash_bytes: &mut usize,
    more: Option<(u32, PageHashes)>,
) -> Result<(), Refusal> {
    let Some((from, more)) = more else {
        return Ok(());
    };
    let before = slot.hashes.as_bytes().len();
    let after = match from as usize <= slot.hashes.len() {
        true => before.max(from as usize * more.width() + more.as_bytes().len()),
        false => before,
    };
    if *hash_bytes + (after - before) > HASH_BYTES_PER_ENGINE_MAX {
        let max = HASH_BYTES_PER_ENGINE_MAX as u64;
        return Err(Refusal::Limit {
            limit: "bytes of page hashes",
            max,
        });
    }
    let invalid = |field, value, remedy| {
        Err(Refusal::Invalid {
            field,
            value,
            remedy,
        })
    };
    match Arc::make_mut(&mut slot.hashes).extend_from(from as usize, &more) {
        Ok(()) => {
            *hash_bytes += slot.hashes.as_bytes().len() - before;
            Ok(())
        }
        Err(HashesDiffer::Width) => invalid(
            "hash_bytes",
            more.width().to_string(),
            "use one width for all hashes of a slot",
        ),
        Err(HashesDiffer::Gap { known }) => invalid(
            "more_from",
            format!("{from}, and the slot knows {known} hashes"),
            "leave none out",
        ),
        Err(HashesDiffer::Content) => invalid(
            "more_hashes",
            format!("other hashes than the slot knows, from page {from} on"),
            "hashes of a slot do not change: look up again",
        ),
    }
}

/// Walks the sequence from its first page on, looking up a bounded number of positions before `wanted`. Pages that are
/// ready or filling are left alone, missing pages in `wanted` are reserved. The walk pins the ready pages that it
/// passes until it ends, so that making room for the tail does not evict the root.
fn plan(
    pool: &mut Pool,
    slot: &Slot,
    wanted: std::ops::Range<u32>,
    ratio: u32,
    next_id: &mut u64,
) -> Plan {
    let mut plan = Plan::default();
    let mut held: Vec<Pin> = Vec::new();
    let mut tail: Option<Match> = None;
    let mut looks = Looks::new(&wanted, ratio);
    let mut position = 0;
    while position < wanted.end {
        if let Some(at) = looks.next(position).filter(|at| *at > position) {
            position = at;
            tail = None;
        }
        let found = pool.longest(&slot.domain, &slot.hashes, position as usize, Want::Present);
        looks.note(position, found.is_some());
        if let Some(found) = found {
            if found.ready > 0 {
                held.push(pool.pin(found.block, found.ready));
            }
            plan.count_present(pool, found, position, &wanted);
            position += found.pages;
            tail = Some(found);
        } else if position < wanted.start {
            position += 1;
            tail = None;
        } else {
            let end = missing_until(pool, slot, position, wanted.end, ratio);
            let before = plan.reserved.len();
            let room = pool.reserve(
                &slot.domain,
                &slot.hashes,
                position,
                end,
                tail,
                next_id,
                &mut plan.reserved,
                &mut plan.evicted,
            );
            for reserved in &plan.reserved[before..] {
                let (generation, pages) = (reserved.generation, reserved.run.count);
                plan.waits.push(Wait {
                    generation,
                    pages,
                    own: true,
                });
            }
            position += room;
            if position < end {
                plan.refused_pages = wanted.end - position;
                break;
            }
            tail = None;
        }
    }
    for pin in held {
        pool.unpin(pin);
    }
    plan.looks = looks.all;
    plan
}

/// End of the pages from `position` on that one block could take: the next multiple of the ratio, `end`, or the first
/// page that is present again.
fn missing_until(pool: &Pool, slot: &Slot, position: u32, end: u32, ratio: u32) -> u32 {
    let limit = end.min((position / ratio + 1) * ratio);
    let there = |page: &u32| {
        pool.longest(&slot.domain, &slot.hashes, *page as usize, Want::Present)
            .is_some()
    };
    (position + 1..limit).find(there).unwrap_or(limit)
}

impl Plan {
    /// Counts the wanted pages of a run that is present; pages that are not ready yet are waited for.
    fn count_present(
        &mut self,
        pool: &Pool,
        found: Match,
        position: u32,
        wanted: &std::ops::Range<u32>,
    ) {
        let overlap =
            |from: u32, to: u32| to.min(wanted.end).saturating_sub(from.max(wanted.start));
        let ready_end = position + found.ready;
        self.present_pages += overlap(position, ready_end);
        let pages = overlap(ready_end, position + found.pages);
        if pages > 0
            && let Some(filling) = pool.filling_of(found.block)
        {
            let generation = filling.generation;
            self.waits.push(Wait {
                generation,
                pages,
                own: false,
            });
        }
    }
}
