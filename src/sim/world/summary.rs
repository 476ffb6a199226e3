//! The totals of many runs.

use std::fmt;

use super::{Counts, Fault, FaultCounts, SimOutcome};

/// Runs from which on every kind of fault is expected to have had an effect: fewer may miss one by chance.
pub const RUNS_MIN: u64 = 200;
/// Most violations that are kept with their text.
const KEPT: usize = 32;

/// The totals of runs of many seeds.
#[derive(Debug, Clone, Default)]
pub struct Summary {
    /// Number of runs.
    pub runs: u64,
    /// Runs with a violated invariant.
    pub violations: u64,
    /// Seed and violation of at most 32 of these runs.
    pub failed: Vec<(u64, String)>,
    /// Digest of all runs, independent of their order.
    pub digest: u128,
    steps: Vec<u64>,
    counts: Counts,
    faults: FaultCounts,
}

impl Summary {
    /// Adds a run.
    pub fn add(&mut self, outcome: &SimOutcome) {
        self.runs += 1;
        self.digest = self.digest.wrapping_add(outcome.digest);
        self.steps.push(outcome.counts.steps);
        self.counts.add(&outcome.counts);
        self.faults.add(&outcome.faults);
        if let Some(what) = &outcome.violation {
            self.violations += 1;
            if self.failed.len() < KEPT {
                self.failed.push((outcome.seed, what.clone()));
            }
        }
    }

    /// Adds other runs.
    pub fn merge(&mut self, other: Self) {
        self.runs += other.runs;
        self.digest = self.digest.wrapping_add(other.digest);
        self.violations += other.violations;
        self.failed.extend(other.failed);
        self.failed.sort();
        self.failed.truncate(KEPT);
        self.steps.extend(other.steps);
        self.counts.add(&other.counts);
        self.faults.add(&other.faults);
    }

    /// The sums of the counts.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Kinds of faults that never had an effect. Empty before [`RUNS_MIN`] runs.
    pub fn toothless(&self) -> Vec<Fault> {
        let idle = self.faults.iter().filter(|(_, _, effect)| *effect == 0);
        let idle = idle.filter(|_| self.runs >= RUNS_MIN);
        idle.map(|(fault, ..)| fault).collect()
    }

    /// Median number of steps of a run; 0 without runs.
    pub fn median_steps(&self) -> u64 {
        let mut steps = self.steps.clone();
        let middle = steps.len() / 2;
        match steps.is_empty() {
            true => 0,
            false => *steps.select_nth_unstable(middle).1,
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} runs, {} with violations; median {} steps; digest {:032x}",
            self.runs,
            self.violations,
            self.median_steps(),
            self.digest
        )?;
        for (name, count) in self.counts.by_name() {
            writeln!(f, "  {name:<32} {count:>14}")?;
        }
        writeln!(
            f,
            "  {:<32} {:>14} {:>14}",
            "fault", "injected", "took effect"
        )?;
        for (fault, injected, effect) in self.faults.iter() {
            writeln!(f, "  {:<32} {injected:>14} {effect:>14}", fault.name())?;
        }
        Ok(())
    }
}
