//! Rules about namespaces: whose they are, how many pages they store and their lookups hold, and the secrets of their
//! anchors.
//!
//! The longest prefix that a namespace begins with decides. Without rules, all engines share all namespaces.

use std::collections::BTreeSet;
use std::fmt;
use std::num::NonZeroU64;

use kvferry_types::{EngineId, PerTier, User};

/// Rules of a leader, at most. A lookup compares its namespace with each of them: a few microseconds for all.
pub const NAMESPACE_RULES_MAX: usize = 256;

/// Domain separator of the names of other users' engines.
const ENGINE_NAME: &str = "kvferry 2026-11 engine of a user";

/// A secret of a namespace, which the ids of its domains depend on.
#[derive(Clone, PartialEq, Eq)]
pub struct NamespaceSecret([u8; 32]);

impl NamespaceSecret {
    /// The secret that is made from these bytes.
    pub fn new(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for NamespaceSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NamespaceSecret(..)")
    }
}

/// The rule of the namespaces with one prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamespaceRule {
    /// Start of the namespaces.
    pub prefix: Vec<u8>,
    /// Users whose engines may name them.
    pub users: BTreeSet<User>,
    /// Most pages that lookups and loads of these namespaces hold together; `None` for no limit.
    pub held_pages: Option<NonZeroU64>,
    /// Pages of these namespaces together in a tier from which on their stores evict their own blocks alone, and stores
    /// of others evict these blocks first.
    pub stored_pages: PerTier<u32>,
    /// The secret of their anchors.
    pub secret: Option<NamespaceSecret>,
}

/// The rules of a leader.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Namespaces {
    /// `None`: all engines may name all namespaces.
    rules: Option<Vec<NamespaceRule>>,
}

impl Namespaces {
    /// These rules, with different prefixes. A namespace without a rule is of kvferry's own user.
    pub fn new(rules: Vec<NamespaceRule>) -> Self {
        Self { rules: Some(rules) }
    }

    /// All rules.
    pub fn rules(&self) -> &[NamespaceRule] {
        self.rules.as_deref().unwrap_or_default()
    }

    /// The number of the rule with the longest prefix of a namespace.
    pub(crate) fn find(&self, namespace: &[u8]) -> Option<usize> {
        let rules = self.rules().iter().enumerate();
        let matching = rules.filter(|(_, rule)| namespace.starts_with(&rule.prefix));
        let longest = matching.max_by_key(|(_, rule)| rule.prefix.len());
        longest.map(|(number, _)| number)
    }

    /// True if the engines of a user may name a namespace.
    pub fn permits(&self, user: User, namespace: &[u8]) -> bool {
        let Some(rules) = &self.rules else {
            return true;
        };
        match self.find(namespace) {
            Some(number) => rules[number].users.contains(&user),
            None => user == User::Own,
        }
    }
}

/// The name of an engine, from the one that its process has drawn. Engines of different users never have the same name,
/// so that no user can act under the name of another one's engine, and memory belongs to an engine of the same user. The
/// engines of kvferry's own user keep their names.
pub fn engine_of(user: User, drawn: [u8; 16]) -> EngineId {
    let User::Other(uid) = user else {
        return EngineId(drawn);
    };
    let mut hasher = blake3::Hasher::new_derive_key(ENGINE_NAME);
    hasher.update(&uid.to_le_bytes());
    hasher.update(&drawn);
    let mut name = [0; 16];
    name.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    EngineId(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALICE: User = User::Other(1001);
    const BOB: User = User::Other(1002);

    fn rule(prefix: &[u8], users: &[User]) -> NamespaceRule {
        NamespaceRule {
            prefix: prefix.to_vec(),
            users: users.iter().copied().collect(),
            held_pages: None,
            stored_pages: PerTier::default(),
            secret: None,
        }
    }

    #[test]
    fn without_rules_every_user_may_name_every_namespace() {
        for user in [User::Own, ALICE, BOB] {
            assert!(Namespaces::default().permits(user, b"a/1"));
        }
    }

    #[test]
    fn the_longest_prefix_decides_and_the_rest_is_of_the_own_user() {
        let rules = Namespaces::new(vec![
            rule(b"a/", &[ALICE]),
            rule(b"a/both/", &[ALICE, BOB]),
            rule(b"b/", &[BOB, User::Own]),
        ]);
        let table: [(&[u8], [bool; 3]); 7] = [
            (b"a/1", [false, true, false]),
            (b"a/both/1", [false, true, true]),
            (b"a/both", [false, true, false]),
            (b"b/", [true, false, true]),
            (b"b", [true, false, false]),
            (b"", [true, false, false]),
            (b"c/a/1", [true, false, false]),
        ];
        for (namespace, permitted) in table {
            let found = [User::Own, ALICE, BOB].map(|user| rules.permits(user, namespace));
            assert_eq!(found, permitted, "{}", namespace.escape_ascii());
        }
        // No rule at all is not the same as an empty list of rules.
        let none = Namespaces::new(Vec::new());
        assert!(none.permits(User::Own, b"a") && !none.permits(ALICE, b"a"));
    }

    #[test]
    fn engines_of_different_users_have_different_names() {
        let drawn = [7; 16];
        assert_eq!(engine_of(User::Own, drawn), EngineId(drawn));
        let names = [User::Own, ALICE, BOB].map(|user| engine_of(user, drawn));
        assert!(names[0] != names[1] && names[1] != names[2] && names[0] != names[2]);
        assert_eq!(engine_of(ALICE, drawn), names[1]);
        assert_ne!(engine_of(ALICE, [8; 16]), names[1]);
    }

    #[test]
    fn a_secret_is_not_printed() {
        let secret = NamespaceSecret::new(&[42; 32]);
        assert_eq!(format!("{secret:?}"), "NamespaceSecret(..)");
    }
}
