//! `kvferry bench disk`: blocks between host memory and a disk, beside plain direct reads and writes of the same files.
//!
//! The floor writes and reads the same bytes of the same segments with threads that do nothing else, in parts of the same
//! size, at the best number of threads that was found. Both sides take turns, and each begins with the same files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::cli::common::print_line;
use crate::error::CommandError;
use kvferry_memory::Depot;
use kvferry_tiers::disk::{
    DiskCopier, DiskCopy, DiskCopyEnd, DiskDirectories, DiskIo, DiskSet, DiskTier, SetKey,
};
use kvferry_types::{ByteSize, PageRun};

use super::disk_blocks::{BlockPlace, block_move};
use super::plain_disk::{PlainFiles, ReadWork};
use super::spread;

/// Pages of a block.
const RATIO: u32 = 32;
/// Longest wait for one copy.
const COPY_LIMIT: Duration = Duration::from_secs(300);

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// An empty directory on the disk. What is written there is removed.
    directory: PathBuf,
    /// Bytes of a block of 32 pages.
    #[arg(long, default_value = "4MiB")]
    block: ByteSize,
    /// Bytes of each round.
    #[arg(long, default_value = "512MiB")]
    bytes: ByteSize,
    /// Rounds that are counted.
    #[arg(long, default_value = "5", value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Reads and writes in flight.
    #[arg(long, default_value = "16", value_parser = clap::value_parser!(u16).range(1..=256))]
    depth: u16,
    /// How they are submitted: auto, io_uring or threads.
    #[arg(long, default_value = "auto")]
    io: DiskIo,
}

/// The files and the memory of a run.
struct Bench {
    tier: DiskTier,
    set: Arc<DiskSet>,
    depot: Arc<Depot>,
    copier: DiskCopier,
    ends: Receiver<DiskCopyEnd>,
    page_bytes: u64,
    blocks: u32,
    transfers: u64,
    plain: PlainFiles,
}

/// The floor's reads with the work that a disk tier has to do: a checksum, and a copy into host memory.
const WORKED: &str = "floor read, verify, copy";
/// Threads that do it: more than cores, so that some work while others wait.
const WORK_DEPTH: usize = 8;

impl Arguments {
    pub(super) fn run(self) -> Result<(), CommandError> {
        let page_bytes = self.block.0 / u64::from(RATIO);
        if page_bytes == 0 || !page_bytes.is_multiple_of(4096) || self.bytes.0 < self.block.0 {
            return Err(CommandError::Config(format!(
                "block is {}: give a multiple of 128 KiB, and at least as many bytes for each round",
                self.block
            )));
        }
        let directory = self.directory.join("kvferry-bench");
        let result = self.measure(&directory, page_bytes);
        if let Err(error) = std::fs::remove_dir_all(&directory) {
            tracing::warn!(%error, directory = %directory.display(), "not removed");
        }
        result
    }

    fn measure(&self, directory: &Path, page_bytes: u64) -> Result<(), CommandError> {
        let mut bench = Bench::new(self, directory, page_bytes)?;
        bench.move_all(true, RATIO)?;
        let depth = bench.plain.best_depth(false)?;
        let write_depth = bench.plain.best_depth(true)?;
        let work = ReadWork::new(1, self.bytes.0)?;
        let mut seconds: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for round in 0..self.rounds {
            let mut note = |what, took| seconds.entry(what).or_default().push(took);
            // A disk takes the first writes after a pause faster: each side is first in turn.
            for side in 0..2 {
                match (round + side) % 2 {
                    0 => note("floor write", bench.plain.run(true, write_depth)?),
                    _ => note("write", bench.move_all(true, RATIO)?),
                }
            }
            if round % 2 == 1 {
                // The floor has overwritten the pages.
                bench.move_all(true, RATIO)?;
            }
            // The second read of the same bytes may come from a cache of the disk or of a host: each side is first in turn.
            for side in 0..3 {
                match (round + side) % 3 {
                    0 => note("floor read", bench.plain.run(false, depth)?),
                    1 => note(
                        WORKED,
                        bench.plain.read_and_work(WORK_DEPTH, (0, 1), &work)?,
                    ),
                    _ => note("read", bench.move_all(false, RATIO)?),
                }
            }
            note("read of 8 of 32 pages", bench.move_all(false, RATIO / 4)?);
        }
        let bytes = f64::from(bench.blocks) * self.block.0 as f64;
        let of = |what: &str| spread(seconds.get(what).cloned().unwrap_or_default());
        print_line(&format!(
            "blocks of {}, {} each round, depth {}, floor at depth {depth} for reads and {write_depth} for writes, {} rounds",
            self.block, self.bytes, self.depth, self.rounds
        ));
        for (what, floor) in [
            ("floor write", "floor write"),
            ("write", "floor write"),
            ("floor read", "floor read"),
            (WORKED, "floor read"),
            ("read", "floor read"),
            ("read of 8 of 32 pages", "read"),
        ] {
            let (least, median, most) = of(what);
            let rate = |seconds: f64| bytes / seconds / 1e9;
            let (_, base, _) = of(floor);
            let ratio = match what {
                "read of 8 of 32 pages" => format!("{:.2} of the time of a read", median / base),
                _ => format!("{:.2} of the floor", base / median),
            };
            print_line(&format!(
                "{what:<26} {:>6.2} GB/s (median; {:.2} to {:.2})  {ratio}",
                rate(median),
                rate(most),
                rate(least)
            ));
        }
        Ok(())
    }
}

impl Bench {
    fn new(arguments: &Arguments, directory: &Path, page_bytes: u64) -> Result<Self, CommandError> {
        let blocks = u32::try_from(arguments.bytes.0 / arguments.block.0).unwrap_or(u32::MAX);
        let pages = blocks.saturating_mul(RATIO);
        let directories =
            DiskDirectories::open(&[directory.to_owned()]).map_err(CommandError::failed)?;
        let cap = arguments.bytes.0 * 5 / 4 + (64 << 20);
        let tier = DiskTier::take(&directories, 0, cap).map_err(CommandError::failed)?;
        let tier =
            tier.ok_or_else(|| CommandError::Failed("the directory is in use".to_owned()))?;
        let key = SetKey {
            layout: [0; 16],
            page_bytes,
            ratio: RATIO,
            shards: 1,
        };
        let (set, _) = tier.open(key, &|_, _| {}).map_err(CommandError::failed)?;
        if set.capacity_pages() < pages {
            return Err(CommandError::Failed(
                "the cap has no room for the blocks".to_owned(),
            ));
        }
        let depot =
            Depot::create(Depot::bytes_for(pages, page_bytes)).map_err(CommandError::failed)?;
        depot
            .hold_pages_of(page_bytes)
            .map_err(CommandError::failed)?;
        let noise: Vec<u8> = (0..page_bytes).map(|_| fastrand::u8(..)).collect();
        let stride = kvferry_memory::page_stride_bytes(page_bytes);
        for page in 0..pages {
            let at = depot.pages_at(page_bytes) + u64::from(page) * stride;
            depot
                .buffer()
                .write_from(at, &noise)
                .map_err(CommandError::failed)?;
        }
        let (report, ends) = channel();
        let io = (arguments.depth.into(), arguments.io);
        let copier = DiskCopier::start(io, move |end| {
            if report.send(end).is_err() {
                tracing::debug!("a copy ended after the measurement");
            }
        });
        let mut bench = Self {
            tier,
            set,
            depot: Arc::new(depot),
            copier: copier.map_err(CommandError::failed)?,
            ends,
            page_bytes,
            blocks,
            transfers: 0,
            plain: PlainFiles::default(),
        };
        // Creates all segments.
        bench.move_all(true, RATIO)?;
        let files = directory.join("shard-0").join(key.name());
        bench.plain = PlainFiles::open(&files, bench.set.geometry(), pages)?;
        Ok(bench)
    }

    /// Moves all blocks, or the first `pages` pages of each. Returns the seconds until the last one has ended; for writes
    /// until all is durable.
    fn move_all(&mut self, write: bool, pages: u32) -> Result<f64, CommandError> {
        let begun = Instant::now();
        let mut records = BTreeMap::new();
        for block in 0..self.blocks {
            self.transfers += 1;
            let start = block * RATIO;
            let place = BlockPlace {
                host: start,
                disk: start,
                pages,
            };
            let transfer = block_move(self.transfers, write, place, self.page_bytes);
            if let Some(record) = &transfer.record {
                self.set.unlist(PageRun {
                    start,
                    count: pages,
                });
                records.insert(transfer.id, record.clone());
            }
            self.copier.copy(DiskCopy {
                transfer,
                depot: Arc::clone(&self.depot),
                set: Arc::clone(&self.set),
            });
        }
        for _ in 0..self.blocks {
            let end = self
                .ends
                .recv_timeout(COPY_LIMIT)
                .map_err(CommandError::failed)?;
            if !end.ended.complete {
                return Err(CommandError::Failed(format!(
                    "a copy failed: {:?}",
                    end.error
                )));
            }
            if let Some(record) = records.get(&end.ended.transfer) {
                self.set.list(record).map_err(CommandError::failed)?;
            }
        }
        if write {
            self.tier.flush().map_err(CommandError::failed)?;
        }
        Ok(begun.elapsed().as_secs_f64())
    }
}
