//! The judge: is the candidate better than the incumbent? The unit of inference is the training run, paired over seeds;
//! items are nested in it and never counted as replicates. Pure functions of scores: nothing here runs, reads or decides.
//!
//! Screening decides only what deserves confirmation, so it spends no error and may look as often as it likes. Confirmation
//! uses seeds that no earlier decision saw and spends the campaign's error budget: the j-th confirmation tests at level α_j
//! ([`alpha_of`]), so however many candidates are proposed, and however cleverly they are chosen, the chance of keeping one
//! that is no better stays below α.
//!
//! The test is Student's one-sided paired t-test. It supposes that differences between seeds are about normal; that their
//! variance is the same for all candidates is *not* supposed. Two guards make it more careful than the textbook, never
//! less: the standard deviation is not taken smaller than half of the incumbent's own spread between seeds (three equal
//! differences by luck prove little), and `better` also wants a point estimate of at least `min_effect`.
//! At most two looks share a confirmation's level (union bound), and stopping for futility can only lose rejections.

use std::f64::consts::PI;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use statrs::distribution::{ContinuousCDF, Normal, StudentsT};

/// Which way is better.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// More is better.
    #[default]
    Maximize,
    /// Less is better.
    Minimize,
}

impl Direction {
    /// +1 or −1: times a change of the metric, positive is better.
    pub fn sign(self) -> f64 {
        if self == Direction::Maximize { 1.0 } else { -1.0 }
    }
}

/// The error that is held over the whole campaign.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorRate {
    /// The chance that any kept change is none: α_j = 6α/(π²j²), which sums to α.
    #[default]
    Family,
    /// The expected share of kept changes that are none: LOND (Javanmard and Montanari, arXiv:1502.06197).
    Fdr,
}

/// `gate:` of a goal.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Gate {
    /// The error, in (0, 1).
    pub alpha: f64,
    /// Of which kind.
    pub error: ErrorRate,
}

impl Default for Gate {
    fn default() -> Self {
        Self { alpha: 0.05, error: ErrorRate::Family }
    }
}

/// What code found. A person's word is a [`crate::proposal::Decision`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Confirmed: the gain is above zero at the campaign's error, and by the estimate at least `min_effect`.
    Better,
    /// The whole interval is on the wrong side of zero.
    Worse,
    /// Neither.
    Undecided,
    /// A score is NaN, infinite or missing, or the candidate diverged.
    Invalid,
    /// A run hit a limit before it was done.
    Incomplete,
}

/// One seed's two scores.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pair {
    /// The seed of both runs.
    pub seed: u64,
    /// The candidate's score, in the metric's unit.
    pub candidate: f64,
    /// The incumbent's.
    pub incumbent: f64,
}

/// How much runs of one and the same commit differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Noise {
    /// Standard deviation of a run's score between seeds.
    pub sd: f64,
    /// Degrees of freedom behind it; 0: unknown.
    pub df: usize,
}

impl Noise {
    /// Pooled over groups; each group holds replicates of one commit. Scores of different commits never mix.
    pub fn of<'a>(groups: impl IntoIterator<Item = &'a [f64]>) -> Self {
        let (mut squares, mut df) = (0.0, 0);
        for group in groups.into_iter().filter(|g| g.len() > 1 && g.iter().all(|x| x.is_finite())) {
            let (_, sd) = mean_sd(group);
            squares += sd * sd * (group.len() - 1) as f64;
            df += group.len() - 1;
        }
        Self { sd: if df == 0 { 0.0 } else { (squares / df as f64).sqrt() }, df }
    }
}

/// How candidates are judged in this campaign.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Judge {
    /// Which way is better.
    pub direction: Direction,
    /// Smaller gains are not worth keeping; positive, in the metric's unit.
    pub min_effect: f64,
    /// Fewest and most seeds: screening takes up to the fewest, confirmation from the fewest to the most.
    pub replicates: [usize; 2],
    /// The error held over the campaign.
    pub gate: Gate,
    /// From all replicates of the incumbent so far, those of earlier confirmations included; before them the baseline's.
    pub noise: Noise,
}

/// An estimate of candidate minus incumbent, in the metric's own unit and sign.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// Pairs behind it.
    pub n: usize,
    /// Mean difference.
    pub effect: f64,
    /// 95% interval, two-sided. None where nothing is known of the noise: one pair, and no replicates of the incumbent.
    pub interval: Option<[f64; 2]>,
}

/// What screening says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Screen {
    /// Not yet clear: this many pairs in total, please.
    More {
        /// Pairs wanted in total.
        total: usize,
    },
    /// Worth a confirmation.
    Promising(Estimate),
    /// Not worth one.
    Stop {
        /// Worse, undecided or invalid.
        verdict: Verdict,
        /// None for invalid scores.
        estimate: Option<Estimate>,
        /// A sentence with the numbers.
        reason: String,
    },
}

/// What confirmation says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Confirm {
    /// Not yet clear: this many pairs in total, please.
    More {
        /// Pairs wanted in total.
        total: usize,
    },
    /// The verdict.
    Done {
        /// Better, worse, undecided or invalid.
        verdict: Verdict,
        /// None for invalid scores.
        estimate: Option<Estimate>,
        /// One-sided p-value of "no better"; compare with `level`.
        p: f64,
        /// The level of the look that decided.
        level: f64,
        /// A sentence with the numbers.
        reason: String,
    },
}

/// What a floor says: nothing else may fall by more than `max_drop`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Floor {
    /// The whole interval is above the floor.
    Held,
    /// The estimate is above the floor, its interval is not: a flag for the reviewer.
    Unclear,
    /// The estimate is below the floor.
    Broken,
}

/// The level of the j-th confirmation (from 1), `kept` changes having been confirmed before it.
pub fn alpha_of(gate: &Gate, j: usize, kept: usize) -> f64 {
    let j = j.max(1) as f64;
    let share = 6.0 * gate.alpha / (PI * PI * j * j);
    match gate.error {
        ErrorRate::Family => share,
        ErrorRate::Fdr => (share * (kept + 1) as f64).min(gate.alpha),
    }
}

/// Screens a candidate on seeds that the incumbent has run, too; `usual` are all the incumbent's screening scores. The rule: the interval
/// of the gain (80%, two-sided) pools the pairs' spread with the baseline's. Once it lies wholly below `min_effect` the candidate is
/// hopeless, unless one of its runs beats the incumbent's median by `min_effect`: the incumbent's run beside it may have worked by luck.
/// Once wholly above, it is promising. With the fewest replicates run, the median gain decides, which one lucky run does not move.
pub fn screen(judge: &Judge, usual: &[f64], pairs: &[Pair]) -> Screen {
    let sign = judge.direction.sign();
    let bar = if usual.is_empty() { f64::INFINITY } else { median(usual) * sign + judge.min_effect };
    for n in 1..=pairs.len() {
        let Some(gains) = judge.gains(&pairs[..n]) else {
            return Screen::Stop { verdict: Verdict::Invalid, estimate: None, reason: invalid(&pairs[..n]) };
        };
        let (mean, low, high) = judge.pooled_interval(&gains, 0.9);
        let enough = n >= judge.replicates[0];
        let middle = median(&gains);
        if low >= judge.min_effect || (enough && middle >= judge.min_effect) {
            return Screen::Promising(judge.estimate(&gains));
        }
        let hopeless = high < judge.min_effect && pairs[..n].iter().all(|pair| pair.candidate * sign < bar);
        if hopeless || enough {
            let verdict = if high < 0.0 { Verdict::Worse } else { Verdict::Undecided };
            let reason = format!(
                "Gain {mean:+.4} over {n} {}, 80% interval {low:+.4} to {high:+.4}, median {middle:+.4}: {} the {} worth keeping.",
                if n == 1 { "seed" } else { "seeds" },
                if hopeless { "hopeless, below" } else { "below" },
                judge.min_effect
            );
            return Screen::Stop { verdict, estimate: Some(judge.estimate(&gains)), reason };
        }
    }
    // One by one: a driver with room for more runs makes more, which changes no verdict.
    Screen::More { total: pairs.len() + 1 }
}

/// Seeds that a confirmation plans for, fixed before the first of them is run: the fewest with power 0.9 for the effect that screening
/// saw less one standard error (it was selected, so it is likely too high), never less than `min_effect`.
pub fn planned(judge: &Judge, alpha: f64, screened: &Estimate) -> usize {
    let [fewest, most] = judge.bounds();
    let sd = judge.pair_sd();
    let expected =
        (screened.effect * judge.direction.sign() - sd / (screened.n.max(1) as f64).sqrt()).max(judge.min_effect);
    (fewest..most).find(|n| power(expected / sd, *n, first_level(alpha, *n, most)) >= 0.9).unwrap_or(most)
}

/// Confirms a promising candidate at level `alpha` ([`alpha_of`]) on fresh seeds. `screened` is what screening estimated. Two looks at
/// most: one at the planned number of seeds with four fifths of the level, and one at the most seeds with the rest. In between it stops
/// when the gain's upper 95% bound is below `min_effect`.
pub fn confirm(judge: &Judge, alpha: f64, screened: &Estimate, pairs: &[Pair]) -> Confirm {
    let [_, most] = judge.bounds();
    let plan = planned(judge, alpha, screened);
    let first = first_level(alpha, plan, most);
    for n in 1..=pairs.len().min(most) {
        let Some(gains) = judge.gains(&pairs[..n]) else {
            let reason = invalid(&pairs[..n]);
            return Confirm::Done { verdict: Verdict::Invalid, estimate: None, p: 1.0, level: first, reason };
        };
        let look = n == plan || n == most;
        let level = if n <= plan { first } else { alpha - first };
        let (mean, _) = mean_sd(&gains);
        let p = judge.p_value(&gains);
        let done =
            |verdict, reason| Confirm::Done { verdict, estimate: Some(judge.estimate(&gains)), p, level, reason };
        let (_, low, high) = judge.pooled_interval(&gains, 0.95);
        if look && p <= level && mean >= judge.min_effect {
            return done(
                Verdict::Better,
                format!("Gain {mean:+.4} over {n} fresh seeds, p = {p:.2e} at level {level:.2e}."),
            );
        }
        if n == most || (n >= 2 && high < judge.min_effect) {
            let verdict = if high < 0.0 { Verdict::Worse } else { Verdict::Undecided };
            let why = match () {
                () if high < judge.min_effect => format!("below the {} worth keeping", judge.min_effect),
                () if p <= level => format!("real, but less than the {} worth keeping", judge.min_effect),
                () => format!("p = {p:.2e} is above level {level:.2e}"),
            };
            return done(
                verdict,
                format!("Gain {mean:+.4} over {n} fresh seeds, 90% interval {low:+.4} to {high:+.4}: {why}."),
            );
        }
    }
    Confirm::More { total: pairs.len() + 1 }
}

/// Whether another metric stays above its floor: `max_drop` is what it may get worse by, in its own unit; `noise` is that metric's.
/// None when a score is not finite or there is no pair: no evidence never reads as held.
pub fn floor(direction: Direction, max_drop: f64, noise: Noise, pairs: &[Pair]) -> Option<Floor> {
    let judge = Judge { direction, min_effect: max_drop, replicates: [1, pairs.len()], gate: Gate::default(), noise };
    let gains = judge.gains(pairs).filter(|g| !g.is_empty())?;
    let (mean, low, _) = judge.pooled_interval(&gains, 0.95);
    Some(match () {
        () if mean < -max_drop => Floor::Broken,
        () if low < -max_drop => Floor::Unclear,
        () => Floor::Held,
    })
}

impl Judge {
    /// The smallest gain that a first confirmation with the most replicates detects with power 0.8; what `min_effect` must not be below.
    pub fn detectable(&self) -> f64 {
        let [_, most] = self.bounds();
        let level = first_level(alpha_of(&self.gate, 1, 0), most, most);
        let (mut low, mut high) = (0.0, 1e3);
        for _ in 0..60 {
            let mid = (low + high) / 2.0;
            if power(mid, most, level) >= 0.8 { high = mid } else { low = mid }
        }
        high * self.pair_sd()
    }

    /// Fewest and most seeds of a confirmation: a t-test needs two.
    fn bounds(&self) -> [usize; 2] {
        let fewest = self.replicates[0].max(2);
        [fewest, self.replicates[1].max(fewest)]
    }

    /// Differences, positive is better; None where one is not finite.
    fn gains(&self, pairs: &[Pair]) -> Option<Vec<f64>> {
        let gains: Vec<f64> = pairs.iter().map(|p| (p.candidate - p.incumbent) * self.direction.sign()).collect();
        gains.iter().all(|g| g.is_finite()).then_some(gains)
    }

    /// What a difference of two runs is expected to scatter: √2 of a run's, no credit being given for pairing. Never zero: differences
    /// below a tenth of `min_effect` are not resolved.
    fn pair_sd(&self) -> f64 {
        (self.noise.sd * std::f64::consts::SQRT_2).max(0.1 * self.min_effect).max(f64::MIN_POSITIVE)
    }

    /// Mean and the bounds below and above which the gain lies with the given one-sided confidence each, pooling the pairs' spread with the
    /// baseline's. For choosing what to run, not for `better`.
    fn pooled_interval(&self, gains: &[f64], confidence: f64) -> (f64, f64, f64) {
        let n = gains.len();
        let (mean, sd) = mean_sd(gains);
        let df = self.noise.df + n - 1;
        if df == 0 {
            return (mean, f64::NEG_INFINITY, f64::INFINITY);
        }
        let prior = self.pair_sd();
        let pooled = (prior * prior * self.noise.df as f64 + sd * sd * (n - 1) as f64) / df as f64;
        let half = t_quantile(df, confidence) * pooled.sqrt().max(0.1 * self.min_effect) / (n as f64).sqrt();
        (mean, mean - half, mean + half)
    }

    /// One-sided p-value of "the gain is not above zero": the pairs' own spread with n − 1 degrees of freedom, not below the guard's.
    fn p_value(&self, gains: &[f64]) -> f64 {
        let n = gains.len();
        if n < 2 {
            return 1.0;
        }
        let (mean, sd) = mean_sd(gains);
        let guarded = sd.max(0.5 * self.noise.sd).max(0.1 * self.min_effect);
        if mean <= 0.0 || guarded <= 0.0 {
            return 1.0;
        }
        student(n - 1).map_or(1.0, |t| t.sf(mean / (guarded / (n as f64).sqrt())))
    }

    /// The mean difference in the metric's own sign with its 95% interval: of the pairs alone where there are three or more, else pooled.
    fn estimate(&self, gains: &[f64]) -> Estimate {
        let n = gains.len();
        let alone = Judge { noise: Noise { sd: self.noise.sd, df: 0 }, ..*self };
        let judge = if n >= 3 { &alone } else { self };
        let (mean, low, high) = judge.pooled_interval(gains, 0.975);
        let interval = low.is_finite().then_some(match self.direction {
            Direction::Maximize => [low, high],
            Direction::Minimize => [-high, -low],
        });
        Estimate { n, effect: mean * self.direction.sign(), interval }
    }
}

/// The first look's level: all of it where the plan is the most seeds already, else four fifths.
fn first_level(alpha: f64, plan: usize, most: usize) -> f64 {
    if plan >= most { alpha } else { 0.8 * alpha }
}

/// Power of a one-sided t-test of n differences with standardised mean `delta`: Johnson and Welch's approximation (1940) of the
/// noncentral t, good to about a hundredth here.
fn power(delta: f64, n: usize, level: f64) -> f64 {
    let df = (n - 1) as f64;
    let t = t_quantile(n - 1, 1.0 - level);
    let z = (delta * (n as f64).sqrt() - t * (1.0 - 1.0 / (4.0 * df))) / (1.0 + t * t / (2.0 * df)).sqrt();
    Normal::standard().cdf(z)
}

fn student(df: usize) -> Option<StudentsT> {
    StudentsT::new(0.0, 1.0, df as f64).ok()
}

fn t_quantile(df: usize, p: f64) -> f64 {
    student(df).map_or(f64::INFINITY, |t| t.inverse_cdf(p.clamp(0.0, 1.0)))
}

/// Mean and sample standard deviation (n − 1; 0 for a single value).
fn mean_sd(xs: &[f64]) -> (f64, f64) {
    let n = xs.len() as f64;
    let mean = xs.iter().sum::<f64>() / n;
    let squares = xs.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>();
    (mean, if xs.len() > 1 { (squares / (n - 1.0)).sqrt() } else { 0.0 })
}

/// The middle value; of an even number the mean of the two middle ones.
fn median(xs: &[f64]) -> f64 {
    let mut sorted = xs.to_vec();
    sorted.sort_by(f64::total_cmp);
    let half = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[half] } else { (sorted[half - 1] + sorted[half]) / 2.0 }
}

fn invalid(pairs: &[Pair]) -> String {
    let bad = pairs.iter().find(|p| !(p.candidate.is_finite() && p.incumbent.is_finite()));
    match bad {
        Some(p) if !p.incumbent.is_finite() => format!("The incumbent's score of seed {} is {}.", p.seed, p.incumbent),
        Some(p) => format!("The candidate's score of seed {} is {}.", p.seed, p.candidate),
        None => "A difference of scores overflows.".into(),
    }
}
