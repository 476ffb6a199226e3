//! The sequential replay without processes, and the parts that all replays without processes share.

use std::num::NonZeroU64;
use std::time::Instant;

use crate::error::CommandError;
use kvferry_core::{
    ARENA_PAGES_MAX, AnchorKey, Leader, LeaderSettings, MoveEdge, NOT_RECORDED, Pool,
};
use kvferry_sim::sequential::Sequential;
use kvferry_types::{Epoch, PerTier, TierId, Time};

use super::Arguments;
use super::events::EventsFile;
use super::report::{ReplayReport, RestartKind};
use super::workload::Workload;

pub(super) fn run(
    arguments: &Arguments,
    workload: &Workload,
) -> Result<ReplayReport, CommandError> {
    let begun = Instant::now();
    let mut events = EventsFile::create(arguments, workload)?;
    let (_, mut report) = play(arguments, workload, events.as_mut())?;
    if let Some(events) = &mut events {
        events.finish()?;
    }
    report.seconds.wall = begun.elapsed().as_secs_f64();
    Ok(report)
}

/// Plays all requests. Returns the world at its end.
pub(super) fn play(
    arguments: &Arguments,
    workload: &Workload,
    mut events: Option<&mut EventsFile>,
) -> Result<(Sequential, ReplayReport), CommandError> {
    let mut report = ReplayReport::new(arguments, workload);
    let scheduler = workload.scheduler(arguments);
    let pages = tier_pages(workload);
    let leader = leader(arguments, workload, &pages);
    let geometry = workload.geometry();
    let world = Sequential::new(leader, scheduler, arguments.ranks, &geometry, &pages);
    let mut world = world.map_err(|error| CommandError::Config(error.to_string()))?;
    let progress = workload.progress(arguments);
    let stop = arguments.restart().map(|(at, _)| at);
    let mut before = None;
    let requests = &workload.trace.requests;
    let first_us = requests.first().map_or(0, |request| request.timestamp_us);
    // Nothing takes time: the events of a request have its timestamp.
    let mut seconds = 0.0;
    if let Some(events) = &mut events {
        events.read(seconds, Time(0), world.leader_mut())?;
    }
    for (number, (request, prompt)) in workload.prompts().enumerate() {
        seconds = request.timestamp_us.saturating_sub(first_us) as f64 / 1e6;
        if stop == Some(number) {
            before = Some(restart(arguments, workload, &mut world, &mut report)?);
            if let Some(events) = &mut events {
                events.read(seconds, Time(0), world.leader_mut())?;
            }
        }
        if let Some(events) = &mut events {
            events.arrives(&prompt)?;
        }
        let served = world.serve(prompt).map_err(CommandError::failed)?;
        if let Some(events) = &mut events {
            events.read(seconds, Time(0), world.leader_mut())?;
        }
        report.add(&served);
        progress.inc(1);
    }
    progress.finish_and_clear();
    let ended = before.iter().chain([world.leader()]);
    fill_all(&mut report, workload, ended, world.held_pages());
    report.restarted();
    report.copied(world.stored_bytes(), world.loaded_bytes());
    Ok((world, report))
}

/// Ends leader and engine, and starts new ones with what the disk lists. Returns the leader that has ended.
fn restart(
    arguments: &Arguments,
    workload: &Workload,
    world: &mut Sequential,
    report: &mut ReplayReport,
) -> Result<Leader, CommandError> {
    let pages = tier_pages(workload);
    let mut settings = settings(arguments, workload, &pages);
    settings.epoch = Epoch(world.leader().epoch().0 + 1);
    let scheduler = workload.scheduler(arguments);
    let ended = world.restart(Leader::new(settings), scheduler);
    let ended = ended.map_err(|error| CommandError::Config(error.to_string()))?;
    let used = ended.pool_of(TierId::Disk).map_or(0, used_pages);
    let digest = ended.decisions_digest();
    report.stopped(
        RestartKind::Restart,
        used,
        digest.unwrap_or_else(|| NOT_RECORDED.to_owned()),
    );
    if let Some(restart) = &mut report.restart {
        restart.listed_pages = world.leader().counts().recovered_pages;
    }
    Ok(ended)
}

fn used_pages(pool: &Pool) -> u64 {
    u64::from(pool.page_states().ready)
}

/// Pages of each tier below the device, on each rank.
pub(super) fn tier_pages(workload: &Workload) -> PerTier<u32> {
    let mut pages = PerTier::host(workload.arena_pages);
    if workload.disk_pages > 0 {
        pages.insert(TierId::Disk, workload.disk_pages);
    }
    pages
}

/// A leader for a world without processes, with these pages in each tier. Without any in host memory it serves a
/// baseline.
pub(super) fn leader(arguments: &Arguments, workload: &Workload, pages: &PerTier<u32>) -> Leader {
    Leader::new(settings(arguments, workload, pages))
}

fn settings(arguments: &Arguments, workload: &Workload, pages: &PerTier<u32>) -> LeaderSettings {
    // The key only determines the place of an anchor in a table.
    let key = AnchorKey::new([0; 32]);
    let mut settings = LeaderSettings::new(Epoch(1), arguments.ranks, workload.ratio, key);
    settings.accepts_empty_depots = pages.get(TierId::Host) == Some(&0);
    let rate = arguments.timed.prefill_tokens_per_s;
    settings.prefill_tokens_per_s = rate
        .filter(|_| arguments.timed.cost_gate)
        .and_then(NonZeroU64::new);
    settings.tiers = pages.tiers().collect();
    settings.moves = MoveEdge::between(&settings.tiers);
    settings.tier_policies = PerTier::host(arguments.policy());
    settings.sharding = workload.sharding;
    settings.record_decisions = true;
    settings
}

/// Copies the leader's final state, and the number of pages that the engine still holds.
pub(super) fn fill(
    report: &mut ReplayReport,
    workload: &Workload,
    leader: &Leader,
    held_pages: u32,
) {
    fill_all(report, workload, std::iter::once(leader), held_pages);
}

/// Copies the final state of the last leader, with the counters of all.
fn fill_all<'a>(
    report: &mut ReplayReport,
    workload: &Workload,
    leaders: impl Iterator<Item = &'a Leader> + Clone,
    held_pages: u32,
) {
    report.count(|name| {
        let counters = leaders.clone().flat_map(Leader::counters);
        let values = counters.filter(|(known, _)| *known == name);
        let values = values.map(|(_, value)| value);
        match name.starts_with("largest_") {
            true => values.max().unwrap_or(0),
            false => values.sum(),
        }
    });
    let evicted = leaders
        .clone()
        .map(|leader| leader.pool_counts(TierId::Disk).evicted_pages);
    report.moves.g3_evicted_pages = evicted.sum();
    let Some(leader) = leaders.last() else {
        return;
    };
    let limited = |pages: u32| (pages < ARENA_PAGES_MAX).then_some(u64::from(pages));
    if let Some(pool) = leader.pool() {
        report.arena.capacity_pages = limited(workload.arena_pages);
        report.arena.used_pages = used_pages(pool);
    }
    if let Some(pool) = leader.pool_of(TierId::Disk) {
        report.moves.g3_pages = limited(workload.disk_pages);
        report.moves.g3_used_pages = used_pages(pool);
    }
    for tier in [TierId::Host, TierId::Disk] {
        if let Some(pool) = leader.pool_of(tier) {
            let states = pool.page_states();
            report.left.pins += pool.pins();
            report.left.unsettled_pages +=
                u64::from(states.reserved + states.filling + states.quarantined);
        }
    }
    report.left.slots = leader.slots() as u64;
    report.left.copies_under_way = leader.copies_under_way() as u64;
    report.left.device_pages = u64::from(held_pages);
    let audit = leader.check();
    report.left.contradiction = audit
        .err()
        .map(|found| found.to_string())
        .unwrap_or_default();
    let digest = leader.decisions_digest();
    report.decisions_digest = digest.unwrap_or_else(|| NOT_RECORDED.to_owned());
}
