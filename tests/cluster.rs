//! Real processes and real bytes: leader, workers and an engine, started as a user starts them.

#![expect(
    clippy::expect_used,
    clippy::panic,
    reason = "a test says what it expects"
)]

mod cluster {
    mod beside;
    mod calls;
    mod counts;
    mod disks;
    mod disturbed;
    mod engine;
    mod events;
    #[path = "../support/fake_cuda.rs"]
    mod fake_cuda;
    mod monitor;
    mod on_gpus;
    mod processes;
    mod recovery;
    mod remote;
    pub mod replay_events;
    mod restarts;
    mod settings;
    mod strangers;
    mod versions;
}
mod support;

use serde_json::Value;

use cluster::replay_events;
use support::{kvferry, number, replay, socket_dir, trace};

/// Runs the same sequential replay live and offline and compares the decisions and the KV events. Returns the live report.
fn live_equals_offline(arguments: &[&str], live_only: &[&str]) -> Value {
    let all = [&["--sequential"][..], arguments].concat();
    let folder = socket_dir();
    let events = |mode: &str| folder.path().join(mode);
    let run = |mode: &str, more: &[&str]| {
        let path = events(mode);
        let events = path.to_str().expect("UTF-8");
        replay(&[&all[..], &["--mode", mode, "--events", events], more].concat())
    };
    let offline = run("offline", &[]);
    let live = run("live", live_only);
    replay_events::compare(&events("live"), &events("offline"), &live);
    for key in [
        "/tokens",
        "/blocks",
        "/arena",
        "/requests",
        "/decisions_digest",
    ] {
        assert_eq!(
            live.pointer(key),
            offline.pointer(key),
            "{key} of {arguments:?}"
        );
    }
    let digest = live.pointer("/decisions_digest").and_then(Value::as_str);
    assert!(digest.is_some_and(|digest| digest.starts_with("blake3:")));
    assert_eq!(
        number(&live, "/bytes/gathered"),
        number(&offline, "/bytes/gathered")
    );
    assert_eq!(
        number(&live, "/bytes/scattered"),
        number(&offline, "/bytes/scattered")
    );
    assert_eq!(
        number(&live, "/bytes/verified"),
        number(&live, "/bytes/scattered")
    );
    assert_eq!(number(&live, "/bytes/mismatched"), 0);
    assert_eq!(number(&live, "/disturbed_requests"), 0);
    live
}

/// Requires that every kind of block occurred: without one of that kind the runs prove nothing about it.
fn every_kind_was_seen(reports: &[Value]) {
    for kind in ["grown", "branched", "evicted", "loaded"] {
        let seen = |report| number(report, &format!("/blocks/{kind}"));
        let total: u64 = reports.iter().map(seen).sum();
        assert!(total > 0, "no block was {kind}");
    }
}

#[test]
fn sequential_live_and_offline_decide_the_same_on_the_built_in_workload() {
    let long = ["--requests", "120", "--g1-pages", "16", "--g2-pages", "800"];
    let short = [
        "--requests",
        "100",
        "--g1-pages",
        "0",
        "--g2-pages",
        "600",
        "--ratio",
        "7",
    ];
    // Blocks grow where there is room behind them: holes of a full arena are used by runs that are split.
    let roomy = ["--requests", "60", "--g1-pages", "16", "--g2-pages", "4000"];
    every_kind_was_seen(&[
        live_equals_offline(&long, &[]),
        live_equals_offline(&short, &["--layout", "contiguous"]),
        live_equals_offline(&roomy, &[]),
    ]);
}

#[test]
fn sequential_live_and_offline_decide_the_same() {
    let conversation = ["--requests", "300", "--engine-page-tokens"];
    let weka = [
        "--requests",
        "60",
        "--trace-block-tokens",
        "64",
        "--engine-page-tokens",
        "16",
    ];
    let runs = [
        (
            "conv",
            [
                &conversation[..],
                &["16", "--g1-pages", "0", "--g2-pages", "8000"],
            ]
            .concat(),
        ),
        (
            "conv",
            [
                &conversation[..],
                &["512", "--g1-pages", "300", "--g2-pages", "600"],
            ]
            .concat(),
        ),
        (
            "weka40",
            [&weka[..], &["--g1-pages", "0", "--g2-pages", "60000"]].concat(),
        ),
    ];
    let mut reports = Vec::new();
    for (name, arguments) in runs {
        let Some(path) = trace(name) else { return };
        let path = [path.to_str().expect("UTF-8")];
        reports.push(live_equals_offline(&[&path[..], &arguments].concat(), &[]));
    }
    every_kind_was_seen(&reports);
}

/// Runs several requests concurrently, with small host memory and both layouts. Every loaded byte is compared.
fn concurrent(arguments: &[&str]) -> Value {
    let common = [
        "--concurrency",
        "6",
        "--g1-pages",
        "64",
        "--g2-pages",
        "3000",
    ];
    let report = replay(&[&common[..], arguments].concat());
    assert_eq!(number(&report, "/bytes/mismatched"), 0);
    assert!(number(&report, "/bytes/verified") > 0, "nothing was loaded");
    assert!(
        number(&report, "/blocks/evicted") > 0,
        "nothing was evicted"
    );
    report
}

#[test]
fn a_concurrent_replay_brings_every_byte_back() {
    concurrent(&["--layout", "layer-separate", "--seed", "7"]);
}

#[test]
fn a_concurrent_replay_with_contiguous_pages_brings_every_byte_back() {
    concurrent(&[
        "--layout",
        "contiguous",
        "--ranks",
        "3",
        "--ratio",
        "8",
        "--seed",
        "8",
    ]);
}

#[test]
fn models_with_odd_geometry_come_back_whole() {
    let common = ["--requests", "12", "--concurrency", "3", "--g1-pages", "0"];
    for model in ["llama-3-8b", "deepseek-v3-mla"] {
        let report = replay(&[&common[..], &["--model", model, "--g2", "1GiB"]].concat());
        assert_eq!(number(&report, "/bytes/mismatched"), 0, "{model}");
        assert!(
            number(&report, "/bytes/verified") > 0,
            "{model}: nothing was loaded"
        );
    }
}

/// Models with several groups of layers.
const HYBRID_MODELS: [&str; 4] = ["gemma-like", "two-sizes", "mamba-like", "chunked"];

#[test]
fn sequential_live_and_offline_decide_the_same_for_models_with_several_groups() {
    for model in HYBRID_MODELS {
        let arguments = ["--model", model, "--requests", "80", "--g1-pages", "150"];
        let report = live_equals_offline(&[&arguments[..], &["--g2-pages", "500"]].concat(), &[]);
        assert!(
            number(&report, "/bytes/verified") > 0,
            "{model}: nothing was loaded"
        );
        assert!(
            number(&report, "/blocks/evicted") > 0,
            "{model}: nothing was evicted"
        );
    }
}

#[test]
fn models_with_several_groups_come_back_whole() {
    for (model, layout) in HYBRID_MODELS
        .iter()
        .zip(["contiguous", "layer-separate"].iter().cycle())
    {
        let setup = [
            "--model", model, "--layout", layout, "--seed", "3", "--ratio", "8",
        ];
        let sizes = [
            "--requests",
            "60",
            "--concurrency",
            "6",
            "--g1-pages",
            "100",
        ];
        let report = replay(&[&setup[..], &sizes, &["--g2-pages", "600"]].concat());
        assert_eq!(number(&report, "/bytes/mismatched"), 0, "{model}");
        assert_eq!(number(&report, "/disturbed_requests"), 0, "{model}");
        assert!(
            number(&report, "/bytes/verified") > 0,
            "{model}: nothing was loaded"
        );
        assert!(
            number(&report, "/blocks/evicted") > 0,
            "{model}: nothing was evicted"
        );
    }
}

#[test]
fn a_model_with_several_groups_is_not_replayed_in_virtual_time() {
    let output = kvferry(&["replay", "--mode", "offline", "--model", "gemma-like"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(errors.contains("--model is gemma-like"), "{errors}");
    let output = kvferry(&["replay", "--model", "chunked", "--engine-page-tokens", "32"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(errors.contains("--engine-page-tokens is 32"), "{errors}");
}

#[test]
fn pages_that_all_ranks_hold_are_stored_once_and_loaded_by_each() {
    for (model, ranks, shards) in [("deepseek-v3-mla", 4, 1), ("llama-3-8b", 16, 8)] {
        let report = replay(&[
            "--model",
            model,
            "--ranks",
            &ranks.to_string(),
            "--requests",
            "8",
            "--g1-pages",
            "0",
            "--g2",
            "1GiB",
            "--max-prompt-tokens",
            "1024",
            "--concurrency",
            "2",
        ]);
        assert_eq!(number(&report, "/setup/kv_shards"), shards, "{model}");
        assert_eq!(number(&report, "/bytes/mismatched"), 0, "{model}");
        assert_eq!(number(&report, "/blocks/evicted"), 0, "{model}");
        let page_bytes = number(&report, "/setup/page_bytes");
        let stored = number(&report, "/arena/used_pages") * page_bytes;
        assert_eq!(
            number(&report, "/bytes/gathered"),
            shards * stored,
            "{model}"
        );
        let found = number(&report, "/tokens/hit_g2") / 16 * page_bytes;
        assert!(found > 0, "{model}: nothing was found");
        assert_eq!(
            number(&report, "/bytes/scattered"),
            ranks * found,
            "{model}"
        );
    }
}

#[test]
fn without_any_tier_everything_is_computed() {
    let report = replay(&["--requests", "10", "--g2-pages", "0", "--concurrency", "2"]);
    assert_eq!(number(&report, "/tokens/hit_g2"), 0);
    assert!(
        number(&report, "/blocks/refused") > 0,
        "refusals are visible"
    );
}

#[test]
fn replicas_find_what_others_stored() {
    let alone = concurrent(&["--requests", "200", "--seed", "9"]);
    let report = concurrent(&["--requests", "200", "--seed", "9", "--replicas", "3"]);
    assert_eq!(number(&report, "/setup/replicas"), 3);
    assert_eq!(number(&report, "/requests"), 200);
    assert_eq!(number(&report, "/disturbed_requests"), 0);
    assert_eq!(
        number(&report, "/tokens/prompt"),
        number(&alone, "/tokens/prompt")
    );
    assert!(
        number(&report, "/tokens/hit_g2") > number(&alone, "/tokens/hit_g2") / 2,
        "each finds its own only"
    );
}

#[test]
fn replicas_are_for_live_replays() {
    let output = kvferry(&["replay", "--mode", "offline", "--replicas", "2"]);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(
        errors.contains("--replicas is for live replays"),
        "{errors}"
    );
}
