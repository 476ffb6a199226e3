//! The times that are measured, and the units of all measures.

use std::process::{Command, Output};
use std::time::Instant;

use serde_json::Value;

use super::side::Side;
use super::verdict::Verdict;
use super::{Measured, RUNS, Row, in_turn};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    Instructions,
    Us,
    Ms,
    /// Milliseconds for 10^9 bytes.
    MsPerGb,
    /// Seconds of one run.
    S,
    Bytes,
    Lines,
}

impl Unit {
    pub(super) fn text(self, value: f64) -> String {
        match self {
            Self::Instructions | Self::Lines => format!("{value:.0}"),
            Self::Us => format!("{value:.1} us"),
            Self::Ms => format!("{value:.2} ms"),
            Self::MsPerGb => format!("{value:.0} ms/GB"),
            Self::S => format!("{value:.0} s"),
            Self::Bytes => format!("{:.1} MB", value / 1e6),
        }
    }

    /// The least difference that is reported, as a share: equal programs in other folders are laid out differently.
    pub(super) fn floor(self) -> f64 {
        match self {
            Self::Instructions => 0.02,
            Self::Us | Self::Ms | Self::MsPerGb | Self::S => 0.15,
            Self::Bytes | Self::Lines => 0.01,
        }
    }

    pub(super) fn word(self, verdict: Verdict) -> &'static str {
        match (self, verdict) {
            (_, Verdict::Same) => "same",
            (Self::Bytes | Self::Lines, Verdict::More) => "larger",
            (Self::Bytes | Self::Lines, Verdict::Less) => "smaller",
            (_, Verdict::More) => "slower",
            (_, Verdict::Less) => "faster",
        }
    }
}

/// A command that prints JSON, and where in it the measures are.
struct Bench {
    program: &'static str,
    command: &'static [&'static str],
    measures: &'static [(&'static str, Unit, &'static str)],
}

use Unit::{Ms, MsPerGb, Us};

/// The options and the names in the JSON are those of the programs of both sides: names of measures are stable, and one
/// that a side lacks is missing in the table.
const BENCHES: [Bench; 6] = [
    Bench {
        program: "kvferry-tools",
        command: &["lookup", "--pages", "10000,1000000", "--rounds", "60"],
        measures: &[
            (
                "lookup among 10 thousand pages",
                Us,
                "/rows/0/lookup_p50_us",
            ),
            (
                "lookup among 10 thousand pages, empty tier",
                Us,
                "/rows/0/empty_tier_p50_us",
            ),
            (
                "lookup among 10 thousand pages, half tier",
                Us,
                "/rows/0/half_tier_p50_us",
            ),
            ("lookup among 1 million pages", Us, "/rows/2/lookup_p50_us"),
            (
                "lookup among 1 million pages, empty tier",
                Us,
                "/rows/2/empty_tier_p50_us",
            ),
            (
                "lookup among 1 million pages, half tier",
                Us,
                "/rows/2/half_tier_p50_us",
            ),
        ],
    },
    Bench {
        program: "kvferry-tools",
        command: &[
            "store",
            "--pages",
            "100000",
            "--under-way",
            "0",
            "--stores",
            "16384",
        ],
        measures: &[
            ("store, sequence of 64 pages", Us, "/0/store_p50_us"),
            ("store, sequence of 8,192 pages", Us, "/1/store_p50_us"),
        ],
    },
    Bench {
        program: "kvferry",
        command: &["copy", "--fragment-kib", "32,8", "--fragments", "1024"],
        measures: &[
            ("gather of 32 KiB", MsPerGb, "/0/gather_gb_per_s/1"),
            ("scatter of 32 KiB", MsPerGb, "/0/scatter_gb_per_s/1"),
            ("gather of 8 KiB", MsPerGb, "/1/gather_gb_per_s/1"),
            ("scatter of 8 KiB", MsPerGb, "/1/scatter_gb_per_s/1"),
            ("order of one page", Us, "/0/one_page/ordered_p50_us"),
        ],
    },
    Bench {
        program: "kvferry",
        command: &["move", "--mib", "128"],
        measures: &[
            ("store of 128 MiB by an engine", Ms, "/store/p50_ms"),
            ("load of 128 MiB by an engine", Ms, "/load/p50_ms"),
        ],
    },
    Bench {
        program: "kvferry",
        command: &["move", "--mib", "2", "--rounds", "500"],
        measures: &[
            ("store of a page by an engine", Ms, "/store/p50_ms"),
            ("load of a page by an engine", Ms, "/load/p50_ms"),
        ],
    },
    Bench {
        program: "kvferry-tools",
        command: &["ping", "--rounds", "500", "--placement", "one-core"],
        measures: &[
            ("round trip of 200 B to a leader", Us, "/0/leader_p50_us"),
            ("round trip of 64 KiB to a leader", Us, "/2/leader_p50_us"),
            ("round trip of 200 B by TLS", Us, "/1/gate_p50_us"),
        ],
    },
];

/// The replay whose whole run is a time.
const REPLAY: (&str, [&str; 5]) = (
    "offline replay",
    ["replay", "--mode", "offline", "--sequential", "--quiet"],
);

/// Measures both sides in turn.
pub(super) fn measure(sides: &[Side; 2], only: &str) -> Vec<Row> {
    let mut rows: Vec<Row> = BENCHES
        .iter()
        .flat_map(|bench| bench.rows(sides, only))
        .collect();
    let (name, command) = REPLAY;
    if name.contains(only) {
        println!("measuring {name}");
        let run = |side: usize| {
            let begun = Instant::now();
            output(Command::new(sides[side].program("kvferry")).args(command))?;
            Ok(begun.elapsed().as_secs_f64() * 1e3)
        };
        let row = |times: &[Measured; 2]| Row {
            name: name.to_owned(),
            unit: Ms,
            sides: times.clone(),
        };
        rows.push(row(&in_turn(RUNS, run, |times| row(times).is_settled())));
    }
    rows
}

impl Bench {
    fn rows(&self, sides: &[Side; 2], only: &str) -> Vec<Row> {
        let named = self.measures.iter();
        let selected: Vec<_> = named.filter(|(name, ..)| name.contains(only)).collect();
        if selected.is_empty() {
            return Vec::new();
        }
        println!("measuring bench {}", self.command.join(" "));
        let run = |side: usize| {
            let mut bench = Command::new(sides[side].program(self.program));
            let output = output(bench.arg("bench").args(self.command).arg("--json"))?;
            serde_json::from_slice::<Value>(&output.stdout)
                .map_err(|error| format!("bench {} prints no JSON: {error}", self.command[0]))
        };
        let rows = |reports: &[Result<Vec<Value>, String>; 2]| -> Vec<Row> {
            let rows = selected.iter().map(|(name, unit, pointer)| Row {
                name: (*name).to_owned(),
                unit: *unit,
                sides: reports.each_ref().map(|reports| {
                    let reports = reports.as_ref().map_err(Clone::clone)?;
                    reports
                        .iter()
                        .map(|report| value(report, pointer, *unit))
                        .collect()
                }),
            });
            rows.collect()
        };
        rows(&in_turn(RUNS, run, |reports| {
            rows(reports).iter().all(Row::is_settled)
        }))
    }
}

fn value(report: &Value, pointer: &str, unit: Unit) -> Result<f64, String> {
    let value = report.pointer(pointer).and_then(Value::as_f64);
    let value = value.ok_or_else(|| format!("the report has no {pointer}"))?;
    Ok(match unit {
        Unit::MsPerGb => 1e3 / value,
        _ => value,
    })
}

fn output(command: &mut Command) -> Result<Output, String> {
    let output = command
        .output()
        .map_err(|error| format!("{command:?}: {error}"))?;
    match output.status.success() {
        true => Ok(output),
        false => Err(failure(&output)),
    }
}

/// The first line that a failed program printed to its standard error, without valgrind's own, and how it ended.
pub(super) fn failure(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let own = |line: &&str| line.starts_with("==") || line.starts_with("--");
    let mut lines = text.lines().filter(|line| !line.is_empty() && !own(line));
    format!(
        "{} ({})",
        lines.next().unwrap_or("no message"),
        output.status
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_rate_becomes_a_time_and_a_missing_number_is_named() {
        let report = json!([{"gather_gb_per_s": [8.0, 10.0, 12.0]}]);
        assert_eq!(
            value(&report, "/0/gather_gb_per_s/1", Unit::MsPerGb),
            Ok(100.0)
        );
        let missing = value(&report, "/0/scatter_gb_per_s/1", Unit::MsPerGb);
        assert_eq!(
            missing,
            Err("the report has no /0/scatter_gb_per_s/1".to_owned())
        );
    }

    #[test]
    fn names_of_measures_differ() {
        let mut names: Vec<&str> = BENCHES
            .iter()
            .flat_map(|bench| bench.measures)
            .map(|measure| measure.0)
            .collect();
        names.push(REPLAY.0);
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
