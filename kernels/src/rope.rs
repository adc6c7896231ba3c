//! Partial rotary position embedding, rotate-half pairing (dims i and i + rotary_dim/2), on the first `rotary_dim` of each head.

use crate::Tensor;

/// Rotates `x[T, heads · head_dim]` in place by `positions[T]` with base `theta`. `rotary_dim` is even and ≤ `head_dim`.
pub fn forward(x: &mut Tensor, positions: &[u32], head_dim: usize, rotary_dim: usize, theta: f64) {
    todo!()
}

/// The inverse rotation, in place: the gradient of [`forward`].
pub fn backward(dx: &mut Tensor, positions: &[u32], head_dim: usize, rotary_dim: usize, theta: f64) {
    todo!()
}
