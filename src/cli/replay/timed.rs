//! The replay in virtual time.

use std::num::NonZeroU64;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::CommandError;
use kvferry_sim::timed::{
    Arrival, DISK_LATENCY, DISK_READ_BYTES_PER_S, DISK_WRITE_BYTES_PER_S, Formula,
    LINK_BYTES_PER_S, LINK_LATENCY, MESSAGE_LATENCY, Measurements, Moment, Pace, Prefill, Timed,
    TimedSettings,
};
use kvferry_types::{PerTier, Time};
use kvferry_workload::scheduler::Served;

use super::Arguments;
use super::events::EventsFile;
use super::offline;
use super::report::ReplayReport;
use super::workload::Workload;

/// Largest size of a formula file, in bytes.
const FORMULA_BYTES_MAX: u64 = 1 << 16;

/// Durations in an offline replay in virtual time.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Virtual time (--mode offline)")]
pub(super) struct TimedArguments {
    /// Rate of each rank's link from device to host, in GB/s (10^9 bytes). [default: 25]
    #[arg(long, value_name = "RATE", value_parser = bytes_per_s)]
    pub(super) d2h_gb_per_s: Option<u64>,
    /// Rate of each rank's link from host to device, in GB/s. [default: 25]
    #[arg(long, value_name = "RATE", value_parser = bytes_per_s)]
    pub(super) h2d_gb_per_s: Option<u64>,
    /// Most GB/s that each worker stores, on average. [default: no limit]
    #[arg(long, value_name = "RATE", value_parser = bytes_per_s)]
    pub(super) store_gb_per_s: Option<u64>,
    /// Latency of a copy before its first byte, in microseconds. [default: 10]
    #[arg(long, value_name = "US")]
    pub(super) link_latency_us: Option<u64>,
    /// Rate at which the disk of all ranks is written, in GB/s. [default: 3]
    #[arg(long, value_name = "RATE", value_parser = bytes_per_s)]
    pub(super) g3_write_gb_per_s: Option<u64>,
    /// Rate at which the disk of all ranks is read, in GB/s. [default: 6]
    #[arg(long, value_name = "RATE", value_parser = bytes_per_s)]
    pub(super) g3_read_gb_per_s: Option<u64>,
    /// Latency of a message between engine, leader and worker, in microseconds. [default: 35]
    #[arg(long, value_name = "US")]
    pub(super) message_latency_us: Option<u64>,
    /// Prompt tokens that the engine computes in a second. Without it and --formula, computing takes no time.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "formula")]
    pub(super) prefill_tokens_per_s: Option<u64>,
    /// Offer pages of the disk only if they are loaded sooner than computed at that rate.
    #[arg(long, requires = "prefill_tokens_per_s")]
    pub(super) cost_gate: bool,
    /// A TOML file: prefill_ms.a, .b and .c for a x T^2 + b x T + c milliseconds for T new tokens, and decode_ms for
    /// each token of an answer, while which a prompt keeps its pages.
    #[arg(long, value_name = "FILE")]
    pub(super) formula: Option<PathBuf>,
    /// Compute all prompts that run at once instead of one after another.
    #[arg(long)]
    pub(super) parallel_prefill: bool,
}

/// Parses a rate in GB/s and returns bytes per second.
fn bytes_per_s(text: &str) -> Result<u64, CommandError> {
    match text.parse::<f64>() {
        Ok(rate) if (1e-9..=1e6).contains(&rate) => Ok((rate * 1e9).round() as u64),
        _ => Err(CommandError::Config(
            "a rate in GB/s, from 1e-9 to 1e6".to_owned(),
        )),
    }
}

impl TimedArguments {
    pub(super) fn settings(&self) -> Result<TimedSettings, CommandError> {
        let (prefill, decode_per_token) = match (&self.formula, self.prefill_tokens_per_s) {
            (Some(path), _) => read_formula(path)?,
            (None, Some(rate)) => (Prefill::Rate(rate), Duration::ZERO),
            (None, None) => (Prefill::Instant, Duration::ZERO),
        };
        let us = |us: Option<u64>, default| us.map_or(default, Duration::from_micros);
        Ok(TimedSettings {
            d2h_bytes_per_s: self.d2h_gb_per_s.unwrap_or(LINK_BYTES_PER_S),
            h2d_bytes_per_s: self.h2d_gb_per_s.unwrap_or(LINK_BYTES_PER_S),
            store_bytes_per_s: self.store_gb_per_s.and_then(NonZeroU64::new),
            link_latency: us(self.link_latency_us, LINK_LATENCY),
            disk_write_bytes_per_s: self.g3_write_gb_per_s.unwrap_or(DISK_WRITE_BYTES_PER_S),
            disk_read_bytes_per_s: self.g3_read_gb_per_s.unwrap_or(DISK_READ_BYTES_PER_S),
            disk_latency: DISK_LATENCY,
            message_latency: us(self.message_latency_us, MESSAGE_LATENCY),
            prefill,
            decode_per_token,
            serial_prefill: !self.parallel_prefill,
        })
    }
}

fn read_formula(path: &Path) -> Result<(Prefill, Duration), CommandError> {
    let refuse = |why: &dyn std::fmt::Display| {
        CommandError::Data(format!("--formula {}: {why}", path.display()))
    };
    let bytes = std::fs::metadata(path).map_err(|error| refuse(&error))?;
    if bytes.len() > FORMULA_BYTES_MAX {
        return Err(refuse(&format!("more than {FORMULA_BYTES_MAX} bytes")));
    }
    let text = std::fs::read_to_string(path).map_err(|error| refuse(&error))?;
    let formula: Formula = toml::from_str(&text).map_err(|error| refuse(&error))?;
    formula.parts().map_err(|name| {
        refuse(&format!(
            "{name} must be a number of milliseconds, 0 or more"
        ))
    })
}

pub(super) fn run(
    arguments: &Arguments,
    workload: &Workload,
) -> Result<ReplayReport, CommandError> {
    let begun = Instant::now();
    if workload.groups.len() > 1 {
        return Err(CommandError::Config(format!(
            "--model is {}, whose layers form several groups: a replay in virtual time takes a model with one group; \
             add --sequential to replay without times",
            arguments.model
        )));
    }
    let settings = arguments.timed.settings()?;
    let mut report = ReplayReport::new(arguments, workload);
    let progress = workload.progress(arguments);
    let pages = offline::tier_pages(workload);
    let mut world = world(arguments, workload, settings, &pages)?;
    let mut events = EventsFile::create(arguments, workload)?;
    let served = |served: &Served| {
        report.add(served);
        progress.inc(1);
    };
    let with = play(arguments, workload, &mut world, served, events.as_mut())?;
    if let Some(events) = &mut events {
        events.finish()?;
    }
    offline::fill(&mut report, workload, world.leader(), world.held_pages());
    let counts = world.leader().counts();
    let bytes = |pages: u64, times: u16| pages * workload.page_bytes() * u64::from(times);
    let sharding = workload.sharding;
    report.copied(
        bytes(counts.published_pages, sharding.shards()),
        bytes(counts.loaded_pages, sharding.ranks()),
    );
    drop(world);
    // Plays the requests again without G2, as the baseline.
    let mut world = self::world(arguments, workload, settings, &PerTier::host(0))?;
    progress.set_position(0);
    progress.set_message("without G2");
    let without = play(arguments, workload, &mut world, |_| progress.inc(1), None)?;
    progress.finish_and_clear();
    report.measured(&settings, with, without);
    report.seconds.wall = begun.elapsed().as_secs_f64();
    Ok(report)
}

pub(super) fn world(
    arguments: &Arguments,
    workload: &Workload,
    settings: TimedSettings,
    pages: &PerTier<u32>,
) -> Result<Timed, CommandError> {
    let leader = offline::leader(arguments, workload, pages);
    let scheduler = workload.scheduler(arguments);
    let geometry = workload.geometry();
    let ranks = arguments.ranks;
    Timed::new(leader, scheduler, ranks, &geometry, pages, settings)
        .map_err(|error| CommandError::Config(error.to_string()))
}

pub(super) fn play(
    arguments: &Arguments,
    workload: &Workload,
    world: &mut Timed,
    served: impl FnMut(&Served),
    mut events: Option<&mut EventsFile>,
) -> Result<Measurements, CommandError> {
    let requests = &workload.trace.requests;
    let first_us = requests.first().map_or(0, |request| request.timestamp_us);
    let speedup = arguments.speedup.unwrap_or(1.0);
    let arrivals = workload.prompts().map(|(request, prompt)| {
        let offset = (request.timestamp_us - first_us) as f64 * 1e3 / speedup;
        Arrival {
            at: Time(offset as u64),
            prompt,
            output_tokens: request.output_tokens,
        }
    });
    let pace = match arguments.concurrency {
        Some(limit) => Pace::Closed(limit as usize),
        None => Pace::Timestamps,
    };
    let mut failed = None;
    let watch = |moment: Moment<'_>| {
        let Some(events) = &mut events else {
            return ControlFlow::Continue(());
        };
        let noted = match moment {
            Moment::Arrives(prompt) => events.arrives(prompt),
            Moment::Changes(now, leader) => {
                let seconds = Time(0).until(now).as_secs_f64();
                events.read(seconds, now, leader)
            }
        };
        match noted {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                failed = Some(error);
                ControlFlow::Break(())
            }
        }
    };
    let played = world.run_watched(arrivals, pace, served, watch);
    match failed {
        Some(error) => Err(error),
        None => played.map_err(CommandError::failed),
    }
}
