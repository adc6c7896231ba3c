//! RMSNorm (Zhang & Sennrich, arXiv:1910.07467): y = x / sqrt(mean(x²) + eps) ⊙ weight, over the last dimension.

use crate::Tensor;

/// `out[T, H]` from `x[T, H]`, `weight[H]`. Statistics in f32.
pub fn forward(x: &Tensor, weight: &Tensor, eps: f32, out: &mut Tensor) {
    todo!()
}

/// `dx[T, H]` overwritten, `d_weight[H]` added to. Statistics are recomputed from `x`.
pub fn backward(x: &Tensor, weight: &Tensor, eps: f32, d_out: &Tensor, dx: &mut Tensor, d_weight: &mut Tensor) {
    todo!()
}
