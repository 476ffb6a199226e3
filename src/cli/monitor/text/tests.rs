use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::cli::monitor::metric::{LABELS, LEADER_SERIES_MAX, Source, WORKER_SERIES_MAX, refusal};
use crate::cli::monitor::reading::Leader;
use kvferry_core::COUNTERS;
use kvferry_protocol::{EdgeMeasure, ErrorCode, Message, RestartedProcess, TierStatus, examples};
use kvferry_shell::LOOKUP_NS;
use kvferry_types::{Rank, Replica, WorkerId};

fn worker(rank: u16) -> WorkerId {
    let (replica, rank) = (Replica(0), Rank(rank));
    WorkerId { replica, rank }
}

/// The numbers of the examples of the wire, with every counter at its place in the list of counters.
fn reading() -> Reading {
    let (mut status, mut measured, mut of_worker) = (None, None, None);
    for (name, message) in examples() {
        match (name, message) {
            ("status_answer", Message::StatusAnswer(answer)) => status = Some(answer),
            ("measure_answer", Message::MeasureAnswer(answer)) => measured = Some(answer),
            ("measure_answer_of_worker", Message::MeasureAnswer(answer)) => {
                of_worker = Some(answer)
            }
            _ => {}
        }
    }
    let mut status = status.expect("an example");
    status.counters = COUNTERS
        .iter()
        .map(|counter| counter.name.to_owned())
        .chain([LOOKUP_NS.to_owned()])
        .zip(1..)
        .collect();
    Reading {
        leader: Ok(Leader {
            status,
            measured: measured.expect("an example"),
        }),
        workers: vec![
            (worker(0), Ok(of_worker.expect("an example"))),
            (worker(1), Err("gone".to_owned())),
        ],
        restarts: vec![RestartedProcess {
            process: "worker-0-1".to_owned(),
            causes: [("out_of_memory".to_owned(), 3)].into(),
        }],
    }
}

/// The types by name.
fn types(text: &str) -> Vec<(&str, &str)> {
    let lines = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    lines.filter_map(|line| line.split_once(' ')).collect()
}

#[test]
fn the_text_has_the_metrics_of_the_list_with_their_types_and_meanings() {
    let text = text(reading()).expect("text");
    let listed = METRICS
        .iter()
        .map(|metric| (metric.name, metric.kind.name()));
    assert_eq!(types(&text), listed.collect::<Vec<_>>());
    for metric in METRICS {
        let help = format!("# HELP {} {}", metric.name, metric.meaning);
        assert!(text.lines().any(|line| line == help), "{help}");
    }
}

#[test]
fn every_metric_has_its_labels_and_one_series_for_each_set_of_values() {
    let reading = reading();
    for metric in METRICS {
        let samples = metric.samples(&reading).0;
        let absent = metric.name == "kvferry_host_memory_pinned_bytes";
        assert_eq!(samples.is_empty(), absent, "{}", metric.name);
        let all: BTreeSet<_> = samples.iter().map(|(labels, _)| labels).collect();
        assert_eq!(all.len(), samples.len(), "{}", metric.name);
        for (labels, value) in &samples {
            assert_eq!(labels.len(), metric.labels.len(), "{}", metric.name);
            let durations = matches!(value, Value::Durations(_));
            assert_eq!(
                durations,
                metric.kind == MetricKind::Histogram,
                "{}",
                metric.name
            );
        }
    }
}

#[test]
fn names_units_and_labels_follow_the_rules() {
    let known: BTreeSet<&str> = LABELS.iter().map(|label| label.name).collect();
    let mut used = BTreeSet::new();
    let mut names = BTreeSet::new();
    for metric in METRICS {
        let (name, unit) = (metric.name, metric.unit);
        assert!(names.insert(name), "{name} is listed twice");
        assert!(name.starts_with("kvferry_"), "{name}");
        let is_counter = metric.kind == MetricKind::Counter;
        assert_eq!(name.ends_with("_total"), is_counter, "{name}");
        if matches!(unit, "bytes" | "seconds") {
            let base = name.strip_suffix("_total").unwrap_or(name);
            assert!(base.ends_with(unit), "{name} is in {unit}");
        }
        assert!(
            metric
                .meaning
                .chars()
                .next()
                .is_some_and(|first| !first.is_lowercase())
        );
        used.extend(metric.labels);
    }
    assert_eq!(
        used, known,
        "labels that are used, and those that are described"
    );
}

/// Counters of the status that are gauges or sums of others in the list.
const READ_BY_FUNCTIONS: &[&str] = &["largest_eviction_pages", "largest_reset_slice_pages"];

#[test]
fn every_counter_of_the_status_is_a_metric_and_has_its_value() {
    let reading = reading();
    let mut metrics: BTreeMap<&str, f64> = BTreeMap::new();
    for metric in METRICS {
        let samples = metric.samples(&reading).0;
        let number = |value: &Value| match value {
            Value::Count(count) => *count as f64,
            Value::Number(number) => *number,
            Value::Durations(_) => panic!("no counter"),
        };
        match metric.source {
            Source::Counter(name) => {
                metrics.insert(name, number(&samples[0].1));
            }
            Source::Time(name, per_s) => {
                metrics.insert(name, (number(&samples[0].1) * per_s).round());
            }
            Source::Counters(names) => {
                for ((_, name), (_, value)) in names.iter().zip(&samples) {
                    metrics.insert(name, number(value));
                }
            }
            _ => {}
        }
    }
    let Ok(leader) = &reading.leader else {
        panic!("it answered")
    };
    for (name, value) in &leader.status.counters {
        let found = metrics.get(name.as_str()).copied();
        match refusal(name).is_some() || READ_BY_FUNCTIONS.contains(&name.as_str()) {
            true => assert_eq!(found, None, "{name}"),
            false => assert_eq!(found, Some(*value as f64), "{name}"),
        }
    }
    let refusals = METRICS
        .iter()
        .find(|metric| matches!(metric.source, Source::Refusals));
    let refusals = refusals.expect("a metric").samples(&reading).0;
    let counted = leader
        .status
        .counters
        .keys()
        .filter(|name| refusal(name).is_some());
    assert_eq!(refusals.len(), counted.count());
}

#[test]
fn values_are_written_with_their_labels_and_histograms_add_up() {
    let text = text(reading()).expect("text");
    for line in [
        "kvferry_up{process=\"leader\"} 1",
        "kvferry_up{process=\"worker-0-1\"} 0",
        "kvferry_build_info{version=\"0.1.0\"} 1",
        "kvferry_group_hit_tokens_total{tier=\"g3\",group=\"1\"} 320",
        "kvferry_copies_total{process=\"worker-0-0\",from=\"g1\",to=\"g2\",end=\"complete\"} 11",
        "kvferry_copy_queue_seconds_bucket{process=\"worker-0-0\",from=\"g1\",to=\"g2\",le=\"5e-05\"} 1",
        "kvferry_copy_queue_seconds_bucket{process=\"worker-0-0\",from=\"g1\",to=\"g2\",le=\"0.00025\"} 12",
        "kvferry_copy_queue_seconds_bucket{process=\"worker-0-0\",from=\"g1\",to=\"g2\",le=\"+Inf\"} 12",
        "kvferry_copy_queue_seconds_count{process=\"worker-0-0\",from=\"g1\",to=\"g2\"} 12",
        "kvferry_copy_queue_seconds_sum{process=\"worker-0-0\",from=\"g1\",to=\"g2\"} 0.004",
        "kvferry_disk_health{process=\"worker-0-0\",health=\"read_only\"} 1",
        "kvferry_disk_health{process=\"worker-0-0\",health=\"ok\"} 0",
        "kvferry_errors_total{process=\"leader\",code=\"busy\"} 10",
        "kvferry_refused_messages_total{process=\"leader\",code=\"malformed\"} 11",
        "kvferry_repeated_requests_total{process=\"leader\"} 12",
        "kvferry_refused_orders_total{process=\"worker-0-0\",code=\"stale_epoch\"} 13",
    ] {
        assert!(text.lines().any(|one| one == line), "{line}");
    }
}

#[test]
fn without_a_leader_its_metrics_have_no_series_and_it_is_down() {
    let text = text(Reading {
        leader: Err("gone".to_owned()),
        workers: vec![(worker(0), Err("gone".to_owned()))],
        restarts: Vec::new(),
    });
    let text = text.expect("text");
    let series: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let down = [
        "kvferry_up{process=\"leader\"} 0",
        "kvferry_up{process=\"worker-0-0\"} 0",
    ];
    assert_eq!(series, down);
    assert_eq!(types(&text).len(), METRICS.len());
}

/// The lines of series.
fn series(reading: Reading) -> usize {
    let text = text(reading).expect("text");
    text.lines().filter(|line| !line.starts_with('#')).count()
}

#[test]
fn a_deployment_has_no_more_series_than_the_documents_say() {
    let errors = || {
        let codes = ErrorCode::ALL.iter();
        codes
            .map(|code| (code.name().to_owned(), 0))
            .collect::<BTreeMap<_, _>>()
    };
    let mut whole = reading();
    let Ok(leader) = &mut whole.leader else {
        panic!("it answered")
    };
    leader.measured.connections.errors = errors();
    leader.measured.connections.refused_messages = errors();
    leader.measured.hits.clear();
    let states = [
        "free",
        "reserved",
        "filling",
        "ready",
        "quarantined",
        "out_of_use",
    ];
    let tier = |tier| TierStatus {
        tier,
        page_states: states.map(|state| (state.to_owned(), 0)).into(),
        ..TierStatus::default()
    };
    leader.status.tiers = vec![tier(2), tier(3)];
    leader.status.ranks.truncate(1);
    leader.status.ranks[0].host_pinned_bytes = Some(1);
    let Ok(measured) = &mut whole.workers[0].1 else {
        panic!("it answered")
    };
    measured.connections.errors = errors();
    measured.connections.refused_messages = errors();
    measured.refused_orders = errors();
    let edges = [(1, 2), (2, 1), (2, 3), (3, 2)];
    let edges = edges.map(|(from, to)| EdgeMeasure {
        from,
        to,
        ..EdgeMeasure::default()
    });
    measured.edges = edges.into();
    whole.workers.truncate(1);
    let both = series(whole);
    let mut without = reading();
    let Ok(leader) = &mut without.leader else {
        panic!("it answered")
    };
    leader.measured.connections.errors = errors();
    leader.measured.connections.refused_messages = errors();
    leader.measured.hits.clear();
    leader.status.tiers = vec![tier(2), tier(3)];
    leader.status.ranks.clear();
    without.workers.clear();
    let of_leader = series(without);
    assert!(of_leader <= LEADER_SERIES_MAX, "{of_leader}");
    assert!(
        both - of_leader <= WORKER_SERIES_MAX,
        "{}",
        both - of_leader
    );
}
