//! RMSNorm (Zhang & Sennrich, arXiv:1910.07467): y = x / sqrt(mean(x²) + eps) ⊙ weight, over the last dimension, or over each head's
//! part of it where the weight is a head wide (QK-norm).

use crate::{
    Tensor,
    blocks::{Rows, for_rows},
    scratch,
    simd::{Simd, dispatch, dot},
};

/// `out` from `x`, both `[T, n · H]`, and `weight[H]`: each run of H elements is normalised by itself. Statistics in f32.
pub fn forward(x: &Tensor, weight: &Tensor, eps: f32, out: &mut Tensor) {
    let width = weight.len();
    let rows = runs(x, width);
    out.resize(x.shape());
    for_rows(rows, 2 * width, Rows { data: out.data_mut(), cols: width }, |first, out| {
        let x = &x.data()[first * width..][..out.data.len()];
        dispatch!(|s| forward_rows(s, x, weight.data(), eps, out.data));
    });
}

/// `dx` overwritten, `d_weight[H]` added to. Statistics are recomputed from `x`.
pub fn backward(x: &Tensor, weight: &Tensor, eps: f32, d_out: &Tensor, dx: &mut Tensor, d_weight: &mut Tensor) {
    let width = weight.len();
    let rows = runs(x, width);
    assert_eq!(d_out.len(), x.len(), "one gradient an output");
    dx.resize(x.shape());
    // 1 / root mean square of each run.
    scratch::with(rows, |inverse| {
        let parts = (Rows { data: dx.data_mut(), cols: width }, Rows { data: &mut *inverse, cols: 1 });
        for_rows(rows, 4 * width, parts, |first, (dx, inverse)| {
            let here = first * width..first * width + dx.data.len();
            let (x, d_out) = (&x.data()[here.clone()], &d_out.data()[here]);
            dispatch!(|s| backward_rows(s, x, weight.data(), eps, d_out, dx.data, inverse.data));
        });
        for_rows(width, 2 * rows, Rows { data: d_weight.data_mut(), cols: 1 }, |first, d_weight| {
            dispatch!(|_s| weight_columns(x.data(), d_out.data(), inverse, width, first, d_weight.data));
        });
    });
}

fn runs(x: &Tensor, width: usize) -> usize {
    assert!(width > 0 && x.len().is_multiple_of(width), "{} elements in runs of {width}", x.len());
    x.len() / width
}

#[inline(always)]
fn inverse_root<S: Simd>(s: S, x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(s, x, x) / x.len() as f32 + eps).sqrt()
}

#[inline(always)]
fn forward_rows<S: Simd>(s: S, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    for (x, out) in x.chunks_exact(weight.len()).zip(out.chunks_exact_mut(weight.len())) {
        let inverse = inverse_root(s, x, eps);
        for ((o, x), w) in out.iter_mut().zip(x).zip(weight) {
            *o = x * inverse * w;
        }
    }
}

/// With r the inverse root: dx = r · (w ⊙ g) − x · r³ · mean(w ⊙ g ⊙ x).
#[inline(always)]
fn backward_rows<S: Simd>(
    s: S,
    x: &[f32],
    weight: &[f32],
    eps: f32,
    d_out: &[f32],
    dx: &mut [f32],
    inverses: &mut [f32],
) {
    let width = weight.len();
    let rows = x.chunks_exact(width).zip(d_out.chunks_exact(width)).zip(dx.chunks_exact_mut(width));
    for (((x, d_out), dx), kept) in rows.zip(inverses) {
        let inverse = inverse_root(s, x, eps);
        *kept = inverse;
        for ((d, g), w) in dx.iter_mut().zip(d_out).zip(weight) {
            *d = g * w;
        }
        let along = dot(s, dx, x) * inverse * inverse * inverse / width as f32;
        for (d, x) in dx.iter_mut().zip(x) {
            *d = *d * inverse - x * along;
        }
    }
}

/// Some columns' sums over all rows, in row order.
#[inline(always)]
fn weight_columns(x: &[f32], d_out: &[f32], inverse: &[f32], width: usize, first: usize, d_weight: &mut [f32]) {
    let columns = first..first + d_weight.len();
    for ((x, g), r) in x.chunks_exact(width).zip(d_out.chunks_exact(width)).zip(inverse) {
        for ((d, x), g) in d_weight.iter_mut().zip(&x[columns.clone()]).zip(&g[columns.clone()]) {
            *d += x * r * g;
        }
    }
}

/// The same, an element at a time.
#[cfg(test)]
pub(crate) mod plain {
    use crate::Tensor;

    fn inverse_root(x: &[f32], eps: f32) -> f32 {
        1.0 / (x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32 + eps).sqrt()
    }

    pub(crate) fn forward(x: &Tensor, weight: &Tensor, eps: f32, out: &mut Tensor) {
        let width = weight.len();
        out.resize(x.shape());
        for i in 0..x.len() {
            let run = &x.data()[i / width * width..][..width];
            out.data_mut()[i] = x.data()[i] * inverse_root(run, eps) * weight.data()[i % width];
        }
    }

    pub(crate) fn backward(
        x: &Tensor,
        weight: &Tensor,
        eps: f32,
        d_out: &Tensor,
        dx: &mut Tensor,
        d_weight: &mut Tensor,
    ) {
        let width = weight.len();
        dx.resize(x.shape());
        for start in (0..x.len()).step_by(width) {
            let (x, g) = (&x.data()[start..start + width], &d_out.data()[start..start + width]);
            let r = inverse_root(x, eps);
            let mean = (0..width).map(|j| weight.data()[j] * g[j] * x[j]).sum::<f32>() / width as f32;
            for j in 0..width {
                dx.data_mut()[start + j] = r * weight.data()[j] * g[j] - x[j] * r.powi(3) * mean;
                d_weight.data_mut()[j] += x[j] * r * g[j];
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        oracle::{self, assert_close, random},
        threads::Pool,
    };
    use proptest::prelude::*;

    const EPS: f32 = 1e-5;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn equals_its_twin(rows in 0usize..40, heads in 1usize..4, width in 1usize..70) {
            let (x, w, g) = (random(1, &[rows, heads * width]), random(2, &[width]), random(3, &[rows, heads * width]));
            let (mut fast, mut slow) = (Tensor::default(), Tensor::default());
            forward(&x, &w, EPS, &mut fast);
            plain::forward(&x, &w, EPS, &mut slow);
            assert_close(fast.data(), slow.data(), 1e-5, 1e-6);
            let (mut dw_fast, mut dw_slow) = (random(4, &[width]), random(4, &[width]));
            backward(&x, &w, EPS, &g, &mut fast, &mut dw_fast);
            plain::backward(&x, &w, EPS, &g, &mut slow, &mut dw_slow);
            let scale = slow.data().iter().fold(1.0f32, |m, x| m.max(x.abs())); // a run of one element cancels
            assert_close(fast.data(), slow.data(), 1e-4, 1e-5 * f64::from(scale));
            assert_close(dw_fast.data(), dw_slow.data(), 1e-5, 1e-5);
        }
    }

    #[test]
    fn gradients_agree_with_the_oracles() {
        for (rows, heads, width) in [(1, 1, 16), (5, 1, 33), (4, 3, 7)] {
            let (x, w, g) = (random(1, &[rows, heads * width]), random(2, &[width]), random(3, &[rows, heads * width]));
            let (mut dx, mut dw) = (Tensor::default(), Tensor::zeros(&[width]));
            backward(&x, &w, EPS, &g, &mut dx, &mut dw);
            let found = oracle::autograd(&[&x, &w], &[&g], |v| {
                let runs = v[0].reshape((rows * heads, width))?;
                let root = (runs.sqr()?.mean_keepdim(1)? + f64::from(EPS))?.sqrt()?;
                Ok(vec![runs.broadcast_div(&root)?.broadcast_mul(&v[1])?.reshape((rows, heads * width))?])
            });
            assert_close(dx.data(), &found.gradients[0], 1e-4, 1e-5);
            assert_close(dw.data(), &found.gradients[1], 1e-5, 1e-5);
            let mut out = Tensor::default();
            forward(&x, &w, EPS, &mut out);
            assert_close(out.data(), &found.outputs[0], 1e-5, 1e-6);
            oracle::assert_slopes(&[&x, &w], &[&g], &[&dx, &dw], 3e-3, 5e-3, |v| {
                let mut out = Tensor::default();
                forward(&v[0], &v[1], EPS, &mut out);
                vec![out]
            });
        }
    }

    #[test]
    fn bits_do_not_depend_on_threads() {
        let (x, w, g) = (random(1, &[700, 64]), random(2, &[64]), random(3, &[700, 64]));
        let run = |threads| {
            let (mut out, mut dx, mut dw) = (Tensor::default(), Tensor::default(), Tensor::zeros(&[64]));
            Pool::new(threads).expect("threads").run(|| {
                forward(&x, &w, EPS, &mut out);
                backward(&x, &w, EPS, &g, &mut dx, &mut dw);
            });
            (out, dx, dw)
        };
        assert_eq!(run(1), run(3));
    }
}
