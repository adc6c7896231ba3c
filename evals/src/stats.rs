//! The statistics that scores and verdicts rest on: estimates with intervals, paired and nested comparisons, pass@k, power. An empty
//! sample or a NaN is an error here, never a zero. No decisions: what an interval means for a candidate is the judge's matter.

use hone_runs::{Class, Failure, Result};
use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, Normal, StudentsT};

/// From `low` to `high`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// A mean with what is known of its error.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// The estimate.
    pub mean: f64,
    /// Its standard error.
    pub standard_error: f64,
    /// How many units it rests on.
    pub n: usize,
    /// Holds the true value in the asked share of cases.
    pub interval: Interval,
}

/// A t-test of a mean.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TTest {
    /// The mean with its two-sided interval.
    pub estimate: Estimate,
    /// Degrees of freedom.
    pub df: f64,
    /// (mean − null) / standard error. Infinite where all values are equal and not the null.
    pub t: f64,
    /// Chance of a t this far out on either side under the null.
    pub p_two_sided: f64,
    /// Chance of a t this high or higher under the null: small when the mean is greater.
    pub p_greater: f64,
}

/// Values nested in groups, such as items in training seeds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Nested {
    /// The mean of the groups' means; its error is that between groups, with groups − 1 degrees of freedom.
    pub estimate: Estimate,
    /// Variance of the groups' true means (0 where the groups differ no more than their items would make them).
    pub between: f64,
    /// Pooled variance within groups.
    pub within: f64,
}

/// The arithmetic mean.
///
/// # Errors
/// When there is none, or a value is not finite.
pub fn mean(values: &[f64]) -> Result<f64> {
    check(values, 1)?;
    Ok(values.iter().sum::<f64>() / values.len() as f64)
}

/// The unbiased variance (n − 1 below).
///
/// # Errors
/// With fewer than two values, or one that is not finite.
pub fn variance(values: &[f64]) -> Result<f64> {
    check(values, 2)?;
    let mean = mean(values)?;
    Ok(values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (values.len() - 1) as f64)
}

/// Standard error of the mean.
///
/// # Errors
/// As [`variance`].
pub fn standard_error(values: &[f64]) -> Result<f64> {
    Ok((variance(values)? / values.len() as f64).sqrt())
}

/// Wilson's score interval of a proportion (Wilson, 1927): `successes` of `n`, either of which may be fractional.
///
/// # Errors
/// When n is not above 0, or the successes are not within 0..=n.
pub fn wilson(successes: f64, n: f64, level: f64) -> Result<Interval> {
    let z = normal_quantile(0.5 + check_level(level)? / 2.0);
    if !(n > 0.0 && (0.0..=n).contains(&successes)) {
        return Err(Failure::new(Class::Other, format!("{successes} of {n} is no proportion.")));
    }
    let p = successes / n;
    let center = (p + z * z / (2.0 * n)) / (1.0 + z * z / n);
    let half = z / (1.0 + z * z / n) * (p * (1.0 - p) / n + z * z / (4.0 * n * n)).sqrt();
    // At 0 and 1 the closed form gives the ends exactly; rounding must not push them past.
    let low = if successes == 0.0 { 0.0 } else { (center - half).max(0.0) };
    let high = if successes == n { 1.0 } else { (center + half).min(1.0) };
    Ok(Interval { low, high })
}

/// The mean of scores in 0..=1, one an item, each itself the mean over `samples` completions of that item. Completions of one item
/// are not independent, so the standard error is the one between items; the interval is Wilson's at the effective sample size
/// p(1 − p)/SE² (as Korn and Graubard, 1998, do for surveys), between the number of items and that of completions. Unlike mean ± 1.96 SE
/// it stays in 0..=1, and is not of zero width where every item is right.
///
/// # Errors
/// With fewer than two items, or a score that is not in 0..=1.
pub fn mean_score(scores: &[f64], samples: usize, level: f64) -> Result<Estimate> {
    let standard_error = standard_error(scores)?;
    if let Some(bad) = scores.iter().find(|x| !(0.0..=1.0).contains(*x)) {
        return Err(Failure::new(Class::Candidate, format!("The score {bad} is not in 0..=1.")));
    }
    let (p, n) = (mean(scores)?, scores.len() as f64);
    let effective = if standard_error > 0.0 { p * (1.0 - p) / standard_error.powi(2) } else { n };
    let effective = effective.clamp(n, n * samples.max(1) as f64);
    let interval = wilson((p * effective).min(effective), effective, level)?;
    Ok(Estimate { mean: p, standard_error, n: scores.len(), interval })
}

/// The mean with Student's t interval: for replicates, of which there are few.
///
/// # Errors
/// As [`variance`].
pub fn t_mean(values: &[f64], level: f64) -> Result<Estimate> {
    let (mean, standard_error) = (mean(values)?, standard_error(values)?);
    t_estimate(mean, standard_error, values.len(), level)
}

/// Tests whether the mean of `values` is `null`.
///
/// # Errors
/// As [`variance`].
pub fn t_test(values: &[f64], null: f64, level: f64) -> Result<TTest> {
    let estimate = t_mean(values, level)?;
    let df = (values.len() - 1) as f64;
    let difference = estimate.mean - null;
    // Equal values leave no doubt about a difference, and none about its absence.
    let t = if difference == 0.0 { 0.0 } else { difference / estimate.standard_error };
    let below = if t.is_infinite() { if t > 0.0 { 1.0 } else { 0.0 } } else { students_t(df)?.cdf(t) };
    let above = if t.is_infinite() { 1.0 - below } else { students_t(df)?.sf(t) };
    Ok(TTest { estimate, df, t, p_two_sided: (2.0 * below.min(above)).min(1.0), p_greater: above })
}

/// Tests whether `a` is better than `b` pair by pair (the same seed, the same item): a t-test of the differences a − b.
///
/// # Errors
/// When the lengths differ, and as [`variance`].
pub fn paired(a: &[f64], b: &[f64], level: f64) -> Result<TTest> {
    if a.len() != b.len() {
        return Err(Failure::new(Class::Other, format!("{} values cannot be paired with {}.", a.len(), b.len())));
    }
    let differences: Vec<f64> = a.iter().zip(b).map(|(a, b)| a - b).collect();
    t_test(&differences, 0.0, level)
}

/// The mean of values nested in groups. The group is the unit of inference: more items in a group do not make up for few groups.
///
/// # Errors
/// With fewer than two groups, an empty one, or a value that is not finite.
pub fn nested(groups: &[Vec<f64>], level: f64) -> Result<Nested> {
    let means = groups.iter().map(|group| mean(group)).collect::<Result<Vec<_>>>()?;
    let estimate = t_mean(&means, level)?;
    let free: usize = groups.iter().map(|group| group.len() - 1).sum();
    let squares: f64 =
        groups.iter().zip(&means).flat_map(|(group, mean)| group.iter().map(move |x| (x - mean).powi(2))).sum();
    let within = if free > 0 { squares / free as f64 } else { 0.0 };
    // Each group's mean carries the error of its own items: within / its size, on average within / harmonic mean of the sizes.
    let share = groups.iter().map(|group| 1.0 / group.len() as f64).sum::<f64>() / groups.len() as f64;
    let between = (variance(&means)? - within * share).max(0.0);
    Ok(Nested { estimate, between, within })
}

/// Σ numerators / Σ denominators, such as loss a token over passages of unequal length; error by linearisation over the units.
///
/// # Errors
/// With fewer than two units, unequal lengths, values that are not finite, or denominators that come to nothing.
pub fn ratio(numerators: &[f64], denominators: &[f64], level: f64) -> Result<Estimate> {
    check(numerators, 2)?;
    check(denominators, 2)?;
    let (over, under): (f64, f64) = (numerators.iter().sum(), denominators.iter().sum());
    if numerators.len() != denominators.len() || under <= 0.0 {
        return Err(Failure::new(Class::Other, "These values make no ratio."));
    }
    let (ratio, n) = (over / under, numerators.len() as f64);
    let squares: f64 = numerators.iter().zip(denominators).map(|(y, x)| (y - ratio * x).powi(2)).sum();
    t_estimate(ratio, (n / (n - 1.0) * squares).sqrt() / under, numerators.len(), level)
}

/// The unbiased estimate of pass@k from n samples of which c are right (Chen et al., 2021, arXiv:2107.03374):
/// 1 − C(n − c, k) / C(n, k), the chance that k of the samples hold a right one.
///
/// # Errors
/// Unless c ≤ n and 1 ≤ k ≤ n.
pub fn pass_at_k(n: usize, c: usize, k: usize) -> Result<f64> {
    if c > n || k == 0 || k > n {
        return Err(Failure::new(Class::Other, format!("pass@{k} cannot be told from {c} right of {n} samples.")));
    }
    if n - c < k {
        return Ok(1.0);
    }
    // As a product, which neither overflows nor cancels.
    Ok(1.0 - (n - c + 1..=n).map(|i| 1.0 - k as f64 / i as f64).product::<f64>())
}

/// The smallest mean difference that a two-sided t-test at `alpha` finds with probability `power` in `n` pairs whose differences have
/// the standard deviation `sd`: (t₁₋α⸝₂ + t_power) · sd / √n, a close approximation of the exact noncentral t.
///
/// # Errors
/// With fewer than two pairs, or parameters out of range.
pub fn detectable(sd: f64, n: usize, alpha: f64, power: f64) -> Result<f64> {
    check_power(alpha, power)?;
    if n < 2 || !(sd >= 0.0 && sd.is_finite()) {
        return Err(Failure::new(
            Class::Usage,
            format!("No effect can be told from {n} pairs of standard deviation {sd}."),
        )
        .hint("use at least two replicates"));
    }
    let t = students_t((n - 1) as f64)?;
    Ok((t.inverse_cdf(1.0 - alpha / 2.0) + t.inverse_cdf(power)) * sd / (n as f64).sqrt())
}

/// How many pairs a two-sided t-test at `alpha` needs to find a mean difference of `effect` with probability `power`.
///
/// # Errors
/// When the effect is not above 0 or other parameters are out of range, or more than a million pairs were needed.
pub fn required(sd: f64, effect: f64, alpha: f64, power: f64) -> Result<usize> {
    const MOST: usize = 1_000_000;
    if !(effect > 0.0 && effect.is_finite()) {
        return Err(
            Failure::new(Class::Usage, format!("An effect of {effect} cannot be looked for.")).hint("give one above 0")
        );
    }
    // What is detectable falls as n grows: bisect.
    let (mut few, mut enough) = (1, MOST);
    if detectable(sd, enough, alpha, power)? > effect {
        return Err(Failure::new(
            Class::Usage,
            format!("More than {MOST} pairs are needed to see an effect of {effect}."),
        )
        .hint("look for a larger effect, or make the measure less noisy"));
    }
    while enough - few > 1 {
        let middle = few + (enough - few) / 2;
        if detectable(sd, middle, alpha, power)? <= effect { enough = middle } else { few = middle }
    }
    Ok(enough)
}

/// The smallest difference between two proportions near `p`, over `n` items each, that a two-sided test at `alpha` finds with
/// probability `power`: (z₁₋α⸝₂ + z_power) · √(2p(1 − p)/n). Pairing over the same items can only make it smaller, so it is a bound on
/// what `n` items can show of one pair of checkpoints; the noise between training seeds comes on top.
///
/// # Errors
/// When there are no items, or parameters are out of range.
pub fn detectable_proportion(p: f64, n: usize, alpha: f64, power: f64) -> Result<f64> {
    check_power(alpha, power)?;
    if n == 0 || !(0.0..=1.0).contains(&p) {
        return Err(Failure::new(Class::Usage, format!("A proportion of {p} over {n} items cannot be judged.")));
    }
    Ok((normal_quantile(1.0 - alpha / 2.0) + normal_quantile(power)) * (2.0 * p * (1.0 - p) / n as f64).sqrt())
}

fn t_estimate(mean: f64, standard_error: f64, n: usize, level: f64) -> Result<Estimate> {
    let t = students_t((n - 1) as f64)?.inverse_cdf(0.5 + check_level(level)? / 2.0);
    let half = t * standard_error;
    Ok(Estimate { mean, standard_error, n, interval: Interval { low: mean - half, high: mean + half } })
}

fn check(values: &[f64], least: usize) -> Result<()> {
    if values.len() < least {
        let message = format!("{} values are too few: at least {least} are needed.", values.len());
        return Err(Failure::new(Class::Other, message));
    }
    match values.iter().find(|x| !x.is_finite()) {
        None => Ok(()),
        Some(bad) => Err(Failure::new(Class::Candidate, format!("A value is {bad}."))
            .hint("the run has diverged, or its metric is missing")),
    }
}

fn check_level(level: f64) -> Result<f64> {
    if level > 0.0 && level < 1.0 {
        return Ok(level);
    }
    Err(Failure::new(Class::Usage, format!("A confidence level of {level} is not between 0 and 1."))
        .hint("0.95 is usual"))
}

fn check_power(alpha: f64, power: f64) -> Result<()> {
    if alpha > 0.0 && alpha < 1.0 && power > 0.0 && power < 1.0 {
        return Ok(());
    }
    Err(Failure::new(Class::Usage, format!("alpha {alpha} and power {power} are not both between 0 and 1."))
        .hint("alpha 0.05 and power 0.8 are usual"))
}

fn students_t(df: f64) -> Result<StudentsT> {
    StudentsT::new(0.0, 1.0, df)
        .map_err(|e| Failure::new(Class::Other, format!("Student's t with {df} degrees of freedom: {e}.")))
}

fn normal_quantile(p: f64) -> f64 {
    Normal::standard().inverse_cdf(p)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn close(a: f64, b: f64, tolerance: f64) {
        assert!((a - b).abs() <= tolerance, "{a} is not {b}");
    }

    #[test]
    fn wilson_gives_the_published_values() {
        // 81 of 263: Newcombe (1998), table I, method 3.
        let interval = wilson(81.0, 263.0, 0.95).unwrap();
        close(interval.low, 0.2553, 5e-5);
        close(interval.high, 0.3662, 5e-5);
        // 0 of 20 and 1 of 29, from the same table.
        let none = wilson(0.0, 20.0, 0.95).unwrap();
        assert_eq!(none.low, 0.0);
        close(none.high, 0.1611, 5e-5);
        let one = wilson(1.0, 29.0, 0.95).unwrap();
        close(one.low, 0.0061, 5e-5);
        close(one.high, 0.1718, 5e-5);
        assert_eq!(wilson(20.0, 20.0, 0.95).unwrap().high, 1.0);
    }

    #[test]
    fn intervals_of_scores_know_that_samples_of_an_item_agree() {
        let coins: Vec<f64> = (0..100).map(|i| f64::from(i % 2 == 0)).collect();
        let single = mean_score(&coins, 1, 0.95).unwrap();
        close(single.interval.low, wilson(50.0, 100.0, 0.95).unwrap().low, 1e-12);
        // Eight samples that always agree are no more than one.
        assert_eq!(mean_score(&coins, 8, 0.95).unwrap().interval, single.interval);
        // Eight that are independent of the item are worth eight: every item near its mean.
        let spread: Vec<f64> = (0..100).map(|i| [0.375, 0.5, 0.625, 0.5][i % 4]).collect();
        close(mean_score(&spread, 8, 0.95).unwrap().interval.low, wilson(400.0, 800.0, 0.95).unwrap().low, 1e-12);
        // All right is not certainty.
        let all = mean_score(&[1.0; 20], 4, 0.95).unwrap();
        assert_eq!((all.mean, all.interval.high), (1.0, 1.0));
        close(all.interval.low, wilson(20.0, 20.0, 0.95).unwrap().low, 1e-12);
    }

    #[test]
    fn paired_t_test_gives_students_sleep_data() {
        // Student (1908), extra hours of sleep under two drugs: t = −4.0621, df = 9, p = 0.002833, 95% from −2.4599 to −0.7001.
        let a = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0];
        let b = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4];
        let test = paired(&a, &b, 0.95).unwrap();
        close(test.t, -4.0621, 5e-5);
        assert_eq!(test.df, 9.0);
        close(test.p_two_sided, 0.002833, 5e-7);
        close(test.p_greater, 1.0 - 0.002833 / 2.0, 5e-7);
        close(test.estimate.interval.low, -2.4599, 5e-5);
        close(test.estimate.interval.high, -0.7001, 5e-5);
    }

    #[test]
    fn equal_values_are_certain() {
        let same = t_test(&[0.5, 0.5, 0.5], 0.0, 0.95).unwrap();
        assert_eq!((same.p_greater, same.p_two_sided), (0.0, 0.0));
        let null = paired(&[0.3, 0.4], &[0.3, 0.4], 0.95).unwrap();
        close(null.p_greater, 0.5, 1e-12);
        close(null.p_two_sided, 1.0, 1e-12);
    }

    #[test]
    fn nested_counts_groups_and_not_items() {
        let groups = vec![vec![1.0, 3.0], vec![5.0, 7.0], vec![9.0, 11.0]];
        let found = nested(&groups, 0.95).unwrap();
        assert_eq!((found.estimate.mean, found.estimate.n), (6.0, 3));
        // One-way analysis of variance by hand: within 2, between means 16 − 2/2.
        close(found.within, 2.0, 1e-12);
        close(found.between, 15.0, 1e-12);
        close(found.estimate.standard_error, (16.0f64 / 3.0).sqrt(), 1e-12);
        let doubled: Vec<Vec<f64>> = groups.iter().map(|g| [g.clone(), g.clone()].concat()).collect();
        assert_eq!(nested(&doubled, 0.95).unwrap().estimate, found.estimate);
    }

    #[test]
    fn ratio_weighs_units_by_their_size() {
        // Equal sizes: the mean and its t interval.
        let (loss, tokens) = ([10.0, 20.0, 30.0, 24.0], [10.0; 4]);
        let scaled: Vec<f64> = loss.iter().map(|x| x / 10.0).collect();
        let (found, plain) = (ratio(&loss, &tokens, 0.95).unwrap(), t_mean(&scaled, 0.95).unwrap());
        close(found.mean, plain.mean, 1e-12);
        close(found.standard_error, plain.standard_error, 1e-12);
        close(ratio(&[1.0, 30.0], &[1.0, 10.0], 0.95).unwrap().mean, 31.0 / 11.0, 1e-12);
    }

    #[test]
    fn pass_at_k_is_the_share_of_draws_that_hold_a_right_one() {
        close(pass_at_k(5, 2, 1).unwrap(), 0.4, 1e-12);
        close(pass_at_k(5, 2, 3).unwrap(), 1.0 - 1.0 / 10.0, 1e-12);
        close(pass_at_k(10, 3, 5).unwrap(), 1.0 - 21.0 / 252.0, 1e-12);
        assert_eq!(pass_at_k(5, 0, 5).unwrap(), 0.0);
        assert_eq!(pass_at_k(5, 3, 3).unwrap(), 1.0);
        assert_eq!(pass_at_k(1000, 0, 1000).unwrap(), 0.0);
        assert!(pass_at_k(5, 6, 1).is_err() && pass_at_k(5, 2, 6).is_err() && pass_at_k(5, 2, 0).is_err());
    }

    #[test]
    fn power_gives_the_sample_sizes_of_the_tables() {
        // Paired t-test, two-sided 0.05, power 0.8 (Cohen's d small, medium, large; G*Power): 199, 34, 15.
        for (effect, n) in [(0.2, 199), (0.5, 34), (0.8, 15)] {
            assert_eq!(required(1.0, effect, 0.05, 0.8).unwrap(), n);
        }
        close(detectable(2.0, 34, 0.05, 0.8).unwrap(), 0.9904, 1e-3);
        // (1.96 + 0.8416) · √(2 · 0.25 / 400).
        close(detectable_proportion(0.5, 400, 0.05, 0.8).unwrap(), 0.09905, 1e-4);
        assert!(
            required(1.0, 1e-9, 0.05, 0.8).is_err()
                && required(1.0, 0.0, 0.05, 0.8).is_err()
                && detectable(1.0, 1, 0.05, 0.8).is_err()
        );
    }

    #[test]
    fn empty_and_nan_are_errors() {
        assert!(mean(&[]).is_err());
        assert_eq!(mean(&[1.0, f64::NAN]).unwrap_err().class, Class::Candidate);
        assert!(variance(&[1.0]).is_err());
        assert!(mean_score(&[0.5, f64::INFINITY], 1, 0.95).is_err());
        assert!(mean_score(&[0.5, 1.5], 1, 0.95).is_err());
        assert!(paired(&[1.0, 2.0], &[1.0], 0.95).is_err());
        assert!(nested(&[vec![1.0], vec![]], 0.95).is_err());
        assert!(ratio(&[1.0, 1.0], &[0.0, 0.0], 0.95).is_err());
        assert!(wilson(1.0, 0.0, 0.95).is_err() && wilson(3.0, 2.0, 0.95).is_err() && wilson(1.0, 2.0, 1.0).is_err());
    }

    proptest! {
        #[test]
        fn pass_at_k_matches_counting(n in 1usize..7, c in 0usize..7, k in 1usize..7) {
            prop_assume!(c <= n && k <= n);
            // Of all k-subsets of n samples, the first c being right, the share that holds a right one.
            let subsets: Vec<u32> = (0..1u32 << n).filter(|s| s.count_ones() as usize == k).collect();
            let passed = subsets.iter().filter(|s| **s & ((1 << c) - 1) != 0).count();
            prop_assert!((pass_at_k(n, c, k).unwrap() - passed as f64 / subsets.len() as f64).abs() < 1e-12);
        }

        #[test]
        fn intervals_hold_their_estimate(scores in prop::collection::vec(0.0..=1.0f64, 2..40), k in 1usize..5) {
            let found = mean_score(&scores, k, 0.95).unwrap();
            prop_assert!(0.0 <= found.interval.low && found.interval.low <= found.mean + 1e-12);
            prop_assert!(found.mean <= found.interval.high + 1e-12 && found.interval.high <= 1.0);
        }
    }
}
