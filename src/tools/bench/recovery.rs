//! `kvferry-tools bench recovery`

use std::collections::VecDeque;
use std::fs;
use std::time::Instant;

use kvferry::cli::bench::percentiles;
use kvferry::cli::bench::rig::ENGINE;
use kvferry::cli::print_line;
use kvferry::error::CommandError;
use kvferry_core::{
    AnchorKey, AttachRequest, AttachedDepot, Leader, LeaderEffect, LeaderEvent, LeaderSettings,
    WorkerMemory,
};
use kvferry_protocol::limits::PAGE_RECORDS_MAX;
use kvferry_types::{
    Anchor, AttachId, DepotId, DomainId, Epoch, Fingerprint, PageRecord, PerTier, Rank, Ratio,
    Replica, Stored, Time, TransferId, WorkerId,
};

use super::preloaded_leader::geometry;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Pages of the inventory of each shard.
    #[arg(long, default_value = "1000000", value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    pages: u32,
    /// Shards.
    #[arg(long, default_value = "2", value_parser = clap::value_parser!(u16).range(1..=64))]
    shards: u16,
    /// Pages of a block.
    #[arg(long, default_value = "32", value_parser = clap::value_parser!(u32).range(1..=256))]
    block_pages: u32,
    /// Recoveries.
    #[arg(long, default_value = "5", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// The leader finds pages inside blocks.
    #[arg(long)]
    page_index: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Times of the steps of one recovery in milliseconds, medians over recoveries.
#[derive(Debug, serde::Serialize)]
struct RecoveryReport {
    pages: u32,
    shards: u16,
    block_pages: u32,
    parts: usize,
    longest_step_ms: f64,
    last_step_ms: f64,
    all_steps_ms: f64,
    /// Growth of the process to its largest size during the first recovery, and to its size after it.
    peak_bytes: u64,
    kept_bytes: u64,
}

/// Steps of one recovery, in milliseconds.
#[derive(Debug, Default)]
struct Steps {
    count: usize,
    longest: f64,
    last: f64,
    all: f64,
}

impl Arguments {
    pub(crate) fn run(self) -> Result<(), CommandError> {
        let before = memory("VmRSS:")?;
        fs::write("/proc/self/clear_refs", "5").map_err(CommandError::failed)?;
        let (steps, leader) = self.recover()?;
        let peak_bytes = memory("VmHWM:")?.saturating_sub(before);
        let kept_bytes = memory("VmRSS:")?.saturating_sub(before);
        drop(leader);
        let mut rounds = vec![steps];
        for _ in 1..self.rounds {
            rounds.push(self.recover()?.0);
        }
        let median = |value: fn(&Steps) -> f64| percentiles(rounds.iter().map(value).collect()).0;
        let report = RecoveryReport {
            pages: self.pages,
            shards: self.shards,
            block_pages: self.block_pages,
            parts: rounds[0].count,
            longest_step_ms: median(|steps| steps.longest),
            last_step_ms: median(|steps| steps.last),
            all_steps_ms: median(|steps| steps.all),
            peak_bytes,
            kept_bytes,
        };
        if self.json {
            print_line(&serde_json::to_string_pretty(&report).map_err(CommandError::failed)?);
            return Ok(());
        }
        print_line(&format!(
            "Recovery of {} pages in blocks of {} from {} shards, in {} parts.",
            report.pages, report.block_pages, report.shards, report.parts
        ));
        print_line(&format!(
            "steps   longest {:.2} ms, last {:.2} ms, all {:.1} ms",
            report.longest_step_ms, report.last_step_ms, report.all_steps_ms
        ));
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        print_line(&format!(
            "memory  at most {:.1} MiB, {:.1} MiB afterwards",
            mib(report.peak_bytes),
            mib(report.kept_bytes)
        ));
        Ok(())
    }

    /// Recovers a leader's pool. Fails unless every page is found.
    fn recover(&self) -> Result<(Steps, Leader), CommandError> {
        let ratio = Ratio::new(self.block_pages).map_err(CommandError::failed)?;
        let key = AnchorKey::new([5; 32]);
        let mut settings = LeaderSettings::new(Epoch(2), self.shards, ratio, key);
        settings.page_index = self.page_index;
        let mut leader = Leader::new(settings);
        let mut effects = Vec::new();
        let mut events = VecDeque::from([LeaderEvent::EngineOpened(ENGINE)]);
        events.extend((0..self.shards).flat_map(|rank| self.arrival(rank)));
        let mut steps = Steps::default();
        while let Some(event) = events.pop_front() {
            let is_part = matches!(event, LeaderEvent::Inventory { .. });
            let begun = Instant::now();
            leader.step(Time(1), event, &mut effects);
            let took = begun.elapsed().as_secs_f64() * 1e3;
            if is_part {
                steps.count += 1;
                steps.longest = steps.longest.max(took);
                steps.last = took;
                steps.all += took;
            }
            for effect in effects.drain(..) {
                if let LeaderEffect::ReadInventory {
                    worker,
                    depot,
                    read_id,
                    from,
                    ..
                } = effect
                {
                    let end = from.saturating_add(PAGE_RECORDS_MAX as u32).min(self.pages);
                    events.push_back(LeaderEvent::Inventory {
                        worker,
                        depot,
                        read_id,
                        from,
                        next: (end < self.pages).then_some(end),
                        records: (from..end).map(|page| self.record(page)).collect(),
                    });
                }
            }
        }
        let ready = leader.pool().map_or(0, |pool| pool.page_states().ready);
        match ready == self.pages {
            true => Ok((steps, leader)),
            false => Err(CommandError::Failed(format!("{ready} pages are ready"))),
        }
    }

    fn arrival(&self, rank: u16) -> [LeaderEvent; 2] {
        let attached = AttachRequest {
            worker: WorkerId {
                replica: Replica(0),
                rank: Rank(rank),
            },
            ranks: self.shards,
            shards: self.shards,
            attach: AttachId(1),
            depots: PerTier::host(AttachedDepot {
                depot: DepotId(u128::from(rank) + 1),
                epoch: Epoch(0),
            }),
        };
        let memory = WorkerMemory {
            engine: ENGINE,
            geometry: geometry().into(),
            arena_pages: PerTier::host(self.pages),
        };
        LeaderEvent::arrival(attached, memory)
    }

    /// The record of a page in the inventory of each shard.
    fn record(&self, page: u32) -> PageRecord {
        let index = page % self.block_pages;
        let block = u64::from(page / self.block_pages);
        let scattered = |number: u64| u128::from(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        PageRecord {
            page,
            anchor: Anchor(scattered(block)),
            domain: DomainId(1),
            block_start: page - index,
            index: index as u16,
            phase: 0,
            stored: Stored {
                epoch: Epoch(1),
                // Blocks were not stored in the order of their pages.
                transfer: TransferId(block.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32),
            },
            fingerprint: Fingerprint(scattered(u64::from(page) + (1 << 40))),
        }
    }
}

/// A value of `/proc/self/status` in bytes.
fn memory(name: &str) -> Result<u64, CommandError> {
    let text = fs::read_to_string("/proc/self/status").map_err(CommandError::failed)?;
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    let kib = kib.ok_or_else(|| CommandError::Failed(format!("/proc/self/status: no {name}")))?;
    Ok(kib << 10)
}
