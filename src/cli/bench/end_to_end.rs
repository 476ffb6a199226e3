//! `kvferry bench move`: an engine's stores and loads, end to end.
//!
//! Leader, worker and the engine's rank are processes, started as by `kvferry up` and `kvferry replay`; this process
//! acts as the engine's scheduler. The other side is the copy engine alone, in this process: the same number of bytes,
//! in the same layout, with the same number of threads, from and to memory of its own.

use std::path::Path;
use std::time::Instant;

use tokio::process::Child;

use crate::cli::common::{block_on, print_line};
use crate::cli::socket_paths::SocketPaths;
use crate::cli::{engine_rank, status};
use crate::error::CommandError;
use kvferry_client::{RequestGuard, StoredPages};
use kvferry_engine::layout::describe;
use kvferry_memory::{CopyEngine, Depot};
use kvferry_types::{Direction, GroupId, Nonce, PageList, Part, RequestId};
use kvferry_workload::scheduler::WorkKind;

use super::bench_engine::{
    ANSWER_TIMEOUT, ARENA_PAGES_MIN, BenchEngine, ENGINE_PAGE_TOKENS, EngineArguments, end_up,
    milliseconds, rank_arguments,
};
use super::copy_fixture::{CopyFixture, set_of, shuffled};
use super::rig;
use super::spread;

/// Sets of device pages: two that are stored in turn, two that are loaded into in turn.
const SETS: u32 = 4;
/// Number of prompts that fit in the arena.
const PLACES: u32 = 3;
/// Rounds that are not counted.
const WARM_UP: u32 = 4;
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// MiB of each store and load.
    #[arg(long, default_value = "512", value_parser = clap::value_parser!(u32).range(2..=16_384))]
    mib: u32,
    #[command(flatten)]
    engine: EngineArguments,
    /// Threads that copy, on both sides.
    #[arg(long, default_value = "1", value_parser = clap::value_parser!(u16).range(1..=64))]
    copy_threads: u16,
    /// Rounds: a store and a load on each side.
    #[arg(long, default_value = "15", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rounds: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Result of the benchmark.
#[derive(Debug, serde::Serialize)]
struct MoveReport {
    bytes: u64,
    pages: u32,
    fragment_bytes: u64,
    copy_threads: u16,
    store: MoveRow,
    load: MoveRow,
}

/// Measurements of one direction, in milliseconds.
#[derive(Debug, serde::Serialize)]
struct MoveRow {
    bare_p50_ms: f64,
    bare_min_ms: f64,
    p50_ms: f64,
    min_ms: f64,
    max_ms: f64,
    /// Average time that the worker spent copying.
    copying_ms: f64,
    /// Rate as a share of the copy engine's alone, by the medians.
    to_bare: f64,
}

/// Times of one direction in milliseconds, by round.
#[derive(Debug, Default)]
struct Times {
    bare: Vec<f64>,
    whole: Vec<f64>,
    /// Total time of the copies, as the worker reports it.
    copying_us: u64,
}

impl Times {
    fn row(self) -> MoveRow {
        let rounds = self.whole.len() as f64;
        let (bare_min_ms, bare_p50_ms, _) = spread(self.bare);
        let (min_ms, p50_ms, max_ms) = spread(self.whole);
        MoveRow {
            bare_p50_ms,
            bare_min_ms,
            p50_ms,
            min_ms,
            max_ms,
            copying_ms: self.copying_us as f64 / 1e3 / rounds,
            to_bare: bare_p50_ms / p50_ms,
        }
    }
}

impl MoveRow {
    fn text(&self, name: &str, bytes: u64) -> String {
        let rate = |ms: f64| bytes as f64 / ms / 1e6;
        format!(
            "{name:<6} {:>8.2} ms {:>6.2} GB/s  {:>8.2} ms {:>6.2} GB/s ({:.2}..{:.2})  {:>8.2} ms  {:>7.2}",
            self.bare_p50_ms,
            rate(self.bare_p50_ms),
            self.p50_ms,
            rate(self.p50_ms),
            self.min_ms,
            self.max_ms,
            self.copying_ms,
            self.to_bare
        )
    }
}

impl Arguments {
    pub(crate) fn run(self) -> Result<(), CommandError> {
        let report = block_on(2, self.measure())?;
        if self.json {
            print_line(&serde_json::to_string_pretty(&report).map_err(CommandError::failed)?);
            return Ok(());
        }
        print_line(&format!(
            "{} MiB in {} pages, fragments of {} bytes in random page order, {} threads; medians, (least..most)",
            report.bytes >> 20,
            report.pages,
            report.fragment_bytes,
            report.copy_threads
        ));
        print_line(
            "       copy engine alone        through leader and worker                   of which copying  to bare",
        );
        print_line(&report.store.text("store", report.bytes));
        print_line(&report.load.text("load", report.bytes));
        Ok(())
    }

    async fn measure(&self) -> Result<MoveReport, CommandError> {
        let folder = rig::folder()?;
        let socket_paths = SocketPaths::new(folder.path());
        let geometry = self.engine.model.geometry(ENGINE_PAGE_TOKENS, 1);
        let geometry = geometry.map_err(|error| CommandError::Config(error.to_string()))?;
        let page_bytes = geometry.page_bytes();
        let pages = u32::try_from((u64::from(self.mib) << 20) / page_bytes).unwrap_or(0);
        if pages == 0 {
            return Err(CommandError::Config(format!(
                "mib is {}: a page of {} has {page_bytes} bytes: give more",
                self.mib, self.engine.model
            )));
        }
        let rank = rank_arguments(&socket_paths, &self.engine, SETS * pages);
        let bare = Bare::new(self, rank.clone(), pages)?;
        let arena_pages = (PLACES * pages).max(ARENA_PAGES_MIN);
        let up = self.start_up(folder.path(), Depot::bytes_for(arena_pages, page_bytes))?;
        let played = self.play(&socket_paths, &rank, pages, &bare).await;
        let ended = end_up(up).await;
        let (store, load) = played?;
        ended?;
        Ok(MoveReport {
            bytes: u64::from(pages) * page_bytes,
            pages,
            fragment_bytes: geometry.fragment_bytes,
            copy_threads: self.copy_threads,
            store: store.row(),
            load: load.row(),
        })
    }

    fn start_up(&self, folder: &Path, g2_bytes: u64) -> Result<Child, CommandError> {
        let (g2, threads) = (g2_bytes.to_string(), self.copy_threads.to_string());
        let arguments = ["up", "--supervised", "--log", "error", "--ranks", "1"];
        let sizes = ["--g2", &g2, "--copy-threads", &threads, "--socket-dir"];
        rig::process(&[&arguments[..], &sizes[..]].concat(), folder)
    }

    /// Measures both sides in turn. Returns the times of stores, and of loads.
    async fn play(
        &self,
        socket_paths: &SocketPaths,
        rank: &engine_rank::Arguments,
        pages: u32,
        bare: &Bare,
    ) -> Result<(Times, Times), CommandError> {
        let mut moves = Moves::start(socket_paths, rank, pages).await?;
        let (mut store, mut load) = (Times::default(), Times::default());
        let mut before = moves.copied().await?;
        for round in 0..WARM_UP + self.rounds {
            if round == WARM_UP {
                before = moves.copied().await?;
            }
            let bare_store = bare.run(Direction::Store, round)?;
            let whole_store = moves.store(round).await?;
            let bare_load = bare.run(Direction::Load, round)?;
            let whole_load = moves.load(round).await?;
            if round >= WARM_UP {
                store.bare.push(bare_store);
                store.whole.push(whole_store);
                load.bare.push(bare_load);
                load.whole.push(whole_load);
            }
        }
        let after = moves.copied().await?;
        store.copying_us = after.0 - before.0;
        load.copying_us = after.1 - before.1;
        moves.engine.end().await?;
        Ok((store, load))
    }
}

/// The copy engine alone, on memory of its own.
struct Bare {
    engine: CopyEngine,
    memory: CopyFixture,
    pages: u32,
}

impl Bare {
    fn new(
        arguments: &Arguments,
        rank: engine_rank::Arguments,
        pages: u32,
    ) -> Result<Self, CommandError> {
        let nonce = Nonce {
            allocation: 0,
            offset_bytes: 0,
            bytes: vec![0; 16],
        };
        let registration = describe(&rank.settings()?, [0; 16], nonce);
        let memory = CopyFixture::new(&registration, PLACES * pages)?;
        let engine = CopyEngine::new(usize::from(arguments.copy_threads));
        Ok(Self {
            engine: engine.map_err(CommandError::failed)?,
            memory,
            pages,
        })
    }

    fn run(&self, direction: Direction, round: u32) -> Result<f64, CommandError> {
        let set = set_in(direction, round);
        let job = self.memory.job(direction, set, round % PLACES, self.pages);
        let begun = Instant::now();
        self.engine.run(&job).map_err(CommandError::failed)?;
        Ok(milliseconds(begun))
    }
}

/// The set of device pages that is copied in a round. A load never goes to pages that already hold the same content.
fn set_in(direction: Direction, round: u32) -> u32 {
    match direction {
        Direction::Store => round % 2,
        Direction::Load => 2 + round / 2 % 2,
    }
}

/// An engine whose scheduler stores and loads one prompt after another.
struct Moves {
    engine: BenchEngine,
    socket_paths: SocketPaths,
    pages: u32,
    /// Device pages in random order.
    order: Vec<u32>,
}

impl Moves {
    /// Connects, and has the rank write all pages that are stored from or loaded into.
    async fn start(
        socket_paths: &SocketPaths,
        rank: &engine_rank::Arguments,
        pages: u32,
    ) -> Result<Self, CommandError> {
        let mut moves = Self {
            engine: BenchEngine::start(socket_paths, rank).await?,
            socket_paths: socket_paths.clone(),
            pages,
            order: shuffled(SETS * pages),
        };
        for round in 0..2 {
            let set = set_in(Direction::Store, round);
            moves.work(WorkKind::Compute, set, round).await?;
            let set = set_in(Direction::Load, 2 * round);
            moves.work(WorkKind::Poison, set, round).await?;
        }
        Ok(moves)
    }

    /// Microseconds that the worker has spent copying, in stores and in loads.
    async fn copied(&self) -> Result<(u64, u64), CommandError> {
        let status = status::request(&self.socket_paths, false).await?;
        let counter = |name: &str| status.counters.get(name).copied().unwrap_or(0);
        Ok((counter("gather_us"), counter("scatter_us")))
    }

    /// Stores the pages of a round under new hashes. Returns the milliseconds from the request to its answer.
    async fn store(&mut self, round: u32) -> Result<f64, CommandError> {
        let prompt = self.lookup(2 * u64::from(round), round, 0).await?;
        // As after a forward pass: the rank reports the pages as written.
        let id = self.engine.leader.next_id();
        self.engine.written(id).await?;
        let stored = StoredPages {
            id: Some(id),
            parts: vec![Part::new(
                GroupId(0),
                0,
                self.page_list(set_in(Direction::Store, round)),
            )],
            more: None,
        };
        let begun = Instant::now();
        let stored = prompt.store(stored, (), ANSWER_TIMEOUT).await;
        let took = milliseconds(begun);
        let (answer, ()) = stored.map_err(CommandError::failed)?;
        if answer.stored_pages != self.pages {
            return Err(CommandError::Failed(format!("stored {answer:?}")));
        }
        prompt.finish().await.map_err(CommandError::failed)?;
        Ok(took)
    }

    /// Loads the pages that the round has stored, and has them verified. Returns the milliseconds from the request to
    /// its answer.
    async fn load(&mut self, round: u32) -> Result<f64, CommandError> {
        let slot = 2 * u64::from(round) + 1;
        let prompt = self.lookup(slot, round, self.pages).await?;
        let set = set_in(Direction::Load, round);
        let destination = self.page_list(set);
        let begun = Instant::now();
        let loaded = prompt
            .load(
                vec![Part::new(GroupId(0), 0, destination)],
                RequestId(0),
                (),
                ANSWER_TIMEOUT,
            )
            .await;
        let took = milliseconds(begun);
        let (answer, ()) = loaded.map_err(CommandError::failed)?;
        if answer.pages != self.pages {
            return Err(CommandError::Failed(format!("loaded {answer:?}")));
        }
        prompt.finish().await.map_err(CommandError::failed)?;
        self.work(WorkKind::Verify, set, round).await?;
        Ok(took)
    }

    async fn lookup(
        &self,
        slot: u64,
        round: u32,
        expected: u32,
    ) -> Result<RequestGuard, CommandError> {
        let prompt = (u64::from(round), self.pages);
        self.engine.lookup(slot, prompt, expected).await
    }

    fn page_list(&self, set: u32) -> PageList {
        self.device_pages(set).iter().copied().collect()
    }

    fn device_pages(&self, set: u32) -> &[u32] {
        set_of(&self.order, set, self.pages)
    }

    /// Orders work on the pages of a set.
    async fn work(&mut self, kind: WorkKind, set: u32, round: u32) -> Result<(), CommandError> {
        let pages = set_of(&self.order, set, self.pages);
        self.engine.work(kind, pages, round % 2 == 1).await
    }
}
