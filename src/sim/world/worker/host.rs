//! Environment of a worker's shell: everything that the simulated process provides to it.

use std::collections::BTreeMap;
use std::time::Duration;

use super::super::client::SimClient;
use super::super::saboteur::Lie;
use super::super::server::{SimServer, connection};
use super::super::storage::{Hold, SimDepot, Storage};
use super::super::{SimContext, SimEvent};
use super::copies::RunningCopies;
use super::disk::DiskSide;
use kvferry_protocol::{ErrorBody, ErrorCode, FlushTier, Inventory, Message, ReadInventory};
use kvferry_shell::{Fatal, HolderPeers, Registering, Unlisted, WorkerHost};
use kvferry_types::{
    DepotId, Edge, EngineId, Epoch, LinkId, MemoryGeometry, PageRun, PeerId, PerTier, Record,
    Registration, RequestId, Scope, Stored, TierId, TierLayout, Time, Transfer, TransferId,
    WorkerId,
};

/// A depot that is being divided for a reading, entry by entry. The process receives nothing meanwhile, and continues
/// even if its connection has closed.
#[derive(Debug)]
pub(super) struct Dividing {
    link: LinkId,
    order: RequestId,
    read: ReadInventory,
    /// Tier and id of the depot that is divided. Another one may have replaced it meanwhile.
    depot: (TierId, DepotId),
    /// First entry that is not cleared yet.
    next: u32,
    /// Time that one slice takes.
    pace: Duration,
}

/// Most slices in which a depot is divided.
const DIVIDE_SLICES: u32 = 4;

/// State of a worker's process beside its shell.
#[derive(Debug)]
pub(super) struct Parts {
    id: WorkerId,
    incarnation: u32,
    pub(super) leader: SimClient,
    pub(super) server: SimServer,
    pub(super) copies: RunningCopies,
    pub(super) disk: DiskSide,
    pub(super) dividing: Option<Dividing>,
    /// Registrations whose memory is being opened.
    pub(super) opening: BTreeMap<u64, Registering>,
    openings: u64,
    requests: u64,
    /// Connections that the shell has closed, and of which it has not been notified yet.
    pub(super) disconnected: Vec<PeerId>,
}

impl Parts {
    pub(super) fn new(
        (id, incarnation): (WorkerId, u32),
        leader: SimClient,
        server: SimServer,
    ) -> Self {
        Self {
            id,
            incarnation,
            leader,
            server,
            copies: RunningCopies::new(id, incarnation),
            disk: DiskSide::new(id, incarnation),
            dividing: None,
            opening: BTreeMap::new(),
            openings: 0,
            requests: 0,
            disconnected: Vec::new(),
        }
    }
}

/// Environment of the worker's shell while it handles one event.
pub(super) struct Host<'a> {
    pub(super) env: &'a mut SimContext,
    pub(super) parts: &'a mut Parts,
}

impl Host<'_> {
    /// Index of this worker's depot.
    fn shard(&self) -> usize {
        self.env.depot_of(self.parts.id.rank)
    }

    /// Schedules an event of this worker after `wait`.
    fn later(&mut self, wait: Duration, event: impl FnOnce(WorkerId, u32) -> SimEvent) {
        let event = event(self.parts.id, self.parts.incarnation);
        let at = self.env.now() + wait;
        self.env.queue.push(at, event);
    }

    fn divide_later(&mut self) {
        if let Some(pace) = self.parts.dividing.as_ref().map(|dividing| dividing.pace) {
            self.later(pace, |worker, incarnation| SimEvent::Divide {
                worker,
                incarnation,
            });
        }
    }

    /// Clears one slice of the entries. After the last slice, sends the inventory.
    pub(super) fn divide(&mut self) {
        let shard = self.shard();
        let Some(dividing) = &mut self.parts.dividing else {
            return;
        };
        let shape = SimContext::shape(dividing.read.page_bytes, [0; 16]);
        let (tier, id) = dividing.depot;
        let depot = self.env.depot(tier, shard);
        if let Some(depot) = depot.filter(|depot| depot.id() == id) {
            let pages = depot.pages(shape);
            let end = dividing.next.saturating_add(pages / DIVIDE_SLICES + 1);
            let end = end.min(pages);
            (dividing.next..end).for_each(|page| depot.clear(page));
            dividing.next = end;
            if end == pages {
                depot.divided(shape);
            }
            self.env.decided = true;
            if end < pages {
                return self.divide_later();
            }
        }
        if let Some(Dividing {
            link,
            order,
            read,
            depot,
            ..
        }) = self.parts.dividing.take()
        {
            self.send_inventory(link, order, depot.0, &read);
        }
    }

    /// Begins a move from or to the disk. Returns false if it cannot start: its end is reported.
    fn begin_on_disk(&mut self, copy: &Transfer) -> bool {
        let shape = SimContext::shape(copy.page_bytes, [0; 16]);
        let shard = self.shard();
        let divided = match copy.edge.touches(TierId::Host) {
            true => self
                .env
                .depot(TierId::Host, shard)
                .and_then(|depot| depot.holds()),
            false => Some(shape.cells),
        };
        let page_bytes = match divided == Some(shape.cells) {
            true => copy.page_bytes,
            false => 0,
        };
        let of_disk = copy.pairs.iter().flat_map(|pair| match copy.edge.to {
            TierId::Disk => &pair.dst.0,
            _ => &pair.src.0,
        });
        let end = of_disk.map(|run| run.end()).max().unwrap_or(0);
        self.parts.disk.begin(self.env, copy.id, (page_bytes, end))
    }

    fn send_inventory(
        &mut self,
        link: LinkId,
        order: RequestId,
        tier: TierId,
        read: &ReadInventory,
    ) {
        let shape = SimContext::shape(read.page_bytes, [0; 16]);
        let shard = self.shard();
        let part = self.env.setup.inventory_pages;
        let depot = self.env.depot(tier, shard);
        let depot = depot.filter(|depot| depot.holds() == Some(shape.cells));
        let message = if let Some(depot) = depot {
            let end = read.from.saturating_add(part);
            let mut pages = depot.listed();
            pages.retain(|page| (read.from..end).contains(&page.page));
            let next = (end < depot.pages(shape)).then_some(end);
            Message::Inventory(Inventory::new(read, next, &pages))
        } else {
            Message::Error(ErrorBody::new(ErrorCode::Invalid, "divided otherwise"))
        };
        self.reply_to_leader(link, order, message);
    }
}

impl HolderPeers for Host<'_> {
    type Process = i32;

    fn is_live(&self, peer: PeerId) -> bool {
        let now = self.env.now();
        self.parts.server.is_live(connection(peer), now)
    }

    fn open_process(&mut self, pid: i32) -> Option<i32> {
        self.env.pids.lives(pid).then_some(pid)
    }

    fn has_ended(&self, process: &i32) -> bool {
        !self.env.pids.lives(*process)
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.parts.server.close(self.env, connection(peer));
        self.parts.disconnected.push(peer);
    }
}

impl WorkerHost for Host<'_> {
    /// The engine that owns the memory.
    type Memory = EngineId;

    fn now(&self) -> Time {
        self.env.now()
    }

    fn request_leader(&mut self, link: LinkId, message: Message, _: Duration) -> RequestId {
        self.parts.requests += 1;
        let id = RequestId(self.parts.requests);
        self.parts.leader.request_on(self.env, link, id, message);
        id
    }

    fn reply_to_leader(&mut self, link: LinkId, order: RequestId, message: Message) {
        self.parts.leader.reply(self.env, link, order, message);
    }

    fn reply(&mut self, peer: PeerId, request: RequestId, message: Message) {
        let id = connection(peer);
        self.parts.server.reply(self.env, id, request, message);
    }

    fn open(
        &mut self,
        registering: Registering,
        _: Registration,
        _: bool,
    ) -> Result<(), ErrorBody> {
        if let Some(why) = &registering.not_served {
            self.env.violated(format!("a worker does not serve: {why}"));
        }
        self.parts.openings += 1;
        let opening = self.parts.openings;
        self.parts.opening.insert(opening, registering);
        let wait = Duration::from_micros(self.env.rng.u64(5..2000));
        self.later(wait, |worker, incarnation| SimEvent::Opened {
            worker,
            incarnation,
            opening,
        });
        Ok(())
    }

    fn discard(&mut self, _: Registration) {}

    fn geometry(&self, memory: &EngineId) -> MemoryGeometry {
        self.env.geometry(*memory)
    }

    fn close(&mut self, _: EngineId, _: EngineId) {}

    fn reply_when_closed(&mut self, peer: PeerId, request: RequestId, _: EngineId, _: Message) {
        let text = format!("{peer} takes its memory back by {request}");
        self.env.violated(text);
    }

    /// Not supported here: ranks report by message what they have written.
    fn watch_timeline(&mut self, _: &EngineId, _: EngineId, _: RequestId) -> bool {
        false
    }

    fn written(&mut self, _: &EngineId, _: RequestId) {}

    fn depots(&self) -> PerTier<DepotId> {
        let shard = self.shard();
        let disk = self.env.disks.get(shard);
        let disk = disk.map(|disk| (TierId::Disk, disk.id()));
        let tiers = self.env.depots.iter();
        let depots = tiers.map(|(tier, depots)| (tier, depots[shard].id()));
        depots.chain(disk).collect()
    }

    fn last_reader(&self, tier: TierId) -> Result<Epoch, Fatal> {
        if tier == TierId::Disk {
            return Ok(self.parts.disk.last_epoch(self.env));
        }
        let depots = self.env.depots.get(tier);
        Ok(depots.map_or(Epoch(0), |depots| depots[self.shard()].last_reader()))
    }

    fn arena_pages(&self, tier: TierId, page_bytes: u64) -> u32 {
        if tier == TierId::Disk {
            return self.parts.disk.pages(self.env, page_bytes);
        }
        let depots = self.env.depots.get(tier);
        let shape = SimContext::shape(page_bytes, [0; 16]);
        depots.map_or(0, |depots| depots[self.shard()].pages(shape))
    }

    fn tier_layout(&self) -> Option<TierLayout> {
        self.parts.disk.layout()
    }

    fn prepare_tiers(&mut self, layout: Option<TierLayout>) {
        let Parts { disk, copies, .. } = &mut *self.parts;
        if self.env.disks.is_empty() {
            return;
        }
        match layout {
            Some(layout) => disk.want(self.env, copies, layout),
            None => disk.leave(self.env, copies),
        }
    }

    fn read_inventory(
        &mut self,
        link: LinkId,
        order: RequestId,
        epoch: Epoch,
        read: ReadInventory,
    ) -> Result<(), Fatal> {
        let shape = SimContext::shape(read.page_bytes, [0; 16]);
        let shard = self.shard();
        let disk = self.env.disks.get(shard);
        if disk.is_some_and(|disk| disk.id().0.to_be_bytes() == read.depot) {
            let part = self.parts.disk.part(self.env, epoch, &read);
            let message = part.map_or_else(Message::Error, Message::Inventory);
            self.reply_to_leader(link, order, message);
            return Ok(());
        }
        let named = |depots: &Vec<SimDepot>| depots[shard].id().0.to_be_bytes() == read.depot;
        let tier = {
            let mut tiers = self.env.depots.iter();
            tiers
                .find(|(_, depots)| named(depots))
                .map(|(tier, _)| tier)
        };
        let Some(tier) = tier else {
            return Ok(());
        };
        let Some(depot) = self.env.depot(tier, shard) else {
            return Ok(());
        };
        match depot.hold(shape, (epoch, read.read_id)) {
            Hold::Held => self.send_inventory(link, order, tier, &read),
            Hold::Divide => {
                let depot = (tier, depot.id());
                let time = self.env.setup.divide_time.mul_f64(self.env.rng.f64());
                self.parts.dividing = Some(Dividing {
                    link,
                    order,
                    read,
                    depot,
                    next: 0,
                    pace: time / DIVIDE_SLICES,
                });
                self.env.divides.push(self.parts.id);
                self.divide_later();
            }
            Hold::Late => {
                let error = ErrorBody::new(ErrorCode::Invalid, "a later reading has begun");
                self.reply_to_leader(link, order, Message::Error(error));
            }
        }
        Ok(())
    }

    fn unlist(&mut self, tier: TierId, run: PageRun) -> Result<(), Fatal> {
        if self.env.lies(Lie::KeepRecord) {
            return Ok(());
        }
        if tier == TierId::Disk {
            self.parts.disk.unlist(self.env, run);
            return Ok(());
        }
        let shard = self.shard();
        if let Some(depot) = self.env.depot(tier, shard) {
            depot.unlist_run(run);
        }
        Ok(())
    }

    fn flush_tier(&mut self, link: LinkId, order: RequestId, flush: FlushTier) {
        self.parts.disk.flush(self.env, (link, order, flush.flush));
    }

    fn unlist_scope(
        &mut self,
        tier: TierId,
        scope: &Scope,
        through: Stored,
        from: u32,
    ) -> Result<Unlisted, Fatal> {
        if tier == TierId::Disk {
            return Ok(self.parts.disk.reset(self.env, scope, through));
        }
        let shard = self.shard();
        let end = from.saturating_add(self.env.setup.inventory_pages);
        let depot = self.env.depot(tier, shard);
        let next = depot.and_then(|depot| depot.invalidate_scope(scope, through, from..end));
        Ok(next.map_or(Unlisted::Done, Unlisted::Next))
    }

    fn invalidate_later(&mut self) -> Result<(), Fatal> {
        let wait = Duration::from_micros(self.env.rng.u64(1..20));
        self.later(wait, |worker, incarnation| SimEvent::Invalidate {
            worker,
            incarnation,
        });
        Ok(())
    }

    fn list(&mut self, tier: TierId, record: &Record) {
        if tier == TierId::Disk {
            return self.parts.disk.list(self.env, record);
        }
        let shard = self.shard();
        if let Some(depot) = self.env.depot(tier, shard) {
            depot.list(record);
        }
    }

    fn start(
        &mut self,
        _: Edge,
        copies: Vec<(Transfer, Time)>,
        memory: Option<&EngineId>,
    ) -> Result<(), Fatal> {
        let copies: Vec<Transfer> = copies.into_iter().map(|(copy, _)| copy).collect();
        if self.env.lies(Lie::RecordEarly) {
            let records = copies.iter();
            let records = records.filter_map(|copy| Some((copy.edge.to, copy.record.as_ref()?)));
            records.for_each(|(tier, record)| self.list(tier, record));
        }
        for copy in copies {
            let engine = copy.device.map(|device| device.engine);
            if engine.is_some_and(|engine| Some(&engine) != memory) {
                self.env.violated(format!(
                    "{} of {engine:?} was started with the memory of {memory:?}",
                    copy.id
                ));
            }
            if copy.edge.touches(TierId::Disk) && !self.begin_on_disk(&copy) {
                continue;
            }
            self.parts.copies.start(self.env, copy);
        }
        Ok(())
    }

    fn stop(&mut self, transfer: TransferId) -> Result<(), Fatal> {
        self.parts.copies.stop(transfer);
        Ok(())
    }

    fn invalid_copy(&mut self, transfer: TransferId, problem: &str) {
        self.env.violated(format!(
            "{transfer} was ordered with what it may not name: {problem}"
        ));
    }

    fn probe(&mut self) -> Result<(), String> {
        Err("no operator is part of a world".to_owned())
    }

    fn report_problem(&mut self, _: &str) {}
}
