//! Computes anchors from fingerprints. Anchors are keyed, so that only a holder of the key can target a given block.

use std::hash::Hasher;
use std::sync::Arc;

use siphasher::sip128::{Hasher128, SipHasher24};

use crate::index::namespaces::Namespaces;
use kvferry_types::{Anchor, DomainId, Fingerprint, GroupId, NamespaceId, RuleId};

/// Secret of a depot. Anchors made with another key never match. The caller supplies it, because the core draws no
/// random bytes.
#[derive(Clone)]
pub struct AnchorKey {
    secret: [u8; 32],
    of_rules: Arc<[RuleKey]>,
    namespaces: Arc<Namespaces>,
    /// Has absorbed the key of the anchors, which is derived once instead of for each request's domain.
    anchors: SipHasher24,
}

/// The part of the key that is of one rule about namespaces.
#[derive(Clone)]
struct RuleKey {
    id: RuleId,
    /// Takes the place of [`AnchorKey::secret`] for its namespaces, where the rule has a secret.
    secret: Option<[u8; 32]>,
}

impl std::fmt::Debug for AnchorKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AnchorKey(..)")
    }
}

impl AnchorKey {
    /// The key that is made from this secret.
    pub fn new(secret: [u8; 32]) -> Self {
        let derived = blake3::Hasher::new_keyed(&secret)
            .update(b"anchor")
            .finalize();
        let mut key = [0; 16];
        key.copy_from_slice(&derived.as_bytes()[..16]);
        Self {
            secret,
            of_rules: Arc::default(),
            namespaces: Arc::default(),
            anchors: SipHasher24::new_with_key(&key),
        }
    }

    /// The same key, with which the ids of domains also depend on the rule of their namespace, and on its secret.
    #[must_use]
    pub fn with_namespaces(self, namespaces: Arc<Namespaces>) -> Self {
        let rules = namespaces.rules().iter();
        let of_rules = rules.map(|rule| RuleKey {
            id: self.rule(&rule.prefix),
            secret: rule.secret.as_ref().map(|secret| {
                let derived = blake3::Hasher::new_keyed(&self.secret)
                    .update(b"secret of a namespace")
                    .update(secret.bytes())
                    .finalize();
                *derived.as_bytes()
            }),
        });
        Self {
            of_rules: of_rules.collect(),
            namespaces,
            ..self
        }
    }

    /// The id of the rule with this prefix: 4 bytes of `BLAKE3-keyed(anchor key, "rule of namespaces", prefix)`.
    pub(crate) fn rule(&self, prefix: &[u8]) -> RuleId {
        let derived = blake3::Hasher::new_keyed(&self.secret)
            .update(b"rule of namespaces")
            .update(prefix)
            .finalize();
        let mut first = [0; 4];
        first.copy_from_slice(&derived.as_bytes()[..4]);
        RuleId(u32::from_le_bytes(first))
    }

    /// The prefix of the ids of all domains of a namespace: `BLAKE3-keyed(anchor key, length and bytes of the
    /// namespace)`, cut to 8 bytes. Where the namespace has a rule, 4 of them are the id of the rule; where that rule has a
    /// secret, the key is derived from both.
    pub fn namespace(&self, namespace: &[u8]) -> NamespaceId {
        let rule = self.rule_of(namespace);
        let mut first = [0; 8];
        first.copy_from_slice(
            &derive(self.secret_of(rule), namespace)
                .finalize()
                .as_bytes()[..8],
        );
        let own = u64::from_le_bytes(first);
        NamespaceId(match rule {
            None => own,
            Some(rule) => own & !u64::from(u32::MAX) | u64::from(rule.id.0),
        })
    }

    /// The domain with this id, for pages whose engine is not there: a block carries its domain's id.
    pub fn domain(&self, id: DomainId) -> Domain {
        let mut hasher = self.anchors;
        hasher.write(&id.0.to_be_bytes());
        Domain { id, hasher }
    }

    fn rule_of(&self, namespace: &[u8]) -> Option<&RuleKey> {
        self.of_rules.get(self.namespaces.find(namespace)?)
    }

    fn secret_of<'a>(&'a self, rule: Option<&'a RuleKey>) -> &'a [u8; 32] {
        let of_rule = rule.and_then(|rule| rule.secret.as_ref());
        of_rule.unwrap_or(&self.secret)
    }
}

/// Absorbs the length and the bytes of a namespace.
fn derive(secret: &[u8; 32], namespace: &[u8]) -> blake3::Hasher {
    let mut derive = blake3::Hasher::new_keyed(secret);
    derive.update(&(namespace.len() as u64).to_le_bytes());
    derive.update(namespace);
    derive
}

/// Makes the anchors of one domain: `SipHash-2-4-128(k, domain id and fingerprint)`, both big-endian, where `k` is the
/// first half of `BLAKE3-keyed(anchor key, "anchor")`. A block keeps its domain's id and the fingerprints of its pages, so
/// that the anchor of any of them can be computed from the block alone, for a block of another tier that begins there.
///
/// The id is that of the namespace, followed by 7 bytes of `BLAKE3-keyed(anchor key, length and bytes of the namespace,
/// layout fingerprint and group)` and by the group. Blocks carry it, and it is compared in addition to the anchor.
#[derive(Debug, Clone)]
pub struct Domain {
    id: DomainId,
    /// Has absorbed the key and the id.
    hasher: SipHasher24,
}

impl Domain {
    /// Derives the domain's id. `layout_fingerprint` covers layout and content: model, revision, dtype.
    pub fn new(
        key: &AnchorKey,
        namespace: &[u8],
        layout_fingerprint: &[u8; 16],
        group: GroupId,
    ) -> Self {
        let rule = key.rule_of(namespace);
        let mut derive = derive(key.secret_of(rule), namespace);
        derive.update(layout_fingerprint);
        derive.update(&[group.0]);
        let mut within = [0; 8];
        within.copy_from_slice(&derive.finalize().as_bytes()[..8]);
        let within = u64::from_le_bytes(within) & !0xff | u64::from(group.0);
        let namespace = u128::from(key.namespace(namespace).0);
        key.domain(DomainId(namespace << 64 | u128::from(within)))
    }

    /// The id that blocks of this domain carry.
    pub fn id(&self) -> DomainId {
        self.id
    }

    /// The anchor of a block that starts with this page.
    pub fn anchor(&self, first: Fingerprint) -> Anchor {
        let mut hasher = self.hasher;
        hasher.write(&first.0.to_be_bytes());
        Anchor(hasher.finish128().as_u128())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::index::namespaces::{NamespaceRule, NamespaceSecret};
    use kvferry_types::PerTier;

    fn anchor(key: u8, namespace: &[u8], layout: u8, group: u8) -> Anchor {
        domain(key, namespace, layout, group).anchor(Fingerprint(7))
    }

    fn domain(key: u8, namespace: &[u8], layout: u8, group: u8) -> Domain {
        let key = AnchorKey::new([key; 32]);
        Domain::new(&key, namespace, &[layout; 16], GroupId(group))
    }

    #[test]
    fn every_part_of_a_domain_changes_the_anchor() {
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
    fn a_domain_begins_with_its_namespace_whatever_its_layout() {
        let of = |key: u8, namespace: &[u8]| AnchorKey::new([key; 32]).namespace(namespace);
        for (layout, group) in [(1, 0), (2, 0), (1, 1)] {
            assert_eq!(domain(1, b"a", layout, group).id().namespace(), of(1, b"a"));
        }
        for other in [of(2, b"a"), of(1, b"b"), of(1, b"")] {
            assert_ne!(of(1, b"a"), other);
        }
    }

    #[test]
    fn a_domain_ends_with_its_group() {
        for group in [0, 1, 255] {
            assert_eq!(domain(1, b"a", 1, group).id().group(), GroupId(group));
        }
    }

    #[test]
    fn an_anchor_is_computed_from_what_a_block_keeps() {
        let domain = domain(1, b"a", 1, 0);
        let again = AnchorKey::new([1; 32]).domain(domain.id());
        assert_eq!(again.id(), domain.id());
        assert_eq!(again.anchor(Fingerprint(7)), domain.anchor(Fingerprint(7)));
        assert_ne!(domain.anchor(Fingerprint(7)), domain.anchor(Fingerprint(8)));
    }

    #[test]
    fn the_secret_of_a_rule_changes_the_anchors_of_its_namespaces_alone() {
        let rule = |prefix: &[u8], secret: Option<&[u8]>| NamespaceRule {
            prefix: prefix.to_vec(),
            users: BTreeSet::new(),
            held_pages: None,
            stored_pages: PerTier::default(),
            secret: secret.map(NamespaceSecret::new),
        };
        let key = |secret: &[u8]| {
            let rules = vec![
                rule(b"a/", Some(secret)),
                rule(b"a/open/", None),
                rule(b"b/", Some(b"of b")),
            ];
            AnchorKey::new([1; 32]).with_namespaces(Arc::new(Namespaces::new(rules)))
        };
        let (plain, first, second) = (AnchorKey::new([1; 32]), key(b"first"), key(b"second"));
        let anchors = |namespace: &[u8]| {
            [&plain, &first, &second].map(|key| {
                let domain = Domain::new(key, namespace, &[1; 16], GroupId(0));
                let known = key.domain(domain.id());
                assert_eq!(domain.id().namespace(), key.namespace(namespace));
                assert_eq!(known.anchor(Fingerprint(7)), domain.anchor(Fingerprint(7)));
                domain.anchor(Fingerprint(7))
            })
        };
        let [without, of_first, of_second] = anchors(b"a/1");
        assert!(without != of_first && of_first != of_second && without != of_second);
        for with_rule in [&b"a/open/1"[..], b"b/1"] {
            let [without, of_first, of_second] = anchors(with_rule);
            assert!(without != of_first && of_first == of_second);
        }
        for free in [&b"c"[..], b"a", b""] {
            let [without, of_first, of_second] = anchors(free);
            assert!(
                without == of_first && of_first == of_second,
                "{}",
                free.escape_ascii()
            );
        }
    }

    #[test]
    fn a_namespace_names_the_rule_with_its_longest_prefix() {
        let rules = [&b"a/"[..], b"a/open/"].map(|prefix| NamespaceRule {
            prefix: prefix.to_vec(),
            users: BTreeSet::new(),
            held_pages: None,
            stored_pages: PerTier::default(),
            secret: None,
        });
        let rules = Arc::new(Namespaces::new(rules.to_vec()));
        let key = |secret| AnchorKey::new([secret; 32]).with_namespaces(rules.clone());
        let (key, other_key) = (key(1), key(2));
        let rule_of = |namespace: &[u8]| key.namespace(namespace).rule();
        assert_eq!(rule_of(b"a/1"), key.rule(b"a/"));
        assert_eq!(rule_of(b"a/2"), key.rule(b"a/"));
        assert_eq!(rule_of(b"a/open/1"), key.rule(b"a/open/"));
        assert_ne!(key.rule(b"a/"), key.rule(b"a/open/"));
        assert_ne!(key.rule(b"a/"), other_key.rule(b"a/"));
        assert_ne!(key.namespace(b"a/1"), key.namespace(b"a/2"));
        assert_ne!(rule_of(b"c"), rule_of(b"d"), "no rule");
    }

    #[test]
    fn a_key_is_not_printed() {
        assert_eq!(format!("{:?}", AnchorKey::new([42; 32])), "AnchorKey(..)");
    }
}
