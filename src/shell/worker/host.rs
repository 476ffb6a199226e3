//! What a [`WorkerShell`](super::WorkerShell) needs of its process.

use std::error::Error;
use std::time::Duration;

use super::Registering;
use crate::protocol::{ErrorBody, Message, ReadInventory};
use crate::shell::Peers;
use crate::types::{
    Copy, DepotId, EngineId, Epoch, GroupGeometry, LinkId, OpId, PageRun, PeerId, Record,
    Registration, RequestId, Scope, Stored, Time,
};

/// Why the process of a worker must end.
pub type Fatal = Box<dyn Error + Send + Sync>;

/// The process of a worker, live or simulated. Its calls act or answer; whatever follows from them comes back later, as a
/// call of the shell.
pub trait WorkerHost: Peers {
    /// An engine's memory, mapped into this process.
    type Memory;

    /// The time by which deadlines are set and kept.
    fn now(&self) -> Time;

    /// Sends a request to the leader, over this connection or not at all. Its answer arrives in order with the leader's own
    /// requests, as a call of [`super::WorkerShell::leader_answered`].
    fn request_leader(&mut self, link: LinkId, message: Message, timeout: Duration) -> RequestId;

    /// Answers a request of the leader, over the connection by which it came.
    fn reply_to_leader(&mut self, link: LinkId, order: RequestId, message: Message);

    /// Answers a request of a rank. A peer that is gone, or does not read, is not waited for.
    fn reply(&mut self, peer: PeerId, request: RequestId, message: Message);

    /// Begins to map an engine's memory, or, where [`Registering::not_served`] is set, only to check it. Ends with a call of
    /// [`super::WorkerShell::mapped`] or [`super::WorkerShell::checked`]. An error refuses the registration at once.
    /// `serves` is true while other memory is registered.
    fn open(
        &mut self,
        registering: Registering,
        registration: Registration,
        serves: bool,
    ) -> Result<(), ErrorBody>;

    /// Closes the handles that a registration carries: it is refused before it was opened.
    fn discard(&mut self, registration: Registration);

    /// Pages and layout of mapped memory.
    fn geometry(&self, memory: &Self::Memory) -> GroupGeometry;

    /// Closes the memory of an engine, without waiting for the copies that still hold it.
    fn close(&mut self, engine: EngineId, memory: Self::Memory);

    /// Answers a request of a rank once no memory of these engines is open any more, or with an error when that takes too
    /// long.
    fn reply_when_closed(&mut self, peer: PeerId, request: RequestId, engines: [EngineId; 2]);

    /// Watches the timeline of a device for this number, to report it as written. False for memory without a timeline: its
    /// rank reports what it has written.
    fn watch_timeline(
        &mut self,
        memory: &Self::Memory,
        engine: EngineId,
        through: RequestId,
    ) -> bool;

    /// A rank has reported what it has written, and not by its timeline.
    fn written(&mut self, memory: &Self::Memory, through: RequestId);

    /// The depot, once it is mapped.
    fn depot(&self) -> Option<DepotId>;

    /// The epoch of the last leader that has read the depot's inventory.
    fn last_reader(&self) -> Result<Epoch, Fatal>;

    /// Pages of this size that the depot has room for.
    fn arena_pages(&self, page_bytes: u64) -> u32;

    /// Reads a part of the inventory, in pages of the size that `read` names; where the depot held pages of another size,
    /// its inventory is cleared first. Replies to `order` with the part, or with an error.
    fn read_inventory(
        &mut self,
        link: LinkId,
        order: RequestId,
        epoch: Epoch,
        read: ReadInventory,
    ) -> Result<(), Fatal>;

    /// Removes pages from the inventory: they will be overwritten.
    fn unlist(&mut self, run: PageRun) -> Result<(), Fatal>;

    /// Removes the pages of a scope from the inventory that were stored by `through` or before, in one slice of it. Returns
    /// where the next slice begins.
    fn unlist_scope(
        &mut self,
        scope: &Scope,
        through: Stored,
        from: u32,
    ) -> Result<Option<u32>, Fatal>;

    /// Calls [`super::WorkerShell::strike_on`] after everything that waits now.
    fn strike_later(&mut self) -> Result<(), Fatal>;

    /// Adds stored pages to the inventory. Pages that cannot be listed are served all the same; only the next leader does
    /// not find them.
    fn list(&mut self, record: &Record);

    /// Starts copies. Their ends are reported with [`super::WorkerShell::copies_ended`].
    fn start(&mut self, copies: Vec<Copy>, memory: &Self::Memory) -> Result<(), Fatal>;

    /// Stops a copy as soon as possible; its end is still reported.
    fn stop(&mut self, op: OpId) -> Result<(), Fatal>;

    /// A copy names what it may not, and is refused.
    fn invalid_copy(&mut self, op: OpId, problem: &str);

    /// Reports to the leader why no engine is served here; an empty text when one is.
    fn report_problem(&mut self, why: &str);
}
