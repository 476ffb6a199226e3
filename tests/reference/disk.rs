//! With a disk, G1 and all tiers together have the hits of two inclusive tiers, of which the second is as large as the
//! larger one of G2 and G3.

use super::{Run, number, offline, replay, rows};

/// Hit pages in G1, G2 and G3.
fn hits(name: &str, report: &serde_json::Value) -> [u64; 3] {
    let tokens = if name == "conv" { 512 } else { 64 };
    ["g1", "g2", "g3"].map(|tier| number(report, &format!("/tokens/hit_{tier}")) / tokens)
}

/// Replays the inclusive rows with a disk, `share` times as large as G2 or as small. With `both`, each row with a larger
/// and a smaller disk; else in turn.
fn three_tiers_match_the_reference(name: &str, share: u64, both: bool) {
    let Some(rows) = rows(&format!("two_tier_{name}.csv")) else {
        return;
    };
    let mut compared = 0;
    for row in rows.iter().filter(|row| row[3] == "inclusive") {
        let column = |index: usize| row[index].parse::<u64>().expect("a number");
        let (larger, smaller) = (column(2), column(2) / share);
        let sizes = [(smaller, larger), (larger, smaller)];
        let sizes = match both {
            true => &sizes[..],
            false => &sizes[compared % 2..][..1],
        };
        for (g2_pages, g3_pages) in sizes {
            let (g2_pages, g3_pages) = (*g2_pages, *g3_pages);
            let run = Run {
                g1_pages: column(1),
                g2_pages: g2_pages.to_string(),
                ratio: 1,
                policy: "",
            };
            let Some(report) = offline(name, &run, g3_pages) else {
                return;
            };
            let case = format!("{name} {row:?}, G2 {g2_pages}, G3 {g3_pages}");
            let [g1, g2, g3] = hits(name, &report);
            assert_eq!((g1, g2 + g3), (column(4), column(5)), "{case}");
            let counted = number(&report, "/tokens/computed");
            let all = number(&report, "/tokens/prompt");
            let tokens = |tier: &str| number(&report, &format!("/tokens/hit_{tier}"));
            let found = tokens("g1") + tokens("g2") + tokens("g3");
            assert_eq!(found + counted, all, "{case}");
            assert_eq!(number(&report, "/moves/left_out"), 0, "{case}");
            if g3_pages > g2_pages {
                assert!(g3 > 0, "{case}: nothing was read from the disk");
                let written = number(&report, "/moves/written_through_pages");
                assert_eq!(
                    written,
                    column(11),
                    "{case}: each missing page is written once"
                );
            }
            compared += 1;
        }
    }
    assert!(compared >= 2, "only {compared} rows compared");
}

#[test]
fn three_tiers_conversation() {
    three_tiers_match_the_reference("conv", 3, true);
}

#[test]
fn three_tiers_weka40() {
    three_tiers_match_the_reference("weka40", 2, false);
}

/// Blocks of host memory often end inside a cell, where the disk has the same pages.
#[test]
fn a_disk_serves_nothing_while_host_memory_has_every_page() {
    let run = |ratio: &str, model: &[&str], g3_pages: &str| {
        let sizes = ["--g2-pages", "32139", "--g3-pages", g3_pages];
        let mode = ["--mode", "offline", "--sequential", "--ratio", ratio];
        replay(&[&mode[..], &sizes[..], model].concat())
    };
    for (ratio, model) in [
        ("1", &[][..]),
        ("7", &[]),
        ("32", &[]),
        ("32", &["--model", "gemma-like"]),
        ("4", &["--model", "mamba-like"]),
    ] {
        let (without, with) = (run(ratio, model, "0"), run(ratio, model, "112896"));
        let tokens = |report: &serde_json::Value| {
            ["g1", "g2", "g3"].map(|tier| number(report, &format!("/tokens/hit_{tier}")))
        };
        let case = format!("ratio {ratio}, {model:?}");
        assert_eq!(tokens(&with), tokens(&without), "{case}");
        assert_eq!(tokens(&with)[2], 0, "{case}");
        assert!(tokens(&with)[1] > 0, "{case}");
        let (moved, written) = ("/moves/pages", "/moves/written_through_pages");
        assert!(number(&with, written) > 0, "{case}: the disk has pages");
        assert_eq!(number(&with, moved), number(&with, written), "{case}");
    }
}
