//! Numbers of copies by edge.

use super::*;
use kvferry_types::{LATENCY_BOUNDS_US, LatencyHistogram};

const MS: u64 = 1_000_000;

fn counts(worker: &Worker, edge: Edge) -> EdgeCounts {
    let counts = worker.edge_counts().get(&edge).copied();
    counts.unwrap_or_default()
}

fn histogram(us: &[u64]) -> LatencyHistogram {
    let mut histogram = LatencyHistogram::default();
    us.iter().for_each(|us| histogram.note(*us));
    histogram
}

fn slow(transfer: Transfer) -> Transfer {
    Transfer {
        deadline: Time(1_000 * MS),
        ..transfer
    }
}

#[test]
fn a_copy_counts_on_its_edge_with_the_time_in_its_lane_and_the_time_that_it_ran() {
    let mut worker = serving(WorkerSettings::new(1));
    order(&mut worker, 1, 1, vec![slow(load(1)), slow(load(2))]);
    let copied = |id, us| EndedCopy {
        bytes: 10,
        copy_us: us,
        ..complete(id)
    };
    ended(&mut worker, 3 * MS, vec![copied(1, 3_000)]);
    // The second one waited for the first one.
    ended(&mut worker, 7 * MS, vec![copied(2, 4_000)]);
    let expected = EdgeCounts {
        complete: 2,
        incomplete: 0,
        bytes: 20,
        queue: histogram(&[0, 3_000]),
        copy: histogram(&[3_000, 4_000]),
    };
    assert_eq!(counts(&worker, Edge::LOAD), expected);
    assert_eq!(counts(&worker, Edge::STORE), EdgeCounts::default());
}

#[test]
fn a_copy_that_did_not_run_or_ended_late_is_incomplete_and_only_one_that_ran_has_times() {
    let mut worker = worker();
    order(&mut worker, 1, 1, vec![store(1, 1), store(2, 2)]);
    written(&mut worker, 1);
    // The second store waits for its engine until its deadline, at 100 ns.
    ended(&mut worker, 101, vec![complete(1)]);
    let counts = counts(&worker, Edge::STORE);
    assert_eq!((counts.complete, counts.incomplete), (0, 2));
    let timed: u64 = counts.copy.counts().iter().sum();
    assert_eq!(timed, 1);
    assert_eq!(counts.copy.counts().len(), LATENCY_BOUNDS_US.len() + 1);
}

#[test]
fn bytes_of_copies_are_counted_up_to_the_largest_number() {
    let mut worker = serving(WorkerSettings::new(1));
    order(&mut worker, 1, 1, vec![slow(load(1)), slow(load(2))]);
    for id in [1, 2] {
        let copied = EndedCopy {
            bytes: u64::MAX - 1,
            ..complete(id)
        };
        ended(&mut worker, MS, vec![copied]);
    }
    assert_eq!(counts(&worker, Edge::LOAD).bytes, u64::MAX);
}

#[test]
fn open_copies_are_counted_by_what_they_wait_for() {
    let mut worker = serving(WorkerSettings::new(1));
    let all = vec![load(1), load(2), load(3), store(4, 5), between(5)];
    order(&mut worker, 1, 1, all);
    let load = |waiting, queued, running| EdgeLoad {
        waiting,
        queued,
        running,
    };
    let loads = worker.edge_loads();
    assert_eq!(loads[&Edge::LOAD], load(0, 2, 1));
    assert_eq!(loads[&Edge::STORE], load(1, 0, 0));
    let to_disk = between(9).edge;
    assert_eq!(loads[&to_disk], load(0, 0, 1));
    ended(&mut worker, 0, vec![complete(1), complete(5)]);
    let loads = worker.edge_loads();
    assert_eq!(loads[&Edge::LOAD], load(0, 1, 1));
    assert_eq!(loads.get(&to_disk), None);
}
