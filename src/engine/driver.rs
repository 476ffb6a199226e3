//! Runs the scheduler of one engine live: sends its requests to a leader and its work to rank processes.
//!
//! Every request ends by its deadline. A lookup without an answer is a miss. When a load or a store is not answered,
//! the ranks first make the workers release its pages: a page that a worker may still write must not be reused.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use tokio::process::Child;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::error::EngineError;
use crate::metrics::EngineMetrics;
use crate::pipe::{RankOrder, RankReport};
use crate::rank_pipe::{RANK_QUEUE, RankPipe, send_orders, take_reports};
use kvferry_client::{AdminClient, EngineClient, Failure};
use kvferry_protocol::ErrorCode;
use kvferry_types::{Answer, Request, RequestId, SlotId};
use kvferry_workload::scheduler::{Action, Prompt, Scheduler, Served, WorkKind};

/// Pause before an engine repeats a `finish` that the leader refused with a retryable error.
const FINISH_AGAIN: Duration = Duration::from_millis(50);

/// Interval at which the leader's moves are polled.
const MOVES_EVERY: Duration = Duration::from_micros(500);

/// The scheduler, the connection and the ranks of one engine.
#[derive(Debug)]
pub struct EngineParts {
    /// The engine's scheduler.
    pub scheduler: Scheduler,
    /// The connection to the leader.
    pub client: EngineClient,
    /// The ranks, which have registered.
    pub ranks: Vec<RankPipe>,
    /// With it, each request waits until no move between tiers is in flight, as in a simulation in which moves take no
    /// time.
    pub await_moves: Option<AdminClient>,
}

/// An event of one engine of a fleet.
pub(super) struct EngineEvent {
    /// The engine's index in the fleet.
    pub(super) engine: usize,
    pub(super) kind: EngineEventKind,
}

pub(super) enum EngineEventKind {
    Answered {
        id: RequestId,
        answer: Result<Answer, Failure>,
        us: u64,
    },
    /// A `finish` was not answered by its deadline, or was refused with a retryable error. The request is repeated
    /// until it succeeds.
    FinishIsLate(RequestId),
    Reported(RankReport),
    RankLost(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequestKind {
    Lookup,
    Load,
    Store,
    Finish,
}

/// The task of a ticket, and the number of ranks that have not reported.
struct OpenTicket {
    task: TicketTask,
    missing: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TicketTask {
    Work(SlotId, WorkKind),
    Abandon(RequestId, Instant),
}

/// The arrival time of a prompt, and the time from there until its lookup was sent.
struct Arrived {
    at: Instant,
    waited: Duration,
}

/// Runs one engine of a fleet: its scheduler, its connection to the leader and its ranks.
pub(super) struct EngineDriver {
    engine: usize,
    scheduler: Scheduler,
    client: EngineClient,
    await_moves: Option<AdminClient>,
    request_timeout: Duration,
    queues: Vec<mpsc::Sender<RankOrder>>,
    report: mpsc::Sender<EngineEvent>,
    open: HashMap<u64, OpenTicket>,
    requests: HashMap<RequestId, RequestKind>,
    /// `finish` requests that the leader has not answered.
    finishing: HashSet<RequestId>,
    arrived: HashMap<SlotId, Arrived>,
    next_ticket: u64,
    observed: EngineMetrics,
    actions: Vec<Action>,
    children: Vec<Child>,
}

impl EngineDriver {
    /// Connects a scheduler, a leader and ranks. Their events are sent to `report`.
    pub(super) fn new(
        engine: usize,
        parts: EngineParts,
        request_timeout: Duration,
        report: mpsc::Sender<EngineEvent>,
    ) -> Self {
        let mut queues = Vec::new();
        let mut children = Vec::new();
        for (index, rank) in parts.ranks.into_iter().enumerate() {
            let (queue, orders) = mpsc::channel(RANK_QUEUE);
            tokio::spawn(send_orders(orders, rank.orders));
            let event = move |report: Option<RankReport>| EngineEvent {
                engine,
                kind: report.map_or(EngineEventKind::RankLost(index), EngineEventKind::Reported),
            };
            tokio::spawn(take_reports(rank.reports, report.clone(), event));
            queues.push(queue);
            children.push(rank.child);
        }
        Self {
            engine,
            scheduler: parts.scheduler,
            client: parts.client,
            await_moves: parts.await_moves,
            request_timeout,
            queues,
            report,
            open: HashMap::new(),
            requests: HashMap::new(),
            finishing: HashSet::new(),
            arrived: HashMap::new(),
            next_ticket: 0,
            observed: EngineMetrics::default(),
            actions: Vec::new(),
            children,
        }
    }

    pub(super) fn open_prompts(&self) -> usize {
        self.scheduler.open_prompts()
    }

    /// Whether a `finish` request is unanswered.
    pub(super) fn is_finishing(&self) -> bool {
        !self.finishing.is_empty()
    }

    pub(super) fn observed(&self) -> &EngineMetrics {
        &self.observed
    }

    pub(super) fn held_pages(&self) -> u32 {
        self.scheduler.held_pages()
    }

    /// Adds a prompt. Appends the prompts that completed.
    pub(super) async fn arrive(
        &mut self,
        prompt: Prompt,
        served: &mut Vec<Served>,
    ) -> Result<(), EngineError> {
        let arrived = Arrived {
            at: Instant::now(),
            waited: Duration::ZERO,
        };
        self.arrived.insert(prompt.slot, arrived);
        self.scheduler.arrive(prompt, &mut self.actions);
        self.act(served).await
    }

    /// Ends the ranks: closes their pipes and waits at most `limit` for each.
    pub(super) async fn end(mut self, limit: Duration) -> Result<EngineMetrics, EngineError> {
        self.queues.clear();
        for (rank, mut child) in self.children.drain(..).enumerate() {
            match tokio::time::timeout(limit, child.wait()).await {
                Ok(Ok(status)) if status.success() => {}
                Ok(Ok(status)) => return Err(EngineError::RankStatus { rank, status }),
                Ok(Err(error)) => return Err(EngineError::Pipe(error)),
                Err(_) => return Err(EngineError::TooLate { what: "end", limit }),
            }
        }
        Ok(self.observed)
    }

    /// Kills the ranks, whatever they do.
    pub(super) async fn kill(mut self) -> EngineMetrics {
        for mut child in self.children.drain(..) {
            if let Err(error) = child.kill().await {
                tracing::debug!(%error, "a rank had ended");
            }
        }
        self.observed
    }

    /// Handles an event. [`Self::act`] carries out the resulting actions.
    pub(super) fn take(&mut self, happened: EngineEventKind) -> Result<(), EngineError> {
        match happened {
            EngineEventKind::RankLost(rank) => return Err(EngineError::RankEnded(rank)),
            EngineEventKind::Answered { id, answer, us } => self.answered(id, answer, us),
            EngineEventKind::FinishIsLate(id) => {
                self.observed.refused(format!("{id}: not finished yet"));
                self.scheduler.answered(id, None, &mut self.actions);
            }
            EngineEventKind::Reported(report) => self.reported(report)?,
        }
        Ok(())
    }

    fn reported(&mut self, report: RankReport) -> Result<(), EngineError> {
        self.observed.verified_bytes += report.verified_bytes;
        self.observed.mismatched_bytes += report.mismatched_bytes;
        if report.fatal {
            return Err(EngineError::RankFailed(report.complaint));
        }
        if !report.complaint.is_empty() {
            self.observed.complain(report.complaint);
        }
        let open = self.open.get_mut(&report.ticket);
        let open = open.ok_or(EngineError::Protocol("a report of unknown work"))?;
        open.missing -= 1;
        if open.missing > 0 {
            return Ok(());
        }
        let task = open.task;
        self.open.remove(&report.ticket);
        match task {
            TicketTask::Work(slot, kind) => {
                if kind == WorkKind::Compute
                    && let Some(arrived) = self.arrived.get(&slot)
                {
                    let first_token = microseconds(arrived.at.elapsed());
                    self.observed.latencies.first_token_us.push(first_token);
                }
                self.scheduler.worked(slot, kind, &mut self.actions);
            }
            // No worker copies for the request any longer, so the prompt may use its pages again.
            TicketTask::Abandon(id, begun) => {
                let us = microseconds(begun.elapsed());
                let longest = self.observed.abandon_max_us.max(us);
                self.observed.abandon_max_us = longest;
                self.scheduler.answered(id, None, &mut self.actions);
            }
        }
        Ok(())
    }

    fn answered(&mut self, id: RequestId, answer: Result<Answer, Failure>, us: u64) {
        let latencies = &mut self.observed.latencies;
        let requested = self.requests.remove(&id);
        match requested {
            Some(RequestKind::Lookup) => latencies.lookup_us.push(us),
            Some(RequestKind::Load) => latencies.load_us.push(us),
            Some(RequestKind::Store) => latencies.store_us.push(us),
            Some(RequestKind::Finish) | None => {}
        }
        if requested.is_some_and(|requested| requested != RequestKind::Finish) {
            self.observed.answer_max_us = self.observed.answer_max_us.max(us);
        }
        self.finishing.remove(&id);
        let failure = match answer {
            Ok(answer) => {
                return self.scheduler.answered(id, Some(answer), &mut self.actions);
            }
            Err(failure) => failure,
        };
        let copies = matches!(requested, Some(RequestKind::Load | RequestKind::Store));
        self.observed.refused(failure.to_string());
        if copies && !failure.over {
            self.observed.abandoned += 1;
            self.scheduler.abandoned(id, &mut self.actions);
        } else {
            self.scheduler.answered(id, None, &mut self.actions);
        }
    }

    /// Carries out the actions of the scheduler. Appends the prompts that completed.
    pub(super) async fn act(&mut self, served: &mut Vec<Served>) -> Result<(), EngineError> {
        for action in std::mem::take(&mut self.actions) {
            match action {
                Action::Idle => {}
                Action::Abandon { id } => {
                    let ticket = self.ticket(TicketTask::Abandon(id, Instant::now()));
                    self.order(RankOrder::abandon(ticket, id)).await?;
                }
                Action::Done(done) => {
                    if let Some(arrived) = self.arrived.remove(&done.slot)
                        && done.waited_for_pages
                    {
                        let waited = microseconds(arrived.waited);
                        self.observed.latencies.page_wait_us.push(waited);
                    }
                    served.push(done);
                }
                Action::Send { id, request } => self.send(id, request),
                Action::Work {
                    slot,
                    kind,
                    parts,
                    written_through,
                    ..
                } => {
                    let ticket = self.ticket(TicketTask::Work(slot, kind));
                    let through = written_through.map_or(0, |id| id.0);
                    let mut order = RankOrder::new(ticket, kind, through);
                    for part in parts {
                        for (position, page) in (part.first_page..).zip(part.pages.iter_pages()) {
                            let content = self.scheduler.content(slot, part.group, position);
                            let content =
                                content.ok_or(EngineError::Protocol("a page without a hash"))?;
                            order.add_page(part.group, page, content);
                        }
                    }
                    self.order(order).await?;
                }
            }
        }
        Ok(())
    }

    /// Allocates the number under which every rank reports `task`.
    fn ticket(&mut self, task: TicketTask) -> u64 {
        self.next_ticket += 1;
        let missing = self.queues.len();
        self.open
            .insert(self.next_ticket, OpenTicket { task, missing });
        self.next_ticket
    }

    async fn order(&self, order: RankOrder) -> Result<(), EngineError> {
        for (rank, queue) in self.queues.iter().enumerate() {
            let sent = queue.send(order.clone()).await;
            sent.map_err(|_| EngineError::RankEnded(rank))?;
        }
        Ok(())
    }

    fn send(&mut self, id: RequestId, request: Request) {
        let requested = match &request {
            Request::Lookup { slot, .. } => {
                if let Some(arrived) = self.arrived.get_mut(slot) {
                    arrived.waited = arrived.at.elapsed();
                }
                RequestKind::Lookup
            }
            Request::Load { .. } => RequestKind::Load,
            Request::Store { .. } => RequestKind::Store,
            Request::Finish { .. }
            | Request::Reset { .. }
            | Request::Flush
            | Request::CancelStores { .. } => RequestKind::Finish,
        };
        self.requests.insert(id, requested);
        if requested == RequestKind::Finish {
            self.finishing.insert(id);
        }
        let requesting = RequestTask {
            engine: self.engine,
            client: self.client.clone(),
            moves: self.await_moves.clone(),
            report: self.report.clone(),
            timeout: self.request_timeout,
        };
        tokio::spawn(async move {
            let reported = requesting.request(id, request).await;
            if reported.is_err() {
                tracing::debug!("the engine has ended");
            }
        });
    }
}

/// State of one request to the leader.
struct RequestTask {
    engine: usize,
    client: EngineClient,
    moves: Option<AdminClient>,
    report: mpsc::Sender<EngineEvent>,
    timeout: Duration,
}

impl RequestTask {
    /// Sends a request and waits until its deadline. A `finish` is repeated until the leader accepts it.
    async fn request(&self, id: RequestId, request: Request) -> Result<(), Closed> {
        if let Some(leader) = &self.moves
            && let Err(failure) = no_moves(leader, self.timeout).await
        {
            tracing::warn!(%failure, "moves are still in flight");
        }
        let begun = Instant::now();
        let mut late = false;
        loop {
            let answer = self.client.request(id, request.clone(), self.timeout).await;
            // The leader keeps the slot until a `finish` succeeds.
            if matches!(request, Request::Finish { .. })
                && let Err(failure) = &answer
                && failure.retry
            {
                if !std::mem::replace(&mut late, true) {
                    self.report(EngineEventKind::FinishIsLate(id)).await?;
                }
                if failure.code != ErrorCode::Deadline {
                    tokio::time::sleep(FINISH_AGAIN).await;
                }
                continue;
            }
            let us = microseconds(begun.elapsed());
            return self
                .report(EngineEventKind::Answered { id, answer, us })
                .await;
        }
    }

    async fn report(&self, happened: EngineEventKind) -> Result<(), Closed> {
        let engine = self.engine;
        let sent = self
            .report
            .send(EngineEvent {
                engine,
                kind: happened,
            })
            .await;
        sent.map_err(|_| Closed)
    }
}

/// Waits, at most for `limit`, until no move between tiers is in flight or waits.
///
/// # Errors
/// The leader does not answer, or its moves do not end.
async fn no_moves(leader: &AdminClient, limit: Duration) -> Result<(), Failure> {
    let until = Instant::now() + limit;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let status = leader.status(false, left).await?;
        let moves = status.moves.unwrap_or_default();
        if moves.under_way + moves.waiting == 0 {
            return Ok(());
        }
        tokio::time::sleep(MOVES_EVERY).await;
    }
}

/// The receiver of events has been dropped.
struct Closed;

fn microseconds(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use kvferry_client::EngineSettings;
    use kvferry_protocol::{ErrorBody, ErrorCode, Message, Role};
    use kvferry_transport::{
        Address, Limits, MemoryTransport, Server, ServerEvent, ServerSettings, Transport,
    };
    use kvferry_types::{EngineId, Epoch, LookupAnswer, PageHashes};

    fn client(transport: &MemoryTransport) -> EngineClient {
        let address = Address::Memory("leader".to_owned());
        let settings = EngineSettings::new(address, EngineId([1; 16]), "test");
        EngineClient::start(Arc::new(transport.clone()), settings)
    }

    /// A driver whose only prompt has sent a load, and the load's id.
    fn loading() -> (EngineDriver, RequestId) {
        let parts = EngineParts {
            scheduler: Scheduler::new(16, 0),
            client: client(&MemoryTransport::default()),
            ranks: Vec::new(),
            await_moves: None,
        };
        let (report, _) = mpsc::channel(16);
        let mut driver = EngineDriver::new(0, parts, Duration::from_secs(1), report);
        let hashes = PageHashes::packed(16, vec![7; 64]).expect("16 bytes a page");
        let slot = SlotId(1);
        let prompt = Prompt {
            slot,
            namespace: Arc::from([]),
            tokens: 64,
            hashes: Arc::new(hashes),
        };
        driver.scheduler.arrive(prompt, &mut driver.actions);
        let lookup = sent(&mut driver);
        let found = Answer::Lookup(LookupAnswer {
            hit_pages: 4,
            ..LookupAnswer::default()
        });
        driver
            .scheduler
            .answered(lookup, Some(found), &mut driver.actions);
        driver.actions.clear();
        driver
            .scheduler
            .worked(slot, WorkKind::Poison, &mut driver.actions);
        let load = sent(&mut driver);
        driver.requests.insert(load, RequestKind::Load);
        (driver, load)
    }

    /// Returns the id of the request that the scheduler sends, and clears the actions.
    fn sent(driver: &mut EngineDriver) -> RequestId {
        let sent = driver.actions.iter().find_map(|action| match action {
            Action::Send { id, .. } => Some(*id),
            _ => None,
        });
        driver.actions.clear();
        sent.expect("a request")
    }

    fn abandons(driver: &EngineDriver, load: RequestId) -> bool {
        let mut actions = driver.actions.iter();
        actions.any(|action| matches!(action, Action::Abandon { id } if *id == load))
    }

    #[tokio::test]
    async fn only_an_error_with_over_frees_the_pages_of_a_load() {
        for code in ErrorCode::ALL {
            let said = ErrorBody::new(*code, "refused");
            let (mut driver, load) = loading();
            driver.answered(load, Err(said.clone().into()), 1);
            assert!(abandons(&driver, load), "{code:?} says nothing of copies");
            assert_eq!(driver.observed.abandoned, 1);

            let over = ErrorBody { over: true, ..said };
            let (mut driver, load) = loading();
            driver.answered(load, Err(over.into()), 1);
            assert!(!abandons(&driver, load), "{code:?}");
            assert_eq!(driver.observed.abandoned, 0);
        }
    }

    /// Starts a leader that answers each request with the next of `answers`.
    async fn leader(transport: &MemoryTransport, answers: Vec<Message>) {
        let address = Address::Memory("leader".to_owned());
        let listener = transport.listen(&address, Limits::default()).await;
        let settings = ServerSettings {
            features: 0,
            worker_seats: None,
            epoch: Epoch(1),
            heartbeat: Duration::from_secs(1),
            roles: vec![Role::Engine],
        };
        let mut server = Server::new(listener.expect("it listens"), settings);
        tokio::spawn(async move {
            let mut answers = answers.into_iter();
            while let Some(events) = server.next().await {
                for event in events {
                    if let ServerEvent::Message { peer, envelope } = event {
                        let answer = answers.next().expect("an answer is left");
                        server.replier().reply(peer, envelope.correlation, answer);
                    }
                }
            }
        });
    }

    #[tokio::test(start_paused = true)]
    async fn a_finish_that_is_refused_for_now_is_requested_until_it_succeeds() {
        let transport = MemoryTransport::default();
        let busy = Message::Error(ErrorBody::new(ErrorCode::NotReady, "in use"));
        let done = Message::FinishAnswer(kvferry_protocol::Empty {});
        leader(&transport, vec![busy.clone(), busy, done]).await;
        let (report, mut reports) = mpsc::channel(16);
        let client = client(&transport);
        let requesting = RequestTask {
            engine: 0,
            client,
            moves: None,
            report,
            timeout: Duration::from_secs(1),
        };
        let finish = Request::Finish { slot: SlotId(3) };
        let requested = requesting.request(RequestId(7), finish).await;
        assert!(requested.is_ok());
        let late = reports.recv().await.map(|event| event.kind);
        assert!(matches!(
            late,
            Some(EngineEventKind::FinishIsLate(RequestId(7)))
        ));
        let last = reports.recv().await.map(|event| event.kind);
        let answered = matches!(last, Some(EngineEventKind::Answered { answer: Ok(_), .. }));
        assert!(answered, "once the leader has taken it");
    }
}
