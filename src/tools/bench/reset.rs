//! `kvferry-tools bench reset`

use std::time::Duration;

use kvferry::cli::bench::percentiles;
use kvferry::cli::print_line;
use kvferry::error::CommandError;
use kvferry_core::RESET_SLICE_PAGES;

use super::preloaded_leader::PreloadedLeader;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Pages that the leader holds, rounded up to whole prompts.
    #[arg(long, default_value = "1000000")]
    pages: u32,
    /// Pages of a prompt that is looked up meanwhile.
    #[arg(long, default_value = "2048", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    prompt_pages: u32,
    /// Hashes that the reset names; the leader holds none of these pages, so that it looks at all of its own.
    #[arg(long, default_value = "131072", value_parser = clap::value_parser!(u32).range(1..=131_072))]
    hashes: u32,
    /// Resets, each followed by lookups.
    #[arg(long, default_value = "5", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Times in microseconds.
#[derive(Debug, serde::Serialize)]
struct ResetReport {
    pages: u64,
    hashes: u32,
    slice_pages: u32,
    /// Average number of slices of one reset.
    slices: f64,
    /// The step that receives the reset, builds the set of its hashes and runs the first slice.
    first_step_p50_us: f64,
    first_step_max_us: f64,
    slice_p50_us: f64,
    slice_max_us: f64,
    /// The sum of all steps of one reset.
    reset_p50_us: f64,
    /// Lookups of whole prompts after each reset, and as many between its slices.
    lookup_p50_us: f64,
    lookup_p99_us: f64,
    lookup_meanwhile_p50_us: f64,
    lookup_meanwhile_p99_us: f64,
    p99_ratio: f64,
}

fn us(span: Duration) -> f64 {
    span.as_secs_f64() * 1e6
}

impl Arguments {
    pub(crate) fn run(self) -> Result<(), CommandError> {
        let prompts = u64::from(self.pages.div_ceil(self.prompt_pages)).max(1);
        let mut leader = PreloadedLeader::new(prompts, self.prompt_pages)?;
        let mut rng = fastrand::Rng::with_seed(2);
        let mut look_up = |leader: &mut PreloadedLeader| {
            let prompt = rng.u64(0..prompts);
            let encoded = leader.encoded(prompt)?;
            let took = us(leader.lookup(&encoded)?.whole);
            leader.finish(prompt)?;
            Ok::<f64, CommandError>(took)
        };
        let (mut meanwhile, mut usual, mut firsts) = (Vec::new(), Vec::new(), Vec::new());
        let (mut slices, mut resets) = (Vec::new(), Vec::new());
        for round in 0..self.rounds {
            // Seeds that no prompt uses.
            let first = us(leader.begin_reset(u64::MAX - u64::from(round), self.hashes)?);
            let mut whole = first;
            firsts.push(first);
            while let Some(slice) = leader.go_on_with_reset() {
                whole += us(slice);
                slices.push(us(slice));
                meanwhile.push(look_up(&mut leader)?);
            }
            resets.push(whole);
            leader.end_reset()?;
            while usual.len() < meanwhile.len() {
                usual.push(look_up(&mut leader)?);
            }
        }
        let (lookup_p50_us, lookup_p99_us) = percentiles(usual);
        let (lookup_meanwhile_p50_us, lookup_meanwhile_p99_us) = percentiles(meanwhile);
        let longest = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
        let report = ResetReport {
            pages: prompts * u64::from(self.prompt_pages),
            hashes: self.hashes,
            slice_pages: RESET_SLICE_PAGES,
            slices: slices.len() as f64 / f64::from(self.rounds),
            first_step_max_us: longest(&firsts),
            first_step_p50_us: percentiles(firsts).0,
            slice_max_us: longest(&slices),
            slice_p50_us: percentiles(slices).0,
            reset_p50_us: percentiles(resets).0,
            lookup_p50_us,
            lookup_p99_us,
            lookup_meanwhile_p50_us,
            lookup_meanwhile_p99_us,
            p99_ratio: lookup_meanwhile_p99_us / lookup_p99_us,
        };
        if self.json {
            print_line(&serde_json::to_string_pretty(&report).map_err(CommandError::failed)?);
            return Ok(());
        }
        print_line(&format!(
            "A reset that names {} hashes, in a leader with {} pages, in slices of {} pages.",
            report.hashes, report.pages, report.slice_pages
        ));
        print_line(&format!(
            "first step   p50 {:.0} us, at most {:.0} us (takes the request and makes a set of its hashes)",
            report.first_step_p50_us, report.first_step_max_us
        ));
        print_line(&format!(
            "slices       {:.0} a reset, p50 {:.0} us, at most {:.0} us",
            report.slices, report.slice_p50_us, report.slice_max_us
        ));
        print_line(&format!("all steps    p50 {:.0} us", report.reset_p50_us));
        print_line(&format!(
            "lookups      p50 {:.1} us p99 {:.1} us; between slices p50 {:.1} us p99 {:.1} us, {:.2} times the p99",
            report.lookup_p50_us,
            report.lookup_p99_us,
            report.lookup_meanwhile_p50_us,
            report.lookup_meanwhile_p99_us,
            report.p99_ratio
        ));
        Ok(())
    }
}
