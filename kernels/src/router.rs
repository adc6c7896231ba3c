//! Top-k routing of rows to experts: softmax (MiniMax-01), or sigmoid with a selection bias (MiniMax-M2); f32.

use crate::{
    Tensor,
    blocks::{Rows, for_rows},
    simd::{Simd, dispatch, exp, map, max, sum},
};

/// The least sum that weights are normalised by. It matters only where every chosen score has all but vanished (replayed experts, or
/// sigmoids of logits below −46), and is far enough above the smallest float that a weight stays finite.
const LEAST_SUM: f32 = 1e-20;

/// How scores become choices and weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// Softmax over all experts, top-k, weights renormalised over the chosen.
    Softmax,
    /// p = sigmoid(logit); top-k of p + bias; weights p renormalised over the chosen. The bias never enters a weight.
    SigmoidBias,
}

/// Chosen experts and their weights, row by row; within a row by falling score, ties to the lower index.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routes {
    /// `[T, k]`.
    pub experts: Vec<u32>,
    /// `[T, k]`, each row sums to 1.
    pub weights: Vec<f32>,
    /// Scores `[T, E]` (softmax or sigmoid), kept for backward and the auxiliary loss.
    pub scores: Tensor,
    /// Experts a row.
    pub k: usize,
}

/// Routes `logits[T, E]` to `k` ≤ E experts a row. `bias[E]` is added to the scores to select, under either scoring. With `replay`
/// (`[T, k]` ids, distinct within a row) those experts are taken, in that order, their weights gathered from today's full scores.
///
/// Panics where `k`, `bias` or `replay` do not fit `logits`: a route that is silently padded trains the wrong experts.
pub fn forward(
    scoring: Scoring,
    logits: &Tensor,
    bias: Option<&[f32]>,
    k: usize,
    replay: Option<&[u32]>,
    routes: &mut Routes,
) {
    let (rows, experts) = (logits.rows(), logits.cols());
    assert!((1..=experts).contains(&k), "{k} of {experts} experts");
    assert!(bias.is_none_or(|b| b.len() == experts), "one bias an expert");
    routes.k = k;
    routes.scores.resize(&[rows, experts]);
    routes.weights.resize(rows * k, 0.0);
    let scores = Rows { data: routes.scores.data_mut(), cols: experts };
    for_rows(rows, 4 * experts, scores, |first, scores| {
        scores.data.copy_from_slice(&logits.data()[first * experts..][..scores.data.len()]);
        dispatch!(|s| score(s, scoring, experts, scores.data));
    });
    routes.experts.clear();
    routes.experts.reserve_exact(rows * k);
    if let Some(ids) = replay {
        assert_eq!(ids.len(), rows * k, "a replayed route is {k} experts for each of {rows} rows");
        assert!(ids.iter().all(|&id| (id as usize) < experts), "a replayed route names experts below {experts}");
        routes.experts.extend_from_slice(ids);
    } else {
        for row in routes.scores.data().chunks_exact(experts) {
            choose(row, bias, k, &mut routes.experts);
        }
    }
    let weights = routes.weights.chunks_exact_mut(k).zip(routes.experts.chunks_exact(k));
    for ((weights, chosen), scores) in weights.zip(routes.scores.data().chunks_exact(experts)) {
        let total = total(scores, chosen).max(LEAST_SUM);
        for (w, &e) in weights.iter_mut().zip(chosen) {
            *w = scores[e as usize] / total;
        }
    }
}

#[inline(always)]
fn score<S: Simd>(s: S, scoring: Scoring, experts: usize, scores: &mut [f32]) {
    match scoring {
        Scoring::Softmax => {
            for row in scores.chunks_exact_mut(experts) {
                let most = s.splat_f32s(max(s, row));
                map(
                    s,
                    row,
                    #[inline(always)]
                    |x| exp(s, s.sub_f32s(x, most)),
                );
                let total = s.splat_f32s(sum(s, row));
                map(
                    s,
                    row,
                    #[inline(always)]
                    |x| s.div_f32s(x, total),
                );
            }
        }
        Scoring::SigmoidBias => {
            let one = s.splat_f32s(1.0);
            map(
                s,
                scores,
                #[inline(always)]
                |x| s.div_f32s(one, s.add_f32s(one, exp(s, s.neg_f32s(x)))),
            );
        }
    }
}

/// Appends the `k` experts of the highest score + bias. A NaN is never above anything, so that a diverged row still names
/// experts and its NaN scores reach the loss, where they are seen.
fn choose(scores: &[f32], bias: Option<&[f32]>, k: usize, chosen: &mut Vec<u32>) {
    let value = |e: usize| scores[e] + bias.map_or(0.0, |b| b[e]);
    let start = chosen.len();
    for _ in 0..k {
        let mut best: Option<(usize, f32)> = None;
        for e in 0..scores.len() {
            if best.is_none_or(|(_, v)| value(e) > v || v.is_nan() && !value(e).is_nan())
                && !chosen[start..].contains(&(e as u32))
            {
                best = Some((e, value(e)));
            }
        }
        chosen.extend(best.map(|(e, _)| e as u32));
    }
}

fn total(scores: &[f32], chosen: &[u32]) -> f32 {
    chosen.iter().map(|&e| scores[e as usize]).sum()
}

/// `d_logits[T, E]` (overwritten) from `d_weights[T, k]`; `d_scores`, where given, is the auxiliary loss's gradient `[T, E]`.
pub fn backward(
    scoring: Scoring,
    routes: &Routes,
    d_weights: &[f32],
    d_scores: Option<&Tensor>,
    d_logits: &mut Tensor,
) {
    let (rows, experts, k) = (routes.scores.rows(), routes.scores.cols(), routes.k);
    assert_eq!(d_weights.len(), rows * k, "a gradient a weight");
    assert!(d_scores.is_none_or(|d| d.len() == rows * experts), "a gradient a score");
    d_logits.resize(&[rows, experts]);
    for_rows(rows, 4 * experts, Rows { data: d_logits.data_mut(), cols: experts }, |first, d_logits| {
        for (i, d_logits) in d_logits.data.chunks_exact_mut(experts).enumerate() {
            let row = first + i;
            let slots = row * k..(row + 1) * k;
            let (scores, chosen) = (routes.scores.row(row), &routes.experts[slots.clone()]);
            let d_scores = d_scores.map(|d| d.row(row));
            backward_row(
                scoring,
                scores,
                chosen,
                &routes.weights[slots.clone()],
                &d_weights[slots],
                d_scores,
                d_logits,
            );
        }
    });
}

/// With w = p / Σp over the chosen: p ⊙ dL/dp = w ⊙ (dL/dw − ⟨w, dL/dw⟩), and no score is divided by. A sigmoid passes p ⊙ dL/dp ⊙ (1 − p);
/// a softmax p ⊙ dL/dp less p times the sum of that over all experts.
fn backward_row(
    scoring: Scoring,
    scores: &[f32],
    chosen: &[u32],
    weights: &[f32],
    d_weights: &[f32],
    d_scores: Option<&[f32]>,
    d_logits: &mut [f32],
) {
    match d_scores {
        Some(d) => d_logits.iter_mut().zip(d).zip(scores).for_each(|((o, d), p)| *o = d * p),
        None => d_logits.fill(0.0),
    }
    // Below the least sum the divisor is a constant.
    let normalised = total(scores, chosen) >= LEAST_SUM;
    let along: f32 = if normalised { weights.iter().zip(d_weights).map(|(w, d)| w * d).sum() } else { 0.0 };
    for ((&e, w), d) in chosen.iter().zip(weights).zip(d_weights) {
        d_logits[e as usize] += w * (d - along);
    }
    match scoring {
        Scoring::Softmax => {
            let all: f32 = d_logits.iter().sum();
            d_logits.iter_mut().zip(scores).for_each(|(o, p)| *o -= p * all);
        }
        Scoring::SigmoidBias => d_logits.iter_mut().zip(scores).for_each(|(o, p)| *o *= 1.0 - p),
    }
}

/// The load-balancing loss in Hugging Face's scaling: E · Σ_e f_e · P_e, f_e the share of choices an expert gets times k and P_e its mean
/// score, each row weighed by `uses` (balanced top-2 gives 2.0). Adds `coefficient` times its gradient to `d_scores[T, E]` where given;
/// the value returned is without it. No rows: 0.
pub fn balance_loss(routes: &Routes, uses: &[u32], coefficient: f32, d_scores: Option<&mut Tensor>) -> f32 {
    let (rows, experts) = (routes.scores.rows(), routes.scores.cols());
    assert_eq!(uses.len(), rows, "a number of uses a row");
    let total: f64 = uses.iter().map(|&u| f64::from(u)).sum();
    if total == 0.0 {
        return 0.0;
    }
    let mut load = vec![0.0f64; experts];
    let mut mass = vec![0.0f64; experts];
    for ((&u, chosen), scores) in
        uses.iter().zip(routes.experts.chunks_exact(routes.k)).zip(routes.scores.data().chunks_exact(experts))
    {
        chosen.iter().for_each(|&e| load[e as usize] += f64::from(u));
        mass.iter_mut().zip(scores).for_each(|(m, &p)| *m += f64::from(u) * f64::from(p));
    }
    let loss: f64 = load.iter().zip(&mass).map(|(l, m)| l * m).sum::<f64>() * experts as f64 / (total * total);
    if let Some(d_scores) = d_scores {
        // f is a count: it has no gradient.
        let slope = |&l: &f64| (f64::from(coefficient) * experts as f64 * l / (total * total)) as f32;
        let slopes: Vec<f32> = load.iter().map(slope).collect();
        for (row, &u) in d_scores.data_mut().chunks_exact_mut(experts).zip(uses) {
            row.iter_mut().zip(&slopes).for_each(|(d, s)| *d += s * u as f32);
        }
    }
    loss as f32
}

/// The same, from the definitions, in float64, for one row.
#[cfg(test)]
pub(crate) mod plain {
    use super::Scoring;

    pub(crate) fn scores(scoring: Scoring, logits: &[f32]) -> Vec<f64> {
        let most = logits.iter().fold(f32::NEG_INFINITY, |m, &x| m.max(x));
        let total: f64 = logits.iter().map(|&x| f64::from(x - most).exp()).sum();
        let one = |&x: &f32| match scoring {
            Scoring::Softmax => f64::from(x - most).exp() / total,
            Scoring::SigmoidBias => 1.0 / (1.0 + f64::from(-x).exp()),
        };
        logits.iter().map(one).collect()
    }

    /// Every expert sorted by falling score + bias; a stable sort leaves ties to the lower index.
    pub(crate) fn choose(scores: &[f32], bias: Option<&[f32]>, k: usize) -> Vec<u32> {
        let value = |e: u32| scores[e as usize] + bias.map_or(0.0, |b| b[e as usize]);
        let mut order: Vec<u32> = (0..scores.len() as u32).collect();
        order.sort_by(|&a, &b| value(b).total_cmp(&value(a)));
        order.truncate(k);
        order
    }

    pub(crate) fn weights(scores: &[f64], chosen: &[u32]) -> Vec<f64> {
        let total: f64 = chosen.iter().map(|&e| scores[e as usize]).sum();
        chosen.iter().map(|&e| scores[e as usize] / total).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        oracle::{self, assert_close, random},
        threads::Pool,
    };
    use candle_core as candle;
    use proptest::prelude::*;

    const BOTH: [Scoring; 2] = [Scoring::Softmax, Scoring::SigmoidBias];

    fn routed(scoring: Scoring, logits: &Tensor, bias: Option<&[f32]>, k: usize, replay: Option<&[u32]>) -> Routes {
        let mut routes = Routes::default();
        forward(scoring, logits, bias, k, replay, &mut routes);
        routes
    }

    /// Random logits on a coarse grid, so that ties are common.
    fn coarse(seed: u64, shape: &[usize]) -> Tensor {
        Tensor::from_vec(random(seed, shape).data().iter().map(|x| (x * 4.0).round()).collect(), shape)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn equals_its_twin(rows in 1usize..20, experts in 1usize..20, k in 1usize..20, seed in 0u64..1000, sigmoid: bool) {
            let (k, scoring) = (k.min(experts), BOTH[usize::from(sigmoid)]);
            let logits = coarse(seed, &[rows, experts]);
            let bias = sigmoid.then(|| random(seed + 1, &[experts]).data().to_vec());
            let routes = routed(scoring, &logits, bias.as_deref(), k, None);
            for t in 0..rows {
                let scores = plain::scores(scoring, logits.row(t));
                assert_close(routes.scores.row(t), &scores, 2e-6, 1e-30);
                let chosen = &routes.experts[t * k..(t + 1) * k];
                prop_assert_eq!(chosen, plain::choose(routes.scores.row(t), bias.as_deref(), k));
                assert_close(&routes.weights[t * k..(t + 1) * k], &plain::weights(&scores, chosen), 1e-5, 0.0);
            }
        }
    }

    /// Σ d_weights · weights + Σ d_scores · scores in candle, for the experts chosen.
    fn autograd(scoring: Scoring, logits: &Tensor, routes: &Routes, d_weights: &Tensor, d_scores: &Tensor) -> Vec<f64> {
        let k = routes.k;
        let found = oracle::autograd(&[logits], &[d_weights, d_scores], |v| {
            let scores = match scoring {
                Scoring::Softmax => v[0].exp()?.broadcast_div(&v[0].exp()?.sum_keepdim(1)?)?,
                Scoring::SigmoidBias => (v[0].neg()?.exp()? + 1.0)?.recip()?,
            };
            let ids = candle::Tensor::from_slice(&routes.experts, (logits.rows(), k), v[0].device())?;
            let chosen = scores.gather(&ids, 1)?;
            Ok(vec![chosen.broadcast_div(&chosen.sum_keepdim(1)?)?, scores])
        });
        assert_close(&routes.weights, &found.outputs[0], 1e-5, 1e-7);
        found.gradients.into_iter().next().expect("one input")
    }

    #[test]
    fn gradients_agree_with_the_oracles() {
        for scoring in BOTH {
            for (rows, experts, k, replayed) in [(1, 4, 1, false), (5, 7, 2, false), (3, 4, 4, false), (6, 8, 3, true)]
            {
                let logits = random(1, &[rows, experts]);
                let replay: Option<Vec<u32>> =
                    replayed.then(|| (0..rows * k).map(|i| ((i / k + 2 * (i % k)) % experts) as u32).collect());
                let bias = random(5, &[experts]);
                let routes = routed(scoring, &logits, Some(bias.data()), k, replay.as_deref());
                let (dw, ds) = (random(2, &[rows, k]), random(3, &[rows, experts]));
                let mut found = Tensor::default();
                backward(scoring, &routes, dw.data(), Some(&ds), &mut found);
                assert_close(found.data(), &autograd(scoring, &logits, &routes, &dw, &ds), 1e-5, 1e-6);
                oracle::assert_slopes(&[&logits], &[&dw, &ds], &[&found], 1e-2, 2e-3, |v| {
                    let again = routed(scoring, &v[0], None, k, Some(&routes.experts));
                    vec![Tensor::from_vec(again.weights, &[rows, k]), again.scores]
                });
                let mut without = Tensor::default();
                backward(scoring, &routes, dw.data(), None, &mut without);
                let none = Tensor::zeros(&[rows, experts]);
                assert_close(without.data(), &autograd(scoring, &logits, &routes, &dw, &none), 1e-5, 1e-6);
            }
        }
    }

    #[test]
    fn ties_go_to_the_lower_index() {
        let routes = routed(Scoring::Softmax, &Tensor::from_vec(vec![1.0, 2.0, 2.0, 1.0, 2.0], &[1, 5]), None, 4, None);
        assert_eq!(routes.experts, [1, 2, 4, 0]);
    }

    #[test]
    fn the_bias_selects_but_never_weighs() {
        let logits = Tensor::from_vec(vec![0.0, 0.0, 0.0, 3.0], &[1, 4]);
        let routes = routed(Scoring::SigmoidBias, &logits, Some(&[0.0, 0.0, 9.0, -9.0]), 2, None);
        assert_eq!(routes.experts, [2, 0]);
        assert_eq!(routes.weights, [0.5, 0.5]);
    }

    #[test]
    fn a_replayed_expert_outside_the_top_keeps_its_weight_and_gradient() {
        for scoring in BOTH {
            let logits = Tensor::from_vec(vec![3.0, 2.0, -1.0, -2.0], &[1, 4]);
            let routes = routed(scoring, &logits, None, 2, Some(&[3, 0]));
            assert_eq!(routes.experts, [3, 0]);
            let expected = plain::weights(&plain::scores(scoring, logits.data()), &[3, 0]);
            assert_close(&routes.weights, &expected, 1e-5, 0.0);
            let mut d_logits = Tensor::default();
            backward(scoring, &routes, &[1.0, 0.0], None, &mut d_logits);
            assert!(d_logits.data()[3] > 1e-3, "gradient {:?}", d_logits.data());
        }
    }

    #[test]
    fn vanished_scores_give_finite_weights_and_gradients() {
        for (scoring, logits) in [
            (Scoring::Softmax, vec![200.0, -200.0, -200.0]),
            (Scoring::SigmoidBias, vec![-200.0, -200.0, -200.0]),
            (Scoring::SigmoidBias, vec![-60.0, -61.0, -62.0]),
        ] {
            let routes = routed(scoring, &Tensor::from_vec(logits, &[1, 3]), None, 2, Some(&[1, 2]));
            let mut d_logits = Tensor::default();
            backward(scoring, &routes, &[1.0, -1.0], None, &mut d_logits);
            assert!(routes.weights.iter().chain(d_logits.data()).all(|x| x.is_finite()));
        }
        let small = Tensor::from_vec(vec![-40.0, -41.0, -200.0], &[1, 3]);
        let routes = routed(Scoring::SigmoidBias, &small, None, 2, None);
        assert_close(&[routes.weights.iter().sum::<f32>()], &[1.0], 1e-6, 0.0);
    }

    #[test]
    fn a_row_of_nan_still_names_distinct_experts() {
        let logits = Tensor::from_vec(vec![f32::NAN; 4], &[1, 4]);
        let routes = routed(Scoring::Softmax, &logits, None, 2, None);
        assert_eq!(routes.experts, [0, 1]);
        assert!(routes.weights.iter().all(|w| w.is_nan()));
    }

    #[test]
    fn balanced_top_2_of_8_costs_2() {
        let replay: Vec<u32> = (0..8u32).flat_map(|t| [t, (t + 3) % 8]).collect();
        let routes = routed(Scoring::Softmax, &Tensor::zeros(&[8, 8]), None, 2, Some(&replay));
        assert_close(&[balance_loss(&routes, &[3; 8], 1.0, None)], &[2.0], 1e-6, 0.0);
        let crowded = routed(Scoring::Softmax, &Tensor::zeros(&[8, 8]), None, 2, Some(&[5, 2].repeat(8)));
        assert_close(&[balance_loss(&crowded, &[1; 8], 1.0, None)], &[2.0], 1e-6, 0.0); // scores are still even
        let empty = routed(Scoring::Softmax, &Tensor::zeros(&[0, 8]), None, 2, None);
        assert_eq!(balance_loss(&empty, &[], 1.0, None), 0.0);
    }

    /// A row used u times weighs what u equal rows weigh, in the value and in the gradient; both agree with the oracles.
    #[test]
    fn the_balance_loss_weighs_rows_by_their_uses() {
        let (experts, k, coefficient) = (5, 2, 0.3);
        for scoring in BOTH {
            let logits = random(1, &[3, experts]);
            let routes = routed(scoring, &logits, None, k, None);
            let uses = [1, 4, 2];
            let mut d_scores = Tensor::zeros(&[3, experts]);
            let loss = balance_loss(&routes, &uses, coefficient, Some(&mut d_scores));

            let spread: Vec<usize> = (0..3).flat_map(|t| vec![t; uses[t] as usize]).collect();
            let rows: Vec<f32> = spread.iter().flat_map(|&t| logits.row(t).to_vec()).collect();
            let single = routed(scoring, &Tensor::from_vec(rows, &[7, experts]), None, k, None);
            let mut d_single = Tensor::zeros(&[7, experts]);
            let single_loss = balance_loss(&single, &[1; 7], coefficient, Some(&mut d_single));
            assert_close(&[loss], &[single_loss], 1e-6, 0.0);
            for e in 0..experts {
                for t in 0..3 {
                    let sum: f32 = (0..7).filter(|&i| spread[i] == t).map(|i| d_single.row(i)[e]).sum();
                    assert_close(&[d_scores.row(t)[e]], &[sum], 1e-5, 0.0);
                }
            }

            let mut d_logits = Tensor::default();
            backward(scoring, &routes, &[0.0; 6], Some(&d_scores), &mut d_logits);
            let weight = Tensor::from_vec(vec![coefficient], &[1]);
            oracle::assert_slopes(&[&logits], &[&weight], &[&d_logits], 1e-2, 2e-3, |v| {
                let again = routed(scoring, &v[0], None, k, Some(&routes.experts));
                vec![Tensor::from_vec(vec![balance_loss(&again, &uses, 1.0, None)], &[1])]
            });
        }
    }

    #[test]
    fn bits_depend_neither_on_threads_nor_on_company() {
        for scoring in BOTH {
            let logits = random(1, &[900, 32]);
            let run = |threads, rows: usize| {
                let part = Tensor::from_vec(logits.data()[..rows * 32].to_vec(), &[rows, 32]);
                Pool::new(threads).expect("threads").run(|| {
                    let routes = routed(scoring, &part, None, 4, None);
                    let mut d_logits = Tensor::default();
                    backward(scoring, &routes, &routes.weights, None, &mut d_logits);
                    (routes, d_logits)
                })
            };
            let whole = run(1, 900);
            assert_eq!(whole, run(3, 900));
            for rows in [1, 2, 3, 17, 64] {
                let part = run(1, rows);
                assert_eq!(part.0.experts, whole.0.experts[..rows * 4]);
                assert_eq!(part.0.weights, whole.0.weights[..rows * 4]);
            }
        }
    }

    #[test]
    #[should_panic(expected = "a replayed route is 2 experts for each of 3 rows")]
    fn a_replay_of_another_length_is_refused() {
        routed(Scoring::Softmax, &Tensor::zeros(&[3, 4]), None, 2, Some(&[0, 1]));
    }
}
