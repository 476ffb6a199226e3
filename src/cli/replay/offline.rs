//! The sequential replay without processes, and the parts that all replays without processes share.

use std::time::Instant;

use crate::error::CommandError;
use kvferry_core::{ARENA_PAGES_MAX, AnchorKey, Leader, LeaderSettings, NOT_RECORDED};
use kvferry_sim::sequential::Sequential;
use kvferry_types::{Epoch, PerTier};

use super::Arguments;
use super::report::ReplayReport;
use super::workload::Workload;

pub(super) fn run(
    arguments: &Arguments,
    workload: &Workload,
) -> Result<ReplayReport, CommandError> {
    let begun = Instant::now();
    let mut report = ReplayReport::new(arguments, workload);
    let scheduler = workload.scheduler(arguments);
    let leader = leader(arguments, workload, workload.arena_pages > 0);
    let geometry = workload.geometry();
    let pages = workload.arena_pages;
    let world = Sequential::new(leader, scheduler, arguments.ranks, &geometry, pages);
    let mut world = world.map_err(|error| CommandError::Config(error.to_string()))?;
    let progress = workload.progress(arguments);
    for (_, prompt) in workload.prompts() {
        let served = world.serve(prompt).map_err(CommandError::failed)?;
        report.add(&served);
        progress.inc(1);
    }
    progress.finish_and_clear();
    fill(&mut report, workload, world.leader(), world.held_pages());
    report.copied(world.stored_bytes(), world.loaded_bytes());
    report.seconds.wall = begun.elapsed().as_secs_f64();
    Ok(report)
}

/// A leader for a world without processes.
pub(super) fn leader(arguments: &Arguments, workload: &Workload, tiers: bool) -> Leader {
    // The key only determines the place of an anchor in a table.
    let key = AnchorKey::new([0; 32]);
    let mut settings = LeaderSettings::new(Epoch(1), arguments.ranks, workload.ratio, key);
    settings.accepts_empty_depots = !tiers;
    settings.tier_policies = PerTier::host(arguments.g2_policy.clone());
    settings.sharding = workload.sharding;
    settings.record_decisions = true;
    Leader::new(settings)
}

/// Copies the leader's final state, and the number of pages that the engine still holds.
pub(super) fn fill(
    report: &mut ReplayReport,
    workload: &Workload,
    leader: &Leader,
    held_pages: u32,
) {
    report.count(|name| {
        leader
            .counters()
            .find(|(known, _)| *known == name)
            .map_or(0, |(_, value)| value)
    });
    if let Some(pool) = leader.pool() {
        let states = pool.page_states();
        report.arena.capacity_pages =
            (workload.arena_pages < ARENA_PAGES_MAX).then_some(u64::from(workload.arena_pages));
        report.arena.used_pages = u64::from(states.ready);
        report.left.pins = pool.pins();
        report.left.unsettled_pages =
            u64::from(states.reserved + states.filling + states.quarantined);
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
