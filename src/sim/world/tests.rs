//! Tests of the world: determinism, random seeds, seeds that failed before, and lies.

use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use kvferry_types::{EngineId, GroupId, Part, Request, RequestId, SlotId};

/// Steps of the short runs.
const SHORT: u64 = 2000;

fn print(text: &str) {
    writeln!(std::io::stderr(), "{text}").expect("standard error");
}

#[test]
fn one_seed_determines_one_run() {
    for seed in 0..20 {
        let (first, second) = (run(seed, SHORT), run(seed, SHORT));
        assert_eq!(first.digest, second.digest, "seed {seed}");
        assert_eq!(first.counts, second.counts);
        assert_eq!(first.faults, second.faults);
    }
}

#[test]
fn two_seeds_give_two_runs() {
    assert_ne!(run(1, SHORT).digest, run(2, SHORT).digest);
}

#[test]
fn a_thousand_short_worlds_hold() {
    let mut summary = Summary::default();
    (0..1000).for_each(|seed| summary.add(&run(seed, SHORT)));
    print(&format!("{summary}"));
    assert!(summary.failed.is_empty(), "{:?}", summary.failed);
    assert_eq!(summary.toothless(), [], "these faults never had an effect");
    for (count, least, most) in WORK {
        let (count, value) = count(summary.counts());
        assert!(
            (least..=most).contains(&value),
            "{count}: {value}, not {least} to {most}"
        );
    }
}

type Share = fn(&Counts) -> (&'static str, u64);

/// Bounds for the work of the thousand worlds, about a quarter from what they do today. No invariant is violated when
/// resets are never confirmed, or when the ends of copies are never reported and their workers restart, so the counts
/// are checked, too. Few worlds recover pages, move pages up or decline them, so that these counts depend on the seeds most
/// of all.
const WORK: [(Share, u64, u64); 16] = [
    (
        |of| ("prompts served, per cent", of.served * 100 / of.prompts),
        90,
        100,
    ),
    (|of| ("requests given up", of.given_up), 0, 5_400),
    (|of| ("resets confirmed", of.resets), 120, u64::MAX),
    (|of| ("copies started", of.copies), 28_800, u64::MAX),
    (|of| ("pages loaded", of.hit_pages), 5_600, u64::MAX),
    (
        |of| ("pages of several groups loaded", of.group_hit_pages),
        1_180,
        u64::MAX,
    ),
    (
        |of| ("pages recovered", of.recovered_pages),
        2_100,
        u64::MAX,
    ),
    (
        |of| ("tokens kept out by the cost gate", of.declined_tokens),
        2_000,
        u64::MAX,
    ),
    (|of| ("pages moved down", of.pages_down), 7_500, u64::MAX),
    (|of| ("pages moved up", of.pages_up), 340, u64::MAX),
    (
        |of| ("pages found on disks", of.disk_pages_found),
        530,
        u64::MAX,
    ),
    (
        |of| {
            (
                "listed pages of disks without their content",
                of.disk_pages_lost,
            )
        },
        50,
        u64::MAX,
    ),
    (|of| ("disks that grew again", of.disks_grown), 8, u64::MAX),
    (|of| ("flushes of disks", of.flushes), 100, u64::MAX),
    (|of| ("workers fenced", of.fenced), 0, 450),
    (
        |of| {
            (
                "refusals for each 100 answers",
                of.refusals * 100 / of.answers,
            )
        },
        0,
        80,
    ),
];

#[test]
fn seeds_that_failed_once_pass() {
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

/// Steps of each run that looks for a lie.
const LIE_STEPS: u64 = 4000;
/// Most seeds that are tried for a lie.
const LIE_SEEDS: u64 = 3000;

/// Runs seeds with a lie on two threads until `enough` of them have found it. Returns the seeds that found it, and how
/// many were tried.
fn hunt(lie: Lie, enough: usize) -> (Vec<u64>, u64) {
    let next = AtomicU64::new(0);
    let found = Mutex::new(Vec::new());
    let work = || {
        while found.lock().expect("no panic").len() < enough {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= LIE_SEEDS {
                return;
            }
            let outcome = std::panic::catch_unwind(|| run_with(seed, LIE_STEPS, Some(lie)));
            if !outcome.is_ok_and(|outcome| outcome.violation.is_none()) {
                found.lock().expect("no panic").push(seed);
            }
        }
    };
    std::thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(work))));
    let mut found = found.into_inner().expect("no panic");
    found.sort_unstable();
    (found, next.into_inner().min(LIE_SEEDS))
}

#[test]
fn every_lie_is_found() {
    // `KVFERRY_PLANTED` (part of a lie's name, or empty) reports how often each lie is found. Without it, one find is
    // enough.
    let requested = std::env::var("KVFERRY_PLANTED");
    let enough = if requested.is_ok() { 3 } else { 1 };
    let only = requested.unwrap_or_default();
    let all: Vec<_> = Lie::ALL
        .iter()
        .filter(|lie| format!("{lie:?}").contains(&only))
        .map(|lie| (*lie, hunt(*lie, enough)))
        .collect();
    for (lie, (seeds, of)) in &all {
        print(&format!(
            "{lie:?}: found in {} of {of} seeds: {seeds:?}",
            seeds.len()
        ));
    }
    let missed: Vec<Lie> = all
        .iter()
        .filter(|(_, (seeds, _))| seeds.is_empty())
        .map(|(lie, _)| *lie)
        .collect();
    print(&format!(
        "{} of {} lies found",
        all.len() - missed.len(),
        all.len()
    ));
    assert_eq!(missed, []);
}

/// Passes a store with 10 ms to its deadline to the checker.
fn deliver(oracle: &mut oracle::Oracle, engine: EngineId, all_clear: bool) {
    let request = Request::Store {
        slot: SlotId(1),
        parts: vec![Part::new(GroupId(0), 0, kvferry_types::PageList::default())],
        more: None,
        after: RequestId(0),
    };
    let question = oracle::ArrivedRequest {
        left: Duration::from_millis(10),
        all_clear,
        request: &request,
    };
    oracle.arrived(Time(0), Epoch(1), engine, RequestId(1), &question);
}

#[test]
fn the_checker_expects_an_answer_to_a_parked_request_only_while_its_connection_lasts() {
    let engine = EngineId([7; 16]);
    let long = Duration::from_secs(60);
    for (all_clear, breaks, late) in [
        (false, false, true),
        (false, true, false),
        (true, false, true),
        (true, true, true),
    ] {
        let mut oracle = oracle::Oracle::new(Duration::from_millis(50));
        deliver(&mut oracle, engine, all_clear);
        if breaks {
            oracle.went(Epoch(1), engine, Time(1));
        }
        let found = oracle.passed(Epoch(1), long).is_some();
        assert_eq!(
            found, late,
            "all clear: {all_clear}, connection broke: {breaks}"
        );
    }
}
