//! Steps of the core, and what their effects send.

use std::fmt;
use std::time::Duration;

use super::errors::to_error;
use super::seats::PeerRole;
use super::{LeaderHost, LeaderShell};
use kvferry_core::{LeaderEffect, LeaderEvent, Refusal, Workers};
use kvferry_protocol::{
    Cancel, FlushTier, Invalidate, Message, OpenTiers, ReadInventory, TransferOrder,
};
use kvferry_types::{Answer, EngineId, PeerId, RequestId, Transfer, WorkerId};

impl<P: fmt::Debug> LeaderShell<P> {
    pub(super) fn step(&mut self, host: &mut dyn LeaderHost<Process = P>, event: LeaderEvent) {
        let mut next = self.step_once(host, event);
        // The copies of an order that was not sent have ended, because no worker will report them.
        while let Some(event) = next.pop() {
            next.extend(self.step_once(host, event));
        }
        self.answer_readers(host);
    }

    /// Carries out the effects of one event. Returns the ends of copies whose orders could not be sent.
    fn step_once(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        event: LeaderEvent,
    ) -> Vec<LeaderEvent> {
        let mut effects = std::mem::take(&mut self.effects);
        host.before_step(&self.core, &event);
        self.core.step(host.now(), event, &mut effects);
        host.after_step(&self.core, &effects);
        let mut transfers: Vec<(Workers, Transfer)> = Vec::new();
        for effect in effects.drain(..) {
            match effect {
                LeaderEffect::Answer { engine, id, answer } => {
                    self.answer(host, engine, id, answer)
                }
                LeaderEffect::Admit {
                    worker,
                    attach,
                    verdict,
                } => self.admit(host, worker, attach, verdict),
                LeaderEffect::AdmitMemory {
                    worker,
                    number,
                    verdict,
                } => self.admit_memory(host, worker, number, verdict),
                LeaderEffect::AdmitTiers {
                    worker,
                    number,
                    verdict,
                } => self.admit_tiers(host, worker, number, verdict),
                LeaderEffect::Transfer { workers, transfer } => transfers.push((workers, transfer)),
                LeaderEffect::Cancel { worker, transfers } => {
                    let transfers = transfers.into_iter().map(|transfer| transfer.0).collect();
                    let cancel = Message::Cancel(Cancel { transfers });
                    self.order(host, &[worker], cancel, Duration::ZERO);
                }
                LeaderEffect::Invalidate {
                    worker,
                    id,
                    scope,
                    tier,
                    through,
                    deadline,
                } => {
                    let order = Invalidate::new(id, &scope, tier, through);
                    let invalidate = Message::Invalidate(order);
                    let left = host.now().until(deadline);
                    self.order(host, &[worker], invalidate, left);
                }
                LeaderEffect::OpenTiers { worker, layout } => {
                    let layout = layout.unwrap_or_default();
                    let open = Message::OpenTiers(OpenTiers {
                        page_bytes: layout.page_bytes,
                        layout_fingerprint: layout.layout_fingerprint,
                    });
                    self.order(host, &[worker], open, Duration::ZERO);
                }
                LeaderEffect::FlushTier {
                    worker,
                    id,
                    tier,
                    deadline,
                } => {
                    let flush = Message::FlushTier(FlushTier {
                        flush: id.0,
                        tier: tier.number(),
                    });
                    let left = host.now().until(deadline);
                    self.order(host, &[worker], flush, left);
                }
                LeaderEffect::ReadInventory {
                    worker,
                    depot,
                    page_bytes,
                    read_id: reading,
                    from,
                } => {
                    let read = Message::ReadInventory(ReadInventory {
                        depot: depot.0.to_be_bytes(),
                        page_bytes,
                        read_id: reading,
                        from,
                    });
                    self.order(host, &[worker], read, Duration::ZERO);
                }
                LeaderEffect::FenceWorker(worker) => self.fence(host, worker),
            }
        }
        self.effects = effects;
        self.transfer(host, &transfers)
    }

    /// Orders the transfers of a step. Transfers of one request for the same workers share messages: as few as they fit
    /// into, each encoded once for all of these workers. Returns the ends of transfers that no worker will report,
    /// because their message could not be encoded or sent.
    fn transfer(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        transfers: &[(Workers, Transfer)],
    ) -> Vec<LeaderEvent> {
        let mut unsent = Vec::new();
        for group in transfers.chunk_by(|(one, _), (other, _)| one == other) {
            let list: Vec<&Transfer> = group.iter().map(|(_, transfer)| transfer).collect();
            let workers = &group[0].0;
            for (deadline, order) in TransferOrder::all_of(&list) {
                let left = host.now().until(deadline);
                let copies = order.unsent();
                for worker in self.order(host, workers, Message::Transfer(order), left) {
                    let transfers = copies.len();
                    tracing::warn!(%worker, transfers, "order not sent: its transfers count as failed");
                    unsent.push(LeaderEvent::Unsent {
                        worker,
                        copies: copies.clone(),
                    });
                }
            }
        }
        unsent
    }

    /// Sends one order to each of these workers. Returns those to whom it was not sent.
    fn order(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        workers: &[WorkerId],
        message: Message,
        deadline: Duration,
    ) -> Vec<WorkerId> {
        self.next_order += 1;
        let correlation = RequestId(self.next_order);
        let peer = |worker: &WorkerId| Some(self.workers.get(worker)?.holder.peer);
        let peers: Vec<PeerId> = workers.iter().filter_map(peer).collect();
        let unsent = host.order(&peers, correlation, message, deadline);
        let is_unsent = |worker: &&WorkerId| peer(worker).is_none_or(|peer| unsent.contains(&peer));
        workers.iter().filter(is_unsent).copied().collect()
    }

    fn answer(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        engine: EngineId,
        id: RequestId,
        answer: Result<Answer, Refusal>,
    ) {
        let Some(peer) = self.engines.get(&engine).map(|holder| holder.peer) else {
            return;
        };
        if let Ok(Answer::Reset(reset)) = &answer
            && let Some(left_out) = self.reset_lines.line(host.now())
        {
            let by = match self.roles.get(&peer) {
                Some(PeerRole::Engine(engine)) => engine.to_string(),
                _ => "an operator".to_owned(),
            };
            let (pages, below_pages) = (reset.pages, &reset.below_pages);
            tracing::info!(
                by,
                pages,
                ?below_pages,
                left_out,
                "a reset has removed pages"
            );
        }
        let message = match answer {
            Ok(answer) => answer.into(),
            Err(refusal) => Message::Error(to_error(&refusal)),
        };
        self.reply(host, peer, engine, id, message);
    }
}
