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
    let from: u64 = std::env::var("FROM")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(0);
    let to: u64 = std::env::var("TO")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(100);
    let steps: u64 = std::env::var("STEPS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(2000);
    if std::env::var_os("TRACE").is_some() {
        let print = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::TRACE)
            .without_time();
        print
            .with_writer(std::io::stderr)
            .with_ansi(false)
            .with_target(false)
            .init();
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

#[test]
#[ignore = "by hand"]
fn plants() {
    use crate::core::sabotage::{Bug, plant};
    let number = |name: &str, or: u64| {
        std::env::var(name)
            .ok()
            .and_then(|n| n.parse().ok())
            .unwrap_or(or)
    };
    let (to, steps) = (number("TO", 100), number("STEPS", 3000));
    std::panic::set_hook(Box::new(|_| {}));
    let only = std::env::var("BUG").unwrap_or_default();
    for bug in Bug::ALL
        .iter()
        .filter(|bug| format!("{bug:?}").contains(&only))
    {
        let begun = std::time::Instant::now();
        let mut found = Vec::new();
        for seed in 0..to {
            plant(Some(*bug));
            let outcome = std::panic::catch_unwind(|| run(seed, steps));
            plant(None);
            match outcome {
                Ok(outcome) => found.extend(outcome.violation.map(|what| (seed, what))),
                Err(_) => found.push((seed, "panic".to_owned())),
            }
        }
        let first = found
            .first()
            .map(|(seed, what)| format!("{seed}: {}", &what[..what.len().min(150)]));
        eprintln!(
            "{bug:?}: {} of {to}, {:?}; {first:?}",
            found.len(),
            begun.elapsed()
        );
    }
}
