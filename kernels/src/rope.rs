//! Partial rotary position embedding (Su et al., arXiv:2104.09864), rotate-half pairing (dims i and i + rotary_dim/2), on
//! the first `rotary_dim` of each head: a pair at position p turns by p · theta^(−2i/rotary_dim).
//!
//! Angles, sines and cosines are taken in f64, so that far positions are as exact as near ones; models whose own code
//! takes angles in f32 differ from this by up to p · 6e-8 radians.

use crate::blocks::{Rows, for_rows};
use crate::simd::dispatch;
use crate::{Tensor, scratch};

/// Rotates `x[T, heads · head_dim]` in place by `positions[T]` with base `theta`. `rotary_dim` is even and ≤ `head_dim`;
/// other shapes panic: a programmer's error.
pub fn forward(x: &mut Tensor, positions: &[u32], head_dim: usize, rotary_dim: usize, theta: f64) {
    rotate(x, positions, head_dim, rotary_dim, theta, 1.0);
}

/// The inverse rotation, in place: the gradient of [`forward`].
pub fn backward(dx: &mut Tensor, positions: &[u32], head_dim: usize, rotary_dim: usize, theta: f64) {
    rotate(dx, positions, head_dim, rotary_dim, theta, -1.0);
}

/// What a sine and a cosine cost, in pointwise operations.
const TURN_COST: usize = 30;

fn rotate(x: &mut Tensor, positions: &[u32], head_dim: usize, rotary_dim: usize, theta: f64, direction: f64) {
    let (rows, cols, half) = (x.rows(), x.cols(), rotary_dim / 2);
    assert_eq!(rows, positions.len(), "a position a row");
    assert!(rotary_dim.is_multiple_of(2) && rotary_dim <= head_dim && cols.is_multiple_of(head_dim), "heads fit");
    let (Some(&low), Some(&high)) = (positions.iter().min(), positions.iter().max()) else { return };
    if half == 0 {
        return;
    }
    let speeds: Vec<f64> = (0..half).map(|i| direction * theta.powf(-2.0 * i as f64 / rotary_dim as f64)).collect();
    let turn_to = |position: u32, turn: &mut [f32]| {
        let (cos, sin) = turn.split_at_mut(half);
        for ((cos, sin), speed) in cos.iter_mut().zip(sin).zip(&speeds) {
            let (s, c) = (f64::from(position) * speed).sin_cos();
            (*cos, *sin) = (c as f32, s as f32);
        }
    };
    // Many short sequences share few positions: their turns are taken once. The rows of a long one take their own.
    let shared = (high - low) as usize + 1;
    let table = if shared <= rows / 2 {
        let mut table = vec![0.0; shared * rotary_dim];
        for (position, turn) in (low..=high).zip(table.chunks_exact_mut(rotary_dim)) {
            turn_to(position, turn);
        }
        table
    } else {
        Vec::new()
    };
    let cost = cols + if table.is_empty() { TURN_COST * rotary_dim } else { 0 };
    for_rows(rows, cost, Rows { data: x.data_mut(), cols }, |first, x| {
        scratch::with(rotary_dim, |own| {
            dispatch!(|_s| for (row, position) in x.data.chunks_exact_mut(cols).zip(&positions[first..]) {
                let turn = if table.is_empty() {
                    turn_to(*position, own);
                    &*own
                } else {
                    &table[(position - low) as usize * rotary_dim..][..rotary_dim]
                };
                for head in row.chunks_exact_mut(head_dim) {
                    turn_head(&mut head[..rotary_dim], turn);
                }
            });
        });
    });
}

/// Turns the pairs of one head by `turn`: cosines, then sines.
#[inline(always)]
fn turn_head(x: &mut [f32], turn: &[f32]) {
    let half = turn.len() / 2;
    let (cos, sin) = turn.split_at(half);
    let (a, b) = x.split_at_mut(half);
    for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    }
}

/// The operation as the formula says it, a pair at a time in f64: `forward`, and with `direction` −1 `backward`.
pub mod plain {
    use crate::Tensor;

    /// `x` rotated; see [`super::forward`].
    pub fn rotate(
        x: &Tensor,
        positions: &[u32],
        head_dim: usize,
        rotary_dim: usize,
        theta: f64,
        direction: f64,
    ) -> Tensor {
        let mut out = x.clone();
        for (row, &position) in positions.iter().enumerate() {
            for head in (0..x.cols()).step_by(head_dim) {
                for i in 0..rotary_dim / 2 {
                    let (a, b) = (head + i, head + i + rotary_dim / 2);
                    let angle = direction * f64::from(position) / theta.powf(2.0 * i as f64 / rotary_dim as f64);
                    let (sin, cos) = angle.sin_cos();
                    let (xa, xb) = (f64::from(x.row(row)[a]), f64::from(x.row(row)[b]));
                    out.row_mut(row)[a] = (xa * cos - xb * sin) as f32;
                    out.row_mut(row)[b] = (xb * cos + xa * sin) as f32;
                }
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forest::testing::{forests, random_forest};
    use crate::oracle::{assert_close, assert_slopes, autograd, random};
    use crate::threads::Pool;
    use candle_core as candle;
    use proptest::prelude::*;

    /// Heads, width, rotary dims.
    const SHAPES: [(usize, usize, usize); 5] = [(1, 2, 2), (3, 5, 2), (2, 16, 8), (1, 24, 24), (2, 40, 34)];

    fn rotated(x: &Tensor, positions: &[u32], head_dim: usize, rotary_dim: usize) -> Tensor {
        let mut out = x.clone();
        forward(&mut out, positions, head_dim, rotary_dim, 1e4);
        out
    }

    proptest! {
        #[test]
        fn agrees_with_its_plain_twin(forest in forests(), shape in prop::sample::select(&SHAPES[..]), far in 0u32..2_000_000) {
            let (heads, d, rotary) = shape;
            let x = random(u64::from(far), &[forest.rows(), heads * d]);
            // Near positions share turns, far and sparse ones do not.
            let sparse: Vec<u32> = forest.positions().iter().map(|p| p * 1000 + far).collect();
            for positions in [forest.positions(), &sparse] {
                let out = rotated(&x, positions, d, rotary);
                assert_close(out.data(), plain::rotate(&x, positions, d, rotary, 1e4, 1.0).data(), 1e-5, 1e-6);
                let mut back = out.clone();
                backward(&mut back, positions, d, rotary, 1e4);
                assert_close(back.data(), x.data(), 1e-5, 1e-6);
                assert_close(back.data(), plain::rotate(&out, positions, d, rotary, 1e4, -1.0).data(), 1e-5, 1e-6);
                for (row, out) in x.data().chunks(d).zip(out.data().chunks(d)) {
                    prop_assert_eq!(&row[rotary..], &out[rotary..]);
                }
            }
        }
    }

    #[test]
    fn gradients_are_those_of_autograd_and_of_differences() {
        for (seed, (heads, d, rotary)) in SHAPES.into_iter().enumerate() {
            let forest = random_forest(seed as u64);
            let n = forest.rows();
            let (x, d_out) = (random(1, &[n, heads * d]), random(2, &[n, heads * d]));
            let angle = |i: usize| {
                let (p, i) = (f64::from(forest.positions()[i / (rotary / 2)]), (i % (rotary / 2)) as f64);
                p / 1e4f64.powf(2.0 * i / rotary as f64)
            };
            let turns: Vec<f64> = (0..n * rotary / 2).map(angle).collect();
            let truth = autograd(&[&x], &[&d_out], |x| {
                let turns = candle::Tensor::from_slice(&turns, (n, rotary / 2), &candle::Device::Cpu)?;
                let (cos, sin) = (turns.cos()?, turns.sin()?);
                let mut parts = Vec::new();
                for h in 0..heads {
                    let a = x[0].narrow(1, h * d, rotary / 2)?;
                    let b = x[0].narrow(1, h * d + rotary / 2, rotary / 2)?;
                    parts.push(((&a * &cos)? - (&b * &sin)?)?);
                    parts.push(((&b * &cos)? + (&a * &sin)?)?);
                    if rotary < d {
                        parts.push(x[0].narrow(1, h * d + rotary, d - rotary)?);
                    }
                }
                Ok(vec![candle::Tensor::cat(&parts, 1)?])
            });
            assert_close(rotated(&x, forest.positions(), d, rotary).data(), &truth.outputs[0], 1e-5, 1e-6);
            let mut dx = d_out.clone();
            backward(&mut dx, forest.positions(), d, rotary, 1e4);
            assert_close(dx.data(), &truth.gradients[0], 1e-5, 1e-6);
            assert_slopes(&[&x], &[&d_out], &[&dx], 1e-2, 1e-3, |x| {
                vec![rotated(&x[0], forest.positions(), d, rotary)]
            });
        }
    }

    #[test]
    fn bits_depend_neither_on_threads_nor_on_company() {
        let positions: Vec<u32> = (0..6000).map(|i| i % 50).collect();
        let x = random(1, &[6000, 24]);
        let one = Pool::new(1).expect("threads").run(|| rotated(&x, &positions, 12, 8));
        for threads in 2..=3 {
            assert_eq!(Pool::new(threads).expect("threads").run(|| rotated(&x, &positions, 12, 8)), one);
        }
        let alone = Tensor::from_vec(x.row(77).to_vec(), &[1, 24]);
        assert_eq!(rotated(&alone, &positions[77..78], 12, 8).data(), one.row(77));
    }

    #[test]
    fn no_position_or_no_rotary_dim_changes_nothing() {
        let x = random(1, &[3, 8]);
        assert_eq!(rotated(&x, &[0; 3], 4, 4), x);
        assert_eq!(rotated(&x, &[5, 6, 7], 4, 0), x);
        assert_eq!(rotated(&Tensor::zeros(&[0, 8]), &[], 4, 4).shape(), [0, 8]);
    }
}
