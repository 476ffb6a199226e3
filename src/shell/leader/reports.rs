//! Reports of workers.

use std::fmt;

use super::{LeaderHost, LeaderShell, Origin};
use kvferry_core::LeaderEvent;
use kvferry_protocol::{
    Empty, Ended, ErrorBody, ErrorCode, Invalidated, Inventory, Message, Readiness, TierFlushed,
};
use kvferry_types::{DepotId, FlushId, ResetId, TierId, WorkerId};

impl<P: fmt::Debug> LeaderShell<P> {
    pub(super) fn report_readiness(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        origin: Origin,
        worker: WorkerId,
        readiness: Readiness,
    ) {
        let disk = readiness.disk.as_ref().map(|disk| disk.health);
        self.readiness_reported(host.now(), worker, readiness);
        if let Some(health) = disk {
            let event = LeaderEvent::Writable {
                worker,
                tier: TierId::Disk,
                writable: health.takes_writes(),
            };
            self.step(host, event);
        }
        let answer = Message::ReadinessAnswer(Empty {});
        host.reply(origin.peer, origin.request, answer);
    }

    pub(super) fn copies_ended(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        origin: Origin,
        worker: WorkerId,
        ended: Ended,
    ) {
        let event = LeaderEvent::Ended {
            worker,
            epoch: origin.epoch,
            copies: ended.copies,
        };
        self.step(host, event);
    }

    pub(super) fn invalidated(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        origin: Origin,
        worker: WorkerId,
        invalidated: Invalidated,
    ) {
        let event = LeaderEvent::Invalidated {
            worker,
            epoch: origin.epoch,
            id: ResetId(invalidated.reset),
        };
        self.step(host, event);
    }

    pub(super) fn tier_flushed(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        origin: Origin,
        worker: WorkerId,
        flushed: TierFlushed,
    ) {
        let event = LeaderEvent::TierFlushed {
            worker,
            epoch: origin.epoch,
            id: FlushId(flushed.flush),
        };
        self.step(host, event);
    }

    pub(super) fn inventory_read(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        worker: WorkerId,
        inventory: Inventory,
    ) {
        let event = LeaderEvent::Inventory {
            worker,
            depot: DepotId(u128::from_be_bytes(inventory.depot)),
            read_id: inventory.read_id,
            from: inventory.from,
            next: inventory.next,
            records: inventory.pages(),
        };
        self.step(host, event);
    }

    pub(super) fn order_refused(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        worker: WorkerId,
        error: &ErrorBody,
    ) {
        if error.code() == ErrorCode::NotReady {
            // The order crossed a statement of the worker: the leader orders again.
            tracing::debug!(%worker, message = error.message, "worker refuses an order");
        } else if let Some(left_out) = self.refused_orders.line(host.now()) {
            tracing::warn!(%worker, message = error.message, left_out, "worker refuses an order");
        }
    }
}
