//! The interface between a [`WorkerShell`](super::WorkerShell) and its process.

use std::collections::BTreeMap;
use std::error::Error;
use std::time::Duration;

use crate::HolderPeers;
use kvferry_protocol::{ErrorBody, FlushTier, Message, ReadInventory};
use kvferry_types::{
    DepotId, Edge, EngineId, Epoch, LinkId, MemoryGeometry, PageRun, PeerId, PerTier, Record,
    Registration, RequestId, Scope, Stored, TierId, TierLayout, Time, Transfer, TransferId,
};

/// Why the process of a worker must end.
pub type Fatal = Box<dyn Error + Send + Sync>;

/// How far the removal of a reset's pages from the inventory of a tier has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unlisted {
    /// The next slice begins at this entry.
    Next(u32),
    /// All pages are removed.
    Done,
    /// The removal goes on elsewhere. When it has ended, [`super::WorkerShell::continue_invalidations`] is called, and the
    /// same slice is requested again.
    Later,
    /// The pages could not be removed, or not durably.
    Failed(String),
}

/// A registration that is being opened.
#[derive(Debug, Clone)]
pub struct Registering {
    /// Number of the registration in this process. A later registration has a higher one.
    pub number: u64,
    /// The rank's connection.
    pub peer: PeerId,
    /// The rank's request, which is answered when the opening ends.
    pub request: RequestId,
    /// The engine whose memory this is.
    pub engine: EngineId,
    /// Requests of that engine up to this one are over.
    pub abandoned_through: RequestId,
    /// Why no copies are made for this memory, which is then only checked; `None` when it is served.
    pub not_served: Option<String>,
    /// The engine asked for a check: memory that it registered before stays.
    pub check_only: bool,
}

/// The process of a worker, live or simulated. A call acts or returns a value; its consequences arrive later, as calls
/// of the shell.
pub trait WorkerHost: HolderPeers {
    /// An engine's memory, mapped into this process.
    type Memory;

    /// The clock of deadlines.
    fn now(&self) -> Time;

    /// Sends a request to the leader over this connection only. The answer arrives in order with the leader's own
    /// requests, as a call of [`super::WorkerShell::leader_answered`].
    fn request_leader(&mut self, link: LinkId, message: Message, timeout: Duration) -> RequestId;

    /// Answers a request of the leader, over the connection over which that request arrived.
    fn reply_to_leader(&mut self, link: LinkId, order: RequestId, message: Message);

    /// Answers a request of a rank. Never waits for a peer that is gone or does not read.
    fn reply(&mut self, peer: PeerId, request: RequestId, message: Message);

    /// Orders that were refused, and errors that were answered to them, by code. A host without a connection to its leader
    /// has refused none.
    fn refused_orders(&self) -> BTreeMap<String, u64> {
        BTreeMap::new()
    }

    /// Starts to map an engine's memory, or only to check it where [`Registering::not_served`] is set. Ends with a call
    /// of [`super::WorkerShell::mapped`] or [`super::WorkerShell::checked`]. An error refuses the registration at once.
    /// `serves` is true while other memory is registered.
    fn open(
        &mut self,
        registering: Registering,
        registration: Registration,
        serves: bool,
    ) -> Result<(), ErrorBody>;

    /// Closes the handles of a registration that is refused before it was opened.
    fn discard(&mut self, registration: Registration);

    /// Pages and layout of mapped memory.
    fn geometry(&self, memory: &Self::Memory) -> MemoryGeometry;

    /// Closes the memory of an engine, without waiting for copies that still hold it.
    fn close(&mut self, engine: EngineId, memory: Self::Memory);

    /// Answers a request of a rank with `answer` once all memory of this engine is closed, or with an error when that takes
    /// too long.
    fn reply_when_closed(
        &mut self,
        peer: PeerId,
        request: RequestId,
        engine: EngineId,
        answer: Message,
    );

    /// Watches a device's timeline and reports when it reaches `through`. Returns false for memory without a timeline:
    /// its rank reports what it has written.
    fn watch_timeline(
        &mut self,
        memory: &Self::Memory,
        engine: EngineId,
        through: RequestId,
    ) -> bool;

    /// Handles a rank's own report of what it has written, where no timeline is used.
    fn written(&mut self, memory: &Self::Memory, through: RequestId);

    /// The depot of each tier, without one that is not mapped yet.
    fn depots(&self) -> PerTier<DepotId>;

    /// The epoch of the last leader that read the inventory of the depot of a tier.
    fn last_reader(&self, tier: TierId) -> Result<Epoch, Fatal>;

    /// Number of pages of this size that fit into the depot of a tier.
    fn arena_pages(&self, tier: TierId, page_bytes: u64) -> u32;

    /// Prepares the depots below host memory for these pages. Those that are not ready have none until
    /// [`super::WorkerShell::tiers_changed`] is called. `None`: no memory is registered, and depots that several workers
    /// share are left to the others.
    fn prepare_tiers(&mut self, layout: Option<TierLayout>);

    /// The pages for which the depots below host memory are open, or are being opened.
    fn tier_layout(&self) -> Option<TierLayout>;

    /// Reads a part of the inventory of the depot that `read` names, in pages of the size that it names. If the depot
    /// held pages of another size, its inventory is cleared first. Replies to `order` with the part, or with an error.
    fn read_inventory(
        &mut self,
        link: LinkId,
        order: RequestId,
        epoch: Epoch,
        read: ReadInventory,
    ) -> Result<(), Fatal>;

    /// Removes pages from the inventory of a tier before they are overwritten, or because they failed their checksum.
    fn unlist(&mut self, tier: TierId, run: PageRun) -> Result<(), Fatal>;

    /// Removes the pages of a scope that were stored by `through` or before from the inventory of a tier, one slice per
    /// call. For a tier without a depot, nothing is left.
    fn unlist_scope(
        &mut self,
        tier: TierId,
        scope: &Scope,
        through: Stored,
        from: u32,
    ) -> Result<Unlisted, Fatal>;

    /// Makes durable what was written to a tier before this call. Replies to `order` afterwards, or with an error.
    fn flush_tier(&mut self, link: LinkId, order: RequestId, flush: FlushTier);

    /// Schedules a call of [`super::WorkerShell::continue_invalidations`] after all events that wait now.
    fn invalidate_later(&mut self) -> Result<(), Fatal>;

    /// Adds stored pages to the inventory of a tier. Pages that cannot be listed are still served, but the next leader does not
    /// find them.
    fn list(&mut self, tier: TierId, record: &Record);

    /// Starts copies of one edge, each with the time at which it was ready. `memory` is the registered memory, which moves between
    /// tiers do not need. The ends of the copies are reported with [`super::WorkerShell::copies_ended`].
    fn start(
        &mut self,
        edge: Edge,
        copies: Vec<(Transfer, Time)>,
        memory: Option<&Self::Memory>,
    ) -> Result<(), Fatal>;

    /// Stops a copy as soon as possible. Its end is still reported.
    fn stop(&mut self, transfer: TransferId) -> Result<(), Fatal>;

    /// Starts to copy one page from memory of the worker's own into memory of its own, through the lane of loads. Ends with
    /// a call of [`super::WorkerShell::probed`]. An error is the reason why the copy cannot start.
    fn probe(&mut self) -> Result<(), String>;

    /// Handles a copy that is refused, because its order names pages or sizes that are not valid.
    fn invalid_copy(&mut self, transfer: TransferId, problem: &str);

    /// Reports to the leader why this worker serves no engine; an empty text clears the problem.
    fn report_problem(&mut self, why: &str);
}
