//! Limits on the stored pages of a namespace, and of all namespaces of one rule.
//!
//! A namespace above its limit evicts its own blocks for its stores, and those of others when it has none. The limit of a
//! rule protects the other namespaces: stores beyond it evict blocks of the rule alone, and stores of others evict the
//! blocks of rules above their limits first. Pages are stored beyond both limits while the tier has free places.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_types::{NamespaceId, RuleId};

use super::{BlockIndex, Places};

/// Most pages of the namespaces of each rule in one tier.
pub type RuleLimits = BTreeMap<RuleId, u32>;

/// Namespaces whose pages are counted together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Share {
    /// One namespace.
    Namespace(NamespaceId),
    /// All namespaces of a rule.
    Rule(RuleId),
}

/// The blocks and pages of each share that has a limit. A block takes about 40 bytes in each of its shares, of which it has
/// at most two; a share that has blocks takes as many.
#[derive(Debug)]
pub(super) struct Quotas {
    of_namespace: Option<u32>,
    of_rules: RuleLimits,
    used: BTreeMap<Share, u32>,
    /// Rules above their limits.
    above: BTreeSet<RuleId>,
    /// The blocks in the order of eviction, by share, list of the policy, and last touch.
    blocks: BTreeMap<(Share, u8, u64), BlockIndex>,
}

impl Quotas {
    /// Shares without blocks; `None` without limits.
    pub(super) fn new(of_namespace: Option<u32>, of_rules: RuleLimits) -> Option<Self> {
        (of_namespace.is_some() || !of_rules.is_empty()).then(|| Self {
            of_namespace,
            of_rules,
            used: BTreeMap::new(),
            above: BTreeSet::new(),
            blocks: BTreeMap::new(),
        })
    }

    /// The shares of a namespace that have limits, with these: its own, and that of its rule.
    pub(super) fn shares(&self, namespace: NamespaceId) -> [Option<(Share, u32)>; 2] {
        let own = self.of_namespace;
        let rule = namespace.rule();
        let of_rule = self.of_rules.get(&rule);
        [
            own.map(|limit| (Share::Namespace(namespace), limit)),
            of_rule.map(|limit| (Share::Rule(rule), *limit)),
        ]
    }

    /// The shares of a namespace that these further pages bring above their limits.
    pub(super) fn exceeded(&self, namespace: NamespaceId, more: u32) -> [Option<Share>; 2] {
        self.shares(namespace).map(|share| {
            let (share, limit) = share?;
            let used = self.used.get(&share).copied().unwrap_or(0);
            (used.saturating_add(more) > limit).then_some(share)
        })
    }

    /// The rules above their limits: up to [`NAMESPACE_RULES_MAX`](crate::NAMESPACE_RULES_MAX).
    pub(super) fn above(&self) -> impl Iterator<Item = Share> {
        self.above.iter().map(|rule| Share::Rule(*rule))
    }

    pub(super) fn add_pages(&mut self, namespace: NamespaceId, count: u32) {
        for (share, limit) in self.shares(namespace).into_iter().flatten() {
            let used = self.used.entry(share).or_default();
            *used += count;
            if let Share::Rule(rule) = share
                && *used > limit
            {
                self.above.insert(rule);
            }
        }
    }

    pub(super) fn remove_pages(&mut self, namespace: NamespaceId, count: u32) {
        for (share, limit) in self.shares(namespace).into_iter().flatten() {
            let Some(used) = self.used.get_mut(&share) else {
                continue;
            };
            *used -= count;
            if let Share::Rule(rule) = share
                && *used <= limit
            {
                self.above.remove(&rule);
            }
            if *used == 0 {
                self.used.remove(&share);
            }
        }
    }

    /// Pages of the namespaces of a rule with a limit; 0 without one.
    pub(super) fn pages_of_rule(&self, rule: RuleId) -> u32 {
        self.used.get(&Share::Rule(rule)).copied().unwrap_or(0)
    }

    /// Pages that the rule of a namespace may still store within its limit; `None` if it has no limit.
    pub(super) fn room_of_rule(&self, namespace: NamespaceId) -> Option<u32> {
        let [_, rule] = self.shares(namespace);
        let (share, limit) = rule?;
        let used = self.used.get(&share).copied().unwrap_or(0);
        Some(limit.saturating_sub(used))
    }

    /// The block of a share in these lists, the first of which loses its blocks first, that was touched first.
    pub(super) fn oldest(
        &self,
        share: Share,
        lists: impl Iterator<Item = u8>,
    ) -> Option<BlockIndex> {
        lists.into_iter().find_map(|list| {
            let all = (share, list, 0)..=(share, list, u64::MAX);
            self.blocks.range(all).next().map(|(_, index)| *index)
        })
    }

    pub(super) fn enlist(&mut self, places: &impl Places, index: BlockIndex) {
        let place = places.place(index);
        for (share, _) in self.shares(places.namespace(index)).into_iter().flatten() {
            let key = (share, place.list(), place.touched());
            self.blocks.insert(key, index);
        }
    }

    pub(super) fn unlist(&mut self, places: &impl Places, index: BlockIndex) {
        let place = places.place(index);
        for (share, _) in self.shares(places.namespace(index)).into_iter().flatten() {
            let key = (share, place.list(), place.touched());
            self.blocks.remove(&key);
        }
    }

    /// Pages of each share, for checks.
    pub(super) fn used(&self) -> &BTreeMap<Share, u32> {
        &self.used
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::eviction::EvictionPolicy;
    use crate::index::anchor::{AnchorKey, Domain};
    use crate::index::namespaces::{NamespaceRule, Namespaces};
    use crate::index::shard_set::ShardSet;
    use crate::pool::Pool;
    use crate::pool::policy::TierPolicy;
    use crate::pool::tests::sequence;
    use kvferry_types::{GroupId, PageRun, PerTier, Ratio, Shard};

    const PAGES: u32 = 12;

    /// A pool of 12 pages in blocks of up to 2, where the rule of the namespaces that begin with `n` has the limit
    /// `limits[n]`.
    struct Tier {
        pool: Pool,
        key: AnchorKey,
        next: u64,
    }

    impl Tier {
        fn new(eviction: EvictionPolicy, quota_pages: Option<u32>, limits: &[u32]) -> Self {
            let rule = |prefix| NamespaceRule {
                prefix: vec![prefix],
                users: [].into(),
                held_pages: None,
                stored_pages: PerTier::default(),
                secret: None,
            };
            let rules = (0..3).map(rule).collect();
            let key = AnchorKey::new([1; 32]).with_namespaces(Arc::new(Namespaces::new(rules)));
            let limits = limits.iter().enumerate();
            let limits = limits.map(|(at, pages)| (key.rule(&[at as u8]), *pages));
            let policy = TierPolicy {
                eviction,
                quota_pages,
                ..TierPolicy::default()
            };
            let pool = Pool::new(PAGES, Ratio::new(2).expect("in bounds"));
            Self {
                pool: pool.with_policy(policy, limits.collect()),
                key,
                next: 0,
            }
        }

        fn domain(&self, namespace: &[u8]) -> Domain {
            Domain::new(&self.key, namespace, &[0; 16], GroupId(0))
        }

        /// Stores the two pages of a sequence. Returns whether there was room, and the namespaces that lost pages for it.
        fn store(&mut self, namespace: &[u8], salt: u8) -> (bool, Vec<NamespaceId>) {
            self.store_pages(namespace, salt, 2)
        }

        fn store_pages(
            &mut self,
            namespace: &[u8],
            salt: u8,
            pages: u32,
        ) -> (bool, Vec<NamespaceId>) {
            let before: Vec<_> = self.pool.view().collect();
            let before: Vec<(PageRun, NamespaceId)> = before
                .iter()
                .map(|block| {
                    let count = block.ready;
                    let start = block.start;
                    (PageRun { start, count }, block.domain.namespace())
                })
                .collect();
            let (mut reserved, mut evicted) = (Vec::new(), Vec::new());
            let room = self.pool.reserve(
                &self.domain(namespace),
                sequence(pages, salt).view(),
                0,
                pages,
                None,
                &mut self.next,
                &mut reserved,
                &mut evicted,
            );
            for piece in reserved {
                self.pool.start_filling(piece.transfer, ShardSet::first(1));
                assert_eq!(self.pool.ended(piece.transfer, Shard(0), true), Some(true));
            }
            assert_eq!(self.pool.check(), Ok(()));
            let owner = |place: u32| {
                let mut runs = before.iter();
                let found =
                    runs.find(|(run, _)| (run.start..run.start + run.count).contains(&place));
                found.expect("a page that was stored").1
            };
            (
                room == pages,
                evicted.iter().map(|run| owner(run.start)).collect(),
            )
        }

        fn used(&self, namespace: &[u8]) -> u32 {
            let rule = self.key.namespace(namespace).rule();
            let blocks = self.pool.view();
            let of_rule = blocks.filter(|block| block.domain.namespace().rule() == rule);
            of_rule.map(|block| block.ready).sum()
        }
    }

    #[test]
    fn the_namespaces_of_a_rule_share_its_limit() {
        let mut tier = Tier::new(EvictionPolicy::Lru, None, &[4]);
        for (name, salt) in [(1, 0), (2, 1), (3, 2)] {
            assert_eq!(tier.store(&[0, name], salt), (true, vec![]));
        }
        assert_eq!(tier.used(&[0]), 6, "there was room beyond the limit");
        for salt in 3..6 {
            assert_eq!(tier.store(&[9], salt), (true, vec![]));
        }
        // The tier is full. The oldest blocks are of the rule above its limit.
        let first = tier.key.namespace(&[0, 1]);
        assert_eq!(tier.store(&[9], 6), (true, vec![first]));
        assert_eq!(tier.used(&[0]), 4);
        // At its limit, the rule evicts a block of its own, although it is not the oldest one without the rule.
        let second = tier.key.namespace(&[0, 2]);
        assert_eq!(tier.store(&[0, 1], 7), (true, vec![second]));
        // No rule is above its limit: the order alone decides.
        let third = tier.key.namespace(&[0, 3]);
        assert_eq!(tier.store(&[9], 8), (true, vec![third]));
    }

    #[test]
    fn a_rule_above_its_limit_loses_its_pages_before_older_ones_of_others() {
        let mut tier = Tier::new(EvictionPolicy::Lru, None, &[2, 8]);
        for salt in 0..3 {
            assert_eq!(tier.store(&[1], salt), (true, vec![]));
        }
        for salt in 3..6 {
            assert_eq!(tier.store(&[0], salt), (true, vec![]));
        }
        let above = tier.key.namespace(&[0]);
        assert_eq!(tier.store(&[9], 6), (true, vec![above]));
        assert_eq!(tier.store(&[9], 7), (true, vec![above]));
        assert_eq!((tier.used(&[0]), tier.used(&[1])), (2, 6));
        let within = tier.key.namespace(&[1]);
        assert_eq!(tier.store(&[9], 8), (true, vec![within]));
    }

    #[test]
    fn a_rule_at_its_limit_evicts_no_page_of_others_when_its_own_are_held() {
        let mut tier = Tier::new(EvictionPolicy::Lru, None, &[2]);
        for salt in 0..5 {
            assert_eq!(tier.store(&[9], salt), (true, vec![]));
        }
        assert_eq!(tier.store(&[0], 5), (true, vec![]));
        let mut runs = Vec::new();
        let of_rule = tier.domain(&[0]);
        tier.pool
            .walk(&of_rule, sequence(2, 5).view(), 0, &mut runs);
        let pins: Vec<_> = runs
            .iter()
            .map(|run| tier.pool.pin(run.block, run.through()))
            .collect();
        assert_eq!(tier.store(&[0], 6), (false, vec![]));
        for pin in pins {
            tier.pool.unpin(pin);
        }
        let own = tier.key.namespace(&[0]);
        assert_eq!(tier.store(&[0], 6), (true, vec![own]));
    }

    #[test]
    fn a_rule_stores_up_to_a_limit_that_is_less_than_a_block() {
        let mut tier = Tier::new(EvictionPolicy::Lru, None, &[1]);
        for salt in 0..6 {
            assert_eq!(tier.store(&[9], salt), (true, vec![]));
        }
        let other = tier.key.namespace(&[9]);
        assert_eq!(tier.store(&[0], 6), (false, vec![other]));
        assert_eq!(tier.used(&[0]), 1);
    }

    #[test]
    fn a_rule_takes_the_places_that_are_free_before_those_of_others() {
        let mut tier = Tier::new(EvictionPolicy::Lru, None, &[1, 11]);
        for (salt, pages) in (0..).zip([2, 2, 2, 2, 2, 1]) {
            assert_eq!(tier.store_pages(&[1], salt, pages), (true, vec![]));
        }
        assert_eq!(tier.store(&[0], 6), (false, vec![]));
        assert_eq!([tier.used(&[0]), tier.used(&[1])], [1, 11]);
    }

    #[test]
    fn the_limit_of_a_namespace_decides_within_its_rule() {
        let mut tier = Tier::new(EvictionPolicy::Lru, Some(2), &[6]);
        for (name, salt) in [(1, 0), (2, 1), (2, 2)] {
            assert_eq!(tier.store(&[0, name], salt), (true, vec![]));
        }
        for salt in 3..6 {
            assert_eq!(tier.store(&[9, salt], salt), (true, vec![]));
        }
        let second = tier.key.namespace(&[0, 2]);
        assert_eq!(tier.store(&[0, 2], 6), (true, vec![second]));
    }

    proptest! {
        #[test]
        fn rules_within_their_limits_lose_nothing_where_the_limits_fit_the_tier(
            limits in prop::collection::vec(1_u32..=PAGES / 3, 3),
            eviction in prop::sample::select(&EvictionPolicy::ALL[..]),
            stores in prop::collection::vec((0_u8..3, 0_u8..3, 0_u8..40), 1..80),
        ) {
            let mut tier = Tier::new(eviction, None, &limits);
            for (rule, name, salt) in stores {
                let within = |tier: &Tier, of: u8| tier.used(&[of]) <= limits[usize::from(of)];
                let before: Vec<bool> = (0..3).map(|of| within(&tier, of)).collect();
                let (_, lost) = tier.store(&[rule, name], salt);
                let ids: Vec<RuleId> = (0..3).map(|of| tier.key.rule(&[of])).collect();
                for namespace in lost {
                    let of = ids.iter().position(|id| *id == namespace.rule());
                    let of = of.expect("a rule");
                    let own = of == usize::from(rule);
                    prop_assert!(own || !before[of], "rule {of} lost pages to rule {rule}");
                    prop_assert!(own || within(&tier, rule), "rule {rule} took pages of rule {of}");
                }
            }
        }
    }
}
