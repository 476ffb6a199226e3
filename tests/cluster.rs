//! Real processes, real bytes: leader, workers and an engine, as a user starts them.

#![expect(
    clippy::expect_used,
    clippy::panic,
    reason = "a test says what it expects"
)]

mod support;

use serde_json::Value;

use support::{number, replay, trace};

/// Runs the same sequential replay live and offline and compares what was decided. Returns the live report.
fn live_equals_offline(name: &str, arguments: &[&str]) -> Option<Value> {
    let path = trace(name)?;
    let mut all = vec![path.to_str().expect("UTF-8"), "--sequential"];
    all.extend_from_slice(arguments);
    let offline = replay(&[&all[..], &["--mode", "offline"]].concat());
    let live = replay(&[&all[..], &["--mode", "live"]].concat());
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
    Some(live)
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
    let mut seen = [("grown", 0), ("branched", 0), ("evicted", 0), ("loaded", 0)];
    for (name, arguments) in runs {
        let Some(live) = live_equals_offline(name, &arguments) else {
            return;
        };
        for (key, total) in &mut seen {
            *total += number(&live, &format!("/blocks/{key}"));
        }
    }
    for (key, total) in seen {
        assert!(
            total > 0,
            "no block was {key}: the runs prove nothing about that"
        );
    }
}

/// Everything at once: several requests, small host memory, both layouts; every loaded byte is compared.
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

#[test]
fn without_any_tier_everything_is_computed() {
    let report = replay(&["--requests", "10", "--g2-pages", "0", "--concurrency", "2"]);
    assert_eq!(number(&report, "/tokens/hit_g2"), 0);
    assert!(
        number(&report, "/blocks/refused") > 0,
        "refusals are visible"
    );
}
