//! Whether two lists of values differ by more than the noise.
//!
//! Other programs only ever slow a run down. So a side's value is its fastest run, and its noise is how far apart the
//! fastest of three runs and the fastest of the three others can be: runs of one program, which nothing else tells apart.

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
    let noise = floor.max(between_halves(base) + between_halves(tree));
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

/// The largest share by which the least values of two halves can differ: if one half has all of the lower ones.
fn between_halves(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    match (values.first(), values.get(values.len() / 2)) {
        (Some(low), Some(high)) if *low > 0.0 => high / low - 1.0,
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::measures::Unit;
    use crate::compare::{COUNTS, RUNS};

    /// Values around `center`: each is drawn from a normal distribution with the deviation `spread`, and every eighth is
    /// hit by another program and takes up to twice as long.
    fn runs(rng: &mut fastrand::Rng, center: f64, spread: f64, count: usize) -> Vec<f64> {
        let value = |rng: &mut fastrand::Rng| {
            let normal = (0..12).map(|_| rng.f64()).sum::<f64>() - 6.0;
            let hit = if rng.u8(0..8) == 0 {
                1.0 + rng.f64()
            } else {
                1.0
            };
            center * (1.0 + spread * normal) * hit
        };
        (0..count).map(|_| value(rng)).collect()
    }

    fn verdicts(factor: f64, spread: f64) -> [usize; 3] {
        let mut rng = fastrand::Rng::with_seed(1);
        let mut counts = [0; 3];
        for _ in 0..10_000 {
            let base = runs(&mut rng, 20.0, spread, RUNS);
            let tree = runs(&mut rng, 20.0 * factor, spread, RUNS);
            counts[compare(&base, &tree, Unit::Us.floor()).verdict as usize] += 1;
        }
        counts
    }

    #[test]
    fn equal_times_are_the_same() {
        // False verdicts of 10,000. A table has 20 times.
        for (spread, most) in [(0.0, 0), (0.02, 2), (0.05, 20), (0.3, 300)] {
            let [less, _, more] = verdicts(1.0, spread);
            assert!(less + more <= most, "{spread}: {less} less, {more} more");
        }
    }

    #[test]
    fn a_time_that_takes_30_percent_more_is_found() {
        for (spread, least) in [(0.02, 9_500), (0.05, 8_500)] {
            let [_, _, more] = verdicts(1.3, spread);
            let [less, _, _] = verdicts(1.0 / 1.3, spread);
            assert!(more >= least && less >= least, "{spread}: {less}, {more}");
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
