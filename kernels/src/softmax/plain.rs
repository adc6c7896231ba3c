//! The operation as the formulas say it, for tests and for readers: a row at a time, in float64.

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

/// What [`super::forward`] computes: `out[T, heads · d]`, `lse[T, heads]`.
pub fn forward(shape: Heads, forest: &Forest, q: &Tensor, k: &Tensor, v: &Tensor) -> (Tensor, Tensor) {
    let (d, group) = (shape.head_dim, shape.heads / shape.kv_heads);
    let mut out = vec![0.0; q.len()];
    let mut lse = Vec::new();
    for i in 0..forest.rows() {
        for h in 0..shape.heads {
            let of = |x: usize| x * d..(x + 1) * d;
            let seen = seen(forest, i);
            let score = |&j: &usize| f64::from(shape.scale) * dot(&q.row(i)[of(h)], &k.row(j)[of(h / group)]);
            let scores: Vec<f64> = seen.iter().map(score).collect();
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = scores.iter().map(|s| (s - most).exp()).sum();
            for (&j, score) in seen.iter().zip(&scores) {
                let p = (score - most).exp() / sum;
                for (c, &v) in v.row(j)[of(h / group)].iter().enumerate() {
                    out[(i * shape.heads + h) * d + c] += p * f64::from(v);
                }
            }
            lse.push(most + sum.ln());
        }
    }
    (round(&out, q.shape()), round(&lse, &[forest.rows(), shape.heads]))
}

/// What [`super::backward`] computes: gradients of q, k and v.
pub fn backward(shape: Heads, forest: &Forest, q: &Tensor, k: &Tensor, v: &Tensor, d_out: &Tensor) -> [Tensor; 3] {
    let (d, group) = (shape.head_dim, shape.heads / shape.kv_heads);
    let (_, lse) = forward(shape, forest, q, k, v);
    let [mut dq, mut dk, mut dv] = [q, k, v].map(|x| vec![0.0; x.len()]);
    for i in 0..forest.rows() {
        for h in 0..shape.heads {
            let of = |x: usize| x * d..(x + 1) * d;
            let (query, d_out) = (&q.row(i)[of(h)], &d_out.row(i)[of(h)]);
            let scale = f64::from(shape.scale);
            let seen = seen(forest, i);
            let weights = seen.iter().map(|&j| {
                let score = scale * dot(query, &k.row(j)[of(h / group)]);
                (score - f64::from(lse.row(i)[h])).exp()
            });
            let weights: Vec<f64> = weights.collect();
            let d_weights: Vec<f64> = seen.iter().map(|&j| dot(d_out, &v.row(j)[of(h / group)])).collect();
            let delta: f64 = weights.iter().zip(&d_weights).map(|(p, dp)| p * dp).sum();
            for (&j, (p, dp)) in seen.iter().zip(weights.iter().zip(&d_weights)) {
                let d_score = scale * p * (dp - delta);
                let (at_q, at_k) = ((i * shape.heads + h) * d, (j * shape.kv_heads + h / group) * d);
                for c in 0..d {
                    dq[at_q + c] += d_score * f64::from(k.data()[at_k + c]);
                    dk[at_k + c] += d_score * f64::from(query[c]);
                    dv[at_k + c] += p * f64::from(d_out[c]);
                }
            }
        }
    }
    [round(&dq, q.shape()), round(&dk, k.shape()), round(&dv, v.shape())]
}
