//! `kvferry bench copy`

use std::sync::Barrier;
use std::time::Instant;

use crate::cli::common::{block_on, print_line};
use crate::error::CommandError;
use kvferry_memory::CopyEngine;
use kvferry_types::Direction;
use kvferry_workload::content::POISON;

use super::copy_fixture::{CopyFixture, registration};
use super::dispatch_latency::{Ordered, measure};
use super::spread;

/// Sets of pages that are used in turn, so that no cache holds the bytes of the next copy.
const ROTATION: u32 = 4;
/// Ordered copies of one page.
const ORDERS: u32 = 2000;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Sizes of a fragment in KiB.
    #[arg(long, value_delimiter = ',', default_value = "32,18,8")]
    fragment_kib: Vec<u32>,
    /// Fragments in one copy.
    #[arg(long, default_value = "2048", value_parser = clap::value_parser!(u32).range(1..=65536))]
    fragments: u32,
    /// Threads that copy.
    #[arg(long, default_value = "1", value_parser = clap::value_parser!(u16).range(1..=64))]
    threads: u16,
    /// Rounds of each side.
    #[arg(long, default_value = "15", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// One row of the result: GB/s (10^9 bytes) as minimum, median, maximum.
#[derive(Debug, serde::Serialize)]
struct CopyRow {
    fragment_kib: u32,
    fragments: u32,
    threads: u16,
    memcpy_gb_per_s: (f64, f64, f64),
    gather_gb_per_s: (f64, f64, f64),
    scatter_gb_per_s: (f64, f64, f64),
    gather_to_memcpy: f64,
    scatter_to_memcpy: f64,
    one_page: Ordered,
}

impl Arguments {
    pub(crate) fn run(self) -> Result<(), CommandError> {
        let rows: Result<Vec<CopyRow>, CommandError> = self
            .fragment_kib
            .iter()
            .map(|kib| self.measure(*kib))
            .collect();
        let rows = rows?;
        if self.json {
            print_line(&serde_json::to_string_pretty(&rows).map_err(CommandError::failed)?);
            return Ok(());
        }
        print_line(
            "fragment  threads  memcpy GB/s          gather GB/s          scatter GB/s         gather/memcpy  scatter/memcpy",
        );
        for row in rows {
            let three = |(least, median, most): (f64, f64, f64)| {
                format!("{median:5.2} ({least:5.2}..{most:5.2})")
            };
            print_line(&format!(
                "{:>4} KiB  {:>7}  {:<20} {:<20} {:<20} {:>13.2}  {:>14.2}",
                row.fragment_kib,
                row.threads,
                three(row.memcpy_gb_per_s),
                three(row.gather_gb_per_s),
                three(row.scatter_gb_per_s),
                row.gather_to_memcpy,
                row.scatter_to_memcpy
            ));
            print_line(&format!("          {}", row.one_page.text()));
        }
        Ok(())
    }

    fn measure(&self, kib: u32) -> Result<CopyRow, CommandError> {
        let fragment = u64::from(kib) * 1024;
        let pages = self.fragments * ROTATION;
        let bytes = fragment * u64::from(pages);
        let bench = CopyFixture::new(&registration(fragment, pages), pages)?;
        let engine = CopyEngine::new(usize::from(self.threads)).map_err(CommandError::failed)?;
        let (mut memcpy, mut gather, mut scatter) = (Vec::new(), Vec::new(), Vec::new());
        let source = vec![1_u8; usize::try_from(bytes).unwrap_or(0)];
        let mut target = vec![POISON; source.len()];
        let each = source.len() / ROTATION as usize;
        let rate = |begun: Instant| each as f64 / begun.elapsed().as_secs_f64() / 1e9;
        for round in 0..self.rounds + 1 {
            let set = round % ROTATION;
            let from = set as usize * each;
            let begun = self.memcpy(&mut target[from..from + each], &source[from..from + each]);
            let floor = rate(begun);
            let job = bench.job(Direction::Store, set, set, self.fragments);
            let begun = Instant::now();
            engine.run(&job).map_err(CommandError::failed)?;
            let gathered = rate(begun);
            let job = bench.job(Direction::Load, set, set, self.fragments);
            let begun = Instant::now();
            engine.run(&job).map_err(CommandError::failed)?;
            let scattered = rate(begun);
            // The first round warms up.
            if round > 0 {
                memcpy.push(floor);
                gather.push(gathered);
                scatter.push(scattered);
            }
        }
        let one = bench.job(Direction::Load, 0, 0, 1);
        let one_page = block_on(2, measure(one, bench.memory(), ORDERS))?;
        let (memcpy, gather, scatter) = (spread(memcpy), spread(gather), spread(scatter));
        Ok(CopyRow {
            fragment_kib: kib,
            fragments: self.fragments,
            threads: self.threads,
            memcpy_gb_per_s: memcpy,
            gather_gb_per_s: gather,
            scatter_gb_per_s: scatter,
            gather_to_memcpy: gather.1 / memcpy.1,
            scatter_to_memcpy: scatter.1 / memcpy.1,
            one_page,
        })
    }

    /// One contiguous copy, divided evenly among the threads. Returns the time when all threads were ready to begin.
    fn memcpy(&self, target: &mut [u8], source: &[u8]) -> Instant {
        let each = target.len().div_ceil(usize::from(self.threads)).max(1);
        let shares = target.chunks_mut(each).zip(source.chunks(each));
        let ready = Barrier::new(shares.len());
        std::thread::scope(|scope| {
            let mut shares = shares;
            let own = shares.next();
            for (target, source) in shares {
                let ready = &ready;
                scope.spawn(move || {
                    ready.wait();
                    target.copy_from_slice(source);
                });
            }
            ready.wait();
            let begun = Instant::now();
            if let Some((target, source)) = own {
                target.copy_from_slice(source);
            }
            begun
        })
    }
}
