//! The live replay: `kvferry up`, an engine process for each rank, and the requests of the trace.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::cli::leader::random;
use crate::cli::shutdown::Ending;
use crate::cli::socket_paths::SocketPaths;
use crate::cli::{block_on, status};
use crate::error::CommandError;
use kvferry_client::{EngineClient, EngineSettings};
use kvferry_engine::driver::EngineParts;
use kvferry_engine::fleet::Fleet;
use kvferry_engine::metrics::EngineMetrics;
use kvferry_memory::MemoryAvailable;
use kvferry_protocol::StatusAnswer;
use kvferry_transport::ZmqTransport;
use kvferry_types::{ByteSize, EngineId, Replica};
use kvferry_workload::scheduler::Served;

use super::Arguments;
use super::processes::{END_LIMIT, START_LIMIT, Up, start_ranks};
use super::report::{ReplayReport, percentile};
use super::workload::Workload;

/// Least time without a finished request after which a replay counts as hung and fails.
const STALL_MIN: Duration = Duration::from_secs(60);
/// That limit in multiples of the request timeout: a prompt sends up to four requests, and its pages may have to be
/// taken back from a worker that restarts.
const STALL_FACTOR: u32 = 6;
/// Time in which the work that was in flight after the last request must end.
const SETTLE_LIMIT: Duration = Duration::from_secs(30);
/// Interval at which the leader's status is polled for that.
const SETTLE_EVERY: Duration = Duration::from_millis(100);

pub(super) fn run(
    arguments: &Arguments,
    workload: &Workload,
) -> Result<ReplayReport, CommandError> {
    check_memory(arguments, workload)?;
    block_on(2, async {
        let mut ending = Ending::listen(false)?;
        let mut up = Up::start(arguments, workload)?;
        let socket_paths = up.socket_paths();
        let replayed = tokio::select! {
            replayed = replay(arguments, workload, &socket_paths) => replayed,
            () = ending.requested() => Err(CommandError::Failed("interrupted".to_owned())),
            error = up.ended_early() => Err(error),
        };
        let ended = up.end().await;
        let report = replayed?;
        ended?;
        Ok(report)
    })
}

/// Refuses a replay that needs more memory than this machine has, before anything starts.
fn check_memory(arguments: &Arguments, workload: &Workload) -> Result<(), CommandError> {
    let layout = arguments.layout.unwrap_or_default();
    let page_bytes = workload.device_page_bytes(layout) * u64::from(arguments.ranks);
    let pages = u64::from(workload.device_pages) * u64::from(arguments.replicas);
    let g1 = ByteSize(page_bytes * pages);
    let g2 = ByteSize(workload.g2_bytes);
    let available = MemoryAvailable::now();
    if g1.0 + g2.0 <= available.bytes {
        return Ok(());
    }
    let longest = workload.device_pages.max(arguments.g1_pages);
    Err(CommandError::Config(format!(
        "this replay takes {g1} for the engines ({longest} pages each: --g1-pages or the longest prompt) and {g2} \
         for G2, but only {} of memory are available: use a smaller --model, --g1-pages, --g2 or fewer \
         --requests",
        ByteSize(available.bytes)
    )))
}

async fn replay(
    arguments: &Arguments,
    workload: &Workload,
    socket_paths: &SocketPaths,
) -> Result<ReplayReport, CommandError> {
    let replicas = (0..arguments.replicas).map(Replica);
    let engines = replicas.map(|replica| start_engine(arguments, workload, socket_paths, replica));
    let mut engines = engines.collect::<Result<Vec<_>, _>>()?;
    for rank in engines.iter_mut().flat_map(|engine| &mut engine.ranks) {
        let ready = rank.wait_until_ready(START_LIMIT).await;
        ready.map_err(CommandError::failed)?;
    }
    status::until_ready(socket_paths, START_LIMIT).await?;
    let mut fleet = Fleet::new(engines, arguments.request_timeout());

    let begun = Instant::now();
    let mut report = ReplayReport::new(arguments, workload);
    play(arguments, workload, &mut fleet, &mut report).await?;
    report.seconds.wall = begun.elapsed().as_secs_f64();
    report.left.device_pages = fleet.held_pages();
    let limit = Instant::now() + SETTLE_LIMIT;
    fleet.settle(limit).await.map_err(CommandError::failed)?;
    let status = settled_status(socket_paths, limit).await?;
    let observed = fleet.end(END_LIMIT).await.map_err(CommandError::failed)?;
    fill(&mut report, &status, observed);
    Ok(report)
}

/// Starts the ranks of one engine, and the connection of its scheduler.
fn start_engine(
    arguments: &Arguments,
    workload: &Workload,
    socket_paths: &SocketPaths,
    replica: Replica,
) -> Result<EngineParts, CommandError> {
    let mut engine = [0; 16];
    random(&mut engine)?;
    let engine = EngineId(engine);
    let ranks = start_ranks(arguments, workload, socket_paths, engine, replica)?;
    let settings = EngineSettings {
        replica,
        ..EngineSettings::new(
            socket_paths.leader_address(),
            engine,
            format!("reference engine, scheduler of {replica}"),
        )
    };
    let client = EngineClient::start(Arc::new(ZmqTransport), settings);
    Ok(EngineParts {
        scheduler: workload.scheduler(arguments),
        client,
        ranks,
    })
}

/// Returns the leader's final status. Polls, at most until `limit`, until no slot, pin, copy or unsettled page is left.
async fn settled_status(
    socket_paths: &SocketPaths,
    limit: Instant,
) -> Result<StatusAnswer, CommandError> {
    loop {
        let status = status::request(socket_paths, true).await;
        let settled = status.as_ref().is_ok_and(|status| {
            let held = status.slots + status.pins + status.copies_under_way;
            held + unsettled_pages(status) == 0
        });
        if settled || Instant::now() >= limit {
            return status;
        }
        tokio::time::sleep(SETTLE_EVERY).await;
    }
}

fn unsettled_pages(status: &StatusAnswer) -> u64 {
    let states = ["reserved", "filling", "quarantined"];
    let pages = states.iter().filter_map(|state| status.pages.get(*state));
    pages.sum()
}

/// Plays the requests: one after another, a fixed number at a time, or by the timestamps of the trace.
async fn play(
    arguments: &Arguments,
    workload: &Workload,
    fleet: &mut Fleet,
    report: &mut ReplayReport,
) -> Result<(), CommandError> {
    let progress = workload.progress(arguments);
    let stall_limit = STALL_MIN.max(STALL_FACTOR * arguments.request_timeout());
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
            (None, _) if fleet.open_prompts() == 0 => break,
            (None, _) => false,
            (Some(_), Some(limit)) => fleet.open_prompts() < limit,
            (Some(due), None) => due <= now,
        };
        if let Some((_, prompt)) = prompts.next_if(|_| arrives) {
            fleet
                .arrive(prompt, &mut served)
                .await
                .map_err(CommandError::failed)?;
        } else {
            let stalled = last_change + stall_limit;
            let wake = match at_once {
                Some(_) => stalled,
                None => due.map_or(stalled, |due| due.min(stalled)),
            };
            fleet
                .progress(wake, &mut served)
                .await
                .map_err(CommandError::failed)?;
        }
        for done in served.drain(..) {
            report.add(&done);
            progress.inc(1);
            last_change = Instant::now();
        }
        if fleet.open_prompts() == 0 {
            last_change = Instant::now();
        }
        if last_change.elapsed() >= stall_limit {
            let open = fleet.open_prompts();
            let text = format!("no request ended for {stall_limit:?} while {open} were running");
            return Err(CommandError::Failed(text));
        }
        let mismatched = fleet.mismatched_bytes();
        if mismatched > 0 {
            progress.set_message(format!("{mismatched} wrong bytes"));
        }
    }
    progress.finish_and_clear();
    Ok(())
}

fn fill(report: &mut ReplayReport, status: &StatusAnswer, mut observed: EngineMetrics) {
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
    report.waits.abandoned = Some(observed.abandoned);
    report.waits.answer_max_us = Some(observed.answer_max_us);
    report.waits.abandon_max_us = Some(observed.abandon_max_us);
    report.links.d2h.bytes = report.bytes.gathered;
    report.links.h2d.bytes = report.bytes.scattered;
    report.left.slots = status.slots;
    report.left.pins = status.pins;
    report.left.copies_under_way = status.copies_under_way;
    report.left.unsettled_pages = unsettled_pages(status);
    report.left.contradiction.clone_from(&status.contradiction);
    report.left.complaints = observed.complaints;
    report.left.complaints.append(&mut observed.refusals);
    report.decisions_digest.clone_from(&status.decisions_digest);
}
