//! Sequential offline replays of real traces give exactly the hit counts of independent reference simulations, and runs
//! of pages keep nearly all of these hits.

#![expect(
    clippy::expect_used,
    clippy::panic,
    reason = "a test says what it expects"
)]

#[path = "reference/disk.rs"]
mod disk;
mod support;
#[path = "reference/tails.rs"]
mod tails;

use serde_json::Value;

use support::{number, replay, shared, trace};

/// Longest prompt of each trace, in trace blocks. A smaller cache evicts pages of the very request that it serves, and
/// the models differ.
const LONGEST: [(&str, u64); 2] = [("conv", 246), ("weka40", 8_922)];

struct Run {
    g1_pages: u64,
    g2_pages: String,
    ratio: u64,
    policy: &'static str,
}

/// The policy that evicts before it splits a run.
const EVICT_FIRST: &str = "pieces=0";

/// Replays a trace with a disk of `g3_pages`; 0 for none.
fn offline(name: &str, run: &Run, g3_pages: u64) -> Option<Value> {
    let path = trace(name)?;
    let block = if name == "conv" { "512" } else { "64" };
    Some(replay(&[
        path.to_str().expect("UTF-8"),
        "--mode",
        "offline",
        "--sequential",
        "--trace-block-tokens",
        block,
        "--engine-page-tokens",
        block,
        "--ratio",
        &run.ratio.to_string(),
        "--g1-pages",
        &run.g1_pages.to_string(),
        "--g2-pages",
        &run.g2_pages,
        "--g2-policy",
        run.policy,
        "--g3-pages",
        &g3_pages.to_string(),
    ]))
}

/// Hit pages in G1 and in G2.
fn hits(name: &str, report: &Value) -> (u64, u64) {
    let tokens = if name == "conv" { 512 } else { 64 };
    (
        number(report, "/tokens/hit_g1") / tokens,
        number(report, "/tokens/hit_g2") / tokens,
    )
}

/// Rows of a reference table, as lists of columns.
fn rows(file: &str) -> Option<Vec<Vec<String>>> {
    let path = shared()?.join("traces/reference").join(file);
    let text = std::fs::read_to_string(path).expect("a reference table");
    Some(
        text.lines()
            .skip(1)
            .map(|line| line.split(',').map(str::to_owned).collect())
            .collect(),
    )
}

fn one_tier_matches_the_reference(name: &str) {
    let Some(rows) = rows(&format!("lru_opt_{name}.csv")) else {
        return;
    };
    let longest = LONGEST
        .iter()
        .find(|(trace, _)| *trace == name)
        .map_or(0, |(_, pages)| *pages);
    let mut compared = 0;
    for row in rows.iter().filter(|row| row[2] == "lru_tail_first") {
        let (capacity, expected) = (&row[1], row[3].parse::<u64>().expect("hits"));
        if capacity.parse::<u64>().is_ok_and(|pages| pages <= longest) {
            continue;
        }
        let g2_pages = if capacity == "1000000000" {
            "unlimited"
        } else {
            capacity.as_str()
        };
        let run = Run {
            g1_pages: 0,
            g2_pages: g2_pages.to_owned(),
            ratio: 1,
            policy: "",
        };
        let Some(report) = offline(name, &run, 0) else {
            return;
        };
        assert_eq!(
            hits(name, &report),
            (0, expected),
            "{name} with {capacity} pages"
        );
        compared += 1;
    }
    assert!(compared >= 6, "only {compared} rows compared");
}

fn two_tiers_match_the_reference(name: &str) {
    let Some(rows) = rows(&format!("two_tier_{name}.csv")) else {
        return;
    };
    let mut compared = 0;
    for row in rows.iter().filter(|row| row[3] == "inclusive") {
        let column = |index: usize| row[index].parse::<u64>().expect("a number");
        let run = Run {
            g1_pages: column(1),
            g2_pages: row[2].clone(),
            ratio: 1,
            policy: "",
        };
        let Some(report) = offline(name, &run, 0) else {
            return;
        };
        assert_eq!(
            hits(name, &report),
            (column(4), column(5)),
            "{name} {row:?}"
        );
        assert_eq!(
            number(&report, "/blocks/stored"),
            column(11),
            "{name} {row:?}"
        );
        compared += 1;
    }
    assert!(compared >= 2, "only {compared} rows compared");
}

/// Compares the hits of a policy at ratio 1 with the rows of a reference policy. They may differ by this share.
fn policy_matches_the_reference(
    name: &str,
    policy: &'static str,
    reference: &str,
    difference_max: f64,
) {
    let Some(rows) = rows(&format!("policy_{name}.csv")) else {
        return;
    };
    let longest = LONGEST
        .iter()
        .find(|(trace, _)| *trace == name)
        .map_or(0, |(_, pages)| *pages);
    let mut compared = 0;
    for row in rows.iter().filter(|row| row[2] == reference) {
        let column = |index: usize| row[index].parse::<u64>().expect("a number");
        if column(1) <= longest {
            continue;
        }
        let run = Run {
            g1_pages: 0,
            g2_pages: row[1].clone(),
            ratio: 1,
            policy,
        };
        let Some(report) = offline(name, &run, 0) else {
            return;
        };
        let (_, found) = hits(name, &report);
        let difference = found.abs_diff(column(3)) as f64 / column(3) as f64;
        assert!(
            difference <= difference_max,
            "{name} {row:?}: {found} hits, {difference}"
        );
        compared += 1;
    }
    assert!(compared >= 3, "only {compared} rows compared");
}

/// The reference accesses the pages of a request from the last to the first, and may evict pages of the request itself;
/// a pool holds what a lookup found before it makes room, from the first missing page on.
#[test]
fn arc_nearly_matches_the_reference() {
    policy_matches_the_reference("conv", "eviction=arc", "ARC", 0.004);
    policy_matches_the_reference("weka40", "eviction=arc", "ARC", 0.009);
}

#[test]
fn pages_admitted_when_seen_twice_match_the_reference() {
    for name in ["conv", "weka40"] {
        policy_matches_the_reference(name, "admission=seen:2", "LRU+freq>=2", 0.0);
    }
}

#[test]
fn one_tier_conversation() {
    one_tier_matches_the_reference("conv");
}

#[test]
fn one_tier_weka40() {
    one_tier_matches_the_reference("weka40");
}

#[test]
fn two_tiers_conversation() {
    two_tiers_match_the_reference("conv");
}

#[test]
fn two_tiers_weka40() {
    two_tiers_match_the_reference("weka40");
}

#[test]
fn unlimited_runs_lose_no_hit() {
    for ratio in [2, 8, 32] {
        let run = Run {
            g1_pages: 0,
            g2_pages: "unlimited".to_owned(),
            ratio,
            policy: "",
        };
        let Some(report) = offline("conv", &run, 0) else {
            return;
        };
        assert_eq!(hits("conv", &report), (0, 105_592), "ratio {ratio}");
    }
}

#[test]
fn runs_keep_the_hits_with_a_fraction_of_the_stores() {
    const ANY: u64 = u64::MAX;
    // (policy, G1 pages, G2 pages, ratio, hits at ratio 1, minimum share of them, maximum of stores and growths)
    let cases = [
        (EVICT_FIRST, 5_000, 30_000, 8, 95_337, 0.998, ANY),
        (EVICT_FIRST, 5_000, 30_000, 32, 95_337, 0.988, 16_500),
        (EVICT_FIRST, 0, 10_000, 32, 62_005, 0.98, 19_500),
        (EVICT_FIRST, 0, 5_000, 32, 34_193, 0.94, 20_500),
        ("pieces=2", 5_000, 30_000, 32, 95_337, 0.9939, 19_000),
        ("pieces=2", 0, 10_000, 32, 62_005, 0.991, 26_300),
        ("pieces=2", 0, 5_000, 32, 34_193, 0.977, 29_800),
        ("pieces=3", 5_000, 30_000, 32, 95_337, 0.9945, 21_000),
        ("pieces=3", 0, 10_000, 32, 62_005, 0.995, 32_100),
        ("pieces=3", 0, 5_000, 32, 34_193, 0.986, 38_100),
        ("pieces=8", 5_000, 30_000, 32, 95_337, 0.9949, 24_400),
        ("pieces=8", 0, 10_000, 32, 62_005, 0.996, 47_000),
        ("pieces=8", 0, 5_000, 32, 34_193, 0.992, 63_700),
    ];
    for (policy, g1_pages, g2_pages, ratio, all, share, most_writes) in cases {
        let run = Run {
            g1_pages,
            g2_pages: g2_pages.to_string(),
            ratio,
            policy,
        };
        let Some(report) = offline("conv", &run, 0) else {
            return;
        };
        let (g1, g2) = hits("conv", &report);
        let kept = (g1 + g2) as f64 / f64::from(all);
        let writes = number(&report, "/blocks/stored") + number(&report, "/blocks/grown");
        let evicted = number(&report, "/arena/largest_eviction_pages");
        let case = format!("{policy}, G1 {g1_pages}, G2 {g2_pages}, ratio {ratio}");
        assert!(kept >= share, "{case}: kept {kept}");
        assert!(writes <= most_writes, "{case}: {writes} writes");
        assert!(
            evicted <= 2 * ratio,
            "{case}: {evicted} pages evicted at once"
        );
    }
}

/// The digests of eviction first were recorded before runs could be split early.
#[test]
fn the_decisions_of_eviction_first_and_of_the_defaults_are_those_recorded() {
    let first = &[EVICT_FIRST, "pieces=1"][..];
    let defaults = &["", "pieces=2"][..];
    let recorded = [
        (
            (5_000, "30000", first),
            "b66d295461b0f23eb7e42ecfc981e583f8c35a6e113fad52481995d2db2e4ac0",
        ),
        (
            (0, "10000", first),
            "3bdb3c9a73082e52aa1975b442f5a3ce239f391f0004e6191144795152dd82ac",
        ),
        (
            (5_000, "30000", defaults),
            "b823e362aeac3327f72273c21f31410de0a2b8298fa2554d063900cfb46fcdb3",
        ),
        (
            (0, "10000", defaults),
            "2d83734a040308158144e4f1919d833dcb0dae2b0d5217711ecd35ca96b47c55",
        ),
    ];
    for ((g1_pages, g2_pages, policies), digest) in recorded {
        for policy in policies {
            let run = Run {
                g1_pages,
                g2_pages: g2_pages.to_owned(),
                ratio: 32,
                policy,
            };
            let Some(report) = offline("conv", &run, 0) else {
                return;
            };
            let found = report["decisions_digest"].as_str().expect("a digest");
            assert_eq!(
                found,
                format!("blake3:{digest}"),
                "'{policy}', {g2_pages} pages"
            );
        }
    }
}

#[test]
fn two_offline_runs_give_the_same_report_but_for_wall_time() {
    let run = Run {
        g1_pages: 1_000,
        g2_pages: "5000".to_owned(),
        ratio: 32,
        policy: "",
    };
    let Some(mut first) = offline("conv", &run, 0) else {
        return;
    };
    let Some(mut second) = offline("conv", &run, 0) else {
        return;
    };
    for report in [&mut first, &mut second] {
        report["seconds"]["wall"] = Value::Null;
    }
    assert_eq!(first.to_string(), second.to_string());
}
