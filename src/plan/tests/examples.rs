//! Examples with numbers that can be checked by hand.

use kvferry_types::{Attention, TensorRole};

use super::model::{Group, Inner, Tensor, heads_first, source, target, tokens_first};
use crate::{Piece, Plan, Side, plan, readers};

/// Source rank, first head there, first head here, and number of heads, by the offsets of heads of one byte in pages of
/// one token.
fn head_runs(heads: u32, sources: u16, targets: u16, rank: u16) -> Vec<(u16, u64, u64, u64)> {
    let model = [Group::of(heads_first(heads, 1))];
    let plan = plan(
        &source(&model, sources, 1),
        &target(&model, targets, 1),
        rank,
    )
    .expect("a plan");
    let fetches = plan.groups[0].fetches.iter();
    let runs = fetches.flat_map(|fetch| {
        let pieces = fetch.pieces.iter();
        pieces.map(|piece| {
            (
                fetch.source_rank,
                piece.source_offset,
                piece.target_offset,
                piece.bytes * piece.count,
            )
        })
    });
    runs.collect()
}

fn pieces(plan: &Plan) -> Vec<(u16, Piece)> {
    let fetches = plan.groups.iter().flat_map(|group| &group.fetches);
    let pieces =
        fetches.flat_map(|fetch| fetch.pieces.iter().map(|piece| (fetch.source_rank, *piece)));
    pieces.collect()
}

/// `(page, offset)` at source and target, bytes, count, and steps.
fn piece(from: (u32, u64), to: (u32, u64), bytes: u64, count: u64, steps: (u64, u64)) -> Piece {
    Piece {
        source_page: from.0,
        source_offset: from.1,
        target_page: to.0,
        target_offset: to.1,
        bytes,
        count,
        source_step: steps.0,
        target_step: steps.1,
    }
}

#[test]
fn heads_that_neither_number_of_ranks_shares_evenly_come_from_two_ranks() {
    let runs = |rank| head_runs(12, 3, 4, rank);
    assert_eq!(runs(0), [(0, 0, 0, 3)]);
    assert_eq!(runs(1), [(0, 3, 0, 1), (1, 0, 1, 2)]);
    assert_eq!(runs(2), [(1, 2, 0, 2), (2, 0, 2, 1)]);
    assert_eq!(runs(3), [(2, 1, 0, 3)]);
}

#[test]
fn heads_that_ranks_share_come_from_the_nearest_of_them() {
    let one = [
        (0, 0, 0, 1),
        (2, 0, 1, 1),
        (4, 0, 2, 1),
        (6, 0, 3, 1),
        (8, 0, 4, 1),
    ];
    assert_eq!(head_runs(5, 10, 1, 0), one);
    for rank in 0..10 {
        assert_eq!(head_runs(5, 5, 10, rank), [(rank / 2, 0, 0, 1)]);
        assert_eq!(head_runs(5, 10, 10, rank), [(rank, 0, 0, 1)]);
    }
}

#[test]
fn shards_are_fetched_once() {
    let model = [Group::of(heads_first(5, 1))];
    let shards = |side: Side| side.shards(5).expect("as many as heads");
    let (from, to) = (source(&model, 5, 1), shards(target(&model, 10, 1)));
    let fetched = readers(&from, &to).expect("plans");
    assert_eq!(fetched, [[0], [1], [2], [3], [4]]);
    let ranks = readers(&from, &target(&model, 10, 1)).expect("plans");
    assert_eq!(ranks, [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]);
    let both = shards(source(&model, 10, 1));
    assert_eq!(
        readers(&both, &to).expect("plans"),
        [[0], [1], [2], [3], [4]]
    );
}

#[test]
fn small_pages_are_joined_head_by_head() {
    let (small, large) = (heads_first(12, 512), heads_first(12, 512));
    let (from, to) = (
        source(&[Group::of(small)], 3, 16),
        target(&[Group::of(large)], 4, 48),
    );
    let made = plan(&from, &to, 1).expect("a plan");
    // Head 3 of rank 0, and heads 0 and 1 of rank 1.
    let mut found = pieces(&made);
    assert_eq!(
        found.drain(..3).map(|(rank, _)| rank).collect::<Vec<u16>>(),
        [0; 3]
    );
    let steps = (8192, 24576);
    let expected = [0, 1, 2].map(|page| {
        (
            1,
            piece(
                (page, 0),
                (0, 24576 + u64::from(page) * 8192),
                8192,
                2,
                steps,
            ),
        )
    });
    assert_eq!(found, expected);
    assert_eq!(made.groups[0].period_tokens(), 48);
    assert_eq!(made.groups[0].target_pages(100), 0..2);
    assert_eq!(made.groups[0].source_pages(0..2), 0..6);
}

#[test]
fn heads_of_joined_pages_have_the_steps_of_both_sides() {
    let model = [Group::of(heads_first(12, 512))];
    let made = plan(&source(&model, 3, 16), &target(&model, 4, 48), 2).expect("a plan");
    let found = pieces(&made);
    // Heads 2 and 3 of rank 1 to heads 0 and 1.
    let expected = [0, 1, 2].map(|page| {
        (
            1,
            piece(
                (page, 16384),
                (0, u64::from(page) * 8192),
                8192,
                2,
                (8192, 24576),
            ),
        )
    });
    assert_eq!(found[..3], expected);
}

#[test]
fn large_pages_are_split_head_by_head() {
    let model = [Group::of(heads_first(12, 512))];
    let made = plan(&source(&model, 3, 48), &target(&model, 4, 16), 3).expect("a plan");
    let expected = [0, 1, 2].map(|page| {
        let from = 24576 + u64::from(page) * 8192;
        (2, piece((0, from), (page, 0), 8192, 3, (24576, 8192)))
    });
    assert_eq!(pieces(&made), expected);
    assert_eq!(made.groups[0].target_pages(70), 0..4);
    assert_eq!(made.groups[0].source_pages(0..4), 0..2);
}

#[test]
fn tokens_before_heads_are_copied_token_by_token() {
    let model = [Group::of(tokens_first(12, 512))];
    let made = plan(&source(&model, 3, 16), &target(&model, 4, 16), 3).expect("a plan");
    assert_eq!(
        pieces(&made),
        [(2, piece((0, 512), (0, 0), 1536, 16, (2048, 1536)))]
    );
}

#[test]
fn equal_sides_copy_whole_pages() {
    let tensors = vec![
        (TensorRole::K, heads_first(8, 64)),
        (TensorRole::V, tokens_first(8, 64)),
    ];
    let model = [Group {
        layers: 5,
        tensors,
        ..Group::of(heads_first(8, 64))
    }];
    let made = plan(&source(&model, 4, 16), &target(&model, 4, 16), 2).expect("a plan");
    let bytes = 5 * 2 * 2 * 16 * 64;
    assert_eq!(
        pieces(&made),
        [(2, piece((0, 0), (0, 0), bytes, 1, (0, 0)))]
    );
    assert_eq!(made.hash_tokens, Some(1));
}

#[test]
fn planes_of_keys_and_values_inside_a_head_move_with_it() {
    let planes = vec![
        Inner::Heads,
        Inner::Other(2),
        Inner::Tokens,
        Inner::Other(64),
    ];
    let model = [Group::of(Tensor::Heads(4, planes))];
    let whole = plan(&source(&model, 1, 16), &target(&model, 2, 16), 1).expect("a plan");
    assert_eq!(
        pieces(&whole),
        [(0, piece((0, 4096), (0, 0), 4096, 1, (0, 0)))]
    );
    // With other pages each plane has runs of its own.
    let made = plan(&source(&model, 1, 16), &target(&model, 2, 32), 1).expect("a plan");
    assert_eq!(made.groups[0].fetches[0].pieces.len(), 4);
}

#[test]
fn a_latent_comes_from_the_nearest_rank_and_a_state_from_those_that_hold_its_rows() {
    let latent = Group::of(Tensor::Whole(vec![Inner::Tokens, Inner::Other(576)]));
    let state = Group {
        attention: Attention::State,
        tensors: vec![(TensorRole::State, Tensor::Parts(vec![(12, 10), (24, 3)]))],
        ..latent.clone()
    };
    let model = [latent, state];
    let made = plan(&source(&model, 4, 16), &target(&model, 2, 16), 1).expect("a plan");
    let bytes = 16 * 576;
    assert_eq!(
        made.groups[0].fetches[0].pieces,
        [piece((0, 0), (0, 0), bytes, 1, (0, 0))]
    );
    assert_eq!(made.groups[0].fetches[0].source_rank, 2);
    let [second, third] = &made.groups[1].fetches[..] else {
        panic!("two ranks")
    };
    assert_eq!((second.source_rank, third.source_rank), (2, 3));
    // On a source rank 3 rows of 10 bytes, then 6 of 3; on a target rank 6 rows, then 12.
    let first = [
        piece((0, 0), (0, 0), 30, 1, (0, 0)),
        piece((0, 30), (0, 60), 18, 1, (0, 0)),
    ];
    assert_eq!(second.pieces, first);
    let further = [
        piece((0, 0), (0, 30), 30, 1, (0, 0)),
        piece((0, 30), (0, 78), 18, 1, (0, 0)),
    ];
    assert_eq!(third.pieces, further);
    assert_eq!(made.groups[1].target_pages(100), 5..6);
    assert_eq!(made.groups[1].target_pages(15), 0..0);
}

#[test]
fn a_window_takes_its_last_pages_from_the_start_of_a_period() {
    let model = [Group {
        attention: Attention::SlidingWindow,
        window_tokens: 100,
        ..Group::of(heads_first(4, 8))
    }];
    let made = plan(&source(&model, 1, 16), &target(&model, 1, 16), 0).expect("a plan");
    // 7 pages of the window, and the one in which it begins.
    assert_eq!(made.groups[0].target_pages(1000), 54..62);
    assert_eq!(made.groups[0].target_pages(60), 0..3);
    let split = plan(&source(&model, 1, 64), &target(&model, 1, 16), 0).expect("a plan");
    assert_eq!(split.groups[0].target_pages(1000), 52..62);
    assert_eq!(split.groups[0].source_pages(52..62), 13..16);
}
