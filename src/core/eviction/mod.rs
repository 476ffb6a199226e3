//! The order of eviction: which block loses pages next.
//!
//! Blocks are in one list, or, depending on the policy, in several: by number of uses or by priority. Each list is in the
//! order of the last touch. Limits on stored pages add an index of the blocks that share one.

mod arc;
mod list;
mod quota;

use std::collections::BTreeMap;

use kvferry_types::{DomainId, Fingerprint, NamespaceId, PRIORITIES, PRIORITY_DEFAULT, RuleId};

pub use arc::REMEMBERED_PAGES_MAX;
use arc::{AGAIN, Adaptive, ONCE};
use list::AgeList;
pub use list::BlockIndex;
pub(super) use list::{Place, Places};
use quota::Quotas;
pub use quota::RuleLimits;
pub(super) use quota::Share;

/// Which block is evicted first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum EvictionPolicy {
    /// The least recently used one.
    #[default]
    Lru,
    /// The least recently used one of the blocks that were used once, or of those that were used again, in a proportion
    /// that adapts to the pages that are stored again soon after their eviction. A block is used when it is stored,
    /// when a lookup finds it, and when a store finds its pages present.
    Arc,
    /// The least recently used one of those with the lowest priority.
    Priority,
}

impl EvictionPolicy {
    /// All policies.
    pub const ALL: [Self; 3] = [Self::Lru, Self::Arc, Self::Priority];

    /// The name in the text of a policy.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Arc => "arc",
            Self::Priority => "priority",
        }
    }
}

/// The order of eviction. See the module.
#[derive(Debug)]
pub(super) struct EvictionOrder {
    policy: EvictionPolicy,
    lists: Vec<AgeList>,
    /// Pages of the blocks of each list, those outside the order included.
    pages: Vec<u64>,
    arc: Adaptive,
    quotas: Option<Quotas>,
    touches: u64,
}

impl Default for EvictionOrder {
    fn default() -> Self {
        Self::new(EvictionPolicy::Lru, None, RuleLimits::new(), 0)
    }
}

impl EvictionOrder {
    /// An order without blocks, for a tier of this size, with the limit of each namespace and those of rules.
    pub(super) fn new(
        policy: EvictionPolicy,
        quota_pages: Option<u32>,
        rules: RuleLimits,
        capacity_pages: u32,
    ) -> Self {
        let lists = match policy {
            EvictionPolicy::Lru => 1,
            EvictionPolicy::Arc => 2,
            EvictionPolicy::Priority => PRIORITIES.into(),
        };
        Self {
            policy,
            lists: (0..lists).map(|_| AgeList::default()).collect(),
            pages: vec![0; lists],
            arc: Adaptive::new(capacity_pages),
            quotas: Quotas::new(quota_pages, rules),
            touches: 0,
        }
    }

    /// The place of a new block, as the most recently used one. The order does not have it yet, because its pages are
    /// being filled.
    pub(super) fn place_of_new(&mut self) -> Place {
        self.touches += 1;
        let list = match self.policy {
            EvictionPolicy::Lru | EvictionPolicy::Arc => ONCE,
            EvictionPolicy::Priority => PRIORITY_DEFAULT,
        };
        Place::new(list, self.touches)
    }

    /// Makes a block the most recently used one.
    pub(super) fn touch(&mut self, places: &mut impl Places, index: BlockIndex) {
        let is_in = places.place(index).is_in_order();
        if is_in && self.quotas.is_some() {
            self.unlist(places, index);
        }
        self.touches += 1;
        let touched = self.touches;
        self.list_of(places, index).touch(places, index, touched);
        if is_in && self.quotas.is_some() {
            self.enlist(places, index);
        }
    }

    /// Puts a block into the order, at the place of its last touch, or takes it out.
    pub(super) fn set_evictable(
        &mut self,
        places: &mut impl Places,
        index: BlockIndex,
        evictable: bool,
    ) {
        match (evictable, places.place(index).is_in_order()) {
            (true, false) => {
                self.list_of(places, index).insert(places, index);
                self.enlist(places, index);
            }
            (false, true) => {
                self.unlist(places, index);
                self.list_of(places, index).remove(places, index);
            }
            _ => {}
        }
    }

    /// A block was used once more: under ARC, it moves to the list of those that were used again.
    pub(super) fn note_use(&mut self, places: &mut impl Places, index: BlockIndex) {
        if self.policy == EvictionPolicy::Arc {
            self.move_to(places, index, AGAIN);
        }
    }

    /// Sets the priority of a block, up to the highest one. Has no effect under another policy.
    pub(super) fn set_priority(
        &mut self,
        places: &mut impl Places,
        index: BlockIndex,
        priority: u8,
    ) {
        if self.policy == EvictionPolicy::Priority {
            self.move_to(places, index, priority.min(PRIORITIES - 1));
        }
    }

    /// The next victim in the order. It may be held. With a share, the next victim of its blocks.
    pub(super) fn oldest(&self, places: &impl Places, share: Option<Share>) -> Option<BlockIndex> {
        if let (Some(share), Some(quotas)) = (share, &self.quotas) {
            return quotas.oldest(share, self.victims());
        }
        let mut lists = self.victims().map(|list| &self.lists[usize::from(list)]);
        lists.find_map(|list| list.oldest(places))
    }

    /// The lists, in the order in which they lose their blocks.
    fn victims(&self) -> impl Iterator<Item = u8> {
        let first = match self.policy {
            EvictionPolicy::Lru | EvictionPolicy::Priority => 0,
            EvictionPolicy::Arc => self.arc.victims(self.pages[usize::from(ONCE)]),
        };
        let count = u8::try_from(self.lists.len()).unwrap_or(u8::MAX);
        (0..count).map(move |at| (first + at) % count)
    }

    /// Pages that the rule of a namespace may still store within its limit; `None` if it has no limit.
    pub(super) fn room_of_rule(&self, namespace: NamespaceId) -> Option<u32> {
        self.quotas.as_ref()?.room_of_rule(namespace)
    }

    /// The shares of a namespace that these further pages bring above their limits: its own, and that of its rule.
    pub(super) fn exceeded(&self, namespace: NamespaceId, more: u32) -> [Option<Share>; 2] {
        let quotas = self.quotas.as_ref();
        quotas.map_or([None; 2], |quotas| quotas.exceeded(namespace, more))
    }

    /// The rules above their limits.
    pub(super) fn above(&self) -> Vec<Share> {
        let quotas = self.quotas.as_ref();
        quotas.map_or_else(Vec::new, |quotas| quotas.above().collect())
    }

    /// Counts pages that a block gets.
    pub(super) fn add_pages(&mut self, place: Place, namespace: NamespaceId, count: u32) {
        self.pages[usize::from(place.list())] += u64::from(count);
        if let Some(quotas) = &mut self.quotas {
            quotas.add_pages(namespace, count);
        }
    }

    /// Counts pages that a block loses.
    pub(super) fn remove_pages(&mut self, place: Place, namespace: NamespaceId, count: u32) {
        self.pages[usize::from(place.list())] -= u64::from(count);
        if let Some(quotas) = &mut self.quotas {
            quotas.remove_pages(namespace, count);
        }
    }

    /// Adapts to pages that are stored. Returns whether the first of them was evicted recently.
    pub(super) fn recall(
        &mut self,
        domain: DomainId,
        pages: impl Iterator<Item = Fingerprint>,
    ) -> bool {
        self.policy == EvictionPolicy::Arc && self.arc.recall(domain, pages)
    }

    /// Remembers pages that are evicted.
    pub(super) fn evicted(&mut self, place: Place, domain: DomainId, pages: &[Fingerprint]) {
        if self.policy == EvictionPolicy::Arc {
            for page in pages {
                self.arc.evicted(place.list(), domain, *page);
            }
        }
    }

    /// Forgets remembered pages beyond the capacity. Called after each store.
    pub(super) fn trim(&mut self) {
        if let [once, again] = self.pages[..] {
            self.arc.trim(once, again);
        }
    }

    /// Pages of the blocks in each list, for checks.
    pub(super) fn pages(&self) -> &[u64] {
        &self.pages
    }

    /// Pages of the namespaces of a rule with a limit; 0 without one.
    pub(super) fn pages_of_rule(&self, rule: RuleId) -> u32 {
        let quotas = self.quotas.as_ref();
        quotas.map_or(0, |quotas| quotas.pages_of_rule(rule))
    }

    /// The shares of a namespace that have limits, for checks.
    pub(super) fn shares(&self, namespace: NamespaceId) -> impl Iterator<Item = Share> {
        let quotas = self.quotas.as_ref();
        let shares = quotas.map_or([None; 2], |quotas| quotas.shares(namespace));
        shares.into_iter().flatten().map(|(share, _)| share)
    }

    /// Pages of each share, for checks; empty without limits.
    pub(super) fn used(&self) -> BTreeMap<Share, u32> {
        let quotas = self.quotas.as_ref();
        quotas.map_or_else(BTreeMap::new, |quotas| quotas.used().clone())
    }

    fn list_of(&mut self, places: &impl Places, index: BlockIndex) -> &mut AgeList {
        &mut self.lists[usize::from(places.place(index).list())]
    }

    fn move_to(&mut self, places: &mut impl Places, index: BlockIndex, list: u8) {
        let place = *places.place(index);
        if place.list() == list {
            return;
        }
        let pages = u64::from(places.pages(index));
        self.pages[usize::from(place.list())] -= pages;
        self.pages[usize::from(list)] += pages;
        let is_in = place.is_in_order();
        if is_in {
            self.unlist(places, index);
            self.list_of(places, index).remove(places, index);
        }
        places.place_mut(index).set_list(list);
        if is_in {
            self.list_of(places, index).insert(places, index);
            self.enlist(places, index);
        }
    }

    fn enlist(&mut self, places: &impl Places, index: BlockIndex) {
        if let Some(quotas) = &mut self.quotas {
            quotas.enlist(places, index);
        }
    }

    fn unlist(&mut self, places: &impl Places, index: BlockIndex) {
        if let Some(quotas) = &mut self.quotas {
            quotas.unlist(places, index);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::eviction::{EvictionPolicy, RuleLimits};
    use crate::index::shard_set::ShardSet;
    use crate::pool::policy::TierPolicy;
    use crate::pool::tests::{domain_of, sequence};
    use crate::pool::{BlockRun, Pool};
    use kvferry_types::{Ratio, Shard};

    /// A pool of 8 pages in blocks of up to 2, with this policy.
    struct Tier {
        pool: Pool,
        next: u64,
    }

    impl Tier {
        fn new(policy: &str) -> Self {
            let policy: TierPolicy = policy.parse().expect("a policy");
            let ratio = Ratio::new(2).expect("in bounds");
            Self {
                pool: Pool::new(8, ratio).with_policy(policy, RuleLimits::new()),
                next: 0,
            }
        }

        /// Stores the two pages of a sequence for a namespace.
        fn store(&mut self, namespace: u8, salt: u8) {
            let (mut reserved, mut evicted) = (Vec::new(), Vec::new());
            let room = self.pool.reserve(
                &domain_of(namespace),
                sequence(2, salt).view(),
                0,
                2,
                None,
                &mut self.next,
                &mut reserved,
                &mut evicted,
            );
            assert_eq!(room, 2);
            for piece in reserved {
                self.pool.start_filling(piece.transfer, ShardSet::first(1));
                assert_eq!(self.pool.ended(piece.transfer, Shard(0), true), Some(true));
            }
            assert_eq!(self.pool.check(), Ok(()));
        }

        fn runs(&self, namespace: u8, salt: u8) -> Vec<BlockRun> {
            let mut runs = Vec::new();
            let hashes = sequence(2, salt);
            self.pool
                .walk(&domain_of(namespace), hashes.view(), 0, &mut runs);
            runs
        }

        fn look_up(&mut self, namespace: u8, salt: u8) {
            let runs = self.runs(namespace, salt);
            self.pool.use_runs(&runs);
        }

        /// The sequences of a namespace that are found.
        fn found(&self, namespace: u8) -> Vec<u8> {
            let found = |salt: &u8| !self.runs(namespace, *salt).is_empty();
            (0..20).filter(found).collect()
        }
    }

    #[test]
    fn under_arc_blocks_that_were_used_again_outlive_a_scan() {
        for (policy, kept) in [
            ("eviction=lru", vec![]),
            ("eviction=arc", vec![0, 1]),
            ("eviction=arc,quota=1", vec![0, 1]),
        ] {
            let mut tier = Tier::new(policy);
            for salt in [0, 1] {
                tier.store(0, salt);
                tier.look_up(0, salt);
            }
            for salt in 2..12 {
                tier.store(0, salt);
            }
            let found = tier.found(0);
            let found: Vec<u8> = found.into_iter().filter(|salt| *salt < 2).collect();
            assert_eq!(found, kept, "{policy}");
        }
    }

    #[test]
    fn under_arc_a_page_that_is_stored_again_soon_counts_as_used_again() {
        for policy in ["eviction=arc", "eviction=arc,quota=1"] {
            let mut tier = Tier::new(policy);
            tier.store(0, 0);
            tier.look_up(0, 0);
            for salt in 1..5 {
                tier.store(0, salt);
            }
            assert_eq!(tier.found(0), [0, 2, 3, 4], "{policy}");
            tier.store(0, 1);
            tier.store(0, 5);
            tier.store(0, 6);
            assert!(tier.found(0).contains(&1), "{policy}: {:?}", tier.found(0));
        }
    }

    #[test]
    fn blocks_with_the_lowest_priority_are_evicted_first() {
        for policy in ["eviction=priority", "eviction=priority,quota=1"] {
            let mut tier = Tier::new(policy);
            for (salt, priority) in [(0, Some(7)), (1, None), (2, Some(0)), (3, Some(0))] {
                tier.store(0, salt);
                let run = tier.runs(0, salt)[0];
                if let Some(priority) = priority {
                    tier.pool.set_priority(run.block, priority);
                }
            }
            tier.look_up(0, 2);
            for (salt, found) in [(4, [0, 1, 2, 4]), (5, [0, 1, 4, 5]), (6, [0, 4, 5, 6])] {
                tier.store(0, salt);
                assert_eq!(tier.found(0), found, "{policy}");
            }
        }
    }

    #[test]
    fn a_namespace_above_its_quota_evicts_its_own_oldest_blocks() {
        let mut tier = Tier::new("quota=4");
        tier.store(1, 0);
        tier.store(2, 0);
        tier.store(2, 1);
        tier.store(2, 2);
        assert_eq!(tier.found(2), [0, 1, 2], "there was room beyond the quota");
        tier.look_up(2, 0);
        tier.store(2, 3);
        assert_eq!((tier.found(1), tier.found(2)), (vec![0], vec![0, 2, 3]));
        tier.store(1, 1);
        assert_eq!((tier.found(1), tier.found(2)), (vec![1], vec![0, 2, 3]));
    }

    #[test]
    fn a_policy_applies_to_the_blocks_that_a_pool_already_has() {
        let mut tier = Tier::new("");
        tier.store(1, 0);
        tier.store(2, 0);
        let policy = TierPolicy {
            eviction: EvictionPolicy::Arc,
            quota_pages: Some(2),
            ..TierPolicy::default()
        };
        tier.pool = tier.pool.with_policy(policy, RuleLimits::new());
        assert_eq!(tier.pool.check(), Ok(()));
        for salt in [1, 2, 3] {
            tier.store(2, salt);
        }
        assert_eq!((tier.found(1), tier.found(2)), (vec![0], vec![1, 2, 3]));
    }
}
