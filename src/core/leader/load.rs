//! Loads: copies from G2 into the engine's memory.

use std::collections::BTreeMap;

use crate::decision::Decision;
use crate::event::LeaderEffect;
use crate::pool::Pin;
use crate::refusal::Refusal;
use crate::session::PinnedRun;
use kvferry_types::{
    Answer, DeviceEnd, Edge, EngineId, GroupGeometry, LoadAnswer, Replica, Transfer,
};
use kvferry_types::{FragmentPair, PageCursor, PageList, RequestId, SlotId, TierId, TransferId};

use super::transfers::{Begun, TransferOutcome};
use super::{Leader, ReplyTo};

/// Runs of the arena that one load reads, at most. A load of more runs copies the first ones, and its answer gives the
/// number of pages: an order that names all of them could not be encoded, or not be decoded.
pub const LOAD_RUNS_MAX: usize = 65_536;

/// A load whose copy has not ended.
#[derive(Debug)]
struct PendingLoad {
    reply_to: ReplyTo,
    /// Pins on its source pages, released when the copy has ended.
    lease: Vec<Pin>,
}

/// The loads that wait for their copies.
#[derive(Debug, Default)]
pub(super) struct Loads(BTreeMap<TransferId, PendingLoad>);

impl Loads {
    /// Number of pins that loads hold.
    pub(super) fn pins(&self) -> usize {
        self.0.values().map(|load| load.lease.len()).sum()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

impl Leader {
    pub(super) fn load(
        &mut self,
        reply_to: ReplyTo,
        id: SlotId,
        first_page: u32,
        destination: &PageList,
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
        let (replica, geometry) = self.served(reply_to.engine)?;
        check_device_pages(geometry, "destination", destination)?;
        let (tokens_per_page, workers) =
            (geometry.engine_page_tokens, self.roster.loading(replica));
        let layout = geometry.layout_fingerprint;
        self.check_current(reply_to, id)?;
        let Some(pool) = self.tiers.serving_mut(TierId::Host) else {
            return Err(Refusal::Reading);
        };
        let slot = self.sessions.open(reply_to.engine).slot(id, layout)?;
        let pages = u32::try_from(destination.pages()).unwrap_or(u32::MAX);
        let end = first_page.saturating_add(pages);
        let not_pinned = Refusal::NotPinned {
            slot: id,
            first_page,
            end,
        };
        let mut sources = slot.covering(first_page, end).ok_or(not_pinned)?;
        // The engine computes the pages that are not loaded, as when a copy fails halfway.
        sources.truncate(LOAD_RUNS_MAX);
        let pages: u32 = sources.iter().map(|(_, run)| run.count).sum();
        let end = first_page + pages;

        let mut cursor = PageCursor::new(destination);
        let mut pairs = Vec::with_capacity(sources.len());
        let mut lease: Vec<Pin> = Vec::with_capacity(sources.len());
        let mut position = first_page;
        for (held, run) in sources {
            slot.decide(tokens_per_page, Decision::Loaded { position, run });
            pairs.push(FragmentPair {
                src: PageList::run(run.start, run.count),
                dst: cursor.take(run.count),
            });
            let PinnedRun {
                arena_start, block, ..
            } = slot.held()[held];
            lease.push(pool.pin(block, run.start + run.count - arena_start));
            position += run.count;
        }
        // The pins become a lease: holds on pages before the end of the load are released, because no other load needs
        // them.
        for held in slot.take_held_before(end) {
            pool.unpin(held.pin);
        }
        self.counts.loaded += pairs.len() as u64;
        self.counts.loaded_pages += u64::from(pages);

        self.next_id += 1;
        let transfer = TransferId(self.next_id);
        let begun = Begun {
            id: transfer,
            edge: Edge::LOAD,
            workers: workers.clone(),
            pages,
            deadline: reply_to.deadline,
        };
        self.transfers.begin(begun, &mut self.timers);
        self.loads
            .0
            .insert(transfer, PendingLoad { reply_to, lease });
        let device = DeviceEnd {
            engine: reply_to.engine,
            request: reply_to.id,
            after,
        };
        let transfer = Transfer {
            id: transfer,
            edge: Edge::LOAD,
            device: Some(device),
            pairs,
            record: None,
            deadline: reply_to.deadline,
        };
        effects.push(LeaderEffect::Transfer { workers, transfer });
        Ok(())
    }

    /// The copy of a load has ended: releases its lease and answers it.
    pub(super) fn load_ended(
        &mut self,
        id: TransferId,
        outcome: TransferOutcome,
        effects: &mut Vec<LeaderEffect>,
    ) {
        let Some(PendingLoad { reply_to, lease }) = self.loads.0.remove(&id) else {
            return;
        };
        if let Some(pool) = self.tiers.pool_mut(TierId::Host) {
            lease.into_iter().for_each(|pin| pool.unpin(pin));
        }
        let answer = match outcome.complete_pages {
            0 => Err(Refusal::CopyFailed(outcome.failed)),
            pages => Ok(Answer::Load(LoadAnswer { pages })),
        };
        self.counts.failed_copies += u64::from(outcome.failed > 0);
        self.answer(reply_to.engine, reply_to.id, answer, effects);
    }

    /// The replica of an engine that is served, and the geometry of its memory.
    pub(super) fn served(&self, engine: EngineId) -> Result<(Replica, &GroupGeometry), Refusal> {
        let found = self.roster.memory_of(engine);
        let fits = |geometry: &GroupGeometry| {
            self.tiers
                .wanted_key()
                .is_none_or(|key| key.is_for(geometry))
        };
        found
            .filter(|(_, geometry)| fits(geometry))
            .ok_or_else(|| self.roster.not_ready())
    }

    pub(super) fn tokens_per_page(&self) -> u32 {
        self.roster
            .geometry(self.tiers.wanted_key())
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
