//! Fuzzers: `cargo xtask fuzz [TARGET...]` runs the targets of `fuzz/`, and `cargo xtask fuzz live` sends changed messages
//! to real processes.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::vllm;

/// A target of `fuzz/`.
struct Target {
    name: &'static str,
    /// Bytes of the longest input. That of messages is larger than any list whose length is limited by something else than
    /// its bytes. That of choices has about as many choices as the target reads.
    longest: u32,
    input: Input,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Input {
    /// Bytes of a format, with numbers at limits and words: the program's comparisons with constants are traced, and their
    /// values used in inputs.
    Format,
    /// Choices ([`input`](../../src/fuzzing/input.rs)), in which no such value occurs. Tracing comparisons would take half
    /// of the time.
    Choices,
}

const TARGETS: [Target; 8] = [
    target("frame", 65_536, Input::Format),
    target("body", 65_536, Input::Format),
    target("transfer_twin", 65_536, Input::Format),
    target("zmtp", 4096, Input::Format),
    target("registration", 4096, Input::Format),
    target("server", 512, Input::Choices),
    target("leader_core", 512, Input::Choices),
    target("worker_core", 512, Input::Choices),
];

const fn target(name: &'static str, longest: u32, input: Input) -> Target {
    Target {
        name,
        longest,
        input,
    }
}

/// An input that takes longer is a finding, in seconds.
const INPUT_TIMEOUT: &str = "-timeout=10";
/// The same for memory, in MiB.
const MEMORY_MAX: &str = "-rss_limit_mb=1024";
/// Messages of each test of `live`.
const LIVE_MESSAGES: &str = "100000";

/// How long each target runs.
#[derive(Debug, PartialEq)]
struct Limits {
    runs: u64,
    seconds: u64,
    /// Targets that run at a time.
    at_once: usize,
}

/// Runs the named targets, or all of them.
pub(crate) fn run(root: &Path, arguments: &[String]) -> Result<(), String> {
    let (names, limits) = parse(arguments)?;
    if names.iter().any(|name| name == "live") {
        return match arguments.len() {
            1 => live(root),
            _ => Err("live takes no targets and no limits".to_owned()),
        };
    }
    if let Some(unknown) = names.iter().find(|name| find(name).is_none()) {
        let known = TARGETS.map(|target| target.name).join(", ");
        return Err(format!(
            "'{unknown}' is no target: name some of {known}, or live"
        ));
    }
    let named = |target: &&Target| names.is_empty() || names.iter().any(|name| name == target.name);
    let chosen: Vec<&Target> = TARGETS.iter().filter(named).collect();
    for input in [Input::Format, Input::Choices] {
        let targets = chosen.iter().filter(|target| target.input == input);
        for target in targets {
            build(root, target)?;
        }
    }
    let queue: Mutex<VecDeque<&Target>> = Mutex::new(chosen.iter().copied().collect());
    let next = || {
        let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.pop_front()
    };
    let ended: Mutex<Vec<(usize, Result<Row, String>)>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..limits.at_once {
            scope.spawn(|| {
                while let Some(target) = next() {
                    let row = fuzz(root, target, &limits);
                    let place = TARGETS.iter().position(|other| other.name == target.name);
                    let mut ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
                    ended.push((place.unwrap_or_default(), row));
                }
            });
        }
    });
    let mut ended = ended.into_inner().unwrap_or_else(PoisonError::into_inner);
    ended.sort_by_key(|(place, _)| *place);
    let mut rows = Vec::new();
    for (_, row) in ended {
        rows.push(row?);
    }
    println!("{}", table(&rows));
    let found = rows.iter().filter(|row| row.found).map(|row| row.target);
    let found: Vec<&str> = found.collect();
    match found.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "{} found inputs, which are in fuzz/artifacts: copy each to fuzz/corpus, and mend what it shows",
            found.join(", ")
        )),
    }
}

fn find(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

/// The names of targets, and the limits: 10 minutes or 10 million runs of each, unless other limits are given.
fn parse(arguments: &[String]) -> Result<(Vec<String>, Limits), String> {
    let mut limits = Limits {
        runs: 10_000_000,
        seconds: 600,
        at_once: 1,
    };
    let (mut names, mut timed) = (Vec::new(), false);
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let mut number = || {
            let given = rest
                .next()
                .and_then(|given| given.replace('_', "").parse().ok());
            given
                .filter(|given: &u64| *given > 0)
                .ok_or_else(|| format!("{argument} needs a number above 0"))
        };
        match argument.as_str() {
            "--runs" => {
                limits.runs = number()?;
                // A number of runs alone is the only limit.
                if !timed {
                    limits.seconds = 0;
                }
            }
            "--seconds" => (limits.seconds, timed) = (number()?, true),
            "--at-once" => limits.at_once = usize::try_from(number()?).unwrap_or(usize::MAX).min(8),
            flag if flag.starts_with('-') => {
                return Err(format!(
                    "'{flag}' is unknown: use --runs, --seconds or --at-once"
                ));
            }
            name => names.push(name.to_owned()),
        }
    }
    Ok((names, limits))
}

/// The folder of what is built. Both kinds of targets have one of their own, because their dependencies are compiled with
/// other flags.
fn built(root: &Path, input: Input) -> PathBuf {
    match input {
        Input::Format => root.join("target/fuzz"),
        Input::Choices => root.join("target/fuzz/choices"),
    }
}

/// Builds a target. No sanitizer: the packages that the targets call forbid `unsafe`, except for the bytes of memory and
/// of sockets, which no target reaches, so that AddressSanitizer would find nothing and take half of the runs.
fn build(root: &Path, target: &Target) -> Result<(), String> {
    let mut command = crate::cargo_command();
    command
        .current_dir(root.join("fuzz"))
        // The fuzzer needs flags of the compiler that are not stable.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_TARGET_DIR", built(root, target.input))
        .args(["fuzz", "build", "--sanitizer", "none", "--fuzz-dir", "."]);
    if target.input == Input::Choices {
        command.arg("--no-trace-compares");
    }
    let status = command
        .arg(target.name)
        .status()
        .map_err(|error| format!("cargo: {error}"))?;
    match status.success() {
        true => Ok(()),
        false => Err(
            "cargo fuzz is missing, or the target does not build: cargo install cargo-fuzz --locked"
                .to_owned(),
        ),
    }
}

/// Runs a target. What it learns is kept in `target/fuzz/corpus`, and what it prints in `target/fuzz/log`.
fn fuzz(root: &Path, target: &Target, limits: &Limits) -> Result<Row, String> {
    let name = target.name;
    let learned = root.join("target/fuzz/corpus").join(name);
    let artifacts = root.join("fuzz/artifacts").join(name);
    let logs = root.join("target/fuzz/log");
    for folder in [&learned, &artifacts, &logs] {
        fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    }
    let log = logs.join(format!("{name}.log"));
    let written = File::create(&log).map_err(|error| format!("{}: {error}", log.display()))?;
    let program = built(root, target.input)
        .join("x86_64-unknown-linux-gnu/release")
        .join(name);
    println!("{name}: runs, and writes to {}", log.display());
    let begun = Instant::now();
    let status = Command::new(&program)
        .arg(&learned)
        .arg(root.join("fuzz/corpus").join(name))
        .args([INPUT_TIMEOUT, MEMORY_MAX, "-print_final_stats=1"])
        .arg(format!("-max_len={}", target.longest))
        .arg(format!("-runs={}", limits.runs))
        .arg(format!("-max_total_time={}", limits.seconds))
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .stderr(written)
        .status()
        .map_err(|error| format!("{}: {error}", program.display()))?;
    let time = begun.elapsed();
    let text = fs::read(&log).map_err(|error| format!("{}: {error}", log.display()))?;
    let found = !status.success();
    let row = Row::read(name, &String::from_utf8_lossy(&text), time, found);
    row.ok_or_else(|| {
        format!(
            "{name} ended with {status} and without figures: see {}",
            log.display()
        )
    })
}

/// The figures of one target.
#[derive(Debug, PartialEq)]
struct Row {
    target: &'static str,
    runs: u64,
    time: Duration,
    learned: u64,
    memory_mib: u64,
    found: bool,
}

impl Row {
    /// Reads the figures that libFuzzer prints at its end, also after a finding.
    fn read(target: &'static str, log: &str, time: Duration, found: bool) -> Option<Self> {
        let figure = |name: &str| {
            let lines = log.lines().rev();
            let mut values = lines.filter_map(|line| line.strip_prefix("stat::")?.split_once(':'));
            let (_, value) = values.find(|(key, _)| *key == name)?;
            value.trim().parse().ok()
        };
        Some(Self {
            target,
            runs: figure("number_of_executed_units")?,
            time,
            learned: figure("new_units_added")?,
            memory_mib: figure("peak_rss_mb")?,
            found,
        })
    }
}

/// The rows as a table for `docs/benchmarks/fuzz.md`.
fn table(rows: &[Row]) -> String {
    let mut lines = vec![
        "| target | runs | seconds | runs a second | new inputs | peak memory | found |".to_owned(),
        "| --- | ---: | ---: | ---: | ---: | ---: | --- |".to_owned(),
    ];
    for row in rows {
        let rate = row.runs as f64 / row.time.as_secs_f64().max(0.001);
        lines.push(format!(
            "| `{}` | {} | {:.0} | {} | {} | {} MiB | {} |",
            row.target,
            grouped(row.runs),
            row.time.as_secs_f64(),
            grouped(rate as u64),
            grouped(row.learned),
            row.memory_mib,
            if row.found { "**an input**" } else { "nothing" }
        ));
    }
    let runs = rows.iter().map(|row| row.runs).sum();
    lines.push(format!("\n{} runs together", grouped(runs)));
    lines.join("\n")
}

/// 1234567 as 1,234,567.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.char_indices() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Sends changed messages and raw bytes to a running leader and a running worker, and to the port of a leader.
fn live(root: &Path) -> Result<(), String> {
    let arguments = ["-s", "python/tests/test_live_fuzz.py"].map(str::to_owned);
    let mut pytest = vllm::prepare(root, &arguments)?;
    pytest.env("KVFERRY_FUZZ_MESSAGES", LIVE_MESSAGES);
    match pytest.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("the tests ended with {status}")),
        Err(error) => Err(format!("python: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(arguments: &[&str]) -> Result<(Vec<String>, Limits), String> {
        let arguments: Vec<String> = arguments.iter().map(|text| (*text).to_owned()).collect();
        parse(&arguments)
    }

    #[test]
    fn a_number_of_runs_alone_sets_no_time() {
        let limits = |runs, seconds, at_once| Limits {
            runs,
            seconds,
            at_once,
        };
        let cases: [(&[&str], Limits); 5] = [
            (&[], limits(10_000_000, 600, 1)),
            (&["--runs", "5_000"], limits(5000, 0, 1)),
            (&["--seconds", "9"], limits(10_000_000, 9, 1)),
            (&["--runs", "7", "--seconds", "9"], limits(7, 9, 1)),
            (
                &["--seconds", "9", "--runs", "7", "--at-once", "2"],
                limits(7, 9, 2),
            ),
        ];
        for (given, expected) in cases {
            assert_eq!(parsed(given), Ok((Vec::new(), expected)), "{given:?}");
        }
        let names = parsed(&["zmtp", "--runs", "1", "frame"]).map(|(names, _)| names);
        assert_eq!(names, Ok(vec!["zmtp".to_owned(), "frame".to_owned()]));
        for given in [["--runs", "0"], ["--seconds", "soon"], ["--at_once", "1"]] {
            assert!(parsed(&given).is_err(), "{given:?}");
        }
        assert!(parsed(&["--runs"]).is_err());
    }

    #[test]
    fn the_figures_are_those_at_the_end_of_the_log() {
        let log = "#4\tNEW cov: 8\nstat::number_of_executed_units: 7\nnoise\n\
                   stat::number_of_executed_units: 1234567\nstat::average_exec_per_sec:     10035\n\
                   stat::new_units_added:          1151\nstat::slowest_unit_time_sec:    0\n\
                   stat::peak_rss_mb:              109\n";
        let row = Row::read("frame", log, Duration::from_secs(10), true);
        let row = row.expect("figures");
        assert_eq!(
            (row.runs, row.learned, row.memory_mib),
            (1_234_567, 1151, 109)
        );
        let line = "| `frame` | 1,234,567 | 10 | 123,456 | 1,151 | 109 MiB | **an input** |";
        assert!(table(&[row]).contains(line));
        assert_eq!(Row::read("frame", "killed\n", Duration::ZERO, true), None);
    }

    #[test]
    fn every_target_has_a_program() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/fuzz_targets");
        let files = fs::read_dir(root).expect("the programs");
        let mut found: Vec<String> = files
            .map(|file| {
                file.expect("a file")
                    .file_name()
                    .to_string_lossy()
                    .into_owned()
            })
            .collect();
        found.sort();
        let mut known = TARGETS.map(|target| format!("{}.rs", target.name));
        known.sort();
        assert_eq!(found, known);
    }
}
