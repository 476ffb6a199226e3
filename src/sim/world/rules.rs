//! Rules about the namespaces of a world: limits on what they store.

use std::sync::Arc;

use fastrand::Rng;

use kvferry_core::{NamespaceRule, Namespaces};
use kvferry_types::{PerTier, TierId, User};

/// Draws the rules. In up to every third world there are some: of all namespaces that have no other, or of single ones.
pub(super) fn draw(
    rng: &mut Rng,
    namespaces: u8,
    tiers: &[TierId],
    pages_max: u32,
) -> Arc<Namespaces> {
    if rng.u8(0..3) != 0 {
        return Arc::default();
    }
    let prefixes = (0..namespaces).map(|name| vec![name]).chain([Vec::new()]);
    let prefixes: Vec<Vec<u8>> = prefixes.filter(|_| rng.bool()).collect();
    let rules = prefixes.into_iter().map(|prefix| {
        let mut stored_pages = PerTier::default();
        for tier in tiers {
            if rng.bool() {
                stored_pages.insert(*tier, rng.u32(1..=pages_max));
            }
        }
        NamespaceRule {
            prefix,
            users: [User::Own].into(),
            held_pages: None,
            stored_pages,
            secret: None,
        }
    });
    let rules: Vec<NamespaceRule> = rules.collect();
    match rules.is_empty() {
        true => Arc::default(),
        false => Arc::new(Namespaces::new(rules)),
    }
}
