//! Sends the requests of a recording to a leader again, in the recorded order of its decisions.
//!
//! A leader decides about a lookup when it answers it, and about the order of copies when each begins. The order in
//! which answers arrived at the recorded engine is that in which its leader made them. So the replay lets each copy
//! end where its answer stands in the recording: its `after` is the number of that frame, and the ranks report this
//! number as written when the replay reaches it. Before a lookup is sent, all copies end that were answered before it.

use std::collections::{BTreeSet, HashMap};
use std::io::Read;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::compare::{CallsReport, Conditions, compare, excuses_later, refusals_differ};
use super::file::{CallsError, FrameKind, Frames};
use super::frames::{Failed, HashWindow, LeaderFrame, Outcome, RequestKind, Requested, ended_id};
use super::plan::{Known, Plan, PlannedEnd, SlotHashes, answered, outcome};
use super::ranks::{Ranks, UnknownLayers};
use crate::error::EngineError;
use crate::pipe::RankOrder;
use kvferry_protocol::limits::DEADLINE_MAX_MS;
use kvferry_protocol::{Hello, Message, Role};
use kvferry_transport::{
    Address, Client, ClientSettings, Failure, Limits, PendingAnswer, ZmqTransport,
};
use kvferry_types::{
    Answer, EngineId, Fingerprint, GroupId, Part, Request, RequestId, SlotId, TierId,
};
use kvferry_workload::scheduler::WorkKind;

/// Id of the first request: above the numbers of all frames, which stand for the work that copies wait for.
const FIRST_ID: u64 = 1 << 40;
/// Wait for a copy after which the next one is let go, too: a store of the same pages may wait for it.
const STUCK: Duration = Duration::from_secs(1);
/// Time for which an answer is awaited beyond the deadline that the leader gets: its fence, and 2 s more.
const GRACE: Duration = Duration::from_secs(12);

/// Why a replay of calls ended early.
#[derive(Debug, thiserror::Error)]
pub enum PlayError {
    /// The recording.
    #[error(transparent)]
    Calls(#[from] CallsError),
    /// The ranks.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The engine's layers.
    #[error(transparent)]
    Layers(#[from] UnknownLayers),
    /// A request could not be queued.
    #[error("a request could not be sent: {0}")]
    Send(Failure),
    /// The file is not that of the plan.
    #[error("the recording changed while it was replayed")]
    Changed,
}

/// The processes that a recording is replayed with.
#[derive(Debug, Clone)]
pub struct PlaySettings {
    /// Address of the leader.
    pub leader: Address,
    /// Directories of the workers' sockets, by rank.
    pub workers: Vec<PathBuf>,
    /// Identity of the engine, drawn for this replay.
    pub engine: EngineId,
    /// Time limit of the ranks' registration.
    pub start_limit: Duration,
    /// Deadline of each request that copies nothing. Copies have the longest one.
    pub timeout: Duration,
    /// There is a tier below host memory.
    pub has_disk: bool,
    /// Pages of host memory; `None` if they are not known.
    pub host_pages: Option<u32>,
}

/// A request that was sent, and not compared yet.
struct Sent {
    kind: RequestKind,
    end: PlannedEnd,
    pending: Option<PendingAnswer>,
    outcome: Option<Outcome>,
    /// Pages that a load brings, with their contents.
    pages: Vec<(GroupId, u32, Fingerprint)>,
}

/// An engine that sends the requests of a recording.
pub struct Player<'a> {
    plan: &'a Plan,
    settings: PlaySettings,
    client: Client,
    ranks: Ranks,
    slots: SlotHashes,
    sent: HashMap<u64, Sent>,
    /// Copies whose end was not awaited yet: the frame after which each ends, and the id in the recording.
    copies: BTreeSet<(u64, u64)>,
    /// The number that the ranks have reported as written.
    released: u64,
    requests: usize,
    tickets: u64,
    /// A store found room for a different number of pages than in the recording.
    full: bool,
    /// A request that changes which pages are present could not be compared, for a reason that the recording shows.
    diverged: bool,
    /// There is a tier below host memory, in the recording or here.
    has_disk: bool,
    /// Pages of the smaller host memory.
    host_pages: u64,
    /// Epoch of the last leader whose sizes have been read, and whether it was not the first.
    epoch: Option<u64>,
    restarted: bool,
    /// Pages that stores have added, by the larger of both answers of each.
    added_pages: u64,
    report: CallsReport,
}

impl<'a> Player<'a> {
    /// Starts the ranks and the connection to the leader.
    pub fn start(plan: &'a Plan, settings: PlaySettings) -> Result<Self, PlayError> {
        let ranks = Ranks::start(
            &plan.header,
            plan.device_pages,
            settings.engine,
            settings.workers.clone(),
            settings.start_limit,
        )?;
        let client = ClientSettings {
            address: settings.leader.clone(),
            hello: Hello {
                engine: settings.engine.0,
                ..Hello::new(Role::Engine, "replay of recorded calls")
            },
            limits: Limits::default(),
        };
        let (has_disk, host_pages) = tiers(plan, &settings);
        Ok(Self {
            plan,
            has_disk,
            host_pages,
            client: Client::without_incoming(Arc::new(ZmqTransport), client),
            settings,
            ranks,
            slots: SlotHashes::default(),
            sent: HashMap::new(),
            copies: BTreeSet::new(),
            released: 0,
            requests: 0,
            tickets: 0,
            full: false,
            diverged: false,
            epoch: None,
            restarted: false,
            added_pages: 0,
            report: CallsReport::default(),
        })
    }

    /// Waits until every rank has registered.
    pub async fn wait_until_ready(&mut self) -> Result<(), PlayError> {
        Ok(self
            .ranks
            .wait_until_ready(self.settings.start_limit)
            .await?)
    }

    /// Replays the recording, which `source` reads from its first byte on.
    pub async fn play(
        mut self,
        source: impl Read,
        mut progress: impl FnMut(u64),
    ) -> Result<CallsReport, PlayError> {
        let mut frames = Frames::new(source)?;
        let mut hashes = HashWindow::default();
        while let Some(frame) = frames.next()? {
            if frame.number >= u64::from(self.plan.frames) {
                break;
            }
            match frame.kind {
                FrameKind::Call => {
                    hashes.call(&frame)?;
                }
                FrameKind::Request => {
                    let requested = hashes.request(&frame)?;
                    self.request(frame.number, requested).await?;
                }
                FrameKind::Answer | FrameKind::Failure => {
                    let id = ended_id(&frame)?;
                    if let Some(sent) = self.sent.get(&id) {
                        let recorded = outcome(&frame, sent.kind)?;
                        self.ended(frame.number, id, &recorded).await?;
                    }
                }
                FrameKind::Leader => {
                    let leader: LeaderFrame = frame.read()?;
                    self.restarted |= self.epoch.is_some_and(|epoch| epoch != leader.epoch);
                    self.epoch = Some(leader.epoch);
                }
                FrameKind::Header | FrameKind::Return => {}
            }
            progress(frame.number);
        }
        self.finish().await
    }

    /// The number of the work that no copy of the recording waits for.
    fn last(&self) -> u64 {
        u64::from(self.plan.frames) + 1
    }

    async fn request(&mut self, number: u64, requested: Requested) -> Result<(), PlayError> {
        let Requested { id, request } = requested;
        let index = self.requests;
        self.requests += 1;
        let end = *self.plan.ends.get(index).ok_or(PlayError::Changed)?;
        // As the plan has done, also for requests that are not sent.
        self.slots.note(&request).map_err(|_| PlayError::Changed)?;
        match end.known {
            Known::Unsent => {
                self.report.unsent += 1;
                return Ok(());
            }
            Known::NotServed => {
                self.report.not_served += 1;
                return Ok(());
            }
            _ => {}
        }
        let kind = RequestKind::of(&request);
        let decided = match end.known {
            Known::Answered | Known::Refused if !kind.copies() => u64::from(end.frame),
            _ => number,
        };
        self.advance(decided).await?;
        let ends_at = match end.known {
            Known::Nothing | Known::Cancelled => self.last(),
            _ => u64::from(end.frame),
        };
        let (message, pages) = self.prepare(request, ends_at).await?;
        let own = RequestId(FIRST_ID + index as u64);
        let pending = self
            .client
            .begin_request(own, message, self.limit(kind), GRACE);
        let pending = pending.map_err(PlayError::Send)?;
        self.report.sent += 1;
        let sent = Sent {
            kind,
            end,
            pending: Some(pending),
            outcome: None,
            // Only those of a load are compared.
            pages: if kind == RequestKind::Load {
                pages
            } else {
                Vec::new()
            },
        };
        self.sent.insert(id, sent);
        if kind.copies() {
            self.copies.insert((ends_at, id));
        } else if kind != RequestKind::CancelStores {
            self.wait(id).await?;
        }
        Ok(())
    }

    /// The deadline of a request. A copy may be held for long.
    fn limit(&self, kind: RequestKind) -> Duration {
        match kind.copies() {
            true => Duration::from_millis(DEADLINE_MAX_MS.into()),
            false => self.settings.timeout,
        }
    }

    /// Fills the pages of a store, and poisons those of a load. Returns the message, and the contents of its pages.
    async fn prepare(
        &mut self,
        mut request: Request,
        ends_at: u64,
    ) -> Result<(Message, Vec<(GroupId, u32, Fingerprint)>), PlayError> {
        let (kind, pages) = match &mut request {
            Request::Store {
                slot, parts, after, ..
            } => {
                *after = RequestId(ends_at);
                (WorkKind::Compute, self.contents(*slot, parts))
            }
            Request::Load { slot, parts, after } => {
                *after = RequestId(ends_at);
                (WorkKind::Poison, self.contents(*slot, parts))
            }
            _ => return Ok((request.into(), Vec::new())),
        };
        self.order(kind, &pages, 0).await?;
        Ok((request.into(), pages))
    }

    /// The pages of these parts with their contents. Pages without a hash are left out: a leader refuses them.
    fn contents(&self, slot: SlotId, parts: &[Part]) -> Vec<(GroupId, u32, Fingerprint)> {
        let Some(hashes) = self.slots.of(slot) else {
            return Vec::new();
        };
        let header = &self.plan.header;
        let mut pages = Vec::new();
        for part in parts {
            let Some(group) = header.groups.get(usize::from(part.group.0)) else {
                continue;
            };
            let per_page = (group.page_tokens / header.hash_tokens).max(1);
            let known = hashes.len() / per_page as usize;
            let view = hashes.view_of(per_page);
            for (position, page) in (part.first_page as usize..).zip(part.pages.iter_pages()) {
                if position < known {
                    pages.push((part.group, page, view.fingerprint(position)));
                }
            }
        }
        pages
    }

    async fn order(
        &mut self,
        kind: WorkKind,
        pages: &[(GroupId, u32, Fingerprint)],
        through: u64,
    ) -> Result<(), PlayError> {
        if pages.is_empty() && through == 0 {
            return Ok(());
        }
        self.tickets += 1;
        let mut order = RankOrder::new(self.tickets, kind, through);
        for (group, page, content) in pages {
            order.add_page(*group, *page, *content);
        }
        Ok(self.ranks.order(&order).await?)
    }

    /// Lets all copies end that were answered up to this frame, and waits for them.
    async fn advance(&mut self, to: u64) -> Result<(), PlayError> {
        let due: Vec<(u64, u64)> = self.copies.range(..=(to, u64::MAX)).copied().collect();
        let Some((last, _)) = due.last() else {
            return Ok(());
        };
        self.release(*last).await?;
        for (ends_at, id) in due {
            self.wait(id).await?;
            self.copies.remove(&(ends_at, id));
        }
        Ok(())
    }

    /// The ranks report the work up to this number as written.
    async fn release(&mut self, through: u64) -> Result<(), PlayError> {
        if through <= self.released {
            return Ok(());
        }
        self.released = through;
        self.order(WorkKind::Compute, &[], through).await
    }

    /// Waits for the end of a request. One that does not end may wait for a copy that is held: lets these go, one after
    /// another.
    async fn wait(&mut self, id: u64) -> Result<(), PlayError> {
        let Some(sent) = self.sent.get_mut(&id) else {
            return Ok(());
        };
        let (kind, pending) = (sent.kind, sent.pending.take());
        let Some(mut pending) = pending else {
            return Ok(());
        };
        let until = Instant::now() + self.limit(kind) + GRACE;
        let ended = loop {
            if let Ok(ended) = tokio::time::timeout(STUCK, &mut pending).await {
                break ended;
            }
            self.ranks.check()?;
            let held = self.copies.range((self.released + 1, 0)..).next();
            if let Some((ends_at, _)) = held.copied() {
                self.report.early += 1;
                self.release(ends_at).await?;
            } else if Instant::now() > until {
                // The client ends each request by its deadline.
                break Err(Failure::new(
                    kvferry_protocol::ErrorCode::Deadline,
                    "no answer",
                ));
            }
        };
        let outcome = match ended {
            Ok(message) => match message.answer() {
                Some(answer) => Outcome::Answered(answer),
                None => Outcome::Failed(Failed {
                    code: kvferry_protocol::ErrorCode::Internal.number(),
                    message: format!("a {} is no answer", message.kind().name()),
                    reported: true,
                    over: false,
                }),
            },
            Err(failure) => Outcome::Failed(Failed {
                code: failure.code.number(),
                message: failure.message,
                reported: true,
                over: failure.over,
            }),
        };
        if let Some(sent) = self.sent.get_mut(&id) {
            sent.outcome = Some(outcome);
        }
        Ok(())
    }

    /// A request ended at this frame of the recording: waits for its end here, and compares both.
    async fn ended(&mut self, number: u64, id: u64, recorded: &Outcome) -> Result<(), PlayError> {
        self.advance(number).await?;
        self.wait(id).await?;
        let Some(sent) = self.sent.remove(&id) else {
            return Ok(());
        };
        // A store that a cancel stopped was held until now.
        self.copies.retain(|(_, other)| *other != id);
        let Some(replayed) = sent.outcome else {
            return Ok(());
        };
        if let Some(Answer::Load(load)) = answered(&replayed) {
            let brought = sent.pages.len().min(load.pages as usize);
            self.order(WorkKind::Verify, &sent.pages[..brought], 0)
                .await?;
        }
        self.full |= refusals_differ(recorded, &replayed);
        let leader = self.plan.leader.as_ref();
        let conditions = Conditions {
            cancelled: sent.end.known == Known::Cancelled,
            has_disk: self.has_disk && self.may_have_evicted(),
            several_leaders: self.plan.leaders > 1,
            restarted: self.restarted,
            other_engines: leader.is_some_and(|leader| leader.replicas > 1),
            diverged: self.diverged,
            full: self.full,
        };
        let what = format!("frame {number}, {} {id}", sent.kind.name());
        let verdict = compare(recorded, &replayed, conditions);
        let changes = sent.kind.copies() || sent.kind == RequestKind::Reset;
        self.diverged |= changes && excuses_later(recorded, &verdict);
        self.added_pages += stored_pages(recorded).max(stored_pages(&replayed));
        self.report.add(&what, verdict);
        Ok(())
    }

    /// Whether pages may have left host memory, in the recording or here. None leaves it before it is half full: a run
    /// has room in one hole then. All pages are in host memory until then, and no lookup depends on a disk.
    fn may_have_evicted(&self) -> bool {
        self.plan.used_pages > 0 || self.added_pages > self.host_pages / 2
    }

    /// Lets everything end that is in flight, and returns the report.
    async fn finish(mut self) -> Result<CallsReport, PlayError> {
        self.release(self.last()).await?;
        let open: Vec<u64> = self.sent.keys().copied().collect();
        self.report.unanswered = open.len() as u64;
        for id in open {
            self.wait(id).await?;
        }
        let ended = self.ranks.end(self.settings.start_limit).await?;
        (
            self.report.verified_bytes,
            self.report.mismatched_bytes,
            self.report.complaint,
        ) = ended;
        Ok(self.report)
    }
}

/// Whether there is a tier below host memory, and the pages of the smaller host memory, in the recording or here.
fn tiers(plan: &Plan, settings: &PlaySettings) -> (bool, u64) {
    let recorded = plan.leader.as_ref().map_or(&[][..], |leader| &leader.tiers);
    let host = TierId::Host.number();
    let below = recorded
        .iter()
        .any(|(tier, pages, _)| *tier > host && *pages > 0);
    let pages = recorded.iter().find(|(tier, ..)| *tier == host);
    let here = settings.host_pages.map_or(0, u64::from);
    let host_pages = pages.map_or(0, |(_, pages, _)| *pages).min(here);
    (settings.has_disk || below, host_pages)
}

/// Pages that a store has added.
fn stored_pages(outcome: &Outcome) -> u64 {
    match answered(outcome) {
        Some(Answer::Store(store)) => u64::from(store.stored_pages),
        _ => 0,
    }
}
