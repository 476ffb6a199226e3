//! The live process of a worker: connections, the depot, engine memory, a GPU, and copies on threads of their own.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ractor::ActorRef;

use super::gpu_state::GpuState;
use super::{UNPROVEN, WorkerMessage};
use crate::SetLog;
use crate::depot::DepotProgress;
use crate::disk::{Disk, ResetProgress};
use crate::gpu::EngineSide;
use crate::probe::ProbeMemory;
use crate::processes::{self, Process};
use crate::readiness::ReadinessReporter;
use crate::transfer::{CopyBatch, CopyThreads};
use kvferry_cuda::Announced;
use kvferry_memory::{BufferError, Depot, DropWaiter, WaitingLoads};
use kvferry_protocol::limits::PAGE_RECORDS_MAX;
use kvferry_protocol::{
    Connections, ErrorBody, ErrorCode, FlushTier, Inventory, Message, ReadInventory,
};
use kvferry_shell::{
    Fatal, HolderPeers, INVALIDATE_SLICE_ENTRIES, Registering, Unlisted, WorkerHost,
};
use kvferry_transport::{Client, Clock, FdReceiver, LinkId, PeerId, Replier, by_name};
use kvferry_types::{
    DepotId, Direction, Edge, EndedCopy, EngineId, Epoch, GpuCopy, MemoryGeometry, PageRun,
    PerTier, Record, Registration, RequestId, Scope, Stored, TierId, TierLayout, Time, Transfer,
    TransferId, WorkerId,
};

/// The live implementation of [`WorkerHost`].
pub(super) struct Host {
    pub(super) myself: ActorRef<WorkerMessage>,
    pub(super) worker: WorkerId,
    pub(super) clock: Clock,
    pub(super) replier: Replier,
    pub(super) fds: Arc<FdReceiver>,
    pub(super) leader: Client,
    pub(super) copies: CopyThreads,
    pub(super) waiting: WaitingLoads,
    pub(super) progress: Arc<DepotProgress>,
    pub(super) readiness: ReadinessReporter,
    pub(super) depot: Option<Arc<Depot>>,
    pub(super) prefaulted: bool,
    /// The disk, with the setting.
    pub(super) disk: Option<Disk>,
    /// Engine memory that is being closed, with its engine.
    pub(super) closing: Vec<(EngineId, DropWaiter)>,
    /// True once the log has a warning about memory without proofs.
    pub(super) proofs_logged: bool,
    pub(super) gpu: GpuState,
    pub(super) gpu_copy: GpuCopy,
    pub(super) gpu_idle: Duration,
    /// How often ranks have requested a GPU.
    pub(super) gpu_uses: u64,
    /// Changes the filter of the log.
    pub(super) set_log: Option<SetLog>,
    /// Memory of the worker's own for probes, after the first one.
    pub(super) probe: Option<ProbeMemory>,
    /// Number of this worker among those that may share the depot.
    pub(super) number: usize,
}

impl Host {
    /// Logs that memory was not opened because its bytes differ from the engine's proofs. The rank registers again by
    /// itself.
    pub(super) fn log_unproven(&self, error: &ErrorBody) {
        if error.code() == ErrorCode::NotReady
            && let Some(left_out) = UNPROVEN.line()
        {
            let why = &error.message;
            tracing::warn!(worker = %self.worker, why, left_out, "engine memory is not proven");
        }
    }

    /// Changes the inventory. Does nothing for a depot without pages.
    fn inventory<T: Default>(
        &self,
        write: impl FnOnce(&Depot, u64) -> Result<T, BufferError>,
    ) -> Result<T, BufferError> {
        let Some(depot) = &self.depot else {
            return Ok(T::default());
        };
        match depot.page_bytes()? {
            Some(page_bytes) => write(depot, page_bytes),
            None => Ok(T::default()),
        }
    }

    /// A part of the inventory of the disk. Without an open set nothing is listed.
    fn part_of_disk(&mut self, epoch: Epoch, read: &ReadInventory) -> Result<Inventory, ErrorBody> {
        let none = || ErrorBody::new(ErrorCode::NotReady, "the disk is not open");
        let disk = self.disk.as_mut().ok_or_else(none)?;
        if !disk.begin_reading((epoch, read.read_id)) {
            let text = "a later reading of this depot has begun";
            return Err(ErrorBody::new(ErrorCode::Invalid, text));
        }
        let set = disk.set(read.page_bytes).ok_or_else(none)?;
        let pages = PAGE_RECORDS_MAX as u32;
        let records = set.records(read.from, pages);
        let end = read.from.saturating_add(pages);
        let next = (end < set.capacity_pages()).then_some(end);
        Ok(Inventory::new(read, next, &records))
    }

    /// Starts moves between host memory and the disk. One that cannot start has ended.
    fn start_moves(&mut self, moves: Vec<(Transfer, Time)>, depot: &Arc<Depot>) {
        let mut ended = Vec::new();
        for (copy, _) in moves {
            let id = copy.id;
            let sized = depot.page_bytes().ok().flatten() == Some(copy.page_bytes);
            let disk = self.disk.as_mut().filter(|_| sized);
            if !disk.is_some_and(|disk| disk.copy(copy, Arc::clone(depot))) {
                tracing::debug!(transfer = %id, "the disk is not open, takes no writes or has fewer pages: not moved");
                ended.push(EndedCopy::failed(id));
            }
        }
        if !ended.is_empty() {
            super::cast(&self.myself, WorkerMessage::Ended(ended));
        }
    }

    fn part_of_inventory(
        &self,
        epoch: Epoch,
        read: &ReadInventory,
    ) -> Result<Result<Inventory, ErrorBody>, BufferError> {
        let Some(depot) = &self.depot else {
            let error = ErrorBody::new(ErrorCode::Invalid, "this worker has no depot");
            return Ok(Err(error));
        };
        if !depot.hold_pages_for(read.page_bytes, (epoch, read.read_id))? {
            let text = "a later reading of this depot has begun";
            return Ok(Err(ErrorBody::new(ErrorCode::Invalid, text)));
        }
        let pages = PAGE_RECORDS_MAX as u32;
        let records = depot
            .hold_pages_of(read.page_bytes)
            .and_then(|()| depot.read_inventory(read.page_bytes, read.from, pages));
        let records = match records {
            Ok(records) => records,
            Err(error) => {
                tracing::error!(worker = %self.worker, %error, "the inventory cannot be read");
                return Ok(Err(ErrorBody::new(ErrorCode::Internal, error.to_string())));
            }
        };
        let end = read.from.saturating_add(pages);
        let next = (end < depot.arena_pages(read.page_bytes)).then_some(end);
        Ok(Ok(Inventory::new(read, next, &records)))
    }
}

impl HolderPeers for Host {
    type Process = Process;

    fn is_live(&self, peer: PeerId) -> bool {
        self.replier.is_live(peer)
    }

    fn open_process(&mut self, pid: i32) -> Option<Process> {
        processes::open(pid).ok()
    }

    fn has_ended(&self, process: &Process) -> bool {
        processes::has_ended(process)
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.replier.disconnect(peer);
    }

    fn connections(&self) -> Connections {
        self.replier.connections()
    }

    fn set_log(&mut self, filter: &str) -> Result<String, String> {
        let none = || Err("this process lets nobody change its log".to_owned());
        self.set_log.map_or_else(none, |set_log| set_log(filter))
    }
}

impl WorkerHost for Host {
    type Memory = EngineSide;

    fn now(&self) -> Time {
        self.clock.now()
    }

    fn request_leader(&mut self, link: LinkId, message: Message, timeout: Duration) -> RequestId {
        self.leader.request_in_order(link, message, timeout)
    }

    fn refused_orders(&self) -> BTreeMap<String, u64> {
        by_name(&self.leader.refused())
    }

    fn reply_to_leader(&mut self, link: LinkId, order: RequestId, message: Message) {
        self.leader.reply(link, order, message);
    }

    fn reply(&mut self, peer: PeerId, request: RequestId, message: Message) {
        self.replier.reply(peer, request, message);
    }

    fn open(
        &mut self,
        registering: Registering,
        registration: Registration,
        serves: bool,
    ) -> Result<(), ErrorBody> {
        self.open_memory(registering, registration, serves)
    }

    fn discard(&mut self, registration: Registration) {
        self.drop_tickets(&registration);
    }

    fn geometry(&self, memory: &EngineSide) -> MemoryGeometry {
        memory.geometry().clone()
    }

    fn close(&mut self, engine: EngineId, memory: EngineSide) {
        self.close_memory(engine, memory);
    }

    fn reply_when_closed(
        &mut self,
        peer: PeerId,
        request: RequestId,
        engine: EngineId,
        answer: Message,
    ) {
        self.answer_when_closed(peer, request, engine, answer);
    }

    fn watch_timeline(
        &mut self,
        memory: &EngineSide,
        engine: EngineId,
        through: RequestId,
    ) -> bool {
        Self::announced(memory, Announced { engine, through })
    }

    fn written(&mut self, memory: &EngineSide, through: RequestId) {
        Self::announce(memory, through);
    }

    fn depots(&self) -> PerTier<DepotId> {
        let Some(depot) = &self.depot else {
            return PerTier::default();
        };
        let disk = self.disk.iter().map(|disk| (TierId::Disk, disk.depot()));
        std::iter::once((TierId::Host, depot.id()))
            .chain(disk)
            .collect()
    }

    fn last_reader(&self, tier: TierId) -> Result<Epoch, Fatal> {
        if tier == TierId::Disk {
            return Ok(self.disk.as_ref().map_or(Epoch(0), Disk::last_epoch));
        }
        let last = self.depot.as_ref().map(|depot| depot.last_reading());
        Ok(last.transpose()?.map_or(Epoch(0), |(epoch, _)| epoch))
    }

    fn arena_pages(&self, tier: TierId, page_bytes: u64) -> u32 {
        if tier == TierId::Disk {
            let set = self.disk.as_ref().and_then(|disk| disk.set(page_bytes));
            return set.map_or(0, |set| set.capacity_pages());
        }
        let depot = self.depot.as_ref().filter(|_| tier == TierId::Host);
        depot.map_or(0, |depot| depot.arena_pages(page_bytes))
    }

    fn prepare_tiers(&mut self, layout: Option<TierLayout>) {
        let Some(disk) = &mut self.disk else {
            return;
        };
        match layout {
            Some(layout) => disk.want(layout),
            None => disk.leave(),
        }
    }

    fn tier_layout(&self) -> Option<TierLayout> {
        self.disk.as_ref().and_then(Disk::layout)
    }

    fn read_inventory(
        &mut self,
        link: LinkId,
        order: RequestId,
        epoch: Epoch,
        read: ReadInventory,
    ) -> Result<(), Fatal> {
        let of_disk = self
            .disk
            .as_ref()
            .is_some_and(|disk| disk.depot().0.to_be_bytes() == read.depot);
        let part = match of_disk {
            true => self.part_of_disk(epoch, &read),
            false => self.part_of_inventory(epoch, &read)?,
        };
        let message = part.map_or_else(Message::Error, Message::Inventory);
        self.reply_to_leader(link, order, message);
        Ok(())
    }

    fn flush_tier(&mut self, link: LinkId, order: RequestId, flush: FlushTier) {
        let begun = match &mut self.disk {
            Some(disk) if flush.tier == TierId::Disk.number() => disk
                .flush((link, order, flush.flush))
                .map_err(|why| (ErrorCode::Internal, why)),
            _ => {
                let tier = flush.tier;
                let text = format!("tier is {tier}: name a tier that this worker has");
                Err((ErrorCode::Invalid, text))
            }
        };
        if let Err((code, why)) = begun {
            let error = ErrorBody::new(code, why);
            self.reply_to_leader(link, order, Message::Error(error));
        }
    }

    fn unlist(&mut self, tier: TierId, run: PageRun) -> Result<(), Fatal> {
        if tier == TierId::Disk {
            if let Some(disk) = &self.disk {
                disk.unlist(run);
            }
            return Ok(());
        }
        Ok(self.inventory(|depot, page_bytes| depot.unlist_run(page_bytes, run))?)
    }

    fn unlist_scope(
        &mut self,
        tier: TierId,
        scope: &Scope,
        through: Stored,
        from: u32,
    ) -> Result<Unlisted, Fatal> {
        if tier != TierId::Host {
            let reset = self.disk.as_mut().map(|disk| disk.reset(scope, through));
            return Ok(match reset {
                Some(ResetProgress::Running) => Unlisted::Later,
                Some(ResetProgress::Ended(Err(why))) => Unlisted::Failed(why),
                None | Some(ResetProgress::Ended(Ok(()))) => Unlisted::Done,
            });
        }
        let count = INVALIDATE_SLICE_ENTRIES;
        let next = self.inventory(|depot, page_bytes| {
            depot.invalidate_scope(page_bytes, scope, through, from, count)
        })?;
        Ok(next.map_or(Unlisted::Done, Unlisted::Next))
    }

    fn invalidate_later(&mut self) -> Result<(), Fatal> {
        Ok(self.myself.cast(WorkerMessage::Invalidate)?)
    }

    fn list(&mut self, tier: TierId, record: &Record) {
        if tier == TierId::Disk {
            if let Some(disk) = &self.disk {
                disk.list(record);
            }
            return;
        }
        let listed = self.inventory(|depot, page_bytes| depot.list(page_bytes, record));
        if let Err(error) = listed {
            tracing::error!(worker = %self.worker, %error, "stored pages are not listed");
        }
    }

    fn start(
        &mut self,
        edge: Edge,
        copies: Vec<(Transfer, Time)>,
        memory: Option<&EngineSide>,
    ) -> Result<(), Fatal> {
        let Some(depot) = self.depot.clone() else {
            return Err("copies started without a depot".into());
        };
        let Some(direction) = edge.direction() else {
            self.start_moves(copies, &depot);
            return Ok(());
        };
        let Some(memory) = memory.cloned() else {
            return Err("copies started without an engine's memory".into());
        };
        Ok(self.copies.start(CopyBatch {
            direction,
            copies,
            memory,
            depot,
            waiting: (direction == Direction::Load).then(|| self.waiting.add()),
        })?)
    }

    fn probe(&mut self) -> Result<(), String> {
        let mut begun = || -> Result<_, Fatal> {
            let memory = match &mut self.probe {
                Some(memory) => memory,
                none => none.insert(ProbeMemory::create()?),
            };
            let ((load, memory), depot) = memory.begin()?;
            Ok(self.copies.start(CopyBatch {
                direction: Direction::Load,
                copies: vec![(load, self.clock.now())],
                memory: EngineSide::Host(memory),
                depot,
                waiting: Some(self.waiting.add()),
            })?)
        };
        begun().map_err(|error| format!("the copy of a probe does not start: {error}"))
    }

    fn stop(&mut self, transfer: TransferId) -> Result<(), Fatal> {
        if let Some(disk) = &self.disk {
            disk.stop(transfer);
        }
        self.copies.stop(transfer);
        Ok(())
    }

    fn invalid_copy(&mut self, _: TransferId, _: &str) {}

    fn report_problem(&mut self, why: &str) {
        self.readiness.problem(why.to_owned());
    }
}
