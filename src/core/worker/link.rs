//! The worker's link to the leader: found, attached, lost.

use kvferry_types::{AttachId, EngineId, Epoch, OpId, Time};

use super::memory::Memory;
use super::{OrderRefusal, Worker, WorkerEffect};

/// The leader that was found last.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) epoch: Epoch,
    /// The unanswered attach request. `None` before the first one and after an answer.
    asked: Option<Asked>,
    /// An attach request must be sent: at first, and after the registered memory changed.
    news: bool,
    pub(super) admitted: bool,
    /// Number of the last inventory read that was accepted.
    read: u64,
}

#[derive(Debug, Clone, Copy)]
struct Asked {
    attach: AttachId,
    engine: Option<EngineId>,
    again: Time,
}

impl Link {
    pub(super) fn next_timeout(&self) -> Option<Time> {
        self.asked.map(|asked| asked.again)
    }
}

impl Worker {
    /// True if the leader that was found last has this epoch.
    pub(super) fn follows(&self, epoch: Epoch) -> bool {
        self.link.as_ref().is_some_and(|link| link.epoch == epoch)
    }

    /// True if the leader that was found last has this epoch and has admitted the worker with its current memory.
    pub(super) fn obeys(&self, epoch: Epoch) -> bool {
        self.link
            .as_ref()
            .is_some_and(|link| link.epoch == epoch && link.admitted)
    }

    /// Accepts or refuses a request to read the inventory. For the leader, the answer to a later request or a new
    /// attach settles all earlier requests, so an earlier one must not be carried out after that.
    pub fn take_reading(&mut self, epoch: Epoch, number: u64) -> Result<(), OrderRefusal> {
        let followed = self.link.as_ref().map_or(Epoch(0), |link| link.epoch);
        let link = self.link.as_mut().filter(|link| link.epoch == epoch);
        let stale = OrderRefusal::StaleEpoch {
            order: epoch,
            followed,
        };
        let link = link.ok_or(stale)?;
        if !link.admitted {
            return Err(OrderRefusal::NotAttached);
        }
        let last = link.read.max(self.floor.0);
        if number <= last {
            return Err(OrderRefusal::OldReading { number, last });
        }
        link.read = number;
        Ok(())
    }

    pub(super) fn leader_found(
        &mut self,
        now: Time,
        epoch: Epoch,
        effects: &mut Vec<WorkerEffect>,
    ) {
        self.leader_lost(now, effects);
        self.link = Some(Link {
            epoch,
            asked: None,
            news: true,
            admitted: false,
            read: 0,
        });
    }

    /// Stops the copies of the lost leader. Their ends are not reported, because the next leader did not order them.
    pub(super) fn leader_lost(&mut self, now: Time, effects: &mut Vec<WorkerEffect>) {
        self.link = None;
        self.batches.clear();
        self.tasks.values_mut().for_each(|task| task.orphan = true);
        self.stop_all(now, effects);
        self.ended.clear();
        self.floor = OpId(0);
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
            .take_if(|memory| memory.engine == engine)
            .is_some()
        {
            self.changed(now, effects);
        }
    }

    /// Stops all copies and requires a new attach, because the registered memory is not the one that the leader knows.
    fn changed(&mut self, now: Time, effects: &mut Vec<WorkerEffect>) {
        self.stop_all(now, effects);
        if let Some(link) = &mut self.link {
            link.news = true;
            link.admitted = false;
            link.asked = None;
        }
    }

    /// Sends an attach request once no copy is open, and repeats it until the leader answers.
    pub(super) fn attach(&mut self, now: Time, effects: &mut Vec<WorkerEffect>) {
        let idle = self.tasks.is_empty();
        let Some(link) = self.link.as_mut().filter(|_| self.depot && idle) else {
            return;
        };
        if link.news {
            link.news = false;
            self.last_attach += 1;
            link.asked = Some(Asked {
                attach: AttachId(self.last_attach),
                engine: self.memory.as_ref().map(|memory| memory.engine),
                again: now,
            });
        }
        if let Some(asked) = link.asked.as_mut().filter(|asked| asked.again <= now) {
            asked.again = now + self.settings.attach_every;
            effects.push(WorkerEffect::Attach {
                attach: asked.attach,
                engine: asked.engine,
            });
        }
    }

    pub(super) fn admitted(
        &mut self,
        attach: AttachId,
        after: Option<OpId>,
        effects: &mut Vec<WorkerEffect>,
    ) {
        let asked = |link: &&mut Link| link.asked.is_some_and(|asked| asked.attach == attach);
        let Some(link) = self.link.as_mut().filter(asked) else {
            return;
        };
        link.asked = None;
        link.admitted = after.is_some();
        self.floor = self.floor.max(after.unwrap_or_default());
        let engine = self.memory.as_ref().map(|memory| memory.engine);
        if after.is_none() && self.memory.take().is_some() {
            // The leader rejected this engine's memory: attach again as a worker without an engine.
            link.news = true;
        }
        if let Some(engine) = engine {
            let admitted = after.is_some();
            effects.push(WorkerEffect::Registered { engine, admitted });
        }
    }
}
