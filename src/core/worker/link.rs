//! The worker's link to the leader: found, attached, lost; and what the leader knows of the engine's memory.
//!
//! Two statements follow one another. The worker *attaches* once no copy of an older leader, or of an older connection,
//! is open. From then on the leader may order moves between tiers. The worker then states which engine *memory* it has,
//! or that it has none, and again each time that this changes, once no copy of the earlier memory is open. Moves go on
//! meanwhile, because they touch no engine's memory.
//!
//! The statement of the memory includes how many pages the *tiers* below host memory have. When that changes alone, as
//! each time that a disk opens, fails or is full, it is stated by itself, and copies of the engine's memory go on. Each
//! change is stated at once: a leader that received two of them as one would not learn that a disk was closed meanwhile,
//! and would go on to order moves that cannot begin.

use std::time::Duration;

use kvferry_types::{AttachId, EngineId, Epoch, MemoryId, Time, TransferId};

use super::memory::Memory;
use super::{OrderRefusal, Worker, WorkerEffect};

/// A statement to the leader, which is repeated until it is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Statement {
    /// Must be sent.
    Due,
    /// Was sent under this number, and is sent again at `again`.
    Open { number: u64, again: Time },
    /// The leader accepted it.
    Accepted,
    /// The leader refused it.
    Refused,
}

impl Statement {
    /// The number under which the statement is sent now; `last` is the number of the last one.
    fn next(&mut self, now: Time, every: Duration, last: &mut u64) -> Option<u64> {
        let number = match *self {
            Self::Due => {
                *last += 1;
                *last
            }
            Self::Open { number, again } if again <= now => number,
            _ => return None,
        };
        let again = now + every;
        *self = Self::Open { number, again };
        Some(number)
    }

    /// Notes an answer. Returns false if it is not the answer to the last statement.
    fn answered(&mut self, number: u64, accepted: bool) -> bool {
        let open = matches!(self, Self::Open { number: open, .. } if *open == number);
        if open {
            *self = match accepted {
                true => Self::Accepted,
                false => Self::Refused,
            };
        }
        open
    }

    fn again(self) -> Option<Time> {
        match self {
            Self::Open { again, .. } => Some(again),
            _ => None,
        }
    }
}

/// The leader that was found last.
#[derive(Debug)]
struct FoundLeader {
    epoch: Epoch,
    attach: Statement,
    memory: Statement,
    /// What changed in the tiers below host memory since the memory was stated.
    tiers: Statement,
    /// The leader has answered a statement of the memory.
    stated: bool,
    /// Number of the last inventory read that was accepted.
    read: u64,
}

/// The connection to the leader, and the statements over it.
#[derive(Debug, Default)]
pub(super) struct LeaderLink {
    link: Option<FoundLeader>,
    /// Number of the last attach request.
    last_attach: u64,
    /// Number of the last statement of the memory or of the tiers.
    last_memory: u64,
    /// The depot is mapped: the worker may attach.
    depot: bool,
    /// A tier below host memory was open since the start.
    has_tiers: bool,
}

impl LeaderLink {
    pub(super) fn next_timeout(&self) -> Option<Time> {
        let link = self.link.as_ref()?;
        let again = [link.attach.again(), link.memory.again(), link.tiers.again()];
        again.into_iter().flatten().min()
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

    /// True if the leader that was found last has admitted the worker.
    pub(super) fn is_attached(&self) -> bool {
        let link = self.link.as_ref();
        link.is_some_and(|link| link.attach == Statement::Accepted)
    }

    /// True if the leader that was found last has this epoch and has admitted the worker.
    pub(super) fn is_attached_to(&self, epoch: Epoch) -> bool {
        self.is_of_leader(epoch) && self.is_attached()
    }

    /// True if that leader also knows the engine's memory as it is now, or that there is none.
    pub(super) fn knows_memory(&self) -> bool {
        let link = self.link.as_ref().filter(|_| self.is_attached());
        link.is_some_and(|link| matches!(link.memory, Statement::Accepted | Statement::Refused))
    }

    fn found(&mut self, epoch: Epoch) {
        self.link = Some(FoundLeader {
            epoch,
            attach: Statement::Due,
            memory: Statement::Due,
            tiers: Statement::Accepted,
            stated: false,
            read: 0,
        });
    }

    /// The registered memory is not the one that the leader knows: it must be stated. A worker that the leader refused
    /// attaches again, so that a rank that registers learns whether and why that is still so.
    fn changed(&mut self) {
        if let Some(link) = &mut self.link {
            link.memory = Statement::Due;
            if link.attach == Statement::Refused {
                link.attach = Statement::Due;
            }
        }
    }

    /// The tiers below host memory have another number of pages than the leader knows, or were closed meanwhile.
    fn tiers_changed(&mut self) {
        self.has_tiers = true;
        let Some(link) = &mut self.link else {
            return;
        };
        match link.memory {
            // The leader knows none of them yet.
            Statement::Due if !link.stated => {}
            // No later statement may be sent before this one is answered: it is sent again, with the pages of now.
            Statement::Open { .. } => link.memory = Statement::Due,
            Statement::Due | Statement::Accepted | Statement::Refused => {
                link.tiers = Statement::Due;
            }
        }
    }

    /// Accepts or refuses a request to read the inventory; `floor` is the number of the last order before the worker was
    /// admitted with its present memory.
    fn take_read(&mut self, epoch: Epoch, number: u64, floor: u64) -> Result<(), OrderRefusal> {
        let followed = self.followed();
        let knows_memory = self.knows_memory();
        let link = self.link.as_mut().filter(|link| link.epoch == epoch);
        let stale = OrderRefusal::StaleEpoch {
            order: epoch,
            followed,
        };
        let link = link.ok_or(stale)?;
        if !knows_memory {
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
    /// Refuses an order whose epoch is not that of the leader that was found last.
    pub fn check_epoch(&self, order: Epoch) -> Result<(), OrderRefusal> {
        let followed = self.leader.followed();
        match self.leader.is_of_leader(order) {
            true => Ok(()),
            false => Err(OrderRefusal::StaleEpoch { order, followed }),
        }
    }

    /// Accepts or refuses a request to read the inventory. For the leader, the answer to a later request, a new attach
    /// or a statement of other memory settles all earlier requests, so an earlier one must not be carried out after that.
    pub fn take_read(&mut self, epoch: Epoch, number: u64) -> Result<(), OrderRefusal> {
        let floor = self.orders.device_floor().0;
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
        self.stop_all(now, self.copies.ids(), effects);
        self.copies.forget_queues();
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

    /// Another number of pages in the tiers below host memory. No copy of an engine's memory reads or writes there.
    pub(super) fn tiers_changed(&mut self) {
        self.leader.tiers_changed();
    }

    /// Handles the answer to a statement of the tiers. A leader that knows no such statement learns of the change with the
    /// memory.
    pub(super) fn tiers_admitted(
        &mut self,
        now: Time,
        number: MemoryId,
        known: bool,
        effects: &mut Vec<WorkerEffect>,
    ) {
        let link = self.leader.link.as_mut();
        let answered = link.is_some_and(|link| link.tiers.answered(number.0, true));
        if answered && !known && self.memory.is_some() {
            self.changed(now, effects);
        }
    }

    /// Stops the copies that touch an engine's memory, and requires a new statement, because the registered memory is
    /// not the one that the leader knows.
    fn changed(&mut self, now: Time, effects: &mut Vec<WorkerEffect>) {
        self.stop_all(now, self.copies.ids_of_device(), effects);
        self.leader.changed();
    }

    /// Sends an attach request once no copy is open, then states the memory once no copy of other memory is open, and then
    /// what changed in the tiers meanwhile. Repeats each until the leader answers.
    pub(super) fn attach(&mut self, now: Time, effects: &mut Vec<WorkerEffect>) {
        let idle = self.copies.is_empty();
        let device_idle = !self.copies.has_device();
        let every = self.settings.attach_every;
        let LeaderLink {
            link,
            last_attach,
            last_memory,
            depot,
            has_tiers,
        } = &mut self.leader;
        let Some(link) = link.as_mut().filter(|_| *depot) else {
            return;
        };
        if idle && let Some(number) = link.attach.next(now, every, last_attach) {
            let attach = AttachId(number);
            effects.push(WorkerEffect::Attach { attach });
        }
        let first = link.memory == Statement::Due;
        if link.attach == Statement::Accepted
            && device_idle
            && let Some(number) = link.memory.next(now, every, last_memory)
        {
            let number = MemoryId(number);
            effects.push(WorkerEffect::StateMemory { number });
            // The tiers are a part of the memory. Without one they are stated by themselves. The leader may have received
            // the same statement before what changed since.
            if first {
                link.tiers = match *has_tiers && self.memory.is_none() {
                    true => Statement::Due,
                    false => Statement::Accepted,
                };
            }
        }
        let tiers_alone = match link.memory {
            Statement::Accepted | Statement::Refused => true,
            // Copies of other memory have not ended yet.
            Statement::Due => link.stated && link.attach == Statement::Accepted,
            Statement::Open { .. } => false,
        };
        if tiers_alone && let Some(number) = link.tiers.next(now, every, last_memory) {
            let number = MemoryId(number);
            effects.push(WorkerEffect::StateTiers { number });
        }
    }

    /// Handles the answer to an attach request. A refusal concerns a rank that has registered memory, too.
    pub(super) fn admitted(
        &mut self,
        attach: AttachId,
        after: Option<TransferId>,
        effects: &mut Vec<WorkerEffect>,
    ) {
        let link = self.leader.link.as_mut();
        if !link.is_some_and(|link| link.attach.answered(attach.0, after.is_some())) {
            return;
        }
        match after {
            Some(after) => self.orders.raise_floor(after),
            None => self.memory_refused(effects),
        }
    }

    /// Handles the answer to a statement of the memory.
    pub(super) fn memory_admitted(
        &mut self,
        number: MemoryId,
        after: Option<TransferId>,
        effects: &mut Vec<WorkerEffect>,
    ) {
        let has_tiers = self.leader.has_tiers;
        let Some(link) = self.leader.link.as_mut() else {
            return;
        };
        if !link.memory.answered(number.0, after.is_some()) {
            return;
        }
        link.stated = true;
        let Some(after) = after else {
            // The leader has taken nothing from the statement.
            if has_tiers {
                link.tiers = Statement::Due;
            }
            return self.memory_refused(effects);
        };
        self.orders.raise_device_floor(after);
        if let Some(engine) = self.memory.as_ref().map(Memory::engine) {
            let admitted = true;
            effects.push(WorkerEffect::Registered { engine, admitted });
        }
    }

    /// The leader refused this worker or its memory: goes on without an engine's memory.
    fn memory_refused(&mut self, effects: &mut Vec<WorkerEffect>) {
        if let Some(memory) = self.memory.take() {
            let (engine, admitted) = (memory.engine(), false);
            effects.push(WorkerEffect::Registered { engine, admitted });
        }
    }
}
