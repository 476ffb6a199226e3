//! How the values of metrics are read: of each tier, rank, disk, process and edge.

use kvferry_protocol::{
    Connections, DiskStatus, EdgeMeasure, NamespaceMeasure, RankStatus, StatusAnswer, StoredPages,
    TierStatus,
};

use super::metric::{Metric, MetricKind, Source};
use super::reading::{Leader, Reading, process_name};

/// Adds a value for each connection count of each process that answers.
pub(super) fn connections(reading: &Reading, mut add: impl FnMut(&str, &Connections)) {
    if let Ok(leader) = &reading.leader {
        add("leader", &leader.measured.connections);
    }
    for (worker, measured) in &reading.workers {
        if let Ok(measured) = measured {
            add(&process_name(*worker), &measured.connections);
        }
    }
}

/// Adds a value for each code of each worker that answers.
pub(super) fn refused_orders(reading: &Reading, mut add: impl FnMut(&str, &str, u64)) {
    for (worker, measured) in &reading.workers {
        let process = process_name(*worker);
        for (code, count) in measured
            .iter()
            .flat_map(|measured| &measured.refused_orders)
        {
            add(&process, code, *count);
        }
    }
}

/// Restarts, which are known without any answer of a process.
pub(super) const RESTARTS: Metric = counter(
    "kvferry_restarts_total",
    "",
    &["process", "cause"],
    "Starts of a process by `kvferry up` after an earlier one had ended, by the cause of that end. Present in the monitor that `up` has started",
    Source::All(|reading, samples| {
        for restarted in &reading.restarts {
            for (cause, count) in &restarted.causes {
                samples.add([restarted.process.as_str(), cause], *count);
            }
        }
    }),
);

/// Adds a value for each edge of each worker that answers.
pub(super) fn edges(reading: &Reading, mut add: impl FnMut([&str; 3], &EdgeMeasure)) {
    for (worker, measured) in &reading.workers {
        let process = process_name(*worker);
        for edge in measured.iter().flat_map(|measured| &measured.edges) {
            add([&process, &tier(edge.from), &tier(edge.to)], edge);
        }
    }
}

pub(super) fn tier(number: u8) -> String {
    format!("g{number}")
}

/// Adds a value for each tier.
pub(super) fn tiers(leader: &Leader, mut add: impl FnMut(&str, &TierStatus)) {
    for status in &leader.status.tiers {
        add(&tier(status.tier), status);
    }
}

/// Adds a value for each entry of the file `namespaces`.
pub(super) fn namespaces(leader: &Leader, mut add: impl FnMut(&str, &NamespaceMeasure)) {
    for namespace in &leader.measured.namespaces {
        add(&namespace.entry.to_string(), namespace);
    }
}

/// Adds a value for each tier in which an entry of the file `namespaces` has a limit.
pub(super) fn stored_pages(leader: &Leader, mut add: impl FnMut([&str; 2], &StoredPages)) {
    namespaces(leader, |entry, namespace| {
        for stored in &namespace.stored {
            add([entry, &tier(stored.tier)], stored);
        }
    });
}

/// Adds a value for each rank.
pub(super) fn ranks(leader: &Leader, mut add: impl FnMut(&str, &RankStatus)) {
    for rank in &leader.status.ranks {
        add(&format!("worker-{}-{}", rank.replica, rank.rank), rank);
    }
}

/// Adds a value for each disk.
pub(super) fn disks(leader: &Leader, mut add: impl FnMut(&str, &DiskStatus)) {
    ranks(leader, |process, rank| {
        if let Some(disk) = &rank.disk {
            add(process, disk);
        }
    });
}

/// A metric of the leader's status without labels.
pub(super) const fn count(
    name: &'static str,
    counter: &'static str,
    meaning: &'static str,
) -> Metric {
    let (kind, unit) = (MetricKind::Counter, "");
    Metric {
        name,
        kind,
        unit,
        labels: &[],
        meaning,
        source: Source::Counter(counter),
    }
}

pub(super) const fn gauge(
    name: &'static str,
    unit: &'static str,
    labels: &'static [&'static str],
    meaning: &'static str,
    source: Source,
) -> Metric {
    let kind = MetricKind::Gauge;
    Metric {
        name,
        kind,
        unit,
        labels,
        meaning,
        source,
    }
}

pub(super) const fn counter(
    name: &'static str,
    unit: &'static str,
    labels: &'static [&'static str],
    meaning: &'static str,
    source: Source,
) -> Metric {
    let kind = MetricKind::Counter;
    Metric {
        name,
        kind,
        unit,
        labels,
        meaning,
        source,
    }
}

pub(super) const fn histogram(
    name: &'static str,
    labels: &'static [&'static str],
    meaning: &'static str,
    source: Source,
) -> Metric {
    Metric {
        name,
        kind: MetricKind::Histogram,
        unit: "seconds",
        labels,
        meaning,
        source,
    }
}

/// A gauge of the leader's status without labels.
pub(super) const fn of_leader(
    name: &'static str,
    unit: &'static str,
    meaning: &'static str,
    read: fn(&StatusAnswer) -> u64,
) -> Metric {
    gauge(name, unit, &[], meaning, Source::Status(read))
}

/// Adds a value of each tier.
macro_rules! of_tiers {
    ($field:ident) => {
        Source::Leader(|leader, samples| {
            tiers(leader, |tier, status| samples.add([tier], status.$field));
        })
    };
}

/// Adds a value of each rank.
macro_rules! of_ranks {
    ($field:ident) => {
        Source::Leader(|leader, samples| {
            ranks(leader, |process, rank| samples.add([process], rank.$field));
        })
    };
}

/// Adds a value of each disk.
macro_rules! of_disks {
    ($field:ident) => {
        Source::Leader(|leader, samples| {
            disks(leader, |process, disk| samples.add([process], disk.$field));
        })
    };
}

/// Adds a value of the clients of each process.
macro_rules! of_clients {
    ($field:ident) => {
        Source::All(|reading, samples| {
            connections(reading, |process, clients| {
                samples.add([process], clients.$field);
            });
        })
    };
}

/// Adds a value of each edge of each worker.
macro_rules! of_edges {
    ($field:ident) => {
        Source::All(|reading, samples| {
            edges(reading, |labels, edge| samples.add(labels, edge.$field));
        })
    };
    (&$field:ident) => {
        Source::All(|reading, samples| {
            edges(reading, |labels, edge| samples.add(labels, &edge.$field));
        })
    };
}

pub(super) fn counted(status: &StatusAnswer, counter: &str) -> u64 {
    status.counters.get(counter).copied().unwrap_or(0)
}

pub(super) const US: f64 = 1e6;
pub(super) const NS: f64 = 1e9;
pub(super) const EDGE: &[&str] = &["process", "from", "to"];

pub(super) use {of_clients, of_disks, of_edges, of_ranks, of_tiers};
