//! Which pages are stored.

use std::collections::BTreeSet;

use super::cases::{Case, Choices, random};
use super::*;

fn storable(
    groups: &Groups,
    group: u8,
    written: Written<'_>,
    retention: Retention<'_>,
    has: impl Fn(u32) -> bool,
) -> Vec<(u32, u32)> {
    let mut runs = Vec::new();
    groups.storable(GroupId(group), written, retention, has, &mut runs);
    runs.into_iter().map(|run| (run.start, run.end)).collect()
}

fn written(first_page: u32, tokens: u32) -> Written<'static> {
    Written {
        first_page,
        tokens,
        states: &[],
    }
}

#[test]
fn a_prefix_group_stores_whole_pages_without_holes() {
    let model = groups(32, 32, &[spec(GroupKind::Prefix, 32)]);
    let every = Retention::EVERY_BOUNDARY;
    assert_eq!(
        storable(&model, 0, written(2, 200), every, |_| true),
        [(2, 6)]
    );
    assert_eq!(
        storable(&model, 0, written(2, 200), every, |page| page != 4),
        [(2, 4)]
    );
    assert!(storable(&model, 0, written(6, 200), every, |_| true).is_empty());
}

#[test]
fn a_window_group_stores_the_pages_that_the_engine_holds() {
    let window = GroupKind::Window { tokens: 64 };
    let model = groups(32, 32, &[spec(window, 32)]);
    let held = |page| page >= 3 && page != 6;
    let runs = storable(&model, 0, written(0, 320), Retention::EVERY_BOUNDARY, held);
    assert_eq!(runs, [(3, 6), (7, 10)]);
    let tails = Retention {
        every_tokens: Some(128),
        ends: &[200, 224],
    };
    let runs = storable(&model, 0, written(0, 320), tails, |_| true);
    assert_eq!(runs, [(2, 4), (5, 8)], "of the ends 128, 224 and 256");
}

#[test]
fn pages_that_no_hit_needs_are_not_stored() {
    let every = Retention::EVERY_BOUNDARY;
    let window = GroupKind::Window { tokens: 17 };
    let model = groups(16, 64, &[spec(window, 16), spec(GroupKind::Prefix, 64)]);
    let runs = storable(&model, 0, written(0, 256), every, |_| true);
    assert_eq!(runs, [(3, 4), (7, 8), (11, 12), (15, 16)]);
    let chunk = GroupKind::Chunk { tokens: 64 };
    let model = groups(32, 32, &[spec(chunk, 32)]);
    let runs = storable(&model, 0, written(0, 256), every, |_| true);
    assert_eq!(
        runs,
        [(0, 1), (2, 3), (4, 5), (6, 7)],
        "a full chunk is never read again"
    );
}

#[test]
fn a_state_is_stored_at_the_boundaries_that_the_engine_names() {
    let model = groups(
        32,
        64,
        &[spec(GroupKind::State, 32), spec(GroupKind::Prefix, 64)],
    );
    let handed = Written {
        first_page: 2,
        tokens: 256,
        states: &[192, 64, 0, 128, 160, 192, 320],
    };
    let runs = storable(&model, 0, handed, Retention::EVERY_BOUNDARY, |_| false);
    assert_eq!(runs, [(3, 4), (5, 6)], "of the boundaries 128 and 192");
    let none = storable(
        &model,
        0,
        written(0, 256),
        Retention::EVERY_BOUNDARY,
        |_| true,
    );
    assert!(none.is_empty(), "a state is not known by its position");
}

/// A page of a window or chunk group is stored exactly if a hit with a kept end needs it, or if it lies behind such an
/// end and draft layers need it there.
#[test]
fn stored_pages_are_those_that_some_hit_needs() {
    let mut choices = Choices(random(3));
    for _ in 0..300 {
        let groups = Case::draw(&mut choices).groups;
        let tokens = 2 * groups.hit_tokens + choices.below(3 * groups.hit_tokens);
        let every_tokens = [None, Some(1), Some(2 * groups.hit_tokens)][choices.below(3) as usize];
        let listed = [1, 2, 3].map(|hits| hits * groups.hit_tokens);
        let ends = &listed[..choices.below(4) as usize];
        let retention = Retention { every_tokens, ends };
        let kept = |end: u32| {
            let regular = every_tokens.is_some_and(|every| end.is_multiple_of(every));
            end.is_multiple_of(groups.hit_tokens) && (regular || ends.contains(&end))
        };
        for (group, spec) in groups.specs() {
            let pages = tokens / spec.page_tokens;
            if !matches!(
                spec.kind,
                GroupKind::Window { .. } | GroupKind::Chunk { .. }
            ) {
                continue;
            }
            let mut expected = BTreeSet::new();
            for end in (1..=tokens + 2 * groups.hit_tokens).filter(|end| kept(*end)) {
                let hit = groups.hit(0, end).expect("a boundary");
                let behind = u32::from(spec.eagle);
                expected.extend(groups.needed(group, hit));
                expected.extend((0..behind).map(|page| end / spec.page_tokens + page));
            }
            expected.retain(|page| *page < pages);
            let runs = storable(&groups, group.0, written(0, tokens), retention, |_| true);
            let stored: BTreeSet<u32> = runs
                .into_iter()
                .flat_map(|(start, end)| start..end)
                .collect();
            assert_eq!(
                stored, expected,
                "{spec:?} {tokens} {retention:?} {groups:?}"
            );
        }
    }
}
