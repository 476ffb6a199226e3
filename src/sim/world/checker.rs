//! Invariants after every step and at the end of a run, recomputed from the leader's visible state and from memory.

use std::collections::BTreeMap;

use super::context::expected;
use super::disk::SetKey;
use super::leader::LeaderProcess;
use super::oracle::FillingPages;
use super::setup::CELL_BYTES;
use super::storage::{Content, Storage};
use super::{NodeId, SimWorld};
use kvferry_core::{BlockView, CANCELS_MAX, Contradiction, Leader, TierKey};
use kvferry_types::{PerTier, Shard, TierId, TransferId};

/// An arena with fewer pages has its contents checked at every check, one of `n` pages at one of `n / PAGES_AT_ONCE +
/// 1` checks.
const PAGES_AT_ONCE: u32 = 192;

/// The leader's state of the arena pages of its tiers.
#[derive(Debug, Default)]
struct Pages {
    readable: PerTier<Vec<bool>>,
    filling: FillingPages,
}

impl SimWorld {
    /// Checks the invariants. Called after the leader has decided something or a depot was written.
    pub(super) fn check(&mut self) {
        self.checks += 1;
        self.follow_log();
        let leader = self.leader.state.as_ref();
        let pool = leader.and_then(|leader| leader.core().pool());
        let capacity = pool.map_or(0, kvferry_core::Pool::capacity_pages);
        let turns = u64::from(capacity / PAGES_AT_ONCE + 1);
        let contents = self.checks.is_multiple_of(turns);
        let workers = self.check_workers(contents);
        match workers.and_then(|()| self.check_leader(contents)) {
            Err(found) => self.env.violated(found.to_string()),
            Ok(pages) => {
                let now = self.env.now();
                let readable = |(tier, page): (TierId, u32)| {
                    let readable = pages.readable.get(tier);
                    readable.and_then(|readable| readable.get(page as usize)) == Some(&true)
                };
                if let Some(late) = self.env.oracle.published(now, pages.filling, readable) {
                    self.env.violated(late);
                }
            }
        }
    }

    fn check_workers(&self, contents: bool) -> Result<(), Contradiction> {
        let processes = self.workers.values().filter(|_| contents);
        let mut running = processes.filter_map(|process| process.state.as_ref());
        running.try_for_each(|process| process.core().check())
    }

    fn check_leader(&self, contents: bool) -> Result<Pages, Contradiction> {
        let Some(leader) = self.leader.state.as_ref().map(LeaderProcess::core) else {
            return Ok(Pages::default());
        };
        // Requests to cancel stores are compared with a limit of their own, so that slack in one limit does not hide an
        // excess over the other.
        let cancels = leader.open_cancels();
        let others = leader.open_requests() - cancels;
        let (stores, max) = (
            leader.open_stores(),
            self.env.setup.open_requests_max(self.epoch),
        );
        let limits = [
            (stores, max),
            (others - stores, max),
            (cancels, CANCELS_MAX),
        ];
        for (open, max) in limits {
            let most = max * self.engines_known();
            if open > most {
                return Err(format!("{open} requests are open, the limit is {most}").into());
            }
        }
        if contents {
            leader.check()?;
        }
        let mut pages = Pages::default();
        for tier in self.env.setup.tiers.iter().copied() {
            self.check_tier(leader, tier, contents, &mut pages)?;
        }
        Ok(pages)
    }

    fn check_tier(
        &self,
        leader: &Leader,
        tier: TierId,
        contents: bool,
        pages: &mut Pages,
    ) -> Result<(), Contradiction> {
        if let (Some(key), Some(pool)) = (leader.tier_key(tier), leader.pool_of(tier)) {
            let sizes = (self.env.setup.ranks, self.env.setup.sharding.shards());
            self.env.oracle.roster.check(tier, key, pool, sizes)?;
        }
        // A closing pool serves nothing. Its last copies still touch its pages, and no others.
        let Some(pool) = leader.pool_of(tier).or(leader.closing_pool(tier)) else {
            return match self.env.oracle.touched.writers(tier).next() {
                Some((shard, page, transfer)) if leader.is_reading(tier) => Err(format!(
                    "{transfer} writes page {page} of shard {shard} in {tier} while inventories are read"
                )
                .into()),
                _ => Ok(()),
            };
        };
        // Every page is either in exactly one block, free, or out of use because its place failed.
        let mut held = vec![false; pool.capacity_pages() as usize];
        let mut readable = vec![false; pool.capacity_pages() as usize];
        let mut fills: BTreeMap<u32, TransferId> = BTreeMap::new();
        let (mut ready, mut filling, mut pins) = (0, 0, 0);
        for block in pool.view() {
            let more = block.filling.map_or(0, |(_, pages)| pages);
            for page in block.start..block.start + block.ready + more {
                if std::mem::replace(&mut held[page as usize], true) {
                    return Err(format!("arena page {page} is in two blocks").into());
                }
            }
            readable[block.start as usize..][..block.ready as usize].fill(true);
            if let Some((TransferId(transfer), count)) = block.filling {
                let first = block.start + block.ready;
                let filled = (first..first + count).map(|page| (page, TransferId(transfer)));
                fills.extend(filled);
            }
            ready += block.ready;
            filling += more;
            pins += u64::from(block.pins);
            if contents && let Some(key) = leader.tier_key(tier) {
                self.check_contents(tier, key, &block)?;
            }
        }
        let mut out = 0;
        for (page, pages) in pool.spans_out() {
            if held[page as usize] {
                return Err(
                    format!("arena page {page} is in a block, and its place failed").into(),
                );
            }
            out += pages;
        }
        let states = pool.page_states();
        let counted = states.reserved + states.filling + states.quarantined;
        let free = pool.capacity_pages() - ready - filling - out;
        if (states.free, states.ready, counted, states.out_of_use) != (free, ready, filling, out) {
            return Err(format!(
                "{states:?}, but blocks hold {ready} ready and {filling} filling pages"
            )
            .into());
        }
        if pins != pool.pins() {
            return Err(format!("blocks have {pins} holders, the pool has {}", pool.pins()).into());
        }
        // Every page that is written belongs to the copy that writes it.
        for (shard, page, transfer) in self.env.oracle.touched.writers(tier) {
            if fills.get(&page) != Some(&transfer) {
                return Err(format!(
                    "{transfer} writes page {page} of shard {shard} in {tier}, which is not, or no longer, its own"
                ).into());
            }
        }
        let fills = fills
            .into_iter()
            .map(|(page, transfer)| ((tier, page), transfer));
        pages.filling.extend(fills);
        pages.readable.insert(tier, readable);
        Ok(())
    }

    /// Checks that every page that can be served holds the expected content on every shard, and was not removed by a
    /// reset. A lost depot is skipped: the leader has not been notified yet, and no worker with the new depot has
    /// attached.
    fn check_contents(
        &self,
        tier: TierId,
        key: &TierKey,
        block: &BlockView<'_>,
    ) -> Result<(), Contradiction> {
        let Some((namespace, shape, group)) = self.env.namespace_of(block.domain) else {
            return Ok(());
        };
        for (page, fingerprint) in (block.start..block.start + block.ready).zip(block.fingerprints)
        {
            if tier == TierId::Disk {
                self.check_disks((key, page), |shard| {
                    expected(namespace, (shape, group), *fingerprint, shard)
                })?;
            }
            let depots = self.env.depots.get(tier).into_iter().flatten();
            let depots = depots.zip(&key.depots);
            for (shard, (depot, known)) in (0..).map(Shard).zip(depots) {
                if depot.id() != *known {
                    continue;
                }
                let must = expected(namespace, (shape, group), *fingerprint, shard);
                let holds = depot.read(shape, page);
                let bad = (tier, usize::from(shard.0), page);
                if holds != must && !self.env.bad_pages.contains(&bad) {
                    return Err(format!(
                        "page {page} of {tier} can be served, and holds {holds:x} on {shard}, not {must:x}"
                    ).into());
                }
            }
            if block.retired {
                continue;
            }
            if let Some(at) = self
                .env
                .oracle
                .came_back(tier, namespace, block.domain, *fingerprint)
            {
                return Err(
                    format!("page {page} of {tier} came back: it was forgotten at {at}").into(),
                );
            }
        }
        Ok(())
    }

    /// Checks that the open sets of the disks serve a page with the expected content, or have lost it by a fault. What a disk
    /// lost is found by its checksum.
    fn check_disks(
        &self,
        (key, page): (&TierKey, u32),
        must: impl Fn(Shard) -> Content,
    ) -> Result<(), Contradiction> {
        let set = SetKey {
            layout: key.layout_fingerprint,
            cells: u32::try_from(key.page_bytes / CELL_BYTES).unwrap_or(0),
        };
        let disks = self.env.disks.iter().zip(&key.depots);
        let disks = (0..).map(Shard).zip(disks);
        let disks =
            disks.filter(|(_, (disk, known))| disk.id() == **known && disk.open_key() == Some(set));
        for (shard, (disk, _)) in disks {
            let must = must(shard);
            match disk.served(page) {
                Some(holds) if holds == must => {}
                Some(holds) => {
                    return Err(format!(
                        "page {page} of the disk of {shard} matches its checksum, and holds {holds:x}, not {must:x}"
                    )
                    .into());
                }
                None if disk.is_excused(page) => {}
                None => {
                    return Err(format!(
                        "page {page} can be served, and the disk of {shard} has not got it, without a fault"
                    )
                    .into());
                }
            }
        }
        Ok(())
    }

    /// Most engines that a leader may remember: all incarnations so far, and the sessions of operators.
    fn engines_known(&self) -> usize {
        let lives: u32 = self.engines.iter().map(|engine| engine.incarnation).sum();
        lives as usize + self.env.oracle.operators.len()
    }

    /// True when every process runs and nothing is pending.
    pub(super) fn is_quiet(&self) -> bool {
        let everyone = self.everyone().all(|who| self.incarnation(who).is_some());
        let leader = self.leader.state.as_ref().is_some_and(|leader| {
            let core = leader.core();
            core.is_ready()
                && (core.slots(), core.open_requests(), core.copies_under_way()) == (0, 0, 0)
        });
        let workers = self.workers.values().all(|process| {
            process
                .state
                .as_ref()
                .is_some_and(|worker| worker.core().open_copies() == 0)
        });
        let engines = self.engines.iter().all(|process| {
            process
                .state
                .as_ref()
                .is_some_and(|engine| engine.is_idle())
        });
        everyone && leader && workers && engines
    }

    /// Everything that is pending, as text for a report.
    pub(super) fn pending(&self) -> String {
        let dead: Vec<NodeId> = self
            .everyone()
            .filter(|who| self.incarnation(*who).is_none())
            .collect();
        let leader = self.leader.state.as_ref().map(|leader| {
            let core = leader.core();
            let awaited: Vec<_> = core.awaited().collect();
            format!(
                "ready {}, {} slots, {} requests, copies {awaited:?}",
                core.is_ready(),
                core.slots(),
                core.open_requests()
            )
        });
        let engines: Vec<String> = self
            .engines
            .iter()
            .filter_map(|process| Some(process.state.as_ref()?.waits()))
            .collect();
        let workers = self.workers.iter().filter_map(|(id, process)| {
            let open = process.state.as_ref()?.core().open_copies();
            (open > 0).then(|| format!("{id}: {open} copies"))
        });
        let workers: Vec<String> = workers.collect();
        format!("dead {dead:?}; leader {leader:?}; workers {workers:?}; engines {engines:?}")
    }

    /// Checks the invariants at the end of a run, when no pins, reservations or held pages may be left.
    pub(super) fn check_end(&mut self) {
        self.checks = 0;
        self.end_log();
        let mut wrong = self.check_leader(true).err().map(|found| found.to_string());
        let leader = self.leader.state.as_ref();
        let tiers = self.env.setup.tiers.iter().copied();
        let pools = tiers.filter_map(|tier| leader?.core().pool_of(tier));
        for pool in pools {
            let states = pool.page_states();
            let set_aside = states.reserved + states.filling + states.quarantined;
            if pool.pins() != 0 || set_aside != 0 {
                wrong.get_or_insert(format!("{} pins and {states:?} are left", pool.pins()));
            }
        }
        for process in &self.engines {
            if let Some(engine) = &process.state
                && engine.scheduler.held_pages() != 0
            {
                let held = engine.scheduler.held_pages();
                wrong.get_or_insert(format!("an engine holds {held} pages and runs nothing"));
            }
        }
        if let Some(wrong) = wrong {
            self.env.violated(wrong);
        }
    }
}
