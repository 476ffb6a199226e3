//! The worker's link to the leader: found, attached, lost.

use std::time::Duration;

use kvferry_types::{AttachId, EngineId, Epoch, Time, TransferId};

use super::memory::Memory;
use super::{OrderRefusal, Worker, WorkerEffect};

/// The leader that was found last.
#[derive(Debug)]
struct FoundLeader {
    epoch: Epoch,
    /// The unanswered attach request. `None` before the first one and after an answer.
    open_attach: Option<OpenAttach>,
    /// An attach request must be sent: at first, and after the registered memory changed.
    needs_attach: bool,
    admitted: bool,
    /// Number of the last inventory read that was accepted.
    read: u64,
}

#[derive(Debug, Clone, Copy)]
struct OpenAttach {
    attach: AttachId,
    engine: Option<EngineId>,
    again: Time,
}

/// The connection to the leader, and the attach requests over it.
#[derive(Debug, Default)]
pub(super) struct LeaderLink {
    link: Option<FoundLeader>,
    last_attach: u64,
    /// The depot is mapped: the worker may attach.
    depot: bool,
}

impl LeaderLink {
    pub(super) fn next_timeout(&self) -> Option<Time> {
        let requested = self.link.as_ref().and_then(|link| link.open_attach);
        requested.map(|requested| requested.again)
    }

    pub(super) fn depot_ready(&mut self) {
        self.depot = true;
    }

    /// Epoch of the leader that was found last; 0 without one.
    pub(super) fn followed(&self) -> Epoch {
        self.link.as_ref().map_or(Epoch(0), |link| link.epoch)
    }

    /// True if the leader that was found last has this epoch.
    pub(super) fn is_of_leader(&self, epoch: Epoch) -> bool {
        self.link.as_ref().is_some_and(|link| link.epoch == epoch)
    }

    /// True if the leader that was found last has admitted the worker with its current memory.
    pub(super) fn is_admitted(&self) -> bool {
        self.link.as_ref().is_some_and(|link| link.admitted)
    }

    /// True if the leader that was found last has this epoch and has admitted the worker with its current memory.
    pub(super) fn is_admitted_by(&self, epoch: Epoch) -> bool {
        self.is_of_leader(epoch) && self.is_admitted()
    }

    fn found(&mut self, epoch: Epoch) {
        self.link = Some(FoundLeader {
            epoch,
            open_attach: None,
            needs_attach: true,
            admitted: false,
            read: 0,
        });
    }

    /// The registered memory is not the one that the leader knows: a new attach is required.
    fn changed(&mut self) {
        if let Some(link) = &mut self.link {
            link.needs_attach = true;
            link.admitted = false;
            link.open_attach = None;
        }
    }

    /// The attach request that is due. `idle`: no copy is open; `engine`: the one whose memory is registered.
    fn next_attach(
        &mut self,
        now: Time,
        idle: bool,
        engine: Option<EngineId>,
        every: Duration,
    ) -> Option<WorkerEffect> {
        let link = self.link.as_mut().filter(|_| self.depot && idle)?;
        if link.needs_attach {
            link.needs_attach = false;
            self.last_attach += 1;
            link.open_attach = Some(OpenAttach {
                attach: AttachId(self.last_attach),
                engine,
                again: now,
            });
        }
        let requested = link
            .open_attach
            .as_mut()
            .filter(|requested| requested.again <= now)?;
        requested.again = now + every;
        Some(WorkerEffect::Attach {
            attach: requested.attach,
            engine: requested.engine,
        })
    }

    /// Notes the answer to an attach request. Returns false if it is not the answer to the last one. `rejected`: the
    /// leader rejected the memory of an engine, so that the worker attaches again without an engine.
    fn answered(&mut self, attach: AttachId, admitted: bool, rejected: bool) -> bool {
        let requested = |link: &&mut FoundLeader| {
            link.open_attach
                .is_some_and(|requested| requested.attach == attach)
        };
        let Some(link) = self.link.as_mut().filter(requested) else {
            return false;
        };
        link.open_attach = None;
        link.admitted = admitted;
        link.needs_attach |= rejected;
        true
    }

    /// Accepts or refuses a request to read the inventory; `floor` is the number of the last attach.
    fn take_read(&mut self, epoch: Epoch, number: u64, floor: u64) -> Result<(), OrderRefusal> {
        let followed = self.followed();
        let link = self.link.as_mut().filter(|link| link.epoch == epoch);
        let stale = OrderRefusal::StaleEpoch {
            order: epoch,
            followed,
        };
        let link = link.ok_or(stale)?;
        if !link.admitted {
            return Err(OrderRefusal::NotAttached);
        }
        let last = link.read.max(floor);
        if number <= last {
            return Err(OrderRefusal::OldRead { number, last });
        }
        link.read = number;
        Ok(())
    }
}

impl Worker {
    /// Accepts or refuses a request to read the inventory. For the leader, the answer to a later request or a new
    /// attach settles all earlier requests, so an earlier one must not be carried out after that.
    pub fn take_read(&mut self, epoch: Epoch, number: u64) -> Result<(), OrderRefusal> {
        let floor = self.orders.floor().0;
        self.leader.take_read(epoch, number, floor)
    }

    pub(super) fn leader_found(
        &mut self,
        now: Time,
        epoch: Epoch,
        effects: &mut Vec<WorkerEffect>,
    ) {
        self.leader_lost(now, effects);
        self.leader.found(epoch);
    }

    /// Stops the copies of the lost leader. Their ends are not reported, because the next leader did not order them.
    pub(super) fn leader_lost(&mut self, now: Time, effects: &mut Vec<WorkerEffect>) {
        self.leader.link = None;
        self.orders.clear();
        self.copies.orphan_all();
        self.stop_all(now, effects);
    }

    pub(super) fn registered(
        &mut self,
        now: Time,
        memory: Memory,
        effects: &mut Vec<WorkerEffect>,
    ) {
        self.memory = Some(memory);
        self.changed(now, effects);
    }

    pub(super) fn memory_gone(
        &mut self,
        now: Time,
        engine: EngineId,
        effects: &mut Vec<WorkerEffect>,
    ) {
        if self
            .memory
            .take_if(|memory| memory.engine() == engine)
            .is_some()
        {
            self.changed(now, effects);
        }
    }

    /// Stops all copies and requires a new attach, because the registered memory is not the one that the leader knows.
    fn changed(&mut self, now: Time, effects: &mut Vec<WorkerEffect>) {
        self.stop_all(now, effects);
        self.leader.changed();
    }

    /// Sends an attach request once no copy is open, and repeats it until the leader answers.
    pub(super) fn attach(&mut self, now: Time, effects: &mut Vec<WorkerEffect>) {
        let idle = self.copies.is_empty();
        let engine = self.memory.as_ref().map(Memory::engine);
        let every = self.settings.attach_every;
        effects.extend(self.leader.next_attach(now, idle, engine, every));
    }

    pub(super) fn admitted(
        &mut self,
        attach: AttachId,
        after: Option<TransferId>,
        effects: &mut Vec<WorkerEffect>,
    ) {
        let admitted = after.is_some();
        let engine = self.memory.as_ref().map(Memory::engine);
        let rejected = !admitted && engine.is_some();
        if !self.leader.answered(attach, admitted, rejected) {
            return;
        }
        self.orders.raise_floor(after.unwrap_or_default());
        if rejected {
            // The leader rejected this engine's memory: attach again as a worker without an engine.
            self.memory = None;
        }
        if let Some(engine) = engine {
            effects.push(WorkerEffect::Registered { engine, admitted });
        }
    }
}
