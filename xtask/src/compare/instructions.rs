//! Counts of instructions, by valgrind.

use std::path::Path;
use std::process::Command;

use super::measures::{Unit, failure};
use super::side::Side;
use super::{COUNTS, Row, in_turn};

/// A measure: the work of `kvferry-tools bench steps`, and the rounds of the run that is subtracted and of the other one.
struct Work {
    name: &'static str,
    program: &'static str,
    command: &'static [&'static str],
    rounds: [u32; 2],
}

const fn steps(name: &'static str, command: &'static [&'static str]) -> Work {
    Work {
        name,
        program: "kvferry-tools",
        command,
        rounds: [16, 144],
    }
}

const WORKS: [Work; 7] = [
    steps("lookup", &["bench", "steps", "lookup", "--rounds"]),
    steps(
        "lookup, empty tier",
        &["bench", "steps", "lookup-empty-tier", "--rounds"],
    ),
    steps(
        "lookup, half tier",
        &["bench", "steps", "lookup-half-tier", "--rounds"],
    ),
    steps(
        "store of 64 pages",
        &["bench", "steps", "store", "--rounds"],
    ),
    steps("order, coded", &["bench", "steps", "order", "--rounds"]),
    steps(
        "copy, small fragments",
        &["bench", "steps", "copy", "--rounds"],
    ),
    Work {
        name: "replayed request",
        program: "kvferry",
        command: &[
            "replay",
            "--mode",
            "offline",
            "--sequential",
            "--quiet",
            "--requests",
        ],
        rounds: [50, 250],
    },
];

/// Counts the instructions of each work on both sides.
pub(super) fn measure(sides: &[Side; 2], only: &str) -> Vec<Row> {
    let named = WORKS
        .iter()
        .map(|work| (format!("instructions: {}", work.name), work));
    let selected: Vec<_> = named.filter(|(name, _)| name.contains(only)).collect();
    if !selected.is_empty() && Command::new("valgrind").arg("--version").output().is_err() {
        println!("instructions are not counted: install valgrind");
        return Vec::new();
    }
    let rows = selected.into_iter().map(|(name, work)| {
        println!("counting {name}");
        let run = |side: usize| {
            let count = |rounds| count(&sides[side].program(work.program), work.command, rounds);
            let [few, many] = work.rounds;
            let more = count(many)?.checked_sub(count(few)?);
            let more = more.ok_or("more rounds took fewer instructions")?;
            Ok(more as f64 / f64::from(many - few))
        };
        let sides = in_turn([COUNTS; 2], run, |_| true);
        Row {
            name,
            unit: Unit::Instructions,
            sides,
        }
    });
    rows.collect()
}

/// Instructions of a whole run.
fn count(program: &Path, command: &[&str], rounds: u32) -> Result<u64, String> {
    let mut valgrind = Command::new("valgrind");
    valgrind.args([
        "--tool=cachegrind",
        "--cache-sim=no",
        "--cachegrind-out-file=/dev/null",
    ]);
    valgrind.arg(program).args(command).arg(rounds.to_string());
    let output = valgrind
        .output()
        .map_err(|error| format!("valgrind: {error}"))?;
    if !output.status.success() {
        return Err(failure(&output));
    }
    let text = String::from_utf8_lossy(&output.stderr);
    counted(&text).ok_or_else(|| format!("valgrind printed no count: {}", failure(&output)))
}

/// The number in a line such as `==7== I   refs:      28,817,381`.
fn counted(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.contains("refs:"))?;
    let (_, number) = line.split_once("refs:")?;
    number.trim().replace(',', "").parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_is_read_from_what_valgrind_prints() {
        let text = "==520== warning: L3 cache found\n==520== \n==520== I   refs:      28,817,381\n";
        assert_eq!(counted(text), Some(28_817_381));
        assert_eq!(counted("==520== Segmentation fault"), None);
    }
}
