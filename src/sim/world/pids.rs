//! Process ids: unique in a world, and never reused.

use std::collections::{BTreeMap, BTreeSet};

use super::NodeId;

/// All process ids of a world.
#[derive(Debug, Default)]
pub(super) struct Pids {
    known: BTreeMap<(NodeId, u32), i32>,
    living: BTreeSet<i32>,
}

impl Pids {
    /// Assigns an id to a process that starts.
    pub(super) fn begin(&mut self, who: NodeId, incarnation: u32) {
        let next = i32::try_from(self.known.len() + 1).unwrap_or(i32::MAX);
        self.known.insert((who, incarnation), next);
        self.living.insert(next);
    }

    /// Notes that a process has ended.
    pub(super) fn end(&mut self, who: NodeId, incarnation: u32) {
        if let Some(pid) = self.of(who, incarnation) {
            self.living.remove(&pid);
        }
    }

    /// Id of a process that has started, also after its end.
    pub(super) fn of(&self, who: NodeId, incarnation: u32) -> Option<i32> {
        self.known.get(&(who, incarnation)).copied()
    }

    /// True while a process has not ended.
    pub(super) fn lives(&self, pid: i32) -> bool {
        self.living.contains(&pid)
    }
}
