//! `kvferry-tools sim`: runs simulated worlds with faults, one per seed, and reports violations.

use std::io::Write;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};

use kvferry::cli::print_line;
use kvferry::error::CommandError;
use kvferry_sim::world::{self, Summary};

/// Seeds `A..B`, the end excluded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seeds(u64, u64);

impl FromStr for Seeds {
    type Err = CommandError;

    fn from_str(text: &str) -> Result<Self, CommandError> {
        let seeds = text.split_once("..").and_then(|(from, to)| {
            let (from, to) = (from.parse().ok()?, to.parse().ok()?);
            (from < to).then_some(Self(from, to))
        });
        seeds.ok_or_else(|| CommandError::Config("two numbers A..B, A below B".to_owned()))
    }
}

#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// Range of seeds, without its end.
    #[arg(long, value_name = "A..B", default_value = "0..1000")]
    seeds: Seeds,
    /// Events with faults in each run; an end without faults follows.
    #[arg(long, default_value = "20000")]
    steps: u64,
    /// Concurrent runs. [default: one for each core]
    #[arg(long)]
    jobs: Option<usize>,
    /// Append every seed that fails to this file.
    #[arg(long, value_name = "FILE")]
    corpus: Option<PathBuf>,
    /// Print every event. For one seed.
    #[arg(long)]
    trace: bool,
}

impl Arguments {
    pub(super) fn run(self) -> Result<(), CommandError> {
        let filter = match self.trace {
            true => "kvferry=trace",
            // Every line would report a fault that was injected on purpose.
            false => "off",
        };
        kvferry::telemetry::start(filter)?;
        let Seeds(from, to) = self.seeds;
        let jobs = self
            .jobs
            .or(std::thread::available_parallelism().ok().map(Into::into));
        let begun = Instant::now();
        let progress = progress(to - from);
        let next = AtomicU64::new(from);
        let work = || {
            let mut summary = Summary::default();
            loop {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= to {
                    return summary;
                }
                summary.add(&world::run(seed, self.steps));
                progress.inc(1);
            }
        };
        let mut summary = Summary::default();
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..jobs.unwrap_or(1)).map(|_| scope.spawn(work)).collect();
            for worker in workers {
                match worker.join() {
                    Ok(part) => summary.merge(part),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
        });
        progress.finish_and_clear();
        print_line(&format!("{summary}{:.1} s", begun.elapsed().as_secs_f64()));
        self.verdict(&summary)
    }

    fn verdict(&self, summary: &Summary) -> Result<(), CommandError> {
        for (seed, what) in &summary.failed {
            print_line(&format!("seed {seed}: {what}"));
            print_line(&format!(
                "  cargo xtask sim --seeds {seed}..{} --steps {}",
                seed + 1,
                self.steps
            ));
        }
        if let Some(path) = self.corpus.as_ref().filter(|_| !summary.failed.is_empty()) {
            let file = std::fs::OpenOptions::new()
                .create(true)
                .append(true)
                .open(path);
            let mut file = file.map_err(CommandError::failed)?;
            for (seed, what) in &summary.failed {
                let line = format!("{seed} {} {what}", self.steps);
                writeln!(file, "{line}").map_err(CommandError::failed)?;
            }
        }
        if summary.violations > 0 {
            let text = format!("{} of {} runs failed", summary.violations, summary.runs);
            return Err(CommandError::Found(text));
        }
        match summary.toothless().first() {
            Some(fault) => Err(CommandError::Found(format!(
                "the fault '{fault}' never had an effect"
            ))),
            None => Ok(()),
        }
    }
}

fn progress(runs: u64) -> ProgressBar {
    let bar = ProgressBar::new(runs);
    match ProgressStyle::with_template("{bar:40} {pos}/{len} seeds, {elapsed}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
