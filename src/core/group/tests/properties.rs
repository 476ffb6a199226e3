//! The rules against the oracle, for random pages.

use std::cell::Cell;

use proptest::prelude::*;

use super::cases::{Case, Choices, random};
use super::*;

/// Compares the end and the pages of a hit with the oracle. Returns the end.
fn check(case: &Case) -> Option<u32> {
    let Case {
        groups,
        bounds,
        present,
    } = case;
    let hit = groups.reach(*bounds, present);
    let end = hit.map(Hit::end_tokens);
    assert_eq!(end, oracle::reach(groups, *bounds, present), "{case:?}");
    for (group, spec) in groups.specs() {
        let Some(hit) = hit else { break };
        let needed = groups.needed(group, hit);
        assert!(
            needed.clone().all(|page| present.has(group, page)),
            "{case:?}"
        );
        let exact = |page: u32| {
            let missing = present.clone().without(usize::from(group.0), page as usize);
            groups.reach(*bounds, &missing).map(Hit::end_tokens) != end
        };
        assert!(needed.clone().all(exact), "{case:?}");
        let hashes = bounds.hashes as usize;
        assert!(
            needed
                .clone()
                .all(|page| groups.hash_index(group, page) < hashes)
        );
        assert!(needed.is_empty() || needed.end * spec.page_tokens == hit.end_tokens());
    }
    end
}

proptest! {
    #[test]
    fn a_hit_is_the_longest_that_every_group_can_continue_at(choices in prop::collection::vec(any::<u32>(), 0..300)) {
        let mut choices = choices.into_iter();
        check(&Case::draw(&mut Choices(|| choices.next().unwrap_or(0))));
    }
}

#[test]
fn a_hundred_thousand_random_sets_of_pages_agree_with_the_oracle() {
    let mut choices = Choices(random(1));
    let (mut hits, mut shortened, mut beyond_device, mut drafted) = (0, 0, 0, 0);
    for _ in 0..100_000 {
        let case = Case::draw(&mut choices);
        let Some(end) = check(&case) else { continue };
        hits += 1;
        let groups = &case.groups;
        let highest = case.bounds.limit_tokens / groups.hit_tokens * groups.hit_tokens;
        shortened += u32::from(end < highest);
        beyond_device += u32::from(case.bounds.device_tokens > 0);
        drafted += u32::from(groups.specs.iter().any(|spec| spec.eagle));
    }
    // The cases must not be trivial.
    for (name, count) in [
        ("hits", hits),
        ("shortened", shortened),
        ("beyond_device", beyond_device),
        ("drafted", drafted),
    ] {
        assert!(count > 5000, "{name}: {count}");
    }
}

/// Counts how often pages are examined.
struct Counted<'a> {
    present: &'a Table,
    examined: Cell<u32>,
}

impl Presence for Counted<'_> {
    fn has(&self, group: GroupId, page: u32) -> bool {
        self.examined.set(self.examined.get() + 1);
        self.present.has(group, page)
    }
}

#[test]
fn the_cost_is_linear_in_the_pages() {
    let mut choices = Choices(random(2));
    for _ in 0..10_000 {
        let case = Case::draw(&mut choices);
        let counted = Counted {
            present: &case.present,
            examined: Cell::new(0),
        };
        let _hit = case.groups.reach(case.bounds, &counted);
        let pages: usize = case.present.0.iter().map(Vec::len).sum();
        assert!(counted.examined.get() as usize <= 3 * pages, "{case:?}");
    }
}
