//! Loads: copies into the engine's memory.
//!
//! The pages of a load lie in host memory, or in slower tiers, from which they are promoted first. A load is divided into
//! stretches, in the order of its pages: consecutive pages in host memory are one stretch, the pages of a block in a
//! slower tier another. Each stretch is copied as soon as its pages are in host memory. A load whose pages do not fit
//! into host memory together proceeds stretch by stretch.

use std::collections::{BTreeMap, BTreeSet};

use crate::Contradiction;
use crate::leader::decision::Decision;
use crate::leader::event::LeaderEffect;
use crate::leader::refusal::Refusal;
use crate::leader::session::PinnedRun;
use crate::pool::held::HeldPages;
use crate::pool::store_window::LooksAround;
use kvferry_types::{
    Answer, DeviceEnd, Edge, FragmentPair, GroupId, LoadAnswer, PageCursor, PageList, PageRun,
    Part, RequestId, SlotId, TierId, Transfer, TransferId,
};

use super::moves::{MoveSource, MoveTerms};
use super::parts::{check_destinations, check_parts, end_of};
use super::plan::{PlanWalk, plan};
use super::stretch::{Below, OpenLoad, Promotion, Stage, Stretch, StretchId, Waited};
use super::timers::{LoadKey, Timer};
use super::transfers::{Begun, TransferOutcome};
use super::{Leader, ReplyTo};

/// Runs of the arena that one load reads, at most: an order that names more of them could not be encoded, or not be
/// decoded. A load of more runs copies the first ones, and its answer gives the number of pages; one that is carried out
/// as a whole is refused.
pub const LOAD_RUNS_MAX: usize = 65_536;

/// The loads that wait for transfers.
#[derive(Debug, Default)]
pub(super) struct Loads {
    waiting: BTreeMap<LoadKey, OpenLoad>,
    /// The loads that wait for each transfer, with the stretch that does.
    waiters: BTreeMap<TransferId, Vec<(LoadKey, StretchId)>>,
    last: LoadKey,
}

impl Loads {
    /// Number of loads that are not answered.
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Number of pins that loads hold.
    pub(super) fn pins(&self) -> usize {
        let stretches = self.waiting.values().flat_map(OpenLoad::stretches);
        stretches.map(|stretch| stretch.lease.len()).sum()
    }

    /// Pages that loads hold, once for each owner.
    pub(super) fn held_pages(&self) -> u64 {
        let counted = self.waiting.values().flat_map(|load| &load.counted);
        counted.map(HeldPages::counted).sum()
    }

    /// Checks that every load waits for a transfer, and is noted there, and recounts what it counts. `Err` names the first
    /// contradiction.
    pub(super) fn check(&self) -> Result<(), Contradiction> {
        for (key, load) in &self.waiting {
            load.check()?;
            let waits = load.stretches().iter().all(|stretch| {
                let noted = |id: &TransferId| {
                    let waiters = self.waiters.get(id);
                    waiters.is_some_and(|waiters| waiters.contains(&(*key, stretch.id)))
                };
                match stretch.stage() {
                    Stage::Promoting(promotion) => promotion.waits.iter().all(noted),
                    Stage::Copying(id, _) => noted(id),
                    _ => true,
                }
            });
            if !load.is_moving() || !waits {
                return Err(format!("load {key} waits for no transfer").into());
            }
        }
        Ok(())
    }

    fn wait(&mut self, transfer: TransferId, waiter: (LoadKey, StretchId)) {
        self.waiters.entry(transfer).or_default().push(waiter);
    }
}

impl Leader {
    pub(super) fn load(
        &mut self,
        reply_to: ReplyTo,
        id: SlotId,
        parts: &[Part],
        after: RequestId,
        effects: &mut Vec<LeaderEffect>,
    ) -> Result<(), Refusal> {
        if after >= reply_to.id && after != RequestId(0) {
            return Err(Refusal::Invalid {
                field: "after",
                value: after.0.to_string(),
                remedy: "name the last number that the ranks were given, which is below the load's own id",
            });
        }
        let (replica, model) = self.served(reply_to.engine)?;
        check_parts(model, parts)?;
        check_destinations(parts)?;
        let layout = *model.layout_fingerprint();
        self.check_current(reply_to, id)?;
        if self.tiers.serving(TierId::Host).is_none() {
            return Err(Refusal::Reading);
        }
        let slot = self.sessions.open(reply_to.engine).slot(id, layout)?;
        let whole = parts.len() > 1 || !slot.sequence().model().is_plain();
        let places = slot.held_by_group();
        let mut runs_left = LOAD_RUNS_MAX;
        let mut sources = Vec::with_capacity(parts.len());
        for part in parts {
            let end = end_of(part);
            let places = places.get(&part.group).cloned().unwrap_or_default();
            let held = slot.covering(places, part.first_page, end);
            let mut held = held.ok_or(Refusal::NotPinned {
                slot: id,
                first_page: part.first_page,
                end,
            })?;
            if held.len() > runs_left && whole {
                return Err(Refusal::Invalid {
                    field: "parts",
                    value: format!("more than {LOAD_RUNS_MAX} runs of pages"),
                    remedy: "load fewer pages: look up again with a smaller limit_pages",
                });
            }
            // The engine computes the pages that are not loaded, as when a copy fails halfway.
            held.truncate(runs_left);
            runs_left -= held.len();
            sources.push(held);
        }

        let mut stretches: Vec<Stretch> = Vec::new();
        let mut ends: BTreeMap<GroupId, u32> = BTreeMap::new();
        // Pages that the load keeps from eviction, in host memory and below.
        let mut leased = [0; 2];
        for ((index, part), held) in parts.iter().enumerate().zip(sources) {
            let first = stretches.len();
            let mut position = part.first_page;
            for (held, run) in held {
                let PinnedRun {
                    tier,
                    offset,
                    arena_start,
                    block,
                    ..
                } = slot.held()[held];
                // A tier closes after its holds were released, so that each held run has a pool. A held block is
                // forgotten only when one of its pages fails its checksum.
                let pool = self.tiers.serving_mut(tier);
                let Some(pool) = pool.filter(|pool| !pool.is_forgotten(block)) else {
                    break;
                };
                slot.decide(part.group, Decision::Loaded { position, run });
                self.counts.loaded += 1;
                let through = offset + run.start + run.count - arena_start;
                leased[usize::from(tier != TierId::Host)] += through;
                let pin = pool.pin(block, through);
                let last = stretches[first..].last_mut();
                if tier != TierId::Host || !last.is_some_and(|last| last.extend(run)) {
                    let block = pin.block();
                    let stage = match tier {
                        TierId::Host => Stage::Present(vec![run]),
                        tier => Stage::Below(Below { tier, block, run }),
                    };
                    let id = StretchId {
                        part: index,
                        first: position,
                    };
                    stretches.push(Stretch::new(id, part.group, run.count, stage));
                }
                if let Some(last) = stretches.last_mut() {
                    last.lease.push((tier, pin));
                }
                position += run.count;
            }
            let mut cursor = PageCursor::new(&part.pages);
            for stretch in &mut stretches[first..] {
                stretch.destination = cursor.take(stretch.pages);
            }
            let missing = end_of(part) - position;
            if whole && missing > 0 {
                // Pages whose block was forgotten: the load is answered as not copied.
                let id = StretchId {
                    part: index,
                    first: position,
                };
                stretches.push(Stretch::new(id, part.group, missing, Stage::Ended(0)));
            }
            let end = ends.entry(part.group).or_default();
            *end = position.max(*end);
        }
        // The pins become a lease: holds on pages before the end of the last part of each group are released, because no
        // other load needs them. The places of the holds are used until here.
        for held in slot.take_held_before(&ends) {
            self.tiers.unpin(held.tier, held.pin);
        }

        let sequence = slot.sequence().clone();
        let mut load = OpenLoad::new((reply_to, replica), after, sequence, stretches, whole);
        load.counted = [(leased[0], true), (leased[1], false)]
            .map(|(pages, in_host_memory)| slot.owners().hold(pages, in_host_memory));
        load.wanted_pages = parts.iter().map(|part| part.pages.pages()).sum();
        self.loads.last += 1;
        self.advance_load(self.loads.last, load, effects);
        Ok(())
    }

    /// Begins the transfers of a load that can begin now, and answers it if none is in flight. Stretches that reach host
    /// memory later are begun by [`Self::begin_present`].
    fn advance_load(&mut self, key: LoadKey, mut load: OpenLoad, effects: &mut Vec<LeaderEffect>) {
        let first = load.first_below() == 0;
        let mut index = load.first_below();
        // The first stretch for whose promotion host memory has no room now. Pages that are there are copied all the same,
        // which makes room.
        let mut full: Option<usize> = None;
        while index < load.stretches().len() && (first || full.is_none()) {
            match load.stretch(index).stage() {
                Stage::Below(_) if self.is_useless(&load, index) => {
                    self.end_stretch(&mut load, index, 0)
                }
                Stage::Below(_) if full.is_some() => {}
                Stage::Below(below) => {
                    let below = *below;
                    if !self.promote(key, &mut load, index, below, effects) {
                        full = Some(index);
                    }
                    // The pages may have turned out to be in host memory.
                    self.begin_present(key, &mut load, index, effects);
                }
                Stage::Present(_) => self.begin_present(key, &mut load, index, effects),
                Stage::Promoting(_) | Stage::Copying(..) | Stage::Ended(_) => {}
            }
            index += 1;
        }
        load.passed_to(full.unwrap_or(index));
        if load.is_moving() {
            self.loads.waiting.insert(key, load);
            return;
        }
        self.timers.clear(load.reply_to.deadline, Timer::Load(key));
        for index in 0..load.stretches().len() {
            self.end_stretch(&mut load, index, 0);
        }
        self.counts.load_us += self.us_since_arrival(load.reply_to);
        let answer = match load.complete_pages() {
            0 => {
                self.counts.loads_failed += 1;
                match load.failed {
                    0 => Err(Refusal::NotLoaded),
                    failed if load.bad => Err(Refusal::BadPages(failed)),
                    failed => Err(Refusal::CopyFailed(failed)),
                }
            }
            pages => {
                // Not what the load names: the engine computes pages whose copies fail, or that are not begun.
                self.counts.loaded_pages += u64::from(pages);
                let whole = u64::from(pages) == load.wanted_pages;
                self.counts.loads_done += u64::from(whole);
                self.counts.loads_short += u64::from(!whole);
                Ok(Answer::Load(LoadAnswer { pages }))
            }
        };
        let ReplyTo { engine, id, .. } = load.reply_to;
        self.answer(engine, id, answer, effects);
    }

    /// True if a transfer of a stretch is of no use: its pages lie behind one that was not copied, or the deadline has
    /// passed, so that the transfer would only have to be cancelled.
    fn is_useless(&self, load: &OpenLoad, index: usize) -> bool {
        load.reply_to.deadline <= self.step_time || load.is_useless(index)
    }

    /// Begins the copy of a stretch that is in host memory.
    fn begin_present(
        &mut self,
        key: LoadKey,
        load: &mut OpenLoad,
        index: usize,
        effects: &mut Vec<LeaderEffect>,
    ) {
        if matches!(load.stretch(index).stage(), Stage::Present(_)) {
            match self.is_useless(load, index) {
                true => self.end_stretch(load, index, 0),
                false => self.copy_stretch(key, load, index, effects),
            }
        }
    }

    /// The deadline of a load has passed: the load stops waiting for transfers into host memory, which do not touch the
    /// engine's memory and may have later deadlines, because others ordered them. Its own copies are still awaited.
    pub(super) fn load_due(&mut self, key: LoadKey, effects: &mut Vec<LeaderEffect>) {
        let Some(mut load) = self.loads.waiting.remove(&key) else {
            return;
        };
        self.counts.expired_loads += 1;
        for index in 0..load.stretches().len() {
            if matches!(load.stretch(index).stage(), Stage::Promoting(_)) {
                self.end_stretch(&mut load, index, 0);
            }
        }
        self.advance_load(key, load, effects);
    }

    /// Orders the promotion of a stretch. Where host memory has room for its first pages only, the rest becomes a stretch
    /// of its own. Returns false if there is no room now, and transfers of this load will make some.
    fn promote(
        &mut self,
        key: LoadKey,
        load: &mut OpenLoad,
        index: usize,
        below: Below,
        effects: &mut Vec<LeaderEffect>,
    ) -> bool {
        let stretch = load.stretch(index);
        let (id, group, end) = (stretch.id, stretch.group, stretch.end());
        let first = id.first;
        let ratio = self.settings.ratio.pages();
        let edge = Edge {
            from: below.tier,
            to: TierId::Host,
        };
        let workers = self.roster.moving(edge);
        // A reset in progress does not know blocks that are created now: pages that it removes are not promoted.
        let source = self.tiers.serving(below.tier);
        let movable = source.is_some_and(|pool| pool.movable(below.block).is_some());
        let host = self.tiers.serving_mut(TierId::Host).filter(|_| movable);
        let (Some(host), Some(_)) = (host, workers) else {
            // An earlier promotion may have brought the first pages.
            self.find_promoted(load, index, None);
            return true;
        };
        let walk = PlanWalk {
            from: load.sequence.model().first_of_cell(group, first, ratio),
            wanted: first..end,
            trail: None,
            offer: None,
            around: LooksAround::default(),
        };
        let planned = plan(host, load.sequence.of(group), walk, &mut self.next_id);
        let refused = planned.refused_pages();
        let fits = end - first - refused;
        if fits == 0 {
            if load.is_moving() {
                return false;
            }
            self.end_stretch(load, index, 0);
            return true;
        }
        if refused > 0 {
            let rest = Below {
                run: PageRun {
                    start: below.run.start + fits,
                    count: below.run.count - fits,
                },
                ..below
            };
            let pool = self.tiers.serving_mut(below.tier);
            let end = below.run.start + below.run.count;
            if let Some(pin) = pool.and_then(|pool| pool.pin_through(below.block, end)) {
                load.divide(index, fits, rest, pin);
            }
        }
        let source = MoveSource {
            tier: below.tier,
            block: below.block,
            start: below.run.start,
            first,
        };
        let terms = MoveTerms {
            deadline: load.reply_to.deadline,
            queued: None,
        };
        self.order_moves(edge, &source, &planned.reserved, terms, effects);
        let foreign = planned.waits.iter().any(|wait| !wait.own);
        let waits: BTreeSet<TransferId> = planned.waits.iter().map(|wait| wait.transfer).collect();
        for transfer in &waits {
            self.loads.wait(*transfer, (key, id));
        }
        if waits.is_empty() {
            self.find_promoted(load, index, None);
        } else {
            let promotion = Promotion {
                waits,
                source: below,
                foreign,
            };
            load.set_stage(index, Stage::Promoting(promotion));
            let deadline = load.reply_to.deadline;
            self.timers.set(deadline, Timer::Load(key));
        }
        true
    }

    /// The transfers into host memory that a stretch waited for have ended: holds what is there now instead of the source.
    /// If pages are missing, and a transfer of `foreign` source that another load or a setting ordered may be the reason,
    /// the stretch is promoted again, for a deadline of its own.
    fn find_promoted(&mut self, load: &mut OpenLoad, index: usize, foreign: Option<Below>) {
        let stretch = load.stretch(index);
        let (group, first, end) = (stretch.group, stretch.id.first, stretch.end());
        let mut position = first;
        let (mut present, mut lease) = (Vec::new(), Vec::new());
        if let Some(host) = self.tiers.serving_mut(TierId::Host) {
            let (domain, hashes) = load.sequence.of(group);
            for run in host.covering(domain, hashes, first, end) {
                let until = (run.position + run.pages).min(end);
                let pin = host.pin(run.block, run.offset + until - run.position);
                lease.push((TierId::Host, pin));
                present.push(PageRun {
                    start: host.arena_page(&run, position),
                    count: until - position,
                });
                position = until;
            }
        }
        if let Some(source) = foreign.filter(|_| position < end) {
            // The source stays held, and so do the pages that have arrived.
            load.stretch_mut(index).lease.extend(lease);
            return load.set_stage(index, Stage::Below(source));
        }
        let before = std::mem::replace(&mut load.stretch_mut(index).lease, lease);
        before
            .into_iter()
            .for_each(|(tier, pin)| self.tiers.unpin(tier, pin));
        load.set_stage(index, Stage::Present(present));
    }

    /// Orders the copy of a stretch into the engine's memory.
    fn copy_stretch(
        &mut self,
        key: LoadKey,
        load: &mut OpenLoad,
        index: usize,
        effects: &mut Vec<LeaderEffect>,
    ) {
        let Some(runs) = load.take_present(index) else {
            return;
        };
        if runs.is_empty() {
            return self.end_stretch(load, index, 0);
        }
        let stretch = load.stretch(index);
        let (stretch_id, group) = (stretch.id, stretch.group);
        let mut cursor = PageCursor::new(&stretch.destination);
        let pairs: Vec<FragmentPair> = runs
            .iter()
            .map(|run| FragmentPair {
                src: PageList::run(run.start, run.count),
                dst: cursor.take(run.count),
            })
            .collect();
        let pages = runs.iter().map(|run| run.count).sum();
        let workers = self.roster.loading(load.replica);
        self.next_id += 1;
        let id = TransferId(self.next_id);
        let deadline = load.reply_to.deadline;
        let begun = Begun {
            id,
            edge: Edge::LOAD,
            workers: workers.clone(),
            pages,
            deadline,
        };
        self.transfers.begin(begun, &mut self.timers);
        self.loads.wait(id, (key, stretch_id));
        load.set_stage(index, Stage::Copying(id, runs));
        let device = DeviceEnd {
            engine: load.reply_to.engine,
            group,
            request: load.reply_to.id,
            after: load.after,
        };
        let transfer = Transfer {
            id,
            edge: Edge::LOAD,
            device: Some(device),
            page_bytes: load.sequence.model().page_bytes(),
            pairs,
            record: None,
            deadline,
        };
        effects.push(LeaderEffect::Transfer { workers, transfer });
    }

    /// Ends a stretch of which `pages` pages were copied, and releases its pins.
    fn end_stretch(&mut self, load: &mut OpenLoad, index: usize, pages: u32) {
        for (tier, pin) in load.end(index, pages) {
            self.tiers.unpin(tier, pin);
        }
    }

    /// A transfer that loads may wait for has ended on every worker: the loads proceed.
    pub(super) fn loads_go_on(
        &mut self,
        id: TransferId,
        outcome: TransferOutcome,
        effects: &mut Vec<LeaderEffect>,
    ) {
        let mut waiters = self.loads.waiters.remove(&id).unwrap_or_default();
        waiters.sort_unstable();
        for of_load in waiters.chunk_by(|(one, _), (other, _)| one == other) {
            let key = of_load[0].0;
            let Some(mut load) = self.loads.waiting.remove(&key) else {
                continue;
            };
            load.failed = load.failed.max(outcome.failed);
            load.bad |= outcome.bad_page.is_some();
            for (_, stretch) in of_load {
                let Some(index) = load.index_of(*stretch) else {
                    continue;
                };
                match load.waited_for(index, id) {
                    None => {}
                    Some(Waited::Copy) => {
                        self.counts.failed_copies += u64::from(outcome.failed > 0);
                        self.end_copy(&mut load, index, outcome);
                    }
                    Some(Waited::Promotion) => {
                        let foreign = match load.stretch(index).stage() {
                            Stage::Promoting(promotion) if promotion.foreign => {
                                Some(promotion.source)
                            }
                            _ => None,
                        };
                        self.find_promoted(&mut load, index, foreign);
                        self.begin_present(key, &mut load, index, effects);
                    }
                }
            }
            self.advance_load(key, load, effects);
        }
    }

    /// A copy from host memory has ended. If a page failed its checksum there, the block is cut at that page.
    fn end_copy(&mut self, load: &mut OpenLoad, index: usize, outcome: TransferOutcome) {
        let stretch = load.stretch(index);
        let bad = outcome.bad_page.and_then(|bad| stretch.source_of(bad));
        self.end_stretch(load, index, outcome.complete_pages);
        if let (Some((block, page)), Some(host)) = (bad, self.tiers.serving_mut(TierId::Host)) {
            host.cut(block, page);
            self.counts.bad_sources += 1;
        }
    }
}
