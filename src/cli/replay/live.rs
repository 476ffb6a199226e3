//! The live replay: `kvferry up`, an engine process for each rank, and the requests of the trace.

use std::collections::{BTreeMap, VecDeque};
use std::iter::Peekable;
use std::sync::Arc;
use std::time::Duration;

use indicatif::ProgressBar;
use tokio::time::Instant;

use crate::cli::common::{block_on, random};
use crate::cli::shutdown::{EndedBy, Ending};
use crate::cli::socket_paths::SocketPaths;
use crate::cli::status;
use crate::error::CommandError;
use kvferry_client::{EngineClient, EngineSettings};
use kvferry_core::NOT_RECORDED;
use kvferry_engine::driver::EngineParts;
use kvferry_engine::fleet::Fleet;
use kvferry_engine::metrics::EngineMetrics;
use kvferry_memory::MemoryAvailable;
use kvferry_protocol::StatusAnswer;
use kvferry_transport::ZmqTransport;
use kvferry_types::{ByteSize, EngineId, Replica, SlotId, TierId};
use kvferry_workload::scheduler::{Prompt, Served};
use kvferry_workload::trace::TraceRequest;

use super::Arguments;
use super::events::{EventsFile, Following, SharedFile};
use super::processes::{END_LIMIT, START_LIMIT, Up, UpSettings, start_ranks};
use super::report::{ReplayReport, RestartKind, percentile};
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
    let events = EventsFile::create(arguments, workload)?.map(SharedFile::new);
    block_on(2, async {
        let mut ending = Ending::listen(EndedBy::Signals)?;
        let mut replay = Replay::new(arguments, workload, events.clone());
        loop {
            let mut up = Up::start(&UpSettings {
                ranks: arguments.ranks,
                shards: workload.sharding.shards(),
                replicas: arguments.replicas,
                ratio: workload.ratio,
                g2_bytes: match workload.arena_pages {
                    0 => 0,
                    _ => workload.g2_bytes.max(1),
                },
                arguments,
            })
            .await?;
            replay.before = up.before().cloned();
            let socket_paths = up.socket_paths();
            let played = tokio::select! {
                played = replay.play_until_stop(&socket_paths) => played,
                () = ending.requested() => Err(CommandError::Failed("interrupted".to_owned())),
                error = up.ended_early() => Err(error),
            };
            match played {
                Ok(Some(RestartKind::Kill)) => {
                    up.kill().await?;
                    replay.kill_engines().await;
                }
                Ok(Some(RestartKind::Restart)) => up.end().await?,
                Ok(None) => {
                    up.end().await?;
                    if let Some(events) = &events {
                        events.lock().finish()?;
                    }
                    return Ok(replay.into_report());
                }
                Err(error) => {
                    // The first error is the one that counts.
                    let _ended = up.end().await;
                    return Err(error);
                }
            }
        }
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

/// A live replay, over the restarts of all processes.
struct Replay<'a> {
    arguments: &'a Arguments,
    workload: &'a Workload,
    report: ReplayReport,
    progress: ProgressBar,
    /// Prompts that have not arrived, behind those that run again because their engine was killed.
    prompts: Peekable<Box<dyn Iterator<Item = (&'a TraceRequest, Prompt)> + 'a>>,
    again: VecDeque<Prompt>,
    /// Prompts that have arrived and were not served.
    running: BTreeMap<SlotId, Prompt>,
    arrived: usize,
    fleet: Option<Fleet>,
    events: Option<SharedFile>,
    /// What the leader of an `up` that already ran had counted before.
    before: Option<StatusAnswer>,
    /// Sums over all leaders and engines.
    counters: BTreeMap<String, u64>,
    evicted_below: u64,
    observed: EngineMetrics,
    wall: Duration,
    stopped_at: Option<Instant>,
}

impl<'a> Replay<'a> {
    fn new(arguments: &'a Arguments, workload: &'a Workload, events: Option<SharedFile>) -> Self {
        let prompts: Box<dyn Iterator<Item = _>> = Box::new(workload.prompts());
        Self {
            arguments,
            workload,
            report: ReplayReport::new(arguments, workload),
            progress: workload.progress(arguments),
            prompts: prompts.peekable(),
            again: VecDeque::new(),
            running: BTreeMap::new(),
            arrived: 0,
            fleet: None,
            events,
            before: None,
            counters: BTreeMap::new(),
            evicted_below: 0,
            observed: EngineMetrics::default(),
            wall: Duration::ZERO,
            stopped_at: None,
        }
    }

    /// Where all processes have to stop next.
    fn stop(&self) -> Option<(usize, RestartKind)> {
        let stop = self.arguments.restart();
        stop.filter(|_| self.report.restart.is_none())
    }

    /// Starts the engines and plays requests until all processes have to stop, or to the end. After an orderly stop the
    /// engines have ended; before a kill they still run.
    async fn play_until_stop(
        &mut self,
        socket_paths: &SocketPaths,
    ) -> Result<Option<RestartKind>, CommandError> {
        let (arguments, workload) = (self.arguments, self.workload);
        let replicas = (0..arguments.replicas).map(Replica);
        let engines =
            replicas.map(|replica| start_engine(arguments, workload, socket_paths, replica));
        let mut engines = engines.collect::<Result<Vec<_>, _>>()?;
        for rank in engines.iter_mut().flat_map(|engine| &mut engine.ranks) {
            let ready = rank.wait_until_ready(START_LIMIT).await;
            ready.map_err(CommandError::failed)?;
        }
        match arguments.uses_disk() {
            true => status::until_tiers_serve(socket_paths, START_LIMIT).await?,
            false => status::until_ready(socket_paths, START_LIMIT).await?,
        }
        self.note_start(socket_paths).await?;
        let following = match self.events.clone() {
            Some(events) => {
                let leader = status::admin(socket_paths, "replay events");
                Some(Following::start(events, leader).await?)
            }
            None => None,
        };
        let mut fleet = Fleet::new(engines, arguments.request_timeout());
        let begun = Instant::now();
        let stop = self.play(&mut fleet).await?;
        self.wall += begun.elapsed();
        if stop == Some(RestartKind::Kill) {
            if arguments.sequential {
                // What was stored is durable then, so that the hits after the restart can be predicted.
                self.await_durable(socket_paths).await?;
            }
            if let Some(following) = following {
                following.end().await?;
            }
            let status = status::request(socket_paths, false).await?;
            self.stopped(&status, RestartKind::Kill);
            self.fleet = Some(fleet);
            return Ok(stop);
        }
        self.report.left.device_pages += fleet.held_pages();
        let limit = Instant::now() + SETTLE_LIMIT;
        fleet.settle(limit).await.map_err(CommandError::failed)?;
        let status = settled_status(socket_paths, limit).await?;
        if let Some(following) = following {
            following.end().await?;
        }
        let observed = fleet.end(END_LIMIT).await.map_err(CommandError::failed)?;
        self.observed.add(observed);
        self.count_left(&status);
        match stop {
            Some(kind) => self.stopped(&status, kind),
            None => {
                self.count(&status);
                self.progress.finish_and_clear();
                self.report.seconds.wall = self.wall.as_secs_f64();
                fill(
                    &mut self.report,
                    &status,
                    &self.counters,
                    std::mem::take(&mut self.observed),
                );
                self.report.moves.g3_evicted_pages = self.evicted_below;
                if self.before.is_some() {
                    self.report.setup.ratio = status.ratio;
                    self.report.setup.g2_pages = self.report.arena.capacity_pages;
                }
            }
        }
        Ok(stop)
    }

    /// Notes what the leader found after a restart.
    async fn note_start(&mut self, socket_paths: &SocketPaths) -> Result<(), CommandError> {
        let Some(restart) = &mut self.report.restart else {
            return Ok(());
        };
        let status = status::request(socket_paths, false).await?;
        let listed = status.counters.get("recovered_pages").copied();
        restart.listed_pages = listed.unwrap_or(0);
        let stopped = self.stopped_at.map(|at| at.elapsed().as_secs_f64());
        restart.down_seconds = stopped;
        Ok(())
    }

    async fn await_durable(&self, socket_paths: &SocketPaths) -> Result<(), CommandError> {
        let leader = status::admin(socket_paths, "replay");
        let flushed = leader.flush(SETTLE_LIMIT).await;
        flushed.map_err(|failure| CommandError::Failed(format!("the disk: {failure}")))?;
        Ok(())
    }

    /// Notes the state at a stop of all processes.
    fn stopped(&mut self, status: &StatusAnswer, by: RestartKind) {
        self.count(status);
        self.stopped_at = Some(Instant::now());
        let used = status
            .tier(TierId::Disk.number())
            .map_or(0, |tier| tier.used_pages);
        let digest = digest_of(status);
        self.report.stopped(by, used, digest);
    }

    /// Adds what a leader has counted in this replay, at its end.
    fn count(&mut self, status: &StatusAnswer) {
        // A leader that has started in this replay has counted from 0.
        let before = self.before.as_ref();
        let before = before.filter(|before| before.epoch == status.epoch);
        for (name, value) in &status.counters {
            let sum = self.counters.entry(name.clone()).or_default();
            let before = before.and_then(|before| before.counters.get(name));
            let before = before.copied().unwrap_or(0);
            *sum = match name.starts_with("largest_") {
                true if *value == before => *sum,
                true => (*sum).max(*value),
                false => *sum + value.saturating_sub(before),
            };
        }
        let evicted = |status: &StatusAnswer| {
            let disk = status.tier(TierId::Disk.number());
            disk.map_or(0, |tier| tier.evicted_pages)
        };
        self.evicted_below += evicted(status).saturating_sub(before.map_or(0, evicted));
    }

    /// Adds what a leader that ends still holds, which is nothing unless something leaked.
    fn count_left(&mut self, status: &StatusAnswer) {
        let left = &mut self.report.left;
        left.slots += status.slots;
        left.pins += status.pins;
        left.copies_under_way += status.copies_under_way;
        left.unsettled_pages += unsettled_pages(status);
        if left.contradiction.is_empty() {
            left.contradiction = status.contradiction.clone().unwrap_or_default();
        }
    }

    /// Kills the engines. Their prompts run again.
    async fn kill_engines(&mut self) {
        if let Some(fleet) = self.fleet.take() {
            self.observed.add(fleet.kill().await);
        }
        self.again
            .extend(std::mem::take(&mut self.running).into_values());
    }

    fn into_report(mut self) -> ReplayReport {
        self.report.restarted();
        self.report
    }

    /// Plays the requests: one after another, a fixed number at a time, or by the timestamps of the trace. Returns how all
    /// processes have to stop before the next one; `None` after the last.
    async fn play(&mut self, fleet: &mut Fleet) -> Result<Option<RestartKind>, CommandError> {
        let arguments = self.arguments;
        let stall_limit = STALL_MIN.max(STALL_FACTOR * arguments.request_timeout());
        let begun = Instant::now();
        let at_once = match (arguments.sequential, arguments.concurrency) {
            (true, _) => Some(1),
            (false, Some(concurrency)) => Some(concurrency as usize),
            (false, None) => None,
        };
        let stop = self.stop();
        let next = self.prompts.peek();
        let first_us = next.map_or(0, |(request, _)| request.timestamp_us);
        let mut served: Vec<Served> = Vec::new();
        let mut last_change = Instant::now();
        loop {
            let due = match (self.again.is_empty(), self.prompts.peek()) {
                (false, _) => Some(begun),
                (true, Some((request, _))) => {
                    let speedup = arguments.speedup.unwrap_or(1.0);
                    let offset = (request.timestamp_us - first_us) as f64 / speedup;
                    Some(begun + Duration::from_micros(offset as u64))
                }
                (true, None) => None,
            };
            // The engines are idle at an orderly stop.
            let last =
                stop.filter(|(at, kind)| *kind == RestartKind::Restart && self.arrived >= *at);
            let due = due.filter(|_| last.is_none());
            let now = Instant::now();
            let arrives = match (due, at_once) {
                (None, _) if fleet.open_prompts() == 0 => break,
                (None, _) => false,
                (Some(_), Some(limit)) => fleet.open_prompts() < limit,
                (Some(due), None) => due <= now,
            };
            if let Some(prompt) = self.next_prompt(arrives) {
                if let Some(events) = &self.events {
                    events.lock().arrives(&prompt)?;
                }
                if arguments.sequential {
                    let settled = fleet.settle(Instant::now() + stall_limit).await;
                    settled.map_err(CommandError::failed)?;
                }
                let arrived = fleet.arrive(prompt, &mut served).await;
                arrived.map_err(CommandError::failed)?;
            } else {
                let stalled = last_change + stall_limit;
                let wake = match at_once {
                    Some(_) => stalled,
                    None => due.map_or(stalled, |due| due.min(stalled)),
                };
                let progressed = fleet.progress(wake, &mut served).await;
                progressed.map_err(CommandError::failed)?;
            }
            for done in served.drain(..) {
                self.running.remove(&done.slot);
                self.report.add(&done);
                self.progress.inc(1);
                last_change = Instant::now();
            }
            if let Some((at, RestartKind::Kill)) = stop
                && self.report.requests >= at as u64
            {
                return Ok(Some(RestartKind::Kill));
            }
            if fleet.open_prompts() == 0 {
                last_change = Instant::now();
            }
            if last_change.elapsed() >= stall_limit {
                let open = fleet.open_prompts();
                let text =
                    format!("no request ended for {stall_limit:?} while {open} were running");
                return Err(CommandError::Failed(text));
            }
            let mismatched = fleet.mismatched_bytes();
            if mismatched > 0 {
                self.progress
                    .set_message(format!("{mismatched} wrong bytes"));
            }
        }
        Ok(stop.map(|(_, kind)| kind))
    }

    /// The next prompt, if one `arrives` now.
    fn next_prompt(&mut self, arrives: bool) -> Option<Prompt> {
        if !arrives {
            return None;
        }
        let prompt = match self.again.pop_front() {
            Some(prompt) => prompt,
            None => {
                self.arrived += 1;
                self.prompts.next()?.1
            }
        };
        self.running.insert(prompt.slot, prompt.clone());
        Some(prompt)
    }
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
    let awaits = arguments.sequential && arguments.uses_disk();
    Ok(EngineParts {
        scheduler: workload.scheduler(arguments),
        client,
        ranks,
        await_moves: awaits.then(|| status::admin(socket_paths, "replay")),
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
            let moves = status.moves.as_deref().copied().unwrap_or_default();
            let held = status.slots + status.pins + status.copies_under_way;
            held + moves.under_way + moves.waiting + unsettled_pages(status) == 0
        });
        if settled || Instant::now() >= limit {
            return status;
        }
        tokio::time::sleep(SETTLE_EVERY).await;
    }
}

fn digest_of(status: &StatusAnswer) -> String {
    let digest = status.decisions_digest.clone();
    digest.unwrap_or_else(|| NOT_RECORDED.to_owned())
}

fn unsettled_pages(status: &StatusAnswer) -> u64 {
    let states = ["reserved", "filling", "quarantined"];
    let tiers = status.tiers.iter();
    let pages = tiers.flat_map(|tier| {
        states
            .iter()
            .filter_map(|state| tier.page_states.get(*state))
    });
    pages.sum()
}

/// Fills the report from the last status, the counters of all leaders and the measurements of all engines.
fn fill(
    report: &mut ReplayReport,
    status: &StatusAnswer,
    counters: &BTreeMap<String, u64>,
    mut observed: EngineMetrics,
) {
    let counter = |name: &str| counters.get(name).copied().unwrap_or(0);
    report.count(counter);
    let host = status.tier(TierId::Host.number());
    report.arena.capacity_pages = Some(host.map_or(0, |host| host.pages));
    report.arena.used_pages = host.map_or(0, |host| host.used_pages);
    if let Some(disk) = status.tier(TierId::Disk.number()) {
        report.setup.g3_pages = Some(disk.pages);
        report.moves.g3_pages = Some(disk.pages);
        report.moves.g3_used_pages = disk.used_pages;
    }
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
    report.left.complaints = observed.complaints;
    report.left.complaints.append(&mut observed.refusals);
    report.decisions_digest = digest_of(status);
}
