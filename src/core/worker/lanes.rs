//! Copies that are ready to run. Each edge has its own queue, its own limit and its own rate, so that a load never waits
//! for stores, and neither of them for moves between lower tiers.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU64;

use kvferry_types::{Edge, TierId, Time, TransferId};

use super::pace::Pace;

/// The copies of one edge.
#[derive(Debug, Default)]
struct Lane {
    /// Copies in the order in which they became ready. A stopped copy stays until [`Lanes::clean`].
    queue: VecDeque<TransferId>,
    running: usize,
    pace: Pace,
}

/// Order in which lanes start copies: an engine waits for the first two, and reuses its pages after the third.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Urgency {
    /// Into an engine's memory.
    Load,
    /// To a faster tier.
    Promotion,
    /// Out of an engine's memory.
    Store,
    /// To a slower tier.
    WriteThrough,
}

impl Urgency {
    fn of(edge: Edge) -> Self {
        match edge {
            Edge {
                to: TierId::Device, ..
            } => Self::Load,
            Edge {
                from: TierId::Device,
                ..
            } => Self::Store,
            Edge { from, to } if to < from => Self::Promotion,
            _ => Self::WriteThrough,
        }
    }
}

/// The lanes of all edges that have been used.
#[derive(Debug, Default)]
pub(super) struct Lanes(BTreeMap<(Urgency, Edge), Lane>);

impl Lanes {
    fn of(&mut self, edge: Edge) -> &mut Lane {
        self.0.entry((Urgency::of(edge), edge)).or_default()
    }

    /// The edges, the most urgent ones first.
    pub(super) fn edges(&self) -> Vec<Edge> {
        self.0.keys().map(|(_, edge)| *edge).collect()
    }

    /// Appends a copy that is ready.
    pub(super) fn push(&mut self, edge: Edge, transfer: TransferId) {
        self.of(edge).queue.push_back(transfer);
    }

    /// Removes the oldest entry of an edge's queue, if fewer than `running_max` of its copies run and its rate permits a
    /// start.
    pub(super) fn pop(&mut self, now: Time, edge: Edge, running_max: usize) -> Option<TransferId> {
        let lane = self.of(edge);
        if lane.running >= running_max || lane.pace.next_start() > now {
            return None;
        }
        lane.queue.pop_front()
    }

    /// When the rate of an edge permits the next start of a copy that waits for nothing else. To be asked after
    /// [`Self::pop`] has returned `None` for each edge.
    pub(super) fn next_start(&self, running_max: usize) -> Option<Time> {
        let lanes = self.0.values();
        let held = lanes.filter(|lane| !lane.queue.is_empty() && lane.running < running_max);
        held.map(|lane| lane.pace.next_start()).min()
    }

    /// Counts a copy that starts to run.
    pub(super) fn started(
        &mut self,
        now: Time,
        edge: Edge,
        bytes: u64,
        bytes_per_s: Option<NonZeroU64>,
    ) {
        let lane = self.of(edge);
        lane.running += 1;
        lane.pace.charge(now, bytes, bytes_per_s);
    }

    /// Counts the end of a running copy.
    pub(super) fn ended(&mut self, edge: Edge) {
        self.of(edge).running -= 1;
    }

    /// Empties the queues, because no copy is queued any longer. The limits and rates of the edges stay.
    pub(super) fn clear_queues(&mut self) {
        self.0.values_mut().for_each(|lane| lane.queue.clear());
    }

    /// Entries of an edge's queue.
    #[cfg(test)]
    pub(super) fn entries(&self, edge: Edge) -> usize {
        let lane = self.0.get(&(Urgency::of(edge), edge));
        lane.map_or(0, |lane| lane.queue.len())
    }

    /// Numbers of running copies, of the edges that have any.
    pub(super) fn running(&self) -> BTreeMap<Edge, usize> {
        let lanes = self.0.iter().filter(|(_, lane)| lane.running > 0);
        lanes
            .map(|((_, edge), lane)| (*edge, lane.running))
            .collect()
    }

    /// Drops entries of copies that are no longer queued, once a queue has more than twice as many entries as there are
    /// copies, plus 64.
    pub(super) fn clean(&mut self, copies: usize, queued: impl Fn(TransferId) -> bool) {
        const FEW: usize = 64;
        for lane in self.0.values_mut() {
            if lane.queue.len() > 2 * copies + FEW {
                lane.queue.retain(|transfer| queued(*transfer));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_precede_promotions_stores_and_moves_to_slower_tiers() {
        let edge = |from, to| Edge { from, to };
        let by_urgency = [
            edge(TierId::Host, TierId::Device),
            edge(TierId::Disk, TierId::Device),
            edge(TierId::Disk, TierId::Host),
            edge(TierId::Remote, TierId::Host),
            edge(TierId::Device, TierId::Host),
            edge(TierId::Device, TierId::Disk),
            edge(TierId::Host, TierId::Disk),
            edge(TierId::Disk, TierId::Remote),
        ];
        let mut lanes = Lanes::default();
        for (edge, id) in by_urgency.into_iter().rev().zip(0..) {
            lanes.push(edge, TransferId(id));
        }
        assert_eq!(lanes.edges(), by_urgency);
        for edge in by_urgency {
            lanes.started(Time(0), edge, 1, None);
            assert_eq!(lanes.pop(Time(0), edge, 1), None, "one runs");
            assert!(lanes.pop(Time(0), edge, 2).is_some());
            assert_eq!(lanes.pop(Time(0), edge, 2), None, "none is left");
        }
    }
}
