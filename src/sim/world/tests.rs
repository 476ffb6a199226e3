//! The world itself, and what it finds.

use std::io::Write;

use super::*;
use crate::core::sabotage::{Bug, plant};

/// Steps of the short runs.
const SHORT: u64 = 2000;

fn tell(text: &str) {
    writeln!(std::io::stderr(), "{text}").expect("standard error");
}

#[test]
fn one_seed_is_one_story() {
    for seed in 0..20 {
        let (first, second) = (run(seed, SHORT), run(seed, SHORT));
        assert_eq!(first.digest, second.digest, "seed {seed}");
        assert_eq!(first.counts, second.counts);
        assert_eq!(first.faults, second.faults);
    }
}

#[test]
fn two_seeds_are_two_stories() {
    assert_ne!(run(1, SHORT).digest, run(2, SHORT).digest);
}

#[test]
fn a_thousand_short_worlds_hold() {
    let mut summary = Summary::default();
    (0..1000).for_each(|seed| summary.add(&run(seed, SHORT)));
    tell(&format!("{summary}"));
    assert!(summary.failed.is_empty(), "{:?}", summary.failed);
    assert_eq!(summary.toothless(), [], "these faults never had an effect");
}

#[test]
fn what_failed_once_does_not_fail_again() {
    let corpus = include_str!("../../../tests/seeds.txt");
    let lines = corpus
        .lines()
        .filter(|line| !line.starts_with('#') && !line.is_empty());
    for line in lines {
        let mut words = line.split(' ').map(str::parse);
        let (Some(Ok(seed)), Some(Ok(steps))) = (words.next(), words.next()) else {
            panic!("tests/seeds.txt: {line}: seed, steps, text");
        };
        let outcome = run(seed, steps);
        assert_eq!(outcome.violation, None, "seed {seed}, {steps} steps");
    }
}

/// Steps in which a planted bug is looked for.
const PLANTED_STEPS: u64 = 4000;
/// Seeds in which it is looked for, at most.
const PLANTED_SEEDS: u64 = 3000;
/// So many seeds that find it are enough.
const PLANTED_ENOUGH: usize = 3;

fn hunt(bug: Bug) -> (Vec<u64>, u64) {
    let mut found = Vec::new();
    for seed in 0..PLANTED_SEEDS {
        plant(Some(bug));
        let outcome = std::panic::catch_unwind(|| run(seed, PLANTED_STEPS));
        plant(None);
        if !outcome.is_ok_and(|outcome| outcome.violation.is_none()) {
            found.push(seed);
        }
        if found.len() >= PLANTED_ENOUGH {
            return (found, seed + 1);
        }
    }
    (found, PLANTED_SEEDS)
}

#[test]
fn every_planted_bug_is_found() {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let only = std::env::var("KVFERRY_PLANTED").unwrap_or_default();
    let bugs: Vec<Bug> = Bug::ALL
        .iter()
        .copied()
        .filter(|bug| format!("{bug:?}").contains(&only))
        .collect();
    let work = || {
        let mut found = Vec::new();
        while let Some(bug) = bugs.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
            found.push((*bug, hunt(*bug)));
        }
        found
    };
    let mut all: Vec<_> = std::thread::scope(|scope| {
        let hunters: Vec<_> = (0..2).map(|_| scope.spawn(work)).collect();
        hunters
            .into_iter()
            .flat_map(|hunter| hunter.join().expect("no panic"))
            .collect()
    });
    all.sort();
    for (bug, (seeds, of)) in &all {
        tell(&format!(
            "{bug:?}: found in {} of {of} seeds: {seeds:?}",
            seeds.len()
        ));
    }
    let missed: Vec<Bug> = all
        .iter()
        .filter(|(_, (seeds, _))| seeds.is_empty())
        .map(|(bug, _)| *bug)
        .collect();
    tell(&format!(
        "{} of {} planted bugs found",
        all.len() - missed.len(),
        all.len()
    ));
    assert_eq!(missed, []);
}
