//! `kvferry bench disk-load`: an engine's loads from the disk, end to end.
//!
//! Leader, worker and the engine's rank are processes; this process acts as the engine's scheduler. Prompts are stored,
//! moved to the disk, and loaded in turn: host memory has room for half as much again as one prompt, so that each load
//! reads all of its pages from the disk, promotes them and scatters them. The time of a load begins with its lookup,
//! which begins to fetch the pages. The other side reads as many bytes of the same files with nothing else.

use std::path::{Path, PathBuf};
use std::time::Instant;

use tokio::process::Child;

use crate::cli::common::{block_on, print_line};
use crate::cli::socket_paths::SocketPaths;
use crate::cli::{engine_rank, status};
use crate::error::CommandError;
use kvferry_client::StoredPages;
use kvferry_memory::Depot;
use kvferry_tiers::disk::DiskIo;
use kvferry_tiers::disk::format::{Geometry, SetKey};
use kvferry_types::{GroupId, PageList, Part, RequestId};
use kvferry_workload::scheduler::WorkKind;

use super::bench_engine::{
    ANSWER_TIMEOUT, BenchEngine, ENGINE_PAGE_TOKENS, EngineArguments, end_up, milliseconds,
    rank_arguments,
};
use super::copy_fixture::{set_of, shuffled};
use super::plain_disk::{PlainFiles, ReadWork};
use super::{rig, spread};

/// Prompts that are loaded in turn.
const PROMPTS: u32 = 3;
/// Sets of device pages: two that are stored, one that is loaded into.
const SETS: u32 = 3;
/// Pages of the largest block.
const RATIO: u32 = 32;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// An empty directory on the disk. What is written there is removed.
    directory: PathBuf,
    /// MiB of each load.
    #[arg(long, default_value = "512", value_parser = clap::value_parser!(u32).range(64..=16_384))]
    mib: u32,
    #[command(flatten)]
    engine: EngineArguments,
    /// Threads that copy between host memory and the engine.
    #[arg(long, default_value = "1", value_parser = clap::value_parser!(u16).range(1..=64))]
    copy_threads: u16,
    /// Reads and writes in flight.
    #[arg(long, default_value = "16", value_parser = clap::value_parser!(u16).range(1..=256))]
    depth: u16,
    /// How they are submitted: auto, io_uring or threads.
    #[arg(long, default_value = "auto")]
    io: DiskIo,
    /// Loads that are counted.
    #[arg(long, default_value = "12", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
}

impl Arguments {
    pub(super) fn run(self) -> Result<(), CommandError> {
        let directory = self.directory.join("kvferry-bench");
        let result = block_on(2, self.measure(&directory));
        if let Err(error) = std::fs::remove_dir_all(&directory) {
            tracing::warn!(%error, directory = %directory.display(), "not removed");
        }
        result
    }

    async fn measure(&self, directory: &Path) -> Result<(), CommandError> {
        let folder = rig::folder()?;
        let socket_paths = SocketPaths::new(folder.path());
        let geometry = self.engine.model.geometry(ENGINE_PAGE_TOKENS, 1);
        let geometry = geometry.map_err(|error| CommandError::Config(error.to_string()))?;
        let page_bytes = geometry.page_bytes();
        let pages = u32::try_from((u64::from(self.mib) << 20) / page_bytes).unwrap_or(0);
        let pages = pages / RATIO * RATIO;
        if pages == 0 {
            return Err(CommandError::Config(format!(
                "mib is {}: a block of {RATIO} pages of {} has {} bytes: give more",
                self.mib,
                self.engine.model,
                u64::from(RATIO) * page_bytes
            )));
        }
        let rank = rank_arguments(&socket_paths, &self.engine, SETS * pages);
        let cap = u64::from(PROMPTS * pages) * page_bytes * 5 / 4 + (256 << 20);
        let g2 = Depot::bytes_for(pages + pages / 2, page_bytes);
        let up = self.start_up(folder.path(), directory, (g2, cap))?;
        let played = self
            .play(&socket_paths, &rank, (directory, cap, pages))
            .await;
        let ended = end_up(up).await;
        let (times, depth) = played?;
        ended?;
        let bytes = f64::from(pages) * page_bytes as f64;
        print_line(&format!(
            "loads of {} MiB in blocks of {} MiB from the disk, depth {}, floor at depth {depth}, {} rounds",
            self.mib,
            (u64::from(RATIO) * page_bytes) >> 20,
            self.depth,
            self.rounds
        ));
        let (_, base, _) = spread(times.floor.clone());
        for (what, times) in [
            ("floor read", times.floor),
            ("floor read, verify, copy twice", times.worked),
            ("load", times.load),
        ] {
            let (least, median, most) = spread(times);
            let rate = |ms: f64| bytes / ms / 1e6;
            print_line(&format!(
                "{what:<30} {:>6.2} GB/s (median; {:.2} to {:.2})  {:.2} of the floor",
                rate(median),
                rate(most),
                rate(least),
                base / median
            ));
        }
        Ok(())
    }

    fn start_up(
        &self,
        folder: &Path,
        directory: &Path,
        (g2, g3): (u64, u64),
    ) -> Result<Child, CommandError> {
        let threads = self.copy_threads.to_string();
        let (g2, g3, io) = (g2.to_string(), g3.to_string(), self.io.to_string());
        let (ratio, depth) = (RATIO.to_string(), self.depth.to_string());
        let directory = directory.to_string_lossy();
        let arguments = [
            "up",
            "--supervised",
            "--log",
            "error",
            "--ranks",
            "1",
            "--ratio",
            &ratio,
            "--g2",
            &g2,
            "--g3",
            &g3,
            "--g3-dir",
            &directory,
            "--g3-depth",
            &depth,
            "--g3-io",
            &io,
            "--copy-threads",
            &threads,
            "--socket-dir",
        ];
        rig::process(&arguments, folder)
    }

    /// Measures all sides in turn. Returns the milliseconds of each, and the floor's depth.
    async fn play(
        &self,
        socket_paths: &SocketPaths,
        rank: &engine_rank::Arguments,
        (directory, cap, pages): (&Path, u64, u32),
    ) -> Result<(Times, usize), CommandError> {
        let mut loads = Loads {
            engine: BenchEngine::start(socket_paths, rank).await?,
            pages,
            order: shuffled(SETS * pages),
            slots: 0,
        };
        for parity in 0..2 {
            let pages = set_of(&loads.order, parity, pages).to_vec();
            let work = loads.engine.work(WorkKind::Compute, &pages, parity == 1);
            work.await?;
        }
        for prompt in 0..PROMPTS {
            loads.store(prompt).await?;
            let leader = status::admin(socket_paths, "bench");
            let flushed = leader.flush(ANSWER_TIMEOUT).await;
            flushed.map_err(CommandError::failed)?;
        }
        let plain = plain(&directory.join("shard-0"), cap, PROMPTS * pages)?;
        let depth = plain.best_depth(false)?;
        let work = ReadWork::new(2, u64::from(self.mib) << 20)?;
        let before = promoted(socket_paths).await?;
        let mut times = Times::default();
        for round in 0..=self.rounds {
            let prompt = round % PROMPTS;
            let share = (prompt as usize, PROMPTS as usize);
            // The second read of the same bytes may come from a cache of the disk or of a host: each side is first in turn.
            for side in 0..3 {
                let (times, took) = match (round + side) % 3 {
                    0 => (
                        &mut times.floor,
                        plain.run_parts(false, depth, share)? * 1e3,
                    ),
                    1 => {
                        let took = plain.read_and_work(WORK_DEPTH, share, &work)?;
                        (&mut times.worked, took * 1e3)
                    }
                    _ => (&mut times.load, loads.load(prompt).await?),
                };
                // The first round warms up.
                if round > 0 {
                    times.push(took);
                }
            }
        }
        let promoted = promoted(socket_paths).await? - before;
        let expected = u64::from(pages) * u64::from(self.rounds + 1);
        loads.engine.end().await?;
        if promoted != expected {
            return Err(CommandError::Failed(format!(
                "{promoted} pages came from the disk, not {expected}"
            )));
        }
        Ok((times, depth))
    }
}

/// Milliseconds of each side.
#[derive(Debug, Default)]
struct Times {
    floor: Vec<f64>,
    /// The floor's reads with the work that a load has to do: a checksum, a copy into host memory, and one into the engine's.
    worked: Vec<f64>,
    load: Vec<f64>,
}

/// Threads that do the work beside the floor's reads: more than cores, so that some work while others wait.
const WORK_DEPTH: usize = 8;

/// The files of the only set below a shard's directory.
fn plain(shard: &Path, cap: u64, pages: u32) -> Result<PlainFiles, CommandError> {
    for entry in std::fs::read_dir(shard).map_err(CommandError::failed)? {
        let path = entry.map_err(CommandError::failed)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let page_bytes = name.split('-').nth(1).and_then(|part| part.parse().ok());
        if let Some(page_bytes) = page_bytes.filter(|_| SetKey::is_name(&name)) {
            let key = SetKey {
                layout: [0; 16],
                page_bytes,
                ratio: RATIO,
                shards: 1,
            };
            let geometry = Geometry::new(&key, 1, cap).map_err(CommandError::failed)?;
            return PlainFiles::open(&path, &geometry, pages);
        }
    }
    Err(CommandError::Failed(format!(
        "{}: no set of files",
        shard.display()
    )))
}

/// Pages that moves have read from the disk.
async fn promoted(socket_paths: &SocketPaths) -> Result<u64, CommandError> {
    let status = status::request(socket_paths, false).await?;
    let counter = |name: &str| status.counters.get(name).copied().unwrap_or(0);
    Ok(counter("moved_pages") - counter("written_through_pages"))
}

/// An engine whose scheduler stores and loads one prompt after another.
struct Loads {
    engine: BenchEngine,
    pages: u32,
    /// Device pages in random order.
    order: Vec<u32>,
    slots: u64,
}

impl Loads {
    fn device_pages(&self, set: u32) -> PageList {
        set_of(&self.order, set, self.pages)
            .iter()
            .copied()
            .collect()
    }

    async fn store(&mut self, prompt: u32) -> Result<(), CommandError> {
        self.slots += 1;
        let slot = self
            .engine
            .lookup(self.slots, (prompt.into(), self.pages), 0);
        let slot = slot.await?;
        let id = self.engine.leader.next_id();
        self.engine.written(id).await?;
        let stored = StoredPages {
            id: Some(id),
            parts: vec![Part::new(GroupId(0), 0, self.device_pages(prompt % 2))],
            more: None,
        };
        let stored = slot.store(stored, (), ANSWER_TIMEOUT).await;
        let (answer, ()) = stored.map_err(CommandError::failed)?;
        if answer.stored_pages != self.pages {
            return Err(CommandError::Failed(format!("stored {answer:?}")));
        }
        slot.finish().await.map_err(CommandError::failed)
    }

    /// Loads a prompt, and has its pages verified. Returns the milliseconds from the lookup to the answer of the load.
    async fn load(&mut self, prompt: u32) -> Result<f64, CommandError> {
        self.slots += 1;
        let begun = Instant::now();
        let name = (prompt.into(), self.pages);
        let slot = self.engine.lookup(self.slots, name, self.pages).await?;
        let parts = vec![Part::new(GroupId(0), 0, self.device_pages(2))];
        let loaded = slot.load(parts, RequestId(0), (), ANSWER_TIMEOUT).await;
        let took = milliseconds(begun);
        let (answer, ()) = loaded.map_err(CommandError::failed)?;
        if answer.pages != self.pages {
            return Err(CommandError::Failed(format!("loaded {answer:?}")));
        }
        slot.finish().await.map_err(CommandError::failed)?;
        let pages = set_of(&self.order, 2, self.pages).to_vec();
        self.engine
            .work(WorkKind::Verify, &pages, prompt % 2 == 1)
            .await?;
        Ok(took)
    }
}
