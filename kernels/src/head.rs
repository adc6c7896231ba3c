//! Log-probs of predictions straight from hidden states and head: no `[T, V]` array ever exists; the vocabulary passes in tiles.
//!
//! Rows that predict are gathered in blocks. A block meets the head's columns tile by tile: a product into a small scratch, and a
//! running maximum, sum and moment a row (Milakov & Gimelshein, arXiv:1805.02867). The tiles follow from V alone, so a row's
//! bits are the same in every block; backward makes the tiles again. The most probable tokens of a row, where wanted, are kept
//! in the same pass.

use std::ops::Range;

use crate::{
    Prediction, Tensor,
    blocks::{Rows, for_rows},
    matrix::{Matrix, Write, multiply, multiply_in},
    scratch,
    simd::{self, Simd, dispatch, exp},
};

/// Most columns a tile. Vocabularies up to it take one.
const TILE: usize = 1024;

/// Elements of logits at hand at a time.
const BLOCK: usize = 1024 * 1024;

/// What [`forward`] finds, one entry a prediction.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scores {
    /// Natural log-prob of the target at the given temperature.
    pub logprob: Vec<f32>,
    /// Entropy of the row's distribution, nats.
    pub entropy: Vec<f32>,
    /// Log of the softmax's denominator over logits / temperature, maximum added back: kept for backward.
    pub lse: Vec<f32>,
    /// The row's most probable tokens with their log-probs, greatest logit first, equal ones by id: as many a prediction as were
    /// wanted, or the whole vocabulary where it is smaller.
    pub top: Vec<(u32, f32)>,
}

/// Scores `predictions` (sorted by row) of `hidden[T, H]` under `head[H, V]`, and lists the `top` most probable tokens of each; logits
/// are divided by `temperature` > 0.
///
/// Panics where predictions are not sorted, or name rows or targets that are not there.
pub fn forward(
    hidden: &Tensor,
    head: &Tensor,
    predictions: &[Prediction],
    temperature: f32,
    top: usize,
    scores: &mut Scores,
) {
    let (width, inverse, top) = (hidden.cols(), inverse(temperature), top.min(head.cols()));
    assert!(predictions.iter().all(|p| (p.target as usize) < head.cols()), "targets are below {}", head.cols());
    for values in [&mut scores.logprob, &mut scores.entropy, &mut scores.lse] {
        values.resize(predictions.len(), 0.0);
    }
    scores.top.resize(predictions.len() * top, (0, 0.0));
    let rows = predicting_rows(predictions, |_| true);
    let tiles = Tiles::of(head.cols());
    let (mut stats, mut best) = (Vec::new(), Vec::new());
    for block in rows.chunks(tiles.rows()) {
        scratch::with(block.len() * (width + tiles.width), |memory| {
            let (x, memory) = memory.split_at_mut(block.len() * width);
            gather(hidden, predictions, block, x);
            let x = Matrix::new(x, block.len(), width);
            stats.clear();
            stats.resize(block.len(), Softmax::EMPTY);
            best.resize(block.len() * top, (0, 0.0));
            for (from, to) in tiles.ranges() {
                let n = to - from;
                let logits = &mut memory[..block.len() * n];
                multiply(x, matrix(head).columns(from, to), Write::Over, logits, n);
                for_rows(block.len(), 4 * n, Rows { data: &mut stats, cols: 1 }, |first, stats| {
                    let logits = &logits[first * n..][..stats.data.len() * n];
                    scratch::with(2 * n, |temporary| dispatch!(|s| absorb(s, logits, inverse, stats.data, temporary)));
                });
                if top > 0 {
                    for_rows(block.len(), n, Rows { data: &mut best, cols: top }, |first, best| {
                        let rows = logits[first * n..].chunks_exact(n).zip(best.data.chunks_exact_mut(top));
                        dispatch!(|s| for (row, best) in rows {
                            rank(s, row, from, best);
                        });
                    });
                }
                for (row, group) in logits.chunks_exact(n).zip(block) {
                    for p in group.clone() {
                        if let Some(logit) = (predictions[p].target as usize).checked_sub(from).and_then(|i| row.get(i))
                        {
                            scores.logprob[p] = *logit;
                        }
                    }
                }
            }
        });
        for (i, (group, softmax)) in block.iter().zip(&stats).enumerate() {
            let logprob = |logit| logprob(logit, inverse, softmax.most, softmax.sum.ln());
            let best = &mut best[i * top..(i + 1) * top];
            best.iter_mut().for_each(|(_, x)| *x = logprob(*x));
            for p in group.clone() {
                scores.logprob[p] = logprob(scores.logprob[p]);
                scores.entropy[p] = softmax.entropy();
                scores.lse[p] = softmax.lse();
                scores.top[p * top..(p + 1) * top].copy_from_slice(best);
            }
        }
    }
}

/// From `d_logprob` (one a prediction; log-prob only, entropy has no gradient here): `d_hidden[T, H]` overwritten, `d_head[H, V]` added to.
/// Rows whose gradients are all 0 cost nothing. Logits are f32, as in [`forward`]; the gradients' two products run in the dtype of `d_head`.
pub fn backward(
    hidden: &Tensor,
    head: &Tensor,
    predictions: &[Prediction],
    temperature: f32,
    scores: &Scores,
    d_logprob: &[f32],
    d_hidden: &mut Tensor,
    d_head: &mut Tensor,
) {
    let (width, vocabulary, inverse) = (hidden.cols(), head.cols(), inverse(temperature));
    assert!(d_logprob.len() == predictions.len() && scores.lse.len() == predictions.len(), "a gradient a prediction");
    assert_eq!(d_head.len(), head.len(), "the head's gradient has its shape");
    let dtype = d_head.dtype();
    d_hidden.resize(&[hidden.rows(), width]);
    d_hidden.fill(0.0);
    let rows = predicting_rows(predictions, |p| d_logprob[p] != 0.0);
    let tiles = Tiles::of(vocabulary);
    for block in rows.chunks(tiles.rows()) {
        scratch::with(block.len() * (2 * width + tiles.width), |memory| {
            let (x, memory) = memory.split_at_mut(block.len() * width);
            let (dx, memory) = memory.split_at_mut(block.len() * width);
            gather(hidden, predictions, block, x);
            let x = Matrix::new(x, block.len(), width);
            for (from, to) in tiles.ranges() {
                let n = to - from;
                let logits = &mut memory[..block.len() * n];
                let tile = matrix(head).columns(from, to);
                multiply(x, tile, Write::Over, logits, n);
                for_rows(block.len(), 4 * n, Rows { data: logits, cols: n }, |first, logits| {
                    for (row, group) in logits.data.chunks_exact_mut(n).zip(&block[first..]) {
                        let d: f32 = d_logprob[group.clone()].iter().sum();
                        dispatch!(|s| weighed_probabilities(s, row, inverse, scores.lse[group.start], -d * inverse));
                        for p in group.clone() {
                            let here = (predictions[p].target as usize).checked_sub(from).and_then(|i| row.get_mut(i));
                            here.into_iter().for_each(|x| *x += d_logprob[p] * inverse);
                        }
                    }
                });
                let d_logits = Matrix::new(logits, block.len(), n);
                let write = if from == 0 { Write::Over } else { Write::Add };
                multiply_in(dtype, d_logits, tile.transposed(), write, dx, width);
                multiply_in(dtype, x.transposed(), d_logits, Write::Add, &mut d_head.data_mut()[from..], vocabulary);
            }
            for (group, dx) in block.iter().zip(dx.chunks_exact(width)) {
                d_hidden.row_mut(predictions[group.start].row as usize).copy_from_slice(dx);
            }
        });
    }
}

/// The natural log-probs of the whole vocabulary for the rows of `hidden[N, H]`, for sampling: `out[N, V]` at `temperature`. The entry of a
/// token equals [`forward`]'s log-prob bit for bit, whatever N.
pub fn distributions(hidden: &Tensor, head: &Tensor, temperature: f32, out: &mut Tensor) {
    let (vocabulary, inverse) = (head.cols(), inverse(temperature));
    out.resize(&[hidden.rows(), vocabulary]);
    multiply(matrix(hidden), matrix(head), Write::Over, out.data_mut(), vocabulary);
    let tiles = Tiles::of(vocabulary);
    for_rows(hidden.rows(), 4 * vocabulary, Rows { data: out.data_mut(), cols: vocabulary }, |_, out| {
        scratch::with(2 * tiles.width, |temporary| {
            for row in out.data.chunks_exact_mut(vocabulary) {
                let mut softmax = [Softmax::EMPTY];
                dispatch!(|s| {
                    for (from, to) in tiles.ranges() {
                        absorb(s, &row[from..to], inverse, &mut softmax, temporary);
                    }
                    let (most, log) = (softmax[0].most, softmax[0].sum.ln());
                    row.iter_mut().for_each(|x| *x = logprob(*x, inverse, most, log));
                });
            }
        });
    });
}

fn inverse(temperature: f32) -> f32 {
    assert!(temperature > 0.0, "temperature {temperature} is not above 0: greedy choices are made from temperature 1");
    1.0 / temperature
}

fn matrix(t: &Tensor) -> Matrix<'_> {
    Matrix::new(t.data(), t.rows(), t.cols())
}

/// The predictions of each row that has any which `counts`, as runs of indices.
fn predicting_rows(predictions: &[Prediction], counts: impl Fn(usize) -> bool) -> Vec<Range<usize>> {
    let mut rows = Vec::new();
    let mut start = 0;
    for run in predictions.chunk_by(|a, b| a.row == b.row) {
        let group = start..start + run.len();
        start = group.end;
        let sorted = predictions.get(start).is_none_or(|next| next.row > run[0].row);
        assert!(sorted, "predictions are sorted by row");
        if group.clone().any(&counts) {
            rows.push(group);
        }
    }
    rows
}

/// Copies the block's hidden rows together.
fn gather(hidden: &Tensor, predictions: &[Prediction], block: &[Range<usize>], x: &mut [f32]) {
    for (to, group) in x.chunks_exact_mut(hidden.cols()).zip(block) {
        to.copy_from_slice(hidden.row(predictions[group.start].row as usize));
    }
}

/// How a vocabulary is cut: into tiles of one width (a multiple of the lanes of a sum), the last one narrower.
#[derive(Clone, Copy)]
struct Tiles {
    vocabulary: usize,
    width: usize,
}

impl Tiles {
    fn of(vocabulary: usize) -> Self {
        let count = vocabulary.div_ceil(TILE).max(1);
        let width = vocabulary.div_ceil(count).next_multiple_of(simd::LANES);
        Self { vocabulary, width: width.min(vocabulary) }
    }

    /// Rows of a block.
    fn rows(self) -> usize {
        (BLOCK / self.width.max(1)).max(1)
    }

    /// First and one past the last column of each tile.
    fn ranges(self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.vocabulary)
            .step_by(self.width.max(1))
            .map(move |from| (from, (from + self.width).min(self.vocabulary)))
    }
}

/// A row's softmax over the tiles seen so far.
#[derive(Clone, Copy)]
struct Softmax {
    /// Greatest scaled logit.
    most: f32,
    /// Σ e^(x − most).
    sum: f32,
    /// Σ e^(x − most) · (x − most).
    moment: f32,
}

impl Softmax {
    const EMPTY: Self = Self { most: f32::NEG_INFINITY, sum: 0.0, moment: 0.0 };

    /// Both as seen under their common maximum.
    #[inline(always)]
    fn join(self, other: Self) -> Self {
        if self.sum == 0.0 {
            return other;
        }
        let most = if other.most > self.most { other.most } else { self.most };
        let under = |part: Self| {
            let (shift, shrink) = (part.most - most, (part.most - most).exp());
            (part.sum * shrink, (part.moment + part.sum * shift) * shrink)
        };
        let ((sum, moment), (more, further)) = (under(self), under(other));
        Self { most, sum: sum + more, moment: moment + further }
    }

    fn entropy(&self) -> f32 {
        self.sum.ln() - self.moment / self.sum
    }

    fn lse(&self) -> f32 {
        self.most + self.sum.ln()
    }
}

/// The maximum goes before the logarithm of the sum, so that large logits cost no digits.
#[inline(always)]
fn logprob(logit: f32, inverse: f32, most: f32, log_sum: f32) -> f32 {
    logit * inverse - most - log_sum
}

/// Takes a tile of logits, one row a softmax, into the softmaxes.
#[inline(always)]
fn absorb<S: Simd>(s: S, logits: &[f32], inverse: f32, softmaxes: &mut [Softmax], temporary: &mut [f32]) {
    let n = logits.len() / softmaxes.len().max(1);
    let (shifted, powers) = temporary[..2 * n].split_at_mut(n);
    for (row, softmax) in logits.chunks_exact(n.max(1)).zip(softmaxes) {
        let most = simd::max(s, row) * inverse;
        for (d, x) in shifted.iter_mut().zip(row) {
            *d = x * inverse - most;
        }
        simd::update(
            s,
            shifted,
            powers,
            #[inline(always)]
            |x, _| exp(s, x),
        );
        let tile = Softmax { most, sum: simd::sum(s, powers), moment: simd::dot(s, powers, shifted) };
        *softmax = softmax.join(tile);
    }
}

/// Takes a row's tile of logits, the first that of token `from`, into its best so far: greatest first, equal ones by id. NaN has no
/// place of its own; a row with one has no log-probs either.
#[inline(always)]
fn rank<S: Simd>(s: S, logits: &[f32], from: usize, best: &mut [(u32, f32)]) {
    const CHUNK: usize = 4 * simd::LANES;
    for (seen, chunk) in (from..).step_by(CHUNK).zip(logits.chunks(CHUNK)) {
        if seen >= best.len() && simd::max(s, chunk) <= best[best.len() - 1].1 {
            continue; // as most chunks of a large vocabulary
        }
        for (id, &logit) in (seen..).zip(chunk) {
            let kept = id.min(best.len());
            let place = best[..kept].partition_point(|(_, other)| *other >= logit);
            if place < best.len() {
                let end = (kept + 1).min(best.len());
                best[place..end].rotate_right(1);
                best[place] = (id as u32, logit);
            }
        }
    }
}

/// `x = weight · e^(x · inverse − lse)`.
#[inline(always)]
fn weighed_probabilities<S: Simd>(s: S, x: &mut [f32], inverse: f32, lse: f32, weight: f32) {
    let (inverse, lse, weight) = (s.splat_f32s(inverse), s.splat_f32s(-lse), s.splat_f32s(weight));
    simd::map(
        s,
        x,
        #[inline(always)]
        |x| s.mul_f32s(weight, exp(s, s.mul_add_f32s(x, inverse, lse))),
    );
}

/// The same in float64 from whole rows of logits.
#[cfg(test)]
pub(crate) mod plain {
    use crate::{Prediction, Tensor};

    /// Log-probs of the whole vocabulary for one row.
    pub(crate) fn distribution(hidden: &[f32], head: &Tensor, temperature: f32) -> Vec<f64> {
        let logit = |v: usize| {
            let terms = hidden.iter().enumerate().map(|(i, &h)| f64::from(h) * f64::from(head.row(i)[v]));
            terms.sum::<f64>() / f64::from(temperature)
        };
        let logits: Vec<f64> = (0..head.cols()).map(logit).collect();
        let most = logits.iter().fold(f64::NEG_INFINITY, |m, &x| m.max(x));
        let lse = most + logits.iter().map(|x| (x - most).exp()).sum::<f64>().ln();
        logits.iter().map(|x| x - lse).collect()
    }

    /// The most probable tokens of one row by sorting all.
    pub(crate) fn top(distribution: &[f64], top: usize) -> Vec<(u32, f64)> {
        let mut all: Vec<(u32, f64)> = (0..).zip(distribution.iter().copied()).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1)); // stable: equal ones stay by id
        all.truncate(top);
        all
    }

    pub(crate) fn backward(
        hidden: &Tensor,
        head: &Tensor,
        predictions: &[Prediction],
        temperature: f32,
        d_logprob: &[f32],
    ) -> (Vec<f64>, Vec<f64>) {
        let (width, vocabulary) = (hidden.cols(), head.cols());
        let (mut d_hidden, mut d_head) = (vec![0.0; hidden.len()], vec![0.0; head.len()]);
        for (p, &d) in predictions.iter().zip(d_logprob) {
            let row = p.row as usize;
            let logprobs = distribution(hidden.row(row), head, temperature);
            for v in 0..vocabulary {
                let hit = f64::from(u8::from(v == p.target as usize));
                let d_logit = f64::from(d) * (hit - logprobs[v].exp()) / f64::from(temperature);
                for i in 0..width {
                    d_hidden[row * width + i] += d_logit * f64::from(head.row(i)[v]);
                    d_head[i * vocabulary + v] += d_logit * f64::from(hidden.row(row)[i]);
                }
            }
        }
        (d_hidden, d_head)
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

    /// `count` predictions over `rows` rows, some rows with several, some with none.
    fn predictions(seed: u64, rows: usize, vocabulary: usize, count: usize) -> Vec<Prediction> {
        let draws = random(seed, &[2 * count]);
        let below = |x: f32, n: usize| ((x + 1.0) * 0.5 * n as f32) as usize % n;
        let draw = |i: usize| Prediction {
            row: below(draws.data()[2 * i], rows) as u32,
            target: below(draws.data()[2 * i + 1], vocabulary) as u32,
        };
        let mut all: Vec<_> = (0..count).map(draw).collect();
        all.sort();
        all.dedup();
        all
    }

    fn scored(hidden: &Tensor, head: &Tensor, predictions: &[Prediction], temperature: f32) -> Scores {
        listed(hidden, head, predictions, temperature, 0)
    }

    fn listed(hidden: &Tensor, head: &Tensor, predictions: &[Prediction], temperature: f32, top: usize) -> Scores {
        let mut scores = Scores::default();
        forward(hidden, head, predictions, temperature, top, &mut scores);
        scores
    }

    fn gradients(
        hidden: &Tensor,
        head: &Tensor,
        predictions: &[Prediction],
        temperature: f32,
        d_logprob: &[f32],
    ) -> (Tensor, Tensor) {
        let scores = scored(hidden, head, predictions, temperature);
        let (mut d_hidden, mut d_head) = (Tensor::from_vec(vec![f32::NAN], &[1]), Tensor::zeros(head.shape()));
        backward(hidden, head, predictions, temperature, &scores, d_logprob, &mut d_hidden, &mut d_head);
        (d_hidden, d_head)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn equals_its_twin(
            rows in 1usize..12, width in 1usize..20, vocabulary in prop_oneof![4 => 1usize..70, 1 => 1020usize..1060],
            count in 0usize..20, temperature in prop_oneof![Just(1.0f32), 0.3f32..3.0], seed in 0u64..1000,
        ) {
            let (hidden, head) = (random(seed, &[rows, width]), random(seed + 1, &[width, vocabulary]));
            let predictions = predictions(seed + 2, rows, vocabulary, count);
            let scores = scored(&hidden, &head, &predictions, temperature);
            for (i, p) in predictions.iter().enumerate() {
                let truth = plain::distribution(hidden.row(p.row as usize), &head, temperature);
                assert_close(&[scores.logprob[i]], &[truth[p.target as usize]], 1e-5, 1e-5);
                let entropy: f64 = truth.iter().map(|l| -l * l.exp()).sum();
                assert_close(&[scores.entropy[i]], &[entropy], 1e-5, 1e-5);
            }
            let d_logprob = random(seed + 3, &[predictions.len()]);
            let (d_hidden, d_head) = gradients(&hidden, &head, &predictions, temperature, d_logprob.data());
            let twin = plain::backward(&hidden, &head, &predictions, temperature, d_logprob.data());
            assert_close(d_hidden.data(), &twin.0, 1e-4, 1e-5);
            assert_close(d_head.data(), &twin.1, 1e-4, 1e-5);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn the_top_equals_sorting_the_whole_distribution(
            rows in 1usize..12, width in 1usize..20,
            vocabulary in prop_oneof![4 => 1usize..200, 1 => 1020usize..1060, 1 => 2500usize..2600],
            count in 1usize..20, top in 0usize..=20, ties in any::<bool>(), temperature in prop_oneof![Just(1.0f32), 0.3f32..3.0],
            seed in 0u64..1000,
        ) {
            let (hidden, mut head) = (random(seed, &[rows, width]), random(seed + 1, &[width, vocabulary]));
            if ties {
                // Few distinct columns, so that most logits have equals, in other tiles too.
                for line in head.data_mut().chunks_exact_mut(vocabulary) {
                    (0..vocabulary).for_each(|v| line[v] = line[v % 7 % vocabulary]);
                }
            }
            let predictions = predictions(seed + 2, rows, vocabulary, count);
            let scores = listed(&hidden, &head, &predictions, temperature, top);
            let (mut logits, mut logprobs) = (Tensor::default(), Tensor::default());
            crate::linear::forward(&hidden, &head, &mut logits);
            distributions(&hidden, &head, temperature, &mut logprobs);
            let top = top.min(vocabulary);
            prop_assert_eq!(scores.top.len(), predictions.len() * top);
            for (i, p) in predictions.iter().enumerate() {
                let (row, found) = (p.row as usize, &scores.top[i * top..(i + 1) * top]);
                let exact: Vec<f64> = logits.row(row).iter().map(|&x| x.into()).collect();
                let sorted = plain::top(&exact, top);
                let bits = |id: u32, logprob: f32| (id, logprob.to_bits());
                let truth: Vec<_> = sorted.iter().map(|(id, _)| bits(*id, logprobs.row(row)[*id as usize])).collect();
                prop_assert_eq!(found.iter().map(|(id, x)| bits(*id, *x)).collect::<Vec<_>>(), truth);
                let twin = plain::distribution(hidden.row(row), &head, temperature);
                for ((id, logprob), (_, expected)) in found.iter().zip(plain::top(&twin, top)) {
                    assert_close(&[*logprob], &[expected], 1e-5, 1e-5);
                    assert_close(&[twin[*id as usize]], &[expected], 1e-5, 1e-5);
                }
            }
        }
    }

    #[test]
    fn equal_logits_are_listed_by_id_and_a_small_vocabulary_whole() {
        let (hidden, head) = (Tensor::from_vec(vec![1.0], &[1, 1]), Tensor::from_vec(vec![7.0, 9.0, 7.0], &[1, 3]));
        let two = [Prediction { row: 0, target: 0 }, Prediction { row: 0, target: 2 }];
        let ids = |top| listed(&hidden, &head, &two, 1.0, top).top.iter().map(|(id, _)| *id).collect::<Vec<_>>();
        assert_eq!([ids(0), ids(2), ids(20)], [vec![], vec![1, 0, 1, 0], vec![1, 0, 2, 1, 0, 2]]);
        let infinite = Tensor::from_vec(vec![f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY], &[1, 3]);
        let scores = listed(&hidden, &infinite, &two[..1], 1.0, 2);
        assert_eq!(scores.top, [(1, 0.0), (0, f32::NEG_INFINITY)]);
        let nan = Tensor::from_vec(vec![f32::NAN; 90], &[1, 90]);
        assert!(listed(&hidden, &nan, &two[..1], 1.0, 20).top.iter().all(|(_, logprob)| logprob.is_nan()));
    }

    #[test]
    fn gradients_agree_with_the_oracles() {
        for (rows, width, vocabulary, count, temperature) in
            [(1, 3, 4, 1, 1.0), (5, 8, 14, 9, 0.7), (4, 6, 1030, 7, 1.0)]
        {
            let (hidden, head) = (random(1, &[rows, width]), random(2, &[width, vocabulary]));
            let predictions = predictions(3, rows, vocabulary, count);
            let n = predictions.len();
            let d_logprob = random(4, &[n]);
            let (d_hidden, d_head) = gradients(&hidden, &head, &predictions, temperature, d_logprob.data());
            let found = oracle::autograd(&[&hidden, &head], &[&d_logprob], |v| {
                let device = v[0].device();
                let ids = |f: fn(&Prediction) -> u32| {
                    candle::Tensor::from_vec(predictions.iter().map(f).collect::<Vec<_>>(), n, device)
                };
                let logits = (v[0].matmul(&v[1])? / f64::from(temperature))?.index_select(&ids(|p| p.row)?, 0)?;
                let lse = logits.exp()?.sum(1)?.log()?;
                let target = logits.gather(&ids(|p| p.target)?.reshape((n, 1))?, 1)?.squeeze(1)?;
                Ok(vec![(target - lse)?])
            });
            assert_close(&scored(&hidden, &head, &predictions, temperature).logprob, &found.outputs[0], 1e-5, 1e-5);
            assert_close(d_hidden.data(), &found.gradients[0], 1e-4, 1e-5);
            assert_close(d_head.data(), &found.gradients[1], 1e-4, 1e-5);
            oracle::assert_slopes(&[&hidden, &head], &[&d_logprob], &[&d_hidden, &d_head], 3e-3, 5e-3, |v| {
                vec![Tensor::from_vec(scored(&v[0], &v[1], &predictions, temperature).logprob, &[n])]
            });
        }
    }

    /// Logits that are the head's own columns, for one row.
    fn of_logits(logits: &[f32], temperature: f32) -> Scores {
        let head = Tensor::from_vec(logits.to_vec(), &[1, logits.len()]);
        let all: Vec<_> = (0..logits.len() as u32).map(|target| Prediction { row: 0, target }).collect();
        scored(&Tensor::from_vec(vec![1.0], &[1, 1]), &head, &all, temperature)
    }

    #[test]
    fn temperature_divides_the_logits() {
        for (temperature, expected) in [
            (1.0, [-0.40761, -1.40761, -2.40761]),
            (0.5, [-0.14293, -2.14293, -4.14293]),
            (2.0, [-0.68027, -1.18027, -1.68027]),
        ] {
            assert_close(&of_logits(&[2.0, 1.0, 0.0], temperature).logprob, &expected, 0.0, 1e-5);
        }
    }

    #[test]
    fn four_equal_logits_cost_their_logarithm() {
        let scores = of_logits(&[7.0; 4], 1.0);
        assert_close(&scores.logprob, &[-1.386294; 4], 1e-6, 0.0);
        assert_close(&scores.entropy, &[1.386294; 4], 1e-6, 0.0);
        let (hidden, head) = (Tensor::from_vec(vec![1.0], &[1, 1]), Tensor::from_vec(vec![7.0; 4], &[1, 4]));
        let (_, d_head) = gradients(&hidden, &head, &[Prediction { row: 0, target: 0 }], 1.0, &[-1.0]);
        assert_close(d_head.data(), &[-0.75, 0.25, 0.25, 0.25], 1e-6, 0.0);
    }

    #[test]
    fn huge_logits_keep_their_digits_and_nan_is_seen() {
        let scores = of_logits(&[10_000.0, 9_999.0, -10_000.0], 1.0);
        assert_close(&scores.logprob, &[-0.313_261_7, -1.313_261_7, -20_000.313], 1e-6, 0.0);
        assert!(of_logits(&[f32::NAN, 1.0, 2.0], 1.0).logprob.iter().all(|x| x.is_nan()));
    }

    #[test]
    fn a_distributions_entry_is_the_predictions_logprob_bit_for_bit() {
        for (width, vocabulary) in [(32, 14), (64, 300), (520, 40), (16, 2500)] {
            let (hidden, head) = (random(1, &[64, width]), random(2, &[width, vocabulary]));
            for temperature in [1.0, 0.7] {
                let all = predictions(3, 64, vocabulary, 200);
                let scores = scored(&hidden, &head, &all, temperature);
                for rows in [1, 2, 3, 17, 64] {
                    let some = Tensor::from_vec(hidden.data()[..rows * width].to_vec(), &[rows, width]);
                    let mut out = Tensor::default();
                    distributions(&some, &head, temperature, &mut out);
                    for (p, logprob) in all.iter().zip(&scores.logprob).filter(|(p, _)| (p.row as usize) < rows) {
                        assert_eq!(out.row(p.row as usize)[p.target as usize].to_bits(), logprob.to_bits());
                    }
                    let fewer: Vec<_> = all.iter().copied().filter(|p| (p.row as usize) < rows).collect();
                    assert_eq!(scored(&some, &head, &fewer, temperature).logprob, scores.logprob[..fewer.len()]);
                }
            }
        }
    }

    #[test]
    fn blocks_and_threads_leave_no_trace() {
        let (hidden, head) = (random(1, &[3000, 24]), random(2, &[24, 1100]));
        let all = predictions(3, 3000, 1100, 4000);
        assert!(predicting_rows(&all, |_| true).len() > Tiles::of(1100).rows(), "more than one block");
        let d_logprob = random(4, &[all.len()]);
        let run = |threads| {
            Pool::new(threads)
                .expect("threads")
                .run(|| (listed(&hidden, &head, &all, 1.0, 5), gradients(&hidden, &head, &all, 1.0, d_logprob.data())))
        };
        let (scores, (d_hidden, d_head)) = run(1);
        assert_eq!((scores.clone(), (d_hidden.clone(), d_head.clone())), run(3));
        for (i, p) in all.iter().enumerate().step_by(97) {
            let one = Tensor::from_vec(hidden.row(p.row as usize).to_vec(), &[1, 24]);
            let alone = listed(&one, &head, &[Prediction { row: 0, ..*p }], 1.0, 5);
            assert_eq!(alone.logprob[0].to_bits(), scores.logprob[i].to_bits());
            assert_eq!(alone.top, scores.top[5 * i..5 * (i + 1)]);
        }
        let twin = plain::backward(&hidden, &head, &all, 1.0, d_logprob.data());
        assert_close(d_hidden.data(), &twin.0, 1e-4, 1e-4);
        assert_close(d_head.data(), &twin.1, 1e-4, 1e-4);
    }

    #[test]
    fn rows_without_gradient_get_0_and_change_nothing() {
        let (hidden, head) = (random(1, &[6, 5]), random(2, &[5, 9]));
        let all: Vec<_> = (0..6).map(|row| Prediction { row, target: row }).collect();
        let (d_hidden, d_head) = gradients(&hidden, &head, &all, 1.0, &[0.0, 1.0, 0.0, 0.0, -0.5, 0.0]);
        let (_, d_head_of_two) = gradients(&hidden, &head, &[all[1], all[4]], 1.0, &[1.0, -0.5]);
        assert_eq!(d_head, d_head_of_two);
        assert!([0, 2, 3, 5].iter().all(|&r| d_hidden.row(r).iter().all(|&x| x == 0.0)));
    }

    #[test]
    #[should_panic(expected = "sorted by row")]
    fn unsorted_predictions_are_refused() {
        let all = [Prediction { row: 1, target: 0 }, Prediction { row: 0, target: 0 }];
        scored(&random(1, &[2, 3]), &random(2, &[3, 4]), &all, 1.0);
    }
}
