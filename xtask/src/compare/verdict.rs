//! Whether two lists of values differ by more than the noise.
//!
//! Other programs only ever slow a run down. So a side's value is its fastest run, and its noise is how far apart the
//! fastest of three runs and the fastest of the three others can be: runs of one program, which nothing else tells apart.
//! With more than six runs: the fastest of one half and that of the other, up to a chance of 4 in 100.

/// How the tree compares with the base.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Compared {
    /// The tree's least value, divided by the base's.
    pub(super) ratio: f64,
    /// By how much equal programs may differ, as a share.
    pub(super) noise: f64,
    pub(super) verdict: Verdict,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Less,
    Same,
    More,
}

/// Compares the values of both sides. They are the same if their least values differ by no more than the noise of both
/// sides together, or by no more than `floor`.
pub(super) fn compare(base: &[f64], tree: &[f64], floor: f64) -> Compared {
    let ratio = least(tree) / least(base);
    let noise = floor.max(noise(base, tree));
    let verdict = match ratio {
        _ if ratio > 1.0 + noise => Verdict::More,
        _ if ratio < 1.0 / (1.0 + noise) => Verdict::Less,
        _ => Verdict::Same,
    };
    Compared {
        ratio,
        noise,
        verdict,
    }
}

/// The least value; 0 without any.
pub(super) fn least(values: &[f64]) -> f64 {
    values.iter().copied().min_by(f64::total_cmp).unwrap_or(0.0)
}

/// The share by which the least values of both sides may differ though their programs are equal.
pub(super) fn noise(base: &[f64], tree: &[f64]) -> f64 {
    between_halves(base) + between_halves(tree)
}

/// The share by which the least values of two halves can differ: if one half has all of the lower ones. Of 24 values, the
/// lowest five are in one half with a chance of 4 %, so that more than those are not looked at.
fn between_halves(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    match (values.first(), values.get((values.len() / 2).min(4))) {
        (Some(low), Some(high)) if *low > 0.0 => high / low - 1.0,
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::measures::Unit;
    use crate::compare::{COUNTS, RUNS, in_turn};

    /// How the runs of a machine differ.
    #[derive(Clone, Copy)]
    struct Machine {
        /// The deviation of the normal distribution of times.
        spread: f64,
        /// One run in so many is hit by another program and takes up to twice as long.
        hit: u8,
    }

    impl Machine {
        fn time(self, rng: &mut fastrand::Rng, center: f64) -> f64 {
            let normal = (0..12).map(|_| rng.f64()).sum::<f64>() - 6.0;
            let is_hit = rng.u8(0..self.hit) == 0;
            let factor = if is_hit { 1.0 + rng.f64() } else { 1.0 };
            center * (1.0 + self.spread * normal) * factor
        }

        /// Verdicts of 10,000 comparisons of programs, of which the tree's takes `factor` times as long.
        fn verdicts(self, factor: f64) -> [usize; 3] {
            let mut rng = fastrand::Rng::with_seed(1);
            let mut counts = [0; 3];
            let floor = Unit::Us.floor();
            for _ in 0..10_000 {
                let run = |side: usize| Ok(self.time(&mut rng, [20.0, 20.0 * factor][side]));
                let runs = in_turn(RUNS, run, |runs| match runs {
                    [Ok(base), Ok(tree)] => noise(base, tree) <= floor,
                    _ => true,
                });
                let [base, tree] = runs.map(|runs| runs.expect("a run fails never"));
                counts[compare(&base, &tree, floor).verdict as usize] += 1;
            }
            counts
        }
    }

    #[test]
    fn equal_times_are_the_same() {
        // False verdicts of 10,000. A table has 20 times.
        let machines = [
            (0.0, 8, 0),
            (0.02, 8, 2),
            (0.05, 8, 20),
            (0.05, 2, 20),
            (0.3, 8, 300),
        ];
        for (spread, hit, most) in machines {
            let [less, _, more] = Machine { spread, hit }.verdicts(1.0);
            assert!(
                less + more <= most,
                "{spread} {hit}: {less} less, {more} more"
            );
        }
    }

    #[test]
    fn a_time_that_takes_30_percent_more_is_found() {
        for (spread, hit, least) in [(0.02, 8, 9_900), (0.05, 8, 9_000), (0.02, 2, 9_900)] {
            let machine = Machine { spread, hit };
            let ([_, _, more], [less, _, _]) = (machine.verdicts(1.3), machine.verdicts(1.0 / 1.3));
            assert!(
                more >= least && less >= least,
                "{spread} {hit}: {less}, {more}"
            );
        }
    }

    #[test]
    fn five_percent_more_instructions_are_found_and_none_between_equal_programs() {
        let floor = Unit::Instructions.floor();
        let counts = |center: f64| [center, center * 1.004][..COUNTS].to_vec();
        let verdict = |base, tree| compare(&counts(base), &counts(tree), floor).verdict;
        assert_eq!(verdict(50_000.0, 52_500.0), Verdict::More);
        assert_eq!(verdict(52_500.0, 50_000.0), Verdict::Less);
        assert_eq!(verdict(50_000.0, 50_000.0), Verdict::Same);
        assert_eq!(verdict(50_000.0, 50_500.0), Verdict::Same);
    }

    #[test]
    fn the_noise_is_what_three_runs_of_each_side_differ_by() {
        let base = [14.0, 10.0, 14.0, 10.0, 14.0, 10.0];
        let compared = compare(&base, &[13.9; 6], 0.1);
        assert!((compared.noise - 0.4).abs() < 1e-9, "{compared:?}");
        assert_eq!(compared.verdict, Verdict::Same);
        assert_eq!(compare(&base, &[14.1; 6], 0.1).verdict, Verdict::More);
    }
}
