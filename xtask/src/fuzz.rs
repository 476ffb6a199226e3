//! Fuzzers: `cargo xtask fuzz [TARGET] [--seconds N]` runs the targets of `fuzz/` one after another, and
//! `cargo xtask fuzz live` sends changed messages to real processes.

use std::path::Path;
use std::process::Command;

use super::vllm;

/// The targets, and the longest input of each: that of messages is larger than any list whose length is limited by
/// something else than its bytes.
const TARGETS: [(&str, u32); 8] = [
    ("frame", 65_536),
    ("body", 65_536),
    ("transfer_twin", 65_536),
    ("zmtp", 4096),
    ("server", 4096),
    ("leader_core", 4096),
    ("worker_core", 4096),
    ("registration", 4096),
];
/// Executions of a target, at most.
const RUNS_MAX: &str = "-runs=10000000";
/// An input that takes longer is a finding, in seconds.
const INPUT_TIMEOUT: &str = "-timeout=10";
/// The same for memory, in MiB.
const MEMORY_MAX: &str = "-rss_limit_mb=1024";
/// Messages of `live`.
const LIVE_MESSAGES: &str = "100000";

/// Runs one target or all of them.
pub(crate) fn run(root: &Path, arguments: &[String]) -> Result<(), String> {
    let mut seconds = "600".to_owned();
    let mut only = None;
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--seconds" => {
                let given = rest.next().filter(|given| given.parse::<u32>().is_ok());
                seconds = given.ok_or("--seconds needs a number")?.clone();
            }
            name if only.is_none() => only = Some(name),
            other => return Err(format!("'{other}': name one target")),
        }
    }
    if only == Some("live") {
        return live(root);
    }
    let chosen = TARGETS
        .iter()
        .filter(|(target, _)| only.is_none_or(|only| only == *target));
    let chosen: Vec<_> = chosen.collect();
    if chosen.is_empty() {
        let names = TARGETS.map(|(target, _)| target).join(", ");
        return Err(format!("no such target: name one of {names}, or live"));
    }
    let mut failed = Vec::new();
    for (target, longest) in chosen {
        if !fuzz(root, target, *longest, &seconds)? {
            failed.push(*target);
        }
    }
    match failed.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "{} found inputs, which are in fuzz/artifacts: copy each to fuzz/corpus, and mend what it shows",
            failed.join(", ")
        )),
    }
}

/// Runs a target. What it learns is kept in `target/fuzz/corpus`. Returns false if it found something.
fn fuzz(root: &Path, target: &str, longest: u32, seconds: &str) -> Result<bool, String> {
    let folder = root.join("target/fuzz");
    let learned = folder.join("corpus").join(target);
    std::fs::create_dir_all(&learned).map_err(|error| format!("{}: {error}", learned.display()))?;
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .current_dir(root.join("fuzz"))
        // The fuzzer needs flags of the compiler that are not stable.
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_TARGET_DIR", &folder)
        .args(["fuzz", "run", "--sanitizer", "none", "--fuzz-dir", "."])
        .arg(target)
        .arg(&learned)
        .arg(root.join("fuzz/corpus").join(target))
        .args(["--", RUNS_MAX, INPUT_TIMEOUT, MEMORY_MAX])
        .args(["-print_final_stats=1", &format!("-max_len={longest}")])
        .arg(format!("-max_total_time={seconds}"))
        .status()
        .map_err(|error| format!("cargo: {error}"))?;
    match status.code() {
        Some(0) => Ok(true),
        Some(101) => {
            Err("cargo fuzz is missing or does not build: cargo install cargo-fuzz".to_owned())
        }
        _ => Ok(false),
    }
}

/// Sends changed messages and raw bytes to a running leader and a running worker.
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
