//! The checker's own model of a run: pages that copies touch, open requests, and pages that resets removed.
//!
//! Independent of the core's code: the model takes only events, effects and answers from it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::credit::HitModel;
use super::gate::GateModel;
use super::roster::AdmittedWorkers;
use kvferry_core::{Refusal, TierKey};
use kvferry_types::{
    Answer, DomainId, EndedCopy, EngineId, Epoch, Fingerprint, Request, RequestId, ResetAnswer,
    ResetScope, Shard, TierId, Time, Transfer, TransferId, WorkerId,
};

/// The pages that a copy touches.
#[derive(Debug)]
pub(super) struct TouchedPages<'a> {
    pub(super) worker: WorkerId,
    pub(super) shard: Shard,
    pub(super) incarnation: u32,
    pub(super) copy: &'a Transfer,
    pub(super) pages: &'a [(u32, u32)],
    /// Cells of one depot page.
    pub(super) cells: u32,
}

/// Pages that running copies read and write.
#[derive(Debug, Default)]
pub(super) struct PageAccesses {
    /// Cells of the depots, by tier, shard and cell.
    depot: BTreeMap<(TierId, u16, u32), Uses>,
    /// Pages of the engines' memory, by engine, rank and page.
    device: BTreeMap<(EngineId, u16, u32), Uses>,
    pub(super) violation: Option<String>,
}

#[derive(Debug, Default, Clone)]
struct Uses {
    readers: Vec<PageUser>,
    writers: Vec<PageUser>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PageUser {
    worker: WorkerId,
    incarnation: u32,
    transfer: TransferId,
    /// The engine's request that the copy serves.
    request: RequestId,
    /// Page of the depot.
    page: u32,
}

impl PageAccesses {
    /// Notes a copy that starts. No other copy may write what it touches, or touch what it writes.
    pub(super) fn begin(&mut self, touched: &TouchedPages<'_>) {
        self.each(touched, |uses, copier, writes| {
            let clash = uses
                .writers
                .first()
                .or(uses.readers.first().filter(|_| writes))
                .copied();
            match writes {
                true => uses.writers.push(copier),
                false => uses.readers.push(copier),
            }
            clash
        });
    }

    /// Notes that a copy has ended.
    pub(super) fn end(&mut self, touched: &TouchedPages<'_>) {
        self.each(touched, |uses, copier, _| {
            uses.writers.retain(|other| *other != copier);
            uses.readers.retain(|other| *other != copier);
            None
        });
    }

    fn each(
        &mut self,
        touched: &TouchedPages<'_>,
        mut with: impl FnMut(&mut Uses, PageUser, bool) -> Option<PageUser>,
    ) {
        let TouchedPages {
            worker,
            shard,
            incarnation,
            copy,
            pages,
            cells,
        } = *touched;
        let end = copy.device.unwrap_or_default();
        let rank = worker.rank.0;
        for (source, destination) in pages {
            for (tier, page, writes) in [
                (copy.edge.from, *source, false),
                (copy.edge.to, *destination, true),
            ] {
                let copier = PageUser {
                    worker,
                    incarnation,
                    transfer: copy.id,
                    request: end.request,
                    page,
                };
                let (clash, place) = if tier == TierId::Device {
                    let uses = self.device.entry((end.engine, rank, page)).or_default();
                    (
                        with(uses, copier, writes),
                        format!("device page {page} of rank {rank}"),
                    )
                } else {
                    let cells = page * cells..(page + 1) * cells;
                    let clashes = cells.filter_map(|cell| {
                        let uses = self.depot.entry((tier, shard.0, cell)).or_default();
                        with(uses, copier, writes)
                    });
                    (clashes.last(), format!("page {page} of {shard} in {tier}"))
                };
                if let Some(other) = clash {
                    self.violation = Some(format!(
                        "{place}: {} of {worker} touches what {} of {} writes or reads",
                        copy.id, other.transfer, other.worker
                    ));
                }
            }
        }
        self.remove_unused();
    }

    /// Removes the copies of a worker's process that has died.
    pub(super) fn died(&mut self, worker: WorkerId, incarnation: u32) {
        let of_the_dead =
            |copier: &PageUser| (copier.worker, copier.incarnation) == (worker, incarnation);
        for uses in self.depot.values_mut().chain(self.device.values_mut()) {
            uses.readers.retain(|copier| !of_the_dead(copier));
            uses.writers.retain(|copier| !of_the_dead(copier));
        }
        self.remove_unused();
    }

    fn remove_unused(&mut self) {
        let used = |uses: &Uses| !(uses.readers.is_empty() && uses.writers.is_empty());
        self.depot.retain(|_, uses| used(uses));
        self.device.retain(|_, uses| used(uses));
    }

    /// Pages of a tier that are being written, one entry for each cell: shard, page and copy.
    pub(super) fn writers(&self, tier: TierId) -> impl Iterator<Item = (u16, u32, TransferId)> {
        let cells = self.depot.range((tier, 0, 0)..=(tier, u16::MAX, u32::MAX));
        cells.flat_map(|((_, shard, _), uses)| {
            let copiers = uses.writers.iter();
            copiers.map(|copier| (*shard, copier.page, copier.transfer))
        })
    }

    /// True when any copy runs.
    pub(super) fn any_copy(&self) -> bool {
        !self.device.is_empty() || !self.depot.is_empty()
    }

    /// The copy that touches a page of an engine's memory, and its worker. A copy that writes comes first.
    pub(super) fn device(
        &self,
        engine: EngineId,
        rank: u16,
        page: u32,
    ) -> Option<(TransferId, WorkerId)> {
        let uses = self.device.get(&(engine, rank, page))?;
        let copier = uses.writers.first().or(uses.readers.first())?;
        Some((copier.transfer, copier.worker))
    }

    /// A copy that touches an engine's pages for this request, and its worker.
    pub(super) fn copy_of(
        &self,
        engine: EngineId,
        request: RequestId,
    ) -> Option<(TransferId, WorkerId)> {
        let first = (engine, 0, 0);
        let last = (engine, u16::MAX, u32::MAX);
        let copiers = self.device.range(first..=last);
        let mut copiers = copiers.flat_map(|(_, uses)| uses.writers.iter().chain(&uses.readers));
        let copier = copiers.find(|copier| copier.request == request)?;
        Some((copier.transfer, copier.worker))
    }
}

/// A request that a leader has received.
#[derive(Debug)]
struct ReceivedRequest {
    answer: Option<Result<Answer, Refusal>>,
    reset: Option<(ResetScope, Option<TierId>)>,
    /// The request names engine pages, and copies of an older leader may have been running when it arrived: the leader
    /// keeps it while the connection lasts, and does not carry it out.
    parked: bool,
    at: Time,
}

/// A request as it reaches a leader.
#[derive(Debug)]
pub(super) struct ArrivedRequest<'a> {
    /// Time until its deadline.
    pub(super) left: Duration,
    /// No copy of an older leader is running.
    pub(super) all_clear: bool,
    pub(super) request: &'a Request,
}

/// Scope of a confirmed reset, and when the reset was requested.
#[derive(Debug)]
struct ConfirmedReset {
    scope: ResetScope,
    /// The only tier that it covers; `None` for all tiers.
    tier: Option<TierId>,
    at: Time,
}

/// Arena pages that are filling, by tier, and the copy that fills each.
pub(super) type FillingPages = BTreeMap<(TierId, u32), TransferId>;

/// The model of one world.
#[derive(Debug, Default)]
pub(super) struct Oracle {
    pub(super) touched: PageAccesses,
    taken: BTreeMap<(Epoch, EngineId, RequestId), ReceivedRequest>,
    /// Time that the leader has left for each open request. Time in which the leader is paused does not count.
    open: BTreeMap<(Epoch, EngineId, RequestId), Duration>,
    /// When a store of each page was last ordered.
    stored: BTreeMap<(DomainId, Fingerprint), Time>,
    /// When a transfer into each page of a tier was last ordered, moves included.
    written: BTreeMap<(TierId, DomainId, Fingerprint), Time>,
    /// Pages that a move between tiers reads, while it is in flight.
    sources: BTreeMap<TransferId, (TierId, Vec<u32>)>,
    /// Ends of moves that the leader was told. A repeated report says nothing about pages that were written since.
    told: BTreeSet<(WorkerId, TransferId)>,
    /// Pages of a tier that failed their checksum, as the leader was told, with the key of its pool.
    bad: BTreeMap<TierId, (TierKey, BTreeSet<u32>)>,
    /// Deadline of each copy of the leader's epoch, by the leader's clock.
    deadlines: BTreeMap<TransferId, Time>,
    /// Arena pages that were filling at the last check, and the copy that fills each.
    filling: FillingPages,
    /// Confirmed resets, in the order of the times at which they were requested.
    resets: Vec<ConfirmedReset>,
    /// The workers that the leader has admitted.
    pub(super) roster: AdmittedWorkers,
    /// Names that leaders have given to the sessions of operators.
    pub(super) operators: BTreeSet<EngineId>,
    /// When the leader may forget each disconnected engine.
    away: BTreeMap<EngineId, Time>,
    /// The engine that connected again in this step, after the leader may have forgotten it.
    reopened: Option<EngineId>,
    /// What lookups offered and declined.
    pub(super) gate: GateModel,
    /// The tiers from which lookups are served.
    pub(super) hits: HitModel,
    fence: Duration,
}

/// Time that a leader has beyond a deadline and the fence, for messages, restarts and the death of a worker.
const SLACK: Duration = Duration::from_millis(500);

impl Oracle {
    /// An empty model. `fence` is how long a leader may wait for the end of a late copy.
    pub(super) fn new(fence: Duration) -> Self {
        Self {
            fence,
            ..Self::default()
        }
    }

    pub(super) fn arrived(
        &mut self,
        now: Time,
        epoch: Epoch,
        engine: EngineId,
        id: RequestId,
        question: &ArrivedRequest<'_>,
    ) {
        let ArrivedRequest {
            left,
            all_clear,
            request,
        } = *question;
        let key = (epoch, engine, id);
        if self.taken.contains_key(&key) {
            return;
        }
        let reset = match request {
            Request::Reset { scope, tier } => Some((scope.clone(), *tier)),
            _ => None,
        };
        let left = match request {
            Request::Load { .. } | Request::Store { .. } => left + 2 * self.fence + SLACK,
            Request::Reset { .. } | Request::Flush | Request::CancelStores { .. } => left + SLACK,
            Request::Lookup { .. } | Request::Finish { .. } => Duration::ZERO,
        };
        self.open.insert(key, left);
        let names_pages = matches!(request, Request::Load { .. } | Request::Store { .. });
        let taken = ReceivedRequest {
            answer: None,
            reset,
            parked: names_pages && !all_clear,
            at: now,
        };
        self.taken.insert(key, taken);
    }

    /// Subtracts time in which the leader was awake from what it has left for each open request. Returns an error text
    /// when a request has none left.
    pub(super) fn passed(&mut self, epoch: Epoch, time: Duration) -> Option<String> {
        for ((of, engine, id), left) in &mut self.open {
            if *of == epoch {
                let Some(rest) = left.checked_sub(time) else {
                    return Some(format!("{id} of engine {engine} was not answered in time"));
                };
                *left = rest;
            }
        }
        None
    }

    /// Notes that an engine's connection has broken. From `due` on the leader may forget the engine. Its parked
    /// requests ended with the connection; the engine repeats those that it has not given up.
    pub(super) fn went(&mut self, epoch: Epoch, engine: EngineId, due: Time) {
        self.away.insert(engine, due);
        self.taken.retain(|key, taken| {
            let ended = (key.0, key.1) == (epoch, engine) && taken.parked && taken.answer.is_none();
            if ended {
                self.open.remove(key);
            }
            !ended
        });
    }

    /// Notes that an engine has reconnected. If its grace is over, the leader forgets the engine and admits it as a new
    /// one in the same step.
    pub(super) fn came(&mut self, now: Time, epoch: Epoch, engine: EngineId) {
        if self.away.remove(&engine).is_some_and(|due| due <= now) {
            self.forgot(epoch, |other| other == engine);
            self.reopened = Some(engine);
        }
    }

    /// Drops the answered requests of engines that the leader has forgotten after their grace: a repeated request
    /// counts as new.
    pub(super) fn forgot(&mut self, epoch: Epoch, forgot: impl Fn(EngineId) -> bool) {
        // Deadlines that passed in the same step were answered before the engine was opened again.
        let reopened = self.reopened.take();
        self.taken.retain(|(of, engine, _), taken| {
            let removed = forgot(*engine) || reopened == Some(*engine);
            *of != epoch || taken.answer.is_none() || !removed
        });
    }

    /// Notes that a leader has died. Its requests are no longer open.
    pub(super) fn leader_died(&mut self, epoch: Epoch) {
        self.deadlines.clear();
        self.sources.clear();
        self.told.clear();
        self.filling.clear();
        self.away.clear();
        self.gate = GateModel::default();
        self.hits = HitModel::default();
        self.roster = AdmittedWorkers::default();
        self.open.retain(|(of, ..), _| *of > epoch);
        self.taken.retain(|(of, ..), _| *of > epoch);
    }

    /// True if a request was answered before, and may receive the same answer again.
    pub(super) fn is_answered(&self, epoch: Epoch, engine: EngineId, id: RequestId) -> bool {
        let taken = self.taken.get(&(epoch, engine, id));
        taken.is_some_and(|taken| taken.answer.is_some())
    }

    /// Checks an answer: each request has one, and may receive the same one again.
    pub(super) fn answered(
        &mut self,
        epoch: Epoch,
        engine: EngineId,
        id: RequestId,
        answer: &Result<Answer, Refusal>,
    ) -> Option<String> {
        let key = (epoch, engine, id);
        let Some(taken) = self.taken.get_mut(&key) else {
            return Some(format!(
                "{id} of engine {engine} is answered and was never requested"
            ));
        };
        self.open.remove(&key);
        // The leader refused the request without recording it: the same id may be requested again.
        if matches!(answer, Err(Refusal::Crowded { .. })) {
            self.taken.remove(&key);
            return None;
        }
        if let Some(before) = &taken.answer
            && before != answer
            && !matches!(before, Err(Refusal::StaleRequest { .. }))
        {
            return Some(format!(
                "{id} of engine {engine} is answered {before:?}, then {answer:?}"
            ));
        }
        let first = taken.answer.is_none();
        taken.answer = Some(answer.clone());
        if let (Some((scope, tier)), Ok(Answer::Reset(ResetAnswer { .. })), true) =
            (taken.reset.take(), answer, first)
        {
            let at = taken.at;
            let place = self.resets.partition_point(|removed| removed.at <= at);
            let removed = ConfirmedReset { scope, tier, at };
            self.resets.insert(place, removed);
        }
        None
    }

    /// Notes how a move ended on a worker: its source may be bad. `key` is that of the pool of a tier.
    pub(super) fn ended(
        &mut self,
        worker: WorkerId,
        ended: &EndedCopy,
        key: impl Fn(TierId) -> Option<TierKey>,
    ) {
        if !self.told.insert((worker, ended.transfer)) {
            return;
        }
        let Some((tier, pages)) = self.sources.get(&ended.transfer) else {
            return;
        };
        let page = pages.get(ended.complete_pages as usize);
        if let (true, Some(page), Some(key)) = (ended.bad_source, page, key(*tier)) {
            let (known, bad) = self
                .bad
                .entry(*tier)
                .or_insert_with(|| (key.clone(), BTreeSet::new()));
            if *known != key {
                (*known, *bad) = (key, BTreeSet::new());
            }
            bad.insert(*page);
        }
    }

    /// Notes that a disk was opened: pages that were removed because they failed their checksum may be listed again.
    pub(super) fn opened_disk(&mut self) {
        self.bad.remove(&TierId::Disk);
    }

    /// Notes an ordered copy: its deadline and, for a store, its pages. Returns an error text if it reads a page that has
    /// failed its checksum and was not written since.
    pub(super) fn ordered(
        &mut self,
        now: Time,
        copy: &Transfer,
        key: impl Fn(TierId) -> Option<TierKey>,
    ) -> Option<String> {
        let (from, to) = (copy.edge.from, copy.edge.to);
        let written = copy.pairs.iter().flat_map(|pair| pair.dst.iter_pages());
        if let Some((_, bad)) = self.bad.get_mut(&to) {
            written.for_each(|page| {
                bad.remove(&page);
            });
        }
        let read = copy.pairs.iter().flat_map(|pair| pair.src.iter_pages());
        let read: Vec<u32> = read.collect();
        let known = self.bad.get(&from);
        let known = known.filter(|(of, _)| key(from).as_ref() == Some(of));
        let mut again = read.iter().copied();
        let again = again.find(|page| known.is_some_and(|(_, bad)| bad.contains(page)));
        if copy.device.is_none() {
            self.sources.insert(copy.id, (from, read));
        }
        self.deadlines.insert(copy.id, copy.deadline);
        for page in copy.record.iter().flat_map(|record| record.pages()) {
            let key = (copy.edge.to, page.domain, page.fingerprint);
            self.written.insert(key, now);
        }
        // A move stores nothing new: pages that a reset removed must not come back by one.
        if let Some(record) = copy.record.as_ref().filter(|_| copy.device.is_some()) {
            for page in record.pages() {
                self.stored.insert((page.domain, page.fingerprint), now);
            }
        }
        again.map(|page| {
            let id = copy.id;
            format!("{id} reads page {page} of {from}, which has failed its checksum")
        })
    }

    /// Checks the pages that were filling and are readable now: their copies must have ended before their deadlines.
    /// Returns an error text for one that did not.
    pub(super) fn published(
        &mut self,
        now: Time,
        filling: FillingPages,
        readable: impl Fn((TierId, u32)) -> bool,
    ) -> Option<String> {
        let before = std::mem::replace(&mut self.filling, filling);
        let late = before.iter().find(|(page, transfer)| {
            let over = !self.filling.values().any(|other| other == *transfer);
            let late = self
                .deadlines
                .get(transfer)
                .is_some_and(|deadline| now > *deadline);
            over && late && readable(**page)
        });
        late.map(|((tier, page), transfer)| {
            format!(
                "arena page {page} of {tier} can be read, and {transfer} ended after its deadline"
            )
        })
    }

    /// When a page of a tier was removed by a reset that was requested after the page was last stored; `None` if by none. A
    /// page that a lookup can find must have none. After a reset of its tier alone, a move may have written it again.
    pub(super) fn came_back(
        &self,
        tier: TierId,
        namespace: u8,
        domain: DomainId,
        fingerprint: Fingerprint,
    ) -> Option<Time> {
        let stored = self
            .stored
            .get(&(domain, fingerprint))
            .copied()
            .unwrap_or(Time(0));
        let written = (tier, domain, fingerprint);
        let written = self.written.get(&written).copied().unwrap_or(Time(0));
        let later = |removed: &&ConfirmedReset| match removed.tier {
            None => removed.at > stored,
            Some(only) => only == tier && removed.at > written,
        };
        // A reset of a namespace covers the pages of every layout, also those of engines that attached after it was
        // requested.
        let meant = |removed: &&ConfirmedReset| match &removed.scope {
            ResetScope::Everything => true,
            ResetScope::Namespace(name) => name == &[namespace],
            ResetScope::Pages(name, hashes) => {
                name == &[namespace]
                    && (0..hashes.len()).any(|page| hashes.fingerprint(page) == fingerprint)
            }
        };
        self.resets
            .iter()
            .rev()
            .take_while(|removed| removed.at > stored.min(written))
            .filter(later)
            .find(meant)
            .map(|removed| removed.at)
    }
}
