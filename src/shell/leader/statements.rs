//! Statements of workers about themselves, their memory and their tiers, and the core's verdicts on them.

use std::fmt;

use super::errors::to_error;
use super::{LeaderHost, LeaderShell, Origin};
use kvferry_core::{
    AttachRequest, AttachedDepot, LeaderEvent, MemoryStatement, Refusal, TiersStatement,
    WorkerMemory,
};
use kvferry_protocol::{
    Attach, AttachDepot, Attached as AttachedBody, ErrorBody, ErrorCode, Memory, MemoryAnswer,
    Message, Tiers, TiersAnswer,
};
use kvferry_types::{
    AttachId, DepotId, EngineId, Epoch, MemoryId, PerTier, TierId, TierLayout, TransferId, WorkerId,
};

impl<P: fmt::Debug> LeaderShell<P> {
    pub(super) fn attach(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        origin: Origin,
        worker: WorkerId,
        attach: Attach,
    ) {
        let id = AttachId(attach.attach);
        let named = attach.depots.iter().map(|depot| (depot.tier, *depot));
        let depots: PerTier<AttachDepot> = match by_tier("attach.depots.tier", named) {
            Ok(depots) => depots,
            Err(error) => return host.reply(origin.peer, origin.request, Message::Error(error)),
        };
        if let Some(peer) = self.workers.get_mut(&worker) {
            peer.attaching = Some((id, origin.request));
        }
        let depots = depots.iter().map(|(tier, depot)| {
            let attached = AttachedDepot {
                depot: DepotId(u128::from_be_bytes(depot.depot)),
                epoch: Epoch(depot.epoch),
            };
            (tier, attached)
        });
        let attached = AttachRequest {
            worker,
            ranks: attach.ranks,
            shards: attach.kv_shards,
            attach: id,
            depots: depots.collect(),
        };
        self.step(host, LeaderEvent::Attach(attached));
    }

    pub(super) fn memory_stated(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        origin: Origin,
        worker: WorkerId,
        stated: Memory,
    ) {
        let number = MemoryId(stated.number);
        let memory = stated.memory.map(|memory| {
            let rooms = memory
                .arena_pages
                .iter()
                .map(|room| (room.tier, room.pages));
            Ok(WorkerMemory {
                engine: EngineId(memory.engine),
                arena_pages: by_tier("memory.arena_pages.tier", rooms)?,
                geometry: memory.geometry,
            })
        });
        let memory = match memory.transpose() {
            Ok(memory) => memory,
            Err(error) => return host.reply(origin.peer, origin.request, Message::Error(error)),
        };
        if let Some(peer) = self.workers.get_mut(&worker) {
            peer.stating = Some((number, origin.request));
        }
        let stated = MemoryStatement {
            worker,
            number,
            memory,
        };
        self.step(host, LeaderEvent::Memory(stated));
    }

    pub(super) fn tiers_stated(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        origin: Origin,
        worker: WorkerId,
        stated: Tiers,
    ) {
        let number = MemoryId(stated.number);
        let pages = stated.pages.iter().map(|of| (of.tier, of.pages));
        let pages = match by_tier("pages.tier", pages) {
            Ok(pages) => pages,
            Err(error) => return host.reply(origin.peer, origin.request, Message::Error(error)),
        };
        if let Some(peer) = self.workers.get_mut(&worker) {
            peer.stating = Some((number, origin.request));
        }
        let layout = TierLayout {
            page_bytes: stated.page_bytes,
            layout_fingerprint: stated.layout_fingerprint,
        };
        let stated = TiersStatement {
            worker,
            number,
            layout,
            pages,
        };
        self.step(host, LeaderEvent::Tiers(stated));
    }

    pub(super) fn admit(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        worker: WorkerId,
        attach: AttachId,
        verdict: Result<TransferId, Refusal>,
    ) {
        let Some(known) = self.workers.get_mut(&worker) else {
            return;
        };
        let Some((_, correlation)) = known.attaching.take_if(|(id, _)| *id == attach) else {
            return;
        };
        let peer = known.holder.peer;
        match verdict {
            Ok(after) => {
                let body = AttachedBody {
                    attach: attach.0,
                    after: after.0,
                };
                host.reply(peer, correlation, Message::Attached(body));
            }
            Err(refusal) => {
                if let Some(left_out) = self.refused_workers.line(host.now()) {
                    tracing::error!(%refusal, left_out, "worker refused");
                }
                host.reply(peer, correlation, Message::Error(to_error(&refusal)));
                if let Refusal::EpochUsed { depot_epoch, .. } = refusal {
                    self.end_outdated(host, depot_epoch, refusal.to_string());
                }
            }
        }
    }

    pub(super) fn admit_memory(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        worker: WorkerId,
        number: MemoryId,
        verdict: Result<TransferId, Refusal>,
    ) {
        let Some(known) = self.workers.get_mut(&worker) else {
            return;
        };
        let Some((_, correlation)) = known.stating.take_if(|(id, _)| *id == number) else {
            return;
        };
        let answer = match verdict {
            Ok(after) => Message::MemoryAnswer(MemoryAnswer {
                number: number.0,
                after: after.0,
            }),
            Err(refusal) => {
                if let Some(left_out) = self.refused_workers.line(host.now()) {
                    tracing::error!(%refusal, left_out, "engine memory refused");
                }
                Message::Error(to_error(&refusal))
            }
        };
        host.reply(known.holder.peer, correlation, answer);
    }

    pub(super) fn admit_tiers(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        worker: WorkerId,
        number: MemoryId,
        verdict: Result<(), Refusal>,
    ) {
        let Some(known) = self.workers.get_mut(&worker) else {
            return;
        };
        let Some((_, correlation)) = known.stating.take_if(|(id, _)| *id == number) else {
            return;
        };
        let answer = match verdict {
            Ok(()) => Message::TiersAnswer(TiersAnswer { number: number.0 }),
            Err(refusal) => Message::Error(to_error(&refusal)),
        };
        host.reply(known.holder.peer, correlation, answer);
    }

    /// Ends this leader, because a depot has recorded its epoch or a later one. The successor takes an epoch after that
    /// one.
    fn end_outdated(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        depot_epoch: Epoch,
        why: String,
    ) {
        self.outdated = Some(match host.raise_epoch(depot_epoch) {
            Ok(()) => why,
            Err(error) => format!("{why}; but that epoch could not be noted: {error}"),
        });
    }
}

/// The values that a message gives for tiers. Refuses numbers that name no tier below the device, and repeated ones.
fn by_tier<T>(field: &str, values: impl Iterator<Item = (u8, T)>) -> Result<PerTier<T>, ErrorBody> {
    let mut all = PerTier::default();
    for (number, value) in values {
        let tier = TierId::of_number(number).filter(|tier| *tier != TierId::Device);
        let new = tier.is_some_and(|tier| all.insert(tier, value).is_none());
        if !new {
            let text = format!("{field} is {number}: name each of the tiers 2 to 4 once");
            return Err(ErrorBody::new(ErrorCode::Invalid, text));
        }
    }
    Ok(all)
}
