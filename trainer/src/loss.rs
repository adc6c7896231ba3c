//! Policy losses: pure functions over f32 slices of terms, each giving every term's loss and its gradient with respect
//! to the term's log-prob. Not for advantages (`advantage.rs`), nor for models: nothing here knows a tensor.
//!
//! A term is one sampled token of one trajectory. A batch's loss is Σ weight · loss over terms, the weights given by
//! name ([`Normaliser`]) and never folded in before the loss.
//!
//! - CISPO, MiniMax-M1 (arXiv:2506.13585, eqs 4–5): −sg(clip(r)) · A · log π. Token level; the clipped ratio is a
//!   constant weight, so no token loses its gradient. The ratio has one **absolute** cap (the paper's 1 + ε_high, whose
//!   value it does not publish; ScaleRL, arXiv:2510.13786, finds 4, 5 and 8 alike) and no floor unless asked for one.
//! - GRPO with PPO's clip (arXiv:2402.03300): −min(r·A, clip(r)·A). Clipped tokens lose their gradient.
//! - GSPO (arXiv:2507.18071): the same with one ratio a sequence, the geometric mean of its tokens'.

use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Which loss a policy stage minimises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    /// Clipped importance weights, stop-gradient (MiniMax-M1).
    #[default]
    Cispo,
    /// Group-relative advantages with PPO's clip a token.
    Grpo,
    /// PPO's clip with one ratio a sequence.
    Gspo,
}

/// How terms are weighed in a batch's loss. Every rule's weights sum to 1 over the batch, but for `fixed-length`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Normaliser {
    /// Each prompt counts the same, and within it each token: 1 / (prompts · tokens of the group). MiniMax-M1's eq 4.
    #[default]
    PromptAverage,
    /// Each token of the batch counts the same: 1 / tokens. DAPO's.
    TokenMean,
    /// Each trajectory counts the same, and within it each token: 1 / (trajectories · tokens of the trajectory). GRPO's.
    SequenceMean,
    /// 1 / (trajectories · most tokens a completion may have): no length bias (Dr. GRPO, arXiv:2503.20783).
    FixedLength,
}

/// The band of importance ratios that pass unclipped; both ends are absolute ratios, not distances from 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Band {
    /// Lowest ratio, at most 1; 0 is no bound.
    pub floor: f32,
    /// Highest ratio, at least 1.
    pub cap: f32,
}

/// The terms of a batch, trajectory after trajectory. All slices but `trajectories` have one entry a term.
#[derive(Clone, Copy, Debug)]
pub struct Terms<'a> {
    /// log π of the token under the weights that are trained, at the sampling temperature.
    pub logprob: &'a [f32],
    /// log π of the token under the weights that sampled it, at the same temperature.
    pub behaviour: &'a [f32],
    /// Advantage of the token.
    pub advantage: &'a [f32],
    /// Terms of each trajectory. They tile the slices in order.
    pub trajectories: &'a [Range<usize>],
}

/// What a loss gives, one entry a term. Reused from step to step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Losses {
    /// The term's loss, before its weight.
    pub loss: Vec<f32>,
    /// Its derivative with respect to the term's log-prob.
    pub d_logprob: Vec<f32>,
    /// The importance ratio before the band (the sequence's, for GSPO).
    pub ratio: Vec<f32>,
    /// Whether the band changed the term's gradient.
    pub clipped: Vec<bool>,
}

impl Losses {
    fn clear(&mut self) {
        self.loss.clear();
        self.d_logprob.clear();
        self.ratio.clear();
        self.clipped.clear();
    }

    fn push(&mut self, loss: f32, d_logprob: f32, ratio: f32, clipped: bool) {
        self.loss.push(loss);
        self.d_logprob.push(d_logprob);
        self.ratio.push(ratio);
        self.clipped.push(clipped);
    }
}

/// The loss of `algorithm` for every term, into `out`.
pub fn policy(algorithm: Algorithm, band: Band, terms: Terms, out: &mut Losses) {
    match algorithm {
        Algorithm::Cispo => cispo(band, terms, out),
        Algorithm::Grpo => grpo(band, terms, out),
        Algorithm::Gspo => gspo(band, terms, out),
    }
}

/// CISPO: loss −w·A·log π, gradient −w·A, w the ratio inside the band, taken as a constant.
pub fn cispo(band: Band, terms: Terms, out: &mut Losses) {
    out.clear();
    for ((&logprob, &behaviour), &advantage) in terms.logprob.iter().zip(terms.behaviour).zip(terms.advantage) {
        let ratio = (logprob - behaviour).exp();
        let weight = ratio.clamp(band.floor, band.cap);
        out.push(-weight * advantage * logprob, -weight * advantage, ratio, weight != ratio);
    }
}

/// GRPO's surrogate: loss −min(r·A, clip(r)·A); its gradient is −r·A where the first is the smaller, else 0.
pub fn grpo(band: Band, terms: Terms, out: &mut Losses) {
    out.clear();
    for ((&logprob, &behaviour), &advantage) in terms.logprob.iter().zip(terms.behaviour).zip(terms.advantage) {
        let ratio = (logprob - behaviour).exp();
        let (loss, gradient, clipped) = pessimistic(band, ratio, advantage);
        out.push(loss, gradient, ratio, clipped);
    }
}

/// GSPO: as [`grpo`] with the ratio s = exp(mean of the trajectory's log-ratios) for all its terms. The gradient of a
/// term, −s·A, holds where the terms of a trajectory have equal weights, as every [`Normaliser`] gives them.
pub fn gspo(band: Band, terms: Terms, out: &mut Losses) {
    out.clear();
    for range in terms.trajectories {
        let log_ratios = terms.logprob[range.clone()].iter().zip(&terms.behaviour[range.clone()]).map(|(l, b)| l - b);
        let ratio = (log_ratios.sum::<f32>() / range.len() as f32).exp();
        for &advantage in &terms.advantage[range.clone()] {
            let (loss, gradient, clipped) = pessimistic(band, ratio, advantage);
            out.push(loss, gradient, ratio, clipped);
        }
    }
}

/// (loss, gradient, clipped) of −min(r·A, clip(r)·A). NaN passes through.
fn pessimistic(band: Band, ratio: f32, advantage: f32) -> (f32, f32, bool) {
    let (free, held) = (ratio * advantage, ratio.clamp(band.floor, band.cap) * advantage);
    if free <= held { (-free, -free, false) } else { (-held, 0.0, true) }
}

/// Term weights by `normaliser`, one a trajectory (its terms share it). `groups` are the trajectories of each prompt and
/// tile `lengths`, the numbers of terms of the trajectories; `longest` is the most terms a trajectory may have.
pub fn weights(normaliser: Normaliser, groups: &[Range<usize>], lengths: &[usize], longest: usize) -> Vec<f32> {
    let all = lengths.iter().sum::<usize>() as f64;
    let mut weights = vec![0.0; lengths.len()];
    for group in groups {
        let of_group = lengths[group.clone()].iter().sum::<usize>() as f64;
        for i in group.clone() {
            let share = match normaliser {
                Normaliser::PromptAverage => groups.len() as f64 * of_group,
                Normaliser::TokenMean => all,
                Normaliser::SequenceMean => (lengths.len() * lengths[i]) as f64,
                Normaliser::FixedLength => (lengths.len() * longest) as f64,
            };
            // A trajectory without terms weighs nothing.
            weights[i] = if share > 0.0 { (1.0 / share) as f32 } else { 0.0 };
        }
    }
    weights
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGPROB: [f32; 4] = [-0.7, -1.2, -0.4, -2.1];
    const ADVANTAGE: [f32; 4] = [1.0, -0.5, 2.0, -1.0];

    fn run(algorithm: Algorithm, band: Band, ratios: [f32; 4]) -> Losses {
        let behaviour: Vec<f32> = LOGPROB.iter().zip(ratios).map(|(l, r)| l - r.ln()).collect();
        let terms =
            Terms { logprob: &LOGPROB, behaviour: &behaviour, advantage: &ADVANTAGE, trajectories: &[0..1, 1..4] };
        let mut out = Losses::default();
        policy(algorithm, band, terms, &mut out);
        out
    }

    fn near(got: &[f32], want: &[f32]) {
        assert_eq!(got.len(), want.len());
        for (g, w) in got.iter().zip(want) {
            assert!((g - w).abs() < 2e-6, "{got:?} is not {want:?}");
        }
    }

    const RATIOS: [f32; 4] = [1.0, 1.14, 1.56, 0.4];

    #[test]
    fn cispo_weighs_by_the_ratio_inside_a_band() {
        let out = run(Algorithm::Cispo, Band { floor: 0.8, cap: 1.28 }, RATIOS);
        near(&out.loss, &[0.7, -0.684, 1.024, -1.68]);
        near(&out.d_logprob, &[-1.0, 0.57, -2.56, 0.8]);
        assert_eq!(out.clipped[2..], [true, true]);
    }

    #[test]
    fn cispo_as_published_has_a_cap_and_no_floor() {
        let out = run(Algorithm::Cispo, Band { floor: 0.0, cap: 5.0 }, [1.0, 3.0, 9.0, 0.4]);
        near(&out.loss, &[0.7, -1.8, 4.0, -0.84]);
        near(&out.d_logprob, &[-1.0, 1.5, -10.0, 0.4]);
    }

    #[test]
    fn cispo_passes_no_gradient_through_the_ratio() {
        // Through the ratio the derivative of −r·A·log π would be −r·A·(1 + log π), here 0.57 · −0.2 for the second.
        let out = run(Algorithm::Cispo, Band { floor: 0.0, cap: 5.0 }, RATIOS);
        near(&out.d_logprob, &[-1.0, 0.57, -3.12, 0.4]);
    }

    #[test]
    fn grpo_drops_the_gradient_of_clipped_tokens() {
        let out = run(Algorithm::Grpo, Band { floor: 0.8, cap: 1.28 }, RATIOS);
        near(&out.loss, &[-1.0, 0.57, -2.56, 0.8]);
        near(&out.d_logprob, &[-1.0, 0.57, 0.0, 0.0]);
        assert_eq!(out.clipped, [false, false, true, true]);
    }

    #[test]
    fn gspo_gives_a_sequence_one_ratio() {
        let (logprob, behaviour) = ([-1.0, -1.0, -1.0], [-1.2, -0.9, -1.3]);
        let terms = Terms {
            logprob: &logprob,
            behaviour: &behaviour,
            advantage: &[1.0; 3],
            trajectories: &[Range { start: 0, end: 3 }],
        };
        let mut out = Losses::default();
        gspo(Band { floor: 0.0, cap: 5.0 }, terms, &mut out);
        near(&out.ratio, &[1.142_63; 3]);
        near(&out.d_logprob, &[-1.142_63; 3]);
    }

    #[test]
    fn gspo_gradient_agrees_with_finite_differences() {
        let (behaviour, advantage) = ([-1.2f32, -0.9, -1.3], [0.7f32; 3]);
        let at = |logprob: [f32; 3]| {
            let terms = Terms {
                logprob: &logprob,
                behaviour: &behaviour,
                advantage: &advantage,
                trajectories: &[Range { start: 0, end: 3 }],
            };
            let mut out = Losses::default();
            gspo(Band { floor: 0.0, cap: 5.0 }, terms, &mut out);
            (out.loss.iter().sum::<f32>() / 3.0, out.d_logprob[1] / 3.0)
        };
        let (up, down) = (at([-1.0, -0.99, -1.0]).0, at([-1.0, -1.01, -1.0]).0);
        assert!(((up - down) / 0.02 - at([-1.0; 3]).1).abs() < 1e-4);
    }

    #[test]
    fn not_a_number_is_never_clipped_away() {
        for algorithm in [Algorithm::Cispo, Algorithm::Grpo, Algorithm::Gspo] {
            let out = run(algorithm, Band { floor: 0.0, cap: 5.0 }, [1.0, 1.0, 1.0, f32::NAN]);
            assert!(out.loss[3].is_nan());
        }
    }

    #[test]
    fn normalisers_weigh_as_named() {
        // Two prompts: trajectories of 1 and 3 tokens, then of 4 and 0.
        let (groups, lengths) = ([0..2, 2..4], [1, 3, 4, 0]);
        let of = |n| weights(n, &groups, &lengths, 10);
        near(&of(Normaliser::PromptAverage), &[0.125, 0.125, 0.125, 0.125]);
        near(&of(Normaliser::TokenMean), &[0.125, 0.125, 0.125, 0.125]);
        near(&of(Normaliser::SequenceMean), &[0.25, 1.0 / 12.0, 1.0 / 16.0, 0.0]);
        near(&of(Normaliser::FixedLength), &[0.025; 4]);
        near(&weights(Normaliser::PromptAverage, &[0..1, 1..2], &[1, 4], 10), &[0.5, 0.125]);
    }
}
