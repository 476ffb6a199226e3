//! Rules about the namespaces of a world: limits on what they store.

use std::sync::Arc;

use fastrand::Rng;

use kvferry_core::{NamespaceRule, Namespaces};
use kvferry_types::{PerTier, TierId, User};

/// Draws the rules. In every third world there are some, each with one namespace; the last namespace has none.
pub(super) fn draw(
    rng: &mut Rng,
    namespaces: u8,
    tiers: &[TierId],
    pages_max: u32,
) -> Arc<Namespaces> {
    if rng.u8(0..3) != 0 {
        return Arc::default();
    }
    let rules = (0..namespaces.saturating_sub(1)).map(|name| {
        let mut stored_pages = PerTier::default();
        for tier in tiers {
            if rng.bool() {
                stored_pages.insert(*tier, rng.u32(1..=pages_max));
            }
        }
        NamespaceRule {
            prefix: vec![name],
            users: [User::Own].into(),
            held_pages: None,
            stored_pages,
            secret: None,
        }
    });
    Arc::new(Namespaces::new(rules.collect()))
}
