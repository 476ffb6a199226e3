//! What a status and the monitor report.

use std::collections::BTreeMap;
use std::time::Instant;

use serde_json::Value;

use super::REPORT_LIMIT;
use crate::cluster::monitor::request;
use crate::support::number;

/// A counter of a status, or a difference of some.
pub fn reported(status: &Value, name: &str) -> u64 {
    let counter = |name: &str| number(status, &format!("/counters/{name}"));
    match name {
        "pages read from the disk" => counter("moved_pages") - counter("written_through_pages"),
        _ => counter(name),
    }
}

/// The series of the monitor that are whole lines, by their name with labels.
pub fn metrics(port: u16) -> BTreeMap<String, f64> {
    let text = request(port, "/metrics").map_or(String::new(), |(_, text)| text);
    let lines = text.lines().filter_map(|line| line.rsplit_once(' '));
    let values = lines.filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?)));
    values.collect()
}

/// Waits until the monitor says what the status says, and these tokens by tier and group. A status is read with each look:
/// ten seconds after its end, an engine counts as expired.
pub fn compare_metrics(
    port: u16,
    status: impl Fn() -> Value,
    tokens: &BTreeMap<(&str, usize), u64>,
) {
    let begun = Instant::now();
    loop {
        let (expected, found) = (expected(&status(), tokens), metrics(port));
        // Tokens that were never found have no series.
        let differs =
            |(name, expected): &(&String, &f64)| found.get(*name).unwrap_or(&0.0) != *expected;
        match expected.iter().find(differs) {
            None => return,
            Some(differs) => assert!(begun.elapsed() < REPORT_LIMIT, "{differs:?} in {found:#?}"),
        }
    }
}

/// The series of the monitor that a status and these tokens must be equal to.
fn expected(status: &Value, tokens: &BTreeMap<(&str, usize), u64>) -> BTreeMap<String, f64> {
    let value = |value: &Value| value.as_f64().expect("a number");
    let counters = status["counters"].as_object().expect("counters").iter();
    let mut expected: BTreeMap<String, f64> = counters
        .map(|(name, count)| series(name, value(count)))
        .collect();
    for ((tier, group), tokens) in tokens {
        let labels = format!("{{tier=\"{tier}\",group=\"{group}\"}}");
        let name = format!("kvferry_group_hit_tokens_total{labels}");
        expected.insert(name, *tokens as f64);
    }
    for tier in status["tiers"].as_array().expect("tiers") {
        let label = format!("tier=\"g{}\"", tier["tier"]);
        let fields = [
            ("capacity_pages", "pages"),
            ("blocks", "blocks"),
            ("hit_pages_total", "hit_pages"),
            ("lookup_pages_total", "lookup_pages"),
            ("evicted_pages_total", "evicted_pages"),
        ];
        let fields = fields.map(|(name, field)| (format!("{name}{{{label}}}"), &tier[field]));
        let states = tier["page_states"].as_object().expect("states").iter();
        let states =
            states.map(|(state, count)| (format!("pages{{{label},state=\"{state}\"}}"), count));
        let of_tier = fields.into_iter().chain(states);
        expected
            .extend(of_tier.map(|(name, count)| (format!("kvferry_tier_{name}"), value(count))));
    }
    expected
}

/// The series of a counter, and its value there.
fn series(counter: &str, value: f64) -> (String, f64) {
    let labelled = |metric: &str, labels: &str| format!("kvferry_{metric}_total{{{labels}}}");
    let name = match counter.split_once('_').unwrap_or((counter, "")) {
        ("lookup", "ns") => return ("kvferry_lookup_seconds_total".to_owned(), value / 1e9),
        (what, "us") => return (format!("kvferry_{what}_seconds_total"), value / 1e6),
        ("refused", of) if of != "pages" => {
            let (requests, reason) = of.split_once('_').expect("a reason");
            labelled(
                "refusals",
                &format!("request=\"{requests}\",reason=\"{reason}\""),
            )
        }
        ("expired", what) => labelled("expired", &format!("what=\"{what}\"")),
        (requests @ ("loads" | "stores"), end) => labelled(requests, &format!("end=\"{end}\"")),
        ("blocks", what @ ("loaded" | "refused")) => format!("kvferry_{what}_runs_total"),
        ("blocks", "evicted") => "kvferry_block_evictions_total".to_owned(),
        ("blocks", what) => format!("kvferry_{what}_blocks_total"),
        ("largest", _) => format!("kvferry_{counter}"),
        _ => format!("kvferry_{counter}_total"),
    };
    (name, value)
}
