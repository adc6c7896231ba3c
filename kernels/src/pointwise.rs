//! Pointwise operations: SiLU, the sigmoid output gate, sums.

use crate::Tensor;

/// `out = silu(x)`.
pub fn silu(x: &Tensor, out: &mut Tensor) {
    todo!()
}

/// `dx = d_out ⊙ silu'(x)` (overwritten).
pub fn silu_backward(x: &Tensor, d_out: &Tensor, dx: &mut Tensor) {
    todo!()
}

/// `out = x ⊙ sigmoid(gate)`: the lightning layer's output gate (MiniMax-01).
pub fn gated(x: &Tensor, gate: &Tensor, out: &mut Tensor) {
    todo!()
}

/// Backward of [`gated`]; both gradients are overwritten.
pub fn gated_backward(x: &Tensor, gate: &Tensor, d_out: &Tensor, dx: &mut Tensor, d_gate: &mut Tensor) {
    todo!()
}

/// `out = a · x + b · y`: residual connections, plain and scaled (DeepNorm). `out` is resized.
pub fn combine(a: f32, x: &Tensor, b: f32, y: &Tensor, out: &mut Tensor) {
    todo!()
}

/// `y += a · x`.
pub fn add_scaled(a: f32, x: &Tensor, y: &mut Tensor) {
    todo!()
}
