//! Plans of drawn models, carried out byte by byte: every byte of a page that the target takes is written once, with the
//! byte that belongs there.

use std::collections::BTreeMap;

use kvferry_types::{Attention, TensorRole};
use proptest::prelude::*;

use super::model::{Group, Inner, Tensor, held_heads, lengths, source, target};
use crate::{GroupPlan, plan, readers};

/// Tokens for which the source has KV.
const TOKENS: u64 = 50;

/// The place of a byte in the model: layer, role, head or part, token or row, and the indices of all other axes.
type Place = (u32, TensorRole, u64, u64, Vec<u64>);

/// The byte at a place.
fn byte(place: &Place) -> u8 {
    use std::hash::{DefaultHasher, Hash, Hasher};

    let mut hasher = DefaultHasher::new();
    place.hash(&mut hasher);
    hasher.finish() as u8
}

/// The places of a page of a rank, in the order of its bytes. `page`: counted from the start of the sequence.
fn page(group: &Group, ranks: u16, rank: u16, page_tokens: u32, page: u64) -> Vec<Place> {
    let mut places = Vec::new();
    let first_token = page * u64::from(page_tokens);
    let mut tensors: Vec<&(TensorRole, Tensor)> = group.tensors.iter().collect();
    tensors.sort_by_key(|(role, _)| *role);
    for layer in 0..group.layers {
        for (role, tensor) in &tensors {
            let (axes, first_head, heads) = match tensor {
                Tensor::Heads(heads, axes) => {
                    let (first, held) = held_heads(*heads, ranks, rank);
                    (axes, u64::from(first), u64::from(held))
                }
                Tensor::Whole(axes) => (axes, 0, 1),
                Tensor::Parts(parts) => {
                    for (number, (dim, row_bytes)) in (0..).zip(parts) {
                        let held = u64::from(dim / u32::from(ranks));
                        let first = u64::from(rank) * held;
                        let rows = (first..first + held)
                            .flat_map(|row| (0..*row_bytes).map(move |at| (row, at)));
                        places.extend(
                            rows.map(|(row, at)| (layer, *role, number, row, vec![page, at])),
                        );
                    }
                    continue;
                }
            };
            let lengths = lengths(axes, heads, page_tokens);
            for mut at in 0..lengths.iter().product() {
                let (mut head, mut token, mut others) = (0, 0, Vec::new());
                for (axis, length) in axes.iter().zip(&lengths).rev() {
                    let index = at % length;
                    at /= length;
                    match axis {
                        Inner::Heads => head = first_head + index,
                        Inner::Tokens => token = first_token + index,
                        Inner::Other(_) => others.push(index),
                    }
                }
                places.push((layer, *role, head, token, others));
            }
        }
    }
    places
}

/// Carries out a plan from pages of the source, and returns the pages of the target.
fn carried_out(
    made: &GroupPlan,
    sources: &BTreeMap<(u16, u64), Vec<u8>>,
) -> BTreeMap<u64, BTreeMap<u64, u8>> {
    let wanted = made.target_pages(TOKENS);
    let (source_tokens, target_tokens) = (
        u64::from(made.source_page_tokens),
        u64::from(made.target_page_tokens),
    );
    let period = u64::from(made.period_tokens());
    let mut written: BTreeMap<u64, BTreeMap<u64, u8>> = BTreeMap::new();
    let mut begin = wanted.start * target_tokens;
    assert_eq!(begin % period, 0, "the first page begins no period");
    while begin < wanted.end * target_tokens {
        for fetch in &made.fetches {
            for piece in &fetch.pieces {
                let page = begin / target_tokens + u64::from(piece.target_page);
                if page >= wanted.end {
                    continue;
                }
                let source_page = begin / source_tokens + u64::from(piece.source_page);
                assert!(made.source_pages(wanted.clone()).contains(&source_page));
                let from = &sources[&(fetch.source_rank, source_page)];
                for run in 0..piece.count {
                    for at in 0..piece.bytes {
                        let value =
                            from[(piece.source_offset + run * piece.source_step + at) as usize];
                        let to = piece.target_offset + run * piece.target_step + at;
                        let before = written.entry(page).or_default().insert(to, value);
                        assert_eq!(before, None, "byte {to} of page {page} is written twice");
                    }
                }
            }
        }
        begin += period;
    }
    written
}

fn check(groups: &[Group], ranks: (u16, u16), page_tokens: (u32, u32)) {
    let (from, to) = (
        source(groups, ranks.0, page_tokens.0),
        target(groups, ranks.1, page_tokens.1),
    );
    let read = readers(&from, &to).expect("plans");
    for rank in 0..ranks.1 {
        let made = plan(&from, &to, rank).expect("a plan");
        for (group, made) in groups.iter().zip(&made.groups) {
            let pages = 0..TOKENS.div_ceil(u64::from(page_tokens.0));
            let sources = (0..ranks.0).flat_map(|rank| pages.clone().map(move |page| (rank, page)));
            let sources = sources.map(|(rank, number)| {
                let places = page(group, ranks.0, rank, page_tokens.0, number);
                ((rank, number), places.iter().map(byte).collect())
            });
            let written = carried_out(made, &sources.collect());
            for number in made.target_pages(TOKENS) {
                let places = page(group, ranks.1, rank, page_tokens.1, number);
                let written = written.get(&number).map_or(0, BTreeMap::len);
                assert_eq!(written, places.len(), "page {number} has gaps");
            }
            for (number, bytes) in written {
                let places = page(group, ranks.1, rank, page_tokens.1, number);
                for (at, place) in (0..).zip(&places) {
                    assert_eq!(
                        bytes[&at],
                        byte(place),
                        "rank {rank}, page {number}, byte {at}: {place:?}"
                    );
                }
            }
            for fetch in &made.fetches {
                assert!(read[usize::from(fetch.source_rank)].contains(&rank));
            }
        }
    }
}

/// A number of ranks that divides the heads, or is divided by them.
fn ranks(heads: u32) -> impl Strategy<Value = u16> {
    let fitting = (1..=3 * heads)
        .filter(move |ranks| heads.is_multiple_of(*ranks) || ranks.is_multiple_of(heads));
    prop::sample::select(fitting.map(|ranks| ranks as u16).collect::<Vec<u16>>())
}

/// The axes of a page in any order, the bytes of an element last, and up to two others between them.
fn axes(heads: bool) -> impl Strategy<Value = Vec<Inner>> {
    let others = prop::collection::vec((1_u64..4).prop_map(Inner::Other), 0..3);
    (others, 1_u64..5).prop_flat_map(move |(mut axes, bytes)| {
        axes.push(Inner::Tokens);
        if heads {
            axes.push(Inner::Heads);
        }
        Just(axes).prop_shuffle().prop_map(move |mut axes| {
            axes.push(Inner::Other(bytes));
            axes
        })
    })
}

fn attention() -> impl Strategy<Value = (Attention, u32)> {
    prop_oneof![
        Just((Attention::Full, 0)),
        (1_u32..40).prop_map(|tokens| (Attention::SlidingWindow, tokens)),
        (1_u32..40).prop_map(|tokens| (Attention::ChunkedLocal, tokens)),
    ]
}

fn page_tokens() -> impl Strategy<Value = (u32, u32)> {
    (1_u32..6, 1_u32..5, any::<bool>()).prop_map(|(tokens, times, split)| {
        if split {
            (tokens * times, tokens)
        } else {
            (tokens, tokens * times)
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn every_byte_of_heads_and_latents_is_the_right_one(
        (heads, ranks) in (1_u32..9).prop_flat_map(|heads| (Just(heads), (ranks(heads), ranks(heads)))),
        page_tokens in page_tokens(),
        (attention, window_tokens) in attention(),
        (k, v, latent) in (axes(true), axes(true), axes(false)),
        layers in 1_u32..3,
    ) {
        let tensors = vec![
            (TensorRole::V, Tensor::Heads(heads, v)),
            (TensorRole::K, Tensor::Heads(heads, k)),
            (TensorRole::Latent, Tensor::Whole(latent)),
        ];
        check(&[Group { attention, window_tokens, layers, tensors }], ranks, page_tokens);
    }

    #[test]
    fn every_byte_of_a_state_is_the_right_one(
        ranks in (1_u16..7, 1_u16..7),
        parts in prop::collection::vec((1_u32..4, 1_u64..5), 1..4),
        page_tokens in 1_u32..20,
        layers in 1_u32..3,
    ) {
        let both = u32::from(ranks.0) * u32::from(ranks.1);
        let parts = parts.into_iter().map(|(dim, row)| (dim * both, row)).collect();
        let state = Group {
            attention: Attention::State,
            window_tokens: 0,
            layers,
            tensors: vec![(TensorRole::State, Tensor::Parts(parts))],
        };
        check(&[state], ranks, (page_tokens, page_tokens));
    }
}
