//! Random groups, sequences and pages, decoded from a list of choices: shorter lists and smaller choices give simpler
//! cases.

use super::*;

const PAGE_TOKENS: [u32; 4] = [16, 32, 48, 64];

/// Choices of a case; 0 behind the end of the list.
pub(super) struct Choices<F: FnMut() -> u32>(pub(super) F);

impl<F: FnMut() -> u32> Choices<F> {
    /// A number below `count`.
    pub(super) fn below(&mut self, count: u32) -> u32 {
        (self.0)() % count
    }

    pub(super) fn one_in(&mut self, count: u32) -> bool {
        self.below(count) == count - 1
    }
}

/// SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
pub(super) fn random(seed: u64) -> impl FnMut() -> u32 {
    let mut state = seed;
    move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed >> 32) as u32
    }
}

/// A set of groups, the bounds of a lookup, and the pages that are there.
#[derive(Debug)]
pub(super) struct Case {
    pub(super) groups: Groups,
    pub(super) bounds: LookupBounds,
    pub(super) present: Table,
}

impl Case {
    pub(super) fn draw<F: FnMut() -> u32>(choices: &mut Choices<F>) -> Self {
        let count = 1 + choices.below(4);
        let one_size = choices.one_in(2);
        let shared = PAGE_TOKENS[choices.below(4) as usize];
        let mut specs = Vec::new();
        for _ in 0..count {
            let size = PAGE_TOKENS[choices.below(4) as usize];
            let page_tokens = if one_size { shared } else { size };
            let kind = match choices.below(4) {
                0 => GroupKind::Prefix,
                1 => GroupKind::Window {
                    tokens: 1 + choices.below(300),
                },
                2 => GroupKind::Chunk {
                    tokens: 16 * (1 + choices.below(12)),
                },
                _ => GroupKind::State,
            };
            let can_draft = matches!(kind, GroupKind::Prefix | GroupKind::Window { .. });
            let eagle = can_draft && choices.one_in(4);
            specs.push(GroupSpec {
                kind,
                page_tokens,
                eagle,
            });
        }
        let hit_tokens = specs.iter().fold(1, |all, spec| lcm(all, spec.page_tokens));
        let hash_tokens = specs.iter().fold(0, |all, spec| gcd(all, spec.page_tokens));
        let groups = Groups::new(hash_tokens, hit_tokens, specs).expect("groups with rules");
        let tokens = 1 + choices.below(8 * hit_tokens.min(128) + 64);
        let boundaries = tokens / hit_tokens + 1;
        let device_tokens = match choices.below(4) {
            0 | 1 => 0,
            2 => choices.below(boundaries) * hit_tokens,
            _ => choices.below(tokens),
        };
        let bounds = LookupBounds {
            hashes: tokens / hash_tokens,
            device_tokens,
            limit_tokens: tokens - 1,
        };
        // Mostly dense, so that hits with holes are frequent.
        let one_missing_in = 1 + choices.below(12);
        let present = groups
            .specs
            .iter()
            .map(|spec| {
                let pages = tokens / spec.page_tokens + 2;
                (0..pages)
                    .map(|_| !choices.one_in(one_missing_in + 1))
                    .collect()
            })
            .collect();
        Self {
            groups,
            bounds,
            present: Table(present),
        }
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn lcm(a: u32, b: u32) -> u32 {
    a / gcd(a, b) * b
}
