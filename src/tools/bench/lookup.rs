//! `kvferry-tools bench lookup`

use std::collections::HashMap;
use std::hint::black_box;
use std::time::{Duration, Instant};

use kvferry::cli::bench::percentiles;
use kvferry::cli::print_line;
use kvferry::error::CommandError;
use kvferry_core::Pool;

use super::preloaded_leader::{Below, Preload, PreloadedLeader};
use kvferry::cli::bench::rig::{HASH_BYTES, hashes};

/// Bytes that are written before a cold lookup to empty the caches: several times the largest last-level cache of one
/// core.
pub(super) const EVICT_BYTES: usize = 128 << 20;
const LINE_WORDS: usize = 8;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Pages that the leader holds, rounded up to whole prompts.
    #[arg(long, value_delimiter = ',', default_value = "10000,1000000,10000000")]
    pages: Vec<u32>,
    /// Pages of a prompt.
    #[arg(long, default_value = "2048", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    prompt_pages: u32,
    /// Lookups of each kind.
    #[arg(long, default_value = "200", value_parser = clap::value_parser!(u32).range(10..=100_000))]
    rounds: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Latencies of lookups of whole prompts, in microseconds.
#[derive(Debug, serde::Serialize)]
struct LookupRow {
    pages: u64,
    blocks: u32,
    /// Whether the caches were emptied before each lookup; otherwise they hold what lookups of other prompts left.
    cold: bool,
    lookup_p50_us: f64,
    lookup_p99_us: f64,
    plain_p50_us: f64,
    plain_p99_us: f64,
    lookup_to_plain: f64,
    /// With a second tier that is empty, and with one that has the second half of each prompt.
    empty_tier_p50_us: f64,
    empty_tier_p99_us: f64,
    half_tier_p50_us: f64,
    half_tier_p99_us: f64,
    empty_tier_to_lookup: f64,
    half_tier_to_lookup: f64,
}

#[derive(Debug, serde::Serialize)]
struct LookupReport {
    rows: Vec<LookupRow>,
    /// Ratio of the latencies of cold lookups: most pages to fewest pages.
    growth: f64,
    plain_growth: f64,
}

impl Arguments {
    pub(crate) fn run(self) -> Result<(), CommandError> {
        let mut rows = Vec::new();
        for pages in &self.pages {
            self.measure(*pages, &mut rows)?;
        }
        let cold: Vec<&LookupRow> = rows.iter().filter(|row| row.cold).collect();
        let growth = |value: fn(&LookupRow) -> f64| match (cold.first(), cold.last()) {
            (Some(first), Some(last)) => value(last) / value(first),
            _ => 0.0,
        };
        let report = LookupReport {
            growth: growth(|row| row.lookup_p50_us),
            plain_growth: growth(|row| row.plain_p50_us),
            rows,
        };
        if self.json {
            print_line(&serde_json::to_string_pretty(&report).map_err(CommandError::failed)?);
            return Ok(());
        }
        print_line(&format!(
            "Lookups of {} pages, from the bytes of the request to the answer, beside as many probes of a hash map and",
            self.prompt_pages
        ));
        print_line(
            "compares of 16 bytes with a plain array; and with a second tier that is empty, or has half of each prompt.",
        );
        print_line(
            "   pages   blocks  caches  lookup p50       p99    plain p50       p99  lookup/plain   empty tier      ratio    half tier      ratio",
        );
        for row in &report.rows {
            print_line(&format!(
                "{:>8} {:>8}  {:<6}  {:>7.1} us {:>9.1}  {:>8.1} us {:>9.1}  {:>12.2}  {:>8.1} us  {:>9.2}  {:>8.1} us  {:>9.2}",
                row.pages,
                row.blocks,
                if row.cold { "empty" } else { "in use" },
                row.lookup_p50_us,
                row.lookup_p99_us,
                row.plain_p50_us,
                row.plain_p99_us,
                row.lookup_to_plain,
                row.empty_tier_p50_us,
                row.empty_tier_to_lookup,
                row.half_tier_p50_us,
                row.half_tier_to_lookup
            ));
        }
        print_line(&format!(
            "From the fewest to the most pages, empty caches: {:.2} times as long; plain {:.2}.",
            report.growth, report.plain_growth
        ));
        Ok(())
    }

    fn measure(&self, pages: u32, rows: &mut Vec<LookupRow>) -> Result<(), CommandError> {
        let prompts = u64::from(pages.div_ceil(self.prompt_pages)).max(1);
        let mut leader = PreloadedLeader::new(prompts, self.prompt_pages)?;
        let tiered = |below| {
            PreloadedLeader::with(Preload {
                prompts,
                prompt_pages: self.prompt_pages,
                free_pages: 0,
                below,
                page_index: false,
            })
        };
        let (mut empty, mut half) = (tiered(Below::Empty)?, tiered(Below::Half)?);
        let plain = Plain::of(leader.pool()?);
        let mut caches = vec![0_u64; EVICT_BYTES / size_of::<u64>()];
        let mut rng = fastrand::Rng::with_seed(2);
        for cold in [false, true] {
            let mut looked_up = [const { Vec::new() }; 3];
            let mut probed = Vec::new();
            let warm_up = self.rounds / 10;
            for round in 0..self.rounds + warm_up {
                let prompt = rng.u64(0..prompts);
                for (leader, took) in [&mut leader, &mut empty, &mut half]
                    .into_iter()
                    .zip(&mut looked_up)
                {
                    if cold {
                        evict(&mut caches);
                    }
                    let encoded = leader.encoded(prompt)?;
                    let lookup = leader.lookup(&encoded)?.whole;
                    leader.finish(prompt)?;
                    if round >= warm_up {
                        took.push(lookup.as_secs_f64() * 1e6);
                    }
                }
                if cold {
                    evict(&mut caches);
                }
                let probes = plain.lookup(&hashes(prompt, self.prompt_pages))?;
                if round >= warm_up {
                    probed.push(probes.as_secs_f64() * 1e6);
                }
            }
            let [one, two, three] = looked_up.map(percentiles);
            let (lookup_p50_us, lookup_p99_us) = one;
            let (empty_tier_p50_us, empty_tier_p99_us) = two;
            let (half_tier_p50_us, half_tier_p99_us) = three;
            let (plain_p50_us, plain_p99_us) = percentiles(probed);
            rows.push(LookupRow {
                pages: prompts * u64::from(self.prompt_pages),
                blocks: leader.pool()?.live_blocks(),
                cold,
                lookup_p50_us,
                lookup_p99_us,
                plain_p50_us,
                plain_p99_us,
                lookup_to_plain: lookup_p50_us / plain_p50_us,
                empty_tier_p50_us,
                empty_tier_p99_us,
                half_tier_p50_us,
                half_tier_p99_us,
                empty_tier_to_lookup: empty_tier_p50_us / lookup_p50_us,
                half_tier_to_lookup: half_tier_p50_us / lookup_p50_us,
            });
        }
        Ok(())
    }
}

/// Writes to every cache line of a buffer that is larger than the caches.
pub(super) fn evict(caches: &mut [u64]) {
    for word in caches.iter_mut().step_by(LINE_WORDS) {
        *word += 1;
    }
    black_box(caches);
}

/// The floor: a map of the standard library from the hash of a block's first page to the block's place, and one array
/// of the hashes of all pages, in the order of the pool.
struct Plain {
    blocks: HashMap<u128, (u32, u32)>,
    pages: Vec<u128>,
}

impl Plain {
    fn of(pool: &Pool) -> Self {
        let mut plain = Self {
            blocks: HashMap::new(),
            pages: vec![0; pool.capacity_pages() as usize],
        };
        for block in pool.view() {
            let start = block.start as usize;
            plain
                .blocks
                .insert(block.fingerprints[0].0, (block.start, block.ready));
            for (page, held) in plain.pages[start..].iter_mut().zip(block.fingerprints) {
                *page = held.0;
            }
        }
        plain
    }

    /// Time to find every page.
    fn lookup(&self, hashes: &[u8]) -> Result<Duration, CommandError> {
        let begun = Instant::now();
        let (hashes, _) = hashes.as_chunks::<HASH_BYTES>();
        let mut found = 0;
        while let Some(first) = hashes.get(found) {
            let Some((start, pages)) = self.blocks.get(&u128::from_be_bytes(*first)) else {
                break;
            };
            let held = &self.pages[*start as usize..][..*pages as usize];
            let requested = hashes[found..]
                .iter()
                .map(|hash| u128::from_be_bytes(*hash));
            let equal = held
                .iter()
                .zip(requested)
                .take_while(|(held, requested)| *held == requested);
            found += equal.count();
        }
        let took = begun.elapsed();
        if black_box(found) == hashes.len() {
            Ok(took)
        } else {
            Err(CommandError::Failed(format!("found {found} pages")))
        }
    }
}
