//! Drives the scheduler of the reference engine for real: requests go to a leader, work goes to rank processes.

use std::collections::HashMap;
use std::time::Duration;

use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::engine::pipe::{self, Order, Report};
use crate::engine::scheduler::{Action, Prompt, REQUEST_TIMEOUT, Scheduler, Served, WorkKind};
use crate::protocol::{ErrorCode, Message};
use crate::transport::{Client, Failure};
use crate::types::{Answer, Request, RequestId, SlotId};

/// Orders that may wait in the queue of a rank.
const RANK_QUEUE: usize = 1024;

/// How much longer a load or a store is waited for: its pages cannot be used before nothing reads or writes them any more.
const PAGES_PATIENCE: Duration = Duration::from_secs(20);

/// A rank process and the pipes to it.
#[derive(Debug)]
pub struct RankPipe {
    /// The process; it is killed when this is dropped.
    pub child: Child,
    /// Takes orders.
    pub orders: ChildStdin,
    /// Gives reports.
    pub reports: ChildStdout,
}

/// Microseconds that requests took.
#[derive(Debug, Clone, Default)]
pub struct Latencies {
    /// Of lookups.
    pub lookup_us: Vec<u64>,
    /// Of loads.
    pub load_us: Vec<u64>,
    /// Of stores.
    pub store_us: Vec<u64>,
    /// From a prompt's arrival to the end of its computation, checks of what was loaded included.
    pub first_token_us: Vec<u64>,
    /// From a prompt's arrival to its lookup, where pages were missing.
    pub page_wait_us: Vec<u64>,
}

/// What was seen at the engine.
#[derive(Debug, Clone, Default)]
pub struct Observed {
    /// Bytes of loaded pages that were compared, all ranks.
    pub verified_bytes: u64,
    /// Bytes that were wrong.
    pub mismatched_bytes: u64,
    /// The first complaints of the ranks.
    pub complaints: Vec<String>,
    /// The first refusals of the leader.
    pub refusals: Vec<String>,
    /// How long requests took.
    pub latencies: Latencies,
}

/// Most complaints and refusals that are kept.
const KEPT_TEXTS: usize = 8;

enum Happened {
    Answered {
        id: RequestId,
        answer: Result<Message, Failure>,
        us: u64,
    },
    Reported(Report),
    RankLost(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asked {
    Lookup,
    Load,
    Store,
    Finish,
}

struct Open {
    slot: SlotId,
    kind: WorkKind,
    missing: usize,
}

/// When a prompt came, and how long it waited then.
struct Arrived {
    at: Instant,
    waited: Duration,
}

/// See the module.
pub struct Driver {
    scheduler: Scheduler,
    client: Client,
    queues: Vec<mpsc::Sender<Order>>,
    happened: mpsc::Receiver<Happened>,
    report: mpsc::Sender<Happened>,
    work: HashMap<u64, Open>,
    asked: HashMap<RequestId, Asked>,
    open: HashMap<SlotId, Arrived>,
    next_ticket: u64,
    observed: Observed,
    actions: Vec<Action>,
    children: Vec<Child>,
}

impl Driver {
    /// Joins a scheduler, a leader and ranks that have registered.
    pub fn new(scheduler: Scheduler, client: Client, ranks: Vec<RankPipe>) -> Self {
        let (report, happened) = mpsc::channel(RANK_QUEUE);
        let mut queues = Vec::new();
        let mut children = Vec::new();
        for (index, rank) in ranks.into_iter().enumerate() {
            let (queue, orders) = mpsc::channel(RANK_QUEUE);
            tokio::spawn(send_orders(orders, rank.orders));
            tokio::spawn(take_reports(index, rank.reports, report.clone()));
            queues.push(queue);
            children.push(rank.child);
        }
        Self {
            scheduler,
            client,
            queues,
            happened,
            report,
            work: HashMap::new(),
            asked: HashMap::new(),
            open: HashMap::new(),
            next_ticket: 0,
            observed: Observed::default(),
            actions: Vec::new(),
            children,
        }
    }

    /// Prompts that run or wait.
    pub fn open_prompts(&self) -> usize {
        self.scheduler.open_prompts()
    }

    /// What was seen so far.
    pub fn observed(&self) -> &Observed {
        &self.observed
    }

    /// Pages that prompts hold: zero when none runs.
    pub fn held_pages(&self) -> u32 {
        self.scheduler.held_pages()
    }

    /// A prompt arrives. Appends what was served meanwhile.
    pub async fn arrive(&mut self, prompt: Prompt, served: &mut Vec<Served>) -> Result<(), String> {
        let arrived = Arrived {
            at: Instant::now(),
            waited: Duration::ZERO,
        };
        self.open.insert(prompt.slot, arrived);
        self.scheduler.arrive(prompt, &mut self.actions);
        self.act(served).await
    }

    /// Waits until something happens, at most until `limit`, and goes on from there. Appends what was served.
    pub async fn progress(
        &mut self,
        limit: Instant,
        served: &mut Vec<Served>,
    ) -> Result<(), String> {
        let Ok(happened) = tokio::time::timeout_at(limit, self.happened.recv()).await else {
            return Ok(());
        };
        let mut next = happened;
        while let Some(happened) = next {
            self.take(happened)?;
            next = self.happened.try_recv().ok();
        }
        self.act(served).await
    }

    /// Ends the ranks: closes their pipes and waits for them, at most `limit` each.
    pub async fn end(mut self, limit: Duration) -> Result<Observed, String> {
        self.queues.clear();
        for (rank, mut child) in self.children.drain(..).enumerate() {
            match tokio::time::timeout(limit, child.wait()).await {
                Ok(Ok(status)) if status.success() => {}
                Ok(Ok(status)) => return Err(format!("engine rank {rank} ended with {status}")),
                Ok(Err(error)) => return Err(format!("engine rank {rank}: {error}")),
                Err(_) => return Err(format!("engine rank {rank} does not end")),
            }
        }
        Ok(self.observed)
    }

    fn take(&mut self, happened: Happened) -> Result<(), String> {
        match happened {
            Happened::RankLost(rank) => return Err(format!("engine rank {rank} ended early")),
            Happened::Answered {
                id,
                answer: Err(failure),
                ..
            } if failure.code == ErrorCode::Deadline
                && matches!(self.asked.get(&id), Some(Asked::Load | Asked::Store)) =>
            {
                return Err(format!(
                    "{id}: a load or a store was never answered, its pages cannot be used: {failure}"
                ));
            }
            Happened::Answered { id, answer, us } => self.answered(id, answer, us),
            Happened::Reported(report) => {
                self.observed.verified_bytes += report.verified_bytes;
                self.observed.mismatched_bytes += report.mismatched_bytes;
                if report.fatal {
                    return Err(report.complaint);
                }
                if !report.complaint.is_empty() && self.observed.complaints.len() < KEPT_TEXTS {
                    self.observed.complaints.push(report.complaint);
                }
                let Some(open) = self.work.get_mut(&report.ticket) else {
                    return Err("a rank reported unknown work".to_owned());
                };
                open.missing -= 1;
                if open.missing == 0
                    && let Some(open) = self.work.remove(&report.ticket)
                {
                    if open.kind == WorkKind::Compute
                        && let Some(arrived) = self.open.get(&open.slot)
                    {
                        let first_token = microseconds(arrived.at.elapsed());
                        self.observed.latencies.first_token_us.push(first_token);
                    }
                    self.scheduler
                        .worked(open.slot, open.kind, &mut self.actions);
                }
            }
        }
        Ok(())
    }

    fn answered(&mut self, id: RequestId, answer: Result<Message, Failure>, us: u64) {
        let latencies = &mut self.observed.latencies;
        match self.asked.remove(&id) {
            Some(Asked::Lookup) => latencies.lookup_us.push(us),
            Some(Asked::Load) => latencies.load_us.push(us),
            Some(Asked::Store) => latencies.store_us.push(us),
            Some(Asked::Finish) | None => {}
        }
        let answer: Option<Answer> = match answer {
            Ok(message) => message.answer(),
            Err(failure) => {
                if self.observed.refusals.len() < KEPT_TEXTS {
                    self.observed.refusals.push(failure.to_string());
                }
                None
            }
        };
        self.scheduler.answered(id, answer, &mut self.actions);
    }

    async fn act(&mut self, served: &mut Vec<Served>) -> Result<(), String> {
        for action in std::mem::take(&mut self.actions) {
            match action {
                Action::Idle => {}
                Action::Abandon { id } => {
                    return Err(format!("{id}: this driver waits for every load and store"));
                }
                Action::Done(done) => {
                    if let Some(arrived) = self.open.remove(&done.slot)
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
                    positions,
                    written_through,
                } => {
                    self.next_ticket += 1;
                    let through = written_through.map_or(0, |id| id.0);
                    let mut order = Order::new(self.next_ticket, kind, through);
                    if let Some((hashes, pages)) = self.scheduler.pages_of(slot) {
                        for position in positions {
                            let position = position as usize;
                            order
                                .pages
                                .extend_from_slice(&pages[position].to_le_bytes());
                            let content = hashes.fingerprint(position).0;
                            order.contents.extend_from_slice(&content.to_be_bytes());
                        }
                    }
                    let missing = self.queues.len();
                    self.work.insert(
                        self.next_ticket,
                        Open {
                            slot,
                            kind,
                            missing,
                        },
                    );
                    for queue in &self.queues {
                        let sent = queue.send(order.clone()).await;
                        sent.map_err(|_| "an engine rank takes no orders".to_owned())?;
                    }
                }
            }
        }
        Ok(())
    }

    fn send(&mut self, id: RequestId, request: Request) {
        let asked = match &request {
            Request::Lookup { slot, .. } => {
                if let Some(arrived) = self.open.get_mut(slot) {
                    arrived.waited = arrived.at.elapsed();
                }
                Asked::Lookup
            }
            Request::Load { .. } => Asked::Load,
            Request::Store { .. } => Asked::Store,
            Request::Finish { .. } | Request::Reset { .. } => Asked::Finish,
        };
        self.asked.insert(id, asked);
        let patience = if matches!(asked, Asked::Load | Asked::Store) {
            PAGES_PATIENCE
        } else {
            Duration::ZERO
        };
        let (client, report) = (self.client.clone(), self.report.clone());
        tokio::spawn(async move {
            let begun = Instant::now();
            let answer = client
                .ask_patiently(id, request.into(), REQUEST_TIMEOUT, patience)
                .await;
            let us = microseconds(begun.elapsed());
            if report
                .send(Happened::Answered { id, answer, us })
                .await
                .is_err()
            {
                tracing::debug!("the engine has ended");
            }
        });
    }
}

fn microseconds(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

async fn send_orders(mut orders: mpsc::Receiver<Order>, mut pipe: ChildStdin) {
    while let Some(order) = orders.recv().await {
        if let Err(error) = pipe::write(&mut pipe, &order).await {
            tracing::debug!(%error, "a rank takes no orders");
            return;
        }
    }
}

async fn take_reports(rank: usize, mut reports: ChildStdout, happened: mpsc::Sender<Happened>) {
    loop {
        let next = match pipe::read::<Report>(&mut reports).await {
            Ok(Some(report)) => Happened::Reported(report),
            Ok(None) | Err(_) => Happened::RankLost(rank),
        };
        let last = matches!(next, Happened::RankLost(_));
        if happened.send(next).await.is_err() || last {
            return;
        }
    }
}

/// Waits until a rank says that it has registered.
pub async fn wait_until_ready(rank: &mut RankPipe, limit: Duration) -> Result<(), String> {
    match tokio::time::timeout(limit, pipe::read::<Report>(&mut rank.reports)).await {
        Err(_) => Err(format!("an engine rank is not ready after {limit:?}")),
        Ok(Ok(Some(report))) if report.fatal => Err(report.complaint),
        Ok(Ok(Some(_))) => Ok(()),
        Ok(Ok(None)) => Err("an engine rank ended before it was ready".to_owned()),
        Ok(Err(error)) => Err(error.to_string()),
    }
}
