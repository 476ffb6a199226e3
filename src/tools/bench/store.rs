//! `kvferry-tools bench store`

use std::time::Duration;

use kvferry::cli::bench::percentiles;
use kvferry::cli::bench::rig::{HASH_BYTES, hashes};
use kvferry::cli::print_line;
use kvferry::error::CommandError;

use super::preloaded_leader::{Below, Preload, PreloadedLeader};

/// Pages of the prompts that the leader holds.
const PROMPT_PAGES: u32 = 2048;
/// Seed of the first sequence that grows; smaller ones are those of prompts.
const SEQUENCES_FROM: u64 = 1 << 40;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Pages that the leader holds, rounded up to whole prompts.
    #[arg(long, default_value = "1000000")]
    pages: u32,
    /// Pages up to which a sequence grows, one page with each store. The stores of a short one are the baseline.
    #[arg(long, value_delimiter = ',', default_value = "64,8192")]
    sequence_pages: Vec<u32>,
    /// Copies that are in flight while the next page is stored.
    #[arg(long, value_delimiter = ',', default_value = "0,1")]
    under_way: Vec<usize>,
    /// Stores of each kind.
    #[arg(long, default_value = "32768", value_parser = clap::value_parser!(u32).range(100..=10_000_000))]
    stores: u32,
    /// The leader finds pages inside blocks.
    #[arg(long)]
    page_index: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Times of a store in the leader in microseconds: the request, and the end of a copy with its answer.
#[derive(Debug, serde::Serialize)]
struct StoreRow {
    sequence_pages: u32,
    under_way: usize,
    store_p50_us: f64,
    store_p99_us: f64,
    /// Median of the last eighth of the pages of each sequence.
    last_p50_us: f64,
}

fn us(span: Duration) -> f64 {
    span.as_secs_f64() * 1e6
}

impl Arguments {
    pub(crate) fn run(self) -> Result<(), CommandError> {
        let mut rows = Vec::new();
        for under_way in &self.under_way {
            self.measure(*under_way, &mut rows)?;
        }
        if self.json {
            print_line(&serde_json::to_string_pretty(&rows).map_err(CommandError::failed)?);
            return Ok(());
        }
        print_line(&format!(
            "Stores of one page each, from the request to the answer without the copy, in a leader with {} pages.",
            self.pages
        ));
        print_line("sequence  in flight  store p50       p99  p50 of the last eighth");
        for row in &rows {
            print_line(&format!(
                "{:>8} {:>10}  {:>6.2} us {:>9.2}  {:>22.2}",
                row.sequence_pages,
                row.under_way,
                row.store_p50_us,
                row.store_p99_us,
                row.last_p50_us
            ));
        }
        Ok(())
    }

    /// Measures sequences of all lengths in turn.
    fn measure(&self, under_way: usize, rows: &mut Vec<StoreRow>) -> Result<(), CommandError> {
        let longest = self
            .sequence_pages
            .iter()
            .copied()
            .max()
            .unwrap_or(1)
            .max(1);
        let turns = self.stores.div_ceil(longest);
        let per_turn = |pages: u32| (longest / pages).max(1);
        let free_pages = self
            .sequence_pages
            .iter()
            .map(|pages| turns * per_turn(*pages) * pages);
        let mut leader = PreloadedLeader::with(Preload {
            prompts: u64::from(self.pages.div_ceil(PROMPT_PAGES)).max(1),
            prompt_pages: PROMPT_PAGES,
            free_pages: free_pages.sum(),
            below: Below::None,
            page_index: self.page_index,
        })?;
        let mut sequence = SEQUENCES_FROM;
        let mut times = vec![(Vec::new(), Vec::new()); self.sequence_pages.len()];
        for _ in 0..turns {
            for (pages, (all, last)) in self.sequence_pages.iter().zip(&mut times) {
                for _ in 0..per_turn(*pages) {
                    sequence += 1;
                    let hashes = hashes(sequence, *pages);
                    let (hashes, _) = hashes.as_chunks::<HASH_BYTES>();
                    leader.begin_sequence(sequence)?;
                    for (hash, position) in hashes.iter().zip(0..) {
                        let took = us(leader.store_page(sequence, position, hash, under_way)?);
                        all.push(took);
                        if position >= pages - pages.div_ceil(8) {
                            last.push(took);
                        }
                    }
                    leader.end_sequence(sequence)?;
                }
            }
        }
        for (sequence_pages, (all, last)) in self.sequence_pages.iter().zip(times) {
            let (store_p50_us, store_p99_us) = percentiles(all);
            rows.push(StoreRow {
                sequence_pages: *sequence_pages,
                under_way,
                store_p50_us,
                store_p99_us,
                last_p50_us: percentiles(last).0,
            });
        }
        Ok(())
    }
}
