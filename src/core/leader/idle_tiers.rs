//! Disks of workers without an engine.
//!
//! Pages of host memory wait to be written to the disk, and a flush waits for them, also when their engine has left, or when
//! the worker was started again since. No engine's memory says then which pages the disk is to be opened for, but the pool of
//! host memory does.

use std::collections::BTreeMap;

use crate::leader::event::LeaderEffect;
use kvferry_types::{TierId, TierLayout, Time, WorkerId};

use super::Leader;
use super::tier::TierKey;
use super::timers::Timer;

/// The workers without an engine that have the tiers below host memory open for the pages of host memory, as far as the
/// leader has ordered that.
#[derive(Debug, Default)]
pub(super) struct IdleTiers {
    ordered: BTreeMap<WorkerId, TierLayout>,
    /// When orders that had no effect are repeated.
    again: Option<Time>,
}

impl IdleTiers {
    /// A worker has attached, has stated its memory, or is dead: its tiers follow from that.
    pub(super) fn forget(&mut self, worker: WorkerId) {
        self.ordered.remove(&worker);
    }
}

impl Leader {
    /// Has one worker of each shard that has none with an engine open its tiers, and the other workers without an engine close
    /// theirs.
    pub(super) fn order_idle_tiers(&mut self, now: Time, effects: &mut Vec<LeaderEffect>) {
        if self.tiers.ids().iter().all(|tier| *tier <= TierId::Host) {
            return;
        }
        let layout = self.tiers.wanted_key().map(TierKey::layout);
        let opening = self.roster.opening_idle(layout.as_ref());
        let mut missing = false;
        for worker in self.roster.stated_without_memory() {
            let wanted = layout.filter(|_| opening.contains(&worker));
            let open = wanted.is_some_and(|wanted| self.roster.has_open(worker, &wanted));
            if open || wanted == self.idle_tiers.ordered.get(&worker).copied() {
                missing |= wanted.is_some() && !open;
                continue;
            }
            match wanted {
                Some(wanted) => self.idle_tiers.ordered.insert(worker, wanted),
                None => self.idle_tiers.ordered.remove(&worker),
            };
            missing |= wanted.is_some();
            effects.push(LeaderEffect::OpenTiers {
                worker,
                layout: wanted,
            });
        }
        if missing && self.idle_tiers.again.is_none() {
            let again = now + self.settings.fence / 4;
            self.idle_tiers.again = Some(again);
            self.timers.set(again, Timer::IdleTiers);
        }
    }

    /// Repeats the orders that had no effect: an order may have been lost.
    pub(super) fn idle_tiers_due(&mut self, now: Time, effects: &mut Vec<LeaderEffect>) {
        self.idle_tiers.again = None;
        let roster = &self.roster;
        let ordered = &mut self.idle_tiers.ordered;
        ordered.retain(|worker, layout| roster.has_open(*worker, layout));
        self.order_idle_tiers(now, effects);
    }
}
