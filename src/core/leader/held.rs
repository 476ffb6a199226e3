//! Limits on the pages that lookups hold: of the namespaces of one rule, and of one engine among several.

use crate::Contradiction;
use crate::group::model::Sequence;
use crate::index::namespaces::NamespaceRule;
use crate::leader::refusal::Refusal;
use crate::pool::held::{HeldCount, HoldOwners};
use crate::pool::tier_walk::TierRun;
use kvferry_types::{EngineId, GroupId, PerTier, TierId};

use super::Leader;

/// Pages of the namespaces of one rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleUsage<'a> {
    /// The rule, with its limits.
    pub rule: &'a NamespaceRule,
    /// Pages that lookups and loads hold.
    pub held_pages: u64,
    /// Stored pages of each tier in which the rule has a limit; 0 in a tier that serves nothing.
    pub stored_pages: PerTier<u32>,
}

impl Leader {
    /// The pages of each rule, in the order of the rules.
    pub fn rule_usage(&self) -> impl Iterator<Item = RuleUsage<'_>> {
        let rules = self.settings.namespaces.rules().iter();
        rules.zip(&self.held_of_rules).map(|(rule, held)| {
            let id = self.settings.anchor_key.rule(&rule.prefix);
            let stored = rule.stored_pages.tiers().map(|tier| {
                let pool = self.pool_of(tier);
                (tier, pool.map_or(0, |pool| pool.pages_of_rule(id)))
            });
            RuleUsage {
                rule,
                held_pages: held.pages(),
                stored_pages: stored.collect(),
            }
        })
    }

    /// Recounts the pages that count for rules and engines. Pages of engines that are forgotten count for no engine.
    pub(super) fn check_held(&self) -> Result<(), Contradiction> {
        let (held, of_engines) = self.sessions.held_pages();
        let all = held + self.loads.held_pages();
        let of_rules: u64 = self.held_of_rules.iter().map(HeldCount::pages).sum();
        match of_engines + of_rules <= all {
            true => Ok(()),
            false => Err(format!(
                "{all} pages are held, engines count {of_engines} of them and rules {of_rules}"
            )
            .into()),
        }
    }

    /// For whom the pages count that a lookup of this namespace holds.
    pub(super) fn hold_owners(&mut self, engine: EngineId, namespace: &[u8]) -> HoldOwners {
        let rule = self.settings.namespaces.find(namespace);
        let rule = rule.and_then(|rule| self.held_of_rules.get(rule));
        HoldOwners {
            rule: rule.cloned(),
            engine: Some(self.sessions.open(engine).held().clone()),
        }
    }

    /// Refuses a lookup whose pages, with those that are held already, exceed the limit of the namespace's rule.
    pub(super) fn check_rule(
        &self,
        namespace: &[u8],
        needed: &[(GroupId, TierRun)],
    ) -> Result<(), Refusal> {
        let Some(rule) = self.settings.namespaces.find(namespace) else {
            return Ok(());
        };
        let max = self.settings.namespaces.rules()[rule].held_pages;
        let held = self.held_of_rules.get(rule).map(HeldCount::pages);
        let (Some(max), Some(held)) = (max, held) else {
            return Ok(());
        };
        let pages = needed
            .iter()
            .map(|(_, run)| u64::from(run.run.through()))
            .sum();
        match held.saturating_add(pages) > max.get() {
            true => Err(Refusal::Quota {
                limit: "held_pages of the namespace",
                max: max.get(),
                held,
                pages,
            }),
            false => Ok(()),
        }
    }

    /// Where a hit of a sequence must end for its pages to fit the limit of the namespace's rule while nothing else is held;
    /// `None` if it may end where it does. A hit of several groups cannot end anywhere: its lookup is refused.
    pub(super) fn end_within_rule(
        &self,
        namespace: &[u8],
        sequence: &Sequence,
        needed: &[(GroupId, TierRun)],
    ) -> Option<u32> {
        let rule = self.settings.namespaces.find(namespace)?;
        let max = self.settings.namespaces.rules()[rule].held_pages?;
        if !sequence.model().is_plain() {
            return None;
        }
        let mut pages = 0;
        let mut needed = needed.iter();
        let beyond = needed.find(|(_, run)| {
            pages += u64::from(run.run.through());
            pages > max.get()
        });
        beyond.map(|(_, run)| run.run.position)
    }

    /// Where a hit of a sequence must end for its engine to hold no more than half of host memory, so that other engines
    /// can store; `None` if it may end where it does. A hit of several groups cannot end anywhere: its lookup is refused.
    pub(super) fn end_within_half(
        &self,
        engine: EngineId,
        sequence: &Sequence,
        needed: &[(GroupId, TierRun)],
    ) -> Result<Option<u32>, Refusal> {
        let pool = self.tiers.serving(TierId::Host);
        let Some(pool) =
            pool.filter(|_| self.settings.halves_held_pages && self.roster.are_several())
        else {
            return Ok(None);
        };
        let max = u64::from(pool.capacity_pages() / 2);
        let held = self
            .sessions
            .get(engine)
            .map_or(0, |session| session.held().pages());
        let mut pages = 0;
        let mut in_host_memory = needed.iter().filter(|(_, run)| run.tier == TierId::Host);
        let beyond = in_host_memory.find(|(_, run)| {
            pages += u64::from(run.run.through());
            held + pages > max
        });
        match beyond {
            None => Ok(None),
            Some((_, run)) if sequence.model().is_plain() => Ok(Some(run.run.position)),
            Some(_) => Err(Refusal::Quota {
                limit: "half of the pages of host memory, the limit of one engine among several,",
                max,
                held,
                pages,
            }),
        }
    }
}

#[cfg(test)]
mod tests;
