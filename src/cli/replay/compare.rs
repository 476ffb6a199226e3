//! Comparison of two reports of the same requests: a simulated and a live replay.

use std::path::Path;

use serde_json::Value;

use crate::error::CommandError;

use super::report::REPORT_VERSION;

/// Largest size of a report, in bytes.
const REPORT_BYTES_MAX: u64 = 16 << 20;

/// Keys that must be equal in both reports; of an object, every key. Otherwise the reports describe different replays.
const EQUAL: [&str; 5] = [
    "/trace/digest",
    "/trace/block_tokens",
    "/sequential",
    "/setup",
    "/restart/at",
];

/// Keys that are shown.
const SHOWN: [&str; 39] = [
    "/requests",
    "/disturbed_requests",
    "/tokens/prompt",
    "/tokens/hit_g1",
    "/tokens/hit_g2",
    "/tokens/hit_g3",
    "/tokens/computed",
    "/restart/listed_pages",
    "/restart/tokens/hit_g1",
    "/restart/tokens/hit_g2",
    "/restart/tokens/hit_g3",
    "/restart/tokens/computed",
    "/blocks/stored",
    "/blocks/grown",
    "/blocks/loaded",
    "/blocks/evicted",
    "/blocks/refused",
    "/bytes/gathered",
    "/bytes/scattered",
    "/rates/gather_gb_per_s",
    "/rates/scatter_gb_per_s",
    "/latency_us/lookup_p50",
    "/latency_us/lookup_p99",
    "/latency_us/load_p50",
    "/latency_us/load_p95",
    "/latency_us/load_p99",
    "/first_token_us/p50",
    "/first_token_us/p95",
    "/first_token_us/p99",
    "/first_token_us/without_p50",
    "/first_token_us/without_p95",
    "/first_token_us/without_p99",
    "/waits/page_waits",
    "/waits/page_wait_seconds",
    "/waits/refused_stores",
    "/prefill_seconds/with",
    "/prefill_seconds/without",
    "/seconds/virtual",
    "/seconds/wall",
];

/// Reads both reports and returns the table.
pub(super) fn run(live: &Path, offline: &Path) -> Result<String, CommandError> {
    let (first, second) = (read(live)?, read(offline)?);
    check(&first, &second).map_err(|why| {
        let (live, offline) = (live.display(), offline.display());
        CommandError::Data(format!("{live} and {offline} cannot be compared: {why}"))
    })?;
    Ok(table(&first, &second))
}

fn read(path: &Path) -> Result<Value, CommandError> {
    let refuse = |why: &dyn std::fmt::Display| {
        CommandError::Data(format!("--compare {}: {why}", path.display()))
    };
    let length = std::fs::metadata(path)
        .map_err(|error| refuse(&error))?
        .len();
    if length > REPORT_BYTES_MAX {
        return Err(refuse(&format!("more than {REPORT_BYTES_MAX} bytes")));
    }
    let text = std::fs::read_to_string(path).map_err(|error| refuse(&error))?;
    let report: Value = serde_json::from_str(&text).map_err(|error| refuse(&error))?;
    match report.get("version").and_then(Value::as_u64) {
        Some(version) if version == u64::from(REPORT_VERSION) => Ok(report),
        Some(version) => Err(refuse(&format!(
            "version is {version}, this program reads {REPORT_VERSION}: write the report again"
        ))),
        None => Err(refuse(
            &"version is missing: this is no report of kvferry replay --json",
        )),
    }
}

/// A key that must be equal in both reports, and is not.
#[derive(Debug, PartialEq, thiserror::Error)]
#[error("{key} is {first} in the first and {second} in the second")]
struct Difference {
    key: String,
    first: Value,
    second: Value,
}

/// Checks the keys that must be equal. The error names the first one that differs.
fn check(first: &Value, second: &Value) -> Result<(), Difference> {
    for path in EQUAL {
        let (a, b) = (first.pointer(path), second.pointer(path));
        let (a, b) = (a.unwrap_or(&Value::Null), b.unwrap_or(&Value::Null));
        match (a, b) {
            (Value::Object(a), Value::Object(b)) => {
                for key in a.keys().chain(b.keys()) {
                    let (a, b) = (a.get(key), b.get(key));
                    let (a, b) = (a.unwrap_or(&Value::Null), b.unwrap_or(&Value::Null));
                    equal(&format!("{path}/{key}"), a, b)?;
                }
            }
            _ => equal(path, a, b)?,
        }
    }
    Ok(())
}

fn equal(path: &str, a: &Value, b: &Value) -> Result<(), Difference> {
    if a == b {
        return Ok(());
    }
    Err(Difference {
        key: name(path),
        first: a.clone(),
        second: b.clone(),
    })
}

fn name(path: &str) -> String {
    path.trim_start_matches('/').replace('/', ".")
}

fn table(first: &Value, second: &Value) -> String {
    let mode = |report: &Value| {
        let mode = report.get("mode").and_then(Value::as_str);
        mode.unwrap_or("-").to_owned()
    };
    let (a, b) = (mode(first), mode(second));
    let mut lines = vec![format!(
        "{:<28} {a:>16} {b:>16} {:>9} {:>16}",
        "", "ratio", "difference"
    )];
    for path in SHOWN {
        let number = |report: &Value| report.pointer(path).and_then(Value::as_f64);
        let (a, b) = (number(first), number(second));
        let both = a.zip(b);
        let ratio = both.filter(|(a, _)| *a != 0.0).map(|(a, b)| b / a);
        let ratio = ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.3}"));
        let difference = show(both.map(|(a, b)| b - a));
        let (a, b) = (show(a), show(b));
        lines.push(format!(
            "{:<28} {a:>16} {b:>16} {ratio:>9} {difference:>16}",
            name(path)
        ));
    }
    lines.join("\n")
}

/// Formats a whole number as such, any other with three decimals.
fn show(number: Option<f64>) -> String {
    match number {
        None => "-".to_owned(),
        Some(number) if number.fract() == 0.0 => format!("{number:.0}"),
        Some(number) => format!("{number:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn report(ranks: u64, hits: u64) -> Value {
        json!({
            "version": REPORT_VERSION, "mode": "live", "sequential": false,
            "trace": {"digest": "blake3:00", "block_tokens": 16},
            "setup": {"ranks": ranks},
            "tokens": {"hit_g2": hits},
            "first_token_us": {"p50": 100},
        })
    }

    #[test]
    fn different_setups_are_named() {
        assert_eq!(check(&report(2, 1), &report(2, 9)), Ok(()));
        let why = check(&report(2, 1), &report(4, 1))
            .expect_err("different")
            .to_string();
        assert_eq!(why, "setup.ranks is 2 in the first and 4 in the second");
        let mut other = report(2, 1);
        other["setup"]["speedup"] = json!(2.0);
        let why = check(&report(2, 1), &other)
            .expect_err("different")
            .to_string();
        assert_eq!(
            why,
            "setup.speedup is null in the first and 2.0 in the second"
        );
        other = report(2, 1);
        other["trace"]["digest"] = json!("blake3:01");
        assert!(check(&report(2, 1), &other).is_err_and(|why| why.key == "trace.digest"));
    }

    #[test]
    fn each_key_has_both_values_their_ratio_and_difference() {
        let text = table(&report(2, 200), &report(2, 150));
        let line = |key: &str| {
            let line = text.lines().find(|line| line.starts_with(key)).expect(key);
            line.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            line("tokens.hit_g2"),
            ["tokens.hit_g2", "200", "150", "0.750", "-50"]
        );
        assert_eq!(
            line("first_token_us.p50 "),
            ["first_token_us.p50", "100", "100", "1.000", "0"]
        );
        assert_eq!(
            line("seconds.virtual"),
            ["seconds.virtual", "-", "-", "-", "-"]
        );
    }
}
