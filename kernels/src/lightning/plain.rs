//! The operation as the formulas say it, for tests and for readers, in float64: forward by the recurrence, a token at a time;
//! backward by the sum over pairs of rows that the recurrence unrolls to.

use super::Heads;
use crate::{Forest, Tensor};

/// The rows that row `i` sees, in order.
fn seen(forest: &Forest, i: usize) -> Vec<usize> {
    let segment = forest.segment_of()[i] as usize;
    let own = forest.rows_of(segment).start..i + 1;
    forest.ancestors(segment).into_iter().chain([own]).flatten().collect()
}

fn dot(x: &[f32], y: &[f32]) -> f64 {
    x.iter().zip(y).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum()
}

fn round(x: &[f64], shape: &[usize]) -> Tensor {
    Tensor::from_vec(x.iter().map(|&x| x as f32).collect(), shape)
}

/// What [`super::forward`] computes: `out[T, heads · d]`, and the state `[heads, d, d]` after each row.
pub fn forward(shape: &Heads, forest: &Forest, q: &Tensor, k: &Tensor, v: &Tensor) -> (Tensor, Vec<Vec<f64>>) {
    let (d, heads) = (shape.head_dim, shape.slopes.len());
    let mut out = vec![0.0; q.len()];
    let mut states: Vec<Vec<f64>> = Vec::new();
    for i in 0..forest.rows() {
        let seen = seen(forest, i);
        let before = seen.len().checked_sub(2).map(|at| seen[at]);
        let mut state = before.map_or_else(|| vec![0.0; heads * d * d], |before| states[before].clone());
        for (h, slope) in shape.slopes.iter().enumerate() {
            let decay = (-f64::from(*slope)).exp();
            for r in 0..d {
                for c in 0..d {
                    let kv = &mut state[(h * d + r) * d + c];
                    *kv = decay * *kv + f64::from(k.row(i)[h * d + r]) * f64::from(v.row(i)[h * d + c]);
                    out[(i * heads + h) * d + c] += f64::from(q.row(i)[h * d + r]) * *kv;
                }
            }
        }
        states.push(state);
    }
    (round(&out, q.shape()), states)
}

/// What [`super::backward`] computes: gradients of q, k and v.
pub fn backward(shape: &Heads, forest: &Forest, q: &Tensor, k: &Tensor, v: &Tensor, d_out: &Tensor) -> [Tensor; 3] {
    let (d, heads) = (shape.head_dim, shape.slopes.len());
    let [mut dq, mut dk, mut dv] = [q, k, v].map(|x| vec![0.0; x.len()]);
    for i in 0..forest.rows() {
        for j in seen(forest, i) {
            let distance = f64::from(forest.positions()[i] - forest.positions()[j]);
            for (h, slope) in shape.slopes.iter().enumerate() {
                let head = |x: usize| (x * heads + h) * d..(x * heads + h + 1) * d;
                let (q, k, v) = (&q.data()[head(i)], &k.data()[head(j)], &v.data()[head(j)]);
                let d_out = &d_out.data()[head(i)];
                let decay = (-f64::from(*slope) * distance).exp();
                let (weight, d_score) = (decay * dot(q, k), decay * dot(d_out, v));
                for c in 0..d {
                    dq[head(i)][c] += d_score * f64::from(k[c]);
                    dk[head(j)][c] += d_score * f64::from(q[c]);
                    dv[head(j)][c] += weight * f64::from(d_out[c]);
                }
            }
        }
    }
    [round(&dq, q.shape()), round(&dk, k.shape()), round(&dv, v.shape())]
}
