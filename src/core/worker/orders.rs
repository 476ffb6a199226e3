//! Orders of the leader: which copies begin, which are refused, and how each order is answered.
//!
//! Every order is answered, and the leader treats only a result in [`WorkerEffect::Report`] as the end of a copy:
//!
//! * an order of the leader that the worker follows is answered with one result for each of its copies, once they have
//!   ended. A copy that is not carried out (too old, cancelled before, for other memory, out of bounds, or ordered
//!   while the leader does not know this worker or its memory) is reported as not complete: it has not begun, and the worker
//!   remembers the refusal, so that a repeated order does not begin the copy either;
//! * a copy that is open already is left out of the answer to any other order that names it. Its end is reported with
//!   the order that began it, because the answer to a repeated order must never mark a running copy as ended;
//! * an order of another epoch is answered with [`WorkerEffect::Refuse`], which implies nothing about any copy.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_types::{
    DeviceEnd, EndedCopy, Epoch, PerTier, RequestId, TierId, Time, Transfer, TransferId,
};

use crate::Contradiction;

use super::check::{OrderBounds, check};
use super::memory::Memory;
use super::{BatchId, WORKER_COPIES_MAX, WORKER_ENDED_MAX, Worker, WorkerEffect};

/// Reasons for refusing an order. A refusal implies nothing about any copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OrderRefusal {
    /// The order is of another epoch than the leader that the worker follows.
    #[error("the order is of {order}, this worker follows {followed}: connect again")]
    StaleEpoch {
        /// The epoch of the order.
        order: Epoch,
        /// Epoch of the leader that was found last; 0 without one.
        followed: Epoch,
    },
    /// The leader has not admitted the worker, or does not know its current memory.
    #[error(
        "the leader does not know this worker as it is now: order again after its next attach or memory statement"
    )]
    NotAttached,
    /// A request to read the inventory whose number is not above that of a later request, of the last attach or of the last
    /// memory statement.
    #[error(
        "this reading has number {number}, and everything up to {last} is over: read with a new number"
    )]
    OldRead {
        /// Number of the request.
        number: u64,
        /// The last number that is no longer accepted.
        last: u64,
    },
}

/// An order that is not answered.
#[derive(Debug, Default)]
struct OpenBatch {
    /// Number of its copies.
    open: usize,
    ended: Vec<EndedCopy>,
}

/// The orders of the leader that are not answered, and how earlier copies ended.
#[derive(Debug, Default)]
pub(super) struct Orders {
    batches: BTreeMap<BatchId, OpenBatch>,
    /// The ends of the last copies.
    ended: BTreeMap<TransferId, EndedCopy>,
    /// Copies up to this one are too old to be remembered, or not for this worker.
    floor: TransferId,
    /// Copies up to this one are not for the memory that is registered now.
    device_floor: TransferId,
}

impl Orders {
    /// Copies of an engine's memory up to this one are not carried out.
    pub(super) fn device_floor(&self) -> TransferId {
        self.floor.max(self.device_floor)
    }

    /// Copies of an engine's memory up to this one were ordered before the leader knew of the present memory.
    pub(super) fn raise_device_floor(&mut self, after: TransferId) {
        self.device_floor = self.device_floor.max(after);
    }

    /// The copy that this floor is for is too old to be carried out.
    fn is_old(&self, transfer: &Transfer) -> bool {
        let floor = match transfer.device {
            Some(_) => self.device_floor(),
            None => self.floor,
        };
        transfer.id <= floor
    }

    /// Copies up to this one were ordered before the worker was admitted.
    pub(super) fn raise_floor(&mut self, after: TransferId) {
        self.floor = self.floor.max(after);
    }

    /// The leader is lost: none of its orders is answered.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Remembers the end of a copy, for repeated orders.
    pub(super) fn remember(&mut self, ended: EndedCopy) {
        if ended.transfer > self.floor {
            self.ended.insert(ended.transfer, ended);
        }
        while self.ended.len() > WORKER_ENDED_MAX
            && let Some((oldest, _)) = self.ended.pop_first()
        {
            self.floor = self.floor.max(oldest);
        }
    }

    #[cfg(test)]
    pub(super) fn remembered(&self) -> usize {
        self.ended.len()
    }

    /// Notes the end of a copy of an order. Returns the answer to the order after its last copy.
    pub(super) fn report(&mut self, id: BatchId, ended: EndedCopy) -> Option<WorkerEffect> {
        let batch = self.batches.get_mut(&id)?;
        batch.ended.push(ended);
        if batch.ended.len() < batch.open {
            return None;
        }
        let copies = self.batches.remove(&id)?.ended;
        Some(WorkerEffect::Report { batch: id, copies })
    }

    /// Checks that every order waits for a copy. `Err` names the first contradiction.
    pub(super) fn check(&self) -> Result<(), Contradiction> {
        let mut batches = self.batches.iter();
        match batches.find(|(_, batch)| batch.ended.len() >= batch.open) {
            None => Ok(()),
            Some((id, _)) => Err(format!("order {} waits for no copy", id.0).into()),
        }
    }
}

impl Worker {
    /// Begins the copies that are new, and reports those that are not carried out.
    pub(super) fn ordered(
        &mut self,
        now: Time,
        batch: BatchId,
        (transfers, arena_pages): (Vec<Transfer>, &PerTier<u32>),
        effects: &mut Vec<WorkerEffect>,
    ) {
        if self.orders.batches.contains_key(&batch) {
            // A repeat of an open order: the order is answered once.
            return;
        }
        let mut named = BTreeSet::new();
        let mut transfers = transfers;
        transfers
            .retain(|transfer| !self.copies.contains(transfer.id) && named.insert(transfer.id));
        if transfers.is_empty() {
            let copies = Vec::new();
            effects.push(WorkerEffect::Report { batch, copies });
            return;
        }
        let (open, ended) = (transfers.len(), Vec::new());
        self.orders.batches.insert(batch, OpenBatch { open, ended });
        for transfer in transfers {
            let id = transfer.id;
            if let Some(ended) = self.orders.ended.get(&id).copied() {
                effects.extend(self.orders.report(batch, ended));
            } else if !self.begin(now, batch, (transfer, arena_pages), effects) {
                self.orders.remember(refused(id));
                effects.extend(self.orders.report(batch, refused(id)));
            }
        }
    }

    /// Registers a transfer as waiting or queued. Returns false if the transfer is not carried out.
    fn begin(
        &mut self,
        now: Time,
        batch: BatchId,
        (transfer, arena_pages): (Transfer, &PerTier<u32>),
        effects: &mut Vec<WorkerEffect>,
    ) -> bool {
        let id = transfer.id;
        let full = self.copies.len() >= WORKER_COPIES_MAX;
        let device = transfer.device;
        let admitted = match device {
            Some(_) => self.leader.knows_memory(),
            None => self.leader.is_attached(),
        };
        let carried_out = admitted && !full && !self.orders.is_old(&transfer);
        if !carried_out || device.is_some_and(|device| !self.may_copy(device)) {
            return false;
        }
        let memory = self.memory.as_ref().filter(|_| device.is_some());
        let bounds = OrderBounds {
            memory: memory.map(Memory::bounds),
            arena_pages,
        };
        if let Err(problem) = check(&transfer, bounds) {
            let problem = problem.to_string();
            effects.push(WorkerEffect::Invalid {
                transfer: id,
                problem,
            });
            return false;
        }
        let bytes = bounds.bytes_of(&transfer);
        let through = memory.map_or(RequestId(0), Memory::written);
        let unwritten = device.filter(|device| device.after > through);
        let written = unwritten.is_none();
        // A rank reports the ids of stores, and no number of other work.
        if let Some(device) = unwritten
            && (transfer.edge.to == TierId::Device || device.after != device.request)
        {
            effects.push(WorkerEffect::Await {
                engine: device.engine,
                through: device.after,
            });
        }
        self.copies.begin(now, batch, transfer, bytes, written);
        true
    }

    /// True when the registered memory is that of this engine, and the request may still be copied for.
    fn may_copy(&self, device: DeviceEnd) -> bool {
        self.memory.as_ref().is_some_and(|memory| {
            memory.engine() == device.engine && memory.may_copy_for(device.request, &self.abandoned)
        })
    }

    /// Stops the open copies and reports how the others ended. A copy that the worker has never seen is marked as
    /// refused and does not start later.
    pub(super) fn cancelled(
        &mut self,
        now: Time,
        batch: BatchId,
        transfers: &[TransferId],
        effects: &mut Vec<WorkerEffect>,
    ) {
        let mut copies = Vec::new();
        for transfer in transfers {
            self.stop(now, *transfer, effects);
            if self.copies.contains(*transfer) {
                continue;
            }
            let ended = self
                .orders
                .ended
                .get(transfer)
                .copied()
                .unwrap_or(refused(*transfer));
            self.orders.remember(ended);
            copies.push(ended);
        }
        effects.push(WorkerEffect::Report { batch, copies });
    }

    /// Refuses an order whose epoch is not that of the leader that was found last.
    pub(super) fn refuse_stale(&self, order: Epoch, effects: &mut Vec<WorkerEffect>) {
        let followed = self.leader.followed();
        effects.push(WorkerEffect::Refuse(OrderRefusal::StaleEpoch {
            order,
            followed,
        }));
    }
}

pub(super) fn refused(transfer: TransferId) -> EndedCopy {
    EndedCopy::failed(transfer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_that_waits_for_no_copy_is_detected() {
        let mut orders = Orders::default();
        let mut batch = OpenBatch {
            open: 1,
            ended: Vec::new(),
        };
        orders.batches.insert(BatchId(7), batch);
        assert_eq!(orders.check(), Ok(()));
        batch = OpenBatch {
            open: 1,
            ended: vec![refused(TransferId(1))],
        };
        orders.batches.insert(BatchId(7), batch);
        let why = orders.check().expect_err("its copy has ended");
        assert_eq!(why.to_string(), "order 7 waits for no copy");
    }

    #[test]
    fn ends_at_the_floor_are_not_remembered() {
        let mut orders = Orders::default();
        orders.raise_floor(TransferId(5));
        orders.remember(refused(TransferId(5)));
        assert_eq!(orders.remembered(), 0);
        orders.remember(refused(TransferId(6)));
        assert_eq!(orders.remembered(), 1);
    }
}
