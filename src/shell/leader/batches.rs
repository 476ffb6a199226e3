//! Stores that arrive several in one message, and are answered in one.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::time::Duration;

use super::{LeaderHost, LeaderShell, Origin};
use kvferry_core::LeaderEvent;
use kvferry_protocol::{ErrorBody, ErrorCode, Message, StoreResult, Stores, StoresAnswer};
use kvferry_types::{EngineId, PeerId, Request, RequestId, Time};

/// Age of a message at which the stores of it that have ended are answered under their own ids; each further one is, when
/// it ends. A store that waits for another engine, or for a worker that is gone, does not keep the pages of the others.
const ALONE_AFTER: Duration = Duration::from_millis(100);

/// The messages with several stores that wait for the end of one. An engine's connection has at most as many as it has
/// request credits, and their stores take at most its byte credits on the wire; in memory each store takes less than 300
/// bytes here.
#[derive(Debug, Default)]
pub(super) struct StoreBatches {
    batches: BTreeMap<(EngineId, RequestId), Batch>,
    /// For each store without an answer: its message, and its place there.
    places: BTreeMap<(EngineId, RequestId), (RequestId, usize)>,
    /// Messages younger than [`ALONE_AFTER`], the oldest first. Some may be answered, but not the first: at most as many
    /// as arrive in that time.
    young: VecDeque<(Time, EngineId, RequestId)>,
}

#[derive(Debug)]
struct Batch {
    begun: Time,
    stores: Vec<RequestId>,
    results: Vec<Option<StoreResult>>,
    missing: usize,
}

impl StoreBatches {
    /// Adds a message with these stores. Fails if one of them waits for its answer already: it would get two.
    fn begin(
        &mut self,
        now: Time,
        engine: EngineId,
        message: RequestId,
        stores: &[RequestId],
    ) -> Result<(), RequestId> {
        for (place, store) in stores.iter().enumerate() {
            match self.places.entry((engine, *store)) {
                Entry::Vacant(vacant) => vacant.insert((message, place)),
                Entry::Occupied(_) => {
                    for store in &stores[..place] {
                        self.places.remove(&(engine, *store));
                    }
                    return Err(*store);
                }
            };
        }
        let batch = Batch {
            begun: now,
            stores: stores.to_vec(),
            results: vec![None; stores.len()],
            missing: stores.len(),
        };
        self.batches.insert((engine, message), batch);
        self.young.push_back((now, engine, message));
        Ok(())
    }

    /// Refuses a request under the id of a store that waits for its answer in a message with others. The answer of the store
    /// goes to that message, and the request would have none, or one of the store's kind beside its own.
    pub(super) fn check_id(&self, engine: EngineId, id: RequestId) -> Result<(), ErrorBody> {
        let Some((message, _)) = self.places.get(&(engine, id)) else {
            return Ok(());
        };
        let text = format!(
            "{id} is that of a store in the message stores {message}, which is open: wait for its answer"
        );
        Err(ErrorBody::new(ErrorCode::Invalid, text))
    }

    /// Takes the answer of a request. Returns what is sent for it: the answer of a request with a message of its own, or
    /// of a store that others of its message keep waiting; the results of a message whose last store has ended; or
    /// nothing.
    fn end(
        &mut self,
        now: Time,
        engine: EngineId,
        request: RequestId,
        answer: Message,
    ) -> Option<(RequestId, Message)> {
        let Some((message, place)) = self.places.remove(&(engine, request)) else {
            return Some((request, answer));
        };
        let batch = self.batches.get_mut(&(engine, message))?;
        let early = (now - batch.begun >= ALONE_AFTER).then(|| (request, answer.clone()));
        let (answer, error) = match answer {
            Message::StoreAnswer(answer) => (Some(answer), None),
            Message::Error(error) => (None, Some(error)),
            other => {
                let text = format!("{} answers no store", other.kind().name());
                (None, Some(ErrorBody::new(ErrorCode::Internal, text)))
            }
        };
        batch.missing -= 1;
        batch.results[place] = Some(StoreResult { answer, error });
        if batch.missing > 0 {
            return early;
        }
        let batch = self.batches.remove(&(engine, message))?;
        self.trim();
        let results = batch.results.into_iter().flatten().collect();
        Some((message, Message::StoresAnswer(StoresAnswer { results })))
    }

    /// When the next message is so old that its stores are answered alone.
    pub(super) fn next_timeout(&self) -> Option<Time> {
        // Messages that are answered are removed from the front, so that the first one is of interest.
        self.young.front().map(|(begun, _, _)| *begun + ALONE_AFTER)
    }

    /// Forgets answered messages at the front of the young ones.
    fn trim(&mut self) {
        while let Some((begun, engine, message)) = self.young.front() {
            match self.batches.get(&(*engine, *message)) {
                Some(batch) if batch.begun == *begun => break,
                _ => self.young.pop_front(),
            };
        }
    }

    /// Takes the answers of ended stores whose messages have become too old to wait for.
    fn grown_old(&mut self, now: Time) -> Vec<(EngineId, RequestId, Message)> {
        let mut answers = Vec::new();
        while self.next_timeout().is_some_and(|at| at <= now) {
            let Some((_, engine, message)) = self.young.pop_front() else {
                break;
            };
            let Some(batch) = self.batches.get(&(engine, message)) else {
                continue;
            };
            // Stores that end from now on are answered alone by `end`.
            for (store, result) in batch.stores.iter().zip(&batch.results) {
                let answer = match result {
                    Some(StoreResult {
                        answer: Some(answer),
                        ..
                    }) => Message::StoreAnswer(*answer),
                    Some(StoreResult {
                        error: Some(error), ..
                    }) => Message::Error(error.clone()),
                    _ => continue,
                };
                answers.push((engine, *store, answer));
            }
            self.trim();
        }
        answers
    }

    /// Drops the messages of an engine whose connection is closed: it sends the stores again over the next one.
    pub(super) fn forget(&mut self, engine: EngineId) {
        self.batches.retain(|(whose, _), _| *whose != engine);
        self.places.retain(|(whose, _), _| *whose != engine);
        self.young.retain(|(_, whose, _)| *whose != engine);
        self.trim();
    }
}

/// Why no store of a message is begun: this id is taken.
fn taken(id: RequestId) -> String {
    let id = id.0;
    format!("stores.id {id} is the message's own, or of a request without an answer: draw a new id")
}

impl<P: fmt::Debug> LeaderShell<P> {
    /// Carries out the stores of a message in their order.
    pub(super) fn stores(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        origin: Origin,
        engine: EngineId,
        stores: Stores,
    ) {
        let Origin {
            peer,
            request: message,
            deadline_ms,
            ..
        } = origin;
        let ids: Vec<RequestId> = stores.stores.iter().map(|one| RequestId(one.id)).collect();
        // One of these, or of a store of another message, would get two answers or none of its own.
        let alone = ids
            .iter()
            .find(|id| **id == message || host.is_open(peer, **id));
        let begun = match (ids.is_empty(), alone) {
            (true, _) => Err("stores is empty: name at least one store".to_owned()),
            (_, Some(id)) => Err(taken(*id)),
            (_, None) => self
                .batches
                .begin(host.now(), engine, message, &ids)
                .map_err(taken),
        };
        if let Err(text) = begun {
            let error = ErrorBody::new(ErrorCode::Invalid, text);
            return host.reply(peer, message, Message::Error(error));
        }
        let now = host.now();
        for one in stores.stores {
            let id = RequestId(one.id);
            let deadline_ms = one.deadline_ms.min(deadline_ms);
            match Request::try_from(Message::Store(one.store)) {
                Ok(request) => {
                    let event = LeaderEvent::Request {
                        engine,
                        id,
                        deadline: now + Duration::from_millis(u64::from(deadline_ms)),
                        request,
                    };
                    self.step(host, event);
                }
                Err(error) => self.reply(host, peer, engine, id, Message::Error(error)),
            }
        }
    }

    /// Answers stores that have ended, where others of their message do not end soon.
    pub(super) fn answer_alone(&mut self, host: &mut dyn LeaderHost<Process = P>) {
        for (engine, store, answer) in self.batches.grown_old(host.now()) {
            if let Some(peer) = self.engines.get(&engine).map(|holder| holder.peer) {
                host.reply(peer, store, answer);
            }
        }
    }

    /// Answers a request of an engine: in a message of its own, or with the stores that arrived with it.
    pub(super) fn reply(
        &mut self,
        host: &mut dyn LeaderHost<Process = P>,
        peer: PeerId,
        engine: EngineId,
        id: RequestId,
        answer: Message,
    ) {
        if let Some((request, answer)) = self.batches.end(host.now(), engine, id, answer) {
            host.reply(peer, request, answer);
        }
    }
}
