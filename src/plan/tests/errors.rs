//! What no plan is made from, and the text that says why.

use kvferry_types::{Attention, GroupMemory, Registration, Slices, TensorRole, TensorView};

use super::model::{Group, Inner, Tensor, heads_first, registration, tokens_first};
use crate::{PlanError, PlanSide, Side, plan};

type Change = fn(&mut Registration);

fn model() -> [Group; 1] {
    [Group::of(heads_first(8, 64))]
}

/// The error of a plan for rank 0 between 2 ranks with pages of 16 tokens, and 4 ranks with pages of 32, after a change
/// of the target.
fn refused(groups: &[Group], change: impl Fn(&mut Registration)) -> String {
    let mut target = registration(groups, 4, 32);
    change(&mut target);
    made(&registration(groups, 2, 16), &target)
        .expect_err("refused")
        .to_string()
}

fn made(source: &Registration, target: &Registration) -> Result<crate::Plan, PlanError> {
    let (source, target) = (
        Side::of(PlanSide::Source, source)?,
        Side::of(PlanSide::Target, target)?,
    );
    plan(&source, &target, 0)
}

fn group(registration: &mut Registration) -> &mut GroupMemory {
    &mut registration.groups[0]
}

fn tensor(registration: &mut Registration) -> &mut TensorView {
    &mut group(registration).tensors[0]
}

#[test]
fn the_sides_of_these_tests_have_a_plan() {
    assert!(
        made(
            &registration(&model(), 2, 16),
            &registration(&model(), 4, 32)
        )
        .is_ok()
    );
}

#[test]
fn slices_with_a_later_word_have_no_plan_even_between_equal_shapes() {
    let (known, mut later) = (registration(&model(), 2, 16), registration(&model(), 2, 16));
    tensor(&mut later).slices = Some(Slices::Other);
    for (source, target, side) in [
        (&known, &later, "target"),
        (&later, &known, "source"),
        (&later, &later, "source"),
    ] {
        let error = made(source, target).expect_err("refused").to_string();
        let text = format!(
            "slices at the {side} has a word that this version does not know: no plan is made"
        );
        assert!(error.ends_with(&text), "{error}");
    }
    // Without the word, pages of equal engines are copied as they are.
    tensor(&mut later).slices = None;
    assert!(made(&later, &later).is_ok());
}

#[test]
fn a_difference_is_named_with_both_values() {
    let said = |change: fn(&mut Registration)| refused(&model(), change);
    let cases: [(&str, Change); 8] = [
        (
            "content is 6d6f64656c at the source and 6f74686572 at the target: use the same model, weights and dtype on \
             both sides",
            |target| target.content = b"other".to_vec(),
        ),
        (
            "groups is 1 at the source and 2 at the target: plans are made between engines of one model",
            |target| target.groups.push(target.groups[0].clone()),
        ),
        (
            "group 0: attention is full attention at the source and a sliding window at the target: plans are made \
             between engines of one model",
            |target| group(target).attention = Attention::SlidingWindow,
        ),
        (
            "group 0: window_tokens is 0 at the source and 9 at the target: plans are made between engines of one model",
            |target| group(target).window_tokens = 9,
        ),
        (
            "group 0: layers is 1 at the source and 2 at the target: both sides hold all layers of the model: no \
             pipeline parallelism",
            |target| group(target).layers = 2,
        ),
        (
            "group 0, layer 0, v: layer and role is 0 k at the source and 0 v at the target: plans are made between \
             engines of one model",
            |target| tensor(target).role = TensorRole::V,
        ),
        (
            "group 0, layer 0, k: the target has head_axis 3, but it is an axis of the shape beside page_axis",
            |target| head_axis(tensor(target), 3),
        ),
        (
            "group 0, layer 0, k: the target has head_axis 1, but token_axis is another axis",
            |target| head_axis(tensor(target), 1),
        ),
    ];
    for (expected, change) in cases {
        assert_eq!(said(change), expected);
    }
}

fn head_axis(view: &mut TensorView, axis: u32) {
    if let Some(Slices::Heads { head_axis, .. }) = &mut view.slices {
        *head_axis = axis;
    }
}

#[test]
fn other_heads_sizes_and_orders_are_refused() {
    let between = |target: Group| {
        let (source, target) = (
            registration(&model(), 2, 16),
            registration(&[target], 4, 16),
        );
        made(&source, &target).expect_err("refused").to_string()
    };
    assert_eq!(
        between(Group::of(heads_first(16, 64))),
        "group 0, layer 0, k: kv_heads is 8 at the source and 16 at the target: plans are made between engines of one \
         model"
    );
    assert_eq!(
        between(Group::of(heads_first(8, 32))),
        "group 0, layer 0, k: bytes of a head and token is [64] at the source and [32] at the target: plans are made \
         between engines of one model and dtype"
    );
    assert_eq!(
        between(Group::of(tokens_first(8, 64))),
        "group 0, layer 0, k: order of the axes in memory is heads, tokens, other at the source and tokens, heads, \
         other at the target: start both engines with one KV layout"
    );
    let latent = Tensor::Whole(vec![Inner::Tokens, Inner::Other(64)]);
    assert_eq!(
        between(Group::of(latent)),
        "group 0, layer 0, k: slices is heads at the source and whole at the target: plans are made between engines of \
         one model"
    );
}

#[test]
fn one_head_of_a_rank_has_no_order() {
    // 8 ranks have a head each, so that both orders are the same bytes.
    let (heads, tokens) = (
        [Group::of(heads_first(8, 64))],
        [Group::of(tokens_first(8, 64))],
    );
    assert!(made(&registration(&heads, 8, 16), &registration(&tokens, 4, 16)).is_ok());
    assert!(made(&registration(&heads, 4, 16), &registration(&tokens, 4, 16)).is_err());
}

#[test]
fn sizes_of_pages_must_divide_each_other() {
    let made = made(
        &registration(&model(), 2, 16),
        &registration(&model(), 4, 24),
    );
    assert_eq!(
        made.expect_err("refused").to_string(),
        "group 0: engine_page_tokens is 16 at the source and 24 at the target: one of them must divide the other: start \
         both engines with one page size"
    );
}

#[test]
fn pages_of_a_state_have_one_size_and_equal_parts() {
    let state = |parts: &[(u32, u64)]| {
        [Group {
            attention: Attention::State,
            ..Group::of(Tensor::Parts(parts.to_vec()))
        }]
    };
    let of = |parts: &[(u32, u64)], ranks, tokens| registration(&state(parts), ranks, tokens);
    let said = |source: &Registration, target: &Registration| {
        made(source, target).expect_err("refused").to_string()
    };
    assert_eq!(
        said(&of(&[(8, 4)], 2, 16), &of(&[(8, 4)], 2, 32)),
        "group 0: engine_page_tokens is 16 at the source and 32 at the target: pages of a state are neither split nor \
         joined"
    );
    assert!(said(&of(&[(8, 4)], 2, 16), &of(&[(8, 8)], 2, 16)).contains("parts is [StatePart"));
    assert_eq!(
        said(&of(&[(8, 4)], 2, 16), &of(&[(8, 4)], 3, 16)),
        "group 0, layer 0, k: the target has dim of a part 8 and tp_size 3, of which neither divides the other: its \
         ranks hold unequal slices, which no plan covers"
    );
    let mut short = of(&[(8, 4)], 2, 16);
    tensor(&mut short).slices = Some(Slices::Parts { parts: Vec::new() });
    assert_eq!(
        said(&of(&[(8, 4)], 2, 16), &short),
        "group 0, layer 0, k: the target has page_bytes 16, but its parts have 0 bytes on a rank"
    );
    tensor(&mut short).slices = Some(Slices::Whole { token_axis: 0 });
    assert!(
        said(&of(&[(8, 4)], 2, 16), &short)
            .contains("a page of a state has no tokens: name its parts")
    );
    let mut parts = registration(&model(), 2, 16);
    tensor(&mut parts).slices = Some(Slices::Parts { parts: Vec::new() });
    assert!(said(&parts, &parts).contains("only state has parts"));
}

#[test]
fn heads_that_ranks_cannot_share_are_refused() {
    let mut target = registration(&model(), 4, 32);
    target.tp_size = 3;
    assert_eq!(
        made(&registration(&model(), 2, 16), &target)
            .expect_err("refused")
            .to_string(),
        "group 0, layer 0, k: the target has kv_heads 8 and tp_size 3, of which neither divides the other: its ranks \
         hold unequal slices, which no plan covers"
    );
    target.tp_size = 8;
    assert_eq!(
        made(&registration(&model(), 2, 16), &target)
            .expect_err("refused")
            .to_string(),
        "group 0, layer 0, k: the target has shape[head_axis] 2, but kv_heads is 8, of which each of 8 ranks holds 1"
    );
    target.tp_size = 0;
    assert!(made(&registration(&model(), 2, 16), &target).is_err());
}

#[test]
fn what_a_registration_does_not_say_is_needed_for_unequal_sides_only() {
    let unnamed = |ranks, page_tokens| {
        let mut unnamed = registration(&model(), ranks, page_tokens);
        tensor(&mut unnamed).slices = None;
        unnamed
    };
    let equal = made(&unnamed(2, 16), &registration(&model(), 2, 16)).expect("a plan");
    assert_eq!(equal.groups[0].fetches[0].pieces.len(), 1);
    let said = |source: &Registration, target: &Registration| {
        made(source, target).expect_err("refused").to_string()
    };
    assert_eq!(
        said(&unnamed(2, 16), &registration(&model(), 4, 16)),
        "group 0, layer 0, k: the source does not say slices, without which only pages of equal engines can be copied: \
         the sides differ in tp_size"
    );
    assert!(
        said(&registration(&model(), 2, 32), &unnamed(2, 16))
            .ends_with("the sides differ in engine_page_tokens")
    );
    let mut other = unnamed(2, 16);
    tensor(&mut other).shape.swap(0, 2);
    assert!(made(&unnamed(2, 16), &other).is_err());
    // As many heads as tokens, in another order in memory.
    let square = [Group::of(heads_first(32, 64))];
    let mut registrations = [registration(&square, 2, 16), registration(&square, 2, 16)];
    for each in &mut registrations {
        tensor(each).slices = None;
    }
    let [source, target] = &mut registrations;
    assert!(made(source, target).is_ok());
    tensor(target).strides.swap(1, 2);
    assert!(said(source, target).ends_with("the sides differ in shape or strides"));
}

#[test]
fn a_registration_that_contradicts_itself_is_no_side() {
    let said = |change: fn(&mut Registration)| {
        let mut changed = registration(&model(), 2, 16);
        change(&mut changed);
        Side::of(PlanSide::Alone, &changed)
            .expect_err("refused")
            .to_string()
    };
    assert_eq!(
        said(|changed| tensor(changed).page_bytes += 1),
        "group 0, layer 0, k: the registration has page_bytes 4097, but it is the product of the axes inside a page, \
         and not 0"
    );
    assert!(said(|changed| tensor(changed).element_bytes = 0).contains("page_bytes 4096"));
    assert!(said(|changed| tensor(changed).shape[0] = u64::MAX).contains("less than 2^64 bytes"));
    assert!(said(|changed| tensor(changed).strides.clear()).contains("as many axes as strides"));
    assert!(
        said(|changed| group(changed).engine_page_tokens = 0)
            .contains("a page has a token at least")
    );
    assert_eq!(
        said(|changed| group(changed).engine_page_tokens = 8),
        "group 0, layer 0, k: the registration has shape[token_axis] 16, but engine_page_tokens is 8"
    );
    let attention = refused(&model(), |target| {
        group(target).attention = Attention::Other
    });
    assert!(
        attention.ends_with("which this version cannot plan") || attention.contains("attention is")
    );
}

#[test]
fn kinds_of_attention_that_this_version_does_not_know_are_refused() {
    let mut unknown = registration(&model(), 2, 16);
    group(&mut unknown).attention = Attention::Other;
    assert_eq!(
        made(&unknown, &unknown).expect_err("refused").to_string(),
        "group 0: attention is a kind that this version does not know at the source, which this version cannot plan"
    );
}

#[test]
fn ranks_and_shards_are_bounded() {
    let side = |name| Side::of(name, &registration(&model(), 2, 16)).expect("a side");
    let (source, target) = (side(PlanSide::Source), side(PlanSide::Target));
    assert_eq!(
        plan(&source, &target, 2).expect_err("refused").to_string(),
        "rank is 2, but the target has 2 ranks: give one from 0 to 1"
    );
    assert_eq!(
        source.shards(1).expect_err("refused").to_string(),
        "group 0, layer 0, k: the source has shards 1, but its 2 ranks hold 2 different slices"
    );
}

#[test]
fn pages_of_too_many_pieces_are_refused() {
    // Planes between tokens and heads make a run for each plane, token and head.
    let axes = vec![
        Inner::Other(8192),
        Inner::Tokens,
        Inner::Other(8192),
        Inner::Heads,
        Inner::Other(1),
    ];
    let model = [Group::of(Tensor::Heads(8, axes))];
    let made = made(&registration(&model, 2, 16), &registration(&model, 4, 16));
    assert_eq!(
        made.map(|_| ()).expect_err("refused").to_string(),
        "group 0, layer 0, k: a page falls into more than 65536 pieces: the order of its axes in memory makes runs too \
         short; an order with heads before tokens has longer ones"
    );
}
