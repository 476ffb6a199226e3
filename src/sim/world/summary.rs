//! Many runs, added up.

use std::fmt;

use super::{Counts, Fault, FaultCounts, Outcome};

/// Fewer runs than this may miss a kind of fault by chance.
pub const RUNS_TO_JUDGE: u64 = 200;
/// Violations that are kept with their text.
const KEPT: usize = 32;

/// What came out of many seeds.
#[derive(Debug, Clone, Default)]
pub struct Summary {
    /// Runs.
    pub runs: u64,
    /// Runs in which something happened that must not.
    pub violations: u64,
    /// The first of them: seed and what it was.
    pub failed: Vec<(u64, String)>,
    /// Of everything that happened in all of them, whatever the order of the runs.
    pub digest: u128,
    steps: Vec<u64>,
    counts: Counts,
    faults: FaultCounts,
}

impl Summary {
    /// Adds a run.
    pub fn add(&mut self, outcome: &Outcome) {
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

    /// Kinds of faults that never had an effect, once there were runs enough to judge.
    pub fn toothless(&self) -> Vec<Fault> {
        let idle = self.faults.iter().filter(|(_, _, effect)| *effect == 0);
        let idle = idle.filter(|_| self.runs >= RUNS_TO_JUDGE);
        idle.map(|(fault, ..)| fault).collect()
    }

    /// Steps of the run in the middle.
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
