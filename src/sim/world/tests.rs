//! The world itself, and what it finds.

use super::*;

#[test]
fn one_seed_is_one_story() {
    for seed in 0..20 {
        let (first, second) = (run(seed, 1500), run(seed, 1500));
        assert_eq!(first.digest, second.digest, "seed {seed}");
        assert_eq!(first.counts, second.counts);
        assert_eq!(first.faults, second.faults);
    }
}

#[test]
#[ignore = "by hand"]
fn look() {
    let from: u64 = std::env::var("FROM").ok().and_then(|n| n.parse().ok()).unwrap_or(0);
    let to: u64 = std::env::var("TO").ok().and_then(|n| n.parse().ok()).unwrap_or(100);
    let steps: u64 = std::env::var("STEPS").ok().and_then(|n| n.parse().ok()).unwrap_or(2000);
    if std::env::var_os("TRACE").is_some() {
        let print = tracing_subscriber::fmt().with_max_level(tracing::Level::TRACE).without_time();
        print.with_writer(std::io::stderr).with_ansi(false).with_target(false).init();
    }
    let begun = std::time::Instant::now();
    let mut faults = FaultCounts::default();
    for seed in from..to {
        let outcome = run(seed, steps);
        faults.add(&outcome.faults);
        if let Some(violation) = &outcome.violation {
            eprintln!("seed {seed} after {}: {violation}", outcome.counts.steps);
        }
        if std::env::var_os("ALL").is_some() {
            eprintln!("{seed} {:?}", outcome.counts);
        }
    }
    for (fault, injected, effect) in faults.iter() {
        eprintln!("{fault}: {injected} {effect}");
    }
    eprintln!("{:?}", begun.elapsed());
}
