//! AdamW (Loshchilov & Hutter, arXiv:1711.05101), fused, with clipping by the global norm: one pass reads a gradient once and
//! writes parameter and moments. Which tensors decay, and the norm over all of them, are the caller's.

use crate::{
    blocks::{Rows, for_rows},
    simd::dispatch,
};
use rayon::prelude::*;

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

/// One step of one tensor. `t` is the step's number from 1; each gradient is multiplied by `grad_scale` as it is read.
/// With g the scaled gradient: m ← β₁m + (1−β₁)g, v ← β₂v + (1−β₂)g², p ← p(1 − lr·λ) − lr · m̂ / (√v̂ + eps), m̂ = m / (1−β₁ᵗ) and
/// v̂ = v / (1−β₂ᵗ). All slices are equally long.
pub fn step(settings: AdamW, t: u64, grad_scale: f32, param: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32]) {
    let len = param.len();
    assert!(grad.len() == len && m.len() == len && v.len() == len, "parameter, gradient and moments are equally long");
    let factors = Factors::new(settings, t, grad_scale);
    let elements = |data| Rows { data, cols: 1 };
    for_rows(len, 2, (elements(param), elements(m), elements(v)), |first, (param, m, v)| {
        let grad = &grad[first..first + param.data.len()];
        step_slice(factors, param.data, grad, m.data, v.data);
    });
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

fn step_slice(f: Factors, param: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32]) {
    dispatch!(|_s| {
        for (((p, &g), m), v) in param.iter_mut().zip(grad).zip(m).zip(v) {
            let g = g * f.grad;
            *m = f.betas.0 * *m + f.fresh.0 * g;
            *v = f.betas.1 * *v + f.fresh.1 * g * g;
            *p = *p * f.keep - f.rate * *m / (v.sqrt() * f.unbias + f.eps);
        }
    });
}

/// Elements a block of [`sum_of_squares`]; part of what its bits depend on.
const BLOCK: usize = 4096;

/// Sum of squares in f64, in fixed blocks.
pub fn sum_of_squares(x: &[f32]) -> f64 {
    if rayon::current_num_threads() == 1 || x.len() < 16 * BLOCK {
        return x.chunks(BLOCK).map(block_of_squares).sum();
    }
    let blocks: Vec<f64> = x.par_chunks(BLOCK).map(block_of_squares).collect();
    blocks.into_iter().sum()
}

fn block_of_squares(x: &[f32]) -> f64 {
    const LANES: usize = 16;
    let mut lanes = [0.0f64; LANES];
    dispatch!(|_s| {
        let (full, rest) = x.as_chunks::<LANES>();
        for chunk in full {
            for (lane, &x) in lanes.iter_mut().zip(chunk) {
                *lane += f64::from(x) * f64::from(x);
            }
        }
        for (lane, &x) in lanes.iter_mut().zip(rest) {
            *lane += f64::from(x) * f64::from(x);
        }
    });
    lanes.iter().sum()
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
        step(settings, 1, 1.0, &mut p, &[1.0], &mut m, &mut v);
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
                step(MINIMAX, t, 0.5, &mut p, grad.data(), &mut m, &mut v);
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
            Pool::new(1).expect("threads").run(|| step(MINIMAX, 1, 1.0, &mut p, &[scale], &mut m, &mut v));
            let expected = plain::step(MINIMAX, 1, 1.0, 0.0, f64::from(scale), 0.0, 0.0);
            assert_close(&p, &[expected.0], 1e-4, 0.0);
        }
    }

    #[test]
    fn bits_do_not_depend_on_threads() {
        let (grad, start) = (random(1, &[100_001]), random(2, &[100_001]));
        let run = |threads| {
            let (mut p, mut m, mut v) = (start.data().to_vec(), vec![0.0; start.len()], vec![0.0; start.len()]);
            let sum = Pool::new(threads).expect("threads").run(|| {
                step(MINIMAX, 3, 0.7, &mut p, grad.data(), &mut m, &mut v);
                sum_of_squares(grad.data())
            });
            (p, m, v, sum)
        };
        assert_eq!(run(1), run(3));
    }

    #[test]
    fn a_sum_of_squares_is_one() {
        assert_eq!(sum_of_squares(&[]), 0.0);
        assert_eq!(sum_of_squares(&[3.0, 4.0]), 25.0);
        let x = random(1, &[9001]);
        let truth: f64 = x.data().iter().map(|&x| f64::from(x).powi(2)).sum();
        assert_close(&[sum_of_squares(x.data())], &[truth], 1e-12, 0.0);
        assert_eq!(sum_of_squares(&[1e25, 1e25]), 2.0 * f64::from(1e25f32) * f64::from(1e25f32)); // past f32
    }
}
