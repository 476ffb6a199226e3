//! Orders of the leader: copies, cancels, readings of the inventory, resets.

use std::fmt;
use std::time::Duration;

use super::{Fatal, WorkerHost, WorkerShell};
use kvferry_core::{BatchId, OrderRefusal, WorkerEvent};
use kvferry_protocol::{Empty, Envelope, ErrorBody, ErrorCode, Message, ReadInventory};
use kvferry_types::{Epoch, LinkId, PerTier, RequestId, ResetId, TierLayout, TransferId};

impl<P: fmt::Debug, M> WorkerShell<P, M> {
    /// Handles an order that the leader sends over this connection.
    pub fn order(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        link: LinkId,
        envelope: Envelope,
    ) -> Result<(), Fatal> {
        if link != self.leader.link {
            tracing::debug!(%link, "an order of a connection that is gone");
            return Ok(());
        }
        let Envelope {
            correlation,
            deadline_ms,
            epoch,
            message,
            ..
        } = envelope;
        self.leader.order = correlation;
        if let Err(refusal) = self.core.check_epoch(epoch) {
            self.refuse_order(host, correlation, refusal);
            return Ok(());
        }
        let batch = BatchId(correlation.0);
        let deadline = host.now() + Duration::from_millis(u64::from(deadline_ms));
        let event = match message {
            Message::Transfer(order) => {
                let mut arena_pages = arena_pages(host, order.page_bytes);
                self.leader.stated.raise(&mut arena_pages, order.page_bytes);
                match order.into_transfers(epoch, deadline) {
                    Ok(transfers) => WorkerEvent::Ordered {
                        epoch,
                        batch,
                        transfers,
                        arena_pages,
                    },
                    Err(error) => {
                        self.answer(host, correlation, Message::Error(error));
                        return Ok(());
                    }
                }
            }
            Message::Cancel(cancel) => WorkerEvent::Cancel {
                epoch,
                batch,
                transfers: cancel.transfers.into_iter().map(TransferId).collect(),
            },
            Message::ReadInventory(read) => {
                return self.read_inventory(host, correlation, epoch, read);
            }
            Message::FlushTier(flush) => {
                host.flush_tier(self.leader.link, correlation, flush);
                return Ok(());
            }
            Message::OpenTiers(open) => {
                // An engine's memory decides otherwise.
                if self.ranks.registered().is_none() {
                    let layout = (open.page_bytes > 0).then_some(TierLayout {
                        page_bytes: open.page_bytes,
                        layout_fingerprint: open.layout_fingerprint,
                    });
                    host.prepare_tiers(layout);
                }
                self.answer(host, correlation, Message::OpenTiersAnswer(Empty {}));
                return Ok(());
            }
            Message::Invalidate(invalidate) => match invalidate.covers() {
                Ok((scope, tier)) => WorkerEvent::Invalidate {
                    epoch,
                    id: ResetId(invalidate.reset),
                    scope,
                    tier,
                    through: TransferId(invalidate.through),
                    deadline,
                },
                Err(error) => {
                    self.answer(host, correlation, Message::Error(error));
                    return Ok(());
                }
            },
            other => {
                let text = format!("{} is not for a worker to answer", other.kind().name());
                let error = ErrorBody::new(ErrorCode::UnknownKind, text);
                self.answer(host, correlation, Message::Error(error));
                return Ok(());
            }
        };
        self.step(host, event)
    }

    /// Reads a part of the depot's inventory, in pages of the size that the leader names.
    fn read_inventory(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        order: RequestId,
        epoch: Epoch,
        read: ReadInventory,
    ) -> Result<(), Fatal> {
        if let Err(refusal) = self.core.take_read(epoch, read.read_id) {
            self.refuse_order(host, order, refusal);
            return Ok(());
        }
        let depots = host.depots();
        let mut depots = depots.iter();
        if !depots.any(|(_, depot)| depot.0.to_be_bytes() == read.depot) {
            let error = ErrorBody::new(ErrorCode::Invalid, "this worker has another depot");
            self.answer(host, order, Message::Error(error));
            return Ok(());
        }
        let memory = self.ranks.memory();
        let page_bytes = memory.map(|memory| host.geometry(memory).page_bytes());
        if let Some(page_bytes) = page_bytes.filter(|bytes| *bytes != read.page_bytes) {
            let text = format!(
                "page_bytes is {}, and the engine's pages have {page_bytes}: read the inventory of the memory that is \
                 attached",
                read.page_bytes
            );
            let error = ErrorBody::new(ErrorCode::Invalid, text);
            self.answer(host, order, Message::Error(error));
            return Ok(());
        }
        host.read_inventory(self.leader.link, order, epoch, read)
    }

    pub(super) fn refuse_order(
        &self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        order: RequestId,
        refusal: OrderRefusal,
    ) {
        let code = match refusal {
            OrderRefusal::StaleEpoch { .. } => ErrorCode::StaleEpoch,
            OrderRefusal::NotAttached => ErrorCode::NotReady,
            OrderRefusal::OldRead { .. } => ErrorCode::Invalid,
        };
        match refusal {
            // The order crossed a statement.
            OrderRefusal::NotAttached => {
                tracing::debug!(worker = %self.worker, %refusal, "order refused");
            }
            _ => tracing::info!(worker = %self.worker, %refusal, "order refused"),
        }
        let error = ErrorBody::new(code, refusal.to_string());
        self.answer(host, order, Message::Error(error));
    }
}

/// Number of pages of this size in the depot of each tier.
pub(super) fn arena_pages<P: fmt::Debug, M>(
    host: &dyn WorkerHost<Process = P, Memory = M>,
    page_bytes: u64,
) -> PerTier<u32> {
    let depots = host.depots();
    let tiers = depots.tiers();
    tiers
        .map(|tier| (tier, host.arena_pages(tier, page_bytes)))
        .collect()
}
