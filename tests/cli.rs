//! Errors of the commands, as users see them: each names the field, the value and the remedy, and nothing is left
//! half-done.

#![expect(
    clippy::expect_used,
    clippy::panic,
    reason = "a test says what it expects"
)]

mod cli {
    mod containers;
    mod fsck;
    mod limits;
    mod messages;
    mod operators;
    mod signals;
    mod stays_up;
}
mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use serde_json::Value;
use support::{Running, command, kvferry, number, socket_dir};

const LIMIT: Duration = Duration::from_secs(30);

/// Runs the program, which must fail with this exit code, print all of these words, and print no result.
fn refused(arguments: &[&str], code: i32, words: &[&str]) {
    let output = kvferry(arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {errors}");
    for word in words {
        assert!(
            errors.contains(word),
            "{arguments:?} does not say {word:?}: {errors}"
        );
    }
    assert!(output.stdout.is_empty(), "{arguments:?} printed a result");
}

#[test]
fn more_host_memory_than_available_is_refused() {
    let folder = socket_dir();
    let sockets = folder.path().to_str().expect("UTF-8");
    let up = ["up", "--g2", "900TiB", "--socket-dir", sockets];
    refused(&up, 78, &["g2 is 900 TiB", "has", "give less"]);
    let shards = [
        "up",
        "--ranks",
        "4",
        "--kv-shards",
        "3",
        "--socket-dir",
        sockets,
    ];
    refused(&shards, 78, &["kv_shards", "3", "divides the 4 ranks"]);
}

#[test]
fn contradicting_sizes_are_refused() {
    refused(&["replay", "--ratio", "0"], 78, &["ratio is 0", "1 to 256"]);
    refused(&["replay", "--ratio", "257"], 78, &["ratio is 257"]);
    let overflow = [
        "replay",
        "--engine-page-tokens",
        "4294967295",
        "--ratio",
        "256",
    ];
    refused(&overflow, 78, &["engine_page_tokens", "ratio", "32 bits"]);
    refused(&["replay", "--engine-page-tokens", "0"], 78, &["page", "0"]);
    let uneven = [
        "replay",
        "--engine-page-tokens",
        "48",
        "--trace-block-tokens",
        "512",
    ];
    refused(
        &uneven,
        78,
        &["--engine-page-tokens", "--trace-block-tokens", "48", "512"],
    );
    let small = ["replay", "--g2-pages", "31"];
    refused(
        &small,
        78,
        &["31 pages", "one block takes 32", "--g2-pages 32"],
    );
    refused(&["replay", "--g2", "64KiB"], 78, &["one block takes 32"]);
    refused(
        &["replay", "--g2-pages", "unlimited"],
        78,
        &["--mode offline"],
    );
    let offline = [
        "replay",
        "--mode",
        "offline",
        "--sequential",
        "--g3-pages",
        "64",
    ];
    refused(
        &[&offline[..], &["--g2-pages", "0"]].concat(),
        78,
        &["G2 has no page", "--g3-pages 0"],
    );
    refused(
        &[&offline[..], &["--ratio", "128"]].concat(),
        78,
        &["64 pages", "one block takes 128"],
    );
    refused(
        &["replay", "--g3-pages", "64"],
        78,
        &["--g3-pages", "--mode offline"],
    );
    refused(
        &["replay", "--model", "llama-3-8b", "--ranks", "3"],
        78,
        &["3", "8 KV heads"],
    );
}

#[test]
fn flags_that_a_replay_does_not_use_are_refused() {
    for flag in [
        "--d2h-gb-per-s",
        "--h2d-gb-per-s",
        "--store-gb-per-s",
        "--link-latency-us",
        "--message-latency-us",
        "--prefill-tokens-per-s",
        "--formula",
    ] {
        let live = ["replay", flag, "5"];
        refused(&live, 78, &[flag, "virtual time", "--mode offline"]);
        let sequential = ["replay", "--mode", "offline", "--sequential", flag, "5"];
        refused(&sequential, 78, &[flag, "leave --sequential out"]);
    }
    let parallel = ["replay", "--sequential", "--parallel-prefill"];
    refused(
        &parallel,
        78,
        &["--parallel-prefill", "without --sequential"],
    );
    for mode in ["live", "offline"] {
        for flag in ["--speedup", "--concurrency"] {
            let arguments = ["replay", "--mode", mode, "--sequential", flag, "2"];
            refused(
                &arguments,
                78,
                &[flag, "--sequential", "leave one of the two out"],
            );
        }
    }
    let layout = ["replay", "--mode", "offline", "--layout", "contiguous"];
    refused(&layout, 78, &["--layout", "--mode live"]);
    let both = ["replay", "--speedup", "2", "--concurrency", "2"];
    refused(&both, 2, &["--speedup", "--concurrency"]);
    let both = [
        "replay",
        "--mode",
        "offline",
        "--prefill-tokens-per-s",
        "9",
        "--formula",
        "f",
    ];
    refused(&both, 2, &["--prefill-tokens-per-s", "--formula"]);
    for rate in ["0", "-1", "inf", "fast"] {
        let arguments = [
            "replay",
            "--mode",
            "offline",
            &format!("--d2h-gb-per-s={rate}"),
        ];
        refused(&arguments, 2, &["--d2h-gb-per-s", rate, "1e-9 to 1e6"]);
    }
    refused(
        &["replay", "--max-prompt-tokens", "0"],
        2,
        &["--max-prompt-tokens"],
    );
}

#[test]
fn invalid_formulas_are_refused() {
    let folder = socket_dir();
    let path = folder.path().join("formula.toml");
    let name = path.to_str().expect("UTF-8");
    let arguments = ["replay", "--mode", "offline", "--formula", name];
    refused(&arguments, 65, &["--formula", name]);
    for (text, word) in [
        ("decode_ms = 2", "prefill_ms"),
        ("prefill_ms = { a = -1.0 }", "prefill_ms.a"),
        ("prefill_ms = { a = 1.0 }\ndecode = 2", "decode"),
        ("prefill_ms = ", "formula.toml"),
    ] {
        fs::write(&path, text).expect("written");
        refused(&arguments, 65, &["--formula", word]);
    }
}

#[test]
fn a_replay_that_does_not_fit_into_memory_is_refused_before_it_starts() {
    let huge = ["replay", "--model", "llama-3-70b", "--g1-pages", "4000000"];
    refused(&huge, 78, &["--g1-pages", "available"]);
}

#[test]
fn a_broken_line_in_a_trace_is_refused() {
    let folder = socket_dir();
    let path = folder.path().join("broken.jsonl");
    let good = r#"{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}"#;
    fs::write(
        &path,
        format!("{good}\n{{\"timestamp\": 1, \"input_length\":\n"),
    )
    .expect("written");
    let name = path.to_str().expect("UTF-8");
    for mode in ["live", "offline"] {
        let arguments = [
            "replay",
            name,
            "--sequential",
            "--mode",
            mode,
            "--json",
            "-",
        ];
        refused(&arguments, 65, &["broken.jsonl", "2"]);
    }
    refused(
        &["replay", "/nowhere/at-all.jsonl"],
        65,
        &["/nowhere/at-all.jsonl"],
    );
}

#[test]
fn unknown_settings_are_refused() {
    let folder = socket_dir();
    let path = folder.path().join("kvferry.toml");
    fs::write(&path, "ratoi = 16\n").expect("written");
    let name = path.to_str().expect("UTF-8");
    for command in ["leader", "up", "status"] {
        refused(
            &[command, "--config", name],
            78,
            &["ratoi", "did you mean", "ratio", "kvferry.toml"],
        );
    }
    fs::write(&path, "g2 = \"lots\"\n").expect("written");
    refused(&["up", "--config", name], 78, &["g2", "lots", "8GiB"]);
    refused(&["leader", "--ratio", "0"], 78, &["ratio", "0", "256"]);
    refused(
        &["worker", "--ranks", "2", "--rank", "2"],
        78,
        &["rank is 2", "0 to 1"],
    );
}

#[test]
fn a_socket_directory_that_others_can_write_is_refused() {
    let folder = socket_dir();
    let open = folder.path().join("open");
    fs::create_dir(&open).expect("made");
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).expect("opened");
    let name = open.to_str().expect("UTF-8");
    for command in ["up", "leader"] {
        refused(
            &[command, "--g2", "16MiB", "--socket-dir", name],
            78,
            &["777", "chmod 700", name],
        );
    }
}

#[test]
fn a_socket_directory_without_a_parent_is_refused() {
    let folder = socket_dir();
    let nowhere = folder.path().join("nowhere/run");
    let name = nowhere.to_str().expect("UTF-8");
    refused(
        &["up", "--g2", "16MiB", "--socket-dir", name],
        78,
        &[name, "parent is missing"],
    );
}

#[test]
fn directories_of_a_disk_that_cannot_be_used_are_refused_once_with_the_remedy() {
    let folder = socket_dir();
    let sockets = folder.path().join("sockets");
    let open = folder.path().join("open");
    fs::create_dir(&open).expect("created");
    fs::set_permissions(&open, fs::Permissions::from_mode(0o755)).expect("changed");
    let file = folder.path().join("file");
    fs::write(&file, "").expect("written");
    for (directory, remedy) in [
        (folder.path().join("missing/tier"), "create that"),
        (open, "chmod 700"),
        (file, "is no directory"),
    ] {
        let up = command()
            .args(["up", "--g2", "32MiB", "--g3", "64MiB", "--g3-dir"])
            .arg(&directory)
            .arg("--socket-dir")
            .arg(&sockets)
            .output();
        let up = up.expect("the program runs");
        let errors = String::from_utf8_lossy(&up.stderr);
        assert_eq!(up.status.code(), Some(78), "{errors}");
        let named = directory.to_str().expect("UTF-8");
        assert_eq!(errors.matches(named).count(), 1, "{errors}");
        assert!(errors.contains(remedy), "{errors}");
    }
}

#[test]
fn commands_without_a_leader_fail_with_a_remedy() {
    let folder = socket_dir();
    let name = folder.path().to_str().expect("UTF-8");
    refused(
        &["status", "--socket-dir", name],
        1,
        &["no leader answers", name, "kvferry up"],
    );
    refused(
        &["reset", "--all", "--socket-dir", name],
        1,
        &["no leader answers", name, "kvferry up"],
    );
}

#[test]
fn a_second_up_in_the_same_directory_is_refused() {
    let folder = socket_dir();
    let name = folder.path().to_str().expect("UTF-8");
    let up = ["up", "--g2", "32MiB", "--socket-dir", name];
    let first = Running::start(&up);
    status_once(name, |_| true);
    let pid = format!("process {}", first.0.id());
    refused(&up, 1, &["is in use by", &pid, name]);
    first.terminate();
    assert_eq!(first.end(LIMIT).0, Some(0));
    let again = Running::start(&up);
    status_once(name, |_| true);
    again.terminate();
    assert_eq!(again.end(LIMIT).0, Some(0));
}

/// Runs a short replay that writes its report to `stdout`.
fn replay_to(stdout: impl Into<Stdio>) -> Output {
    let arguments = "replay --mode offline --requests 2 --json -";
    let mut replay = command();
    let replay = replay.args(arguments.split(' ')).stdout(stdout);
    replay.output().expect("the program runs")
}

#[test]
fn a_closed_standard_output_is_no_error() {
    let (reads, writes) = std::io::pipe().expect("a pipe");
    drop(reads);
    let output = replay_to(writes);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert!(!errors.contains("panicked"), "{errors}");
}

#[test]
fn results_that_cannot_be_written_are_an_error() {
    let full = fs::File::options().write(true).open("/dev/full");
    let output = replay_to(full.expect("a device without room"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("error: standard output: "), "{errors}");
}

#[test]
fn a_report_is_written_to_a_named_pipe() {
    let folder = socket_dir();
    let path = folder.path().join("report");
    let made = Command::new("mkfifo").arg(&path).status();
    assert!(made.expect("mkfifo runs").success());
    let name = path.to_str().expect("UTF-8").to_owned();
    let reader = std::thread::spawn(move || fs::read(path));
    let output = kvferry(&[
        "replay",
        "--mode",
        "offline",
        "--requests",
        "2",
        "--quiet",
        "--json",
        &name,
    ]);
    assert!(output.status.success());
    let report = reader.join().expect("it ends").expect("read");
    let report: Value = serde_json::from_slice(&report).expect("a whole report");
    assert!(report["version"].is_u64());
}

#[test]
fn a_report_that_cannot_be_written_or_would_replace_the_trace_is_refused() {
    let folder = socket_dir();
    let trace = folder.path().join("trace.jsonl");
    let line = r#"{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}"#;
    fs::write(&trace, line).expect("written");
    let name = trace.to_str().expect("UTF-8");
    let offline = ["replay", name, "--mode", "offline", "--json"];
    let with = |json: &str| {
        offline
            .into_iter()
            .chain([json])
            .map(str::to_owned)
            .collect()
    };
    let refused = |json: &str, words: &[&str]| {
        let arguments: Vec<String> = with(json);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        refused(&arguments, 65, words);
    };
    refused(name, &["--json", name, "is the trace itself"]);
    let link = folder.path().join("link.jsonl");
    fs::hard_link(&trace, &link).expect("linked");
    refused(link.to_str().expect("UTF-8"), &["is the trace itself"]);
    let nowhere = folder.path().join("nowhere/report.json");
    refused(
        nowhere.to_str().expect("UTF-8"),
        &["--json", "nowhere/report.json"],
    );
    let itself = folder.path().to_str().expect("UTF-8");
    refused(itself, &["--json", itself]);
    assert_eq!(fs::read_to_string(&trace).expect("there"), line);
}

#[test]
fn a_file_of_events_that_cannot_be_written_is_an_error() {
    let folder = socket_dir();
    let path = |name: &str| folder.path().join(name).to_str().map(str::to_owned);
    let path = |name: &str| path(name).expect("UTF-8");
    let (same, nowhere) = (path("events"), path("nowhere/events"));
    let offline = ["replay", "--mode", "offline", "--requests", "20"];
    let with = |more: &[&str], code, words: &[&str]| {
        refused(&[&offline[..], more].concat(), code, words);
    };
    with(&["--events", &nowhere], 65, &["--events", &nowhere]);
    with(
        &["--events", &same, "--json", &same],
        65,
        &["--events", &same, "--json", "name another file"],
    );
    let full = "/dev/full";
    for more in [&["--events", full][..], &["--events", full, "--sequential"]] {
        with(more, 1, &["--events /dev/full: ", "No space left"]);
    }
    refused(
        &["replay", "--calls", "calls", "--events", &same],
        2,
        &["--events", "--calls"],
    );
    assert!(!std::path::Path::new(&same).exists());
}

#[test]
fn a_second_leader_in_the_same_directory_is_refused() {
    let folder = socket_dir();
    let name = folder.path().to_str().expect("UTF-8");
    let first = Running::start(&["leader", "--socket-dir", name]);
    let before = status_once(name, |_| true);
    let pid = first.0.id().to_string();
    refused(&["leader", "--socket-dir", name], 1, &[&pid, name]);
    first.terminate();
    assert_eq!(first.end(LIMIT).0, Some(0));
    let again = Running::start(&["leader", "--socket-dir", name]);
    let status = status_once(name, |_| true);
    let epoch = |status: &Value| status["epoch"].as_u64().expect("a number");
    assert_eq!(
        epoch(&status),
        epoch(&before) + 1,
        "the epoch grows with each start"
    );
    again.terminate();
    assert_eq!(again.end(LIMIT).0, Some(0));
}

#[test]
fn up_serves_its_status_and_drains_on_a_signal() {
    let folder = socket_dir();
    let name = folder.path().to_str().expect("UTF-8");
    let up = Running::start(&["up", "--ranks", "2", "--g2", "32MiB", "--socket-dir", name]);
    status_once(name, |_| true);
    let status = kvferry(&["status", "--json", "--check", "--socket-dir", name]);
    let status: Value = serde_json::from_slice(&status.stdout).expect("JSON");
    assert_eq!(status["ready"], false, "no engine has registered");
    assert_eq!(status["ranks"].as_array().map(Vec::len), Some(2));
    up.terminate();
    let (code, errors) = up.end(LIMIT);
    assert_eq!(code, Some(0), "{errors}");
    assert!(!folder.path().join("leader/kvferry.sock").exists());
}

#[test]
fn disagreeing_ranks_are_refused_with_the_rank_and_the_field() {
    let folder = socket_dir();
    let name = folder.path().to_str().expect("UTF-8");
    let _up = Running::start(&["up", "--ranks", "2", "--g2", "32MiB", "--socket-dir", name]);
    let engine = "0123456789abcdef0123456789abcdef";
    let rank = |rank: &str, page_tokens: &str| {
        let worker = folder.path().join(format!("worker-0-{rank}"));
        Running::start(&[
            "engine-rank",
            "--worker-dir",
            worker.to_str().expect("UTF-8"),
            "--engine",
            engine,
            "--replica",
            "0",
            "--rank",
            rank,
            "--ranks",
            "2",
            "--engine-page-tokens",
            page_tokens,
            "--device-pages",
            "64",
            "--model",
            "tiny",
            "--layout",
            "layer-separate",
            "--start-limit-s",
            "20",
        ])
    };
    let _first = rank("0", "16");
    let begun = std::time::Instant::now();
    loop {
        let status = kvferry(&["status", "--json", "--socket-dir", name]);
        let status: Value = serde_json::from_slice(&status.stdout).expect("JSON");
        if status["ranks"][0]["attached"] == true {
            break;
        }
        assert!(begun.elapsed() < LIMIT, "rank 0 does not attach");
    }
    let (code, errors) = rank("1", "32").end(LIMIT);
    assert_eq!(code, Some(1));
    for word in [
        "rank 1 disagrees with rank 0",
        "engine_page_tokens is 32",
        "rank 0 has 16",
    ] {
        assert!(errors.contains(word), "{errors}");
    }
    let status = status_once(name, |status| status["ranks"][1]["problem"] != "");
    let problem = |rank: usize| status["ranks"][rank]["problem"].as_str();
    assert_eq!(problem(0), Some(""));
    let turned_away = problem(1).expect("a text");
    assert!(
        turned_away.contains("engine_page_tokens is 32"),
        "{turned_away}"
    );
}

#[test]
fn an_interrupted_replay_leaves_nothing_behind() {
    let folder = socket_dir();
    let replay = Running::start_in(&["replay", "--quiet"], folder.path());
    let begun = std::time::Instant::now();
    let sockets = || {
        let entry = fs::read_dir(folder.path()).ok()?.next()?.ok()?;
        entry
            .path()
            .join("worker-0-1/kvferry.sock")
            .exists()
            .then_some(())
    };
    while sockets().is_none() {
        assert!(begun.elapsed() < LIMIT, "the replay does not start");
        std::thread::yield_now();
    }
    replay.terminate();
    let (code, errors) = replay.end(LIMIT);
    assert_eq!(code, Some(1), "{errors}");
    assert!(errors.contains("interrupted"), "{errors}");
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0);
}

/// Waits until `is_true` holds for a leader's status, and returns the status.
fn status_once(sockets: &str, is_true: impl Fn(&Value) -> bool) -> Value {
    let begun = std::time::Instant::now();
    loop {
        let output = kvferry(&["status", "--json", "--socket-dir", sockets]);
        if let Ok(status) = serde_json::from_slice(&output.stdout)
            && is_true(&status)
        {
            return status;
        }
        assert!(begun.elapsed() < LIMIT, "it does not get there");
    }
}

#[test]
fn the_status_reports_the_progress_of_every_rank() {
    let folder = socket_dir();
    let name = folder.path().to_str().expect("UTF-8");
    let _up = Running::start(&[
        "up",
        "--ranks",
        "2",
        "--g2",
        "32MiB",
        "--g2-numa",
        "0",
        "--socket-dir",
        name,
    ]);
    let is_ready = |rank: &Value| {
        let bytes = rank["host_bytes"].as_u64();
        bytes == Some(16 << 20) && rank["host_ready_bytes"].as_u64() == bytes
    };
    status_once(name, |status| {
        let ranks = status["ranks"].as_array().expect("a list");
        ranks.len() == 2 && ranks.iter().all(is_ready)
    });
    let output = kvferry(&["status", "--socket-dir", name]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains("rank 1: waits for its engine to register"),
        "{text}"
    );
    refused(
        &["status", "--wait-s", "1", "--socket-dir", name],
        1,
        &["not ready after 1s", "rank 0: waits", "rank 1: waits"],
    );
}

#[test]
fn a_rank_without_memory_reports_the_reason_before_it_ends() {
    let folder = socket_dir();
    let name = folder.path().to_str().expect("UTF-8");
    let _leader = Running::start(&["leader", "--socket-dir", name]);
    status_once(name, |status| status["ranks"][0]["pid"] == 0);
    let worker = [
        "worker",
        "--rank",
        "0",
        "--g2",
        "8TiB",
        "--socket-dir",
        name,
    ];
    refused(
        &worker,
        69,
        &["the depot needs", "more bytes", "has", "give it a"],
    );
    let status = status_once(name, |status| status["ranks"][0]["pid"] == 0);
    let problem = status["ranks"][0]["problem"].as_str().expect("a text");
    assert!(problem.contains("the depot needs"), "{problem}");
    refused(
        &["status", "--wait-s", "1", "--socket-dir", name],
        1,
        &["rank 0: the depot needs"],
    );
}

#[test]
fn a_missing_numa_node_is_refused() {
    let folder = socket_dir();
    let name = folder.path().to_str().expect("UTF-8");
    let up = [
        "up",
        "--g2",
        "16MiB",
        "--g2-numa",
        "4095",
        "--socket-dir",
        name,
    ];
    refused(&up, 78, &["g2_numa", "4095", "nodes 0"]);
    let up = ["up", "--g2-numa", "0;1", "--socket-dir", name];
    refused(&up, 2, &["--g2-numa", "0;1", "such as 0,1"]);
}

#[test]
fn stores_and_loads_are_measured_beside_the_copy_engine() {
    let bench = [
        "bench", "move", "--model", "tiny", "--mib", "2", "--rounds", "2", "--json",
    ];
    let output = kvferry(&bench);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(
        (&report["bytes"], &report["pages"]),
        (&Value::from(2 << 20), &Value::from(512))
    );
    for direction in ["store", "load"] {
        let ratio = report[direction]["to_bare"].as_f64().expect("a number");
        assert!(ratio > 0.0, "{report}");
    }
    refused(
        &["bench", "move", "--mib", "2", "--model", "llama-3-70b"],
        78,
        &["mib is 2", "give more"],
    );
}

/// Stores of 16 MiB at 16 MiB a second: the last of 1 MiB starts when the others are paid for.
#[test]
fn stores_are_held_to_their_rate_and_the_wait_of_loads_is_measured() {
    let bench = [
        "bench",
        "lanes",
        "--model",
        "tiny",
        "--queued-mib",
        "16",
        "--store-mib",
        "1",
        "--load-mib",
        "1",
        "--store-bytes-per-s",
        "16MiB",
        "--rounds",
        "1",
        "--loads",
        "20",
        "--json",
    ];
    let output = kvferry(&bench);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let rate = report["stored_gb_per_s"].as_f64().expect("a number");
    assert!(rate < 0.02, "{report}");
    assert_eq!(number(&report, "/idle/loads"), 20);
    assert!(number(&report, "/stores_queued/loads") > 0);
    assert!(report["wait_p99_ratio"].as_f64().expect("a number") > 0.0);
    refused(
        &["bench", "lanes", "--load-mib", "1"],
        78,
        &["load-mib is 1", "give more"],
    );
}
