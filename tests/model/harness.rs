//! Shared parts of the models: the network, the past of a state, and the check of a model.

use std::fmt::Debug;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use kvferry_core::ShardSet;
use kvferry_types::{Rank, Shard};
use stateright::{Checker, Expectation, HasDiscoveries, Model};

/// Number of ranks in every model.
pub const RANKS: u16 = 2;

/// The ranks, by number.
pub fn ranks() -> impl Iterator<Item = Rank> {
    (0..RANKS).map(Rank)
}

/// The index of a rank in the arrays of a state.
pub fn at(rank: Rank) -> usize {
    usize::from(rank.0)
}

/// The shard that a rank holds: every rank has one of its own.
pub fn shard(rank: Rank) -> Shard {
    Shard(rank.0)
}

/// The ranks that owe a report, hashable as a part of a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Missing(ShardSet);

impl Missing {
    /// The set of all ranks.
    pub fn all() -> Self {
        Self(ShardSet::first(RANKS))
    }

    /// Removes a rank. Returns false if the rank was not in the set.
    pub fn remove(&mut self, rank: Rank) -> bool {
        self.0.remove(shard(rank))
    }

    /// True if the rank is in the set.
    pub fn contains(&self, rank: Rank) -> bool {
        self.0.contains(shard(rank))
    }

    /// True if the set has no rank.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The ranks in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = Rank> {
        self.0.iter().map(|shard| Rank(shard.0))
    }

    /// The shards of the ranks.
    pub fn shards(&self) -> ShardSet {
        self.0
    }
}

impl Hash for Missing {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.iter().for_each(|shard| shard.hash(state));
        self.0.len().hash(state);
    }
}

/// Every message that was ever sent over a connection that still stands. Each may arrive at any time, in any order, any
/// number of times, or never.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Network<M>(Vec<M>);

impl<M: Ord + Copy> Network<M> {
    pub fn new() -> Self {
        Self(Vec::new())
    }

    /// Sends a message. An equal message is kept only once.
    pub fn send(&mut self, message: M) {
        if let Err(at) = self.0.binary_search(&message) {
            self.0.insert(at, message);
        }
    }

    /// The messages of which any may arrive next.
    pub fn messages(&self) -> impl Iterator<Item = M> {
        self.0.iter().copied()
    }

    /// Removes the messages of a broken connection, which never arrive.
    pub fn cut(&mut self, lost: impl Fn(&M) -> bool) {
        self.0.retain(|message| !lost(message));
    }
}

/// The events that led to a state, for the code that runs in parallel. Not part of the state's identity.
#[derive(Clone)]
pub struct Past<E>(Option<Arc<(E, Self)>>);

impl<E: Clone> Past<E> {
    pub fn new() -> Self {
        Self(None)
    }

    /// The past with one more event.
    pub fn then(&self, event: E) -> Self {
        Self(Some(Arc::new((event, self.clone()))))
    }

    /// All events, the first one first.
    pub fn events(&self) -> Vec<E> {
        let mut events = Vec::new();
        let mut next = self;
        while let Some(node) = &next.0 {
            events.push(node.0.clone());
            next = &node.1;
        }
        events.reverse();
        events
    }
}

impl<E> Hash for Past<E> {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

impl<E> PartialEq for Past<E> {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl<E> Eq for Past<E> {}

impl<E> Debug for Past<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("..")
    }
}

/// Debug output with the items in braces sorted, so that a hash map prints alike in every run.
pub fn canonical(printed: &str) -> String {
    let mut open: Vec<Vec<String>> = vec![vec![String::new()]];
    for letter in printed.chars().filter(|letter| !letter.is_whitespace()) {
        let depth = open.len();
        match letter {
            '{' | '[' | '(' => open.push(vec![String::new()]),
            ',' => open[depth - 1].push(String::new()),
            '}' | ']' | ')' => {
                let mut items = open.pop().unwrap_or_default();
                if letter == '}' {
                    items.sort_unstable();
                }
                let text = format!("({})", items.join(","));
                open[depth - 2].last_mut().expect("an item").push_str(&text);
            }
            _ => open[depth - 1].last_mut().expect("an item").push(letter),
        }
    }
    open.concat().join(",")
}

/// Maximum number of states of one model.
const STATES_MAX: usize = 2_000_000;

/// Visits every state. Requires that each invariant holds and that each state that must be reachable is reached.
pub fn holds<M>(name: &str, model: M)
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq + Send,
{
    let begun = std::time::Instant::now();
    let expected: Vec<_> = model
        .properties()
        .iter()
        .map(|property| (property.name, property.expectation.clone()))
        .collect();
    let reachable = |expectation: &Expectation| matches!(expectation, Expectation::Sometimes);
    let checker = model
        .checker()
        .finish_when(HasDiscoveries::AnyFailures)
        .spawn_bfs()
        .join();
    let states = checker.unique_state_count();
    eprintln!(
        "{name}: {states} states, {} steps, depth {}, {:.1?}",
        checker.state_count(),
        checker.max_depth(),
        begun.elapsed()
    );
    assert!(states < STATES_MAX, "{name} has {states} states");
    let found = checker.discoveries();
    for (property, expectation) in expected {
        match (reachable(&expectation), found.get(property)) {
            (false, Some(path)) => panic!("{name}: not always '{property}':\n{path:?}"),
            (true, None) => panic!("{name}: never '{property}'"),
            _ => {}
        }
    }
}

/// Visits states until `property` fails, and finds the shortest path there. Panics if it holds in all states.
pub fn breaks<M>(name: &str, model: impl Fn() -> M, property: &'static str)
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq + Send,
{
    let mut shortest = None;
    let mut states = 0;
    let mut depth = usize::MAX;
    loop {
        let sought = [property].into_iter().collect();
        let checker = model()
            .checker()
            .finish_when(HasDiscoveries::AnyOf(sought))
            .target_max_depth(depth)
            .spawn_bfs()
            .join();
        states = states.max(checker.unique_state_count());
        let Some(path) = checker.discovery(property) else {
            break;
        };
        let actions = path.into_actions();
        // The state before the first action counts as well.
        depth = actions.len() + 1;
        shortest = Some(actions);
    }
    let Some(steps) = shortest else {
        panic!("{name}: '{property}' holds in all {states} states");
    };
    let count = steps.len();
    eprintln!("{name}: broken after {count} steps, {states} states: {steps:?}");
}
