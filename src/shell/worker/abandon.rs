//! Requests that ranks abandon: the worker copies nothing for them from then on.

use std::fmt;

use super::ranks::refuse;
use super::{Fatal, WorkerHost, WorkerShell};
use kvferry_core::{WORKER_ABANDONERS_MAX, WORKER_ABANDONERS_OF_USER_MAX, WorkerEvent};
use kvferry_protocol::{Abandon, Empty, ErrorCode, Message};
use kvferry_types::{EngineId, PeerId, RequestId, User};

impl<P: fmt::Debug, M> WorkerShell<P, M> {
    /// Abandons requests, also those of an engine that has not registered here: a worker that replaced a dead one
    /// copies nothing for that engine, and answers so.
    pub(super) fn abandon(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        peer: PeerId,
        request: RequestId,
        abandon: &Abandon,
    ) -> Result<(), Fatal> {
        let Some((engine, user)) = self.ranks.identity_of(peer) else {
            return Ok(());
        };
        if let Some(error) = self.ranks.registered_by_another(host, peer, engine) {
            host.reply(peer, request, Message::Error(error));
            return Ok(());
        }
        if self.forgets_abandoned_of(host, peer, request, (engine, user)) {
            return Ok(());
        }
        let answer = Message::AbandonAnswer(Empty {});
        let number = self.ranks.waits_for_copies(peer, request, answer);
        let event = WorkerEvent::Abandon {
            engine,
            user,
            number,
            requests: abandon.requests.iter().copied().map(RequestId).collect(),
        };
        self.step(host, event)
    }

    /// Abandons the requests of an engine up to `through`.
    pub(super) fn abandon_through(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        (engine, user): (EngineId, User),
        number: u64,
        through: RequestId,
    ) -> Result<(), Fatal> {
        let event = WorkerEvent::AbandonThrough {
            engine,
            user,
            number,
            through,
        };
        self.step(host, event)
    }

    /// Refuses to abandon requests of an engine, and returns true, if the worker could not remember them, so that a late
    /// order would be carried out.
    pub(super) fn forgets_abandoned_of(
        &mut self,
        host: &mut dyn WorkerHost<Process = P, Memory = M>,
        peer: PeerId,
        request: RequestId,
        (engine, user): (EngineId, User),
    ) -> bool {
        if self.core.remembers_abandoned_of(host.now(), engine, user) {
            return false;
        }
        let text = format!(
            "{WORKER_ABANDONERS_MAX} other engines without memory, or {WORKER_ABANDONERS_OF_USER_MAX} of another user than \
             kvferry's, abandoned requests in the last 10 minutes: retry"
        );
        refuse(host, peer, request, ErrorCode::Busy, text);
        true
    }
}
