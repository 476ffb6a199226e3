//! An engine with one rank: this process is its scheduler, and its rank and the rank's memory are another process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::process::Child;

use crate::cli::socket_paths::SocketPaths;
use crate::cli::{engine_rank, status};
use crate::error::CommandError;
use kvferry_client::{EngineClient, EngineSettings, PromptPages, RequestGuard};
use kvferry_engine::pipe::{self, RankOrder, RankReport};
use kvferry_engine::rank_pipe::RankPipe;
use kvferry_engine::settings::{EngineDevice, EngineLayout};
use kvferry_transport::ZmqTransport;
use kvferry_types::{Fingerprint, GroupId, PageHashes, Rank, Replica, RequestId, SlotId, WorkerId};
use kvferry_workload::models::Model;
use kvferry_workload::scheduler::WorkKind;

use super::rig::{ENGINE, HASH_BYTES, hashes};

pub(super) const ENGINE_PAGE_TOKENS: u32 = 16;
/// Smallest arena: one block, which a leader requires, and one more, so that there is always room.
pub(super) const ARENA_PAGES_MIN: u32 = 64;
/// Time limit of each wait.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// The engine's connections to the leader and to its rank.
pub(super) struct BenchEngine {
    pub(super) leader: EngineClient,
    rank: RankPipe,
    tickets: u64,
}

/// The engine that is measured.
#[derive(Debug, clap::Args)]
pub(super) struct EngineArguments {
    /// Model whose page sizes are used, with 16 tokens per page.
    #[arg(long, default_value = "llama-3-8b")]
    pub(super) model: Model,
    /// Layout of the pages in the engine's memory.
    #[arg(long, default_value = "layer-separate")]
    pub(super) layout: EngineLayout,
}

/// The arguments of a rank with `device_pages` pages of host memory.
pub(super) fn rank_arguments(
    socket_paths: &SocketPaths,
    engine: &EngineArguments,
    device_pages: u32,
) -> engine_rank::Arguments {
    let worker = WorkerId {
        replica: Replica(0),
        rank: Rank(0),
    };
    engine_rank::Arguments {
        worker_dir: socket_paths.worker(worker),
        engine: ENGINE,
        replica: 0,
        rank: 0,
        ranks: 1,
        engine_page_tokens: ENGINE_PAGE_TOKENS,
        device_pages,
        model: engine.model,
        device: EngineDevice::Cpu,
        layout: engine.layout,
        start_limit_s: ANSWER_TIMEOUT.as_secs(),
    }
}

/// Ends `kvferry up` by the end of its standard input.
pub(super) async fn end_up(mut up: Child) -> Result<(), CommandError> {
    drop(up.stdin.take());
    match tokio::time::timeout(ANSWER_TIMEOUT, up.wait()).await {
        Ok(Ok(status)) if status.success() => Ok(()),
        other => Err(CommandError::Failed(format!("kvferry up: {other:?}"))),
    }
}

impl BenchEngine {
    /// Starts the rank and connects to the leader.
    pub(super) async fn start(
        socket_paths: &SocketPaths,
        rank: &engine_rank::Arguments,
    ) -> Result<Self, CommandError> {
        let mut process = rank.start()?;
        let ready = process.wait_until_ready(ANSWER_TIMEOUT).await;
        ready.map_err(CommandError::failed)?;
        status::until_ready(socket_paths, ANSWER_TIMEOUT).await?;
        let settings = EngineSettings::new(socket_paths.leader_address(), ENGINE, "bench");
        Ok(Self {
            leader: EngineClient::start(Arc::new(ZmqTransport), settings),
            rank: process,
            tickets: 0,
        })
    }

    /// Looks up all `pages` of a prompt, of which `expected` must be found.
    pub(super) async fn lookup(
        &self,
        slot: u64,
        (prompt, pages): (u64, u32),
        expected: u32,
    ) -> Result<RequestGuard, CommandError> {
        let hashes = PageHashes::packed(HASH_BYTES, hashes(prompt, pages));
        let prompt = PromptPages {
            slot: SlotId(slot),
            namespace: Vec::new(),
            hashes: hashes
                .ok_or_else(|| CommandError::Failed("hashes of odd length".to_owned()))?,
            have_pages: 0,
            limit_pages: None,
        };
        let found = self.leader.lookup(prompt, ANSWER_TIMEOUT).await;
        let found = found.map_err(CommandError::failed)?;
        match found.hit_pages() {
            hit_pages if hit_pages == expected => Ok(found),
            hit_pages => Err(CommandError::Failed(format!(
                "found {hit_pages} pages, not {expected}"
            ))),
        }
    }

    /// Has the rank report everything up to a request as written, as after a forward pass.
    pub(super) async fn written(&mut self, through: RequestId) -> Result<(), CommandError> {
        let order = RankOrder::new(self.tickets + 1, WorkKind::Compute, through.0);
        self.order(order).await
    }

    /// Has the rank work on pages. The content of a page depends on `parity` and on its position in the list.
    pub(super) async fn work(
        &mut self,
        kind: WorkKind,
        pages: &[u32],
        parity: bool,
    ) -> Result<(), CommandError> {
        let mut order = RankOrder::new(self.tickets + 1, kind, 0);
        for (position, page) in (0_u64..).zip(pages) {
            let content = u128::from(position) << 1 | u128::from(parity);
            order.add_page(GroupId(0), *page, Fingerprint(content));
        }
        self.order(order).await
    }

    /// Has the rank carry out an order, and waits for its report.
    async fn order(&mut self, order: RankOrder) -> Result<(), CommandError> {
        self.tickets = order.ticket;
        let sent = pipe::write(&mut self.rank.orders, &order).await;
        sent.map_err(CommandError::failed)?;
        let report = tokio::time::timeout(ANSWER_TIMEOUT, pipe::read(&mut self.rank.reports)).await;
        let report = report.map_err(|_| late("the rank's report"))?;
        let report: Option<RankReport> = report.map_err(CommandError::failed)?;
        match report {
            Some(report) if report.complaint.is_empty() && report.ticket == order.ticket => Ok(()),
            Some(report) => Err(CommandError::Found(report.complaint)),
            None => Err(CommandError::Failed("the rank has ended".to_owned())),
        }
    }

    pub(super) async fn end(mut self) -> Result<(), CommandError> {
        drop(self.rank.orders);
        let ended = tokio::time::timeout(ANSWER_TIMEOUT, self.rank.child.wait()).await;
        match ended.map_err(|_| late("the rank's end"))? {
            Ok(status) if status.success() => Ok(()),
            other => Err(CommandError::Failed(format!("the rank: {other:?}"))),
        }
    }
}

pub(super) fn late(what: &str) -> CommandError {
    CommandError::Failed(format!("{what} was not received within {ANSWER_TIMEOUT:?}"))
}

pub(super) fn milliseconds(begun: Instant) -> f64 {
    begun.elapsed().as_secs_f64() * 1e3
}
