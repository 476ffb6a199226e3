//! Sequential simulation: one prompt after another, in no time. A request and every copy that it caused end before the
//! next request.
//!
//! Leader and scheduler are the state machines of the live system; copies end at once on every rank.

use std::collections::BTreeMap;

use crate::ReplayError;
use kvferry_core::{AttachRequest, AttachedDepot, Leader, LeaderEffect, LeaderEvent, WorkerMemory};
use kvferry_types::{
    AttachId, DepotId, Direction, EndedCopy, EngineId, Epoch, MemoryGeometry, PageRecord, PerTier,
    Rank, Record, Replica, TierId, Time, WorkerId,
};
use kvferry_workload::scheduler::{Action, Prompt, Scheduler, Served};

/// Bits of a depot's id that hold its shard; those above hold its tier.
const DEPOT_TIER_SHIFT: u32 = 64;

/// Id of the only engine.
pub(super) const ENGINE: EngineId = EngineId([0; 16]);

/// The pages that the disk of each shard lists, which are the same.
#[derive(Debug, Clone, Default)]
struct ListedPages(BTreeMap<u32, PageRecord>);

impl ListedPages {
    /// Removes pages that will be overwritten, and those behind them in their blocks.
    fn unlist(&mut self, pages: impl Iterator<Item = u32>) {
        for page in pages {
            let mut removed = self.0.remove(&page);
            while let Some(record) = removed {
                let behind = record.page + 1;
                let next = self.0.get(&behind);
                let same = next.is_some_and(|next| next.block_start == record.block_start);
                removed = same.then(|| self.0.remove(&behind)).flatten();
            }
        }
    }

    fn list(&mut self, record: &Record) {
        let pages = record.pages().map(|record| (record.page, record));
        self.0.extend(pages);
    }
}

/// Attaches an engine of `ranks` equal ranks, with `arena_pages` of each tier below the device on each, to a leader. The
/// depots are new.
pub(super) fn attach(
    leader: &mut Leader,
    ranks: u16,
    geometry: &MemoryGeometry,
    arena_pages: &PerTier<u32>,
) -> Result<(), ReplayError> {
    attach_to(
        leader,
        ranks,
        geometry,
        arena_pages,
        &ListedPages::default(),
    )
}

/// Like [`attach`], with a disk that lists pages.
fn attach_to(
    leader: &mut Leader,
    ranks: u16,
    geometry: &MemoryGeometry,
    arena_pages: &PerTier<u32>,
    listed: &ListedPages,
) -> Result<(), ReplayError> {
    let mut effects = Vec::new();
    leader.step(Time(0), LeaderEvent::EngineOpened(ENGINE), &mut effects);
    for rank in (0..ranks).map(Rank) {
        let replica = Replica(0);
        let shard = u128::from(leader.sharding().of(rank).0);
        let depot = |tier: TierId| AttachedDepot {
            depot: DepotId(
                shard + (u128::from(tier.number() - TierId::Host.number()) << DEPOT_TIER_SHIFT),
            ),
            epoch: Epoch(0),
        };
        let attached = AttachRequest {
            worker: WorkerId { replica, rank },
            ranks: leader.sharding().ranks(),
            shards: leader.sharding().shards(),
            attach: AttachId(1),
            depots: arena_pages
                .tiers()
                .map(|tier| (tier, depot(tier)))
                .collect(),
        };
        let memory = WorkerMemory {
            engine: ENGINE,
            geometry: geometry.clone(),
            arena_pages: arena_pages.clone(),
        };
        for event in LeaderEvent::arrival(attached, memory) {
            leader.step(Time(0), event, &mut effects);
        }
    }
    let mut next = 0;
    while let Some(effect) = effects.get(next).cloned() {
        next += 1;
        match effect {
            LeaderEffect::Admit {
                verdict: Err(refusal),
                ..
            }
            | LeaderEffect::AdmitMemory {
                verdict: Err(refusal),
                ..
            } => return Err(refusal.into()),
            LeaderEffect::ReadInventory {
                worker,
                depot,
                read_id: reading,
                from,
                ..
            } => {
                let event = LeaderEvent::Inventory {
                    worker,
                    depot,
                    read_id: reading,
                    from,
                    next: None,
                    // Host memory is new.
                    records: match depot.0 >> DEPOT_TIER_SHIFT {
                        0 => Vec::new(),
                        _ => listed.0.values().copied().collect(),
                    },
                };
                leader.step(Time(0), event, &mut effects);
            }
            _ => {}
        }
    }
    Ok(())
}

/// A leader and an engine, connected directly.
#[derive(Debug)]
pub struct Sequential {
    leader: Leader,
    scheduler: Scheduler,
    ranks: u16,
    geometry: MemoryGeometry,
    arena_pages: PerTier<u32>,
    listed: ListedPages,
    /// Bytes of a page of each group.
    page_bytes: Vec<u64>,
    /// Bytes that all ranks together have stored and loaded.
    stored_bytes: u64,
    loaded_bytes: u64,
    effects: Vec<LeaderEffect>,
    actions: Vec<Action>,
}

impl Sequential {
    /// Attaches `ranks` equal ranks with `arena_pages` each to the leader.
    pub fn new(
        mut leader: Leader,
        scheduler: Scheduler,
        ranks: u16,
        geometry: &MemoryGeometry,
        arena_pages: &PerTier<u32>,
    ) -> Result<Self, ReplayError> {
        attach(&mut leader, ranks, geometry, arena_pages)?;
        Ok(Self {
            leader,
            scheduler,
            ranks,
            geometry: geometry.clone(),
            arena_pages: arena_pages.clone(),
            listed: ListedPages::default(),
            page_bytes: geometry
                .groups
                .iter()
                .map(|group| group.page_bytes)
                .collect(),
            stored_bytes: 0,
            loaded_bytes: 0,
            effects: Vec::new(),
            actions: Vec::new(),
        })
    }

    /// Ends the leader and the engine, and starts new ones with the pages that the disk lists: those of the engine and
    /// of host memory are lost. Returns the leader that has ended.
    ///
    /// # Errors
    /// The new leader refuses the engine.
    pub fn restart(
        &mut self,
        mut leader: Leader,
        scheduler: Scheduler,
    ) -> Result<Leader, ReplayError> {
        attach_to(
            &mut leader,
            self.ranks,
            &self.geometry,
            &self.arena_pages,
            &self.listed,
        )?;
        self.scheduler = scheduler;
        Ok(std::mem::replace(&mut self.leader, leader))
    }

    /// Serves a prompt to its end. Fails when the prompt does not fit into the engine's memory.
    pub fn serve(&mut self, prompt: Prompt) -> Result<Served, ReplayError> {
        let mut served = None;
        let mut actions = std::mem::take(&mut self.actions);
        self.scheduler.arrive(prompt, &mut actions);
        let mut next = 0;
        while let Some(action) = actions.get_mut(next) {
            next += 1;
            match std::mem::replace(action, Action::Idle) {
                Action::Idle | Action::Abandon { .. } => {}
                Action::Done(done) => served = Some(done),
                Action::Work { slot, kind, .. } => self.scheduler.worked(slot, kind, &mut actions),
                Action::Send { id, request } => {
                    let event = LeaderEvent::Request {
                        engine: ENGINE,
                        id,
                        deadline: Time::NEVER,
                        request,
                    };
                    self.leader.step(Time(0), event, &mut self.effects);
                    self.carry_out(&mut actions);
                }
            }
        }
        actions.clear();
        self.actions = actions;
        served.ok_or(ReplayError::PromptTooLarge)
    }

    /// The leader, to read its counters.
    pub fn leader(&self) -> &Leader {
        &self.leader
    }

    /// The leader, to read its change log.
    pub fn leader_mut(&mut self) -> &mut Leader {
        &mut self.leader
    }

    /// Pages that the engine holds: zero between prompts.
    pub fn held_pages(&self) -> u32 {
        self.scheduler.held_pages()
    }

    /// Bytes that were copied out of the engine's memory, on all ranks together.
    pub fn stored_bytes(&self) -> u64 {
        self.stored_bytes
    }

    /// Bytes that were copied into the engine's memory, on all ranks together.
    pub fn loaded_bytes(&self) -> u64 {
        self.loaded_bytes
    }

    /// Carries out the effects of the leader: copies end at once, complete on every rank, and answers reach the engine.
    fn carry_out(&mut self, actions: &mut Vec<Action>) {
        let mut next = 0;
        while next < self.effects.len() {
            match self.effects[next].clone() {
                LeaderEffect::Answer { id, answer, .. } => {
                    self.scheduler.answered(id, answer.ok(), actions);
                }
                LeaderEffect::Transfer {
                    workers,
                    transfer: copy,
                } => {
                    let ended = EndedCopy::complete(copy.id);
                    let to_disk = copy.edge.to == TierId::Disk;
                    if to_disk {
                        let pages = copy.pairs.iter().flat_map(|pair| pair.dst.iter_pages());
                        self.listed.unlist(pages);
                    }
                    if let Some(record) = copy.record.as_ref().filter(|_| to_disk) {
                        self.listed.list(record);
                    }
                    let pages: u64 = copy.pairs.iter().map(|pair| pair.src.pages()).sum();
                    let group = copy.device.map_or(0, |device| usize::from(device.group.0));
                    let page_bytes = self.page_bytes.get(group).copied().unwrap_or(0);
                    for worker in workers {
                        let bytes = pages * page_bytes;
                        match copy.edge.direction() {
                            Some(Direction::Load) => self.loaded_bytes += bytes,
                            Some(Direction::Store) => self.stored_bytes += bytes,
                            None => {}
                        }
                        let epoch = self.leader.epoch();
                        let event = LeaderEvent::Ended {
                            worker,
                            epoch,
                            copies: vec![ended],
                        };
                        self.leader.step(Time(0), event, &mut self.effects);
                    }
                }
                LeaderEffect::Admit { .. }
                | LeaderEffect::AdmitMemory { .. }
                | LeaderEffect::AdmitTiers { .. }
                | LeaderEffect::Cancel { .. }
                | LeaderEffect::Invalidate { .. }
                | LeaderEffect::OpenTiers { .. }
                | LeaderEffect::FlushTier { .. }
                | LeaderEffect::ReadInventory { .. }
                | LeaderEffect::FenceWorker(_) => {}
            }
            next += 1;
        }
        self.effects.clear();
    }
}
