//! Requests of operators that the shell answers itself.

use std::fmt;

use super::{LeaderHost, LeaderShell, Origin};
use kvferry_protocol::{Drain, DrainAnswer, Message, ProbeAnswer, Status};

impl<P: fmt::Debug> LeaderShell<P> {
    pub(super) fn read_status(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        origin: Origin,
        body: Status,
    ) {
        let answer = match self.status(host, body.check) {
            Ok(answer) => Message::StatusAnswer(*answer),
            Err(error) => Message::Error(error),
        };
        host.reply(origin.peer, origin.request, answer);
    }

    pub(super) fn probe(&mut self, host: &mut dyn LeaderHost<Process = P>, origin: Origin) {
        let answer = ProbeAnswer {
            tiers: u8::try_from(self.core.probe()).unwrap_or(u8::MAX),
            copied_bytes: 0,
            draining: self.core.is_draining(),
        };
        host.reply(origin.peer, origin.request, Message::ProbeAnswer(answer));
    }

    pub(super) fn drain_or_resume(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        origin: Origin,
        body: &Drain,
    ) {
        let drained = self.core.is_draining();
        match body.resume {
            true => self.core.resume(),
            false => self.core.drain(),
        }
        let loads = (self.core.open_loads() + self.core.parked_requests()) as u64;
        let stores = self.core.open_stores() as u64;
        let transfers = self.core.copies_under_way() as u64;
        match (drained, self.core.is_draining()) {
            (false, true) => tracing::info!(
                loads,
                stores,
                transfers,
                "drains, by order of an operator: new lookups, loads and stores are refused"
            ),
            (true, false) => tracing::info!("takes requests again, by order of an operator"),
            _ => {}
        }
        let answer = DrainAnswer {
            drained: self.core.is_draining() && loads + stores + transfers == 0,
            loads,
            stores,
            transfers,
        };
        host.reply(origin.peer, origin.request, Message::DrainAnswer(answer));
    }
}
