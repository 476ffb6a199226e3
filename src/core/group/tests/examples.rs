//! Hits of named models, and the errors of contradictory groups.

use super::*;

/// The hit of a prompt with `tokens` tokens, of which the engine has `device_tokens`.
fn reach(groups: &Groups, tokens: u32, device_tokens: u32, present: &Table) -> Option<Hit> {
    let bounds = LookupBounds {
        hashes: tokens / groups.hash_tokens,
        device_tokens,
        limit_tokens: tokens - 1,
    };
    groups.reach(bounds, present)
}

/// The end of a hit, and the pages that it needs of each group.
fn pages(groups: &Groups, hit: Option<Hit>) -> (u32, Vec<(u32, u32)>) {
    let hit = hit.expect("a hit");
    let needed = groups
        .specs()
        .map(|(group, _)| groups.needed(group, hit))
        .map(|pages| (pages.start, pages.end))
        .collect();
    (hit.end_tokens(), needed)
}

#[test]
fn a_window_needs_its_last_pages() {
    let window = GroupKind::Window { tokens: 128 };
    let model = groups(32, 32, &[spec(GroupKind::Prefix, 32), spec(window, 32)]);
    let all = Table::full(&[8, 8]);
    let hit = reach(&model, 270, 0, &all);
    assert_eq!(pages(&model, hit), (256, vec![(0, 8), (4, 8)]));
    let hit = reach(&model, 270, 0, &all.clone().without(1, 6));
    assert_eq!(pages(&model, hit), (192, vec![(0, 6), (2, 6)]));
    let hit = reach(&model, 270, 64, &all);
    assert_eq!(pages(&model, hit), (256, vec![(2, 8), (4, 8)]));
}

#[test]
fn pages_of_two_sizes_have_hashes_of_one_unit() {
    let window = GroupKind::Window { tokens: 128 };
    let model = groups(32, 64, &[spec(GroupKind::Prefix, 32), spec(window, 64)]);
    let hit = reach(&model, 270, 0, &Table::full(&[8, 4]));
    assert_eq!(pages(&model, hit), (256, vec![(0, 8), (2, 4)]));
    let named = [2, 3].map(|page| model.hash_index(GroupId(1), page));
    assert_eq!(named, [5, 7]);
    assert_eq!(model.hash_index(GroupId(0), 7), 7);
}

#[test]
fn a_state_is_needed_at_the_end_only() {
    let model = groups(
        528,
        528,
        &[spec(GroupKind::State, 528), spec(GroupKind::Prefix, 528)],
    );
    let all = Table::full(&[5, 5]);
    let hit = reach(&model, 3000, 0, &all);
    assert_eq!(pages(&model, hit), (2640, vec![(4, 5), (0, 5)]));
    assert_eq!(model.hash_index(GroupId(0), 4), 4);
    let hit = reach(&model, 3000, 0, &all.only(0, &[1]));
    assert_eq!(pages(&model, hit), (1056, vec![(1, 2), (0, 2)]));
}

#[test]
fn a_chunk_group_needs_its_last_chunk() {
    let chunk = GroupKind::Chunk { tokens: 64 };
    let model = groups(32, 32, &[spec(GroupKind::Prefix, 32), spec(chunk, 32)]);
    let all = Table::full(&[8, 8]);
    let hit = reach(&model, 257, 0, &all.clone().only(1, &[]));
    assert_eq!(pages(&model, hit), (256, vec![(0, 8), (8, 8)]));
    let hit = reach(&model, 256, 0, &all);
    assert_eq!(pages(&model, hit), (224, vec![(0, 7), (6, 7)]));
}

#[test]
fn draft_layers_need_the_page_behind_the_end() {
    let drafted = GroupSpec {
        eagle: true,
        ..spec(GroupKind::Prefix, 16)
    };
    let model = groups(16, 16, &[drafted]);
    let hit = reach(&model, 160, 0, &Table::full(&[10]));
    assert_eq!(pages(&model, hit), (144, vec![(0, 9)]));
    let hit = reach(&model, 160, 0, &Table::full(&[9]));
    assert_eq!(pages(&model, hit), (128, vec![(0, 8)]));
    let short = reach(&model, 31, 0, &Table::full(&[1]));
    assert_eq!(short, None, "the second page has no hash");
}

#[test]
fn no_hit_ends_at_or_before_the_tokens_of_the_engine() {
    let model = groups(16, 16, &[spec(GroupKind::Prefix, 16)]);
    let all = Table::full(&[4]);
    assert_eq!(reach(&model, 65, 64, &all), None);
    assert_eq!(reach(&model, 65, 80, &all), None);
    assert_eq!(reach(&model, 15, 0, &all), None);
    let hit = reach(&model, 65, 48, &all.only(0, &[3]));
    assert_eq!(pages(&model, hit), (64, vec![(3, 4)]));
}

#[test]
fn a_window_of_one_token_is_found_by_a_page_that_is_not_loaded() {
    let window = GroupKind::Window { tokens: 1 };
    let model = groups(16, 16, &[spec(window, 16)]);
    let hit = reach(&model, 65, 0, &Table::full(&[4])).expect("a hit");
    assert_eq!(model.needed(GroupId(0), hit), 3..4);
    assert_eq!(model.loaded(GroupId(0), hit), 4..4);
}

#[test]
fn an_engine_may_shorten_a_hit_to_another_boundary() {
    let window = GroupKind::Window { tokens: 128 };
    let model = groups(32, 64, &[spec(GroupKind::Prefix, 32), spec(window, 64)]);
    let hit = model.hit(64, 192).expect("a boundary");
    assert_eq!(model.loaded(GroupId(0), hit), 2..6);
    assert_eq!(model.loaded(GroupId(1), hit), 1..3);
    assert_eq!(model.hit(64, 64), None);
    assert_eq!(model.hit(64, 160), None, "160 is no multiple of 64");
}

#[test]
fn the_longest_sequence_does_not_overflow() {
    struct All;
    impl Presence for All {
        fn has(&self, _: GroupId, _: u32) -> bool {
            true
        }
        fn first_missing(&self, _: GroupId, _: Range<u32>) -> Option<u32> {
            None
        }
    }
    let drafted = |kind| GroupSpec {
        eagle: true,
        ..spec(kind, 1)
    };
    let window = GroupKind::Window { tokens: u32::MAX };
    let model = groups(1, 1, &[drafted(GroupKind::Prefix), spec(window, 1)]);
    let bounds = LookupBounds {
        hashes: u32::MAX,
        device_tokens: u32::MAX - 2 * HIT_TOKENS_MAX,
        limit_tokens: u32::MAX,
    };
    let hit = model.reach(bounds, &All).expect("a hit");
    assert_eq!(hit.end_tokens(), SEQUENCE_TOKENS_MAX);
}

#[test]
fn contradictions_name_field_value_and_remedy() {
    let prefix = spec(GroupKind::Prefix, 32);
    let drafted = |kind| GroupSpec {
        eagle: true,
        ..spec(kind, 32)
    };
    let cases: Vec<(u32, u32, Vec<GroupSpec>, &str)> = vec![
        (32, 32, vec![], "groups is 0: a model has 1 to 255"),
        (32, 32, vec![prefix; 256], "groups is 256: "),
        (0, 32, vec![prefix], "hash_tokens is 0: give"),
        (32, 0, vec![prefix], "hit_tokens is 0: give 1 to"),
        (
            32,
            HIT_TOKENS_MAX + 32,
            vec![prefix],
            "hit_tokens is 16777248: ",
        ),
        (
            32,
            32,
            vec![prefix, spec(GroupKind::Prefix, 0)],
            "page_tokens of group 1 is 0: give",
        ),
        (
            32,
            32,
            vec![spec(GroupKind::Window { tokens: 0 }, 32)],
            "window_tokens of group 0 is 0: give",
        ),
        (
            32,
            32,
            vec![spec(GroupKind::Chunk { tokens: 0 }, 32)],
            "chunk_tokens of group 0 is 0: give",
        ),
        (
            32,
            96,
            vec![spec(GroupKind::Prefix, 48)],
            "page_tokens of group 0 is 48, no multiple of hash_tokens (32): hash in units",
        ),
        (
            16,
            32,
            vec![prefix, spec(GroupKind::State, 64)],
            "hit_tokens is 32, no multiple of page_tokens of group 1 (64): align hits",
        ),
        (
            32,
            32,
            vec![drafted(GroupKind::State)],
            "eagle of group 0 is true, and its kind is state: ",
        ),
        (
            32,
            32,
            vec![drafted(GroupKind::Chunk { tokens: 64 })],
            "eagle of group 0 is true, and its kind is chunk: ",
        ),
    ];
    for (hash_tokens, hit_tokens, specs, expected) in cases {
        let error = Groups::new(hash_tokens, hit_tokens, specs).expect_err(expected);
        let error = error.to_string();
        assert!(error.starts_with(expected), "{error}");
    }
}
