//! The conversation with the leader: found, attached, lost.

use crate::core::sabotage::{Bug, planted};
use crate::types::{AttachId, EngineId, Epoch, OpId, Time};

use super::memory::Memory;
use super::{OrderRefusal, Worker, WorkerEffect};

/// A leader that was found.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) epoch: Epoch,
    /// What the leader was told last, and when it is told again while it does not answer.
    asked: Option<Asked>,
    /// The leader must be told again: at first, and when other memory is here than before.
    news: bool,
    pub(super) admitted: bool,
    /// The last question for the inventory that was taken.
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
    /// The leader of this epoch was found last.
    pub(super) fn follows(&self, epoch: Epoch) -> bool {
        self.link.as_ref().is_some_and(|link| link.epoch == epoch)
    }

    /// The leader of this epoch knows this worker, and knows it as it is now.
    pub(super) fn obeys(&self, epoch: Epoch) -> bool {
        self.link
            .as_ref()
            .is_some_and(|link| link.epoch == epoch && link.admitted)
    }

    /// Whether a question for the inventory is answered. The leader takes no answer to an earlier question, and no answer to
    /// one from before this worker attached, for the end of what it asked; so neither is carried out behind that.
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

    /// Orders of this leader end, and none of their ends is reported.
    pub(super) fn leader_lost(&mut self, now: Time, effects: &mut Vec<WorkerEffect>) {
        self.link = None;
        if planted(Bug::IgnoreEpoch) {
            return;
        }
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

    /// Other memory is here than the leader knows: nothing is copied until it knows.
    fn changed(&mut self, now: Time, effects: &mut Vec<WorkerEffect>) {
        self.stop_all(now, effects);
        if let Some(link) = &mut self.link {
            link.news = true;
            link.admitted = false;
            link.asked = None;
        }
    }

    /// Says who it is, once nothing is under way; again while the leader does not answer.
    pub(super) fn attach(&mut self, now: Time, effects: &mut Vec<WorkerEffect>) {
        let idle = self.tasks.is_empty() || planted(Bug::AttachEarly) || planted(Bug::IgnoreEpoch);
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
            // Without that memory it may belong.
            link.news = true;
        }
        if let Some(engine) = engine {
            let admitted = after.is_some();
            effects.push(WorkerEffect::Registered { engine, admitted });
        }
    }
}
