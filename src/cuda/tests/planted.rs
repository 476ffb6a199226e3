//! Finds every planted bug, and the seed that finds it.

use std::time::Duration;

use super::copies::one_seed;
use super::world::Ways;
use super::{errors, fake, neighbour};
use crate::cuda::sabotage::{Bug, plant};

/// Seeds that are tried for each bug.
const SEEDS: u64 = 200;
/// Variable with the bug that a process has.
const BUG: &str = "FAKE_CUDA_BUG";

/// Runs seeds from 0 on until one fails, which ends the process; the last seed that was printed is the one.
fn hunt(bug: Bug) {
    plant(bug);
    match bug {
        Bug::StaleMapping => return neighbour::seeds(SEEDS),
        Bug::CountRefused => return errors::tell(Ways::default()),
        _ => {}
    }
    for seed in 0..SEEDS {
        // On a line of its own, because the harness leaves one open.
        println!("\nseed {seed}");
        one_seed(seed);
    }
}

/// The seed that failed, or the last one if the driver reported the error only at the end of the process.
fn found_by(bug: Bug) -> Option<u64> {
    let reports = tempfile::tempdir().expect("a folder");
    let report = reports.path().display();
    let folder = fake::folder(&fake::library());
    let name = format!("{bug:?}");
    if bug == Bug::CountRefused {
        // A seed is the number of the copy that is refused; each runs in a process of its own.
        return (0..SEEDS).find(|seed| {
            let settings = format!("delay_us=50;fail=*/cuMemcpyAsync/{}/1", seed + 1);
            let output = fake::again_with(folder.path(), &settings, &[(BUG, &name)], LIMIT);
            !output.status.success()
        });
    }
    let with_report = format!("seed=1;delay_us=300;granule_kib=4;report={report}");
    let output = fake::again_with(folder.path(), &with_report, &[(BUG, &name)], LIMIT);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let clean = output.status.success() && fake::only_file(reports.path()).contains("poison=0");
    let mut seeds = said.lines().filter_map(|line| line.strip_prefix("seed "));
    let last = seeds.next_back()?.parse().ok();
    if clean { None } else { last }
}

/// A bug may also show as a test that does not end.
const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn every_planted_bug_is_found() {
    if fake::is_inside() {
        let name = std::env::var(BUG).expect("which bug");
        let bug = Bug::ALL.iter().find(|bug| format!("{bug:?}") == name);
        hunt(*bug.expect("a known bug"));
        return;
    }
    let mut missed = Vec::new();
    for bug in Bug::ALL {
        match found_by(*bug) {
            Some(seed) => println!("{bug:?}: found by seed {seed}"),
            None => missed.push(bug),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}
