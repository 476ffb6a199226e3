//! Loads: copies into the engine's memory.
//!
//! The pages of a load lie in host memory, or in slower tiers, from which they are promoted first. A load is divided into
//! stretches, in the order of its pages: consecutive pages in host memory are one stretch, the pages of a block in a
//! slower tier another. Each stretch is copied as soon as its pages are in host memory. A load whose pages do not fit
//! into host memory together proceeds stretch by stretch.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::Contradiction;
use crate::around::LooksAround;
use crate::blocks::BlockRef;
use crate::decision::Decision;
use crate::event::LeaderEffect;
use crate::model::{Model, Sequence};
use crate::pool::Pin;
use crate::refusal::Refusal;
use crate::session::PinnedRun;
use kvferry_types::{
    Answer, DeviceEnd, Edge, EngineId, GroupId, LoadAnswer, PageRun, Part, Replica, Transfer,
};
use kvferry_types::{FragmentPair, PageCursor, PageList, RequestId, SlotId, TierId, TransferId};

use super::moves::{MoveSource, MoveTerms};
use super::plan::{PlanWalk, plan};
use super::timers::{LoadKey, Timer};
use super::transfers::{Begun, TransferOutcome};
use super::{Leader, ReplyTo};

/// Runs of the arena that one load reads, at most. A load of more runs copies the first ones, and its answer gives the
/// number of pages: an order that names all of them could not be encoded, or not be decoded.
pub const LOAD_RUNS_MAX: usize = 65_536;

/// Consecutive pages of one group of a load.
#[derive(Debug)]
struct Stretch {
    group: GroupId,
    /// Position of the first page.
    first: u32,
    pages: u32,
    destination: PageList,
    stage: StretchStage,
    /// Pins on the pages, released when the stretch has ended: one for each run.
    lease: Vec<(TierId, Pin)>,
}

/// The progress of a stretch.
#[derive(Debug)]
enum StretchStage {
    /// The pages lie in a slower tier.
    Below(Below),
    /// These transfers into host memory have not ended.
    Promoting(BTreeSet<TransferId>),
    /// The pages, or the first ones of them, lie in these runs of host memory.
    Present(Vec<PageRun>),
    /// The transfer of these runs into the engine's memory has not ended.
    Copying(TransferId, Vec<PageRun>),
    /// This many pages, from the first one on, were copied.
    Ended(u32),
}

/// A step of a stretch whose last transfer has ended.
enum Waited {
    Promotions,
    Copy,
}

/// Pages of a block in a slower tier.
#[derive(Debug, Clone, Copy)]
struct Below {
    tier: TierId,
    block: BlockRef,
    run: PageRun,
}

impl Stretch {
    fn end(&self) -> u32 {
        self.first + self.pages
    }

    fn is_moving(&self) -> bool {
        matches!(
            self.stage,
            StretchStage::Promoting(_) | StretchStage::Copying(..)
        )
    }

    /// Notes the end of a transfer. Returns for which step it was the last one.
    fn waited_for(&mut self, id: TransferId) -> Option<Waited> {
        match &mut self.stage {
            StretchStage::Copying(copy, _) if *copy == id => Some(Waited::Copy),
            StretchStage::Promoting(waits) => {
                (waits.remove(&id) && waits.is_empty()).then_some(Waited::Promotions)
            }
            _ => None,
        }
    }

    /// True if not all of the pages were copied.
    fn is_short(&self) -> bool {
        matches!(self.stage, StretchStage::Ended(pages) if pages < self.pages)
    }

    /// The block and the arena page of page `index` of the stretch, while the stretch is copied.
    fn source_of(&self, mut index: u32) -> Option<(BlockRef, u32)> {
        let StretchStage::Copying(_, runs) = &self.stage else {
            return None;
        };
        for (run, (_, pin)) in runs.iter().zip(&self.lease) {
            if index < run.count {
                return Some((pin.block(), run.start + index));
            }
            index -= run.count;
        }
        None
    }

    /// Cuts the stretch to its first `pages` pages. Returns the rest.
    fn split(&mut self, pages: u32) -> Self {
        let whole = std::mem::take(&mut self.destination);
        let mut cursor = PageCursor::new(&whole);
        self.destination = cursor.take(pages);
        let rest = Self {
            group: self.group,
            first: self.first + pages,
            pages: self.pages - pages,
            destination: cursor.take(self.pages - pages),
            stage: StretchStage::Ended(0),
            lease: Vec::new(),
        };
        self.pages = pages;
        rest
    }
}

/// A load that waits for transfers.
#[derive(Debug)]
struct PendingLoad {
    reply_to: ReplyTo,
    replica: Replica,
    after: RequestId,
    sequence: Sequence,
    stretches: Vec<Stretch>,
    /// The load is carried out as a whole: a hit of several groups is of no use without one of its pages.
    whole: bool,
    /// Workers on which a transfer of the load failed.
    failed: u32,
}

impl PendingLoad {
    /// True if a stretch before this one was not copied completely, or any stretch of a load that is carried out as a
    /// whole.
    fn is_useless(&self, index: usize) -> bool {
        let end = match self.whole {
            true => self.stretches.len(),
            false => index,
        };
        self.stretches[..end].iter().any(Stretch::is_short)
    }

    /// Pages, from the first one on, that were copied completely; 0 for a load that is carried out as a whole and was not.
    fn complete_pages(&self) -> u32 {
        if self.whole && self.is_useless(0) {
            return 0;
        }
        let mut complete = 0;
        for stretch in &self.stretches {
            if let StretchStage::Ended(pages) = stretch.stage {
                complete += pages;
            }
            if stretch.is_short() {
                break;
            }
        }
        complete
    }

    fn is_moving(&self) -> bool {
        self.stretches.iter().any(Stretch::is_moving)
    }

    fn is_promoting(&self) -> bool {
        let mut stretches = self.stretches.iter();
        stretches.any(|stretch| matches!(stretch.stage, StretchStage::Promoting(_)))
    }
}

/// The loads that wait for transfers.
#[derive(Debug, Default)]
pub(super) struct Loads {
    waiting: BTreeMap<LoadKey, PendingLoad>,
    /// The loads that wait for each transfer.
    waiters: BTreeMap<TransferId, Vec<LoadKey>>,
    last: LoadKey,
}

impl Loads {
    /// Number of pins that loads hold.
    pub(super) fn pins(&self) -> usize {
        let stretches = self.waiting.values().flat_map(|load| &load.stretches);
        stretches.map(|stretch| stretch.lease.len()).sum()
    }

    /// Checks that every load waits for a transfer, and is noted there. `Err` names the first contradiction.
    pub(super) fn check(&self) -> Result<(), Contradiction> {
        for (key, load) in &self.waiting {
            let noted = |id: &TransferId| {
                let keys = self.waiters.get(id);
                keys.is_some_and(|keys| keys.contains(key))
            };
            let waits = load.stretches.iter().all(|stretch| match &stretch.stage {
                StretchStage::Promoting(ids) => ids.iter().all(noted),
                StretchStage::Copying(id, _) => noted(id),
                _ => true,
            });
            if !load.is_moving() || !waits {
                return Err(format!("load {key} waits for no transfer").into());
            }
        }
        Ok(())
    }

    fn wait(&mut self, transfer: TransferId, key: LoadKey) {
        self.waiters.entry(transfer).or_default().push(key);
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
        let layout = *model.layout_fingerprint();
        self.check_current(reply_to, id)?;
        if self.tiers.serving(TierId::Host).is_none() {
            return Err(Refusal::Reading);
        }
        let slot = self.sessions.open(reply_to.engine).slot(id, layout)?;
        let whole = parts.len() > 1 || !slot.sequence().model().is_plain();
        let mut runs_left = LOAD_RUNS_MAX;
        let mut sources = Vec::with_capacity(parts.len());
        for part in parts {
            let end = end_of(part);
            let held = slot.covering(part.group, part.first_page, end);
            let mut held = held.ok_or(Refusal::NotPinned {
                slot: id,
                first_page: part.first_page,
                end,
            })?;
            // The engine computes the pages that are not loaded, as when a copy fails halfway.
            if held.len() > runs_left && whole {
                return Err(Refusal::Limit {
                    limit: "runs of pages that one load reads",
                    max: LOAD_RUNS_MAX as u64,
                });
            }
            held.truncate(runs_left);
            runs_left -= held.len();
            sources.push(held);
        }

        let mut stretches: Vec<Stretch> = Vec::new();
        let mut ends = Vec::with_capacity(parts.len());
        for (part, held) in parts.iter().zip(sources) {
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
                let pin = pool.pin(block, offset + run.start + run.count - arena_start);
                let last = stretches[first..].last_mut();
                let last = last.map(|last| (&mut last.stage, &mut last.pages, &mut last.lease));
                if let Some((StretchStage::Present(runs), pages, lease)) = last
                    && tier == TierId::Host
                {
                    runs.push(run);
                    *pages += run.count;
                    lease.push((tier, pin));
                } else {
                    let block = pin.block();
                    stretches.push(Stretch {
                        group: part.group,
                        first: position,
                        pages: run.count,
                        destination: PageList::default(),
                        stage: match tier {
                            TierId::Host => StretchStage::Present(vec![run]),
                            tier => StretchStage::Below(Below { tier, block, run }),
                        },
                        lease: vec![(tier, pin)],
                    });
                }
                position += run.count;
            }
            let mut cursor = PageCursor::new(&part.pages);
            for stretch in &mut stretches[first..] {
                stretch.destination = cursor.take(stretch.pages);
            }
            self.counts.loaded_pages += u64::from(position - part.first_page);
            let missing = end_of(part) - position;
            if whole && missing > 0 {
                // Pages whose block was forgotten: the load is answered as not copied.
                stretches.push(Stretch {
                    group: part.group,
                    first: position,
                    pages: missing,
                    destination: PageList::default(),
                    stage: StretchStage::Ended(0),
                    lease: Vec::new(),
                });
            }
            ends.push((part.group, position));
        }
        // The pins become a lease: holds on pages before the end of each part are released, because no other load needs
        // them. The places of the holds are used until here.
        for (group, end) in ends {
            for held in slot.take_held_before(group, end) {
                self.tiers.unpin(held.tier, held.pin);
            }
        }

        let load = PendingLoad {
            reply_to,
            replica,
            after,
            sequence: slot.sequence().clone(),
            stretches,
            whole,
            failed: 0,
        };
        self.loads.last += 1;
        self.advance_load(self.loads.last, load, effects);
        Ok(())
    }

    /// Begins the transfers of a load that can begin now, and answers it if none is in flight.
    fn advance_load(
        &mut self,
        key: LoadKey,
        mut load: PendingLoad,
        effects: &mut Vec<LeaderEffect>,
    ) {
        let mut index = 0;
        // Host memory has no room for a promotion now. Pages that are there are copied all the same, which makes room.
        let mut full = false;
        while index < load.stretches.len() {
            // Pages behind one that was not copied are of no use to the engine, and a transfer that begins after the
            // deadline would only have to be cancelled.
            let useless = load.reply_to.deadline <= self.step_time || load.is_useless(index);
            let stage = &load.stretches[index].stage;
            match stage {
                StretchStage::Below(_) | StretchStage::Present(_) if useless => {
                    self.end_stretch(&mut load.stretches[index], 0);
                }
                StretchStage::Below(_) if full => {}
                StretchStage::Below(below) => {
                    let below = *below;
                    full = !self.promote(key, &mut load, index, below, effects);
                    // The stretch may have turned out to be present, or to have ended.
                    if !full && !load.stretches[index].is_moving() {
                        continue;
                    }
                }
                StretchStage::Present(_) => self.copy_stretch(key, &mut load, index, effects),
                StretchStage::Promoting(_) | StretchStage::Copying(..) | StretchStage::Ended(_) => {
                }
            }
            index += 1;
        }
        if load.is_moving() {
            if load.is_promoting() {
                let deadline = load.reply_to.deadline;
                self.timers.set(deadline, Timer::Load(key));
            }
            self.loads.waiting.insert(key, load);
            return;
        }
        self.timers.clear(load.reply_to.deadline, Timer::Load(key));
        for stretch in &mut load.stretches {
            self.end_stretch(stretch, 0);
        }
        let answer = match load.complete_pages() {
            0 if load.failed == 0 => Err(Refusal::NotPromoted),
            0 => Err(Refusal::CopyFailed(load.failed)),
            pages => Ok(Answer::Load(LoadAnswer { pages })),
        };
        let ReplyTo { engine, id, .. } = load.reply_to;
        self.answer(engine, id, answer, effects);
    }

    /// The deadline of a load has passed: the load stops waiting for transfers into host memory, which do not touch the
    /// engine's memory and may have later deadlines, because others ordered them. Its own copies are still awaited.
    pub(super) fn load_due(&mut self, key: LoadKey, effects: &mut Vec<LeaderEffect>) {
        let Some(mut load) = self.loads.waiting.remove(&key) else {
            return;
        };
        for stretch in &mut load.stretches {
            if matches!(stretch.stage, StretchStage::Promoting(_)) {
                self.end_stretch(stretch, 0);
            }
        }
        self.advance_load(key, load, effects);
    }

    /// Orders the promotion of a stretch. Where host memory has room for its first pages only, the rest becomes a stretch
    /// of its own. Returns false if there is no room now, and transfers of this load will make some.
    fn promote(
        &mut self,
        key: LoadKey,
        load: &mut PendingLoad,
        index: usize,
        below: Below,
        effects: &mut Vec<LeaderEffect>,
    ) -> bool {
        let (first, end) = (load.stretches[index].first, load.stretches[index].end());
        let ratio = self.settings.ratio.pages();
        let workers = self.roster.moving();
        // A reset in progress does not know blocks that are created now: pages that it removes are not promoted.
        let source = self.tiers.serving(below.tier);
        let movable = source.is_some_and(|pool| pool.movable(below.block).is_some());
        let host = self.tiers.serving_mut(TierId::Host).filter(|_| movable);
        let (Some(host), Some(_)) = (host, workers) else {
            self.end_stretch(&mut load.stretches[index], 0);
            return true;
        };
        let group = load.stretches[index].group;
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
            self.end_stretch(&mut load.stretches[index], 0);
            return true;
        }
        if refused > 0 {
            let mut rest = load.stretches[index].split(fits);
            if let Some(pool) = self.tiers.serving_mut(below.tier)
                && let Some(pin) = pool.pin_through(below.block, below.run.start + below.run.count)
            {
                rest.stage = StretchStage::Below(Below {
                    run: PageRun {
                        start: below.run.start + fits,
                        count: below.run.count - fits,
                    },
                    ..below
                });
                rest.lease.push((below.tier, pin));
            }
            load.stretches.insert(index + 1, rest);
        }
        let edge = Edge {
            from: below.tier,
            to: TierId::Host,
        };
        let source = MoveSource {
            tier: below.tier,
            block: below.block,
            start: below.run.start,
            first,
        };
        let terms = MoveTerms {
            deadline: load.reply_to.deadline,
            by_setting: false,
        };
        self.order_moves(edge, &source, &planned.reserved, terms, effects);
        let waits: BTreeSet<TransferId> = planned.waits.iter().map(|wait| wait.transfer).collect();
        for transfer in &waits {
            self.loads.wait(*transfer, key);
        }
        let stretch = &mut load.stretches[index];
        match waits.is_empty() {
            true => self.find_promoted(load, index),
            false => stretch.stage = StretchStage::Promoting(waits),
        }
        true
    }

    /// The transfers into host memory that a stretch waited for have ended: holds what is there now instead of the source.
    fn find_promoted(&mut self, load: &mut PendingLoad, index: usize) {
        let stretch = &mut load.stretches[index];
        for (tier, pin) in stretch.lease.drain(..) {
            self.tiers.unpin(tier, pin);
        }
        let (mut position, end) = (stretch.first, stretch.end());
        let mut present = Vec::new();
        if let Some(host) = self.tiers.serving_mut(TierId::Host) {
            let (domain, hashes) = load.sequence.of(stretch.group);
            for run in host.covering(domain, hashes, position, end) {
                let until = (run.position + run.pages).min(end);
                let pin = host.pin(run.block, run.offset + until - run.position);
                stretch.lease.push((TierId::Host, pin));
                present.push(PageRun {
                    start: host.arena_page(&run, position),
                    count: until - position,
                });
                position = until;
            }
        }
        stretch.stage = StretchStage::Present(present);
    }

    /// Orders the copy of a stretch into the engine's memory.
    fn copy_stretch(
        &mut self,
        key: LoadKey,
        load: &mut PendingLoad,
        index: usize,
        effects: &mut Vec<LeaderEffect>,
    ) {
        let stretch = &mut load.stretches[index];
        let StretchStage::Present(runs) = &mut stretch.stage else {
            return;
        };
        let runs = std::mem::take(runs);
        if runs.is_empty() {
            return self.end_stretch(stretch, 0);
        }
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
        self.loads.wait(id, key);
        stretch.stage = StretchStage::Copying(id, runs);
        let device = DeviceEnd {
            engine: load.reply_to.engine,
            group: stretch.group,
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
    fn end_stretch(&mut self, stretch: &mut Stretch, pages: u32) {
        for (tier, pin) in stretch.lease.drain(..) {
            self.tiers.unpin(tier, pin);
        }
        if !matches!(stretch.stage, StretchStage::Ended(_)) {
            stretch.stage = StretchStage::Ended(pages);
        }
    }

    /// A transfer that loads may wait for has ended on every worker: the loads proceed.
    pub(super) fn loads_go_on(
        &mut self,
        id: TransferId,
        outcome: TransferOutcome,
        effects: &mut Vec<LeaderEffect>,
    ) {
        for key in self.loads.waiters.remove(&id).unwrap_or_default() {
            let Some(mut load) = self.loads.waiting.remove(&key) else {
                continue;
            };
            load.failed = load.failed.max(outcome.failed);
            for index in 0..load.stretches.len() {
                let stretch = &mut load.stretches[index];
                match stretch.waited_for(id) {
                    None => {}
                    Some(Waited::Copy) => {
                        self.counts.failed_copies += u64::from(outcome.failed > 0);
                        self.end_copy(stretch, outcome);
                    }
                    Some(Waited::Promotions) => self.find_promoted(&mut load, index),
                }
            }
            self.advance_load(key, load, effects);
        }
    }

    /// A copy from host memory has ended. If a page failed its checksum there, the block is cut at that page.
    fn end_copy(&mut self, stretch: &mut Stretch, outcome: TransferOutcome) {
        let bad = outcome.bad_page.and_then(|bad| stretch.source_of(bad));
        self.end_stretch(stretch, outcome.complete_pages);
        if let (Some((block, page)), Some(host)) = (bad, self.tiers.serving_mut(TierId::Host)) {
            host.cut(block, page);
            self.counts.bad_sources += 1;
        }
    }

    /// The replica of an engine that is served, and the model of its memory.
    pub(super) fn served(&self, engine: EngineId) -> Result<(Replica, &Arc<Model>), Refusal> {
        let found = self.roster.memory_of(engine);
        let key = self.tiers.wanted_key();
        found
            .filter(|(_, model)| key.is_none_or(|key| key.is_for(model)))
            .ok_or_else(|| self.roster.not_ready())
    }
}

/// Position after the last page of a part.
pub(super) fn end_of(part: &Part) -> u32 {
    let pages = u32::try_from(part.pages.pages()).unwrap_or(u32::MAX);
    part.first_page.saturating_add(pages)
}

/// Refuses parts of groups that the model does not have, pages that the engine does not have, empty lists, and parts of
/// one group that overlap. Replicas may have different numbers of pages.
pub(super) fn check_parts(model: &Model, parts: &[Part]) -> Result<(), Refusal> {
    let invalid = |field, value, remedy| {
        Err(Refusal::Invalid {
            field,
            value,
            remedy,
        })
    };
    if parts.is_empty() {
        return invalid("parts", "empty".to_owned(), "name at least one page");
    }
    let groups = model.geometry().groups.len();
    for part in parts {
        if usize::from(part.group.0) >= groups {
            let remedy = "name a group that the ranks registered";
            return invalid("parts.group", part.group.0.to_string(), remedy);
        }
        if part.pages.0.is_empty() {
            let remedy = "name at least one page";
            return invalid("parts.pages", "empty".to_owned(), remedy);
        }
        let device_pages = model.geometry().device_pages(part.group);
        let outside = |run: &&PageRun| run.end() > u64::from(device_pages) || run.count == 0;
        if let Some(run) = part.pages.0.iter().find(outside) {
            let value = format!("[{}, {}]", run.start, run.count);
            return invalid("parts.pages", value, "name pages that the ranks registered");
        }
    }
    let mut ranges: Vec<(GroupId, u32, u64)> = parts
        .iter()
        .map(|part| {
            let end = u64::from(part.first_page) + part.pages.pages();
            (part.group, part.first_page, end)
        })
        .collect();
    ranges.sort_unstable();
    let overlap = ranges
        .windows(2)
        .find(|pair| pair[0].0 == pair[1].0 && u64::from(pair[1].1) < pair[0].2);
    match overlap {
        None => Ok(()),
        Some(pair) => invalid(
            "parts.first_page",
            format!("{} of {}", pair[1].1, pair[1].0),
            "name each page of a group once",
        ),
    }
}
