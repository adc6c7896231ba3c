//! The independent judges of every backward, for tests only: float64 autograd (candle) and finite differences along random
//! directions. Not a place for an operation's own cases: those stand beside the operation.

use crate::Tensor;
use candle_core as candle;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A tensor of uniform draws from [-1, 1), the same for the same seed.
pub fn random(seed: u64, shape: &[usize]) -> Tensor {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    Tensor::from_vec((0..shape.iter().product()).map(|_| rng.random_range(-1.0..1.0)).collect(), shape)
}

/// What [`autograd`] finds, row-major.
pub struct Autograd {
    /// Values of the outputs.
    pub outputs: Vec<Vec<f64>>,
    /// d(Σ weights · outputs) / d(input), one an input.
    pub gradients: Vec<Vec<f64>>,
}

/// Runs `f` on float64 copies of `inputs` and differentiates the sum of its outputs, each weighed elementwise by its entry of `weights`.
/// Panics where an input gets no gradient (candle drops some silently), and where the gradient disagrees with a central
/// difference of `f` itself in float64.
#[track_caller]
pub fn autograd(
    inputs: &[&Tensor],
    weights: &[&Tensor],
    f: impl Fn(&[candle::Tensor]) -> candle::Result<Vec<candle::Tensor>>,
) -> Autograd {
    let double = |t: &Tensor| t.data().iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
    let on_cpu = |data: &[f64], shape: &[usize]| {
        candle::Var::from_slice(data, shape, &candle::Device::Cpu).expect("a shape fits its data")
    };
    let run = |data: &[Vec<f64>]| {
        let vars: Vec<_> = data.iter().zip(inputs).map(|(d, t)| on_cpu(d, t.shape())).collect();
        let args: Vec<_> = vars.iter().map(|v| v.as_tensor().clone()).collect();
        let outputs = f(&args).expect("the oracle's closure runs");
        assert_eq!(outputs.len(), weights.len(), "one weight tensor an output");
        let mut loss = candle::Tensor::zeros((), candle::DType::F64, &candle::Device::Cpu).expect("a scalar");
        for (out, w) in outputs.iter().zip(weights) {
            assert_eq!(out.dims(), w.shape(), "the oracle's output has its weights' shape");
            let weighed = (out * on_cpu(&double(w), w.shape()).as_tensor()).and_then(|t| t.sum_all());
            loss = (loss + weighed.expect("shapes are equal")).expect("scalars add");
        }
        (vars, outputs, loss)
    };
    let at: Vec<_> = inputs.iter().map(|t| double(t)).collect();
    let (vars, outputs, loss) = run(&at);
    let store = loss.backward().expect("backward runs");
    let flat = |t: &candle::Tensor| t.flatten_all().and_then(|t| t.to_vec1::<f64>()).expect("a float64 tensor");
    let gradients: Vec<_> = vars
        .iter()
        .enumerate()
        .map(|(i, v)| flat(store.get(v).unwrap_or_else(|| panic!("input {i} got no gradient"))))
        .collect();
    let value = |data: &[Vec<f64>]| run(data).2.to_scalar::<f64>().expect("a scalar");
    check_slope(17, &at, &gradients, 1e-5, 1e-5, |x| x, value);
    Autograd { outputs: outputs.iter().map(flat).collect(), gradients }
}

/// Checks hand-written `gradients` of Σ weights · f(inputs) against central differences of the f32 operation itself, along
/// three random directions of ±1 a coordinate. `step` balances rounding (small steps) against curvature (large ones):
/// 1e-2 suits smooth operations near 1. The error may be `rtol` of the gradient's norm.
#[track_caller]
pub fn assert_slopes(
    inputs: &[&Tensor],
    weights: &[&Tensor],
    gradients: &[&Tensor],
    step: f64,
    rtol: f64,
    mut f: impl FnMut(&[Tensor]) -> Vec<Tensor>,
) {
    let double = |ts: &[&Tensor]| -> Vec<Vec<f64>> {
        ts.iter().map(|t| t.data().iter().map(|&x| f64::from(x)).collect()).collect()
    };
    for seed in 1..4 {
        let value = |data: &[Vec<f64>]| {
            let single = |d: &[f64]| d.iter().map(|&x| x as f32).collect();
            let args: Vec<_> = data.iter().zip(inputs).map(|(d, t)| Tensor::from_vec(single(d), t.shape())).collect();
            let outputs = f(&args);
            assert_eq!(outputs.len(), weights.len(), "one weight tensor an output");
            let pairs = outputs.iter().zip(weights).flat_map(|(o, w)| {
                assert_eq!(o.shape(), w.shape(), "an output has its weights' shape");
                o.data().iter().zip(w.data())
            });
            pairs.map(|(&o, &w)| f64::from(o) * f64::from(w)).sum()
        };
        check_slope(seed, &double(inputs), &double(gradients), step, rtol, |x| f64::from(x as f32), value);
    }
}

/// One random direction: the central difference of `value` against ⟨gradients, direction⟩. `round` is the precision in which
/// `value` will read a coordinate, so that the difference is taken over the distance really gone.
#[track_caller]
fn check_slope(
    seed: u64,
    at: &[Vec<f64>],
    gradients: &[Vec<f64>],
    step: f64,
    rtol: f64,
    round: impl Fn(f64) -> f64,
    mut value: impl FnMut(&[Vec<f64>]) -> f64,
) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let (mut up, mut down) = (at.to_vec(), at.to_vec());
    let (mut expected, mut norm) = (0.0, 0.0);
    for (i, g) in gradients.iter().enumerate() {
        assert_eq!(g.len(), at[i].len(), "gradient {i} has its input's shape");
        for (j, g) in g.iter().enumerate() {
            let d = if rng.random::<bool>() { step } else { -step };
            up[i][j] = round(at[i][j] + d);
            down[i][j] = round(at[i][j] - d);
            expected += g * (up[i][j] - down[i][j]) / (2.0 * step);
            norm += g * g;
        }
    }
    let slope = (value(&up) - value(&down)) / (2.0 * step);
    let allowed = rtol * norm.sqrt() + 1e-9;
    assert!(
        (slope - expected).abs() <= allowed,
        "slope {slope} along direction {seed}, gradient says {expected} ± {allowed}"
    );
}

/// Panics unless |actual − expected| ≤ atol + rtol · |expected| everywhere; a NaN on either side fails.
#[track_caller]
pub fn assert_close<A: Copy + Into<f64>, B: Copy + Into<f64>>(actual: &[A], expected: &[B], rtol: f64, atol: f64) {
    assert_eq!(actual.len(), expected.len(), "lengths differ");
    for (i, (&a, &b)) in actual.iter().zip(expected).enumerate() {
        let (a, b): (f64, f64) = (a.into(), b.into());
        assert!((a - b).abs() <= atol + rtol * b.abs(), "element {i} of {}: {a} is not {b}", actual.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn autograd_knows_a_product() {
        let (x, y, w) = (random(1, &[3, 2]), random(2, &[3, 2]), random(3, &[3, 2]));
        let found = autograd(&[&x, &y], &[&w], |v| Ok(vec![(&v[0] * &v[1])?]));
        let expected: Vec<f32> = w.data().iter().zip(y.data()).map(|(w, y)| w * y).collect();
        assert_close(&found.gradients[0], &expected, 1e-6, 1e-7);
    }

    #[test]
    #[should_panic(expected = "input 1 got no gradient")]
    fn autograd_refuses_a_dropped_input() {
        let (x, w) = (random(1, &[2]), random(3, &[2]));
        autograd(&[&x, &x], &[&w], |v| Ok(vec![(&v[0] + &v[1].detach())?]));
    }

    #[test]
    fn slopes_accept_the_gradient_of_a_square() {
        let (x, w) = (random(1, &[7]), random(3, &[7]));
        let g: Vec<f32> = x.data().iter().zip(w.data()).map(|(x, w)| 2.0 * x * w).collect();
        assert_slopes(&[&x], &[&w], &[&Tensor::from_vec(g, &[7])], 1e-2, 1e-3, |v| vec![square(&v[0])]);
    }

    #[test]
    #[should_panic(expected = "gradient says")]
    fn slopes_refuse_a_wrong_gradient() {
        let (x, w) = (random(1, &[7]), random(3, &[7]));
        assert_slopes(&[&x], &[&w], &[&x], 1e-2, 1e-2, |v| vec![square(&v[0])]);
    }

    #[test]
    #[should_panic(expected = "element 1")]
    fn closeness_refuses_nan() {
        assert_close(&[0.0, f32::NAN], &[0.0, f32::NAN], 1.0, 1.0);
    }

    fn square(x: &Tensor) -> Tensor {
        Tensor::from_vec(x.data().iter().map(|x| x * x).collect(), x.shape())
    }
}
