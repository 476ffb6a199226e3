//! Requests that every shard has to confirm, each sent to one worker of the shard.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_types::{Shard, WorkerId};

use super::roster::Roster;

/// The confirmations of one request by all shards.
#[derive(Debug)]
pub(super) struct Confirmations {
    /// Shards that have not confirmed.
    missing: BTreeSet<Shard>,
    /// The worker that received the request for a shard, and whose connection has not been lost since.
    requested_from: BTreeMap<Shard, WorkerId>,
}

impl Confirmations {
    /// No shard has confirmed, or was requested to.
    pub(super) fn new(roster: &Roster) -> Self {
        Self {
            missing: roster.shards().collect(),
            requested_from: BTreeMap::new(),
        }
    }

    /// A worker of a shard that has not confirmed and has no request in flight.
    pub(super) fn next_worker(
        &self,
        roster: &Roster,
        workers: &[Option<WorkerId>],
    ) -> Option<WorkerId> {
        let mut workers = workers.iter().flatten().copied();
        workers.find(|worker| {
            let shard = roster.shard_of(*worker);
            self.missing.contains(&shard) && !self.requested_from.contains_key(&shard)
        })
    }

    /// Notes that a worker received the request for its shard.
    pub(super) fn requested(&mut self, shard: Shard, worker: WorkerId) {
        self.requested_from.insert(shard, worker);
    }

    /// The worker lost its connection, or answers none of the requests that it received before.
    pub(super) fn request_again(&mut self, worker: WorkerId) {
        self.requested_from
            .retain(|_, requested| *requested != worker);
    }

    /// A worker has confirmed for its shard. Returns false if the request was not sent to it: it may be one of another
    /// replica, and knows nothing of what the worker that was asked has done.
    pub(super) fn confirmed(&mut self, shard: Shard, worker: WorkerId) -> bool {
        let counts = self.requested_from.get(&shard) == Some(&worker);
        if counts {
            self.missing.remove(&shard);
        }
        counts
    }

    /// Number of shards that have not confirmed.
    pub(super) fn missing(&self) -> usize {
        self.missing.len()
    }

    /// Forgets every request and confirmation, for tests of single steps.
    #[cfg(test)]
    pub(super) fn set_missing(&mut self, missing: impl IntoIterator<Item = Shard>) {
        self.missing = missing.into_iter().collect();
        self.requested_from.clear();
    }
}
