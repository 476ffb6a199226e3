//! What the checker knows by itself: who touches which page, who asked for what, what was forgotten.
//!
//! Written apart from the core: nothing here is taken from it but what it says outwardly.

use std::collections::BTreeMap;
use std::time::Duration;

use super::roster::Roster;
use super::worker::TouchedPages;
use crate::core::Refusal;
use crate::types::{
    Answer, Copy, Direction, DomainId, EngineId, Epoch, Fingerprint, OpId, Request, RequestId,
    ResetScope, Time, WorkerId,
};

/// Pages that copies read and write right now.
#[derive(Debug, Default)]
pub(super) struct Touched {
    /// Of a depot: shard and cell.
    depot: BTreeMap<(u16, u32), Uses>,
    /// Of an engine's memory: engine, rank, page.
    device: BTreeMap<(EngineId, u16, u32), Uses>,
    pub(super) trouble: Option<String>,
}

#[derive(Debug, Default, Clone)]
struct Uses {
    readers: Vec<Copier>,
    writers: Vec<Copier>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Copier {
    worker: WorkerId,
    life: u32,
    op: OpId,
    /// The engine's request that the copy serves.
    request: RequestId,
    /// The depot's page.
    page: u32,
}

impl Touched {
    /// A copy starts: nobody else may write what it touches, and nobody touch what it writes.
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

    /// It has ended.
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
        mut with: impl FnMut(&mut Uses, Copier, bool) -> Option<Copier>,
    ) {
        let TouchedPages {
            worker,
            shard,
            life,
            copy,
            pages,
            cells,
        } = *touched;
        let store = copy.direction == Direction::Store;
        let rank = worker.rank.0;
        for (source, destination) in pages {
            let (device, depot) = if store {
                (*source, *destination)
            } else {
                (*destination, *source)
            };
            let copier = Copier {
                worker,
                life,
                op: copy.op,
                request: copy.request,
                page: depot,
            };
            let cells = depot * cells..(depot + 1) * cells;
            let clashes = cells.filter_map(|cell| {
                with(
                    self.depot.entry((shard.0, cell)).or_default(),
                    copier,
                    store,
                )
            });
            if let Some(other) = clashes.last() {
                self.trouble = Some(format!(
                    "depot page {depot} of {shard}: {} of {worker} touches what {} of {} writes or reads",
                    copy.op, other.op, other.worker
                ));
            }
            let clash = with(
                self.device.entry((copy.engine, rank, device)).or_default(),
                copier,
                !store,
            );
            if let Some(other) = clash {
                self.trouble = Some(format!(
                    "device page {device} of rank {rank}: {} of {worker} touches what {} of {} writes or reads",
                    copy.op, other.op, other.worker
                ));
            }
        }
        self.depot
            .retain(|_, uses| !(uses.readers.is_empty() && uses.writers.is_empty()));
        self.device
            .retain(|_, uses| !(uses.readers.is_empty() && uses.writers.is_empty()));
    }

    /// A worker's process has died, its copies with it.
    pub(super) fn died(&mut self, worker: WorkerId, life: u32) {
        let of_the_dead = |copier: &Copier| (copier.worker, copier.life) == (worker, life);
        for uses in self.depot.values_mut().chain(self.device.values_mut()) {
            uses.readers.retain(|copier| !of_the_dead(copier));
            uses.writers.retain(|copier| !of_the_dead(copier));
        }
    }

    /// Who writes a page of a depot.
    pub(super) fn writers(&self) -> impl Iterator<Item = (u16, u32, OpId)> {
        self.depot.iter().flat_map(|((shard, _), uses)| {
            let copiers = uses.writers.iter();
            copiers.map(|copier| (*shard, copier.page, copier.op))
        })
    }

    /// True when any copy runs.
    pub(super) fn any_copy(&self) -> bool {
        !self.device.is_empty()
    }

    /// Who touches a page of an engine's memory.
    pub(super) fn device(
        &self,
        engine: EngineId,
        rank: u16,
        page: u32,
    ) -> Option<(OpId, WorkerId)> {
        let uses = self.device.get(&(engine, rank, page))?;
        let copier = uses.writers.first().or(uses.readers.first())?;
        Some((copier.op, copier.worker))
    }

    /// A copy that touches engine pages for this request.
    pub(super) fn copy_of(&self, engine: EngineId, request: RequestId) -> Option<(OpId, WorkerId)> {
        let first = (engine, 0, 0);
        let last = (engine, u16::MAX, u32::MAX);
        let copiers = self.device.range(first..=last);
        let mut copiers = copiers.flat_map(|(_, uses)| uses.writers.iter().chain(&uses.readers));
        let copier = copiers.find(|copier| copier.request == request)?;
        Some((copier.op, copier.worker))
    }
}

/// A request as a leader took it.
#[derive(Debug)]
struct Taken {
    answer: Option<Result<Answer, Refusal>>,
    reset: Option<ResetScope>,
    /// It names engine pages, and copies of an older leader may have been under way: the leader keeps it for as long as the
    /// connection lasts, and carries nothing out.
    parked: bool,
    at: Time,
}

/// A request as it reached a leader.
#[derive(Debug)]
pub(super) struct Question<'a> {
    /// Time until its deadline.
    pub(super) left: Duration,
    /// No copy of an older leader was under way.
    pub(super) all_clear: bool,
    pub(super) request: &'a Request,
}

/// What a confirmed reset has forgotten, and when that was asked.
#[derive(Debug)]
struct Forgotten {
    scope: ResetScope,
    at: Time,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Ghost {
    pub(super) touched: Touched,
    taken: BTreeMap<(Epoch, EngineId, RequestId), Taken>,
    /// How long the leader may still work on each, standing still not counted.
    open: BTreeMap<(Epoch, EngineId, RequestId), Duration>,
    /// When each page was last ordered to be stored.
    stored: BTreeMap<(DomainId, Fingerprint), Time>,
    /// When each copy of the leader's epoch is late, by the leader's clock.
    deadlines: BTreeMap<OpId, Time>,
    /// Arena pages that were being filled when the checker looked last, and by which copy.
    filling: BTreeMap<u32, OpId>,
    /// What was forgotten, and when that was asked.
    forgotten: Vec<Forgotten>,
    /// What the leader was told of its workers.
    pub(super) roster: Roster,
    /// When the leader may forget an engine that went.
    away: BTreeMap<EngineId, Time>,
    fence: Duration,
}

/// A leader has as much time beyond a deadline and the fence as messages, restarts and the death of a worker may take.
const SLACK: Duration = Duration::from_millis(500);

impl Ghost {
    /// Knows nothing yet but how long a leader may wait for the end of a copy.
    pub(super) fn new(fence: Duration) -> Self {
        Self {
            fence,
            ..Self::default()
        }
    }

    pub(super) fn asked(
        &mut self,
        now: Time,
        epoch: Epoch,
        engine: EngineId,
        id: RequestId,
        question: &Question<'_>,
    ) {
        let Question {
            left,
            all_clear,
            request,
        } = *question;
        let key = (epoch, engine, id);
        if self.taken.contains_key(&key) {
            return;
        }
        let reset = match request {
            Request::Reset { scope } => Some(scope.clone()),
            _ => None,
        };
        let left = match request {
            Request::Load { .. } | Request::Store { .. } => left + 2 * self.fence + SLACK,
            Request::Reset { .. } | Request::CancelStores { .. } => left + SLACK,
            Request::Lookup { .. } | Request::Finish { .. } => Duration::ZERO,
        };
        self.open.insert(key, left);
        let names_pages = matches!(request, Request::Load { .. } | Request::Store { .. });
        let taken = Taken {
            answer: None,
            reset,
            parked: names_pages && !all_clear,
            at: now,
        };
        self.taken.insert(key, taken);
    }

    /// The leader was awake for a while: what it has left for each request shrinks.
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

    /// An engine's connection has broken: from `due` on it may be unknown. Its parked requests ended with the connection;
    /// the engine asks again for those that it has not given up.
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

    /// An engine speaks again. Whoever comes too late was forgotten and is known anew in one and the same step.
    pub(super) fn came(&mut self, now: Time, epoch: Epoch, engine: EngineId) {
        if self.away.remove(&engine).is_some_and(|due| due <= now) {
            self.forgot(epoch, |other| other == engine);
        }
    }

    /// Engines that stayed away for longer than the grace are unknown: what they ask again is asked for the first time.
    pub(super) fn forgot(&mut self, epoch: Epoch, forgot: impl Fn(EngineId) -> bool) {
        self.taken.retain(|(of, engine, _), taken| {
            *of != epoch || taken.answer.is_none() || !forgot(*engine)
        });
    }

    /// A leader has died: nobody waits for its answers.
    pub(super) fn leader_died(&mut self, epoch: Epoch) {
        self.deadlines.clear();
        self.filling.clear();
        self.away.clear();
        self.roster = Roster::default();
        self.open.retain(|(of, ..), _| *of > epoch);
        self.taken.retain(|(of, ..), _| *of > epoch);
    }

    /// An answer: the only one, or the same as before.
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
                "{id} of engine {engine} is answered and was never asked"
            ));
        };
        self.open.remove(&key);
        // Refused without being noted: the same id may be asked again.
        if matches!(answer, Err(Refusal::Crowded { .. })) {
            self.taken.remove(&key);
            return None;
        }
        if let Some(before) = &taken.answer
            && before != answer
            && !matches!(before, Err(Refusal::StaleRequest(_)))
        {
            return Some(format!(
                "{id} of engine {engine} is answered {before:?}, then {answer:?}"
            ));
        }
        let first = taken.answer.is_none();
        taken.answer = Some(answer.clone());
        if let (Some(scope), Ok(Answer::Reset { .. }), true) = (taken.reset.take(), answer, first) {
            let at = taken.at;
            let place = self
                .forgotten
                .partition_point(|forgotten| forgotten.at <= at);
            let forgotten = Forgotten { scope, at };
            self.forgotten.insert(place, forgotten);
        }
        None
    }

    /// A store is ordered.
    pub(super) fn ordered(&mut self, now: Time, copy: &Copy) {
        self.deadlines.insert(copy.op, copy.deadline);
        if let Some(record) = &copy.record {
            for page in record.pages() {
                self.stored.insert((page.domain, page.fingerprint), now);
            }
        }
    }

    /// Pages that were being filled and can be read now: their copies must have ended in time.
    pub(super) fn published(
        &mut self,
        now: Time,
        filling: BTreeMap<u32, OpId>,
        readable: impl Fn(u32) -> bool,
    ) -> Option<String> {
        let before = std::mem::replace(&mut self.filling, filling);
        let late = before.iter().find(|(page, op)| {
            let over = !self.filling.values().any(|other| other == *op);
            let late = self
                .deadlines
                .get(op)
                .is_some_and(|deadline| now > *deadline);
            over && late && readable(**page)
        });
        late.map(|(page, op)| {
            format!("arena page {page} can be read, and {op} ended behind its deadline")
        })
    }

    /// A page that can be found was stored after everything that made it forgotten.
    pub(super) fn came_back(
        &self,
        namespace: u8,
        domain: DomainId,
        fingerprint: Fingerprint,
    ) -> Option<Time> {
        let stored = self
            .stored
            .get(&(domain, fingerprint))
            .copied()
            .unwrap_or(Time(0));
        // A reset of a namespace means the pages of every layout, also of engines that were not there when it was asked.
        let meant = |forgotten: &&Forgotten| match &forgotten.scope {
            ResetScope::Everything => true,
            ResetScope::Namespace(name) => name == &[namespace],
            ResetScope::Pages(name, hashes) => {
                name == &[namespace]
                    && (0..hashes.len()).any(|page| hashes.fingerprint(page) == fingerprint)
            }
        };
        self.forgotten
            .iter()
            .rev()
            .take_while(|forgotten| forgotten.at > stored)
            .find(meant)
            .map(|forgotten| forgotten.at)
    }
}
