//! `kvferry-tools bench tails`

use kvferry::cli::bench::percentiles;
use kvferry::cli::print_line;
use kvferry::error::CommandError;

use super::lookup::{EVICT_BYTES, evict};
use super::preloaded_leader::{Below, Preload, PreloadedLeader};

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Pages that the leader holds, rounded up to whole prompts.
    #[arg(long, value_delimiter = ',', default_value = "10000,1000000")]
    pages: Vec<u32>,
    /// Pages of a prompt.
    #[arg(long, default_value = "2048", value_parser = clap::value_parser!(u32).range(64..=65_536))]
    prompt_pages: u32,
    /// Pages before the tail; the end of a block and the middle of one, for blocks of 32 pages.
    #[arg(long, value_delimiter = ',', default_value = "1024,1039")]
    before: Vec<u32>,
    /// Lookups of each kind.
    #[arg(long, default_value = "1000", value_parser = clap::value_parser!(u32).range(10..=100_000))]
    rounds: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Latencies of lookups from the bytes of the request to the answer, in microseconds.
#[derive(Debug, serde::Serialize)]
struct TailRow {
    pages: u64,
    /// Whether the caches were emptied before each lookup; otherwise they hold what lookups of other prompts left.
    cold: bool,
    /// Pages of the prompt before those that are named.
    before: u32,
    /// Without the index of pages; `None` where the first page lies inside a block.
    plain_p50_us: Option<f64>,
    plain_p99_us: Option<f64>,
    indexed_p50_us: f64,
    indexed_p99_us: f64,
    index_bytes_per_page: f64,
}

impl Arguments {
    pub(crate) fn run(self) -> Result<(), CommandError> {
        let mut rows = Vec::new();
        for pages in &self.pages {
            self.measure(*pages, &mut rows)?;
        }
        if self.json {
            print_line(&serde_json::to_string_pretty(&rows).map_err(CommandError::failed)?);
            return Ok(());
        }
        print_line(&format!(
            "Lookups of prompts of {} pages, and of tails of them, without and with an index of pages.",
            self.prompt_pages
        ));
        print_line(
            "   pages  caches  before  plain p50       p99  indexed p50       p99  bytes a page",
        );
        for row in &rows {
            let plain = row.plain_p50_us.zip(row.plain_p99_us);
            let plain = plain.map_or("       not found       ".to_owned(), |(p50, p99)| {
                format!("{p50:>6.1} us {p99:>9.1}    ")
            });
            print_line(&format!(
                "{:>8}  {:<6}  {:>6}  {plain}{:>6.1} us {:>9.1}  {:>12.2}",
                row.pages,
                if row.cold { "empty" } else { "in use" },
                row.before,
                row.indexed_p50_us,
                row.indexed_p99_us,
                row.index_bytes_per_page,
            ));
        }
        Ok(())
    }

    fn measure(&self, pages: u32, rows: &mut Vec<TailRow>) -> Result<(), CommandError> {
        let prompts = u64::from(pages.div_ceil(self.prompt_pages)).max(1);
        let leader = |page_index| {
            PreloadedLeader::with(Preload {
                prompts,
                prompt_pages: self.prompt_pages,
                free_pages: 0,
                below: Below::None,
                page_index,
            })
        };
        let (mut plain, mut indexed) = (leader(false)?, leader(true)?);
        let held = prompts * u64::from(self.prompt_pages);
        let bytes = indexed.pool()?.page_index_bytes() as f64 / held as f64;
        let block_pages = kvferry_types::Ratio::default().pages();
        let mut caches = vec![0_u64; EVICT_BYTES / size_of::<u64>()];
        let mut rng = fastrand::Rng::with_seed(2);
        let named: Vec<u32> = [0].into_iter().chain(self.before.iter().copied()).collect();
        for cold in [false, true] {
            let mut times = vec![(Vec::new(), Vec::new()); named.len()];
            let warm_up = self.rounds / 10;
            for round in 0..self.rounds + warm_up {
                for (before, (without, with)) in named.iter().zip(&mut times) {
                    let prompt = rng.u64(0..prompts);
                    let both = [(&mut plain, without), (&mut indexed, with)];
                    let found = both.into_iter().skip(usize::from(before % block_pages > 0));
                    for (leader, took) in found {
                        if cold {
                            evict(&mut caches);
                        }
                        let encoded = leader.encoded_tail(prompt, *before)?;
                        let lookup = leader.lookup(&encoded)?.whole;
                        leader.finish(prompt)?;
                        if round >= warm_up {
                            took.push(lookup.as_secs_f64() * 1e6);
                        }
                    }
                }
            }
            for (before, (without, with)) in named.iter().zip(times) {
                let without = (!without.is_empty()).then(|| percentiles(without));
                let (indexed_p50_us, indexed_p99_us) = percentiles(with);
                rows.push(TailRow {
                    pages: held,
                    cold,
                    before: *before,
                    plain_p50_us: without.map(|(p50, _)| p50),
                    plain_p99_us: without.map(|(_, p99)| p99),
                    indexed_p50_us,
                    indexed_p99_us,
                    index_bytes_per_page: bytes,
                });
            }
        }
        Ok(())
    }
}
