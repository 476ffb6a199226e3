//! The live process of a worker: connections, the depot, engine memory, a GPU, and copies on threads of their own.

use std::sync::Arc;
use std::time::Duration;

use ractor::ActorRef;

use super::gpu_state::GpuState;
use super::{UNPROVEN, WorkerMessage};
use crate::depot::DepotProgress;
use crate::gpu::EngineSide;
use crate::processes::{self, Process};
use crate::readiness::ReadinessReporter;
use crate::transfer::TransferMessage;
use kvferry_cuda::Announced;
use kvferry_memory::{BufferError, Depot, DropWaiter, WaitingLoads};
use kvferry_protocol::limits::PAGE_RECORDS_MAX;
use kvferry_protocol::{ErrorBody, ErrorCode, Inventory, Message, ReadInventory};
use kvferry_shell::{Fatal, HolderPeers, INVALIDATE_SLICE_ENTRIES, Registering, WorkerHost};
use kvferry_transport::{Client, Clock, FdReceiver, LinkId, PeerId, Replier};
use kvferry_types::{
    DepotId, EngineId, Epoch, GpuCopy, MemoryGeometry, PageRun, PerTier, Record, Registration,
    RequestId, Scope, Stored, TierId, Time, Transfer, TransferId, WorkerId,
};

/// The live implementation of [`WorkerHost`].
pub(super) struct Host {
    pub(super) myself: ActorRef<WorkerMessage>,
    pub(super) worker: WorkerId,
    pub(super) clock: Clock,
    pub(super) replier: Replier,
    pub(super) fds: Arc<FdReceiver>,
    pub(super) leader: Client,
    pub(super) transfer: ActorRef<TransferMessage>,
    pub(super) waiting: WaitingLoads,
    pub(super) progress: Arc<DepotProgress>,
    pub(super) readiness: ReadinessReporter,
    pub(super) depot: Option<Arc<Depot>>,
    pub(super) prefaulted: bool,
    /// Engine memory that is being closed, with its engine.
    pub(super) closing: Vec<(EngineId, DropWaiter)>,
    /// True once the log has a warning about memory without proofs.
    pub(super) proofs_logged: bool,
    pub(super) gpu: GpuState,
    pub(super) gpu_copy: GpuCopy,
    pub(super) gpu_idle: Duration,
    /// How often ranks have requested a GPU.
    pub(super) gpu_uses: u64,
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
}

impl WorkerHost for Host {
    type Memory = EngineSide;

    fn now(&self) -> Time {
        self.clock.now()
    }

    fn request_leader(&mut self, link: LinkId, message: Message, timeout: Duration) -> RequestId {
        self.leader.request_in_order(link, message, timeout)
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

    fn reply_when_closed(&mut self, peer: PeerId, request: RequestId, engines: [EngineId; 2]) {
        self.answer_when_closed(peer, request, engines);
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
        let depot = self.depot.iter().map(|depot| (TierId::Host, depot.id()));
        depot.collect()
    }

    fn last_reader(&self, _: TierId) -> Result<Epoch, Fatal> {
        let last = self.depot.as_ref().map(|depot| depot.last_reading());
        Ok(last.transpose()?.map_or(Epoch(0), |(epoch, _)| epoch))
    }

    fn arena_pages(&self, tier: TierId, page_bytes: u64) -> u32 {
        let depot = self.depot.as_ref().filter(|_| tier == TierId::Host);
        depot.map_or(0, |depot| depot.arena_pages(page_bytes))
    }

    fn read_inventory(
        &mut self,
        link: LinkId,
        order: RequestId,
        epoch: Epoch,
        read: ReadInventory,
    ) -> Result<(), Fatal> {
        let part = self.part_of_inventory(epoch, &read)?;
        let message = part.map_or_else(Message::Error, Message::Inventory);
        self.reply_to_leader(link, order, message);
        Ok(())
    }

    fn unlist(&mut self, _: TierId, run: PageRun) -> Result<(), Fatal> {
        Ok(self.inventory(|depot, page_bytes| depot.unlist_run(page_bytes, run))?)
    }

    fn unlist_scope(
        &mut self,
        tier: TierId,
        scope: &Scope,
        through: Stored,
        from: u32,
    ) -> Result<Option<u32>, Fatal> {
        if tier != TierId::Host {
            return Ok(None);
        }
        let count = INVALIDATE_SLICE_ENTRIES;
        Ok(self.inventory(|depot, page_bytes| {
            depot.invalidate_scope(page_bytes, scope, through, from, count)
        })?)
    }

    fn invalidate_later(&mut self) -> Result<(), Fatal> {
        Ok(self.myself.cast(WorkerMessage::Invalidate)?)
    }

    fn list(&mut self, _: TierId, record: &Record) {
        let listed = self.inventory(|depot, page_bytes| depot.list(page_bytes, record));
        if let Err(error) = listed {
            tracing::error!(worker = %self.worker, %error, "stored pages are not listed");
        }
    }

    fn start(
        &mut self,
        copies: Vec<(Transfer, Time)>,
        memory: Option<&EngineSide>,
    ) -> Result<(), Fatal> {
        // This worker reaches host memory alone: there is no other tier to move pages to.
        let (Some(depot), Some(memory)) = (&self.depot, memory) else {
            return Err("copies started without a depot or without an engine's memory".into());
        };
        let (memory, depot) = (memory.clone(), Arc::clone(depot));
        let loads = copies
            .iter()
            .any(|(copy, _)| copy.edge.to == TierId::Device);
        Ok(self.transfer.cast(TransferMessage::Start {
            copies,
            memory,
            depot,
            waiting: loads.then(|| self.waiting.add()),
        })?)
    }

    fn stop(&mut self, transfer: TransferId) -> Result<(), Fatal> {
        Ok(self.transfer.cast(TransferMessage::Stop(transfer))?)
    }

    fn invalid_copy(&mut self, _: TransferId, _: &str) {}

    fn report_problem(&mut self, why: &str) {
        self.readiness.problem(why.to_owned());
    }
}
