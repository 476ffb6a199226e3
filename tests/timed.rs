//! Offline replays in virtual time, run as a command: reports, values that are equal from run to run, and comparisons.

#![expect(
    clippy::expect_used,
    clippy::panic,
    reason = "a test says what it expects"
)]

mod support;

use std::path::Path;

use serde_json::Value;
use support::{kvferry, number, replay, socket_dir, trace};

/// Links and a device that the built-in workload keeps busy.
const BUSY: [&str; 10] = [
    "--mode",
    "offline",
    "--speedup",
    "40",
    "--d2h-gb-per-s",
    "0.5",
    "--h2d-gb-per-s",
    "0.5",
    "--prefill-tokens-per-s",
    "2000000",
];

fn timed(more: &[&str]) -> Value {
    let mut arguments = BUSY.to_vec();
    arguments.extend_from_slice(more);
    replay(&arguments)
}

fn us(report: &Value, key: &str) -> u64 {
    number(report, &format!("/first_token_us/{key}"))
}

#[test]
fn two_runs_give_the_same_report_but_for_wall_time() {
    let text = || {
        let mut report = timed(&[]);
        assert!(report["seconds"]["wall"].is_number());
        report["seconds"]["wall"] = Value::Null;
        report.to_string()
    };
    assert_eq!(text(), text());
}

#[test]
fn a_report_contains_the_gain_of_g2() {
    let report = timed(&["--g1-pages", "0"]);
    assert_eq!(number(&report, "/requests"), 400);
    assert!(number(&report, "/tokens/hit_g2") > 0);
    let prefill = |key: &str| report["prefill_seconds"][key].as_f64().expect("a number");
    let computed = number(&report, "/tokens/computed") as f64;
    assert!((prefill("with") - computed / 2e6).abs() < 1e-6);
    assert!((prefill("without") - prefill("with") - prefill("saved")).abs() < 1e-9);
    assert!(prefill("saved") > 0.5, "{}", report["prefill_seconds"]);
    assert!(us(&report, "p50") <= us(&report, "p95") && us(&report, "p95") <= us(&report, "p99"));
    assert!(us(&report, "without_p50") > 0);
    for way in ["d2h", "h2d"] {
        let link = &report["links"][way];
        let share = link["busy_share"].as_f64().expect("a share");
        assert!(share > 0.0 && share < 1.0, "{way}: {link}");
        assert_eq!(link["gb_per_s"], 0.5);
        assert!(link["queue_p95_us"].is_u64(), "{link}");
    }
    let moved = number(&report, "/links/h2d/bytes");
    assert_eq!(moved, number(&report, "/bytes/scattered"));
    let virtual_s = report["seconds"]["virtual"].as_f64().expect("a number");
    assert!(virtual_s > 0.4 && virtual_s < 2.0, "{virtual_s}");
}

/// The disk is written on when the last prompt has ended.
#[test]
fn no_link_is_busier_than_its_time() {
    let report = timed(&[
        "--g1-pages",
        "0",
        "--g3-pages",
        "unlimited",
        "--g3-write-gb-per-s",
        "0.02",
    ]);
    for way in ["d2h", "h2d", "g3_write", "g3_read"] {
        let share = &report["links"][way]["busy_share"];
        assert!(
            share.as_f64().is_some_and(|share| share <= 1.0),
            "{way}: {share}"
        );
    }
    let written = report["links"]["g3_write"]["busy_share"].as_f64();
    assert!(
        written > Some(0.5),
        "the disk is the bottleneck: {written:?}"
    );
    let prompts = report["seconds"]["virtual"].as_f64().expect("a number");
    let writing = number(&report, "/links/g3_write/bytes") as f64 / 0.02e9;
    assert!(
        writing > prompts,
        "{writing} s of writes, {prompts} s of prompts"
    );
}

#[test]
fn a_disk_keeps_what_host_memory_evicts_and_its_links_carry_the_moves() {
    let small = ["--g1-pages", "0", "--g2-pages", "1500"];
    let run = |g3: &[&str]| timed(&[&small[..], g3].concat());
    let (without, with) = (run(&[]), run(&["--g3-pages", "unlimited"]));
    assert_eq!(number(&without, "/tokens/hit_g3"), 0);
    assert_eq!(number(&without, "/moves/moves"), 0);
    let hits = |report: &Value| number(report, "/tokens/hit_g2") + number(report, "/tokens/hit_g3");
    assert!(number(&with, "/tokens/hit_g3") > 0);
    assert!(
        hits(&with) > hits(&without),
        "{} {}",
        hits(&with),
        hits(&without)
    );
    let page_bytes = number(&with, "/setup/page_bytes") * number(&with, "/setup/kv_shards");
    let written = number(&with, "/moves/written_through_pages");
    let read = number(&with, "/moves/pages") - written;
    assert!(written > 0 && read > 0, "{written} {read}");
    // A transfer may move pages that are cancelled, or not be over at the end.
    assert!(number(&with, "/links/g3_write/bytes") <= written * page_bytes);
    assert!(number(&with, "/links/g3_write/bytes") > written * page_bytes / 2);
    assert!(number(&with, "/links/g3_read/bytes") <= read * page_bytes);
    assert!(number(&with, "/links/g3_read/bytes") > 0);
    let slow = run(&["--g3-pages", "unlimited", "--g3-read-gb-per-s", "0.02"]);
    let load = |report: &Value| number(report, "/latency_us/load_p95");
    assert!(load(&slow) > load(&with), "{} {}", load(&slow), load(&with));
}

#[test]
fn the_cost_gate_keeps_a_slow_disk_from_delaying_prompts() {
    let disk = [
        "--g1-pages",
        "0",
        "--g2-pages",
        "1500",
        "--g3-pages",
        "unlimited",
    ];
    let run = |more: &[&str]| timed(&[&disk[..], more].concat());
    let slow = ["--g3-read-gb-per-s", "0.01"];
    let (open, gated) = (run(&slow), run(&[&slow[..], &["--cost-gate"]].concat()));
    assert_eq!(number(&open, "/moves/declined_tokens"), 0);
    assert!(number(&gated, "/moves/declined_tokens") > 0);
    assert!(number(&gated, "/tokens/hit_g3") < number(&open, "/tokens/hit_g3"));
    let (open, gated) = (us(&open, "p95"), us(&gated, "p95"));
    assert!(gated < open, "{gated} us with the gate, {open} without");
}

#[test]
fn slower_links_make_loads_slower() {
    let load = |rate: &str| {
        let arguments = ["--mode", "offline", "--h2d-gb-per-s", rate];
        number(&replay(&arguments), "/latency_us/load_p50")
    };
    let (fast, slow) = (load("50"), load("0.1"));
    assert!(slow > 4 * fast, "{fast} us, {slow} us");
}

#[test]
fn without_g2_both_halves_are_equal() {
    let report = timed(&["--g2-pages", "0"]);
    for key in ["p50", "p95", "p99"] {
        assert_eq!(us(&report, key), us(&report, &format!("without_{key}")));
    }
    assert_eq!(report["prefill_seconds"]["saved"], 0.0);
    assert_eq!(number(&report, "/waits/refused_stores"), 400);
}

#[test]
fn one_request_at_a_time_decides_as_the_sequential_replay_does() {
    let sizes = [
        "--mode",
        "offline",
        "--g1-pages",
        "300",
        "--g2-pages",
        "1500",
    ];
    let run = |more: &[&str]| {
        let mut arguments = sizes.to_vec();
        arguments.extend_from_slice(more);
        replay(&arguments)
    };
    let (sequential, timed) = (run(&["--sequential"]), run(&["--concurrency", "1"]));
    for key in ["decisions_digest", "tokens", "blocks", "arena", "bytes"] {
        assert_eq!(sequential[key], timed[key], "{key}");
    }
    assert!(number(&timed, "/arena/evicted_pages") > 0);
}

#[test]
fn long_prompts_are_cut() {
    let report = timed(&["--max-prompt-tokens", "100", "--g1-pages", "0"]);
    assert!(number(&report, "/tokens/prompt") <= 400 * 100);
    let report_of_all = timed(&["--g1-pages", "0"]);
    assert!(number(&report, "/tokens/hit_g2") < number(&report_of_all, "/tokens/hit_g2"));
    assert_eq!(report["setup"]["max_prompt_tokens"], 100);
}

#[test]
fn a_formula_gives_the_time_of_prefills() {
    let folder = socket_dir();
    let path = folder.path().join("formula.toml");
    std::fs::write(&path, "prefill_ms = { c = 2.0 }\ndecode_ms = 0.5\n").expect("written");
    let name = path.to_str().expect("UTF-8");
    let report = replay(&["--mode", "offline", "--formula", name, "--g1-pages", "0"]);
    let without = report["prefill_seconds"]["without"]
        .as_f64()
        .expect("a number");
    assert!(
        (without - 0.8).abs() < 1e-9,
        "400 prompts of 2 ms: {without}"
    );
}

fn write(folder: &Path, name: &str, arguments: &[&str]) -> String {
    let path = folder.join(name).to_str().expect("UTF-8").to_owned();
    let mut all = vec!["replay", "--quiet", "--json", &path];
    all.extend_from_slice(arguments);
    let output = kvferry(&all);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {errors}");
    path
}

#[test]
fn a_live_and_an_offline_report_are_compared_key_by_key() {
    let folder = socket_dir();
    let common = ["--requests", "30", "--concurrency", "2", "--g1-pages", "0"];
    let live = write(folder.path(), "live.json", &common);
    let mut offline = vec!["--mode", "offline"];
    offline.extend_from_slice(&common);
    let offline = write(folder.path(), "offline.json", &offline);
    let keys = |path: &str| {
        let text = std::fs::read_to_string(path).expect("a report");
        let report: Value = serde_json::from_str(&text).expect("JSON");
        assert!(us(&report, "p50") > 0, "{path}");
        assert!(number(&report, "/latency_us/load_p95") > 0, "{path}");
        assert!(report["waits"]["page_wait_seconds"].is_number(), "{path}");
        let mut keys = Vec::new();
        names("", &report, &mut keys);
        keys
    };
    assert_eq!(keys(&live), keys(&offline));
    let output = kvferry(&["replay", "--compare", &live, &offline]);
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success());
    for word in [
        "live",
        "offline",
        "ratio",
        "tokens.hit_g2",
        "latency_us.load_p95",
    ] {
        assert!(table.contains(word), "{word} is missing: {table}");
    }
}

/// Paths of all keys of objects.
fn names(prefix: &str, value: &Value, all: &mut Vec<String>) {
    if let Value::Object(object) = value {
        for (key, value) in object {
            let name = format!("{prefix}/{key}");
            names(&name, value, all);
            all.push(name);
        }
    }
}

#[test]
fn reports_of_different_runs_are_not_compared() {
    let folder = socket_dir();
    let offline = |name: &str, more: &[&str]| {
        let mut arguments = vec!["--mode", "offline", "--requests", "5", "--g2-pages", "5000"];
        arguments.extend_from_slice(more);
        write(folder.path(), name, &arguments)
    };
    let one = offline("one.json", &[]);
    let ranks = offline("ranks.json", &["--ranks", "1"]);
    let seed = offline("seed.json", &["--seed", "2"]);
    let old = folder.path().join("old.json");
    let text = std::fs::read_to_string(&one).expect("a report");
    let older = text.replace("\"version\": 6", "\"version\": 1");
    assert_ne!(older, text);
    std::fs::write(&old, older).expect("written");
    let old = old.to_str().expect("UTF-8");
    let none = folder.path().join("none.json");
    let none = none.to_str().expect("UTF-8");
    for (other, word) in [
        (
            ranks.as_str(),
            "setup.kv_shards is 2 in the first and 1 in the second",
        ),
        (seed.as_str(), "trace.digest"),
        (old, "version is 1"),
        (none, "none.json"),
    ] {
        let output = kvferry(&["replay", "--compare", &one, other]);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(65), "{errors}");
        assert!(errors.contains(word), "{word}: {errors}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn a_real_trace_in_virtual_time() {
    let Some(path) = trace("conv") else { return };
    let path = path.to_str().expect("UTF-8");
    let arguments = [
        path,
        "--mode",
        "offline",
        "--requests",
        "1500",
        "--g1-pages",
        "20000",
        "--g2-pages",
        "200000",
        "--prefill-tokens-per-s",
        "100000",
    ];
    let report = replay(&arguments);
    assert_eq!(number(&report, "/requests"), 1500);
    assert_eq!(number(&report, "/disturbed_requests"), 0);
    assert!(
        us(&report, "p50") < us(&report, "without_p50"),
        "{}",
        report["first_token_us"]
    );
    assert!(
        report["prefill_seconds"]["saved"]
            .as_f64()
            .is_some_and(|saved| saved > 10.0)
    );
}

/// Runs another test in a process where no traces exist.
#[test]
fn a_test_without_its_traces_is_listed_as_skipped() {
    let folder = socket_dir();
    let list = folder.path().join("skipped");
    let output = std::process::Command::new(std::env::current_exe().expect("a program"))
        .args(["a_real_trace_in_virtual_time", "--exact"])
        .env("KVFERRY_SHARED", folder.path())
        .env("SKIPPED_TESTS", &list)
        .output()
        .expect("it runs");
    assert!(output.status.success(), "{output:?}");
    let list = std::fs::read_to_string(list).expect("a list");
    let (test, why) = list.split_once(": ").expect("a test and why");
    assert_eq!(test, "a_real_trace_in_virtual_time");
    assert!(why.contains("no traces in"), "{why}");
    assert_eq!(list.lines().count(), 1, "{list}");
}
