//! Pointwise operations: SiLU, the sigmoid output gate, SwiGLU's product, sums.

use crate::{
    Tensor,
    blocks::{Rows, for_rows},
    simd::{Simd, dispatch, exp},
};

/// An element's work where an exponential is in it, against one where none is.
const EXPONENTIAL: usize = 4;

/// `parts[T, heads · d]` from `fused[T, heads · 3 · d]`, where each head's three lie side by side (MiniMax-01's layout): SiLU of each,
/// taken apart.
pub fn silu_apart(fused: &Tensor, d: usize, parts: [&mut Tensor; 3]) {
    let (rows, width) = (fused.rows(), fused.cols() / 3);
    let parts = parts.map(|p| {
        p.resize(&[rows, width]);
        Rows { data: p.data_mut(), cols: width }
    });
    for_rows(rows, 3 * EXPONENTIAL * width, parts, |first, parts| {
        let fused = &fused.data()[first * 3 * width..];
        let [a, b, c] = parts.map(|p| p.data.chunks_exact_mut(d));
        dispatch!(|s| for (fused, ((a, b), c)) in fused.chunks_exact(3 * d).zip(a.zip(b).zip(c)) {
            for (x, out) in fused.chunks_exact(d).zip([a, b, c]) {
                zip(
                    s,
                    [x],
                    [out],
                    #[inline(always)]
                    |[x]| [s.mul_f32s(x, sigmoid(s, x))],
                );
            }
        });
    });
}

/// Backward of [`silu_apart`]: `d_fused` (overwritten) from the gradients of the parts.
pub fn silu_apart_backward(fused: &Tensor, d: usize, d_parts: [&Tensor; 3], d_fused: &mut Tensor) {
    let (rows, width) = (fused.rows(), fused.cols() / 3);
    d_fused.resize(fused.shape());
    let out = Rows { data: d_fused.data_mut(), cols: 3 * width };
    for_rows(rows, 3 * EXPONENTIAL * width, out, |first, out| {
        let fused = &fused.data()[first * 3 * width..];
        let [a, b, c] = d_parts.map(|p| p.data()[first * width..].chunks_exact(d));
        let heads = fused.chunks_exact(3 * d).zip(out.data.chunks_exact_mut(3 * d)).zip(a.zip(b).zip(c));
        dispatch!(|s| for ((fused, out), ((a, b), c)) in heads {
            for ((x, out), g) in fused.chunks_exact(d).zip(out.chunks_exact_mut(d)).zip([a, b, c]) {
                zip(
                    s,
                    [x, g],
                    [out],
                    #[inline(always)]
                    |[x, g]| [s.mul_f32s(g, silu_and_slope(s, x).1)],
                );
            }
        });
    });
}

/// `out = x ⊙ sigmoid(gate)`: the lightning layer's output gate (MiniMax-01).
pub fn gated(x: &Tensor, gate: &Tensor, out: &mut Tensor) {
    assert_eq!(x.len(), gate.len(), "one gate an element");
    out.resize(x.shape());
    for_rows(x.len(), EXPONENTIAL, elements(out), |first, out| {
        let here = first..first + out.data.len();
        let inputs = [&x.data()[here.clone()], &gate.data()[here]];
        dispatch!(|s| zip(
            s,
            inputs,
            [out.data],
            #[inline(always)]
            |[x, gate]| [s.mul_f32s(x, sigmoid(s, gate))]
        ));
    });
}

/// Backward of [`gated`]; both gradients are overwritten.
pub fn gated_backward(x: &Tensor, gate: &Tensor, d_out: &Tensor, dx: &mut Tensor, d_gate: &mut Tensor) {
    dx.resize(x.shape());
    d_gate.resize(gate.shape());
    for_rows(x.len(), EXPONENTIAL, (elements(dx), elements(d_gate)), |first, (dx, d_gate)| {
        let here = first..first + dx.data.len();
        let inputs = [&x.data()[here.clone()], &gate.data()[here.clone()], &d_out.data()[here]];
        dispatch!(|s| zip(
            s,
            inputs,
            [dx.data, d_gate.data],
            #[inline(always)]
            |[x, gate, g]| {
                let open = sigmoid(s, gate);
                let dx = s.mul_f32s(g, open);
                let closed = s.sub_f32s(s.splat_f32s(1.0), open);
                [dx, s.mul_f32s(s.mul_f32s(dx, x), closed)]
            }
        ));
    });
}

/// `out = silu(gate) ⊙ up`, on this thread: the product in a SwiGLU feed-forward (Shazeer, arXiv:2002.05202).
pub(crate) fn swiglu_slice(gate: &[f32], up: &[f32], out: &mut [f32]) {
    dispatch!(|s| zip(
        s,
        [gate, up],
        [out],
        #[inline(always)]
        |[gate, up]| { [s.mul_f32s(s.mul_f32s(gate, sigmoid(s, gate)), up)] }
    ));
}

/// `out = a · x + b · y`: residual connections, plain and scaled (DeepNorm). `out` is resized.
pub fn combine(a: f32, x: &Tensor, b: f32, y: &Tensor, out: &mut Tensor) {
    assert_eq!(x.len(), y.len(), "shapes agree");
    out.resize(x.shape());
    for_rows(x.len(), 1, elements(out), |first, out| {
        let here = first..first + out.data.len();
        let inputs = [&x.data()[here.clone()], &y.data()[here]];
        dispatch!(|s| zip(
            s,
            inputs,
            [out.data],
            #[inline(always)]
            |[x, y]| { [s.mul_add_f32s(s.splat_f32s(a), x, s.mul_f32s(s.splat_f32s(b), y))] }
        ));
    });
}

/// `y += a · x`.
pub fn add_scaled(a: f32, x: &Tensor, y: &mut Tensor) {
    assert_eq!(x.len(), y.len(), "shapes agree");
    for_rows(x.len(), 1, elements(y), |first, y| {
        let x = &x.data()[first..first + y.data.len()];
        dispatch!(|s| crate::simd::axpy(s, a, x, y.data));
    });
}

fn elements(t: &mut Tensor) -> Rows<'_> {
    Rows { data: t.data_mut(), cols: 1 }
}

/// 1 / (1 + e^-x).
#[inline(always)]
fn sigmoid<S: Simd>(s: S, x: S::f32s) -> S::f32s {
    let one = s.splat_f32s(1.0);
    s.div_f32s(one, s.add_f32s(one, exp(s, s.neg_f32s(x))))
}

/// silu(x) = x σ(x), and silu'(x) = σ(x) + silu(x) · (1 − σ(x)).
#[inline(always)]
pub(crate) fn silu_and_slope<S: Simd>(s: S, x: S::f32s) -> (S::f32s, S::f32s) {
    let open = sigmoid(s, x);
    let silu = s.mul_f32s(x, open);
    (silu, s.mul_add_f32s(silu, s.sub_f32s(s.splat_f32s(1.0), open), open))
}

/// Sets `outputs` to `f(inputs)`, element by element; all are equally long.
#[inline(always)]
pub(crate) fn zip<S: Simd, const I: usize, const O: usize>(
    s: S,
    inputs: [&[f32]; I],
    outputs: [&mut [f32]; O],
    f: impl Fn([S::f32s; I]) -> [S::f32s; O],
) {
    let len = outputs.first().map_or(0, |o| o.len());
    let full = len / S::F32_LANES;
    let inputs = inputs.map(|x| S::as_simd_f32s(&x[..len]));
    let mut outputs = outputs.map(|x| S::as_mut_simd_f32s(&mut x[..len]));
    for i in 0..full {
        let y = f(inputs.map(|x| x.0[i]));
        for (o, y) in outputs.iter_mut().zip(y) {
            o.0[i] = y;
        }
    }
    if full * S::F32_LANES < len {
        let y = f(inputs.map(|x| s.partial_load_f32s(x.1)));
        for (o, y) in outputs.iter_mut().zip(y) {
            s.partial_store_f32s(o.1, y);
        }
    }
}

/// The same functions of one element.
#[cfg(test)]
pub(crate) mod plain {
    pub(crate) fn sigmoid(x: f32) -> f32 {
        1.0 / (1.0 + (-x).exp())
    }

    pub(crate) fn silu(x: f32) -> f32 {
        x * sigmoid(x)
    }

    pub(crate) fn silu_slope(x: f32) -> f32 {
        sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x)))
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

    fn twin(inputs: &[&Tensor], f: impl Fn(&[f32]) -> f32) -> Vec<f32> {
        (0..inputs[0].len()).map(|i| f(&inputs.iter().map(|t| t.data()[i]).collect::<Vec<_>>())).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn equal_their_twins(len in 0usize..70, scale in prop_oneof![Just(1.0f32), Just(30.0), Just(1000.0)]) {
            let spread = |seed| {
                Tensor::from_vec(random(seed, &[len]).data().iter().map(|x| x * scale).collect(), &[len])
            };
            let (x, y, g) = (spread(1), spread(2), random(3, &[len]));
            let (mut a, mut b) = (Tensor::default(), Tensor::default());
            let (rtol, atol) = (1e-5, 1e-30);
            let slope_atol = 1e-6 * f64::from(scale); // the slope cancels where it crosses 0
            gated(&x, &y, &mut a);
            assert_close(a.data(), &twin(&[&x, &y], |v| v[0] * plain::sigmoid(v[1])), rtol, atol);
            gated_backward(&x, &y, &g, &mut a, &mut b);
            assert_close(a.data(), &twin(&[&y, &g], |v| v[1] * plain::sigmoid(v[0])), rtol, atol);
            let d_gate = |v: &[f32]| v[2] * v[0] * plain::sigmoid(v[1]) * (1.0 - plain::sigmoid(v[1]));
            assert_close(b.data(), &twin(&[&x, &y, &g], d_gate), rtol, slope_atol);
            swiglu_slice(x.data(), y.data(), a.data_mut());
            assert_close(a.data(), &twin(&[&x, &y], |v| plain::silu(v[0]) * v[1]), rtol, atol);
            combine(1.5, &x, -0.5, &y, &mut a);
            assert_close(a.data(), &twin(&[&x, &y], |v| 1.5 * v[0] - 0.5 * v[1]), rtol, slope_atol);
            add_scaled(0.25, &g, &mut a);
            assert_close(a.data(), &twin(&[&x, &y, &g], |v| 1.5 * v[0] - 0.5 * v[1] + 0.25 * v[2]), rtol, slope_atol);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn parts_are_taken_from_their_heads(rows in 0usize..9, heads in 1usize..4, d in 1usize..40) {
            let (fused, g) = (random(1, &[rows, heads * 3 * d]), random(2, &[rows, heads * 3 * d]));
            let part = |t: &Tensor, which: usize| -> Vec<f32> {
                t.data().chunks_exact(3 * d).flat_map(|head| head[which * d..(which + 1) * d].to_vec()).collect()
            };
            let [mut a, mut b, mut c, mut d_fused] = [(); 4].map(|()| Tensor::default());
            silu_apart(&fused, d, [&mut a, &mut b, &mut c]);
            for (which, found) in [&a, &b, &c].into_iter().enumerate() {
                let truth: Vec<f32> = part(&fused, which).into_iter().map(plain::silu).collect();
                assert_close(found.data(), &truth, 1e-5, 1e-30);
            }
            let d_parts = [0, 1, 2].map(|which| Tensor::from_vec(part(&g, which), &[rows, heads * d]));
            silu_apart_backward(&fused, d, d_parts.each_ref(), &mut d_fused);
            assert_close(d_fused.data(), &twin(&[&fused, &g], |v| v[1] * plain::silu_slope(v[0])), 1e-5, 1e-6);
        }
    }

    fn candle_sigmoid(x: &candle::Tensor) -> candle::Result<candle::Tensor> {
        (x.neg()?.exp()? + 1.0)?.recip()
    }

    #[test]
    fn gradients_agree_with_the_oracles() {
        for len in [1, 35] {
            let (x, y, g) = (random(1, &[len]), random(2, &[len]), random(3, &[len]));
            let (mut a, mut b) = (Tensor::default(), Tensor::default());
            let run = |f: fn(&Tensor, &Tensor, &mut Tensor)| {
                move |v: &[Tensor]| {
                    let mut out = Tensor::default();
                    f(&v[0], &v[1], &mut out);
                    vec![out]
                }
            };

            let [mut q, mut k, mut v] = [(); 3].map(|()| Tensor::default());
            let fused = random(4, &[len, 6]);
            let d_parts = [5, 6, 7].map(|seed| random(seed, &[len, 2]));
            silu_apart_backward(&fused, 1, d_parts.each_ref(), &mut a);
            let found = oracle::autograd(&[&fused], &d_parts.each_ref(), |v| {
                let silu = (&v[0] * candle_sigmoid(&v[0])?)?.reshape((len, 2, 3))?;
                (0..3).map(|part| silu.narrow(2, part, 1)?.reshape((len, 2))).collect()
            });
            assert_close(a.data(), &found.gradients[0], 1e-5, 1e-6);
            silu_apart(&fused, 1, [&mut q, &mut k, &mut v]);
            for (part, truth) in [q, k, v].iter().zip(&found.outputs) {
                assert_close(part.data(), truth, 1e-5, 1e-6);
            }

            gated_backward(&x, &y, &g, &mut a, &mut b);
            let found = oracle::autograd(&[&x, &y], &[&g], |v| Ok(vec![(&v[0] * candle_sigmoid(&v[1])?)?]));
            assert_close(a.data(), &found.gradients[0], 1e-5, 1e-6);
            assert_close(b.data(), &found.gradients[1], 1e-5, 1e-6);
            oracle::assert_slopes(&[&x, &y], &[&g], &[&a, &b], 1e-2, 1e-3, run(gated));
        }
    }

    #[test]
    fn bits_depend_neither_on_threads_nor_on_where_an_element_lies() {
        let (x, y) = (random(1, &[9001]), random(2, &[9001]));
        let run = |threads| {
            let mut out = Tensor::default();
            Pool::new(threads).expect("threads").run(|| gated(&x, &y, &mut out));
            out
        };
        let whole = run(1);
        assert_eq!(whole, run(3));
        for i in [0, 7, 8999, 9000] {
            let one = |t: &Tensor| Tensor::from_vec(vec![t.data()[i]], &[1]);
            let mut out = Tensor::default();
            gated(&one(&x), &one(&y), &mut out);
            assert_eq!(out.data()[0], whole.data()[i]);
        }
    }
}
