//! `kvferry bench lanes`: how long loads wait in a worker while stores are queued there.
//!
//! Leader, worker and the engine's rank are processes; this process acts as the engine's scheduler. The worker logs when
//! each copy was ready and when it started, and this process measures each load from its request to its answer. The
//! other side is the same loads while nothing else is copied, in turn with them.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, ChildStderr};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::cli::common::{block_on, print_line};
use crate::cli::socket_paths::SocketPaths;
use crate::error::CommandError;
use kvferry_client::StoredPages;
use kvferry_memory::Depot;
use kvferry_types::{ByteSize, GroupId, Part, RequestId};
use kvferry_workload::scheduler::WorkKind;

use super::bench_engine::{
    ANSWER_TIMEOUT, ARENA_PAGES_MIN, BenchEngine, ENGINE_PAGE_TOKENS, EngineArguments, end_up,
    late, milliseconds, rank_arguments,
};
use super::copy_fixture::shuffled;
use super::{percentiles, rig};

/// Rounds that are not counted.
const WARM_UP: u32 = 1;
/// Longest pause before a load, so that loads come at any time of a store.
const PAUSE_MAX: Duration = Duration::from_micros(2_000);
/// The prompt that is loaded. The prompts that are stored have higher numbers.
const LOADED: u64 = 0;
/// Lines of the worker that may wait to be read.
const LINES_MAX: usize = 1 << 16;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// MiB of stores that are queued in each round.
    #[arg(long, default_value = "1024", value_parser = clap::value_parser!(u32).range(8..=16_384))]
    queued_mib: u32,
    /// MiB of each store.
    #[arg(long, default_value = "8", value_parser = clap::value_parser!(u32).range(1..=64))]
    store_mib: u32,
    /// MiB of each load.
    #[arg(long, default_value = "8", value_parser = clap::value_parser!(u32).range(1..=64))]
    load_mib: u32,
    /// Limit of the stores, as `store_bytes_per_s`; 0 for no limit.
    #[arg(long, default_value = "1GiB")]
    store_bytes_per_s: ByteSize,
    #[command(flatten)]
    engine: EngineArguments,
    /// Threads that share one copy.
    #[arg(long, default_value = "1", value_parser = clap::value_parser!(u16).range(1..=64))]
    copy_threads: u16,
    /// Rounds: loads without stores, then loads while stores are queued.
    #[arg(long, default_value = "10", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: u32,
    /// Most loads on each side of a round.
    #[arg(long, default_value = "200", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    loads: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Result of the benchmark.
#[derive(Debug, serde::Serialize)]
struct LanesReport {
    store_bytes: u64,
    queued_stores: u32,
    load_bytes: u64,
    store_bytes_per_s: u64,
    copy_threads: u16,
    /// Rate at which the stores ran, the median of the rounds.
    stored_gb_per_s: f64,
    idle: Side,
    stores_queued: Side,
    /// 99th percentile of the wait beside stores, divided by the one without.
    wait_p99_ratio: f64,
    whole_p99_ratio: f64,
    /// The ratio of the waits in each round.
    wait_p99_ratio_by_round: Vec<f64>,
}

/// Loads of one side, in microseconds.
#[derive(Debug, serde::Serialize)]
struct Side {
    loads: usize,
    /// From ready to start, in the worker.
    wait_p50_us: f64,
    wait_p99_us: f64,
    wait_max_us: f64,
    /// The copy alone.
    copy_p50_us: f64,
    copy_p99_us: f64,
    /// From the request to its answer.
    whole_p50_us: f64,
    whole_p99_us: f64,
}

/// One load, in microseconds.
#[derive(Debug, Clone, Copy)]
struct LoadTimes {
    wait: f64,
    copy: f64,
    whole: f64,
}

/// A line of the worker about a copy that ended.
#[derive(Debug, Clone, Copy, PartialEq)]
struct CopyLine {
    load: bool,
    waited_us: f64,
    copy_us: f64,
}

impl CopyLine {
    fn parse(line: &str) -> Option<Self> {
        let field = |name: &str| {
            let words = line.split_ascii_whitespace();
            let mut fields = words.filter_map(|word| word.split_once('='));
            fields.find(|(key, _)| *key == name).map(|(_, value)| value)
        };
        Some(Self {
            load: line.contains("copy ended") && field("direction")? == "Load",
            waited_us: field("waited_us")?.parse().ok()?,
            copy_us: field("copy_us")?.parse().ok()?,
        })
    }
}

impl Side {
    fn of(loads: &[LoadTimes]) -> Self {
        let column = |of: fn(&LoadTimes) -> f64| loads.iter().map(of).collect::<Vec<f64>>();
        let wait = column(|load| load.wait);
        let wait_max_us = wait.iter().copied().fold(0.0, f64::max);
        let (wait_p50_us, wait_p99_us) = percentiles(wait);
        let (copy_p50_us, copy_p99_us) = percentiles(column(|load| load.copy));
        let (whole_p50_us, whole_p99_us) = percentiles(column(|load| load.whole));
        Self {
            loads: loads.len(),
            wait_p50_us,
            wait_p99_us,
            wait_max_us,
            copy_p50_us,
            copy_p99_us,
            whole_p50_us,
            whole_p99_us,
        }
    }

    fn text(&self, name: &str) -> String {
        format!(
            "{name:<14} {:>6}  {:>8.0} {:>8.0} {:>8.0}  {:>8.0} {:>8.0}  {:>8.0} {:>8.0}",
            self.loads,
            self.wait_p50_us,
            self.wait_p99_us,
            self.wait_max_us,
            self.copy_p50_us,
            self.copy_p99_us,
            self.whole_p50_us,
            self.whole_p99_us
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
            "{} stores of {} queued, at most {} a second, ran at {:.2} GB/s; loads of {}, {} threads",
            report.queued_stores,
            ByteSize(report.store_bytes),
            ByteSize(report.store_bytes_per_s),
            report.stored_gb_per_s,
            ByteSize(report.load_bytes),
            report.copy_threads
        ));
        print_line(
            "us              loads  wait p50      p99      max  copy p50      p99  whole p50     p99",
        );
        print_line(&report.idle.text("idle"));
        print_line(&report.stores_queued.text("stores queued"));
        let by_round = report.wait_p99_ratio_by_round.iter();
        let by_round: Vec<String> = by_round.map(|ratio| format!("{ratio:.2}")).collect();
        print_line(&format!(
            "p99 to idle: wait {:.2} (rounds: {}), whole {:.2}",
            report.wait_p99_ratio,
            by_round.join(" "),
            report.whole_p99_ratio
        ));
        Ok(())
    }

    async fn measure(&self) -> Result<LanesReport, CommandError> {
        let folder = rig::folder()?;
        let socket_paths = SocketPaths::new(folder.path());
        let geometry = self.engine.model.geometry(ENGINE_PAGE_TOKENS, 1);
        let geometry = geometry.map_err(|error| CommandError::Config(error.to_string()))?;
        let page_bytes = geometry.page_bytes();
        let pages_of = |name: &str, mib: u32| match (u64::from(mib) << 20) / page_bytes {
            0 => Err(CommandError::Config(format!(
                "{name} is {mib}: a page of {} has {page_bytes} bytes: give more",
                self.engine.model
            ))),
            pages => Ok(u32::try_from(pages).unwrap_or(u32::MAX)),
        };
        let store_pages = pages_of("store-mib", self.store_mib)?;
        let load_pages = pages_of("load-mib", self.load_mib)?;
        let stores = (pages_of("queued-mib", self.queued_mib)? / store_pages).max(1);
        let device_pages = stores * store_pages + 2 * load_pages;
        let rank = rank_arguments(&socket_paths, &self.engine, device_pages);
        // Room for the stores of two rounds: what is stored evicts nothing that is in flight.
        let arena_pages = (2 * device_pages).max(ARENA_PAGES_MIN);
        let (up, lines) =
            self.start_up(folder.path(), Depot::bytes_for(arena_pages, page_bytes))?;
        let played = async {
            let mut stored_from = shuffled(device_pages);
            let loaded_from = stored_from.split_off(stored_from.len() - load_pages as usize);
            let loaded_into = stored_from.split_off(stored_from.len() - load_pages as usize);
            let mut bench = Bench {
                engine: BenchEngine::start(&socket_paths, &rank).await?,
                lines,
                store_pages,
                loaded_into,
                stored_from,
                prompts: LOADED,
                slots: 0,
                random: fastrand::Rng::with_seed(9),
            };
            bench.store_the_loaded_prompt(&loaded_from).await?;
            let rounds = self.play(&mut bench, stores).await?;
            bench.engine.end().await?;
            Ok(rounds)
        };
        let played: Result<Vec<Round>, CommandError> = played.await;
        let ended = end_up(up).await;
        let rounds = played?;
        ended?;
        let p99 = |loads: &[LoadTimes]| Side::of(loads).wait_p99_us;
        let by_round = rounds
            .iter()
            .map(|round| p99(&round.queued) / p99(&round.idle));
        let rates = rounds.iter().map(|round| {
            let bytes = u64::from(stores * store_pages) * page_bytes;
            bytes as f64 / round.stored_s / 1e9
        });
        let all = |of: fn(&Round) -> &Vec<LoadTimes>| -> Vec<LoadTimes> {
            rounds.iter().flat_map(of).copied().collect()
        };
        let idle = Side::of(&all(|round| &round.idle));
        let stores_queued = Side::of(&all(|round| &round.queued));
        Ok(LanesReport {
            store_bytes: u64::from(store_pages) * page_bytes,
            queued_stores: stores,
            load_bytes: u64::from(load_pages) * page_bytes,
            store_bytes_per_s: self.store_bytes_per_s.0,
            copy_threads: self.copy_threads,
            stored_gb_per_s: percentiles(rates.collect()).0,
            wait_p99_ratio: stores_queued.wait_p99_us / idle.wait_p99_us,
            whole_p99_ratio: stores_queued.whole_p99_us / idle.whole_p99_us,
            wait_p99_ratio_by_round: by_round.collect(),
            idle,
            stores_queued,
        })
    }

    /// Starts `kvferry up`, and returns what its worker logs about copies.
    fn start_up(
        &self,
        folder: &Path,
        g2_bytes: u64,
    ) -> Result<(Child, mpsc::Receiver<CopyLine>), CommandError> {
        let (g2, threads) = (g2_bytes.to_string(), self.copy_threads.to_string());
        let rate = self.store_bytes_per_s.0.to_string();
        let log = "error,kvferry_actors::transfer=debug";
        let arguments = ["up", "--supervised", "--log", log, "--ranks", "1"];
        let sizes = ["--g2", &g2, "--copy-threads", &threads];
        let rate = ["--store-bytes-per-s", &rate, "--socket-dir"];
        let arguments = [&arguments[..], &sizes[..], &rate[..]].concat();
        let mut up = rig::process_with_errors(&arguments, folder, Stdio::piped())?;
        let (sender, lines) = mpsc::channel(LINES_MAX);
        if let Some(errors) = up.stderr.take() {
            tokio::spawn(read_lines(errors, sender));
        }
        Ok((up, lines))
    }

    async fn play(&self, bench: &mut Bench, stores: u32) -> Result<Vec<Round>, CommandError> {
        let mut rounds = Vec::new();
        for round in 0..WARM_UP + self.rounds {
            let mut idle = Vec::new();
            for _ in 0..self.loads {
                idle.push(bench.load().await?);
            }
            bench.verify().await?;
            let mut running = bench.queue_stores(stores).await?;
            let begun = Instant::now();
            let mut queued = Vec::new();
            while running.ended < stores && queued.len() < self.loads as usize {
                let load = bench.load().await?;
                running.take_ended()?;
                // A load after the last store had nothing beside it.
                if running.ended < stores {
                    queued.push(load);
                }
            }
            running.wait().await?;
            let stored_s = milliseconds(begun) / 1e3;
            bench.verify().await?;
            if round >= WARM_UP {
                rounds.push(Round {
                    idle,
                    queued,
                    stored_s,
                });
            }
        }
        Ok(rounds)
    }
}

/// Passes on the lines about copies, and logs the others.
async fn read_lines(errors: ChildStderr, sender: mpsc::Sender<CopyLine>) {
    let mut lines = BufReader::new(errors).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        match CopyLine::parse(&line) {
            Some(line) => {
                if sender.send(line).await.is_err() {
                    return;
                }
            }
            None => tracing::warn!("{line}"),
        }
    }
}

/// Measurements of one round.
struct Round {
    idle: Vec<LoadTimes>,
    queued: Vec<LoadTimes>,
    /// Seconds from the first store's request to the end of the last one.
    stored_s: f64,
}

/// Stores whose requests are sent.
struct RunningStores {
    tasks: JoinSet<Result<(), CommandError>>,
    ended: u32,
}

impl RunningStores {
    /// Counts the stores that have ended by now.
    fn take_ended(&mut self) -> Result<(), CommandError> {
        while let Some(ended) = self.tasks.try_join_next() {
            ended.map_err(CommandError::failed)??;
            self.ended += 1;
        }
        Ok(())
    }

    async fn wait(mut self) -> Result<(), CommandError> {
        while let Some(ended) = self.tasks.join_next().await {
            ended.map_err(CommandError::failed)??;
        }
        Ok(())
    }
}

/// The engine, whose scheduler loads one prompt again and again.
struct Bench {
    engine: BenchEngine,
    lines: mpsc::Receiver<CopyLine>,
    store_pages: u32,
    /// Device pages into which the prompt is loaded.
    loaded_into: Vec<u32>,
    /// Device pages that are stored.
    stored_from: Vec<u32>,
    /// The last prompt that was stored.
    prompts: u64,
    /// The last slot that was used.
    slots: u64,
    random: fastrand::Rng,
}

impl Bench {
    fn next_slot(&mut self) -> u64 {
        self.slots += 1;
        self.slots
    }

    /// Stores the prompt that is loaded, from these pages, and has the rank write the pages that are stored later.
    async fn store_the_loaded_prompt(&mut self, from: &[u32]) -> Result<(), CommandError> {
        self.engine.work(WorkKind::Compute, from, true).await?;
        let stored_from = self.stored_from.clone();
        self.engine
            .work(WorkKind::Compute, &stored_from, false)
            .await?;
        let slot = self.next_slot();
        let pages = u32::try_from(from.len()).unwrap_or(u32::MAX);
        let prompt = self.engine.lookup(slot, (LOADED, pages), 0).await?;
        let id = self.engine.leader.next_id();
        self.engine.written(id).await?;
        let stored = StoredPages {
            id: Some(id),
            parts: vec![all_pages(from)],
            more: None,
        };
        let stored = prompt.store(stored, (), ANSWER_TIMEOUT).await;
        stored.map_err(CommandError::failed)?;
        prompt.finish().await.map_err(CommandError::failed)
    }

    /// Sends stores of new prompts, all of whose pages are written.
    async fn queue_stores(&mut self, stores: u32) -> Result<RunningStores, CommandError> {
        let pages = self.store_pages;
        let mut prompts = Vec::new();
        for _ in 0..stores {
            self.prompts += 1;
            let slot = self.next_slot();
            let prompt = (self.prompts, pages);
            prompts.push(self.engine.lookup(slot, prompt, 0).await?);
        }
        let ids: Vec<RequestId> = (0..stores).map(|_| self.engine.leader.next_id()).collect();
        if let Some(id) = ids.last() {
            self.engine.written(*id).await?;
        }
        let mut tasks = JoinSet::new();
        let sources = self.stored_from.chunks(pages as usize);
        for ((prompt, id), source) in prompts.into_iter().zip(ids).zip(sources) {
            let stored = StoredPages {
                id: Some(id),
                parts: vec![all_pages(source)],
                more: None,
            };
            tasks.spawn(async move {
                let stored = prompt.store(stored, (), ANSWER_TIMEOUT).await;
                let (answer, ()) = stored.map_err(CommandError::failed)?;
                if answer.stored_pages != pages {
                    return Err(CommandError::Failed(format!("stored {answer:?}")));
                }
                prompt.finish().await.map_err(CommandError::failed)
            });
        }
        Ok(RunningStores { tasks, ended: 0 })
    }

    /// Loads the prompt after a pause.
    async fn load(&mut self) -> Result<LoadTimes, CommandError> {
        let pause = self.random.u64(0..=PAUSE_MAX.as_micros() as u64);
        tokio::time::sleep(Duration::from_micros(pause)).await;
        let pages = u32::try_from(self.loaded_into.len()).unwrap_or(u32::MAX);
        let slot = self.next_slot();
        let prompt = self.engine.lookup(slot, (LOADED, pages), pages).await?;
        let destination = vec![all_pages(&self.loaded_into)];
        let begun = Instant::now();
        let loaded = prompt
            .load(destination, RequestId(0), (), ANSWER_TIMEOUT)
            .await;
        let whole = milliseconds(begun) * 1e3;
        let (answer, ()) = loaded.map_err(CommandError::failed)?;
        if answer.pages != pages {
            return Err(CommandError::Failed(format!("loaded {answer:?}")));
        }
        prompt.finish().await.map_err(CommandError::failed)?;
        let line = tokio::time::timeout(ANSWER_TIMEOUT, self.load_line()).await;
        let line = line.map_err(|_| late("the worker's line about a load"))??;
        Ok(LoadTimes {
            wait: line.waited_us,
            copy: line.copy_us,
            whole,
        })
    }

    /// The worker's next line about a load.
    async fn load_line(&mut self) -> Result<CopyLine, CommandError> {
        loop {
            match self.lines.recv().await {
                Some(line) if line.load => return Ok(line),
                Some(_) => {}
                None => return Err(CommandError::Failed("the worker logs nothing".to_owned())),
            }
        }
    }

    /// Compares the loaded pages, and overwrites them.
    async fn verify(&mut self) -> Result<(), CommandError> {
        let pages = self.loaded_into.clone();
        self.engine.work(WorkKind::Verify, &pages, true).await?;
        self.engine.work(WorkKind::Poison, &pages, true).await
    }
}

/// A prompt of one group, from its first page on, in these pages of the engine.
fn all_pages(pages: &[u32]) -> Part {
    Part::new(GroupId(0), 0, pages.iter().copied().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_worker_has_the_times_of_its_copy() {
        let line = "2026-11-25T09:00:00.1Z DEBUG copy ended transfer=op 7 direction=Load waited_us=12 copy_us=345 \
                    bytes=8388608";
        let expected = CopyLine {
            load: true,
            waited_us: 12.0,
            copy_us: 345.0,
        };
        assert_eq!(CopyLine::parse(line), Some(expected));
        let store = line.replace("Load", "Store");
        assert!(CopyLine::parse(&store).is_some_and(|line| !line.load));
        assert_eq!(CopyLine::parse("ERROR a copying thread panicked"), None);
    }
}
