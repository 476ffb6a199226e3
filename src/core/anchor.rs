//! From page hashes to anchors: keyed, so that nobody who lacks the key can aim at a block.

use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher24};

use crate::core::sabotage::{Bug, planted};
use crate::types::{Anchor, DomainId, GroupId, PageHashes};

/// Secret of a depot: anchors made with another key never match. Comes from outside; the core draws no random bytes.
#[derive(Clone)]
pub struct AnchorKey(pub [u8; 32]);

impl std::fmt::Debug for AnchorKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AnchorKey(..)")
    }
}

/// Makes the anchors of one domain: `SipHash-2-4-128(k, page hash)`, where `k` is the first half of
/// `BLAKE3-keyed(anchor key, lengths and bytes of namespace, layout fingerprint and group)`; its second half is the
/// domain's id. Blocks carry their domain and are compared by it, beyond the anchor.
#[derive(Debug, Clone)]
pub struct Domain {
    id: DomainId,
    hasher: SipHasher24,
}

impl Domain {
    /// Derives the domain's own key. `layout_fingerprint` covers layout and content: model, revision, dtype.
    pub fn new(
        key: &AnchorKey,
        namespace: &[u8],
        layout_fingerprint: &[u8; 16],
        group: GroupId,
    ) -> Self {
        let namespace = match planted(Bug::IgnoreNamespace) {
            true => &[],
            false => namespace,
        };
        let mut derive = blake3::Hasher::new_keyed(&key.0);
        derive.update(&(namespace.len() as u64).to_le_bytes());
        derive.update(namespace);
        derive.update(layout_fingerprint);
        derive.update(&[group.0]);
        let derived = derive.finalize();
        let (mut first, mut second) = ([0; 16], [0; 16]);
        first.copy_from_slice(&derived.as_bytes()[..16]);
        second.copy_from_slice(&derived.as_bytes()[16..]);
        Self {
            id: DomainId(u128::from_le_bytes(second)),
            hasher: SipHasher24::new_with_key(&first),
        }
    }

    /// Which domain.
    pub fn id(&self) -> DomainId {
        self.id
    }

    /// The anchor of a block that starts with page `index` of `hashes`.
    pub fn anchor(&self, hashes: &PageHashes, index: usize) -> Anchor {
        let mut hasher = self.hasher;
        hasher.write(hashes.get(index));
        Anchor(hasher.finish128().as_u128())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn anchor(key: u8, namespace: &[u8], layout: u8, group: u8) -> Anchor {
        let hashes = PageHashes::packed(16, vec![7; 16]).expect("one page");
        domain(key, namespace, layout, group).anchor(&hashes, 0)
    }

    fn domain(key: u8, namespace: &[u8], layout: u8, group: u8) -> Domain {
        let key = AnchorKey([key; 32]);
        Domain::new(&key, namespace, &[layout; 16], GroupId(group))
    }

    #[test]
    fn everything_that_tells_domains_apart_changes_the_anchor() {
        let base = anchor(1, b"a", 1, 0);
        assert_eq!(base, anchor(1, b"a", 1, 0));
        for other in [
            anchor(2, b"a", 1, 0),
            anchor(1, b"b", 1, 0),
            anchor(1, b"a", 2, 0),
            anchor(1, b"a", 1, 1),
        ] {
            assert_ne!(base, other);
        }
        let ids = [
            domain(1, b"a", 1, 0).id(),
            domain(2, b"a", 1, 0).id(),
            domain(1, b"b", 1, 0).id(),
            domain(1, b"a", 2, 0).id(),
            domain(1, b"a", 1, 1).id(),
        ];
        for (index, id) in ids.iter().enumerate() {
            assert!(!ids[..index].contains(id));
        }
    }

    #[test]
    fn a_key_is_not_printed() {
        assert_eq!(format!("{:?}", AnchorKey([42; 32])), "AnchorKey(..)");
    }
}
