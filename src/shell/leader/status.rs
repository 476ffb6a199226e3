//! The status of a leader, and of its workers while they prepare their depots.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU64;
use std::time::Duration;

use kvferry_core::{NAMESPACE_RULES_MAX, Pool};
use kvferry_protocol::limits::NAMESPACE_ENTRIES_MAX;
use kvferry_protocol::{
    ErrorBody, ErrorCode, GroupHits, MeasureAnswer, MovesStatus, NamespaceMeasure, RankStatus,
    Readiness, RequestsStatus, StatusAnswer, StoredPages, TierStatus,
};
use kvferry_types::{Edge, Rank, Replica, TierId, Time, WorkerId};

use super::seats::PeerRole;
use super::{LeaderHost, LeaderShell};

/// Counter that the shell adds to those of the core: time that the leader spent in lookups, in nanoseconds.
pub const LOOKUP_NS: &str = "lookup_ns";

/// Pause between two audits that peers may request.
const CHECK_PAUSE: Duration = Duration::from_secs(1);

const _: () = assert!(
    NAMESPACE_RULES_MAX <= NAMESPACE_ENTRIES_MAX,
    "an answer has room for all entries"
);

impl<P: fmt::Debug> LeaderShell<P> {
    /// Stores the progress report of a worker. Only the last report is kept, also after the worker ends.
    pub(super) fn readiness_reported(&mut self, now: Time, worker: WorkerId, readiness: Readiness) {
        if !self.seats().any(|seat| seat == worker) {
            return;
        }
        let known = self.readiness.get(&worker);
        let is_new = known.is_none_or(|known| known.problem != readiness.problem);
        if is_new
            && !readiness.problem.is_empty()
            && let Some(left_out) = self.problems.line(now)
        {
            tracing::warn!(%worker, problem = readiness.problem, left_out, "a worker reports a problem");
        }
        self.readiness.insert(worker, readiness);
    }

    /// All seats of workers: each rank of each replica.
    pub(super) fn seats(&self) -> impl Iterator<Item = WorkerId> + use<P> {
        let ranks = self.settings.sharding.ranks();
        let replicas = (0..self.settings.replicas).map(Replica);
        replicas.flat_map(move |replica| {
            let ranks = (0..ranks).map(Rank);
            ranks.map(move |rank| WorkerId { replica, rank })
        })
    }

    /// Engines with a connection, without admin sessions.
    fn connected_engines(&self) -> u64 {
        let roles = self.roles.values();
        let engines = roles.filter(|role| matches!(role, PeerRole::Engine(_)));
        engines.count() as u64
    }

    fn rank(&self, worker: WorkerId) -> RankStatus {
        let pid = self.workers.get(&worker).and_then(|known| known.holder.pid);
        let readiness = self.readiness.get(&worker).cloned().unwrap_or_default();
        RankStatus {
            replica: worker.replica.0,
            rank: worker.rank.0,
            attached: self.core.is_attached(worker),
            pid: pid.and_then(|pid| u32::try_from(pid).ok()).unwrap_or(0),
            stores: self.awaited_from(worker, Edge::STORE),
            loads: self.awaited_from(worker, Edge::LOAD),
            host_ready_bytes: readiness.ready_bytes,
            host_bytes: readiness.bytes,
            host_pinned_bytes: readiness.pinned_bytes,
            problem: readiness.problem,
            connected: Some(self.is_connected(worker)),
            disk: readiness.disk,
        }
    }

    fn is_connected(&self, worker: WorkerId) -> bool {
        let known = self.workers.get(&worker);
        known.is_some_and(|known| self.roles.contains_key(&known.holder.peer))
    }

    fn tiers(&self) -> Vec<TierStatus> {
        let counts = self.core.counts();
        let asked = counts.lookup_pages.saturating_sub(counts.device_pages);
        let tiers = self.settings.tiers.iter();
        let tiers = tiers.map(|tier| TierStatus {
            tier: tier.number(),
            hit_pages: match tier {
                TierId::Host => counts.hit_pages - counts.below_pages,
                // One tier at most lies below host memory.
                _ => counts.below_pages,
            },
            lookup_pages: match tier {
                TierId::Host => asked,
                _ => (asked + counts.below_pages).saturating_sub(counts.hit_pages),
            },
            evicted_pages: self.core.pool_counts(*tier).evicted_pages,
            ..self.core.pool_of(*tier).map(tier_of).unwrap_or_default()
        });
        tiers.collect()
    }

    fn moves(&self) -> Option<MovesStatus> {
        let counts = self.core.counts();
        let (under_way, waiting) = self.core.moves_under_way();
        (self.settings.tiers.len() > 1).then_some(MovesStatus {
            under_way: under_way as u64,
            waiting: waiting as u64,
            ordered: counts.moves,
            pages: counts.moved_pages,
            left_out: counts.moves_left_out,
            bad_sources: counts.bad_sources,
            gone: counts.moves_gone,
        })
    }

    fn awaited_from(&self, worker: WorkerId, edge: Edge) -> u32 {
        u32::try_from(self.core.awaited_from(worker, edge)).unwrap_or(u32::MAX)
    }

    /// Refuses an audit that comes less than [`CHECK_PAUSE`] after the last one: an audit walks the whole arena, and no
    /// other request is served meanwhile.
    fn may_check(&self, now: Time) -> Result<(), ErrorBody> {
        let left = self.checked.map(|last| now.until(last + CHECK_PAUSE));
        if let Some(left) = left.filter(|left| !left.is_zero()) {
            let text = format!(
                "everything was counted less than {CHECK_PAUSE:?} ago: retry in {} ms, or without check",
                left.as_millis() + 1
            );
            return Err(ErrorBody::new(ErrorCode::Busy, text));
        }
        Ok(())
    }

    /// The numbers that the status does not have.
    pub(super) fn measure(&self, host: &dyn LeaderHost<Process = P>) -> MeasureAnswer {
        let hits = self.core.hit_tokens().iter();
        let hits = hits.map(|((tier, group), tokens)| GroupHits {
            tier: tier.number(),
            group: group.0,
            tokens: *tokens,
        });
        MeasureAnswer {
            connections: host.connections(),
            hits: hits.collect(),
            edges: Vec::new(),
            refused_orders: BTreeMap::new(),
            namespaces: self.namespaces(),
            draining: self.core.is_draining(),
        }
    }

    fn namespaces(&self) -> Vec<NamespaceMeasure> {
        let usage = (1..).zip(self.core.rule_usage());
        let measured = usage.map(|(entry, usage)| {
            let stored = usage.stored_pages.iter();
            let limits = &usage.rule.stored_pages;
            let stored = stored.map(|(tier, pages)| StoredPages {
                tier: tier.number(),
                pages: u64::from(*pages),
                pages_max: limits.get(tier).copied().unwrap_or(0).into(),
            });
            NamespaceMeasure {
                entry,
                held_pages: usage.held_pages,
                held_pages_max: usage.rule.held_pages.map(NonZeroU64::get),
                stored: stored.collect(),
            }
        });
        measured.collect()
    }

    pub(super) fn status(
        &mut self,
        host: &dyn LeaderHost<Process = P>,
        check: bool,
    ) -> Result<Box<StatusAnswer>, ErrorBody> {
        let mut contradiction = None;
        if check {
            self.may_check(host.now())?;
            let audit = self.core.check();
            let found = audit.err().map(|found| found.to_string());
            contradiction = Some(found.unwrap_or_default());
            // The pause starts at the end of the audit, so that a long audit leaves as much time to other requests as a
            // short one.
            self.checked = Some(host.now());
        }
        let mut answer = StatusAnswer {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            epoch: self.settings.epoch.0,
            ready: self.core.is_ready(),
            draining: self.core.is_draining(),
            ratio: self.settings.ratio.pages(),
            hash_tokens: self.core.engine_page_tokens(),
            ranks: self.seats().map(|worker| self.rank(worker)).collect(),
            slots: self.core.slots() as u64,
            pins: self.core.pool().map_or(0, |pool| pool.pins()),
            copies_under_way: self.core.copies_under_way() as u64,
            requests: Box::new(RequestsStatus {
                storing_pages: self.core.pages_over(Edge::STORE),
                loading_pages: self.core.pages_over(Edge::LOAD),
                engines: self.connected_engines(),
                open_requests: self.core.open_requests() as u64,
                open_loads: self.core.open_loads() as u64,
                open_stores: self.core.open_stores() as u64,
                parked_requests: self.core.parked_requests() as u64,
            }),
            decisions_digest: self.core.decisions_digest(),
            counters: self
                .core
                .counters()
                .map(|(name, value)| (name.to_owned(), value))
                .collect(),
            contradiction,
            tiers: self.tiers(),
            moves: self.moves().map(Box::new),
            restarts: host.restarts(),
        };
        let lookup_ns = u64::try_from(host.lookup_time().as_nanos()).unwrap_or(u64::MAX);
        answer.counters.insert(LOOKUP_NS.to_owned(), lookup_ns);
        Ok(Box::new(answer))
    }
}

/// What a pool that serves says of its tier.
fn tier_of(pool: &Pool) -> TierStatus {
    let states = pool.page_states();
    let page_states = states.by_name();
    let page_states = page_states.map(|(name, pages)| (name.to_owned(), u64::from(pages)));
    TierStatus {
        pages: u64::from(pool.capacity_pages()),
        used_pages: u64::from(states.ready),
        blocks: u64::from(pool.live_blocks()),
        page_states: page_states.into(),
        quarantined_pages: u64::from(pool.quarantined_places()),
        ..TierStatus::default()
    }
}
