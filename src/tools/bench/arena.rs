//! `kvferry-tools bench arena`

use std::collections::VecDeque;
use std::fs;
use std::hint::black_box;
use std::time::Instant;

use kvferry::cli::bench::rig::{HASH_BYTES, hashes};
use kvferry::cli::bench::spread;
use kvferry::cli::print_line;
use kvferry::error::CommandError;
use kvferry_core::{AnchorKey, Arena, Domain, Pool, ShardSet};
use kvferry_types::{GroupId, PageHashes, Ratio, Shard};

/// Pages of the longest run.
const RUN_PAGES_MAX: u32 = 32;
/// Runs that are freed and allocated between two clock readings.
const BATCH: usize = 1000;
/// Block sizes of the two pools whose memory is measured, in pages. Their difference separates the memory of a page
/// from that of a block.
const BLOCK_PAGES: [u32; 2] = [2, 32];
/// Pages of a prompt that fills the pool.
const PROMPT_PAGES: u32 = 2048;
const OCCUPIED_PERCENT: u64 = 95;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Pages of the arena.
    #[arg(long, value_delimiter = ',', default_value = "1000000,32000000")]
    pages: Vec<u32>,
    /// Batches of 1000 runs of each kind.
    #[arg(long, default_value = "1000", value_parser = clap::value_parser!(u32).range(10..=100_000))]
    rounds: u32,
    /// Blocks of the pool whose memory is measured.
    #[arg(long, default_value = "1000000", value_parser = clap::value_parser!(u32).range(2048..=100_000_000))]
    blocks: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Times of a release and an allocation, in nanoseconds: minimum, median and maximum over batches.
#[derive(Debug, serde::Serialize)]
struct ArenaRow {
    pages: u32,
    occupied: f64,
    arena_ns: (f64, f64, f64),
    list_ns: (f64, f64, f64),
    arena_to_list: f64,
    /// Allocations for which no hole was long enough.
    failed: u64,
}

/// Memory of a pool.
#[derive(Debug, serde::Serialize)]
struct Memory {
    blocks: u64,
    pages: u64,
    bytes: u64,
}

#[derive(Debug, serde::Serialize)]
struct ArenaReport {
    rows: Vec<ArenaRow>,
    memory: Vec<Memory>,
    bytes_per_page: f64,
    bytes_per_block: f64,
}

impl Arguments {
    pub(crate) fn run(self) -> Result<(), CommandError> {
        // Measured first, before the process has held memory that it could reuse.
        let memory: Result<Vec<Memory>, CommandError> = BLOCK_PAGES
            .iter()
            .map(|pages| pool_memory(self.blocks, *pages))
            .collect();
        let memory = memory?;
        let rows: Result<Vec<ArenaRow>, CommandError> = self
            .pages
            .iter()
            .map(|pages| self.measure(*pages))
            .collect();
        let [few, many] = [&memory[0], &memory[1]];
        let bytes_per_page =
            (many.bytes as f64 - few.bytes as f64) / (many.pages as f64 - few.pages as f64);
        let bytes_per_block =
            (few.bytes as f64 - bytes_per_page * few.pages as f64) / few.blocks as f64;
        let report = ArenaReport {
            rows: rows?,
            bytes_per_page,
            bytes_per_block,
            memory,
        };
        if self.json {
            print_line(&serde_json::to_string_pretty(&report).map_err(CommandError::failed)?);
            return Ok(());
        }
        print_line(
            "A run is freed and one allocated, of 1 to 32 pages, in random places; beside a list of free runs of one size.",
        );
        print_line(
            "   pages  occupied  arena ns                  list ns                   arena/list  failed",
        );
        for row in &report.rows {
            let three = |(least, median, most): (f64, f64, f64)| {
                format!("{median:6.1} ({least:5.1}..{most:6.1})")
            };
            print_line(&format!(
                "{:>8}  {:>6.1} %  {:<24}  {:<24}  {:>10.2}  {:>6}",
                row.pages,
                row.occupied * 100.0,
                three(row.arena_ns),
                three(row.list_ns),
                row.arena_to_list,
                row.failed
            ));
        }
        for pool in &report.memory {
            let gib = pool.bytes as f64 / f64::from(1 << 30);
            print_line(&format!(
                "A pool of {} blocks with {} pages takes {gib:.2} GiB.",
                pool.blocks, pool.pages
            ));
        }
        print_line(&format!(
            "That is {:.1} bytes a page and {:.0} a block.",
            report.bytes_per_page, report.bytes_per_block
        ));
        Ok(())
    }

    fn measure(&self, pages: u32) -> Result<ArenaRow, CommandError> {
        let mut nearly_full = NearlyFull::new(pages);
        let mut list = List::new(&nearly_full);
        let (mut arena_ns, mut list_ns) = (Vec::new(), Vec::new());
        let mut rng = fastrand::Rng::with_seed(4);
        let warm_up = self.rounds / 10;
        for round in 0..self.rounds + warm_up {
            let live = nearly_full.live.len();
            let picks: Vec<usize> = (0..BATCH).map(|_| rng.usize(0..live)).collect();
            let begun = Instant::now();
            nearly_full.turn_over(&picks);
            let arena = begun.elapsed();
            let begun = Instant::now();
            list.turn_over(&picks);
            let plain = begun.elapsed();
            if round >= warm_up {
                arena_ns.push(arena.as_secs_f64() * 1e9 / BATCH as f64);
                list_ns.push(plain.as_secs_f64() * 1e9 / BATCH as f64);
            }
        }
        nearly_full.arena.check().map_err(CommandError::failed)?;
        let (arena_ns, list_ns) = (spread(arena_ns), spread(list_ns));
        Ok(ArenaRow {
            pages,
            occupied: 1.0 - f64::from(nearly_full.arena.free_pages()) / f64::from(pages),
            arena_ns,
            list_ns,
            arena_to_list: arena_ns.1 / list_ns.1,
            failed: nearly_full.failed,
        })
    }
}

/// An arena in which every run was freed and allocated again once, so that holes lie anywhere.
struct NearlyFull {
    arena: Arena,
    live: Vec<(u32, u32)>,
    /// Lengths of the freed runs, to be allocated in order. The next length is never that of the hole that was just
    /// made.
    wanted: VecDeque<u32>,
    failed: u64,
}

impl NearlyFull {
    fn new(pages: u32) -> Self {
        let mut rng = fastrand::Rng::with_seed(5);
        let mut full = Self {
            arena: Arena::new(pages),
            live: Vec::new(),
            wanted: VecDeque::new(),
            failed: 0,
        };
        loop {
            let length = rng.u32(1..=RUN_PAGES_MAX);
            let Some(start) = full.arena.alloc(length) else {
                break;
            };
            full.live.push((start, length));
        }
        rng.shuffle(&mut full.live);
        let free = u64::from(pages) * (100 - OCCUPIED_PERCENT) / 100;
        while u64::from(full.arena.free_pages()) < free {
            let Some((start, length)) = full.live.pop() else {
                break;
            };
            full.arena.release(start, length);
            full.wanted.push_back(length);
        }
        let all: Vec<usize> = (0..full.live.len()).collect();
        full.turn_over(&all);
        full
    }

    /// Frees each of these runs and allocates another one in its place.
    fn turn_over(&mut self, picks: &[usize]) {
        for pick in picks {
            let (start, length) = self.live[*pick];
            self.arena.release(start, length);
            self.wanted.push_back(length);
            let place = &mut self.live[*pick];
            for _ in 0..self.wanted.len() {
                let Some(length) = self.wanted.pop_front() else {
                    break;
                };
                if let Some(start) = self.arena.alloc(length) {
                    *place = (start, length);
                    break;
                }
                self.failed += 1;
                self.wanted.push_back(length);
            }
        }
    }
}

/// The floor: runs of one size, with the free ones in a list.
struct List {
    free: Vec<u32>,
    live: Vec<(u32, u32)>,
}

impl List {
    fn new(like: &NearlyFull) -> Self {
        let (live, free) = (like.live.len() as u32, like.wanted.len() as u32);
        let length = RUN_PAGES_MAX;
        Self {
            free: (live..live + free).map(|run| run * length).collect(),
            live: (0..live).map(|run| (run * length, length)).collect(),
        }
    }

    fn turn_over(&mut self, picks: &[usize]) {
        for pick in picks {
            let place = &mut self.live[*pick];
            if let Some(start) = self.free.pop() {
                self.free.push(place.0);
                place.0 = black_box(start);
            }
        }
    }
}

/// Fills a pool and returns by how much the process grew.
fn pool_memory(blocks: u32, block_pages: u32) -> Result<Memory, CommandError> {
    let ratio = Ratio::new(block_pages).map_err(CommandError::failed)?;
    let pages = blocks
        .checked_mul(block_pages)
        .ok_or_else(|| CommandError::Failed("more pages than an arena can have".to_owned()))?;
    let domain = Domain::new(&AnchorKey::new([5; 32]), &[], &[3; 16], GroupId(0));
    let before = resident_bytes()?;
    let mut pool = Pool::new(pages, ratio);
    let (mut transfer, mut reserved, mut evicted) = (0, Vec::new(), Vec::new());
    let mut left = pages;
    for prompt in 0.. {
        let prompt_pages = left.min(PROMPT_PAGES);
        if prompt_pages == 0 {
            break;
        }
        left -= prompt_pages;
        let packed = PageHashes::packed(HASH_BYTES, hashes(prompt, prompt_pages));
        let hashes = packed.ok_or_else(|| CommandError::Failed("hashes do not fit".to_owned()))?;
        for position in (0..prompt_pages).step_by(block_pages as usize) {
            let end = prompt_pages.min(position + block_pages);
            pool.reserve(
                &domain,
                hashes.view(),
                position,
                end,
                None,
                &mut transfer,
                &mut reserved,
                &mut evicted,
            );
            for reserved in reserved.drain(..) {
                pool.start_filling(reserved.transfer, ShardSet::first(1));
                pool.ended(reserved.transfer, Shard(0), true);
            }
        }
    }
    let bytes = resident_bytes()?.saturating_sub(before);
    let states = pool.page_states();
    if states.ready != pages {
        return Err(CommandError::Failed(format!("pages: {states:?}")));
    }
    Ok(Memory {
        blocks: u64::from(pool.live_blocks()),
        pages: u64::from(pages),
        bytes,
    })
}

/// Resident memory of the process, in bytes.
fn resident_bytes() -> Result<u64, CommandError> {
    let text = fs::read_to_string("/proc/self/status").map_err(CommandError::failed)?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
    let kib: Option<u64> = kib.and_then(|kib| kib.parse().ok());
    let kib = kib.ok_or_else(|| CommandError::Failed("/proc/self/status: no VmRSS".to_owned()))?;
    Ok(kib * 1024)
}
