//! Loads: copies from G2 into the engine's memory.

use crate::decision::Decision;
use crate::event::Effect;
use crate::pool::Pin;
use crate::refusal::Refusal;
use crate::slot::{HeldRun, slot_of};
use kvferry_types::{Copy, Direction, EngineId, GroupGeometry, Replica};
use kvferry_types::{FragmentPair, OpId, PageCursor, PageList, PageRun, RequestId, SlotId};

use super::ops::{Op, Work};
use super::tier::Tier;
use super::{Due, Leader};

/// Runs of the arena that one load reads, at most. A load of more runs copies the first ones, and its answer gives the
/// number of pages: an order that names all of them could not be encoded, or not be decoded.
pub const LOAD_RUNS_MAX: usize = 65_536;

impl Leader {
    pub(super) fn load(
        &mut self,
        due: Due,
        id: SlotId,
        first_page: u32,
        destination: &PageList,
        after: RequestId,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        if after >= due.id && after != RequestId(0) {
            return Err(Refusal::Invalid {
                field: "after",
                value: after.0.to_string(),
                remedy: "name the last number that the ranks were given, which is below the load's own id",
            });
        }
        let (replica, geometry) = self.served(due.engine)?;
        check_device_pages(geometry, "destination", destination)?;
        let (tokens_per_page, ranks) = (geometry.engine_page_tokens, self.workers.ranks());
        let layout = geometry.layout_fingerprint;
        let Some(pool) = self.tier.as_mut().and_then(Tier::serving_mut) else {
            return Err(Refusal::Reading);
        };
        let session = self.sessions.entry(due.engine).or_default();
        let slot = slot_of(&mut session.slots, id, layout)?;
        let pages = u32::try_from(destination.pages()).unwrap_or(u32::MAX);
        let end = first_page.saturating_add(pages);
        let not_pinned = Refusal::NotPinned {
            slot: id,
            first_page,
            end,
        };
        let mut sources = covering(&slot.held, first_page, end).ok_or(not_pinned)?;
        // The engine computes the pages that are not loaded, as when a copy fails halfway.
        sources.truncate(LOAD_RUNS_MAX);
        let pages: u32 = sources.iter().map(|(_, run)| run.count).sum();
        let end = first_page + pages;

        let mut cursor = PageCursor::new(destination);
        let mut pairs = Vec::with_capacity(sources.len());
        let mut lease: Vec<Pin> = Vec::with_capacity(sources.len());
        let mut position = first_page;
        for (held, run) in sources {
            slot.digest
                .add(tokens_per_page, Decision::Loaded { position, run });
            pairs.push(FragmentPair {
                src: PageList::run(run.start, run.count),
                dst: cursor.take(run.count),
            });
            let upto = run.start + run.count - slot.held[held].arena_start;
            lease.push(pool.pin(slot.held[held].block, upto));
            position += run.count;
        }
        // The pins become a lease: holds on pages before the end of the load are released, because no other load needs
        // them.
        let (passed, kept) = slot
            .held
            .drain(..)
            .partition(|held| held.position + held.pages <= end);
        slot.held = kept;
        let passed: Vec<HeldRun> = passed;
        for held in passed {
            pool.unpin(held.pin);
        }
        self.counts.loaded += pairs.len() as u64;
        self.counts.loaded_pages += u64::from(pages);

        self.next_id += 1;
        let op = OpId(self.next_id);
        let work = Work::Load {
            due,
            lease,
            missing: ranks,
            failed: 0,
            whole_pages: pages,
        };
        self.begin_op(op, Op::new(replica, work, due.deadline));
        let copy = Copy {
            op,
            engine: due.engine,
            direction: Direction::Load,
            pairs,
            request: due.id,
            after,
            record: None,
            deadline: due.deadline,
        };
        effects.push(Effect::Copy {
            replica,
            ranks,
            copy,
        });
        Ok(())
    }

    /// The replica of an engine that is served, and the geometry of its memory.
    pub(super) fn served(&self, engine: EngineId) -> Result<(Replica, &GroupGeometry), Refusal> {
        let found = self.workers.memory_of(engine);
        let fits =
            |geometry: &GroupGeometry| self.wanted_key().is_none_or(|key| key.is_for(geometry));
        found
            .filter(|(_, geometry)| fits(geometry))
            .ok_or_else(|| self.workers.not_ready())
    }

    pub(super) fn tokens_per_page(&self) -> u32 {
        self.workers
            .geometry(self.wanted_key())
            .map_or(0, |geometry| geometry.engine_page_tokens)
    }
}

/// Refuses pages that the engine does not have, and empty lists. Replicas may have different numbers of pages.
pub(super) fn check_device_pages(
    geometry: &GroupGeometry,
    field: &'static str,
    pages: &PageList,
) -> Result<(), Refusal> {
    if pages.0.is_empty() {
        let remedy = "name at least one page";
        return Err(Refusal::Invalid {
            field,
            value: "empty".to_owned(),
            remedy,
        });
    }
    match pages
        .0
        .iter()
        .find(|run| run.end() > u64::from(geometry.device_pages) || run.count == 0)
    {
        None => Ok(()),
        Some(run) => Err(Refusal::Invalid {
            field,
            value: format!("[{}, {}]", run.start, run.count),
            remedy: "name pages that the ranks registered",
        }),
    }
}

/// The arena pages of positions `first..end`, each run with the index of the held run that it lies in; `None` when some
/// page is not held.
fn covering(held: &[HeldRun], first: u32, end: u32) -> Option<Vec<(usize, PageRun)>> {
    let mut sources = Vec::new();
    let mut position = first;
    for (index, run) in held.iter().enumerate() {
        if position < end && (run.position..run.position + run.pages).contains(&position) {
            let count = (run.position + run.pages).min(end) - position;
            let start = run.arena_start + (position - run.position);
            sources.push((index, PageRun { start, count }));
            position += count;
        }
    }
    (position == end && first < end).then_some(sources)
}
