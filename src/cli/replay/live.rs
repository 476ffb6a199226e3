//! The live replay: `kvferry up`, an engine process for each rank, and the requests of the trace.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::time::Instant;

use crate::cli::dirs::Dirs;
use crate::cli::leader::random;
use crate::cli::process::told_to_end;
use crate::cli::{block_on, status};
use crate::engine::driver::{Driver, Observed, RankPipe, wait_until_ready};
use crate::engine::layout::EngineLayout;
use crate::engine::scheduler::{Scheduler, Served};
use crate::error::CommandError;
use crate::memory::MemoryAvailable;
use crate::protocol::{Hello, Role, StatusAnswer, VERSION, VERSION_MIN};
use crate::transport::{Client, ClientSettings, Limits, ZmqTransport};
use crate::types::{ByteSize, EngineId, Rank, Replica, WorkerId};

use super::Arguments;
use super::report::{Report, percentile};
use super::workload::Workload;

/// How long leader, workers and ranks may take to be ready, host memory included.
const START_LIMIT: Duration = Duration::from_secs(120);
/// How long they may take to end.
const END_LIMIT: Duration = Duration::from_secs(30);
/// A replay in which nothing happens for so long has hung, and fails.
const STALL_LIMIT: Duration = Duration::from_secs(60);

pub(super) fn run(arguments: &Arguments, workload: &Workload) -> Result<Report, CommandError> {
    check_memory(arguments, workload)?;
    block_on(2, async {
        let owner_only = Permissions::from_mode(0o700);
        let directory = tempfile::Builder::new()
            .prefix("kvferry-replay-")
            .permissions(owner_only)
            .tempdir();
        let directory = directory.map_err(CommandError::failed)?;
        let dirs = Dirs::new(directory.path());
        let mut up = start_up(arguments, workload, directory.path())?;
        // Held open until the end: `up` ends when its standard input does, and waiting for it would close that.
        let _input = up.stdin.take();
        let replayed = tokio::select! {
            replayed = replay(arguments, workload, &dirs) => replayed,
            told = told_to_end(false) => Err(match told {
                Ok(()) => CommandError::Failed("interrupted".to_owned()),
                Err(error) => error,
            }),
            status = up.wait() => Err(CommandError::Failed(match status {
                Ok(status) => format!("kvferry up ended early with {status}"),
                Err(error) => format!("kvferry up: {error}"),
            })),
        };
        let ended = end_up(&mut up).await;
        let report = replayed?;
        ended?;
        Ok(report)
    })
}

/// Refuses what this machine has no memory for, before anything starts.
fn check_memory(arguments: &Arguments, workload: &Workload) -> Result<(), CommandError> {
    let page_bytes = workload.geometry.page_bytes() * u64::from(arguments.ranks);
    let g1 = ByteSize(page_bytes * u64::from(workload.device_pages));
    let g2 = ByteSize(workload.g2_bytes);
    let available = MemoryAvailable::now();
    if g1.0 + g2.0 <= available.bytes {
        return Ok(());
    }
    let longest = workload.device_pages.max(arguments.g1_pages);
    Err(CommandError::Config(format!(
        "this replay takes {g1} for the engine ({longest} pages: --g1-pages or the longest prompt) and {g2} \
         for G2, but only {} of memory are available: use a smaller --model, --g1-pages, --g2 or fewer \
         --requests",
        ByteSize(available.bytes)
    )))
}

async fn replay(
    arguments: &Arguments,
    workload: &Workload,
    dirs: &Dirs,
) -> Result<Report, CommandError> {
    let mut engine = [0; 16];
    random(&mut engine)?;
    let engine = EngineId(engine);
    let ranks = start_ranks(arguments, workload, dirs, engine).await?;
    let hello = Hello {
        version_min: VERSION_MIN,
        version_max: VERSION,
        role: Role::Engine,
        engine: engine.0,
        rank: 0,
        replica: 0,
        name: "reference engine, scheduler".to_owned(),
    };
    let settings = ClientSettings {
        address: dirs.leader_address(),
        hello,
        limits: Limits::default(),
    };
    let (client, mut incoming) = Client::start(Arc::new(ZmqTransport), settings);
    tokio::spawn(async move { while incoming.recv().await.is_some() {} });
    let scheduler = Scheduler::new(workload.device_pages, arguments.g1_pages);
    let mut driver = Driver::new(scheduler, client, ranks);

    let begun = Instant::now();
    let mut report = Report::new(arguments, workload);
    play(arguments, workload, &mut driver, &mut report).await?;
    report.seconds.wall = begun.elapsed().as_secs_f64();
    report.left.device_pages = u64::from(driver.held_pages());
    let status = status::ask(Arc::new(ZmqTransport), dirs, true).await?;
    let observed = driver.end(END_LIMIT).await.map_err(CommandError::Failed)?;
    fill(&mut report, &status, observed);
    Ok(report)
}

/// Lets the requests arrive: one after another, a number at a time, or when the trace says.
async fn play(
    arguments: &Arguments,
    workload: &Workload,
    driver: &mut Driver,
    report: &mut Report,
) -> Result<(), CommandError> {
    let progress = workload.progress(arguments);
    let begun = Instant::now();
    let at_once = match (arguments.sequential, arguments.concurrency) {
        (true, _) => Some(1),
        (false, Some(concurrency)) => Some(concurrency as usize),
        (false, None) => None,
    };
    let mut prompts = workload.prompts().peekable();
    let first_us = prompts
        .peek()
        .map_or(0, |(request, _)| request.timestamp_us);
    let mut served: Vec<Served> = Vec::new();
    let mut last_change = Instant::now();
    loop {
        let due = prompts.peek().map(|(request, _)| {
            let speedup = arguments.speedup.unwrap_or(1.0);
            let offset = (request.timestamp_us - first_us) as f64 / speedup;
            begun + Duration::from_micros(offset as u64)
        });
        let now = Instant::now();
        let arrives = match (due, at_once) {
            (None, _) if driver.open_prompts() == 0 => break,
            (None, _) => false,
            (Some(_), Some(limit)) => driver.open_prompts() < limit,
            (Some(due), None) => due <= now,
        };
        if let Some((_, prompt)) = prompts.next_if(|_| arrives) {
            driver
                .arrive(prompt, &mut served)
                .await
                .map_err(CommandError::Failed)?;
        } else {
            let stalled = last_change + STALL_LIMIT;
            let wake = match at_once {
                Some(_) => stalled,
                None => due.map_or(stalled, |due| due.min(stalled)),
            };
            driver
                .progress(wake, &mut served)
                .await
                .map_err(CommandError::Failed)?;
        }
        for done in served.drain(..) {
            report.add(&done);
            progress.inc(1);
            last_change = Instant::now();
        }
        if driver.open_prompts() == 0 {
            last_change = Instant::now();
        }
        if last_change.elapsed() >= STALL_LIMIT {
            let open = driver.open_prompts();
            let text = format!("no request ended for {STALL_LIMIT:?} while {open} were running");
            return Err(CommandError::Failed(text));
        }
        let observed = driver.observed();
        if observed.mismatched_bytes > 0 {
            progress.set_message(format!("{} wrong bytes", observed.mismatched_bytes));
        }
    }
    progress.finish_and_clear();
    Ok(())
}

fn fill(report: &mut Report, status: &StatusAnswer, mut observed: Observed) {
    let counter = |name: &str| status.counters.get(name).copied().unwrap_or(0);
    let pages = |state: &str| status.pages.get(state).copied().unwrap_or(0);
    report.count(counter);
    report.arena.capacity_pages = Some(status.pages.values().sum());
    report.arena.used_pages = pages("ready");
    report.bytes.gathered = counter("gathered_bytes");
    report.bytes.scattered = counter("scattered_bytes");
    report.bytes.verified = observed.verified_bytes;
    report.bytes.mismatched = observed.mismatched_bytes;
    let rate = |bytes: u64, us: u64| (us > 0).then(|| bytes as f64 / us as f64 / 1000.0);
    report.rates.gather_gb_per_s = rate(report.bytes.gathered, counter("gather_us"));
    report.rates.scatter_gb_per_s = rate(report.bytes.scattered, counter("scatter_us"));
    let latencies = &mut observed.latencies;
    report.latency_us.lookup_p50 = percentile(&mut latencies.lookup_us, 500);
    report.latency_us.lookup_p99 = percentile(&mut latencies.lookup_us, 990);
    report.latency_us.load_p50 = percentile(&mut latencies.load_us, 500);
    report.latency_us.load_p95 = percentile(&mut latencies.load_us, 950);
    report.latency_us.load_p99 = percentile(&mut latencies.load_us, 990);
    report.first_token_us.p50 = percentile(&mut latencies.first_token_us, 500);
    report.first_token_us.p95 = percentile(&mut latencies.first_token_us, 950);
    report.first_token_us.p99 = percentile(&mut latencies.first_token_us, 990);
    let waited: u64 = latencies.page_wait_us.iter().sum();
    report.waits.page_wait_seconds = Some(waited as f64 / 1e6);
    report.waits.page_wait_p95_us = percentile(&mut latencies.page_wait_us, 950);
    report.links.d2h.bytes = report.bytes.gathered;
    report.links.h2d.bytes = report.bytes.scattered;
    report.left.slots = status.slots;
    report.left.pins = status.pins;
    report.left.copies_under_way = status.copies_under_way;
    report.left.unsettled_pages = pages("reserved") + pages("filling") + pages("quarantined");
    report.left.contradiction.clone_from(&status.contradiction);
    report.left.complaints = observed.complaints;
    report.left.complaints.append(&mut observed.refusals);
    report.decisions_digest.clone_from(&status.decisions_digest);
}

fn start_up(
    arguments: &Arguments,
    workload: &Workload,
    directory: &Path,
) -> Result<Child, CommandError> {
    let program = std::env::current_exe().map_err(CommandError::failed)?;
    let mut command = Command::new(program);
    command
        .args(["up", "--supervised"])
        .args(["--ranks", &arguments.ranks.to_string()])
        .args(["--ratio", &workload.ratio.to_string()])
        .args(["--g2", &workload.g2_bytes.max(1).to_string()])
        .args(["--log", &arguments.log])
        .arg("--socket-dir")
        .arg(directory)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .kill_on_drop(true);
    if workload.arena_pages == 0 {
        command.arg("--no-tiers");
    }
    command.spawn().map_err(CommandError::failed)
}

/// Asks `up` to end; it must do so in time and with success.
async fn end_up(up: &mut Child) -> Result<(), CommandError> {
    let pid = up
        .id()
        .and_then(|id| i32::try_from(id).ok())
        .and_then(Pid::from_raw);
    let Some(pid) = pid else { return Ok(()) };
    kill_process(pid, Signal::TERM).map_err(CommandError::failed)?;
    match tokio::time::timeout(END_LIMIT, up.wait()).await {
        Ok(Ok(status)) if status.success() => Ok(()),
        Ok(Ok(status)) => Err(CommandError::Failed(format!(
            "kvferry up ended with {status}"
        ))),
        Ok(Err(error)) => Err(CommandError::failed(error)),
        Err(_) => Err(CommandError::Failed(format!(
            "kvferry up did not end in {END_LIMIT:?}"
        ))),
    }
}

async fn start_ranks(
    arguments: &Arguments,
    workload: &Workload,
    dirs: &Dirs,
    engine: EngineId,
) -> Result<Vec<RankPipe>, CommandError> {
    let program = std::env::current_exe().map_err(CommandError::failed)?;
    let engine = format!("{:032x}", u128::from_be_bytes(engine.0));
    let mut pipes = Vec::new();
    for rank in 0..arguments.ranks {
        let worker = WorkerId {
            replica: Replica(0),
            rank: Rank(rank),
        };
        let mut command = Command::new(&program);
        command
            .arg("engine-rank")
            .arg("--worker-dir")
            .arg(dirs.worker(worker))
            .args(["--engine", &engine])
            .args(["--rank", &rank.to_string()])
            .args(["--ranks", &arguments.ranks.to_string()])
            .args([
                "--engine-page-tokens",
                &arguments.engine_page_tokens.to_string(),
            ])
            .args(["--device-pages", &workload.device_pages.to_string()])
            .args(["--model", &arguments.model.to_string()])
            .args(["--layout", &layout_name(arguments)])
            .args(["--start-limit-s", &START_LIMIT.as_secs().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        let mut child = command.spawn().map_err(CommandError::failed)?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(orders), Some(reports)) => pipes.push(RankPipe {
                child,
                orders,
                reports,
            }),
            _ => {
                return Err(CommandError::Failed(
                    "an engine rank has no pipes".to_owned(),
                ));
            }
        }
    }
    for pipe in &mut pipes {
        wait_until_ready(pipe, START_LIMIT)
            .await
            .map_err(CommandError::Failed)?;
    }
    Ok(pipes)
}

fn layout_name(arguments: &Arguments) -> String {
    use clap::ValueEnum;
    let layout = arguments.layout.unwrap_or(EngineLayout::LayerSeparate);
    let value = layout.to_possible_value();
    value.map_or_else(String::new, |value| value.get_name().to_owned())
}
