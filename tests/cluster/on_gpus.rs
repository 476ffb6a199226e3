//! Real processes with KV on GPUs: the unchanged programs use the driver for tests, with configurable delays.

use std::ffi::OsString;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use kvferry_cuda::DeviceUuid;
use kvferry_protocol::{ErrorCode, Hello, Message, Register, Role};
use kvferry_transport::{Address, Client, ClientSettings, Limits, ZmqTransport};
use kvferry_types::{
    Allocation, AllocationHandle, AllocationKind, Attention, GroupMemory, Nonce, Rank, Registration,
};
use rustix::fs::{CWD, Mode};
use rustix::process::Signal;
use serde_json::Value;

use super::disturbed::{Disturbed, LIMIT};
use super::fake_cuda;
use super::processes::{lives, signal};
use crate::support::skipped::skipped;
use crate::support::{Running, command, kvferry, number, replay, replay_with, signals, socket_dir};

/// The driver for tests, in a temporary folder, and its settings.
struct Gpus(tempfile::TempDir, String);

impl Gpus {
    fn new(settings: &str) -> Self {
        let folder = fake_cuda::folder(&fake_cuda::library());
        Self(folder, format!("devices=2;{settings}"))
    }

    fn variables(&self) -> Vec<(&'static str, OsString)> {
        fake_cuda::variables(self.0.path(), &self.1).into()
    }

    /// Environment variables for the driver for tests, or none where tests run on the machine's own GPUs.
    fn anywhere(&self) -> Vec<(&'static str, OsString)> {
        match fake_cuda::on_gpu() {
            true => Vec::new(),
            false => self.variables(),
        }
    }
}

/// Checks that the decisions do not depend on where the engine's memory is, and that every byte comes back.
fn as_on_the_cpu(device: &str, arguments: &[&str]) {
    as_on_the_cpu_with(&Gpus::new("delay_us=30").anywhere(), device, arguments);
}

fn as_on_the_cpu_with(variables: &[(&str, OsString)], device: &str, arguments: &[&str]) {
    let arguments = [arguments, &["--sequential"]].concat();
    let expected = replay(&arguments);
    let found = replay_with(variables, &[&arguments[..], &["--device", device]].concat());
    for key in ["/tokens", "/blocks", "/arena", "/decisions_digest"] {
        assert_eq!(found.pointer(key), expected.pointer(key), "{key}");
    }
    for key in ["/bytes/gathered", "/bytes/scattered", "/bytes/verified"] {
        assert_eq!(number(&found, key), number(&expected, key), "{key}");
    }
    assert!(number(&found, "/bytes/verified") > 0, "nothing was loaded");
    assert_eq!(number(&found, "/bytes/mismatched"), 0);
    assert_eq!(number(&found, "/disturbed_requests"), 0);
}

#[test]
fn pages_of_separate_layers_bring_every_byte_back() {
    as_on_the_cpu("cuda", &["--requests", "60", "--g1-pages", "64"]);
}

const LATE: &str = "delay_us=engine-rank/8000";

/// The engine's device is late by milliseconds: its rank announces its writes long before, and stores wait for the word
/// that the device writes after them.
#[test]
fn stores_wait_for_the_writes_of_a_late_device() {
    let gpus = Gpus::new(LATE);
    as_on_the_cpu_with(
        &gpus.variables(),
        "cuda",
        &["--requests", "24", "--g1-pages", "64"],
    );
}

/// Without that word, the rank waits for the device itself.
#[test]
fn a_driver_without_timeline_words_is_used() {
    let (folder, _home) = fake_cuda::without(&["cuStreamWriteValue64_v2"]);
    let gpus = Gpus(folder, format!("devices=2;{LATE}"));
    as_on_the_cpu_with(
        &gpus.variables(),
        "cuda",
        &["--requests", "24", "--g1-pages", "64"],
    );
}

/// Each rank has several chunks, and pages cross their boundaries.
#[test]
fn memory_in_chunks_by_descriptors_brings_every_byte_back() {
    as_on_the_cpu("cuda-fd", &["--requests", "60", "--g1-pages", "64"]);
}

#[test]
fn memory_in_chunks_by_fabric_handles_brings_every_byte_back() {
    if fake_cuda::on_gpu() {
        skipped("few machines have what fabric handles need");
        return;
    }
    let layout = ["--layout", "contiguous", "--ratio", "7"];
    let arguments = [&["--requests", "40", "--g1-pages", "64"][..], &layout];
    as_on_the_cpu("cuda-fabric", &arguments.concat());
}

/// Many copies are given with one call until the driver of one worker refuses such a call. From then on its copies are
/// given one by one, also those of the refused call.
#[test]
fn batched_copies_bring_every_byte_back() {
    let folder = tempfile::tempdir().expect("a folder");
    let once = folder.path().join("once");
    let refusal = format!(
        "fail=worker/cuMemcpyBatchAsync_v2/9/1;once={}",
        once.display()
    );
    let gpus = Gpus::new(&format!("delay_us=30;{refusal}"));
    let mut variables = gpus.variables();
    variables.push(("KVFERRY_GPU_COPY", "batch".into()));
    let arguments = ["--ratio", "7", "--requests", "40", "--g1-pages", "64"];
    as_on_the_cpu_with(&variables, "cuda", &arguments);
    assert!(once.exists(), "there were no such calls");
}

#[test]
fn contiguous_pages_and_odd_blocks_bring_every_byte_back() {
    let sizes = ["--ratio", "7", "--engine-page-tokens", "32"];
    let layout = [
        "--layout",
        "contiguous",
        "--requests",
        "40",
        "--g1-pages",
        "32",
    ];
    as_on_the_cpu("cuda", &[&sizes[..], &layout].concat());
}

#[test]
fn pages_that_both_ranks_hold_are_stored_once() {
    let model = ["--model", "deepseek-v3-mla", "--max-prompt-tokens", "512"];
    let sizes = ["--requests", "16", "--g1-pages", "32", "--g2", "1GiB"];
    as_on_the_cpu("cuda", &[&model[..], &sizes].concat());
}

#[test]
fn a_worker_that_is_killed_costs_hits_and_no_bytes() {
    let gpus = Gpus::new("delay_us=20");
    // On a real GPU a restarted worker takes seconds to create its context and to pin its memory. Work must be left by
    // then.
    let requests = if fake_cuda::on_gpu() { "2000" } else { "600" };
    let arguments = ["--device", "cuda", "--requests", requests];
    let replay = Disturbed::start_with(&gpus.anywhere(), &arguments);
    let status = replay.in_the_middle();
    let loaded = number(&status, "/counters/blocks_loaded");
    signal(number(&status, "/ranks/1/pid"), Signal::KILL);
    let report = replay.report();
    assert!(
        number(&report, "/blocks/loaded") > loaded + 100,
        "its successor got no memory"
    );
}

#[test]
fn a_gpu_that_is_lost_costs_a_worker_and_no_bytes() {
    let folder = tempfile::tempdir().expect("a folder");
    let once = folder.path().join("once");
    let once = once.display();
    let gpus = Gpus::new(&format!(
        "delay_us=20;fail=worker/cuMemcpyAsync/5000/719;once={once}"
    ));
    let mut variables = gpus.variables();
    variables.push(("KVFERRY_GPU_COPY", "async".into()));
    let replay = Disturbed::start_with(&variables, &["--device", "cuda", "--requests", "600"]);
    let report = replay.report();
    assert!(folder.path().join("once").exists(), "nothing was lost");
    assert!(
        number(&report, "/blocks/loaded") > 100,
        "no worker came back"
    );
}

/// A folder in which the driver's file names point to an empty file. The folder hides a driver that would be found
/// after it.
fn no_driver() -> (tempfile::TempDir, tempfile::NamedTempFile) {
    let empty = tempfile::NamedTempFile::new().expect("a file");
    (fake_cuda::folder(empty.path()), empty)
}

/// Runs `kvferry bench gpu`. Returns its standard output, or its error.
fn bench(variables: &[(&str, OsString)], arguments: &[&str]) -> Result<String, String> {
    let mut program = command();
    program.args(["bench", "gpu", "--rounds", "2", "--mib", "2"]);
    program.envs(variables.iter().map(|(name, value)| (name, value)));
    let output = program.args(arguments).output().expect("it runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(text(&output.stderr)),
    }
}

#[test]
fn every_way_to_copy_is_measured_on_bytes_that_came_back() {
    let gpus = Gpus::new("delay_us=20");
    let said = bench(&gpus.anywhere(), &["--fragment-kib", "2048,18", "--json"]).expect("figures");
    let report: Value = serde_json::from_str(&said).expect("JSON");
    let rows = report["rows"].as_array().expect("rows");
    let shapes: Vec<_> = rows
        .iter()
        .map(|row| (&row["fragments"], &row["direction"]))
        .collect();
    let expected = serde_json::json!([[1, "store"], [1, "load"], [113, "store"], [113, "load"]]);
    assert_eq!(serde_json::json!(shapes), expected);
    for row in rows {
        for way in ["one_copy_gb_per_s", "async_gb_per_s"] {
            assert!(row[way][1].as_f64().expect("a rate") > 0.0, "{row}");
        }
        let batch = row["batch_gb_per_s"][1].as_f64();
        assert!(batch.is_some() || fake_cuda::on_gpu(), "{row}");
    }
    assert!(report["both_ways_gb_per_s"][1].as_f64().expect("a rate") > 0.0);
    let attributes = report["attributes"].as_array().expect("attributes");
    let numbers: Vec<_> = attributes.iter().map(|each| &each["number"]).collect();
    assert_eq!(
        serde_json::json!(numbers),
        serde_json::json!([91, 99, 122, 133])
    );
    for key in ["device", "driver_version"] {
        assert!(!report[key].is_null(), "{key}");
    }
    let said = bench(&gpus.anywhere(), &["--fragment-kib", "64"]).expect("figures");
    assert!(said.contains("64 KiB  store"), "{said}");
    assert!(said.contains("attribute 133 (mps_enabled):"), "{said}");
}

/// A driver may crash or hang in calls for many copies: these calls can be excluded, and so can a direction.
#[test]
fn measurements_that_are_not_requested_are_not_made() {
    let gpus = Gpus::new("delay_us=20;fail=*/cuMemcpyBatchAsync_v2/1/719");
    let arguments = [
        "--ways",
        "async",
        "--direction",
        "load",
        "--fragment-kib",
        "64",
        "--json",
    ];
    let said = bench(&gpus.variables(), &arguments).expect("figures");
    let report: Value = serde_json::from_str(&said).expect("JSON");
    let rows = report["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 1);
    let row = &rows[0];
    assert_eq!(row["direction"], "load");
    assert!(
        row["batch_gb_per_s"].is_null() && row["batch_submit_us"].is_null(),
        "{row}"
    );
    for way in ["one_copy_submit_us", "async_submit_us"] {
        assert!(row[way][1].as_f64().expect("a time") > 0.0, "{row}");
    }
    let batches = ["--ways", "batch", "--fragment-kib", "64"];
    let refused = bench(&gpus.variables(), &batches).expect_err("the GPU is lost");
    assert!(
        refused.contains("cuMemcpyBatchAsync_v2 answered"),
        "{refused}"
    );
}

#[test]
fn measurements_that_cannot_run_are_refused_with_the_reason() {
    let gpus = Gpus::new("");
    let cases = [
        (["--gpu", "7"], "gpu is 7: this process may use 2"),
        (
            ["--fragment-kib", "4096"],
            "fragment_kib is 4096: write sizes from 1 to",
        ),
        (["--fragment-kib", "0"], "fragment_kib is 0"),
    ];
    for (arguments, expected) in cases {
        let refused = bench(&gpus.variables(), &arguments).expect_err(expected);
        assert!(refused.contains(expected), "{refused}");
    }
    let (folder, _empty) = no_driver();
    let nothing = fake_cuda::variables(folder.path(), "");
    let refused = bench(&nothing, &[]).expect_err("no driver");
    assert!(refused.contains("no CUDA driver is installed"), "{refused}");
    let lost = Gpus::new("fail=*/cuMemcpyAsync/3/719");
    let refused = bench(&lost.variables(), &[]).expect_err("the GPU is lost");
    assert!(refused.contains("cuMemcpyAsync answered"), "{refused}");
}

/// Copies that are given one by one are not reported as a batch, even if a batch was requested.
#[test]
fn batches_that_the_driver_refuses_are_not_measured() {
    let none = |variables: &[(&str, OsString)]| {
        let said = bench(variables, &["--fragment-kib", "64"]).expect("figures");
        assert!(said.contains("the driver takes none"), "{said}");
    };
    let calls = ["cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"];
    let (folder, _home) = fake_cuda::without(&calls);
    none(&fake_cuda::variables(folder.path(), ""));
    for settings in ["host_pointers=0", "fail=*/cuMemcpyBatchAsync_v2/1/1"] {
        let gpus = Gpus::new(settings);
        none(&gpus.variables());
    }
}

/// Copies 1 to 6 are made both ways at once, 7 and 8 copy all bytes, then come 32 fragments four times.
#[test]
fn a_driver_that_copies_wrong_bytes_is_not_measured() {
    // The first six copies are made both ways at once, then come copies of all bytes (twice) and of 32 fragments (four
    // times).
    for copy in [7, 10, 45, 75, 110] {
        let gpus = Gpus::new(&format!("skip={copy}"));
        let refused = bench(&gpus.variables(), &["--fragment-kib", "64"]);
        let refused = refused.expect_err("a copy is missing");
        assert!(refused.contains("came back with other bytes"), "{refused}");
    }
}

#[test]
fn a_missing_driver_is_reported() {
    let (folder, _empty) = no_driver();
    let mut program = command();
    program.args(["replay", "--device", "cuda", "--requests", "1"]);
    program.envs(fake_cuda::variables(folder.path(), ""));
    let output = program.output().expect("it runs");
    assert!(!output.status.success());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("no CUDA driver is installed"), "{errors}");
    assert!(!errors.contains("panicked"), "{errors}");
}

/// The engine has a GPU, and its worker has none: the reason reaches the engine's rank and the status.
#[test]
fn a_worker_without_a_gpu_reports_that_to_the_engine() {
    let (nothing, _empty) = no_driver();
    let gpus = Gpus::new("");
    let folder = socket_dir();
    let name = folder.path().to_str().expect("UTF-8");
    let up = ["up", "--ranks", "1", "--g2", "32MiB", "--socket-dir", name];
    let variables = fake_cuda::variables(nothing.path(), "");
    let _up = Running::start_with(&variables, &up, &std::env::temp_dir());
    let rank = engine_rank(folder.path(), "cuda");
    let rank: Vec<&str> = rank.iter().map(String::as_str).collect();
    let rank = Running::start_with(&gpus.variables(), &rank, &std::env::temp_dir());
    let (code, errors) = rank.end(LIMIT);
    assert_eq!(code, Some(1));
    assert!(errors.contains("no CUDA driver is installed"), "{errors}");
    status(name, Instant::now(), &|status| {
        let problem = status["ranks"][0]["problem"].as_str();
        problem.is_some_and(|text| text.contains("no CUDA driver is installed"))
    });
}

/// Waits until `is_true` holds for the leader's status, and returns the status.
fn status(sockets: &str, begun: Instant, is_true: &dyn Fn(&Value) -> bool) -> Value {
    loop {
        let output = kvferry(&["status", "--json", "--socket-dir", sockets]);
        match serde_json::from_slice(&output.stdout) {
            Ok(status) if is_true(&status) => return status,
            Ok(status) if begun.elapsed() > LIMIT => panic!("it does not get there: {status}"),
            _ => {}
        }
    }
}

fn engine_rank(sockets: &std::path::Path, device: &str) -> Vec<String> {
    let worker = sockets.join("worker-0-0");
    let arguments = [
        &[
            "engine-rank",
            "--worker-dir",
            worker.to_str().expect("UTF-8"),
        ][..],
        &[
            "--engine",
            "0123456789abcdef0123456789abcdef",
            "--replica",
            "0",
        ],
        &["--rank", "0", "--ranks", "1", "--engine-page-tokens", "16"],
        &[
            "--device-pages",
            "64",
            "--model",
            "tiny",
            "--layout",
            "contiguous",
        ],
        &["--device", device, "--start-limit-s", "20"],
    ];
    arguments
        .concat()
        .iter()
        .map(|text| (*text).to_owned())
        .collect()
}

/// Maximum time for which a worker may hold the memory of a dead engine. Less than the heartbeats after which silence
/// would reveal the death.
const HELD_MAX: Duration = Duration::from_secs(60);
const HEARTBEAT_MS: &str = "60000";

/// Number of mappings of GPU memory in a process that it did not allocate itself.
fn opened(pid: u64) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    maps.lines()
        .filter(|line| line.contains("memfd:fake-cuda"))
        .count()
}

#[test]
fn nothing_of_a_dead_engine_is_held() {
    held_no_longer("cuda");
}

#[test]
fn no_chunk_of_a_dead_engine_is_held() {
    held_no_longer("cuda-fd");
}

fn held_no_longer(device: &str) {
    let gpus = Gpus::new("delay_us=20");
    let folder = socket_dir();
    let name = folder.path().to_str().expect("UTF-8");
    let up = ["up", "--ranks", "1", "--g2", "32MiB", "--socket-dir", name];
    let mut variables = gpus.variables();
    variables.push(("KVFERRY_HEARTBEAT_MS", HEARTBEAT_MS.into()));
    let _up = Running::start_with(&variables, &up, &std::env::temp_dir());
    let rank = engine_rank(folder.path(), device);
    let rank: Vec<&str> = rank.iter().map(String::as_str).collect();
    let begun = Instant::now();
    for _ in 0..2 {
        let rank = Running::start_with(&gpus.variables(), &rank, &std::env::temp_dir());
        let attached = status(name, begun, &|status| {
            status["ranks"][0]["attached"] == true
        });
        let worker = number(&attached, "/ranks/0/pid");
        assert_eq!(opened(worker), 1, "the engine's memory");
        // Killed, as an engine that runs out of memory is killed.
        let killed = Instant::now();
        drop(rank);
        while opened(worker) > 0 {
            assert!(killed.elapsed() < HELD_MAX, "the memory stays");
            std::thread::yield_now();
        }
        status(name, begun, &|status| {
            status["ranks"][0]["attached"] == false
        });
        assert!(lives(worker), "the worker released it before its end");
    }
}

/// Starts `up` with the driver for tests. Returns its folder, the folder's name and the process.
fn served(gpus: &Gpus) -> (tempfile::TempDir, String, Running) {
    let folder = socket_dir();
    let name = folder.path().to_str().expect("UTF-8").to_owned();
    let up = ["up", "--ranks", "1", "--g2", "32MiB", "--socket-dir", &name];
    let up = Running::start_with(&gpus.variables(), &up, &std::env::temp_dir());
    (folder, name, up)
}

/// Starts a rank that must be refused with the `expected` error, while the worker that refused it keeps running.
fn refused_and_the_worker_stays(settings: &str, expected: &str) {
    let gpus = Gpus::new(settings);
    let (folder, name, _up) = served(&gpus);
    // The pid is 0 where no worker has attached yet.
    let worker = |status: &Value| status["ranks"][0]["pid"].as_u64().filter(|pid| *pid > 0);
    let before = status(&name, Instant::now(), &|status| worker(status).is_some());
    let arguments = engine_rank(folder.path(), "cuda");
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let rank = Running::start_with(&gpus.variables(), &arguments, &std::env::temp_dir());
    let (code, errors) = rank.end(LIMIT);
    assert_eq!(code, Some(1), "{errors}");
    assert!(errors.contains(expected), "{errors}");
    let after = status(&name, Instant::now(), &|status| worker(status).is_some());
    assert_eq!(worker(&after), worker(&before), "{errors}");
    let problem = after["ranks"][0]["problem"].as_str().unwrap_or_default();
    assert!(problem.contains(expected), "{after}");
}

/// The engine uses the GPU exclusively: the worker reports that, and does not end and restart for ever.
#[test]
fn a_gpu_in_exclusive_mode_is_refused_with_the_reason() {
    let folder = tempfile::tempdir().expect("a folder");
    let held = folder.path().join("held");
    refused_and_the_worker_stays(
        &format!("exclusive={}", held.display()),
        "(46): the GPU is in exclusive or prohibited compute mode",
    );
}

#[test]
fn a_gpu_without_room_for_a_context_is_refused_with_the_reason() {
    let settings = "memory_mib=64;context_mib=worker/128";
    refused_and_the_worker_stays(settings, "a context takes about 0.5 GiB");
}

#[test]
fn an_engine_in_another_pid_namespace_is_refused_with_the_reason() {
    let settings = "pidns=engine-rank/7";
    refused_and_the_worker_stays(settings, "in another PID namespace");
}

/// Under MPS a killed worker may take the engine with it: the status must show that before an operator ends a process.
#[test]
fn a_gpu_that_mps_serves_is_logged_as_one() {
    let gpus = Gpus::new("attribute=133/1");
    let (folder, name, up) = served(&gpus);
    let arguments = engine_rank(folder.path(), "cuda");
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let _rank = Running::start_with(&gpus.variables(), &arguments, &std::env::temp_dir());
    status(&name, Instant::now(), &|status| {
        status["ranks"][0]["attached"] == true
    });
    up.terminate();
    let (_, said) = up.end(LIMIT);
    assert!(said.contains("MPS serves this GPU"), "{said}");
}

/// Host memory is placed before any engine has come. An engine on the CPU never needs the driver, whose start takes
/// long.
#[test]
fn no_driver_is_started_to_place_host_memory() {
    let reports = tempfile::tempdir().expect("a folder");
    let report = reports.path().display();
    let gpus = Gpus::new(&format!("init_ms=30000;report={report}"));
    let found = replay_with(&gpus.variables(), &["--requests", "4", "--g1-pages", "64"]);
    assert_eq!(number(&found, "/bytes/mismatched"), 0);
    let loaded = std::fs::read_dir(reports.path()).expect("a folder");
    assert_eq!(loaded.count(), 0, "processes that loaded the driver");
}

/// Calls for many copies hang without an error. Each worker is killed because of that once, and its successor gives
/// copies one by one.
#[test]
fn batched_copies_that_hang_end_one_worker() {
    let hung = tempfile::tempdir().expect("a folder");
    let gpus = Gpus::new(&format!(
        "delay_us=20;hang=worker/5/{}",
        hung.path().display()
    ));
    let mut variables = gpus.variables();
    variables.push(("KVFERRY_GPU_COPY", "batch".into()));
    let replay = Disturbed::start_with(&variables, &["--device", "cuda", "--requests", "400"]);
    let report = replay.report();
    let hung = std::fs::read_dir(hung.path()).expect("a folder").count();
    assert!((1..=2).contains(&hung), "{hung} workers died over it, of 2");
    assert!(
        number(&report, "/blocks/loaded") > 100,
        "no worker came back"
    );
}

/// Starts a leader, and a worker that releases its GPU after 1 s without an engine.
fn with_a_worker_that_is_soon_idle(gpus: &Gpus, name: &str) -> [Running; 2] {
    let common = ["--ranks", "1", "--g2", "32MiB", "--socket-dir", name];
    let leader = [&["leader"], &common[..]].concat();
    let worker = [&["worker", "--rank", "0", "--gpu-idle-s", "1"], &common[..]].concat();
    [leader, worker]
        .map(|arguments| Running::start_with(&gpus.variables(), &arguments, &std::env::temp_dir()))
}

/// GPU memory belongs to the engines: a worker releases its context when the last engine has left, and creates one
/// again for the next.
#[test]
fn a_worker_without_an_engine_releases_the_gpu() {
    let gpus = Gpus::new("delay_us=20");
    let folder = socket_dir();
    let name = folder.path().to_str().expect("UTF-8");
    let _processes = with_a_worker_that_is_soon_idle(&gpus, name);
    let arguments = engine_rank(folder.path(), "cuda");
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let pinned = |status: &Value| status["ranks"][0]["host_pinned_bytes"].as_u64();
    let begun = Instant::now();
    for _ in 0..2 {
        let rank = Running::start_with(&gpus.variables(), &arguments, &std::env::temp_dir());
        let attached = status(name, begun, &|status| {
            status["ranks"][0]["attached"] == true
        });
        assert_eq!(pinned(&attached), Some(32 << 20));
        drop(rank);
        let idle = status(name, begun, &|status| pinned(status).is_none());
        assert_eq!(idle["ranks"][0]["attached"], false);
        assert_eq!(
            number(&idle, "/ranks/0/pid"),
            number(&attached, "/ranks/0/pid")
        );
    }
}

/// Opens a FIFO for writing as soon as a process opens it for reading.
fn read_by_somebody(fifo: &Path) -> File {
    let (sender, opened) = channel();
    let fifo = fifo.to_owned();
    std::thread::spawn(move || {
        let writer = File::options().write(true).open(fifo);
        sender
            .send(writer.expect("a FIFO"))
            .expect("the test waits");
    });
    opened.recv_timeout(LIMIT).expect("nobody reads it")
}

/// The registration of memory on the first GPU of the driver for tests, as far as it is checked before the GPU is
/// ready.
fn on_the_first_gpu() -> Message {
    let gpu = DeviceUuid::gpu(*b"kvferry-fake-GP0");
    let registration = Registration {
        groups: vec![GroupMemory {
            attention: Attention::Full,
            window_tokens: 0,
            eagle: false,
            engine_page_tokens: 16,
            device_pages: 1,
            layers: 1,
            tensors: Vec::new(),
        }],
        hash_tokens: 0,
        hit_tokens: 0,
        content: b"test".to_vec(),
        rank: Rank(0),
        tp_size: 1,
        shard: 0,
        allocations: vec![Allocation {
            kind: AllocationKind::Device,
            handle: AllocationHandle::CudaIpc([0; 64]),
            bytes: 4096,
        }],
        nonce: Nonce {
            allocation: 0,
            offset_bytes: 0,
            bytes: vec![7; 16],
        },
        proofs: Vec::new(),
        device_uuid: Some(gpu.to_string()),
        timeline: None,
    };
    Message::Register(Register {
        abandoned_through: 0,
        engine: [9; 16],
        registration,
        check_only: false,
    })
}

/// Registers `times` times as a rank, and returns how each registration was refused.
fn refusals(sockets: &Path, times: usize) -> Vec<(ErrorCode, String)> {
    // Must run before the runtime below starts, because it uses a runtime of its own.
    signals::set_to_defaults();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    runtime.expect("a runtime").block_on(async {
        let settings = ClientSettings {
            address: Address::Directory(sockets.join("worker-0-0")),
            hello: Hello {
                engine: [9; 16],
                ..Hello::new(Role::Rank, "test")
            },
            limits: Limits::default(),
        };
        let (rank, _says) = Client::start(Arc::new(ZmqTransport), settings);
        let mut refusals = Vec::new();
        for _ in 0..times {
            let refused = rank.request(on_the_first_gpu(), LIMIT).await;
            let failure = refused.expect_err("the GPU is not there");
            refusals.push((failure.code, failure.message));
        }
        refusals
    })
}

/// A driver does not pin memory that is not unpinned yet: a rank that registers meanwhile is refused with `NotReady`,
/// and the GPU is used again after the release.
#[test]
fn a_rank_that_registers_while_the_gpu_is_released_waits_for_the_release() {
    let pipes = tempfile::tempdir().expect("a folder");
    let unpinning = pipes.path().join("unpinning");
    rustix::fs::mkfifoat(CWD, &unpinning, Mode::RUSR | Mode::WUSR).expect("a FIFO");
    let gpus = Gpus::new(&format!(
        "delay_us=20;unpin=worker/16/{}",
        unpinning.display()
    ));
    let folder = socket_dir();
    let name = folder.path().to_str().expect("UTF-8");
    let _processes = with_a_worker_that_is_soon_idle(&gpus, name);
    let arguments = engine_rank(folder.path(), "cuda");
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let begun = Instant::now();
    let attached = |status: &Value| status["ranks"][0]["attached"] == true;
    let rank = Running::start_with(&gpus.variables(), &arguments, &std::env::temp_dir());
    let before = status(name, begun, &attached);
    drop(rank);
    // The worker unpins its depot, and continues when the FIFO is closed.
    let unpinning = read_by_somebody(&unpinning);
    for (code, text) in refusals(folder.path(), 10) {
        assert_eq!(code, ErrorCode::NotReady, "{text}");
        assert!(text.contains("is being released"), "{text}");
    }
    drop(unpinning);
    let _rank = Running::start_with(&gpus.variables(), &arguments, &std::env::temp_dir());
    let after = status(name, begun, &attached);
    let worker = |status: &Value| number(status, "/ranks/0/pid");
    assert_eq!(worker(&after), worker(&before));
}
