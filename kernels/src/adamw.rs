//! AdamW (Loshchilov & Hutter, arXiv:1711.05101), fused, with clipping by the global norm: one pass reads a gradient once and
//! writes parameter and moments. Which tensors decay, and the norm over all of them, are the caller's.

use crate::{
    Tensor,
    blocks::{Rows, for_rows},
    matrix::pair,
    simd::dispatch,
};
use rayon::prelude::*;
use std::sync::atomic::{AtomicU64, Ordering};

/// Settings; MiniMax-M1's defaults are 0.9 / 0.95 / 1e-15 (arXiv:2506.13585 §3.2).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f32,
    /// Decay of the first and second moments.
    pub betas: (f32, f32),
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled: p is multiplied by 1 − lr · weight_decay first.
    pub weight_decay: f32,
}

/// One step of one tensor, which leaves `grad` at 0 for the next to be gathered. `t` is the step's number from 1; each gradient is
/// multiplied by `grad_scale` as it is read. With g the scaled gradient: m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)g²,
/// p ← p(1 − lr·λ) − lr · m̂ / (√v̂ + eps), m̂ = m / (1−β₁ᵗ) and v̂ = v / (1−β₂ᵗ). All slices are equally long.
///
/// Returns how many of the gradients that are not 0 are, scaled, smaller than eps: there eps decides the step.
pub fn step(
    settings: AdamW,
    t: u64,
    grad_scale: f32,
    param: &mut [f32],
    grad: &mut [f32],
    m: &mut [f32],
    v: &mut [f32],
) -> u64 {
    let len = param.len();
    assert!(grad.len() == len && m.len() == len && v.len() == len, "parameter, gradient and moments are equally long");
    let factors = Factors::new(settings, t, grad_scale);
    let elements = |data| Rows { data, cols: 1 };
    let small = AtomicU64::new(0); // a count: its bits do not depend on the order of addition
    let parts = [elements(param), elements(grad), elements(m), elements(v)];
    for_rows(len, 2, parts, |_, [param, grad, m, v]| {
        small.fetch_add(step_slice(factors, param.data, grad.data, m.data, v.data), Ordering::Relaxed);
    });
    small.into_inner()
}

/// What the elements of a step share, worked out in f64.
#[derive(Clone, Copy)]
struct Factors {
    grad: f32,
    betas: (f32, f32),
    fresh: (f32, f32), // 1 − β
    keep: f32,         // 1 − lr · λ
    rate: f32,         // lr / (1 − β₁ᵗ)
    unbias: f32,       // 1 / √(1 − β₂ᵗ)
    eps: f32,
}

impl Factors {
    fn new(settings: AdamW, t: u64, grad_scale: f32) -> Self {
        let (b1, b2) = (f64::from(settings.betas.0), f64::from(settings.betas.1));
        let t = i32::try_from(t).unwrap_or(i32::MAX);
        let lr = f64::from(settings.lr);
        Self {
            grad: grad_scale,
            betas: settings.betas,
            fresh: ((1.0 - b1) as f32, (1.0 - b2) as f32),
            keep: (1.0 - lr * f64::from(settings.weight_decay)) as f32,
            rate: (lr / (1.0 - b1.powi(t))) as f32,
            unbias: (1.0 / (1.0 - b2.powi(t)).sqrt()) as f32,
            eps: settings.eps,
        }
    }
}

/// [`step`] of a tensor; rounded elements kept beside it are made anew in the same pass.
pub fn step_tensor(settings: AdamW, t: u64, grad_scale: f32, param: &mut Tensor, arrays: [&mut Tensor; 3]) -> u64 {
    let [grad, m, v] = arrays.map(Tensor::data_mut);
    let Some((data, pairs, cols)) = param.with_pairs_mut() else {
        let small = step(settings, t, grad_scale, param.data_mut(), grad, m, v);
        param.round();
        return small;
    };
    let len = data.len();
    assert!(grad.len() == len && m.len() == len && v.len() == len, "parameter, gradient and moments are equally long");
    let factors = Factors::new(settings, t, grad_scale);
    let small = AtomicU64::new(0);
    let two_lines = |data| Rows { data, cols: 2 * cols };
    let parts = ([data, grad, m, v].map(two_lines), Rows { data: pairs, cols });
    for_rows(len / (2 * cols), 4 * cols, parts, |_, ([param, grad, m, v], pairs)| {
        let lines = param.data.chunks_exact_mut(2 * cols).zip(grad.data.chunks_exact_mut(2 * cols));
        let moments = m.data.chunks_exact_mut(2 * cols).zip(v.data.chunks_exact_mut(2 * cols));
        let mut here = 0;
        for (((param, grad), (m, v)), pairs) in lines.zip(moments).zip(pairs.data.chunks_exact_mut(cols)) {
            here += step_slice(factors, param, grad, m, v);
            let (first, second) = param.split_at(cols);
            dispatch!(|_s| for ((to, &x), &y) in pairs.iter_mut().zip(first).zip(second) {
                *to = pair(x, y);
            });
        }
        small.fetch_add(here, Ordering::Relaxed);
    });
    small.into_inner()
}

fn step_slice(f: Factors, param: &mut [f32], grad: &mut [f32], m: &mut [f32], v: &mut [f32]) -> u64 {
    let mut small = 0u64;
    dispatch!(|_s| {
        let blocks =
            param.chunks_mut(BLOCK).zip(grad.chunks_mut(BLOCK)).zip(m.chunks_mut(BLOCK)).zip(v.chunks_mut(BLOCK));
        for (((param, grad), m), v) in blocks {
            let mut here = 0u32;
            for (((p, grad), m), v) in param.iter_mut().zip(grad).zip(m).zip(v) {
                let g = *grad * f.grad;
                here += u32::from(*grad != 0.0 && g.abs() < f.eps);
                *grad = 0.0;
                *m = f.betas.0 * *m + f.fresh.0 * g;
                *v = f.betas.1 * *v + f.fresh.1 * g * g;
                *p = *p * f.keep - f.rate * *m / (v.sqrt() * f.unbias + f.eps);
            }
            small += u64::from(here);
        }
    });
    small
}

/// Elements a block of [`survey`]; part of what its bits depend on.
const BLOCK: usize = 4096;

/// What a gradient is, beside its first moment: sums over elements, in f64.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Survey {
    /// Σ g².
    pub squares: f64,
    /// Σ g · m.
    pub along: f64,
    /// Σ m².
    pub moment_squares: f64,
    /// Gradients that are not 0.
    pub nonzero: u64,
}

impl std::ops::Add for Survey {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self {
            squares: self.squares + other.squares,
            along: self.along + other.along,
            moment_squares: self.moment_squares + other.moment_squares,
            nonzero: self.nonzero + other.nonzero,
        }
    }
}

/// One pass over a gradient and its first moment, equally long, in fixed blocks.
pub fn survey(grad: &[f32], m: &[f32]) -> Survey {
    assert_eq!(grad.len(), m.len(), "gradient and moment are equally long");
    let block = |(grad, m): (&[f32], &[f32])| survey_block(grad, m);
    if rayon::current_num_threads() == 1 || grad.len() < 16 * BLOCK {
        return grad.chunks(BLOCK).zip(m.chunks(BLOCK)).map(block).fold(Survey::default(), |a, b| a + b);
    }
    let blocks: Vec<Survey> = grad.par_chunks(BLOCK).zip(m.par_chunks(BLOCK)).map(block).collect();
    blocks.into_iter().fold(Survey::default(), |a, b| a + b)
}

fn survey_block(grad: &[f32], m: &[f32]) -> Survey {
    const LANES: usize = 16;
    let [mut squares, mut along, mut moment_squares] = [[0.0f64; LANES]; 3];
    let mut nonzero = [0u32; LANES];
    dispatch!(|_s| {
        let ((grads, grad), (ms, m)) = (grad.as_chunks::<LANES>(), m.as_chunks::<LANES>());
        for (g, m) in grads.iter().zip(ms) {
            for l in 0..LANES {
                let (g, m) = (f64::from(g[l]), f64::from(m[l]));
                squares[l] += g * g;
                along[l] += g * m;
                moment_squares[l] += m * m;
                nonzero[l] += u32::from(g != 0.0);
            }
        }
        for (l, (&g, &m)) in grad.iter().zip(m).enumerate() {
            let (g, m) = (f64::from(g), f64::from(m));
            squares[l] += g * g;
            along[l] += g * m;
            moment_squares[l] += m * m;
            nonzero[l] += u32::from(g != 0.0);
        }
    });
    let sum = |lanes: [f64; LANES]| lanes.iter().sum();
    Survey {
        squares: sum(squares),
        along: sum(along),
        moment_squares: sum(moment_squares),
        nonzero: nonzero.iter().map(|&n| u64::from(n)).sum(),
    }
}

/// The same, an element at a time in float64, after the paper's algorithm 2.
#[cfg(test)]
pub(crate) mod plain {
    use super::AdamW;

    /// One element; returns its new parameter and moments.
    pub(crate) fn step(s: AdamW, t: u64, grad_scale: f32, p: f64, g: f64, m: f64, v: f64) -> (f64, f64, f64) {
        let (b1, b2) = (f64::from(s.betas.0), f64::from(s.betas.1));
        let (lr, g) = (f64::from(s.lr), g * f64::from(grad_scale));
        let m = b1 * m + (1.0 - b1) * g;
        let v = b2 * v + (1.0 - b2) * g * g;
        let (m_hat, v_hat) = (m / (1.0 - b1.powf(t as f64)), v / (1.0 - b2.powf(t as f64)));
        let decayed = p - lr * f64::from(s.weight_decay) * p;
        (decayed - lr * m_hat / (v_hat.sqrt() + f64::from(s.eps)), m, v)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        oracle::{assert_close, random},
        threads::Pool,
    };

    const MINIMAX: AdamW = AdamW { lr: 1e-3, betas: (0.9, 0.95), eps: 1e-15, weight_decay: 0.1 };

    #[test]
    fn the_first_step_of_a_unit_gradient() {
        let settings = AdamW { lr: 1e-3, betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.01 };
        let (mut p, mut m, mut v) = ([1.0f32], [0.0f32], [0.0f32]);
        assert_eq!(step(settings, 1, 1.0, &mut p, &mut [1.0], &mut m, &mut v), 0);
        assert_close(&p, &[0.99899], 0.0, 1e-7);
        assert_close(&m, &[0.1], 1e-6, 0.0);
        assert_close(&v, &[0.001], 2e-5, 0.0); // 0.999 is not an f32
    }

    #[test]
    fn equals_its_twin_over_many_steps() {
        for len in [0, 1, 37] {
            let start = random(1, &[len]);
            let (mut p, mut m, mut v) = (start.data().to_vec(), vec![0.0f32; len], vec![0.0f32; len]);
            let mut twin: Vec<(f64, f64, f64)> = p.iter().map(|&p| (f64::from(p), 0.0, 0.0)).collect();
            for t in 1..=200 {
                let grad = random(t + 1, &[len]);
                let mut spent = grad.data().to_vec();
                step(MINIMAX, t, 0.5, &mut p, &mut spent, &mut m, &mut v);
                assert!(spent.iter().all(|&g| g == 0.0));
                for (e, &g) in twin.iter_mut().zip(grad.data()) {
                    *e = plain::step(MINIMAX, t, 0.5, e.0, f64::from(g), e.1, e.2);
                }
            }
            let column = |f: fn(&(f64, f64, f64)) -> f64| twin.iter().map(f).collect::<Vec<_>>();
            assert_close(&p, &column(|e| e.0), 1e-4, 1e-5);
            assert_close(&m, &column(|e| e.1), 1e-4, 1e-6);
            assert_close(&v, &column(|e| e.2), 1e-4, 1e-7);
        }
    }

    /// Gradients as small as 1e-18 occur (arXiv:2506.13585 §3.2); their squares must not be flushed away.
    #[test]
    fn tiny_gradients_move_what_the_formula_says() {
        for scale in [1.0, 1e-5, 1e-12, 1e-18] {
            let (mut p, mut m, mut v) = ([0.0f32], [0.0f32], [0.0f32]);
            Pool::new(1).expect("threads").run(|| {
                let small = step(MINIMAX, 1, 1.0, &mut p, &mut [scale], &mut m, &mut v);
                assert_eq!(small, u64::from(scale < MINIMAX.eps));
            });
            let expected = plain::step(MINIMAX, 1, 1.0, 0.0, f64::from(scale), 0.0, 0.0);
            assert_close(&p, &[expected.0], 1e-4, 0.0);
        }
    }

    #[test]
    fn bits_do_not_depend_on_threads() {
        let (grad, start) = (random(1, &[100_001]), random(2, &[100_001]));
        let run = |threads| {
            let (mut p, mut m, mut v) = (start.data().to_vec(), vec![0.0; start.len()], vec![0.0; start.len()]);
            let seen = Pool::new(threads).expect("threads").run(|| {
                let small = step(MINIMAX, 3, 0.7, &mut p, &mut grad.data().to_vec(), &mut m, &mut v);
                (small, survey(grad.data(), &m))
            });
            (p, m, v, seen)
        };
        assert_eq!(run(1), run(3));
    }

    #[test]
    fn what_is_kept_rounded_follows_the_weights() {
        for shape in [vec![6, 10], vec![3, 4, 7], vec![2, 5, 3], vec![1, 1], vec![9]] {
            let mut param = random(1, &shape);
            param.set_dtype(crate::Dtype::Bf16);
            param.round();
            let mut plain = param.data().to_vec();
            let [mut grad, mut m, mut v] = [2, 3, 4].map(|seed| random(seed, &shape));
            v.data_mut().iter_mut().for_each(|v| *v = v.abs());
            let [mut a, mut b, mut c] = [&grad, &m, &v].map(|t| t.data().to_vec());
            let small = step_tensor(MINIMAX, 2, 0.5, &mut param, [&mut grad, &mut m, &mut v]);
            assert_eq!(small, step(MINIMAX, 2, 0.5, &mut plain, &mut a, &mut b, &mut c));
            assert_eq!((param.data(), m.data(), v.data(), grad.data()), (&plain[..], &b[..], &c[..], &a[..]));
            let mut anew = param.clone();
            anew.round();
            assert_eq!(param, anew, "{shape:?}");
        }
    }

    #[test]
    fn a_survey_is_its_sums() {
        assert_eq!(survey(&[], &[]), Survey::default());
        let found = survey(&[3.0, 4.0, 0.0], &[1.0, -1.0, 2.0]);
        assert_eq!(found, Survey { squares: 25.0, along: -1.0, moment_squares: 6.0, nonzero: 2 });
        let (x, m) = (random(1, &[9001]), random(2, &[9001]));
        let truth = |a: &Tensor, b: &Tensor| -> f64 {
            a.data().iter().zip(b.data()).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum()
        };
        let found = survey(x.data(), m.data());
        let sums = [found.squares, found.along, found.moment_squares];
        assert_close(&sums, &[truth(&x, &x), truth(&x, &m), truth(&m, &m)], 1e-12, 1e-12);
        let large = survey(&[1e25, 1e25], &[0.0, 0.0]); // past f32
        assert_eq!(large.squares, 2.0 * f64::from(1e25f32) * f64::from(1e25f32));
    }
}
