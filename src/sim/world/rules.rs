//! Rules about the namespaces of a world: limits on what they store and hold, and secrets.

use std::num::NonZeroU64;
use std::sync::Arc;

use fastrand::Rng;

use kvferry_core::{NamespaceRule, NamespaceSecret, Namespaces};
use kvferry_types::{PerTier, TierId, User};

/// Draws the rules of the leaders of every second epoch, and of the others: the limits may change at a restart, the
/// prefixes and the secrets stay. In up to every third world there are some: of all namespaces that have no other, or of
/// single ones.
pub(super) fn draw(
    rng: &mut Rng,
    namespaces: u8,
    tiers: &[TierId],
    pages_max: u32,
) -> [Arc<Namespaces>; 2] {
    if rng.u8(0..3) != 0 {
        return Default::default();
    }
    let prefixes = (0..namespaces).map(|name| vec![name]).chain([Vec::new()]);
    let prefixes: Vec<Vec<u8>> = prefixes.filter(|_| rng.bool()).collect();
    let rules = prefixes.into_iter().map(|prefix| NamespaceRule {
        prefix,
        users: [User::Own].into(),
        held_pages: None,
        stored_pages: PerTier::default(),
        secret: (rng.u8(0..4) == 0).then(|| NamespaceSecret::new(&[rng.u8(..)])),
    });
    let mut rules: Vec<NamespaceRule> = rules.collect();
    if rules.is_empty() {
        return Default::default();
    }
    [(); 2].map(|()| {
        if rng.u8(0..4) != 0 {
            for rule in &mut rules {
                limit(rng, rule, tiers, pages_max);
            }
        }
        Arc::new(Namespaces::new(rules.clone()))
    })
}

/// Draws the limits of a rule.
fn limit(rng: &mut Rng, rule: &mut NamespaceRule, tiers: &[TierId], pages_max: u32) {
    rule.stored_pages = PerTier::default();
    for tier in tiers {
        if rng.bool() {
            rule.stored_pages.insert(*tier, rng.u32(1..=pages_max));
        }
    }
    rule.held_pages = match rng.u8(0..3) {
        0 => NonZeroU64::new(rng.u64(1..=u64::from(pages_max))),
        _ => None,
    };
}
