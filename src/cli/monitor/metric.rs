//! What a metric is, its labels, and how its values are read.

use kvferry_protocol::limits::NAMESPACE_ENTRIES_MAX;
use kvferry_protocol::{Durations, StatusAnswer};

use super::reading::{Leader, Reading};

/// The type of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetricKind {
    /// A number that only grows, until its process starts again.
    Counter,
    /// A number that grows and shrinks.
    Gauge,
    /// Durations, by bucket.
    Histogram,
}

impl MetricKind {
    /// The name in the list.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// A metric.
#[derive(Debug, Clone, Copy)]
pub struct Metric {
    /// The name of its series. Those of a histogram end with `_bucket`, `_sum` and `_count` besides.
    pub name: &'static str,
    /// Its type.
    pub kind: MetricKind,
    /// The unit of its value; empty for a plain number.
    pub unit: &'static str,
    /// The names of its labels, see [`LABELS`].
    pub labels: &'static [&'static str],
    /// Its meaning, in Markdown.
    pub meaning: &'static str,
    pub(super) source: Source,
}

/// A label.
#[derive(Debug, Clone, Copy)]
pub struct Label {
    /// Its name.
    pub name: &'static str,
    /// Its values, in Markdown.
    pub values: &'static str,
    /// Most values that it has in one deployment, for words; `None` for one value for each process.
    pub most: Option<usize>,
}

/// Every label. None has a token, a hash, a namespace or anything else of a request.
pub const LABELS: &[Label] = &[
    Label {
        name: "process",
        values: "`leader`, and `worker-R-N` for rank N of replica R; of restarts also `monitor`",
        most: None,
    },
    Label {
        name: "tier",
        values: "`g2`, `g3`",
        most: Some(2),
    },
    Label {
        name: "entry",
        values: "number of an entry in the file of the setting `namespaces`, from 1",
        most: Some(NAMESPACE_ENTRIES_MAX),
    },
    Label {
        name: "group",
        values: "numbers of groups of layers; most models have group 0 only",
        most: Some(255),
    },
    Label {
        name: "from",
        values: "the tier that copies read: `g1` (the engine's memory), `g2`, `g3`",
        most: Some(3),
    },
    Label {
        name: "to",
        values: "the tier that copies write",
        most: Some(3),
    },
    Label {
        name: "state",
        values: "of a page: `free`, `reserved`, `filling`, `ready`, `quarantined`, `out_of_use`",
        most: Some(6),
    },
    Label {
        name: "end",
        values: "of a request: `done`, `short`, `failed`, `cancelled`; of a copy: `complete`, `incomplete`",
        most: Some(3),
    },
    Label {
        name: "request",
        values: "`lookups`, `loads`, `stores`",
        most: Some(3),
    },
    Label {
        name: "reason",
        values: "of a refusal: a name of an [error code](error-codes.md)",
        most: Some(20),
    },
    Label {
        name: "cause",
        values: "of a restart: `exit` (with a code), `signal`, `out_of_memory` (the kernel ended the process), `fenced` (on request of the leader), `not_started`, `unknown`",
        most: Some(6),
    },
    Label {
        name: "code",
        values: "a name of an [error code](error-codes.md)",
        most: Some(20),
    },
    Label {
        name: "what",
        values: "`holds`, `loads`, `stores`, `engines`",
        most: Some(4),
    },
    Label {
        name: "stage",
        values: "`waiting` (for its engine), `queued`, `running`",
        most: Some(3),
    },
    Label {
        name: "role",
        values: "`engine`, `rank`, `worker`, `admin`, `stranger` (no hello yet)",
        most: Some(5),
    },
    Label {
        name: "health",
        values: "`ok`, `full`, `read_only`, `off`",
        most: Some(4),
    },
    Label {
        name: "version",
        values: "version of the program",
        most: Some(1),
    },
];

/// Most series of one leader, without those of its groups of layers, of which each has one for each tier.
pub const LEADER_SERIES_MAX: usize = 280;
/// Most series of one worker, with four edges and a disk.
pub const WORKER_SERIES_MAX: usize = 350;

/// Where the values of a metric come from.
#[derive(Debug, Clone, Copy)]
pub(super) enum Source {
    /// A counter of the leader's status.
    Counter(&'static str),
    /// A counter of the leader's status in microseconds or nanoseconds, with the number of those in a second.
    Time(&'static str, f64),
    /// Counters of the leader's status, by the value of the only label.
    Counters(&'static [(&'static str, &'static str)]),
    /// Counters of the leader's status whose names are `refused_`, the request and the reason.
    Refusals,
    /// A number of the leader's status.
    Status(fn(&StatusAnswer) -> u64),
    /// The numbers of a leader that answers.
    Leader(fn(&Leader, &mut Samples)),
    /// All numbers.
    All(fn(&Reading, &mut Samples)),
}

/// The value of a series.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    /// A whole number.
    Count(u64),
    /// A number.
    Number(f64),
    /// A histogram.
    Durations(Durations),
}

impl From<u64> for Value {
    fn from(count: u64) -> Self {
        Self::Count(count)
    }
}

impl From<u32> for Value {
    fn from(count: u32) -> Self {
        Self::Count(count.into())
    }
}

impl From<bool> for Value {
    fn from(is_true: bool) -> Self {
        Self::Count(is_true.into())
    }
}

impl From<&Durations> for Value {
    fn from(durations: &Durations) -> Self {
        Self::Durations(durations.clone())
    }
}

/// The series of one metric: the values of its labels, and its value.
#[derive(Debug, Default)]
pub(super) struct Samples(pub(super) Vec<(Vec<String>, Value)>);

impl Samples {
    pub(super) fn add<const N: usize>(&mut self, labels: [&str; N], value: impl Into<Value>) {
        let labels = labels.map(str::to_owned).to_vec();
        self.0.push((labels, value.into()));
    }
}

impl Metric {
    /// The series of the metric.
    pub(super) fn samples(&self, reading: &Reading) -> Samples {
        let mut samples = Samples::default();
        let leader = reading.leader.as_ref().ok();
        let counters = leader.map(|leader| &leader.status.counters);
        let counter = |name: &str| counters.and_then(|counters| counters.get(name).copied());
        match self.source {
            Source::Counter(name) => {
                if let Some(count) = counter(name) {
                    samples.add([], count);
                }
            }
            Source::Time(name, per_s) => {
                if let Some(time) = counter(name) {
                    samples.add([], Value::Number(time as f64 / per_s));
                }
            }
            Source::Counters(names) => {
                for (label, name) in names {
                    if let Some(count) = counter(name) {
                        samples.add([label], count);
                    }
                }
            }
            Source::Refusals => {
                for (name, count) in counters.into_iter().flatten() {
                    if let Some((request, reason)) = refusal(name) {
                        samples.add([request, reason], *count);
                    }
                }
            }
            Source::Status(read) => {
                if let Some(leader) = leader {
                    samples.add([], read(&leader.status));
                }
            }
            Source::Leader(read) => {
                if let Some(leader) = leader {
                    read(leader, &mut samples);
                }
            }
            Source::All(read) => read(reading, &mut samples),
        }
        samples
    }
}

/// The request and the reason that a counter of refusals names.
pub(super) fn refusal(counter: &str) -> Option<(&str, &str)> {
    let (request, reason) = counter.strip_prefix("refused_")?.split_once('_')?;
    matches!(request, "lookups" | "loads" | "stores").then_some((request, reason))
}
